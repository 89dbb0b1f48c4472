//! Golden text: the words of the rules are those that flannel gives to iptables.

use super::*;
use crate::netfilter::rules::Wanted;
use crate::netfilter::rules::tests::wanted;

const NAT: &str = include_str!("../golden/masquerade.iptables");
const FILTER: &str = include_str!("../golden/forward.iptables");
/// What a host with kube-proxy and Docker has besides ours, as `iptables-save` prints it.
const FOREIGN: &str = include_str!("../golden/foreign.save");

const JUMP: &str = "-A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n";

fn found(text: &str) -> Found {
    let mut found = Found::default();
    text.lines().for_each(|line| found.take_line(line));
    found
}

/// What `iptables-save` prints once `FOREIGN` and our rules are there.
fn in_place() -> String {
    let body = |text: &str| {
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('*')).collect();
        lines.join("\n") + "\n"
    };
    let (filter, nat) = FOREIGN.split_once("*nat").unwrap();
    let filter = filter.replace("COMMIT\n", &body(FILTER));
    format!("{filter}*nat{}", nat.replace("COMMIT\n", &body(NAT)))
}

fn need(save: &str, pass: Pass) -> Option<String> {
    transaction(&wanted().chains(), &found(save), pass)
}

#[test]
fn a_bare_host_gets_flannel_s_rules() {
    for pass in [Pass::First, Pass::Check] {
        assert_eq!(need("", pass), Some(format!("{NAT}{FILTER}")));
        assert_eq!(need(FOREIGN, pass), Some(format!("{NAT}{FILTER}")));
    }
}

#[test]
fn what_was_not_asked_for_is_left_out() {
    let plain = Wanted { random_ports: false, forward: false, ..wanted() };
    let text = transaction(&plain.chains(), &Found::default(), Pass::First);
    assert_eq!(text, Some(NAT.replace(" --random-fully", "")));
    let forward = Wanted { masquerade: false, ..wanted() };
    let text = transaction(&forward.chains(), &Found::default(), Pass::First);
    assert_eq!(text, Some(FILTER.to_owned()));
}

#[test]
fn nothing_missing_is_nothing_to_do() {
    for pass in [Pass::First, Pass::Check] {
        assert_eq!(need(&in_place(), pass), None, "{}", in_place());
    }
}

#[test]
fn each_line_that_goes_missing_comes_back_and_no_jump_is_doubled() {
    let save = in_place();
    let ours = save.lines().filter(|line| line.starts_with("-A") && line.contains("flanneld"));
    assert_eq!(ours.clone().count(), 10);
    for line in ours {
        let text = need(&save.replace(&format!("{line}\n"), ""), Pass::Check);
        let text = text.unwrap_or_else(|| panic!("without {line} nothing is repaired"));
        assert!(text.contains(line), "{line} does not come back:\n{text}");
        let (jump, jumps) = (line.contains("-j FLANNEL-"), text.matches("-j FLANNEL-").count());
        assert_eq!(jumps, usize::from(jump), "without {line}:\n{text}");
        assert_eq!(text.matches(":FLANNEL-").count(), usize::from(!jump), "{text}");
    }
    for line in FOREIGN.lines().filter(|line| line.starts_with("-A")) {
        assert_eq!(need(&save.replace(line, ""), Pass::Check), None, "{line} is not ours");
    }
}

#[test]
fn chains_that_are_listed_one_by_one_say_the_same() {
    let list = |table: &str, text: &str| {
        let chain = text.replace(":FLANNEL-", "-N FLANNEL-").replace(" - [0:0]", "");
        format!("*{table}\n-P FORWARD DROP\n{chain}")
    };
    let save = list("nat", NAT) + &list("filter", FILTER);
    assert_eq!(need(&save, Pass::Check), None, "{save}");
}

#[test]
fn jumps_too_many_are_taken_out() {
    let text = need(&in_place().replace(JUMP, &JUMP.repeat(3)), Pass::Check);
    let deletion = JUMP.replace("-A", "-D");
    assert_eq!(text, Some(format!("*nat\n{}COMMIT\n", deletion.repeat(2))));
}

#[test]
fn another_network_in_the_chains_stays_after_the_first_pass() {
    let own: Vec<_> = NAT.lines().filter(|line| line.contains("10.5.")).collect();
    let others = own.join("\n").replace("10.5.", "10.6.");
    let head = ":FLANNEL-POSTRTG - [0:0]\n";
    let save = in_place().replace(head, &format!("{head}{others}\n"));
    assert_eq!(need(&save, Pass::Check), None);
    assert_eq!(need(&save, Pass::First), Some(NAT.replace(JUMP, "")));
    let text = need(&save.replace(&format!("{}\n", own[0]), ""), Pass::Check).unwrap();
    assert!(!text.contains("10.6.") && !text.contains(":FLANNEL"), "theirs are touched:\n{text}");
    assert_eq!(text.matches("-D FLANNEL-POSTRTG").count(), 4, "{text}");
    assert_eq!(text.matches("-A FLANNEL-POSTRTG").count(), 5, "{text}");
}

#[test]
fn rules_of_older_flannels_go_with_the_first_pass() {
    let old = "-A POSTROUTING -s 10.4.0.0/16 ! -d 224.0.0.0/4 -m comment \
               --comment \"flanneld masq\" -j MASQUERADE";
    let save = in_place().replace(JUMP, &format!("{old}\n{JUMP}"));
    let deletion = old.replace("-A", "-D");
    assert_eq!(need(&save, Pass::First), Some(format!("*nat\n{deletion}\nCOMMIT\n")));
    assert_eq!(need(&save, Pass::Check), None);
}

#[test]
fn rules_of_flannel_0_12_go_with_the_first_pass_and_an_administrator_s_stay() {
    let old = [
        "-A POSTROUTING -s 10.4.0.0/16 -d 10.4.0.0/16 -j RETURN",
        "-A POSTROUTING -s 10.4.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully",
        "-A POSTROUTING ! -s 10.4.0.0/16 -d 10.4.7.0/24 -j RETURN",
        "-A POSTROUTING ! -s 10.4.0.0/16 -d 10.4.0.0/16 -j MASQUERADE",
    ];
    let accept = ["-A FORWARD -s 10.4.0.0/16 -j ACCEPT", "-A FORWARD -d 10.4.0.0/16 -j ACCEPT"];
    let forward = "-A FORWARD -s 10.5.0.0/16 -j ACCEPT\n";
    let with = |old: &[&str]| {
        let accept = format!("{forward}{}\n", accept.join("\n"));
        in_place().replace(JUMP, &format!("{}\n{JUMP}", old.join("\n"))).replace(forward, &accept)
    };
    let save = with(&old);
    let deletion = |lines: &[&str]| lines.join("\n").replace("-A", "-D");
    let (nat, filter) = (deletion(&old), deletion(&accept));
    let expected = format!("*nat\n{nat}\nCOMMIT\n*filter\n{filter}\nCOMMIT\n");
    assert_eq!(need(&save, Pass::First), Some(expected));
    assert_eq!(need(&save, Pass::Check), None);
    for missing in 0..old.len() {
        let mut some = old.to_vec();
        some.remove(missing);
        assert_eq!(need(&with(&some), Pass::First), None, "these may be anybody's: {some:?}");
    }
}

proptest::proptest! {
    #[test]
    fn any_line_is_read(lines in proptest::collection::vec(
        "(\\*nat|:FLANNEL-POSTRTG -|-A (FLANNEL-POSTRTG|POSTROUTING))?\
         ( (!|-[smdj]|--mark|[\"\\\\]|.{0,5}))*",
        0..8,
    )) {
        need(&lines.join("\n"), Pass::First);
    }
}

#[test]
fn a_removal_takes_everything_of_ours_and_nothing_else() {
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
fn what_is_written_is_read_back() {
    for (purpose, rules) in wanted().chains() {
        let comment = place(purpose).comment;
        for rule in rules {
            assert_eq!(parse(&spell(&rule, comment), Some(comment)), Some(rule));
            assert_eq!(parse(&spell(&rule, comment), Some("another")), None);
            assert_eq!(parse(&spell(&rule, comment), None), None);
        }
    }
    for foreign in [
        "",
        "-j ACCEPT",
        "-s 10.5.0.0/16 -i eth0 -m comment --comment \"flanneld masq\" -j RETURN",
        "-m mark ! --mark 0x4000/0x4000 -m comment --comment \"flanneld masq\" -j RETURN",
        "-m mark --mark 0x4000 -m comment --comment \"flanneld masq\" -j RETURN",
        "-m comment --comment \"flanneld masq\" -j RETURN !",
        "-s nowhere -m comment --comment \"flanneld masq\" -j RETURN",
        "-m comment --comment \"flanneld masq\" -j MASQUERADE --to-ports 1-2",
        "-m comment --comment \"flanneld masq",
    ] {
        assert_eq!(parse(foreign, Some("flanneld masq")), None, "{foreign}");
    }
}

#[test]
fn tables_that_cannot_be_shown_are_told_from_those_that_are_empty() {
    assert!(is_incompatible("# Table `nat' is incompatible, use 'nft' tool."));
    assert!(!in_place().lines().any(is_incompatible));
}

#[test]
fn versions_tell_what_iptables_can() {
    for (line, is_new, lists_chains) in [
        ("iptables v1.8.9 (nf_tables)\n", true, true),
        ("iptables v1.6.2\n", true, false),
        ("iptables v1.6.1\n", false, false),
        ("iptables v1.4.21\n", false, false),
        ("iptables v1.10.0 (legacy)\n", true, false),
        ("something else", true, false),
    ] {
        let expected = Ability { waits: is_new, random_ports: is_new, lists_chains };
        assert_eq!(Ability::of_version(line), expected, "{line}");
    }
}
