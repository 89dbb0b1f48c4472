//! The ways to the peers and back, as this host's routes, rules and source check have them.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::super::facts::{CheckedFamily, Facts, Filter, PeerWay, Resolved};
use super::super::finding::{Checked, failed, skipped, together, warning};
use super::routes::has_no_foreign;
use crate::backend_kind::BackendKind;

const NO_WAYS: &str = "weftd says no interface or no peers, or the kernel no routes";

pub(super) fn to_peers(facts: &Facts) -> Checked {
    together(to_peers_of::<Ipv4Addr>(facts), to_peers_of::<Ipv6Addr>(facts))
        .unwrap_or_else(|| skipped(NO_WAYS))
}

fn to_peers_of<A: CheckedFamily>(facts: &Facts) -> Option<Checked> {
    let datagrams: fn(&PeerWay<A>) -> Option<&str> = |way| way.to_refused.as_deref();
    // A route that takes the pods' packets has a check of its own.
    let refused = if has_no_foreign::<A>(facts) { to_refused } else { datagrams };
    judge(facts, refused, "can't be sent to")
}

pub(super) fn from_peers(facts: &Facts) -> Checked {
    let what = "are refused where they come in";
    let of_v4 = judge::<Ipv4Addr>(facts, from_refused, what);
    together(of_v4, judge::<Ipv6Addr>(facts, from_refused, what))
        .unwrap_or_else(|| skipped(NO_WAYS))
}

/// Of a tunnel's datagrams, or of what pods send, which go by routes of their own.
fn to_refused<A: CheckedFamily>(way: &PeerWay<A>) -> Option<&str> {
    way.to_refused.as_deref().or(way.own_pods_end.as_deref())
}

/// Of a peer that is well, packets come by another interface; it may be well, and no pod there.
fn from_refused<A: CheckedFamily>(way: &PeerWay<A>) -> Option<&str> {
    let own = way.from_refused.as_deref().filter(|_| way.is_alarming);
    own.or(way.pods_refused.as_deref())
}

/// Those to which one of both ways is refused; nothing if there are none of the family.
fn judge<A: CheckedFamily>(
    facts: &Facts,
    refused: fn(&PeerWay<A>) -> Option<&str>,
    what: &str,
) -> Option<Checked> {
    let (ways, ip) = (&A::facts(facts).ways, A::NAME.replace("IPv", "ip -"));
    let all = ways.len();
    let found: Vec<_> = ways.iter().filter_map(|way| Some((way.host, refused(way)?))).collect();
    let Some((host, why)) = found.first() else {
        return (all > 0).then(|| Ok(format!("{all} peers asked about, by {}", A::NAME)));
    };
    // IPv6 has no source check of its own.
    let and = if A::BITS == 32 { ", and net.ipv4.conf.*.rp_filter" } else { "" };
    Some(failed(
        format!("{} of {all} peers {what}, such as {host}: {why}", found.len()),
        format!("See `{ip} rule`, `{ip} route get {host}`, `{ip} address`{and}."),
    ))
}

const UNASKED: &str = "nobody could be asked by ARP on the external link";

/// Two machines with one address of the underlay, or one that answers by two of its links.
pub(super) fn addresses(facts: &Facts) -> Checked {
    let resolved = facts.resolved.as_ref().ok_or(UNASKED)?;
    let many = |it: &&Resolved| it.answers.len() > usize::from(!it.is_own);
    let Some(Resolved { address, is_own, answers, .. }) = resolved.iter().find(many) else {
        return Ok(format!("{} addresses asked about", resolved.len()));
    };
    let macs: Vec<_> = answers.iter().map(ToString::to_string).collect();
    let (whose, who) = match is_own {
        true => ("this host's address", "somebody else"),
        false => ("the peer's address", "several hardware addresses"),
    };
    warning(
        format!("{whose} {address} is answered for by {who}: {}", macs.join(", ")),
        "Find who they are (`ip link` on the hosts, the switch): of two machines give one another \
         address; one machine with two links in this network may answer by both.",
    )
}

/// Entries that somebody set, where another machine answers.
pub(super) fn neighbours(facts: &Facts) -> Checked {
    let resolved = facts.resolved.as_ref().ok_or(UNASKED)?;
    let wrong = resolved.iter().find_map(|Resolved { address, answers, permanent, .. }| {
        let (entry, right) = (permanent.as_ref()?, answers.first()?);
        (!answers.contains(entry)).then_some((address, entry, right))
    });
    match wrong {
        None => Ok("none that is known to be wrong".to_owned()),
        Some((address, entry, right)) => failed(
            format!("the permanent entry of {address} has {entry}, and {right} answers for it"),
            format!("`ip neighbour delete {address} dev ...`; who set it, and does so again?"),
        ),
    }
}

pub(super) fn filters(facts: &Facts) -> Checked {
    let shown = |is_meant: fn(&Filter) -> bool| {
        let meant = facts.filters.iter().filter(|it| is_meant(it));
        meant.map(|it| it.text.as_str()).collect::<Vec<_>>().join(", ")
    };
    let (all, acting) = (shown(|_| true), shown(|it| it.has_action));
    if all.is_empty() {
        return Ok("none of others on the external link and the overlay's device".to_owned());
    }
    let cure = "`tc -s qdisc`, `tc -s filter show dev NAME egress` (or ingress) and `ip -d link` \
                show them and what they dropped: is it meant for these packets?";
    let is_host_gw = facts.backend() == Some(BackendKind::HostGw);
    match facts.alarming().next() {
        Some(host) => {
            warning(format!("{host} does not answer as it should, and there are: {all}"), cure)
        }
        // Its echoes are between the hosts, so what takes the pods' packets alone is no alarm.
        None if is_host_gw && !acting.is_empty() => {
            warning(format!("what pods send passes these, which may drop it: {acting}"), cure)
        }
        None => Ok(format!("there are some, and no peer is in an alarm: {all}")),
    }
}
