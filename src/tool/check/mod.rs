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

use serde::Serialize;
use serde_json::{Value, json};

use self::checks::CHECKS;
use self::finding::{Finding, Verdict};
use super::arguments::{CheckArguments, Output};
use super::style::Style;
use crate::status::SCHEMA;

/// Exit code if a check failed.
const EXIT_FOUND: u8 = 1;

/// Id and meaning of each check, in their order: the table in the documents.
pub fn described() -> impl Iterator<Item = (&'static str, &'static str)> {
    CHECKS.iter().map(|check| (check.id, check.about))
}

/// All checks: the report, and the exit code.
pub(super) fn run(arguments: &CheckArguments) -> anyhow::Result<(String, u8)> {
    let facts = read::facts(arguments)?;
    let findings: Vec<_> = CHECKS.iter().map(|check| (check.id, (check.judge)(&facts))).collect();
    let text = match arguments.output {
        Some(Output::Json) => format!("{:#}\n", to_json(&findings)),
        None => render(&findings, arguments.verbose, Style::of_output()),
    };
    let has_failed = findings.iter().any(|(_, finding)| finding.verdict == Verdict::Failed);
    Ok((text, if has_failed { EXIT_FOUND } else { 0 }))
}

/// All findings, for scripts.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    checks: Vec<Found<'a>>,
}

#[derive(Serialize)]
struct Found<'a> {
    id: &'a str,
    #[serde(flatten)]
    finding: &'a Finding,
}

fn to_json(findings: &[(&str, Finding)]) -> Value {
    let checks = findings.iter().map(|(id, finding)| Found { id, finding }).collect();
    json!(Report { schema: SCHEMA, checks })
}

/// What failed, then warnings, then the sum; all of it if `verbose`.
fn render(findings: &[(&str, Finding)], verbose: bool, style: Style) -> String {
    let mut out = String::new();
    let shown: &[Verdict] = match verbose {
        true => &[Verdict::Failed, Verdict::Warning, Verdict::Skipped, Verdict::Ok],
        false => &[Verdict::Failed, Verdict::Warning],
    };
    let of = |verdict| findings.iter().filter(move |(_, finding)| finding.verdict == verdict);
    for verdict in shown {
        for (id, finding) in of(*verdict) {
            let word = format!("{:<7}", verdict.name());
            let word = match verdict {
                Verdict::Ok => style.good(&word),
                Verdict::Warning => style.doubtful(&word),
                Verdict::Failed => style.bad(&word),
                Verdict::Skipped => word,
            };
            writeln!(out, "{word} {id}: {}", finding.evidence).ok();
            if let Some(cure) = &finding.cure {
                writeln!(out, "        {cure}").ok();
            }
        }
    }
    let counts = [
        (Verdict::Ok, "ok", "ok"),
        (Verdict::Skipped, "skipped", "skipped"),
        (Verdict::Warning, "warning", "warnings"),
        (Verdict::Failed, "failed", "failed"),
    ];
    let counts = counts.map(|(verdict, one, many)| (of(verdict).count(), one, many));
    let present = counts.iter().filter(|(count, ..)| *count > 0);
    let texts: Vec<_> = present
        .map(|(count, one, many)| format!("{count} {}", if *count == 1 { one } else { many }))
        .collect();
    writeln!(out, "{} checks: {}", findings.len(), texts.join(", ")).ok();
    out
}

#[cfg(test)]
mod tests {
    use super::facts::Facts;
    use super::*;

    #[test]
    fn what_failed_comes_first_and_the_sum_last() {
        let findings = [
            ("a", Finding::ok("1")),
            ("b", Finding::warning("2", "do that")),
            ("c", Finding::failed("3", "do this")),
            ("d", Finding::skipped("no right")),
        ];
        let short = "failed  c: 3\n        do this\nwarning b: 2\n        do that\n\
                     4 checks: 1 ok, 1 skipped, 1 warning, 1 failed\n";
        assert_eq!(render(&findings, false, Style::PLAIN), short);
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
        for check in CHECKS {
            let finding = (check.judge)(&Facts::default());
            let is_calm = matches!(finding.verdict, Verdict::Ok | Verdict::Skipped);
            assert!(is_calm, "{}: {finding:?}", check.id);
        }
    }
}
