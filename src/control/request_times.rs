//! How long the store takes to answer. One task counts, any may read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::status::Requests;

/// Upper bounds of the buckets. A store in the same data centre answers in some milliseconds, and
/// one in trouble takes seconds.
const BOUNDS: [Duration; 9] = [
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
    pub fn read(&self) -> Requests {
        let counts = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        let first = |buckets| counts.iter().take(buckets).sum();
        let bounds = BOUNDS.iter().zip(1..);
        let took = Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed));
        Requests {
            up_to_seconds: bounds.map(|(it, at)| (it.as_secs_f64(), first(at))).collect(),
            count: first(counts.len()),
            seconds: took.as_secs_f64(),
        }
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
        let Requests { up_to_seconds, count, seconds } = times.read();
        let up_to: Vec<_> = up_to_seconds.iter().map(|(_, count)| *count).collect();
        assert_eq!((up_to.as_slice(), count), (&[2, 3, 3, 3, 3, 4, 5, 5, 5][..], 6));
        assert!((seconds - 60.604).abs() < 1e-6, "{seconds}");
    }
}
