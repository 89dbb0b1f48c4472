//! The comparison as a law: applied, a repair leaves nothing to repair, repeats nothing, and takes
//! nothing of others away.

use proptest::prelude::*;

use super::*;
use crate::netfilter::rules::{Family, Purpose, Side, Verdict, Wanted};
use crate::route::Prefix;

fn wanted(network: &str, subnet: &str) -> Vec<Rule> {
    let wanted = Wanted {
        networks: network.parse().unwrap(),
        subnets: subnet.parse().unwrap(),
        masquerade: true,
        forward: false,
        random_ports: true,
    };
    wanted.chains(Family::V4).remove(Purpose::Masquerade as usize).1
}

fn ours() -> Vec<Rule> {
    wanted("10.5.0.0/16", "10.5.3.0/24")
}

fn theirs() -> Vec<Rule> {
    wanted("10.6.0.0/16", "10.6.9.0/24")
}

/// What a chain with the rules `found` needs; rules are known by their places.
fn compare(wanted: &[Rule], found: &[Option<Rule>], trigger: Trigger) -> Repair<usize> {
    let places = ListedChain { exists: true, rules: (0..found.len()).collect() };
    super::compare(wanted, &places, |rule, place| found[*place] == Some(*rule), trigger)
}

fn is_nothing(repair: &Repair<usize>) -> bool {
    !repair.is_refilled && repair.remove.is_empty() && repair.append.is_empty()
}

/// What a kernel has after the repair.
fn apply(repair: &Repair<usize>, found: &[Option<Rule>]) -> Vec<Option<Rule>> {
    let stays = |at: &usize| !repair.is_refilled && !repair.remove.contains(at);
    let kept = (0..found.len()).filter(stays).map(|at| found[at]);
    kept.chain(repair.append.iter().copied().map(Some)).collect()
}

fn some(rules: &[Rule]) -> Vec<Option<Rule>> {
    rules.iter().copied().map(Some).collect()
}

#[test]
fn complete_chain_needs_no_repair() {
    for trigger in [Trigger::Start, Trigger::Resync] {
        assert!(is_nothing(&compare(&ours(), &some(&ours()), trigger)));
    }
}

#[test]
fn damaged_own_chain_is_refilled() {
    let gap = some(&ours()[1..]);
    let twice = [some(&ours()), some(&ours()[4..5])].concat();
    let swapped = some(&[&ours()[1..], &ours()[..1]].concat());
    for found in [vec![], gap, twice, swapped] {
        let repair = compare(&ours(), &found, Trigger::Resync);
        assert!(repair.is_refilled && repair.append == ours(), "{found:?}");
    }
}

#[test]
fn start_removes_rules_of_another_network() {
    let found = [some(&theirs()), some(&ours())].concat();
    assert!(compare(&ours(), &found, Trigger::Start).is_refilled);
    assert!(is_nothing(&compare(&ours(), &found, Trigger::Resync)));
}

#[test]
fn two_daemons_in_one_chain_converge() {
    // The second has just emptied the chain for itself.
    let mut chain = some(&theirs());
    for _ in 0..2 {
        let repair = compare(&ours(), &chain, Trigger::Resync);
        chain = apply(&repair, &chain);
        assert!(is_nothing(&compare(&theirs(), &chain, Trigger::Resync)));
        assert!(is_nothing(&compare(&ours(), &chain, Trigger::Resync)));
    }
    assert_eq!(chain.len(), theirs().len() + ours().len() - 1, "they share the mark's rule");
}

fn any_found() -> impl Strategy<Value = Vec<Option<Rule>>> {
    let elsewhere = "192.0.2.0/24".parse::<Prefix>().unwrap().into();
    let foreign = Rule { source: Some(Side::In(elsewhere)), ..Rule::all(Verdict::Accept) };
    let known: Vec<_> = ours().into_iter().chain(theirs()).chain([foreign]).map(Some).collect();
    let one = proptest::sample::select([known, vec![None, None]].concat());
    proptest::collection::vec(one, 0..20)
}

proptest! {
    #[test]
    fn one_repair_is_enough(found in any_found(), first in any::<bool>()) {
        let trigger = if first { Trigger::Start } else { Trigger::Resync };
        let repair = compare(&ours(), &found, trigger);
        let after = apply(&repair, &found);
        for again in [trigger, Trigger::Resync] {
            prop_assert!(is_nothing(&compare(&ours(), &after, again)), "{:?}", after);
        }
        let own = |rule: &&Option<Rule>| rule.is_some_and(|rule| ours()[1..].contains(&rule));
        let ours_after: Vec<_> = after.iter().filter(own).copied().collect();
        prop_assert_eq!(ours_after, some(&ours()[1..]), "each once and in order");
        if trigger == Trigger::Resync {
            let others = |rules: &[Option<Rule>]| -> Vec<_> {
                let other = |rule: &&Option<Rule>| !rule.is_some_and(|rule| ours().contains(&rule));
                rules.iter().filter(other).copied().collect()
            };
            prop_assert_eq!(others(&after), others(&found), "rules of others stay as they were");
        }
    }
}
