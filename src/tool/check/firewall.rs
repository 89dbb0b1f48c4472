//! What a firewall does with a packet, as far as that can be told: chains of nftables and iptables
//! as values, and a walk through them. Where a rule can't be judged, the packet may pass.

pub(super) mod iptables;
pub(super) mod nftables;

use std::net::Ipv4Addr;

use derive_more::Display;
use serde::Deserialize;

use crate::host::state::KernelFamily;
use crate::route::{IpAddress, Prefix};

/// Chains that jump to each other deeper than that are given up on.
const DEPTH_MAX: u8 = 16;

/// Of the longest packet that pods commonly send.
const LENGTH_MAX: u64 = 1500;

/// Where packets meet a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, Deserialize)]
#[display(rename_all = "lowercase")]
#[serde(rename_all = "lowercase")]
pub(super) enum Hook {
    /// Of one device, before all others.
    Ingress,
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
    /// Of one device, after all others.
    Egress,
    /// Of frames that leave a bridge's own end for its ports, and of those that come to it.
    #[serde(skip)]
    BridgeOut,
    #[serde(skip)]
    BridgeIn,
}

/// The hooks of a packet that this host gets.
pub(super) const RECEIVED: &[Hook] = &[Hook::Ingress, Hook::Prerouting, Hook::Input];
/// Of one that it forwards.
pub(super) const FORWARDED: &[Hook] =
    &[Hook::Ingress, Hook::Prerouting, Hook::Forward, Hook::Postrouting];
/// Of one that it forwards out of a device.
pub(super) const FORWARDED_ON: &[Hook] =
    &[Hook::Prerouting, Hook::Forward, Hook::Postrouting, Hook::Egress];
/// Of both on the pods' bridge: what they get, and what they send.
pub(super) const BRIDGED: [&[Hook]; 2] = [&[Hook::BridgeOut], &[Hook::BridgeIn]];
/// Of one that it sends.
pub(super) const SENT: &[Hook] = &[Hook::Output, Hook::Postrouting, Hook::Egress];

/// A chain of rules, as packets of one family meet it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chain<A: IpAddress = Ipv4Addr> {
    /// Family and table, which jumps do not leave.
    pub(super) table: String,
    pub(super) name: String,
    /// Nothing if other chains jump to it.
    pub(super) hook: Option<Hook>,
    /// The devices that it is about; none if it is about all.
    pub(super) devices: Vec<String>,
    /// What becomes of packets at its end, if it is a base chain.
    pub(super) drops_at_end: bool,
    pub(super) rules: Vec<Rule<A>>,
}

/// One rule: all conditions hold, and then the action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule<A: IpAddress = Ipv4Addr> {
    /// As people write or find it.
    pub(super) text: String,
    pub(super) conditions: Vec<Condition<A>>,
    pub(super) action: Action,
}

/// What a rule asks of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Condition<A: IpAddress = Ipv4Addr> {
    /// Nothing if it is not understood.
    pub(super) property: Option<Property<A>>,
    /// Whether the packet must not have it.
    pub(super) negated: bool,
}

/// What a packet may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Property<A: IpAddress = Ipv4Addr> {
    /// One of some protocols, and whether UDP and ICMPv6 are among them.
    Protocol {
        is_udp: bool,
        is_icmpv6: bool,
    },
    /// One of these types of ICMPv6 messages.
    Message(Vec<(u8, u8)>),
    /// One of these ranges of ports of the destination, of UDP or any protocol with ports.
    Port(Vec<(u16, u16)>),
    /// The same of the source.
    SourcePort(Vec<(u16, u16)>),
    /// From one of these.
    Source(Vec<Prefix<A>>),
    Destination(Vec<Prefix<A>>),
    /// The interface that it came in by; a name that ends in `*` or `+` stands for many.
    ComesBy(String),
    /// The one that it leaves by.
    GoesBy(String),
    /// What all packets of the family have, or none.
    Known(bool),
    /// A state of connections, and whether new ones have it. What is not tracked has none of them.
    State {
        is_new: bool,
    },
    /// One of these lengths, in bytes.
    Length(u64, u64),
    /// An address of this host for its destination.
    ForHost,
    /// One of many hosts.
    ForMany,
    /// Some field of a protocol that is neither UDP nor ICMPv6.
    OtherProtocol,
}

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    Accept,
    Drop,
    /// Sends it to another address.
    Divert,
    Jump(String),
    /// As a jump, but at its end the chain's policy applies.
    Goto(String),
    Return,
    /// Counts, logs, marks.
    Nothing,
    /// Something that may take the packet away, such as a verdict map.
    Unknown,
}

/// A packet that begins a connection, or a message of neighbour discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet<'a, A: IpAddress = Ipv4Addr> {
    pub(super) content: Content,
    /// Where it may come from; nothing for anywhere.
    pub(super) sources: Option<Prefix<A>>,
    /// Where it may go to.
    pub(super) destinations: Option<Prefix<A>>,
    pub(super) comes_by: Option<&'a str>,
    pub(super) goes_by: Option<&'a str>,
    /// Whether it is for this host.
    pub(super) is_for_host: bool,
}

impl<A: IpAddress> Packet<'_, A> {
    /// From anywhere to anywhere.
    pub(super) fn of(content: Content) -> Self {
        let (sources, destinations) = (None, None);
        Self { content, sources, destinations, comes_by: None, goes_by: None, is_for_host: false }
    }
}

/// What is in a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Any protocol.
    Any,
    /// UDP to this port. The other is one that it may come from; nothing if all are alike.
    Udp { port: u16, source_port: Option<u16> },
    /// An ICMPv6 message of this type by which neighbours find each other, which the kernel does
    /// not track (`noct_valid_new`, net/netfilter/nf_conntrack_proto_icmpv6.c). It may be for many.
    Discovery(u8),
}

/// What becomes of a packet in a chain.
enum End {
    /// It may be accepted, or taken elsewhere.
    MayPass,
    /// By this rule or policy.
    Dropped(String),
    /// It left the chain again.
    Continues,
}

/// What surely drops `packet` at one of these hooks, and what follows from that, in one sentence:
/// nft up to 1.0.6 does not say in JSON which device a chain of the family netdev is for. And the
/// chain in which something in front of that would help.
pub(super) fn dropped_by<A: KernelFamily>(
    chains: &[Chain<A>],
    hooks: &[Hook],
    packet: &Packet<'_, A>,
    so: &str,
) -> Option<(String, String)> {
    met(chains, hooks, packet).find_map(|(base, hook, device)| {
        let by = match walk(chains, base, packet, false, 0) {
            End::Continues if base.drops_at_end => {
                format!("the policy of {} in {} is drop", base.name, base.table)
            }
            End::Dropped(by) => by,
            End::Continues | End::MayPass => return None,
        };
        let is_known = !base.table.starts_with("netdev ") || !base.devices.is_empty();
        let text = match device.filter(|_| !is_known) {
            None => format!("{by}, so {so}"),
            Some(name) => {
                format!("{by}, so {so} if that is for {name}: `nft list ruleset` names the device")
            }
        };
        Some((text, base.place(hook)))
    })
}

/// A rule that drops some of these packets, unless one in front of it lets them pass; its chain.
pub(super) fn may_drop<A: KernelFamily>(
    chains: &[Chain<A>],
    hooks: &[Hook],
    packet: &Packet<'_, A>,
) -> Option<(String, String)> {
    met(chains, hooks, packet).find_map(|(base, hook, _)| {
        match walk(chains, base, packet, true, 0) {
            End::Dropped(by) => Some((by, base.place(hook))),
            End::MayPass | End::Continues => None,
        }
    })
}

/// The base chains that `packet` meets at these hooks, each with its hook and the packet's device
/// there.
fn met<'a, A: KernelFamily>(
    chains: &'a [Chain<A>],
    hooks: &[Hook],
    packet: &Packet<'a, A>,
) -> impl Iterator<Item = (&'a Chain<A>, Hook, Option<&'a str>)> {
    chains.iter().filter_map(|base| {
        let hook = base.hook.filter(|hook| hooks.contains(hook))?;
        let device = if hook == Hook::Egress { packet.goes_by } else { packet.comes_by };
        let is_its = |name: &String| Some(name.as_str()) == device;
        let is_met = base.devices.is_empty() || base.devices.iter().any(is_its);
        is_met.then_some((base, hook, device))
    })
}

impl<A: IpAddress> Chain<A> {
    fn place(&self, hook: Hook) -> String {
        format!("chain {} of {} (hook {hook})", self.name, self.table)
    }

    /// Where a rule of this chain jumps to.
    fn next<'a>(&self, chains: &'a [Self], name: &str, depth: u8) -> Option<&'a Self> {
        let is_meant = |it: &&Self| it.table == self.table && it.name == name;
        chains.iter().find(is_meant).filter(|_| depth < DEPTH_MAX)
    }
}

/// What becomes of all these packets, or `of_some` of them unless all may have left before.
fn walk<A: KernelFamily>(
    chains: &[Chain<A>],
    chain: &Chain<A>,
    packet: &Packet<'_, A>,
    of_some: bool,
    depth: u8,
) -> End {
    for rule in &chain.rules {
        if rule.holds(packet) == Some(false) {
            continue;
        }
        let for_some = |it: &Condition<A>| of_some && it.holds_for_some(packet);
        let is_met = |it: &Condition<A>| it.holds(packet) == Some(true) || for_some(it);
        let is_certain = rule.conditions.iter().all(is_met);
        // Then none may be left.
        let may_be_all = !rule.conditions.iter().any(for_some);
        let end = match &rule.action {
            Action::Nothing => continue,
            Action::Accept | Action::Unknown => End::MayPass,
            Action::Divert if of_some => End::MayPass,
            Action::Drop | Action::Divert => {
                End::Dropped(format!("{}: {}", chain.table, rule.text))
            }
            Action::Return => End::Continues,
            Action::Jump(name) | Action::Goto(name) => match chain.next(chains, name, depth) {
                Some(next) => walk(chains, next, packet, of_some, depth + 1),
                None => End::MayPass,
            },
        };
        match end {
            End::Dropped(by) if is_certain => return End::Dropped(by),
            End::MayPass if may_be_all => return End::MayPass,
            End::Continues if may_be_all && rule.leaves() => {
                return if is_certain { End::Continues } else { End::MayPass };
            }
            End::Dropped(_) | End::MayPass | End::Continues => {}
        }
    }
    End::Continues
}

impl<A: KernelFamily> Rule<A> {
    /// Whether packets do not come back to the rule behind it.
    fn leaves(&self) -> bool {
        matches!(self.action, Action::Goto(_) | Action::Return)
    }

    /// Nothing if that can't be told.
    fn holds(&self, packet: &Packet<'_, A>) -> Option<bool> {
        let each: Vec<_> = self.conditions.iter().map(|it| it.holds(packet)).collect();
        let is_known = each.iter().all(Option::is_some);
        if each.contains(&Some(false)) { Some(false) } else { is_known.then_some(true) }
    }
}

impl<A: KernelFamily> Condition<A> {
    fn holds(&self, packet: &Packet<'_, A>) -> Option<bool> {
        let holds = match (self.property.as_ref()?, packet.content) {
            (Property::Protocol { is_udp, .. }, Content::Udp { .. }) => Some(*is_udp),
            (Property::Protocol { is_icmpv6, .. }, Content::Discovery(_)) => Some(*is_icmpv6),
            (Property::Port(ranges), Content::Udp { port, .. }) => Some(one_of(port, ranges)),
            // Several workers of a weft host send from ports of their own as well.
            (Property::SourcePort(ranges), Content::Udp { source_port, .. }) => {
                source_port.filter(|port| !one_of(*port, ranges)).map(|_| false)
            }
            (Property::Message(ranges), Content::Discovery(kind)) => Some(one_of(kind, ranges)),
            (
                Property::Protocol { .. }
                | Property::Port(_)
                | Property::SourcePort(_)
                | Property::Message(_)
                | Property::OtherProtocol,
                content,
            ) => (content != Content::Any).then_some(false),
            (Property::ForHost | Property::ForMany, Content::Discovery(_)) => None,
            (Property::ForHost, _) => Some(packet.is_for_host),
            // Neither the tunnel nor a pod sends to many.
            (Property::ForMany, _) => Some(false),
            (Property::State { is_new }, content) => {
                Some(*is_new && !matches!(content, Content::Discovery(_)))
            }
            (Property::Source(prefixes), _) => within(packet.sources, prefixes),
            (Property::Destination(prefixes), _) => within(packet.destinations, prefixes),
            (Property::ComesBy(name), _) => by(packet.comes_by, name),
            (Property::GoesBy(name), _) => by(packet.goes_by, name),
            (Property::Known(holds), _) => Some(*holds),
            (Property::Length(first, _), _) if *first > LENGTH_MAX => Some(false),
            (Property::Length(_, last), _) if *last < A::HEADER_BYTES.into() => Some(false),
            (Property::Length(first, last), _) => {
                (*first <= A::HEADER_BYTES.into() && *last >= LENGTH_MAX).then_some(true)
            }
        };
        holds.map(|holds| holds != self.negated)
    }

    /// Whether some of the packets surely have it and others perhaps not: those of a protocol, of a
    /// length, of a range of addresses, or from the tunnel's port. A port is closed on purpose, and
    /// so is a single address, as by a policy for one pod.
    fn holds_for_some(&self, packet: &Packet<'_, A>) -> bool {
        match &self.property {
            Some(Property::Protocol { .. } | Property::Length(..)) => self.holds(packet).is_none(),
            Some(Property::SourcePort(of)) => match packet.content {
                Content::Udp { source_port: Some(port), .. } => !self.negated && one_of(port, of),
                Content::Any | Content::Udp { .. } | Content::Discovery(_) => false,
            },
            Some(Property::Source(of)) => are_ranges(of) && self.holds(packet).is_none(),
            Some(Property::Destination(of)) => are_ranges(of) && self.holds(packet).is_none(),
            Some(
                Property::Port(_)
                | Property::ComesBy(_)
                | Property::GoesBy(_)
                | Property::Known(_)
                | Property::State { .. }
                | Property::Message(_)
                | Property::ForHost
                | Property::ForMany
                | Property::OtherProtocol,
            )
            | None => false,
        }
    }
}

fn one_of<T: PartialOrd>(number: T, ranges: &[(T, T)]) -> bool {
    ranges.iter().any(|(first, last)| (first..=last).contains(&&number))
}

fn are_ranges<A: IpAddress>(prefixes: &[Prefix<A>]) -> bool {
    prefixes.iter().any(|prefix| prefix.length_bits() < A::BITS)
}

fn within<A: IpAddress>(packets: Option<Prefix<A>>, prefixes: &[Prefix<A>]) -> Option<bool> {
    if prefixes.iter().any(|prefix| prefix.length_bits() == 0) {
        return Some(true);
    }
    let packets = packets?;
    let is_within = prefixes.iter().any(|prefix| prefix.covers(packets));
    (is_within || !prefixes.iter().any(|prefix| prefix.overlaps(packets))).then_some(is_within)
}

fn by(device: Option<&str>, name: &str) -> Option<bool> {
    // No packet from or to another host passes the loopback.
    let Some(device) = device else { return (name == "lo").then_some(false) };
    let beginning = name.strip_suffix(['*', '+']);
    Some(beginning.map_or(device == name, |beginning| device.starts_with(beginning)))
}

/// `10.0.0.0/8` or `10.0.0.1`, `fd00::/8` or `fd00::1`.
fn prefix<A: IpAddress>(text: &str) -> Option<Prefix<A>> {
    text.parse().ok().or_else(|| Prefix::new(text.parse().ok()?, A::BITS))
}

#[cfg(test)]
mod tests;
