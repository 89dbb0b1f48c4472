//! The peers that the kernel's programs know: which counts are whose, what differs from the table,
//! what has been counted since the last look.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use crate::backend::status::Taken;
use crate::fast_path::{Maps, PEERS_MAX, PeerCounts, PeerEntry, Settings};
use crate::route::{Peer, Prefix, Table};

/// How an address is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hop {
    /// Through the device with this index, by this neighbour.
    Through(u32, Ipv4Addr),
    /// Not at all, or in a way that only the IP stack knows.
    Unusable,
}

/// A peer for which something was counted since the last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct News {
    pub(super) subnet: Prefix,
    pub(super) peer: SocketAddrV4,
    pub(super) is_sent_long: bool,
    pub(super) is_received_from: bool,
}

/// What the maps hold.
#[derive(Debug)]
pub(super) struct Entries {
    published: BTreeMap<Prefix, PeerEntry>,
    /// Each peer keeps its number, and with it its counts, when it leaves: should it come back, it
    /// goes on counting. There are enough numbers for years; whoever gets none is the workers'.
    numbers: BTreeMap<(Prefix, SocketAddrV4), u32>,
    seen: BTreeMap<u32, PeerCounts>,
    taken: Arc<Taken>,
}

impl Entries {
    pub(super) fn new(taken: Arc<Taken>) -> Self {
        let (published, numbers, seen) = Default::default();
        Self { published, numbers, seen, taken }
    }

    /// How many peers the programs send to.
    pub(super) fn sent_to(&self) -> usize {
        self.published.values().filter(|entry| entry.is_sent_to).count()
    }

    /// Makes the maps hold the peers of `table`, of whom `may_send_to` may be sent to.
    pub(super) fn publish(
        &mut self,
        maps: &Maps,
        table: &Table,
        hops: &BTreeMap<Ipv4Addr, Hop>,
        settings: &Settings,
        may_send_to: impl Fn(&Peer) -> bool,
    ) -> io::Result<()> {
        let mut wanted = BTreeMap::new();
        for peer in table.peers() {
            let mut entry = self.entry(peer, hops, settings);
            entry.is_sent_to &= may_send_to(peer);
            wanted.insert(peer.subnet, entry);
        }
        let gone: Vec<_> =
            self.published.keys().filter(|subnet| !wanted.contains_key(subnet)).copied().collect();
        for subnet in gone {
            maps.remove_peer(subnet)?;
            self.published.remove(&subnet);
        }
        for (subnet, entry) in wanted {
            if self.published.get(&subnet) != Some(&entry) {
                maps.set_peer(subnet, entry)?;
                self.published.insert(subnet, entry);
            }
        }
        self.taken.name(&self.numbers);
        Ok(())
    }

    /// A peer that is reached in another way is in the maps as well, for the sake of the longest
    /// prefix.
    fn entry(
        &mut self,
        peer: &Peer,
        hops: &BTreeMap<Ipv4Addr, Hop>,
        settings: &Settings,
    ) -> PeerEntry {
        let address = *peer.address.ip();
        let next_hop = match hops.get(&address) {
            Some(Hop::Through(device, next_hop)) if *device == settings.underlay_device => {
                Some(*next_hop)
            }
            Some(_) | None => None,
        };
        let number = self.number(peer);
        let is_ours = address == settings.underlay_address;
        let is_carried = next_hop.is_some() && number.is_some() && !is_ours;
        PeerEntry {
            address,
            next_hop: next_hop.unwrap_or(address),
            number: number.unwrap_or(0),
            is_sent_to: is_carried && peer.takes_no_checksum,
            is_received_from: is_carried,
        }
    }

    fn number(&mut self, peer: &Peer) -> Option<u32> {
        let key = (peer.subnet, peer.address);
        if let Some(number) = self.numbers.get(&key) {
            return Some(*number);
        }
        let number = u32::try_from(self.numbers.len()).ok().filter(|number| *number < PEERS_MAX)?;
        self.numbers.insert(key, number);
        Some(number)
    }

    /// Those for whom something was counted since the last call.
    pub(super) fn news(&mut self) -> Vec<News> {
        let mut news = Vec::new();
        for ((subnet, peer), number) in &self.numbers {
            let now = self.taken.of(*number);
            let before = self.seen.insert(*number, now).unwrap_or_default();
            let is_sent_long = now.long_packets_sent != before.long_packets_sent;
            let is_received_from = now.packets_received != before.packets_received;
            if is_sent_long || is_received_from {
                let (subnet, peer) = (*subnet, *peer);
                news.push(News { subnet, peer, is_sent_long, is_received_from });
            }
        }
        news
    }
}
