//! The checks on a host of a network without IPv4, and on one of both families.

use std::net::Ipv6Addr;

use super::{
    Address, BackendKind, CHECKS, DaemonState, Facts, Finding, Judged, Lease, LeaseIpv6, Link,
    Listing, MacAddress, NextHop, OwnRoute, PeerWay, Route, RouteKind, RouteProtocol, Wrong, host,
    judge, link, parse_iptables, said, vxlan, well,
};
use crate::route::{Prefix, Prefixes};

fn route(destination: &str, interface_index: u32, gateway: Option<&str>) -> Route<Ipv6Addr> {
    let gateway = gateway.map(|gateway| gateway.parse().unwrap());
    Route {
        destination: destination.parse().unwrap(),
        metric: 1024,
        kind: RouteKind::UNICAST,
        protocol: RouteProtocol::BOOT,
        type_of_service: 0,
        mtu_bytes: None,
        next_hops: vec![NextHop { interface_index, gateway }],
    }
}

/// A host of a network without IPv4, which has and forwards none.
fn without_ipv4() -> Facts {
    let mut facts = well(BackendKind::Vxlan);
    let (network, subnet): (Prefix<Ipv6Addr>, Prefix<Ipv6Addr>) =
        ("fd00:5::/48".parse().unwrap(), "fd00:5:0:1::/64".parse().unwrap());
    let status = said(&mut facts);
    (status.device, status.ipv6_device) = (None, Some("flannel-v6.1".to_owned()));
    let ipv6 = Some(LeaseIpv6 { network, subnet, public_ip: "fd99::1".parse().ok() });
    status.lease =
        Some(Lease { network: None, subnet: None, public_ip: None, mtu_bytes: 1430, ipv6 });
    let address = |interface_index, text: &str| Address {
        interface_index,
        address: text.parse().unwrap(),
        prefix_length_bits: 64,
        is_permanent: true,
        is_deprecated: false,
        is_secondary: false,
        is_in_doubt: false,
    };
    let mac = Some(MacAddress([2, 0, 0, 0, 0, 1]));
    let links = vec![
        link(1, "lo", 65536),
        Link { mac, ..link(2, "eth0", 1500) },
        Link { id: link(3, "flannel-v6.1", 0).id, ..vxlan(3, 1430) },
        link(4, "cni0", 1430),
    ];
    let own = [(2, "fe80::1"), (2, "fd99::1"), (4, "fe80::4"), (4, "fd00:5:0:1::1")];
    let addresses_v6 = own.map(|(index, text)| address(index, text)).to_vec();
    let routes_v6 = vec![
        route("fd00:5:0:1::/64", 4, None),
        route("fd00:5:0:1::/128", 3, None),
        route("fd00:5:0:2::/64", 3, Some("fd00:5:0:2::")),
    ];
    facts.host = Some(Listing { links, addresses_v6, routes_v6, ..Listing::default() });
    facts.v4.ways.clear();
    facts.v6.ways = vec![PeerWay {
        host: "fd99::2".parse().unwrap(),
        subnet: "fd00:5:0:2::/64".parse().unwrap(),
        to_refused: None,
        from_refused: None,
        pods_refused: None,
        own_pods_end: None,
        is_alarming: false,
    }];
    facts.sysctls.insert("net/ipv4/ip_forward".to_owned(), 0);
    facts.forwards_ipv6 = Some(true);
    facts.v6.firewall = Some(Vec::new());
    let prefixes = |v6| Prefixes::new(None, Some(v6));
    let says = &mut facts.subnet_file.says;
    (says.networks, says.subnets, says.mtu_bytes) =
        (prefixes(network), prefixes(subnet), Some(1430));
    facts
}

#[test]
fn of_a_host_without_ipv4_that_of_ipv6_is_looked_at() {
    let mut facts = without_ipv4();
    for (id, judge, _) in CHECKS {
        let finding: Finding = judge(&facts).into();
        assert!(matches!(finding.verdict, Judged::Ok | Judged::Skipped), "{id}: {finding:?}");
    }
    for (id, shows) in [
        ("external-interface", "fd99::1"),
        ("overlay-mtu", "flannel-v6.1 has MTU 1430"),
        ("bridge-mtu", "cni0"),
        ("pod-bridge", "cni0"),
        ("foreign-routes", "fd00:5::/48"),
        ("address-overlap", "fd00:5::/48"),
        ("ip-forward", "net.ipv6.conf.all.forwarding"),
        ("way-to-peers", "by IPv6"),
        ("way-from-peers", "by IPv6"),
        ("firewall-output", "8472 over IPv6"),
        ("firewall-input", "neighbour discovery"),
        ("firewall-forward", "fd00:5::/48"),
    ] {
        let finding = judge(id, &facts);
        assert_eq!(finding.verdict, Judged::Ok, "{id}: {finding:?}");
        assert!(finding.evidence.contains(shows), "{id}: {finding:?}");
    }
    let finding = judge("device-forwarding", &facts);
    assert_eq!(finding.verdict, Judged::Skipped);
    assert!(finding.evidence.contains("ip-forward"), "{finding:?}");
    // Before the next start, the subnet file knows.
    facts.daemon.state = DaemonState::Absent;
    assert_eq!(judge("ip-forward", &facts).verdict, Judged::Ok, "nothing here needs IPv4's");
}

/// Faults of what such a host has of IPv6.
const OF_IPV6: &[Wrong] = &[
    ("external-interface", Judged::Skipped, "no fd99::1", |it| {
        host(it)
            .addresses_v6
            .retain(|it| it.address != Ipv6Addr::from([0xfd99, 0, 0, 0, 0, 0, 0, 1]));
    }),
    ("overlay-mtu", Judged::Failed, "flannel-v6.1 has MTU 1450", |it| {
        host(it).links[2].mtu_bytes = 1450;
    }),
    ("bridge-mtu", Judged::Warning, "cni0 has MTU 1500, the overlay 1430", |it| {
        host(it).links[3].mtu_bytes = 1500;
    }),
    ("pod-bridge", Judged::Failed, "cni0 has no address of fd00:5:0:1::/64", |it| {
        host(it).addresses_v6.pop();
    }),
    ("pod-bridge", Judged::Failed, "no route leads into fd00:5:0:1::/64", |it| {
        host(it).routes_v6.remove(0);
    }),
    ("foreign-routes", Judged::Failed, "fd00:5:0:3::/64 dev eth0", |it| {
        host(it).routes_v6.push(route("fd00:5:0:3::/64", 2, None));
    }),
    ("foreign-routes", Judged::Failed, "fd00:5:0:1::9/128 to nowhere", |it| {
        let kind = RouteKind::BLACKHOLE;
        let route = Route { kind, ..route("fd00:5:0:1::9/128", 1, None) };
        it.v6.own_routes = vec![OwnRoute { table: 254, route, path: None }];
    }),
    // Of an earlier subnet.
    ("address-overlap", Judged::Warning, "cni0 has fd00:5:0:9::1", |it| {
        let own = host(it).addresses_v6[3];
        let address = "fd00:5:0:9::1".parse().unwrap_or(own.address);
        host(it).addresses_v6.push(Address { address, ..own });
    }),
    ("ip-forward", Judged::Failed, "net.ipv6.conf.all.forwarding is 0", |it| {
        it.sysctls.insert("net/ipv4/ip_forward".to_owned(), 1);
        it.forwards_ipv6 = Some(false);
    }),
    ("way-to-peers", Judged::Failed, "such as fd99::2: a blackhole", |it| {
        it.v6.ways[0].to_refused = Some("a blackhole route".to_owned());
    }),
    ("way-to-peers", Judged::Failed, "such as fd99::2: a rule", |it| {
        it.v6.ways[0].own_pods_end = Some("a rule".to_owned());
    }),
    ("way-from-peers", Judged::Failed, "such as fd99::2: a rule", |it| {
        it.v6.ways[0].pods_refused = Some("a rule".to_owned());
    }),
    ("firewall-output", Judged::Warning, "policy of OUTPUT in ip6tables", |it| {
        it.v6.firewall = Some(parse_iptables("*filter\n:OUTPUT DROP [0:0]\n"));
    }),
    ("firewall-input", Judged::Warning, "UDP port 8472 is closed to fd99::2", |it| {
        let rules = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -s fd99::/64 -p udp -j DROP\n";
        it.v6.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-input", Judged::Warning, "find each other", |it| {
        let rules = "*filter\n:INPUT DROP [0:0]\n-A INPUT -p udp --dport 8472 -j ACCEPT\n";
        it.v6.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-forward", Judged::Warning, "-i cni0 -o flannel-v6.1 -j DROP", |it| {
        let rules = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i cni0 -o flannel-v6.1 -j DROP\n";
        it.v6.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-forward", Judged::Skipped, "nft", |it| {
        it.v6.firewall = None;
        it.v6.unread = Some("nft is not in PATH".to_owned());
    }),
];

#[test]
fn a_fault_of_one_family_is_found_beside_the_other() {
    let mut v6 = without_ipv4();
    let ipv6 = said(&mut v6).lease.as_ref().unwrap().ipv6;
    let both = || {
        let mut both = well(BackendKind::Vxlan);
        let status = said(&mut both);
        status.ipv6_device = Some("flannel-v6.1".to_owned());
        status.lease.as_mut().unwrap().ipv6 = ipv6;
        both
    };
    let ids = ["pod-bridge", "foreign-routes", "address-overlap"];
    // cni0 has no address of IPv6.
    assert_eq!(judge(ids[0], &both()).verdict, Judged::Failed);
    let with_v6 = |break_it: fn(&mut Listing)| {
        let mut facts = both();
        let of_v6 = v6.host.clone().unwrap();
        let listing = host(&mut facts);
        listing.links.push(Link { id: link(9, "flannel-v6.1", 0).id, ..vxlan(9, 1430) });
        listing.addresses_v6 = of_v6.addresses_v6;
        listing.routes_v6 = vec![
            route("fd00:5:0:1::/64", 4, None),
            route("fd00:5:0:2::/64", 9, Some("fd00:5:0:2::")),
        ];
        break_it(listing);
        facts
    };
    for id in ids {
        let finding = judge(id, &with_v6(|_| {}));
        assert_eq!(finding.verdict, Judged::Ok, "{id}: {finding:?}");
    }
    let finding = judge(ids[0], &with_v6(|it| it.links[3].is_up = false));
    assert_eq!(finding.evidence, "cni0 is down", "told once, for both families");
    let finding =
        judge(ids[1], &with_v6(|it| it.routes_v6.push(route("fd00:5:0:7::/64", 2, None))));
    assert_eq!(finding.verdict, Judged::Failed, "{finding:?}");
    let shows = ["fd00:5:0:7::/64 dev eth0", "none in 10.5.0.0/16"];
    assert!(shows.iter().all(|it| finding.evidence.contains(it)), "{finding:?}");
}

#[test]
fn each_fault_of_ipv6_is_named() {
    for (id, verdict, shows, break_it) in OF_IPV6 {
        let mut facts = without_ipv4();
        break_it(&mut facts);
        let finding = judge(id, &facts);
        assert_eq!(finding.verdict, *verdict, "{id}: {finding:?}");
        assert!(finding.evidence.contains(shows), "{id} does not show {shows:?}: {finding:?}");
    }
}

#[test]
fn rules_of_a_family_say_nothing_of_the_other() {
    let closed = "*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n:OUTPUT DROP [0:0]\n";
    let mut facts = without_ipv4();
    facts.v4.firewall = Some(parse_iptables(closed));
    for id in ["firewall-output", "firewall-input", "firewall-forward"] {
        assert_eq!(judge(id, &facts).verdict, Judged::Ok, "{id}: nothing here is of IPv4");
    }
    // With both, the one that is wrong is named, and what is unread is not called well.
    let mut both = well(BackendKind::Vxlan);
    let ipv6 = said(&mut facts).lease.as_ref().unwrap().ipv6;
    said(&mut both).lease.as_mut().unwrap().ipv6 = ipv6;
    both.v6.firewall = Some(parse_iptables(closed));
    for id in ["firewall-output", "firewall-input", "firewall-forward"] {
        let finding = judge(id, &both);
        assert_eq!(finding.verdict, Judged::Warning, "{id}: {finding:?}");
        assert!(finding.evidence.contains("ip6tables is drop"), "{id}: {finding:?}");
    }
    both.v6.firewall = None;
    let finding = judge("firewall-forward", &both);
    assert_eq!(finding.verdict, Judged::Skipped, "{finding:?}");
    let shows = ["10.5.0.0/16", "nobody read"];
    assert!(shows.iter().all(|it| finding.evidence.contains(it)), "{finding:?}");
}
