//! Backoff of rebuilding the data plane: none if the last rebuild lasted, else longer and longer.
//! Pure arithmetic over the caller's clock.

use std::time::{Duration, Instant};

/// Pauses between repairs: the first well within the second in which a repair is promised, the
/// last so that a host without TUN, or one that deletes the device on sight, costs nothing.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A plane that lived this long was repaired well, and its next end is a new event. As long as the
/// longest pause, so that one which dies on sight never counts as lasting.
const LASTING: Duration = PAUSE_MAX;

/// The pauses before repairs, across any number of them.
#[derive(Debug)]
pub(super) struct Pacing {
    next: Duration,
    whole_since: Option<Instant>,
}

impl Pacing {
    /// Everything is whole from `now` on.
    pub(super) fn new(now: Instant) -> Self {
        Self { next: Duration::ZERO, whole_since: Some(now) }
    }

    /// How long to wait before the next try, which is due `now`.
    pub(super) fn pause(&mut self, now: Instant) -> Duration {
        let whole_since = self.whole_since.take();
        if whole_since.is_some_and(|since| now.duration_since(since) >= LASTING) {
            self.next = Duration::ZERO;
        }
        let pause = self.next;
        self.next = (pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
        pause
    }

    /// A try succeeded.
    pub(super) fn whole(&mut self, now: Instant) {
        self.whole_since = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lived_repairs_back_off() {
        let mut now = Instant::now();
        let mut pacing = Pacing::new(now);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            let pause = pacing.pause(now);
            pauses.push(pause);
            now += pause;
            pacing.whole(now);
        }
        assert_eq!(pauses[..3], [Duration::ZERO, PAUSE_FIRST, PAUSE_FIRST * 2]);
        assert!(pauses.is_sorted(), "{pauses:?}");
        assert_eq!(pauses.last(), Some(&PAUSE_MAX));
        now += LASTING;
        assert_eq!(pacing.pause(now), Duration::ZERO, "the last repair lasted");
    }

    #[test]
    fn failed_attempts_do_not_reset_the_pause() {
        let mut now = Instant::now();
        let mut pacing = Pacing::new(now);
        for _ in 0..20 {
            now += pacing.pause(now);
        }
        now += LASTING * 2;
        assert_eq!(pacing.pause(now), PAUSE_MAX);
    }
}
