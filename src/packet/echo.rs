//! ICMP echo, RFC 792: a request of any length, and what an answer to it says. Every kernel
//! answers, so a peer needs no part in being measured.

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::packet::checksum;
use crate::packet::icmp::ICMP_HEADER_BYTES;
use crate::packet::ipv4::{HEADER_BYTES_MIN, Ipv4Header, protocol};

/// The shortest request: headers and the token.
pub const ECHO_BYTES_MIN: usize = TOKEN_AT + size_of::<u64>();

const TOKEN_AT: usize = HEADER_BYTES_MIN + ICMP_HEADER_BYTES;

const REPLY: u8 = 0;
const UNREACHABLE: u8 = 3;
const REQUEST: u8 = 8;
const EXPIRED: u8 = 11;

/// What a socket needs to see for [`Answer`] and, with requests, for [`Answer::asker`].
pub const ANSWERS: [u8; 3] = [REPLY, UNREACHABLE, EXPIRED];
/// See [`ANSWERS`].
pub const REQUESTS: u8 = REQUEST;

/// IANA's recommended default.
pub const TTL: u8 = 64;

/// An echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Unspecified to have the kernel choose.
    pub source: Ipv4Addr,
    /// Who is asked.
    pub destination: Ipv4Addr,
    /// After how many routers it expires.
    pub ttl: u8,
    /// Comes back in the answer: what tells ours from those that others asked for or made up.
    pub token: u64,
    /// The same, to tell ours apart.
    pub sequence: u16,
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
        head[8] = self.ttl;
        head[9] = protocol::ICMP;
        head[12..16].copy_from_slice(&self.source.octets());
        head[16..20].copy_from_slice(&self.destination.octets());
        head[HEADER_BYTES_MIN] = REQUEST;
        // A firewall knows the answers by it: the same for all of one token.
        head[24..26].copy_from_slice(&(self.token as u16).to_be_bytes());
        head[26..28].copy_from_slice(&self.sequence.to_be_bytes());
        head[TOKEN_AT..].copy_from_slice(&self.token.to_be_bytes());
        // All that follows is zero.
        let icmp_checksum = checksum::finish(checksum::sum(&head[HEADER_BYTES_MIN..]));
        head[22..24].copy_from_slice(&icmp_checksum);
        let ip_checksum = checksum::finish(checksum::sum(&head[..HEADER_BYTES_MIN]));
        head[10..12].copy_from_slice(&ip_checksum);
    }
}

/// What an ICMP message says of packets that this host sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// An echo came back.
    Reply(Reply),
    /// A router, or the host that it was for, could not do anything with an echo of this host.
    Lost {
        /// Who says so.
        by: Ipv4Addr,
        /// Whom the echo was for.
        destination: Ipv4Addr,
        /// Its number.
        sequence: u16,
        /// Whether it had expired.
        has_expired: bool,
    },
    /// A UDP datagram could not be delivered.
    Refused {
        /// Who says so.
        by: Ipv4Addr,
        /// Why: a code of type 3.
        code: u8,
        /// Whom it was for.
        destination: SocketAddrV4,
    },
}

impl Answer {
    /// Reads a packet; `None` of anything else, and of echoes without this token.
    pub fn read(packet: &[u8], token: u64) -> Option<Self> {
        if let Some(reply) = Reply::read(packet) {
            return (reply.token == token).then_some(Self::Reply(reply));
        }
        let (by, icmp) = message(packet)?;
        let (kind, code) = (*icmp.first()?, *icmp.get(1)?);
        if kind != UNREACHABLE && kind != EXPIRED {
            return None;
        }
        // As much of the packet as the other host saw fit, of which the lengths may say more.
        let quoted = icmp.get(ICMP_HEADER_BYTES..)?;
        let payload = quoted.get(usize::from(quoted.first()? & 0x0f) * 4..)?;
        let destination = Ipv4Addr::from(*quoted.get(16..)?.first_chunk::<4>()?);
        let number = |at: usize| payload.get(at..)?.first_chunk().copied().map(u16::from_be_bytes);
        match *quoted.get(9)? {
            protocol::ICMP => {
                let is_ours = payload.first() == Some(&REQUEST)
                    && payload.get(ICMP_HEADER_BYTES..)?.starts_with(&token.to_be_bytes());
                let (sequence, has_expired) = (number(6)?, kind == EXPIRED);
                is_ours.then_some(Self::Lost { by, destination, sequence, has_expired })
            }
            protocol::UDP if kind == UNREACHABLE => {
                let destination = SocketAddrV4::new(destination, number(2)?);
                Some(Self::Refused { by, code, destination })
            }
            _ => None,
        }
    }

    /// Who asks this host for an echo, if that is what a packet does.
    pub fn asker(packet: &[u8]) -> Option<Ipv4Addr> {
        let (source, icmp) = message(packet)?;
        (icmp.first() == Some(&REQUEST)).then_some(source)
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
        Request { source, destination, ttl: TTL, token: TOKEN, sequence: 7 }.write(&mut packet);
        packet
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
            let icmp = &request[HEADER_BYTES_MIN..];
            assert_eq!(checksum::finish(checksum::sum(icmp)), [0, 0], "{bytes} bytes");
            let reply = answer(&request);
            assert!(is_answer_from(FAR, &reply));
            assert!(!is_answer_from(NEAR, &reply) && !is_answer_from(NEAR, &request));
            let total_bytes = bytes as u16;
            let expected = Reply { source: FAR, total_bytes, token: TOKEN, sequence: 7 };
            assert_eq!(Answer::read(&reply, TOKEN), Some(Answer::Reply(expected)));
            assert_eq!(Answer::read(&reply, 1), None, "somebody else's reply");
            assert_eq!(Answer::read(&request, TOKEN), None, "a request");
            assert_eq!(Answer::read(&reply[..bytes - 1], TOKEN), None, "cut off");
            assert_eq!((Answer::asker(&request), Answer::asker(&reply)), (Some(NEAR), None));
        }
    }

    #[test]
    fn an_error_about_our_echo_or_datagram_is_read() {
        let echo = request(84);
        for (kind, has_expired) in [(EXPIRED, true), (UNREACHABLE, false)] {
            let expected = Answer::Lost { by: FAR, destination: FAR, sequence: 7, has_expired };
            let packet = error(kind, 0, &echo[..64]);
            assert!(is_answer_from(FAR, &packet));
            assert_eq!(Answer::read(&packet, TOKEN), Some(expected));
            assert_eq!(Answer::read(&packet, TOKEN + 1), None, "of another daemon");
            assert_eq!(Answer::read(&error(kind, 0, &echo[..28]), TOKEN), None, "no token");
        }
        let mut datagram = echo[..28].to_vec();
        datagram[9] = protocol::UDP;
        datagram[20..24].copy_from_slice(&[0x20, 0x5d, 0x20, 0x5e]);
        let destination = SocketAddrV4::new(FAR, 0x205e);
        let expected = Answer::Refused { by: FAR, code: 3, destination };
        assert_eq!(Answer::read(&error(UNREACHABLE, 3, &datagram), TOKEN), Some(expected));
        for kind in [EXPIRED, 12] {
            assert_eq!(Answer::read(&error(kind, 3, &datagram), TOKEN), None);
        }
        let whole = error(UNREACHABLE, 3, &datagram);
        for bytes in 0..whole.len() {
            assert_eq!(Answer::read(&whole[..bytes], TOKEN), None, "cut off");
        }
    }
}
