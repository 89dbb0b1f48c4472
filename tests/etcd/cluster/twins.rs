//! Two hosts whose weftd have one PublicIP: the second is told whose it is, waits, and takes over.
//! They share a kernel, so each is given a machine-id of its own, as two hosts have.

use std::net::Ipv4Addr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cluster::Nodes;
use crate::support::cluster::{NamespaceEtcd, SWITCH_ADDRESS, host_address};
use crate::support::lab::{Process, SubnetEnv, WEFTD, wait_until};
use crate::support::machine::Machine;
use crate::support::pace::by_effort;
use crate::support::status::{Status, metric};

/// A start on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// The second takes over within this time of the first's end: the longest pause between two tries
/// on a busy machine.
const TAKEN_OVER: Duration = Duration::from_secs(15);

const NAMES: [&str; 2] = ["node-a", "node-b"];

/// Starts the daemon of a host by the name of it, with the first host's PublicIP.
fn weftd(nodes: &Nodes, host: usize, arguments: &[&str]) -> Process {
    weftd_at(nodes, host, host_address(0), &nodes.dir(host), arguments)
}

/// The same, with any PublicIP and with its files in `dir`.
fn weftd_at(
    nodes: &Nodes,
    host: usize,
    public_ip: Ipv4Addr,
    dir: &Path,
    arguments: &[&str],
) -> Process {
    let subnet_file = format!("--subnet-file={}", dir.join("subnet.env").display());
    let iface = host_address(host);
    let (iface, public_ip) = (format!("--iface={iface}"), format!("--public-ip={public_ip}"));
    let endpoints = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
    let mut argv = vec![WEFTD, &subnet_file, &iface, &public_ip, &endpoints];
    argv.push("--iptables-forward-rules=false");
    argv.extend(arguments);
    let machine = Machine {
        hostname: NAMES[host],
        machine_id: &"ab".repeat(16 - host),
        boot_id: NAMES[host],
    };
    machine.spawn(&nodes.cluster.hosts[host], dir, &argv)
}

fn is_ready(nodes: &Nodes, host: usize) -> bool {
    Status::try_of(&nodes.dir(host)).is_some_and(|status| status.0["ready"] == true)
}

/// F15, as both hosts boot at once, again and again.
#[test]
fn simultaneous_weftds_with_one_public_ip_one_wins() {
    let tries: u8 = by_effort(20, 100);
    let (nodes, etcd) = Nodes::new(2);
    let (mut won, mut slowest, began) = ([0; 2], Duration::ZERO, Instant::now());
    for number in 1..=tries {
        // Claims outlive their nodes.
        let public_ip = Ipv4Addr::new(198, 51, 100, number);
        let dirs = [0, 1].map(|host: usize| nodes.dir(host).join(number.to_string()));
        let has_subnet = |host: usize| SubnetEnv::read(&dirs[host].join("subnet.env")).is_some();
        let mut daemons = [0, 1].map(|host| weftd_at(&nodes, host, public_ip, &dirs[host], &[]));
        let started = Instant::now();
        let mut winner = 0;
        wait_until(SOON, "one gets a subnet, and the other is told whose the address is", || {
            winner = usize::from(has_subnet(1));
            has_subnet(winner)
                && daemons[1 - winner].complaints(&format!("{:?}", NAMES[winner])) > 0
        });
        slowest = slowest.max(started.elapsed());
        assert!(!has_subnet(1 - winner), "two nodes share a subnet");
        won[winner] += 1;
        for daemon in &mut daemons {
            assert!(daemon.ended().is_none(), "{}", daemon.output());
            daemon.stop(Signal::KILL, SOON);
        }
    }
    let subnets = nodes.stored(&etcd).len();
    assert_eq!(subnets, usize::from(tries), "a refused node left a lease behind");
    println!("{tries} tries in {:?}, 0 shared, won {won:?}, slowest {slowest:?}", began.elapsed());
}

/// F15, to the end of the first node and back.
#[test]
fn second_weftd_with_one_public_ip_takes_over() {
    let (nodes, etcd) = Nodes::new(2);
    let env = |host: usize| nodes.dir(host).join("subnet.env");
    let mut first = weftd(&nodes, 0, &[]);
    let lease = SubnetEnv::wait(&env(0), &mut first);
    let stored = nodes.stored(&etcd);
    let mut second = weftd(&nodes, 1, &[]);
    wait_until(SOON, "the second is told whose the address is", || {
        second.complaints(&format!("{:?}", NAMES[0])) > 0
    });
    // Some tries later it is the same.
    thread::sleep(SOON);
    assert_eq!(SubnetEnv::read(&env(1)), None, "two nodes share a subnet");
    assert!(!is_ready(&nodes, 1), "a node without a subnet looks ready");
    assert!(is_ready(&nodes, 0), "the second harms the first: {}", first.output());
    assert_eq!(nodes.stored(&etcd), stored, "the second wrote to the store");
    assert!(!first.output().contains("ALARM"), "{}", first.output());

    // Which gives the claim up; one that is killed keeps it until it lapses.
    first.stop(Signal::TERM, SOON);
    let ended = Instant::now();
    wait_until(TAKEN_OVER, "the second takes over", || SubnetEnv::read(&env(1)).is_some());
    println!("taken over {:?} after the first's end", ended.elapsed());
    assert_eq!(SubnetEnv::wait(&env(1), &mut second), lease, "the address kept its subnet");
    wait_until(SOON, "the second is ready", || is_ready(&nodes, 1));
    let mut again = weftd(&nodes, 0, &["--start-from-cache=false"]);
    wait_until(SOON, "the first is told in turn", || {
        again.complaints(&format!("{:?}", NAMES[1])) > 0
    });
    assert!(again.ended().is_none() && second.ended().is_none(), "{}", second.output());
}

/// F15 where etcd's role has what flannel needs, and no more.
#[test]
fn role_without_claims_warns_duplicates_raise_alarm() {
    let (nodes, etcd) = Nodes::new(2);
    grant_flannels_keys(&nodes, &etcd);
    let start = |host: usize| {
        let login = ["--etcd-username=flannel", "--etcd-password=hush"];
        let mut daemon = weftd(&nodes, host, &login);
        let lease = SubnetEnv::wait(&nodes.dir(host).join("subnet.env"), &mut daemon);
        let claim = "/coreos.com/network/weft/nodes/172.20.0.1";
        wait_until(SOON, "it is told", || daemon.complaints(claim) > 0);
        assert_eq!(daemon.complaints(claim), 1, "{}", daemon.output());
        (daemon, lease)
    };
    let (mut first, of_first) = start(0);
    let (mut second, of_second) = start(1);
    // As with flanneld; only that the first sees who writes.
    assert_eq!(of_first, of_second);
    wait_until(SOON, "the first sees that another node writes its lease", || {
        metric(&nodes.dir(0), "flannel_lease_written_by_others_total") >= Some(1.0)
    });
    wait_until(SOON, "the alarm is told", || first.output().contains("ALARM"));
    assert!(!second.output().contains("ALARM"), "{}", second.output());
    assert!(first.ended().is_none() && second.ended().is_none());
}

fn grant_flannels_keys(nodes: &Nodes, etcd: &NamespaceEtcd) {
    let ctl = |arguments: &[&str]| etcd.ctl(&nodes.cluster.switch, arguments);
    ctl(&["user", "add", "root:secret"]);
    ctl(&["user", "grant-role", "root", "root"]);
    ctl(&["role", "add", "flannel"]);
    for (kind, key) in [("readwrite", "subnets/"), ("read", "config")] {
        let key = format!("{}/{key}", crate::cluster::PREFIX);
        ctl(&["role", "grant-permission", "flannel", "--prefix=true", kind, &key]);
    }
    ctl(&["user", "add", "flannel:hush"]);
    ctl(&["user", "grant-role", "flannel", "flannel"]);
    ctl(&["auth", "enable"]);
}
