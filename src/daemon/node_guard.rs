//! Prevents a second daemon for the same node: holds the lock of store and PublicIP for as long as
//! the daemon runs, also when its address changes.

use std::convert::Infallible;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::Result;
use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::config::options::{Options, StoreOptions};
use crate::control::changes::next_change;
use crate::control::lease::LeaseAttributes;
use crate::control::own_thread::on_own_thread;
use crate::daemon::configured::REGISTRATION_PHRASE;
use crate::failure::{LogOnce, with_causes};
use crate::host::node_lock::{NodeLock, NodeLockError};

/// Between two tries for a lock that could not be taken: each lasts for up to a second.
const RETRY: Duration = Duration::from_secs(10);

/// How long the directory of a local store is waited for, which may be another host's.
const DIRECTORY_MAX: Duration = Duration::from_secs(1);

/// The lock, if it could be taken.
#[derive(Debug)]
pub(super) struct NodeGuard {
    store: String,
    address: IpAddr,
    lock: Option<NodeLock>,
    retry: Duration,
}

impl NodeGuard {
    /// Refuses if another daemon is the node of `address` in this store, whose cluster has the
    /// number `cluster`. If the lock fails for another reason, the daemon runs without it.
    pub(super) async fn take(options: &Options, cluster: u64, address: IpAddr) -> Result<Self> {
        let store = identity(&options.store, cluster).await;
        let lock = match NodeLock::acquire(&store, address).await {
            Ok(lock) => Some(lock),
            Err(error @ NodeLockError::Taken { .. }) => {
                let error = format!("{error}. Nothing was written to the store");
                return Err(anyhow::Error::msg(error).context(REGISTRATION_PHRASE));
            }
            Err(error) => {
                warn!(
                    "a second daemon for {address} would not be noticed, going on without its \
                     lock: {}",
                    with_causes(&error)
                );
                None
            }
        };
        Ok(Self { store, address, lock, retry: RETRY })
    }

    /// Holds the lock, and changes it for that of the next address.
    pub(super) async fn keep(
        mut self,
        mut attributes: watch::Receiver<LeaseAttributes>,
    ) -> Infallible {
        let mut told = LogOnce::default();
        loop {
            tokio::select! {
                Some(never) = OptionFuture::from(self.lock.as_ref().map(NodeLock::answer)) => {
                    match never {}
                }
                () = next_change(&mut attributes) => {}
                () = sleep(self.retry), if self.lock.is_none() => {}
            }
            let address = attributes.borrow_and_update().node_address();
            if address == self.address && self.lock.is_some() {
                continue;
            }
            self.address = address;
            let lock = NodeLock::acquire(&self.store, address).await;
            match &lock {
                Ok(_) if told.forget() => info!("this daemon has the lock of {address} now"),
                Ok(_) => {}
                Err(error) => told.once(&with_causes(error), |text| {
                    warn!(
                        "this node has the address {address}, but not the lock of that, trying \
                         again: {text}"
                    );
                }),
            }
            self.lock = lock.ok();
        }
    }
}

/// Names the store: the same text for the same store, however its address is spelled.
async fn identity(store: &StoreOptions, cluster: u64) -> String {
    match store {
        StoreOptions::Etcd(options) => format!("etcd {} of {cluster:x}", options.prefix),
        StoreOptions::Local(directory) => {
            let directory = directory.clone();
            let found = on_own_thread(move || std::fs::metadata(directory));
            match timeout(DIRECTORY_MAX, found).await {
                Ok(Ok(Ok(found))) => format!("local {} {}", found.dev(), found.ino()),
                _ => store.identity(),
            }
        }
        StoreOptions::Kube(_) => store.identity(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test]
    async fn the_lock_of_a_taken_address_is_taken_once_it_is_free() {
        let store = format!("test {:016x}", fastrand::u64(..));
        let [before, after] = [1, 2].map(|last| Ipv4Addr::new(192, 0, 2, last));
        let other = NodeLock::acquire(&store, after.into()).await.unwrap();
        let lock = Some(NodeLock::acquire(&store, before.into()).await.unwrap());
        let retry = Duration::from_millis(20);
        let guard = NodeGuard { store: store.clone(), address: before.into(), lock, retry };
        let (moved, attributes) = watch::channel(LeaseAttributes::udp(before));
        let kept = tokio::spawn(guard.keep(attributes));
        moved.send_replace(LeaseAttributes::udp(after));
        let until = async |address, is_taken| {
            while NodeLock::acquire(&store, address).await.is_err() != is_taken {
                sleep(retry).await;
            }
        };
        let all = async {
            // When it is free, the other one was tried in vain.
            until(before.into(), false).await;
            drop(other);
            until(after.into(), true).await;
        };
        timeout(Duration::from_secs(20), all).await.expect("given up for ever");
        kept.abort();
    }
}
