//! The recorded benchmark runs: what is published must be what the samples say, by the programs
//! that are in this tree. Runs jq and bash, as scripts/bench does, and measures nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folders of `benches/record/`.
fn records() -> Vec<PathBuf> {
    let entries = root().join("benches/record").read_dir().expect("there are records").flatten();
    let mut records: Vec<_> =
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    records.sort();
    records
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("run {command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed: {errors}");
    String::from_utf8(output.stdout).expect("the output is text")
}

/// `jq -L scripts ARGUMENTS... FILTER`.
fn jq(arguments: &[&str], filter: &str) -> String {
    let mut command = Command::new("jq");
    output(command.current_dir(root()).args(["-L", "scripts"]).args(arguments).arg(filter))
}

/// The results of the samples in `folder`.
fn results_of(folder: &Path) -> Value {
    let file = |name: &str| folder.join(name).display().to_string();
    let (machine, samples) = (file("machine.json"), file("samples.ndjson"));
    let arguments = ["-n", "--slurpfile", "machine", &machine, "--slurpfile", "samples", &samples];
    let filter = "include \"bench-report\"; results($machine[0]; $samples)";
    serde_json::from_str(&jq(&arguments, filter)).expect("results are JSON")
}

/// The results of samples that a test made up, one JSON object each.
fn results_of_samples(samples: &[Value]) -> Value {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text);
    let lines: String = samples.iter().map(|sample| format!("{sample}\n")).collect();
    write("machine.json", "{}".to_owned()).expect("the folder is writable");
    write("samples.ndjson", lines).expect("the folder is writable");
    results_of(folder.path())
}

fn assert_same(published: &str, computed: &str, what: &str) {
    let differing = published.lines().zip(computed.lines()).find(|(left, right)| left != right);
    assert!(
        published.trim() == computed.trim(),
        "{what} is not what its samples say; run scripts/bench --report, then --readme. First \
         difference: {differing:?}"
    );
}

#[test]
fn every_record_follows_from_its_samples() {
    let records = records();
    assert!(!records.is_empty(), "benches/record/ holds no run");
    for folder in records {
        let name = folder.display();
        let text = std::fs::read_to_string(folder.join("results.json")).expect("results.json");
        let published: Value = serde_json::from_str(&text).expect("results.json is JSON");
        assert!(published == results_of(&folder), "{name}: run scripts/bench --report on it");
        let results = folder.join("results.json").display().to_string();
        let filter = "include \"bench-markdown\"; markdown";
        let mut command = Command::new("jq");
        let markdown =
            output(command.current_dir(root()).args(["-r", "-L", "scripts", filter]).arg(&results));
        let report = std::fs::read_to_string(folder.join("report.md")).expect("report.md");
        assert_same(&report, &markdown, &format!("report.md of {name}"));
    }
}

#[test]
fn the_documents_show_the_newest_record() {
    let newest = records().pop().expect("benches/record/ holds a run");
    for (file, filter) in [("README.md", "readme"), ("docs/performance.md", "performance")] {
        let text = std::fs::read_to_string(root().join(file)).expect(file);
        let inside = text
            .split_once("<!-- bench:begin -->")
            .and_then(|(_, rest)| Some(rest.split_once("<!-- bench:end -->")?.0))
            .unwrap_or_else(|| panic!("{file} has no markers bench:begin and bench:end"));
        let script =
            "source scripts/common.sh; source scripts/bench-record.sh; record_block \"$0\" \"$1\"";
        let mut command = Command::new("bash");
        command.current_dir(root()).args(["-euc", script, filter]).arg(&newest);
        assert_same(inside, &output(&mut command), &format!("the performance section of {file}"));
    }
}

/// A sample of `workload` whose `field` has that value.
fn sample(plane: &str, workload: &str, field: &str, value: f64) -> Value {
    let mut sample = serde_json::json!({"link": "pass", "plane": plane, "workload": workload});
    sample[field] = value.into();
    sample
}

#[test]
fn promises_compare_medians_with_yardsticks() {
    let tcp = |plane: &str, gbps: f64| sample(plane, "tcp1", "gbps", gbps);
    let mut samples = vec![tcp("vxlan", 20.0), tcp("one-packet", 1.0)];
    samples.extend([7.5, 7.0, 100.0].map(|gbps| tcp("weft", gbps)));
    samples.extend([tcp("weft-no-offload", 1.0), tcp("weft-mmsg", 6.9)]);
    let results = results_of_samples(&samples);
    let verdict = |base: &str, plane: &str| {
        let promises = results["promises"].as_array().expect("promises are a list");
        let wanted = |promise: &&Value| {
            promise["metric"] == "tcp1" && promise["link"] == "pass" && promise["base"] == base
        };
        let promise = promises.iter().find(wanted).expect("tcp1 has a promise");
        let planes = promise["planes"].as_array().expect("planes are a list");
        let own = planes.iter().find(|own| own["plane"] == plane);
        own.map(|own| own["verdict"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(verdict("one-packet", "weft").as_deref(), Some("pass"), "7.5 is above 7");
    assert_eq!(verdict("vxlan", "weft").as_deref(), Some("FAIL"), "0.375 is below 0.38");
    assert_eq!(verdict("one-packet", "weft-mmsg").as_deref(), Some("FAIL"), "6.9 is below 7");
    assert_eq!(verdict("one-packet", "weft-no-offload"), None, "a handicap promises nothing");
}

/// The verdict of `promises` on `metric` for each plane.
fn verdicts(promises: &Value, metric: &str) -> Vec<(String, String)> {
    let promises = promises.as_array().expect("promises are a list").iter();
    let own = promises.filter(|promise| promise["metric"] == metric);
    let planes = own.flat_map(|promise| promise["planes"].as_array().expect("planes are a list"));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    planes.map(|own| (text(&own["plane"]), text(&own["verdict"]))).collect()
}

#[test]
fn what_the_hypervisor_took_is_told() {
    let mut samples = vec![sample("weft", "tcp1", "gbps", 7.5); 3];
    for (sample, (steal, retakes)) in samples.iter_mut().zip([(0.5, 0), (7.0, 3), (1.5, 1)]) {
        (sample["steal_percent"], sample["retakes"]) = (steal.into(), retakes.into());
    }
    let results = results_of_samples(&samples);
    assert_eq!(
        (&results["steal_percent"]["median"], &results["retakes"]),
        (&1.5.into(), &4.into())
    );
    let before = results_of_samples(&[sample("weft", "tcp1", "gbps", 7.5)]);
    assert!(before.get("retakes").is_none(), "runs that did not ask say that nothing was taken");
}

#[test]
fn the_fast_path_has_promises_of_its_own() {
    let results = results_of_samples(&[
        sample("vxlan", "ping-busy", "p50_us", 100.0),
        sample("weft", "ping-busy", "p50_us", 6000.0),
        sample("weft-fast", "ping-busy", "p50_us", 140.0),
        sample("vxlan", "tcp1", "out_of_order_per_gb", 0.0),
        sample("weft-fast", "tcp1", "out_of_order_per_gb", 0.0),
        sample("vxlan", "tcp1", "retransmits_per_gb", 0.0),
        sample("weft-fast", "tcp1", "retransmits_per_gb", 0.5),
        sample("vxlan", "tcp4", "gbps", 10.0),
        sample("weft", "tcp4", "gbps", 8.0),
        sample("weft-fast", "tcp4", "gbps", 9.4),
    ]);
    let fast = |metric: &str| verdicts(&results["fast_promises"], metric);
    let only = |verdict: &str| vec![("weft-fast".to_owned(), verdict.to_owned())];
    assert_eq!(fast("busy_p50"), only("pass"), "140 is below 1.5 × 100");
    assert_eq!(fast("tcp4"), only("FAIL"), "9.4 is below 0.95 × 10");
    assert_eq!(fast("out_of_order_tcp1"), only("pass"), "none is no worse than none");
    assert_eq!(fast("retransmits_tcp1"), only("FAIL"), "some are worse than none");
    assert_eq!(fast("bulk_p99"), only("not measured"));
    let workers = verdicts(&results["promises"], "tcp4");
    assert!(workers.iter().all(|(plane, _)| plane == "weft"), "{workers:?}");
    assert!(!workers.is_empty() && verdicts(&results["promises"], "busy_p50").is_empty());
    let without = results_of_samples(&[sample("weft", "tcp4", "gbps", 8.0)]);
    assert_eq!(without.get("fast_promises"), None, "a run without it promises nothing of it");
}

#[test]
fn weaknesses_are_listed_per_direction() {
    let results = results_of_samples(&[
        sample("vxlan", "ping", "p50_us", 20.0),
        sample("weft", "ping", "p50_us", 25.0),
        sample("vxlan", "udp64", "kpps", 100.0),
        sample("weft", "udp64", "kpps", 99.0),
        sample("vxlan", "tcp4", "gbps", 10.0),
        sample("weft", "tcp4", "gbps", 5.0),
        serde_json::json!({"link": "pass", "plane": "weft", "workload": "rr", "failed": true}),
    ]);
    let behind = results["behind"].as_array().expect("behind is a list");
    let metrics: Vec<_> = behind.iter().map(|item| item["metric"].as_str()).collect();
    assert_eq!(metrics, [Some("tcp4"), Some("ping_p50")], "1 % of udp64 is no difference");
    let row = &results["summary"].as_array().expect("summary is a list")[1];
    assert_eq!((&row["rr_p50"]["failed"], &row["failed"]), (&true.into(), &1.into()));
}
