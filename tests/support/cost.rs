//! What a running daemon takes of processor and memory, as the kernel counts it.

use std::time::Duration;

use super::lab::{Process, wait_until};

/// Time that the control plane's thread, which is the process's first, has had on a processor.
pub(crate) fn control_time(daemon: &Process) -> Duration {
    let pid = daemon.pid().as_raw_nonzero();
    let path = format!("/proc/{pid}/task/{pid}/schedstat");
    let text = std::fs::read_to_string(path).expect("the daemon runs");
    let nanoseconds = text.split_whitespace().next().and_then(|first| first.parse().ok());
    Duration::from_nanos(nanoseconds.expect("schedstat begins with a number of nanoseconds"))
}

/// Time that all threads of the daemon have had on a processor, in the kernel's hundredths of a
/// second (proc_pid_stat(5), fields 14 and 15).
pub(crate) fn process_time(daemon: &Process) -> Duration {
    let path = format!("/proc/{}/stat", daemon.pid().as_raw_nonzero());
    let text = std::fs::read_to_string(path).expect("the daemon runs");
    // The program's name, which is the second field, may hold anything.
    let (_, after_name) = text.rsplit_once(')').expect("stat has a name");
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

/// What `/proc/PID/task/TID/status` has of each thread; one that ends meanwhile is left out.
pub(crate) fn threads(daemon: &Process) -> Vec<ThreadStatus> {
    let tasks = format!("/proc/{}/task", daemon.pid().as_raw_nonzero());
    let tasks = std::fs::read_dir(tasks).expect("the daemon runs");
    let status = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.expect("a thread").path().join("status")).ok()
    };
    tasks.filter_map(status).map(ThreadStatus).collect()
}

/// Waits until every thread of the daemon is limited in its system calls, the last of all limits.
#[track_caller]
pub(crate) fn wait_for_fewer_rights(daemon: &Process) {
    wait_until(Duration::from_secs(5), "weftd has given up rights", || {
        threads(daemon).iter().all(|thread| thread.field("Seccomp") == "2")
    });
}

/// The status of one thread (proc_pid_status(5)).
#[derive(Debug)]
pub(crate) struct ThreadStatus(String);

impl ThreadStatus {
    /// A field, such as `Name`.
    pub(crate) fn field(&self, name: &str) -> &str {
        let value = |line| str::strip_prefix(line, name)?.strip_prefix(':');
        self.0.lines().find_map(value).expect("the kernel has the field").trim()
    }

    /// Whether it is a worker's.
    pub(crate) fn is_worker(&self) -> bool {
        self.field("Name").starts_with("weft-worker-")
    }
}

/// A value of `/proc/PID/status` in bytes, such as `VmRSS`.
pub(crate) fn status_bytes(process: &Process, name: &str) -> u64 {
    let path = format!("/proc/{}/status", process.pid().as_raw_nonzero());
    let text = std::fs::read_to_string(path).expect("the daemon runs");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    let number = value.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB");
    number * 1024
}
