//! Who runs charon. One that listens already is used: a service manager's, or a container's beside
//! this one. Else a process of ours runs one, made before weftd gives up its rights, which charon
//! needs. It starts charon again if that ends, and outlives weftd: the keys of the tunnels are in
//! charon, so a restart of weftd loses nothing.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use procfs::process::{Process, all_processes};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::backend::extension::command::WITHHELD;

use super::client::{Client, DIRECTORY, SOCKET, ViciError};
use super::session::Session;

/// What the process of ours calls itself, instead of `weftd`.
const KEEPER: &str = "weft-charon";

/// Where flannel's images, distributions and Debian have charon.
const DIRECTORIES: [&str; 4] =
    ["/usr/lib/ipsec", "/usr/lib/strongswan", "/usr/libexec/strongswan", "/usr/libexec/ipsec"];

/// What charon that starts reads, and writes its number to.
const PID_FILE: &str = "/var/run/charon.pid";

/// charon starts within a second, and tests run on busy machines.
const START_MAX: Duration = Duration::from_secs(20);
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// It tells each peer of its end, and waits up to a second for threads.
const STOP_MAX: Duration = Duration::from_secs(10);

/// Before charon is started again, doubled each time that it ended within `STEADY`.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));
const STEADY: Duration = Duration::from_secs(60);

/// There is no charon.
#[derive(Debug, thiserror::Error)]
pub enum CharonError {
    /// None listens, and none is installed.
    #[error(
        "the ipsec backend needs charon of strongSwan, which does not listen at {SOCKET} and is \
         not installed (Debian's package is strongswan-charon); install it, run it in a container \
         that shares /run and the network with this one, or choose another Backend.Type"
    )]
    Missing(#[source] ViciError),
    /// The process that runs it can't be made.
    #[error("{} cannot be started", .0.display())]
    Unstartable(PathBuf, #[source] io::Error),
    /// It was started in vain.
    #[error(
        "{} was started and does not stay, or does not listen at {SOCKET}: it must be able \
         to write to {DIRECTORY}, or run as a service of its own; or another one runs and has lost \
         its socket (`pgrep charon`): end that. What it logs, mostly to the system's log, may say \
         more",
        .0.display()
    )]
    Silent(PathBuf, #[source] ViciError),
    /// The one of ours goes on.
    #[error("charon, which an earlier weftd has started, cannot be ended")]
    Unended(#[source] io::Error),
    /// It can't be talked to, or refuses what all that follows needs.
    #[error("charon is of no use")]
    Useless(#[from] ViciError),
}

/// A session with the charon that runs, or else with one that is started.
pub(super) async fn find_or_start() -> Result<Session, CharonError> {
    let absent = match Client::connect().await {
        Err(error @ ViciError::Absent(_)) => error,
        connected => return Ok(Session::new(connected?).await?),
    };
    let Some(program) = installed() else { return Err(CharonError::Missing(absent)) };
    if keeper().is_some() {
        // It may be about to start charon again.
        match session().await {
            Err(ViciError::Absent(_)) => {}
            connected => return Ok(connected?),
        }
        warn!("charon, which an earlier weftd has started, listens no more; starting it anew");
        end_ours().await?;
    }
    let started = start(&program);
    let keeper = started.map_err(|error| CharonError::Unstartable(program.clone(), error))?;
    match session().await {
        Err(error @ (ViciError::Absent(_) | ViciError::Broken(..))) => {
            if let Some(id) = keeper.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
                kill_process(id, Signal::TERM).ok();
            }
            Err(CharonError::Silent(program, error))
        }
        connected => Ok(connected?),
    }
}

/// A session with a charon that starts, and may end once more before it stays.
async fn session() -> Result<Session, ViciError> {
    let give_up = Instant::now() + START_MAX;
    loop {
        let made = async { Session::new(Client::connect().await?).await };
        match made.await {
            Err(ViciError::Absent(_) | ViciError::Broken(..)) if Instant::now() < give_up => {
                sleep(LOOK_PAUSE).await;
            }
            made => return made,
        }
    }
}

fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories =
        DIRECTORIES.map(PathBuf::from).into_iter().chain(std::env::split_paths(&path));
    directories.map(|directory| directory.join("charon")).find(|it| it.is_file())
}

/// Makes the process that runs charon: this program under another name.
fn start(program: &Path) -> io::Result<Child> {
    info!("no charon listens at {SOCKET}; starting {}", program.display());
    let mut command = Command::new("/proc/self/exe");
    command.arg0(KEEPER).arg(program);
    for name in WITHHELD {
        command.env_remove(name);
    }
    // What ends weftd from a terminal must not reach it.
    command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0).spawn()
}

/// The process of ours in this network namespace, if there is one. Needs the rights of a start.
fn keeper() -> Option<Process> {
    let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let own = network("self")?;
    let is_named = |process: &Process| {
        process.cmdline().is_ok_and(|words| words.first().is_some_and(|name| name == KEEPER))
    };
    let mut all = all_processes().ok()?.flatten();
    all.find(|it| is_named(it) && network(&it.pid.to_string()).as_ref() == Some(&own))
}

/// Whether charon is run by a process of ours.
pub(super) fn is_ours() -> bool {
    keeper().is_some()
}

/// Ends charon if it is ours; false if it is not.
pub(super) async fn end_ours() -> Result<bool, CharonError> {
    end_keeper().await.map_err(CharonError::Unended)
}

async fn end_keeper() -> io::Result<bool> {
    let Some(keeper) = keeper() else { return Ok(false) };
    let Some(id) = Pid::from_raw(keeper.pid) else { return Ok(false) };
    kill_process(id, Signal::TERM)?;
    let ended = async {
        while keeper.is_alive() {
            sleep(LOOK_PAUSE).await;
        }
    };
    timeout(2 * STOP_MAX, ended).await.map_err(|_elapsed| io::Error::other("it does not end"))?;
    Ok(true)
}

/// What this process does if it is called as the one that runs charon; nothing if not.
pub fn run_keeper(arguments: &[OsString]) -> Option<ExitCode> {
    let [name, program] = arguments else { return None };
    if name.as_bytes() != KEEPER.as_bytes() {
        return None;
    }
    rustix::thread::set_name(c"weft-charon").ok();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let kept = runtime.and_then(|runtime| runtime.block_on(keep(Path::new(program))));
    Some(match kept {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&format!("charon cannot be looked after: {error}"));
            ExitCode::FAILURE
        }
    })
}

/// Has charon run until this process is told to end.
async fn keep(program: &Path) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut pause = PAUSES.0;
    loop {
        let began = Instant::now();
        forget_other_process(Path::new(PID_FILE));
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let ended = match command.spawn() {
            Err(error) => error.to_string(),
            Ok(mut charon) => tokio::select! {
                ended = charon.wait() => ended?.to_string(),
                _ = terminate.recv() => return end(charon).await,
            },
        };
        pause = if began.elapsed() < STEADY { (2 * pause).min(PAUSES.1) } else { PAUSES.0 };
        tell(&format!("charon ended ({ended}); starting it again in {pause:?}"));
        tokio::select! {
            () = sleep(pause) => {}
            _ = terminate.recv() => return Ok(()),
        }
    }
}

/// Removes a pid file that names a process which lives and is no charon: the number is that of one
/// that was killed, and any charon that starts would take it for itself.
fn forget_other_process(file: &Path) {
    let Ok(text) = std::fs::read_to_string(file) else { return };
    let Ok(Ok(process)) = text.trim().parse().map(Process::new) else { return };
    let Ok(name) = process.stat().map(|stat| stat.comm) else { return };
    if !name.contains("charon") {
        let (shown, pid) = (file.display(), process.pid);
        tell(&format!("{shown} names process {pid}, which is {name:?} and no charon: removing it"));
        std::fs::remove_file(file).ok();
    }
}

async fn end(mut charon: Child) -> io::Result<()> {
    if let Some(id) = charon.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        kill_process(id, Signal::TERM)?;
    }
    if timeout(STOP_MAX, charon.wait()).await.is_err() {
        charon.kill().await?;
    }
    Ok(())
}

/// There may be nobody who reads it.
fn tell(text: &str) {
    io::stderr().write_all(format!("{KEEPER}: {text}\n").as_bytes()).ok();
}
