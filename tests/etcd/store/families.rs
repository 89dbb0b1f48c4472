//! Nodes with both families: keys as flannel spells them, nobody's subnet twice, and an entry that
//! follows when a family comes or goes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;
use weft::config::network::NetworkConfig;
use weft::control::lease::Peers;
use weft::route::Prefixes;

use crate::store::{PREFIX, Running, SOON, manager_at, network, node, subnet_path};
use crate::support::control::acquire_at_last;
use crate::support::etcd::Etcd;
use crate::support::pace::{Stopwatch, within};

/// Fifteen subnets of IPv6.
const DUAL: &str = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/60"}"#;

fn dual() -> NetworkConfig {
    NetworkConfig::parse(DUAL.as_bytes()).unwrap()
}

fn keys(etcd: &Etcd) -> Vec<Prefixes> {
    let keys = etcd.keys(&format!("{PREFIX}/subnets"));
    let key = |path: &String| Prefixes::from_key(path.rsplit_once('/').unwrap().1).unwrap();
    keys.iter().map(key).collect()
}

#[tokio::test]
async fn nodes_that_start_at_once_share_no_subnet_of_either_family() {
    let etcd = Etcd::start();
    // A node of flannel has one of the fifteen, beside an IPv4 subnet of another length.
    etcd.ctl(&["put", &subnet_path("10.5.9.0-25&fd00:5:0:9::-64"), r#"{"PublicIP":"192.0.2.99"}"#]);
    let url = etcd.url();
    let managers: Vec<_> = (1..=14).map(|number| (node(number), manager_at(&url))).collect();
    let network = dual();
    let acquired = managers.iter().map(|(node, manager)| acquire_at_last(manager, &network, node));
    let acquired = within(SOON, join_all(acquired)).await.expect("some nodes have no subnet");
    let held: BTreeSet<_> = acquired.iter().map(|own| own.lease.subnets).collect();
    let found = keys(&etcd);
    assert_eq!(found.len(), 15, "a lost race left an entry behind: {found:?}");
    for (at, one) in found.iter().enumerate() {
        let others = found[..at].iter().filter(|other| other.overlaps(*one));
        assert_eq!(others.count(), 0, "two nodes have a subnet of {one}: {found:?}");
    }
    assert!(held.iter().all(|subnets| subnets.v4().is_some() && subnets.v6().is_some()));
}

#[tokio::test]
async fn an_entry_follows_the_families_of_the_configuration_in_one_step() {
    let etcd = Etcd::start();
    let before = manager_at(&etcd.url()).acquire(&network(), &node(1)).await.unwrap();
    let own = manager_at(&etcd.url()).acquire(&dual(), &node(1)).await.unwrap();
    assert_eq!(own.lease.v4(), before.lease.v4(), "its pods lost their addresses");
    assert_eq!(own.lease.lifetime, before.lease.lifetime, "an etcd lease was left to lapse");
    assert_eq!(keys(&etcd), [own.lease.subnets]);
    let back = manager_at(&etcd.url()).acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(keys(&etcd), [before.lease.subnets]);
    // One more than before: what others see goes from one entry to the other at once.
    assert_eq!(back.lease.revision, own.lease.revision + 1);
    assert_eq!(own.lease.revision, before.lease.revision + 1);
}

#[tokio::test]
async fn peers_keep_a_node_s_ipv4_subnet_while_a_family_comes_and_goes() {
    let etcd = Etcd::start();
    etcd.ctl(&["put", &format!("{PREFIX}/config"), DUAL]);
    let watcher = manager_at(&etcd.url());
    let own = watcher.acquire(&dual(), &node(1)).await.unwrap();
    let mut watching = Running::start(watcher, own);
    let v4 = manager_at(&etcd.url()).acquire(&network(), &node(2)).await.unwrap().lease.subnets;
    watching.peers.wait_for(|peers| peers.keys().eq([&v4])).await.unwrap();
    let has_v4 = |peers: &Peers| peers.keys().any(|subnets| subnets.v4() == v4.v4());
    let dual = manager_at(&etcd.url()).acquire(&dual(), &node(2)).await.unwrap().lease.subnets;
    for wanted in [dual, v4] {
        // Each set that is published on the way.
        while !watching.peers.borrow_and_update().keys().eq([&wanted]) {
            let next = within(SOON, watching.peers.changed()).await;
            next.expect("the other families are published").unwrap();
            assert!(has_v4(&watching.peers.borrow()), "pods had no way to its IPv4 subnet");
        }
        manager_at(&etcd.url()).acquire(&network(), &node(2)).await.unwrap();
    }
    assert_eq!(dual.v4(), v4.v4());
}

#[tokio::test]
async fn a_lapsed_entry_of_both_families_is_taken_again() {
    let mut etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&dual(), &node(1)).await.unwrap();
    let (key, subnets) = (subnet_path(&own.lease.key), own.lease.subnets);
    let running = Running::start(manager, own);
    etcd.kill();
    etcd.wipe();
    etcd.spawn();
    let watch = Stopwatch::start();
    while etcd.get(&key).is_none() {
        assert!(!watch.is_over(Duration::from_secs(8)), "it is not taken again");
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("a wiped etcd ended the daemon");
    assert_eq!(keys(&etcd), [subnets]);
}
