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
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const THERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
    const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 3);

    /// Claims in a store of one revision per write.
    #[derive(Default)]
    struct Store {
        claims: BTreeMap<Ipv4Addr, (i64, Vec<u8>)>,
        revision: i64,
        numbers: u64,
    }

    impl Store {
        fn terms(&mut self, ledger: &mut Ledger, target: &Claim) -> Terms {
            ledger.terms(target, || {
                self.numbers += 1;
                self.numbers
            })
        }

        /// One transaction, as it arrives. Whether it happened.
        fn carry_out(&mut self, target: &Claim, terms: &Terms) -> bool {
            let same = |claim: &Claim| match self.claims.get(&claim.public_ip) {
                None => claim.revision == 0,
                Some((revision, value)) => (*revision, value) == (claim.revision, &claim.value),
            };
            if !terms.unchanged.iter().all(same) {
                return false;
            }
            self.revision += 1;
            self.claims.retain(|public_ip, _| !terms.delete.contains(public_ip));
            if let Some(value) = &terms.put {
                self.claims.insert(target.public_ip, (self.revision, value.clone()));
            }
            true
        }

        fn show(
            &self,
            ledger: &mut Ledger,
            to: Option<Ipv4Addr>,
            look: &[Ipv4Addr],
        ) -> Result<Option<Claim>, StoreError> {
            let entry = |public_ip: &Ipv4Addr| {
                let (revision, value) = self.claims.get(public_ip)?;
                Some(ClaimEntry { value, revision: *revision, lease: 7 })
            };
            let shown: Vec<_> = look.iter().map(|ip| (*ip, entry(ip))).collect();
            ledger.see(to, &shown)
        }

        /// A write for the address `to`, tried again as long as something is otherwise.
        fn write(&mut self, ledger: &mut Ledger, to: Ipv4Addr) -> Result<(), StoreError> {
            let mut target = ledger.target(Some(to)).unwrap();
            for _ in 0..3 {
                let terms = self.terms(ledger, &target);
                if self.carry_out(&target, &terms) {
                    ledger.written(target, terms, self.revision);
                    return Ok(());
                }
                target = self.show(ledger, Some(to), &terms.look)?.unwrap();
            }
            panic!("the claims never are as they were just seen");
        }

        fn at(&self) -> Vec<Ipv4Addr> {
            self.claims.keys().copied().collect()
        }
    }

    fn ledger(boot_id: &str) -> Ledger {
        let (hostname, boot_id) = ("a".to_owned(), boot_id.to_owned());
        let mut ledger = Ledger::of(NodeIdentity { hostname, machine_id: None, boot_id });
        assert!(ledger.claim(HERE) && !ledger.claim(HERE));
        ledger
    }

    #[test]
    fn a_move_takes_the_claim_along_and_leaves_the_address_to_others() {
        let (mut store, mut node, mut other) = (Store::default(), ledger("1"), ledger("2"));
        store.write(&mut node, HERE).unwrap();
        store.write(&mut other, HERE).expect_err("two nodes share an address");
        store.write(&mut node, THERE).unwrap();
        assert_eq!(store.at(), [THERE], "the address of before is nobody's");
        store.write(&mut other, HERE).expect("the address that the node left is free");
        store.write(&mut node, THERE).expect("the address of before is no concern");
        let refusal = store.write(&mut node, HERE).unwrap_err();
        assert!(matches!(refusal, StoreError::Duplicate { public_ip: HERE, .. }), "{refusal}");
    }

    #[test]
    fn whoever_lost_its_claim_finds_out_when_it_moves() {
        for successor in ["a copy of the machine, with this boot", "another node, as it lapsed"] {
            let boot_id = if successor.starts_with("a copy") { "1" } else { "2" };
            let (mut store, mut node, mut other) = (Store::default(), ledger("1"), ledger(boot_id));
            store.write(&mut node, HERE).unwrap();
            if boot_id == "2" {
                store.claims.clear();
            }
            store.write(&mut other, HERE).unwrap();
            let before = store.claims.clone();
            let refusal = store.write(&mut node, THERE).expect_err(successor);
            assert!(matches!(refusal, StoreError::Duplicate { public_ip: HERE, .. }), "{refusal}");
            assert_eq!(store.claims, before, "it took the subnet along from {successor}");
        }
    }

    /// A move without an answer, which went in or did not.
    fn moved_without_answer(went_in: bool) -> (Store, Ledger) {
        let (mut store, mut node) = (Store::default(), ledger("1"));
        store.write(&mut node, HERE).unwrap();
        let target = node.target(Some(THERE)).unwrap();
        let terms = store.terms(&mut node, &target);
        if went_in {
            assert!(store.carry_out(&target, &terms));
        }
        node.unanswered(target);
        (store, node)
    }

    #[test]
    fn a_move_without_an_answer_is_found_where_it_went() {
        for went_in in [false, true] {
            for to in [HERE, THERE, ELSEWHERE] {
                let (mut store, mut node) = moved_without_answer(went_in);
                store.write(&mut node, to).expect("it refuses itself");
                assert_eq!(store.at(), [to], "went in: {went_in}");
            }
        }
        // Whoever has the address that it left by then is no concern.
        let (mut store, mut node) = moved_without_answer(true);
        store.write(&mut ledger("2"), HERE).unwrap();
        let look: Vec<_> = node.known().iter().map(|claim| claim.public_ip).collect();
        let seen = store.show(&mut node, None, &look).expect("it is not there any more").unwrap();
        assert!(seen.is_ours && seen.public_ip == THERE);
        // Nor is the address to which it did not go.
        let (mut store, mut node) = moved_without_answer(false);
        let mut other = ledger("2");
        other.claim(THERE);
        store.write(&mut other, THERE).unwrap();
        store.write(&mut node, HERE).expect("it never was there");
    }

    #[test]
    fn a_copy_that_took_the_claim_after_a_move_without_an_answer_keeps_it() {
        for to in [HERE, THERE, ELSEWHERE] {
            let (mut store, mut node) = moved_without_answer(true);
            let mut copy = ledger("1");
            copy.claim(THERE);
            store.write(&mut copy, THERE).unwrap();
            let before = store.claims.clone();
            store.write(&mut node, to).expect_err("two copies own one subnet");
            assert_eq!(store.claims, before, "its claim was stolen back by a write for {to}");
        }
    }

    #[test]
    fn a_move_that_was_given_up_does_not_go_in_after_the_next_write() {
        let (mut store, mut node) = (Store::default(), ledger("1"));
        store.write(&mut node, HERE).unwrap();
        let target = node.target(Some(THERE)).unwrap();
        let late = store.terms(&mut node, &target);
        node.unanswered(target.clone());
        store.write(&mut node, HERE).unwrap();
        assert!(!store.carry_out(&target, &late), "the claim moves by itself");
        // And one that goes in before it is found.
        let (mut store, mut node) = moved_without_answer(true);
        node.renumber();
        let target = node.target(None).unwrap();
        let terms = store.terms(&mut node, &target);
        assert!(!store.carry_out(&target, &terms), "it holds two addresses");
        let seen = store.show(&mut node, None, &terms.look).unwrap().unwrap();
        assert_eq!(seen.public_ip, THERE);
    }

    #[test]
    fn a_lapsed_claim_is_taken_again_unless_a_move_of_it_may_have_gone_in() {
        let (mut store, mut node) = (Store::default(), ledger("1"));
        store.write(&mut node, HERE).unwrap();
        store.claims.clear();
        node.lapsed();
        store.write(&mut node, HERE).expect("it was nobody's");
        let (mut store, mut node) = moved_without_answer(true);
        node.lapsed();
        let target = node.target(None).unwrap();
        let terms = store.terms(&mut node, &target);
        assert!(!store.carry_out(&target, &terms), "it holds two addresses");
    }

    #[test]
    fn moves_without_answers_are_remembered_up_to_a_bound() {
        let mut node = ledger("1");
        for last in 0..=u8::MAX {
            let target = node.target(Some(Ipv4Addr::new(198, 51, 100, last))).unwrap();
            node.unanswered(target.clone());
            node.unanswered(target);
        }
        assert_eq!(node.known().len(), 1 + TRIED_MAX, "a flapping address fills the memory");
    }
}
