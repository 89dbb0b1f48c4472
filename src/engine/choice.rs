//! Which engine is the better one here: a question of what a system call costs.
//!
//! The ring saves one system call for each TUN packet, and its own bookkeeping takes as long as a
//! cheap one. Where calls are dear (mitigations of older processors, a long seccomp filter) it
//! wins by far: of 64-byte packets on the wire link of the benchmark's lab, mmsg carried 215
//! thousand a second with calls of 0.28 microseconds, 151 with 0.94 and 81 with 2.8; io_uring 212,
//! 219 and 202.

use std::time::Instant;

use rustix::process::getppid;

use super::worker::Engine;

/// What a system call must cost for the ring to pay, in nanoseconds: between the 280 at which both
/// engines are equal and the 620 at which the ring leads.
const DEAR_CALL_NS: u64 = 450;

/// Calls in one sample, and samples; the fastest counts, as the others were disturbed. A fraction
/// of a millisecond in all.
const CALLS: u32 = 100;
const SAMPLES: usize = 8;

/// The engine to prefer where a system call costs `call_ns`.
pub fn preferred(call_ns: u64) -> Engine {
    if call_ns < DEAR_CALL_NS { Engine::Mmsg } else { Engine::IoUring }
}

/// What the cheapest system call costs this thread, in nanoseconds.
pub fn call_ns() -> u64 {
    let sample = || {
        let start = Instant::now();
        for _ in 0..CALLS {
            std::hint::black_box(getppid());
        }
        start.elapsed().as_nanos() as u64 / u64::from(CALLS)
    };
    (0..SAMPLES).map(|_| sample()).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dear_calls_make_the_ring_the_better_choice() {
        assert_eq!(preferred(280), Engine::Mmsg);
        assert_eq!(preferred(DEAR_CALL_NS), Engine::IoUring);
        assert_eq!(preferred(2800), Engine::IoUring);
    }

    #[test]
    fn a_system_call_takes_a_plausible_time() {
        let call_ns = call_ns();
        assert!((20..1_000_000).contains(&call_ns), "{call_ns} ns: auto would choose by noise");
    }
}
