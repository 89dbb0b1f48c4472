//! `weft`, the operator's tool: asks a running daemon by its status socket, and works on this host
//! without one where that makes sense.

mod arguments;
mod ask;
mod bugreport;
pub mod check;
mod cleanup;
mod cluster;
mod cni;
mod config;
mod drops;
mod echo;
mod explain;
mod lease;
mod pcapng;
mod peers;
mod ping;
mod refusal;
mod status;
mod style;
mod table;

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{CommandFactory, Parser};
use serde::Serialize;

use crate::control::clock::unix_seconds;
use crate::daemon::process;
use crate::status::{Config, Peer, Peers, State, Status};

use self::arguments::{Answered, Command, Daemon, Output, PingArguments, Question};
use self::ask::{ask, page, pid_behind};
use self::style::{Style, print};

/// Exit code for a node that isn't as it should be.
const EXIT_DEGRADED: u8 = 1;
/// Exit code for no answer, and for misuse.
const EXIT_FAILED: u8 = 2;

/// The command that is a program of its own in flannel's image: under this name the tool does that.
const SECOND_NAME: &str = "install-conf";

/// Between two looks of `status --watch`.
const WATCH_PAUSE: Duration = Duration::from_secs(2);

/// Between two questions whether weftd is ready; a question takes a millisecond.
const READY_PAUSE: Duration = Duration::from_millis(200);

/// Clears a terminal, and what scrolled off it as well.
const CLEAR: &str = "\x1b[2J\x1b[3J\x1b[H";

/// Runs the tool on its arguments, its own name first.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let name = arguments.next().unwrap_or_default();
    let name = Path::new(&name).file_name().unwrap_or_default();
    let words: Vec<OsString> = std::iter::once("weft".into())
        .chain((name == SECOND_NAME).then(|| SECOND_NAME.into()))
        .chain(arguments)
        .collect();
    if words.len() == 1 {
        Command::command().print_help().ok();
        return ExitCode::SUCCESS;
    }
    // Says what is wrong with them, and ends the program.
    let command = Command::parse_from(words);
    let code = run(command).and_then(|(text, code)| print(&text).map(|_is_read| code));
    ExitCode::from(code.unwrap_or_else(|error| {
        writeln!(io::stderr(), "weft: {error:#}").ok();
        EXIT_FAILED
    }))
}

/// Runs the program weft-cni, which a container runtime asks by environment and stdin.
pub fn cni_plugin() -> ExitCode {
    let (text, code) = cni::run();
    // One that has gone reads no answer.
    print(&text).ok();
    ExitCode::from(code)
}

/// What to print, and the exit code.
fn run(command: Command) -> anyhow::Result<(String, u8)> {
    let text = match command {
        Command::Status { answered, watch: true } => return watch(&answered),
        Command::Status { answered, watch: false } => return status(&answered, false),
        Command::Ready { wait, daemon } => return ready_within(Duration::from_secs(wait), &daemon),
        Command::Peers(answered) => return peers(&answered),
        Command::Cluster(answered) => return cluster(&answered),
        Command::Ping(arguments) => return ping(&arguments),
        Command::Check(arguments) => return check::run(arguments),
        Command::Explain { question, answered } => return explain(question, &answered),
        Command::Config(answered) => return config(&answered),
        Command::Drops(arguments) => drops::run(&arguments)?,
        Command::Lease(arguments) => lease::run(arguments)?,
        Command::Bugreport { daemon, subnet_file } => bugreport::run(daemon, subnet_file)?,
        Command::Log(daemon) => page(&daemon.socket, "/log")?,
        Command::Metrics(daemon) => page(&daemon.socket, "/metrics")?,
        Command::Cleanup { subnet_file } => cleanup::run(&subnet_file)?,
        Command::InstallConf { file, place } => cni::install_configuration(&file, &place)?,
        Command::InstallCni { place } => cni::install(&place)?,
        Command::Completions { shell } => completions(shell),
        Command::Man { directory } => manual_pages(&directory)?,
        Command::Version => format!("{}\n", env!("CARGO_PKG_VERSION")),
    };
    Ok((text, 0))
}

/// An answer as it was asked for: as JSON, or as `render` has it for people.
fn shown(
    answered: &Answered,
    answer: impl Serialize,
    is_well: bool,
    render: impl FnOnce(Style) -> String,
) -> anyhow::Result<(String, u8)> {
    let text = match answered.output {
        Some(Output::Json) => format!("{:#}\n", serde_json::to_value(answer)?),
        None => render(Style::of_output()),
    };
    Ok((text, if is_well { 0 } else { EXIT_DEGRADED }))
}

fn status(answered: &Answered, is_watched: bool) -> anyhow::Result<(String, u8)> {
    let (answer, status): (_, Status) = ask(&answered.daemon.socket, "/status")?;
    if is_watched && answered.output.is_some() {
        return Ok((format!("{answer}\n"), 0));
    }
    let is_well = status.verdict.state == State::Ready;
    shown(answered, answer, is_well, |style| status::render(&status, unix_seconds(), style))
}

/// The first time that it is ready, or how it is after so long.
fn ready_within(wait: Duration, daemon: &Daemon) -> anyhow::Result<(String, u8)> {
    let start = Instant::now();
    loop {
        let answer = ready(daemon);
        if matches!(answer, Ok((_, 0))) || start.elapsed() >= wait {
            return answer;
        }
        std::thread::sleep(READY_PAUSE);
    }
}

/// What `/readyz` says, of the weftd of this container only.
fn ready(daemon: &Daemon) -> anyhow::Result<(String, u8)> {
    if pid_behind(&daemon.socket)?.is_none() {
        if process::first_has_workers() {
            let text = "ready: this container's workers carry the packets until those of the weftd \
                        that takes over do\n";
            return Ok((text.to_owned(), 0));
        }
        let text = "not ready: the weftd of another container answers, because this container's \
                    has not taken over\n";
        return Ok((text.to_owned(), EXIT_DEGRADED));
    }
    let (_, status): (_, Status) = ask(&daemon.socket, "/status")?;
    Ok(match status.ready {
        true => ("ready\n".to_owned(), 0),
        false => (format!("not ready: {}\n", status.verdict.texts().join("; ")), EXIT_DEGRADED),
    })
}

/// Status again and again; a daemon that does not answer may come back.
fn watch(arguments: &Answered) -> anyhow::Result<(String, u8)> {
    let is_screen = arguments.output.is_none() && io::stdout().is_terminal();
    let clear = if is_screen { CLEAR } else { "" };
    loop {
        let text = match status(arguments, true) {
            Ok((text, _)) => text,
            Err(error) if arguments.output.is_none() => format!("weft: {error:#}\n"),
            Err(error) => format!("{}\n", serde_json::json!({ "error": format!("{error:#}") })),
        };
        if !print(&format!("{clear}{text}"))? {
            return Ok((String::new(), 0));
        }
        std::thread::sleep(WATCH_PAUSE);
    }
}

fn peers(answered: &Answered) -> anyhow::Result<(String, u8)> {
    let (answer, Peers { peers, .. }) = ask(&answered.daemon.socket, "/peers")?;
    let is_well = !peers.iter().any(|peer| peer.state.is_alarming());
    shown(answered, answer, is_well, |style| peers::render(peers, style))
}

fn ping(arguments: &PingArguments) -> anyhow::Result<(String, u8)> {
    let PingArguments { node, pod, answered, .. } = arguments;
    let (status, peers) = status_and_peers(answered)?;
    let is_here = is_here(&answered.daemon);
    let answer = ping::run(node.as_deref(), *pod, &status, &peers, is_here)?;
    let is_well = answer.peers.iter().all(|report| report.well);
    shown(answered, &answer, is_well, |style| ping::render(&answer, style))
}

fn cluster(answered: &Answered) -> anyhow::Result<(String, u8)> {
    let (status, peers) = status_and_peers(answered)?;
    let answer = cluster::run(&status, peers)?;
    shown(answered, &answer, answer.well, |style| cluster::render(&answer, unix_seconds(), style))
}

fn explain(question: Question, answered: &Answered) -> anyhow::Result<(String, u8)> {
    let (status, peers) = status_and_peers(answered)?;
    let answer = explain::run(question, &status, &peers, is_here(&answered.daemon))?;
    shown(answered, &answer, answer.goes, |style| explain::render(&answer, style))
}

/// Whether weftd is in this network namespace, as far as this process may know.
fn is_here(daemon: &Daemon) -> bool {
    let pid = pid_behind(&daemon.socket).ok().flatten();
    pid.and_then(ask::shares_network) != Some(false)
}

fn status_and_peers(answered: &Answered) -> anyhow::Result<(Status, Vec<Peer>)> {
    let socket = &answered.daemon.socket;
    let ((_, status), (_, peers)) = (ask(socket, "/status")?, ask::<Peers>(socket, "/peers")?);
    Ok((status, peers.peers))
}

fn config(answered: &Answered) -> anyhow::Result<(String, u8)> {
    let (answer, Config { settings, .. }) = ask(&answered.daemon.socket, "/config")?;
    shown(answered, answer, true, |_| config::render(settings))
}

fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Command::command(), "weft", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes one page for weft and one for each command.
fn manual_pages(directory: &Path) -> anyhow::Result<String> {
    clap_mangen::generate_to(Command::command(), directory)
        .with_context(|| format!("cannot write manual pages into {}", directory.display()))?;
    Ok(format!("manual pages are in {}\n", directory.display()))
}
