//! Cuts a TCP or UDP super-packet into the packets that it stands for.
//!
//! Only headers are made: each segment is a fresh header plus a range of the super-packet's
//! payload. The work per segment is the header's bytes and one checksum pass over the payload,
//! which the wire demands. Mirrors what `tcp_gso_segment` and `__udp_gso_segment` do
//! (net/ipv4/tcp_offload.c, net/ipv4/udp_offload.c): identification counts up, FIN and PSH go on
//! the last segment only, CWR on the first only.

use crate::packet::checksum;
use crate::packet::ipv4::{Ipv4Header, protocol};
use crate::packet::transport::{TCP_HEADER_BYTES_MIN, UDP_HEADER_BYTES, tcp_flags};

use super::{Piece, Segmentation, SegmentationKind};

/// The longest header of one segment: 60 bytes of IPv4 and 60 of TCP.
pub const HEADER_BYTES_MAX: usize = 120;

/// The offload header contradicts the packet behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadOffload;

/// A super-packet being cut. Holds positions and sums, never bytes, so it can be put aside while
/// a full plan is sent.
#[derive(Debug)]
pub struct Splitter {
    packet: Piece,
    kind: SegmentationKind,
    ip_header_bytes: usize,
    header_bytes: usize,
    segment_payload_bytes: usize,
    payload_bytes: usize,
    /// Payload handed out so far.
    cut_bytes: usize,
    id: u16,
    sequence: u32,
    tcp_flags: u8,
    /// Sum of the IPv4 header without total length, identification and checksum.
    ip_sum: u32,
    /// Sum of the pseudo-header without length and of the transport header without the fields
    /// that change per segment (sequence, flags, length, checksum).
    transport_sum: u32,
}

impl Splitter {
    /// Prepares to cut `packet`, a range of the arena whose bytes are `bytes`: exactly the IPv4
    /// packet that `header` describes.
    pub fn new(
        packet: Piece,
        bytes: &[u8],
        header: &Ipv4Header,
        segmentation: Segmentation,
    ) -> Result<Self, BadOffload> {
        if header.is_fragment() || bytes.len() != usize::from(header.total_bytes) {
            return Err(BadOffload);
        }
        let ip_header_bytes = usize::from(header.header_bytes);
        let transport = bytes.get(ip_header_bytes..).ok_or(BadOffload)?;
        let (transport_header_bytes, sequence, tcp_flags) =
            transport_fields(transport, header.protocol, segmentation.kind)?;
        let header_bytes = ip_header_bytes + transport_header_bytes;
        let payload_bytes = bytes.len().checked_sub(header_bytes).ok_or(BadOffload)?;
        if payload_bytes == 0 {
            return Err(BadOffload);
        }
        let pseudo = checksum::pseudo_header(header.source, header.destination, header.protocol, 0);
        let fixed = fixed_transport_sum(&transport[..transport_header_bytes], segmentation.kind);
        Ok(Self {
            packet,
            kind: segmentation.kind,
            ip_header_bytes,
            header_bytes,
            segment_payload_bytes: usize::from(segmentation.payload_bytes.get()),
            payload_bytes,
            cut_bytes: 0,
            id: header.id,
            sequence,
            tcp_flags,
            ip_sum: fixed_ip_sum(&bytes[..ip_header_bytes]),
            transport_sum: checksum::add(pseudo, fixed),
        })
    }

    /// Takes note of edits to the IPv4 header (TTL, type of service) made since [`Self::new`].
    pub fn ip_header_changed(&mut self, bytes: &[u8]) {
        self.ip_sum = fixed_ip_sum(&bytes[..self.ip_header_bytes]);
    }

    /// The super-packet's range of the arena.
    #[must_use]
    pub fn packet(&self) -> Piece {
        self.packet
    }

    /// Bytes of all packets still to come.
    #[must_use]
    pub fn bytes_left(&self) -> usize {
        self.segments_left() * self.header_bytes + self.payload_bytes - self.cut_bytes
    }

    /// Packets still to come.
    #[must_use]
    pub fn segments_left(&self) -> usize {
        (self.payload_bytes - self.cut_bytes).div_ceil(self.segment_payload_bytes)
    }

    /// Bytes of the largest packet to come.
    #[must_use]
    pub fn segment_bytes_max(&self) -> usize {
        self.header_bytes + self.segment_payload_bytes.min(self.payload_bytes - self.cut_bytes)
    }

    /// Length of the header that [`Self::next`] writes.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    /// Writes the next segment's header to the front of `out` and returns its payload's range of
    /// the arena; `None` when all is cut. `bytes` are the super-packet's, as given to
    /// [`Self::new`]; `out` holds at least [`Self::header_bytes`].
    pub fn next(&mut self, bytes: &[u8], out: &mut [u8]) -> Option<Piece> {
        let left_bytes = self.payload_bytes - self.cut_bytes;
        if left_bytes == 0 {
            return None;
        }
        let payload_bytes = left_bytes.min(self.segment_payload_bytes);
        let payload_at = self.header_bytes + self.cut_bytes;
        let out = &mut out[..self.header_bytes];
        out.copy_from_slice(&bytes[..self.header_bytes]);
        self.stamp_ip(&mut out[..self.ip_header_bytes], payload_bytes);
        let payload_sum = checksum::sum(&bytes[payload_at..payload_at + payload_bytes]);
        let transport = &mut out[self.ip_header_bytes..];
        match self.kind {
            SegmentationKind::Tcp => self.stamp_tcp(transport, payload_bytes, payload_sum),
            SegmentationKind::Udp => self.stamp_udp(transport, payload_bytes, payload_sum),
        }
        self.cut_bytes += payload_bytes;
        self.id = self.id.wrapping_add(1);
        self.sequence = self.sequence.wrapping_add(payload_bytes as u32);
        Some(Piece::new(self.packet.offset as usize + payload_at, payload_bytes))
    }

    fn stamp_ip(&self, ip: &mut [u8], payload_bytes: usize) {
        let total_bytes = (self.header_bytes + payload_bytes) as u16;
        ip[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        ip[4..6].copy_from_slice(&self.id.to_be_bytes());
        let sum = checksum::add_word(checksum::add_word(self.ip_sum, total_bytes), self.id);
        ip[10..12].copy_from_slice(&checksum::finish(sum));
    }

    fn stamp_tcp(&self, tcp: &mut [u8], payload_bytes: usize, payload_sum: u32) {
        let mut flags = self.tcp_flags;
        if self.cut_bytes + payload_bytes < self.payload_bytes {
            flags &= !(tcp_flags::FIN | tcp_flags::PSH);
        }
        if self.cut_bytes > 0 {
            flags &= !tcp_flags::CWR;
        }
        tcp[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        tcp[13] = flags;
        let length = (tcp.len() + payload_bytes) as u16;
        let mut sum = checksum::add(self.transport_sum, payload_sum);
        sum = checksum::add_word(sum, (self.sequence >> 16) as u16);
        sum = checksum::add_word(sum, self.sequence as u16);
        sum = checksum::add_word(sum, u16::from(flags));
        sum = checksum::add_word(sum, length);
        tcp[16..18].copy_from_slice(&checksum::finish(sum));
    }

    fn stamp_udp(&self, udp: &mut [u8], payload_bytes: usize, payload_sum: u32) {
        let length = (UDP_HEADER_BYTES + payload_bytes) as u16;
        udp[4..6].copy_from_slice(&length.to_be_bytes());
        let mut sum = checksum::add(self.transport_sum, payload_sum);
        // The length counts twice: in the header and in the pseudo-header.
        sum = checksum::add_word(checksum::add_word(sum, length), length);
        let bytes = checksum::finish(sum);
        // RFC 768: an all-zero checksum means none, so zero is sent as all ones.
        udp[6..8].copy_from_slice(if bytes == [0, 0] { &[0xff, 0xff] } else { &bytes });
    }
}

/// Transport header length, TCP sequence number and TCP flags.
fn transport_fields(
    transport: &[u8],
    packet_protocol: u8,
    kind: SegmentationKind,
) -> Result<(usize, u32, u8), BadOffload> {
    match (kind, packet_protocol) {
        (SegmentationKind::Tcp, protocol::TCP) => {
            let fixed: &[u8; TCP_HEADER_BYTES_MIN] = transport.first_chunk().ok_or(BadOffload)?;
            let header_bytes = usize::from(fixed[12] >> 4) * 4;
            if header_bytes < TCP_HEADER_BYTES_MIN || header_bytes > transport.len() {
                return Err(BadOffload);
            }
            let sequence = u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]);
            Ok((header_bytes, sequence, fixed[13]))
        }
        (SegmentationKind::Udp, protocol::UDP) => {
            if transport.len() < UDP_HEADER_BYTES {
                return Err(BadOffload);
            }
            Ok((UDP_HEADER_BYTES, 0, 0))
        }
        (SegmentationKind::Tcp | SegmentationKind::Udp, _) => Err(BadOffload),
    }
}

fn fixed_ip_sum(ip: &[u8]) -> u32 {
    let mut template = [0u8; 60];
    template[..ip.len()].copy_from_slice(ip);
    template[2..6].fill(0);
    template[10..12].fill(0);
    checksum::sum(&template[..ip.len()])
}

fn fixed_transport_sum(transport_header: &[u8], kind: SegmentationKind) -> u32 {
    let mut template = [0u8; 60];
    let template = &mut template[..transport_header.len()];
    template.copy_from_slice(transport_header);
    match kind {
        SegmentationKind::Tcp => {
            template[4..8].fill(0);
            template[13] = 0;
            template[16..18].fill(0);
        }
        SegmentationKind::Udp => template[4..8].fill(0),
    }
    // The pseudo-header's protocol is in the caller's sum; lengths are added per segment.
    checksum::sum(template)
}
