//! The portable engine: read and writev on the TUN device, recvmmsg on the socket.

use std::os::fd::AsFd;

use crate::device::Tun;
use crate::offload::VNET_HEADER_BYTES;
use crate::sys::tun_io::{Write, WriteBatch};

use super::errno::receive_failed;
use super::io::{
    BATCH_BYTES, Io, LANES_MAX, MeanBytes, PACKET_BYTES_MAX, RECEIVE_SLOTS, Reads, Receives, Share,
};
use super::worker::{WorkerConfig, WorkerEnd};

/// Bytes of the arena that reads fill. Packets lie one right behind the other, so that a GSO batch
/// of small ones is a single span: of each lane the last begins before its share is full. The first
/// has room for its offload header before it.
pub(super) const READ_BYTES: usize =
    VNET_HEADER_BYTES + 3 * BATCH_BYTES + 2 * LANES_MAX * PACKET_BYTES_MAX;

/// The engine's state: system calls keep none but a guess.
pub(super) struct Mmsg<'a> {
    config: &'a WorkerConfig,
    mean_bytes: MeanBytes,
}

impl<'a> Mmsg<'a> {
    pub(super) fn new(config: &'a WorkerConfig) -> Self {
        Self { config, mean_bytes: MeanBytes::new() }
    }

    fn receive(&mut self, receives: &mut Receives) -> Result<(), WorkerEnd> {
        receives.moved.drained = false;
        let mut outcome = Ok(());
        while !receives.moved.drained {
            let first = receives.filled.len();
            let wanted = self.mean_bytes.room(first, receives.moved.bytes);
            if wanted == 0 {
                break;
            }
            let Receives { arena, batch, .. } = receives;
            let socket = self.config.socket.as_fd();
            let received = batch.receive(socket, arena, RECEIVE_SLOTS, first..first + wanted);
            let received = received.unwrap_or_else(|error| {
                outcome = receive_failed(error);
                0
            });
            (first..first + received).for_each(|slot| receives.push(slot));
            receives.moved.drained = received < wanted;
        }
        self.mean_bytes.learn(receives.filled.len(), receives.moved.bytes);
        outcome
    }
}

impl Io for Mmsg<'_> {
    fn read(
        &mut self,
        lane: usize,
        share: Share,
        reads: &mut Reads,
        receives: &mut Receives,
        is_receiving: bool,
    ) -> Result<usize, WorkerEnd> {
        let read = read_lane(self.config.lane(lane), reads, share);
        let received = if is_receiving { self.receive(receives) } else { Ok(()) };
        read.and_then(|load| received.map(|()| load))
    }

    fn write<'a>(
        &mut self,
        batch: &mut WriteBatch,
        arena: &'a [u8],
        writes: impl Iterator<Item = Write<'a>>,
    ) -> usize {
        batch.write_each(self.config.tun.as_fd(), arena, writes)
    }

    /// A system call has returned, or was not made.
    fn is_idle(&self) -> bool {
        true
    }
}

/// Reads a share of a lane behind what was read already; returns what it weighs.
fn read_lane(lane: &Tun, reads: &mut Reads, share: Share) -> Result<usize, WorkerEnd> {
    reads.moved.drained = share == Share::NOTHING;
    let (first, mut load) = (reads.seen(), 0);
    while !reads.moved.drained && load < share.load && reads.seen() - first < share.packets {
        // A packet follows the one before it in the arena: its offload header comes to lie on that
        // one's last bytes, which are put back. Two short copies cost less than a second iovec in
        // each read, and than a span of its own for each packet of a GSO batch.
        let at = reads.moved.bytes;
        let mut before = [0; VNET_HEADER_BYTES];
        before.copy_from_slice(&reads.arena[at..at + VNET_HEADER_BYTES]);
        let read = lane.read(&mut reads.arena[at..][..VNET_HEADER_BYTES + PACKET_BYTES_MAX]);
        let taken = read.map(|bytes| load += reads.push(at, bytes));
        reads.arena[at..at + VNET_HEADER_BYTES].copy_from_slice(&before);
        taken.or_else(|error| reads.fail(error))?;
    }
    Ok(load)
}
