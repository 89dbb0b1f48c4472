//! Two weftd on one store carry traffic between pods, also after an operator, another program or a
//! crash damaged a host.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::lab::{LEASE_TIMEOUT, SubnetEnv, UNDERLAY, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::pace::repair_limit;
use crate::support::status::Status;
use crate::support::traffic::{
    Numbered, kernel_counter, port, tcp_transfer, udp_sizes, udp_socket,
};

/// Longest time that a repair may take.
fn repair_max() -> Duration {
    repair_limit(Duration::from_secs(1))
}

/// Longest time that a stop may take.
const STOP: Duration = Duration::from_secs(1);

const MTU: usize = 1472;
const UDP_OVERHEAD: usize = 28;

/// Each number up to `limit` that is a boundary of something, and a walk in between.
fn sizes_up_to(limit: usize) -> impl Iterator<Item = usize> {
    let edges = [1, 2, 7, 8, 9, 511, 512, 513, 1023, 1024, 1025];
    let last = [limit - 3, limit - 2, limit - 1, limit];
    edges.into_iter().chain((20..limit).step_by(97)).chain(last).filter(move |size| *size <= limit)
}

#[test]
fn pods_talk_over_icmp_udp_and_tcp() {
    // The kernel's veth queues packets per processor: a task that migrates between two sends
    // reorders its own flow, before and after weftd, which this test could not tell from weftd's
    // doing. All children inherit the one processor.
    let mut one = rustix::thread::CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &one).expect("the running processor may be chosen");
    // Each direction leaves by one engine and arrives by the other.
    let overlay = Overlay::start_with(CONFIG, [&["--engine=mmsg"], &["--engine=io_uring"]]);
    let [near, far] = &overlay.lab.pods;
    for (from, to) in [(0, 1), (1, 0)] {
        for size in [0, 56, 1000, 1444] {
            assert!(
                overlay.lab.ping(from, overlay.pod(to), size),
                "ping of {size} from pod {from}"
            );
        }
        // A full packet may not be cut, and one byte more does not fit.
        assert!(!overlay.lab.ping(from, overlay.pod(to), 1445), "1473 bytes with DF crossed");
    }
    udp_sizes(near, far, overlay.pod(1), sizes_up_to(MTU - UDP_OVERHEAD));
    udp_sizes(far, near, overlay.pod(0), [1, 1444]);
    // The pods' kernels cut these into fragments.
    udp_sizes(near, far, overlay.pod(1), [1445, 2000, 2916, 2917, 4096, 9000, 16_000, 20_000]);
    let before = [0, 1].map(|pod| ofo_queued(&overlay, pod));
    tcp_transfer(near, far, overlay.pod(1), 64 << 20, false);
    tcp_transfer(near, far, overlay.pod(1), 48 << 20, true);
    let retransmitted = [0, 1].map(|pod| retransmits(&overlay, pod));
    let after = [0, 1].map(|pod| ofo_queued(&overlay, pod));
    if retransmitted == [0, 0] {
        assert_eq!(before, after, "TCP segments of one flow arrive out of order, without any loss");
    }
    println!("out of order {before:?} to {after:?}, retransmits {retransmitted:?}");
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

fn ofo_queued(overlay: &Overlay, pod: usize) -> u64 {
    kernel_counter(&overlay.lab.pods[pod], "TcpExt", "TCPOFOQueue")
}

fn retransmits(overlay: &Overlay, pod: usize) -> u64 {
    kernel_counter(&overlay.lab.pods[pod], "Tcp", "RetransSegs")
}

#[test]
fn subnet_file_is_exactly_as_container_runtimes_expect() {
    let overlay = Overlay::start();
    for (host, lease) in overlay.leases.iter().enumerate() {
        let (network, gateway) = (lease.network(), lease.gateway());
        assert_eq!(network.octets()[..2], [10, 5], "the lease is outside the network");
        assert_eq!(network.octets()[3], 0, "the lease is no /24");
        assert_eq!(gateway.to_bits(), network.to_bits() + 1);
        let text = std::fs::read_to_string(overlay.dir(host).join("subnet.env")).unwrap();
        let expected = format!(
            "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET={gateway}/24\nFLANNEL_MTU=1472\n\
             FLANNEL_IPMASQ=false\n"
        );
        assert_eq!(text, expected, "subnet.env of host {host}");
        let key = format!("store/subnets/{network}-24");
        let value = std::fs::read_to_string(overlay.files().join(key)).unwrap();
        let start = format!(r#"{{"PublicIP":"{}","PublicIPv6":null"#, UNDERLAY[host]);
        assert!(value.starts_with(&start), "the lease file holds {value}");
        let device = overlay.lab.hosts[host].exec(&["ip", "-o", "address", "show", "flannel0"]);
        assert!(device.contains(&format!("inet {network}/32")), "flannel0 has {device}");
        let link = overlay.lab.hosts[host].exec(&["ip", "-o", "link", "show", "flannel0"]);
        assert!(link.contains("mtu 1472"), "flannel0 is {link}");
        let route = overlay.lab.hosts[host].exec(&["ip", "route", "show", "10.5.0.0/16"]);
        assert!(route.contains("dev flannel0"), "the route is {route}");
    }
    assert_ne!(overlay.leases[0], overlay.leases[1]);
}

#[test]
fn every_choice_of_offloads_carries_traffic() {
    for choice in ["none", "tso", "uso", "gso", "gro", "uso,gso,gro", "tso,gso,gro", "tso,uso,gro"]
    {
        let flag = format!("--offload={choice}");
        // The other side has all: each must understand the other.
        let overlay =
            Overlay::start_with(CONFIG, [&[&flag, "--engine=io_uring"], &["--engine=mmsg"]]);
        let described = overlay.status(0).0["dataplane"].as_str().unwrap().to_owned();
        for name in ["tso", "uso", "gso", "gro"] {
            let off = described.contains(&format!("{name} off"));
            let chosen = choice.contains(name);
            assert!(off || chosen, "--offload={choice} gives: {described}");
            // Kernels before 6.2 have no USO, and it is left out where it is broken.
            assert!(!off || !chosen || name == "uso", "--offload={choice} gives: {described}");
        }
        let [near, far] = &overlay.lab.pods;
        assert!(overlay.lab.ping(0, overlay.pod(1), 1444), "ping with --offload={choice}");
        udp_sizes(near, far, overlay.pod(1), [1, 512, 1443, 1444, 3000]);
        tcp_transfer(near, far, overlay.pod(1), 8 << 20, true);
        for host in 0..2 {
            Status::settled(&overlay.dir(host));
        }
    }
}

#[test]
fn killed_daemon_recovers_subnet_and_traffic() {
    let mut overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    overlay.daemons[0].stop(Signal::KILL, STOP);
    let started = Instant::now();
    overlay.restart(0, &[]);
    overlay.traffic_resumes(LEASE_TIMEOUT, "kill -9 and a new start");
    println!("traffic resumed {:?} after the new start", started.elapsed());
    let lease = SubnetEnv::read(&overlay.dir(0).join("subnet.env")).unwrap();
    assert_eq!(lease, overlay.leases[0], "the restarted daemon has another subnet");
}

#[test]
fn stop_under_load_is_quick_keeps_restart_state() {
    let mut overlay = Overlay::start();
    let far = udp_socket(&overlay.lab.pods[1], overlay.pod(1));
    let near = udp_socket(&overlay.lab.pods[0], overlay.pod(0));
    let target = SocketAddr::from((overlay.pod(1), port(&far)));
    let load = Numbered::default();
    let (status, took) = thread::scope(|scope| {
        scope.spawn(|| load.send(&near, target, 20_000));
        scope.spawn(|| load.receive(&far));
        wait_until(Duration::from_secs(5), "the load arrives", || {
            load.received.load(Ordering::Relaxed) > 1000
        });
        let started = Instant::now();
        let status = overlay.daemons[0].stop(Signal::TERM, STOP);
        let took = started.elapsed();
        load.stop.store(true, Ordering::Relaxed);
        load.drained.store(true, Ordering::Relaxed);
        (status, took)
    });
    println!("stopped in {took:?}");
    assert_eq!(status.code(), Some(0), "SIGTERM must end weftd cleanly");
    let log = overlay.daemons[0].output();
    assert!(log.contains("Exiting cleanly..."), "{log}");
    let lease = SubnetEnv::read(&overlay.dir(0).join("subnet.env")).unwrap();
    assert_eq!(lease, overlay.leases[0], "subnet.env changed at the stop");
    let key = format!("store/subnets/{}-24", overlay.leases[0].network());
    assert!(overlay.files().join(key).exists(), "the stop gave the lease away");
    let host = &overlay.lab.hosts[0];
    assert!(!host.succeeds(&["ip", "link", "show", "flannel0"]), "flannel0 stays without weftd");
    // Nothing of the stopped one hinders the next.
    overlay.restart(0, &[]);
    overlay.traffic_resumes(LEASE_TIMEOUT, "a stop and a new start");
}

#[test]
fn host_damage_is_repaired_within_a_second() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let network = overlay.leases[0].network();
    let address = format!("{network}/32");
    let attacks: [(&str, Vec<&str>); 4] = [
        ("the device was deleted", vec!["link", "delete", "flannel0"]),
        ("the link was set down", vec!["link", "set", "flannel0", "down"]),
        ("the route was removed", vec!["route", "delete", "10.5.0.0/16", "dev", "flannel0"]),
        ("the address was removed", vec!["address", "delete", &address, "dev", "flannel0"]),
    ];
    for round in 0..2 {
        for (what, words) in &attacks {
            let mut argv = vec!["ip"];
            argv.extend(words);
            overlay.lab.hosts[0].exec(&argv);
            let started = Instant::now();
            wait_until(repair_max(), &format!("weftd repairs that {what}"), || is_whole(&overlay));
            let repaired = started.elapsed();
            let resumed = overlay.traffic_resumes(repair_max(), what);
            println!("round {round}, {what}: repaired in {repaired:?}, traffic {resumed:?} later");
        }
    }
    let [near, far] = &overlay.lab.pods;
    tcp_transfer(near, far, overlay.pod(1), 4 << 20, true);
}

fn is_whole(overlay: &Overlay) -> bool {
    let host = &overlay.lab.hosts[0];
    let output = |argv: &[&str]| {
        let output = host.command(argv).output().expect("ip runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let address = format!("inet {}/32", overlay.leases[0].network());
    output(&["ip", "-o", "address", "show", "flannel0"]).contains(&address)
        && output(&["ip", "-o", "link", "show", "flannel0"]).contains(",UP,")
        && output(&["ip", "route", "show", "10.5.0.0/16"]).contains("dev flannel0")
}

#[test]
fn foreign_route_to_network_refuses_by_name() {
    let mut overlay = Overlay::start();
    overlay.daemons[0].stop(Signal::TERM, STOP);
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "route", "add", "10.5.0.0/16", "via", "172.20.0.77", "dev", "wire0"]);
    overlay.restart(0, &[]);
    let status = overlay.daemons[0].wait(Duration::from_secs(10));
    let log = overlay.daemons[0].output();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(
        overlay.daemons[0].complaints("10.5.0.0/16 via 172.20.0.77 dev wire0") > 0,
        "the operator cannot tell which route is in the way: {log}"
    );
    let route = overlay.lab.hosts[0].exec(&["ip", "route", "show", "10.5.0.0/16"]);
    assert!(route.contains("via 172.20.0.77"), "weftd touched somebody else's route: {route}");
    // One that loses against weftd's own, such as a static route for when the overlay is away.
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "route", "del", "10.5.0.0/16"]);
    let loser = ["10.5.0.0/16", "via", "172.20.0.77", "dev", "wire0", "metric", "100"];
    host.exec(&[&["ip", "route", "add"], &loser[..]].concat());
    overlay.restart(0, &[]);
    overlay.traffic_resumes(Duration::from_secs(10), "a start beside a route that loses");
}

#[test]
fn foreign_route_does_not_prevent_device_repair() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let host = &overlay.lab.hosts[0];
    // A worse metric than ours: it gets the traffic only while the device is gone.
    let foreign = ["10.5.0.0/16", "via", "172.20.0.77", "dev", "wire0", "metric", "100"];
    host.exec(&[&["ip", "route", "add"], &foreign[..]].concat());
    host.exec(&["ip", "link", "delete", "flannel0"]);
    wait_until(repair_max(), "weftd makes the device again beside a foreign route", || {
        is_whole(&overlay)
    });
    overlay.traffic_resumes(repair_max(), "the device was deleted beside a foreign route");
    let log = overlay.daemons[0].output();
    assert!(!log.contains("172.20.0.77"), "it takes nothing from the overlay: {log}");
    let routes = host.exec(&["ip", "route", "show", "10.5.0.0/16"]);
    assert!(routes.contains("via 172.20.0.77"), "weftd touched somebody else's route: {routes}");
}

#[test]
fn backend_mtu_lowers_and_never_raises() {
    let config = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp","MTU":1300}}"#;
    let mut overlay = Overlay::start_with(config, [&[], &[]]);
    assert_eq!(overlay.leases.each_ref().map(|lease| lease.mtu_bytes), [1300, 1300]);
    assert!(overlay.lab.ping(0, overlay.pod(1), 1272));
    let [near, far] = &overlay.lab.pods;
    tcp_transfer(near, far, overlay.pod(1), 4 << 20, true);
    udp_sizes(near, far, overlay.pod(1), [1272, 1273, 5000]);
    overlay.daemons[0].stop(Signal::TERM, STOP);
    let config = config.replace("1300", "1473");
    std::fs::write(overlay.files().join("store/config"), config).unwrap();
    overlay.restart(0, &[]);
    let status = overlay.daemons[0].wait(Duration::from_secs(10));
    let log = overlay.daemons[0].output();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("Backend.MTU is 1473") && log.contains("1472"), "{log}");
}

#[test]
fn icmp_errors_reach_pod_with_default_sysctls() {
    let overlay = Overlay::start();
    let pod = &overlay.lab.pods[0];
    let ping = |argv: &[&str]| {
        let output = pod.command(argv).output().expect("ping runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // A subnet that nobody has leased.
    let free = (1..255).map(|third| Ipv4Addr::new(10, 5, third, 9)).find(|address| {
        let taken = |lease: &SubnetEnv| lease.network().octets()[2] == address.octets()[2];
        !overlay.leases.iter().any(taken)
    });
    let unleased = free.unwrap().to_string();
    let answer = ping(&["ping", "-c2", "-W10", "-i0.2", &unleased]);
    assert!(answer.contains("Destination Net Unreachable"), "{unleased}: {answer}");
    // The daemon on the host of the pod is hop 2: the pod's host is 1, the other host 3 and its
    // pod comes after.
    let far = overlay.pod(1).to_string();
    for ttl in ["2", "3"] {
        let answer = ping(&["ping", "-c1", "-W10", "-t", ttl, &far]);
        assert!(answer.contains("Time to live exceeded"), "TTL {ttl}: {answer}");
    }
    let trace = pod.exec(&["traceroute", "-n", "-q1", "-w10", "-m8", &far]);
    println!("{trace}");
    let hops: Vec<&str> =
        trace.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(hops.first().copied(), Some(overlay.leases[0].gateway().to_string().as_str()));
    assert_eq!(hops.last().copied(), Some(far.as_str()), "traceroute does not arrive: {trace}");
    assert!(!hops.contains(&"*"), "a hop of the overlay is silent: {trace}");
    // A ping over the whole way loses two at the hosts and two at the daemons.
    let answer = ping(&["ping", "-c1", "-W10", &far]);
    assert!(answer.contains("ttl=60"), "{answer}");
    let counted = overlay.status(0);
    assert_eq!(counted.drops("egress", "no-route"), 2, "{}", counted.0);
    // The host itself gets the error, too.
    let output =
        overlay.lab.hosts[0].command(&["ping", "-c1", "-W10", &unleased]).output().unwrap();
    let answer = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(answer.contains("Destination Net Unreachable"), "from the host: {answer}");
}

#[test]
fn status_counts_every_ping_exactly() {
    const PINGS: u64 = 200;
    let overlay = Overlay::start_with(CONFIG, [&["--engine=mmsg"], &["--engine=mmsg"]]);
    // Router solicitations of the kernel come right after the start.
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let far = overlay.pod(1).to_string();
    let count = PINGS.to_string();
    let pod = &overlay.lab.pods[0];
    // weftd's own echoes to a peer in use are packets of 84 bytes, and may fall among the pings.
    let is_exact = |[received, forwarded, bytes]: &[u64; 3]| {
        let echoes = forwarded.saturating_sub(PINGS);
        received == forwarded && *forwarded >= PINGS && *bytes == PINGS * 128 + echoes * 84
    };
    // A status may be read while a packet of somebody's is half counted.
    let (mut after, mut counted) = (settled(&overlay), Vec::<[[[u64; 3]; 2]; 2]>::new());
    while !counted.last().is_some_and(|both| both.as_flattened().iter().all(is_exact)) {
        assert!(counted.len() < 10, "{PINGS} pings were counted as {counted:?}");
        let before = after;
        pod.exec(&["ping", "-q", "-c", &count, "-i0.002", "-s100", "-W2", &far]);
        after = settled(&overlay);
        counted.push([0, 1].map(|host| forwarded(&before[host], &after[host])));
    }
    let socket = overlay.dir(0).join("weft.sock");
    let weft = |what: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_weft"));
        let output = command.args([what, "--socket"]).arg(&socket).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let mut screen = String::new();
    // An echo may come between two looks.
    wait_until(Duration::from_secs(10), "status and metrics show what was forwarded", || {
        let forwarded = settled(&overlay)[0].count("egress", "packets_forwarded");
        let sample =
            format!("flannel_packets_forwarded_total{{direction=\"egress\"}} {forwarded}\n");
        screen = weft("status");
        screen.contains(&format!("{forwarded} packets,")) && weft("metrics").contains(&sample)
    });
    println!("{screen}");
    let lease = &overlay.leases;
    for text in [
        format!("{}/24 of 10.5.0.0/16, public address {}", lease[0].network(), UNDERLAY[0]),
        "peers      1: 1 ".to_owned(),
        "flannel0 mtu 1472 over wire0 at 172.20.0.1:8285: engine mmsg".to_owned(),
    ] {
        assert!(screen.contains(&text), "`weft status` does not show {text:?}: {screen}");
    }
}

fn settled(overlay: &Overlay) -> [Status; 2] {
    [0, 1].map(|host| Status::settled(&overlay.dir(host)))
}

/// For egress and ingress, whether workers or the kernel's programs had them: packets received
/// that are not IPv6, packets and bytes forwarded.
fn forwarded(before: &Status, after: &Status) -> [[u64; 3]; 2] {
    [("egress", "sent"), ("ingress", "received")].map(|(direction, taken)| {
        let carried = |status: &Status, name: &str| {
            let what = name.split_once('_').expect("WHAT_DONE").0;
            let taken = &status.0["fast_path"][format!("{what}_{taken}")];
            status.count(direction, name) + taken.as_u64().expect("the count is there")
        };
        let delta = |name| carried(after, name) - carried(before, name);
        let ipv6 = after.drops(direction, "ipv6") - before.drops(direction, "ipv6");
        [delta("packets_received") - ipv6, delta("packets_forwarded"), delta("bytes_forwarded")]
    })
}

#[test]
fn drops_of_the_kernel_are_shown() {
    const PLACES: u64 = 2;
    const PINGS: u64 = 20;
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &[]]);
    assert!(overlay.lab.ping(0, overlay.pod(1), 56));
    let places = PLACES.to_string();
    overlay.lab.hosts[0].exec(&["ip", "link", "set", "flannel0", "txqueuelen", &places]);
    let dropped = |overlay: &Overlay| {
        overlay.status(0).0["device_drops"]["flannel0"]["egress"].as_u64().expect("a number")
    };
    let before = dropped(&overlay);
    overlay.daemons[0].signal(Signal::STOP);
    // A thread goes on until it meets the signal, and may take a packet.
    wait_until(Duration::from_secs(5), "each of its threads has stopped", || {
        let threads = format!("/proc/{}/task", overlay.daemons[0].pid().as_raw_nonzero());
        let threads = std::fs::read_dir(threads).expect("it is there").flatten();
        threads.map(|it| std::fs::read_to_string(it.path().join("stat"))).all(|stat| {
            stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|it| it.starts_with(" T")))
        })
    });
    let far = overlay.pod(1).to_string();
    overlay.lab.pods[0].succeeds(&["ping", "-q", "-c20", "-i0.01", "-W0.1", &far]);
    overlay.daemons[0].signal(Signal::CONT);
    let lost = dropped(&overlay) - before;
    assert!(lost >= PINGS - PLACES, "{lost} of {PINGS} packets for a stopped weftd are shown");
    assert!(overlay.status(0).0["device_drops"]["wire0"].is_object(), "and of the interface");
}

#[test]
fn half_of_peak_loses_and_reorders_nothing() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    stream_is_whole(&overlay);
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    // The change from workers to kernel may reorder a flow once.
    overlay.wait_until_carried();
    stream_is_whole(&overlay);
}

fn stream_is_whole(overlay: &Overlay) {
    const PACKETS: u64 = 50_000;
    overlay.lab.steer_by_flow();
    // Half of what the kernel queues for a processor that does not get to it
    // (net.core.netdev_max_backlog): beyond that, a busy machine loses packets on its own.
    const IN_FLIGHT_MAX: u64 = 500;
    let far = udp_socket(&overlay.lab.pods[1], overlay.pod(1));
    let near = udp_socket(&overlay.lab.pods[0], overlay.pod(0));
    let target = SocketAddr::from((overlay.pod(1), port(&far)));
    let load = Numbered { in_flight_max: Some(IN_FLIGHT_MAX), ..Numbered::default() };
    thread::scope(|scope| {
        scope.spawn(|| load.receive(&far));
        // Far below what a debug build carries; the rate at which it breaks is the benchmark's. A
        // busy machine takes longer for as many.
        let sender = scope.spawn(|| load.send(&near, target, 10_000));
        wait_until(Duration::from_secs(120), "the sender has sent its packets", || {
            load.sent.load(Ordering::Relaxed) >= PACKETS
        });
        load.stop.store(true, Ordering::Relaxed);
        sender.join().expect("the sender does not panic");
        comes_true(Duration::from_secs(2), || load.missing() == 0);
        load.drained.store(true, Ordering::Relaxed);
    });
    let sent = load.sent.load(Ordering::Relaxed);
    assert_eq!(load.missing(), 0, "of {sent} packets");
    assert_eq!(load.reordered.load(Ordering::Relaxed), 0, "packets of one flow change places");
}

#[test]
fn second_device_is_its_own_overlay() {
    let mut overlay = Overlay::start();
    // Another network on the same host: its own store, file, port and device.
    let files = tempfile::tempdir().unwrap();
    let config = r#"{"Network":"10.9.0.0/16","Backend":{"Type":"udp","Port":8286}}"#;
    let store = crate::support::overlay::local_store(files.path(), config);
    let dir = files.path().join("second");
    let mut second = overlay.lab.weftd(0, &dir, &[&store]);
    SubnetEnv::wait(&dir.join("subnet.env"), &mut second);
    let host = &overlay.lab.hosts[0];
    assert!(host.succeeds(&["ip", "link", "show", "flannel1"]), "{}", second.output());
    assert!(overlay.lab.ping(0, overlay.pod(1), 56), "the first overlay stopped working");
    assert!(overlay.daemons[0].ended().is_none());
    assert!(Status::try_of(&dir).is_some());
    // A third one on the same port cannot work, and says which port.
    let third = files.path().join("third");
    let config = config.replace("10.9.", "10.10.");
    let store = crate::support::overlay::local_store(&third, &config);
    let mut third = overlay.lab.weftd(0, &third, &[&store]);
    assert_eq!(third.wait(Duration::from_secs(10)).code(), Some(1), "{}", third.output());
    assert!(third.output().contains("172.20.0.1:8286"), "{}", third.output());
}

/// The network beneath goes away and comes back: the overlay comes back with it.
#[test]
fn faults_of_the_underlay_end_with_the_fault() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let host = &overlay.lab.hosts[0];
    let faults: [(&str, &[&str], &[&str]); 3] = [
        (
            "the link was down",
            &["ip", "link", "set", "wire0", "down"],
            &["ip", "link", "set", "wire0", "up"],
        ),
        (
            "the public address was away",
            &["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"],
            &["ip", "address", "add", "172.20.0.1/24", "dev", "wire0"],
        ),
        (
            "the route to the peer was a black hole",
            &["ip", "route", "add", "blackhole", "172.20.0.2/32"],
            &["ip", "route", "delete", "blackhole", "172.20.0.2/32"],
        ),
    ];
    let far = overlay.pod(1).to_string();
    for (what, begin, end) in faults {
        host.exec(begin);
        let ping = ["ping", "-q", "-c3", "-i0.02", "-W0.2", &far];
        wait_until(Duration::from_secs(2), &format!("{what}, and the pods talk no more"), || {
            !overlay.lab.pods[0].succeeds(&ping)
        });
        host.exec(end);
        // A neighbour entry that failed is asked for again after a second.
        let took = overlay.traffic_resumes(Duration::from_secs(4), what);
        println!("{what}: traffic resumed after {took:?}");
    }
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

/// Pods that were set up without the overlay's MTU.
#[test]
fn pods_with_a_larger_mtu_still_talk() {
    let overlay = Overlay::start();
    for (host, pod) in overlay.lab.hosts.iter().zip(&overlay.lab.pods) {
        host.exec(&["ip", "link", "set", "pod0", "mtu", "1500"]);
        pod.exec(&["ip", "link", "set", "eth0", "mtu", "1500"]);
    }
    let [near, far] = &overlay.lab.pods;
    let target = overlay.pod(1).to_string();
    let output =
        near.command(&["ping", "-c1", "-W10", "-Mdo", "-s1472", &target]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("mtu = 1472") || text.contains("mtu=1472"),
        "no MTU in the error: {text}"
    );
    tcp_transfer(near, far, overlay.pod(1), 8 << 20, true);
    udp_sizes(near, far, overlay.pod(1), [1444, 1445, 1472, 1473, 9000]);
}

#[test]
fn unroutable_flood_gets_bounded_icmp_harms_nobody() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let pod = &overlay.lab.pods[0];
    let socket = udp_socket(pod, overlay.pod(0));
    let taken = overlay.leases.each_ref().map(|lease| lease.network().octets()[2]);
    let third = (1..255).find(|third| !taken.contains(third)).unwrap();
    let target = SocketAddr::from((Ipv4Addr::new(10, 5, third, 1), 9));
    let before = overlay.status(0);
    let flood = Numbered::default();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| flood.send(&socket, target, 20_000));
        assert!(overlay.lab.ping(0, overlay.pod(1), 56), "a flood to nowhere stops other traffic");
        thread::sleep(Duration::from_secs(1));
        flood.stop.store(true, Ordering::Relaxed);
    });
    let refused = flood.refused.load(Ordering::Relaxed);
    let sent = flood.sent.load(Ordering::Relaxed) - refused;
    // Packets that found the device's queue full, where weftd got no processor for some time.
    let overflow = |status: &Status| {
        status.0["device_drops"]["flannel0"]["egress"].as_u64().expect("a number")
    };
    let mut after = before.clone();
    let what = "each packet without a route is counted, and its error sent or held back";
    wait_until(Duration::from_secs(5), what, || {
        after = overlay.status(0);
        let lost = overflow(&after) - overflow(&before);
        let counted = after.drops("egress", "no-route") - before.drops("egress", "no-route");
        let errors = ["icmp_sent", "icmp_limited"]
            .map(|name| after.count("egress", name) - before.count("egress", name));
        counted <= sent && counted + lost >= sent && errors.iter().sum::<u64>() == counted
    });
    let delta = |name| after.count("egress", name) - before.count("egress", name);
    // RFC 1812, section 4.3.2.8, in Linux's classic figures: 1 a second and a burst of 6 to one
    // host.
    let allowed = 7 + started.elapsed().as_secs();
    assert!((1..=allowed).contains(&delta("icmp_sent")), "{} ICMP errors", delta("icmp_sent"));
}
