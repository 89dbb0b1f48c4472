//! From leases to routes: which leases are reachable through the tunnel, where, and what changed.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use tracing::debug;

use crate::backend::family::CarriedFamily;
use crate::backend::status::log_changes;
use crate::control::lease::{Lease, LeaseAttributes, Peers, RawJson};
use crate::route::{Peer, Prefixes, SOURCE_PORTS, Table};
use crate::stats::HostKey;

/// The table of these leases of all other nodes, after the one `before`. Peers whose subnet and
/// endpoint are unchanged keep their identity, so what the worker learnt about them survives.
pub(super) fn next_table(before: &Table, leases: &Peers, underlay: SocketAddr) -> Table {
    let all: BTreeMap<_, _> =
        before.peers().iter().map(|peer| (peer.subnets.first(), peer)).collect();
    let mut peers = Vec::new();
    for lease in leases.values() {
        let Some((subnets, public_address)) = carried(lease, underlay.ip()) else { continue };
        if !lease.attributes.backend_type.is_udp() {
            debug!("Ignoring lease {subnets} of a {} node", lease.attributes.backend_type);
            continue;
        }
        let address = SocketAddr::new(public_address, underlay.port());
        let Announcement { takes_no_checksum, source_ports, .. } = said_by(lease);
        let takes_source_ports = source_ports >= Some(SOURCE_PORTS);
        let known = all.get(&subnets.first()).filter(|peer| peer.address == address);
        let is_same = |peer: &Peer| {
            (peer.takes_no_checksum, peer.takes_source_ports, peer.subnets)
                == (takes_no_checksum, takes_source_ports, subnets)
        };
        peers.push(match known {
            Some(peer) if is_same(peer) => Arc::clone(peer),
            known => {
                let proven = known.is_some_and(|peer| peer.source_proven.load(Ordering::Relaxed));
                let source_proven = AtomicBool::new(proven);
                let new = Peer::new(subnets, address);
                Arc::new(Peer { takes_no_checksum, takes_source_ports, source_proven, ..new })
            }
        });
    }
    let next = Table::build_after(before, peers);
    log_changes(&addresses(before), &addresses(&next));
    next
}

/// What of a lease's subnets is reached over the family of `underlay`, and where. Over IPv4 that
/// is IPv4, and IPv6 beside it; a node without IPv4 is reached over IPv6.
fn carried(lease: &Lease, underlay: IpAddr) -> Option<(Prefixes, IpAddr)> {
    let LeaseAttributes { public_ip, .. } = lease.attributes;
    let v6 = lease.subnets.v6().filter(|_| takes_ipv6(lease));
    match underlay {
        IpAddr::V4(_) => {
            // Workers know no host by an address of 0.0.0.0/8, which none has.
            let public_ip = public_ip.filter(|it| HostKey::from(*it) != HostKey::NOBODY);
            let (v4, public_ip) = lease.v4().zip(public_ip)?;
            Some((Prefixes::of_v4(v4, v6), public_ip.into()))
        }
        IpAddr::V6(_) => Some((v6?.into(), Ipv6Addr::host(&lease.attributes)?.into())),
    }
}

fn addresses(table: &Table) -> BTreeMap<Prefixes, SocketAddr> {
    let subnets = |peer: &Peer| {
        [peer.subnets.v4().map(Prefixes::from), peer.subnets.v6().map(Prefixes::from)]
    };
    let each = table.peers().iter().map(|peer| (subnets(peer), peer.address));
    each.flat_map(|(subnets, at)| subnets.into_iter().flatten().map(move |it| (it, at))).collect()
}

/// What a udp node says of its dataplane beside flannel's attributes, which flannel ignores: its
/// udp nodes publish no data. Whoever reads it ignores names that it does not know.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
#[serde(default)]
struct Announcement {
    /// Of names whose meaning has changed; 1 so far.
    #[serde(rename = "Version")]
    version: u16,
    /// Its programs take datagrams without a UDP checksum, and only those: others go through
    /// UDP_GRO to its workers, which without a checksum would get them one by one.
    #[serde(rename = "UDPZeroChecksum", skip_serializing_if = "std::ops::Not::not")]
    takes_no_checksum: bool,
    /// From so many more ports it takes datagrams, and shares them out among its workers by port.
    #[serde(rename = "SourcePorts", skip_serializing_if = "Option::is_none")]
    source_ports: Option<u16>,
}

const VERSION: u16 = 1;

/// What this node publishes while its programs run, or do not; `takes_source_ports` says whether it
/// has several workers. Programs know datagrams of the tunnel's port only.
pub(super) fn announcement(has_programs: bool, takes_source_ports: bool) -> Option<RawJson> {
    let source_ports = (takes_source_ports && !has_programs).then_some(SOURCE_PORTS);
    let said = Announcement { version: VERSION, takes_no_checksum: has_programs, source_ports };
    let is_something = has_programs || source_ports.is_some();
    RawJson::of(&said).ok().filter(|_| is_something)
}

/// What a udp node with an IPv6 subnet says in `BackendV6Data`, which flannel's udp nodes never
/// have: that it takes IPv6 packets through the tunnel.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
#[serde(default)]
struct AnnouncementV6 {
    /// As [`Announcement::version`].
    #[serde(rename = "Version")]
    version: u16,
    /// Whether its workers take them.
    #[serde(rename = "TakesIPv6")]
    takes_ipv6: bool,
}

/// What this node publishes of IPv6, if it has any.
pub(super) fn announcement_v6(has_ipv6: bool) -> Option<RawJson> {
    let said = AnnouncementV6 { version: VERSION, takes_ipv6: true };
    RawJson::of(&said).ok().filter(|_| has_ipv6)
}

/// Whether a peer takes IPv6 packets.
fn takes_ipv6(lease: &Lease) -> bool {
    let data = lease.attributes.backend_v6_data.as_ref();
    let said = data.and_then(|data| serde_json::from_str(data.0.get()).ok());
    said.is_some_and(|AnnouncementV6 { takes_ipv6, .. }| takes_ipv6)
}

/// What a peer says. One that says it in a way that nobody knows says nothing.
fn said_by(lease: &Lease) -> Announcement {
    let data = lease.attributes.backend_data.as_ref();
    data.and_then(|data| serde_json::from_str(data.0.get()).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control::lease::{LeaseAttributes, Lifetime};

    const UNDERLAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 100)), 8285);

    fn lease(subnet: &str, public_ip: [u8; 4], backend_type: &str) -> (Prefixes, Arc<Lease>) {
        let subnets: Prefixes = subnet.parse().unwrap();
        let attributes = LeaseAttributes {
            backend_type: backend_type.into(),
            ..LeaseAttributes::udp(Ipv4Addr::from(public_ip))
        };
        let lease = Lease {
            subnets,
            key: subnets.key(),
            attributes,
            revision: 1,
            created_revision: 1,
            lifetime: Lifetime::Reservation,
        };
        (subnets, Arc::new(lease))
    }

    #[test]
    fn only_udp_nodes_get_a_route() {
        let leases = Peers::from([
            lease("10.5.1.0/24", [192, 0, 2, 1], ""),
            lease("10.5.2.0/24", [192, 0, 2, 2], "vxlan"),
            lease("10.5.3.0/24", [0, 0, 2, 3], ""),
        ]);
        let table = next_table(&Table::provisional(), &leases, UNDERLAY);
        assert_eq!(table.peers().len(), 1, "a vxlan node would never answer on the tunnel port");
        let peer = table.lookup(Ipv4Addr::new(10, 5, 1, 9)).unwrap();
        assert_eq!(peer.address.to_string(), "192.0.2.1:8285");
    }

    #[test]
    fn a_change_of_a_peers_ipv6_subnet_is_seen() {
        let with = |v6: &str| {
            let (subnets, mut lease) = lease(&format!("10.5.1.0/24{v6}"), [192, 0, 2, 1], "");
            Arc::make_mut(&mut lease).attributes.backend_v6_data = announcement_v6(true);
            let table =
                next_table(&Table::provisional(), &Peers::from([(subnets, lease)]), UNDERLAY);
            addresses(&table).keys().map(Prefixes::to_string).collect::<Vec<_>>()
        };
        assert_eq!(with(""), ["10.5.1.0/24"]);
        assert_eq!(with(",fd00:5:0:1::/64"), ["fd00:5:0:1::/64", "10.5.1.0/24"]);
    }

    #[test]
    fn without_ipv4_who_takes_ipv6_gets_a_route_over_it() {
        let leases: Peers = [("fd00:5:0:1::/64", true), ("fd00:5:0:2::/64", false)]
            .into_iter()
            .map(|(subnet, takes_ipv6)| {
                let (subnets, mut lease) = lease(subnet, [0; 4], "");
                let attributes = &mut Arc::make_mut(&mut lease).attributes;
                attributes.public_ip = None;
                attributes.public_ipv6 = "2001:db8::7".parse().ok();
                attributes.backend_v6_data = announcement_v6(takes_ipv6);
                (subnets, lease)
            })
            .collect();
        let underlay = "[2001:db8::1]:8285".parse().unwrap();
        let table = next_table(&Table::provisional(), &leases, underlay);
        let reached: Vec<_> = addresses(&table).into_iter().map(|it| format!("{it:?}")).collect();
        assert_eq!(table.peers().len(), 1, "{reached:?}");
        assert_eq!(table.peers()[0].address.to_string(), "[2001:db8::7]:8285");
        assert!(next_table(&table, &leases, UNDERLAY).peers().is_empty(), "over another family");
    }

    #[test]
    fn peer_keeps_identity_until_its_endpoint_moves() {
        let none = Table::provisional();
        let next = |before: &Table, public_ip, backend_type| {
            let leases = Peers::from([lease("10.5.1.0/24", public_ip, backend_type)]);
            next_table(before, &leases, UNDERLAY)
        };
        let table = next(&none, [192, 0, 2, 1], "");
        let first = Arc::clone(&table.peers()[0]);
        first.source_proven.store(true, Ordering::Relaxed);
        let table = next(&table, [192, 0, 2, 1], "udp");
        assert!(Arc::ptr_eq(&first, &table.peers()[0]));
        let table = next(&table, [192, 0, 2, 9], "");
        let moved = Arc::clone(&table.peers()[0]);
        assert_eq!(moved.address.to_string(), "192.0.2.9:8285");
        assert!(
            !moved.source_proven.load(Ordering::Relaxed),
            "the new endpoint proved nothing yet"
        );
        assert!(next_table(&table, &Peers::new(), UNDERLAY).peers().is_empty());
    }
}
