//! `weft ping`: the host behind a subnet, its end of the tunnel, and the tunnel with full packets,
//! each with loss and round trip, and what follows from that.

mod conclusions;

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, bail};
use serde::Serialize;

use crate::backend_kind::BackendKind;
use crate::host::netlink;
use crate::route::{IpAddress, Prefix};
use crate::stats::DropReason;
use crate::status::{Lease, Peer, PeerState, SCHEMA, Status};
use crate::tool::ask::wait_for;
use crate::tool::echo::{self, Echoes, Leg};
use crate::tool::explain::{self, PodsWays};
use crate::tool::peers::{self, milliseconds};
use crate::tool::style::Style;

use self::conclusions::{Shows, has_device, loops, loses_most};

/// Of an ordinary ping.
const SMALL_BYTES: u16 = 84;

/// Peers that are pinged at a time: some hundred packets at once.
const PEERS_AT_ONCE: usize = 64;

/// What came of pinging, for scripts as for people.
#[derive(Debug, Serialize)]
pub(super) struct Pinged {
    schema: u32,
    pub(super) peers: Vec<Report>,
}

/// What came of pinging one node.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    subnet: String,
    node: Option<String>,
    pub(super) legs: Vec<Echoes>,
    #[serde(rename = "finding")]
    shows: Shows,
    pub(super) conclusion: String,
    pub(super) well: bool,
}

/// Pings the node of this name, public address, subnet, or any address in its subnet, which is a
/// pod's unless it is of the node's own; or else all. `status` and `peers` are what weftd says of
/// itself; of another network namespace than where it `is_here` this one's kernel knows nothing.
pub(super) fn run(
    node: Option<&str>,
    pod: Option<IpAddr>,
    status: &Status,
    peers: &[Peer],
    is_here: bool,
) -> anyhow::Result<Pinged> {
    let kind = status.backend.as_ref().and_then(|backend| backend.kind);
    let lease = status.lease.as_ref().context("weftd has no lease yet: see `weft status`")?;
    let subnet = lease.subnets().context("the lease that weftd tells of has no subnet")?;
    // Without a device the host's own address would be the source, which is no pod's.
    let gateways = [
        subnet.v4().map(|it| IpAddr::V4(it.first_host())),
        subnet.v6().map(|it| IpAddr::V6(it.first_host())),
    ];
    let gateways = gateways.into_iter().flatten().filter(|_| !has_device(kind)).collect::<Vec<_>>();
    if let Some(name) = node
        && name.parse().is_ok_and(|address| subnet.contains(address))
    {
        bail!(
            "{name} is in {subnet}, this host's own subnet, where nothing passes the overlay: use \
             ping"
        );
    }
    let meant = match node {
        None => peers,
        Some(name) => std::slice::from_ref(find(peers, name)?),
    };
    if meant.is_empty() {
        bail!("weftd knows no other node");
    }
    let pod = pod.or_else(|| pod_named(node?, meant.first()?));
    if let Some((pod, peer)) = pod.zip(meant.first()) {
        check_pod(pod, peer)?;
    }
    let is_fast = status.fast_path.as_ref().is_some_and(|fast_path| fast_path.on);
    let mut reports = Vec::new();
    for some in meant.chunks(PEERS_AT_ONCE) {
        let mut legs: Vec<_> = some.iter().map(|peer| legs(peer, kind, lease, pod)).collect();
        echo::ping(&mut legs, &gateways)?;
        let own = own_addresses()?;
        for target in legs.iter_mut().flatten().filter(|it| it.leg == Leg::Host) {
            if own.contains(&target.address) {
                target.is_own();
            }
        }
        let each = some.iter().zip(legs);
        reports.extend(each.map(|(peer, legs)| Report::of(peer, legs, kind, is_fast)));
    }
    if let Some(failed) = failed_sends(status) {
        for report in reports.iter_mut().filter(|it| !it.well && it.shows != Shows::Unsendable) {
            report.conclusion.push_str(&failed);
        }
    }
    if let (Some(_), [peer], [report], true) = (node, meant, reports.as_mut_slice(), is_here) {
        let first = targets(peer).map(|targets| targets.bridge);
        let ways = pod.or(first).map(|to| match to {
            IpAddr::V4(to) => explain::pods_ways(to, status, peers),
            IpAddr::V6(to) => explain::pods_ways(to, status, peers),
        });
        ways.into_iter().for_each(|ways| report.add(ways, pod.is_some()));
    }
    Ok(Pinged { schema: SCHEMA, peers: reports })
}

fn own_addresses() -> anyhow::Result<Vec<IpAddr>> {
    let v4 = wait_for(netlink::addresses::<Ipv4Addr>())?.unwrap_or_default();
    let v6 = wait_for(netlink::addresses::<Ipv6Addr>())?.unwrap_or_default();
    let v4 = v4.into_iter().map(|it| IpAddr::V4(it.address));
    Ok(v4.chain(v6.into_iter().map(|it| IpAddr::V6(it.address))).collect())
}

/// What weftd could not send of late: the kernel refused it, which an echo into the tunnel does not
/// show.
fn failed_sends(status: &Status) -> Option<String> {
    let lately = status.drops_lately.as_ref()?;
    let of_sends = [DropReason::SendForbidden, DropReason::SendUnreachable, DropReason::SendFailed];
    let found = of_sends.map(|it| Some(format!("{} {}", lately.get(it.id())?.packets, it.id())));
    let found: Vec<_> = found.into_iter().flatten().collect();
    let each = found.join(", ");
    (!found.is_empty()).then(|| {
        format!(
            ". In the last ten minutes this host could not send some packets into the network \
             ({each}): `weft status` here says where to look"
        )
    })
}

/// The pod that is meant, if this is the address of one.
fn pod_named(name: &str, peer: &Peer) -> Option<IpAddr> {
    let address = name.parse().ok()?;
    let is_nodes = targets(peer).is_some_and(|it| [it.device, it.bridge].contains(&address));
    (peer.subnets()?.contains(address) && !is_nodes).then_some(address)
}

/// One address stands for a node, and its family for how it is asked.
fn check_pod(pod: IpAddr, peer: &Peer) -> anyhow::Result<()> {
    let Some(subnets) = peer.subnets() else { return Ok(()) };
    if !subnets.contains(pod) {
        bail!("--pod {pod} is not in {subnets}, the subnet of that node");
    }
    if targets(peer).is_some_and(|it| it.host.is_ipv4() != pod.is_ipv4()) {
        bail!(
            "that node is pinged over IPv4: name a pod by its IPv4 address, or ask `weft explain` \
             what becomes of packets to {pod}"
        );
    }
    Ok(())
}

fn find<'a>(peers: &'a [Peer], name: &str) -> anyhow::Result<&'a Peer> {
    let address: Option<IpAddr> = name.parse().ok();
    let is_meant = |peer: &&Peer| {
        peer.node.as_deref() == Some(name)
            || peer.shown_subnet() == name
            || address.is_some_and(|it| {
                let subnets = peer.subnets();
                peer.via.host() == it || subnets.is_some_and(|subnets| subnets.contains(it))
            })
    };
    let mut meant = peers.iter().filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(peer), None) => Ok(peer),
        (Some(one), Some(other)) => bail!(
            "{name} has several leases: name one of them, such as {} or {}",
            one.shown_subnet(),
            other.shown_subnet()
        ),
        (None, _) => {
            bail!("no other node has the name, address or subnet {name}; see `weft peers`")
        }
    }
}

/// Where a node may answer: over IPv4 if it has that, else over IPv6.
struct Targets {
    host: IpAddr,
    /// Its end of the overlay, if it has a device for that.
    device: IpAddr,
    /// And else.
    bridge: IpAddr,
}

fn targets(peer: &Peer) -> Option<Targets> {
    fn of<A: IpAddress>(host: A, subnet: Prefix<A>) -> Targets {
        let [device, bridge] = [subnet.network().into(), subnet.first_host().into()];
        Targets { host: host.into(), device, bridge }
    }
    match peer.via.host() {
        IpAddr::V4(host) => peer.subnet.map(|subnet| of(host, subnet)),
        IpAddr::V6(host) => peer.ipv6_subnet.map(|subnet| of(host, subnet)),
    }
}

fn legs(peer: &Peer, kind: Option<BackendKind>, lease: &Lease, pod: Option<IpAddr>) -> Vec<Echoes> {
    let Some(Targets { host: address, device, bridge }) = targets(peer) else { return Vec::new() };
    // Without a device of its own the other end is the bridge, which has the subnet's first host.
    let end = if has_device(kind) { device } else { bridge };
    let full_bytes = peer.path_mtu_bytes.unwrap_or(lease.mtu_bytes);
    let host = Echoes::new(Leg::Host, address, SMALL_BYTES);
    if !peer.state.is_sent_to() {
        return vec![host];
    }
    let mut legs = vec![
        host,
        Echoes::new(Leg::Tunnel, end, SMALL_BYTES),
        Echoes::new(Leg::TunnelFull, end, full_bytes.try_into().unwrap_or(u16::MAX)),
    ];
    legs.extend(pod.map(|pod| Echoes::new(Leg::Pod, pod, SMALL_BYTES)));
    legs
}

impl Report {
    fn of(peer: &Peer, legs: Vec<Echoes>, kind: Option<BackendKind>, is_fast: bool) -> Self {
        let shows = Shows::of(&legs, peer.state);
        let well =
            matches!(shows, Shows::Answers | Shows::HostIsDeaf | Shows::Deaf | Shows::PodAnswers)
                || shows == Shows::NotTried && !peer.state.is_alarming();
        let mut conclusion = shows.conclusion(&legs, kind);
        if peer.via.host().is_ipv6() {
            conclusion = conclusion.replace("iptables-save", "ip6tables-save");
        }
        if is_fast && shows == Shows::PodIsSilent {
            conclusion.push_str(
                ". Or something between the hosts drops UDP without a checksum: so the fast path \
                 sends what is of pods, and no other echo of these (compare with --fast-path=off)",
            );
        }
        if is_fast && [Shows::Lossy, Shows::HostOnly].contains(&shows) {
            conclusion.push_str(
                ". These echoes are the workers': what pods send by the fast path may pass all the \
                 same (`--pod` with a pod there, and `ping` from a pod here, tell)",
            );
        }
        match &peer.why {
            Some(why) if shows == Shows::NotSentTo || conclusion.is_empty() => {
                conclusion.clone_from(why);
            }
            Some(_) if !well && peer.state.is_alarming() => {
                let state = peers::shown(peer.state);
                write!(conclusion, ". weftd says {state} of it: see `weft peers`").ok();
            }
            Some(_) | None => {}
        }
        Self { subnet: peer.shown_subnet(), node: peer.node.clone(), legs, shows, conclusion, well }
    }

    /// The echoes are this host's own: `ways` are those of its pods, with a pod if one `is_pinged`.
    fn add(&mut self, ways: PodsWays, is_pinged: bool) {
        let own = &self.conclusion;
        let ends = |what: &str, parting: String| {
            format!("{what} ends on this host: {parting}. This host's own echoes: {own}")
        };
        let is_ended = matches!(ways, PodsWays::EndsThere(_) | PodsWays::EndsBack(_));
        self.conclusion = match ways {
            PodsWays::Unknown => return,
            PodsWays::NoPods(subnet) => format!(
                "{own}; no interface of this host leads to pods of {subnet}, its own: none has run \
                 here yet, or their bridge is missing, down or without an address (`weft check`)"
            ),
            PodsWays::Pass { unless: None } if !self.well => return,
            PodsWays::Pass { unless } => {
                let unless = unless.map(|unless| format!(", {unless}")).unwrap_or_default();
                format!(
                    "{own}; this host's routes and rules, as the kernel answers, let its pods' \
                     packets pass there and back, but for rules by protocol or port{unless}"
                )
            }
            PodsWays::EndsThere(parting) => ends("what this host's pods send there", parting),
            PodsWays::EndsBack(parting) => {
                ends("what comes from there for this host's pods", parting)
            }
        };
        self.well &= !(is_ended && is_pinged);
    }
}

impl Shows {
    /// With what weftd knows of the peer.
    fn of(legs: &[Echoes], state: PeerState) -> Self {
        let of = |which: Leg| legs.iter().find(|echoes| echoes.leg == which);
        let some = |leg| of(leg).is_some_and(|echoes| echoes.answered > 0);
        let is_refused = |echoes: &Echoes| echoes.refused.is_some() && echoes.answered == 0;
        let is_some_lost = |echoes: &Echoes| (1..echoes.sent).contains(&echoes.answered);
        let [host, tunnel, full] = [Leg::Host, Leg::Tunnel, Leg::TunnelFull].map(some);
        let is_pod_silent = of(Leg::Pod).is_some_and(|echoes| echoes.answered == 0);
        if !state.is_sent_to() {
            Self::NotSentTo
        } else if legs.is_empty() {
            Self::NotTried
        } else if legs.iter().any(loops) {
            Self::Loops
        } else if !tunnel {
            let mut legs = [Leg::Tunnel, Leg::Host, Leg::Pod].into_iter().filter_map(of);
            match host {
                _ if of(Leg::Tunnel).is_some_and(is_refused) => Self::Unsendable,
                false if legs.any(is_refused) => Self::Unsendable,
                _ if of(Leg::Pod).is_some_and(is_some_lost) => Self::Lossy,
                _ if some(Leg::Pod) => Self::PodAnswers,
                _ if state == PeerState::Unsendable => Self::Unsendable,
                _ if state == PeerState::Deaf && !is_pod_silent => Self::Deaf,
                false => Self::Nothing,
                // What loses most of the host's answers may lose all of the tunnel's.
                true if of(Leg::Host).is_some_and(loses_most) => Self::Lossy,
                true => Self::HostOnly,
            }
        } else if of(Leg::Pod).is_some_and(is_refused) {
            Self::Unsendable
        } else if !full && of(Leg::TunnelFull).is_some_and(is_refused) {
            Self::FullAreLost
        } else if full && is_pod_silent && !of(Leg::Tunnel).is_some_and(loses_most) {
            Self::PodIsSilent
        } else if legs.iter().any(is_some_lost) {
            Self::Lossy
        } else if !full {
            Self::FullAreLost
        } else if is_pod_silent {
            Self::PodIsSilent
        } else if host {
            Self::Answers
        } else {
            Self::HostIsDeaf
        }
    }
}

/// What [`run`] gives, for people.
pub(super) fn render(pinged: &Pinged, style: Style) -> String {
    let mut text = String::new();
    for Report { subnet, node, legs, conclusion, well, .. } in &pinged.peers {
        writeln!(text, "{subnet} {}", node.as_deref().unwrap_or_default()).ok();
        let width = legs.iter().map(|it| it.address.to_string().len()).fold(15, usize::max);
        for echoes in legs {
            let Echoes { leg, address, bytes, sent, answered, .. } = echoes;
            let took = echoes.round_trip_microseconds.map(|it| format!("  {}", milliseconds(it)));
            let refused = echoes.refused.as_ref().map(|why| format!("  not sent: {why}"));
            text += &format!(
                "  {:<11}  {:<width$}  {bytes:>5} bytes  {answered}/{sent}{}{}\n",
                leg.to_string(),
                address.to_string(),
                took.unwrap_or_default(),
                refused.unwrap_or_default(),
            );
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
mod tests;
