//! What a firewall does with a packet, as far as that can be told: chains of nftables and iptables
//! as values, and a walk through them. Where a rule can't be judged, the packet may pass.

pub(super) mod iptables;
pub(super) mod nftables;

use std::net::Ipv4Addr;

use crate::route::Prefix;

/// Chains that jump to each other deeper than that are given up on.
const DEPTH_MAX: u8 = 16;

/// Where packets meet a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

/// The hooks of a packet that this host gets.
pub(super) const RECEIVED: &[Hook] = &[Hook::Ingress, Hook::Prerouting, Hook::Input];
/// Of one that it forwards.
pub(super) const FORWARDED: &[Hook] =
    &[Hook::Ingress, Hook::Prerouting, Hook::Forward, Hook::Postrouting];
/// Of one that it sends.
pub(super) const SENT: &[Hook] = &[Hook::Output, Hook::Postrouting, Hook::Egress];

/// A chain of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Chain {
    /// Family and table, which jumps do not leave.
    pub(super) table: String,
    pub(super) name: String,
    /// Nothing if other chains jump to it.
    pub(super) hook: Option<Hook>,
    /// The devices that it is about; none if it is about all.
    pub(super) devices: Vec<String>,
    /// What becomes of packets at its end, if it is a base chain.
    pub(super) drops_at_end: bool,
    pub(super) rules: Vec<Rule>,
}

/// One rule: all conditions hold, and then the action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    /// As people write or read it.
    pub(super) text: String,
    pub(super) conditions: Vec<Condition>,
    pub(super) action: Action,
}

/// What a rule asks of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    /// A protocol of IP.
    Protocol {
        is_udp: bool,
        negated: bool,
    },
    /// One of these ranges of ports of the destination, of UDP or any protocol with ports.
    Port {
        ranges: Vec<(u16, u16)>,
        negated: bool,
    },
    /// From one of these.
    Source {
        prefixes: Vec<Prefix>,
        negated: bool,
    },
    Destination {
        prefixes: Vec<Prefix>,
        negated: bool,
    },
    /// The interface that it came in by; a name that ends in `*` or `+` stands for many.
    ComesBy {
        name: String,
        negated: bool,
    },
    /// The one that it leaves by.
    GoesBy {
        name: String,
        negated: bool,
    },
    /// Whether it may begin a connection.
    State {
        takes_new: bool,
    },
    /// Something about it that nobody else sets, such as kube-proxy's mark.
    Never,
    /// Anything else.
    Unknown,
}

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    Accept,
    Drop,
    Jump(String),
    /// As a jump, but at its end the chain's policy applies.
    Goto(String),
    Return,
    /// Counts, logs, marks.
    Nothing,
    /// Something that may take the packet away, such as a verdict map.
    Unknown,
}

/// A packet that begins a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    /// Port of the destination, if it is UDP; nothing if it may be of any protocol.
    pub(super) udp_port: Option<u16>,
    /// Where it may come from; nothing for anywhere.
    pub(super) sources: Option<Prefix>,
    /// Where it may go to.
    pub(super) destinations: Option<Prefix>,
    pub(super) comes_by: Option<&'a str>,
    pub(super) goes_by: Option<&'a str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    Always,
    Maybe,
    Never,
}

/// What becomes of a packet in a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Accepted,
    /// By this rule or policy.
    Dropped(String),
    /// It left the chain again.
    Continues,
    /// It may be accepted, or taken elsewhere.
    Unsure,
}

/// What surely drops `packet` at one of these hooks, and what follows from that, in one sentence:
/// nft up to 1.0.6 does not say in JSON which device a chain of the family netdev is for.
pub(super) fn dropped_by(
    chains: &[Chain],
    hooks: &[Hook],
    packet: &Packet<'_>,
    so: &str,
) -> Option<String> {
    let device = |chain: &Chain| match chain.hook {
        Some(Hook::Egress) => packet.goes_by,
        _ => packet.comes_by,
    };
    let is_met = |chain: &&Chain| {
        let is_its = |name: &String| Some(name.as_str()) == device(chain);
        chain.hook.is_some_and(|hook| hooks.contains(&hook))
            && (chain.devices.is_empty() || chain.devices.iter().any(is_its))
    };
    chains.iter().filter(is_met).find_map(|base| {
        let by = match walk(chains, base, packet, 0) {
            End::Continues if base.drops_at_end => {
                format!("the policy of {} in {} is drop", base.name, base.table)
            }
            End::Dropped(by) => by,
            End::Accepted | End::Continues | End::Unsure => return None,
        };
        let is_known = !base.table.starts_with("netdev ") || !base.devices.is_empty();
        Some(match device(base).filter(|_| !is_known) {
            None => format!("{by}, so {so}"),
            Some(name) => {
                format!("{by}, so {so} if that is for {name}: `nft list ruleset` names the device")
            }
        })
    })
}

fn walk(chains: &[Chain], chain: &Chain, packet: &Packet<'_>, depth: u8) -> End {
    let mut is_unsure = false;
    let target = |name: &str| {
        let found = chains.iter().find(|other| other.table == chain.table && other.name == name);
        found.filter(|_| depth < DEPTH_MAX)
    };
    for rule in &chain.rules {
        let matched = matched(&rule.conditions, packet);
        if matched == Match::Never {
            continue;
        }
        let end = match &rule.action {
            Action::Accept => End::Accepted,
            Action::Drop => End::Dropped(format!("{}: {}", chain.table, rule.text)),
            Action::Jump(name) | Action::Goto(name) => {
                target(name).map_or(End::Unsure, |next| walk(chains, next, packet, depth + 1))
            }
            Action::Unknown => End::Unsure,
            Action::Return if matched == Match::Always => break,
            // The rest of the chain may not see it.
            Action::Return => End::Unsure,
            Action::Nothing => End::Continues,
        };
        let leaves = matches!(rule.action, Action::Goto(_));
        match (end, matched) {
            (End::Dropped(_), _) if is_unsure => return End::Unsure,
            (end @ (End::Accepted | End::Dropped(_)), Match::Always) => return end,
            (End::Accepted | End::Unsure, _) => is_unsure = true,
            (End::Continues, Match::Always) if leaves => break,
            (End::Continues, _) if leaves => is_unsure = true,
            (End::Continues | End::Dropped(_), _) => {}
        }
    }
    if is_unsure { End::Unsure } else { End::Continues }
}

fn matched(conditions: &[Condition], packet: &Packet<'_>) -> Match {
    let each = conditions.iter().map(|condition| condition.meets(packet));
    each.fold(Match::Always, |all, one| match (all, one) {
        (Match::Never, _) | (_, Match::Never) => Match::Never,
        (Match::Maybe, _) | (_, Match::Maybe) => Match::Maybe,
        (Match::Always, Match::Always) => Match::Always,
    })
}

impl Match {
    fn of(holds: bool) -> Self {
        if holds { Self::Always } else { Self::Never }
    }

    fn negated_if(self, negated: bool) -> Self {
        match (self, negated) {
            (Self::Always, true) => Self::Never,
            (Self::Never, true) => Self::Always,
            (same, _) => same,
        }
    }
}

impl Condition {
    fn meets(&self, packet: &Packet<'_>) -> Match {
        match self {
            Self::Protocol { is_udp, negated } => match packet.udp_port {
                Some(_) => Match::of(*is_udp).negated_if(*negated),
                None => Match::Maybe,
            },
            Self::Port { ranges, negated } => match packet.udp_port {
                Some(port) => {
                    let within = |(first, last): &(u16, u16)| (*first..=*last).contains(&port);
                    Match::of(ranges.iter().any(within)).negated_if(*negated)
                }
                None => Match::Maybe,
            },
            Self::Source { prefixes, negated } => {
                within(packet.sources, prefixes).negated_if(*negated)
            }
            Self::Destination { prefixes, negated } => {
                within(packet.destinations, prefixes).negated_if(*negated)
            }
            Self::ComesBy { name, negated } => by(packet.comes_by, name).negated_if(*negated),
            Self::GoesBy { name, negated } => by(packet.goes_by, name).negated_if(*negated),
            Self::State { takes_new } => Match::of(*takes_new),
            Self::Never => Match::Never,
            Self::Unknown => Match::Maybe,
        }
    }
}

fn within(packets: Option<Prefix>, prefixes: &[Prefix]) -> Match {
    if prefixes.iter().any(|prefix| prefix.length_bits() == 0) {
        return Match::Always;
    }
    match packets {
        Some(packets) if prefixes.iter().any(|prefix| prefix.covers(packets)) => Match::Always,
        Some(packets) if !prefixes.iter().any(|prefix| prefix.overlaps(packets)) => Match::Never,
        Some(_) | None => Match::Maybe,
    }
}

fn by(device: Option<&str>, name: &str) -> Match {
    match device {
        Some(device) => Match::of(is_named(device, name)),
        // No packet from or to another host passes the loopback.
        None if name == "lo" => Match::Never,
        None => Match::Maybe,
    }
}

fn is_named(device: &str, pattern: &str) -> bool {
    match pattern.strip_suffix(['*', '+']) {
        Some(beginning) => device.starts_with(beginning),
        None => device == pattern,
    }
}

/// `10.0.0.0/8` or `10.0.0.1`.
fn prefix(text: &str) -> Option<Prefix> {
    match text.split_once('/') {
        Some(_) => text.parse().ok(),
        None => Prefix::new(text.parse::<Ipv4Addr>().ok()?, 32),
    }
}

#[cfg(test)]
mod tests;
