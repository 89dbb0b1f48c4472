//! What a worker is given, and how it may end.

use std::sync::Arc;
use std::sync::atomic::AtomicU16;

use crate::device::{Tun, TunnelSocket};
use crate::forward::{IcmpLimiter, Local};
use crate::route::Published;
use crate::stats::WorkerStats;
use crate::words::words;

use super::cipher::Cipher;

/// Everything a worker needs, ready to run.
pub struct WorkerConfig {
    /// Its number among the workers of one device; its thread is named after it.
    pub index: usize,
    /// The processor to run on; `None` leaves that to the scheduler.
    pub processor: Option<usize>,
    /// The TUN queue that it alone reads, or the first of them, its prompt lane.
    pub tun: Tun,
    /// The further ones, its bulk lanes.
    pub bulk: Vec<Tun>,
    /// The tunnel socket.
    pub socket: Arc<TunnelSocket>,
    /// This host.
    pub local: Local,
    /// Largest packet that fits the tunnel, in bytes, which may change while it runs; what `local`
    /// says of it is not looked at.
    pub mtu_bytes: Arc<AtomicU16>,
    /// The same of the largest packet that goes whole.
    pub whole_bytes: Arc<AtomicU16>,
    /// Where the control plane publishes routes.
    pub routes: Published,
    /// Where it counts.
    pub stats: Arc<WorkerStats>,
    /// Where all workers of the device count, itself included: what any of them hears from a peer
    /// shows that the peer is there.
    pub team: Arc<[Arc<WorkerStats>]>,
    /// The limit of ICMP errors, the same one for all workers of a daemon.
    pub icmp_limit: Arc<IcmpLimiter>,
    /// How it is to do its I/O; with `None` by io_uring where it can be had, else by mmsg.
    pub engine: Option<Engine>,
    /// Whether it is to get a processor that others keep busy before them.
    pub comes_first: bool,
    /// What it seals and opens by, where hosts talk WireGuard.
    pub cipher: Option<Cipher>,
    /// Submissions that an io_uring holds, a power of two: [`super::RING_ENTRIES`], or fewer, which
    /// takes more system calls for the same packets.
    pub ring_entries: u32,
}

impl WorkerConfig {
    /// The queue of a lane: 0 is the prompt one.
    pub(super) fn lane(&self, index: usize) -> &Tun {
        index.checked_sub(1).and_then(|bulk| self.bulk.get(bulk)).unwrap_or(&self.tun)
    }
}

words! {
    /// Ways of doing I/O.
    Engine {
        /// One system call for each TUN packet, batches of datagrams.
        Mmsg = "mmsg",
        /// Batches of both through an io_uring.
        IoUring = "io_uring",
    }
}

/// Why a worker ended.
#[derive(Debug)]
pub enum WorkerEnd {
    /// It was told to.
    Stopped,
    /// The TUN device is gone; a new one and a new worker are needed.
    TunGone(std::io::Error),
    /// Waiting for work or receiving failed, which leaves nothing to go on with.
    WaitFailed(std::io::Error),
    /// It panicked where it could not go on, which has been reported.
    Panicked,
}
