//! ICMP echo, RFC 792 and RFC 4443: a request of any length, and what an answer to it says. Every
//! kernel answers, so a peer needs no part in being measured.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::packet::checksum;
use crate::packet::header::{Family, Header, protocol, pseudo_header};
use crate::packet::icmp::ICMP_HEADER_BYTES;
use crate::packet::ipv4;
use crate::packet::ipv6_header;
use crate::packet::transport::UDP_HEADER_BYTES;

/// The types of messages that concern echoes: each family has its own.
#[derive(Debug, Clone, Copy)]
pub struct Kinds {
    /// Asks for an echo.
    pub request: u8,
    /// The answer.
    pub reply: u8,
    /// An error: not delivered.
    pub unreachable: u8,
    /// An error: gone too far.
    pub expired: u8,
}

impl Kinds {
    /// RFC 792.
    pub const V4: Self = Self { request: 8, reply: 0, unreachable: 3, expired: 11 };
    /// RFC 4443.
    pub const V6: Self = Self { request: 128, reply: 129, unreachable: 1, expired: 3 };

    /// Those of the family of this address.
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// What a socket needs to see for [`Answer`], but for [`Answer::Asked`].
    pub const fn answers(self) -> [u8; 3] {
        [self.reply, self.unreachable, self.expired]
    }
}

/// What the code of an error says, whose type is [`Kinds::unreachable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The last router got no answer for the address on its link.
    NoHost,
    /// Nobody is at the port, or knows the protocol; a firewall may say so as well.
    NoPort,
    /// A firewall, or a policy.
    Forbidden,
    /// Anything else, most often that a router knows no way.
    Other,
}

impl Reason {
    /// By who says so, which tells the family.
    pub const fn of(by: IpAddr, code: u8) -> Self {
        match (by, code) {
            (IpAddr::V4(_), 1) | (IpAddr::V6(_), 3) => Self::NoHost,
            (IpAddr::V4(_), 2 | 3) | (IpAddr::V6(_), 4) => Self::NoPort,
            (IpAddr::V4(_), 9 | 10 | 13) | (IpAddr::V6(_), 1 | 5 | 6) => Self::Forbidden,
            _ => Self::Other,
        }
    }
}

/// IANA's recommended default.
pub const TTL: u8 = 64;

/// What a message needs to have: its header and the token.
const MESSAGE_BYTES_MIN: usize = ICMP_HEADER_BYTES + size_of::<u64>();

/// Ethernet's and VXLAN's header, between a datagram's and the packet that it carries.
const VXLAN_BYTES: usize = 22;

/// The tokens of one run: each is known to nobody but whom that echo was sent to, and who forwards
/// it. std's hash is keyed (SipHash), with a key from the kernel's random numbers.
#[derive(Debug, Clone, Default)]
pub struct Tokens(RandomState);

impl Tokens {
    /// Of an echo to this address, with this number and length.
    pub fn of(&self, destination: IpAddr, sequence: u16, total_bytes: u16) -> u64 {
        self.0.hash_one((destination, sequence, total_bytes))
    }
}

/// An echo request.
#[derive(Debug, Clone, Copy)]
pub struct Request<A> {
    /// Unspecified to have the kernel choose.
    pub source: A,
    /// Who is asked.
    pub destination: A,
    /// After how many routers it expires.
    pub ttl: u8,
    /// Comes back in the answer. A firewall knows the answers by it, so it is one for all.
    pub identifier: u16,
    /// The same, to tell ours apart.
    pub sequence: u16,
    /// The same: what tells ours from those that others asked for or made up.
    pub token: u64,
}

impl<A: Family> Request<A> {
    /// The shortest request: headers and the token.
    pub const BYTES_MIN: usize = A::HEADER_BYTES_MIN + MESSAGE_BYTES_MIN;

    /// Makes all of `packet` this request.
    ///
    /// `packet` has [`Self::BYTES_MIN`] to 65,535 bytes; of any other length it becomes all zeroes,
    /// which no kernel takes for a packet.
    pub fn write(&self, packet: &mut [u8]) {
        packet.fill(0);
        let Ok(total_bytes) = u16::try_from(packet.len()) else { return };
        let message = packet.get_mut(A::HEADER_BYTES_MIN..);
        let message = message.and_then(|it| it.first_chunk_mut::<MESSAGE_BYTES_MIN>());
        let Some(message) = message else { return };
        message[0] = Kinds::of(self.destination.into()).request;
        message[4..6].copy_from_slice(&self.identifier.to_be_bytes());
        message[6..8].copy_from_slice(&self.sequence.to_be_bytes());
        message[ICMP_HEADER_BYTES..].copy_from_slice(&self.token.to_be_bytes());
        // All that follows is zero.
        let sum = checksum::add(self.pseudo_header_sum(total_bytes), checksum::sum(message));
        message[2..4].copy_from_slice(&checksum::finish(sum));
        self.write_header(packet, total_bytes);
    }

    /// ICMPv6 sums a pseudo header as well (RFC 4443, section 2.3).
    fn pseudo_header_sum(&self, total_bytes: u16) -> u32 {
        let message_bytes = total_bytes.saturating_sub(A::HEADER_BYTES_MIN as u16);
        match A::VERSION {
            4 => 0,
            _ => pseudo_header(self.source, self.destination, A::ICMP, message_bytes),
        }
    }

    fn write_header(&self, packet: &mut [u8], total_bytes: u16) {
        let addresses: [IpAddr; 2] = [self.source.into(), self.destination.into()];
        let [IpAddr::V4(source), IpAddr::V4(destination)] = addresses else {
            A::write_icmp_header(packet, self.source, self.destination, total_bytes);
            let hop_limit = packet.get_mut(ipv6_header::HOP_LIMIT_AT);
            hop_limit.into_iter().for_each(|it| *it = self.ttl);
            return;
        };
        let Some(ip) = packet.first_chunk_mut::<{ ipv4::HEADER_BYTES_MIN }>() else { return };
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        // Of a raw packet without an identification the kernel makes one, by a hash of addresses
        // and a counter that it shares with others (`raw_send_hdrinc`, net/ipv4/raw.c).
        ip[4..6].copy_from_slice(&self.sequence.max(1).to_be_bytes());
        ip[8] = self.ttl;
        ip[9] = protocol::ICMP;
        ip[12..16].copy_from_slice(&source.octets());
        ip[16..20].copy_from_slice(&destination.octets());
        let sum = checksum::finish(checksum::sum(ip));
        ip[10..12].copy_from_slice(&sum);
    }
}

/// What an ICMP message says of packets that this host sent, or asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// An echo came back.
    Reply(Reply),
    /// This host was asked for an echo, by this one.
    Asked(IpAddr),
    /// A router, or the host that it was for, could not do anything with an echo of this host.
    Lost {
        /// Who says so.
        by: IpAddr,
        /// Whom the echo was for.
        destination: IpAddr,
        /// Its number.
        sequence: u16,
        /// Why: a code of [`Kinds::unreachable`]; nothing if it had expired.
        code: Option<u8>,
    },
    /// A UDP datagram could not be delivered.
    Refused {
        /// Who says so.
        by: IpAddr,
        /// Why: a code of [`Kinds::unreachable`].
        code: u8,
        /// Who sent it.
        source: IpAddr,
        /// Whom it was for.
        destination: SocketAddr,
        /// To whom an echo of this host was that it carried, by what is quoted.
        echo_to: Option<IpAddr>,
    },
}

/// The token of an echo to this address, with this number and length.
pub type TokenOf<'a> = &'a dyn Fn(IpAddr, u16, u16) -> u64;

impl Answer {
    /// Reads a message; `None` of anything else, and of echoes without their tokens.
    pub fn of(message: &Message<'_>, token_of: TokenOf<'_>) -> Option<Self> {
        if let Some(reply) = Reply::of(message) {
            let token = token_of(reply.source, reply.sequence, reply.total_bytes);
            return (reply.token == token).then_some(Self::Reply(reply));
        }
        let Message { by, bytes, .. } = *message;
        let (kinds, kind) = (Kinds::of(by), *bytes.first()?);
        if kind == kinds.request {
            return Some(Self::Asked(by));
        }
        let (code, is_unreachable) = (*bytes.get(1)?, kind == kinds.unreachable);
        if !is_unreachable && kind != kinds.expired {
            return None;
        }
        let quoted = Quoted::read(bytes.get(ICMP_HEADER_BYTES..)?)?;
        if quoted.destination.is_ipv4() != by.is_ipv4() {
            return None;
        }
        if let Some(sequence) = quoted.echo(token_of) {
            let (destination, code) = (quoted.destination, is_unreachable.then_some(code));
            return Some(Self::Lost { by, destination, sequence, code });
        }
        let Quoted { source, destination, payload, .. } = quoted;
        if quoted.protocol != protocol::UDP || !is_unreachable {
            return None;
        }
        let port = u16::from_be_bytes(*payload.get(2..)?.first_chunk()?);
        let carried = payload.get(UDP_HEADER_BYTES..).unwrap_or_default();
        let framed = carried.get(VXLAN_BYTES..).unwrap_or_default();
        let echo_to = [carried, framed]
            .into_iter()
            .filter_map(Quoted::read)
            .find_map(|inner| inner.echo(token_of).map(|_| inner.destination));
        let destination = SocketAddr::new(destination, port);
        Some(Self::Refused { by, code, source, destination, echo_to })
    }
}

/// As much of a packet as was seen, of which the lengths may say more.
#[derive(Debug, Clone, Copy)]
pub struct Quoted<'a> {
    total_bytes: u16,
    /// What the payload is. Extension headers of IPv6 are that, too.
    pub protocol: u8,
    /// Who sent it.
    pub source: IpAddr,
    /// Whom it is for.
    pub destination: IpAddr,
    /// What was seen of what follows the header.
    pub payload: &'a [u8],
}

impl<'a> Quoted<'a> {
    /// Reads the beginning of a packet of either family; `None` if the header is cut off.
    pub fn read(packet: &'a [u8]) -> Option<Self> {
        let first = packet.first()?;
        let ipv4_bytes = usize::from(first & 0x0f) * 4;
        let (protocol_at, length_at, counted_from, header_bytes) = match first >> 4 {
            4 => (9, 2, 0, ipv4_bytes),
            6 => (6, 4, ipv6_header::HEADER_BYTES_MIN as u16, ipv6_header::HEADER_BYTES_MIN),
            _ => return None,
        };
        let [source, destination] = match counted_from {
            0 => [address::<4>(packet, 12)?.into(), address::<4>(packet, 16)?.into()],
            _ => [address::<16>(packet, 8)?.into(), address::<16>(packet, 24)?.into()],
        };
        let length_bytes = u16::from_be_bytes(*packet.get(length_at..)?.first_chunk()?);
        Some(Self {
            total_bytes: length_bytes.saturating_add(counted_from),
            protocol: *packet.get(protocol_at)?,
            source,
            destination,
            payload: packet.get(header_bytes..).unwrap_or_default(),
        })
    }

    /// The number of an echo of this host.
    fn echo(&self, token_of: TokenOf<'_>) -> Option<u16> {
        let sequence = u16::from_be_bytes(*self.payload.get(6..)?.first_chunk()?);
        let token = token_of(self.destination, sequence, self.total_bytes).to_be_bytes();
        let icmp = if self.destination.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
        let is_ours = self.protocol == icmp
            && self.payload.first() == Some(&Kinds::of(self.destination).request)
            && self.payload.get(ICMP_HEADER_BYTES..)?.starts_with(&token);
        is_ours.then_some(sequence)
    }
}

fn address<const BYTES: usize>(packet: &[u8], at: usize) -> Option<[u8; BYTES]> {
    packet.get(at..)?.first_chunk().copied()
}

/// An ICMP message of either family.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    by: IpAddr,
    /// With the packet's header.
    total_bytes: u16,
    bytes: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads a packet; `None` if it is none of ICMP.
    pub fn read(packet: &'a [u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => Self::of_family::<Ipv4Addr>(packet),
            _ => Self::of_family::<Ipv6Addr>(packet),
        }
    }

    /// Reads what a raw socket has received: of IPv6 it comes without its header, `by` whom the
    /// kernel says.
    pub fn received(by: Option<Ipv6Addr>, bytes: &'a [u8]) -> Option<Self> {
        let Some(by) = by else { return Self::read(bytes) };
        let total_bytes = u16::try_from(ipv6_header::HEADER_BYTES_MIN + bytes.len()).ok()?;
        Some(Self { by: by.into(), total_bytes, bytes })
    }

    fn of_family<A: Family>(packet: &'a [u8]) -> Option<Self> {
        let Header { header_bytes, total_bytes, protocol, source, .. } = A::parse(packet).ok()?;
        let bytes = packet.get(usize::from(header_bytes)..usize::from(total_bytes))?;
        (protocol == A::ICMP).then(|| Self { by: source.into(), total_bytes, bytes })
    }
}

/// What an echo reply says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// Who answers.
    pub source: IpAddr,
    /// How long the packet is.
    pub total_bytes: u16,
    /// What the request had there.
    pub token: u64,
    /// The same.
    pub sequence: u16,
}

impl Reply {
    /// Reads a message; `None` if it is no reply, or one without a token.
    pub fn of(message: &Message<'_>) -> Option<Self> {
        let Message { by, total_bytes, bytes } = *message;
        let token = bytes.get(ICMP_HEADER_BYTES..)?.first_chunk()?;
        let sequence = bytes.get(6..)?.first_chunk()?;
        (bytes.first() == Some(&Kinds::of(by).reply)).then(|| Self {
            source: by,
            total_bytes,
            token: u64::from_be_bytes(*token),
            sequence: u16::from_be_bytes(*sequence),
        })
    }
}

/// Whether a packet is an answer of the kernel with the address `source` to an echo, by its first
/// bytes: a reply, or an error.
#[inline]
pub fn is_answer_from(source: IpAddr, packet: &[u8]) -> bool {
    let (kind_at, is_from) = match source {
        IpAddr::V4(source) => (
            packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4),
            packet.get(9) == Some(&protocol::ICMP) && packet.get(12..16) == Some(&source.octets()),
        ),
        IpAddr::V6(source) => (
            ipv6_header::HEADER_BYTES_MIN,
            packet.get(6) == Some(&protocol::ICMPV6) && packet.get(8..24) == Some(&source.octets()),
        ),
    };
    let is_answer = |kind| Kinds::of(source).answers().contains(kind);
    is_from && packet.get(kind_at).is_some_and(is_answer)
}

#[cfg(test)]
mod tests;
