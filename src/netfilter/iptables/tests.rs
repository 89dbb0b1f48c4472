//! Golden text: the words of the rules are those that flannel gives to iptables.

use super::*;
use crate::netfilter::rules::tests::wanted;
use crate::netfilter::rules::{Family, Wanted};

const NAT: &str = include_str!("../golden/masquerade.iptables");
const FILTER: &str = include_str!("../golden/forward.iptables");
/// What a host with kube-proxy and Docker has besides ours, as `iptables-save` prints it.
const FOREIGN: &str = include_str!("../golden/foreign.save");

/// The same for IPv6.
const NAT_V6: &str = include_str!("../golden/masquerade.ip6tables");
const FILTER_V6: &str = include_str!("../golden/forward.ip6tables");

const JUMP: &str = "-A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n";

const FOREIGN_RULES: [&str; 9] = [
    "",
    "-j ACCEPT",
    "-s 10.5.0.0/16 -i eth0 -m comment --comment \"flanneld masq\" -j RETURN",
    "-m mark ! --mark 0x4000/0x4000 -m comment --comment \"flanneld masq\" -j RETURN",
    "-m mark --mark 0x4000 -m comment --comment \"flanneld masq\" -j RETURN",
    "-m comment --comment \"flanneld masq\" -j RETURN !",
    "-s nowhere -m comment --comment \"flanneld masq\" -j RETURN",
    "-m comment --comment \"flanneld masq\" -j MASQUERADE --to-ports 1-2",
    "-m comment --comment \"flanneld masq",
];

fn found(text: &str) -> SavedRules {
    let mut found = SavedRules::default();
    text.lines().for_each(|line| found.take_line(line));
    found
}

/// What `iptables-save` prints once `FOREIGN` and our rules are there.
fn in_place() -> String {
    beside_foreign(NAT, FILTER)
}

fn beside_foreign(nat: &str, filter: &str) -> String {
    let body = |text: &str| {
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('*')).collect();
        lines.join("\n") + "\n"
    };
    let (before, after) = FOREIGN.split_once("*nat").unwrap();
    let before = before.replace("COMMIT\n", &body(filter));
    format!("{before}*nat{}", after.replace("COMMIT\n", &body(nat)))
}

fn need(save: &str, trigger: Trigger) -> Option<String> {
    transaction(&wanted().chains(Family::V4), &found(save), trigger)
}

#[test]
fn empty_tables_get_flannels_rules() {
    for trigger in [Trigger::Start, Trigger::Resync] {
        assert_eq!(need("", trigger), Some(format!("{NAT}{FILTER}")));
        assert_eq!(need(FOREIGN, trigger), Some(format!("{NAT}{FILTER}")));
    }
}

#[test]
fn each_family_has_rules_of_its_own() {
    let chains = wanted().chains(Family::V6);
    let need = |save: &str, trigger| transaction(&chains, &found(save), trigger);
    let save = beside_foreign(NAT_V6, FILTER_V6);
    for trigger in [Trigger::Start, Trigger::Resync] {
        assert_eq!(need(FOREIGN, trigger), Some(format!("{NAT_V6}{FILTER_V6}")));
        assert_eq!(need(&save, trigger), None, "{save}");
        assert_ne!(need(&in_place(), trigger), None, "rules of IPv4 are taken for those of IPv6");
    }
    let v4_only = Wanted { networks: "10.5.0.0/16".parse().unwrap(), ..wanted() };
    assert_eq!(v4_only.chains(Family::V6), [], "a network without IPv6");
    assert_eq!(v4_only.chains(Family::V4), wanted().chains(Family::V4));
}

#[test]
fn switched_off_rules_are_not_written() {
    let plain = Wanted { random_ports: false, forward: false, ..wanted() };
    let text = transaction(&plain.chains(Family::V4), &SavedRules::default(), Trigger::Start);
    assert_eq!(text, Some(NAT.replace(" --random-fully", "")));
    let forward = Wanted { masquerade: false, ..wanted() };
    let text = transaction(&forward.chains(Family::V4), &SavedRules::default(), Trigger::Start);
    assert_eq!(text, Some(FILTER.to_owned()));
}

#[test]
fn complete_rules_need_no_transaction() {
    for trigger in [Trigger::Start, Trigger::Resync] {
        assert_eq!(need(&in_place(), trigger), None, "{}", in_place());
    }
}

#[test]
fn each_removed_line_is_restored_once() {
    let save = in_place();
    let ours = save.lines().filter(|line| line.starts_with("-A") && line.contains("flanneld"));
    assert_eq!(ours.clone().count(), 10);
    for line in ours {
        let text = need(&save.replace(&format!("{line}\n"), ""), Trigger::Resync);
        let text = text.unwrap_or_else(|| panic!("without {line} nothing is repaired"));
        assert!(text.contains(line), "{line} does not come back:\n{text}");
        let (jump, jumps) = (line.contains("-j FLANNEL-"), text.matches("-j FLANNEL-").count());
        assert_eq!(jumps, usize::from(jump), "without {line}:\n{text}");
        assert_eq!(text.matches(":FLANNEL-").count(), usize::from(!jump), "{text}");
    }
    for line in FOREIGN.lines().filter(|line| line.starts_with("-A")) {
        assert_eq!(need(&save.replace(line, ""), Trigger::Resync), None, "{line} is not ours");
    }
}

#[test]
fn listing_by_chain_reads_like_iptables_save() {
    let list = |table: &str, text: &str| {
        let chain = text.replace(":FLANNEL-", "-N FLANNEL-").replace(" - [0:0]", "");
        format!("*{table}\n-P FORWARD DROP\n{chain}")
    };
    let save = list("nat", NAT) + &list("filter", FILTER);
    assert_eq!(need(&save, Trigger::Resync), None, "{save}");
}

#[test]
fn duplicate_jumps_are_removed() {
    let text = need(&in_place().replace(JUMP, &JUMP.repeat(3)), Trigger::Resync);
    let deletion = JUMP.replace("-A", "-D");
    assert_eq!(text, Some(format!("*nat\n{}COMMIT\n", deletion.repeat(2))));
}

#[test]
fn resync_keeps_rules_of_another_network() {
    let own: Vec<_> = NAT.lines().filter(|line| line.contains("10.5.")).collect();
    let others = own.join("\n").replace("10.5.", "10.6.");
    let head = ":FLANNEL-POSTRTG - [0:0]\n";
    let save = in_place().replace(head, &format!("{head}{others}\n"));
    assert_eq!(need(&save, Trigger::Resync), None);
    assert_eq!(need(&save, Trigger::Start), Some(NAT.replace(JUMP, "")));
    let text = need(&save.replace(&format!("{}\n", own[0]), ""), Trigger::Resync).unwrap();
    assert!(!text.contains("10.6.") && !text.contains(":FLANNEL"), "theirs are touched:\n{text}");
    assert_eq!(text.matches("-D FLANNEL-POSTRTG").count(), 4, "{text}");
    assert_eq!(text.matches("-A FLANNEL-POSTRTG").count(), 5, "{text}");
}

proptest::proptest! {
    #[test]
    fn arbitrary_lines_never_panic(lines in proptest::collection::vec(
        "(\\*nat|:FLANNEL-POSTRTG -|-A (FLANNEL-POSTRTG|POSTROUTING))?\
         ( (!|-[smdj]|--mark|[\"\\\\]|.{0,5}))*",
        0..8,
    )) {
        need(&lines.join("\n"), Trigger::Start);
    }
}

#[test]
fn removal_deletes_only_our_rules() {
    assert_eq!(removal(&found(FOREIGN)), None);
    let text = removal(&found(&in_place())).unwrap();
    let expected = "\
*nat
:FLANNEL-POSTRTG - [0:0]
-D POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG
-X FLANNEL-POSTRTG
COMMIT
*filter
:FLANNEL-FWD - [0:0]
-D FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD
-X FLANNEL-FWD
COMMIT
";
    assert_eq!(text, expected);
}

#[test]
fn only_written_rules_are_recognised() {
    for (purpose, rules) in Family::ALL.iter().flat_map(|family| wanted().chains(*family)) {
        let comment = PLACES[purpose as usize].comment;
        for rule in rules {
            assert!(is_printed_as(&rule, comment, &spell(&rule, comment)));
            assert!(!is_printed_as(&rule, "another", &spell(&rule, comment)));
            for foreign in FOREIGN_RULES {
                assert!(!is_printed_as(&rule, comment, foreign), "{foreign} is taken for {rule:?}");
            }
        }
    }
}

#[test]
fn incompatible_table_is_recognised() {
    assert!(is_incompatible("# Table `nat' is incompatible, use 'nft' tool."));
    assert!(!in_place().lines().any(is_incompatible));
}

#[test]
fn version_line_determines_abilities() {
    for (line, is_new, lists_chains) in [
        ("iptables v1.8.9 (nf_tables)\n", true, true),
        ("iptables v1.6.2\n", true, false),
        ("iptables v1.6.1\n", false, false),
        ("iptables v1.4.21\n", false, false),
        ("iptables v1.10.0 (legacy)\n", true, false),
        ("something else", true, false),
    ] {
        let expected = Ability { is_modern: is_new, lists_chains };
        assert_eq!(Ability::of_version(line), expected, "{line}");
    }
}
