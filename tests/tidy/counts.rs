//! How large the product is: its lines without tests, comments and blank lines, and its tokens,
//! folder by folder, each with a ceiling. A feature pays for its lines by what it makes
//! superfluous; a ceiling is raised only with the reason in the commit.

use std::collections::BTreeMap;

use super::source::{Source, token_count};
use super::{files, is_test_file, read, test_paths};

/// Most lines and tokens of each folder of `src/`; `.` has the files beside the folders.
const CEILINGS: &[(&str, usize, usize)] = &[
    (".", 566, 4715),
    ("backend", 12437, 128601),
    ("bin", 15, 144),
    ("config", 1938, 19781),
    ("daemon", 3891, 40192),
    ("control", 5925, 59970),
    ("device", 494, 5308),
    ("engine", 2265, 21341),
    ("fast_path", 741, 6759),
    ("forward", 813, 7777),
    ("host", 3412, 36921),
    ("netfilter", 1281, 12821),
    ("offload", 865, 8031),
    ("packet", 1148, 11600),
    ("rights", 55, 575),
    ("route", 568, 5861),
    ("stats", 282, 2495),
    ("status", 635, 4642),
    ("sys", 1258, 13383),
    ("tool", 5846, 64215),
    ("wireguard", 1473, 14364),
];

/// Lines and tokens.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Size {
    lines: usize,
    tokens: usize,
}

/// Of one file: lines that hold code or a literal, tests aside.
fn size(source: &Source) -> Size {
    let product = source.product_text();
    let lines = product.lines().filter(|line| !line.trim().is_empty()).count();
    Size { lines, tokens: token_count(&product) }
}

/// Of every folder.
fn sizes() -> BTreeMap<String, Size> {
    let sources: Vec<_> = files(|name| name.ends_with(".rs") || name.ends_with(".c"))
        .iter()
        .map(|path| read(path))
        .collect();
    let tests = test_paths(&sources);
    let mut sizes: BTreeMap<String, Size> = BTreeMap::new();
    for source in &sources {
        let Some(path) = source.path.strip_prefix("src/") else { continue };
        if is_test_file(source) || tests.iter().any(|test| source.path.starts_with(test)) {
            continue;
        }
        let folder = path.split_once('/').map_or(".", |(folder, _)| folder);
        let Size { lines, tokens } = size(source);
        let sum = sizes.entry(folder.to_owned()).or_default();
        (sum.lines, sum.tokens) = (sum.lines + lines, sum.tokens + tokens);
    }
    sizes
}

#[test]
fn the_product_stays_small() {
    let sizes = sizes();
    let total = sizes.values().fold(Size::default(), |sum, size| Size {
        lines: sum.lines + size.lines,
        tokens: sum.tokens + size.tokens,
    });
    println!("{total:?}");
    let mut above = Vec::new();
    for (folder, Size { lines, tokens }) in &sizes {
        let ceiling = CEILINGS.iter().find(|(name, ..)| name == folder);
        let (_, lines_max, tokens_max) = ceiling.copied().unwrap_or_default();
        if *lines > lines_max || *tokens > tokens_max {
            above.push(format!(
                "    (\"{folder}\", {lines}, {tokens}), // {lines_max}, {tokens_max}"
            ));
        }
    }
    assert!(
        above.is_empty(),
        "above the ceilings: take as much out elsewhere in the folder, or raise them with the \
         reason in the commit:\n{}",
        above.join("\n")
    );
    for (folder, ..) in CEILINGS {
        assert!(sizes.contains_key(*folder), "CEILINGS names {folder}, which does not exist");
    }
}

#[test]
fn comments_blank_lines_and_tests_are_not_counted() {
    let text = "//! A file.\n\nuse std::fmt; // why\n/* more\n of it */ fn f() {\n    \"//\\\n\
                x\"\n}\n";
    let tests = "#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n";
    let found = size(&Source::new("src/stats.rs", &format!("{text}\n{tests}")));
    // use std : : fmt ; fn f ( ) { "..." }
    assert_eq!(found, Size { lines: 5, tokens: 13 });
}
