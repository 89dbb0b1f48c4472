//! Nodes with both families: host-gw carries IPv6 beside IPv4, follows addresses, and takes its
//! routes along when a family goes; alloc leases both.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::SOON;
use crate::support::lab::{Lab, Process, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

const NETWORKS: &str = r#""Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48""#;

pub(crate) fn config(backend: &str) -> String {
    format!(r#"{{{NETWORKS},"Backend":{{"Type":"{backend}"}}}}"#)
}

/// The lab with IPv6 between and inside the hosts.
pub(crate) fn lab() -> Lab {
    let lab = Lab::two_hosts();
    for (index, host) in lab.hosts.iter().enumerate() {
        host.exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"]);
        let address = format!("fd99::{}/64", index + 1);
        host.exec(&["ip", "address", "add", &address, "dev", "wire0", "nodad"]);
    }
    lab
}

/// A daemon with its subnets: that of IPv6 as subnet.env has it, with its gateway.
pub(crate) struct Node {
    pub(crate) daemon: Process,
    pub(crate) lease: SubnetEnv,
    pub(crate) v6: String,
}

pub(crate) fn start(lab: &Lab, dir: &Path, host: usize, store: &str) -> Node {
    start_with(lab, dir, host, &[store])
}

pub(crate) fn start_with(lab: &Lab, dir: &Path, host: usize, arguments: &[&str]) -> Node {
    let home = dir.join(format!("h{host}"));
    let mut daemon = lab.weftd(host, &home, arguments);
    let lease = SubnetEnv::wait(&home.join("subnet.env"), &mut daemon);
    Node { daemon, lease, v6: v6_subnet(&home.join("subnet.env")) }
}

/// What subnet.env says of IPv6.
pub(crate) fn v6_subnet(env: &Path) -> String {
    let text = std::fs::read_to_string(env).unwrap();
    let v6 = text.lines().find_map(|line| line.strip_prefix("FLANNEL_IPV6_SUBNET="));
    v6.unwrap_or_default().to_owned()
}

/// Gives a pod an address of its host's IPv6 subnet, and returns it.
pub(crate) fn connect(lab: &Lab, host: usize, node: &Node) -> String {
    let (gateway, length) = node.v6.split_once('/').unwrap();
    let pod = gateway.strip_suffix("::1").map(|network| format!("{network}::2")).unwrap();
    lab.hosts[host].exec(&["ip", "address", "add", &node.v6, "dev", "pod0", "nodad"]);
    let address = format!("{pod}/{length}");
    lab.pods[host].exec(&["ip", "address", "add", &address, "dev", "eth0", "nodad"]);
    lab.pods[host].exec(&["ip", "-6", "route", "add", "default", "via", gateway]);
    pod
}

pub(crate) fn network(v6: &str) -> String {
    v6.replace("::1/", "::/")
}

fn routes(lab: &Lab, host: usize) -> String {
    lab.hosts[host].exec(&["ip", "-6", "route", "show", "proto", "119"])
}

#[track_caller]
fn wait_for_route(lab: &Lab, host: usize, to: &str, gateway: Option<&str>) {
    let what = format!("on host {host} a route to {to} by {gateway:?}");
    wait_until(SOON, &what, || {
        let routes = routes(lab, host);
        let route = routes.lines().find(|line| line.starts_with(to));
        route.and_then(|route| route.split(' ').nth(2)) == gateway
    });
}

#[track_caller]
pub(crate) fn wait_for_pings(lab: &Lab, from: usize, to: &str, payload_bytes: u16) {
    let size = payload_bytes.to_string();
    wait_until(SOON, &format!("pod {from} reaches {to}"), || {
        let argv = ["ping", "-6", "-q", "-c1", "-W1", "-Mdo", "-s", &size, to];
        lab.pods[from].succeeds(&argv)
    });
}

#[test]
fn host_gw_carries_both_families_and_follows_addresses() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("host-gw"));
    let lab = lab();
    let nodes = [0, 1].map(|host| start(&lab, dir.path(), host, &store));
    let pods = [0, 1].map(|host| connect(&lab, host, &nodes[host]));
    lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
    let networks = [0, 1].map(|host| network(&nodes[host].v6));
    for (own, other) in [(0, 1), (1, 0)] {
        wait_for_route(&lab, own, &networks[other], Some(&format!("fd99::{}", other + 1)));
        wait_for_pings(&lab, own, &pods[other], 1452);
        assert!(lab.ping(own, nodes[other].lease.pod_address(), 1472), "IPv4 is not carried");
    }
    let key = |host: usize| {
        let (v4, v6) = (nodes[host].lease.network(), networks[host].replace('/', "-"));
        dir.path().join(format!("store/subnets/{v4}-24&{v6}"))
    };
    let value = std::fs::read_to_string(key(0)).unwrap();
    let start = r#"{"PublicIP":"172.20.0.1","PublicIPv6":"fd99::1","BackendType":"host-gw""#;
    assert!(value.starts_with(start), "flannel nodes find no way to it: {value}");

    let status = Status::of(&dir.path().join("h0")).0;
    let told = |pointer: &str| status.pointer(pointer).and_then(|it| it.as_str()).unwrap_or("");
    assert_eq!(told("/lease/ipv6/subnet"), networks[0], "{status}");
    assert_eq!(told("/lease/ipv6/public_ip"), "fd99::1");
    assert_eq!(told("/routes/0/ipv6_subnet"), networks[1]);
    lab.hosts[0].exec(&["ip", "-6", "route", "del", &networks[1]]);
    wait_for_route(&lab, 0, &networks[1], Some("fd99::2"));
    lab.hosts[1].exec(&["ip", "address", "add", "fd99::12/64", "dev", "wire0", "nodad"]);
    lab.hosts[1].exec(&["ip", "address", "del", "fd99::2/64", "dev", "wire0"]);
    wait_for_route(&lab, 0, &networks[1], Some("fd99::12"));
    wait_for_pings(&lab, 0, &pods[1], 1452);
    assert!(std::fs::read_to_string(key(1)).unwrap().contains(r#""PublicIPv6":"fd99::12""#));

    let [mut first, second] = nodes;
    first.daemon.stop(Signal::TERM, Duration::from_secs(5));
    wait_for_pings(&lab, 1, &pods[0], 1452);
    let env = dir.path().join("h0/subnet.env");
    let subnet_file = format!("--subnet-file={}", env.display());
    lab.hosts[0].exec(&[env!("CARGO_BIN_EXE_weft"), "cleanup", &subnet_file]);
    assert_eq!(routes(&lab, 0), "", "weft cleanup left routes of IPv6");
    drop(second);
}

#[test]
fn what_fails_of_ipv6_alone_is_told_and_costs_no_ipv4() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("host-gw"));
    let lab = lab();
    let keeps = [store.as_str(), "--follow-address=false"];
    let mut second = lab.weftd(1, &dir.path().join("h1"), &keeps);
    let there = SubnetEnv::wait(&dir.path().join("h1/subnet.env"), &mut second);
    let first = start(&lab, dir.path(), 0, &store);
    lab.connect_pods([&first.lease, &there]);

    // Off the link in both families: one peer, and not two.
    let value = r#"{"PublicIP":"10.99.0.1","PublicIPv6":"fd88::1","BackendType":"host-gw"}"#;
    let key = "store/subnets/10.5.240.0-24&fd00:5:0:240::-64";
    std::fs::write(dir.path().join(key), value).unwrap();
    let failed = || Status::of(&dir.path().join("h0")).0["backend"]["peers_failed"].as_u64();
    wait_until(SOON, "a peer off the link is counted", || failed() > Some(0));
    assert_eq!(failed(), Some(1));

    lab.hosts[1].exec(&["ip", "address", "del", "fd99::2/64", "dev", "wire0"]);
    let is_told = || {
        let status = Status::of(&dir.path().join("h1")).0;
        status["dataplane_wrong"].as_str().is_some_and(|text| text.contains("fd99::2"))
    };
    wait_until(SOON, "the lost address of IPv6 is told", is_told);
    assert!(lab.ping(0, there.pod_address(), 1472), "IPv4 does not go on");
    lab.hosts[1].exec(&["ip", "address", "add", "fd99::2/64", "dev", "wire0", "nodad"]);
    wait_until(SOON, "the status is well again", || !is_told());
}

#[test]
fn a_family_that_goes_takes_its_routes_along_and_leaves_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("host-gw"));
    let lab = lab();
    let mut nodes = [0, 1].map(|host| start(&lab, dir.path(), host, &store));
    lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
    let networks = [0, 1].map(|host| network(&nodes[host].v6));
    wait_for_route(&lab, 0, &networks[1], Some("fd99::2"));
    let alone = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
    std::fs::write(dir.path().join("store/config"), alone).unwrap();
    for host in [1, 0] {
        nodes[host].daemon.stop(Signal::TERM, Duration::from_secs(5));
        let env = dir.path().join(format!("h{host}/subnet.env"));
        let after = start(&lab, dir.path(), host, &store);
        wait_until(SOON, "subnet.env promises no IPv6", || {
            !std::fs::read_to_string(&env).unwrap().contains("IPV6")
        });
        assert_eq!(after.lease.subnet, nodes[host].lease.subnet, "pods lost their addresses");
        nodes[host] = after;
        // The other one, which may still have both families, loses the way to it.
        wait_for_route(&lab, 1 - host, &networks[host], None);
    }
    wait_until(SOON, "no route of IPv6 is left", || {
        (0..2).all(|host| routes(&lab, host).is_empty())
    });
    let [first, second] = nodes.each_ref().map(|node| node.lease.pod_address());
    assert!(lab.ping(0, second, 1472) && lab.ping(1, first, 1472), "IPv4 went with it");
    let keys = std::fs::read_dir(dir.path().join("store/subnets")).unwrap();
    let keys: Vec<_> = keys.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    assert!(keys.len() == 2 && !keys.iter().any(|key| key.contains('&')), "{keys:?}");
}

#[test]
fn alloc_leases_both_families_and_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("alloc"));
    let lab = lab();
    let routes = || lab.hosts[0].exec(&["ip", "-6", "route"]);
    let before = routes();
    let node = start(&lab, dir.path(), 0, &store);
    assert!(node.v6.starts_with("fd00:5:0:") && node.v6.ends_with("::1/64"), "{}", node.v6);
    assert_eq!(routes(), before, "alloc changed the host");
}

#[test]
fn blackhole_routes_are_of_both_families() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("alloc"));
    let (lab, home) = (lab(), dir.path().join("h0"));
    let mut daemon = lab.weftd(0, &home, &[&store, "--ip-blackhole-route"]);
    SubnetEnv::wait(&home.join("subnet.env"), &mut daemon);
    for family in ["-4", "-6"] {
        wait_until(SOON, &format!("a blackhole route of {family}"), || {
            !lab.hosts[0].exec(&["ip", family, "route", "show", "type", "blackhole"]).is_empty()
        });
    }
    daemon.stop(Signal::TERM, Duration::from_secs(5));
    let subnet_file = format!("--subnet-file={}", home.join("subnet.env").display());
    lab.hosts[0].exec(&[env!("CARGO_BIN_EXE_weft"), "cleanup", &subnet_file]);
    assert_eq!(lab.hosts[0].exec(&["ip", "-6", "route", "show", "type", "blackhole"]), "");
}

#[test]
fn a_host_without_a_usable_address_of_ipv6_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("host-gw"));
    let lab = Lab::two_hosts();
    lab.hosts[0].exec(&["sysctl", "-qw", "net.ipv6.conf.wire0.disable_ipv6=1"]);
    let mut daemon = lab.weftd(0, &dir.path().join("h0"), &[&store]);
    wait_until(SOON, "the start ends", || daemon.ended().is_some());
    assert!(daemon.complaints("wire0") > 0, "{}", daemon.output());
    assert!(!dir.path().join("h0/subnet.env").exists(), "a subnet that nobody can reach");
}
