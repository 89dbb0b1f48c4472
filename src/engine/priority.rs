//! How soon a worker gets a processor that others keep busy: in real time as long as it sleeps most
//! of the time, and like any other thread as soon as it doesn't, so that a flood of packets takes
//! no more from the host than a flood of anything else.

use std::io;

use crate::sys::schedule::{Class, class, set_class};
use crate::words::words;

/// Of real time a worker may use a quarter, which a few hundred megabits take.
const SHARE_DIVISOR: u64 = 4;

/// And so much in one go: twice what the longest batch takes on a slow processor, and a tick of the
/// slowest kernels' scheduler.
const BURST_NS: u64 = 10_000_000;

/// Between two looks at how long it ran: a batch lasts a tenth of it, and a look is a system call.
const LOOK_NS: u64 = 1_000_000;

/// Asked of the scheduler where real time can't be had: the shortest that it grants (kernel/sched,
/// since 6.12). Who wants to run briefly runs soon.
const SLICE_NS: u64 = 100_000;

words! {
    /// How a worker gets a processor.
    Priority {
        /// Before every ordinary thread, while it does not use much.
        RealTime = "real-time",
        /// Before others who have had as much, because it runs briefly.
        ShortSlice = "short-slice",
        /// Like any other thread.
        Ordinary = "ordinary",
    }
}

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
    set_class(shortest(nice())).ok();
    let has_slice = matches!(class(), Ok(Class::Ordinary { slice_ns: SLICE_NS, .. }));
    (if has_slice { Priority::ShortSlice } else { Priority::Ordinary }, refused)
}

/// Of the calling thread; real-time threads keep theirs.
fn nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or_default()
}

fn shortest(nice: i32) -> Class {
    Class::Ordinary { nice, slice_ns: SLICE_NS }
}

/// How much of its real time a worker has left.
#[derive(Debug)]
pub(super) struct Budget {
    nice: i32,
    is_real_time: bool,
    left_ns: u64,
    /// When that was, and how long the thread had run.
    at_ns: u64,
    ran_ns: u64,
}

impl Budget {
    /// Of the calling thread, if it has any.
    pub(super) fn new(priority: Priority) -> Option<Self> {
        (priority == Priority::RealTime).then(|| Self {
            nice: nice(),
            is_real_time: true,
            left_ns: BURST_NS,
            at_ns: 0,
            ran_ns: 0,
        })
    }

    /// Whether it is time to tell how long the thread has run.
    pub(super) fn is_look_due(&self, now_ns: u64) -> bool {
        now_ns >= self.at_ns + LOOK_NS
    }

    /// The thread has run for `ran_ns` until now. Says if it is to change between real time and
    /// what others have.
    fn changes(&mut self, now_ns: u64, ran_ns: u64) -> bool {
        let earned_ns = now_ns.saturating_sub(self.at_ns) / SHARE_DIVISOR;
        let used_ns = ran_ns.saturating_sub(self.ran_ns);
        self.left_ns = (self.left_ns + earned_ns).saturating_sub(used_ns).min(BURST_NS);
        (self.at_ns, self.ran_ns) = (now_ns, ran_ns);
        let is_due = if self.is_real_time { self.left_ns == 0 } else { self.left_ns == BURST_NS };
        self.is_real_time ^= is_due;
        is_due
    }

    /// The same, carried out for the calling thread. False if it was refused: then there is no
    /// real time any more.
    pub(super) fn look(&mut self, now_ns: u64, ran_ns: u64) -> bool {
        if !self.changes(now_ns, ran_ns) {
            return true;
        }
        let wanted = if self.is_real_time { Class::RealTime } else { shortest(self.nice) };
        set_class(wanted).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The share of real time in two seconds of a worker that runs so much of each ten ms.
    fn real_time_percent(ran_of_ten_ms: f64) -> u64 {
        let mut budget =
            Budget { nice: 0, is_real_time: true, left_ns: BURST_NS, at_ns: 0, ran_ns: 0 };
        let mut real_time = 0;
        for ms in 1..=2000 {
            let ran_ns = (ms as f64 / 10.0 * ran_of_ten_ms * MS as f64) as u64;
            assert!(budget.is_look_due(ms * MS));
            budget.changes(ms * MS, ran_ns);
            real_time += u64::from(budget.is_real_time);
        }
        real_time / 20
    }

    #[test]
    fn who_sleeps_most_of_the_time_keeps_real_time() {
        assert_eq!(real_time_percent(0.0), 100);
        assert_eq!(real_time_percent(2.4), 100);
    }

    #[test]
    fn a_flood_takes_little_of_it() {
        assert!(real_time_percent(10.0) <= 1, "others of the host starve");
        let half = real_time_percent(5.0);
        assert!(half <= 2, "{half} %");
    }

    #[test]
    fn who_was_busy_gets_it_back() {
        let mut budget = Budget { nice: 0, is_real_time: true, left_ns: 0, at_ns: 0, ran_ns: 0 };
        assert!(budget.changes(MS, MS) && !budget.is_real_time);
        assert!(!budget.changes(20 * MS, MS), "so soon after a flood");
        assert!(budget.changes(50 * MS, MS) && budget.is_real_time, "pings wait for ever");
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
                Priority::ShortSlice => assert_eq!(now, shortest(nice())),
                Priority::Ordinary => assert!(matches!(now, Class::Ordinary { .. })),
            }
        })
        .join()
        .unwrap();
    }
}
