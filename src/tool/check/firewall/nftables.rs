//! The rules as `nft -j list ruleset` prints them (libnftables-json(5)).

use serde_json::Value;

use super::{Action, Chain, Condition, Hook, Rule, prefix};

/// The chains that IPv4 packets may meet; nothing if it is not nft's JSON.
pub(in crate::tool::check) fn parse(text: &str) -> Option<Vec<Chain>> {
    let json: Value = serde_json::from_str(text).ok()?;
    let items = json["nftables"].as_array()?;
    let mut chains: Vec<Chain> = Vec::new();
    let is_dormant = |it: &&Value| it["table"]["flags"].to_string().contains("dormant");
    let dormant: Vec<String> = items.iter().filter(is_dormant).map(named_table).collect();
    for item in items {
        if item["chain"].is_object() {
            chains.extend(chain(&item["chain"]));
        } else if item["rule"].is_object() {
            let rule = &item["rule"];
            let (table, name) = (table(rule), rule["chain"].as_str());
            let is_its = |chain: &&mut Chain| chain.table == table && Some(&*chain.name) == name;
            if let Some(chain) = chains.iter_mut().find(is_its) {
                chain.rules.push(parse_rule(rule));
            }
        }
    }
    chains.retain(|chain| !dormant.contains(&chain.table));
    Some(chains)
}

/// Of a table itself.
fn named_table(item: &Value) -> String {
    let word = |name: &str| item["table"][name].as_str().unwrap_or("?").to_owned();
    format!("{} {}", word("family"), word("name"))
}

/// Of what lies in a table.
fn table(object: &Value) -> String {
    let word = |name: &str| object[name].as_str().unwrap_or("?").to_owned();
    format!("{} {}", word("family"), word("table"))
}

fn chain(object: &Value) -> Option<Chain> {
    if !matches!(object["family"].as_str()?, "ip" | "inet") {
        return None;
    }
    let hook = match object["hook"].as_str() {
        Some("input") => Some(Hook::Input),
        Some("forward") => Some(Hook::Forward),
        _ => None,
    };
    let name = object["name"].as_str()?.to_owned();
    let drops_at_end = object["policy"] == "drop";
    Some(Chain { table: table(object), name, hook, drops_at_end, rules: Vec::new() })
}

fn parse_rule(object: &Value) -> Rule {
    let mut conditions = Vec::new();
    let mut action = Action::Nothing;
    for part in object["expr"].as_array().into_iter().flatten() {
        let Some((word, value)) = part.as_object().and_then(|it| it.iter().next()) else {
            conditions.push(Condition::Unknown);
            continue;
        };
        let target = || value["target"].as_str().unwrap_or_default().to_owned();
        match word.as_str() {
            "match" => conditions.push(condition(value)),
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

fn condition(object: &Value) -> Condition {
    let negated = match object["op"].as_str() {
        Some("==" | "in") => false,
        Some("!=") => true,
        _ => return Condition::Unknown,
    };
    let (left, right) = (&object["left"], &object["right"]);
    let payload = &left["payload"];
    match (payload["protocol"].as_str(), payload["field"].as_str()) {
        (Some("udp" | "th"), Some("dport")) => {
            let Some(ranges) = ranges(right) else { return Condition::Unknown };
            return Condition::Port { ranges, negated };
        }
        (Some("tcp"), Some(_)) => return Condition::Protocol { is_udp: false, negated: false },
        (Some("ip"), Some("protocol")) => return protocol(right, negated),
        (Some("ip"), Some(field @ ("saddr" | "daddr"))) => {
            return match address(right) {
                Some(prefix) if field == "saddr" => Condition::Source { prefix, negated },
                Some(prefix) => Condition::Destination { prefix, negated },
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
        (Some("nfproto"), Some(family)) => {
            let is_ours = (family == "ipv4") != negated;
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

fn address(value: &Value) -> Option<crate::route::Prefix> {
    if let Some(text) = value.as_str() {
        return prefix(text);
    }
    let (network, length) = (&value["prefix"]["addr"], &value["prefix"]["len"]);
    prefix(&format!("{}/{}", network.as_str()?, length.as_u64()?))
}

/// A port, a range, or a set of both. A named set can't be looked into.
fn ranges(value: &Value) -> Option<Vec<(u16, u16)>> {
    if let Some(list) = value["set"].as_array() {
        let each: Option<Vec<_>> = list.iter().map(ranges).collect();
        return each.map(|each| each.into_iter().flatten().collect());
    }
    let port = |value: &Value| value.as_u64().and_then(|port| u16::try_from(port).ok());
    if let Some([first, last]) = value["range"].as_array().map(Vec::as_slice) {
        return Some(vec![(port(first)?, port(last)?)]);
    }
    port(value).map(|port| vec![(port, port)])
}
