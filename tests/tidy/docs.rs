//! The documents against the program: tables that repeat what the code says, and paths, links and
//! anchors that must exist. A failure prints the rows to paste.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use weft::control::rejected::RejectReason;
use weft::stats::DropReason;

/// Longer than this, nobody reads it to the end.
const README_LINES_MAX: usize = 250;

/// Flags that flanneld does not have.
const OWN_FLAGS: &[&str] = &[
    "engine",
    "fast-path",
    "follow-address",
    "guard",
    "keep-tunnel",
    "local-store",
    "log-format",
    "metrics-address",
    "offload",
    "peer-check",
    "source-ports",
    "stale-hold",
    "start-from-cache",
    "status-socket",
    "take-over",
    "wireguard",
    "worker-priority",
    "workers",
];

/// Options of other programs that documents name on their own, and `--etcd-`, a beginning.
const OTHER_OPTIONS: &str = "all check create-namespace df etcd- fast flannel-backend follow help \
    length link node-is-gone packets plane pod port quick root-dir seconds soak socket watch \
    workload";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file of this package.
fn text(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The pages in `docs/`, as paths from the root.
fn pages() -> Vec<String> {
    let entries = root().join("docs").read_dir().expect("docs is there").flatten();
    let names = entries.map(|entry| format!("docs/{}", entry.file_name().to_string_lossy()));
    let mut pages: Vec<_> = names.collect();
    pages.sort();
    pages
}

/// Every document, as (path from the root, text).
fn documents() -> Vec<(String, String)> {
    let named = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
    let named = named.into_iter().chain(["deploy/README.md"]).map(str::to_owned);
    named.chain(pages()).map(|name| (name.clone(), text(&name))).collect()
}

/// What stands between two markers of a document.
fn block<'d>(document: &'d str, marker: &str) -> &'d str {
    let between = document.split_once(&format!("<!-- {marker}:begin -->"));
    let inside = between.and_then(|(_, rest)| rest.split_once(&format!("<!-- {marker}:end -->")));
    inside.unwrap_or_else(|| panic!("the markers of {marker} are missing")).0.trim()
}

/// The rows of the table between two markers, as trimmed cells.
fn table<'d>(document: &'d str, marker: &str) -> Vec<Vec<&'d str>> {
    let rows = block(document, marker).lines().skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// The first cells of that table, without code marks.
fn first_cells(document: &str, marker: &str) -> Vec<String> {
    table(document, marker).iter().map(|row| row[0].trim_matches('`').to_owned()).collect()
}

#[test]
fn the_drop_reasons_are_those_of_the_code() {
    let page = text("docs/drop-reasons.md");
    let written: Vec<_> = table(&page, "drop-reasons")
        .iter()
        .filter(|row| row.len() == 3 && !row[2].is_empty())
        .map(|row| [row[0].to_owned(), row[1].to_owned(), row[2].to_owned()])
        .collect();
    let row = |reason: &DropReason| {
        [format!("`{}`", reason.id()), reason.describe().to_owned(), reason.advice().to_owned()]
    };
    let expected: Vec<_> = DropReason::ALL.iter().map(row).collect();
    let paste: String = expected
        .iter()
        .map(|[id, text, advice]| format!("| {id} | {text} | {advice} |\n"))
        .collect();
    assert_eq!(written, expected, "docs/drop-reasons.md needs these rows:\n{paste}");
}

#[test]
fn the_checks_are_those_of_the_tool() {
    let page = text("docs/operations.md");
    let written: Vec<_> =
        table(&page, "checks").iter().map(|row| (row[0].to_owned(), row[1].to_owned())).collect();
    let expected: Vec<_> = weft::tool::check::described()
        .map(|(id, about)| (format!("`{id}`"), about.to_owned()))
        .collect();
    let paste: String =
        expected.iter().map(|(id, about)| format!("| {id} | {about} |\n")).collect();
    assert_eq!(written, expected, "docs/operations.md needs these rows:\n{paste}");
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
    let page = text("docs/configuration.md");
    assert_eq!(table(&page, "flags"), expected, "docs/configuration.md needs these rows:\n{paste}");
}

#[test]
fn our_own_flags_are_in_the_readme_with_their_defaults() {
    let (readme, page) = (text("README.md"), text("docs/configuration.md"));
    let own: Vec<_> = OWN_FLAGS.iter().map(|name| format!("--{name}")).collect();
    assert_eq!(first_cells(&readme, "own-flags"), own, "README.md's table of our own flags");
    for row in table(&readme, "own-flags") {
        let name = row[0].trim_matches('`').trim_start_matches("--");
        let (_, help) = flags().into_iter().find(|(flag, _)| flag == name).expect("a flag");
        let default = help.rsplit_once("(default ").map_or("none", |(_, rest)| rest);
        let default = default.trim_end_matches(')').trim_matches('"').to_owned();
        let written = row[1].replace('`', "");
        assert_eq!(written, default, "README.md's default of --{name}");
        let heading = format!("\n### `--{name}=");
        assert!(page.contains(&heading), "docs/configuration.md has no section --{name}");
    }
}

/// The options that a document names in code marks: alone, or in a command line of weftd.
fn named_options(document: &str) -> BTreeSet<&str> {
    let spans = document.split('`').skip(1).step_by(2);
    let alone = spans.clone().filter(|span| span.starts_with("--"));
    let alone = alone.filter_map(|span| span.split_whitespace().next());
    let commands = spans.flat_map(|span| span.lines().filter_map(|l| l.split_once("weftd ")));
    let words = alone.chain(commands.flat_map(|(_, options)| options.split_whitespace()));
    let names = words.filter_map(|word| word.strip_prefix("--")?.split('=').next());
    names.filter(|name| name.starts_with(|c: char| c.is_ascii_alphabetic())).collect()
}

#[test]
fn every_option_in_a_document_exists() {
    let mut known: BTreeSet<String> = flags().into_iter().map(|(name, _)| name).collect();
    known.extend(OTHER_OPTIONS.split(' ').map(str::to_owned));
    // Cases in docs/differences.md show what becomes of options that do not exist.
    let documents = documents().into_iter().filter(|(name, _)| name != "docs/differences.md");
    for (name, document) in documents {
        for option in named_options(&document) {
            assert!(known.contains(option), "{name} names --{option}, which nothing has");
        }
    }
    let found = named_options("`--a=1 x` and `weftd --b` and `-- --c` and `other --d`");
    assert_eq!(found, BTreeSet::from(["a", "b"]));
}

#[test]
fn the_metrics_are_those_of_the_code() {
    let words = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let is_metric = |word: &&str| ["flannel_", "process_"].iter().any(|p| word.starts_with(p));
        words.filter(is_metric).map(str::to_owned).collect()
    };
    let code = words(&text("src/daemon/metrics.rs"));
    let written: BTreeSet<_> =
        first_cells(&text("docs/operations.md"), "metrics").into_iter().collect();
    let missing: Vec<_> = code.symmetric_difference(&written).collect();
    assert!(missing.is_empty(), "docs/operations.md or src/daemon/metrics.rs lacks {missing:?}");
    for (name, document) in documents() {
        // A key of flannel's chart.
        let document = document.replace("flannel.flannel_cni", "");
        let unknown: Vec<_> = words(&document).difference(&code).cloned().collect();
        assert!(unknown.is_empty(), "{name} names {unknown:?}, which are no metrics");
    }
    let reasons: Vec<_> = RejectReason::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(first_cells(&text("docs/operations.md"), "rejections"), reasons);
}

#[test]
fn the_map_names_every_module() {
    let architecture = text("ARCHITECTURE.md");
    for entry in root().join("src").read_dir().expect("src is there").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let row = format!("| `{name}{}` |", if entry.path().is_dir() { "/" } else { "" });
        let exempt = ["lib.rs"].contains(&name.as_str());
        assert!(exempt || architecture.contains(&row), "ARCHITECTURE.md has no row {row}");
    }
}

/// What a document names in code marks and looks like a path of this package.
fn named_paths(document: &str) -> BTreeSet<&str> {
    const FOLDERS: [&str; 8] =
        ["src/", "tests/", "benches/", "docs/", "fuzz/", "scripts/", "./scripts/", "deploy/"];
    let marked = document.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
    let paths = marked.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)));
    paths.filter(|path| !path.contains(['*', '{', '<'])).collect()
}

/// Where a document's links go, those to other sites aside.
fn links(document: &str) -> impl Iterator<Item = &str> {
    let targets = document.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://"))
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(document: &str) -> BTreeSet<String> {
    let headings = document.lines().filter(|line| line.starts_with('#'));
    let texts = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
    texts.map(|text| text.chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// The file that a link in `document` goes to, as a path from the root.
fn target_file(document: &str, link: &str) -> PathBuf {
    let file = link.split('#').next().unwrap_or_default();
    match file {
        "" => PathBuf::from(document),
        _ => Path::new(document).with_file_name(file),
    }
}

#[test]
fn every_path_and_link_in_a_document_exists() {
    for (name, document) in documents() {
        for path in named_paths(&document) {
            assert!(root().join(path).exists(), "{name} names {path}, which does not exist");
        }
        for link in links(&document) {
            let file = root().join(target_file(&name, link));
            assert!(file.exists(), "{name} links to {link}, which does not exist");
            if let Some((_, anchor)) = link.split_once('#') {
                let target = std::fs::read_to_string(file).expect("a document");
                let found = anchors(&target).contains(anchor);
                assert!(found, "{name} links to {link}, and there is no such heading");
            }
        }
    }
    let found = named_paths("See `src/nowhere.rs` and `docs/x.md`, not `std::fs` or src/bare.");
    assert_eq!(found, BTreeSet::from(["src/nowhere.rs", "docs/x.md"]));
    assert_eq!(links("[x](Y.md#z), not [z](http://a)").collect::<Vec<_>>(), ["Y.md#z"]);
    assert_eq!(anchors("## `--a=B|c` and D"), BTreeSet::from(["--abc-and-d".to_owned()]));
}

#[test]
fn the_readme_is_short_and_leads_to_every_page() {
    let lines = text("README.md").lines().count();
    assert!(lines <= README_LINES_MAX, "README.md has {lines} lines, at most {README_LINES_MAX}");
    let (mut seen, mut next) = (BTreeSet::new(), vec![PathBuf::from("README.md")]);
    while let Some(page) = next.pop() {
        let name = page.to_string_lossy().into_owned();
        let is_page = page.extension().is_some_and(|extension| extension == "md");
        if is_page && seen.insert(root().join(&page).canonicalize().expect("links exist")) {
            let document = text(&name);
            next.extend(links(&document).map(|link| target_file(&name, link)));
        }
    }
    for page in pages() {
        let path = root().join(&page).canonicalize().expect("it was listed");
        assert!(seen.contains(&path), "no link leads from README.md to {page}");
    }
}

#[test]
fn figures_come_from_a_recorded_run() {
    for name in ["README.md", "docs/performance.md"] {
        let document = text(name);
        let inside = block(&document, "bench");
        assert!(inside.lines().any(|line| line.starts_with('|')), "{name} shows no figures");
        assert!(inside.contains("benches/record/"), "{name}: figures must name their record");
    }
}
