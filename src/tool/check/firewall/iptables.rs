//! The filter table as `iptables-save` prints it.

use super::{Action, Chain, Condition, Hook, Rule, prefix};

/// The chains of the filter table.
pub(in crate::tool::check) fn parse(text: &str) -> Vec<Chain> {
    let mut chains: Vec<Chain> = Vec::new();
    let mut is_filter = false;
    for line in text.lines() {
        if let Some(table) = line.strip_prefix('*') {
            is_filter = table == "filter";
        } else if !is_filter {
        } else if let Some(heading) = line.strip_prefix(':') {
            let mut words = heading.split(' ');
            let name = words.next().unwrap_or_default().to_owned();
            let hook = match name.as_str() {
                "INPUT" => Some(Hook::Input),
                "FORWARD" => Some(Hook::Forward),
                _ => None,
            };
            let drops_at_end = words.next() == Some("DROP");
            let table = "iptables".to_owned();
            chains.push(Chain { table, name, hook, drops_at_end, rules: Vec::new() });
        } else if let Some(rest) = line.strip_prefix("-A ") {
            let (name, words) = rest.split_once(' ').unwrap_or((rest, ""));
            if let Some(chain) = chains.iter_mut().find(|chain| chain.name == name) {
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
        "-s" => {
            prefix(value).map_or(Condition::Unknown, |it| Condition::Source { prefix: it, negated })
        }
        "-d" => prefix(value)
            .map_or(Condition::Unknown, |it| Condition::Destination { prefix: it, negated }),
        "-i" => Condition::ComesBy { name: value.to_owned(), negated },
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

/// Words, of which those in quotes may have blanks.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let (mut is_quoted, mut is_escaped) = (false, false);
    for c in text.chars() {
        match c {
            '"' if !is_escaped => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            c => words.last_mut().into_iter().for_each(|word| word.push(c)),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// `53`, `100:200`, `53,8285`.
fn ranges(text: &str) -> Option<Vec<(u16, u16)>> {
    let range = |part: &str| {
        let (first, last) = part.split_once(':').unwrap_or((part, part));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    text.split(',').map(range).collect()
}
