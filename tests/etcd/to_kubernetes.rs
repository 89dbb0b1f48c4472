//! A network that moves from etcd to the Kubernetes store and back, node by node under traffic, by
//! the steps of docs/migration.md.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS, host_address};
use crate::support::control::PREFIX;
use crate::support::flows::Flows;
use crate::support::kube_api::{KubeApi, node};
use crate::support::lab::{Namespace, Process, SubnetEnv, WEFTD, wait_until};
use crate::support::status::Status;

const SOON: Duration = Duration::from_secs(20);
const HOSTS: usize = 3;
const FLOWS: usize = 10;
const API_PORT: u16 = 6443;

/// The jq program of docs/migration.md that makes what a Node needs out of a lease.
fn recipe() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/migration.md");
    let text = std::fs::read_to_string(path).expect("the document is there");
    let (_, rest) = text.split_once("```jq\n").expect("it has a jq program");
    rest.split_once("```").expect("which ends").0.to_owned()
}

/// The Nodes, each with the lease of its host.
fn nodes(cluster: &Cluster, store: &str) -> Vec<Value> {
    let argv = [env!("CARGO_BIN_EXE_weft"), "lease", "list", "-o", "json", "--", store];
    let listed = cluster.hosts[0].exec(&argv);
    let of_host = |host: usize| {
        let mut jq = Command::new("jq");
        jq.args(["-c", "--arg", "address", &host_address(host).to_string(), &recipe()]);
        let dir = tempfile::tempdir().expect("a directory for the test");
        let leases = dir.path().join("leases.json");
        std::fs::write(&leases, &listed).expect("a file of the test");
        let output = jq.arg(&leases).output().expect("jq runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let patch: Value = serde_json::from_slice(&output.stdout).expect("one patch");
        let mut node = node(&format!("n{host}"), None);
        node["spec"] = patch["spec"].clone();
        let annotations = patch["metadata"]["annotations"].as_object().expect("annotations");
        for (key, value) in annotations {
            node["metadata"]["annotations"][key] = value.clone();
        }
        node
    };
    (0..cluster.hosts.len()).map(of_host).collect()
}

/// The daemons, the leases that they must keep, and where their files are.
struct Moving<'a> {
    cluster: &'a Cluster,
    dir: &'a Path,
    leases: &'a [SubnetEnv],
    pods: &'a [Namespace],
    daemons: Vec<Process>,
}

impl Moving<'_> {
    /// One move of all nodes: each weftd ends, and the next one has these flags.
    fn to(&mut self, flags: &[&str]) {
        for host in 0..HOSTS {
            let before = &mut self.daemons[host];
            assert!(before.stop(Signal::TERM, SOON).success(), "{}", before.output());
            self.daemons[host] = weftd(self.cluster, self.dir, host, flags);
            let home = home(self.dir, host);
            wait_until(SOON, "weftd is ready with the other store", || {
                Status::try_of(&home).is_some_and(|it| it.0["ready"] == true && it.routes() == 2)
            });
            let subnet = SubnetEnv::read(&home.join("subnet.env")).expect("it is there").subnet;
            assert_eq!(subnet, self.leases[host].subnet, "node {host} has another subnet");
            self.wait_for_pings(&format!("after node {host} has moved by {flags:?}"));
        }
    }

    /// Every pod reaches every other one.
    fn wait_for_pings(&self, when: &str) {
        for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
            let target = self.leases[to].pod_address().to_string();
            let ping = || self.pods[from].command(&["ping", "-c1", "-W1", &target]).output();
            wait_until(SOON, &format!("pods of node {from} reach those of {to} {when}"), || {
                ping().is_ok_and(|it| it.status.success())
            });
        }
    }
}

fn home(dir: &Path, host: usize) -> PathBuf {
    dir.join(format!("h{host}"))
}

fn weftd(cluster: &Cluster, dir: &Path, host: usize, flags: &[&str]) -> Process {
    let home = home(dir, host);
    let iface = format!("--iface={}", host_address(host));
    let subnet_file = format!("--subnet-file={}", home.join("subnet.env").display());
    let socket = format!("--status-socket={}", home.join("weft.sock").display());
    let own = [WEFTD, &iface, &subnet_file, &socket, "--iptables-forward-rules=false"];
    let argv = [&own, flags].concat();
    let mut command = cluster.hosts[host].command(&argv);
    Process::start(command.env("NODE_NAME", format!("n{host}")), "weftd")
}

fn there_and_back(backend: &str) {
    let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend}"}}}}"#);
    let cluster = Cluster::new(HOSTS);
    let etcd = NamespaceEtcd::start(&cluster.switch, SWITCH_ADDRESS);
    etcd.ctl(&cluster.switch, &["put", &format!("{PREFIX}/config"), &config]);
    let files = tempfile::tempdir().expect("a directory for the test");
    let dir = files.path();
    let store = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
    let mut daemons: Vec<_> =
        (0..HOSTS).map(|host| weftd(&cluster, dir, host, &[&store])).collect();
    let leases = daemons.iter_mut().enumerate();
    let leases = leases.map(|(host, it)| SubnetEnv::wait(&home(dir, host).join("subnet.env"), it));
    let leases: Vec<_> = leases.collect();
    let pods: Vec<_> = (0..HOSTS).map(|host| cluster.pod(host, &leases[host])).collect();
    let mut moving = Moving { cluster: &cluster, dir, leases: &leases, pods: &pods, daemons };
    moving.wait_for_pings("at first");
    let api = cluster.switch.enter(|| TcpListener::bind((SWITCH_ADDRESS, API_PORT)));
    let api = KubeApi::serve(api.expect("nobody else listens"));
    nodes(&cluster, &store).iter().for_each(|node| api.put_node(node));
    let net_conf = dir.join("net-conf.json");
    std::fs::write(&net_conf, &config).expect("a file of the test");
    let kubernetes = [
        "--kube-subnet-mgr",
        &format!("--kube-api-url=http://{SWITCH_ADDRESS}:{API_PORT}"),
        &format!("--net-config-path={}", net_conf.display()),
    ];
    let stop = AtomicBool::new(false);
    let report = thread::scope(|scope| {
        let flows = Flows::open(&pods[0], &pods[1], leases[1].pod_address(), FLOWS);
        let talk = scope.spawn(|| flows.talk(&stop));
        moving.to(&kubernetes);
        moving.to(&[&store]);
        stop.store(true, Ordering::Relaxed);
        talk.join().expect("the flows talk")
    });
    assert_eq!(report.open, FLOWS, "{backend}: {report}");
}

#[test]
fn nodes_of_udp_move_to_kubernetes_and_back_one_by_one() {
    there_and_back("udp");
}

#[test]
fn nodes_of_vxlan_move_to_kubernetes_and_back_one_by_one() {
    there_and_back("vxlan");
}
