//! The packet workers of one plane: how many, on which processors, and all of them as one, which
//! starts and ends together.

use std::collections::BTreeSet;
use std::io;
use std::num::{NonZero, NonZeroU16};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::available_parallelism;

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity};
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::backend::handover::Offered;
use crate::config::options::EngineChoice;
use crate::device::{Tun, TunOffload, TunnelSocket};
use crate::engine::{
    self, Cipher, Engine, RING_ENTRIES, Running, SpawnError, Worker, WorkerConfig, WorkerEnd,
};
use crate::failure::with_causes;
use crate::forward::{IcmpLimiter, Leased, LeasedFamilies, Local, Senders};
use crate::route::{Families, Prefixes, Published};
use crate::stats::WorkerStats;
use crate::status;

/// Processors per worker that is started unasked. A packet costs the pods and the kernel's own
/// work on their behalf about as much again as it costs a worker; workers on every processor would
/// take from those who feed them.
const AUTO_PROCESSORS_PER_WORKER: usize = 2;

/// Most workers that are started unasked: together they fill any card of 2026's ordinary hosts,
/// and each has its own arenas and buffers.
const AUTO_WORKERS_MAX: usize = 8;

/// What a worker keeps when the device is rebuilt.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) socket: Arc<TunnelSocket>,
    pub(super) stats: Arc<WorkerStats>,
}

/// What all workers of a team have in common.
pub(super) struct Orders {
    /// This host's subnets.
    pub(super) leased: LeasedFamilies,
    /// MTU of the overlay, which workers read once a turn.
    pub(super) mtu_bytes: Arc<AtomicU16>,
    /// What goes whole to each peer, the same way.
    pub(super) whole_bytes: Arc<AtomicU16>,
    pub(super) engine: Option<Engine>,
    pub(super) comes_first: bool,
    /// Whether the peers' datagrams are checked strictly.
    pub(super) senders: Senders,
    pub(super) routes: Published,
    /// What they seal and open by, if hosts talk WireGuard.
    pub(super) cipher: Option<Cipher>,
    pub(super) ends: mpsc::UnboundedSender<WorkerEnd>,
}

/// What this host has of each family: of the whole overlay its own subnets.
pub(super) fn leased(networks: Prefixes, subnets: Prefixes) -> Option<LeasedFamilies> {
    let v4 = networks.v4().zip(subnets.v4());
    let v6 = networks.v6().zip(subnets.v6());
    let v4 = v4.map(|(network, subnet)| Leased { network, subnet });
    Families::new(v4, v6.map(|(network, subnet)| Leased { network, subnet }))
}

/// The workers of one device.
pub(super) struct Team {
    pub(super) workers: Vec<Worker>,
    /// Lanes of each.
    pub(super) lanes: usize,
    /// What the device hands over whole.
    pub(super) offload: TunOffload,
}

impl Team {
    /// Starts one worker for each seat, which share the queues evenly.
    pub(super) fn start(
        queues: Vec<Tun>,
        seats: &[Seat],
        orders: &Orders,
    ) -> Result<Self, SpawnError> {
        let places = places(&processors(), seats.len());
        let icmp_limit = Arc::new(IcmpLimiter::default());
        let all: Arc<[_]> = seats.iter().map(|seat| Arc::clone(&seat.stats)).collect();
        let lanes = queues.len() / seats.len().max(1);
        let workers = Vec::with_capacity(seats.len());
        let mut team = Self { workers, lanes, offload: queues[0].offload };
        let mut queues = queues.into_iter();
        for (index, (seat, processor)) in seats.iter().zip(places).enumerate() {
            let Some(tun) = queues.next() else { break };
            let config = WorkerConfig {
                index,
                processor,
                tun,
                bulk: queues.by_ref().take(lanes.saturating_sub(1)).collect(),
                socket: Arc::clone(&seat.socket),
                local: Local {
                    leased: orders.leased,
                    underlay: seat.socket.address,
                    mtu_bytes: orders.mtu_bytes.load(Ordering::Relaxed),
                    whole_bytes: orders.whole_bytes.load(Ordering::Relaxed),
                    senders: orders.senders,
                },
                mtu_bytes: Arc::clone(&orders.mtu_bytes),
                whole_bytes: Arc::clone(&orders.whole_bytes),
                routes: orders.routes.clone(),
                stats: Arc::clone(&seat.stats),
                team: Arc::clone(&all),
                icmp_limit: Arc::clone(&icmp_limit),
                engine: orders.engine,
                comes_first: orders.comes_first,
                cipher: orders.cipher.clone(),
                ring_entries: RING_ENTRIES,
            };
            let ends = orders.ends.clone();
            // After the backend is dropped nobody receives it, or needs to.
            let worker = Worker::spawn(config, move |end| ends.send(end).unwrap_or_default())?;
            if worker.running.processor != processor {
                warn!(
                    "worker {index} cannot be pinned to processor {}, the scheduler places it: \
                     has the cpuset of weftd changed?",
                    processor.unwrap_or_default()
                );
            }
            // The others have it for the same reason.
            if let Some(error) = worker.running.rights.as_ref().filter(|_| index == 0) {
                let cause = with_causes(error);
                warn!("the workers keep rights that they don't need, and go on: {cause}");
            }
            team.workers.push(worker);
        }
        Ok(team)
    }

    /// What the workers are, in their order, without what they count.
    pub(super) fn state(&self) -> Vec<status::Worker> {
        let state = |(index, worker): (usize, &Worker)| {
            let Running { engine, processor, priority, no_real_time, .. } = &worker.running;
            status::Worker {
                index,
                engine: engine.to_string(),
                processor: *processor,
                priority: Some(priority.to_string()),
                no_real_time: no_real_time.as_ref().map(no_real_time_because),
                ..status::Worker::default()
            }
        };
        self.workers.iter().enumerate().map(state).collect()
    }
}

/// The descriptors of a tunnel, for another process; nothing if this one may not have so many.
pub(super) fn duplicates(queues: &[Tun], seats: &[Seat]) -> Offered {
    let queues = queues.iter().map(Tun::duplicate);
    let all = queues.chain(seats.iter().map(|seat| seat.socket.duplicate()));
    match all.collect::<io::Result<_>>() {
        Ok(all) => Offered::Tunnel(Arc::new(all)),
        Err(error) => {
            warn!(
                "a restart would lose packets: cannot duplicate the tunnel's descriptors: {error}"
            );
            Offered::Nothing
        }
    }
}

/// Why a worker has no real time.
fn no_real_time_because(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::PERM) => {
            "no CAP_SYS_NICE and no limit for it, or a control group that has none".to_owned()
        }
        _ => error.to_string(),
    }
}

/// Why the plane is rebuilt after a worker has ended.
pub(super) fn end_reason(end: Option<WorkerEnd>) -> String {
    match end {
        Some(WorkerEnd::TunGone(error)) => format!("reading it failed: {error}"),
        Some(WorkerEnd::WaitFailed(error)) => format!("waiting for packets failed: {error}"),
        Some(WorkerEnd::Panicked) => "a worker panicked".to_owned(),
        Some(WorkerEnd::Stopped) | None => "a worker ended".to_owned(),
    }
}

/// The engine for `choice`. For `auto` it is io_uring, where available, if system calls are
/// expensive here.
pub(super) fn settle_engine(choice: EngineChoice) -> Option<Engine> {
    match choice {
        EngineChoice::Mmsg => Some(Engine::Mmsg),
        EngineChoice::IoUring => Some(Engine::IoUring),
        EngineChoice::Auto => {
            let call_ns = engine::call_ns();
            let preferred = engine::preferred(call_ns);
            info!("a system call takes {call_ns} ns here: --engine=auto prefers {preferred}");
            (preferred == Engine::Mmsg).then_some(preferred)
        }
    }
}

/// How many workers to run, unless somebody has `chosen`.
pub(super) fn count(chosen: Option<NonZeroU16>) -> NonZeroU16 {
    chosen.unwrap_or_else(|| {
        // The second knows of a cgroup's share of processor time too, which no mask shows.
        let share = available_parallelism().map_or(1, NonZero::get);
        automatic_count(processors().len().min(share))
    })
}

/// How many workers suit so many processors.
fn automatic_count(processors: usize) -> NonZeroU16 {
    let count = (processors / AUTO_PROCESSORS_PER_WORKER).min(AUTO_WORKERS_MAX);
    u16::try_from(count).ok().and_then(NonZeroU16::new).unwrap_or(NonZeroU16::MIN)
}

/// Where each of `count` workers is pinned. A single one is not: left to the scheduler, it evades
/// whoever keeps a processor busy, and that is worth more than a warm cache. Several must be, or
/// they meet on one processor.
fn places(processors: &[usize], count: usize) -> Vec<Option<usize>> {
    if count == 1 {
        return vec![None];
    }
    let mut round = processors.iter().copied().cycle();
    (0..count).map(|_| round.next()).collect()
}

/// The processors that this process may use, one of each core before the cores' other threads.
/// None if the kernel doesn't say.
fn processors() -> Vec<usize> {
    // Hosts of more processors than a set holds answer EINVAL.
    let Ok(mask) = sched_getaffinity(None) else { return Vec::new() };
    let allowed = (0..CpuSet::MAX_CPU).filter(|&processor| mask.is_set(processor));
    cores_first(allowed, first_thread_of_core)
}

fn cores_first(
    processors: impl Iterator<Item = usize>,
    core_of: impl Fn(usize) -> usize,
) -> Vec<usize> {
    let mut cores = BTreeSet::new();
    let (mut order, siblings): (Vec<_>, Vec<_>) =
        processors.partition(|&processor| cores.insert(core_of(processor)));
    order.extend(siblings);
    order
}

/// The lowest processor on the same core; itself where the kernel doesn't say.
fn first_thread_of_core(processor: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    let first = list.split(|c: char| !c.is_ascii_digit()).next();
    first.and_then(|digits| digits.parse().ok()).unwrap_or(processor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_count_is_within_limits() {
        let counts: Vec<_> =
            [0, 1, 2, 3, 4, 6, 8, 16, 17, 64, 1024].map(|n| automatic_count(n).get()).to_vec();
        assert_eq!(counts, [1, 1, 1, 1, 2, 3, 4, 8, 8, 8, 8]);
    }

    #[test]
    fn only_several_workers_are_pinned() {
        assert_eq!(places(&[4, 5], 1), [None]);
        assert_eq!(places(&[4, 5, 9], 2), [Some(4), Some(5)]);
        assert_eq!(places(&[4, 5], 3), [Some(4), Some(5), Some(4)]);
        assert_eq!(places(&[], 2), [None, None], "no mask is no reason not to run");
    }

    #[test]
    fn sibling_threads_are_used_last() {
        let neighbours = cores_first(0..6, |processor| processor / 2 * 2);
        assert_eq!(neighbours, [0, 2, 4, 1, 3, 5]);
        let halves = cores_first(0..6, |processor| processor % 3);
        assert_eq!(halves, [0, 1, 2, 3, 4, 5]);
        // A mask without the first thread of each core.
        let odd = cores_first([1, 3, 5].into_iter(), |processor| processor / 2 * 2);
        assert_eq!(odd, [1, 3, 5]);
    }

    #[test]
    fn affinity_mask_is_read() {
        let allowed = processors();
        assert!(!allowed.is_empty());
        let unique: BTreeSet<_> = allowed.iter().collect();
        assert_eq!(unique.len(), allowed.len());
    }
}
