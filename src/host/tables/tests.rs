//! Tables of a few peers against what they should be.

use std::net::Ipv6Addr;

use super::*;
use crate::host::listing::Listing;
use crate::host::state::NextHop;
use crate::host::state::tests as state;

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

fn tunnelled(number: u8) -> (Prefix, Way) {
    tunnelled_to(number, host(number), mac(number))
}

fn tunnelled_to(number: u8, host: Ipv4Addr, mac: MacAddress) -> (Prefix, Way) {
    let subnet = subnet(number);
    (subnet, Way::tunnelled(subnet, host, link(DEVICE), mac))
}

fn direct(number: u8) -> (Prefix, Way) {
    let subnet = subnet(number);
    (subnet, Way::direct(subnet, host(number), link(2)))
}

fn route<A: KernelFamily>(spec: &RouteSpec<A>) -> Route<A> {
    Route {
        destination: spec.destination,
        metric: spec.metric,
        kind: RouteKind::UNICAST,
        protocol: spec.protocol,
        type_of_service: 0,
        mtu_bytes: spec.mtu_bytes,
        next_hops: vec![NextHop {
            interface_index: spec.interface.index,
            gateway: spec.gateway.map(Into::into),
        }],
    }
}

/// The VXLAN device, its tables and the routes that the kernel has.
struct Actual {
    entries: Vec<LinkEntry>,
    routes: Vec<Route>,
}

fn actual(ways: &Ways) -> Actual {
    Actual {
        entries: ways.values().flat_map(|way| way.entries.clone()).collect(),
        routes: ways.values().map(|way| route(&way.route)).collect(),
    }
}

fn routes(specs: &[&RouteSpec]) -> Actual {
    Actual { entries: Vec::new(), routes: specs.iter().map(|spec| route(spec)).collect() }
}

fn diff(ways: &Ways, actual: &Actual) -> Diff {
    let address = Ipv4Addr::new(10, 5, 99, 0);
    let device =
        Device { link: link(DEVICE), address, mac: None, mtu_bytes: None, is_ours_alone: true };
    let networks = vec!["10.5.0.0/16".parse().unwrap()];
    let desired = Desired { device: Some(device), networks, ways: ways.clone() };
    let listing = Listing {
        links: vec![state::link(DEVICE, "flannel.1")],
        addresses: vec![state::address(DEVICE, address, 32)],
        routes: actual.routes.clone(),
        ..Listing::default()
    };
    desired.diff(&listing.v4(), &actual.entries).unwrap()
}

fn steps(diff: &Diff) -> Vec<&Step> {
    let steps = diff.sets.iter().map(|edit| {
        let Edit::Set(step) = edit else { panic!("{edit:?} is among what is set") };
        step
    });
    steps.collect()
}

fn stale_routes(diff: &Diff) -> Vec<RouteSpec> {
    let stale = diff.removals.iter().filter_map(|edit| {
        let Edit::RemoveRoute(route) = edit else { return None };
        Some(route.clone())
    });
    stale.collect()
}

fn stale_entries(diff: &Diff) -> Vec<LinkEntry> {
    let stale = diff.removals.iter().filter_map(|edit| {
        let Edit::RemoveEntry(_, entry) = edit else { return None };
        Some(*entry)
    });
    stale.collect()
}

/// The routes to set, and those to remove.
fn diff_routes(wanted: &Ways, found: &[&RouteSpec]) -> (Vec<RouteSpec>, Vec<RouteSpec>) {
    let diff = diff(wanted, &routes(found));
    (steps(&diff).into_iter().filter_map(|step| step.route.clone()).collect(), stale_routes(&diff))
}

#[test]
fn missing_and_different_routes_are_set() {
    let wanted = Ways::from([direct(1), direct(2)]);
    let [a, b] = [1, 2].map(|number| direct(number).1.route);
    assert_eq!(diff(&wanted, &actual(&wanted)), Diff::default());
    assert_eq!(diff_routes(&wanted, &[&a]), (vec![b.clone()], vec![]));
    let moved = RouteSpec { gateway: Some(host(9)), ..b.clone() };
    assert_eq!(diff_routes(&wanted, &[&a, &moved]), (vec![b], vec![]), "moved in one step");
}

#[test]
fn only_own_routes_are_removed() {
    let own = direct(7).1.route;
    let foreign = RouteSpec { protocol: RouteProtocol::BOOT, ..own.clone() };
    let (set, removed) = diff_routes(&Ways::new(), &[&own, &foreign]);
    assert_eq!((set, removed.len()), (vec![], 1));
    assert_eq!(removed[0].protocol, RouteProtocol::WEFT);
}

#[test]
fn flannelds_route_becomes_ours_in_place() {
    let own = direct(1).1.route;
    let flanneld = RouteSpec { protocol: RouteProtocol::BOOT, ..own.clone() };
    assert_eq!(diff_routes(&Ways::from([direct(1)]), &[&flanneld]), (vec![own], vec![]));
}

#[test]
fn route_of_another_metric_is_another_route() {
    let own = direct(1).1.route;
    let other = RouteSpec { metric: 7, ..own.clone() };
    let (set, removed) = diff_routes(&Ways::from([direct(1)]), &[&other]);
    assert_eq!((set, removed.len()), (vec![own], 1));
}

#[test]
fn new_peer_lacks_all_and_complete_one_nothing() {
    let wanted = Ways::from([tunnelled(1), tunnelled(2)]);
    let found = diff(&wanted, &routes(&[]));
    assert_eq!(found.sets.len(), 2);
    let step = steps(&found)[0];
    let entry = |table, address| LinkEntry { table, address, mac: mac(1) };
    let neighbour = entry(EntryTable::Neighbours, Ipv4Addr::new(10, 5, 1, 0));
    assert_eq!(step.entries, [neighbour, entry(EntryTable::Forwarding, host(1))]);
    assert_eq!(step.route.as_ref(), Some(&wanted[&step.destination].route));
    assert_eq!(diff(&wanted, &actual(&wanted)), Diff::default());
}

#[test]
fn removed_peer_leaves_nothing_behind() {
    let both = Ways::from([tunnelled(1), tunnelled(2)]);
    let found = diff(&Ways::from([tunnelled(1)]), &actual(&both));
    assert_eq!(found.sets, []);
    assert_eq!((stale_routes(&found).len(), stale_entries(&found).len()), (1, 2));
    assert!(stale_entries(&found).iter().all(|entry| entry.mac == mac(2)), "{found:?}");
}

#[test]
fn changed_hardware_address_is_followed() {
    let before = Ways::from([tunnelled(1)]);
    let moved = tunnelled_to(1, host(1), mac(77));
    let found = diff(&Ways::from([moved]), &actual(&before));
    assert_eq!(found.sets.len(), 1);
    let Step { entries, route, .. } = steps(&found)[0];
    assert!(entries.len() == 2 && route.is_none(), "{found:?}");
    let stale: Vec<_> = stale_entries(&found).iter().map(|it| (it.table, it.mac)).collect();
    assert_eq!(stale, [(EntryTable::Forwarding, mac(1))], "the neighbour is replaced in place");
}

#[test]
fn changed_host_is_followed_in_place() {
    let before = Ways::from([tunnelled(1)]);
    let found = diff(&Ways::from([tunnelled_to(1, host(77), mac(1))]), &actual(&before));
    let entry = LinkEntry { table: EntryTable::Forwarding, address: host(77), mac: mac(1) };
    let step = steps(&found)[0];
    assert_eq!((step.entries.as_slice(), step.route.as_ref()), (&[entry][..], None));
    assert_eq!(stale_entries(&found), [], "removing the old would remove the new");
}

#[test]
fn direct_peer_needs_no_entries() {
    let before = Ways::from([tunnelled(1)]);
    let wanted = Ways::from([direct(1)]);
    let found = diff(&wanted, &actual(&before));
    assert_eq!(found.sets.len(), 1);
    assert!(steps(&found)[0].entries.is_empty() && steps(&found)[0].route.is_some());
    assert_eq!(stale_entries(&found).len(), 2);
    assert_eq!(stale_routes(&found), [], "the route moves in one step");
    assert_eq!(diff(&wanted, &actual(&wanted)), Diff::default());
}

#[test]
fn foreign_routes_stay() {
    let foreign = RouteSpec { protocol: RouteProtocol::BOOT, ..direct(200).1.route };
    assert_eq!(diff(&Ways::new(), &routes(&[&foreign])), Diff::default());
}

/// The kernel refuses the gateway behind the tunnel while another device's route leads to it.
#[test]
fn an_ipv6_route_elsewhere_goes_before_the_tunnels() {
    let subnet: Prefix<Ipv6Addr> = "fd00:5:0:1::/64".parse().unwrap();
    let host: Ipv6Addr = "fd99::1".parse().unwrap();
    let tunnelled = Way::tunnelled(subnet, host, link(DEVICE), mac(1));
    let addresses: Vec<_> = tunnelled.entries.iter().map(|entry| entry.address).collect();
    assert_eq!(addresses, [subnet.network(), host]);
    let direct = Way::direct(subnet, host, link(2));
    let look = |wanted: &Way<Ipv6Addr>, there: &Way<Ipv6Addr>| {
        let desired = Desired {
            device: None,
            networks: vec!["fd00:5::/48".parse().unwrap()],
            ways: Ways::from([(subnet, wanted.clone())]),
        };
        let listing = Listing { routes_v6: vec![route(&there.route)], ..Listing::default() };
        let diff = desired.diff(&listing.v6(), &wanted.entries).unwrap();
        diff.sets.into_iter().next().map(|edit| {
            let Edit::Set(step) = edit else { panic!("{edit:?} is among what is set") };
            step.in_the_way.map(|route| (route.gateway, route.interface.index))
        })
    };
    assert_eq!(look(&tunnelled, &direct), Some(Some((Some(host), 2))));
    assert_eq!(look(&direct, &tunnelled), Some(None), "replaced in one step");
    assert_eq!(look(&tunnelled, &tunnelled), None);
}
