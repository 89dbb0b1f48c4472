//! The comparison as a law: applied, a repair leaves nothing to repair, repeats nothing, and takes
//! nothing of others away.

use proptest::prelude::*;

use super::*;
use crate::netfilter::rules::{Purpose, Side, Verdict, Wanted};
use crate::route::Prefix;

fn prefix(text: &str) -> Prefix {
    text.parse().unwrap()
}

fn wanted(network: &str, subnet: &str) -> Vec<Rule> {
    let wanted = Wanted {
        network: prefix(network),
        subnet: prefix(subnet),
        masquerade: true,
        forward: false,
        random_ports: true,
    };
    wanted.chains().remove(Purpose::Masquerade.index()).1
}

fn ours() -> Vec<Rule> {
    wanted("10.5.0.0/16", "10.5.3.0/24")
}

fn theirs() -> Vec<Rule> {
    wanted("10.6.0.0/16", "10.6.9.0/24")
}

/// What a kernel has after the repair.
fn apply(repair: &Repair, wanted: &[Rule], found: &[Option<Rule>]) -> Vec<Option<Rule>> {
    match repair {
        Repair::Nothing => found.to_vec(),
        Repair::Refill => wanted.iter().copied().map(Some).collect(),
        Repair::Amend { remove, append } => {
            let kept = (0..found.len()).filter(|at| !remove.contains(at)).map(|at| found[at]);
            kept.chain(append.iter().copied().map(Some)).collect()
        }
    }
}

fn some(rules: &[Rule]) -> Vec<Option<Rule>> {
    rules.iter().copied().map(Some).collect()
}

#[test]
fn what_is_right_is_left_alone() {
    for pass in [Pass::First, Pass::Check] {
        assert_eq!(compare(&ours(), &some(&ours()), pass), Repair::Nothing);
    }
}

#[test]
fn a_flush_a_gap_and_a_repetition_of_our_own_chain_are_refilled() {
    let gap = some(&ours()[1..]);
    let twice = [some(&ours()), some(&ours()[4..5])].concat();
    let swapped = some(&[&ours()[1..], &ours()[..1]].concat());
    for found in [vec![], gap, twice, swapped] {
        assert_eq!(compare(&ours(), &found, Pass::Check), Repair::Refill, "{found:?}");
    }
}

#[test]
fn the_first_pass_takes_out_what_an_earlier_network_left() {
    let found = [some(&theirs()), some(&ours())].concat();
    assert_eq!(compare(&ours(), &found, Pass::First), Repair::Refill);
    assert_eq!(compare(&ours(), &found, Pass::Check), Repair::Nothing);
}

#[test]
fn two_daemons_in_one_chain_come_to_rest() {
    // The second has just emptied the chain for itself.
    let mut chain = some(&theirs());
    for _ in 0..2 {
        let repair = compare(&ours(), &chain, Pass::Check);
        chain = apply(&repair, &ours(), &chain);
        assert_eq!(compare(&theirs(), &chain, Pass::Check), Repair::Nothing);
        assert_eq!(compare(&ours(), &chain, Pass::Check), Repair::Nothing);
    }
    assert_eq!(chain.len(), theirs().len() + ours().len() - 1, "they share the mark's rule");
}

fn any_found() -> impl Strategy<Value = Vec<Option<Rule>>> {
    let foreign =
        Rule { source: Some(Side::In(prefix("192.0.2.0/24"))), ..Rule::all(Verdict::Accept) };
    let known: Vec<_> = ours().into_iter().chain(theirs()).chain([foreign]).map(Some).collect();
    let one = proptest::sample::select([known, vec![None, None]].concat());
    proptest::collection::vec(one, 0..20)
}

proptest! {
    #[test]
    fn a_repair_leaves_nothing_to_repair(found in any_found(), first in any::<bool>()) {
        let pass = if first { Pass::First } else { Pass::Check };
        let repair = compare(&ours(), &found, pass);
        let after = apply(&repair, &ours(), &found);
        for again in [pass, Pass::Check] {
            prop_assert_eq!(compare(&ours(), &after, again), Repair::Nothing, "{:?}", after);
        }
        let own = |rule: &&Option<Rule>| rule.is_some_and(|rule| ours()[1..].contains(&rule));
        let ours_after: Vec<_> = after.iter().filter(own).copied().collect();
        prop_assert_eq!(ours_after, some(&ours()[1..]), "each once and in order");
        if pass == Pass::Check {
            let others = |rules: &[Option<Rule>]| -> Vec<_> {
                let other = |rule: &&Option<Rule>| !rule.is_some_and(|rule| ours().contains(&rule));
                rules.iter().filter(other).copied().collect()
            };
            prop_assert_eq!(others(&after), others(&found), "rules of others stay as they were");
        }
    }
}
