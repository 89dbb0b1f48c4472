//! Egress, packets from the TUN device: validate, decide, decrement TTL, cut super-packets, and
//! gather datagrams into GSO batches.

use std::ops::Range;

use crate::offload::{Full, PartialChecksum, SendPlan, Splitter, VNET_HEADER_BYTES, VnetHeader};
use crate::packet::transport;
use crate::packet::{Header, Span};
use crate::route::{Endpoint, Routed};
use crate::stats::DropReason;

use super::decide::{self, Leased, Refusal};
use super::{Context, Replies};

/// The egress half of a worker: a plan of sends under construction, and the errors that are due.
///
/// The arena that every call gets is the worker's: packets are read into its front, and from
/// `headers_at` on it holds the headers that cutting makes.
pub struct Egress {
    /// The sends planned so far.
    pub plan: SendPlan,
    /// The ICMP errors due; they go into the TUN device.
    pub replies: Replies,
    headers_at: usize,
    headers_end: usize,
    headers_used_bytes: usize,
    /// What is left of a super-packet that met a full plan, and where it goes.
    pending: Option<(Endpoint, Splitter)>,
    /// Where in the arena the packet lies that was taken in last.
    pub current: Span,
}

/// What one read stands for.
struct Load {
    packets: usize,
    /// Of all packets.
    bytes: usize,
    /// Of the largest one.
    largest_bytes: usize,
}

impl Egress {
    /// An empty half that fills an empty `plan`; the headers that cutting makes lie at `headers` in
    /// the arena.
    pub fn filling(plan: SendPlan, headers: Range<usize>) -> Self {
        Self {
            plan,
            replies: Replies::default(),
            headers_at: headers.start,
            headers_end: headers.end,
            headers_used_bytes: 0,
            pending: None,
            current: Span::default(),
        }
    }

    /// Forgets all sends and errors that are due, whatever state a panic left them in.
    pub fn abandon(&mut self) {
        self.pending = None;
        self.replies.clear();
        self.sent();
    }

    /// Takes in what one TUN read brought. On `Full`, send the plan, call [`Self::sent`], then
    /// [`Self::resume`] until it succeeds.
    pub fn process(
        &mut self,
        context: &Context<'_>,
        arena: &mut [u8],
        vnet_header: &[u8; VNET_HEADER_BYTES],
        packet: Span,
    ) -> Result<(), Full> {
        debug_assert!(self.pending.is_none(), "resume first");
        context.stats.reads.add(1);
        self.current = packet;
        match context.local.leased.as_ref().v4() {
            Some(leased) => self.take(context, leased, arena, vnet_header),
            None => self.refused(DropReason::Ipv6, context, arena, vnet_header),
        }
    }

    /// What a parser refuses, or none has looked at, for want of IPv4. A packet of IPv6 is for the
    /// other parser, which never gives this reason, if this host has that family. Out of line: both
    /// families in one function would be too much for the registers, and cost IPv4 a tenth of its
    /// instructions.
    #[inline(never)]
    fn refused(
        &mut self,
        reason: DropReason,
        context: &Context<'_>,
        arena: &mut [u8],
        vnet_header: &[u8; VNET_HEADER_BYTES],
    ) -> Result<(), Full> {
        match context.local.leased.as_ref().v6() {
            Some(leased) if reason == DropReason::Ipv6 => {
                self.take(context, leased, arena, vnet_header)
            }
            _ => drop_one(context, self.current.of(arena).unwrap_or_default(), reason),
        }
    }

    /// Decides on the current packet, and plans its sends if it may travel.
    #[inline(always)]
    fn take<A: Routed>(
        &mut self,
        context: &Context<'_>,
        leased: &Leased<A>,
        arena: &mut [u8],
        vnet_header: &[u8; VNET_HEADER_BYTES],
    ) -> Result<(), Full> {
        let packet = self.current;
        let Some(bytes) = packet.of_mut(arena) else {
            return drop_one(context, &[], DropReason::InternalError);
        };
        #[cfg(test)]
        super::tests::trip(bytes);
        let header = match Header::<A>::parse(bytes) {
            Ok(header) => header,
            Err(reason) => return self.refused(reason, context, arena, vnet_header),
        };
        // Whatever follows the total length is padding, and goes no further.
        let packet = Span { bytes: u32::from(header.total_bytes), ..packet };
        let Some(bytes) = bytes.get_mut(..usize::from(header.total_bytes)) else {
            return drop_one(context, &[], DropReason::InternalError);
        };
        let Some(vnet_header) = VnetHeader::parse(vnet_header) else {
            return drop_one(context, bytes, DropReason::BadOffloadHeader);
        };
        let Some(segmentation) = vnet_header.segmentation else {
            return self.single(context, leased, bytes, packet, &header, vnet_header.checksum);
        };
        let Some(mut splitter) = Splitter::new(packet, bytes, &header, segmentation) else {
            return drop_one(context, bytes, DropReason::BadOffloadHeader);
        };
        let load = Load {
            packets: splitter.segments_left(),
            bytes: splitter.bytes_left(),
            largest_bytes: splitter.segment_bytes_max(),
        };
        let decided = self.decide(context, leased, &header, bytes, load);
        let Some(destination) = decided else { return Ok(()) };
        if context.local.is_hop() {
            A::decrement_ttl(bytes);
        }
        splitter.ip_header_changed(bytes);
        self.pending = Some((destination, splitter));
        self.resume(context, arena)
    }

    #[inline(always)]
    fn single<A: Routed>(
        &mut self,
        context: &Context<'_>,
        leased: &Leased<A>,
        bytes: &mut [u8],
        packet: Span,
        header: &Header<A>,
        checksum: Option<PartialChecksum>,
    ) -> Result<(), Full> {
        if checksum.is_none() && transport::lacks_checksum(header, bytes) {
            return drop_one(context, bytes, DropReason::BadChecksum);
        }
        let load = Load { packets: 1, bytes: bytes.len(), largest_bytes: bytes.len() };
        let decided = self.decide(context, leased, header, bytes, load);
        let Some(destination) = decided else { return Ok(()) };
        if context.local.is_hop() {
            A::decrement_ttl(bytes);
        }
        if let Some(packet_bytes) = context.local.held_to::<A>() {
            transport::limit_segment_size(header, bytes, packet_bytes, checksum.is_some());
        }
        if let Some(partial) = checksum {
            let (start, offset) = (usize::from(partial.start), usize::from(partial.offset));
            // Inside the IP header it would edit what was just decided on.
            let behind_header = start >= usize::from(header.header_bytes);
            if !behind_header || transport::complete(bytes, start, offset).is_none() {
                let peer = context.table.address(destination);
                context.drop(DropReason::BadOffloadHeader, 1, Some(peer), bytes);
                return Ok(());
            }
        }
        self.plan.push(destination, [Span::default(), packet])?;
        self.room()
    }

    /// Counts what a read brought and decides on it; `None` if it goes nowhere.
    #[inline(always)]
    fn decide<A: Routed>(
        &mut self,
        context: &Context<'_>,
        leased: &Leased<A>,
        header: &Header<A>,
        bytes: &[u8],
        load: Load,
    ) -> Option<Endpoint> {
        let packets = load.packets as u64;
        context.stats.packets_received.add(packets);
        context.stats.bytes_received.add(load.bytes as u64);
        match decide::egress(context.host(leased), header, bytes, load.largest_bytes) {
            Ok(peer) => Some(peer),
            Err(Refusal { reason, answer }) => {
                context.drop(reason, load.packets, None, bytes);
                if let Some(kind) = answer {
                    let source = leased.error_source(header.destination);
                    self.replies.answer(context, kind, source, None, header, bytes);
                }
                None
            }
        }
    }

    /// Counts a packet that the device could not hand over.
    pub fn unreadable(&self, context: &Context<'_>) {
        context.stats.reads.add(1);
        context.stats.packets_received.add(1);
        context.stats.drop(DropReason::BadOffloadHeader, 1);
    }

    /// Goes on with the super-packet that met a full plan.
    pub fn resume(&mut self, context: &Context<'_>, arena: &mut [u8]) -> Result<(), Full> {
        let Some((destination, mut splitter)) = self.pending.take() else { return self.room() };
        let plain_bytes = self.headers_end.min(arena.len());
        let plain = arena.get_mut(..plain_bytes);
        let parts = plain.and_then(|plain| plain.split_at_mut_checked(self.headers_at));
        let parts =
            parts.and_then(|(packets, headers)| Some((splitter.packet.of(packets)?, headers)));
        let Some((bytes, headers)) = parts else {
            context.stats.drop(DropReason::InternalError, splitter.segments_left() as u64);
            return Ok(());
        };
        let header_bytes = splitter.header_bytes;
        while splitter.segments_left() > 0 {
            let out = headers.get_mut(self.headers_used_bytes..);
            let out = out.filter(|out| out.len() >= header_bytes && self.plan.has_room());
            let Some(out) = out else {
                self.pending = Some((destination, splitter));
                return Err(Full);
            };
            let Some(payload) = splitter.next(bytes, out) else {
                context.stats.drop(DropReason::InternalError, splitter.segments_left() as u64);
                break;
            };
            let header = Span::new(self.headers_at + self.headers_used_bytes, header_bytes);
            self.headers_used_bytes += header_bytes;
            self.plan.push(destination, [header, payload])?;
        }
        self.room()
    }

    /// Whether the plan takes whatever comes next.
    fn room(&self) -> Result<(), Full> {
        if self.plan.has_room() { Ok(()) } else { Err(Full) }
    }

    /// The plan was carried out: its ranges are free.
    pub fn sent(&mut self) {
        self.plan.clear();
        self.headers_used_bytes = 0;
    }
}

fn drop_one(context: &Context<'_>, bytes: &[u8], reason: DropReason) -> Result<(), Full> {
    context.stats.packets_received.add(1);
    context.stats.bytes_received.add(bytes.len() as u64);
    context.drop(reason, 1, None, bytes);
    Ok(())
}
