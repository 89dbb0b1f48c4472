//! `weft ping`: the host behind a subnet, its end of the tunnel, and the tunnel with full packets,
//! each with loss and round trip, and what follows from that.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use anyhow::{Context, bail};
use serde::Serialize;

use crate::backend_kind::BackendKind;
use crate::route::Prefix;
use crate::status::{Lease, Peer, PeerState, SCHEMA, Status};
use crate::tool::echo::{self, Echoes, Leg};
use crate::tool::explain::{self, PodsWays};
use crate::tool::peers::{self, milliseconds};
use crate::tool::style::Style;

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
    subnet: Prefix,
    node: Option<String>,
    pub(super) legs: Vec<Echoes>,
    #[serde(rename = "finding")]
    shows: Shows,
    pub(super) conclusion: String,
    pub(super) well: bool,
}

/// What the answers show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Shows {
    /// Whatever was asked.
    Answers,
    /// The host answers no pings, the rest does.
    HostIsDeaf,
    /// Nothing there answers pings, and weftd knows that packets pass all the same.
    Deaf,
    /// The pod answers, so packets pass, and its host's end of the overlay does not.
    PodAnswers,
    /// This host sends it no packets of pods.
    NotSentTo,
    /// The cause is this host.
    Unsendable,
    Nothing,
    /// The host alone answers.
    HostOnly,
    /// Full packets are lost or refused, all of them, and no small ones.
    FullAreLost,
    PodIsSilent,
    Lossy,
}

/// Pings the node of this name, public address, subnet, or any address in its subnet, which is a
/// pod's unless it is of the node's own; or else all. `status` and `peers` are what weftd says of
/// itself; of another network namespace than where it `is_here` this one's kernel knows nothing.
pub(super) fn run(
    node: Option<&str>,
    pod: Option<Ipv4Addr>,
    status: &Status,
    peers: &[Peer],
    is_here: bool,
) -> anyhow::Result<Pinged> {
    let kind = status.backend.as_ref().and_then(|backend| backend.kind);
    let lease = status.lease.as_ref().context("weftd has no lease yet: see `weft status`")?;
    // Without a device the host's own address would be the source, which is no pod's.
    let gateway = (!has_device(kind)).then(|| lease.subnet.first_host());
    if let Some(name) = node
        && name.parse().is_ok_and(|address| lease.subnet.contains(address))
    {
        bail!(
            "{name} is in {}, this host's own subnet, where nothing passes the overlay: use ping",
            lease.subnet
        );
    }
    let meant = match node {
        None => peers,
        Some(name) => std::slice::from_ref(find(peers, name)?),
    };
    if meant.is_empty() {
        bail!("weftd knows no other node");
    }
    let pod = pod.or_else(|| pod_named(node?, meant.first()?.subnet));
    if let Some((pod, subnet)) = pod.zip(meant.first().map(|peer| peer.subnet))
        && !subnet.contains(pod)
    {
        bail!("--pod {pod} is not in {subnet}, the subnet of that node");
    }
    let is_fast = status.fast_path.as_ref().is_some_and(|fast_path| fast_path.on);
    let mut reports = Vec::new();
    for some in meant.chunks(PEERS_AT_ONCE) {
        let mut legs: Vec<_> = some.iter().map(|peer| legs(peer, kind, lease, pod)).collect();
        echo::ping(&mut legs, gateway)?;
        let each = some.iter().zip(legs);
        reports.extend(each.map(|(peer, legs)| Report::of(peer, legs, kind, is_fast)));
    }
    if let (Some(_), [peer], [report], true) = (node, meant, reports.as_mut_slice(), is_here) {
        let to = pod.unwrap_or_else(|| peer.subnet.first_host());
        report.add(explain::pods_ways(to, status, peers), pod.is_some());
    }
    Ok(Pinged { schema: SCHEMA, peers: reports })
}

fn has_device(kind: Option<BackendKind>) -> bool {
    kind.is_some_and(BackendKind::has_device)
}

/// The pod that is meant, if this is the address of one.
fn pod_named(name: &str, subnet: Prefix) -> Option<Ipv4Addr> {
    let address = name.parse().ok()?;
    let is_nodes = [subnet.network(), subnet.first_host()].contains(&address);
    (subnet.contains(address) && !is_nodes).then_some(address)
}

fn find<'a>(peers: &'a [Peer], name: &str) -> anyhow::Result<&'a Peer> {
    let address: Option<Ipv4Addr> = name.parse().ok();
    let is_meant = |peer: &&Peer| {
        peer.node.as_deref() == Some(name)
            || peer.subnet.to_string() == name
            || address.is_some_and(|it| peer.via.host() == it || peer.subnet.contains(it))
    };
    let mut meant = peers.iter().filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(peer), None) => Ok(peer),
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

fn legs(
    peer: &Peer,
    kind: Option<BackendKind>,
    lease: &Lease,
    pod: Option<Ipv4Addr>,
) -> Vec<Echoes> {
    let subnet = peer.subnet;
    // Without a device of its own the other end is the bridge, which has the subnet's first host.
    let end = if has_device(kind) { subnet.network() } else { subnet.first_host() };
    let full_bytes = peer.path_mtu_bytes.unwrap_or(lease.mtu_bytes);
    let host = Echoes::new(Leg::Host, peer.via.host(), SMALL_BYTES);
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
            matches!(shows, Shows::Answers | Shows::HostIsDeaf | Shows::Deaf | Shows::PodAnswers);
        let mut conclusion = shows.conclusion(&legs, kind);
        if is_fast && shows == Shows::PodIsSilent {
            conclusion.push_str(
                ". Or something between the hosts drops UDP without a checksum: so the fast path \
                 sends what is of pods, and no other echo of these (compare with --fast-path=off)",
            );
        }
        match &peer.why {
            Some(why) if shows == Shows::NotSentTo => conclusion.clone_from(why),
            Some(_) if !well && peer.state.is_alarming() => {
                let state = peers::shown(peer.state);
                write!(conclusion, ". weftd says {state} of it: see `weft peers`").ok();
            }
            Some(_) | None => {}
        }
        Self { subnet: peer.subnet, node: peer.node.clone(), legs, shows, conclusion, well }
    }

    /// The echoes are this host's own: `ways` are those of its pods, with a pod if one `is_pinged`.
    fn add(&mut self, ways: PodsWays, is_pinged: bool) {
        let (direction, parting) = match ways {
            PodsWays::Unknown => return,
            PodsWays::Pass { unless: None } if !self.well => return,
            PodsWays::Pass { unless } => {
                let unless = unless.map(|unless| format!(", {unless}")).unwrap_or_default();
                write!(
                    self.conclusion,
                    "; this host's routes and rules, as the kernel answers, let its pods' packets \
                     pass there and back{unless}"
                )
                .ok();
                return;
            }
            PodsWays::EndsThere(parting) => ("what this host's pods send there", parting),
            PodsWays::EndsBack(parting) => ("what comes from there for this host's pods", parting),
        };
        let own = &self.conclusion;
        self.conclusion =
            format!("{direction} ends on this host: {parting}. This host's own echoes: {own}");
        self.well &= !is_pinged;
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
        } else if !tunnel {
            let mut legs = [Leg::Tunnel, Leg::Host, Leg::Pod].into_iter().filter_map(of);
            match host {
                _ if of(Leg::Tunnel).is_some_and(is_refused) => Self::Unsendable,
                false if legs.any(is_refused) => Self::Unsendable,
                _ if of(Leg::Pod).is_some_and(is_some_lost) => Self::Lossy,
                _ if some(Leg::Pod) => Self::PodAnswers,
                _ if state == PeerState::Deaf => Self::Deaf,
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

    /// What follows, and where two causes fit how to tell them apart.
    fn conclusion(self, legs: &[Echoes], kind: Option<BackendKind>) -> String {
        let text = match self {
            Self::Answers | Self::HostIsDeaf => return answers(self, legs),
            Self::NotSentTo => "this host sends it no packets: see `weft peers`",
            Self::Deaf => "it answers no pings, but packets pass, as weftd knows",
            Self::PodAnswers => return pod_answers(legs),
            Self::Unsendable => return unsendable(legs, kind),
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
                     backend or port), or weftd or flanneld does not run there with this subnet, \
                     or a firewall there drops pings to that address, which is no fault: `--pod` \
                     with a pod there tells. `weft check` on both hosts; `weft status` there says \
                     whether they arrive"
                }
                false => {
                    "the host answers, the bridge of its pods does not answer this host's pods: it \
                     may have none yet, or packets of the pods' network are lost there or on the \
                     way, or the way back to this host's subnet is another one (`weft check` and \
                     `ip route get` there)"
                }
            },
            Self::FullAreLost => return full_are_lost(legs, kind),
            Self::PodIsSilent => {
                "the overlay carries packets and the pod does not answer: look at that host's \
                 bridge, its FORWARD rules, network policies, and whether the pod runs"
            }
            Self::Lossy => return lossy(legs),
        };
        text.to_owned()
    }
}

/// The echoes are this host's own: what that leaves out is said.
fn answers(shows: Shows, legs: &[Echoes]) -> String {
    let is_pod = legs.iter().any(|it| it.leg == Leg::Pod);
    let whom = if is_pod {
        "the pod answers this host, and the overlay there"
    } else {
        "its overlay answers this host, with"
    };
    let deaf = if shows == Shows::HostIsDeaf { "; the host itself answers no pings" } else { "" };
    let there =
        if is_pod { "" } else { "the pods' bridge and firewall there (--pod ADDRESS), and " };
    format!("{whom} full packets too{deaf}; {}", not_tried(there))
}

/// What this host's own echoes do not pass, beside what is `there`.
fn not_tried(there: &str) -> String {
    format!(
        "not tried: {there}this host's pods, whose packets also pass its bridge, rules and \
         firewall (`weft explain`)"
    )
}

fn pod_answers(legs: &[Echoes]) -> String {
    let is_deaf = !legs.iter().any(|it| it.leg == Leg::Host && it.answered > 0);
    let whom =
        if is_deaf { "its host answers no pings" } else { "its host's overlay answers none" };
    format!(
        "the pod answers this host, so packets pass both ways; {whom}, as where a firewall there \
         drops what is for the host itself, so nothing is known of full packets; {}",
        not_tried("")
    )
}

fn unsendable(legs: &[Echoes], kind: Option<BackendKind>) -> String {
    // What goes behind the host says more of what pods send.
    let (of_host, behind): (Vec<_>, Vec<_>) = legs.iter().partition(|it| it.leg == Leg::Host);
    let unanswered = behind.into_iter().chain(of_host).filter(|it| it.answered == 0);
    let refused = unanswered.filter_map(|it| Some((it, it.refused.as_ref()?))).next();
    let Some((Echoes { leg, address, is_by_output, .. }, why)) = refused else {
        return String::new();
    };
    // Datagrams of a tunnel are this host's own as well.
    let is_tunnel = *leg == Leg::Host && has_device(kind);
    let text = match *is_by_output && !is_tunnel {
        true => format!(
            "this host's own packets to {address} can't be sent: {why}; what its pods send passes \
             FORWARD in place of OUTPUT, and may go"
        ),
        false => format!("this host can't send to {address}: {why}"),
    };
    text + ". `ip route get` and `weft check` here show more"
}

fn loses_most(echoes: &Echoes) -> bool {
    echoes.answered * 2 < echoes.sent
}

/// Loss may grow with the packets' length, as where a queue is full: a narrow link loses all long
/// ones.
fn lossy(legs: &[Echoes]) -> String {
    let is =
        |which, holds: fn(&Echoes) -> bool| legs.iter().any(|leg| leg.leg == which && holds(leg));
    let is_pods = is(Leg::Pod, |leg| leg.answered > 0) && is(Leg::Tunnel, |leg| leg.answered == 0);
    let counted = |is_meant: fn(Leg) -> bool| {
        // What answers nothing loses nothing, if something behind it answers.
        let is_deaf = |leg: &Echoes| leg.answered == 0 && (is_pods || leg.leg == Leg::Host);
        let counted = legs.iter().filter(|leg| is_meant(leg.leg) && !is_deaf(leg));
        let (sent, lost) = counted
            .fold((0, 0), |(sent, lost), leg| (sent + leg.sent, lost + leg.sent - leg.answered));
        format!("{lost} of {sent}")
    };
    let small = counted(|leg| leg != Leg::TunnelFull);
    let full = counted(|leg| leg == Leg::TunnelFull);
    let is_tunnels = is(Leg::Host, |leg| leg.answered == leg.sent) && is(Leg::Tunnel, loses_most);
    let where_to_look = match is_tunnels {
        true => {
            "none of the host's own: look for a rate limit in the firewalls of both hosts, and at \
             `weft drops` there"
        }
        false => {
            "a full or slow link, a shaper or a broken cable does that (`tc -s qdisc` and `ip -s \
             link` of both hosts count drops); if pods lose nothing, a firewall lets in so many \
             pings a second"
        }
    };
    let full = if is_pods { String::new() } else { format!(" and {full} full") };
    format!("packets pass, but {small} small{full} ones are lost: {where_to_look}")
}

fn full_are_lost(legs: &[Echoes], kind: Option<BackendKind>) -> String {
    let full = legs.iter().find(|leg| leg.leg == Leg::TunnelFull);
    // It says that the path is known to be narrow, or what else keeps this host from it.
    if let Some(why) = full.and_then(|leg| leg.refused.as_ref()) {
        return format!("small packets pass, and this host can't send full ones: {why}");
    }
    let cure = match kind {
        Some(BackendKind::Udp) => {
            "while TCP is in use weftd measures such a path, if the peer answers, and tells the \
             pods: `weft peers` says narrow"
        }
        Some(BackendKind::Vxlan) => {
            "correct the link, or set a smaller MTU in the Backend of the network \
             configuration"
        }
        Some(BackendKind::HostGw | BackendKind::Alloc | BackendKind::Extension) | None => {
            "correct the link, or lower the MTU of the hosts' interfaces"
        }
    };
    format!(
        "all small packets pass, and of {} full ones, sent in turn, none does: a link of the path \
         is narrower than the overlay's MTU; {cure}",
        full.map_or(0, |leg| leg.sent)
    )
}

/// What [`run`] gives, for people.
pub(super) fn render(pinged: &Pinged, style: Style) -> String {
    let mut text = String::new();
    for Report { subnet, node, legs, conclusion, well, .. } in &pinged.peers {
        writeln!(text, "{subnet} {}", node.as_deref().unwrap_or_default()).ok();
        for echoes in legs {
            let Echoes { leg, address, bytes, sent, answered, .. } = echoes;
            let took = echoes.round_trip_microseconds.map(|it| format!("  {}", milliseconds(it)));
            let refused = echoes.refused.as_ref().map(|why| format!("  not sent: {why}"));
            writeln!(
                text,
                "  {:<11}  {:<15}  {bytes:>5} bytes  {answered}/{sent}{}{}",
                leg.to_string(),
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
mod tests;
