//! `weft`, the operator's tool: reads a running daemon's status socket and prints it.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::control::clock::{format_go_duration, format_rfc3339, unix_seconds};
use crate::daemon::cleanup::Cleanup;
use crate::daemon::install;
use crate::daemon::status::fetch_unix;

const SOCKET_DEFAULT: &str = "/run/flannel/weft.sock";

const USAGE: &str = "Usage: weft status [--socket PATH] [-o json]
       weft metrics [--socket PATH]
       weft cleanup [--subnet-file PATH]
       weft install-conf FILE PLACE
       weft version

status   lease, peers, dataplane, and every dropped packet by reason
metrics  the same counters in Prometheus text format
cleanup  removes what weftd and flanneld have left on this host: devices, routes, filters, rules,
         subnet.env and its cache; stop them first
install-conf  copies a JSON file to its place, which holds the old one or the new one at any time;
              also what weft does under the name install-conf

--socket PATH  the daemon's --status-socket (default /run/flannel/weft.sock)
-o json        the whole status as one JSON object
--subnet-file PATH  the daemon's (default /run/flannel/subnet.env)

Exit code of status: 0 ready, 1 running but not ready, 2 not reachable or misused.
";

/// Exit code for a daemon that runs but isn't ready.
const EXIT_DEGRADED: u8 = 1;
/// Exit code for no answer, and for misuse.
const EXIT_FAILED: u8 = 2;

/// A second name of the tool, under which it does this one thing: where flannel's image has a
/// program of this name.
const INSTALL_CONF: &str = "install-conf";

/// Runs the tool on its arguments, its own name first.
pub fn main(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let name = arguments.next().map(PathBuf::from).unwrap_or_default();
    let implied = name.file_name().is_some_and(|name| name == INSTALL_CONF);
    let arguments = implied.then(|| INSTALL_CONF.to_owned()).into_iter().chain(arguments);
    match run(arguments) {
        Ok((text, code)) => {
            // A reader that went away, such as `head`, has what it wanted.
            io::stdout().write_all(text.as_bytes()).ok();
            code
        }
        Err(error) => {
            writeln!(io::stderr(), "weft: {error:#}").ok();
            ExitCode::from(EXIT_FAILED)
        }
    }
}

fn run(arguments: impl Iterator<Item = String>) -> anyhow::Result<(String, ExitCode)> {
    let request = Request::parse(arguments)?;
    let fetch = |target| fetch_unix(&request.socket, target);
    match request.command {
        Command::Help => Ok((USAGE.to_owned(), ExitCode::SUCCESS)),
        Command::Cleanup(cleanup) => Ok((cleanup.run()?, ExitCode::SUCCESS)),
        Command::InstallConf(copy) => Ok((copy.run()?, ExitCode::SUCCESS)),
        Command::Version => Ok((format!("{}\n", env!("CARGO_PKG_VERSION")), ExitCode::SUCCESS)),
        Command::Metrics => {
            Ok((String::from_utf8_lossy(&fetch("/metrics")?).into_owned(), ExitCode::SUCCESS))
        }
        Command::Status { json } => {
            let bytes = fetch("/status")?;
            let status: Value = serde_json::from_slice(&bytes)
                .context("weftd answered something else than JSON")?;
            let text = if json { format!("{status:#}\n") } else { render(&status, unix_seconds()) };
            let ready = status["ready"].as_bool().unwrap_or(false);
            Ok((text, if ready { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DEGRADED) }))
        }
    }
}

enum Command {
    Help,
    Version,
    Cleanup(Cleanup),
    InstallConf(install::Copy),
    Metrics,
    Status { json: bool },
}

struct Request {
    command: Command,
    socket: PathBuf,
}

impl Request {
    fn parse(mut arguments: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut socket = PathBuf::from(SOCKET_DEFAULT);
        let mut command = match arguments.next().as_deref() {
            None | Some("-h" | "--help" | "help") => Command::Help,
            Some(INSTALL_CONF) => Command::InstallConf(install::Copy::parse(arguments.by_ref())?),
            Some("cleanup") => Command::Cleanup(Cleanup::default()),
            Some("version" | "--version") => Command::Version,
            Some("metrics") => Command::Metrics,
            Some("status") => Command::Status { json: false },
            Some(other) => bail!("unknown command {other:?}; `weft help` lists them"),
        };
        while let Some(argument) = arguments.next() {
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let mut value = || {
                inline
                    .clone()
                    .or_else(|| arguments.next())
                    .with_context(|| format!("{name} needs a value"))
            };
            match (name.as_str(), &mut command) {
                ("-h" | "--help", _) => command = Command::Help,
                ("--socket", _) => socket = PathBuf::from(value()?),
                ("--subnet-file", Command::Cleanup(cleanup)) => {
                    cleanup.subnet_file = PathBuf::from(value()?);
                }
                ("-o" | "--output", Command::Status { json }) => match value()?.as_str() {
                    "json" => *json = true,
                    other => bail!("unknown output {other:?}; there is json"),
                },
                _ => bail!("unknown argument {name:?}; `weft help` lists them"),
            }
        }
        Ok(Self { command, socket })
    }
}

/// What the store is like, and what it refuses.
fn store_lines(store: &Value) -> Vec<(&'static str, String)> {
    let up = if store["up"] == true { "up" } else { "down" };
    let failures = store["failures"].as_u64().unwrap_or_default();
    let others = store["written_by_others"].as_u64().filter(|times| *times > 0);
    let others = others.map(|times| format!(", our lease written by others {times} times"));
    let others = others.unwrap_or_default();
    let mut lines = vec![("store", format!("{up}, {failures} failures{others}"))];
    if let Some(holder) = store["duplicate_public_ip"].as_str() {
        let text = format!("this node's PublicIP belongs to {holder}; the log says more");
        lines.push(("duplicate", text));
    }
    if let Some(why) = store["refused"].as_str() {
        lines.push(("refused", why.to_owned()));
    }
    lines
}

/// The status for people: one screen, drops last and in full.
fn render(status: &Value, now_unix: u64) -> String {
    let mut out = render_verdict(&status["verdict"], now_unix);
    let text = |value: &Value| {
        let plain = value.as_str().map(str::to_owned);
        plain.unwrap_or_else(|| if value.is_null() { "-".to_owned() } else { value.to_string() })
    };
    let mut line = |name: &str, value: String| writeln!(out, "{name:<10} {value}").ok();
    line("weftd", text(&status["version"]));
    for (name, value) in store_lines(&status["store"]) {
        line(name, value);
    }
    if let Some(as_of) = status["stale_as_of_unix"].as_u64() {
        let time = format_rfc3339(as_of);
        line("stale", format!("lease and peers are from the cache of {time}, not confirmed yet"));
    }
    if status["store"]["subnet_refused"] == true {
        let other = text(&status["store"]["refused_subnet"]);
        line("refused", format!("the cluster assigned {other} to this node; the log says more"));
    }
    if status["restart_needed"] == true {
        let advice = "the old one stays in use; restart weftd and then the pods of this host";
        line("restart", format!("the store has another network configuration; {advice}"));
    }
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
    if status["backend"]["kind"].as_str().is_some_and(|kind| kind != "udp") {
        line("backend", render_backend(&status["backend"]));
    }
    if let Some(drops) = render_device_drops(status) {
        line("devices", drops);
    }
    line("peers", format!("{}{}", text(&status["peers"]), render_held(status)));
    for route in status["routes"].as_array().into_iter().flatten() {
        let failed = route["failed_sends"].as_u64().filter(|failed| *failed > 0);
        let failed = failed.map(|failed| format!(", {failed} packets could not be sent"));
        let (subnet, via) = (text(&route["subnet"]), text(&route["via"]));
        line("", format!("{subnet} via {via}{}", failed.unwrap_or_default()));
    }
    for direction in ["egress", "ingress"] {
        let counters = &status[direction];
        if counters.is_object() {
            line(direction, render_direction(counters));
        }
    }
    let workers = status["workers"].as_array().map_or(&[][..], Vec::as_slice);
    // A single worker's counters are the totals above.
    for worker in workers.iter().filter(|_| workers.len() > 1) {
        line(&format!("worker {}", text(&worker["index"])), render_worker(worker));
    }
    out
}

/// The first line: ready or not, for how long, and the worst of what is wrong; the rest below it.
fn render_verdict(verdict: &Value, now_unix: u64) -> String {
    let state = match verdict["state"].as_str() {
        Some("ready") => "ready",
        Some("degraded") => "DEGRADED",
        _ => "NOT READY",
    };
    let since = verdict["since_unix"].as_u64().unwrap_or(now_unix);
    let age = Duration::from_secs(now_unix.saturating_sub(since));
    let causes = verdict["causes"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let causes: Vec<_> = causes.collect();
    let ready_for = if state == "DEGRADED" { "ready for " } else { "" };
    let mut lines = format!("{state} {ready_for}{}", format_go_duration(age));
    if !causes.is_empty() {
        write!(lines, ": {}", causes.join("\n           ")).ok();
    }
    lines + "\n"
}

/// Behind the number of peers.
fn render_held(status: &Value) -> String {
    let held = status["peers_held"].as_u64().filter(|held| *held > 0);
    let held = held.map(|held| {
        format!(", {held} of them in their grace period: their leases vanished from the store")
    });
    held.unwrap_or_default()
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

    fn parse(words: &[&str]) -> anyhow::Result<Request> {
        Request::parse(words.iter().map(|word| (*word).to_owned()))
    }

    fn rendered(status: &Value) -> String {
        render(status, NOW)
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
    fn both_value_forms_parse_unknown_words_are_named() {
        assert_eq!(parse(&["status", "--socket", "/x"]).unwrap().socket, PathBuf::from("/x"));
        assert_eq!(parse(&["metrics", "--socket=/x"]).unwrap().socket, PathBuf::from("/x"));
        let json = parse(&["status", "-o", "json"]).unwrap();
        assert!(matches!(json.command, Command::Status { json: true }));
        for words in
            [&["fly"][..], &["status", "--what"], &["status", "-o", "yaml"], &["status", "-o"]]
        {
            assert!(parse(words).is_err(), "{words:?} was accepted");
        }
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
    fn status_marks_cached_state_until_confirmed() {
        let screen = |as_of: Option<u64>| {
            rendered(&json!({ "ready": true, "stale": as_of.is_some(), "stale_as_of_unix": as_of }))
        };
        let text = screen(Some(951_868_799));
        assert!(text.contains("stale      lease and peers are from the cache"), "{text}");
        assert!(text.contains("2000-02-29T23:59:59Z"), "{text}");
        assert!(!screen(None).contains("stale"), "{}", screen(None));
        let text = rendered(&json!({ "ready": true, "restart_needed": true }));
        assert!(text.contains("restart    the store has another network configuration"), "{text}");
        assert!(!screen(None).contains("restart"), "{}", screen(None));
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
    fn status_shows_failed_sends_of_peer() {
        let route = |failed: u64| {
            let (subnet, via) = ("10.5.3.0/24", "192.0.2.3:8285");
            rendered(
                &json!({ "routes": [{ "subnet": subnet, "via": via, "failed_sends": failed }] }),
            )
        };
        let told = "10.5.3.0/24 via 192.0.2.3:8285, 7 packets could not be sent";
        assert!(route(7).contains(told), "{}", route(7));
        assert!(!route(0).contains("could not"), "{}", route(0));
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
        assert!(screen(7).contains("9, 7 of them in their grace period"), "{}", screen(7));
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
    fn status_shows_duplicate_public_ip() {
        let screen =
            |holder: Value| rendered(&json!({ "store": { "duplicate_public_ip": holder } }));
        let shown = screen("node \"b\"".into());
        assert!(shown.contains("duplicate  this node's PublicIP belongs to node \"b\""), "{shown}");
        assert!(!screen(Value::Null).contains("duplicate"));
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
