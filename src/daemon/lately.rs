//! Which packets were dropped lately, and how often the interface lost its carrier. Counters say
//! how many were since the start, which may be weeks ago; so they are looked at from time to time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::failure::lock;
use crate::status::Lately;

/// Between two looks.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// What is older is not lately any more: a person who looks has caused or seen it within that.
const WINDOW: Duration = Duration::from_secs(600);

/// What was counted at those looks at which it had changed, oldest first; the first is at the
/// beginning of the window or before it.
#[derive(Debug, Default)]
struct Looks<T>(VecDeque<(Instant, T)>);

impl<T: PartialEq> Looks<T> {
    fn add(&mut self, counted: T, now: Instant) {
        if self.0.back().is_none_or(|(_, before)| counted != *before) {
            self.0.push_back((now, counted));
        }
        while self.0.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            self.0.pop_front();
        }
    }
}

/// Packets that were dropped, by reason.
type Drops = BTreeMap<String, u64>;

/// What was dropped until each look.
#[derive(Debug)]
pub(super) struct DropLooks(Mutex<Looks<Drops>>);

impl DropLooks {
    /// Nothing was dropped before `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(Looks(VecDeque::from([(now, Drops::new())]))))
    }

    /// So many were dropped since weftd began.
    pub(super) fn look(&self, dropped: Drops, now: Instant) {
        lock(&self.0).add(dropped, now);
    }

    /// How many of those that were `dropped` since weftd began were dropped lately.
    pub(super) fn lately(&self, dropped: &Drops, now: Instant) -> BTreeMap<String, Lately> {
        let looks = &lock(&self.0).0;
        let lately = dropped.iter().filter_map(|(reason, count)| {
            let (_, first) = looks.front()?;
            let packets = count - first.get(reason).unwrap_or(&0);
            // Since that look none was dropped; if there is none, the last was just now.
            let last = looks.iter().find(|(_, until)| until.get(reason) == Some(count));
            let seconds_ago = last.map_or(0, |(at, _)| now.duration_since(*at).as_secs());
            (packets > 0).then(|| (reason.clone(), Lately { packets, seconds_ago }))
        });
        lately.collect()
    }
}

/// How often an interface had lost its carrier until each look.
#[derive(Debug, Default)]
pub(super) struct CarrierLosses(Mutex<Looks<u32>>);

impl CarrierLosses {
    /// So many were counted now, since the interface was made.
    pub(super) fn look(&self, counted: u32, now: Instant) {
        let mut looks = lock(&self.0);
        // Another interface, or the same made again.
        if looks.0.back().is_some_and(|(_, before)| counted < *before) {
            looks.0.clear();
        }
        looks.add(counted, now);
    }

    /// How many there were lately.
    pub(super) fn lately(&self) -> u64 {
        let looks = &lock(&self.0).0;
        let ends = looks.front().zip(looks.back());
        ends.map_or(0, |((_, first), (_, last))| u64::from(last - first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_grew_lately_is_told_with_its_age() {
        let (start, mut total) = (Instant::now(), Drops::new());
        let looks = DropLooks::new(start);
        let look = |total: &Drops, seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            looks.look(total.clone(), now);
            let lately = looks.lately(total, now);
            let each = lately.into_iter().map(|(why, it)| (why, it.packets, it.seconds_ago));
            each.collect::<Vec<_>>()
        };
        let told = |reason: &str, packets, age| (reason.to_owned(), packets, age);
        assert_eq!(look(&total, 1), []);
        total.insert("no-route".to_owned(), 5);
        let five = looks.lately(&total, start + Duration::from_secs(2));
        assert_eq!(five["no-route"], Lately { packets: 5, seconds_ago: 0 }, "before the next look");
        assert_eq!(look(&total, 2), [told("no-route", 5, 0)], "at once");
        for seconds in (10..600).step_by(10) {
            assert_eq!(look(&total, seconds), [told("no-route", 5, seconds - 2)]);
        }
        total.extend([("no-route".to_owned(), 7), ("runt".to_owned(), 1)]);
        assert_eq!(look(&total, 601), [told("no-route", 7, 0), told("runt", 1, 0)]);
        // The first five are too old now; what came after them is not.
        assert_eq!(look(&total, 640), [told("no-route", 2, 39), told("runt", 1, 39)]);
        assert_eq!(look(&total, 1300), [], "weeks later nobody is sent to look");
        for seconds in (1302..4000).step_by(2) {
            total.insert("runt".to_owned(), seconds);
            look(&total, seconds);
        }
        assert!(looks.0.lock().unwrap().0.len() <= 301);
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
