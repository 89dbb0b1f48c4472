//! A store in memory with etcd's rules (revisions, history, compaction) and switches for its
//! faults, so that the logic above can be tested without a cluster.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;

use crate::control::clock;
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::{NodeIdentity, Phase};
use crate::control::lease::{Lease, Lifetime};
use crate::control::rejected::Rejected;
use crate::control::snapshot::{Change, Granted, Snapshot, Vacancy};

/// The store; clones share it.
#[derive(Debug, Clone)]
pub struct MemoryStore {
    pub(super) claims: NoClaims,
    inner: Arc<Mutex<Inner>>,
    changed: watch::Sender<i64>,
}

/// Every address is every node's.
#[derive(Debug, Clone, Default)]
pub(super) struct NoClaims {
    pub(super) node: Option<NodeIdentity>,
}

#[derive(Debug, Default)]
struct Inner {
    config: Vec<u8>,
    entries: BTreeMap<String, Entry>,
    history: VecDeque<(i64, Change)>,
    revision: i64,
    compacted: i64,
    down: bool,
    /// Whether listings end before the last entry.
    cut_short: bool,
    /// Writes whose answer is lost: they happen, and the caller hears of a failure.
    unanswered: u32,
    calls: u64,
    /// Watches opened before this number are cut.
    cut: u64,
    watches: u64,
}

#[derive(Debug, Clone)]
struct Entry {
    value: Vec<u8>,
    revision: i64,
    created: i64,
    lifetime: Lifetime,
}

/// Changes of a `MemoryStore`.
#[derive(Debug)]
pub struct MemoryWatch {
    store: MemoryStore,
    after: i64,
    live: bool,
    number: u64,
    changes: watch::Receiver<i64>,
}

#[allow(clippy::unused_async, reason = "the interface of the stores that do wait")]
impl NoClaims {
    pub(super) async fn claim(&self, _address: IpAddr, _ttl: Duration) -> StoreResult<()> {
        Ok(())
    }

    pub(super) async fn holder(&self, _address: IpAddr) -> StoreResult<Option<String>> {
        Ok(None)
    }

    pub(super) async fn is_ours(&self, _address: IpAddr) -> StoreResult<bool> {
        Ok(false)
    }

    pub(super) async fn release(&self, _is_up: bool) {}
}

impl MemoryStore {
    pub(crate) fn new() -> Self {
        Self { claims: NoClaims::default(), inner: Arc::default(), changed: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    fn call(&self, operation: &'static str) -> StoreResult<MutexGuard<'_, Inner>> {
        let mut inner = self.lock();
        inner.calls += 1;
        if inner.down {
            return Err(StoreError::Unavailable { operation, detail: "switched off".to_owned() });
        }
        Ok(inner)
    }

    pub(crate) fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Unreachable or back; watches break when it goes.
    pub(crate) fn set_down(&self, down: bool) {
        let mut inner = self.lock();
        inner.down = down;
        inner.cut = inner.watches;
        drop(inner);
        self.changed.send_modify(|_| ());
    }

    /// The next `writes` happen, but look like failures to their callers.
    pub(crate) fn lose_answers(&self, writes: u32) {
        self.lock().unanswered = writes;
    }

    /// Listings lack their last entry from now on, and say so.
    pub(crate) fn cut_listings_short(&self) {
        self.lock().cut_short = true;
    }

    pub(crate) fn compact(&self) {
        let mut inner = self.lock();
        inner.compacted = inner.revision;
        inner.history.clear();
    }

    /// An operator's put.
    pub(crate) fn put(&self, key: &str, value: &[u8], lifetime: Lifetime) {
        self.lock().write(key, value.to_vec(), lifetime);
        self.changed.send_modify(|_| ());
    }

    /// An operator's removal, or the end of a lease.
    pub(crate) fn remove(&self, key: &str) {
        self.lock().remove(key);
        self.changed.send_modify(|_| ());
    }

    pub(crate) fn get(&self, key: &str) -> Option<(String, Lifetime)> {
        let inner = self.lock();
        let entry = inner.entries.get(key)?;
        Some((String::from_utf8(entry.value.clone()).unwrap(), entry.lifetime))
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.lock().entries.keys().cloned().collect()
    }

    #[allow(clippy::unused_async, reason = "the interface of the stores that do wait")]
    pub(crate) async fn config(&self) -> StoreResult<Vec<u8>> {
        let config = self.call("config")?.config.clone();
        if config.is_empty() {
            return Err(StoreError::NoConfig("memory".to_owned()));
        }
        Ok(config)
    }

    pub(crate) async fn list(&self) -> StoreResult<Snapshot> {
        let snapshot = {
            let inner = self.call("list")?;
            let mut snapshot = Snapshot { revision: inner.revision, ..Snapshot::default() };
            for (key, entry) in &inner.entries {
                snapshot.add(entry.decode(key));
            }
            if inner.cut_short {
                snapshot.leases.pop();
                snapshot.is_cut = true;
            }
            snapshot
        };
        // Others get their turn between a read and the write that follows it, as over a network.
        tokio::task::yield_now().await;
        Ok(snapshot)
    }

    pub(crate) async fn write(
        &self,
        lease: &Lease,
        ttl: Duration,
        _phase: Phase,
    ) -> StoreResult<Granted> {
        let mut inner = self.compare_and_swap("write", lease)?;
        let lifetime = match lease.lifetime.id() {
            Some(0) => Lifetime::etcd(inner.revision + 1),
            _ => lease.lifetime,
        };
        inner.write(&lease.key, lease.attributes.to_json()?, lifetime);
        self.granted(inner, &lease.key, ttl)
    }

    pub(crate) async fn create(
        &self,
        lease: &Lease,
        vacancy: &Vacancy,
        ttl: Duration,
        phase: Phase,
    ) -> StoreResult<Granted> {
        let (lease, Vacancy { last_written, replaces }) = (vacancy.entry(lease), vacancy);
        let listed = last_written.as_ref().map_or(0, |last| last.revision);
        if vacancy.compares_all(&lease)
            && self.call("create")?.entries.values().any(|entry| entry.revision > listed)
        {
            return Err(StoreError::Conflict(lease.key));
        }
        if let Some(before) = replaces {
            drop(self.compare_and_swap("create", before)?);
        }
        let granted = self.write(&lease, ttl, phase).await;
        if let Some(before) = replaces.as_ref().filter(|_| granted.is_ok()) {
            self.remove(&before.key);
        }
        granted
    }

    pub(crate) async fn delete(&self, held: &Lease) -> StoreResult<()> {
        self.compare_and_swap("delete", held)?.remove(&held.key);
        self.changed.send_modify(|_| ());
        Ok(())
    }

    fn compare_and_swap(
        &self,
        operation: &'static str,
        held: &Lease,
    ) -> StoreResult<MutexGuard<'_, Inner>> {
        let inner = self.call(operation)?;
        match inner.entries.get(&held.key).map_or(0, |entry| entry.revision) {
            revision if revision == held.revision => Ok(inner),
            _ => Err(StoreError::Conflict(held.key.clone())),
        }
    }

    fn granted(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        key: &str,
        ttl: Duration,
    ) -> StoreResult<Granted> {
        let lease = inner.entries[key].decode(key).unwrap();
        let answered = inner.unanswered == 0;
        inner.unanswered = inner.unanswered.saturating_sub(1);
        drop(inner);
        self.changed.send_modify(|_| ());
        if !answered {
            let detail = "the answer was lost".to_owned();
            return Err(StoreError::Unavailable { operation: "write", detail });
        }
        let expires = match lease.lifetime {
            Lifetime::Reservation => None,
            Lifetime::Leased { .. } => Some(clock::boot_time() + ttl),
        };
        Ok(Granted { lease, expires })
    }

    pub(crate) fn watch(&self, revision: i64) -> StoreResult<MemoryWatch> {
        let mut inner = self.call("watch")?;
        if revision < inner.compacted || revision > inner.revision {
            return Err(StoreError::HistoryLost);
        }
        inner.watches += 1;
        let (after, number) = (revision, inner.watches);
        let changes = self.changed.subscribe();
        Ok(MemoryWatch { store: self.clone(), after, live: false, number, changes })
    }
}

impl Entry {
    fn decode(&self, key: &str) -> Result<Lease, Rejected> {
        let (created_revision, lifetime) = (self.created, self.lifetime);
        let lease = Lease::decode(key.as_bytes(), &self.value, self.revision)?;
        Ok(Lease { created_revision, lifetime, ..lease })
    }
}

impl Inner {
    fn write(&mut self, key: &str, value: Vec<u8>, lifetime: Lifetime) {
        self.revision += 1;
        let revision = self.revision;
        let created = self.entries.get(key).map_or(revision, |entry| entry.created);
        let entry = Entry { value, revision, created, lifetime };
        let event = match entry.decode(key) {
            Ok(lease) => Change::Put(lease),
            Err(rejected) => Change::Rejected(rejected),
        };
        self.entries.insert(key.to_owned(), entry);
        self.history.push_back((revision, event));
    }

    fn remove(&mut self, key: &str) {
        if self.entries.remove(key).is_some() {
            self.revision += 1;
            let (key, revision) = (key.to_owned(), self.revision);
            self.history.push_back((revision, Change::Deleted { key, revision }));
        }
    }
}

impl MemoryWatch {
    pub(crate) async fn next(&mut self) -> StoreResult<Vec<Change>> {
        loop {
            self.changes.borrow_and_update();
            let mut events = Vec::new();
            {
                let inner = self.store.lock();
                if self.number <= inner.cut {
                    let detail = "the watch was cut".to_owned();
                    return Err(StoreError::Unavailable { operation: "watch", detail });
                }
                if self.after < inner.compacted {
                    return Err(StoreError::HistoryLost);
                }
                if !self.live {
                    self.live = true;
                    events.push(Change::Live { revision: inner.revision });
                }
                let after = self.after;
                let new = inner.history.iter().filter(|(revision, _)| *revision > after);
                events.extend(new.map(|(_, event)| event.clone()));
                self.after = inner.revision;
            }
            if !events.is_empty() {
                return Ok(events);
            }
            self.changes.changed().await.unwrap();
        }
    }
}
