//! weftd with the Kubernetes store in namespaces: real packets, and what a stop leaves.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;
use weft::status::Cause;

use crate::NET_CONF;
use crate::support::kube_api::{KubeApi, PREFIX, node};
use crate::support::lab::{
    LEASE_TIMEOUT, Lab, Namespace, Process, SubnetEnv, UNDERLAY, WEFTD, wait_until,
};
use crate::support::status::Status;

pub(crate) const PORT: u16 = 6443;
/// The start promised after a PodCIDR is there, and a busy machine.
pub(crate) const READY: Duration = Duration::from_secs(20);

/// An API that both hosts of a lab reach, on the first of them.
pub(crate) fn listen(lab: &Lab) -> TcpListener {
    lab.hosts[0].enter(|| TcpListener::bind((UNDERLAY[0], PORT)).expect("nobody else listens"))
}

/// Files of the daemons of one test.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        std::fs::write(files.0.path().join("net-conf.json"), NET_CONF).unwrap();
        files
    }

    fn host(&self, host: usize) -> PathBuf {
        self.0.path().join(format!("h{host}"))
    }

    fn weftd(&self, lab: &Lab, host: usize, arguments: &[&str]) -> Process {
        let dir = self.host(host);
        let flags = [
            WEFTD.to_owned(),
            "--kube-subnet-mgr".to_owned(),
            format!("--kube-api-url=http://{}:{PORT}", UNDERLAY[0]),
            format!("--net-config-path={}", self.0.path().join("net-conf.json").display()),
            format!("--subnet-file={}", dir.join("subnet.env").display()),
            format!("--status-socket={}", dir.join("weft.sock").display()),
            format!("--iface={}", UNDERLAY[host]),
            "--iptables-forward-rules=false".to_owned(),
            "--healthz-ip=127.0.0.1".to_owned(),
            "--healthz-port=8081".to_owned(),
        ];
        let argv: Vec<&str> =
            flags.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        let mut command = lab.hosts[host].command(&argv);
        Process::start(command.env("NODE_NAME", format!("n{host}")), "weftd")
    }
}

/// The status code of a health probe.
pub(crate) fn probe(host: &Namespace, path: &str) -> Option<u16> {
    host.enter(|| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, 8081)).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.split(' ').nth(1)?.parse().ok()
    })
}

pub(crate) fn is_told_up(api: &KubeApi, name: &str) -> bool {
    api.node(name)["status"]["conditions"].to_string().contains("\"FlannelIsUp\"")
}

fn knows_the_other(files: &Files, host: usize) -> bool {
    Status::try_of(&files.host(host)).is_some_and(|status| status.routes() == 1)
}

/// What there is can be listed by hand, and no more: the cluster assigns it.
fn assert_only_listed_by_hand(lab: &Lab, files: &Files) {
    let lease = |words: &[&str]| {
        let conf = format!("--net-config-path={}", files.0.path().join("net-conf.json").display());
        let url = format!("--kube-api-url=http://{}:{PORT}", UNDERLAY[0]);
        let weft = [env!("CARGO_BIN_EXE_weft"), "lease"];
        let flags = ["--", "--kube-subnet-mgr", &url, &conf];
        let mut command = lab.hosts[0].command(&[&weft, words, &flags].concat());
        let output = command.env("NODE_NAME", "n0").output().expect("weft runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let list = lease(&["list"]);
    for subnet in ["10.244.0.0/24", "10.244.1.0/24"] {
        assert!(list.contains(subnet), "{list}");
    }
    let shown = lease(&["show", &UNDERLAY[1].to_string()]);
    assert!(shown.contains("10.244.1.0/24"), "{shown}");
    for words in [&["reserve", "10.244.7.0/24", "192.0.2.7"][..], &["release", "10.244.1.0/24"]] {
        let refusal = lease(words);
        assert!(refusal.contains("Kubernetes"), "{refusal}");
    }
}

#[test]
fn an_api_that_is_away_at_the_start_is_named_by_the_status() {
    let (lab, files) = (Lab::two_hosts(), Files::new());
    let mut daemon = files.weftd(&lab, 0, &[]);
    let api = format!("{}:{PORT}", UNDERLAY[0]);
    wait_until(READY, "the status says who does not answer, and how often", || {
        Status::try_of(&files.host(0)).is_some_and(|status| {
            let hindrance = &status.0["start"]["hindrance"];
            status.causes() == [Cause::StartHindered]
                && hindrance["text"].as_str().is_some_and(|text| text.contains(&api))
                && hindrance["tries"].as_u64() > Some(1)
        })
    });
    let api = KubeApi::serve(listen(&lab));
    api.put_node(&node("n0", Some("10.244.0.0/24")));
    SubnetEnv::wait(&files.host(0).join("subnet.env"), &mut daemon);
    wait_until(READY, "nothing is wrong any more", || {
        Status::try_of(&files.host(0)).is_some_and(|status| status.causes().is_empty())
    });
}

#[test]
fn two_nodes_carry_packets_and_outlive_the_api() {
    let (lab, files) = (Lab::two_hosts(), Files::new());
    let api = KubeApi::serve(listen(&lab));
    api.put_node(&node("n0", Some("10.244.0.0/24")));
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let mut daemons = [files.weftd(&lab, 0, &[]), files.weftd(&lab, 1, &[])];
    let mut lease =
        |host: usize| SubnetEnv::wait(&files.host(host).join("subnet.env"), &mut daemons[host]);
    let leases = [lease(0), lease(1)];
    // The first subnet of the network, which etcd's nodes never get, is a Node's like any other.
    assert_eq!([&leases[0].subnet, &leases[1].subnet], ["10.244.0.1/24", "10.244.1.1/24"]);
    lab.connect_pods(leases.each_ref());
    for host in 0..2 {
        let what = "each node learns the other's Node";
        wait_until(LEASE_TIMEOUT, what, || knows_the_other(&files, host));
    }
    assert!(
        lab.ping(0, leases[1].pod_address(), 1400),
        "pods of two Nodes do not reach each other"
    );
    assert!(lab.ping(1, leases[0].pod_address(), 56));
    for name in ["n0", "n1"] {
        wait_until(READY, "the Node knows its network is up", || is_told_up(&api, name));
    }
    assert_eq!(probe(&lab.hosts[0], "/readyz"), Some(200));
    for phrase in [
        "Created subnet manager: Kubernetes Subnet Manager - n0",
        "Starting kube subnet manager",
        "Waiting 10m0s for node controller to sync",
        "Node controller sync successful",
        "Found network config - Backend type: udp",
    ] {
        let output = daemons[0].output();
        assert!(output.contains(phrase), "operators grep for {phrase:?}:\n{output}");
    }
    assert_only_listed_by_hand(&lab, &files);
    // A Node that goes away is nobody's peer any more, and comes back by itself.
    api.delete_node("n1");
    let gone = || Status::of(&files.host(0)).routes() == 0;
    wait_until(READY, "the route to a deleted Node is gone", gone);
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    wait_until(READY, "a Node made again is a peer again", || knows_the_other(&files, 0));
    assert!(lab.ping(0, leases[1].pod_address(), 56), "no traffic to a Node that was made again");
    // Without the API all goes on, and a stop is quick and leaves the annotations.
    let annotations = api.annotations("n0");
    drop(api);
    std::thread::sleep(Duration::from_secs(2));
    assert!(lab.ping(0, leases[1].pod_address(), 56), "pods are cut off by an API that is down");
    let started = Instant::now();
    let ended = daemons[0].stop(Signal::TERM, Duration::from_secs(1));
    println!("stopped without the API in {:?}", started.elapsed());
    assert_eq!(ended.code(), Some(0));
    assert_eq!(annotations[&format!("{PREFIX}public-ip")], UNDERLAY[0].to_string());
    assert!(files.host(0).join("subnet.env").exists(), "subnet.env was taken away");
}

#[test]
fn start_waits_for_subnet_changed_one_is_refused() {
    let (lab, files) = (Lab::two_hosts(), Files::new());
    let api = KubeApi::serve(listen(&lab));
    api.put_node(&node("n0", None));
    let mut daemon = files.weftd(&lab, 0, &[]);
    let waits = || daemon.complaints("\"n0\"");
    wait_until(READY, "the log says what is waited for", || waits() > 0);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(waits(), 1, "{}", daemon.output());
    assert_eq!(probe(&lab.hosts[0], "/readyz"), Some(503), "ready without a subnet");
    assert_eq!(probe(&lab.hosts[0], "/healthz"), Some(200));
    assert!(daemon.ended().is_none(), "the daemon ended for lack of a PodCIDR");
    api.edit("n0", |node| node["spec"] = json!({"podCIDR": "10.244.5.0/24"}));
    let lease = SubnetEnv::wait(&files.host(0).join("subnet.env"), &mut daemon);
    assert_eq!(lease.subnet, "10.244.5.1/24");
    wait_until(READY, "ready", || probe(&lab.hosts[0], "/readyz") == Some(200));
    wait_until(READY, "the watch is open", || api.watches() == 1);
    // The same Node with another subnet.
    api.delete_node("n0");
    api.put_node(&node("n0", Some("10.244.6.0/24")));
    wait_until(READY, "the change is refused", || {
        Status::of(&files.host(0)).0["store"]["refused_subnet"] == "10.244.6.0/24"
    });
    let refused = || daemon.complaints("10.244.6.0/24");
    wait_until(READY, "the log says so", || refused() > 0);
    assert_eq!(refused(), 1, "{}", daemon.output());
    assert_eq!(Status::of(&files.host(0)).0["store"]["subnet_refused"], true);
    let devices = lab.hosts[0].exec(&["ip", "-o", "address", "show", "flannel0"]);
    assert!(devices.contains("10.244.5.0/32"), "the network changed: {devices}");
    // Another stop, of a start that waits.
    let ended = daemon.stop(Signal::TERM, Duration::from_secs(1));
    assert_eq!(ended.code(), Some(0));
}

#[test]
fn what_cannot_start_says_why() {
    let (lab, files) = (Lab::two_hosts(), Files::new());
    let api = KubeApi::serve(listen(&lab));
    api.put_node(&node("n0", Some("10.99.0.0/24")));
    let mut outside = files.weftd(&lab, 0, &[]);
    assert_eq!(outside.wait(READY).code(), Some(1));
    assert_eq!(outside.complaints("10.99.0.0/24"), 1, "{}", outside.output());
    let mut no_file = files.weftd(&lab, 0, &["--net-config-path=/nonexistent/net-conf.json"]);
    assert_eq!(no_file.wait(READY).code(), Some(1));
    assert_eq!(no_file.complaints("/nonexistent/net-conf.json"), 1, "{}", no_file.output());
    let no_node = Command::new(WEFTD).arg("--kube-subnet-mgr").env_clear().output().unwrap();
    let text = String::from_utf8_lossy(&no_node.stderr).into_owned();
    assert_eq!(no_node.status.code(), Some(1));
    for variable in ["POD_NAME", "POD_NAMESPACE", "NODE_NAME"] {
        assert!(text.contains(variable), "{text}");
    }
    let depth = [("NODE_NAME", "n0"), ("EVENT_QUEUE_DEPTH", "many")];
    let depth = Command::new(WEFTD).arg("--kube-subnet-mgr").envs(depth).output().unwrap();
    let text = String::from_utf8_lossy(&depth.stderr).into_owned();
    assert!(depth.status.code() == Some(1) && text.contains("EVENT_QUEUE_DEPTH"), "{text}");
}
