//! A real etcd on loopback, in a directory of its own, gone when dropped.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use super::pace::Stopwatch;

const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Which certificates the server uses and asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Security {
    Plain,
    ServerCertificate,
    ClientCertificates,
}

/// What has etcdctl wait for a machine that is busy, where it must succeed.
pub const PATIENT: [&str; 4] = ["--command-timeout", "60s", "--dial-timeout", "20s"];

/// A single-member cluster.
pub struct Etcd {
    directory: TempDir,
    /// Of this server alone, so that nobody takes its ports, not even while it is down.
    host: Ipv4Addr,
    port: u16,
    peer_port: u16,
    security: Security,
    /// The cluster's id follows from this: a wiped one must not pass for the old one.
    token: u64,
    child: Option<Child>,
    /// `--user` for etcdctl, once authentication is on.
    pub user: Option<String>,
}

impl Etcd {
    pub fn start() -> Self {
        Self::start_with(Security::Plain)
    }

    pub fn start_with(security: Security) -> Self {
        let found = Command::new("etcd").arg("--version").output();
        assert!(
            found.is_ok(),
            "the program `etcd` is missing, so nothing about etcd can be tested; install it: \
             apt-get install etcd-server etcd-client"
        );
        let directory = tempfile::tempdir().unwrap();
        let host = own_loopback();
        if security != Security::Plain {
            make_certificates(directory.path(), host);
        }
        let (port, peer_port) = two_free_ports(host);
        let (token, child, user) = (fastrand::u64(..), None, None);
        let mut etcd = Self { directory, host, port, peer_port, security, token, child, user };
        etcd.spawn();
        etcd
    }

    /// Starts the server again, over the data that it has.
    pub fn spawn(&mut self) {
        let log = File::create(self.path("etcd.log")).unwrap();
        let client = self.url();
        let peer = format!("http://{}:{}", self.host, self.peer_port);
        let mut command = Command::new("etcd");
        command
            .arg("--data-dir")
            .arg(self.path("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap"])
            .args(["--initial-cluster-token", &format!("{:x}", self.token)])
            // The least: hashing a password at the usual cost may take a slow machine longer than
            // a request may.
            .args(["--bcrypt-cost", "4"])
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        if self.security != Security::Plain {
            command.arg("--cert-file").arg(self.path("server.crt"));
            command.arg("--key-file").arg(self.path("server.key"));
        }
        if self.security == Security::ClientCertificates {
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(self.path("ca.crt"));
        }
        self.child = Some(command.spawn().expect("etcd does not start"));
        self.wait_until_healthy();
    }

    fn wait_until_healthy(&mut self) {
        let watch = Stopwatch::start();
        loop {
            // The port first: etcdctl takes seconds to notice that nobody listens.
            if TcpStream::connect(self.address()).is_ok()
                && self.try_ctl(&["get", "health-probe"]).status.success()
            {
                return;
            }
            let exited = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(
                exited.is_none() && !watch.is_over(START_TIMEOUT),
                "etcd is not healthy ({exited:?}); its log:\n{}",
                std::fs::read_to_string(self.path("etcd.log")).unwrap_or_default()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((self.host, self.port))
    }

    pub fn url(&self) -> String {
        let scheme = if self.security == Security::Plain { "http" } else { "https" };
        format!("{scheme}://{}", self.address())
    }

    /// Runs etcdctl and returns what it printed.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = self.try_ctl(&[&PATIENT, arguments].concat());
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "etcdctl {arguments:?}: {complaint}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn try_ctl(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.url()]);
        command.args(["--command-timeout", "5s"]);
        if self.security != Security::Plain {
            command.arg("--cacert").arg(self.path("ca.crt"));
        }
        if self.security == Security::ClientCertificates {
            command.arg("--cert").arg(self.path("client.crt"));
            command.arg("--key").arg(self.path("client.key"));
        }
        if let Some(user) = &self.user {
            command.args(["--user", user]);
        }
        command.args(arguments).stdin(Stdio::null()).output().expect("etcdctl is missing")
    }

    /// A value as etcd holds it; `None` if the key does not exist.
    pub fn get(&self, key: &str) -> Option<String> {
        let value = self.ctl(&["get", key, "--print-value-only"]);
        // etcdctl ends the value with a newline of its own.
        value.strip_suffix('\n').map(str::to_owned)
    }

    /// All keys below `prefix`.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let keys = self.ctl(&["get", prefix, "--prefix", "--keys-only"]);
        keys.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// The id of the etcd lease on a key; 0 without one.
    pub fn lease_of(&self, key: &str) -> i64 {
        let json = self.ctl(&["get", key, "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["kvs"][0]["lease"].as_i64().unwrap_or(0)
    }

    /// Puts a value that is too long for a command line.
    pub fn put_from_stdin(&self, key: &str, value: &[u8]) {
        use std::io::Write;
        let mut child = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url()])
            .args(PATIENT)
            .args(["put", key])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(value).unwrap();
        assert!(child.wait().unwrap().success(), "etcdctl put {key}");
    }

    pub fn revision(&self) -> i64 {
        let json = self.ctl(&["get", "nothing", "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["header"]["revision"].as_i64().unwrap()
    }

    /// Stops the server's threads, or lets them run again.
    pub fn freeze(&self, frozen: bool) {
        let pid = Pid::from_child(self.child.as_ref().unwrap());
        kill_process(pid, if frozen { Signal::STOP } else { Signal::CONT }).unwrap();
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Removes all data of a killed server.
    pub fn wipe(&mut self) {
        self.wipe_and_keep_id();
        self.token = fastrand::u64(..);
    }

    /// The same, to be made again by the same bootstrap.
    pub fn wipe_and_keep_id(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.path("data")).unwrap();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An address of 127.0.0.0/8 that no other server of these tests has at the same time.
fn own_loopback() -> Ipv4Addr {
    static SERIAL: AtomicU32 = AtomicU32::new(1);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    // 2^24 addresses: the last bits of the process's id, and 64 servers a process.
    Ipv4Addr::from_bits((127 << 24) | ((std::process::id() << 6) & 0x00ff_ffff) | (serial % 64))
}

fn two_free_ports(host: Ipv4Addr) -> (u16, u16) {
    let a = TcpListener::bind((host, 0)).unwrap();
    let b = TcpListener::bind((host, 0)).unwrap();
    (a.local_addr().unwrap().port(), b.local_addr().unwrap().port())
}

/// A port on which nobody listens, for as long as the socket lives that keeps it from others.
pub fn closed_port() -> (Socket, u16) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let port = socket.local_addr().unwrap().as_socket().unwrap().port();
    (socket, port)
}

/// An authority, and certificates for a server on `host` and for a client.
fn make_certificates(directory: &Path, host: Ipv4Addr) {
    make_authority(directory);
    issue(directory, "server", &format!("subjectAltName=IP:{host}"), 2);
    issue(directory, "client", "extendedKeyUsage=clientAuth", 2);
}

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

/// Writes `ca.key` and `ca.crt` of a new authority.
pub fn make_authority(directory: &Path) {
    let subject = "-days 2 -subj /CN=test-ca";
    openssl(directory, &format!("req -x509 {NEW_KEY} {subject} -keyout ca.key -out ca.crt"));
}

/// Writes `NAME.key` and `NAME.crt`, signed by the authority for `days` from now; with none it
/// is out of date after a second.
pub fn issue(directory: &Path, name: &str, extension: &str, days: u32) {
    std::fs::write(directory.join("extension"), format!("{extension}\n")).unwrap();
    let request = format!("req {NEW_KEY} -subj /CN={name} -keyout new.key -out new.csr");
    openssl(directory, &request);
    let sign = format!(
        "x509 -req -in new.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days {days} \
         -extfile extension -out new.crt"
    );
    openssl(directory, &sign);
    // Both at once: openssl takes its time between the two, and whoever reads them meanwhile would
    // find a key of another certificate.
    for kind in ["key", "crt"] {
        let file = |name: &str| directory.join(format!("{name}.{kind}"));
        std::fs::rename(file("new"), file(name)).unwrap();
    }
}

fn openssl(directory: &Path, arguments: &str) {
    let output = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(directory)
        .output()
        .expect("the program `openssl` is missing; install it: apt-get install openssl");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "openssl {arguments}: {complaint}");
}
