//! The subnet manager: one store, this node's view of it, and the three things to do with it:
//! read the network configuration, acquire a subnet (`acquire`), keep it and follow the others
//! (`run`).

use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;

use crate::config::network::NetworkConfig;
use crate::config::options::StoreOptions;
use crate::control::cache::Known;
use crate::control::clock::unix_seconds;
use crate::control::error::{AcquireError, ConnectError, StoreError, StoreResult};
use crate::control::identity::NodeIdentity;
use crate::control::status::{ControlState, ControlStatus};
use crate::control::store::etcd::EtcdStore;
use crate::control::store::kube::KubeStore;
use crate::control::store::local::LocalStore;
use crate::control::store::{Leased, Store};
use crate::control::timing::{PUBLISH_WINDOW_NODES, RELIST_PERIOD_NODES, Timing};
use crate::failure::with_causes;
use crate::route::Prefixes;

/// Between two questions whether the store takes writes: an operator sees within half a minute why
/// new nodes get nothing, and a thousand nodes ask 33 times a second.
pub const ALARM_PERIOD: Duration = Duration::from_secs(30);

/// This node's access to the leases.
pub struct SubnetManager {
    pub(super) store: Store,
    pub(super) previous: Option<Prefixes>,
    pub(super) status: Arc<ControlStatus>,
    pub(super) timing: Timing,
    pub(super) known: watch::Sender<Option<Arc<Known>>>,
    pub(super) used_config: OnceLock<NetworkConfig>,
}

impl SubnetManager {
    /// Checks the options and prepares the store, which need not be reachable yet. In a pod that
    /// does not know its Node, the API has to tell.
    /// `previous` are the subnets of the last run, from the subnet file.
    pub async fn connect(
        options: &StoreOptions,
        previous: Option<Prefixes>,
    ) -> Result<Self, ConnectError> {
        let store = match options {
            StoreOptions::Kube(options) => {
                Store::Assigned(Arc::new(KubeStore::open(options).await?))
            }
            StoreOptions::Etcd(options) => {
                Store::Leased(Leased::Etcd(Box::new(EtcdStore::new(options)?)))
            }
            StoreOptions::Local(directory) => {
                let store = LocalStore::open(directory.clone()).await.map_err(|error| {
                    ConnectError(format!("--local-store cannot be used: {}", with_causes(&error)))
                })?;
                Store::Leased(Leased::Local(store))
            }
        };
        Ok(Self::over(store, previous))
    }

    pub(super) fn over(store: Store, previous: Option<Prefixes>) -> Self {
        let known = watch::Sender::new(None);
        let (status, timing, used_config) = (Arc::default(), Timing::default(), OnceLock::new());
        Self { store, previous, status, timing, known, used_config }
    }

    /// Its durations.
    pub(crate) fn timing(&self) -> Timing {
        self.timing
    }

    /// The same manager with other durations. Defaults are replaced by those of the store.
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        if self.store.leased().is_none() {
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

    /// The same manager for a node with a name: it claims its PublicIP, and refuses to share it. In
    /// Kubernetes its Node is its identity.
    pub fn with_identity(mut self, identity: NodeIdentity) -> Self {
        if let Store::Leased(store) = &mut self.store {
            store.claim_as(identity);
        }
        self
    }

    /// flannel's name for it, as in its log: `Etcd Local Manager with Previous Subnet: None`.
    pub fn describe(&self) -> String {
        let previous = self.previous.map_or_else(|| "None".to_owned(), |p| p.to_string());
        let kind = match &self.store {
            Store::Leased(Leased::Etcd(_)) => "Etcd Local Manager",
            Store::Leased(_) => "Local Store Manager",
            Store::Assigned(store) => {
                return format!("Kubernetes Subnet Manager - {}", store.own.name);
            }
        };
        format!("{kind} with Previous Subnet: {previous}")
    }

    /// The status of the control plane; stays valid for the manager's life.
    pub fn status(&self) -> Arc<ControlStatus> {
        Arc::clone(&self.status)
    }

    /// The store's content after each change and each listing, never what came from the cache.
    pub fn known(&self) -> watch::Receiver<Option<Arc<Known>>> {
        self.known.subscribe()
    }

    /// Before an interface is looked for: waits for the first answer of a store that assigns
    /// subnets, and gives the addresses that its operator chose for this node, if any were chosen.
    pub async fn sync(&self) -> Result<(Option<Ipv4Addr>, Option<Ipv6Addr>), AcquireError> {
        match &self.store {
            Store::Leased(_) => Ok((None, None)),
            Store::Assigned(store) => store.sync(&self.status).await,
        }
    }

    /// The network works: a store that assigns subnets may tell the cluster.
    pub fn network_is_up(&self) {
        if let Store::Assigned(store) = &self.store {
            store.network_is_up();
        }
    }

    /// The network configuration as its operator wrote it. An error is worth another try each
    /// second, as flannel does.
    pub async fn network_config(&self) -> StoreResult<Vec<u8>> {
        let config = self.store.config().await;
        // A file, in a store that assigns subnets: it says nothing about the store.
        if self.store.leased().is_some() { self.noted(config) } else { config }
    }

    /// The etcd cluster's id once one was connected to; 0 before that, and of other stores.
    pub fn cluster(&self) -> u64 {
        self.store.etcd().map_or(0, EtcdStore::cluster)
    }

    /// The node uses `config` to the end; a run compares the store's configuration with it.
    pub fn go_by(&self, config: &NetworkConfig) {
        self.used_config.set(config.clone()).ok();
    }

    /// Polls the store for alarms, which would show up only at the next renewal otherwise.
    pub async fn watch_alarms(&self) -> Infallible {
        let Some(store) = self.store.etcd() else { return std::future::pending().await };
        loop {
            if let Ok(alarm) = store.alarm().await {
                self.status.alarmed(alarm);
            }
            tokio::time::sleep(ALARM_PERIOD).await;
        }
    }

    /// Notes in the status what came of a write.
    pub(super) fn noted_write<T>(&self, result: StoreResult<T>) -> StoreResult<T> {
        self.note(&result, |state| &mut state.refused_write);
        result
    }

    /// Notes in the status what came of a read.
    pub(super) fn noted<T>(&self, result: StoreResult<T>) -> StoreResult<T> {
        self.note(&result, |state| &mut state.refused_read);
        result
    }

    fn note<T>(
        &self,
        result: &StoreResult<T>,
        refused: fn(&mut ControlState) -> &mut Option<String>,
    ) {
        let mut state = self.status.edit();
        state.store.up = result.as_ref().err().is_none_or(StoreError::store_answered);
        if state.store.up {
            state.store.answered_unix = Some(unix_seconds());
        }
        match result {
            Ok(_) => {
                *refused(&mut state) = None;
                state.store.hindrance = None;
            }
            Err(StoreError::Conflict(_)) => state.conflicts += 1,
            Err(error) => {
                if let StoreError::Refused { .. } = error {
                    *refused(&mut state) = Some(error.to_string());
                }
                if error.store_answered() {
                    state.store.hindrance = None;
                } else {
                    state.store_failed(with_causes(error));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn manager_description_matches_flannel() {
        let options = StoreOptions::Etcd(crate::config::options::EtcdOptions {
            endpoints: vec!["http://127.0.0.1:4001".to_owned()],
            prefix: "/coreos.com/network".to_owned(),
            ca_file: None,
            client_certificate: None,
            credentials: None,
        });
        let manager = SubnetManager::connect(&options, None).await.unwrap();
        assert_eq!(manager.describe(), "Etcd Local Manager with Previous Subnet: None");
        let previous = Prefixes::from_key("10.5.34.0-24");
        let manager = SubnetManager::connect(&options, previous).await.unwrap();
        assert_eq!(manager.describe(), "Etcd Local Manager with Previous Subnet: 10.5.34.0/24");
    }
}
