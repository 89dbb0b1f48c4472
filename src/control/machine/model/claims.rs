//! Claiming PublicIPs in the simulated store, by the same rules as in etcd. And an observer who
//! knows how long each claim lives.

use std::net::Ipv4Addr;
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
    held: Option<(Ipv4Addr, i64)>,
    /// Whether it was told last that another node has its address.
    pub(super) is_alarmed: bool,
}

impl Claims {
    pub(super) fn of(node: NodeIdentity) -> Self {
        Self { node, lease: None, held: None, is_alarmed: false }
    }

    /// Whether another address is claimed: the node has moved to `public_ip`.
    pub(super) fn is_of_before(&self, public_ip: Ipv4Addr) -> bool {
        self.held.is_some_and(|(held, _)| held != public_ip)
    }

    /// The revision with which what takes a subnet for `public_ip` compares.
    pub(super) fn still_claimed(&self, public_ip: Ipv4Addr) -> Option<(Ipv4Addr, i64)> {
        self.held.filter(|(held, _)| *held == public_ip)
    }

    /// The revision over which the claim of `public_ip` may be written, if the store shows `found`;
    /// none if it is this run's already.
    pub(super) fn validate(
        &mut self,
        public_ip: Ipv4Addr,
        found: Option<&Claim>,
    ) -> Result<Option<i64>, StoreError> {
        let revision = found.map_or(0, |found| found.revision);
        let shown = found.map(|found| (found.value.as_slice(), found.lease));
        let is_ours = self.node.validate(public_ip, shown, self.lease, self.held.is_some())?;
        if is_ours {
            self.held = Some((public_ip, revision));
        }
        Ok((!is_ours).then_some(revision))
    }

    /// The claim of `public_ip` was written in this revision.
    pub(super) fn written(&mut self, public_ip: Ipv4Addr, revision: i64) {
        self.held = Some((public_ip, revision));
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
        for (public_ip, entry) in &self.claims {
            if Some(entry.lease) == claims.lease {
                self.claimed.insert(*public_ip, (claims.node.clone(), time + ttl));
            }
        }
    }

    /// Writes the claim of `public_ip` over what is of `revision`.
    pub(super) fn take_claim(
        &mut self,
        claims: &Claims,
        public_ip: Ipv4Addr,
        revision: i64,
        time: Duration,
    ) -> Result<i64, StoreError> {
        let found = self.claims.get(&public_ip).map_or(0, |found| found.revision);
        let lease = claims.lease.filter(|lease| self.end_of(*lease).is_some());
        let Some(lease) = lease.filter(|_| found == revision) else {
            return Err(StoreError::Conflict(public_ip.to_string()));
        };
        self.assert_free(&claims.node, public_ip, time);
        self.revision += 1;
        self.remember();
        let entry = Claim { value: claims.node.to_json(), revision: self.revision, lease };
        self.claims.insert(public_ip, entry);
        let until = self.end_of(lease).unwrap_or_default();
        self.claimed.insert(public_ip, (claims.node.clone(), until));
        Ok(self.revision)
    }

    /// Whether what takes a subnet finds the claim as it was written.
    pub(super) fn is_claimed(&self, claimed: Option<(Ipv4Addr, i64)>) -> bool {
        claimed.is_none_or(|(public_ip, revision)| {
            self.claims.get(&public_ip).is_some_and(|found| found.revision == revision)
        })
    }

    /// Of a node that runs: claims `public_ip`. A claim of another address lapses.
    pub(super) fn keep_claim(
        &mut self,
        claims: &mut Claims,
        public_ip: Ipv4Addr,
        time: Duration,
    ) -> Result<(), StoreError> {
        if claims.is_of_before(public_ip) {
            (claims.lease, claims.held) = (None, None);
        }
        self.keep_lease(claims, time);
        if let Some(revision) = claims.validate(public_ip, self.claims.get(&public_ip))? {
            let revision = self.take_claim(claims, public_ip, revision, time)?;
            claims.written(public_ip, revision);
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
    pub(super) fn assert_free(&self, node: &NodeIdentity, public_ip: Ipv4Addr, time: Duration) {
        let other = self.claimed.get(&public_ip);
        let other = other.filter(|(holder, until)| !holder.is_same_as(node) && *until > time);
        assert!(other.is_none(), "{node:?} takes {public_ip}, which {other:?} has");
    }
}
