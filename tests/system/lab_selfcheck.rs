//! The tests' own tools: a lab that leaks, or that reports success for nothing, would make every
//! other network test worthless.

use std::collections::BTreeSet;
use std::io;
use std::net::UdpSocket;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Signal, test_kill_process};

use crate::support::lab::{Lab, Namespace, SubnetEnv, UNDERLAY, wait_until};
use crate::support::probe::{End, Probe};
use crate::support::traffic::tcp_transfer;

fn namespace_exists(name: &str) -> bool {
    Path::new("/run/netns").join(name).exists()
}

fn leases(mtu_bytes: u32) -> [SubnetEnv; 2] {
    ["10.5.1.1/24", "10.5.2.1/24"].map(|subnet| SubnetEnv { subnet: subnet.to_owned(), mtu_bytes })
}

/// A lab whose hosts route the pods' subnets to each other directly.
fn plainly_routed() -> Lab {
    let lab = Lab::two_hosts();
    let leases = leases(1500);
    lab.connect_pods(leases.each_ref());
    for (index, lease) in leases.iter().enumerate() {
        let (subnet, via) = (format!("{}/24", lease.network()), UNDERLAY[index].to_string());
        lab.hosts[1 - index].exec(&["ip", "route", "add", &subnet, "via", &via]);
    }
    lab
}

#[test]
fn a_namespace_vanishes_with_its_value() {
    let namespace = Namespace::new("gone");
    let name = namespace.name().to_owned();
    assert!(namespace_exists(&name));
    drop(namespace);
    assert!(!namespace_exists(&name));
}

#[test]
fn a_panicking_test_leaves_neither_namespaces_nor_processes() {
    let (mut names, mut pid) = (Vec::new(), None);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let lab = Lab::two_hosts();
        names.extend(lab.hosts.iter().chain(&lab.pods).map(|each| each.name().to_owned()));
        let sleeper = lab.hosts[0].spawn(&["sleep", "600"]);
        pid = Some(sleeper.pid());
        assert!(names.iter().all(|name| namespace_exists(name)));
        std::panic::resume_unwind(Box::new("on purpose"));
    }));
    assert_eq!(outcome.unwrap_err().downcast_ref(), Some(&"on purpose"));
    assert_eq!(names.len(), 4);
    assert!(!names.iter().any(|name| namespace_exists(name)), "left over among {names:?}");
    assert!(test_kill_process(pid.unwrap()).is_err(), "the spawned process still runs");
}

#[test]
fn a_namespace_takes_strangers_processes_with_it() {
    let namespace = Namespace::new("orphan");
    let pid = namespace.exec(&["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]);
    let process = Path::new("/proc").join(pid.trim());
    assert!(process.exists());
    drop(namespace);
    wait_until(Duration::from_secs(5), "the orphan ends", || {
        // An orphan that nobody waits for yet stays visible, without a command line.
        std::fs::read(process.join("cmdline")).map_or(true, |line| line.is_empty())
    });
}

#[test]
fn entering_moves_the_closure_and_nobody_else() {
    let here = || std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    let outside = here();
    let namespace = Namespace::new("enter");
    let (inside, devices) = namespace.enter(|| {
        let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        (here(), devices.lines().skip(2).count())
    });
    assert_ne!(inside, outside);
    assert_eq!(devices, 1, "a new namespace has its loopback only");
    assert_eq!(here(), outside);
    let panic = catch_unwind(|| namespace.enter(|| std::panic::resume_unwind(Box::new(7_u8))));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&7_u8));
}

#[test]
#[should_panic(expected = "this did not happen: pigs fly")]
fn waiting_in_vain_says_for_what() {
    wait_until(Duration::from_millis(30), "pigs fly", || false);
}

#[test]
fn a_process_tells_its_output_and_its_end() {
    let namespace = Namespace::new("process");
    let script = "trap 'exit 3' TERM; echo out; echo err >&2; while :; do sleep 0.01; done";
    let mut process = namespace.spawn(&["sh", "-c", script]);
    wait_until(Duration::from_secs(5), "both lines are written", || {
        process.output() == "out\nerr\n"
    });
    assert_eq!(process.ended(), None);
    let status = process.stop(Signal::TERM, Duration::from_secs(5));
    assert_eq!(status.code(), Some(3));
}

#[test]
fn lease_wait_lasts_as_long_as_daemon() {
    let namespace = Namespace::new("lease");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("subnet.env");
    let lines = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.72.1/24\nFLANNEL_MTU=1472\n";
    let script = format!("sleep 0.1; printf '{lines}' >{}; sleep 600", file.display());
    let lease = SubnetEnv::wait(&file, &mut namespace.spawn(&["sh", "-c", &script]));
    assert_eq!(lease, SubnetEnv { subnet: "10.5.72.1/24".to_owned(), mtu_bytes: 1472 });
    assert_eq!(lease.network().to_string(), "10.5.72.0");
    assert_eq!(lease.pod_address().to_string(), "10.5.72.2");

    let none = dir.path().join("none.env");
    let outcome = catch_unwind(|| {
        SubnetEnv::wait(&none, &mut namespace.spawn(&["sh", "-c", "echo no config; exit 1"]))
    });
    let message = outcome.unwrap_err().downcast::<String>().unwrap();
    assert!(message.ends_with(":\nno config\n"), "what the daemon said: {message}");
}

#[test]
fn pods_need_routes_to_reach_each_other() {
    let lab = plainly_routed();
    let [first, second] = leases(1500);
    assert!(lab.ping(0, second.pod_address(), 1472));
    assert!(lab.ping(1, first.pod_address(), 1472));
    assert!(!lab.ping(0, second.pod_address(), 1473), "a packet above the MTU must not fit");
    lab.hosts[1].exec(&["ip", "route", "del", "10.5.1.0/24"]);
    assert!(!lab.ping(0, second.pod_address(), 64), "the answer has no way back");
}

#[test]
fn plain_peers_talk_from_any_ports() {
    let lab = Lab::two_hosts();
    let leases = leases(1472);
    let [first, second] = &leases;
    let _proxies = [
        lab.proxy(0, "plain-peer", first, second, &["--ports", "0"]),
        lab.proxy(1, "plain-peer", second, first, &["--ports", "3"]),
    ];
    lab.connect_pods([first, second]);
    for payload_bytes in [0, 64, 1444] {
        assert!(lab.ping(0, second.pod_address(), payload_bytes), "{payload_bytes} bytes");
        assert!(lab.ping(1, first.pod_address(), payload_bytes), "{payload_bytes} bytes");
    }
}

/// A baseline that carries nothing would make weft look better in every comparison.
#[test]
fn userspace_baselines_carry_pings_and_tcp_both_ways() {
    for program in ["one-packet", "straightforward"] {
        let lab = Lab::two_hosts();
        let leases = leases(1472);
        let [first, second] = &leases;
        let mut proxies =
            [lab.proxy(0, program, first, second, &[]), lab.proxy(1, program, second, first, &[])];
        lab.connect_pods([first, second]);
        for payload_bytes in [0, 64, 1444] {
            assert!(lab.ping(0, second.pod_address(), payload_bytes), "{program} {payload_bytes}");
            assert!(lab.ping(1, first.pod_address(), payload_bytes), "{program} {payload_bytes}");
        }
        let [near, far] = &lab.pods;
        tcp_transfer(near, far, second.pod_address(), 8 << 20, false);
        tcp_transfer(far, near, first.pod_address(), 8 << 20, false);
        for proxy in &mut proxies {
            assert!(proxy.ended().is_none(), "{program} died: {}", proxy.output());
        }
    }
}

/// Sends `count` packets into a plain peer and gives the source ports seen by the other host.
fn source_ports(arguments: &[&str], count: usize) -> io::Result<Vec<u16>> {
    let lab = Lab::two_hosts();
    let [first, second] = leases(1472);
    let receiver = lab.hosts[1].enter(|| UdpSocket::bind((UNDERLAY[1], 8285)))?;
    receiver.set_read_timeout(Some(Duration::from_secs(5)))?;
    let _proxy = lab.proxy(0, "plain-peer", &first, &second, arguments);
    lab.connect_pods([&first, &second]);
    let sender = lab.pods[0].enter(|| UdpSocket::bind((first.pod_address(), 0)))?;
    let mut datagram = [0; 1500];
    let ports = (0..count).map(|_| {
        sender.send_to(b"hello", (second.pod_address(), 9))?;
        let (length, from) = receiver.recv_from(&mut datagram)?;
        assert!(datagram[..length].ends_with(b"hello"));
        Ok(from.port())
    });
    ports.collect()
}

#[test]
fn plain_peer_sends_from_given_ports() {
    let ports = source_ports(&["--ports", "3"], 9).unwrap();
    let distinct: BTreeSet<_> = ports.iter().copied().collect();
    assert_eq!(distinct.len(), 3, "{ports:?}");
    assert!(!distinct.contains(&8285));
    assert_eq!(ports[..3], ports[3..6], "the sockets take turns");

    let ports = source_ports(&[], 9).unwrap();
    let distinct: BTreeSet<_> = ports.iter().copied().collect();
    // The kernel may give the same port twice, but hardly ever does out of 28,000.
    assert!(distinct.len() >= 7, "{ports:?}");
}

#[test]
fn probe_notices_outages_and_reset_flows() {
    let lab = plainly_routed();
    let addresses = leases(1500).map(|lease| lease.pod_address());
    let ends = [0, 1].map(|host: usize| End {
        host: &lab.hosts[host],
        pod: &lab.pods[host],
        address: addresses[host],
        dir: "/nowhere".into(),
    });
    let host = &lab.hosts[0];
    host.exec(&["nft", "add table inet t"]);
    host.exec(&["nft", "add chain inet t f { type filter hook forward priority 0; }"]);
    let fault = |rule: &str| {
        let ((), report) = Probe::run(&ends, |_| {
            host.exec(&["nft", &format!("add rule inet t f {rule}")]);
            std::thread::sleep(Duration::from_millis(100));
            host.exec(&["nft", "flush chain inet t f"]);
        });
        (report.lost_datagrams(), report.broke_flows())
    };
    assert_eq!(fault("ip protocol icmp drop"), (false, false), "it sees losses of nobody");
    assert_eq!(fault("ip protocol udp drop"), (true, false), "it misses lost datagrams");
    let reset = fault("ip protocol tcp reject with tcp reset");
    assert_eq!(reset, (false, true), "it misses flows that are reset");
}
