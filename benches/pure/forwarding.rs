//! Whole batches, and their two workshops, beside what the crates at hand would make of them.

use std::hint::black_box;
use std::net::{SocketAddr, SocketAddrV4};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use etherparse::{Ipv4HeaderSlice, UdpHeaderSlice};
use internet_checksum::Checksum;
use ipnet::Ipv4Net;
use prefix_trie::PrefixMap;
use weft::offload::{
    CoalesceLimits, Coalescer, HEADER_BYTES_MAX, Segmentation, SegmentationKind, Splitter,
};
use weft::packet::Span;
use weft::packet::ipv4::Ipv4Header;

use crate::batches::{BATCH_PACKETS, Batch, CASES, FULL_BYTES, FULL_PACKETS, SMALL_BYTES};
use crate::slow_twin::slow_split;
use crate::world::{POD, TCP, UDP, World, net_of, packet, pod_of, with_partial_checksum};

/// Every case of `scripts/instructions` in time, and two of them as the crates would do it.
pub(crate) fn batches(c: &mut Criterion) {
    let mut group = c.benchmark_group("forward, time per batch");
    for (name, make) in CASES {
        let mut batch = make();
        group.throughput(Throughput::Elements(batch.packets() as u64));
        group.bench_function(*name, |b| b.iter_custom(|passes| time(&mut *batch, passes)));
    }
    for outgoing in [true, false] {
        let mut batch = Crates::new(outgoing);
        group.throughput(Throughput::Elements(BATCH_PACKETS as u64));
        let name = if outgoing { "egress 64 small, crates" } else { "ingress 64 small, crates" };
        group.bench_function(name, |b| b.iter_custom(|passes| time(&mut batch, passes)));
    }
    group.finish();
}

/// The time of so many passes, without making the batch again in between.
fn time(batch: &mut dyn Batch, passes: u64) -> Duration {
    let pass = |_| {
        batch.refresh();
        let start = Instant::now();
        black_box(batch.pass());
        start.elapsed()
    };
    (0..passes).map(pass).sum()
}

/// Forwarding packet by packet: etherparse reads, internet-checksum sums, prefix-trie finds.
struct Crates {
    routes: PrefixMap<Ipv4Net, SocketAddrV4>,
    fresh: Vec<Vec<u8>>,
    packets: Vec<Vec<u8>>,
    sends: Vec<(SocketAddrV4, usize)>,
    outgoing: bool,
}

impl Crates {
    fn new(outgoing: bool) -> Self {
        let world = World::new(if outgoing { 1 } else { 10_000 });
        let route = |peer: &std::sync::Arc<weft::route::Peer>| {
            let SocketAddr::V4(address) = peer.address else { unreachable!("of IPv4") };
            (net_of(peer), address)
        };
        let make = |index| match outgoing {
            true => with_partial_checksum(packet(UDP, (POD, pod_of(0)), index, SMALL_BYTES)),
            false => packet(UDP, (pod_of(0), POD), index, SMALL_BYTES),
        };
        let fresh: Vec<_> = (0..BATCH_PACKETS).map(make).collect();
        Self {
            routes: world.table.peers().iter().map(route).collect(),
            packets: fresh.clone(),
            fresh,
            sends: Vec::with_capacity(BATCH_PACKETS),
            outgoing,
        }
    }
}

impl Batch for Crates {
    fn packets(&self) -> usize {
        self.packets.len()
    }

    fn refresh(&mut self) {
        self.sends.clear();
        for (packet, fresh) in self.packets.iter_mut().zip(&self.fresh) {
            packet.copy_from_slice(fresh);
        }
    }

    fn pass(&mut self) -> usize {
        for (index, packet) in self.packets.iter_mut().enumerate() {
            let ip = Ipv4HeaderSlice::from_slice(packet).expect("valid");
            let mut header = ip.to_header();
            let udp = UdpHeaderSlice::from_slice(&packet[20..]).expect("valid").to_header();
            let right = header.calc_header_checksum() == header.header_checksum;
            let other = if self.outgoing { header.destination } else { header.source };
            let found = self.routes.get_lpm(&Ipv4Net::from(std::net::Ipv4Addr::from(other)));
            let (true, Some((_, peer))) = (right, found) else { continue };
            let mut sum = Checksum::new();
            sum.add_bytes(&header.source);
            sum.add_bytes(&header.destination);
            sum.add_bytes(&[0, UDP]);
            sum.add_bytes(&udp.length.to_be_bytes());
            sum.add_bytes(&packet[20..26]);
            sum.add_bytes(&packet[28..]);
            let checksum = sum.checksum();
            if self.outgoing {
                packet[26..28].copy_from_slice(&checksum);
            } else if checksum != udp.checksum.to_be_bytes() {
                continue;
            }
            header.time_to_live -= 1;
            header.header_checksum = header.calc_header_checksum();
            packet[..20].copy_from_slice(&header.to_bytes());
            self.sends.push((*peer, index));
        }
        assert_eq!(self.sends.len(), self.packets.len(), "the twin dropped packets");
        self.sends.len()
    }
}

/// One full TCP super-packet, cut.
pub(crate) fn split(c: &mut Criterion) {
    let mut group = c.benchmark_group("split");
    group.throughput(Throughput::Elements(FULL_PACKETS as u64));
    let bytes = packet(TCP, (POD, pod_of(0)), 1, FULL_PACKETS * FULL_BYTES);
    let header = Ipv4Header::parse(&bytes).expect("valid");
    let payload_bytes = NonZeroU16::new(FULL_BYTES as u16).expect("not zero");
    let segmentation = Segmentation { kind: SegmentationKind::Tcp, payload_bytes };
    let mut out = [0; HEADER_BYTES_MAX];
    group.bench_function("super-packet", |b| {
        b.iter(|| {
            let span = Span::new(0, bytes.len());
            let mut splitter = Splitter::new(span, &bytes, &header, segmentation).expect("valid");
            while splitter.next(&bytes, &mut out).is_some() {
                black_box(&out);
            }
        });
    });
    group.bench_function("slow twin", |b| {
        b.iter(|| slow_split(black_box(&bytes), SegmentationKind::Tcp, FULL_BYTES));
    });
    group.finish();
}

/// Packets of one flow, merged; nothing is edited before `finish`, so a pass can be repeated.
pub(crate) fn coalesce(c: &mut Criterion) {
    let mut group = c.benchmark_group("coalesce");
    let cases = [("64 small", UDP, SMALL_BYTES, 64), ("45 full", TCP, FULL_BYTES, FULL_PACKETS)];
    for (name, protocol, payload_bytes, count) in cases {
        let packets: Vec<_> = (0..count)
            .map(|index| packet(protocol, (pod_of(0), POD), index, payload_bytes))
            .collect();
        let headers: Vec<_> =
            packets.iter().map(|packet| Ipv4Header::parse(packet).expect("valid")).collect();
        let arena = packets.concat();
        let limits = CoalesceLimits { tcp: true, udp_segments_max: 64 };
        let mut coalescer = Coalescer::new(limits);
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(name, |b| {
            b.iter(|| {
                coalescer.clear();
                for (index, header) in headers.iter().enumerate() {
                    let bytes = packets[index].len();
                    let span = Span::new(index * bytes, bytes);
                    coalescer.push(&arena, span, header).expect("the plan has room");
                }
                coalescer.items().len()
            });
        });
        assert_eq!(coalescer.items().len(), 1, "{name}: nothing was merged");
        group.bench_function(format!("{name}, slow twin"), |b| {
            b.iter(|| slow_merge(black_box(&packets)));
        });
    }
    group.finish();
}

/// The obvious way: every payload copied behind the first packet, once its checksum is right.
fn slow_merge(packets: &[Vec<u8>]) -> Vec<u8> {
    let header_bytes = if packets[0][9] == TCP { 52 } else { 28 };
    let mut merged = packets[0][..header_bytes].to_vec();
    for packet in packets {
        let mut again = packet.clone();
        crate::slow_twin::set_checksums(&mut again);
        assert_eq!(again, *packet, "a packet with a wrong checksum");
        assert_eq!(packet[12..24], merged[12..24], "a packet of another flow");
        merged.extend_from_slice(&packet[header_bytes..]);
    }
    merged
}
