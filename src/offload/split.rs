//! Cuts a TCP or UDP super-packet into the packets that it stands for.
//!
//! Only headers are made: each segment is a fresh header plus a range of the super-packet's
//! payload. The work per segment is the header's bytes and one checksum pass over the payload,
//! which the wire demands. Mirrors what `tcp_gso_segment` and `__udp_gso_segment` do
//! (net/ipv4/tcp_offload.c, net/ipv4/udp_offload.c): identification counts up, FIN and PSH go on
//! the last segment only, CWR on the first only.

use std::num::NonZeroUsize;
use std::ops::Range;

use crate::packet::checksum;
use crate::packet::header::{Family, Header, protocol, pseudo_header};
use crate::packet::transport::{TCP_HEADER_BYTES_MIN, TcpHeader, UDP_HEADER_BYTES, tcp_flags};
use crate::packet::{ipv4, ipv6_header};

use super::{Segmentation, SegmentationKind};
use crate::packet::Span;

/// The longest header of one segment: 60 bytes of IPv4, or IPv6 with 80 bytes of extension headers,
/// and 60 of TCP.
pub const HEADER_BYTES_MAX: usize = 180;

/// A super-packet being cut. Holds positions and sums, never bytes, so it can be put aside while
/// a full plan is sent.
#[derive(Debug)]
pub struct Splitter {
    /// The super-packet's range of the arena.
    pub packet: Span,
    kind: SegmentationKind,
    ip_header_bytes: usize,
    /// Length of the header that [`Self::next`] writes.
    pub header_bytes: usize,
    segment_payload_bytes: NonZeroUsize,
    payload_bytes: usize,
    /// Payload handed out so far.
    cut_bytes: usize,
    identification: Option<Identification>,
    sequence: u32,
    tcp_flags: u8,
    /// Sum of the pseudo-header without length and of the transport header without the fields
    /// that change per segment (sequence, flags, length, checksum).
    transport_sum: u32,
}

/// What IPv4 alone has, and what goes with it.
#[derive(Debug)]
struct Identification {
    /// Of the next segment.
    id: u16,
    /// Sum of the header without total length, identification and checksum.
    sum: u32,
}

impl Splitter {
    /// Prepares to cut `packet`, a range of the arena whose bytes are `bytes`: exactly the packet
    /// that `header` describes. `None` if the offload header contradicts it, or its headers are
    /// longer than [`HEADER_BYTES_MAX`].
    pub fn new<A: Family>(
        packet: Span,
        bytes: &[u8],
        header: &Header<A>,
        segmentation: Segmentation,
    ) -> Option<Self> {
        if header.is_fragment() || bytes.len() != usize::from(header.total_bytes) {
            return None;
        }
        let ip_header_bytes = usize::from(header.header_bytes);
        let (ip, transport) = bytes.split_at_checked(ip_header_bytes)?;
        let (transport_header_bytes, sequence, tcp_flags) =
            transport_fields(transport, header.protocol, segmentation.kind)?;
        let (transport_header, payload) = transport.split_at_checked(transport_header_bytes)?;
        let header_bytes = ip_header_bytes + transport_header_bytes;
        if payload.is_empty() || header_bytes > HEADER_BYTES_MAX {
            return None;
        }
        let pseudo = pseudo_header(header.source, header.destination, header.protocol, 0);
        let fixed = fixed_transport_sum(transport_header, segmentation.kind);
        Some(Self {
            packet,
            kind: segmentation.kind,
            ip_header_bytes,
            header_bytes,
            segment_payload_bytes: segmentation.payload_bytes.into(),
            payload_bytes: payload.len(),
            cut_bytes: 0,
            identification: (A::VERSION == 4)
                .then(|| Identification { id: header.id, sum: fixed_ip_sum(ip) }),
            sequence,
            tcp_flags,
            transport_sum: checksum::add(pseudo, fixed),
        })
    }

    /// Takes note of edits to the IP header (TTL, type of service) made since [`Self::new`].
    pub fn ip_header_changed(&mut self, bytes: &[u8]) {
        if let Some(identification) = &mut self.identification {
            let ip = bytes.get(..self.ip_header_bytes).unwrap_or_default();
            identification.sum = fixed_ip_sum(ip);
        }
    }

    /// Bytes of all packets still to come.
    pub fn bytes_left(&self) -> usize {
        self.segments_left() * self.header_bytes + self.payload_bytes - self.cut_bytes
    }

    /// Packets still to come.
    pub fn segments_left(&self) -> usize {
        let rounding_up = self.segment_payload_bytes.get() - 1;
        (self.payload_bytes - self.cut_bytes + rounding_up) / self.segment_payload_bytes
    }

    /// Bytes of the largest packet to come.
    pub fn segment_bytes_max(&self) -> usize {
        self.header_bytes
            + (self.payload_bytes - self.cut_bytes).min(self.segment_payload_bytes.get())
    }

    /// Writes the next segment's header to the front of `out` and returns its payload's range of
    /// the arena; `None` when all is cut. `bytes` are the super-packet's, as given to
    /// [`Self::new`]; `out` holds at least `header_bytes`.
    pub fn next(&mut self, bytes: &[u8], out: &mut [u8]) -> Option<Span> {
        let left_bytes = self.payload_bytes - self.cut_bytes;
        if left_bytes == 0 {
            return None;
        }
        let payload_bytes = left_bytes.min(self.segment_payload_bytes.get());
        let payload_at = self.header_bytes + self.cut_bytes;
        let payload_sum = checksum::sum(bytes.get(payload_at..payload_at + payload_bytes)?);
        let out = out.get_mut(..self.header_bytes)?;
        out.copy_from_slice(bytes.get(..self.header_bytes)?);
        let (ip, transport) = out.split_at_mut_checked(self.ip_header_bytes)?;
        self.stamp_ip(ip, payload_bytes)?;
        let length = (transport.len() + payload_bytes) as u16;
        let sum = checksum::add_word(checksum::add(self.transport_sum, payload_sum), length);
        match self.kind {
            SegmentationKind::Tcp => {
                let is_last = payload_bytes == left_bytes;
                self.stamp_tcp(transport.first_chunk_mut()?, is_last, sum);
            }
            SegmentationKind::Udp => stamp_udp(transport.first_chunk_mut()?, length, sum),
        }
        self.cut_bytes += payload_bytes;
        self.sequence = self.sequence.wrapping_add(payload_bytes as u32);
        Some(Span::new(self.packet.offset as usize + payload_at, payload_bytes))
    }

    fn stamp_ip(&mut self, ip: &mut [u8], payload_bytes: usize) -> Option<()> {
        let total_bytes = self.header_bytes + payload_bytes;
        let Some(Identification { id, sum }) = &mut self.identification else {
            let ip = ip.first_chunk_mut::<{ ipv6_header::HEADER_BYTES_MIN }>()?;
            let behind = (total_bytes - ip.len()) as u16;
            ip[4..6].copy_from_slice(&behind.to_be_bytes());
            return Some(());
        };
        let ip = ip.first_chunk_mut::<{ ipv4::HEADER_BYTES_MIN }>()?;
        ip[2..4].copy_from_slice(&(total_bytes as u16).to_be_bytes());
        ip[4..6].copy_from_slice(&id.to_be_bytes());
        let sum = checksum::add_word(checksum::add_word(*sum, total_bytes as u16), *id);
        ip[10..12].copy_from_slice(&checksum::finish(sum));
        *id = id.wrapping_add(1);
        Some(())
    }

    /// `sum` is of all but what changes per segment.
    fn stamp_tcp(&self, tcp: &mut [u8; TCP_HEADER_BYTES_MIN], is_last: bool, mut sum: u32) {
        let mut flags = self.tcp_flags;
        if !is_last {
            flags &= !(tcp_flags::FIN | tcp_flags::PSH);
        }
        if self.cut_bytes > 0 {
            flags &= !tcp_flags::CWR;
        }
        tcp[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        tcp[13] = flags;
        sum = checksum::add_word(sum, (self.sequence >> 16) as u16);
        sum = checksum::add_word(sum, self.sequence as u16);
        sum = checksum::add_word(sum, u16::from(flags));
        tcp[16..18].copy_from_slice(&checksum::finish(sum));
    }
}

fn stamp_udp(udp: &mut [u8; UDP_HEADER_BYTES], length: u16, sum: u32) {
    udp[4..6].copy_from_slice(&length.to_be_bytes());
    // The length counts twice: in the pseudo-header, and here.
    let bytes = checksum::finish(checksum::add_word(sum, length));
    // RFC 768: an all-zero checksum means none, so zero is sent as all ones.
    udp[6..8].copy_from_slice(if bytes == [0, 0] { &[0xff, 0xff] } else { &bytes });
}

/// Transport header length, TCP sequence number and TCP flags.
fn transport_fields(
    transport: &[u8],
    packet_protocol: u8,
    kind: SegmentationKind,
) -> Option<(usize, u32, u8)> {
    match (kind, packet_protocol) {
        (SegmentationKind::Tcp, protocol::TCP) => {
            let header = TcpHeader::parse(transport)?;
            Some((header.header_bytes, header.sequence, header.flags))
        }
        (SegmentationKind::Udp, protocol::UDP) => Some((UDP_HEADER_BYTES, 0, 0)),
        (SegmentationKind::Tcp | SegmentationKind::Udp, _) => None,
    }
}

/// The sum of what of an IPv4 header is the same in all segments.
fn fixed_ip_sum(ip: &[u8]) -> u32 {
    sum_without(ip, &[2..6, 10..12])
}

/// The same of a transport header. The pseudo-header's protocol is in the caller's sum; lengths
/// are added per segment.
fn fixed_transport_sum(header: &[u8], kind: SegmentationKind) -> u32 {
    match kind {
        // Flags share their word with the data offset.
        SegmentationKind::Tcp => {
            let data_offset = u16::from(header.get(12).copied().unwrap_or(0)) << 8;
            checksum::add_word(sum_without(header, &[4..8, 12..14, 16..18]), data_offset)
        }
        SegmentationKind::Udp => sum_without(header, &[4..6, 6..8]),
    }
}

/// The sum of `header` without some of its words: one's complement subtracts by adding the
/// complement (RFC 1071, section 1).
fn sum_without(header: &[u8], words: &[Range<usize>]) -> u32 {
    words.iter().fold(checksum::sum(header), |sum, range| {
        let words = checksum::sum(header.get(range.clone()).unwrap_or_default());
        checksum::add(sum, 0xffff - words)
    })
}
