//! `weft explain`: what this host does with a packet, by the rules of the dataplane itself and the
//! peers that weftd knows now.

mod kernel;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use serde::Serialize;

use crate::backend_kind::{BackendKind, CarriedBy, UDP_PORT};
use crate::forward::decide::{self, Host, Leased, Local, Refusal};
use crate::host::state::KernelFamily;
use crate::packet::ecn::Ecn;
use crate::packet::header::Header;
use crate::packet::icmp::ErrorKind;
use crate::route::{self, Prefix, Routed, Table};
use crate::stats::DropReason;
use crate::status::{Lease, Peer, PeerState, SCHEMA, Status, TunnelEnd, Via};
use crate::tool::arguments::Question;
use crate::tool::style::Style;

use self::kernel::{Answers, Asked, Outer};

/// Of a host that is no peer (RFC 5737).
const STRANGER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(198, 51, 100, 1), UDP_PORT);

/// What none of this looks at.
const NOT_CONSIDERED: &str = "not considered: firewalls and network policies of both hosts and of \
                              the network between them, masquerading, the routes inside the pods, \
                              and what the other host does";

/// What becomes of a packet, for scripts as for people.
#[derive(Debug, Serialize)]
pub(super) struct Explained {
    schema: u32,
    #[serde(flatten)]
    question: Question,
    /// Whether the packet goes its way.
    pub(super) goes: bool,
    /// Whether it leaves this host at least.
    #[serde(skip)]
    leaves: bool,
    /// From the pod on.
    steps: Vec<String>,
    not_considered: &'static str,
}

/// The last step: the packet goes, or it ends here.
type LastStep = Result<String, String>;

/// A family of packets that are explained: what weftd tells of it.
pub(super) trait ToldFamily: Routed + KernelFamily {
    /// The overlay, and this host's part of it.
    fn leased(lease: &Lease) -> Option<Leased<Self>>;

    /// A peer's subnet.
    fn subnet(peer: &Peer) -> Option<Prefix<Self>>;

    /// Where its packets go.
    fn via(peer: &Peer) -> Option<Via>;

    /// The overlay's device.
    fn device(status: &Status) -> Option<&str>;
}

impl ToldFamily for Ipv4Addr {
    fn leased(lease: &Lease) -> Option<Leased<Self>> {
        Some(Leased { network: lease.network?, subnet: lease.subnet? })
    }

    fn subnet(peer: &Peer) -> Option<Prefix> {
        peer.subnet
    }

    fn via(peer: &Peer) -> Option<Via> {
        Some(peer.via)
    }

    fn device(status: &Status) -> Option<&str> {
        status.device.as_deref()
    }
}

impl ToldFamily for Ipv6Addr {
    fn leased(lease: &Lease) -> Option<Leased<Self>> {
        let ipv6 = lease.ipv6?;
        Some(Leased { network: ipv6.network, subnet: ipv6.subnet })
    }

    fn subnet(peer: &Peer) -> Option<Prefix<Self>> {
        peer.ipv6_subnet
    }

    fn via(peer: &Peer) -> Option<Via> {
        peer.ipv6_via
    }

    fn device(status: &Status) -> Option<&str> {
        status.ipv6_device.as_deref().or(status.device.as_deref())
    }
}

/// What weftd says of itself, as far as it matters here.
struct ThisHost<'a, A: ToldFamily> {
    lease: Leased<A>,
    /// The one of IPv4, which the udp backend has.
    v4: Option<Leased<Ipv4Addr>>,
    mtu_bytes: u16,
    underlay: SocketAddrV4,
    kind: BackendKind,
    peers: &'a [Peer],
}

/// What becomes of it, by what weftd says of itself and, if it `is_here`, by what the kernel
/// answers: of another network namespace this one's knows nothing.
pub(super) fn run(
    question: Question,
    status: &Status,
    peers: &[Peer],
    is_here: bool,
) -> anyhow::Result<Explained> {
    match (question.source, question.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            explained(question, Ends { source, destination }, status, peers, is_here)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            // Nobody but its sender may fragment it.
            let question = Question { dont_fragment: true, ..question };
            explained(question, Ends { source, destination }, status, peers, is_here)
        }
        (source, destination) => bail!("{source} and {destination} are of different families"),
    }
}

/// The ends of the packet.
#[derive(Debug, Clone, Copy)]
struct Ends<A> {
    source: A,
    destination: A,
}

fn explained<A: ToldFamily>(
    question: Question,
    ends: Ends<A>,
    status: &Status,
    peers: &[Peer],
    is_here: bool,
) -> anyhow::Result<Explained> {
    status.lease.as_ref().context("weftd has no lease yet: see `weft status`")?;
    let host = ThisHost::<A>::read(status, peers);
    let host = host.with_context(|| format!("the network has no addresses as {}", ends.source))?;
    let mut steps = Vec::new();
    let last = host.explain(&question, ends, &mut steps);
    let mut leaves = last.is_ok();
    steps.extend(last.map_or_else(Some, Some));
    if let Some(asked) = host.asked(ends, status).filter(|_| leaves) {
        let elsewhere = || anyhow!("weftd is in another network namespace");
        let answers = if is_here { kernel::ask(&asked) } else { Err(elsewhere()) };
        let step = match answers {
            Ok(answers) => match answers.agree(&asked) {
                Ok(()) => answers.parting_by_mark(&asked),
                Err(parting) => {
                    leaves = false;
                    Some(format!("but {parting}"))
                }
            },
            Err(error) => Some(format!("what the kernel does with it is not known: {error:#}")),
        };
        steps.extend(step);
    }
    let is_others = host.kind.carried_by() == CarriedBy::Others;
    let both = [ends.source, ends.destination];
    let is_known = !is_others || both.into_iter().all(|end| host.owner(end).is_none());
    let goes = leaves && is_known && !host.is_in_vain(ends.destination);
    Ok(Explained { schema: SCHEMA, question, goes, leaves, steps, not_considered: NOT_CONSIDERED })
}

/// What the kernel does with what a pod of this host and one of a peer send each other.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PodsWays {
    /// It gives no answer.
    Unknown,
    /// No interface leads to pods of this subnet, which is this host's.
    NoPods(String),
    /// It passes both on, or if not, for this reason.
    Pass { unless: Option<String> },
    /// What pods here send ends here, for this reason.
    EndsThere(String),
    /// The same of what comes back.
    EndsBack(String),
}

/// Asks the kernel about `pod`, which is a peer's, and any pod of this host.
pub(super) fn pods_ways<A: ToldFamily>(pod: A, status: &Status, peers: &[Peer]) -> PodsWays {
    asked_ways(pod, status, peers, kernel::ask)
}

fn asked_ways<A: ToldFamily>(
    pod: A,
    status: &Status,
    peers: &[Peer],
    ask: impl Fn(&Asked<'_, A>) -> anyhow::Result<Answers>,
) -> PodsWays {
    let Some(host) = ThisHost::read(status, peers) else { return PodsWays::Unknown };
    let own = first_pod(host.lease.subnet);
    let mut unless = None;
    for (source, destination) in [(own, pod), (pod, own)] {
        let Some(asked) = host.asked(Ends { source, destination }, status) else {
            return PodsWays::Unknown;
        };
        let Ok(answers) = ask(&asked) else { return PodsWays::Unknown };
        if !answers.has_pods(&asked) {
            return PodsWays::NoPods(host.lease.subnet.to_string());
        }
        match answers.agree(&asked) {
            Ok(()) => unless = unless.or_else(|| answers.parting_by_mark(&asked)),
            Err(why) if asked.is_outward => return PodsWays::EndsThere(why),
            Err(why) => return PodsWays::EndsBack(why),
        }
    }
    PodsWays::Pass { unless }
}

/// An address that a pod may have: the first host is the bridge.
pub(super) fn first_pod<A: KernelFamily>(subnet: Prefix<A>) -> A {
    let first = subnet.first_host();
    first.following().unwrap_or(first)
}

/// What [`run`] gives, for people.
pub(super) fn render(explained: &Explained, style: Style) -> String {
    let Explained { question: Question { source, destination, .. }, goes, leaves, .. } = explained;
    let shown = match (*goes, *leaves) {
        (true, _) => style.good("goes"),
        (false, true) => style.bad("leaves this host, and nothing shows that it arrives"),
        (false, false) => style.bad("ends here"),
    };
    let steps: String = explained.steps.iter().map(|step| format!("  {step}\n")).collect();
    format!("{source} to {destination}: {shown}\n{steps}  ({NOT_CONSIDERED})\n")
}

/// Where a packet is headed: `10.5.2.7 is in the lease 10.5.2.0/24 of 192.0.2.2:8285 (b)`.
fn leased<A: ToldFamily>(address: A, peer: &Peer) -> String {
    let name = peer.node.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    let subnet = A::subnet(peer).map(|subnet| subnet.to_string()).unwrap_or_default();
    let via = A::via(peer).unwrap_or(peer.via);
    format!("{address} is in the lease {subnet} of {via}{name}")
}

fn dropped(reason: DropReason) -> String {
    format!("dropped as {}: {}", reason.id(), reason.describe())
}

impl<'a, A: ToldFamily> ThisHost<'a, A> {
    fn read(status: &'a Status, peers: &'a [Peer]) -> Option<Self> {
        let Lease { mtu_bytes, public_ip, .. } = *status.lease.as_ref()?;
        let lease = A::leased(status.lease.as_ref()?)?;
        let tunnel = peers.iter().find_map(|peer| peer.via.tunnel(UDP_PORT));
        let port = tunnel.map_or(UDP_PORT, |tunnel| tunnel.port());
        let underlay = match status.tunnel {
            Some(TunnelEnd::Udp(address)) => address,
            Some(TunnelEnd::Vxlan { .. }) | None => {
                SocketAddrV4::new(public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED), port)
            }
        };
        let kind = status.backend.as_ref()?.kind?;
        let v4 = Ipv4Addr::leased(status.lease.as_ref()?);
        Some(Self { lease, v4, mtu_bytes: mtu_bytes.try_into().ok()?, underlay, kind, peers })
    }

    fn explain(&self, question: &Question, ends: Ends<A>, steps: &mut Vec<String>) -> LastStep {
        let Ends { source, destination } = ends;
        let Leased { network, subnet } = self.lease;
        match (subnet.contains(source), subnet.contains(destination)) {
            (true, true) => Ok(format!(
                "both are in {subnet}, this host's subnet: its bridge carries it, weftd does not \
                 see it"
            )),
            (true, false) if !network.contains(destination) => Ok(format!(
                "{destination} is outside {network}: the host routes it, and masquerades it if \
                 that is asked for; weftd does not see it"
            )),
            (true, false) => self.outward(question, ends, steps),
            (false, true) => self.inward(question, ends, steps),
            (false, false) => Err(format!(
                "neither address is in {subnet}, this host's subnet: ask on the host of the \
                 sender; if that is this host, its address is in no lease"
            )),
        }
    }

    /// What the kernel is to be asked about a packet from or to another host.
    fn asked<'b>(&self, ends: Ends<A>, status: &'b Status) -> Option<Asked<'b, A>> {
        let Ends { source, destination } = ends;
        let is_outward = self.lease.subnet.contains(source);
        let (near, far) = if is_outward { (source, destination) } else { (destination, source) };
        let subnet = self.lease.subnet;
        // The device's and the bridge's are this host's own, and nothing is forwarded for them.
        if near == subnet.network() || near == subnet.first_host() {
            return None;
        }
        // The routes of commands lead where these want.
        if self.kind.carried_by() == CarriedBy::Others {
            return None;
        }
        let host = A::via(self.owner(far).filter(|_| subnet.contains(near))?)?.host();
        Some(Asked {
            near,
            far,
            is_outward,
            device: A::device(status),
            interface: status.interface.as_deref()?,
            host,
            tunnel: status.tunnel.map(|tunnel| match host {
                IpAddr::V4(host) => Outer::Datagram(
                    [*self.underlay.ip(), host].map(|end| SocketAddrV4::new(end, tunnel.port())),
                ),
                IpAddr::V6(_) => Outer::ToHost,
            }),
        })
    }

    fn owner(&self, address: A) -> Option<&Peer> {
        let of = |peer: &&Peer| A::subnet(peer).filter(|subnet| subnet.contains(address));
        let holding = self.peers.iter().filter_map(|peer| Some((of(&peer)?, peer)));
        holding.max_by_key(|(subnet, _)| subnet.length_bits()).map(|(_, peer)| peer)
    }

    /// Whether what this host sends to it is not known to arrive.
    fn is_in_vain(&self, destination: A) -> bool {
        let state = self.owner(destination).map(|peer| peer.state);
        matches!(state, Some(PeerState::Silent | PeerState::Refused))
    }

    /// A packet of this host's pods.
    fn outward(&self, question: &Question, ends: Ends<A>, steps: &mut Vec<String>) -> LastStep {
        let destination = ends.destination;
        let Some(peer) = self.owner(destination) else {
            let what = match self.kind.carried_by() {
                CarriedBy::Workers => {
                    "weftd drops it as no-route and answers that the network is unreachable"
                }
                CarriedBy::Kernel | CarriedBy::Others => "the kernel has no route for it",
            };
            return Err(format!("no lease covers {destination}: {what}; see `weft peers`"));
        };
        steps.push(leased(destination, peer));
        if !peer.state.is_sent_to() {
            let state = peer.state;
            return Err(format!("that peer is {state}: no packets go there, see `weft peers`"));
        }
        if A::via(peer).is_none() {
            return Err("that peer takes no packets of this family: none go there".to_owned());
        }
        let path_mtu_bytes = peer.path_mtu_bytes.and_then(|path| path.try_into().ok());
        let path_mtu_bytes = path_mtu_bytes.unwrap_or(self.mtu_bytes);
        let length_bytes = question.length_bytes;
        if length_bytes > path_mtu_bytes {
            if question.dont_fragment {
                return Err(format!(
                    "{length_bytes} bytes are more than the path's MTU of {path_mtu_bytes}: the \
                     kernel drops it and tells the sender so ({})",
                    told::<A>(ErrorKind::PacketTooBig { next_hop_mtu_bytes: path_mtu_bytes })
                ));
            }
            steps.push(format!("the kernel cuts it into fragments of at most {path_mtu_bytes}"));
        }
        let sent = match self.kind.carried_by() {
            CarriedBy::Workers => {
                self.sent(ends, question, length_bytes.min(path_mtu_bytes), peer)?
            }
            CarriedBy::Kernel => format!("the kernel carries it ({})", self.kind),
            CarriedBy::Others => self.unknown(destination),
        };
        if !peer.state.is_alarming() {
            return Ok(sent);
        }
        steps.push(sent);
        let state = format!(
            "but that peer is {}: {}; try `weft ping {}`",
            peer.state.name().to_uppercase(),
            peer.why.as_deref().unwrap_or("it answers nothing"),
            peer.shown_subnet()
        );
        if peer.state == PeerState::Unsendable { Err(state) } else { Ok(state) }
    }

    /// What the udp backend does with it.
    fn sent(&self, ends: Ends<A>, question: &Question, length_bytes: u16, peer: &Peer) -> LastStep {
        let (header, packet) = packet(ends, length_bytes, question.dont_fragment);
        let (local, table) = (self.local(false)?, self.table());
        let host = Host { local: &local, leased: &self.lease, table: &table };
        match decide::egress(host, &header, &packet, packet.len()) {
            Ok(address) => {
                let by = match peer.fast_path.is_some_and(|taken| taken.packets_sent > 0) {
                    true => "the kernel's programs or a worker send it",
                    false => "a worker sends it",
                };
                let or_own = match peer.from_source_ports {
                    Some(true) => " or its worker's own port",
                    _ => "",
                };
                let from = self.underlay;
                Ok(format!("{by} in a UDP datagram from {from}{or_own} to {address}"))
            }
            Err(Refusal { reason, answer: Some(kind) }) => {
                Err(format!("{} Its sender is told: {}.", dropped(reason), told::<A>(kind)))
            }
            Err(Refusal { reason, answer: None }) => Err(dropped(reason)),
        }
    }

    /// A packet of another host's pods, which that host sends as it should.
    fn inward(&self, question: &Question, ends: Ends<A>, steps: &mut Vec<String>) -> LastStep {
        match self.kind.carried_by() {
            CarriedBy::Workers => {}
            CarriedBy::Kernel => return Ok(format!("the kernel delivers it ({})", self.kind)),
            CarriedBy::Others => return Ok(self.unknown(ends.destination)),
        }
        let owner = self.owner(ends.source);
        steps.extend(owner.map(|owner| leased(ends.source, owner)));
        let (header, packet) = packet(ends, question.length_bytes, question.dont_fragment);
        // What an honest owner sends passes the strict check; nobody else's does.
        let (local, table) = (self.local(owner.is_some())?, self.table());
        let sender = owner.and_then(|owner| owner.via.tunnel(UDP_PORT)).unwrap_or(STRANGER);
        let host = Host { local: &local, leased: &self.lease, table: &table };
        match decide::ingress(host, sender, Ecn::NotEct, &header, &packet, &mut None) {
            Ok(_) if owner.is_none() => Ok(format!(
                "no lease covers {}: it is delivered, whoever sends it, unless this weftd has \
                 --peer-check=strict, which drops it as src-not-leased",
                ends.source
            )),
            Ok(_) => Ok("received from there, it is delivered to the host's routes".to_owned()),
            Err(refusal) => Err(dropped(refusal.reason)),
        }
    }

    /// Of what weftd has no part in.
    fn unknown(&self, destination: A) -> String {
        format!(
            "what carries it is not weftd ({}), which does not know whether it goes: `ip route get \
             {destination}` shows the kernel's route",
            self.kind
        )
    }

    fn local(&self, is_strict: bool) -> Result<Local, String> {
        let Self { underlay, mtu_bytes, v4, .. } = *self;
        let v4 = v4.ok_or("weftd says no subnet of IPv4, over which the udp backend sends")?;
        Ok(Local { v4, v6: None, underlay, mtu_bytes, is_strict })
    }

    fn table(&self) -> Table {
        let used = self.peers.iter().filter(|peer| peer.state.is_sent_to());
        let routed = used.filter_map(|peer| {
            let new = route::Peer::new(peer.subnet?, peer.via.tunnel(UDP_PORT)?);
            let subnet_v6 = peer.ipv6_subnet.filter(|_| peer.ipv6_via.is_some());
            Some(route::Peer { subnet_v6, ..new })
        });
        Table::build(routed.map(Arc::new).collect())
    }
}

fn told<A: ToldFamily>(kind: ErrorKind) -> &'static str {
    let is_v4 = A::BITS == 32;
    match kind {
        ErrorKind::NetUnreachable if is_v4 => "network unreachable",
        ErrorKind::NetUnreachable => "no route",
        ErrorKind::TimeExceeded => "time exceeded",
        ErrorKind::PacketTooBig { .. } if is_v4 => "fragmentation needed",
        ErrorKind::PacketTooBig { .. } => "packet too big",
    }
}

/// An ordinary packet with nothing in it, behind its header.
fn packet<A: ToldFamily>(
    ends: Ends<A>,
    total_bytes: u16,
    dont_fragment: bool,
) -> (Header<A>, Vec<u8>) {
    let Ends { source, destination } = ends;
    let header = Header {
        header_bytes: A::HEADER_BYTES_MIN as u16,
        ecn: Ecn::NotEct,
        total_bytes,
        id: 0,
        dont_fragment,
        more_fragments: false,
        fragment_offset_bytes: 0,
        ttl: 64,
        // For experiments (RFC 3692): nothing looks for ports in it.
        protocol: 253,
        source,
        destination,
    };
    (header, vec![0; total_bytes.into()])
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::host::state::PathToHost;
    use crate::status::{Backend, LeaseIpv6, Traffic};
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
    fn packets_of_ipv6_are_told_by_their_own_rules() {
        const POD: &str = "fd00:5:0:1::9";
        let with_v6 = |kind| {
            let mut status = status(kind);
            let (network, subnet) = ("fd00:5::/48", "fd00:5:0:1::/64");
            let [network, subnet] = [network, subnet].map(|text| text.parse().unwrap());
            status.lease.as_mut().unwrap().ipv6 =
                Some(LeaseIpv6 { network, subnet, public_ip: None });
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
            (("fd00:5:0:2::7", POD), 84, "delivered", true),
            (("::1", POD), 84, "src-martian", false),
        ] {
            let (text, goes) = told(BackendKind::Udp, &peers, words, length_bytes);
            assert!(text.contains(expected), "{words:?} {length_bytes}: {text}");
            assert_eq!(goes, expected_goes, "{words:?} {length_bytes}: {text}");
        }
        let vxlan = [peer(2, Some("fd99::2"))];
        let (text, goes) = told(BackendKind::Vxlan, &vxlan, (POD, "fd00:5:0:2::7"), 84);
        assert!(text.contains("of fd99::2") && goes, "{text}");
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
                Ok(Answers { links: links(), near, comes_by, across, marked: vec![], outer: None })
            })
        };
        assert_eq!(ways(None), PodsWays::Pass { unless: None });
        assert!(matches!(ways(Some(true)), PodsWays::EndsThere(_)));
        let PodsWays::EndsBack(why) = ways(Some(false)) else { panic!("it does not end") };
        assert!(why.contains("prohibit") && why.contains("iif eth0"), "{why}");
        let unasked =
            asked_ways(Ipv4Addr::new(10, 5, 2, 7), &status, &peers, |_| anyhow::bail!("no"));
        assert_eq!(unasked, PodsWays::Unknown);
        // A bridge without an address.
        let gone = asked_ways(Ipv4Addr::new(10, 5, 2, 7), &status, &peers, |_| {
            let near = Err(Errno::NETUNREACH.into());
            let links = links();
            Ok(Answers { links, near, comes_by: None, across: None, marked: vec![], outer: None })
        });
        assert!(matches!(gone, PodsWays::NoPods(_)));
    }
}
