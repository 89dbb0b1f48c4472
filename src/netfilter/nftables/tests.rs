//! Golden text, and what nft 1.0.6 prints of it.

use std::net::Ipv6Addr;

use super::*;
use crate::netfilter::rules::Wanted;
use crate::netfilter::rules::tests::wanted;
use crate::route::Prefix;

const HEAD: &str = "add table ip flannel-ipv4 { comment \"rules for flannel-ipv4\" ; }\n";
const MASQUERADE: &str = include_str!("../golden/masquerade.nft");
const FORWARD: &str = include_str!("../golden/forward.nft");
/// `nft -j list table ip flannel-ipv4` once all of these are in.
const LISTING: &str = include_str!("../golden/listing.json");

const MASQUERADE_V6: &str = include_str!("../golden/masquerade.ip6.nft");
const FORWARD_V6: &str = include_str!("../golden/forward.ip6.nft");
const LISTING_V6: &str = include_str!("../golden/listing.ip6.json");

fn parse(text: &str) -> ListedRules {
    ListedRules::parse(text).unwrap()
}

/// The listing after `change` to its objects.
fn listing(change: impl FnOnce(&mut Vec<Value>)) -> ListedRules {
    let mut list: Value = serde_json::from_str(LISTING).unwrap();
    change(list["nftables"].as_array_mut().unwrap());
    parse(&list.to_string())
}

fn need(found: &ListedRules, trigger: Trigger) -> Option<String> {
    need_of(&wanted(), found, trigger)
}

fn need_of(wanted: &Wanted, found: &ListedRules, trigger: Trigger) -> Option<String> {
    transaction(table(Family::V4), &wanted.chains(Family::V4), found, trigger)
}

fn objects_of(listing: &str) -> Vec<Value> {
    let list: Value = serde_json::from_str(listing).unwrap();
    list["nftables"].as_array().unwrap().clone()
}

fn rules_of<'v>(objects: &'v [Value], chain: &str) -> Vec<&'v Value> {
    objects.iter().filter(|object| object["rule"]["chain"] == chain).collect()
}

#[test]
fn empty_table_gets_flannels_rules() {
    for trigger in [Trigger::Start, Trigger::Resync] {
        let text = need(&ListedRules::default(), trigger).unwrap();
        assert_eq!(text, format!("{HEAD}{MASQUERADE}{FORWARD}"));
    }
}

#[test]
fn each_family_has_a_table_of_its_own() {
    let head = HEAD.replace("ip flannel-ipv4", "ip6 flannel-ipv6").replace("ipv4", "ipv6");
    let chains = wanted().chains(Family::V6);
    let need =
        |found: &ListedRules, trigger| transaction(table(Family::V6), &chains, found, trigger);
    let whole = format!("{head}{MASQUERADE_V6}{FORWARD_V6}");
    for trigger in [Trigger::Start, Trigger::Resync] {
        assert_eq!(need(&ListedRules::default(), trigger).as_deref(), Some(whole.as_str()));
        assert_eq!(need(&parse(LISTING_V6), trigger), None);
        assert_ne!(
            need(&parse(LISTING), trigger),
            None,
            "rules of IPv4 are taken for those of IPv6"
        );
    }
    let handle = rules_of(&objects_of(LISTING_V6), "forward")[1]["rule"]["handle"].to_string();
    let gone = LISTING_V6.replace(&format!("\"handle\": {handle}, "), "");
    let repair = need(&parse(&gone), Trigger::Resync);
    assert_eq!(repair, Some(format!("{head}{FORWARD_V6}")), "one rule is missing");
}

#[test]
fn switched_off_rules_are_not_written() {
    let plain = Wanted { random_ports: false, forward: false, ..wanted() };
    let text = need_of(&plain, &ListedRules::default(), Trigger::Start).unwrap();
    assert_eq!(text, format!("{HEAD}{}", MASQUERADE.replace(" fully-random", "")));
    let forward = Wanted { masquerade: false, ..wanted() };
    let text = need_of(&forward, &ListedRules::default(), Trigger::Start).unwrap();
    assert_eq!(text, format!("{HEAD}{FORWARD}"));
}

#[test]
fn complete_rules_need_no_transaction() {
    let newer = LISTING.replace("\"fully-random\"", "[\"fully-random\"]");
    for text in [LISTING, &newer] {
        for trigger in [Trigger::Start, Trigger::Resync] {
            assert_eq!(need(&parse(text), trigger), None);
        }
    }
}

#[test]
fn each_removed_rule_refills_its_chain() {
    for (chain, count, whole) in [("postrtg", 6, MASQUERADE), ("forward", 2, FORWARD)] {
        for missing in 0..count {
            let found = listing(|objects| {
                let handle = rules_of(objects, chain)[missing]["rule"]["handle"].clone();
                objects.retain(|object| object["rule"]["handle"] != handle);
            });
            let text = need(&found, Trigger::Resync);
            assert_eq!(text, Some(format!("{HEAD}{whole}")), "{chain} without rule {missing}");
        }
    }
}

#[test]
fn resync_keeps_rules_of_another_network() {
    let with_theirs = |objects: &mut Vec<Value>| {
        let ours =
            Value::from(rules_of(objects, "forward").into_iter().cloned().collect::<Vec<_>>());
        let theirs =
            ours.to_string().replace("10.5", "10.6").replace("\"handle\":", "\"handle\":9");
        let theirs: Vec<Value> = serde_json::from_str(&theirs).unwrap();
        objects.extend(theirs);
    };
    let found = listing(with_theirs);
    assert_eq!(need(&found, Trigger::Resync), None);
    assert_eq!(need(&found, Trigger::Start), Some(format!("{HEAD}{FORWARD}")));
    let mut kept = Value::Null;
    let found = listing(|objects| {
        with_theirs(objects);
        kept = rules_of(objects, "forward")[0]["rule"]["handle"].clone();
        let gone = rules_of(objects, "forward")[1]["rule"]["handle"].clone();
        objects.retain(|object| object["rule"]["handle"] != gone);
    });
    let repair = format!(
        "delete rule ip flannel-ipv4 forward handle {kept}\n\
         add rule ip flannel-ipv4 forward ip saddr 10.5.0.0/16 accept\n\
         add rule ip flannel-ipv4 forward ip daddr 10.5.0.0/16 accept\n"
    );
    assert_eq!(need(&found, Trigger::Resync), Some(format!("{HEAD}{repair}")));
}

#[test]
fn chain_without_hook_counts_as_missing() {
    let json = r#"{"nftables":[{"chain":{"name":"forward","handle":1}}]}"#;
    let forward = Wanted { masquerade: false, ..wanted() };
    let text = need_of(&forward, &parse(json), Trigger::Resync);
    assert_eq!(text, Some(format!("{HEAD}{FORWARD}")));
}

#[test]
fn only_wanted_rules_are_recognised() {
    let single = |block| Rule { source: Some(Side::In(block)), ..Rule::all(Verdict::Accept) };
    let single_v6 = single("fd00:5::7/128".parse::<Prefix<Ipv6Addr>>().unwrap().into());
    let single = single("10.5.3.7/32".parse::<Prefix>().unwrap().into());
    let of = |protocol: &str, op: &str, right: Value| {
        let left = json!({ "payload": { "protocol": protocol, "field": "saddr" } });
        json!([{ "match": { "op": op, "left": left, "right": right } }, { "accept": null }])
    };
    let from = |op: &str, right: Value| of("ip", op, right);
    let random = Rule::all(Verdict::Masquerade { random_ports: true });
    let wanted = [single, random, Rule::all(Verdict::Return), single_v6];
    let known = |printed: Value| {
        let printed = (7, printed);
        wanted.into_iter().find(|rule| is_printed_as(rule, &printed))
    };
    assert_eq!(known(from("==", json!("10.5.3.7"))), Some(single));
    assert_eq!(known(of("ip6", "==", json!("fd00:5::7"))), Some(single_v6));
    assert_eq!(known(json!([{ "return": null }])), Some(wanted[2]));
    let mark = json!({ "op": "==", "left": { "meta": { "key": "mark" } }, "right": 16384 });
    for foreign in [
        from("==", json!("192.0.2.1")),
        from("!=", json!("10.5.3.7")),
        from("==", json!("fd00:5::7")),
        from("==", json!({ "prefix": { "addr": "10.5.3.7", "len": 99 } })),
        from("==", json!({ "set": ["10.5.3.7"] })),
        json!([{ "match": mark }, { "return": null }]),
        json!([{ "counter": { "packets": 0, "bytes": 0 } }, { "return": null }]),
        json!([{ "masquerade": null }]),
        json!([{ "masquerade": { "flags": ["random"] } }]),
        json!([{ "masquerade": { "flags": "fully-random", "port": 7 } }]),
        json!([{ "drop": null }]),
        json!([7]),
        json!([]),
        json!(null),
    ] {
        assert_eq!(known(foreign.clone()), None, "{foreign}");
    }
}

#[test]
fn removal_names_only_flannels_tables() {
    let [v4, v6] = [table(Family::V4), table(Family::V6)];
    let tables = [("ip", "filter"), ("inet", v4.1), v4, v6];
    let objects =
        tables.map(|(family, name)| json!({ "table": { "family": family, "name": name } }));
    let list = json!({ "nftables": objects }).to_string();
    let own = removal(&list, |family, name| [v4, v6].contains(&(family, name))).unwrap();
    let text = "delete table ip flannel-ipv4\ndelete table ip6 flannel-ipv6\n";
    assert_eq!(own.as_deref(), Some(text));
    assert_eq!(removal(r#"{"nftables":[]}"#, |_, _| true).unwrap(), None);
}

#[test]
fn malformed_listing_is_an_error() {
    for text in ["", "nonsense", "[]", r#"{"nftables":7}"#, "{}"] {
        assert!(ListedRules::parse(text).is_err() && removal(text, |_, _| true).is_err(), "{text}");
    }
}
