//! Processes of this host: rights and limits of one, and who else is there.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;

use rustix::process::Pid;
use rustix::thread::{capabilities, sched_getaffinity};

use crate::config::flags::Given;
use crate::tool::ask::shares_network;
use crate::tool::check::facts::{OtherDaemon, ProcessFacts};

/// A process by pid and name.
pub(super) type Named = (u32, String);

/// All processes of this pid namespace.
pub(super) fn list() -> Vec<Named> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some((pid, name.trim_end().to_owned()))
    })
    .collect()
}

/// Other daemons of this network namespace.
pub(super) fn others(processes: &[Named], daemon: Option<u32>) -> Vec<OtherDaemon> {
    let is_other = |(pid, name): &&Named| {
        matches!(name.as_str(), "weftd" | "flanneld")
            && Some(*pid) != daemon
            && shares_network(*pid) == Some(true)
    };
    let others = processes.iter().filter(is_other).filter_map(|(pid, name)| {
        let subnet_file = given(*pid)?.subnet_file;
        Some(OtherDaemon { pid: *pid, name: name.clone(), subnet_file })
    });
    others.collect()
}

/// How a daemon was set up; nothing if that can't be read.
pub(super) fn given(pid: u32) -> Option<Given> {
    let words = |file: &str| -> Option<Vec<OsString>> {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        Some(words.map(|word| OsString::from_vec(word.to_vec())).collect())
    };
    let (arguments, variables) = (words("cmdline")?, words("environ")?);
    let variable = |name: &str| {
        let value =
            |it: &OsString| Some(it.to_str()?.strip_prefix(name)?.strip_prefix('=')?.into());
        variables.iter().find_map(value)
    };
    Some(Given::of(arguments.into_iter().skip(1), variable))
}

/// Of the daemon, or of this process.
pub(super) fn read(daemon: Option<u32>) -> ProcessFacts {
    let pid = daemon.and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    let path = format!("/proc/{}/limits", pid.unwrap_or_else(rustix::process::getpid));
    let limits = fs::read_to_string(path).unwrap_or_default();
    ProcessFacts {
        is_daemon: daemon.is_some(),
        is_root: rustix::process::geteuid().is_root(),
        capabilities: capabilities(pid).ok().map(|sets| sets.effective),
        open_files_max: limit(&limits, "Max open files"),
        locked_bytes_max: limit(&limits, "Max locked memory"),
        processors: sched_getaffinity(pid).ok().map(|set| set.count() as usize),
        kernel: crate::device::kernel::release(),
    }
}

/// The soft limit.
fn limit(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn procfs_is_read() {
        let limits = "Limit   Soft Limit   Hard Limit   Units\n\
                      Max open files            1024                 524288               files\n\
                      Max locked memory         unlimited            unlimited            bytes\n";
        assert_eq!(limit(limits, "Max open files"), Some(1024));
        assert_eq!(limit(limits, "Max locked memory"), Some(u64::MAX));
        assert_eq!(limit(limits, "Max processes"), None);
        let own = read(None);
        assert!(own.capabilities.is_some() && own.processors > Some(0), "{own:?}");
        assert!(own.open_files_max.is_some(), "{own:?}");
        let by_pid = read(Some(std::process::id()));
        assert_eq!((by_pid.capabilities, by_pid.is_daemon), (own.capabilities, true));
        assert!(list().iter().any(|(pid, _)| *pid == std::process::id()));
        assert!(given(std::process::id()).is_some());
    }
}
