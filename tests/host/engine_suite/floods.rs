//! What one pod sends leaves the others their packets.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use weft::route::{Peer, Table};

use super::super::OPTIONS;
use crate::support::dataplane::*;
use crate::support::lab::wait_until;

/// A pod floods with super-packets of tiny datagrams, in the name of every pod, and another pod has
/// its packets through, although the device's rings overflow.
#[test]
fn a_flood_of_tiny_datagrams_leaves_other_pods_alone() {
    let host = Host::start(Options { lanes: true, ..OPTIONS });
    let (pod, living) = (host.pod_device(), host.outside(STRANGER));
    let peer = |subnet: &str, address| Arc::new(Peer::new(subnet.parse().unwrap(), address));
    let peers = vec![peer("10.5.2.0/24", PEER), peer("10.5.4.0/24", STRANGER)];
    host.routes.table.publish(Table::build(peers));
    for sources in [1_u8, 4, 255] {
        let floods: Vec<_> = (0..sources)
            .map(|number| super_packet(UDP, Ipv4Addr::new(10, 5, 1, 255 - number), FAR, 128, 1))
            .collect();
        let stop = AtomicBool::new(false);
        let rounds = 100;
        let arrived = std::thread::scope(|scope| {
            scope.spawn(|| {
                for flood in floods.iter().cycle() {
                    pod.write_offloaded(flood.header, flood.header_bytes, &flood.packet);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(300));
            let ping = ipv4(1, Ipv4Addr::new(10, 5, 1, 2), Ipv4Addr::new(10, 5, 4, 2), &[8; 64]);
            for _ in 0..rounds {
                pod.write(&ping);
                std::thread::sleep(Duration::from_millis(10));
            }
            living.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            let arrived = std::iter::from_fn(|| living.recv(&mut [0; 2048]).ok()).count();
            stop.store(true, Ordering::Relaxed);
            arrived
        });
        let lost = host.namespace.exec(&["cat", "/sys/class/net/flannel0/statistics/tx_dropped"]);
        println!("{sources} sources: {arrived} of {rounds} arrived, {} were lost", lost.trim());
        assert!(arrived >= rounds * 9 / 10, "{sources} sources: {arrived} of {rounds} arrived");
    }
    wait_until(PATIENCE, "every packet has an outcome", || conserved(&host.stats.egress));
}

/// Hosts of the same wire that are down, in the test of them.
const DOWN: u8 = 100;

/// What waits for a neighbour that does not answer is charged to the tunnel's one socket. A pod
/// that sends to many such hosts must not take the others' room.
#[test]
fn hosts_that_are_down_leave_room_for_the_others() {
    const ROUNDS: u32 = 200;
    let host = Host::start(OPTIONS);
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let down = |number: u8| SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 100 + number), 8285);
    let absent = (0..DOWN).map(|number| {
        Arc::new(Peer::new(format!("10.5.{}.0/24", 100 + number).parse().unwrap(), down(number)))
    });
    let living = Peer::new("10.5.2.0/24".parse().unwrap(), PEER);
    host.routes.table.publish(Table::build(absent.chain([Arc::new(living)]).collect()));
    let to = |number: u8| {
        let far = SocketAddrV4::new(Ipv4Addr::new(10, 5, 100 + number, 2), 9);
        udp(SocketAddrV4::new(POD, 9), far, &[0])
    };
    let inward = marked(FAR, POD, 0, 64);
    let egress = &host.stats.egress;
    for round in 0..ROUNDS {
        (0..DOWN).for_each(|number| pod.write(&to(number)));
        pod.write(&marked(POD, FAR, round, 64));
        peer.send_to(&inward, HOST).expect("the wire is up");
        // The device's queue loses none of them.
        host.settle(egress, u64::from(round + 1) * (u64::from(DOWN) + 1));
    }
    let _beyond_what_came = peer.set_read_timeout(Some(Duration::from_millis(500)));
    let arrived = std::iter::from_fn(|| peer.recv(&mut [0; 2048]).ok()).count() as u32;
    println!("{arrived} of {ROUNDS} arrived; dropped: {:?}", drops(egress));
    assert!(arrived >= ROUNDS * 9 / 10, "a pod takes the network from the others");
    // One of them comes back.
    host.peer.address("wire0", &format!("{}/24", down(0).ip()));
    let again = host.outside(down(0));
    again.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    wait_until(PATIENCE, "a host that has come back is sent to", || {
        (0..DOWN).for_each(|number| pod.write(&to(number)));
        again.recv(&mut [0; 2048]).is_ok()
    });
    wait_until(PATIENCE, "every packet has an outcome", || conserved(egress));
}
