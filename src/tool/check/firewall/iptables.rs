//! The tables that may drop packets or send them elsewhere, as `iptables-save` and `ip6tables-save`
//! print them.

use std::str::FromStr;

use serde::Deserialize;
use serde_json::Value;

use crate::netfilter::iptables::words;
use crate::tool::explain::ToldFamily;

use super::{Action, Chain, Condition, Hook, Property, Rule, prefix};

/// Modules whose conditions have names of their own.
const MODULES: &str = "udp tcp icmp6 comment conntrack state mark multiport length addrtype";

/// The chains of the tables that may drop packets.
pub(crate) fn parse<A: ToldFamily>(text: &str) -> Vec<Chain<A>> {
    let program = A::IPTABLES.list.name;
    let mut chains: Vec<Chain<A>> = Vec::new();
    let mut table = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = match name {
                "filter" => Some(program.to_owned()),
                "raw" | "mangle" | "nat" => Some(format!("{program}' table {name}")),
                _ => None,
            };
            continue;
        }
        let Some(table) = &table else { continue };
        if let Some(heading) = line.strip_prefix(':') {
            let (name, policy) = heading.split_once(' ').unwrap_or((heading, ""));
            // Other chains have `-` for a policy.
            let is_base = !policy.starts_with('-');
            let hook = Hook::deserialize(Value::from(name.to_lowercase())).ok();
            chains.push(Chain {
                table: table.clone(),
                name: name.to_owned(),
                hook: hook.filter(|_| is_base),
                devices: Vec::new(),
                drops_at_end: policy.starts_with("DROP"),
                rules: Vec::new(),
            });
        } else if let Some((name, words)) =
            line.strip_prefix("-A ").and_then(|rest| rest.split_once(' '))
        {
            let is_its = |chain: &&mut Chain<A>| chain.table == *table && chain.name == name;
            if let Some(chain) = chains.iter_mut().find(is_its) {
                chain.rules.push(rule(line, words));
            }
        }
    }
    chains
}

fn rule<A: ToldFamily>(line: &str, text: &str) -> Rule<A> {
    let words = words(text);
    let mut words = words.iter().map(String::as_str).peekable();
    let mut rule = Rule { text: line.to_owned(), conditions: Vec::new(), action: Action::Nothing };
    let mut negated = false;
    while let Some(option) = words.next() {
        if option == "!" {
            negated = true;
            continue;
        }
        // One more value of the option before.
        if !option.starts_with('-') {
            continue;
        }
        let value = words.next_if(|word| !word.starts_with('-') && *word != "!");
        let value = value.unwrap_or_default();
        match option {
            // What follows describes the target.
            "-j" | "-g" => {
                rule.action =
                    if option == "-j" { target(value) } else { Action::Goto(value.to_owned()) };
                break;
            }
            "--comment" => {}
            "-m" if MODULES.split(' ').any(|module| module == value) => {}
            _ => rule.conditions.push(condition(option, value, negated)),
        }
        negated = false;
    }
    rule
}

fn target(name: &str) -> Action {
    match name {
        "ACCEPT" => Action::Accept,
        "DROP" | "REJECT" => Action::Drop,
        "REDIRECT" | "DNAT" => Action::Divert,
        "RETURN" => Action::Return,
        "LOG" | "NFLOG" | "MARK" | "CONNMARK" | "TRACE" | "TCPMSS" | "CT" | "DSCP" => {
            Action::Nothing
        }
        "QUEUE" | "NFQUEUE" => Action::Unknown,
        chain => Action::Jump(chain.to_owned()),
    }
}

fn condition<A: ToldFamily>(option: &str, value: &str, negated: bool) -> Condition<A> {
    let property = match option {
        "-p" => {
            let (is_udp, is_icmpv6) = (value == "udp", value == "ipv6-icmp");
            Some(Property::Protocol { is_udp, is_icmpv6 })
        }
        // Behind a slash there may be a code.
        "--icmpv6-type" => {
            value.split('/').next().and_then(range).map(|range| Property::Message(vec![range]))
        }
        "-s" => prefix(value).map(|it| Property::Source(vec![it])),
        "-d" => prefix(value).map(|it| Property::Destination(vec![it])),
        "-i" => Some(Property::ComesBy(value.to_owned())),
        "-o" => Some(Property::GoesBy(value.to_owned())),
        "--dport" | "--dports" => ranges(value).map(Property::Port),
        "--sport" | "--sports" => ranges(value).map(Property::SourcePort),
        "--length" => range(value).map(|(first, last)| Property::Length(first, last)),
        // Which packets are not tracked, other rules say.
        "--ctstate" | "--state" if !value.contains("UNTRACKED") => {
            Some(Property::State { is_new: value.split(',').any(|it| it == "NEW") })
        }
        "--dst-type" if value == "LOCAL" => Some(Property::ForHost),
        "--dst-type" if matches!(value, "MULTICAST" | "BROADCAST") => Some(Property::ForMany),
        // Nobody but kube-proxy sets its mark.
        "--mark" if value == "0x4000/0x4000" => (!negated).then_some(Property::Known(false)),
        _ => None,
    };
    Condition { property, negated }
}

/// `1301:65535`, `84`.
fn range<T: FromStr>(text: &str) -> Option<(T, T)> {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    Some((first.parse().ok()?, last.parse().ok()?))
}

/// `53`, `100:200`, `53,8285`.
fn ranges(text: &str) -> Option<Vec<(u16, u16)>> {
    text.split(',').map(range).collect()
}
