//! What one run knows of its claims, and what each write of its entry asks of them, so that no
//! write goes in once another run has the claim. Pure: a store carries it out, and shows what it
//! has if that is something else.
//!
//! A node that moves takes its claim along: the write that tells its new address takes the claim of
//! that, gives up the other, and compares both. Without an answer it may be at either.

use std::net::Ipv4Addr;

use super::{Claim, ClaimEntry, Claimant, NodeIdentity};
use crate::control::store::StoreError;

/// Most addresses remembered of moves without an answer. Who moves more often while the store is
/// away is told of a copy by the entry alone.
const TRIED_MAX: usize = 16;

/// The claims of one run.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    claimant: Claimant,
    /// The claim that the entry is written with.
    current: Option<Claim>,
    /// Where moves without an answer may have brought it.
    tried: Vec<Claim>,
}

/// What one transaction asks of the claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Terms {
    /// It happens only if these are as they were seen.
    pub(crate) unchanged: Vec<Claim>,
    /// What is written as the claim of the target, if that is not the node's own already.
    pub(crate) put: Option<Vec<u8>>,
    /// What is given up with it.
    pub(crate) delete: Vec<Ipv4Addr>,
    /// What to read if one of them is not.
    pub(crate) look: Vec<Ipv4Addr>,
}

impl Ledger {
    pub(crate) fn of(node: NodeIdentity) -> Self {
        Self { claimant: Claimant::of(node), current: None, tried: Vec::new() }
    }

    /// From now on the entry is written with the claim of `public_ip`. Whether that is another than
    /// before.
    pub(crate) fn claim(&mut self, public_ip: Ipv4Addr) -> bool {
        let is_other = self.current.as_ref().is_none_or(|claim| claim.public_ip != public_ip);
        if is_other {
            (self.current, self.tried) = (Some(Claim::unseen(public_ip)), Vec::new());
        }
        is_other
    }

    /// The claim that the entry is written with.
    pub(crate) fn current(&self) -> Option<&Claim> {
        self.current.as_ref()
    }

    /// All claims of which one may be the entry's, as they were seen.
    pub(crate) fn known(&self) -> Vec<Claim> {
        self.current.iter().chain(&self.tried).cloned().collect()
    }

    /// The claim to write with: of `to`, or where the entry is.
    pub(crate) fn target(&self, to: Option<Ipv4Addr>) -> Option<Claim> {
        let Some(to) = to else { return self.current.clone() };
        let known = self.current.iter().chain(&self.tried).find(|claim| claim.public_ip == to);
        Some(known.cloned().unwrap_or_else(|| Claim::unseen(to)))
    }

    /// What a write with the claim `target` asks; `draw` gives a number that nobody else draws.
    pub(crate) fn terms(&mut self, target: &Claim, draw: impl FnOnce() -> u64) -> Terms {
        // With another number, no move that got no answer can go in after this.
        let is_new = !target.is_ours || !self.tried.is_empty();
        let put = is_new.then(|| self.claimant.value(draw));
        let unchanged = self.unchanged(target);
        let left = unchanged.iter().skip(1).filter(|claim| claim.revision != 0);
        let delete = left.map(|claim| claim.public_ip).collect();
        let mut look: Vec<_> = self.known().iter().map(|claim| claim.public_ip).collect();
        if !look.contains(&target.public_ip) {
            look.push(target.public_ip);
        }
        Terms { unchanged, put, delete, look }
    }

    /// The claims that a write with `target` compares, that one first. As long as the current one
    /// is ours, no other move of it went in.
    pub(crate) fn unchanged(&self, target: &Claim) -> Vec<Claim> {
        let is_here = self.current.as_ref().is_some_and(|claim| claim.is_ours);
        let tried = self.tried.iter().filter(|_| !is_here);
        let others = self.current.iter().chain(tried);
        let others = others.filter(|claim| claim.public_ip != target.public_ip);
        std::iter::once(target).chain(others).cloned().collect()
    }

    /// The number of the next write, ahead of it.
    #[cfg(test)]
    pub(crate) fn draw(&mut self, draw: impl FnOnce() -> u64) {
        self.claimant.number(draw);
    }

    /// The next write with the current claim gives it another number.
    pub(crate) fn renumber(&mut self) {
        if let Some(claim) = &mut self.current {
            claim.is_ours = false;
        }
    }

    /// The current claim is gone with its etcd lease.
    pub(crate) fn lapsed(&mut self) {
        if let Some(claim) = &mut self.current {
            *claim = Claim::unseen(claim.public_ip);
        }
    }

    /// The write with the claim `target` happened, in this revision.
    pub(crate) fn written(&mut self, target: Claim, terms: Terms, revision: i64) {
        let claim = match terms.put {
            Some(value) => {
                self.claimant.written(target.public_ip);
                Claim { revision, value, is_ours: true, ..target }
            }
            None => target,
        };
        (self.current, self.tried) = (Some(claim), Vec::new());
    }

    /// A write with the claim `target` got no answer, and may go in later.
    pub(crate) fn unanswered(&mut self, target: Claim) {
        let known = self.current.iter().chain(&self.tried);
        if known.map(|claim| claim.public_ip).any(|known| known == target.public_ip) {
            return;
        }
        if self.tried.len() == TRIED_MAX {
            self.tried.remove(0);
        }
        self.tried.push(target);
    }

    /// The store shows these claims, all that `Terms::look` has, or all `known` ones for a listing.
    /// Returns what to write with now, for the address `to` or where the entry is.
    pub(crate) fn see(
        &mut self,
        to: Option<Ipv4Addr>,
        shown: &[(Ipv4Addr, Option<ClaimEntry<'_>>)],
    ) -> Result<Option<Claim>, StoreError> {
        let entry = |public_ip: Ipv4Addr| {
            let found = shown.iter().find(|(shown, _)| *shown == public_ip);
            found.and_then(|(_, entry)| *entry)
        };
        if let Some(current) = self.current.as_ref().map(|claim| claim.public_ip) {
            let seen = self.claimant.judge(current, entry(current));
            if seen.as_ref().is_ok_and(|claim| claim.is_ours) {
                self.current = Some(seen?);
            } else {
                let tried = self.tried.iter().map(|claim| claim.public_ip);
                let tried: Vec<_> =
                    tried.map(|ip| self.claimant.judge_tried(ip, entry(ip))).collect();
                let moved = tried.iter().flatten().find(|claim| claim.is_ours);
                (self.current, self.tried) = match moved {
                    // Whose the address is that it left does not matter.
                    Some(moved) => (Some(moved.clone()), Vec::new()),
                    None => (Some(seen?), tried.into_iter().collect::<Result<_, _>>()?),
                };
            }
        }
        let current = self.current.as_ref();
        match to.filter(|to| current.is_none_or(|claim| claim.public_ip != *to)) {
            Some(to) => self.claimant.judge(to, entry(to)).map(Some),
            None => Ok(current.cloned()),
        }
    }
}

#[cfg(test)]
mod tests;
