//! From the TUN device to the network: have a batch of reads judged and planned, send the plan.

use std::io::IoSlice;
use std::net::SocketAddrV4;
use std::os::fd::AsFd;

use crate::forward::{Egress, Pass};
use crate::offload::{
    Full, MESSAGES_MAX, Message, PIECES_PER_MESSAGE, Piece, SEGMENTS_MAX, SendPlan,
    VNET_HEADER_BYTES,
};
use crate::packet::echo;
use crate::stats::{DirectionStats, DropReason, LONG_BYTES};
use crate::sys::{Range, udp::SendBatch};

use super::WorkerConfig;
use super::contain::{Half, Progress};
use super::io::{Io, Reads, WaitFor};
use super::outcome::{Outcome, carry_out};

/// Room for the headers that cutting makes: 1,260 of TCP's usual 52 bytes. A batch of full
/// segments makes 135; one of tiny segments is sent in several rounds.
const HEADERS_BYTES: usize = 64 << 10;

/// How long the packets of one batch may wait for room in the send buffer before they are dropped.
/// The kernel reports room once half the buffer is free, 2 ms at 10 Gb/s; a slower link is
/// congested, and dropping is the signal. The TUN device is not read meanwhile: its queue fills,
/// and the kernel drops what does not fit there. Receiving goes on.
const ROOM_WAIT_NS: u64 = 2_000_000;

pub(super) struct Transmit {
    pub(super) reads: Reads,
    egress: Egress,
    batch: SendBatch,
    singles: SendBatch,
    /// Messages of the plan that were sent or dropped.
    settled: usize,
    /// Until when packets wait for room in the send buffer.
    waits_until_ns: Option<u64>,
    progress: Progress,
}

impl Half for Transmit {
    const SOURCE: &'static str = "this host";

    fn move_batch(&mut self, io: &mut impl Io, config: &WorkerConfig, pass: &Pass<'_>) {
        for _ in 0..std::mem::take(&mut self.reads.unreadable) {
            self.egress.unreadable(pass);
        }
        // An earlier turn may have left a plan, and a packet that met it full.
        let mut taken = if self.is_waiting() { Err(Full) } else { Ok(()) };
        loop {
            while taken.is_err() {
                if !self.send_plan(io, config, pass) {
                    return;
                }
                taken = self.egress.resume(pass, &mut self.reads.arena);
            }
            let Some(index) = self.progress.next(pass.stats) else { break };
            let read = self.reads.packets[index];
            let arena = &mut self.reads.arena;
            taken = self.egress.process(pass, arena, &read.vnet_header, read.packet);
        }
        if self.send_plan(io, config, pass) {
            self.waits_until_ns = None;
            self.write_replies(config);
        }
    }

    fn progress(&mut self) -> &mut Progress {
        &mut self.progress
    }

    fn abandon(&mut self) {
        self.egress.abandon();
        self.batch.clear();
        (self.settled, self.waits_until_ns) = (0, None);
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
            settled: 0,
            waits_until_ns: None,
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
        self.progress.start(self.reads.packets.len());
    }

    /// Whether packets of the last batch wait for room in the send buffer, so that there is no
    /// place to read another one.
    pub(super) fn is_waiting(&self) -> bool {
        self.waits_until_ns.is_some()
    }

    /// What waits for room is sent in the next turn, or dropped.
    pub(super) fn wait_no_longer(&mut self) {
        self.waits_until_ns = Some(0);
    }

    /// What the worker has to wait for, should it sleep.
    pub(super) fn wait_for(&self, now_ns: u64) -> WaitFor {
        match self.waits_until_ns {
            None => WaitFor::Packets,
            Some(until_ns) => WaitFor::Room { limit_ns: until_ns.saturating_sub(now_ns) },
        }
    }

    /// Sends what is left of the plan; returns whether that was all of it.
    fn send_plan(&mut self, io: &mut impl Io, config: &WorkerConfig, pass: &Pass<'_>) -> bool {
        let Self { reads, egress, batch, singles, settled, waits_until_ns, .. } = self;
        let (arena, plan) = (&reads.arena, egress.plan());
        let messages = plan.messages();
        if batch.is_empty() {
            for (index, message) in messages.iter().enumerate() {
                let segment_bytes = (message.segments > 1).then_some(message.segment_bytes);
                let ranges = plan.pieces(index).iter().map(as_range);
                batch.push(message.destination, segment_bytes, ranges);
            }
        }
        let mut refusing = None;
        *settled = carry_out(
            *settled..batch.len(),
            |index| messages[index].segments > 1,
            |first| io.send(config.socket.as_fd(), batch, arena, first),
            || pass.now_ns < *waits_until_ns.get_or_insert(pass.now_ns + ROOM_WAIT_NS),
            |range, outcome| match outcome {
                Outcome::Sent => {
                    for index in range {
                        let message = &messages[index];
                        let packets = u64::from(message.segments);
                        mark_if_long(config, arena, plan, index);
                        count_sent(pass.stats, 1, packets, u64::from(message.bytes));
                    }
                }
                Outcome::Refused => {
                    let message = &messages[range.start];
                    config.socket.set_fragmenting(true);
                    gather_datagrams(plan, range.start, singles);
                    let sent = send_one_by_one(config, message.destination, arena, singles);
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
        if self.settled < self.batch.len() {
            return false;
        }
        self.settled = 0;
        self.batch.clear();
        self.egress.sent();
        true
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

/// Marks who was sent message `index`, if its datagrams are long. One that begins with this host's
/// own answer to an echo counts for nothing: a peer that measures its path must not have us measure
/// ours in turn, and the peer again, for ever.
fn mark_if_long(config: &WorkerConfig, arena: &[u8], plan: &SendPlan, index: usize) {
    let Message { destination, segment_bytes, .. } = plan.messages()[index];
    if segment_bytes <= LONG_BYTES {
        return;
    }
    let first = plan.pieces(index).iter().find(|piece| piece.bytes > 0);
    let packet = first.and_then(|piece| arena.get(piece.range()));
    if packet.is_some_and(|packet| !echo::is_reply_from(config.local.tun_address, packet)) {
        config.stats.long_sends.mark(destination, segment_bytes);
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
/// returns how many went. None waits for room: that a message is refused in its form while the
/// buffer is full is rare.
fn send_one_by_one(
    config: &WorkerConfig,
    destination: SocketAddrV4,
    arena: &[u8],
    singles: &mut SendBatch,
) -> usize {
    let stats = &config.stats;
    let (mut sent, mut sent_bytes) = (0, 0);
    let lengths: [u64; SEGMENTS_MAX] = std::array::from_fn(|index| singles.bytes(index));
    carry_out(
        0..singles.len(),
        |_| false,
        |first| singles.send(config.socket.as_fd(), arena, first),
        || false,
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

pub(super) fn as_range(piece: &Piece) -> Range {
    Range { offset: piece.offset as usize, bytes: piece.bytes as usize }
}

fn count_sent(stats: &DirectionStats, writes: u64, packets: u64, bytes: u64) {
    stats.packets_forwarded.add(packets);
    stats.bytes_forwarded.add(bytes);
    stats.writes.add(writes);
}
