//! Processes of this host: rights and limits of one, and who else is there.

use std::ffi::{OsStr, OsString};

use procfs::process::{Limit, LimitValue, Process, all_processes};
use rustix::process::Pid;
use rustix::thread::capabilities;

use crate::config::flags::Given;
use crate::tool::ask::shares_network;
use crate::tool::check::facts::{OtherDaemon, ProcessFacts};

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
