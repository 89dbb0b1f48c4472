//! Two networks of the same hosts, from one etcd: the packets of each go its own way.

use crate::support::lab::{LEASE_TIMEOUT, Process, SubnetEnv, wait_until};
use crate::support::members::Version;
use crate::support::status::Status;
use crate::traffic::site::{Plan, Site};

/// A network of its own below its prefix in etcd.
struct Network {
    prefix: &'static str,
    config: &'static str,
}

const NETWORKS: [Network; 2] = [
    Network {
        prefix: "/tunnelled",
        config: r#"{"Network":"10.50.0.0/16","Backend":{"Type":"vxlan","VNI":50}}"#,
    },
    Network {
        prefix: "/routed",
        config: r#"{"Network":"10.60.0.0/16","Backend":{"Type":"host-gw"}}"#,
    },
];

/// More than weftd itself sends meanwhile, to ask how the peer is.
const PINGS: u64 = 40;

impl Network {
    /// Its daemon on each of both hosts, with the first address of the lease on a device there.
    fn start(&self, site: &Site) -> [(Process, SubnetEnv); 2] {
        site.ctl(&["put", &format!("{}/config", self.prefix), self.config]);
        let daemons = [0, 1].map(|host| {
            let dir = site.dir(host).join(&self.prefix[1..]);
            let file = format!("--subnet-file={}", dir.join("subnet.env").display());
            let prefix = format!("--etcd-prefix={}", self.prefix);
            let mut daemon = site.weftd(host, &[&prefix, &file]);
            let lease = SubnetEnv::wait(&dir.join("subnet.env"), &mut daemon);
            let (host, bridge) = (&site.cluster.hosts[host], &self.prefix[1..]);
            host.exec(&["ip", "link", "add", bridge, "up", "type", "bridge"]);
            host.address(bridge, &lease.subnet);
            (daemon, lease)
        });
        for host in 0..2 {
            let dir = site.dir(host).join(&self.prefix[1..]);
            wait_until(LEASE_TIMEOUT, "its daemons meet", || {
                Status::try_of(&dir).is_some_and(|status| status.routes() == 1)
            });
        }
        daemons
    }
}

/// Packets that went into the tunnel of a host.
fn tunnelled(site: &Site) -> u64 {
    let text = site.cluster.hosts[0].exec(&["ip", "-s", "-j", "link", "show", "flannel.50"]);
    let links: serde_json::Value = serde_json::from_str(&text).unwrap();
    links[0]["stats64"]["tx"]["packets"].as_u64().unwrap()
}

/// The case "multi" of flannel's own tests.
#[test]
fn vxlan_and_host_gw_share_hosts_and_etcd() {
    let site = Site::build(Plan { config: None, ..Plan::of(Version::V3_5) });
    let networks = NETWORKS.each_ref().map(|network| network.start(&site));
    for ((network, daemons), is_tunnelled) in NETWORKS.iter().zip(&networks).zip([true, false]) {
        let before = tunnelled(&site);
        let far = daemons[1].1.gateway().to_string();
        let pings = ["ping", "-q", "-i0.05", "-W1", "-c", &PINGS.to_string(), &far];
        assert!(site.cluster.hosts[0].succeeds(&pings), "{} carries nothing", network.prefix);
        let in_tunnel = tunnelled(&site) - before;
        assert_eq!(in_tunnel >= PINGS, is_tunnelled, "{}: {in_tunnel}", network.prefix);
    }
}
