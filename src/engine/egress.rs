//! Egress, from the TUN device to the network: has a batch of reads decided and planned, and sends
//! the plan.

use std::cell::RefCell;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::forward::{Context, Egress};
use crate::offload::{
    Full, MESSAGES_MAX, Message, SEGMENTS_MAX, SPANS_PER_MESSAGE, SendPlan, VNET_HEADER_BYTES,
};
use crate::packet::{Span, echo};
use crate::route::Endpoint;
use crate::stats::{DropReason, DroppedPacket, LONG_BYTES};
use crate::sys::udp::{Datagrams, SendBatch};

use super::cipher::{GROWTH_BYTES, SEALED_MORE_BYTES, Sealed, Sealer};
use super::contain::{Half, Progress};
use super::idle::Moved;
use super::io::{Io, Reads};
use super::offers::Offers;
use super::outcome::{Outcome, Unsent, carry_out};
use super::worker::{WorkerConfig, WorkerEnd};

/// Room for the headers that cutting makes: 1,260 of TCP's usual 52 bytes. A batch of full
/// segments makes 135; one of tiny segments is sent in several rounds.
const HEADERS_BYTES: usize = 64 << 10;

/// How long the packets of one batch may wait for room in the send buffer before they are dropped.
/// The kernel reports room once half the buffer is free, 2 ms at 10 Gb/s; a slower link is
/// congested, and dropping is the signal. The TUN device is not read meanwhile: its queue fills,
/// and the kernel drops what does not fit there. Receiving goes on.
const ROOM_WAIT_NS: u64 = 2_000_000;

pub(super) struct EgressHalf<'a> {
    config: &'a WorkerConfig,
    pub(super) reads: Reads,
    egress: Egress,
    batch: SendBatch,
    singles: SendBatch,
    /// Messages of the plan that were sent or dropped.
    settled: usize,
    /// Until when packets of the last batch wait for room in the send buffer, if they do: there is
    /// no place to read another one. Once that is past, they are sent in the next turn, or dropped.
    pub(super) waits_until_ns: Option<u64>,
    /// Whether they wait for room in that of this worker's own port.
    pub(super) waits_for_source: bool,
    offers: Offers,
    sealer: Option<Sealer>,
    progress: Progress,
}

impl Half for EgressHalf<'_> {
    const SOURCE: &'static str = "this host";

    fn move_batch(&mut self, _: &mut impl Io, context: &Context<'_>) -> Result<(), WorkerEnd> {
        for _ in 0..std::mem::take(&mut self.reads.unreadable) {
            self.egress.unreadable(context);
        }
        // An earlier turn may have left a plan, and a packet that met it full.
        let mut taken = if self.is_waiting() { Err(Full) } else { Ok(()) };
        loop {
            while taken.is_err() {
                if !self.send_plan(context) {
                    return Ok(());
                }
                taken = self.egress.resume(context, &mut self.reads.arena);
            }
            let Some(index) = self.progress.next(context.stats) else { break };
            let read = self.reads.packets[index];
            let arena = &mut self.reads.arena;
            taken = self.egress.process(context, arena, &read.vnet_header, read.packet);
        }
        if self.send_plan(context) {
            self.waits_until_ns = None;
            self.write_replies();
        }
        Ok(())
    }

    fn progress(&mut self) -> &mut Progress {
        &mut self.progress
    }

    fn abandon(&mut self) {
        self.egress.abandon();
        self.sealer.iter_mut().for_each(Sealer::sent);
        (self.settled, self.waits_until_ns) = (0, None);
    }

    fn current(&self) -> &[u8] {
        self.egress.current.of(&self.reads.arena).unwrap_or_default()
    }
}

impl<'a> EgressHalf<'a> {
    /// For reads that fill the first `read_bytes` of an arena.
    pub(super) fn new(config: &'a WorkerConfig, read_bytes: usize) -> Self {
        let plain_bytes = read_bytes + HEADERS_BYTES;
        let sealer = config.cipher.as_ref().map(|cipher| Sealer::new(cipher, plain_bytes));
        let sealed_bytes = sealer.as_ref().map_or(0, |_| plain_bytes + SEALED_MORE_BYTES);
        let growth_bytes = sealer.as_ref().map_or(0, |_| GROWTH_BYTES);
        let plan = SendPlan::growing_by(config.socket.segments_max, growth_bytes);
        Self {
            config,
            reads: Reads::new(plain_bytes + sealed_bytes),
            egress: Egress::filling(plan, read_bytes..plain_bytes),
            batch: SendBatch::new(MESSAGES_MAX, MESSAGES_MAX * SPANS_PER_MESSAGE),
            singles: SendBatch::new(SEGMENTS_MAX, SPANS_PER_MESSAGE),
            settled: 0,
            waits_until_ns: None,
            waits_for_source: false,
            offers: Offers::new(config),
            sealer,
            progress: Progress::default(),
        }
    }

    /// Tries GSO again where it was refused, and datagrams without fragmentation.
    pub(super) fn retry_refused(&mut self) {
        self.config.socket.set_fragmenting(false);
        self.egress.plan.allow_gso();
    }

    /// Makes room for a batch of reads, unless an earlier one still waits.
    pub(super) fn clear(&mut self) {
        if self.is_waiting() {
            self.reads.moved = Moved::NOTHING;
        } else {
            self.reads.clear();
        }
    }

    /// What was read is to be moved to the last packet, whatever became of the device.
    pub(super) fn begin_turn(&mut self) {
        self.sealer.iter_mut().for_each(Sealer::refresh);
        if !self.is_waiting() {
            self.progress.start(self.reads.packets.len());
        }
    }

    /// Whether packets wait for room in the send buffer.
    pub(super) fn is_waiting(&self) -> bool {
        self.waits_until_ns.is_some()
    }

    /// Sends what is left of the plan; returns whether that was all of it.
    fn send_plan(&mut self, context: &Context<'_>) -> bool {
        if let Some(sealer) = &mut self.sealer {
            sealer.seal(&mut self.egress.plan, &mut self.reads.arena, context);
        }
        let refusing = self.offer_plan(context);
        if let Some(destination) = refusing {
            self.egress.plan.refuse_gso(destination);
        }
        let is_done = self.settled == self.egress.plan.messages().len();
        if is_done {
            self.settled = 0;
            self.egress.sent();
            self.sealer.iter_mut().for_each(Sealer::sent);
        }
        is_done
    }

    /// Offers the kernel what is left of the plan, as far as it takes it; returns who refuses GSO
    /// batches.
    fn offer_plan(&mut self, context: &Context<'_>) -> Option<Endpoint> {
        let Self { config, reads, egress, batch, singles, settled, offers, sealer, .. } = self;
        let Self { waits_until_ns, waits_for_source, .. } = self;
        let (arena, plan) = (&reads.arena, &egress.plan);
        let messages = plan.messages();
        let mut refusing = None;
        offers.begin_plan();
        // The send of a message and what becomes of it both learn from the kernel's answers.
        let offers = RefCell::new(offers);
        *settled = carry_out(
            *settled..messages.len(),
            |index| messages[index].segments > 1,
            |first| {
                let left = &messages[first..];
                let sealed = sealer.as_ref().map(|sealer| sealer.outcome(first));
                let left = match sealed.unwrap_or(Sealed::Ready(left.len())) {
                    Sealed::Ready(count) => &left[..count.min(left.len())],
                    Sealed::Waits => return Ok(1),
                    Sealed::Lost => return Err(Unsent::Withheld(DropReason::NoSession)),
                };
                let mut offers = offers.borrow_mut();
                let next = offers.next(config, context, left).map_err(Unsent::Withheld)?;
                let (count, by_source) = next;
                *waits_for_source = by_source;
                let datagrams = (first..first + count).map(|index| {
                    let Message { destination, segments, segment_bytes, .. } = messages[index];
                    let destination = address(sealer.as_ref(), context, destination, index);
                    let segment_bytes = (segments > 1).then_some(segment_bytes);
                    Datagrams { destination, segment_bytes, spans: plan.spans(index) }
                });
                let sent = batch.send(config.socket.sender(by_source), arena, datagrams);
                offers.learn(by_source, left, &sent, context.now_ns);
                sent.map_err(Unsent::Refused)
            },
            || context.now_ns < *waits_until_ns.get_or_insert(context.now_ns + ROOM_WAIT_NS),
            |range, outcome| match outcome {
                Outcome::Sent => {
                    for index in range {
                        count_sent(config, arena, plan, index);
                    }
                }
                Outcome::Refused => {
                    let index = range.start;
                    let to = address(sealer.as_ref(), context, messages[index].destination, index);
                    let refused = RefusedMessage { config, context, arena, plan, index, to };
                    let mut offers = offers.borrow_mut();
                    refusing = refused.send_apart(singles, &mut offers).or(refusing);
                }
                Outcome::Dropped(reason) => {
                    let Message { destination, segments, .. } = messages[range.start];
                    let dropped = dropped(context, destination, arena, plan.spans(range.start));
                    config.stats.drop_send(reason, segments.into(), destination.host, dropped);
                }
            },
        );
        refusing
    }

    fn write_replies(&mut self) {
        let replies = &mut self.egress.replies;
        for (_, bytes) in replies.iter() {
            let header = [0; VNET_HEADER_BYTES];
            // The sender repeats what mattered, and so will the error.
            self.config.tun.write(&[IoSlice::new(&header), IoSlice::new(bytes)]).ok();
        }
        replies.clear();
    }
}

/// Where message `index` goes, whose destination this is.
fn address(
    sealer: Option<&Sealer>,
    context: &Context<'_>,
    destination: Endpoint,
    index: usize,
) -> SocketAddr {
    sealer.map_or_else(|| context.table.address(destination), |it| it.destination(index))
}

/// Counts message `index`, also for the peer that it went to, and marks the peer if its datagrams
/// are long. A message that begins with this host's own answer to an echo marks nobody, and one
/// that is nothing else counts for no peer: one that asks whether we are there, or how wide its
/// path is, must not have us ask it in turn, and then itself again, for ever.
fn count_sent(config: &WorkerConfig, arena: &[u8], plan: &SendPlan, index: usize) {
    let Message { destination, segment_bytes, segments, bytes, .. } = plan.messages()[index];
    config.stats.egress.forwarded(1, segments.into(), bytes.into());
    let packet = plan.spans(index).first().and_then(|span| span.of(arena));
    let is_answer =
        packet.is_some_and(|packet| echo::is_answer_from(config.local.tun_address(), packet));
    if !is_answer || segments > 1 {
        let is_long = !is_answer && segment_bytes > LONG_BYTES;
        config.stats.by_peer.sent(destination.host, segments.into(), bytes.into(), is_long);
    }
}

/// A packet that could not be sent: its first span, with the headers at least.
fn dropped<'a>(
    context: &Context<'_>,
    peer: Endpoint,
    arena: &'a [u8],
    spans: &[Span],
) -> DroppedPacket<'a> {
    let packet = spans.first().and_then(|span| span.of(arena)).unwrap_or_default();
    let peer = Some(context.table.address(peer));
    DroppedPacket { now_ns: context.now_ns, peer, packet }
}

/// A message of the plan that the kernel refuses in its form.
struct RefusedMessage<'a> {
    config: &'a WorkerConfig,
    context: &'a Context<'a>,
    arena: &'a [u8],
    plan: &'a SendPlan,
    index: usize,
    /// Where it goes.
    to: SocketAddr,
}

impl RefusedMessage<'_> {
    /// Sends it in another form; returns its destination, if that refuses GSO batches and nothing
    /// else.
    fn send_apart(&self, singles: &mut SendBatch, offers: &mut Offers) -> Option<Endpoint> {
        let Self { config, context, plan, index, .. } = *self;
        let message = &plan.messages()[index];
        config.socket.set_fragmenting(true);
        let by_source = offers.is_by_source(message, context.now_ns);
        let (sent, refusal) = self.send_one_by_one(singles, config.socket.sender(by_source));
        if let Some(reason) = refusal.filter(|_| sent == 0) {
            offers.refused(by_source).note(message.destination.host, reason, context.now_ns);
        }
        if message.segments > 1 {
            config.stats.gso_fallbacks.add(1);
        }
        // What refuses single datagrams as well has nothing against GSO.
        (message.segments > 1 && sent > 0).then_some(message.destination)
    }

    /// Sends its datagrams, the same bytes, each on its own; returns how many went, and why the
    /// last of those that did not. None waits for room: that a message is refused in its form while
    /// the buffer is full is rare.
    fn send_one_by_one(
        &self,
        singles: &mut SendBatch,
        sender: BorrowedFd<'_>,
    ) -> (usize, Option<DropReason>) {
        let Self { config, context, arena, plan, index, to } = *self;
        let Message { destination, segments, .. } = plan.messages()[index];
        let (stats, mut sent, mut refusal) = (&config.stats, 0, None);
        let datagrams = |first| plan.datagrams(index).skip(first);
        carry_out(
            0..usize::from(segments),
            |_| false,
            |first| {
                let single = |spans| Datagrams { destination: to, segment_bytes: None, spans };
                let sent = singles.send(sender, arena, datagrams(first).map(single));
                sent.map_err(Unsent::Refused)
            },
            || false,
            |range, outcome| {
                let reason = match outcome {
                    Outcome::Sent => {
                        let (first, count) = (range.start, range.len());
                        let spans = datagrams(first).take(count).flatten();
                        let bytes = spans.map(|span| u64::from(span.bytes)).sum();
                        stats.egress.forwarded(count as u64, count as u64, bytes);
                        stats.by_peer.sent(destination.host, count as u64, bytes, false);
                        sent += count;
                        return;
                    }
                    Outcome::Refused => DropReason::SendFailed,
                    Outcome::Dropped(reason) => reason,
                };
                refusal = Some(reason);
                let spans = datagrams(range.start).next().unwrap_or_default();
                let dropped = dropped(context, destination, arena, &spans);
                stats.drop_send(reason, 1, destination.host, dropped);
            },
        );
        (sent, refusal)
    }
}
