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
    BATCH_PACKETS, Io, MeanBytes, PACKET_BYTES_MAX, READS_MAX, RECEIVE_SLOTS, Reads, Ready,
    Receives,
};
use super::lanes::{Lanes, Share, WHOLE};
use super::{WorkerConfig, WorkerEnd};

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
    lanes: Lanes,
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
        let (tun, socket) = (config.tun.as_fd(), config.socket.as_fd());
        let bulk: Vec<_> = config.bulk.iter().map(AsFd::as_fd).collect();
        let ring = Ring::open(config.ring_entries, OPERATIONS_MAX, tun, socket, &bulk)?;
        let reads = (0..=bulk.len()).map(|_| Asking::new()).collect();
        Ok(Self { ring, reads, receives: Asking::new(), lanes: Lanes::new(bulk.len()) })
    }

    /// Reads `count` packets of a lane into the slots from `slot` on, and receives as many messages
    /// as `receives` says; returns what the packets weigh.
    fn read_lane(
        &mut self,
        lane: usize,
        (slot, count): (usize, usize),
        reads: &mut Reads,
        (receives, receive_count): (&mut Receives, usize),
    ) -> Result<usize, WorkerEnd> {
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
                    let at = (slot + index) * READ_SLOTS.stride;
                    let mut vnet_header = [0; VNET_HEADER_BYTES];
                    vnet_header.copy_from_slice(&reads.arena[at..at + VNET_HEADER_BYTES]);
                    let packet_bytes = bytes.saturating_sub(VNET_HEADER_BYTES);
                    load +=
                        reads.push(vnet_header, Span::new(at + VNET_HEADER_BYTES, packet_bytes));
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
        outcome.map(|()| load)
    }
}

impl Io for RingIo {
    fn gather(
        &mut self,
        ready: Ready,
        reads: &mut Reads,
        receives: &mut Receives,
    ) -> Result<(), WorkerEnd> {
        let mut slot = 0;
        if ready.tun {
            self.lanes.begin(ready.bulk);
            for index in 0..self.reads.len() - 1 {
                let Some(share) = self.lanes.share(index) else { continue };
                let count = self.reads[index + 1].count(share);
                let load = self.read_lane(index + 1, (slot, count), reads, (receives, 0))?;
                self.lanes.took(index, load, !reads.moved.drained);
                slot += count;
            }
        }
        let bulk = reads.packets.len();
        let count = if ready.tun { self.reads[0].count(WHOLE) } else { 0 };
        let receive_count = if ready.socket { self.receives.count(WHOLE) } else { 0 };
        receives.moved.drained = receive_count == 0;
        let mut left = BATCH_PACKETS - count;
        let mut outcome = self.read_lane(0, (slot, count), reads, (receives, receive_count));
        self.receives.learn(receives.filled.len(), receives.moved.bytes);
        slot += count;
        // What was sent before the packets from the bulk lanes is there by now.
        while bulk > 0 && !reads.moved.drained && outcome.is_ok() && left > 0 {
            let count = self.reads[0].count(Share { packets: left, ..WHOLE });
            outcome = self.read_lane(0, (slot, count), reads, (receives, 0));
            (slot, left) = (slot + count, left - count);
        }
        reads.packets.rotate_left(bulk);
        if ready.tun {
            self.lanes.prompt_has_more(!reads.moved.drained);
            reads.moved.drained = !self.lanes.have_more();
        }
        outcome.map(drop)
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
