//! WireGuard in userspace: two hosts that run it, and one beside another WireGuard.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::kernel_backends::families;
use crate::support::flows::Flows;
use crate::support::lab::{Lab, Process, wait_until};
use crate::support::overlay::Overlay;
use crate::support::traffic::tcp_transfer;

const SOON: Duration = Duration::from_secs(20);

fn config(more: &str) -> String {
    format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"wireguard"{more}}}}}"#)
}

const HERE: &str = "--wireguard=userspace";

fn overlay(more: &str) -> Overlay {
    let overlay = Overlay::start_with(&config(more), [&[HERE], &[HERE]]);
    wait_until(SOON, "pods reach each other by WireGuard", || {
        overlay.lab.ping(0, overlay.pod(1), 56) && overlay.lab.ping(1, overlay.pod(0), 56)
    });
    overlay
}

fn psk() -> String {
    format!(r#","PSK":"{}""#, "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=")
}

/// Bytes of all packets on the wire while `work` runs.
fn wire_during(lab: &Lab, dir: &Path, work: impl FnOnce()) -> Vec<u8> {
    let file = dir.join("wire.pcap");
    let name = file.display().to_string();
    let argv = [
        "tcpdump",
        "--immediate-mode",
        "-Z",
        "root",
        "-U",
        "-n",
        "-i",
        "wire0",
        "-s0",
        "-w",
        &name,
    ];
    let mut dump = lab.hosts[0].spawn(&argv);
    wait_until(SOON, "tcpdump listens", || file.metadata().is_ok_and(|it| it.len() >= 24));
    work();
    dump.stop(Signal::INT, SOON);
    std::fs::read(file).expect("tcpdump has written it")
}

#[test]
fn pods_talk_and_the_wire_shows_nothing_of_it() {
    let marker = "4d41524b4552";
    let is_readable = |bytes: &[u8]| bytes.windows(6).any(|window| window == b"MARKER");
    let pings = |overlay: &Overlay| {
        let to = overlay.pod(1).to_string();
        wire_during(&overlay.lab, overlay.files(), || {
            let argv = ["ping", "-q", "-c5", "-i0.02", "-W2", "-p", marker, "-s1000", &to];
            overlay.lab.pods[0].exec(&argv);
        })
    };
    let plain = Overlay::start();
    assert!(is_readable(&pings(&plain)), "the test sees nothing of udp either");
    drop(plain);
    let overlay = overlay(&psk());
    let wire = pings(&overlay);
    assert!(wire.len() > 5 * 2 * 1000, "nothing was captured");
    assert!(!is_readable(&wire), "the wire shows what pods send");
    let (lab, pod) = (&overlay.lab, overlay.pod(1));
    tcp_transfer(&lab.pods[0], &lab.pods[1], pod, 8 << 20, true);
    assert!(lab.ping(0, pod, 1392), "a packet of the device's MTU");
    assert!(!lab.pods[0].succeeds(&["ping", "-c1", "-W1", "-Mdo", "-s1393", &pod.to_string()]));
    for host in 0..2 {
        wait_until(SOON, "the status tells of the handshake", || {
            let status = overlay.status(host).0;
            status["routes"][0]["wireguard"]["last_handshake_unix"].is_u64()
        });
    }
}

/// The device of userspace ends with weftd, and a host's default route leads anywhere.
#[test]
fn nothing_leaves_unencrypted_without_the_device() {
    let mut overlay = overlay("");
    let to = overlay.pod(1).to_string();
    overlay.lab.hosts[0].exec(&["ip", "route", "add", "default", "via", "172.20.0.2"]);
    overlay.daemons[0].stop(Signal::KILL, SOON);
    let wire = wire_during(&overlay.lab, overlay.files(), || {
        let ping = ["ping", "-q", "-c5", "-i0.1", "-W1", "-p", "4d41524b4552", "-s100", &to];
        assert!(!overlay.lab.pods[0].succeeds(&ping), "who answers?");
    });
    assert!(!wire.windows(6).any(|window| window == b"MARKER"), "pods' packets leave in the clear");
    overlay.restart(0, &[HERE]);
    overlay.traffic_resumes(SOON, "a kill");
    overlay.daemons[0].stop(Signal::TERM, SOON);
    let subnet_file = format!("--subnet-file={}/subnet.env", overlay.dir(0).display());
    overlay.lab.hosts[0].exec(&[env!("CARGO_BIN_EXE_weft"), "cleanup", &subnet_file]);
    let routes = overlay.lab.hosts[0].exec(&["ip", "route"]);
    assert!(!routes.contains("blackhole"), "{routes}");
}

#[test]
fn connections_outlive_a_restart_and_a_deleted_device() {
    let mut overlay = overlay("");
    let flows = Flows::open(&overlay.lab.pods[0], &overlay.lab.pods[1], overlay.pod(1), 20);
    let stop = AtomicBool::new(false);
    let report = thread::scope(|scope| {
        let talk = scope.spawn(|| flows.talk(&stop));
        overlay.daemons[1].stop(Signal::TERM, SOON);
        overlay.restart(1, &[HERE]);
        overlay.traffic_resumes(SOON, "a restart");
        overlay.lab.hosts[0].exec(&["ip", "link", "del", "flannel-wg"]);
        overlay.traffic_resumes(2 * SOON, "the device was deleted");
        thread::sleep(Duration::from_secs(1));
        stop.store(true, Ordering::Relaxed);
        talk.join().unwrap()
    });
    assert_eq!(report.open, 20, "{report}");
}

/// Nothing is sent to it but what begins handshakes, which is no use of a peer: its pods' packets
/// wait for keys in vain, and that is use.
#[test]
fn a_peer_that_never_answers_is_silent_while_pods_want_it() {
    let mut overlay = overlay("");
    for daemon in &mut overlay.daemons {
        daemon.stop(Signal::TERM, SOON);
    }
    let rule = ["iptables", "-A", "INPUT", "-p", "udp", "--dport", "51820", "-j", "DROP"];
    overlay.lab.hosts[1].exec(&rule);
    overlay.restart(0, &[HERE]);
    let row = |overlay: &Overlay| overlay.status(0).0["routes"][0].clone();
    let is = |overlay: &Overlay, state: &str| row(overlay)["state"] == state;
    let until = Instant::now() + 8 * SOON;
    while !is(&overlay, "silent") {
        assert!(Instant::now() < until, "{}", row(&overlay));
        overlay.lab.pods[0].succeeds(&["ping", "-c1", "-W1", &overlay.pod(1).to_string()]);
    }
    let why = row(&overlay)["why"].to_string();
    assert!(why.contains("no keys"), "{why}");
}

#[test]
fn both_families_and_ipv6_alone_are_carried() {
    let dir = tempfile::tempdir().unwrap();
    let store = crate::support::overlay::local_store(dir.path(), &families::config("wireguard"));
    let lab = families::lab();
    let arguments = [store.as_str(), HERE];
    let nodes = [0, 1].map(|host| families::start_with(&lab, dir.path(), host, &arguments));
    let pods = [0, 1].map(|host| families::connect(&lab, host, &nodes[host]));
    lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
    for (own, other) in [(0, 1), (1, 0)] {
        families::wait_for_pings(&lab, own, &pods[other], 1372);
        assert!(lab.ping(own, nodes[other].lease.pod_address(), 1392), "IPv4 is not carried");
    }
    let address: std::net::Ipv6Addr = pods[1].parse().unwrap();
    tcp_transfer(&lab.pods[0], &lab.pods[1], address, 4 << 20, true);
    drop(nodes);
    let site = crate::kernel_backends::without_ipv4::Site::start_with("wireguard", &[HERE]);
    let pods = site.connect();
    for (own, other) in [(0, 1), (1, 0)] {
        families::wait_for_pings(&site.lab, own, &pods[other], 1372);
    }
}

/// Host 1 of the lab with another WireGuard, wireguard-go, and a lease that somebody wrote for it.
struct Beside {
    dir: TempDir,
    lab: Lab,
    daemon: Process,
    other: Option<Process>,
    subnet: Ipv4Addr,
}

const OTHER_SUBNET: &str = "10.5.200";

impl Beside {
    fn start() -> Self {
        let (dir, lab) = (tempfile::tempdir().expect("a directory for the test"), Lab::two_hosts());
        let store = crate::support::overlay::local_store(dir.path(), &config(&psk()));
        for key in ["other.key", "next.key"] {
            let key = dir.path().join(key);
            lab.hosts[1].exec(&["sh", "-c", &format!("umask 077; wg genkey >{}", key.display())]);
        }
        let home = dir.path().join("h0");
        let mut daemon = lab.weftd(0, &home, &[&store, HERE]);
        let lease = crate::support::lab::SubnetEnv::wait(&home.join("subnet.env"), &mut daemon);
        let (host, pod) = (&lab.hosts[1], &lab.pods[1]);
        host.exec(&["ip", "address", "add", &format!("{OTHER_SUBNET}.1/24"), "dev", "pod0"]);
        pod.exec(&["ip", "address", "add", &format!("{OTHER_SUBNET}.2/24"), "dev", "eth0"]);
        pod.exec(&["ip", "route", "add", "default", "via", &format!("{OTHER_SUBNET}.1")]);
        let gateway = lease.gateway().to_string();
        lab.hosts[0].exec(&["ip", "address", "add", &format!("{gateway}/24"), "dev", "pod0"]);
        let address = format!("{}/24", lease.pod_address());
        lab.pods[0].exec(&["ip", "address", "add", &address, "dev", "eth0"]);
        lab.pods[0].exec(&["ip", "route", "add", "default", "via", &gateway]);
        let subnet = lease.network();
        let mut beside = Self { dir, lab, daemon, other: None, subnet };
        beside.run("other.key");
        beside
    }

    fn key(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts it with a key, and has the lease say so.
    fn run(&mut self, key: &str) {
        let host = &self.lab.hosts[1];
        drop(self.other.take());
        let socket = Path::new("/var/run/wireguard/weft-other.sock");
        // One that was killed leaves it.
        std::fs::remove_file(socket).ok();
        self.other = Some(host.spawn(&["wireguard-go", "-f", "weft-other"]));
        wait_until(SOON, "wireguard-go runs", || socket.exists());
        let public = |key: &Path| {
            let shell = format!("wg pubkey <{}", key.display());
            host.exec(&["sh", "-c", &shell]).trim().to_owned()
        };
        let (own, weft) = (public(&self.key(key)), public(&self.key("h0/wgkey")));
        let psk = self.dir.path().join("psk");
        std::fs::write(&psk, psk_text()).expect("the directory is writable");
        let (subnet, key) = (self.subnet, self.key(key));
        let set = format!(
            "wg set weft-other private-key {} listen-port 51820 peer {weft} preshared-key {} \
             allowed-ips {subnet}/24 endpoint 172.20.0.1:51820",
            key.display(),
            psk.display(),
        );
        host.exec(&["sh", "-c", &set]);
        host.exec(&["ip", "address", "add", &format!("{OTHER_SUBNET}.0/32"), "dev", "weft-other"]);
        host.exec(&["ip", "link", "set", "weft-other", "mtu", "1420", "up"]);
        host.exec(&["ip", "route", "add", "10.5.0.0/16", "dev", "weft-other"]);
        let data = format!(r#"{{"PublicKey":"{own}","Port":51820}}"#);
        let lease = format!(
            r#"{{"PublicIP":"172.20.0.2","PublicIPv6":null,"BackendType":"wireguard",
                "BackendData":{data}}}"#
        );
        let subnets = self.dir.path().join("store/subnets");
        std::fs::write(subnets.join(format!("{OTHER_SUBNET}.0-24")), lease)
            .expect("the directory is writable");
    }

    #[track_caller]
    fn wait_for_pods(&self, after: &str) {
        let pods = [self.subnet.to_bits() + 2, 0].map(Ipv4Addr::from);
        let other: Ipv4Addr = format!("{OTHER_SUBNET}.2").parse().expect("an address");
        wait_until(3 * SOON, &format!("pods reach each other {after}"), || {
            self.lab.ping(0, other, 1392) && self.lab.ping(1, pods[0], 1392)
        });
    }
}

fn psk_text() -> String {
    psk().rsplit('"').nth(1).expect("a key in quotes").to_owned()
}

#[test]
fn another_wireguard_is_a_peer_like_any() {
    let mut beside = Beside::start();
    beside.wait_for_pods("beside wireguard-go");
    let pod: Ipv4Addr = format!("{OTHER_SUBNET}.2").parse().unwrap();
    tcp_transfer(&beside.lab.pods[0], &beside.lab.pods[1], pod, 4 << 20, true);
    beside.run("other.key");
    beside.wait_for_pods("after wireguard-go was started again");
    beside.run("next.key");
    beside.wait_for_pods("after the other host has got another key");
    beside.daemon.stop(Signal::TERM, SOON);
    let store = format!("--local-store={}", beside.dir.path().join("store").display());
    beside.daemon = beside.lab.weftd(0, &beside.dir.path().join("h0"), &[&store, HERE]);
    beside.wait_for_pods("after weftd was started again");
    let wg = |host: usize, name: &str| beside.lab.hosts[host].exec(&["wg", "show", name, "dump"]);
    assert!(wg(1, "weft-other").contains(&format!("{}/24", beside.subnet)));

    // It sends from a subnet that is not its own.
    beside.lab.hosts[1].exec(&["ip", "address", "add", "10.5.201.9/32", "dev", "weft-other"]);
    let pod = Ipv4Addr::from(beside.subnet.to_bits() + 2).to_string();
    let spoof = ["ping", "-c2", "-W1", "-I", "10.5.201.9", &pod];
    assert!(!beside.lab.hosts[1].succeeds(&spoof), "it was answered at another peer's address");
}
