//! `weft status`: what is wrong, if anything is, and then what is running and what it counted.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use crate::backend_kind::BackendKind;
use crate::control::clock::format_go_duration;
use crate::stats::DropReason;
use crate::tool::advice;
use crate::tool::style::Style;

/// Reasons of drops that come with advice: the screen is for more than these.
const ADVICE_MAX: usize = 3;

/// The status for people: one screen, what is wrong first, counters last.
pub(super) fn render(status: &Value, now_unix: u64, style: Style) -> String {
    let mut out = render_verdict(&status["verdict"], now_unix, style);
    let text = |value: &Value| {
        let plain = value.as_str().map(str::to_owned);
        plain.unwrap_or_else(|| if value.is_null() { "-".to_owned() } else { value.to_string() })
    };
    let mut line = |name: &str, value: String| writeln!(out, "{name:<10} {value}").ok();
    line("weftd", text(&status["version"]));
    line("store", render_store(&status["store"]));
    let lease = &status["lease"];
    if lease.is_object() {
        let (subnet, network) = (text(&lease["subnet"]), text(&lease["network"]));
        line(
            "lease",
            format!("{subnet} of {network}, public address {}", text(&lease["public_ip"])),
        );
        line("dataplane", text(&status["dataplane"]));
    }
    let rules = &status["rules"];
    if rules.is_object() {
        let place =
            if rules["in_place"] == true { "in place" } else { "NOT in place: see the log" };
        let (repairs, failures) = (text(&rules["repairs"]), text(&rules["failures"]));
        let kept_by = text(&rules["kept_by"]);
        line("rules", format!("{kept_by}, {place}; {repairs} repairs, {failures} failures"));
    }
    if status["guard"].is_object() {
        line("guard", render_guard(&status["guard"]));
    }
    if status["backend"]["kind"].as_str().is_some_and(|it| it != BackendKind::Udp.name()) {
        line("backend", render_backend(&status["backend"]));
    }
    if let Some(drops) = render_device_drops(status) {
        line("devices", drops);
    }
    line("peers", render_peers(status));
    if let Some(line_of_fast_path) = render_fast_path(&status["fast_path"]) {
        line("fast path", line_of_fast_path);
    }
    for direction in ["egress", "ingress"] {
        let counters = &status[direction];
        if counters.is_object() {
            line(direction, render_direction(counters));
        }
    }
    for reason in notable_drops(status) {
        line("look at", format!("{}: {}", reason.id(), advice::of(reason)));
    }
    let workers = status["workers"].as_array().map_or(&[][..], Vec::as_slice);
    // A single worker's counters are the totals above.
    for worker in workers.iter().filter(|_| workers.len() > 1) {
        line(&format!("worker {}", text(&worker["index"])), render_worker(worker));
    }
    out
}

/// The first line: ready or not, for how long, and the worst of what is wrong; the rest below it.
fn render_verdict(verdict: &Value, now_unix: u64, style: Style) -> String {
    let (state, shown) = match verdict["state"].as_str() {
        Some("ready") => ("ready", style.good("ready")),
        Some("degraded") => ("DEGRADED", style.doubtful("DEGRADED")),
        _ => ("NOT READY", style.bad("NOT READY")),
    };
    let since = verdict["since_unix"].as_u64().unwrap_or(now_unix);
    let age = Duration::from_secs(now_unix.saturating_sub(since));
    let causes = verdict["causes"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let causes: Vec<_> = causes.collect();
    let ready_for = if state == "DEGRADED" { "ready for " } else { "" };
    let mut lines = format!("{shown} {ready_for}{}", format_go_duration(age));
    if !causes.is_empty() {
        write!(lines, ": {}", causes.join("\n           ")).ok();
    }
    lines + "\n"
}

fn render_store(store: &Value) -> String {
    let up = if store["up"] == true { "up" } else { "down" };
    let failures = store["failures"].as_u64().unwrap_or_default();
    let others = store["written_by_others"].as_u64().filter(|times| *times > 0);
    let others = others.map(|times| format!(", our lease written by others {times} times"));
    let rejected = store["rejected"].as_object().filter(|rejected| !rejected.is_empty());
    let rejected = rejected.map(|rejected| {
        let each = rejected.iter().map(|(why, count)| format!("{why} {count}"));
        format!(", entries ignored so far: {}", each.collect::<Vec<_>>().join(", "))
    });
    let (others, rejected) = (others.unwrap_or_default(), rejected.unwrap_or_default());
    format!("{up}, {failures} failures{others}{rejected}")
}

/// How many there are, and how they are.
fn render_peers(status: &Value) -> String {
    let mut text = status["peers"].as_u64().unwrap_or_default().to_string();
    let states = status["peer_states"].as_object().filter(|states| !states.is_empty());
    if let Some(states) = states {
        let each = states.iter().map(|(state, count)| match state.as_str() {
            "silent" => format!("{count} SILENT"),
            state => format!("{count} {state}"),
        });
        write!(text, ": {} (`weft peers`)", each.collect::<Vec<_>>().join(", ")).ok();
    }
    if let Some(held) = status["peers_held"].as_u64().filter(|held| *held > 0) {
        write!(text, "; {held} in their grace period: their leases vanished from the store").ok();
    }
    if let Some(narrow) = status["narrow_paths"].as_u64().filter(|narrow| *narrow > 0) {
        let mtu_bytes = status["lease"]["mtu_bytes"].as_u64().unwrap_or_default();
        write!(text, "; the paths to {narrow} take less than the MTU of {mtu_bytes}").ok();
    }
    text
}

/// What the guard of the tunnel's port lets in, and what it kept out.
fn render_guard(guard: &Value) -> String {
    let place = if guard["in_place"] == true { "in place" } else { "NOT kept: see the log" };
    let [port, peers, strangers, pods] =
        ["port", "peers", "dropped_from_strangers", "dropped_from_pods"].map(|name| &guard[name]);
    format!(
        "UDP port {port} for {peers} peers, {place}; dropped {strangers} packets of strangers, \
         {pods} of pods"
    )
}

/// Nothing where the backend has none.
fn render_fast_path(fast_path: &Value) -> Option<String> {
    let number = |name: &str| fast_path[name].as_u64().unwrap_or(0);
    match fast_path["on"].as_bool()? {
        true => Some(format!(
            "on, for {} peers: {} packets out, {} in",
            number("peers"),
            number("packets_sent"),
            number("packets_received"),
        )),
        false => Some(format!("off: {}", fast_path["reason"].as_str().unwrap_or("-"))),
    }
}

/// What the kernel dropped at the overlay's own devices; the external interface has other traffic.
fn render_device_drops(status: &Value) -> Option<String> {
    let each = status["device_drops"].as_object()?.iter();
    let own = each.filter(|(device, _)| Some(device.as_str()) != status["interface"].as_str());
    let texts = own.flat_map(|(device, drops)| {
        [("egress", "out"), ("ingress", "in")].map(|(name, way)| {
            let count = drops[name].as_u64().filter(|count| *count > 0)?;
            Some(format!("{device} {count} on the way {way}"))
        })
    });
    let texts: Vec<_> = texts.flatten().collect();
    (!texts.is_empty()).then(|| format!("dropped by the kernel: {}", texts.join(", ")))
}

/// A backend whose packets weftd never sees.
fn render_backend(backend: &Value) -> String {
    let number = |name: &str| backend[name].as_u64().unwrap_or(0);
    format!(
        "{}: {} peers set up, {} not; {} leases of other backends, {} unusable; {} failures, {} \
         repairs",
        backend["kind"].as_str().unwrap_or("-"),
        number("peers_programmed"),
        number("peers_failed"),
        number("leases_ignored"),
        number("leases_unusable"),
        number("failures"),
        number("repairs"),
    )
}

/// Reasons for which packets were dropped that a person may have to look at, the most frequent
/// first.
fn notable_drops(status: &Value) -> Vec<DropReason> {
    let count = |reason: DropReason| {
        let of = |direction: &str| status[direction]["drops"][reason.id()].as_u64().unwrap_or(0);
        of("egress") + of("ingress")
    };
    let notable = DropReason::ALL.iter().filter(|reason| !advice::is_normal(**reason));
    let mut counted: Vec<_> = notable.map(|reason| (count(*reason), *reason)).collect();
    counted.retain(|(count, _)| *count > 0);
    counted.sort_by_key(|(count, reason)| (Reverse(*count), *reason));
    counted.into_iter().take(ADVICE_MAX).map(|(_, reason)| reason).collect()
}

fn render_worker(worker: &Value) -> String {
    let number = |direction: &str, name: &str| worker[direction][name].as_u64().unwrap_or(0);
    let drops = |direction: &str| {
        let drops = worker[direction]["drops"].as_object();
        drops.map_or(0, |drops| drops.values().filter_map(Value::as_u64).sum::<u64>())
    };
    let place = worker["processor"].as_u64().map(|processor| format!(" on processor {processor}"));
    format!(
        "{}{}: {} packets out, {} in, {} dropped",
        worker["engine"].as_str().unwrap_or("-"),
        place.unwrap_or_default(),
        number("egress", "packets_forwarded"),
        number("ingress", "packets_forwarded"),
        drops("egress") + drops("ingress"),
    )
}

fn render_direction(counters: &Value) -> String {
    let number = |name: &str| counters[name].as_u64().unwrap_or(0);
    let mut text = format!(
        "{} packets, {} bytes forwarded in {} writes",
        number("packets_forwarded"),
        number("bytes_forwarded"),
        number("writes")
    );
    match counters["drops"].as_object().filter(|drops| !drops.is_empty()) {
        None => text.push_str("; nothing dropped"),
        Some(drops) => {
            text.push_str("; dropped:");
            for (reason, count) in drops {
                write!(text, " {reason} {count}").ok();
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NOW: u64 = 1_795_225_924;

    fn rendered(status: &Value) -> String {
        render(status, NOW, Style::PLAIN)
    }

    #[test]
    fn the_first_line_is_a_verdict() {
        let first = |state: &str, causes: &[&str]| {
            let since = NOW - 252;
            let verdict = json!({ "state": state, "since_unix": since, "causes": causes });
            rendered(&json!({ "version": "1", "verdict": verdict }))
        };
        assert!(first("ready", &[]).starts_with("ready 4m12s\nweftd      1\n"));
        let text = first("not-ready", &["no subnet: connection refused, 21 tries in 4m12s"]);
        assert!(text.starts_with("NOT READY 4m12s: no subnet: connection refused, 21"), "{text}");
        let text = first("degraded", &["one", "two"]);
        assert!(text.starts_with("DEGRADED ready for 4m12s: one\n           two\nweftd"), "{text}");
    }

    #[test]
    fn status_shows_drops_by_reason() {
        let status = json!({
            "version": "1", "ready": true, "peers": 1, "store": { "up": true, "failures": 0 },
            "egress": { "packets_forwarded": 5, "bytes_forwarded": 9, "writes": 1,
                        "drops": { "no-route": 3 } },
        });
        let screen = rendered(&status);
        assert!(screen.contains("dropped: no-route 3"), "{screen}");
    }

    #[test]
    fn drops_that_need_a_person_come_with_advice() {
        let status = json!({
            "egress": { "drops": { "ipv6": 90, "no-route": 3, "tx-eperm": 2 } },
            "ingress": { "drops": { "no-route": 0, "tx-eperm": 0, "bad-checksum": 9, "runt": 1 } },
        });
        let screen = rendered(&status);
        let advice: Vec<_> = screen.lines().filter(|line| line.starts_with("look at")).collect();
        assert_eq!(advice.len(), ADVICE_MAX, "{screen}");
        let first = "look at    bad-checksum: which host that is not a peer sends";
        assert!(advice[0].starts_with(first), "{screen}");
        assert!(advice[1].starts_with("look at    no-route: the destination pod's host"));
        assert!(!screen.contains("ipv6:"), "{screen}");
    }

    #[test]
    fn status_shows_drops_of_own_devices() {
        let drops = |sent: u64| {
            let own = json!({ "egress": sent, "ingress": 0 });
            let eth0 = json!({ "egress": 0, "ingress": 7 });
            let drops = json!({ "flannel0": own, "eth0": eth0 });
            rendered(&json!({ "interface": "eth0", "device_drops": drops }))
        };
        let line = "devices    dropped by the kernel: flannel0 3 on the way out\n";
        assert!(drops(3).contains(line), "{}", drops(3));
        assert!(!drops(0).contains("devices"), "{}", drops(0));
    }

    #[test]
    fn status_shows_the_guard() {
        let guard = json!({ "port": 8285, "in_place": true, "peers": 2,
            "dropped_from_strangers": 12, "dropped_from_pods": 0 });
        let screen = rendered(&json!({ "guard": guard }));
        let line =
            "guard      UDP port 8285 for 2 peers, in place; dropped 12 packets of strangers";
        assert!(screen.contains(line) && screen.contains(", 0 of pods"), "{screen}");
        assert!(!rendered(&json!({ "guard": null })).contains("guard"));
    }

    #[test]
    fn status_shows_rules() {
        let rules =
            json!({ "kept_by": "nftables", "in_place": false, "repairs": 2, "failures": 3 });
        let screen = rendered(&json!({ "rules": rules }));
        let line = "rules      nftables, NOT in place: see the log; 2 repairs, 3 failures";
        assert!(screen.contains(line), "{screen}");
        assert!(!rendered(&json!({ "rules": null })).contains("rules"));
    }

    #[test]
    fn status_shows_peers_in_grace_period() {
        let screen = |held: u64| rendered(&json!({ "peers": 9, "peers_held": held }));
        assert!(screen(7).contains("9; 7 in their grace period"), "{}", screen(7));
        assert!(!screen(0).contains("grace period"), "{}", screen(0));
    }

    #[test]
    fn status_shows_foreign_writes_of_lease() {
        let screen = |times: u64| {
            rendered(&json!({ "store": { "up": true, "failures": 0, "written_by_others": times } }))
        };
        assert!(screen(2).contains("our lease written by others 2 times"), "{}", screen(2));
        assert!(!screen(0).contains("others"), "{}", screen(0));
    }

    #[test]
    fn peers_are_summed_up() {
        let states = json!({ "idle": 128, "ok": 12, "silent": 1 });
        let screen = rendered(&json!({ "peers": 141, "peer_states": states }));
        let line = "peers      141: 128 idle, 12 ok, 1 SILENT (`weft peers`)\n";
        assert!(screen.contains(line), "{screen}");
        assert!(screen.lines().count() < 10, "the counters are off the screen: {screen}");
        let lease = json!({ "mtu_bytes": 1472 });
        let screen = rendered(&json!({ "peers": 2, "narrow_paths": 1, "lease": lease }));
        assert!(screen.contains("2; the paths to 1 take less than the MTU of 1472\n"), "{screen}");
    }

    #[test]
    fn the_fast_path_says_why_it_is_off() {
        let screen = rendered(&json!({ "fast_path": { "on": false, "reason": "no CAP_BPF" } }));
        assert!(screen.contains("fast path  off: no CAP_BPF\n"), "{screen}");
        assert!(!rendered(&json!({ "version": "1" })).contains("fast path"));
    }

    #[test]
    fn status_lists_workers_only_if_several() {
        let worker = |index: u64| {
            json!({
                "index": index, "engine": "mmsg", "processor": index + 4,
                "egress": { "packets_forwarded": 5 },
                "ingress": { "packets_forwarded": 7, "drops": { "runt": 2 } },
            })
        };
        let screen = |workers: &[Value]| rendered(&json!({ "ready": true, "workers": workers }));
        let both = screen(&[worker(0), worker(1)]);
        let line = "worker 1   mmsg on processor 5: 5 packets out, 7 in, 2 dropped";
        assert!(both.contains(line), "{both}");
        assert!(!screen(&[worker(0)]).contains("worker"));
    }
}
