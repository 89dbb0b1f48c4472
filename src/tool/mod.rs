//! `weft`, the operator's tool: asks a running daemon by its status socket, and works on this host
//! without one where that makes sense.

pub mod advice;
mod arguments;
mod ask;
mod bugreport;
pub mod check;
mod cleanup;
mod config;
mod drops;
mod echo;
mod explain;
mod install_conf;
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
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use serde::Serialize;

use crate::control::clock::unix_seconds;
use crate::daemon::status::fetch_unix;
use crate::status::{Config, Peer, Peers, State, Status};

use self::arguments::{
    Answered, Arguments, Command, ExplainArguments, Output, PingArguments, StatusArguments,
};
use self::ask::ask;
use self::ping::Whom;
use self::style::Style;

/// Exit code for a node that isn't as it should be.
const EXIT_DEGRADED: u8 = 1;
/// Exit code for no answer, and for misuse.
const EXIT_FAILED: u8 = 2;

/// A second name of the tool, under which it does this one thing: where flannel's image has a
/// program of this name.
const INSTALL_CONF: &str = "install-conf";

/// Between two looks of `status --watch`.
const WATCH_PAUSE: Duration = Duration::from_secs(2);

/// Clears a terminal, and what scrolled off it as well.
const CLEAR: &str = "\x1b[2J\x1b[3J\x1b[H";

/// Runs the tool on its arguments, its own name first.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let name = arguments.next().unwrap_or_default();
    let implied = Path::new(&name).file_name().is_some_and(|name| name == INSTALL_CONF);
    let words: Vec<OsString> = std::iter::once("weft".into())
        .chain(implied.then(|| INSTALL_CONF.into()))
        .chain(arguments)
        .collect();
    if words.len() == 1 {
        Arguments::command().print_help().ok();
        return ExitCode::SUCCESS;
    }
    let arguments = match Arguments::try_parse_from(words) {
        Ok(arguments) => arguments,
        Err(error) => {
            error.print().ok();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_FAILED));
        }
    };
    let printed = run(arguments.command).and_then(|(text, code)| {
        match io::stdout().write_all(text.as_bytes()) {
            // A reader that went away, such as `head`, has what it wanted.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(error).context("cannot write to standard output")
            }
            Ok(()) | Err(_) => Ok(code),
        }
    });
    ExitCode::from(printed.unwrap_or_else(|error| {
        writeln!(io::stderr(), "weft: {error:#}").ok();
        EXIT_FAILED
    }))
}

/// What to print, and the exit code.
fn run(command: Command) -> anyhow::Result<(String, u8)> {
    let text = match command {
        Command::Status(arguments) if arguments.watch => return watch(&arguments),
        Command::Status(arguments) => return status(&arguments.answered, false),
        Command::Peers(arguments) => return peers(&arguments),
        Command::Ping(arguments) => return ping(arguments),
        Command::Check(arguments) => return check::run(arguments),
        Command::Explain(arguments) => return explain(&arguments),
        Command::Drops(arguments) => drops::run(&arguments)?,
        Command::Lease(arguments) => lease::run(arguments)?,
        Command::Bugreport { daemon, subnet_file } => bugreport::run(daemon, subnet_file)?,
        Command::Config(arguments) => config(&arguments)?,
        Command::Log(daemon) => text(&daemon.socket, "/log")?,
        Command::Metrics(daemon) => text(&daemon.socket, "/metrics")?,
        Command::Cleanup { subnet_file } => cleanup::run(&subnet_file)?,
        Command::InstallConf { file, place } => install_conf::copy(&file, &place)?,
        Command::Completions { shell } => completions(shell),
        Command::Man { directory } => manual_pages(directory)?,
        Command::Version => format!("{}\n", env!("CARGO_PKG_VERSION")),
    };
    Ok((text, 0))
}

fn text(socket: &Path, target: &str) -> anyhow::Result<String> {
    Ok(String::from_utf8_lossy(&fetch_unix(socket, target)?).into_owned())
}

/// An answer as it was asked for: as JSON, or as `render` has it for people.
fn shown(
    arguments: &Answered,
    answer: impl Serialize,
    render: impl FnOnce(Style) -> String,
) -> anyhow::Result<String> {
    Ok(match arguments.output {
        Some(Output::Json) => format!("{:#}\n", serde_json::to_value(answer)?),
        None => render(Style::of_output()),
    })
}

fn exit_code(is_well: bool) -> u8 {
    if is_well { 0 } else { EXIT_DEGRADED }
}

fn status(arguments: &Answered, is_watched: bool) -> anyhow::Result<(String, u8)> {
    let (answer, status): (_, Status) = ask(&arguments.daemon.socket, "/status")?;
    let code = exit_code(status.verdict.state == State::Ready);
    if is_watched && arguments.output.is_some() {
        return Ok((format!("{answer}\n"), code));
    }
    let render = |style| status::render(&status, unix_seconds(), style);
    Ok((shown(arguments, answer, render)?, code))
}

/// Status again and again; a daemon that does not answer may come back.
fn watch(arguments: &StatusArguments) -> anyhow::Result<(String, u8)> {
    let (answered, mut out) = (&arguments.answered, io::stdout());
    let is_screen = answered.output.is_none() && out.is_terminal();
    let clear = if is_screen { CLEAR } else { "" };
    loop {
        let text = match status(answered, true) {
            Ok((text, _)) => text,
            Err(error) if answered.output.is_none() => format!("weft: {error:#}\n"),
            Err(error) => format!("{}\n", serde_json::json!({ "error": format!("{error:#}") })),
        };
        if write!(out, "{clear}{text}").and_then(|()| out.flush()).is_err() {
            return Ok((String::new(), 0));
        }
        std::thread::sleep(WATCH_PAUSE);
    }
}

fn peers(arguments: &Answered) -> anyhow::Result<(String, u8)> {
    let (answer, Peers { peers, .. }) = ask(&arguments.daemon.socket, "/peers")?;
    let is_well = !peers.iter().any(|peer| peer.state.is_alarming());
    Ok((shown(arguments, answer, |style| peers::render(peers, style))?, exit_code(is_well)))
}

fn ping(arguments: PingArguments) -> anyhow::Result<(String, u8)> {
    let (status, peers) = status_and_peers(&arguments.answered)?;
    let whom = arguments.node.map_or(Whom::All, Whom::Node);
    let answer = ping::run(&whom, arguments.pod, &status, &peers)?;
    let is_well = answer.peers.iter().all(|report| report.well);
    let text = shown(&arguments.answered, &answer, |style| ping::render(&answer, style))?;
    Ok((text, exit_code(is_well)))
}

fn explain(arguments: &ExplainArguments) -> anyhow::Result<(String, u8)> {
    let ExplainArguments { question, answered } = arguments;
    let (status, peers) = status_and_peers(answered)?;
    let pid = ask::pid_behind(&answered.daemon.socket).ok().flatten();
    let is_here = pid.and_then(ask::shares_network) != Some(false);
    let answer = explain::run(*question, &status, &peers, is_here)?;
    let text = shown(answered, &answer, |style| explain::render(&answer, style))?;
    Ok((text, exit_code(answer.goes)))
}

fn status_and_peers(arguments: &Answered) -> anyhow::Result<(Status, Vec<Peer>)> {
    let socket = &arguments.daemon.socket;
    let ((_, status), (_, peers)) = (ask(socket, "/status")?, ask::<Peers>(socket, "/peers")?);
    Ok((status, peers.peers))
}

fn config(arguments: &Answered) -> anyhow::Result<String> {
    let (answer, Config { settings, .. }) = ask(&arguments.daemon.socket, "/config")?;
    shown(arguments, answer, |_| config::render(settings))
}

fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "weft", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes one page for weft and one for each command.
fn manual_pages(directory: PathBuf) -> anyhow::Result<String> {
    clap_mangen::generate_to(Arguments::command(), &directory)
        .with_context(|| format!("cannot write manual pages into {}", directory.display()))?;
    Ok(format!("manual pages are in {}\n", directory.display()))
}
