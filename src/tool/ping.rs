//! `weft ping`: the host behind a subnet, its end of the tunnel, and the tunnel with full packets,
//! each with loss and round trip, and what follows from that.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::bail;
use serde_json::{Value, json};

use crate::backend_kind::BackendKind;
use crate::daemon::status::SCHEMA;
use crate::route::Prefix;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leg {
    Host,
    Tunnel,
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

/// What came of pinging one node.
struct Report {
    node: Node,
    legs: Vec<(Leg, Target, Outcome)>,
    conclusion: &'static str,
    is_well: bool,
}

/// Pings, and gives what to print and whether all is well. `status` and `peers` are what weftd
/// says of itself.
pub(super) fn run(
    whom: &Whom,
    pod: Option<Ipv4Addr>,
    status: &Value,
    peers: &Value,
) -> anyhow::Result<(Value, bool)> {
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
                .map(|(leg, target)| (leg, target, outcomes.next().unwrap_or_default()))
                .collect();
            let (conclusion, is_well) = conclude(&legs);
            reports.push(Report { node: node.clone(), legs, conclusion, is_well });
        }
    }
    let is_well = reports.iter().all(|report| report.is_well);
    Ok((
        json!({ "schema": SCHEMA, "peers": reports.iter().map(to_json).collect::<Value>() }),
        is_well,
    ))
}

/// Every node that weftd sends to.
fn nodes(status: &Value, peers: &Value) -> Vec<Node> {
    let overlay_mtu = status["lease"]["mtu_bytes"].as_u64();
    // Without a device of its own the other end is the bridge, which has the subnet's first host.
    let kind = status["backend"]["kind"].as_str().and_then(BackendKind::named);
    let has_device = kind.is_some_and(BackendKind::has_device);
    let node = |peer: &Value| {
        let subnet: Prefix = peer["subnet"].as_str()?.parse().ok()?;
        let via = peer["via"].as_str()?;
        let host = via.split_once(':').map_or(via, |(host, _)| host).parse().ok()?;
        let mtu_bytes = peer["path_mtu_bytes"].as_u64().or(overlay_mtu)?;
        Some(Node {
            subnet,
            name: peer["node"].as_str().map(str::to_owned),
            host,
            end: if has_device { subnet.network() } else { subnet.first_host() },
            mtu_bytes: u16::try_from(mtu_bytes).ok()?,
        })
    };
    peers["peers"].as_array().into_iter().flatten().filter_map(node).collect()
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
fn conclude(legs: &[(Leg, Target, Outcome)]) -> (&'static str, bool) {
    let answered = |which: Leg| {
        let of_leg = legs.iter().find(|(leg, ..)| *leg == which);
        of_leg.map(|(_, _, outcome)| outcome.answered())
    };
    let some = |leg| answered(leg).is_some_and(|answered| answered > 0);
    let lossy = legs.iter().any(|(_, _, outcome)| (1..ECHOES).contains(&outcome.answered()));
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

fn to_json(report: &Report) -> Value {
    let leg = |(leg, target, outcome): &(Leg, Target, Outcome)| {
        let microseconds = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        json!({
            "leg": leg.name(),
            "address": target.address.to_string(),
            "bytes": target.bytes,
            "sent": ECHOES,
            "answered": outcome.answered(),
            "round_trip_microseconds": outcome.median().map(microseconds),
            "refused": outcome.refused,
        })
    };
    json!({
        "subnet": report.node.subnet.to_string(),
        "node": report.node.name,
        "legs": report.legs.iter().map(leg).collect::<Value>(),
        "conclusion": report.conclusion,
        "well": report.is_well,
    })
}

/// What [`run`] gives, for people.
pub(super) fn render(answer: &Value, style: Style) -> String {
    let mut text = String::new();
    for report in answer["peers"].as_array().into_iter().flatten() {
        let plain = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        writeln!(text, "{} {}", plain(&report["subnet"]), plain(&report["node"])).ok();
        for leg in report["legs"].as_array().into_iter().flatten() {
            let [sent, answered] = ["sent", "answered"].map(|name| leg[name].as_u64().unwrap_or(0));
            let took = leg["round_trip_microseconds"]
                .as_u64()
                .map(|took| format!("  {}.{:02} ms", took / 1000, took % 1000 / 10));
            let refused = leg["refused"].as_str().map(|why| format!("  not sent: {why}"));
            let (name, address) = (plain(&leg["leg"]), plain(&leg["address"]));
            let bytes = leg["bytes"].as_u64().unwrap_or(0);
            writeln!(
                text,
                "  {name:<11}  {address:<15}  {bytes:>5} bytes  {answered}/{sent}{}{}",
                took.unwrap_or_default(),
                refused.unwrap_or_default(),
            )
            .ok();
        }
        let conclusion = plain(&report["conclusion"]);
        let shown = match report["well"].as_bool() {
            Some(true) => style.good(&conclusion),
            _ => style.bad(&conclusion),
        };
        writeln!(text, "  {shown}").ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(answered: usize) -> Outcome {
        Outcome { round_trips: vec![Duration::from_micros(210); answered], refused: None }
    }

    /// How many answers each leg got; the pod none was asked if it is absent.
    fn concluded(answers: [usize; 3], pod: Option<usize>) -> (&'static str, bool) {
        let target = Target { address: Ipv4Addr::LOCALHOST, bytes: 84 };
        let legs = [Leg::Host, Leg::Tunnel, Leg::FullTunnel].into_iter().zip(answers);
        let legs = legs.chain(pod.map(|answers| (Leg::Pod, answers)));
        let legs: Vec<_> = legs.map(|(leg, answers)| (leg, target, outcome(answers))).collect();
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
        let status = json!({ "lease": { "mtu_bytes": 1472 }, "backend": { "kind": "udp" } });
        let peers = json!({ "peers": [
            { "subnet": "10.5.1.0/24", "node": "a", "via": "192.0.2.1:8285" },
            { "subnet": "10.5.2.0/24", "node": "b", "via": "192.0.2.2:8285",
              "path_mtu_bytes": 1372 },
        ] });
        let nodes = nodes(&status, &peers);
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
        let answer = json!({ "peers": [{
            "subnet": "10.5.2.0/24", "node": "b", "well": false, "conclusion": "why",
            "legs": [{ "leg": "tunnel-full", "address": "10.5.2.0", "bytes": 1472, "sent": 5,
                       "answered": 4, "round_trip_microseconds": 12_345, "refused": null }],
        }] });
        let expected = "10.5.2.0/24 b\n  \
                        tunnel-full  10.5.2.0          1472 bytes  4/5  12.34 ms\n  why\n";
        assert_eq!(render(&answer, Style::PLAIN), expected);
    }
}
