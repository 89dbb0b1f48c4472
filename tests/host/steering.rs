//! Which queue of the TUN device the kernel gives a packet: one for all packets of a flow, whatever
//! their form. Needs root, for it makes network namespaces.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;

use weft::device::{LANES, Steering, Tun, TunOffload};
use weft::offload::VNET_HEADER_BYTES;

use crate::support::dataplane::*;
use crate::support::lab::{Namespace, wait_until};

const NO_OFFLOAD: TunOffload = TunOffload { tso: false, uso: false };
const QUEUES: NonZeroU16 = NonZeroU16::new(8).expect("not zero");

/// Flows of each kind. That all of them share one queue of eight by chance is one run in 10^27.
const FLOWS: u16 = 32;

/// A host whose overlay device has several queues, and a device on which pods' packets come in.
struct Queues {
    host: Namespace,
    queues: Vec<Tun>,
    pod: Tun,
}

impl Queues {
    fn new(program: io::Result<Steering>) -> Self {
        let program = program.expect("root may load the program");
        let host = Namespace::new("host");
        host.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.disable_ipv6=1"]);
        host.exec(&["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"]);
        let (queues, pod) = host.enter(|| {
            let queues = Tun::open("flannel%d", NO_OFFLOAD, QUEUES).expect("we are root");
            (
                queues,
                Tun::open("pod%d", NO_OFFLOAD, NonZeroU16::MIN).expect("we are root").remove(0),
            )
        });
        queues[0].steer(&program).expect("the device takes it");
        host.address("flannel0", &format!("{TUN}/32"));
        for (device, subnet) in [("flannel0", "10.5.0.0/16"), ("pod0", "10.5.1.0/24")] {
            host.exec(&["ip", "link", "set", device, "up"]);
            host.exec(&["ip", "route", "add", subnet, "dev", device]);
        }
        Self { host, queues, pod }
    }

    /// As [`Self::new`], for packets of IPv6 to fd00:5::/48.
    fn of_ipv6(program: io::Result<Steering>) -> Self {
        let queues = Self::new(program);
        let host = &queues.host;
        for setting in ["all.disable_ipv6=0", "default.disable_ipv6=0", "all.forwarding=1"] {
            host.exec(&["sysctl", "-qw", &format!("net.ipv6.conf.{setting}")]);
        }
        host.exec(&["ip", "-6", "route", "add", "fd00:5::/48", "dev", "flannel0"]);
        queues
    }

    /// The queue to which `packet` goes.
    fn of(&self, packet: &[u8]) -> usize {
        let header = [0; VNET_HEADER_BYTES];
        let parts = [io::IoSlice::new(&header), io::IoSlice::new(packet)];
        self.pod.write(&parts).expect("the device is up");
        // The kernel may send packets of its own.
        let end = &packet[packet.len() - 8..];
        let mut found = None;
        wait_until(PATIENCE, "a queue has the packet", || {
            let mut frame = [0; 2048];
            let mut has_it = |queue: &Tun| {
                queue.read(&mut frame).is_ok_and(|bytes| frame[..bytes].ends_with(end))
            };
            found = self.queues.iter().position(&mut has_it);
            found.is_some()
        });
        found.expect("it was waited for")
    }
}

/// The packet with four bytes of options, all of which do nothing.
fn with_options(mut packet: Vec<u8>) -> Vec<u8> {
    packet.splice(20..20, [1; 4]);
    let total_bytes = (packet.len() as u16).to_be_bytes();
    packet[2..4].copy_from_slice(&total_bytes);
    with(packet, 0, &[0x46])
}

#[test]
fn fragments_and_options_share_their_flows_queue() {
    let queues = Queues::new(Steering::by_flow());
    let mut used = [BTreeSet::new(), BTreeSet::new()];
    for flow in 0..FLOWS {
        let (from, to) = (SocketAddrV4::new(POD, 4000 + flow), SocketAddrV4::new(FAR, 5000));
        let datagram = udp(from, to, &[7; 64]);
        let forms = [
            with_options(datagram.clone()),
            with(datagram.clone(), 6, &[0, 0]),
            with(datagram.clone(), 6, &[0x20, 0]),
            with(datagram.clone(), 6, &[0x20, 9]),
            with(datagram.clone(), 6, &[0, 18]),
        ];
        let home = queues.of(&datagram);
        for (form, packet) in forms.iter().enumerate() {
            assert_eq!(queues.of(packet), home, "UDP flow {flow}, form {form}");
        }
        // A segment's ports lie where a datagram's do; of the rest only the length matters.
        let segment = with(datagram, 9, &[TCP]);
        let home = queues.of(&segment);
        used[0].insert(home);
        assert_eq!(queues.of(&with_options(segment.clone())), home, "TCP flow {flow}, options");
        // A connection without path MTU discovery.
        let segment = with(segment, 6, &[0, 0]);
        let home = queues.of(&segment);
        used[1].insert(home);
        for fragment in [[0x20, 0], [0, 9]] {
            let fragment = with(segment.clone(), 6, &fragment);
            assert_eq!(queues.of(&fragment), home, "TCP flow {flow}, fragments");
        }
    }
    assert!(used[0].len() > 1, "all TCP connections of two pods share a queue");
    assert_eq!(used[1].len(), 1, "fragments of two pods share a queue");
}

/// Datagrams of IPv6 that are fragmented or have options, and those that are not: of one flow.
#[test]
fn extension_headers_share_their_flows_queue() {
    let packet = |headers: &[u8], first: u8, port: u16| {
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend((headers.len() as u16 + 20).to_be_bytes());
        packet.extend([first, 64]);
        for host in [2, 3] {
            packet.extend([0xfd, 0, 0, 5, 0, 0, 0, host, 0, 0, 0, 0, 0, 0, 0, 2]);
        }
        packet.extend(headers);
        packet.extend(port.to_be_bytes());
        packet.extend([19, 136].into_iter().chain([7; 16]));
        packet
    };
    let options = |next: u8| vec![next, 0, 1, 4, 0, 0, 0, 0];
    let fragment = |next: u8, offset: u8| vec![next, 0, 0, offset, 0, 0, 0, 7];
    let forms = [
        (options(UDP), 60),
        (fragment(UDP, 1), 44),
        (fragment(UDP, 8), 44),
        ([options(44), fragment(UDP, 1)].concat(), 0),
    ];
    let queues = Queues::of_ipv6(Steering::by_flow());
    let mut used = BTreeSet::new();
    for port in 4000..4000 + FLOWS {
        let home = queues.of(&packet(&[], UDP, port));
        for (headers, first) in &forms {
            let form = packet(headers, *first, port);
            assert_eq!(queues.of(&form), home, "UDP from {port} behind {first}");
        }
        let home = queues.of(&packet(&[], TCP, port));
        let optional = packet(&options(TCP), 60, port);
        assert_eq!(queues.of(&optional), home, "TCP from {port} with options");
        used.insert(home);
    }
    assert!(used.len() > 1, "all TCP connections of two pods share a queue");

    // Who has sent much and so left the prompt lane has left it with all of its packets.
    let queues = Queues::of_ipv6(Steering::by_sender());
    let whole = packet(&[], UDP, 4000);
    let home = (0..100).fold(0, |_, _| queues.of(&whole));
    assert_ne!(home % usize::from(LANES.get()), 0, "a flood has the prompt lane");
    for (headers, first) in &forms {
        assert_eq!(queues.of(&packet(headers, *first, 4000)), home, "behind {first}");
    }
}

/// As Linux chooses them for `connect`: even ones, one after the other.
#[test]
fn even_source_ports_reach_every_queue() {
    let queues = Queues::new(Steering::by_flow());
    let to = SocketAddrV4::new(FAR, 443);
    let connections = (0..FLOWS * 2).map(|number| SocketAddrV4::new(POD, 40_000 + 2 * number));
    let used: BTreeSet<usize> =
        connections.map(|from| queues.of(&with(udp(from, to, &[7; 64]), 9, &[TCP]))).collect();
    assert_eq!(used.len(), usize::from(QUEUES.get()), "connections reach {used:?} only");
}

/// More datagrams than the prompt lane takes at once from one sender to one receiver, which it does
/// within the time of the test.
const MANY: usize = 100;

#[test]
fn who_sends_much_leaves_the_prompt_lane() {
    let queues = Queues::new(Steering::by_sender());
    let lanes = usize::from(LANES.get());
    let from = |host: u8, port: u16| SocketAddrV4::new(Ipv4Addr::new(10, 5, 1, host), port);
    let to = SocketAddrV4::new(FAR, 5000);
    let mut bulk_lanes = BTreeSet::new();
    for host in 10..26 {
        let packet = udp(from(host, 4000), to, &[7; 64]);
        let used: Vec<_> = (0..MANY).map(|_| queues.of(&packet)).collect();
        let prompt = used[0];
        assert_eq!(prompt % lanes, 0, "the first packet waits behind others' bulk");
        let left = used.iter().position(|queue| *queue != prompt).expect("a flood stays");
        assert!(left >= 16, "{left} packets are no flood");
        let bulk = used[left];
        assert!(used[left..].iter().all(|queue| *queue == bulk), "in and out: {used:?}");
        assert_eq!((bulk / lanes, bulk % lanes > 0), (prompt / lanes, true), "another worker");
        assert_eq!(queues.of(&udp(from(host, 4001), to, &[7; 64])), bulk, "by another port");
        let ping = with(packet, 9, &[1]);
        assert_eq!(queues.of(&ping) % lanes, 0, "forged packets take a pod's pings with them");
        bulk_lanes.insert(bulk % lanes);
    }
    assert_eq!(bulk_lanes.len(), lanes - 1, "all floods meet in {bulk_lanes:?}");
}

#[test]
fn many_receivers_do_not_keep_a_sender_prompt() {
    let queues = Queues::new(Steering::by_sender());
    let from = SocketAddrV4::new(Ipv4Addr::new(10, 5, 1, 30), 4000);
    let to = |number: u16| {
        let [high, low] = number.to_be_bytes();
        SocketAddrV4::new(Ipv4Addr::new(10, 5, 100 + high, low), 5000)
    };
    let lanes = usize::from(LANES.get());
    let is_bulk = |number| !queues.of(&udp(from, to(number), &[7; 64])).is_multiple_of(lanes);
    assert!((0..2000).any(is_bulk), "a source with many receivers has the prompt lane to itself");
}
