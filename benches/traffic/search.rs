//! The search for the highest rate that a plane carries: RFC 2544's throughput test by bisection,
//! once without loss (NDR) and once with a little (PDR).

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::load::{Load, Outcome, Sender};

/// Loss that the partial drop rate allows: 0.5 %.
const PDR_LOST_FRACTION: f64 = 0.005;
/// The search ends when the answer is known this well, relative to itself.
const RESOLUTION: f64 = 0.03;
/// Below this the search gives up and reports 0.
const RATE_PPS_MIN: f64 = 500.0;
/// A trial whose sender reached less of the asked rate than this tests the sender.
const REACHED_FRACTION_MIN: f64 = 0.97;

/// Finds both rates in trials of `duration`.
///
/// # Errors
/// When a trial can't be run.
pub(crate) fn run(mut sender: Sender, duration: Duration) -> Result<Value> {
    let mut trials = Vec::new();
    let mut trial = |rate_pps: Option<u64>| -> Result<Outcome> {
        let outcome = sender.run(Load { rate_pps, duration })?;
        trials.push(outcome.to_json());
        Ok(outcome)
    };
    let fastest = trial(None)?;
    let mut partial = Bracket::new(PDR_LOST_FRACTION, fastest.offered_pps());
    let mut lossless = Bracket::new(0.0, fastest.offered_pps());
    partial.learn(&fastest, None);
    lossless.learn(&fastest, None);
    while let Some(rate) = partial.next() {
        let outcome = twice_at_most(partial.lost_fraction_max, || trial(Some(rate)))?;
        partial.learn(&outcome, Some(rate));
        lossless.learn(&outcome, Some(rate));
    }
    while let Some(rate) = lossless.next() {
        let outcome = twice_at_most(lossless.lost_fraction_max, || trial(Some(rate)))?;
        lossless.learn(&outcome, Some(rate));
    }
    Ok(json!({
        "ndr_kpps": lossless.pass_pps / 1e3, "pdr_kpps": partial.pass_pps / 1e3,
        "offered_max_kpps": fastest.offered_pps() / 1e3,
        "sender_limited": partial.sender_limited || lossless.sender_limited,
        "reordered": trials.iter().filter_map(|trial| trial["reordered"].as_u64()).sum::<u64>(),
        "trials": trials,
    }))
}

/// A trial that failed gets a second chance: one stall of the machine is no property of a plane.
fn twice_at_most(
    lost_fraction_max: f64,
    mut trial: impl FnMut() -> Result<Outcome>,
) -> Result<Outcome> {
    let first = trial()?;
    if first.lost_fraction() <= lost_fraction_max {
        return Ok(first);
    }
    let second = trial()?;
    Ok(if second.lost_fraction() <= first.lost_fraction() { second } else { first })
}

/// Between which rates the answer lies.
struct Bracket {
    lost_fraction_max: f64,
    /// The highest rate that passed; 0 as long as none has.
    pass_pps: f64,
    /// The lowest rate that failed, or the most that can be offered.
    fail_pps: f64,
    /// The plane carries all that the sender can offer.
    sender_limited: bool,
}

impl Bracket {
    fn new(lost_fraction_max: f64, offered_max_pps: f64) -> Self {
        let (pass_pps, fail_pps) = (0.0, offered_max_pps);
        Self { lost_fraction_max, pass_pps, fail_pps, sender_limited: false }
    }

    /// The rate to try, in packets a second; `None` when the answer is known well enough.
    fn next(&self) -> Option<u64> {
        let middle = f64::midpoint(self.pass_pps, self.fail_pps);
        let known = self.fail_pps - self.pass_pps <= RESOLUTION * self.fail_pps;
        (!known && middle >= RATE_PPS_MIN).then_some(middle as u64)
    }

    /// Takes in a trial that was asked for `asked_pps`, or for all that goes.
    fn learn(&mut self, outcome: &Outcome, asked_pps: Option<u64>) {
        let offered_pps = outcome.offered_pps();
        if outcome.lost_fraction() > self.lost_fraction_max {
            // What passed before stays passed, so that the search ends.
            self.fail_pps = self.fail_pps.min(offered_pps).max(self.pass_pps);
            return;
        }
        self.pass_pps = self.pass_pps.max(offered_pps);
        let reached =
            asked_pps.is_some_and(|asked| offered_pps >= REACHED_FRACTION_MIN * asked as f64);
        if !reached {
            self.sender_limited = true;
            self.fail_pps = self.pass_pps;
        }
        self.fail_pps = self.fail_pps.max(self.pass_pps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plane that carries `capacity_pps` and drops the rest, fed by a sender that reaches
    /// `sender_pps`.
    fn offer(rate_pps: f64, capacity_pps: f64, sender_pps: f64) -> Outcome {
        let offered = rate_pps.min(sender_pps);
        Outcome {
            offered: offered as u64,
            received: offered.min(capacity_pps) as u64,
            reordered: 0,
            seconds: 1.0,
        }
    }

    fn find(lost_fraction_max: f64, capacity_pps: f64, sender_pps: f64) -> (Bracket, usize) {
        let mut bracket = Bracket::new(lost_fraction_max, sender_pps);
        bracket.learn(&offer(f64::INFINITY, capacity_pps, sender_pps), None);
        let mut steps = 0;
        while let Some(rate) = bracket.next() {
            bracket.learn(&offer(rate as f64, capacity_pps, sender_pps), Some(rate));
            steps += 1;
            assert!(steps < 20, "the search does not end");
        }
        (bracket, steps)
    }

    #[test]
    fn the_search_finds_what_a_plane_carries() {
        for capacity in [30_000.0, 123_456.0, 399_000.0] {
            let (bracket, steps) = find(0.0, capacity, 400_000.0);
            let found = bracket.pass_pps / capacity;
            assert!((0.97..=1.0).contains(&found), "{found} of {capacity} after {steps} trials");
            assert!(steps <= 10 && !bracket.sender_limited, "{steps} trials");
        }
        let (bracket, _) = find(PDR_LOST_FRACTION, 100_000.0, 400_000.0);
        assert!((97_400.0..=100_510.0).contains(&bracket.pass_pps), "{}", bracket.pass_pps);
    }

    #[test]
    fn plane_faster_than_sender_ends_search_at_once() {
        let (bracket, steps) = find(0.0, 900_000.0, 400_000.0);
        assert_eq!((steps, bracket.sender_limited), (0, true));
        assert!((bracket.pass_pps - 400_000.0).abs() < 1.0);
    }

    #[test]
    fn dead_plane_is_reported_as_zero() {
        let (bracket, _) = find(0.0, 0.0, 400_000.0);
        assert!(bracket.pass_pps == 0.0);
    }

    #[test]
    fn slow_sender_ends_search_where_it_stood() {
        let mut bracket = Bracket::new(0.0, 400_000.0);
        bracket.learn(&offer(250_000.0, 1e9, 180_000.0), Some(250_000));
        assert!(bracket.sender_limited && bracket.next().is_none());
        assert!((bracket.pass_pps - 180_000.0).abs() < 1.0);
    }

    #[test]
    fn contradictory_trials_keep_what_has_passed() {
        let mut bracket = Bracket::new(0.0, 400_000.0);
        bracket.learn(&offer(100_000.0, 1e9, 1e9), Some(100_000));
        bracket.learn(&offer(90_000.0, 1.0, 1e9), Some(90_000));
        assert!((bracket.pass_pps - 100_000.0).abs() < 1.0 && bracket.next().is_none());
    }

    #[test]
    fn failed_trial_is_repeated_better_one_counts() {
        let mut outcomes = vec![offer(100.0, 100.0, 1e9), offer(100.0, 50.0, 1e9)];
        let better = twice_at_most(0.0, || Ok(outcomes.pop().unwrap())).unwrap();
        assert_eq!((better.received, outcomes.len()), (100, 0));
        let mut outcomes = vec![offer(100.0, 50.0, 1e9), offer(100.0, 100.0, 1e9)];
        twice_at_most(0.0, || Ok(outcomes.pop().unwrap())).unwrap();
        assert_eq!(outcomes.len(), 1, "a trial that passed is not repeated");
    }
}
