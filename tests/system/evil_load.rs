//! A small version of the load of `scripts/evil`: evil packets from a peer, a stranger and a pod
//! into weftd on each engine. Every packet received has an outcome, none meets an internal error,
//! and honest packets get through afterwards.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::pour::{self, Shared};
use crate::support::cluster::{Cluster, host_address};
use crate::support::lab::{Namespace, SubnetEnv, wait_until};
use crate::support::overlay::{CONFIG, local_store, reserve};
use crate::support::packet::udp;
use crate::support::status::Status;
use crate::support::traffic::udp_socket_at;

/// Received packets that end the load: a few seconds of it even for an unoptimised daemon.
const PACKETS: u64 = 100_000;

/// How long that may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

const SEED: u64 = 8285;

const PORT: u16 = 7001;
const POD: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 2);
const PEER_POD: Ipv4Addr = Ipv4Addr::new(10, 5, 3, 2);

/// Ends the senders however the test ends.
struct Stop<'a>(&'a Shared);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn evil_packets_end_no_worker_on_mmsg() {
    evil_packets_end_no_worker("--engine=mmsg");
}

#[test]
fn evil_packets_end_no_worker_on_io_uring() {
    evil_packets_end_no_worker("--engine=io_uring");
}

fn evil_packets_end_no_worker(engine: &str) {
    let files = tempfile::tempdir().expect("a directory for the test");
    let cluster = Cluster::new(2);
    let (host, far) = (&cluster.hosts[0], &cluster.hosts[1]);
    for sender in [pour::PEER, pour::STRANGER] {
        far.address("wire0", &format!("{}/24", sender.ip()));
    }
    let store = local_store(files.path(), CONFIG);
    reserve(files.path(), "10.5.1.0-24", host_address(0));
    reserve(files.path(), "10.5.2.0-24", host_address(1));
    reserve(files.path(), "10.5.3.0-24", *pour::PEER.ip());
    let mut daemon = cluster.weftd(0, files.path(), &[&store, engine]);
    let lease = SubnetEnv::wait(&files.path().join("subnet.env"), &mut daemon);
    let pod = cluster.pod(0, &lease);
    wait_until(PATIENCE, "weftd knows both peers", || {
        Status::try_of(files.path()).is_some_and(|status| status.routes() == 2)
    });

    let received = || {
        let status = Status::of(files.path());
        ["ingress", "egress"].map(|way| status.count(way, "packets_received"))
    };
    let shared = Shared::default();
    let [host_handle, far_handle] =
        [host, far].map(|namespace| Path::new("/run/netns").join(namespace.name()));
    thread::scope(|scope| {
        let stop = Stop(&shared);
        let network = scope.spawn(|| pour::from_network(&shared, &host_handle, &far_handle, SEED));
        let pod = scope.spawn(|| pour::from_pod(&shared, &host_handle, SEED));
        wait_until(PATIENCE, "weftd receives the load of both ways", || {
            received().iter().all(|count| *count > PACKETS / 2)
                || network.is_finished()
                || pod.is_finished()
        });
        drop(stop);
        network
            .join()
            .expect("it does not panic")
            .expect("the network's sender goes on until it is stopped");
        pod.join()
            .expect("it does not panic")
            .expect("the pod's sender goes on until it is stopped");
    });

    let status = Status::settled(files.path());
    for way in ["ingress", "egress"] {
        assert_eq!(status.drops(way, "internal-error"), 0, "{}", daemon.output());
        assert!(status.count(way, "packets_forwarded") > 0, "{way} was all dropped: {}", status.0);
    }
    assert!(daemon.ended().is_none(), "{}", daemon.output());
    assert!(!daemon.output().contains("panicked"), "{}", daemon.output());
    assert_delivers(far, &pod);
}

/// A packet of the peer's pod still reaches the pod.
fn assert_delivers(far: &Namespace, pod: &Namespace) {
    let sender = udp_socket_at(far, *pour::PEER.ip(), pour::PEER.port());
    let receiver = udp_socket_at(pod, POD, PORT);
    let honest = udp((PEER_POD, PORT), (POD, PORT), b"honest");
    let mut buffer = [0; 64];
    wait_until(PATIENCE, "an honest packet arrives after the load", || {
        sender.send_to(&honest, pour::TARGET).expect("a datagram can be sent");
        receiver.recv(&mut buffer).is_ok_and(|bytes| &buffer[..bytes] == b"honest")
    });
}
