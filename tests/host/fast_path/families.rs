//! The programs against the rules of the workers, as `programs` has them for IPv4: the packets of
//! IPv6.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};

use weft::forward::{Host, decide};
use weft::packet::Family as _;
use weft::packet::ecn::Ecn;
use weft::packet::ipv4::Ipv4Header;
use weft::packet::ipv6_header::Ipv6Header;
use weft::packet::transport::lacks_checksum;

use super::programs::{Bench, IPV6, OUTER_BYTES, PEERS, PEERS_V6, PORT, UNDERLAY};
use crate::support::pace::by_effort;
use crate::support::packet::ipv4;

/// Numbers of headers that come before the transport's, and of transports.
const EXTENSIONS: [u8; 5] = [0, 43, 44, 51, 60];
const PROTOCOLS: [u8; 6] = [6, 17, 17, 58, 59, 132];

fn host(bench: &Bench) -> Host<'_, Ipv6Addr> {
    let leased = bench.local.leased.as_ref().v6().unwrap();
    Host { local: &bench.local, leased, table: &bench.table }
}

/// The number of the peer that has leased an address.
fn owner(bench: &Bench, address: Ipv6Addr) -> Option<usize> {
    let subnet = bench.table.lookup(address)?.subnets.v6();
    PEERS_V6.iter().position(|text| text.parse().ok() == subnet)
}

fn address(bench: &mut Bench) -> Ipv6Addr {
    let rng = &mut bench.rng;
    let pod = u16::from(rng.u8(..4));
    let overlay = |subnet| Ipv6Addr::new(0xfd00, 5, 0, subnet, 0, 0, 0, pod);
    match rng.u8(..16) {
        0..=3 => overlay(1),
        4..=6 => overlay(2),
        7..=9 => overlay(rng.u16(0x10..0x14)),
        10 => overlay(rng.u16(..)),
        11 => Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, pod),
        12 => Ipv6Addr::new(0, 0, 0, 0, 0, rng.choice([0, 0xffff]).unwrap(), 0, pod),
        13 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, pod),
        _ => Ipv6Addr::from_bits(rng.u128(..)),
    }
}

/// A whole packet, mostly between pods, at times damaged.
fn packet(bench: &mut Bench, from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let source = if bench.rng.u8(..4) == 0 { address(bench) } else { from };
    let destination = if bench.rng.u8(..4) == 0 { address(bench) } else { to };
    let rng = &mut bench.rng;
    let length = match rng.u8(..8) {
        0 => rng.usize(..12),
        1 => rng.usize(1420..1460),
        _ => rng.usize(8..200),
    };
    let mut rest = vec![0; length];
    rng.fill(&mut rest);
    let protocol = match rng.u8(..8) {
        0 => rng.u8(..),
        1 => rng.choice(EXTENSIONS).unwrap(),
        _ => rng.choice(PROTOCOLS).unwrap(),
    };
    if protocol == 17 && length >= 8 && rng.u8(..4) == 0 {
        rest[6..8].fill(0);
    }
    if EXTENSIONS.contains(&protocol) && length >= 8 {
        (rest[0], rest[1]) = (17, 0);
    }
    let mut packet = vec![0x60, rng.u8(..) & 0x3f, rng.u8(..), rng.u8(..)];
    packet.extend((length as u16).to_be_bytes());
    packet.extend([protocol, rng.choice([0, 1, 2, 3, 64, 64, 64, 255]).unwrap()]);
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend(rest);
    match rng.u8(..12) {
        0 => packet[rng.usize(..40)] ^= 1 << rng.u8(..8),
        // A test run takes no frame without a whole header.
        1 => packet.truncate(rng.usize(40..=packet.len())),
        2 => packet.extend(vec![0; rng.usize(..40)]),
        _ => {}
    }
    packet
}

/// Whether the programs know this form of header at all.
fn is_common(header: &Ipv6Header, packet: &[u8]) -> bool {
    // One that is cut short has no place for a checksum.
    let is_cut = header.protocol == 17 && packet.len() < 48;
    !EXTENSIONS.contains(&packet[6])
        && usize::from(header.total_bytes) == packet.len()
        && header.source.is_ordinary()
        && header.destination.is_ordinary()
        && !is_cut
}

fn after_hop(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    Ipv6Addr::decrement_ttl(&mut packet);
    packet
}

#[test]
fn sent_packets_of_ipv6_are_those_that_workers_send() {
    let seed = fastrand::u64(..);
    let mut bench = Bench::new(seed);
    let (mut taken_count, count) = (0, by_effort(100_000, 1_000_000));
    for _ in 0..count {
        let pod = Ipv6Addr::new(0xfd00, 5, 0, 1, 0, 0, 0, 9);
        let packet = packet(&mut bench, pod, Ipv6Addr::new(0xfd00, 5, 0, 2, 0, 0, 0, 9));
        let parsed = Ipv6Header::parse(&packet);
        let verdict = parsed.map(|header| {
            let whole = &packet[..usize::from(header.total_bytes)];
            let is_sent = !lacks_checksum(&header, whole);
            is_sent && decide::egress(host(&bench), &header, whole, whole.len()).is_ok()
        });
        let taken = bench.run_as(IPV6, &bench.out, &packet);
        let told = format!("seed {seed}: {verdict:?} {packet:02x?}");
        let (Ok(header), Ok(true)) = (parsed, verdict) else {
            assert_eq!(taken, None, "workers would not send it: {told}");
            continue;
        };
        let peer = owner(&bench, header.destination).unwrap();
        let (_, address, is_sent_to, _) = PEERS[peer];
        let subnet = bench.table.lookup(header.destination).unwrap().subnets.v6().unwrap();
        // The peer's programs leave these alone, and then the sender's must, too.
        let is_for_worker = header.ttl == 2 || subnet.network() == header.destination;
        let is_ordinary = is_common(&header, &packet) && is_sent_to && !is_for_worker;
        assert_eq!(taken.is_some(), is_ordinary, "ordinary, and no others: {told}");
        let Some(sent) = taken else { continue };
        taken_count += 1;
        let (outer, inner) = sent.split_at(OUTER_BYTES);
        assert_eq!(inner, after_hop(&packet), "workers would send other bytes: {told}");
        let outer_header = Ipv4Header::parse(&sent).unwrap();
        let ends = (outer_header.source, outer_header.destination);
        assert_eq!(ends, (UNDERLAY, Ipv4Addr::from(address)), "{told}");
        assert_eq!(outer_header.protocol, 17);
        assert!(outer_header.dont_fragment && outer_header.ttl == 64, "{told}");
        let port = PORT.to_be_bytes();
        let bytes = (packet.len() as u16 + 8).to_be_bytes();
        assert_eq!(outer[20..], [port, port, bytes, [0, 0]].concat(), "{told}");
    }
    assert!(taken_count > count / 20, "{taken_count} of {count}: the generator makes too few");
    let counts = bench.maps.counts().unwrap();
    let each = (0..PEERS.len()).map(|number| counts.of(number as u32).packets_sent);
    assert_eq!(each.sum::<u64>(), taken_count);
}

#[test]
fn received_packets_of_ipv6_are_those_that_workers_deliver() {
    let seed = fastrand::u64(..);
    let mut bench = Bench::new(seed);
    let (mut taken_count, count) = (0, by_effort(100_000, 1_000_000));
    for _ in 0..count {
        let sender = match bench.rng.u8(..8) {
            0 => Ipv4Addr::new(192, 0, 2, 9),
            1 => Ipv4Addr::from(bench.rng.choice(PEERS).unwrap().1),
            _ => Ipv4Addr::new(192, 0, 2, 2),
        };
        let far = Ipv6Addr::new(0xfd00, 5, 0, 2, 0, 0, 0, 9);
        let inner = packet(&mut bench, far, Ipv6Addr::new(0xfd00, 5, 0, 1, 0, 0, 0, 9));
        let mut payload = [PORT.to_be_bytes(), PORT.to_be_bytes()].concat();
        payload.extend((inner.len() as u16 + 8).to_be_bytes());
        payload.extend([0, 0]);
        payload.extend(&inner);
        let datagram = ipv4(sender, UNDERLAY, 17, &payload);
        let taken = bench.run_as([8, 0], &bench.inward, &datagram);
        let verdict = Ipv6Header::parse(&inner).ok().and_then(|header| {
            let whole = &inner[..usize::from(header.total_bytes)];
            let from = SocketAddrV4::new(sender, PORT);
            let verdict =
                decide::ingress(host(&bench), &from.into(), Ecn::NotEct, &header, whole, &mut None);
            verdict.ok().filter(|_| !lacks_checksum(&header, whole)).map(|_| header)
        });
        let told = format!("seed {seed}: {verdict:?} {datagram:02x?}");
        let Some(header) = verdict else {
            assert_eq!(taken, None, "workers would not deliver it: {told}");
            continue;
        };
        // Errors of a peer's TUN device, and what is for the own one, are the workers'.
        let subnet = bench.table.lookup(header.source).unwrap().subnets.v6().unwrap();
        let own = bench.local.leased.v6().unwrap().tun_address();
        let is_of_device = subnet.network() == header.source || own == header.destination;
        let (_, _, _, is_received_from) = PEERS[owner(&bench, header.source).unwrap()];
        let is_ordinary = is_common(&header, &inner) && is_received_from && !is_of_device;
        assert_eq!(taken.is_some(), is_ordinary, "ordinary, and no others: {told}");
        if let Some(delivered) = taken {
            taken_count += 1;
            assert_eq!(delivered, after_hop(&inner), "workers would deliver other bytes: {told}");
        }
    }
    assert!(taken_count > count / 20, "{taken_count} of {count}: the generator makes too few");
    let counts = bench.maps.counts().unwrap();
    let each = (0..PEERS.len()).map(|number| counts.of(number as u32).packets_received);
    assert_eq!(each.sum::<u64>(), taken_count);
}
