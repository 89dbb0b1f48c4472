//! The ways to the peers and back, as this host's routes, rules and source check have them.

use std::net::Ipv4Addr;

use super::super::facts::{Facts, Way};
use super::super::finding::Finding;
use super::super::firewall::{Packet, SENT, dropped_by};
use super::kernel::no_firewall;
use super::network::external_name;

pub(super) fn to_peers(facts: &Facts) -> Finding {
    judge(facts, |way| way.to.clone().err(), "can't be sent to")
}

pub(super) fn from_peers(facts: &Facts) -> Finding {
    // Of a peer that is well, packets come by another interface.
    let refused = |way: &Way| way.from.clone().err().filter(|_| way.is_alarming);
    judge(facts, refused, "are refused where they come in")
}

/// Those to which one of both ways is refused.
fn judge(facts: &Facts, refused: fn(&Way) -> Option<String>, what: &str) -> Finding {
    let Some(ways) = &facts.ways else {
        return Finding::skipped("weftd says no interface or no peers, or the kernel no routes");
    };
    let found: Vec<(Ipv4Addr, String)> =
        ways.iter().filter_map(|way| Some((way.host, refused(way)?))).collect();
    match found.first() {
        None => Finding::ok(format!("{} peers asked about", ways.len())),
        Some((host, why)) => Finding::failed(
            format!("{} of {} peers {what}, such as {host}: {why}", found.len(), ways.len()),
            format!("See `ip rule`, `ip route get {host}` and net.ipv4.conf.*.rp_filter."),
        ),
    }
}

pub(super) fn firewall_output(facts: &Facts) -> Finding {
    if facts.backend().is_some_and(|kind| !kind.has_port()) {
        return Finding::skipped("this backend has no port");
    }
    let (Some(chains), Some(port)) = (&facts.firewall, facts.port()) else {
        return no_firewall(facts);
    };
    let external = external_name(facts);
    let goes_by = external.as_deref();
    let (sources, destinations, comes_by) = (None, None, None);
    let packet = Packet { udp_port: Some(port), sources, destinations, comes_by, goes_by };
    match dropped_by(chains, SENT, &packet, &format!("nothing is sent to UDP port {port}")) {
        None => Finding::ok(format!("nothing surely drops what is sent to UDP port {port}")),
        Some(rule) => Finding::warning(
            rule,
            format!("Accept UDP port {port} to all nodes in front of that, in OUTPUT."),
        ),
    }
}
