//! weftd with leases that end within seconds and listings as often: the same daemon, for tests that
//! cannot wait a day. Durations come from `BRIEF_LEASE_MS`, `BRIEF_RELIST_MS`,
//! `BRIEF_TAKE_OVER_MS` and `BRIEF_CLOUD_MS`. With `PANIC_WITH_PEERS` it has an error: when most
//! peers vanish at once, the control plane panics.

use std::process::ExitCode;
use std::time::Duration;

use weft::control::timing::Timing;

fn main() -> ExitCode {
    let milliseconds = |name| Some(Duration::from_millis(std::env::var(name).ok()?.parse().ok()?));
    let adjust = |timing: &mut Timing| {
        if let Some(lease_ttl) = milliseconds("BRIEF_LEASE_MS") {
            // Early enough for a machine that is busy.
            timing.renew_margin = lease_ttl * 2 / 3;
            timing.lease_ttl = lease_ttl;
            timing.renew_retry = lease_ttl / 4;
        }
        if let Some(relist_period) = milliseconds("BRIEF_RELIST_MS") {
            timing.relist_period = relist_period;
        }
        if let Some(take_over_max) = milliseconds("BRIEF_TAKE_OVER_MS") {
            timing.take_over_max = take_over_max;
        }
        if let Some(cloud_period) = milliseconds("BRIEF_CLOUD_MS") {
            timing.cloud_period = cloud_period;
        }
        if std::env::var_os("PANIC_WITH_PEERS").is_some() {
            // The end of the grace period is beyond what a clock can show.
            timing.stale_hold = Duration::MAX;
        }
    };
    weft::daemon::main(std::env::args_os(), &|name| std::env::var_os(name), adjust)
}
