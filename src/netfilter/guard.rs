//! The guard of the tunnel's port, in nftables' syntax: who may send to it, what the kernel has of
//! that, and the transaction that makes up the difference. Pure.
//!
//! It is a table of its own, so that neither flannel's table nor a flush of it concerns it. The
//! IPv4 network is in its name, or that of IPv6 where there is no other, and its rules meet this
//! daemon's tunnel only, because daemons of several networks may share a host. A tunnel over IPv6
//! has a table of that family by the same name.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde_json::Value;

use crate::netfilter::nftables::{ListError, objects};
use crate::route::{IpAddress, Prefix, Prefixes};
use crate::status::TunnelEnd;

/// How the names of all guards begin.
const TABLE_PREFIX: &str = "weft-guard-";

/// The set of the peers' addresses.
const SET: &str = "peers";

/// True of a packet whose source is not routed to the interface by which it came: a pod's that
/// poses as a peer. What rp_filter asks of all packets, asked of the tunnel's alone.
const FOREIGN_SOURCE: &str = "fib saddr . iif oif missing";

/// True of packets that came from elsewhere; fib may have no interface for one of this host's own.
const FROM_ELSEWHERE: &str = "iifname != \"lo\"";

/// What the table says to whoever finds it.
const COMMENT: &str = "kept by weftd --guard; weft cleanup removes it";

/// Who may send to the tunnels of this host.
#[derive(Debug, Clone, PartialEq, Eq, derive_more::Display)]
#[display("the guard of {}", self.shown())]
pub struct Guard {
    /// The name of its tables.
    pub table: String,
    /// Where datagrams arrive.
    pub tunnel: TunnelEnd,
    /// To that of IPv4, if there is one.
    pub v4: Option<TunnelGuard>,
    /// To that of IPv6, if there is one.
    pub v6: Option<TunnelGuard<Ipv6Addr>>,
}

/// Who may send to the tunnel of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunnelGuard<A: IpAddress = Ipv4Addr> {
    /// The table's name.
    pub table: String,
    /// Where the tunnel's datagrams arrive.
    pub tunnel: TunnelEnd,
    /// The overlay's network, whose pods have no business at other hosts' tunnels.
    pub network: Prefix<A>,
    /// The addresses of the peers.
    pub peers: BTreeSet<A>,
}

/// The objects of a table, each with its kind.
pub type Frame = Vec<(String, Value)>;

/// What the kernel has of the guard of one tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedGuard<A: IpAddress = Ipv4Addr> {
    /// All but the elements of the set, without what differs from one listing to the next.
    pub frame: Frame,
    /// Nothing if the set is not there, or has something else than addresses in it.
    peers: Option<BTreeSet<A>>,
    /// Packets that it dropped since it was made.
    pub dropped: Dropped,
}

/// Packets that a guard dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Sent to this host's tunnel by who is no peer, or poses as one.
    pub from_strangers: u64,
    /// Sent to another host's tunnel by a pod, from its own address or as a peer.
    pub from_pods: u64,
}

impl Guard {
    /// The port of the tunnel, where it is guarded. With WireGuard keys do that, and what is
    /// guarded are the pods from packets in the clear.
    pub fn port(&self) -> Option<u16> {
        match self.tunnel {
            TunnelEnd::Udp(_) | TunnelEnd::Vxlan { .. } => Some(self.tunnel.port()),
            TunnelEnd::Wireguard { .. } => None,
        }
    }

    fn shown(&self) -> String {
        self.port().map_or_else(|| "pods".to_owned(), |port| format!("UDP port {port}"))
    }
}

/// The condition of a rule.
fn condition(tunnel: TunnelEnd) -> String {
    match tunnel {
        TunnelEnd::Udp(address) => {
            let family = if address.is_ipv4() { "ip" } else { "ip6" };
            format!("{family} daddr {} udp dport {}", address.ip(), address.port())
        }
        // The VNI follows eight bytes of UDP's header and four of VXLAN's (RFC 7348).
        TunnelEnd::Vxlan { port, vni } => format!("udp dport {port} @th,96,24 {vni}"),
        TunnelEnd::Wireguard { .. } => FROM_ELSEWHERE.to_owned(),
    }
}

/// The name of the tables that guard the tunnel of `networks`, in which nft takes no colon.
pub fn table_name(networks: Prefixes) -> String {
    let v6 = || networks.v6().map(|network| network.key().replace(':', "_"));
    let network = networks.v4().map(Prefix::key).or_else(v6);
    format!("{TABLE_PREFIX}{}", network.unwrap_or_default())
}

impl<A: IpAddress> TunnelGuard<A> {
    /// nft's word for the family.
    pub const FAMILY: &'static str = if A::BITS == 32 { "ip" } else { "ip6" };

    /// Input for `nft -f` that makes this of a table which is as it should be but for its peers;
    /// `None` if nothing is to be done.
    pub fn edits(&self, found: &ListedGuard<A>) -> Option<String> {
        let Some(peers) = &found.peers else { return Some(self.whole()) };
        let set = format!("element {} {} {SET}", Self::FAMILY, self.table);
        let edit = |verb, addresses: Vec<&A>| match addresses.is_empty() {
            true => String::new(),
            false => format!("{verb} {set} {{ {} }}\n", spelled(addresses)),
        };
        let gone = edit("delete", peers.difference(&self.peers).collect());
        let new = edit("add", self.peers.difference(peers).collect());
        Some(gone + &new).filter(|text| !text.is_empty())
    }

    /// Input for `nft -f` that makes the table anew, in one step.
    pub fn whole(&self) -> String {
        let Self { table, tunnel, network, peers } = self;
        let (family, port, ours) = (Self::FAMILY, tunnel.port(), condition(*tunnel));
        let kind = if A::BITS == 32 { "ipv4_addr" } else { "ipv6_addr" };
        let elements = match peers.is_empty() {
            true => String::new(),
            false => format!("elements = {{ {} }} ; ", spelled(peers)),
        };
        let at_input = format!("add rule {family} {table} input {ours}");
        let at_forward = format!("add rule {family} {table} forward");
        let rules = match tunnel {
            // Keys say who is a peer, but not of packets in the clear, whose sources are pods'.
            TunnelEnd::Wireguard { .. } => {
                let rest = format!("{family} saddr {network} {FOREIGN_SOURCE} counter drop");
                format!("{at_input} {rest}\n{at_forward} {ours} {rest}\n")
            }
            TunnelEnd::Udp(_) | TunnelEnd::Vxlan { .. } => format!(
                "{at_input} {family} saddr != @{SET} counter drop\n\
                 {at_input} {FOREIGN_SOURCE} counter drop\n\
                 {at_forward} udp dport {port} {family} saddr {network} {family} daddr @{SET} \
                 counter drop\n\
                 {at_forward} udp dport {port} {family} daddr @{SET} {FOREIGN_SOURCE} \
                 counter drop\n"
            ),
        };
        // What is deleted has to be there.
        format!(
            "add table {family} {table}\n\
             delete table {family} {table}\n\
             add table {family} {table} {{ comment \"{COMMENT}\" ; }}\n\
             add set {family} {table} {SET} {{ type {kind} ; {elements}}}\n\
             add chain {family} {table} input {{ type filter hook input priority 0 ; }}\n\
             add chain {family} {table} forward {{ type filter hook forward priority 0 ; }}\n\
             {rules}"
        )
    }
}

fn spelled<'a, A: IpAddress + 'a>(addresses: impl IntoIterator<Item = &'a A>) -> String {
    let each: Vec<_> = addresses.into_iter().map(A::to_string).collect();
    each.join(", ")
}

impl<A: IpAddress> ListedGuard<A> {
    /// Reads the output of `nft -j list table FAMILY NAME`.
    pub fn parse(text: &str) -> Result<Self, ListError> {
        let mut found = Self { frame: Vec::new(), peers: None, dropped: Dropped::default() };
        for (kind, mut object) in objects(text)? {
            match kind.as_str() {
                "metainfo" => continue,
                "set" => {
                    // An empty set has none: taken out, or the first peer changes the frame.
                    let elements = object.as_object_mut().and_then(|set| set.remove("elem"));
                    found.peers = addresses(&elements.unwrap_or_default());
                }
                "rule" if object["chain"] == "input" => {
                    found.dropped.from_strangers += take_counts(&mut object);
                }
                "rule" => found.dropped.from_pods += take_counts(&mut object),
                _ => {}
            }
            if let Some(fields) = object.as_object_mut() {
                // Another one each time the table is made.
                fields.remove("handle");
            }
            found.frame.push((kind, object));
        }
        Ok(found)
    }
}

/// The elements of a set; an empty one has no list.
fn addresses<A: IpAddress>(elements: &Value) -> Option<BTreeSet<A>> {
    let Some(list) = elements.as_array() else { return Some(BTreeSet::new()) };
    list.iter().map(|element| element.as_str()?.parse().ok()).collect()
}

/// Takes the figures out of a rule's counters, and gives the packets that they counted.
fn take_counts(rule: &mut Value) -> u64 {
    let expressions = rule.get_mut("expr").and_then(Value::as_array_mut).into_iter().flatten();
    let counters = expressions.filter_map(|expression| expression.get_mut("counter"));
    counters.map(|counter| counter.take()["packets"].as_u64().unwrap_or(0)).sum()
}

/// Whether a table of this family and name is the guard of some network.
pub fn is_guard(family: &str, name: &str) -> bool {
    let Some(network) = name.strip_prefix(TABLE_PREFIX) else { return false };
    let of_v6 = || Prefix::<Ipv6Addr>::from_key(&network.replace('_', ":"));
    let is_network = Prefix::<Ipv4Addr>::from_key(network).is_ok() || of_v6().is_ok();
    ["ip", "ip6"].contains(&family) && is_network
}

#[cfg(test)]
mod tests;
