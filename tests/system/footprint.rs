//! What an idle weftd with a hundred peers costs its host, and that nothing leaks.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::cluster::Cluster;
use crate::support::cost::status_bytes;
use crate::support::lab::{Process, SubnetEnv, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store, reserve};
use crate::support::status::Status;
use crate::support::traffic::{tcp_transfer, udp_sizes};

const PEERS: u8 = 100;

/// The 24 MiB that are promised for a hundred peers, without the 8 MiB that a release build maps of
/// its own file. The buffers of a ring take more, and `auto` may choose one on a slow machine.
const OWN_BYTES_MAX: u64 = 16 << 20;
const MMSG: &str = "--engine=mmsg";

/// How often its threads wake up in a second: a rule and route comparison each two seconds, timers.
/// Three to five were seen.
const IDLE_WAKE_UPS_MAX: f64 = 10.0;

/// A hundredth of one processor. A debug build was seen to use a thousandth; how much it is depends
/// on the machine, so this only tells a busy loop.
const IDLE_CPU_SHARE_MAX: f64 = 0.01;

const IDLE_TIME: Duration = Duration::from_secs(20);

/// The daemons choose among the subnets that no reservation of these tests names.
const CONFIG_APART: &str = r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.200.0",
    "SubnetMax":"10.5.240.0","Backend":{"Type":"udp"}}"#;

/// The most memory that was resident so far, in bytes, without the program's file: the program
/// under test may be a debug build, of which 20 MiB are mapped.
fn own_bytes_peak(process: &Process) -> u64 {
    status_bytes(process, "VmHWM").saturating_sub(status_bytes(process, "RssFile"))
}

/// Of all its threads so far: processor time to the nanosecond (`stat` counts whole ticks of 10 ms,
/// and charges each to the thread that runs at the tick), and how often one went to sleep.
fn activity(process: &Process) -> (Duration, u64) {
    let threads = format!("/proc/{}/task", process.pid().as_raw_nonzero());
    let activity = |thread: fs::DirEntry| {
        let times = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let time = times.split(' ').next()?.parse().ok().map(Duration::from_nanos)?;
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        Some((time, sleeps?.trim().parse::<u64>().ok()?))
    };
    fs::read_dir(threads)
        .expect("the daemon runs")
        .filter_map(|thread| activity(thread.ok()?))
        .fold((Duration::ZERO, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// Open descriptors and threads.
fn handles(process: &Process) -> (usize, usize) {
    let count = |what: &str| {
        let path = format!("/proc/{}/{what}", process.pid().as_raw_nonzero());
        fs::read_dir(path).expect("the daemon runs").count()
    };
    (count("fd"), count("task"))
}

fn reserve_peers(dir: &Path, peers: u8) {
    for peer in 1..=peers {
        reserve(dir, &format!("10.5.{peer}.0-24"), Ipv4Addr::new(172, 20, 1, peer));
    }
}

#[test]
fn hundred_peers_cost_little_memory_and_time() {
    let files = tempfile::tempdir().unwrap();
    let cluster = Cluster::new(1);
    let store = local_store(files.path(), CONFIG);
    reserve_peers(files.path(), PEERS);
    let mut daemon = cluster.weftd(0, files.path(), &[&store, MMSG]);
    SubnetEnv::wait(&files.path().join("subnet.env"), &mut daemon);
    wait_until(Duration::from_secs(10), "weftd knows a hundred peers", || {
        Status::try_of(files.path()).is_some_and(|status| status.routes() == usize::from(PEERS))
    });
    // The kernel's own IPv6 chatter on the new device ends after a few seconds.
    thread::sleep(Duration::from_secs(2));
    let (before, started) = (activity(&daemon), Instant::now());
    thread::sleep(IDLE_TIME);
    let (after, elapsed) = (activity(&daemon), started.elapsed().as_secs_f64());
    let share = after.0.saturating_sub(before.0).as_secs_f64() / elapsed;
    let wake_ups = after.1.saturating_sub(before.1) as f64 / elapsed;
    let (resident, own) = (status_bytes(&daemon, "VmRSS"), own_bytes_peak(&daemon));
    println!("{PEERS} peers: RSS {} KiB, without the file {} KiB", resident / 1024, own / 1024);
    println!(
        "idle: CPU {:.4} %, {wake_ups:.1} wake-ups a second; {:?}",
        share * 100.0,
        handles(&daemon)
    );
    assert!(own <= OWN_BYTES_MAX, "resident memory reached {} KiB", own / 1024);
    assert!(wake_ups <= IDLE_WAKE_UPS_MAX, "an idle weftd wakes up {wake_ups:.1} times a second");
    assert!(
        share <= IDLE_CPU_SHARE_MAX,
        "an idle weftd uses {:.3} % of a processor",
        share * 100.0
    );
}

#[test]
fn memory_stays_bounded_under_load() {
    let overlay = Overlay::start_with(CONFIG_APART, [&[MMSG], &[MMSG]]);
    reserve_peers(overlay.files(), 99);
    wait_until(Duration::from_secs(10), "each daemon knows about a hundred peers", || {
        (0..2).all(|host| overlay.status(host).routes() == 100)
    });
    let [near, far] = &overlay.lab.pods;
    tcp_transfer(near, far, overlay.pod(1), 96 << 20, true);
    udp_sizes(near, far, overlay.pod(1), [1, 1444, 20_000]);
    for daemon in &overlay.daemons {
        let own = own_bytes_peak(daemon);
        println!("after 200 MB of TCP: {} KiB without the file", own / 1024);
        assert!(own <= OWN_BYTES_MAX, "resident memory reached {} KiB under load", own / 1024);
    }
}

#[test]
fn nothing_leaks_as_devices_leases_clients_change() {
    const ROUNDS: u8 = 7;
    // A device that is deleted again and again is made again after up to 5 s.
    const REPAIR: Duration = Duration::from_secs(7);
    let mut overlay = Overlay::start_with(CONFIG_APART, [&[MMSG], &[MMSG]]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let round = |number: u8| {
        overlay.lab.hosts[0].exec(&["ip", "link", "delete", "flannel0"]);
        overlay.traffic_resumes(REPAIR, "the device was deleted");
        let name = format!("10.5.{}.0-24", 255 - number % 2);
        reserve(overlay.files(), &name, Ipv4Addr::new(172, 20, 1, 1 + number));
        for _ in 0..5 {
            overlay.status(0);
        }
    };
    // The first rounds fill what is allocated once. Pages of the program's file are no leak.
    (0..3).for_each(round);
    settle(&overlay, 2);
    let (handles_before, memory_before) =
        (handles(&overlay.daemons[0]), status_bytes(&overlay.daemons[0], "RssAnon"));
    let mut memory = vec![memory_before];
    // A leak grows each time.
    for window in 0..3 {
        (3 + window * ROUNDS..3 + (window + 1) * ROUNDS).for_each(round);
        settle(&overlay, 3);
        memory.push(status_bytes(&overlay.daemons[0], "RssAnon"));
        if memory[memory.len() - 1] < memory[memory.len() - 2] + (2 << 20) {
            break;
        }
    }
    println!("handles {handles_before:?}; memory {memory:?} bytes");
    wait_until(Duration::from_secs(5), "descriptors and threads are given back", || {
        let (descriptors, threads) = handles(&overlay.daemons[0]);
        descriptors <= handles_before.0 && threads <= handles_before.1
    });
    assert!(memory.len() < 4 || memory[3] < memory[2] + (2 << 20), "memory grows: {memory:?}");
    assert!(memory.iter().all(|bytes| *bytes <= OWN_BYTES_MAX), "memory is too much: {memory:?}");
    let status = overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(1));
    assert_eq!(status.code(), Some(0));
    let devices = overlay.lab.hosts[0].exec(&["ip", "-o", "link"]);
    assert!(!devices.contains("flannel"), "a stopped daemon leaves a device: {devices}");
}

/// Waits until both reserved leases are routes, and connections of before are closed.
fn settle(overlay: &Overlay, at_least: usize) {
    wait_until(Duration::from_secs(5), "the reserved leases become routes", || {
        overlay.status(0).routes() >= at_least
    });
}
