//! What one worker did for each peer, in a bounded table: packets and bytes each way, sends that
//! failed, and whether it was sent long datagrams lately. Touched once for each datagram or batch
//! of datagrams, not for each packet in it.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Counter;
use super::host_key::HostKey;
use super::long_sends::LongSends;

/// Peers that one worker has room for: more than the 5,000 that weft is made for; 512 KiB.
pub const PEERS_COUNTED_MAX: usize = 8192;

const _: () = assert!(PEERS_COUNTED_MAX.is_power_of_two());

/// Places that are looked at for one peer. With 5,000 peers all are found within some twenty.
const PLACES_TRIED_MAX: usize = 64;

/// 2^32 divided by the golden ratio, odd: its multiples lie evenly, whatever regular steps there
/// are between the peers' addresses (Knuth, The Art of Computer Programming, volume 3, 6.4).
const SPREAD: u32 = 0x9e37_79b1;

/// Which of `places`, a power of two, a host is looked for in first, by its address or key.
#[inline]
pub fn spread(host: u32, places: usize) -> usize {
    debug_assert!(places.is_power_of_two() && places > 1);
    (host.wrapping_mul(SPREAD) >> (u32::BITS - places.ilog2())) as usize
}

/// A place that no peer has.
const FREE: u32 = HostKey::NOBODY.bits();

/// The number of the place that those without one share.
const ELSEWHERE: usize = PEERS_COUNTED_MAX;

/// How long a peer that was heard counts as there, whatever is sent to it.
const HEARD_MS: u32 = 200;

/// What may be sent to a peer that does not answer before it counts as unanswered: the beginnings
/// of a few connections. What 200 hosts that are down get is less than half a send buffer.
const UNANSWERED_MAX: u64 = 16 << 10;

/// What a packet takes up in a send buffer beside its bytes: the kernel's record of it.
pub const PACKET_OVERHEAD: u64 = 768;

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

/// One worker's counts, by the peers' hosts.
///
/// INVARIANT: as for [`Counter`], one thread writes. A place belongs to one peer for ever: a peer
/// that has left keeps what was counted.
#[derive(Debug)]
pub struct ByPeer {
    places: Box<[Place]>,
    /// Of all who find no place. Its peer is the last of them that was sent long datagrams.
    elsewhere: Place,
    long_sends: LongSends,
}

/// A cache line, so that a peer costs one.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Place {
    peer: AtomicU32,
    /// When it was last found to have been heard, in milliseconds that wrap.
    heard_ms: AtomicU32,
    /// What all workers had received from it then, and how much it had been sent.
    heard_packets: Counter,
    sent_until_heard: Counter,
    packets_sent: Counter,
    bytes_sent: Counter,
    packets_received: Counter,
    bytes_received: Counter,
    failed_sends: Counter,
}

impl Default for ByPeer {
    fn default() -> Self {
        let places = std::iter::repeat_with(Place::default).take(PEERS_COUNTED_MAX).collect();
        let long_sends = LongSends::new(ELSEWHERE + 1);
        Self { places, elsewhere: Place::default(), long_sends }
    }
}

impl ByPeer {
    /// Counts what was sent to `peer`, and marks it if these are datagrams beyond
    /// [`LONG_BYTES`](super::LONG_BYTES).
    #[inline]
    pub fn sent(&self, peer: HostKey, packets: u64, bytes: u64, is_long: bool) {
        let (number, place) = self.place(peer, || true);
        place.packets_sent.add(packets);
        place.bytes_sent.add(bytes);
        if is_long {
            if number == ELSEWHERE {
                place.peer.store(peer.bits(), Ordering::Relaxed);
            }
            self.long_sends.mark(number);
        }
    }

    /// Those who are marked; forgets the marks. For another thread than the one that counts.
    pub fn take_long_sends(&self) -> impl Iterator<Item = HostKey> {
        let place = |number| self.places.get(number).unwrap_or(&self.elsewhere);
        let peer = move |number| HostKey::of_bits(place(number).peer.load(Ordering::Relaxed));
        self.long_sends.take().map(peer)
    }

    /// Counts what came from `sender`, or from the peer that it speaks for, by what `peer_of` says
    /// where it has no place. Only peers get one: anybody may write anything into the source of a
    /// datagram.
    #[inline]
    pub fn received(
        &self,
        sender: HostKey,
        packets: u64,
        bytes: u64,
        peer_of: impl FnOnce() -> Option<HostKey>,
    ) {
        let (number, mut place) = self.place(sender, || false);
        if number == ELSEWHERE
            && let Some(peer) = peer_of()
        {
            (_, place) = self.place(peer, || true);
        }
        place.packets_received.add(packets);
        place.bytes_received.add(bytes);
    }

    /// Counts `packets` that could not be sent to `peer`.
    pub fn failed(&self, peer: HostKey, packets: u64) {
        self.place(peer, || true).1.failed_sends.add(packets);
    }

    /// Whether so much was sent to `peer` since it was last heard that another message of `packets`
    /// and `bytes` may be for nobody. `heard_packets` says what all workers have received from it,
    /// and `is_heard` whether somebody else received from it lately.
    pub fn is_unanswered(
        &self,
        peer: HostKey,
        (packets, bytes): (u64, u64),
        now_ns: u64,
        heard_packets: impl FnOnce() -> u64,
        is_heard: impl FnOnce() -> bool,
    ) -> bool {
        let now_ms = (now_ns / 1_000_000) as u32;
        let (number, place) = self.place(peer, || false);
        let is_fresh = || now_ms.wrapping_sub(place.heard_ms.load(Ordering::Relaxed)) <= HEARD_MS;
        let sent = place.bytes_sent.get() + PACKET_OVERHEAD * place.packets_sent.get();
        let message = bytes + PACKET_OVERHEAD * packets;
        let is_little = || sent + message <= place.sent_until_heard.get() + UNANSWERED_MAX;
        // Those without a place share one.
        if number == ELSEWHERE || is_fresh() || is_little() {
            return false;
        }
        let heard_packets = heard_packets();
        if place.heard_packets.get() == heard_packets && !is_heard() {
            return true;
        }
        place.heard_ms.store(now_ms, Ordering::Relaxed);
        place.heard_packets.set(heard_packets);
        place.sent_until_heard.set(sent);
        false
    }

    /// Adds what was counted for `peer`: nothing if it found no place.
    pub(super) fn add_to(&self, total: &mut PeerTraffic, peer: HostKey) {
        let (number, place) = self.place(peer, || false);
        if number != ELSEWHERE {
            total.packets_sent += place.packets_sent.get();
            total.bytes_sent += place.bytes_sent.get();
            total.packets_received += place.packets_received.get();
            total.bytes_received += place.bytes_received.get();
            total.failed_sends += place.failed_sends.get();
        }
    }

    /// The place of `peer`, which it gets now if it `may_have_one` and has none, and its number.
    #[inline]
    fn place(&self, peer: HostKey, may_have_one: impl FnOnce() -> bool) -> (usize, &Place) {
        for (number, place) in self.tried(peer) {
            let taken_by = place.peer.load(Ordering::Relaxed);
            if taken_by == FREE {
                if peer == HostKey::NOBODY || !may_have_one() {
                    break;
                }
                place.peer.store(peer.bits(), Ordering::Relaxed);
                return (number, place);
            }
            if taken_by == peer.bits() {
                return (number, place);
            }
        }
        (ELSEWHERE, &self.elsewhere)
    }

    /// Where `peer` may have its place, the likeliest first.
    #[inline]
    fn tried(&self, peer: HostKey) -> impl Iterator<Item = (usize, &Place)> {
        let first = spread(peer.bits(), PEERS_COUNTED_MAX);
        let numbers = (first..first + PLACES_TRIED_MAX).map(|at| at % PEERS_COUNTED_MAX);
        numbers.filter_map(|number| Some((number, self.places.get(number)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(counts: &ByPeer, peer: HostKey) -> PeerTraffic {
        let mut total = PeerTraffic::default();
        counts.add_to(&mut total, peer);
        total
    }

    #[test]
    fn who_answers_or_is_sent_little_is_answered() {
        let (counts, somebody) = (ByPeer::default(), peer(1));
        let now_ns = |ms: u64| (ms + 60_000) * 1_000_000;
        let is_heard = std::cell::Cell::new(false);
        let is_unanswered = |packets: u64, ms, heard| {
            counts.is_unanswered(
                somebody,
                (packets, packets * 100),
                now_ns(ms),
                || heard,
                || is_heard.get(),
            )
        };
        assert!(!is_unanswered(1000, 0, 0), "one that was never sent to");
        counts.sent(somebody, 5, 500, false);
        assert!(!is_unanswered(5, 0, 0), "a few packets may be sent to anybody");
        assert!(is_unanswered(15, 0, 0) && is_unanswered(100, 1000, 0));
        counts.sent(somebody, 1_000_000, 100_000_000, false);
        assert!(is_unanswered(1, 2000, 0));
        assert!(!is_unanswered(1, 2000, 7), "it was heard");
        counts.sent(somebody, 1_000_000, 100_000_000, false);
        let limit_ms = u64::from(HEARD_MS);
        assert!(!is_unanswered(1, 2000 + limit_ms, 7), "it was heard lately");
        assert!(is_unanswered(1, 2001 + limit_ms, 7), "it was heard once");
        assert!(!is_unanswered(1, 2001 + limit_ms, 8), "it was heard again");
        assert!(!is_unanswered(15, 9000, 8), "what was sent before it was heard counts");
        counts.sent(somebody, 1_000_000, 100_000_000, false);
        is_heard.set(true);
        assert!(!is_unanswered(1000, 10_000, 8), "the kernel heard it");
        is_heard.set(false);
        assert!(!is_unanswered(15, 20_000, 8), "what was sent before the kernel heard it counts");
        assert!(is_unanswered(1000, 20_000, 8), "the kernel heard it once");
    }

    /// What was counted for peers that found no place, and for senders that are no peers.
    fn elsewhere(counts: &ByPeer) -> PeerTraffic {
        let place = &counts.elsewhere;
        PeerTraffic {
            packets_sent: place.packets_sent.get(),
            bytes_sent: place.bytes_sent.get(),
            packets_received: place.packets_received.get(),
            bytes_received: place.bytes_received.get(),
            failed_sends: place.failed_sends.get(),
        }
    }

    fn peer(number: u32) -> HostKey {
        HostKey::of_bits(0xAC14_0001_u32.wrapping_add(number))
    }

    #[test]
    fn peers_are_counted_apart_however_they_are_numbered() {
        // One after the other; one in each network of 2^16; racks of 30 in such networks; of 256.
        let numberings: [fn(u32) -> u32; 4] = [
            |number| number,
            |number| number << 16,
            |number| ((number / 30) << 16) | (number % 30),
            |number| ((number / 256) << 16) | (number % 256),
        ];
        for numbering in numberings {
            let counts = ByPeer::default();
            let peers = || (0..5000).map(|number| peer(numbering(number)));
            for (number, peer) in peers().enumerate() {
                counts.sent(peer, 1, number as u64, false);
                counts.received(peer, 2, 30, || Some(peer));
                counts.failed(peer, 4);
            }
            assert_eq!(elsewhere(&counts), PeerTraffic::default(), "some found no place");
            for (number, peer) in peers().enumerate() {
                let expected = PeerTraffic {
                    packets_sent: 1,
                    bytes_sent: number as u64,
                    packets_received: 2,
                    bytes_received: 30,
                    failed_sends: 4,
                };
                assert_eq!(of(&counts, peer), expected, "{peer:?}");
            }
        }
    }

    #[test]
    fn of_those_who_are_sent_long_datagrams_all_are_marked() {
        let counts = ByPeer::default();
        // As many hosts are numbered: with the same last byte in each rack.
        let peers: Vec<_> = (0..100).map(|rack| peer(rack << 8)).collect();
        let taken = || counts.take_long_sends().collect::<std::collections::BTreeSet<_>>();
        peers.iter().chain(&peers).for_each(|peer| counts.sent(*peer, 1, 1400, true));
        counts.sent(peer(7), 1, 64, false);
        assert_eq!(taken(), peers.iter().copied().collect());
        assert_eq!(taken(), [].into(), "a mark is taken twice");
        counts.sent(peers[1], 1, 1400, true);
        assert_eq!(taken(), [peers[1]].into(), "it was sent more since");
        (0..2 * PEERS_COUNTED_MAX as u32).for_each(|number| counts.failed(peer(number), 1));
        let (last, without) = (peer(9 * PEERS_COUNTED_MAX as u32), peer(1 << 31));
        [without, last].iter().for_each(|peer| counts.sent(*peer, 1, 1400, true));
        assert_eq!(taken(), [last].into(), "of those without a place one at least");
    }

    #[test]
    fn beyond_the_room_nobody_is_counted() {
        let counts = ByPeer::default();
        (0..2 * PEERS_COUNTED_MAX as u32).for_each(|number| counts.failed(peer(number), 1));
        let counted =
            (0..2 * PEERS_COUNTED_MAX as u32).map(|it| of(&counts, peer(it)).failed_sends);
        let all = counted.sum::<u64>() + elsewhere(&counts).failed_sends;
        assert_eq!(all, 2 * PEERS_COUNTED_MAX as u64);
    }

    #[test]
    fn strangers_get_no_place() {
        let counts = ByPeer::default();
        for number in 0..100 {
            counts.received(peer(number), 1, 64, || None);
        }
        assert_eq!(of(&counts, peer(7)).packets_received, 0, "spoofed senders fill the table");
        assert_eq!(elsewhere(&counts).packets_received, 100);
        counts.sent(peer(7), 1, 64, false);
        counts.received(peer(7), 1, 64, || None);
        assert_eq!(of(&counts, peer(7)).packets_received, 1, "one that has a place keeps it");
    }
}
