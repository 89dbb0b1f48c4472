//! Processes of this host: the weftd that is asked, rights and limits of one, and who else is
//! there.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::path::Path;

use procfs::process::{Limit, LimitValue, Process, all_processes};
use rustix::process::Pid;
use rustix::thread::capabilities;

use crate::config::flags::Given;
use crate::tool::ask::{ask, pid_behind, shares_network};
use crate::tool::check::facts::{DaemonFacts, DaemonState, OtherDaemon, ProcessFacts};

/// The weftd behind the status socket.
pub(super) fn daemon(socket: &Path) -> DaemonFacts {
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

/// All processes of this pid namespace, with pid and name. Each holds a descriptor.
pub(super) fn all() -> impl Iterator<Item = (Process, u32, String)> {
    let processes = all_processes().into_iter().flatten().flatten();
    processes.filter_map(|process| {
        let (pid, name) = (process.pid.try_into().ok()?, process.stat().ok()?.comm);
        Some((process, pid, name))
    })
}

/// Other daemons of this network namespace.
pub(super) fn others(daemon: Option<u32>) -> Vec<OtherDaemon> {
    let others = all().filter(|(_, pid, name)| {
        matches!(name.as_str(), "weftd" | "flanneld")
            && Some(*pid) != daemon
            && shares_network(*pid) == Some(true)
    });
    let others = others.filter_map(|(_, pid, name)| {
        Some(OtherDaemon { pid, name, subnet_file: given(pid)?.subnet_file })
    });
    others.collect()
}

/// How a daemon was set up; nothing if that can't be read.
pub(super) fn given(pid: u32) -> Option<Given> {
    let process = Process::new(pid.try_into().ok()?).ok()?;
    let (arguments, variables) = (process.cmdline().ok()?, process.environ().ok()?);
    let variable = |name: &str| variables.get(OsStr::new(name)).cloned();
    Some(Given::of(arguments.into_iter().skip(1).map(OsString::from), &variable))
}

/// Of the daemon, or of this process.
pub(super) fn read(daemon: Option<u32>) -> ProcessFacts {
    let pid = daemon.and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    let number = pid.unwrap_or_else(rustix::process::getpid).as_raw_nonzero().get();
    let limits = Process::new(number).and_then(|process| process.limits()).ok();
    let soft = |limit: Limit| match limit.soft_limit {
        LimitValue::Unlimited => u64::MAX,
        LimitValue::Value(value) => value,
    };
    ProcessFacts {
        is_daemon: daemon.is_some(),
        is_root: rustix::process::geteuid().is_root(),
        capabilities: capabilities(pid).ok().map(|sets| sets.effective),
        open_files_max: limits.as_ref().map(|limits| soft(limits.max_open_files)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn procfs_is_read() {
        let own = read(None);
        assert!(own.capabilities.is_some(), "{own:?}");
        assert!(own.open_files_max > Some(0), "{own:?}");
        let by_pid = read(Some(std::process::id()));
        assert_eq!((by_pid.capabilities, by_pid.is_daemon), (own.capabilities, true));
        assert!(all().any(|(_, pid, name)| pid == std::process::id() && !name.is_empty()));
        assert!(given(std::process::id()).is_some());
    }
}
