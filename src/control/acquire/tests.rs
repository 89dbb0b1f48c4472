//! Acquiring on stores in memory and on disk: takeover, races, a full network.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use futures_util::future::join_all;

use super::*;
use crate::config::whole_file::FileError;
use crate::control::choose::tests::config;
use crate::control::identity::NodeIdentity;
use crate::control::lease::Lifetime;
use crate::control::store::local::LocalStore;
use crate::control::store::memory::MemoryStore;
use crate::control::timing::Timing;

fn manager(store: &MemoryStore, previous: Option<&str>) -> SubnetManager {
    let previous = previous.map(|text| text.parse().unwrap());
    SubnetManager::over(Store::Leased(Leased::Memory(store.clone())), previous)
}

fn network() -> NetworkConfig {
    config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0")
}

fn node(number: usize) -> LeaseAttributes {
    let number = u32::try_from(number).unwrap();
    LeaseAttributes::udp(Ipv4Addr::from_bits(0xC633_6400 + number))
}

const LEASED: Lifetime = Lifetime::Leased { id: 5, expires_unix: None };

#[tokio::test]
async fn own_lease_is_taken_over_with_lifetime() {
    let store = MemoryStore::new();
    let old = br#"{"PublicIP":"198.51.100.1","BackendType":"vxlan"}"#;
    store.put("10.5.7.0-24", old, LEASED);
    let own = manager(&store, Some("10.5.9.0/24")).acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(own.lease.subnets.key(), "10.5.7.0-24", "the lease in the store outranks the file");
    let (value, lifetime) = store.get("10.5.7.0-24").unwrap();
    assert_eq!(value, r#"{"PublicIP":"198.51.100.1","PublicIPv6":null}"#);
    assert_eq!(lifetime, LEASED);
    assert!(own.expires.is_some());

    store.put("10.5.8.0-24", br#"{"PublicIP":"198.51.100.2"}"#, Lifetime::Reservation);
    let own = manager(&store, None).acquire(&network(), &node(2)).await.unwrap();
    assert_eq!((own.lease.subnets.key().as_str(), own.expires), ("10.5.8.0-24", None));
    assert_eq!(store.get("10.5.8.0-24").unwrap().1, Lifetime::Reservation);
}

#[tokio::test]
async fn incompatible_lease_is_replaced() {
    let store = MemoryStore::new();
    store.put("10.5.16.0-20", br#"{"PublicIP":"198.51.100.1"}"#, LEASED);
    let own = manager(&store, None).acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(own.lease.v4().unwrap().length_bits(), 24);
    assert_eq!(store.keys(), [own.lease.key], "the old lease stays");
}

#[tokio::test]
async fn previous_subnet_is_used_if_free_and_compatible() {
    let acquired = async |previous: &str, taken: Option<&str>| {
        let store = MemoryStore::new();
        if let Some(taken) = taken {
            store.put(taken, br#"{"PublicIP":"198.51.100.9"}"#, LEASED);
        }
        let own = manager(&store, Some(previous)).acquire(&network(), &node(1)).await.unwrap();
        if let Some(taken) = taken {
            let theirs = store.get(taken).unwrap().0;
            assert_eq!(theirs, r#"{"PublicIP":"198.51.100.9"}"#, "a subnet was stolen");
        }
        own.lease.subnets.to_string()
    };
    assert_eq!(acquired("10.5.200.0/24", None).await, "10.5.200.0/24");
    assert_ne!(acquired("10.5.200.0/24", Some("10.5.200.0-24")).await, "10.5.200.0/24");
    assert_ne!(acquired("10.5.200.0/24", Some("10.5.192.0-20")).await, "10.5.200.0/24");
    for incompatible in ["10.5.200.0/25", "10.6.200.0/24", "10.5.0.0/24"] {
        assert_ne!(acquired(incompatible, None).await, incompatible);
    }
}

#[tokio::test]
async fn unreadable_own_entry_does_not_stop_start() {
    for key in ["10.5.200.0-24", "10.5.200.0-24&fd00:5:200::-64"] {
        let store = MemoryStore::new();
        store.put(key, b"junk", LEASED);
        let acquiring = manager(&store, Some("10.5.200.0/24"));
        let own = acquiring.acquire(&network(), &node(1)).await.expect("it races against junk");
        assert_ne!(own.lease.subnets.to_string(), "10.5.200.0/24");
        assert_eq!(acquiring.status().read().conflicts, 0, "junk was taken for a free subnet");
        assert_eq!(store.get(key).unwrap().0, "junk");
    }
}

#[tokio::test]
async fn unreadable_entries_are_taken_subnets() {
    let store = MemoryStore::new();
    let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.3.0");
    store.put("10.5.1.0-24", b"junk", LEASED);
    store.put("10.5.3.0-24", b"{", LEASED);
    let own = manager(&store, None).acquire(&network, &node(1)).await.unwrap();
    assert_eq!(own.lease.subnets.to_string(), "10.5.2.0/24");
    let error = manager(&store, None).acquire(&network, &node(2)).await.unwrap_err();
    assert!(matches!(error, AcquireError::Exhausted { .. }), "{error}");
}

#[tokio::test]
async fn keys_that_lie_outside_or_cover_the_network_take_nothing() {
    for key in ["0.0.0.0-0", "0.0.0.0-0&fc00::-64", "10.0.0.0-8", "10.5.0.0-16", "10.6.0.0-16"] {
        for value in [br#"{"PublicIP":"198.51.100.9"}"#.as_slice(), b"junk"] {
            let store = MemoryStore::new();
            store.put(key, value, LEASED);
            let joining = manager(&store, Some("10.5.7.0/24"));
            let own = joining.acquire(&network(), &node(1)).await.expect("a foreign key denies it");
            assert_eq!(own.lease.key, "10.5.7.0-24", "beside {key}");
        }
    }
}

#[tokio::test]
async fn full_network_is_a_passing_error() {
    let store = MemoryStore::new();
    let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.3.0");
    for number in 1..=3 {
        manager(&store, None).acquire(&network, &node(number)).await.unwrap();
    }
    let error = manager(&store, None).acquire(&network, &node(4)).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("10.5.1.0/24") && text.contains("10.5.3.0/24"), "{text}");
    store.remove("10.5.2.0-24");
    let own = manager(&store, None).acquire(&network, &node(4)).await.unwrap();
    assert_eq!(own.lease.subnets.to_string(), "10.5.2.0/24");
}

/// All nodes list before any of them writes, so that the first round is one great collision.
async fn storm(nodes: usize, network: NetworkConfig) {
    let store = MemoryStore::new();
    let managers: Vec<_> = (0..nodes).map(|_| manager(&store, None)).collect();
    let network = &network;
    let acquired = join_all(
        managers
            .iter()
            .enumerate()
            .map(|(number, manager)| async move { manager.acquire(network, &node(number)).await }),
    )
    .await;
    let subnets = acquired.into_iter().map(|own| own.expect("a node gave up").lease.subnets);
    let subnets: Vec<_> = subnets.collect();
    let v4: BTreeSet<_> = subnets.iter().map(|it| it.v4()).collect();
    assert_eq!(v4.len(), nodes, "two nodes share a subnet");
    let v6: BTreeSet<_> = subnets.iter().map(|it| it.v6()).collect();
    assert_eq!(v6.len(), network.v6().map_or(1, |_| nodes), "two nodes share an IPv6 subnet");
    assert_eq!(store.keys().len(), nodes);
    let calls = store.calls() as usize / nodes;
    assert!(calls <= 40, "{calls} requests for each node");
}

#[tokio::test]
async fn storms_of_daemons_all_succeed() {
    storm(12, network()).await;
    storm(100, network()).await;
    storm(1000, config("10.0.0.0/8", 24, "10.0.1.0", "10.255.255.0")).await;
    let wide = dual().ranges.map(
        |range| range,
        |range| SubnetRange {
            network: "fd00:5::/48".parse().unwrap(),
            subnet_max: "fd00:5:0:ffff::".parse().unwrap(),
            ..range
        },
    );
    storm(100, NetworkConfig { ranges: wide, ..network() }).await;
}

#[tokio::test]
async fn last_nodes_get_last_subnets() {
    storm(100, config("10.5.0.0/16", 24, "10.5.1.0", "10.5.100.0")).await;
}

#[tokio::test]
async fn store_that_is_down_can_be_retried() {
    let store = MemoryStore::new();
    store.set_down(true);
    let waiting = manager(&store, None);
    let error = waiting.acquire(&network(), &node(1)).await.unwrap_err();
    assert!(matches!(error, AcquireError::Store(StoreError::Unavailable { .. })), "{error}");
    assert!(!waiting.status().read().store.up);
    store.set_down(false);
    let own = waiting.acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(store.keys(), [own.lease.key]);
}

#[tokio::test]
async fn a_write_without_answer_is_found_again() {
    let store = MemoryStore::new();
    store.lose_answers(1);
    let starting = manager(&store, None);
    starting.acquire(&network(), &node(1)).await.expect_err("the answer is lost");
    let own = starting.acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(store.keys(), [own.lease.key], "the node left a lease behind");
    assert_eq!(own.lease.attributes, node(1));
}

#[tokio::test]
async fn daemons_on_one_directory_never_share_a_subnet() {
    let directory = tempfile::tempdir().unwrap();
    let root = Arc::new(directory.path().to_path_buf());
    let nodes = 40;
    // A thread for each, with a runtime and a store of its own, as processes would have.
    let threads: Vec<_> = (0..nodes)
        .map(|number| {
            let root = Arc::clone(&root);
            std::thread::spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let store = LocalStore::open(root.to_path_buf()).await.unwrap();
                    let store = Leased::Local(store);
                    let manager = SubnetManager::over(Store::Leased(store), None);
                    let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.45.0");
                    loop {
                        match manager.acquire(&network, &node(number)).await {
                            // Forty writers, on a machine without time: a daemon tries again.
                            Err(AcquireError::Store(StoreError::File(FileError::Io {
                                operation: "lock",
                                ..
                            }))) => {}
                            result => return result.map(|own| own.lease.subnets),
                        }
                    }
                })
            })
        })
        .collect();
    let subnets: BTreeSet<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap().expect("a daemon gave up"))
        .collect();
    assert_eq!(subnets.len(), nodes, "two daemons share a subnet");
    let files = std::fs::read_dir(root.join("subnets")).unwrap().count();
    assert_eq!(files, nodes, "something was left behind");
}

#[tokio::test]
async fn a_claim_that_cannot_be_made_is_made_once_it_can_be() {
    let directory = tempfile::tempdir().unwrap();
    let in_the_way = directory.path().join("weft");
    std::fs::write(&in_the_way, "a file in the way").unwrap();
    let store = LocalStore::open(directory.path().to_path_buf()).await.unwrap();
    let mut store = Leased::Local(store);
    store.claim_as(NodeIdentity::default());
    let timing = Timing { claim_ttl: Duration::from_millis(300), ..Timing::default() };
    let manager = SubnetManager::over(Store::Leased(store), None).with_timing(timing);
    manager.acquire(&network(), &node(1)).await.expect("a claim is no reason not to start");
    assert!(manager.status().read().claim_refusal.is_some());
    std::fs::remove_file(&in_the_way).unwrap();
    let (_, attributes) = tokio::sync::watch::channel(node(1));
    let (_, peers) = tokio::sync::watch::channel(Arc::default());
    let leased = manager.store.leased().unwrap();
    let claimed = async {
        while manager.status().read().claim_refusal.is_some() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let claimed = tokio::time::timeout(Duration::from_secs(60), claimed);
    tokio::select! {
        _ = manager.keep_claim(leased, attributes, peers) => {}
        claimed = claimed => claimed.expect("it gave up the claim after the first error"),
    }
    assert!(in_the_way.join("nodes").join(node(1).node_address().to_string()).exists());
}

/// The network of the others, with IPv6 as well: four subnets of it.
fn dual() -> NetworkConfig {
    let mut config = serde_json::to_value(network().to_json()).unwrap();
    config["EnableIPv6"] = true.into();
    config["IPv6Network"] = "fd00:5::/62".into();
    config["IPv6SubnetMin"] = "fd00:5::".parse::<std::net::Ipv6Addr>().unwrap().to_string().into();
    NetworkConfig::parse(config.to_string().as_bytes()).unwrap()
}

fn subnets(text: &str) -> Prefixes {
    text.parse().unwrap()
}

#[tokio::test]
async fn an_entry_follows_the_families_of_the_configuration() {
    let store = MemoryStore::new();
    store.put("10.5.7.0-24", br#"{"PublicIP":"198.51.100.1"}"#, LEASED);
    store.put("10.5.9.0-24&fd00:5::-64", br#"{"PublicIP":"198.51.100.9"}"#, LEASED);
    let own = manager(&store, None).acquire(&dual(), &node(1)).await.unwrap();
    let (v4, v6) = (own.lease.v4().unwrap(), own.lease.subnets.v6().unwrap());
    assert_eq!(v4.to_string(), "10.5.7.0/24", "pods lost their addresses");
    assert_ne!(v6.to_string(), "fd00:5::/64", "two nodes have one subnet");
    assert_eq!(store.keys().len(), 2, "one node has two leases: {:?}", store.keys());
    assert_eq!(store.get(&own.lease.key).unwrap().1, LEASED, "it has another lease of etcd");
    let back = manager(&store, None).acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(back.lease.key, "10.5.7.0-24");
    assert_eq!(store.keys(), ["10.5.7.0-24", "10.5.9.0-24&fd00:5::-64"]);
}

#[tokio::test]
async fn a_family_that_goes_takes_no_subnet_from_another_entry() {
    for theirs in [r#"{"PublicIP":"198.51.100.9"}"#, "junk"] {
        let store = MemoryStore::new();
        store.put("10.5.7.0-24&fd00:5::-64", br#"{"PublicIP":"198.51.100.1"}"#, LEASED);
        // flannel compares its own key alone.
        store.put("10.5.7.0-24", theirs.as_bytes(), LEASED);
        let own = manager(&store, None).acquire(&network(), &node(1)).await;
        let own = own.expect("it tries for ever").lease.subnets;
        assert!(!own.overlaps(subnets("10.5.7.0/24")), "two nodes have one subnet");
        assert_eq!(store.get("10.5.7.0-24").unwrap().0, theirs, "a subnet was stolen");
        assert_eq!(store.keys().len(), 2, "one node has two leases: {:?}", store.keys());
    }
}

#[tokio::test]
async fn a_reservation_stays_one_with_another_family() {
    let store = MemoryStore::new();
    store.put("10.5.7.0-24", br#"{"PublicIP":"198.51.100.1"}"#, Lifetime::Reservation);
    let own = manager(&store, None).acquire(&dual(), &node(1)).await.unwrap();
    assert_eq!((own.expires, own.lease.lifetime), (None, Lifetime::Reservation));
    assert_eq!(store.get(&own.lease.key).unwrap().1, Lifetime::Reservation);
}

#[tokio::test]
async fn the_last_run_s_subnet_is_kept_when_a_family_comes() {
    let store = MemoryStore::new();
    let previous = Some("10.5.7.0/24");
    let own = manager(&store, previous).acquire(&dual(), &node(1)).await.unwrap();
    assert_eq!(own.lease.v4(), subnets("10.5.7.0/24").v4());
    let previous = "10.5.8.0/24,fd00:5:0:3::/64";
    let other = manager(&store, Some(previous)).acquire(&dual(), &node(2)).await;
    let other = other.unwrap().lease.subnets;
    let expected = match own.lease.subnets.v6() == subnets("fd00:5:0:3::/64").v6() {
        true => other.v4() != own.lease.v4(),
        false => other == subnets(previous),
    };
    assert!(expected, "{other} beside {}", own.lease.subnets);
}

#[tokio::test]
async fn a_family_that_the_entry_lost_has_the_last_runs_subnet_again() {
    for (other, is_free) in [("10.5.9.0-24", true), ("10.5.9.0-24&fd00:5:0:2::-64", false)] {
        let store = MemoryStore::new();
        store.put("10.5.7.0-24", br#"{"PublicIP":"198.51.100.1"}"#, LEASED);
        store.put(other, br#"{"PublicIP":"198.51.100.9"}"#, LEASED);
        let previous = "10.5.7.0/24,fd00:5:0:2::/64";
        let own = manager(&store, Some(previous)).acquire(&dual(), &node(1)).await.unwrap();
        let got = own.lease.subnets;
        assert_eq!(got.v4(), subnets(previous).v4(), "pods lost their IPv4 addresses");
        assert_eq!(got.v6() == subnets(previous).v6(), is_free, "{got} beside {other}");
    }
}

#[tokio::test]
async fn nodes_that_start_at_once_share_no_subnet_of_either_family() {
    for _ in 0..50 {
        let store = MemoryStore::new();
        let acquire = async |number: usize| {
            let attributes = node(number);
            let acquired = manager(&store, None).acquire(&dual(), &attributes).await;
            acquired.map(|own| own.lease.subnets)
        };
        let numbers = (1..=6).map(acquire);
        let acquired = join_all(numbers).await;
        let held: Vec<_> = acquired.iter().filter_map(|it| it.as_ref().ok()).collect();
        assert_eq!(held.len(), 4, "there are four subnets of IPv6: {acquired:?}");
        for (at, one) in held.iter().enumerate() {
            assert!(!held[..at].iter().any(|other| other.overlaps(**one)), "{held:?}");
        }
        let exhausted = acquired.iter().filter_map(|it| it.as_ref().err());
        assert!(exhausted.into_iter().all(|it| matches!(it, AcquireError::Exhausted(..))));
    }
}
