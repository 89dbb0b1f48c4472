//! A worker's life: gather, move both ways, wait. The same for every engine.
//!
//! One thread serves both directions, so a busy one can't starve the other: each turn moves at
//! most one batch each way, bounded by bytes and by packets.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering;

use rustix::thread::{Timespec, nanosleep, sched_yield, set_current_timer_slack};
use rustix::time::{ClockId, clock_gettime};

use crate::forward::{Local, Pass};
use crate::stats::WorkerStats;

use super::idle::{Idle, Moved, NAP_NS, NAP_SLACK_NS, Next};
use super::io::{Io, Ready, WaitFor};
use super::receive::Receive;
use super::transmit::Transmit;
use super::{Stop, WorkerConfig, WorkerEnd, contain};

/// How often what was refused is tried again, trains and datagrams without fragmentation: the
/// kernel forgets a learned path MTU after the same time (net.ipv4.route.mtu_expires).
const REFUSED_RETRY_NS: u64 = 600 * 1_000_000_000;

/// Runs a worker over `io`, whose reads fill the first `read_bytes` of their arena, until it is
/// stopped or loses its device.
pub(super) fn run(
    mut io: impl Io,
    read_bytes: usize,
    config: &WorkerConfig,
    stop: &Stop,
) -> WorkerEnd {
    let mut routes = config.routes.reader();
    let mut transmit = Transmit::new(config, read_bytes);
    let mut receive = Receive::new(config);
    let mut idle = Idle::default();
    // Refused, naps are half as long again: the default slack is 50 us.
    set_current_timer_slack(NonZeroU64::new(NAP_SLACK_NS)).ok();
    let mut ready = Ready::BOTH;
    transmit.forget_refusals(config);
    let mut forgotten_ns = monotonic_ns();
    loop {
        let stopped = stop.requested();
        let now_ns = monotonic_ns();
        if now_ns - forgotten_ns > REFUSED_RETRY_NS {
            forgotten_ns = now_ns;
            transmit.forget_refusals(config);
        }
        let was_waiting = transmit.is_waiting();
        ready.tun &= !was_waiting;
        if !was_waiting {
            transmit.reads.clear();
        }
        receive.receives.clear();
        if !stopped && let Err(error) = io.gather(ready, &mut transmit.reads, &mut receive.receives)
        {
            receive.receives.failed = Some(error);
        }
        if !was_waiting {
            transmit.begin_turn();
        }
        receive.begin_turn();
        let table = routes.load();
        let stats = &config.stats;
        let mtu_bytes = config.mtu_bytes.load(Ordering::Relaxed);
        let local = Local { mtu_bytes, ..config.local };
        let icmp_limit = &*config.icmp_limit;
        let pass = |stats| Pass { local: &local, table, stats, icmp_limit, now_ns };
        contain::turn(&mut transmit, &mut io, config, &pass(&stats.egress));
        contain::turn(&mut receive, &mut io, config, &pass(&stats.ingress));
        if let Some(end) = end(&mut transmit, &mut receive, stopped) {
            if transmit.is_waiting() {
                // Every packet has an outcome: what waits goes now or is dropped.
                transmit.wait_no_longer();
                contain::turn(&mut transmit, &mut io, config, &pass(&stats.egress));
            }
            return end;
        }
        let next = idle.after_turn(moved(&transmit, &receive, was_waiting));
        ready = match wait(&mut io, next, transmit.wait_for(now_ns), &mut idle, stats) {
            Ok(ready) => ready,
            Err(error) => {
                receive.receives.failed = Some(error);
                Ready::BOTH
            }
        };
    }
}

/// Why the worker has to end, if it has to.
fn end(transmit: &mut Transmit, receive: &mut Receive, stopped: bool) -> Option<WorkerEnd> {
    if let Some(error) = transmit.reads.gone.take().or_else(|| receive.gone.take()) {
        return Some(WorkerEnd::TunGone(error));
    }
    if let Some(error) = receive.receives.failed.take() {
        return Some(WorkerEnd::WaitFailed(error));
    }
    stopped.then_some(WorkerEnd::Stopped)
}

/// Waits as `next` says, asleep for `wait_for`; returns which sources may have something then.
fn wait(
    io: &mut impl Io,
    next: Next,
    wait_for: WaitFor,
    idle: &mut Idle,
    stats: &WorkerStats,
) -> std::io::Result<Ready> {
    match next {
        Next::Turn => {}
        Next::Yield => {
            let before_ns = monotonic_ns();
            sched_yield();
            idle.yielded(monotonic_ns() - before_ns);
        }
        Next::Nap => {
            stats.naps.add(1);
            // A signal that ends it early costs a smaller batch.
            let _woken_early = nanosleep(&Timespec { tv_sec: 0, tv_nsec: NAP_NS });
        }
        Next::Sleep => {
            stats.sleeps.add(1);
            return io.sleep(wait_for);
        }
    }
    Ok(Ready::BOTH)
}

/// What a turn moved. One that began with packets waiting for room in the send buffer read nothing
/// from the TUN device: the batch of reads is an earlier turn's.
fn moved(transmit: &Transmit, receive: &Receive, was_waiting: bool) -> Moved {
    let (reads, receives) = (&transmit.reads, &receive.receives);
    let (read_bytes, read_packets, drained) = match was_waiting {
        true => (0, 0, true),
        false => (reads.bytes, reads.packets.len(), reads.drained),
    };
    Moved {
        bytes: read_bytes + receives.bytes,
        packets: read_packets + receive.packets,
        drained: drained && receives.drained,
    }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
