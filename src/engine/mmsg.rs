//! The portable engine: poll, readv and writev on the TUN device, recvmmsg and sendmmsg on the
//! socket. One thread serves both directions, so a busy one can't starve the other: each turn
//! moves at most one batch each way, bounded by bytes and by packets.

mod receive;
mod transmit;

use std::io;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::thread::sched_yield;
use rustix::time::{ClockId, clock_gettime};

use crate::forward::Pass;

use self::receive::Receive;
use self::transmit::Transmit;
use super::{Stop, WorkerConfig, WorkerEnd};

/// Bytes after which a batch ends. Two super-packets and a third that crosses the line: what
/// stays in a core's cache between the read that fills it and the send that empties it.
const BATCH_BYTES: usize = 128 << 10;

/// Packets after which a batch ends, so that a flood of small ones one way leaves the other way
/// waiting for tens of microseconds, not more.
const BATCH_PACKETS: usize = 64;

/// How often destinations that refused trains are tried again: the kernel forgets a learned path
/// MTU after the same time (net.ipv4.route.mtu_expires).
const TRAINS_RETRY_NS: u64 = 600 * 1_000_000_000;

/// Turns without work before the worker sleeps, each after giving way to whoever else wants the
/// processor. Work that arrives meanwhile needs no wake-up, which is the dearest part of a small
/// packet's way; on a processor with nothing else to do it makes about 10 microseconds of waiting.
const IDLE_TURNS_LIGHT: usize = 16;

/// The same after bulk, where the next batch is worth a wake-up and a processor that looks busy
/// keeps the scheduler from placing those who produce it.
const IDLE_TURNS_BULK: usize = 2;

/// Bytes in one turn up to which traffic is light: a few small packets.
const LIGHT_BYTES_MAX: usize = 4096;

/// A yield that took longer than this gave the processor to somebody who uses it. Yielding on
/// would cost a scheduler slice a time; a sleeper is woken at once.
const YIELD_NS_MAX: u64 = 50_000;

/// What a turn in one direction found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    /// Bytes that were read.
    bytes: usize,
    /// Whether nothing is left to read for now; else the batch filled up first.
    drained: bool,
}

impl Turn {
    const NONE: Self = Self { bytes: 0, drained: true };
}

/// Runs a worker until it is stopped or loses its device.
pub(super) fn run(config: WorkerConfig, stop: &Stop) -> WorkerEnd {
    match work(&config, stop) {
        Ok(()) => WorkerEnd::Stopped,
        Err(end) => end,
    }
}

fn work(config: &WorkerConfig, stop: &Stop) -> Result<(), WorkerEnd> {
    let mut routes = config.routes.reader();
    let mut transmit = Transmit::new(config);
    let mut receive = Receive::new(config);
    let (mut tun_ready, mut socket_ready) = (true, true);
    // Since the last sleep.
    let (mut idle_turns, mut busiest_bytes) = (0, 0);
    let mut trains_allowed_ns = 0;
    while !stop.requested() {
        let now_ns = monotonic_ns();
        if now_ns - trains_allowed_ns > TRAINS_RETRY_NS {
            trains_allowed_ns = now_ns;
            transmit.allow_trains();
        }
        let table = routes.load();
        let stats = &config.stats;
        let pass = |stats| Pass { local: &config.local, table, stats, now_ns };
        let sent =
            if tun_ready { transmit.turn(config, &pass(&stats.egress))? } else { Turn::NONE };
        let received =
            if socket_ready { receive.turn(config, &pass(&stats.ingress))? } else { Turn::NONE };
        let bytes = sent.bytes + received.bytes;
        if bytes > 0 {
            idle_turns = 0;
            busiest_bytes = busiest_bytes.max(bytes);
        } else {
            idle_turns += 1;
        }
        let idle_turns_max =
            if busiest_bytes > LIGHT_BYTES_MAX { IDLE_TURNS_BULK } else { IDLE_TURNS_LIGHT };
        (tun_ready, socket_ready) = (true, true);
        if idle_turns > idle_turns_max {
            stats.sleeps.add(1);
            (tun_ready, socket_ready) = wait(config, stop).map_err(WorkerEnd::WaitFailed)?;
            (idle_turns, busiest_bytes) = (0, 0);
        } else if sent.drained && received.drained {
            let before_ns = monotonic_ns();
            sched_yield();
            if monotonic_ns() - before_ns > YIELD_NS_MAX {
                idle_turns = idle_turns_max;
            }
        }
    }
    Ok(())
}

/// Sleeps until something can be read; says what: the TUN device, the socket.
///
/// poll, not epoll: an epoll set stays on the wait queues of what it watches, and then the kernel
/// calls it for every packet queued and every packet sent, under a lock, while nobody sleeps.
fn wait(config: &WorkerConfig, stop: &Stop) -> io::Result<(bool, bool)> {
    let readable = PollFlags::IN;
    let mut sources = [
        PollFd::new(&config.tun, readable),
        PollFd::new(&config.socket, readable),
        PollFd::new(stop, readable),
    ];
    match poll(&mut sources, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    // An error or a hang-up is for the read to find out about.
    Ok((!sources[0].revents().is_empty(), !sources[1].revents().is_empty()))
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
