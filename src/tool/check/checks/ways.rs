//! The ways to the peers and back, as this host's routes, rules and source check have them.

use super::super::facts::{Facts, PeerWay};
use super::super::finding::{Checked, failed, skipped};

pub(super) fn to_peers(facts: &Facts) -> Checked {
    judge(facts, |way| way.to_refused.as_deref(), "can't be sent to")
}

pub(super) fn from_peers(facts: &Facts) -> Checked {
    judge(facts, |way| way.from_refused.as_deref(), "are refused where they come in")
}

/// Those to which one of both ways is refused.
fn judge(facts: &Facts, refused: fn(&PeerWay) -> Option<&str>, what: &str) -> Checked {
    let all = facts.ways.len();
    let each = facts.ways.iter().filter_map(|way| Some((way.host, refused(way)?)));
    let found: Vec<_> = each.collect();
    match found.first() {
        None if all == 0 => skipped("weftd says no interface or no peers, or the kernel no routes"),
        None => Ok(format!("{all} peers asked about")),
        Some((host, why)) => failed(
            format!("{} of {all} peers {what}, such as {host}: {why}", found.len()),
            format!("See `ip rule`, `ip route get {host}` and net.ipv4.conf.*.rp_filter."),
        ),
    }
}
