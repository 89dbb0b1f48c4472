//! What the writer does on a disk, and when.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use super::*;
use crate::control::cache::Expected;
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::route::Prefixes;

const NOW: u64 = 1_795_225_924;
/// Of the writer under test.
const PACE: Duration = Duration::from_millis(200);
/// However busy the machine is.
const LIMIT: Duration = Duration::from_secs(60);

fn lease(third: u8, host: u8) -> Lease {
    let subnets: Prefixes = format!("10.5.{third}.0/24").parse().unwrap();
    Lease {
        subnets,
        key: subnets.key(),
        attributes: LeaseAttributes::udp([192, 0, 2, host].into()),
        revision: 0,
        created_revision: 0,
        lifetime: Lifetime::Leased { id: 0, expires_unix: None },
    }
}

fn known(hosts: u8, as_of_unix: u64) -> Arc<Known> {
    let peers = (2..2 + hosts).map(|host| (lease(host, host).subnets, lease(host, host).into()));
    Arc::new(Known {
        as_of_unix,
        revision: 5,
        cluster: 6,
        networks: "10.5.0.0/16".parse().unwrap(),
        own: lease(1, 1),
        ends_unix: Some(NOW + 86_400),
        peers: Arc::new(peers.collect()),
    })
}

fn writer(path: &Path) -> Arc<CacheWriter> {
    let config = NetworkConfig::parse(br#"{"Network":"10.5.0.0/16"}"#).unwrap();
    Arc::new(CacheWriter {
        path: path.to_owned(),
        store: "local /srv".to_owned(),
        config,
        status: Arc::default(),
        is_closed: Mutex::default(),
        pause: PACE,
        retry: PACE,
    })
}

fn peers_in(path: &Path) -> usize {
    let bytes = whole_file::read_private(path, cache::BYTES_MAX).unwrap().unwrap();
    let expected = Expected {
        store: "local /srv",
        networks: "10.5.0.0/16".parse().unwrap(),
        subnets: lease(1, 1).subnets,
        address: lease(1, 1).attributes.node_address(),
        now_unix: NOW,
    };
    cache::parse(&bytes, &expected).unwrap().known.peers.len()
}

/// Lets the writer work until `is_done`, and half a pace longer.
async fn work(
    writer: &Arc<CacheWriter>,
    known: &watch::Sender<Option<Arc<Known>>>,
    is_done: impl Fn() -> bool,
) {
    let done = async {
        while !is_done() {
            sleep(PACE / 20).await;
        }
        sleep(PACE / 2).await;
    };
    tokio::select! {
        never = Arc::clone(writer).keep(known.subscribe()) => match never {},
        () = done => {}
        () = sleep(LIMIT) => panic!("the writer does not get there"),
    }
}

#[tokio::test]
async fn first_change_is_written_at_once_bursts_seldom() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("subnet.env.cache");
    let (writer, sender) = (writer(&path), watch::Sender::new(None));
    let began = Instant::now();
    let storm = async {
        sleep(PACE).await;
        assert!(!path.exists(), "written before anything is known");
        sender.send_replace(Some(known(1, NOW)));
        // At once: nobody waits for a pace to pass.
        while !path.exists() {
            sleep(PACE / 20).await;
        }
        assert_eq!(peers_in(&path), 1, "the first news is not on the disk");
        for round in 0..100 {
            sender.send_replace(Some(known(1 + round % 2, NOW)));
            sleep(PACE / 20).await;
        }
        sender.send_replace(Some(known(9, NOW)));
        while peers_in(&path) != 9 {
            sleep(PACE / 20).await;
        }
    };
    tokio::select! {
        never = Arc::clone(&writer).keep(sender.subscribe()) => match never {},
        () = storm => {}
        () = sleep(LIMIT) => panic!("the last news is not on the disk"),
    }
    let writes = writer.status.read().cache.writes;
    let paces = began.elapsed().div_duration_f64(PACE);
    assert!(writes >= 3 && writes as f64 <= paces + 1.0, "{writes} writes in {paces} paces");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600, "others can read who the peers are");
}

/// A weftd that takes over a second after a node has joined, and finds the store out of order,
/// would drop that node's packets.
#[tokio::test]
async fn the_last_news_is_saved_for_a_weftd_that_takes_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("subnet.env.cache");
    let writer = writer(&path);
    for hosts in [1, 2] {
        writer.save(known(hosts, NOW)).await;
        assert_eq!(peers_in(&path), usize::from(hosts), "a node that has joined is not in it");
    }
    writer.forget();
    writer.save(known(2, NOW)).await;
    assert!(!path.exists(), "the next start would use a lost subnet");
}

#[test]
fn unchanged_cache_is_rewritten_only_to_refresh() {
    let known = |hosts, seconds| known(hosts, NOW + seconds);
    let written = known(3, 0);
    assert!(is_due(None, &written));
    assert!(!is_due(Some(&written), &known(3, REFRESH_SECONDS - 1)));
    assert!(is_due(Some(&written), &known(3, REFRESH_SECONDS)));
    assert!(is_due(Some(&known(3, REFRESH_SECONDS)), &written), "after the clock was set back");
    assert!(is_due(Some(&written), &known(4, 0)));
    let cluster = Known { cluster: 7, ..(*written).clone() };
    assert!(is_due(Some(&written), &cluster));
    let ending = |ends_unix| Known { ends_unix, ..(*written).clone() };
    assert!(is_due(Some(&written), &ending(Some(NOW + 86_400 + END_SECONDS))), "renewed");
    assert!(is_due(Some(&written), &ending(None)), "a reservation now");
    let moved = ending(Some(NOW + 86_400 + END_SECONDS - 1));
    assert!(!is_due(Some(&written), &moved), "the end moves with the clock");
}

#[tokio::test]
async fn failed_write_is_retried_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("subnet.env.cache");
    fs::create_dir(&path).unwrap();
    let (writer, sender) = (writer(&path), watch::Sender::new(Some(known(1, NOW))));
    let began = Instant::now();
    work(&writer, &sender, || writer.status.read().cache.failures > 0).await;
    let (failures, paces) =
        (writer.status.read().cache.failures, began.elapsed().div_duration_f64(PACE));
    assert!(failures as f64 <= paces + 1.0, "{failures} tries in {paces} paces");
    fs::remove_dir(&path).unwrap();
    work(&writer, &sender, || path.is_file()).await;
    assert_eq!((peers_in(&path), writer.status.read().cache.writes), (1, 1));
}

#[tokio::test]
async fn cache_of_lost_subnet_is_never_rewritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("subnet.env.cache");
    let (writer, sender) = (writer(&path), watch::Sender::new(Some(known(1, NOW))));
    work(&writer, &sender, || path.exists()).await;
    writer.forget();
    assert!(!path.exists(), "the next start would use a lost subnet");
    work(&writer, &sender, || true).await;
    assert!(!path.exists(), "a write that was under way brings the lost subnet back");
    writer.forget();
}
