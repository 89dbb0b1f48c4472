//! What a daemon logs about a fault: soon, clearly, and at a bounded rate.

use std::time::Duration;

use super::lab::Process;

/// Most lines that a daemon may log in any second of any fault: it limits each call site to ten in
/// windows of a second, and any other second overlaps two of them.
const LINES_PER_SECOND_MAX: usize = 2 * 10;

/// The log lines of a daemon since a moment.
#[derive(Debug)]
pub(crate) struct LogSince {
    lines_before: usize,
}

impl LogSince {
    /// Counts from now on.
    pub(crate) fn since(daemon: &Process) -> Self {
        Self { lines_before: daemon.output().lines().count() }
    }

    /// The lines since then.
    pub(crate) fn lines(&self, daemon: &Process) -> Vec<String> {
        daemon.output().lines().skip(self.lines_before).map(str::to_owned).collect()
    }

    /// Whether a line since then contains `word`.
    pub(crate) fn says(&self, daemon: &Process, word: &str) -> bool {
        self.lines(daemon).iter().any(|line| line.contains(word))
    }

    /// How many warnings and errors since then name `value`.
    pub(crate) fn warned(&self, daemon: &Process, value: &str) -> usize {
        let lines = self.lines(daemon);
        let warnings = lines.iter().filter(|line| line.starts_with(['W', 'E']));
        warnings.filter(|line| line.contains(value)).count()
    }

    /// Checks how much was written in any second, and that there was a warning, of which the first
    /// names `value`. Gives the most lines of a second.
    ///
    /// # Panics
    /// When the log is flooded, or does not name the fault.
    #[track_caller]
    pub(crate) fn assert_warned(&self, daemon: &Process, value: &str) -> usize {
        let lines = self.lines(daemon);
        let busiest = self.assert_pace(daemon);
        let first = lines.iter().find(|line| line.starts_with(['W', 'E']));
        let first = first.unwrap_or_else(|| panic!("no warning about the fault: {lines:?}"));
        assert!(first.contains(value), "the first line does not name {value:?}: {first}");
        busiest
    }

    /// Checks how much was written in any second, and gives the most.
    ///
    /// # Panics
    /// When the log is flooded.
    #[track_caller]
    pub(crate) fn assert_pace(&self, daemon: &Process) -> usize {
        let lines = self.lines(daemon);
        let busiest = busiest_second(&lines);
        assert!(
            busiest <= LINES_PER_SECOND_MAX,
            "the log has {busiest} lines in one second:\n{}",
            lines.join("\n")
        );
        busiest
    }

    /// Checks that there was no warning.
    ///
    /// # Panics
    /// When there is a warning.
    #[track_caller]
    pub(crate) fn assert_no_warning(&self, daemon: &Process) {
        let lines = self.lines(daemon);
        let warning = lines.iter().find(|line| line.starts_with(['W', 'E']));
        assert!(warning.is_none(), "an unexpected warning: {warning:?}");
        self.assert_pace(daemon);
    }
}

/// The most lines within one second, by their stamps.
fn busiest_second(lines: &[String]) -> usize {
    let stamps: Vec<Duration> = lines.iter().filter_map(|line| stamp(line)).collect();
    let within = |(first, start): (usize, &Duration)| {
        let end = *start + Duration::from_secs(1);
        stamps[first..].iter().take_while(|at| (*start..end).contains(at)).count()
    };
    stamps.iter().enumerate().map(within).max().unwrap_or(0)
}

/// The time of the day in klog's form, `W1121 11:30:01.234567 ...`.
fn stamp(line: &str) -> Option<Duration> {
    let mut parts = line.split_whitespace().nth(1)?.split([':', '.']);
    let mut next = || parts.next()?.parse::<u64>().ok();
    let (hours, minutes, seconds, microseconds) = (next()?, next()?, next()?, next()?);
    let seconds = (hours * 60 + minutes) * 60 + seconds;
    Some(Duration::from_secs(seconds) + Duration::from_micros(microseconds))
}
