//! The ipip backend with real traffic between two hosts: what it sets up, what becomes of it when
//! weftd or the device is gone, and what it leaves alone.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::lab::{Lab, Process, wait_until};
use crate::support::overlay::{Overlay, local_store};
use crate::support::probe::{End, Probe};
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

/// Pods get subnets below 10.5.100.0; what lies above is for leases that a test writes.
const IPIP: &str = r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.99.0","Backend":{"Type":"ipip"}}"#;

const ROUTES: &[&str] = &["ip", "route", "show"];

/// A change in the store is in the kernel, and a repair is done, within this time.
const SOON: Duration = Duration::from_secs(20);

/// A fault of a peer is known within this time: the kernels here are slow.
const KNOWN: Duration = Duration::from_secs(120);

/// The end of a process, and a start over a local store.
const STOP: Duration = Duration::from_secs(20);
const START: Duration = Duration::from_secs(60);

/// Writes the lease of a node at `public_ip` under a key such as `10.5.100.0-24`.
fn put(overlay: &Overlay, key: &str, public_ip: &str, backend: &str) {
    let address = format!(r#""PublicIP":"{public_ip}","PublicIPv6":null"#);
    let value = format!(r#"{{{address},"BackendType":"{backend}","BackendData":null}}"#);
    let hidden = overlay.files().join("next");
    std::fs::write(&hidden, value).unwrap();
    std::fs::rename(hidden, overlay.files().join("store/subnets").join(key)).unwrap();
}

fn text(overlay: &Overlay, host: usize, argv: &[&str]) -> String {
    let output = overlay.lab.hosts[host].command(argv).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn wait_for_text(overlay: &Overlay, host: usize, argv: &[&str], words: &str, there: bool) {
    let what = format!("{argv:?} on host {host} has {words:?}: {there}");
    wait_until(SOON, &what, || text(overlay, host, argv).contains(words) == there);
}

/// The tool's text, and its exit code.
fn weft(overlay: &Overlay, host: usize, words: &[&str]) -> (String, Option<i32>) {
    let socket = overlay.dir(host).join("weft.sock").display().to_string();
    let all = [&[env!("CARGO_BIN_EXE_weft")], words, &["--socket", &socket]].concat();
    let mut command: Command = overlay.lab.hosts[host].command(&all);
    let output = command.output().expect("weft runs");
    let texts = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&texts).into_owned(), output.status.code())
}

fn peer_state(overlay: &Overlay, host: usize) -> String {
    let (text, _) = weft(overlay, host, &["peers", "-o", "json"]);
    let peers: Value = serde_json::from_str(&text).unwrap_or_default();
    let peers = peers["peers"].as_array().or_else(|| peers.as_array()).cloned();
    peers.unwrap_or_default().first().map(|peer| peer["state"].to_string()).unwrap_or_default()
}

fn ends(overlay: &Overlay) -> [End<'_>; 2] {
    [0, 1].map(|host| End {
        host: &overlay.lab.hosts[host],
        pod: &overlay.lab.pods[host],
        address: overlay.pod(host),
        dir: overlay.dir(host),
    })
}

#[test]
fn pods_reach_each_other_with_full_packets_both_ways() {
    let overlay = Overlay::start_with(IPIP, [&[], &[]]);
    for (from, to) in [(0, 1), (1, 0)] {
        assert_eq!(overlay.leases[from].mtu_bytes, 1480, "the MTU in subnet.env");
        overlay.traffic_resumes(SOON, "the start");
        for size in [56, 1480 - 28] {
            assert!(
                overlay.lab.ping(from, overlay.pod(to), size),
                "no answer to pings of {size} bytes from pod {from}"
            );
        }
        let (size, to) = ((1481 - 28).to_string(), overlay.pod(to).to_string());
        let too_long = ["ping", "-q", "-c1", "-W1", "-Mdo", "-s", &size, &to];
        assert!(!overlay.lab.pods[from].succeeds(&too_long), "a packet above the MTU");
    }
    let [near, far] = &overlay.lab.pods;
    tcp_transfer(near, far, overlay.pod(1), 4 << 20, false);
    tcp_transfer(near, far, overlay.pod(1), 4 << 20, true);
    for host in 0..2 {
        let device = text(&overlay, host, &["ip", "-d", "link", "show", "flannel.ipip"]);
        let local = format!("local 172.20.0.{} ", host + 1);
        assert!(device.contains("remote any") && device.contains(&local), "{device}");
        assert!(device.contains("mtu 1480"), "{device}");
        let address = format!("inet {}/32", overlay.leases[host].network());
        let addresses = text(&overlay, host, &["ip", "address", "show", "flannel.ipip"]);
        assert!(addresses.contains(&address), "{addresses}");
        let (peer, subnet) = (2 - host, overlay.leases[1 - host].network());
        let route = format!("{subnet}/24 via 172.20.0.{peer} dev flannel.ipip onlink");
        wait_for_text(&overlay, host, ROUTES, &route, true);
        // As flannel writes it: other nodes compare nothing else.
        let key = format!("{}-24", overlay.leases[host].network());
        let lease = std::fs::read_to_string(overlay.files().join("store/subnets").join(key));
        let lease = lease.unwrap();
        assert!(lease.contains(r#""BackendType":"ipip""#), "{lease}");
        assert!(!lease.contains("VtepMAC"), "{lease}");
    }
}

#[test]
fn restarts_cut_no_flow_and_lose_no_packet() {
    let mut overlay = Overlay::start_with(IPIP, [&[], &[]]);
    let device =
        |overlay: &Overlay| text(overlay, 0, &["ip", "-o", "link", "show", "flannel.ipip"]);
    let before = device(&overlay);
    let dirs = [0, 1].map(|host| overlay.dir(host));
    let address = [0, 1].map(|host| overlay.pod(host));
    let store = format!("--local-store={}", overlay.files().join("store").display());
    let Overlay { lab, daemons, .. } = &mut overlay;
    let ends = [0, 1].map(|host| End {
        host: &lab.hosts[host],
        pod: &lab.pods[host],
        address: address[host],
        dir: dirs[host].clone(),
    });
    let ((), report) = Probe::run(&ends, |_| {
        for (host, signal) in [(0, Signal::KILL), (1, Signal::TERM)] {
            daemons[host].stop(signal, STOP);
            daemons[host] = lab.weftd(host, &dirs[host], &[&store]);
            wait_until(START, "the daemon is back with its peer", || {
                Status::try_of(&dirs[host])
                    .is_some_and(|status| status.0["ready"] == true && status.routes() == 1)
            });
        }
    });
    println!("{report}");
    report.assert_nothing_lost("a restart of weftd");
    assert_eq!(device(&overlay), before, "the device was made again by a restart");
}

#[test]
fn a_deleted_device_comes_back_with_every_peer() {
    const PEERS: u16 = 50;
    let overlay = Overlay::start_with(IPIP, [&[], &[]]);
    for number in 0..PEERS {
        let host = format!("172.20.1.{number}");
        put(&overlay, &format!("10.5.{}.0-24", 100 + number), &host, "ipip");
    }
    let routes = || {
        let text = text(&overlay, 0, &["ip", "route", "show", "dev", "flannel.ipip"]);
        let mut all: Vec<String> = text.lines().map(str::to_owned).collect();
        all.sort();
        all
    };
    let all = usize::from(PEERS) + 1;
    wait_until(START, "all peers are set up", || routes().len() == all);
    let before = routes();
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "link", "delete", "flannel.ipip"]);
    let took = overlay.traffic_resumes(SOON, "the device was deleted");
    println!("traffic again {took:?} after the device was deleted");
    wait_until(SOON, "all peers are set up again", || routes() == before);
    wait_until(SOON, "the operator is told", || overlay.daemons[0].complaints("was deleted") > 0);
    host.exec(&["ip", "link", "set", "flannel.ipip", "down"]);
    let took = overlay.traffic_resumes(SOON, "the device was switched off");
    println!("traffic again {took:?} after the device was switched off");
    wait_until(SOON, "all peers are set up again", || routes() == before);
}

#[test]
fn peers_come_and_go_and_others_are_left_alone() {
    let overlay = Overlay::start_with(IPIP, [&[], &[]]);
    let host = &overlay.lab.hosts[0];
    let foreign = "10.5.200.0/24 via 172.20.0.2 dev wire0 metric 7";
    host.exec(&[&["ip", "route", "add"], &foreign.split(' ').collect::<Vec<_>>()[..]].concat());
    let ours = "10.5.100.0/24 via 172.20.1.7 dev flannel.ipip onlink";
    let ((), report) = Probe::run(&ends(&overlay), |_| {
        put(&overlay, "10.5.101.0-24", "172.20.1.8", "vxlan");
        put(&overlay, "10.5.100.0-24", "172.20.1.7", "ipip");
        wait_for_text(&overlay, 0, ROUTES, ours, true);
        // It moves.
        put(&overlay, "10.5.100.0-24", "172.20.1.9", "ipip");
        wait_for_text(&overlay, 0, ROUTES, &ours.replace("1.7", "1.9"), true);
        wait_for_text(&overlay, 0, ROUTES, ours, false);
        std::fs::remove_file(overlay.files().join("store/subnets/10.5.100.0-24")).unwrap();
        wait_for_text(&overlay, 0, ROUTES, "10.5.100.0/24", false);
    });
    println!("{report}");
    report.assert_nothing_lost("a peer that came and went");
    let routes = text(&overlay, 0, ROUTES);
    assert!(!routes.contains("10.5.101.0"), "a node of vxlan has a route: {routes}");
    assert!(routes.contains("10.5.200.0/24 via 172.20.0.2"), "a foreign route is gone: {routes}");
    let status = overlay.status(0);
    let counts = ["peers_programmed", "leases_ignored"].map(|it| status.0["backend"][it].clone());
    assert_eq!(counts, [1, 1], "{}", status.0);
}

/// Starts one weftd beside a device of its own's name, which `made` makes.
fn beside(made: &[&str]) -> (Lab, Process, tempfile::TempDir) {
    let files = tempfile::tempdir().unwrap();
    let store = local_store(files.path(), IPIP);
    let lab = Lab::two_hosts();
    lab.hosts[0].exec(&[&["ip", "link", "add", "flannel.ipip"], made].concat());
    let daemon = lab.weftd(0, &files.path().join("h0"), &[&store]);
    (lab, daemon, files)
}

#[test]
fn a_device_of_another_type_is_refused_and_left() {
    let (lab, mut daemon, files) = beside(&["type", "bridge"]);
    let status = daemon.wait(START);
    assert_eq!(status.code(), Some(1), "{}", daemon.output());
    assert!(daemon.complaints("flannel.ipip") > 0, "{}", daemon.output());
    let device = lab.hosts[0].exec(&["ip", "-d", "link", "show", "flannel.ipip"]);
    assert!(device.contains("bridge"), "somebody's device is gone: {device}");
    let leases = std::fs::read_dir(files.path().join("store/subnets")).unwrap().count();
    assert_eq!(leases, 0, "a lease was taken for nothing");
}

#[test]
fn a_device_with_other_ends_is_made_again() {
    for made in [
        ["type", "ipip", "local", "172.20.0.9", "remote", "any"],
        ["type", "ipip", "local", "172.20.0.1", "remote", "172.20.0.2"],
    ] {
        let (lab, daemon, files) = beside(&made);
        let dir = files.path().join("h0");
        wait_until(START, "weftd is ready", || is_ready(&dir));
        let device = lab.hosts[0].exec(&["ip", "-d", "link", "show", "flannel.ipip"]);
        assert!(device.contains("local 172.20.0.1 "), "{made:?}: {device}");
        assert!(device.contains("remote any"), "{made:?}: {device}");
        assert_eq!(daemon.complaints(" again"), 1, "{}", daemon.output());
    }
}

fn is_ready(dir: &Path) -> bool {
    Status::try_of(dir).is_some_and(|status| status.0["ready"] == true)
}

#[test]
fn a_device_that_takes_the_place_is_named_and_blocks_readiness() {
    let overlay = Overlay::start_with(IPIP, [&[], &[]]);
    overlay.traffic_resumes(SOON, "the start");
    wait_until(SOON, "the node is ready", || is_ready(&overlay.dir(0)));
    // In one go, before weftd puts its device back; again if weftd was faster.
    let batch = overlay.files().join("batch");
    std::fs::write(&batch, "link delete flannel.ipip\nlink add flannel.ipip type bridge\n")
        .unwrap();
    let swap = ["ip", "-batch", batch.to_str().unwrap()];
    wait_until(SOON, "another device takes the place", || overlay.lab.hosts[0].succeeds(&swap));
    wait_until(SOON, "the operator is told what is in the way", || {
        overlay.daemons[0].complaints("flannel.ipip") > 0
    });
    wait_until(SOON, "nobody is told that pods can talk", || !is_ready(&overlay.dir(0)));
    overlay.lab.hosts[0].exec(&["ip", "link", "delete", "flannel.ipip"]);
    overlay.traffic_resumes(SOON, "the other device is gone");
    wait_until(SOON, "the node is ready again", || is_ready(&overlay.dir(0)));
}

#[test]
fn direct_routing_tunnels_only_across_routers() {
    let config = IPIP.replace(r#""ipip""#, r#""ipip","DirectRouting":true"#);
    let overlay = Overlay::start_with(&config, [&[], &[]]);
    let route = format!("{}/24 via 172.20.0.2 dev wire0", overlay.leases[1].network());
    wait_for_text(&overlay, 0, ROUTES, &route, true);
    overlay.traffic_resumes(SOON, "a start with direct routing");
    overlay.lab.hosts[0].exec(&["ip", "route", "add", "192.0.2.0/24", "via", "172.20.0.2"]);
    put(&overlay, "10.5.100.0-24", "192.0.2.9", "ipip");
    let route = "10.5.100.0/24 via 192.0.2.9 dev flannel.ipip onlink";
    wait_for_text(&overlay, 0, ROUTES, route, true);
}

#[test]
fn address_and_mtu_are_followed() {
    let by_name: &[&str] = &["--iface=wire0"];
    let overlay = Overlay::start_with(IPIP, [by_name, by_name]);
    overlay.traffic_resumes(SOON, "the start");
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"]);
    host.exec(&["ip", "address", "add", "172.20.0.11/24", "dev", "wire0"]);
    wait_for_text(&overlay, 1, ROUTES, "via 172.20.0.11 dev flannel.ipip", true);
    overlay.traffic_resumes(SOON, "the address changed");
    let device = &["ip", "-d", "link", "show", "flannel.ipip"];
    wait_for_text(&overlay, 0, device, "local 172.20.0.11 ", true);
    for (below, own) in [("1400", "mtu 1380"), ("1500", "mtu 1480")] {
        host.exec(&["ip", "link", "set", "wire0", "mtu", below]);
        wait_for_text(&overlay, 0, device, own, true);
    }
    // Somebody's own is corrected once the interface's changes, not before.
    let file = overlay.dir(0).join("subnet.env");
    wait_until(SOON, "subnet.env follows", || {
        std::fs::read_to_string(&file).is_ok_and(|text| text.contains("FLANNEL_MTU=1480"))
    });
}

#[test]
fn the_tool_tells_a_well_peer_from_a_broken_one() {
    let mut overlay = Overlay::start_with(IPIP, [&[], &[]]);
    overlay.traffic_resumes(SOON, "the start");
    wait_until(KNOWN, "the peer is well", || peer_state(&overlay, 0) == r#""ok""#);
    let pod = overlay.pod(1).to_string();
    let (said, code) = weft(&overlay, 0, &["ping", &pod]);
    assert_eq!(code, Some(0), "{said}");
    let (said, _) = weft(&overlay, 0, &["status"]);
    assert!(said.contains("flannel.ipip mtu 1480 over wire0"), "{said}");
    let own = overlay.pod(0).to_string();
    let (said, _) = weft(&overlay, 0, &["explain", &own, &pod]);
    assert!(said.contains("(ipip)"), "{said}");
    let env = overlay.dir(0).join("subnet.env").display().to_string();
    let (said, _) = weft(&overlay, 0, &["check", "-o", "json", "--subnet-file", &env]);
    let checks: Value = serde_json::from_str(&said).unwrap();
    let checks = checks["checks"].as_array().unwrap();
    let verdict = |id: &str| checks.iter().find(|it| it["id"] == id).map(|it| &it["verdict"]);
    for id in ["overlay-mtu", "stale-devices", "way-from-peers"] {
        assert_eq!(verdict(id), Some(&"ok".into()), "{id}: {said}");
    }
    // Nobody takes what comes out of the tunnel, and the host answers.
    overlay.daemons[1].stop(Signal::TERM, STOP);
    overlay.lab.hosts[1].exec(&["ip", "link", "delete", "flannel.ipip"]);
    wait_until(KNOWN, "the peer is known to be silent", || {
        overlay.lab.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.1", &pod]);
        peer_state(&overlay, 0).contains("silent")
    });
    let (said, code) = weft(&overlay, 0, &["ping", &pod]);
    assert_eq!(code, Some(1), "{said}");
    overlay.restart(1, &[]);
    wait_until(KNOWN, "the peer is well again", || peer_state(&overlay, 0) == r#""ok""#);
}

#[test]
fn ipv6_is_not_carried_and_that_is_told() {
    let config = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48",
        "Backend":{"Type":"ipip"}}"#;
    let overlay = Overlay::start_with(config, [&[], &[]]);
    overlay.traffic_resumes(SOON, "a start in a network of both families");
    assert_eq!(overlay.daemons[0].complaints("fd00:5::/48"), 1, "{}", overlay.daemons[0].output());
    assert!(is_ready(&overlay.dir(0)), "a family that flannel doesn't carry keeps pods away");
    assert!(!text(&overlay, 0, &["ip", "-6", "route"]).contains("fd00:5:"), "a route to nowhere");
}

#[test]
fn cleanup_removes_the_device_and_another_start_makes_it() {
    let mut overlay = Overlay::start_with(IPIP, [&[], &[]]);
    overlay.daemons[0].stop(Signal::TERM, STOP);
    let env = overlay.dir(0).join("subnet.env").display().to_string();
    let clean = [env!("CARGO_BIN_EXE_weft"), "cleanup", "--subnet-file", &env];
    let said = overlay.lab.hosts[0].exec(&clean);
    let left = text(&overlay, 0, &["ip", "link", "show"]);
    assert!(!left.contains("flannel.ipip") && left.contains("tunl0"), "{said}: {left}");
    overlay.restart(0, &[]);
    thread::sleep(Duration::from_millis(100));
    overlay.traffic_resumes(START, "cleanup and a start");
}
