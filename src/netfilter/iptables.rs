//! The rules in iptables' syntax: reads `iptables-save`, writes input for `iptables-restore`.
//! Pure.

use crate::netfilter::diff::{ListedChain, Repair, Trigger, compare};
use crate::netfilter::rules::{Chain, KUBE_PROXY_MARK, Purpose, Rule, Side, Verdict};

/// Where the rules of a purpose live, by flannel's names.
pub(super) struct Place {
    pub(super) table: &'static str,
    /// The kernel's chain, from which ours is entered.
    pub(super) base: &'static str,
    pub(super) chain: &'static str,
    comment: &'static str,
}

/// By purpose.
pub(super) const PLACES: [Place; 2] = [
    Place { table: "nat", base: "POSTROUTING", chain: "FLANNEL-POSTRTG", comment: "flanneld masq" },
    Place { table: "filter", base: "FORWARD", chain: "FLANNEL-FWD", comment: "flanneld forward" },
];

/// Whether `iptables-save` reports in `line` that it can't list a table.
pub fn is_incompatible(line: &str) -> bool {
    line.starts_with("# Table ") && line.contains("is incompatible")
}

/// Our part of the output of `iptables-save` or `iptables -S`. Its size does not depend on the
/// host's other rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedRules {
    table: String,
    /// By purpose.
    chains: [(ListedChain<String>, Jumps); 2],
}

/// Rules of the base chain that enter ours, without their `-A CHAIN`.
type Jumps = Vec<String>;

impl SavedRules {
    /// Parses the next line. `iptables -S` does not print the table: pass `*nat` before it.
    pub fn take_line(&mut self, line: &str) {
        if let Some(table) = line.strip_prefix('*') {
            table.trim().clone_into(&mut self.table);
            return;
        }
        for purpose in Purpose::ALL {
            let place = &PLACES[purpose as usize];
            if self.table == place.table {
                let (own, jumps) = &mut self.chains[purpose as usize];
                take_line(line.trim_end(), place, own, jumps);
            }
        }
    }
}

fn take_line(line: &str, place: &Place, own: &mut ListedChain<String>, jumps: &mut Jumps) {
    if let Some(chain) = line.strip_prefix(':').or_else(|| line.strip_prefix("-N ")) {
        own.exists |= chain.split(' ').next() == Some(place.chain);
        return;
    }
    let Some((chain, text)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' ')) else {
        return;
    };
    let enters_ours = || words(text).windows(2).any(|pair| pair == ["-j", place.chain]);
    if chain == place.chain {
        own.rules.push(text.to_owned());
    } else if chain == place.base && enters_ours() {
        jumps.push(text.to_owned());
    }
}

/// Input for `iptables-restore --noflush` that corrects the chains of `wanted`; `None` if they are
/// correct. Each table changes atomically: there is no moment without rules.
pub fn transaction(wanted: &[Chain], found: &SavedRules, trigger: Trigger) -> Option<String> {
    let tables = wanted.iter().filter_map(|(purpose, rules)| {
        let place = &PLACES[*purpose as usize];
        let (own, jumps) = &found.chains[*purpose as usize];
        let is_printed_as = |rule: &Rule, text: &String| is_printed_as(rule, place.comment, text);
        let mut lines = chain_lines(place, &compare(rules, own, is_printed_as, trigger));
        lines.extend(jump_lines(place, jumps));
        (!lines.is_empty()).then(|| table(place.table, &lines))
    });
    let text: String = tables.collect();
    (!text.is_empty()).then_some(text)
}

/// Input for `iptables-restore --noflush` that removes our chains and jumps; `None` without any.
pub fn removal(found: &SavedRules) -> Option<String> {
    let tables = Purpose::ALL.into_iter().filter_map(|purpose| {
        let (place, (own, jumps)) = (&PLACES[purpose as usize], &found.chains[purpose as usize]);
        if !own.exists && jumps.is_empty() {
            return None;
        }
        // The chain is named even if it is not there: then it is made, so that it can be deleted.
        let mut lines = vec![format!(":{} - [0:0]", place.chain)];
        lines.extend(jumps.iter().map(|text| format!("-D {} {text}", place.base)));
        lines.push(format!("-X {}", place.chain));
        Some(table(place.table, &lines))
    });
    let text: String = tables.collect();
    (!text.is_empty()).then_some(text)
}

fn table(name: &str, lines: &[String]) -> String {
    format!("*{name}\n{}\nCOMMIT\n", lines.join("\n"))
}

fn chain_lines(place: &Place, repair: &Repair<String>) -> Vec<String> {
    let Place { chain, comment, .. } = place;
    let mut lines = Vec::new();
    // For a chain that is there, this line empties it.
    lines.extend(repair.is_refilled.then(|| format!(":{chain} - [0:0]")));
    lines.extend(repair.remove.iter().map(|text| format!("-D {chain} {text}")));
    lines.extend(repair.append.iter().map(|rule| format!("-A {chain} {}", spell(rule, comment))));
    lines
}

/// Leaves one jump into our chain.
fn jump_lines(place: &Place, jumps: &Jumps) -> Vec<String> {
    let Place { base, chain, comment, .. } = place;
    let jump = format!("-m comment --comment \"{comment}\" -j {chain}");
    let ours: Vec<_> = jumps.iter().filter(|text| words(text) == words(&jump)).collect();
    if ours.is_empty() {
        return vec![format!("-A {base} {jump}")];
    }
    ours.iter().skip(1).map(|text| format!("-D {base} {text}")).collect()
}

/// The rule as flannel gives it to iptables, without `-A CHAIN`.
fn spell(rule: &Rule, comment: &str) -> String {
    let mut words = Vec::new();
    if rule.only_marked {
        words.push(format!("-m mark --mark {KUBE_PROXY_MARK:#x}/{KUBE_PROXY_MARK:#x}"));
    }
    for (option, side) in [("-s", rule.source), ("-d", rule.destination)] {
        match side {
            None => {}
            Some(Side::In(prefix)) => words.push(format!("{option} {prefix}")),
            Some(Side::NotIn(prefix)) => words.push(format!("! {option} {prefix}")),
        }
    }
    words.push(format!("-m comment --comment \"{comment}\""));
    words.push(match rule.verdict {
        Verdict::Return => "-j RETURN".to_owned(),
        Verdict::Accept => "-j ACCEPT".to_owned(),
        Verdict::Masquerade { random_ports: false } => "-j MASQUERADE".to_owned(),
        Verdict::Masquerade { random_ports: true } => "-j MASQUERADE --random-fully".to_owned(),
    });
    words.join(" ")
}

/// Whether `iptables-save` prints `rule` as `text`: in the order in which it was given.
fn is_printed_as(rule: &Rule, comment: &str, text: &str) -> bool {
    words(text) == words(&spell(rule, comment))
}

/// The words of a rule, of which `iptables-save` quotes those that need it.
pub fn words(text: &str) -> Vec<String> {
    shlex::split(text).unwrap_or_default()
}

/// What the installed iptables can do, by its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ability {
    /// From 1.6.2 on `iptables-restore` waits for the lock of xtables, and MASQUERADE takes
    /// `--random-fully`.
    pub is_modern: bool,
    /// It lists a chain without reading the table and without the lock. On a table of 20,000 rules
    /// that is 7 ms of CPU time against the 470 of `iptables-save`.
    pub lists_chains: bool,
}

impl Ability {
    /// Reads the line of `iptables --version`, such as `iptables v1.8.9 (nf_tables)`. One that
    /// can't be read is taken for a new version's.
    pub fn of_version(line: &str) -> Self {
        let numbers = line.split_once('v').map_or("", |(_, rest)| rest);
        let numbers = numbers.split([' ', '\n']).next().unwrap_or_default();
        let numbers: Result<Vec<u32>, _> = numbers.split('.').map(str::parse).collect();
        let is_modern = numbers.map_or(true, |numbers| numbers >= vec![1, 6, 2]);
        Self { is_modern, lists_chains: line.contains("(nf_tables)") }
    }
}

#[cfg(test)]
mod tests;
