//! What a host does to the network beneath the overlay and to its own disk: links that vanish,
//! sends that the kernel refuses, directories without room, neighbours on the same host.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use weft::daemon::status::fetch_unix;

use crate::support::cluster::{Cluster, host_address};
use crate::support::cost::process_time;
use crate::support::lab::{Namespace, Process, SubnetEnv, UNDERLAY, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store};
use crate::support::pace::repair_limit;
use crate::support::status::Status;
use crate::support::traffic::{Numbered, port, tcp_transfer, udp_socket};

/// The time in which traffic is promised to resume once carrier and address are back.
fn resume_max() -> Duration {
    repair_limit(Duration::from_millis(500))
}

/// The overlay is promised to follow the MTU beneath it within this time.
const FOLLOW: Duration = Duration::from_secs(1);

/// Lines a second that a daemon may log in any fault.
const LOG_LINES_MAX: usize = 10;

/// The daemon tries to write its subnet file every five seconds.
const WRITE_RETRY: Duration = Duration::from_secs(7);

#[test]
fn recreated_underlay_device_carries_on() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let [near, far] = &overlay.lab.hosts;
    let socket = udp_socket(&overlay.lab.pods[0], overlay.pod(0));
    let target = SocketAddr::from((overlay.pod(1), 9));
    for round in 0..2 {
        let load = Numbered::default();
        thread::scope(|scope| {
            scope.spawn(|| load.send(&socket, target, 2000));
            near.exec(&["ip", "link", "delete", "wire0"]);
            let lines = overlay.daemons[0].output().lines().count();
            let (time, began) = (process_time(&overlay.daemons[0]), Instant::now());
            thread::sleep(Duration::from_secs(1));
            let used = process_time(&overlay.daemons[0]).saturating_sub(time);
            let told = overlay.daemons[0].output().lines().count() - lines;
            load.stop.store(true, Ordering::Relaxed);
            println!("round {round}: gone for {:?}: used {used:?}, {told} lines", began.elapsed());
            assert!(
                used < began.elapsed() / 2,
                "weftd spins while its interface is gone: {used:?}"
            );
            assert!(told <= LOG_LINES_MAX, "{told} lines in a second without an interface");
        });
        near.link("wire0", far, "wire0", 1500);
        far.address("wire0", &format!("{}/24", UNDERLAY[1]));
        near.address("wire0", &format!("{}/24", UNDERLAY[0]));
        let took =
            overlay.traffic_resumes(resume_max(), "the interface was deleted and made again");
        println!("round {round}: traffic resumed after {took:?}");
    }
    let [from, to] = &overlay.lab.pods;
    tcp_transfer(from, to, overlay.pod(1), 4 << 20, true);
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

#[test]
fn traffic_resumes_once_the_carrier_is_back() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let hosts = &overlay.lab.hosts;
    let device = || overlay.lab.hosts[0].exec(&["ip", "-o", "link", "show", "flannel0"]);
    let before = device();
    let mut took: Vec<_> = (0..20)
        .map(|round| {
            // By turns the near end, which loses its routes, and the far one, which is a cable.
            let (host, what) = (&hosts[round % 2], ["near", "far"][round % 2]);
            host.exec(&["ip", "link", "set", "wire0", "down"]);
            thread::sleep(Duration::from_millis(150));
            host.exec(&["ip", "link", "set", "wire0", "up"]);
            let after = format!("the {what} end of the link came up again");
            overlay.traffic_resumes(resume_max(), &after)
        })
        .collect();
    took.sort_unstable();
    println!("resumed after {:?} to {:?}, median {:?}", took[0], took[19], took[10]);
    assert_eq!(device(), before, "the overlay's device was made again for a link that was down");
    let log = overlay.daemons[0].output();
    assert!(!log.contains("made again"), "the tunnel was made again: {log}");
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

#[test]
fn renamed_underlay_device_keeps_the_tunnel() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let near = &overlay.lab.hosts[0];
    for (old, new) in [("wire0", "uplink7"), ("uplink7", "wire0")] {
        near.exec(&["ip", "link", "set", old, "down"]);
        near.exec(&["ip", "link", "set", old, "name", new]);
        near.exec(&["ip", "link", "set", new, "up"]);
        let took = overlay.traffic_resumes(resume_max(), "the interface was renamed");
        wait_until(FOLLOW, "the status names the interface as it is", || {
            let status = overlay.status(0).0;
            let told = status["dataplane"].as_str().unwrap_or_default();
            status["interface"] == new && told.contains(&format!(" {new} "))
        });
        // Under its new name it is watched as before.
        for mtu_bytes in [1400_u32, 1500] {
            near.exec(&["ip", "link", "set", new, "mtu", &mtu_bytes.to_string()]);
            wait_until(FOLLOW, "subnet.env follows the MTU of a renamed interface", || {
                let env = SubnetEnv::read(&overlay.dir(0).join("subnet.env"));
                env.is_some_and(|env| env.mtu_bytes == mtu_bytes - 28)
            });
        }
        println!("{old} to {new}: resumed after {took:?}");
    }
    Status::settled(&overlay.dir(0));
}

#[test]
fn overlay_mtu_follows_the_interface() {
    let overlay = Overlay::start();
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let [near, far] = &overlay.lab.pods;
    thread::scope(|scope| {
        let transfer = scope.spawn(|| tcp_transfer(near, far, overlay.pod(1), 64 << 20, true));
        for mtu_bytes in [9000_u32, 1500, 1400] {
            let lines = overlay.daemons[0].output().lines().count();
            // What the other end does not take yet counts as a narrow path.
            for host in overlay.lab.hosts.iter().rev() {
                host.exec(&["ip", "link", "set", "wire0", "mtu", &mtu_bytes.to_string()]);
            }
            let started = Instant::now();
            let expected = mtu_bytes - 28;
            for host in 0..2 {
                wait_until(FOLLOW, "device, subnet.env and status follow the MTU", || {
                    let link = overlay.lab.hosts[host].exec(&["ip", "link", "show", "flannel0"]);
                    let env = SubnetEnv::read(&overlay.dir(host).join("subnet.env"));
                    let status = overlay.status(host).0;
                    link.contains(&format!("mtu {expected} "))
                        && env.is_some_and(|env| env.mtu_bytes == expected)
                        && status["lease"]["mtu_bytes"] == expected
                });
            }
            println!("{mtu_bytes}: followed after {:?}", started.elapsed());
            let told = || -> Vec<String> {
                let log = overlay.daemons[0].output();
                // It warns of pods that keep an MTU which is too large now.
                let state_changes = log.lines().skip(lines).filter(|line| line.starts_with('I'));
                state_changes.map(str::to_owned).collect()
            };
            wait_until(FOLLOW, "the log tells of both", || told().len() >= 2);
            let told = told();
            assert_eq!(told.len(), 2, "one line for the MTU and one for the file: {told:?}");
            assert!(told[0].contains(&format!("to {mtu_bytes}")), "{told:?}");
        }
        println!("TCP through three changes: {:?}", transfer.join().unwrap());
    });
    // A pod that knows nothing of the change was told by the daemon, and its kernel remembers.
    let target = overlay.pod(1).to_string();
    let output = near.command(&["ping", "-c1", "-W1", "-Mdo", "-s1400", &target]).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(text.replace(": ", "=").replace(" = ", "=").contains("mtu=1372"), "not told: {text}");
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

/// Three hosts with a daemon and a pod each, who know each other.
struct Three {
    daemons: Vec<Process>,
    pods: Vec<Namespace>,
    cluster: Cluster,
    leases: Vec<SubnetEnv>,
    files: TempDir,
}

impl Three {
    fn start() -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let store = local_store(files.path(), CONFIG);
        let cluster = Cluster::new(3);
        let dir = |host: usize| files.path().join(format!("h{host}"));
        let mut daemons: Vec<Process> = (0..3)
            .map(|host| {
                let socket = format!("--status-socket={}", dir(host).join("weft.sock").display());
                // What a send says, only workers hear.
                cluster.weftd(host, &dir(host), &[&store, &socket, "--fast-path=off"])
            })
            .collect();
        let leases: Vec<SubnetEnv> = daemons
            .iter_mut()
            .enumerate()
            .map(|(host, daemon)| SubnetEnv::wait(&dir(host).join("subnet.env"), daemon))
            .collect();
        for host in 0..3 {
            wait_until(Duration::from_secs(10), "each daemon learns the others' leases", || {
                Status::try_of(&dir(host)).is_some_and(|status| status.routes() == 2)
            });
        }
        let pods: Vec<_> = (0..3).map(|host| cluster.pod(host, &leases[host])).collect();
        let address = |host: usize| leases[host].pod_address();
        for host in [1, 2] {
            let far = address(host).to_string();
            wait_until(Duration::from_secs(5), "the pods reach each other", || {
                pods[0].succeeds(&["ping", "-q", "-c1", "-W0.2", &far])
            });
        }
        Self { daemons, pods, cluster, leases, files }
    }

    fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    /// A second of traffic from the first pod to both others: what the second host's pod got of
    /// it, and what was sent to the third's.
    fn send_to_both(&self) -> (Numbered, Numbered) {
        let (pods, address) = (&self.pods, |host: usize| self.leases[host].pod_address());
        // Not so many that a busy machine loses some: the kernel queues 1000 for a processor that
        // does not get to them (net.core.netdev_max_backlog).
        let good = Numbered { in_flight_max: Some(500), ..Numbered::default() };
        let bad = Numbered::default();
        let receiver = udp_socket(&pods[1], address(1));
        let senders = [0, 1].map(|_| udp_socket(&pods[0], address(0)));
        let targets =
            [SocketAddr::from((address(1), port(&receiver))), SocketAddr::from((address(2), 9))];
        thread::scope(|scope| {
            scope.spawn(|| good.receive(&receiver));
            let sending = [
                scope.spawn(|| good.send(&senders[0], targets[0], 4000)),
                scope.spawn(|| bad.send(&senders[1], targets[1], 2000)),
            ];
            thread::sleep(Duration::from_secs(1));
            good.stop.store(true, Ordering::Relaxed);
            bad.stop.store(true, Ordering::Relaxed);
            sending.into_iter().for_each(|sender| sender.join().expect("a sender ends"));
            comes_true(Duration::from_secs(2), || good.missing() == 0);
            good.drained.store(true, Ordering::Relaxed);
        });
        (good, bad)
    }
}

/// More than weftd sends to one peer that does not answer while a fault lasts.
const ECHOES_MAX: u64 = 50;

/// The status, once `least` more packets to the last host were refused: the last of them may not
/// have left the pod yet.
fn once_refused(dir: &Path, before: &Status, reason: &str, least: u64) -> Status {
    let mut after = Status::settled(dir);
    wait_until(Duration::from_secs(10), "each refusal is counted", || {
        after = Status::settled(dir);
        let failed = |status: &Status| status.failed_sends(host_address(2));
        let dropped = |status: &Status| status.drops("egress", reason);
        dropped(&after) - dropped(before) >= least && failed(&after) - failed(before) >= least
    });
    after
}

#[test]
fn unreachable_peer_costs_other_peers_nothing() {
    let mut three = Three::start();
    let host = &three.cluster.hosts[0];
    host.exec(&["nft", "add table inet t"]);
    host.exec(&["nft", "add chain inet t out { type filter hook output priority 0; }"]);
    let faults: [(&str, &[&str], &[&str], &str); 4] = [
        (
            "EPERM",
            &["nft", "add rule inet t out ip daddr 172.20.0.3 udp dport 8285 drop"],
            &["nft", "flush chain inet t out"],
            "tx-eperm",
        ),
        (
            "ENETUNREACH",
            &["ip", "route", "add", "throw", "172.20.0.3/32"],
            &["ip", "route", "delete", "throw", "172.20.0.3/32"],
            "tx-unreach",
        ),
        (
            "EHOSTUNREACH",
            &["ip", "route", "add", "unreachable", "172.20.0.3/32"],
            &["ip", "route", "delete", "unreachable", "172.20.0.3/32"],
            "tx-unreach",
        ),
        // Nobody listens there any more, and the host says so; each send still succeeds.
        ("ECONNREFUSED", &["true"], &["true"], ""),
    ];
    for (what, begin, end, reason) in faults {
        if reason.is_empty() {
            three.daemons[2].stop(Signal::KILL, Duration::from_secs(2));
        }
        host.exec(begin);
        let before = Status::of(&three.dir(0));
        let lines = three.daemons[0].output().lines().count();
        let (good, bad) = three.send_to_both();
        let sent = [&good, &bad].map(|load| load.sent.load(Ordering::Relaxed));
        let least = if reason.is_empty() { 0 } else { sent[1] };
        let after = once_refused(&three.dir(0), &before, reason, least);
        let told = three.daemons[0].output().lines().count() - lines;
        println!(
            "{what}: {} lost of {}, {} refused, {told} lines",
            good.missing(),
            sent[0],
            sent[1]
        );
        assert_eq!(good.missing(), 0, "{what} at one peer loses another's packets, of {}", sent[0]);
        // And perhaps echoes of weftd's own, which go the same way.
        let expected = match reason.is_empty() {
            true => 0..=0,
            false => sent[1]..=sent[1] + ECHOES_MAX,
        };
        if !reason.is_empty() {
            let counted = after.drops("egress", reason) - before.drops("egress", reason);
            assert!(expected.contains(&counted), "{what}: {counted} as {reason}: {}", after.0);
        }
        let failed = [1, 2].map(|host| {
            let peer = host_address(host);
            after.failed_sends(peer) - before.failed_sends(peer)
        });
        assert!(
            failed[0] == 0 && expected.contains(&failed[1]),
            "{what}: the operator is not shown which peer it is: {failed:?} of {expected:?}"
        );
        assert!(told <= 2 * LOG_LINES_MAX, "{what}: {told} lines: {}", three.daemons[0].output());
        host.exec(end);
    }
    only_the_last_host_failed(&three.dir(0));
}

/// The metric of failed sends names the host that can't be sent to, and no other.
fn only_the_last_host_failed(dir: &Path) {
    let metrics = fetch_unix(&dir.join("weft.sock"), "/metrics").expect("it runs");
    let metrics = String::from_utf8_lossy(&metrics).into_owned();
    let of_peers: Vec<_> = metrics
        .lines()
        .filter(|line| line.starts_with("flannel_peer_failed_sends_total"))
        .collect();
    let failed = Status::of(dir).failed_sends(host_address(2));
    let expected = format!(r#"flannel_peer_failed_sends_total{{peer="172.20.0.3"}} {failed}"#);
    assert_eq!(of_peers, [expected], "the metric names another peer, or none");
}

/// A file system of its own with little room, unmounted on drop.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory for the test");
        mount(&["-t", "tmpfs", "-o", "size=64k", "tmpfs"], dir.path());
        Self(dir)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn fill(&self) {
        let full = std::fs::write(self.file("filler"), vec![0; 1 << 20]);
        assert!(full.is_err(), "a megabyte fits on a small disk");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0.path()).output().ok();
    }
}

fn mount(arguments: &[&str], path: &Path) {
    let done =
        Command::new("mount").args(arguments).arg(path).status().expect("mount is installed");
    assert!(done.success(), "mount {arguments:?}");
}

#[test]
fn full_disk_keeps_the_old_subnet_file() {
    let disk = SmallDisk::new();
    let mut overlay = Overlay::start();
    overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(2));
    let env = disk.file("subnet.env");
    // As the last run left it, but for the MTU, so that a new writing shows.
    let text = std::fs::read_to_string(overlay.dir(0).join("subnet.env")).unwrap();
    let old = text.replace("FLANNEL_MTU=1472", "FLANNEL_MTU=1400");
    assert_ne!(text, old);
    let (flag, path) = (format!("--subnet-file={}", env.display()), disk.0.path());
    // Not its lock, nor the cache.
    let written = format!("{}: ", env.display());
    for fault in ["full", "read-only"] {
        std::fs::write(&env, &old).unwrap();
        match fault {
            "full" => disk.fill(),
            _ => mount(&["-o", "remount,ro"], path),
        }
        overlay.restart(0, &[&flag]);
        wait_until(Duration::from_secs(10), "the refused write is told", || {
            overlay.daemons[0].complaints(&written) > 0
        });
        assert_eq!(overlay.status(0).0["ready"], false, "ready without a subnet file ({fault})");
        assert_eq!(std::fs::read_to_string(&env).unwrap(), old, "a {fault} disk lost the old file");
        overlay.traffic_resumes(Duration::from_secs(5), "a start without a subnet file");
        match fault {
            "full" => std::fs::remove_file(disk.file("filler")).unwrap(),
            _ => {
                mount(&["-o", "remount,rw"], path);
                // The daemon's view of the mount is its own, with the flag of its start.
                let pid = overlay.daemons[0].pid().as_raw_nonzero().to_string();
                let mut enter = Command::new("nsenter");
                enter.args(["-t", &pid, "-m", "mount", "-o", "remount,rw"]).arg(path);
                assert!(enter.status().unwrap().success(), "the daemon's mount stays read-only");
            }
        }
        let started = Instant::now();
        wait_until(WRITE_RETRY, "the file is written once the disk takes it", || {
            std::fs::read_to_string(&env).is_ok_and(|now| now == text)
        });
        wait_until(Duration::from_secs(1), "weftd is ready once the file is written", || {
            overlay.status(0).0["ready"] == true
        });
        println!("{fault}: written after {:?}", started.elapsed());
        let daemon = &overlay.daemons[0];
        assert_eq!(daemon.complaints(&written), 1, "{}", daemon.output());
        let failures = overlay.status(0).0["subnet_file"]["failures"].as_u64();
        let metrics = fetch_unix(&overlay.dir(0).join("weft.sock"), "/metrics").expect("it runs");
        let metrics = String::from_utf8_lossy(&metrics).into_owned();
        let failures = failures.filter(|count| *count > 0).expect("failed writes are counted");
        let expected = format!("\nflannel_subnet_file_failures_total {failures}\n");
        assert!(metrics.contains(&expected), "{expected:?} is not among {metrics}");
        overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(2));
    }
}

#[test]
fn two_networks_share_the_same_hosts() {
    let overlay = Overlay::start();
    let files = tempfile::tempdir().unwrap();
    let config = r#"{"Network":"10.9.0.0/16","Backend":{"Type":"udp","Port":8286}}"#;
    let store = local_store(files.path(), config);
    let dir = |host: usize| files.path().join(format!("h{host}"));
    let mut second = [0, 1].map(|host| overlay.lab.weftd(host, &dir(host), &[&store]));
    let leases =
        [0, 1].map(|host| SubnetEnv::wait(&dir(host).join("subnet.env"), &mut second[host]));
    for host in 0..2 {
        wait_until(Duration::from_secs(10), "the second network's daemons meet", || {
            Status::try_of(&dir(host)).is_some_and(|status| status.routes() == 1)
        });
    }
    let [near, far] = &overlay.lab.hosts;
    let other = leases[1].network();
    assert!(near.succeeds(&["ping", "-q", "-c3", "-i0.05", "-W1", &other.to_string()]));
    let before = [overlay.status(1), Status::of(&dir(1))];
    thread::scope(|scope| {
        scope.spawn(|| tcp_transfer(near, far, other, 4 << 20, true));
        let [near, far] = &overlay.lab.pods;
        scope.spawn(|| tcp_transfer(near, far, overlay.pod(1), 4 << 20, true));
    });
    let after = [Status::settled(&overlay.dir(1)), Status::settled(&dir(1))];
    for (before, after) in before.iter().zip(&after) {
        let bytes = |status: &Status| {
            let by_kernel = &status.0["fast_path"]["bytes_received"];
            status.count("ingress", "bytes_forwarded") + by_kernel.as_u64().expect("a count")
        };
        let carried = bytes(after) - bytes(before);
        println!("{carried} bytes");
        assert!(carried > 4 << 20, "one network's traffic went another way: {}", after.0);
        assert!(carried < 7 << 20, "one network carried the other's traffic: {}", after.0);
    }
    // The end of one is nothing to the other.
    second.iter_mut().for_each(|daemon| _ = daemon.stop(Signal::TERM, Duration::from_secs(2)));
    assert!(overlay.lab.ping(0, overlay.pod(1), 56), "the first network ended with the second");
}
