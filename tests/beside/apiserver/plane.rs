//! A control plane of Kubernetes on the switch of a cluster: etcd, kube-apiserver and, where there
//! is one, kube-controller-manager, with certificates, accounts and an audit log of their own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS};
use crate::support::etcd::{issue, make_authority};
use crate::support::lab::{Process, wait_until};
use crate::support::members::Version;

/// Where the API is served.
pub(crate) const PORT: u16 = 6443;
/// What a control plane takes to start, or to start again, on a busy machine.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Who may do everything, and the token that says so.
const ADMIN: &str = "admin";

/// Who has a token: name, and groups.
const USERS: [(&str, &str); 4] = [
    (ADMIN, "system:masters"),
    ("system:kube-controller-manager", ""),
    ("system:node:worker-0", "system:nodes"),
    ("system:node:worker-1", "system:nodes"),
];

/// Everything that is asked of the API, and by whom.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: \
                            [RequestReceived]\nrules: [{level: Metadata}]\n";

/// A program that `scripts/beside-apiserver` was given.
fn program(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|path| !path.is_empty())
}

/// A running control plane.
///
/// Fields are dropped in order: servers before what they stand on.
pub(crate) struct Plane {
    controller: Option<Process>,
    apiserver: Process,
    pub(crate) etcd: NamespaceEtcd,
    pub(crate) cluster: Cluster,
    files: TempDir,
    flags: Vec<String>,
}

impl Plane {
    /// Starts all of it beside `hosts` hosts, the server with these flags more.
    #[track_caller]
    pub(crate) fn start(hosts: usize, flags: &[&str]) -> Self {
        let mut plane = Self::without_controller(hosts, flags);
        if program("WEFT_KUBE_CONTROLLER_MANAGER").is_some() {
            plane.controller = Some(plane.start_controller());
        }
        plane
    }

    /// The same where nothing of a controller is needed.
    #[track_caller]
    pub(crate) fn without_controller(hosts: usize, flags: &[&str]) -> Self {
        let cluster = Cluster::new(hosts);
        let etcd = NamespaceEtcd::start_version(&cluster.switch, SWITCH_ADDRESS, Version::V3_5);
        let files = tempfile::tempdir().unwrap();
        let directory = files.path();
        make_authority(directory);
        issue(directory, "server", &format!("subjectAltName=IP:{SWITCH_ADDRESS}"), 2);
        make_account_key(directory);
        std::fs::write(directory.join("audit.yaml"), AUDIT_POLICY).unwrap();
        let users =
            USERS.map(|(user, groups)| format!("{},{user},{user},\"{groups}\"\n", token(user)));
        std::fs::write(directory.join("users.csv"), users.concat()).unwrap();
        for (user, _) in USERS {
            write_kubeconfig(directory, user);
        }
        let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let apiserver = start_apiserver(&cluster, directory, &flags);
        let mut plane = Self { controller: None, apiserver, etcd, cluster, files, flags };
        plane.wait_until_ready();
        plane
    }

    fn start_controller(&self) -> Process {
        let directory = self.files.path();
        let file = |name: &str| directory.join(name).display().to_string();
        let argv = [
            program("WEFT_KUBE_CONTROLLER_MANAGER").unwrap(),
            format!("--kubeconfig={}", file(&file_of("system:kube-controller-manager"))),
            "--allocate-node-cidrs".to_owned(),
            "--cluster-cidr=10.244.0.0/16".to_owned(),
            "--use-service-account-credentials".to_owned(),
            format!("--service-account-private-key-file={}", file("account.key")),
            format!("--root-ca-file={}", file("ca.crt")),
            "--leader-elect=false".to_owned(),
            format!("--cert-dir={}", file("controller")),
        ];
        self.cluster.switch.spawn(&argv.each_ref().map(String::as_str))
    }

    /// Whether Nodes get their subnets from a controller.
    pub(crate) fn has_controller(&self) -> bool {
        self.controller.is_some()
    }

    /// Stops the controller's threads, or lets them run again.
    pub(crate) fn freeze_controller(&mut self, frozen: bool) {
        if let Some(controller) = &mut self.controller {
            controller.signal(if frozen { Signal::STOP } else { Signal::CONT });
        }
    }

    #[track_caller]
    fn wait_until_ready(&mut self) {
        let (apiserver, cluster, directory) = (&mut self.apiserver, &self.cluster, &self.files);
        wait_until(START_TIMEOUT, "the kube-apiserver is ready", || {
            assert!(apiserver.ended().is_none(), "kube-apiserver ended:\n{}", apiserver.output());
            let argv = ["get", "--raw", "/readyz"];
            kubectl(cluster, directory.path(), ADMIN, &argv).is_ok_and(|o| o.status.success())
        });
    }

    /// Kills the server.
    pub(crate) fn kill_apiserver(&mut self) {
        self.apiserver.stop(Signal::KILL, Duration::from_secs(5));
    }

    /// Starts it again; it need not be ready yet.
    pub(crate) fn spawn_apiserver(&mut self) {
        self.apiserver = start_apiserver(&self.cluster, self.files.path(), &self.flags);
    }

    /// Starts it again, and waits for it.
    #[track_caller]
    pub(crate) fn revive_apiserver(&mut self) {
        self.spawn_apiserver();
        self.wait_until_ready();
    }

    /// Of its version, the number after "1.".
    pub(crate) fn minor(&self) -> u32 {
        let version: Value =
            serde_json::from_str(&self.kubectl(&["version", "-o", "json"])).unwrap();
        let minor = version["serverVersion"]["minor"].as_str().unwrap();
        minor.trim_end_matches('+').parse().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.path(&file_of(user))
    }

    /// Runs kubectl as `user`; gives what it printed, or its complaint.
    pub(crate) fn try_as(&self, user: &str, arguments: &[&str]) -> Result<String, String> {
        let output = kubectl(&self.cluster, self.files.path(), user, arguments);
        let output = output.expect("kubectl is on the path");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stdout) + &text(&output.stderr))
        }
    }

    /// Runs kubectl as the administrator.
    #[track_caller]
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        self.run_as(ADMIN, arguments)
    }

    /// Runs kubectl as `user`.
    #[track_caller]
    pub(crate) fn run_as(&self, user: &str, arguments: &[&str]) -> String {
        self.try_as(user, arguments)
            .unwrap_or_else(|complaint| panic!("kubectl {arguments:?} as {user}: {complaint}"))
    }

    /// An object, or a list, as the API has it.
    #[track_caller]
    pub(crate) fn get(&self, arguments: &[&str]) -> Value {
        let all = [&["get", "-o", "json"], arguments].concat();
        serde_json::from_str(&self.kubectl(&all)).unwrap()
    }

    #[track_caller]
    pub(crate) fn node(&self, name: &str) -> Value {
        self.get(&["node", name])
    }

    /// Hands an object to kubectl, as `user`, and gives what the API made of it.
    #[track_caller]
    pub(crate) fn hand(&self, user: &str, arguments: &[&str], object: &Value) -> String {
        self.try_hand(user, arguments, object)
            .unwrap_or_else(|complaint| panic!("kubectl {arguments:?} as {user}: {complaint}"))
    }

    fn try_hand(&self, user: &str, arguments: &[&str], object: &Value) -> Result<String, String> {
        let path = self.path("object.json");
        std::fs::write(&path, object.to_string()).unwrap();
        self.try_as(user, &[arguments, &["-f", path.to_str().unwrap()]].concat())
    }

    /// Makes a Node as its kubelet does, and says that the network does not work, as a cloud does.
    #[track_caller]
    pub(crate) fn register(&self, name: &str) {
        let kubelet = format!("system:node:{name}");
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": name,
                "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
                "annotations": {
                    "volumes.kubernetes.io/controller-managed-attach-detach": "true",
                },
            },
        });
        self.hand(&kubelet, &["create"], &node);
        let conditions = [
            condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
            condition("NetworkUnavailable", "True", "NoRouteCreated"),
            condition("Ready", "True", "KubeletReady"),
        ];
        self.set_conditions(&kubelet, name, &conditions);
    }

    /// Sets conditions of a Node, as `user`. Not by `kubectl patch --subresource`, which is newer.
    #[track_caller]
    pub(crate) fn set_conditions(&self, user: &str, name: &str, conditions: &[Value]) {
        let path = format!("/api/v1/nodes/{name}/status");
        let path = path.as_str();
        wait_until(START_TIMEOUT, "nobody else writes the Node at the same time", || {
            let mut node = self.node(name);
            let all = &mut node["status"]["conditions"];
            let mut all: Vec<_> = all.as_array().cloned().unwrap_or_default();
            all.retain(|old| conditions.iter().all(|new| old["type"] != new["type"]));
            all.extend(conditions.iter().cloned());
            node["status"]["conditions"] = all.into();
            match self.try_hand(user, &["replace", "--raw", path], &node) {
                Ok(_) => true,
                Err(complaint) if complaint.contains("the object has been modified") => false,
                Err(complaint) => panic!("conditions of {name}: {complaint}"),
            }
        });
    }

    /// Sees to it that a Node has a subnet, and gives it.
    #[track_caller]
    pub(crate) fn subnet_of(&self, name: &str) -> String {
        if !self.has_controller() && self.node(name)["spec"]["podCIDR"].is_null() {
            let nodes = self.get(&["nodes"]);
            let nodes = nodes["items"].as_array().unwrap().iter();
            let used = nodes.filter(|node| !node["spec"]["podCIDR"].is_null()).count();
            self.assign(name, &format!("10.244.{}.0/24", 10 + used));
        }
        let mut subnet = None;
        wait_until(START_TIMEOUT, "the Node has a pod cidr", || {
            subnet = self.node(name)["spec"]["podCIDR"].as_str().map(str::to_owned);
            subnet.is_some()
        });
        subnet.unwrap()
    }

    #[track_caller]
    pub(crate) fn assign(&self, name: &str, subnet: &str) {
        let spec = json!({"spec": {"podCIDR": subnet, "podCIDRs": [subnet]}});
        self.kubectl(&["patch", "node", name, "-p", &spec.to_string()]);
    }

    /// All requests of which the audit log tells.
    pub(crate) fn audited(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("audit.log")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Starts API and etcd again with what etcd had before `during`: a backup that was restored.
    #[track_caller]
    pub(crate) fn go_back(&mut self, during: impl FnOnce(&mut Self)) {
        let (data, backup) = (self.etcd.data().to_owned(), self.path("backup"));
        self.kill_apiserver();
        self.etcd.process.stop(Signal::TERM, START_TIMEOUT);
        copy(&data.join("member"), &backup);
        self.etcd.spawn(&self.cluster.switch);
        self.revive_apiserver();
        during(self);
        self.kill_apiserver();
        self.etcd.wipe();
        copy(&backup, &data.join("member"));
        self.etcd.spawn(&self.cluster.switch);
        self.revive_apiserver();
    }

    /// etcd forgets everything but what is.
    #[track_caller]
    pub(crate) fn compact(&self) {
        let switch = &self.cluster.switch;
        let state = self.etcd.ctl(switch, &["get", "nothing", "-w", "json"]);
        let state: Value = serde_json::from_str(&state).unwrap();
        let revision = state["header"]["revision"].to_string();
        self.etcd.ctl(switch, &["compact", &revision]);
    }
}

/// A condition of a Node, as a kubelet writes it.
pub(crate) fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": "said by the test",
        "lastHeartbeatTime": "2026-11-21T08:00:00Z", "lastTransitionTime": "2026-11-20T08:00:00Z",
    })
}

/// The name of a user's kubeconfig: a colon would end it.
fn file_of(user: &str) -> String {
    user.replace(':', "-")
}

fn token(user: &str) -> String {
    format!("token-of-{}", file_of(user))
}

fn start_apiserver(cluster: &Cluster, directory: &Path, flags: &[String]) -> Process {
    let binary = program("WEFT_KUBE_APISERVER").expect(
        "no kube-apiserver is named, so nothing about a real one can be tested; run \
         scripts/beside-apiserver",
    );
    let file = |name: &str| directory.join(name).display().to_string();
    let mut argv = vec![
        binary,
        format!("--etcd-servers=http://{SWITCH_ADDRESS}:2379"),
        format!("--advertise-address={SWITCH_ADDRESS}"),
        format!("--secure-port={PORT}"),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
        format!("--client-ca-file={}", file("ca.crt")),
        format!("--token-auth-file={}", file("users.csv")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", file("account.pub")),
        format!("--service-account-signing-key-file={}", file("account.key")),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        format!("--audit-policy-file={}", file("audit.yaml")),
        format!("--audit-log-path={}", file("audit.log")),
        format!("--cert-dir={}", file("apiserver")),
    ];
    argv.extend(flags.iter().cloned());
    cluster.switch.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())
}

fn kubectl(
    cluster: &Cluster,
    directory: &Path,
    user: &str,
    arguments: &[&str],
) -> std::io::Result<Output> {
    let program = program("WEFT_KUBECTL").unwrap_or_else(|| "kubectl".to_owned());
    let mut command = cluster.switch.command(&[&program]);
    // Its cache goes where the rest does.
    command.env("HOME", directory).env("KUBECONFIG", directory.join(file_of(user)));
    command.arg("--request-timeout=60s").args(arguments).output()
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(copied.unwrap().success(), "cp {} {}", from.display(), to.display());
}

fn write_kubeconfig(directory: &Path, user: &str) {
    let authority = directory.join("ca.crt");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {
            "server": format!("https://{SWITCH_ADDRESS}:{PORT}"),
            "certificate-authority": authority,
        }}],
        "users": [{"name": "it", "user": {"token": token(user)}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    });
    std::fs::write(directory.join(file_of(user)), config.to_string()).unwrap();
}

/// The pair of keys that service accounts' tokens are signed and checked with.
fn make_account_key(directory: &Path) {
    for arguments in
        ["genrsa -out account.key 2048", "rsa -in account.key -pubout -out account.pub"]
    {
        let mut openssl = Command::new("openssl");
        let made = openssl.args(arguments.split(' ')).current_dir(directory).output();
        assert!(made.expect("openssl is installed").status.success(), "openssl {arguments}");
    }
}
