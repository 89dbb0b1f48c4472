//! Dropped packets as samples, for an operator who asks: `weft drops`. Nobody asking, a drop costs
//! one load; a packet that is forwarded costs nothing at any time.
//!
//! A ring with one writer, the worker, and any number of readers, who tell by a number around each
//! sample whether they have read it whole.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::DropReason;

/// Longest part of a packet that is kept: all headers, and the beginning of what they carry.
pub const SAMPLE_BYTES_MAX: usize = 256;

/// Samples that a ring holds. Readers come a few times a second and take what is there.
const RING_SAMPLES: u64 = 64;
/// Most samples of one turn: a flood costs little more than it did, and leaves room for others.
const TURN_SAMPLES_MAX: u64 = 16;

const WORDS: usize = SAMPLE_BYTES_MAX / size_of::<u64>();

/// A packet that is dropped.
#[derive(Debug, Clone, Copy)]
pub struct DroppedPacket<'a> {
    /// Monotonic time of its batch.
    pub now_ns: u64,
    /// The peer that sent it or was to get it, if that is known.
    pub peer: Option<SocketAddrV4>,
    /// The packet, from its IPv4 header on, as far as it is at hand.
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
    pub peer: Option<SocketAddrV4>,
    /// Length of the packet or super-packet.
    pub length_bytes: usize,
    /// Its first [`SAMPLE_BYTES_MAX`] bytes.
    pub bytes: Vec<u8>,
}

/// Samples of one direction of one worker.
#[derive(Default)]
pub struct Samples {
    /// Until when samples are wanted, on the monotonic clock.
    wanted_until_ns: AtomicU64,
    /// Made by the first reader.
    ring: OnceLock<Ring>,
}

struct Ring {
    slots: Box<[Slot]>,
    /// Samples written so far.
    written: AtomicU64,
    /// The writer's own: the turn of the last sample, and how many that turn had.
    turn_ns: AtomicU64,
    of_turn: AtomicU64,
}

#[derive(Default)]
struct Slot {
    /// Odd while it is written; twice the number of the sample, counted from 1, once it is whole.
    version: AtomicU64,
    at_ns: AtomicU64,
    /// Reason, and the length of the packet.
    what: AtomicU64,
    packets: AtomicU64,
    /// Address and port; 0 for none.
    peer: AtomicU64,
    bytes: [AtomicU64; WORDS],
}

impl Samples {
    /// Wants samples until `until_ns`, and gives those from number `first` on that are still there,
    /// with the number of the next one.
    pub fn read(&self, first: u64, until_ns: u64) -> (Vec<Sample>, u64) {
        let ring = self.ring.get_or_init(Ring::new);
        self.wanted_until_ns.fetch_max(until_ns, Ordering::Release);
        let next = ring.written.load(Ordering::Acquire);
        let first = first.max(next.saturating_sub(RING_SAMPLES));
        ((first..next).filter_map(|number| ring.slot(number).read(number)).collect(), next)
    }

    /// Keeps a sample of what is dropped for `reason`, if anybody wants it.
    #[inline]
    pub(super) fn offer(&self, reason: DropReason, packets: u64, dropped: DroppedPacket<'_>) {
        if dropped.now_ns < self.wanted_until_ns.load(Ordering::Acquire) {
            self.keep(reason, packets, dropped);
        }
    }

    #[cold]
    fn keep(&self, reason: DropReason, packets: u64, dropped: DroppedPacket<'_>) {
        let Some(ring) = self.ring.get() else { return };
        if ring.turn_ns.swap(dropped.now_ns, Ordering::Relaxed) != dropped.now_ns {
            ring.of_turn.store(0, Ordering::Relaxed);
        }
        if ring.of_turn.fetch_add(1, Ordering::Relaxed) >= TURN_SAMPLES_MAX {
            return;
        }
        let number = ring.written.load(Ordering::Relaxed);
        ring.slot(number).write(number, reason, packets, dropped);
        ring.written.store(number + 1, Ordering::Release);
    }
}

impl Ring {
    fn new() -> Self {
        Self {
            slots: (0..RING_SAMPLES).map(|_| Slot::default()).collect(),
            written: AtomicU64::new(0),
            turn_ns: AtomicU64::new(0),
            of_turn: AtomicU64::new(0),
        }
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.slots[(number % RING_SAMPLES) as usize]
    }
}

impl Slot {
    fn write(&self, number: u64, reason: DropReason, packets: u64, dropped: DroppedPacket<'_>) {
        let DroppedPacket { now_ns, peer, packet } = dropped;
        let peer = peer.map_or(0, |peer| u64::from(peer.ip().to_bits()) << 16 | peer.port() as u64);
        self.version.store(2 * number + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.at_ns.store(now_ns, Ordering::Relaxed);
        self.what.store((packet.len() as u64) << 8 | reason as u64, Ordering::Relaxed);
        self.packets.store(packets, Ordering::Relaxed);
        self.peer.store(peer, Ordering::Relaxed);
        for (word, bytes) in self.bytes.iter().zip(packet.chunks(size_of::<u64>())) {
            let mut whole = [0; size_of::<u64>()];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
        self.version.store(2 * (number + 1), Ordering::Release);
    }

    /// Sample `number`, if it is still there.
    fn read(&self, number: u64) -> Option<Sample> {
        let is_it = |version: u64| version == 2 * (number + 1);
        if !is_it(self.version.load(Ordering::Acquire)) {
            return None;
        }
        let what = self.what.load(Ordering::Relaxed);
        let length_bytes = (what >> 8) as usize;
        let peer = self.peer.load(Ordering::Relaxed);
        let words = self.bytes.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let sample = Sample {
            at_ns: self.at_ns.load(Ordering::Relaxed),
            reason: *DropReason::ALL.get((what & 0xff) as usize)?,
            packets: self.packets.load(Ordering::Relaxed),
            peer: (peer != 0)
                .then(|| SocketAddrV4::new(Ipv4Addr::from_bits((peer >> 16) as u32), peer as u16)),
            length_bytes,
            bytes: words.take(length_bytes).collect(),
        };
        fence(Ordering::Acquire);
        is_it(self.version.load(Ordering::Relaxed)).then_some(sample)
    }
}

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Samples").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 7), 8285);

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
        assert_eq!((found.len() as u64, next), (RING_SAMPLES, TURN_SAMPLES_MAX + 998));
        assert_eq!(found.last().map(|sample| sample.at_ns), Some(999), "the last is missing");
    }

    #[test]
    fn readers_see_whole_samples_only() {
        let samples = Samples::default();
        samples.read(0, u64::MAX);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for now_ns in 1..200_000_u64 {
                    let bytes = [now_ns as u8; SAMPLE_BYTES_MAX];
                    drop_at(&samples, now_ns, &bytes);
                }
            });
            let (mut first, mut seen) = (0, 0);
            while first < 199_999 {
                let (found, next) = samples.read(first, u64::MAX);
                for sample in &found {
                    assert!(sample.bytes.iter().all(|byte| *byte == sample.at_ns as u8), "torn");
                }
                (first, seen) = (next, seen + found.len());
            }
            assert!(seen > 0, "no sample was ever whole");
        });
    }
}
