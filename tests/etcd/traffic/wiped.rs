//! The store loses what it knew, and comes back empty or with another network.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use weft::status::Cause;

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
/// raise; the first to look has, and says how long peers are kept. Each says what it did about
/// itself, and first of all what is wrong.
#[track_caller]
fn assert_alarm(site: &Site, told: &[LogSince; 2]) {
    let warned = |host: usize, value: &str| told[host].warned(&site.daemons[host], value);
    let lines = [0, 1].map(|host: usize| told[host].lines(&site.daemons[host]));
    assert!(warned(0, "--stale-hold") + warned(1, "--stale-hold") > 0, "no alarm: {lines:?}");
    for (host, told) in told.iter().enumerate() {
        let subnet = site.leases[host].network().to_string();
        assert!(warned(host, &subnet) > 0, "its own lease was gone: {lines:?}");
        told.assert_warned(&site.daemons[host], "");
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
        assert_alarm(site, &told);

        let told = site.listen();
        let cluster = Arc::clone(&site.cluster);
        site.etcd.wipe();
        thread::sleep(Duration::from_secs(1));
        site.etcd.spawn(&cluster.switch);
        println!("wiped: registered again within {:?}", wait_until_registered(site));
        assert_alarm(site, &told);
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
        for host in 0..2 {
            wait_until(RECONNECT, "the status asks for a restart", || {
                Status::of(&site.dir(host)).causes().contains(&Cause::RestartNeeded)
            });
        }
        wait_until_registered(site);
        // It is said once, not at each look.
        thread::sleep(Duration::from_secs(1));
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            assert_eq!(told.warned(daemon, "10.9.0.0/16"), 1, "not told, or not once");
            told.assert_warned(daemon, " 1 peers");
            let network = Status::of(&site.dir(host)).0["lease"]["network"].clone();
            assert_eq!(network, "10.5.0.0/16", "the other network was applied to running pods");
        }
    });
    report.assert_nothing_lost("a store with another network");
    site.assert_settled();
}
