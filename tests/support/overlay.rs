//! Two weftd on one local store with a pod each: the overlay as a user has it.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::lab::{Lab, Process, SubnetEnv, wait_until};
use super::status::Status;

/// flannel's usual configuration of the udp backend.
pub(crate) const CONFIG: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;

/// The lab with a running daemon on each host, and pods that are connected.
///
/// Fields are dropped in order: daemons before the files that they use.
#[derive(Debug)]
pub(crate) struct Overlay {
    /// Daemons by host.
    pub(crate) daemons: Vec<Process>,
    /// Hosts and pods.
    pub(crate) lab: Lab,
    /// What the daemons lease.
    pub(crate) leases: [SubnetEnv; 2],
    files: TempDir,
}

/// A local store that holds `config`, below `dir`; gives the flag for it.
pub(crate) fn local_store(dir: &Path, config: &str) -> String {
    let store = dir.join("store");
    std::fs::create_dir_all(store.join("subnets")).expect("the test's directory is writable");
    std::fs::write(store.join("config"), config).expect("the test's directory is writable");
    format!("--local-store={}", store.display())
}

/// Puts a reservation of `subnet`, spelled as in a key, for the node at `public_ip`. A running
/// daemon has one of the first hundred subnets, chosen at random: beside it, use those above 200.
pub(crate) fn reserve(dir: &Path, subnet: &str, public_ip: Ipv4Addr) {
    let value = format!(r#"{{"PublicIP":"{public_ip}","PublicIPv6":null}}"#);
    let subnets = dir.join("store/subnets");
    std::fs::write(subnets.join(subnet), value).expect("the test's directory is writable");
}

impl Overlay {
    /// Both daemons with the usual configuration.
    #[track_caller]
    pub(crate) fn start() -> Self {
        Self::start_with(CONFIG, [&[], &[]])
    }

    /// Both daemons, with further arguments for each, once they know each other.
    #[track_caller]
    pub(crate) fn start_with(config: &str, arguments: [&[&str]; 2]) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let store = local_store(files.path(), config);
        let lab = Lab::two_hosts();
        let mut daemons = Vec::new();
        for (host, extra) in arguments.into_iter().enumerate() {
            let mut all = vec![store.as_str()];
            all.extend(extra);
            let dir = files.path().join(format!("h{host}"));
            daemons.push(lab.weftd(host, &dir, &all));
        }
        let mut lease =
            |host: usize| SubnetEnv::wait(&env_path(files.path(), host), &mut daemons[host]);
        let leases = [lease(0), lease(1)];
        lab.connect_pods(leases.each_ref());
        let overlay = Self { daemons, lab, leases, files };
        overlay.wait_for_routes();
        overlay
    }

    /// Waits until both daemons know the other's lease.
    #[track_caller]
    pub(crate) fn wait_for_routes(&self) {
        for host in 0..2 {
            wait_until(Duration::from_secs(10), "each daemon learns the other's lease", || {
                Status::try_of(&self.dir(host)).is_some_and(|status| status.routes() == 1)
            });
        }
    }

    /// Waits until the kernel carries the packets of both hosts. The first ones are the workers':
    /// they have the kernel find the neighbour.
    #[track_caller]
    pub(crate) fn wait_until_carried(&self) {
        wait_until(Duration::from_secs(10), "the kernel carries the packets to the peers", || {
            self.lab.ping(0, self.pod(1), 56)
                && (0..2).all(|host| self.status(host).0["fast_path"]["peers"] == 1)
        });
    }

    /// A host's directory: `subnet.env`, `weft.sock`.
    pub(crate) fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    /// The directory above store and hosts.
    pub(crate) fn files(&self) -> &Path {
        self.files.path()
    }

    /// The address of a host's pod.
    pub(crate) fn pod(&self, host: usize) -> Ipv4Addr {
        self.leases[host].pod_address()
    }

    /// The daemon's status.
    #[track_caller]
    pub(crate) fn status(&self, host: usize) -> Status {
        Status::of(&self.dir(host))
    }

    /// Starts a host's daemon again.
    #[track_caller]
    pub(crate) fn restart(&mut self, host: usize, arguments: &[&str]) {
        self.daemons[host] = self.weftd(host, arguments);
    }

    /// Starts one more daemon on a host, with the files of the one there.
    pub(crate) fn weftd(&self, host: usize, arguments: &[&str]) -> Process {
        let store = format!("--local-store={}", self.files.path().join("store").display());
        let all = [&[store.as_str()], arguments].concat();
        self.lab.weftd(host, &self.dir(host), &all)
    }

    /// Pings from pod 0 to pod 1 until one is answered; how long that took.
    ///
    /// # Panics
    /// When none is within `limit`.
    #[track_caller]
    pub(crate) fn traffic_resumes(&self, limit: Duration, after: &str) -> Duration {
        let started = Instant::now();
        let address = self.pod(1).to_string();
        wait_until(limit, &format!("pods reach each other after {after}"), || {
            self.lab.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.1", &address])
        });
        started.elapsed()
    }
}

fn env_path(files: &Path, host: usize) -> PathBuf {
    files.join(format!("h{host}")).join("subnet.env")
}
