//! From leases to routes: which leases are reachable through the tunnel, where, and what changed.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tracing::{debug, info};

use crate::control::lease::{Lease, Peers};
use crate::route::{Peer, Prefix, Table};

/// Lines that one update may log before it sums up: a cluster that starts is one piece of news.
const LOGGED_PER_UPDATE_MAX: usize = 8;

/// The peers that the published table holds.
#[derive(Debug, Default)]
pub(super) struct PeerSet {
    peers: BTreeMap<Prefix, Arc<Peer>>,
}

impl PeerSet {
    /// Takes in the leases of all other nodes. Peers whose subnet and endpoint are unchanged keep
    /// their identity, so what the worker learnt about them survives.
    pub(super) fn update(&mut self, leases: &Peers, port: u16) {
        let mut next = BTreeMap::new();
        let mut news = News::default();
        for (subnet, lease) in leases {
            if !carried_by_udp(lease) {
                debug!("Ignoring lease {subnet} of a {} node", lease.attributes.backend_type);
                continue;
            }
            let address = SocketAddrV4::new(lease.attributes.public_ip, port);
            let known = self.peers.remove(subnet);
            let peer = match known {
                Some(peer) if peer.address == address => peer,
                known => {
                    let was = known.map(|peer| peer.address);
                    news.tell(|| match was {
                        None => format!("Subnet added: {subnet} via {address}"),
                        Some(was) => format!("Subnet moved: {subnet} from {was} to {address}"),
                    });
                    Arc::new(Peer {
                        subnet: *subnet,
                        address,
                        source_proven: AtomicBool::new(false),
                    })
                }
            };
            next.insert(*subnet, peer);
        }
        for subnet in self.peers.keys() {
            news.tell(|| format!("Subnet removed: {subnet}"));
        }
        // One place for all of them: the log's limit is per place, and a cluster that starts makes
        // many updates in a second.
        for line in news.summed_up(next.len()) {
            info!("{line}");
        }
        self.peers = next;
    }

    /// A route table of these peers.
    pub(super) fn table(&self) -> Table {
        Table::build(self.peers.values().cloned().collect())
    }
}

/// A udp node writes no backend type; leases of other backends have no tunnel end that listens.
fn carried_by_udp(lease: &Lease) -> bool {
    matches!(lease.attributes.backend_type.as_str(), "" | "udp")
}

/// What an update changed, for the log.
#[derive(Default)]
struct News {
    count: usize,
    lines: Vec<String>,
}

impl News {
    fn tell(&mut self, line: impl FnOnce() -> String) {
        self.count += 1;
        if self.count <= LOGGED_PER_UPDATE_MAX {
            self.lines.push(line());
        }
    }

    fn summed_up(mut self, peers: usize) -> Vec<String> {
        let more = self.count - self.lines.len();
        if more > 0 {
            self.lines.push(format!("{more} more changes of subnets; {peers} peers now"));
        }
        self.lines
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::control::lease::{LeaseAttributes, Lifetime};

    fn lease(subnet: &str, public_ip: [u8; 4], backend_type: &str) -> (Prefix, Lease) {
        let subnet: Prefix = subnet.parse().unwrap();
        let attributes = LeaseAttributes {
            backend_type: backend_type.to_owned(),
            ..LeaseAttributes::udp(Ipv4Addr::from(public_ip))
        };
        let lease = Lease {
            subnet,
            key: subnet.key(),
            attributes,
            revision: 1,
            created_revision: 1,
            lifetime: Lifetime::Reservation,
        };
        (subnet, lease)
    }

    #[test]
    fn only_udp_nodes_get_a_route() {
        let leases = Peers::from([
            lease("10.5.1.0/24", [192, 0, 2, 1], ""),
            lease("10.5.2.0/24", [192, 0, 2, 2], "vxlan"),
        ]);
        let mut set = PeerSet::default();
        set.update(&leases, 8285);
        let table = set.table();
        assert_eq!(table.len(), 1, "a vxlan node would never answer on the tunnel port");
        let peer = table.lookup(Ipv4Addr::new(10, 5, 1, 9)).unwrap();
        assert_eq!(peer.address.to_string(), "192.0.2.1:8285");
    }

    #[test]
    fn news_are_few_lines_whatever_their_kind() {
        let mut news = News::default();
        for number in 0..LOGGED_PER_UPDATE_MAX {
            news.tell(|| format!("line {number}"));
        }
        assert_eq!(news.lines.len(), LOGGED_PER_UPDATE_MAX);
        for _ in 0..5 {
            news.tell(|| panic!("a line that nobody reads is made"));
        }
        let lines = news.summed_up(13);
        assert_eq!(lines.len(), LOGGED_PER_UPDATE_MAX + 1, "{lines:?}");
        assert_eq!(lines.last().unwrap(), "5 more changes of subnets; 13 peers now");
        assert!(News::default().summed_up(13).is_empty(), "news about nothing");
    }

    #[test]
    fn a_peer_keeps_its_identity_until_its_endpoint_moves() {
        let mut set = PeerSet::default();
        set.update(&Peers::from([lease("10.5.1.0/24", [192, 0, 2, 1], "")]), 8285);
        let first = Arc::clone(&set.table().peers()[0]);
        first.source_proven.store(true, Ordering::Relaxed);
        set.update(&Peers::from([lease("10.5.1.0/24", [192, 0, 2, 1], "udp")]), 8285);
        assert!(Arc::ptr_eq(&first, &set.table().peers()[0]));
        set.update(&Peers::from([lease("10.5.1.0/24", [192, 0, 2, 9], "")]), 8285);
        let moved = Arc::clone(&set.table().peers()[0]);
        assert_eq!(moved.address.to_string(), "192.0.2.9:8285");
        assert!(
            !moved.source_proven.load(Ordering::Relaxed),
            "the new endpoint proved nothing yet"
        );
        set.update(&Peers::new(), 8285);
        assert!(set.table().is_empty());
    }
}
