//! The peers as operators see them: a row for each lease of another node, whatever carries its
//! packets.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::backend::status::{Carrier, Contact, ContactState};
use crate::control::lease::Lease;
use crate::daemon::report::{Running, taken_json};
use crate::fast_path::PeerCounts;
use crate::route::Prefix;
use crate::stats::{PeerTraffic, WorkerStats};

/// One lease of another node.
pub(super) struct PeerRow {
    subnet: Prefix,
    /// The node's name, where the store knows one.
    node: Option<String>,
    /// Where its packets go: an address, for udp with the port.
    via: String,
    state: &'static str,
    tunnel: Option<Tunnel>,
}

/// What the udp backend knows of a peer.
struct Tunnel {
    address: Ipv4Addr,
    contact: Option<Contact>,
    /// The longest packet that the path takes.
    path_mtu_bytes: u32,
    /// By the workers; of all leases of one address.
    traffic: PeerTraffic,
    /// By the kernel's programs.
    taken: PeerCounts,
    at: Instant,
}

/// A peer that is sent packets and says nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SilentPeer {
    pub(super) subnet: Prefix,
    pub(super) via: String,
    /// How long ago it was heard; nothing if it never was.
    pub(super) heard: Option<Duration>,
    /// For how long it has been sent packets.
    pub(super) in_use: Duration,
}

/// The rows, in the order of the subnets.
pub(super) fn of(running: &Running) -> Vec<PeerRow> {
    let leases = running.leases.borrow().clone();
    match &running.carrier {
        Carrier::Workers { stats, routes, kernel, reachability } => {
            let (table, reachability) = (routes.load(), reachability.borrow().clone());
            let at = Instant::now();
            let mtu_bytes = running.dataplane.borrow().mtu_bytes;
            let in_use: BTreeMap<_, _> =
                table.peers().iter().map(|peer| (peer.subnet, peer.address)).collect();
            let row = |(subnet, lease): (&Prefix, &Lease)| {
                let address = in_use.get(subnet);
                let tunnel = address.map(|address| Tunnel {
                    address: *address.ip(),
                    contact: reachability.contacts.get(address).copied(),
                    path_mtu_bytes: reachability
                        .path_mtus
                        .get(subnet)
                        .map_or(mtu_bytes, |bytes| u32::from(*bytes)),
                    traffic: WorkerStats::traffic(stats.iter().map(AsRef::as_ref), *address.ip()),
                    taken: kernel.taken.of_peer(*subnet, *address),
                    at,
                });
                let contact = tunnel.as_ref().map(|tunnel| {
                    tunnel.contact.map_or(ContactState::Idle, |contact| contact.state).name()
                });
                let via = address.map_or_else(|| public_address(lease), SocketAddrV4::to_string);
                PeerRow {
                    subnet: *subnet,
                    node: node(*subnet, lease),
                    via,
                    state: contact.unwrap_or("other-backend"),
                    tunnel,
                }
            };
            leases.iter().map(row).collect()
        }
        Carrier::Other { hosts, .. } => {
            let hosts = hosts.borrow().clone();
            let row = |(subnet, lease): (&Prefix, &Lease)| {
                let host = hosts.get(subnet);
                PeerRow {
                    subnet: *subnet,
                    node: node(*subnet, lease),
                    via: host.map_or_else(|| public_address(lease), Ipv4Addr::to_string),
                    state: if host.is_some() { "set-up" } else { "not-set-up" },
                    tunnel: None,
                }
            };
            leases.iter().map(row).collect()
        }
    }
}

fn public_address(lease: &Lease) -> String {
    lease.attributes.public_ip.to_string()
}

/// In etcd a lease has no name but its subnet.
fn node(subnet: Prefix, lease: &Lease) -> Option<String> {
    let is_subnet = lease.key.starts_with(&subnet.key());
    (!is_subnet).then(|| lease.key.clone())
}

/// How many peers are in which state.
pub(super) fn states(rows: &[PeerRow]) -> BTreeMap<&'static str, usize> {
    let mut states = BTreeMap::new();
    for row in rows {
        *states.entry(row.state).or_default() += 1;
    }
    states
}

/// The peers to which sends failed, by address.
pub(super) fn failed_sends(rows: &[PeerRow]) -> impl Iterator<Item = (Ipv4Addr, u64)> {
    let tunnels = rows.iter().filter_map(|row| row.tunnel.as_ref());
    let failed: BTreeMap<_, _> =
        tunnels.map(|tunnel| (tunnel.address, tunnel.traffic.failed_sends)).collect();
    failed.into_iter()
}

/// Subnets behind paths that are narrower than the overlay's MTU.
pub(super) fn narrow_paths(running: &Running) -> usize {
    match &running.carrier {
        Carrier::Workers { reachability, .. } => reachability.borrow().path_mtus.len(),
        Carrier::Other { .. } => 0,
    }
}

/// The silent peers, those that were heard longest ago first.
pub(super) fn silent(running: &Running) -> Vec<SilentPeer> {
    let Carrier::Workers { routes, reachability, .. } = &running.carrier else { return Vec::new() };
    let (table, reachability, now) = (routes.load(), reachability.borrow().clone(), Instant::now());
    let silent = table.peers().iter().filter_map(|peer| {
        let contact = reachability.contacts.get(&peer.address)?;
        let since = contact.in_use_since.unwrap_or(now);
        (contact.state == ContactState::Silent).then(|| SilentPeer {
            subnet: peer.subnet,
            via: peer.address.to_string(),
            heard: contact.heard.map(|at| now.duration_since(at)),
            in_use: now.duration_since(since),
        })
    });
    let mut silent: Vec<_> = silent.collect();
    silent.sort_by_key(|peer| std::cmp::Reverse(peer.heard.unwrap_or(peer.in_use)));
    silent
}

impl PeerRow {
    /// As the status has it.
    pub(super) fn to_json(&self) -> Value {
        let mut row = json!({
            "subnet": self.subnet.to_string(),
            "node": self.node,
            "via": self.via,
            "state": self.state,
        });
        let Some(Tunnel { contact, path_mtu_bytes, traffic, taken, at, .. }) = &self.tunnel else {
            return row;
        };
        let heard = contact.and_then(|contact| contact.heard);
        let round_trip = contact.and_then(|contact| contact.round_trip);
        row["heard_seconds_ago"] = heard.map(|heard| at.duration_since(heard).as_secs()).into();
        row["round_trip_microseconds"] =
            round_trip.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX)).into();
        row["path_mtu_bytes"] = (*path_mtu_bytes).into();
        row["packets_sent"] = (traffic.packets_sent + taken.packets_sent).into();
        row["bytes_sent"] = (traffic.bytes_sent + taken.bytes_sent).into();
        row["packets_received"] = (traffic.packets_received + taken.packets_received).into();
        row["bytes_received"] = (traffic.bytes_received + taken.bytes_received).into();
        row["failed_sends"] = traffic.failed_sends.into();
        row["fast_path"] = taken_json(taken);
        row
    }
}
