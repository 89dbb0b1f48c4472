//! `weft explain`: what this host does with a packet, by the rules of the dataplane itself and the
//! peers that weftd knows now.

mod kernel;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use serde::Serialize;

use crate::backend_kind::{BackendKind, CarriedBy, UDP_PORT};
use crate::forward::decide::{self, Leased, Local, Refusal};
use crate::packet::ecn::Ecn;
use crate::packet::icmp::ErrorKind;
use crate::packet::ipv4::{HEADER_BYTES_MIN, Ipv4Header};
use crate::route::{self, Prefix, Table};
use crate::stats::DropReason;
use crate::status::{Lease, LeaseIpv4, Peer, PeerState, SCHEMA, Status, TunnelEnd};
use crate::tool::arguments::Question;
use crate::tool::style::Style;

use self::kernel::{Answers, Asked};

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

/// What weftd says of itself, as far as it matters here.
struct ThisHost<'a> {
    lease: LeaseIpv4,
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
    let host =
        ThisHost::read(status, peers).context("weftd has no lease yet: see `weft status`")?;
    let mut steps = Vec::new();
    let last = host.explain(&question, &mut steps);
    let mut leaves = last.is_ok();
    steps.extend(last.map_or_else(Some, Some));
    if let Some(asked) = host.asked(&question, status).filter(|_| leaves) {
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
    let ends = [question.source, question.destination];
    let is_known = !is_others || ends.into_iter().all(|end| host.owner(end).is_none());
    let goes = leaves && is_known && !host.is_in_vain(question.destination);
    Ok(Explained { schema: SCHEMA, question, goes, leaves, steps, not_considered: NOT_CONSIDERED })
}

/// What the kernel does with what a pod of this host and one of a peer send each other.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PodsWays {
    /// It gives no answer.
    Unknown,
    /// No interface leads to pods of this subnet, which is this host's.
    NoPods(Prefix),
    /// It passes both on, or if not, for this reason.
    Pass { unless: Option<String> },
    /// What pods here send ends here, for this reason.
    EndsThere(String),
    /// The same of what comes back.
    EndsBack(String),
}

/// Asks the kernel about `pod`, which is a peer's, and any pod of this host.
pub(super) fn pods_ways(pod: Ipv4Addr, status: &Status, peers: &[Peer]) -> PodsWays {
    asked_ways(pod, status, peers, kernel::ask)
}

fn asked_ways(
    pod: Ipv4Addr,
    status: &Status,
    peers: &[Peer],
    ask: impl Fn(&Asked<'_>) -> anyhow::Result<Answers>,
) -> PodsWays {
    let Some(host) = ThisHost::read(status, peers) else { return PodsWays::Unknown };
    let own = first_pod(host.lease.subnet);
    let length_bytes = HEADER_BYTES_MIN as u16;
    let mut unless = None;
    for (source, destination) in [(own, pod), (pod, own)] {
        let question = Question { source, destination, length_bytes, dont_fragment: false };
        let Some(asked) = host.asked(&question, status) else { return PodsWays::Unknown };
        let Ok(answers) = ask(&asked) else { return PodsWays::Unknown };
        if !answers.has_pods(&asked) {
            return PodsWays::NoPods(host.lease.subnet);
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
pub(super) fn first_pod(subnet: Prefix) -> Ipv4Addr {
    Ipv4Addr::from_bits(subnet.first_host().to_bits() + 1)
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
fn leased(address: Ipv4Addr, peer: &Peer) -> String {
    let name = peer.node.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    format!("{address} is in the lease {} of {}{name}", peer.shown_subnet(), peer.via)
}

fn dropped(reason: DropReason) -> String {
    format!("dropped as {}: {}", reason.id(), reason.describe())
}

impl<'a> ThisHost<'a> {
    fn read(status: &'a Status, peers: &'a [Peer]) -> Option<Self> {
        let Lease { mtu_bytes, .. } = *status.lease.as_ref()?;
        let lease = status.lease.as_ref()?.ipv4()?;
        let tunnel = peers.iter().find_map(|peer| peer.via.tunnel(UDP_PORT));
        let port = tunnel.map_or(UDP_PORT, |tunnel| tunnel.port());
        let underlay = match status.tunnel {
            Some(TunnelEnd::Udp(address)) => address,
            Some(TunnelEnd::Vxlan { .. }) | None => SocketAddrV4::new(lease.public_ip, port),
        };
        let kind = status.backend.as_ref()?.kind?;
        Some(Self { lease, mtu_bytes: mtu_bytes.try_into().ok()?, underlay, kind, peers })
    }

    fn explain(&self, question: &Question, steps: &mut Vec<String>) -> LastStep {
        let Question { source, destination, .. } = *question;
        let LeaseIpv4 { network, subnet, .. } = self.lease;
        match (subnet.contains(source), subnet.contains(destination)) {
            (true, true) => Ok(format!(
                "both are in {subnet}, this host's subnet: its bridge carries it, weftd does not \
                 see it"
            )),
            (true, false) if !network.contains(destination) => Ok(format!(
                "{destination} is outside {network}: the host routes it, and masquerades it if \
                 that is asked for; weftd does not see it"
            )),
            (true, false) => self.outward(question, steps),
            (false, true) => self.inward(question, steps),
            (false, false) => Err(format!(
                "neither address is in {subnet}, this host's subnet: ask on the host of the \
                 sender; if that is this host, its address is in no lease"
            )),
        }
    }

    /// What the kernel is to be asked about a packet from or to another host.
    fn asked<'b>(&self, question: &Question, status: &'b Status) -> Option<Asked<'b>> {
        let Question { source, destination, .. } = *question;
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
        let (_, host) = self.owner(far).filter(|_| subnet.contains(near))?.ipv4()?;
        Some(Asked {
            near,
            far,
            is_outward,
            device: status.device.as_deref(),
            interface: status.interface.as_deref()?,
            host,
            tunnel: status.tunnel.map(|tunnel| {
                [*self.underlay.ip(), host].map(|end| SocketAddrV4::new(end, tunnel.port()))
            }),
        })
    }

    fn owner(&self, address: Ipv4Addr) -> Option<&Peer> {
        let of = |peer: &&Peer| peer.subnet.filter(|subnet| subnet.contains(address));
        let holding = self.peers.iter().filter_map(|peer| Some((of(&peer)?, peer)));
        holding.max_by_key(|(subnet, _)| subnet.length_bits()).map(|(_, peer)| peer)
    }

    /// Whether what this host sends to it is not known to arrive.
    fn is_in_vain(&self, destination: Ipv4Addr) -> bool {
        let state = self.owner(destination).map(|peer| peer.state);
        matches!(state, Some(PeerState::Silent | PeerState::Refused))
    }

    /// A packet of this host's pods.
    fn outward(&self, question: &Question, steps: &mut Vec<String>) -> LastStep {
        let destination = question.destination;
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
        let path_mtu_bytes = peer.path_mtu_bytes.and_then(|path| path.try_into().ok());
        let path_mtu_bytes = path_mtu_bytes.unwrap_or(self.mtu_bytes);
        let length_bytes = question.length_bytes;
        if length_bytes > path_mtu_bytes {
            if question.dont_fragment {
                return Err(format!(
                    "{length_bytes} bytes are more than the path's MTU of {path_mtu_bytes}: with \
                     Don't Fragment the kernel drops it and tells the sender so"
                ));
            }
            steps.push(format!("the kernel cuts it into fragments of at most {path_mtu_bytes}"));
        }
        let sent = match self.kind.carried_by() {
            CarriedBy::Workers => self.sent(question, length_bytes.min(path_mtu_bytes), peer)?,
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
            peer.subnet.map(|subnet| subnet.network().to_string()).unwrap_or_default()
        );
        if peer.state == PeerState::Unsendable { Err(state) } else { Ok(state) }
    }

    /// What the udp backend does with it.
    fn sent(&self, question: &Question, length_bytes: u16, peer: &Peer) -> LastStep {
        let (header, packet) = packet(question, length_bytes);
        let (local, table) = (self.local(false), self.table());
        match decide::egress(local.host(&table), &header, &packet, packet.len()) {
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
                Err(format!("{} Its sender is told: {}.", dropped(reason), told(kind)))
            }
            Err(Refusal { reason, answer: None }) => Err(dropped(reason)),
        }
    }

    /// A packet of another host's pods, which that host sends as it should.
    fn inward(&self, question: &Question, steps: &mut Vec<String>) -> LastStep {
        match self.kind.carried_by() {
            CarriedBy::Workers => {}
            CarriedBy::Kernel => return Ok(format!("the kernel delivers it ({})", self.kind)),
            CarriedBy::Others => return Ok(self.unknown(question.destination)),
        }
        let owner = self.owner(question.source);
        steps.extend(owner.map(|owner| leased(question.source, owner)));
        let (header, packet) = packet(question, question.length_bytes);
        // What an honest owner sends passes the strict check; nobody else's does.
        let (local, table) = (self.local(owner.is_some()), self.table());
        let sender = owner.and_then(|owner| owner.via.tunnel(UDP_PORT)).unwrap_or(STRANGER);
        match decide::ingress(local.host(&table), sender, Ecn::NotEct, &header, &packet, &mut None)
        {
            Ok(_) if owner.is_none() => Ok(format!(
                "no lease covers {}: it is delivered, whoever sends it, unless this weftd has \
                 --peer-check=strict, which drops it as src-not-leased",
                question.source
            )),
            Ok(_) => Ok("received from there, it is delivered to the host's routes".to_owned()),
            Err(refusal) => Err(dropped(refusal.reason)),
        }
    }

    /// Of what weftd has no part in.
    fn unknown(&self, destination: Ipv4Addr) -> String {
        format!(
            "what carries it is not weftd ({}), which does not know whether it goes: `ip route get \
             {destination}` shows the kernel's route",
            self.kind
        )
    }

    fn local(&self, is_strict: bool) -> Local {
        let Self { underlay, mtu_bytes, lease: LeaseIpv4 { network, subnet, .. }, .. } = *self;
        let v4 = Leased { network, subnet };
        Local { v4, v6: None, underlay, mtu_bytes, is_strict }
    }

    fn table(&self) -> Table {
        let used = self.peers.iter().filter(|peer| peer.state.is_sent_to());
        let routed = used
            .filter_map(|peer| Some(route::Peer::new(peer.subnet?, peer.via.tunnel(UDP_PORT)?)));
        Table::build(routed.map(Arc::new).collect())
    }
}

fn told(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NetUnreachable => "network unreachable",
        ErrorKind::TimeExceeded => "time exceeded",
        ErrorKind::PacketTooBig { .. } => "fragmentation needed",
    }
}

/// An ordinary packet with nothing in it, behind its header.
fn packet(question: &Question, total_bytes: u16) -> (Ipv4Header, Vec<u8>) {
    let Question { source, destination, dont_fragment, .. } = *question;
    let header = Ipv4Header {
        header_bytes: HEADER_BYTES_MIN as u16,
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
    use crate::status::{Backend, Traffic};
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
            asked_ways([10, 5, 2, 7].into(), &status, &peers, |asked| {
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
        let unasked = asked_ways([10, 5, 2, 7].into(), &status, &peers, |_| anyhow::bail!("no"));
        assert_eq!(unasked, PodsWays::Unknown);
        // A bridge without an address.
        let gone = asked_ways([10, 5, 2, 7].into(), &status, &peers, |_| {
            let near = Err(Errno::NETUNREACH.into());
            let links = links();
            Ok(Answers { links, near, comes_by: None, across: None, marked: vec![], outer: None })
        });
        assert!(matches!(gone, PodsWays::NoPods(_)));
    }
}
