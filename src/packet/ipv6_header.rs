//! IPv6 (RFC 8200): the header and the extension headers behind it validated and read once, edited
//! in place; the classes of addresses; what an ICMPv6 error looks like. Never trusts a length that
//! it hasn't compared with the slice.

use std::net::Ipv6Addr;

use crate::packet::ecn::Ecn;
use crate::packet::header::{ERROR_TTL, ErrorKind, Family, Header, protocol};
use crate::stats::DropReason;

/// Length of a header without extension headers.
pub const HEADER_BYTES_MIN: usize = 40;

/// Where in it the hop limit is.
pub(super) const HOP_LIMIT_AT: usize = 7;

/// The header of an IPv6 packet.
pub type Ipv6Header = Header<Ipv6Addr>;

/// Extension headers of one packet. RFC 8200, section 4.1 knows seven places for them, and those
/// who send more mean to keep somebody busy.
const EXTENSIONS_MAX: usize = 8;

/// Extension headers (IANA).
mod extension {
    pub(super) const HOP_BY_HOP: u8 = 0;
    pub(super) const ROUTING: u8 = 43;
    pub(super) const FRAGMENT: u8 = 44;
    pub(super) const AUTHENTICATION: u8 = 51;
    pub(super) const DESTINATION: u8 = 60;
}

/// What comes between the fixed header and the transport.
#[derive(Debug, Clone, Copy)]
struct Chain {
    /// What comes behind.
    protocol: u8,
    /// Where it begins, from the packet's start on.
    end: usize,
    /// Of a fragment: where its payload belongs, and whether more come behind it. The kernel puts
    /// together what the first of several such headers says before it reads the next, so what is
    /// a part by one of them is a part.
    fragment: (u16, bool),
    /// Whether a routing header has further hosts to visit (RFC 8200, section 4.4).
    is_routed: bool,
}

impl Chain {
    /// Reads the extension headers of `packet`, which ends where its header says. None if they go
    /// on beyond it, or are too many.
    fn of(packet: &[u8], next_header: u8) -> Option<Self> {
        let mut chain = Self {
            protocol: next_header,
            end: HEADER_BYTES_MIN,
            fragment: (0, false),
            is_routed: false,
        };
        for _ in 0..=EXTENSIONS_MAX {
            // Of a later fragment the rest is payload.
            if chain.fragment.0 != 0 || !is_extension(chain.protocol) {
                return Some(chain);
            }
            let [next, length, third, fourth] = *packet.get(chain.end..)?.first_chunk()?;
            let word = u16::from_be_bytes([third, fourth]);
            let bytes = match chain.protocol {
                extension::FRAGMENT => {
                    chain.fragment = (word & !7, chain.fragment.1 | (word & 1 != 0));
                    8
                }
                extension::AUTHENTICATION => (usize::from(length) + 2) * 4,
                _ => (usize::from(length) + 1) * 8,
            };
            // The fourth byte of a routing header counts those segments.
            chain.is_routed |= chain.protocol == extension::ROUTING && fourth != 0;
            (chain.protocol, chain.end) = (next, chain.end + bytes);
            packet.get(..chain.end)?;
        }
        None
    }
}

fn is_extension(protocol: u8) -> bool {
    use extension::{AUTHENTICATION, DESTINATION, FRAGMENT, HOP_BY_HOP, ROUTING};
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION)
}

impl Family for Ipv6Addr {
    const VERSION: u8 = 6;
    const HEADER_BYTES_MIN: usize = HEADER_BYTES_MIN;
    const ADDRESSES_AT: usize = 8;
    const ICMP: u8 = protocol::ICMPV6;
    /// RFC 4443, section 2.4(c): the smallest MTU of IPv6.
    const ERROR_BYTES_MAX: usize = 1280;

    /// A packet whose payload is longer than its length field can say (RFC 2675), or than fits a
    /// datagram, has no valid length here.
    #[inline]
    fn parse(packet: &[u8]) -> Result<Ipv6Header, DropReason> {
        let Some(fixed) = packet.first_chunk::<HEADER_BYTES_MIN>() else {
            let is_ipv4 = packet.first().is_some_and(|byte| byte >> 4 == 4);
            return Err(if is_ipv4 { DropReason::Ipv4 } else { DropReason::Runt });
        };
        match fixed[0] >> 4 {
            6 => {}
            4 => return Err(DropReason::Ipv4),
            _ => return Err(DropReason::BadVersion),
        }
        let payload_bytes = u16::from_be_bytes([fixed[4], fixed[5]]);
        let Some(total_bytes) = payload_bytes.checked_add(HEADER_BYTES_MIN as u16) else {
            return Err(DropReason::BadTotalLength);
        };
        let Some(whole) = packet.get(..usize::from(total_bytes)) else {
            return Err(DropReason::BadTotalLength);
        };
        let (mut header_bytes, mut protocol, mut fragment) =
            (HEADER_BYTES_MIN as u16, fixed[6], (0, false));
        if is_extension(protocol) {
            let chain = Chain::of(whole, protocol).ok_or(DropReason::BadHeaderLength)?;
            (header_bytes, protocol, fragment) = (chain.end as u16, chain.protocol, chain.fragment);
        }
        let address = |at: usize| {
            let bytes = fixed.get(at..).and_then(|rest| rest.first_chunk::<16>());
            Self::from(bytes.copied().unwrap_or_default())
        };
        Ok(Header {
            header_bytes,
            ecn: Ecn::of(fixed[1] >> 4),
            total_bytes,
            id: 0,
            dont_fragment: true,
            more_fragments: fragment.1,
            fragment_offset_bytes: fragment.0,
            ttl: fixed[7],
            protocol,
            source: address(8),
            destination: address(24),
        })
    }

    fn has_source_route(header: &Ipv6Header, packet: &[u8]) -> bool {
        usize::from(header.header_bytes) > HEADER_BYTES_MIN
            && packet
                .get(6)
                .and_then(|next_header| Chain::of(packet, *next_header))
                .is_none_or(|chain| chain.is_routed)
    }

    #[inline]
    fn decrement_ttl(packet: &mut [u8]) {
        let hop_limit = packet.get_mut(7);
        debug_assert!(hop_limit.as_ref().is_some_and(|it| **it >= 1), "no time to live");
        if let Some(hop_limit) = hop_limit {
            *hop_limit = hop_limit.wrapping_sub(1);
        }
    }

    #[inline]
    fn set_ecn(packet: &mut [u8], ecn: Ecn) {
        if let Some(byte) = packet.get_mut(1) {
            *byte = *byte & !0b11_0000 | (ecn as u8) << 4;
        }
    }

    #[inline]
    fn set_total_length(packet: &mut [u8], total_bytes: u16) {
        if let Some(length) = packet.get_mut(4..).and_then(|rest| rest.first_chunk_mut()) {
            *length = total_bytes.saturating_sub(HEADER_BYTES_MIN as u16).to_be_bytes();
        }
    }

    #[inline]
    fn sum(self) -> u64 {
        let octets = self.octets();
        let (words, _) = octets.as_chunks::<4>();
        words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum()
    }

    #[inline]
    fn folded(self) -> u64 {
        let octets = self.octets();
        let (halves, _) = octets.as_chunks::<8>();
        halves.iter().fold(0_u64, |folded, half| folded.rotate_left(19) ^ u64::from_ne_bytes(*half))
    }

    /// Global unicast (2000::/3) and unique local (fc00::/7).
    #[inline]
    fn is_ordinary(self) -> bool {
        matches!(self.octets()[0], 0x20..=0x3f | 0xfc | 0xfd)
    }

    /// Unspecified, loopback, link-local, multicast (RFC 4291, section 2.5 and 2.7), and an IPv4
    /// address in IPv6's clothes, which no wire carries (RFC 4942, section 2.2).
    fn is_martian_source(self) -> bool {
        self.is_martian_destination() || self.is_multicast()
    }

    fn is_martian_destination(self) -> bool {
        self.is_unspecified()
            || self.is_loopback()
            || self.is_unicast_link_local()
            || self.to_ipv4_mapped().is_some()
    }

    fn is_multicast_or_broadcast(self) -> bool {
        self.is_multicast()
    }

    /// Neighbour discovery, router solicitations and the like: from or to a link-local address, to
    /// a group of the link (scope 2) or of the host (scope 1), or from nobody yet.
    fn is_of_link(source: Self, destination: Self) -> bool {
        let is_local_group = matches!(destination.octets(), [0xff, flags, ..] if flags & 0xf <= 2);
        is_local_group
            || source.is_unspecified()
            || source.is_unicast_link_local()
            || destination.is_unicast_link_local()
    }

    /// Types from 128 on are informational (RFC 4443, section 2.1); of a redirect no error is told
    /// (section 2.4(e)).
    fn is_icmp_query(kind: u8) -> bool {
        kind >= 128 && kind != 137
    }

    fn icmp_error(kind: ErrorKind) -> (u8, u8) {
        match kind {
            ErrorKind::NetUnreachable => (1, 0),
            ErrorKind::PacketTooBig { .. } => (2, 0),
            ErrorKind::TimeExceeded => (3, 0),
        }
    }

    fn write_icmp_header(out: &mut [u8], source: Self, destination: Self, total_bytes: u16) {
        let Some(ip) = out.first_chunk_mut::<HEADER_BYTES_MIN>() else { return };
        ip.fill(0);
        ip[0] = 0x60;
        let payload_bytes = total_bytes.saturating_sub(HEADER_BYTES_MIN as u16);
        ip[4..6].copy_from_slice(&payload_bytes.to_be_bytes());
        ip[6] = protocol::ICMPV6;
        ip[7] = ERROR_TTL;
        ip[8..24].copy_from_slice(&source.octets());
        ip[24..40].copy_from_slice(&destination.octets());
    }
}

#[cfg(test)]
mod tests;
