//! The io_uring engine: a turn reads both sources with one system call, and each plan of writes is
//! one more.

use std::os::fd::AsFd;

use crate::offload::VNET_HEADER_BYTES;
use crate::sys::Slots;
use crate::sys::ring::{Lent, Ring, RingError};
use crate::sys::tun_io::{Write, WriteBatch};

use super::errno::receive_failed;
use super::io::{
    BATCH_PACKETS, Io, MeanBytes, PACKET_BYTES_MAX, READS_MAX, RECEIVE_SLOTS, Reads, Receives,
    Share,
};
use super::worker::{WorkerConfig, WorkerEnd};

/// Submissions that a worker's ring holds: a whole batch of reads and of receives.
pub const RING_ENTRIES: u32 = 2 * BATCH_PACKETS as u32;

/// Operations in the largest batch: a batch of reads and one of receives, or 128 TUN writes.
const OPERATIONS_MAX: usize = 2 * BATCH_PACKETS;

/// Slots of a read: any packet, with its offload header in front.
const READ_SLOTS: Slots =
    Slots { slot_bytes: PACKET_BYTES_MAX + VNET_HEADER_BYTES, stride: RECEIVE_SLOTS.stride };

/// Bytes of the arena that reads fill.
pub(super) const READ_BYTES: usize = READS_MAX * READ_SLOTS.stride;

/// Reads asked for at first, and the fewest. One asked for in vain costs half of one that brings a
/// packet.
const ASKED_MIN: usize = 1;

/// The engine's state.
pub(super) struct RingIo {
    ring: Ring,
    /// Of the prompt lane, and of the bulk lanes behind it.
    reads: Vec<Asking>,
    receives: Asking,
    /// The first slot of reads that this turn has not used.
    slot: usize,
}

/// How many to ask one source for: twice what it had the last time, within its share of a batch.
struct Asking {
    mean_bytes: MeanBytes,
    last: usize,
}

impl Asking {
    fn new() -> Self {
        Self { mean_bytes: MeanBytes::new(), last: 0 }
    }

    fn count(&self, share: Share) -> usize {
        let most = self.mean_bytes.within(share.load).min(share.packets);
        (2 * self.last).max(ASKED_MIN).min(most)
    }

    fn learn(&mut self, count: usize, bytes: usize) {
        self.last = count;
        self.mean_bytes.learn(count, bytes);
    }
}

impl RingIo {
    pub(super) fn open(config: &WorkerConfig) -> Result<Self, RingError> {
        let mut files = vec![config.tun.as_fd(), config.socket.as_fd()];
        files.extend(config.bulk.iter().map(AsFd::as_fd));
        let ring = Ring::open(config.ring_entries, OPERATIONS_MAX, &files)?;
        let reads = (0..=config.bulk.len()).map(|_| Asking::new()).collect();
        Ok(Self { ring, reads, receives: Asking::new(), slot: 0 })
    }
}

impl Io for RingIo {
    fn read(
        &mut self,
        lane: usize,
        share: Share,
        reads: &mut Reads,
        receives: &mut Receives,
        is_receiving: bool,
    ) -> Result<usize, WorkerEnd> {
        let slot = if reads.moved.packets == 0 { 0 } else { self.slot };
        let count = self.reads[lane].count(share).min(READS_MAX - slot);
        self.slot = slot + count;
        let receive_count = if is_receiving { self.receives.count(Share::WHOLE) } else { 0 };
        let arena = &mut reads.arena[slot * READ_SLOTS.stride..];
        let Receives { arena: receive_arena, batch, .. } = receives;
        self.ring
            .gather(
                lane,
                &mut Lent { arena, layout: READ_SLOTS, count },
                &mut Lent { arena: receive_arena, layout: RECEIVE_SLOTS, count: receive_count },
                batch,
            )
            .map_err(WorkerEnd::WaitFailed)?;
        reads.moved.drained = count == 0;
        let (mut outcome, mut taken, mut load) = (Ok(()), 0, 0);
        for index in 0..count {
            match self.ring.answer(index) {
                Ok(bytes) => {
                    load += reads.push((slot + index) * READ_SLOTS.stride, bytes);
                    taken += 1;
                }
                Err(error) => {
                    let failed = reads.fail(error);
                    outcome = outcome.and(failed);
                }
            }
        }
        if count > 0 {
            self.reads[lane].learn(taken, load);
        }
        if is_receiving {
            receives.moved.drained = false;
            for slot in 0..receive_count {
                match self.ring.answer(count + slot) {
                    Ok(_) => receives.push(slot),
                    Err(error) => {
                        receives.moved.drained = true;
                        let failed = receive_failed(error);
                        outcome = outcome.and(failed);
                    }
                }
            }
            self.receives.learn(receives.filled.len(), receives.moved.bytes);
        }
        outcome.map(|()| load)
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
