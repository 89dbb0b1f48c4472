//! How long the store takes to answer. One task counts, any may read.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::status::Requests;

/// Upper bounds of the buckets, in seconds. A store in the same data centre answers in some
/// milliseconds, and one in trouble takes seconds.
const BOUNDS: [f64; 9] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0];

/// Requests by how long they took.
#[derive(Debug)]
pub struct RequestTimes(Mutex<Requests>);

impl Default for RequestTimes {
    fn default() -> Self {
        let up_to_seconds = BOUNDS.map(|bound| (bound, 0)).to_vec();
        Self(Mutex::new(Requests { up_to_seconds, ..Requests::default() }))
    }
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
        let mut requests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = took.as_secs_f64();
        for (bound, count) in &mut requests.up_to_seconds {
            *count += u64::from(seconds <= *bound);
        }
        requests.count += 1;
        requests.seconds += seconds;
    }

    /// The counts now.
    pub fn read(&self) -> Requests {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
