//! Counts for each peer that one worker keeps in a bounded table: how often a send to it failed.
//! Touched for a failed send only; nothing here is looked at for a packet that goes.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Counter;

/// Peers that one worker has room for: as many as one status lists; 16 KiB.
pub const FAILING_PEERS_MAX: usize = 1024;

/// Places that are looked at for one peer. Hosts mostly number their addresses one after the
/// other, and then each has a place of its own.
const PLACES_TRIED_MAX: usize = 16;

/// A place that no peer has.
pub(super) const FREE: u64 = u64::MAX;

/// Packets that the kernel refused to send, for each peer that they were meant for.
///
/// INVARIANT: as for [`Counter`], one thread writes. A place belongs to one peer for ever: a peer
/// that has left keeps what was counted.
pub struct FailedSends {
    places: Box<[Place]>,
    elsewhere: Counter,
}

struct Place {
    peer: AtomicU64,
    packets: Counter,
}

impl Default for FailedSends {
    fn default() -> Self {
        let place = || Place { peer: AtomicU64::new(FREE), packets: Counter::default() };
        let places = std::iter::repeat_with(place).take(FAILING_PEERS_MAX).collect();
        Self { places, elsewhere: Counter::default() }
    }
}

impl fmt::Debug for FailedSends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let packets = self.each().map(|(_, packets)| packets).sum::<u64>() + self.elsewhere();
        f.debug_struct("FailedSends").field("packets", &packets).finish_non_exhaustive()
    }
}

impl FailedSends {
    /// Counts `packets` that could not be sent to `peer`.
    pub fn add(&self, peer: SocketAddrV4, packets: u64) {
        let packed = pack(peer);
        let first = peer.ip().to_bits() as usize;
        for step in 0..PLACES_TRIED_MAX {
            let place = &self.places[(first + step) % FAILING_PEERS_MAX];
            match place.peer.load(Ordering::Relaxed) {
                FREE => place.peer.store(packed, Ordering::Relaxed),
                taken if taken == packed => {}
                _ => continue,
            }
            return place.packets.add(packets);
        }
        self.elsewhere.add(packets);
    }

    /// Every peer with its count, in no order.
    pub fn each(&self) -> impl Iterator<Item = (SocketAddrV4, u64)> {
        self.places.iter().filter_map(|place| {
            let packed = place.peer.load(Ordering::Relaxed);
            (packed != FREE).then(|| (unpack(packed), place.packets.get()))
        })
    }

    /// Packets for peers that found no place.
    pub fn elsewhere(&self) -> u64 {
        self.elsewhere.get()
    }

    pub(super) fn add_all(&self, other: &Self) {
        other.each().for_each(|(peer, packets)| self.add(peer, packets));
        self.elsewhere.add(other.elsewhere());
    }
}

pub(super) fn pack(peer: SocketAddrV4) -> u64 {
    u64::from(peer.ip().to_bits()) << 16 | u64::from(peer.port())
}

pub(super) fn unpack(packed: u64) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from_bits((packed >> 16) as u32), packed as u16)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn peer(number: u32) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::from_bits(0xAC14_0001 + number), 8285)
    }

    #[test]
    fn neighbours_are_counted_apart() {
        let failed = FailedSends::default();
        for number in 0..FAILING_PEERS_MAX as u32 {
            failed.add(peer(number), u64::from(number) + 1);
            failed.add(peer(number), 1);
        }
        let counts: BTreeMap<_, _> = failed.each().collect();
        assert_eq!(counts.len(), FAILING_PEERS_MAX);
        for number in 0..FAILING_PEERS_MAX as u32 {
            assert_eq!(counts[&peer(number)], u64::from(number) + 2, "{}", peer(number));
        }
        assert_eq!(failed.elsewhere(), 0);
        failed.add(peer(FAILING_PEERS_MAX as u32), 7);
        assert_eq!(failed.elsewhere(), 7, "what has no place is in no count");
    }

    #[test]
    fn any_address_and_port_round_trips() {
        for text in ["0.0.0.0:0", "255.255.255.255:65535", "192.0.2.1:8285", "10.0.0.0:1"] {
            let address: SocketAddrV4 = text.parse().unwrap();
            assert_eq!(unpack(pack(address)), address);
            assert_ne!(pack(address), FREE);
        }
    }
}
