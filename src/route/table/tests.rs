//! The table on literal prefixes: both layouts, every level, the ends of the address space.

use std::sync::atomic::Ordering;

use super::*;

fn peer(subnet: &str, host: u8) -> Arc<Peer> {
    Arc::new(Peer::new(subnet.parse().unwrap(), SocketAddr::from(([192, 0, 2, host], 8285))))
}

/// The last byte of the public address of the peer that `destination` is routed to.
fn route(table: &Table, destination: &str) -> Option<u8> {
    let peer = table.lookup(destination.parse::<Ipv4Addr>().unwrap())?;
    let SocketAddr::V4(address) = peer.address else { panic!("of IPv6") };
    Some(address.ip().octets()[3])
}

fn is_dense(table: &Table) -> bool {
    matches!(table.v4.lookup, Lookup::Dense { .. })
}

#[test]
fn the_empty_table_routes_nothing() {
    let table = Table::build(Vec::new());
    assert!(table.peers().is_empty());
    for destination in ["0.0.0.0", "10.5.1.1", "255.255.255.255"] {
        assert_eq!(route(&table, destination), None);
    }
    assert!(!table.has_peer_at(Ipv4Addr::UNSPECIFIED));
}

#[test]
fn equal_lengths_make_a_dense_table() {
    let table = Table::build(vec![peer("10.5.9.0/24", 9), peer("10.5.3.0/24", 3)]);
    assert!(is_dense(&table));
    assert_eq!(table.peers().len(), 2);
    let cases = [
        ("10.5.2.255", None),
        ("10.5.3.0", Some(3)),
        ("10.5.3.255", Some(3)),
        ("10.5.4.0", None),
        ("10.5.9.1", Some(9)),
        ("10.5.10.0", None),
        ("0.0.0.0", None),
        ("255.255.255.255", None),
    ];
    for (destination, expected) in cases {
        assert_eq!(route(&table, destination), expected, "{destination}");
    }
}

#[test]
fn disjoint_prefixes_make_a_dense_table() {
    let table = Table::build(vec![
        peer("10.5.8.0/22", 8),
        peer("10.5.3.0/24", 3),
        peer("10.5.4.128/25", 4),
    ]);
    assert!(is_dense(&table));
    let cases = [
        ("10.5.2.255", None),
        ("10.5.3.0", Some(3)),
        ("10.5.3.255", Some(3)),
        ("10.5.4.127", None),
        ("10.5.4.128", Some(4)),
        ("10.5.5.0", None),
        ("10.5.8.0", Some(8)),
        ("10.5.11.255", Some(8)),
        ("10.5.12.0", None),
    ];
    for (destination, expected) in cases {
        assert_eq!(route(&table, destination), expected, "{destination}");
    }
    let wide = Table::build(vec![peer("10.0.0.0/16", 1), peer("10.0.5.0/24", 5)]);
    assert_eq!(route(&wide, "10.0.5.1"), Some(5));
    assert_eq!(route(&wide, "10.0.6.1"), Some(1));
}

#[test]
fn dense_tables_at_both_address_space_ends() {
    let table = Table::build(vec![peer("255.255.255.0/24", 2), peer("255.255.254.0/24", 1)]);
    assert!(is_dense(&table));
    assert_eq!(route(&table, "255.255.255.255"), Some(2));
    assert_eq!(route(&table, "255.255.253.255"), None);
    assert_eq!(route(&table, "0.0.0.1"), None);
    let table = Table::build(vec![peer("255.255.255.255/32", 2), peer("255.255.255.254/32", 1)]);
    assert_eq!(route(&table, "255.255.255.255"), Some(2));
    assert_eq!(route(&table, "255.255.255.253"), None);
    assert_eq!(route(&table, "0.0.0.0"), None);
    let halves = Table::build(vec![peer("0.0.0.0/1", 1), peer("128.0.0.0/1", 2)]);
    assert!(is_dense(&halves));
    assert_eq!(route(&halves, "127.255.255.255"), Some(1));
    assert_eq!(route(&halves, "128.0.0.0"), Some(2));
}

#[test]
fn the_longest_prefix_wins_on_every_level() {
    let subnets = [
        "0.0.0.0/0",
        "10.0.0.0/8",
        "10.5.0.0/16",
        "10.5.0.0/17",
        "10.5.16.0/20",
        "10.5.17.0/24",
        "10.5.17.16/28",
        "10.5.17.20/30",
        "10.5.17.21/32",
    ];
    let mut peers: Vec<_> = subnets.iter().zip(1..).map(|(net, host)| peer(net, host)).collect();
    let mut table = Table::build(peers.clone());
    for _ in 0..2 {
        assert!(!is_dense(&table));
        let cases = [
            ("9.0.0.1", 1),
            ("11.0.0.0", 1),
            ("10.4.255.255", 2),
            ("10.6.0.0", 2),
            ("10.5.128.0", 3),
            ("10.5.255.255", 3),
            ("10.5.0.0", 4),
            ("10.5.127.255", 4),
            ("10.5.16.0", 5),
            ("10.5.31.255", 5),
            ("10.5.17.0", 6),
            ("10.5.17.15", 6),
            ("10.5.17.32", 6),
            ("10.5.17.16", 7),
            ("10.5.17.24", 7),
            ("10.5.17.20", 8),
            ("10.5.17.23", 8),
            ("10.5.17.21", 9),
        ];
        for (destination, expected) in cases {
            assert_eq!(route(&table, destination), Some(expected), "{destination}");
        }
        peers.reverse();
        table = Table::build(peers.clone());
    }
}

#[test]
fn the_last_of_several_equal_subnets_wins() {
    for other in ["10.6.0.0/24", "10.6.0.0/16"] {
        let table = Table::build(vec![
            peer("10.5.1.0/24", 1),
            peer(other, 9),
            peer("10.5.1.0/24", 2),
            peer("10.5.1.0/24", 3),
        ]);
        assert_eq!(table.peers().len(), 2);
        assert_eq!(route(&table, "10.5.1.1"), Some(3));
        assert_eq!(route(&table, "10.6.0.1"), Some(9));
        assert!(!table.has_peer_at(Ipv4Addr::new(192, 0, 2, 1)), "the loser is gone");
    }
}

#[test]
fn subnets_far_apart_are_searched() {
    let near = Table::build(vec![peer("10.0.0.0/28", 1), peer("10.255.255.240/28", 2)]);
    assert!(is_dense(&near));
    let far = Table::build(vec![peer("10.0.0.0/28", 1), peer("11.0.0.0/28", 2)]);
    assert!(!is_dense(&far));
    for table in [near, far] {
        assert_eq!(route(&table, "10.0.0.15"), Some(1));
        assert_eq!(route(&table, "10.0.0.16"), None);
    }
}

/// 65,536 leases as far apart as a hostile store can put them.
#[test]
fn a_search_costs_16_bytes_per_peer() {
    let peers: Vec<_> = (0..65_536u32)
        .map(|index| {
            let address = Ipv4Addr::from_bits(index << 16 | (index & 0xff) << 8);
            let subnet = Prefix::new(address, 31 + (index % 2) as u8).unwrap();
            let address = SocketAddr::from((Ipv4Addr::from_bits(index), 8285));
            Arc::new(Peer::new(subnet.into(), address))
        })
        .collect();
    let table = Table::build(peers);
    let Lookup::Cuts(cuts) = &table.v4.lookup else { panic!("a dense table") };
    assert!(size_of_val(&cuts[..]) <= 16 * 65_536 + 8);
    for peer in table.peers() {
        let found = table.lookup(peer.subnets.v4().unwrap().network()).unwrap();
        assert_eq!(found.subnets, peer.subnets);
    }
}

#[test]
fn outer_addresses_are_found_at_any_port() {
    let table = Table::build((1..200).map(|n| peer(&format!("10.5.{n}.0/24"), n)).collect());
    for host in 0..=255u8 {
        let expected = (1..200).contains(&host);
        assert_eq!(table.has_peer_at(Ipv4Addr::new(192, 0, 2, host)), expected, "{host}");
    }
}

#[test]
fn peer_knowledge_survives_a_new_table() {
    let kept = peer("10.5.1.0/24", 1);
    let first = Table::build(vec![Arc::clone(&kept)]);
    let seen = first.lookup(Ipv4Addr::new(10, 5, 1, 1)).unwrap();
    seen.source_proven.store(true, Ordering::Relaxed);
    let second = Table::build(vec![peer("10.6.0.0/16", 2), kept]);
    let again = second.lookup(Ipv4Addr::new(10, 5, 1, 1)).unwrap();
    assert!(again.source_proven.load(Ordering::Relaxed));
}

#[test]
fn both_families_lead_to_the_same_peers() {
    let dual = |v4: &str, v6: &str, number| {
        let subnets = Prefixes::of_v4(v4.parse().unwrap(), v6.parse().ok());
        Arc::new(Peer::new(subnets, peer(v4, number).address))
    };
    let table = Table::build(vec![
        dual("10.5.1.0/24", "fd00:5:0:9::/64", 1),
        dual("10.5.2.0/24", "fd00:5:0:3::/64", 2),
        peer("10.5.3.0/24", 3),
    ]);
    let route = |text: &str| {
        let peer = table.lookup(text.parse::<Ipv6Addr>().unwrap())?;
        let endpoint = table.endpoint(text.parse::<Ipv6Addr>().unwrap()).unwrap();
        assert_eq!(table.address(endpoint), peer.address);
        peer.subnets.v4().map(|subnet| subnet.to_string())
    };
    assert_eq!(route("fd00:5:0:9::7").as_deref(), Some("10.5.1.0/24"));
    assert_eq!(route("fd00:5:0:3:ffff:ffff:ffff:ffff").as_deref(), Some("10.5.2.0/24"));
    for nowhere in ["fd00:5:0:2::1", "fd00:5:0:4::", "fd00:5:0:a::", "::", "ffff::", "fd00:5::"] {
        assert_eq!(route(nowhere), None, "{nowhere}");
    }
    assert_eq!(table.peers().len(), 3);
    let owner = |pod: &str| {
        let peer = table.owner(pod.parse().unwrap())?;
        peer.subnets.v4().map(|subnet| subnet.to_string())
    };
    assert_eq!(owner("10.5.3.9").as_deref(), Some("10.5.3.0/24"));
    assert_eq!(owner("fd00:5:0:3::1").as_deref(), Some("10.5.2.0/24"));
}

/// Subnets of IPv6 may lie anywhere: a slow walk over all of them is the twin.
#[test]
fn every_ipv6_table_answers_as_the_longest_prefix_says() {
    for seed in 0..200 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let spread = rng.u32(1..=64);
        let subnets: Vec<Prefix<Ipv6Addr>> = (0..rng.usize(1..40))
            .map(|_| {
                let bits = u128::from(rng.u64(..) >> (64 - spread)) << rng.u32(48..72);
                Prefix::new(Ipv6Addr::from_bits((0xfd00 << 112) | bits), rng.u8(40..=72)).unwrap()
            })
            .collect();
        let peers = subnets.iter().zip(1_u8..).map(|(subnet, number)| {
            let v4 = format!("10.5.{number}.0/24");
            let subnets = Prefixes::of_v4(v4.parse().unwrap(), Some(*subnet));
            Arc::new(Peer::new(subnets, peer(&v4, number).address))
        });
        let peers: Vec<_> = peers.collect();
        let table = Table::build(peers.clone());
        for subnet in &subnets {
            let ends = [subnet.network(), subnet.last(), subnet.first_host()];
            let beyond = subnet.next().map(Prefix::network);
            for address in ends.into_iter().chain(beyond) {
                let subnet = |peer: &Peer| peer.subnets.v6().unwrap();
                let holders = peers.iter().filter(|peer| subnet(peer).contains(address));
                // Of equal ones the last wins.
                let expected = holders.max_by_key(|peer| subnet(peer).length_bits());
                let found = table.lookup(address).map(|peer| peer.subnets);
                assert_eq!(found, expected.map(|peer| peer.subnets), "seed {seed}: {address}");
            }
        }
    }
}

/// What is sent to, counted and remembered of a host goes by its key, whatever tables come.
#[test]
fn hosts_of_ipv6_keep_their_keys_while_tables_change() {
    let peer = |number: u16| {
        let subnet = Prefix::new(Ipv6Addr::new(0xfd00, 5, 0, number, 0, 0, 0, 0), 64).unwrap();
        let host = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0xffff - number);
        Arc::new(Peer::new(subnet.into(), SocketAddr::from((host, 8285))))
    };
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut table, mut known) = (Table::provisional(), BTreeMap::new());
    for _ in 0..100 {
        let peers: Vec<_> = (1..60).filter(|_| rng.bool()).map(peer).collect();
        table = Table::build_after(&table, peers.clone());
        assert_eq!(table.peers().len(), peers.len());
        for peer in &peers {
            let endpoint = table.endpoint(peer.subnets.v6().unwrap().first_host()).unwrap();
            assert_eq!(table.address(endpoint), peer.address, "packets go to another host");
            let before = known.insert(peer.address, endpoint);
            assert!(before.is_none_or(|before| before == endpoint), "another key");
            assert_eq!(table.host_key(peer.address.ip()), endpoint.host);
            assert!(table.has_peer_at(peer.address.ip()));
        }
        // What waits to be sent may be to one that has left.
        for (address, endpoint) in &known {
            assert_eq!(table.address(*endpoint), *address, "a host that left lost its key");
        }
    }
    let keys: std::collections::BTreeSet<_> = known.values().map(|it| it.host).collect();
    assert_eq!(keys.len(), known.len(), "two hosts share a key");
    let stranger = table.host_key("2001:db8::1:1".parse().unwrap());
    assert_eq!(stranger, HostKey::NOBODY);
    let nowhere = table.address(Endpoint { host: stranger, port: 8285 });
    assert!(nowhere.ip().is_unspecified(), "{nowhere}");
}
