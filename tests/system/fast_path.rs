//! Daemons whose packets the kernel carries, beside ones whose workers do.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::lab::{Namespace, PLAIN_CARD, UNDERLAY, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::traffic::{
    Numbered, kernel_counter, port, tcp_transfer, udp_sizes, udp_socket,
};

const PATIENCE: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

/// What the kernel's programs of a host took: sent and received.
fn taken(overlay: &Overlay, host: usize) -> [u64; 2] {
    let status = overlay.status(host);
    ["packets_sent", "packets_received"]
        .map(|name| status.0["fast_path"][name].as_u64().expect("status has the counts"))
}

/// What the workers of both hosts sent.
fn sent_by_workers(overlay: &Overlay) -> u64 {
    [0, 1].map(|host| overlay.status(host).count("egress", "packets_forwarded")).iter().sum()
}

/// Answers to the echoes that measure the path, a few a second, go through workers.
const ANSWERS_MAX: u64 = 200;

#[test]
fn ordinary_packets_never_meet_a_worker() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    overlay.wait_until_carried();
    let [near, far] = &overlay.lab.pods;
    let before = sent_by_workers(&overlay);
    for size in [0, 56, 1000, 1444] {
        assert!(overlay.lab.ping(1, overlay.pod(0), size), "a ping of {size} is lost");
    }
    assert!(!overlay.lab.ping(0, overlay.pod(1), 1445), "1473 bytes with DF crossed");
    udp_sizes(near, far, overlay.pod(1), [1, 100, 1443, 1444]);
    tcp_transfer(near, far, overlay.pod(1), 32 * MIB, false);
    tcp_transfer(near, far, overlay.pod(1), 16 * MIB, true);
    let after = sent_by_workers(&overlay);
    assert!(after < before + ANSWERS_MAX, "ordinary packets go through workers: {before} {after}");
    let [sent, received] = taken(&overlay, 0);
    assert!(sent > 32 * MIB / 1472 && received > 10 * ANSWERS_MAX, "{sent}, {received}");
    wait_until(
        PATIENCE,
        "what one sends the other takes, but for echoes to the host itself",
        || {
            let [[sent, received], [sent_back, received_back]] =
                [0, 1].map(|host| taken(&overlay, host));
            let [echoes, echoes_back] =
                [0, 1].map(|host| overlay.status(host).count("ingress", "packets_forwarded"));
            (received_back..=received_back + echoes_back).contains(&sent)
                && (received..=received + echoes).contains(&sent_back)
        },
    );
    // Those that the pods' kernels cut are the workers'.
    udp_sizes(near, far, overlay.pod(1), [1445, 9000]);
    let fragments = 2 + 7;
    assert!(sent_by_workers(&overlay) >= after + fragments, "who carried the fragments?");
    let out_of_order = kernel_counter(far, "TcpExt", "TCPOFOQueue");
    println!("{out_of_order} out of order");
}

#[test]
fn workers_and_kernel_understand_each_other() {
    for arguments in [["--fast-path=on", "--fast-path=off"], ["--fast-path=off", "--fast-path=on"]]
    {
        let overlay = Overlay::start_with(CONFIG, [&[arguments[0]], &[arguments[1]]]);
        let [near, far] = &overlay.lab.pods;
        assert!(overlay.lab.ping(0, overlay.pod(1), 56) && overlay.lab.ping(1, overlay.pod(0), 56));
        tcp_transfer(near, far, overlay.pod(1), 16 * MIB, false);
        tcp_transfer(far, near, overlay.pod(0), 16 * MIB, false);
        for host in 0..2 {
            assert_eq!(taken(&overlay, host), [0, 0], "a peer without programs pays for checksums");
        }
    }
}

#[test]
fn fast_streams_go_by_workers_in_order() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    overlay.wait_until_carried();
    let pods = [0, 1].map(|host| overlay.pod(host));
    let sockets = [0, 1].map(|host| udp_socket(&overlay.lab.pods[host], pods[host]));
    let target = SocketAddr::from((pods[1], port(&sockets[1])));
    let stream = Numbered::default();
    let before = sent_by_workers(&overlay);
    let mut number = 0_u64;
    let mut send = |count| {
        for _ in 0..count {
            let sent = sockets[0].send_to(&number.to_be_bytes(), target);
            sent.expect("the pod's kernel takes datagrams");
            number += 1;
        }
    };
    let reordered = thread::scope(|scope| {
        scope.spawn(|| stream.receive(&sockets[1]));
        wait_until(PATIENCE, "workers carry a stream as fast as the pod can send", || {
            send(5000);
            sent_by_workers(&overlay) > before + ANSWERS_MAX
        });
        thread::sleep(Duration::from_millis(200));
        let ([sent, _], by_workers) = (taken(&overlay, 0), sent_by_workers(&overlay));
        for _ in 0..20 {
            send(1);
            thread::sleep(Duration::from_millis(2));
        }
        wait_until(PATIENCE, "the kernel carries what follows a pause", || {
            taken(&overlay, 0)[0] >= sent + 20
        });
        assert!(sent_by_workers(&overlay) < by_workers + ANSWERS_MAX);
        stream.drained.store(true, Ordering::Relaxed);
        stream.reordered.load(Ordering::Relaxed)
    });
    assert_eq!(reordered, 0, "a stream that changed its way was reordered");
}

/// Packets that a device has received, super-packets as one.
fn received_on(namespace: &Namespace, device: &str) -> u64 {
    let path = format!("/sys/class/net/{device}/statistics/rx_packets");
    namespace.exec(&["cat", &path]).trim().parse().expect("a number of packets")
}

#[test]
fn single_packets_are_merged() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    for host in &overlay.lab.hosts {
        host.exec(&[&["ethtool", "-K", "wire0"], &PLAIN_CARD[..]].concat());
    }
    overlay.wait_until_carried();
    let [near, far] = &overlay.lab.pods;
    let has_pair = |host: &Namespace| host.succeeds(&["ip", "link", "show", "flannel0-gro0"]);
    assert!(!has_pair(&overlay.lab.hosts[1]), "a pair that nobody needs");
    wait_until(PATIENCE, "the receiver makes a pair that merges", || {
        tcp_transfer(near, far, overlay.pod(1), 4 * MIB, false);
        has_pair(&overlay.lab.hosts[1])
    });
    let (before, taken_before) = (received_on(far, "eth0"), taken(&overlay, 1)[1]);
    tcp_transfer(near, far, overlay.pod(1), 32 * MIB, false);
    tcp_transfer(far, near, overlay.pod(0), 32 * MIB, true);
    let (packets, taken) =
        (received_on(far, "eth0") - before, taken(&overlay, 1)[1] - taken_before);
    assert!(taken > 32 * MIB / 1472, "workers had the packets: {taken}");
    assert!(packets < taken / 2, "{taken} packets came to the pod in {packets}: nothing is merged");
    udp_sizes(near, far, overlay.pod(1), [1, 1444]);

    // Removed by hand, it is made again.
    overlay.lab.hosts[1].exec(&["ip", "link", "del", "flannel0-gro1"]);
    wait_until(PATIENCE, "the pair is made again", || has_pair(&overlay.lab.hosts[1]));
    tcp_transfer(near, far, overlay.pod(1), MIB, false);

    for daemon in &mut overlay.daemons {
        daemon.stop(Signal::TERM, PATIENCE);
    }
    assert!(!has_pair(&overlay.lab.hosts[1]), "the pair outlives weftd");
}

#[test]
fn packets_never_pass_by_an_ipsec_policy() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    overlay.wait_until_carried();
    let [near_host, far_host] = &overlay.lab.hosts;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let address = overlay.pod(1).to_string();
            while !stop.load(Ordering::Relaxed) {
                overlay.lab.pods[0].succeeds(&["ping", "-q", "-c20", "-i0.002", "-W0.1", &address]);
            }
        });
        // There is no key for it: whatever it applies to does not leave.
        let [from, to] = UNDERLAY.map(|address| address.to_string());
        let selector = ["src", &from, "dst", &to, "proto", "udp", "dir", "out"];
        let template = ["tmpl", "src", &from, "dst", &to, "proto", "esp", "mode", "transport"];
        let add = [&["ip", "xfrm", "policy", "add"], &selector[..], &template[..]].concat();
        near_host.exec(&add);
        wait_until(PATIENCE, "the fast path is off, and says why", || {
            let fast_path = overlay.status(0).0["fast_path"].clone();
            fast_path["on"] == false && fast_path["reason"].to_string().contains("IPsec")
        });
        let (sent, arrived) = (taken(&overlay, 0)[0], received_on(far_host, "wire0"));
        thread::sleep(Duration::from_millis(300));
        assert_eq!(taken(&overlay, 0)[0], sent, "packets pass by the policy");
        // The other side still sends its own.
        let more = received_on(far_host, "wire0") - arrived;
        assert!(more < 20, "{more} datagrams left in plaintext");
        near_host.exec(&["ip", "xfrm", "policy", "flush"]);
        wait_until(PATIENCE, "the fast path is on again", || {
            overlay.status(0).0["fast_path"]["on"] == true && taken(&overlay, 0)[0] > sent
        });
        stop.store(true, Ordering::Relaxed);
    });
    assert!(overlay.lab.ping(0, overlay.pod(1), 56));

    // What has no policy may be blocked as well, since kernel 5.14.
    let default = |out: &str| ["ip", "xfrm", "policy", "setdefault", "out", out].map(String::from);
    let set = |out| near_host.exec(&default(out).each_ref().map(String::as_str));
    set("block");
    wait_until(PATIENCE, "the fast path is off, and says why", || {
        let fast_path = overlay.status(0).0["fast_path"].clone();
        fast_path["on"] == false && fast_path["reason"].to_string().contains("IPsec")
    });
    set("accept");
    overlay.wait_until_carried();
}

#[test]
fn routing_rules_count() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    overlay.wait_until_carried();
    let host = &overlay.lab.hosts[0];
    let [own, peer] = UNDERLAY.map(|address| address.to_string());
    let selectors: [&[&str]; 3] =
        [&["to", &peer], &["from", &own], &["ipproto", "udp", "sport", "8285", "dport", "8285"]];
    for selector in selectors {
        host.exec(&[&["ip", "rule", "add", "pref", "100", "blackhole"], selector].concat());
        wait_until(PATIENCE, "the kernel lets go of a peer that a rule forbids", || {
            overlay.status(0).0["fast_path"]["peers"] == 0
        });
        host.exec(&["ip", "rule", "del", "pref", "100"]);
        overlay.wait_until_carried();
    }
}
