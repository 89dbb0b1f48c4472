//! The route table, beside prefix-trie.

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput};
use ipnet::Ipv4Net;
use prefix_trie::PrefixMap;
use weft::route::{Peer, Published, Table};

use crate::world::{Shape, net_of, peers, subnets};

/// Destinations per measured pass: enough to defeat the branch predictor, and a divisor that
/// turns the time of a pass into that of one lookup.
const DESTINATIONS: usize = 65_536;

fn destinations(routes: usize, random: bool) -> Vec<Ipv4Addr> {
    let mut rng = fastrand::Rng::with_seed(3);
    let destination = |index: usize| {
        let subnet = if random { rng.usize(0..routes) } else { index % routes };
        Ipv4Addr::from_bits(0x0a00_0000 | (subnet as u32) << 8 | rng.u32(0..128))
    };
    (0..DESTINATIONS).map(destination).collect()
}

/// Every lookup also reads the address of the peer that it found, as a caller would.
pub(crate) fn route_lookup(c: &mut Criterion) {
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
                            let found = table.endpoint(*destination);
                            found.map_or(sum, |endpoint| sum ^ endpoint.host.bits())
                        })
                    });
                });
            }
            let mut other = PrefixMap::<Ipv4Net, Arc<Peer>>::new();
            for peer in peers(&subnets(routes, Shape::Dense)) {
                other.insert(net_of(&peer), peer);
            }
            group.bench_function(BenchmarkId::new(format!("prefix-trie {order}"), routes), |b| {
                b.iter(|| {
                    destinations.iter().fold(0, |sum, destination| {
                        let found = other.get_lpm(&Ipv4Net::from(*destination));
                        found.map_or(sum, |(_, peer)| sum ^ u32::from(peer.address.port()))
                    })
                });
            });
        }
    }
    group.finish();
}

pub(crate) fn route_table(c: &mut Criterion) {
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
    let mut reader = published.table.reader();
    group.bench_function("reader load", |b| b.iter(|| reader.load().peers().len()));
    group.finish();
}
