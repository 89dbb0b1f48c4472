//! The header of a packet of either family: what of it counts, and what differs between the two.

use crate::packet::address::IpAddress;
use crate::packet::checksum;
use crate::packet::ecn::Ecn;
use crate::stats::DropReason;

/// Protocol numbers (IANA) that the dataplane treats specially.
pub mod protocol {
    /// Internet Control Message Protocol.
    pub const ICMP: u8 = 1;
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
    /// ICMP of IPv6 (RFC 4443).
    pub const ICMPV6: u8 = 58;
}

/// Which error to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// Time to live exceeded in transit (RFC 792, type 11 code 0; RFC 4443, type 3 code 0).
    TimeExceeded,
    /// Network unreachable (RFC 792, type 3 code 0), no route (RFC 4443, type 1 code 0).
    NetUnreachable,
    /// Longer than the next hop takes, and not to be fragmented (RFC 1191, type 3 code 4; RFC 4443,
    /// type 2).
    PacketTooBig {
        /// Largest packet that the next hop takes.
        next_hop_mtu_bytes: u16,
    },
}

/// Initial time to live (IANA's recommended default; RFC 1812, section 4.3.2.4 asks for the
/// sender's own value, not that of the offending packet).
pub(super) const ERROR_TTL: u8 = 64;

/// The fields of a valid header.
///
/// When it comes from [`Header::parse`], `A::HEADER_BYTES_MIN <= header_bytes <= total_bytes`, and
/// both lie within the packet that was parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header<A> {
    /// Length of all that comes before the transport header: with IPv4's options, 20…60, or IPv6's
    /// extension headers.
    pub header_bytes: u16,
    /// What routers may say, or have said, about congestion.
    pub ecn: Ecn,
    /// Header and payload.
    pub total_bytes: u16,
    /// Identification, for reassembly; 0 for IPv6.
    pub id: u16,
    /// The Don't Fragment flag, which stands for all of IPv6.
    pub dont_fragment: bool,
    /// The More Fragments flag.
    pub more_fragments: bool,
    /// Where this fragment's payload belongs; a multiple of 8.
    pub fragment_offset_bytes: u16,
    /// Time to live; IPv6 calls it hop limit.
    pub ttl: u8,
    /// What the payload is; see [`protocol`].
    pub protocol: u8,
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
}

/// A family, by its addresses: where its fields are, and what its standards ask for.
pub trait Family: IpAddress {
    /// The version field.
    const VERSION: u8;
    /// Length of a header without options or extension headers.
    const HEADER_BYTES_MIN: usize;
    /// Where in it the two addresses begin, source first; they are its end.
    const ADDRESSES_AT: usize;
    /// The protocol of its control messages.
    const ICMP: u8;
    /// The longest error about a packet.
    const ERROR_BYTES_MAX: usize;

    /// Validates and reads the header at the start of `packet`. Bytes after `total_bytes` are
    /// allowed (link padding); the caller trims them.
    fn parse(packet: &[u8]) -> Result<Header<Self>, DropReason>;

    /// Whether the packet that `header` describes names hosts that it is to visit on its way, so
    /// that its destination changes under way.
    fn has_source_route(header: &Header<Self>, packet: &[u8]) -> bool;

    /// Takes one off the time to live. The packet was parsed before and its time to live is at
    /// least 1; whether a packet that arrives with 1 may travel on is for the caller to decide
    /// before. Shorter slices are left alone.
    fn decrement_ttl(packet: &mut [u8]);

    /// Stores another ECN field. The packet was parsed before; shorter slices are left alone.
    fn set_ecn(packet: &mut [u8], ecn: Ecn);

    /// Stores another length of the whole packet, which was parsed before; shorter slices are left
    /// alone.
    fn set_total_length(packet: &mut [u8], total_bytes: u16);

    /// The sum of the address, not folded: at most nine times 2^32.
    fn sum(self) -> u64;

    /// 64 bits that tell nearly all addresses apart, and those of IPv4 surely.
    #[inline]
    fn folded(self) -> u64 {
        self.sum()
    }

    /// Whether one look tells that the address is in none of the classes below, as nearly all are.
    fn is_ordinary(self) -> bool;

    /// Whether it can't be the source of a forwarded packet.
    fn is_martian_source(self) -> bool;

    /// Whether it can't be the destination of a forwarded packet; groups aside.
    fn is_martian_destination(self) -> bool;

    /// Whether it is a group's, or that of all hosts of a link.
    fn is_multicast_or_broadcast(self) -> bool;

    /// Whether a packet with these addresses concerns nobody but the two ends of a link: IPv6's
    /// kernels send some on every device.
    fn is_of_link(source: Self, destination: Self) -> bool;

    /// Whether a control message of this type is a query or its reply; all others are errors, or
    /// unknown.
    fn is_icmp_query(kind: u8) -> bool;

    /// Type and code of an error.
    fn icmp_error(kind: ErrorKind) -> (u8, u8);

    /// Writes the header of a control message from `source` to `destination`, `total_bytes` with
    /// its header.
    fn write_icmp_header(out: &mut [u8], source: Self, destination: Self, total_bytes: u16);
}

impl<A: Family> Header<A> {
    /// As [`Family::parse`].
    #[inline(always)]
    pub fn parse(packet: &[u8]) -> Result<Self, DropReason> {
        A::parse(packet)
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
        let payload_bytes = self.total_bytes.saturating_sub(self.header_bytes);
        pseudo_header(self.source, self.destination, self.protocol, payload_bytes)
    }
}

/// The folded sum of the pseudo header of TCP, UDP and ICMPv6 (RFC 9293, section 3.1; RFC 768;
/// RFC 8200, section 8.1); `length_bytes` is that of the transport header and its payload.
#[inline]
pub fn pseudo_header<A: Family>(source: A, destination: A, protocol: u8, length_bytes: u16) -> u32 {
    let rest = u64::from(u16::from(protocol).to_be()) + u64::from(length_bytes.to_be());
    checksum::fold(source.sum() + destination.sum() + rest)
}
