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
use super::io::{Io, Ready};
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
    while !stop.requested() {
        let now_ns = monotonic_ns();
        if now_ns - forgotten_ns > REFUSED_RETRY_NS {
            forgotten_ns = now_ns;
            transmit.forget_refusals(config);
        }
        transmit.reads.clear();
        receive.receives.clear();
        if let Err(error) = io.gather(ready, &mut transmit.reads, &mut receive.receives) {
            return WorkerEnd::WaitFailed(error);
        }
        transmit.begin_turn();
        receive.begin_turn();
        let table = routes.load();
        let stats = &config.stats;
        let mtu_bytes = config.mtu_bytes.load(Ordering::Relaxed);
        let local = Local { mtu_bytes, ..config.local };
        let icmp_limit = &*config.icmp_limit;
        let pass = |stats| Pass { local: &local, table, stats, icmp_limit, now_ns };
        contain::turn(&mut transmit, &mut io, config, &pass(&stats.egress));
        contain::turn(&mut receive, &mut io, config, &pass(&stats.ingress));
        if let Some(error) = transmit.reads.gone.take().or_else(|| receive.gone.take()) {
            return WorkerEnd::TunGone(error);
        }
        if let Some(error) = receive.receives.failed.take() {
            return WorkerEnd::WaitFailed(error);
        }
        let next = idle.after_turn(moved(&transmit, &receive));
        ready = match wait(&mut io, next, &mut idle, stats) {
            Ok(ready) => ready,
            Err(error) => return WorkerEnd::WaitFailed(error),
        };
    }
    WorkerEnd::Stopped
}

/// Waits as `next` says; returns which sources may have something then.
fn wait(
    io: &mut impl Io,
    next: Next,
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
            return io.sleep();
        }
    }
    Ok(Ready::BOTH)
}

fn moved(transmit: &Transmit, receive: &Receive) -> Moved {
    let (reads, receives) = (&transmit.reads, &receive.receives);
    Moved {
        bytes: reads.bytes + receives.bytes,
        packets: reads.packets.len() + receive.packets,
        drained: reads.drained && receives.drained,
    }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
