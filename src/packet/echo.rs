//! ICMP echo, RFC 792: a request of any length, and what a reply to it says. Every kernel answers,
//! so a peer needs no part in being measured.

use std::net::Ipv4Addr;

use crate::packet::checksum;
use crate::packet::icmp::ICMP_HEADER_BYTES;
use crate::packet::ipv4::{HEADER_BYTES_MIN, Ipv4Header, protocol};

/// The shortest request: headers and the token.
pub const ECHO_BYTES_MIN: usize = TOKEN_AT + size_of::<u64>();

const TOKEN_AT: usize = HEADER_BYTES_MIN + ICMP_HEADER_BYTES;

const REQUEST: u8 = 8;
const REPLY: u8 = 0;

/// IANA's recommended default.
const TTL: u8 = 64;

/// Makes all of `packet` an echo request. `token` comes back in the reply, and is what tells ours
/// from those that others asked for or made up.
///
/// `packet` has [`ECHO_BYTES_MIN`] to 65,535 bytes; of any other length it becomes all zeroes,
/// which no kernel takes for a packet.
pub fn write_request(packet: &mut [u8], source: Ipv4Addr, destination: Ipv4Addr, token: u64) {
    packet.fill(0);
    let Ok(total_bytes) = u16::try_from(packet.len()) else { return };
    let Some(head) = packet.first_chunk_mut::<ECHO_BYTES_MIN>() else { return };
    head[0] = 0x45;
    head[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    head[8] = TTL;
    head[9] = protocol::ICMP;
    head[12..16].copy_from_slice(&source.octets());
    head[16..20].copy_from_slice(&destination.octets());
    head[HEADER_BYTES_MIN] = REQUEST;
    head[TOKEN_AT..].copy_from_slice(&token.to_be_bytes());
    // All that follows is zero.
    let icmp_checksum = checksum::finish(checksum::sum(&head[HEADER_BYTES_MIN..]));
    head[22..24].copy_from_slice(&icmp_checksum);
    let ip_checksum = checksum::finish(checksum::sum(&head[..HEADER_BYTES_MIN]));
    head[10..12].copy_from_slice(&ip_checksum);
}

/// Who answers a request with this token, and how long the packet is; `None` of anything else.
pub fn read_reply(packet: &[u8], token: u64) -> Option<(Ipv4Addr, u16)> {
    let reply = Reply::read(packet)?;
    (reply.token == token).then_some((reply.source, reply.total_bytes))
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
}

impl Reply {
    /// Reads a packet; `None` if it is no reply, or one without a token.
    pub fn read(packet: &[u8]) -> Option<Self> {
        let header = Ipv4Header::parse(packet).ok()?;
        let icmp = packet.get(usize::from(header.header_bytes)..usize::from(header.total_bytes))?;
        let token = icmp.get(ICMP_HEADER_BYTES..)?.first_chunk()?;
        let is_reply = header.protocol == protocol::ICMP && icmp.first() == Some(&REPLY);
        is_reply.then(|| Self {
            source: header.source,
            total_bytes: header.total_bytes,
            token: u64::from_be_bytes(*token),
        })
    }
}

/// Whether a packet is an echo reply from `source`, by its first bytes.
#[inline]
pub fn is_reply_from(source: Ipv4Addr, packet: &[u8]) -> bool {
    let kind_at = packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
    packet.get(9) == Some(&protocol::ICMP)
        && packet.get(12..16) == Some(&source.octets())
        && packet.get(kind_at) == Some(&REPLY)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEAR: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
    const FAR: Ipv4Addr = Ipv4Addr::new(10, 5, 2, 0);

    /// What a kernel makes of a request (`icmp_echo`, net/ipv4/icmp.c).
    fn answer(request: &[u8]) -> Vec<u8> {
        let mut reply = request.to_vec();
        reply[12..16].copy_from_slice(&request[16..20]);
        reply[16..20].copy_from_slice(&request[12..16]);
        reply[HEADER_BYTES_MIN] = REPLY;
        reply
    }

    #[test]
    fn a_request_is_valid_and_its_reply_recognised() {
        for bytes in [ECHO_BYTES_MIN, 548, 1371, 1472, 65_507] {
            let mut request = vec![0xff; bytes];
            write_request(&mut request, NEAR, FAR, 0x0123_4567_89ab_cdef);
            let header = Ipv4Header::parse(&request).expect("every kernel takes it");
            assert_eq!((header.source, header.destination), (NEAR, FAR));
            let icmp = &request[HEADER_BYTES_MIN..];
            assert_eq!(checksum::finish(checksum::sum(icmp)), [0, 0], "{bytes} bytes");
            let reply = answer(&request);
            assert!(is_reply_from(FAR, &reply));
            assert!(!is_reply_from(NEAR, &reply) && !is_reply_from(NEAR, &request));
            let read = read_reply(&reply, 0x0123_4567_89ab_cdef);
            assert_eq!(read, Some((FAR, bytes as u16)));
            assert_eq!(read_reply(&reply, 1), None, "somebody else's reply");
            assert_eq!(read_reply(&request, 0x0123_4567_89ab_cdef), None, "a request");
            assert_eq!(read_reply(&reply[..bytes - 1], 0x0123_4567_89ab_cdef), None, "cut off");
        }
    }
}
