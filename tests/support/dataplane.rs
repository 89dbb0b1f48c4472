//! A worker on a real TUN device, a peer's socket beside it, and packets as bytes.
//!
//! The host is a namespace that forwards between `flannel0`, the worker's device, and `pod0`, a
//! TUN device that the test itself reads and writes: whatever the kernel does to a packet on its
//! way is exactly what it would do to a pod's. The peer is a second namespace on the same wire.

use std::collections::HashMap;
use std::io::IoSlice;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;
use weft::device::{LANES, Steering, Tun, TunOffload, TunnelSocket};
use weft::engine::{Engine, RING_ENTRIES, Worker, WorkerConfig, WorkerEnd};
use weft::forward::{Leased, Local, Senders};
use weft::offload::{
    PartialChecksum, Segmentation, SegmentationKind, VNET_HEADER_BYTES, VnetHeader,
};
use weft::packet::{checksum, header};
use weft::route::{Families, Peer, Published, Table};
use weft::stats::{DirectionStats, DropReason, WorkerStats};

use super::lab::{Namespace, wait_until};
use super::pace::Stopwatch;
use super::traffic::uninterrupted;

/// Outer addresses and ports of the worker and of its peer.
pub const HOST: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 1), 8285);
pub const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 2), 8285);
/// An outer address on the same wire that no lease names.
pub const STRANGER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 9), 8285);
/// The worker's TUN address, a pod behind it, and a pod of the peer.
pub const TUN: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
pub const POD: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 2);
pub const FAR: Ipv4Addr = Ipv4Addr::new(10, 5, 2, 2);
/// An overlay address that nobody leases.
pub const UNLEASED: Ipv4Addr = Ipv4Addr::new(10, 5, 99, 2);
/// 1500 less the outer headers.
pub const MTU_BYTES: u16 = 1472;
/// Hops between `pod0` and the wire: the kernel's, which forwards, and the worker's.
pub const HOPS: u8 = 2;
/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
const ACK: u8 = 0x10;
const PSH: u8 = 0x08;

/// What a worker is started with.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub tun: TunOffload,
    pub gso: bool,
    pub gro: bool,
    pub mtu_bytes: u16,
    pub engine: Option<Engine>,
    pub ring_entries: u32,
    /// Of the tunnel socket, where it matters.
    pub send_buffer_bytes: Option<usize>,
    /// Whether the TUN device has lanes, chosen by sender, or one queue.
    pub lanes: bool,
}

impl Options {
    pub const ALL: Self = Self {
        tun: TunOffload { tso: true, uso: true },
        gso: true,
        gro: true,
        mtu_bytes: MTU_BYTES,
        engine: Some(Engine::Mmsg),
        ring_entries: RING_ENTRIES,
        send_buffer_bytes: None,
        lanes: false,
    };

    /// The same on `engine`, with a ring of this size.
    pub const fn on(self, engine: Engine, ring_entries: u32) -> Self {
        Self { engine: Some(engine), ring_entries, ..self }
    }
}

/// The host with its worker, and the peer's namespace.
pub struct Host {
    pub namespace: Namespace,
    pub peer: Namespace,
    pub stats: Arc<WorkerStats>,
    pub routes: Published,
    pub worker: Option<Worker>,
    pub ended: Receiver<(WorkerEnd, Instant)>,
}

/// This host, as the worker is told.
pub fn local(mtu_bytes: u16) -> Local {
    let leased = Leased {
        network: "10.5.0.0/16".parse().expect("a prefix"),
        subnet: "10.5.1.0/24".parse().expect("a prefix"),
    };
    Local {
        leased: Families::of_v4(leased, None),
        underlay: HOST.into(),
        mtu_bytes,
        whole_bytes: mtu_bytes,
        senders: Senders::Loose,
    }
}

/// The peer's lease, and a second one of a host that is not there.
pub fn table() -> Table {
    let peer = |subnet: &str, address| {
        let subnet = subnet.parse().expect("a prefix");
        Arc::new(Peer::new(subnet, address))
    };
    let absent = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 3), 8285);
    Table::build(vec![peer("10.5.2.0/24", PEER), peer("10.5.3.0/24", absent)])
}

impl Host {
    pub fn start(options: Options) -> Self {
        Self::start_with(options, || {})
    }

    /// `before_spawn` runs on the thread that becomes the worker's parent.
    pub fn start_with(options: Options, before_spawn: impl FnOnce() + Send) -> Self {
        let (namespace, peer) = wired();
        let stats = Arc::new(WorkerStats::default());
        let routes = Published::new(table());
        let (tell, ended) = channel();
        let worker = namespace.enter(|| {
            let lanes = if options.lanes { LANES } else { NonZeroU16::MIN };
            let queues = Tun::open("flannel%d", options.tun, lanes);
            let mut bulk = queues.expect("root may make a TUN device");
            let tun = bulk.remove(0);
            if options.lanes {
                let program = Steering::by_sender().expect("root may load the program");
                tun.steer(&program).expect("the device takes it");
            }
            let gates = (options.tun.tso, options.tun.uso);
            let got = (tun.offload.tso, tun.offload.uso);
            assert_eq!(got, gates, "this kernel has all offloads, and none is forced on");
            namespace.address("flannel0", &format!("{TUN}/32"));
            namespace.exec(&["ip", "link", "set", "flannel0", "mtu", "1472", "up"]);
            namespace.exec(&["ip", "route", "add", "10.5.0.0/16", "dev", "flannel0"]);
            let socket =
                TunnelSocket::bind(HOST.into(), options.gso, options.gro).expect("a free port");
            assert_eq!(socket.gro, options.gro);
            assert_eq!(socket.segments_max > 1, options.gso);
            if let Some(bytes) = options.send_buffer_bytes {
                set_socket_send_buffer_size(&socket, bytes).expect("a small buffer");
            }
            let config = WorkerConfig {
                index: 0,
                processor: None,
                tun,
                bulk,
                socket: Arc::new(socket),
                local: local(options.mtu_bytes),
                mtu_bytes: Arc::new(options.mtu_bytes.into()),
                whole_bytes: Arc::new(options.mtu_bytes.into()),
                routes: routes.clone(),
                stats: Arc::clone(&stats),
                team: Arc::new([Arc::clone(&stats)]),
                icmp_limit: Arc::default(),
                engine: options.engine,
                comes_first: false,
                cipher: None,
                ring_entries: options.ring_entries,
            };
            before_spawn();
            Worker::spawn(config, move |end| {
                tell.send((end, Instant::now())).ok();
            })
            .expect("one more thread, and the engine that the test is about")
        });
        Self { namespace, peer, stats, routes, worker: Some(worker), ended }
    }

    /// A device whose user is the test, with the host's pods behind it.
    pub fn pod_device(&self) -> PodDevice {
        let none = TunOffload { tso: false, uso: false };
        let queues = self.namespace.enter(|| Tun::open("pod%d", none, NonZeroU16::MIN));
        let tun = queues.expect("a second TUN device").remove(0);
        self.namespace.exec(&[
            "ip",
            "link",
            "set",
            "pod0",
            "mtu",
            "65535",
            "txqueuelen",
            "10000",
            "up",
        ]);
        self.namespace.exec(&["ip", "route", "add", "10.5.1.0/24", "dev", "pod0"]);
        PodDevice { tun }
    }

    /// A socket in the peer's namespace.
    pub fn outside(&self, address: SocketAddrV4) -> UdpSocket {
        self.peer.enter(|| {
            let socket = UdpSocket::bind(address).expect("a free port");
            socket2::SockRef::from(&socket).set_recv_buffer_size(8 << 20).expect("a buffer");
            socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            socket
        })
    }

    /// Waits until a direction has taken in `packets`, and checks that each has an outcome.
    #[track_caller]
    pub fn settle(&self, direction: &DirectionStats, packets: u64) {
        wait_until(PATIENCE, "the worker takes in every packet", || {
            direction.packets_received.get() >= packets
        });
        // The last batch is counted as received before it is counted as gone.
        wait_until(PATIENCE, "every packet has an outcome", || conserved(direction));
        assert_eq!(direction.packets_received.get(), packets);
    }
}

/// Whether every packet taken in went on or was dropped.
pub fn conserved(direction: &DirectionStats) -> bool {
    let out = direction.packets_forwarded.get() + direction.drops_total();
    direction.packets_received.get() == out
}

/// The reasons for which a direction dropped packets, with their counts.
pub fn drops(direction: &DirectionStats) -> Vec<(DropReason, u64)> {
    let counts = DropReason::ALL.iter().map(|&reason| (reason, direction.drops(reason)));
    counts.filter(|(_, count)| *count > 0).collect()
}

/// Two namespaces on one wire; the first forwards. Neither speaks IPv6, whose neighbour and
/// multicast chatter would be counted.
fn wired() -> (Namespace, Namespace) {
    let (host, peer) = (Namespace::new("host"), Namespace::new("peer"));
    for namespace in [&host, &peer] {
        let off = ["all", "default"].map(|which| format!("net.ipv6.conf.{which}.disable_ipv6=1"));
        namespace.exec(&["sysctl", "-qw", &off[0], &off[1]]);
    }
    host.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
    host.link("wire0", &peer, "wire0", 1500);
    host.address("wire0", &format!("{}/24", HOST.ip()));
    for address in [PEER, STRANGER] {
        peer.address("wire0", &format!("{}/24", address.ip()));
    }
    (host, peer)
}

/// `pod0`: what the test writes comes from pods, what it reads would reach them.
pub struct PodDevice {
    tun: Tun,
}

impl PodDevice {
    pub fn write(&self, packet: &[u8]) {
        self.write_offloaded(VnetHeader::default(), 0, packet);
    }

    pub fn write_offloaded(&self, header: VnetHeader, header_bytes: u16, packet: &[u8]) {
        let header = header.encode::<Ipv4Addr>(header_bytes);
        self.tun.write(&[IoSlice::new(&header), IoSlice::new(packet)]).expect("the device is up");
    }

    /// The next packet; `None` when none comes in time.
    pub fn read(&self, timeout: Duration) -> Option<Vec<u8>> {
        let watch = Stopwatch::start();
        let mut frame = vec![0; VNET_HEADER_BYTES + (1 << 16)];
        loop {
            if let Ok(bytes) = self.tun.read(&mut frame) {
                let (vnet_header, packet) = frame[..bytes].split_first_chunk().expect("a header");
                let whole = VnetHeader::parse(vnet_header) == Some(VnetHeader::default());
                assert!(whole, "the kernel left work on a device without offload");
                return Some(packet.to_vec());
            }
            if watch.is_over(timeout) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[track_caller]
    pub fn read_all(&self, count: usize) -> Vec<Vec<u8>> {
        let packets: Vec<_> = std::iter::from_fn(|| self.read(PATIENCE)).take(count).collect();
        assert_eq!(packets.len(), count, "packets were lost on the way to the pod");
        packets
    }
}

/// The next `count` datagrams.
#[track_caller]
pub fn receive_all(socket: &UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 1 << 16];
    (0..count)
        .map(|index| match uninterrupted(|| socket.recv(&mut buffer)) {
            Ok(bytes) => buffer[..bytes].to_vec(),
            Err(error) => panic!("datagram {index} of {count} did not come: {error}"),
        })
        .collect()
}

/// An IPv4 packet without options, its header checksum right.
pub fn ipv4(protocol: u8, source: Ipv4Addr, destination: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0];
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend(payload);
    let total_bytes = packet.len() as u16;
    packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    seal(packet)
}

/// The packet with its header checksum made right.
pub fn seal(mut packet: Vec<u8>) -> Vec<u8> {
    let header_bytes = (usize::from(packet[0] & 15) * 4).min(packet.len());
    packet[10..12].fill(0);
    let field = checksum::finish(checksum::sum(&packet[..header_bytes]));
    packet[10..12].copy_from_slice(&field);
    packet
}

/// The packet with `bytes` at `at`, its header checksum made right.
pub fn with(mut packet: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    packet[at..at + bytes.len()].copy_from_slice(bytes);
    seal(packet)
}

/// The packet with its transport checksum made right, 20 bytes of IPv4 header assumed.
fn transport_sealed(mut packet: Vec<u8>, checksum_at: usize) -> Vec<u8> {
    packet[checksum_at..checksum_at + 2].fill(0);
    let address = |at: usize| Ipv4Addr::from_bits(u32::from_be_bytes(read_word(&packet, at)));
    let length_bytes = (packet.len() - 20) as u16;
    let pseudo = header::pseudo_header(address(12), address(16), packet[9], length_bytes);
    let field = checksum::finish(checksum::add(pseudo, checksum::sum(&packet[20..])));
    packet[checksum_at..checksum_at + 2].copy_from_slice(&field);
    packet
}

fn read_word(packet: &[u8], at: usize) -> [u8; 4] {
    [packet[at], packet[at + 1], packet[at + 2], packet[at + 3]]
}

/// A UDP packet from `source` to `destination`.
pub fn udp(source: SocketAddrV4, destination: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
    let mut datagram = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    datagram.extend(((8 + payload.len()) as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    transport_sealed(ipv4(UDP, *source.ip(), *destination.ip(), &datagram), 26)
}

/// A UDP packet of a flow between `source` and `destination`, told from others by `mark`.
pub fn marked(source: Ipv4Addr, destination: Ipv4Addr, mark: u32, bytes: usize) -> Vec<u8> {
    let mut payload: Vec<u8> = mark.to_be_bytes().to_vec();
    payload.extend((4..bytes).map(|at| (at as u32).wrapping_mul(31).wrapping_add(mark) as u8));
    let ports = (4000, 5000);
    let packet =
        udp(SocketAddrV4::new(source, ports.0), SocketAddrV4::new(destination, ports.1), &payload);
    with(packet, 4, &(mark as u16).to_be_bytes())
}

/// A super-packet with its offload header, and the packets that it stands for.
pub struct Super {
    pub header: VnetHeader,
    pub header_bytes: u16,
    pub packet: Vec<u8>,
    pub segments: Vec<Vec<u8>>,
}

/// `payload_bytes` of one flow in segments of `segment_bytes`.
pub fn super_packet(
    protocol: u8,
    source: Ipv4Addr,
    destination: Ipv4Addr,
    payload_bytes: usize,
    segment_bytes: u16,
) -> Super {
    let payload: Vec<u8> = (0..payload_bytes).map(|at| (at * 7 % 251) as u8).collect();
    let chunks: Vec<&[u8]> = payload.chunks(usize::from(segment_bytes)).collect();
    let build = |index: usize, chunk: &[u8], flags: u8| {
        let mut transport = vec![0x0f, 0xa1, 0x13, 0x89];
        let sequence = 0xffff_f000_u32.wrapping_add((index * usize::from(segment_bytes)) as u32);
        if protocol == TCP {
            transport.extend(sequence.to_be_bytes());
            transport.extend([0, 0, 0, 9, 0x80, flags, 2, 0, 0, 0, 0, 0]);
            // Two no-operations and a timestamp.
            transport.extend([1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 6]);
        } else {
            transport.extend(((8 + chunk.len()) as u16).to_be_bytes());
            transport.extend([0, 0]);
        }
        transport.extend(chunk);
        let packet = ipv4(protocol, source, destination, &transport);
        let id = 0xfff0_u16.wrapping_add(index as u16);
        let checksum_at = if protocol == TCP { 36 } else { 26 };
        transport_sealed(with(packet, 4, &id.to_be_bytes()), checksum_at)
    };
    let last = chunks.len() - 1;
    let segments = chunks
        .iter()
        .enumerate()
        .map(|(index, chunk)| build(index, chunk, if index == last { ACK | PSH } else { ACK }))
        .collect();
    let (header_bytes, offset) = if protocol == TCP { (52, 16) } else { (28, 6) };
    let mut packet = build(0, &payload, ACK | PSH);
    let length_bytes = (packet.len() - 20) as u16;
    let pseudo = header::pseudo_header(source, destination, protocol, length_bytes);
    let partial = checksum::finish(pseudo).map(|byte| !byte);
    packet[20 + offset..22 + offset].copy_from_slice(&partial);
    let kind = if protocol == TCP { SegmentationKind::Tcp } else { SegmentationKind::Udp };
    let header = VnetHeader {
        checksum: Some(PartialChecksum { start: 20, offset: offset as u16 }),
        segmentation: NonZeroU16::new(segment_bytes)
            .map(|payload_bytes| Segmentation { kind, payload_bytes }),
    };
    Super { header, header_bytes, packet, segments }
}

/// The packets as they are after `hops` more routers.
pub fn after_hops(packets: &[Vec<u8>], hops: u8) -> Vec<Vec<u8>> {
    packets.iter().map(|packet| with(packet.clone(), 8, &[packet[8] - hops])).collect()
}

/// Packets by flow, in order: what may not be reordered.
pub fn by_flow(packets: &[Vec<u8>]) -> HashMap<Vec<u8>, Vec<Vec<u8>>> {
    let mut flows: HashMap<_, Vec<Vec<u8>>> = HashMap::new();
    for packet in packets {
        let key = [&packet[9..10], &packet[12..24.min(packet.len())]].concat();
        flows.entry(key).or_default().push(packet.clone());
    }
    flows
}
