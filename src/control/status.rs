//! The status of the control plane, for the rest of the daemon. Any thread may read it at any time.

use std::collections::{BTreeMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use tracing::{info, warn};

use crate::control::clock::unix_seconds;
use crate::control::rejected::{RejectReason, Rejected};
use crate::control::snapshot::ENTRIES_MAX;
use crate::failure::lock;
use crate::status::{Cache, Hindrance, Store};

/// Distinct rejected entries that are remembered, to count and log each once: as many as a store
/// may hold leases, 8 bytes each.
const REMEMBERED_MAX: usize = ENTRIES_MAX;
/// Rejected entries logged per look at the store; the rest of a flood becomes one line.
const LOGGED_PER_LOOK_MAX: usize = 5;

/// The state of the control plane, shared by `Arc`.
#[derive(Debug, Default)]
pub struct ControlStatus {
    state: Mutex<ControlState>,
    /// The rejected entries that were counted, as hashes.
    remembered: Mutex<HashSet<u64>>,
    hasher: RandomState,
}

/// Meets a hindrance, in place of the `last`, if there was one.
fn meet(last: &mut Option<Hindrance>, text: String) {
    let (since_unix, tries) =
        last.take().map_or_else(|| (unix_seconds(), 0), |last| (last.since_unix, last.tries));
    *last = Some(Hindrance { text, since_unix, tries: tries + 1 });
}

/// Nodes' names by their PublicIPs.
pub type Names = BTreeMap<IpAddr, String>;

/// The state of the control plane at one moment.
#[derive(Debug, Clone, Default)]
pub struct ControlState {
    /// The store and what this node has in it, but for what it refuses.
    pub store: Store,
    /// Writing of the cache.
    pub cache: Cache,
    /// What a start is at.
    pub start_step: Option<&'static str>,
    /// Why it does not get on with that.
    pub start_hindrance: Option<Hindrance>,
    /// Peers in the published set.
    pub peers: usize,
    /// Those of them in their grace period: their leases vanished, with most others at once.
    pub held_peers: usize,
    /// While lease and peers are from the cache, and the store has not confirmed them: what time
    /// they are of, in seconds since 1970.
    pub cached_as_of_unix: Option<u64>,
    /// Whether the store has another network configuration than the one in use: a
    /// restart is needed to apply it.
    pub restart_needed: bool,
    /// Complete listings of the store.
    pub relists: u64,
    /// Writes that lost against another writer.
    pub conflicts: u64,
    /// The names of the nodes that claim an address, where the store has claims.
    pub names: Arc<Names>,
    /// What of the store's entries is not used, by their keys, and why.
    pub unused: Arc<BTreeMap<String, String>>,
    /// What the store last refused to read, and has not shown since.
    pub(super) refused_read: Option<String>,
    /// What the store last refused to write, and has not written since.
    pub(super) refused_write: Option<String>,
    alarm: Option<String>,
    /// Why the store's network configuration can't be read, though it was at the start.
    pub(super) config_missing: Option<String>,
    /// Why the store takes no claim of this node, if it doesn't.
    pub(super) claim_refusal: Option<String>,
}

impl ControlState {
    /// The store did not do what it was asked.
    pub(super) fn store_failed(&mut self, text: String) {
        meet(&mut self.store.hindrance, text);
        self.store.failures += 1;
    }

    /// What the store refuses or lacks, and what to do about it, until it does it again.
    pub fn refused(&self) -> Option<String> {
        let refused = self.refused_read.as_ref().or(self.refused_write.as_ref());
        refused.or(self.alarm.as_ref()).or(self.config_missing.as_ref()).cloned()
    }
}

fn count(counts: &mut BTreeMap<String, u64>, reason: RejectReason) {
    *counts.entry(reason.name().to_owned()).or_default() += 1;
}

impl ControlStatus {
    /// The state now.
    pub fn read(&self) -> ControlState {
        self.edit().clone()
    }

    /// The state, to be changed.
    pub(crate) fn edit(&self) -> MutexGuard<'_, ControlState> {
        lock(&self.state)
    }

    /// A start is at its next step; at none once it is over.
    pub(crate) fn start_is_at(&self, step: Option<&'static str>) {
        let mut state = self.edit();
        (state.start_step, state.start_hindrance) = (step, None);
    }

    /// The step that a start is at has failed, and is tried again.
    pub(crate) fn start_is_hindered(&self, text: &str) {
        meet(&mut self.edit().start_hindrance, text.to_owned());
    }

    /// The store's alarm, because of which it takes no writes; `None` if it takes them.
    pub(crate) fn alarmed(&self, why: Option<String>) {
        let mut state = self.edit();
        if let Some(why) = why.as_ref().filter(|_| state.alarm != why) {
            warn!("{why}. Leases cannot be renewed, and new nodes get no subnet");
        } else if state.alarm.is_some() && why.is_none() {
            info!("etcd takes writes again");
        }
        state.alarm = why;
    }

    /// Another node has the PublicIP, or none any more. Returns whether that is news.
    pub(crate) fn set_duplicate(&self, holder: Option<&str>) -> bool {
        let mut state = self.edit();
        let is_news = state.store.duplicate_public_ip.as_deref() != holder;
        state.store.duplicate_public_ip = holder.map(str::to_owned);
        is_news
    }

    /// The entries of the store that are not used from now on.
    pub(super) fn set_unused(&self, entries: &[Rejected]) {
        self.reject(entries);
        let mut state = self.edit();
        let unused = entries.iter().map(|entry| (entry.key.clone(), entry.detail.clone()));
        state.unused = Arc::new(unused.collect());
        let store = &mut state.store;
        let example = entries.first().map(|entry| format!("{:?}: {}", entry.key, entry.detail));
        store.unused_example = example;
        store.unused.clear();
        entries.iter().for_each(|entry| count(&mut store.unused, entry.reason));
    }

    /// Counts each entry on first sight and logs the first few of them.
    pub(crate) fn reject(&self, rejected: &[Rejected]) {
        let mut remembered = lock(&self.remembered);
        let mut fresh = 0;
        for entry in rejected {
            let hash = self.hasher.hash_one((&entry.key, entry.reason));
            if remembered.len() >= REMEMBERED_MAX || !remembered.insert(hash) {
                continue;
            }
            count(&mut self.edit().store.rejected, entry.reason);
            fresh += 1;
            if fresh <= LOGGED_PER_LOOK_MAX {
                let (key, why) = (&entry.key, &entry.detail);
                warn!("Ignoring {key:?} in the store, or a part of it: {why}");
            }
        }
        if fresh > LOGGED_PER_LOOK_MAX {
            warn!("Ignoring {} more unusable entries in the store", fresh - LOGGED_PER_LOOK_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(key: &str, reason: RejectReason) -> Rejected {
        Rejected { key: key.to_owned(), reason, detail: String::new(), revision: 1 }
    }

    fn rejections(status: &ControlStatus, reason: RejectReason) -> u64 {
        status.read().store.rejected.get(reason.name()).copied().unwrap_or(0)
    }

    #[test]
    fn rejected_entry_counts_once_per_reason() {
        let status = ControlStatus::default();
        for _ in 0..3 {
            status.reject(&[
                rejected("hello", RejectReason::BadKey),
                rejected("10.5.1.0-24", RejectReason::BadValue),
                rejected("10.5.1.0-24", RejectReason::TooLarge),
            ]);
        }
        assert_eq!(rejections(&status, RejectReason::BadKey), 1);
        assert_eq!(rejections(&status, RejectReason::BadValue), 1);
        assert_eq!(rejections(&status, RejectReason::TooLarge), 1);
        assert_eq!(rejections(&status, RejectReason::OwnAddress), 0);
    }

    #[test]
    fn what_is_not_used_is_known_by_its_key() {
        let status = ControlStatus::default();
        let entry = Rejected { detail: "why".to_owned(), ..rejected("a", RejectReason::BadKey) };
        status.set_unused(&[entry]);
        assert_eq!(status.read().unused["a"], "why");
        status.set_unused(&[]);
        assert!(status.read().unused.is_empty(), "the operator has mended it");
    }

    #[test]
    fn refusal_shows_until_cleared() {
        let status = ControlStatus::default();
        status.edit().refused_write = Some("full".to_owned());
        assert_eq!(status.read().refused().as_deref(), Some("full"));
        status.edit().refused_write = None;
        assert_eq!(status.read().refused(), None);
        status.alarmed(Some("no space".to_owned()));
        assert_eq!(status.read().refused().as_deref(), Some("no space"));
        status.alarmed(None);
        assert_eq!(status.read().refused(), None);
    }

    #[test]
    fn every_reason_has_its_own_counter_and_name() {
        let names: HashSet<_> = RejectReason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), RejectReason::ALL.len());
        for (position, reason) in RejectReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, position);
        }
    }
}
