//! Claims on PublicIPs in the simulated store, with the transactions that etcd's have: a write goes
//! in if the claim is the node's or nobody's. And an observer who knows how long each claim lives.

use std::net::Ipv4Addr;
use std::time::Duration;

use super::store::SimStore;
use crate::control::claim::{CLAIM_TTL, Claim, ClaimEntry, Claimant, NodeIdentity};
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

/// What a run of a node knows of its claim.
#[derive(Debug, Clone)]
pub(super) struct Claims {
    pub(super) node: NodeIdentity,
    /// Which run of which node, for the observer.
    pub(super) run: u64,
    claimant: Claimant,
    pub(super) current: Option<Claim>,
    lease: Option<i64>,
    keeps: u64,
}

impl Claims {
    pub(super) fn of(node: NodeIdentity, run: u64) -> Self {
        let claimant = Claimant::of(node.clone());
        Self { node, run, claimant, current: None, lease: None, keeps: 0 }
    }

    /// From now on this is the address to claim.
    pub(super) fn claim(&mut self, public_ip: Ipv4Addr) {
        self.current = Some(self.wanted(public_ip));
    }

    fn wanted(&self, public_ip: Ipv4Addr) -> Claim {
        let current = self.current.clone().filter(|claim| claim.public_ip == public_ip);
        current.unwrap_or_else(|| Claim::unseen(public_ip))
    }

    /// Draws the number of the next write, which the node knows before it sends it.
    pub(super) fn draw(&mut self, numbers: &mut u64) {
        self.claimant.number(|| {
            *numbers += 1;
            *numbers
        });
    }

    /// What a try of unknown outcome leaves: the lease that it may have bound.
    pub(super) fn unanswered(&mut self, tried: &Self) {
        self.lease = tried.lease;
    }
}

impl SimStore {
    fn judge(&self, claims: &mut Claims, public_ip: Ipv4Addr) -> Result<Claim, StoreError> {
        let found = self.claims.get(&public_ip);
        let shown = found.map(|found| ClaimEntry {
            value: &found.value,
            revision: found.revision,
            lease: found.lease,
        });
        let claim = claims.claimant.judge(public_ip, shown)?;
        if let Some(found) = found.filter(|_| claim.is_ours) {
            claims.lease = Some(found.lease);
        }
        Ok(claim)
    }

    /// A listing reads the claim, too.
    pub(super) fn read_claim(&self, claims: &mut Claims) -> Result<(), StoreError> {
        if let Some(public_ip) = claims.current.as_ref().map(|claim| claim.public_ip) {
            claims.current = Some(self.judge(claims, public_ip)?);
        }
        Ok(())
    }

    /// Carries out `write` of the node at `public_ip` in one transaction with its claim. A packet
    /// that is late is one try, and whoever sent it is not there to look again.
    pub(super) fn claiming<T>(
        &mut self,
        claims: &mut Claims,
        public_ip: Ipv4Addr,
        (time, is_late): (Duration, bool),
        mut write: impl FnMut(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut claim = claims.wanted(public_ip);
        let moves = claims.current.as_ref().is_some_and(|current| current.public_ip != public_ip);
        let left_behind = if moves { claims.lease.take() } else { None };
        for _ in 0..TRIES_MAX {
            let shown = self.claims.get(&public_ip);
            let (revision, value) =
                shown.map_or((0, &[][..]), |found| (found.revision, &found.value));
            if revision == claim.revision && value == claim.value {
                let before = self.revision;
                let written = write(self)?;
                self.assert_free(claims, public_ip, time);
                if !claim.is_ours {
                    claim = self.put_claim(claims, public_ip, before, time);
                }
                claims.current = Some(claim);
                if let Some(lease) = left_behind {
                    self.revoke_claim(lease);
                }
                return Ok(written);
            }
            if is_late {
                break;
            }
            claim = self.judge(claims, public_ip)?;
        }
        if moves {
            claims.lease = left_behind;
        } else {
            claims.current = Some(claim);
        }
        Err(StoreError::Conflict { key: public_ip.to_string() })
    }

    fn put_claim(
        &mut self,
        claims: &mut Claims,
        public_ip: Ipv4Addr,
        before: i64,
        time: Duration,
    ) -> Claim {
        // In the revision of the write that it comes with, if that made one.
        if self.revision == before {
            self.revision += 1;
            self.remember();
        }
        let lasting = claims.lease.filter(|lease| self.end_of(*lease).is_some());
        let lease = lasting.unwrap_or_else(|| self.grant_for(time, CLAIM_TTL));
        claims.lease = Some(lease);
        let until = self.end_of(lease).unwrap_or_default();
        self.claimed.insert(public_ip, (claims.node.clone(), claims.run, until));
        let numbers = &mut self.numbers;
        let value = claims.claimant.value(|| {
            *numbers += 1;
            *numbers
        });
        claims.claimant.written(public_ip);
        let revision = self.revision;
        self.claims.insert(public_ip, Entry { value: value.clone(), revision, lease });
        Claim { public_ip, revision, value, is_ours: true }
    }

    /// Keeps the claim alive, or claims again what lapsed. Returns whether that tells the node
    /// whose the claim is; its lease alone does not.
    pub(super) fn keep_claim(
        &mut self,
        claims: &mut Claims,
        time: Duration,
    ) -> Result<bool, StoreError> {
        let Some(claim) = claims.current.clone() else { return Ok(false) };
        if let Some(lease) = claims.lease.filter(|_| claim.is_ours) {
            if self.extend_claim(lease, time + CLAIM_TTL) {
                // After a move of unknown outcome, the lease may be that of the other address.
                let bound = self.claims.get(&claim.public_ip);
                if bound.is_some_and(|found| found.lease == lease) {
                    let until = time + CLAIM_TTL;
                    self.claimed.insert(claim.public_ip, (claims.node.clone(), claims.run, until));
                }
                claims.keeps += 1;
                if !claims.keeps.is_multiple_of(KEEPS_PER_NUMBER) {
                    return Ok(false);
                }
                claims.current = Some(claim.clone().with_another_number());
            } else {
                claims.lease = None;
                claims.current = Some(claim.lapsed());
            }
        }
        self.claiming(claims, claim.public_ip, (time, false), |_| Ok(true))
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
