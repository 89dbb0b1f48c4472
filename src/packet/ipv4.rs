//! The IPv4 header: validated and read once by [`Ipv4Header::parse`], and edited in place with its
//! checksum kept right. Never trusts a length that it hasn't compared with the slice.

use std::net::Ipv4Addr;

use crate::packet::checksum;
use crate::packet::ecn::Ecn;
use crate::stats::DropReason;

/// Length of a header without options.
pub const HEADER_BYTES_MIN: usize = 20;

/// Which of its 16-bit words is the checksum.
const CHECKSUM_WORD: usize = 5;

/// Protocol numbers (IANA) that the dataplane treats specially.
pub mod protocol {
    /// Internet Control Message Protocol.
    pub const ICMP: u8 = 1;
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
}

/// Options of the header (IANA).
mod option {
    pub(super) const END: u8 = 0;
    pub(super) const NO_OPERATION: u8 = 1;
    pub(super) const LOOSE_ROUTE: u8 = 131;
    pub(super) const STRICT_ROUTE: u8 = 137;
}

/// The fields of a valid IPv4 header.
///
/// When it comes from [`Ipv4Header::parse`], `20 <= header_bytes <= total_bytes`, and both lie
/// within the packet that was parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4Header {
    /// Header length with options, 20…60.
    pub header_bytes: u8,
    /// What routers may say, or have said, about congestion.
    pub ecn: Ecn,
    /// Header and payload.
    pub total_bytes: u16,
    /// Identification, for reassembly.
    pub id: u16,
    /// The Don't Fragment flag.
    pub dont_fragment: bool,
    /// The More Fragments flag.
    pub more_fragments: bool,
    /// Where this fragment's payload belongs; a multiple of 8.
    pub fragment_offset_bytes: u16,
    /// Time to live.
    pub ttl: u8,
    /// What the payload is; see [`protocol`].
    pub protocol: u8,
    /// Source address.
    pub source: Ipv4Addr,
    /// Destination address.
    pub destination: Ipv4Addr,
}

impl Ipv4Header {
    /// Validates and reads the header at the start of `packet`; the checks and their order are
    /// those of RFC 1812, section 5.2.2. The version counts first: IPv6 is IPv6 at any length.
    ///
    /// Bytes after `total_bytes` are allowed (link padding); the caller trims them.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, DropReason> {
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
        Ok(Self {
            header_bytes,
            ecn: Ecn::of(fixed[1]),
            total_bytes,
            id: u16::from_be_bytes([fixed[4], fixed[5]]),
            dont_fragment: fragment & 0x4000 != 0,
            more_fragments: fragment & 0x2000 != 0,
            fragment_offset_bytes: (fragment & 0x1fff) << 3,
            ttl: fixed[8],
            protocol: fixed[9],
            source: Ipv4Addr::new(fixed[12], fixed[13], fixed[14], fixed[15]),
            destination: Ipv4Addr::new(fixed[16], fixed[17], fixed[18], fixed[19]),
        })
    }

    /// Whether the packet is any part of a fragmented datagram.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset_bytes != 0
    }

    /// Whether the packet is a fragment other than the first, so without a transport header.
    #[inline]
    pub fn is_later_fragment(&self) -> bool {
        self.fragment_offset_bytes != 0
    }

    /// The folded sum of the pseudo header of what follows.
    #[inline]
    pub fn pseudo_header_sum(&self) -> u32 {
        let payload_bytes = self.total_bytes.saturating_sub(u16::from(self.header_bytes));
        checksum::pseudo_header(self.source, self.destination, self.protocol, payload_bytes)
    }
}

/// Whether the packet that `header` describes asks for a loose or strict source route (RFC 791,
/// section 3.1). Options are read as Linux reads them: behind an end or a malformed one comes
/// nothing.
pub fn has_source_route(header: &Ipv4Header, packet: &[u8]) -> bool {
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

/// Takes one off the time to live and patches the header checksum (RFC 1624).
///
/// The packet was parsed before and its time to live is at least 1; whether a packet that arrives
/// with 1 may travel on is for the caller to decide before. Shorter slices are left alone.
#[inline]
pub fn decrement_ttl(packet: &mut [u8]) {
    edit_word(packet, 4, |[ttl, protocol]| {
        debug_assert!(ttl >= 1, "decrement_ttl on a packet without time to live");
        [ttl.wrapping_sub(1), protocol]
    });
}

/// Stores another ECN field and patches the header checksum (RFC 1624).
///
/// The packet was parsed before; shorter slices are left alone.
#[inline]
pub fn set_ecn(packet: &mut [u8], ecn: Ecn) {
    edit_word(packet, 0, |[version, service]| [version, service & !0b11 | ecn as u8]);
}

/// Stores a new total length and patches the header checksum (RFC 1624).
///
/// The packet was parsed before; shorter slices are left alone.
#[inline]
pub fn set_total_length(packet: &mut [u8], total_bytes: u16) {
    edit_word(packet, 1, |_| total_bytes.to_be_bytes());
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
