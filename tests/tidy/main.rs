//! The rules that the compiler cannot hold: which module may import which, what stays pure,
//! where `unsafe` may be, how long things get, what may not be left behind.
//!
//! The module map is data here. A failure names file, line, rule and what to do; each rule is
//! proved able to fail on a few lines of source at the end of this file.

mod counts;
mod docs;
mod levels;
mod prose;
mod source;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::levels::FLOORS;
use crate::source::{Source, paths, words};

/// What each module may import from this crate, itself aside. `*` is everything.
const MAP: &[(&str, &[&str])] = &[
    ("stats", &[]),
    ("packet", &["stats"]),
    ("route", &["packet", "stats"]),
    ("offload", &["packet", "route", "stats"]),
    ("forward", &["packet", "route", "offload", "stats"]),
    ("wireguard", &["route::Prefix"]),
    ("words", &[]),
    ("backend_kind", &["words"]),
    ("failure", &[]),
    ("rights", &["words"]),
    ("sys", &["packet::Span"]),
    ("device", &["sys", "offload", "packet::Span"]),
    ("fast_path", &["sys", "route::Prefix"]),
    (
        "engine",
        &[
            "device",
            "sys",
            "forward",
            "offload",
            "packet",
            "rights",
            "route",
            "stats",
            "wireguard",
            "words",
        ],
    ),
    (
        "config",
        &[
            "backend_kind",
            "route::Families",
            "route::IpAddress",
            "route::Prefix",
            "status",
            "wireguard::keys",
            "words",
        ],
    ),
    (
        "host",
        &[
            "backend_kind",
            "route::Families",
            "route::IpAddress",
            "route::Prefix",
            "failure",
            "config::options",
            "config::lock_file",
            "config::whole_file",
            "wireguard",
        ],
    ),
    ("netfilter", &["route::IpAddress", "route::Prefix", "failure", "status", "words"]),
    ("status", &["backend_kind", "route::IpAddress", "route::Prefix", "stats", "words"]),
    (
        "control",
        &[
            "backend_kind",
            "route::IpAddress",
            "route::Prefix",
            "failure",
            "config",
            "status",
            "words",
        ],
    ),
    (
        "backend",
        &[
            "backend_kind",
            "control",
            "host",
            "device",
            "engine",
            "fast_path",
            "forward",
            "packet",
            "route",
            "stats",
            "status",
            "config",
            "failure",
            "wireguard",
        ],
    ),
    ("daemon", &["*"]),
    ("tool", &["*"]),
];

/// What the programs in `src/bin/` may use of the library.
const PROGRAM_MODULES: &[&str] = &["daemon", "tool"];

/// Modules above the pure line: no I/O, no clock, no threads.
const PURE: &[&str] = &["stats", "packet", "route", "offload", "forward", "wireguard"];

/// Dependencies that pure modules may use; all others in `Cargo.toml` are banned there.
const PURE_CRATES: &str = "arc-swap base64 blake2 chacha20poly1305 derive_more ring snow \
    thiserror x25519-dalek zeroize";

/// Parts of `std` that pure modules may not use.
const IMPURE_STD: &[&str] = &[
    "std::env",
    "std::fs",
    "std::io",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::net::Tcp",
    "std::net::ToSocketAddrs",
    "std::net::UdpSocket",
];

/// Crates with one owner, as prefixes of paths: when such a crate breaks its interface, or is
/// replaced, the change stays in one place.
const OWNERS: &[(&str, &[&str])] = &[
    ("anyhow", &["src/daemon/", "src/tool/"]),
    ("clap", &["src/tool/"]),
    ("arc_swap", &["src/route/publish.rs"]),
    ("etcd_client", &["src/control/store/etcd"]),
    ("io_uring", &["src/sys/"]),
    ("kube", &["src/control/store/kube"]),
    ("libc", &["src/sys/", "src/rights.rs"]),
    ("netlink_packet_generic", &["src/host/netlink"]),
    ("netlink_packet_route", &["src/host/netlink"]),
    ("netlink_packet_wireguard", &["src/host/netlink"]),
    ("rtnetlink", &["src/host/netlink"]),
    ("landlock", &["src/rights.rs", "src/rights/"]),
    ("seccompiler", &["src/rights.rs"]),
    (
        "tokio",
        &[
            "src/control/",
            "src/host/",
            "src/netfilter/",
            "src/backend/",
            "src/daemon/",
            "src/tool/",
        ],
    ),
    ("tokio_util", &["src/control/store/kube"]),
    ("tower", &["src/control/own_thread.rs", "src/control/store/kube"]),
];

/// Longest line, in characters.
const COLUMNS_MAX: usize = 100;
/// Longest function, from `fn` to its brace.
const FUNCTION_LINES_MAX: usize = 70;
/// Longest file up to its tests: beyond it, a file has two subjects.
const FILE_LINES_MAX: usize = 500;
/// Longest file altogether, tests included.
const FILE_LINES_TOTAL_MAX: usize = 800;
/// Longest tests inside the file they test; longer ones go to a sibling file.
const INLINE_TEST_LINES_MAX: usize = 200;

/// What the package's root holds besides folders: what lies there by accident would be published.
const OF_ROOT: &[&str] = &[
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "clippy.toml",
    "deny.toml",
    "justfile",
    "rust-toolchain.toml",
    "rustfmt.toml",
];

/// What must not be left in code, as it is written there.
const MARKERS: &[&str] = &["todo!", "unimplemented!", "dbg!", "#[ignore"];

/// What must not be left in comments, as whole words.
const COMMENT_MARKERS: &[&str] = &["TODO", "FIXME", "XXX", "HACK"];

/// Places that exist on one machine only, and pointers to a tracker: text has to stand alone.
/// Split, so that this file passes its own rule.
const MACHINE_WORDS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/tmp/weft", "-notes"),
    concat!("issues", " show"),
];

struct Violation {
    line: usize,
    rule: &'static str,
    advice: String,
}

type Rule = fn(&Source) -> Vec<Violation>;

fn violation(line: usize, rule: &'static str, advice: impl Into<String>) -> Violation {
    Violation { line, rule, advice: advice.into() }
}

fn is_test_file(source: &Source) -> bool {
    let path = source.path.as_str();
    !path.starts_with("src/")
        || path.ends_with("/tests.rs")
        || path.contains("/tests/")
        || path.ends_with("_tests.rs")
}

fn imports(source: &Source) -> Vec<Violation> {
    let module = source.module();
    if source.path.starts_with("src/bin/") {
        let used = paths(&source.product, "weft").into_iter();
        let foreign = used.filter(|path| !PROGRAM_MODULES.contains(&path.segments[0].as_str()));
        return foreign
            .map(|path| {
                let advice = format!("programs use {PROGRAM_MODULES:?} only; move the work there");
                violation(source.line(path.at), "imports", advice)
            })
            .collect();
    }
    let Some(own) = module.first() else { return Vec::new() };
    let Some((_, allowed)) = MAP.iter().find(|(name, _)| name == own) else {
        return vec![violation(1, "imports", format!("add {own} to MAP in tests/tidy/main.rs"))];
    };
    let mut violations = Vec::new();
    for path in paths(&source.product, "crate").into_iter().chain(paths_above(source)) {
        let (top, wanted) = (path.segments[0].as_str(), path.segments.join("::"));
        let permitted = |entry: &&str| {
            *entry == "*" || wanted == **entry || wanted.starts_with(&format!("{entry}::"))
        };
        // Prefix allows PrefixError: types of one name family come from one file.
        let family = |entry: &&str| entry.contains("::") && wanted.starts_with(*entry);
        if top != *own && !allowed.iter().any(|entry| permitted(entry) || family(entry)) {
            let advice = format!(
                "{own} may import {allowed:?} but not {wanted}: pass the value in, or move the \
                 type to a module that both may import"
            );
            violations.push(violation(source.line(path.at), "imports", advice));
        }
    }
    violations
}

/// Imports within a module that has floors, `super` and the file's own submodules included.
fn floors(source: &Source) -> Vec<Violation> {
    let module: Vec<_> = source.module().into_iter().map(str::to_owned).collect();
    let Some((top, floors)) =
        FLOORS.iter().find(|(top, _)| module.first().is_some_and(|m| m == top))
    else {
        return Vec::new();
    };
    // The file that a path from the module's root leads to, and its floor.
    let floor_of = |segments: &[String]| {
        (1..=segments.len()).rev().find_map(|length| {
            let name = segments[..length].join("/");
            let floor = floors.iter().position(|floor| floor.contains(&name.as_str()))?;
            Some((name, floor))
        })
    };
    let own = &module[1..];
    // The module's own file says what is in it, and stands above all.
    let Some((name, floor)) = floor_of(own).filter(|(name, _)| *name == own.join("/")) else {
        let advice = format!("add {} to FLOORS in tests/tidy/levels.rs", own.join("/"));
        return if own.is_empty() { Vec::new() } else { vec![violation(1, "floors", advice)] };
    };
    let mut found = paths(&source.product, "crate");
    found.retain_mut(|path| path.segments[0] == *top && path.segments.drain(..1).count() == 1);
    for root in ["super", "self"] {
        for mut path in paths(&source.product, root) {
            let more = path.segments.iter().take_while(|segment| *segment == "super").count();
            let up = more + usize::from(root == "super");
            if let Some(above) = own.len().checked_sub(up) {
                path.segments.splice(..more, own[..above].iter().cloned());
                found.push(path);
            }
        }
    }
    for word in words(&source.product).map(|(_, word)| word).collect::<BTreeSet<_>>() {
        let child = [own, &[word.to_owned()]].concat();
        if floor_of(&child).is_some_and(|(name, _)| name == child.join("/")) {
            found.extend(paths(&source.product, word).into_iter().map(|mut path| {
                path.segments.splice(..0, child.iter().cloned());
                path
            }));
        }
    }
    // `pub(in crate::control)` is no import.
    found.retain(|path| !path.segments.is_empty());
    found.retain(|path| {
        floor_of(&path.segments).is_none_or(|(other, at)| at >= floor && other != name)
    });
    let advice = |path: &source::Path| {
        let other = path.segments.join("::");
        format!("{name} may import from lower floors, which {other} is not: move down what is used")
    };
    found.iter().map(|path| violation(source.line(path.at), "floors", advice(path))).collect()
}

/// `super::super::x` that leaves the file's top module, as paths from the crate's root.
fn paths_above(source: &Source) -> Vec<source::Path> {
    let depth = source.module().len();
    let mut found = paths(&source.product, "super");
    found.retain_mut(|path| {
        let more = path.segments.iter().take_while(|segment| *segment == "super").count();
        path.segments.drain(..more);
        let known = |top: &String| MAP.iter().any(|(name, _)| name == top);
        depth == more + 1 && path.segments.first().is_some_and(known)
    });
    found
}

fn purity(source: &Source) -> Vec<Violation> {
    if !source.module().first().is_some_and(|own| PURE.contains(own)) {
        return Vec::new();
    }
    let mut violations = Vec::new();
    for path in paths(&source.product, "std") {
        let wanted = format!("std::{}", path.segments.join("::"));
        if IMPURE_STD.iter().any(|impure| wanted.starts_with(impure)) {
            let advice = format!("{wanted} above the pure line: let the caller do it and pass in");
            violations.push(violation(source.line(path.at), "purity", advice));
        }
    }
    let banned: BTreeSet<_> = dependencies()
        .into_iter()
        .filter(|name| !PURE_CRATES.split(' ').any(|pure| pure == name))
        .map(|name| name.replace('-', "_"))
        .collect();
    for (at, word) in words(&source.product) {
        if banned.contains(word) && source.product[at + word.len()..].starts_with("::") {
            let advice = format!("{word} above the pure line: use it in sys, device or engine");
            violations.push(violation(source.line(at), "purity", advice));
        }
    }
    violations
}

/// The names under `[dependencies]`.
fn dependencies() -> Vec<String> {
    let manifest = include_str!("../../Cargo.toml");
    let section = manifest.split("[dependencies]").nth(1).unwrap_or_default();
    let lines = section.lines().skip(1).take_while(|line| !line.starts_with('['));
    lines.filter_map(|line| Some(line.split_once(" = ")?.0.to_owned())).collect()
}

fn unsafe_code(source: &Source) -> Vec<Violation> {
    let path = source.path.as_str();
    let mut violations = Vec::new();
    let opts_out = source.code.contains("(unsafe_code,") || source.code.contains("(\n    unsafe");
    let may = path.starts_with("src/sys/") || (!path.starts_with("src/") && opts_out);
    for (at, word) in words(&source.code) {
        if word == "unsafe" && !may {
            let advice = "only src/sys may: wrap the call there, or, in a test, opt out with a \
                          reason at the top of the file";
            violations.push(violation(source.line(at), "unsafe", advice));
        }
        if word == "unsafe_code" && path.starts_with("src/") && path != "src/sys/mod.rs" {
            let forbids = source.code[..at].ends_with("forbid(");
            if !forbids {
                let advice = "src/sys/mod.rs alone opts out of the lint";
                violations.push(violation(source.line(at), "unsafe", advice));
            }
        }
    }
    if path.starts_with("src/bin/") && !source.code.contains("#![forbid(unsafe_code)]") {
        violations.push(violation(1, "unsafe", "begin the program with #![forbid(unsafe_code)]"));
    }
    violations
}

fn owners(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (at, word) in words(&source.product) {
        let Some((_, places)) = OWNERS.iter().find(|(name, _)| *name == word) else { continue };
        let owned = places.iter().any(|place| source.path.starts_with(place));
        let named = source.product[at + word.len()..].starts_with("::")
            && !source.product[..at].ends_with("::");
        if named && !owned && source.path.starts_with("src/") {
            let advice = format!("{word} is used in {places:?} only; ask that module instead");
            violations.push(violation(source.line(at), "owner", advice));
        }
    }
    violations
}

fn sizes(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (at, line) in (1..).zip(source.text.lines()) {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX {
            let advice = format!("{columns} columns, {COLUMNS_MAX} at most: break the line");
            violations.push(violation(at, "columns", advice));
        }
    }
    for function in source.functions() {
        let (first, last) = (source.line(function.start), source.line(function.end));
        let lines = last + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            let advice = format!(
                "{} has {lines} lines, {FUNCTION_LINES_MAX} at most: cut at a pure leaf",
                function.name
            );
            violations.push(violation(first, "function size", advice));
        }
    }
    let total = source.text.lines().count();
    let (before, inline) = match test_module(source).filter(|_| !is_test_file(source)) {
        None => (total, 0),
        Some(item) => {
            let (first, last) = (source.line(item.start), source.line(item.end));
            (first - 1, last + 1 - first)
        }
    };
    if before > FILE_LINES_MAX && !is_test_file(source) {
        let advice = format!("{before} lines before tests, {FILE_LINES_MAX} at most: two subjects");
        violations.push(violation(before, "file size", advice));
    }
    if inline > INLINE_TEST_LINES_MAX {
        let advice = format!("{inline} lines of tests: move them to a sibling tests.rs");
        violations.push(violation(before + 1, "file size", advice));
    }
    if total > FILE_LINES_TOTAL_MAX {
        let advice = format!("{total} lines, {FILE_LINES_TOTAL_MAX} at most: split by subject");
        violations.push(violation(total, "file size", advice));
    }
    violations
}

/// The item `#[cfg(test)] mod tests`.
fn test_module(source: &Source) -> Option<std::ops::Range<usize>> {
    let is_tests = |item: &&std::ops::Range<usize>| {
        let words: Vec<_> = words(&source.code[(*item).clone()]).map(|(_, word)| word).collect();
        words.windows(2).any(|pair| pair == ["mod", "tests"])
    };
    source.test_items.iter().find(is_tests).cloned()
}

fn order(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    if !source.text.trim_start().starts_with("//!") {
        let advice = "begin with //! and say what the file owns and what it must never do";
        violations.push(violation(1, "module doc", advice));
    }
    if let Some(item) = test_module(source) {
        let rest = &source.code[item.end..];
        if !rest.trim().is_empty() {
            let at = item.end + rest.len() - rest.trim_start().len();
            violations.push(violation(source.line(at), "tests last", "move it above the tests"));
        }
    }
    violations
}

fn leftovers(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for marker in MARKERS {
        for (at, _) in source.code.match_indices(marker) {
            let advice = format!("{marker} is not finished work: finish or remove it");
            violations.push(violation(source.line(at), "leftover", advice));
        }
    }
    for (at, word) in words(&source.comments) {
        if COMMENT_MARKERS.contains(&word) {
            let advice = format!("{word} in a comment: do it, or say why it is as it is");
            violations.push(violation(source.line(at), "leftover", advice));
        }
    }
    violations
}

fn unwraps(source: &Source) -> Vec<Violation> {
    let found = source.product.match_indices(".unwrap()");
    let advice = "return an error, or expect() an invariant that this function shows";
    found.map(|(at, _)| violation(source.line(at), "unwrap", advice)).collect()
}

/// For text of any kind.
fn machine_words(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for word in MACHINE_WORDS {
        for (at, _) in source.text.match_indices(word) {
            let advice = format!("{word:?} means nothing to a reader elsewhere: say it in words");
            violations.push(violation(source.line(at), "machine", advice));
        }
    }
    violations
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files below the package's root whose name passes `wanted`, hidden and built ones aside.
fn files(wanted: fn(&str) -> bool) -> Vec<PathBuf> {
    const FOLDERS: [&str; 7] = ["src", "tests", "benches", "fuzz", "scripts", "deploy", ".ci"];
    let mut open: Vec<_> = FOLDERS.iter().map(|folder| root().join(folder)).collect();
    open.push(root());
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        let Ok(entries) = folder.read_dir() else { continue };
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let built = ["target", "corpus", "artifacts"].iter().any(|folder| name == **folder);
            if path.is_dir() {
                if folder != root() && !built {
                    open.push(path);
                }
            } else if wanted(&name.to_string_lossy()) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> Source {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let relative = path.strip_prefix(root()).unwrap_or(path).to_string_lossy().into_owned();
    Source::new(&relative, &text)
}

#[test]
fn the_root_holds_what_it_is_known_to_hold() {
    let entries = root().read_dir().expect("the root is there").flatten();
    let strange: Vec<_> = entries
        .filter(|entry| entry.path().is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.') && !OF_ROOT.contains(&name.as_str()))
        .collect();
    assert!(strange.is_empty(), "in the root: {strange:?}: remove them, or name them in OF_ROOT");
}

/// What the paths of files begin with that are test modules of `sources`, or below one.
fn test_paths(sources: &[Source]) -> BTreeSet<String> {
    let files = sources.iter().flat_map(Source::test_files);
    files.map(|file| file.trim_end_matches(".rs").to_owned()).collect()
}

/// Applies `rule` to every Rust file; `product` leaves out those that are tests.
fn hold(rule: Rule, product: bool) {
    let sources: Vec<_> =
        files(|name| name.ends_with(".rs")).iter().map(|path| read(path)).collect();
    assert!(sources.len() > 50, "only {} files found: is this the package?", sources.len());
    let tests = test_paths(&sources);
    let is_below = |path: &str| tests.iter().any(|test| path.starts_with(test));
    let held = sources
        .iter()
        .filter(|source| !product || !(is_test_file(source) || is_below(&source.path)));
    report(held.flat_map(|source| named(source, rule)).collect());
}

fn named(source: &Source, rule: Rule) -> Vec<String> {
    let violations = rule(source).into_iter();
    violations
        .map(|Violation { line, rule, advice }| format!("{}:{line}: {rule}: {advice}", source.path))
        .collect()
}

fn report(violations: Vec<String>) {
    assert!(violations.is_empty(), "{} violations\n{}", violations.len(), violations.join("\n"));
}

#[test]
fn modules_import_what_the_map_allows() {
    hold(imports, true);
    for (name, _) in MAP {
        let exists = |path: String| root().join(path).exists();
        let file = exists(format!("src/{name}.rs")) || exists(format!("src/{name}/mod.rs"));
        assert!(file, "MAP in tests/tidy/main.rs names {name}, which does not exist: remove it");
    }
}

#[test]
fn files_import_from_lower_floors() {
    hold(floors, true);
    for (module, floors) in FLOORS {
        for name in floors.iter().flat_map(|floor| floor.iter()) {
            let exists = |end: &str| root().join(format!("src/{module}/{name}{end}")).exists();
            assert!(exists(".rs") || exists("/mod.rs"), "FLOORS: {module} has no {name}");
        }
    }
}

#[test]
fn the_core_is_pure() {
    hold(purity, true);
    assert!(dependencies().len() > 10, "the dependencies were not found in Cargo.toml");
}

#[test]
fn unsafe_stays_in_sys() {
    hold(unsafe_code, false);
    let denied = include_str!("../../Cargo.toml").contains("unsafe_code = \"deny\"");
    assert!(denied, "Cargo.toml: [lints.rust] must have unsafe_code = \"deny\"");
}

#[test]
fn crates_stay_with_their_owners() {
    hold(owners, true);
}

#[test]
fn files_functions_and_lines_have_their_size() {
    hold(sizes, false);
}

#[test]
fn files_begin_with_their_doc_and_end_with_their_tests() {
    hold(order, false);
}

#[test]
fn nothing_is_left_behind() {
    hold(leftovers, false);
    hold(unwraps, true);
}

#[test]
fn texts_stand_alone() {
    let texts = files(|name| !name.ends_with(".lock") && name != ".git");
    report(texts.iter().map(|path| read(path)).flat_map(|s| named(&s, machine_words)).collect());
}

/// Asserts that `rule` finds violations at exactly these `lines` of `text` as the file `path`.
fn finds(rule: Rule, path: &str, text: &str, lines: &[usize]) {
    let found: Vec<_> = rule(&Source::new(path, text)).iter().map(|found| found.line).collect();
    assert_eq!(found, lines, "{path}:\n{text}");
}

#[test]
fn the_import_rule_can_fail() {
    let below = "use crate::engine::Worker;\n";
    finds(imports, "src/packet/ipv4.rs", below, &[1]);
    finds(imports, "src/backend/udp.rs", below, &[]);
    finds(imports, "src/newcomer.rs", "", &[1]);
    finds(imports, "src/host/mtu.rs", "use crate::route::{Prefix, PrefixError};\n", &[]);
    finds(imports, "src/host/mtu.rs", "use crate::route::{\n Prefix,\n Table,\n};\n", &[3]);
    finds(imports, "src/host/mtu.rs", "fn f() { crate::control::run::x(); }\n", &[1]);
    finds(imports, "src/host/mtu.rs", "use crate::{host::lock, sys::{tun, udp}};\n", &[1, 1]);
    finds(imports, "src/host/mtu.rs", "use super::super::sys::tun;\n", &[1]);
    finds(imports, "src/host/mtu.rs", "use super::lock;\n", &[]);
    finds(imports, "src/host/mtu.rs", "// crate::sys\nconst X: &str = \"crate::sys::x\";\n", &[]);
    finds(imports, "src/host/mtu.rs", "#[cfg(test)]\nmod tests {\n use crate::sys;\n}\n", &[]);
    finds(imports, "src/bin/weft.rs", "fn main() { weft::sys::x(); weft::daemon::y() }\n", &[1]);
}

#[test]
fn the_floor_rule_can_fail() {
    let machine = "src/control/machine.rs";
    finds(floors, machine, "use crate::control::store::Store;\n", &[1]);
    finds(floors, machine, "use crate::control::{lease::Lease, run::x};\n", &[1]);
    finds(floors, machine, "use crate::control::snapshot::Snapshot;\n", &[]);
    finds(floors, machine, "mod own;\nuse own::Hold;\n", &[2]);
    finds(floors, machine, "mod own;\nuse self::own::Hold;\n", &[2]);
    finds(floors, "src/control/machine/own.rs", "use super::{Machine, state::Asked};\n", &[]);
    finds(floors, "src/control/machine/own.rs", "use super::follow::X;\n", &[1]);
    finds(floors, "src/control/store/etcd.rs", "use super::StoreError;\n", &[1]);
    finds(floors, "src/control/store/etcd.rs", "use super::super::manager::X;\n", &[1]);
    finds(floors, "src/control/store/etcd.rs", "use crate::control::StoreError;\n", &[1]);
    finds(floors, "src/control/store/etcd.rs", "pub(in crate::control) fn f() {}\n", &[]);
    finds(floors, "src/control/newcomer.rs", "", &[1]);
    finds(floors, "src/control/mod.rs", "pub use run::End;\n", &[]);
    finds(floors, "src/daemon/run.rs", "use crate::control::run::End;\n", &[]);
}

#[test]
fn the_purity_rule_can_fail() {
    let time = "use std::{net::Ipv4Addr, time::{Duration, Instant}};\n";
    finds(purity, "src/packet/limiter.rs", time, &[1]);
    finds(purity, "src/host/mtu.rs", time, &[]);
    finds(purity, "src/route/table.rs", "fn f() {\n std::fs::read(x);\n}\n", &[2]);
    finds(purity, "src/stats.rs", "use tracing::info;\n", &[1]);
    finds(purity, "src/forward/decide.rs", "use libc::c_int;\nuse arc_swap::ArcSwap;\n", &[1]);
    let test = "#[cfg(test)]\nmod tests {\n use std::fs;\n}\n";
    finds(purity, "src/stats.rs", test, &[]);
}

#[test]
fn the_unsafe_rule_can_fail() {
    let block = "fn f() {\n unsafe { g() }\n}\n";
    finds(unsafe_code, "src/engine/mmsg.rs", block, &[2]);
    finds(unsafe_code, "src/sys/udp.rs", block, &[]);
    finds(unsafe_code, "tests/x.rs", block, &[2]);
    let reason = "#![allow(unsafe_code, reason = \"an allocator that counts\")]\n";
    finds(unsafe_code, "tests/x.rs", &format!("{reason}{block}"), &[]);
    finds(unsafe_code, "src/engine/mmsg.rs", reason, &[1]);
    finds(unsafe_code, "src/engine/mmsg.rs", "// unsafe\nfn is_unsafe_here() {}\n", &[]);
    finds(unsafe_code, "src/bin/weft.rs", "fn main() {}\n", &[1]);
    finds(unsafe_code, "src/bin/weft.rs", "#![forbid(unsafe_code)]\nfn main() {}\n", &[]);
}

#[test]
fn the_owner_rule_can_fail() {
    let uses = "\nuse rtnetlink::Handle;\n";
    finds(owners, "src/backend/udp.rs", uses, &[2]);
    finds(owners, "src/host/netlink/events.rs", uses, &[]);
    finds(owners, "src/control/run.rs", "use etcd_client::Client;\n", &[1]);
    finds(owners, "src/control/run.rs", "use crate::sys::libc::x;\n", &[]);
}

#[test]
fn the_size_rules_can_fail() {
    finds(sizes, "src/stats.rs", &format!("\n// {}\n", "é".repeat(98)), &[2]);
    finds(sizes, "src/stats.rs", &format!("// {}\n", "é".repeat(97)), &[]);
    let function = |lines: usize| format!("\nfn f<T>() -> [T; 2] {{{}}}\n", "\n".repeat(lines - 1));
    finds(sizes, "src/stats.rs", &function(FUNCTION_LINES_MAX), &[]);
    finds(sizes, "src/stats.rs", &function(FUNCTION_LINES_MAX + 1), &[2]);
    let short = "//\n".repeat(FILE_LINES_MAX);
    let tests = "#[cfg(test)]\nmod tests {\n//\n}\n";
    finds(sizes, "src/stats.rs", &format!("{short}{tests}"), &[]);
    finds(sizes, "src/stats.rs", &format!("//\n{short}{tests}"), &[FILE_LINES_MAX + 1]);
    let long = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "//\n".repeat(INLINE_TEST_LINES_MAX));
    finds(sizes, "src/stats.rs", &long, &[1]);
    let total = "//\n".repeat(FILE_LINES_TOTAL_MAX + 1);
    finds(sizes, "tests/x.rs", &total, &[FILE_LINES_TOTAL_MAX + 1]);
    finds(sizes, "src/a/tests.rs", &"//\n".repeat(FILE_LINES_TOTAL_MAX), &[]);
}

#[test]
fn the_order_rules_can_fail() {
    finds(order, "src/stats.rs", "use std::fmt;\n", &[1]);
    finds(order, "src/stats.rs", "//! Counters.\n", &[]);
    let tests = "//! Counters.\n#[cfg(test)]\nmod tests {\n}\n";
    finds(order, "src/stats.rs", tests, &[]);
    finds(order, "src/stats.rs", &format!("{tests}\nfn late() {{}}\n"), &[6]);
    let sibling = "//! Counters.\n#[cfg(test)]\n#[path = \"x_tests.rs\"]\nmod tests;\n// end\n";
    finds(order, "src/stats.rs", sibling, &[]);
    finds(order, "src/stats.rs", &format!("{sibling}const LATE: u8 = 1;\n"), &[6]);
}

#[test]
fn the_leftover_rules_can_fail() {
    for marker in MARKERS.iter().filter(|marker| marker.ends_with('!')) {
        finds(leftovers, "src/stats.rs", &format!("fn f() {{\n {marker}(x)\n}}\n"), &[2]);
        finds(leftovers, "src/stats.rs", &format!("const X: &str = \"{marker}\";\n"), &[]);
    }
    finds(leftovers, "tests/x.rs", "#[test]\n#[ignore = \"slow\"]\nfn f() {}\n", &[2]);
    for marker in COMMENT_MARKERS {
        finds(leftovers, "src/stats.rs", &format!("\n// {marker}: later\n"), &[2]);
        finds(leftovers, "src/stats.rs", &format!("/* a {marker} */\nfn x() {{}}\n"), &[1]);
    }
    let returned = "fn f() {
 g().unwrap();
}
";
    finds(unwraps, "src/stats.rs", returned, &[2]);
    let tested = format!(
        "#[cfg(test)]
mod tests {{
{returned}}}
"
    );
    finds(unwraps, "src/stats.rs", &tested, &[]);
    let word = MACHINE_WORDS[0];
    finds(machine_words, "README.md", &format!("See\n{word}x.\n"), &[2]);
}

#[test]
fn source_is_taken_apart_where_it_is_hard() {
    let text =
        "let a = r#\"x \" // unsafe\"#; let b = '\"'; // 'one\nfn f<'a>(x: &'a str) {} /* /* */ */";
    let source = Source::new("src/stats.rs", text);
    assert!(!source.code.contains("unsafe") && source.code.contains("fn f<'a>(x: &'a str) {}"));
    assert_eq!(source.comments.trim_start().lines().next(), Some("// 'one"));
    assert_eq!(source.code.len(), text.len());
    let hidden =
        "enum S {\n#[cfg(test)]\nA(Vec<u8>),\nB,\n}\n#[cfg(test)]\nfn f<A, B>() {}\nfn g() {}";
    let product = Source::new("src/stats.rs", hidden).product;
    assert!(product.contains('B') && product.contains("fn g"), "{product}");
    assert!(!product.contains("Vec") && !product.contains("fn f"), "{product}");
    let parent = "#[cfg(test)]\nmod tests;\n#[cfg(test)]\n#[path = \"b_tests.rs\"]\nmod more;\n";
    let files = Source::new("src/a/b.rs", parent).test_files();
    assert_eq!(files, ["src/a/b/tests.rs", "src/a/b_tests.rs"]);
    let files = Source::new("src/a/mod.rs", "#[cfg(test)]\npub(crate) mod c;\n").test_files();
    assert_eq!(files, ["src/a/c.rs"]);
}
