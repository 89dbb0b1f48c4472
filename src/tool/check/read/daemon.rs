//! The weftd behind the status socket, and its process.

use std::fs;
use std::io;
use std::path::Path;

use tokio::net::UnixStream;
use tokio::runtime::Runtime;

use crate::daemon::status::fetch_unix;
use crate::tool::arguments::SUBNET_FILE;
use crate::tool::ask::shares_network;
use crate::tool::check::facts::{Daemon, DaemonState, Settings};

pub(super) fn read(runtime: &Runtime, socket: &Path) -> Daemon {
    let connected = runtime.block_on(async {
        let stream = UnixStream::connect(socket).await?;
        // Of another pid namespace it is 0.
        Ok::<_, io::Error>(stream.peer_cred().ok().and_then(|it| it.pid()).filter(|pid| *pid > 0))
    });
    let pid = match connected {
        Ok(pid) => pid.and_then(|pid| u32::try_from(pid).ok()),
        Err(error) => return Daemon { state: unreachable(&error), ..Daemon::default() },
    };
    let state = match fetch_unix(socket, "/status") {
        Ok(_) if pid.and_then(shares_network) == Some(false) => DaemonState::Elsewhere,
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(status) => DaemonState::Answered(Box::new(status)),
            Err(error) => DaemonState::Mute(format!("it answers something else: {error}")),
        },
        Err(error) => DaemonState::Mute(format!("{error:#}")),
    };
    Daemon { state, pid, settings: pid.and_then(settings) }
}

fn unreachable(error: &io::Error) -> DaemonState {
    let is = |kind| error.kind() == kind;
    if is(io::ErrorKind::NotFound) {
        DaemonState::Absent
    } else if is(io::ErrorKind::ConnectionRefused) {
        DaemonState::Stale
    } else if is(io::ErrorKind::PermissionDenied) {
        DaemonState::Forbidden(error.to_string())
    } else {
        DaemonState::Mute(error.to_string())
    }
}

/// How a daemon was set up; nothing if that can't be read.
pub(super) fn settings(pid: u32) -> Option<Settings> {
    let words = |file: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect::<Vec<_>>())
    };
    Some(parse(words("cmdline")?.get(1..)?, &words("environ")?))
}

/// Arguments in Go's syntax win over variables.
fn parse(arguments: &[String], variables: &[String]) -> Settings {
    let flag = |name: &str| {
        arguments.iter().enumerate().find_map(|(at, argument)| {
            let rest = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'))?;
            match rest.strip_prefix(name)? {
                "" => Some(arguments.get(at + 1).map_or("", String::as_str)),
                rest => rest.strip_prefix('='),
            }
        })
    };
    let variable = |name: &str| {
        let name = format!("FLANNELD_{}=", name.replace('-', "_").to_uppercase());
        variables.iter().find_map(|variable| variable.strip_prefix(&name))
    };
    let value = |name: &str| flag(name).or_else(|| variable(name));
    Settings {
        subnet_file: value("subnet-file").unwrap_or(SUBNET_FILE).into(),
        is_kubernetes: value("kube-subnet-mgr").is_some_and(|it| !matches!(it, "false" | "0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_daemons_do() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let of = |arguments: &str, variables: &str| {
            let Settings { subnet_file, is_kubernetes } =
                parse(&words(arguments), &words(variables));
            (subnet_file.display().to_string(), is_kubernetes)
        };
        assert_eq!(of("--ip-masq", "A=b"), (SUBNET_FILE.to_owned(), false));
        assert_eq!(of("-subnet-file /a --kube-subnet-mgr", ""), ("/a".to_owned(), true));
        assert_eq!(of("--subnet-file=/a", "FLANNELD_SUBNET_FILE=/b"), ("/a".to_owned(), false));
        let variables = "FLANNELD_SUBNET_FILE=/b FLANNELD_KUBE_SUBNET_MGR=true";
        assert_eq!(of("--kube-subnet-mgr=false", variables), ("/b".to_owned(), false));
        assert_eq!(of("-v=1", variables), ("/b".to_owned(), true));
    }
}
