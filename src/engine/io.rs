//! What engines do differently: read from both sources, and write to the TUN device.
//!
//! The rest of a worker's way into the kernel is the same for all engines, and not here: one
//! sendmmsg for a plan, and for the datagrams of a message that was refused (`egress`); a write
//! each for ICMP errors and for the packets of a refused super-packet (`ingress`); the clock, naps
//! and sleep (`cycle`).

use std::io;

use rustix::io::Errno;

use crate::device::LANES;
use crate::forward::reply::REPLIES_MAX;
use crate::offload::VNET_HEADER_BYTES;
use crate::packet::Span;
use crate::sys::Slots;
use crate::sys::tun_io::{Write, WriteBatch};
use crate::sys::udp::{ReceiveBatch, Received};

use super::idle::Moved;
use super::worker::WorkerEnd;

/// Bytes after which a batch ends: four super-packets, a quarter of a usual second-level cache, so
/// that what a read fills is still there for the send that empties it. A super-packet of 45
/// segments fills a GSO batch of 44, and what is left over of all makes a short one: with 128 KiB
/// every third was short, and TCP over either link 10 to 15 % slower.
pub(super) const BATCH_BYTES: usize = 256 << 10;

/// Packets after which a batch ends, so that a flood of small ones one way leaves the other way
/// waiting for tens of microseconds, not more.
pub(super) const BATCH_PACKETS: usize = 64;

/// Lanes of one worker.
pub(super) const LANES_MAX: usize = LANES.get() as usize;

/// Packets that a turn reads from the TUN device at most: a batch from the bulk lanes and two from
/// the prompt lane, and a quarter of one from each lane that was empty.
pub(super) const READS_MAX: usize = 3 * BATCH_PACKETS + LANES_MAX * BATCH_PACKETS / 4;

// Each packet may have an ICMP error.
const _: () = assert!(READS_MAX <= REPLIES_MAX);

/// The longest packet that a TUN read can bring: IPv4's maximum, rounded up.
pub(super) const PACKET_BYTES_MAX: usize = 64 << 10;

/// Slots of a receive: any datagram and any GRO batch (65,507 bytes) fits. A page and a line more
/// than that lies between them, so that the first bytes of all don't share a cache set.
pub(super) const RECEIVE_SLOTS: Slots =
    Slots { slot_bytes: PACKET_BYTES_MAX, stride: PACKET_BYTES_MAX + 4096 + 64 };

/// What a datagram weighs at least against a batch: cutting and sending a tiny one costs as much as
/// so many bytes of bulk do.
const DATAGRAM_LOAD: usize = 1024;

/// The smallest packet that size estimates assume, so that a quiet link's next batch may fill
/// every place.
const MEAN_BYTES_MIN: usize = BATCH_BYTES / BATCH_PACKETS;

/// Which sources may have something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    /// Any lane of the TUN device.
    pub(super) tun: bool,
    /// The bulk lanes among them, as far as a sleep has told: one bit for each.
    pub(super) bulk: u32,
    pub(super) socket: bool,
}

impl Ready {
    pub(super) const BOTH: Self = Self { tun: true, bulk: 0, socket: true };
}

/// What a turn may take from a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) packets: usize,
    /// As [`Reads::push`] counts.
    pub(super) load: usize,
}

impl Share {
    /// Of a lane that is read alone.
    pub(super) const WHOLE: Self = Self { packets: BATCH_PACKETS, load: BATCH_BYTES };
    pub(super) const NOTHING: Self = Self { packets: 0, load: 0 };
}

/// An engine. No call waits.
pub(super) trait Io {
    /// Reads a `share` of a lane, 0 the prompt one, behind what `reads` has from this turn, and
    /// receives a batch, if it `is_receiving`; returns what the packets weigh. What came before an
    /// error is moved all the same.
    fn read(
        &mut self,
        lane: usize,
        share: Share,
        reads: &mut Reads,
        receives: &mut Receives,
        is_receiving: bool,
    ) -> Result<usize, WorkerEnd>;

    /// Writes packets that lie in `arena` to the TUN device, in order; returns how many were tried,
    /// at least one. A refused barrier is the last of them. `batch` tells of each.
    fn write<'a>(
        &mut self,
        batch: &mut WriteBatch,
        arena: &'a [u8],
        writes: impl Iterator<Item = Write<'a>>,
    ) -> usize;

    /// Whether the kernel holds nothing of the arenas, as it must after each of these calls; not so
    /// after one that panicked halfway.
    fn is_idle(&self) -> bool;
}

/// One packet read from the TUN device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Read {
    pub(super) vnet_header: [u8; VNET_HEADER_BYTES],
    pub(super) packet: Span,
}

/// A batch of packets read from the TUN device.
pub(super) struct Reads {
    pub(super) arena: Box<[u8]>,
    pub(super) packets: Vec<Read>,
    /// Packets that the device could not hand over.
    pub(super) unreadable: usize,
    /// By this turn: a batch that waits for room in the send buffer was read by an earlier one.
    pub(super) moved: Moved,
}

impl Reads {
    pub(super) fn new(arena_bytes: usize) -> Self {
        Self {
            arena: vec![0; arena_bytes].into_boxed_slice(),
            packets: Vec::with_capacity(READS_MAX),
            unreadable: 0,
            moved: Moved::NOTHING,
        }
    }

    /// An empty batch, with nothing left to read.
    pub(super) fn clear(&mut self) {
        self.packets.clear();
        (self.unreadable, self.moved) = (0, Moved::NOTHING);
    }

    /// Packets that were taken from the device, those that could not be read among them.
    pub(super) fn seen(&self) -> usize {
        self.packets.len() + self.unreadable
    }

    /// A read failed. Only EBADFD says that the device is gone. EINVAL is one packet whose offload
    /// the kernel can't express (`tun_put_user`, drivers/net/tun.c), already taken off the queue:
    /// it is lost, and the queue goes on. A batch of nothing but such packets is no queue any more.
    pub(super) fn fail(&mut self, error: io::Error) -> Result<(), WorkerEnd> {
        match Errno::from_io_error(&error) {
            Some(Errno::AGAIN) => self.moved.drained = true,
            Some(Errno::INTR) => {}
            Some(Errno::BADFD | Errno::BADF) => return Err(WorkerEnd::TunGone(error)),
            _ => self.unreadable += 1,
        }
        if self.unreadable < BATCH_PACKETS { Ok(()) } else { Err(WorkerEnd::TunGone(error)) }
    }

    /// Returns what the packet weighs against a batch.
    pub(super) fn push(&mut self, at: usize, frame_bytes: usize) -> usize {
        let mut vnet_header = [0; VNET_HEADER_BYTES];
        vnet_header.copy_from_slice(&self.arena[at..at + VNET_HEADER_BYTES]);
        let bytes = frame_bytes.saturating_sub(VNET_HEADER_BYTES);
        let packet = Span::new(at + VNET_HEADER_BYTES, bytes);
        self.packets.push(Read { vnet_header, packet });
        self.moved.packets += 1;
        self.moved.bytes += bytes;
        let [_, _, _, _, low, high, ..] = vnet_header;
        let segment_bytes = usize::from(u16::from_le_bytes([low, high]));
        let datagrams = 1 + bytes.checked_div(segment_bytes).unwrap_or(0);
        bytes.max(datagrams * DATAGRAM_LOAD)
    }
}

/// A batch of receives from the socket.
pub(super) struct Receives {
    pub(super) arena: Box<[u8]>,
    pub(super) batch: ReceiveBatch,
    /// What was received and into which slot, in the order of arrival.
    pub(super) filled: Vec<(usize, Received)>,
    pub(super) moved: Moved,
}

impl Receives {
    pub(super) fn new() -> Self {
        Self {
            arena: vec![0; BATCH_PACKETS * RECEIVE_SLOTS.stride].into_boxed_slice(),
            batch: ReceiveBatch::new(BATCH_PACKETS),
            filled: Vec::with_capacity(BATCH_PACKETS),
            moved: Moved::NOTHING,
        }
    }

    /// An empty batch, with nothing left to receive.
    pub(super) fn clear(&mut self) {
        self.filled.clear();
        self.moved = Moved::NOTHING;
    }

    pub(super) fn push(&mut self, slot: usize) {
        let received = self.batch.received(slot);
        let segment_bytes = received.segment_bytes.map_or(received.bytes, usize::from);
        self.moved.packets += received.bytes.div_ceil(segment_bytes.max(1));
        self.moved.bytes += received.bytes;
        self.filled.push((slot, received));
    }
}

/// The mean size of what one source brings: the guess that bounds the bytes of the next batch.
/// Where it is wrong once, a batch may fill all its places, and the next guess is right.
#[derive(Debug)]
pub(super) struct MeanBytes(usize);

impl MeanBytes {
    pub(super) fn new() -> Self {
        Self(MEAN_BYTES_MIN)
    }

    /// How many more a batch of `count` with `bytes` so far may take.
    pub(super) fn room(&self, count: usize, bytes: usize) -> usize {
        BATCH_BYTES.saturating_sub(bytes).div_ceil(self.0).min(BATCH_PACKETS - count)
    }

    /// How many may come within `bytes`.
    pub(super) fn within(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.0)
    }

    /// A batch brought `count` of `bytes` in all.
    pub(super) fn learn(&mut self, count: usize, bytes: usize) {
        if let Some(mean_bytes) = bytes.checked_div(count) {
            self.0 = mean_bytes.max(MEAN_BYTES_MIN);
        }
    }
}
