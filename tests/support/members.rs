//! An etcd cluster of several members in a network namespace of its own, with certificates and
//! users where a test wants them. What a test does to the network stays in the namespace.

use std::future::Future;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;
use weft::config::options::{ClientCertificate, Credentials, EtcdOptions, Secret};

use super::control::{PREFIX, options};
use super::etcd::{PATIENT, issue, make_authority};
use super::lab::{Namespace, Process, wait_until};

/// Which etcd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Version {
    /// Debian's, on the path.
    V3_4,
    /// PyPI's, which `scripts/setup --test` brings.
    V3_5,
}

impl Version {
    /// Path of `etcd` or `etcdctl`.
    pub(crate) fn program(self, name: &str) -> String {
        let place = match self {
            Self::V3_4 => return name.to_owned(),
            Self::V3_5 => Path::new(env!("CARGO_TARGET_TMPDIR")).join("../etcd-3.5").join(name),
        };
        assert!(
            place.exists(),
            "{} is missing, so nothing about etcd 3.5 can be tested; run scripts/setup --test",
            place.display()
        );
        place.display().to_string()
    }
}

/// How a cluster is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Setup {
    pub(crate) version: Version,
    pub(crate) count: usize,
    /// Certificates for both sides, and a user with a role on the prefix.
    pub(crate) secure: bool,
}

/// The life of a token on a secure cluster.
pub(crate) const TOKEN_TTL: Duration = Duration::from_secs(2);

/// Transfers of the leadership that may fail, each after some seconds.
const TRANSFERS_MAX: u32 = 10;

const PASSWORD: &str = "hush";
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A running cluster.
pub(crate) struct Members {
    pub(crate) namespace: Namespace,
    processes: Mutex<Vec<Option<Process>>>,
    directory: TempDir,
    setup: Setup,
    /// Whether users have to name themselves by now.
    auth: AtomicBool,
}

fn address(member: usize) -> Ipv4Addr {
    Ipv4Addr::new(172, 20, 9, u8::try_from(member + 1).expect("few members"))
}

impl Members {
    /// Starts a cluster and waits until it answers.
    pub(crate) fn start(setup: Setup) -> Self {
        let namespace = Namespace::new("etcd");
        let directory = tempfile::tempdir().expect("a directory for etcd");
        for member in 0..setup.count {
            namespace.address("lo", &format!("{}/32", address(member)));
        }
        let processes = Mutex::new((0..setup.count).map(|_| None).collect());
        let members = Self { namespace, processes, directory, setup, auth: AtomicBool::new(false) };
        if setup.secure {
            members.new_authority();
        }
        members.spawn_all();
        if setup.secure {
            members.ctl(&["user", "add", &format!("root:{PASSWORD}")]);
            members.ctl(&["user", "grant-role", "root", "root"]);
            members.ctl(&["role", "add", "flannel"]);
            members.ctl(&[
                "role",
                "grant-permission",
                "flannel",
                "--prefix=true",
                "readwrite",
                PREFIX,
            ]);
            members.ctl(&["user", "add", &format!("flannel:{PASSWORD}")]);
            members.ctl(&["user", "grant-role", "flannel", "flannel"]);
            members.switch_authentication(true);
        }
        members
    }

    /// Replaces the authority and all that it signed.
    pub(crate) fn new_authority(&self) {
        make_authority(self.directory.path());
        self.new_server_certificate(2);
        self.new_client_certificate();
    }

    /// Replaces the members' certificate, which each handshake reads.
    pub(crate) fn new_server_certificate(&self, days: u32) {
        let names: Vec<_> =
            (0..self.setup.count).map(|member| format!("IP:{}", address(member))).collect();
        let extension = format!("subjectAltName={}", names.join(","));
        issue(self.directory.path(), "server", &extension, days);
    }

    /// Replaces the client's certificate and key.
    pub(crate) fn new_client_certificate(&self) {
        issue(self.directory.path(), "client", "extendedKeyUsage=clientAuth", 2);
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts all members that are not running.
    pub(crate) fn spawn_all(&self) {
        self.spawn_missing();
        wait_until(START_TIMEOUT, "the etcd cluster answers", || {
            (0..self.setup.count).all(|member| {
                self.namespace.enter(|| TcpStream::connect((address(member), 2379)).is_ok())
            }) && self.control(&self.urls(), &["get", "health"]).output().unwrap().status.success()
        });
    }

    /// Starts all members that are not running, which may not become healthy.
    pub(crate) fn spawn_missing(&self) {
        for (member, process) in self.processes.lock().unwrap().iter_mut().enumerate() {
            process.get_or_insert_with(|| self.spawn(member));
        }
    }

    fn spawn(&self, member: usize) -> Process {
        let program = self.setup.version.program("etcd");
        let (name, peer) = (format!("m{member}"), format!("http://{}:2380", address(member)));
        let cluster: Vec<_> = (0..self.setup.count)
            .map(|member| format!("m{member}=http://{}:2380", address(member)))
            .collect();
        let (url, data) = (self.url(member), self.path(&name).display().to_string());
        let metrics = format!("http://{}:2381", address(member));
        let (cluster, ttl) = (cluster.join(","), TOKEN_TTL.as_secs().to_string());
        let [certificate, key, authority] = ["server.crt", "server.key", "ca.crt"]
            .map(|name| self.path(name).display().to_string());
        let mut argv = vec![program.as_str(), "--name", &name, "--data-dir", &data];
        argv.extend(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        argv.extend(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        argv.extend(["--initial-cluster", &cluster, "--listen-metrics-urls", &metrics]);
        argv.extend(["--logger", "zap", "--bcrypt-cost", "4", "--auth-token-ttl", &ttl]);
        if self.setup.secure {
            argv.extend(["--cert-file", &certificate, "--key-file", &key]);
            argv.extend(["--client-cert-auth", "--trusted-ca-file", &authority]);
        }
        self.namespace.spawn(&argv)
    }

    /// Kills all members; their data stays.
    pub(crate) fn kill_all(&self) {
        let mut processes = self.processes.lock().unwrap();
        for mut process in processes.iter_mut().filter_map(Option::take) {
            process.stop(Signal::KILL, Duration::from_secs(2));
        }
    }

    /// Kills one member; its data stays.
    pub(crate) fn kill(&self, member: usize) {
        let process = self.processes.lock().unwrap()[member].take();
        process.expect("the member runs").stop(Signal::KILL, Duration::from_secs(2));
    }

    /// Stops a member's threads, or lets them run again.
    pub(crate) fn freeze(&self, member: usize, frozen: bool) {
        let mut processes = self.processes.lock().unwrap();
        let process = processes[member].as_mut().expect("the member runs");
        process.signal(if frozen { Signal::STOP } else { Signal::CONT });
    }

    pub(crate) fn url(&self, member: usize) -> String {
        let scheme = if self.setup.secure { "https" } else { "http" };
        format!("{scheme}://{}:2379", address(member))
    }

    pub(crate) fn urls(&self) -> String {
        (0..self.setup.count).map(|member| self.url(member)).collect::<Vec<_>>().join(",")
    }

    /// The options of a node that knows these members.
    pub(crate) fn options(&self, members: &[usize]) -> EtcdOptions {
        let urls: Vec<_> = members.iter().map(|&member| self.url(member)).collect();
        let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
        let plain = options(&urls);
        if !self.setup.secure {
            return plain;
        }
        let client_certificate = Some(ClientCertificate {
            certificate_file: self.path("client.crt"),
            key_file: self.path("client.key"),
        });
        let password = Secret(PASSWORD.to_owned());
        let credentials = Some(Credentials { username: "flannel".to_owned(), password });
        EtcdOptions { ca_file: Some(self.path("ca.crt")), client_certificate, credentials, ..plain }
    }

    fn control(&self, urls: &str, arguments: &[&str]) -> Command {
        let program = self.setup.version.program("etcdctl");
        let [ca, certificate, key] = ["ca.crt", "client.crt", "client.key"]
            .map(|name| self.path(name).display().to_string());
        let user = format!("root:{PASSWORD}");
        let mut argv = vec!["env", "ETCDCTL_API=3", &program, "--endpoints", urls];
        argv.extend(["--command-timeout", "3s", "--dial-timeout", "1s"]);
        if self.setup.secure {
            argv.extend(["--cacert", &ca, "--cert", &certificate, "--key", &key]);
        }
        if self.auth.load(Ordering::Relaxed) {
            argv.extend(["--user", &user]);
        }
        argv.extend(arguments);
        self.namespace.command(&argv)
    }

    /// Runs etcdctl against the whole cluster and returns what it printed.
    #[track_caller]
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        self.try_ctl(&self.urls(), &[&PATIENT, arguments].concat())
            .unwrap_or_else(|complaint| panic!("etcdctl {arguments:?}: {complaint}"))
    }

    /// The same against some members, and what it complained about if it failed.
    pub(crate) fn try_ctl(&self, urls: &str, arguments: &[&str]) -> Result<String, String> {
        let output = self.control(urls, arguments).output().expect("etcdctl is there");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Has users name themselves, or not.
    pub(crate) fn switch_authentication(&self, on: bool) {
        self.ctl(&["auth", if on { "enable" } else { "disable" }]);
        self.auth.store(on, Ordering::Relaxed);
    }

    /// Puts a peer's lease of a /28.
    pub(crate) fn put_lease(&self, number: u8, public_ip: &str) {
        let key = lease_key(number);
        self.ctl(&["put", &key, &format!(r#"{{"PublicIP":"{public_ip}"}}"#)]);
    }

    /// The members' ids, and the place of the leader among them.
    pub(crate) fn leader(&self) -> (Vec<u64>, usize) {
        let json = self.ctl(&["endpoint", "status", "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).expect("etcdctl prints JSON");
        let of = |member: usize| {
            let url = self.url(member);
            let all = json.as_array().expect("a list of members");
            let found = all.iter().find(|entry| entry["Endpoint"] == url.as_str());
            let status = &found.expect("each member has a status")["Status"];
            let id = status["header"]["member_id"].as_u64().expect("an id");
            (id, status["leader"].as_u64().expect("an id"))
        };
        let all: Vec<_> = (0..self.setup.count).map(of).collect();
        let leader = all.iter().position(|(id, _)| *id == all[0].1).expect("a leader");
        (all.into_iter().map(|(id, _)| id).collect(), leader)
    }

    /// Makes `to` the leader. A transfer that takes an etcd longer than an election is given up by
    /// it, so several may be needed on a busy machine.
    #[track_caller]
    pub(crate) fn move_leader(&self, to: usize) {
        let mut complaint = String::new();
        for _ in 0..TRANSFERS_MAX {
            let (ids, leader) = self.leader();
            if leader == to {
                return;
            }
            let transfer = format!("{:x}", ids[to]);
            let arguments = [&PATIENT, &["move-leader", &transfer][..]].concat();
            complaint = self.try_ctl(&self.url(leader), &arguments).err().unwrap_or_default();
        }
        panic!("the leader does not move: {complaint}");
    }

    /// Sum of a counter of the members' metrics, over the lines that begin with `name`.
    pub(crate) fn counted(&self, name: &str) -> u64 {
        let text = self.metrics();
        let values = text.lines().filter(|line| line.starts_with(name));
        values.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
    }

    /// The metrics of all members that run.
    pub(crate) fn metrics(&self) -> String {
        let runs = |member: &usize| self.processes.lock().unwrap()[*member].is_some();
        let of = |member| {
            self.namespace.enter(|| {
                let mut stream = TcpStream::connect((address(member), 2381)).unwrap();
                stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                text
            })
        };
        (0..self.setup.count).filter(runs).map(of).collect()
    }

    /// How many members run.
    pub(crate) fn running(&self) -> usize {
        self.processes.lock().unwrap().iter().flatten().count()
    }

    /// Drops, or no longer, all that goes to and comes from the client port of these members. A
    /// path that is dropped says nothing, also to connections that exist.
    pub(crate) fn black_hole(&self, members: &[usize]) {
        self.namespace.succeeds(&["nft", "delete", "table", "inet", "holes"]);
        self.namespace.exec(&["nft", "add table inet holes"]);
        self.namespace
            .exec(&["nft", "add chain inet holes out { type filter hook output priority 0; }"]);
        for &member in members {
            for way in ["daddr", "saddr"] {
                let port = if way == "daddr" { "dport" } else { "sport" };
                let rule = format!("ip {way} {} tcp {port} 2379 drop", address(member));
                self.namespace.exec(&["nft", &format!("add rule inet holes out {rule}")]);
            }
        }
    }

    /// Runs asynchronous code inside the namespace; gives its result and what it logged.
    pub(crate) fn enter<T, F>(&self, code: impl FnOnce(Log) -> F + Send) -> T
    where
        T: Send,
        F: Future<Output = T>,
    {
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        // While there is one subscriber only, tracing lets the thread that first reaches a call
        // decide whether anybody wants it, and threads of other tests have none.
        let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
        self.namespace.enter(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime");
            tracing::subscriber::with_default(subscriber, || runtime.block_on(code(log)))
        })
    }
}

/// The key of a peer's /28.
pub(crate) fn lease_key(number: u8) -> String {
    format!("{PREFIX}/subnets/10.5.0.{}-28", u32::from(number) * 16)
}

/// What code in a namespace logged so far.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("no writer panics")).into_owned()
    }

    /// How many lines were warnings or errors.
    pub(crate) fn complaints(&self) -> usize {
        let text = self.text();
        text.lines().filter(|line| line.contains(" WARN ") || line.contains(" ERROR ")).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no writer panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
