//! Compares the wanted rules of a chain with those found, and gives the smallest repair. Pure.
//!
//! Several daemons on one host, one for each network, share flannel's chains. So a resync leaves
//! unknown rules alone; only the start of a daemon removes them.

use crate::netfilter::rules::Rule;

/// Why the rules are compared, which decides what happens to unknown ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// A daemon starts: rules of an earlier run or of another network are removed.
    Start,
    /// A daemon starts beside those of other networks, whose rules stay.
    StartBesideOthers,
    /// The periodic check: missing rules are restored, nothing else changes.
    Resync,
}

/// A chain as it was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedChain<K> {
    /// Whether it is there.
    pub exists: bool,
    /// Its rules, as the firewall prints them.
    pub rules: Vec<K>,
}

/// What a chain needs, in this order; nothing if it is as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair<K> {
    /// It is made, or emptied if it is there.
    pub is_refilled: bool,
    /// Rules to remove.
    pub remove: Vec<K>,
    /// Rules to append.
    pub append: Vec<Rule>,
}

/// Compares `wanted` with `found`, where `is_printed_as` says which rule is which.
pub fn compare<K: Clone>(
    wanted: &[Rule],
    found: &ListedChain<K>,
    is_printed_as: impl Fn(&Rule, &K) -> bool,
    trigger: Trigger,
) -> Repair<K> {
    let nothing = Repair { is_refilled: false, remove: Vec::new(), append: Vec::new() };
    let known = |printed| wanted.iter().find(|rule| is_printed_as(rule, printed)).copied();
    // `None` for one of others.
    let rules: Vec<_> = found.rules.iter().map(known).collect();
    if found.exists && rules == wanted.iter().copied().map(Some).collect::<Vec<_>>() {
        return nothing;
    }
    if !found.exists || trigger == Trigger::Start || rules.iter().all(Option::is_some) {
        return Repair { is_refilled: true, append: wanted.to_vec(), ..nothing };
    }
    if is_in_order(wanted, &rules) {
        return nothing;
    }
    // Rules of others stay; ours go to the end, in their order.
    let own = |rule: &Option<Rule>| rule.is_some_and(|rule| !rule.is_shared());
    let own = found.rules.iter().zip(&rules).filter(|(_, rule)| own(rule));
    let remove = own.map(|(printed, _)| printed.clone()).collect();
    let stays = |rule: &&Rule| rule.is_shared() && rules.contains(&Some(**rule));
    let append = wanted.iter().filter(|rule| !stays(rule)).copied().collect();
    Repair { remove, append, ..nothing }
}

/// Whether all of `wanted` is in `found`, one after the other, and what is ours alone only once.
fn is_in_order(wanted: &[Rule], found: &[Option<Rule>]) -> bool {
    let mut rest = found.iter();
    let all = wanted.iter().all(|rule| rest.any(|found| *found == Some(*rule)));
    let once = |rule: &Rule| found.iter().filter(|found| **found == Some(*rule)).count() == 1;
    all && wanted.iter().all(|rule| rule.is_shared() || once(rule))
}

#[cfg(test)]
mod tests;
