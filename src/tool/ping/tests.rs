//! What follows from the answers of each leg, and how it is shown.

use super::*;
use crate::status::{Lately, Via};

fn echoes(leg: Leg, answered: usize) -> Echoes {
    Echoes { sent: 10, answered, ..Echoes::new(leg, Ipv4Addr::LOCALHOST.into(), 84) }
}

/// What was found of a peer in this state; how many answers each leg got, the pod none was
/// asked if it is absent, and what the tunnel's end was refused with.
fn found(
    answers: [usize; 3],
    pod: Option<usize>,
    state: PeerState,
    refused: Option<&str>,
) -> Shows {
    let legs = [Leg::Host, Leg::Tunnel, Leg::TunnelFull].into_iter().zip(answers);
    let legs = legs.chain(pod.map(|answers| (Leg::Pod, answers)));
    let mut legs: Vec<_> = legs.map(|(leg, answered)| echoes(leg, answered)).collect();
    legs[1].refused = refused.map(str::to_owned);
    let shows = Shows::of(&legs, state);
    let is_told = state == PeerState::Unsendable;
    assert!(is_told || !shows.conclusion(&legs, Some(BackendKind::Udp)).is_empty());
    shows
}

#[test]
fn the_broken_leg_is_named() {
    for (answers, pod, finding) in [
        ([10, 10, 10], None, Shows::Answers),
        ([10, 10, 10], Some(10), Shows::Answers),
        ([0, 10, 10], None, Shows::HostIsDeaf),
        ([0, 0, 0], None, Shows::Nothing),
        ([10, 0, 0], None, Shows::HostOnly),
        ([10, 10, 0], None, Shows::FullAreLost),
        ([0, 10, 0], None, Shows::FullAreLost),
        ([10, 10, 10], Some(0), Shows::PodIsSilent),
        ([0, 0, 0], Some(10), Shows::PodAnswers),
        ([10, 0, 0], Some(10), Shows::PodAnswers),
        ([0, 0, 0], Some(6), Shows::Lossy),
        ([0, 0, 0], Some(0), Shows::Nothing),
        ([10, 9, 10], None, Shows::Lossy),
        // A shaper: what is longer is lost more often, and small ones are as well.
        ([9, 10, 0], None, Shows::Lossy),
        ([10, 6, 0], None, Shows::Lossy),
        ([10, 10, 2], None, Shows::Lossy),
        ([3, 0, 0], None, Shows::Lossy),
        ([9, 0, 0], None, Shows::HostOnly),
    ] {
        assert_eq!(found(answers, pod, PeerState::Idle, None), finding, "{answers:?} {pod:?}");
    }
}

#[test]
fn full_packets_that_this_host_refuses_are_enough() {
    let mut legs = [Leg::Host, Leg::Tunnel, Leg::TunnelFull].map(|leg| echoes(leg, 9));
    (legs[2].answered, legs[2].refused) = (0, Some("Message too long".to_owned()));
    assert_eq!(Shows::of(&legs, PeerState::Ok), Shows::FullAreLost);
}

/// Without its [`Report::add`].
fn report(legs: Vec<Echoes>, kind: BackendKind) -> Report {
    let via = Via::Tunnel("192.0.2.2:8285".parse().unwrap());
    let peer = Peer::new("10.5.2.0/24".parse().unwrap(), None, via, PeerState::Idle);
    Report::of(&peer, legs, Some(kind), false)
}

/// The other echoes carry a checksum.
#[test]
fn where_the_fast_path_carries_what_is_of_pods_another_cause_fits() {
    let legs = [(Leg::Host, 10), (Leg::Tunnel, 10), (Leg::TunnelFull, 10), (Leg::Pod, 0)];
    let legs = legs.map(|(leg, answered)| echoes(leg, answered)).to_vec();
    let via = Via::Tunnel("192.0.2.2:8285".parse().unwrap());
    let peer = Peer::new("10.5.2.0/24".parse().unwrap(), None, via, PeerState::Ok);
    for is_fast in [true, false] {
        let Report { conclusion, .. } =
            Report::of(&peer, legs.clone(), Some(BackendKind::Udp), is_fast);
        assert_eq!(conclusion.contains("checksum"), is_fast, "{conclusion}");
    }
}

/// A rule takes short datagrams alone.
#[test]
fn what_is_lost_by_its_length_is_no_rate() {
    let legs = [(Leg::Host, 10), (Leg::Tunnel, 0), (Leg::TunnelFull, 10), (Leg::Pod, 2)];
    let legs = legs.map(|(leg, answered)| echoes(leg, answered)).to_vec();
    let Report { conclusion, .. } = report(legs, BackendKind::Udp);
    assert!(conclusion.contains("18 of 30") && conclusion.contains("length"), "{conclusion}");
}

#[test]
fn a_pod_that_answers_shows_that_packets_pass() {
    for (answered, well, figures) in [(10, true, "so packets"), (6, false, "4 of 10 small")] {
        let legs = [(Leg::Host, 0), (Leg::Tunnel, 0), (Leg::TunnelFull, 0), (Leg::Pod, answered)];
        let legs = legs.map(|(leg, answered)| echoes(leg, answered)).to_vec();
        let Report { conclusion, well: found, .. } = report(legs, BackendKind::HostGw);
        assert_eq!((found, conclusion.contains("down")), (well, false), "{conclusion}");
        assert!(conclusion.contains(figures) && !conclusion.contains(" 10 full"), "{conclusion}");
    }
}

#[test]
fn the_kernels_answers_for_pods_count() {
    let legs = || [Leg::Host, Leg::Tunnel, Leg::TunnelFull, Leg::Pod].map(|leg| echoes(leg, 10));
    let told = |ways, is_pinged| {
        let mut report = report(legs().to_vec(), BackendKind::HostGw);
        report.add(ways, is_pinged);
        (report.conclusion, report.well)
    };
    let (unasked, well) = told(PodsWays::Unknown, true);
    assert!(well && !unasked.contains("kernel"), "{unasked}");
    let (text, well) = told(PodsWays::NoPods("10.5.1.0/24".parse().unwrap()), true);
    assert!(well && text.contains("10.5.1.0/24") && text.contains("weft check"), "{text}");
    let (text, well) = told(PodsWays::Pass { unless: None }, true);
    assert!(well && text.contains("kernel"), "{text}");
    for is_pinged in [true, false] {
        for way in [PodsWays::EndsThere, PodsWays::EndsBack] {
            let (text, well) = told(way("`ip rule`".to_owned()), is_pinged);
            assert_eq!(well, !is_pinged, "{text}");
            assert!(text.contains(": `ip rule`"), "{text}");
        }
    }
}

/// What is forwarded passes no OUTPUT, except in datagrams of a tunnel.
#[test]
fn what_is_refused_is_said_of_what_it_concerns() {
    let refused = |leg, is_by_output| {
        let refused = Some("refused".to_owned());
        Echoes { refused, is_by_output, ..echoes(leg, 0) }
    };
    for (kind, refused_legs, expected) in [
        (BackendKind::HostGw, vec![(Leg::Host, true), (Leg::Tunnel, true)], true),
        (BackendKind::HostGw, vec![(Leg::Host, true)], true),
        (BackendKind::HostGw, vec![(Leg::Host, false), (Leg::Tunnel, false)], false),
        (BackendKind::Udp, vec![(Leg::Host, true)], false),
        (BackendKind::Udp, vec![(Leg::Tunnel, true)], true),
    ] {
        let mut legs = [Leg::Host, Leg::Tunnel, Leg::TunnelFull].map(|leg| echoes(leg, 0));
        for (which, is_by_output) in &refused_legs {
            let leg = legs.iter_mut().find(|it| it.leg == *which).unwrap();
            *leg = refused(*which, *is_by_output);
        }
        let Report { conclusion, shows, .. } = report(legs.to_vec(), kind);
        assert_eq!(shows, Shows::Unsendable);
        assert_eq!(conclusion.contains("FORWARD"), expected, "{kind} {refused_legs:?}");
    }
    let mut legs = [Leg::Host, Leg::Tunnel, Leg::TunnelFull].map(|leg| echoes(leg, 10)).to_vec();
    legs.push(refused(Leg::Pod, false));
    let Report { conclusion, shows, .. } = report(legs, BackendKind::HostGw);
    assert!(shows == Shows::Unsendable && !conclusion.contains("bridge"), "{conclusion}");
}

#[test]
fn what_expired_on_its_way_went_in_circles() {
    let mut legs = [(Leg::Host, 10), (Leg::Tunnel, 10), (Leg::TunnelFull, 10), (Leg::Pod, 0)]
        .map(|(leg, answered)| echoes(leg, answered))
        .to_vec();
    legs[3].expired_at = Some([172, 20, 0, 2].into());
    let Report { conclusion, shows, well, .. } = report(legs, BackendKind::HostGw);
    assert!(shows == Shows::Loops && !well);
    assert!(conclusion.contains("TTL expired at 172.20.0.2"), "{conclusion}");
}

/// What the kernel answers for this host's own address is nobody else's answer.
#[test]
fn an_own_address_is_no_host_that_answers() {
    let mut legs = [(Leg::Host, 10), (Leg::Tunnel, 0), (Leg::TunnelFull, 0)]
        .map(|(leg, answered)| echoes(leg, answered));
    legs[0].is_own();
    let Report { conclusion, shows, .. } = report(legs.to_vec(), BackendKind::Udp);
    assert!(shows == Shows::Unsendable && conclusion.contains("`ip address`"), "{conclusion}");
}

#[test]
fn what_this_host_cant_send_is_no_silence_of_the_peer() {
    let mut legs = [(Leg::Host, 0), (Leg::Tunnel, 10), (Leg::TunnelFull, 10)]
        .map(|(leg, answered)| echoes(leg, answered));
    legs[0].refused = Some("EPERM".to_owned());
    let Report { conclusion, well, .. } = report(legs.to_vec(), BackendKind::Udp);
    assert!(well && conclusion.contains("EPERM"), "{conclusion}");
    let shows = found([10, 0, 0], None, PeerState::Unsendable, None);
    assert_eq!(shows, Shows::Unsendable, "weftd knows");
    let sends = (DropReason::SendForbidden.id().to_owned(), Lately { packets: 7, seconds_ago: 1 });
    let status = Status { drops_lately: Some([sends].into()), ..Status::default() };
    assert!(failed_sends(&status).is_some_and(|text| text.contains("7 tx-eperm")));
    assert_eq!(failed_sends(&Status::default()), None);
}

#[test]
fn a_node_of_another_backend_is_not_judged_by_its_silence() {
    let legs = [echoes(Leg::Host, 10)];
    assert_eq!(Shows::of(&legs, PeerState::OtherBackend), Shows::NotSentTo);
}

#[test]
fn what_weftd_and_the_kernel_know_counts() {
    for answers in [[0, 0, 0], [10, 0, 0]] {
        let deaf = found(answers, None, PeerState::Deaf, None);
        assert_eq!(deaf, Shows::Deaf, "a healthy peer that answers no pings: {answers:?}");
        let silent = found(answers, Some(0), PeerState::Deaf, None);
        assert_ne!(silent, Shows::Deaf, "its pods do not answer either: {answers:?}");
        let here = found(answers, None, PeerState::Silent, Some("a blackhole route"));
        assert_eq!(here, Shows::Unsendable, "a blackhole route of this host: {answers:?}");
    }
    // `ok` may be from before the fault, or of the host alone.
    for state in [PeerState::Silent, PeerState::Ok, PeerState::Idle] {
        assert_eq!(found([0, 0, 0], None, state, None), Shows::Nothing);
        assert_eq!(found([10, 0, 0], None, state, None), Shows::HostOnly);
    }
}

#[test]
fn a_node_is_found_by_any_of_its_names() {
    let peer = |number: u8, name: &str, path_mtu_bytes| {
        let subnet = format!("10.5.{number}.0/24").parse().unwrap();
        let via = Via::Tunnel(format!("192.0.2.{number}:8285").parse().unwrap());
        let peer = Peer::new(subnet, Some(name.to_owned()), via, PeerState::Ok);
        Peer { path_mtu_bytes, ..peer }
    };
    let lease = Lease {
        network: "10.5.0.0/16".parse().ok(),
        subnet: "10.5.9.0/24".parse().ok(),
        public_ip: Some(Ipv4Addr::LOCALHOST),
        mtu_bytes: 1472,
        ipv6: None,
    };
    let peers = [peer(1, "a", None), peer(2, "b", Some(1372))];
    for name in ["b", "10.5.2.0/24", "10.5.2.77", "192.0.2.2"] {
        assert_eq!(find(&peers, name).unwrap().subnet, peers[1].subnet);
    }
    assert!(find(&peers, "c").unwrap_err().to_string().contains("weft peers"));
    let legs = |peer: &Peer, kind| {
        let legs = legs(peer, Some(kind), &lease, None);
        let each = legs.iter().map(|leg| (leg.address.to_string(), leg.bytes));
        each.collect::<Vec<_>>()
    };
    let own = |text: &str, bytes| (text.to_owned(), bytes);
    assert_eq!(
        legs(&peers[1], BackendKind::Udp),
        [own("192.0.2.2", 84), own("10.5.2.0", 84), own("10.5.2.0", 1372)]
    );
    assert_eq!(legs(&peers[0], BackendKind::HostGw)[2], own("10.5.1.1", 1472));
}

#[test]
fn the_screen_has_a_line_for_each_leg() {
    let leg = Echoes {
        address: [10, 5, 2, 0].into(),
        bytes: 1472,
        round_trip_microseconds: Some(12_345),
        ..echoes(Leg::TunnelFull, 4)
    };
    let (subnet, node) = ("10.5.2.0/24".parse().unwrap(), Some("b".to_owned()));
    let (shows, conclusion) = (Shows::Lossy, "why".to_owned());
    let report = Report { subnet, node, legs: vec![leg], shows, conclusion, well: false };
    let pinged = Pinged { schema: SCHEMA, peers: vec![report] };
    let expected = "10.5.2.0/24 b\n  \
                    tunnel-full  10.5.2.0          1472 bytes  4/10  12.34ms\n  why\n";
    assert_eq!(render(&pinged, Style::PLAIN), expected);
    let leg = &serde_json::to_value(&pinged).unwrap()["peers"][0]["legs"][0];
    assert_eq!((&leg["leg"], &leg["address"]), (&"tunnel-full".into(), &"10.5.2.0".into()));
}
