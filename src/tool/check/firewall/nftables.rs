//! The rules as `nft -j list ruleset` prints them (libnftables-json(5)).

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::netfilter::nftables::objects;
use crate::route::{IpAddress, Prefix};
use crate::tool::explain::ToldFamily;

use super::{Action, Chain, Condition, Hook, Property, Rule, prefix};

/// The elements of named sets, by table and name.
type Sets = BTreeMap<(String, String), Value>;

/// The chains that packets of the family may meet; nothing if it is not nft's JSON.
pub(crate) fn parse<A: ToldFamily>(text: &str) -> Option<Vec<Chain<A>>> {
    let objects = objects(text).ok()?;
    let of_kind = |kind: &'static str| {
        objects.iter().filter(move |(other, _)| other == kind).map(|(_, object)| object)
    };
    let dormant: Vec<_> = of_kind("table")
        .filter(|table| table["flags"].to_string().contains("dormant"))
        .map(|table| named(table, "name"))
        .collect();
    let mut chains: Vec<_> = of_kind("chain").filter_map(chain::<A>).collect();
    chains.retain(|chain| !dormant.contains(&chain.table));
    let name = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    let elements = |set: &Value| ((named(set, "table"), name(set)), set["elem"].clone());
    let sets: Sets = of_kind("set").map(elements).collect();
    for rule in of_kind("rule") {
        let (table, name) = (named(rule, "table"), rule["chain"].as_str());
        let is_its = |chain: &&mut Chain<A>| chain.table == table && Some(&*chain.name) == name;
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

fn chain<A: ToldFamily>(object: &Value) -> Option<Chain<A>> {
    let family = object["family"].as_str()?;
    if family != A::NFT && !matches!(family, "inet" | "netdev" | "bridge") {
        return None;
    }
    let hook = match (family, object["hook"].as_str()) {
        ("bridge", Some("output" | "postrouting")) => Some(Hook::BridgeOut),
        ("bridge", Some("prerouting" | "input")) => Some(Hook::BridgeIn),
        // From pod to pod of this host.
        ("bridge", _) => None,
        _ => Hook::deserialize(&object["hook"]).ok(),
    };
    Some(Chain {
        table: named(object, "table"),
        name: object["name"].as_str()?.to_owned(),
        hook,
        devices: words(&object["dev"]).into_iter().map(str::to_owned).collect(),
        drops_at_end: object["policy"] == "drop",
        rules: Vec::new(),
    })
}

fn parse_rule<A: ToldFamily>(object: &Value, table: &str, sets: &Sets) -> Rule<A> {
    let (handle, name) = (&object["handle"], object["chain"].as_str().unwrap_or("?"));
    let text = format!("the rule with handle {handle} of chain {name}");
    let mut rule = Rule { text, conditions: Vec::new(), action: Action::Nothing };
    let no_condition = Value::Null;
    for part in object["expr"].as_array().into_iter().flatten() {
        let parts = part.as_object().and_then(|it| it.iter().next());
        let (word, value) = parts.map_or(("", &no_condition), |(word, value)| (word, value));
        let target = || value["target"].as_str().unwrap_or_default().to_owned();
        rule.action = match word {
            "accept" => Action::Accept,
            "drop" | "reject" => Action::Drop,
            "redirect" | "dnat" => Action::Divert,
            "return" => Action::Return,
            "jump" => Action::Jump(target()),
            "goto" => Action::Goto(target()),
            "counter" | "log" | "mangle" | "comment" => continue,
            "vmap" if is_of_old_connections(value) => continue,
            "vmap" | "queue" | "fwd" | "tproxy" => Action::Unknown,
            _ => {
                rule.conditions.push(condition(value, table, sets));
                continue;
            }
        };
    }
    rule
}

/// What `match` asks; of anything else it is not known.
fn condition<A: ToldFamily>(object: &Value, table: &str, sets: &Sets) -> Condition<A> {
    if let Some(length) = length(object) {
        return Condition { property: Some(length), negated: object["op"] == "!=" };
    }
    let negated = match object["op"].as_str() {
        Some("==" | "in") => false,
        Some("!=") => true,
        _ => return Condition { property: None, negated: false },
    };
    let (left, mut right) = (&object["left"], &object["right"]);
    if let Some(set) = right.as_str().and_then(|word| word.strip_prefix('@'))
        && let Some(elements) = sets.get(&(table.to_owned(), set.to_owned()))
    {
        right = elements;
    }
    let (payload, meta) = (&left["payload"], left["meta"]["key"].as_str());
    let always = |property| Condition { property: Some(property), negated: false };
    let (protocol, field) = (payload["protocol"].as_str(), payload["field"].as_str());
    let property = match (protocol, field, meta) {
        (Some("udp" | "th"), Some("dport"), _) => elements(right, range).map(Property::Port),
        (Some("udp" | "th"), Some("sport"), _) => elements(right, range).map(Property::SourcePort),
        (Some("ip6" | "icmpv6"), ..) if A::NFT == "ip" => return always(Property::Known(false)),
        (Some("ip" | "icmp"), ..) if A::NFT == "ip6" => return always(Property::Known(false)),
        (Some("icmpv6"), Some("type"), _) => elements(right, message).map(Property::Message),
        // Whatever is asked of it, the packet has to be one.
        (Some("tcp" | "icmp"), ..) => return always(Property::OtherProtocol),
        // Names of a bridge's ports are none of hosts' devices.
        (.., Some("iifname" | "iif" | "oifname" | "oif")) if table.starts_with("bridge ") => None,
        (Some("ether"), Some("type"), _) => any_word(right, &[A::NFT]).map(Property::Known),
        (Some("ip" | "ip6"), Some("saddr"), _) => elements(right, address).map(Property::Source),
        (Some("ip" | "ip6"), Some("daddr"), _) => {
            elements(right, address).map(Property::Destination)
        }
        (_, Some("protocol" | "nexthdr"), _) | (.., Some("l4proto")) => {
            let of = |name| any_word(right, &[name]);
            let both = of("udp").zip(of("ipv6-icmp"));
            both.map(|(is_udp, is_icmpv6)| Property::Protocol { is_udp, is_icmpv6 })
        }
        (.., Some("iifname" | "iif")) => device(right).map(Property::ComesBy),
        (.., Some("oifname" | "oif")) => device(right).map(Property::GoesBy),
        (.., Some("nfproto" | "protocol")) => {
            any_word(right, &[&A::NAME.to_lowercase(), A::NFT]).map(Property::Known)
        }
        _ if left["fib"]["result"] == "type" && left["fib"]["flags"] == "daddr" => {
            any_word(right, &["local"]).map(|is_local| match is_local {
                true => Property::ForHost,
                false => Property::ForMany,
            })
        }
        // A connection that begins has no state, but for that which DNAT gives it.
        _ if left["ct"]["key"] == "status" && words(right) == ["dnat"] => {
            Some(Property::Known(false))
        }
        // Which packets are not tracked, other rules say.
        _ if left["ct"]["key"] == "state" && any_word(right, &["untracked"]) == Some(false) => {
            any_word(right, &["new"]).map(|is_new| Property::State { is_new })
        }
        _ => None,
    };
    Condition { property, negated }
}

/// What is asked of the packet's length; of sets nothing is known.
fn length<A: ToldFamily>(object: &Value) -> Option<Property<A>> {
    let (left, right) = (&object["left"], &object["right"]);
    let field = &left["payload"];
    let is_own = field["protocol"] == A::NFT;
    // IPv6's own leaves out the header.
    let left_out = if is_own && A::NFT == "ip6" { A::HEADER_BYTES.into() } else { 0 };
    let is_length = left["meta"]["key"] == "length"
        || field["field"] == "length" && (is_own || field["protocol"] == "udp");
    if !is_length {
        return None;
    }
    let number = || right.as_u64();
    let (first, last) = match object["op"].as_str()? {
        ">" => (number()?.saturating_add(1), u64::MAX),
        ">=" => (number()?, u64::MAX),
        "<" => (0, number()?.saturating_sub(1)),
        "<=" => (0, number()?),
        _ => match right["range"].as_array() {
            Some(range) => (range.first()?.as_u64()?, range.get(1)?.as_u64()?),
            None => (number()?, number()?),
        },
    };
    Some(Property::Length(first.saturating_add(left_out), last.saturating_add(left_out)))
}

fn device(name: &Value) -> Option<String> {
    name.as_str().filter(|name| !name.starts_with('@')).map(str::to_owned)
}

/// Whether one of `wanted` is among the words; nothing if it is not known which those are.
fn any_word(value: &Value, wanted: &[&str]) -> Option<bool> {
    let found = words(value);
    (!found.is_empty()).then(|| found.iter().any(|word| wanted.contains(word)))
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

/// Each element of a set, named or not, or the value itself if it is none; an empty set has no
/// list. Some have a time or a counter.
fn elements<T>(value: &Value, read: fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value["set"].as_array().or(value.as_array()) {
        Some(list) => list.iter().map(bare).map(read).collect(),
        None if value.is_null() => Some(Vec::new()),
        None => Some(vec![read(value)?]),
    }
}

fn bare(element: &Value) -> &Value {
    if element["elem"].is_object() { &element["elem"]["val"] } else { element }
}

fn address<A: IpAddress>(value: &Value) -> Option<Prefix<A>> {
    let (network, length) = (&value["prefix"]["addr"], &value["prefix"]["len"]);
    match value.as_str() {
        Some(text) => prefix(text),
        None => prefix(&format!("{}/{}", network.as_str()?, length.as_u64()?)),
    }
}

/// A type of ICMPv6 messages, of which those of neighbour discovery count (RFC 4861).
fn message(value: &Value) -> Option<(u8, u8)> {
    let number = match value.as_str() {
        Some("nd-neighbor-solicit") => 135,
        Some("nd-neighbor-advert") => 136,
        Some(other) if !other.starts_with('@') => 0,
        _ => u8::deserialize(value).ok()?,
    };
    Some((number, number))
}

/// A port, or a range of them.
fn range(value: &Value) -> Option<(u16, u16)> {
    if value["range"].is_array() {
        return <(u16, u16)>::deserialize(&value["range"]).ok();
    }
    u16::deserialize(value).ok().map(|port| (port, port))
}
