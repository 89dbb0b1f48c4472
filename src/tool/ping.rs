//! `weft ping`: the host behind a subnet, its end of the tunnel, and the tunnel with full packets,
//! each with loss and round trip, and what follows from that.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::bail;
use serde::Serialize;

use crate::backend_kind::BackendKind;
use crate::route::Prefix;
use crate::status::{Peer, SCHEMA, Status};
use crate::tool::echo::{self, ECHOES, Outcome, Target};
use crate::tool::style::Style;

/// Of an ordinary ping.
const SMALL_BYTES: u16 = 84;

/// Peers that are pinged at a time: some hundred packets at once.
const PEERS_AT_ONCE: usize = 64;

/// Who is pinged.
pub(super) enum Whom {
    /// One node: by name, public address, subnet, or any address in its subnet.
    Node(String),
    /// All of them.
    All,
}

/// A node, as far as pinging goes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    subnet: Prefix,
    name: Option<String>,
    host: Ipv4Addr,
    /// What answers at the other end of the overlay.
    end: Ipv4Addr,
    mtu_bytes: u16,
}

/// Who answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Leg {
    Host,
    Tunnel,
    #[serde(rename = "tunnel-full")]
    FullTunnel,
    Pod,
}

impl Leg {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Tunnel => "tunnel",
            Self::FullTunnel => "tunnel-full",
            Self::Pod => "pod",
        }
    }
}

/// What came of pinging, for scripts as for people.
#[derive(Debug, Serialize)]
pub(super) struct Pinged {
    schema: u32,
    pub(super) peers: Vec<Report>,
}

/// What came of pinging one node.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    subnet: Prefix,
    node: Option<String>,
    legs: Vec<Echoes>,
    conclusion: &'static str,
    pub(super) well: bool,
}

/// What came of the echoes on one leg.
#[derive(Debug, Serialize)]
struct Echoes {
    leg: Leg,
    address: Ipv4Addr,
    bytes: u16,
    sent: usize,
    answered: usize,
    round_trip_microseconds: Option<u64>,
    /// Why this host did not send one.
    refused: Option<String>,
}

impl Echoes {
    fn new(leg: Leg, target: Target, outcome: Outcome) -> Self {
        let microseconds = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self {
            leg,
            address: target.address,
            bytes: target.bytes,
            sent: ECHOES,
            answered: outcome.answered(),
            round_trip_microseconds: outcome.median().map(microseconds),
            refused: outcome.refused,
        }
    }
}

/// Pings. `status` and `peers` are what weftd says of itself.
pub(super) fn run(
    whom: &Whom,
    pod: Option<Ipv4Addr>,
    status: &Status,
    peers: &[Peer],
) -> anyhow::Result<Pinged> {
    let nodes = match whom {
        Whom::All => nodes(status, peers),
        Whom::Node(name) => vec![find(nodes(status, peers), name)?],
    };
    if nodes.is_empty() {
        bail!("weftd knows no other node");
    }
    if let Some((pod, node)) = pod.zip(nodes.first())
        && !node.subnet.contains(pod)
    {
        bail!("--pod {pod} is not in {}, the subnet of that node", node.subnet);
    }
    let mut reports = Vec::new();
    for some in nodes.chunks(PEERS_AT_ONCE) {
        let legs: Vec<_> = some.iter().map(|node| legs(node, pod)).collect();
        let targets: Vec<_> = legs.iter().flatten().map(|(_, target)| *target).collect();
        let mut outcomes = echo::ping(&targets)?.into_iter();
        for (node, legs) in some.iter().zip(legs) {
            let legs: Vec<_> = legs
                .into_iter()
                .map(|(leg, target)| Echoes::new(leg, target, outcomes.next().unwrap_or_default()))
                .collect();
            let (conclusion, well) = conclude(&legs);
            let (subnet, node) = (node.subnet, node.name.clone());
            reports.push(Report { subnet, node, legs, conclusion, well });
        }
    }
    Ok(Pinged { schema: SCHEMA, peers: reports })
}

/// Every node that weftd sends to.
fn nodes(status: &Status, peers: &[Peer]) -> Vec<Node> {
    let overlay_mtu = status.lease.as_ref().map(|lease| lease.mtu_bytes);
    // Without a device of its own the other end is the bridge, which has the subnet's first host.
    let kind = status.backend.as_ref().and_then(|backend| backend.kind);
    let has_device = kind.is_some_and(BackendKind::has_device);
    let node = |peer: &Peer| {
        let mtu_bytes = u16::try_from(peer.path_mtu_bytes.or(overlay_mtu)?).ok()?;
        let subnet = peer.subnet;
        let end = if has_device { subnet.network() } else { subnet.first_host() };
        Some(Node { subnet, name: peer.node.clone(), host: peer.via.host(), end, mtu_bytes })
    };
    peers.iter().filter_map(node).collect()
}

fn find(nodes: Vec<Node>, name: &str) -> anyhow::Result<Node> {
    let address: Option<Ipv4Addr> = name.parse().ok();
    let is_meant = |node: &Node| {
        node.name.as_deref() == Some(name)
            || node.subnet.to_string() == name
            || address.is_some_and(|address| node.host == address || node.subnet.contains(address))
    };
    let mut meant = nodes.into_iter().filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(node), None) => Ok(node),
        (Some(one), Some(other)) => bail!(
            "{name} has several leases: name one of them, such as {} or {}",
            one.subnet,
            other.subnet
        ),
        (None, _) => {
            bail!("no other node has the name, address or subnet {name}; see `weft peers`")
        }
    }
}

fn legs(node: &Node, pod: Option<Ipv4Addr>) -> Vec<(Leg, Target)> {
    let target = |address, bytes| Target { address, bytes };
    let mut legs = vec![
        (Leg::Host, target(node.host, SMALL_BYTES)),
        (Leg::Tunnel, target(node.end, SMALL_BYTES)),
        (Leg::FullTunnel, target(node.end, node.mtu_bytes)),
    ];
    if let Some(pod) = pod {
        legs.push((Leg::Pod, target(pod, SMALL_BYTES)));
    }
    legs
}

/// What the answers show, and whether that is as it should be.
fn conclude(legs: &[Echoes]) -> (&'static str, bool) {
    let answered = |which: Leg| {
        let mut of_leg = legs.iter().filter(|echoes| echoes.leg == which);
        of_leg.next().map(|echoes| echoes.answered)
    };
    let some = |leg| answered(leg).is_some_and(|answered| answered > 0);
    let lossy = legs.iter().any(|echoes| (1..ECHOES).contains(&echoes.answered));
    match (some(Leg::Host), some(Leg::Tunnel), some(Leg::FullTunnel)) {
        (false, false, _) => (
            "nothing answers: the host is down, or no route leads to it, or a firewall drops both \
             ICMP and the tunnel",
            false,
        ),
        (true, false, _) => (
            "the host answers and the tunnel does not: is weftd or flanneld running there, with \
             this subnet and the same backend and port? Does every firewall on the way, a cloud's \
             as well, let the tunnel's packets through both ways?",
            false,
        ),
        (_, true, false) => (
            "small packets pass and full ones do not: the path is narrower than the overlay's MTU. \
             While TCP is in use weftd measures it within seconds, if the peer answers; else set a \
             smaller MTU in the Backend of the network configuration",
            false,
        ),
        (_, true, true) if answered(Leg::Pod) == Some(0) => (
            "the tunnel carries packets and the pod does not answer: look at that host's bridge, \
             its FORWARD rules, network policies, and whether the pod runs",
            false,
        ),
        (_, true, true) if lossy => ("packets pass, but some are lost", false),
        (false, true, true) => ("the tunnel works; the host itself answers no pings", true),
        (true, true, true) => ("all ways work", true),
    }
}

/// What [`run`] gives, for people.
pub(super) fn render(pinged: &Pinged, style: Style) -> String {
    let mut text = String::new();
    for Report { subnet, node, legs, conclusion, well } in &pinged.peers {
        writeln!(text, "{subnet} {}", node.as_deref().unwrap_or_default()).ok();
        for echoes in legs {
            let Echoes { leg, address, bytes, sent, answered, .. } = echoes;
            let took = echoes
                .round_trip_microseconds
                .map(|took| format!("  {}.{:02} ms", took / 1000, took % 1000 / 10));
            let refused = echoes.refused.as_ref().map(|why| format!("  not sent: {why}"));
            writeln!(
                text,
                "  {:<11}  {:<15}  {bytes:>5} bytes  {answered}/{sent}{}{}",
                leg.name(),
                address.to_string(),
                took.unwrap_or_default(),
                refused.unwrap_or_default(),
            )
            .ok();
        }
        let shown = if *well { style.good(conclusion) } else { style.bad(conclusion) };
        writeln!(text, "  {shown}").ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{Backend, Lease, PeerState, Via};

    fn echoes(leg: Leg, answered: usize) -> Echoes {
        let target = Target { address: Ipv4Addr::LOCALHOST, bytes: 84 };
        let round_trips = vec![Duration::from_micros(210); answered];
        Echoes::new(leg, target, Outcome { round_trips, refused: None })
    }

    /// How many answers each leg got; the pod none was asked if it is absent.
    fn concluded(answers: [usize; 3], pod: Option<usize>) -> (&'static str, bool) {
        let legs = [Leg::Host, Leg::Tunnel, Leg::FullTunnel].into_iter().zip(answers);
        let legs = legs.chain(pod.map(|answers| (Leg::Pod, answers)));
        let legs: Vec<_> = legs.map(|(leg, answered)| echoes(leg, answered)).collect();
        conclude(&legs)
    }

    #[test]
    fn the_broken_leg_is_named() {
        for (answers, pod, words, is_well) in [
            ([5, 5, 5], None, "all ways work", true),
            ([5, 5, 5], Some(5), "all ways work", true),
            ([0, 5, 5], None, "answers no pings", true),
            ([0, 0, 0], None, "nothing answers", false),
            ([5, 0, 0], None, "the tunnel does not", false),
            ([5, 5, 0], None, "full ones do not", false),
            ([0, 5, 0], None, "full ones do not", false),
            ([5, 5, 5], Some(0), "the pod does not answer", false),
            ([5, 4, 5], None, "some are lost", false),
        ] {
            let (text, well) = concluded(answers, pod);
            assert!(text.contains(words), "{answers:?} {pod:?}: {text}");
            assert_eq!(well, is_well, "{answers:?} {pod:?}: {text}");
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
        let status = Status {
            lease: Some(Lease {
                network: "10.5.0.0/16".parse().unwrap(),
                subnet: "10.5.9.0/24".parse().unwrap(),
                public_ip: Ipv4Addr::LOCALHOST,
                mtu_bytes: 1472,
            }),
            backend: Some(Backend { kind: Some(BackendKind::Udp), done: None }),
            ..Status::default()
        };
        let nodes = nodes(&status, &[peer(1, "a", None), peer(2, "b", Some(1372))]);
        assert_eq!((nodes[0].mtu_bytes, nodes[1].mtu_bytes), (1472, 1372));
        for name in ["b", "10.5.2.0/24", "10.5.2.77", "192.0.2.2"] {
            let node = find(nodes.clone(), name).unwrap();
            assert_eq!(
                (node.end.to_string().as_str(), node.host),
                ("10.5.2.0", [192, 0, 2, 2].into())
            );
        }
        assert!(find(nodes, "c").unwrap_err().to_string().contains("weft peers"));
    }

    #[test]
    fn the_screen_has_a_line_for_each_leg() {
        let leg = Echoes {
            address: [10, 5, 2, 0].into(),
            bytes: 1472,
            round_trip_microseconds: Some(12_345),
            ..echoes(Leg::FullTunnel, 4)
        };
        let (subnet, node) = ("10.5.2.0/24".parse().unwrap(), Some("b".to_owned()));
        let report = Report { subnet, node, legs: vec![leg], conclusion: "why", well: false };
        let pinged = Pinged { schema: SCHEMA, peers: vec![report] };
        let expected = "10.5.2.0/24 b\n  \
                        tunnel-full  10.5.2.0          1472 bytes  4/5  12.34 ms\n  why\n";
        assert_eq!(render(&pinged, Style::PLAIN), expected);
        let leg = &serde_json::to_value(&pinged).unwrap()["peers"][0]["legs"][0];
        assert_eq!((&leg["leg"], &leg["address"]), (&"tunnel-full".into(), &"10.5.2.0".into()));
    }
}
