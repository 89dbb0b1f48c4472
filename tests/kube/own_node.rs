//! The own Node: its annotations to the byte, its subnet early, late, changed and gone.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;
use weft::config::network::NetworkConfig;
use weft::control::error::AcquireError;
use weft::control::lease::LeaseAttributes;
use weft::control::manager::SubnetManager;
use weft::control::timing::Timing;

use crate::support::kube_api::{Fault, KubeApi, PREFIX, What, flannel_node, node};
use crate::{Host, SOON, address, control, eventually, options};

/// flannel's annotations of a Node.
fn said(api: &KubeApi, name: &str) -> BTreeMap<String, String> {
    let annotations = api.annotations(name).into_iter();
    annotations
        .filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?.to_owned(), value)))
        .collect()
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// What a udp node says.
fn udp(public_ip: &str) -> BTreeMap<String, String> {
    map(&[
        ("backend-data", "null"),
        ("backend-type", ""),
        ("kube-subnet-manager", "true"),
        ("public-ip", public_ip),
    ])
}

#[tokio::test]
async fn the_annotations_are_flannels_to_the_byte() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let host = Host::new(&api, "n1").await;
    assert_eq!(host.manager.describe(), "Kubernetes Subnet Manager - n1");
    let own = host.acquire(1).await.unwrap();
    assert_eq!(own.lease.subnets.to_string(), "10.244.1.0/24");
    assert_eq!(own.expires, None, "a Node's subnet does not expire");
    let patches = api.seen(What::Patch);
    assert_eq!(patches.len(), 1);
    assert_eq!(patches[0].path, "/api/v1/nodes/n1/status", "not the status subresource");
    assert_eq!(patches[0].content_type, "application/strategic-merge-patch+json");
    let p = PREFIX;
    let expected =
        format!(r#"{{"metadata":{{"annotations":{{"{p}backend-data":"null","{p}backend-type":"","#)
            + &format!(r#""{p}kube-subnet-manager":"true","{p}public-ip":"192.0.2.1"}}}}}}"#);
    assert_eq!(patches[0].body, expected);
    assert_eq!(said(&api, "n1"), udp("192.0.2.1"));
    // A restart finds all as it should be, and one that moved writes what differs.
    Host::new(&api, "n1").await.acquire(1).await.unwrap();
    assert_eq!(api.seen(What::Patch).len(), 1, "wrote what was there");
    Host::new(&api, "n1").await.acquire(2).await.unwrap();
    let body = &api.seen(What::Patch)[1].body;
    assert_eq!(
        *body,
        format!(r#"{{"metadata":{{"annotations":{{"{p}public-ip":"192.0.2.2"}}}}}}"#)
    );
}

#[tokio::test]
async fn a_node_without_any_annotation_works() {
    let api = KubeApi::local();
    let mut bare = node("n1", Some("10.244.1.0/24"));
    bare["metadata"].as_object_mut().unwrap().remove("annotations");
    api.put_node(&bare);
    let mut none = node("n2", Some("10.244.2.0/24"));
    none["metadata"]["annotations"] = Value::Null;
    api.put_node(&none);
    let mut first = Host::new(&api, "n1").await.start(1).await;
    Host::new(&api, "n2").await.acquire(2).await.unwrap();
    assert_eq!(said(&api, "n2"), udp("192.0.2.2"));
    first.wait_for_peers(&["192.0.2.2"], SOON, "a Node that had no annotations").await;
}

#[tokio::test]
async fn the_operators_addresses_are_heeded() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    api.edit("n1", |node| {
        let annotations = &mut node["metadata"]["annotations"];
        annotations[format!("{PREFIX}public-ip-overwrite")] = "198.51.100.1".into();
        annotations[format!("{PREFIX}node-public-ip")] = "192.0.2.77".into();
        annotations[format!("{PREFIX}node-public-ipv6")] = "fd01::77".into();
    });
    let host = Host::new(&api, "n1").await;
    let set = host.manager.sync().await.unwrap();
    let expected = ("192.0.2.77".parse().ok(), "fd01::77".parse().ok());
    assert_eq!(set, expected, "the addresses that the operator set on the Node");
    let mut running = host.start(1).await;
    assert_eq!(said(&api, "n1")["public-ip"], "198.51.100.1", "the overwrite is not published");
    assert_eq!(said(&api, "n1")["public-ip-overwrite"], "198.51.100.1");
    // Taken away, the node's own is published, without a restart.
    api.edit("n1", |node| {
        let annotations = node["metadata"]["annotations"].as_object_mut().unwrap();
        annotations.remove(&format!("{PREFIX}public-ip-overwrite"));
    });
    eventually("the node's own address is published again", || {
        said(&api, "n1")["public-ip"] == "192.0.2.1"
    })
    .await;
    running.wait_for_peers(&[], SOON, "a node is its own peer").await;
    // One that nobody could send to is not published, but what the node has, and an address that
    // is set right is, at once.
    for (overwrite, published) in [
        ("198.51.100.2", "198.51.100.2"),
        ("none", "192.0.2.1"),
        ("198.51.100.3", "198.51.100.3"),
        ("127.0.0.1", "192.0.2.1"),
        ("198.51.100.4", "198.51.100.4"),
        ("fd00::1", "192.0.2.1"),
        ("198.51.100.5", "198.51.100.5"),
        ("224.0.0.1", "192.0.2.1"),
    ] {
        api.edit("n1", |node| {
            let annotations = &mut node["metadata"]["annotations"];
            annotations[format!("{PREFIX}public-ip-overwrite")] = overwrite.into();
        });
        eventually(overwrite, || said(&api, "n1")["public-ip"] == published).await;
        // What is changed within the pause after a write counts as changed back, and makes the next
        // pause longer.
        sleep(Duration::from_millis(600)).await;
    }
    for (annotation, wrong) in [("node-public-ipv6", "192.0.2.77"), ("node-public-ip", "none")] {
        api.edit("n1", |node| {
            node["metadata"]["annotations"][format!("{PREFIX}{annotation}")] = wrong.into();
        });
        let error = Host::new(&api, "n1").await.manager.sync().await.unwrap_err();
        let text = error.to_string();
        assert!(error.is_final() && text.contains(&format!("{annotation} is")), "{text}");
    }
}

#[tokio::test]
async fn annotation_prefix_applies_to_reads_and_writes() {
    let api = KubeApi::local();
    for (name, cidr) in [("n1", "10.244.1.0/24"), ("n2", "10.244.2.0/24")] {
        api.put_node(&node(name, Some(cidr)));
    }
    api.put_node(&flannel_node("n3", "10.244.3.0/24", "192.0.2.3"));
    let files = tempfile::tempdir().unwrap();
    let url = format!("--kube-api-url={}", api.url());
    let arguments = [url.as_str(), "--kube-annotation-prefix=a.example/blue"];
    let host = |name: &'static str| {
        let options = options(files.path(), &arguments, &[("NODE_NAME", name)]);
        async move { SubnetManager::connect(&options.store, None).await.unwrap() }
    };
    let network = NetworkConfig::parse(crate::NET_CONF.as_bytes()).unwrap();
    let first = host("n1").await;
    let own = first.acquire(&network, &address(1)).await.unwrap();
    let mut first = control::Running::start(first, own);
    host("n2").await.acquire(&network, &address(2)).await.unwrap();
    assert_eq!(api.annotations("n2")["a.example/blue-public-ip"], "192.0.2.2");
    first.wait_for_peers(&["192.0.2.2"], SOON, "peers of another prefix are seen").await;
}

#[tokio::test]
async fn start_waits_or_fails_by_cause() {
    let api = KubeApi::local();
    let host = Host::new(&api, "n1").await;
    let missing = host.acquire(1).await.unwrap_err();
    assert!(matches!(&missing, AcquireError::NoNode(name) if name == "n1"), "{missing:?}");
    assert!(!missing.is_final(), "a Node that comes late is waited for");
    api.put_node(&node("n1", None));
    let bare = host.acquire(1).await.unwrap_err();
    assert!(matches!(&bare, AcquireError::Unassigned(name) if name == "n1"), "{bare:?}");
    assert!(!bare.is_final(), "a subnet that comes late is waited for");
    let assign = |cidrs: &[&str]| {
        api.edit("n1", |node| node["spec"] = json!({"podCIDR": cidrs[0], "podCIDRs": cidrs}));
    };
    assign(&["10.99.1.0/24"]);
    let outside = host.acquire(1).await.unwrap_err();
    assert!(outside.is_final(), "flannel exits");
    for value in ["\"10.244.0.0/16\"", "\"10.99.1.0/24\"", "\"n1\""] {
        assert!(outside.to_string().contains(value), "{outside}");
    }
    for unusable in [&["fd00::/64"][..], &["10.244.1.0"], &["10.244.1.0/24", "fd00::/64", "x"]] {
        assign(unusable);
        assert!(host.acquire(1).await.unwrap_err().is_final(), "{unusable:?} was taken");
    }
    assert!(api.seen(What::Patch).is_empty(), "wrote to a Node without a usable subnet");
    assign(&["fd00:1::/64", "10.244.9.0/24"]);
    let own = host.acquire(1).await.unwrap();
    assert_eq!(own.lease.subnets.to_string(), "10.244.9.0/24", "the IPv4 one of two");
}

#[tokio::test]
async fn recreated_node_is_annotated_again() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    api.put_node(&flannel_node("n2", "10.244.2.0/24", "192.0.2.2"));
    let mut running = Host::new(&api, "n1").await.start(1).await;
    running.manager.network_is_up();
    running.wait_for_peers(&["192.0.2.2"], SOON, "the start").await;
    eventually("the Node knows that its network is up", || condition(&api).is_some()).await;
    api.delete_node("n1");
    sleep(Duration::from_millis(200)).await;
    running.assert_running("the own Node was deleted");
    assert_eq!(running.peers.borrow().len(), 1, "peers were given up with the own Node");
    // The kubelet registers it, the subnet comes a little later.
    let mut made_again = node("n1", None);
    made_again["metadata"]["uid"] = "another-uid".into();
    api.put_node(&made_again);
    let patches = api.seen(What::Patch).len();
    sleep(Duration::from_millis(200)).await;
    assert_eq!(api.seen(What::Patch).len(), patches, "wrote to a Node without a subnet");
    api.edit("n1", |node| node["spec"] = json!({"podCIDR": "10.244.1.0/24"}));
    eventually("the annotations are written again", || said(&api, "n1") == udp("192.0.2.1")).await;
    eventually("the condition is set again", || condition(&api).is_some()).await;
    assert!(!running.manager.status().read().store.subnet_refused);
    running.assert_running("the own Node was made again");
}

#[tokio::test]
async fn a_node_that_cannot_be_written_shows_in_the_status() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let running = Host::new(&api, "n1").await.start(1).await;
    eventually("the watch is open", || api.watches() == 1).await;
    let refused = || running.manager.status().read().refused().unwrap_or_default();
    for (code, count) in [(403, 1), (500, 3)] {
        for _ in 0..count {
            api.fail(What::Patch, Fault::Status(code, None));
        }
        api.edit("n1", |node| {
            node["metadata"]["annotations"][format!("{PREFIX}public-ip")] = "203.0.113.9".into();
        });
        eventually("the failure shows", || refused().contains(&code.to_string())).await;
        eventually("it is over", || refused().is_empty()).await;
        assert_eq!(said(&api, "n1"), udp("192.0.2.1"), "over before the Node was written");
        // Changed within the pause after a write, it makes the next pauses longer.
        sleep(Duration::from_secs(1)).await;
    }
    api.delete_node("n1");
    eventually("the Node's end shows", || !refused().is_empty()).await;
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    eventually("the Node is back", || refused().is_empty()).await;
    running.assert_running("the own Node could not be written");
}

fn condition(api: &KubeApi) -> Option<Value> {
    let node = api.node("n1");
    let conditions = node["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == "NetworkUnavailable").cloned()
}

#[tokio::test]
async fn changed_subnet_is_refused_old_network_continues() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    api.put_node(&flannel_node("n2", "10.244.2.0/24", "192.0.2.2"));
    let mut running = Host::new(&api, "n1").await.start(1).await;
    running.wait_for_peers(&["192.0.2.2"], SOON, "the start").await;
    let status = running.manager.status();
    api.delete_node("n1");
    api.put_node(&node("n1", Some("10.244.7.0/24")));
    eventually("the change is refused", || status.read().store.subnet_refused).await;
    assert_eq!(status.read().store.refused_subnet, "10.244.7.0/24".parse().ok());
    assert!(said(&api, "n1").is_empty(), "others would send this node's new subnet here");
    running.assert_running("the subnet changed");
    assert_eq!(running.peers.borrow().len(), 1, "the old network ended");
    api.delete_node("n1");
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    eventually("the old subnet is back", || !status.read().store.subnet_refused).await;
    eventually("the annotations are written", || said(&api, "n1") == udp("192.0.2.1")).await;
}

#[tokio::test]
async fn foreign_annotation_edits_are_reverted_without_storm() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let running = Host::new(&api, "n1").await.start(1).await;
    eventually("the watch is open", || api.watches() == 1).await;
    for _ in 0..5 {
        api.edit("n1", |node| {
            node["metadata"]["annotations"][format!("{PREFIX}public-ip")] = "203.0.113.9".into();
        });
        let right = || said(&api, "n1") == udp("192.0.2.1");
        eventually("the annotations are put right", right).await;
    }
    let before = api.seen(What::Patch).len();
    assert!(before <= 7, "{before} patches for five changes");
    for _ in 0..50 {
        api.heartbeat("n1");
    }
    sleep(Duration::from_millis(300)).await;
    assert_eq!(api.seen(What::Patch).len(), before, "heartbeats make it write");
    running.assert_running("somebody else wrote the annotations");
}

#[tokio::test]
async fn condition_matches_flannel_and_follows_network() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let running = Host::new(&api, "n1").await.start(1).await;
    sleep(Duration::from_millis(200)).await;
    assert_eq!(condition(&api), None, "said that a network works that does not");
    api.fail(What::Patch, Fault::Status(500, None));
    running.manager.network_is_up();
    eventually("the condition is set in spite of an error", || condition(&api).is_some()).await;
    let patch = api.seen(What::Patch).pop().unwrap();
    let condition = condition(&api).unwrap();
    let time = condition["lastTransitionTime"].as_str().unwrap();
    let expected = r#"{"status":{"conditions":[{"type":"NetworkUnavailable","status":"False",
        "lastHeartbeatTime":"TIME",
        "lastTransitionTime":"TIME","reason":"FlannelIsUp",
        "message":"Flannel is running on this node"}]}}"#;
    let expected = expected.replace(",\n        ", ",").replace("TIME", time);
    assert_eq!(patch.body, expected);
    assert_eq!((time.len(), time.ends_with('Z')), (20, true), "{time} is no time of Kubernetes");
    let left = api.node("n1")["status"]["conditions"].as_array().unwrap().len();
    assert_eq!(left, 4, "the kubelet's conditions were touched");
}

#[tokio::test]
async fn node_from_pod_flag_leaves_condition_alone() {
    let api = KubeApi::local();
    api.put_node(&node("worker.example", Some("10.244.1.0/24")));
    api.put_pod("kube-flannel", "weft-abcde", "worker.example");
    let files = tempfile::tempdir().unwrap();
    let url = format!("--kube-api-url={}", api.url());
    let arguments = [url.as_str(), "--set-node-network-unavailable=false"];
    let pod = [("POD_NAME", "weft-abcde"), ("POD_NAMESPACE", "kube-flannel")];
    let options = options(files.path(), &arguments, &pod);
    // An API that is not there yet is waited for.
    api.fail(What::Pod, Fault::Status(503, None));
    let manager = SubnetManager::connect(&options.store, None).await.unwrap();
    assert_eq!(manager.describe(), "Kubernetes Subnet Manager - worker.example");
    let manager = manager.with_timing(Timing::default());
    let network = NetworkConfig::parse(crate::NET_CONF.as_bytes()).unwrap();
    let own = manager.acquire(&network, &address(1)).await.unwrap();
    let running = control::Running::start(manager, own);
    running.manager.network_is_up();
    sleep(Duration::from_millis(300)).await;
    let conditions = api.node("worker.example")["status"]["conditions"].to_string();
    assert!(!conditions.contains("NetworkUnavailable"), "{conditions}");
    // A server that starts forbids everything for a moment; one that goes on means it.
    for code in [403, 401, 403] {
        api.fail(What::Pod, Fault::Status(code, None));
    }
    let again = SubnetManager::connect(&options.store, None).await.unwrap();
    assert_eq!(again.describe(), "Kubernetes Subnet Manager - worker.example");
    for _ in 0..100 {
        api.fail(What::Pod, Fault::Status(403, None));
    }
    let refused = SubnetManager::connect(&options.store, None).await.err().unwrap().to_string();
    assert!(refused.contains("kube-flannel/weft-abcde"), "{refused}");
}

/// The network of the tests, with IPv6 as well.
fn dual() -> NetworkConfig {
    let text = r#"{"Network":"10.244.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48",
        "Backend":{"Type":"host-gw"}}"#;
    NetworkConfig::parse(text.as_bytes()).unwrap()
}

fn assign(api: &KubeApi, name: &str, cidrs: &[&str]) {
    api.edit(name, |node| node["spec"] = json!({"podCIDR": cidrs[0], "podCIDRs": cidrs}));
}

#[tokio::test]
async fn both_families_are_taken_and_published_as_flannel_does() {
    let api = KubeApi::local();
    for name in ["n1", "n2", "n3"] {
        api.put_node(&flannel_node(name, "10.244.9.0/24", "192.0.2.9"));
    }
    assign(&api, "n1", &["fd00:5:0:1::/64", "10.244.1.0/24"]);
    assign(&api, "n2", &["10.244.2.0/24", "fd00:5:0:2::/64"]);
    assign(&api, "n3", &["10.244.3.0/24"]);
    for (name, address) in [("n2", "192.0.2.2"), ("n3", "192.0.2.3")] {
        api.edit(name, |node| {
            node["metadata"]["annotations"][format!("{PREFIX}public-ip")] = address.into();
        });
    }
    api.edit("n2", |node| {
        node["metadata"]["annotations"][format!("{PREFIX}public-ipv6")] = "fd99::2".into();
    });
    let host = Host::new(&api, "n1").await;
    let attributes = LeaseAttributes { public_ipv6: "fd99::1".parse().ok(), ..address(1) };
    let own = host.manager.acquire(&dual(), &attributes).await.unwrap();
    assert_eq!(own.lease.subnets.to_string(), "10.244.1.0/24,fd00:5:0:1::/64");
    let written = said(&api, "n1");
    assert_eq!(written["public-ipv6"], "fd99::1");
    assert_eq!(written["backend-v6-data"], "null");
    let mut running = control::Running::start(host.manager, own);
    running.wait_for_peers(&["192.0.2.2", "192.0.2.3"], SOON, "a Node of IPv4 is lost").await;
    let peers = running.peers.borrow().clone();
    let ways = peers.values().map(|peer| (peer.subnets.to_string(), peer.attributes.public_ipv6));
    let ways: Vec<_> = ways.collect();
    assert_eq!(ways[0], ("10.244.2.0/24,fd00:5:0:2::/64".to_owned(), "fd99::2".parse().ok()));
    assert_eq!(ways[1], ("10.244.3.0/24".to_owned(), None));
}

#[tokio::test]
async fn a_node_without_the_family_that_the_network_has_is_told() {
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let host = Host::new(&api, "n1").await;
    let error = host.manager.acquire(&dual(), &address(1)).await.unwrap_err();
    assert!(error.is_final() && error.to_string().contains("10.244.1.0/24"), "{error}");
    assign(&api, "n1", &["10.244.1.0/24", "fd00:6:0:1::/64"]);
    let error = host.manager.acquire(&dual(), &address(1)).await.unwrap_err();
    assert!(error.is_final() && error.to_string().contains("fd00:6:0:1::/64"), "{error}");
    assert!(api.seen(What::Patch).is_empty(), "wrote to a Node without usable subnets");
}
