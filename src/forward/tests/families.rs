//! Packets of IPv6, both ways: verdicts, bytes, errors, and what offload makes of them.

use std::net::Ipv6Addr;

use super::egress::Walk as Egressed;
use super::ingress::Walk as Ingressed;
use super::*;
use crate::forward::{Leased, Senders};
use crate::offload::{
    CoalesceLimits, PartialChecksum, Segmentation, SegmentationKind, VNET_HEADER_BYTES, VnetHeader,
};
use crate::packet::ecn::Ecn;
use crate::packet::header::protocol::ICMPV6;
use crate::packet::ipv6_header::Ipv6Header;

pub(super) const POD6: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 1, 0, 0, 0, 2);
pub(super) const FAR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 2, 0, 0, 0, 2);
/// Of the node that leases an IPv6 subnet and takes no IPv6 packets.
const FARTHER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 3, 0, 0, 0, 2);
pub(super) const WHOLE: [u8; VNET_HEADER_BYTES] = [0; VNET_HEADER_BYTES];

fn world() -> World {
    let v6 = Leased {
        network: "fd00:5::/48".parse().unwrap(),
        subnet: "fd00:5:0:1::/64".parse().unwrap(),
    };
    let peer = Peer::new("10.5.2.0/24,fd00:5:0:2::/64".parse().unwrap(), PEER);
    let other = Peer::new("10.5.3.0/24".parse().unwrap(), OTHER);
    let table = Table::build(vec![Arc::new(peer), Arc::new(other)]);
    let leased = Families::of_v6(local().leased.v4(), v6);
    World { local: Local { leased, ..local() }, table, ..World::new() }
}

pub(super) fn egressed() -> Egressed {
    Egressed { world: world(), ..Egressed::plain() }
}

pub(super) fn ingressed() -> Ingressed {
    let limits = CoalesceLimits { tcp: true, udp_segments_max: 64 };
    Ingressed { world: world(), ..Ingressed::new(limits) }
}

pub(super) fn ipv6(
    next_header: u8,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    payload: &[u8],
) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, 0, next_header, 64];
    packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend(payload);
    packet
}

/// The packet with its transport checksum, at `at`, made right: word by word, as the RFC spells it.
pub(super) fn sealed(mut packet: Vec<u8>, at: usize) -> Vec<u8> {
    packet[at..at + 2].fill(0);
    let sum = !word_sum(&packet);
    packet[at..at + 2].copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
    packet
}

/// The sum of pseudo header and payload (RFC 8200, section 8.1).
fn word_sum(packet: &[u8]) -> u16 {
    let length_bytes = (packet.len() - 40) as u32;
    let pseudo = [&packet[8..40], &length_bytes.to_be_bytes(), &[0, 0, 0, packet[6]]].concat();
    let mut sum = 0u32;
    for pair in pseudo.chunks(2).chain(packet[40..].chunks(2)) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub(super) fn udp6(source: Ipv6Addr, destination: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
    let mut datagram = vec![0x0f, 0xa0, 0x13, 0x88];
    datagram.extend(((8 + payload.len()) as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    sealed(ipv6(protocol::UDP, source, destination, &datagram), 46)
}

fn tcp6(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    sequence: u32,
    flags: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut segment = vec![0x0f, 0xa0, 0x13, 0x88];
    segment.extend(sequence.to_be_bytes());
    segment.extend([0, 0, 0, 9, 0x50, flags, 2, 0, 0, 0, 0, 0]);
    segment.extend(payload);
    sealed(ipv6(protocol::TCP, source, destination, &segment), 56)
}

pub(super) fn hop6(packet: &[u8]) -> Vec<u8> {
    with6(packet, 7, &[packet[7] - 1])
}

pub(super) fn with6(packet: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    packet[at..at + bytes.len()].copy_from_slice(bytes);
    packet
}

/// A name, a packet, what it counts as, and type and code of the error that its sender gets.
type Case<'a> = (&'a str, Vec<u8>, DropReason, Option<(u8, u8)>);

/// With this before the packet's transport, an extension header of type `first`.
fn extended(packet: &[u8], first: u8, mut header: Vec<u8>) -> Vec<u8> {
    header[0] = packet[6];
    ipv6(first, address(packet, 8), address(packet, 24), &[&header[..], &packet[40..]].concat())
}

pub(super) fn address(packet: &[u8], at: usize) -> Ipv6Addr {
    let octets: [u8; 16] = packet[at..at + 16].try_into().unwrap();
    octets.into()
}

fn data(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 % 251) as u8).collect()
}

#[test]
fn a_packet_loses_one_hop_and_its_padding() {
    let mut walk = egressed();
    let packet = udp6(POD6, FAR6, b"hello");
    walk.read(WHOLE, &[&packet[..], &[0xdd; 18]].concat());
    // The other family goes on beside it.
    walk.read(WHOLE, &udp(POD, FAR, b"hello"));
    assert_eq!(walk.sent, [(PEER, hop6(&packet)), (PEER, hop(&udp(POD, FAR, b"hello")))]);
    assert!(walk.conserved());

    let mut walk = ingressed();
    let packet = udp6(FAR6, POD6, b"hello");
    walk.receive(PEER, 0, &[&packet[..], &[0xdd; 18]].concat());
    assert_eq!(walk.written, [hop6(&packet)]);
}

#[test]
fn without_an_ipv6_subnet_there_is_no_ipv6() {
    let mut walk = Egressed::plain();
    walk.read(WHOLE, &udp6(POD6, FAR6, b"hello"));
    assert_eq!(walk.world.drops(), [(DropReason::Ipv6, 1)]);
    assert!(walk.errors().is_empty());
}

#[test]
fn what_a_pod_may_not_send() {
    use DropReason as R;
    let packet = || udp6(POD6, FAR6, &[7; 32]);
    let from = |text: &str| with6(&packet(), 8, &text.parse::<Ipv6Addr>().unwrap().octets());
    let to = |text: &str| with6(&packet(), 24, &text.parse::<Ipv6Addr>().unwrap().octets());
    let cases: Vec<Case<'_>> = vec![
        ("beyond the leases", to("fd00:5:0:9::1"), R::NoRoute, Some((1, 0))),
        ("a node without IPv6", to(&FARTHER6.to_string()), R::NoRoute, Some((1, 0))),
        ("outside the overlay", to("2001:db8::1"), R::NoRoute, Some((1, 0))),
        ("our own subnet", to("fd00:5:0:1::9"), R::OwnSubnet, Some((1, 0))),
        ("hop limit 1", with6(&packet(), 7, &[1]), R::TtlExpired, Some((3, 0))),
        ("hop limit 0", with6(&packet(), 7, &[0]), R::TtlZero, None),
        ("a group of the site", to("ff05::1"), R::DestinationMulticast, None),
        ("loopback", to("::1"), R::DestinationMartian, None),
        ("IPv4 in disguise", to("::ffff:10.5.2.2"), R::DestinationMartian, None),
        ("from loopback", from("::1"), R::SourceMartian, None),
        ("from IPv4 in disguise", from("::ffff:10.5.1.2"), R::SourceMartian, None),
        ("from a group", from("ff0e::1"), R::SourceMartian, None),
        (
            "router solicitation",
            ipv6(
                58,
                "fe80::1".parse().unwrap(),
                "ff02::2".parse().unwrap(),
                &[133, 0, 0, 0, 0, 0, 0, 0],
            ),
            R::LinkLocal,
            None,
        ),
        ("from nobody yet", from("::"), R::LinkLocal, None),
        ("to a link-local address", to("fe80::7"), R::LinkLocal, None),
        ("no checksum", with6(&packet(), 46, &[0, 0]), R::BadChecksum, None),
        ("a length beyond it", with6(&packet(), 4, &[1, 0]), R::BadTotalLength, None),
        ("cut short", packet()[..39].to_vec(), R::Runt, None),
    ];
    for (name, packet, reason, told) in cases {
        let mut walk = egressed();
        walk.read(WHOLE, &packet);
        assert_eq!(walk.world.drops(), [(reason, 1)], "{name}");
        let errors = walk.errors();
        assert_eq!(errors.first().map(|error| (error[40], error[41])), told, "{name}");
        for error in errors {
            let header = Ipv6Header::parse(&error).unwrap();
            assert_eq!((header.protocol, header.destination), (ICMPV6, POD6), "{name}");
            assert_eq!(word_sum(&error), 0xffff, "{name}: the error's checksum");
            assert!(
                !walk.world.local.leased.v6().unwrap().subnet.contains(header.source),
                "{name}"
            );
        }
    }
}

#[test]
fn too_long_a_packet_is_answered_with_the_mtu() {
    let mut walk = egressed();
    walk.read(WHOLE, &udp6(POD6, FAR6, &[1; 1472 - 48]));
    walk.read(WHOLE, &udp6(POD6, FAR6, &[1; 1473 - 48]));
    assert_eq!(walk.sent.len(), 1);
    assert_eq!(walk.world.drops(), [(DropReason::DontFragmentMtu, 1)]);
    let errors = walk.errors();
    assert_eq!(errors[0][40..42], [2, 0]);
    assert_eq!(errors[0][44..48], [0, 0, 0x05, 0xc0]);
    assert_eq!(errors[0].len(), 1280);
}

#[test]
fn what_nobody_may_send_us() {
    use DropReason as R;
    let packet = || udp6(FAR6, POD6, &[7; 32]);
    let from = |text: &str| with6(&packet(), 8, &text.parse::<Ipv6Addr>().unwrap().octets());
    let to = |text: &str| with6(&packet(), 24, &text.parse::<Ipv6Addr>().unwrap().octets());
    let routing = extended(
        &packet(),
        43,
        vec![0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    let cases: Vec<(&str, SocketAddr, Vec<u8>, R)> = vec![
        ("our own subnet's", PEER, from("fd00:5:0:1::9"), R::SourceIsLocalSubnet),
        ("our TUN address", PEER, from("fd00:5:0:1::"), R::SourceMartian),
        ("another peer's", OTHER, packet(), R::SourceNotPeerLease),
        ("not for us", PEER, to("fd00:5:0:2::9"), R::DestinationNotLocal),
        ("for our link", PEER, to("fe80::1"), R::DestinationMartian),
        (
            "a router advertisement",
            PEER,
            ipv6(58, "fe80::1".parse().unwrap(), "ff02::1".parse().unwrap(), &[134, 0, 0, 0]),
            R::DestinationMulticast,
        ),
        ("from a link", PEER, from("fe80::1"), R::SourceMartian),
        // As this host's own addresses of its interfaces, of which the tunnel knows none.
        ("from outside the overlay", PEER, from("fd30::1"), R::SourceNotLeased),
        ("a subnet that nobody has", OTHER, udp6(FARTHER6, POD6, b"x"), R::SourceNotLeased),
        ("IPv4 of the wire's in disguise", PEER, from("::172.30.0.1"), R::SourceNotLeased),
        ("IPv4 in disguise", PEER, from("::ffff:10.5.2.2"), R::SourceMartian),
        ("no checksum", PEER, with6(&packet(), 46, &[0, 0]), R::BadChecksum),
        ("by way of others", PEER, routing, R::SourceRoute),
        ("hop limit 0", PEER, with6(&packet(), 7, &[0]), R::TtlZero),
    ];
    for (name, sender, packet, reason) in cases {
        let mut walk = ingressed();
        walk.receive(sender, 0, &packet);
        assert_eq!(walk.world.drops(), [(reason, 1)], "{name}");
        assert!(walk.errors().is_empty(), "{name}: a forged packet has us send something");
    }
    // Before any lease is known, as in a restart, nobody's is: unless strict they pass.
    let mut walk = ingressed();
    walk.world.table = Table::provisional();
    walk.receive(OTHER, 0, &udp6(FARTHER6, POD6, b"x"));
    assert_eq!(walk.written.len(), 1);
    walk.world.local.senders = Senders::Strict;
    walk.receive(OTHER, 0, &udp6(FARTHER6, POD6, b"x"));
    assert_eq!(walk.world.drops(), [(DropReason::SourceNotLeased, 1)]);
}

#[test]
fn an_owner_is_told_that_its_packet_expired() {
    let mut walk = ingressed();
    walk.receive(PEER, 0, &with6(&udp6(FAR6, POD6, b"x"), 7, &[1]));
    let errors = walk.errors();
    let (endpoint, error) = &errors[0];
    assert_eq!((*endpoint, error[40], address(error, 24)), (Some(PEER), 3, FAR6));
    assert_eq!(address(error, 8), walk.world.local.leased.v6().unwrap().tun_address());
}

#[test]
fn congestion_marks_reach_the_pod() {
    let capable = with6(&udp6(FAR6, POD6, b"x"), 1, &[0x20]);
    let mut walk = ingressed();
    walk.outer_ecn = Ecn::Ce;
    walk.receive(PEER, 0, &capable);
    assert_eq!(walk.written, [hop6(&with6(&capable, 1, &[0x30]))]);
    walk.receive(PEER, 0, &udp6(FAR6, POD6, b"x"));
    assert_eq!(walk.world.drops(), [(DropReason::CongestionMark, 1)]);
}

#[test]
fn a_partial_checksum_is_completed() {
    for (packet, offset) in
        [(udp6(POD6, FAR6, &data(33)), 6_u16), (tcp6(POD6, FAR6, 5, 0x10, &data(32)), 16)]
    {
        let at = 40 + usize::from(offset);
        let header = Ipv6Header::parse(&packet).unwrap();
        let partial = with6(&packet, at, &checksum::partial(header.pseudo_header_sum()));
        let checksum = Some(PartialChecksum { start: 40, offset });
        let mut walk = egressed();
        walk.read(VnetHeader { checksum, segmentation: None }.encode::<Ipv6Addr>(0), &partial);
        assert_eq!(walk.sent, [(PEER, hop6(&packet))]);
        // As a receiver on the sender's machine gets it.
        let mut walk = ingressed();
        let back = with6(&with6(&partial, 8, &FAR6.octets()), 24, &POD6.octets());
        walk.receive(PEER, 0, &back);
        assert_eq!(word_sum(&walk.written[0]), 0xffff);
    }
}

/// A super-packet leaves as the packets that it stands for, and they arrive as one again.
#[test]
fn super_packets_are_cut_and_merged() {
    use SegmentationKind::{Tcp, Udp};
    const SEGMENT_BYTES: usize = 1400;
    let all = data(10 * SEGMENT_BYTES + 77);
    // FIN, PSH and CWR stand on the first or on the last only.
    let tcp_whole = tcp6(POD6, FAR6, 1000, 0x98, &all);
    let tcp_parts: Vec<_> = (0..=10)
        .map(|at| {
            let part = &all[at * SEGMENT_BYTES..all.len().min((at + 1) * SEGMENT_BYTES)];
            let flags = if at == 0 {
                0x90
            } else if at == 10 {
                0x18
            } else {
                0x10
            };
            tcp6(POD6, FAR6, 1000 + (at * SEGMENT_BYTES) as u32, flags, part)
        })
        .collect();
    let udp_whole = udp6(POD6, FAR6, &all);
    let udp_parts: Vec<_> = all.chunks(SEGMENT_BYTES).map(|it| udp6(POD6, FAR6, it)).collect();
    for (kind, whole, parts, offset) in
        [(Tcp, tcp_whole, tcp_parts, 16_u16), (Udp, udp_whole, udp_parts, 6)]
    {
        let header = Ipv6Header::parse(&whole).unwrap();
        let partial = checksum::partial(header.pseudo_header_sum());
        let payload_bytes = (SEGMENT_BYTES as u16).try_into().unwrap();
        let offload = VnetHeader {
            checksum: Some(PartialChecksum { start: 40, offset }),
            segmentation: Some(Segmentation { kind, payload_bytes }),
        };
        let mut walk = egressed();
        let left = with6(&whole, 40 + usize::from(offset), &partial);
        walk.read(offload.encode::<Ipv6Addr>(60), &left);
        let expected: Vec<_> = parts.iter().map(|part| (PEER, hop6(part))).collect();
        assert!(walk.sent == expected, "{kind:?}: cut otherwise than the kernel would");
        assert_eq!(walk.rounds, 1);

        let turned = |packet: &Vec<u8>| {
            // The addresses change places, which leaves the sum as it is.
            with6(&with6(packet, 8, &FAR6.octets()), 24, &with6(packet, 0, &[])[8..24])
        };
        // CWR is not merged: what begins with it travels alone.
        let received: Vec<_> = parts.iter().skip(usize::from(kind == Tcp)).map(turned).collect();
        let back = |packet: &[u8]| with6(packet, 8, &FAR6.octets());
        assert_eq!(address(&back(&received[0]), 8), FAR6);
        let received: Vec<_> =
            received.iter().map(|packet| with6(packet, 24, &POD6.octets())).collect();
        let received: Vec<_> = received
            .iter()
            .map(|packet| sealed(packet.clone(), 40 + usize::from(offset)))
            .collect();
        let mut walk = ingressed();
        walk.receive_batch(PEER, &received);
        assert_eq!(walk.writes, 1, "{kind:?}: not merged");
        let expected: Vec<_> = received.iter().map(|packet| hop6(packet)).collect();
        assert!(walk.written == expected, "{kind:?}: a refused one is other packets");
    }
}

#[test]
fn the_offload_header_of_a_merged_packet() {
    let mut walk = ingressed();
    let parts = [tcp6(FAR6, POD6, 1, 0x10, &[1; 100]), tcp6(FAR6, POD6, 101, 0x18, &[2; 60])];
    let mut arena = parts.concat();
    let batch = crate::forward::GroBatch {
        span: crate::packet::Span::new(0, arena.len()),
        segment_bytes: 160,
        sender: PEER,
        source: PEER,
        ecn: Ecn::NotEct,
    };
    walk.ingress.process(&walk.world.context(), &mut arena, batch).unwrap();
    let plan = &mut walk.ingress.coalescer;
    plan.finish(&mut arena);
    assert_eq!(plan.items().len(), 1);
    // NEEDS_CSUM, TCPV6, headers of 60 bytes, segments of 100, from 40 on, at 16.
    assert_eq!(plan.items()[0].vnet_header, [1, 4, 60, 0, 100, 0, 40, 0, 16, 0]);
    let whole = tcp6(FAR6, POD6, 1, 0x18, &[&[1; 100][..], &[2; 60]].concat());
    let header = Ipv6Header::parse(&whole).unwrap();
    let expected = with6(&hop6(&whole), 56, &checksum::partial(header.pseudo_header_sum()));
    let spans = plan.spans(0).iter().flat_map(|span| &arena[span.range()]);
    assert_eq!(spans.copied().collect::<Vec<_>>(), expected);
}

#[test]
fn what_differs_stays_apart() {
    let part = |sequence: u32| tcp6(FAR6, POD6, sequence, 0x10, &[1; 100]);
    let flow_label = with6(&part(101), 3, &[1]);
    let traffic_class = with6(&part(101), 1, &[0x40]);
    let hop_limit = with6(&part(101), 7, &[63]);
    let options = |packet: Vec<u8>| extended(&packet, 60, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    // Its folded addresses are the same: two words have changed places.
    let [mut one, mut two] = [FAR6.octets(), FAR6.octets()];
    (one[8], one[12], two[8], two[12]) = (7, 9, 9, 7);
    let alike = |source: [u8; 16], sequence| tcp6(source.into(), POD6, sequence, 0x10, &[1; 100]);
    let cases = [
        ("the flow label", part(1), flow_label),
        ("the traffic class", part(1), traffic_class),
        ("the hop limit", part(1), hop_limit),
        ("the address", alike(one, 1), alike(two, 101)),
        ("extension headers", options(part(1)), options(part(101))),
    ];
    for (name, first, second) in cases {
        let mut walk = ingressed();
        walk.receive_batch(PEER, &[first.clone(), second.clone()]);
        assert_eq!((walk.writes, walk.world.drops()), (2, vec![]), "{name}");
        assert_eq!(walk.written, [hop6(&first), hop6(&second)], "{name}");
    }
    let mut walk = ingressed();
    walk.receive_batch(PEER, &[part(1), part(101)]);
    assert_eq!(walk.writes, 1, "the control merges");
}

#[test]
fn fragments_and_options_pass_whole() {
    let packet = udp6(POD6, FAR6, &data(80));
    let options = extended(&packet, 0, vec![0, 0, 5, 2, 0, 0, 0, 0]);
    let first = extended(&packet, 44, vec![0, 0, 0, 1, 0, 0, 0, 7]);
    let later = extended(&packet, 44, vec![0, 0, 5, 0xa9, 0, 0, 0, 7]);
    let mut walk = egressed();
    for packet in [&options, &first, &later] {
        walk.read(WHOLE, packet);
    }
    let expected = [&options, &first, &later].map(|packet| (PEER, hop6(packet)));
    assert_eq!(walk.sent, expected);
}

proptest::proptest! {
    /// Damaged packets of both families, both ways: each has an outcome, and what goes on is valid.
    #[test]
    fn every_packet_has_an_outcome(
        edits in proptest::collection::vec(
            (0..9_usize, 0..120_usize, proptest::num::u8::ANY, 0..160_usize),
            1..20,
        ),
    ) {
        let (mut out, mut into) = (egressed(), ingressed());
        let packets = |source, destination| [
            udp6(source, destination, &[1; 60]),
            tcp6(source, destination, 1, 0x10, &[1; 60]),
            extended(&udp6(source, destination, &[1; 40]), 0, vec![0; 8]),
            extended(&udp6(source, destination, &[1; 40]), 44, vec![0, 0, 0, 1, 0, 0, 0, 7]),
            extended(&udp6(source, destination, &[1; 40]), 43, vec![0, 0, 0, 1, 0, 0, 0, 7]),
            ipv6(58, source, destination, &[128, 0, 0, 0, 0, 0, 0, 0]),
            ipv6(59, source, destination, &[]),
            udp(POD, FAR, &[1; 60]),
            udp(FAR, POD, &[1; 60]),
        ];
        for (which, at, value, length) in edits {
            for (is_out, all) in [(true, packets(POD6, FAR6)), (false, packets(FAR6, POD6))] {
                let mut packet = all[which].clone();
                let at = at % packet.len();
                packet[at] = value;
                packet.truncate(length.max(1));
                if is_out { out.read(WHOLE, &packet) } else { into.receive(PEER, 0, &packet) }
            }
        }
        proptest::prop_assert!(out.conserved() && into.conserved());
        let sent = out.sent.iter().map(|(_, packet)| packet);
        for packet in sent.chain(&into.written).filter(|packet| packet[0] >> 4 == 6) {
            let header = Ipv6Header::parse(packet).unwrap();
            proptest::prop_assert_eq!(usize::from(header.total_bytes), packet.len());
        }
    }
}
