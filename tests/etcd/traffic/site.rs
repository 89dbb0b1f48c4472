//! Hosts with a daemon and a pod each, an etcd beside them, and a relay between the two that a
//! test can cut.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tempfile::TempDir;

use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS, host_address};
use crate::support::control::PREFIX;
use crate::support::lab::{
    LEASE_TIMEOUT, Namespace, Process, SubnetEnv, WEFTD, example, wait_until,
};
use crate::support::log_since::LogSince;
use crate::support::members::Version;
use crate::support::overlay::CONFIG;
use crate::support::pace::is_thorough;
use crate::support::probe::{End, Probe, Report};
use crate::support::proxy::{Mode, Proxy};
use crate::support::status::Status;

/// Held by each site with full traffic, which needs the machine for itself.
static ALONE: Mutex<()> = Mutex::new(());

/// Back with the store, once it is there: the pause between two tries is at most 5 s.
pub(crate) const RECONNECT: Duration = Duration::from_secs(6);

/// etcd's port, behind the relay and without it.
const RELAY_PORT: u16 = 2479;
const ETCD_PORT: u16 = 2379;

/// What a site is like.
pub(crate) struct Plan {
    pub(crate) hosts: usize,
    pub(crate) version: Version,
    /// The network configuration; none if the test writes it.
    pub(crate) config: Option<&'static str>,
    /// Life of the leases, if it is not a day.
    pub(crate) lease: Option<Duration>,
    /// Between two listings, if it is not five minutes.
    pub(crate) relist: Option<Duration>,
    /// Further flags for the daemons.
    pub(crate) flags: Vec<String>,
    /// `NAME=VALUE` for the daemons.
    pub(crate) environment: Vec<String>,
    /// Where the daemons look for etcd; a relay that can be cut by default.
    pub(crate) endpoints: String,
}

impl Plan {
    /// Two hosts with flannel's usual configuration.
    pub(crate) fn of(version: Version) -> Self {
        Self {
            hosts: 2,
            version,
            config: Some(CONFIG),
            lease: None,
            relist: None,
            flags: Vec::new(),
            environment: Vec::new(),
            endpoints: format!("http://{SWITCH_ADDRESS}:{RELAY_PORT}"),
        }
    }
}

/// A running site. Fields are dropped in order: daemons before what they use.
pub(crate) struct Site {
    pub(crate) daemons: Vec<Process>,
    pub(crate) pods: Arc<Vec<Namespace>>,
    pub(crate) relay: Proxy,
    pub(crate) etcd: NamespaceEtcd,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) leases: Vec<SubnetEnv>,
    /// Whether somebody else writes the first host's lease.
    pub(crate) has_twin: bool,
    plan: Plan,
    files: TempDir,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Site {
    /// Hosts and etcd, without daemons.
    #[track_caller]
    pub(crate) fn build(plan: Plan) -> Self {
        let alone = is_thorough().then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner));
        let cluster = Arc::new(Cluster::new(plan.hosts));
        let etcd = NamespaceEtcd::start_version(&cluster.switch, SWITCH_ADDRESS, plan.version);
        let (listen, target) = (SWITCH_ADDRESS, SocketAddr::from((SWITCH_ADDRESS, ETCD_PORT)));
        let listen = SocketAddr::from((listen, RELAY_PORT));
        let relay = cluster.switch.enter(|| Proxy::between(listen, target));
        let files = tempfile::tempdir().expect("a directory for the test");
        let (daemons, pods, leases) = (Vec::new(), Arc::default(), Vec::new());
        let has_twin = false;
        let site = Self {
            daemons,
            pods,
            relay,
            etcd,
            cluster,
            leases,
            has_twin,
            plan,
            files,
            _alone: alone,
        };
        if let Some(config) = site.plan.config {
            site.ctl(&["put", &format!("{PREFIX}/config"), config]);
        }
        site
    }

    /// Hosts whose daemons know each other, with pods that reach each other.
    #[track_caller]
    pub(crate) fn start(plan: Plan) -> Self {
        let mut site = Self::build(plan);
        let hosts = site.plan.hosts;
        site.start_daemons(hosts);
        site
    }

    /// Starts the first `count` daemons, and a pod for each.
    #[track_caller]
    pub(crate) fn start_daemons(&mut self, count: usize) {
        self.daemons = (0..count).map(|host| self.weftd(host, &[])).collect();
        self.leases = (0..count).map(|host| self.wait_for_lease(host)).collect();
        let pods = (0..count).map(|host| self.cluster.pod(host, &self.leases[host]));
        self.pods = Arc::new(pods.collect());
        for host in 0..count {
            self.wait_for_routes(host, count - 1);
        }
    }

    /// Starts the daemon of a host.
    #[track_caller]
    pub(crate) fn weftd(&self, host: usize, arguments: &[&str]) -> Process {
        let plan = &self.plan;
        let mut argv = vec!["env".to_owned()];
        argv.extend(plan.environment.iter().cloned());
        for (name, value) in [("LEASE", plan.lease), ("RELIST", plan.relist)] {
            argv.extend(value.map(|value| format!("BRIEF_{name}_MS={}", value.as_millis())));
        }
        let is_brief = plan.lease.is_some() || plan.relist.is_some();
        let brief = || example("brief-leases").display().to_string();
        argv.push(if is_brief { brief() } else { WEFTD.to_owned() });
        argv.push(format!("--iface={}", host_address(host)));
        argv.push(format!("--subnet-file={}", self.dir(host).join("subnet.env").display()));
        argv.push(format!("--etcd-endpoints={}", plan.endpoints));
        argv.push("--iptables-forward-rules=false".to_owned());
        argv.extend(plan.flags.iter().cloned());
        let argv: Vec<&str> =
            argv.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        self.cluster.hosts[host].spawn(&argv)
    }

    #[track_caller]
    pub(crate) fn wait_for_lease(&mut self, host: usize) -> SubnetEnv {
        SubnetEnv::wait(&self.dir(host).join("subnet.env"), &mut self.daemons[host])
    }

    #[track_caller]
    pub(crate) fn wait_for_routes(&self, host: usize, count: usize) {
        wait_until(LEASE_TIMEOUT, "the daemon learns the others' leases", || {
            self.routes(host) == Some(count)
        });
    }

    /// Routes to peers in a host's published table.
    pub(crate) fn routes(&self, host: usize) -> Option<usize> {
        Status::try_of(&self.dir(host)).map(|status| status.routes())
    }

    pub(crate) fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    /// Runs etcdctl, which is never cut off.
    #[track_caller]
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        self.etcd.ctl(&self.cluster.switch, arguments)
    }

    /// The key of a host's lease.
    pub(crate) fn key(&self, host: usize) -> String {
        format!("{PREFIX}/subnets/{}-24", self.leases[host].network())
    }

    /// A key with its value and what etcd knows of it; `None` if it is not there.
    pub(crate) fn entry(&self, key: &str) -> Option<Entry> {
        let json = self.ctl(&["get", key, "-w", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let entry = json["kvs"].get(0)?;
        let number = |name: &str| entry[name].as_i64().unwrap_or(0);
        Some(Entry {
            created: number("create_revision"),
            modified: number("mod_revision"),
            lease: number("lease"),
        })
    }

    /// The keys of hosts' leases, with everything about them.
    pub(crate) fn entries(&self) -> Vec<Option<Entry>> {
        (0..self.leases.len()).map(|host| self.entry(&self.key(host))).collect()
    }

    /// Cuts the daemons off from etcd: what is open is closed, what is new is refused.
    pub(crate) fn cut(&self) {
        self.relay.set(Mode::Cut);
    }

    /// Lets them reach it again.
    pub(crate) fn mend(&self) {
        self.relay.set(Mode::Open);
    }

    /// Runs `during` with traffic between the pods of the first two hosts.
    #[track_caller]
    pub(crate) fn with_traffic<T>(
        &mut self,
        during: impl FnOnce(&mut Self, &Probe) -> T,
    ) -> (T, Report) {
        // The ends of the traffic stay what they are, whatever `during` does to the rest.
        let (cluster, pods) = (Arc::clone(&self.cluster), Arc::clone(&self.pods));
        let ends = [0, 1].map(|host: usize| End {
            host: &cluster.hosts[host],
            pod: &pods[host],
            address: self.leases[host].pod_address(),
            dir: self.dir(host),
        });
        let (outcome, report) = Probe::run(&ends, |probe| during(self, probe));
        println!("{report}");
        (outcome, report)
    }

    /// What the daemons of the first two hosts say from now on.
    pub(crate) fn listen(&self) -> [LogSince; 2] {
        [0, 1].map(|host: usize| LogSince::since(&self.daemons[host]))
    }

    /// Checks that all daemons run, that each has its subnet, and that each says so in its file.
    #[track_caller]
    pub(crate) fn assert_settled(&mut self) {
        for host in 0..self.daemons.len() {
            let daemon = &mut self.daemons[host];
            assert!(daemon.ended().is_none(), "daemon {host} ended:\n{}", daemon.output());
            assert_eq!(
                self.wait_for_lease(host),
                self.leases[host],
                "host {host} changed its subnet"
            );
            let dir = self.dir(host);
            // A member that was cut off a moment ago is asked again after a pause.
            wait_until(RECONNECT, &format!("the store counts as up on host {host}"), || {
                Status::try_of(&dir).is_some_and(|status| status.0["store"]["up"] == true)
            });
            let status = Status::of(&dir).0;
            assert_eq!(status["ready"], true, "the node is not ready: {status}");
            let others = status["store"]["written_by_others"].as_u64();
            let is_written = others.is_some_and(|times| times > 0);
            assert_eq!(is_written, host == 0 && self.has_twin, "who wrote its lease? {status}");
        }
    }
}

/// An entry of etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) created: i64,
    pub(crate) modified: i64,
    pub(crate) lease: i64,
}
