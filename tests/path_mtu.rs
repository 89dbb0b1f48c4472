//! A router on the way whose next link is narrower, and a filter that keeps it from saying so.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use support::cluster::weftd_in;
use support::lab::{Namespace, Process, SubnetEnv, example, wait_until};
use support::overlay::{CONFIG, local_store, reserve};
use support::status::Status;

/// The time in which TCP is promised to go on.
const STALL_MAX: Duration = Duration::from_secs(3);

/// A path is looked at again every 30 seconds; with what that takes, and a busy machine.
const HEAL_MAX: Duration = Duration::from_secs(36);

const UNDERLAY: [Ipv4Addr; 2] = [Ipv4Addr::new(172, 20, 1, 1), Ipv4Addr::new(172, 20, 2, 1)];

/// host 0 - router - host 1, a pod on each host.
struct Routed {
    daemons: Vec<Process>,
    router: Namespace,
    hosts: [Namespace; 2],
    pods: [Namespace; 2],
    leases: Vec<SubnetEnv>,
    files: TempDir,
}

impl Routed {
    /// weftd on host 0; on host 1 another, or a peer that moves one packet at a time.
    fn start(plain_peer: bool) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let store = local_store(files.path(), CONFIG);
        let router = Namespace::new("router");
        let hosts = [Namespace::new("h1"), Namespace::new("h2")];
        router.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
        router.exec(&["nft", "add table inet t"]);
        router.exec(&["nft", "add chain inet t out { type filter hook output priority 0; }"]);
        router.exec(&["nft", "add rule inet t out icmp type destination-unreachable drop"]);
        for (index, host) in hosts.iter().enumerate() {
            let port = format!("port{index}");
            host.link("wire0", &router, &port, 1500);
            host.address("wire0", &format!("{}/24", UNDERLAY[index]));
            let gateway = Ipv4Addr::from_bits(UNDERLAY[index].to_bits() + 253);
            router.address(&port, &format!("{gateway}/24"));
            host.exec(&["ip", "route", "add", "default", "via", &gateway.to_string()]);
            host.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
        }
        let pods = [Namespace::new("p1"), Namespace::new("p2")];
        let mut overlay =
            Self { daemons: Vec::new(), router, hosts, pods, leases: Vec::new(), files };
        overlay.weftd(0, &store);
        if plain_peer {
            overlay.plain_peer();
        } else {
            overlay.weftd(1, &store);
        }
        for host in 0..if plain_peer { 1 } else { 2 } {
            wait_until(Duration::from_secs(10), "each daemon learns the other's lease", || {
                Status::try_of(&overlay.dir(host)).is_some_and(|status| status.routes() == 1)
            });
        }
        overlay.connect_pods();
        overlay
    }

    fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    fn weftd(&mut self, host: usize, store: &str) {
        let dir = self.dir(host);
        let mut daemon = weftd_in(&self.hosts[host], UNDERLAY[host], &dir, &[store]);
        self.leases.push(SubnetEnv::wait(&dir.join("subnet.env"), &mut daemon));
        self.daemons.push(daemon);
    }

    fn plain_peer(&mut self) {
        reserve(self.files.path(), "10.5.200.0-24", UNDERLAY[1]);
        let program = example("plain-peer");
        let program = program.to_str().expect("the target directory has a readable name");
        let (bind, near) = (format!("{}:8285", UNDERLAY[1]), &self.leases[0].subnet);
        let route = format!("{near}={}:8285", UNDERLAY[0]);
        let host = &self.hosts[1];
        let argv =
            [program, "--tun", "flannel0", "--bind", &bind, "--route", &route, "--ports", "1"];
        self.daemons.push(host.spawn(&argv));
        wait_until(Duration::from_secs(5), "the peer makes its device", || {
            host.succeeds(&["ip", "link", "show", "flannel0"])
        });
        host.address("flannel0", "10.5.200.0/32");
        host.exec(&["ip", "link", "set", "flannel0", "mtu", "1472", "up"]);
        host.exec(&["ip", "route", "add", "10.5.0.0/16", "dev", "flannel0"]);
        let subnet = "10.5.200.1/24".to_owned();
        self.leases.push(SubnetEnv { subnet, mtu_bytes: 1472 });
    }

    fn connect_pods(&self) {
        for ((host, pod), lease) in self.hosts.iter().zip(&self.pods).zip(&self.leases) {
            host.link("pod0", pod, "eth0", lease.mtu_bytes);
            host.address("pod0", &lease.subnet);
            pod.address("eth0", &format!("{}/24", lease.pod_address()));
            let gateway = lease.gateway().to_string();
            pod.exec(&["ip", "route", "add", "default", "via", &gateway]);
        }
        let far = self.leases[1].pod_address().to_string();
        wait_until(Duration::from_secs(5), "the pods reach each other", || {
            self.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.2", &far])
        });
    }

    /// Both links of the router take no more than this from now on.
    fn narrow(&self, mtu_bytes: u32) {
        for port in ["port0", "port1"] {
            self.router.exec(&["ip", "link", "set", port, "mtu", &mtu_bytes.to_string()]);
        }
    }

    /// What subnet.env of a host says.
    fn mtu_bytes(&self, host: usize) -> Option<u32> {
        SubnetEnv::read(&self.dir(host).join("subnet.env")).map(|env| env.mtu_bytes)
    }

    #[track_caller]
    fn wait_for_mtu(&self, limit: Duration, mtu_bytes: u32) -> Duration {
        let started = Instant::now();
        let what = format!("device, subnet.env and status have the MTU {mtu_bytes}");
        wait_until(limit, &what, || {
            let link = self.hosts[0].exec(&["ip", "link", "show", "flannel0"]);
            link.contains(&format!("mtu {mtu_bytes} "))
                && self.mtu_bytes(0) == Some(mtu_bytes)
                && Status::of(&self.dir(0)).0["lease"]["mtu_bytes"] == mtu_bytes
        });
        started.elapsed()
    }
}

/// A TCP stream from pod 0 to pod 1 that never ends, and when it last moved.
struct Stream {
    stop: AtomicBool,
    moved: Mutex<(Instant, Duration)>,
}

impl Stream {
    fn run(&self, overlay: &Routed, work: impl FnOnce()) {
        let address = overlay.leases[1].pod_address();
        let listener = overlay.pods[1].enter(|| TcpListener::bind((address, 0))).expect("free");
        let target = listener.local_addr().expect("a listener has an address");
        let mut sender = overlay.pods[0]
            .enter(|| TcpStream::connect_timeout(&target, Duration::from_secs(5)))
            .expect("the pods reach each other");
        let (mut receiver, _) = listener.accept().expect("the connection that was made");
        for stream in [&sender, &receiver] {
            let short = Some(Duration::from_millis(50));
            stream.set_read_timeout(short).expect("a time-out is not zero");
            stream.set_write_timeout(short).expect("a time-out is not zero");
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                let chunk = vec![7; 16 << 10];
                while !self.stop.load(Ordering::Relaxed) {
                    match sender.write(&chunk) {
                        // A few hundred megabits are enough to see it stop.
                        Ok(_) => thread::sleep(Duration::from_micros(500)),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(error) => panic!("the stream was reset: {error}"),
                    }
                }
            });
            scope.spawn(|| {
                let mut chunk = vec![0; 64 << 10];
                while !self.stop.load(Ordering::Relaxed) {
                    match receiver.read(&mut chunk) {
                        Ok(_) => {
                            let mut moved = self.moved.lock().expect("no panic under the lock");
                            moved.1 = moved.1.max(moved.0.elapsed());
                            moved.0 = Instant::now();
                        }
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(error) => panic!("the stream was reset: {error}"),
                    }
                }
            });
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            self.stop.store(true, Ordering::Relaxed);
            done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    }

    fn new() -> Self {
        let moved = Mutex::new((Instant::now(), Duration::ZERO));
        Self { stop: AtomicBool::new(false), moved }
    }

    /// The longest pause since the last call; the one that lasts included.
    fn longest_pause(&self) -> Duration {
        let mut moved = self.moved.lock().expect("no panic under the lock");
        let longest = moved.1.max(moved.0.elapsed());
        moved.1 = Duration::ZERO;
        longest
    }
}

/// Narrows the path step by step under a TCP stream, then widens it; gives what that took.
fn narrow_and_widen(overlay: &Routed) -> Vec<String> {
    let mut figures = Vec::new();
    let stream = Stream::new();
    stream.run(overlay, || {
        thread::sleep(Duration::from_millis(1500));
        stream.longest_pause();
        for (router_bytes, expected) in [(1400, 1372), (1300, 1272), (576, 548)] {
            overlay.narrow(router_bytes);
            let found = overlay.wait_for_mtu(STALL_MAX, expected);
            thread::sleep(STALL_MAX.saturating_sub(found) + Duration::from_millis(500));
            let pause = stream.longest_pause();
            figures.push(format!(
                "{router_bytes}: MTU {expected} after {found:?}, TCP stood {pause:?}"
            ));
            assert!(pause <= STALL_MAX, "TCP stood {pause:?} behind a router of {router_bytes}");
        }
        overlay.narrow(1500);
        let healed = overlay.wait_for_mtu(HEAL_MAX, 1472);
        figures.push(format!("wide again: MTU 1472 after {healed:?}"));
        thread::sleep(Duration::from_millis(500));
        let pause = stream.longest_pause();
        assert!(pause <= STALL_MAX, "TCP stood {pause:?} while the path became wide again");
    });
    let log = overlay.daemons[0].output();
    let told: Vec<_> = log.lines().filter(|line| line.contains("the MTU of flannel0")).collect();
    assert_eq!(told.len(), 4, "one line a change: {told:#?}");
    assert!(told[0].contains("172.20.2.1:8285 of more than 1372 bytes get lost"), "{told:#?}");
    let large = ["ping", "-q", "-c3", "-i0.02", "-W1", "-Mdont", "-s1444"];
    let far = overlay.leases[1].pod_address().to_string();
    let large: Vec<_> = large.into_iter().chain([far.as_str()]).collect();
    assert!(overlay.pods[0].succeeds(&large), "large packets are lost on a path that is wide");
    figures
}

#[test]
fn tcp_goes_on_behind_a_router_that_became_narrow_and_says_nothing() {
    let overlay = Routed::start(false);
    println!("{:#?}", narrow_and_widen(&overlay));
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

#[test]
fn a_peer_that_knows_nothing_of_weft_is_enough_to_find_a_narrow_path() {
    let overlay = Routed::start(true);
    println!("{:#?}", narrow_and_widen(&overlay));
    Status::settled(&overlay.dir(0));
}
