//! The subnet manager: one store, this node's view of it, and the three things to do with it:
//! read the network configuration, acquire a subnet (`acquire`), keep it and follow the others
//! (`run`).

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;

use crate::config::network::NetworkConfig;
use crate::config::options::StoreOptions;
use crate::control::cache::Known;
use crate::control::claim::CLAIM_TTL;
use crate::control::clock;
use crate::control::lease::Lease;
use crate::control::status::ControlStatus;
use crate::control::store::etcd::{EtcdOptionsError, EtcdStore};
#[cfg(feature = "kube")]
use crate::control::store::kube::{KubeOptionsError, KubeStore};
use crate::control::store::local::LocalStore;
use crate::control::store::{AssignError, Granted, Store, StoreError};
use crate::route::Prefix;

/// flannel's fixed lease time.
pub const LEASE_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// flannel's pause after a failed renewal.
pub const RENEW_RETRY: Duration = Duration::from_secs(60);
/// How often everything is listed although the watch seems to work: a change that it lost heals
/// within 6 minutes, and a thousand nodes cost 3 listings a second.
pub const RELIST_PERIOD: Duration = Duration::from_secs(300);
/// The same where an entry is a whole Node of some 15 KB: in a cluster of 6,000, each of whose
/// nodes lists all of them, three listings in ten seconds. The watch breaks and begins anew every
/// few minutes, and says by itself if it cannot continue.
pub const RELIST_PERIOD_NODES: Duration = Duration::from_secs(6 * 60 * 60);
/// How long changes are collected before they are published: a burst costs one route table, and
/// nobody notices a fiftieth of a second.
pub const PUBLISH_WINDOW: Duration = Duration::from_millis(20);
/// The same in a cluster of 6,000 Nodes, where one table takes 5 ms: four of them a second, however
/// many Nodes move, are 2 % of a processor. The API's own way to its watches takes about as long.
pub const PUBLISH_WINDOW_NODES: Duration = Duration::from_millis(250);
/// How long peers stay after most of them vanished at once: time for an operator to see the alarm
/// and to bring the store's data back, and for nodes to register again by themselves.
pub const STALE_HOLD: Duration = Duration::from_secs(15 * 60);

/// Between two questions whether the store takes writes: an operator sees within half a minute why
/// new nodes get nothing, and a thousand nodes ask 33 times a second.
pub const ALARM_PERIOD: Duration = Duration::from_secs(30);

/// The control plane's durations. `stale_hold` is the operator's; of the others, only tests and
/// simulations use others than the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Life of a lease from its last renewal.
    pub lease_ttl: Duration,
    /// Pause after a failed renewal.
    pub renew_retry: Duration,
    /// Between two listings of everything.
    pub relist_period: Duration,
    /// For which changes are collected.
    pub publish_window: Duration,
    /// For which peers stay that vanished with most others at once; zero for not at all.
    pub stale_hold: Duration,
    /// Life of the claim on the PublicIP after its node is gone.
    pub claim_ttl: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease_ttl: LEASE_TTL,
            renew_retry: RENEW_RETRY,
            relist_period: RELIST_PERIOD,
            publish_window: PUBLISH_WINDOW,
            stale_hold: STALE_HOLD,
            claim_ttl: CLAIM_TTL,
        }
    }
}

/// Why the store's options cannot work. Trying again does not help.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// etcd's options.
    #[error(transparent)]
    Etcd(#[from] EtcdOptionsError),
    /// The local store's directory.
    #[error("--local-store cannot be used")]
    Local(#[source] StoreError),
    /// Kubernetes' options.
    #[cfg(feature = "kube")]
    #[error(transparent)]
    Kube(#[from] KubeOptionsError),
}

/// This node's access to the leases.
#[derive(Debug)]
pub struct SubnetManager {
    pub(super) store: Store,
    pub(super) previous: Option<Prefix>,
    pub(super) status: Arc<ControlStatus>,
    pub(super) timing: Timing,
    pub(super) known: watch::Sender<Option<Arc<Known>>>,
    pub(super) used_config: OnceLock<NetworkConfig>,
}

/// The subnet that this node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnLease {
    /// The entry as last seen in the store.
    pub lease: Lease,
    /// The end by `clock::boot_time`; `None` for a reservation.
    pub expires: Option<Duration>,
    /// The cluster's network that it was taken from.
    pub network: Prefix,
}

impl SubnetManager {
    /// Checks the options and prepares the store, which need not be reachable yet. In a pod that
    /// does not know its Node, the API has to tell.
    /// `previous` is the subnet of the last run, from the subnet file.
    pub async fn connect(
        options: &StoreOptions,
        previous: Option<Prefix>,
    ) -> Result<Self, ConnectError> {
        let store = match options {
            #[cfg(feature = "kube")]
            StoreOptions::Kube(options) => Store::Kube(Box::new(KubeStore::open(options).await?)),
            StoreOptions::Etcd(options) => Store::Etcd(Box::new(EtcdStore::new(options)?)),
            StoreOptions::Local(directory) => {
                Store::Local(LocalStore::open(directory.clone()).map_err(ConnectError::Local)?)
            }
        };
        Ok(Self::over(store, previous))
    }

    pub(super) fn over(store: Store, previous: Option<Prefix>) -> Self {
        let known = watch::Sender::new(None);
        let (status, timing, used_config) = (Arc::default(), Timing::default(), OnceLock::new());
        Self { store, previous, status, timing, known, used_config }
    }

    /// The same manager with other durations. Those that are the default suit the store.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        if self.store.assigns() {
            let usual = Timing::default();
            if timing.relist_period == usual.relist_period {
                self.timing.relist_period = RELIST_PERIOD_NODES;
            }
            if timing.publish_window == usual.publish_window {
                self.timing.publish_window = PUBLISH_WINDOW_NODES;
            }
        }
        self
    }

    /// flannel's name for it, as in its log: `Etcd Local Manager with Previous Subnet: None`.
    #[must_use]
    pub fn describe(&self) -> String {
        let previous = self.previous.map_or_else(|| "None".to_owned(), |p| p.to_string());
        let kind = match &self.store {
            Store::Etcd(_) => "Etcd Local Manager",
            Store::Local(_) => "Local Store Manager",
            #[cfg(feature = "kube")]
            Store::Kube(store) => return format!("Kubernetes Subnet Manager - {}", store.node()),
            #[cfg(test)]
            Store::Memory(_) => "Memory Manager",
        };
        format!("{kind} with Previous Subnet: {previous}")
    }

    /// What the control plane says about itself; stays valid for the manager's life.
    #[must_use]
    pub fn status(&self) -> Arc<ControlStatus> {
        Arc::clone(&self.status)
    }

    /// What the store last said, after each change and each listing; what is from the cache is
    /// not among it.
    #[must_use]
    pub fn known(&self) -> watch::Receiver<Option<Arc<Known>>> {
        self.known.subscribe()
    }

    /// Before an interface is looked for: waits for the first answer of a store that assigns
    /// subnets, and gives the address that its operator chose for this node, if one was chosen.
    pub async fn sync(&self) -> Result<Option<Ipv4Addr>, AssignError> {
        self.store.sync().await
    }

    /// The network works: a store that assigns subnets may tell the cluster.
    pub fn network_is_up(&self) {
        self.store.network_is_up();
    }

    /// The network configuration as its operator wrote it. An error is worth another try each
    /// second, as flannel does.
    pub async fn network_config(&self) -> Result<Vec<u8>, StoreError> {
        let result = self.store.config().await;
        self.note(&result);
        result
    }

    /// The cluster behind the store, by its id, once it was heard of; 0 where there is none.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        self.store.cluster()
    }

    /// The node goes by `config`, and does to the end: a run compares with it what the store has.
    pub fn go_by(&self, config: &NetworkConfig) {
        self.used_config.set(config.clone()).ok();
    }

    /// Keeps the status up to date with what the store says of itself, which nobody would hear
    /// of otherwise before the next renewal.
    pub async fn watch_alarms(&self) -> Infallible {
        loop {
            if let Ok(alarm) = self.store.alarm().await {
                self.status.alarmed(alarm);
            }
            tokio::time::sleep(ALARM_PERIOD).await;
        }
    }

    /// As `note`, of a write.
    pub(super) fn note_write<T>(&self, result: &Result<T, StoreError>) {
        self.count(result);
        match result {
            Ok(_) => self.status.write_refused(None),
            Err(error @ StoreError::Refused { .. }) => {
                self.status.write_refused(Some(error.to_string()));
            }
            Err(_) => {}
        }
    }

    /// Keeps the status up to date with what the store just read for us.
    pub(super) fn note<T>(&self, result: &Result<T, StoreError>) {
        self.count(result);
        match result {
            Ok(_) => self.status.read_refused(None),
            Err(error @ StoreError::Refused { .. }) => {
                self.status.read_refused(Some(error.to_string()));
            }
            Err(_) => {}
        }
    }

    fn count<T>(&self, result: &Result<T, StoreError>) {
        match result {
            Ok(_) => self.status.store_answered(),
            Err(StoreError::Conflict { .. }) => {
                self.status.store_answered();
                self.status.conflicted();
            }
            Err(error) if error.store_answered() => self.status.store_answered(),
            Err(_) => self.status.store_failed(),
        }
    }
}

impl OwnLease {
    pub(super) fn new(granted: Granted, network: Prefix) -> Self {
        Self { lease: granted.lease, expires: granted.expires, network }
    }

    /// Seconds since 1970 at which the lease ends; `None` for a reservation.
    #[must_use]
    pub fn expires_unix(&self) -> Option<u64> {
        let left = self.expires?.saturating_sub(clock::boot_time());
        Some(clock::unix_seconds().saturating_add(left.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_manager_is_announced_in_flannels_words() {
        let options = StoreOptions::Etcd(crate::config::options::EtcdOptions {
            endpoints: vec!["http://127.0.0.1:4001".to_owned()],
            prefix: "/coreos.com/network".to_owned(),
            ca_file: None,
            client_certificate: None,
            credentials: None,
        });
        let manager = SubnetManager::connect(&options, None).await.unwrap();
        assert_eq!(manager.describe(), "Etcd Local Manager with Previous Subnet: None");
        let previous = "10.5.34.0/24".parse().ok();
        let manager = SubnetManager::connect(&options, previous).await.unwrap();
        assert_eq!(manager.describe(), "Etcd Local Manager with Previous Subnet: 10.5.34.0/24");
    }
}
