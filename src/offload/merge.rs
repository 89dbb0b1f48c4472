//! Which headers may become one, and the header that a super-packet has.

use std::ops::Range;

use crate::packet::checksum;
use crate::packet::header::{Family, protocol};
use crate::packet::transport::{
    TCP_CHECKSUM_OFFSET, TCP_HEADER_BYTES_MIN, UDP_CHECKSUM_OFFSET, UDP_HEADER_BYTES,
};

use super::SegmentationKind;

/// Whether all fields agree that may not differ within a super-packet. The headers of both are
/// `header_bytes` long.
#[inline(always)]
pub(super) fn same_headers<A: Family>(
    kind: SegmentationKind,
    header_bytes: usize,
    bytes: &[u8],
    first: &[u8],
) -> bool {
    let same = |fields: Range<usize>| {
        let both = bytes.get(fields.clone()).zip(first.get(fields));
        both.is_some_and(|(own, of_first)| own == of_first)
    };
    let same_ip = match A::VERSION {
        // Type of service, with ECN; fragment word and time to live.
        4 => same(1..2) && same(6..9),
        // Traffic class, with ECN, and flow label; next header, hop limit and addresses.
        _ => same(0..4) && same(6..A::HEADER_BYTES_MIN),
    };
    let tcp = A::HEADER_BYTES_MIN;
    same_ip
        && match kind {
            SegmentationKind::Tcp => {
                same(tcp + 8..tcp + 12) // acknowledgement
                    && same(tcp + 14..tcp + 16) // window
                    && same(tcp + 18..header_bytes) // urgent pointer and options
            }
            SegmentationKind::Udp => true,
        }
}

/// Gives the packet the lengths and flags of `total_bytes`, and its pseudo-header's sum where the
/// transport checksum will be completed. Returns where the transport header begins, and that place
/// from there on; `None` if the packet ends before it.
pub(super) fn stamp<A: Family>(
    packet: &mut [u8],
    kind: SegmentationKind,
    total_bytes: u16,
    flags: u8,
) -> Option<(usize, u16)> {
    A::set_total_length(packet, total_bytes);
    let transport_bytes = total_bytes.saturating_sub(A::HEADER_BYTES_MIN as u16);
    let protocol = match kind {
        SegmentationKind::Tcp => protocol::TCP,
        SegmentationKind::Udp => protocol::UDP,
    };
    let (ip, transport) = packet.split_at_mut_checked(A::HEADER_BYTES_MIN)?;
    let sum = checksum::sum(ip.get(A::ADDRESSES_AT..)?);
    let sum = checksum::add_word(checksum::add_word(sum, protocol.into()), transport_bytes);
    let sum = checksum::partial(sum);
    let offset = match kind {
        SegmentationKind::Tcp => {
            let tcp = transport.first_chunk_mut::<TCP_HEADER_BYTES_MIN>()?;
            tcp[13] = flags;
            tcp[TCP_CHECKSUM_OFFSET..TCP_CHECKSUM_OFFSET + 2].copy_from_slice(&sum);
            TCP_CHECKSUM_OFFSET
        }
        SegmentationKind::Udp => {
            let udp = transport.first_chunk_mut::<UDP_HEADER_BYTES>()?;
            udp[4..6].copy_from_slice(&transport_bytes.to_be_bytes());
            udp[UDP_CHECKSUM_OFFSET..].copy_from_slice(&sum);
            UDP_CHECKSUM_OFFSET
        }
    };
    Some((A::HEADER_BYTES_MIN, offset as u16))
}
