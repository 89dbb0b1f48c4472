//! Any number of hosts on one switch, each a namespace, for tests that need more than two.

use std::net::Ipv4Addr;
use std::path::Path;

use super::lab::{Namespace, Process, WEFTD};

/// Hosts at 172.20.0.1, 172.20.0.2, ... on a bridge that has the address 172.20.0.254.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// The hosts, in the order of their addresses; device `wire0`.
    pub(crate) hosts: Vec<Namespace>,
    /// The bridge's own namespace.
    pub(crate) switch: Namespace,
}

/// The switch's own address, where a store may listen.
pub(crate) const SWITCH_ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 254);

/// The underlay address of a host.
pub(crate) fn host_address(index: usize) -> Ipv4Addr {
    let last = u8::try_from(index + 1).expect("a cluster has few hosts");
    Ipv4Addr::new(172, 20, 0, last)
}

impl Cluster {
    /// Builds the switch and `count` hosts that forward.
    pub(crate) fn new(count: usize) -> Self {
        let switch = Namespace::new("switch");
        switch.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
        switch.address("br0", &format!("{SWITCH_ADDRESS}/24"));
        switch.exec(&["ip", "link", "set", "br0", "up"]);
        let hosts = (0..count).map(|index| {
            let host = Namespace::new(&format!("n{}", index + 1));
            let port = format!("port{index}");
            host.link("wire0", &switch, &port, 1500);
            switch.exec(&["ip", "link", "set", &port, "master", "br0"]);
            host.address("wire0", &format!("{}/24", host_address(index)));
            host.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
            host
        });
        Self { hosts: hosts.collect(), switch }
    }

    /// Starts weftd on a host, its files in `dir`, without pods and without forward rules.
    #[track_caller]
    pub(crate) fn weftd(&self, host: usize, dir: &Path, arguments: &[&str]) -> Process {
        weftd_in(&self.hosts[host], host_address(host), dir, arguments)
    }
}

/// Starts weftd in any namespace that has the address `own`, its files in `dir`.
#[track_caller]
pub(crate) fn weftd_in(
    namespace: &Namespace,
    own: Ipv4Addr,
    dir: &Path,
    arguments: &[&str],
) -> Process {
    let subnet_file = format!("--subnet-file={}", dir.join("subnet.env").display());
    let iface = format!("--iface={own}");
    let mut argv = vec![WEFTD, &iface, &subnet_file, "--iptables-forward-rules=false"];
    argv.extend(arguments);
    namespace.spawn(&argv)
}
