//! What weftd's workers count, and the kernel's programs beside them.

use std::collections::BTreeMap;
use std::ops;

use derive_more::AddAssign;
use serde::{Deserialize, Serialize};

use crate::stats::{DirectionStats, DropReason, WorkerStats};

/// Why the kernel's programs carry nothing if nobody wants them to.
pub const SWITCHED_OFF: &str = "switched-off";

/// Packets to peers and from them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Sent.
    pub packets_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Received.
    pub packets_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
}

/// The kernel's programs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FastPath {
    /// Whether they carry packets.
    pub on: bool,
    /// The peers that they send to.
    pub peers: Option<usize>,
    /// Why they carry none: a word of few, for scripts.
    pub why: Option<String>,
    /// The same for people.
    pub reason: Option<String>,
    /// What they carried so far.
    #[serde(flatten)]
    pub taken: Traffic,
}

/// What workers count of one direction. Super-packets count as the packets they carry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Direction {
    /// IPv4 packets taken in: those forwarded and those dropped.
    pub packets_received: u64,
    /// Their bytes, inner headers included.
    pub bytes_received: u64,
    /// IPv4 packets handed on to the kernel.
    pub packets_forwarded: u64,
    /// Their bytes.
    pub bytes_forwarded: u64,
    /// Reads, super-packets and batches as one.
    pub reads: u64,
    /// Writes, super-packets and batches as one.
    pub writes: u64,
    /// ICMP errors made because of packets of this direction.
    pub icmp_sent: u64,
    /// ICMP errors that the rate limit held back.
    pub icmp_limited: u64,
    /// Packets dropped, by the ids of docs/drop-reasons.md.
    pub drops: BTreeMap<String, u64>,
}

/// Packets dropped lately, for one reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lately {
    /// How many.
    pub packets: u64,
    /// When the last of them was, to two seconds.
    pub seconds_ago: u64,
}

/// What else workers count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerCounts {
    /// Times that a worker slept for lack of work.
    pub sleeps: u64,
    /// Times that it let small packets gather for a moment.
    pub naps: u64,
    /// Batches that the kernel refused and took one by one.
    pub gso_fallbacks: u64,
    /// Super-packets that the TUN device refused and took one by one.
    pub tun_fallbacks: u64,
    /// Datagrams that the kernel dropped because the receive buffer was full.
    pub receive_overflows: u64,
}

/// A worker.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Worker {
    /// Its number.
    pub index: usize,
    /// How it does its I/O: `io_uring` or `mmsg`.
    pub engine: String,
    /// The processor it is pinned to.
    pub processor: Option<usize>,
    /// How it gets a processor that others keep busy: `real-time`, `short-slice` or `ordinary`.
    /// Since schema 2.
    pub priority: Option<String>,
    /// Why that is not real time, if it was wanted. Since schema 2.
    pub no_real_time: Option<String>,
    /// For how long it has hung or got no processor, if it does. Since schema 2.
    pub stalled_seconds: Option<u64>,
    /// How long it ran. Since schema 2.
    pub ran_seconds: Option<f64>,
    /// How long it could have run and no processor was free. Since schema 2.
    pub waited_seconds: Option<f64>,
    /// From pods to the network.
    pub egress: Direction,
    /// From the network to pods.
    pub ingress: Direction,
    /// What else it counts.
    #[serde(flatten)]
    pub counts: WorkerCounts,
}

impl Direction {
    /// Packets dropped for `reason`.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.get(reason.id()).copied().unwrap_or(0)
    }

    /// Packets dropped for any reason.
    pub fn dropped_total(&self) -> u64 {
        self.drops.values().sum()
    }
}

impl From<&DirectionStats> for Direction {
    fn from(stats: &DirectionStats) -> Self {
        let drops = DropReason::ALL.iter().map(|reason| (reason.id(), stats.drops(*reason)));
        Self {
            packets_received: stats.packets_received.get(),
            bytes_received: stats.bytes_received.get(),
            packets_forwarded: stats.packets_forwarded.get(),
            bytes_forwarded: stats.bytes_forwarded.get(),
            reads: stats.reads.get(),
            writes: stats.writes.get(),
            icmp_sent: stats.icmp_sent.get(),
            icmp_limited: stats.icmp_limited.get(),
            drops: counted(drops),
        }
    }
}

impl From<&WorkerStats> for WorkerCounts {
    fn from(stats: &WorkerStats) -> Self {
        Self {
            sleeps: stats.sleeps.get(),
            naps: stats.naps.get(),
            gso_fallbacks: stats.gso_fallbacks.get(),
            tun_fallbacks: stats.tun_fallbacks.get(),
            receive_overflows: stats.receive_overflows.get(),
        }
    }
}

impl ops::AddAssign<&Self> for Direction {
    fn add_assign(&mut self, more: &Self) {
        self.packets_received += more.packets_received;
        self.bytes_received += more.bytes_received;
        self.packets_forwarded += more.packets_forwarded;
        self.bytes_forwarded += more.bytes_forwarded;
        self.reads += more.reads;
        self.writes += more.writes;
        self.icmp_sent += more.icmp_sent;
        self.icmp_limited += more.icmp_limited;
        for (reason, packets) in &more.drops {
            *self.drops.entry(reason.clone()).or_default() += packets;
        }
    }
}

/// Those that ever occurred.
pub fn counted<'a>(all: impl Iterator<Item = (&'a str, u64)>) -> BTreeMap<String, u64> {
    all.filter(|(_, count)| *count > 0).map(|(name, count)| (name.to_owned(), count)).collect()
}
