//! The packets that no legitimate peer sends, each with the reason under which it must be dropped,
//! and the honest ones that travel between them.

use std::net::Ipv4Addr;

use crate::support::cluster::host_address;
use crate::support::packet::{seal, udp};

/// In every forged packet and in no other, so that its traces can be found anywhere.
pub(crate) const MARKER: &[u8; 12] = b"weft-forged!";

pub(crate) const TUNNEL_PORT: u16 = 8285;
pub(crate) const VICTIM_POD: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 2);
pub(crate) const VICTIM_TUN: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
pub(crate) const PEER_POD: Ipv4Addr = Ipv4Addr::new(10, 5, 2, 2);
/// In a lease whose owner is silent.
pub(crate) const OTHER_POD: Ipv4Addr = Ipv4Addr::new(10, 5, 3, 3);
/// In the network, leased to nobody.
pub(crate) const UNLEASED: Ipv4Addr = Ipv4Addr::new(10, 5, 77, 7);
pub(crate) const LAN_HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 2);

pub(crate) const HONEST_PORT: u16 = 7000;

/// A packet from the peer's pod to the victim's pod.
pub(crate) fn honest(number: usize) -> Vec<u8> {
    let payload = (number as u64).to_be_bytes();
    udp((PEER_POD, 9), (VICTIM_POD, HONEST_PORT), &[payload, *b"honestly"].concat())
}

/// A forged UDP packet, as long as an honest one and the marker allow.
pub(crate) fn forged(source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
    udp((source, 9), (destination, HONEST_PORT), &[&MARKER[..], &[0; 4]].concat())
}

/// An otherwise good packet with one edit.
pub(crate) fn edited(source: Ipv4Addr, edit: impl FnOnce(&mut Vec<u8>), sealed: bool) -> Vec<u8> {
    let mut packet = forged(source, VICTIM_POD);
    edit(&mut packet);
    if sealed {
        seal(&mut packet);
    }
    packet
}

/// The reason under which a packet must be dropped, and the packet.
pub(crate) type Class = (&'static str, Vec<u8>);

/// Wrong wherever it comes from: the reason and the packet.
pub(crate) fn wrong_from_anybody(honest_source: Ipv4Addr) -> Vec<Class> {
    let mut classes = Vec::new();
    let destinations = [
        ("dst-not-local", "10.5.3.9"),
        ("dst-not-local", "10.5.2.2"),
        ("dst-not-local", "10.5.77.1"),
        ("dst-not-local", "8.8.8.8"),
        ("dst-not-local", "192.168.7.1"),
        ("dst-not-local", "192.168.7.2"),
        ("dst-not-local", "172.20.0.1"),
        ("dst-not-local", "172.20.0.3"),
        ("dst-not-local", "169.254.169.254"),
        ("dst-martian", "0.0.0.0"),
        ("dst-martian", "0.0.0.1"),
        ("dst-martian", "127.0.0.1"),
        ("dst-martian", "240.0.0.1"),
        ("dst-multicast", "224.0.0.5"),
        ("dst-multicast", "239.255.255.250"),
        ("dst-multicast", "255.255.255.255"),
    ];
    for (reason, destination) in destinations {
        classes.push((reason, forged(honest_source, address(destination))));
    }
    let sources = [
        ("src-is-local-subnet", "10.5.1.7"),
        ("src-is-local-subnet", "10.5.1.1"),
        ("src-is-local-subnet", "10.5.1.2"),
        ("src-is-local-subnet", "10.5.1.255"),
        ("src-martian", "10.5.1.0"),
        ("src-martian", "172.20.0.1"),
        ("src-martian", "0.0.0.0"),
        ("src-martian", "0.255.255.255"),
        ("src-martian", "127.0.0.1"),
        ("src-martian", "127.255.255.255"),
        ("src-martian", "169.254.0.1"),
        ("src-martian", "169.254.169.254"),
        ("src-martian", "224.0.0.1"),
        ("src-martian", "239.255.255.255"),
        ("src-martian", "240.0.0.1"),
        ("src-martian", "255.255.255.255"),
    ];
    for (reason, source) in sources {
        classes.push((reason, forged(address(source), VICTIM_POD)));
    }
    for inside in [VICTIM_TUN, host_address(0)] {
        let depths = [MARKER.to_vec(), forged(honest_source, VICTIM_POD)];
        for payload in depths {
            let packet = udp((honest_source, TUNNEL_PORT), (inside, TUNNEL_PORT), &payload);
            classes.push(("nested-tunnel", packet));
        }
    }
    classes.extend(malformed(honest_source));
    classes
}

fn malformed(source: Ipv4Addr) -> Vec<Class> {
    let edited = |edit: fn(&mut Vec<u8>), sealed| edited(source, edit, sealed);
    vec![
        ("runt", Vec::new()),
        ("runt", vec![0x45]),
        ("runt", MARKER.to_vec().into_iter().map(|byte| byte & 0x0f | 0x40).collect()),
        ("runt", edited(|packet| packet.truncate(19), false)),
        ("ipv6", edited(|packet| packet[0] = 0x65, false)),
        ("bad-version", edited(|packet| packet[0] = 0x55, true)),
        ("bad-version", edited(|packet| packet[0] = 0x05, true)),
        ("bad-ihl", edited(|packet| packet[0] = 0x44, true)),
        ("bad-ihl", edited(|packet| packet[0] = 0x40, false)),
        ("bad-ihl", edited(|packet| packet[0] = 0x4f, false)),
        ("bad-totlen", edited(|packet| packet[2..4].copy_from_slice(&[0, 45]), true)),
        ("bad-totlen", edited(|packet| packet[2..4].fill(0xff), true)),
        ("bad-totlen", edited(|packet| packet[2..4].copy_from_slice(&[0, 19]), true)),
        ("bad-totlen", edited(|packet| packet[2..4].fill(0), true)),
        ("bad-totlen", edited(|packet| packet.truncate(43), false)),
        ("bad-checksum", edited(|packet| packet[10] ^= 1, false)),
        ("bad-checksum", edited(|packet| packet[8] -= 1, false)),
        ("bad-checksum", edited(|packet| packet[10..12].fill(0), false)),
        ("ttl-zero", edited(|packet| packet[8] = 0, true)),
        ("source-route", optioned(source, [131, 7, 4, 10, 5, 3, 9, 0])),
        ("source-route", optioned(source, [1, 137, 7, 4, 8, 8, 8, 8])),
    ]
}

/// An otherwise good packet with IPv4 options.
fn optioned(source: Ipv4Addr, options: [u8; 8]) -> Vec<u8> {
    edited(
        source,
        |packet| {
            packet.splice(20..20, options);
            packet[0] += 2;
            packet[3] += 8;
        },
        true,
    )
}

pub(crate) fn address(text: &str) -> Ipv4Addr {
    text.parse().expect("the tests' addresses are right")
}
