//! The rate limit of ICMP errors, as a pure state machine over a clock that the caller reads.
//!
//! Two limits, both of which must agree: one over all errors and one per destination, with the
//! classic figures of Linux (`icmp_msgs_per_sec`, `icmp_msgs_burst`, and the token bucket of
//! `inet_peer_xrlim_allow`). Each bucket is one number, the time at which it is full again
//! (the virtual scheduling form of a token bucket), so refilling costs nothing.
//!
//! The limits hold for the daemon: all workers share one limiter, and touch it only when an error
//! is due. There is no lock. The limit over all errors is exact. Two workers that change the same
//! destination's bucket at the same moment may charge it once for two errors.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::packet::header::Family;
use crate::stats::spread;

/// Time between errors at the sustained rate over all destinations: 1,000 per second.
pub const GLOBAL_INTERVAL_NS: u64 = 1_000_000;

/// Errors that may leave at once, over all destinations.
pub const GLOBAL_BURST: u64 = 50;

/// Time between errors to one destination at the sustained rate: 1 per second.
pub const DESTINATION_INTERVAL_NS: u64 = 1_000_000_000;

/// Errors that may leave at once to one destination.
pub const DESTINATION_BURST: u64 = 6;

/// Destinations remembered. At the global rate of 1,000 per second, at most 1,050 destinations
/// sent one error each hold a bucket that is not full; twice that leaves room for uneven sets.
const DESTINATIONS_MAX: usize = 2048;

/// Buckets that one destination may fall into. Four of 16 bytes are a cache line.
const WAYS: usize = 4;

const SETS: usize = DESTINATIONS_MAX / WAYS;

const _: () = assert!(SETS.is_power_of_two() && SETS * WAYS == DESTINATIONS_MAX);

/// The limiter: one for both directions of all workers.
#[derive(Debug)]
pub struct IcmpLimiter {
    global_full_at_ns: AtomicU64,
    sets: Box<[[Bucket; WAYS]]>,
}

#[derive(Debug, Default)]
struct Bucket {
    full_at_ns: AtomicU64,
    /// The address as a number; 0 before the first, which no destination has.
    destination: AtomicU32,
}

impl IcmpLimiter {
    /// Whether an error to `destination` may leave now; if so, it is charged to both limits.
    ///
    /// `now_ns` comes from a monotonic clock. When more destinations are active than the table
    /// holds, the one that is nearest to a full bucket is forgotten; the global limit stands.
    pub fn allow<A: Family>(&self, now_ns: u64, destination: A) -> bool {
        let destination = in_32_bits(destination);
        let take_global = |full_at_ns| take(full_at_ns, now_ns, GLOBAL_INTERVAL_NS, GLOBAL_BURST);
        // A load first: in a flood nearly every error ends here, and writes nothing.
        if take_global(self.global_full_at_ns.load(Relaxed)).is_none() {
            return false;
        }
        let Some(bucket) = self.bucket_of(destination) else { return false };
        let known = bucket.destination.load(Relaxed) == destination.to_bits();
        let full_at_ns = if known { bucket.full_at_ns.load(Relaxed) } else { 0 };
        let taken = take(full_at_ns, now_ns, DESTINATION_INTERVAL_NS, DESTINATION_BURST);
        let Some(full_at_ns) = taken else {
            return false;
        };
        if self.global_full_at_ns.fetch_update(Relaxed, Relaxed, take_global).is_err() {
            return false;
        }
        bucket.full_at_ns.store(full_at_ns, Relaxed);
        bucket.destination.store(destination.to_bits(), Relaxed);
        true
    }

    /// The bucket of `destination`, or the one that it may take over.
    fn bucket_of(&self, destination: Ipv4Addr) -> Option<&Bucket> {
        let set = self.sets.get(spread(destination.to_bits(), SETS))?;
        let known = |bucket: &&Bucket| bucket.destination.load(Relaxed) == destination.to_bits();
        let nearest_full = || set.iter().min_by_key(|bucket| bucket.full_at_ns.load(Relaxed));
        set.iter().find(known).or_else(nearest_full)
    }
}

impl Default for IcmpLimiter {
    /// A limiter with every bucket full. The only allocation of its life.
    fn default() -> Self {
        let sets = (0..SETS).map(|_| Default::default()).collect();
        Self { global_full_at_ns: AtomicU64::new(0), sets }
    }
}

/// The address itself, or one that stands for IPv6's: two that share one share a bucket.
fn in_32_bits(address: impl Family) -> Ipv4Addr {
    let sum = address.sum();
    Ipv4Addr::from_bits(u32::from_be((sum as u32).wrapping_add((sum >> 32) as u32)))
}

/// Takes one token: the new time at which the bucket is full again, or `None` if it is empty.
fn take(full_at_ns: u64, now_ns: u64, interval_ns: u64, burst: u64) -> Option<u64> {
    let debt_ns = full_at_ns.saturating_sub(now_ns);
    if debt_ns > (burst - 1) * interval_ns {
        return None;
    }
    Some(full_at_ns.max(now_ns).saturating_add(interval_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn address(index: u64) -> Ipv4Addr {
        Ipv4Addr::from_bits(0x0a00_0001 + index as u32)
    }

    /// A flood of a million packets per second, each from another source.
    #[test]
    fn a_flood_gets_1000_errors_a_second() {
        let limiter = IcmpLimiter::default();
        let start_ns = 12_345 * SECOND_NS;
        let mut allowed = [0u64; 3];
        for packet in 0..3_000_000u64 {
            let second = (packet / 1_000_000) as usize;
            let now_ns = start_ns + packet * 1_000;
            allowed[second] += u64::from(limiter.allow(now_ns, address(packet)));
        }
        assert!((1_040..=1_050).contains(&allowed[0]), "{allowed:?}");
        assert!((990..=1_001).contains(&allowed[1]), "{allowed:?}");
        assert!((990..=1_001).contains(&allowed[2]), "{allowed:?}");
    }

    #[test]
    fn a_destination_gets_six_then_one_per_second() {
        let limiter = IcmpLimiter::default();
        let allowed_at =
            |now_ns: u64| (0..100).filter(|_| limiter.allow(now_ns, address(7))).count();
        assert_eq!(allowed_at(0), 6);
        assert_eq!(allowed_at(SECOND_NS - 1), 0);
        assert_eq!(allowed_at(SECOND_NS), 1);
        assert_eq!(allowed_at(3 * SECOND_NS), 2);
        assert_eq!(allowed_at(3_600 * SECOND_NS), 6, "a bucket holds no more than its burst");
    }

    #[test]
    fn a_refusal_charges_neither_limit() {
        let limiter = IcmpLimiter::default();
        for _ in 0..1_000 {
            limiter.allow(0, address(1));
        }
        // The other destination still finds the 44 tokens that the first one did not get.
        let others = (2..100).filter(|index| limiter.allow(0, address(*index))).count();
        assert_eq!(others, 44);
        // Refused by the global limit, so its own bucket is still full.
        assert!(!limiter.allow(0, address(200)));
        let later = (0..10).filter(|_| limiter.allow(SECOND_NS, address(200))).count();
        assert_eq!(later, 6);
    }

    #[test]
    fn destinations_do_not_share_a_bucket() {
        let limiter = IcmpLimiter::default();
        // Slowly enough for the global limit: 500 destinations, six errors each, 2 ms apart.
        let mut now_ns = 0;
        for index in 0..500 {
            for _ in 0..6 {
                now_ns += 2_000_000;
                assert!(limiter.allow(now_ns, address(index)), "destination {index}");
            }
        }
    }

    /// The global limit alone would let each of them have sixty-six.
    #[test]
    fn hundreds_of_busy_destinations_are_remembered() {
        let limiter = IcmpLimiter::default();
        let mut passed = [0u32; 300];
        for millisecond in 0..20_000u64 {
            let index = millisecond % 300;
            let allowed = limiter.allow(millisecond * 1_000_000, address(index));
            passed[index as usize] += u32::from(allowed);
        }
        assert!(passed.iter().all(|count| (24..=26).contains(count)), "{passed:?}");
    }

    #[test]
    fn a_full_set_forgets_the_least_busy() {
        let set = spread(address(0).to_bits(), SETS);
        let mut same = (0..).map(address).filter(|at| spread(at.to_bits(), SETS) == set);
        let mut next = || same.next().unwrap();
        let [newcomer, nearest] = [next(), next()];
        let busy = [next(), next(), next()];
        let limiter = IcmpLimiter::default();
        for destination in [busy[0], nearest, busy[1], busy[2]] {
            let errors = if destination == nearest { 2 } else { 6 };
            assert!((0..errors).all(|_| limiter.allow(0, destination)));
        }
        let passed = (0..10).filter(|_| limiter.allow(0, newcomer)).count();
        assert_eq!(passed, 6, "the newcomer inherited a debt");
        for destination in busy {
            assert!(!limiter.allow(0, destination), "{destination} was forgotten");
        }
    }

    #[test]
    fn the_ends_of_the_clock_are_harmless() {
        let limiter = IcmpLimiter::default();
        assert!(limiter.allow(u64::MAX, address(1)));
        assert!(!limiter.allow(0, address(2)), "a clock that went back pauses the errors");
    }

    /// As many threads as a large host has workers, all at once over one second.
    #[test]
    fn all_workers_together_get_the_rate_of_one() {
        const WORKERS: u64 = 8;
        let limiter = IcmpLimiter::default();
        let allowed: usize = std::thread::scope(|scope| {
            let work = |worker: u64| {
                let limiter = &limiter;
                let errors = (0..100_000u64).map(move |error| (error * 10_000, error * WORKERS));
                move || {
                    errors
                        .filter(|(now_ns, index)| limiter.allow(*now_ns, address(index + worker)))
                        .count()
                }
            };
            let workers: Vec<_> = (0..WORKERS).map(|worker| scope.spawn(work(worker))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        // 50 at once and 1,000 in the second. A thread that lags finds the buckets of its own
        // time empty, so there may be fewer, never more.
        assert!((1_000..=1_050).contains(&allowed), "{allowed}");
    }
}
