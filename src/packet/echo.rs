//! ICMP echo, RFC 792: a request of any length, and what an answer to it says. Every kernel
//! answers, so a peer needs no part in being measured.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::packet::checksum;
use crate::packet::header::protocol;
use crate::packet::icmp::ICMP_HEADER_BYTES;
use crate::packet::ipv4::{HEADER_BYTES_MIN, Ipv4Header};
use crate::packet::transport::UDP_HEADER_BYTES;

/// The shortest request: headers and the token.
pub const ECHO_BYTES_MIN: usize = TOKEN_AT + size_of::<u64>();

const TOKEN_AT: usize = HEADER_BYTES_MIN + ICMP_HEADER_BYTES;

/// The type of an answer.
pub const REPLY: u8 = 0;
const UNREACHABLE: u8 = 3;
const REQUEST: u8 = 8;
const EXPIRED: u8 = 11;

/// What a socket needs to see for [`Answer`], but for [`Answer::Asked`], which takes [`REQUESTS`].
pub const ANSWERS: [u8; 3] = [REPLY, UNREACHABLE, EXPIRED];
/// See [`ANSWERS`].
pub const REQUESTS: u8 = REQUEST;

/// IANA's recommended default.
pub const TTL: u8 = 64;

/// Ethernet's and VXLAN's header, between a datagram's and the packet that it carries.
const VXLAN_BYTES: usize = 22;

/// The tokens of one run: each is known to nobody but whom that echo was sent to, and who forwards
/// it. std's hash is keyed (SipHash), with a key from the kernel's random numbers.
#[derive(Debug, Clone, Default)]
pub struct Tokens(RandomState);

impl Tokens {
    /// Of an echo to this address, with this number and length.
    pub fn of(&self, destination: Ipv4Addr, sequence: u16, total_bytes: u16) -> u64 {
        self.0.hash_one((destination, sequence, total_bytes))
    }
}

/// An echo request.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Unspecified to have the kernel choose.
    pub source: Ipv4Addr,
    /// Who is asked.
    pub destination: Ipv4Addr,
    /// After how many routers it expires.
    pub ttl: u8,
    /// Comes back in the answer. A firewall knows the answers by it, so it is one for all.
    pub identifier: u16,
    /// The same, to tell ours apart.
    pub sequence: u16,
    /// The same: what tells ours from those that others asked for or made up.
    pub token: u64,
}

impl Request {
    /// Makes all of `packet` this request.
    ///
    /// `packet` has [`ECHO_BYTES_MIN`] to 65,535 bytes; of any other length it becomes all zeroes,
    /// which no kernel takes for a packet.
    pub fn write(&self, packet: &mut [u8]) {
        packet.fill(0);
        let Ok(total_bytes) = u16::try_from(packet.len()) else { return };
        let Some(head) = packet.first_chunk_mut::<ECHO_BYTES_MIN>() else { return };
        head[0] = 0x45;
        head[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        // Of a raw packet without an identification the kernel makes one, by a hash of addresses
        // and a counter that it shares with others (`raw_send_hdrinc`, net/ipv4/raw.c).
        head[4..6].copy_from_slice(&self.sequence.max(1).to_be_bytes());
        head[8] = self.ttl;
        head[9] = protocol::ICMP;
        head[12..16].copy_from_slice(&self.source.octets());
        head[16..20].copy_from_slice(&self.destination.octets());
        head[HEADER_BYTES_MIN] = REQUEST;
        head[24..26].copy_from_slice(&self.identifier.to_be_bytes());
        head[26..28].copy_from_slice(&self.sequence.to_be_bytes());
        head[TOKEN_AT..].copy_from_slice(&self.token.to_be_bytes());
        // All that follows is zero.
        let icmp_checksum = checksum::finish(checksum::sum(&head[HEADER_BYTES_MIN..]));
        head[22..24].copy_from_slice(&icmp_checksum);
        let ip_checksum = checksum::finish(checksum::sum(&head[..HEADER_BYTES_MIN]));
        head[10..12].copy_from_slice(&ip_checksum);
    }
}

/// What an ICMP message says of packets that this host sent, or asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// An echo came back.
    Reply(Reply),
    /// This host was asked for an echo, by this one.
    Asked(Ipv4Addr),
    /// A router, or the host that it was for, could not do anything with an echo of this host.
    Lost {
        /// Who says so.
        by: Ipv4Addr,
        /// Whom the echo was for.
        destination: Ipv4Addr,
        /// Its number.
        sequence: u16,
        /// Why: a code of type 3; nothing if it had expired.
        code: Option<u8>,
    },
    /// A UDP datagram could not be delivered.
    Refused {
        /// Who says so.
        by: Ipv4Addr,
        /// Why: a code of type 3.
        code: u8,
        /// Who sent it.
        source: Ipv4Addr,
        /// Whom it was for.
        destination: SocketAddrV4,
        /// To whom an echo of this host was that it carried, by what is quoted.
        echo_to: Option<Ipv4Addr>,
    },
}

/// The token of an echo to this address, with this number and length.
pub type TokenOf<'a> = &'a dyn Fn(Ipv4Addr, u16, u16) -> u64;

impl Answer {
    /// Reads a packet; `None` of anything else, and of echoes without their tokens.
    pub fn read(packet: &[u8], token_of: TokenOf<'_>) -> Option<Self> {
        if let Some(reply) = Reply::read(packet) {
            let token = token_of(reply.source, reply.sequence, reply.total_bytes);
            return (reply.token == token).then_some(Self::Reply(reply));
        }
        let (by, icmp) = message(packet)?;
        let kind = *icmp.first()?;
        if kind == REQUEST {
            return Some(Self::Asked(by));
        }
        let code = *icmp.get(1)?;
        if kind != UNREACHABLE && kind != EXPIRED {
            return None;
        }
        let quoted = Quoted::read(icmp.get(ICMP_HEADER_BYTES..)?)?;
        match quoted.protocol {
            protocol::ICMP => {
                let (destination, sequence) = (quoted.destination, quoted.echo(token_of)?);
                let code = (kind == UNREACHABLE).then_some(code);
                Some(Self::Lost { by, destination, sequence, code })
            }
            protocol::UDP if kind == UNREACHABLE => {
                let Quoted { source, destination, payload, .. } = quoted;
                let port = u16::from_be_bytes(*payload.get(2..)?.first_chunk()?);
                let carried = payload.get(UDP_HEADER_BYTES..).unwrap_or_default();
                let framed = carried.get(VXLAN_BYTES..).unwrap_or_default();
                let echo_to = [carried, framed]
                    .into_iter()
                    .filter_map(Quoted::read)
                    .find_map(|inner| inner.echo(token_of).map(|_| inner.destination));
                let destination = SocketAddrV4::new(destination, port);
                Some(Self::Refused { by, code, source, destination, echo_to })
            }
            _ => None,
        }
    }
}

/// As much of a packet as another host saw fit to quote, of which the lengths may say more.
struct Quoted<'a> {
    total_bytes: u16,
    protocol: u8,
    source: Ipv4Addr,
    destination: Ipv4Addr,
    payload: &'a [u8],
}

impl<'a> Quoted<'a> {
    fn read(packet: &'a [u8]) -> Option<Self> {
        let address = |at: usize| packet.get(at..)?.first_chunk::<4>().copied();
        Some(Self {
            total_bytes: u16::from_be_bytes(*packet.get(2..)?.first_chunk()?),
            protocol: *packet.get(9)?,
            source: address(12)?.into(),
            destination: address(16)?.into(),
            payload: packet.get(usize::from(packet.first()? & 0x0f) * 4..)?,
        })
    }

    /// The number of an echo of this host.
    fn echo(&self, token_of: TokenOf<'_>) -> Option<u16> {
        let sequence = u16::from_be_bytes(*self.payload.get(6..)?.first_chunk()?);
        let token = token_of(self.destination, sequence, self.total_bytes).to_be_bytes();
        let is_ours = self.protocol == protocol::ICMP
            && self.payload.first() == Some(&REQUEST)
            && self.payload.get(ICMP_HEADER_BYTES..)?.starts_with(&token);
        is_ours.then_some(sequence)
    }
}

/// The sender of an ICMP message, and the message.
fn message(packet: &[u8]) -> Option<(Ipv4Addr, &[u8])> {
    let header = Ipv4Header::parse(packet).ok()?;
    let icmp = packet.get(usize::from(header.header_bytes)..usize::from(header.total_bytes))?;
    (header.protocol == protocol::ICMP).then_some((header.source, icmp))
}

/// What an echo reply says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// Who answers.
    pub source: Ipv4Addr,
    /// How long the packet is.
    pub total_bytes: u16,
    /// What the request had there.
    pub token: u64,
    /// The same.
    pub sequence: u16,
}

impl Reply {
    /// Reads a packet; `None` if it is no reply, or one without a token.
    pub fn read(packet: &[u8]) -> Option<Self> {
        let (source, icmp) = message(packet)?;
        let token = icmp.get(ICMP_HEADER_BYTES..)?.first_chunk()?;
        let sequence = icmp.get(6..)?.first_chunk()?;
        let total_bytes = u16::from_be_bytes(*packet.get(2..)?.first_chunk()?);
        (icmp.first() == Some(&REPLY)).then(|| Self {
            source,
            total_bytes,
            token: u64::from_be_bytes(*token),
            sequence: u16::from_be_bytes(*sequence),
        })
    }
}

/// Whether a packet is an answer of the kernel with the address `source` to an echo, by its first
/// bytes: a reply, or an error.
#[inline]
pub fn is_answer_from(source: Ipv4Addr, packet: &[u8]) -> bool {
    let kind_at = packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
    packet.get(9) == Some(&protocol::ICMP)
        && packet.get(12..16) == Some(&source.octets())
        && packet.get(kind_at).is_some_and(|kind| ANSWERS.contains(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEAR: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
    const FAR: Ipv4Addr = Ipv4Addr::new(10, 5, 2, 0);
    const TOKEN: u64 = 0x0123_4567_89ab_cdef;

    fn request(bytes: usize) -> Vec<u8> {
        let mut packet = vec![0xff; bytes];
        let [source, destination] = [NEAR, FAR];
        let (identifier, sequence, token) = (0xcdef, 7, TOKEN);
        Request { source, destination, ttl: TTL, identifier, sequence, token }.write(&mut packet);
        packet
    }

    /// With the tokens of one run, in which all echoes of number 7 to the far host have this one.
    fn read(packet: &[u8]) -> Option<Answer> {
        let token = |to, sequence, _| if (to, sequence) == (FAR, 7) { TOKEN } else { 1 };
        Answer::read(packet, &token)
    }

    /// With those of another daemon.
    fn read_by_another(packet: &[u8]) -> Option<Answer> {
        Answer::read(packet, &|_, _, _| TOKEN + 1)
    }

    /// What a kernel makes of a request (`icmp_echo`, net/ipv4/icmp.c).
    fn answer(request: &[u8]) -> Vec<u8> {
        let mut reply = request.to_vec();
        reply[12..16].copy_from_slice(&request[16..20]);
        reply[16..20].copy_from_slice(&request[12..16]);
        reply[HEADER_BYTES_MIN] = REPLY;
        reply
    }

    /// An error of this type and code about the beginning of a packet.
    fn error(kind: u8, code: u8, quoted: &[u8]) -> Vec<u8> {
        let mut packet = request(HEADER_BYTES_MIN + ICMP_HEADER_BYTES + quoted.len().max(8));
        packet[12..16].copy_from_slice(&FAR.octets());
        packet[16..20].copy_from_slice(&NEAR.octets());
        packet[HEADER_BYTES_MIN..TOKEN_AT].copy_from_slice(&[kind, code, 0, 0, 0, 0, 0, 0]);
        packet[TOKEN_AT..][..quoted.len()].copy_from_slice(quoted);
        packet
    }

    #[test]
    fn a_request_is_valid_and_its_reply_recognised() {
        for bytes in [ECHO_BYTES_MIN, 548, 1371, 1472, 65_507] {
            let request = request(bytes);
            let header = Ipv4Header::parse(&request).expect("every kernel takes it");
            assert_eq!((header.source, header.destination), (NEAR, FAR));
            assert_ne!(request[4..6], [0, 0], "the kernel would make an identification");
            let icmp = &request[HEADER_BYTES_MIN..];
            assert_eq!(checksum::finish(checksum::sum(icmp)), [0, 0], "{bytes} bytes");
            let reply = answer(&request);
            assert!(is_answer_from(FAR, &reply));
            assert!(!is_answer_from(NEAR, &reply) && !is_answer_from(NEAR, &request));
            let total_bytes = bytes as u16;
            let expected = Reply { source: FAR, total_bytes, token: TOKEN, sequence: 7 };
            assert_eq!(read(&reply), Some(Answer::Reply(expected)));
            assert_eq!(read_by_another(&reply), None, "somebody else's reply");
            assert_eq!(read(&reply[..bytes - 1]), None, "cut off");
            assert_eq!(read(&request), Some(Answer::Asked(NEAR)));
        }
    }

    #[test]
    fn an_error_about_our_echo_or_datagram_is_read() {
        let echo = request(84);
        for (kind, code) in [(EXPIRED, None), (UNREACHABLE, Some(0))] {
            let expected = Answer::Lost { by: FAR, destination: FAR, sequence: 7, code };
            let packet = error(kind, 0, &echo[..64]);
            assert!(is_answer_from(FAR, &packet));
            assert_eq!(read(&packet), Some(expected));
            assert_eq!(read_by_another(&packet), None, "of another daemon");
            assert_eq!(read(&error(kind, 0, &echo[..28])), None, "no token");
        }
        let mut datagram = echo[..28].to_vec();
        datagram[9] = protocol::UDP;
        datagram[20..24].copy_from_slice(&[0x20, 0x5d, 0x20, 0x5e]);
        let destination = SocketAddrV4::new(FAR, 0x205e);
        let refused = |echo_to| {
            Some(Answer::Refused { by: FAR, code: 3, source: NEAR, destination, echo_to })
        };
        assert_eq!(read(&error(UNREACHABLE, 3, &datagram)), refused(None));
        for before in [0, VXLAN_BYTES] {
            let carried = [&datagram, &vec![8; before], &echo[..36]].concat();
            assert_eq!(read(&error(UNREACHABLE, 3, &carried)), refused(Some(FAR)), "{before}");
            assert_eq!(read_by_another(&error(UNREACHABLE, 3, &carried)), refused(None));
        }
        for kind in [EXPIRED, 12] {
            assert_eq!(read(&error(kind, 3, &datagram)), None);
        }
        let whole = error(UNREACHABLE, 3, &datagram);
        for bytes in 0..whole.len() {
            assert_eq!(read(&whole[..bytes]), None, "cut off");
        }
    }

    /// By hand: the number is 7, the token that of the far host.
    #[test]
    fn an_answer_counts_with_the_token_of_its_sender_number_and_length_only() {
        let mut reply = [
            0x45, 0, 0, 36, 0, 0, 0, 0, 64, 1, 0x63, 0xd0, 10, 5, 2, 0, 10, 5, 1, 0, //
            0, 0, 0, 0, 0xcd, 0xef, 0, 7, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,
        ];
        let token = |to, sequence, bytes| match (to, sequence, bytes) {
            (FAR, 7, 36) => TOKEN,
            _ => !TOKEN,
        };
        let is_read = |packet: &[u8]| Answer::read(packet, &token).is_some();
        assert!(is_read(&reply));
        // The source's bytes are in the header's checksum.
        for (at, what) in
            [(&[14, 10][..], "another peer's"), (&[27], "another number's"), (&[35], "made up")]
        {
            at.iter().for_each(|at| reply[*at] ^= 1);
            assert!(Reply::read(&reply).is_some() && !is_read(&reply), "{what}");
            at.iter().for_each(|at| reply[*at] ^= 1);
        }
        let mut long = [&reply[..], &[0; 1400]].concat();
        long[2..4].copy_from_slice(&1436_u16.to_be_bytes());
        long[10..12].copy_from_slice(&[0x5e, 0x58]);
        assert!(Reply::read(&long).is_some() && !is_read(&long), "that of a shorter one");
        let [one, other] = [Tokens::default(), Tokens::default()];
        assert_eq!(one.of(FAR, 7, 84), one.of(FAR, 7, 84));
        let others = [one.of(NEAR, 7, 84), one.of(FAR, 8, 84), one.of(FAR, 7, 85)];
        assert!(!others.contains(&one.of(FAR, 7, 84)));
        assert_ne!(one.of(FAR, 7, 84), other.of(FAR, 7, 84), "another run's");
    }
}
