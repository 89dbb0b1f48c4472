//! What the kernel says of this process and its workers (proc_pid_stat(5), and
//! Documentation/scheduler/sched-stats.rst for `schedstat`).

use std::fs;
use std::time::Duration;

use crate::status::Process;

/// The threads of the dataplane are named so, with their numbers behind it.
const WORKER_NAME: &str = "weft-worker-";

/// How a worker got on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct WorkerTime {
    /// How long it ran.
    pub(super) ran: Duration,
    /// How long it could have run and no processor was free.
    pub(super) waited: Duration,
}

/// Reads `/proc`: the process, and its workers in the order of their numbers. `None` where there is
/// none.
pub(super) fn read() -> Option<(Process, Vec<WorkerTime>)> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    let page_bytes = rustix::param::page_size() as u64;
    let boot = boot_unix(&fs::read_to_string("/proc/stat").ok()?)?;
    let Stat { processor_ticks, start_ticks, resident_pages } = Stat::parse(&stat)?;
    let seconds = |ticks: u64| ticks as f64 / ticks_per_second as f64;
    let process = Process {
        processor_seconds: seconds(processor_ticks),
        resident_bytes: resident_pages * page_bytes,
        open_files: fs::read_dir("/proc/self/fd").ok()?.count() as u64,
        start_unix: boot + seconds(start_ticks) as u64,
    };
    Some((process, workers()))
}

#[derive(Debug, PartialEq, Eq)]
struct Stat {
    processor_ticks: u64,
    start_ticks: u64,
    resident_pages: u64,
}

impl Stat {
    /// Reads `/proc/PID/stat`. The name, the second field, may hold anything but ends with the
    /// last parenthesis; fields are numbered from the one after it, which is the third.
    fn parse(text: &str) -> Option<Self> {
        let (_, behind_name) = text.rsplit_once(')')?;
        let fields: Vec<_> = behind_name.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            processor_ticks: field(14)? + field(15)?,
            start_ticks: field(22)?,
            resident_pages: field(24)?,
        })
    }
}

/// When the host started, by `/proc/stat`.
fn boot_unix(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn workers() -> Vec<WorkerTime> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut numbered: Vec<(usize, WorkerTime)> = tasks
        .filter_map(|task| {
            let read = |file: &str| fs::read_to_string(task.path().join(file)).ok();
            let number = read("comm")?.trim().strip_prefix(WORKER_NAME)?.parse().ok()?;
            Some((number, worker_time(&read("schedstat")?)?))
        })
        .collect();
    numbered.sort_by_key(|(number, _)| *number);
    numbered.into_iter().map(|(_, time)| time).collect()
}

/// Reads `schedstat`: nanoseconds on a processor, nanoseconds in a run queue, and turns.
fn worker_time(text: &str) -> Option<WorkerTime> {
    let mut fields = text.split_ascii_whitespace().map(str::parse);
    let mut next = || fields.next()?.ok().map(Duration::from_nanos);
    Some(WorkerTime { ran: next()?, waited: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_proc_are_read_whatever_the_name() {
        let text = "77 (we) ft d) S 1 77 77 0 -1 4194304 1 2 3 4 150 50 0 0 20 0 5 0 12345 \
                    99999 1700 18446744073709551615 1";
        let stat = Stat { processor_ticks: 200, start_ticks: 12345, resident_pages: 1700 };
        assert_eq!(Stat::parse(text), Some(stat));
        assert_eq!(Stat::parse("77 (weftd) S 1"), None);
        assert_eq!(boot_unix("cpu 1 2\nbtime 1700000000\n"), Some(1_700_000_000));
        let time = WorkerTime { ran: Duration::from_nanos(5), waited: Duration::from_nanos(7) };
        assert_eq!(worker_time("5 7 9\n"), Some(time));
    }

    #[test]
    fn this_process_is_there() {
        let (process, _) = read().unwrap();
        assert!(process.resident_bytes > 1 << 20 && process.open_files >= 3, "{process:?}");
        assert!(process.start_unix > 1_700_000_000, "{process:?}");
    }
}
