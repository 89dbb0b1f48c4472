//! `weft explain`: what this host does with a packet, by the rules of the dataplane itself and the
//! peers that weftd knows now.

mod family;
mod kernel;
mod packet;
mod unleased;
mod wireguard;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use serde::Serialize;

use crate::backend_kind::{BackendKind, CarriedBy, UDP_PORT};
use crate::forward::decide::{self, Host, Leased, LeasedFamilies, Local, Refusal, Senders};
use crate::host::mtu::IPV6_MTU_BYTES_MIN;
use crate::host::state::KernelFamily;
use crate::packet::ecn::Ecn;
use crate::packet::icmp::ErrorKind;
use crate::route::{self, Families, Prefix, Prefixes, Table};
use crate::stats::DropReason;
use crate::status::{Lease, Peer, PeerState, SCHEMA, Status, TunnelEnd};
use crate::tool::arguments::Question;
use crate::tool::style::Style;

pub(super) use self::family::ToldFamily;
use self::kernel::{Answers, Asked, Outer};
pub(super) use self::kernel::{FORWARDS_NOTHING, forwards_ipv6};
use self::packet::{Ends, packet, told};

/// Of a host that is no peer (RFC 5737).
const STRANGER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)), UDP_PORT);

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
struct ThisHost<'a, A: ToldFamily> {
    lease: Leased<A>,
    /// Of each family that it has.
    leased: Option<LeasedFamilies>,
    mtu_bytes: u16,
    underlay: SocketAddr,
    kind: BackendKind,
    carried_by: CarriedBy,
    peers: &'a [Peer],
    /// What its `--peer-check` is, if it says so.
    peer_check: Option<&'a str>,
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
    let asked = host.asked(ends, status).filter(|_| leaves);
    let is_unasked = leaves && asked.is_none() && A::BITS == 128 && host.has_to_forward(ends);
    if is_unasked && is_here && forwards_ipv6() == Some(false) {
        leaves = false;
        steps.push(format!("but {}", FORWARDS_NOTHING));
    }
    if let Some(asked) = asked {
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
    let is_others = host.carried_by == CarriedBy::Others;
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
        let port = peers.first().map_or(UDP_PORT, |peer| peer.via.tunnel(UDP_PORT).port());
        let underlay = match status.tunnel {
            Some(TunnelEnd::Udp(address)) => address,
            Some(TunnelEnd::Vxlan { .. } | TunnelEnd::Wireguard { .. }) | None => {
                (public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED), port).into()
            }
        };
        let kind = status.backend.as_ref()?.kind?;
        // WireGuard without the kernel has workers, which say what became of handshakes.
        let has_workers = status.handshakes.is_some();
        let carried_by = if has_workers { CarriedBy::Workers } else { kind.carried_by() };
        let own = status.lease.as_ref()?;
        let leased = Families::new(Ipv4Addr::leased(own), Ipv6Addr::leased(own));
        let (mtu_bytes, peer_check) = (mtu_bytes.try_into().ok()?, status.peer_check.as_deref());
        Some(Self { lease, leased, mtu_bytes, underlay, kind, carried_by, peers, peer_check })
    }

    fn explain(&self, question: &Question, ends: Ends<A>, steps: &mut Vec<String>) -> LastStep {
        let Ends { source, destination } = ends;
        let Leased { network, subnet } = self.lease;
        let is_local = |end: A| !end.is_of_host() || A::BITS == 128 && end.is_of_link();
        // What becomes of such a source, the workers have rules for.
        let is_kernels = self.carried_by != CarriedBy::Workers;
        if is_local(destination) || is_local(source) && is_kernels {
            let end = if is_local(destination) { destination } else { source };
            return Err(format!(
                "{end} stands for something on one host or one link, or for many hosts: nobody \
                 forwards what has it to another host, and no tunnel carries that"
            ));
        }
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
                 sender; if that is this host, its address is in no lease{}",
                self.at_the_peer(ends)
            )),
        }
    }

    /// Whether the packet gets from one interface of this host to another: to pods or from them,
    /// and not among them.
    fn has_to_forward(&self, Ends { source, destination }: Ends<A>) -> bool {
        let subnet = self.lease.subnet;
        let is_own = self.is_own(source) || self.is_own(destination);
        subnet.contains(source) != subnet.contains(destination) && !is_own
    }

    /// Whether it is the device's or the bridge's, for which nothing is forwarded.
    fn is_own(&self, address: A) -> bool {
        [self.lease.subnet.network(), self.lease.subnet.first_host()].contains(&address)
    }

    /// What the kernel is to be asked about a packet from or to another host.
    fn asked<'b>(&self, ends: Ends<A>, status: &'b Status) -> Option<Asked<'b, A>> {
        let Ends { source, destination } = ends;
        let is_outward = self.lease.subnet.contains(source);
        let (near, far) = if is_outward { (source, destination) } else { (destination, source) };
        let subnet = self.lease.subnet;
        // The routes of commands lead where these want.
        if self.is_own(near) || self.carried_by == CarriedBy::Others {
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
            tunnel: status.tunnel.map(|tunnel| match self.underlay.ip() {
                own if own.is_ipv4() == host.is_ipv4() => {
                    Outer::Datagram([own, host].map(|end| SocketAddr::new(end, tunnel.port())))
                }
                _ => Outer::ToHost,
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
        self.owner(destination).is_some_and(|peer| {
            let keys = peer.wireguard.as_ref();
            let lacks_keys = keys.is_some_and(|it| it.last_handshake_unix.is_none());
            matches!(peer.state, PeerState::Silent | PeerState::Refused) || lacks_keys
        })
    }

    /// Why nothing is sent to a peer in this state.
    fn nothing_sent(&self, peer: &Peer) -> String {
        let state = peer.state;
        let why = format!("that peer is {state}: weftd sends none there, see `weft peers`");
        match self.carried_by {
            CarriedBy::Workers => why,
            CarriedBy::Kernel | CarriedBy::Others => {
                why + "; another route of this host, as the default one, may take it, unencrypted"
            }
        }
    }

    /// A packet of this host's pods.
    fn outward(&self, question: &Question, ends: Ends<A>, steps: &mut Vec<String>) -> LastStep {
        let destination = ends.destination;
        let Some(peer) = self.owner(destination) else {
            let what = match self.carried_by {
                CarriedBy::Workers => {
                    "weftd drops it as no-route and answers that the network is unreachable"
                }
                CarriedBy::Kernel if self.kind == BackendKind::Wireguard => {
                    "WireGuard has no peer for it and answers that the host is unreachable"
                }
                CarriedBy::Kernel | CarriedBy::Others => "the kernel has no route for it",
            };
            return Err(format!("no lease covers {destination}: {what}; see `weft peers`"));
        };
        steps.push(leased(destination, peer));
        if !peer.state.is_sent_to() {
            return Err(self.nothing_sent(peer));
        }
        if A::via(peer).is_none() {
            return Err("that peer takes no packets of this family: none go there".to_owned());
        }
        let path_mtu_bytes = peer.path_mtu_bytes.and_then(|path| path.try_into().ok());
        let path_mtu_bytes = path_mtu_bytes.unwrap_or(self.mtu_bytes);
        let length_bytes = question.length_bytes;
        // Of IPv6 no sender can be told less.
        let least_bytes = if A::BITS == 128 { IPV6_MTU_BYTES_MIN } else { 0 };
        let told_bytes = path_mtu_bytes.max(least_bytes);
        if length_bytes > told_bytes {
            if question.dont_fragment {
                return Err(format!(
                    "{length_bytes} bytes are more than the path's MTU of {told_bytes}: the \
                     kernel drops it and tells the sender so ({})",
                    told::<A>(ErrorKind::PacketTooBig { next_hop_mtu_bytes: told_bytes })
                ));
            }
            steps.push(format!("the kernel cuts it into fragments of at most {told_bytes}"));
        } else if length_bytes > path_mtu_bytes {
            steps.push(format!(
                "the path takes {path_mtu_bytes} bytes whole, and of IPv6 no sender can be told \
                 less than {told_bytes}: it goes in fragments, or is lost, as `weft peers` says"
            ));
        }
        let sent = match self.carried_by {
            CarriedBy::Workers => {
                self.sent(ends, question, length_bytes.min(told_bytes), peer, steps)?
            }
            CarriedBy::Kernel if self.kind == BackendKind::Wireguard => {
                self.sealed("the kernel's WireGuard", peer, steps)
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

    /// What workers do with it.
    fn sent(
        &self,
        ends: Ends<A>,
        question: &Question,
        length_bytes: u16,
        peer: &Peer,
        steps: &mut Vec<String>,
    ) -> LastStep {
        let (header, packet) = packet(ends, length_bytes, question.dont_fragment);
        let (local, table) = (self.local(Senders::Loose)?, self.table());
        let host = Host { local: &local, leased: &self.lease, table: &table };
        match decide::egress(host, &header, &packet, packet.len()) {
            Ok(_) if self.kind == BackendKind::Wireguard => {
                Ok(self.sealed("a worker of weftd", peer, steps))
            }
            Ok(address) => {
                let by = match peer.fast_path.is_some_and(|taken| taken.packets_sent > 0) {
                    true => "the kernel's programs or a worker send it",
                    false => "a worker sends it",
                };
                let or_own = match peer.from_source_ports {
                    Some(true) => " or its worker's own port",
                    _ => "",
                };
                let (from, address) = (self.underlay, table.address(address));
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
        match self.carried_by {
            CarriedBy::Workers => {}
            CarriedBy::Kernel if self.kind == BackendKind::Wireguard => {
                return self.opened(ends, steps);
            }
            CarriedBy::Kernel => return Ok(format!("the kernel delivers it ({})", self.kind)),
            CarriedBy::Others => return Ok(self.unknown(ends.destination)),
        }
        let owner = self.owner(ends.source);
        steps.extend(owner.map(|owner| leased(ends.source, owner)));
        let (header, packet) = packet(ends, question.length_bytes, question.dont_fragment);
        let unleased = self.peer_check.filter(|_| owner.is_none());
        let is_unleased = |check| {
            format!("no lease covers {}, and this weftd has --peer-check={check}", ends.source)
        };
        steps.extend(unleased.map(is_unleased));
        // What an honest owner sends passes the strict check; nobody else's does.
        let is_strict = owner.is_some() || unleased == Some("strict");
        let senders = match is_strict {
            _ if self.kind == BackendKind::Wireguard => Senders::Proven,
            true => Senders::Strict,
            false => Senders::Loose,
        };
        let (local, table) = (self.local(senders)?, self.table());
        let sender = owner.map_or(STRANGER, |owner| owner.via.tunnel(UDP_PORT));
        let host = Host { local: &local, leased: &self.lease, table: &table };
        match decide::ingress(host, &sender, Ecn::NotEct, &header, &packet, &mut None) {
            Ok(_) if unleased.is_some() => Ok("it is delivered, whoever sends it".to_owned()),
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

    fn local(&self, senders: Senders) -> Result<Local, String> {
        let Self { underlay, mtu_bytes, leased, .. } = *self;
        let leased = leased.ok_or("weftd says no subnet of its own")?;
        let whole_bytes = mtu_bytes;
        Ok(Local { leased, underlay, mtu_bytes, whole_bytes, senders })
    }

    fn table(&self) -> Table {
        let used = self.peers.iter().filter(|peer| peer.state.is_sent_to());
        let routed = used.filter_map(|peer| {
            let subnet_v6 = peer.ipv6_subnet.filter(|_| peer.ipv6_via.is_some());
            let subnets = Prefixes::new(peer.subnet, subnet_v6)?;
            Some(route::Peer::new(subnets, peer.via.tunnel(UDP_PORT)))
        });
        Table::build(routed.map(Arc::new).collect())
    }
}

#[cfg(test)]
mod tests;
