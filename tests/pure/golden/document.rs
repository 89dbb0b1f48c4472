//! docs/differences.md: every difference of README.md with its reason and the cases that have it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use crate::golden::flags::{OURS, flags};
use crate::golden::table::cases;

const README: &str = include_str!("../../../README.md");
const REASONS: &str = include_str!("reasons.txt");

const HEAD: &str = "\
# Differences from flanneld, with their reasons

Made by `tests/pure/golden/` from the table in [README.md](../README.md),
`tests/pure/golden/reasons.txt` and the cases in `tests/pure/golden/cases.txt` and
`tests/pure/golden/flags.txt`; to be written again with
`WEFT_WRITE_DIFFERENCES=1 cargo test --test pure golden`.
A case is an input for which the test holds
weftd's outcome against flanneld's; those without a difference are in the same files. Rows without
a case are about a daemon at work; other tests have them.
";

/// The rows of README.md's table: where, flanneld, weftd.
fn rows() -> Vec<[&'static str; 3]> {
    let (_, rest) = README.split_once("\n## Differences from flanneld\n").expect("the heading");
    let (section, _) = rest.split_once("\n## ").expect("another heading");
    let lines = section.lines().filter(|line| line.starts_with('|')).skip(2);
    let cells = lines.map(|line| line.trim_matches('|').split('|').map(str::trim));
    cells.map(|row| row.collect::<Vec<_>>().try_into().expect("three cells")).collect()
}

/// The reason of each first cell.
fn reasons() -> BTreeMap<&'static str, &'static str> {
    let lines = REASONS.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let pairs =
        lines.map(|line| line.split_once(" | ").unwrap_or_else(|| panic!("{line}: no reason")));
    pairs.collect()
}

/// What the files tell of a row, as (row's first cell or its beginning, cells of the table).
fn differing() -> Vec<(String, String)> {
    let code = |text: &str| format!("`{}`", text.replace('|', "\\|"));
    let mut differing = Vec::new();
    for flag in flags().iter().filter(|flag| !matches!(flag.difference, "" | OURS)) {
        let given = code(&format!("-{}={}", flag.name, flag.value));
        let text = format!("1.1 Flags | {given} | has it | {}", code(flag.becomes));
        differing.push((flag.difference.to_owned(), text));
    }
    for case in cases() {
        if let (Some(why), Some(weftd)) = (case.why, case.weftd) {
            let (given, flanneld, weftd) = (code(&case.given), code(&case.flanneld), code(&weftd));
            differing.push((why, format!("{} | {given} | {flanneld} | {weftd}", case.section)));
        }
    }
    differing
}

fn document() -> String {
    let (rows, reasons, differing) = (rows(), reasons(), differing());
    let of_row = |row: &str| {
        let cases = differing.iter().enumerate().filter(|(_, (why, _))| row.starts_with(why));
        cases.map(|(index, _)| (index + 1).to_string()).collect::<Vec<_>>()
    };
    let mut text =
        format!("{HEAD}\n| Where | flanneld | weftd | Why | Cases |\n|---|---|---|---|---|\n");
    for [place, flanneld, weftd] in &rows {
        let (why, cases) = (reasons.get(place).unwrap_or(&""), of_row(place).join(", "));
        writeln!(text, "| {place} | {flanneld} | {weftd} | {why} | {cases} |").expect("a string");
    }
    let same = cases().len() + flags().len() - differing.len();
    let ours = flags().iter().filter(|flag| flag.difference == OURS).count();
    let (same, count) = (same - ours, differing.len());
    write!(
        text,
        "\n## Cases\n\nOf {} cases and flags of flanneld, {same} have flanneld's outcome; these \
         {count} have another.\n\n\
         | Case | Area | Given | flanneld | weftd |\n|---|---|---|---|---|\n",
        same + count,
    )
    .expect("a string");
    for (index, (_, cells)) in differing.iter().enumerate() {
        writeln!(text, "| {} | {cells} |", index + 1).expect("a string");
    }
    text
}

#[test]
fn every_difference_has_its_reason_and_every_case_its_row() {
    let (rows, reasons) = (rows(), reasons());
    for [place, ..] in &rows {
        let file = "tests/pure/golden/reasons.txt";
        assert!(reasons.contains_key(place), "{file} has no reason for README.md's row {place}");
    }
    for place in reasons.keys() {
        let is_there = rows.iter().any(|[row, ..]| row == place);
        assert!(is_there, "tests/pure/golden/reasons.txt: README.md has no row {place}");
    }
    for (why, case) in differing() {
        let found = rows.iter().filter(|[row, ..]| row.starts_with(&why)).count();
        assert_eq!(found, 1, "README.md's rows that begin with {why:?}, for the case {case}");
    }
}

#[test]
fn the_document_is_what_the_tables_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/differences.md");
    let text = document();
    if std::env::var_os("WEFT_WRITE_DIFFERENCES").is_some() {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("docs can be made");
        std::fs::write(&path, &text).expect("the document can be written");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == text,
        "docs/differences.md is out of date: WEFT_WRITE_DIFFERENCES=1 cargo test --test pure golden"
    );
}
