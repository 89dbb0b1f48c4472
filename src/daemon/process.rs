//! What the kernel says of this process and its workers (proc_pid_stat(5), and
//! Documentation/scheduler/sched-stats.rst for the times of a worker).

use std::time::Duration;

use procfs::process::Task;

use crate::engine::WORKER_NAME;
use crate::status::Process;

/// Reads `/proc`: the process; and of each worker, in the order of their numbers, how long it ran,
/// and how long it could have run and no processor was free. `None` where there is none.
pub(super) fn read() -> Option<(Process, Vec<[Duration; 2]>)> {
    let own = procfs::process::Process::myself().ok()?;
    let stat = own.stat().ok()?;
    let seconds = |ticks: u64| ticks as f64 / procfs::ticks_per_second() as f64;
    let process = Process {
        processor_seconds: seconds(stat.utime + stat.stime),
        resident_bytes: stat.rss * procfs::page_size(),
        open_files: own.fd_count().ok()? as u64,
        start_unix: procfs::boot_time_secs().ok()? + seconds(stat.starttime) as u64,
    };
    let mut workers: Vec<_> = own.tasks().ok()?.flatten().filter_map(worker).collect();
    workers.sort_by_key(|(number, _)| *number);
    Some((process, workers.into_iter().map(|(_, time)| time).collect()))
}

/// Whether this container's first process, its weftd, has workers.
pub(crate) fn first_has_workers() -> bool {
    let tasks = procfs::process::Process::new(1).and_then(|first| first.tasks());
    tasks.is_ok_and(|tasks| tasks.flatten().any(|task| number(&task).is_some()))
}

/// The number of a worker, if `task` is one.
fn number(task: &Task) -> Option<usize> {
    task.stat().ok()?.comm.strip_prefix(WORKER_NAME)?.parse().ok()
}

/// The number and the times of a worker, if `task` is one.
fn worker(task: Task) -> Option<(usize, [Duration; 2])> {
    let number = number(&task)?;
    let times = task.schedstat().ok()?;
    Some((number, [times.sum_exec_runtime, times.run_delay].map(Duration::from_nanos)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_and_its_workers_are_there() {
        let (begun, begins) = std::sync::mpsc::channel();
        let (ends, ended) = std::sync::mpsc::channel::<()>();
        let worker = std::thread::Builder::new().name(format!("{WORKER_NAME}7"));
        let worker = worker.spawn(move || {
            // It has its name by now.
            begun.send(()).unwrap();
            ended.recv().ok();
        });
        begins.recv().unwrap();
        let (process, workers) = read().unwrap();
        assert!(process.resident_bytes > 1 << 20 && process.open_files >= 3, "{process:?}");
        assert!(process.start_unix > 1_700_000_000, "{process:?}");
        assert!(!workers.is_empty());
        drop(ends);
        worker.unwrap().join().unwrap();
    }
}
