//! A cluster of 6,000 Nodes: how long until all are known, what that takes, and what their
//! heartbeats cost.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::cluster::{Cluster, SWITCH_ADDRESS};
use crate::support::cost::{process_time, status_bytes};
use crate::support::kube_api::{KubeApi, PREFIX, flannel_node};
use crate::support::lab::{Process, SubnetEnv, WEFTD, wait_until};
use crate::support::pace::{Stopwatch, by_effort};
use crate::support::status::Status;

const NODES: u32 = 6000;
const FIRST_SYNC_MAX: Duration = Duration::from_secs(10);
const RSS_BYTES_MAX: u64 = 64 << 20;
const UPDATES_PER_SECOND: u32 = 100;
const CPU_SHARE_MAX: f64 = 0.05;
/// The bounds are of a release build; a debug build takes several times the processor.
const DEBUG_FACTOR: f64 = if cfg!(debug_assertions) { 8.0 } else { 1.0 };
const MEASURED_FOR: Duration = Duration::from_secs(10);

fn numbered(number: u32) -> Value {
    let subnet = std::net::Ipv4Addr::from_bits(0x0A40_0000 + (number << 8));
    let address = std::net::Ipv4Addr::from_bits(0xC633_0000 + 1 + number);
    flannel_node(&format!("node-{number:04}"), &format!("{subnet}/24"), &address.to_string())
}

/// Changes Nodes a hundred times a second, and gives the share of a processor that weftd took.
fn share_while(daemon: &Process, mut change: impl FnMut(u32)) -> f64 {
    let (before, started) = (process_time(daemon), Instant::now());
    let mut number = 0;
    while started.elapsed() < by_effort(MEASURED_FOR / 2, MEASURED_FOR) {
        let due = started + Duration::from_secs(1) * number / UPDATES_PER_SECOND;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        change(1 + number % (NODES - 1));
        number += 1;
    }
    // Of each, whether or not the machine made as many as it should.
    let each = (process_time(daemon) - before).as_secs_f64() / f64::from(number);
    each * f64::from(UPDATES_PER_SECOND)
}

#[test]
fn six_thousand_nodes_load_fast_within_budget() {
    let cluster = Cluster::new(1);
    let listener = cluster.switch.enter(|| TcpListener::bind((SWITCH_ADDRESS, 6443)).unwrap());
    let api = KubeApi::serve(listener);
    (0..NODES).for_each(|number| api.put_node(&numbered(number)));
    let size = api.node("node-0001").to_string().len();
    let files = tempfile::tempdir().unwrap();
    let net_conf = files.path().join("net-conf.json");
    std::fs::write(&net_conf, r#"{"Network":"10.64.0.0/10","Backend":{"Type":"udp"}}"#).unwrap();
    let flags = [
        WEFTD.to_owned(),
        "--kube-subnet-mgr".to_owned(),
        format!("--kube-api-url=http://{SWITCH_ADDRESS}:6443"),
        format!("--net-config-path={}", net_conf.display()),
        format!("--subnet-file={}", files.path().join("subnet.env").display()),
        "--iface=wire0".to_owned(),
        "--iptables-forward-rules=false".to_owned(),
    ];
    let argv: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mut command = cluster.hosts[0].command(&argv);
    let started = Stopwatch::start();
    let mut daemon = Process::start(command.env("NODE_NAME", "node-0000"), "weftd");
    SubnetEnv::wait(&files.path().join("subnet.env"), &mut daemon);
    let peers = || Status::try_of(files.path()).and_then(|status| status.0["peers"].as_u64());
    wait_until(Duration::from_secs(60), "all Nodes are peers", || {
        peers() == Some(u64::from(NODES) - 1)
    });
    let first_sync = started.elapsed();
    wait_until(Duration::from_secs(10), "the watch is open", || api.watches() == 1);
    let after_sync = status_bytes(&daemon, "VmHWM");
    let heartbeats = share_while(&daemon, |number| api.heartbeat(&format!("node-{number:04}")));
    let mut moved = 0;
    let changes = share_while(&daemon, |number| {
        moved += 1;
        let address = std::net::Ipv4Addr::from_bits(0xC634_0000 + moved);
        api.edit(&format!("node-{number:04}"), |node| {
            node["metadata"]["annotations"][format!("{PREFIX}public-ip")] =
                address.to_string().into();
        });
    });
    let (rss, peak) = (status_bytes(&daemon, "VmRSS"), status_bytes(&daemon, "VmHWM"));
    println!(
        "{NODES} Nodes of {size} bytes: first sync {first_sync:?}; peak RSS {} KiB after it, RSS \
         {} KiB and peak {} KiB at the end; {UPDATES_PER_SECOND} heartbeats a second {:.2} % of a \
         processor, as many moves {:.2} %",
        after_sync / 1024,
        rss / 1024,
        peak / 1024,
        heartbeats * 100.0,
        changes * 100.0
    );
    // One question may come while weftd has no processor to answer it.
    wait_until(Duration::from_secs(10), "all Nodes are still peers", || {
        peers() == Some(u64::from(NODES) - 1)
    });
    assert!(first_sync <= FIRST_SYNC_MAX, "the first sync took {first_sync:?}");
    assert!(peak <= RSS_BYTES_MAX, "{} KiB of memory", peak / 1024);
    let bound = CPU_SHARE_MAX * DEBUG_FACTOR;
    assert!(heartbeats <= bound, "heartbeats cost {:.1} % of a processor", heartbeats * 100.0);
    assert!(changes <= 2.0 * bound, "moves cost {:.1} % of a processor", changes * 100.0);
}
