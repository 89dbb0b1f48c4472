//! Hosts and pods that have IPv6 alone: packets of IPv6 in datagrams over IPv6, both ways.

use std::net::Ipv6Addr;

use super::families::{
    FAR6, POD6, WHOLE, address, egressed, hop6, ingressed, ipv6, sealed, udp6, with6,
};
use super::*;

/// Outer addresses: ours, the peer's, and nobody's.
const US6: SocketAddr = outer(1);
const PEER6: SocketAddr = outer(2);
const STRANGER6: SocketAddr = outer(99);

const fn outer(last: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, last)), 8285)
}

/// The world without its IPv4.
fn alone(mut world: World) -> World {
    let leased = Families::of_v6(None, world.local.leased.v6().unwrap());
    world.local = Local { leased, underlay: US6, ..world.local };
    let peer = Peer::new("fd00:5:0:2::/64".parse().unwrap(), PEER6);
    world.table = Table::build(vec![Arc::new(peer)]);
    world
}

#[test]
fn packets_go_to_peers_over_ipv6() {
    let mut walk = egressed();
    walk.world = alone(walk.world);
    let packet = udp6(POD6, FAR6, b"hello");
    walk.read(WHOLE, &packet);
    assert_eq!(walk.sent, [(PEER6, hop6(&packet))]);
    assert!(walk.conserved());

    let mut walk = ingressed();
    walk.world = alone(walk.world);
    let packet = udp6(FAR6, POD6, b"hello");
    walk.receive(PEER6, 0, &packet);
    assert_eq!(walk.written, [hop6(&packet)]);
    assert!(walk.conserved());
}

#[test]
fn ipv4_is_refused_under_its_own_reason() {
    let mut walk = egressed();
    walk.world = alone(walk.world);
    walk.read(WHOLE, &udp(POD, FAR, b"x"));
    assert_eq!(walk.world.drops(), [(DropReason::Ipv4, 1)]);
    assert!(walk.errors().is_empty() && walk.sent.is_empty());

    let mut walk = ingressed();
    walk.world = alone(walk.world);
    walk.receive(PEER6, 0, &udp(FAR, POD, b"x"));
    assert_eq!(walk.world.drops(), [(DropReason::Ipv4, 1)]);
    assert!(walk.written.is_empty());
}

/// A pod, or a host of the underlay, may write any source into its packets.
#[test]
fn forged_senders_are_refused_over_ipv6() {
    use DropReason as R;
    let from = |source: IpAddr| {
        let IpAddr::V6(source) = source else { unreachable!() };
        udp6(source, POD6, b"x")
    };
    let honest = || udp6(FAR6, POD6, b"x");
    let nested = |to| {
        let mut packet = udp6(FAR6, to, b"x");
        packet[42..44].copy_from_slice(&8285_u16.to_be_bytes());
        packet
    };
    let IpAddr::V6(our_end) = US6.ip() else { unreachable!() };
    let tun = "fd00:5:0:1::".parse().unwrap();
    let cases = [
        ("by ourselves", US6, honest(), R::OwnLoop),
        ("from our end", PEER6, from(US6.ip()), R::SourceMartian),
        ("from a peer's end", PEER6, from(PEER6.ip()), R::SourceNotLeased),
        ("to our end", PEER6, udp6(FAR6, our_end, b"x"), R::DestinationNotLocal),
        ("to our end's port", PEER6, nested(our_end), R::NestedTunnel),
        ("to the tunnel's port on the device", PEER6, nested(tun), R::NestedTunnel),
        (
            "a lease that nobody has",
            PEER6,
            udp6("fd00:5:0:3::2".parse().unwrap(), POD6, b"x"),
            R::SourceNotLeased,
        ),
    ];
    for (name, sender, packet, reason) in cases {
        let mut walk = ingressed();
        walk.world = alone(walk.world);
        walk.receive(sender, 0, &packet);
        assert_eq!(walk.world.drops(), [(reason, 1)], "{name}");
        assert!(walk.errors().is_empty(), "{name}: a forged packet has us send something");
    }
    // Behind a translator somebody may be the peer until that one was seen.
    let mut walk = ingressed();
    walk.world = alone(walk.world);
    for (sender, written) in [(STRANGER6, 1), (PEER6, 2), (STRANGER6, 2)] {
        walk.receive(sender, 0, &honest());
        assert_eq!(walk.written.len(), written, "from {sender}");
    }
    assert_eq!(walk.world.drops(), [(R::SourceNotPeerLease, 1)]);
}

#[test]
fn a_tunnel_in_the_tunnel_is_refused() {
    let IpAddr::V6(our_end) = US6.ip() else { unreachable!() };
    let mut packet = udp6(our_end, FAR6, b"x");
    packet[40..44].copy_from_slice(&[0x20, 0x5d, 0x20, 0x5d]);
    let mut walk = egressed();
    walk.world = alone(walk.world);
    walk.read(WHOLE, &packet);
    assert_eq!(walk.world.drops(), [(DropReason::OwnLoop, 1)]);
}

#[test]
fn an_owner_is_told_over_ipv6_that_its_packet_expired() {
    let mut walk = ingressed();
    walk.world = alone(walk.world);
    walk.receive(PEER6, 0, &with6(&udp6(FAR6, POD6, b"x"), 7, &[1]));
    let errors = walk.errors();
    let (endpoint, error) = &errors[0];
    assert_eq!((*endpoint, error[40], address(error, 24)), (Some(PEER6), 3, FAR6));
    walk.receive(STRANGER6, 0, &with6(&udp6(FAR6, POD6, b"x"), 7, &[1]));
    assert!(walk.errors().is_empty(), "a forged packet has us send something");
}

/// Of IPv6 no sender can be told that less than 1,280 bytes go whole.
#[test]
fn tcp_is_held_to_what_goes_whole() {
    let open = |source, destination| {
        let mut segment = vec![0x0f, 0xa0, 0x13, 0x88, 0, 0, 0, 1, 0, 0, 0, 0, 0x60, 2];
        segment.extend([2, 0, 0, 0, 0, 0, 2, 4, 4, 0xc4]);
        sealed(ipv6(protocol::TCP, source, destination, &segment), 56)
    };
    let size = |packet: &[u8]| u16::from_be_bytes([packet[62], packet[63]]);
    for (whole_bytes, expected) in [(1232, 1172), (1280, 1220), (1452, 1220)] {
        let mut walk = egressed();
        walk.world = alone(walk.world);
        walk.world.local = Local { mtu_bytes: 1280, whole_bytes, ..walk.world.local };
        walk.read(WHOLE, &open(POD6, FAR6));
        let (_, sent) = &walk.sent[0];
        assert_eq!(size(sent), expected, "a pod is sent segments that go in fragments");
        assert_eq!(sealed(sent.clone(), 56), *sent, "its receiver drops it");

        let mut walk = ingressed();
        walk.world = alone(walk.world);
        walk.world.local = Local { mtu_bytes: 1280, whole_bytes, ..walk.world.local };
        walk.receive(PEER6, 0, &open(FAR6, POD6));
        let delivered = &walk.written[0];
        assert_eq!(size(delivered), expected, "a pod sends segments that go in fragments");
        assert_eq!(sealed(delivered.clone(), 56), *delivered, "the pod drops it");
    }
}
