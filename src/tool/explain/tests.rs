//! What is said of packets of each kind, by what weftd tells.

use rustix::io::Errno;

use super::*;
use crate::host::state::PathToHost;
use crate::status::{Backend, Handshakes, LeaseIpv6, Traffic, WireguardPeer};
use crate::tool::explain::kernel::tests::links;

fn status(kind: BackendKind) -> Status {
    Status {
        lease: Some(Lease {
            network: "10.5.0.0/16".parse().ok(),
            subnet: "10.5.1.0/24".parse().ok(),
            public_ip: Some([192, 0, 2, 1].into()),
            mtu_bytes: 1472,
            ipv6: None,
        }),
        backend: Some(Backend { kind: Some(kind), done: None }),
        ..Status::default()
    }
}

fn peer(number: u8, via: &str, state: PeerState) -> Peer {
    let subnet = format!("10.5.{number}.0/24").parse().unwrap();
    Peer::new(subnet, None, serde_json::from_value(via.into()).unwrap(), state)
}

fn answered(
    kind: BackendKind,
    words: (&str, &str),
    length_bytes: u16,
    dont_fragment: bool,
) -> (String, bool) {
    let status = status(kind);
    let peers = [
        Peer {
            path_mtu_bytes: Some(1372),
            fast_path: Some(Traffic { packets_sent: 7, ..Traffic::default() }),
            ..peer(2, "192.0.2.2:8285", PeerState::Ok)
        },
        peer(3, "192.0.2.3:8285", PeerState::Silent),
        peer(4, "192.0.2.4", PeerState::OtherBackend),
        peer(5, "192.0.2.5:8285", PeerState::Lossy),
    ];
    let (source, destination) = (words.0.parse().unwrap(), words.1.parse().unwrap());
    let question = Question { source, destination, length_bytes, dont_fragment };
    let answer = run(question, &status, &peers, false).unwrap();
    (render(&answer, Style::PLAIN), answer.goes)
}

#[test]
fn each_way_and_each_end_is_told() {
    const POD: &str = "10.5.1.9";
    for (words, length_bytes, dont_fragment, expected, expected_goes) in [
        ((POD, "10.5.2.7"), 84, true, "192.0.2.2:8285", true),
        ((POD, "10.5.2.7"), 1400, true, "1372", false),
        ((POD, "10.5.2.7"), 1400, false, "1372", true),
        ((POD, "10.5.3.7"), 84, true, "SILENT", false),
        ((POD, "10.5.5.7"), 84, true, "LOSSY", true),
        ((POD, "10.5.4.7"), 84, true, "other-backend", false),
        ((POD, "10.5.99.7"), 84, true, "no-route", false),
        ((POD, "10.5.1.7"), 84, true, "bridge", true),
        ((POD, "8.8.8.8"), 84, true, "outside 10.5.0.0/16", true),
        (("10.5.2.7", POD), 84, true, "delivered", true),
        (("10.5.99.7", POD), 84, true, "src-not-leased", true),
        (("10.5.2.7", "10.5.3.7"), 84, true, "sender", false),
        (("127.0.0.1", POD), 84, true, "src-martian", false),
        (("10.5.2.7", "10.5.1.0"), 84, true, "delivered", true),
    ] {
        let (text, goes) = answered(BackendKind::Udp, words, length_bytes, dont_fragment);
        assert!(text.contains(expected), "{words:?} {length_bytes}: {text}");
        assert_eq!(goes, expected_goes, "{words:?} {length_bytes}: {text}");
        assert!(text.contains("not considered: firewalls"), "{text}");
    }
    let (text, goes) = answered(BackendKind::Vxlan, (POD, "10.5.2.7"), 84, true);
    assert!(text.contains("vxlan") && goes, "{text}");
    for (words, expected) in [
        ((POD, "10.5.2.7"), false),
        (("10.5.2.7", POD), false),
        ((POD, "10.5.1.7"), true),
        ((POD, "8.8.8.8"), true),
    ] {
        let (text, goes) = answered(BackendKind::Alloc, words, 84, true);
        assert_eq!(goes, expected, "weftd has no part in it: {text}");
    }
}

#[test]
fn what_is_known_of_the_peer_check_is_used() {
    let peers = [peer(2, "192.0.2.2:8285", PeerState::Ok)];
    let told = |peer_check: Option<&str>, source: &str, destination: &str| {
        let peer_check = peer_check.map(str::to_owned);
        let status = Status { peer_check, ..status(BackendKind::Udp) };
        let [source, destination] = [source, destination].map(|end| end.parse().unwrap());
        let question = Question { source, destination, length_bytes: 84, dont_fragment: true };
        let answer = run(question, &status, &peers, false).unwrap();
        (render(&answer, Style::PLAIN), answer.goes)
    };
    let (foreign, pod, far) = ("10.5.99.7", "10.5.1.9", "10.5.2.7");
    for (check, goes) in [("loose", true), ("strict", false)] {
        let (text, does) = told(Some(check), foreign, pod);
        assert!(text.contains(&format!("--peer-check={check}\n")) && does == goes, "{text}");
        assert!(told(Some(check), far, pod).1, "a leased source passes either");
        // What the peer has is another matter.
        let (text, _) = told(Some(check), "192.0.2.1", far);
        let has = |words: &str| text.contains(words);
        assert!(has("src-not-leased") && has("not known") && has(check), "{text}");
    }
    let (text, goes) = told(None, foreign, pod);
    assert!(text.contains("unless") && goes, "an older weftd does not say: {text}");
    let (text, _) = told(None, "192.0.2.1", "10.5.77.7");
    assert!(!text.contains("src-not-leased"), "nobody gets it: {text}");
}

#[test]
fn packets_of_ipv6_are_told_by_their_own_rules() {
    const POD: &str = "fd00:5:0:1::9";
    let with_v6 = |kind| {
        let mut status = status(kind);
        let (network, subnet) = ("fd00:5::/48", "fd00:5:0:1::/64");
        let [network, subnet] = [network, subnet].map(|text| text.parse().unwrap());
        status.lease.as_mut().unwrap().ipv6 = Some(LeaseIpv6 { network, subnet, public_ip: None });
        status
    };
    let peer = |number: u8, ipv6_via: Option<&str>| Peer {
        ipv6_subnet: format!("fd00:5:0:{number}::/64").parse().ok(),
        ipv6_via: ipv6_via.map(|via| serde_json::from_value(via.into()).unwrap()),
        path_mtu_bytes: Some(1372),
        ..peer(number, &format!("192.0.2.{number}:8285"), PeerState::Ok)
    };
    let told = |kind, peers: &[Peer], words: (&str, &str), length_bytes| {
        let (source, destination) = (words.0.parse().unwrap(), words.1.parse().unwrap());
        let question = Question { source, destination, length_bytes, dont_fragment: false };
        let answer = run(question, &with_v6(kind), peers, false).unwrap();
        (render(&answer, Style::PLAIN), answer.goes)
    };
    let peers = [peer(2, Some("192.0.2.2:8285")), peer(3, None)];
    for (words, length_bytes, expected, expected_goes) in [
        ((POD, "fd00:5:0:2::7"), 84, "192.0.2.2:8285", true),
        // Nobody but its sender may fragment it.
        ((POD, "fd00:5:0:2::7"), 1400, "1372", false),
        // A node that takes none.
        ((POD, "fd00:5:0:3::7"), 84, "family", false),
        ((POD, "fd00:5:0:63::7"), 84, "no-route", false),
        ((POD, "fd00:5:0:1::7"), 84, "bridge", true),
        ((POD, "2001:db8::1"), 84, "outside fd00:5::/48", true),
        // Of one link, of one host, and of many.
        ((POD, "fe80::1"), 84, "fe80::1 stands", false),
        ((POD, "::1"), 84, "::1 stands", false),
        ((POD, "ff02::1"), 84, "ff02::1 stands", false),
        (("fd00:5:0:2::7", POD), 84, "delivered", true),
        (("::1", POD), 84, "src-martian", false),
        // Of IPv6 a source must be leased, here and there.
        (("fd00:5:0:63::7", POD), 84, "src-not-leased", false),
        (("fd99::1", "fd00:5:0:2::7"), 84, "src-not-leased\n", false),
    ] {
        let (text, goes) = told(BackendKind::Udp, &peers, words, length_bytes);
        assert!(text.contains(expected), "{words:?} {length_bytes}: {text}");
        assert_eq!(goes, expected_goes, "{words:?} {length_bytes}: {text}");
    }
    let vxlan = [peer(2, Some("fd99::2"))];
    let (text, goes) = told(BackendKind::Vxlan, &vxlan, (POD, "fd00:5:0:2::7"), 84);
    assert!(text.contains("of fd99::2") && goes, "{text}");
    let (text, goes) = told(BackendKind::Vxlan, &vxlan, ("fe80::1", POD), 84);
    assert!(text.contains("fe80::1 stands") && !goes, "{text}");
    let mixed = Question {
        source: POD.parse().unwrap(),
        destination: "10.5.2.7".parse().unwrap(),
        length_bytes: 84,
        dont_fragment: false,
    };
    assert!(run(mixed, &with_v6(BackendKind::Udp), &peers, false).is_err());
    let v6 = Question { destination: POD.parse().unwrap(), ..mixed };
    let without = run(v6, &status(BackendKind::Udp), &peers, false);
    assert!(without.is_err(), "the network has no such addresses");
}

/// It is asked as if they came by the pods' interface and by the peer's.
#[test]
fn pods_ways_are_asked_there_and_back() {
    let status = Status { interface: Some("eth0".to_owned()), ..status(BackendKind::HostGw) };
    let peers = [peer(2, "192.0.2.2", PeerState::Ok)];
    let by = |interface_index: u32, gateway: Option<[u8; 4]>| {
        let gateway = gateway.map(Into::into);
        Ok(PathToHost { interface_index, preferred_source: None, gateway, is_plain: true })
    };
    let ways = |refused_outward: Option<bool>| {
        asked_ways(Ipv4Addr::new(10, 5, 2, 7), &status, &peers, |asked| {
            let across = match (refused_outward == Some(asked.is_outward), asked.is_outward) {
                (true, _) => Err(Errno::ACCESS.into()),
                (false, true) => by(1, Some([192, 0, 2, 2])),
                (false, false) => by(2, None),
            };
            let (near, comes_by, across) = (by(2, None), None, Some(across));
            Ok(Answers {
                links: links(),
                near,
                comes_by,
                forwards_nothing: false,
                across,
                marked: vec![],
                outer: None,
            })
        })
    };
    assert_eq!(ways(None), PodsWays::Pass { unless: None });
    assert!(matches!(ways(Some(true)), PodsWays::EndsThere(_)));
    let PodsWays::EndsBack(why) = ways(Some(false)) else { panic!("it does not end") };
    assert!(why.contains("prohibit") && why.contains("iif eth0"), "{why}");
    let unasked = asked_ways(Ipv4Addr::new(10, 5, 2, 7), &status, &peers, |_| anyhow::bail!("no"));
    assert_eq!(unasked, PodsWays::Unknown);
    // A bridge without an address.
    let gone = asked_ways(Ipv4Addr::new(10, 5, 2, 7), &status, &peers, |_| {
        let near = Err(Errno::NETUNREACH.into());
        let links = links();
        Ok(Answers {
            links,
            near,
            comes_by: None,
            forwards_nothing: false,
            across: None,
            marked: vec![],
            outer: None,
        })
    });
    assert!(matches!(gone, PodsWays::NoPods(_)));
}

/// Whether the kernel has WireGuard or weftd, a packet passes with keys and an allowed source only.
#[test]
fn wireguard_carries_what_leases_allow_and_keys_seal() {
    const POD: &str = "10.5.1.9";
    let known = |number, last_handshake_unix| {
        let wireguard = WireguardPeer::sample(last_handshake_unix);
        Peer { wireguard: Some(wireguard), ..peer(number, "192.0.2.2", PeerState::Idle) }
    };
    let peers = [known(2, Some(1_800_000_000)), known(3, None)];
    for (handshakes, carrier) in [(None, "the kernel's"), (Some(Handshakes::default()), "worker")] {
        let status = Status { handshakes, ..status(BackendKind::Wireguard) };
        for (words, expected, expected_goes) in [
            ((POD, "10.5.2.7"), "198.51.100.7:4242", true),
            ((POD, "10.5.2.7"), carrier, true),
            ((POD, "10.5.3.7"), "no keys", false),
            (("10.5.2.7", POD), "deliver", true),
            // What no lease has is taken of nobody, whatever network it is of.
            (("10.5.99.7", POD), "drop", false),
            (("8.8.8.8", POD), "drop", false),
        ] {
            let [source, destination] = [words.0, words.1].map(|end| end.parse().unwrap());
            let question = Question { source, destination, length_bytes: 84, dont_fragment: true };
            let answer = run(question, &status, &peers, false).unwrap();
            let text = render(&answer, Style::PLAIN);
            assert!(text.contains(expected), "{words:?}: {text}");
            assert_eq!(answer.goes, expected_goes, "{words:?}: {text}");
        }
    }
}
