//! What the watch does not bring: history that is compacted away, and an event that gets lost.

use std::thread;
use std::time::Duration;

use crate::support::control::PREFIX;
use crate::support::lab::wait_until;
use crate::support::members::Version;
use crate::support::pace::Stopwatch;
use crate::support::proxy::Mode;
use crate::traffic::site::{Plan, RECONNECT, Site};

const VALUE: &str = r#"{"PublicIP":"172.20.0.77","PublicIPv6":null}"#;

fn subnet(third: u8) -> String {
    format!("{PREFIX}/subnets/10.5.{third}.0-24")
}

/// Requests a second of one node that follows its store.
const REQUESTS_PER_SECOND_MAX: u64 = 10;

/// F7: the watch cannot go on where it was.
#[test]
fn compacted_history_costs_one_listing_no_route() {
    const LISTED: Duration = Duration::from_secs(1);
    let mut site = Site::start(Plan::of(Version::V3_4));
    site.ctl(&["put", &subnet(253), VALUE]);
    for host in 0..2 {
        site.wait_for_routes(host, 2);
    }
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        site.cut();
        site.ctl(&["del", &subnet(253)]);
        site.ctl(&["put", &subnet(254), VALUE]);
        let last = site.ctl(&["put", &subnet(255), VALUE, "-w", "json"]);
        let last: serde_json::Value = serde_json::from_str(&last).unwrap();
        site.ctl(&["compact", &last["header"]["revision"].to_string()]);
        thread::sleep(Duration::from_millis(500));
        site.mend();
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            let mended = Stopwatch::start();
            wait_until(RECONNECT + LISTED, "everything is listed again", || {
                site.routes(host) == Some(3)
            });
            println!("host {host} listed again within {:?}", mended.elapsed());
            wait_until(RECONNECT, "the watch goes on", || told.says(daemon, "answers again"));
            wait_until(LISTED, "both changes of routes are told", || {
                let lines = told.lines(daemon);
                lines.iter().filter(|line| line.contains("Subnet ")).count() >= 3
            });
            let lines = told.lines(daemon);
            let count = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
            assert_eq!(count("Subnet added"), 2, "routes flap: {lines:?}");
            assert_eq!(count("Subnet removed"), 1, "routes flap: {lines:?}");
            told.assert_warned(daemon, " 2 peers");
        }
        let before = site.etcd.requests(&site.cluster.switch);
        thread::sleep(Duration::from_secs(1));
        let more = site.etcd.requests(&site.cluster.switch) - before;
        assert!(more <= 2 * REQUESTS_PER_SECOND_MAX, "listed in a loop: {more} requests a second");
    });
    report.assert_nothing_lost("a compacted history");
    site.assert_settled();
}

/// F11: an event never arrives, and nothing else says so.
#[test]
fn lost_event_is_found_by_next_listing() {
    // A hundredth of the daemon's own period, and of the bound.
    const RELIST: Duration = Duration::from_secs(3);
    const HEALED: Duration = Duration::from_millis(3600);
    // From the listing to the status, on a busy machine.
    const SEEN: Duration = Duration::from_millis(400);
    let mut site = Site::build(Plan { relist: Some(RELIST), ..Plan::of(Version::V3_5) });
    site.relay.set(Mode::LosesEvents);
    site.start_daemons(2);
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        // The relay knows the keys that it loses.
        let key = &subnet(255);
        for (write, words, peers) in
            [(vec!["put", key, VALUE], "write", 2), (vec!["del", key], "deletion", 1)]
        {
            let before = site.relay.lost();
            site.ctl(&write);
            let written = Stopwatch::start();
            wait_until(Duration::from_secs(1), &format!("the {words} gets lost"), || {
                site.relay.lost() == before + 2
            });
            for host in 0..2 {
                let what = format!("a lost {words} is found");
                wait_until(HEALED + SEEN, &what, || site.routes(host) == Some(peers));
                println!("host {host} found the {words} after {:?}", written.elapsed());
            }
            let took = written.elapsed();
            assert!(took <= HEALED + SEEN, "the {words} was found after {took:?}");
        }
        site.ctl(&["put", &subnet(254), VALUE]);
        for (host, told) in told.iter().enumerate() {
            wait_until(Duration::from_secs(1), "the watch lives", || site.routes(host) == Some(2));
            told.assert_no_warning(&site.daemons[host]);
        }
    });
    report.assert_nothing_lost("a lost event");
    site.assert_settled();
}
