//! Golden text, and what nft 1.0.6 prints of it.

use super::*;
use crate::netfilter::rules::Wanted;

const HEAD: &str = "add table ip flannel-ipv4 { comment \"rules for flannel-ipv4\" ; }\n";

const MASQUERADE: &str = "\
add chain ip flannel-ipv4 postrtg { type nat hook postrouting priority 100 ; comment \"chain to manage traffic masquerading by flannel\" ; }
flush chain ip flannel-ipv4 postrtg
add rule ip flannel-ipv4 postrtg meta mark & 0x4000 == 0x4000 return
add rule ip flannel-ipv4 postrtg ip saddr 10.5.3.0/24 ip daddr 10.5.0.0/16 return
add rule ip flannel-ipv4 postrtg ip saddr 10.5.0.0/16 ip daddr 10.5.3.0/24 return
add rule ip flannel-ipv4 postrtg ip saddr != 10.5.0.0/16 ip daddr 10.5.3.0/24 return
add rule ip flannel-ipv4 postrtg ip saddr 10.5.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random
add rule ip flannel-ipv4 postrtg ip saddr != 10.5.0.0/16 ip daddr 10.5.0.0/16 masquerade fully-random
";

const FORWARD: &str = "\
add chain ip flannel-ipv4 forward { type filter hook forward priority 0 ; comment \"chain to accept flannel traffic\" ; }
flush chain ip flannel-ipv4 forward
add rule ip flannel-ipv4 forward ip saddr 10.5.0.0/16 accept
add rule ip flannel-ipv4 forward ip daddr 10.5.0.0/16 accept
";

/// The expressions of our rules as nft prints them, in their order.
const PRINTED: [(&str, &str); 8] = [
    ("postrtg", r#"{"match":{"op":"==","left":{"&":[{"meta":{"key":"mark"}},16384]},"right":16384}},{"return":null}"#),
    ("postrtg", r#"{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.3.0","len":24}}}},{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"return":null}"#),
    ("postrtg", r#"{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":{"prefix":{"addr":"10.5.3.0","len":24}}}},{"return":null}"#),
    ("postrtg", r#"{"match":{"op":"!=","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":{"prefix":{"addr":"10.5.3.0","len":24}}}},{"return":null}"#),
    ("postrtg", r#"{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"match":{"op":"!=","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":{"prefix":{"addr":"224.0.0.0","len":4}}}},{"masquerade":{"flags":"fully-random"}}"#),
    ("postrtg", r#"{"match":{"op":"!=","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"masquerade":{"flags":["fully-random"]}}"#),
    ("forward", r#"{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"accept":null}"#),
    ("forward", r#"{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":16}}}},{"accept":null}"#),
];

fn wanted() -> Wanted {
    Wanted {
        network: "10.5.0.0/16".parse().unwrap(),
        subnet: "10.5.3.0/24".parse().unwrap(),
        masquerade: true,
        forward: true,
        random_ports: true,
    }
}

/// What nft prints when these rules are in the table.
fn listing(rules: &[(&str, &str)]) -> Found {
    let mut objects = vec![
        r#"{"metainfo":{"version":"1.0.6","json_schema_version":1}}"#.to_owned(),
        r#"{"table":{"family":"ip","name":"flannel-ipv4","handle":1}}"#.to_owned(),
    ];
    for (name, kind, hook) in [("postrtg", "nat", "postrouting"), ("forward", "filter", "forward")] {
        objects.push(format!(
            r#"{{"chain":{{"family":"ip","table":"flannel-ipv4","name":"{name}","handle":1,"type":"{kind}","hook":"{hook}","prio":0,"policy":"accept"}}}}"#
        ));
    }
    for (handle, (chain, expressions)) in (10..).zip(rules) {
        objects.push(format!(
            r#"{{"rule":{{"family":"ip","table":"flannel-ipv4","chain":"{chain}","handle":{handle},"expr":[{expressions}]}}}}"#
        ));
    }
    Found::parse(&format!(r#"{{"nftables":[{}]}}"#, objects.join(","))).unwrap()
}

fn need(found: &Found, pass: Pass) -> Option<String> {
    transaction(&wanted().chains(), found, pass)
}

#[test]
fn a_bare_host_gets_flannel_s_rules_with_the_third_return_as_iptables_has_it() {
    for pass in [Pass::First, Pass::Check] {
        let text = need(&Found::default(), pass).unwrap();
        assert_eq!(text, format!("{HEAD}{MASQUERADE}{FORWARD}"));
    }
}

#[test]
fn what_was_not_asked_for_is_left_out() {
    let plain = Wanted { random_ports: false, forward: false, ..wanted() };
    let text = transaction(&plain.chains(), &Found::default(), Pass::First).unwrap();
    assert_eq!(text, format!("{HEAD}{}", MASQUERADE.replace(" fully-random", "")));
    let forward = Wanted { masquerade: false, ..wanted() };
    let text = transaction(&forward.chains(), &Found::default(), Pass::First).unwrap();
    assert_eq!(text, format!("{HEAD}{FORWARD}"));
}

#[test]
fn nothing_missing_is_nothing_to_do() {
    for pass in [Pass::First, Pass::Check] {
        assert_eq!(need(&listing(&PRINTED), pass), None);
    }
}

#[test]
fn each_rule_that_goes_missing_brings_its_chain_back() {
    for at in 0..PRINTED.len() {
        let mut rest = PRINTED.to_vec();
        let (chain, _) = rest.remove(at);
        let whole = if chain == "forward" { FORWARD } else { MASQUERADE };
        assert_eq!(need(&listing(&rest), Pass::Check), Some(format!("{HEAD}{whole}")), "{at}");
    }
}

#[test]
fn another_network_in_the_table_stays_after_the_first_pass() {
    let others: Vec<_> =
        PRINTED[6..].iter().map(|(chain, text)| (*chain, text.replace("10.5", "10.6"))).collect();
    let mut all: Vec<_> = others.iter().map(|(chain, text)| (*chain, text.as_str())).collect();
    all.extend(PRINTED);
    assert_eq!(need(&listing(&all), Pass::Check), None);
    assert_eq!(need(&listing(&all), Pass::First), Some(format!("{HEAD}{FORWARD}")));
    all.pop();
    let repair = "delete rule ip flannel-ipv4 forward handle 18\n\
                  add rule ip flannel-ipv4 forward ip saddr 10.5.0.0/16 accept\n\
                  add rule ip flannel-ipv4 forward ip daddr 10.5.0.0/16 accept\n";
    assert_eq!(need(&listing(&all), Pass::Check), Some(format!("{HEAD}{repair}")));
}

#[test]
fn a_chain_without_its_hook_is_not_ours() {
    let json = r#"{"nftables":[{"chain":{"name":"forward","handle":1}}]}"#;
    let forward = Wanted { masquerade: false, ..wanted() };
    let text = transaction(&forward.chains(), &Found::parse(json).unwrap(), Pass::Check);
    assert_eq!(text, Some(format!("{HEAD}{FORWARD}")));
}

#[test]
fn rules_of_others_are_not_read_as_ours() {
    for text in [
        r#"{"match":{"op":"==","left":{"meta":{"key":"mark"}},"right":16384}},{"return":null}"#,
        r#"{"counter":{"packets":0,"bytes":0}},{"return":null}"#,
        r#"{"masquerade":{"flags":["random"]}}"#,
        r#"{"masquerade":{"flags":"fully-random","port":7}}"#,
        r#"{"match":{"op":"in","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":"1.2.3.4"}},{"accept":null}"#,
        r#"{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":{"prefix":{"addr":"10.5.0.0","len":99}}}},{"accept":null}"#,
        r#"{"drop":null}"#,
        "7",
        "",
    ] {
        let expressions = serde_json::from_str(&format!("[{text}]")).unwrap();
        assert_eq!(parse_rule(&expressions), None, "{text}");
    }
}

#[test]
fn only_flannel_s_tables_are_removed() {
    let json = r#"{"nftables":[{"table":{"family":"ip","name":"filter"}},
        {"table":{"family":"inet","name":"flannel-ipv4"}},{"table":{"family":"ip","name":"flannel-ipv4"}},
        {"table":{"family":"ip6","name":"flannel-ipv6"}}]}"#;
    let tables = own_tables(json).unwrap();
    assert_eq!(
        removal(&tables).unwrap(),
        "delete table ip flannel-ipv4\ndelete table ip6 flannel-ipv6\n"
    );
    assert_eq!(removal(&own_tables(r#"{"nftables":[]}"#).unwrap()), None);
}

#[test]
fn output_that_is_no_list_is_an_error() {
    for text in ["", "nonsense", "[]", r#"{"nftables":7}"#] {
        assert!(Found::parse(text).is_err() && own_tables(text).is_err(), "{text}");
    }
}
