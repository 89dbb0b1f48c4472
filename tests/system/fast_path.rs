//! Daemons whose packets the kernel carries, beside ones whose workers do.

use std::iter::once;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use weft::packet::Span;
use weft::sys::udp::{Datagrams, SendBatch};

use crate::support::lab::{Namespace, PLAIN_CARD, UNDERLAY, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::traffic::{
    Bursts, Numbered, kernel_counter, port, tcp_transfer, udp_sizes, udp_socket, uninterrupted,
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

const TRIES_MAX: usize = 3;

#[test]
fn ordinary_packets_never_meet_a_worker() {
    // The log of a run that fails has each change of whom the programs send to.
    let overlay =
        Overlay::start_with(CONFIG, [&["--fast-path=on", "-v=1"]; 2].map(|flags| &flags[..]));
    let [near, far] = &overlay.lab.pods;
    let by_workers = || {
        overlay.wait_until_carried();
        let before = sent_by_workers(&overlay);
        for size in [0, 56, 1000, 1444] {
            assert!(overlay.lab.ping(1, overlay.pod(0), size), "a ping of {size} is lost");
        }
        assert!(!overlay.lab.ping(0, overlay.pod(1), 1445), "1473 bytes with DF crossed");
        udp_sizes(near, far, overlay.pod(1), [1, 100, 1443, 1444]);
        tcp_transfer(near, far, overlay.pod(1), 32 * MIB, false);
        tcp_transfer(near, far, overlay.pod(1), 16 * MIB, true);
        sent_by_workers(&overlay) - before
    };
    // Where the programs may not take packets for a moment, as on a busy machine, workers do.
    let mut counts = vec![by_workers()];
    while counts.len() < TRIES_MAX && counts[counts.len() - 1] >= ANSWERS_MAX {
        counts.push(by_workers());
    }
    let few = counts[counts.len() - 1] < ANSWERS_MAX;
    assert!(few, "ordinary packets go through workers: {counts:?}");
    let after = sent_by_workers(&overlay);
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
    let mut bursts = Bursts::default();
    let mut send = |count| {
        for _ in 0..count {
            let sent = sockets[0].send_to(&bursts.next().to_be_bytes(), target);
            sent.expect("the pod's kernel takes datagrams");
        }
    };
    let reordered = thread::scope(|scope| {
        scope.spawn(|| stream.receive(&sockets[1]));
        wait_until(PATIENCE, "workers carry a stream as fast as the pod can send", || {
            send(5000);
            sent_by_workers(&overlay) > before + ANSWERS_MAX
        });
        // The pause is one where the program sees it: a busy machine may hand over what came before
        // in the middle of it.
        wait_until(PATIENCE, "the kernel carries what follows a pause", || {
            thread::sleep(Duration::from_millis(200));
            let ([sent, _], by_workers) = (taken(&overlay, 0), sent_by_workers(&overlay));
            for _ in 0..20 {
                send(1);
                thread::sleep(Duration::from_millis(2));
            }
            comes_true(Duration::from_secs(1), || taken(&overlay, 0)[0] >= sent + 20)
                && sent_by_workers(&overlay) < by_workers + ANSWERS_MAX
        });
        stream.drained.store(true, Ordering::Relaxed);
        stream.reordered.load(Ordering::Relaxed)
    });
    assert_eq!(reordered, 0, "a stream that changed its way was reordered");
}

/// Full packets: a busy machine's programs pass some to workers for a moment.
const HALF_OF_32_MIB: u64 = 32 * MIB / 1472 / 2;

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
    assert!(taken > HALF_OF_32_MIB, "workers had the packets: {taken}");
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

/// Sends `count` datagrams of `segment_bytes` as one super-packet, the way QUIC does.
fn send_batch(socket: &std::net::UdpSocket, target: SocketAddrV4, segment_bytes: u16, count: u16) {
    let bytes = vec![7; usize::from(segment_bytes) * usize::from(count)];
    let message = Datagrams {
        destination: target.into(),
        segment_bytes: Some(segment_bytes),
        spans: [Span::new(0, bytes.len())],
    };
    let mut batch = SendBatch::new(1, 1);
    batch.send(socket.as_fd(), &bytes, once(message)).expect("the pod's kernel takes a batch");
}

#[test]
fn datagrams_of_super_packets_arrive() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    overlay.wait_until_carried();
    let near = udp_socket(&overlay.lab.pods[0], overlay.pod(0));
    let far = udp_socket(&overlay.lab.pods[1], overlay.pod(1));
    far.set_read_timeout(Some(PATIENCE)).expect("a time-out is not zero");
    let target = SocketAddrV4::new(overlay.pod(1), port(&far));
    for segment_bytes in [100, 1200, 1444] {
        for _ in 0..40 {
            send_batch(&near, target, segment_bytes, 10);
            for number in 0..10 {
                let received = uninterrupted(|| far.recv(&mut [0; 2048]));
                let received =
                    received.unwrap_or_else(|error| panic!("datagram {number}: {error}"));
                assert_eq!(received, usize::from(segment_bytes));
            }
        }
    }
}

#[test]
fn flows_of_mixed_sizes_stay_in_order() {
    let flags: &[&str] = &["--fast-path=on", "--workers=1"];
    let overlay = Overlay::start_with(CONFIG, [flags, flags]);
    overlay.wait_until_carried();
    let pods = [0, 1].map(|host| overlay.pod(host));
    let sockets = [0, 1].map(|host| udp_socket(&overlay.lab.pods[host], pods[host]));
    let target = SocketAddr::from((pods[1], port(&sockets[1])));
    let stream = Numbered::default();
    let before = sent_by_workers(&overlay);
    thread::scope(|scope| {
        scope.spawn(|| stream.receive(&sockets[1]));
        let mut bursts = Bursts::default();
        wait_until(PATIENCE, "workers carry a stream as fast as the pod can send", || {
            for number in 0..1000 {
                // Small ones, one that fills a packet, and one that the pod's kernel cuts.
                let bytes = [16, 16, 16, 16, 16, 1400, 16, 2000][number % 8];
                let mut payload = vec![0; bytes];
                payload[..8].copy_from_slice(&bursts.next().to_be_bytes());
                sockets[0].send_to(&payload, target).expect("the pod's kernel takes datagrams");
                if number % 200 == 199 {
                    thread::sleep(Duration::from_millis(2));
                }
            }
            sent_by_workers(&overlay) > before + 4000
        });
        thread::sleep(Duration::from_millis(200));
        stream.drained.store(true, Ordering::Relaxed);
    });
    let received = stream.received.load(Ordering::Relaxed);
    assert_eq!(stream.reordered.load(Ordering::Relaxed), 0, "of {received}");
}

/// Removes the program that takes what a host receives, as another tool may.
fn remove_inward(host: &Namespace) {
    host.exec(&["tc", "filter", "del", "dev", "wire0", "ingress"]);
}

#[test]
fn peers_hear_at_once_that_programs_have_stopped() {
    let kept: &[&str] = &["--fast-path=on", "--keep-tunnel"];
    let overlay = Overlay::start_with(CONFIG, [kept, kept]);
    overlay.wait_until_carried();
    remove_inward(&overlay.lab.hosts[1]);
    let removed = Instant::now();
    wait_until(PATIENCE, "the other side leaves no checksum out any more", || {
        overlay.status(0).0["fast_path"]["peers"] == 0
    });
    // As long as it takes while a device is made again.
    assert!(removed.elapsed() < Duration::from_secs(55), "after {:?}", removed.elapsed());
}

#[test]
fn workers_deliver_super_packets_of_programs() {
    let kept: &[&str] = &["--fast-path=on", "--keep-tunnel"];
    let overlay = Overlay::start_with(CONFIG, [kept, kept]);
    overlay.wait_until_carried();
    let [near, far] = &overlay.lab.pods;
    // Without the store the peer cannot hear that the programs have stopped.
    let subnets = overlay.files().join("store/subnets");
    let away = subnets.with_extension("away");
    std::fs::rename(&subnets, &away).expect("a directory of the test");
    let forwarded = || overlay.status(1).count("ingress", "packets_forwarded");
    remove_inward(&overlay.lab.hosts[1]);
    wait_until(PATIENCE, "the fast path of the receiver is off", || {
        overlay.status(1).0["fast_path"]["on"] == false
    });
    let [before, sent] = [forwarded(), taken(&overlay, 0)[0]];
    tcp_transfer(near, far, overlay.pod(1), 32 * MIB, false);
    assert_eq!(overlay.status(0).0["fast_path"]["peers"], 1, "the sender has heard of it");
    assert!(taken(&overlay, 0)[0] > sent + HALF_OF_32_MIB, "who has sent it?");
    let datagrams = forwarded() - before;
    assert!(datagrams < 32 * MIB / 1472 / 2, "{datagrams} datagrams are no super-packets");
    std::fs::rename(&away, &subnets).expect("a directory of the test");
}

#[test]
fn nexthop_objects_are_followed() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    overlay.wait_until_carried();
    let host = &overlay.lab.hosts[0];
    let [_, peer] = UNDERLAY.map(|address| address.to_string());
    host.exec(&["sysctl", "-qw", "net.ipv4.nexthop_compat_mode=0"]);
    host.exec(&["ip", "nexthop", "add", "id", "7", "dev", "wire0"]);
    host.exec(&["ip", "route", "add", &peer, "nhid", "7"]);
    overlay.wait_until_carried();
    // What the new route has weftd look at is over by then; the next look by itself is far away.
    thread::sleep(Duration::from_secs(3));
    // Such a change is told of no route.
    host.exec(&["ip", "nexthop", "replace", "id", "7", "via", "172.20.0.99", "dev", "wire0"]);
    wait_until(PATIENCE, "the kernel lets go of a peer that is reached otherwise", || {
        overlay.status(0).0["fast_path"]["peers"] == 0
    });
}

#[test]
fn every_length_arrives_over_the_widest_underlay() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    let set_mtu = |namespace: &Namespace, device, bytes: &str| {
        namespace.exec(&["ip", "link", "set", device, "mtu", bytes]);
    };
    for host in 0..2 {
        set_mtu(&overlay.lab.hosts[host], "wire0", "65000");
        set_mtu(&overlay.lab.hosts[host], "pod0", "64972");
        set_mtu(&overlay.lab.pods[host], "eth0", "64972");
    }
    for host in 0..2 {
        wait_until(PATIENCE, "the overlay's MTU follows", || {
            overlay.lab.hosts[host].exec(&["cat", "/sys/class/net/flannel0/mtu"]).trim() == "64972"
        });
    }
    overlay.wait_until_carried();
    let headers = 20 + 8;
    for bytes in [14_000, 15_570, 15_590, 16_020, 16_030, 16_040, 20_000, 64_972] {
        assert!(overlay.lab.ping(0, overlay.pod(1), bytes - headers), "{bytes} bytes are lost");
    }
}

#[test]
fn packets_merged_as_lists_arrive() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    let [near, far] = &overlay.lab.pods;
    // The pod's kernel sends single packets, and the host's merges them without copying (GRO by
    // fraglists).
    near.exec(&["ethtool", "-K", "eth0", "tso", "off", "gso", "off"]);
    overlay.lab.hosts[0].exec(&["ethtool", "-K", "pod0", "gro", "on", "rx-gro-list", "on"]);
    overlay.wait_until_carried();
    let buffers = || received_on(&overlay.lab.hosts[1], "wire0");
    let [before, sent, again] =
        [buffers(), taken(&overlay, 0)[0], kernel_counter(near, "Tcp", "RetransSegs")];
    tcp_transfer(near, far, overlay.pod(1), 32 * MIB, false);
    let sent = taken(&overlay, 0)[0] - sent;
    let again = kernel_counter(near, "Tcp", "RetransSegs") - again;
    println!("{sent} sent in {} buffers, {again} again", buffers() - before);
    assert!(sent > HALF_OF_32_MIB, "workers had the packets: {sent}");
    assert!(again < sent / 100, "{again} of {sent} were lost");
    udp_sizes(near, far, overlay.pod(1), [1, 1444, 5000]);
}
