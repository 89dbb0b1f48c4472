//! Any number of hosts on one switch, each a namespace, for tests that need more than two.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::etcd::PATIENT;
use super::lab::{Namespace, Process, SubnetEnv, WEFTD, wait_until};
use super::members::Version;
use super::overlay::local_store;

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

    /// Gives a host a pod with the address, the MTU and the default route that `lease` asks for.
    pub(crate) fn pod(&self, host: usize, lease: &SubnetEnv) -> Namespace {
        let (host, pod) = (&self.hosts[host], Namespace::new("pod"));
        host.link("pod0", &pod, "eth0", lease.mtu_bytes);
        host.address("pod0", &lease.subnet);
        pod.address("eth0", &format!("{}/24", lease.pod_address()));
        pod.exec(&["ip", "route", "add", "default", "via", &lease.gateway().to_string()]);
        pod
    }

    /// Starts weftd on a host, its files in `dir`, without pods and without forward rules.
    #[track_caller]
    pub(crate) fn weftd(&self, host: usize, dir: &Path, arguments: &[&str]) -> Process {
        weftd_in(&self.hosts[host], host_address(host), dir, arguments)
    }
}

/// A cluster of nodes that share a local store.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// weftd on each.
    pub(crate) daemons: Vec<Process>,
    pub(crate) leases: Vec<SubnetEnv>,
    pub(crate) cluster: Cluster,
    files: TempDir,
}

impl Nodes {
    /// Starts so many, with this network configuration.
    #[track_caller]
    pub(crate) fn start(count: usize, config: &str) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let store = local_store(files.path(), config);
        let cluster = Cluster::new(count);
        let (daemons, leases) = (Vec::new(), Vec::new());
        let mut nodes = Self { daemons, leases, cluster, files };
        for host in 0..count {
            let mut daemon = nodes.cluster.weftd(host, &nodes.dir(host), &[&store]);
            nodes.leases.push(SubnetEnv::wait(&nodes.dir(host).join("subnet.env"), &mut daemon));
            nodes.daemons.push(daemon);
        }
        nodes
    }

    /// Where weftd of a host has its files.
    pub(crate) fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    /// What this node sends to the address goes to the host of that one, outside of the tunnel.
    pub(crate) fn bypass(&self, host: usize, address: Ipv4Addr, at: usize) {
        let [to, via] = [format!("{address}/32"), host_address(at).to_string()];
        self.cluster.hosts[host].exec(&["ip", "route", "add", &to, "via", &via, "dev", "wire0"]);
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

/// A real etcd in a namespace, over data that outlives its process.
#[derive(Debug)]
pub(crate) struct NamespaceEtcd {
    /// The server; stop it, kill it, replace it by [`Self::spawn`].
    pub(crate) process: Process,
    url: String,
    data: TempDir,
    version: Version,
}

impl NamespaceEtcd {
    /// Starts a server that clients reach at `address`, port 2379, and waits until it answers.
    #[track_caller]
    pub(crate) fn start(namespace: &Namespace, address: Ipv4Addr) -> Self {
        Self::start_version(namespace, address, Version::V3_4)
    }

    /// The same with another etcd than Debian's.
    #[track_caller]
    pub(crate) fn start_version(
        namespace: &Namespace,
        address: Ipv4Addr,
        version: Version,
    ) -> Self {
        let data = tempfile::tempdir().expect("a directory for etcd");
        let url = format!("http://{address}:2379");
        let process = Self::process(namespace, &url, data.path(), version);
        let mut etcd = Self { process, url, data, version };
        etcd.wait(namespace);
        etcd
    }

    /// Starts the server again with room for `quota_bytes`.
    #[track_caller]
    pub(crate) fn shrink(&mut self, namespace: &Namespace, quota_bytes: u64) {
        self.process.stop(Signal::KILL, Duration::from_secs(10));
        let quota = format!("ETCD_QUOTA_BACKEND_BYTES={quota_bytes}");
        let argv = Self::argv(&self.url, self.data.path(), self.version);
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        self.process = namespace.spawn(&[&["env", &quota], argv.as_slice()].concat());
        self.wait(namespace);
    }

    /// Starts the server again over the data that it has.
    #[track_caller]
    pub(crate) fn spawn(&mut self, namespace: &Namespace) {
        self.process = Self::process(namespace, &self.url, self.data.path(), self.version);
        self.wait(namespace);
    }

    /// Where its data is, for a backup.
    pub(crate) fn data(&self) -> &Path {
        self.data.path()
    }

    /// Kills the server and removes all that it knew.
    #[track_caller]
    pub(crate) fn wipe(&mut self) {
        self.process.stop(Signal::KILL, Duration::from_secs(2));
        std::fs::remove_dir_all(self.data.path().join("member")).expect("etcd had data");
    }

    fn process(namespace: &Namespace, url: &str, data: &Path, version: Version) -> Process {
        let argv = Self::argv(url, data, version);
        namespace.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn argv(url: &str, data: &Path, version: Version) -> Vec<String> {
        let data = data.to_str().expect("temporary directories have readable names");
        let peer = "http://127.0.0.1:2380";
        // On every address of the namespace: a store may be reached in several ways.
        let listen = "http://0.0.0.0:2379";
        let argv = [
            &version.program("etcd"),
            "--data-dir",
            data,
            "--logger",
            "zap",
            "--listen-client-urls",
            listen,
            "--advertise-client-urls",
            url,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            &format!("default={peer}"),
        ];
        argv.map(str::to_owned).to_vec()
    }

    fn wait(&mut self, namespace: &Namespace) {
        wait_until(Duration::from_secs(20), "etcd answers", || {
            assert!(self.process.ended().is_none(), "etcd ended: {}", self.process.output());
            self.command(namespace, &["get", "health"]).output().is_ok_and(|o| o.status.success())
        });
    }

    fn command(&self, namespace: &Namespace, arguments: &[&str]) -> Command {
        let program = self.version.program("etcdctl");
        let mut argv = vec!["env", "ETCDCTL_API=3", &program, "--endpoints", &self.url];
        argv.extend(["--command-timeout", "2s", "--dial-timeout", "1s"]);
        argv.extend(arguments);
        namespace.command(&argv)
    }

    /// Calls that clients began so far, as etcd counts them.
    pub(crate) fn requests(&self, namespace: &Namespace) -> u64 {
        let address = self.url.trim_start_matches("http://").to_owned();
        let text = namespace.enter(move || {
            let mut stream = TcpStream::connect(address).expect("etcd listens");
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("etcd answers");
            let mut text = String::new();
            stream.read_to_string(&mut text).expect("metrics are text");
            text
        });
        let started = text.lines().filter(|line| line.starts_with("grpc_server_started_total"));
        started.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
    }

    /// Runs etcdctl in `namespace`; whether it succeeded.
    pub(crate) fn accepts(&self, namespace: &Namespace, arguments: &[&str]) -> bool {
        self.command(namespace, arguments).output().is_ok_and(|output| output.status.success())
    }

    /// Runs etcdctl in `namespace` and gives what it printed.
    #[track_caller]
    pub(crate) fn ctl(&self, namespace: &Namespace, arguments: &[&str]) -> String {
        let arguments = [&PATIENT, arguments].concat();
        let output = self.command(namespace, &arguments).output().expect("etcdctl is installed");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "etcdctl {arguments:?}: {complaint}");
        String::from_utf8(output.stdout).expect("our keys and values are text")
    }
}
