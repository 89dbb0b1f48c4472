//! What one worker did for each peer, in a bounded table: packets and bytes each way, and sends
//! that failed. Touched once for each datagram or batch of datagrams, not for each packet in it.

use std::fmt;
use std::net::Ipv4Addr;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Counter;

/// Peers that one worker has room for: more than the 5,000 that weft is made for; 512 KiB.
pub const PEERS_COUNTED_MAX: usize = 8192;

/// Places that are looked at for one peer. Hosts mostly number their addresses one after the
/// other, and then each has a place of its own.
const PLACES_TRIED_MAX: usize = 16;

/// A place that no peer has: no host's address.
const FREE: u32 = 0;

/// The packets to and from one peer, as pods see them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerTraffic {
    /// Sent to it.
    pub packets_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Received from it, and found to be good.
    pub packets_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
    /// Packets that could not be sent, for a reason that is the peer's own.
    pub failed_sends: u64,
}

impl AddAssign for PeerTraffic {
    fn add_assign(&mut self, other: Self) {
        self.packets_sent += other.packets_sent;
        self.bytes_sent += other.bytes_sent;
        self.packets_received += other.packets_received;
        self.bytes_received += other.bytes_received;
        self.failed_sends += other.failed_sends;
    }
}

/// One worker's counts, by the peers' public addresses.
///
/// INVARIANT: as for [`Counter`], one thread writes. A place belongs to one peer for ever: a peer
/// that has left keeps what was counted.
pub struct ByPeer {
    places: Box<[Place]>,
    elsewhere: Place,
}

/// A cache line, so that a peer costs one.
#[derive(Default)]
#[repr(align(64))]
struct Place {
    peer: AtomicU32,
    packets_sent: Counter,
    bytes_sent: Counter,
    packets_received: Counter,
    bytes_received: Counter,
    failed_sends: Counter,
}

impl Place {
    fn traffic(&self) -> PeerTraffic {
        PeerTraffic {
            packets_sent: self.packets_sent.get(),
            bytes_sent: self.bytes_sent.get(),
            packets_received: self.packets_received.get(),
            bytes_received: self.bytes_received.get(),
            failed_sends: self.failed_sends.get(),
        }
    }
}

impl Default for ByPeer {
    fn default() -> Self {
        let places = std::iter::repeat_with(Place::default).take(PEERS_COUNTED_MAX).collect();
        Self { places, elsewhere: Place::default() }
    }
}

impl fmt::Debug for ByPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByPeer").finish_non_exhaustive()
    }
}

impl ByPeer {
    /// Counts of nobody, without room for any.
    pub(super) fn of_nobody() -> Self {
        Self { places: Box::default(), elsewhere: Place::default() }
    }

    /// Counts what was sent to `peer`.
    #[inline]
    pub fn sent(&self, peer: Ipv4Addr, packets: u64, bytes: u64) {
        let place = self.place(peer, || true);
        place.packets_sent.add(packets);
        place.bytes_sent.add(bytes);
    }

    /// Counts what `sender` sent. It gets a place if it `is_peer`: anybody may write anything into
    /// the source address of a datagram.
    #[inline]
    pub fn received(
        &self,
        sender: Ipv4Addr,
        packets: u64,
        bytes: u64,
        is_peer: impl FnOnce() -> bool,
    ) {
        let place = self.place(sender, is_peer);
        place.packets_received.add(packets);
        place.bytes_received.add(bytes);
    }

    /// Counts `packets` that could not be sent to `peer`.
    pub fn failed(&self, peer: Ipv4Addr, packets: u64) {
        self.place(peer, || true).failed_sends.add(packets);
    }

    /// What was counted for `peer`: nothing if it found no place.
    pub fn get(&self, peer: Ipv4Addr) -> PeerTraffic {
        for place in self.tried(peer) {
            match place.peer.load(Ordering::Relaxed) {
                FREE => break,
                taken_by if taken_by == peer.to_bits() => return place.traffic(),
                _ => {}
            }
        }
        PeerTraffic::default()
    }

    /// What was counted for peers that found no place, and for senders that are no peers.
    pub fn elsewhere(&self) -> PeerTraffic {
        self.elsewhere.traffic()
    }

    /// The place of `peer`, which it gets now if it `may_have_one` and has none.
    #[inline]
    fn place(&self, peer: Ipv4Addr, may_have_one: impl FnOnce() -> bool) -> &Place {
        for place in self.tried(peer) {
            let taken_by = place.peer.load(Ordering::Relaxed);
            if taken_by == FREE {
                if peer.is_unspecified() || !may_have_one() {
                    break;
                }
                place.peer.store(peer.to_bits(), Ordering::Relaxed);
                return place;
            }
            if taken_by == peer.to_bits() {
                return place;
            }
        }
        &self.elsewhere
    }

    /// Where `peer` may have its place, the likeliest first.
    #[inline]
    fn tried(&self, peer: Ipv4Addr) -> impl Iterator<Item = &Place> {
        let first = peer.to_bits() as usize;
        let places = (first..first + PLACES_TRIED_MAX).map(|at| at % PEERS_COUNTED_MAX);
        places.filter_map(|at| self.places.get(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(0xAC14_0001 + number)
    }

    #[test]
    fn neighbours_are_counted_apart() {
        let counts = ByPeer::default();
        for number in 0..PEERS_COUNTED_MAX as u32 {
            counts.sent(peer(number), 1, u64::from(number));
            counts.received(peer(number), 2, 30, || true);
            counts.failed(peer(number), 4);
        }
        for number in 0..PEERS_COUNTED_MAX as u32 {
            let expected = PeerTraffic {
                packets_sent: 1,
                bytes_sent: u64::from(number),
                packets_received: 2,
                bytes_received: 30,
                failed_sends: 4,
            };
            assert_eq!(counts.get(peer(number)), expected, "{}", peer(number));
        }
        assert_eq!(counts.elsewhere(), PeerTraffic::default());
        counts.failed(peer(PEERS_COUNTED_MAX as u32), 7);
        assert_eq!(counts.elsewhere().failed_sends, 7, "what has no place is in no count");
    }

    #[test]
    fn strangers_get_no_place() {
        let counts = ByPeer::default();
        for number in 0..100 {
            counts.received(peer(number), 1, 64, || false);
        }
        assert_eq!(counts.get(peer(7)).packets_received, 0, "spoofed senders fill the table");
        assert_eq!(counts.elsewhere().packets_received, 100);
        counts.sent(peer(7), 1, 64);
        counts.received(peer(7), 1, 64, || false);
        assert_eq!(counts.get(peer(7)).packets_received, 1, "one that has a place keeps it");
    }
}
