//! The ring of dropped packets under loom, which runs it in the orders of loads and stores that the
//! memory model allows, and not only in those that this machine happens to show.
//!
//! The table that the workers route by is published by arc-swap, which has models of its own.

use std::sync::atomic::{AtomicU64, Ordering};

use loom::model::Builder;
use loom::sync::{Arc, atomic};
use loom::thread;

use self::record_ring::RecordRing;

#[path = "../../src/stats/record_ring.rs"]
mod record_ring;

/// One slot, so that the second record is written over the first while that is read.
const RECORDS: usize = 1;

/// Orders that loom has to find at least: 869 by version 0.7.3. With a ring that it does not see
/// into it finds one, and proves nothing.
const ORDERS_MIN: u64 = 100;

/// A writer of two records beside a reader.
fn written_and_read() {
    let ring = Arc::new(RecordRing::<RECORDS, 2>::default());
    let writer = Arc::clone(&ring);
    let thread = thread::spawn(move || (1..3).for_each(|word| writer.push([word; 2].into_iter())));
    for [one, other] in ring.read(0).0 {
        assert_eq!(one, other, "`weft drops` shows a packet that never was: two halves");
    }
    thread.join().expect("the writer has ended well");
    assert_eq!(ring.read(0), (vec![[2; 2]], 2), "the last packet is missing");
}

#[test]
fn readers_see_whole_records_in_every_order() {
    static ORDERS: AtomicU64 = AtomicU64::new(0);
    let mut builder = Builder::new();
    builder.preemption_bound = None;
    builder.check(|| {
        ORDERS.fetch_add(1, Ordering::Relaxed);
        written_and_read();
    });
    let orders = ORDERS.load(Ordering::Relaxed);
    assert!(orders > ORDERS_MIN, "loom has tried {orders} orders only");
}
