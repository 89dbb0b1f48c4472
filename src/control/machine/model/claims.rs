//! Claims on PublicIPs in the simulated store, with the transactions that etcd's have: a write goes
//! in if the claim is the node's or nobody's. And an observer who knows how long each claim lives.

use std::net::Ipv4Addr;
use std::time::Duration;

use super::store::SimStore;
use crate::control::claim::ledger::{Ledger, Terms};
use crate::control::claim::{CLAIM_TTL, Claim, ClaimEntry, NodeIdentity};
use crate::control::store::StoreError;

/// Tries of one write, each after a look at the claim that was another than was known.
const TRIES_MAX: u32 = 3;
/// Of the store of etcd, less, because schedules are short.
const KEEPS_PER_NUMBER: u64 = 2;

/// A claim in the store.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    value: Vec<u8>,
    pub(super) revision: i64,
    lease: i64,
}

impl Entry {
    fn shown(&self) -> ClaimEntry<'_> {
        let Self { value, revision, lease } = self;
        ClaimEntry { value, revision: *revision, lease: *lease }
    }
}

/// What a run of a node knows of its claims.
#[derive(Debug, Clone)]
pub(super) struct Claims {
    pub(super) node: NodeIdentity,
    /// Which run of which node, for the observer.
    pub(super) run: u64,
    ledger: Ledger,
    /// As it was when the last transaction was sent.
    sent: Option<Box<Ledger>>,
    lease: Option<i64>,
    keeps: u64,
}

impl Claims {
    pub(super) fn of(node: NodeIdentity, run: u64) -> Self {
        let ledger = Ledger::of(node.clone());
        Self { node, run, ledger, sent: None, lease: None, keeps: 0 }
    }

    /// From now on this is the address to claim.
    pub(super) fn claim(&mut self, public_ip: Ipv4Addr) {
        if self.ledger.claim(public_ip) {
            self.lease = None;
        }
    }

    /// Draws the number of the next write, which the node knows before it sends it.
    pub(super) fn draw(&mut self, numbers: &mut u64) {
        self.ledger.draw(|| {
            *numbers += 1;
            *numbers
        });
    }

    /// The same, to be tried with: what comes of it, only an answer tells.
    pub(super) fn to_try(&self) -> Self {
        Self { sent: None, ..self.clone() }
    }

    /// What a try of unknown outcome, for the address `to`, leaves: what was known when it was
    /// sent, the lease that it may have bound, and the address at which the entry may be.
    pub(super) fn unanswered(&mut self, tried: Self, to: Option<Ipv4Addr>) {
        self.lease = tried.lease;
        if let Some(sent) = tried.sent {
            self.ledger = *sent;
        }
        if let Some(target) = to.and_then(|to| self.ledger.target(Some(to))) {
            self.ledger.unanswered(target);
        }
    }
}

impl SimStore {
    fn see(
        &self,
        claims: &mut Claims,
        to: Option<Ipv4Addr>,
        look: &[Ipv4Addr],
    ) -> Result<Option<Claim>, StoreError> {
        let shown = look.iter().map(|public_ip| (*public_ip, self.claims.get(public_ip)));
        let shown: Vec<_> = shown.map(|(ip, found)| (ip, found.map(Entry::shown))).collect();
        let target = claims.ledger.see(to, &shown)?;
        if let Some(current) = claims.ledger.current().filter(|claim| claim.is_ours) {
            claims.lease = self.claims.get(&current.public_ip).map(|found| found.lease);
        }
        Ok(target)
    }

    /// A listing reads the claims, too.
    pub(super) fn read_claim(&self, claims: &mut Claims) -> Result<(), StoreError> {
        let look: Vec<_> = claims.ledger.known().iter().map(|claim| claim.public_ip).collect();
        self.see(claims, None, &look).map(|_| ())
    }

    /// Carries out `write` of the node at the address `to`, or where its entry is, in one
    /// transaction with its claims. A packet that is late is one try, and whoever sent it is not
    /// there to look again.
    pub(super) fn claiming<T>(
        &mut self,
        claims: &mut Claims,
        to: Option<Ipv4Addr>,
        (time, is_late): (Duration, bool),
        mut write: impl FnMut(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut target = claims.ledger.target(to);
        for _ in 0..TRIES_MAX {
            let Some(claim) = target.take() else { break };
            let numbers = &mut self.numbers;
            let terms = claims.ledger.terms(&claim, || {
                *numbers += 1;
                *numbers
            });
            claims.sent = Some(Box::new(claims.ledger.clone()));
            if terms.unchanged.iter().all(|claim| self.is_unchanged(claim)) {
                let before = self.revision;
                let written = write(self)?;
                self.assert_free(claims, claim.public_ip, time);
                self.put_claims(claims, &claim, &terms, (before, time));
                claims.ledger.written(claim, terms, self.revision);
                return Ok(written);
            }
            if is_late {
                break;
            }
            target = self.see(claims, to, &terms.look)?;
            if target.as_ref().map(|target| claims.ledger.unchanged(target))
                == Some(terms.unchanged)
            {
                break;
            }
        }
        Err(StoreError::Conflict { key: format!("{to:?}") })
    }

    fn is_unchanged(&self, claim: &Claim) -> bool {
        let shown = self.claims.get(&claim.public_ip);
        let (revision, value) = shown.map_or((0, &[][..]), |found| (found.revision, &found.value));
        revision == claim.revision && value == claim.value
    }

    fn put_claims(
        &mut self,
        claims: &mut Claims,
        target: &Claim,
        terms: &Terms,
        (before, time): (i64, Duration),
    ) {
        // In the revision of the write that it comes with, if that made one.
        if self.revision == before && (terms.put.is_some() || !terms.delete.is_empty()) {
            self.revision += 1;
            self.remember();
        }
        for public_ip in &terms.delete {
            self.claims.remove(public_ip);
            self.claimed.remove(public_ip);
        }
        let Some(value) = terms.put.clone() else { return };
        let lasting = claims.lease.filter(|lease| self.end_of(*lease).is_some());
        let lease = lasting.unwrap_or_else(|| self.grant_for(time, CLAIM_TTL));
        claims.lease = Some(lease);
        let until = self.end_of(lease).unwrap_or_default();
        self.claimed.insert(target.public_ip, (claims.node.clone(), claims.run, until));
        self.claims.insert(target.public_ip, Entry { value, revision: self.revision, lease });
    }

    /// Keeps the claim alive, or claims again what lapsed. Returns whether that tells the node
    /// whose the claim is; its lease alone does not.
    pub(super) fn keep_claim(
        &mut self,
        claims: &mut Claims,
        time: Duration,
    ) -> Result<bool, StoreError> {
        let Some(claim) = claims.ledger.current().cloned() else { return Ok(false) };
        if let Some(lease) = claims.lease.filter(|_| claim.is_ours) {
            if self.extend_claim(lease, time + CLAIM_TTL) {
                // After a move of unknown outcome, the lease may be that of the other address.
                for (public_ip, _) in self.claims.iter().filter(|(_, found)| found.lease == lease) {
                    let holder = (claims.node.clone(), claims.run, time + CLAIM_TTL);
                    self.claimed.insert(*public_ip, holder);
                }
                claims.keeps += 1;
                if !claims.keeps.is_multiple_of(KEEPS_PER_NUMBER) {
                    return Ok(false);
                }
                claims.ledger.renumber();
            } else {
                claims.lease = None;
                claims.ledger.lapsed();
            }
        }
        self.claiming(claims, None, (time, false), |_| Ok(true))
    }

    /// What is bound to the etcd lease is gone with it.
    pub(super) fn end_claims(&mut self, lease: i64) {
        let count = self.claims.len();
        self.claims.retain(|_, claim| claim.lease != lease);
        if self.claims.len() < count {
            self.revision += 1;
            self.remember();
        }
    }

    /// The observer: nobody writes for an address that another node claims.
    fn assert_free(&self, claims: &Claims, public_ip: Ipv4Addr, time: Duration) {
        let Claims { node, run, .. } = claims;
        let other = self.claimed.get(&public_ip);
        let other = other.filter(|(holder, _, until)| holder != node && *until > time);
        assert!(other.is_none(), "{node:?} {run} writes as {public_ip}, which {other:?} has");
    }
}
