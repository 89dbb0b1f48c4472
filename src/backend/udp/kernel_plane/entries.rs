//! The peers that the kernel's programs know: which counts are whose, what differs from the table.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use crate::backend::status::Taken;
use crate::fast_path::{Maps, PeerEntry, Settings};
use crate::host::state::MacAddress;
use crate::route::{Peer, Prefix, Table};

use super::hops::Hops;

/// What the maps hold.
#[derive(Debug)]
pub(super) struct Entries {
    published: BTreeMap<Prefix, PeerEntry>,
    published_v6: BTreeMap<Prefix<Ipv6Addr>, PeerEntry>,
    taken: Arc<Taken>,
}

impl Entries {
    pub(super) fn new(taken: Arc<Taken>) -> Self {
        Self { published: BTreeMap::new(), published_v6: BTreeMap::new(), taken }
    }

    /// How many peers the programs send to.
    pub(super) fn sent_to(&self) -> usize {
        self.published.values().filter(|entry| entry.next_hop.is_some()).count()
    }

    /// Makes the maps hold the peers of `table`, of whom `may_send_to` may be sent to.
    pub(super) fn publish(
        &mut self,
        maps: &Maps,
        table: &Table,
        settings: &Settings,
        hops: &Hops,
        neighbours: &BTreeMap<Ipv4Addr, MacAddress>,
        may_send_to: impl Fn(&Peer) -> bool,
    ) -> io::Result<()> {
        // Of a peer that has left, what is published is removed first.
        self.taken.reuse(|subnet, peer| {
            let known = subnet.v4().and_then(|subnet| self.published.get(&subnet));
            known.is_some_and(|entry| IpAddr::V4(entry.address) == peer.ip())
        });
        let (mut wanted, mut wanted_v6) = (BTreeMap::new(), BTreeMap::new());
        for peer in table.peers() {
            let SocketAddr::V4(address) = peer.address else { continue };
            let Some(subnet) = peer.subnets.v4() else { continue };
            let hop = hops.get(address.ip()).copied().flatten();
            let hop = hop.filter(|(device, _)| *device == settings.underlay_device);
            let mut entry = self.entry(peer, *address.ip(), settings, hop.is_some());
            if entry.is_received_from && peer.takes_no_checksum && may_send_to(peer) {
                entry.next_hop = hop.and_then(|(_, hop)| Some(neighbours.get(&hop)?.0));
            }
            wanted.insert(subnet, entry);
            if let Some(subnet_v6) = peer.subnets.v6().filter(|_| settings.subnet_v6.is_some()) {
                wanted_v6.insert(subnet_v6, entry);
            }
        }
        let remove = |subnet| maps.remove_peer(subnet);
        let set = |subnet, entry| maps.set_peer(subnet, entry);
        bring(&mut self.published, wanted, remove, set)?;
        let remove = |subnet| maps.remove_peer_v6(subnet);
        let set = |subnet, entry| maps.set_peer_v6(subnet, entry);
        bring(&mut self.published_v6, wanted_v6, remove, set)
    }

    /// A peer that is reached in another way is in the maps as well, for the sake of the longest
    /// prefix.
    fn entry(
        &self,
        peer: &Peer,
        address: Ipv4Addr,
        settings: &Settings,
        is_reached: bool,
    ) -> PeerEntry {
        let number = self.taken.number(peer.subnets.first(), peer.address);
        let is_ours = address == settings.underlay_address;
        PeerEntry {
            address,
            number: number.unwrap_or(0),
            next_hop: None,
            is_received_from: is_reached && number.is_some() && !is_ours,
        }
    }
}

/// Makes a map hold what is `wanted`, as far as it was `published` otherwise.
fn bring<K: Ord + Copy>(
    published: &mut BTreeMap<K, PeerEntry>,
    wanted: BTreeMap<K, PeerEntry>,
    remove: impl Fn(K) -> io::Result<()>,
    set: impl Fn(K, PeerEntry) -> io::Result<()>,
) -> io::Result<()> {
    let gone = published.keys().filter(|key| !wanted.contains_key(key));
    for key in gone.copied().collect::<Vec<_>>() {
        remove(key)?;
        published.remove(&key);
    }
    for (key, entry) in wanted {
        if published.get(&key) != Some(&entry) {
            set(key, entry)?;
            published.insert(key, entry);
        }
    }
    Ok(())
}
