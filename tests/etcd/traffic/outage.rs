//! The store is away: killed, cut off for longer than leases live, or silent behind a path that
//! drops everything.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::cluster::SWITCH_ADDRESS;
use crate::support::control::PREFIX;
use crate::support::cost::{control_time, process_time};
use crate::support::lab::{Namespace, wait_until};
use crate::support::members::Version;
use crate::support::pace::{Stopwatch, by_effort};
use crate::support::status::Status;
use crate::traffic::site::{Plan, RECONNECT, Site};

/// Requests a second of one node that finds its store again. 11 were seen where all of them fell
/// into one second: claim, listing, watch, etcd lease and entry, and a second try of some.
const REQUESTS_PER_SECOND_MAX: u64 = 15;

/// To be where one was before the outage, subnet and peers.
const CONVERGE: Duration = Duration::from_secs(10);

/// In which a daemon whose store is away may use as much of a processor as its start took: the
/// start is measured on the same machine, whatever that is and however busy. A start takes 40 ms
/// of a debug build, 15 s without the store half of it.
const START_AGAIN: Duration = Duration::from_secs(3);

/// F3: etcd dies and returns.
#[test]
fn dead_etcd_loses_no_packet_burns_no_cpu() {
    let outage = by_effort(Duration::from_secs(15), Duration::from_secs(60));
    // The third has no traffic: what it uses is for the store alone.
    const IDLE: usize = 2;
    let mut site = Site::start(Plan { hosts: 3, ..Plan::of(Version::V3_4) });
    let before = site.entries();
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        site.etcd.process.stop(Signal::KILL, Duration::from_secs(2));
        let before = [0, 1].map(|host: usize| control_time(&site.daemons[host]));
        let idle_before = process_time(&site.daemons[IDLE]);
        let starts = outage.as_secs_f64() / START_AGAIN.as_secs_f64();
        thread::sleep(outage);
        let idle = process_time(&site.daemons[IDLE]) - idle_before;
        println!("without etcd, an idle daemon used {idle:?}; its start took {idle_before:?}");
        assert!(
            idle <= idle_before.mul_f64(starts),
            "an idle daemon uses {idle:?} to wait for etcd"
        );
        for (host, before) in before.into_iter().enumerate() {
            let used = control_time(&site.daemons[host]) - before;
            println!("without etcd, control plane {host} used {used:?}; its start took {before:?}");
            assert!(used <= before.mul_f64(starts), "it uses {used:?} to wait for etcd");
        }
        for host in 0..2 {
            let status = Status::of(&site.dir(host)).0;
            assert_eq!(status["store"]["up"], false, "the operator is not told: {status}");
            assert_eq!(status["ready"], true, "an outage of the store is not the node's");
        }
        let cluster = Arc::clone(&site.cluster);
        site.etcd.spawn(&cluster.switch);
        let back = Instant::now();
        for host in 0..3 {
            wait_until(RECONNECT, "the daemons find etcd again", || {
                Status::of(&site.dir(host)).0["store"]["up"] == true
            });
            println!("host {host} found it again after {:?}", back.elapsed());
        }
        // What is written afterwards is seen.
        let key = format!("{PREFIX}/subnets/10.5.255.0-24");
        site.ctl(&["put", &key, r#"{"PublicIP":"172.20.0.77","PublicIPv6":null}"#]);
        for host in 0..3 {
            site.wait_for_routes(host, 3);
        }
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            let lines = told.assert_warned(daemon, " 2 peers");
            println!("host {host}: at most {lines} lines a second");
        }
    });
    report.assert_nothing_lost("an outage of etcd");
    assert_eq!(site.entries(), before, "an outage of etcd changes what is in it");
    site.assert_settled();
}

/// F4, and an hour's outage compressed: leases end several times over while nobody can renew them.
#[test]
fn leases_expired_in_outage_are_retaken_without_loss() {
    // A machine that is too slow to renew them all the time loses packets by right.
    const LEASE: Duration = Duration::from_secs(8);
    let mut site = Site::start(Plan { lease: Some(LEASE), ..Plan::of(Version::V3_5) });
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        site.cut();
        wait_until(LEASE * 3, "etcd ends the leases", || {
            site.entries().iter().all(Option::is_none)
        });
        // And then some: by their own clocks the nodes have long lost what they hold.
        thread::sleep(LEASE);
        assert_eq!([0, 1].map(|host| site.routes(host)), [Some(1); 2], "routes were withdrawn");
        let taken = || {
            [0, 1].map(|host| {
                let ends = Status::of(&site.dir(host)).0["store"]["lease_expires_unix"].as_u64();
                ends > Some(weft::control::clock::unix_seconds())
            })
        };
        assert_eq!(taken(), [false; 2], "the leases have not ended");
        let back = Instant::now();
        site.mend();
        let busiest = busiest_second(site, || taken() == [true; 2]);
        println!("both subnets taken again within {:?}", back.elapsed());
        println!("at most {busiest} requests a second of two nodes together");
        assert!(busiest <= 2 * REQUESTS_PER_SECOND_MAX, "{busiest} requests in a second");
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            // Of the watch or of a renewal, whichever is cut off first.
            told.assert_warned(daemon, "");
            let subnet = site.leases[host].network().to_string();
            assert!(told.warned(daemon, &subnet) > 0, "not which lease was lost");
        }
    });
    report.assert_nothing_lost("the end of all leases in an outage");
    assert!(site.entries().iter().all(|entry| entry.is_some_and(|entry| entry.lease != 0)));
    site.assert_settled();
}

/// The most requests that etcd gets in a second, until a second after the nodes are `back`.
#[track_caller]
fn busiest_second(site: &Site, mut back: impl FnMut() -> bool) -> u64 {
    let began = Instant::now();
    let (mut counts, mut ends) = (Vec::new(), None);
    let watch = Stopwatch::start();
    while ends.is_none_or(|ends| began.elapsed() < ends) {
        assert!(
            ends.is_some() || !watch.is_over(CONVERGE),
            "not both nodes have their subnets back {CONVERGE:?} later"
        );
        counts.push((began.elapsed(), site.etcd.requests(&site.cluster.switch)));
        if ends.is_none() && back() {
            ends = Some(began.elapsed() + Duration::from_secs(1));
        }
        thread::sleep(Duration::from_millis(100));
    }
    let within = |(first, (start, count)): (usize, &(Duration, u64))| {
        let rest = counts[first..].iter();
        let last = rest.take_while(|(at, _)| *at <= *start + Duration::from_secs(1)).last();
        last.map_or(0, |(_, later)| later - count)
    };
    counts.iter().enumerate().map(within).max().unwrap_or(0)
}

/// F9: a path that drops everything, and another that works.
#[test]
fn a_partition_is_noticed_and_gone_around() {
    const NOTICED: Duration = Duration::from_secs(20);
    let other = Ipv4Addr::new(172, 20, 0, 253);
    let endpoints = format!("http://{SWITCH_ADDRESS}:2379,http://{other}:2379");
    let mut site = Site::build(Plan { endpoints, ..Plan::of(Version::V3_5) });
    site.cluster.switch.address("br0", &format!("{other}/24"));
    // At first one way is open only, then the other only.
    drop_packets(&site.cluster.hosts[0], Some(other));
    site.start_daemons(2);
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        drop_packets(&site.cluster.hosts[0], Some(SWITCH_ADDRESS));
        let cut = Instant::now();
        // News of after the partition reaches the node over the other way.
        let key = format!("{PREFIX}/subnets/10.5.255.0-24");
        site.ctl(&["put", &key, r#"{"PublicIP":"172.20.0.77","PublicIPv6":null}"#]);
        wait_until(NOTICED, "the node goes around the partition", || site.routes(0) == Some(2));
        println!("gone around after {:?}", cut.elapsed());
        let daemon = &site.daemons[0];
        told[0].assert_warned(daemon, " 1 peers");
        told[1].assert_no_warning(&site.daemons[1]);
        drop_packets(&site.cluster.hosts[0], None);
    });
    report.assert_nothing_lost("a partition from etcd");
    site.assert_settled();
}

/// Drops all packets of `host` to and from this address of etcd, and of no other.
fn drop_packets(host: &Namespace, address: Option<Ipv4Addr>) {
    host.succeeds(&["nft", "delete", "table", "inet", "holes"]);
    let Some(address) = address else { return };
    host.exec(&["nft", "add table inet holes"]);
    for (hook, end, port) in [("output", "daddr", "dport"), ("input", "saddr", "sport")] {
        let chain =
            format!("add chain inet holes {hook} {{ type filter hook {hook} priority 0; }}");
        host.exec(&["nft", &chain]);
        let rule = format!("add rule inet holes {hook} ip {end} {address} tcp {port} 2379 drop");
        host.exec(&["nft", &rule]);
    }
}
