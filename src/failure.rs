//! Formats an error with all its causes as one line, limits how often the same line is logged, and
//! locks what others may have panicked with. Handles no error, and writes no log itself.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// How long the same message is not repeated: the last minute of the log shows every failure that
/// lasts.
const REPEAT_AFTER: Duration = Duration::from_secs(60);

/// Whether this process has given up rights that it had at its start.
static HAS_GIVEN_UP_RIGHTS: AtomicBool = AtomicBool::new(false);

/// From now on an error may come of fewer rights.
pub(crate) fn rights_are_given_up() {
    HAS_GIVEN_UP_RIGHTS.store(true, Ordering::Relaxed);
}

/// What follows an error that may come of fewer rights (`rights/files.rs`).
pub(crate) fn rights_hint() -> &'static str {
    if HAS_GIVEN_UP_RIGHTS.load(Ordering::Relaxed) {
        " (if weftd could do this when it started, restart it)"
    } else {
        ""
    }
}

/// Locks what every change leaves whole, so that it goes on after a panic elsewhere.
pub(crate) fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `error` and its causes, outermost first.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    described(error.to_string(), error.source())
}

/// `text`, then the causes that it does not contain already.
pub(crate) fn described(mut text: String, cause: Option<&(dyn Error + 'static)>) -> String {
    let (mut next, mut is_refused) = (cause, false);
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        let cause_io = cause.downcast_ref().and_then(Errno::from_io_error);
        is_refused |= cause_io == Some(Errno::ACCESS);
        next = cause.source();
    }
    if is_refused {
        text.push_str(rights_hint());
    }
    text
}

/// The last message logged about one subject. A message is logged when it is new, and once a minute
/// while it repeats.
#[derive(Debug, Default)]
pub(crate) struct LogOnce(Option<(String, Instant)>);

impl LogOnce {
    /// Passes `text` to `log`, unless it was logged within the last minute.
    pub(crate) fn once(&mut self, text: &str, log: impl FnOnce(&str)) {
        if self.is_news(text, Instant::now()) {
            log(text);
        }
    }

    /// Whether to log `text` at `now`; if so, counts it as logged.
    fn is_news(&mut self, text: &str, now: Instant) -> bool {
        let is_known = self.0.as_ref().is_some_and(|(last, at)| {
            last == text && now.saturating_duration_since(*at) < REPEAT_AFTER
        });
        if !is_known {
            self.0 = Some((text.to_owned(), now));
        }
        !is_known
    }

    /// The failure is over: the next message is news. Returns whether one was logged before.
    pub(crate) fn forget(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Level {
        text: &'static str,
        source: io::Error,
    }

    #[test]
    fn each_cause_is_named_once() {
        let level = |text| Level { text, source: io::Error::other("no right") };
        let error = level("cannot open");
        assert_eq!(with_causes(&error), "cannot open: no right");
        let error = level("cannot open, no right");
        assert_eq!(with_causes(&error), error.text, "a cause is repeated");
        assert_eq!(described("failed".to_owned(), error.source()), "failed: no right");
    }

    /// The one test that sets what holds for the whole process.
    #[test]
    fn what_fewer_rights_may_be_the_cause_of_says_so() {
        let refused = Level { text: "cannot write", source: Errno::ACCESS.into() };
        let plain = "cannot write: Permission denied (os error 13)";
        assert_eq!(with_causes(&refused), plain, "nothing is given up yet");
        rights_are_given_up();
        let text = with_causes(&refused);
        assert!(text.starts_with(plain) && text.contains("restart"), "{text}");
        let other = Level { text: "cannot write", source: Errno::NOSPC.into() };
        assert!(!with_causes(&other).contains("restart"), "a full disk has nothing to do with it");
    }

    #[test]
    fn a_lasting_failure_is_logged_once_a_minute() {
        let (mut log, start) = (LogOnce::default(), Instant::now());
        let seconds = (0..180).filter(|second| {
            log.is_news("no route to the store", start + Duration::from_secs(*second))
        });
        assert_eq!(seconds.collect::<Vec<_>>(), [0, 60, 120], "seconds at which it was logged");
    }

    #[test]
    fn a_new_or_returning_failure_is_logged() {
        let (mut log, now) = (LogOnce::default(), Instant::now());
        for (text, is_news) in [("a", true), ("a", false), ("b", true), ("a", true)] {
            assert_eq!(log.is_news(text, now), is_news, "{text:?} after what came before");
        }
        assert!(log.forget());
        assert!(!log.forget(), "an end is reported twice");
        assert!(log.is_news("a", now), "a failure that came back is hidden");
    }
}
