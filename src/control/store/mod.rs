//! Where leases live: etcd, or a directory of files. A closed set behind one small interface;
//! every write is fenced, and what is not a lease is handed back as rejected, never an error.
//!
//! A store keeps no opinion about who should own what: `acquire` and `run` decide.

mod assigned;
pub mod etcd;
mod etcd_claim;
mod etcd_connection;
mod etcd_tls;
mod etcd_watch;
#[cfg(feature = "kube")]
pub mod kube;
#[cfg(feature = "kube")]
mod kube_connection;
#[cfg(feature = "kube")]
mod kube_list;
#[cfg(feature = "kube")]
mod kube_node;
#[cfg(feature = "kube")]
mod kube_own;
#[cfg(feature = "kube")]
mod kube_watch;
pub mod local;
mod local_claim;
mod local_files;
#[cfg(test)]
pub mod memory;

use std::net::Ipv4Addr;
use std::time::Duration;

pub use self::assigned::AssignError;
#[cfg(feature = "kube")]
use self::kube::{KubeStore, not_ours};
use crate::control::claim::NodeIdentity;
use crate::control::lease::{Lease, LeaseAttributes, ValueError, parse_key};
use crate::control::status::RejectReason;
use crate::route::Prefix;

/// Most leases accepted from a store: one for each /24 of a /8. What lies beyond is rejected, so
/// that a flood costs bounded memory.
pub const ENTRIES_MAX: usize = 65_536;
/// Rejected entries kept of one listing; the rest is only counted as one.
const REJECTED_MAX: usize = 4096;
/// Largest network configuration read. The longest that flannel's documentation shows has 1 KiB.
pub(crate) const CONFIG_BYTES_MAX: usize = 64 * 1024;

/// A place where leases live.
#[derive(Debug)]
pub enum Store {
    /// An etcd v3 cluster.
    Etcd(Box<etcd::EtcdStore>),
    /// A directory of files.
    Local(local::LocalStore),
    /// The Kubernetes API.
    #[cfg(feature = "kube")]
    Kube(Box<KubeStore>),
    /// A map, for tests of the logic above.
    #[cfg(test)]
    Memory(memory::MemoryStore),
}

/// A stream of changes.
pub enum Watch {
    /// Of an etcd cluster.
    Etcd(Box<etcd_watch::EtcdWatch>),
    /// Of a directory.
    Local(Box<local::LocalWatch>),
    /// Of a cluster's Nodes.
    #[cfg(feature = "kube")]
    Kube(Box<kube_watch::KubeWatch>),
    /// Of a map.
    #[cfg(test)]
    Memory(memory::MemoryWatch),
}

/// All leases at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The live leases, at most `ENTRIES_MAX`.
    pub leases: Vec<Lease>,
    /// What is no lease.
    pub rejected: Vec<Rejected>,
    /// The moment, in revisions of the store; a watch continues from here.
    pub revision: i64,
    /// Which store it was, so that one that was replaced is noticed; 0 if it does not say.
    pub cluster: u64,
    /// Whether this is all there was. Of what an incomplete one lacks, nothing is known.
    pub complete: bool,
}

/// An entry that is no usable lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The key below `subnets/`, cut to a printable length.
    pub key: String,
    /// The class, for counters.
    pub reason: RejectReason,
    /// The explanation, for the log.
    pub detail: String,
    /// The entry's version.
    pub revision: i64,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The watch is established; changes up to this revision happened before.
    Live {
        /// The store's revision when it began to watch.
        revision: i64,
    },
    /// Nothing that matters changed up to this revision.
    Progress {
        /// The store's revision.
        revision: i64,
    },
    /// A lease was written.
    Put(Lease),
    /// A key was written with something that is no lease.
    Rejected(Rejected),
    /// A key is gone.
    Deleted {
        /// The key below `subnets/`.
        key: String,
        /// The store's revision of the deletion.
        revision: i64,
    },
    /// The store cannot say what changed; this is how it looks now.
    Everything(Snapshot),
}

/// A lease as just written by us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// The entry, with the revision that the next fenced write compares.
    pub lease: Lease,
    /// When it ends, by `clock::boot_time`, counted from before the request was sent; `None` for
    /// a reservation.
    pub expires: Option<Duration>,
}

/// Why a store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nobody configured the network yet.
    #[error(
        "there is no network configuration at {place}; write one, such as \
         {{\"Network\":\"10.5.0.0/16\"}}"
    )]
    NoConfig {
        /// The key or file.
        place: String,
    },
    /// The configuration is larger than any.
    #[error("the network configuration at {place} has more than {CONFIG_BYTES_MAX} bytes")]
    ConfigTooLarge {
        /// The key or file.
        place: String,
    },
    /// Another writer was there first.
    #[error("another writer changed {key} first")]
    Conflict {
        /// The key below `subnets/`.
        key: String,
    },
    /// Another node claims this node's PublicIP.
    #[error(
        "PublicIP {public_ip} belongs to {holder}, and two nodes must not share a subnet: give \
         one of them another address with --public-ip or --iface. If that node is gone, its claim \
         ends within a minute"
    )]
    Duplicate {
        /// The address.
        public_ip: Ipv4Addr,
        /// The other node, in words.
        holder: String,
    },
    /// Changes since the asked revision are not available: list again.
    #[error("the store no longer has the history since revision {revision}")]
    HistoryLost {
        /// The revision asked for.
        revision: i64,
    },
    /// The store did not answer, or said that it cannot serve now. Worth another try.
    #[error("{operation}: the store is unavailable: {detail}")]
    Unavailable {
        /// What was being done.
        operation: &'static str,
        /// What the store or the transport said.
        detail: String,
    },
    /// The store answered that we may not.
    #[error("{operation}: the store refused: {detail}")]
    Refused {
        /// What was being done.
        operation: &'static str,
        /// What the store said, and what to do about it.
        detail: String,
    },
    /// The lease cannot be written as a value.
    #[error("the lease cannot be written")]
    Value(#[from] ValueError),
    /// A file of the local store could not be used.
    #[error("local store: cannot {action} {path}")]
    File {
        /// What was being done.
        action: &'static str,
        /// With which file.
        path: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

impl StoreError {
    /// Whether the store answered, only not as hoped.
    #[must_use]
    pub fn store_answered(&self) -> bool {
        match self {
            Self::NoConfig { .. }
            | Self::ConfigTooLarge { .. }
            | Self::Conflict { .. }
            | Self::Duplicate { .. }
            | Self::HistoryLost { .. }
            | Self::Value(_) => true,
            Self::Unavailable { .. } | Self::Refused { .. } | Self::File { .. } => false,
        }
    }

    /// Whether a write that failed with this certainly changed nothing. A write without an answer
    /// may have happened, or may still happen.
    #[must_use]
    pub fn nothing_was_written(&self) -> bool {
        match self {
            Self::Conflict { .. }
            | Self::Duplicate { .. }
            | Self::Refused { .. }
            | Self::Value(_) => true,
            Self::NoConfig { .. }
            | Self::ConfigTooLarge { .. }
            | Self::HistoryLost { .. }
            | Self::Unavailable { .. }
            | Self::File { .. } => false,
        }
    }
}

impl Snapshot {
    /// All subnets whose keys are in use, in no order: of leases, and of entries with an
    /// unreadable value, over which nobody can write.
    pub(crate) fn taken(&self) -> impl Iterator<Item = Prefix> + '_ {
        let unreadable = self.rejected.iter().filter_map(|rejected| parse_key(&rejected.key));
        self.leases.iter().map(|lease| lease.subnet).chain(unreadable)
    }

    pub(crate) fn add(&mut self, entry: Result<Lease, Rejected>) {
        match entry {
            Ok(lease) if self.leases.len() < ENTRIES_MAX => self.leases.push(lease),
            Ok(lease) => {
                self.complete = false;
                self.reject(Rejected::too_many(lease.revision));
            }
            Err(rejected) => self.reject(rejected),
        }
    }

    fn reject(&mut self, rejected: Rejected) {
        if self.rejected.len() < REJECTED_MAX {
            self.rejected.push(rejected);
        } else if parse_key(&rejected.key).is_some() {
            // It takes a subnet, perhaps the own; any other junk concerns nobody.
            self.complete = false;
        }
    }
}

impl Default for Snapshot {
    /// Of an empty store.
    fn default() -> Self {
        Self { leases: Vec::new(), rejected: Vec::new(), revision: 0, cluster: 0, complete: true }
    }
}

impl Rejected {
    /// A lease beyond `ENTRIES_MAX`.
    pub(crate) fn too_many(revision: i64) -> Self {
        Self {
            key: "more leases".to_owned(),
            reason: RejectReason::TooMany,
            detail: format!("the store holds more than {ENTRIES_MAX} leases"),
            revision,
        }
    }
}

impl Store {
    /// The same store for a node with a name, which claims the address that it writes.
    #[must_use]
    pub fn with_identity(self, node: NodeIdentity) -> Self {
        match self {
            Self::Etcd(store) => Self::Etcd(Box::new(store.with_identity(node))),
            Self::Local(store) => Self::Local(store.with_identity(node)),
            // Its Node is its identity.
            #[cfg(feature = "kube")]
            Self::Kube(store) => Self::Kube(store),
            #[cfg(test)]
            Self::Memory(store) => Self::Memory(store),
        }
    }

    /// The cluster behind the store, by its id, once it was heard of; 0 where there is none.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        match self {
            Self::Etcd(store) => store.cluster(),
            Self::Local(_) => 0,
            #[cfg(feature = "kube")]
            Self::Kube(_) => 0,
            #[cfg(test)]
            Self::Memory(_) => 0,
        }
    }

    /// Why the store takes no writes, if it says so without being written to.
    pub async fn alarm(&self) -> Result<Option<String>, StoreError> {
        let Self::Etcd(store) = self else { return Ok(None) };
        store.alarm().await
    }

    /// Claims `public_ip`, or keeps that claim from ending, unless another node has it. It lives
    /// for `ttl` after the last call, or as long as this process.
    pub async fn claim(&self, public_ip: Ipv4Addr, ttl: Duration) -> Result<(), StoreError> {
        match self {
            Self::Etcd(store) => store.claim(public_ip, ttl).await,
            Self::Local(store) => store.claim(public_ip).await,
            #[cfg(feature = "kube")]
            Self::Kube(_) => Ok(()),
            #[cfg(test)]
            Self::Memory(_) => Ok(()),
        }
    }

    /// Gives up the claim of this run.
    pub async fn release_claim(&self) {
        if let Self::Etcd(store) = self {
            store.release_claim().await;
        }
    }

    /// The network configuration as written by the operator.
    pub async fn config(&self) -> Result<Vec<u8>, StoreError> {
        match self {
            Self::Etcd(store) => store.config().await,
            Self::Local(store) => store.config().await,
            #[cfg(feature = "kube")]
            Self::Kube(store) => Ok(store.config()),
            #[cfg(test)]
            Self::Memory(store) => store.config().await,
        }
    }

    /// All leases.
    pub async fn list(&self) -> Result<Snapshot, StoreError> {
        match self {
            Self::Etcd(store) => store.list().await,
            Self::Local(store) => store.list().await,
            #[cfg(feature = "kube")]
            Self::Kube(store) => store.list().await,
            #[cfg(test)]
            Self::Memory(store) => store.list().await,
        }
    }

    /// Takes `subnet` for `ttl` if no entry has its key.
    pub async fn create(
        &self,
        subnet: Prefix,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> Result<Granted, StoreError> {
        match self {
            Self::Etcd(store) => store.create(subnet, value, ttl).await,
            Self::Local(store) => store.create(subnet, value, ttl).await,
            #[cfg(feature = "kube")]
            Self::Kube(_) => Err(not_ours("creating the lease")),
            #[cfg(test)]
            Self::Memory(store) => store.create(subnet, value, ttl).await,
        }
    }

    /// Takes the first of `subnets` whose key no entry has, trying them in turn, for a node that
    /// starts and claimed its PublicIP. Also says how many were lost to other writers; the last
    /// of these is the error if all were.
    pub async fn create_first(
        &self,
        subnets: impl Iterator<Item = Prefix>,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> (Result<Granted, StoreError>, u64) {
        if let Self::Etcd(store) = self {
            return store.create_first(subnets, value, ttl).await;
        }
        let mut lost = (Err(StoreError::Conflict { key: String::new() }), 0);
        for subnet in subnets {
            match self.create(subnet, value, ttl).await {
                Err(error @ StoreError::Conflict { .. }) => lost = (Err(error), lost.1 + 1),
                result => return (result, lost.1),
            }
        }
        lost
    }

    /// Writes `value` over `held` and extends it to `ttl` from now, if nobody wrote since. A
    /// reservation stays one.
    pub async fn update(
        &self,
        held: &Lease,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> Result<Granted, StoreError> {
        match self {
            Self::Etcd(store) => store.update(held, value, ttl).await,
            Self::Local(store) => store.update(held, value, ttl).await,
            #[cfg(feature = "kube")]
            Self::Kube(store) => store.update(held, value).await,
            #[cfg(test)]
            Self::Memory(store) => store.update(held, value, ttl).await,
        }
    }

    /// As `update`, for a node that starts and claimed its PublicIP.
    pub async fn take_over(
        &self,
        held: &Lease,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> Result<Granted, StoreError> {
        if let Self::Etcd(store) = self {
            return store.take_over(held, value, ttl).await;
        }
        self.update(held, value, ttl).await
    }

    /// Extends `held` to `ttl` from now, if nobody wrote since.
    pub async fn renew(&self, held: &Lease, ttl: Duration) -> Result<Granted, StoreError> {
        match self {
            Self::Etcd(store) => store.renew(held, ttl).await,
            Self::Local(store) => store.update(held, &held.attributes, ttl).await,
            #[cfg(feature = "kube")]
            Self::Kube(store) => store.update(held, &held.attributes).await,
            #[cfg(test)]
            Self::Memory(store) => store.update(held, &held.attributes, ttl).await,
        }
    }

    /// Removes `held`, if nobody wrote since.
    pub async fn delete(&self, held: &Lease) -> Result<(), StoreError> {
        match self {
            Self::Etcd(store) => store.delete(held).await,
            Self::Local(store) => store.delete(held).await,
            #[cfg(feature = "kube")]
            Self::Kube(_) => Err(not_ours("deleting the lease")),
            #[cfg(test)]
            Self::Memory(store) => store.delete(held).await,
        }
    }

    /// All changes after `revision`, which a snapshot or an earlier event named.
    pub async fn watch(&self, revision: i64) -> Result<Watch, StoreError> {
        match self {
            Self::Etcd(store) => Ok(Watch::Etcd(Box::new(store.watch(revision).await?))),
            Self::Local(store) => Ok(Watch::Local(Box::new(store.watch().await?))),
            #[cfg(feature = "kube")]
            Self::Kube(store) => Ok(Watch::Kube(Box::new(store.watch(revision).await?))),
            #[cfg(test)]
            Self::Memory(store) => Ok(Watch::Memory(store.watch(revision)?)),
        }
    }
}

impl Watch {
    /// The next changes, at least one. Dropping the future loses none.
    pub async fn next(&mut self) -> Result<Vec<Event>, StoreError> {
        match self {
            Self::Etcd(watch) => watch.next().await,
            Self::Local(watch) => watch.next().await,
            #[cfg(feature = "kube")]
            Self::Kube(watch) => watch.next().await,
            #[cfg(test)]
            Self::Memory(watch) => watch.next().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control::lease::{Lifetime, Version};

    #[test]
    fn only_a_definite_no_means_that_nothing_was_written() {
        let (operation, detail) = ("creating the lease", String::new());
        let lost = StoreError::Unavailable { operation, detail: detail.clone() };
        assert!(!lost.nothing_was_written(), "a write of unknown outcome may have happened");
        assert!(StoreError::Refused { operation, detail }.nothing_was_written());
        assert!(StoreError::Conflict { key: "10.5.1.0-24".to_owned() }.nothing_was_written());
    }

    #[test]
    fn a_flood_of_leases_is_cut_and_reported() {
        let mut snapshot = Snapshot::default();
        let value = LeaseAttributes::udp(Ipv4Addr::LOCALHOST).to_json().unwrap();
        let version = Version { revision: 1, created: 1 };
        for i in 0..ENTRIES_MAX as u32 + 3 {
            let subnet = Prefix::new(Ipv4Addr::from_bits(0x0A00_0000 + (i << 4)), 28).unwrap();
            let lifetime = Lifetime::Reservation;
            snapshot.add(Lease::decode(subnet.key().as_bytes(), &value, version, lifetime));
        }
        assert_eq!(snapshot.leases.len(), ENTRIES_MAX);
        assert!(!snapshot.complete, "a cut listing counts as all there is");
        assert_eq!(snapshot.rejected.len(), 3);
        assert!(snapshot.rejected.iter().all(|r| r.reason == RejectReason::TooMany));
        for _ in 0..2 * REJECTED_MAX {
            snapshot.add(Lease::decode(b"junk", &value, version, Lifetime::Reservation));
        }
        assert_eq!(snapshot.rejected.len(), REJECTED_MAX);
    }

    #[test]
    fn what_a_flood_of_junk_hides_is_not_counted_as_absent() {
        let mut snapshot = Snapshot::default();
        let version = Version { revision: 1, created: 1 };
        let mut add = |key: &[u8]| {
            snapshot.add(Lease::decode(key, b"junk", version, Lifetime::Reservation));
            snapshot.complete
        };
        for _ in 0..2 * REJECTED_MAX {
            assert!(add(b"junk"), "junk without a subnet concerns nobody");
        }
        assert!(!add(b"10.5.1.0-24"), "an entry that takes a subnet was dropped");
    }
}
