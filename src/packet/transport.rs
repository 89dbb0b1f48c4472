//! TCP and UDP inside a packet: header views, the checksum verified, and the checksum
//! completed where the kernel left it to the device. Never looks past the packet it is given.

use crate::packet::checksum;
use crate::packet::header::{Family, Header, protocol};

/// Length of a TCP header without options.
pub const TCP_HEADER_BYTES_MIN: usize = 20;

/// Length of a UDP header.
pub const UDP_HEADER_BYTES: usize = 8;

/// Where the checksum field lies in a TCP header.
pub const TCP_CHECKSUM_OFFSET: usize = 16;

/// Where the checksum field lies in a UDP header.
pub const UDP_CHECKSUM_OFFSET: usize = 6;

/// The bits of [`TcpHeader::flags`] (RFC 9293, section 3.1; RFC 3168 for the last).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Opens a connection.
    pub const SYN: u8 = 0x02;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgment field counts.
    pub const ACK: u8 = 0x10;
    /// Congestion window reduced.
    pub const CWR: u8 = 0x80;
}

/// What of a TCP header matters to cutting and merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpHeader {
    /// Header length with options, 20…60.
    pub header_bytes: usize,
    /// Sequence number of the first payload byte.
    pub sequence: u32,
    /// The four bits after the data offset, in the lower half; the last one is AE (AccECN).
    pub reserved: u8,
    /// The flags; see [`tcp_flags`].
    pub flags: u8,
}

impl TcpHeader {
    /// Reads the header at the start of `segment`; `None` if it is cut short or its data offset
    /// is below 5 words or beyond the segment.
    #[inline]
    pub fn parse(segment: &[u8]) -> Option<Self> {
        let fixed = segment.first_chunk::<TCP_HEADER_BYTES_MIN>()?;
        let header_bytes = usize::from(fixed[12] >> 4) * 4;
        (TCP_HEADER_BYTES_MIN..=segment.len()).contains(&header_bytes).then_some(Self {
            header_bytes,
            sequence: u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]),
            reserved: fixed[12] & 0x0f,
            flags: fixed[13],
        })
    }
}

/// The header of a UDP datagram; `None` if it is cut short, or its length field is not that of the
/// datagram.
#[inline]
pub fn udp_header(datagram: &[u8]) -> Option<&[u8; UDP_HEADER_BYTES]> {
    let udp = datagram.first_chunk()?;
    (usize::from(u16::from_be_bytes([udp[4], udp[5]])) == datagram.len()).then_some(udp)
}

/// Whether a parsed packet, `header.total_bytes` long, is well-formed TCP or UDP, no fragment, and
/// its checksum is there and right. UDP may do without one (RFC 768: the field is zero).
#[inline]
pub fn is_verified<A: Family>(header: &Header<A>, packet: &[u8]) -> bool {
    let range = usize::from(header.header_bytes)..usize::from(header.total_bytes);
    let Some(payload) = packet.get(range) else { return false };
    let is_well_formed = match header.protocol {
        _ if header.is_fragment() => false,
        protocol::TCP => TcpHeader::parse(payload).is_some(),
        protocol::UDP => udp_header(payload).is_some_and(|udp| [udp[6], udp[7]] != [0, 0]),
        _ => false,
    };
    is_well_formed && checksum::add(header.pseudo_header_sum(), checksum::sum(payload)) == 0xffff
}

/// Whether the packet is an IPv6 datagram whose UDP checksum says "none", which IPv6 does not have
/// (RFC 8200, section 8.1): its receiver would discard it.
#[inline]
pub fn lacks_checksum<A: Family>(header: &Header<A>, packet: &[u8]) -> bool {
    if A::VERSION == 4 || header.protocol != protocol::UDP || header.is_later_fragment() {
        return false;
    }
    let field = packet.get(usize::from(header.header_bytes) + UDP_CHECKSUM_OFFSET..);
    field.is_some_and(|field| field.starts_with(&[0, 0]))
}

/// Finishes a packet that the kernel left with `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the field at
/// `start + offset` holds the folded, uncomplemented pseudo-header sum; everything from `start`
/// to the end is summed over it and the complement stored (kernel: `skb_checksum_help`).
///
/// A UDP checksum that comes out as zero is stored as 0xffff, for zero says "none" (RFC 768). The
/// field's offset alone tells that it is UDP's: in a tunnel's packet (IP in IP, GRE) the protocol
/// is the tunnel's. Where another protocol has its checksum there, both stand for the same sum.
/// `packet` starts at its IP header and ends at its total length. `None` if the field lies
/// outside, which leaves the packet as it was.
#[inline]
pub fn complete(packet: &mut [u8], start: usize, offset: usize) -> Option<()> {
    let covered = packet.get_mut(start..)?;
    let mut field = checksum::finish(checksum::sum(covered));
    if offset == UDP_CHECKSUM_OFFSET && field == [0, 0] {
        field = [0xff, 0xff];
    }
    *covered.get_mut(offset..)?.first_chunk_mut()? = field;
    Some(())
}

/// Where in its transport header a TCP or UDP packet, `header.total_bytes` long, holds no more
/// than the pseudo-header sum: what a kernel leaves to the device, where no device ever filled it
/// in, because sender and receiver are on one machine. A packet whose right checksum equals that
/// sum by chance is not changed by its completion.
#[inline]
pub fn left_checksum<A: Family>(header: &Header<A>, packet: &[u8]) -> Option<usize> {
    let offset = match header.protocol {
        _ if header.is_fragment() => return None,
        protocol::TCP => TCP_CHECKSUM_OFFSET,
        protocol::UDP => UDP_CHECKSUM_OFFSET,
        _ => return None,
    };
    let field = packet.get(usize::from(header.header_bytes) + offset..)?.first_chunk()?;
    (*field == checksum::partial(header.pseudo_header_sum())).then_some(offset)
}

/// Options of TCP (RFC 9293, section 3.1): the end of them, one byte of nothing, and how long
/// segments may be that the sender takes, with its length.
const TCP_OPTIONS_END: u8 = 0;
const TCP_NO_OPERATION: u8 = 1;
const TCP_SEGMENT_SIZE: [u8; 2] = [2, 4];

/// Has whoever gets this packet, if it opens a TCP connection, answer with segments that fit into
/// packets of `packet_bytes`, options aside: lowers what it says of that, if it says more. The
/// packet, exactly what `header` describes, has its checksum updated, unless that `is_partial`.
pub fn limit_segment_size<A: Family>(
    header: &Header<A>,
    packet: &mut [u8],
    packet_bytes: u16,
    is_partial: bool,
) {
    if header.protocol != protocol::TCP || header.is_fragment() {
        return;
    }
    let Some(segment) = packet.get_mut(usize::from(header.header_bytes)..) else { return };
    let Some(tcp) = TcpHeader::parse(segment).filter(|tcp| tcp.flags & tcp_flags::SYN != 0) else {
        return;
    };
    let headers_bytes = (A::HEADER_BYTES_MIN + TCP_HEADER_BYTES_MIN) as u16;
    let most = packet_bytes.saturating_sub(headers_bytes).to_be_bytes();
    let mut at = TCP_HEADER_BYTES_MIN;
    while let Some(option) = segment.get_mut(at..tcp.header_bytes) {
        let length = match option {
            [TCP_NO_OPERATION, ..] => 1,
            [kind, length, size @ ..] if [*kind, *length] == TCP_SEGMENT_SIZE => {
                let Some(size) = size.first_chunk_mut().filter(|size| **size > most) else {
                    return;
                };
                let is_odd = at % 2 == 1;
                let (mut old, mut new) = (std::mem::replace(size, most), most);
                if is_odd {
                    // Its bytes lie in two words, the other way round.
                    old.reverse();
                    new.reverse();
                }
                let field = segment.get_mut(TCP_CHECKSUM_OFFSET..).filter(|_| !is_partial);
                if let Some(field) = field.and_then(|field| field.first_chunk_mut()) {
                    *field = checksum::update(*field, old, new);
                }
                return;
            }
            [TCP_OPTIONS_END, ..] | [] | [_] => return,
            [_, length, ..] => usize::from(*length),
        };
        // A length of less says nothing.
        at += length.max(1);
    }
}

#[cfg(test)]
mod tests;
