//! The guard of the tunnel's port, in nftables' syntax: who may send to it, what the kernel has of
//! that, and the transaction that makes up the difference. Pure.
//!
//! It is a table of its own, so that neither flannel's table nor a flush of it concerns it, and its
//! name has the port, because daemons of several networks may share a host.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use serde_json::{Value, json};

use crate::netfilter::nftables::{ListError, objects};
use crate::route::Prefix;

/// How the names of all guards begin.
const TABLE_PREFIX: &str = "weft-guard-";

/// The set of the peers' addresses.
const SET: &str = "peers";

/// What the table says to whoever finds it.
const COMMENT: &str = "kept by weftd --guard; weft cleanup removes it";

/// Who may send to the tunnel's port of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The tunnel's UDP port, the same on all hosts.
    pub port: u16,
    /// The overlay's network, whose pods have no business there, nor at that of another host.
    pub network: Prefix,
    /// The addresses of the peers.
    pub peers: BTreeSet<Ipv4Addr>,
}

/// What the kernel has of a guard.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The set, the chains and the rules, without what differs from one listing to the next.
    frame: Vec<Value>,
    /// Nothing if the set has something else than addresses in it.
    peers: Option<BTreeSet<Ipv4Addr>>,
    /// Packets that it dropped since it was made.
    pub dropped: Dropped,
}

/// Packets that a guard dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Sent to this host by who is no peer.
    pub from_strangers: u64,
    /// Sent to another host by a pod.
    pub from_pods: u64,
}

/// The name of the table that guards `port`.
pub fn table_name(port: u16) -> String {
    format!("{TABLE_PREFIX}{port}")
}

impl Guard {
    /// Input for `nft -f` that makes this of `found`; `None` if nothing is to be done.
    pub fn transaction(&self, found: &Found) -> Option<String> {
        let Some(peers) = found.peers.as_ref().filter(|_| found.frame == self.frame()) else {
            return Some(self.whole());
        };
        let set = format!("element ip {} {SET}", table_name(self.port));
        let edit = |verb, addresses: Vec<&Ipv4Addr>| match addresses.is_empty() {
            true => String::new(),
            false => format!("{verb} {set} {{ {} }}\n", spelled(addresses)),
        };
        let gone = edit("delete", peers.difference(&self.peers).collect());
        let new = edit("add", self.peers.difference(peers).collect());
        Some(gone + &new).filter(|text| !text.is_empty())
    }

    /// The table made anew, in one step.
    fn whole(&self) -> String {
        let Self { port, network, peers } = self;
        let table = table_name(*port);
        let elements = match peers.is_empty() {
            true => String::new(),
            false => format!("elements = {{ {} }} ; ", spelled(peers)),
        };
        // What is deleted has to be there.
        format!(
            "add table ip {table}\n\
             delete table ip {table}\n\
             add table ip {table} {{ comment \"{COMMENT}\" ; }}\n\
             add set ip {table} {SET} {{ type ipv4_addr ; {elements}}}\n\
             add chain ip {table} input {{ type filter hook input priority 0 ; }}\n\
             add chain ip {table} forward {{ type filter hook forward priority 0 ; }}\n\
             add rule ip {table} input udp dport {port} ip saddr != @{SET} counter drop\n\
             add rule ip {table} forward udp dport {port} ip saddr {network} counter drop\n"
        )
    }

    /// How nft prints all but the elements.
    fn frame(&self) -> Vec<Value> {
        let chain = |hook: &str| chain(&json!(hook), &json!("filter"), &json!(hook), &json!(0));
        let rule = |name: &str, op: &str, source: Value| {
            let compare = |op, protocol, field, right: Value| {
                let left = json!({ "payload": { "protocol": protocol, "field": field } });
                json!({ "match": { "op": op, "left": left, "right": right } })
            };
            let port = compare("==", "udp", "dport", json!(self.port));
            let source = compare(op, "ip", "saddr", source);
            rule(&json!(name), [port, source, json!("counter"), json!({ "drop": null })].into())
        };
        let (address, length_bits) = (self.network.network(), self.network.length_bits());
        let network = json!({ "prefix": { "addr": address, "len": length_bits } });
        vec![
            // Anything else, and it may be switched off.
            json!({ "flags of the table": null }),
            set(&json!(SET), &json!("ipv4_addr"), &Value::Null),
            chain("input"),
            chain("forward"),
            rule("input", "!=", json!(format!("@{SET}"))),
            rule("forward", "==", network),
        ]
    }
}

fn set(name: &Value, kind: &Value, flags: &Value) -> Value {
    json!({ "set": name, "type": kind, "flags": flags })
}

fn chain(name: &Value, kind: &Value, hook: &Value, priority: &Value) -> Value {
    json!({ "chain": name, "type": kind, "hook": hook, "priority": priority })
}

fn rule(chain: &Value, expressions: Value) -> Value {
    json!({ "rule of": chain, "expressions": expressions })
}

fn spelled<'a>(addresses: impl IntoIterator<Item = &'a Ipv4Addr>) -> String {
    let each: Vec<_> = addresses.into_iter().map(Ipv4Addr::to_string).collect();
    each.join(", ")
}

impl Found {
    /// Reads the output of `nft -j list table ip weft-guard-PORT`.
    pub fn parse(text: &str) -> Result<Self, ListError> {
        let mut found = Self::default();
        let (mut tables, mut sets) = (Vec::new(), Vec::new());
        let (mut chains, mut rules) = (Vec::new(), Vec::new());
        for object in objects(text)? {
            let it = &object["table"];
            if it.is_object() {
                tables.push(json!({ "flags of the table": it["flags"] }));
            }
            let it = &object["set"];
            if it.is_object() {
                sets.push(set(&it["name"], &it["type"], &it["flags"]));
                found.peers = addresses(&it["elem"]);
            }
            let it = &object["chain"];
            if it.is_object() {
                // A policy of drop would be somebody's edit.
                let hook = if it["policy"] == "accept" { &it["hook"] } else { &it["policy"] };
                chains.push(chain(&it["name"], &it["type"], hook, &it["prio"]));
            }
            let it = &object["rule"];
            if it.is_object() {
                let (expressions, packets) = without_counts(&it["expr"]);
                if it["chain"] == "input" {
                    found.dropped.from_strangers += packets;
                } else {
                    found.dropped.from_pods += packets;
                }
                rules.push(rule(&it["chain"], expressions));
            }
        }
        found.frame = [tables, sets, chains, rules].concat();
        Ok(found)
    }
}

/// The elements of a set; an empty one has no list.
fn addresses(elements: &Value) -> Option<BTreeSet<Ipv4Addr>> {
    let Some(list) = elements.as_array() else { return Some(BTreeSet::new()) };
    list.iter().map(|element| element.as_str()?.parse().ok()).collect()
}

/// A rule's expressions with counters reduced to their name, and the packets that they counted.
fn without_counts(expressions: &Value) -> (Value, u64) {
    let mut counted = 0;
    let each = expressions.as_array().into_iter().flatten().map(|expression| {
        let Some(packets) = expression["counter"]["packets"].as_u64() else {
            return expression.clone();
        };
        counted += packets;
        json!("counter")
    });
    (each.collect(), counted)
}

/// Input for `nft -f` that removes the guards among the tables of `nft -j list tables` that
/// `is_meant` takes by their names.
pub fn removal(json: &str, is_meant: impl Fn(&str) -> bool) -> Result<Option<String>, ListError> {
    let mut text = String::new();
    for object in objects(json)? {
        let table = &object["table"];
        let Some(name) = table["name"].as_str().filter(|_| table["family"] == "ip") else {
            continue;
        };
        let port = name.strip_prefix(TABLE_PREFIX).and_then(|port| port.parse::<u16>().ok());
        if port.is_some() && is_meant(name) {
            text += &format!("delete table ip {name}\n");
        }
    }
    Ok((!text.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests;
