//! Golden text, and what nft 1.0.6 prints of it.

use super::*;

const WHOLE: &str = include_str!("../golden/guard.nft");
/// `nft -j list table ip weft-guard-8285` once that is in.
const LISTING: &str = include_str!("../golden/guard.json");

fn guard(peers: &[&str]) -> Guard {
    let peers = peers.iter().map(|text| text.parse().unwrap()).collect();
    Guard { port: 8285, network: "10.5.0.0/16".parse().unwrap(), peers }
}

fn both() -> Guard {
    guard(&["192.0.2.1", "192.0.2.2"])
}

fn need(listing: &str) -> Option<String> {
    both().transaction(&Found::parse(listing).unwrap())
}

#[test]
fn missing_table_is_made_in_one_step() {
    assert_eq!(both().transaction(&Found::default()).unwrap(), WHOLE);
    let nobody = WHOLE.replace("elements = { 192.0.2.1, 192.0.2.2 } ; ", "");
    assert_eq!(guard(&[]).transaction(&Found::default()).unwrap(), nobody, "{{ }} is an error");
}

#[test]
fn what_is_right_is_left_alone() {
    assert_eq!(need(LISTING), None);
    let counted = LISTING.replace("\"packets\": 0", "\"packets\": 7");
    assert_eq!(need(&counted), None, "its counters begin anew at each check");
    assert_eq!(need(&LISTING.replace("\"handle\": 2", "\"handle\": 99")), None);
    let empty = LISTING.replace("\"elem\"", "\"none\"");
    assert_eq!(guard(&[]).transaction(&Found::parse(&empty).unwrap()), None);
}

#[test]
fn peers_come_and_go_without_a_moment_of_none() {
    let found = Found::parse(LISTING).unwrap();
    let set = "element ip weft-guard-8285 peers";
    let text = guard(&["192.0.2.1", "192.0.2.9", "192.0.2.7"]).transaction(&found).unwrap();
    let edits = format!("delete {set} {{ 192.0.2.2 }}\nadd {set} {{ 192.0.2.7, 192.0.2.9 }}\n");
    assert_eq!(text, edits);
    let text = guard(&[]).transaction(&found).unwrap();
    assert_eq!(text, format!("delete {set} {{ 192.0.2.1, 192.0.2.2 }}\n"));
}

#[test]
fn whatever_opens_it_is_undone() {
    for (what, from, to) in [
        ("rule", "\"drop\": null", "\"accept\": null"),
        ("port", "\"right\": 8285", "\"right\": 8286"),
        ("network", "\"len\": 16", "\"len\": 17"),
        ("hook", "\"hook\": \"input\"", "\"hook\": \"output\""),
        ("priority", "\"prio\": 0", "\"prio\": 300"),
        ("policy", "\"policy\": \"accept\"", "\"policy\": \"drop\""),
        ("set", "\"type\": \"ipv4_addr\"", "\"type\": \"ipv6_addr\""),
        ("element", "\"192.0.2.2\"", "{\"range\": [\"192.0.2.0\", \"192.0.2.255\"]}"),
        ("table", "\"table\": {", "\"table\": { \"flags\": \"dormant\","),
    ] {
        let edited = LISTING.replacen(from, to, 1);
        assert!(edited != LISTING, "{what} is not in the listing");
        assert_eq!(need(&edited).as_deref(), Some(WHOLE), "{what}");
    }
}

#[test]
fn dropped_packets_are_told_apart() {
    let counted = LISTING.replacen("\"packets\": 0", "\"packets\": 7", 1).replacen(
        "\"packets\": 0",
        "\"packets\": 2",
        1,
    );
    let dropped = Dropped { from_strangers: 7, from_pods: 2 };
    assert_eq!(Found::parse(&counted).unwrap().dropped, dropped);
}

#[test]
fn only_guards_are_removed() {
    let tables = r#"{"nftables": [{"metainfo": {}},
        {"table": {"family": "ip", "name": "weft-guard-8285"}},
        {"table": {"family": "ip", "name": "weft-guard-8472"}},
        {"table": {"family": "ip6", "name": "weft-guard-8285"}},
        {"table": {"family": "ip", "name": "weft-guard-of-another"}},
        {"table": {"family": "ip", "name": "flannel-ipv4"}}]}"#;
    let both = "delete table ip weft-guard-8285\ndelete table ip weft-guard-8472\n";
    assert_eq!(removal(tables, |_| true).unwrap().as_deref(), Some(both));
    let one = removal(tables, |name| name == table_name(8472)).unwrap();
    assert_eq!(one.as_deref(), Some("delete table ip weft-guard-8472\n"));
    assert_eq!(removal(tables, |name| name == "weft-guard-1").unwrap(), None);
    assert!(removal("no JSON", |_| true).is_err());
}
