//! IPv6 pods over the udp backend, between hosts that have IPv4 alone: traffic of both families
//! through one tunnel, errors, nodes without IPv6 beside those with it, and a family that goes.

use std::net::Ipv6Addr;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::SOON;
use crate::kernel_backends::families::{
    Node, config, connect, network, start, start_with, v6_subnet,
};
use crate::support::lab::{Lab, Namespace, PLAIN_CARD, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

const V4_ALONE: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;

/// Two hosts that forward IPv6 and have no address of it between them.
fn lab() -> Lab {
    let lab = Lab::two_hosts();
    for host in &lab.hosts {
        host.exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"]);
        host.exec(&["sysctl", "-qw", "net.ipv6.conf.wire0.disable_ipv6=1"]);
    }
    lab
}

struct Site {
    dir: tempfile::TempDir,
    lab: Lab,
    store: String,
    nodes: [Node; 2],
    /// The pods' addresses of IPv6.
    pods: [String; 2],
}

impl Site {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let store = local_store(dir.path(), &config("udp"));
        let lab = lab();
        let arguments = [&[store.as_str()], arguments].concat();
        let nodes = [0, 1].map(|host| start_with(&lab, dir.path(), host, &arguments));
        let pods = [0, 1].map(|host| connect(&lab, host, &nodes[host]));
        lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
        let site = Self { dir, lab, store, nodes, pods };
        site.wait_for_both();
        site
    }

    /// The largest packet of each family, both ways.
    fn wait_for_both(&self) {
        for (own, other) in [(0, 1), (1, 0)] {
            wait_for_ping(&self.lab, own, &self.pods[other], 1424);
            let pod = self.nodes[other].lease.pod_address();
            assert!(self.lab.ping(own, pod, 1444), "IPv4 is not carried beside IPv6");
        }
    }

    fn status(&self, host: usize) -> serde_json::Value {
        Status::of(&self.dir.path().join(format!("h{host}"))).0
    }
}

#[track_caller]
fn wait_for_ping(lab: &Lab, from: usize, to: &str, payload_bytes: usize) {
    let size = format!("-s{payload_bytes}");
    wait_until(SOON, &format!("pod {from} reaches {to} with {payload_bytes} bytes"), || {
        lab.pods[from].succeeds(&["ping", "-6", "-q", "-c1", "-W1", "-Mdo", &size, to])
    });
}

/// A ping from pod 0 soon prints all of these: errors come to a host only so often.
#[track_caller]
fn wait_for_words(lab: &Lab, arguments: &[&str], words: &[&str]) {
    let argv = [&["ping", "-6", "-n", "-c1", "-W1"], arguments].concat();
    wait_until(2 * SOON, &format!("{argv:?} prints {words:?}"), || {
        let output = lab.pods[0].command(&argv).output().expect("ping is there");
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        words.iter().all(|word| text.contains(word))
    });
}

fn told<'a>(status: &'a serde_json::Value, pointer: &str) -> &'a str {
    status.pointer(pointer).and_then(serde_json::Value::as_str).unwrap_or("")
}

fn keys(dir: &Path) -> Vec<String> {
    let keys = std::fs::read_dir(dir.join("store/subnets")).expect("the store");
    keys.flatten().map(|it| it.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn both_families_go_through_one_tunnel() {
    let site = Site::start();
    let Site { lab, nodes, pods, dir, .. } = &site;
    let pod: Ipv6Addr = pods[1].parse().unwrap();
    tcp_transfer(&lab.pods[0], &lab.pods[1], pod, 32 << 20, true);
    tcp_transfer(&lab.pods[1], &lab.pods[0], nodes[0].lease.pod_address(), 8 << 20, true);

    // What a flannel node reads of it, and what tells a weft node that it takes IPv6.
    let key = keys(dir.path()).into_iter().find(|key| key.contains(&*network6(&nodes[0])));
    let value = dir.path().join("store/subnets").join(key.expect("a key with both subnets"));
    let value: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(value).unwrap()).unwrap();
    assert_eq!(value["PublicIP"], "172.20.0.1");
    assert_eq!(value["BackendV6Data"]["TakesIPv6"], true, "{value}");
    assert!(value.get("PublicIPv6").is_none_or(serde_json::Value::is_null), "{value}");
    let env = std::fs::read_to_string(dir.path().join("h0/subnet.env")).unwrap();
    assert!(env.contains("FLANNEL_IPV6_NETWORK=fd00:5::/48\n"), "{env}");
    assert!(env.contains("FLANNEL_MTU=1472\n"), "{env}");

    let status = site.status(0);
    assert_eq!(told(&status, "/lease/ipv6/subnet"), network(&nodes[0].v6), "{status}");
    assert_eq!(told(&status, "/routes/0/ipv6_subnet"), network(&nodes[1].v6), "{status}");
    let dropped = status.pointer("/egress/drops").cloned().unwrap_or_default();
    let reasons: Vec<_> = dropped.as_object().into_iter().flatten().collect();
    // Before the other host is known there is no route to it.
    let noise = ["link-local", "dst-multicast", "no-route"];
    assert!(reasons.iter().all(|(reason, _)| noise.contains(&reason.as_str())), "{dropped}");
}

fn network6(node: &Node) -> String {
    network(&node.v6).replace('/', "-")
}

#[test]
fn senders_are_told_why_a_packet_went_no_further() {
    let site = Site::start();
    let Site { lab, pods, .. } = &site;
    wait_for_words(lab, &["-t2", &pods[1]], &["From fd00:5:", "Time exceeded: Hop limit"]);
    wait_for_words(lab, &["fd00:5:0:fff0::1"], &["Destination unreachable: No route"]);
    wait_for_words(lab, &["-Mdo", "-s1430", &pods[1]], &["mtu", "1472"]);
    // In fragments it arrives.
    wait_for_words(lab, &["-Mdont", "-s4000", &pods[1]], &[" 1 received"]);
}

#[test]
fn a_repaired_device_and_a_restart_carry_both_families_again() {
    let mut site = Site::start();
    let host = &site.lab.hosts[0];
    host.exec(&["ip", "-6", "route", "del", "fd00:5::/48", "dev", "flannel0"]);
    site.wait_for_both();
    host.exec(&["ip", "link", "del", "flannel0"]);
    site.wait_for_both();
    site.nodes[0].daemon.stop(Signal::TERM, Duration::from_secs(5));
    site.nodes[0] = start(&site.lab, site.dir.path(), 0, &site.store);
    site.wait_for_both();
}

#[test]
fn a_kernel_that_refuses_ipv6_is_told_and_the_peers_answer() {
    let site = Site::start();
    let Site { lab, pods, .. } = &site;
    let switch = |off: &str| {
        let setting = format!("net.ipv6.conf.flannel0.disable_ipv6={off}");
        lab.hosts[1].exec(&["sysctl", "-qw", &setting]);
    };
    switch("1");
    wait_until(SOON, "the status has it", || {
        told(&site.status(1), "/dataplane_wrong").contains("disable_ipv6")
    });
    // Rather than to have it vanish over there.
    wait_for_words(lab, &[&pods[1]], &["Destination unreachable: No route"]);
    assert!(lab.ping(0, site.nodes[1].lease.pod_address(), 1444), "IPv4 went with it");
    switch("0");
    site.wait_for_both();
    wait_until(SOON, "the status is well again", || {
        told(&site.status(1), "/dataplane_wrong").is_empty()
    });
}

#[test]
fn a_node_without_ipv6_gets_ipv4_and_its_ipv6_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), V4_ALONE);
    let lab = lab();
    let without = start(&lab, dir.path(), 1, &store);
    assert_eq!(without.v6, "");
    std::fs::write(dir.path().join("store/config"), config("udp")).unwrap();
    let with = start(&lab, dir.path(), 0, &store);
    let pod = connect(&lab, 0, &with);
    lab.connect_pods([&with.lease, &without.lease]);
    wait_until(SOON, "IPv4 between the two", || lab.ping(0, without.lease.pod_address(), 1444));
    wait_for_words(&lab, &["fd00:5:0:fff0::1"], &["Destination unreachable: No route"]);

    // The other one gets IPv6 too, and keeps its subnet.
    let mut nodes = [with, without];
    nodes[1].daemon.stop(Signal::TERM, Duration::from_secs(5));
    let kept = nodes[1].lease.subnet.clone();
    let env = dir.path().join("h1/subnet.env");
    nodes[1] = start(&lab, dir.path(), 1, &store);
    wait_until(SOON, "subnet.env promises IPv6", || !v6_subnet(&env).is_empty());
    nodes[1].v6 = v6_subnet(&env);
    assert_eq!(nodes[1].lease.subnet, kept, "pods lost their addresses");
    let pods = [pod, connect(&lab, 1, &nodes[1])];
    let site = Site { dir, lab, store, nodes, pods };
    site.wait_for_both();
}

/// Packets of IPv6 that the kernel's programs of a host took, sent and received, where nobody sends
/// any of IPv4; and those that its workers sent.
fn carried(site: &Site, host: usize) -> [u64; 3] {
    let status = site.status(host);
    let count = |pointer| status.pointer(pointer).and_then(serde_json::Value::as_u64);
    ["/fast_path/packets_sent", "/fast_path/packets_received", "/egress/packets_forwarded"]
        .map(|pointer| count(pointer).expect("the status counts them"))
}

#[test]
fn the_kernels_programs_carry_both_families() {
    const BYTES: u64 = 16 << 20;
    // The packets that these are, if all are full; workers answer the echoes that measure paths.
    const PACKETS: u64 = BYTES / 1472;
    const BY_WORKERS_MAX: u64 = 200;
    let site = Site::start_with(&["--fast-path=on"]);
    let Site { lab, pods, .. } = &site;
    let [near, far] = &lab.pods;
    let pod: Ipv6Addr = pods[1].parse().unwrap();
    let is_on = |host| site.status(host).pointer("/fast_path/peers") == Some(&1.into());
    wait_until(SOON, "the programs run", || {
        site.wait_for_both();
        is_on(0) && is_on(1)
    });
    // On a busy machine they may not take packets for a moment, and workers do.
    let by_workers = || {
        let before = [0, 1].map(|host| carried(&site, host));
        for (bytes, is_back) in [(0, false), (56, true), (1000, false), (1424, true)] {
            wait_for_ping(lab, usize::from(is_back), &pods[usize::from(!is_back)], bytes);
        }
        tcp_transfer(near, far, pod, BYTES, false);
        tcp_transfer(near, far, pod, BYTES, true);
        let after = [0, 1].map(|host| carried(&site, host));
        let of = |host: usize, what: usize| after[host][what] - before[host][what];
        for (host, what) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let count = of(host, what);
            assert!(count > PACKETS / 2, "host {host}: {count} packets, way {what}, by programs");
        }
        of(0, 2) + of(1, 2)
    };
    wait_until(4 * SOON, "ordinary packets of IPv6 never meet a worker", || {
        by_workers() < BY_WORKERS_MAX
    });
    wait_for_words(lab, &["-Mdo", "-s1430", &pods[1]], &["mtu", "1472"]);
    wait_for_words(lab, &["-t2", &pods[1]], &["From fd00:5:", "Time exceeded: Hop limit"]);
    // In fragments, by workers.
    wait_for_words(lab, &["-Mdont", "-s4000", &pods[1]], &[" 1 received"]);

    // A card that delivers packets one by one: a pair of devices merges them.
    for host in &lab.hosts {
        host.exec(&[&["ethtool", "-K", "wire0"], &PLAIN_CARD[..]].concat());
    }
    let has_pair = |host: &Namespace| host.succeeds(&["ip", "link", "show", "flannel0-gro0"]);
    wait_until(4 * SOON, "the receiver makes a pair that merges", || {
        tcp_transfer(near, far, pod, BYTES / 4, false);
        has_pair(&lab.hosts[1])
    });
    let received = |namespace: &Namespace| -> u64 {
        let text = namespace.exec(&["cat", "/sys/class/net/eth0/statistics/rx_packets"]);
        text.trim().parse().unwrap()
    };
    let before = (received(far), carried(&site, 1)[1]);
    tcp_transfer(near, far, pod, BYTES, false);
    let packets = received(far) - before.0;
    let taken = carried(&site, 1)[1] - before.1;
    assert!(taken > PACKETS / 2, "workers had the packets: {taken}");
    assert!(packets < taken / 2, "{taken} packets came to the pod in {packets}: none is merged");
}

/// The device is kept, and with it whatever an earlier weftd had set on it.
#[test]
fn a_family_that_goes_leaves_nothing_on_a_kept_device() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("udp"));
    let lab = lab();
    let arguments = [store.as_str(), "--keep-tunnel"];
    let mut node = start_with(&lab, dir.path(), 0, &arguments);
    let on_device =
        || lab.hosts[0].exec(&["ip", "-6", "route", "show", "dev", "flannel0", "fd00:5::/48"]);
    let addresses = || lab.hosts[0].exec(&["ip", "-6", "address", "show", "dev", "flannel0"]);
    assert!(!on_device().is_empty() && addresses().contains("fd00:5:"), "{}", addresses());
    node.daemon.stop(Signal::TERM, Duration::from_secs(5));
    assert!(!on_device().is_empty(), "it is not kept");
    std::fs::write(dir.path().join("store/config"), V4_ALONE).unwrap();
    let after = start_with(&lab, dir.path(), 0, &arguments);
    assert_eq!(after.lease.subnet, node.lease.subnet, "pods lost their addresses");
    wait_until(SOON, "nothing of IPv6 is left", || {
        on_device().is_empty() && !addresses().contains("fd00:5:")
    });
    assert!(!keys(dir.path()).iter().any(|key| key.contains('&')), "{:?}", keys(dir.path()));
}

#[test]
fn an_interface_that_can_carry_no_ipv6_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("udp"));
    let lab = lab();
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1279"]);
    let home = dir.path().join("h0");
    let mut daemon = lab.weftd(0, &home, &[&store]);
    wait_until(SOON, "the start ends", || daemon.ended().is_some());
    assert!(daemon.complaints("1280") > 0, "{}", daemon.output());
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1280"]);
    let mut daemon = lab.weftd(0, &home, &[&store]);
    let env = SubnetEnv::wait(&home.join("subnet.env"), &mut daemon);
    assert_eq!(env.mtu_bytes, 1280, "pods can have no IPv6 with less");
}

/// Hosts cut what is longer than their interface takes.
#[test]
fn a_narrow_underlay_carries_both_families() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("udp"));
    let lab = lab();
    for host in &lab.hosts {
        host.exec(&["ip", "link", "set", "wire0", "mtu", "1280"]);
    }
    let nodes = [0, 1].map(|host| start(&lab, dir.path(), host, &store));
    let pods = [0, 1].map(|host| connect(&lab, host, &nodes[host]));
    lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
    for (own, other) in [(0, 1), (1, 0)] {
        wait_for_ping(&lab, own, &pods[other], 1232);
    }
    let pod: Ipv6Addr = pods[1].parse().unwrap();
    tcp_transfer(&lab.pods[0], &lab.pods[1], pod, 4 << 20, true);
    tcp_transfer(&lab.pods[1], &lab.pods[0], nodes[0].lease.pod_address(), 4 << 20, true);
    let peer = || Status::of(&dir.path().join("h0")).0.pointer("/routes/0").cloned().unwrap();
    wait_until(4 * SOON, "the status says what goes whole", || {
        wait_for_ping(&lab, 0, &pods[1], 1232);
        let why = peer()["why"].as_str().unwrap_or_default().to_owned();
        peer()["path_mtu_bytes"] == 1252 && why.contains("fragments")
    });
}
