//! weftd and a peer that speaks the plain protocol, one packet per datagram, without offloads and
//! from source ports that nobody announced, as flannel's own proxy might.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tempfile::TempDir;

use crate::support::lab::{Lab, Namespace, Process, SubnetEnv, UNDERLAY, wait_until};
use crate::support::overlay::{CONFIG, local_store, reserve};
use crate::support::packet::{Sniffer, ipv4};
use crate::support::status::Status;
use crate::support::traffic::{
    STALL, echo, payload, port, tcp_transfer, udp_sizes, udp_socket, uninterrupted,
};

const MTU: usize = 1472;
const ICMP_OVERHEAD: usize = 28;
const UDP_OVERHEAD: usize = 28;

/// weftd on host 0, the plain peer on host 1.
struct Mixed {
    daemon: Process,
    peer: Process,
    lab: Lab,
    leases: [SubnetEnv; 2],
    files: TempDir,
}

impl Mixed {
    fn start(ports: &str, arguments: &[&str]) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let lab = Lab::two_hosts();
        let store = local_store(files.path(), CONFIG);
        reserve(files.path(), "10.5.200.0-24", UNDERLAY[1]);
        let dir = files.path().join("h0");
        let mut all = vec![store.as_str()];
        all.extend(arguments);
        let mut daemon = lab.weftd(0, &dir, &all);
        let own = SubnetEnv::wait(&dir.join("subnet.env"), &mut daemon);
        let other = SubnetEnv { subnet: "10.5.200.1/24".to_owned(), mtu_bytes: own.mtu_bytes };
        let peer = lab.proxy(1, "plain-peer", &other, &own, &["--ports", ports]);
        let leases = [own, other];
        lab.connect_pods(leases.each_ref());
        wait_until(Duration::from_secs(5), "weftd learns the plain peer's lease", || {
            Status::try_of(&dir).is_some_and(|status| status.routes() == 1)
        });
        Self { daemon, peer, lab, leases, files }
    }

    fn pod(&self, host: usize) -> Ipv4Addr {
        self.leases[host].pod_address()
    }

    fn dir(&self) -> PathBuf {
        self.files.path().join("h0")
    }

    /// Fails if either program died, or weftd dropped anything but the kernel's IPv6 chatter.
    #[track_caller]
    fn assert_well(&mut self) {
        assert!(self.daemon.ended().is_none(), "weftd died: {}", self.daemon.output());
        assert!(self.peer.ended().is_none(), "the peer died: {}", self.peer.output());
        let status = Status::of(&self.dir());
        assert_eq!(status.drops_total("ingress"), 0, "{}", status.0["ingress"]);
        assert_eq!(
            status.drops_total("egress"),
            status.drops("egress", "ipv6"),
            "{}",
            status.0["egress"]
        );
    }
}

/// Every size near a boundary of headers, offloads and MTU, and a walk in between.
fn sizes(smallest: usize, largest: usize) -> Vec<usize> {
    let near = |middle: usize| middle.saturating_sub(2)..=middle + 2;
    let mut sizes: Vec<usize> = [smallest, 64, 128, 256, 512, 576, 1024, 1280, largest]
        .into_iter()
        .flat_map(near)
        .chain((smallest..largest).step_by(13))
        .filter(|size| (smallest..=largest).contains(size))
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[test]
fn plain_peer_with_changing_source_ports_exchanges_traffic() {
    let mut mixed = Mixed::start("0", &[]);
    let [near, far] = &mixed.lab.pods;
    udp_sizes(near, far, mixed.pod(1), 0..=MTU - UDP_OVERHEAD);
    udp_sizes(far, near, mixed.pod(0), 0..=MTU - UDP_OVERHEAD);
    udp_sizes(near, far, mixed.pod(1), [1445, 3000, 20_000]);
    udp_sizes(far, near, mixed.pod(0), [1445, 3000, 20_000]);
    tcp_transfer(near, far, mixed.pod(1), 16 << 20, false);
    tcp_transfer(far, near, mixed.pod(0), 16 << 20, false);
    tcp_transfer(near, far, mixed.pod(1), 8 << 20, true);
    mixed.assert_well();
}

#[test]
fn icmp_crosses_at_every_size_both_ways() {
    let mut mixed = Mixed::start("0", &[]);
    for from in [0, 1] {
        let to = mixed.pod(1 - from).to_string();
        let script = sizes(ICMP_OVERHEAD, MTU)
            .into_iter()
            .map(|size| {
                let bytes = size - ICMP_OVERHEAD;
                // Again, for the answer of a busy machine may be late.
                let ping = format!("ping -q -c1 -W2 -Mdo -s{bytes} {to} >/dev/null");
                format!("{ping} || {ping} || {ping} || echo {size}\n")
            })
            .collect::<String>();
        let broken = mixed.lab.pods[from].exec(&["sh", "-c", &script]);
        assert_eq!(broken, "", "pings of these inner sizes from pod {from} get no answer");
    }
    mixed.assert_well();
}

/// The smallest packets have no protocol inside: only raw sockets can make them.
#[test]
fn tiny_packets_cross_both_ways() {
    /// A number for experiments (RFC 3692), which no kernel answers.
    const EXPERIMENT: u8 = 253;
    let mut mixed = Mixed::start("4", &[]);
    let sizes = (20..=60).chain([MTU - 1, MTU]);
    for from in [0, 1] {
        let (source, destination) = (mixed.pod(from), mixed.pod(1 - from));
        let sniffer = Sniffer::start(&mixed.lab.pods[1 - from], move |packet| {
            packet.get(9) == Some(&EXPERIMENT) && packet[16..20] == destination.octets()
        });
        let raw = mixed.lab.pods[from].enter(|| {
            Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))
        });
        let raw = raw.unwrap();
        let target = SocketAddr::from((destination, 0)).into();
        let sent: Vec<Vec<u8>> = sizes
            .clone()
            .map(|size| ipv4(source, destination, EXPERIMENT, &payload(9, size - 20)))
            .collect();
        for packet in &sent {
            raw.send_to(packet, &target).unwrap();
        }
        wait_until(Duration::from_secs(5), "every small packet arrives", || {
            sniffer.count() >= sent.len()
        });
        let received = sniffer.finish();
        assert_eq!(received.len(), sent.len(), "packets were doubled");
        for (sent, received) in sent.iter().zip(&received) {
            assert_eq!(received.len(), sent.len(), "a packet changed its length");
            assert_eq!(received[20..], sent[20..], "a packet of {} bytes was damaged", sent.len());
        }
    }
    mixed.assert_well();
}

#[test]
fn daemons_without_offloads_reach_a_plain_peer() {
    let mut mixed = Mixed::start("8", &["--offload=none"]);
    let [near, far] = &mixed.lab.pods;
    udp_sizes(near, far, mixed.pod(1), [0, 1, 700, 1443, 1444, 1445, 9000]);
    udp_sizes(far, near, mixed.pod(0), [0, 1, 700, 1443, 1444, 1445, 9000]);
    tcp_transfer(near, far, mixed.pod(1), 8 << 20, true);
    mixed.assert_well();
}

/// Bursts of equal packets are what weftd sends as one GSO batch: a plain peer sees datagrams.
#[test]
fn bursts_arrive_whole_and_in_order() {
    const BURSTS: usize = 40;
    const BURST: usize = 32;
    let mut mixed = Mixed::start("1", &[]);
    mixed.lab.steer_by_flow();
    for from in [0, 1] {
        let far = udp_socket(&mixed.lab.pods[1 - from], mixed.pod(1 - from));
        far.set_read_timeout(Some(STALL)).unwrap();
        let near = udp_socket(&mixed.lab.pods[from], mixed.pod(from));
        let target = SocketAddr::from((mixed.pod(1 - from), port(&far)));
        // What waits for a neighbour is sent by another processor than what comes behind it.
        assert!(mixed.lab.ping(from, mixed.pod(1 - from), 56));
        for burst in 0..BURSTS {
            burst_arrives(&near, &far, target, burst * BURST, BURST);
        }
    }
    mixed.assert_well();
}

fn burst_arrives(
    near: &UdpSocket,
    far: &UdpSocket,
    target: SocketAddr,
    first: usize,
    count: usize,
) {
    let packets: Vec<_> = (first..first + count)
        .map(|number| payload(number as u64, if number % 32 == 31 { 333 } else { 1000 }))
        .collect();
    for packet in &packets {
        near.send_to(packet, target).expect("the pod can send");
    }
    let mut buffer = [0; 2048];
    for (index, packet) in packets.iter().enumerate() {
        let length = uninterrupted(|| far.recv(&mut buffer));
        let length = length.unwrap_or_else(|_| panic!("packet {index} of a burst is lost"));
        assert!(buffer[..length] == packet[..], "packet {index} of a burst is out of place");
    }
}

/// One pod of the plain peer talks to many ports at once; flows must not be mixed up.
#[test]
fn many_flows_at_once_keep_their_data_apart() {
    let mut mixed = Mixed::start("3", &[]);
    let stop = AtomicBool::new(false);
    let servers: Vec<UdpSocket> =
        (0..16).map(|_| udp_socket(&mixed.lab.pods[0], mixed.pod(0))).collect();
    let (pod, address): (&Namespace, _) = (&mixed.lab.pods[1], mixed.pod(0));
    thread::scope(|scope| {
        for server in &servers {
            scope.spawn(|| echo(server, &stop));
        }
        let clients: Vec<_> = servers
            .iter()
            .map(|server| {
                let target = SocketAddr::from((address, port(server)));
                scope.spawn(move || {
                    let client = udp_socket(pod, Ipv4Addr::UNSPECIFIED);
                    client.set_read_timeout(Some(STALL)).unwrap();
                    client.connect(target).unwrap();
                    let mut buffer = [0; 2048];
                    for number in 0..100_u64 {
                        let sent = payload(number << 16 | u64::from(target.port()), 900);
                        client.send(&sent).unwrap();
                        let length = uninterrupted(|| client.recv(&mut buffer));
                        let length = length.expect("an answer is lost");
                        assert!(buffer[..length] == sent[..], "a flow got another's data");
                    }
                })
            })
            .collect();
        let outcomes: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(Result::is_ok), "see above");
    });
    mixed.assert_well();
}
