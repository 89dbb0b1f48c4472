//! The route table: which peer an inner destination belongs to. Built whole, then immutable.
//!
//! Leases are disjoint subnets of one network and differ little in length, so one array indexed by
//! the subnet's number answers most tables with a single load. Any other set of prefixes falls
//! back to a trie with a root over the upper 16 bits and 16-way nodes below, at most five loads.
//! Neither lookup depends on how many peers there are, and neither table on more than the bounds
//! stated below.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::route::Prefix;

/// Most slots of the dense array: a /8 network cut into /28 subnets, 4 MiB. The array is asked
/// for as zeroed memory, so pages without a peer are usually never touched.
const DENSE_SLOTS_MAX: usize = 1 << 20;

/// Bits that the root of the trie decides: 2^16 entries of 4 bytes, 256 KiB.
const ROOT_BITS: u32 = 16;

/// Bits that each node below the root decides. A node is 16 entries of 4 bytes, a cache line; a
/// prefix needs at most (32 - 16) / 4 of them, so a trie costs at most 256 KiB plus 256 bytes per
/// peer, wherever the prefixes lie.
const NODE_BITS: u32 = 4;

const NODE_ENTRIES: usize = 1 << NODE_BITS;

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
    provisional: bool,
}

/// Slots hold a peer's index plus one; zero is "no route".
#[derive(Debug)]
enum Lookup {
    Dense { base: u32, host_bits: u32, slots: Box<[u32]> },
    Trie(Trie),
}

impl Table {
    /// The table before any lease is known: it has no route, and that says nothing about who
    /// exists, so nobody must be told that a network is unreachable.
    pub fn provisional() -> Self {
        Self { provisional: true, ..Self::build(Vec::new()) }
    }

    /// Whether this is the table before any lease is known.
    pub fn is_provisional(&self) -> bool {
        self.provisional
    }

    /// Builds a table; of several peers with the same subnet, the last one wins.
    ///
    /// At most 2^31 - 1 peers fit; the control plane holds at most 65,536 leases.
    pub fn build(mut peers: Vec<Arc<Peer>>) -> Self {
        // Stable, so equal subnets keep their order and the last of each run is the winner.
        peers.sort_by_key(|peer| peer.subnet);
        peers.reverse();
        peers.dedup_by_key(|peer| peer.subnet);
        peers.reverse();
        debug_assert!(peers.len() < NODE_FLAG as usize, "a table of {} peers", peers.len());

        let mut outer_addresses: Vec<_> = peers.iter().map(|peer| *peer.address.ip()).collect();
        outer_addresses.sort_unstable();
        outer_addresses.dedup();
        Self {
            lookup: Lookup::build(&peers),
            tunnel_addresses: peers.iter().map(|peer| peer.address).collect(),
            peers: peers.into_boxed_slice(),
            outer_addresses: outer_addresses.into_boxed_slice(),
            provisional: false,
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
            Self::Trie(trie) => trie.lookup(destination),
        };
        slot.wrapping_sub(1)
    }

    /// `peers` is in ascending order of subnets, each once.
    fn build(peers: &[Arc<Peer>]) -> Self {
        Self::build_dense(peers).unwrap_or_else(|| Self::Trie(Trie::build(peers)))
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
}

/// Marks an entry that holds the index of a node instead of a slot.
const NODE_FLAG: u32 = 1 << 31;

/// A multibit trie with every prefix expanded to the entries it covers.
#[derive(Debug)]
struct Trie {
    root: Box<[u32]>,
    nodes: Vec<[u32; NODE_ENTRIES]>,
}

impl Trie {
    /// `peers` is in ascending order of subnets, each once.
    fn build(peers: &[Arc<Peer>]) -> Self {
        let mut trie = Self { root: vec![0; 1 << ROOT_BITS].into_boxed_slice(), nodes: Vec::new() };
        // In ascending order a prefix comes before all that refine it: they overwrite its part,
        // and no prefix ever covers an entry that is a node already.
        for (slot, peer) in (1..).zip(peers) {
            trie.insert(slot, peer.subnet);
        }
        trie.nodes.shrink_to_fit();
        trie
    }

    fn insert(&mut self, slot: u32, subnet: Prefix) {
        let network = subnet.network().to_bits();
        let length_bits = u32::from(subnet.length_bits());
        let mut shift = 32 - ROOT_BITS;
        if length_bits <= ROOT_BITS {
            let first = (network >> shift) as usize;
            self.root[first..first + (1 << (ROOT_BITS - length_bits))].fill(slot);
            return;
        }
        let mut node = Self::child(&mut self.root[(network >> shift) as usize], &mut self.nodes);
        loop {
            shift -= NODE_BITS;
            let entry = (network >> shift) as usize % NODE_ENTRIES;
            if length_bits <= 32 - shift {
                let covered = 1 << (32 - shift - length_bits);
                self.nodes[node][entry..entry + covered].fill(slot);
                return;
            }
            let mut value = self.nodes[node][entry];
            let next = Self::child(&mut value, &mut self.nodes);
            self.nodes[node][entry] = value;
            node = next;
        }
    }

    /// The node below `entry`; one is made, inheriting the slot that stood there, if need be.
    fn child(entry: &mut u32, nodes: &mut Vec<[u32; NODE_ENTRIES]>) -> usize {
        if *entry & NODE_FLAG == 0 {
            nodes.push([*entry; NODE_ENTRIES]);
            *entry = NODE_FLAG | (nodes.len() - 1) as u32;
        }
        (*entry & !NODE_FLAG) as usize
    }

    #[inline]
    fn lookup(&self, destination: u32) -> u32 {
        let mut shift = 32 - ROOT_BITS;
        let mut entry = self.root.get((destination >> shift) as usize).copied().unwrap_or(0);
        while entry & NODE_FLAG != 0 && shift != 0 {
            shift -= NODE_BITS;
            let node = self.nodes.get((entry & !NODE_FLAG) as usize);
            entry = node.map_or(0, |node| node[(destination >> shift) as usize % NODE_ENTRIES]);
        }
        entry
    }
}

#[cfg(test)]
mod tests;
