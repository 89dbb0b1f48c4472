//! IPv4: the header validated and read once, and edited in place with its checksum kept right; the
//! classes of addresses; what an ICMP error looks like. Never trusts a length that it hasn't
//! compared with the slice.

use std::net::Ipv4Addr;

use crate::packet::checksum;
use crate::packet::ecn::Ecn;
use crate::packet::header::{ERROR_TTL, ErrorKind, Family, Header, protocol};
use crate::stats::DropReason;

/// Length of a header without options.
pub const HEADER_BYTES_MIN: usize = 20;

/// The header of an IPv4 packet.
pub type Ipv4Header = Header<Ipv4Addr>;

/// Which of its 16-bit words is the checksum.
const CHECKSUM_WORD: usize = 5;

/// Options of the header (IANA).
mod option {
    pub(super) const END: u8 = 0;
    pub(super) const NO_OPERATION: u8 = 1;
    pub(super) const LOOSE_ROUTE: u8 = 131;
    pub(super) const STRICT_ROUTE: u8 = 137;
}

/// RFC 1812, section 4.3.2.5: precedence 6, internetwork control.
const ERROR_TOS: u8 = 0xc0;

/// Don't Fragment, offset zero: an atomic datagram, so its identification may be zero (RFC 6864).
const ERROR_FLAGS: [u8; 2] = [0x40, 0x00];

impl Family for Ipv4Addr {
    const VERSION: u8 = 4;
    const HEADER_BYTES_MIN: usize = HEADER_BYTES_MIN;
    const ADDRESSES_AT: usize = 12;
    const ICMP: u8 = protocol::ICMP;
    /// RFC 1812, section 4.3.2.3 asks for as much of the offending packet as fits without exceeding
    /// 576 bytes, the size that every IPv4 host accepts.
    const ERROR_BYTES_MAX: usize = 576;

    /// The checks and their order are those of RFC 1812, section 5.2.2. The version counts first:
    /// IPv6 is IPv6 at any length.
    #[inline]
    fn parse(packet: &[u8]) -> Result<Ipv4Header, DropReason> {
        let Some(fixed) = packet.first_chunk::<HEADER_BYTES_MIN>() else {
            let is_ipv6 = packet.first().is_some_and(|byte| byte >> 4 == 6);
            return Err(if is_ipv6 { DropReason::Ipv6 } else { DropReason::Runt });
        };
        match fixed[0] >> 4 {
            4 => {}
            6 => return Err(DropReason::Ipv6),
            _ => return Err(DropReason::BadVersion),
        }
        let header_bytes = (fixed[0] & 0x0f) * 4;
        let Some(header) = packet.get(..usize::from(header_bytes)) else {
            return Err(DropReason::BadHeaderLength);
        };
        if header.len() < HEADER_BYTES_MIN {
            return Err(DropReason::BadHeaderLength);
        }
        let total_bytes = u16::from_be_bytes([fixed[2], fixed[3]]);
        if total_bytes < u16::from(header_bytes) || usize::from(total_bytes) > packet.len() {
            return Err(DropReason::BadTotalLength);
        }
        let sum = if header_bytes == 20 { checksum::sum(fixed) } else { checksum::sum(header) };
        if sum != 0xffff {
            return Err(DropReason::BadChecksum);
        }
        let fragment = u16::from_be_bytes([fixed[6], fixed[7]]);
        Ok(Header {
            header_bytes: header_bytes.into(),
            ecn: Ecn::of(fixed[1]),
            total_bytes,
            id: u16::from_be_bytes([fixed[4], fixed[5]]),
            dont_fragment: fragment & 0x4000 != 0,
            more_fragments: fragment & 0x2000 != 0,
            fragment_offset_bytes: (fragment & 0x1fff) << 3,
            ttl: fixed[8],
            protocol: fixed[9],
            source: Self::new(fixed[12], fixed[13], fixed[14], fixed[15]),
            destination: Self::new(fixed[16], fixed[17], fixed[18], fixed[19]),
        })
    }

    /// Loose or strict (RFC 791, section 3.1). Options are read as Linux reads them: behind an end
    /// or a malformed one comes nothing.
    fn has_source_route(header: &Ipv4Header, packet: &[u8]) -> bool {
        let options = packet.get(HEADER_BYTES_MIN..usize::from(header.header_bytes));
        let mut options = options.unwrap_or_default();
        loop {
            options = match options {
                [option::LOOSE_ROUTE | option::STRICT_ROUTE, ..] => return true,
                [option::NO_OPERATION, rest @ ..] => rest,
                [option::END, ..] => return false,
                [_, bytes @ 2..=255, ..] => options.get(usize::from(*bytes)..).unwrap_or_default(),
                [_, ..] | [] => return false,
            };
        }
    }

    /// Patches the header checksum (RFC 1624), as the next two do.
    #[inline]
    fn decrement_ttl(packet: &mut [u8]) {
        edit_word(packet, 4, |[ttl, protocol]| {
            debug_assert!(ttl >= 1, "decrement_ttl on a packet without time to live");
            [ttl.wrapping_sub(1), protocol]
        });
    }

    #[inline]
    fn set_ecn(packet: &mut [u8], ecn: Ecn) {
        edit_word(packet, 0, |[version, service]| [version, service & !0b11 | ecn as u8]);
    }

    #[inline]
    fn set_total_length(packet: &mut [u8], total_bytes: u16) {
        edit_word(packet, 1, |_| total_bytes.to_be_bytes());
    }

    #[inline]
    fn sum(self) -> u64 {
        u32::from_ne_bytes(self.octets()).into()
    }

    #[inline]
    fn is_ordinary(self) -> bool {
        matches!(self.octets()[0], 1..=126 | 128..=168 | 170..=223)
    }

    /// RFC 1812, section 5.3.7: 0/8, 127/8, 169.254/16, 224/4 and 240/4, the limited broadcast
    /// among them.
    #[inline]
    fn is_martian_source(self) -> bool {
        matches!(self.octets(), [0 | 127 | 224..=255, ..] | [169, 254, ..])
    }

    /// 0/8, 127/8, and 240/4 but for the limited broadcast.
    #[inline]
    fn is_martian_destination(self) -> bool {
        match self.octets() {
            [0 | 127, ..] => true,
            [240..=255, ..] => self != Self::BROADCAST,
            _ => false,
        }
    }

    /// 224/4 and the limited broadcast.
    #[inline]
    fn is_multicast_or_broadcast(self) -> bool {
        self.octets()[0] >> 4 == 0xe || self == Self::BROADCAST
    }

    fn is_of_link(_: Self, _: Self) -> bool {
        false
    }

    /// Echo, router discovery, timestamp, information, address mask, extended echo (RFC 8335).
    fn is_icmp_query(kind: u8) -> bool {
        matches!(kind, 0 | 8 | 9 | 10 | 13..=18 | 42 | 43)
    }

    fn icmp_error(kind: ErrorKind) -> (u8, u8) {
        match kind {
            ErrorKind::TimeExceeded => (11, 0),
            ErrorKind::NetUnreachable => (3, 0),
            ErrorKind::PacketTooBig { .. } => (3, 4),
        }
    }

    fn write_icmp_header(out: &mut [u8], source: Self, destination: Self, total_bytes: u16) {
        let Some(ip) = out.first_chunk_mut::<HEADER_BYTES_MIN>() else { return };
        ip.fill(0);
        ip[0] = 0x45;
        ip[1] = ERROR_TOS;
        ip[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        ip[6..8].copy_from_slice(&ERROR_FLAGS);
        ip[8] = ERROR_TTL;
        ip[9] = protocol::ICMP;
        ip[12..16].copy_from_slice(&source.octets());
        ip[16..20].copy_from_slice(&destination.octets());
        let sum = checksum::finish(checksum::sum(ip));
        ip[10..12].copy_from_slice(&sum);
    }
}

/// Changes the 16-bit word of that number in the fixed part of the header, which a packet has that
/// was parsed before, and patches the checksum.
#[inline]
fn edit_word(packet: &mut [u8], number: usize, change: impl FnOnce([u8; 2]) -> [u8; 2]) {
    let header = packet.first_chunk_mut::<HEADER_BYTES_MIN>();
    debug_assert!(header.is_some(), "an edit of a packet that was never parsed");
    let Some((words, _)) = header.map(|header| header.as_chunks_mut()) else { return };
    let Ok([word, sum]) = words.get_disjoint_mut([number, CHECKSUM_WORD]) else { return };
    let old = std::mem::replace(word, change(*word));
    *sum = checksum::update(*sum, old, *word);
}

#[cfg(test)]
mod tests;
