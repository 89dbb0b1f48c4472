//! Metrics and alert rules, as Prometheus' own tool sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use weft::backend_kind::BackendKind;
use weft::status::PeerState;

use super::{deploy, text, tool};
use crate::support::lab::wait_until;
use crate::support::overlay::{CONFIG, Overlay};

fn promtool(words: &[&str], input: &str) -> Output {
    let mut promtool = Command::new(tool("promtool"))
        .args(words)
        .current_dir(deploy("prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is fetched by scripts/setup --test");
    promtool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    promtool.wait_with_output().unwrap()
}

#[track_caller]
fn assert_content(output: &Output) {
    let said = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
fn alert_rules_fire_when_they_should() {
    assert_content(&promtool(&["check", "rules", "alerts.yml"], ""));
    assert_content(&promtool(&["test", "rules", "alerts_test.yml"], ""));
}

fn page(name: &str) -> String {
    std::fs::read_to_string(format!("{}/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Each metric that `text` names is in the table of docs/operations.md, which is compared with the
/// code.
#[track_caller]
fn assert_metrics_exist(text: &str) {
    let operations = page("docs/operations.md");
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let metrics: BTreeSet<_> = words.filter(|word| word.starts_with("flannel_")).collect();
    for metric in metrics {
        let metric = metric.trim_end_matches("_bucket");
        assert!(operations.contains(&format!("| `{metric}` |")), "there is no metric {metric}");
    }
}

#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let text = text("prometheus/dashboard.json");
    assert_metrics_exist(&text);
    let dashboard: Value = serde_json::from_str(&text).expect("Grafana imports JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut rules = "groups: [{name: dashboard, rules: [".to_owned();
    let (mut ids, mut places) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64()), "two panels have the id {}", panel["id"]);
        let place = &panel["gridPos"];
        assert!(places.insert((place["y"].as_u64(), place["x"].as_u64())), "{panel}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().expect("an expression");
            assert!(expression.contains("$instance"), "not of the nodes chosen: {expression}");
            let plain = expression.replace("$__rate_interval", "5m").replace("$instance", ".*");
            rules += &format!("{{record: 'a:b', expr: {}}},", Value::from(plain));
        }
    }
    assert!(ids.len() > 20, "{} panels", ids.len());
    let file = tempfile::NamedTempFile::new().expect("a file for the rules");
    std::fs::write(file.path(), rules + "]}]\n").expect("it can be written");
    let path = file.path().display().to_string();
    let output = promtool(&["check", "rules", "--lint=none", &path], "");
    assert_content(&output);
}

#[test]
fn alert_rules_ask_for_metrics_and_pages_that_exist() {
    let rules = text("prometheus/alerts.yml");
    assert_metrics_exist(&rules);
    for line in rules.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: ")) {
        let (name, section) = line.trim_matches('"').split_once('#').unwrap_or((line, ""));
        let anchor = |heading: &str| heading.to_lowercase().replace(' ', "-").replace(',', "");
        let text = page(name.trim_matches('"'));
        let mut headings = text.lines().filter_map(|line| line.strip_prefix("## ")).map(anchor);
        assert!(section.is_empty() || headings.any(|heading| heading == section), "{line}");
    }
}

/// The labels of each metric in a scrape, and those that Prometheus adds.
type Exported = BTreeMap<String, BTreeSet<String>>;

/// What follows each `name=` or `name=~` and the like in braces.
fn labels(text: &str) -> Vec<(String, String)> {
    let each = text.trim_matches(['{', '}']).split("\",");
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let value = value.trim_matches(['~', '"']);
        Some((name.trim_end_matches('!').trim().to_owned(), value.to_owned()))
    };
    each.filter_map(pair).collect()
}

/// Adds what one node exports.
fn add_exported(exported: &mut Exported, metrics: &str) {
    for line in metrics.lines() {
        let of_type = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '));
        let name = of_type.map_or(line, |(name, _)| name);
        let name = name.split(['{', ' ']).next().unwrap_or_default();
        if name.is_empty() || line.starts_with("# HELP") {
            continue;
        }
        let found = exported.entry(name.to_owned()).or_default();
        let braces = line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}'));
        let own = braces.map(|(braces, _)| labels(braces)).unwrap_or_default();
        found.extend(own.into_iter().map(|(name, _)| name));
    }
}

/// Each metric in an expression is exported by some backend, with the labels that are asked for,
/// and each state and backend is one that there is.
#[track_caller]
fn assert_exported(exported: &Exported, expression: &str) {
    let mut known: BTreeSet<_> = ["instance", "job"].map(str::to_owned).into();
    let words = expression.match_indices("flannel_").map(|(at, _)| &expression[at..]);
    for word in words {
        let end = word.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (metric, rest) = word.split_at(end.unwrap_or(word.len()));
        let has = exported.get(metric).unwrap_or_else(|| panic!("nobody exports {metric}"));
        known.extend(has.iter().cloned());
        let braces = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        for (name, value) in braces.map(|(braces, _)| labels(braces)).unwrap_or_default() {
            // One without samples here shows no labels.
            let is_there = has.is_empty() || has.contains(&name);
            assert!(is_there || name == "instance", "{metric} has no {name}: {expression}");
            for value in value.split('|') {
                let text = Value::from(value);
                let is_one = match name.as_str() {
                    "state" => serde_json::from_value(text).ok() != Some(PeerState::Unknown),
                    "backend" => serde_json::from_value::<BackendKind>(text).is_ok(),
                    _ => true,
                };
                assert!(is_one, "there is no {name} {value}: {expression}");
            }
        }
    }
    for (_, list) in
        expression.match_indices(" by (").map(|(at, by)| expression.split_at(at + by.len()))
    {
        for name in list.split(')').next().unwrap_or_default().split(", ") {
            assert!(known.contains(name), "nothing has the label {name}: {expression}");
        }
    }
}

#[test]
fn dashboard_and_alerts_ask_for_what_nodes_export() {
    let mut exported = Exported::new();
    for (backend, flags) in [("udp", &["--guard"][..]), ("vxlan", &["--ip-masq"]), ("host-gw", &[])]
    {
        let config =
            format!("{{\"Network\":\"10.5.0.0/16\",\"Backend\":{{\"Type\":\"{backend}\"}}}}");
        let overlay = Overlay::start_with(&config, [flags, flags]);
        let socket = overlay.dir(0).join("weft.sock").display().to_string();
        let words = [env!("CARGO_BIN_EXE_weft"), "metrics", "--socket", &socket];
        wait_until(Duration::from_secs(10), "the peer's state is exported", || {
            let metrics = overlay.lab.hosts[0].exec(&words);
            add_exported(&mut exported, &metrics);
            let info = format!("flannel_dataplane_info{{backend=\"{backend}\"");
            metrics.contains("flannel_peers_by_state{") && metrics.contains(&info)
        });
    }
    let dashboard: Value = serde_json::from_str(&text("prometheus/dashboard.json")).unwrap();
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_exported(&exported, target["expr"].as_str().unwrap());
        }
    }
    let alerts = text("prometheus/alerts.yml");
    for alert in alerts.split("- alert:").skip(1) {
        let expression = alert.split_once("expr:").and_then(|(_, rest)| rest.split_once("labels:"));
        assert_exported(&exported, expression.unwrap().0);
    }
}

#[test]
fn metrics_are_as_prometheus_wants_them() {
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8286);
    let flag = format!("--metrics-address={address}");
    let overlay = Overlay::start_with(
        CONFIG,
        [&[flag.as_str(), "--fast-path=off", "--guard", "--engine=mmsg"], &[]],
    );
    let scrape = || {
        overlay.lab.hosts[0].enter(|| {
            let mut stream = TcpStream::connect(address).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: weft\r\n\r\n").ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            let (head, body) = answer.split_once("\r\n\r\n")?;
            (head.starts_with("HTTP/1.1 200") && head.contains("version=0.0.4"))
                .then(|| body.to_owned())
        })
    };
    let mut metrics = String::new();
    wait_until(Duration::from_secs(10), "/metrics answers on its address", || {
        metrics = scrape().unwrap_or_default();
        metrics.contains("\nflannel_worker_cpu_seconds_total{worker=\"0\"} ")
            && metrics.contains("\nflannel_guard_in_place 1\n")
    });
    let info = ["backend=\"udp\"", "engine=\"mmsg\"", "interface=\"wire0\"", "device=\"flannel0\""];
    let info = format!("flannel_dataplane_info{{{}}} 1", info.join(","));
    for sample in [
        info.as_str(),
        "flannel_ready 1",
        "flannel_dataplane_up 1",
        "flannel_dataplane_hindered 0",
        "flannel_mtu_bytes 1472",
        "flannel_peers_by_state{state=\"idle\"} 1",
        "flannel_fast_path_off{why=\"switched-off\"} 1",
        "flannel_guard_dropped_packets_total{from=\"stranger\"} 0",
    ] {
        assert!(metrics.contains(&format!("\n{sample}\n")), "no {sample}: {metrics}");
    }
    let status = overlay.status(0).0;
    for counters in ["egress", "ingress", "worker"] {
        let all = status[counters].as_object().expect("counters");
        for name in all.iter().filter(|(_, value)| value.is_u64()).map(|(name, _)| name) {
            assert!(metrics.contains(&format!("\nflannel_{name}_total")), "{name} is in JSON only");
        }
    }
    assert_content(&promtool(&["check", "metrics"], &metrics));
}
