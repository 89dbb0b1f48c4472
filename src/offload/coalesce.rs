//! Merges received packets of one flow into super-packets for the TUN device.
//!
//! The inverse of `split`: a super-packet is only made of packets that the kernel would cut it
//! into again, so the rules follow its own receive offload (net/ipv4/tcp_offload.c
//! `tcp_gro_receive`, udp_offload.c `udp_gro_receive`, af_inet.c `inet_gro_receive`). Two of them
//! protect the receiver: a packet joins only if its checksums are right, because the merged
//! packet gets new ones; and a packet that can't join ends its flow's super-packet, so a flow is
//! never reordered. Packets are emitted in the order in which each item was begun.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;

use crate::packet::header::{Family, Header, protocol};
use crate::packet::transport::{self, TcpHeader, UDP_HEADER_BYTES, tcp_flags};

use super::merge::{same_headers, stamp};
use super::{Full, PartialChecksum, Segmentation, SegmentationKind, VNET_HEADER_BYTES, VnetHeader};
use crate::packet::Span;

/// Packets in one super-packet. A full one has 45 at an overlay MTU of 1472; small datagrams
/// fill it up to the kernel's UDP_MAX_SEGMENTS. With the offload header below UIO_MAXIOV (1024).
pub const PACKETS_PER_ITEM: usize = 128;

/// TUN writes in one plan. A batch that merges nothing is written in several rounds.
pub const ITEMS_MAX: usize = 128;

/// Flows that may still grow. The oldest is closed when one more comes.
const OPEN_FLOWS_MAX: usize = 8;

const IP_PACKET_BYTES_MAX: u32 = 65_535;

/// What the TUN device takes, as probed and lowered when it refuses.
#[derive(Debug, Clone, Copy)]
pub struct CoalesceLimits {
    /// Whether TCP super-packets may be written.
    pub tcp: bool,
    /// Datagrams in a UDP super-packet, 1 when off.
    pub udp_segments_max: u16,
}

/// One write to the TUN device: a packet, or a super-packet of several.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteItem {
    /// The offload header to write in front; valid after [`Coalescer::finish`].
    pub vnet_header: [u8; VNET_HEADER_BYTES],
    /// Packets merged.
    pub packets: u16,
    /// Bytes of the super-packet.
    bytes: u32,
    is_ipv6: bool,
    header_bytes: u16,
    segment_payload_bytes: u16,
    next_sequence: u32,
    last_id: u16,
    kind: Option<SegmentationKind>,
    first_flags: u8,
    last_flags: u8,
    verified: bool,
    sealed: bool,
    /// Its only packet is a super-packet already.
    is_super: bool,
}

/// A bounded set of TUN writes under construction.
#[derive(Debug)]
pub struct Coalescer {
    limits: CoalesceLimits,
    items: Vec<WriteItem>,
    /// INVARIANT: item `i` owns the first `item.packets` of `spans[i]`; the first is a whole
    /// packet, the others are payloads with their own header right before them.
    spans: Box<[[Span; PACKETS_PER_ITEM]]>,
    /// INVARIANT: at most one entry per flow, each the flow's latest item.
    open: Vec<OpenFlow>,
}

/// Held as integers, so that two keys compare in three steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FlowKey {
    /// Source and destination. Flows of IPv6 may share it: whoever merges compares the addresses.
    addresses: u64,
    ports: u32,
    protocol: u8,
}

impl FlowKey {
    /// The flow of an unfragmented packet; `None` if it is cut before its ports.
    #[inline]
    fn of<A: Family>(header: &Header<A>, bytes: &[u8]) -> Option<Self> {
        let ports = bytes.get(usize::from(header.header_bytes)..)?.first_chunk()?;
        Some(Self {
            addresses: Self::addresses(header),
            ports: u32::from_ne_bytes(*ports),
            protocol: header.protocol,
        })
    }

    fn addresses<A: Family>(header: &Header<A>) -> u64 {
        header.source.folded().rotate_left(32) ^ header.destination.folded()
    }
}

#[derive(Debug, Clone, Copy)]
struct OpenFlow {
    key: FlowKey,
    item: u16,
}

/// A packet that may take part in a merge.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    key: FlowKey,
    is_ipv6: bool,
    kind: SegmentationKind,
    header_bytes: usize,
    payload_bytes: usize,
    sequence: u32,
    flags: u8,
    id: u16,
    dont_fragment: bool,
}

impl Coalescer {
    /// An empty plan; allocates all that it will ever need.
    pub fn new(limits: CoalesceLimits) -> Self {
        Self {
            limits,
            items: Vec::with_capacity(ITEMS_MAX),
            spans: vec![[Span::default(); PACKETS_PER_ITEM]; ITEMS_MAX].into_boxed_slice(),
            open: Vec::with_capacity(OPEN_FLOWS_MAX),
        }
    }

    /// Changes what may be merged, from the next packet on.
    pub fn set_limits(&mut self, limits: CoalesceLimits) {
        self.limits = limits;
        self.open.clear();
    }

    /// What may be merged.
    pub fn limits(&self) -> CoalesceLimits {
        self.limits
    }

    /// Whether another packet is sure to fit.
    pub fn has_room(&self) -> bool {
        self.items.len() < ITEMS_MAX
    }

    /// Adds the packet at `packet` in the arena: exactly the bytes that `header` describes.
    pub fn push<A: Family>(
        &mut self,
        arena: &[u8],
        packet: Span,
        header: &Header<A>,
    ) -> Result<(), Full> {
        let Some(bytes) = packet.of(arena) else { return Err(Full) };
        let Some(candidate) = self.candidate(header, bytes) else {
            self.begin(packet, None)?;
            self.close_flows_of(header, bytes);
            return Ok(());
        };
        let open_at = self.open.iter().rposition(|flow| flow.key == candidate.key);
        let open = open_at.and_then(|at| Some((at, usize::from(self.open.get(at)?.item))));
        if let Some((at, index)) = open
            && self.joins::<A>(index, arena, bytes, &candidate)
        {
            if !transport::is_verified(header, bytes) {
                self.begin(packet, None)?;
                self.open.remove(at);
                return Ok(());
            }
            if self.append::<A>(index, arena, packet, &candidate) {
                return Ok(());
            }
        }
        let index = self.begin(packet, Some(&candidate))?;
        self.open_flow(open_at, OpenFlow { key: candidate.key, item: index as u16 });
        Ok(())
    }

    /// Adds a TCP super-packet that was received whole, its checksum left to a device, as hosts on
    /// one machine hand them over: it is to be cut into packets of `packet_bytes` at most.
    pub fn push_super<A: Family>(
        &mut self,
        arena: &[u8],
        packet: Span,
        header: &Header<A>,
        packet_bytes: u16,
    ) -> Result<(), Full> {
        let bytes = packet.of(arena).unwrap_or_default();
        let tcp = bytes.get(A::HEADER_BYTES_MIN..).and_then(TcpHeader::parse);
        let flow = FlowKey::of(header, bytes);
        // The offload header is written for an IP header without options or extension headers.
        let is_plain = usize::from(header.header_bytes) == A::HEADER_BYTES_MIN;
        let Some((tcp, key)) = tcp.zip(flow).filter(|_| is_plain) else {
            return self.push(arena, packet, header);
        };
        self.close_flows_of(header, bytes);
        let header_bytes = A::HEADER_BYTES_MIN + tcp.header_bytes;
        let candidate = Candidate {
            key,
            is_ipv6: A::VERSION == 6,
            kind: SegmentationKind::Tcp,
            header_bytes,
            payload_bytes: usize::from(packet_bytes).saturating_sub(header_bytes),
            sequence: tcp.sequence,
            flags: tcp.flags,
            id: header.id,
            dont_fragment: header.dont_fragment,
        };
        let index = self.begin(packet, Some(&candidate))?;
        self.items.get_mut(index).ok_or(Full)?.is_super = true;
        Ok(())
    }

    /// What comes later of a packet's flow must not be merged into what came before it. A
    /// fragment may belong to any flow between its two hosts; other protocols have no open flow.
    fn close_flows_of<A: Family>(&mut self, header: &Header<A>, bytes: &[u8]) {
        if header.is_fragment() {
            self.open.retain(|flow| flow.key.addresses != FlowKey::addresses(header));
        } else if let Some(key) = FlowKey::of(header, bytes) {
            self.open.retain(|flow| flow.key != key);
        }
    }

    fn open_flow(&mut self, open_at: Option<usize>, flow: OpenFlow) {
        if let Some(place) = open_at.and_then(|at| self.open.get_mut(at)) {
            *place = flow;
            return;
        }
        if self.open.len() == OPEN_FLOWS_MAX {
            self.open.remove(0);
        }
        self.open.push(flow);
    }

    fn candidate<A: Family>(&self, header: &Header<A>, bytes: &[u8]) -> Option<Candidate> {
        if usize::from(header.header_bytes) != A::HEADER_BYTES_MIN || header.is_fragment() {
            return None;
        }
        let transport = bytes.get(A::HEADER_BYTES_MIN..)?;
        let (kind, transport_header_bytes, sequence, flags) = match header.protocol {
            protocol::TCP if self.limits.tcp => {
                let TcpHeader { header_bytes, sequence, reserved, flags } =
                    TcpHeader::parse(transport)?;
                // Only plain data travels merged: ACK, or ACK and PSH, no reserved bit.
                if reserved != 0 || flags & !tcp_flags::PSH != tcp_flags::ACK {
                    return None;
                }
                (SegmentationKind::Tcp, header_bytes, sequence, flags)
            }
            protocol::UDP if self.limits.udp_segments_max > 1 => {
                transport::udp_header(transport)?;
                (SegmentationKind::Udp, UDP_HEADER_BYTES, 0, 0)
            }
            _ => return None,
        };
        let payload_bytes = transport.len().checked_sub(transport_header_bytes)?;
        (payload_bytes > 0).then_some(Candidate {
            key: FlowKey::of(header, bytes)?,
            is_ipv6: A::VERSION == 6,
            kind,
            header_bytes: A::HEADER_BYTES_MIN + transport_header_bytes,
            payload_bytes,
            sequence,
            flags,
            id: header.id,
            dont_fragment: header.dont_fragment,
        })
    }

    /// Whether the candidate continues item `index`, checksums aside.
    #[inline]
    fn joins<A: Family>(
        &self,
        index: usize,
        arena: &[u8],
        bytes: &[u8],
        candidate: &Candidate,
    ) -> bool {
        let item = self.items.get(index).zip(self.spans.get(index));
        let Some((item, [first, ..])) = item else { return false };
        let packets_max = match candidate.kind {
            SegmentationKind::Tcp => PACKETS_PER_ITEM,
            SegmentationKind::Udp => {
                PACKETS_PER_ITEM.min(usize::from(self.limits.udp_segments_max))
            }
        };
        !item.sealed
            && candidate.is_ipv6 == item.is_ipv6
            && candidate.header_bytes == usize::from(item.header_bytes)
            && candidate.payload_bytes <= usize::from(item.segment_payload_bytes)
            && usize::from(item.packets) < packets_max
            && item.bytes + candidate.payload_bytes as u32 <= IP_PACKET_BYTES_MAX
            // RFC 6864: the identification of a packet that can't be fragmented means nothing.
            && (candidate.dont_fragment || candidate.id == item.last_id.wrapping_add(1))
            && candidate.sequence == item.next_sequence
            && first.of(arena).is_some_and(|first| {
                same_headers::<A>(candidate.kind, candidate.header_bytes, bytes, first)
            })
    }

    /// Appends the packet to item `index`, unless the item's first packet turns out to be broken.
    #[inline(always)]
    fn append<A: Family>(
        &mut self,
        index: usize,
        arena: &[u8],
        packet: Span,
        candidate: &Candidate,
    ) -> bool {
        let item = self.items.get_mut(index).zip(self.spans.get_mut(index));
        let Some((item, spans)) = item else { return false };
        let [first, ..] = spans;
        if !item.verify_first::<A>(first.of(arena).unwrap_or_default()) {
            return false;
        }
        let Some(place) = spans.get_mut(usize::from(item.packets)) else { return false };
        *place =
            Span::new(packet.offset as usize + candidate.header_bytes, candidate.payload_bytes);
        item.packets += 1;
        item.bytes += place.bytes;
        item.next_sequence = candidate.next_sequence();
        item.last_id = candidate.id;
        item.last_flags = candidate.flags;
        item.sealed = candidate.payload_bytes < usize::from(item.segment_payload_bytes)
            || candidate.flags & tcp_flags::PSH != 0;
        true
    }

    fn begin(&mut self, packet: Span, open: Option<&Candidate>) -> Result<usize, Full> {
        let index = self.items.len();
        let [first, ..] = self.spans.get_mut(index).ok_or(Full)?;
        *first = packet;
        let mut item =
            WriteItem { packets: 1, bytes: packet.bytes, sealed: true, ..WriteItem::default() };
        if let Some(candidate) = open {
            item.is_ipv6 = candidate.is_ipv6;
            item.header_bytes = candidate.header_bytes as u16;
            item.segment_payload_bytes = candidate.payload_bytes as u16;
            item.next_sequence = candidate.next_sequence();
            item.last_id = candidate.id;
            item.kind = Some(candidate.kind);
            item.first_flags = candidate.flags;
            item.last_flags = candidate.flags;
            item.sealed = candidate.flags & tcp_flags::PSH != 0;
        }
        self.items.push(item);
        Ok(index)
    }

    /// Turns the first header of every merged item into the super-packet's. Call once, before
    /// writing; nothing can be pushed until [`Self::clear`].
    pub fn finish(&mut self, arena: &mut [u8]) {
        self.open.clear();
        for (item, [first, ..]) in self.items.iter_mut().zip(&self.spans) {
            let (Some(kind), Some(packet)) = (item.merged(), first.of_mut(arena)) else { continue };
            if item.is_ipv6 {
                item.finish::<Ipv6Addr>(packet, kind);
            } else {
                item.finish::<Ipv4Addr>(packet, kind);
            }
        }
    }

    /// Undoes [`Self::finish`] for item `index`, for a device that refuses the super-packet;
    /// returns where each packet lies as it was received, in order.
    pub fn unmerge<'a>(
        &'a self,
        arena: &mut [u8],
        index: usize,
    ) -> impl Iterator<Item = Span> + use<'a> {
        let spans = self.spans(index);
        let item = self.items.get(index);
        if let Some((item, kind)) = item.and_then(|item| Some((item, item.merged()?)))
            && let Some(first) = spans.first()
            && let Some(packet) = first.of_mut(arena)
        {
            let (bytes, flags) = (first.bytes as u16, item.first_flags);
            let stamp = if item.is_ipv6 { stamp::<Ipv6Addr> } else { stamp::<Ipv4Addr> };
            // It holds its own transport header.
            stamp(packet, kind, bytes, flags)
                .and_then(|(start, offset)| transport::complete(packet, start, offset.into()))
                .unwrap_or_default();
        }
        let header_bytes = item.map_or(0, |item| u32::from(item.header_bytes));
        let first = spans.iter().take(1).copied();
        first.chain(spans.iter().skip(1).map(move |payload| Span {
            offset: payload.offset.saturating_sub(header_bytes),
            bytes: payload.bytes + header_bytes,
        }))
    }

    /// The writes, in order.
    pub fn items(&self) -> &[WriteItem] {
        &self.items
    }

    /// The ranges of write `index`, in order, without the offload header.
    pub fn spans(&self, index: usize) -> &[Span] {
        let item = self.items.get(index).zip(self.spans.get(index));
        let spans = item.and_then(|(item, spans)| spans.get(..item.packets.into()));
        spans.unwrap_or_default()
    }

    /// Forgets everything; the arena's ranges may be reused.
    pub fn clear(&mut self) {
        self.items.clear();
        self.open.clear();
    }
}

impl WriteItem {
    /// The transport of a super-packet; `None` for a single packet.
    pub fn merged(&self) -> Option<SegmentationKind> {
        self.kind.filter(|_| self.packets > 1 || self.is_super)
    }

    /// Bytes of the packets as they were received.
    pub fn packet_bytes(&self) -> u64 {
        u64::from(self.bytes) + u64::from(self.packets - 1) * u64::from(self.header_bytes)
    }

    /// Makes the header of its first packet that of the super-packet, and the offload header.
    fn finish<A: Family>(&mut self, packet: &mut [u8], kind: SegmentationKind) {
        let flags = self.first_flags | self.last_flags & tcp_flags::PSH;
        let stamped = stamp::<A>(packet, kind, self.bytes as u16, flags);
        let Some((start, offset)) = stamped else { return };
        let header = VnetHeader {
            checksum: Some(PartialChecksum { start: start as u16, offset }),
            segmentation: NonZeroU16::new(self.segment_payload_bytes)
                .map(|payload_bytes| Segmentation { kind, payload_bytes }),
        };
        self.vnet_header = header.encode::<A>(self.header_bytes);
    }

    /// Checks the first packet's own checksum, once, when a second one is about to join it.
    fn verify_first<A: Family>(&mut self, first: &[u8]) -> bool {
        if !self.verified {
            self.verified =
                A::parse(first).is_ok_and(|header| transport::is_verified(&header, first));
            self.sealed |= !self.verified;
        }
        self.verified
    }
}

impl Candidate {
    /// Of the byte behind its payload; 0 for UDP.
    fn next_sequence(&self) -> u32 {
        match self.kind {
            SegmentationKind::Tcp => self.sequence.wrapping_add(self.payload_bytes as u32),
            SegmentationKind::Udp => 0,
        }
    }
}
