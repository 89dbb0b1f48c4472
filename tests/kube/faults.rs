//! An API in trouble: what its watches, lists and errors do to the peers, which is nothing that
//! the network needs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;
use weft::config::network::NetworkConfig;
use weft::control::rejected::RejectReason;
use weft::control::run::Held;
use weft::control::timing::Timing;

use crate::support::kube_api::{Fault, KubeApi, PREFIX, What, flannel_node, node};
use crate::support::pace::{Stopwatch, within};
use crate::support::proxy::{Mode, Proxy};
use crate::{Host, NET_CONF, SOON, control, eventually};

/// Peers know a new address within this time.
const CONVERGE: Duration = Duration::from_secs(2);

/// A watch that ends within its first second counts as a failure. The node may learn later than the
/// API that it is open.
const SERVED: Duration = Duration::from_secs(2);

/// A cluster with the own Node n1 and others, and its follower.
async fn cluster(others: u8, timing: Timing) -> (KubeApi, control::Running) {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    for number in 2..2 + others {
        api.put_node(&other(number));
    }
    let running = Host::with_timing(&api, "n1", timing).await.start(1).await;
    (api, running)
}

fn other(number: u8) -> serde_json::Value {
    let (name, cidr) = (format!("n{number}"), format!("10.244.{number}.0/24"));
    flannel_node(&name, &cidr, &format!("192.0.2.{number}"))
}

#[tokio::test]
async fn nodes_come_change_and_go() {
    let (api, mut running) = cluster(1, Timing::default()).await;
    running.wait_for_peers(&["192.0.2.2"], SOON, "the first listing").await;
    api.put_node(&other(3));
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "a Node joined").await;
    // One without flannel, and one without a subnet, are nobody's peers.
    api.put_node(&node("bare", Some("10.244.9.0/24")));
    api.edit("n3", |node| {
        node["metadata"]["annotations"][format!("{PREFIX}public-ip")] = "192.0.2.33".into();
    });
    running.wait_for_peers(&["192.0.2.2", "192.0.2.33"], SOON, "a Node moved").await;
    api.edit("n3", |node| {
        let annotations = node["metadata"]["annotations"].as_object_mut().unwrap();
        annotations.remove(&format!("{PREFIX}kube-subnet-manager"));
    });
    running.wait_for_peers(&["192.0.2.2"], SOON, "a Node lost its marker").await;
    api.put_node(&other(3));
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "and got it back").await;
    api.delete_node("n2");
    running.wait_for_peers(&["192.0.2.3"], SOON, "a Node was deleted").await;
    assert_eq!(api.seen(What::List).len(), 1, "listed although the watch told everything");
}

#[tokio::test]
async fn large_cluster_is_listed_in_consistent_pages() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    for number in 0..1200_u16 {
        let [high, low] = number.to_be_bytes();
        let cidr = format!("10.244.{}.{}/28", 16 + (number >> 4), (number & 15) << 4);
        let node = flannel_node(&format!("m{number:04}"), &cidr, &format!("192.1.{high}.{low}"));
        api.put_node(&node);
    }
    let mut running = Host::new(&api, "n1").await.start(1).await;
    let all = running.peers.wait_for(|peers| peers.len() == 1200);
    within(SOON, all).await.expect("not all Nodes are peers").unwrap();
    assert_eq!((api.seen(What::List).len(), api.seen(What::NextPage).len()), (1, 4));
    // The server forgets the version in the middle of a list: it begins anew.
    api.fail(What::NextPage, Fault::Status(410, None));
    api.compact();
    api.fail(What::Watch, Fault::GoneInStream);
    api.end_watches();
    eventually("everything is listed again", || api.seen(What::List).len() >= 3).await;
    eventually("and watched", || api.watches() == 1).await;
    assert_eq!(running.peers.borrow().len(), 1200);
}

#[tokio::test]
async fn every_form_of_gone_causes_relisting() {
    let (api, mut running) = cluster(3, Timing::default()).await;
    let all = ["192.0.2.2", "192.0.2.3", "192.0.2.4"];
    running.wait_for_peers(&all, SOON, "the start").await;
    eventually("the watch is open", || api.watches() == 1).await;
    let faults = [("n4", Fault::GoneInStream), ("n3", Fault::Status(410, None))];
    for (left, (lost, fault)) in [2, 1].into_iter().zip(faults) {
        sleep(SERVED).await;
        // What no watch tells.
        api.lose_silently(lost);
        api.fail(What::Watch, fault);
        api.end_watches();
        running.wait_for_peers(&all[..left], SOON, "410 Gone").await;
        eventually("the watch is open again", || api.watches() == 1).await;
    }
    assert_eq!(api.seen(What::List).len(), 3, "one listing for each 410, and the first");
    assert_eq!(running.manager.status().read().store.failures, 0, "410 is no outage");
}

#[tokio::test]
async fn restored_etcd_is_followed_at_once() {
    let (api, mut running) = cluster(2, Timing::default()).await;
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "the start").await;
    eventually("the watch is open", || api.watches() == 1).await;
    sleep(SERVED).await;
    // The backup is older than n3. A watch from before it is accepted, and would be silent.
    api.restore(&[node("n1", Some("10.244.1.0/24")), other(2), other(4)]);
    // n3 is held for a while, as whenever a store loses data.
    let restored = ["192.0.2.2", "192.0.2.3", "192.0.2.4"];
    running.wait_for_peers(&restored, SOON, "etcd was restored").await;
    eventually("the watch is open again", || api.watches() == 1).await;
    api.put_node(&other(5));
    let all = ["192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5"];
    running.wait_for_peers(&all, SOON, "a Node joined afterwards").await;
}

/// Connections that were made from an address which the host has lost stay open, and are silent.
#[tokio::test]
async fn connections_of_the_address_before_are_left_at_once() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let proxy = Proxy::to(SocketAddr::from(([127, 0, 0, 1], api.port())));
    let host = Host::at(&proxy.url(), "n1", Timing::default()).await;
    let own = host.acquire(1).await.unwrap();
    let (sender, peers) = watch::channel(Arc::default());
    let (attributes, said) = watch::channel(own.lease.attributes.clone());
    let run = async { host.manager.run(Held::Leased(own), &sender, said).await };
    let follow = async {
        for number in 2..5 {
            // The relay keeps what was silent, which the API takes for live.
            let watches = usize::from(number) - 1;
            eventually("the watch is open", || api.watches() == watches).await;
            // What is open is silent from now on, and what is new works.
            proxy.set(Mode::Silent);
            sleep(Duration::from_millis(200)).await;
            proxy.set(Mode::Open);
            api.put_node(&other(number));
            let moved = Stopwatch::start();
            attributes.send_replace(control::node(100 + number));
            let public_ip = format!("192.0.2.{}", 100 + number);
            let shown = || api.annotations("n1").get(&format!("{PREFIX}public-ip")).cloned();
            while shown().as_ref() != Some(&public_ip)
                || peers.borrow().len() != usize::from(number) - 1
            {
                assert!(!moved.is_over(CONVERGE), "it waits for the dead: {:?}", peers.borrow());
                sleep(Duration::from_millis(10)).await;
            }
        }
    };
    tokio::select! {
        end = run => panic!("a move ended it: {end:?}"),
        () = follow => {}
    }
}

#[tokio::test]
async fn changed_config_map_is_reported_while_the_api_is_away() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let brief = Timing { relist_period: Duration::from_secs(1), ..Timing::default() };
    let host = Host::with_timing(&api, "n1", brief).await;
    host.manager.go_by(&NetworkConfig::parse(NET_CONF.as_bytes()).unwrap());
    let file = host.files.path().join("net-conf.json");
    let own = host.acquire(1).await.unwrap();
    let running = control::Running::start(host.manager, own);
    eventually("the watch is open", || api.watches() == 1).await;
    for _ in 0..1000 {
        api.fail(What::List, Fault::Status(500, None));
        api.fail(What::Watch, Fault::Status(500, None));
    }
    api.end_watches();
    let status = running.manager.status();
    eventually("the API is away", || !status.read().store.up).await;
    assert!(!status.read().restart_needed);
    std::fs::write(&file, NET_CONF.replace("\"udp\"", "\"vxlan\"")).unwrap();
    eventually("the change is reported", || status.read().restart_needed).await;
    std::fs::write(&file, NET_CONF).unwrap();
    eventually("it was taken back", || !status.read().restart_needed).await;
    assert!(!status.read().store.up, "a file passes for the API");
}

#[tokio::test]
async fn ended_watch_resumes_at_bookmark_without_listing() {
    let (api, mut running) = cluster(1, Timing::default()).await;
    running.wait_for_peers(&["192.0.2.2"], SOON, "the start").await;
    eventually("the watch is open", || api.watches() == 1).await;
    for _ in 0..100 {
        api.heartbeat("n2");
    }
    api.bookmark();
    sleep(SERVED).await;
    // Whoever continues from before the bookmark is told that it is gone.
    api.compact();
    api.end_watches();
    eventually("the watch is opened again", || api.seen(What::Watch).len() >= 2).await;
    api.put_node(&other(3));
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "the watch went on").await;
    assert_eq!(api.seen(What::List).len(), 1, "listed all Nodes because a watch ended in time");
    assert_eq!(running.manager.status().read().store.failures, 0, "counts as an outage");
}

#[tokio::test]
async fn no_error_of_the_api_withdraws_a_peer() {
    let timing = Timing { relist_period: Duration::from_millis(400), ..Timing::default() };
    let (api, mut running) = cluster(5, timing).await;
    let all = ["192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5", "192.0.2.6"];
    running.wait_for_peers(&all, SOON, "the start").await;
    let before = api.seen(What::List).len();
    for fault in [
        Fault::Status(500, None),
        Fault::Status(503, None),
        Fault::Status(401, None),
        Fault::Status(403, None),
        Fault::Status(404, None),
        Fault::Cut,
        Fault::Empty,
        Fault::Empty,
    ] {
        api.fail(What::List, fault);
    }
    running.peers.mark_unchanged();
    eventually("all errors have been seen", || api.seen(What::List).len() >= before + 9).await;
    assert!(!running.peers.has_changed().unwrap(), "an error or an empty list changed the peers");
    assert_eq!(control::addresses(&running.peers.borrow()).len(), 5);
    running.assert_running("the API was in trouble");
}

#[tokio::test]
async fn lost_event_is_found_by_next_listing() {
    let timing = Timing { relist_period: Duration::from_millis(500), ..Timing::default() };
    let (api, mut running) = cluster(3, timing).await;
    let all = ["192.0.2.2", "192.0.2.3", "192.0.2.4"];
    running.wait_for_peers(&all, SOON, "the start").await;
    api.lose_silently("n3");
    running.wait_for_peers(&["192.0.2.2", "192.0.2.4"], SOON, "a deletion was lost").await;
}

#[tokio::test]
async fn retry_after_is_honored() {
    let (api, mut running) = cluster(1, Timing::default()).await;
    running.wait_for_peers(&["192.0.2.2"], SOON, "the start").await;
    eventually("the watch is open", || api.watches() == 1).await;
    sleep(SERVED).await;
    let watch = Stopwatch::start();
    api.fail(What::Watch, Fault::Status(429, Some(2)));
    api.end_watches();
    eventually("the watch is refused", || api.seen(What::Watch).len() >= 2).await;
    let refused_at = api.seen(What::Watch)[1].at;
    api.put_node(&other(3));
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "429").await;
    let next = api.seen(What::Watch)[2].at;
    let waited = next - refused_at;
    assert!(waited >= Duration::from_secs(2), "asked again after {waited:?}, told to wait 2 s");
    assert!(watch.of(waited) < Duration::from_secs(4), "stayed away for {waited:?}");
    // Without a time, by itself: not at once, and not in step with others.
    for _ in 0..5 {
        api.fail(What::Watch, Fault::Status(500, None));
    }
    sleep(SERVED).await;
    let before = api.seen(What::Watch).len();
    api.end_watches();
    eventually("five errors and a success", || api.seen(What::Watch).len() >= before + 6).await;
    let tries: Vec<_> = api.seen(What::Watch)[before..].iter().map(|seen| seen.at).collect();
    let pauses: Vec<_> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    println!("pauses after 500: {pauses:?}");
    let [first, last] = [pauses[0].min(pauses[1]), pauses[3].max(pauses[4])];
    assert!(last > 2 * first, "the pauses do not grow: {pauses:?}");
}

#[tokio::test]
async fn broken_node_is_counted_others_unaffected() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let edit = |name: &str, key: &str, value: &str| {
        let mut node = other(name[1..].parse().unwrap());
        node["metadata"]["annotations"][format!("{PREFIX}{key}")] = value.into();
        api.put_node(&node);
    };
    edit("n11", "public-ip", "not an address");
    edit("n12", "backend-data", r#"{"VNI":1,"#);
    edit("n13", "backend-data", &format!("\"{}\"", "x".repeat(5000)));
    let mut odd = other(15);
    odd["metadata"]["annotations"] = json!({"a": {"b": 1}});
    api.put_node(&odd);
    let mut nowhere = other(16);
    nowhere["spec"] = json!({"podCIDR": "somewhere"});
    api.put_node(&nowhere);
    api.put_node(&other(2));
    let mut running = Host::new(&api, "n1").await.start(1).await;
    running.wait_for_peers(&["192.0.2.2"], SOON, "broken Nodes in the list").await;
    let mut late = other(17);
    late["metadata"]["annotations"] = json!("none");
    api.put_node(&late);
    api.put_node(&other(3));
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "a broken Node in the watch").await;
    let status = running.manager.status();
    let counts = [RejectReason::BadValue, RejectReason::TooLarge, RejectReason::BadKey]
        .map(|reason| status.read().store.rejected.get(reason.name()).copied().unwrap_or(0));
    assert_eq!(counts, [4, 1, 1], "bad values, large ones, bad subnets");
}

#[tokio::test]
async fn older_of_two_nodes_keeps_shared_subnet() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let mut young = flannel_node("a2", "10.244.2.0/24", "192.0.2.2");
    young["metadata"]["creationTimestamp"] = "2026-11-20T09:00:00Z".into();
    api.put_node(&young);
    api.put_node(&flannel_node("b3", "10.244.2.0/24", "192.0.2.3"));
    api.put_node(&flannel_node("c4", "10.244.1.0/25", "192.0.2.4"));
    let mut running = Host::new(&api, "n1").await.start(1).await;
    running.wait_for_peers(&["192.0.2.3"], SOON, "two Nodes with one subnet").await;
    let status = running.manager.status();
    let rejected = status.read().store.rejected;
    assert_eq!(rejected[RejectReason::OverlapsOther.name()], 1);
    assert_eq!(rejected[RejectReason::OverlapsOwn.name()], 1);
    // The older one goes, and the younger one's traffic flows.
    api.delete_node("b3");
    running.wait_for_peers(&["192.0.2.2"], SOON, "the older of two Nodes went").await;
}

#[tokio::test]
async fn a_slow_api_keeps_nobody_from_stopping() {
    let (api, mut running) = cluster(1, Timing::default()).await;
    running.wait_for_peers(&["192.0.2.2"], SOON, "the start").await;
    let host = Host::new(&api, "n1").await;
    api.fail(What::Own, Fault::Slow(Duration::from_secs(60)));
    let acquiring = tokio::time::timeout(Duration::from_millis(300), host.acquire(1)).await;
    assert!(acquiring.is_err(), "the API answered");
    running.task.abort();
    assert!(running.task.await.unwrap_err().is_cancelled());
}
