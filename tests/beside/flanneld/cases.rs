//! `tests/pure/golden/cases.txt` says what flanneld makes of each input; here flanneld is asked.

use std::collections::BTreeSet;
use std::time::Duration;

use rustix::process::Signal;

use crate::site::{CONFIG, Daemon, STOP, SUBNETS, Site};
use crate::support::lab::{Process, wait_until};
use crate::table::{Case, cases};

use Daemon::Flanneld;

/// Until flanneld has told what it makes of an input.
const TOLD: Duration = Duration::from_secs(10);

fn cases_of(kind: &str) -> Vec<Case> {
    cases().into_iter().filter(|case| case.kind == kind).collect()
}

/// Whether `actual` is what the case says of flanneld, where it leaves something open.
fn objection(case: &Case, actual: &str) -> Option<String> {
    let Case { line, given, flanneld, .. } = case;
    let right = match flanneld.strip_suffix("...") {
        Some(beginning) => actual.starts_with(beginning),
        None => actual == flanneld,
    };
    (!right)
        .then(|| format!("cases.txt:{line}: {given}\n  written  {flanneld}\n  flanneld {actual}"))
}

#[track_caller]
fn report(objections: Vec<String>, held: usize) {
    println!("{held} cases held, {} are otherwise", objections.len());
    assert!(objections.is_empty(), "flanneld does otherwise:\n{}", objections.join("\n"));
}

/// The text of a klog line.
fn message(line: &str) -> &str {
    let is_header = line.starts_with(['I', 'W', 'E', 'F']) && line.contains(".go:");
    if is_header { line.split_once("] ").map_or(line, |(_, text)| text) } else { line }
}

#[test]
fn the_command_line_and_the_environment() {
    let site = Site::with_backend("udp");
    // The Kubernetes manager is asked elsewhere, and the detail of the log is not in the record.
    let left_out = |case: &Case| {
        case.given.contains("-kube-subnet-mgr") || case.flanneld.contains("verbosity: ")
    };
    let cases: Vec<_> = cases_of("run").into_iter().filter(|case| !left_out(case)).collect();
    let held = cases.len();
    let objections = cases.iter().filter_map(|case| objection(case, &run(&site, case))).collect();
    report(objections, held);
}

fn run(site: &Site, case: &Case) -> String {
    let is_variable = |word: &&str| word.starts_with(|c: char| c.is_ascii_uppercase());
    let words: Vec<_> = case.given.split(' ').collect();
    let variables = words.iter().copied().take_while(is_variable).count();
    let usual = site.arguments(0);
    let wants_iface = !case.given.to_lowercase().contains("iface");
    let usual = usual.iter().filter(|word| wants_iface || !word.starts_with("--iface"));
    let program = Flanneld.program();
    let mut argv = vec!["env"];
    argv.extend(&words[..variables]);
    argv.push(&program);
    argv.extend(usual.map(String::as_str));
    argv.extend(&words[variables..]);
    let mut process = site.host(0).spawn(&argv);
    let ends = case.flanneld.starts_with("exit ");
    wait_until(TOLD, "flanneld ends or goes on", || {
        process.ended().is_some() || (!ends && process.output().contains("Installing signal"))
    });
    let log = process.output();
    if let Some(status) = process.ended().filter(|_| ends) {
        return ended(status.code(), &log, &program, &case.flanneld);
    }
    process.stop(Signal::KILL, STOP);
    let record = log.split("CLI flags config: ").nth(1).unwrap_or_default();
    let warns = log.lines().any(|line| line.starts_with('E') && line.contains("from env"));
    let asked = case.flanneld.split(", ").nth(1).unwrap_or_default();
    let field = asked.split(':').next().unwrap_or_default();
    let warning = if warns { " with a warning" } else { "" };
    format!("runs{warning}, {field}: {}", told(record, field))
}

fn ended(code: Option<i32>, log: &str, program: &str, written: &str) -> String {
    let code = code.map_or_else(|| "a signal".to_owned(), |code| code.to_string());
    let log = log.replace(program, "<program>");
    if log.contains("\npanic: ") || log.contains("panic.go") {
        return format!("exit {code}: panic");
    }
    if written.ends_with(": <version>") {
        return format!("exit {code}: <version>");
    }
    let lines: Vec<_> = log.lines().filter(|line| !line.contains("CLI flags config")).collect();
    let usage = lines.iter().skip(1).any(|line| line.starts_with("Usage:"));
    let wanted = written.split_once(": ").map_or("", |(_, text)| text).trim_end_matches("...");
    let found = lines.iter().map(|line| message(line)).find(|text| text.starts_with(wanted));
    let first = found.unwrap_or_else(|| message(lines.first().copied().unwrap_or_default()));
    format!("exit {code}: {first}{}", if usage { " + usage" } else { "" })
}

/// A field of flanneld's record of its options, in weftd's words.
fn told(record: &str, field: &str) -> String {
    let value = |name: &str| {
        let rest = record.split_once(&format!("{name}:")).map_or("", |(_, rest)| rest);
        let end = if rest.starts_with('[') { rest.find(']').map(|end| end + 1) } else { None };
        let end = end.or_else(|| rest.find([' ', '}'])).unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    let list = |name: &str, quote: fn(&str) -> String| {
        let text = value(name);
        let words = text.trim_matches(['[', ']']).split(' ').filter(|word| !word.is_empty());
        format!("[{}]", words.map(quote).collect::<Vec<_>>().join(", "))
    };
    let some =
        |text: String| if text.is_empty() { "None".to_owned() } else { format!("Some({text})") };
    let certificates = [value("etcdCertfile"), value("etcdKeyfile")].concat();
    match field {
        "masquerade" => value("ipMasq"),
        "forward" => value("iptablesForwardRules"),
        "resync" => format!("{}s", value("iptablesResyncSeconds")),
        "renew_margin" => {
            let minutes: u64 = value("subnetLeaseRenewMargin").parse().unwrap_or_default();
            format!("{}s", minutes * 60)
        }
        "public_ip" => some(value("publicIP")),
        "interfaces" => list("iface", |word| format!("{word:?}")),
        "regexes" => list("ifaceRegex", |word| format!("Regex({word:?})")),
        "health" => format!("Some({}:{})", value("healthzIP"), value("healthzPort")),
        "subnet_file" => format!("{:?}", value("subnetFile")),
        "endpoints" => {
            let text = value("etcdEndpoints");
            format!("{:?}", text.split(',').collect::<Vec<_>>())
        }
        // What it does not use is no credential, though it is in the record: half of a pair.
        "credentials" => some(value("etcdPassword")),
        "client_certificate" if value("etcdKeyfile").is_empty() => "None".to_owned(),
        "client_certificate" => some(certificates),
        "ca_file" if value("etcdKeyfile").is_empty() => "None".to_owned(),
        "ca_file" => some(value("etcdCAFile")),
        other => format!("flanneld's record has no {other}"),
    }
}

#[test]
fn the_network_configuration() {
    let site = Site::with_backend("udp");
    let left_out =
        |case: &Case| ["\"IPv6", "EnableNFTables"].iter().any(|key| case.given.contains(key));
    let cases: Vec<_> = cases_of("config").into_iter().filter(|case| !left_out(case)).collect();
    let held = cases.len();
    let objections =
        cases.iter().filter_map(|case| objection(case, &config(&site, case))).collect();
    report(objections, held);
}

fn config(site: &Site, case: &Case) -> String {
    site.forget();
    site.put(CONFIG, &case.given);
    let mut process = site.spawn(0, Flanneld, &["--iptables-forward-rules=false"]);
    wait_until(TOLD, "flanneld tells what it makes of the configuration", || {
        let log = process.output();
        let done = log.contains("Running backend") || log.contains("Couldn't fetch");
        done || process.ended().is_some()
    });
    let code = process.ended().and_then(|status| status.code());
    let env = site.subnet_env(0).unwrap_or_default();
    process.stop(Signal::KILL, STOP);
    let log = process.output();
    let text = |phrase: &str| {
        let line = log.lines().map(message).find(|line| line.starts_with(phrase));
        line.map(|line| line[phrase.len()..].trim().to_owned())
    };
    if let Some(why) =
        text("Couldn't fetch network config: ").or_else(|| text("Error fetching backend: "))
    {
        return format!("refused: {why}");
    }
    if log.contains("none defined stack") {
        return format!("exit {}, no family is enabled", code.unwrap_or_default());
    }
    let kind = text("Found network config - Backend type: ").unwrap_or_default().to_lowercase();
    let Some(range) = text("Picking subnet in range ") else { return log };
    let (min, max) = range.split_once(" ... ").unwrap_or_default();
    let of = |key: &str| env.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    // Without a subnet there is no file: then network and length are taken as written.
    let written = case.flanneld.split(" from ").next().unwrap_or_default().to_owned();
    let network = match of("FLANNEL_NETWORK=") {
        "" => written,
        network => {
            let length = of("FLANNEL_SUBNET=").rsplit('/').next().unwrap_or_default();
            format!("{network} in /{length}")
        }
    };
    format!("{network} from {min} to {max} by {kind}")
}

/// The subnets that flanneld takes as peers' when it finds them in the store.
fn peers(site: &Site, last: &str) -> (Process, BTreeSet<String>) {
    let (process, _) = site.start(0, Flanneld, &["--iptables-forward-rules=false"]);
    site.put(&format!("{SUBNETS}/{}", last.replace('/', "-")), r#"{"PublicIP":"192.0.2.99"}"#);
    let end = format!("Subnet added: {last}");
    wait_until(TOLD, "flanneld has read all leases", || process.output().contains(&end));
    let log = process.output();
    let added = log.lines().filter_map(|line| line.split("Subnet added: ").nth(1));
    let added = added.map(|subnet| subnet.trim().to_owned()).collect();
    (process, added)
}

#[test]
fn keys_of_leases() {
    let site = Site::with_backend("udp");
    let cases = cases_of("key");
    for case in &cases {
        site.put(&format!("{SUBNETS}/{}", case.given), r#"{"PublicIP":"192.0.2.7"}"#);
    }
    let (process, added) = peers(&site, "10.5.250.0/24");
    let objections = cases.iter().filter_map(|case| {
        let subnet = case.flanneld.split(',').next().unwrap_or_default();
        let right = match subnet {
            "none" => !added.contains(&case.given.replace('-', "/")),
            subnet => added.contains(subnet),
        };
        (!right).then(|| format!("{}: not {}: {added:?}", case.given, case.flanneld))
    });
    report(objections.collect(), cases.len());
    site.stop(process);
}

#[test]
fn values_of_leases() {
    let site = Site::with_backend("udp");
    let cases = cases_of("value");
    for (index, case) in cases.iter().enumerate() {
        site.put(&format!("{SUBNETS}/10.5.{}.0-24", 100 + index), &case.given);
    }
    let (process, added) = peers(&site, "10.5.250.0/24");
    let objections = cases.iter().enumerate().filter_map(|(index, case)| {
        let taken = added.contains(&format!("10.5.{}.0/24", 100 + index));
        let right = taken == (case.flanneld != "no lease");
        (!right).then(|| format!("{}: written {}, taken: {taken}", case.given, case.flanneld))
    });
    report(objections.collect(), cases.len());
    site.stop(process);
}

#[test]
fn subnet_env_read_back() {
    let site = Site::with_backend("udp");
    let cases = cases_of("previous");
    let objections = cases.iter().filter_map(|case| {
        site.forget();
        std::fs::create_dir_all(site.dir(0)).unwrap();
        let text = case.given.replace(';', "\n");
        std::fs::write(site.dir(0).join("subnet.env"), text).unwrap();
        let mut process = site.spawn(0, Flanneld, &["--iptables-forward-rules=false"]);
        const PREVIOUS: &str = "with Previous Subnet: ";
        wait_until(TOLD, "flanneld tells its previous subnet", || {
            process.ended().is_some() || process.output().contains(PREVIOUS)
        });
        process.stop(Signal::KILL, STOP);
        let log = process.output();
        let told = log.split(PREVIOUS).nth(1).and_then(|rest| rest.lines().next());
        let told =
            told.map_or("ended before it told", |told| if told == "None" { "none" } else { told });
        let written = case.flanneld.split(' ').nth(1).unwrap_or_default();
        (told != written).then(|| format!("{}: written {written}, flanneld {told}", case.given))
    });
    report(objections.collect(), cases.len());
}
