//! `weft check` on hosts that are well, before a start and beside a daemon. Hosts with one thing
//! wrong are in `faults`.

use std::net::UdpSocket;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use super::support::lab::{LEASE_TIMEOUT, Lab, Namespace, UNDERLAY, wait_until};
use super::support::overlay::{CONFIG, Overlay};

/// What depends on the machine that runs the tests and on nothing that they do.
const OF_THE_MACHINE: [&str; 4] = ["cap-bpf", "conntrack-table", "io-uring", "open-files"];

/// What `weft check` says of a host, whose files are in `dir`.
pub(super) fn check(host: &Namespace, dir: &Path, more: &[&str]) -> Output {
    let socket = dir.join("weft.sock").display().to_string();
    let subnet_file = dir.join("subnet.env").display().to_string();
    let mut words = vec![env!("CARGO_BIN_EXE_weft"), "check", "--socket", &socket];
    words.extend(["--subnet-file", &subnet_file]);
    words.extend(more);
    host.command(&words).output().expect("weft runs")
}

/// The checks that are neither ok nor skipped, as (id, verdict, evidence), and the exit code.
fn found(
    host: &Namespace,
    dir: &Path,
    more: &[&str],
) -> (Vec<(String, String, String)>, Option<i32>) {
    let output = check(host, dir, &[&["-o", "json"], more].concat());
    let answer: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(answer["schema"], weft::status::SCHEMA);
    let checks = answer["checks"].as_array().expect("checks");
    assert!(checks.len() >= 25);
    let text = |check: &Value, name: &str| check[name].as_str().unwrap_or_default().to_owned();
    let mut found = Vec::new();
    for check in checks {
        let [id, verdict, evidence] = ["id", "verdict", "evidence"].map(|name| text(check, name));
        assert!(!evidence.is_empty(), "{check}");
        let is_wrong = matches!(verdict.as_str(), "warning" | "failed");
        assert_eq!(check["cure"].is_string(), is_wrong, "{check}");
        if is_wrong && !OF_THE_MACHINE.contains(&id.as_str()) {
            found.push((id, verdict, evidence));
        }
    }
    (found, output.status.code())
}

#[track_caller]
fn assert_well(host: &Namespace, dir: &Path, more: &[&str], what: &str) {
    let (found, code) = found(host, dir, more);
    assert!(found.is_empty(), "{what}: {found:?}");
    assert_eq!(code, Some(0), "{what}");
}

/// Waits until a daemon has settled: its rules, and the other host as a peer.
fn wait_until_ready(overlay: &Overlay, host: usize) {
    wait_until(LEASE_TIMEOUT, "the daemon is ready and its peer set up", || {
        let status = overlay.status(host).0;
        let states = status["peer_states"].as_object().cloned().unwrap_or_default();
        let is_set_up = states.keys().all(|state| ["idle", "ok", "set-up"].contains(&&**state));
        status["verdict"]["state"] == "ready" && !states.is_empty() && is_set_up
    });
}

/// What a host has: devices, addresses, routes, rules and settings, without counts.
fn state(host: &Namespace) -> String {
    let commands: [&[&str]; 5] = [
        &["ls", "/sys/class/net"],
        &["ip", "-4", "-o", "address"],
        &["ip", "-4", "route", "show", "table", "all"],
        &["nft", "-s", "list", "ruleset"],
        &["sysctl", "-a", "--pattern", "^net.ipv4.(conf|ip_forward)"],
    ];
    commands.iter().map(|command| host.exec(command)).collect()
}

#[test]
fn a_healthy_host_has_no_alarm_and_is_left_as_it_was() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let lab = Lab::two_hosts();
    let more = ["--iface", "wire0"];
    let before = state(&lab.hosts[0]);
    assert_well(&lab.hosts[0], directory.path(), &more, "before the start");
    assert_eq!(state(&lab.hosts[0]), before, "a check changes nothing");
    assert_eq!(directory.path().read_dir().expect("it is there").count(), 0);
    drop(lab);
    for config in [
        CONFIG,
        r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#,
        r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#,
    ] {
        let mut overlay = Overlay::start_with(config, [&[], &["--ip-masq", "--guard"]]);
        for host in 0..2 {
            wait_until_ready(&overlay, host);
            let before = state(&overlay.lab.hosts[host]);
            assert_well(&overlay.lab.hosts[host], &overlay.dir(host), &[], config);
            assert_eq!(state(&overlay.lab.hosts[host]), before, "a check changes nothing");
        }
        let screen = check(&overlay.lab.hosts[0], &overlay.dir(0), &["-v"]);
        let screen = String::from_utf8_lossy(&screen.stdout).into_owned();
        assert!(screen.contains("ok      daemon-answers: weftd"), "{screen}");
        let last = screen.lines().last().unwrap_or_default();
        assert!(last.contains(" checks: ") && !last.contains("failed"), "{screen}");

        overlay.daemons.remove(0);
        // The kernel may close a killed daemon's socket a moment later.
        wait_until(LEASE_TIMEOUT, "after kill -9 its status socket is left, nothing else", || {
            let (found, _) = found(&overlay.lab.hosts[0], &overlay.dir(0), &more);
            found.iter().map(|(id, ..)| id.as_str()).eq(["daemon-answers"])
        });
    }
}

#[test]
fn before_a_start_a_taken_port_and_an_interface_that_is_not_there_are_found() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let lab = Lab::two_hosts();
    let address = (UNDERLAY[0], 8285);
    let socket = lab.hosts[0].enter(|| UdpSocket::bind(address).expect("the port is free"));
    let (wrong, code) = found(&lab.hosts[0], directory.path(), &["--iface", "wire0"]);
    let pid = format!("(pid {})", std::process::id());
    assert_eq!((wrong.len(), code), (1, Some(1)), "{wrong:?}");
    assert_eq!(wrong[0].0, "tunnel-port");
    assert!(wrong[0].2.contains("8285") && wrong[0].2.contains(&pid), "{wrong:?}");
    assert_well(&lab.hosts[0], directory.path(), &["--iface=wire0", "--port=8286"], "elsewhere");
    drop(socket);
    let (wrong, code) = found(&lab.hosts[0], directory.path(), &["--iface", "eth9"]);
    let ids: Vec<_> = wrong.iter().map(|(id, ..)| id.as_str()).collect();
    assert_eq!((ids, code), (vec!["external-interface"], Some(1)), "{wrong:?}");
    drop(UnixListener::bind(directory.path().join("weft.sock")).expect("a socket to leave"));
    let (wrong, code) = found(&lab.hosts[0], directory.path(), &["--iface", "wire0"]);
    let ids: Vec<_> = wrong.iter().map(|(id, ..)| id.as_str()).collect();
    assert_eq!((ids, code), (vec!["daemon-answers"], Some(1)), "{wrong:?}");
    let misuse = check(&lab.hosts[0], directory.path(), &["--port=0"]);
    assert_eq!(misuse.status.code(), Some(2));
}

#[test]
fn a_bridge_that_serves_no_pod_fails_the_check() {
    let overlay = Overlay::start();
    wait_until_ready(&overlay, 0);
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "link", "delete", "pod0"]);
    host.exec(&["ip", "link", "add", "cni0", "type", "bridge"]);
    for (breaks, says) in [("down", "is down"), ("up", "has no address")] {
        host.exec(&["ip", "link", "set", "cni0", breaks]);
        let (wrong, code) = found(host, &overlay.dir(0), &[]);
        let bridge = wrong.iter().find(|(id, ..)| id == "pod-bridge").map(|(.., text)| text);
        assert!(bridge.is_some_and(|text| text.contains(says)), "{says}: {wrong:?}");
        assert_eq!(code, Some(1), "{says}: {wrong:?}");
    }
}

#[test]
fn a_daemon_in_another_network_is_not_taken_for_this_hosts() {
    let overlay = Overlay::start();
    wait_until_ready(&overlay, 0);
    let (outside, _) = found(&overlay.lab.hosts[1], &overlay.dir(0), &[]);
    let (id, _, evidence) = &outside[0];
    assert!(id == "daemon-answers" && evidence.contains("another network"), "{outside:?}");
}
