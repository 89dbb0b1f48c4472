//! flannel's DaemonSet as it is published, with weftd in it: its arguments, its variables, its
//! ConfigMap, its paths, on two nodes among others that run other backends. What pods see, what
//! the Nodes say, and what a kill and a reboot change.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::daemon::{PORT, READY, is_told_up, listen, probe};
use crate::secure::Certificates;
use crate::support::daemonset::CONTAINER;
use crate::support::kube_api::{KubeApi, PREFIX, Seen, What, flannel_node, node};
use crate::support::lab::{Lab, Namespace, Process, SubnetEnv, UNDERLAY, WEFTD, wait_until};
use crate::support::pace::Stopwatch;
use crate::support::probe::{End, Probe};
use crate::support::status::Status;
use crate::support::traffic::{tcp_transfer, uninterrupted};

const TOKEN: &str = "the-token-of-the-service-account";
/// A machine that knows nothing of the overlay, and node 0's address on the link to it.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
const NODE_OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Other Nodes of the cluster: every second one runs the backend of the test.
const OTHERS: u8 = 20;

/// flannel's own, of its manifest.
const ARGUMENTS: [&str; 3] = ["--ip-masq", "--kube-subnet-mgr", "--healthz-port=8081"];

/// A cluster of two Nodes with pods, and of others that are Nodes only.
///
/// Fields are dropped in order: daemons before their files.
struct Site {
    daemons: Vec<Process>,
    lab: Lab,
    outside: Namespace,
    api: KubeApi,
    leases: Vec<SubnetEnv>,
    files: TempDir,
}

impl Site {
    /// Two nodes with this backend, not yet started.
    fn new(backend: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        let (lab, outside) = (Lab::two_hosts(), Namespace::new("out"));
        lab.hosts[0].link("out0", &outside, "out0", 1500);
        lab.hosts[0].address("out0", &format!("{NODE_OUTSIDE}/24"));
        outside.address("out0", &format!("{OUTSIDE}/24"));
        let certificates = Certificates::new(files.path(), &format!("IP:{}", UNDERLAY[0]));
        let api = KubeApi::secure(listen(&lab), certificates.acceptor(), TOKEN);
        for host in 0..2 {
            lab.hosts[host].exec(&["ip", "route", "add", "default", "dev", "wire0"]);
            let directory = files.path().join(format!("h{host}"));
            let account = directory.join("run/secrets/kubernetes.io/serviceaccount");
            std::fs::create_dir_all(&account).unwrap();
            std::fs::write(account.join("token"), TOKEN).unwrap();
            std::fs::write(account.join("namespace"), "kube-flannel").unwrap();
            std::fs::copy(certificates.authority(), account.join("ca.crt")).unwrap();
            std::fs::write(directory.join("net-conf.json"), net_conf(backend)).unwrap();
            let subnet = format!("10.244.{host}.0/24");
            api.put_node(&node(&format!("worker-{host}"), Some(&subnet)));
            let pod = format!("kube-flannel-ds-{host}");
            api.put_pod("kube-flannel", &pod, &format!("worker-{host}"));
        }
        Self { daemons: Vec::new(), lab, outside, api, leases: Vec::new(), files }
    }

    /// Two running nodes, their pods connected, which know each other.
    fn start(backend: &str, peers: usize) -> Self {
        let mut site = Self::new(backend);
        for number in 0..OTHERS {
            let kind = if number % 2 == 0 { backend } else { other_than(backend, number) };
            site.api.put_node(&other_node(number, kind));
        }
        site.daemons = vec![site.container(0, None), site.container(1, None)];
        for host in 0..2 {
            let path = site.run(host).join("subnet.env");
            site.leases.push(SubnetEnv::wait(&path, &mut site.daemons[host]));
        }
        site.lab.connect_pods([&site.leases[0], &site.leases[1]]);
        for host in 0..2 {
            site.wait_until_ready(host, peers);
        }
        site
    }

    /// The container of the DaemonSet's pod on `host`; `hidden` is empty for it.
    fn container(&self, host: usize, hidden: Option<&str>) -> Process {
        let directory = self.files.path().join(format!("h{host}"));
        let directory = directory.to_str().unwrap();
        let hidden = hidden.unwrap_or_default();
        let mut argv = vec!["sh", "-c", CONTAINER, "sh", directory, hidden, WEFTD];
        argv.extend(ARGUMENTS);
        let pod = format!("kube-flannel-ds-{host}");
        let (address, port) = (UNDERLAY[0].to_string(), PORT.to_string());
        let environment = [
            ("POD_NAME", pod.as_str()),
            ("POD_NAMESPACE", "kube-flannel"),
            ("EVENT_QUEUE_DEPTH", "5000"),
            ("CONT_WHEN_CACHE_NOT_READY", "false"),
            ("KUBERNETES_SERVICE_HOST", &address),
            ("KUBERNETES_SERVICE_PORT", &port),
        ];
        Process::start(self.lab.hosts[host].command(&argv).envs(environment), "weftd")
    }

    /// A node's `/run/flannel`.
    fn run(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}/run/flannel"))
    }

    #[track_caller]
    fn wait_until_ready(&self, host: usize, peers: usize) {
        wait_until(READY, "the node is ready and knows the peers of its backend", || {
            is_ready(&self.run(host), peers)
        });
    }

    fn ends(&self) -> [End<'_>; 2] {
        [0, 1].map(|host: usize| End {
            host: &self.lab.hosts[host],
            pod: &self.lab.pods[host],
            address: self.leases[host].pod_address(),
            dir: self.run(host),
        })
    }

    /// What was written to a Node, in its order.
    fn patches(&self, host: usize) -> Vec<Seen> {
        let path = format!("/api/v1/nodes/worker-{host}/status");
        self.api.seen(What::Patch).into_iter().filter(|seen| seen.path == path).collect()
    }

    fn mac(&self, host: usize) -> String {
        let link = self.lab.hosts[host].exec(&["ip", "-o", "link", "show", "flannel.1"]);
        let mac = link.split_once("link/ether ").unwrap().1.split(' ').next();
        mac.unwrap().to_owned()
    }

    /// Pings of all sizes and TCP, both ways.
    #[track_caller]
    fn carries(&self, mtu_bytes: u16) {
        for (from, to) in [(0, 1), (1, 0)] {
            let target = self.leases[to].pod_address();
            for size in [56, mtu_bytes - 28] {
                // A ping may be lost to a neighbour that is being resolved.
                let what = format!("answers to pings of {size} bytes of pod {from}");
                wait_until(READY, &what, || self.lab.ping(from, target, size));
            }
        }
        let [near, far] = &self.lab.pods;
        tcp_transfer(near, far, self.leases[1].pod_address(), 8 << 20, true);
    }

    /// Rules for the cluster's network and for the node's own subnet, and what they do.
    #[track_caller]
    fn masquerades(&self) {
        let saved = self.lab.hosts[0].exec(&["iptables-save"]);
        for rule in [
            "-A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG",
            "-A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD",
            "-A FLANNEL-POSTRTG -s 10.244.0.0/24 -d 10.244.0.0/16",
            "-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.0.0/24",
            "-A FLANNEL-FWD -s 10.244.0.0/16",
            "-A FLANNEL-FWD -d 10.244.0.0/16",
        ] {
            assert!(saved.contains(rule), "no rule {rule:?}:\n{saved}");
        }
        let [near, far] = &self.lab.pods;
        let own = self.leases[0].pod_address();
        let seen = source_seen(near, own, far, self.leases[1].pod_address());
        assert_eq!(seen, Some(own), "a pod on another node sees another address than the pod's");
        let seen = source_seen(near, own, &self.outside, OUTSIDE);
        assert_eq!(seen, Some(NODE_OUTSIDE), "outside, a pod is not its node");
    }

    /// The Node was told first what this node is, and last that its network works.
    #[track_caller]
    fn tells(&self, host: usize, backend_data: &str, backend_type: &str) {
        let patches = self.patches(host);
        assert_eq!(patches.len(), 2, "{patches:?}");
        let data = backend_data.replace('"', "\\\"");
        let annotations = [
            ("backend-data", data.as_str()),
            ("backend-type", backend_type),
            ("kube-subnet-manager", "true"),
            ("public-ip", &UNDERLAY[host].to_string()),
        ]
        .map(|(key, value)| format!(r#""{PREFIX}{key}":"{value}""#))
        .join(",");
        let expected = format!(r#"{{"metadata":{{"annotations":{{{annotations}}}}}}}"#);
        assert_eq!(patches[0].body, expected);
        let condition = self.api.node(&format!("worker-{host}"))["status"]["conditions"].clone();
        let up = condition.as_array().unwrap().iter();
        let mut up = up.filter(|condition| condition["type"] == "NetworkUnavailable");
        let up = up.next_back().expect("the Node is told that its network works");
        let time = up["lastTransitionTime"].as_str().unwrap();
        let times = format!(r#""lastHeartbeatTime":"{time}","lastTransitionTime":"{time}""#);
        let reason = r#""reason":"FlannelIsUp","message":"Flannel is running on this node""#;
        let up = format!(r#""type":"NetworkUnavailable","status":"False",{times},{reason}"#);
        let expected = format!(r#"{{"status":{{"conditions":[{{{up}}}]}}}}"#);
        assert_eq!(patches[1].body, expected);
        // Last: after the rules, after the file that pods wait for.
        let told = SystemTime::now() - patches[1].at.elapsed();
        let file = std::fs::metadata(self.run(host).join("subnet.env")).unwrap();
        assert!(file.modified().unwrap() <= told, "pods were let in before there was a subnet.env");
        let lines = ["Setting up masking rules", "flannel is ready", "its network is available"];
        wait_until(READY, "it is logged", || self.daemons[host].output().contains(lines[2]));
        let log = self.daemons[host].output();
        let place = |line: &str| log.find(line).unwrap_or_else(|| panic!("no {line:?} in\n{log}"));
        assert!(lines.map(place).is_sorted(), "another order than {lines:?}:\n{log}");
        let annotations = self.api.annotations(&format!("worker-{host}"));
        let ours: Vec<_> = annotations
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?, value)))
            .collect();
        let address = UNDERLAY[host].to_string();
        let expected = [
            ("backend-data", backend_data),
            ("backend-type", backend_type),
            ("kube-subnet-manager", "true"),
            ("public-ip", &address),
        ];
        assert!(ours.iter().map(|(key, value)| (*key, value.as_str())).eq(expected), "{ours:?}");
    }

    /// Everything of a node that does not depend on the backend.
    #[track_caller]
    fn is_as_published(&self, mtu_bytes: u16) {
        for host in 0..2 {
            let env = std::fs::read_to_string(self.run(host).join("subnet.env")).unwrap();
            let expected = format!(
                "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.{host}.1/24\n\
                 FLANNEL_MTU={mtu_bytes}\nFLANNEL_IPMASQ=true\n"
            );
            assert_eq!(env, expected);
            let namespace = &self.lab.hosts[host];
            for path in ["/healthz", "/readyz"] {
                wait_until(READY, path, || probe(namespace, path) == Some(200));
            }
            let log = self.daemons[host].output();
            assert!(!log.contains(TOKEN), "the token is in the log");
        }
        self.carries(mtu_bytes);
        self.masquerades();
        assert_eq!(self.api.seen(What::Pod).len(), 2, "each asks once on which Node it is");
        assert!(!Path::new("/etc/kube-flannel/net-conf.json").exists(), "the machine was changed");
    }

    /// Kills the daemon on `host` and starts it again, after `between`.
    #[track_caller]
    fn restart(&mut self, host: usize, peers: usize, between: impl FnOnce(&Self)) {
        self.daemons[host].stop(Signal::KILL, READY);
        between(self);
        self.daemons[host] = self.container(host, None);
        self.wait_until_ready(host, peers);
    }
}

/// The ConfigMap's text.
fn net_conf(backend: &str) -> String {
    const TEXT: &str = r#"{
  "Network": "10.244.0.0/16",
  "EnableNFTables": false,
  "Backend": {
    "Type": "vxlan"
  }
}
"#;
    TEXT.replace("vxlan", backend)
}

fn is_ready(run: &Path, peers: usize) -> bool {
    Status::try_of(run).is_some_and(|status| {
        let known = match status.0["backend"]["peers_programmed"].as_u64() {
            Some(known) => known as usize,
            None => status.routes(),
        };
        status.0["ready"] == true && known == peers
    })
}

fn other_than(backend: &str, number: u8) -> &'static str {
    match (backend, number % 4) {
        (_, 1) => "host-gw",
        ("vxlan", _) => "udp",
        (_, _) => "vxlan",
    }
}

/// A Node whose flannel runs another backend, or the same.
fn other_node(number: u8, backend: &str) -> serde_json::Value {
    let (subnet, address) =
        (format!("10.244.{}.0/24", 100 + number), format!("172.20.1.{}", 1 + number));
    let mut node = flannel_node(&format!("other-{number}"), &subnet, &address);
    if backend == "udp" {
        return node;
    }
    let data = match backend {
        "vxlan" => format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:00:{number:02x}"}}"#),
        _ => "null".to_owned(),
    };
    for (key, value) in [("backend-type", backend), ("backend-data", &data)] {
        node["metadata"]["annotations"][format!("{PREFIX}{key}")] = value.into();
    }
    node
}

/// The source under which a datagram of `from`, sent with the address `own`, arrives.
#[track_caller]
fn source_seen(
    from: &Namespace,
    own: Ipv4Addr,
    at: &Namespace,
    address: Ipv4Addr,
) -> Option<Ipv4Addr> {
    let receiver = at.enter(|| UdpSocket::bind((address, 0))).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let port = receiver.local_addr().unwrap().port();
    let sender = from.enter(|| UdpSocket::bind((own, 0))).unwrap();
    let watch = Stopwatch::start();
    // The first may be lost to an address that is being resolved.
    while !watch.is_over(Duration::from_secs(5)) {
        sender.send_to(b"who am I?", SocketAddrV4::new(address, port)).unwrap();
        let received = uninterrupted(|| receiver.recv_from(&mut [0; 64]));
        if let Ok((_, SocketAddr::V4(source))) = received {
            return Some(*source.ip());
        }
    }
    None
}

/// Half of the other Nodes, and the other one of the two.
const PEERS: usize = OTHERS as usize / 2 + 1;

#[test]
fn a_stock_daemonset_with_udp_runs_weftd() {
    let mut site = Site::start("udp", PEERS);
    site.is_as_published(1472);
    for host in 0..2 {
        wait_until(READY, "told up", || is_told_up(&site.api, &format!("worker-{host}")));
        site.tells(host, "null", "");
    }
    site.restart(0, PEERS, |_| {});
    site.carries(1472);
}

#[test]
fn stock_vxlan_daemonset_keeps_address_over_reboot() {
    let mut site = Site::start("vxlan", PEERS);
    site.is_as_published(1450);
    let macs = [0, 1].map(|host| site.mac(host));
    for (host, mac) in macs.iter().enumerate() {
        wait_until(READY, "told up", || is_told_up(&site.api, &format!("worker-{host}")));
        site.tells(host, &format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#), "vxlan");
        let routes = site.lab.hosts[host].exec(&["ip", "route", "show", "dev", "flannel.1"]);
        assert_eq!(routes.lines().count(), PEERS, "routes to nodes of other backends: {routes}");
    }
    let mut daemons = std::mem::take(&mut site.daemons);
    let ((), report) = Probe::run(&site.ends(), |_| {
        for host in [0, 1] {
            daemons[host].stop(Signal::KILL, READY);
            std::thread::sleep(Duration::from_millis(300));
            daemons[host] = site.container(host, None);
            site.wait_until_ready(host, PEERS);
            std::thread::sleep(Duration::from_millis(300));
        }
    });
    site.daemons = daemons;
    println!("{report}");
    report.assert_nothing_lost("a kill of weftd in a stock DaemonSet");
    assert_eq!([0, 1].map(|host| site.mac(host)), macs, "a restart changed the VtepMAC");
    // A reboot: no device, nothing below /run.
    site.restart(0, PEERS, |site| {
        site.lab.hosts[0].exec(&["ip", "link", "delete", "flannel.1"]);
        std::fs::remove_dir_all(site.run(0)).unwrap();
    });
    assert_eq!(site.mac(0), macs[0], "a reboot changed the VtepMAC: every peer has to learn it");
    site.carries(1450);
    let annotated = site.patches(0).into_iter().filter(|seen| seen.body.contains("annotations"));
    assert_eq!(annotated.count(), 1, "a restart wrote what was there");
}

#[test]
fn start_without_br_netfilter_fails_like_flanneld() {
    let site = Site::new("vxlan");
    let mut daemon = site.container(0, Some("/proc/sys/net/bridge"));
    assert_eq!(daemon.wait(READY).code(), Some(1));
    let log = daemon.output();
    let last = log.lines().last().unwrap_or_default();
    for value in ["br_netfilter", "/proc/sys/net/bridge/bridge-nf-call-iptables"] {
        assert!(last.contains(value), "{value} is not named: {log}");
    }
    assert!(site.api.seen(What::Patch).is_empty(), "the Node is told of a network that is not");
}
