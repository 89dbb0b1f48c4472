//! Claiming PublicIPs in the simulated store, by the same rules as in etcd. And an observer who
//! knows how long each claim lives.

use std::net::IpAddr;
use std::time::Duration;

use super::store::{Claim, SimStore};
use crate::control::error::StoreError;
use crate::control::identity::NodeIdentity;
use crate::control::timing::Timing;

/// What a run of a node knows of its claim.
#[derive(Debug, Clone)]
pub(super) struct Claims {
    pub(super) node: NodeIdentity,
    pub(super) lease: Option<i64>,
    /// What is claimed, and the revision of that.
    held: Option<(IpAddr, i64)>,
    /// Whether it was told last that another node has its address.
    pub(super) is_alarmed: bool,
}

impl Claims {
    pub(super) fn of(node: NodeIdentity) -> Self {
        Self { node, lease: None, held: None, is_alarmed: false }
    }

    /// Whether another address is claimed: the node has moved to `address`.
    pub(super) fn is_of_before(&self, address: IpAddr) -> bool {
        self.held.is_some_and(|(held, _)| held != address)
    }

    /// The revision with which what takes a subnet for `address` compares.
    pub(super) fn still_claimed(&self, address: IpAddr) -> Option<(IpAddr, i64)> {
        self.held.filter(|(held, _)| *held == address)
    }

    /// The revision over which the claim of `address` may be written, if the store shows `found`;
    /// none if it is this run's already.
    pub(super) fn validate(
        &mut self,
        address: IpAddr,
        found: Option<&Claim>,
    ) -> Result<Option<i64>, StoreError> {
        let revision = found.map_or(0, |found| found.revision);
        let shown = found.map(|found| (found.value.as_slice(), found.lease));
        let is_ours = self.node.validate(address, shown, self.lease, self.held.is_some())?;
        if is_ours {
            self.held = Some((address, revision));
        }
        Ok((!is_ours).then_some(revision))
    }

    /// The claim of `address` was written in this revision.
    pub(super) fn written(&mut self, address: IpAddr, revision: i64) {
        self.held = Some((address, revision));
    }
}

impl SimStore {
    /// Keeps the etcd lease of `claims` alive, or grants one.
    pub(super) fn keep_lease(&mut self, claims: &mut Claims, time: Duration) {
        let ttl = Timing::default().claim_ttl;
        let alive = claims.lease.filter(|lease| self.extend_claim(*lease, time + ttl));
        if alive.is_none() {
            claims.held = None;
        }
        claims.lease = Some(alive.unwrap_or_else(|| self.grant_for(time, ttl)));
        for (address, entry) in &self.claims {
            if Some(entry.lease) == claims.lease {
                self.claimed.insert(*address, (claims.node.clone(), time + ttl));
            }
        }
    }

    /// Writes the claim of `address` over what is of `revision`.
    pub(super) fn take_claim(
        &mut self,
        claims: &Claims,
        address: IpAddr,
        revision: i64,
        time: Duration,
    ) -> Result<i64, StoreError> {
        let found = self.claims.get(&address).map_or(0, |found| found.revision);
        let lease = claims.lease.filter(|lease| self.end_of(*lease).is_some());
        let Some(lease) = lease.filter(|_| found == revision) else {
            return Err(StoreError::Conflict(address.to_string()));
        };
        self.assert_free(&claims.node, address, time);
        self.revision += 1;
        self.remember();
        let entry = Claim { value: claims.node.to_json(), revision: self.revision, lease };
        self.claims.insert(address, entry);
        let until = self.end_of(lease).unwrap_or_default();
        self.claimed.insert(address, (claims.node.clone(), until));
        Ok(self.revision)
    }

    /// Whether what takes a subnet finds the claim as it was written.
    pub(super) fn is_claimed(&self, claimed: Option<(IpAddr, i64)>) -> bool {
        claimed.is_none_or(|(address, revision)| {
            self.claims.get(&address).is_some_and(|found| found.revision == revision)
        })
    }

    /// Of a node that runs: claims `address`. A claim of another address lapses.
    pub(super) fn keep_claim(
        &mut self,
        claims: &mut Claims,
        address: IpAddr,
        time: Duration,
    ) -> Result<(), StoreError> {
        if claims.is_of_before(address) {
            (claims.lease, claims.held) = (None, None);
        }
        self.keep_lease(claims, time);
        if let Some(revision) = claims.validate(address, self.claims.get(&address))? {
            let revision = self.take_claim(claims, address, revision, time)?;
            claims.written(address, revision);
        }
        Ok(())
    }

    /// Of a node that stops.
    pub(super) fn release_claims(&mut self, claims: &Claims) {
        if let Some(lease) = claims.lease {
            self.claimed.retain(|_, (holder, _)| !holder.is_same_as(&claims.node));
            self.revoke(lease);
        }
    }

    /// The observer: nobody takes an address that another machine claims.
    pub(super) fn assert_free(&self, node: &NodeIdentity, address: IpAddr, time: Duration) {
        let other = self.claimed.get(&address);
        let other = other.filter(|(holder, until)| !holder.is_same_as(node) && *until > time);
        assert!(other.is_none(), "{node:?} takes {address}, which {other:?} has");
    }
}
