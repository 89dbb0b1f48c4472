//! docs/differences.md: every row of differences.txt with the cases that show it.

use std::fmt::Write as _;
use std::path::Path;

use crate::golden::flags::{OURS, flags};
use crate::golden::table::cases;

const DIFFERENCES: &str = include_str!("differences.txt");

const HEAD: &str = "\
# Differences from flanneld

Every intended difference between weftd and flanneld, with its reason. Anything else that differs is
a defect.

The last column names the cases [below](#cases): inputs for which a test compares weftd's outcome
with flanneld's. Rows without a case concern a running daemon; other tests cover them.

This page is generated from `tests/pure/golden/differences.txt`, `tests/pure/golden/cases.txt` and
`tests/pure/golden/flags.txt` by `WEFT_WRITE_DIFFERENCES=1 cargo test --test pure golden`.
";

/// A line of differences.txt.
enum Line {
    Heading(&'static str),
    /// Where, flanneld, weftd, why.
    Row([&'static str; 4]),
}

fn lines() -> Vec<Line> {
    let lines = DIFFERENCES.lines().filter(|line| !line.is_empty() && !line.starts_with("# "));
    lines
        .filter(|line| *line != "#")
        .map(|line| match line.strip_prefix("## ") {
            Some(heading) => Line::Heading(heading),
            None => {
                let cells: Vec<_> = line.split(" | ").map(str::trim).collect();
                Line::Row(cells.try_into().unwrap_or_else(|_| panic!("not four cells: {line}")))
            }
        })
        .collect()
}

/// The first cell of each row.
fn places() -> Vec<&'static str> {
    let rows = lines().into_iter();
    rows.filter_map(|line| match line {
        Line::Row([place, ..]) => Some(place),
        Line::Heading(_) => None,
    })
    .collect()
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
    let differing = differing();
    let of_row = |row: &str| {
        let cases = differing.iter().enumerate().filter(|(_, (why, _))| row.starts_with(why));
        cases.map(|(index, _)| (index + 1).to_string()).collect::<Vec<_>>().join(", ")
    };
    let mut text = HEAD.to_owned();
    for line in lines() {
        match line {
            Line::Heading(heading) => write!(
                text,
                "\n## {heading}\n\n| Where | flanneld | weftd | Why | Cases |\n\
                 |---|---|---|---|---|\n"
            ),
            Line::Row([place, flanneld, weftd, why]) => {
                let cases = of_row(place);
                writeln!(text, "| {place} | {flanneld} | {weftd} | {why} | {cases} |")
            }
        }
        .expect("a string");
    }
    let same = cases().len() + flags().len() - differing.len();
    let ours = flags().iter().filter(|flag| flag.difference == OURS).count();
    let (same, count) = (same - ours, differing.len());
    write!(
        text,
        "\n## Cases\n\nOf {} cases and flags of flanneld, {same} have flanneld's outcome; these \
         {count} differ.\n\n\
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
fn every_case_names_one_difference() {
    let places = places();
    for (why, case) in differing() {
        let found = places.iter().filter(|place| place.starts_with(&why)).count();
        assert_eq!(found, 1, "rows of differences.txt that begin with {why:?}, for {case}");
    }
}

#[test]
fn document_matches_the_tables() {
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
