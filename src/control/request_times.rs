//! How long the store takes to answer. One task counts, any may read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::status::Requests;

/// Upper bounds of the buckets. A store in the same data centre answers in some milliseconds, and
/// one in trouble takes seconds.
const BOUNDS_MS: [u64; 9] = [1, 3, 10, 30, 100, 300, 1000, 3000, 10_000];

/// Requests by how long they took.
#[derive(Debug, Default)]
pub struct RequestTimes {
    /// Each up to its bound and above the one before; the last has no bound.
    buckets: [AtomicU64; BOUNDS_MS.len() + 1],
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
        let keeps = |bound: &u64| took <= Duration::from_millis(*bound);
        let bucket = BOUNDS_MS.iter().position(keeps).unwrap_or(BOUNDS_MS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(took_ns, Ordering::Relaxed);
    }

    /// The counts now.
    pub fn read(&self) -> Requests {
        let counts = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        let first = |buckets| counts.iter().take(buckets).sum();
        let bounds = BOUNDS_MS.map(|bound| Duration::from_millis(bound).as_secs_f64());
        let took = Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed));
        Requests {
            up_to_seconds: bounds.into_iter().zip((1..).map(first)).collect(),
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
