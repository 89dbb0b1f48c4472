//! What a firewall does with a packet, as far as that can be told: chains of nftables and iptables
//! as values, and a walk through them. Where a rule can't be judged, the packet may pass.

mod iptables;
mod nftables;

use std::net::Ipv4Addr;

use crate::route::Prefix;

pub(super) use iptables::parse as parse_iptables;
pub(super) use nftables::parse as parse_nftables;

/// Chains that jump to each other deeper than that are given up on.
const DEPTH_MAX: u8 = 16;

/// Where packets meet a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    Input,
    Forward,
}

/// A chain of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Chain {
    /// Family and table, which jumps do not leave.
    pub(super) table: String,
    pub(super) name: String,
    /// Nothing if other chains jump to it.
    pub(super) hook: Option<Hook>,
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
    Source {
        prefix: Prefix,
        negated: bool,
    },
    Destination {
        prefix: Prefix,
        negated: bool,
    },
    /// The interface that it came in by; a name that ends in `*` or `+` stands for many.
    ComesBy {
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

/// The rule or policy that surely drops `packet` at `hook`, if there is one.
pub(super) fn dropped_by(chains: &[Chain], hook: Hook, packet: &Packet<'_>) -> Option<String> {
    let bases = chains.iter().filter(|chain| chain.hook == Some(hook));
    let mut ends = bases.map(|base| match walk(chains, base, packet, 0) {
        End::Continues if base.drops_at_end => {
            End::Dropped(format!("the policy of {} in {} is drop", base.name, base.table))
        }
        end @ (End::Accepted | End::Dropped(_) | End::Continues | End::Unsure) => end,
    });
    ends.find_map(|end| match end {
        End::Dropped(by) => Some(by),
        End::Accepted | End::Continues | End::Unsure => None,
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
            Self::Source { prefix, negated } => {
                within(packet.sources, *prefix).negated_if(*negated)
            }
            Self::Destination { prefix, negated } => {
                within(packet.destinations, *prefix).negated_if(*negated)
            }
            Self::ComesBy { name, negated } => match packet.comes_by {
                Some(device) => Match::of(is_named(device, name)).negated_if(*negated),
                // A packet of another host never comes by the loopback.
                None if name == "lo" => Match::Never.negated_if(*negated),
                None => Match::Maybe,
            },
            Self::State { takes_new } => Match::of(*takes_new),
            Self::Never => Match::Never,
            Self::Unknown => Match::Maybe,
        }
    }
}

fn within(packets: Option<Prefix>, prefix: Prefix) -> Match {
    match packets {
        _ if prefix.length_bits() == 0 => Match::Always,
        Some(packets) if prefix.covers(packets) => Match::Always,
        Some(packets) if !prefix.overlaps(packets) => Match::Never,
        Some(_) | None => Match::Maybe,
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
