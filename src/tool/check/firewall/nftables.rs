//! The rules as `nft -j list ruleset` prints them (libnftables-json(5)).

use std::collections::BTreeMap;

use serde_json::Value;

use crate::netfilter::nftables::objects;
use crate::route::Prefix;

use super::{Action, Chain, Condition, Hook, Rule, prefix};

/// The elements of named sets, by table and name.
type Sets = BTreeMap<(String, String), Value>;

/// The chains that IPv4 packets may meet; nothing if it is not nft's JSON.
pub(crate) fn parse(text: &str) -> Option<Vec<Chain>> {
    let objects = objects(text).ok()?;
    let of_kind = |kind: &'static str| {
        objects.iter().filter(move |(other, _)| other == kind).map(|(_, object)| object)
    };
    let dormant: Vec<_> = of_kind("table")
        .filter(|table| table["flags"].to_string().contains("dormant"))
        .map(|table| named(table, "name"))
        .collect();
    let mut chains: Vec<_> = of_kind("chain").filter_map(chain).collect();
    chains.retain(|chain| !dormant.contains(&chain.table));
    let name = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    let elements = |set: &Value| ((named(set, "table"), name(set)), set["elem"].clone());
    let sets: Sets = of_kind("set").map(elements).collect();
    for rule in of_kind("rule") {
        let (table, name) = (named(rule, "table"), rule["chain"].as_str());
        let is_its = |chain: &&mut Chain| chain.table == table && Some(&*chain.name) == name;
        if let Some(chain) = chains.iter_mut().find(is_its) {
            chain.rules.push(parse_rule(rule, &table, &sets));
        }
    }
    Some(chains)
}

/// Family and name of the table that an object is, or lies in.
fn named(object: &Value, key: &str) -> String {
    let word = |name: &str| object[name].as_str().unwrap_or("?");
    format!("{} {}", word("family"), word(key))
}

fn chain(object: &Value) -> Option<Chain> {
    if !matches!(object["family"].as_str()?, "ip" | "inet" | "netdev") {
        return None;
    }
    let hook = match object["hook"].as_str() {
        Some("ingress") => Some(Hook::Ingress),
        Some("prerouting") => Some(Hook::Prerouting),
        Some("input") => Some(Hook::Input),
        Some("forward") => Some(Hook::Forward),
        Some("output") => Some(Hook::Output),
        Some("postrouting") => Some(Hook::Postrouting),
        Some("egress") => Some(Hook::Egress),
        _ => None,
    };
    let name = object["name"].as_str()?.to_owned();
    let drops_at_end = object["policy"] == "drop";
    let devices = words(&object["dev"]).into_iter().map(str::to_owned).collect();
    Some(Chain { table: named(object, "table"), name, hook, devices, drops_at_end, rules: vec![] })
}

fn parse_rule(object: &Value, table: &str, sets: &Sets) -> Rule {
    let mut conditions = Vec::new();
    let mut action = Action::Nothing;
    for part in object["expr"].as_array().into_iter().flatten() {
        let Some((word, value)) = part.as_object().and_then(|it| it.iter().next()) else {
            conditions.push(Condition::Unknown);
            continue;
        };
        let target = || value["target"].as_str().unwrap_or_default().to_owned();
        match word.as_str() {
            "match" => conditions.push(condition(value, table, sets)),
            "accept" => action = Action::Accept,
            "drop" | "reject" => action = Action::Drop,
            "return" => action = Action::Return,
            "jump" => action = Action::Jump(target()),
            "goto" => action = Action::Goto(target()),
            "counter" | "log" | "mangle" | "comment" => {}
            "vmap" if is_of_old_connections(value) => {}
            "vmap" | "queue" | "fwd" | "tproxy" => action = Action::Unknown,
            _ => conditions.push(Condition::Unknown),
        }
    }
    let text = format!(
        "rule {} of chain {}{}",
        object["handle"],
        object["chain"].as_str().unwrap_or("?"),
        described(&conditions),
    );
    Rule { text, conditions, action }
}

/// What of a rule helps to find it again.
fn described(conditions: &[Condition]) -> String {
    let ports = conditions.iter().find_map(|condition| match condition {
        Condition::Port { ranges, negated: false } => Some(ranges),
        Condition::Port { .. }
        | Condition::Protocol { .. }
        | Condition::Source { .. }
        | Condition::Destination { .. }
        | Condition::ComesBy { .. }
        | Condition::GoesBy { .. }
        | Condition::State { .. }
        | Condition::Never
        | Condition::Unknown => None,
    });
    let texts = ports.into_iter().flatten().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    let texts: Vec<_> = texts.collect();
    if texts.is_empty() { String::new() } else { format!(", UDP port {}", texts.join(", ")) }
}

fn condition(object: &Value, table: &str, sets: &Sets) -> Condition {
    let negated = match object["op"].as_str() {
        Some("==" | "in") => false,
        Some("!=") => true,
        _ => return Condition::Unknown,
    };
    let (left, mut right) = (&object["left"], &object["right"]);
    if let Some(set) = right.as_str().and_then(|word| word.strip_prefix('@'))
        && let Some(elements) = sets.get(&(table.to_owned(), set.to_owned()))
    {
        right = elements;
    }
    let payload = &left["payload"];
    match (payload["protocol"].as_str(), payload["field"].as_str()) {
        (Some("udp" | "th"), Some("dport")) => {
            let Some(ranges) = ranges(right) else { return Condition::Unknown };
            return Condition::Port { ranges, negated };
        }
        (Some("tcp"), Some(_)) => return Condition::Protocol { is_udp: false, negated: false },
        (Some("ip"), Some("protocol")) => return protocol(right, negated),
        (Some("ip"), Some(field @ ("saddr" | "daddr"))) => {
            return match addresses(right) {
                Some(prefixes) if field == "saddr" => Condition::Source { prefixes, negated },
                Some(prefixes) => Condition::Destination { prefixes, negated },
                None => Condition::Unknown,
            };
        }
        (Some("ip6" | "icmpv6"), _) => return Condition::Never,
        (Some("icmp"), _) => return Condition::Protocol { is_udp: false, negated: false },
        _ => {}
    }
    match (left["meta"]["key"].as_str(), right.as_str()) {
        (Some("l4proto"), _) => return protocol(right, negated),
        (Some("iifname" | "iif"), Some(name)) if !name.starts_with('@') => {
            return Condition::ComesBy { name: name.to_owned(), negated };
        }
        (Some("oifname" | "oif"), Some(name)) if !name.starts_with('@') => {
            return Condition::GoesBy { name: name.to_owned(), negated };
        }
        (Some("nfproto" | "protocol"), Some(family)) => {
            let is_ours = matches!(family, "ipv4" | "ip") != negated;
            return if is_ours { Condition::State { takes_new: true } } else { Condition::Never };
        }
        _ => {}
    }
    if left["ct"]["key"] == "state" {
        let states = words(right);
        let takes_new = states.contains(&"new") != negated;
        // Which packets are not tracked, other rules say.
        return match states.is_empty() || states.contains(&"untracked") {
            true => Condition::Unknown,
            false => Condition::State { takes_new },
        };
    }
    Condition::Unknown
}

fn protocol(right: &Value, negated: bool) -> Condition {
    let named = words(right);
    match named.is_empty() {
        true => Condition::Unknown,
        false => Condition::Protocol { is_udp: named.contains(&"udp"), negated },
    }
}

/// A word, or those of a set, a list or flags; none if a named set is among them.
fn words(value: &Value) -> Vec<&str> {
    let list = ["set", "|"].iter().find_map(|kind| value[kind].as_array());
    let found: Vec<&str> = match list.or(value.as_array()) {
        Some(list) => list.iter().flat_map(words).collect(),
        None => value.as_str().into_iter().collect(),
    };
    if found.iter().any(|word| word.starts_with('@')) { Vec::new() } else { found }
}

/// A map by the state of connections that says nothing of new ones.
fn is_of_old_connections(map: &Value) -> bool {
    let states = map["data"]["set"].as_array();
    map["key"]["ct"]["key"] == "state"
        && states.is_some_and(|states| {
            states.iter().all(|pair| pair[0].as_str().is_some_and(|state| state != "new"))
        })
}

/// The elements of a set, named or not; the value itself if it is none.
fn elements(value: &Value) -> &[Value] {
    let list = value["set"].as_array().or(value.as_array());
    list.map_or_else(|| std::slice::from_ref(value), Vec::as_slice)
}

/// An element of a set with a time or a counter, without them.
fn bare(element: &Value) -> &Value {
    if element["elem"].is_object() { &element["elem"]["val"] } else { element }
}

/// An address, a prefix, or a set of both; an empty set has no list.
fn addresses(value: &Value) -> Option<Vec<Prefix>> {
    let one = |element: &Value| {
        let element = bare(element);
        if let Some(text) = element.as_str() {
            return prefix(text);
        }
        let (network, length) = (&element["prefix"]["addr"], &element["prefix"]["len"]);
        prefix(&format!("{}/{}", network.as_str()?, length.as_u64()?))
    };
    if value.is_null() { Some(Vec::new()) } else { elements(value).iter().map(one).collect() }
}

/// A port, a range, or a set of both.
fn ranges(value: &Value) -> Option<Vec<(u16, u16)>> {
    let port = |value: &Value| value.as_u64().and_then(|port| u16::try_from(port).ok());
    let one = |element: &Value| {
        let element = bare(element);
        if let Some([first, last]) = element["range"].as_array().map(Vec::as_slice) {
            return Some((port(first)?, port(last)?));
        }
        port(element).map(|port| (port, port))
    };
    if value.is_null() { Some(Vec::new()) } else { elements(value).iter().map(one).collect() }
}
