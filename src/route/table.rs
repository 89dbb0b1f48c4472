//! The route table: which peer an inner destination belongs to. Built whole, then immutable.
//!
//! Leases are disjoint subnets of one network and differ little in length, so one array indexed by
//! the subnet's number answers most tables with a single load, however many peers there are. Any
//! other set of prefixes falls back to a binary search among the addresses where the answer
//! changes, at most two for each peer.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::packet::{Family, IpAddress};
use crate::route::hosts::Hosts;
use crate::route::{Endpoint, Prefix, Prefixes};
use crate::stats::HostKey;

/// Most slots of the dense array: a /8 network cut into /28 subnets, 4 MiB. The array is asked
/// for as zeroed memory, so pages without a peer are usually never touched.
const DENSE_SLOTS_MAX: usize = 1 << 20;

/// Another node of the overlay.
#[derive(Debug)]
pub struct Peer {
    /// The subnets leased to it, of the families whose packets it takes.
    pub subnets: Prefixes,
    /// Its tunnel address: public address and UDP port.
    pub address: SocketAddr,
    /// Whether it takes datagrams without a UDP checksum at no cost, as it says with its lease.
    pub takes_no_checksum: bool,
    /// Whether it takes datagrams from [`SOURCE_PORTS`](crate::route::SOURCE_PORTS) more ports and
    /// shares them out among its workers, as it says with its lease.
    pub takes_source_ports: bool,
    /// Whether a tunnel packet was ever seen that came from `address` itself. Set once by the
    /// worker that saw it, and never cleared while the lease stands: it tells a peer that sends
    /// from its public address from one behind a translator. Keep the same `Arc<Peer>` across
    /// tables while lease and address are unchanged, so that the knowledge survives an update.
    pub source_proven: AtomicBool,
}

impl Peer {
    /// One of which nothing else is known.
    pub fn new(subnets: Prefixes, address: impl Into<SocketAddr>) -> Self {
        let source_proven = AtomicBool::new(false);
        Self {
            subnets,
            address: address.into(),
            takes_no_checksum: false,
            takes_source_ports: false,
            source_proven,
        }
    }
}

/// An immutable longest-prefix-match table, of both families.
#[derive(Debug)]
pub struct Table {
    v4: Routes<Ipv4Addr>,
    v6: Routes<Ipv6Addr>,
    /// Each once, in ascending order of the first of their subnets.
    peers: Box<[Arc<Peer>]>,
    hosts: Hosts,
    /// Public addresses of the peers in ascending order, each once.
    outer_addresses: Box<[IpAddr]>,
    /// Whether this is the table before any lease is known.
    pub is_provisional: bool,
}

/// Its part of one family.
#[derive(Debug)]
pub struct Routes<A: IpAddress> {
    lookup: Lookup<A>,
    /// In ascending order of their subnets, each subnet once.
    peers: Box<[Arc<Peer>]>,
    /// The peers' endpoints in the same order, 8 bytes each and side by side: a packet to one of
    /// thousands of peers loads no line of the peer itself.
    endpoints: Box<[Endpoint]>,
}

/// A family that the table has routes of.
pub trait Routed: Family {
    /// Those routes.
    fn routes(table: &Table) -> &Routes<Self>;

    /// The prefix of the family, if there is one.
    fn of_both(prefixes: Prefixes) -> Option<Prefix<Self>>;
}

impl Routed for Ipv4Addr {
    #[inline(always)]
    fn routes(table: &Table) -> &Routes<Self> {
        &table.v4
    }

    fn of_both(prefixes: Prefixes) -> Option<Prefix> {
        prefixes.v4()
    }
}

impl Routed for Ipv6Addr {
    #[inline(always)]
    fn routes(table: &Table) -> &Routes<Self> {
        &table.v6
    }

    fn of_both(prefixes: Prefixes) -> Option<Prefix<Self>> {
        prefixes.v6()
    }
}

/// Slots hold a peer's index plus one; zero is "no route".
#[derive(Debug)]
enum Lookup<A> {
    Dense {
        base: A,
        host_bits: u8,
        slots: Box<[u32]>,
    },
    /// From each address on, up to the next one's, this slot. In ascending order; the first is that
    /// of no bits.
    Cuts(Box<[(A, u32)]>),
}

impl Table {
    /// The table before any lease is known: it has no route, and that says nothing about who
    /// exists, so nobody must be told that a network is unreachable.
    pub fn provisional() -> Self {
        Self { is_provisional: true, ..Self::build(Vec::new()) }
    }

    /// Builds a table; of several peers with the same subnet, the last one wins.
    pub fn build(peers: Vec<Arc<Peer>>) -> Self {
        Self::of(Hosts::default(), peers)
    }

    /// As [`Self::build`], for workers who know hosts as `before` has them.
    pub fn build_after(before: &Self, peers: Vec<Arc<Peer>>) -> Self {
        Self::of(before.hosts.clone(), peers)
    }

    fn of(mut hosts: Hosts, peers: Vec<Arc<Peer>>) -> Self {
        hosts.add(peers.iter().map(|peer| peer.address.ip()));
        let peers = last_of_each(peers, |peer| peer.subnets.first());
        let mut outer_addresses: Vec<_> = peers.iter().map(|peer| peer.address.ip()).collect();
        outer_addresses.sort_unstable();
        outer_addresses.dedup();
        let peers = peers.into_boxed_slice();
        Self {
            v4: Routes::build(&peers, &hosts, |peer| peer.subnets.v4()),
            v6: Routes::build(&peers, &hosts, |peer| peer.subnets.v6()),
            peers,
            hosts,
            outer_addresses: outer_addresses.into_boxed_slice(),
            is_provisional: false,
        }
    }

    /// The peer whose subnet is the longest that holds `destination`.
    #[inline]
    pub fn lookup<A: Routed>(&self, destination: A) -> Option<&Peer> {
        let routes = A::routes(self);
        routes.peers.get(routes.lookup.index(destination) as usize).map(|peer| &**peer)
    }

    /// Where packets to `destination` go: the address of the peer that [`Self::lookup`] finds.
    #[inline(always)]
    pub fn endpoint<A: Routed>(&self, destination: A) -> Option<Endpoint> {
        let routes = A::routes(self);
        routes.endpoints.get(routes.lookup.index(destination) as usize).copied()
    }

    /// The address of an endpoint, also of one that this table had before.
    #[inline]
    pub fn address(&self, endpoint: Endpoint) -> SocketAddr {
        self.hosts.address(endpoint)
    }

    /// What workers know a peer's host by; nobody, if it is of IPv6 and never was one.
    #[inline]
    pub fn host_key(&self, outer: IpAddr) -> HostKey {
        self.hosts.key(outer)
    }

    /// The peer whose subnet holds a pod of either family.
    pub fn owner(&self, pod: IpAddr) -> Option<&Peer> {
        match pod {
            IpAddr::V4(pod) => self.lookup(pod),
            IpAddr::V6(pod) => self.lookup(pod),
        }
    }

    /// Whether any peer has this public address, at whichever port.
    #[inline]
    pub fn has_peer_at(&self, outer: impl Into<IpAddr>) -> bool {
        self.outer_addresses.binary_search(&outer.into()).is_ok()
    }

    /// The peers in ascending order of the first of their subnets.
    pub fn peers(&self) -> &[Arc<Peer>] {
        &self.peers
    }
}

/// In ascending order of what `key` says of them, and of those of whom it says the same the last.
fn last_of_each<K: Ord>(mut peers: Vec<Arc<Peer>>, key: impl Fn(&Peer) -> K) -> Vec<Arc<Peer>> {
    // Stable, so equal ones keep their order and the last of each run is the winner.
    peers.sort_by_key(|peer| key(peer));
    peers.reverse();
    peers.dedup_by_key(|peer| key(peer));
    peers.reverse();
    peers
}

impl<A: IpAddress> Routes<A> {
    fn build(
        peers: &[Arc<Peer>],
        hosts: &Hosts,
        subnet: impl Fn(&Peer) -> Option<Prefix<A>>,
    ) -> Self {
        let leased = peers.iter().filter(|peer| subnet(peer).is_some()).cloned().collect();
        let peers = last_of_each(leased, &subnet);
        let endpoint = |peer: &Arc<Peer>| Endpoint {
            host: hosts.key(peer.address.ip()),
            port: peer.address.port(),
        };
        Self {
            lookup: Lookup::build(
                &peers.iter().filter_map(|peer| subnet(peer)).collect::<Vec<_>>(),
            ),
            endpoints: peers.iter().map(endpoint).collect(),
            peers: peers.into_boxed_slice(),
        }
    }
}

impl<A: IpAddress> Lookup<A> {
    /// The peer's index, or `u32::MAX` if there is no route.
    #[inline(always)]
    fn index(&self, destination: A) -> u32 {
        let slot = match self {
            Self::Dense { base, host_bits, slots } => {
                // From below the base it is farther than the last slot.
                slots.get(destination.blocks_from(*base, *host_bits)).copied().unwrap_or(0)
            }
            Self::Cuts(cuts) => {
                let behind = cuts.partition_point(|(start, _)| *start <= destination);
                cuts.get(behind.wrapping_sub(1)).map_or(0, |(_, slot)| *slot)
            }
        };
        slot.wrapping_sub(1)
    }

    /// `subnets` are in ascending order, each once.
    fn build(subnets: &[Prefix<A>]) -> Self {
        Self::build_dense(subnets).unwrap_or_else(|| Self::build_cuts(subnets))
    }

    /// The dense array, if the subnets don't overlap or lie too far apart. Its slots are as long as
    /// the longest prefix; a shorter one takes several.
    fn build_dense(subnets: &[Prefix<A>]) -> Option<Self> {
        let zero = A::of_bits(A::mask(0));
        let Some(first) = subnets.first() else {
            return Some(Self::Dense { base: zero, host_bits: 0, slots: Box::default() });
        };
        let longest = subnets.iter().map(|subnet| subnet.length_bits()).max().filter(|&l| l > 0)?;
        let (base, host_bits) = (first.network(), A::BITS - longest);
        let slots_of = |subnet: &Prefix<A>| {
            let slot = |address: A| address.blocks_from(base, host_bits);
            // What can't be counted is too far apart.
            slot(subnet.network())..slot(subnet.last()).saturating_add(1)
        };
        let slots_len = subnets.iter().map(|subnet| slots_of(subnet).end).max()?;
        if slots_len > DENSE_SLOTS_MAX {
            return None;
        }
        let filled: usize = subnets.iter().map(|subnet| slots_of(subnet).len()).sum();
        if filled > slots_len {
            return None;
        }
        let mut slots = vec![0; slots_len].into_boxed_slice();
        // A prefix comes before all that refine it, should there be any.
        for (slot, subnet) in (1..).zip(subnets) {
            slots[slots_of(subnet)].fill(slot);
        }
        Some(Self::Dense { base, host_bits, slots })
    }

    fn build_cuts(subnets: &[Prefix<A>]) -> Self {
        let mut cuts = BTreeMap::from([(A::of_bits(A::mask(0)), 0)]);
        // A prefix comes before all that refine it: behind each the slot of the one around it goes
        // on, unless something begins there.
        for (slot, subnet) in (1..).zip(subnets) {
            if let Some(behind) = subnet.last().following() {
                let around = cuts.range(..=behind).next_back().map_or(0, |(_, slot)| *slot);
                cuts.insert(behind, around);
            }
            cuts.insert(subnet.network(), slot);
        }
        Self::Cuts(cuts.into_iter().collect())
    }
}

#[cfg(test)]
mod tests;
