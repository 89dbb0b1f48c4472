//! One input of the `forward_walk` target: batches of reads from the TUN device and of GRO
//! batches from the network.
//!
//! The input is a row of reads: a byte that says which way, who sends, and whether the batch ends
//! here, then what the way needs, then the read's packets, see `packets`. From the TUN device
//! come an offload header and a packet, whose IPv4 header may be exchanged for one of IPv6; from
//! the network packets that form a GRO batch as the
//! kernel's receive offload forms them, of equal length up to a shorter one, or one of any
//! segment size. Every packet has exactly one outcome, and nothing malformed or misaddressed
//! comes out.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use weft::forward::{Context, Egress, GroBatch, IcmpLimiter, Ingress, Leased, Local, Senders};
use weft::offload::{CoalesceLimits, SendPlan, VNET_HEADER_BYTES};
use weft::packet::ecn::Ecn;
use weft::packet::{Family, Header, Span};
use weft::route::{Families, Peer, Prefixes, Table};
use weft::stats::{DirectionStats, DropReason, WorkerStats};

use crate::packets::Packets;

/// Where cut headers lie in the arena; behind them there is so little room that it runs out.
const HEADERS_AT: usize = 1 << 16;
const ARENA_BYTES: usize = HEADERS_AT + 1024;

/// Reads of one input; more than a worker takes in at once.
const READS_MAX: usize = 100;

/// Time between two inputs, in which every rate limit recovers: ten times what the slowest needs.
/// The clock goes round after 300 million inputs.
const PAUSE_NS: u64 = 60_000_000_000;

/// Bits of a read's first byte; the lowest two choose the addresses, the highest two the sender.
const FROM_NETWORK: u8 = 0x04;
const BATCH_ENDS: u8 = 0x08;
const HEADER_FOLLOWS: u8 = 0x10;
const SIZE_FOLLOWS: u8 = 0x20;
/// Of what comes from the TUN device, which has no sender.
const IS_IPV6: u8 = 0x80;

const SENDERS: [SocketAddrV4; 4] = [
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 2), 8285),
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 3), 8285),
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 9), 40_000),
    SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 8285),
];

const POD: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 2);
const TUN: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 5, 2, 2);
const FARTHER: Ipv4Addr = Ipv4Addr::new(10, 5, 3, 2);
const UNLEASED: Ipv4Addr = Ipv4Addr::new(10, 5, 99, 2);

/// Inner addresses of what comes from the network, and of what comes from the TUN device.
const INWARD: [(Ipv4Addr, Ipv4Addr); 4] = [(FAR, POD), (FARTHER, POD), (UNLEASED, POD), (FAR, TUN)];
const OUTWARD: [(Ipv4Addr, Ipv4Addr); 4] =
    [(POD, FAR), (POD, FARTHER), (POD, UNLEASED), (TUN, FAR)];

/// Kept from input to input: allocating it costs more than most inputs.
struct Walk {
    local: Local,
    peers: [Arc<Peer>; 2],
    table: Table,
    stats: WorkerStats,
    icmp_limit: IcmpLimiter,
    egress: Egress,
    ingress: Ingress,
    arena: Vec<u8>,
    /// How much of the arena's front the batch has used.
    used_bytes: usize,
    now_ns: u64,
    sent: u64,
    written: u64,
}

thread_local! {
    static WALK: Cell<Option<Box<Walk>>> = const { Cell::new(None) };
}

/// Runs one input; panics on the first broken invariant.
pub(crate) fn run(data: &[u8]) {
    let mut walk = WALK.take().unwrap_or_else(|| Box::new(Walk::new()));
    walk.begin();
    let mut packets = Packets::new(data);
    let mut bytes = Vec::new();
    for _ in 0..READS_MAX {
        let Some(how) = packets.byte() else { break };
        bytes.clear();
        if how & FROM_NETWORK != 0 {
            walk.receive(how, &mut packets, &mut bytes);
        } else {
            walk.read(how, &mut packets, &mut bytes);
        }
        if how & BATCH_ENDS != 0 {
            walk.end_batch();
        }
    }
    walk.end_batch();
    WALK.set(Some(walk));
}

impl Walk {
    fn new() -> Self {
        let prefix = |text: &str| text.parse().expect("a prefix");
        let peer = |subnet, v6: &str, address| {
            let source_proven = AtomicBool::new(false);
            let subnets = Prefixes::of_v4(prefix(subnet), v6.parse().ok());
            Arc::new(Peer { source_proven, ..Peer::new(subnets, address) })
        };
        let peers = [
            peer("10.5.2.0/24", "fd00:5:0:2::/64", SENDERS[0]),
            peer("10.5.3.0/24", "none", SENDERS[1]),
        ];
        let leased = Leased { network: prefix("10.5.0.0/16"), subnet: prefix("10.5.1.0/24") };
        let leased_v6 = Leased {
            network: "fd00:5::/48".parse().expect("a prefix"),
            subnet: "fd00:5:0:1::/64".parse().expect("a prefix"),
        };
        Self {
            local: Local {
                leased: Families::of_v6(Some(leased), leased_v6),
                underlay: SENDERS[3].into(),
                mtu_bytes: 1472,
                whole_bytes: 1472,
                senders: Senders::Loose,
            },
            table: Table::build(peers.to_vec()),
            peers,
            stats: WorkerStats::default(),
            icmp_limit: IcmpLimiter::default(),
            egress: Egress::filling(SendPlan::new(64), HEADERS_AT..usize::MAX),
            ingress: Ingress::new(CoalesceLimits { tcp: true, udp_segments_max: 64 }),
            arena: vec![0; ARENA_BYTES],
            used_bytes: 0,
            now_ns: 0,
            sent: 0,
            written: 0,
        }
    }

    /// Forgets the input before, as far as it matters.
    fn begin(&mut self) {
        self.now_ns = self.now_ns.wrapping_add(PAUSE_NS);
        for peer in &self.peers {
            peer.source_proven.store(false, Ordering::Relaxed);
        }
    }

    /// Puts `bytes` behind what the batch holds; ends the batch first if they don't fit.
    fn place(&mut self, bytes: &[u8]) -> Span {
        if self.used_bytes + bytes.len() > HEADERS_AT {
            self.end_batch();
        }
        let span = Span::new(self.used_bytes, bytes.len());
        self.arena[span.range()].copy_from_slice(bytes);
        self.used_bytes += bytes.len();
        span
    }

    fn read(&mut self, how: u8, packets: &mut Packets<'_>, bytes: &mut Vec<u8>) {
        let mut vnet_header = [0; VNET_HEADER_BYTES];
        if how & HEADER_FOLLOWS != 0 {
            vnet_header.fill_with(|| packets.byte().unwrap_or(0));
        }
        if packets.next(bytes, OUTWARD[usize::from(how & 3)]).is_none() {
            return;
        }
        if how & IS_IPV6 != 0 {
            exchange_header(bytes);
        }
        bytes.truncate(HEADERS_AT);
        let packet = self.place(bytes);
        let stats = &self.stats.egress;
        let (local, table, icmp_limit) = (&self.local, &self.table, &self.icmp_limit);
        let context = Context { local, table, stats, icmp_limit, now_ns: self.now_ns };
        let mut taken = self.egress.process(&context, &mut self.arena, &vnet_header, packet);
        while taken.is_err() {
            self.sent += sent(&mut self.egress, &self.table, &self.arena);
            taken = self.egress.resume(&context, &mut self.arena);
        }
    }

    fn receive(&mut self, how: u8, packets: &mut Packets<'_>, bytes: &mut Vec<u8>) {
        let addresses = INWARD[usize::from(how & 3)];
        // How many more packets, and the field of the headers around them.
        let more = if how & HEADER_FOLLOWS != 0 { packets.byte().unwrap_or(0) } else { 0 };
        let (count, ecn) = (more % 64, Ecn::of(more >> 6));
        let any_size = (how & SIZE_FOLLOWS != 0).then(|| packets.byte().unwrap_or(0));
        let Some(first_bytes) = packets.next(bytes, addresses) else { return };
        for _ in 0..count {
            let Some(next_bytes) = packets.next(bytes, addresses) else { break };
            if any_size.is_some() {
                continue;
            }
            if next_bytes > first_bytes {
                bytes.truncate(bytes.len() - next_bytes);
            }
            if next_bytes != first_bytes {
                break;
            }
        }
        // What the kernel would give at most.
        bytes.truncate(65_507);
        let segment_bytes = any_size.map_or(first_bytes as u16, u16::from);
        let sender = SENDERS[usize::from(how >> 6)].into();
        let batch =
            GroBatch { span: self.place(bytes), segment_bytes, sender, source: sender, ecn };
        let stats = &self.stats.ingress;
        let (local, table, icmp_limit) = (&self.local, &self.table, &self.icmp_limit);
        let context = Context { local, table, stats, icmp_limit, now_ns: self.now_ns };
        let mut taken = self.ingress.process(&context, &mut self.arena, batch);
        while taken.is_err() {
            self.written += written(&mut self.ingress, &self.local, &self.table, &mut self.arena);
            taken = self.ingress.resume(&context, &mut self.arena);
        }
    }

    /// Carries out both plans, and checks that no packet is without an outcome.
    fn end_batch(&mut self) {
        self.sent += sent(&mut self.egress, &self.table, &self.arena);
        self.written += written(&mut self.ingress, &self.local, &self.table, &mut self.arena);
        for replies in [&mut self.egress.replies, &mut self.ingress.replies] {
            for (_, bytes) in replies.iter() {
                whole(bytes);
            }
            replies.clear();
        }
        self.used_bytes = 0;
        check(&self.stats.egress, self.sent);
        check(&self.stats.ingress, self.written);
    }
}

fn check(stats: &DirectionStats, out: u64) {
    let outcomes = out + stats.drops_total();
    assert_eq!(stats.packets_received.get(), outcomes, "a packet without an outcome");
    assert_eq!(stats.drops(DropReason::InternalError), 0, "a contradiction in a plan");
}

/// Carries out the egress plan; every datagram is a packet for the peer that it goes to.
fn sent(egress: &mut Egress, table: &Table, arena: &[u8]) -> u64 {
    let plan = &egress.plan;
    let mut datagrams = 0;
    let mut bytes = Vec::new();
    for (index, message) in plan.messages().iter().enumerate() {
        for spans in plan.datagrams(index) {
            bytes.clear();
            for span in spans {
                bytes.extend_from_slice(&arena[span.range()]);
            }
            let (_, destination) = whole(&bytes);
            let peer = table.owner(destination).expect("somebody leases it");
            let to = table.address(message.destination);
            assert_eq!(peer.address, to, "sent to the wrong peer");
            datagrams += 1;
        }
    }
    egress.sent();
    datagrams
}

/// Carries out the ingress plan; every packet is for this host's own subnet.
fn written(ingress: &mut Ingress, local: &Local, table: &Table, arena: &mut [u8]) -> u64 {
    let plan = &mut ingress.coalescer;
    plan.finish(arena);
    let mut packets = 0;
    for index in 0..plan.items().len() {
        for span in plan.unmerge(arena, index) {
            let (source, destination) = whole(&arena[span.range()]);
            assert!(is_ours(local, destination), "{destination} got in");
            assert!(!is_ours(local, source), "{source} got in");
            let is_leased = source.is_ipv4() || table.owner(source).is_some();
            assert!(is_leased, "{source} got in, which is nobody's");
            packets += 1;
        }
    }
    plan.clear();
    packets
}

/// Whether the address is of this host's subnets.
fn is_ours(local: &Local, address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => local.leased.v4().is_some_and(|v4| v4.subnet.contains(address)),
        IpAddr::V6(address) => local.leased.v6().is_some_and(|v6| v6.subnet.contains(address)),
    }
}

/// Source and destination of what is exactly one valid packet with time to live left.
fn whole(packet: &[u8]) -> (IpAddr, IpAddr) {
    match packet.first().map(|byte| byte >> 4) {
        Some(6) => whole_of::<Ipv6Addr>(packet),
        _ => whole_of::<Ipv4Addr>(packet),
    }
}

fn whole_of<A: Family>(packet: &[u8]) -> (IpAddr, IpAddr) {
    let header = Header::<A>::parse(packet).expect("what leaves is well formed");
    assert_eq!(usize::from(header.total_bytes), packet.len(), "what leaves is not padded");
    assert!(header.ttl > 0, "what leaves has time to live");
    (header.source.into(), header.destination.into())
}

/// The packet with a header of IPv6 in place of its own, from 10.5.1.2 one of fd00:5:0:1::2.
fn exchange_header(packet: &mut Vec<u8>) {
    let Some(old) = packet.first_chunk::<20>().copied() else { return };
    let header_bytes = (usize::from(old[0] & 15) * 4).clamp(20, packet.len());
    let payload_bytes = (packet.len() - header_bytes) as u16;
    let mut new = vec![0x60 | old[1] >> 4, old[1] << 4, old[4], old[5]];
    new.extend(payload_bytes.to_be_bytes());
    new.extend([old[9], old[8]]);
    for address in [&old[12..16], &old[16..20]] {
        new.extend([0xfd, 0, 0, 5, 0, 0, 0, address[2], 0, 0, 0, 0, 0, 0, 0, address[3]]);
    }
    packet.splice(..header_bytes, new);
}
