//! Ingress, from the network to the TUN device: has a batch of receives decided and merged, and
//! writes it.

use std::io::{self, IoSlice};
use std::iter::once;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use crate::device::SEGMENTS_MIN;
use crate::forward::{Context, GroBatch, Ingress};
use crate::offload::{
    CoalesceLimits, Coalescer, ITEMS_MAX, PACKETS_PER_ITEM, SegmentationKind, VNET_HEADER_BYTES,
};
use crate::packet::Span;
use crate::packet::ecn::Ecn;
use crate::stats::DropReason;
use crate::sys::tun_io::{Write, WriteBatch};
use crate::sys::udp::{Datagrams, SendBatch};

use super::cipher::{Opened, Opener};
use super::contain::{Half, Progress};
use super::errno::{is_gone, write_failure};
use super::io::{Io, RECEIVE_SLOTS, Receives};
use super::worker::{WorkerConfig, WorkerEnd};
use crate::wireguard::message::DATA_HEADER_BYTES;

/// Turns in a row that must leave datagrams in the socket before it is asked how full it is: bulk
/// that comes in waves needs no such question.
const BUSY_TURNS_MIN: u32 = 4;

pub(super) struct IngressHalf<'a> {
    config: &'a WorkerConfig,
    pub(super) receives: Receives,
    ingress: Ingress,
    writes: WriteBatch,
    reply: SendBatch,
    /// Turns in a row that have left datagrams in the socket.
    busy_turns: u32,
    opener: Option<Opener>,
    progress: Progress,
}

impl Half for IngressHalf<'_> {
    const SOURCE: &'static str = "the network";

    fn move_batch(&mut self, io: &mut impl Io, context: &Context<'_>) -> Result<(), WorkerEnd> {
        let (config, mut outcome) = (self.config, Ok(()));
        while let Some(index) = self.progress.next(context.stats) {
            let (slot, received) = self.receives.filled[index];
            let new = config.socket.new_overflows(received.overflows);
            if new > 0 {
                config.stats.receive_overflows.add(u64::from(new));
            }
            let batch = GroBatch {
                span: Span::new(slot * RECEIVE_SLOTS.stride, received.bytes),
                segment_bytes: received.segment_bytes.unwrap_or(received.bytes as u16),
                sender: received.source,
                source: received.source,
                ecn: Ecn::of(received.type_of_service),
            };
            let (sender, moved) = match self.opener {
                None => (batch.sender, self.take(io, context, batch)),
                Some(_) => self.open(io, context, batch),
            };
            outcome = outcome.and(moved);
            let delivered = self.ingress.take_delivered();
            if delivered.packets > 0 {
                let (address, table) = (sender.ip(), context.table);
                let sender = table.host_key(address);
                // A translator's address is nobody's: then the lease of the pod tells.
                let peer_of = || match table.has_peer_at(address) {
                    true => Some(sender),
                    false => Some(table.host_key(table.owner(delivered.source?)?.address.ip())),
                };
                let by_peer = &config.stats.by_peer;
                by_peer.received(sender, delivered.packets, delivered.bytes, peer_of);
            }
        }
        let written = self.write_plan(io, context);
        self.send_replies(context);
        outcome.and(written)
    }

    fn progress(&mut self) -> &mut Progress {
        &mut self.progress
    }

    fn abandon(&mut self) {
        self.ingress.abandon();
    }

    fn current(&self) -> &[u8] {
        self.ingress.current.of(&self.receives.arena).unwrap_or_default()
    }
}

impl<'a> IngressHalf<'a> {
    pub(super) fn new(config: &'a WorkerConfig) -> Self {
        let (offload, of_socket) = (config.tun.offload, config.socket.segments_max);
        let limits = CoalesceLimits {
            tcp: offload.tso,
            udp_segments_max: if offload.uso { of_socket.max(SEGMENTS_MIN) } else { 1 },
        };
        Self {
            config,
            receives: Receives::new(),
            ingress: Ingress::new(limits),
            writes: WriteBatch::new(ITEMS_MAX, ITEMS_MAX * PACKETS_PER_ITEM),
            reply: SendBatch::new(1, 1),
            busy_turns: 0,
            opener: config.cipher.as_ref().map(Opener::new),
            progress: Progress::default(),
        }
    }

    /// Has a batch decided on, and written as far as there is no room for more.
    fn take(
        &mut self,
        io: &mut impl Io,
        context: &Context<'_>,
        batch: GroBatch,
    ) -> Result<(), WorkerEnd> {
        let mut outcome = Ok(());
        let mut taken = self.ingress.process(context, &mut self.receives.arena, batch);
        while taken.is_err() {
            let written = self.write_plan(io, context);
            outcome = outcome.and(written);
            taken = self.ingress.resume(context, &mut self.receives.arena);
        }
        outcome
    }

    /// Opens each datagram of a batch, and takes in what was in it; and by what address the peer is
    /// known that sent them.
    fn open(
        &mut self,
        io: &mut impl Io,
        context: &Context<'_>,
        batch: GroBatch,
    ) -> (SocketAddr, Result<(), WorkerEnd>) {
        let (mut sender, mut outcome) = (batch.sender, Ok(()));
        let each = usize::from(batch.segment_bytes).max(1);
        for range in batch.span.range().step_by(each).map(|at| at..batch.span.range().end) {
            let range = range.start..range.end.min(range.start + each);
            let Some(opener) = &mut self.opener else { break };
            let stats = &self.config.stats;
            let datagram = &mut self.receives.arena[range.clone()];
            match opener.open(datagram, batch.source, stats, context.now_ns) {
                Opened::Packet(bytes, of) => {
                    sender = of;
                    let span = Span::new(range.start + DATA_HEADER_BYTES, bytes);
                    let packet = GroBatch { span, segment_bytes: 0, sender, ..batch };
                    let taken = self.take(io, context, packet);
                    outcome = outcome.and(taken);
                }
                Opened::Nothing => {}
                Opened::Refused(reason) => {
                    context.stats.packets_received.add(1);
                    context.stats.bytes_received.add(range.len() as u64);
                    context.drop(reason, 1, Some(batch.source), &self.receives.arena[range]);
                }
            }
        }
        if let Some(opener) = &mut self.opener {
            opener.note(context.now_ns);
        }
        (sender, outcome)
    }

    /// What was received is to be moved to the last packet, whatever became of the device.
    pub(super) fn begin_turn(&mut self) {
        self.opener.iter_mut().for_each(Opener::refresh);
        let is_busy = !self.receives.moved.drained;
        if !is_busy {
            self.config.socket.note_drained();
        }
        self.busy_turns = if is_busy { self.busy_turns.saturating_add(1) } else { 0 };
        let fill = if self.busy_turns < BUSY_TURNS_MIN { None } else { self.config.socket.fill() };
        self.ingress.set_fill(fill.unwrap_or_default());
        self.progress.start(self.receives.filled.len());
    }

    /// Carries out the writes planned so far. Those that a device gone meanwhile can't take are
    /// dropped like any other, so that every packet received has its outcome.
    fn write_plan(&mut self, io: &mut impl Io, context: &Context<'_>) -> Result<(), WorkerEnd> {
        self.ingress.coalescer.finish(&mut self.receives.arena);
        let (mut first, mut outcome) = (0, Ok(()));
        while first < self.ingress.coalescer.items().len() {
            let plan = &self.ingress.coalescer;
            let left = (first..).zip(&plan.items()[first..]).map(|(index, item)| Write {
                header: &item.vnet_header,
                spans: plan.spans(index),
                // What follows a super-packet may be of its flow, and must not overtake it.
                is_barrier: item.merged().is_some(),
            });
            let tried = io.write(&mut self.writes, &self.receives.arena, left).max(1);
            for index in 0..tried {
                let written = self.writes.result(index);
                let settled = self.settle_write(context, first + index, written);
                outcome = outcome.and(settled);
            }
            first += tried;
        }
        self.ingress.coalescer.clear();
        outcome
    }

    /// Counts the outcome of write `index`, and writes its packets one by one if it was refused as
    /// a super-packet. An error says that the device is gone.
    fn settle_write(
        &mut self,
        context: &Context<'_>,
        index: usize,
        written: io::Result<()>,
    ) -> Result<(), WorkerEnd> {
        let plan = &self.ingress.coalescer;
        let item = plan.items()[index];
        let Err(error) = written else {
            context.stats.forwarded(1, item.packets.into(), item.packet_bytes());
            return Ok(());
        };
        if let Some(reason) = write_failure(&error, item.merged().is_some()) {
            let first = plan.spans(index).first().and_then(|span| span.of(&self.receives.arena));
            context.drop(reason, item.packets.into(), None, first.unwrap_or_default());
        } else {
            self.config.stats.tun_fallbacks.add(1);
            self.write_one_by_one(context, index);
            disable(&mut self.ingress.coalescer, item.merged());
        }
        if is_gone(&error) { Err(WorkerEnd::TunGone(error)) } else { Ok(()) }
    }

    /// Writes the packets of a refused super-packet, as they were received, each on its own.
    fn write_one_by_one(&mut self, context: &Context<'_>, index: usize) {
        let header = [0; VNET_HEADER_BYTES];
        let arena = &mut self.receives.arena;
        for span in self.ingress.coalescer.unmerge(arena, index) {
            let packet = &arena[span.range()];
            match self.config.tun.write(&[IoSlice::new(&header), IoSlice::new(packet)]) {
                Ok(()) => context.stats.forwarded(1, 1, packet.len() as u64),
                Err(error) => {
                    let reason = write_failure(&error, false).unwrap_or(DropReason::TunWriteFailed);
                    context.drop(reason, 1, None, packet);
                }
            }
        }
    }

    fn send_replies(&mut self, context: &Context<'_>) {
        let replies = &mut self.ingress.replies;
        for (endpoint, bytes) in replies.iter() {
            let Some(destination) = endpoint.map(|it| context.table.address(it)) else { continue };
            let spans = [Span::new(0, bytes.len())];
            let message = Datagrams { destination, segment_bytes: None, spans };
            // The sender repeats what mattered, and so will the error.
            self.reply.send(self.config.socket.as_fd(), bytes, once(message)).ok();
        }
        replies.clear();
    }
}

/// Stops merging the kind that the device refused.
fn disable(plan: &mut Coalescer, refused: Option<SegmentationKind>) {
    let limits = plan.limits();
    plan.set_limits(match refused {
        Some(SegmentationKind::Tcp) => CoalesceLimits { tcp: false, ..limits },
        Some(SegmentationKind::Udp) => CoalesceLimits { udp_segments_max: 1, ..limits },
        None => limits,
    });
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};
    use std::sync::Arc;

    use crate::engine::contain::tests::Scene;
    use crate::engine::{Engine, Worker};
    use crate::forward::tests::{FAR, POD, udp};
    use crate::stats::WorkerStats;

    /// Its datagrams come from an address that no lease names.
    #[test]
    fn a_peer_behind_a_translator_is_heard() {
        let (scene, config) = Scene::new(Some(Engine::Mmsg));
        let (stats, table) = (Arc::clone(&config.stats), config.routes.table.load());
        let peer = table.host_key(table.peers()[0].address.ip());
        let worker = Worker::spawn(config, |_end| ()).unwrap();
        let translator = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 3), 0)).unwrap();
        translator.send_to(&udp(FAR, POD, b"heard"), scene.tunnel).unwrap();
        assert_eq!(scene.at_host(), b"heard");
        drop(worker);
        let heard_packets = || WorkerStats::traffic([&*stats], peer).packets_received;
        assert_eq!(heard_packets(), 1);
        let (by_peer, now_ns) = (&stats.by_peer, 60_000_000_000);
        by_peer.sent(peer, 1_000_000, 100_000_000, false);
        assert!(!by_peer.is_unanswered(peer, (1, 100), now_ns, heard_packets, || false));
    }
}
