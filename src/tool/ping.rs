//! `weft ping`: the host behind a subnet, its end of the tunnel, and the tunnel with full packets,
//! each with loss and round trip, and what follows from that.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::bail;
use serde::Serialize;

use crate::backend_kind::BackendKind;
use crate::route::Prefix;
use crate::status::{Peer, PeerState, SCHEMA, Status};
use crate::tool::echo::{self, ECHOES, Outcome, Target};
use crate::tool::refusal::why;
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
    /// What weftd knows of it.
    state: PeerState,
    why: Option<String>,
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
    finding: Finding,
    conclusion: String,
    pub(super) well: bool,
}

/// What the answers show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Finding {
    AllWays,
    /// The host answers no pings, the rest does.
    HostIsDeaf,
    /// Nothing there answers pings, and weftd knows that packets pass all the same.
    Deaf,
    /// The cause is this host.
    Unsendable,
    Nothing,
    /// The host alone answers.
    HostOnly,
    /// Full packets are lost.
    FullAreLost,
    PodIsSilent,
    Lossy,
}

impl Finding {
    fn is_well(self) -> bool {
        match self {
            Self::AllWays | Self::HostIsDeaf | Self::Deaf => true,
            Self::Unsendable
            | Self::Nothing
            | Self::HostOnly
            | Self::FullAreLost
            | Self::PodIsSilent
            | Self::Lossy => false,
        }
    }
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
            refused: outcome.refused.map(|errno| why(&errno.into())),
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
    let kind = status.backend.as_ref().and_then(|backend| backend.kind);
    // Without a device the host's own address would be the source, which is no pod's.
    let subnet = status.lease.as_ref().map(|lease| lease.subnet);
    let gateway = subnet.filter(|_| !has_device(kind)).map(Prefix::first_host);
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
        let mut outcomes = echo::ping(&targets, gateway)?.into_iter();
        for (node, legs) in some.iter().zip(legs) {
            let legs: Vec<_> = legs
                .into_iter()
                .map(|(leg, target)| Echoes::new(leg, target, outcomes.next().unwrap_or_default()))
                .collect();
            let finding = find_out(&legs, node.state);
            let mut conclusion = finding.conclusion(&legs, kind);
            if let Some(why) = node.why.as_ref().filter(|_| !finding.is_well()) {
                write!(conclusion, ". weftd says of it: {why}").ok();
            }
            let (subnet, node, well) = (node.subnet, node.name.clone(), finding.is_well());
            reports.push(Report { subnet, node, legs, finding, conclusion, well });
        }
    }
    Ok(Pinged { schema: SCHEMA, peers: reports })
}

/// Every node that weftd sends to.
fn nodes(status: &Status, peers: &[Peer]) -> Vec<Node> {
    let overlay_mtu = status.lease.as_ref().map(|lease| lease.mtu_bytes);
    // Without a device of its own the other end is the bridge, which has the subnet's first host.
    let has_device = has_device(status.backend.as_ref().and_then(|backend| backend.kind));
    let node = |peer: &Peer| {
        let mtu_bytes = u16::try_from(peer.path_mtu_bytes.or(overlay_mtu)?).ok()?;
        let subnet = peer.subnet;
        let end = if has_device { subnet.network() } else { subnet.first_host() };
        let (name, state, why) = (peer.node.clone(), peer.state, peer.why.clone());
        Some(Node { subnet, name, host: peer.via.host(), end, mtu_bytes, state, why })
    };
    peers.iter().filter_map(node).collect()
}

fn has_device(kind: Option<BackendKind>) -> bool {
    kind.is_some_and(BackendKind::has_device)
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
    let inner = |address, bytes| Target { address, bytes, is_inner: true };
    let host = Target { address: node.host, bytes: SMALL_BYTES, is_inner: false };
    let mut legs = vec![
        (Leg::Host, host),
        (Leg::Tunnel, inner(node.end, SMALL_BYTES)),
        (Leg::FullTunnel, inner(node.end, node.mtu_bytes)),
    ];
    if let Some(pod) = pod {
        legs.push((Leg::Pod, inner(pod, SMALL_BYTES)));
    }
    legs
}

/// What the answers show, with what weftd knows of the peer.
fn find_out(legs: &[Echoes], state: PeerState) -> Finding {
    let of = |which: Leg| legs.iter().find(|echoes| echoes.leg == which);
    let some = |leg| of(leg).is_some_and(|echoes| echoes.answered > 0);
    let is_refused = |echoes: &Echoes| echoes.refused.is_some() && echoes.answered == 0;
    match (some(Leg::Host), some(Leg::Tunnel), some(Leg::FullTunnel)) {
        (_, false, _) if of(Leg::Tunnel).is_some_and(is_refused) => Finding::Unsendable,
        (false, false, _) if of(Leg::Host).is_some_and(is_refused) => Finding::Unsendable,
        (_, false, _) if state == PeerState::Deaf => Finding::Deaf,
        (false, false, _) => Finding::Nothing,
        (true, false, _) => Finding::HostOnly,
        (_, true, false) => Finding::FullAreLost,
        (_, true, true) if of(Leg::Pod).is_some_and(|echoes| echoes.answered == 0) => {
            Finding::PodIsSilent
        }
        (_, true, true) if legs.iter().any(|echoes| (1..ECHOES).contains(&echoes.answered)) => {
            Finding::Lossy
        }
        (false, true, true) => Finding::HostIsDeaf,
        (true, true, true) => Finding::AllWays,
    }
}

impl Finding {
    /// What follows, and where two causes fit how to tell them apart.
    fn conclusion(self, legs: &[Echoes], kind: Option<BackendKind>) -> String {
        let text = match self {
            Self::AllWays | Self::HostIsDeaf => return all_ways(self, legs),
            Self::Deaf => "it answers no pings, but packets pass, as weftd knows",
            Self::Unsendable => return unsendable(legs),
            Self::Nothing => {
                "nothing answers, and this host sends without complaint: the host is down, or what \
                 is sent or the answers are lost on the way or in a firewall, or go to a wrong \
                 machine, or it answers no pings at all. `weft check` here looks at this host, its \
                 neighbours too; `weft status` there says whether anything arrives"
            }
            Self::HostOnly => match has_device(kind) {
                true => {
                    "the host answers, its end of the overlay does not: the tunnel's packets are \
                     lost there or back (a firewall on the way, in a cloud as well, or another \
                     backend or port), or weftd or flanneld does not run there with this subnet. \
                     `weft check` on both hosts; `weft status` there says whether they arrive"
                }
                false => {
                    "the host answers, the bridge of its pods does not answer this host's pods: it \
                     may have none yet, or packets of the pods' network are lost there or on the \
                     way, or the way back to this host's subnet is another one (`weft check` and \
                     `ip route get` there)"
                }
            },
            Self::FullAreLost => return full_are_lost(kind),
            Self::PodIsSilent => {
                "the overlay carries packets and the pod does not answer: look at that host's \
                 bridge, its FORWARD rules, network policies, and whether the pod runs"
            }
            Self::Lossy => {
                let lost = |echoes: &Echoes| echoes.sent - echoes.answered;
                let (lost, sent) = legs.iter().fold((0, 0), |(all_lost, all_sent), echoes| {
                    (all_lost + lost(echoes), all_sent + echoes.sent)
                });
                return format!("packets pass, but {lost} of {sent} are lost");
            }
        };
        text.to_owned()
    }
}

/// The echoes are this host's own: what that leaves out is said.
fn all_ways(finding: Finding, legs: &[Echoes]) -> String {
    let whom = if legs.iter().any(|it| it.leg == Leg::Pod) { "the pod" } else { "its overlay" };
    let deaf =
        if finding == Finding::HostIsDeaf { "; the host itself answers no pings" } else { "" };
    let untried = match whom {
        "the pod" => "what this host's pods send also passes its bridge, firewall and rules",
        _ => {
            "not tried: the pods' bridges, and the firewalls for what is forwarded (--pod ADDRESS)"
        }
    };
    format!("{whom} answers this host, with full packets too{deaf}; {untried} (`weft explain`)")
}

fn unsendable(legs: &[Echoes]) -> String {
    let refused = legs.iter().find_map(|echoes| Some((echoes.address, echoes.refused.as_ref()?)));
    let each = refused.map(|(address, why)| format!("this host can't send to {address}: {why}"));
    each.unwrap_or_default() + ". `ip route get` and `weft check` here show more"
}

/// The pause between echoes is long enough for any link, so a slow one is not the first guess.
fn full_are_lost(kind: Option<BackendKind>) -> String {
    let cure = match kind {
        Some(BackendKind::Udp) => {
            "while TCP is in use weftd measures such a path, if the peer answers, and tells the \
             pods: `weft peers` says narrow"
        }
        Some(BackendKind::Vxlan) => {
            "if it is, correct the link, or set a smaller MTU in the Backend of the network \
             configuration"
        }
        Some(BackendKind::HostGw | BackendKind::Alloc | BackendKind::Extension) | None => {
            "if it is, correct the link, or lower the MTU of the hosts' interfaces"
        }
    };
    format!(
        "small packets pass and full ones do not: a link of the path is narrower than the \
         overlay's MTU, or too slow for them (then some pass after a pause); {cure}"
    )
}

/// What [`run`] gives, for people.
pub(super) fn render(pinged: &Pinged, style: Style) -> String {
    let mut text = String::new();
    for Report { subnet, node, legs, conclusion, well, .. } in &pinged.peers {
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
    if let [_, _, ..] = pinged.peers.as_slice() {
        let well = pinged.peers.iter().filter(|report| report.well).count();
        writeln!(text, "{well} of {} nodes are well", pinged.peers.len()).ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::status::{Backend, Lease, Via};

    fn echoes(leg: Leg, answered: usize) -> Echoes {
        let target = Target { address: Ipv4Addr::LOCALHOST, bytes: 84, is_inner: true };
        let round_trips = vec![Duration::from_micros(210); answered];
        Echoes::new(leg, target, Outcome { round_trips, refused: None })
    }

    /// What was found of a peer in this state; how many answers each leg got, the pod none was
    /// asked if it is absent, and what the tunnel's end was refused with.
    fn found(
        answers: [usize; 3],
        pod: Option<usize>,
        state: PeerState,
        refused: Option<Errno>,
    ) -> Finding {
        let legs = [Leg::Host, Leg::Tunnel, Leg::FullTunnel].into_iter().zip(answers);
        let legs = legs.chain(pod.map(|answers| (Leg::Pod, answers)));
        let mut legs: Vec<_> = legs.map(|(leg, answered)| echoes(leg, answered)).collect();
        legs[1].refused = refused.map(|errno| why(&errno.into()));
        let finding = find_out(&legs, state);
        assert!(!finding.conclusion(&legs, Some(BackendKind::Udp)).is_empty());
        finding
    }

    #[test]
    fn the_broken_leg_is_named() {
        for (answers, pod, finding) in [
            ([5, 5, 5], None, Finding::AllWays),
            ([5, 5, 5], Some(5), Finding::AllWays),
            ([0, 5, 5], None, Finding::HostIsDeaf),
            ([0, 0, 0], None, Finding::Nothing),
            ([5, 0, 0], None, Finding::HostOnly),
            ([5, 5, 0], None, Finding::FullAreLost),
            ([0, 5, 0], None, Finding::FullAreLost),
            ([5, 5, 5], Some(0), Finding::PodIsSilent),
            ([5, 4, 5], None, Finding::Lossy),
        ] {
            assert_eq!(found(answers, pod, PeerState::Idle, None), finding, "{answers:?} {pod:?}");
        }
    }

    #[test]
    fn what_weftd_and_the_kernel_know_counts() {
        for answers in [[0, 0, 0], [5, 0, 0]] {
            let deaf = found(answers, None, PeerState::Deaf, None);
            assert_eq!(deaf, Finding::Deaf, "a healthy peer that answers no pings: {answers:?}");
            let here = found(answers, None, PeerState::Silent, Some(Errno::INVAL));
            assert_eq!(here, Finding::Unsendable, "a blackhole route of this host: {answers:?}");
        }
        // `ok` may be from before the fault, or of the host alone.
        for state in [PeerState::Silent, PeerState::Ok, PeerState::Idle] {
            assert_eq!(found([0, 0, 0], None, state, None), Finding::Nothing);
            assert_eq!(found([5, 0, 0], None, state, None), Finding::HostOnly);
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
        let (finding, conclusion) = (Finding::Lossy, "why".to_owned());
        let report = Report { subnet, node, legs: vec![leg], finding, conclusion, well: false };
        let pinged = Pinged { schema: SCHEMA, peers: vec![report] };
        let expected = "10.5.2.0/24 b\n  \
                        tunnel-full  10.5.2.0          1472 bytes  4/5  12.34 ms\n  why\n";
        assert_eq!(render(&pinged, Style::PLAIN), expected);
        let leg = &serde_json::to_value(&pinged).unwrap()["peers"][0]["legs"][0];
        assert_eq!((&leg["leg"], &leg["address"]), (&"tunnel-full".into(), &"10.5.2.0".into()));
    }
}
