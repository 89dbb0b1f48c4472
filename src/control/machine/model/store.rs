//! A simulated store with etcd's rules: one revision per transaction, compares on revisions,
//! leases that end by the store's time, a history that can be compacted, clusters that can be
//! replaced. It remembers every state it ever had, for the invariants.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::TTL;
use crate::control::error::StoreError;
use crate::control::identity::NodeIdentity;
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::control::rejected::{RejectReason, Rejected};
use crate::control::snapshot::{Change, Granted, Snapshot, Vacancy};
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
    pub(super) claims: BTreeMap<IpAddr, Claim>,
    /// Until when an address is some node's, by an observer.
    pub(super) claimed: BTreeMap<IpAddr, (NodeIdentity, Duration)>,
    /// Changes of this cluster, in order.
    pub(super) history: Vec<(i64, Change)>,
    /// When each etcd lease ends.
    ends: BTreeMap<i64, Duration>,
    leases: i64,
    /// The readable leases after every revision.
    states: BTreeMap<Point, Vec<Lease>>,
    /// When each key was last changed, unless all were since.
    changed: BTreeMap<Prefixes, Point>,
    /// When all data were lost last.
    wiped: Point,
    /// Who was ever in an entry.
    pub(super) ever: BTreeSet<(Prefixes, IpAddr)>,
    /// Where owners cannot rely on the lease alone: an operator was at it, or a flannel node, which
    /// compares nothing with what it writes over.
    meddled: BTreeSet<Prefixes>,
    pub(super) deleted: BTreeSet<Prefixes>,
    /// What was ever unreadable.
    junk: BTreeSet<Prefixes>,
}

/// What a write would put.
pub(super) struct Request<'a> {
    pub(super) held: &'a Lease,
    pub(super) time: Duration,
    /// The asking node's boot clock when it asked.
    pub(super) asked: Duration,
    /// Of the last listing of the asking node.
    pub(super) past: u64,
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
        let put = self.set(subnet, value, lease);
        self.remember();
        put
    }

    /// Puts in the revision of now.
    fn set(&mut self, subnet: Prefixes, value: Option<LeaseAttributes>, lease: i64) -> Lease {
        let revision = self.revision;
        let created = self.entries.get(&subnet).map_or(revision, |entry| entry.created);
        if let Some(value) = &value {
            self.ever.insert((subnet, value.node_address()));
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
        subnets.iter().for_each(|subnet| self.remove(*subnet));
        self.remember();
    }

    /// Deletes in the revision of now.
    fn remove(&mut self, subnet: Prefixes) {
        self.entries.remove(&subnet);
        self.changed.insert(subnet, self.point());
        let change = Change::Deleted { key: subnet.key(), revision: self.revision };
        self.history.push((self.revision, change));
    }

    /// When the entry of a key was changed last.
    pub(super) fn changed_at(&self, subnet: Prefixes) -> Point {
        self.changed.get(&subnet).copied().unwrap_or_default().max(self.wiped)
    }

    /// Whether another entry that overlaps it was ever unreadable.
    pub(super) fn was_junk_over(&self, subnet: Prefixes) -> bool {
        self.junk.iter().any(|junk| *junk != subnet && junk.overlaps(subnet))
    }

    /// Whether the owner of `subnet` cannot rely on its lease alone.
    pub(super) fn is_meddled(&self, subnet: Prefixes) -> bool {
        self.meddled.iter().any(|meddled| meddled.overlaps(subnet))
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
        let put = self.put(held.subnets, Some(held.attributes.clone()), id);
        // A write does not tell who made the entry, and when.
        let lease = Lease { created_revision: held.created_revision, ..put };
        Ok(Self::granted(lease, request.asked))
    }

    /// Takes a subnet: the entry is absent, one that it `replaces` as it was, and what the listing
    /// shows as written last still is, or, without IPv6, no entry has the subnet beside an IPv6
    /// one.
    pub(super) fn create(
        &mut self,
        request: &Request<'_>,
        vacancy: &Vacancy,
    ) -> Result<Granted, StoreError> {
        let (lease, replaces) = (vacancy.entry(request.held), vacancy.replaces.as_ref());
        let subnets = lease.subnets;
        let (id, fresh) = self.extend(lease.lifetime, request.time);
        let mut entries = self.entries.iter();
        let is_free = if vacancy.compares_all(&lease) {
            let last = vacancy.last_written.as_ref();
            let revision = last.map_or(0, |last| last.revision);
            let as_it_was = last.and_then(|last| last.lease.as_ref()).is_none_or(|(key, id)| {
                let is_it = |(subnets, entry): (&Prefixes, &Entry)| {
                    subnets.key() == *key && (entry.revision, entry.lease) == (revision, *id)
                };
                self.entries.iter().any(is_it)
            });
            as_it_was && entries.all(|(_, entry)| entry.revision <= revision)
        } else {
            entries.all(|(other, _)| other.v4() != subnets.v4() || other.v6().is_none())
        };
        let is_absent = !self.entries.contains_key(&subnets);
        if !is_absent || !is_free || replaces.is_some_and(|before| !self.unchanged(before)) {
            if fresh {
                self.ends.remove(&id);
            }
            return Err(StoreError::Conflict(lease.key));
        }
        // Where families are two, no listing that was lost since may count.
        let past = if vacancy.compares_all(&lease) { self.past } else { request.past };
        self.assert_vacant(subnets, replaces, past);
        self.revision += 1;
        let first = self.point();
        let lease = self.set(subnets, Some(lease.attributes), id);
        if let Some(before) = replaces {
            self.remove(before.subnets);
            self.deleted.insert(before.subnets);
        }
        self.remember();
        self.assert_one_owner(subnets, replaces, first);
        Ok(Self::granted(lease, request.asked))
    }

    /// The observer: what a node takes is nobody else's, of either family. Not if the data of its
    /// last listing were lost since: then neither revision nor entry says anything.
    fn assert_vacant(&self, subnets: Prefixes, replaces: Option<&Lease>, past: u64) {
        let others = self.entries.keys();
        let mut others =
            others.filter(|other| replaces.is_none_or(|before| before.subnets != **other));
        let other = others.find(|other| other.overlaps(subnets) && self.past == past);
        assert!(other.is_none(), "{subnets} is taken, and overlaps {other:?}");
    }

    /// The observer: while a node's key changes from that of `replaces`, the others never see it
    /// without its IPv4 subnet, if that stays, or twice.
    fn assert_one_owner(&self, subnets: Prefixes, replaces: Option<&Lease>, first: Point) {
        let Some(before) = replaces.filter(|before| before.v4() == subnets.v4()) else { return };
        for (point, state) in self.states.range(first..) {
            let owners = state.iter().filter(|lease| lease.v4() == subnets.v4());
            let count = owners.count();
            assert_eq!(count, 1, "of {} there are {count} entries at {point:?}", before.subnets);
        }
    }

    /// A flannel node writes an entry that nobody else has, or any.
    pub(super) fn flannel_puts(
        &mut self,
        subnet: Prefixes,
        attributes: LeaseAttributes,
        time: Duration,
        compares: bool,
    ) -> bool {
        let found = self.entries.get(&subnet);
        if compares && found.is_some() {
            return false;
        }
        let address = |value: &LeaseAttributes| value.is_of_node_of(&attributes);
        if found.is_some_and(|found| !found.value.as_ref().is_some_and(address)) {
            self.meddled.insert(subnet);
        }
        let id = self.grant(time);
        self.put(subnet, Some(attributes), id);
        true
    }

    /// A flannel node deletes what a listing showed as its own.
    pub(super) fn flannel_deletes(&mut self, subnet: Prefixes, address: IpAddr) {
        let Some(found) = self.entries.get(&subnet) else { return };
        if found.value.as_ref().is_none_or(|value| value.node_address() != address) {
            self.meddled.insert(subnet);
        }
        self.deleted.insert(subnet);
        self.delete(&[subnet]);
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
        if value.is_none() {
            self.junk.insert(subnet);
        }
        let id = self.entries.get(&subnet).map_or(0, |entry| entry.lease);
        self.put(subnet, value, if lease { id } else { 0 });
    }

    /// Another cluster, empty, in place of this one; its revisions may be ahead of ours, and if it
    /// was made as this one was, it has the same id.
    pub(super) fn wipe(&mut self, revision: i64, keeps_id: bool, network: Prefixes) {
        self.past += 1;
        self.cluster += u64::from(!keeps_id);
        self.revision = revision;
        self.compacted = revision;
        self.entries.clear();
        self.claims.clear();
        self.claimed.clear();
        self.history.clear();
        self.ends.clear();
        self.meddled.insert(network);
        self.wiped = self.point();
        self.remember();
    }
}
