//! Prevents a second daemon for the same node: holds the lock of store and PublicIP for as long as
//! the daemon runs, also when its address changes.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};
use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tracing::warn;

use crate::config::options::{Options, StoreOptions};
use crate::control::changes::next_change;
use crate::control::lease::LeaseAttributes;
use crate::daemon::configured::REGISTRATION_PHRASE;
use crate::failure::with_causes;
use crate::host::node_lock::{NodeLock, NodeLockError};

/// The lock, if it could be taken.
#[derive(Debug)]
pub(super) struct NodeGuard {
    store: String,
    public_ip: Ipv4Addr,
    lock: Option<NodeLock>,
}

impl NodeGuard {
    /// Refuses if another daemon is the node of `public_ip` in this store, whose cluster has the
    /// number `cluster`. If the lock fails for another reason, the daemon runs without it.
    pub(super) async fn take(options: &Options, cluster: u64, public_ip: Ipv4Addr) -> Result<Self> {
        let store = identity(&options.store, cluster);
        let lock = match NodeLock::acquire(&store, public_ip).await {
            Ok(lock) => Some(lock),
            Err(error @ NodeLockError::Taken { .. }) => {
                return Err(error).context(REGISTRATION_PHRASE);
            }
            Err(error) => {
                warn!(
                    "a second daemon for {public_ip} would not be noticed, going on without its \
                     lock: {}",
                    with_causes(&error)
                );
                None
            }
        };
        Ok(Self { store, public_ip, lock })
    }

    /// Holds the lock, and changes it for that of the next address.
    pub(super) async fn keep(
        mut self,
        mut attributes: watch::Receiver<LeaseAttributes>,
    ) -> Infallible {
        loop {
            tokio::select! {
                Some(never) = OptionFuture::from(self.lock.as_ref().map(NodeLock::answer)) => {
                    match never {}
                }
                () = next_change(&mut attributes) => {}
            }
            let public_ip = attributes.borrow_and_update().public_ip;
            if public_ip == self.public_ip {
                continue;
            }
            self.public_ip = public_ip;
            let lock = NodeLock::acquire(&self.store, public_ip).await.inspect_err(|error| {
                warn!("the node moved to {public_ip}: {}", with_causes(error));
            });
            self.lock = lock.ok();
        }
    }
}

/// Names the store: the same text for the same store, however its address is spelled.
fn identity(store: &StoreOptions, cluster: u64) -> String {
    match store {
        StoreOptions::Etcd(options) => format!("etcd {} of {cluster:x}", options.prefix),
        StoreOptions::Local(directory) => match std::fs::metadata(directory) {
            Ok(found) => format!("local {} {}", found.dev(), found.ino()),
            Err(_) => store.identity(),
        },
        StoreOptions::Kube(_) => store.identity(),
    }
}
