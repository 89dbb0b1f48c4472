//! Ingress, packets from the network: cut GRO batches into packets, validate, decide, decrement
//! TTL, and merge them into super-packets for the TUN device.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::offload::{CoalesceLimits, Coalescer, Full};
use crate::packet::ecn::Ecn;
use crate::packet::transport::{self, TCP_CHECKSUM_OFFSET};
use crate::packet::{Header, Span};
use crate::route::Routed;
use crate::stats::DropReason;

use super::decide::{self, Known, Leased, Refusal};
use super::shed::Shedder;
use super::{Context, Replies};

/// What one receive brought: a datagram, or several of equal size (UDP_GRO), the last possibly
/// shorter.
#[derive(Debug, Clone, Copy)]
pub struct GroBatch {
    /// Where in the arena.
    pub span: Span,
    /// Size of each datagram but the last; 0 for a single datagram, whatever its size.
    pub segment_bytes: u16,
    /// Who sent it, as the route table knows hosts.
    pub sender: SocketAddr,
    /// Where it came from, which is mostly the same.
    pub source: SocketAddr,
    /// ECN field of the headers around the datagrams. The kernel merges equal ones only (since 6.9
    /// and the stable releases of May 2024; before, what it tells is the first one's).
    pub ecn: Ecn,
}

impl GroBatch {
    const NOTHING: Self = Self {
        span: Span { offset: 0, bytes: 0 },
        segment_bytes: 0,
        sender: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        source: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        ecn: Ecn::NotEct,
    };
}

/// The ingress half of a worker: TUN writes under construction, and the errors that are due.
pub struct Ingress {
    /// The writes planned so far.
    pub coalescer: Coalescer,
    /// The ICMP errors due; each names the tunnel endpoint it goes to.
    pub replies: Replies,
    shedder: Shedder,
    /// The batch that was taken in last; what is left of it met a full plan.
    batch: GroBatch,
    /// Where in the arena the datagram lies that was decided on last.
    pub current: Span,
    /// What was let in of this batch; forgotten where another begins.
    known: KnownPairs,
    delivered: Delivered,
}

/// What of one sender's packets is on its way to the TUN device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Delivered {
    /// How many.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The pod that sent the last of them.
    pub source: Option<IpAddr>,
}

/// Of each family.
#[derive(Default)]
struct KnownPairs {
    v4: Known<Ipv4Addr>,
    v6: Known<Ipv6Addr>,
}

impl Ingress {
    /// An empty half.
    pub fn new(limits: CoalesceLimits) -> Self {
        Self {
            coalescer: Coalescer::new(limits),
            replies: Replies::default(),
            shedder: Shedder::new(),
            batch: GroBatch::NOTHING,
            current: Span::default(),
            known: KnownPairs::default(),
            delivered: Delivered::default(),
        }
    }

    /// What was delivered since the last call. To be asked for after each batch: the next one may
    /// have another sender.
    pub fn take_delivered(&mut self) -> Delivered {
        std::mem::take(&mut self.delivered)
    }

    /// Of the receive buffer's `size` bytes so many are used: if it is nearly full, who sends much
    /// loses some.
    pub fn set_fill(&mut self, (used, size): (u64, u64)) {
        self.shedder.set_fill(used, size);
    }

    /// Forgets all writes and errors that are due, whatever state a panic left them in.
    pub fn abandon(&mut self) {
        self.batch = GroBatch::NOTHING;
        self.delivered = Delivered::default();
        self.replies.clear();
        self.coalescer.clear();
    }

    /// Takes in a batch. On `Full`, write the plan, clear it, then [`Self::resume`] until it
    /// succeeds.
    pub fn process(
        &mut self,
        context: &Context<'_>,
        arena: &mut [u8],
        batch: GroBatch,
    ) -> Result<(), Full> {
        debug_assert!(self.batch.span.bytes == 0, "resume first");
        context.stats.reads.add(1);
        let packets = match u32::from(batch.segment_bytes) {
            0 => 1,
            segment_bytes => batch.span.bytes.div_ceil(segment_bytes),
        };
        // An empty datagram is a packet too: a runt.
        context.stats.packets_received.add(u64::from(packets.max(1)));
        context.stats.bytes_received.add(u64::from(batch.span.bytes));
        if batch.span.bytes == 0 {
            context.drop(DropReason::Runt, 1, Some(batch.source), &[]);
            return Ok(());
        }
        let packet = batch.span.of(arena).unwrap_or_default();
        let shed = self.shedder.shed(packet, packets, context.now_ns);
        if shed > 0 {
            let (reason, sender) = (DropReason::ReceiveOverload, Some(batch.source));
            context.drop(reason, shed as usize, sender, packet);
        }
        if shed == packets {
            return Ok(());
        }
        let bytes = shed * u32::from(batch.segment_bytes);
        self.batch = batch;
        self.batch.span.offset += bytes;
        self.batch.span.bytes -= bytes;
        self.resume(context, arena)
    }

    /// Goes on with the batch that met a full plan.
    pub fn resume(&mut self, context: &Context<'_>, arena: &mut [u8]) -> Result<(), Full> {
        self.known = KnownPairs::default();
        while self.batch.span.bytes > 0 {
            if !self.coalescer.has_room() {
                return Err(Full);
            }
            let GroBatch { span, segment_bytes, .. } = &mut self.batch;
            let bytes = match u32::from(*segment_bytes) {
                0 => span.bytes,
                segment_bytes => span.bytes.min(segment_bytes),
            };
            self.current = Span { offset: span.offset, bytes };
            span.offset += bytes;
            span.bytes -= bytes;
            match context.local.leased.as_ref().v4() {
                Some(leased) => self.take(context, leased, arena, |known| &mut known.v4),
                None => self.refused(DropReason::Ipv6, context, arena),
            }
        }
        Ok(())
    }

    /// What a parser refuses: as on the other way, a packet of IPv6 or a drop, and out of line.
    #[inline(never)]
    fn refused(&mut self, reason: DropReason, context: &Context<'_>, arena: &mut [u8]) {
        match context.local.leased.as_ref().v6() {
            Some(leased) if reason == DropReason::Ipv6 => {
                self.take(context, leased, arena, |known| &mut known.v6);
            }
            _ => {
                let bytes = self.current.of(arena).unwrap_or_default();
                context.drop(reason, 1, Some(self.batch.source), bytes);
            }
        }
    }

    /// Decides on the current datagram, and has it written if it may travel.
    #[inline(always)]
    fn take<A: Routed>(
        &mut self,
        context: &Context<'_>,
        leased: &Leased<A>,
        arena: &mut [u8],
        known: impl FnOnce(&mut KnownPairs) -> &mut Known<A>,
    ) {
        let datagram = self.current;
        let Some(bytes) = datagram.of_mut(arena) else {
            return context.stats.drop(DropReason::InternalError, 1);
        };
        #[cfg(test)]
        super::tests::trip(bytes);
        let mut header = match Header::<A>::parse(bytes) {
            Ok(header) => header,
            Err(reason) => return self.refused(reason, context, arena),
        };
        // Whatever follows the total length is padding, and goes no further.
        let packet = Span { bytes: u32::from(header.total_bytes), ..datagram };
        let Some(bytes) = bytes.get_mut(..usize::from(header.total_bytes)) else {
            return context.stats.drop(DropReason::InternalError, 1);
        };
        if transport::lacks_checksum(&header, bytes) {
            return context.drop(DropReason::BadChecksum, 1, Some(self.batch.source), bytes);
        }
        let Context { local, table, .. } = context;
        let (host, known) = (context.host(leased), known(&mut self.known));
        let GroBatch { sender, source, ecn: outer_ecn, .. } = &self.batch;
        let ecn = match decide::ingress(host, sender, *outer_ecn, &header, bytes, known) {
            Ok(ecn) => ecn,
            Err(Refusal { reason, answer }) => {
                context.drop(reason, 1, Some(*source), bytes);
                if let Some(kind) = answer {
                    let (source, endpoint) = (leased.tun_address(), table.endpoint(header.source));
                    self.replies.answer(context, kind, source, endpoint, &header, bytes);
                }
                return;
            }
        };
        if local.is_hop() {
            A::decrement_ttl(bytes);
            header.ttl -= 1;
        }
        if ecn != header.ecn {
            A::set_ecn(bytes, ecn);
            header.ecn = ecn;
        }
        let left = transport::left_checksum(&header, bytes);
        if let Some(packet_bytes) = local.held_to::<A>() {
            transport::limit_segment_size(&header, bytes, packet_bytes, left.is_some());
        }
        let is_super = header.total_bytes > local.mtu_bytes && left == Some(TCP_CHECKSUM_OFFSET);
        let pushed = if is_super && self.coalescer.limits().tcp {
            self.coalescer.push_super(arena, packet, &header, local.mtu_bytes)
        } else {
            if let Some(offset) = left {
                transport::complete(bytes, header.header_bytes.into(), offset);
            }
            self.coalescer.push(arena, packet, &header)
        };
        if pushed.is_err() {
            // Never seen: room was checked.
            return context.stats.drop(DropReason::InternalError, 1);
        }
        self.delivered.packets += 1;
        self.delivered.bytes += u64::from(header.total_bytes);
        self.delivered.source = Some(header.source.into());
    }
}
