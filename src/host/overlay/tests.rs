//! The diff against a model of the kernel's tables, and each rule on its own.

use proptest::prelude::*;

use super::*;
use crate::host::state::tests::{self as state, link};
use crate::host::state::{Address, NextHop};
use crate::host::tables::Edit;

const DEVICE: u32 = 7;
const OTHER: u32 = 2;

fn v4() -> OverlayPart<Ipv4Addr> {
    OverlayPart {
        former_network: Some("10.4.0.0/16".parse().unwrap()),
        ..OverlayPart::of("10.5.0.0/16".parse().unwrap(), Some("10.5.72.0/24".parse().unwrap()))
    }
}

fn desired() -> OverlayDesired {
    OverlayDesired {
        device: LinkId { index: DEVICE, name: "flannel0".into() },
        mtu_bytes: 1472,
        v4: Some(v4()),
        v6: None,
    }
}

fn address(address: Ipv4Addr, prefix_length_bits: u8) -> Address {
    state::address(DEVICE, address, prefix_length_bits)
}

fn route(interface_index: u32, metric: u32) -> Route {
    state::route(v4().network, metric, &[interface_index])
}

fn complete() -> Listing {
    Listing {
        links: vec![link(OTHER, "eth0"), Link { mtu_bytes: 1472, ..link(DEVICE, "flannel0") }],
        addresses: vec![
            // Another interface's addresses are its own business.
            Address { interface_index: OTHER, ..address(Ipv4Addr::new(10, 5, 1, 1), 16) },
            address(v4().address(), 32),
        ],
        routes: vec![route(DEVICE, 0)],
        ..Listing::default()
    }
}

fn device(listing: &mut Listing) -> &mut Link {
    &mut listing.links[1]
}

fn diff_of(listing: &Listing) -> Diff {
    desired().compare(listing, None).expect("the device is there").v4
}

/// The edits in a few words each.
fn spelled(diff: &Diff) -> Vec<String> {
    diff.device.iter().chain(&diff.sets).chain(&diff.removals).map(Edit::to_string).collect()
}

fn actions(listing: &Listing) -> Vec<String> {
    spelled(&diff_of(listing))
}

/// What the kernel does with the edits; panics where it would refuse.
fn apply(actual: &mut Listing, diff: &Diff) {
    for edit in &diff.device {
        if let Edit::SetUp(_) = edit {
            device(actual).is_up = true;
        } else if let Edit::AddAddress(_, new) = edit {
            let new = address(*new, 32);
            assert!(!actual.addresses.contains(&new), "EEXIST for the address");
            actual.addresses.push(new);
        } else if let Edit::RemoveAddress(_, old) = edit {
            let before = actual.addresses.len();
            actual.addresses.retain(|owned| owned != old);
            assert!(actual.addresses.len() < before, "EADDRNOTAVAIL");
            if actual.addresses.iter().all(|owned| owned.interface_index != DEVICE) {
                actual.routes.retain(|route| {
                    route.next_hops.iter().all(|hop| hop.interface_index != DEVICE)
                });
            }
        } else {
            panic!("{edit:?}");
        }
    }
    assert_eq!(diff.removals, [], "there is nothing of ours to remove");
    for edit in &diff.sets {
        let Edit::Set(step) = edit else { panic!("{edit:?}") };
        assert!(device(actual).is_up, "ENETDOWN");
        assert!(!actual.routes.iter().any(Route::is_in_our_place), "EEXIST for the route");
        assert_eq!(step.destination, v4().network);
        actual.routes.push(route(DEVICE, 0));
    }
}

fn path_route(subnet: &str, mtu_bytes: u32) -> Route {
    let (protocol, mtu_bytes) = (RouteProtocol::WEFT, Some(mtu_bytes));
    Route { destination: subnet.parse().unwrap(), protocol, mtu_bytes, ..route(DEVICE, 0) }
}

#[test]
fn only_narrow_paths_have_routes() {
    let narrow = "10.5.1.0/24".parse().unwrap();
    let mut desired = desired();
    desired.v4.as_mut().unwrap().path_mtus = BTreeMap::from([(narrow, 1372)]);
    let paths = |listing: &Listing| spelled(&desired.compare(listing, None).unwrap().v4);
    let mut actual = complete();
    assert_eq!(paths(&actual), ["route 10.5.1.0/24 dev flannel0 mtu 1372 set"]);
    device(&mut actual).mtu_bytes = 1300;
    let limited = "route 10.5.1.0/24 dev flannel0 mtu 1300 set";
    assert_eq!(paths(&actual), [limited], "more than an MTU set by hand");
    actual.routes.extend([path_route("10.5.1.0/24", 1300), path_route("10.5.2.0/24", 1300)]);
    assert_eq!(paths(&actual), ["route 10.5.2.0/24 dev if7 removed"]);
    actual.routes.pop();
    actual.routes[1].mtu_bytes = Some(1372);
    assert_eq!(paths(&actual), [limited]);
    for foreign in &mut actual.routes {
        foreign.protocol = RouteProtocol::BOOT;
    }
    assert_eq!(paths(&actual), [""; 0], "somebody else's routes are left to them");
}

#[test]
fn routes_of_another_backend_go() {
    let mut actual = complete();
    let left = |destination: &str, protocol| Route {
        destination: destination.parse().unwrap(),
        protocol,
        next_hops: vec![NextHop { interface_index: OTHER, gateway: "192.0.2.2".parse().ok() }],
        ..route(OTHER, 0)
    };
    actual.routes.extend([
        left("10.5.1.0/24", RouteProtocol::WEFT),
        left("10.4.1.0/24", RouteProtocol::WEFT),
        left("10.6.1.0/24", RouteProtocol::WEFT),
        left("10.5.3.0/24", RouteProtocol::BOOT),
    ]);
    let gone = ["10.5.1.0/24", "10.4.1.0/24"]
        .map(|it| format!("route {it} via 192.0.2.2 dev if2 removed"));
    assert_eq!(actions(&actual), gone, "of this network and the one before, by weftd's mark");
}

prop_compose! {
    fn any_address()(
        bits in prop_oneof![
            Just(v4().address().to_bits()),
            0x0a05_0000_u32..0x0a06_0002,
            any::<u32>(),
        ],
        length in prop_oneof![Just(32_u8), 0_u8..=32],
    ) -> Address {
        address(Ipv4Addr::from_bits(bits), length)
    }
}

prop_compose! {
    fn any_route()(
        interfaces in prop::collection::vec(prop_oneof![Just(DEVICE), Just(OTHER)], 0..3),
        metric in prop_oneof![Just(0_u32), Just(100)],
        type_of_service in prop_oneof![Just(0_u8), Just(16)],
    ) -> Route {
        let kind = if interfaces.is_empty() { RouteKind::BLACKHOLE } else { RouteKind::UNICAST };
        let hop = |index: &u32| NextHop { interface_index: *index, gateway: None };
        let next_hops = interfaces.iter().map(hop).collect();
        Route { kind, type_of_service, next_hops, ..route(DEVICE, metric) }
    }
}

prop_compose! {
    fn any_actual()(
        is_up in any::<bool>(),
        mtu_bytes in prop_oneof![Just(1472_u32), 68_u32..65536],
        mut addresses in prop::collection::vec(any_address(), 0..5),
        mut routes in prop::collection::vec(any_route(), 0..4),
    ) -> Listing {
        // The kernel's tables hold each key once, and a device that is down or has no address has
        // no routes.
        let key = |owned: &Address| (owned.address, owned.prefix_length_bits);
        addresses.sort_by_key(key);
        addresses.dedup_by_key(|owned| key(owned));
        routes.sort_by_key(|route| (route.metric, route.type_of_service));
        routes.dedup_by_key(|route| (route.metric, route.type_of_service));
        if !is_up || addresses.is_empty() {
            routes.retain(|route| route.next_hops.iter().all(|hop| hop.interface_index != DEVICE));
        }
        let mut listing = Listing { addresses, routes, ..complete() };
        (device(&mut listing).mtu_bytes, device(&mut listing).is_up) = (mtu_bytes, is_up);
        listing
    }
}

proptest! {
    #[test]
    fn applying_the_difference_leaves_none(mut actual in any_actual()) {
        let before = actual.clone();
        let plan = diff_of(&actual);
        apply(&mut actual, &plan);
        prop_assert_eq!(actions(&actual), [""; 0]);
        prop_assert!(device(&mut actual).is_up);
        let mut inside = actual.addresses.clone();
        inside.retain(|owned| v4().network.contains(owned.address));
        prop_assert_eq!(inside, vec![address(v4().address(), 32)]);
        prop_assert!(actual.routes.iter().any(Route::is_in_our_place));
        // Whatever is not ours is as it was.
        for route in &plan.foreign_routes {
            prop_assert!(actual.routes.contains(route));
        }
        for owned in &before.addresses {
            let is_inside = v4().networks().iter().any(|it| it.contains(owned.address));
            prop_assert!(is_inside || actual.addresses.contains(owned));
        }
    }
}

#[test]
fn a_complete_device_needs_nothing() {
    assert_eq!(diff_of(&complete()), Diff::default());
    // A second route into the device is an operator's choice.
    let mut actual = complete();
    actual.routes.push(route(DEVICE, 100));
    assert_eq!(diff_of(&actual), Diff::default());
}

#[test]
fn a_bare_device_gets_everything_in_order() {
    let mut bare = complete();
    device(&mut bare).is_up = false;
    bare.addresses.clear();
    bare.routes.clear();
    assert_eq!(
        actions(&bare),
        ["address 10.5.72.0/32 added", "switched on", "route 10.5.0.0/16 dev flannel0 set"]
    );
}

#[test]
fn only_addresses_of_the_network_are_replaced() {
    let mut actual = complete();
    let old = Ipv4Addr::new(10, 5, 99, 0);
    actual.addresses = vec![
        address(old, 32),
        address(v4().address(), 16),
        address(Ipv4Addr::new(198, 51, 100, 1), 24),
    ];
    let expected = [
        "address 10.5.72.0/32 added",
        "address 10.5.99.0/32 removed",
        "address 10.5.72.0/16 removed",
    ];
    assert_eq!(actions(&actual), expected);
}

#[test]
fn foreign_routes_are_found_whatever_they_look_like() {
    let mut multipath = route(DEVICE, 0);
    multipath.next_hops.push(NextHop { interface_index: OTHER, gateway: None });
    let blackhole = Route { kind: RouteKind::BLACKHOLE, next_hops: vec![], ..route(DEVICE, 0) };
    let of_a_service = Route { type_of_service: 16, ..route(OTHER, 100) };
    for foreign in [route(OTHER, 0), multipath, blackhole, of_a_service] {
        let mut actual = complete();
        if foreign.type_of_service == 0 {
            actual.routes.clear();
        }
        actual.routes.push(foreign.clone());
        let plan = diff_of(&actual);
        assert_eq!(plan.foreign_routes, [foreign]);
        assert_eq!(spelled(&plan), [""; 0]);
    }
}

#[test]
fn losing_route_is_not_foreign() {
    let blackhole = Route { kind: RouteKind::BLACKHOLE, next_hops: vec![], ..route(DEVICE, 1) };
    for loser in [route(OTHER, 100), blackhole] {
        let mut actual = complete();
        actual.routes.push(loser);
        assert_eq!(diff_of(&actual), Diff::default());
    }
}

#[test]
fn whole_network_leaves_route_to_the_bridge() {
    let network = v4().network;
    let mut alone = desired();
    let part = OverlayPart { subnet: Some(network), ..v4() };
    let addresses = vec![address(part.address(), 32)];
    alone.v4 = Some(part);
    let bridge = Route { protocol: RouteProtocol(2), ..route(OTHER, 0) };
    for routes in [vec![], vec![bridge]] {
        let listing = Listing { routes, addresses: addresses.clone(), ..complete() };
        assert_eq!(alone.compare(&listing, None).unwrap().v4, Diff::default());
    }
}

#[test]
fn only_a_route_in_place_blocks_ours() {
    let mut actual = complete();
    actual.routes = vec![route(OTHER, 0)];
    assert_eq!(actions(&actual), [""; 0]);
    let added = ["route 10.5.0.0/16 dev flannel0 set"];
    actual.routes = vec![route(OTHER, 100)];
    assert_eq!(actions(&actual), added);
    actual.routes = vec![Route { type_of_service: 16, ..route(OTHER, 0) }];
    assert_eq!(actions(&actual), added);
}

#[test]
fn route_is_spelled_like_ip_route() {
    let spell = |route: &Route| spell(route, &[link(3, "eth3")]);
    let mut it = route(3, 100);
    it.next_hops[0].gateway = "192.0.2.1".parse().ok();
    assert_eq!(spell(&it), "10.5.0.0/16 via 192.0.2.1 dev eth3 metric 100");
    it.next_hops.push(NextHop { interface_index: 4, gateway: None });
    assert_eq!(spell(&it), "10.5.0.0/16 metric 100", "all its ways go at once");
    let blackhole = Route { kind: RouteKind::BLACKHOLE, next_hops: vec![], ..route(3, 5) };
    assert_eq!(spell(&blackhole), "blackhole 10.5.0.0/16 metric 5");
}

#[tokio::test]
async fn paths_that_could_not_be_limited_are_not_desired() {
    // No host has a device of this number.
    let device = LinkId { index: i32::MAX as u32, name: "gone".into() };
    let desired = OverlayDesired { device, ..desired() };
    let mut overlay = Overlay::of(desired);
    let narrow = BTreeMap::from([("10.5.1.0/24".parse().unwrap(), 1372)]);
    overlay.limit_paths(narrow, BTreeMap::new()).await.unwrap_err();
    assert!(
        overlay.desired.v4.as_mut().unwrap().path_mtus.is_empty(),
        "a repair would be blamed on somebody else"
    );
}
