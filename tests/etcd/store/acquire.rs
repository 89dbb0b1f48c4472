//! Getting a subnet: flannel's schema to the byte, storms, restarts, reservations.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::future::join_all;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::sleep;
use weft::config::network::NetworkConfig;
use weft::config::network::SubnetRange;
use weft::config::options::StoreOptions;
use weft::control::error::AcquireError;
use weft::control::lease::Lifetime;

use crate::store::{
    PREFIX, Running, manager_at, network, node, options, path, short_leases, subnet_path,
};
use crate::support::control::{acquire_at_last, connect};
use crate::support::etcd::Etcd;
use crate::support::pace::{Stopwatch, within};

/// In which everybody has a subnet in a cluster that starts together.
const STARTED: Duration = Duration::from_secs(30);

#[tokio::test]
async fn keys_and_values_are_flannels_to_the_byte() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let missing = manager.network_config().await.unwrap_err().to_string();
    assert!(missing.contains("/coreos.com/network/config"), "unhelpful message: {missing}");
    etcd.ctl(&["put", &format!("{PREFIX}/config"), r#"{"Network":"10.5.0.0/16"}"#]);
    assert_eq!(manager.network_config().await.unwrap(), br#"{"Network":"10.5.0.0/16"}"#);

    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let left = (own.expires.unwrap() - weft::control::clock::boot_time()).as_secs();
    let keys = etcd.keys(&format!("{PREFIX}/subnets"));
    assert_eq!(keys, [path(own.lease.subnets)], "flannel nodes cannot find the lease");
    assert_eq!(
        etcd.get(&keys[0]).unwrap(),
        r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#,
        "flannel nodes would read another value"
    );
    let id = format!("{:x}", etcd.lease_of(&keys[0]));
    let ttl = etcd.ctl(&["lease", "timetolive", &id]);
    assert!(ttl.contains("TTL(86400s)"), "the lease is not flannel's 24 h: {ttl}");
    assert!((86_390..=86_400).contains(&left), "we believe in {left} s");
}

async fn storm(nodes: u8, network: NetworkConfig) -> Duration {
    let etcd = Etcd::start();
    let url = etcd.url();
    let managers: Vec<_> = (0..nodes).map(|_| manager_at(&url)).collect();
    let started = Stopwatch::start();
    let acquired = join_all(managers.iter().enumerate().map(|(number, manager)| {
        let attributes = node(u8::try_from(number).unwrap());
        let network = &network;
        // As a daemon does: on a busy machine a request may take too long.
        async move { acquire_at_last(manager, network, &attributes).await }
    }));
    let acquired = within(STARTED, acquired).await;
    let acquired = acquired.unwrap_or_else(|| panic!("some have no subnet after {STARTED:?}"));
    let took = started.elapsed();
    let subnets: Vec<_> = acquired.into_iter().map(|own| own.lease.subnets).collect();
    let v4: BTreeSet<_> = subnets.iter().map(|it| it.v4()).collect();
    assert_eq!(v4.len(), usize::from(nodes), "two nodes share a subnet");
    let v6: BTreeSet<_> = subnets.iter().filter_map(|it| it.v6()).collect();
    let with_v6 = network.v6().map_or(0, |_| usize::from(nodes));
    assert_eq!(v6.len(), with_v6, "two nodes share an IPv6 subnet");
    let stored = etcd.keys(&format!("{PREFIX}/subnets")).len();
    assert_eq!(stored, usize::from(nodes), "leases were left behind");
    let etcd_leases = etcd.ctl(&["lease", "list"]);
    let statuses: Vec<_> = managers.iter().map(|manager| manager.status().read()).collect();
    let conflicts: u64 = statuses.iter().map(|status| status.conflicts).sum();
    let failures: u64 = statuses.iter().map(|status| status.store.failures).sum();
    println!("{nodes} daemons at once: {took:?}, {conflicts} races lost, {failures} failures");
    // A grant without an answer leaves one to lapse.
    assert!(
        etcd_leases.contains(&format!("found {nodes} leases")) || failures > 0,
        "lost races left etcd leases behind: {}",
        etcd_leases.lines().next().unwrap_or_default()
    );
    took
}

#[tokio::test]
async fn twelve_daemons_at_once_get_twelve_subnets() {
    storm(12, network()).await;
}

#[tokio::test]
async fn hundred_simultaneous_daemons_get_distinct_subnets() {
    let took = storm(100, network()).await;
    assert!(took < STARTED, "a cluster that starts together waits {took:?}");
}

#[tokio::test]
async fn a_restart_keeps_the_subnet() {
    let etcd = Etcd::start();
    let first = manager_at(&etcd.url()).acquire(&network(), &node(1)).await.unwrap();
    for _ in 0..3 {
        let again = manager_at(&etcd.url()).acquire(&network(), &node(1)).await.unwrap();
        assert_eq!(again.lease.subnets, first.lease.subnets, "pods would lose their addresses");
    }
    assert_eq!(etcd.keys(&format!("{PREFIX}/subnets")).len(), 1);

    // The store forgot us, the subnet file did not.
    etcd.ctl(&["del", &path(first.lease.subnets)]);
    let with_previous = |previous: &str| {
        let store = StoreOptions::Etcd(options(&[&etcd.url()]));
        connect(&store, previous.parse().ok()).unwrap()
    };
    let again = with_previous("10.5.200.0/24").acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(again.lease.subnets.to_string(), "10.5.200.0/24", "subnet.env was not heeded");
    // Another node's lease is never taken, whatever our file says.
    let other = with_previous("10.5.200.0/24").acquire(&network(), &node(2)).await.unwrap();
    assert_ne!(other.lease.subnets.to_string(), "10.5.200.0/24", "a subnet was stolen");
    // A subnet of an older configuration gives way.
    etcd.ctl(&["put", &subnet_path("10.9.1.0-24"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let moved = manager_at(&etcd.url()).acquire(&network(), &node(3)).await.unwrap();
    assert!(moved.lease.subnets.within(network().networks()).is_some());
    assert_eq!(etcd.get(&subnet_path("10.9.1.0-24")), None, "the old lease still attracts traffic");
}

#[tokio::test]
async fn a_reservation_never_gets_an_end() {
    let etcd = Etcd::start();
    let key = subnet_path("10.5.77.0-24");
    etcd.ctl(&["put", &key, r#"{"PublicIP":"192.0.2.1"}"#]);
    let manager = manager_at(&etcd.url()).with_timing(short_leases());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(own.lease.subnets.key(), "10.5.77.0-24", "the reserved subnet was not used");
    assert_eq!((own.lease.lifetime, own.expires), (Lifetime::Reservation, None));
    assert_eq!(etcd.lease_of(&key), 0, "the reservation would end in 24 h");

    let running = Running::start(manager, own);
    sleep(Duration::from_secs(1)).await;
    // Everything here runs on this thread, and etcd and etcdctl on others.
    let idle = clock_gettime(ClockId::ThreadCPUTime);
    sleep(Duration::from_secs(5)).await;
    let used = clock_gettime(ClockId::ThreadCPUTime) - idle;
    println!("an idle control plane used {} us in 5 s", used.tv_nsec / 1000);
    assert!(
        used.tv_sec == 0 && used.tv_nsec < 25_000_000,
        "an idle node burns {used:?} in 5 s, more than half a percent"
    );
    running.assert_running("a reservation was taken for lapsed");
    assert_eq!(etcd.lease_of(&key), 0, "renewal put an end to the reservation");
    assert_eq!(running.manager.status().read().store.renewals, 0, "a reservation was renewed");
}

#[tokio::test]
async fn freed_subnet_is_taken() {
    let etcd = Etcd::start();
    let mut network = network();
    let narrow = |range| SubnetRange { subnet_max: Ipv4Addr::new(10, 5, 2, 0), ..range };
    network.ranges = network.ranges.map(narrow, |range| range);
    etcd.ctl(&["put", &subnet_path("10.5.1.0-24"), r#"{"PublicIP":"192.0.2.8"}"#]);
    etcd.ctl(&["put", &subnet_path("10.5.2.0-25"), r#"{"PublicIP":"192.0.2.9"}"#]);
    let manager = manager_at(&etcd.url());
    let error = manager.acquire(&network, &node(1)).await.unwrap_err();
    assert!(matches!(error, AcquireError::Exhausted { .. }), "{error}");
    etcd.ctl(&["del", &subnet_path("10.5.2.0-25")]);
    let own = manager.acquire(&network, &node(1)).await.expect("a freed subnet is not taken");
    assert_eq!(own.lease.subnets.to_string(), "10.5.2.0/24");
}
