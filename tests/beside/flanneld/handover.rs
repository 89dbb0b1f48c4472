//! One daemon in place of the other, under traffic.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::site::{Daemon, STOP, SUBNETS, Site, wait_for_pings};
use crate::support::traffic::{Numbered, port, udp_socket};

use Daemon::{Flanneld, Weftd};

/// Datagrams a second.
const RATE: u64 = 500;

/// The udp backend's device is gone between the two; what a busy machine needs to start one.
const GAP_MAX: Duration = Duration::from_secs(3);

#[test]
fn a_host_keeps_its_subnet_and_its_traffic_from_one_daemon_to_the_other() {
    for (kind, peer) in [("udp", Weftd), ("udp", Flanneld), ("vxlan", Weftd), ("host-gw", Weftd)] {
        let site = Site::with_backend(kind);
        let (mut process, near) = site.start(0, Flanneld, &["--ip-masq"]);
        let (other, far) = site.start(1, peer, &["--ip-masq"]);
        let pods = [site.cluster.pod(0, &near), site.cluster.pod(1, &far)];
        wait_for_pings(&pods[0], far.pod_address(), "both have started");
        let (env, keys) = (site.subnet_env(0), site.leases());
        let turns = [(Signal::TERM, Weftd), (Signal::TERM, Flanneld), (Signal::KILL, Weftd)];
        for (signal, next) in turns.into_iter().chain([(Signal::KILL, Flanneld)]) {
            let sockets =
                [udp_socket(&pods[0], near.pod_address()), udp_socket(&pods[1], far.pod_address())];
            let target = SocketAddr::new(IpAddr::V4(near.pod_address()), port(&sockets[0]));
            let numbered = Numbered::default();
            thread::scope(|scope| {
                scope.spawn(|| numbered.receive(&sockets[0]));
                scope.spawn(|| numbered.send(&sockets[1], target, RATE));
                thread::sleep(Duration::from_millis(300));
                process.stop(signal, STOP);
                (process, _) = site.start(0, next, &["--ip-masq"]);
                wait_for_pings(&pods[0], far.pod_address(), "the other has started");
                thread::sleep(Duration::from_millis(300));
                numbered.stop.store(true, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(100));
                numbered.drained.store(true, Ordering::Relaxed);
            });
            let gap = Duration::from_nanos(numbered.longest_gap_ns.load(Ordering::Relaxed));
            let missing = numbered.missing();
            println!(
                "{kind} beside {peer:?}, {signal:?}, then {next:?}: longest gap {gap:.0?}, \
                 {missing} of {} lost",
                numbered.sent.load(Ordering::Relaxed)
            );
            assert_eq!(site.subnet_env(0), env, "{kind}: subnet.env is another for {next:?}");
            assert_eq!(site.leases(), keys, "{kind}: {next:?} has other keys or values");
            assert!(gap < GAP_MAX, "{kind}: no packet for {gap:?}");
            assert!(kind == "udp" || missing == 0, "{kind}: {missing} lost; the kernel carries");
        }
        site.stop(process);
        site.stop(other);
    }
}

#[test]
fn a_reservation_stays_one_with_weftd_and_ends_with_flanneld() {
    let site = Site::with_backend("udp");
    let key = format!("{SUBNETS}/10.5.77.0-24");
    for (daemon, stays) in [(Weftd, true), (Flanneld, false)] {
        site.forget();
        site.put(&key, r#"{"PublicIP":"172.20.0.1"}"#);
        let (process, lease) = site.start(0, daemon, &[]);
        assert_eq!(lease.subnet, "10.5.77.1/24", "{daemon:?} ignores the reservation");
        assert_eq!(site.lease_of(&key) == 0, stays, "{daemon:?}");
        site.stop(process);
    }
}
