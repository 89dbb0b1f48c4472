//! The limit on lines of one place in the program: no fault may flood the log. Pure: the time is
//! passed in.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::daemon::log::line::Place;

/// Lines of one place in one window. With the summary line that makes ten a second.
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

/// Counts lines by their place. Its size is bounded by the number of log calls in the program.
#[derive(Debug, Default)]
pub(super) struct RepeatLimiter(HashMap<Place, Lines>);

#[derive(Debug)]
struct Lines {
    window_start: Instant,
    written: u32,
    suppressed: u64,
}

impl RepeatLimiter {
    /// Decides about one line.
    pub(super) fn admit(&mut self, place: Place, now: Instant) -> Admission {
        let fresh = || Lines { window_start: now, written: 0, suppressed: 0 };
        let lines = self.0.entry(place).or_insert_with(fresh);
        if now.saturating_duration_since(lines.window_start) >= WINDOW {
            (lines.window_start, lines.written) = (now, 0);
        }
        if lines.written < LINES_PER_WINDOW {
            lines.written += 1;
            return Admission::Write;
        }
        lines.suppressed += 1;
        Admission::Suppress { first: lines.suppressed == 1 }
    }

    /// The numbers of suppressed lines whose window is over, or all of them, and forgets these.
    pub(super) fn take_owed(&mut self, now: Instant, all: bool) -> Vec<(Place, u64)> {
        let is_over = |lines: &Lines| now.saturating_duration_since(lines.window_start) >= WINDOW;
        let owed = self.0.iter_mut().filter(|(_, lines)| {
            // A window that began anew while a summary was owed has taken some lines already.
            lines.suppressed > 0 && (all || is_over(lines) || lines.written < LINES_PER_WINDOW)
        });
        owed.map(|(place, lines)| (*place, std::mem::take(&mut lines.suppressed))).collect()
    }

    /// Whether summaries are owed.
    pub(super) fn owes(&self) -> bool {
        self.0.values().any(|lines| lines.suppressed > 0)
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    fn place(line: u32) -> Place {
        Place { level: Level::INFO, file: "x.rs", line }
    }

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
            if limiter.admit(place(1), now) == Admission::Write {
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
            assert_eq!(limiter.admit(place(1), now), Admission::Write);
        }
        assert_eq!(limiter.admit(place(1), now), Admission::Suppress { first: true });
        assert_eq!(limiter.admit(place(1), now), Admission::Suppress { first: false });
        assert_eq!(limiter.admit(place(2), now), Admission::Write);
    }

    #[test]
    fn summary_waits_for_end_of_window() {
        let start = Instant::now();
        let mut limiter = RepeatLimiter::default();
        for _ in 0..LINES_PER_WINDOW + 5 {
            limiter.admit(place(1), start);
        }
        assert!(limiter.owes());
        assert_eq!(limiter.take_owed(start + WINDOW / 2, false), []);
        assert_eq!(limiter.take_owed(start + WINDOW, false), [(place(1), 5)]);
        assert!(!limiter.owes());
        assert_eq!(limiter.take_owed(start + WINDOW, true), []);
    }

    #[test]
    fn a_quiet_site_is_never_limited() {
        let start = Instant::now();
        let mut limiter = RepeatLimiter::default();
        for line in 0..1000 {
            let now = start + line * WINDOW / LINES_PER_WINDOW;
            assert_eq!(limiter.admit(place(1), now), Admission::Write);
        }
    }
}
