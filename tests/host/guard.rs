//! `--guard`: what strangers and pods send to the tunnel's port ends in the kernel, peers are let
//! in as they come, and whoever opens it finds it closed again.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use rustix::process::Signal;
use socket2::{Domain, Protocol, Socket, Type};

use crate::rules::site::weftd_with;
use crate::support::lab::{LEASE_TIMEOUT, Lab, Namespace, UNDERLAY, WEFTD, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store, reserve};
use crate::support::packet::udp;
use crate::support::status::Status;
use crate::support::traffic::{udp_socket, udp_socket_at};

const VXLAN: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
const SOON: Duration = Duration::from_secs(10);
/// By then the status tells what was dropped, which is read with each check of the rules.
const DROPS_TOLD: Duration = Duration::from_secs(30);
const LIST: &[&str] = &["nft", "list", "ruleset"];
const GUARD: &[&str] = &["--guard", "--iptables-resync=1"];
/// Of nobody, on the link of both hosts.
const STRANGER: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 77);

/// Both daemons, the second host with the stranger's address as well, once the guards are there.
fn guarded(config: &str) -> Overlay {
    let overlay = Overlay::start_with(config, [GUARD, GUARD]);
    overlay.lab.hosts[1].address("wire0", &format!("{STRANGER}/24"));
    (0..2).for_each(|host| wait_for_guard(&overlay, host, 1));
    overlay
}

/// A figure of the guard in a host's status.
fn figure(overlay: &Overlay, host: usize, name: &str) -> u64 {
    overlay.status(host).0["guard"][name].as_u64().unwrap_or_default()
}

#[track_caller]
fn wait_for_guard(overlay: &Overlay, host: usize, peers: u64) {
    wait_until(SOON, &format!("the guard lets in {peers} peers"), || {
        let guard = &overlay.status(host).0["guard"];
        guard["in_place"] == true && guard["peers"] == peers
    });
}

#[track_caller]
fn wait_for_drops(overlay: &Overlay, host: usize, name: &str, packets: u64) {
    comes_true(DROPS_TOLD, || figure(overlay, host, name) >= packets);
    let guard = &overlay.status(host).0["guard"];
    assert_eq!(guard[name], packets, "{name}, of {guard}: {}", overlay.lab.hosts[host].exec(LIST));
}

fn tables(host: &Namespace) -> String {
    host.exec(&["nft", "list", "tables"])
}

#[test]
fn only_peers_reach_the_tunnels_port() {
    for (config, port) in [(CONFIG, 8285), (VXLAN, 8472)] {
        let overlay = guarded(config);
        overlay.traffic_resumes(SOON, "the guards are in place");
        let (hosts, pods) = (&overlay.lab.hosts, &overlay.lab.pods);
        // An inner source of nobody: without the guard the loose check lets it through.
        let pod = udp_socket_at(&pods[0], overlay.pod(0), 4789);
        let source = Ipv4Addr::new(10, 5, 250, 9);
        let mut inner = udp((source, 7), (overlay.pod(0), 4789), b"forged");
        if port == 8472 {
            // A header of VXLAN, flannel's VNI, and what stands for an Ethernet frame.
            inner.splice(..0, [8, 0, 0, 0, 0, 0, 1, 0]);
        }
        let stranger = udp_socket(&hosts[1], STRANGER);
        for _ in 0..20 {
            stranger.send_to(&inner, SocketAddrV4::new(UNDERLAY[0], port)).expect("it is sent");
        }
        wait_for_drops(&overlay, 0, "dropped_from_strangers", 20);
        assert!(pod.recv(&mut [0; 64]).is_err(), "port {port}: the pod got a forged packet");
        // By way of its own host, which would give it a peer's address.
        let from_pod = udp_socket(&pods[0], overlay.pod(0));
        for _ in 0..5 {
            from_pod.send_to(&inner, SocketAddrV4::new(UNDERLAY[1], port)).expect("it is sent");
        }
        wait_for_drops(&overlay, 0, "dropped_from_pods", 5);
        assert_eq!(figure(&overlay, 1, "dropped_from_strangers"), 0, "it left its host");
        from_pod.send_to(&inner, SocketAddrV4::new(UNDERLAY[0], port)).expect("it is sent");
        wait_for_drops(&overlay, 0, "dropped_from_strangers", 21);
        if port == 8285 {
            // Not a host of the overlay: that port is anybody's.
            let server = udp_socket_at(&hosts[1], STRANGER, port);
            from_pod.send_to(b"hello", SocketAddrV4::new(STRANGER, port)).expect("it is sent");
            server.set_read_timeout(Some(SOON)).expect("a time-out is not zero");
            let heard = server.recv(&mut [0; 64]).map_err(|error| error.to_string());
            assert_eq!(heard, Ok(5), "a pod can't reach a server with the tunnel's port number");
        }
        overlay.traffic_resumes(SOON, "all this");
        for host in 0..2 {
            let status = overlay.status(host);
            assert_eq!(status.0["verdict"]["state"], "ready", "{}", status.0["verdict"]);
            let log = overlay.daemons[host].output();
            assert_eq!(status.0["guard"]["repairs"], 0, "it repairs what is right: {log}");
        }
    }
}

/// With `rp_filter` off the kernel asks nobody where an address belongs.
#[test]
fn a_pod_cannot_pose_as_a_peer() {
    const PEER: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 78);
    for (config, port) in [(CONFIG, 8285), (VXLAN, 8472)] {
        let overlay = guarded(config);
        let (hosts, pods) = (&overlay.lab.hosts, &overlay.lab.pods);
        for filter in ["all", "pod0"] {
            let off = format!("net.ipv4.conf.{filter}.rp_filter=0");
            hosts[0].exec(&["sysctl", "-qw", &off]);
        }
        reserve(overlay.files(), "10.5.201.0-24", PEER);
        (0..2).for_each(|host| wait_for_guard(&overlay, host, 2));
        let raw = pods[0].enter(|| {
            Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))
        });
        let raw = raw.expect("tests are root");
        let send = |destination, port, payload: &[u8]| {
            let packet = udp((PEER, port), (destination, port), payload);
            let target = SocketAddr::from((destination, 0)).into();
            raw.send_to(&packet, &target).expect("a raw socket sends as it is told");
        };
        let inner = udp((Ipv4Addr::new(10, 5, 201, 9), 7), (overlay.pod(1), 4789), b"forged");
        let victim = udp_socket_at(&pods[1], overlay.pod(1), 4789);
        for own_or_other in UNDERLAY {
            (0..5).for_each(|_| send(own_or_other, port, &inner));
        }
        wait_for_drops(&overlay, 0, "dropped_from_pods", 5);
        if port == 8285 {
            wait_for_drops(&overlay, 0, "dropped_from_strangers", 5);
        }
        assert_eq!(figure(&overlay, 1, "dropped_from_strangers"), 0, "it left its host");
        assert!(victim.recv(&mut [0; 64]).is_err(), "port {port}: the other host's pod got it");
        // What is not the tunnel's may come from anywhere, as before.
        let server = udp_socket_at(&hosts[1], UNDERLAY[1], 9999);
        send(UNDERLAY[1], 9999, b"hello");
        server.set_read_timeout(Some(SOON)).expect("a time-out is not zero");
        let heard = server.recv(&mut [0; 64]).map_err(|error| error.to_string());
        assert_eq!(heard, Ok(5), "port {port}: asymmetric routing of other traffic is broken");
        overlay.traffic_resumes(SOON, "all this");
    }
}

#[test]
fn it_follows_the_peers_and_comes_back() {
    let overlay = guarded(CONFIG);
    let host = &overlay.lab.hosts[0];
    reserve(overlay.files(), "10.5.200.0-24", STRANGER);
    wait_for_guard(&overlay, 0, 2);
    let peer = udp_socket(&overlay.lab.hosts[1], STRANGER);
    let received = || overlay.status(0).count("ingress", "packets_received");
    let before = received();
    let source = (Ipv4Addr::new(10, 5, 200, 9), 7);
    let inner = udp(source, (overlay.pod(0), 9), b"a new peer's");
    peer.send_to(&inner, SocketAddrV4::new(UNDERLAY[0], 8285)).expect("it is sent");
    wait_until(SOON, "a new peer is heard", || received() > before);
    std::fs::remove_file(overlay.files().join("store/subnets/10.5.200.0-24")).expect("it is there");
    wait_for_guard(&overlay, 0, 1);
    for (repairs, open) in [
        "flush chain ip weft-guard-10.5.0.0-16 input",
        "add element ip weft-guard-10.5.0.0-16 peers { 172.20.0.77 }",
        "delete element ip weft-guard-10.5.0.0-16 peers { 172.20.0.2 }",
        "add table ip weft-guard-10.5.0.0-16 { flags dormant ; }",
        "delete table ip weft-guard-10.5.0.0-16",
    ]
    .into_iter()
    .enumerate()
    {
        host.exec(&["nft", open]);
        wait_until(SOON, &format!("the guard is repaired after {open}"), || {
            figure(&overlay, 0, "repairs") == repairs as u64 + 1
        });
        wait_for_guard(&overlay, 0, 1);
    }
    overlay.traffic_resumes(SOON, "the repairs");
    assert!(overlay.daemons[0].output().contains("was changed; repaired it"));
}

/// Who reaches a host's link can send to its pods without WireGuard, as one of them.
#[test]
fn with_wireguard_packets_in_the_clear_end_at_the_guard() {
    const HERE: &str = "--wireguard=userspace";
    let config = VXLAN.replace("vxlan", "wireguard");
    let guarded = [GUARD, &[HERE]].concat();
    let mut overlay = Overlay::start_with(&config, [&guarded, &[HERE]]);
    overlay.traffic_resumes(SOON, "WireGuard runs, with the guard");
    wait_for_guard(&overlay, 0, 0);
    let pod = overlay.pod(0).to_string();
    let around = ["ip", "route", "add", &pod, "via", "172.20.0.1", "dev", "wire0"];
    overlay.lab.hosts[1].exec(&around);
    let ping = ["ping", "-c3", "-i0.2", "-W2", &pod];
    assert!(!overlay.lab.pods[1].succeeds(&ping), "a packet in the clear has reached the pod");
    assert!(comes_true(DROPS_TOLD, || figure(&overlay, 0, "dropped_from_pods") >= 3));
    // What the host itself sends to its address of the overlay is nobody's business.
    let own = overlay.leases[0].gateway().to_string();
    overlay.lab.hosts[0].exec(&["ping", "-c1", "-W2", &own]);
    overlay.daemons[0].stop(Signal::TERM, SOON);
    overlay.restart(0, &[HERE]);
    wait_until(SOON, "without the guard it does", || overlay.lab.pods[1].succeeds(&ping));
}

#[test]
fn two_networks_of_a_host_have_a_guard_each() {
    let overlay = guarded(CONFIG);
    let host = &overlay.lab.hosts[0];
    host.address("wire0", "172.20.0.11/24");
    let files = tempfile::tempdir().expect("a directory for the test");
    let store = local_store(files.path(), &CONFIG.replace("10.5", "10.6"));
    let own = files.path().join("own");
    let [env, socket] = ["subnet.env", "weft.sock"].map(|name| own.join(name));
    let all = [
        store,
        "--iface=172.20.0.11".to_owned(),
        format!("--subnet-file={}", env.display()),
        format!("--status-socket={}", socket.display()),
    ];
    let words: Vec<_> = all.iter().map(String::as_str).chain(GUARD.iter().copied()).collect();
    let _second = host.spawn(&[&[WEFTD], words.as_slice()].concat());
    let checks = || Some(Status::try_of(&own)?.0["guard"]["checks"].as_u64()? >= 3);
    wait_until(SOON, "the second daemon keeps its guard", || checks() == Some(true));
    assert_eq!(Status::of(&own).0["guard"]["repairs"], 0, "they undo each other");
    assert_eq!(figure(&overlay, 0, "repairs"), 0, "they undo each other");
    overlay.traffic_resumes(SOON, "the second daemon started");
}

#[test]
fn a_run_without_it_removes_it() {
    let mut overlay = guarded(CONFIG);
    overlay.lab.hosts[0].exec(&["nft", "add table ip weft-guard-10.9.0.0-16; add table ip mine"]);
    overlay.daemons[0].stop(Signal::TERM, SOON);
    let left = tables(&overlay.lab.hosts[0]);
    assert!(
        left.contains("weft-guard-10.5.0.0-16"),
        "the kernel is open while weftd restarts: {left}"
    );
    overlay.restart(0, &[]);
    wait_until(SOON, "the guard of the run before is gone", || {
        !tables(&overlay.lab.hosts[0]).contains("weft-guard-10.5.0.0-16")
    });
    let left = tables(&overlay.lab.hosts[0]);
    assert!(
        left.contains("weft-guard-10.9.0.0-16") && left.contains("mine"),
        "not its own: {left}"
    );
    overlay.wait_for_routes();
    assert!(overlay.status(0).0["guard"].is_null());
}

#[test]
fn a_start_that_cant_keep_it_fails() {
    let (files, lab) = (tempfile::tempdir().expect("a directory for the test"), Lab::two_hosts());
    local_store(files.path(), CONFIG);
    let flags = ["--guard", "--iptables-forward-rules=false"];
    let mut daemon = weftd_with(&["PATH=/nowhere"], files.path(), &lab.hosts[0], 0, &flags);
    wait_until(LEASE_TIMEOUT, "weftd ends", || daemon.ended().is_some());
    // Which flag can't be kept, and the package that is missing.
    let log = daemon.output();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("--guard") && last.contains("nftables"), "{log}");
    assert_eq!(daemon.ended().and_then(|status| status.code()), Some(1));
}

#[test]
fn a_failure_later_is_shown_until_it_is_over() {
    let (files, lab) = (tempfile::tempdir().expect("a directory for the test"), Lab::two_hosts());
    let programs = files.path().join("programs");
    std::fs::create_dir(&programs).expect("the test's directory is writable");
    let nft = programs.join("nft");
    std::os::unix::fs::symlink("/usr/sbin/nft", &nft).expect("the test's directory is writable");
    local_store(files.path(), CONFIG);
    let path = format!("PATH={}", programs.display());
    let flags = ["--guard", "--iptables-forward-rules=false", "--iptables-resync=1"];
    let daemon = weftd_with(&[&path], files.path(), &lab.hosts[0], 0, &flags);
    let dir = files.path().join("h0");
    let verdict = || {
        let status = Status::try_of(&dir)?;
        Some((status.0["guard"]["in_place"] == true, status.0["verdict"]["state"].to_string()))
    };
    let is = |in_place, state: &str| verdict() == Some((in_place, format!("{state:?}")));
    wait_until(SOON, "a node without peers has its guard", || is(true, "ready"));
    std::fs::remove_file(&nft).expect("it is there");
    wait_until(SOON, "the status says that the guard can't be kept", || is(false, "degraded"));
    // Another thread writes the log.
    wait_until(SOON, "the log has it", || daemon.complaints("8285") > 0);
    assert_eq!(daemon.complaints("8285"), 1, "{}", daemon.output());
    std::os::unix::fs::symlink("/usr/sbin/nft", &nft).expect("the test's directory is writable");
    wait_until(SOON, "the guard is kept again", || is(true, "ready"));
    wait_until(SOON, "the log's last word on it is no complaint", || {
        let log = daemon.output();
        log.lines().rfind(|line| line.contains("8285")).is_some_and(|line| line.starts_with('I'))
    });
}
