//! Which routes are to be set and which removed, from those that should be and those that are.
//! Pure: the caller lists and edits.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::host::state::{LinkId, Route, RouteKind, RouteSpec};
use crate::route::Prefix;

/// The routes that should be, by destination; all of metric 0.
pub(super) type Routes = BTreeMap<Prefix, RouteSpec>;

/// What separates the routes that are from those that should be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RouteDiff {
    /// To be set in place of whatever has their place.
    pub(super) set: Vec<RouteSpec>,
    /// Ours, and not wanted any more.
    pub(super) remove: Vec<RouteSpec>,
}

/// Routes that `is_own` does not claim are left alone, unless they have the place of a wanted one:
/// the main table has one place for each destination, type of service and metric.
pub(super) fn diff(
    wanted: &Routes,
    actual: &[Route],
    is_own: impl Fn(&Route) -> bool,
) -> RouteDiff {
    let mut in_place: BTreeMap<Prefix, &Route> = BTreeMap::new();
    for route in actual.iter().filter(|route| has_our_place(route)) {
        // The first of a destination is the one that the kernel replaces.
        in_place.entry(route.destination).or_insert(route);
    }
    let mut diff = RouteDiff::default();
    for (destination, route) in wanted {
        if !in_place.get(destination).is_some_and(|found| is_same(route, found)) {
            diff.set.push(route.clone());
        }
    }
    for route in actual.iter().filter(|route| is_own(route)) {
        let is_replaced = wanted.contains_key(&route.destination)
            && in_place.get(&route.destination).is_some_and(|found| *found == route);
        if !is_replaced {
            diff.remove.extend(removal(route));
        }
    }
    diff
}

fn has_our_place(route: &Route) -> bool {
    route.metric == 0 && route.type_of_service == 0
}

fn is_same(wanted: &RouteSpec, found: &Route) -> bool {
    let [hop] = found.next_hops.as_slice() else { return false };
    found.kind == RouteKind::Unicast
        && found.protocol == wanted.protocol
        && hop.interface_index == wanted.interface.index
        && hop.gateway == wanted.gateway.map(IpAddr::V4)
}

/// What names `route` for its removal. A route of several ways or of none is not ours.
pub(super) fn removal(route: &Route) -> Option<RouteSpec> {
    let [hop] = route.next_hops.as_slice() else { return None };
    let gateway = match hop.gateway {
        None => None,
        Some(IpAddr::V4(gateway)) => Some(gateway),
        Some(IpAddr::V6(_)) => return None,
    };
    let index = hop.interface_index;
    Some(RouteSpec {
        destination: route.destination,
        interface: LinkId { index, name: format!("if{index}") },
        gateway,
        metric: route.metric,
        scope: route.scope,
        protocol: route.protocol,
        is_onlink: false,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::host::state::{NextHop, RouteProtocol, Scope};

    pub(in crate::backend) fn wish(destination: &str, via: &str, index: u32) -> RouteSpec {
        RouteSpec {
            destination: destination.parse().unwrap(),
            interface: LinkId { index, name: "eth0".to_owned() },
            gateway: Some(via.parse().unwrap()),
            metric: 0,
            scope: Scope::Global,
            protocol: RouteProtocol::WEFT,
            is_onlink: false,
        }
    }

    pub(in crate::backend) fn route(wish: &RouteSpec) -> Route {
        Route {
            destination: wish.destination,
            metric: wish.metric,
            kind: RouteKind::Unicast,
            scope: wish.scope,
            protocol: wish.protocol,
            type_of_service: 0,
            preferred_source: None,
            next_hops: vec![NextHop {
                interface_index: wish.interface.index,
                gateway: wish.gateway.map(IpAddr::V4),
            }],
        }
    }

    fn is_own(route: &Route) -> bool {
        route.protocol == RouteProtocol::WEFT
    }

    fn wanted(wishes: &[RouteSpec]) -> Routes {
        wishes.iter().map(|wish| (wish.destination, wish.clone())).collect()
    }

    #[test]
    fn what_is_in_place_is_left_and_what_is_missing_or_differs_is_set() {
        let [a, b] = [wish("10.5.1.0/24", "192.0.2.1", 2), wish("10.5.2.0/24", "192.0.2.2", 2)];
        let wanted = wanted(&[a.clone(), b.clone()]);
        let nothing = diff(&wanted, &[route(&a), route(&b)], is_own);
        assert_eq!(nothing, RouteDiff::default(), "a second pass changes nothing");
        assert_eq!(diff(&wanted, &[route(&a)], is_own).set, std::slice::from_ref(&b));
        let moved = RouteSpec { gateway: "192.0.2.9".parse().ok(), ..b.clone() };
        let found = diff(&wanted, &[route(&a), route(&moved)], is_own);
        assert_eq!(
            (found.set, found.remove),
            (vec![b], vec![]),
            "moved in one step, without a gap"
        );
    }

    #[test]
    fn only_own_routes_are_removed() {
        let own = wish("10.5.7.0/24", "192.0.2.7", 2);
        let foreign = RouteSpec { protocol: RouteProtocol::BOOT, ..own.clone() };
        let found = diff(&Routes::new(), &[route(&own), route(&foreign)], is_own);
        assert_eq!(found.set, []);
        assert_eq!(found.remove.len(), 1);
        assert_eq!(found.remove[0].protocol, RouteProtocol::WEFT);
    }

    #[test]
    fn flanneld_s_route_becomes_ours_in_place() {
        let own = wish("10.5.1.0/24", "192.0.2.1", 2);
        let flanneld = RouteSpec { protocol: RouteProtocol::BOOT, ..own.clone() };
        let found = diff(&wanted(std::slice::from_ref(&own)), &[route(&flanneld)], is_own);
        assert_eq!((found.set, found.remove), (vec![own], vec![]));
    }

    #[test]
    fn a_route_of_another_metric_is_another_route() {
        let own = wish("10.5.1.0/24", "192.0.2.1", 2);
        let other = RouteSpec { metric: 7, ..own.clone() };
        let found = diff(&wanted(std::slice::from_ref(&own)), &[route(&other)], is_own);
        assert_eq!(found.set, [own]);
        assert_eq!(found.remove.len(), 1, "one of ours at the wrong place goes");
    }
}
