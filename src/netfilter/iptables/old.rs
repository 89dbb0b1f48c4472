//! What flannel 0.12 left: rules without a comment in the kernel's own chains. They are known by
//! their masquerade rules, which nobody else writes for one network like that.

use crate::netfilter::rules::{Rule, Side, Verdict, multicast};
use crate::route::Prefix;

/// The networks for which all four rules of such a flannel are among `plain` of nat's POSTROUTING.
pub(super) fn networks(plain: &[(String, Rule)]) -> Vec<Prefix> {
    let inside = plain.iter().filter_map(|(_, rule)| match (rule.source, rule.destination) {
        (Some(Side::In(source)), Some(Side::In(destination))) if source == destination => {
            Some(source)
        }
        _ => None,
    });
    let has = |wanted: &dyn Fn(&Rule) -> bool| plain.iter().any(|(_, rule)| wanted(rule));
    let is_whole =
        |network: &Prefix| (0..4).all(|number| has(&|rule| is_number(number, rule, *network)));
    inside.filter(is_whole).collect()
}

/// Those of `plain` that such a flannel set for one of `networks`.
pub(super) fn leftovers<'f>(
    plain: &'f [(String, Rule)],
    networks: &[Prefix],
) -> impl Iterator<Item = &'f str> {
    let is_old = |rule: &Rule| {
        networks.iter().any(|network| (0..6).any(|number| is_number(number, rule, *network)))
    };
    plain.iter().filter(move |(_, rule)| is_old(rule)).map(|(text, _)| text.as_str())
}

/// Whether `rule` is the one with this number: four of nat, in their order, then two of filter.
fn is_number(number: usize, rule: &Rule, network: Prefix) -> bool {
    let (inside, outside) = (Some(Side::In(network)), Some(Side::NotIn(network)));
    let ends = (rule.source, rule.destination);
    let is_masquerade = matches!(rule.verdict, Verdict::Masquerade { .. });
    !rule.only_marked
        && match number {
            0 => ends == (inside, inside) && rule.verdict == Verdict::Return,
            1 => ends == (inside, Some(Side::NotIn(multicast()))) && is_masquerade,
            2 => {
                let subnet = |side| matches!(side, Some(Side::In(to)) if network.covers(to));
                ends.0 == outside && subnet(ends.1) && rule.verdict == Verdict::Return
            }
            3 => ends == (outside, inside) && is_masquerade,
            4 => ends == (inside, None) && rule.verdict == Verdict::Accept,
            _ => ends == (None, inside) && rule.verdict == Verdict::Accept,
        }
}
