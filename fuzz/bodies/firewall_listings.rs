//! One input of the `firewall_listings` target: what the host's firewall programs print, which
//! anybody's rules are in.
//!
//! The first byte chooses the program and what is wanted. What weftd then gives to
//! `iptables-restore` is applied by a simple twin, and must leave nothing to repair or to remove.
//! What it gives to `nft` must be about its own tables. `weft check` reads the same for both
//! families.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};

use weft::netfilter::diff::Trigger;
use weft::netfilter::guard::{self, TunnelGuard};
use weft::netfilter::rules::{Family, Purpose, Rule, Wanted};
use weft::netfilter::{iptables, nftables};
use weft::route::Prefixes;
use weft::status::TunnelEnd;
use weft::tool::check::drops_all;

type Chains = Vec<(Purpose, Vec<Rule>)>;

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let [choice, rest @ ..] = data else { return };
    let is = |bit: u8| choice & 1 << bit != 0;
    let prefixes = |text: &str| text.parse::<Prefixes>().expect("a prefix of each family");
    let wanted = Wanted {
        networks: prefixes("10.5.0.0/16,fd00:5::/48"),
        subnets: prefixes("10.5.3.0/24,fd00:5:0:3::/64"),
        masquerade: is(1),
        forward: is(2),
        random_ports: is(3),
    };
    let trigger = if is(4) { Trigger::Start } else { Trigger::Resync };
    let family = if is(5) { Family::V6 } else { Family::V4 };
    let text = String::from_utf8_lossy(rest);
    families(&text);
    if is(0) {
        nft(&text, &wanted, family, trigger);
    } else {
        iptables(&text, &wanted.chains(family), trigger);
    }
}

/// `weft check` takes no rule of a table of one family for one of the other.
fn families(text: &str) {
    let dropped = drops_all(text);
    let may_be = |word| [word, "inet", "netdev"].iter().any(|it| text.contains(it));
    // Behind a backslash there may be any letter.
    if nftables::objects(text).is_ok() && !text.contains('\\') {
        for (is_dropped, word) in dropped.into_iter().zip(["\"ip\"", "\"ip6\""]) {
            assert!(!is_dropped || may_be(word), "by no table of its family: {word}");
        }
    }
}

/// The rules of each chain of each table.
type Tables = BTreeMap<(String, String), Vec<String>>;

fn iptables(listing: &str, wanted: &Chains, trigger: Trigger) {
    let mut tables = Tables::new();
    apply(&mut tables, listing, true);
    if let Some(input) = iptables::transaction(wanted, &found(listing.lines()), trigger) {
        apply(&mut tables, &input, false);
    }
    let listing = printed(&tables);
    let now = found(listing.iter().map(String::as_str));
    for trigger in [trigger, Trigger::Resync] {
        assert_eq!(iptables::transaction(wanted, &now, trigger), None, "repaired twice");
    }
    if let Some(input) = iptables::removal(&now) {
        apply(&mut tables, &input, false);
        let listing = printed(&tables);
        assert_eq!(iptables::removal(&found(listing.iter().map(String::as_str))), None);
    }
}

fn found<'a>(lines: impl Iterator<Item = &'a str>) -> iptables::SavedRules {
    let mut found = iptables::SavedRules::default();
    lines.for_each(|line| found.take_line(line));
    found
}

/// Does what `input` says, as `iptables-restore --noflush` does. A listing may have lines of any
/// kind; what is made of it may not.
fn apply(tables: &mut Tables, input: &str, is_listing: bool) {
    let mut table = "";
    for line in input.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name.trim();
            continue;
        }
        let line = line.trim_end();
        let chain = |name: &str| (table.to_owned(), name.to_owned());
        if let Some(name) = line.strip_prefix(':').or_else(|| line.strip_prefix("-N ")) {
            let rules = tables.entry(chain(name.split(' ').next().unwrap_or_default()));
            let rules = rules.or_default();
            if !is_listing {
                rules.clear();
            }
        } else if let Some((name, rule)) = rule(line, "-A ") {
            tables.entry(chain(name)).or_default().push(rule.to_owned());
        } else if is_listing {
            continue;
        } else if let Some((name, rule)) = rule(line, "-D ") {
            let rules = tables.get_mut(&chain(name)).expect("the chain of a rule is there");
            let at = rules.iter().position(|found| found == rule);
            rules.remove(at.expect("a rule that is removed is there"));
        } else if let Some(name) = line.strip_prefix("-X ") {
            assert_eq!(tables.remove(&chain(name)), Some(Vec::new()), "{name} is not empty");
        } else {
            assert_eq!(line, "COMMIT");
        }
    }
}

fn rule<'a>(line: &'a str, verb: &str) -> Option<(&'a str, &'a str)> {
    line.strip_prefix(verb)?.split_once(' ')
}

/// The tables as `iptables-save` prints them.
fn printed(tables: &Tables) -> Vec<String> {
    let chains = tables.iter().flat_map(|((table, chain), rules)| {
        let head = [format!("*{table}"), format!(":{chain} - [0:0]")];
        head.into_iter().chain(rules.iter().map(move |rule| format!("-A {chain} {rule}")))
    });
    chains.collect()
}

fn nft(json: &str, wanted: &Wanted, family: Family, trigger: Trigger) {
    if let Ok(found) = nftables::ListedRules::parse(json) {
        let (table, chains) = (nftables::table(family), wanted.chains(family));
        let input = nftables::transaction(table, &chains, &found, trigger);
        for line in input.unwrap_or_default().lines() {
            let words: Vec<_> = line.split(' ').collect();
            assert!(["add", "flush", "delete"].contains(&words[0]), "{line}");
            assert_eq!((words[2], words[3]), table, "{line}");
        }
    }
    let is_of_family = |word: &str, name: &str| nftables::table(family) == (word, name);
    if let Ok(Some(input)) = nftables::removal(json, is_of_family) {
        let ours = ["delete table ip flannel-ipv4", "delete table ip6 flannel-ipv6"];
        assert!(input.lines().all(|line| line == ours[family as usize]), "{input:?}");
    }
    if let Ok(Some(input)) = nftables::removal(json, guard::is_guard) {
        for line in input.lines() {
            let of = |family: &str| line.strip_prefix("delete table ")?.strip_prefix(family);
            let name = of("ip ").or_else(|| of("ip6 ")).expect("a table of a family");
            assert!(guard::is_guard("ip", name), "a table of a network: {name}");
        }
    }
    let Ok(found) = guard::ListedGuard::parse(json) else { return };
    let network = wanted.networks.v4().expect("a network of IPv4");
    let wanted = TunnelGuard {
        table: guard::table_name(network.into()),
        tunnel: TunnelEnd::Udp(SocketAddr::from(([192, 0, 2, 1], 8285))),
        network,
        peers: BTreeSet::from([Ipv4Addr::new(192, 0, 2, 2), Ipv4Addr::new(192, 0, 2, 3)]),
    };
    let edits = wanted.edits(&found).unwrap_or_default();
    for line in edits.lines() {
        let words: Vec<_> = line.split(' ').collect();
        assert!(["add", "delete"].contains(&words[0]), "{line}");
        assert_eq!(words[2..4], ["ip", &wanted.table], "{line}");
    }
}
