//! A crowd of nodes that start at once, and entries that are no leases: what happens in the store
//! is no pod's business.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::thread;
use std::time::Duration;

use etcd_client::Client;
use futures_util::future::join_all;
use weft::control::identity::NodeIdentity;
use weft::control::lease::LeaseAttributes;

use crate::support::cluster::SWITCH_ADDRESS;
use crate::support::control::{acquire_at_last, manager_at, network, subnet_path, wait_for_config};
use crate::support::lab::wait_until;
use crate::support::members::Version;
use crate::support::pace::Stopwatch;
use crate::support::status::Status;
use crate::traffic::site::{Plan, RECONNECT, Site};

fn url() -> String {
    format!("http://{SWITCH_ADDRESS}:2379")
}

/// Runs asynchronous code where etcd is.
fn at_etcd<T: Send, F: Future<Output = T>>(site: &Site, work: impl FnOnce() -> F + Send) -> T {
    site.cluster.switch.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(work())
    })
}

/// F17: the rest of a cluster starts beside two nodes whose pods talk.
#[test]
fn hundred_simultaneous_starts_lose_no_packet() {
    const NODES: u32 = 100;
    const READY: Duration = Duration::from_secs(5);
    let mut site = Site::start(Plan::of(Version::V3_5));
    let before = site.entries();
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let (subnets, took, retries) = at_etcd(site, || async {
            let starts = (0..NODES).map(async |number| {
                let (hostname, boot_id) = (format!("node-{number}"), format!("boot of {number}"));
                let identity = NodeIdentity { hostname, machine_id: None, boot_id };
                let manager = manager_at(&url()).with_identity(identity);
                let address = LeaseAttributes::udp(Ipv4Addr::from_bits(0xC633_6401 + number));
                wait_for_config(&manager).await;
                let own = acquire_at_last(&manager, &network(), &address).await;
                (own.lease.subnets, manager.status().read().conflicts)
            });
            let started = Stopwatch::start();
            let acquired = join_all(starts).await;
            let took = started.elapsed();
            let retries = acquired.iter().map(|(_, retries)| retries).sum::<u64>();
            let subnets: BTreeSet<_> = acquired.into_iter().map(|(subnet, _)| subnet).collect();
            (subnets, took, retries)
        });
        println!("{NODES} nodes have subnets after {took:?}, {retries} races lost");
        assert_eq!(subnets.len(), NODES as usize, "two nodes share a subnet");
        assert!(took <= READY, "a cluster that starts together waits {took:?}");
        for (host, told) in told.iter().enumerate() {
            site.wait_for_routes(host, NODES as usize + 1);
            told.assert_no_warning(&site.daemons[host]);
        }
    });
    report.assert_nothing_lost("a hundred nodes that start at once");
    assert_eq!(site.entries(), before, "a crowd changes the leases of others");
    site.assert_settled();
}

/// F37: what others write that is no lease.
#[test]
fn invalid_entries_lose_no_packet_are_logged_once() {
    // Each is listed several times.
    const RELIST: Duration = Duration::from_secs(1);
    let good = br#"{"PublicIP":"192.0.2.2"}"#.to_vec();
    // As much as etcd takes: 1.5 MiB with key and framing.
    let mut largest = br#"{"PublicIP":"192.0.2.8","BackendData":""#.to_vec();
    largest.resize(1536 * 1024 - 1024, b'x');
    largest.extend_from_slice(b"\"}");
    let junk = [
        ("10.5.240.0-24", b"not json".to_vec(), "bad_value"),
        ("10.5.241.0-24", br#"{"PublicIPv6":"fd00::1"}"#.to_vec(), "bad_address"),
        ("fd00:5::-64", good.clone(), "bad_key"),
        ("10.5.0.48", good.clone(), "bad_key"),
        ("10.5.242.0-24", largest.clone(), "too_large"),
        ("10.5.243.0-24", largest, "too_large"),
    ];
    let mut site = Site::start(Plan { relist: Some(RELIST), ..Plan::of(Version::V3_4) });
    let before = site.entries();
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let put = |entries: Vec<(&str, Vec<u8>)>| {
            at_etcd(site, || async {
                let mut client = Client::connect([url()], None).await.unwrap();
                for (key, value) in entries {
                    client.put(subnet_path(key), value, None).await.unwrap();
                }
            });
        };
        // Of what comes at once the first five are told: not all six may.
        let (first, rest) = junk.split_at(3);
        let of = |junk: &[(&'static str, Vec<u8>, &str)]| {
            junk.iter().map(|(key, value, _)| (*key, value.clone())).collect()
        };
        put(of(first));
        let rejected = |host: usize| {
            let status = Status::of(&site.dir(host)).0;
            let by_reason = status["store"]["rejected"].as_object().cloned().unwrap_or_default();
            by_reason.values().filter_map(serde_json::Value::as_u64).sum::<u64>()
        };
        for host in 0..2 {
            wait_until(RECONNECT, "bad entries are counted", || rejected(host) >= 3);
        }
        put(of(rest));
        put(vec![("10.5.250.0-24", good.clone())]);
        for host in 0..2 {
            wait_until(RECONNECT, "a good node among junk is seen", || {
                site.routes(host) == Some(2)
            });
        }
        thread::sleep(RELIST * 3);
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            let status = Status::of(&site.dir(host)).0;
            assert_eq!(status["store"]["failures"], 0, "junk looks like an outage: {status}");
            let lines = told.lines(daemon);
            for (key, _, why) in &junk {
                let count = junk.iter().filter(|(_, _, other)| other == why).count();
                assert_eq!(status["store"]["rejected"][why], count, "{why}: {status}");
                let words = format!("Ignoring \"{key}\"");
                let times = lines.iter().filter(|line| line.contains(&words)).count();
                assert_eq!(times, 1, "{key} was told {times} times: {lines:?}");
            }
            told.assert_warned(daemon, "");
        }
    });
    report.assert_nothing_lost("junk in the store");
    assert_eq!(site.entries(), before, "junk changes the leases of nodes");
    site.assert_settled();
}
