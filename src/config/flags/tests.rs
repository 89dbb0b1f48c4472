//! Tests of the whole path from arguments and variables to options.

mod stores;

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::config::options::{EngineChoice, EtcdOptions, OffloadChoice, RuleOptions, StoreOptions};

const EVERY_OFFLOAD: OffloadChoice =
    OffloadChoice { tso: true, uso: true, gso: true, gro: true, automatic: true };
const NO_OFFLOAD: OffloadChoice =
    OffloadChoice { tso: false, uso: false, gso: false, gro: false, automatic: false };

fn outcome(words: &[&str], variables: &[(&str, &str)]) -> Outcome {
    let arguments = std::iter::once("flanneld").chain(words.iter().copied()).map(OsString::from);
    parse(arguments, &|name| {
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    })
}

fn run_with(words: &[&str], variables: &[(&str, &str)]) -> (Options, Vec<String>) {
    let outcome = outcome(words, variables);
    let Outcome::Run(options, warnings) = outcome else {
        panic!("{words:?} {variables:?} gave {outcome:?}");
    };
    (*options, warnings)
}

fn run(words: &[&str]) -> Options {
    let (options, warnings) = run_with(words, &[]);
    assert!(warnings.is_empty(), "{words:?} warned: {warnings:?}");
    options
}

fn refused(words: &[&str], variables: &[(&str, &str)]) -> (String, bool) {
    let outcome = outcome(words, variables);
    let Outcome::End(text, code @ 1..) = outcome else {
        panic!("{words:?} {variables:?} gave {outcome:?}");
    };
    let lines: Vec<_> = text.lines().collect();
    let hint = if code == EXIT_USAGE { &["Try 'weftd --help'."][..] } else { &[] };
    assert!(text.ends_with('\n') && lines[1..] == *hint, "more than one line: {text:?}");
    (lines[0].to_owned(), code == EXIT_USAGE)
}

#[track_caller]
fn assert_refused(words: &[&str], phrase: &str) {
    let (message, usage) = refused(words, &[]);
    assert!(message.contains(phrase), "{words:?}: {message:?} lacks {phrase:?}");
    assert!(!usage, "{words:?} is well-formed, so it is no usage error");
}

fn etcd_of(options: Options) -> EtcdOptions {
    match options.store {
        StoreOptions::Etcd(etcd) => etcd,
        StoreOptions::Local(directory) => panic!("local store {}", directory.display()),
        StoreOptions::Kube(kube) => panic!("Kubernetes {kube:?}"),
    }
}

#[test]
fn a_refused_url_is_shown_without_its_secrets() {
    for url in ["http://a:1/?token=s3cret", "http://u:s3cret@a:1", "a?s3cret", "x://s3cret@a"] {
        for flag in ["--etcd-endpoints", "--kube-api-url"] {
            let words = ["--kube-subnet-mgr", flag, url];
            let (message, _) = refused(&words[usize::from(flag == "--etcd-endpoints")..], &[]);
            assert!(!message.contains("s3cret"), "{flag} {url}: {message}");
        }
    }
}

#[test]
fn defaults_are_flanneld_s() {
    let options = run(&[]);
    assert_eq!(options.subnet_file, PathBuf::from("/run/flannel/subnet.env"));
    assert_eq!(options.status_socket, PathBuf::from("/run/flannel/weft.sock"));
    assert_eq!(options.renew_margin, Duration::from_secs(3600));
    assert_eq!(options.health, None);
    let rules = RuleOptions {
        masquerade: false,
        random_ports: true,
        forward: true,
        blackhole_route: false,
        guard: false,
        resync: Duration::from_secs(5),
    };
    assert_eq!(options.rules, rules);
    assert_eq!(options.dataplane.engine, EngineChoice::Auto);
    assert_eq!(options.dataplane.workers, None);
    assert_eq!(options.dataplane.offload, EVERY_OFFLOAD);
    assert!(!options.log_is_json);
    assert_eq!(options.verbosity, 0);
    assert!(options.interface.interfaces.is_empty() && options.interface.regexes.is_empty());
    assert_eq!((options.interface.can_reach, options.interface.public_ip), (None, None));
    let etcd = etcd_of(options);
    assert_eq!(etcd.endpoints, ["http://127.0.0.1:4001", "http://127.0.0.1:2379"]);
    assert_eq!(etcd.prefix, "/coreos.com/network");
    assert!(etcd.ca_file.is_none() && etcd.client_certificate.is_none());
    assert!(etcd.credentials.is_none());
}

#[test]
fn version_and_help_come_before_environment_and_checks() {
    let bad = [("FLANNELD_HEALTHZ_PORT", "many"), ("FLANNELD_PUBLIC_IP", "x")];
    assert!(matches!(
        outcome(&["--subnet-lease-renew-margin=0", "--version"], &bad),
        Outcome::End(text, 0) if text == concat!(env!("CARGO_PKG_VERSION"), "\n")
    ));
    for word in ["-h", "--help", "-help"] {
        let Outcome::End(text, 0) = outcome(&["--kube-subnet-mgr", word], &bad) else {
            panic!("{word} gave no help");
        };
        assert!(text.starts_with("Usage: flanneld [OPTION]...\n"), "{text}");
    }
    run_with(&["--version=false"], &[("FLANNELD_VERSION", "true")]);
}

#[test]
fn endings_have_text_and_exit_code() {
    let ending = |words: &[&str]| match outcome(words, &[]) {
        Outcome::End(text, code) => (text, code),
        Outcome::Run(..) => panic!("{words:?} runs"),
    };
    assert_eq!(ending(&["-h"]).1, 0);
    let (text, code) = ending(&["--nope"]);
    assert_eq!((text.lines().count(), code), (2, 2), "{text}");
    assert!(text.contains("-nope") && text.contains("--help"), "{text}");
    let (text, code) = ending(&["--public-ip=x"]);
    assert_eq!((text.lines().count(), code), (1, 1));
}

#[test]
fn malformed_command_line_is_one_line_usage_error() {
    for words in [&["--nope\n\x1b[31m=1"][..], &["--v=x"], &["--v"], &["---"], &["--ip-masq=maybe"]]
    {
        let (message, usage) = refused(words, &[]);
        assert!(usage, "{words:?}");
        assert!(!message.chars().any(char::is_control), "{message:?}");
    }
}

#[test]
fn command_line_beats_environment_beats_default() {
    let variables = [
        ("FLANNELD_SUBNET_FILE", "/env/subnet.env"),
        ("FLANNELD_V", "1"),
        ("FLANNELD_IFACE", "eth0,eth1"),
        ("FLANNELD_LOG_FORMAT", "json"),
        ("FLANNELD_LOCAL_STORE", "/env/store"),
    ];
    let (options, warnings) = run_with(&["--subnet-file=/cli/subnet.env"], &variables);
    assert_eq!(options.subnet_file, PathBuf::from("/cli/subnet.env"));
    assert_eq!(options.verbosity, 1);
    assert_eq!(options.interface.interfaces, ["eth0,eth1"]);
    assert!(options.log_is_json);
    assert!(matches!(options.store, StoreOptions::Local(path) if path.as_os_str() == "/env/store"));
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn invalid_variable_warns_and_keeps_default() {
    let (options, warnings) = run_with(&[], &[("FLANNELD_SUBNET_LEASE_RENEW_MARGIN", "soon")]);
    assert_eq!(options.renew_margin, Duration::from_secs(3600));
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("FLANNELD_SUBNET_LEASE_RENEW_MARGIN"), "{warnings:?}");
    let (message, usage) = refused(&[], &[("FLANNELD_SUBNET_LEASE_RENEW_MARGIN", "1440")]);
    assert!(message.contains("Invalid subnet-lease-renew-margin option") && !usage);
}

#[test]
fn the_renew_margin_is_1_to_1439_minutes() {
    for (minutes, accepted) in [("1", 1), ("1439", 1439), ("0x10", 16), ("1_0", 10)] {
        let options = run(&[&format!("--subnet-lease-renew-margin={minutes}")]);
        assert_eq!(options.renew_margin, Duration::from_secs(accepted * 60));
    }
    for minutes in ["0", "-1", "1440", "9223372036854775807", "-9223372036854775808"] {
        let word = format!("--subnet-lease-renew-margin={minutes}");
        assert_refused(&[&word], "Invalid subnet-lease-renew-margin option");
    }
}

#[test]
fn address_is_followed_by_default() {
    assert!(run(&[]).follow_address);
    assert!(run(&["--follow-address"]).follow_address);
    assert!(!run(&["--follow-address=false"]).follow_address);
}

#[test]
fn the_stale_hold_is_a_duration_of_go() {
    assert_eq!(run(&[]).stale_hold, Duration::from_secs(900));
    assert_eq!(run(&["--stale-hold=1h30m"]).stale_hold, Duration::from_secs(5400));
    assert_eq!(run(&["--stale-hold", "0"]).stale_hold, Duration::ZERO);
    for wrong in ["", "15", "-15m", "soon"] {
        assert_refused(&[&format!("--stale-hold={wrong}")], "--stale-hold");
    }
}

#[test]
fn start_from_cache_is_on_by_default() {
    assert!(run(&[]).start_from_cache);
    assert!(run(&["--start-from-cache"]).start_from_cache);
    assert!(!run(&["--start-from-cache=false"]).start_from_cache);
}

#[test]
fn interface_options() {
    let options = run(&[
        "--iface=eth0",
        "--iface=192.0.2.1",
        "--iface-regex=^eth",
        "--iface-can-reach=2001:db8::1",
        "--public-ip=198.51.100.7",
    ]);
    assert_eq!(options.interface.interfaces, ["eth0", "192.0.2.1"]);
    assert_eq!(options.interface.regexes[0].as_str(), "^eth");
    assert_eq!(options.interface.can_reach.unwrap().to_string(), "2001:db8::1");
    assert_eq!(options.interface.public_ip.unwrap().to_string(), "198.51.100.7");
    let public_ipv6 = |text: &str| run(&[&format!("--public-ipv6={text}")]).interface.public_ipv6;
    assert_eq!(public_ipv6("2001:db8::1"), "2001:db8::1".parse().ok());
    assert_eq!(public_ipv6(""), None);
    for address in ["192.0.2.1", "::", "::1", "ff02::1", "::ffff:192.0.2.1", "x"] {
        assert_refused(&[&format!("--public-ipv6={address}")], "invalid public IPv6 address");
    }
    let mapped = run(&["--public-ip=::ffff:198.51.100.7"]);
    assert_eq!(mapped.interface.public_ip, options.interface.public_ip);
    let texts = ["x", "2001:db8::1", "1.2.3", "1.2.3.4/24", "01.2.3.4"];
    for address in texts.into_iter().chain(["0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.1"]) {
        assert_refused(&[&format!("--public-ip={address}")], "invalid public IP address");
    }
    assert_refused(&["--iface-can-reach=example.org"], "--iface-can-reach");
    assert_refused(&["--iface-regex=("], "--iface-regex");
    // The default interface, as in flannel's manifests whose variable is empty.
    assert_eq!(run(&["--iface="]).interface.interfaces, [""]);
}

#[test]
fn health_is_off_at_port_zero() {
    let address = |words: &[&str]| run(words).health;
    assert_eq!(address(&["--healthz-ip=::1"]), None);
    let all: SocketAddr = "0.0.0.0:8080".parse().unwrap();
    assert_eq!(address(&["--healthz-port=8080"]), Some(all));
    assert_eq!(address(&["--healthz-port=8080", "--healthz-ip="]), Some(all));
    let six = "[::1]:65535".parse().unwrap();
    assert_eq!(address(&["--healthz-port=65535", "--healthz-ip=::1"]), Some(six));
    assert_refused(&["--healthz-port=65536"], "--healthz-port");
    assert_refused(&["--healthz-port=-1"], "--healthz-port");
    assert_refused(&["--healthz-ip=localhost"], "--healthz-ip");
}

#[test]
fn unbuilt_features_refuse_and_name_what_is_missing() {
    for (word, flag) in
        [("--vmodule=a=1", "--vmodule"), ("--log_backtrace_at=a.go:1", "--log_backtrace_at")]
    {
        assert_refused(&[word], flag);
    }
    let (message, _) = refused(&[], &[("FLANNELD_VMODULE", "a=1")]);
    assert!(message.contains("remove FLANNELD_VMODULE"), "{message}");
}

#[test]
fn unbuilt_features_switched_off_are_fine() {
    let options = run(&[
        "--kube-subnet-mgr=false",
        "--ip-masq=false",
        "--ip-blackhole-route=false",
        "--iptables-forward-rules=false",
        "--public-ipv6=",
        "--vmodule=",
        "--log_backtrace_at=",
        "--iptables-resync=5",
        "--set-node-network-unavailable=true",
    ]);
    let rules = options.rules;
    assert!(!rules.masquerade && !rules.blackhole_route && !rules.forward, "{rules:?}");
}

#[test]
fn rules_are_as_flanneld_s_flags_say() {
    assert!(run(&["--ip-masq"]).rules.masquerade);
    assert!(run(&["--ip-blackhole-route=t"]).rules.blackhole_route);
    assert!(run(&["--iptables-forward-rules"]).rules.forward);
    assert!(!run(&["--iptables-forward-rules=false"]).rules.forward);
    assert!(!run(&["--ip-masq-fully-random-disable"]).rules.random_ports);
    assert_eq!(run(&["--iptables-resync=9"]).rules.resync, Duration::from_secs(9));
    for period in ["0", "-5"] {
        assert_refused(&["--iptables-resync", period], "--iptables-resync");
    }
}

#[test]
fn flags_of_unbuilt_feature_warn_once() {
    for (word, feature) in [
        ("--kube-api-url=https://k", "--kube-subnet-mgr"),
        ("--kubeconfig-file=/k", "--kube-subnet-mgr"),
        ("--kube-annotation-prefix=example.org", "--kube-subnet-mgr"),
        ("--net-config-path=/n", "--kube-subnet-mgr"),
        ("--set-node-network-unavailable=false", "--kube-subnet-mgr"),
    ] {
        let (_, warnings) = run_with(&[word], &[]);
        assert_eq!(warnings.len(), 1, "{word}: {warnings:?}");
        let flag = word.split('=').next().unwrap();
        assert!(warnings[0].starts_with(flag) && warnings[0].contains(feature), "{warnings:?}");
    }
}

#[test]
fn own_flags() {
    assert_eq!(run(&["--engine=mmsg"]).dataplane.engine, EngineChoice::Mmsg);
    assert_eq!(run(&["--engine=io_uring"]).dataplane.engine, EngineChoice::IoUring);
    assert_eq!(run(&["--offload=none"]).dataplane.offload, NO_OFFLOAD);
    let some = OffloadChoice { tso: true, gro: true, ..NO_OFFLOAD };
    assert_eq!(run(&["--offload=gro,tso"]).dataplane.offload, some);
    assert!(run(&["--log-format", "json"]).log_is_json);
    assert_refused(&["--engine=fast"], "--engine");
    assert_refused(&["--engine="], "--engine");
    for list in ["", "tso,", "all", "auto,tso", "TSO", "none,gro"] {
        assert_refused(&["--offload", list], "--offload");
    }
    assert_eq!(run(&["--workers=auto"]).dataplane.workers, None);
    for count in [1, 2, 256] {
        let workers = run(&["--workers", &count.to_string()]).dataplane.workers;
        assert_eq!(workers, NonZeroU16::new(count));
    }
    for count in ["0", "257", "70000", "-1", "two", "", "1,2", "0x2"] {
        assert_refused(&["--workers", count], "--workers");
    }
    assert_refused(&["--log-format=xml"], "--log-format");
    assert_refused(&["--peer-check=none"], "--peer-check");
}

#[test]
fn verbosity_is_clamped() {
    for (text, verbosity) in [("-3", 0), ("0", 0), ("6", 6), ("1000", 255)] {
        assert_eq!(run(&["-v", text]).verbosity, verbosity);
    }
}

#[test]
fn the_status_socket_lies_beside_the_subnet_file() {
    for (subnet_file, socket) in [
        ("/run/flannel/subnet.env", "/run/flannel/weft.sock"),
        ("subnet.env", "weft.sock"),
        ("/run/b.env", "/run/b.weft.sock"),
        ("/run/second", "/run/second.weft.sock"),
        ("/run/.env", "/run/.env.weft.sock"),
    ] {
        let options = run(&["--subnet-file", subnet_file]);
        assert_eq!(options.status_socket, PathBuf::from(socket));
    }
    let explicit = run(&["--status-socket=/run/x.sock"]).status_socket;
    assert_eq!(explicit, PathBuf::from("/run/x.sock"));
    let fits = format!("/{}", "s".repeat(101));
    assert_eq!(run(&["--status-socket", &fits]).status_socket, PathBuf::from(&fits));
    assert_refused(&["--status-socket", &format!("{fits}s")], "--status-socket");
    for path in ["", "/", "/run/", "..", "/run/a\0b"] {
        assert_refused(&["--subnet-file", path], "--subnet-file");
    }
}

proptest! {
    #[test]
    fn any_flag_value_runs_or_gives_one_line(
        index in 0..crate::config::flag_table::FLAGS.len(),
        value in "\\PC{0,12}|[0-9a-f:.x_-]{0,10}|https?://.{0,8}",
        from_environment: bool,
    ) {
        let name = crate::config::flag_table::FLAGS[index].name;
        let variable = format!("FLANNELD_{}", name.to_uppercase().replace('-', "_"));
        let outcome = if from_environment {
            outcome(&[], &[(&variable, &value)])
        } else {
            outcome(&[&format!("--{name}={value}")], &[])
        };
        if let Outcome::End(text, 1..) = outcome {
            let first = text.lines().next().unwrap_or_default();
            prop_assert!(!first.is_empty() && !first.chars().any(char::is_control));
        }
    }
}
