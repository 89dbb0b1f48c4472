//! When to send how much: a rate held by bursts of bounded size. Pure: the caller has the clock.

use std::time::Duration;

/// Datagrams that go out in one call at most: a small part of what any queue on the way holds
/// (a TUN device 500, a CPU's backlog 1000 packets).
pub(crate) const BURST_PACKETS_MAX: usize = 32;
/// A sender that fell behind by more than this many bursts forgets the rest, because sending it
/// all at once would test the queues and not the rate. What was forgotten was never offered.
const BURSTS_BEHIND_MAX: u64 = 4;
/// Shortest sleep worth a system call.
const SLEEP_MIN: Duration = Duration::from_micros(40);

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Send this many, 1 to [`BURST_PACKETS_MAX`].
    Send(usize),
    /// Nothing is due before this has passed.
    Wait(Duration),
}

/// A rate and how far it has been served.
pub(crate) struct Pace {
    rate_pps: Option<u64>,
    /// Packets that were sent or forgotten since the start.
    settled: u64,
}

impl Pace {
    /// Without a rate a full burst is always due.
    pub(crate) fn new(rate_pps: Option<u64>) -> Self {
        Self { rate_pps, settled: 0 }
    }

    /// What is due `elapsed` after the start.
    pub(crate) fn due(&mut self, elapsed: Duration) -> Due {
        const BEHIND_MAX: u64 = BURSTS_BEHIND_MAX * BURST_PACKETS_MAX as u64;
        let Some(rate_pps) = self.rate_pps else { return Due::Send(BURST_PACKETS_MAX) };
        let owed = owed(elapsed, rate_pps);
        self.settled = self.settled.max(owed.saturating_sub(BEHIND_MAX));
        match owed.saturating_sub(self.settled) {
            0 => Due::Wait(at(self.settled + 1, rate_pps).saturating_sub(elapsed).max(SLEEP_MIN)),
            behind => Due::Send(BURST_PACKETS_MAX.min(behind as usize)),
        }
    }

    /// `packets` have been sent.
    pub(crate) fn sent(&mut self, packets: usize) {
        self.settled += packets as u64;
    }
}

/// Packets that belong before `elapsed`.
fn owed(elapsed: Duration, rate_pps: u64) -> u64 {
    (elapsed.as_nanos() * u128::from(rate_pps) / 1_000_000_000) as u64
}

/// When packet number `packet` is due, counted from 1.
fn at(packet: u64, rate_pps: u64) -> Duration {
    let nanoseconds = (u128::from(packet) * 1_000_000_000).div_ceil(u128::from(rate_pps.max(1)));
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves `pace` with a clock that ticks `step`, for `total`; gives what was sent and the
    /// largest sum sent at one moment.
    fn serve(pace: &mut Pace, step: Duration, total: Duration) -> (usize, usize) {
        let (mut now, mut sent, mut at_once_max) = (Duration::ZERO, 0, 0);
        while now < total {
            let mut at_once = 0;
            while let Due::Send(count) = pace.due(now) {
                assert!((1..=BURST_PACKETS_MAX).contains(&count), "{count}");
                pace.sent(count);
                at_once += count;
            }
            (sent, at_once_max) = (sent + at_once, at_once_max.max(at_once));
            now += step;
        }
        (sent, at_once_max)
    }

    #[test]
    fn rate_is_met_at_any_clock_resolution() {
        for step in [7, 50, 130].map(Duration::from_micros) {
            let (sent, _) = serve(&mut Pace::new(Some(200_000)), step, Duration::from_secs(1));
            assert!((199_970..=200_000).contains(&sent), "{sent} with a grain of {step:?}");
        }
        let (sent, at_once) =
            serve(&mut Pace::new(Some(3)), Duration::from_micros(50), Duration::from_secs(2));
        assert_eq!((sent, at_once), (5, 1), "five of six are due before the end");
    }

    #[test]
    fn late_sender_sends_a_bounded_burst() {
        let mut pace = Pace::new(Some(1_000_000));
        let (sent, at_once) =
            serve(&mut pace, Duration::from_millis(10), Duration::from_millis(100));
        assert_eq!((sent, at_once), (9 * 128, 128));
        let next = Duration::from_millis(90) + Duration::from_micros(5);
        assert_eq!(pace.due(next), Due::Send(5), "the rest is forgotten");
    }

    #[test]
    fn wait_ends_when_next_packet_is_due() {
        let mut pace = Pace::new(Some(1000));
        assert_eq!(pace.due(Duration::ZERO), Due::Wait(Duration::from_millis(1)));
        assert_eq!(pace.due(Duration::from_millis(1)), Due::Send(1));
        pace.sent(1);
        assert_eq!(pace.due(Duration::from_micros(1_990)), Due::Wait(SLEEP_MIN));
        assert_eq!(Pace::new(None).due(Duration::ZERO), Due::Send(BURST_PACKETS_MAX));
    }
}
