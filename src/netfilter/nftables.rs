//! The rules in nftables' syntax: parses `nft -j list table`, writes input for `nft -f`. Pure.

use serde_json::Value;

use crate::netfilter::diff::{FoundChain, Repair, Trigger, compare};
use crate::netfilter::rules::{KUBE_PROXY_MARK, Purpose, Rule, Side, Verdict};
use crate::route::Prefix;

/// The table of our rules, by flannel's name.
pub const TABLE: &str = "flannel-ipv4";

/// flannel's table for IPv6, which it makes even where there is no IPv6.
const TABLE_IPV6: &str = "flannel-ipv6";

/// A chain with its hook, by flannel's names.
struct Place {
    chain: &'static str,
    kind: &'static str,
    hook: &'static str,
    priority: i64,
    comment: &'static str,
}

fn place(purpose: Purpose) -> Place {
    match purpose {
        Purpose::Masquerade => Place {
            chain: "postrtg",
            kind: "nat",
            hook: "postrouting",
            // `srcnat`, spelled so that every nft reads it.
            priority: 100,
            comment: "chain to manage traffic masquerading by flannel",
        },
        Purpose::Forward => Place {
            chain: "forward",
            kind: "filter",
            hook: "forward",
            priority: 0,
            comment: "chain to accept flannel traffic",
        },
    }
}

/// What the kernel has of our table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// By purpose, with the rules' handles.
    chains: [FoundChain<u64>; 2],
}

/// The output of nft is not what its manual describes.
#[derive(Debug, thiserror::Error)]
#[error("nft printed no list of objects as JSON: {0}")]
pub struct ListError(String);

impl Found {
    /// Reads the output of `nft -j list table ip flannel-ipv4`.
    pub fn parse(json: &str) -> Result<Self, ListError> {
        let mut found = Self::default();
        for object in objects(json)? {
            for purpose in Purpose::ALL {
                take_object(&object, &place(purpose), &mut found.chains[purpose as usize]);
            }
        }
        Ok(found)
    }
}

fn take_object(object: &Value, place: &Place, found: &mut FoundChain<u64>) {
    let (chain, rule) = (&object["chain"], &object["rule"]);
    // Without its hook it is another chain of that name.
    found.exists |= chain["name"] == place.chain && chain["hook"] == place.hook;
    if rule["chain"] == place.chain
        && let Some(handle) = rule["handle"].as_u64()
    {
        found.rules.push((handle, parse_rule(&rule["expr"])));
    }
}

/// flannel's tables among those of `nft -j list tables`.
pub fn own_tables(json: &str) -> Result<Vec<(&'static str, &'static str)>, ListError> {
    let objects = objects(json)?;
    let known = [("ip", TABLE), ("ip6", TABLE_IPV6)];
    let is_there = |(family, name): &(&str, &str)| {
        let table = objects.iter().map(|object| &object["table"]);
        table.into_iter().any(|table| table["family"] == *family && table["name"] == *name)
    };
    Ok(known.into_iter().filter(is_there).collect())
}

fn objects(json: &str) -> Result<Vec<Value>, ListError> {
    let mut value: Value =
        serde_json::from_str(json).map_err(|error| ListError(error.to_string()))?;
    match value.get_mut("nftables").map(Value::take) {
        Some(Value::Array(objects)) => Ok(objects),
        Some(_) | None => Err(ListError("no \"nftables\" with a list".to_owned())),
    }
}

/// Input for `nft -f` that corrects the chains of `wanted`; `None` if they are correct. It is
/// applied atomically: there is no moment without rules.
pub fn transaction(
    wanted: &[(Purpose, Vec<Rule>)],
    found: &Found,
    trigger: Trigger,
) -> Option<String> {
    let chains = wanted.iter().map(|(purpose, rules)| {
        let repair = compare(rules, &found.chains[*purpose as usize], trigger);
        chain_lines(&place(*purpose), &repair)
    });
    let lines: Vec<_> = chains.flatten().collect();
    if lines.is_empty() {
        return None;
    }
    let table = format!("add table ip {TABLE} {{ comment \"rules for {TABLE}\" ; }}");
    Some(format!("{table}\n{}\n", lines.join("\n")))
}

/// Input for `nft -f` that removes `tables`.
pub fn removal(tables: &[(&str, &str)]) -> Option<String> {
    let lines = tables.iter().map(|(family, name)| format!("delete table {family} {name}\n"));
    let text: String = lines.collect();
    (!text.is_empty()).then_some(text)
}

fn chain_lines(place: &Place, repair: &Repair<u64>) -> Vec<String> {
    let Place { chain, kind, hook, priority, comment } = place;
    let mut lines = Vec::new();
    if repair.is_refilled {
        lines.push(format!(
            "add chain ip {TABLE} {chain} {{ type {kind} hook {hook} priority {priority} ; \
             comment \"{comment}\" ; }}"
        ));
        lines.push(format!("flush chain ip {TABLE} {chain}"));
    }
    let delete = |handle: &u64| format!("delete rule ip {TABLE} {chain} handle {handle}");
    lines.extend(repair.remove.iter().map(delete));
    let add = |rule: &Rule| format!("add rule ip {TABLE} {chain} {}", spell(rule));
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
            Some(Side::In(prefix)) => words.push(format!("ip {field} {prefix}")),
            Some(Side::NotIn(prefix)) => words.push(format!("ip {field} != {prefix}")),
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

/// Parses a rule's expressions; `None` for rules that we never write.
fn parse_rule(expressions: &Value) -> Option<Rule> {
    let (last, matches) = expressions.as_array()?.split_last()?;
    let mut rule = Rule::all(parse_verdict(last)?);
    for expression in matches {
        let expression = &expression["match"];
        let (left, right) = (&expression["left"], &expression["right"]);
        let is_equal = match expression["op"].as_str()? {
            "==" => true,
            "!=" => false,
            _ => return None,
        };
        let side = || {
            let prefix = parse_prefix(right)?;
            Some(if is_equal { Side::In(prefix) } else { Side::NotIn(prefix) })
        };
        if *left == mark_under_mask() {
            let is_ours = is_equal && !rule.only_marked && *right == KUBE_PROXY_MARK;
            rule.only_marked = is_ours.then_some(true)?;
        } else if *left == address("saddr") && rule.source.is_none() {
            rule.source = Some(side()?);
        } else if *left == address("daddr") && rule.destination.is_none() {
            rule.destination = Some(side()?);
        } else {
            return None;
        }
    }
    Some(rule)
}

fn mark_under_mask() -> Value {
    serde_json::json!({ "&": [{ "meta": { "key": "mark" } }, KUBE_PROXY_MARK] })
}

fn address(field: &str) -> Value {
    serde_json::json!({ "payload": { "protocol": "ip", "field": field } })
}

fn parse_verdict(expression: &Value) -> Option<Verdict> {
    let expression = expression.as_object().filter(|object| object.len() == 1)?;
    let (name, value) = expression.iter().next()?;
    match (name.as_str(), value) {
        ("return", Value::Null) => Some(Verdict::Return),
        ("accept", Value::Null) => Some(Verdict::Accept),
        ("masquerade", Value::Null) => Some(Verdict::Masquerade { random_ports: false }),
        ("masquerade", options) => {
            let flags = &options["flags"];
            // One flag is a word or a list, by nft's version.
            let is_random =
                *flags == "fully-random" || *flags == serde_json::json!(["fully-random"]);
            let is_all = options.as_object()?.len() == 1;
            (is_random && is_all).then_some(Verdict::Masquerade { random_ports: true })
        }
        _ => None,
    }
}

fn parse_prefix(value: &Value) -> Option<Prefix> {
    if let Some(address) = value.as_str() {
        return Prefix::new(address.parse().ok()?, 32);
    }
    let (address, length) = (&value["prefix"]["addr"], &value["prefix"]["len"]);
    Prefix::new(address.as_str()?.parse().ok()?, u8::try_from(length.as_u64()?).ok()?)
}

#[cfg(test)]
mod tests;
