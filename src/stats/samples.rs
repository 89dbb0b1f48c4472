//! Dropped packets as samples, for an operator who asks: `weft drops`. Nobody asking, a drop costs
//! one load; a packet that is forwarded costs nothing at any time.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::DropReason;

/// Longest part of a packet that is kept: all headers, and the beginning of what they carry.
pub const SAMPLE_BYTES_MAX: usize = 256;

/// Samples that a ring holds. Readers come a few times a second and take what is there.
const RING_SAMPLES: usize = 64;
/// Most samples of one turn: a flood costs little more than it did, and leaves room for others.
const TURN_SAMPLES_MAX: u64 = 16;

/// A packet that is dropped.
#[derive(Debug, Clone, Copy)]
pub struct DroppedPacket<'a> {
    /// Monotonic time of its batch.
    pub now_ns: u64,
    /// The peer that sent it or was to get it, if that is known.
    pub peer: Option<SocketAddr>,
    /// The packet, from its IP header on, as far as it is at hand.
    pub packet: &'a [u8],
}

/// What is kept of a dropped packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Monotonic time of its batch.
    pub at_ns: u64,
    /// Why it was dropped.
    pub reason: DropReason,
    /// How many packets went with it, itself included: a super-packet stands for several.
    pub packets: u64,
    /// The peer, if it was known.
    pub peer: Option<SocketAddr>,
    /// Length of the packet or super-packet.
    pub length_bytes: usize,
    /// Its first [`SAMPLE_BYTES_MAX`] bytes.
    pub bytes: Vec<u8>,
}

/// Samples of one direction of one worker.
#[derive(Debug, Default)]
pub struct Samples {
    /// Until when samples are wanted, on the monotonic clock.
    wanted_until_ns: AtomicU64,
    ring: Mutex<Ring>,
}

/// The last samples, the oldest first.
#[derive(Debug, Default)]
struct Ring {
    samples: VecDeque<Sample>,
    /// Number of the next sample.
    next: u64,
    /// The turn of the last sample, and how many that turn had.
    turn_ns: u64,
    of_turn: u64,
}

impl Samples {
    /// Wants samples until `until_ns`, and gives those from number `first` on that are still there,
    /// with the number of the next one.
    pub fn read(&self, first: u64, until_ns: u64) -> (Vec<Sample>, u64) {
        self.wanted_until_ns.fetch_max(until_ns, Ordering::Relaxed);
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = ring.next - ring.samples.len() as u64;
        let seen = first.saturating_sub(oldest) as usize;
        (ring.samples.iter().skip(seen).cloned().collect(), ring.next)
    }

    /// Keeps a sample of what is dropped for `reason`, if anybody wants it.
    #[inline]
    pub(super) fn offer(&self, reason: DropReason, packets: u64, dropped: DroppedPacket<'_>) {
        if dropped.now_ns < self.wanted_until_ns.load(Ordering::Relaxed) {
            self.keep(reason, packets, dropped);
        }
    }

    #[cold]
    fn keep(&self, reason: DropReason, packets: u64, dropped: DroppedPacket<'_>) {
        let DroppedPacket { now_ns, peer, packet } = dropped;
        // While somebody reads, a sample is lost: a worker never waits.
        let Ok(mut ring) = self.ring.try_lock() else { return };
        if ring.turn_ns != now_ns {
            (ring.turn_ns, ring.of_turn) = (now_ns, 0);
        }
        if ring.of_turn >= TURN_SAMPLES_MAX {
            return;
        }
        if ring.samples.len() == RING_SAMPLES {
            ring.samples.pop_front();
        }
        (ring.next, ring.of_turn) = (ring.next + 1, ring.of_turn + 1);
        ring.samples.push_back(Sample {
            at_ns: now_ns,
            reason,
            packets,
            peer,
            length_bytes: packet.len(),
            bytes: packet.get(..SAMPLE_BYTES_MAX).unwrap_or(packet).to_vec(),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7)), 8285);

    fn drop_at(samples: &Samples, now_ns: u64, packet: &[u8]) {
        let dropped = DroppedPacket { now_ns, peer: Some(PEER), packet };
        samples.offer(DropReason::NoRoute, 3, dropped);
    }

    #[test]
    fn a_sample_is_what_was_dropped() {
        let samples = Samples::default();
        drop_at(&samples, 1, b"before anybody asked");
        assert_eq!(samples.read(0, 100), (vec![], 0));
        let long = [7; SAMPLE_BYTES_MAX + 1];
        drop_at(&samples, 2, b"a packet of odd length");
        samples.offer(
            DropReason::InternalError,
            1,
            DroppedPacket { now_ns: 3, peer: None, packet: &long },
        );
        drop_at(&samples, 100, b"when nobody asks any more");
        let (found, next) = samples.read(0, 0);
        let short = Sample {
            at_ns: 2,
            reason: DropReason::NoRoute,
            packets: 3,
            peer: Some(PEER),
            length_bytes: 22,
            bytes: b"a packet of odd length".to_vec(),
        };
        assert_eq!((&found[0], found.len(), next), (&short, 2, 2));
        let Sample { reason, peer, length_bytes, bytes, .. } = &found[1];
        assert_eq!((*reason, *peer), (DropReason::InternalError, None));
        assert_eq!((*length_bytes, bytes.as_slice()), (257, &long[..SAMPLE_BYTES_MAX]));
        assert_eq!(samples.read(next, 0), (vec![], 2), "a sample was read twice");
    }

    #[test]
    fn a_flood_is_bounded_in_a_turn_and_in_memory() {
        let samples = Samples::default();
        samples.read(0, u64::MAX);
        (0..1000).for_each(|_| drop_at(&samples, 1, b"x"));
        assert_eq!(samples.read(0, 0).1, TURN_SAMPLES_MAX);
        (2..1000).for_each(|now_ns| drop_at(&samples, now_ns, b"x"));
        let (found, next) = samples.read(0, 0);
        assert_eq!((found.len(), next), (RING_SAMPLES, TURN_SAMPLES_MAX + 998));
        assert_eq!(found.last().map(|sample| sample.at_ns), Some(999), "the last is missing");
    }

    #[test]
    fn readers_see_whole_samples_only() {
        let samples = Samples::default();
        samples.read(0, u64::MAX);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for now_ns in 1..200_000_u64 {
                    let bytes = [now_ns as u8; SAMPLE_BYTES_MAX];
                    drop_at(&samples, now_ns, &bytes);
                }
            });
            let mut first = 0;
            while !writer.is_finished() {
                let (found, next) = samples.read(first, u64::MAX);
                for sample in &found {
                    assert!(sample.bytes.iter().all(|byte| *byte == sample.at_ns as u8), "torn");
                }
                assert!(found.is_sorted_by_key(|sample| sample.at_ns), "out of order");
                assert!(found.len() as u64 <= next - first, "read twice");
                first = next;
                // Or it would have the lock nearly all the time, and the writer keep nothing.
                std::thread::yield_now();
            }
        });
        // Nobody reads now, so this one is kept, if the writer had none before.
        drop_at(&samples, 200_000, &[64; SAMPLE_BYTES_MAX]);
        assert!(!samples.read(0, 0).0.is_empty(), "no sample was ever whole");
    }

    #[test]
    fn a_worker_does_not_wait_for_a_reader() {
        let samples = Samples::default();
        samples.read(0, u64::MAX);
        let reader = samples.ring.lock().unwrap();
        drop_at(&samples, 1, b"lost");
        drop(reader);
        drop_at(&samples, 2, b"kept");
        let (found, next) = samples.read(0, 0);
        assert_eq!((found[0].at_ns, next), (2, 1));
    }
}
