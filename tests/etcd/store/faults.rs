//! etcd cut off, killed, wiped, frozen, compacted, and endpoints that are dead from the start.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::sleep;
use weft::control::error::{AcquireError, StoreError};
use weft::control::run::End;

use crate::store::{
    PREFIX, Running, SOON, addresses, manager, manager_at, network, node, options, path,
    short_leases, subnet_path,
};
use crate::support::etcd::{Etcd, closed_port};
use crate::support::pace::Stopwatch;
use crate::support::proxy::{Mode, Proxy};

#[tokio::test]
async fn a_compacted_history_is_listed_again() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let manager = manager_at(&proxy.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    let listed = running.manager.status().read().relists;

    proxy.set(Mode::Cut);
    etcd.ctl(&["del", &subnet_path("10.5.0.0-28")]);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    etcd.ctl(&["put", "other", "x"]);
    etcd.ctl(&["compact", &etcd.revision().to_string()]);
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "peers were withdrawn in an outage");
    proxy.set(Mode::Open);
    let took = running.wait_for_peers(&["192.0.2.3"], Duration::from_secs(6), "history lost").await;
    println!("listed again after compaction within {took:?}");
    assert_eq!(running.manager.status().read().relists, listed + 1, "compaction causes a loop");
}

#[tokio::test]
async fn a_short_cut_resumes_without_listing() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let manager = manager_at(&proxy.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own);
    let (status, watch) = (running.manager.status(), Stopwatch::start());
    while status.read().relists == 0 {
        assert!(!watch.is_over(SOON), "it never lists");
        sleep(Duration::from_millis(20)).await;
    }
    // What comes after the listing, the watch alone tells: with that, it is open.
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    running.wait_for_peers(&["192.0.2.3"], SOON, "the watch does not work").await;
    let listed = status.read().relists;
    proxy.set(Mode::Cut);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    proxy.set(Mode::Open);
    let both = &["192.0.2.2", "192.0.2.3"];
    running.wait_for_peers(both, Duration::from_secs(6), "an event was lost").await;
    assert_eq!(
        running.manager.status().read().relists,
        listed,
        "each hiccup lists the whole cluster"
    );
    assert!(running.manager.status().read().store.up);
}

#[tokio::test]
async fn a_killed_etcd_takes_nothing_with_it() {
    let mut etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnets);
    let mut running = Running::start(manager, own);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    etcd.kill();
    sleep(Duration::from_secs(3)).await;
    running.assert_running("an outage of etcd ended the daemon");
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "an outage withdrew a peer");
    assert!(!running.manager.status().read().store.up, "the outage is not reported");
    let failures = running.manager.status().read().store.failures;
    assert!(failures < 40, "{failures} requests in 3 s without etcd");
    etcd.spawn();
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    running.wait_for_peers(both, Duration::from_secs(6), "not connected again").await;
    assert!(etcd.get(&key).is_some(), "the own lease is gone");

    // And now it forgets everything.
    etcd.wipe();
    etcd.spawn();
    let watch = Stopwatch::start();
    while etcd.get(&key).is_none() {
        assert!(
            !watch.is_over(Duration::from_secs(8)),
            "a wiped etcd never learns of running nodes again"
        );
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("a wiped etcd ended the daemon");
}

/// Made again as it was made before, so with the same id, and written to by others until it is
/// beyond what the node saw.
#[tokio::test]
async fn wiped_etcd_with_its_old_id_and_further_revisions_is_noticed() {
    let mut etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let manager = manager_at(&proxy.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnets);
    let mut running = Running::start(manager, own);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    let seen = etcd.revision();
    proxy.set(Mode::Cut);
    etcd.wipe_and_keep_id();
    etcd.spawn();
    while etcd.revision() <= seen {
        etcd.ctl(&["put", "of somebody else", "x"]);
    }
    proxy.set(Mode::Open);
    let open = Stopwatch::start();
    while etcd.get(&key).is_none() {
        let status = running.manager.status().read();
        let is_late = open.elapsed() >= Duration::from_secs(25);
        assert!(!is_late, "it runs on without a lease: {status:?}");
        sleep(Duration::from_millis(100)).await;
    }
    println!("taken again after {:?}", open.elapsed());
    running.assert_running("a wiped etcd ended the daemon");
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "a wiped etcd withdrew a peer");
}

#[tokio::test]
async fn a_frozen_etcd_is_noticed_and_survived() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    etcd.freeze(true);
    let frozen = Stopwatch::start();
    while running.manager.status().read().store.up {
        assert!(frozen.elapsed() < Duration::from_secs(20), "a dead etcd is never noticed");
        sleep(Duration::from_millis(100)).await;
    }
    println!("frozen etcd noticed after {:?}", frozen.elapsed());
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "an outage withdrew a peer");
    etcd.freeze(false);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    running.wait_for_peers(both, Duration::from_secs(11), "not connected again").await;
}

#[tokio::test]
async fn half_open_connection_fails_over_to_other_endpoint() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let spare = Proxy::to(etcd.address());
    spare.set(Mode::Cut);
    let manager = manager(options(&[&proxy.url(), &spare.url()]));
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    spare.set(Mode::Open);
    proxy.set(Mode::Silent);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    let bound = Duration::from_secs(20);
    let took = running.wait_for_peers(both, bound, "a silent path hangs the watch").await;
    println!("half-open path replaced after {took:?}");
}

#[tokio::test]
async fn the_dead_default_endpoint_costs_nothing() {
    let etcd = Etcd::start();
    etcd.ctl(&["put", &format!("{PREFIX}/config"), "{}"]);
    let (_closed, port) = closed_port();
    let dead = format!("http://127.0.0.1:{port}");
    // Accepts connections into its backlog and never says a word.
    let black_hole = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", black_hole.local_addr().unwrap());
    for endpoints in [vec![dead.as_str()], vec![dead.as_str(), silent.as_str()]] {
        let mut endpoints = endpoints;
        let url = etcd.url();
        endpoints.push(&url);
        let manager = manager(options(&endpoints));
        let started = Stopwatch::start();
        manager.network_config().await.expect("the dead endpoint breaks the first call");
        let first = started.elapsed();
        assert!(first < Duration::from_secs(1), "the first call waits {first:?}");
        let started = Stopwatch::start();
        for _ in 0..300 {
            manager.network_config().await.expect("the dead endpoint breaks a later call");
        }
        let each = started.elapsed() / 300;
        println!(
            "beside {} dead endpoints: first call {first:?}, then {each:?}",
            endpoints.len() - 1
        );
        assert_eq!(manager.status().read().store.failures, 0);
    }
    let nobody = manager(options(&[&dead]));
    let error = nobody.network_config().await.unwrap_err().to_string();
    assert!(error.contains(&dead), "the message does not name the endpoint: {error}");
}

#[tokio::test]
async fn lease_lapsed_in_outage_is_retaken_or_dropped() {
    let etcd = Etcd::start();
    let lapse = async |number: u8, meanwhile: &dyn Fn(&str)| {
        let proxy = Proxy::to(etcd.address());
        let manager = manager_at(&proxy.url()).with_timing(short_leases());
        let own = manager.acquire(&network(), &node(number)).await.unwrap();
        let key = path(own.lease.subnets);
        let running = Running::start(manager, own);
        proxy.set(Mode::Cut);
        let cut = Stopwatch::start();
        while etcd.get(&key).is_some() {
            assert!(!cut.is_over(Duration::from_secs(12)), "etcd does not end the lease");
            sleep(Duration::from_millis(100)).await;
        }
        running.assert_running("the end of the lease in an outage ended the daemon");
        meanwhile(&key);
        proxy.set(Mode::Open);
        (running, key, proxy)
    };
    let bound = Duration::from_secs(8);

    let (running, key, _proxy) = lapse(1, &|_| ()).await;
    let open = Stopwatch::start();
    while etcd.get(&key).is_none() {
        assert!(!open.is_over(bound), "the node never gets its free subnet back");
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("the free subnet was not taken again");
    assert!(etcd.lease_of(&key) != 0);

    let theirs = r#"{"PublicIP":"192.0.2.99"}"#;
    let (running, key, _proxy) = lapse(2, &|key| drop(etcd.ctl(&["put", key, theirs]))).await;
    let end = running.end(bound, "two nodes keep one subnet").await;
    assert_eq!(end, End { new_owner: Some(Ipv4Addr::new(192, 0, 2, 99).into()) });
    assert_eq!(etcd.get(&key).unwrap(), theirs, "the new owner's lease was overwritten");
}

#[tokio::test]
async fn write_with_lost_answer_is_found_by_listing() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    proxy.set(Mode::LosesAnswers);
    let manager = manager_at(&proxy.url());
    let error = manager.acquire(&network(), &node(1)).await.unwrap_err();
    let lost = matches!(error, AcquireError::Store(StoreError::Unavailable { .. }));
    assert!(lost, "the answer was not lost: {error}");
    let written = etcd.ctl(&["get", "--prefix", "--keys-only", &subnet_path("")]);
    assert_ne!(written.trim(), "", "the node deleted the key that it had just written");
    proxy.set(Mode::Open);
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(written.trim(), path(own.lease.subnets), "the node left a lease behind");
    assert_ne!(etcd.lease_of(written.trim()), 0, "a lease became a reservation");
}
