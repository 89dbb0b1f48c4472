//! From the TUN device to the network: read a batch, have it judged and planned, send the plan.

use std::cell::Cell;
use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::outcome::{Outcome, carry_out};
use crate::engine::refusal::{ReadRefusal, read_read};
use crate::engine::{WorkerConfig, WorkerEnd};
use crate::forward::{Egress, Pass};
use crate::offload::{
    MESSAGES_MAX, PIECES_PER_MESSAGE, Piece, SEGMENTS_MAX, SendPlan, VNET_HEADER_BYTES,
};
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

/// How long a full send buffer may hold up one turn, and with it the other direction, before
/// packets are dropped. The kernel reports room once half the buffer is free, 3 ms at 10 Gb/s; a
/// slower link is congested, and dropping is the signal.
const BUSY_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

pub(super) struct Transmit {
    arena: Box<[u8]>,
    egress: Egress,
    batch: SendBatch,
    singles: SendBatch,
    /// Whether this turn has waited for the send buffer already.
    waited: Cell<bool>,
}

impl Transmit {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        Self {
            arena: vec![0; HEADERS_AT + HEADERS_BYTES].into_boxed_slice(),
            egress: Egress::new(config.socket.limits(), HEADERS_AT),
            batch: SendBatch::new(MESSAGES_MAX, MESSAGES_MAX * PIECES_PER_MESSAGE),
            singles: SendBatch::new(SEGMENTS_MAX, PIECES_PER_MESSAGE + SEGMENTS_MAX),
            waited: Cell::new(false),
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
        let (mut used_bytes, mut packets, mut unreadable) = (0, 0, 0);
        self.waited.set(false);
        while used_bytes < BATCH_BYTES && packets < BATCH_PACKETS {
            let mut vnet_header = [0; VNET_HEADER_BYTES];
            let room = &mut self.arena[used_bytes..used_bytes + READ_BYTES_MAX];
            let bytes = match config.tun.read(&mut vnet_header, room) {
                Ok(bytes) => bytes,
                Err(error) => match read_read(&error) {
                    ReadRefusal::Drained => {
                        drained = true;
                        break;
                    }
                    ReadRefusal::Again => continue,
                    ReadRefusal::Packet if unreadable < BATCH_PACKETS - 1 => {
                        self.egress.unreadable(pass);
                        unreadable += 1;
                        packets += 1;
                        continue;
                    }
                    // A batch of nothing but errors is no queue any more. What was read before
                    // goes out all the same.
                    ReadRefusal::Packet | ReadRefusal::Gone => {
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
            None => Ok(Turn { bytes: used_bytes, drained }),
        }
    }

    fn send_plan(&mut self, config: &WorkerConfig, stats: &DirectionStats) {
        let Self { arena, egress, batch, singles, waited } = self;
        let plan = egress.plan();
        batch.clear();
        for (index, message) in plan.messages().iter().enumerate() {
            let segment_bytes = (message.segments > 1).then_some(message.segment_bytes);
            batch.push(message.destination, segment_bytes, plan.pieces(index).iter().map(as_range));
        }
        let messages = plan.messages();
        let mut refusing = None;
        carry_out(
            batch.len(),
            |index| messages[index].segments > 1,
            |first| batch.send(config.socket.as_fd(), arena, first),
            || wait_once(config, waited),
            |range, outcome| match outcome {
                Outcome::Sent => {
                    for message in &messages[range] {
                        let packets = u64::from(message.segments);
                        count_sent(stats, 1, packets, u64::from(message.bytes));
                    }
                }
                Outcome::Refused => {
                    config.stats.gso_fallbacks.add(1);
                    // What refuses single datagrams as well has nothing against trains.
                    gather_datagrams(plan, range.start, singles);
                    if send_one_by_one(config, stats, arena, singles, waited) > 0 {
                        refusing = Some(messages[range.start].destination);
                    }
                }
                Outcome::Dropped(reason) => {
                    stats.drop(reason, u64::from(messages[range.start].segments));
                }
            },
        );
        if let Some(destination) = refusing {
            self.egress.plan_mut().refuse_trains(destination);
        }
        self.egress.sent();
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

/// Makes `singles` the datagrams of train `index`.
fn gather_datagrams(plan: &SendPlan, index: usize, singles: &mut SendBatch) {
    let destination = plan.messages()[index].destination;
    singles.clear();
    plan.for_each_datagram(index, |pieces| {
        singles.push(destination, None, pieces.iter().map(as_range));
    });
}

/// Sends the datagrams of a refused train, the same bytes, each on its own; returns how many went.
fn send_one_by_one(
    config: &WorkerConfig,
    stats: &DirectionStats,
    arena: &[u8],
    singles: &mut SendBatch,
    waited: &Cell<bool>,
) -> usize {
    let mut sent = 0;
    let mut sent_bytes = 0;
    let lengths: [u64; SEGMENTS_MAX] = std::array::from_fn(|index| singles.bytes(index));
    carry_out(
        singles.len(),
        |_| false,
        |first| singles.send(config.socket.as_fd(), arena, first),
        || wait_once(config, waited),
        |range, outcome| match outcome {
            Outcome::Sent => {
                sent += range.len();
                sent_bytes += lengths[range].iter().sum::<u64>();
            }
            Outcome::Refused => stats.drop(DropReason::SendFailed, 1),
            Outcome::Dropped(reason) => stats.drop(reason, 1),
        },
    );
    count_sent(stats, sent as u64, sent as u64, sent_bytes);
    sent
}

/// Waits for room in the send buffer, unless this turn has waited already.
fn wait_once(config: &WorkerConfig, waited: &Cell<bool>) -> bool {
    if waited.replace(true) {
        return false;
    }
    let mut room = [PollFd::new(&config.socket, PollFlags::OUT)];
    // Whether it timed out or not, the next try tells.
    poll(&mut room, Some(&BUSY_WAIT)).ok();
    true
}

fn as_range(piece: &Piece) -> Range {
    Range { offset: piece.offset as usize, bytes: piece.bytes as usize }
}

fn count_sent(stats: &DirectionStats, writes: u64, packets: u64, bytes: u64) {
    stats.packets_forwarded.add(packets);
    stats.bytes_forwarded.add(bytes);
    stats.writes.add(writes);
}
