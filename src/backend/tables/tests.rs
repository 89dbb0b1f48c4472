//! Tables of a few peers against what they should be.

use super::*;
use crate::host::state::NextHop;

const DEVICE: u32 = 9;

fn mac(last: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, last])
}

fn subnet(number: u8) -> Prefix {
    format!("10.5.{number}.0/24").parse().unwrap()
}

fn link(index: u32) -> LinkId {
    LinkId { index, name: "eth0".to_owned() }
}

fn host(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, number)
}

fn tunnelled(number: u8) -> (Prefix, Peer) {
    let subnet = subnet(number);
    (subnet, Peer::tunnelled(subnet, host(number), link(DEVICE), mac(number)))
}

fn direct(number: u8) -> (Prefix, Peer) {
    let subnet = subnet(number);
    (subnet, Peer::direct(subnet, host(number), link(2)))
}

fn route(spec: &RouteSpec) -> Route {
    Route {
        destination: spec.destination,
        metric: spec.metric,
        kind: RouteKind::Unicast,
        protocol: spec.protocol,
        type_of_service: 0,
        next_hops: vec![NextHop {
            interface_index: spec.interface.index,
            gateway: spec.gateway.map(IpAddr::V4),
        }],
    }
}

fn actual(wanted: &Wanted) -> Actual {
    Actual {
        entries: wanted.values().flat_map(Peer::entries).collect(),
        routes: wanted.values().map(|peer| route(&peer.route)).collect(),
    }
}

fn is_own(route: &Route) -> bool {
    route.next_hops[0].interface_index == DEVICE || route.protocol == RouteProtocol::WEFT
}

fn routes(specs: &[&RouteSpec]) -> Actual {
    Actual { routes: specs.iter().map(|spec| route(spec)).collect(), ..Actual::default() }
}

/// The routes to set, and those to remove.
fn diff_routes(wanted: &Wanted, found: &[&RouteSpec]) -> (Vec<RouteSpec>, Vec<RouteSpec>) {
    let diff = diff(wanted, &routes(found), is_own);
    (diff.steps.into_iter().filter_map(|step| step.route).collect(), diff.stale_routes)
}

#[test]
fn missing_and_different_routes_are_set() {
    let wanted = Wanted::from([direct(1), direct(2)]);
    let [a, b] = [1, 2].map(|number| direct(number).1.route);
    assert_eq!(diff(&wanted, &actual(&wanted), is_own), TableDiff::default());
    assert_eq!(diff_routes(&wanted, &[&a]), (vec![b.clone()], vec![]));
    let moved = RouteSpec { gateway: Some(host(9)), ..b.clone() };
    assert_eq!(diff_routes(&wanted, &[&a, &moved]), (vec![b], vec![]), "moved in one step");
}

#[test]
fn only_own_routes_are_removed() {
    let own = direct(7).1.route;
    let foreign = RouteSpec { protocol: RouteProtocol::BOOT, ..own.clone() };
    let (set, removed) = diff_routes(&Wanted::new(), &[&own, &foreign]);
    assert_eq!((set, removed.len()), (vec![], 1));
    assert_eq!(removed[0].protocol, RouteProtocol::WEFT);
}

#[test]
fn flannelds_route_becomes_ours_in_place() {
    let own = direct(1).1.route;
    let flanneld = RouteSpec { protocol: RouteProtocol::BOOT, ..own.clone() };
    assert_eq!(diff_routes(&Wanted::from([direct(1)]), &[&flanneld]), (vec![own], vec![]));
}

#[test]
fn route_of_another_metric_is_another_route() {
    let own = direct(1).1.route;
    let other = RouteSpec { metric: 7, ..own.clone() };
    let (set, removed) = diff_routes(&Wanted::from([direct(1)]), &[&other]);
    assert_eq!((set, removed.len()), (vec![own], 1));
}

#[test]
fn new_peer_lacks_all_and_complete_one_nothing() {
    let wanted = Wanted::from([tunnelled(1), tunnelled(2)]);
    let found = diff(&wanted, &Actual::default(), is_own);
    assert_eq!(found.steps.len(), 2);
    let step = &found.steps[0];
    let entry = |table, address| LinkEntry { table, address, mac: mac(1) };
    let neighbour = entry(EntryTable::Neighbours, Ipv4Addr::new(10, 5, 1, 0));
    assert_eq!(step.entries, [neighbour, entry(EntryTable::Forwarding, host(1))]);
    assert_eq!(step.route.as_ref(), Some(&wanted[&step.subnet].route));
    assert_eq!(diff(&wanted, &actual(&wanted), is_own), TableDiff::default());
}

#[test]
fn removed_peer_leaves_nothing_behind() {
    let both = Wanted::from([tunnelled(1), tunnelled(2)]);
    let found = diff(&Wanted::from([tunnelled(1)]), &actual(&both), is_own);
    assert_eq!(found.steps, []);
    assert_eq!((found.stale_routes.len(), found.stale_entries.len()), (1, 2));
    assert!(found.stale_entries.iter().all(|entry| entry.mac == mac(2)), "{found:?}");
}

#[test]
fn changed_hardware_address_is_followed() {
    let before = Wanted::from([tunnelled(1)]);
    let (subnet, mut moved) = tunnelled(1);
    moved.mac = Some(mac(77));
    let found = diff(&Wanted::from([(subnet, moved)]), &actual(&before), is_own);
    assert_eq!(found.steps.len(), 1);
    let Step { entries, route, .. } = &found.steps[0];
    assert!(entries.len() == 2 && route.is_none(), "{found:?}");
    let stale: Vec<_> = found.stale_entries.iter().map(|entry| (entry.table, entry.mac)).collect();
    assert_eq!(stale, [(EntryTable::Forwarding, mac(1))], "the neighbour is replaced in place");
}

#[test]
fn changed_host_is_followed_in_place() {
    let before = Wanted::from([tunnelled(1)]);
    let (subnet, mut moved) = tunnelled(1);
    moved.public_ip = host(77);
    let found = diff(&Wanted::from([(subnet, moved)]), &actual(&before), is_own);
    let entry = LinkEntry { table: EntryTable::Forwarding, address: host(77), mac: mac(1) };
    assert_eq!(found.steps, [Step { subnet, entries: vec![entry], route: None }]);
    assert_eq!(found.stale_entries, [], "removing the old would remove the new");
}

#[test]
fn direct_peer_needs_no_entries() {
    let before = Wanted::from([tunnelled(1)]);
    let wanted = Wanted::from([direct(1)]);
    let found = diff(&wanted, &actual(&before), is_own);
    assert_eq!(found.steps.len(), 1);
    assert!(found.steps[0].entries.is_empty() && found.steps[0].route.is_some());
    assert_eq!(found.stale_entries.len(), 2);
    assert_eq!(found.stale_routes, [], "the route moves in one step");
    assert_eq!(diff(&wanted, &actual(&wanted), is_own), TableDiff::default());
}

#[test]
fn foreign_routes_stay() {
    let foreign = RouteSpec { protocol: RouteProtocol::BOOT, ..direct(200).1.route };
    assert_eq!(diff(&Wanted::new(), &routes(&[&foreign]), is_own), TableDiff::default());
}
