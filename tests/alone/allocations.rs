//! No allocation per packet: a worker on real devices moves thousands of packets both ways, on
//! either engine, and a counting allocator sees nothing from its thread once it is warm. Needs
//! root, for it makes network namespaces.
#![allow(unsafe_code, reason = "GlobalAlloc is an unsafe trait; this one counts and forwards")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use weft::engine::{Engine, RING_ENTRIES};

use crate::alone;
use crate::support::dataplane::*;
use crate::support::lab::wait_until;

/// Allocations made by worker threads.
static BY_WORKERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this thread was found to be a worker: unknown, no, yes.
    static IS_WORKER: Cell<Option<bool>> = const { Cell::new(None) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

impl Counting {
    fn count() {
        // A thread that is ending has no more thread-locals; it moves no packets either.
        let counted = IS_WORKER.try_with(|known| {
            let is_worker = known.get().unwrap_or_else(Self::ask);
            known.set(Some(is_worker));
            is_worker
        });
        if counted == Ok(true) {
            BY_WORKERS.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Asks the kernel for the thread's name, which needs no allocation.
    fn ask() -> bool {
        let mut name = [0u8; 16];
        // SAFETY: PR_GET_NAME writes at most 16 bytes, the size of `name`, which outlives it.
        let result = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        result == 0 && name.starts_with(b"weft-worker")
    }
}

// SAFETY: every call is forwarded to the system's allocator with the caller's own arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

/// One round of everything: plain packets, super-packets, both ways, drops and ICMP errors.
fn round(host: &Host, pod: &PodDevice, peer: &std::net::UdpSocket, out: &mut u64, back: &mut u64) {
    for (protocol, segment_bytes) in [(TCP, 1420), (UDP, 1444), (TCP, 16)] {
        let bulk = super_packet(protocol, POD, FAR, 16_000, segment_bytes);
        pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
        *out += bulk.segments.len() as u64;
        let bulk = super_packet(protocol, FAR, POD, 16_000, 1420);
        for segment in &bulk.segments {
            peer.send_to(segment, HOST).expect("the wire is up");
        }
        *back += bulk.segments.len() as u64;
    }
    for mark in 0..64 {
        pod.write(&marked(POD, if mark % 8 == 0 { UNLEASED } else { FAR }, mark, 64));
        let packet = marked(FAR, POD, mark, 64);
        let packet = if mark % 8 == 0 { with(packet, 8, &[1]) } else { packet };
        peer.send_to(&packet, HOST).expect("the wire is up");
    }
    *out += 64;
    *back += 64;
    // The errors about expired packets go out on the socket and are no packets of the pods'.
    for (direction, packets) in [(&host.stats.egress, *out), (&host.stats.ingress, *back)] {
        wait_until(PATIENCE, "the round is over", || {
            direction.packets_received.get() >= packets && conserved(direction)
        });
        assert_eq!(direction.packets_received.get(), packets);
    }
}

#[test]
fn a_warm_worker_allocates_nothing() {
    let _alone = alone();
    for engine in [Engine::Mmsg, Engine::IoUring] {
        let host = Host::start(Options::ALL.on(engine, RING_ENTRIES));
        let (pod, peer) = (host.pod_device(), host.outside(PEER));
        let (mut out, mut back) = (0, 0);
        for _ in 0..3 {
            round(&host, &pod, &peer, &mut out, &mut back);
        }
        let (before, packets_before) = (BY_WORKERS.swap(0, Ordering::Relaxed), out + back);
        assert!(before > 0, "{engine}: the worker's own start was not seen");
        while out + back < packets_before + 20_000 {
            round(&host, &pod, &peer, &mut out, &mut back);
        }
        assert_eq!(BY_WORKERS.load(Ordering::Relaxed), 0, "{engine}: packets cost allocations");
        let told = [&host.stats.egress, &host.stats.ingress].map(|stats| stats.icmp_sent.get() > 0);
        assert_eq!(told, [true; 2], "{engine}: ICMP errors were no part of it");
    }
}
