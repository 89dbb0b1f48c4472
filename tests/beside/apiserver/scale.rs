//! Thousands of Nodes in a real API: the first listing, and what changes of them cost.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use hyper::Method;
use serde_json::{Value, json};

use crate::plane::Plane;
use crate::requests::{send, with_client};
use crate::site::{Site, name};
use crate::support::cost::{process_time, status_bytes};
use crate::support::lab::wait_until;

/// As many as a machine with two processors makes in a minute. `WEFT_BESIDE_NODES` is another
/// number.
const NODES: u32 = 3000;
/// Requests under way at a time, while Nodes are made.
const MAKERS: usize = 16;
const FIRST_SYNC_MAX: Duration = Duration::from_secs(30);
const RSS_BYTES_MAX: u64 = 64 << 20;
const UPDATES_PER_SECOND: u32 = 100;
const MEASURED_FOR: Duration = Duration::from_secs(10);
/// Of a debug build, beside an API that takes most of the machine.
const CPU_SHARE_MAX: f64 = 0.5;

fn nodes() -> u32 {
    let set = std::env::var("WEFT_BESIDE_NODES").ok();
    set.map_or(NODES, |text| text.parse().expect("WEFT_BESIDE_NODES is a number"))
}

/// A Node as of a cluster in use: images, conditions, annotations.
fn numbered(number: u32) -> Value {
    let prefix = "flannel.alpha.coreos.com";
    let subnet = format!("{}/24", std::net::Ipv4Addr::from_bits(0x0A40_0000 + (number << 8)));
    let address = std::net::Ipv4Addr::from_bits(0xC633_0000 + 1 + number);
    let images: Vec<_> = (0..50)
        .map(|image| {
            let digest = format!("{image:064x}");
            json!({"names": [format!("registry.example/apps/image-{image}@sha256:{digest}")],
                "sizeBytes": 10_000_000 + image})
        })
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": format!("node-{number:04}"),
            "annotations": {
                format!("{prefix}/kube-subnet-manager"): "true",
                format!("{prefix}/backend-type"): "",
                format!("{prefix}/backend-data"): "null",
                format!("{prefix}/public-ip"): address.to_string(),
            },
        },
        "spec": {"podCIDR": subnet, "podCIDRs": [subnet]},
        "status": {"images": images},
    })
}

#[track_caller]
fn make(plane: &Plane) {
    let started = Instant::now();
    let codes = with_client(plane, "admin", async |client| {
        let made = futures_util::stream::iter(1..nodes()).map(|number| {
            let client = client.clone();
            async move {
                let node = numbered(number);
                send(&client, Method::POST, "/api/v1/nodes", "application/json", Some(&node)).await
            }
        });
        made.buffer_unordered(MAKERS).collect::<Vec<_>>().await
    });
    let failed = codes.iter().filter(|code| **code != 201).count();
    assert_eq!(failed, 0, "not all Nodes were made");
    println!("{} Nodes made in {:.1?}", codes.len() + 1, started.elapsed());
}

/// Writes annotations of a hundred Nodes a second, and gives the rate.
#[track_caller]
fn update(plane: &Plane, key: &str) -> f64 {
    let started = Instant::now();
    let count = UPDATES_PER_SECOND * u32::try_from(MEASURED_FOR.as_secs()).unwrap();
    let codes = with_client(plane, "admin", async |client| {
        let written = futures_util::stream::iter(0..count).map(|number| {
            let client = client.clone();
            async move {
                let due = Duration::from_secs(1) * number / UPDATES_PER_SECOND;
                tokio::time::sleep(due.saturating_sub(started.elapsed())).await;
                let address = std::net::Ipv4Addr::from_bits(0xC634_0000 + number);
                let patch = json!({"metadata": {"annotations": {key: address.to_string()}}});
                let path = format!("/api/v1/nodes/node-{:04}", 1 + number % (nodes() - 1));
                let kind = "application/merge-patch+json";
                send(&client, Method::PATCH, &path, kind, Some(&patch)).await
            }
        });
        written.buffer_unordered(MAKERS).collect::<Vec<_>>().await
    });
    assert!(codes.iter().all(|code| *code == 200), "not all Nodes were written");
    f64::from(count) / started.elapsed().as_secs_f64()
}

#[test]
fn thousands_of_nodes_are_known_soon_and_cost_little() {
    let mut site = Site::new(Plane::without_controller(1, &[]), "udp");
    site.widen("10.64.0.0/10");
    let own = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name(0)},
        "spec": {"podCIDR": "10.64.0.0/24", "podCIDRs": ["10.64.0.0/24"]},
    });
    site.plane.hand("admin", &["create"], &own);
    make(&site.plane);
    site.write_token(0, &site.issued());
    let started = Instant::now();
    site.daemons.push(site.container(0, &[("NODE_NAME", &name(0))]));
    let all = u64::from(nodes()) - 1;
    wait_until(FIRST_SYNC_MAX, "all Nodes are peers", || site.peers(0) == Some(all));
    let first_sync = started.elapsed();
    let share = |key: &str| {
        let (before, started) = (process_time(&site.daemons[0]), Instant::now());
        let rate = update(&site.plane, key);
        let spent = process_time(&site.daemons[0]) - before;
        (rate, spent.as_secs_f64() / started.elapsed().as_secs_f64())
    };
    let heartbeats = share("heartbeat.example/at");
    let moves = share("flannel.alpha.coreos.com/public-ip");
    let peak = status_bytes(&site.daemons[0], "VmHWM");
    println!(
        "{} Nodes: first sync {first_sync:.1?}, peak RSS {} KiB; {:.0} heartbeats a second {:.1} % \
         of a processor, {:.0} moves a second {:.1} %",
        nodes(),
        peak / 1024,
        heartbeats.0,
        heartbeats.1 * 100.0,
        moves.0,
        moves.1 * 100.0
    );
    assert_eq!(site.peers(0), Some(all), "peers were lost on the way");
    assert!(peak <= RSS_BYTES_MAX, "{} KiB of memory", peak / 1024);
    assert!(heartbeats.1 <= CPU_SHARE_MAX, "heartbeats cost {:.2} processors", heartbeats.1);
    assert!(moves.1 <= CPU_SHARE_MAX, "moves cost {:.2} processors", moves.1);
    let (stopped, ended) = (Instant::now(), {
        let daemon = &mut site.daemons[0];
        daemon.stop(rustix::process::Signal::TERM, Duration::from_secs(1))
    });
    println!("stopped in {:?}", stopped.elapsed());
    assert_eq!(ended.code(), Some(0));
}
