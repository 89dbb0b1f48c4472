//! The io_uring engine: a turn reads both sources with one system call, and each plan of writes is
//! one more.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::offload::{Piece, VNET_HEADER_BYTES};
use crate::sys::Slots;
use crate::sys::ring::{Lent, Ring, RingError, Source};
use crate::sys::tun_io::WriteBatch;

use super::io::{
    BATCH_PACKETS, Io, MeanBytes, PACKET_BYTES_MAX, RECEIVE_SLOTS, Reads, Ready, Receives, WaitFor,
};
use super::refusal::{ReadRefusal, read_read, receive_is_drained};
use super::{Stop, WorkerConfig};

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
    pub(super) fn open(config: &WorkerConfig, stop: &Stop) -> Result<Self, RingError> {
        let (tun, socket) = (config.tun.as_fd(), config.socket.as_fd());
        let ring = Ring::open(config.ring_entries, OPERATIONS_MAX, tun, socket, stop.as_fd())?;
        Ok(Self { ring, reads: Asking::new(), receives: Asking::new() })
    }

    fn take_read(&self, reads: &mut Reads, index: usize) {
        let error = match self.ring.answer(index) {
            Ok(bytes) => {
                let at = index * READ_SLOTS.stride;
                let mut vnet_header = [0; VNET_HEADER_BYTES];
                vnet_header.copy_from_slice(&reads.arena[at..at + VNET_HEADER_BYTES]);
                let packet_bytes = bytes.saturating_sub(VNET_HEADER_BYTES);
                return reads.push(vnet_header, Piece::new(at + VNET_HEADER_BYTES, packet_bytes));
            }
            Err(error) => error,
        };
        match read_read(&error) {
            ReadRefusal::Drained | ReadRefusal::Again => reads.drained = true,
            ReadRefusal::Packet => reads.refused(error),
            ReadRefusal::Gone => reads.gone = Some(error),
        }
    }
}

impl Io for RingIo {
    fn gather(
        &mut self,
        ready: Ready,
        reads: &mut Reads,
        receives: &mut Receives,
    ) -> io::Result<()> {
        let read_count = self.reads.count(ready.tun);
        let receive_count = self.receives.count(ready.socket);
        self.ring.gather(
            &mut Lent { arena: &mut reads.arena, layout: READ_SLOTS, count: read_count },
            &mut Lent { arena: &mut receives.arena, layout: RECEIVE_SLOTS, count: receive_count },
            &mut receives.batch,
        )?;
        reads.drained = read_count == 0;
        for index in 0..read_count {
            self.take_read(reads, index);
        }
        receives.drained = receive_count == 0;
        for slot in 0..receive_count {
            match self.ring.answer(read_count + slot) {
                Ok(_) => receives.push(slot),
                Err(error) if receive_is_drained(&error) => receives.drained = true,
                Err(error) => receives.failed = Some(error),
            }
        }
        self.reads.learn(reads.packets.len(), reads.bytes);
        self.receives.learn(receives.filled.len(), receives.bytes);
        Ok(())
    }

    fn write(&mut self, batch: &mut WriteBatch, arena: &[u8], first: usize) -> io::Result<usize> {
        self.ring.write(batch, arena, first)
    }

    fn is_idle(&self) -> bool {
        self.ring.is_idle()
    }

    fn sleep(&mut self, wait_for: WaitFor) -> io::Result<Ready> {
        match wait_for {
            WaitFor::Packets => {
                self.ring.wait(&[Source::Tun, Source::Socket, Source::Stop], None)?;
            }
            WaitFor::Room { limit_ns } => {
                let sources = [Source::Room, Source::Socket, Source::Stop];
                self.ring.wait(&sources, Some(Duration::from_nanos(limit_ns)))?;
            }
        }
        for source in [Source::Tun, Source::Socket, Source::Room] {
            self.ring.disarm(source)?;
        }
        // Whether there is room, the next send tells.
        self.ring.take_ready(Source::Room);
        Ok(Ready {
            tun: self.ring.take_ready(Source::Tun),
            socket: self.ring.take_ready(Source::Socket),
        })
    }
}
