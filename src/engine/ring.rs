//! The io_uring engine: a turn reads both sources with one system call, and each plan of writes is
//! one more.

use std::os::fd::AsFd;

use crate::offload::VNET_HEADER_BYTES;
use crate::packet::Span;
use crate::sys::Slots;
use crate::sys::ring::{Lent, Ring, RingError};
use crate::sys::tun_io::{Write, WriteBatch};

use super::errno::receive_failed;
use super::io::{
    BATCH_PACKETS, Io, MeanBytes, PACKET_BYTES_MAX, RECEIVE_SLOTS, Reads, Ready, Receives,
};
use super::{WorkerConfig, WorkerEnd};

/// Submissions that a worker's ring holds: a whole batch of reads and of receives.
pub const RING_ENTRIES: u32 = 2 * BATCH_PACKETS as u32;

/// Operations in the largest batch: a batch of reads and one of receives, or 128 TUN writes.
const OPERATIONS_MAX: usize = 2 * BATCH_PACKETS;

/// Slots of a read: any packet, with its offload header in front.
const READ_SLOTS: Slots =
    Slots { slot_bytes: PACKET_BYTES_MAX + VNET_HEADER_BYTES, stride: RECEIVE_SLOTS.stride };

/// Bytes of the arena that reads fill.
pub(super) const READ_BYTES: usize = BATCH_PACKETS * READ_SLOTS.stride;

/// Reads asked for at first, and the fewest. One asked for in vain costs half of one that brings a
/// packet.
const ASKED_MIN: usize = 1;

/// The engine's state.
pub(super) struct RingIo {
    ring: Ring,
    reads: Asking,
    receives: Asking,
}

/// How many to ask one source for: twice what it had the last time, within the bytes of a batch.
struct Asking {
    mean_bytes: MeanBytes,
    last: usize,
}

impl Asking {
    fn new() -> Self {
        Self { mean_bytes: MeanBytes::new(), last: 0 }
    }

    fn count(&self, is_ready: bool) -> usize {
        let most = self.mean_bytes.room(0, 0);
        if is_ready { (2 * self.last).max(ASKED_MIN).min(most) } else { 0 }
    }

    fn learn(&mut self, count: usize, bytes: usize) {
        self.last = count;
        self.mean_bytes.learn(count, bytes);
    }
}

impl RingIo {
    pub(super) fn open(config: &WorkerConfig) -> Result<Self, RingError> {
        let (tun, socket) = (config.tun.as_fd(), config.socket.as_fd());
        let ring = Ring::open(config.ring_entries, OPERATIONS_MAX, tun, socket)?;
        Ok(Self { ring, reads: Asking::new(), receives: Asking::new() })
    }

    fn take_read(&self, reads: &mut Reads, index: usize) -> Result<(), WorkerEnd> {
        match self.ring.answer(index) {
            Ok(bytes) => {
                let at = index * READ_SLOTS.stride;
                let mut vnet_header = [0; VNET_HEADER_BYTES];
                vnet_header.copy_from_slice(&reads.arena[at..at + VNET_HEADER_BYTES]);
                let packet_bytes = bytes.saturating_sub(VNET_HEADER_BYTES);
                reads.push(vnet_header, Span::new(at + VNET_HEADER_BYTES, packet_bytes));
                Ok(())
            }
            Err(error) => reads.fail(error),
        }
    }
}

impl Io for RingIo {
    fn gather(
        &mut self,
        ready: Ready,
        reads: &mut Reads,
        receives: &mut Receives,
    ) -> Result<(), WorkerEnd> {
        let read_count = self.reads.count(ready.tun);
        let receive_count = self.receives.count(ready.socket);
        self.ring
            .gather(
                &mut Lent { arena: &mut reads.arena, layout: READ_SLOTS, count: read_count },
                &mut Lent {
                    arena: &mut receives.arena,
                    layout: RECEIVE_SLOTS,
                    count: receive_count,
                },
                &mut receives.batch,
            )
            .map_err(WorkerEnd::WaitFailed)?;
        let mut outcome = Ok(());
        reads.moved.drained = read_count == 0;
        for index in 0..read_count {
            let taken = self.take_read(reads, index);
            outcome = outcome.and(taken);
        }
        receives.moved.drained = receive_count == 0;
        for slot in 0..receive_count {
            match self.ring.answer(read_count + slot) {
                Ok(_) => receives.push(slot),
                Err(error) => {
                    receives.moved.drained = true;
                    let failed = receive_failed(error);
                    outcome = outcome.and(failed);
                }
            }
        }
        if ready.tun {
            self.reads.learn(reads.packets.len(), reads.moved.bytes);
        }
        self.receives.learn(receives.filled.len(), receives.moved.bytes);
        outcome
    }

    fn write<'a>(
        &mut self,
        batch: &mut WriteBatch,
        arena: &'a [u8],
        writes: impl Iterator<Item = Write<'a>>,
    ) -> usize {
        // Unless a write was answered, the batch says that it failed.
        self.ring.write(batch, arena, writes).unwrap_or_else(|_broken| batch.writes())
    }

    fn is_idle(&self) -> bool {
        self.ring.is_idle()
    }
}
