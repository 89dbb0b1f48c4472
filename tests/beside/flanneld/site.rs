//! Two hosts, an etcd that both reach, and either daemon on either host.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS, host_address};
use crate::support::lab::{Namespace, Process, SubnetEnv, WEFTD, wait_until};

/// Where flannel's keys are.
pub(crate) const SUBNETS: &str = "/coreos.com/network/subnets";
/// The network configuration's key.
pub(crate) const CONFIG: &str = "/coreos.com/network/config";

/// Longest that either takes to end.
pub(crate) const STOP: Duration = Duration::from_secs(10);

/// Which daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Daemon {
    Flanneld,
    Weftd,
}

impl Daemon {
    /// Its program.
    pub(crate) fn program(self) -> String {
        match self {
            Self::Weftd => WEFTD.to_owned(),
            Self::Flanneld => std::env::var("WEFT_FLANNELD")
                .expect("no flanneld to run beside: run scripts/beside-flanneld FLANNELD"),
        }
    }
}

/// Fields are dropped in order: daemons are the tests', the namespaces end them.
pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    etcd: NamespaceEtcd,
    files: TempDir,
}

impl Site {
    /// Hosts without daemons, and a store with this network configuration.
    #[track_caller]
    pub(crate) fn new(config: &str) -> Self {
        let cluster = Cluster::new(2);
        let etcd = NamespaceEtcd::start(&cluster.switch, SWITCH_ADDRESS);
        let site = Self { cluster, etcd, files: tempfile::tempdir().unwrap() };
        site.put(CONFIG, config);
        site
    }

    /// The usual configuration with this backend.
    #[track_caller]
    pub(crate) fn with_backend(kind: &str) -> Self {
        Self::new(&format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{kind}"}}}}"#))
    }

    /// Runs etcdctl.
    #[track_caller]
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        self.etcd.ctl(&self.cluster.switch, arguments)
    }

    #[track_caller]
    pub(crate) fn put(&self, key: &str, value: &str) {
        self.ctl(&["put", "--", key, value]);
    }

    /// Key and value of every lease.
    #[track_caller]
    pub(crate) fn leases(&self) -> String {
        self.ctl(&["get", "--prefix", SUBNETS])
    }

    /// The etcd lease of a key; 0 without one.
    #[track_caller]
    pub(crate) fn lease_of(&self, key: &str) -> i64 {
        let json = self.ctl(&["get", key, "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["kvs"][0]["lease"].as_i64().unwrap_or(0)
    }

    /// Removes all leases and claims, and what the hosts remember of them.
    #[track_caller]
    pub(crate) fn forget(&self) {
        self.ctl(&["del", "--prefix", SUBNETS]);
        self.ctl(&["del", "--prefix", "/coreos.com/network/weft"]);
        for host in 0..2 {
            std::fs::remove_dir_all(self.dir(host)).ok();
        }
    }

    /// A host's directory, with its `subnet.env`.
    pub(crate) fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    pub(crate) fn host(&self, host: usize) -> &Namespace {
        &self.cluster.hosts[host]
    }

    /// The bytes of a host's `subnet.env`.
    pub(crate) fn subnet_env(&self, host: usize) -> Option<String> {
        std::fs::read_to_string(self.dir(host).join("subnet.env")).ok()
    }

    /// Arguments that either daemon needs on this host.
    pub(crate) fn arguments(&self, host: usize) -> Vec<String> {
        vec![
            format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379"),
            format!("--iface={}", host_address(host)),
            format!("--subnet-file={}", self.dir(host).join("subnet.env").display()),
        ]
    }

    /// Starts a daemon with these arguments after the usual ones.
    #[track_caller]
    pub(crate) fn spawn(&self, host: usize, daemon: Daemon, extra: &[&str]) -> Process {
        std::fs::create_dir_all(self.dir(host)).unwrap();
        let mut argv = vec![daemon.program()];
        argv.extend(self.arguments(host));
        argv.extend(extra.iter().map(|&word| word.to_owned()));
        self.host(host).spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Starts a daemon, and waits until it runs its backend.
    #[track_caller]
    pub(crate) fn start(
        &self,
        host: usize,
        daemon: Daemon,
        extra: &[&str],
    ) -> (Process, SubnetEnv) {
        let mut process = self.spawn(host, daemon, extra);
        wait_until(Duration::from_secs(20), "the daemon runs its backend", || {
            assert!(process.ended().is_none(), "it ended:\n{}", process.output());
            process.output().contains("atching for new subnet leases")
        });
        let lease = SubnetEnv::wait(&self.dir(host).join("subnet.env"), &mut process);
        (process, lease)
    }

    /// Stops a daemon and lets its lease stay. flanneld hangs if it is stopped too early.
    #[track_caller]
    pub(crate) fn stop(&self, mut process: Process) {
        process.signal(Signal::TERM);
        let deadline = Instant::now() + STOP / 5;
        while process.ended().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        process.stop(Signal::KILL, STOP);
    }
}

/// Whether `from` gets answers to three pings in a row.
pub(crate) fn pings(from: &Namespace, to: std::net::Ipv4Addr) -> bool {
    from.succeeds(&["ping", "-q", "-c3", "-i0.05", "-W1", &to.to_string()])
}

/// Waits until pings go through.
#[track_caller]
pub(crate) fn wait_for_pings(from: &Namespace, to: std::net::Ipv4Addr, after: &str) {
    let what = format!("pods reach each other after {after}");
    wait_until(Duration::from_secs(10), &what, || pings(from, to));
}

/// The lines of flanneld's log that have no place in that of a healthy one.
pub(crate) fn complaints(log: &str) -> Vec<&str> {
    const BAD: [&str; 5] =
        ["error parsing", "Ignoring bad", "were not found", "panic", "watch leases:"];
    log.lines().filter(|line| BAD.iter().any(|bad| line.contains(bad))).collect()
}
