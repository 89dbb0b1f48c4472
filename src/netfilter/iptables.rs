//! The rules in iptables' syntax: parses `iptables-save`, writes input for `iptables-restore`.
//! Pure.

use crate::netfilter::diff::{Repair, Trigger, compare};
use crate::netfilter::rules::{KUBE_PROXY_MARK, Purpose, Rule, Side, Verdict};

/// Where the rules of a purpose live, by flannel's names.
struct Place {
    table: &'static str,
    /// The kernel's chain, from which ours is entered.
    base: &'static str,
    chain: &'static str,
    comment: &'static str,
}

fn place(purpose: Purpose) -> Place {
    match purpose {
        Purpose::Masquerade => Place {
            table: "nat",
            base: "POSTROUTING",
            chain: "FLANNEL-POSTRTG",
            comment: "flanneld masq",
        },
        Purpose::Forward => Place {
            table: "filter",
            base: "FORWARD",
            chain: "FLANNEL-FWD",
            comment: "flanneld forward",
        },
    }
}

/// The table in which the rules of a purpose are.
#[must_use]
pub fn table_of(purpose: Purpose) -> &'static str {
    place(purpose).table
}

/// The chains in which they are: our own, and the kernel's.
#[must_use]
pub fn chains_of(purpose: Purpose) -> [&'static str; 2] {
    [place(purpose).chain, place(purpose).base]
}

/// Whether `iptables-save` reports in `line` that it can't list a table.
#[must_use]
pub fn is_incompatible(line: &str) -> bool {
    line.starts_with("# Table ") && line.contains("is incompatible")
}

/// Our part of the output of `iptables-save` or `iptables -S`. Its size does not depend on the
/// host's other rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    table: String,
    /// By purpose.
    chains: [FoundChain; 2],
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct FoundChain {
    exists: bool,
    rules: Vec<FoundRule>,
    /// Rules of the base chain that enter ours, without their `-A CHAIN`.
    jumps: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct FoundRule {
    text: String,
    rule: Option<Rule>,
}

impl Found {
    /// Parses the next line. `iptables -S` does not print the table: pass `*nat` before it.
    pub fn take_line(&mut self, line: &str) {
        if let Some(table) = line.strip_prefix('*') {
            table.trim().clone_into(&mut self.table);
            return;
        }
        for purpose in Purpose::ALL {
            let place = place(purpose);
            if self.table == place.table {
                self.chains[purpose.index()].take_line(line.trim_end(), &place);
            }
        }
    }
}

impl FoundChain {
    fn take_line(&mut self, line: &str, place: &Place) {
        if let Some(chain) = line.strip_prefix(':').or_else(|| line.strip_prefix("-N ")) {
            self.exists |= chain.split(' ').next() == Some(place.chain);
            return;
        }
        let Some((chain, text)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' '))
        else {
            return;
        };
        if chain == place.chain {
            let rule = parse(text, place.comment);
            self.rules.push(FoundRule { text: text.to_owned(), rule });
        } else if chain == place.base
            && words(text).windows(2).any(|pair| pair == ["-j", place.chain])
        {
            self.jumps.push(text.to_owned());
        }
    }
}

/// Input for `iptables-restore --noflush` that corrects the chains of `wanted`; `None` if they are
/// correct. Each table changes atomically: there is no moment without rules.
#[must_use]
pub fn transaction(
    wanted: &[(Purpose, Vec<Rule>)],
    found: &Found,
    trigger: Trigger,
) -> Option<String> {
    let tables = wanted.iter().filter_map(|(purpose, rules)| {
        let place = place(*purpose);
        let lines = chain_lines(&place, rules, &found.chains[purpose.index()], trigger);
        (!lines.is_empty()).then(|| table(place.table, &lines))
    });
    let text: String = tables.collect();
    (!text.is_empty()).then_some(text)
}

/// Input for `iptables-restore --noflush` that removes our chains and jumps; `None` without any.
#[must_use]
pub fn removal(found: &Found) -> Option<String> {
    let tables = Purpose::ALL.into_iter().filter_map(|purpose| {
        let (place, chain) = (place(purpose), &found.chains[purpose.index()]);
        if !chain.exists && chain.jumps.is_empty() {
            return None;
        }
        // The chain is named even if it is not there: then it is made, so that it can be deleted.
        let mut lines = vec![format!(":{} - [0:0]", place.chain)];
        lines.extend(chain.jumps.iter().map(|text| format!("-D {} {text}", place.base)));
        lines.push(format!("-X {}", place.chain));
        Some(table(place.table, &lines))
    });
    let text: String = tables.collect();
    (!text.is_empty()).then_some(text)
}

fn table(name: &str, lines: &[String]) -> String {
    format!("*{name}\n{}\nCOMMIT\n", lines.join("\n"))
}

fn chain_lines(
    place: &Place,
    wanted: &[Rule],
    found: &FoundChain,
    trigger: Trigger,
) -> Vec<String> {
    let Place { base, chain, comment, .. } = place;
    let append = |rule: &Rule| format!("-A {chain} {}", spell(rule, comment));
    // For a chain that is there, this line empties it.
    let refill = || {
        let head = std::iter::once(format!(":{chain} - [0:0]"));
        head.chain(wanted.iter().map(append)).collect()
    };
    let read: Vec<_> = found.rules.iter().map(|found| found.rule).collect();
    let mut lines: Vec<String> = match compare(wanted, &read, trigger) {
        _ if !found.exists => refill(),
        Repair::Nothing => Vec::new(),
        Repair::Refill => refill(),
        Repair::Amend { remove, append: missing } => {
            let removed = remove.iter().map(|at| format!("-D {chain} {}", found.rules[*at].text));
            removed.chain(missing.iter().map(append)).collect()
        }
    };
    let jump = format!("-m comment --comment \"{comment}\" -j {chain}");
    let jumps = found.jumps.iter().filter(|text| words(text) == words(&jump));
    let spare = jumps.clone().skip(1);
    lines.extend(spare.map(|text| format!("-D {base} {text}")));
    if jumps.count() == 0 {
        lines.push(format!("-A {base} {jump}"));
    }
    lines
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

/// Reads a rule that has this comment; `None` for what flannel would never write.
fn parse(text: &str, comment: &str) -> Option<Rule> {
    let mut rule = Rule::all(Verdict::Return);
    let (mut is_negated, mut has_verdict, mut is_comment_right) = (false, false, false);
    let words = words(text);
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        let side = |words: &mut dyn Iterator<Item = &str>| {
            let prefix = words.next()?.parse().ok()?;
            Some(if is_negated { Side::NotIn(prefix) } else { Side::In(prefix) })
        };
        match word {
            "!" if !is_negated => {
                is_negated = true;
                continue;
            }
            "-s" if rule.source.is_none() => rule.source = Some(side(&mut words)?),
            "-d" if rule.destination.is_none() => rule.destination = Some(side(&mut words)?),
            _ if is_negated => return None,
            "-m" => _ = words.next().filter(|name| ["comment", "mark"].contains(name))?,
            "--comment" => is_comment_right = words.next()? == comment,
            "--mark" => rule.only_marked = is_our_mark(words.next()?).then_some(true)?,
            "-j" => {
                has_verdict = true;
                rule.verdict = match words.next()? {
                    "RETURN" => Verdict::Return,
                    "ACCEPT" => Verdict::Accept,
                    "MASQUERADE" => Verdict::Masquerade { random_ports: false },
                    _ => return None,
                };
            }
            "--random-fully" if rule.verdict == (Verdict::Masquerade { random_ports: false }) => {
                rule.verdict = Verdict::Masquerade { random_ports: true };
            }
            _ => return None,
        }
        is_negated = false;
    }
    (has_verdict && is_comment_right && !is_negated).then_some(rule)
}

fn is_our_mark(text: &str) -> bool {
    let number = |text: &str| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let parts = text.split_once('/').map(|(value, mask)| (number(value), number(mask)));
    parts == Some((Some(KUBE_PROXY_MARK), Some(KUBE_PROXY_MARK)))
}

/// Splits as `iptables-restore` does: at spaces outside of double quotes, a backslash keeps what
/// comes after it.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let (mut is_quoted, mut is_escaped) = (false, false);
    for character in text.chars() {
        match character {
            _ if is_escaped => {
                word.get_or_insert_default().push(character);
                is_escaped = false;
            }
            '\\' => is_escaped = true,
            '"' => {
                is_quoted = !is_quoted;
                word.get_or_insert_default();
            }
            ' ' | '\t' if !is_quoted => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

/// What the installed iptables can do, by its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ability {
    /// `iptables-restore` waits for the lock of xtables.
    pub waits: bool,
    /// MASQUERADE takes `--random-fully`.
    pub random_ports: bool,
    /// It lists a chain without reading the table and without the lock. On a table of 20,000 rules
    /// that is 7 ms of CPU time against the 470 of `iptables-save`.
    pub lists_chains: bool,
}

impl Ability {
    /// Reads the line of `iptables --version`, such as `iptables v1.8.9 (nf_tables)`. Waiting and
    /// random ports came with 1.6.2; a line that can't be read is taken for a new version's.
    #[must_use]
    pub fn of_version(line: &str) -> Self {
        let numbers = line.split_once('v').map_or("", |(_, rest)| rest);
        let numbers = numbers.split([' ', '\n']).next().unwrap_or_default();
        let numbers: Result<Vec<u32>, _> = numbers.split('.').map(str::parse).collect();
        let is_new = numbers.map_or(true, |numbers| numbers >= vec![1, 6, 2]);
        Self { waits: is_new, random_ports: is_new, lists_chains: line.contains("(nf_tables)") }
    }
}

#[cfg(test)]
mod tests;
