//! How a failure is told: in one line with all its causes, and not twice in a minute. Decides
//! nothing about it, and writes no log.

use std::error::Error;
use std::time::{Duration, Instant};

/// For how long what was said need not be said again. An operator who looks at the last minute of
/// the log sees every failure that lasts.
const REPEAT_AFTER: Duration = Duration::from_secs(60);

/// `error` and its causes, outermost first.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    described(error.to_string(), error.source())
}

/// `text`, then the causes that it does not contain already.
pub(crate) fn described(mut text: String, cause: Option<&(dyn Error + 'static)>) -> String {
    let mut next = cause;
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

/// What was last said of one subject: a thing is said when it is new, and once a minute while it
/// lasts.
#[derive(Debug, Default)]
pub(crate) struct Told(Option<(String, Instant)>);

impl Told {
    /// Has `text` said, unless it is what was said within the last minute.
    pub(crate) fn once(&mut self, text: &str, say: impl FnOnce(&str)) {
        if self.is_news(text, Instant::now()) {
            say(text);
        }
    }

    /// Whether `text` is to be said at `now`; it counts as said then.
    fn is_news(&mut self, text: &str, now: Instant) -> bool {
        let is_known = self.0.as_ref().is_some_and(|(last, at)| {
            last == text && now.saturating_duration_since(*at) < REPEAT_AFTER
        });
        if !is_known {
            self.0 = Some((text.to_owned(), now));
        }
        !is_known
    }

    /// Makes whatever comes next news. Gives whether anything was said since the last time.
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
    fn every_level_is_named_once() {
        let level = |text| Level { text, source: io::Error::other("no right to") };
        let error = level("cannot open the lock");
        assert_eq!(with_causes(&error), "cannot open the lock: no right to");
        let error = level("cannot open the lock, for there is no right to");
        assert_eq!(with_causes(&error), error.text, "a cause is told twice");
        assert_eq!(described("it failed".to_owned(), error.source()), "it failed: no right to");
    }

    #[test]
    fn a_failure_that_lasts_is_said_once_a_minute() {
        let (mut told, start) = (Told::default(), Instant::now());
        let seconds = (0..180).filter(|second| {
            told.is_news("no route to the store", start + Duration::from_secs(*second))
        });
        assert_eq!(seconds.collect::<Vec<_>>(), [0, 60, 120], "seconds at which it is in the log");
    }

    #[test]
    fn another_failure_is_news_and_so_is_one_that_comes_back() {
        let (mut told, now) = (Told::default(), Instant::now());
        for (text, is_news) in [("a", true), ("a", false), ("b", true), ("a", true)] {
            assert_eq!(told.is_news(text, now), is_news, "{text:?} after what came before");
        }
        assert!(told.forget());
        assert!(!told.forget(), "an end is told twice");
        assert!(told.is_news("a", now), "a failure that came back is hidden");
    }
}
