//! Every branch of the two verdicts and of the choice of an error's source, on literal values.

use super::*;
use crate::forward::decide::{self, Refusal};
use crate::forward::{Leased, Senders};
use crate::packet::ecn::Ecn;
use crate::packet::icmp::ErrorKind;
use crate::packet::ipv4::Ipv4Header;

/// To which endpoint, or why not and what the source is told.
type Egressed = Result<SocketAddr, (DropReason, Option<ErrorKind>)>;

fn egress_of(packet: &[u8], largest_bytes: usize) -> Egressed {
    let header = Ipv4Header::parse(packet).unwrap();
    let verdict = decide::egress(host(&local(), &table()), &header, packet, largest_bytes);
    let verdict = verdict.map(|endpoint| table().address(endpoint));
    verdict.map_err(|Refusal { reason, answer }| (reason, answer))
}

#[test]
fn egress_verdicts() {
    use DropReason as R;
    let packet = || udp(POD, FAR, &[7; 32]);
    let ttl = |ttl: u8| with(packet(), 8, &[ttl]);
    let source = |octets: [u8; 4]| with(packet(), 12, &octets);
    let destination = |octets: [u8; 4]| with(packet(), 16, &octets);
    let own_tunnel = udp_with((8285, 9), (OUR_ADDRESS, FAR), &[0; 8]);
    let silent = |reason| Err((reason, None));
    let expired = Err((R::TtlExpired, Some(ErrorKind::TimeExceeded)));
    let [unreachable, no_bridge] =
        [R::NoRoute, R::OwnSubnet].map(|reason| Err((reason, Some(ErrorKind::NetUnreachable))));
    let cases: Vec<(&str, Vec<u8>, Egressed)> = vec![
        ("plain", packet(), Ok(PEER)),
        ("first of the lease", destination([10, 5, 2, 0]), Ok(PEER)),
        ("last of the lease", destination([10, 5, 2, 255]), Ok(PEER)),
        ("other lease", destination([10, 5, 3, 1]), Ok(OTHER)),
        ("beyond the leases", destination([10, 5, 4, 0]), unreachable),
        ("outside the overlay", destination([8, 8, 8, 8]), unreachable),
        ("our own subnet", destination([10, 5, 1, 9]), no_bridge),
        ("time to live 255", ttl(255), Ok(PEER)),
        ("time to live 2", ttl(2), Ok(PEER)),
        ("time to live 1", ttl(1), expired),
        ("time to live 0", ttl(0), silent(R::TtlZero)),
        ("multicast", destination([224, 0, 0, 251]), silent(R::DestinationMulticast)),
        ("broadcast", destination([255; 4]), silent(R::DestinationMulticast)),
        ("destination in 0/8", destination([0, 1, 1, 1]), silent(R::DestinationMartian)),
        ("destination in 127/8", destination([127, 0, 0, 1]), silent(R::DestinationMartian)),
        ("destination in class E", destination([240, 0, 0, 1]), silent(R::DestinationMartian)),
        ("source in 0/8", source([0; 4]), silent(R::SourceMartian)),
        ("source in 127/8", source([127, 0, 0, 1]), silent(R::SourceMartian)),
        ("link-local source", source([169, 254, 0, 1]), silent(R::SourceMartian)),
        ("multicast source", source([239, 1, 1, 1]), silent(R::SourceMartian)),
        ("class E source", source([250, 1, 1, 1]), silent(R::SourceMartian)),
        ("our own tunnel packet", own_tunnel.clone(), silent(R::OwnLoop)),
        ("our address, another port", with(own_tunnel.clone(), 20, &[1, 1]), Ok(PEER)),
        ("our port, another address", with(own_tunnel.clone(), 12, &POD.octets()), Ok(PEER)),
        ("our port in TCP", with(own_tunnel.clone(), 9, &[6]), Ok(PEER)),
        ("a later fragment has no ports", with(own_tunnel, 6, &[0, 1]), Ok(PEER)),
        ("no room for ports", ipv4(17, OUR_ADDRESS, FAR, &[0x20, 0x5d]), Ok(PEER)),
    ];
    for (name, packet, expected) in cases {
        assert_eq!(egress_of(&packet, packet.len()), expected, "{name}");
    }
}

#[test]
fn egress_verdicts_by_size() {
    let fragmentable = with(udp(POD, FAR, &[7; 32]), 6, &[0, 0]);
    let whole = with(fragmentable.clone(), 6, &[0x40, 0]);
    let kind = ErrorKind::PacketTooBig { next_hop_mtu_bytes: 1472 };
    assert_eq!(egress_of(&whole, 1472), Ok(PEER));
    assert_eq!(egress_of(&whole, 1473), Err((DropReason::DontFragmentMtu, Some(kind))));
    assert_eq!(egress_of(&fragmentable, 1472), Ok(PEER));
    assert_eq!(egress_of(&fragmentable, 1473), Err((DropReason::Oversize, None)));
}

/// Delivered, or why not and to which endpoint an error goes.
type Ingressed = Result<(), (DropReason, Option<SocketAddr>)>;

fn ingress_of(table: &Table, sender: SocketAddr, packet: &[u8]) -> Ingressed {
    let header = Ipv4Header::parse(packet).unwrap();
    let verdict =
        decide::ingress(host(&local(), table), &sender, Ecn::NotEct, &header, packet, &mut None);
    let endpoint_of = |kind| {
        assert_eq!(kind, ErrorKind::TimeExceeded, "no answer to the network");
        table.address(table.endpoint(header.source).expect("the source is leased"))
    };
    let refused = |Refusal { reason, answer }| (reason, answer.map(endpoint_of));
    verdict.map(drop).map_err(refused)
}

#[test]
fn ingress_verdicts() {
    use DropReason as R;
    let packet = || udp(FAR, POD, &[7; 32]);
    let ttl = |ttl: u8| with(packet(), 8, &[ttl]);
    let source = |octets: [u8; 4]| with(packet(), 12, &octets);
    let destination = |octets: [u8; 4]| with(packet(), 16, &octets);
    let nested = |destination| udp_with((9, 8285), (FAR, destination), &[0; 8]);
    let optioned = |options: [u8; 4]| with_options(packet(), &options);
    let silent = |reason| Err((reason, None));
    let cases: Vec<(&str, Vec<u8>, Ingressed)> = vec![
        ("plain", packet(), Ok(())),
        ("unleased source", source(UNLEASED.octets()), Ok(())),
        ("source outside the overlay", source([8, 8, 8, 8]), Ok(())),
        ("to the TUN address", destination(TUN.octets()), Ok(())),
        ("to the subnet's last address", destination([10, 5, 1, 255]), Ok(())),
        ("multicast", destination([224, 0, 0, 1]), silent(R::DestinationMulticast)),
        ("broadcast", destination([255; 4]), silent(R::DestinationMulticast)),
        ("destination in 0/8", destination([0; 4]), silent(R::DestinationMartian)),
        ("destination in 127/8", destination([127, 1, 1, 1]), silent(R::DestinationMartian)),
        ("destination in class E", destination([240, 1, 1, 1]), silent(R::DestinationMartian)),
        ("source in 0/8", source([0, 0, 0, 1]), silent(R::SourceMartian)),
        ("source in 127/8", source([127, 0, 0, 1]), silent(R::SourceMartian)),
        ("link-local source", source([169, 254, 9, 9]), silent(R::SourceMartian)),
        ("multicast source", source([224, 0, 0, 9]), silent(R::SourceMartian)),
        ("class E source", source([255, 255, 255, 254]), silent(R::SourceMartian)),
        ("from our TUN address", source(TUN.octets()), silent(R::SourceMartian)),
        ("from our own address", source(OUR_ADDRESS.octets()), silent(R::SourceMartian)),
        ("from our own subnet", source([10, 5, 1, 9]), silent(R::SourceIsLocalSubnet)),
        ("from another peer's lease", source([10, 5, 3, 9]), silent(R::SourceNotPeerLease)),
        ("nested, to the TUN address", nested(TUN), silent(R::NestedTunnel)),
        ("nested, to our own address", nested(OUR_ADDRESS), silent(R::NestedTunnel)),
        ("the tunnel's port at a pod", nested(POD), Ok(())),
        ("a later fragment", with(nested(TUN), 6, &[0, 1]), Ok(())),
        ("to our own address", destination(OUR_ADDRESS.octets()), silent(R::DestinationNotLocal)),
        ("beside our subnet", destination([10, 5, 0, 255]), silent(R::DestinationNotLocal)),
        ("after our subnet", destination([10, 5, 2, 0]), silent(R::DestinationNotLocal)),
        ("outside the overlay", destination([8, 8, 8, 8]), silent(R::DestinationNotLocal)),
        ("metadata service", destination([169, 254, 169, 254]), silent(R::DestinationNotLocal)),
        ("loose source route", optioned([131, 3, 4, 0]), silent(R::SourceRoute)),
        ("strict source route", optioned([1, 137, 3, 4]), silent(R::SourceRoute)),
        ("router alert", optioned([148, 4, 0, 0]), Ok(())),
        ("time to live 2", ttl(2), Ok(())),
        ("time to live 1", ttl(1), Err((R::TtlExpired, Some(PEER)))),
        ("time to live 0", ttl(0), silent(R::TtlZero)),
        (
            "time to live 1, unleased source",
            with(ttl(1), 12, &UNLEASED.octets()),
            silent(R::TtlExpired),
        ),
    ];
    for (name, packet, expected) in cases {
        assert_eq!(ingress_of(&table(), PEER, &packet), expected, "{name}");
        if name != "plain" && packet[12..16] == FAR.octets() && expected.is_ok() {
            assert_eq!(ingress_of(&table(), STRANGER, &packet), Ok(()), "{name}, unproven");
        }
    }
    assert_eq!(ingress_of(&table(), US, &packet()), silent(R::OwnLoop));
}

/// The order of the checks: forged packets first, and then congestion before the time to live.
#[test]
fn a_mark_that_nobody_can_carry_drops() {
    let verdict = |outer_ecn: Ecn, packet: &[u8]| {
        let header = Ipv4Header::parse(packet).unwrap();
        decide::ingress(host(&local(), &table()), &PEER, outer_ecn, &header, packet, &mut None)
    };
    let reason = |outer_ecn: Ecn, packet: &[u8]| {
        verdict(outer_ecn, packet).err().filter(|it| it.answer.is_none()).map(|it| it.reason)
    };
    let packet = udp(FAR, POD, &[7; 32]);
    assert_eq!(reason(Ecn::Ce, &packet), Some(DropReason::CongestionMark));
    for expiring in [0, 1] {
        let expiring = with(packet.clone(), 8, &[expiring]);
        assert_eq!(reason(Ecn::Ce, &expiring), Some(DropReason::CongestionMark));
    }
    let forged = with(packet.clone(), 12, &FARTHER.octets());
    assert_eq!(reason(Ecn::Ce, &forged), Some(DropReason::SourceNotPeerLease));
    for outer_ecn in [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0] {
        assert_eq!(verdict(outer_ecn, &packet), Ok(Ecn::NotEct));
    }
}

/// A leased source from an address that is no peer's may be its owner behind a translator, until
/// the owner has been seen where its lease says.
#[test]
fn only_a_proven_owner_sends_from_its_lease() {
    let packet = udp(FAR, POD, &[7; 32]);
    let expired = with(packet.clone(), 8, &[1]);
    let spoof = Err((DropReason::SourceNotPeerLease, None));
    let table = table();
    assert_eq!(ingress_of(&table, STRANGER, &packet), Ok(()));
    assert_eq!(ingress_of(&table, STRANGER, &expired), Err((DropReason::TtlExpired, None)));
    assert_eq!(ingress_of(&table, OTHER, &packet), spoof, "another peer is never the owner");
    let from_another_port = SocketAddr::new(PEER.ip(), 40_000);
    assert_eq!(ingress_of(&table, from_another_port, &packet), Ok(()));
    assert_eq!(ingress_of(&table, STRANGER, &packet), spoof);
    assert_eq!(ingress_of(&table, PEER, &packet), Ok(()));
    let others = udp(FARTHER, POD, &[7; 32]);
    assert_eq!(ingress_of(&table, STRANGER, &others), Ok(()), "the proof is of one lease only");
}

#[test]
fn the_strict_check_wants_lease_address_and_port() {
    let strict = Local { senders: Senders::Strict, ..local() };
    let table = table();
    let verdict = |local: &Local, sender: &str, source: [u8; 4]| {
        let packet = with(udp(FAR, POD, &[7; 32]), 12, &source);
        let header = Ipv4Header::parse(&packet).unwrap();
        let sender = sender.parse().unwrap();
        decide::ingress(host(local, &table), &sender, Ecn::NotEct, &header, &packet, &mut None)
    };
    let reason = |sender: &str, source: [u8; 4]| {
        let refusal = verdict(&strict, sender, source).err();
        refusal.filter(|it| it.answer.is_none()).map(|it| it.reason.id())
    };
    let own = [10, 5, 2, 9];
    let stranger = "198.51.100.7:8285";
    let (peer, elsewhere) = (PEER.to_string(), format!("{}:40000", PEER.ip()));
    assert_eq!(reason(&peer, own), None, "an honest peer");
    assert_eq!(reason(&elsewhere, own), Some("outer-port"), "a masqueraded pod");
    assert_eq!(reason(stranger, own), Some("src-not-peer-lease"), "a peer behind translation");
    assert_eq!(reason(&peer, [10, 5, 99, 9]), Some("src-not-leased"));
    assert_eq!(reason(&peer, [8, 8, 8, 8]), Some("src-not-leased"));
    for (sender, source) in [(elsewhere.as_str(), own), (&peer, [10, 5, 99, 9])] {
        let loose = verdict(&local(), sender, source);
        assert!(loose.is_ok(), "the loose one lets it pass: {loose:?}");
    }
}

#[test]
fn an_errors_source_is_a_foreign_overlay_address() {
    let v4 = |local: &Local| local.leased.v4().unwrap();
    let source = |local: &Local, destination: &str| {
        let chosen = v4(local).error_source(destination.parse().unwrap());
        let own = [v4(local).tun_address().into(), local.underlay.ip()];
        assert!(!own.contains(&chosen.into()), "{destination}: {chosen} is ours");
        chosen.to_string()
    };
    let usual = local();
    assert_eq!(source(&usual, "10.5.2.77"), "10.5.2.0");
    assert_eq!(source(&usual, "10.5.99.1"), "10.5.99.0");
    assert_eq!(source(&usual, "10.5.1.9"), "10.5.0.0", "our own subnet: the overlay's first");
    assert_eq!(source(&usual, "8.8.8.8"), "10.5.0.0", "outside: the overlay's first");
    let leased = Leased { subnet: "10.5.0.0/24".parse().unwrap(), ..v4(&usual) };
    let first = Local { leased: Families::of_v4(leased, None), ..usual };
    assert_eq!(source(&first, "8.8.8.8"), "10.5.1.0", "ours is the first: the one after it");
    assert_eq!(source(&first, "10.5.0.9"), "10.5.1.0");
    assert_eq!(source(&first, "10.5.2.9"), "10.5.2.0");
}
