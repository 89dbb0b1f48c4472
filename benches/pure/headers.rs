//! Checksums and headers, beside the crates that others would take.

use std::hint::black_box;
use std::net::Ipv4Addr;

use criterion::{BenchmarkId, Criterion, Throughput};
use etherparse::Ipv4HeaderSlice;
use weft::packet::Family as _;
use weft::packet::icmp::{self, ERROR_BYTES_MAX, ErrorKind};
use weft::packet::ipv4::Ipv4Header;
use weft::packet::limiter::IcmpLimiter;
use weft::packet::{checksum, transport};

use crate::batches::FULL_BYTES;
use crate::slow_twin::word_sum;
use crate::world::{POD, TCP, packet, pod_of};

pub(crate) fn checksum_sums(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    let mut bytes = vec![0; 65_536];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    for length in [20, 72, 1420, 65_536] {
        group.throughput(Throughput::Bytes(length as u64));
        group.bench_function(BenchmarkId::new("sum", length), |b| {
            b.iter(|| checksum::sum(black_box(&bytes[..length])));
        });
        group.bench_function(BenchmarkId::new("slow twin", length), |b| {
            b.iter(|| word_sum(black_box(&bytes[..length])));
        });
        group.bench_function(BenchmarkId::new("internet-checksum", length), |b| {
            b.iter(|| internet_checksum::checksum(black_box(&bytes[..length])));
        });
    }
    group.finish();
}

pub(crate) fn packet_work(c: &mut Criterion) {
    let mut group = c.benchmark_group("packet");
    let mut packet = packet(TCP, (pod_of(0), POD), 1, FULL_BYTES);
    let header = Ipv4Header::parse(&packet).expect("the packet is valid");
    assert!(transport::is_verified(&header, &packet), "the benchmark's packet is broken");
    group.bench_function("parse", |b| b.iter(|| Ipv4Header::parse(black_box(&packet))));
    // As far as ours goes: lengths and the header checksum checked, the fields read.
    group.bench_function("parse, etherparse", |b| {
        b.iter(|| {
            let slice = Ipv4HeaderSlice::from_slice(black_box(&packet)).expect("valid");
            let right = slice.to_header().calc_header_checksum() == slice.header_checksum();
            (right && usize::from(slice.total_len()) <= packet.len()).then(|| slice.to_header())
        });
    });
    group.bench_function("verify 1472", |b| {
        b.iter(|| transport::is_verified(black_box(&header), black_box(&packet)));
    });
    let mut out = [0; ERROR_BYTES_MAX];
    group.bench_function("icmp error", |b| {
        let own = Ipv4Addr::new(10, 5, 2, 0);
        b.iter(|| icmp::write_error(&mut out, ErrorKind::TimeExceeded, own, &packet, &header));
    });
    let limiter = IcmpLimiter::default();
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
            Ipv4Addr::decrement_ttl(packet);
        });
    });
    group.finish();
}
