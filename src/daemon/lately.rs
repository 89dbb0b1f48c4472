//! Which packets were dropped lately, and how often the interface lost its carrier. Counters say
//! how many were since the start, which may be weeks ago; so they are looked at from time to time.

use std::array;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::stats::{DROP_REASONS, DropReason, WorkerStats};
use crate::status::Lately;

/// Between two looks.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// Between two of which the counts are kept.
const PERIOD: Duration = Duration::from_secs(10);

/// What is older is not lately any more: a person who looks has caused or seen it within that.
const WINDOW: Duration = Duration::from_secs(600);

/// Dropped packets by reason, as of some moment.
type Totals = [u64; DROP_REASONS];

/// What was seen at earlier looks.
#[derive(Debug)]
pub(super) struct Looks(Mutex<Seen>);

#[derive(Debug)]
struct Seen {
    /// A period apart, oldest first; the first is at the beginning of the window or before it.
    looks: VecDeque<(Instant, Totals)>,
    last: Totals,
    /// When each last grew.
    grew: [Option<Instant>; DROP_REASONS],
}

impl Looks {
    /// Nothing was dropped before `now`.
    pub(super) fn new(now: Instant) -> Self {
        let none = [0; DROP_REASONS];
        let looks = VecDeque::from([(now, none)]);
        Self(Mutex::new(Seen { looks, last: none, grew: [None; DROP_REASONS] }))
    }

    /// Looks at the sum of the workers' counters; returns what was dropped lately, by reason.
    pub(super) fn look(&self, total: &WorkerStats, now: Instant) -> BTreeMap<String, Lately> {
        let count = |reason| total.egress.drops(reason) + total.ingress.drops(reason);
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.look(array::from_fn(|at| count(DropReason::ALL[at])), now)
    }
}

impl Seen {
    fn look(&mut self, now_dropped: Totals, now: Instant) -> BTreeMap<String, Lately> {
        let before = std::mem::replace(&mut self.last, now_dropped);
        for (grew, (before, after)) in self.grew.iter_mut().zip(before.iter().zip(now_dropped)) {
            if after > *before {
                *grew = Some(now);
            }
        }
        if self.looks.back().is_none_or(|(last, _)| now.duration_since(*last) >= PERIOD) {
            self.looks.push_back((now, now_dropped));
        }
        while self.looks.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            self.looks.pop_front();
        }
        let first = self.looks.front().map_or([0; DROP_REASONS], |(_, dropped)| *dropped);
        let lately = DropReason::ALL.iter().enumerate().filter_map(|(at, reason)| {
            let age = now.duration_since(self.grew[at]?);
            let packets = now_dropped[at] - first[at];
            let lately = Lately { packets, seconds_ago: age.as_secs() };
            (age < WINDOW && packets > 0).then(|| (reason.id().to_owned(), lately))
        });
        lately.collect()
    }
}

/// How often an interface had lost its carrier, as of some looks of the window.
#[derive(Debug, Default)]
pub(super) struct CarrierLosses(Mutex<VecDeque<(Instant, u32)>>);

impl CarrierLosses {
    /// So many were counted now, since the interface was made.
    pub(super) fn look(&self, counted: u32, now: Instant) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Another interface, or the same made again.
        if looks.back().is_some_and(|(_, before)| counted < *before) {
            looks.clear();
        }
        if looks.back().is_none_or(|(_, before)| counted > *before) {
            looks.push_back((now, counted));
        }
        while looks.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            looks.pop_front();
        }
    }

    /// How many there were lately.
    pub(super) fn lately(&self) -> u64 {
        let looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = looks.front().zip(looks.back());
        ends.map_or(0, |((_, first), (_, last))| u64::from(last - first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_grew_lately_is_told_with_its_age() {
        let (total, start) = (WorkerStats::default(), Instant::now());
        let looks = Looks::new(start);
        let look = |seconds: u64| {
            let lately = looks.look(&total, start + Duration::from_secs(seconds));
            let each = lately.into_iter().map(|(why, it)| (why, it.packets, it.seconds_ago));
            each.collect::<Vec<_>>()
        };
        let told = |reason: DropReason, packets, age| (reason.id().to_owned(), packets, age);
        assert_eq!(look(1), []);
        total.egress.drop(DropReason::NoRoute, 5);
        assert_eq!(look(2), [told(DropReason::NoRoute, 5, 0)], "at once");
        for seconds in (10..600).step_by(10) {
            assert_eq!(look(seconds), [told(DropReason::NoRoute, 5, seconds - 2)]);
        }
        total.ingress.drop(DropReason::NoRoute, 2);
        total.ingress.drop(DropReason::Runt, 1);
        let [no_route, runt] = [DropReason::NoRoute, DropReason::Runt];
        assert_eq!(look(605), [told(no_route, 7, 0), told(runt, 1, 0)]);
        // The first five are too old now; what came after them is not.
        assert_eq!(look(640), [told(no_route, 2, 35), told(runt, 1, 35)]);
        assert_eq!(look(1300), [], "weeks later nobody is sent to look");
        assert!(looks.0.lock().unwrap().looks.len() <= 61);
    }

    #[test]
    fn a_carrier_that_was_lost_long_ago_is_forgotten() {
        let (losses, start) = (CarrierLosses::default(), Instant::now());
        let look = |seconds: u64, counted| {
            losses.look(counted, start + Duration::from_secs(seconds));
            losses.lately()
        };
        assert_eq!((losses.lately(), look(0, 7)), (0, 0), "those before weftd started");
        assert_eq!((look(10, 9), look(20, 13)), (2, 6));
        assert_eq!(look(500, 13), 6);
        assert_eq!((look(615, 13), look(700, 14)), (4, 1));
        assert_eq!((look(710, 2), look(720, 3)), (0, 1), "another interface");
    }
}
