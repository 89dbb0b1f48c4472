//! Processes of this host: rights and limits of one, and who else is there.

use std::fs;

use super::daemon::settings;
use crate::tool::check::facts::{OtherDaemon, Process};

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
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let Some(own) = namespace("self") else { return Vec::new() };
    let is_other = |(pid, name): &&Named| {
        matches!(name.as_str(), "weftd" | "flanneld")
            && Some(*pid) != daemon
            && namespace(&pid.to_string()).as_ref() == Some(&own)
    };
    let others = processes.iter().filter(is_other).filter_map(|(pid, name)| {
        let subnet_file = settings(*pid)?.subnet_file;
        Some(OtherDaemon { pid: *pid, name: name.clone(), subnet_file })
    });
    others.collect()
}

/// Of the daemon, or of this process.
pub(super) fn read(daemon: Option<u32>) -> Process {
    let pid = daemon.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim).map(str::to_owned)
    };
    Process {
        is_daemon: daemon.is_some(),
        is_root: rustix::process::geteuid().is_root(),
        capabilities: field("CapEff:").and_then(|it| u64::from_str_radix(&it, 16).ok()),
        open_files_max: limit(&limits, "Max open files"),
        locked_bytes_max: limit(&limits, "Max locked memory"),
        processors: field("Cpus_allowed_list:").and_then(|it| count(&it)),
        kernel: kernel(&crate::device::kernel::release()),
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

/// How many are in `0-3,8`.
fn count(list: &str) -> Option<usize> {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some((last + 1).saturating_sub(first))
    };
    list.split(',').map(one).sum()
}

/// The first two numbers of a release.
fn kernel(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
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
        assert_eq!((count("0-3,8"), count("1"), count("x")), (Some(5), Some(1), None));
        assert_eq!(kernel("5.10.0-21-amd64"), Some((5, 10)));
        let own = read(None);
        assert!(own.capabilities.is_some() && own.processors > Some(0), "{own:?}");
        assert!(list().iter().any(|(pid, _)| *pid == std::process::id()));
    }
}
