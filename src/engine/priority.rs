//! How soon a worker gets a processor that others keep busy: before them as long as it sleeps most
//! of the time, and like any other thread as soon as it doesn't, so that a flood of packets takes
//! no more from the host than a flood of anything else.

use std::io;

use crate::rights::Priority;
use crate::sys::schedule::{Class, class, set_class};

/// Before others a worker may run for an eighth of the time: what thousands of packets a second
/// take. Beside a flood a busy program keeps what a tunnel of the kernel leaves it.
const SHARE_DIVISOR: u64 = 8;

/// And so much in one go: twice what the longest batch takes on a slow processor, and a tick of the
/// slowest kernels' scheduler.
const BURST_NS: u64 = 10_000_000;

/// Between two looks at how long it ran: a batch lasts a tenth of it, and a look is a system call.
const LOOK_NS: u64 = 1_000_000;

/// Asked of the scheduler where real time can't be had: the shortest that it grants (kernel/sched,
/// since 6.12). Who wants to run briefly runs soon.
const SLICE_NS: u64 = 100_000;

/// The best that the calling thread can have, if it is to come `first`; and why it is not real time
/// then.
pub(super) fn settle(first: bool) -> (Priority, Option<io::Error>) {
    if !first {
        return (Priority::Ordinary, None);
    }
    let refused = set_class(Class::RealTime).err();
    if refused.is_none() {
        return (Priority::RealTime, None);
    }
    set_class(Class::Ordinary { nice: nice(), slice_ns: SLICE_NS }).ok();
    let has_slice = matches!(class(), Ok(Class::Ordinary { slice_ns: SLICE_NS, .. }));
    (if has_slice { Priority::ShortSlice } else { Priority::Ordinary }, refused)
}

/// Of the calling thread; real-time threads keep theirs.
fn nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or_default()
}

/// For how long a worker may run before others.
#[derive(Debug)]
pub(super) struct Budget {
    /// As it is then, and otherwise.
    first: Class,
    ordinary: Class,
    is_first: bool,
    left_ns: u64,
    /// When that was, and how long the thread had run.
    at_ns: u64,
    ran_ns: u64,
}

impl Budget {
    /// Of the calling thread, if it has any.
    pub(super) fn new(priority: Priority) -> Option<Self> {
        let nice = nice();
        let first = match priority {
            Priority::RealTime => Class::RealTime,
            Priority::ShortSlice => Class::Ordinary { nice, slice_ns: SLICE_NS },
            Priority::Ordinary => return None,
        };
        let ordinary = Class::Ordinary { nice, slice_ns: 0 };
        Some(Self { first, ordinary, is_first: true, left_ns: BURST_NS, at_ns: 0, ran_ns: 0 })
    }

    /// Whether it is time to tell how long the thread has run.
    pub(super) fn is_look_due(&self, now_ns: u64) -> bool {
        now_ns >= self.at_ns + LOOK_NS
    }

    /// The thread has run for `ran_ns` until now. Says if its class is to change.
    fn changes(&mut self, now_ns: u64, ran_ns: u64) -> bool {
        let earned_ns = now_ns.saturating_sub(self.at_ns) / SHARE_DIVISOR;
        let used_ns = ran_ns.saturating_sub(self.ran_ns);
        self.left_ns = (self.left_ns + earned_ns).saturating_sub(used_ns).min(BURST_NS);
        (self.at_ns, self.ran_ns) = (now_ns, ran_ns);
        let is_due = if self.is_first { self.left_ns == 0 } else { self.left_ns == BURST_NS };
        self.is_first ^= is_due;
        is_due
    }

    /// The same, carried out for the calling thread. False if it was refused: then it stays what
    /// it is.
    pub(super) fn look(&mut self, now_ns: u64, ran_ns: u64) -> bool {
        if !self.changes(now_ns, ran_ns) {
            return true;
        }
        set_class(if self.is_first { self.first } else { self.ordinary }).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The share of two seconds in which a worker is first that runs so much of each ten ms.
    fn first_percent(ran_of_ten_ms: f64) -> u64 {
        let mut budget = Budget::new(Priority::RealTime).unwrap();
        let mut first = 0;
        for ms in 1..=2000 {
            let ran_ns = (ms as f64 / 10.0 * ran_of_ten_ms * MS as f64) as u64;
            assert!(budget.is_look_due(ms * MS));
            budget.changes(ms * MS, ran_ns);
            first += u64::from(budget.is_first);
        }
        first / 20
    }

    #[test]
    fn who_sleeps_most_of_the_time_stays_first() {
        assert_eq!(first_percent(0.0), 100);
        assert_eq!(first_percent(1.2), 100);
    }

    #[test]
    fn a_flood_takes_little_of_it() {
        assert!(first_percent(10.0) <= 1, "others of the host starve");
        let half = first_percent(5.0);
        assert!(half <= 2, "{half} %");
    }

    #[test]
    fn who_was_busy_gets_it_back() {
        let mut budget = Budget::new(Priority::ShortSlice).unwrap();
        assert!(budget.changes(20 * MS, 20 * MS) && !budget.is_first);
        assert!(!budget.changes(60 * MS, 20 * MS), "so soon after a flood");
        assert!(budget.changes(110 * MS, 20 * MS) && budget.is_first, "pings wait for ever");
    }

    #[test]
    fn an_unprivileged_worker_asks_for_a_short_slice() {
        std::thread::spawn(|| {
            let (priority, refused) = settle(false);
            assert!(priority == Priority::Ordinary && refused.is_none());
            let (priority, refused) = settle(true);
            assert_eq!(priority == Priority::RealTime, refused.is_none());
            let now = class().unwrap();
            match priority {
                Priority::RealTime => assert_eq!(now, Class::RealTime),
                Priority::ShortSlice => {
                    assert!(matches!(now, Class::Ordinary { slice_ns: SLICE_NS, .. }));
                }
                Priority::Ordinary => assert!(matches!(now, Class::Ordinary { .. })),
            }
        })
        .join()
        .unwrap();
    }
}
