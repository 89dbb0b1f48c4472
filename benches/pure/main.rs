//! Micro-benchmarks of the pure parts, beside their slow twins or the crates others would pick.
//!
//! Inputs are made without the code under test wherever its result would shape them, so that the
//! benchmarks run on older commits too. `cargo bench --bench pure [filter]`.

mod batches;
mod forwarding;
mod headers;
mod routes;
#[path = "../../fuzz/bodies/slow_twin.rs"]
mod slow_twin;
mod world;

use criterion::{criterion_group, criterion_main};

criterion_group!(
    benches,
    headers::checksum_sums,
    headers::packet_work,
    routes::route_lookup,
    routes::route_table,
    forwarding::batches,
    forwarding::split,
    forwarding::coalesce
);
criterion_main!(benches);
