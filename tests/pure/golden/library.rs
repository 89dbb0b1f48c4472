//! weftd's outcomes by its library, as text.

use std::ffi::OsString;

use weft::config::flags::{self, Outcome};
use weft::config::network::{NetworkConfig, SubnetRange};
use weft::config::options::RuleOptions;
use weft::config::subnet_file::{Previous, SubnetFile};
use weft::control::lease::LeaseAttributes;
use weft::netfilter::diff::Trigger;
use weft::netfilter::rules::{Family, Wanted};
use weft::netfilter::{iptables as ipt, nftables as nft};
use weft::route::{IpAddress, Prefixes};

use crate::golden::table::Case;

pub(crate) fn config(case: &Case) -> String {
    match NetworkConfig::parse(case.given.as_bytes()) {
        Err(error) => format!("refused: {error}"),
        Ok(config) => format!(
            "{} by {}{}",
            [config.v4().map(|it| range(&it)), config.v6().map(|it| range(&it))]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(" and "),
            config.backend.kind,
            if config.enable_nftables { " with nftables" } else { "" },
        ),
    }
}

fn range<A: IpAddress>(range: &SubnetRange<A>) -> String {
    let SubnetRange { network, subnet_length_bits, subnet_min, subnet_max } = range;
    format!("{network} in /{subnet_length_bits} from {subnet_min} to {subnet_max}")
}

pub(crate) fn key(case: &Case) -> String {
    match Prefixes::from_key(&case.given) {
        None => "none".to_owned(),
        Some(subnets) => format!("{subnets}, written {}", subnets.key()),
    }
}

pub(crate) fn value(case: &Case) -> String {
    let read = LeaseAttributes::from_json(case.given.as_bytes());
    let Ok(attributes) = read else { return "no lease".to_owned() };
    let written = attributes.to_json().expect("what was read is short enough");
    String::from_utf8(written).expect("JSON is text")
}

/// The rules of a node with these flags besides `-ip-masq`.
fn wanted<'a>(flags: impl Iterator<Item = &'a str>) -> Wanted {
    let words = ["weftd", "-ip-masq"].into_iter().chain(flags).map(OsString::from);
    let Outcome::Run(options, _) = flags::parse(words, &|_| None) else {
        panic!("the flags of the case are refused")
    };
    let RuleOptions { masquerade, random_ports, forward, .. } = options.rules;
    let prefix = |text: &str| -> Prefixes { text.parse().expect("a prefix") };
    let (networks, subnets) = (prefix("10.5.0.0/16"), prefix("10.5.3.0/24"));
    Wanted { networks, subnets, masquerade, forward, random_ports }
}

/// The rule that `given` asks for: table, chain, number, flags.
pub(crate) fn iptables(case: &Case) -> String {
    let mut words = case.given.split(' ');
    let mut word = || words.next().expect("table, chain and number");
    let (table, chain) = (format!("*{}\n", word()), format!("-A {} ", word()));
    let number: usize = word().parse().expect("a number");
    let chains = wanted(words).chains(Family::V4);
    let text =
        ipt::transaction(&chains, &ipt::SavedRules::default(), Trigger::Start).unwrap_or_default();
    let Some((_, text)) = text.split_once(&table) else { return "none".to_owned() };
    let (text, _) = text.split_once("COMMIT").expect("a table ends");
    let mut rules = text.lines().filter_map(|line| line.strip_prefix(&chain));
    let rule = rules.nth(number - 1).unwrap_or("none");
    rule.replace("-m comment --comment \"flanneld masq\"", "{masq}")
        .replace("-m comment --comment \"flanneld forward\"", "{forward}")
}

/// The rule that `given` asks for: chain, number.
pub(crate) fn nftables(case: &Case) -> String {
    let wanted = wanted(std::iter::empty());
    let tables = Family::ALL.iter().filter_map(|family| {
        let chains = wanted.chains(*family);
        let nothing = nft::ListedRules::default();
        nft::transaction(nft::table(*family), &chains, &nothing, Trigger::Start)
    });
    let text: String = tables.collect();
    let (chain, number) = case.given.split_once(' ').expect("chain and number");
    let Ok(number) = number.parse::<usize>() else {
        return if text.contains(&case.given) { "made" } else { "not made" }.to_owned();
    };
    let start = format!("add rule ip flannel-ipv4 {chain} ");
    let mut rules = text.lines().filter_map(|line| line.strip_prefix(&start));
    rules.nth(number - 1).unwrap_or("none").to_owned()
}

pub(crate) fn subnet_env(case: &Case) -> String {
    let words: Vec<_> = case.given.split(' ').collect();
    let [network, subnet, mtu, masquerade] = words[..] else { panic!("{case:?}: not four words") };
    let file = SubnetFile {
        networks: network.parse().expect("prefixes"),
        subnets: subnet.parse().expect("prefixes"),
        mtu_bytes: mtu.parse().expect("a number"),
        masquerade: masquerade.parse().expect("true or false"),
    };
    file.render().replace('\n', ";")
}

pub(crate) fn previous(case: &Case) -> String {
    let Previous { networks, subnets, .. } = Previous::parse(&case.given.replace(';', "\n"));
    let text =
        |prefix: Option<Prefixes>| prefix.map_or_else(|| "none".to_owned(), |p| p.to_string());
    format!("{} {}", text(networks), text(subnets))
}
