//! `weft explain`: what this host does with a packet, by the rules of the dataplane itself and the
//! peers that weftd knows now.

mod kernel;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use anyhow::{Context, bail};
use serde::Serialize;

use crate::backend_kind::{BackendKind, CarriedBy, UDP_PORT};
use crate::forward::decide::{self, EgressVerdict, IngressVerdict, Local};
use crate::packet::checksum;
use crate::packet::ecn::Ecn;
use crate::packet::icmp::ErrorKind;
use crate::packet::ipv4::{HEADER_BYTES_MIN, Ipv4Header};
use crate::route::{self, Table};
use crate::status::{Lease, Peer, SCHEMA, Status, TunnelEnd};
use crate::tool::style::Style;

use self::kernel::{Answers, Asked};

/// Of a host that is no peer (RFC 5737).
const STRANGER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(198, 51, 100, 1), UDP_PORT);

/// What none of this looks at.
const NOT_CONSIDERED: &str = "not considered: firewalls and network policies of both hosts and of \
                              the network between them, masquerading, the routes inside the pods, \
                              and what the other host does";

/// The packet that is asked about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question {
    pub(super) source: Ipv4Addr,
    pub(super) destination: Ipv4Addr,
    pub(super) length_bytes: u16,
    pub(super) dont_fragment: bool,
}

/// What becomes of it.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    goes: bool,
    /// From the pod on, a step each.
    steps: Vec<String>,
}

impl Answer {
    fn goes(step: impl Into<String>) -> Self {
        Self { goes: true, steps: vec![step.into()] }
    }

    fn ends(step: impl Into<String>) -> Self {
        Self { goes: false, steps: vec![step.into()] }
    }

    fn after(mut self, step: impl Into<String>) -> Self {
        self.steps.insert(0, step.into());
        self
    }
}

/// The same, for scripts as for people.
#[derive(Debug, Serialize)]
pub(super) struct Explained {
    schema: u32,
    source: Ipv4Addr,
    destination: Ipv4Addr,
    length_bytes: u16,
    dont_fragment: bool,
    /// Whether the packet goes its way.
    pub(super) goes: bool,
    steps: Vec<String>,
    not_considered: &'static str,
}

/// What weftd says of itself, as far as it matters here.
struct Host<'a> {
    lease: &'a Lease,
    mtu_bytes: u16,
    underlay: SocketAddrV4,
    kind: BackendKind,
    peers: &'a [Peer],
}

/// What becomes of it, by what weftd says of itself and, if it `is_here`, by what the kernel
/// answers: of another network namespace this one's knows nothing.
pub(super) fn run(
    question: &Question,
    status: &Status,
    peers: &[Peer],
    is_here: bool,
) -> anyhow::Result<Explained> {
    let ask = |asked: &Asked<'_>| match is_here {
        true => kernel::ask(asked),
        false => bail!("weftd is in another network namespace"),
    };
    explain(question, status, peers, ask)
}

fn explain(
    question: &Question,
    status: &Status,
    peers: &[Peer],
    ask: impl FnOnce(&Asked<'_>) -> anyhow::Result<Answers>,
) -> anyhow::Result<Explained> {
    let host = Host::read(status, peers).context("weftd has no lease yet: see `weft status`")?;
    let Question { source, destination, length_bytes, dont_fragment } = *question;
    if usize::from(length_bytes) < HEADER_BYTES_MIN {
        bail!("a packet has at least {HEADER_BYTES_MIN} bytes");
    }
    let Answer { mut goes, mut steps } = host.explain(question);
    if let Some(asked) = host.asked(question, status).filter(|_| goes) {
        let parting = match ask(&asked) {
            Ok(answers) => answers.parting(&asked),
            Err(error) => {
                steps.push(format!("what the kernel does with it is not known: {error:#}"));
                None
            }
        };
        goes = parting.is_none();
        steps.extend(parting);
    }
    Ok(Explained {
        schema: SCHEMA,
        source,
        destination,
        length_bytes,
        dont_fragment,
        goes,
        steps,
        not_considered: NOT_CONSIDERED,
    })
}

/// What [`run`] gives, for people.
pub(super) fn render(explained: &Explained, style: Style) -> String {
    let Explained { source, destination, goes, steps, not_considered, .. } = explained;
    let shown = if *goes { style.good("goes") } else { style.bad("ends here") };
    let steps: String = steps.iter().map(|step| format!("  {step}\n")).collect();
    format!("{source} to {destination}: {shown}\n{steps}  ({not_considered})\n")
}

/// Where a packet is headed: `10.5.2.7 is in the lease 10.5.2.0/24 of 192.0.2.2:8285 (b)`.
fn leased(address: Ipv4Addr, peer: &Peer) -> String {
    let name = peer.node.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    format!("{address} is in the lease {} of {}{name}", peer.subnet, peer.via)
}

impl<'a> Host<'a> {
    fn read(status: &'a Status, peers: &'a [Peer]) -> Option<Self> {
        let lease = status.lease.as_ref()?;
        let port = peers.first().map_or(UDP_PORT, |peer| peer.via.tunnel(UDP_PORT).port());
        let underlay = match status.tunnel {
            Some(TunnelEnd::Udp(address)) => address,
            Some(TunnelEnd::Vxlan { .. }) | None => SocketAddrV4::new(lease.public_ip, port),
        };
        let kind = status.backend.as_ref()?.kind?;
        Some(Self { lease, mtu_bytes: lease.mtu_bytes.try_into().ok()?, underlay, kind, peers })
    }

    fn explain(&self, question: &Question) -> Answer {
        let Question { source, destination, .. } = *question;
        let (from_here, to_here) =
            (self.lease.subnet.contains(source), self.lease.subnet.contains(destination));
        match (from_here, to_here) {
            (true, true) => Answer::goes(format!(
                "both are in {}, this host's subnet: its bridge carries it, weftd does not see it",
                self.lease.subnet
            )),
            (true, false) if !self.lease.network.contains(destination) => Answer::goes(format!(
                "{destination} is outside {}: the host routes it, and masquerades it if that is \
                 asked for; weftd does not see it",
                self.lease.network
            )),
            (true, false) => self.outward(question),
            (false, true) => self.inward(question),
            (false, false) => Answer::ends(format!(
                "neither address is in {}, this host's subnet: ask on the host of the sender",
                self.lease.subnet
            )),
        }
    }

    /// What the kernel is to be asked about a packet from or to another host.
    fn asked<'b>(&self, question: &Question, status: &'b Status) -> Option<Asked<'b>> {
        let is_outward = self.lease.subnet.contains(question.source);
        let (near, far) = match is_outward {
            true => (question.source, question.destination),
            false => (question.destination, question.source),
        };
        let peer = self.owner(far).filter(|_| self.lease.subnet.contains(near))?;
        let ends = |port| {
            let from = SocketAddrV4::new(*self.underlay.ip(), port);
            (from, SocketAddrV4::new(peer.via.host(), port))
        };
        Some(Asked {
            near,
            far,
            is_outward,
            device: status.device.as_deref(),
            interface: status.interface.as_deref()?,
            host: peer.via.host(),
            tunnel: status.tunnel.map(|tunnel| match tunnel {
                TunnelEnd::Udp(address) => ends(address.port()),
                TunnelEnd::Vxlan { port, .. } => ends(port),
            }),
        })
    }

    fn owner(&self, address: Ipv4Addr) -> Option<&Peer> {
        let holding = self.peers.iter().filter(|peer| peer.subnet.contains(address));
        holding.max_by_key(|peer| peer.subnet.length_bits())
    }

    /// A packet of this host's pods.
    fn outward(&self, question: &Question) -> Answer {
        let Some(peer) = self.owner(question.destination) else {
            return self.without_lease(question.destination);
        };
        let lease = leased(question.destination, peer);
        if !peer.state.is_sent_to() {
            let why = format!("that peer is {}: no packets go there, see `weft peers`", peer.state);
            return Answer::ends(why).after(lease);
        }
        let path_mtu_bytes = peer.path_mtu_bytes.and_then(|path| path.try_into().ok());
        let path_mtu_bytes = path_mtu_bytes.unwrap_or(self.mtu_bytes);
        let mut length_bytes = question.length_bytes;
        let mut steps = vec![lease];
        if length_bytes > path_mtu_bytes {
            if question.dont_fragment {
                return Answer::ends(format!(
                    "{length_bytes} bytes are more than the path's MTU of {path_mtu_bytes}: with \
                     Don't Fragment the kernel drops it and tells the sender so"
                ))
                .after(steps.remove(0));
            }
            steps.push(format!("the kernel cuts it into fragments of at most {path_mtu_bytes}"));
            length_bytes = path_mtu_bytes;
        }
        let mut answer = match self.kind.carried_by() {
            CarriedBy::Workers => self.decided_outward(question, length_bytes, peer),
            CarriedBy::Kernel | CarriedBy::Others => {
                Answer::goes(format!("the kernel carries it ({})", self.kind))
            }
        };
        if answer.goes && peer.state.is_alarming() {
            answer.steps.push(format!(
                "but that peer is {}: {}; try `weft ping {}`",
                peer.state.name().to_uppercase(),
                peer.why.as_deref().unwrap_or("it answers nothing"),
                peer.subnet.network()
            ));
            answer.goes = false;
        }
        steps.append(&mut answer.steps);
        Answer { goes: answer.goes, steps }
    }

    fn without_lease(&self, destination: Ipv4Addr) -> Answer {
        let what = match self.kind.carried_by() {
            CarriedBy::Workers => {
                "weftd drops it as no-route and answers that the network is unreachable"
            }
            CarriedBy::Kernel | CarriedBy::Others => "the kernel has no route for it",
        };
        Answer::ends(format!("no lease covers {destination}: {what}; see `weft peers`"))
    }

    fn decided_outward(&self, question: &Question, length_bytes: u16, peer: &Peer) -> Answer {
        let packet = packet(question, length_bytes);
        let header = match Ipv4Header::parse(&packet) {
            Ok(header) => header,
            Err(reason) => return Answer::ends(reason.describe()),
        };
        let (local, table) = (self.local(), self.table());
        match decide::egress(&local, &table, &header, &packet, packet.len()) {
            EgressVerdict::Send(address) => {
                let by = match peer.fast_path.is_some_and(|taken| taken.packets_sent > 0) {
                    true => "the kernel's programs or a worker send it",
                    false => "a worker sends it",
                };
                Answer::goes(format!("{by} in a UDP datagram from {} to {address}", self.underlay))
            }
            EgressVerdict::Answer(kind, reason) => Answer::ends(format!(
                "dropped as {}: {} Its sender is told: {}.",
                reason.id(),
                reason.describe(),
                told(kind)
            )),
            EgressVerdict::Drop(reason) => {
                Answer::ends(format!("dropped as {}: {}", reason.id(), reason.describe()))
            }
        }
    }

    /// A packet of another host's pods, which that host sends as it should.
    fn inward(&self, question: &Question) -> Answer {
        if self.kind.carried_by() != CarriedBy::Workers {
            return Answer::goes(format!("the kernel delivers it ({})", self.kind));
        }
        let packet = packet(question, question.length_bytes);
        let Ok(header) = Ipv4Header::parse(&packet) else {
            return Answer::ends("no IPv4 packet is like that");
        };
        let owner = self.owner(question.source);
        // What an honest owner sends passes the strict check; nobody else's does.
        let local = Local { is_strict: owner.is_some(), ..self.local() };
        let sender = owner.map_or(STRANGER, |owner| owner.via.tunnel(UDP_PORT));
        let table = self.table();
        let answer = match decide::ingress(&local, &table, sender, Ecn::NotEct, &header, &packet) {
            IngressVerdict::Deliver(_) if owner.is_none() => Answer::ends(format!(
                "no lease covers {}: with --peer-check=strict it is dropped as src-not-leased, \
                 otherwise delivered, whoever sends it",
                question.source
            )),
            IngressVerdict::Deliver(_) => {
                Answer::goes("received from there, it is delivered to the host's routes")
            }
            IngressVerdict::Drop(reason) | IngressVerdict::Answer(_, reason, _) => {
                Answer::ends(format!("dropped as {}: {}", reason.id(), reason.describe()))
            }
        };
        match owner {
            None => answer,
            Some(owner) => answer.after(leased(question.source, owner)),
        }
    }

    fn local(&self) -> Local {
        Local {
            network: self.lease.network,
            subnet: self.lease.subnet,
            tun_address: self.lease.subnet.network(),
            underlay: self.underlay,
            mtu_bytes: self.mtu_bytes,
            is_strict: false,
        }
    }

    fn table(&self) -> Table {
        let used = self.peers.iter().filter(|peer| peer.state.is_sent_to());
        let routed = used.map(|peer| route::Peer::new(peer.subnet, peer.via.tunnel(UDP_PORT)));
        Table::build(routed.map(Arc::new).collect())
    }
}

fn told(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NetUnreachable => "network unreachable",
        ErrorKind::TimeExceeded => "time exceeded",
        ErrorKind::FragmentationNeeded { .. } => "fragmentation needed",
    }
}

/// An ordinary packet with nothing in it.
fn packet(question: &Question, length_bytes: u16) -> Vec<u8> {
    const TTL: u8 = 64;
    /// For experiments (RFC 3692): nothing looks for ports in it.
    const PROTOCOL: u8 = 253;
    let mut packet = vec![0; usize::from(length_bytes)];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&length_bytes.to_be_bytes());
    packet[6] = if question.dont_fragment { 0x40 } else { 0 };
    packet[8] = TTL;
    packet[9] = PROTOCOL;
    packet[12..16].copy_from_slice(&question.source.octets());
    packet[16..20].copy_from_slice(&question.destination.octets());
    let sum = checksum::finish(checksum::sum(&packet[..HEADER_BYTES_MIN]));
    packet[10..12].copy_from_slice(&sum);
    packet
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{Backend, PeerState, Traffic};

    fn answered(
        kind: BackendKind,
        words: (&str, &str),
        length_bytes: u16,
        dont_fragment: bool,
    ) -> (String, bool) {
        let status = Status {
            lease: Some(Lease {
                network: "10.5.0.0/16".parse().unwrap(),
                subnet: "10.5.1.0/24".parse().unwrap(),
                public_ip: [192, 0, 2, 1].into(),
                mtu_bytes: 1472,
            }),
            backend: Some(Backend { kind: Some(kind), done: None }),
            ..Status::default()
        };
        let peer = |number: u8, via: &str, state| {
            let subnet = format!("10.5.{number}.0/24").parse().unwrap();
            Peer::new(subnet, None, serde_json::from_value(via.into()).unwrap(), state)
        };
        let peers = [
            Peer {
                path_mtu_bytes: Some(1372),
                fast_path: Some(Traffic { packets_sent: 7, ..Traffic::default() }),
                ..peer(2, "192.0.2.2:8285", PeerState::Ok)
            },
            peer(3, "192.0.2.3:8285", PeerState::Silent),
            peer(4, "192.0.2.4", PeerState::OtherBackend),
        ];
        let (source, destination) = (words.0.parse().unwrap(), words.1.parse().unwrap());
        let question = Question { source, destination, length_bytes, dont_fragment };
        let not_asked = |_: &Asked<'_>| anyhow::bail!("not here");
        let answer = explain(&question, &status, &peers, not_asked).unwrap();
        (render(&answer, Style::PLAIN), answer.goes)
    }

    #[test]
    fn each_way_and_each_end_is_told() {
        const POD: &str = "10.5.1.9";
        for (words, length_bytes, dont_fragment, expected, expected_goes) in [
            ((POD, "10.5.2.7"), 84, true, "the kernel's programs or a worker send it", true),
            ((POD, "10.5.2.7"), 1400, true, "more than the path's MTU of 1372", false),
            ((POD, "10.5.2.7"), 1400, false, "fragments of at most 1372", true),
            ((POD, "10.5.3.7"), 84, true, "SILENT", false),
            ((POD, "10.5.4.7"), 84, true, "other-backend", false),
            ((POD, "10.5.99.7"), 84, true, "no-route", false),
            ((POD, "10.5.1.7"), 84, true, "its bridge carries it", true),
            ((POD, "8.8.8.8"), 84, true, "outside 10.5.0.0/16", true),
            (("10.5.2.7", POD), 84, true, "delivered to the host's routes", true),
            (("10.5.99.7", POD), 84, true, "src-not-leased", false),
            (("10.5.2.7", "10.5.3.7"), 84, true, "ask on the host of the sender", false),
            (("127.0.0.1", POD), 84, true, "src-martian", false),
            (("10.5.2.7", "10.5.1.0"), 84, true, "delivered", true),
        ] {
            let (text, goes) = answered(BackendKind::Udp, words, length_bytes, dont_fragment);
            assert!(text.contains(expected), "{words:?} {length_bytes}: {text}");
            assert_eq!(goes, expected_goes, "{words:?} {length_bytes}: {text}");
            assert!(text.contains("not considered: firewalls"), "{text}");
        }
        let (text, goes) = answered(BackendKind::Vxlan, (POD, "10.5.2.7"), 84, true);
        assert!(text.contains("the kernel carries it (vxlan)") && goes, "{text}");
    }
}
