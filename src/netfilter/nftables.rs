//! The rules in nftables' syntax: parses `nft -j list table`, writes input for `nft -f`. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::netfilter::diff::{ListedChain, Repair, Trigger, compare};
use crate::netfilter::rules::{
    Block, Chain, Family, KUBE_PROXY_MARK, Purpose, Rule, Side, Verdict,
};

/// A table by its family, in nft's word, and its name.
pub type Table = (&'static str, &'static str);

/// The table of our rules for `family`, by flannel's name. flannel makes that of IPv6 even where
/// there is no IPv6.
pub fn table(family: Family) -> Table {
    match family {
        Family::V4 => ("ip", "flannel-ipv4"),
        Family::V6 => ("ip6", "flannel-ipv6"),
    }
}

/// A chain with its hook, by flannel's names.
struct Place {
    chain: &'static str,
    kind: &'static str,
    hook: &'static str,
    priority: i64,
    comment: &'static str,
}

/// By purpose.
const PLACES: [Place; 2] = [
    Place {
        chain: "postrtg",
        kind: "nat",
        hook: "postrouting",
        // `srcnat`, spelled so that every nft reads it.
        priority: 100,
        comment: "chain to manage traffic masquerading by flannel",
    },
    Place {
        chain: "forward",
        kind: "filter",
        hook: "forward",
        priority: 0,
        comment: "chain to accept flannel traffic",
    },
];

/// What the kernel has of our table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedRules {
    /// By purpose.
    chains: [ListedChain<Printed>; 2],
}

/// A rule's handle and its expressions.
type Printed = (u64, Value);

/// The output of nft is not what its manual describes.
#[derive(Debug, thiserror::Error)]
#[error("nft printed no list of objects as JSON: {0}")]
pub struct ListError(String);

impl ListedRules {
    /// Reads the output of `nft -j list table ip flannel-ipv4`.
    pub fn parse(text: &str) -> Result<Self, ListError> {
        let mut found = Self::default();
        for (kind, object) in objects(text)? {
            for purpose in Purpose::ALL {
                let chain = &mut found.chains[purpose as usize];
                take_object(&kind, &object, &PLACES[purpose as usize], chain);
            }
        }
        Ok(found)
    }
}

fn take_object(kind: &str, object: &Value, place: &Place, found: &mut ListedChain<Printed>) {
    // Without its hook it is another chain of that name.
    let is_hooked = || object["name"] == place.chain && object["hook"] == place.hook;
    found.exists |= kind == "chain" && is_hooked();
    if kind == "rule"
        && object["chain"] == place.chain
        && let Some(handle) = object["handle"].as_u64()
    {
        found.rules.push((handle, object["expr"].clone()));
    }
}

/// Input for `nft -f` that removes those of `nft -j list tables` that `is_meant` takes by their
/// family and name.
pub fn removal(
    json: &str,
    is_meant: impl Fn(&str, &str) -> bool,
) -> Result<Option<String>, ListError> {
    let mut text = String::new();
    for (kind, object) in objects(json)? {
        let word = |key: &str| object[key].as_str();
        if let ("table", Some(family), Some(name)) = (kind.as_str(), word("family"), word("name"))
            && is_meant(family, name)
        {
            text += &format!("delete table {family} {name}\n");
        }
    }
    Ok((!text.is_empty()).then_some(text))
}

/// The objects of a listing in nft's JSON (libnftables-json(5)), each with its kind: `table`,
/// `chain`, `rule`, `set` and so on.
pub fn objects(json: &str) -> Result<Vec<(String, Value)>, ListError> {
    #[derive(Deserialize)]
    struct Listing {
        nftables: Vec<BTreeMap<String, Value>>,
    }
    let listing: Listing =
        serde_json::from_str(json).map_err(|error| ListError(error.to_string()))?;
    Ok(listing.nftables.into_iter().flatten().collect())
}

/// Input for `nft -f` that corrects the chains of `wanted` in `table`; `None` if they are correct.
/// It is applied atomically: there is no moment without rules.
pub fn transaction(
    table: Table,
    wanted: &[Chain],
    found: &ListedRules,
    trigger: Trigger,
) -> Option<String> {
    let chains = wanted.iter().map(|(purpose, rules)| {
        let found = &found.chains[*purpose as usize];
        let repair = compare(rules, found, is_printed_as, trigger);
        chain_lines(table, &PLACES[*purpose as usize], &repair)
    });
    let lines: Vec<_> = chains.flatten().collect();
    if lines.is_empty() {
        return None;
    }
    let (family, name) = table;
    let head = format!("add table {family} {name} {{ comment \"rules for {name}\" ; }}");
    Some(format!("{head}\n{}\n", lines.join("\n")))
}

fn chain_lines((family, table): Table, place: &Place, repair: &Repair<Printed>) -> Vec<String> {
    let Place { chain, kind, hook, priority, comment } = place;
    let chain = format!("{family} {table} {chain}");
    let mut lines = Vec::new();
    if repair.is_refilled {
        lines.push(format!(
            "add chain {chain} {{ type {kind} hook {hook} priority {priority} ; \
             comment \"{comment}\" ; }}"
        ));
        lines.push(format!("flush chain {chain}"));
    }
    let delete = |(handle, _): &Printed| format!("delete rule {chain} handle {handle}");
    lines.extend(repair.remove.iter().map(delete));
    let add = |rule: &Rule| format!("add rule {chain} {}", spell(rule));
    lines.extend(repair.append.iter().map(add));
    lines
}

fn spell(rule: &Rule) -> String {
    let mut words = Vec::new();
    if rule.only_marked {
        words.push(format!("meta mark & {KUBE_PROXY_MARK:#x} == {KUBE_PROXY_MARK:#x}"));
    }
    for (field, side) in [("saddr", rule.source), ("daddr", rule.destination)] {
        match side {
            None => {}
            Some(Side::In(block)) => words.push(format!("{} {field} {block}", word(block))),
            Some(Side::NotIn(block)) => words.push(format!("{} {field} != {block}", word(block))),
        }
    }
    words.push(match rule.verdict {
        Verdict::Return => "return".to_owned(),
        Verdict::Accept => "accept".to_owned(),
        Verdict::Masquerade { random_ports: false } => "masquerade".to_owned(),
        Verdict::Masquerade { random_ports: true } => "masquerade fully-random".to_owned(),
    });
    words.join(" ")
}

/// What nft calls the family of `block`.
fn word(block: Block) -> &'static str {
    if block.network.is_ipv4() { "ip" } else { "ip6" }
}

fn is_printed_as(rule: &Rule, (_, printed): &Printed) -> bool {
    // One flag is a word or a list, by nft's version.
    let flags = [json!("fully-random"), json!(["fully-random"])];
    flags.iter().any(|flags| expressions(rule, flags) == *printed)
}

/// How nft prints `rule`.
fn expressions(rule: &Rule, random_flags: &Value) -> Value {
    let compare = |op, left, right| json!({ "match": { "op": op, "left": left, "right": right } });
    let mut all = Vec::new();
    if rule.only_marked {
        let marks = json!({ "&": [{ "meta": { "key": "mark" } }, KUBE_PROXY_MARK] });
        all.push(compare("==", marks, json!(KUBE_PROXY_MARK)));
    }
    for (field, side) in [("saddr", rule.source), ("daddr", rule.destination)] {
        let (op, block) = match side {
            None => continue,
            Some(Side::In(block)) => ("==", block),
            Some(Side::NotIn(block)) => ("!=", block),
        };
        let Block { network, length_bits } = block;
        let right = match (network, length_bits) {
            (IpAddr::V4(_), 32) | (IpAddr::V6(_), 128) => json!(network),
            _ => json!({ "prefix": { "addr": network, "len": length_bits } }),
        };
        let payload = json!({ "payload": { "protocol": word(block), "field": field } });
        all.push(compare(op, payload, right));
    }
    all.push(match rule.verdict {
        Verdict::Return => json!({ "return": null }),
        Verdict::Accept => json!({ "accept": null }),
        Verdict::Masquerade { random_ports: false } => json!({ "masquerade": null }),
        Verdict::Masquerade { random_ports: true } => {
            json!({ "masquerade": { "flags": random_flags } })
        }
    });
    Value::Array(all)
}

#[cfg(test)]
mod tests;
