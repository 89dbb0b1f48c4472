//! The tables that may drop packets, as `iptables-save` prints them.

use crate::netfilter::iptables::words;

use super::{Action, Chain, Condition, Hook, Rule, prefix};

/// The chains of the tables that may drop packets.
pub(crate) fn parse(text: &str) -> Vec<Chain> {
    let mut chains: Vec<Chain> = Vec::new();
    let mut table = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = match name {
                "filter" => Some("iptables".to_owned()),
                "raw" | "mangle" => Some(format!("iptables' table {name}")),
                _ => None,
            };
            continue;
        }
        let Some(table) = &table else { continue };
        if let Some(heading) = line.strip_prefix(':') {
            let mut words = heading.split(' ');
            let name = words.next().unwrap_or_default().to_owned();
            let hook = match name.as_str() {
                "PREROUTING" => Some(Hook::Prerouting),
                "INPUT" => Some(Hook::Input),
                "FORWARD" => Some(Hook::Forward),
                "OUTPUT" => Some(Hook::Output),
                "POSTROUTING" => Some(Hook::Postrouting),
                _ => None,
            };
            let drops_at_end = words.next() == Some("DROP");
            chains.push(Chain {
                table: table.clone(),
                name,
                hook,
                drops_at_end,
                ..Chain::default()
            });
        } else if let Some(rest) = line.strip_prefix("-A ") {
            let (name, words) = rest.split_once(' ').unwrap_or((rest, ""));
            let is_its = |chain: &&mut Chain| chain.table == *table && chain.name == name;
            if let Some(chain) = chains.iter_mut().find(is_its) {
                let rule = rule(words);
                chain.rules.push(Rule { text: line.to_owned(), ..rule });
            }
        }
    }
    chains
}

fn rule(text: &str) -> Rule {
    let words = words(text);
    let mut words = words.iter().map(String::as_str).peekable();
    let mut conditions = Vec::new();
    let mut action = Action::Nothing;
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
            "-j" => {
                action = target(value);
                // What follows describes the target.
                break;
            }
            "-g" => {
                action = Action::Goto(value.to_owned());
                break;
            }
            "--comment" => {}
            // The conditions of these have names of their own.
            "-m" => match value {
                "udp" | "tcp" | "comment" | "conntrack" | "state" | "mark" | "multiport" => {}
                _ => conditions.push(Condition::Unknown),
            },
            _ => conditions.push(condition(option, value, negated)),
        }
        negated = false;
    }
    Rule { text: String::new(), conditions, action }
}

fn target(name: &str) -> Action {
    match name {
        "ACCEPT" => Action::Accept,
        "DROP" | "REJECT" => Action::Drop,
        "RETURN" => Action::Return,
        "LOG" | "NFLOG" | "MARK" | "CONNMARK" | "TRACE" => Action::Nothing,
        "QUEUE" | "NFQUEUE" => Action::Unknown,
        chain => Action::Jump(chain.to_owned()),
    }
}

fn condition(word: &str, value: &str, negated: bool) -> Condition {
    match word {
        "-p" => Condition::Protocol { is_udp: value == "udp", negated },
        "-s" | "-d" => match prefix(value) {
            Some(it) if word == "-s" => Condition::Source { prefixes: vec![it], negated },
            Some(it) => Condition::Destination { prefixes: vec![it], negated },
            None => Condition::Unknown,
        },
        "-i" => Condition::ComesBy { name: value.to_owned(), negated },
        "-o" => Condition::GoesBy { name: value.to_owned(), negated },
        "--dport" | "--dports" => match ranges(value) {
            Some(ranges) => Condition::Port { ranges, negated },
            None => Condition::Unknown,
        },
        // Which packets are not tracked, other rules say.
        "--ctstate" | "--state" if value.contains("UNTRACKED") => Condition::Unknown,
        "--ctstate" | "--state" => {
            Condition::State { takes_new: value.split(',').any(|it| it == "NEW") != negated }
        }
        "--mark" if value == "0x4000/0x4000" && !negated => Condition::Never,
        _ => Condition::Unknown,
    }
}

/// `53`, `100:200`, `53,8285`.
fn ranges(text: &str) -> Option<Vec<(u16, u16)>> {
    let range = |part: &str| {
        let (first, last) = part.split_once(':').unwrap_or((part, part));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    text.split(',').map(range).collect()
}
