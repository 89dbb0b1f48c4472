//! Pods notice nothing of a weftd that is killed, stopped and started again, and little of a
//! device that somebody deletes.

use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::{HOST_GW, SOON, VXLAN, put, told, value, vtep};
use crate::support::lab::wait_until;
use crate::support::overlay::Overlay;
use crate::support::probe::{End, Probe};
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

/// The end of a process on a busy machine; how soon a stop is promised, other tests hold.
const STOP: Duration = Duration::from_secs(5);

/// A start on a busy machine, over a local store.
const START: Duration = Duration::from_secs(20);

fn carries(overlay: &Overlay, mtu_bytes: u32) {
    let payload = u16::try_from(mtu_bytes - 28).unwrap();
    for (from, to) in [(0, 1), (1, 0)] {
        assert_eq!(overlay.leases[from].mtu_bytes, mtu_bytes, "the MTU in subnet.env");
        for size in [56, payload] {
            assert!(
                overlay.lab.ping(from, overlay.pod(to), size),
                "no answer to pings of {size} bytes from pod {from}"
            );
        }
        assert!(!overlay.lab.ping(from, overlay.pod(to), payload + 1), "a packet above the MTU");
    }
    let [near, far] = &overlay.lab.pods;
    tcp_transfer(near, far, overlay.pod(1), 16 << 20, false);
    tcp_transfer(near, far, overlay.pod(1), 16 << 20, true);
}

/// Kills and stops the daemons in turn under traffic; no packet and no flow may suffer.
fn survives_restarts(overlay: &mut Overlay) {
    let address = [0, 1].map(|host| overlay.pod(host));
    let dirs = [0, 1].map(|host| overlay.dir(host));
    let Overlay { lab, daemons, .. } = overlay;
    let store = format!("--local-store={}", dirs[0].parent().unwrap().join("store").display());
    let ends = [0, 1].map(|host| End {
        host: &lab.hosts[host],
        pod: &lab.pods[host],
        address: address[host],
        dir: dirs[host].clone(),
    });
    let ((), report) = Probe::run(&ends, |_| {
        for (host, signal) in [(0, Signal::KILL), (1, Signal::KILL), (0, Signal::TERM)] {
            daemons[host].stop(signal, STOP);
            thread::sleep(Duration::from_millis(300));
            daemons[host] = lab.weftd(host, &dirs[host], &[&store]);
            wait_until(START, "the daemon is back with its peer", || {
                Status::try_of(&dirs[host])
                    .is_some_and(|status| status.0["ready"] == true && status.routes() == 1)
            });
            thread::sleep(Duration::from_millis(300));
        }
    });
    println!("{report}");
    report.assert_nothing_lost("a restart of weftd");
}

#[test]
fn vxlan_carries_and_a_restart_disturbs_nothing() {
    let mut overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    carries(&overlay, 1450);
    let device =
        |overlay: &Overlay| overlay.lab.hosts[0].exec(&["ip", "-o", "link", "show", "flannel.1"]);
    let before = device(&overlay);
    survives_restarts(&mut overlay);
    assert_eq!(device(&overlay), before, "the device was made again by a restart");
}

#[test]
fn host_gw_carries_and_a_restart_disturbs_nothing() {
    let mut overlay = Overlay::start_with(HOST_GW, [&[], &[]]);
    carries(&overlay, 1500);
    survives_restarts(&mut overlay);
}

#[test]
fn a_deleted_device_comes_back_with_every_peer() {
    const PEERS: u16 = 150;
    let overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    for number in 0..PEERS {
        let value = value(&format!("172.20.1.{number}"), "vxlan", &vtep(number));
        put(overlay.files(), &format!("10.5.{}.0-24", 100 + number), &value);
    }
    let all = u64::from(PEERS) + 1;
    wait_until(START, "all peers are set up", || told(&overlay, 0, "peers_programmed") == all);
    let host = &overlay.lab.hosts[0];
    let tables = || {
        let neighbours = host.exec(&["ip", "neighbour", "show", "dev", "flannel.1"]);
        let forwarding = host.exec(&["bridge", "fdb", "show", "dev", "flannel.1"]);
        let routes = host.exec(&["ip", "route", "show", "dev", "flannel.1"]);
        let mut all: Vec<String> =
            [neighbours, forwarding, routes].concat().lines().map(str::to_owned).collect();
        all.sort();
        all
    };
    let before = tables();
    assert!(before.len() >= 3 * usize::from(PEERS), "{before:?}");
    host.exec(&["ip", "link", "delete", "flannel.1"]);
    let took = overlay.traffic_resumes(Duration::from_secs(5), "the device was deleted");
    println!("traffic again {took:?} after the device was deleted");
    wait_until(Duration::from_secs(5), "all peers are set up again", || tables() == before);
    wait_until(SOON, "the operator is told", || overlay.daemons[0].complaints("flannel.1") > 0);
    // Switched off and on: the kernel drops neighbours and routes, not the device.
    host.exec(&["ip", "link", "set", "flannel.1", "down"]);
    let took = overlay.traffic_resumes(Duration::from_secs(5), "the device was switched off");
    println!("traffic again {took:?} after the device was switched off");
    wait_until(Duration::from_secs(5), "all peers are set up again", || tables() == before);
}

#[test]
fn conflicting_device_is_named_and_blocks_readiness() {
    let overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    overlay.traffic_resumes(SOON, "the start");
    let ready = || overlay.status(0).0["ready"] == true;
    wait_until(SOON, "the node is ready", ready);
    // In one go, before weftd puts its device back; again if weftd was faster.
    let batch = overlay.files().join("batch");
    let other = "link add other type vxlan id 1 dstport 8472 dev wire0 nolearning";
    std::fs::write(&batch, format!("link delete flannel.1\n{other}\n")).unwrap();
    let swap = ["ip", "-batch", batch.to_str().unwrap()];
    wait_until(SOON, "another device takes the place", || overlay.lab.hosts[0].succeeds(&swap));
    wait_until(SOON, "the operator is told what is in the way", || {
        overlay.daemons[0].complaints("VNI 1 ") > 0
    });
    wait_until(SOON, "nobody is told that pods can talk", || !ready());
    overlay.lab.hosts[0].exec(&["ip", "link", "delete", "other"]);
    overlay.traffic_resumes(SOON, "the other device is gone");
    wait_until(SOON, "the node is ready again", ready);
}
