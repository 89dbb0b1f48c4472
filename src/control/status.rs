//! What the control plane tells the rest of the daemon about itself: atomics that any thread may
//! read at any time. It decides nothing.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing::{info, warn};

use crate::control::rejected::{RejectReason, Rejected};
use crate::control::snapshot::ENTRIES_MAX;
use crate::route::Prefix;

/// Distinct rejected entries that are remembered, to count and log each once: as many as a store
/// may hold leases, 8 bytes each.
const REMEMBERED_MAX: usize = ENTRIES_MAX;
/// Rejected entries logged per look at the store; the rest of a flood becomes one line.
const LOGGED_PER_LOOK_MAX: usize = 5;

/// Marks of a subnet that was assigned in place of ours: above its address and length.
#[cfg(any(test, feature = "kube"))]
const REASSIGNED: u64 = 1 << 63;
const REASSIGNED_KNOWN: u64 = 1 << 62;

/// The state of the control plane, shared by `Arc`.
#[derive(Debug, Default)]
pub struct ControlStatus {
    store_up: AtomicBool,
    lease_expires_unix: AtomicU64,
    peers: AtomicU64,
    held_peers: AtomicU64,
    /// 0 unless lease and peers are from the cache.
    cached_as_of_unix: AtomicU64,
    /// Network and length of a subnet that the cluster assigned in place of ours; 0 if none did.
    reassigned: AtomicU64,
    config_differs: AtomicBool,
    cache_writes: AtomicU64,
    cache_failures: AtomicU64,
    relists: AtomicU64,
    renewals: AtomicU64,
    store_failures: AtomicU64,
    conflicts: AtomicU64,
    written_by_others: AtomicU64,
    duplicate: Mutex<Option<String>>,
    subnets_exhausted: AtomicU64,
    rejected: [AtomicU64; RejectReason::ALL.len()],
    refusals: Mutex<Refusals>,
    remembered: Mutex<Remembered>,
}

/// What the store last refused, and has not done since.
#[derive(Debug, Default)]
struct Refusals {
    reads: Option<String>,
    writes: Option<String>,
    alarm: Option<String>,
}

#[derive(Debug, Default)]
struct Remembered {
    hasher: RandomState,
    entries: HashSet<u64>,
}

impl ControlStatus {
    /// Whether the last exchange with the store succeeded.
    #[must_use]
    pub fn store_is_up(&self) -> bool {
        self.store_up.load(Ordering::Relaxed)
    }

    /// When the own lease ends, in seconds since 1970; `None` for a reservation or without lease.
    #[must_use]
    pub fn lease_expires_unix(&self) -> Option<u64> {
        Some(self.lease_expires_unix.load(Ordering::Relaxed)).filter(|&seconds| seconds != 0)
    }

    /// Peers in the published set.
    #[must_use]
    pub fn peers(&self) -> u64 {
        self.peers.load(Ordering::Relaxed)
    }

    /// Those of them that are held although their leases vanished, with most others at once.
    #[must_use]
    pub fn held_peers(&self) -> u64 {
        self.held_peers.load(Ordering::Relaxed)
    }

    /// While lease and peers are from the cache, and the store has not confirmed them: what time
    /// they are of, in seconds since 1970.
    #[must_use]
    pub fn cached_as_of_unix(&self) -> Option<u64> {
        Some(self.cached_as_of_unix.load(Ordering::Relaxed)).filter(|&seconds| seconds != 0)
    }

    /// Whether the cluster assigned another subnet to this node than the one it goes on with, or
    /// one that cannot be used.
    #[must_use]
    pub fn subnet_is_refused(&self) -> bool {
        self.reassigned.load(Ordering::Relaxed) != 0
    }

    /// That other subnet, if it is one.
    #[must_use]
    pub fn refused_subnet(&self) -> Option<Prefix> {
        let packed = self.reassigned.load(Ordering::Relaxed);
        let address = u32::try_from(packed >> 8 & u64::from(u32::MAX)).ok()?;
        let length_bits = u8::try_from(packed & 0xff).ok()?;
        let is_subnet = packed & REASSIGNED_KNOWN != 0;
        is_subnet.then(|| Prefix::new(Ipv4Addr::from_bits(address), length_bits))?
    }

    /// Whether the store has another network configuration than the one this node goes by: a
    /// restart is needed to apply it.
    #[must_use]
    pub fn restart_needed(&self) -> bool {
        self.config_differs.load(Ordering::Relaxed)
    }

    /// Times that the cache was written.
    #[must_use]
    pub fn cache_writes(&self) -> u64 {
        self.cache_writes.load(Ordering::Relaxed)
    }

    /// Times that writing the cache failed.
    #[must_use]
    pub fn cache_failures(&self) -> u64 {
        self.cache_failures.load(Ordering::Relaxed)
    }

    /// Complete listings of the store.
    #[must_use]
    pub fn relists(&self) -> u64 {
        self.relists.load(Ordering::Relaxed)
    }

    /// Successful renewals of the own lease.
    #[must_use]
    pub fn renewals(&self) -> u64 {
        self.renewals.load(Ordering::Relaxed)
    }

    /// Failed exchanges with the store.
    #[must_use]
    pub fn store_failures(&self) -> u64 {
        self.store_failures.load(Ordering::Relaxed)
    }

    /// What the store refuses, and what to do about it, until it does it again.
    #[must_use]
    pub fn refused(&self) -> Option<String> {
        let Refusals { reads, writes, alarm } = &*self.refusals();
        reads.clone().or_else(|| writes.clone()).or_else(|| alarm.clone())
    }

    /// Writes that lost against another writer.
    #[must_use]
    pub fn conflicts(&self) -> u64 {
        self.conflicts.load(Ordering::Relaxed)
    }

    /// Times that somebody else wrote the own lease with our PublicIP.
    #[must_use]
    pub fn written_by_others_total(&self) -> u64 {
        self.written_by_others.load(Ordering::Relaxed)
    }

    /// The other node that has the PublicIP, while there is one.
    #[must_use]
    pub fn duplicate_public_ip(&self) -> Option<String> {
        self.duplicate.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tries to get a subnet that found none free.
    #[must_use]
    pub fn subnets_exhausted(&self) -> u64 {
        self.subnets_exhausted.load(Ordering::Relaxed)
    }

    /// Distinct entries that were rejected for `reason`.
    #[must_use]
    pub fn rejected(&self, reason: RejectReason) -> u64 {
        self.rejected[reason.index()].load(Ordering::Relaxed)
    }

    pub(crate) fn store_answered(&self) {
        self.store_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn store_failed(&self) {
        self.store_up.store(false, Ordering::Relaxed);
        self.store_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// The answer to a read: what the store refused, or that it did it.
    pub(crate) fn read_refused(&self, why: Option<String>) {
        self.refusals().reads = why;
    }

    /// The same of a write.
    pub(crate) fn write_refused(&self, why: Option<String>) {
        self.refusals().writes = why;
    }

    /// Why the store says that it takes no writes; `None` if it takes them.
    pub(crate) fn alarmed(&self, why: Option<String>) {
        let mut refusals = self.refusals();
        if let Some(why) = why.as_ref().filter(|_| refusals.alarm != why) {
            warn!("{why}. Leases cannot be renewed, and new nodes get no subnet");
        } else if refusals.alarm.is_some() && why.is_none() {
            info!("etcd takes writes again");
        }
        refusals.alarm = why;
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lease_expires(&self, unix_seconds: Option<u64>) {
        self.lease_expires_unix.store(unix_seconds.unwrap_or(0), Ordering::Relaxed);
    }

    pub(crate) fn published(&self, peers: usize, held: usize) {
        self.peers.store(peers as u64, Ordering::Relaxed);
        self.held_peers.store(held as u64, Ordering::Relaxed);
    }

    pub(crate) fn started_from_cache(&self, as_of_unix: u64) {
        self.cached_as_of_unix.store(as_of_unix.max(1), Ordering::Relaxed);
    }

    pub(crate) fn confirmed(&self) {
        self.cached_as_of_unix.store(0, Ordering::Relaxed);
    }

    /// The cluster assigned another subnet in place of ours, which is refused; or no more.
    #[cfg(any(test, feature = "kube"))]
    pub(crate) fn subnet_reassigned(&self, is_refused: bool, other: Option<Prefix>) {
        let packed = match (is_refused, other) {
            (false, _) => 0,
            (true, None) => REASSIGNED,
            (true, Some(subnet)) => {
                let address = u64::from(subnet.network().to_bits()) << 8;
                REASSIGNED | REASSIGNED_KNOWN | address | u64::from(subnet.length_bits())
            }
        };
        self.reassigned.store(packed, Ordering::Relaxed);
    }

    pub(crate) fn config_differs(&self, differs: bool) {
        self.config_differs.store(differs, Ordering::Relaxed);
    }

    pub(crate) fn cache_written(&self, succeeded: bool) {
        let counter = if succeeded { &self.cache_writes } else { &self.cache_failures };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn listed(&self) {
        self.relists.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn renewed(&self) {
        self.renewals.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn conflicted(&self) {
        self.conflicts.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it was another node before, or none.
    pub(crate) fn tell_duplicate(&self, holder: Option<&str>) -> bool {
        let mut told = self.duplicate.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = told.as_deref() != holder;
        *told = holder.map(str::to_owned);
        is_news
    }

    pub(crate) fn written_by_others(&self) {
        self.written_by_others.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn exhausted(&self) {
        self.subnets_exhausted.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts each entry on first sight and logs the first few of them.
    pub(crate) fn reject(&self, rejected: &[Rejected]) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fresh = 0;
        for entry in rejected {
            if !remembered.is_new(entry) {
                continue;
            }
            self.rejected[entry.reason.index()].fetch_add(1, Ordering::Relaxed);
            fresh += 1;
            if fresh <= LOGGED_PER_LOOK_MAX {
                let (key, why) = (&entry.key, &entry.detail);
                warn!("Ignoring {key:?} in the store, which is not usable as a lease: {why}");
            }
        }
        if fresh > LOGGED_PER_LOOK_MAX {
            warn!("Ignoring {} more unusable entries in the store", fresh - LOGGED_PER_LOOK_MAX);
        }
    }
}

impl Remembered {
    fn is_new(&mut self, entry: &Rejected) -> bool {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(entry.key.as_bytes());
        hasher.write_usize(entry.reason.index());
        let hash = hasher.finish();
        self.entries.len() < REMEMBERED_MAX && self.entries.insert(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(key: &str, reason: RejectReason) -> Rejected {
        Rejected { key: key.to_owned(), reason, detail: String::new(), revision: 1 }
    }

    #[test]
    fn an_entry_counts_once_per_reason_however_often_it_is_seen() {
        let status = ControlStatus::default();
        for _ in 0..3 {
            status.reject(&[
                rejected("hello", RejectReason::BadKey),
                rejected("10.5.1.0-24", RejectReason::BadValue),
                rejected("10.5.1.0-24", RejectReason::TooLarge),
            ]);
        }
        assert_eq!(status.rejected(RejectReason::BadKey), 1);
        assert_eq!(status.rejected(RejectReason::BadValue), 1);
        assert_eq!(status.rejected(RejectReason::TooLarge), 1);
        assert_eq!(status.rejected(RejectReason::OwnAddress), 0);
    }

    #[test]
    fn a_refused_subnet_is_told_until_it_is_over() {
        let status = ControlStatus::default();
        assert!(!status.subnet_is_refused());
        for text in ["10.244.7.0/24", "0.0.0.0/0", "255.255.255.255/32"] {
            let subnet = text.parse().ok();
            status.subnet_reassigned(true, subnet);
            assert!(status.subnet_is_refused());
            assert_eq!(status.refused_subnet(), subnet);
        }
        status.subnet_reassigned(true, None);
        assert_eq!((status.subnet_is_refused(), status.refused_subnet()), (true, None));
        status.subnet_reassigned(false, None);
        assert_eq!((status.subnet_is_refused(), status.refused_subnet()), (false, None));
    }

    #[test]
    fn a_refusal_is_told_until_the_same_is_done_again() {
        let status = ControlStatus::default();
        status.write_refused(Some("full".to_owned()));
        status.read_refused(None);
        assert_eq!(status.refused().as_deref(), Some("full"), "a read is no write");
        status.write_refused(None);
        assert_eq!(status.refused(), None);
        status.alarmed(Some("no space".to_owned()));
        assert_eq!(status.refused().as_deref(), Some("no space"));
        status.alarmed(None);
        assert_eq!(status.refused(), None);
    }

    #[test]
    fn every_reason_has_its_own_counter_and_name() {
        let names: HashSet<_> = RejectReason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), RejectReason::ALL.len());
        for (position, reason) in RejectReason::ALL.iter().enumerate() {
            assert_eq!(reason.index(), position);
        }
    }
}
