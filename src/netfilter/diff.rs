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
    /// The periodic check: missing rules are restored, nothing else changes.
    Resync,
}

/// What a chain needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repair {
    /// It is as it should be.
    Nothing,
    /// It is emptied and gets all wanted rules.
    Refill,
    /// Rules of others stay; ours go to the end, in their order.
    Amend {
        /// Places in what was found.
        remove: Vec<usize>,
        /// The rules to append.
        append: Vec<Rule>,
    },
}

/// Compares `wanted` with `found`, where `None` is a rule that this module cannot parse.
#[must_use]
pub fn compare(wanted: &[Rule], found: &[Option<Rule>], trigger: Trigger) -> Repair {
    if found.iter().eq(wanted.iter().map(|rule| Some(*rule)).collect::<Vec<_>>().iter()) {
        return Repair::Nothing;
    }
    let is_ours = |found: &Option<Rule>| found.is_some_and(|rule| wanted.contains(&rule));
    if trigger == Trigger::Start || found.iter().all(is_ours) {
        return Repair::Refill;
    }
    if is_in_order(wanted, found) {
        return Repair::Nothing;
    }
    let own = |rule: &Option<Rule>| is_ours(rule) && rule.is_some_and(|rule| !rule.is_shared());
    let remove = (0..found.len()).filter(|at| own(&found[*at])).collect();
    let stays = |rule: &&Rule| rule.is_shared() && found.contains(&Some(**rule));
    let append = wanted.iter().filter(|rule| !stays(rule)).copied().collect();
    Repair::Amend { remove, append }
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
