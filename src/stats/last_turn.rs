//! When a worker last began a turn, by which others see that it neither hangs nor starves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A moment on the monotonic clock, written by one worker.
#[derive(Debug, Default)]
pub struct LastTurn(AtomicU64);

impl LastTurn {
    /// The worker is at it, at `now_ns` of the monotonic clock.
    #[inline]
    pub fn is_at(&self, now_ns: u64) {
        self.0.store(now_ns, Ordering::Relaxed);
    }

    /// How long ago that was; none before the first.
    pub fn age(&self, now_ns: u64) -> Option<Duration> {
        let last_ns = self.0.load(Ordering::Relaxed);
        (last_ns != 0).then(|| Duration::from_nanos(now_ns.saturating_sub(last_ns)))
    }
}
