//! Several workers in one weftd: every flow stays in order, every worker's counters add up, and
//! what one worker survives, several survive.

use std::iter::repeat_with;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use serde_json::Value;

use crate::support::cost::{self, ThreadStatus};
use crate::support::lab::{LEASE_TIMEOUT, Lab, Process, SubnetEnv, WEFTD, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store};
use crate::support::pace::{Stopwatch, by_effort, repair_limit};
use crate::support::status::Status;
use crate::support::traffic::{Numbered, kernel_counter, port, tcp_transfer, udp_socket};

const STOP: Duration = Duration::from_secs(1);

/// All workers of a daemon end, and their device with them, within this time; beside other tests
/// the device waits for its turn, as in [`repair_limit`].
fn stop_workers_max() -> Duration {
    by_effort(Duration::from_millis(300), Duration::from_millis(100))
}

/// How long what is on its way may take to arrive.
const DRAIN: Duration = Duration::from_secs(5);

/// Flows at once. One run in 25 leaves a worker of four without any (4 x 0.75^16).
const FLOWS: usize = 16;
/// TCP connections that are refused and follow: with them it is one run in 10^9.
const BRIEF_FLOWS: usize = 64;
/// Datagrams a second of each.
const FLOW_RATE: u64 = 1000;

/// Both daemons with `workers` each, which carry everything.
fn overlay(workers: usize, further: &[&str]) -> Overlay {
    let flag = format!("--workers={workers}");
    let mut arguments = vec![flag.as_str(), "--fast-path=off"];
    arguments.extend(further);
    Overlay::start_with(CONFIG, [&arguments, &arguments])
}

/// Beyond sixteen workers have no lanes, and beyond 64 queues no marks.
#[test]
fn any_number_of_workers_begins() {
    for count in ["--workers=17", "--workers=66"] {
        let overlay = Overlay::start_with(CONFIG, [&[count, "--fast-path=off"], &[]]);
        assert!(overlay.lab.ping(0, overlay.pod(1), 56), "{count}");
    }
}

/// Later a flow changes its port once, and may overtake itself then.
fn wait_for_source_ports(overlay: &Overlay) {
    wait_until(LEASE_TIMEOUT, "workers send from ports of their own", || {
        let is_spread = |host: usize| {
            Status::of(&overlay.dir(host)).0["routes"][0]["from_source_ports"] == true
        };
        overlay.lab.ping(0, overlay.pod(1), 56) && is_spread(0) && is_spread(1)
    });
}

/// This thread and what it starts stay on the processor that it runs on, which is returned.
fn stay_here() -> usize {
    let (mut one, here) = (CpuSet::new(), sched_getcpu());
    one.set(here);
    sched_setaffinity(None, &one).expect("the running processor may be chosen");
    here
}

fn workers(status: &Status) -> &[Value] {
    status.0["workers"].as_array().expect("the status lists the workers")
}

fn forwarded(worker: &Value, direction: &str) -> u64 {
    worker[direction]["packets_forwarded"].as_u64().expect("a worker counts packets")
}

/// Checks that the workers' counters add up to the totals, which holds at any moment.
fn check_sums(status: &Status) {
    for direction in ["egress", "ingress"] {
        let sum: u64 = workers(status).iter().map(|worker| forwarded(worker, direction)).sum();
        assert_eq!(sum, status.count(direction, "packets_forwarded"), "{direction}: {}", status.0);
    }
}

/// Checks the sums, and the law of conservation for each worker, which holds once all is handed on.
fn check_counters(status: &Status) {
    check_sums(status);
    for direction in ["egress", "ingress"] {
        for worker in workers(status) {
            let count = |name: &str| worker[direction][name].as_u64().expect("a worker counts");
            let drops = worker[direction]["drops"].as_object().expect("a worker lists its drops");
            let dropped: u64 = drops.values().filter_map(Value::as_u64).sum();
            let (received, forwarded) = (count("packets_received"), count("packets_forwarded"));
            assert_eq!(received, forwarded + dropped, "{direction} of {worker}");
        }
    }
}

#[test]
fn flows_stay_in_order_across_all_workers() {
    for (count, engine) in [(2, "mmsg"), (4, "auto")] {
        let overlay = overlay(count, &["--engine", engine]);
        overlay.lab.steer_by_flow();
        wait_for_source_ports(&overlay);
        thread::scope(|scope| {
            scope.spawn(|| {
                stay_here();
                one_way_flows(&overlay, count);
            });
        });
    }
}

fn one_way_flows(overlay: &Overlay, count: usize) {
    // As many as a pod's usual buffer holds.
    let flow = || Numbered { in_flight_max: Some(200), ..Numbered::default() };
    let flows: Vec<Numbered> = repeat_with(flow).take(FLOWS).collect();
    let mut under_load = Vec::new();
    thread::scope(|scope| {
        for (index, flow) in (1..).zip(&flows) {
            // The flows of one pod to another share a worker, so each comes from a pod of its own.
            let source = Ipv4Addr::from_bits(overlay.pod(0).to_bits() + index);
            overlay.lab.pods[0].address("eth0", &format!("{source}/32"));
            let far = udp_socket(&overlay.lab.pods[1], overlay.pod(1));
            let near = udp_socket(&overlay.lab.pods[0], source);
            let target = SocketAddr::from((overlay.pod(1), port(&far)));
            scope.spawn(move || flow.send(&near, target, FLOW_RATE));
            scope.spawn(move || flow.receive(&far));
        }
        for _ in 0..30 {
            thread::sleep(Duration::from_millis(100));
            under_load.push(Status::of(&overlay.dir(0)));
        }
        flows.iter().for_each(|flow| flow.stop.store(true, Ordering::Relaxed));
        comes_true(DRAIN, || flows.iter().all(|flow| flow.missing() == 0));
        flows.iter().for_each(|flow| flow.drained.store(true, Ordering::Relaxed));
    });
    under_load.iter().for_each(check_sums);
    let reordered: Vec<_> =
        flows.iter().map(|flow| flow.reordered.load(Ordering::Relaxed)).collect();
    assert_eq!(reordered, [0; FLOWS], "{count} workers reorder flows");
    let missing: u64 = flows.iter().map(Numbered::missing).sum();
    assert_eq!(missing, 0, "{count} workers lost packets at a moderate rate");
    let closed = SocketAddr::from((overlay.pod(1), 9));
    for _ in 0..BRIEF_FLOWS {
        let refused = overlay.lab.pods[0].enter(|| TcpStream::connect(closed));
        refused.expect_err("nobody listens");
    }
    wait_until(Duration::from_secs(5), "each worker carries some flow", || {
        let status = Status::of(&overlay.dir(0));
        workers(&status).iter().all(|worker| forwarded(worker, "egress") > 0)
    });
    for host in 0..2 {
        let status = Status::settled(&overlay.dir(host));
        check_counters(&status);
        assert_eq!(workers(&status).len(), count);
    }
}

/// The kernel's own choice of queues moves a flow to the worker that writes its answers, and back
/// three seconds after the last: with bulk on one worker, each move overtakes what waits there.
#[test]
fn answers_leave_a_flow_on_its_worker() {
    let overlay = overlay(2, &[]);
    overlay.lab.steer_by_flow();
    wait_for_source_ports(&overlay);
    thread::scope(|scope| {
        scope.spawn(|| {
            stay_here();
            answered_flows_beside_bulk(&overlay);
        });
    });
    check_counters(&Status::settled(&overlay.dir(0)));
}

fn answered_flows_beside_bulk(overlay: &Overlay) {
    const ANSWERED_FLOWS: usize = 8;
    let [near_pod, far_pod] = &overlay.lab.pods;
    let flows: Vec<Numbered> = (0..ANSWERED_FLOWS).map(|_| Numbered::default()).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                tcp_transfer(near_pod, far_pod, overlay.pod(1), 16 << 20, false);
            }
        });
        let mut ways_back = Vec::new();
        for flow in &flows {
            let far = udp_socket(far_pod, overlay.pod(1));
            let near = udp_socket(near_pod, overlay.pod(0));
            let target = SocketAddr::from((overlay.pod(1), port(&far)));
            let back = SocketAddr::from((overlay.pod(0), port(&near)));
            ways_back.push((far.try_clone().expect("one more descriptor"), back));
            scope.spawn(move || flow.send(&near, target, FLOW_RATE));
            scope.spawn(move || flow.receive(&far));
        }
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(500));
            for (far, back) in &ways_back {
                far.send_to(&[0], back).expect("the answer can be sent");
            }
            thread::sleep(Duration::from_secs(4));
        }
        flows.iter().for_each(|flow| flow.stop.store(true, Ordering::Relaxed));
        is_over.store(true, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(300));
        flows.iter().for_each(|flow| flow.drained.store(true, Ordering::Relaxed));
    });
    let reordered: Vec<_> =
        flows.iter().map(|flow| flow.reordered.load(Ordering::Relaxed)).collect();
    assert_eq!(reordered, [0; ANSWERED_FLOWS], "flows changed workers");
}

#[test]
fn workers_without_steering_rights_run_with_a_warning() {
    let files = tempfile::tempdir().unwrap();
    let lab = Lab::two_hosts();
    let store = local_store(files.path(), CONFIG);
    let subnet_env = files.path().join("subnet.env");
    let subnet_file = format!("--subnet-file={}", subnet_env.display());
    // Root with this bounding set has CAP_NET_ADMIN only.
    let mut daemon = lab.hosts[0].spawn(&[
        "setpriv",
        "--bounding-set=-all,+net_admin",
        WEFTD,
        &store,
        &subnet_file,
        "--iface=172.20.0.1",
        "--iptables-forward-rules=false",
        "--workers=2",
    ]);
    SubnetEnv::wait(&subnet_env, &mut daemon);
    let everybody = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled");
    let may = everybody.is_ok_and(|value| value.trim() == "0");
    // The log is written a little later than the file.
    let is_told = || daemon.output().contains("grant CAP_BPF");
    comes_true(Duration::from_secs(5), || is_told() != may);
    let log = daemon.output();
    assert_eq!(is_told(), !may, "{log}");
    assert_eq!(worker_threads(&daemon).len(), 2, "{log}");
}

#[test]
fn tcp_flows_are_not_reordered_by_several_workers() {
    for count in [2, 4] {
        let overlay = overlay(count, &[]);
        overlay.lab.steer_by_flow();
        wait_for_source_ports(&overlay);
        let [near, far] = &overlay.lab.pods;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| tcp_transfer(near, far, overlay.pod(1), 16 << 20, true));
            }
        });
        let names = ["TCPSACKReorder", "TCPRenoReorder", "TCPTSReorder"];
        let seen = |pod| names.map(|name| kernel_counter(pod, "TcpExt", name)).iter().sum::<u64>();
        let reordered: u64 = overlay.lab.pods.iter().map(seen).sum();
        assert_eq!(reordered, 0, "TCP saw its segments overtake each other with {count} workers");
        for host in 0..2 {
            check_counters(&Status::settled(&overlay.dir(host)));
        }
    }
}

/// Names of the worker threads with the processors that each may use, by name.
fn worker_threads(daemon: &Process) -> Vec<(String, String)> {
    let field = |thread: &ThreadStatus, name| thread.field(name).to_owned();
    let workers = cost::threads(daemon).into_iter().filter(ThreadStatus::is_worker);
    let mut threads: Vec<_> =
        workers.map(|it| (field(&it, "Name"), field(&it, "Cpus_allowed_list"))).collect();
    threads.sort();
    threads
}

#[test]
fn all_workers_survive_a_deleted_device() {
    let mut overlay = overlay(4, &[]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let before = worker_threads(&overlay.daemons[0]);
    let names: Vec<_> = before.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["weft-worker-0", "weft-worker-1", "weft-worker-2", "weft-worker-3"]);
    for (name, processors) in &before {
        assert!(processors.parse::<u32>().is_ok(), "{name} may run on {processors}");
    }
    let status = overlay.status(0);
    for (worker, (name, processors)) in workers(&status).iter().zip(&before) {
        assert_eq!(worker["processor"].to_string(), *processors, "{name} of {}", status.0);
    }
    let repair_max = repair_limit(Duration::from_secs(1));
    for round in 0..3 {
        overlay.lab.hosts[0].exec(&["ip", "link", "delete", "flannel0"]);
        // The second and the third come sooner than a lasting repair.
        let resumed = overlay.traffic_resumes(repair_max, "the device was deleted");
        println!("round {round}: traffic after {resumed:?}");
        // They start one after the other, and the first may have answered.
        wait_until(repair_max, "all workers come back", || {
            worker_threads(&overlay.daemons[0]) == before
        });
        // Four workers, four lanes each.
        let queues = "ls -d /sys/class/net/flannel0/queues/rx-* | wc -l";
        let queues = overlay.lab.hosts[0].exec(&["sh", "-c", queues]);
        assert_eq!(queues.trim(), "16", "the new device has another number of queues");
    }
    check_counters(&Status::settled(&overlay.dir(0)));
    assert!(!overlay.daemons[0].output().contains("cannot"), "{}", overlay.daemons[0].output());
    let (host, pid) = (&overlay.lab.hosts[0], overlay.daemons[0].pid());
    let started = Stopwatch::start();
    rustix::process::kill_process(pid, Signal::TERM).expect("the daemon runs");
    wait_until(STOP, "the device goes", || !host.succeeds(&["ip", "link", "show", "flannel0"]));
    let took = started.elapsed();
    println!("stopped in {took:?}");
    assert_eq!(overlay.daemons[0].wait(STOP).code(), Some(0));
    assert!(took < stop_workers_max(), "four workers took {took:?} to end");
}

#[test]
fn port_in_use_refuses_any_worker_count() {
    let files = tempfile::tempdir().unwrap();
    let lab = Lab::two_hosts();
    for (first, second) in [("1", "2"), ("2", "1"), ("2", "2")] {
        let dirs = [1, 2].map(|daemon| files.path().join(format!("{first}-{second}-{daemon}")));
        let start = |daemon: usize, workers: &str| {
            // Networks of their own: only the port is the same.
            let config = CONFIG.replace("10.5.", &format!("10.{}.", 5 + daemon));
            let store = local_store(&dirs[daemon], &config);
            lab.weftd(0, &dirs[daemon], &[&store, &format!("--workers={workers}")])
        };
        let mut running = start(0, first);
        SubnetEnv::wait(&dirs[0].join("subnet.env"), &mut running);
        let mut refused = start(1, second);
        let status = refused.wait(LEASE_TIMEOUT);
        let log = refused.output();
        assert_eq!(status.code(), Some(1), "two daemons share a port: {log}");
        let named = refused.complaints("172.20.0.1:8285");
        assert_eq!(named, 1, "the operator cannot tell which address is taken: {log}");
        assert_eq!(running.stop(Signal::TERM, STOP).code(), Some(0));
    }
}

#[test]
fn workers_stay_within_the_affinity_mask() {
    let files = tempfile::tempdir().unwrap();
    let lab = Lab::two_hosts();
    for (workers_flag, expected) in [("auto", 1), ("3", 3)] {
        let dir = files.path().join(workers_flag);
        let store = local_store(&dir, CONFIG);
        let (home, mut daemon) = thread::scope(|scope| {
            let started = scope.spawn(|| {
                let home = stay_here();
                (home, lab.weftd(0, &dir, &[&store, &format!("--workers={workers_flag}")]))
            });
            started.join().expect("the daemon starts")
        });
        SubnetEnv::wait(&dir.join("subnet.env"), &mut daemon);
        let threads = worker_threads(&daemon);
        assert_eq!(threads.len(), expected, "--workers={workers_flag} on one processor");
        assert!(threads.iter().all(|(_, cpus)| *cpus == home.to_string()), "{threads:?}");
        daemon.stop(Signal::TERM, STOP);
    }
}
