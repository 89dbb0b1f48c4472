//! Nodes of a cluster whose DaemonSet is weft's manifest, as the API gives it back: its arguments,
//! its ConfigMap, a token that the API issued for its service account.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::plane::{PORT, Plane};
use crate::support::cluster::{SWITCH_ADDRESS, host_address};
use crate::support::daemonset::CONTAINER;
use crate::support::lab::{Namespace, Process, SubnetEnv, WEFTD, wait_until};
use crate::support::probe::End;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

/// The namespace and the account of the manifest.
pub(crate) const NAMESPACE: &str = "kube-flannel";
pub(crate) const ACCOUNT: &str = "system:serviceaccount:kube-flannel:flannel";
/// From a PodCIDR to a node that is ready, on a busy machine.
pub(crate) const READY: Duration = Duration::from_secs(30);
/// How long a token of the API lives at the least.
const TOKEN_SECONDS: u32 = 600;

/// The first Kubernetes that takes an update strategy with surge.
const SURGE_MINOR: u32 = 22;
/// What is to be deleted from the manifest for an older one.
const STRATEGY: &str = "  updateStrategy:
    rollingUpdate:
      maxSurge: 1
      maxUnavailable: 0
";

/// The text of the manifest, with this backend, as a user of this Kubernetes has it.
fn manifest(plane: &Plane, backend: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes/weft.yml");
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(STRATEGY), "the lines that are to be deleted before 1.{SURGE_MINOR}");
    let strategy = if plane.minor() < SURGE_MINOR { "" } else { STRATEGY };
    text.replace(STRATEGY, strategy)
        .replace(r#""Type": "vxlan""#, &format!(r#""Type": "{backend}""#))
}

pub(crate) fn name(host: usize) -> String {
    format!("worker-{host}")
}

/// A control plane, and nodes on the hosts of its cluster.
///
/// Fields are dropped in order: daemons before their files.
pub(crate) struct Site {
    pub(crate) daemons: Vec<Process>,
    pods: Vec<Namespace>,
    pub(crate) leases: Vec<SubnetEnv>,
    pub(crate) plane: Plane,
    files: TempDir,
}

impl Site {
    /// Applies the manifest with this backend. There is no Node yet, and no daemon.
    #[track_caller]
    pub(crate) fn new(plane: Plane, backend: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        std::fs::write(files.path().join("weft.yml"), manifest(&plane, backend)).unwrap();
        let applied = apply(&plane, files.path());
        assert_eq!(applied.matches(" created").count(), 6, "{applied}");
        let mut site =
            Self { daemons: Vec::new(), pods: Vec::new(), leases: Vec::new(), plane, files };
        for host in 0..site.plane.cluster.hosts.len() {
            site.prepare(host);
        }
        site
    }

    /// The manifest that was applied.
    pub(crate) fn manifest(&self) -> PathBuf {
        self.files.path().join("weft.yml")
    }

    /// Applies the manifest again.
    #[track_caller]
    pub(crate) fn apply(&self) {
        apply(&self.plane, self.files.path());
    }

    /// Two nodes that are ready and know each other, their pods connected.
    #[track_caller]
    pub(crate) fn start(plane: Plane, backend: &str) -> Self {
        let mut site = Self::new(plane, backend);
        for host in 0..2 {
            site.plane.register(&name(host));
            site.plane.subnet_of(&name(host));
            site.write_token(host, &site.issued());
            site.daemons.push(site.container(host, &[("NODE_NAME", &name(host))]));
        }
        site.connect();
        site
    }

    /// What a node has below `/etc/kube-flannel`, and a default route to choose the interface by.
    #[track_caller]
    fn prepare(&mut self, host: usize) {
        let directory = self.directory(host);
        std::fs::create_dir_all(&directory).unwrap();
        let data = self.plane.get(&["configmap", "kube-flannel-cfg", "-n", NAMESPACE]);
        let net_conf = data["data"]["net-conf.json"].as_str().unwrap();
        std::fs::write(directory.join("net-conf.json"), net_conf).unwrap();
        let gateway = SWITCH_ADDRESS.to_string();
        let namespace = &self.plane.cluster.hosts[host];
        namespace.exec(&["ip", "route", "add", "default", "via", &gateway, "dev", "wire0"]);
    }

    /// Gives the cluster a larger network.
    pub(crate) fn widen(&self, network: &str) {
        for host in 0..self.plane.cluster.hosts.len() {
            let path = self.directory(host).join("net-conf.json");
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(path, text.replace("10.244.0.0/16", network)).unwrap();
        }
    }

    /// Waits for both leases, connects a pod to each, and waits until both know each other.
    #[track_caller]
    pub(crate) fn connect(&mut self) {
        for host in 0..2 {
            let path = self.run(host).join("subnet.env");
            let lease = SubnetEnv::wait(&path, &mut self.daemons[host]);
            self.pods.push(self.plane.cluster.pod(host, &lease));
            self.leases.push(lease);
        }
        for host in 0..2 {
            self.wait_until_ready(host, 1);
        }
    }

    pub(crate) fn directory(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    /// A node's `/run/flannel`.
    pub(crate) fn run(&self, host: usize) -> PathBuf {
        self.directory(host).join("run/flannel")
    }

    /// A token as a kubelet asks for it.
    #[track_caller]
    pub(crate) fn issued(&self) -> String {
        let spec = json!({"expirationSeconds": TOKEN_SECONDS});
        self.issued_for(&spec)
    }

    #[track_caller]
    pub(crate) fn issued_for(&self, spec: &Value) -> String {
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec,
        });
        let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/flannel/token");
        let answer = self.plane.hand("admin", &["create", "--raw", &path], &request);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        answer["status"]["token"].as_str().expect("the API issues tokens").to_owned()
    }

    /// Replaces what a pod sees of its account, in the way of a kubelet: by a link to a folder.
    pub(crate) fn write_token(&self, host: usize, token: &str) {
        let account = self.directory(host).join("run/secrets/kubernetes.io/serviceaccount");
        std::fs::create_dir_all(&account).unwrap();
        let version = format!("..{:x}", fastrand::u64(..));
        let folder = account.join(&version);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("token"), token).unwrap();
        std::fs::write(folder.join("namespace"), NAMESPACE).unwrap();
        std::fs::copy(self.plane.path("ca.crt"), folder.join("ca.crt")).unwrap();
        let next = account.join("..data_tmp");
        std::os::unix::fs::symlink(&version, &next).unwrap();
        std::fs::rename(&next, account.join("..data")).unwrap();
        for file in ["token", "namespace", "ca.crt"] {
            if !account.join(file).exists() {
                std::os::unix::fs::symlink(format!("..data/{file}"), account.join(file)).unwrap();
            }
        }
    }

    /// The container of the manifest's DaemonSet on a host.
    #[track_caller]
    pub(crate) fn container(&self, host: usize, variables: &[(&str, &str)]) -> Process {
        let set = self.plane.get(&["daemonset", "kube-flannel-ds", "-n", NAMESPACE]);
        let container = &set["spec"]["template"]["spec"]["containers"][0];
        let arguments: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
        let directory = self.directory(host);
        let mut argv = vec!["sh", "-c", CONTAINER, "sh", directory.to_str().unwrap(), "", WEFTD];
        argv.extend(arguments.iter().map(String::as_str));
        let mut command = self.plane.cluster.hosts[host].command(&argv);
        command.env("KUBERNETES_SERVICE_HOST", SWITCH_ADDRESS.to_string());
        command.env("KUBERNETES_SERVICE_PORT", PORT.to_string());
        Process::start(command.envs(variables.iter().copied()), "weftd")
    }

    /// Starts the daemon on `host` again.
    #[track_caller]
    pub(crate) fn restart(&mut self, host: usize) {
        self.daemons[host] = self.container(host, &[("NODE_NAME", &name(host))]);
    }

    /// How many peers of its backend a node knows; `None` until it is ready.
    pub(crate) fn peers(&self, host: usize) -> Option<u64> {
        let Status(status) = Status::try_of(&self.run(host))?;
        let known = status["backend"]["peers_programmed"].as_u64();
        (status["ready"] == true).then(|| known.or_else(|| status["peers"].as_u64()))?
    }

    #[track_caller]
    pub(crate) fn wait_until_ready(&self, host: usize, peers: u64) {
        let what = format!("node {host} is ready and knows {peers} peers");
        wait_until(READY, &what, || self.peers(host) == Some(peers));
    }

    pub(crate) fn ends(&self) -> [End<'_>; 2] {
        [0, 1].map(|host: usize| End {
            host: &self.plane.cluster.hosts[host],
            pod: &self.pods[host],
            address: self.leases[host].pod_address(),
            dir: self.run(host),
        })
    }

    /// Pings of two sizes and TCP, both ways.
    #[track_caller]
    pub(crate) fn carries(&self, mtu_bytes: u16) {
        for (from, to) in [(0, 1), (1, 0)] {
            let target = self.leases[to].pod_address().to_string();
            for size in [56, mtu_bytes - 28] {
                let (what, size) =
                    (format!("{target} answers to pings of {size} bytes"), size.to_string());
                let ping = ["ping", "-q", "-c1", "-W1", "-Mdo", "-s", &size, &target];
                wait_until(READY, &what, || self.pods[from].succeeds(&ping));
            }
        }
        let [near, far] = [&self.pods[0], &self.pods[1]];
        tcp_transfer(near, far, self.leases[1].pod_address(), 8 << 20, true);
    }

    /// Gives the pod on `host` the address of another lease.
    #[track_caller]
    pub(crate) fn move_pod(&mut self, host: usize, lease: SubnetEnv) {
        let namespace = &self.plane.cluster.hosts[host];
        namespace.exec(&["ip", "link", "delete", "pod0"]);
        self.pods[host] = self.plane.cluster.pod(host, &lease);
        self.leases[host] = lease;
    }

    /// The address under which a host is known.
    pub(crate) fn address(host: usize) -> String {
        host_address(host).to_string()
    }

    /// Waits for a line in a daemon's log.
    #[track_caller]
    pub(crate) fn wait_for(&self, host: usize, line: &str) {
        let what = format!("node {host} says {line:?}");
        wait_until(READY, &what, || self.daemons[host].output().contains(line));
    }
}

#[track_caller]
fn apply(plane: &Plane, directory: &Path) -> String {
    let path = directory.join("weft.yml");
    plane.kubectl(&["apply", "--validate=true", "-f", path.to_str().unwrap()])
}
