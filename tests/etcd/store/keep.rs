//! Keeping a subnet and following the others, with other writers, operators and junk around.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::sleep;
use weft::control::error::StoreError;
use weft::control::identity::Phase;
use weft::control::lease::Lease;
use weft::control::rejected::RejectReason;
use weft::control::run::End;
use weft::control::snapshot::Vacancy;
use weft::control::store::etcd::EtcdStore;
use weft::control::store::{Leased, Store};
use weft::control::timing::Timing;

use crate::store::{
    Running, SOON, manager_at, network, node, options, path, short_leases, subnet_path,
};
use crate::support::etcd::Etcd;
use crate::support::pace::Stopwatch;

#[tokio::test]
async fn renewal_causes_no_event_for_others() {
    // Renewed every 3 s, with 9 s to spare on a busy machine.
    let (lease_ttl, renew_margin) = (Duration::from_secs(12), Duration::from_secs(9));
    let timing = Timing { lease_ttl, renew_margin, ..Timing::default() };
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url()).with_timing(timing);
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnets);
    let (id, revision) = (etcd.lease_of(&key), etcd.revision());
    let running = Running::start(manager, own);
    sleep(lease_ttl + Duration::from_secs(2)).await;
    running.assert_running("the lease was not kept");
    let renewals = running.manager.status().read().store.renewals;
    assert!(renewals >= 2, "{renewals} renewals in a life of the lease");
    assert_eq!(etcd.lease_of(&key), id, "the renewal took another etcd lease");
    assert_eq!(etcd.revision(), revision, "each renewal wakes every node of the cluster");
}

#[tokio::test]
async fn another_writer_wins_and_is_named() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url()).with_timing(short_leases());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnets);
    let running = Running::start(manager, own.clone());
    sleep(Duration::from_millis(500)).await;
    let theirs = r#"{"PublicIP":"192.0.2.99","PublicIPv6":null}"#;
    etcd.ctl(&["put", &key, theirs]);
    let end = running.end(SOON, "two nodes keep one subnet").await;
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 99).into());
    assert_eq!(end, End { new_owner });

    // A daemon that slept through it finds out before it writes.
    let timing = Timing { renew_margin: Duration::from_secs(3600), ..short_leases() };
    let sleeper = manager_at(&etcd.url()).with_timing(timing);
    let running = Running::start(sleeper, own);
    assert_eq!(running.end(SOON, "a lost subnet is kept").await, End { new_owner });
    assert_eq!(etcd.get(&key).unwrap(), theirs, "the new owner's lease was overwritten");
}

#[tokio::test]
async fn every_write_compares_the_revision() {
    let etcd = Etcd::start();
    let store = leased(&etcd);
    let ttl = Duration::from_secs(100);
    let subnet = "10.5.1.0/24".parse().unwrap();
    let wanted = |number| Lease::wanted(subnet, node(number));
    let free = Vacancy::default();
    let held = store.create(&wanted(1), &free, ttl, Phase::Runs).await.unwrap().lease;
    let assert_conflict = |result: Result<(), StoreError>, write: &str| {
        let conflict = matches!(result, Err(StoreError::Conflict(_)));
        assert!(conflict, "{write} took a subnet from its owner: {result:?}");
    };
    let created = store.create(&wanted(2), &free, ttl, Phase::Starts).await;
    assert_conflict(created.map(drop), "creating");
    let renewed = store.renew(&held, ttl).await.unwrap().lease;
    assert_eq!(renewed.revision, held.revision);

    let key = path(subnet);
    let mut leases = String::new();
    for value in [r#"{"PublicIP":"192.0.2.99"}"#, r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#] {
        // The second looks just like ours: it is another one's all the same.
        etcd.ctl(&["put", &key, value]);
        assert_conflict(store.write(&held, ttl, Phase::Runs).await.map(drop), "updating");
        assert_conflict(store.renew(&held, ttl).await.map(drop), "renewing");
        // A renewal that needs another etcd lease writes, and must be conditional as well.
        assert_conflict(store.renew(&held, 2 * ttl).await.map(drop), "renewing for longer");
        assert_conflict(store.delete(&held).await, "deleting");
        assert_eq!(etcd.get(&key).as_deref(), Some(value), "the owner's lease was changed");
        // One that was granted for a write that lost serves the next.
        let before = std::mem::replace(&mut leases, etcd.ctl(&["lease", "list"]));
        assert!(before.is_empty() || before == leases, "each conflict leaves one: {leases}");
    }
}

fn leased(etcd: &Etcd) -> Leased {
    Leased::Etcd(Box::new(EtcdStore::new(&options(&[&etcd.url()])).unwrap()))
}

/// A place for a new entry, as the store looks now.
async fn listed(etcd: &Etcd) -> Vacancy {
    Store::Leased(leased(etcd)).list().await.unwrap().vacancy(None)
}

/// flannel's dual-stack nodes hold their IPv4 subnet by a key that names the IPv6 one too.
#[tokio::test]
async fn a_dual_stack_nodes_subnet_is_not_given_away() {
    let etcd = Etcd::start();
    let store = leased(&etcd);
    let ttl = Duration::from_secs(100);
    let theirs = subnet_path("10.5.1.0-24&fd00:5:1::-64");
    etcd.ctl(&["put", &theirs, r#"{"PublicIP":"192.0.2.9","PublicIPv6":"fd01::9"}"#]);
    let write = |subnet: &str, number| {
        let lease = Lease::wanted(subnet.parse().unwrap(), node(number));
        async { store.create(&{ lease }, &Vacancy::default(), ttl, Phase::Starts).await }
    };
    let taken = write("10.5.1.0/24", 1).await;
    assert!(matches!(taken, Err(StoreError::Conflict(_))), "two nodes have a subnet: {taken:?}");
    let neighbour = write("10.5.10.0/24", 1).await.expect("another subnet is free");
    etcd.ctl(&["del", &theirs]);
    write("10.5.1.0/24", 2).await.expect("the dual-stack node has gone");
    // What one holds already stays one's own.
    etcd.ctl(&["put", &subnet_path("10.5.10.0-24&fd00:5:a::-64"), r#"{"PublicIP":"192.0.2.9"}"#]);
    store.renew(&neighbour.lease, 2 * ttl).await.expect("the lease that was there first");
    // A node that has IPv6 itself can't tell by keys who has an IPv6 subnet.
    let dual = Lease::wanted("10.5.7.0/24,fd00:5:7::/64".parse().unwrap(), node(3));
    let vacancy = listed(&etcd).await;
    etcd.ctl(&["put", &subnet_path("10.5.99.0-24&fd00:5:7::-64"), r#"{"PublicIP":"192.0.2.9"}"#]);
    let late = store.create(&dual, &vacancy, ttl, Phase::Starts).await;
    assert!(matches!(late, Err(StoreError::Conflict(_))), "two nodes have a subnet: {late:?}");
    let vacancy = listed(&etcd).await;
    store.create(&dual, &vacancy, ttl, Phase::Starts).await.expect("nobody wrote since");
}

/// A node that was stopped between its listing and its write, while etcd lost its data: the
/// revisions of the new one are below those of the listing, and say nothing.
#[tokio::test]
async fn a_listing_of_a_lost_history_gives_no_subnet() {
    let ttl = Duration::from_secs(100);
    let dual = |subnets: &str, number| Lease::wanted(subnets.parse().unwrap(), node(number));
    let (before, after) = (Etcd::start(), Etcd::start());
    // Its revisions are far ahead, and the last one is that of a node which is back in the other.
    for number in 0..20 {
        before.ctl(&["put", &subnet_path("10.5.1.0-24"), &format!("not yet {number}")]);
    }
    before.ctl(&["del", &subnet_path("10.5.1.0-24")]);
    let back = dual("10.5.1.0/24,fd00:5:1::/64", 1);
    for etcd in [&before, &after] {
        let vacancy = listed(etcd).await;
        let created = leased(etcd).create(&back, &vacancy, ttl, Phase::Starts).await;
        created.expect("a store without leases");
    }
    let stale = listed(&before).await;
    let (new, vacancy) = (leased(&after), listed(&after).await);
    let other = dual("10.5.2.0/24,fd00:5:7::/64", 2);
    new.create(&other, &vacancy, ttl, Phase::Starts).await.expect("nobody wrote since");
    let late = dual("10.5.3.0/24,fd00:5:7::/64", 3);
    let created = new.create(&late, &stale, ttl, Phase::Runs).await;
    assert!(matches!(created, Err(StoreError::Conflict(_))), "two have a subnet: {created:?}");
}

#[tokio::test]
async fn an_operator_can_revoke() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnets);
    let mut running = Running::start(manager, own);
    // The first may be in the listing before the watch; what follows it, the watch alone tells.
    // What is deleted before the watch is open has lapsed, and is taken again.
    for peer in ["192.0.2.2", "192.0.2.3"] {
        let key = subnet_path("10.5.0.0-28");
        etcd.ctl(&["put", &key, &format!(r#"{{"PublicIP":"{peer}"}}"#)]);
        running.wait_for_peers(&[peer], SOON, "the watch does not work").await;
    }
    etcd.ctl(&["del", &key]);
    let end = running.end(SOON, "a revoked node keeps its subnet").await;
    assert_eq!(end, End { new_owner: None });
    assert_eq!(etcd.get(&key), None, "the revoked lease came back");
}

#[tokio::test]
async fn peers_come_move_and_go() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own);
    let put = |key: &str, value: &str| etcd.ctl(&["put", &subnet_path(key), value]);
    put("10.5.0.0-28", r#"{"PublicIP":"192.0.2.2"}"#);
    running.wait_for_peers(&["192.0.2.2"], SOON, "a new node is unreachable").await;
    put("10.5.0.0-28", r#"{"PublicIP":"192.0.2.3"}"#);
    running.wait_for_peers(&["192.0.2.3"], SOON, "traffic goes to where a node was").await;
    put("10.5.0.16-28&fd00:5::-64", r#"{"PublicIP":"192.0.2.4","PublicIPv6":"fd00::4"}"#);
    let both = &["192.0.2.3", "192.0.2.4"];
    running.wait_for_peers(both, SOON, "a dual-stack flannel node is unreachable").await;
    etcd.ctl(&["del", &subnet_path("10.5.0.0-28")]);
    running.wait_for_peers(&["192.0.2.4"], SOON, "a route to a gone node stays").await;
}

#[tokio::test]
async fn junk_beside_good_leases_harms_nobody() {
    let etcd = Etcd::start();
    let put = |key: &str, value: &str| etcd.ctl(&["put", &subnet_path(key), value]);
    let good = r#"{"PublicIP":"192.0.2.2"}"#;
    put("10.5.0.0-28", good);
    put("hello", good);
    put("10.12.13.0-24hi", good);
    put("10.5.0.300-24", good);
    put("10.5.0.16-28", "not json");
    put("10.5.0.32-28", r#"{"PublicIP":"nowhere"}"#);
    put("10.5.0.48-28", "{}");
    put("10.6.0.0-24", good);
    let mut huge = br#"{"PublicIP":"192.0.2.3","BackendData":""#.to_vec();
    huge.resize(1024 * 1024, b'x');
    huge.extend_from_slice(b"\"}");
    for number in 0..6 {
        etcd.put_from_stdin(&subnet_path(&format!("10.5.0.{}-28", 64 + 16 * number)), &huge);
    }
    put("10.5.0.240-28", r#"{"PublicIP":"192.0.2.4"}"#);

    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.expect("junk keeps nodes from starting");
    let mut running = Running::start(manager, own);
    let good_peers = &["192.0.2.2", "192.0.2.4"];
    running.wait_for_peers(good_peers, SOON, "junk in the store hides good nodes").await;
    let status = running.manager.status();
    for (reason, count) in [
        (RejectReason::BadKey, 3),
        (RejectReason::BadValue, 2),
        (RejectReason::TooLarge, 6),
        (RejectReason::BadAddress, 1),
        (RejectReason::OutsideNetwork, 1),
    ] {
        let counted = status.read().store.rejected.get(reason.name()).copied().unwrap_or(0);
        assert_eq!(counted, count, "{} is not counted", reason.name());
    }

    // The same as events.
    put("10.5.0.0-28", "junk now");
    put("world", good);
    etcd.put_from_stdin(&subnet_path("10.5.0.176-28"), &huge);
    put("10.5.0.192-28", r#"{"PublicIP":"192.0.2.5"}"#);
    let good_peers = &["192.0.2.4", "192.0.2.5"];
    running.wait_for_peers(good_peers, SOON, "junk in the watch hides good nodes").await;
    running.assert_running("junk ended the daemon");
    assert_eq!(status.read().store.rejected[RejectReason::TooLarge.name()], 7);

    // Somebody cleans up.
    let unused = || status.read().store.unused.values().sum::<u64>();
    assert!(unused() >= 14, "{:?}", status.read().store.unused);
    put("10.5.0.0-28", good);
    for key in ["hello", "10.12.13.0-24hi", "10.5.0.300-24", "10.6.0.0-24", "world"] {
        etcd.ctl(&["del", &subnet_path(key)]);
    }
    for number in [16, 32, 48, 64, 80, 96, 112, 128, 144, 176] {
        etcd.ctl(&["del", &subnet_path(&format!("10.5.0.{number}-28"))]);
    }
    let good_peers = &["192.0.2.2", "192.0.2.4", "192.0.2.5"];
    running.wait_for_peers(good_peers, SOON, "an entry that was corrected stays unused").await;
    let watch = Stopwatch::start();
    while unused() > 0 {
        assert!(!watch.is_over(SOON), "cleaned up, and told of: {:?}", status.read().store.unused);
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn unparsable_own_entry_is_rewritten() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnets);
    let running = Running::start(manager, own);
    sleep(Duration::from_millis(300)).await;
    etcd.ctl(&["put", &key, "oops"]);
    let watch = Stopwatch::start();
    while etcd.get(&key).as_deref() != Some(r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#) {
        assert!(!watch.is_over(SOON), "a slip of the operator's pen cuts the node off");
        sleep(Duration::from_millis(50)).await;
    }
    assert_ne!(etcd.lease_of(&key), 0, "the repaired lease would never end");
    running.assert_running("a slip of the operator's pen ended the daemon");
}
