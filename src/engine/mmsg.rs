//! The portable engine: poll, read and writev on the TUN device, recvmmsg and sendmmsg on the
//! socket.

use std::io;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::device::Tun;
use crate::offload::{Piece, VNET_HEADER_BYTES};
use crate::sys::tun_io::WriteBatch;

use super::io::{
    BATCH_BYTES, BATCH_PACKETS, Io, MeanBytes, PACKET_BYTES_MAX, RECEIVE_SLOTS, Reads, Ready,
    Receives, WaitFor,
};
use super::refusal::{ReadRefusal, read_read, receive_is_drained};
use super::{Stop, WorkerConfig};

/// Bytes of the arena that reads fill. Packets lie one right behind the other, so that a train of
/// small ones is a single range: the last begins before the batch is full. The first has room for
/// its offload header before it.
pub(super) const READ_BYTES: usize = VNET_HEADER_BYTES + BATCH_BYTES + PACKET_BYTES_MAX;

/// The engine's state: system calls keep none but a guess.
pub(super) struct Mmsg<'a> {
    config: &'a WorkerConfig,
    stop: &'a Stop,
    mean_bytes: MeanBytes,
}

impl<'a> Mmsg<'a> {
    pub(super) fn new(config: &'a WorkerConfig, stop: &'a Stop) -> Self {
        Self { config, stop, mean_bytes: MeanBytes::new() }
    }

    fn read(&self, reads: &mut Reads) {
        reads.drained = false;
        while reads.bytes < BATCH_BYTES && reads.packets.len() + reads.unreadable < BATCH_PACKETS {
            let frame = &mut reads.arena[reads.bytes..][..VNET_HEADER_BYTES + PACKET_BYTES_MAX];
            match read_over(&self.config.tun, frame) {
                Ok((vnet_header, bytes)) => {
                    let packet = Piece::new(reads.bytes + VNET_HEADER_BYTES, bytes);
                    reads.push(vnet_header, packet);
                }
                Err(error) => match read_read(&error) {
                    ReadRefusal::Drained => {
                        reads.drained = true;
                        return;
                    }
                    ReadRefusal::Again => {}
                    ReadRefusal::Packet => reads.refused(error),
                    ReadRefusal::Gone => reads.gone = Some(error),
                },
            }
            if reads.gone.is_some() {
                return;
            }
        }
    }

    fn receive(&mut self, receives: &mut Receives) {
        receives.drained = false;
        loop {
            let first = receives.filled.len();
            let wanted = self.mean_bytes.room(first, receives.bytes);
            if wanted == 0 {
                break;
            }
            let Receives { arena, batch, .. } = receives;
            let socket = self.config.socket.as_fd();
            let received = batch.receive(socket, arena, RECEIVE_SLOTS, first..first + wanted);
            let received = match received {
                Ok(received) => received,
                Err(error) if receive_is_drained(&error) => 0,
                Err(error) => {
                    receives.failed = Some(error);
                    0
                }
            };
            for slot in first..first + received {
                receives.push(slot);
            }
            if received < wanted {
                receives.drained = true;
                break;
            }
        }
        self.mean_bytes.learn(receives.filled.len(), receives.bytes);
    }
}

impl Io for Mmsg<'_> {
    fn gather(
        &mut self,
        ready: Ready,
        reads: &mut Reads,
        receives: &mut Receives,
    ) -> io::Result<()> {
        if ready.tun {
            self.read(reads);
        }
        if ready.socket {
            self.receive(receives);
        }
        Ok(())
    }

    fn write(&mut self, batch: &mut WriteBatch, arena: &[u8], first: usize) -> io::Result<usize> {
        Ok(batch.write_each(self.config.tun.as_fd(), arena, first))
    }

    /// A system call has returned, or was not made.
    fn is_idle(&self) -> bool {
        true
    }

    /// poll, not epoll: an epoll set stays on the wait queues of what it watches, and then the
    /// kernel calls it for every packet queued and every packet sent, under a lock, while nobody
    /// sleeps.
    fn sleep(&mut self, wait_for: WaitFor) -> io::Result<Ready> {
        let readable = PollFlags::IN;
        let (tun, socket, limit) = match wait_for {
            WaitFor::Packets => (readable, readable, None),
            WaitFor::Room { limit_ns } => {
                let limit = Timespec { tv_sec: 0, tv_nsec: limit_ns as i64 };
                (PollFlags::empty(), readable | PollFlags::OUT, Some(limit))
            }
        };
        let mut sources = [
            PollFd::new(&self.config.tun, tun),
            PollFd::new(&self.config.socket, socket),
            PollFd::new(self.stop, readable),
        ];
        match poll(&mut sources, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // An error or a hang-up is for the read to find out about.
        let woke = |source: &PollFd<'_>| !source.revents().is_empty();
        Ok(Ready { tun: woke(&sources[0]), socket: woke(&sources[1]) })
    }
}

/// Reads a packet so that it follows the one before it in the arena: the offload header comes to
/// lie on that one's last bytes, which are put back. Two short copies cost less than a second
/// piece in each read, and than a range of its own for each packet of a train.
fn read_over(tun: &Tun, frame: &mut [u8]) -> io::Result<([u8; VNET_HEADER_BYTES], usize)> {
    let mut before = [0; VNET_HEADER_BYTES];
    before.copy_from_slice(&frame[..VNET_HEADER_BYTES]);
    let read = tun.read_frame(frame);
    let mut vnet_header = [0; VNET_HEADER_BYTES];
    vnet_header.copy_from_slice(&frame[..VNET_HEADER_BYTES]);
    frame[..VNET_HEADER_BYTES].copy_from_slice(&before);
    Ok((vnet_header, read?.saturating_sub(VNET_HEADER_BYTES)))
}
