//! Rule sets as the programs print them, and what becomes of a tunnel's datagram.

use super::iptables::parse as parse_iptables;
use super::nftables::parse as parse_nftables;
use super::*;
use std::net::Ipv6Addr;

const DATAGRAM: Packet<'static> = Packet {
    content: Content::Udp { port: 8285, source_port: Some(8285) },
    sources: None,
    destinations: None,
    comes_by: Some("eth0"),
    goes_by: None,
    is_for_host: true,
};

fn for_pods() -> Packet<'static> {
    Packet {
        content: Content::Any,
        sources: Some("10.5.0.0/16".parse().unwrap()),
        destinations: Some("10.5.1.0/24".parse().unwrap()),
        comes_by: Some("flannel0"),
        goes_by: None,
        is_for_host: false,
    }
}

/// By what a packet is dropped.
fn dropped<A: KernelFamily>(
    chains: &[Chain<A>],
    hooks: &[Hook],
    packet: &Packet<'_, A>,
) -> Option<String> {
    let (by, _) = dropped_by(chains, hooks, packet, "gone")?;
    by.strip_suffix(", so gone").map(str::to_owned).or(Some(by))
}

fn iptables(hooks: &[Hook], packet: &Packet<'_>, rules: &str) -> Option<String> {
    let policy = "*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n:X - [0:0]\n";
    dropped(&parse_iptables(&format!("{policy}{rules}\nCOMMIT\n")), hooks, packet)
}

#[test]
fn iptables_rules_are_followed() {
    let input = |rules: &str| iptables(RECEIVED, &DATAGRAM, rules);
    let policy = input("");
    assert!(policy.as_ref().is_some_and(|by| by.contains("INPUT")), "{policy:?}");
    let closed = "-A INPUT -i lo -j ACCEPT\n\
                  -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                  -A INPUT -p tcp -m tcp --dport 8285 -j ACCEPT\n\
                  -A INPUT -p udp -m udp ! --dport 8285 -j ACCEPT\n\
                  -A INPUT -p udp -m multiport --dports 53,67:68 -j ACCEPT\n\
                  -A INPUT -p udp -m udp --sport 53 -j ACCEPT";
    assert_eq!(input(closed), policy);
    for open in [
        "-A INPUT -p udp -m udp --dport 8285 -j ACCEPT",
        "-A INPUT -p udp -m udp --dport 8000:9000 -j ACCEPT",
        "-A INPUT -p udp -m comment --comment \"for weft, all\" -m udp --dport 8285 -j ACCEPT",
        "-A INPUT -p udp -m udp --sport 8285 -j ACCEPT",
        "-A INPUT -s 192.0.2.0/24 -j ACCEPT",
        "-A INPUT -m set --match-set nodes src -j ACCEPT",
        "-A INPUT -p udp -m comment --comment \"say \\\"hi\\\" -j DROP\" -j ACCEPT",
        "-A INPUT -j X\n-A X -i eth+ -j ACCEPT",
        "-A INPUT -j UNKNOWN-TARGET",
        "-A INPUT -m conntrack --ctstate UNTRACKED -j ACCEPT",
    ] {
        assert_eq!(input(open), None, "{open}");
    }
    let rule = "-A INPUT -p udp -m udp --dport 8285 -j DROP";
    let in_front = format!("{rule}\n-A INPUT -j ACCEPT");
    assert_eq!(input(&in_front), Some(format!("iptables: {rule}")));
    // All there are, or those of flannel's hosts and of one worker.
    assert_eq!(input("-A INPUT -p udp --sport 8285 -j DROP\n-A INPUT -j ACCEPT"), None);
    assert_eq!(input("-A INPUT -p udp ! --sport 8285 -j DROP\n-A INPUT -j ACCEPT"), None);
    assert!(input("-A INPUT -p udp ! --sport 53 -j DROP\n-A INPUT -j ACCEPT").is_some());
    assert_eq!(input("-A INPUT -s 192.0.2.1/32 -j DROP\n-A INPUT -j ACCEPT"), None);
}

#[test]
fn what_is_for_pods_needs_an_accept() {
    let forward = |rules| iptables(FORWARDED, &for_pods(), rules);
    let docker = "-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                  -A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n\
                  -A FORWARD -j X\n-A X -d 172.17.0.2/32 ! -i docker0 -p tcp -j ACCEPT\n\
                  -A FORWARD -m comment --comment \"kubernetes rules\" -m mark \
                  --mark 0x4000/0x4000 -j ACCEPT";
    assert!(forward(docker).is_some());
    let flannel = "-A FORWARD -j X\n-A X -s 10.5.0.0/16 -j ACCEPT";
    assert_eq!(forward(flannel), None);
    assert_eq!(forward("-A FORWARD -d 10.5.1.0/25 -j ACCEPT"), None, "a part of it may pass");
}

fn nft(expressions: &str, policy: &str) -> Option<String> {
    let text = format!(
        r#"{{"nftables": [{{"metainfo": {{}}}},
        {{"chain": {{"family": "inet", "table": "t", "name": "x", "handle": 1}}}},
        {{"chain": {{"family": "inet", "table": "t", "name": "in", "handle": 2, "type": "filter",
          "hook": "input", "prio": 0, "policy": "{policy}"}}}},
        {{"rule": {{"family": "inet", "table": "t", "chain": "x", "handle": 3,
          "expr": [{{"counter": {{"packets": 0, "bytes": 0}}}}, {{"drop": null}}]}}}},
        {{"rule": {{"family": "inet", "table": "t", "chain": "in", "handle": 4,
          "expr": [{expressions}]}}}}]}}"#
    );
    dropped(&parse_nftables(&text).unwrap(), RECEIVED, &DATAGRAM)
}

#[test]
fn nft_rules_are_followed() {
    let matching = |left: &str, right: &str, rest: &str| {
        format!(r#"{{"match": {{"op": "==", "left": {left}, "right": {right}}}}}, {rest}"#)
    };
    let port = r#"{"payload": {"protocol": "udp", "field": "dport"}}"#;
    let (accept, drop) = (r#"{"accept": null}"#, r#"{"drop": null}"#);
    for right in ["8285", r#"{"set": [53, 8285]}"#, r#"{"range": [8000, 9000]}"#, r#""@ports""#] {
        assert_eq!(nft(&matching(port, right, accept), "drop"), None, "{right}");
    }
    assert!(nft(&matching(port, "53", accept), "drop").is_some(), "the policy");
    let by = nft(&matching(port, "8285", drop), "accept").unwrap();
    assert!(by.contains("inet t") && by.contains(" 4 "), "{by}");
    let from = r#"{"payload": {"protocol": "udp", "field": "sport"}}"#;
    assert_eq!(nft(&matching(from, "8285", accept), "drop"), None);
    assert!(nft(&matching(from, "53", accept), "drop").is_some(), "the policy");
    let source = r#"{"payload": {"protocol": "ip", "field": "saddr"}}"#;
    let some = r#"{"prefix": {"addr": "192.0.2.0", "len": 24}}"#;
    assert_eq!(nft(&matching(source, some, drop), "accept"), None);
    let state = r#"{"ct": {"key": "state"}}"#;
    let of_flows = matching(state, r#"["established", "related"]"#, accept);
    assert!(nft(&of_flows, "drop").is_some());
    let protocol = r#"{"meta": {"key": "l4proto"}}"#;
    assert_eq!(nft(&matching(protocol, r#""udp""#, accept), "drop"), None);
    assert!(nft(&matching(protocol, r#""tcp""#, accept), "drop").is_some());
    assert!(nft(r#"{"jump": {"target": "x"}}"#, "accept").is_some());
    assert_eq!(nft(r#"{"vmap": {}}"#, "drop"), None);
    let states = r#"{"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set":
        [["established", {"accept": null}], ["invalid", {"drop": null}]]}}}"#;
    assert!(nft(states, "drop").is_some());
    let device = r#"{"meta": {"key": "iifname"}}"#;
    for (right, is_dropped) in [(r#""eth*""#, false), (r#""lo""#, true), (r#""@inside""#, false)] {
        let found = nft(&matching(device, right, accept), "drop");
        assert_eq!(found.is_some(), is_dropped, "{right}");
    }
    assert_eq!(nft(r#"{"xt": null}, {"accept": null}"#, "drop"), None);
    assert_eq!(parse_nftables::<Ipv4Addr>("no JSON"), None);
}

#[test]
fn chains_in_a_ring_are_given_up_on() {
    let ring = "-A INPUT -j X\n-A X -j X";
    assert_eq!(iptables(RECEIVED, &DATAGRAM, ring), None);
}

#[test]
fn sleeping_tables_and_untracked_packets_are_no_alarm() {
    let base = r#"{"chain":{"family":"ip","table":"x","name":"in","type":"filter",
        "hook":"input","prio":0,"policy":"drop"}}"#;
    let ruleset = |table: &str, rule: &str| {
        let text = format!(r#"{{"nftables":[{{"table":{table}}},{base}{rule}]}}"#);
        dropped(&parse_nftables(&text).unwrap(), RECEIVED, &DATAGRAM)
    };
    let awake = r#"{"family":"ip","name":"x"}"#;
    assert!(ruleset(awake, "").is_some());
    for flags in [r#""dormant""#, r#"["dormant"]"#] {
        let table = format!(r#"{{"family":"ip","name":"x","flags":{flags}}}"#);
        assert_eq!(ruleset(&table, ""), None, "{flags}");
    }
    let untracked = r#",{"rule":{"family":"ip","table":"x","chain":"in","expr":[
        {"match":{"op":"in","left":{"ct":{"key":"state"}},"right":"untracked"}},
        {"accept":null}]}}"#;
    assert_eq!(ruleset(awake, untracked), None);
}

#[test]
fn named_sets_are_looked_into() {
    let ruleset = |elements: &str, op: &str| {
        format!(
            r#"{{"nftables":[{{"set":{{"family":"inet","table":"t","name":"s","type":"ipv4_addr"
            {elements}}}}},
            {{"chain":{{"family":"inet","table":"t","name":"c","type":"filter","hook":"input",
            "prio":0,"policy":"accept"}}}},
            {{"rule":{{"family":"inet","table":"t","chain":"c","handle":7,"expr":[{{"match":
            {{"op":"{op}","left":{{"payload":{{"protocol":"ip","field":"saddr"}}}},"right":"@s"}}}},
            {{"drop":null}}]}}}}]}}"#
        )
    };
    let is_dropped = |elements, op, from: &str| {
        let packet = Packet { sources: from.parse().ok(), ..DATAGRAM };
        dropped(&parse_nftables(&ruleset(elements, op)).unwrap(), RECEIVED, &packet).is_some()
    };
    let some = r#","elem":["192.0.2.7",{"prefix":{"addr":"198.51.100.0","len":24}},
        {"elem":{"val":"192.0.2.9","timeout":60}}]"#;
    for (from, is_in) in [
        ("192.0.2.7/32", true),
        ("192.0.2.8/32", false),
        ("192.0.2.9/32", true),
        ("198.51.100.77/32", true),
    ] {
        assert_eq!(is_dropped(some, "==", from), is_in, "{from} of a list of the forbidden");
        assert_eq!(is_dropped(some, "!=", from), !is_in, "{from} of a list of the allowed");
    }
    assert!(is_dropped("", "!=", "192.0.2.7/32"), "nobody is allowed");
    let ranges = r#","elem":[{"range":["192.0.2.1","192.0.2.9"]}]"#;
    assert!(!is_dropped(ranges, "==", "192.0.2.7/32"), "a rule that is not understood is no alarm");
}

#[test]
fn every_hook_on_the_way_counts() {
    let chain = |family: &str, hook: &str, device: &str| {
        format!(
            r#"{{"nftables":[{{"chain":{{"family":"{family}","table":"t","name":"c",
            "type":"filter","hook":"{hook}","prio":0,"policy":"drop"{device}}}}}]}}"#
        )
    };
    let is_dropped = |text: String, hooks, packet: &Packet<'_>| {
        dropped(&parse_nftables(&text).unwrap(), hooks, packet).is_some()
    };
    let place = |chains: &[Chain]| dropped_by(chains, RECEIVED, &DATAGRAM, "gone").unwrap().1;
    let netdev = parse_nftables(&chain("netdev", "ingress", "")).unwrap();
    assert!(place(&netdev).contains("netdev") && place(&netdev).contains("hook ingress"));
    let filter = parse_iptables("*filter\n:INPUT DROP [0:0]\nCOMMIT\n");
    assert_eq!(place(&filter), "chain INPUT of iptables (hook input)");
    for device in [r#","dev":"eth0""#, r#","dev":["lo","eth0"]"#] {
        assert!(is_dropped(chain("netdev", "ingress", device), RECEIVED, &DATAGRAM), "{device}");
    }
    let other = r#","dev":"eth1""#;
    assert!(!is_dropped(chain("netdev", "ingress", other), RECEIVED, &DATAGRAM), "another device");
    assert!(is_dropped(chain("inet", "prerouting", ""), RECEIVED, &DATAGRAM));
    assert!(!is_dropped(chain("inet", "output", ""), RECEIVED, &DATAGRAM));
    let nameless = parse_nftables(&chain("netdev", "ingress", "")).unwrap();
    let by = dropped(&nameless, RECEIVED, &DATAGRAM).unwrap();
    assert!(by.contains("eth0"), "a chain of any device is taken for eth0's: {by}");
    let ours = Packet { comes_by: None, goes_by: Some("eth0"), ..DATAGRAM };
    assert!(is_dropped(chain("inet", "output", ""), SENT, &ours));
    assert!(is_dropped(chain("netdev", "egress", r#","dev":"eth0""#), SENT, &ours));
    let raw = "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p udp -m udp --dport 8285 -j DROP\n\
               COMMIT\n*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n";
    assert!(dropped(&parse_iptables(raw), RECEIVED, &DATAGRAM).is_some());
    assert!(dropped(&parse_iptables(raw), SENT, &ours).is_none());
    let out = "*filter\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -o eth+ -p udp --dport 8285 -j REJECT\n";
    assert!(dropped(&parse_iptables(out), SENT, &ours).is_some());
}

/// What drops some of the packets is told; what other rules decide about is not.
/// Several workers of a weft host send from ports of their own as well.
#[test]
fn rules_by_the_source_port_may_drop() {
    let may_drop = |rule: &str, packet: &Packet<'_>| {
        let chains = parse_iptables(&format!("*filter\n:INPUT ACCEPT [0:0]\n{rule}\nCOMMIT\n"));
        may_drop(&chains, RECEIVED, packet).is_some()
    };
    let vxlan = Packet { content: Content::Udp { port: 8285, source_port: None }, ..DATAGRAM };
    for (rule, expected) in [
        ("-A INPUT -p udp -m multiport --sports 1000:9000 -j DROP", true),
        ("-A INPUT -p udp -m udp --sport 53 -j DROP", false),
        ("-A INPUT -p udp -m udp ! --sport 8285 -j DROP", false),
    ] {
        assert_eq!(may_drop(rule, &DATAGRAM), expected, "{rule}");
        assert!(!may_drop(rule, &vxlan), "of flows nothing is known: {rule}");
    }
}

#[test]
fn rules_for_some_packets_may_drop() {
    let nft = |conditions: &str, family: &str, hook: &str, hooks: &[Hook]| {
        let place = format!(r#""family":"{family}","table":"t""#);
        let chain = format!(r#"{{"chain":{{{place},"name":"c","hook":"{hook}"}}}}"#);
        let rule = format!(
            r#"{{"rule":{{{place},"chain":"c","handle":2,"expr":[{conditions},{{"drop":null}}]}}}}"#
        );
        let chains = parse_nftables(&format!(r#"{{"nftables":[{chain},{rule}]}}"#)).unwrap();
        may_drop(&chains, hooks, &for_pods()).is_some()
    };
    let asks = |operator: &str, left: &str, right: &str| {
        format!(r#"{{"match":{{"op":"{operator}","left":{left},"right":{right}}}}}"#)
    };
    let meta = |key: &str| format!(r#"{{"meta":{{"key":"{key}"}}}}"#);
    let field = |protocol: &str, field: &str| {
        format!(r#"{{"payload":{{"protocol":"{protocol}","field":"{field}"}}}}"#)
    };
    let tcp = &asks("==", &meta("l4proto"), r#""tcp""#);
    for (rule, expected) in [
        (&asks(">", &meta("length"), "1300"), true),
        (&asks(">", &field("udp", "length"), "1000"), true),
        (tcp, true),
        (&asks("==", &field("ip", "daddr"), r#""10.5.1.7""#), false),
        (&asks(">", &meta("length"), "1500"), false),
        (&asks("==", &field("ip", "daddr"), r#""192.0.2.7""#), false),
        (&asks("==", &field("tcp", "flags"), "0"), false),
        (&asks("==", &field("tcp", "dport"), "25"), false),
    ] {
        assert_eq!(nft(rule, "ip", "forward", FORWARDED), expected, "{rule}");
    }
    let [bridged, _] = BRIDGED;
    assert!(nft(tcp, "bridge", "postrouting", bridged));
    assert!(!nft(tcp, "bridge", "forward", FORWARDED));
    let of_one_port = asks("==", &meta("oifname"), r#""veth1""#);
    assert!(!nft(&of_one_port, "bridge", "output", bridged));

    let iptables = |rules: &str, packet: &Packet<'_>, hooks: &[Hook]| {
        let policy = "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:X - [0:0]\n";
        let chains = parse_iptables(&format!("{policy}{rules}\nCOMMIT\n"));
        may_drop(&chains, hooks, packet).is_some()
    };
    for (rules, expected) in [
        ("-A FORWARD -p tcp -j DROP", true),
        ("-A FORWARD -d 10.5.1.0/28 -j X\n-A X -p icmp -j REJECT", true),
        ("-A FORWARD -d 10.5.1.7/32 -j X\n-A X -p icmp -j REJECT", false),
        ("-A FORWARD -j ACCEPT\n-A FORWARD -p tcp -j DROP", false),
        (
            "-A FORWARD -p tcp -m x --y -j Z\n\
             -A FORWARD -p udp -m length --length 1300:9000 -j DROP",
            true,
        ),
        ("-A FORWARD -m x --y -j ACCEPT\n-A FORWARD -p tcp -j DROP", false),
        ("-A FORWARD -m conntrack --ctstate INVALID -j DROP", false),
        ("-A FORWARD -d 10.5.1.7/32 -j X\n-A X -m mark ! --mark 0x10000/0x10000 -j REJECT", false),
        ("-A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN,RST -j DROP", false),
        ("-A FORWARD -d 10.96.0.10/32 -p tcp -j REJECT", false),
        ("-A FORWARD ! -i docker0 -o docker0 -j DROP", false),
    ] {
        assert_eq!(iptables(rules, &for_pods(), FORWARDED), expected, "{rules}");
    }
    let long = "-A INPUT -p udp -m length --length 1301:65535 -j DROP";
    assert!(iptables(long, &DATAGRAM, RECEIVED));
    let tcp = "-A INPUT -p tcp -j DROP";
    assert!(!iptables(tcp, &DATAGRAM, RECEIVED), "no datagram of the tunnel");
}

/// A datagram from one peer to this host, or back.
fn between(hooks: &[Hook]) -> Packet<'static> {
    let [own, peer] = ["10.0.0.1/32", "10.0.0.2/32"].map(|it| it.parse().ok());
    match hooks == SENT {
        true => Packet {
            sources: own,
            destinations: peer,
            comes_by: None,
            goes_by: Some("eth0"),
            is_for_host: false,
            ..DATAGRAM
        },
        false => Packet { sources: peer, destinations: own, ..DATAGRAM },
    }
}

/// What kubelet, firewalld, ufw and careful people have on a host where all is well.
#[test]
fn usual_rules_are_no_alarm() {
    let policy = "*filter\n:INPUT DROP [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n\
                  :X - [0:0]\n:Y - [0:0]\n";
    let open = "-A INPUT -p udp --dport 8285 -j ACCEPT";
    for (rules, hooks) in [
        ("-A OUTPUT -j X\n-A X ! -s 127.0.0.0/8 -d 127.0.0.0/8 -j DROP", SENT),
        ("-A INPUT -j X\n-A X ! -s 127.0.0.0/8 -d 127.0.0.0/8 -j DROP", RECEIVED),
        ("-A INPUT -s 127.0.0.0/8 -j DROP", RECEIVED),
        ("-A INPUT -s 10.0.0.0/24 -p udp --dport 8285 -j ACCEPT\n-A INPUT -j DROP", RECEIVED),
        ("-A INPUT -j X\n-A X -p udp --dport 8285 -j ACCEPT\n-A INPUT -j REJECT", RECEIVED),
        (
            "-A INPUT -j X\n-A X -m addrtype --dst-type LOCAL -j RETURN\n\
             -A X -m limit --limit 3/min -j Y\n-A X -j DROP",
            RECEIVED,
        ),
        ("-A INPUT -m recent --rcheck -j ACCEPT\n-A INPUT -j DROP", RECEIVED),
        ("-A FORWARD -j X\n-A X -d 10.5.0.0/16 -j ACCEPT\n-A FORWARD -j DROP", FORWARDED),
    ] {
        let chains = parse_iptables(&format!("{policy}{rules}\n{open}\nCOMMIT\n"));
        let packet = if hooks == FORWARDED { for_pods() } else { between(hooks) };
        assert_eq!(may_drop(&chains, hooks, &packet), None, "{rules}");
        assert_eq!(dropped(&chains, hooks, &packet), None, "{rules}");
    }
    let closed = "-A INPUT -j X\n-A X -m addrtype --dst-type LOCAL -j RETURN\n-A X -j ACCEPT";
    let chains = parse_iptables(&format!("{policy}{closed}\nCOMMIT\n"));
    assert!(dropped(&chains, RECEIVED, &between(RECEIVED)).is_some(), "the port is closed");
}

/// firewalld accepts what DNAT diverts, which the tunnel's datagrams are not.
#[test]
fn what_nobody_diverts_has_no_such_state() {
    for (condition, lets_pass) in [
        (r#"{"match":{"op":"in","left":{"ct":{"key":"status"}},"right":"dnat"}}"#, false),
        (
            r#"{"match":{"op":"==","left":{"fib":{"result":"type","flags":"daddr"}},
                "right":"broadcast"}}"#,
            false,
        ),
        (
            r#"{"match":{"op":"==","left":{"fib":{"result":"type","flags":"daddr"}},
                "right":"local"}}"#,
            true,
        ),
    ] {
        let by = nft(&format!(r#"{condition},{{"accept":null}}"#), "drop");
        assert_eq!(by.is_none(), lets_pass, "{condition}: {by:?}");
    }
}

/// As nft 1.0.6 and ip6tables-save 1.8.9 print them, on a host with rules of each family.
const BOTH: &str = include_str!("golden/both.json");
const OF_IP6TABLES: &str = include_str!("golden/ip6tables.rules");

fn of_v6(content: Content) -> Packet<'static, Ipv6Addr> {
    Packet {
        content,
        sources: None,
        destinations: None,
        comes_by: Some("eth0"),
        goes_by: None,
        is_for_host: true,
    }
}

fn vxlan_v6() -> Packet<'static, Ipv6Addr> {
    of_v6(Content::Udp { port: 8472, source_port: None })
}

#[test]
fn rules_are_of_the_families_of_their_tables() {
    let (v4, v6) = (parse_nftables(BOTH).unwrap(), parse_nftables(BOTH).unwrap());
    let vxlan = Packet { content: Content::Udp { port: 8472, source_port: None }, ..DATAGRAM };
    let by = dropped(&v4, RECEIVED, &vxlan).unwrap();
    assert!(by.starts_with("ip a:"), "{by}");
    let from = |text: &str| Packet { sources: text.parse().ok(), ..vxlan_v6() };
    assert_eq!(dropped(&v6, RECEIVED, &from("fd99::2/128")), None, "it is one of the nodes");
    let by = dropped(&v6, RECEIVED, &from("fd98::2/128")).unwrap();
    assert!(by.contains("ip6 a") && by.contains("drop"), "{by}");

    // Of the table of both, each rule counts for its own.
    let by = dropped(&v6, SENT, &vxlan_v6()).unwrap();
    assert!(by.starts_with("inet b:") && by.contains(" 6 "), "{by}");
    assert_eq!(dropped(&v4, SENT, &vxlan), None);
    let pods = Packet { destinations: "fd00:5:0:1::/64".parse().ok(), ..of_v6(Content::Any) };
    let by = dropped(&v6, FORWARDED, &pods).unwrap();
    assert!(by.starts_with("inet b:") && by.contains(" 2 "), "{by}");
    assert_eq!(dropped(&v4, FORWARDED, &for_pods()), None);
    let (by, place) = may_drop(&v4, FORWARDED, &for_pods()).unwrap();
    assert!(by.contains(" 3 ") && place.contains("inet b"), "{by}");

    let saved = parse_iptables(OF_IP6TABLES);
    assert_eq!(dropped(&saved, RECEIVED, &from("fd99::2/128")), None, "it is one of the nodes");
    let to_this = Packet { destinations: "fd99::1/128".parse().ok(), ..from("fd98::2/128") };
    let by = dropped(&saved, RECEIVED, &to_this).unwrap();
    assert!(by.contains("-d fd99::1/128"), "{by}");
    let by = dropped(&saved, RECEIVED, &from("fd98::2/128")).unwrap();
    assert!(by.contains("INPUT") && !by.contains("-A"), "its policy: {by}");
    let by = dropped(&saved, FORWARDED, &pods).unwrap();
    assert!(by.contains("-d fd00:5::/48"), "{by}");
}

/// Without it no host finds another of its link, whatever port is open.
#[test]
fn neighbour_discovery_is_told_from_other_icmpv6() {
    let nft: Vec<Chain<Ipv6Addr>> = parse_nftables(BOTH).unwrap();
    let saved = parse_iptables(OF_IP6TABLES);
    let is_lost = |chains: &[_], hooks, kind| {
        dropped(chains, hooks, &of_v6(Content::Discovery(kind))).is_some()
    };
    assert!(is_lost(&nft, RECEIVED, 135) && is_lost(&nft, RECEIVED, 136), "not accepted");
    assert!(!is_lost(&nft, SENT, 135) && is_lost(&nft, SENT, 136), "one of both is dropped");
    assert!(!is_lost(&saved, RECEIVED, 135) && is_lost(&saved, RECEIVED, 136));

    let policy = "*filter\n:INPUT DROP [0:0]\n";
    for (rule, passes) in [
        ("-A INPUT -p ipv6-icmp -j ACCEPT", true),
        ("-A INPUT ! -p udp -j ACCEPT", true),
        // It is not tracked.
        ("-A INPUT -m conntrack --ctstate NEW,RELATED,ESTABLISHED -j ACCEPT", false),
        ("-A INPUT -m conntrack --ctstate UNTRACKED -j ACCEPT", true),
        ("-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT", false),
        ("-A INPUT -p ipv6-icmp -m icmp6 --icmpv6-type 128 -j ACCEPT", false),
        // Some may come from there.
        ("-A INPUT -s fe80::/10 -j ACCEPT", true),
        ("-A INPUT -m addrtype --dst-type MULTICAST -j ACCEPT", true),
        ("-A INPUT -m hl --hl-eq 255 -j ACCEPT", true),
        ("-A INPUT -i eth1 -p ipv6-icmp -j ACCEPT", false),
    ] {
        let chains = parse_iptables(&format!("{policy}{rule}\nCOMMIT\n"));
        for kind in [135, 136] {
            assert_eq!(!is_lost(&chains, RECEIVED, kind), passes, "{rule}");
        }
    }
    let open = "*filter\n:INPUT ACCEPT [0:0]\n";
    for (rule, is_dropped) in [
        ("-A INPUT -p ipv6-icmp -j DROP", true),
        ("-A INPUT -m conntrack --ctstate INVALID,NEW -j DROP", false),
        ("-A INPUT -s fe80::/10 -p ipv6-icmp -j DROP", false),
    ] {
        let chains = parse_iptables(&format!("{open}{rule}\nCOMMIT\n"));
        assert_eq!(is_lost(&chains, RECEIVED, 135), is_dropped, "{rule}");
    }
}

/// The length that nft asks IPv6's header for is without that header.
#[test]
fn lengths_of_ipv6_count_its_header() {
    let may_drop = |protocol: &str, operator: &str, bytes: u16| {
        let text = format!(
            r#"{{"nftables":[{{"chain":{{"family":"ip6","table":"t","name":"c","hook":"forward"}}}},
            {{"rule":{{"family":"ip6","table":"t","chain":"c","handle":2,"expr":[{{"match":{{
            "op":"{operator}","left":{{"payload":{{"protocol":"{protocol}","field":"length"}}}},
            "right":{bytes}}}}},{{"drop":null}}]}}}}]}}"#
        );
        let chains = parse_nftables(&text).unwrap();
        may_drop(&chains, FORWARDED, &of_v6(Content::Any)).is_some()
    };
    assert!(may_drop("ip6", ">", 1300) && may_drop("udp", ">", 1300));
    assert!(!may_drop("ip6", ">", 1460), "longer than what pods send");
    assert!(!may_drop("ip", ">", 1300), "no packet of the family");
}
