//! How long the store takes to answer. One task counts, any may read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Upper bounds of the buckets. A store in the same data centre answers in some milliseconds, and
/// one in trouble takes seconds.
pub const BOUNDS: [Duration; 9] = [
    Duration::from_millis(1),
    Duration::from_millis(3),
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(3),
    Duration::from_secs(10),
];

/// Requests by how long they took.
#[derive(Debug, Default)]
pub struct RequestTimes {
    /// Each up to its bound and above the one before; the last has no bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum_ns: AtomicU64,
}

/// The same at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Histogram {
    /// Requests that took no longer than each of [`BOUNDS`].
    pub up_to: [u64; BOUNDS.len()],
    /// All of them.
    pub count: u64,
    /// How long they took together.
    pub sum: Duration,
}

impl RequestTimes {
    /// Carries out `request` and counts it, whatever comes of it.
    pub(super) async fn measured<T>(&self, request: impl Future<Output = T>) -> T {
        let started = Instant::now();
        let result = request.await;
        self.add(started.elapsed());
        result
    }

    fn add(&self, took: Duration) {
        let bucket = BOUNDS.iter().position(|bound| took <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(took_ns, Ordering::Relaxed);
    }

    /// The counts now.
    pub fn read(&self) -> Histogram {
        let mut count = 0;
        let mut up_to = [0; BOUNDS.len()];
        for (position, bucket) in self.buckets.iter().enumerate() {
            count += bucket.load(Ordering::Relaxed);
            if let Some(below) = up_to.get_mut(position) {
                *below = count;
            }
        }
        Histogram { up_to, count, sum: Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_counts_up_to_the_bounds_that_it_kept() {
        let times = RequestTimes::default();
        for took_ms in [0, 1, 2, 300, 301, 60_000] {
            times.add(Duration::from_millis(took_ms));
        }
        let Histogram { up_to, count, sum } = times.read();
        assert_eq!((up_to, count), ([2, 3, 3, 3, 3, 4, 5, 5, 5], 6));
        assert_eq!(sum, Duration::from_millis(60_604));
    }
}
