//! Micro-benchmarks of the pure parts: checksum, header work, route lookup and table build.
//!
//! Inputs are made without the code under test wherever its result would shape them, so that the
//! benchmarks run on older commits too. `cargo bench --bench pure [filter]`.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ipnet::Ipv4Net;
use prefix_trie::PrefixMap;
use weft::packet::icmp::{self, ERROR_BYTES_MAX, ErrorKind};
use weft::packet::ipv4::{self, Ipv4Header};
use weft::packet::limiter::IcmpLimiter;
use weft::packet::{checksum, transport};
use weft::route::{Peer, Prefix, Published, Table};

/// Destinations per measured pass: enough to defeat the branch predictor, and a divisor that
/// turns the time of a pass into that of one lookup.
const DESTINATIONS: usize = 65_536;

/// A TCP packet of a header without options, 32 bytes of TCP header, and data to 1,472 bytes.
const PACKET_BYTES: usize = 1472;

fn checksum_sums(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    let mut bytes = vec![0; 65_536];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    for length in [20, 1420, 65_536] {
        group.throughput(Throughput::Bytes(length as u64));
        group.bench_function(BenchmarkId::new("sum", length), |b| {
            b.iter(|| checksum::sum(black_box(&bytes[..length])));
        });
    }
    group.finish();
}

fn packet() -> Vec<u8> {
    let mut packet = vec![0; PACKET_BYTES];
    fastrand::Rng::with_seed(2).fill(&mut packet);
    packet[..20]
        .copy_from_slice(&[0x45, 0, 5, 0xc0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 5, 1, 2, 10, 5, 2, 3]);
    packet[32] = 0x80;
    for (start, field) in [(0, 10), (20, 36)] {
        packet[field..field + 2].fill(0);
        let covered = if start == 0 { &packet[..20] } else { &packet[20..] };
        let mut sum: u32 =
            covered.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum::<u32>();
        if start == 20 {
            sum += 2 * 0x0a05 + 0x0102 + 0x0203 + 6 + (PACKET_BYTES as u32 - 20);
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        packet[field..field + 2].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    }
    packet
}

fn packet_work(c: &mut Criterion) {
    let mut group = c.benchmark_group("packet");
    let mut packet = packet();
    let header = Ipv4Header::parse(&packet).expect("the packet is valid");
    let verdict = transport::verify(&header, &packet);
    assert_eq!(verdict, transport::TransportChecksum::Valid, "the benchmark's packet is broken");
    group.bench_function("parse", |b| b.iter(|| Ipv4Header::parse(black_box(&packet))));
    group.bench_function("verify 1472", |b| {
        b.iter(|| transport::verify(black_box(&header), black_box(&packet)));
    });
    let mut out = [0; ERROR_BYTES_MAX];
    group.bench_function("icmp error", |b| {
        let own = Ipv4Addr::new(10, 5, 2, 0);
        b.iter(|| icmp::write_error(&mut out, ErrorKind::TimeExceeded, own, &packet, &header));
    });
    let mut limiter = IcmpLimiter::new();
    let mut now_ns = 0;
    group.bench_function("icmp limiter, flood", |b| {
        b.iter(|| {
            now_ns += 1_000;
            limiter.allow(now_ns, Ipv4Addr::from_bits(now_ns as u32))
        });
    });
    group.bench_function("decrement ttl", |b| {
        b.iter(|| {
            let packet = black_box(&mut packet);
            // Refilled without a checksum: only the cost matters here.
            packet[8] = 64;
            ipv4::decrement_ttl(packet);
        });
    });
    group.finish();
}

/// The shape of a set of routes.
#[derive(Clone, Copy)]
enum Shape {
    /// /24 subnets side by side, as flannel leases them.
    Dense,
    /// The same, but every 64th one is cut in half: the table needs its trie.
    Mixed,
}

fn subnets(routes: usize, shape: Shape) -> Vec<Prefix> {
    let subnet = |index: usize| {
        let length_bits = match shape {
            Shape::Mixed if index.is_multiple_of(64) => 25,
            Shape::Mixed | Shape::Dense => 24,
        };
        let network = Ipv4Addr::from_bits(0x0a00_0000 | (index as u32) << 8);
        Prefix::new(network, length_bits).expect("the length is at most 32")
    };
    (0..routes).map(subnet).collect()
}

fn peers(subnets: &[Prefix]) -> Vec<Arc<Peer>> {
    let peer = |(index, subnet): (u32, &Prefix)| {
        let address = SocketAddrV4::new(Ipv4Addr::from_bits(0xc000_0000 + index), 8285);
        Arc::new(Peer { subnet: *subnet, address, source_proven: AtomicBool::new(false) })
    };
    (0..).zip(subnets).map(peer).collect()
}

fn destinations(routes: usize, random: bool) -> Vec<Ipv4Addr> {
    let mut rng = fastrand::Rng::with_seed(3);
    let destination = |index: usize| {
        let subnet = if random { rng.usize(0..routes) } else { index % routes };
        Ipv4Addr::from_bits(0x0a00_0000 | (subnet as u32) << 8 | rng.u32(0..128))
    };
    (0..DESTINATIONS).map(destination).collect()
}

/// Every lookup also reads the address of the peer that it found, as a caller would.
fn route_lookup(c: &mut Criterion) {
    let mut group = c.benchmark_group("route lookup, time per 65,536");
    group.throughput(Throughput::Elements(DESTINATIONS as u64)).sample_size(30);
    for routes in [1, 256, 10_000, 65_536] {
        for (order, random) in [("sequential", false), ("random", true)] {
            let destinations = destinations(routes, random);
            for (shape_name, shape) in [("dense", Shape::Dense), ("mixed", Shape::Mixed)] {
                let table = Table::build(peers(&subnets(routes, shape)));
                let id = BenchmarkId::new(format!("{shape_name} {order}"), routes);
                group.bench_function(id, |b| {
                    b.iter(|| {
                        destinations.iter().fold(0, |sum, destination| {
                            let found = table.lookup(*destination);
                            found.map_or(sum, |(_, peer)| sum ^ peer.address.ip().to_bits())
                        })
                    });
                });
            }
            let mut other = PrefixMap::<Ipv4Net, Arc<Peer>>::new();
            for peer in peers(&subnets(routes, Shape::Dense)) {
                let net = Ipv4Net::new(peer.subnet.network(), peer.subnet.length_bits());
                other.insert(net.expect("the length is at most 32"), peer);
            }
            group.bench_function(BenchmarkId::new(format!("prefix-trie {order}"), routes), |b| {
                b.iter(|| {
                    destinations.iter().fold(0, |sum, destination| {
                        let found = other.get_lpm(&Ipv4Net::from(*destination));
                        found.map_or(sum, |(_, peer)| sum ^ peer.address.ip().to_bits())
                    })
                });
            });
        }
    }
    group.finish();
}

fn route_table(c: &mut Criterion) {
    let mut group = c.benchmark_group("route table");
    group.sample_size(20);
    for routes in [256, 65_536] {
        for (shape_name, shape) in [("dense", Shape::Dense), ("mixed", Shape::Mixed)] {
            let peers = peers(&subnets(routes, shape));
            group.bench_function(BenchmarkId::new(format!("build {shape_name}"), routes), |b| {
                b.iter(|| Table::build(black_box(peers.clone())));
            });
        }
    }
    let table = Table::build(peers(&subnets(65_536, Shape::Dense)));
    group.bench_function("has peer at, 65536", |b| {
        let mut outer = 0xc000_0000u32;
        b.iter(|| {
            outer = 0xc000_0000 | outer.wrapping_mul(0x9e37_79b1) >> 16;
            table.has_peer_at(Ipv4Addr::from_bits(outer))
        });
    });
    let published = Published::new(table);
    let mut reader = published.reader();
    group.bench_function("reader load", |b| b.iter(|| reader.load().len()));
    group.finish();
}

criterion_group!(benches, checksum_sums, packet_work, route_lookup, route_table);
criterion_main!(benches);
