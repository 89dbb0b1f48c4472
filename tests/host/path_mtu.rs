//! A router on the way whose next link is narrower, and a filter that keeps it from saying so; and
//! messages that say so of a path that is wide.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};
use tempfile::TempDir;
use weft::packet::checksum;

use crate::kernel_backends::families::v6_subnet;
use crate::support::cluster::{Cluster, Nodes, weftd_in};
use crate::support::lab::{Namespace, Process, SubnetEnv, example, wait_until};
use crate::support::overlay::{CONFIG, local_store, reserve};
use crate::support::packet::{echo_reply, echo_requests, raw_socket, send_raw};
use crate::support::status::Status;
use crate::support::traffic::{tcp_transfer, uninterrupted};

/// TCP goes on after some 3 seconds where nothing else runs, and these tests run beside others.
const STALL_MAX: Duration = Duration::from_secs(12);

/// A path is looked at again every 30 seconds; with what that takes, and a busy machine.
const HEAL_MAX: Duration = Duration::from_secs(60);

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
        Self::start_with(plain_peer, CONFIG)
    }

    fn start_with(plain_peer: bool, config: &str) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let store = local_store(files.path(), config);
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

    /// Gives the pods addresses of IPv6, and returns them.
    fn connect_pods_v6(&self) -> [Ipv6Addr; 2] {
        [0, 1].map(|host| {
            self.hosts[host].exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"]);
            let subnet = v6_subnet(&self.dir(host).join("subnet.env"));
            let (gateway, _) = subnet.split_once('/').expect("nodes have IPv6");
            let gateway: Ipv6Addr = gateway.parse().expect("an address");
            let pod = Ipv6Addr::from_bits(gateway.to_bits() + 1);
            self.hosts[host].exec(&["ip", "address", "add", &subnet, "dev", "pod0", "nodad"]);
            let address = format!("{pod}/64");
            self.pods[host].exec(&["ip", "address", "add", &address, "dev", "eth0", "nodad"]);
            let via = gateway.to_string();
            self.pods[host].exec(&["ip", "-6", "route", "add", "default", "via", &via]);
            pod
        })
    }

    /// Both links of the router take no more than this from now on.
    fn narrow(&self, mtu_bytes: u32) {
        for port in ["port0", "port1"] {
            self.router.exec(&["ip", "link", "set", port, "mtu", &mtu_bytes.to_string()]);
        }
    }

    /// The narrow path is in the status of host 0, and in the row of the peer behind it.
    #[track_caller]
    fn wait_until_seen(&self, mtu_bytes: u32) {
        wait_until(Duration::from_secs(5), "the status has the narrow path", || {
            let Status(status) = Status::of(&self.dir(0));
            status["narrow_paths"] == 1 && status["routes"][0]["path_mtu_bytes"] == mtu_bytes
        });
    }

    /// The MTU of the route from host 0 to the lease of host 1, if it has one of its own.
    #[track_caller]
    fn wait_for_path_mtu(&self, limit: Duration, mtu_bytes: Option<u32>) -> Duration {
        let started = Instant::now();
        let network = format!("{}/24 ", self.leases[1].network());
        let what = format!("the route to {network} has the MTU {mtu_bytes:?}");
        wait_until(limit, &what, || {
            let routes = self.hosts[0].exec(&["ip", "route", "show", "dev", "flannel0"]);
            let route = routes.lines().find(|route| route.starts_with(&network));
            match mtu_bytes {
                Some(bytes) => route.is_some_and(|route| route.contains(&format!("mtu {bytes}"))),
                None => route.is_none(),
            }
        });
        started.elapsed()
    }

    /// One path changes nothing for the others: neither the device's MTU nor what new pods get.
    #[track_caller]
    fn assert_device_keeps_its_mtu(&self) {
        let link = self.hosts[0].exec(&["ip", "link", "show", "flannel0"]);
        assert!(link.contains("mtu 1472 "), "{link}");
        let env = SubnetEnv::read(&self.dir(0).join("subnet.env"));
        assert_eq!(env.map(|env| env.mtu_bytes), Some(1472));
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
                    match uninterrupted(|| sender.write(&chunk)) {
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
                    match uninterrupted(|| receiver.read(&mut chunk)) {
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

    /// Whether anything arrived so short a time ago.
    fn moved_within(&self, time: Duration) -> bool {
        self.moved.lock().expect("no panic under the lock").0.elapsed() < time
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
            let found = overlay.wait_for_path_mtu(STALL_MAX, Some(expected));
            overlay.assert_device_keeps_its_mtu();
            overlay.wait_until_seen(expected);
            wait_until(STALL_MAX, "TCP goes on", || {
                stream.moved_within(Duration::from_millis(200))
            });
            let pause = stream.longest_pause();
            figures.push(format!(
                "{router_bytes}: MTU {expected} after {found:?}, TCP stood {pause:?}"
            ));
        }
        overlay.narrow(1500);
        let healed = overlay.wait_for_path_mtu(HEAL_MAX, None);
        figures.push(format!("wide again after {healed:?}"));
        thread::sleep(Duration::from_millis(500));
        let pause = stream.longest_pause();
        assert!(pause <= STALL_MAX, "TCP stood {pause:?} while the path became wide again");
    });
    let log = overlay.daemons[0].output();
    let told: Vec<_> = log.lines().filter(|line| line.contains(" has the MTU ")).collect();
    // A search that loses echoes to a busy machine finds less at first, which is told as well.
    let expected = [1372, 1272, 548].map(|bytes| format!("172.20.2.1:8285 carries {bytes} bytes"));
    let named = told.iter().filter_map(|line| expected.iter().find(|it| line.contains(*it)));
    assert_eq!(named.collect::<Vec<_>>(), expected.each_ref(), "one line a change: {told:#?}");
    assert!(log.contains("carries 1472 bytes again"), "{log}");
    let large = ["ping", "-q", "-c3", "-i0.02", "-W1", "-Mdont", "-s1444"];
    let far = overlay.leases[1].pod_address().to_string();
    let large: Vec<_> = large.into_iter().chain([far.as_str()]).collect();
    assert!(overlay.pods[0].succeeds(&large), "large packets are lost on a path that is wide");
    figures
}

#[test]
fn tcp_survives_a_silent_mtu_drop() {
    let overlay = Routed::start(false);
    println!("{:#?}", narrow_and_widen(&overlay));
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

#[test]
fn plain_peer_suffices_to_find_a_narrow_path() {
    let overlay = Routed::start(true);
    println!("{:#?}", narrow_and_widen(&overlay));
    Status::settled(&overlay.dir(0));
}

/// A packet of IPv6 may always have 1,280 bytes, whatever the path takes.
#[test]
fn a_path_below_ipv6s_least_carries_it_in_fragments() {
    let config = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48"}"#;
    let overlay = Routed::start_with(false, config);
    let pods = overlay.connect_pods_v6();
    let wait_for_ping = |from: usize, payload_bytes: u16| {
        let (to, size) = (pods[1 - from].to_string(), format!("-s{payload_bytes}"));
        wait_until(STALL_MAX, &format!("{payload_bytes} bytes from pod {from}"), || {
            let argv = ["ping", "-6", "-q", "-c1", "-W1", "-Mdo", &size, &to];
            overlay.pods[from].succeeds(&argv)
        });
    };
    wait_for_ping(0, 1424);
    let limited = || {
        // Paths are measured while pods send.
        let to = pods[1].to_string();
        overlay.pods[0].succeeds(&["ping", "-6", "-q", "-c1", "-W0.2", "-Mdo", "-s1424", &to]);
        let routes = overlay.hosts[0].exec(&["ip", "-6", "route", "show", "dev", "flannel0"]);
        routes.contains("mtu 1280")
    };
    // The ways out of the router alone: what comes in too long for a link is gone before it could
    // be fragmented.
    let narrow = |words: &[&str]| {
        for (port, network) in [("port0", "172.20.1.0/24"), ("port1", "172.20.2.0/24")] {
            let argv = [&["ip", "route", "replace", network, "dev", port], words].concat();
            overlay.router.exec(&argv);
        }
    };
    narrow(&["mtu", "lock", "1200"]);
    wait_until(HEAL_MAX, "the route of IPv6 has its least MTU", limited);
    for from in 0..2 {
        wait_for_ping(from, 1232);
        tcp_transfer(&overlay.pods[from], &overlay.pods[1 - from], pods[1 - from], 4 << 20, true);
    }
    assert!(fragments_made(&overlay.router) > 0, "nothing was fragmented");
    narrow(&[]);
    wait_until(HEAL_MAX, "the path is wide again", || !limited());
    // Pods remember for ten minutes what they were told.
    overlay.pods[0].exec(&["ip", "-6", "route", "flush", "cache"]);
    overlay.pods[1].exec(&["ip", "-6", "route", "flush", "cache"]);
    wait_for_ping(0, 1424);
}

/// Sends `to` the ICMP message that a datagram of the tunnel from host 0 to host 1 is too long for
/// a link of `mtu_bytes`.
fn forge_fragmentation_needed(from: &Namespace, to: Ipv4Addr, mtu_bytes: u16) {
    let mut quoted = vec![0x45, 0, 0x05, 0xdc, 0, 0, 0x40, 0, 63, 17, 0, 0];
    quoted.extend(UNDERLAY.iter().flat_map(Ipv4Addr::octets));
    let sum = checksum::finish(checksum::sum(&quoted));
    quoted[10..12].copy_from_slice(&sum);
    quoted.extend([8285_u16, 8285, 1480, 0].iter().flat_map(|word| word.to_be_bytes()));
    let mut message = vec![3, 4, 0, 0, 0, 0];
    message.extend(mtu_bytes.to_be_bytes());
    message.extend(quoted);
    let sum = checksum::finish(checksum::sum(&message));
    message[2..4].copy_from_slice(&sum);
    from.enter(|| {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
        socket.send_to(&message, &SocketAddr::from((to, 0)).into())
    })
    .expect("root may send any ICMP message");
}

/// Fragments that a host's kernel has made.
fn fragments_made(host: &Namespace) -> u64 {
    let text = host.exec(&["cat", "/proc/net/snmp"]);
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let mut columns = names.split(' ').zip(values.split(' '));
    let (_, value) = columns.find(|(name, _)| *name == "FragCreates").expect("a counter");
    value.parse().expect("a number")
}

#[test]
fn forged_fragmentation_needed_has_nothing_fragmented() {
    let overlay = Routed::start(false);
    overlay.router.exec(&["nft", "flush", "chain", "inet", "t", "out"]);
    let (near, far) = (&overlay.hosts[0], overlay.leases[1].pod_address().to_string());
    for (who, forger, mtu_bytes) in
        [("a stranger", &overlay.router, 600), ("a pod", &overlay.pods[0], 590)]
    {
        forge_fragmentation_needed(forger, UNDERLAY[0], mtu_bytes);
        // The kernel believes it, and so do sockets that leave path MTU discovery to it.
        let believed = format!("mtu {mtu_bytes}");
        wait_until(Duration::from_secs(10), "the kernel believes the forged message", || {
            near.exec(&["ip", "route", "get", &UNDERLAY[1].to_string()]).contains(&believed)
        });
        let large = ["ping", "-q", "-c5", "-i0.02", "-W5", "-Mdo", "-s1444", &far];
        assert!(overlay.pods[0].succeeds(&large), "large packets are lost after {who} forged");
        assert_eq!(fragments_made(near), 0, "{who} has the tunnel's datagrams fragmented");
    }
}

#[test]
fn two_idle_nodes_stop_probing_each_other() {
    let overlay = Routed::start(false);
    for (pod, lease) in overlay.pods.iter().zip(overlay.leases.iter().rev()) {
        let far = lease.pod_address().to_string();
        pod.exec(&["ping", "-q", "-c3", "-i0.02", "-W5", "-s1444", &far]);
    }
    let sent = || [0, 1].map(|host| Status::of(&overlay.dir(host)).count("egress", "writes"));
    // A peer in use is asked two or three times a second.
    wait_until(Duration::from_secs(60), "neither sends anything for 3 seconds", || {
        let before = sent();
        thread::sleep(Duration::from_secs(3));
        sent() == before
    });
}

#[test]
fn unmeasurable_narrow_path_is_fragmented() {
    let overlay = Routed::start(false);
    overlay.hosts[1].exec(&["sysctl", "-qw", "net.ipv4.icmp_echo_ignore_all=1"]);
    // The way out of the router: what comes in too long is gone before it could fragment it.
    overlay.router.exec(&["ip", "link", "set", "port1", "mtu", "1400"]);
    let far = overlay.leases[1].pod_address().to_string();
    wait_until(Duration::from_secs(30), "large packets pass the router in fragments", || {
        overlay.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.5", "-Mdo", "-s1444", &far])
    });
    overlay.assert_device_keeps_its_mtu();
}

#[test]
fn one_narrow_path_leaves_other_peers_alone() {
    let files = tempfile::tempdir().expect("a directory for the test");
    let store = local_store(files.path(), CONFIG);
    let cluster = Cluster::new(3);
    let dirs = [0, 1, 2].map(|host| files.path().join(format!("h{host}")));
    let mut daemons = Vec::new();
    let leases = [0, 1, 2].map(|host| {
        let mut daemon = cluster.weftd(host, &dirs[host], &[&store]);
        let lease = SubnetEnv::wait(&dirs[host].join("subnet.env"), &mut daemon);
        daemons.push(daemon);
        lease
    });
    for dir in &dirs {
        wait_until(Duration::from_secs(20), "each daemon learns the others' leases", || {
            Status::try_of(dir).is_some_and(|status| status.routes() == 2)
        });
    }
    let pods = [0, 1, 2].map(|host| cluster.pod(host, &leases[host]));
    let [_, healthy, narrow] = leases.each_ref().map(|lease| lease.pod_address().to_string());
    let host = &cluster.hosts[0];
    // By hand, and more than the narrow path takes.
    host.exec(&["ip", "link", "set", "flannel0", "mtu", "1450"]);
    cluster.switch.exec(&["ip", "link", "set", "port2", "mtu", "1400"]);
    let _traffic = pods[0].spawn(&["ping", "-q", "-i0.1", "-s1400", &narrow]);
    let found = || host.exec(&["ip", "route", "show", "dev", "flannel0"]).contains("mtu 1372");
    wait_until(Duration::from_secs(30), "the narrow path is found", found);
    for fragments in ["-Mdo", "-Mdont"] {
        // 1450 bytes.
        let large = ["ping", "-q", "-c5", "-i0.02", "-W5", fragments, "-s1422", &healthy];
        assert!(pods[0].succeeds(&large), "packets to a healthy peer are lost, {fragments}");
    }
    wait_until(Duration::from_secs(30), "the narrow path is found on both sides", || {
        pods[0].succeeds(&["ping", "-q", "-c1", "-W0.5", "-Mdont", "-s1422", &narrow])
    });
    let link = host.exec(&["ip", "link", "show", "flannel0"]);
    assert!(link.contains("mtu 1450 "), "{link}");
    assert_eq!(SubnetEnv::read(&dirs[0].join("subnet.env")).map(|env| env.mtu_bytes), Some(1472));
    // Whoever removes the route has it back.
    let network = format!("{}/24", leases[2].network());
    host.exec(&["ip", "route", "delete", &network]);
    wait_until(Duration::from_secs(10), "the route is restored", found);
}

/// A node of the cluster answers for another, outside of the tunnel, with the token of the echoes
/// that it was sent itself.
#[test]
fn nobody_else_makes_a_narrow_path_wide() {
    let nodes = Nodes::start(3, CONFIG);
    let [own, other, narrow] = [0, 1, 2].map(|host: usize| nodes.leases[host].network());
    let [asker, forger] = [0, 1].map(|host: usize| &nodes.cluster.hosts[host]);
    let requests = echo_requests(forger, own, other, 1472);
    nodes.cluster.switch.exec(&["ip", "link", "set", "port2", "mtu", "1400"]);
    let ping = |to: Ipv4Addr| asker.spawn(&["ping", "-q", "-i0.1", "-s1350", &to.to_string()]);
    let _traffic = [other, narrow].map(ping);
    wait_until(Duration::from_secs(30), "the path to the forger is measured", || {
        requests.count() > 0
    });
    let request = requests.finish().swap_remove(0);
    nodes.bypass(1, own, 0);
    let its_route = format!("{narrow}/24 ");
    let route_mtu_bytes = || {
        let routes = asker.exec(&["ip", "route", "show", "dev", "flannel0"]);
        let route = routes.lines().find(|route| route.starts_with(&its_route))?;
        route.split_whitespace().skip_while(|word| *word != "mtu").nth(1)?.parse::<u32>().ok()
    };
    wait_until(Duration::from_secs(30), "the narrow path is found", || {
        route_mtu_bytes() == Some(1372)
    });
    let forged: Vec<_> = (0..16).map(|number| echo_reply(&request, narrow, number, 1472)).collect();
    let socket = raw_socket(forger);
    // It is searched again after 5 and then every 30 seconds.
    let end = Instant::now() + HEAL_MAX;
    while Instant::now() < end {
        forged.iter().for_each(|packet| send_raw(&socket, packet));
        thread::sleep(Duration::from_millis(100));
        // A search that loses echoes to a busy machine may find less; more is the forger's doing.
        let bytes = route_mtu_bytes();
        let is_narrow = bytes.is_some_and(|bytes| bytes <= 1372);
        assert!(is_narrow, "the forged answers made the narrow path wide: MTU {bytes:?}");
    }
}
