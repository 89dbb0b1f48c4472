//! How long to wait before a retry: exponential, bounded, jittered. Pure arithmetic over a
//! random number; it never sleeps.

use std::time::Duration;

/// First and longest wait after a failure of the store. The first is short enough that a blip costs
/// nothing a user notices. Within the longest a store that returns is found again, and a thousand
/// daemons asking every five seconds at the most are 200 requests a second, which one etcd serves
/// easily.
pub const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Waits that double from a first to a longest, each shortened by up to a half at random, so that
/// daemons which failed together do not return together.
#[derive(Debug, Clone)]
pub struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    /// Waits that double from `min` to `max`.
    pub fn between((min, max): (Duration, Duration)) -> Self {
        Self { next: min, max }
    }

    /// The next wait.
    pub fn next_wait(&mut self) -> Duration {
        self.next_wait_by(&mut fastrand::Rng::new())
    }

    /// The next wait, by the caller's chance.
    pub fn next_wait_by(&mut self, random: &mut fastrand::Rng) -> Duration {
        let full = self.next;
        self.next = (full * 2).min(self.max);
        full.mul_f64(0.5 + random.f64() * 0.5)
    }
}

/// `period`, longer or shorter by up to `share` of itself (0.2 for plus or minus 20 %).
pub fn jittered(period: Duration, share: f64, random: &mut fastrand::Rng) -> Duration {
    period.mul_f64(1.0 + share * (random.f64() * 2.0 - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_bound_and_stay_there() {
        let mut backoff = Backoff::between(BACKOFF);
        let (mut full, max) = BACKOFF;
        for _ in 0..20 {
            let wait = backoff.next_wait();
            assert!(wait >= full / 2 && wait <= full, "{wait:?} is not within half of {full:?}");
            full = (full * 2).min(max);
        }
        assert_eq!(full, max);
    }

    #[test]
    fn jitter_stays_within_its_share() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..1000 {
            let wait = jittered(Duration::from_secs(300), 0.2, &mut random);
            assert!(wait >= Duration::from_secs(240) && wait <= Duration::from_secs(360));
        }
    }
}
