//! Routes that take packets away from pods.

use super::super::facts::{CheckedFamily, Facts, OwnRoute};
use super::super::finding::{Checked, failed, skipped};
use super::network::{bridges, external_name, may_be_of_pods, of_families};
use crate::backend_kind::CarriedBy;
use crate::forward::decide::Leased;
use crate::host::listing::{FamilyListing, Listing};
use crate::host::state::{Address, Route, RouteKind, RouteProtocol};
use crate::route::Prefix;

/// Routes that take parts of the network elsewhere, as text.
pub(super) fn strangers<A: CheckedFamily>(
    facts: &Facts,
    host: &Listing,
    Leased { network, subnet }: Leased<A>,
) -> Vec<String> {
    let (FamilyListing { addresses, routes, .. }, device) =
        (A::listed(host), facts.status().and_then(A::device));
    let external = external_name(facts);
    let is_gateway_usual = facts.backend().is_some_and(|it| it.carried_by() == CarriedBy::Kernel);
    // A part of a lease is no lease; to a lease of another length weftd sets the route itself.
    let is_too_long = |route: &Route<A>| {
        route.destination.length_bits() > subnet.length_bits()
            && route.protocol != RouteProtocol::WEFT
    };
    // The hosts' own network may lie in the overlay's, which `address-overlap` reports.
    let is_of_hosts = |route: &Route<A>| {
        let [hop] = route.next_hops.as_slice() else { return false };
        external.as_deref() == Some(facts.link_name(hop.interface_index))
            && addresses.iter().any(|address| {
                let is_its = address.interface_index == hop.interface_index;
                is_its && route.destination.contains(address.address)
            })
    };
    let is_ours = |route: &Route<A>| {
        if subnet.covers(route.destination) || is_of_hosts(route) {
            return true;
        }
        !route.next_hops.is_empty()
            && route.next_hops.iter().all(|hop| {
                let name = facts.link_name(hop.interface_index);
                let is_own = device.is_some_and(|device| name.starts_with(device));
                let is_to_host = hop.gateway.is_some() && external.as_deref() == Some(name);
                is_own || is_gateway_usual && is_to_host && !is_too_long(route)
            })
    };
    // One behind a route of weftd's to the same destination is not used.
    let is_behind = |route: &Route<A>| {
        let key = |route: &Route<A>| (route.destination, route.type_of_service);
        let same = routes.iter().filter(|other| key(other) == key(route));
        same.min_by_key(|route| route.metric).is_some_and(is_ours)
    };
    let is_stranger = |route: &&Route<A>| {
        network.covers(route.destination) && !is_ours(route) && !is_behind(route)
    };
    routes.iter().filter(is_stranger).map(|route| shown(facts, route)).collect()
}

/// Routes that the kernel follows, and by which packets for some of this host's pods do not reach
/// them, as text. A pod may have a route of its own, to its link.
fn takers<A: CheckedFamily>(facts: &Facts, host: &Listing, subnet: Prefix<A>) -> Vec<String> {
    let (addresses, own_routes) = (A::listed(host).addresses, &A::facts(facts).own_routes);
    let has_bridge = bridges(facts, host, subnet).next().is_some();
    let is_pods_link = |route: &Route<A>, index: u32| {
        let is_bridge = bridges(facts, host, subnet).any(|link| link.id.index == index);
        let is_whole = route.destination == subnet || route.destination.length_bits() == A::BITS;
        is_bridge || may_be_of_pods(facts, index) && is_whole
    };
    let is_to_bridge = |OwnRoute { route, .. }: &OwnRoute<A>| {
        let hop = route.next_hops.first();
        (route.kind, route.destination) == (RouteKind::UNICAST, subnet)
            && hop.is_some_and(|hop| is_pods_link(route, hop.interface_index))
    };
    let leads_away = |OwnRoute { route, path, .. }: &&OwnRoute<A>| match (route.kind, path) {
        (RouteKind::UNICAST, Some(path)) => route.next_hops.iter().any(|hop| {
            let is_followed =
                (hop.interface_index, hop.gateway) == (path.interface_index, path.gateway);
            // Some have an address of this host for the gateway to its pods.
            let is_own = |it: &Address<A>| hop.gateway == Some(it.address.into());
            let leaves = hop.gateway.is_some() && !addresses.iter().any(is_own);
            is_followed && (leaves || !is_pods_link(route, hop.interface_index))
        }),
        (RouteKind::LOCAL, Some(path)) => {
            let address = route.destination.network();
            let has_address = addresses.iter().any(|it| it.address == address);
            facts.link_name(path.interface_index) == "lo" && !has_address
        }
        // weftd's own blackhole is behind the bridge's route, and alone before there is a bridge.
        (RouteKind::BLACKHOLE, None) if route.destination == subnet => {
            has_bridge && !own_routes.iter().any(is_to_bridge)
        }
        (RouteKind::BLACKHOLE | RouteKind::UNREACHABLE | RouteKind::PROHIBIT, None) => true,
        _ => false,
    };
    let taking = own_routes.iter().filter(leads_away);
    let text = |OwnRoute { table, route, .. }: &OwnRoute<A>| {
        format!("{} (table {table}), of {subnet}, this host's pods", shown(facts, route))
    };
    taking.map(text).collect()
}

fn shown<A: CheckedFamily>(facts: &Facts, route: &Route<A>) -> String {
    match (route.kind, route.next_hops.first()) {
        (RouteKind::UNICAST, Some(hop)) => {
            format!("{} dev {}", route.destination, facts.link_name(hop.interface_index))
        }
        (RouteKind::LOCAL, _) => format!("{} to this host itself", route.destination),
        _ => format!("{} to nowhere (a blackhole or the like)", route.destination),
    }
}

pub(super) fn foreign_routes(facts: &Facts) -> Checked {
    of_families(facts, foreign_of, foreign_of)
}

/// Whether there surely are none of a family.
pub(super) fn has_no_foreign<A: CheckedFamily>(facts: &Facts) -> bool {
    let leased = facts.lease().and_then(A::leased).zip(facts.host.as_ref());
    leased.is_some_and(|(leased, host)| foreign_of(facts, host, leased).is_ok())
}

fn foreign_of<A: CheckedFamily>(facts: &Facts, host: &Listing, leased: Leased<A>) -> Checked {
    if facts.backend().is_none_or(|kind| kind.carried_by() == CarriedBy::Others) {
        return skipped("this backend sets no routes");
    }
    let found = [takers(facts, host, leased.subnet), strangers(facts, host, leased)].concat();
    if found.is_empty() {
        return Ok(format!("none in {}", leased.network));
    }
    failed(
        found.join("; "),
        "Pods there are unreachable, unless these ways lead to them all the same. If nobody needs \
         these routes, remove them (ip route del), or whatever sets them; if they lead to networks \
         of this host, choose another Network.",
    )
}
