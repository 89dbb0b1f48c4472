//! weftd against flanneld's command line, environment, exit codes, network configuration, keys,
//! values, annotations, rules and `subnet.env`, case by case.
//!
//! `flags.txt` and `cases.txt` say what flanneld does; what weftd does is found out here, by its
//! program or its library. Each case either has flanneld's outcome, or names the row of
//! `differences.txt` that explains the difference; a difference that is gone fails as well.
//! docs/differences.md is generated from all three: with `WEFT_WRITE_DIFFERENCES=1` in the
//! environment these tests write it.

mod document;
mod flags;
mod library;
mod nodes;
mod program;
mod table;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use table::{Case, cases};

/// Most of a start's time is waiting, but the thread that writes its log has to get a processor
/// within 300 ms.
const THREADS: usize = 8;

/// What `work` says of each item, all at once.
fn of_each<T: Sync>(items: &[T], work: impl Fn(&T) -> Vec<String> + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let said = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(items.len()) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let lines = work(item);
                    said.lock().expect("no thread panics").extend(lines);
                }
            });
        }
    });
    said.into_inner().expect("no thread panicked")
}

/// Holds weftd's outcomes against the cases of `kind`.
#[track_caller]
fn hold(kind: &str, outcome: impl Fn(&Case) -> String + Sync) {
    let cases: Vec<_> = cases().into_iter().filter(|case| case.kind == kind).collect();
    assert!(!cases.is_empty(), "cases.txt has no case of the kind {kind}");
    report(of_each(&cases, |case| case.objection(&outcome(case)).into_iter().collect()));
}

#[track_caller]
fn report(objections: Vec<String>) {
    let count = objections.len();
    assert!(count == 0, "{count} unexplained\n{}", objections.join("\n"));
}

#[test]
fn command_line_environment_and_exit_codes() {
    hold("run", program::outcome);
}

#[test]
fn referenced_tests_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    hold("shown", |case| {
        let shown = case.shown.as_deref().unwrap_or_default();
        let (file, name) = shown.split_once(' ').unwrap_or_default();
        let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
        match text.contains(&format!("fn {name}(")) {
            true => case.expected().to_owned(),
            false => format!("there is no test {name:?} in {file:?}"),
        }
    });
}

#[test]
fn the_network_configuration() {
    hold("config", library::config);
}

#[test]
fn keys_and_values_of_leases() {
    hold("key", library::key);
    hold("value", library::value);
}

#[test]
fn the_annotations_and_their_prefix() {
    hold("annotations", nodes::annotations);
    hold("prefix", nodes::prefix);
}

#[test]
fn the_rules() {
    hold("iptables", library::iptables);
    hold("nftables", library::nftables);
}

#[test]
fn subnet_env_written_and_read_back() {
    hold("subnet.env", library::subnet_env);
    hold("previous", library::previous);
}

#[test]
fn every_case_has_a_known_kind() {
    const KINDS: [&str; 11] = [
        "run",
        "shown",
        "config",
        "key",
        "value",
        "annotations",
        "prefix",
        "iptables",
        "nftables",
        "subnet.env",
        "previous",
    ];
    let is_known = |case: &Case| KINDS.contains(&case.kind.as_str());
    let strange: Vec<_> = cases().into_iter().filter(|case| !is_known(case)).collect();
    assert!(strange.is_empty(), "nobody looks at these: {strange:?}");
}

#[test]
fn unexplained_differences_and_stale_explanations_are_found() {
    let case = |weftd: Option<&str>, why: bool| Case {
        flanneld: "exit 0: a...".to_owned(),
        weftd: weftd.map(str::to_owned),
        why: why.then(|| "Log".to_owned()),
        ..Case::default()
    };
    for (weftd, why, actual, objects) in [
        (None, false, "exit 0: abc", false),
        (None, false, "exit 1: abc", true),
        (Some("exit 0: abc"), false, "exit 0: abc", false),
        (Some("exit 0: abc"), false, "exit 0: abd", true),
        (Some("exit 1: abc"), false, "exit 1: abc", true),
        (Some("exit 1: abc"), true, "exit 1: abc", false),
        (Some("exit 1: abc"), true, "exit 1: abcd", true),
        (Some("exit 1: abc"), true, "exit 0: abc", true),
        (Some("exit 0: abc"), true, "exit 0: abc", true),
    ] {
        let objection = case(weftd, why).objection(actual);
        assert_eq!(objection.is_some(), objects, "{weftd:?}, {actual}: {objection:?}");
    }
}
