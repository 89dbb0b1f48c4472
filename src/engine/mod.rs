//! Worker threads that move packets between the TUN device and the UDP socket.
//!
//! A worker owns its devices for as long as it runs and shares nothing with the rest of the
//! daemon but the published route table, the counters, and a stop signal. Engines differ in how
//! they wait and do I/O; what happens to a packet is in `forward`, the same for all.

mod choice;
mod cipher;
mod contain;
mod cycle;
mod egress;
mod errno;
mod idle;
mod ingress;
mod io;
mod lanes;
mod mmsg;
mod offers;
mod outcome;
mod priority;
mod refused;
mod ring;
mod wake;
mod worker;

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};

use crate::rights::{self, RightsError};
use crate::stats::WorkerStats;

use self::mmsg::Mmsg;
use self::priority::Budget;
use self::ring::RingIo;

pub use self::ring::RING_ENTRIES;
pub use crate::rights::Priority;
pub(crate) use crate::rights::keep_for_worker;
pub use crate::sys::ring::RingError;
pub use choice::{call_ns, preferred};
pub use cipher::{Cipher, Event, EventQueue, Events, events};
pub use cycle::{asleep_ns, monotonic_ns};
pub use wake::Stop;
pub use worker::{Engine, WorkerConfig, WorkerEnd};

/// The threads of the dataplane are named so, with their numbers behind it.
pub const WORKER_NAME: &str = "weft-worker-";

/// A worker that has not begun a turn for so long hangs, or gets no processor: three times the
/// longest sleep.
const STALLED_AFTER: Duration = Duration::from_secs(3 * cycle::SLEEP_MAX_SECONDS);

/// How long the worker that counts in `stats` has hung, if it does.
pub fn stalled_for(stats: &WorkerStats) -> Option<Duration> {
    let last_ns = stats.last_turn_ns.get();
    let age = Duration::from_nanos(monotonic_ns().saturating_sub(last_ns));
    (last_ns != 0 && age > STALLED_AFTER).then_some(age)
}

/// What a worker runs.
#[derive(Debug)]
pub struct Running {
    /// The engine.
    pub engine: Engine,
    /// Why it isn't io_uring, if that was wanted as the best.
    pub fallback: Option<RingError>,
    /// The processor that it is pinned to.
    pub processor: Option<usize>,
    /// Why it has more rights than it needs, if it does.
    pub rights: Option<RightsError>,
    /// How it gets a processor.
    pub priority: Priority,
    /// Why that is not real time, if it was wanted.
    pub no_real_time: Option<std::io::Error>,
}

/// A worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No thread or no stop signal.
    #[error("cannot start a thread")]
    Thread(#[from] std::io::Error),
    /// io_uring was asked for and can't be had.
    #[error("cannot use io_uring")]
    Ring(#[from] RingError),
}

/// A running worker. Dropping it stops the thread and waits for it.
pub struct Worker {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    /// What it runs.
    pub running: Running,
}

impl Worker {
    /// Starts the worker's thread and waits until it has its engine. `on_end` is called on that
    /// thread when it ends, after its devices are closed, even if it panics.
    pub fn spawn(
        config: WorkerConfig,
        on_end: impl FnOnce(WorkerEnd) + Send + 'static,
    ) -> Result<Self, SpawnError> {
        contain::hook_panics();
        let stop = Stop::new()?;
        let seen = stop.clone();
        let (report, reported) = mpsc::sync_channel(1);
        let name = format!("{WORKER_NAME}{}", config.index);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // Of a worker that never began nothing is told.
            if let Some(end) = end_of(|| run(config, &seen, &report)) {
                on_end(end);
            }
        })?;
        // A thread that ends without a word has panicked.
        let running = reported.recv().map_err(std::io::Error::other)??;
        Ok(Self { stop, thread: Some(thread), running })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.request();
        if let Some(thread) = self.thread.take() {
            // Only what the owner does about the end could have panicked.
            thread.join().ok();
        }
    }
}

/// Ends all of these workers, in the time that the slowest takes, and waits for them, which closes
/// their queues.
pub fn end_all(workers: &mut Vec<Worker>) {
    workers.iter().for_each(|worker| worker.stop.request());
    workers.clear();
}

/// How `work` ended, if it began, by a panic as well, which the hook has reported.
fn end_of(work: impl FnOnce() -> Option<WorkerEnd>) -> Option<WorkerEnd> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Some(WorkerEnd::Panicked))
}

/// Pins the calling thread; whether the kernel agrees.
fn pin(processor: usize) -> bool {
    let mut one = CpuSet::new();
    // A set has no place for more, and panics.
    if processor >= CpuSet::MAX_CPU {
        return false;
    }
    one.set(processor);
    sched_setaffinity(None, &one).is_ok()
}

/// The life of a worker's thread; `None` if it could not begin, which `report` has been told.
fn run(
    config: WorkerConfig,
    stop: &Stop,
    report: &mpsc::SyncSender<Result<Running, RingError>>,
) -> Option<WorkerEnd> {
    // Before the arenas are made, so that their memory is this processor's.
    let processor = config.processor.filter(|&processor| pin(processor));
    let opened = (config.engine != Some(Engine::Mmsg)).then(|| {
        // A ring that is made later, for a device that is made again, is asked for with no more.
        // What this can't give up, the worker can't either, and says so.
        rights::keep_capabilities_of_control().ok();
        RingIo::open(&config)
    });
    let (ring, fallback) = match opened {
        None => (None, None),
        Some(Ok(ring)) => (Some(ring), None),
        Some(Err(error)) if config.engine.is_none() => (None, Some(error)),
        Some(Err(error)) => {
            report.send(Err(error)).unwrap_or_default();
            return None;
        }
    };
    // Refused, naps are half as long again: the default slack is 50 us.
    set_current_timer_slack(NonZeroU64::new(idle::NAP_SLACK_NS)).ok();
    config.stats.last_turn_ns.set(monotonic_ns());
    let engine = if ring.is_some() { Engine::IoUring } else { Engine::Mmsg };
    let (priority, no_real_time) = priority::settle(config.comes_first);
    let budget = Budget::new(priority);
    // From here on this thread asks the kernel for nothing but to move packets.
    let rights = keep_for_worker(priority).err();
    // The owner waits for this, so it is there to be told.
    let running = Running { engine, fallback, processor, rights, priority, no_real_time };
    report.send(Ok(running)).unwrap_or_default();
    Some(match ring {
        Some(ring) => cycle::run(ring, ring::READ_BYTES, &config, budget, stop),
        None => cycle::run(Mmsg::new(&config), mmsg::READ_BYTES, &config, budget, stop),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panicking_worker_still_reports_its_end() {
        let panics = || [None, Some(WorkerEnd::Stopped)].into_iter().nth(2).expect("on purpose");
        assert!(matches!(end_of(panics), Some(WorkerEnd::Panicked)));
        assert!(end_of(|| None).is_none(), "a worker that never began has no end");
    }

    #[test]
    fn a_thread_is_pinned_only_where_allowed() {
        let home = rustix::thread::sched_getcpu();
        std::thread::spawn(move || {
            assert!(pin(home));
            let mask = rustix::thread::sched_getaffinity(None).unwrap();
            assert_eq!((mask.count(), mask.is_set(home)), (1, true));
            assert!(!pin(CpuSet::MAX_CPU - 1) && !pin(CpuSet::MAX_CPU));
        })
        .join()
        .unwrap();
    }
}
