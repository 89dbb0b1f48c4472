//! Two nodes in a cluster with a real API: subnets that its controller assigns, what the Nodes say
//! then, packets, Nodes that are deleted and made again, and what was asked of the API for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::plane::{Plane, START_TIMEOUT, condition};
use crate::site::{ACCOUNT, NAMESPACE, READY, Site, name};
use crate::support::lab::{SubnetEnv, wait_until};

const PREFIX: &str = "flannel.alpha.coreos.com/";

/// The conditions of a Node, by type.
fn conditions(node: &Value) -> BTreeMap<String, Value> {
    let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let named = all.iter().map(|condition| condition["type"].as_str().unwrap().to_owned());
    let by_name: BTreeMap<_, _> = named.zip(all.iter().cloned()).collect();
    assert_eq!(by_name.len(), all.len(), "a condition is there twice: {all:?}");
    by_name
}

fn annotations(node: &Value) -> BTreeMap<String, String> {
    serde_json::from_value(node["metadata"]["annotations"].clone()).unwrap_or_default()
}

fn is_told_up(node: &Value) -> bool {
    conditions(node).get("NetworkUnavailable").is_some_and(|up| up["reason"] == "FlannelIsUp")
}

/// What flannel would have written to the Node of a host, to the byte, and nothing else changed.
#[track_caller]
fn says_what_flannel_would(site: &Site, host: usize, backend: (&str, &str), before: &Value) {
    let node = site.plane.node(&name(host));
    let mut expected = annotations(before);
    expected.extend(
        [
            ("kube-subnet-manager", "true"),
            ("backend-type", backend.0),
            ("backend-data", backend.1),
            ("public-ip", &Site::address(host)),
        ]
        .map(|(key, value)| (format!("{PREFIX}{key}"), value.to_owned())),
    );
    // Controllers write annotations of their own, such as the ttl of what kubelets cache.
    let mut found = annotations(&node);
    found.retain(|key, _| key.starts_with(PREFIX) || expected.contains_key(key));
    assert_eq!(found, expected, "left: the Node; right: what flannel writes, and was there");
    for (label, value) in before["metadata"]["labels"].as_object().unwrap() {
        assert_eq!(&node["metadata"]["labels"][label], value, "the label {label} changed");
    }
    let (mut now, before) = (conditions(&node), conditions(before));
    let up = now.remove("NetworkUnavailable").unwrap();
    let time = up["lastTransitionTime"].as_str().unwrap();
    assert_eq!((time.len(), time.ends_with('Z')), (20, true), "{time} is no time of Kubernetes");
    let expected = json!({
        "type": "NetworkUnavailable", "status": "False", "lastHeartbeatTime": time,
        "lastTransitionTime": time, "reason": "FlannelIsUp",
        "message": "Flannel is running on this node",
    });
    assert_eq!(up, expected);
    assert_eq!(now["MemoryPressure"], before["MemoryPressure"], "a kubelet's condition changed");
    assert_eq!(now.len() + 1, before.len(), "conditions were lost: {now:?}");
}

/// Both Nodes are there late, and their subnets later still.
#[track_caller]
fn start_before_there_is_anything(site: &mut Site) -> [Value; 2] {
    for host in 0..2 {
        site.write_token(host, &site.issued());
        site.daemons.push(site.container(host, &[("NODE_NAME", &name(host))]));
        site.wait_for(host, &format!("{:?}", name(host)));
    }
    site.plane.freeze_controller(true);
    let registered = [0, 1].map(|host| {
        site.plane.register(&name(host));
        site.plane.node(&name(host))
    });
    for host in 0..2 {
        site.wait_for(host, "--allocate-node-cidrs");
        assert!(site.daemons[host].ended().is_none(), "{}", site.daemons[host].output());
        assert_eq!(site.peers(host), None, "ready without a subnet");
    }
    site.plane.freeze_controller(false);
    for host in 0..2 {
        let started = Instant::now();
        let subnet = site.plane.subnet_of(&name(host));
        println!(
            "{} got {subnet} {:.1?} after its controller went on",
            name(host),
            started.elapsed()
        );
    }
    registered
}

/// What the account of the manifest asked for, as verb and resource.
fn asked(site: &Site) -> BTreeSet<(String, String)> {
    let audited =
        site.plane.audited().into_iter().filter(|entry| entry["user"]["username"] == ACCOUNT);
    let resource = |entry: &Value| {
        let part = |key: &str| entry["objectRef"][key].as_str().unwrap_or_default().to_owned();
        match part("subresource").as_str() {
            "" => part("resource"),
            subresource => format!("{}/{subresource}", part("resource")),
        }
    };
    let verb = |entry: &Value| entry["verb"].as_str().unwrap().to_owned();
    audited.map(|entry| (verb(&entry), resource(&entry))).collect()
}

#[track_caller]
fn is_a_network(backend: &str, mtu_bytes: u16) -> Site {
    let mut site = Site::new(Plane::start(2, &[]), backend);
    let registered = start_before_there_is_anything(&mut site);
    site.connect();
    site.carries(mtu_bytes);
    for (host, before) in registered.iter().enumerate() {
        wait_until(READY, "the Node is told that its network works", || {
            is_told_up(&site.plane.node(&name(host)))
        });
        let said = if backend == "vxlan" {
            let device = ["ip", "-o", "link", "show", "flannel.1"];
            let link = site.plane.cluster.hosts[host].exec(&device);
            let mac = link.split_once("link/ether ").unwrap().1.split(' ').next().unwrap();
            ("vxlan", format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#))
        } else {
            ("", "null".to_owned())
        };
        says_what_flannel_would(&site, host, (said.0, &said.1), before);
    }
    site
}

#[test]
fn vxlan_nodes_say_what_flannel_says_and_carry_packets() {
    let mut site = is_a_network("vxlan", 1450);
    if site.plane.has_controller() {
        let taint = "node.kubernetes.io/network-unavailable";
        wait_until(START_TIMEOUT, "the controller lets pods onto the node", || {
            !site.plane.node(&name(0))["spec"]["taints"].to_string().contains(taint)
        });
    }
    for host in 0..2 {
        let started = Instant::now();
        let ended = site.daemons[host].stop(Signal::TERM, Duration::from_secs(1));
        println!("stopped in {:?}", started.elapsed());
        assert_eq!(ended.code(), Some(0));
        let left = annotations(&site.plane.node(&name(host)));
        assert_eq!(left[&format!("{PREFIX}kube-subnet-manager")], "true");
    }
}

#[test]
fn udp_nodes_do_too_and_outlive_their_nodes() {
    let mut site = is_a_network("udp", 1472);
    let node = site.plane.node(&name(1));
    let subnet = node["spec"]["podCIDR"].as_str().unwrap().to_owned();
    // Deleted, and made again with the same subnet.
    site.plane.kubectl(&["delete", "node", &name(1)]);
    wait_until(READY, "a deleted Node is nobody's peer", || site.peers(0) == Some(0));
    assert_eq!(site.peers(1), Some(1), "peers were given up with the own Node");
    make_again(&site, 1, &subnet);
    site.wait_until_ready(0, 1);
    wait_until(READY, "the Node is told again", || is_told_up(&site.plane.node(&name(1))));
    site.carries(1472);
    // And with another one: pods have addresses of the old, so that is refused until a restart.
    site.plane.kubectl(&["delete", "node", &name(1)]);
    make_again(&site, 1, "10.244.200.0/24");
    site.wait_for(1, "10.244.200.0/24");
    let said = annotations(&site.plane.node(&name(1)));
    assert!(!said.keys().any(|key| key.starts_with(PREFIX)), "wrote to a refused Node: {said:?}");
    site.daemons[1].stop(Signal::TERM, Duration::from_secs(1));
    std::fs::remove_file(site.run(1).join("subnet.env")).unwrap();
    site.restart(1);
    let path = site.run(1).join("subnet.env");
    let lease = SubnetEnv::wait(&path, &mut site.daemons[1]);
    assert_eq!(lease.subnet, "10.244.200.1/24");
    site.move_pod(1, lease);
    site.wait_until_ready(0, 1);
    site.wait_until_ready(1, 1);
    site.carries(1472);
}

/// Makes a Node that was deleted, as a cloud does, with its subnet.
#[track_caller]
fn make_again(site: &Site, host: usize, subnet: &str) {
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name(host), "labels": {"kubernetes.io/os": "linux"}},
        "spec": {"podCIDR": subnet, "podCIDRs": [subnet]},
    });
    site.plane.hand("admin", &["create"], &node);
    let ready = condition("Ready", "True", "KubeletReady");
    site.plane.set_conditions("admin", &name(host), &[ready]);
}

#[test]
fn a_pod_learns_its_node_and_asks_for_no_more_than_its_role_allows() {
    let plane = Plane::start(2, &[]);
    let has_pods = plane.has_controller();
    let mut site = Site::new(plane, "vxlan");
    for host in 0..2 {
        site.plane.register(&name(host));
        site.plane.subnet_of(&name(host));
    }
    let pods = if has_pods { scheduled(&site) } else { Vec::new() };
    for host in 0..2 {
        match pods.get(host) {
            // As flannel's own manifest has it, which names no Node.
            Some((pod, uid)) => {
                let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid});
                let spec = json!({"expirationSeconds": 600, "boundObjectRef": bound});
                site.write_token(host, &site.issued_for(&spec));
                let variables = [("POD_NAME", pod.as_str()), ("POD_NAMESPACE", NAMESPACE)];
                site.daemons.push(site.container(host, &variables));
            }
            None => {
                site.write_token(host, &site.issued());
                site.daemons.push(site.container(host, &[("NODE_NAME", &name(host))]));
            }
        }
    }
    site.connect();
    site.carries(1450);
    wait_until(READY, "both Nodes are told", || {
        [0, 1].iter().all(|host| is_told_up(&site.plane.node(&name(*host))))
    });
    // A watch is logged at its end.
    for daemon in &mut site.daemons {
        daemon.stop(Signal::TERM, Duration::from_secs(1));
    }
    wait_until(READY, "the watch is in the audit log", || {
        asked(&site).iter().any(|(verb, _)| verb == "watch")
    });
    let asked = asked(&site);
    let needed =
        [("get", "pods"), ("list", "nodes"), ("patch", "nodes/status"), ("watch", "nodes")];
    let needed = needed.map(|(verb, resource)| (verb.to_owned(), resource.to_owned()));
    let skipped = usize::from(!has_pods);
    assert!(asked.iter().eq(&needed[skipped..]), "weftd asked for {asked:?}");
}

/// The DaemonSet's pods, one for each host, bound as a scheduler does.
#[track_caller]
fn scheduled(site: &Site) -> Vec<(String, String)> {
    let mut pods = Vec::new();
    wait_until(START_TIMEOUT, "the controller makes the DaemonSet's pods", || {
        let list = site.plane.get(&["pods", "-n", NAMESPACE]);
        pods = list["items"].as_array().unwrap().clone();
        pods.len() == 2
    });
    let mut bound = vec![(String::new(), String::new()); 2];
    for pod in &pods {
        let metadata = &pod["metadata"];
        let text = |key: &str| metadata[key].as_str().unwrap().to_owned();
        let host = usize::from(pod["spec"]["affinity"].to_string().contains("worker-1"));
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": text("name")},
            "target": {"apiVersion": "v1", "kind": "Node", "name": name(host)},
        });
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{}/binding", text("name"));
        site.plane.hand("admin", &["create", "--raw", &path], &binding);
        bound[host] = (text("name"), text("uid"));
    }
    bound
}
