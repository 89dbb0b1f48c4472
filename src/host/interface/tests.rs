//! Every branch of the selection, over snapshots written by hand.

use super::*;
use crate::host::state::Route;
use crate::host::state::tests::{self as state, link};

fn address(interface_index: u32, text: &str) -> Address {
    state::address(interface_index, text.parse().unwrap(), 24)
}

fn route(destination: &str, metric: u32, interfaces: &[u32]) -> Route {
    state::route(destination.parse().unwrap(), metric, interfaces)
}

/// lo, eth0 with two addresses, eth1 with one, a dummy without any; default through eth1.
fn host() -> Listing {
    Listing {
        links: vec![link(1, "lo"), link(2, "eth0"), link(3, "eth1"), link(4, "dummy0")],
        addresses: vec![
            address(1, "127.0.0.1"),
            address(2, "10.0.0.2"),
            address(2, "172.16.0.2"),
            address(3, "192.0.2.3"),
        ],
        routes: vec![route("10.0.0.0/24", 0, &[2]), route("0.0.0.0/0", 100, &[3])],
        ..Listing::default()
    }
}

fn options() -> InterfaceOptions {
    InterfaceOptions::default()
}

fn with_interfaces(interfaces: &[&str]) -> InterfaceOptions {
    InterfaceOptions {
        interfaces: interfaces.iter().map(ToString::to_string).collect(),
        ..options()
    }
}

fn with_regexes(regexes: &[&str]) -> InterfaceOptions {
    let regexes = regexes.iter().map(|text| Regex::new(text).unwrap()).collect();
    InterfaceOptions { regexes, ..options() }
}

fn choose(options: &InterfaceOptions, snapshot: &Listing) -> (String, Vec<String>) {
    choose_by(options, snapshot, None)
}

fn choose_by(
    options: &InterfaceOptions,
    snapshot: &Listing,
    path: Option<Found<PathToHost>>,
) -> (String, Vec<String>) {
    let mut notes = Vec::new();
    let text = match select(options, snapshot, path, &mut notes) {
        Ok(chosen) => {
            let ExternalInterface { name, index, addresses, mtu_bytes } = chosen;
            let v4 = addresses.v4().map(|v4| format!(" {} {}", v4.address, v4.public_address));
            let v6 = addresses.v6().map(|v6| format!(" {} {}", v6.address, v6.public_address));
            let [v4, v6] = [v4, v6].map(Option::unwrap_or_default);
            assert_eq!(
                snapshot.links.iter().find(|link| link.id.index == index).unwrap().id.name,
                name
            );
            format!("{name}{v4} {mtu_bytes}{v6}")
        }
        Err(error) => {
            let cause = std::error::Error::source(&error);
            cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
        }
    };
    (text, notes)
}

/// Why nothing is chosen.
fn missed(options: &InterfaceOptions, snapshot: &Listing) -> InterfaceError {
    select(options, snapshot, None, &mut Vec::new()).expect_err("nothing fits")
}

fn chosen(options: &InterfaceOptions, snapshot: &Listing) -> String {
    choose(options, snapshot).0
}

#[test]
fn loopback_alias_does_not_hide_the_interface() {
    let mut host = host();
    host.addresses.push(address(1, "192.0.2.3"));
    let public_ip = "192.0.2.3".parse().ok();
    for options in [
        InterfaceOptions { public_ip, ..options() },
        with_interfaces(&["192.0.2.3"]),
        with_regexes(&["192\\.0"]),
    ] {
        assert_eq!(chosen(&options, &host), "eth1 192.0.2.3 192.0.2.3 1500", "{options:?}");
    }
    host.addresses.push(address(1, "198.51.100.1"));
    let only_there = with_interfaces(&["198.51.100.1"]);
    assert_eq!(chosen(&only_there, &host), "lo 198.51.100.1 198.51.100.1 1500", "it was asked for");
}

#[test]
fn without_options_the_default_route_decides() {
    let (text, notes) = choose(&options(), &host());
    assert_eq!(text, "eth1 192.0.2.3 192.0.2.3 1500");
    assert_eq!(
        notes,
        [
            "Determining IP address of default interface",
            "Using interface with name eth1 and address 192.0.2.3",
            "Defaulting external address to interface address (192.0.2.3)",
        ]
    );
}

#[test]
fn first_default_route_decides() {
    let mut host = host();
    host.routes = vec![route("0.0.0.0/0", 50, &[2]), route("0.0.0.0/0", 100, &[3])];
    assert_eq!(chosen(&options(), &host), "eth0 10.0.0.2 10.0.0.2 1500");
}

#[test]
fn defaults_that_name_no_interface_are_errors() {
    let mut host = host();
    host.routes = vec![route("0.0.0.0/0", 0, &[2, 3]), route("0.0.0.0/0", 100, &[3])];
    assert!(missed(&options(), &host).to_string().contains(" any valid "));
    for route in [route("0.0.0.0/0", 0, &[]), route("10.0.0.0/8", 0, &[2])] {
        host.routes = vec![route];
        assert!(missed(&options(), &host).to_string().contains(" any valid "));
    }
    host.routes = vec![route("0.0.0.0/0", 0, &[77])];
    assert!(chosen(&options(), &host).contains("77"), "the index is not named");
}

#[test]
fn a_public_ip_alone_selects_its_owner() {
    let public = |text: &str| InterfaceOptions { public_ip: text.parse().ok(), ..options() };
    let (text, notes) = choose(&public("172.16.0.2"), &host());
    assert_eq!(text, "eth0 172.16.0.2 172.16.0.2 1500");
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert!(notes.iter().all(|note| note.contains("172.16.0.2")), "{notes:?}");
    let text = chosen(&public("203.0.113.9"), &host());
    let error = missed(&public("203.0.113.9"), &host());
    assert!(error.to_string().contains(" any valid "), "{error:?}");
    assert!(text.contains("--iface"), "{text}");
}

#[test]
fn public_ip_with_iface_is_only_advertised() {
    let options =
        InterfaceOptions { public_ip: "203.0.113.9".parse().ok(), ..with_interfaces(&["eth0"]) };
    assert_eq!(chosen(&options, &host()), "eth0 10.0.0.2 203.0.113.9 1500");
}

#[test]
fn interfaces_are_tried_in_order() {
    assert_eq!(
        chosen(&with_interfaces(&["eth1", "eth0"]), &host()),
        "eth1 192.0.2.3 192.0.2.3 1500"
    );
    assert_eq!(
        chosen(&with_interfaces(&["172.16.0.2"]), &host()),
        "eth0 172.16.0.2 172.16.0.2 1500"
    );
    let mapped = with_interfaces(&["::ffff:10.0.0.2"]);
    assert_eq!(chosen(&mapped, &host()), "eth0 10.0.0.2 10.0.0.2 1500");

    let (text, notes) =
        choose(&with_interfaces(&["wlan0", "2001:db8::1", "dummy0", "eth0"]), &host());
    assert_eq!(text, "eth0 10.0.0.2 10.0.0.2 1500");
    // Each that failed, and then the one that is taken.
    let mut rest = notes.iter();
    for name in ["wlan0", "2001:db8::1", "dummy0", "eth0"] {
        assert!(rest.any(|note| note.contains(name)), "{name}: {notes:?}");
    }
}

#[test]
fn an_empty_interface_means_the_default() {
    assert_eq!(chosen(&with_interfaces(&[""]), &host()), "eth1 192.0.2.3 192.0.2.3 1500");
    assert_eq!(chosen(&with_regexes(&[""]), &host()), "eth1 192.0.2.3 192.0.2.3 1500");
}

#[test]
fn patterns_match_addresses_before_names() {
    // eth0's second address matches and is the one that is used.
    assert_eq!(chosen(&with_regexes(&[r"^172\."]), &host()), "eth0 172.16.0.2 172.16.0.2 1500");

    let mut host = host();
    host.links.insert(0, link(9, "vlan192.0.2"));
    host.addresses.push(address(9, "198.51.100.1"));
    assert_eq!(chosen(&with_regexes(&[r"192\.0\.2"]), &host), "eth1 192.0.2.3 192.0.2.3 1500");
    assert_eq!(
        chosen(&with_regexes(&["vlan"]), &host),
        "vlan192.0.2 198.51.100.1 198.51.100.1 1500"
    );
}

#[test]
fn patterns_are_tried_after_interfaces() {
    assert_eq!(chosen(&with_regexes(&["nope", "th1"]), &host()), "eth1 192.0.2.3 192.0.2.3 1500");
    let both = InterfaceOptions { interfaces: vec!["eth1".into()], ..with_regexes(&["eth0"]) };
    assert_eq!(chosen(&both, &host()), "eth1 192.0.2.3 192.0.2.3 1500");
    let fallback = InterfaceOptions { interfaces: vec!["no".into()], ..with_regexes(&["eth0"]) };
    assert_eq!(chosen(&fallback, &host()), "eth0 10.0.0.2 10.0.0.2 1500");
}

#[test]
fn can_reach_is_tried_last() {
    let preferred_source = "172.16.0.2".parse().ok();
    let path = PathToHost { interface_index: 2, preferred_source, gateway: None, is_plain: true };
    let host = host();
    let can_reach = InterfaceOptions { can_reach: "198.51.100.7".parse().ok(), ..options() };
    let by = |path| choose_by(&can_reach, &host, Some(path));
    let (text, notes) = by(Ok(path));
    assert_eq!(text, "eth0 172.16.0.2 172.16.0.2 1500");
    assert!(notes[0].contains("198.51.100.7"), "{notes:?}");

    let named = InterfaceOptions { interfaces: vec!["eth1".into()], ..can_reach.clone() };
    let (text, _) = choose_by(&named, &host, Some(Ok(path)));
    assert_eq!(text, "eth1 192.0.2.3 192.0.2.3 1500");

    let (text, _) = by(Ok(PathToHost { preferred_source: None, ..path }));
    assert_eq!(text, "eth0 10.0.0.2 10.0.0.2 1500");

    let (text, notes) = by(Err("Network is unreachable".into()));
    assert!(text.contains("eth0:10.0.0.2"), "the candidates: {text}");
    assert!(notes[1].contains("198.51.100.7") && notes[1].contains("unreachable"), "{notes:?}");
}

#[test]
fn a_total_miss_lists_every_candidate() {
    let (text, notes) = choose(&with_regexes(&["wlan"]), &host());
    let candidates = "lo:none, eth0:10.0.0.2, eth0:172.16.0.2, eth1:192.0.2.3, dummy0:none";
    assert!(text.contains(candidates), "{text}");
    assert!(notes[0].contains("wlan"), "{notes:?}");
    assert!(notes[0].contains(candidates), "{notes:?}");
}

#[test]
fn global_permanent_primary_address_is_preferred() {
    let mut host = host();
    let pick = |host: &Listing| chosen(&with_interfaces(&["eth0"]), host);
    let dynamic = |text| Address { is_permanent: false, ..address(2, text) };
    let deprecated = |text| Address { is_deprecated: true, ..address(2, text) };
    let secondary = |text| Address { is_secondary: true, ..address(2, text) };

    host.addresses = vec![address(2, "169.254.0.1"), dynamic("10.0.0.2")];
    assert_eq!(pick(&host), "eth0 10.0.0.2 10.0.0.2 1500");
    host.addresses = vec![dynamic("10.0.0.2"), address(2, "10.0.0.3")];
    assert_eq!(pick(&host), "eth0 10.0.0.3 10.0.0.3 1500");
    host.addresses = vec![secondary("10.0.0.2"), address(2, "10.0.0.3")];
    assert_eq!(pick(&host), "eth0 10.0.0.3 10.0.0.3 1500");
    host.addresses = vec![deprecated("10.0.0.2"), dynamic("10.0.0.3")];
    assert_eq!(pick(&host), "eth0 10.0.0.3 10.0.0.3 1500");
    host.addresses = vec![address(2, "10.0.0.9"), address(2, "10.0.0.3")];
    assert_eq!(pick(&host), "eth0 10.0.0.9 10.0.0.9 1500");
    host.addresses = vec![address(2, "169.254.0.1"), address(2, "127.0.0.2")];
    assert_eq!(pick(&host), "eth0 169.254.0.1 169.254.0.1 1500");
    for unusable in ["127.0.0.2", "224.0.0.1", "255.255.255.255", "0.0.0.0"] {
        host.addresses = vec![address(2, unusable)];
        let error = missed(&with_interfaces(&["eth0"]), &host);
        assert!(error.to_string().contains(" that matches "), "{unusable}: {error:?}");
    }
}

#[test]
fn a_loopback_interface_with_a_routable_address_counts() {
    let mut host = host();
    host.addresses.push(address(1, "192.0.2.200"));
    assert_eq!(chosen(&with_interfaces(&["lo"]), &host), "lo 192.0.2.200 192.0.2.200 1500");
}

#[test]
fn an_interface_without_an_mtu_is_refused() {
    let mut host = host();
    host.links[2].mtu_bytes = 0;
    let text = chosen(&options(), &host);
    assert!(text.contains("MTU") && text.contains("192.0.2.3"), "{text}");
    // A later choice is still tried.
    assert_eq!(chosen(&with_interfaces(&["eth1", "eth0"]), &host), "eth0 10.0.0.2 10.0.0.2 1500");
}

/// The host with addresses of IPv6 on eth1: of one link, one that changes, one in doubt, and two
/// that do not.
fn dual() -> Listing {
    let of = |text: &str, change: fn(&mut Address<Ipv6Addr>)| {
        let mut address = Address {
            interface_index: 3,
            address: text.parse().unwrap(),
            prefix_length_bits: 64,
            is_permanent: true,
            is_deprecated: false,
            is_secondary: false,
            is_in_doubt: false,
        };
        change(&mut address);
        address
    };
    let addresses_v6 = vec![
        of("fe80::3", |_| {}),
        of("2001:db8::9", |it| (it.is_secondary, it.is_permanent) = (true, false)),
        of("2001:db8::8", |it| it.is_in_doubt = true),
        of("2001:db8::7", |it| it.is_deprecated = true),
        of("2001:db8::6", |it| it.is_permanent = false),
        of("2001:db8::3", |_| {}),
    ];
    Listing { addresses_v6, ..host() }
}

#[test]
fn both_families_are_of_one_interface_and_of_lasting_addresses() {
    let both = || InterfaceOptions { families: Families::of_v4((), Some(())), ..options() };
    let chosen = |options: &InterfaceOptions, host: &Listing| choose(options, host).0;
    assert_eq!(chosen(&both(), &dual()), "eth1 192.0.2.3 192.0.2.3 1500 2001:db8::3 2001:db8::3");
    let nat = InterfaceOptions { public_ipv6: "2001:db8:1::1".parse().ok(), ..both() };
    assert_eq!(chosen(&nat, &dual()), "eth1 192.0.2.3 192.0.2.3 1500 2001:db8::3 2001:db8:1::1");
    let named = InterfaceOptions { interfaces: vec!["2001:db8::6".to_owned()], ..both() };
    assert_eq!(chosen(&named, &dual()), "eth1 192.0.2.3 192.0.2.3 1500 2001:db8::6 2001:db8::6");
    assert_eq!(
        chosen(&options(), &dual()),
        "eth1 192.0.2.3 192.0.2.3 1500",
        "it was not asked for"
    );
    let mut without = dual();
    without.addresses_v6.truncate(1);
    assert_eq!(chosen(&both(), &without), "eth1 192.0.2.3 192.0.2.3 1500 fe80::3 fe80::3");
    without.addresses_v6.clear();
    assert!(select(&both(), &without, None, &mut Vec::new()).is_err());
}

#[test]
fn a_network_without_ipv4_goes_by_ipv6_alone() {
    let alone = || InterfaceOptions { families: Families::of_v6(None, ()), ..options() };
    let chosen = |options: &InterfaceOptions, host: &Listing| choose(options, host).0;
    let hop = NextHop { interface_index: 3, gateway: "fe80::1".parse().ok() };
    let default = |kind, metric, hop| Route {
        destination: "::/0".parse().unwrap(),
        metric,
        kind,
        protocol: crate::host::state::RouteProtocol::BOOT,
        type_of_service: 0,
        mtu_bytes: None,
        next_hops: vec![hop],
    };
    let mut host = dual();
    // No host in such a network has addresses of IPv4, but that of the loopback.
    host.addresses.retain(|owned| owned.interface_index == 1);
    host.routes.clear();
    missed(&alone(), &host);
    host.routes_v6 = vec![
        default(RouteKind::UNICAST, 1024, hop),
        default(RouteKind::UNREACHABLE, u32::MAX, NextHop { interface_index: 1, gateway: None }),
    ];
    let (text, notes) = choose(&alone(), &host);
    assert_eq!(text, "eth1 1500 2001:db8::3 2001:db8::3", "{notes:?}");
    assert!(notes.iter().any(|note| note.ends_with("and v6 address 2001:db8::3")), "{notes:?}");
    let mut unreachable = host.clone();
    unreachable.routes_v6.remove(0);
    missed(&alone(), &unreachable);
    let public = |text: &str| InterfaceOptions { public_ipv6: text.parse().ok(), ..alone() };
    assert_eq!(chosen(&public("2001:db8::6"), &host), "eth1 1500 2001:db8::6 2001:db8::6");
    let (text, _) = choose(&public("2001:db8:1::1"), &host);
    assert!(text.contains("--public-ipv6"), "{text}");
    let pattern = |text: &str| InterfaceOptions {
        families: Families::of_v6(None, ()),
        ..with_regexes(&[text])
    };
    assert_eq!(chosen(&pattern("^2001:db8::6"), &host), "eth1 1500 2001:db8::6 2001:db8::6");
    let (text, _) = choose(&pattern("^127"), &host);
    assert!(text.contains("2001:db8::3"), "which addresses there are is not said: {text}");
    let reaching = InterfaceOptions { can_reach: "2001:db8:7::7".parse().ok(), ..alone() };
    let path = PathToHost {
        interface_index: 3,
        preferred_source: "2001:db8::6".parse().ok(),
        gateway: None,
        is_plain: true,
    };
    let (text, _) = choose_by(&reaching, &host, Some(Ok(path)));
    assert_eq!(text, "eth1 1500 2001:db8::6 2001:db8::6");
    // A node is not known by what is there before all other addresses, and on every link.
    host.addresses_v6.truncate(1);
    missed(&alone(), &host);
    // The only other one is there, so that it would be no help to say that there is none.
    let deprecated = Address { is_deprecated: true, ..host.addresses_v6[0] };
    let address = "2001:db8::7".parse().unwrap();
    host.addresses_v6.push(Address { address, ..deprecated });
    let (text, _) = choose(&alone(), &host);
    assert!(text.contains("2001:db8::7 is deprecated"), "{text}");
    host.addresses_v6.truncate(1);
    let named = InterfaceOptions { interfaces: vec!["fe80::3".to_owned()], ..alone() };
    assert_eq!(chosen(&named, &host), "eth1 1500 fe80::3 fe80::3", "it was asked for");
}
