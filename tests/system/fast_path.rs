//! Daemons whose packets the kernel carries, beside ones whose workers do.

use std::time::Duration;

use crate::support::lab::wait_until;
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::traffic::{kernel_counter, tcp_transfer, udp_sizes};

const PATIENCE: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

/// What the kernel's programs of a host took: sent and received.
fn taken(overlay: &Overlay, host: usize) -> [u64; 2] {
    let status = overlay.status(host);
    ["packets_sent", "packets_received"]
        .map(|name| status.0["fast_path"][name].as_u64().expect("status has the counts"))
}

/// What the workers of both hosts sent.
fn sent_by_workers(overlay: &Overlay) -> u64 {
    [0, 1].map(|host| overlay.status(host).count("egress", "packets_forwarded")).iter().sum()
}

/// Answers to the echoes that measure the path, a few a second, go through workers.
const ANSWERS_MAX: u64 = 200;

/// The first packets are the workers': they have the kernel find the neighbour.
fn wait_until_carried(overlay: &Overlay) {
    wait_until(PATIENCE, "the kernel carries the packets to the peers", || {
        overlay.lab.ping(0, overlay.pod(1), 56)
            && (0..2).all(|host| overlay.status(host).0["fast_path"]["peers"] == 1)
    });
}

#[test]
fn ordinary_packets_never_meet_a_worker() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=on"], &["--fast-path=on"]]);
    wait_until_carried(&overlay);
    let [near, far] = &overlay.lab.pods;
    let before = sent_by_workers(&overlay);
    for size in [0, 56, 1000, 1444] {
        assert!(overlay.lab.ping(1, overlay.pod(0), size), "a ping of {size} is lost");
    }
    assert!(!overlay.lab.ping(0, overlay.pod(1), 1445), "1473 bytes with DF crossed");
    udp_sizes(near, far, overlay.pod(1), [1, 100, 1443, 1444]);
    tcp_transfer(near, far, overlay.pod(1), 32 * MIB, false);
    tcp_transfer(near, far, overlay.pod(1), 16 * MIB, true);
    let after = sent_by_workers(&overlay);
    assert!(after < before + ANSWERS_MAX, "ordinary packets go through workers: {before} {after}");
    let [sent, received] = taken(&overlay, 0);
    assert!(sent > 32 * MIB / 1472 && received > 10 * ANSWERS_MAX, "{sent}, {received}");
    wait_until(
        PATIENCE,
        "what one sends the other takes, but for echoes to the host itself",
        || {
            let [[sent, received], [sent_back, received_back]] =
                [0, 1].map(|host| taken(&overlay, host));
            let [echoes, echoes_back] =
                [0, 1].map(|host| overlay.status(host).count("ingress", "packets_forwarded"));
            (received_back..=received_back + echoes_back).contains(&sent)
                && (received..=received + echoes).contains(&sent_back)
        },
    );
    // Those that the pods' kernels cut are the workers'.
    udp_sizes(near, far, overlay.pod(1), [1445, 9000]);
    let fragments = 2 + 7;
    assert!(sent_by_workers(&overlay) >= after + fragments, "who carried the fragments?");
    let out_of_order = kernel_counter(far, "TcpExt", "TCPOFOQueue");
    println!("{out_of_order} out of order");
}

#[test]
fn workers_and_kernel_understand_each_other() {
    for arguments in [["--fast-path=on", "--fast-path=off"], ["--fast-path=off", "--fast-path=on"]]
    {
        let overlay = Overlay::start_with(CONFIG, [&[arguments[0]], &[arguments[1]]]);
        let [near, far] = &overlay.lab.pods;
        assert!(overlay.lab.ping(0, overlay.pod(1), 56) && overlay.lab.ping(1, overlay.pod(0), 56));
        tcp_transfer(near, far, overlay.pod(1), 16 * MIB, false);
        tcp_transfer(far, near, overlay.pod(0), 16 * MIB, false);
        for host in 0..2 {
            assert_eq!(taken(&overlay, host), [0, 0], "a peer without programs pays for checksums");
        }
    }
}
