//! The vxlan backend with leases in a real etcd: flannel's bytes in the store, and a host that was
//! rebooted while etcd is away.

use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::{HOST_GW, SOON, VXLAN, value};
use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS, host_address};
use crate::support::lab::{SubnetEnv, wait_until};

const KEY: &str = "/coreos.com/network";

#[test]
fn reboot_without_store_keeps_address_and_peers() {
    let cluster = Cluster::new(2);
    let mut etcd = NamespaceEtcd::start(&cluster.switch, SWITCH_ADDRESS);
    etcd.ctl(&cluster.switch, &["put", &format!("{KEY}/config"), VXLAN]);
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let store = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
    let sockets = [0, 1]
        .map(|host: usize| format!("--status-socket={}/weft.sock", dirs[host].path().display()));
    let start = |host: usize| cluster.weftd(host, dirs[host].path(), &[&store, &sockets[host]]);
    let mut daemons = [start(0), start(1)];
    let leases = [0, 1].map(|host: usize| {
        SubnetEnv::wait(&dirs[host].path().join("subnet.env"), &mut daemons[host])
    });
    let pods = [0, 1].map(|host: usize| cluster.pod(host, &leases[host]));
    let far = leases[1].pod_address().to_string();
    let reach = || pods[0].succeeds(&["ping", "-q", "-c1", "-W0.2", &far]);
    wait_until(Duration::from_secs(20), "the pods reach each other", reach);
    let key = format!("{KEY}/subnets/{}-24", leases[0].network());
    let written = etcd.ctl(&cluster.switch, &["get", "--print-value-only", &key]);
    let link = cluster.hosts[0].exec(&["ip", "-o", "link", "show", "flannel.1"]);
    let mac = link.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let data = format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
    let flannels = value(&host_address(0).to_string(), "vxlan", &data);
    assert_eq!(written.trim_end(), flannels, "the lease in etcd");
    let cache = dirs[0].path().join("subnet.env.cache");
    wait_until(Duration::from_secs(20), "the peer is remembered", || {
        let cache = std::fs::read_to_string(&cache).unwrap_or_default();
        cache.contains(&format!("{}", leases[1].network()))
    });
    etcd.process.stop(Signal::KILL, SOON);
    daemons[0].stop(Signal::KILL, SOON);
    cluster.hosts[0].exec(&["ip", "link", "delete", "flannel.1"]);
    daemons[0] = start(0);
    wait_until(Duration::from_secs(10), "the pods reach each other again", reach);
    let again = cluster.hosts[0].exec(&["ip", "-o", "link", "show", "flannel.1"]);
    assert!(again.contains(mac), "peers know another hardware address than {again}");
}

#[test]
fn an_old_cache_removes_no_later_peer() {
    let cluster = Cluster::new(2);
    let mut etcd = NamespaceEtcd::start(&cluster.switch, SWITCH_ADDRESS);
    etcd.ctl(&cluster.switch, &["put", &format!("{KEY}/config"), HOST_GW]);
    let files = tempfile::tempdir().unwrap();
    let store = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
    let start = || cluster.weftd(0, files.path(), &[&store]);
    let put = |subnet: &str| {
        let lease = value(&host_address(1).to_string(), "host-gw", "null");
        etcd.ctl(&cluster.switch, &["put", &format!("{KEY}/subnets/{subnet}"), &lease])
    };
    let has_route = |to: &str| {
        let routes = cluster.hosts[0].exec(&["ip", "route", "show", to]);
        routes.contains(&host_address(1).to_string())
    };
    put("10.5.201.0-24");
    let mut daemon = start();
    SubnetEnv::wait(&files.path().join("subnet.env"), &mut daemon);
    let cache = files.path().join("subnet.env.cache");
    let remembers = || {
        let text = std::fs::read_to_string(&cache).unwrap_or_default();
        text.contains("10.5.201.0")
    };
    wait_until(Duration::from_secs(30), "the first peer is remembered", remembers);
    let old = std::fs::read(&cache).unwrap();
    put("10.5.202.0-24");
    wait_until(Duration::from_secs(30), "the later peer has its route", || {
        has_route("10.5.202.0/24")
    });
    daemon.stop(Signal::KILL, SOON);
    etcd.process.stop(Signal::KILL, SOON);
    std::fs::write(&cache, old).unwrap();
    cluster.hosts[0].exec(&["ip", "route", "del", "10.5.201.0/24"]);
    let mut daemon = start();
    wait_until(Duration::from_secs(30), "the cache's peer has its route again", || {
        has_route("10.5.201.0/24")
    });
    // What is set comes before what is removed, in one pass. One more pass, to be sure.
    cluster.hosts[0].exec(&["ip", "route", "del", "10.5.201.0/24"]);
    wait_until(Duration::from_secs(30), "the cache's peer has its route again", || {
        has_route("10.5.201.0/24")
    });
    assert!(has_route("10.5.202.0/24"), "an old cache cuts pods off from a later peer");
    assert!(daemon.ended().is_none(), "{}", daemon.output());
}
