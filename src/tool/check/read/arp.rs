//! Who has an address on a link, by ARP (RFC 826). Asked as in RFC 5227, without an address of the
//! asker, so that nobody learns anything from it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use crate::host::state::MacAddress;
use crate::sys::link::broadcast;
use crate::tool::echo::receive_within;

const ETH_P_ARP: u16 = 0x0806;

/// All machines of a link answer in far less.
const ANSWER_MAX: Duration = Duration::from_millis(500);

const PACKET_BYTES: usize = 28;

/// Ethernet and IPv4 with the lengths of their addresses; then 1 asks, and 2 answers.
const KINDS: [u8; 7] = [0, 1, 8, 0, 6, 4, 0];

/// Who answers for each of these addresses on the link numbered `index`.
pub(super) fn who_has(
    asked: &[Ipv4Addr],
    index: u32,
    own: MacAddress,
) -> io::Result<BTreeMap<Ipv4Addr, BTreeSet<MacAddress>>> {
    let protocol = Protocol::from(i32::from(ETH_P_ARP.to_be()));
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(protocol))?;
    for address in asked {
        broadcast(socket.as_fd(), index, ETH_P_ARP, &question(own, *address))?;
    }
    let mut answers: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let end = Instant::now() + ANSWER_MAX;
    let mut packet = [0; PACKET_BYTES];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(answers);
        }
        receive_within(&socket, left)?;
        let Ok(PACKET_BYTES) = (&socket).read(&mut packet) else { continue };
        if let Some((address, mac)) = answer(&packet).filter(|(address, _)| asked.contains(address))
        {
            answers.entry(address).or_default().insert(mac);
        }
    }
}

fn question(own: MacAddress, address: Ipv4Addr) -> [u8; PACKET_BYTES] {
    let mut packet = [0; PACKET_BYTES];
    packet[..7].copy_from_slice(&KINDS);
    packet[7] = 1;
    packet[8..14].copy_from_slice(&own.0);
    packet[24..].copy_from_slice(&address.octets());
    packet
}

fn answer(packet: &[u8; PACKET_BYTES]) -> Option<(Ipv4Addr, MacAddress)> {
    let is_answer = packet[..7] == KINDS && packet[7] == 2;
    let address: [u8; 4] = packet[14..18].try_into().ok().filter(|_| is_answer)?;
    Some((address.into(), MacAddress::from_bytes(&packet[8..14])?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_count() {
        let (own, address) = (MacAddress([2, 0, 0, 0, 0, 7]), Ipv4Addr::new(192, 0, 2, 7));
        let mut packet = question(own, address);
        assert_eq!((packet[14..18].to_vec(), answer(&packet)), (vec![0; 4], None));
        packet[7] = 2;
        packet[14..18].copy_from_slice(&address.octets());
        assert_eq!(answer(&packet), Some((address, own)));
        packet[4] = 8;
        assert_eq!(answer(&packet), None, "no Ethernet");
    }
}
