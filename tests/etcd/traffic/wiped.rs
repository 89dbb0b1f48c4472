//! The store loses what it knew, and comes back empty or with another network.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::control::PREFIX;
use crate::support::lab::wait_until;
use crate::support::log_since::LogSince;
use crate::support::members::Version;
use crate::support::status::Status;
use crate::traffic::site::{Plan, RECONNECT, Site};

/// Waits until both nodes are in the store again, and hold nobody any more.
#[track_caller]
fn wait_until_registered(site: &Site) -> Duration {
    let began = Instant::now();
    wait_until(RECONNECT, "both nodes register again", || {
        site.entries().iter().all(Option::is_some)
    });
    let took = began.elapsed();
    for host in 0..2 {
        wait_until(RECONNECT, "held peers are leased again", || {
            let status = Status::of(&site.dir(host));
            status.0["peers_held"] == 0 && status.routes() == 1
        });
    }
    took
}

/// A node that looks when all others have registered again misses nobody, and has no alarm to
/// raise; the first to look has. Each says what it did about itself.
#[track_caller]
fn assert_alarm(site: &Site, told: &[LogSince; 2], words: &str) {
    let says = |words: &str| [0, 1].map(|host: usize| told[host].says(&site.daemons[host], words));
    let lines = [0, 1].map(|host: usize| told[host].lines(&site.daemons[host]));
    assert!(says(&format!("ALARM: {words}")).contains(&true), "no alarm: {lines:?}");
    assert_eq!(says("was gone from the store; took it again"), [true; 2], "{lines:?}");
}

/// Both daemons said first what was wrong and what they do about it, in few lines.
#[track_caller]
fn assert_plain(site: &Site, told: &[LogSince; 2], wrong: &str, doing: &str) {
    for (told, daemon) in told.iter().zip(&site.daemons) {
        told.assert_plain(daemon, wrong, &[doing]);
    }
}

/// F5: configuration and leases are deleted under everybody's eyes, and then the data is gone.
#[test]
fn running_nodes_refill_emptied_store() {
    let mut site = Site::start(Plan::of(Version::V3_4));
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        site.ctl(&["del", "--prefix", PREFIX]);
        println!("deleted: registered again within {:?}", wait_until_registered(site));
        assert_alarm(site, &told, "1 of 1 peers vanished at once; sending to them");
        assert_plain(site, &told, "peers vanished at once", "sending to them for");

        let told = site.listen();
        let cluster = Arc::clone(&site.cluster);
        site.etcd.wipe();
        thread::sleep(Duration::from_secs(1));
        site.etcd.spawn(&cluster.switch);
        println!("wiped: registered again within {:?}", wait_until_registered(site));
        assert_alarm(site, &told, "the store lost its data: 1 of 1 peers vanished at once");
        assert_plain(site, &told, "without the store for", "keeping all 1 peers");
    });
    report.assert_nothing_lost("a store that loses its data");
    site.assert_settled();
}

/// F6: the store is wiped and made again with another network.
#[test]
fn changed_network_is_reported_and_not_applied() {
    let mut site = Site::start(Plan::of(Version::V3_5));
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let cluster = Arc::clone(&site.cluster);
        // Nobody sees the store without its configuration.
        site.cut();
        site.etcd.wipe();
        site.etcd.spawn(&cluster.switch);
        let other = r#"{"Network":"10.9.0.0/16","Backend":{"Type":"udp"}}"#;
        site.ctl(&["put", &format!("{PREFIX}/config"), other]);
        site.mend();
        let words = "The network configuration in the store is now for 10.9.0.0/16, and not for \
                     10.5.0.0/16";
        for (host, told) in told.iter().enumerate() {
            site.wait_to_hear(host, told, words, RECONNECT);
            assert!(told.says(&site.daemons[host], "To apply the new one, restart weftd"));
        }
        wait_until_registered(site);
        // It is said once, not at each look.
        thread::sleep(Duration::from_secs(1));
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            let lines = told.lines(daemon);
            let times = lines.iter().filter(|line| line.contains(words)).count();
            assert_eq!(times, 1, "said {times} times: {lines:?}");
            told.assert_plain(daemon, "without the store for", &["keeping all 1 peers"]);
            let network = Status::of(&site.dir(host)).0["lease"]["network"].clone();
            assert_eq!(network, "10.5.0.0/16", "the other network was applied to running pods");
        }
    });
    report.assert_nothing_lost("a store with another network");
    site.assert_settled();
}
