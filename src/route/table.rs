//! The route table: which peer an inner destination belongs to. Built whole, then immutable.
//!
//! Leases are disjoint subnets of one network and differ little in length, so one array indexed by
//! the subnet's number answers most tables with a single load, however many peers there are. Any
//! other set of prefixes falls back to a binary search among the addresses where the answer
//! changes, at most two for each peer.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::route::Prefix;

/// Most slots of the dense array: a /8 network cut into /28 subnets, 4 MiB. The array is asked
/// for as zeroed memory, so pages without a peer are usually never touched.
const DENSE_SLOTS_MAX: usize = 1 << 20;

/// Another node of the overlay.
#[derive(Debug)]
pub struct Peer {
    /// The subnet leased to it.
    pub subnet: Prefix,
    /// Its tunnel address: public address and UDP port.
    pub address: SocketAddrV4,
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
    pub fn new(subnet: Prefix, address: SocketAddrV4) -> Self {
        let source_proven = AtomicBool::new(false);
        Self { subnet, address, takes_no_checksum: false, takes_source_ports: false, source_proven }
    }
}

/// An immutable longest-prefix-match table.
#[derive(Debug)]
pub struct Table {
    lookup: Lookup,
    /// In ascending order of their subnets, each subnet once.
    peers: Box<[Arc<Peer>]>,
    /// The peers' tunnel addresses in the same order, 6 bytes each and side by side: a packet to
    /// one of thousands of peers loads no line of the peer itself.
    tunnel_addresses: Box<[SocketAddrV4]>,
    /// Public addresses of the peers in ascending order, each once.
    outer_addresses: Box<[Ipv4Addr]>,
    /// Whether this is the table before any lease is known.
    pub is_provisional: bool,
}

/// Slots hold a peer's index plus one; zero is "no route".
#[derive(Debug)]
enum Lookup {
    Dense {
        base: u32,
        host_bits: u32,
        slots: Box<[u32]>,
    },
    /// From each address on, up to the next one's, this slot. In ascending order; the first is 0.
    Cuts(Box<[(u32, u32)]>),
}

impl Table {
    /// The table before any lease is known: it has no route, and that says nothing about who
    /// exists, so nobody must be told that a network is unreachable.
    pub fn provisional() -> Self {
        Self { is_provisional: true, ..Self::build(Vec::new()) }
    }

    /// Builds a table; of several peers with the same subnet, the last one wins.
    pub fn build(mut peers: Vec<Arc<Peer>>) -> Self {
        // Stable, so equal subnets keep their order and the last of each run is the winner.
        peers.sort_by_key(|peer| peer.subnet);
        peers.reverse();
        peers.dedup_by_key(|peer| peer.subnet);
        peers.reverse();

        let mut outer_addresses: Vec<_> = peers.iter().map(|peer| *peer.address.ip()).collect();
        outer_addresses.sort_unstable();
        outer_addresses.dedup();
        Self {
            lookup: Lookup::build(&peers),
            tunnel_addresses: peers.iter().map(|peer| peer.address).collect(),
            peers: peers.into_boxed_slice(),
            outer_addresses: outer_addresses.into_boxed_slice(),
            is_provisional: false,
        }
    }

    /// The peer whose subnet is the longest that holds `destination`.
    #[inline]
    pub fn lookup(&self, destination: Ipv4Addr) -> Option<&Peer> {
        self.peers.get(self.lookup.index(destination) as usize).map(|peer| &**peer)
    }

    /// Where packets to `destination` go: the address of the peer that [`Self::lookup`] finds.
    #[inline]
    pub fn tunnel_address(&self, destination: Ipv4Addr) -> Option<SocketAddrV4> {
        self.tunnel_addresses.get(self.lookup.index(destination) as usize).copied()
    }

    /// Whether any peer has this public address, at whichever port.
    #[inline]
    pub fn has_peer_at(&self, outer: Ipv4Addr) -> bool {
        self.outer_addresses.binary_search(&outer).is_ok()
    }

    /// The peers in ascending order of their subnets.
    pub fn peers(&self) -> &[Arc<Peer>] {
        &self.peers
    }
}

impl Lookup {
    /// The peer's index, or `u32::MAX` if there is no route.
    #[inline]
    fn index(&self, destination: Ipv4Addr) -> u32 {
        let destination = destination.to_bits();
        let slot = match self {
            Self::Dense { base, host_bits, slots } => {
                // Below the base, the difference wraps around to beyond the last slot.
                let offset = destination.wrapping_sub(*base) >> host_bits;
                slots.get(offset as usize).copied().unwrap_or(0)
            }
            Self::Cuts(cuts) => {
                let behind = cuts.partition_point(|(start, _)| *start <= destination);
                cuts.get(behind.wrapping_sub(1)).map_or(0, |(_, slot)| *slot)
            }
        };
        slot.wrapping_sub(1)
    }

    /// `peers` is in ascending order of subnets, each once.
    fn build(peers: &[Arc<Peer>]) -> Self {
        Self::build_dense(peers).unwrap_or_else(|| Self::build_cuts(peers))
    }

    /// The dense array, if the subnets don't overlap or lie too far apart. Its slots are as long as
    /// the longest prefix; a shorter one takes several.
    fn build_dense(peers: &[Arc<Peer>]) -> Option<Self> {
        let Some(first) = peers.first() else {
            return Some(Self::Dense { base: 0, host_bits: 0, slots: Box::default() });
        };
        let longest =
            peers.iter().map(|peer| peer.subnet.length_bits()).max().filter(|&l| l > 0)?;
        let host_bits = 32 - u32::from(longest);
        let base = first.subnet.network().to_bits();
        let slots_of = |subnet: Prefix| {
            let slot = |address: Ipv4Addr| ((address.to_bits() - base) >> host_bits) as usize;
            slot(subnet.network())..slot(subnet.last()) + 1
        };
        let slots_len = peers.iter().map(|peer| slots_of(peer.subnet).end).max()?;
        let filled: usize = peers.iter().map(|peer| slots_of(peer.subnet).len()).sum();
        if slots_len > DENSE_SLOTS_MAX || filled > slots_len {
            return None;
        }
        let mut slots = vec![0; slots_len].into_boxed_slice();
        // A prefix comes before all that refine it, should there be any.
        for (slot, peer) in (1..).zip(peers) {
            slots[slots_of(peer.subnet)].fill(slot);
        }
        Some(Self::Dense { base, host_bits, slots })
    }

    fn build_cuts(peers: &[Arc<Peer>]) -> Self {
        let mut cuts = BTreeMap::from([(0, 0)]);
        // A prefix comes before all that refine it: behind each the slot of the one around it goes
        // on, unless something begins there.
        for (slot, peer) in (1..).zip(peers) {
            if let Some(behind) = peer.subnet.last().to_bits().checked_add(1) {
                let around = cuts.range(..=behind).next_back().map_or(0, |(_, slot)| *slot);
                cuts.insert(behind, around);
            }
            cuts.insert(peer.subnet.network().to_bits(), slot);
        }
        Self::Cuts(cuts.into_iter().collect())
    }
}

#[cfg(test)]
mod tests;
