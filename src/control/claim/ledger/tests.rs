//! The ledger against a store of its own, in which two runs contend.

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
