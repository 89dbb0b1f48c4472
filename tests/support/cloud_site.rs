//! Three instances in a cloud: hosts in namespaces on one bridge, behind which `clouds.py` answers
//! as the metadata services and the APIs do.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::lab::{Namespace, Process, example, wait_until};
use super::overlay::local_store;
use super::status::Status;

/// A round of the tests' weftd takes tenths of a second, and comes each second.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// Where the metadata services are.
const METADATA: [&str; 2] = ["169.254.169.254/32", "100.100.100.200/32"];
/// Where the APIs are.
pub(crate) const API: &str = "http://172.31.0.1:8000";

/// The hosts, their weftds and the cloud. Processes end first, then namespaces.
pub(crate) struct CloudSite {
    pub(crate) daemons: Vec<Process>,
    _cloud: Process,
    pub(crate) network: Namespace,
    pub(crate) hosts: Vec<Namespace>,
    pub(crate) dir: TempDir,
    /// What each weftd has in its environment.
    pub(crate) environment: Vec<String>,
}

/// The address of a host.
pub(crate) fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(172, 31, 0, 11).to_bits() + u32::try_from(host).unwrap())
}

impl CloudSite {
    /// So many hosts, whose network configuration has this backend; no weftd runs yet.
    pub(crate) fn new(hosts: usize, backend: &Value, with_moto: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        local_store(dir.path(), &json!({"Network": "10.5.0.0/16", "Backend": backend}).to_string());
        let network = Namespace::new("cloud");
        network.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
        network.exec(&["ip", "link", "set", "br0", "up"]);
        network.address("br0", "172.31.0.1/24");
        METADATA.iter().for_each(|it| network.address("br0", it));
        let host = |number| {
            let host = Namespace::new(&format!("h{number}"));
            let port = format!("port{number}");
            host.link("wire0", &network, &port, 1500);
            network.exec(&["ip", "link", "set", &port, "master", "br0"]);
            host.address("wire0", &format!("{}/24", address(number)));
            host.exec(&["ip", "route", "add", "default", "via", "172.31.0.1"]);
            host
        };
        let hosts: Vec<_> = (0..hosts).map(host).collect();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/clouds.py");
        let moto = target().join("tools/moto");
        assert!(!with_moto || moto.exists(), "moto is missing; run scripts/setup --test");
        let moto = if with_moto { moto.display().to_string() } else { "-".to_owned() };
        let cloud = network.spawn(&["python3", "-u", script, &moto, "172.31.0.1"]);
        wait_until(SOON, "the cloud answers", || cloud.output().contains("ready"));
        let environment = vec!["BRIEF_CLOUD_MS=1000".to_owned(), "HOME=/nonexistent".to_owned()];
        let daemons = Vec::new();
        Self { daemons, _cloud: cloud, network, hosts, dir, environment }
    }

    /// Where a host's weftd has its files.
    pub(crate) fn home(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("h{host}"))
    }

    /// A weftd on a host, with more in its environment.
    pub(crate) fn weftd(&self, host: usize, more: &[&str]) -> Process {
        let home = self.home(host);
        let arguments = [
            example("brief-leases").display().to_string(),
            "--iface=wire0".to_owned(),
            "--iptables-forward-rules=false".to_owned(),
            format!("--local-store={}", self.dir.path().join("store").display()),
            format!("--subnet-file={}", home.join("subnet.env").display()),
            format!("--status-socket={}", home.join("weft.sock").display()),
        ];
        let argv = ["env"].into_iter().chain(self.environment.iter().map(String::as_str));
        let argv = argv.chain(more.iter().copied()).chain(arguments.iter().map(String::as_str));
        self.hosts[host].spawn(&argv.collect::<Vec<_>>())
    }

    /// Asks or changes something of the cloud's, by a word of `clouds.py`.
    #[track_caller]
    pub(crate) fn cloud(&self, what: &str, given: &Value) -> Value {
        let body = given.to_string();
        let text = self.network.enter(|| {
            let mut stream = TcpStream::connect("172.31.0.1:8000").unwrap();
            let length = body.len();
            write!(
                stream,
                "POST /test/{what} HTTP/1.1\r\nHost: cloud\r\nConnection: close\r\n\
                 Content-Length: {length}\r\n\r\n{body}"
            )
            .unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        });
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{what}: {text}"));
        assert!(head.starts_with("HTTP/1.1 200"), "{what}: {text}");
        serde_json::from_str(body).unwrap()
    }

    /// The subnet that a host's weftd has written down, as a route has it.
    pub(crate) fn subnet(&self, host: usize) -> Option<String> {
        let text = fs::read_to_string(self.home(host).join("subnet.env")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET="))?;
        Some(line.replace(".1/24", ".0/24"))
    }

    /// Starts a weftd on each host and waits for their subnets.
    #[track_caller]
    pub(crate) fn start_all(&mut self) -> Vec<String> {
        self.daemons = (0..self.hosts.len()).map(|host| self.weftd(host, &[])).collect();
        (0..self.hosts.len()).map(|host| self.wait_for_subnet(host)).collect()
    }

    #[track_caller]
    pub(crate) fn wait_for_subnet(&self, host: usize) -> String {
        wait_until(SOON, "weftd writes subnet.env once its route is there", || {
            self.subnet(host).is_some()
        });
        self.subnet(host).unwrap()
    }

    /// Waits until a host's status names all of `words`.
    #[track_caller]
    pub(crate) fn wait_for_status(&self, host: usize, words: &[&str]) {
        let what = format!("the status of host {host} names {words:?}");
        wait_until(SOON, &what, || {
            let status = Status::try_of(&self.home(host)).map(|status| status.0.to_string());
            status.is_some_and(|status| words.iter().all(|word| status.contains(word)))
        });
    }

    /// How often an operation was asked for so far.
    pub(crate) fn count(&self, operation: &str) -> u64 {
        self.cloud("counts", &Value::Null)[operation].as_u64().unwrap_or(0)
    }

    /// Fails if any text of the site's daemons, files aside, has this in it.
    #[track_caller]
    pub(crate) fn nowhere(&self, secret: &str) {
        assert!(!secret.is_empty(), "nothing is looked for");
        for (host, daemon) in self.daemons.iter().enumerate() {
            assert!(!daemon.output().contains(secret), "the log of host {host} has a secret");
            let status = Status::of(&self.home(host)).0.to_string();
            assert!(!status.contains(secret), "the status of host {host} has a secret");
            let line = format!("/proc/{}/cmdline", daemon.pid().as_raw_nonzero());
            let line = fs::read_to_string(line).unwrap_or_default();
            assert!(!line.contains(secret), "the process list has a secret");
        }
    }
}

fn target() -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target"))
}
