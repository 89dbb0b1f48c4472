//! A ring of records with one writer and any number of readers: nobody waits, and a reader gets a
//! record whole or not at all. A record is words.
//!
//! The atomics come from the parent module, so that `tests/pure/ring_model.rs` can give loom's,
//! and try every order of loads and stores that the memory model allows.

use super::atomic::{AtomicU64, Ordering, fence};

/// The last `RECORDS` records of `WORDS` words each.
///
/// INVARIANT: `push` is called by one thread only.
pub(super) struct RecordRing<const RECORDS: usize, const WORDS: usize> {
    slots: Box<[Slot<WORDS>]>,
    /// Records written so far, for the readers.
    written: AtomicU64,
    /// The same for the writer. loom would not try all orders if it read what it writes for others.
    own_written: AtomicU64,
}

struct Slot<const WORDS: usize> {
    /// Odd while it is written; twice the number of its record, counted from 1, once that is whole.
    version: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl<const RECORDS: usize, const WORDS: usize> Default for RecordRing<RECORDS, WORDS> {
    fn default() -> Self {
        let slot = |_| Slot {
            version: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        let slots = (0..RECORDS).map(slot).collect();
        Self { slots, written: AtomicU64::new(0), own_written: AtomicU64::new(0) }
    }
}

impl<const RECORDS: usize, const WORDS: usize> RecordRing<RECORDS, WORDS> {
    /// Writes a record over the oldest. Words beyond those given keep what they had.
    pub(super) fn push(&self, words: impl Iterator<Item = u64>) {
        let number = self.own_written.load(Ordering::Relaxed);
        self.own_written.store(number + 1, Ordering::Relaxed);
        let slot = self.slot(number);
        slot.version.store(2 * number + 1, Ordering::Relaxed);
        // Who reads one of the words below sees the odd version, too.
        fence(Ordering::Release);
        for (place, word) in slot.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        slot.version.store(2 * (number + 1), Ordering::Release);
        self.written.store(number + 1, Ordering::Release);
    }

    /// The records from number `first` on that are still there, and the number of the next one.
    pub(super) fn read(&self, first: u64) -> (Vec<[u64; WORDS]>, u64) {
        let next = self.written.load(Ordering::Acquire);
        let first = first.max(next.saturating_sub(RECORDS as u64));
        ((first..next).filter_map(|number| self.slot(number).read(number)).collect(), next)
    }

    fn slot(&self, number: u64) -> &Slot<WORDS> {
        &self.slots[(number % RECORDS as u64) as usize]
    }
}

impl<const WORDS: usize> Slot<WORDS> {
    /// Record `number`, if it is still there.
    fn read(&self, number: u64) -> Option<[u64; WORDS]> {
        let is_it = |version: u64| version == 2 * (number + 1);
        if !is_it(self.version.load(Ordering::Acquire)) {
            return None;
        }
        let words = std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed));
        // A word of a later record was read: then the version read here is a later one as well.
        fence(Ordering::Acquire);
        is_it(self.version.load(Ordering::Relaxed)).then_some(words)
    }
}
