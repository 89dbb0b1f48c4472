//! The wall clock jumps under a daemon that renews its lease. The clock of a machine cannot be set
//! for one process, so the C library's answer is: libfaketime changes what weftd is told, while
//! the running clock goes on, as it does when an operator or NTP sets the time.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::lab::wait_until;
use crate::support::members::Version;
use crate::support::status::Status;
use crate::traffic::site::{Plan, Site};

const HOUR: i64 = 3600;
const YEAR: i64 = 365 * 24 * HOUR;

fn library() -> PathBuf {
    let place = format!("/usr/lib/{}-linux-gnu/faketime", std::env::consts::ARCH);
    let library = Path::new(&place).join("libfaketimeMT.so.1");
    assert!(library.exists(), "libfaketime is missing; run scripts/setup --test");
    library
}

/// By how much the end of the lease, as the daemon tells it, is away from now.
fn shift(site: &Site, host: usize) -> i64 {
    let status = Status::of(&site.dir(host)).0;
    let told = status["store"]["lease_expires_unix"].as_i64().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    told - i64::try_from(now).unwrap()
}

fn renewals(site: &Site, host: usize) -> u64 {
    Status::of(&site.dir(host)).0["store"]["renewals"].as_u64().unwrap()
}

/// F14.
#[test]
fn a_wall_clock_that_jumps_changes_nothing() {
    const LEASE: Duration = Duration::from_secs(6);
    // A third of it is over when it is renewed; the rest is for a busy machine.
    const RENEWED: Duration = Duration::from_secs(4);
    // Until the library looks at its file again.
    const JUMPED: Duration = Duration::from_secs(2);
    let files = tempfile::tempdir().unwrap();
    let offset = files.path().join("offset");
    let set = |seconds: i64| std::fs::write(&offset, format!("{seconds:+}\n")).unwrap();
    set(0);
    let mut plan = Plan { lease: Some(LEASE), ..Plan::of(Version::V3_5) };
    plan.environment = vec![
        format!("LD_PRELOAD={}", library().display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", offset.display()),
        "FAKETIME_CACHE_DURATION=1".to_owned(),
        // Only what settimeofday(2) changes.
        "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
    ];
    let mut site = Site::start(plan);
    let before = site.entries();
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        for seconds in [HOUR, -HOUR, YEAR, -YEAR] {
            set(seconds);
            let began = Instant::now();
            // The end of the lease is told by the wall clock, and nothing else is.
            wait_until(JUMPED + RENEWED, "the clock jumps, and leases are renewed by then", || {
                [0, 1].iter().all(|&host| (shift(site, host) - seconds).abs() < 20)
            });
            let then = [0, 1].map(|host| renewals(site, host));
            wait_until(RENEWED, "leases are renewed after a jump of the clock", || {
                [0, 1].iter().all(|&host| renewals(site, host) > then[host])
            });
            println!("{seconds:+} s: jumped and renewed within {:?}", began.elapsed());
        }
        for (host, told) in told.iter().enumerate() {
            told.assert_no_warning(&site.daemons[host]);
        }
        assert_eq!(site.entries(), before, "a jump of the clock changes leases");
    });
    report.assert_nothing_lost("a clock that jumps");
    site.assert_settled();
}
