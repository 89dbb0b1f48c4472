//! From the TUN device to the network: have a batch of reads judged and planned, send the plan.

use std::cell::Cell;
use std::io::IoSlice;
use std::net::SocketAddrV4;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::forward::{Egress, Pass};
use crate::offload::{
    MESSAGES_MAX, Message, PIECES_PER_MESSAGE, Piece, SEGMENTS_MAX, SendPlan, VNET_HEADER_BYTES,
};
use crate::stats::{DirectionStats, DropReason};
use crate::sys::{Range, udp::SendBatch};

use super::WorkerConfig;
use super::contain::{Half, Progress};
use super::io::{Io, Reads};
use super::outcome::{Outcome, carry_out};

/// Room for the headers that cutting makes: 1,260 of TCP's usual 52 bytes. A batch of full
/// segments makes 135; one of tiny segments is sent in several rounds.
const HEADERS_BYTES: usize = 64 << 10;

/// How long a full send buffer may hold up one turn, and with it the other direction, before
/// packets are dropped. The kernel reports room once half the buffer is free, 3 ms at 10 Gb/s; a
/// slower link is congested, and dropping is the signal.
const BUSY_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

pub(super) struct Transmit {
    pub(super) reads: Reads,
    egress: Egress,
    batch: SendBatch,
    singles: SendBatch,
    /// Whether this turn has waited for the send buffer already.
    waited: Cell<bool>,
    progress: Progress,
}

impl Half for Transmit {
    const SOURCE: &'static str = "this host";

    fn move_batch(&mut self, io: &mut impl Io, config: &WorkerConfig, pass: &Pass<'_>) {
        for _ in 0..std::mem::take(&mut self.reads.unreadable) {
            self.egress.unreadable(pass);
        }
        while let Some(index) = self.progress.next(pass.stats) {
            let read = self.reads.packets[index];
            let arena = &mut self.reads.arena;
            let mut taken = self.egress.process(pass, arena, &read.vnet_header, read.packet);
            while taken.is_err() {
                self.send_plan(io, config, pass.stats);
                taken = self.egress.resume(pass, &mut self.reads.arena);
            }
        }
        self.send_plan(io, config, pass.stats);
        self.write_replies(config);
    }

    fn progress(&mut self) -> &mut Progress {
        &mut self.progress
    }

    fn abandon(&mut self) {
        self.egress.abandon();
    }

    fn current(&self) -> &[u8] {
        self.egress.current().of(&self.reads.arena).unwrap_or_default()
    }
}

impl Transmit {
    /// For reads that fill the first `read_bytes` of an arena.
    pub(super) fn new(config: &WorkerConfig, read_bytes: usize) -> Self {
        Self {
            reads: Reads::new(read_bytes + HEADERS_BYTES),
            egress: Egress::new(config.socket.limits(), read_bytes),
            batch: SendBatch::new(MESSAGES_MAX, MESSAGES_MAX * PIECES_PER_MESSAGE),
            singles: SendBatch::new(SEGMENTS_MAX, PIECES_PER_MESSAGE + SEGMENTS_MAX),
            waited: Cell::new(false),
            progress: Progress::default(),
        }
    }

    /// Tries trains again where they were refused, and datagrams without fragmentation.
    pub(super) fn forget_refusals(&mut self, config: &WorkerConfig) {
        config.socket.set_fragmenting(false);
        self.egress.plan_mut().allow_trains();
    }

    /// A batch was read, and is to be moved to the last packet, whatever became of the device.
    pub(super) fn begin_turn(&mut self) {
        self.waited.set(false);
        self.progress.start(self.reads.packets.len());
    }

    fn send_plan(&mut self, io: &mut impl Io, config: &WorkerConfig, stats: &DirectionStats) {
        let Self { reads, egress, batch, singles, waited, .. } = self;
        let (arena, plan) = (&reads.arena, egress.plan());
        let messages = plan.messages();
        batch.clear();
        for (index, message) in messages.iter().enumerate() {
            let segment_bytes = (message.segments > 1).then_some(message.segment_bytes);
            batch.push(message.destination, segment_bytes, plan.pieces(index).iter().map(as_range));
        }
        let (mut refusing, long_sends) = (None, &config.stats.long_sends);
        carry_out(
            batch.len(),
            |index| messages[index].segments > 1,
            |first| io.send(batch, arena, first),
            || wait_once(config, waited),
            |range, outcome| match outcome {
                Outcome::Sent => {
                    for message in &messages[range] {
                        let packets = u64::from(message.segments);
                        long_sends.mark(message.destination, message.segment_bytes);
                        count_sent(stats, 1, packets, u64::from(message.bytes));
                    }
                }
                Outcome::Refused => {
                    let message = &messages[range.start];
                    config.socket.set_fragmenting(true);
                    gather_datagrams(plan, range.start, singles);
                    let sent = send_one_by_one(config, message.destination, arena, singles, waited);
                    if message.segments > 1 {
                        config.stats.gso_fallbacks.add(1);
                        // What refuses single datagrams as well has nothing against trains.
                        refusing = (sent > 0).then_some(message.destination).or(refusing);
                    }
                }
                Outcome::Dropped(reason) => {
                    let Message { destination, segments, .. } = messages[range.start];
                    config.stats.drop_send(destination, reason, u64::from(segments));
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

/// Sends the datagrams of a refused message to `destination`, the same bytes, each on its own;
/// returns how many went.
fn send_one_by_one(
    config: &WorkerConfig,
    destination: SocketAddrV4,
    arena: &[u8],
    singles: &mut SendBatch,
    waited: &Cell<bool>,
) -> usize {
    let stats = &config.stats;
    let (mut sent, mut sent_bytes) = (0, 0);
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
            Outcome::Refused => stats.drop_send(destination, DropReason::SendFailed, 1),
            Outcome::Dropped(reason) => stats.drop_send(destination, reason, 1),
        },
    );
    count_sent(&stats.egress, sent as u64, sent as u64, sent_bytes);
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

pub(super) fn as_range(piece: &Piece) -> Range {
    Range { offset: piece.offset as usize, bytes: piece.bytes as usize }
}

fn count_sent(stats: &DirectionStats, writes: u64, packets: u64, bytes: u64) {
    stats.packets_forwarded.add(packets);
    stats.bytes_forwarded.add(bytes);
    stats.writes.add(writes);
}
