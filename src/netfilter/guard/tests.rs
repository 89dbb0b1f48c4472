//! Golden text, and what nft 1.0.6 prints of it.

use super::*;
use crate::netfilter::nftables::removal;

const WHOLE: &str = include_str!("../golden/guard.nft");
/// `nft -j list table ip weft-guard-10.5.0.0-16` once that is in.
const LISTING: &str = include_str!("../golden/guard.json");

fn guard(peers: &[&str]) -> TunnelGuard {
    let peers = peers.iter().map(|text| text.parse().unwrap()).collect();
    let tunnel = TunnelEnd::Udp("192.0.2.9:8285".parse().unwrap());
    let network: Prefix = "10.5.0.0/16".parse().unwrap();
    TunnelGuard { table: table_name(network.into()), tunnel, network, peers }
}

fn both() -> TunnelGuard {
    guard(&["192.0.2.1", "192.0.2.2"])
}

fn parse(listing: &str) -> ListedGuard {
    ListedGuard::parse(listing).unwrap()
}

#[test]
fn the_table_is_made_in_one_step() {
    assert_eq!(both().whole(), WHOLE);
    let nobody = WHOLE.replace("elements = { 192.0.2.1, 192.0.2.2 } ; ", "");
    assert_eq!(guard(&[]).whole(), nobody, "{{ }} is an error");
    let vxlan = TunnelGuard { tunnel: TunnelEnd::Vxlan { port: 8472, vni: 7 }, ..both() };
    let of_vxlan = WHOLE
        .replace("ip daddr 192.0.2.9 udp dport 8285", "udp dport 8472 @th,96,24 7")
        .replace("8285", "8472");
    assert_eq!(vxlan.whole(), of_vxlan);
    let v6 = TunnelGuard::<Ipv6Addr> {
        table: vxlan.table,
        tunnel: vxlan.tunnel,
        network: "fd00:5::/48".parse().unwrap(),
        peers: ["fd99::1", "fd99::2"].map(|text| text.parse().unwrap()).into(),
    };
    let of_v6 = of_vxlan
        .replace(" ip ", " ip6 ")
        .replace("ipv4_addr", "ipv6_addr")
        .replace("saddr 10.5.0.0/16", "saddr fd00:5::/48")
        .replace("192.0.2.1, 192.0.2.2", "fd99::1, fd99::2");
    assert_eq!(v6.whole(), of_v6);
}

#[test]
fn with_wireguard_packets_in_the_clear_are_kept_from_pods() {
    let tunnel = TunnelEnd::Wireguard { port: 51820, ipv6_port: 51821 };
    let whole = TunnelGuard { tunnel, ..guard(&[]) }.whole();
    let rules: Vec<_> =
        whole.lines().filter_map(|line| line.strip_prefix("add rule ip ")).collect();
    let rest = "iifname != \"lo\" ip saddr 10.5.0.0/16 fib saddr . iif oif missing counter drop";
    let wanted = ["input", "forward"].map(|it| format!("weft-guard-10.5.0.0-16 {it} {rest}"));
    assert_eq!(rules, wanted);
}

#[test]
fn peers_come_and_go_without_a_moment_of_none() {
    let found = parse(LISTING);
    assert_eq!(both().edits(&found), None);
    let set = "element ip weft-guard-10.5.0.0-16 peers";
    let text = guard(&["192.0.2.1", "192.0.2.9", "192.0.2.7"]).edits(&found).unwrap();
    let edits = format!("delete {set} {{ 192.0.2.2 }}\nadd {set} {{ 192.0.2.7, 192.0.2.9 }}\n");
    assert_eq!(text, edits);
    let text = guard(&[]).edits(&found).unwrap();
    assert_eq!(text, format!("delete {set} {{ 192.0.2.1, 192.0.2.2 }}\n"));
    let empty = parse(&LISTING.replace("\"elem\"", "\"none\""));
    assert_eq!(guard(&[]).edits(&empty), None);
}

#[test]
fn a_listing_differs_by_what_somebody_edited_only() {
    let frame = parse(LISTING).frame;
    for (what, from, to) in [
        ("counters", "\"packets\": 0", "\"packets\": 7"),
        ("handles", "\"handle\": 2", "\"handle\": 99"),
        ("peers", "\"192.0.2.2\"", "\"192.0.2.3\""),
    ] {
        assert_eq!(parse(&LISTING.replace(from, to)).frame, frame, "{what}");
    }
    // A set without elements has no list of them.
    let mut empty: Value = serde_json::from_str(LISTING).unwrap();
    let objects = empty["nftables"].as_array_mut().unwrap().iter_mut();
    let mut sets = objects.filter_map(|object| object.get_mut("set")?.as_object_mut());
    assert!(sets.next().unwrap().remove("elem").is_some());
    assert_eq!(parse(&empty.to_string()).frame, frame, "the first peer");
    for (what, from, to) in [
        ("rule", "\"drop\": null", "\"accept\": null"),
        ("port", "\"right\": 8285", "\"right\": 8286"),
        ("network", "\"len\": 16", "\"len\": 17"),
        ("hook", "\"hook\": \"input\"", "\"hook\": \"output\""),
        ("priority", "\"prio\": 0", "\"prio\": 300"),
        ("policy", "\"policy\": \"accept\"", "\"policy\": \"drop\""),
        ("set", "\"type\": \"ipv4_addr\"", "\"type\": \"ipv6_addr\""),
        ("table", "\"table\": {", "\"table\": { \"flags\": \"dormant\","),
    ] {
        let edited = LISTING.replacen(from, to, 1);
        assert!(edited != LISTING, "{what} is not in the listing");
        assert_ne!(parse(&edited).frame, frame, "{what}");
    }
    let range = "{\"range\": [\"192.0.2.0\", \"192.0.2.255\"]}";
    let ranged = parse(&LISTING.replace("\"192.0.2.2\"", range));
    assert_eq!(both().edits(&ranged).as_deref(), Some(WHOLE), "more than peers get in");
}

#[test]
fn dropped_packets_are_told_apart() {
    let counted = [7, 1, 2, 3].into_iter().fold(LISTING.to_owned(), |listing, packets| {
        listing.replacen("\"packets\": 0", &format!("\"packets\": {packets}"), 1)
    });
    let dropped = Dropped { from_strangers: 7 + 1, from_pods: 2 + 3 };
    assert_eq!(parse(&counted).dropped, dropped);
}

#[test]
fn only_guards_are_removed() {
    let tables = r#"{"nftables": [{"metainfo": {}},
        {"table": {"family": "ip", "name": "weft-guard-10.5.0.0-16"}},
        {"table": {"family": "ip", "name": "weft-guard-10.6.0.0-16"}},
        {"table": {"family": "ip6", "name": "weft-guard-10.5.0.0-16"}},
        {"table": {"family": "ip", "name": "weft-guard-of-another"}},
        {"table": {"family": "ip", "name": "flannel-ipv4"}}]}"#;
    let [first, other, v6] =
        ["ip weft-guard-10.5.0.0-16", "ip weft-guard-10.6.0.0-16", "ip6 weft-guard-10.5.0.0-16"]
            .map(|table| format!("delete table {table}\n"));
    let removal = |json, is_meant: &dyn Fn(&str) -> bool| {
        removal(json, |family, name| is_guard(family, name) && is_meant(name))
    };
    assert_eq!(removal(tables, &|_| true).unwrap(), Some(first + &other + &v6));
    let alone = table_name("fd00:5::/48".parse().unwrap());
    assert_eq!(alone, "weft-guard-fd00_5__-48", "nft takes no colon");
    let second = table_name("10.6.0.0/16".parse().unwrap());
    let one = removal(tables, &|name| name == second).unwrap();
    assert_eq!(one.as_deref(), Some("delete table ip weft-guard-10.6.0.0-16\n"));
    assert_eq!(removal(tables, &|name| name == "weft-guard-1").unwrap(), None);
    assert!(removal("no JSON", &|_| true).is_err());
}
