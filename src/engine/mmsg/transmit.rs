//! From the TUN device to the network: read a batch, have it judged and planned, send the plan.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::engine::refusal::{SendRefusal, read_send};
use crate::engine::{WorkerConfig, WorkerEnd};
use crate::forward::{Egress, Pass};
use crate::offload::{MESSAGES_MAX, PIECES_PER_MESSAGE, Piece, SEGMENTS_MAX, VNET_HEADER_BYTES};
use crate::stats::{DirectionStats, DropReason};
use crate::sys::{Range, udp::SendBatch};

use super::{BATCH_BYTES, BATCH_PACKETS, Turn};

/// The longest packet that a TUN read can bring: IPv4's maximum, rounded up.
const READ_BYTES_MAX: usize = 64 << 10;

/// Room for the headers that cutting makes: 1,260 of TCP's usual 52 bytes. A batch of full
/// segments makes 135; one of tiny segments is sent in several rounds.
const HEADERS_BYTES: usize = 64 << 10;

/// Where headers lie in the arena: behind the last byte that a read can fill.
const HEADERS_AT: usize = BATCH_BYTES + READ_BYTES_MAX;

/// How long a full send buffer may hold up the worker before packets are dropped. A 10 Gb/s link
/// empties it in 3 ms; a slower one is congested, and dropping is the signal.
const BUSY_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Tries for one send whose error may be an earlier datagram's.
const STALE_RETRIES_MAX: usize = 8;

pub(super) struct Transmit {
    arena: Box<[u8]>,
    egress: Egress,
    batch: SendBatch,
    singles: SendBatch,
}

impl Transmit {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        Self {
            arena: vec![0; HEADERS_AT + HEADERS_BYTES].into_boxed_slice(),
            egress: Egress::new(config.socket.limits(), HEADERS_AT),
            batch: SendBatch::new(MESSAGES_MAX, MESSAGES_MAX * PIECES_PER_MESSAGE),
            singles: SendBatch::new(SEGMENTS_MAX, PIECES_PER_MESSAGE + SEGMENTS_MAX),
        }
    }

    /// Tries trains again where they were refused.
    pub(super) fn allow_trains(&mut self) {
        self.egress.plan_mut().allow_trains();
    }

    /// Moves one batch.
    pub(super) fn turn(
        &mut self,
        config: &WorkerConfig,
        pass: &Pass<'_>,
    ) -> Result<Turn, WorkerEnd> {
        let mut drained = false;
        let mut gone = None;
        let mut used_bytes = 0;
        let mut packets = 0;
        while used_bytes < BATCH_BYTES && packets < BATCH_PACKETS {
            let mut vnet_header = [0; VNET_HEADER_BYTES];
            let room = &mut self.arena[used_bytes..used_bytes + READ_BYTES_MAX];
            let bytes = match config.tun.read(&mut vnet_header, room) {
                Ok(bytes) => bytes,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => {
                        drained = true;
                        break;
                    }
                    Some(Errno::INTR) => continue,
                    // What was read before goes out all the same.
                    _ => {
                        gone = Some(error);
                        break;
                    }
                },
            };
            let packet = Piece::new(used_bytes, bytes);
            let mut taken = self.egress.process(pass, &mut self.arena, &vnet_header, packet);
            while taken.is_err() {
                self.send_plan(config, pass.stats);
                taken = self.egress.resume(&mut self.arena);
            }
            used_bytes += bytes;
            packets += 1;
        }
        self.send_plan(config, pass.stats);
        self.write_replies(config);
        match gone {
            Some(error) => Err(WorkerEnd::TunGone(error)),
            None => Ok(Turn { reads: packets, drained }),
        }
    }

    fn send_plan(&mut self, config: &WorkerConfig, stats: &DirectionStats) {
        let plan = self.egress.plan();
        self.batch.clear();
        for (index, message) in plan.messages().iter().enumerate() {
            let segment_bytes = (message.segments > 1).then_some(message.segment_bytes);
            let ranges = plan.pieces(index).iter().map(as_range);
            self.batch.push(message.destination, segment_bytes, ranges);
        }
        let mut first = 0;
        let mut retries = 0;
        while first < self.batch.len() {
            let message = self.egress.plan().messages()[first];
            match self.batch.send(config.socket.as_fd(), &self.arena, first) {
                Ok(sent) => {
                    for message in &self.egress.plan().messages()[first..first + sent] {
                        count_sent(stats, u64::from(message.segments), u64::from(message.bytes));
                    }
                    first += sent;
                    retries = 0;
                    continue;
                }
                Err(error) => match retry(config, &error, message.segments > 1, retries) {
                    Next::Again => {
                        retries += 1;
                        continue;
                    }
                    Next::OneByOne => {
                        config.stats.gso_fallbacks.add(1);
                        self.send_one_by_one(config, stats, first);
                        self.egress.plan_mut().refuse_trains(message.destination);
                    }
                    Next::Drop(reason) => stats.drop(reason, u64::from(message.segments)),
                },
            }
            first += 1;
            retries = 0;
        }
        self.egress.sent();
    }

    /// Sends the datagrams of a refused train, the same bytes, each on its own.
    fn send_one_by_one(&mut self, config: &WorkerConfig, stats: &DirectionStats, index: usize) {
        let plan = self.egress.plan();
        let destination = plan.messages()[index].destination;
        let (arena, singles) = (&self.arena, &mut self.singles);
        singles.clear();
        let mut lengths = [0u32; SEGMENTS_MAX];
        plan.for_each_datagram(index, |pieces| {
            lengths[singles.len()] = pieces.iter().map(|piece| piece.bytes).sum();
            singles.push(destination, None, pieces.iter().map(as_range));
        });
        let mut first = 0;
        let mut retries = 0;
        while first < singles.len() {
            match singles.send(config.socket.as_fd(), arena, first) {
                Ok(sent) => {
                    let bytes = lengths[first..first + sent].iter().map(|&b| u64::from(b)).sum();
                    count_sent(stats, sent as u64, bytes);
                    first += sent;
                    retries = 0;
                }
                Err(error) => match retry(config, &error, false, retries) {
                    Next::Again => retries += 1,
                    Next::OneByOne => first += 1,
                    Next::Drop(reason) => {
                        stats.drop(reason, 1);
                        first += 1;
                        retries = 0;
                    }
                },
            }
        }
    }

    fn write_replies(&mut self, config: &WorkerConfig) {
        let replies = self.egress.replies_mut();
        for (_, bytes) in replies.iter() {
            let header = [0; VNET_HEADER_BYTES];
            // The sender repeats what mattered, and so will the error.
            config.tun.write(&[IoSlice::new(&header), IoSlice::new(bytes)]).ok();
        }
        replies.clear();
    }
}

/// What follows a refused send.
enum Next {
    Again,
    OneByOne,
    Drop(DropReason),
}

fn retry(config: &WorkerConfig, error: &io::Error, train: bool, retries: usize) -> Next {
    match read_send(error, train) {
        SendRefusal::Train => Next::OneByOne,
        SendRefusal::Busy if retries == 0 => {
            let mut room = [PollFd::new(&config.socket, PollFlags::OUT)];
            // Whether it timed out or not, the next try tells.
            poll(&mut room, Some(&BUSY_WAIT)).ok();
            Next::Again
        }
        SendRefusal::Busy => Next::Drop(DropReason::SendBufferFull),
        SendRefusal::Stale if retries < STALE_RETRIES_MAX => Next::Again,
        SendRefusal::Stale => Next::Drop(DropReason::SendFailed),
        SendRefusal::Drop(reason) => Next::Drop(reason),
    }
}

fn as_range(piece: &Piece) -> Range {
    Range { offset: piece.offset as usize, bytes: piece.bytes as usize }
}

fn count_sent(stats: &DirectionStats, packets: u64, bytes: u64) {
    stats.packets_forwarded.add(packets);
    stats.bytes_forwarded.add(bytes);
    stats.writes.add(1);
}
