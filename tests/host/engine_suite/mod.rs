//! A worker over real devices: every offload both ways, what it refuses, whom it tells, and how
//! it ends. The module that includes this says on which engine, by its `OPTIONS`. Needs
//! root, for it makes network
//! namespaces.

mod floods;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use socket2::SockRef;
use weft::device::TunOffload;
use weft::engine::WorkerEnd;
use weft::packet::Span;
use weft::route::Table;
use weft::stats::{DropReason, HostKey, PEERS_COUNTED_MAX};
use weft::sys::udp::{Datagrams, SendBatch};

use crate::support::dataplane::*;
use crate::support::lab::{Namespace, wait_until};
use crate::support::pace::Stopwatch;

/// Sends equal datagrams to the worker as one GSO batch.
fn send_batch(socket: &UdpSocket, datagrams: &[Vec<u8>]) {
    let segment_bytes = datagrams[0].len() as u16;
    let arena = datagrams.concat();
    let spans = [Span::new(0, arena.len())];
    let message = Datagrams { destination: HOST.into(), segment_bytes: Some(segment_bytes), spans };
    let sent = SendBatch::new(1, 1).send(socket.as_fd(), &arena, std::iter::once(message));
    assert_eq!(sent.ok(), Some(1));
}

/// Every way to switch the four offloads.
fn choices() -> impl Iterator<Item = Options> {
    (0..16u8).map(|bits| Options {
        tun: TunOffload { tso: bits & 1 != 0, uso: bits & 2 != 0 },
        gso: bits & 4 != 0,
        gro: bits & 8 != 0,
        ..super::OPTIONS
    })
}

#[test]
fn every_offload_choice_carries_the_same_bytes_out() {
    for options in choices() {
        let host = Host::start(options);
        let pod = host.pod_device();
        let peer = host.outside(PEER);
        let mut sent = Vec::new();
        for mark in 0..40 {
            let packet = marked(POD, FAR, mark, [4, 64, 64, 1200, 1444][mark as usize % 5]);
            pod.write(&packet);
            sent.push(packet);
        }
        for (protocol, segment_bytes) in [(TCP, 1420), (UDP, 1444), (TCP, 100)] {
            let bulk = super_packet(protocol, POD, FAR, 8000, segment_bytes);
            pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
            sent.extend(bulk.segments);
        }
        let got = receive_all(&peer, sent.len());
        assert_eq!(by_flow(&got), by_flow(&after_hops(&sent, HOPS)), "{options:?}");

        let egress = &host.stats.egress;
        host.settle(egress, sent.len() as u64);
        let bytes: usize = sent.iter().map(Vec::len).sum();
        assert_eq!(egress.bytes_received.get(), bytes as u64, "{options:?}");
        assert_eq!(egress.bytes_forwarded.get(), bytes as u64, "{options:?}");
        assert_eq!(drops(egress), [], "{options:?}");
        assert_eq!(host.stats.ingress.packets_received.get(), 0);
        assert_eq!(host.stats.gso_fallbacks.get(), 0);
    }
}

#[test]
fn every_offload_choice_carries_the_same_bytes_in() {
    for options in choices() {
        let host = Host::start(options);
        let pod = host.pod_device();
        let peer = host.outside(PEER);
        let mut sent = Vec::new();
        for mark in 0..40 {
            let packet = marked(FAR, POD, mark, [4, 64, 64, 1200, 1444][mark as usize % 5]);
            peer.send_to(&packet, HOST).unwrap();
            sent.push(packet);
        }
        // A short last segment may begin a batch, and a shorter datagram would then join it and get
        // the next identification, which means nothing with Don't Fragment: so longer ones follow.
        for (protocol, segment_bytes) in [(TCP, 1420), (UDP, 64), (TCP, 300), (UDP, 1444)] {
            let bulk = super_packet(protocol, FAR, POD, 9_000, segment_bytes);
            for batch in bulk.segments.chunks(40) {
                send_batch(&peer, batch);
            }
            sent.extend(bulk.segments);
        }
        let got = pod.read_all(sent.len());
        assert_eq!(by_flow(&got), by_flow(&after_hops(&sent, HOPS)), "{options:?}");

        let ingress = &host.stats.ingress;
        host.settle(ingress, sent.len() as u64);
        let bytes: usize = sent.iter().map(Vec::len).sum();
        assert_eq!(ingress.bytes_received.get(), bytes as u64, "{options:?}");
        assert_eq!(ingress.bytes_forwarded.get(), bytes as u64, "{options:?}");
        assert_eq!(drops(ingress), [], "{options:?}");
        assert_eq!(host.stats.tun_fallbacks.get(), 0);
        assert_eq!(host.stats.egress.packets_received.get(), 0);
        let merges = ingress.writes.get() < ingress.packets_forwarded.get();
        assert_eq!(merges, options.tun.tso || options.tun.uso, "{options:?}");
    }
}

/// A packet of one flow to the pod with this ECN field, and what the pod gets of it, if anything,
/// that arrived in a datagram with the field `outer`.
fn capable(mark: u32, inner: u8, outer: u8) -> (Vec<u8>, Option<Vec<u8>>) {
    let packet = |field: u8| with(marked(FAR, POD, mark, 200), 1, &[0x28 | field]);
    // RFC 6040, section 4.2, figure 4: a row for each inner field, a column for each outer one.
    let figure = [
        [Some(0), Some(0), Some(0), None],
        [Some(1), Some(1), Some(1), Some(3)],
        [Some(2), Some(1), Some(2), Some(3)],
        [Some(3), Some(3), Some(3), Some(3)],
    ];
    (packet(inner), figure[usize::from(inner)][usize::from(outer)].map(packet))
}

#[test]
fn congestion_marks_reach_the_pod() {
    for gro in [true, false] {
        let host = Host::start(Options { gro, ..super::OPTIONS });
        let (pod, peer) = (host.pod_device(), host.outside(PEER));
        let (mut expected, mut sent, mut dropped) = (Vec::new(), 0, 0);
        for outer in 0..4u8 {
            // The DSCP outside is the underlay's.
            SockRef::from(&peer).set_tos_v4(u32::from(0xb8 | outer)).unwrap();
            // The pair that is dropped comes last: where packets are merged across a gap, the
            // kernel numbers them anew (RFC 6864).
            for inner in (0..4u8).rev() {
                let packets: Vec<_> =
                    (sent..sent + 5).map(|mark| capable(mark, inner, outer)).collect();
                sent += 5;
                let batch: Vec<_> = packets.iter().map(|(packet, _)| packet.clone()).collect();
                peer.send_to(&batch[0], HOST).unwrap();
                send_batch(&peer, &batch[1..]);
                let delivered = packets.into_iter().filter_map(|(_, delivered)| delivered);
                let before = expected.len();
                expected.extend(delivered);
                dropped += u64::from(before == expected.len()) * 5;
            }
        }
        assert_eq!(pod.read_all(expected.len()), after_hops(&expected, HOPS), "GRO: {gro}");
        host.settle(&host.stats.ingress, sent.into());
        assert_eq!(drops(&host.stats.ingress), [(DropReason::CongestionMark, dropped)]);
    }
}

/// The kernel merges datagrams of equal type of service only, and says which with each batch.
#[test]
fn datagrams_that_the_kernel_merges_have_one_mark() {
    let host = Host::start(super::OPTIONS);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    // Merged are datagrams with a checksum that arrive within these 50 ms.
    host.peer.exec(&["ethtool", "-K", "wire0", "tx", "off"]);
    host.namespace.exec(&["ethtool", "-K", "wire0", "gro", "on"]);
    for (setting, value) in [("gro_flush_timeout", "50000000"), ("napi_defer_hard_irqs", "5")] {
        let set = format!("echo {value} > /sys/class/net/wire0/{setting}");
        host.namespace.exec(&["sh", "-c", &set]);
    }
    let mut expected = Vec::new();
    for (mark, outer) in (0..).zip([0, 0, 0, 0, 3, 3, 3, 3, 2, 2, 1, 1, 3, 0, 3, 0]) {
        let (packet, delivered) = capable(mark, 2, outer);
        SockRef::from(&peer).set_tos_v4(outer.into()).unwrap();
        peer.send_to(&packet, HOST).unwrap();
        expected.extend(delivered);
    }
    assert_eq!(pod.read_all(16), after_hops(&expected, HOPS));
    host.settle(&host.stats.ingress, 16);
    assert_eq!(drops(&host.stats.ingress), []);
    let reads = host.stats.ingress.reads.get();
    assert!(reads < 16, "the kernel merged nothing: this test shows nothing");
}

/// What a tunnel end must refuse from anybody, with the reason it counts.
fn forged() -> Vec<(Vec<u8>, DropReason)> {
    let packet = || marked(FAR, POD, 7, 64);
    let source = |address: [u8; 4]| with(packet(), 12, &address);
    let destination = |address: [u8; 4]| with(packet(), 16, &address);
    let mut broken = packet();
    broken[10] ^= 1;
    let nested = udp(SocketAddrV4::new(FAR, 9), SocketAddrV4::new(TUN, 8285), &packet());
    vec![
        (Vec::new(), DropReason::Runt),
        (vec![0x45; 19], DropReason::Runt),
        (vec![0x60; 40], DropReason::Ipv6),
        (vec![0x55; 40], DropReason::BadVersion),
        (with(packet(), 0, &[0x44]), DropReason::BadHeaderLength),
        (with(packet(), 2, &[0xff, 0xff]), DropReason::BadTotalLength),
        (with(packet(), 2, &[0, 19]), DropReason::BadTotalLength),
        (broken, DropReason::BadChecksum),
        (with(packet(), 8, &[0]), DropReason::TtlZero),
        (with(packet(), 8, &[1]), DropReason::TtlExpired),
        (source([0, 0, 0, 0]), DropReason::SourceMartian),
        (source([127, 0, 0, 1]), DropReason::SourceMartian),
        (source([169, 254, 1, 1]), DropReason::SourceMartian),
        (source([224, 0, 0, 1]), DropReason::SourceMartian),
        (source([240, 0, 0, 1]), DropReason::SourceMartian),
        (source([255, 255, 255, 255]), DropReason::SourceMartian),
        (source(TUN.octets()), DropReason::SourceMartian),
        (source(HOST.ip().octets()), DropReason::SourceMartian),
        (source([10, 5, 1, 77]), DropReason::SourceIsLocalSubnet),
        (source([10, 5, 3, 9]), DropReason::SourceNotPeerLease),
        (destination([0, 1, 2, 3]), DropReason::DestinationMartian),
        (destination([127, 0, 0, 1]), DropReason::DestinationMartian),
        (destination([241, 0, 0, 1]), DropReason::DestinationMartian),
        (destination([224, 0, 0, 251]), DropReason::DestinationMulticast),
        (destination([255, 255, 255, 255]), DropReason::DestinationMulticast),
        (destination([8, 8, 8, 8]), DropReason::DestinationNotLocal),
        (destination([169, 254, 169, 254]), DropReason::DestinationNotLocal),
        (destination(PEER.ip().octets()), DropReason::DestinationNotLocal),
        (destination(HOST.ip().octets()), DropReason::DestinationNotLocal),
        (destination([10, 5, 3, 9]), DropReason::DestinationNotLocal),
        (nested, DropReason::NestedTunnel),
    ]
}

#[test]
fn forged_packets_spare_honest_ones() {
    for gro in [true, false] {
        let host = Host::start(Options { gro, ..super::OPTIONS });
        let pod = host.pod_device();
        let peer = host.outside(PEER);
        let stranger = host.outside(STRANGER);
        let mut expected = std::collections::BTreeMap::<DropReason, u64>::new();
        let mut honest = Vec::new();
        // First of all: the peer is known to send from its own address.
        for mark in 0..3_100u32 {
            let classes = forged();
            let packet = marked(FAR, POD, mark, 80);
            peer.send_to(&packet, HOST).unwrap();
            honest.push(packet);
            let (bytes, reason) = &classes[mark as usize % classes.len()];
            peer.send_to(bytes, HOST).unwrap();
            *expected.entry(*reason).or_default() += 1;
            // From a stranger, one that claims the peer's address is a spoof, as the peer has
            // proven where it sends from; the order of the checks is that of the reasons.
            let spoof = matches!(reason, DropReason::TtlZero | DropReason::TtlExpired);
            stranger.send_to(bytes, HOST).unwrap();
            let reason = if spoof { DropReason::SourceNotPeerLease } else { *reason };
            // An unproven owner that is not there may be behind a translator.
            let unproven = bytes.get(12..15) == Some(&[10, 5, 3]);
            if unproven {
                honest.push(bytes.clone());
            } else {
                *expected.entry(reason).or_default() += 1;
            }
            if mark % 50 == 49 {
                let taken = u64::from(mark + 1) * 3;
                wait_until(PATIENCE, "the worker keeps up", || {
                    host.stats.ingress.packets_received.get() >= taken
                });
            }
        }
        host.settle(&host.stats.ingress, 3 * 3_100);
        assert_eq!(drops(&host.stats.ingress), expected.into_iter().collect::<Vec<_>>());
        let got = pod.read_all(honest.len());
        assert_eq!(by_flow(&got), by_flow(&after_hops(&honest, HOPS)));
        assert_eq!(pod.read(Duration::from_millis(100)), None, "something else got through");
        // Errors about them go to a proven owner only, and back to the wire for nobody else.
        assert_eq!(host.stats.egress.packets_received.get(), 0);
        stranger.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(stranger.recv(&mut [0; 2048]).is_err(), "the stranger got an answer");
    }
}

#[test]
fn random_datagrams_are_counted_and_honest_pass() {
    let host = Host::start(super::OPTIONS);
    let pod = host.pod_device();
    let peer = host.outside(PEER);
    let mut random = fastrand::Rng::with_seed(0x5eed);
    let mut honest = Vec::new();
    let count = 1_500u32;
    for mark in 0..count {
        let bytes = match mark % 10 {
            0 => 0,
            1 => 65_507,
            2 => random.usize(0..=65_507),
            _ => random.usize(0..=1472),
        };
        let mut noise = vec![0; bytes];
        random.fill(&mut noise);
        // Half of them pass for IPv4 at a first look.
        if mark % 2 == 0 && bytes > 20 {
            noise[0] = 0x45 + random.u8(0..11);
            noise[2..4].copy_from_slice(&(bytes as u16).to_be_bytes());
            if random.bool() {
                noise[12..20].copy_from_slice(&[10, 5, 2, 2, 10, 5, 1, 2]);
                noise = seal(noise);
                // What is valid by chance would be delivered.
                noise[8] = 0;
                noise = seal(noise);
            }
        }
        peer.send_to(&noise, HOST).unwrap();
        let packet = marked(FAR, POD, mark, 100);
        peer.send_to(&packet, HOST).unwrap();
        honest.push(packet);
        if mark % 16 == 15 {
            wait_until(PATIENCE, "the worker keeps up", || {
                host.stats.ingress.packets_received.get() >= u64::from(mark + 1) * 2
            });
        }
    }
    host.settle(&host.stats.ingress, u64::from(count) * 2);
    assert_eq!(host.stats.ingress.drops_total(), u64::from(count));
    assert_eq!(pod.read_all(honest.len()), after_hops(&honest, HOPS));
    assert!(host.ended.try_recv().is_err(), "the worker ended");
}

/// A pod as the container runtime makes it: a namespace on a veth pair.
fn real_pod(host: &Host) -> Namespace {
    let pod = Namespace::new("pod");
    host.namespace.link("cni0", &pod, "eth0", 1472);
    host.namespace.address("cni0", "10.5.1.1/24");
    pod.address("eth0", &format!("{POD}/24"));
    pod.exec(&["ip", "route", "add", "default", "via", "10.5.1.1"]);
    pod
}

/// What `ping` prints about one echo request, whatever its exit status.
fn ping(from: &Namespace, words: &[&str]) -> String {
    let argv = [&["ping", "-n", "-c1", "-W2"], words].concat();
    let output = from.command(&argv).output().expect("ping is installed");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn icmp_errors_arrive_under_any_rp_filter() {
    for rp_filter in ["0", "1", "2"] {
        // A path that has become narrower than the device: the kernel's own check passes.
        let host = Host::start(Options { mtu_bytes: 1400, ..super::OPTIONS });
        let pod = real_pod(&host);
        for which in ["all", "default", "flannel0", "cni0", "wire0"] {
            let setting = format!("net.ipv4.conf.{which}.rp_filter={rp_filter}");
            host.namespace.exec(&["sysctl", "-qw", &setting]);
        }
        let (far, unleased) = (FAR.to_string(), UNLEASED.to_string());
        let underlay = HOST.ip().to_string();
        // (who, TTL that runs out at the worker, further words)
        let processes: [(&str, &Namespace, &str, &[&str]); 3] = [
            ("pod", &pod, "2", &[]),
            ("host", &host.namespace, "1", &[]),
            ("host from its underlay address", &host.namespace, "1", &["-I", &underlay]),
        ];
        for (who, from, ttl, more) in processes {
            let about = format!("{who}, rp_filter {rp_filter}");
            let expired = ping(from, &[more, &["-t", ttl, &far]].concat());
            let from_next = format!("From {} icmp_seq=1 Time to live", next_hop(FAR));
            assert!(expired.contains(&from_next), "{about}: {expired}");
            let unreachable = ping(from, &[more, &[&*unleased]].concat());
            let net = "icmp_seq=1 Destination Net Unreachable";
            assert!(unreachable.contains(net), "{about}: {unreachable}");
            // What an earlier process here has learned would answer in the worker's place.
            from.exec(&["ip", "route", "flush", "cache"]);
            let narrow = ping(from, &[more, &["-M", "do", "-s", "1400", &far]].concat());
            assert!(narrow.contains("mtu = 1400"), "{about}: {narrow}");
            let route = from.exec(&["ip", "route", "get", &far]);
            assert!(route.contains("mtu 1400"), "{about}: the path MTU was not learned: {route}");
        }
        let egress = &host.stats.egress;
        host.settle(egress, 9);
        let expected = [
            (DropReason::TtlExpired, 3),
            (DropReason::NoRoute, 3),
            (DropReason::DontFragmentMtu, 3),
        ];
        assert_eq!(drops(egress), expected, "rp_filter {rp_filter}");
        assert_eq!((egress.icmp_sent.get(), egress.icmp_limited.get()), (9, 0));
    }
}

/// The network address of the subnet that would have been next.
fn next_hop(destination: Ipv4Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(destination.to_bits() & 0xffff_ff00)
}

/// TCP keeps a soft error until it gives up, and then reports it instead of a timeout.
#[test]
fn a_tcp_connect_learns_network_unreachable() {
    let host = Host::start(super::OPTIONS);
    let pod = real_pod(&host);
    pod.exec(&[
        "sysctl",
        "-qw",
        "net.ipv4.tcp_syn_retries=1",
        "net.ipv4.tcp_syn_linear_timeouts=0",
    ]);
    let error = pod.enter(|| TcpStream::connect((UNLEASED, 9)).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
}

#[test]
fn ingress_errors_reach_a_proven_peer() {
    let host = Host::start(super::OPTIONS);
    let _pod = host.pod_device();
    let peer = host.outside(PEER);
    let expired = with(marked(FAR, POD, 1, 64), 8, &[1]);
    peer.send_to(&expired, HOST).unwrap();
    let error = &receive_all(&peer, 1)[0];
    assert_eq!(error[12..20], [TUN.octets(), FAR.octets()].concat());
    assert_eq!((error[20], error[21]), (11, 0));
    assert_eq!(error[28..], expired);
    host.settle(&host.stats.ingress, 1);
    assert_eq!(host.stats.ingress.icmp_sent.get(), 1);
}

/// What keeps a worker busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Idle,
    FromTheNetwork,
    FromThePods,
}

const LOADS: [Load; 3] = [Load::Idle, Load::FromTheNetwork, Load::FromThePods];

/// Runs `work` while the worker is under `load`, which has begun to arrive by then.
fn under_load(host: &mut Host, load: Load, work: impl FnOnce(&mut Host)) {
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let over = AtomicBool::new(false);
    let stats = Arc::clone(&host.stats);
    std::thread::scope(|scope| {
        let direction = match load {
            Load::Idle => None,
            Load::FromTheNetwork => {
                scope.spawn(|| flood_network(&peer, &over));
                Some(&stats.ingress)
            }
            Load::FromThePods => {
                scope.spawn(|| flood_pods(&pod, &over));
                Some(&stats.egress)
            }
        };
        if let Some(direction) = direction {
            wait_until(PATIENCE, "the flood arrives", || direction.packets_received.get() > 1_000);
        }
        // A failure must end the flood, too, or the test would never end.
        let outcome = catch_unwind(AssertUnwindSafe(|| work(host)));
        over.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
    });
    assert_eq!(kernel_helpers(), [""; 0], "{load:?}: operations block, and helpers wait for them");
    // A worker that still runs has the rest of the flood before it.
    for direction in [&stats.ingress, &stats.egress] {
        let what = format!("{load:?}: every packet has an outcome");
        wait_until(PATIENCE, &what, || conserved(direction));
    }
}

/// Threads that the kernel makes for operations of an io_uring that would block.
fn kernel_helpers() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    let names = tasks.filter_map(|task| {
        // A thread may end meanwhile.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with("iou-")).collect()
}

fn flood_network(peer: &UdpSocket, over: &AtomicBool) {
    let batch: Vec<_> = (0..40).map(|mark| marked(FAR, POD, mark, 1000)).collect();
    while !over.load(Ordering::Relaxed) {
        send_batch(peer, &batch);
    }
}

fn flood_pods(pod: &PodDevice, over: &AtomicBool) {
    let packet = marked(POD, FAR, 0, 1000);
    while !over.load(Ordering::Relaxed) {
        pod.write(&packet);
    }
}

#[test]
fn a_deleted_device_ends_its_worker() {
    for load in LOADS {
        let mut host = Host::start(super::OPTIONS);
        under_load(&mut host, load, |host| {
            let start = Stopwatch::start();
            host.namespace.exec(&["ip", "link", "delete", "flannel0"]);
            let (end, _) = host.ended.recv_timeout(PATIENCE).expect("the worker notices");
            assert!(matches!(end, WorkerEnd::TunGone(_)), "{load:?}: {end:?}");
            let took = start.elapsed();
            assert!(took < Duration::from_secs(1), "{load:?}: {took:?}");
        });
    }
}

#[test]
fn a_device_down_costs_no_processor_time() {
    let host = Host::start(super::OPTIONS);
    let pod = host.pod_device();
    let peer = host.outside(PEER);
    host.namespace.exec(&["ip", "link", "set", "flannel0", "down"]);
    for mark in 0..10 {
        peer.send_to(&marked(FAR, POD, mark, 100), HOST).unwrap();
    }
    host.settle(&host.stats.ingress, 10);
    assert_eq!(drops(&host.stats.ingress), [(DropReason::TunWriteFailed, 10)]);
    let sleeps = host.stats.sleeps.get();
    std::thread::sleep(Duration::from_millis(300));
    assert!(host.stats.sleeps.get() <= sleeps + 2, "a worker with nothing to do keeps waking up");

    host.namespace.exec(&["ip", "link", "set", "flannel0", "up"]);
    let packet = marked(FAR, POD, 10, 100);
    peer.send_to(&packet, HOST).unwrap();
    assert_eq!(pod.read_all(1), after_hops(&[packet], HOPS));
    host.settle(&host.stats.ingress, 11);
    assert!(host.ended.try_recv().is_err(), "a device that is down is not gone");
}

#[test]
fn a_worker_stops_at_once() {
    for load in LOADS {
        let mut host = Host::start(super::OPTIONS);
        under_load(&mut host, load, |host| {
            let start = Stopwatch::start();
            drop(host.worker.take());
            let took = start.elapsed();
            // Some milliseconds; a worker that nobody wakes would sleep for ever. The kernel takes
            // an io_uring down in its own time: 213 ms were seen on a busy machine.
            assert!(took < Duration::from_secs(1), "{load:?}: {took:?}");
            let (end, _) = host.ended.try_recv().expect("the end is told before the stop returns");
            assert!(matches!(end, WorkerEnd::Stopped));
        });
        // A program that another test starts holds a copy of each descriptor until its exec.
        wait_until(PATIENCE, "the device goes with its last descriptor", || {
            !host.namespace.succeeds(&["ip", "link", "show", "flannel0"])
        });
    }
}

#[test]
fn a_narrow_interface_gets_single_datagrams() {
    let host = Host::start(super::OPTIONS);
    let pod = host.pod_device();
    let peer = host.outside(PEER);
    host.namespace.exec(&["ip", "link", "set", "wire0", "mtu", "1000"]);
    for round in 1..=3u64 {
        let bulk = super_packet(TCP, POD, FAR, 14_200, 1420);
        pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
        let got = receive_all(&peer, bulk.segments.len());
        assert_eq!(got, after_hops(&bulk.segments, HOPS), "round {round}");
        host.settle(&host.stats.egress, round * 10);
        wait_until(PATIENCE, "it is counted", || host.stats.gso_fallbacks.get() > 0);
        assert_eq!(host.stats.gso_fallbacks.get(), 1, "the destination was not remembered");
    }
    assert_eq!(drops(&host.stats.egress), []);
}

#[test]
fn a_narrow_interface_carries_fragments() {
    let host = Host::start(super::OPTIONS);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    host.namespace.exec(&["ip", "link", "set", "wire0", "mtu", "1000"]);
    // Of two lengths, so that no batch forms.
    let packets: Vec<_> = (0..20).map(|n| marked(POD, FAR, n, 1200 + n as usize % 2)).collect();
    packets.iter().for_each(|packet| pod.write(packet));
    assert_eq!(
        receive_all(&peer, 20),
        after_hops(&packets, HOPS),
        "a narrow interface loses packets"
    );
    host.settle(&host.stats.egress, 20);
    assert_eq!(drops(&host.stats.egress), []);
}

#[test]
fn an_unreachable_peer_costs_its_own_packets_only() {
    let host = Host::start(super::OPTIONS);
    let pod = host.pod_device();
    let peer = host.outside(PEER);
    host.namespace.exec(&["ip", "route", "add", "unreachable", "172.20.0.3/32"]);
    let mut honest = Vec::new();
    for mark in 0..20 {
        pod.write(&marked(POD, Ipv4Addr::new(10, 5, 3, 1), mark, 64));
        honest.push(marked(POD, FAR, mark, 64));
        pod.write(&honest[honest.len() - 1]);
    }
    assert_eq!(receive_all(&peer, 20), after_hops(&honest, HOPS));
    host.settle(&host.stats.egress, 40);
    assert_eq!(drops(&host.stats.egress), [(DropReason::SendUnreachable, 20)]);
}

#[test]
fn a_withdrawn_route_gets_no_packet_later() {
    let mut host = Host::start(super::OPTIONS);
    under_load(&mut host, Load::FromThePods, |host| {
        let egress = &host.stats.egress;
        let counts = || (egress.packets_forwarded.get(), egress.packets_received.get());
        // More than a turn takes.
        let flood_goes_on = || {
            let received = counts().1;
            wait_until(PATIENCE, "the flood goes on", || counts().1 > received + 1_000);
        };
        host.routes.table.publish(Table::build(Vec::new()));
        flood_goes_on();
        let forwarded = counts().0;
        flood_goes_on();
        assert_eq!(counts().0, forwarded, "packets go to a peer whose route is gone");
        host.routes.table.publish(table());
        flood_goes_on();
        let forwarded = counts().0;
        flood_goes_on();
        assert!(counts().0 > forwarded, "the route is still gone");
    });
}

#[test]
fn a_firewall_costs_only_its_packets() {
    let host = Host::start(super::OPTIONS);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let nft = |words: &str| {
        let argv: Vec<_> = ["nft"].into_iter().chain(words.split(' ')).collect();
        host.namespace.exec(&argv)
    };
    nft("add table inet wall");
    nft("add chain inet wall out { type filter hook output priority 0 ; }");
    nft("add rule inet wall out udp dport 8285 drop");
    let bulk = super_packet(UDP, POD, FAR, 14_300, 1420);
    pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
    for mark in 0..40 {
        pod.write(&marked(POD, FAR, mark, 64));
    }
    host.settle(&host.stats.egress, 51);
    assert_eq!(drops(&host.stats.egress), [(DropReason::SendForbidden, 51)]);
    assert_eq!(host.stats.gso_fallbacks.get(), 0, "the batch was not at fault");
    nft("delete table inet wall");
    pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
    assert_eq!(receive_all(&peer, 11), after_hops(&bulk.segments, HOPS));
}

#[test]
fn a_card_without_checksums_gets_single_datagrams() {
    let host = Host::start(super::OPTIONS);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    host.namespace.exec(&["ethtool", "-K", "wire0", "tx", "off"]);
    for round in 1..=3u64 {
        let bulk = super_packet(TCP, POD, FAR, 14_200, 1420);
        pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
        let got = receive_all(&peer, bulk.segments.len());
        assert_eq!(got, after_hops(&bulk.segments, HOPS), "round {round}");
        host.settle(&host.stats.egress, round * 10);
        // Kernels before 6.11 refuse the batch, once if that is remembered; later ones sum.
        assert!(host.stats.gso_fallbacks.get() <= 1, "the destination was not remembered");
    }
    assert_eq!(drops(&host.stats.egress), []);
}

/// Leaves the peer no place among the worker's counts. A peer that is not counted is never taken
/// for one that is down, so that the send buffer alone decides what is dropped.
fn leave_uncounted(host: &Host) {
    let others = (0..4 * PEERS_COUNTED_MAX as u32).map(|number| {
        // Of other networks than the lab's.
        HostKey::from(Ipv4Addr::from_bits(0x0a80_0000 + number))
    });
    others.for_each(|other| host.stats.by_peer.received(other, 0, 0, || Some(other)));
}

/// A card so slow that a busy machine fills the buffer sooner than it sends, a socket with room for
/// a dozen packets, and bursts of many more.
#[test]
fn a_full_send_buffer_keeps_the_order() {
    let options = Options { send_buffer_bytes: Some(16 << 10), gso: false, ..super::OPTIONS };
    let host = Host::start(options);
    leave_uncounted(&host);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let limit = "tc qdisc add dev wire0 root tbf rate 2mbit burst 3kb limit 4mb";
    host.namespace.exec(&limit.split(' ').collect::<Vec<_>>());
    let bursts = 5u64;
    for burst in 0..bursts {
        for mark in 0..100 {
            pod.write(&marked(POD, FAR, burst as u32 * 100 + mark, 1000));
        }
        host.settle(&host.stats.egress, (burst + 1) * 100);
    }
    let egress = &host.stats.egress;
    let forwarded = egress.packets_forwarded.get();
    assert_eq!(drops(egress), [(DropReason::SendBufferFull, bursts * 100 - forwarded)]);
    let got = receive_all(&peer, forwarded as usize);
    let marks: Vec<_> =
        got.iter().map(|packet| u16::from_be_bytes([packet[4], packet[5]])).collect();
    println!("{forwarded} of {} fitted", bursts * 100);
    assert!(marks.is_sorted(), "reordered: {marks:?}");
}

/// The card is too narrow for a GSO batch, not for the short datagram behind it. Both are of one
/// flow and of one read.
#[test]
fn a_refused_batch_stays_ahead_of_shorter_datagrams() {
    let host = Host::start(super::OPTIONS);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    host.namespace.exec(&["ip", "link", "set", "wire0", "mtu", "400"]);
    let bulk = super_packet(TCP, POD, FAR, 128 * 400 + 10, 400);
    pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
    let got = receive_all(&peer, bulk.segments.len());
    assert!(got == after_hops(&bulk.segments, HOPS), "a flow is reordered");
    host.settle(&host.stats.egress, 129);
    assert_eq!(drops(&host.stats.egress), []);
}

/// Datagrams that a worker receives in one turn (`BATCH_PACKETS` in src/engine/io.rs).
const TURN_DATAGRAMS_MAX: u64 = 64;

/// The uplink takes a kilobyte a second and pods send all the time, so the worker always has
/// packets that it can't send. A worker that waits for them each turn reads from the TUN device
/// once for each batch of datagrams.
#[test]
fn a_blocked_uplink_does_not_hold_up_receiving() {
    let options = Options { send_buffer_bytes: Some(16 << 10), gso: false, ..super::OPTIONS };
    let host = Host::start(options);
    leave_uncounted(&host);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let limit = "tc qdisc add dev wire0 root tbf rate 8kbit burst 3kb limit 4mb";
    host.namespace.exec(&limit.split(' ').collect::<Vec<_>>());
    let (egress, ingress) = (&host.stats.egress, &host.stats.ingress);
    let (outward, inward) = (marked(POD, FAR, 0, 1000), marked(FAR, POD, 0, 64));
    wait_until(PATIENCE, "the uplink is full", || {
        (0..500).for_each(|_| pod.write(&outward));
        egress.drops(DropReason::SendBufferFull) > 0
    });
    let watch = Stopwatch::start();
    let counts = || (egress.reads.get(), ingress.reads.get());
    let mut last_read = counts();
    loop {
        pod.write(&outward);
        peer.send_to(&inward, HOST).expect("the wire is up");
        let now = counts();
        if now.0 != last_read.0 {
            last_read = now;
        } else if now.1 - last_read.1 > TURN_DATAGRAMS_MAX {
            break;
        }
        assert!(!watch.is_over(PATIENCE), "receiving waits for the uplink");
    }
    for direction in [egress, ingress] {
        wait_until(PATIENCE, "every packet has an outcome", || conserved(direction));
    }
    // A sender that fills the socket faster than a busy worker empties it loses packets there.
    let is_shed = |reason| reason == DropReason::ReceiveOverload;
    assert!(drops(ingress).into_iter().all(|(reason, _)| is_shed(reason)), "{:?}", drops(ingress));
    // The worker may still be at what the device has queued, so the counts move.
    let reasons: Vec<_> = drops(egress).into_iter().map(|(reason, _)| reason).collect();
    assert_eq!(reasons, [DropReason::SendBufferFull]);
}

#[test]
fn unsent_packets_of_an_ended_worker_count() {
    let options = Options { send_buffer_bytes: Some(16 << 10), ..super::OPTIONS };
    let mut host = Host::start(options);
    leave_uncounted(&host);
    let pod = host.pod_device();
    let limit = "tc qdisc add dev wire0 root tbf rate 8kbit burst 3kb limit 4mb";
    host.namespace.exec(&limit.split(' ').collect::<Vec<_>>());
    let egress = Arc::clone(&host.stats);
    let bulk = super_packet(TCP, POD, FAR, 60_000, 100);
    wait_until(PATIENCE, "the uplink is full", || {
        pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
        egress.egress.drops(DropReason::SendBufferFull) > 0
    });
    (0..50).for_each(|_| pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet));
    drop(host.worker.take());
    assert!(conserved(&egress.egress), "packets vanished: {:?}", drops(&egress.egress));
}
