//! Cuts a TCP or UDP super-packet into the packets that it stands for.
//!
//! Only headers are made: each segment is a fresh header plus a range of the super-packet's
//! payload. The work per segment is the header's bytes and one checksum pass over the payload,
//! which the wire demands. Mirrors what `tcp_gso_segment` and `__udp_gso_segment` do
//! (net/ipv4/tcp_offload.c, net/ipv4/udp_offload.c): identification counts up, FIN and PSH go on
//! the last segment only, CWR on the first only.

use std::num::NonZeroUsize;

use crate::packet::checksum;
use crate::packet::ipv4::{HEADER_BYTES_MIN, Ipv4Header, protocol};
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
    segment_payload_bytes: NonZeroUsize,
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
        let (ip, transport) = bytes.split_at_checked(ip_header_bytes).ok_or(BadOffload)?;
        let (transport_header_bytes, sequence, tcp_flags) =
            transport_fields(transport, header.protocol, segmentation.kind)?;
        let (transport_header, payload) =
            transport.split_at_checked(transport_header_bytes).ok_or(BadOffload)?;
        if payload.is_empty() {
            return Err(BadOffload);
        }
        let pseudo = checksum::pseudo_header(header.source, header.destination, header.protocol, 0);
        let fixed = fixed_transport_sum(transport_header, segmentation.kind);
        Ok(Self {
            packet,
            kind: segmentation.kind,
            ip_header_bytes,
            header_bytes: ip_header_bytes + transport_header_bytes,
            segment_payload_bytes: segmentation.payload_bytes.into(),
            payload_bytes: payload.len(),
            cut_bytes: 0,
            id: header.id,
            sequence,
            tcp_flags,
            ip_sum: fixed_ip_sum(ip),
            transport_sum: checksum::add(pseudo, fixed),
        })
    }

    /// Takes note of edits to the IPv4 header (TTL, type of service) made since [`Self::new`].
    pub fn ip_header_changed(&mut self, bytes: &[u8]) {
        self.ip_sum = fixed_ip_sum(bytes.get(..self.ip_header_bytes).unwrap_or_default());
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
        let rounding_up = self.segment_payload_bytes.get() - 1;
        (self.payload_bytes - self.cut_bytes + rounding_up) / self.segment_payload_bytes
    }

    /// Bytes of the largest packet to come.
    #[must_use]
    pub fn segment_bytes_max(&self) -> usize {
        self.header_bytes
            + (self.payload_bytes - self.cut_bytes).min(self.segment_payload_bytes.get())
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
        let payload_bytes = left_bytes.min(self.segment_payload_bytes.get());
        let payload_at = self.header_bytes + self.cut_bytes;
        let payload_sum = checksum::sum(bytes.get(payload_at..payload_at + payload_bytes)?);
        let out = out.get_mut(..self.header_bytes)?;
        out.copy_from_slice(bytes.get(..self.header_bytes)?);
        let (ip, transport) = out.split_at_mut_checked(self.ip_header_bytes)?;
        self.stamp_ip(ip.first_chunk_mut()?, payload_bytes);
        let length = (transport.len() + payload_bytes) as u16;
        match self.kind {
            SegmentationKind::Tcp => {
                let is_last = payload_bytes == left_bytes;
                self.stamp_tcp(transport.first_chunk_mut()?, is_last, length, payload_sum);
            }
            SegmentationKind::Udp => {
                self.stamp_udp(transport.first_chunk_mut()?, length, payload_sum);
            }
        }
        self.cut_bytes += payload_bytes;
        self.id = self.id.wrapping_add(1);
        self.sequence = self.sequence.wrapping_add(payload_bytes as u32);
        Some(Piece::new(self.packet.offset as usize + payload_at, payload_bytes))
    }

    fn stamp_ip(&self, ip: &mut [u8; HEADER_BYTES_MIN], payload_bytes: usize) {
        let total_bytes = (self.header_bytes + payload_bytes) as u16;
        ip[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        ip[4..6].copy_from_slice(&self.id.to_be_bytes());
        let sum = checksum::add_word(checksum::add_word(self.ip_sum, total_bytes), self.id);
        ip[10..12].copy_from_slice(&checksum::finish(sum));
    }

    fn stamp_tcp(
        &self,
        tcp: &mut [u8; TCP_HEADER_BYTES_MIN],
        is_last: bool,
        length: u16,
        payload_sum: u32,
    ) {
        let mut flags = self.tcp_flags;
        if !is_last {
            flags &= !(tcp_flags::FIN | tcp_flags::PSH);
        }
        if self.cut_bytes > 0 {
            flags &= !tcp_flags::CWR;
        }
        tcp[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        tcp[13] = flags;
        let mut sum = checksum::add(self.transport_sum, payload_sum);
        sum = checksum::add_word(sum, (self.sequence >> 16) as u16);
        sum = checksum::add_word(sum, self.sequence as u16);
        sum = checksum::add_word(sum, u16::from(flags));
        sum = checksum::add_word(sum, length);
        tcp[16..18].copy_from_slice(&checksum::finish(sum));
    }

    fn stamp_udp(&self, udp: &mut [u8; UDP_HEADER_BYTES], length: u16, payload_sum: u32) {
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
    let mut template = template(ip);
    template[2..6].fill(0);
    template[10..12].fill(0);
    checksum::sum(&template)
}

fn fixed_transport_sum(transport_header: &[u8], kind: SegmentationKind) -> u32 {
    let mut template = template(transport_header);
    match kind {
        SegmentationKind::Tcp => {
            template[4..8].fill(0);
            template[13] = 0;
            template[16..18].fill(0);
        }
        SegmentationKind::Udp => template[4..8].fill(0),
    }
    // The pseudo-header's protocol is in the caller's sum; lengths are added per segment.
    checksum::sum(&template)
}

/// A header to be edited before it is summed, padded with zeroes, which add nothing to a sum.
fn template(header: &[u8]) -> [u8; HEADER_BYTES_MAX / 2] {
    let mut template = [0; HEADER_BYTES_MAX / 2];
    if let Some(front) = template.get_mut(..header.len()) {
        front.copy_from_slice(header);
    }
    template
}
