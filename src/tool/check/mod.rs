//! `weft check`: looks for what keeps weftd from starting, or packets from flowing, on this host.
//!
//! `read` collects facts and changes nothing; each check is a pure function from them to a verdict.
//! When in doubt nothing is wrong: an alarm on a healthy host is worth less than none.

mod checks;
mod facts;
mod finding;
mod firewall;
mod read;

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Serialize;
use serde_json::{Value, json};

use self::checks::{CHECKS, Check, DAEMON_STATE};
use self::finding::{Finding, Judgement};
use self::firewall::{Content, FORWARDED, Packet, dropped_by, iptables, nftables};
use super::arguments::CheckArguments;
use super::explain::ToldFamily;
use super::style::Style;
use crate::status::SCHEMA;

/// What findings are called, one and many, and how they are shown.
type Words = (Judgement, [&'static str; 2], fn(Style, &str) -> String);

/// In the order of the report; the sum has it the other way round.
const WORDS: [Words; 4] = [
    (Judgement::Failed, ["failed"; 2], Style::bad),
    (Judgement::Warning, ["warning", "warnings"], Style::doubtful),
    (Judgement::Skipped, ["skipped"; 2], |_, text| text.to_owned()),
    (Judgement::Ok, ["ok"; 2], Style::good),
];

const NOT_ROOT: &str = "not run as root: what only root may see is skipped; run it as root\n";

/// Id and meaning of each check, in their order: the table in the documents.
pub fn described() -> impl Iterator<Item = (&'static str, &'static str)> {
    CHECKS.iter().map(|(id, _, about)| (*id, *about))
}

/// Whether rules as nft or iptables print them surely drop all that is forwarded, of IPv4 and of
/// IPv6, for tests of what reads them.
pub fn drops_all(listing: &str) -> [bool; 2] {
    fn of<A: ToldFamily>(listing: &str) -> bool {
        let saved = || iptables::parse::<A>(listing);
        let chains = nftables::parse(listing).unwrap_or_else(saved);
        dropped_by(&chains, FORWARDED, &Packet::of(Content::Any), "").is_some()
    }
    [of::<Ipv4Addr>(listing), of::<Ipv6Addr>(listing)]
}

/// All checks: the report, and the exit code, 1 if one failed.
pub(super) fn run(arguments: CheckArguments) -> anyhow::Result<(String, u8)> {
    let facts = read::facts(arguments)?;
    let answer = |(id, judge, _): &Check| Answer { id, finding: judge(&facts).into() };
    let found: Vec<_> = CHECKS.iter().map(answer).collect();
    let text = match facts.asked.answered.output {
        Some(_) => format!("{:#}\n", to_json(&found)),
        None => {
            let note = if facts.process.is_root { "" } else { NOT_ROOT };
            note.to_owned() + &render(&found, facts.asked.verbose, Style::of_output())
        }
    };
    let has_failed = found.iter().any(|it| it.finding.verdict == Judgement::Failed);
    Ok((text, u8::from(has_failed)))
}

/// What one check says.
#[derive(Serialize)]
struct Answer {
    id: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

/// All of it, for scripts.
fn to_json(found: &[Answer]) -> Value {
    json!({ "schema": SCHEMA, "checks": found })
}

/// What failed, then warnings, then the sum; all of it if `verbose`.
fn render(found: &[Answer], verbose: bool, style: Style) -> String {
    let (mut out, mut counts) = (String::new(), Vec::new());
    for (verdict, [one, many], paint) in WORDS {
        let of: Vec<_> = found.iter().filter(|it| it.finding.verdict == verdict).collect();
        let is_bad = matches!(verdict, Judgement::Failed | Judgement::Warning);
        for Answer { id, finding } in of.iter().filter(|_| verbose || is_bad) {
            let word = paint(style, &format!("{one:<7}"));
            writeln!(out, "{word} {id}: {}", finding.evidence).ok();
            if let Some(cure) = &finding.cure {
                writeln!(out, "        {cure}").ok();
            }
        }
        match of.len() {
            0 => {}
            1 => counts.insert(0, format!("1 {one}")),
            count => counts.insert(0, format!("{count} {many}")),
        }
    }
    let is_bad =
        |it: &&Answer| matches!(it.finding.verdict, Judgement::Failed | Judgement::Warning);
    let bad: Vec<_> = found.iter().filter(is_bad).map(|it| it.id).collect();
    if bad == [DAEMON_STATE] {
        writeln!(out, "beside what weftd says itself, these checks found nothing here").ok();
    }
    writeln!(out, "{} checks: {}", found.len(), counts.join(", ")).ok();
    out
}

#[cfg(test)]
mod tests {
    use super::facts::Facts;
    use super::finding::{failed, skipped, warning, well};
    use super::*;

    #[test]
    fn what_failed_comes_first_and_the_sum_last() {
        let findings = [
            ("a", well("1")),
            ("b", warning("2", "do that")),
            ("c", failed("3", "do this")),
            ("d", skipped("no right")),
        ];
        let findings = findings.map(|(id, checked)| Answer { id, finding: checked.into() });
        let short = "failed  c: 3\n        do this\nwarning b: 2\n        do that\n\
                     4 checks: 1 ok, 1 skipped, 1 warning, 1 failed\n";
        assert_eq!(render(&findings, false, Style::PLAIN), short);
        let alone = [("a", well("1")), (DAEMON_STATE, failed("3", "do this"))];
        let alone = alone.map(|(id, checked)| Answer { id, finding: checked.into() });
        assert_eq!(render(&alone, false, Style::PLAIN).lines().count(), 4, "who else is at fault?");
        let long = render(&findings, true, Style::PLAIN);
        assert!(long.contains("skipped d: no right\nok      a: 1\n4 checks"), "{long}");
        let json = to_json(&findings);
        let c = json!({ "id": "c", "verdict": "failed", "evidence": "3", "cure": "do this" });
        assert_eq!((&json["checks"][2], &json["checks"][0]["cure"]), (&c, &Value::Null));
    }

    #[test]
    fn ids_are_unique_and_for_scripts() {
        let ids: Vec<_> = described().map(|(id, _)| id).collect();
        let unique: std::collections::BTreeSet<_> = ids.iter().collect();
        assert_eq!(ids.len(), unique.len());
        assert!(ids.len() >= 25, "{}", ids.len());
        let is_plain = |id: &&str| id.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
        assert!(ids.iter().all(is_plain), "{ids:?}");
    }

    #[test]
    fn nothing_is_wrong_where_nothing_is_known() {
        for (id, judge, _) in CHECKS {
            let finding: Finding = judge(&Facts::default()).into();
            let is_calm = matches!(finding.verdict, Judgement::Ok | Judgement::Skipped);
            assert!(is_calm, "{id}: {finding:?}");
        }
    }
}
