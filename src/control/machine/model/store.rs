//! A simulated store with etcd's rules: one revision per transaction, compares on revisions,
//! leases that end by the store's time, a history that can be compacted, clusters that can be
//! replaced. It remembers every state it ever had, for the invariants.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use super::TTL;
use crate::control::error::StoreError;
use crate::control::identity::NodeIdentity;
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::control::rejected::{RejectReason, Rejected};
use crate::control::snapshot::{Change, Granted, Snapshot};
use crate::route::Prefixes;

/// A point in the life of the store: which past, which revision.
pub(super) type Point = (u64, i64);

#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// `None` is junk.
    pub(super) value: Option<LeaseAttributes>,
    revision: i64,
    created: i64,
    /// 0 for a reservation.
    lease: i64,
}

/// A node's claim on a PublicIP.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) value: Vec<u8>,
    pub(super) revision: i64,
    pub(super) lease: i64,
}

#[derive(Debug, Default)]
pub(super) struct SimStore {
    /// Goes up with each loss of data.
    pub(super) past: u64,
    /// The id that the nodes see, which may stay.
    cluster: u64,
    pub(super) revision: i64,
    pub(super) compacted: i64,
    pub(super) is_down: bool,
    pub(super) entries: BTreeMap<Prefixes, Entry>,
    pub(super) claims: BTreeMap<Ipv4Addr, Claim>,
    /// Until when an address is some node's, by an observer.
    pub(super) claimed: BTreeMap<Ipv4Addr, (NodeIdentity, Duration)>,
    /// Changes of this cluster, in order.
    pub(super) history: Vec<(i64, Change)>,
    /// When each etcd lease ends.
    ends: BTreeMap<i64, Duration>,
    leases: i64,
    /// The readable leases after every revision.
    states: BTreeMap<Point, Vec<Lease>>,
    /// When each key was last changed.
    pub(super) changed: BTreeMap<Prefixes, Point>,
    /// Who was ever in an entry.
    pub(super) ever: BTreeSet<(Prefixes, Ipv4Addr)>,
    /// Keys whose owners cannot rely on the lease alone, because an operator was at them.
    pub(super) meddled: BTreeSet<Prefixes>,
    pub(super) deleted: BTreeSet<Prefixes>,
}

/// What a write would put.
pub(super) struct Request<'a> {
    pub(super) held: &'a Lease,
    pub(super) time: Duration,
    /// The asking node's boot clock when it asked.
    pub(super) asked: Duration,
}

pub(super) fn unavailable() -> StoreError {
    StoreError::Unavailable { operation: "model", detail: String::new() }
}

impl SimStore {
    pub(super) fn new() -> Self {
        let mut store = Self { past: 1, cluster: 1, revision: 1, ..Self::default() };
        store.remember();
        store
    }

    pub(super) fn point(&self) -> Point {
        (self.past, self.revision)
    }

    pub(super) fn state_at(&self, point: Point) -> &[Lease] {
        self.states.range(..=point).next_back().map_or(&[], |(_, state)| state)
    }

    fn decode(subnet: Prefixes, entry: &Entry) -> Result<Lease, Rejected> {
        let (key, revision) = (subnet.key(), entry.revision);
        match &entry.value {
            None => Err(Rejected {
                key,
                reason: RejectReason::BadValue,
                detail: String::new(),
                revision,
            }),
            Some(attributes) => Ok(Lease {
                subnets: subnet,
                key,
                attributes: attributes.clone(),
                revision,
                created_revision: entry.created,
                lifetime: match entry.lease {
                    0 => Lifetime::Reservation,
                    id => Lifetime::Leased { id, expires_unix: None },
                },
            }),
        }
    }

    pub(super) fn remember(&mut self) {
        let entries = self.entries.iter();
        let state = entries.filter_map(|(subnet, entry)| Self::decode(*subnet, entry).ok());
        self.states.insert((self.past, self.revision), state.collect());
    }

    fn put(&mut self, subnet: Prefixes, value: Option<LeaseAttributes>, lease: i64) -> Lease {
        self.revision += 1;
        let revision = self.revision;
        let created = self.entries.get(&subnet).map_or(revision, |entry| entry.created);
        if let Some(value) = &value {
            self.ever.insert((subnet, value.public_ip));
        }
        let entry = Entry { value, revision, created, lease };
        let decoded = Self::decode(subnet, &entry);
        self.entries.insert(subnet, entry);
        self.changed.insert(subnet, (self.past, revision));
        let (change, lease) = match decoded {
            Ok(lease) => (Change::Put(lease.clone()), Some(lease)),
            Err(rejected) => (Change::Rejected(rejected), None),
        };
        self.history.push((revision, change));
        self.remember();
        lease.unwrap_or_else(|| Lease {
            subnets: subnet,
            key: subnet.key(),
            attributes: LeaseAttributes::udp(Ipv4Addr::UNSPECIFIED),
            revision,
            created_revision: created,
            lifetime: Lifetime::Reservation,
        })
    }

    /// Deletes in one revision.
    fn delete(&mut self, subnets: &[Prefixes]) {
        self.revision += 1;
        for subnet in subnets {
            self.entries.remove(subnet);
            self.changed.insert(*subnet, (self.past, self.revision));
            let change = Change::Deleted { key: subnet.key(), revision: self.revision };
            self.history.push((self.revision, change));
        }
        self.remember();
    }

    /// Ends the leases whose time is over.
    pub(super) fn advance(&mut self, time: Duration) {
        let ended: Vec<_> =
            self.ends.iter().filter(|(_, end)| **end <= time).map(|(id, _)| *id).collect();
        for id in ended {
            self.ends.remove(&id);
            self.end_claims(id);
            let entries = self.entries.iter();
            let bound = entries.filter(|(_, entry)| entry.lease == id);
            let bound: Vec<_> = bound.map(|(subnet, _)| *subnet).collect();
            if !bound.is_empty() {
                self.delete(&bound);
            }
        }
    }

    pub(super) fn next_end(&self) -> Option<Duration> {
        self.ends.values().min().copied()
    }

    pub(super) fn list(&self) -> Snapshot {
        let mut snapshot =
            Snapshot { revision: self.revision, cluster: self.cluster, ..Snapshot::default() };
        for (subnet, entry) in &self.entries {
            snapshot.add(Self::decode(*subnet, entry));
        }
        snapshot
    }

    pub(super) fn watch(&self, revision: i64, own: &Lease, cluster: u64) -> Result<(), StoreError> {
        if revision < self.compacted || revision > self.revision || cluster != self.cluster {
            return Err(StoreError::HistoryLost);
        }
        let is_known = self.entries.get(&own.subnets).is_some_and(|found| {
            found.created == own.created_revision
                && (found.revision == own.revision || found.revision > revision)
        });
        if is_known { Ok(()) } else { Err(StoreError::HistoryLost) }
    }

    fn grant(&mut self, time: Duration) -> i64 {
        self.grant_for(time, TTL)
    }

    pub(super) fn grant_for(&mut self, time: Duration, ttl: Duration) -> i64 {
        self.leases += 1;
        self.ends.insert(self.leases, time + ttl);
        self.leases
    }

    pub(super) fn end_of(&self, lease: i64) -> Option<Duration> {
        self.ends.get(&lease).copied()
    }

    /// Ends a lease, and what is bound to it.
    pub(super) fn revoke(&mut self, lease: i64) {
        self.ends.remove(&lease);
        self.end_claims(lease);
    }

    /// What is bound to the etcd lease is gone with it.
    fn end_claims(&mut self, lease: i64) {
        let count = self.claims.len();
        self.claims.retain(|_, claim| claim.lease != lease);
        if self.claims.len() < count {
            self.revision += 1;
            self.remember();
        }
    }

    /// Whether the lease was there to be extended.
    pub(super) fn extend_claim(&mut self, lease: i64, end: Duration) -> bool {
        self.ends.get_mut(&lease).map(|until| *until = end).is_some()
    }

    /// The lease for a key of this lifetime, and whether it is a new one.
    fn extend(&mut self, lifetime: Lifetime, time: Duration) -> (i64, bool) {
        let Lifetime::Leased { id, .. } = lifetime else { return (0, false) };
        match self.ends.get_mut(&id) {
            Some(end) => {
                *end = time + TTL;
                (id, false)
            }
            None => (self.grant(time), true),
        }
    }

    fn unchanged(&self, held: &Lease) -> bool {
        self.entries.get(&held.subnets).is_some_and(|entry| entry.revision == held.revision)
    }

    fn granted(lease: Lease, asked: Duration) -> Granted {
        let expires = match lease.lifetime {
            Lifetime::Reservation => None,
            Lifetime::Leased { .. } => Some(asked + TTL),
        };
        Granted { lease, expires }
    }

    pub(super) fn renew(&mut self, request: &Request<'_>) -> Result<Granted, StoreError> {
        let (id, fresh) = self.extend(request.held.lifetime, request.time);
        if fresh {
            return self.write(request, id, fresh);
        }
        if !self.unchanged(request.held) {
            return Err(StoreError::Conflict(request.held.key.clone()));
        }
        Ok(Self::granted(request.held.clone(), request.asked))
    }

    pub(super) fn update(&mut self, request: &Request<'_>) -> Result<Granted, StoreError> {
        let (id, fresh) = self.extend(request.held.lifetime, request.time);
        self.write(request, id, fresh)
    }

    fn write(
        &mut self,
        request: &Request<'_>,
        id: i64,
        fresh: bool,
    ) -> Result<Granted, StoreError> {
        let held = request.held;
        if !self.unchanged(held) {
            if fresh {
                self.ends.remove(&id);
            }
            return Err(StoreError::Conflict(held.key.clone()));
        }
        let lease = self.put(held.subnets, Some(held.attributes.clone()), id);
        Ok(Self::granted(lease, request.asked))
    }

    pub(super) fn create(
        &mut self,
        subnet: Prefixes,
        attributes: LeaseAttributes,
        time: Duration,
        asked: Duration,
    ) -> Result<Granted, StoreError> {
        if self.entries.contains_key(&subnet) {
            return Err(StoreError::Conflict(subnet.key()));
        }
        let id = self.grant(time);
        let lease = self.put(subnet, Some(attributes), id);
        Ok(Self::granted(lease, asked))
    }

    /// An operator deletes keys, all at once.
    pub(super) fn operator_deletes(&mut self, subnets: &[Prefixes]) {
        self.meddled.extend(subnets);
        self.deleted.extend(subnets);
        self.delete(subnets);
    }

    /// An operator writes; `lease` keeps the entry's etcd lease, else it is a reservation.
    pub(super) fn operator_puts(
        &mut self,
        subnet: Prefixes,
        value: Option<LeaseAttributes>,
        lease: bool,
    ) {
        self.meddled.insert(subnet);
        let id = self.entries.get(&subnet).map_or(0, |entry| entry.lease);
        self.put(subnet, value, if lease { id } else { 0 });
    }

    /// Another cluster, empty, in place of this one; its revisions may be ahead of ours, and if it
    /// was made as this one was, it has the same id.
    pub(super) fn wipe(&mut self, revision: i64, keeps_id: bool, all: &[Prefixes]) {
        self.past += 1;
        self.cluster += u64::from(!keeps_id);
        self.revision = revision;
        self.compacted = revision;
        self.entries.clear();
        self.claims.clear();
        self.claimed.clear();
        self.history.clear();
        self.ends.clear();
        self.meddled.extend(all);
        for subnet in all {
            self.changed.insert(*subnet, (self.past, revision));
        }
        self.remember();
    }
}
