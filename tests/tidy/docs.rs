//! The documents against the program: tables that repeat what the code says, and paths that must
//! exist. A failure prints the rows to paste.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use weft::stats::DropReason;

const README: &str = include_str!("../../README.md");

/// Their paths are from the root, wherever they stand.
const DOCUMENTS: &[(&str, &str)] = &[
    ("README.md", README),
    ("ARCHITECTURE.md", include_str!("../../ARCHITECTURE.md")),
    ("CONTRIBUTING.md", include_str!("../../CONTRIBUTING.md")),
    ("CHANGELOG.md", include_str!("../../CHANGELOG.md")),
    ("SECURITY.md", include_str!("../../SECURITY.md")),
    ("deploy/README.md", include_str!("../../deploy/README.md")),
];

/// Flags that flanneld does not have.
const OWN_FLAGS: &[&str] = &[
    "engine",
    "follow-address",
    "local-store",
    "log-format",
    "offload",
    "peer-check",
    "stale-hold",
    "start-from-cache",
    "status-socket",
    "workers",
];

/// The rows of the table between two markers, as trimmed cells.
fn table<'d>(document: &'d str, marker: &str) -> Vec<Vec<&'d str>> {
    let between = document.split_once(&format!("<!-- {marker}:begin -->"));
    let inside = between.and_then(|(_, rest)| rest.split_once(&format!("<!-- {marker}:end -->")));
    let (inside, _) = inside.unwrap_or_else(|| panic!("the markers of {marker} are missing"));
    let rows = inside.trim().lines().skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

#[test]
fn the_drop_reasons_are_those_of_the_code() {
    let rows = table(README, "drop-reasons");
    let written: Vec<_> = rows
        .iter()
        .filter(|row| row.len() == 3 && !row[2].is_empty())
        .map(|row| (row[0].to_owned(), row[1].to_owned()))
        .collect();
    let expected: Vec<_> = DropReason::ALL
        .iter()
        .map(|reason| (format!("`{}`", reason.id()), reason.describe().to_owned()))
        .collect();
    let paste: String =
        expected.iter().map(|(id, text)| format!("| {id} | {text} | ... |\n")).collect();
    assert_eq!(written, expected, "README.md needs these rows, each with its advice:\n{paste}");
}

/// Name and help of each flag, from the usage text.
fn flags() -> Vec<(String, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_weftd")).arg("--help").output();
    let usage = String::from_utf8(output.expect("weftd runs").stderr).expect("usage is text");
    let mut flags: Vec<(String, String)> = Vec::new();
    for line in usage.lines().skip(1) {
        let trimmed = line.trim_start();
        let name = trimmed.strip_prefix('-').filter(|_| line.starts_with("  -"));
        match (name, flags.last_mut()) {
            (Some(rest), _) => {
                let (name, help) = rest.split_once([' ', '\t']).unwrap_or((rest, ""));
                flags.push((name.to_owned(), help.to_owned()));
            }
            (None, Some((_, help))) => help.push_str(trimmed),
            (None, None) => {}
        }
    }
    flags
}

#[test]
fn the_flags_are_those_of_the_program() {
    let expected: Vec<_> = flags()
        .iter()
        .map(|(name, help)| {
            let state = match () {
                () if help.contains("(no effect") => "ignored",
                () if help.contains("(not built") => "refuses",
                () => "built",
            };
            let own = if OWN_FLAGS.contains(&name.as_str()) { "ours" } else { "" };
            vec![format!("`--{name}`"), state.to_owned(), own.to_owned()]
        })
        .collect();
    assert!(expected.len() > 30, "only {} flags were read from the usage text", expected.len());
    let paste: String = expected.iter().map(|row| format!("| {} |\n", row.join(" | "))).collect();
    assert_eq!(table(README, "flags"), expected, "README.md needs these rows:\n{paste}");
}

#[test]
fn the_map_names_every_module() {
    let architecture = DOCUMENTS[1].1;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in folder.read_dir().expect("src is there").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let row = format!("| `{name}{}` |", if entry.path().is_dir() { "/" } else { "" });
        let exempt = ["lib.rs"].contains(&name.as_str());
        assert!(exempt || architecture.contains(&row), "ARCHITECTURE.md has no row {row}");
    }
}

/// What a document names in code marks or links and what looks like a path of this package.
fn named_paths(document: &str) -> BTreeSet<&str> {
    const FOLDERS: [&str; 7] =
        ["src/", "tests/", "benches/", "fuzz/", "scripts/", "./scripts/", "deploy/"];
    let marked = document.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
    let marked = marked.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)));
    let linked = document.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let linked = linked.filter(|target| !target.contains("://") && !target.starts_with('#'));
    marked.chain(linked).filter(|path| !path.contains(['*', '{', '<'])).collect()
}

#[test]
fn every_path_in_a_document_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, document) in DOCUMENTS {
        for path in named_paths(document) {
            assert!(root.join(path).exists(), "{name} names {path}, which does not exist");
        }
    }
    let found = named_paths("See `src/nowhere.rs` and [x](Y.md), not `std::fs` or [z](http://a).");
    assert_eq!(found, BTreeSet::from(["src/nowhere.rs", "Y.md"]));
}

#[test]
fn figures_come_from_a_recorded_run_or_not_at_all() {
    let inside = README.split_once("<!-- bench:begin -->").and_then(|(_, rest)| {
        rest.split_once("<!-- bench:end -->").map(|(inside, _)| inside.trim())
    });
    let inside = inside.expect("README.md has the markers bench:begin and bench:end");
    let figures = inside.lines().any(|line| line.starts_with('|'));
    let source = inside.contains("benches/record/");
    assert!(figures == source, "a table of figures names its file in benches/record/");
}
