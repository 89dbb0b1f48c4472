//! One input of the `forward_walk` target: reads from the TUN device and trains from the network.
//!
//! Records: a byte that says which way, what to make right and who sends, two bytes of length,
//! two of segment size, ten of offload header, then the packet. Every packet has exactly one
//! outcome, and nothing malformed or misaddressed comes out.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use weft::forward::{Egress, Ingress, Local, Pass, Train};
use weft::offload::{CoalesceLimits, Piece, SendLimits};
use weft::packet::checksum;
use weft::packet::ipv4::Ipv4Header;
use weft::route::{Peer, Table};
use weft::stats::WorkerStats;

const HEAD_BYTES: usize = 15;

/// Where cut headers lie in the arena; behind them there is so little room that it runs out.
const HEADERS_AT: usize = 1 << 16;
const ARENA_BYTES: usize = HEADERS_AT + 1024;

const SENDERS: [SocketAddrV4; 4] = [
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 8285),
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 2), 8285),
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 3), 8285),
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 9), 40_000),
];

struct Walk {
    local: Local,
    table: Table,
    stats: WorkerStats,
    egress: Egress,
    ingress: Ingress,
    arena: Vec<u8>,
    sent: u64,
    written: u64,
}

/// Runs one input; panics on the first broken invariant.
pub(crate) fn run(mut data: &[u8]) {
    let mut walk = Walk::new();
    while let Some((head, rest)) = data.split_first_chunk::<HEAD_BYTES>() {
        let [how, length_high, length_low, size_high, size_low, vnet_header @ ..] = *head;
        let length = usize::from(u16::from_be_bytes([length_high, length_low])).min(rest.len());
        let (packet, rest) = rest.split_at(length);
        data = rest;
        let segment_bytes = u16::from_be_bytes([size_high, size_low]);
        if how & 1 == 0 {
            walk.read(&vnet_header, &repaired(packet.to_vec(), length, how));
        } else {
            let each = if segment_bytes == 0 { length } else { usize::from(segment_bytes) };
            let sender = SENDERS[usize::from(how >> 6)];
            walk.receive(sender, segment_bytes, &repaired(packet.to_vec(), each, how));
        }
        walk.check();
    }
}

impl Walk {
    fn new() -> Self {
        let prefix = |text: &str| text.parse().expect("a prefix");
        let peer = |subnet, address| {
            let source_proven = AtomicBool::new(false);
            Arc::new(Peer { subnet: prefix(subnet), address, source_proven })
        };
        Self {
            local: Local {
                network: prefix("10.5.0.0/16"),
                subnet: prefix("10.5.1.0/24"),
                tun_address: Ipv4Addr::new(10, 5, 1, 0),
                underlay: SENDERS[0],
                mtu_bytes: 1472,
            },
            table: Table::build(vec![
                peer("10.5.2.0/24", SENDERS[1]),
                peer("10.5.3.0/24", SENDERS[2]),
            ]),
            stats: WorkerStats::default(),
            egress: Egress::new(SendLimits { segments_max: 64 }, HEADERS_AT),
            ingress: Ingress::new(CoalesceLimits { tcp: true, udp_segments_max: 64 }),
            arena: vec![0; ARENA_BYTES],
            sent: 0,
            written: 0,
        }
    }

    fn read(&mut self, vnet_header: &[u8; 10], packet: &[u8]) {
        self.arena[..packet.len()].copy_from_slice(packet);
        let stats = &self.stats.egress;
        let pass = Pass { local: &self.local, table: &self.table, stats, now_ns: 0 };
        let piece = Piece::new(0, packet.len());
        let mut taken = self.egress.process(&pass, &mut self.arena, vnet_header, piece);
        loop {
            self.sent += sent(&mut self.egress, &self.table, &self.arena);
            if taken.is_ok() {
                break;
            }
            taken = self.egress.resume(&pass, &mut self.arena);
        }
        self.egress.replies_mut().clear();
    }

    fn receive(&mut self, sender: SocketAddrV4, segment_bytes: u16, bytes: &[u8]) {
        self.arena[..bytes.len()].copy_from_slice(bytes);
        let stats = &self.stats.ingress;
        let pass = Pass { local: &self.local, table: &self.table, stats, now_ns: 0 };
        let train = Train { bytes: Piece::new(0, bytes.len()), segment_bytes, sender };
        let mut taken = self.ingress.process(&pass, &mut self.arena, train);
        loop {
            self.written += written(&mut self.ingress, &self.local, &mut self.arena);
            if taken.is_ok() {
                break;
            }
            taken = self.ingress.resume(&pass, &mut self.arena);
        }
        self.ingress.replies_mut().clear();
    }

    fn check(&self) {
        for (stats, out) in [(&self.stats.egress, self.sent), (&self.stats.ingress, self.written)] {
            let outcomes = out + stats.drops_total();
            assert_eq!(stats.packets_received.get(), outcomes, "a packet without an outcome");
        }
    }
}

/// Carries out the egress plan; every datagram is a packet for the peer that it goes to.
fn sent(egress: &mut Egress, table: &Table, arena: &[u8]) -> u64 {
    let plan = egress.plan();
    let mut datagrams = 0;
    for (index, message) in plan.messages().iter().enumerate() {
        plan.for_each_datagram(index, |pieces| {
            let parts = pieces.iter().flat_map(|piece| &arena[piece.range()]);
            let header = whole(&parts.copied().collect::<Vec<u8>>());
            let (_, peer) = table.lookup(header.destination).expect("somebody leases it");
            assert_eq!(peer.address, message.destination, "sent to the wrong peer");
            datagrams += 1;
        });
    }
    egress.sent();
    datagrams
}

/// Carries out the ingress plan; every packet is for this host's own subnet.
fn written(ingress: &mut Ingress, local: &Local, arena: &mut [u8]) -> u64 {
    let plan = ingress.coalescer_mut();
    plan.finish(arena);
    let mut packets = 0;
    for index in 0..plan.items().len() {
        plan.unmerge(arena, index, |packet| {
            let header = whole(packet);
            assert!(local.subnet.contains(header.destination), "{} got in", header.destination);
            assert!(!local.subnet.contains(header.source), "{} got in", header.source);
            packets += 1;
        });
    }
    plan.clear();
    packets
}

/// The header of what is exactly one valid packet with time to live left.
fn whole(packet: &[u8]) -> Ipv4Header {
    let header = Ipv4Header::parse(packet).expect("what leaves is well formed");
    assert_eq!(usize::from(header.total_bytes), packet.len(), "what leaves is not padded");
    assert!(header.ttl > 0, "what leaves has time to live");
    header
}

/// Makes the headers of packets that begin every `each` bytes right, by the bits of `how`.
fn repaired(mut bytes: Vec<u8>, each: usize, how: u8) -> Vec<u8> {
    for packet in bytes.chunks_mut(each.max(1)) {
        if packet.len() < 20 {
            continue;
        }
        if how & 2 != 0 {
            packet[0] = 0x45;
            let total_bytes = packet.len().min(0xffff) as u16;
            packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        }
        if how & 4 != 0 {
            let (ours, theirs) = ([10, 5, 1, packet[15] % 4], [10, 5, 2, 1]);
            let (source, destination) = if how & 1 == 0 { (ours, theirs) } else { (theirs, ours) };
            packet[12..16].copy_from_slice(&source);
            packet[16..20].copy_from_slice(&destination);
        }
        let header_bytes = usize::from(packet[0] & 15) * 4;
        if how & 8 != 0 && (20..=packet.len()).contains(&header_bytes) {
            packet[10..12].fill(0);
            let field = checksum::finish(checksum::sum(&packet[..header_bytes]));
            packet[10..12].copy_from_slice(&field);
        }
    }
    bytes
}
