//! The weftd behind the status socket.

use std::io::{self, ErrorKind};
use std::path::Path;

use super::process::given;
use crate::tool::ask::{ask, pid_behind, shares_network};
use crate::tool::check::facts::{DaemonFacts, DaemonState};

pub(super) fn read(socket: &Path) -> DaemonFacts {
    let pid = match pid_behind(socket) {
        Ok(pid) => pid,
        Err(error) => return DaemonFacts { state: silence(&error), ..DaemonFacts::default() },
    };
    let state =
        match (ask(socket, "/status"), pid.filter(|pid| shares_network(*pid) == Some(false))) {
            (Ok(_), Some(pid)) => DaemonState::Elsewhere(pid),
            (Ok((_, status)), None) => DaemonState::Answered(Box::new(status)),
            (Err(error), _) => DaemonState::Mute(format!("{error:#}")),
        };
    DaemonFacts { state, pid, given: pid.and_then(given) }
}

/// Why nobody can be asked.
fn silence(error: &io::Error) -> DaemonState {
    let states = [
        (ErrorKind::NotFound, DaemonState::Absent),
        (ErrorKind::ConnectionRefused, DaemonState::Stale),
        (ErrorKind::PermissionDenied, DaemonState::Forbidden(error.to_string())),
    ];
    let found = states.into_iter().find(|(kind, _)| *kind == error.kind());
    found.map_or_else(|| DaemonState::Mute(error.to_string()), |(_, state)| state)
}
