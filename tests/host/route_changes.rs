//! Routes that come and go a hundred times a second cost the other routes nothing. Needs root,
//! for it makes network namespaces.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use weft::engine::Engine;
use weft::route::{Peer, Prefix, Published, Table};
use weft::stats::{DropReason, WorkerStats};

use crate::support::dataplane::*;
use crate::support::lab::wait_until;
use crate::support::pace::Stopwatch;

const CHANGES: u32 = 300;
const CHANGE_EVERY: Duration = Duration::from_millis(10);
/// Ten packets a millisecond, each way.
/// Fewer would prove little.
const PACKETS_MIN: u64 = 3000;
const BURST: u32 = 10;
const BURST_EVERY: Duration = Duration::from_millis(1);
/// What may be under way to the worker, and to the pod, whose device holds 10,000. A machine that
/// is too busy for the rate gets a lower one: loss would say nothing about routes then.
const UNDER_WAY_MAX: u64 = 200;

/// The untouched route, and 512 that exist in every second table only. Unequal lengths, so that
/// the table needs its trie, which is the slower one to build.
fn changing_table(untouched: &Arc<Peer>, change: u32) -> Table {
    let mut peers = vec![Arc::clone(untouched)];
    if change.is_multiple_of(2) {
        peers.extend((0..512u32).map(|index| {
            let network = Ipv4Addr::from_bits(Ipv4Addr::new(10, 5, 64, 0).to_bits() + index * 16);
            let subnet = Prefix::new(network, 28).expect("at most 32 bits");
            let address = SocketAddrV4::new(Ipv4Addr::from_bits(0xac14_0100 + index), 8285);
            Arc::new(Peer::new(subnet.into(), address))
        }));
    }
    Table::build(peers)
}

/// Publishes the changes at their pace, until enough packets have met them.
fn publish(routes: &Published, untouched: &Arc<Peer>, stats: &WorkerStats) {
    let start = Instant::now();
    let watch = Stopwatch::start();
    for change in 0.. {
        let sent = stats.egress.packets_received.get();
        if change >= CHANGES && sent > PACKETS_MIN {
            break;
        }
        assert!(!watch.is_over(PATIENCE), "only {change} changes, and {sent} packets meanwhile");
        routes.table.publish(changing_table(untouched, change));
        let due = start + CHANGE_EVERY * (change + 1);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

/// Sends bursts both ways until `over`, as fast as the pod gets what `arrived` counts; returns the
/// packets of each direction.
fn send(
    stats: &WorkerStats,
    (pod, arrived): (&PodDevice, &AtomicU64),
    peer: &UdpSocket,
    over: &AtomicBool,
) -> u32 {
    let (start, mut sent) = (Instant::now(), 0u32);
    while !over.load(Ordering::Relaxed) {
        for mark in sent..sent + BURST {
            pod.write(&marked(POD, FAR, mark, 64));
            peer.send_to(&marked(FAR, POD, mark, 64), HOST).expect("the wire is up");
        }
        sent += BURST;
        wait_until(PATIENCE, "the worker and the pod keep up", || {
            let left = stats.egress.packets_received.get();
            left.min(arrived.load(Ordering::Relaxed)) + UNDER_WAY_MAX > u64::from(sent)
        });
        let due = start + BURST_EVERY * (sent / BURST);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    sent
}

/// The number in the payload of a packet that [`marked`] made.
fn mark_of(packet: &[u8]) -> u32 {
    u32::from_be_bytes(*packet[28..].first_chunk().expect("64 bytes of payload"))
}

#[test]
fn route_changes_lose_no_packet_of_other_routes() {
    for engine in [Engine::Mmsg, Engine::IoUring] {
        let options = Options { engine: Some(engine), ..Options::ALL };
        let host = Host::start(options);
        let stats = Arc::clone(&host.stats);
        let pod = host.pod_device();
        let peer = host.outside(PEER);
        set_socket_recv_buffer_size_force(&peer, 64 << 20).expect("we are root");
        let subnet = "10.5.2.0/24".parse().expect("a prefix");
        let untouched = Arc::new(Peer::new(subnet, PEER));
        host.routes.table.publish(changing_table(&untouched, 0));
        let (over, arrived) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut sent = 0;
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while let Some(packet) = pod.read(Duration::from_secs(2)) {
                    let expected = arrived.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(u64::from(mark_of(&packet)), expected, "lost on the way in");
                }
            });
            let sender = scope.spawn(|| send(&stats, (&pod, &arrived), &peer, &over));
            publish(&host.routes, &untouched, &stats);
            over.store(true, Ordering::Relaxed);
            sent = sender.join().expect("the sender");
            reader.join().expect("the reader");
        });
        assert_eq!(arrived.load(Ordering::Relaxed), u64::from(sent), "{engine:?}: lost at the end");
        let out = receive_all(&peer, sent as usize);
        let marks: Vec<_> = out.iter().map(|packet| mark_of(packet)).collect();
        assert!(marks.into_iter().eq(0..sent), "{engine:?}: lost or reordered on the way out");
        for direction in [&host.stats.egress, &host.stats.ingress] {
            host.settle(direction, u64::from(sent));
            assert_eq!(drops(direction), [], "{engine:?}");
        }
        // The tables did reach the worker.
        host.routes.table.publish(Table::build(Vec::new()));
        pod.write(&marked(POD, FAR, sent, 64));
        host.settle(&host.stats.egress, u64::from(sent) + 1);
        assert_eq!(drops(&host.stats.egress), [(DropReason::NoRoute, 1)], "{engine:?}");
    }
}
