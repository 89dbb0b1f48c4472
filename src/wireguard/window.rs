//! Which counters of a session have been received, so that each is let in once (RFC 6479). Several
//! workers may ask at the same time, and none waits for another.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that one word tells of.
const WORD_COUNTERS: u64 = 32;

/// Words: 8,192 counters, as the kernel has (`COUNTER_BITS_TOTAL` in its
/// drivers/net/wireguard/messages.h).
const WORDS: usize = 256;

/// Counters from here on are refused. The number of a round has 32 bits: in the 180 seconds of a
/// session nobody sends 2^45 packets.
pub(super) const COUNTERS_MAX: u64 = (WORDS as u64 * WORD_COUNTERS) << 32;

/// The counters received so far. Word `counter / 32 % 256` holds the round of its counters, how
/// often the words have been gone through before them, in its upper half, and a bit for each
/// counter that was received in its lower half. So the past is forgotten by what overwrites it,
/// and what is still there is never let in twice.
#[derive(Debug)]
pub(super) struct ReplayWindow(Box<[AtomicU64]>);

impl ReplayWindow {
    pub(super) fn new() -> Self {
        Self((0..WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Whether `counter` may be let in, as far as is known without its authenticity.
    #[inline]
    pub(super) fn may_admit(&self, counter: u64) -> bool {
        let word = self.word(counter);
        word.is_some_and(|word| with(word.load(Ordering::Relaxed), counter).is_some())
    }

    /// Lets `counter` in, whose datagram is authentic, if it never was.
    #[inline]
    pub(super) fn admit(&self, counter: u64) -> bool {
        let Some(word) = self.word(counter) else { return false };
        word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| with(now, counter)).is_ok()
    }

    #[inline]
    fn word(&self, counter: u64) -> Option<&AtomicU64> {
        let index = (counter / WORD_COUNTERS) as usize % WORDS;
        self.0.get(index).filter(|_| counter < COUNTERS_MAX)
    }
}

/// The word `now` with `counter` in it, if that is neither there nor older than what is.
#[inline]
fn with(now: u64, counter: u64) -> Option<u64> {
    let round = counter / (WORD_COUNTERS * WORDS as u64);
    let bit = 1 << (counter % WORD_COUNTERS);
    match (now >> 32).cmp(&round) {
        Greater => None,
        Equal if now & bit != 0 => None,
        Equal => Some(now | bit),
        Less => Some(round << 32 | bit),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The counters that a window as long must let in or refuse, of which it keeps all.
    #[derive(Default)]
    struct Slow {
        seen: BTreeSet<u64>,
    }

    impl Slow {
        /// `None` where either is right: so old that it may be forgotten.
        fn admit(&mut self, counter: u64) -> Option<bool> {
            let newest = self.seen.last().copied().unwrap_or(0);
            if self.seen.contains(&counter) {
                return Some(false);
            }
            if counter + (WORDS as u64 - 1) * WORD_COUNTERS < newest {
                return None;
            }
            self.seen.insert(counter);
            Some(true)
        }
    }

    proptest! {
        #[test]
        fn each_counter_is_let_in_once(
            steps in prop::collection::vec((0u64..20_000, 0u64..3), 1..400),
            base in prop::sample::select(vec![0, 1 << 20, COUNTERS_MAX - 70_000]),
        ) {
            let (window, mut slow, mut admitted) =
                (ReplayWindow::new(), Slow::default(), BTreeSet::new());
            for (offset, round) in steps {
                let counter = base + offset + round * 8_192;
                let foreseen = window.may_admit(counter);
                let is_admitted = window.admit(counter);
                prop_assert_eq!(foreseen, is_admitted);
                prop_assert!(!is_admitted || admitted.insert(counter), "{} came twice", counter);
                if let Some(expected) = slow.admit(counter) {
                    prop_assert_eq!(is_admitted, expected, "counter {}", counter);
                }
            }
        }
    }

    #[test]
    fn the_limit_is_refused() {
        let window = ReplayWindow::new();
        assert!(window.admit(COUNTERS_MAX - 1), "the last one");
        assert!(!window.admit(COUNTERS_MAX) && !window.may_admit(u64::MAX));
    }

    #[test]
    fn several_workers_never_let_the_same_in() {
        let window = ReplayWindow::new();
        let admitted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for counter in 0..4_000 {
                        admitted.fetch_add(window.admit(counter).into(), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 4_000);
    }
}
