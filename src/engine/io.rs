//! What a worker asks of the kernel, and what the kernel gave: the part in which engines differ.

use std::io;
use std::os::fd::BorrowedFd;

use crate::offload::{Piece, VNET_HEADER_BYTES};
use crate::sys::Slots;
use crate::sys::tun_io::WriteBatch;
use crate::sys::udp::{ReceiveBatch, SendBatch};

/// Bytes after which a batch ends: four super-packets, a quarter of a usual second-level cache, so
/// that what a read fills is still there for the send that empties it. A super-packet of 45
/// segments fills a train of 44, and what is left over makes one short train a batch: with 128 KiB
/// every third was short, and TCP over either link 10 to 15 % slower.
pub(super) const BATCH_BYTES: usize = 256 << 10;

/// Packets after which a batch ends, so that a flood of small ones one way leaves the other way
/// waiting for tens of microseconds, not more.
pub(super) const BATCH_PACKETS: usize = 64;

/// The longest packet that a TUN read can bring: IPv4's maximum, rounded up.
pub(super) const PACKET_BYTES_MAX: usize = 64 << 10;

/// Slots of a receive: any datagram and any train (65,507 bytes) fits. A page and a line more
/// than that lies between them, so that the first bytes of all don't share a cache set.
pub(super) const RECEIVE_SLOTS: Slots =
    Slots { slot_bytes: PACKET_BYTES_MAX, stride: PACKET_BYTES_MAX + 4096 + 64 };

/// The smallest packet that size estimates assume, so that a quiet link's next batch may fill
/// every place.
const MEAN_BYTES_MIN: usize = BATCH_BYTES / BATCH_PACKETS;

/// Which sources may have something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    pub(super) tun: bool,
    pub(super) socket: bool,
}

impl Ready {
    pub(super) const BOTH: Self = Self { tun: true, socket: true };
}

/// What a sleeping worker waits for, besides datagrams and its stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitFor {
    /// Packets from the TUN device.
    Packets,
    /// Room in the send buffer, for at most so long. The TUN device is left alone meanwhile: what
    /// it would bring could not be sent.
    Room { limit_ns: u64 },
}

/// One worker's way into the kernel. Nothing here waits but [`Self::sleep`].
pub(super) trait Io {
    /// Reads a batch from each source that may have something. Both batches come empty.
    fn gather(
        &mut self,
        ready: Ready,
        reads: &mut Reads,
        receives: &mut Receives,
    ) -> io::Result<()>;

    /// Sends the messages from `first` on; returns how many went, or the error of the first. One
    /// sendmmsg for a plan is one system call with either engine, and stops at the first message
    /// that is refused, so that none is overtaken.
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &mut SendBatch,
        arena: &[u8],
        first: usize,
    ) -> io::Result<usize> {
        batch.send(socket, arena, first)
    }

    /// Writes those from `first` on to the TUN device, in order; returns how many were tried, at
    /// least one. A refused barrier is the last of them. The batch then tells of each.
    fn write(&mut self, batch: &mut WriteBatch, arena: &[u8], first: usize) -> io::Result<usize>;

    /// Whether the kernel holds nothing of the arenas, as it must after each of these calls; not so
    /// after one that panicked halfway.
    fn is_idle(&self) -> bool;

    /// Sleeps until a datagram can be received, the worker is to stop, or what `wait_for` says.
    fn sleep(&mut self, wait_for: WaitFor) -> io::Result<Ready>;
}

/// One packet read from the TUN device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Read {
    pub(super) vnet_header: [u8; VNET_HEADER_BYTES],
    pub(super) packet: Piece,
}

/// A batch of packets read from the TUN device.
pub(super) struct Reads {
    pub(super) arena: Box<[u8]>,
    pub(super) packets: Vec<Read>,
    pub(super) bytes: usize,
    /// Packets that the device could not hand over.
    pub(super) unreadable: usize,
    /// Whether nothing is left to read for now; else the batch filled up first.
    pub(super) drained: bool,
    /// Why the device is gone.
    pub(super) gone: Option<io::Error>,
}

impl Reads {
    pub(super) fn new(arena_bytes: usize) -> Self {
        Self {
            arena: vec![0; arena_bytes].into_boxed_slice(),
            packets: Vec::with_capacity(BATCH_PACKETS),
            bytes: 0,
            unreadable: 0,
            drained: true,
            gone: None,
        }
    }

    /// An empty batch, with nothing left to read.
    pub(super) fn clear(&mut self) {
        self.packets.clear();
        (self.bytes, self.unreadable, self.drained) = (0, 0, true);
    }

    /// The device could not hand over one packet, because of `error`. A batch of nothing but such
    /// errors is no queue any more.
    pub(super) fn refused(&mut self, error: io::Error) {
        self.unreadable += 1;
        if self.unreadable == BATCH_PACKETS {
            self.gone = Some(error);
        }
    }

    pub(super) fn push(&mut self, vnet_header: [u8; VNET_HEADER_BYTES], packet: Piece) {
        self.packets.push(Read { vnet_header, packet });
        self.bytes += packet.bytes as usize;
    }
}

/// A batch of receives from the socket.
pub(super) struct Receives {
    pub(super) arena: Box<[u8]>,
    pub(super) batch: ReceiveBatch,
    /// Slots that were filled, in the order of arrival.
    pub(super) filled: Vec<u16>,
    pub(super) bytes: usize,
    /// Whether nothing is left to receive for now; else the batch filled up first.
    pub(super) drained: bool,
    /// Why nothing can be received any more.
    pub(super) failed: Option<io::Error>,
}

impl Receives {
    pub(super) fn new() -> Self {
        Self {
            arena: vec![0; BATCH_PACKETS * RECEIVE_SLOTS.stride].into_boxed_slice(),
            batch: ReceiveBatch::new(BATCH_PACKETS),
            filled: Vec::with_capacity(BATCH_PACKETS),
            bytes: 0,
            drained: true,
            failed: None,
        }
    }

    /// An empty batch, with nothing left to receive.
    pub(super) fn clear(&mut self) {
        self.filled.clear();
        (self.bytes, self.drained) = (0, true);
    }

    pub(super) fn push(&mut self, slot: usize) {
        self.filled.push(slot as u16);
        self.bytes += self.batch.received(slot).bytes;
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

    /// A batch brought `count` of `bytes` in all.
    pub(super) fn learn(&mut self, count: usize, bytes: usize) {
        if let Some(mean_bytes) = bytes.checked_div(count) {
            self.0 = mean_bytes.max(MEAN_BYTES_MIN);
        }
    }
}
