//! Nodes with both families: keys as flannel spells them, nobody's subnet twice, and an entry that
//! follows when a family comes or goes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;
use weft::backend_kind::BackendKind;
use weft::config::network::NetworkConfig;
use weft::control::identity::NodeIdentity;
use weft::control::lease::{LeaseAttributes, Peers};
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

/// Fifteen subnets, of IPv6 alone.
const ALONE: &str = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:5::/60",
    "Backend":{"Type":"host-gw"}}"#;

fn alone() -> NetworkConfig {
    NetworkConfig::parse(ALONE.as_bytes()).unwrap()
}

fn node_v6(number: u8) -> LeaseAttributes {
    let address = format!("fd99::{number}").parse().unwrap();
    LeaseAttributes::at(BackendKind::HostGw, None, Some(address))
}

#[tokio::test]
async fn nodes_without_ipv4_are_told_apart_by_their_ipv6_addresses() {
    let etcd = Etcd::start();
    // As a node of flannel writes it: whoever goes by PublicIP takes this one.
    let theirs = r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::99","BackendType":"host-gw"}"#;
    etcd.ctl(&["put", &subnet_path("0.0.0.0-0&fd00:5:0:9::-64"), theirs]);
    let (url, network) = (etcd.url(), alone());
    let managers: Vec<_> = (1..=3).map(|number| (node_v6(number), manager_at(&url))).collect();
    let acquired = managers.iter().map(|(node, manager)| acquire_at_last(manager, &network, node));
    let acquired = within(SOON, join_all(acquired)).await.expect("some nodes have no subnet");
    let found = keys(&etcd);
    let all: BTreeSet<_> = found.iter().map(|subnets| subnets.v6()).collect();
    assert_eq!((found.len(), all.len()), (4, 4), "two nodes share a subnet: {found:?}");
    for own in &acquired {
        let value = etcd.get(&subnet_path(&own.lease.key)).unwrap();
        assert!(value.starts_with(r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::"#), "{value}");
    }
    // Each starts again, and has the subnet that it had, with no file that says so.
    for (own, number) in acquired.iter().zip(1..) {
        let again = manager_at(&url).acquire(&network, &node_v6(number)).await.unwrap();
        assert_eq!(again.lease.subnets, own.lease.subnets, "its pods lost their addresses");
    }
    assert_eq!(keys(&etcd).len(), 4, "a restart left an entry behind");
    // And knows the others.
    etcd.ctl(&["put", &format!("{PREFIX}/config"), ALONE]);
    let [(_, manager), ..] = <[_; 3]>::try_from(managers).ok().unwrap();
    let mut running = Running::start(manager, acquired.into_iter().next().unwrap());
    let others = ["fd99::2", "fd99::3", "fd99::99"];
    running.wait_for_peers(&others, SOON, "nodes without IPv4 are no peers").await;
}

#[tokio::test]
async fn of_two_nodes_with_one_ipv6_address_one_gets_a_subnet() {
    let etcd = Etcd::start();
    let network = alone();
    for number in 1..=20 {
        let of = |name: &str| {
            manager_at(&etcd.url()).with_identity(NodeIdentity {
                hostname: name.to_owned(),
                machine_id: Some(format!("machine of {name}")),
                boot_id: format!("boot of {name}"),
            })
        };
        let (a, b, attributes) = (of("node-a"), of("node-b"), node_v6(number));
        let _connected = tokio::join!(a.network_config(), b.network_config());
        let (of_a, of_b) =
            tokio::join!(a.acquire(&network, &attributes), b.acquire(&network, &attributes));
        let refusal = match (of_a, of_b) {
            (Ok(own), Err(refusal)) | (Err(refusal), Ok(own)) => {
                let address = attributes.node_address();
                let claim = etcd.get(&format!("{PREFIX}/weft/nodes/{address}"));
                assert!(claim.is_some(), "the address is not claimed");
                // Room for the next two.
                etcd.ctl(&["del", &subnet_path(&own.lease.key)]);
                refusal
            }
            both => panic!("one of two with one address gets a subnet: {both:?}"),
        };
        let refusal = format!("{:#}", std::error::Error::source(&refusal).unwrap_or(&refusal));
        assert!(refusal.contains(&format!("fd99::{number}")), "not its cause: {refusal}");
    }
}

#[tokio::test]
async fn a_subnet_is_reserved_for_an_ipv6_address() {
    let etcd = Etcd::start();
    etcd.ctl(&["put", &format!("{PREFIX}/config"), ALONE]);
    let operator = manager_at(&etcd.url());
    let subnets: Prefixes = "fd00:5:0:7::/64".parse().unwrap();
    let v4 = operator.reserve(subnets, "192.0.2.7".parse().unwrap()).await;
    assert!(v4.is_err(), "no node is known by an IPv4 address here");
    operator.reserve(subnets, "fd99::7".parse().unwrap()).await.expect("the subnet is free");
    let own = manager_at(&etcd.url()).acquire(&alone(), &node_v6(7)).await.unwrap();
    assert_eq!(own.lease.subnets, subnets, "the reservation is not its own");
    let other = manager_at(&etcd.url()).acquire(&alone(), &node_v6(8)).await.unwrap();
    assert!(!other.lease.subnets.overlaps(subnets), "reserved for another");
}
