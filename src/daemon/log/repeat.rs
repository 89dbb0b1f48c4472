//! The limit on lines of one call site: no fault may flood the log. Pure: the
//! time is passed in.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Lines of one call site in one window. With the summary line that makes ten a second.
pub(super) const LINES_PER_WINDOW: u32 = 9;

/// The window.
pub(super) const WINDOW: Duration = Duration::from_secs(1);

/// What happens to a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// It is written.
    Write,
    /// It is not. `first` if a summary was not owed before: somebody has to call
    /// [`RepeatLimiter::take_owed`] when the window is over.
    Suppress { first: bool },
}

/// Counts lines per call site. Its size is bounded by the number of log calls in the program.
#[derive(Debug)]
pub(super) struct RepeatLimiter<K> {
    sites: HashMap<K, Site>,
}

#[derive(Debug)]
struct Site {
    window_start: Instant,
    lines: u32,
    suppressed: u64,
}

impl<K> Default for RepeatLimiter<K> {
    fn default() -> Self {
        Self { sites: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash> RepeatLimiter<K> {
    /// Decides about one line of `key`.
    pub(super) fn admit(&mut self, key: K, now: Instant) -> Admission {
        let fresh = || Site { window_start: now, lines: 0, suppressed: 0 };
        let site = self.sites.entry(key).or_insert_with(fresh);
        if now.saturating_duration_since(site.window_start) >= WINDOW {
            site.window_start = now;
            site.lines = 0;
        }
        if site.lines < LINES_PER_WINDOW {
            site.lines += 1;
            return Admission::Write;
        }
        site.suppressed += 1;
        Admission::Suppress { first: site.suppressed == 1 }
    }

    /// The numbers of suppressed lines whose window is over, or all of them, and forgets these.
    pub(super) fn take_owed(&mut self, now: Instant, all: bool) -> Vec<(K, u64)> {
        let is_over = |site: &Site| now.saturating_duration_since(site.window_start) >= WINDOW;
        let owed = self.sites.iter_mut().filter(|(_, site)| {
            // A window that began anew while a summary was owed has taken some lines already.
            site.suppressed > 0 && (all || is_over(site) || site.lines < LINES_PER_WINDOW)
        });
        owed.map(|(key, site)| (*key, std::mem::take(&mut site.suppressed))).collect()
    }

    /// Whether summaries are owed.
    pub(super) fn owes(&self) -> bool {
        self.sites.values().any(|site| site.suppressed > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nine_lines_and_a_summary_in_each_second() {
        let start = Instant::now();
        let mut limiter = RepeatLimiter::default();
        let mut lines = Vec::new();
        let mut suppressed = 0;
        for millisecond in 0..10_000 {
            let now = start + Duration::from_millis(millisecond);
            for (_, count) in limiter.take_owed(now, false) {
                suppressed += count;
                lines.push(millisecond / 1000);
            }
            if limiter.admit("site", now) == Admission::Write {
                lines.push(millisecond / 1000);
            }
        }
        for second in 0..10 {
            let count = lines.iter().filter(|at| **at == second).count();
            assert!((9..=10).contains(&count), "{count} lines in second {second}");
        }
        let last: u64 = limiter.take_owed(start, true).iter().map(|(_, count)| count).sum();
        assert_eq!(suppressed + last, 10_000 - 10 * 9, "not every line is accounted for");
        assert!(!limiter.owes());
    }

    #[test]
    fn sites_do_not_share_a_limit() {
        let now = Instant::now();
        let mut limiter = RepeatLimiter::default();
        for _ in 0..LINES_PER_WINDOW {
            assert_eq!(limiter.admit(1, now), Admission::Write);
        }
        assert_eq!(limiter.admit(1, now), Admission::Suppress { first: true });
        assert_eq!(limiter.admit(1, now), Admission::Suppress { first: false });
        assert_eq!(limiter.admit(2, now), Admission::Write);
    }

    #[test]
    fn summary_waits_for_end_of_window() {
        let start = Instant::now();
        let mut limiter = RepeatLimiter::default();
        for _ in 0..LINES_PER_WINDOW + 5 {
            limiter.admit(1, start);
        }
        assert!(limiter.owes());
        assert_eq!(limiter.take_owed(start + WINDOW / 2, false), []);
        assert_eq!(limiter.take_owed(start + WINDOW, false), [(1, 5)]);
        assert!(!limiter.owes());
        assert_eq!(limiter.take_owed(start + WINDOW, true), []);
    }

    #[test]
    fn a_quiet_site_is_never_limited() {
        let start = Instant::now();
        let mut limiter = RepeatLimiter::default();
        for line in 0..1000 {
            let now = start + line * WINDOW / LINES_PER_WINDOW;
            assert_eq!(limiter.admit(1, now), Admission::Write);
        }
    }
}
