//! Where leases live. In etcd and in a directory of files each node leases a subnet for itself
//! ([`Leased`]); the Kubernetes API assigns one to each node. Both are listed and watched alike.
//!
//! Every write compares the version last seen, and what is not a lease is handed back as rejected,
//! never an error. A store has no opinion about who should own what: the lease machine decides.

mod calls;
pub mod etcd;
mod etcd_claim;
mod etcd_connection;
mod etcd_lease;
mod etcd_tls;
mod etcd_watch;
pub mod kube;
mod kube_connection;
pub mod kube_node;
mod kube_own;
mod kube_watch;
pub mod local;
mod local_claim;
mod local_files;
#[cfg(test)]
pub mod memory;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{BoxStream, try_unfold};

use self::calls::Calls;
use self::etcd::EtcdStore;
use self::kube::KubeStore;
use self::kube_watch::KubeWatch;
use crate::control::error::StoreResult;
use crate::control::identity::{NodeIdentity, Phase};
use crate::control::lease::Lease;
use crate::control::snapshot::{Change, Granted, Snapshot, Vacancy};

/// A place where leases live.
pub enum Store {
    /// Nodes lease their subnets.
    Leased(Leased),
    /// The cluster assigns them.
    Assigned(Arc<KubeStore>),
}

/// A store in which nodes lease their subnets.
pub enum Leased {
    /// An etcd v3 cluster.
    Etcd(Box<EtcdStore>),
    /// A directory of files.
    Local(local::LocalStore),
    /// A map, for tests of the logic above.
    #[cfg(test)]
    Memory(memory::MemoryStore),
}

/// Changes, at least one at a time. Ends with an error; dropping a `next` loses none.
pub type Watch = BoxStream<'static, StoreResult<Vec<Change>>>;

/// The stream of what a watch brings.
macro_rules! stream {
    ($watch:expr) => {
        try_unfold($watch, |mut watch| async move { Ok(Some((watch.next().await?, watch))) })
            .boxed()
    };
}

/// The same call on whichever store it is.
macro_rules! on_each {
    ($leased:expr, $store:ident => $call:expr) => {
        match $leased {
            Leased::Etcd($store) => $call,
            Leased::Local($store) => $call,
            #[cfg(test)]
            Leased::Memory($store) => $call,
        }
    };
}

impl Store {
    /// The store in which nodes lease their subnets, if it is one.
    pub fn leased(&self) -> Option<&Leased> {
        match self {
            Self::Leased(store) => Some(store),
            Self::Assigned(_) => None,
        }
    }

    /// etcd, if it is that.
    pub(super) fn etcd(&self) -> Option<&EtcdStore> {
        if let Self::Leased(Leased::Etcd(store)) = self { Some(store) } else { None }
    }

    /// The calls of a store that is no directory of files.
    pub(super) fn calls(&self) -> Option<&Calls> {
        match self {
            Self::Leased(Leased::Etcd(store)) => Some(&store.connection.calls),
            Self::Leased(_) => None,
            Self::Assigned(store) => Some(&store.connection.calls),
        }
    }

    /// This host has another address: its connections are made anew.
    pub fn moved(&self) {
        self.calls().into_iter().for_each(Calls::moved);
    }

    /// The network configuration as written by the operator.
    pub async fn config(&self) -> StoreResult<Vec<u8>> {
        match self {
            Self::Leased(leased) => on_each!(leased, store => store.config().await),
            Self::Assigned(store) => store.config(),
        }
    }

    /// All leases.
    pub async fn list(&self) -> StoreResult<Snapshot> {
        match self {
            Self::Leased(leased) => on_each!(leased, store => store.list().await),
            Self::Assigned(store) => store.list().await,
        }
    }

    /// All changes after `revision`, which a snapshot or an earlier change named; an error if the
    /// store's history up to there is not the one that has `own`.
    pub async fn watch(&self, revision: i64, own: &Lease) -> StoreResult<Watch> {
        Ok(match self {
            Self::Leased(Leased::Etcd(store)) => stream!(store.watch(revision, own).await?),
            Self::Leased(Leased::Local(store)) => stream!(store.watch().await?),
            #[cfg(test)]
            Self::Leased(Leased::Memory(store)) => stream!(store.watch(revision)?),
            Self::Assigned(store) => stream!(KubeWatch::open(Arc::clone(store), revision).await?),
        })
    }

    /// Waits until a store that answers lacks what this node has there.
    pub async fn doubted(&self) {
        let Some(store) = self.etcd() else { return std::future::pending().await };
        store.claims.lost.notified().await;
    }
}

impl Leased {
    /// From now on the store is used for `node`, which claims the address that it writes.
    pub fn claim_as(&mut self, node: NodeIdentity) {
        on_each!(self, store => store.claims.node = Some(node));
    }

    /// Claims `address`, or keeps that claim alive, unless another node has it. It lives for
    /// `ttl` after the last call, or as long as this process. A node without a name claims nothing.
    pub async fn claim(&self, address: IpAddr, ttl: Duration) -> StoreResult<()> {
        on_each!(self, store => store.claims.claim(address, ttl).await)
    }

    /// Writes `lease`, which is new, into its place for `ttl` from now, if nobody has taken that
    /// since; in place of a reservation, for ever.
    pub async fn create(
        &self,
        lease: &Lease,
        vacancy: &Vacancy,
        ttl: Duration,
        phase: Phase,
    ) -> StoreResult<Granted> {
        on_each!(self, store => store.create(lease, vacancy, ttl, phase).await)
    }

    /// Writes `lease` over the entry of its revision and extends it to `ttl` from now, if nobody
    /// wrote since. A reservation stays one.
    pub async fn write(&self, lease: &Lease, ttl: Duration, phase: Phase) -> StoreResult<Granted> {
        on_each!(self, store => store.write(lease, ttl, phase).await)
    }

    /// Extends `held` to `ttl` from now, if nobody wrote since.
    pub async fn renew(&self, held: &Lease, ttl: Duration) -> StoreResult<Granted> {
        let Self::Etcd(store) = self else { return self.write(held, ttl, Phase::Runs).await };
        store.renew(held, ttl).await
    }

    /// Gives up what this run claims, and has the store take it back at once if that `is_up`.
    pub async fn release_claim(&self, is_up: bool) {
        on_each!(self, store => store.claims.release(is_up).await);
    }

    /// The node whose daemon runs and claims `address`, in words. A node that runs flanneld
    /// claims nothing.
    pub async fn claimed_by(&self, address: IpAddr) -> StoreResult<Option<String>> {
        on_each!(self, store => store.claims.holder(address).await)
    }

    /// Whether an earlier run of this node, since it was booted, was the last to claim `address`.
    pub(super) async fn is_claimed_by_us(&self, address: IpAddr) -> StoreResult<bool> {
        on_each!(self, store => store.claims.is_ours(address).await)
    }

    /// Removes `held`, if nobody wrote since.
    pub async fn delete(&self, held: &Lease) -> StoreResult<()> {
        on_each!(self, store => store.delete(held).await)
    }
}
