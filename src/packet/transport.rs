//! TCP and UDP inside an IPv4 packet: header views, the checksum judged, and the checksum
//! completed where the kernel left it to the device. Never looks past the packet it is given.

use crate::packet::checksum;
use crate::packet::ipv4::{Ipv4Header, protocol};

/// Length of a TCP header without options.
pub const TCP_HEADER_BYTES_MIN: usize = 20;

/// Length of a UDP header.
pub const UDP_HEADER_BYTES: usize = 8;

/// Where the checksum field lies in a TCP header.
pub const TCP_CHECKSUM_OFFSET: usize = 16;

/// Where the checksum field lies in a UDP header.
pub const UDP_CHECKSUM_OFFSET: usize = 6;

/// The bits of [`TcpHeader::flags`] (RFC 9293, section 3.1; RFC 3168 for the upper two).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgment field counts.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer counts.
    pub const URG: u8 = 0x20;
    /// ECN echo.
    pub const ECE: u8 = 0x40;
    /// Congestion window reduced.
    pub const CWR: u8 = 0x80;
}

/// The fields of a TCP header whose data offset lies within its segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpHeader<'a> {
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Sequence number of the first payload byte.
    pub sequence: u32,
    /// Acknowledgment number.
    pub acknowledgment: u32,
    /// Header length with options, 20…60.
    pub data_offset_bytes: u8,
    /// The four bits after the data offset, in the lower half; the last one is AE (AccECN).
    pub reserved: u8,
    /// The flags; see [`tcp_flags`].
    pub flags: u8,
    /// Receive window, unscaled.
    pub window: u16,
    /// Checksum field as stored.
    pub checksum: [u8; 2],
    /// Urgent pointer.
    pub urgent: u16,
    /// The options, `data_offset_bytes - 20` bytes.
    pub options: &'a [u8],
}

impl<'a> TcpHeader<'a> {
    /// Reads the header at the start of `segment`; `None` if it is cut short or its data offset
    /// is below 5 words or beyond the segment.
    #[inline]
    #[must_use]
    pub fn parse(segment: &'a [u8]) -> Option<Self> {
        let fixed = segment.first_chunk::<TCP_HEADER_BYTES_MIN>()?;
        let data_offset_bytes = (fixed[12] >> 4) * 4;
        Some(Self {
            source_port: u16::from_be_bytes([fixed[0], fixed[1]]),
            destination_port: u16::from_be_bytes([fixed[2], fixed[3]]),
            sequence: u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]),
            acknowledgment: u32::from_be_bytes([fixed[8], fixed[9], fixed[10], fixed[11]]),
            data_offset_bytes,
            reserved: fixed[12] & 0x0f,
            flags: fixed[13],
            window: u16::from_be_bytes([fixed[14], fixed[15]]),
            checksum: [fixed[16], fixed[17]],
            urgent: u16::from_be_bytes([fixed[18], fixed[19]]),
            options: segment.get(TCP_HEADER_BYTES_MIN..usize::from(data_offset_bytes))?,
        })
    }
}

/// The fields of a UDP header. The length is as stored: judge it against the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpHeader {
    /// Source port; 0 for none.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Header and payload, as the sender states it.
    pub length_bytes: u16,
    /// Checksum field as stored; zero for none.
    pub checksum: [u8; 2],
}

impl UdpHeader {
    /// Reads the header at the start of `datagram`; `None` if it is cut short.
    #[inline]
    #[must_use]
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        let fixed = datagram.first_chunk::<UDP_HEADER_BYTES>()?;
        Some(Self {
            source_port: u16::from_be_bytes([fixed[0], fixed[1]]),
            destination_port: u16::from_be_bytes([fixed[2], fixed[3]]),
            length_bytes: u16::from_be_bytes([fixed[4], fixed[5]]),
            checksum: [fixed[6], fixed[7]],
        })
    }
}

/// What [`verify`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportChecksum {
    /// TCP or UDP, well formed, checksum right.
    Valid,
    /// TCP or UDP with a wrong checksum, or with lengths that contradict the packet.
    Invalid,
    /// UDP, well formed, sent without a checksum (RFC 768: the field is zero).
    Absent,
    /// A fragment, or another protocol: nothing here to judge.
    Unchecked,
}

/// Judges the TCP or UDP checksum of a parsed packet, `header.total_bytes` long.
#[inline]
#[must_use]
pub fn verify(header: &Ipv4Header, packet: &[u8]) -> TransportChecksum {
    if header.is_fragment() {
        return TransportChecksum::Unchecked;
    }
    let range = usize::from(header.header_bytes)..usize::from(header.total_bytes);
    let Some(payload) = packet.get(range) else {
        return TransportChecksum::Invalid;
    };
    match header.protocol {
        protocol::TCP => {
            if TcpHeader::parse(payload).is_none() {
                return TransportChecksum::Invalid;
            }
        }
        protocol::UDP => match UdpHeader::parse(payload) {
            Some(udp) if usize::from(udp.length_bytes) == payload.len() => {
                if udp.checksum == [0, 0] {
                    return TransportChecksum::Absent;
                }
            }
            Some(_) | None => return TransportChecksum::Invalid,
        },
        _ => return TransportChecksum::Unchecked,
    }
    let pseudo = checksum::pseudo_header(
        header.source,
        header.destination,
        header.protocol,
        header.payload_bytes(),
    );
    if checksum::add(pseudo, checksum::sum(payload)) == 0xffff {
        TransportChecksum::Valid
    } else {
        TransportChecksum::Invalid
    }
}

/// The checksum field that an offload header names lies outside the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("checksum start {start} and offset {offset} lie outside a packet of {packet_bytes} bytes")]
pub struct OutOfBounds {
    /// Where the covered bytes start.
    pub start: usize,
    /// Where the field lies, counted from `start`.
    pub offset: usize,
    /// Length of the packet.
    pub packet_bytes: usize,
}

/// Finishes a packet that the kernel left with `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the field at
/// `start + offset` holds the folded, uncomplemented pseudo-header sum; everything from `start`
/// to the end is summed over it and the complement stored (kernel: `skb_checksum_help`).
///
/// A UDP checksum that comes out as zero is stored as 0xffff, for zero says "none" (RFC 768). The
/// field's offset alone tells that it is UDP's: in a tunnel's packet (IP in IP, GRE) the protocol
/// is the tunnel's. Where another protocol has its checksum there, both stand for the same sum.
/// `packet` starts at its IPv4 header and ends at its total length.
#[inline]
pub fn complete(packet: &mut [u8], start: usize, offset: usize) -> Result<(), OutOfBounds> {
    let packet_bytes = packet.len();
    let out_of_bounds = OutOfBounds { start, offset, packet_bytes };
    let covered = packet.get_mut(start..).ok_or(out_of_bounds)?;
    let mut field = checksum::finish(checksum::sum(covered));
    if offset == UDP_CHECKSUM_OFFSET && field == [0, 0] {
        field = [0xff, 0xff];
    }
    let stored = covered.get_mut(offset..).and_then(<[u8]>::first_chunk_mut::<2>);
    *stored.ok_or(out_of_bounds)? = field;
    Ok(())
}

#[cfg(test)]
mod tests;
