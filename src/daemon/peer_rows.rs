//! The peers as operators see them: a row for each lease of another node, whatever carries its
//! packets.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::peer::state::Reachability;
use crate::backend::status::{UdpPlane, Unusable};
use crate::backend_kind::{BackendKind, CarriedBy};
use crate::control::clock;
use crate::control::error::field_of;
use crate::control::lease::{Lease, Lifetime};
use crate::control::status::{ControlState, Names};
use crate::daemon::running::Running;
use crate::fast_path::PeerCounts;
use crate::host::mtu::beyond_path;
use crate::route::{self, Prefixes};
use crate::stats::WorkerStats;
use crate::status::{IpsecPeer, Peer, PeerState, Traffic, TunnelEnd, Via, WireguardPeer};
use crate::wireguard;

const NOT_SET_UP: &str = "the kernel or the backend's command does not take what leads there, or \
                          another program removes it again and again: weftd's log says which";

const NOTHING_OF_CHARON: &str = "charon has not answered lately, so whether there are keys for it \
                                 is not known (`weft status`)";

/// Of a lease that udp has no use for.
const NO_USE: &str = "udp reaches hosts by IPv4, or by IPv6 where the network has no IPv4, and its \
                      lease lacks what that takes: a subnet of the family and PublicIP, or, \
                      without IPv4, PublicIPv6 and TakesIPv6 in BackendV6Data";

/// Subnets that are listed of leases that name one address: for the usual causes two.
const SHARED_SHOWN_MAX: usize = 4;

/// The rows, in the order of the subnets, with names where the leases have none.
pub(super) fn of(running: &Running, control: &ControlState) -> Vec<Peer> {
    let leases = running.leases.borrow().clone();
    let leases: Vec<_> = leases.values().map(Arc::as_ref).collect();
    let rows = leases.iter().map(|lease| bare(lease, &control.names, running.kind));
    let mut rows: Vec<_> = rows.collect();
    let reachability = running.view.reachability.borrow().clone();
    match &running.view.udp {
        Some(UdpPlane { routes, taken, .. }) => {
            let (table, spread) = (routes.table.load(), routes.spread.load());
            let reached = |peer: &route::Peer| (peer.address, peer.subnets);
            let plane = running.view.state.borrow().clone();
            let (mtu_bytes, whole_bytes) = (plane.mtu_bytes, plane.whole_bytes);
            let in_use: BTreeMap<_, _> =
                table.peers().iter().map(|peer| (peer.subnets.first(), reached(peer))).collect();
            for row in &mut rows {
                let first = row.subnets().map(Prefixes::first);
                let in_use = first.and_then(|subnet| Some((subnet, in_use.get(&subnet)?)));
                let Some((subnet, (address, subnets))) = in_use else { continue };
                row.ipv6_via = subnets.v6().map(|_| Via::Tunnel(*address));
                let via = Via::Tunnel(*address);
                (row.via, row.state, row.why) = (via, PeerState::Idle, None);
                asked(row, &reachability, address.ip(), Some(address.port()));
                let path_mtu_bytes = reachability.path_mtus.get(&subnet).copied();
                row.path_mtu_bytes = Some(path_mtu_bytes.map_or(mtu_bytes, u32::from));
                row.from_source_ports = Some(spread.contains(&table.host_key(address.ip())));
                if let (PeerState::Ok, Some(bytes)) = (row.state, path_mtu_bytes) {
                    row.state = PeerState::Narrow;
                    let of_v6 = subnets.v6().map(|_| beyond_path(address.ip(), bytes, whole_bytes));
                    row.why = Some(narrow(bytes, of_v6.unwrap_or_default()));
                }
                let workers = running.view.workers.iter().map(AsRef::as_ref);
                let by_workers = WorkerStats::traffic(workers, table.host_key(address.ip()));
                let taken = traffic(taken.of_peer(subnet, *address));
                row.traffic = Some(Traffic {
                    packets_sent: by_workers.packets_sent + taken.packets_sent,
                    bytes_sent: by_workers.bytes_sent + taken.bytes_sent,
                    packets_received: by_workers.packets_received + taken.packets_received,
                    bytes_received: by_workers.bytes_received + taken.bytes_received,
                });
                row.failed_sends = Some(by_workers.failed_sends);
                row.fast_path = Some(taken);
            }
        }
        None => rows.iter_mut().for_each(|row| of_others(row, running, &reachability)),
    }
    let unusable = running.view.state.borrow().unusable.clone();
    note_unused(&mut rows, &leases, &control.unused, &unusable);
    note_shared(&mut rows, &leases, running.kind);
    rows
}

/// Fills in what is known of a peer whose packets no worker of udp carries.
fn of_others(row: &mut Peer, running: &Running, reachability: &Reachability) {
    let subnets = row.subnets().map(Prefixes::first);
    let plane = running.view.state.borrow();
    let host = subnets.and_then(|subnets| plane.hosts.get(&subnets).copied());
    let Some(host) = host else { return };
    // Over IPv6 perhaps nobody is.
    let is_known = host.is_ipv4() || reachability.contacts.contains_key(&host);
    let is_asked = running.kind.is_cloud() || running.kind.carried_by() == CarriedBy::Kernel;
    let is_asked = is_asked && is_known;
    let unasked = if is_asked { PeerState::Idle } else { PeerState::SetUp };
    (row.via, row.state, row.why) = (Via::Host(host), unasked, None);
    asked(row, reachability, host, plane.tunnel.map(TunnelEnd::port));
    if let Some(contact) = reachability.contacts.get(&host).filter(|_| running.kind.is_cloud()) {
        row.why = contact.state.why_in_cloud(host);
    }
    let wireguard = running.view.wireguard.borrow();
    let state = subnets.and_then(|it| wireguard.get(&it));
    state.into_iter().for_each(|state| note_wireguard(row, state));
    row.ipsec = subnets.and_then(|it| running.view.ipsec.borrow().get(&it).copied());
    if running.kind == BackendKind::Ipsec && row.ipsec.is_none() {
        note(row, NOTHING_OF_CHARON);
    }
    note_ipsec(row, host);
}

/// Says of leases that are not used, or of which a part isn't, why: what was `unused` of the
/// store's entries, and what the backend found `unusable`.
fn note_unused(
    rows: &mut [Peer],
    leases: &[&Lease],
    unused: &BTreeMap<String, String>,
    unusable: &Unusable,
) {
    for (row, lease) in rows.iter_mut().zip(leases) {
        let cause = unusable.get(&lease.subnets);
        row.why.take_if(|_| cause.is_some() && row.state == PeerState::NotSetUp);
        cause.into_iter().chain(unused.get(&lease.key)).for_each(|why| note(row, why));
    }
}

/// Adds something to what is said of a peer.
fn note(row: &mut Peer, text: &str) {
    let before = row.why.take().map(|why| why + ". ").unwrap_or_default();
    row.why = Some(before + text);
}

/// That a path takes no more, and what becomes of what is `beyond`.
fn narrow(path_bytes: u16, beyond: &str) -> String {
    format!(
        "the path takes no packets of more than {path_bytes} bytes, and the kernel is told so; if \
         most are so narrow, set MTU in the Backend of the network configuration{beyond}"
    )
}

/// Says of leases that name one address that they do, for all else that is known is of that
/// address. `rows` are those of `leases`, in the same order.
fn note_shared(rows: &mut [Peer], leases: &[&Lease], kind: BackendKind) {
    let mut by_host: BTreeMap<IpAddr, Vec<&Lease>> = BTreeMap::new();
    for lease in leases {
        by_host.entry(lease.attributes.node_address()).or_default().push(lease);
    }
    by_host.retain(|_, sharing| sharing.len() > 1);
    let notes: BTreeMap<_, _> =
        by_host.into_iter().map(|(host, sharing)| (host, shared(host, &sharing, kind))).collect();
    for (row, lease) in rows.iter_mut().zip(leases) {
        notes.get(&lease.attributes.node_address()).into_iter().for_each(|why| note(row, why));
    }
}

/// A host may have several leases; a node that has moved, or is gone, may have left one behind; or
/// another has a wrong PublicIP.
fn shared(host: IpAddr, leases: &[&Lease], kind: BackendKind) -> String {
    let shown = leases.iter().take(SHARED_SHOWN_MAX).map(|lease| lease.subnets.to_string());
    let (count, shown) = (leases.len(), shown.collect::<Vec<_>>().join(", "));
    let more = if count > SHARED_SHOWN_MAX { " and more" } else { "" };
    let of_kind = leases.iter().filter(|lease| lease.attributes.backend_type.is(kind));
    let data = of_kind.map(|lease| match host {
        IpAddr::V4(_) => &lease.attributes.backend_data,
        IpAddr::V6(_) => &lease.attributes.backend_v6_data,
    });
    let data: Vec<_> = data.collect();
    let differ = kind == BackendKind::Vxlan && data.windows(2).any(|pair| pair[0] != pair[1]);
    let unless = match differ {
        true => "with more than one VtepMAC or VNI, of which its VXLAN device has one each, so",
        false => "unless that host has them all,",
    };
    format!(
        "{count} leases name {host} ({shown}{more}); {unless} packets for the pods of one reach a \
         host that does not take them: release what is stale (`weft lease`), or correct the \
         {} of the node that has another address",
        field_of(host)
    )
}

/// Fills in how a peer is that is asked.
fn asked(row: &mut Peer, reachability: &Reachability, host: IpAddr, port: Option<u16>) {
    let Some(contact) = reachability.contacts.get(&host) else { return };
    let ago = |at: Instant| at.elapsed().as_secs();
    row.state = contact.state.word();
    row.why = contact.state.why(host, port);
    row.heard_seconds_ago = contact.heard.map(ago);
    row.in_use_seconds = contact.in_use_since.map(ago);
    row.round_trip_microseconds =
        contact.round_trip.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
}

/// A lease that the backend does not know, or not yet.
fn bare(lease: &Lease, names: &Names, kind: BackendKind) -> Peer {
    // In etcd a lease has no name but its subnets; the claim of its address has.
    let own = Some(lease.key.clone()).filter(|key| Prefixes::from_key(key).is_none());
    let address = lease.attributes.node_address();
    let (node, via) = (own.or_else(|| names.get(&address).cloned()), Via::Host(address));
    let lease_expires_unix = match lease.lifetime {
        Lifetime::Leased { expires_unix, .. } => expires_unix,
        Lifetime::Reservation => None,
    };
    let other = &lease.attributes.backend_type;
    let (state, why) = match other.is(kind.leased_as()) {
        true if kind == BackendKind::Alloc => (PeerState::Unmanaged, None),
        true => {
            let why = match (kind.carried_by(), lease.subnets.v4().zip(lease.attributes.public_ip))
            {
                (CarriedBy::Workers, None) => Some(NO_USE),
                (CarriedBy::Workers, Some(_)) => None,
                _ => Some(NOT_SET_UP),
            };
            (PeerState::NotSetUp, why.map(str::to_owned))
        }
        false => {
            let shown = match other.is_udp() {
                true => "udp, alloc or a cloud's (their leases name no backend)".to_owned(),
                false => other.to_string(),
            };
            let why = format!(
                "its lease is of the backend {shown}, this node's is {kind}, so weftd makes no way \
                 to it (packets for its pods go by other routes of this host, if there are any): \
                 restart whichever has not been since the network configuration changed"
            );
            (PeerState::OtherBackend, Some(why))
        }
    };
    let has_way = kind.has_ipv6_underlay() && lease.subnets.v6().is_some();
    let ipv6_host = lease.attributes.public_ipv6.filter(|_| has_way);
    let ipv6_via = ipv6_host.map(|host| Via::Host(host.into()));
    let (backend, peer) = (Some(other.to_string()), Peer::new(lease.subnets, node, via, state));
    Peer { ipv6_via, backend, lease_expires_unix, why, ..peer }
}

/// That nothing passes to a peer of IPsec without keys.
fn note_ipsec(row: &mut Peer, host: IpAddr) {
    let Some(IpsecPeer { established_unix, installed_unix: None, .. }) = row.ipsec else { return };
    row.state = PeerState::NotSetUp;
    row.why = Some(match established_unix {
        None => format!(
            "charon has no IKE SA with {host}, and tries: does the ipsec backend run there with \
             the same PSK (a difference is AUTHENTICATION_FAILED in charon's log), and do UDP 500 \
             and 4500 pass both ways?"
        ),
        Some(_) => format!(
            "charon has an IKE SA with {host} and no CHILD SA: it tries every 30 s. Have both \
             nodes the same ESPProposal, does this kernel have ESP and its algorithms (charon's \
             log), and, where charon encrypts itself there, has that node a pod yet?"
        ),
    });
}

/// What a WireGuard device says of a peer.
fn of_wireguard(state: &wireguard::peer::PeerState) -> WireguardPeer {
    let wireguard::peer::PeerState { last_handshake_unix, received_bytes, sent_bytes, .. } = *state;
    let (public_key, endpoint) = (state.public_key.to_string(), state.endpoint);
    WireguardPeer { public_key, endpoint, last_handshake_unix, received_bytes, sent_bytes }
}

/// Fills in what WireGuard says, and says of a peer that is not well if there are no keys: without,
/// no packet can pass.
fn note_wireguard(row: &mut Peer, state: &wireguard::peer::PeerState) {
    row.wireguard = Some(of_wireguard(state));
    let may_lack_keys = matches!(row.state, PeerState::Silent | PeerState::OneWay);
    if !may_lack_keys || state.has_keys(clock::unix_seconds()) {
        return;
    }
    let since = if state.last_handshake_unix.is_some() { "for minutes" } else { "so far" };
    let text = format!(
        "WireGuard has agreed on no keys with it {since}: lost handshakes, another key than its \
         lease's and another PSK look alike from here"
    );
    note(row, &text);
}

/// What the kernel's programs took.
pub(super) fn traffic(taken: PeerCounts) -> Traffic {
    Traffic {
        packets_sent: taken.packets_sent,
        bytes_sent: taken.bytes_sent,
        packets_received: taken.packets_received,
        bytes_received: taken.bytes_received,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control::lease::{LeaseAttributes, RawJson};
    use crate::route::Prefix;

    /// Leases of these subnets and addresses, with this data.
    fn rows(leases: &[(&str, u8, &str)], kind: BackendKind) -> Vec<Peer> {
        let lease = |(subnet, last, data): &(&str, u8, &str)| {
            let subnet: Prefix = subnet.parse().unwrap();
            let public_ip = Ipv4Addr::new(192, 0, 2, *last);
            let data = serde_json::from_str(data).map(RawJson).ok();
            Lease {
                subnets: subnet.into(),
                key: subnet.key(),
                attributes: LeaseAttributes::of(kind, public_ip, data),
                revision: 1,
                created_revision: 1,
                lifetime: Lifetime::Reservation,
            }
        };
        let leases: Vec<_> = leases.iter().map(lease).collect();
        let leases: Vec<_> = leases.iter().collect();
        let names = Names::default();
        let bare = |lease: &&Lease| Peer { why: None, ..bare(lease, &names, kind) };
        let mut rows: Vec<_> = leases.iter().map(bare).collect();
        rows[0].why = Some("before".to_owned());
        note_shared(&mut rows, &leases, kind);
        rows
    }

    #[test]
    fn leases_of_one_address_are_told_and_no_more_claimed_than_known() {
        let [one, other] =
            [r#"{"VtepMAC":"82:4b:b6:2f:54:4e"}"#, r#"{"VtepMAC":"82:4b:b6:2f:54:4f"}"#];
        let leases = [("10.5.1.0/24", 1, one), ("10.5.2.0/24", 2, one), ("10.5.3.0/24", 1, other)];
        for kind in [BackendKind::Udp, BackendKind::Vxlan] {
            let rows = rows(&leases, kind);
            assert_eq!(rows[1].why, None, "an address of its own");
            let why = rows[2].why.clone().unwrap();
            assert!(why.contains("192.0.2.1 (10.5.1.0/24, 10.5.3.0/24)"), "{why}");
            let before = rows[0].why.clone().unwrap();
            assert_eq!(before, format!("before. {why}"));
            assert_eq!(why.contains("VtepMAC"), kind == BackendKind::Vxlan, "{why}");
        }
        let same = [("10.5.1.0/24", 1, one), ("10.5.3.0/24", 1, one)];
        let why = rows(&same, BackendKind::Vxlan)[1].why.clone().unwrap();
        assert!(!why.contains("VtepMAC"), "{why}");
        let many: Vec<_> = (1..=6).map(|number| format!("10.5.{number}.0/24")).collect();
        let many: Vec<_> = many.iter().map(|subnet| (subnet.as_str(), 1, one)).collect();
        let why = rows(&many, BackendKind::Udp)[5].why.clone().unwrap();
        assert!(why.contains("10.5.4.0/24") && !why.contains("10.5.5.0/24"), "{why}");
    }

    #[test]
    fn a_peer_of_which_a_part_is_not_used_says_why() {
        let subnets: Prefixes = "10.5.9.0/24".parse().unwrap();
        let attributes = LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 9));
        let key = "10.5.9.0-24&fd00:5:0:9::-64".to_owned();
        let lease = Lease { key, ..Lease::reservation(subnets, attributes) };
        let why = |unused: &str, unusable: &str, state| {
            let mut row = bare(&lease, &Names::default(), BackendKind::Vxlan);
            row.state = state;
            row.why = Some("general".to_owned());
            let mut rows = [row];
            let unused = BTreeMap::from([(unused.to_owned(), "x".to_owned())]);
            let unusable = Unusable::from([(unusable.parse().unwrap(), "y".to_owned())]);
            note_unused(&mut rows, &[&lease], &unused, &unusable);
            let [row] = rows;
            row.why.unwrap()
        };
        let (own, other) = ("10.5.9.0/24", "10.5.8.0/24");
        assert_eq!(why("another", other, PeerState::NotSetUp), "general");
        assert_eq!(why(&lease.key, other, PeerState::Ok), "general. x");
        assert_eq!(why("another", own, PeerState::NotSetUp), "y", "the cause that the log has");
        assert_eq!(why(&lease.key, own, PeerState::Ok), "general. y. x");
    }

    /// udp's, alloc's and the clouds' look alike.
    #[test]
    fn a_lease_without_a_backend_is_of_no_certain_one() {
        let why = |of: BackendKind| {
            let subnets: Prefixes = "10.5.9.0/24".parse().unwrap();
            let attributes = LeaseAttributes::of(of, Ipv4Addr::new(192, 0, 2, 9), None);
            let lease = Lease { key: subnets.key(), ..Lease::reservation(subnets, attributes) };
            bare(&lease, &Names::default(), BackendKind::Vxlan).why.unwrap()
        };
        let unnamed = why(BackendKind::AwsVpc.leased_as());
        assert!(unnamed.contains("a cloud's") && unnamed.contains("vxlan"), "{unnamed}");
        let named = why(BackendKind::HostGw);
        assert!(named.contains("the backend host-gw, this") && !named.contains("cloud"), "{named}");
    }

    #[test]
    fn a_lease_that_udp_has_no_use_for_says_so() {
        let lease = |subnets: &str, public_ip| {
            let subnets: Prefixes = subnets.parse().unwrap();
            let attributes = LeaseAttributes::at(BackendKind::Udp, public_ip, None);
            Lease { key: subnets.key(), ..Lease::reservation(subnets, attributes) }
        };
        let public_ip = Some(Ipv4Addr::new(192, 0, 2, 9));
        for (subnets, public_ip, is_told) in [
            ("fd00:5:0:9::/64", public_ip, true),
            ("10.5.9.0/24,fd00:5:0:9::/64", None, true),
            ("10.5.9.0/24,fd00:5:0:9::/64", public_ip, false),
        ] {
            let row = bare(&lease(subnets, public_ip), &Names::default(), BackendKind::Udp);
            assert_eq!(row.state, PeerState::NotSetUp);
            assert_eq!(row.why.is_some(), is_told, "{subnets}: {:?}", row.why);
        }
    }
}
