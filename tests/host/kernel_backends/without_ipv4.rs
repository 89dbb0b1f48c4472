//! Networks without IPv4, between hosts that have no address of it but the loopback's: nodes are
//! known by their IPv6 addresses, and nothing of IPv4 is set up.

use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::families::{self, network, v6_subnet, wait_for_pings};
use crate::kernel_backends::SOON;
use crate::support::lab::{Lab, Process, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

pub(crate) fn config(backend: &str) -> String {
    format!(
        r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:5::/48",
            "Backend":{{"Type":"{backend}"}}}}"#
    )
}

/// Hosts that find their interface by the default route of IPv6.
fn lab() -> Lab {
    let lab = families::lab();
    for (index, host) in lab.hosts.iter().enumerate() {
        host.exec(&["ip", "-4", "address", "flush", "dev", "wire0"]);
        let other = format!("fd99::{}", 2 - index);
        host.exec(&["ip", "-6", "route", "add", "default", "via", &other, "dev", "wire0"]);
    }
    lab
}

pub(crate) struct Site {
    dir: TempDir,
    pub(crate) lab: Lab,
    store: String,
    pub(crate) daemons: Vec<Process>,
    /// Of each daemon, beside the store and the interface.
    arguments: Vec<String>,
    /// The subnets, each with its gateway.
    pub(crate) subnets: Vec<String>,
}

fn env(dir: &Path, host: usize) -> PathBuf {
    dir.join(format!("h{host}/subnet.env"))
}

impl Site {
    pub(super) fn start(backend: &str) -> Self {
        Self::start_with(backend, &[])
    }

    pub(crate) fn start_with(backend: &str, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = local_store(dir.path(), &config(backend));
        let (daemons, subnets) = (Vec::new(), Vec::new());
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let mut site = Self { dir, lab: lab(), store, daemons, arguments, subnets };
        for host in 0..2 {
            let (daemon, subnet) = site.daemon(host, &[]);
            site.daemons.push(daemon);
            site.subnets.push(subnet);
        }
        site
    }

    /// Starts a daemon, with `further` arguments than all have, and waits for its subnet.
    pub(crate) fn daemon(&self, host: usize, further: &[&str]) -> (Process, String) {
        let env = env(self.dir.path(), host);
        std::fs::remove_file(&env).ok();
        // An empty one stands for the default route; the lab's own names an IPv4 address.
        let mut arguments = vec![self.store.as_str(), "--iface="];
        arguments.extend(self.arguments.iter().map(String::as_str));
        arguments.extend(further);
        let mut daemon = self.lab.weftd(host, env.parent().unwrap(), &arguments);
        wait_until(SOON, "a node without IPv4 gets a subnet", || {
            assert!(daemon.ended().is_none(), "{}", daemon.output());
            env.exists()
        });
        (daemon, v6_subnet(&env))
    }

    pub(crate) fn status(&self, host: usize) -> serde_json::Value {
        Status::of(&self.dir.path().join(format!("h{host}"))).0
    }

    /// What a host's daemon says of the other host. A busy machine may not answer now and then.
    pub(crate) fn peer(&self, host: usize) -> serde_json::Value {
        let status = Status::try_of(&self.dir.path().join(format!("h{host}")));
        status.and_then(|it| it.0.pointer("/routes/0").cloned()).unwrap_or_default()
    }

    /// Connects a pod of each host, and gives their addresses.
    pub(crate) fn connect(&self) -> Vec<String> {
        let connect = |(host, subnet): (usize, &String)| {
            let (gateway, _) = subnet.split_once('/').unwrap();
            let pod = format!("{}2", gateway.strip_suffix('1').unwrap());
            self.lab.hosts[host].exec(&["ip", "address", "add", subnet, "dev", "pod0", "nodad"]);
            let address = format!("{pod}/64");
            self.lab.pods[host].exec(&["ip", "address", "add", &address, "dev", "eth0", "nodad"]);
            self.lab.pods[host].exec(&["ip", "-6", "route", "add", "default", "via", gateway]);
            pod
        };
        self.subnets.iter().enumerate().map(connect).collect()
    }

    pub(crate) fn store(&self) -> String {
        self.store.clone()
    }

    fn key(&self, host: usize) -> PathBuf {
        let subnet = network(&self.subnets[host]).replace('/', "-");
        self.dir.path().join(format!("store/subnets/0.0.0.0-0&{subnet}"))
    }

    pub(crate) fn weft(&self, host: usize, arguments: &[&str]) -> String {
        let socket = self.dir.path().join(format!("h{host}/weft.sock"));
        let socket = socket.display().to_string();
        let argv = [&[env!("CARGO_BIN_EXE_weft")], arguments, &["--socket", &socket]].concat();
        let output = self.lab.hosts[host].command(&argv).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        text(&output.stdout) + &text(&output.stderr)
    }

    /// That a peer in use is asked how it is, and shown.
    fn assert_told(&self, pods: &[String]) {
        let ping = self.lab.pods[0].spawn(&["ping", "-6", "-q", "-i0.2", &pods[1]]);
        wait_until(2 * SOON, "the peer is asked how it is", || self.peer(0)["state"] == "ok");
        drop(ping);
        let shown = self.weft(0, &["status"]);
        assert!(shown.contains(&network(&self.subnets[0])) && shown.contains("fd99::1"), "{shown}");
        let shown = self.weft(0, &["peers"]);
        assert!(shown.contains(&network(&self.subnets[1])) && shown.contains("fd99::2"), "{shown}");
    }

    /// That `weft explain` says what the kernel does.
    fn assert_explained(&self, pods: &[String]) {
        for ends in [[&pods[0], &pods[1]], [&pods[1], &pods[0]]] {
            let told = self.weft(0, &["explain", ends[0], ends[1]]);
            assert!(told.contains(": goes\n"), "the kernel carries it, and weft says: {told}");
        }
        self.lab.hosts[0].exec(&["ip", "-6", "route", "add", "blackhole", &pods[1]]);
        let told = self.weft(0, &["explain", &pods[0], &pods[1]]);
        assert!(told.contains("ip -6 route get"), "the kernel drops it, and weft says: {told}");
        self.lab.hosts[0].exec(&["ip", "-6", "route", "del", "blackhole", &pods[1]]);
    }

    /// That the hosts have neither routes nor addresses of IPv4, but the loopback's.
    fn assert_no_ipv4(&self) {
        for host in &self.lab.hosts {
            assert_eq!(
                host.exec(&["ip", "-4", "route", "show", "table", "all"])
                    .matches("dev wire0")
                    .count(),
                0
            );
            let addresses = host.exec(&["ip", "-4", "-o", "address"]);
            assert!(addresses.lines().all(|line| line.contains(" lo ")), "{addresses}");
        }
    }
}

#[test]
fn each_backend_carries_ipv6_alone() {
    for (backend, payload_bytes, data) in [
        ("udp", 1404, r#","BackendV6Data":{"Version":1,"TakesIPv6":true}"#),
        ("vxlan", 1382, r#","BackendType":"vxlan","BackendV6Data":{"VNI":1,"VtepMAC":""#),
        ("host-gw", 1452, r#","BackendType":"host-gw""#),
    ] {
        let mut site = Site::start(backend);
        let pods = site.connect();
        for (own, other) in [(0, 1), (1, 0)] {
            wait_for_pings(&site.lab, own, &pods[other], payload_bytes);
        }
        site.assert_no_ipv4();
        let links = site.lab.hosts[0].exec(&["ip", "-br", "link"]);
        assert_eq!(links.contains("flannel-v6.1"), backend == "vxlan", "{links}");
        assert_eq!(links.contains("flannel0"), backend == "udp", "{links}");
        assert!(!links.contains("flannel.1"), "a device that nobody needs: {links}");

        let value = std::fs::read_to_string(site.key(0)).unwrap();
        let start = format!(r#"{{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::1"{data}"#);
        assert!(value.starts_with(&start), "flannel's nodes read another value: {value}");
        let env = std::fs::read_to_string(env(site.dir.path(), 0)).unwrap();
        let (subnet, mtu_bytes) = (&site.subnets[0], payload_bytes + 48);
        assert_eq!(
            env,
            format!(
                "FLANNEL_IPV6_NETWORK=fd00:5::/48\nFLANNEL_IPV6_SUBNET={subnet}\n\
                 FLANNEL_MTU={mtu_bytes}\nFLANNEL_IPMASQ=false\n"
            )
        );

        // The kernel may carry packets a moment before that is reported.
        let mut status = serde_json::Value::Null;
        wait_until(SOON, "the status has the other node", || {
            status = site.status(0);
            status["routes"][0].is_object()
        });
        let lease = &status["lease"];
        assert_eq!(lease["ipv6"]["public_ip"], "fd99::1", "{status}");
        for absent in ["network", "subnet", "public_ip"] {
            assert!(lease.get(absent).is_none(), "{absent} of IPv4, which there is not: {lease}");
        }
        let peer = &status["routes"][0];
        let told = [&peer["via"], &peer["ipv6_subnet"]];
        let via = if backend == "udp" { "[fd99::2]:8285" } else { "fd99::2" };
        assert_eq!(told, [via, &network(&site.subnets[1])], "{peer}");
        assert!(peer.get("subnet").is_none(), "{peer}");
        assert!(!status.to_string().contains("0.0.0.0"), "an address that nobody has: {status}");
        site.assert_told(&pods);
        site.assert_explained(&pods);

        // The other node's next address, and a restart, cost nobody the subnet.
        site.lab.hosts[1].exec(&["ip", "address", "add", "fd99::12/64", "dev", "wire0", "nodad"]);
        site.lab.hosts[1].exec(&["ip", "address", "del", "fd99::2/64", "dev", "wire0"]);
        wait_until(SOON, "the store names the next address", || {
            let value = std::fs::read_to_string(site.key(1)).unwrap_or_default();
            value.contains(r#""PublicIPv6":"fd99::12""#)
        });
        for (own, other) in [(0, 1), (1, 0)] {
            wait_for_pings(&site.lab, own, &pods[other], payload_bytes);
        }
        site.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
        if backend != "udp" {
            wait_for_pings(&site.lab, 1, &pods[0], payload_bytes);
        }
        let (daemon, again) = site.daemon(0, &[]);
        site.daemons[0] = daemon;
        assert_eq!(again, site.subnets[0], "pods lost their addresses");
        wait_for_pings(&site.lab, 1, &pods[0], payload_bytes);
    }
}

#[test]
fn a_second_node_of_one_ipv6_address_is_refused_by_name() {
    let site = Site::start("host-gw");
    let address: Ipv6Addr = "fd99::1".parse().unwrap();
    let home = site.dir.path().join("double");
    // Whoever says that it is the other host is another machine.
    let arguments = [site.store.as_str(), "--iface=wire0", "--public-ipv6=fd99::1"];
    let mut double = site.lab.weftd(1, &home, &arguments);
    wait_until(SOON, "the second node ends", || double.ended().is_some());
    assert!(double.complaints(&address.to_string()) > 0, "{}", double.output());
    assert!(!home.join("subnet.env").exists(), "two nodes share a subnet");
}

#[test]
fn a_network_that_loses_ipv4_keeps_its_ipv6_subnets_and_gets_the_other_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &families::config("vxlan"));
    let lab = families::lab();
    let mut first = families::start(&lab, dir.path(), 0, &store);
    first.daemon.stop(Signal::TERM, Duration::from_secs(5));
    assert!(lab.hosts[0].succeeds(&["ip", "link", "show", "flannel.1"]));
    std::fs::write(dir.path().join("store/config"), config("vxlan")).unwrap();
    let home = dir.path().join("h0");
    // The store alone says which lease is the node's.
    std::fs::remove_file(home.join("subnet.env")).unwrap();
    let mut alone = lab.weftd(0, &home, &[&store, "--iface=wire0"]);
    wait_until(SOON, "it gets a subnet", || home.join("subnet.env").exists());
    assert_eq!(v6_subnet(&home.join("subnet.env")), first.v6, "pods lost their addresses");
    wait_until(SOON, "the device of IPv4 is gone", || {
        !lab.hosts[0].succeeds(&["ip", "link", "show", "flannel.1"])
    });
    let keys = || {
        let keys = std::fs::read_dir(dir.path().join("store/subnets")).unwrap();
        keys.map(|it| it.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(keys(), [format!("0.0.0.0-0&{}", network(&first.v6).replace('/', "-"))]);
    alone.stop(Signal::TERM, Duration::from_secs(5));
    std::fs::write(dir.path().join("store/config"), families::config("vxlan")).unwrap();
    std::fs::remove_file(home.join("subnet.env")).unwrap();
    let again = families::start(&lab, dir.path(), 0, &store);
    assert_eq!(again.v6, first.v6, "pods lost their addresses");
    assert!(keys().len() == 1 && keys()[0].starts_with("10.5."), "{:?}", keys());
}

#[test]
fn a_device_that_carries_nothing_is_no_readiness() {
    let site = Site::start("vxlan");
    let pods = site.connect();
    wait_for_pings(&site.lab, 0, &pods[1], 1300);
    let cluster = site.weft(0, &["cluster"]);
    assert!(cluster.contains("fd99::2"), "no table of the nodes: {cluster}");
    let is_off = "net.ipv6.conf.flannel-v6/1.disable_ipv6";
    site.lab.hosts[0].exec(&["sysctl", "-qw", &format!("{is_off}=1")]);
    let state = || site.status(0).pointer("/verdict/state").cloned().unwrap_or_default();
    wait_until(2 * SOON, "a node that carries nothing does not say ready", || state() != "ready");
    site.lab.hosts[0].exec(&["sysctl", "-qw", &format!("{is_off}=0")]);
    wait_for_pings(&site.lab, 0, &pods[1], 1300);
    wait_until(2 * SOON, "it is ready again", || state() == "ready");
}

#[test]
fn an_address_that_another_host_has_is_not_the_nodes() {
    let site = Site::start("host-gw");
    let [first, second] = [&site.lab.hosts[0], &site.lab.hosts[1]];
    let pods = site.connect();
    wait_for_pings(&site.lab, 0, &pods[1], 1300);
    first.exec(&["sysctl", "-qw", "net.ipv6.conf.wire0.accept_dad=1"]);
    first.exec(&["ip", "address", "del", "fd99::1/64", "dev", "wire0"]);
    second.exec(&["ip", "address", "add", "fd99::1/64", "dev", "wire0", "nodad"]);
    first.exec(&["ip", "address", "add", "fd99::1/64", "dev", "wire0"]);
    wait_until(SOON, "the kernel finds the other host's", || {
        first.exec(&["ip", "-6", "address", "show", "dev", "wire0"]).contains("dadfailed")
    });
    let state = || site.status(0).pointer("/verdict/state").cloned().unwrap_or_default();
    wait_until(2 * SOON, "a node without a usable address does not say ready", || {
        state() != "ready"
    });
}
