//! Clusters on a real etcd: many nodes that start at once, stores that stop under traffic, and
//! stores that come late; nodes with one address (`twins`).
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

mod twins;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS, host_address};
use crate::support::lab::{LEASE_TIMEOUT, Namespace, Process, SubnetEnv, comes_true, wait_until};
use crate::support::overlay::CONFIG;
use crate::support::pace::{Stopwatch, by_effort};
use crate::support::probe::packets_per_second;
use crate::support::status::{Status, is_ready};
use crate::support::traffic::{Numbered, kernel_counter, port, udp_socket};

/// How long the store is away: longer than the 13 s after which a connection without answers is
/// given up, or twice that. A minute of it is `tests/etcd/traffic/outage.rs`'s.
fn outage() -> Duration {
    by_effort(Duration::from_secs(16), Duration::from_secs(26))
}

const PREFIX: &str = "/coreos.com/network";

/// Hosts on a switch; their store is on the switch, too.
struct Nodes {
    daemons: Vec<Process>,
    cluster: Cluster,
    files: TempDir,
}

impl Nodes {
    fn new(count: usize) -> (Self, NamespaceEtcd) {
        let cluster = Cluster::new(count);
        let etcd = NamespaceEtcd::start(&cluster.switch, SWITCH_ADDRESS);
        etcd.ctl(&cluster.switch, &["put", &format!("{PREFIX}/config"), CONFIG]);
        let files = tempfile::tempdir().expect("a directory for the test");
        (Self { daemons: Vec::new(), cluster, files }, etcd)
    }

    fn start_all(&mut self) -> Vec<SubnetEnv> {
        self.daemons = (0..self.cluster.hosts.len()).map(|host| self.weftd(host)).collect();
        let leases: Vec<_> = (0..self.daemons.len()).map(|host| self.lease(host)).collect();
        self.wait_for_routes(self.daemons.len() - 1);
        leases
    }

    fn weftd(&self, host: usize) -> Process {
        let endpoints = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
        self.cluster.weftd(host, &self.dir(host), &[&endpoints])
    }

    fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    #[track_caller]
    fn lease(&mut self, host: usize) -> SubnetEnv {
        SubnetEnv::wait(&self.dir(host).join("subnet.env"), &mut self.daemons[host])
    }

    #[track_caller]
    fn wait_for_routes(&self, count: usize) {
        for host in 0..self.daemons.len() {
            wait_until(LEASE_TIMEOUT, "each daemon learns all leases", || {
                Status::try_of(&self.dir(host)).is_some_and(|status| status.routes() == count)
            });
        }
    }

    /// Keys below `subnets/` with their values, as etcd holds them.
    fn stored(&self, etcd: &NamespaceEtcd) -> BTreeMap<String, String> {
        let subnets = format!("{PREFIX}/subnets/");
        let text = etcd.ctl(&self.cluster.switch, &["get", "--prefix", &subnets]);
        let mut lines = text.lines();
        let mut stored = BTreeMap::new();
        while let (Some(key), Some(value)) = (lines.next(), lines.next()) {
            stored.insert(key.to_owned(), value.to_owned());
        }
        stored
    }
}

#[test]
fn twelve_simultaneous_nodes_get_and_keep_subnets() {
    const NODES: usize = 12;
    let (mut nodes, etcd) = Nodes::new(NODES);
    let started = Instant::now();
    let leases = nodes.start_all();
    println!("{NODES} daemons have leases and routes after {:?}", started.elapsed());
    let subnets: BTreeSet<&str> = leases.iter().map(|lease| lease.subnet.as_str()).collect();
    assert_eq!(subnets.len(), NODES, "two nodes have the same subnet: {leases:?}");
    for daemon in &mut nodes.daemons {
        assert!(daemon.ended().is_none(), "a daemon ended: {}", daemon.output());
    }
    let expected: BTreeMap<String, String> = leases
        .iter()
        .enumerate()
        .map(|(host, lease)| {
            let value = format!(r#"{{"PublicIP":"{}","PublicIPv6":null}}"#, host_address(host));
            (format!("{PREFIX}/subnets/{}-24", lease.network()), value)
        })
        .collect();
    assert_eq!(nodes.stored(&etcd), expected, "what is in etcd is not what flannel writes");
    assert_leased_for_a_day(&nodes, &etcd, &leases[0]);
    for host in 0..NODES {
        assert_reaches_all(&nodes, host, &leases);
    }
    // A crash and a new start: the same subnets, the same keys.
    for host in [0, 5, 11] {
        nodes.daemons[host].stop(Signal::KILL, Duration::from_secs(1));
        nodes.daemons[host] = nodes.weftd(host);
    }
    for host in [0, 5, 11] {
        wait_until(LEASE_TIMEOUT, "a restarted daemon is ready", || is_ready(&nodes.dir(host)));
        assert_eq!(nodes.lease(host), leases[host], "node {host} changed its subnet");
    }
    // Without its subnet file the node is known by its address.
    nodes.daemons[3].stop(Signal::KILL, Duration::from_secs(1));
    std::fs::remove_dir_all(nodes.dir(3)).unwrap();
    nodes.daemons[3] = nodes.weftd(3);
    assert_eq!(nodes.lease(3), leases[3], "a node without its files got another subnet");
    assert_eq!(nodes.stored(&etcd), expected, "restarts left something in etcd");
    nodes.wait_for_routes(NODES - 1);
    assert_reaches_all(&nodes, 0, &leases);
}

#[track_caller]
fn assert_leased_for_a_day(nodes: &Nodes, etcd: &NamespaceEtcd, lease: &SubnetEnv) {
    let key = format!("{PREFIX}/subnets/{}-24", lease.network());
    let json = etcd.ctl(&nodes.cluster.switch, &["get", &key, "-w", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let id = json["kvs"][0]["lease"].as_i64().unwrap_or_else(|| panic!("no etcd lease: {json}"));
    let id = format!("{id:x}");
    let text = etcd.ctl(&nodes.cluster.switch, &["lease", "timetolive", &id]);
    assert!(text.contains("TTL(86400s)"), "the lease is not for 24 h: {text}");
}

#[track_caller]
fn assert_reaches_all(nodes: &Nodes, from: usize, leases: &[SubnetEnv]) {
    // One answer of two is enough: the first packet may wait for a neighbour entry.
    let script: String = leases
        .iter()
        .map(|lease| {
            let address = lease.network();
            format!("ping -q -c2 -i0.1 -W2 {address} >/dev/null || echo {address} &\n")
        })
        .collect();
    let silent = nodes.cluster.hosts[from].exec(&["sh", "-c", &(script + "wait\n")]);
    assert_eq!(silent, "", "node {from} does not reach these");
}

/// Traffic between a pod on each of two nodes for the length of an outage.
struct Load {
    numbered: Numbered,
    stream_bytes: AtomicU64,
    stop: AtomicBool,
}

impl Load {
    /// Runs UDP and TCP while `during` runs, then checks that all of it arrived.
    fn run(nodes: &Nodes, leases: &[SubnetEnv], during: impl FnOnce(&Self)) -> String {
        let pods = [0, 1].map(|host| nodes.cluster.pod(host, &leases[host]));
        let [near, far] = [0, 1].map(|host| leases[host].pod_address());
        nodes.cluster.hosts[..2].iter().for_each(Namespace::steer_by_flow);
        pods.iter().for_each(Namespace::steer_by_flow);
        // Before the first packet each hop asks for its neighbour, which takes its time.
        pods[0].exec(&["ping", "-q", "-c3", "-i0.1", &far.to_string()]);
        let load =
            Self { numbered: Numbered::default(), stream_bytes: 0.into(), stop: false.into() };
        let (source, sink) = (udp_socket(&pods[0], near), udp_socket(&pods[1], far));
        let target = SocketAddr::from((far, port(&sink)));
        let listener = pods[1].enter(|| TcpListener::bind((far, 0))).unwrap();
        let server = listener.local_addr().unwrap();
        let client = pods[0].enter(|| TcpStream::connect(server)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let tcp = |name| [0, 1].map(|host: usize| kernel_counter(&pods[host], "Tcp", name));
        let before = ["EstabResets", "OutRsts"].map(tcp);
        thread::scope(|scope| {
            scope.spawn(|| load.numbered.receive(&sink));
            let sender = scope.spawn(|| load.numbered.send(&source, target, packets_per_second()));
            let writer = scope.spawn(|| load.write(client));
            let reader = scope.spawn(|| load.read(accepted));
            during(&load);
            load.stop.store(true, Ordering::Relaxed);
            load.numbered.stop.store(true, Ordering::Relaxed);
            sender.join().unwrap();
            let written = writer.join().expect("the TCP flow broke");
            comes_true(Duration::from_secs(2), || load.numbered.missing() == 0);
            load.numbered.drained.store(true, Ordering::Relaxed);
            assert_eq!(reader.join().expect("the TCP flow broke"), written, "TCP bytes");
        });
        let after = ["EstabResets", "OutRsts"].map(tcp);
        let sent = load.numbered.sent.load(Ordering::Relaxed);
        let gap_ms = load.numbered.longest_gap_ns.load(Ordering::Relaxed) / 1_000_000;
        let summary = format!(
            "sent {sent} datagrams, missing {}, reordered {}, longest gap {gap_ms} ms, TCP {} MB",
            load.numbered.missing(),
            load.numbered.reordered.load(Ordering::Relaxed),
            load.stream_bytes.load(Ordering::Relaxed) >> 20,
        );
        let drops = [0, 1].map(|host| Status::of(&nodes.dir(host)));
        assert!(
            sent > outage().as_secs() * packets_per_second() / 2,
            "the load was only {sent} packets"
        );
        assert_eq!(load.numbered.missing(), 0, "UDP was lost in the outage: {summary}: {drops:?}");
        assert_eq!(load.numbered.reordered.load(Ordering::Relaxed), 0, "{summary}");
        assert_eq!(after, before, "TCP resets while the store was away");
        summary
    }

    /// Numbered words, a kilobyte every two milliseconds.
    fn write(&self, mut stream: TcpStream) -> u64 {
        let mut number = 0_u64;
        while !self.stop.load(Ordering::Relaxed) {
            let block: Vec<u8> = (number..number + 128).flat_map(u64::to_be_bytes).collect();
            stream.write_all(&block).expect("the TCP flow was reset or is stuck");
            number += 128;
            thread::sleep(Duration::from_millis(2));
        }
        number * 8
    }

    fn read(&self, mut stream: TcpStream) -> u64 {
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut word = [0; 8];
        let mut number = 0_u64;
        let mut reader = std::io::BufReader::new(&mut stream);
        while reader.read_exact(&mut word).is_ok() {
            assert_eq!(u64::from_be_bytes(word), number, "TCP data was damaged");
            number += 1;
            self.stream_bytes.store(number * 8, Ordering::Relaxed);
        }
        number * 8
    }
}

/// A killed one is `tests/etcd/traffic/outage.rs`'s.
#[test]
fn a_frozen_etcd_loses_no_packet() {
    let (mut nodes, mut etcd) = Nodes::new(2);
    let leases = nodes.start_all();
    assert_reaches_all(&nodes, 0, &leases);
    let summary = Load::run(&nodes, &leases, |load| {
        wait_until(Duration::from_secs(5), "traffic flows before the outage", || {
            load.numbered.received.load(Ordering::Relaxed) > packets_per_second()
        });
        etcd.process.signal(Signal::STOP);
        thread::sleep(outage());
        for host in 0..2 {
            // On a busy machine a connection without answers may be given up later.
            wait_until(Duration::from_secs(5), "the operator is told", || {
                Status::of(&nodes.dir(host)).0["store"]["up"] == false
            });
            let status = Status::of(&nodes.dir(host));
            assert_eq!(status.0["ready"], true, "an outage of the store is not the node's");
            assert_eq!(status.routes(), 1, "routes were withdrawn in the outage");
        }
        etcd.process.signal(Signal::CONT);
        // What is written afterwards is seen.
        let key = format!("{PREFIX}/subnets/10.5.255.0-24");
        let value = r#"{"PublicIP":"172.20.0.77","PublicIPv6":null}"#;
        etcd.ctl(&nodes.cluster.switch, &["put", &key, value]);
        nodes.wait_for_routes(2);
        for host in 0..2 {
            wait_until(Duration::from_secs(5), "the store counts as up again", || {
                Status::of(&nodes.dir(host)).0["store"]["up"] == true
            });
        }
    });
    for daemon in &mut nodes.daemons {
        assert!(daemon.ended().is_none(), "a daemon ended: {}", daemon.output());
        let lines = daemon.output().lines().count();
        assert!(lines < 60, "the outage filled the log: {}", daemon.output());
    }
    println!("frozen: {summary}");
}

#[test]
fn a_store_that_comes_late_is_waited_for() {
    let cluster = Cluster::new(1);
    let files = tempfile::tempdir().unwrap();
    let endpoints = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
    let mut daemon = cluster.weftd(0, files.path(), &[&endpoints]);
    wait_until(LEASE_TIMEOUT, "weftd says that it has no configuration", || {
        daemon.complaints(&format!("http://{SWITCH_ADDRESS}:2379: ")) > 0
    });
    let told = daemon.output();
    assert!(told.contains("Connection refused"), "why: {told}");
    assert!(!told.contains("ConnectError("), "the log speaks Rust to the operator: {told}");
    let etcd = NamespaceEtcd::start(&cluster.switch, SWITCH_ADDRESS);
    // An empty store is another reason to wait.
    wait_until(LEASE_TIMEOUT, "weftd says that the store has no configuration", || {
        daemon.output().contains(&format!("{PREFIX}/config"))
    });
    assert!(daemon.ended().is_none(), "{}", daemon.output());
    let started = Instant::now();
    etcd.ctl(&cluster.switch, &["put", &format!("{PREFIX}/config"), CONFIG]);
    SubnetEnv::wait(&files.path().join("subnet.env"), &mut daemon);
    println!("started {:?} after the configuration came", started.elapsed());
    assert_eq!(daemon.stop(Signal::TERM, Duration::from_secs(1)).code(), Some(0));
}

/// flannel's default endpoints begin with a port that no etcd has used for ten years.
#[test]
fn default_endpoints_work_despite_dead_one() {
    let cluster = Cluster::new(1);
    let files = tempfile::tempdir().unwrap();
    let host = &cluster.hosts[0];
    let etcd = NamespaceEtcd::start(host, Ipv4Addr::LOCALHOST);
    etcd.ctl(host, &["put", &format!("{PREFIX}/config"), CONFIG]);
    for round in 0..3 {
        let started = Stopwatch::start();
        let mut daemon = cluster.weftd(0, files.path(), &[]);
        wait_until(LEASE_TIMEOUT, "weftd starts on its default endpoints", || {
            assert!(daemon.ended().is_none(), "{}", daemon.output());
            is_ready(files.path())
        });
        let took = started.elapsed();
        println!("round {round}: ready after {took:?}");
        assert!(
            took < Duration::from_secs(1),
            "the dead endpoint :4001 delays the start: {took:?}"
        );
        assert_eq!(daemon.stop(Signal::TERM, Duration::from_secs(1)).code(), Some(0));
    }
}
