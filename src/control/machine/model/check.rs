//! The invariants, by an observer who sees the store and every node, and who knows what each node
//! was told and when.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::super::End;
use super::node::{Life, Op};
use super::store::Point;
use super::{Node, RETRY, STALE_HOLD, World};
use crate::control::choose::free_subnets;
use crate::control::lease::Lease;
use crate::control::peers;
use crate::control::snapshot::{Change, Snapshot};
use crate::route::Prefixes;

/// Once a lease is past its end, a write follows a reading not older than this.
const READ_COUNTS_FOR: Duration = Duration::from_secs(15);

impl World {
    /// Notes what a listing tells the node.
    pub(super) fn told_listing(
        &mut self,
        index: usize,
        snapshot: &Snapshot,
        asked: Duration,
        point: Point,
    ) {
        let node = &mut self.nodes[index];
        // Only a listing tells which cluster it is of. Of the same one, revisions never go back.
        let newest = if let Life::Running(machine) = &node.life { machine.newest } else { 0 };
        let wiped =
            node.cluster != 0 && (node.cluster != snapshot.cluster || newest > snapshot.revision);
        let missing = node.missing_from(snapshot.leases.iter().map(Arc::as_ref));
        let boot = node.boot(self.time);
        let is_own = |lease: &Arc<Lease>| Some(lease.subnets) == node.previous;
        let own_shows = snapshot.leases.iter().any(is_own);
        let own = if own_shows { Own::Kept } else { Own::Lapsed };
        node.is_accident = hold(node, &missing, own, wiped, boot);
        node.mirror = point;
        node.told = point;
        node.cluster = snapshot.cluster;
        node.is_deceived = false;
        node.is_from_cache = false;
        node.read = Some(asked);
    }

    /// Notes what changes tell the node, up to `point`.
    pub(super) fn told_changes(&mut self, index: usize, changes: &[(i64, Change)], point: Point) {
        let node = &mut self.nodes[index];
        let own = node.previous.map(Prefixes::key).unwrap_or_default();
        let networks = node.config().networks();
        let mut gone: BTreeMap<i64, BTreeSet<Option<Prefixes>>> = BTreeMap::new();
        let (mut own_deleted, mut own_lost) = (Vec::new(), None);
        // What a listing showed already is no news.
        let news = changes.iter().filter(|(revision, _)| *revision > node.mirror.1);
        for (revision, change) in news {
            let key = match change {
                Change::Deleted { key, .. } => key,
                Change::Rejected(rejected) => &rejected.key,
                Change::Live { .. }
                | Change::Progress { .. }
                | Change::Put(_)
                | Change::Everything(_) => {
                    continue;
                }
            };
            if *key == own {
                own_lost = Some(*revision);
            }
            if *key == own && matches!(change, Change::Deleted { .. }) {
                own_deleted.push(*revision);
            }
            let subnets = Prefixes::from_key(key).and_then(|subnets| subnets.within(networks));
            gone.entry(*revision).or_default().insert(subnets.map(Prefixes::first));
        }
        let missing = gone.into_iter().map(|(revision, gone)| {
            // Whoever changed its key with its families did not vanish.
            let mut missing = node.missing_from(self.store.state_at((point.0, revision)).iter());
            missing.retain(|subnets| gone.contains(&Some(subnets.first())));
            (revision, missing)
        });
        let missing: Vec<_> = missing.filter(|(_, missing)| !missing.is_empty()).collect();
        let boot = node.boot(self.time);
        let accident = missing
            .into_iter()
            .find(|(revision, missing)| {
                let own = if own_lost == Some(*revision) { Own::Deleted } else { Own::Kept };
                hold(node, missing, own, false, boot)
            })
            .map(|(revision, _)| revision);
        // A twin may have written it again, and somebody deleted just that.
        let by_accident = own_deleted.iter().all(|revision| accident == Some(*revision));
        node.is_accident = by_accident && !own_deleted.is_empty();
        node.mirror = node.mirror.max(point);
        node.told = node.told.max(point);
    }

    /// A machine whose lease is past its end reads its entry before it writes it.
    pub(super) fn ask_write(&mut self, index: usize, op: Op) {
        let (time, node) = (self.time, &mut self.nodes[index]);
        let boot = node.boot(time);
        if let Life::Running(machine) = &node.life
            && let Some(end) = machine.own.expires.filter(|end| *end <= boot)
        {
            let read = node.read.filter(|read| *read >= end && boot < *read + READ_COUNTS_FOR);
            assert!(read.is_some(), "node {index} wrote after a pause without reading: {op:?}");
        }
        node.ask(op, time);
    }

    /// The node publishes what the store had at a revision that it saw, and what it holds.
    pub(super) fn check_published(&mut self, index: usize, peers: usize, held: usize) {
        let World { nodes, store, time, .. } = self;
        let node = &mut nodes[index];
        let (boot, published) = (node.boot(*time), node.published.clone());
        assert_eq!(peers, published.len(), "node {index} counts other peers than it publishes");
        if node.is_from_cache {
            // What was at an address that is the node's by now is nobody else.
            let other = |lease: &&Arc<Lease>| lease.attributes.node_address() != node.address;
            let remembered = node.known.as_ref().map(|known| known.peers.values().filter(other));
            let remembered = remembered
                .is_some_and(|peers| peers.map(|lease| &lease.subnets).eq(published.keys()));
            assert!(remembered && held == 0, "node {index} remembers others: {published:?}");
            return;
        }
        if node.is_deceived {
            let was = |(subnet, ip): (&Prefixes, &IpAddr)| {
                store.ever.iter().any(|(whole, of)| subnet.is_part_of(*whole) && of == ip)
            };
            assert!(
                published.iter().all(was),
                "node {index} publishes what never was: {published:?}"
            );
            if let Life::Running(machine) = &node.life {
                let until = |subnet: &Prefixes| machine.stale.until(*subnet);
                let held = published.iter().filter_map(|(s, ip)| Some((*s, (*ip, until(s)?))));
                node.held = held.collect();
            }
            return;
        }
        assert_ne!(node.mirror, (0, 0), "node {index} publishes before it knows anybody");
        let mut expected = select(node, store.state_at(node.mirror));
        node.held.retain(|subnet, (_, until)| {
            (*until > boot || node.is_away)
                && !expected.keys().any(|leased: &Prefixes| leased.overlaps(*subnet))
        });
        expected.extend(node.held.iter().map(|(subnet, (ip, _))| (*subnet, *ip)));
        assert_eq!(published, expected, "node {index} does not publish {:?}", node.mirror);
        assert_eq!(held, node.held.len(), "node {index} miscounts the peers that it holds");
    }

    /// What was from the cache counts as confirmed when the store gave the subnet to the node.
    pub(super) fn check_confirmed(&self, index: usize) {
        let node = &self.nodes[index];
        let owned = node.previous.is_some_and(|own| {
            node.addresses.iter().any(|address| self.store.ever.contains(&(own, *address)))
        });
        assert!(owned && node.read.is_some(), "node {index} confirms its cache by itself");
    }

    pub(super) fn restart_after(&mut self, index: usize, end: End) {
        self.check_end(index, end);
        let node = &mut self.nodes[index];
        node.crash();
        node.known = None;
        node.life = Life::Acquiring { at: node.boot(self.time) };
        self.read_config(index);
        self.log(index, &format!("lost its subnet: {end:?}"));
    }

    /// A run ends only if the subnet was somebody else's, or was taken away.
    pub(super) fn check_end(&mut self, index: usize, end: End) {
        let node = &self.nodes[index];
        let Some(subnet) = node.previous else { panic!("node {index} lost what it never had") };
        let End { new_owner } = end;
        match new_owner {
            Some(owner) => {
                let mut ever = self.store.ever.iter();
                let owned = ever.any(|(other, ip)| other.overlaps(subnet) && *ip == owner);
                assert!(
                    owned
                        && (node.began_from_cache
                            || node.has_twin
                            || !node.addresses.contains(&owner)),
                    "node {index} gave {subnet} to {owner}"
                );
            }
            None => {
                let deleted = self.store.deleted.contains(&subnet);
                let is_blocked = self.store.was_junk_over(subnet);
                assert!(deleted || is_blocked, "node {index} gave up {subnet}, as nobody else did");
                assert!(
                    !node.is_accident || node.is_deceived || is_blocked,
                    "node {index} gave up {subnet} because most vanished"
                );
            }
        }
    }

    /// What holds after every step.
    pub(super) fn check(&self) {
        let mut owners: Vec<(Prefixes, usize)> = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(subnet) = node.believes(self.time) else { continue };
            assert_eq!(Some(subnet), node.previous, "node {index} changed its subnet");
            let entry = self.store.entries.get(&subnet).and_then(|entry| entry.value.as_ref());
            let owns = entry.is_some_and(|value| node.addresses.contains(&value.node_address()));
            let changed = self.store.changed_at(subnet);
            assert!(
                owns || changed > node.told || node.is_deceived,
                "node {index} takes {subnet} for its own, told of {:?}; the store gave it to \
                 {entry:?} at {changed:?}",
                node.told
            );
            let other = owners.iter().find(|(other, _)| other.overlaps(subnet));
            if let Some((_, other)) = other.filter(|_| !self.store.is_meddled(subnet)) {
                let both = [*other, index];
                let is_told = both.iter().all(|twin| {
                    self.is_told_of_claim(*twin) && self.is_told_of_move(*twin, changed)
                });
                let is_alarmed = both.iter().any(|twin| self.nodes[*twin].claims.is_alarmed);
                let is_known = self.shares_address(index) && is_alarmed;
                assert!(!is_told || is_known, "nodes {other} and {index} both own {subnet}");
            }
            owners.push((subnet, index));
        }
    }

    /// Whether the store told the node whose the claim on its address is, and that is so still.
    /// Of two nodes with one address, one of them is to be told yet.
    fn is_told_of_claim(&self, index: usize) -> bool {
        let node = &self.nodes[index];
        let claim = self.store.claims.get(&node.address);
        !node.has_twin
            || claim.is_some_and(|claim| (self.store.past, claim.revision) <= node.claim_seen)
    }

    /// Whether the node, unless its twin has the same address, knows of the entry's last change
    /// and has its own address in it. Who moved while the store was away takes the subnet along
    /// when it is back, also from a twin that took it by the old address meanwhile.
    fn is_told_of_move(&self, index: usize, changed: Point) -> bool {
        let node = &self.nodes[index];
        let Life::Running(machine) = &node.life else { return true };
        let is_settled = changed <= node.told && machine.moved_from.is_empty();
        !node.has_twin || self.shares_address(index) || is_settled
    }

    /// Whether no subnet is left, of one of the families that the node's configuration has.
    fn is_exhausted(&self, index: usize) -> bool {
        let config = self.nodes[index].config();
        let taken: Vec<_> = self.store.list().taken_beside(None, config.networks()).collect();
        let v4 = taken.iter().filter_map(|it| it.v4()).collect();
        let v4 = config.v4().is_some_and(|range| free_subnets(&range, v4, 1).is_empty());
        let v6 = taken.iter().filter_map(|it| it.v6()).collect();
        let v6 = config.v6().is_some_and(|range| free_subnets(&range, v6, 1).is_empty());
        v4 || v6
    }

    /// What holds when all faults are over and everything had time to settle.
    pub(super) fn check_settled(&self) {
        let state = self.store.state_at(self.store.point());
        let mut subnets: Vec<Prefixes> = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let own = node.believes(self.time);
            let Some(own) = own else {
                let twin = self.nodes.iter().enumerate().find(|(other, twin)| {
                    *other != index && node.has_twin && twin.address == node.address
                });
                let is_refused = twin.is_some_and(|(_, twin)| twin.believes(self.time).is_some());
                assert!(
                    is_refused || self.is_exhausted(index),
                    "node {index} never gets a subnet: {:?}",
                    node.life
                );
                continue;
            };
            let twin = 1_usize.wrapping_sub(index);
            let other = self.nodes.get(twin).filter(|_| self.shares_address(index));
            let other = other.and_then(|twin| twin.believes(self.time));
            let alarms = [index, twin].into_iter().filter_map(|index| self.nodes.get(index));
            let alarms = alarms.filter(|node| node.claims.is_alarmed).count();
            let overlaps = subnets.iter().any(|subnets| subnets.overlaps(own));
            assert!(!overlaps || other == Some(own), "two nodes settled on {own}");
            subnets.push(own);
            assert_eq!(alarms, usize::from(other.is_some()), "alarms of node {index} and {twin}");
            let entry = state.iter().find(|lease| lease.subnets == own);
            let entry = entry.map(|lease| &lease.attributes);
            assert_eq!(entry, Some(&node.attributes()), "node {index} is not in the store");
            assert_eq!(node.published, select(node, state), "node {index} never agrees");
            let Life::Running(machine) = &node.life else { continue };
            assert_eq!(machine.stale.len(), 0, "node {index} holds peers for ever");
        }
    }
}

impl Node {
    /// What it holds, and what ended in an outage, lasts for a while after that.
    pub(super) fn note_outage(&mut self, is_away: bool, boot: Duration) {
        if self.is_away && !is_away {
            let over = self.held.values_mut().filter(|(_, until)| *until <= boot);
            over.for_each(|(_, until)| *until = boot + RETRY);
        }
        self.is_away = is_away;
    }

    /// What the node publishes, and does not hold, and `leases` have no more: nobody has the IPv4
    /// subnet, alone or beside one of IPv6.
    fn missing_from<'a>(&self, leases: impl Iterator<Item = &'a Lease>) -> Vec<Prefixes> {
        let networks = self.config().networks();
        let leased = leases.filter_map(|lease| lease.subnets.within(networks));
        let leased: BTreeSet<_> = leased.map(Prefixes::first).collect();
        let published = self.published.keys().filter(|subnet| !self.held.contains_key(subnet));
        published.filter(|subnets| !leased.contains(&subnets.first())).copied().collect()
    }
}

/// The peers of a node if the store is in this state.
fn select(node: &Node, state: &[Lease]) -> BTreeMap<Prefixes, IpAddr> {
    let Some(subnet) = node.previous else { return BTreeMap::new() };
    let own = Lease::reservation(subnet, node.attributes());
    let state: Vec<_> = state.iter().cloned().map(Arc::new).collect();
    let (peers, _) = peers::select(state.iter(), &own, node.config().networks());
    peers.into_iter().map(|(subnet, lease)| (subnet, lease.attributes.node_address())).collect()
}

/// How the own lease fared when peers vanished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Own {
    Kept,
    /// It was deleted in the same revision.
    Deleted,
    /// It is not in a listing.
    Lapsed,
}

/// What the node holds from now on, of what it publishes, if `missing` vanished.
fn hold(node: &mut Node, missing: &[Prefixes], own: Own, wiped: bool, boot: Duration) -> bool {
    let own_lost = usize::from(own == Own::Deleted);
    let nodes = node.published.len() - node.held.len() + own_lost;
    let lost = missing.len() + own_lost;
    let most = lost >= 2 && lost * 2 > nodes;
    let accident = wiped || (!missing.is_empty() && (own == Own::Lapsed || most));
    if accident {
        for subnet in missing {
            node.held.insert(*subnet, (node.published[subnet], boot + STALE_HOLD));
        }
    }
    accident
}
