//! The way to a cluster of three etcd members, with certificates and users, while certificates
//! are replaced, tokens end, members cannot be reached and leaders change.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![expect(clippy::print_stdout, reason = "measured times belong into the report of the run")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::time::sleep;
use weft::control::lease::Peers;
use weft::control::rejected::RejectReason;
use weft::control::store::etcd::EtcdStore;
use weft::control::store::{Leased, Store};
use weft::control::timing::Timing;

use crate::support::cluster::{Cluster, NamespaceEtcd, SWITCH_ADDRESS};
use crate::support::control::{Running, manager, network, node};
use crate::support::etcd::{Etcd, PATIENT, Security};
use crate::support::lab::{Process, SubnetEnv, WEFTD, wait_until};
use crate::support::members::{Members, Setup, TOKEN_TTL, Version, lease_key};
use crate::support::overlay::CONFIG;
use crate::support::pace::Stopwatch;
use crate::support::status::{Status, metric};

/// To be connected again after a fault: the pause between two tries is at most 5 s.
const AGAIN: Duration = Duration::from_secs(8);

fn secure(version: Version) -> Members {
    Members::start(Setup { version, count: 3, secure: true })
}

fn certificates_are_replaced(version: Version) {
    let members = &secure(version);
    let options = members.options(&[0, 1, 2]);
    members.enter(async |log| {
        let node_manager = manager(options.clone());
        let own = node_manager.acquire(&network(), &node(1)).await;
        let own = own.expect("the certificate is refused");
        let mut running = Running::start(node_manager, own);
        members.put_lease(0, "192.0.2.2");
        running.wait_for_peers(&["192.0.2.2"], AGAIN, "the watch does not work").await;

        // Half of a new pair: the key belongs to no certificate.
        let key = members.path("client.key");
        std::fs::write(&key, "-----BEGIN PRIVATE KEY-----\nbm8=\n-----END PRIVATE KEY-----\n")
            .unwrap();
        for _ in 0..3 {
            let answer = running.manager.network_config().await.unwrap_err();
            assert!(answer.store_answered(), "a half-written key cuts a node off: {answer}");
        }
        assert_eq!(log.complaints(), 0, "a connection that lasts needs no key: {}", log.text());
        let error = manager(options.clone()).network_config().await.unwrap_err().to_string();
        assert!(error.contains("--etcd-keyfile"), "not which file: {error}");
        members.new_client_certificate();
        let answer = manager(options.clone()).network_config().await.unwrap_err();
        assert!(answer.store_answered(), "a new certificate is refused: {answer}");

        // Everything new: nothing of what the node has in memory is of use.
        members.kill_all();
        members.new_authority();
        members.spawn_all();
        members.put_lease(1, "192.0.2.3");
        let both = &["192.0.2.2", "192.0.2.3"];
        let took = running.wait_for_peers(both, AGAIN, "a new authority needs a restart").await;
        println!("{version:?}: followed a new authority within {took:?}");

        // The members' certificate runs out.
        members.kill_all();
        members.new_server_certificate(0);
        sleep(Duration::from_secs(2)).await;
        members.spawn_missing();
        let noticed = Stopwatch::start();
        let fresh = manager(options);
        let error = loop {
            let error = fresh.network_config().await.unwrap_err().to_string();
            if error.contains("notAfter") {
                break error;
            }
            assert!(noticed.elapsed() < AGAIN, "the reason is not said: {error}");
            sleep(Duration::from_millis(200)).await;
        };
        assert!(error.contains("expired at 20") && error.contains("new one"), "{error}");
        println!("{version:?}: {error}");
        running.assert_running("an expired certificate ended the daemon");
        members.new_server_certificate(2);
        members.put_lease(2, "192.0.2.4");
        let all = &["192.0.2.2", "192.0.2.3", "192.0.2.4"];
        let took = running.wait_for_peers(all, AGAIN, "a renewed certificate is not enough").await;
        println!("{version:?}: connected to the renewed members within {took:?}");
    });
}

#[test]
fn certificates_rotate_without_restart_on_3_4() {
    certificates_are_replaced(Version::V3_4);
}

#[test]
fn certificates_rotate_without_restart_on_3_5() {
    certificates_are_replaced(Version::V3_5);
}

fn a_revoked_role(version: Version) {
    let members = &secure(version);
    members.enter(async |_| {
        let own_manager = manager(members.options(&[0, 1, 2]))
            .with_timing(Timing { relist_period: Duration::from_millis(500), ..Timing::default() });
        let own = own_manager.acquire(&network(), &node(1)).await.expect("the password is right");
        let running = Running::start(own_manager, own);
        let status = running.manager.status();
        until("everything is listed", || status.read().relists > 0).await;
        assert_eq!(status.read().refused(), None);
        members.ctl(&["user", "revoke-role", "flannel", "flannel"]);
        until("the refusal is told", || status.read().refused().is_some()).await;
        let why = status.read().refused().unwrap();
        assert!(why.contains("permission denied") && why.contains("role"), "{why}");
        // A token ends now and then; a request that is refused is no reason for a new one.
        let (logins, failures) = (members.counted(AUTHENTICATED), status.read().store.failures);
        let started = Instant::now();
        until("more requests are refused", || status.read().store.failures >= failures + 6).await;
        let logins = members.counted(AUTHENTICATED) - logins;
        let ended = u64::try_from(started.elapsed().as_millis() / TOKEN_TTL.as_millis()).unwrap();
        println!("{version:?}: {logins} logins, {ended} tokens ended meanwhile");
        assert!(logins <= ended + 1, "{logins} logins for 6 refusals");

        members.ctl(&["user", "grant-role", "flannel", "flannel"]);
        until("the refusal is over", || status.read().refused().is_none()).await;
        running.assert_running("a revoked role ended the daemon");
    });
}

#[test]
fn revoked_role_is_logged_without_relogin_3_4() {
    a_revoked_role(Version::V3_4);
}

#[test]
fn revoked_role_is_logged_without_relogin_3_5() {
    a_revoked_role(Version::V3_5);
}

/// Waits for a condition of the control plane.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let watch = Stopwatch::start();
    while !condition() {
        assert!(!watch.is_over(Duration::from_secs(60)), "in vain: {what}");
        sleep(Duration::from_millis(50)).await;
    }
}

fn authentication_is_switched(version: Version) {
    let members = &secure(version);
    members.switch_authentication(false);
    members.enter(async |_| {
        let own_manager = manager(members.options(&[0, 1, 2]))
            .with_timing(Timing { relist_period: Duration::from_millis(500), ..Timing::default() });
        let own = own_manager.acquire(&network(), &node(1)).await;
        let own = own.expect("a user is of no use without authentication, and no harm");
        let mut running = Running::start(own_manager, own);
        members.put_lease(0, "192.0.2.2");
        running.wait_for_peers(&["192.0.2.2"], AGAIN, "the watch does not work").await;
        let listed = |running: &Running| running.manager.status().read().relists;

        members.switch_authentication(true);
        let before = listed(&running);
        until("listings go on as a user", || listed(&running) >= before + 2).await;
        members.put_lease(1, "192.0.2.3");
        let both = &["192.0.2.2", "192.0.2.3"];
        running.wait_for_peers(both, AGAIN, "authentication cuts a node off").await;

        members.switch_authentication(false);
        let before = listed(&running);
        until("listings go on without a user", || listed(&running) >= before + 2).await;
        // A new connection has to do without as well.
        let fresh = manager(members.options(&[0, 1, 2]));
        assert!(fresh.network_config().await.unwrap_err().store_answered());
        members.put_lease(2, "192.0.2.4");
        let all = &["192.0.2.2", "192.0.2.3", "192.0.2.4"];
        running.wait_for_peers(all, AGAIN, "a user cuts a node off").await;
        running.assert_running("a switch of authentication ended the daemon");
    });
}

#[test]
fn credentials_work_authentication_on_or_off_3_4() {
    authentication_is_switched(Version::V3_4);
}

#[test]
fn credentials_work_authentication_on_or_off_3_5() {
    authentication_is_switched(Version::V3_5);
}

#[test]
fn without_cafile_system_roots_are_used() {
    let etcd = Etcd::start_with(Security::ServerCertificate);
    let files = tempfile::tempdir().unwrap();
    // Without a configuration in etcd it touches nothing of this host.
    let run = |name: &str, authority: Option<std::path::PathBuf>| {
        let mut weftd = std::process::Command::new(WEFTD);
        weftd.arg(format!("--etcd-endpoints={}", etcd.url()));
        weftd.arg(format!("--subnet-file={}", files.path().join(name).display()));
        if let Some(authority) = authority {
            weftd.env("SSL_CERT_FILE", authority);
        }
        Process::start(&mut weftd, name)
    };
    let trusting = run("trusting", Some(etcd.path("ca.crt")));
    wait_until(Duration::from_secs(30), "etcd is read by the system's authorities", || {
        trusting.complaints("/coreos.com/network/config") > 0
    });
    let doubting = run("doubting", None);
    wait_until(Duration::from_secs(30), "an unknown authority is told", || {
        doubting.output().contains("--etcd-cafile nor")
    });
}

#[test]
fn full_etcd_is_reported_with_and_without_subnet() {
    const QUOTA_BYTES: u64 = 2 << 20;
    const PATIENCE: Duration = Duration::from_secs(90);
    let cluster = Cluster::new(2);
    let switch = &cluster.switch;
    let mut etcd = NamespaceEtcd::start(switch, SWITCH_ADDRESS);
    etcd.ctl(switch, &["put", "/coreos.com/network/config", CONFIG]);
    etcd.shrink(switch, QUOTA_BYTES);
    let files = tempfile::tempdir().unwrap();
    let endpoint = format!("--etcd-endpoints=http://{SWITCH_ADDRESS}:2379");
    let dirs = [0, 1].map(|host| files.path().join(format!("n{host}")));
    let mut first = cluster.weftd(0, &dirs[0], &[&endpoint]);
    SubnetEnv::wait(&dirs[0].join("subnet.env"), &mut first);
    let junk = "x".repeat(100_000);
    wait_until(PATIENCE, "etcd is full", || !etcd.accepts(switch, &["put", "junk", &junk]));

    let mut second = cluster.weftd(1, &dirs[1], &[&endpoint]);
    for (dir, who) in [(&dirs[1], "a node without a subnet"), (&dirs[0], "a running node")] {
        wait_until(PATIENCE, &format!("{who} says that etcd is full"), || {
            let refused = Status::try_of(dir).map(|status| status.0["store"]["refused"].clone());
            refused.is_some_and(|it| it.as_str().is_some_and(|it| it.contains("defragment")))
        });
        assert_eq!(metric(dir, "flannel_store_refused"), Some(1.0), "{who}");
    }
    assert!(second.ended().is_none() && first.ended().is_none(), "{}", second.output());

    let json = etcd.ctl(switch, &["get", "nothing", "-w", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    etcd.ctl(switch, &["del", "junk"]);
    let revision = json["header"]["revision"].to_string();
    etcd.ctl(switch, &["compact", &revision]);
    etcd.ctl(switch, &["defrag"]);
    etcd.ctl(switch, &["alarm", "disarm"]);
    SubnetEnv::wait(&dirs[1].join("subnet.env"), &mut second);
    for dir in &dirs {
        wait_until(PATIENCE, "the refusal is over", || {
            Status::of(dir).0["store"]["refused"].is_null()
        });
    }
}

const AUTHENTICATED: &str = r#"grpc_server_started_total{grpc_method="Authenticate""#;

fn tokens_end(version: Version) {
    let members = &secure(version);
    let options = members.options(&[0, 1, 2]);
    members.enter(async |log| {
        let own_manager = manager(options.clone()).with_timing(Timing {
            // So that the token has ended before each listing.
            relist_period: TOKEN_TTL * 3 / 2,
            lease_ttl: Duration::from_secs(60),
            renew_margin: Duration::from_secs(1),
            ..Timing::default()
        });
        let own = own_manager.acquire(&network(), &node(1)).await.expect("the password is right");
        let mut running = Running::start(own_manager, own);
        let store = Box::new(EtcdStore::new(&options).unwrap());
        let store = Store::Leased(Leased::Etcd(store));
        let listed = store.list().await.unwrap();
        let (revision, held) = (listed.revision, listed.leases[0].clone());
        let relists = || running.manager.status().read().relists;
        let (before, relists_before) = (members.counted(AUTHENTICATED), relists());
        until("it lists several times", || relists() >= relists_before + 2).await;
        until("an old token is replaced", || members.counted(AUTHENTICATED) > before).await;
        let renewed = members.counted(AUTHENTICATED) - before;
        let listed = relists() - relists_before;
        println!("{version:?}: {listed} listings, {renewed} tokens");
        // One listing may be under way.
        assert!(renewed <= listed + 1, "{renewed} tokens for {listed} listings");
        assert_eq!(
            running.manager.status().read().store.failures,
            0,
            "an old token looks like a fault"
        );

        // A stream is refused in other words, and is opened all the same.
        let watch = store.watch(revision, &held).await;
        assert!(watch.is_ok(), "an old token ends the watch: {:?}", watch.err());
        members.put_lease(0, "192.0.2.2");
        running.wait_for_peers(&["192.0.2.2"], AGAIN, "the watch is dead").await;
        assert_eq!(log.complaints(), 0, "a token's end is told: {}", log.text());
    });
}

#[test]
fn expired_tokens_are_renewed_silently_on_3_4() {
    tokens_end(Version::V3_4);
}

#[test]
fn expired_tokens_are_renewed_silently_on_3_5() {
    tokens_end(Version::V3_5);
}

#[test]
fn unreachable_member_costs_nothing() {
    let members = &secure(Version::V3_4);
    // The third endpoint has no member: its address refuses connections.
    let mut options = members.options(&[0, 1]);
    options.endpoints.push("https://172.20.9.1:4001".to_owned());
    members.black_hole(&[0]);
    members.enter(async |_| {
        let mut slowest = Duration::ZERO;
        for _ in 0..5 {
            let fresh = manager(options.clone());
            let started = Stopwatch::start();
            assert!(fresh.network_config().await.unwrap_err().store_answered());
            slowest = slowest.max(started.elapsed());
            let started = Stopwatch::start();
            for _ in 0..100 {
                assert!(fresh.network_config().await.unwrap_err().store_answered());
            }
            let each = started.elapsed() / 100;
            assert!(each < Duration::from_millis(50), "a dead member slows requests: {each:?}");
            assert_eq!(fresh.status().read().store.failures, 0, "requests went to a dead member");
        }
        println!("slowest first call beside a black hole and a closed port: {slowest:?}");
        assert!(slowest < Duration::from_secs(1), "the first call waits {slowest:?}");
    });
}

#[test]
fn a_path_that_falls_silent_is_replaced() {
    let members = &secure(Version::V3_5);
    // The node can only be connected to the first member, and then to the second only.
    members.black_hole(&[1]);
    members.enter(async |_| {
        let own_manager = manager(members.options(&[0, 1]));
        let own = own_manager.acquire(&network(), &node(1)).await.expect("one member is enough");
        let mut running = Running::start(own_manager, own);
        members.put_lease(0, "192.0.2.2");
        running.wait_for_peers(&["192.0.2.2"], AGAIN, "the watch does not work").await;
        members.black_hole(&[0]);
        let silent = Stopwatch::start();
        let (key, value) = (lease_key(1), r#"{"PublicIP":"192.0.2.3"}"#);
        let put = [&PATIENT, &["put", &key, value][..]].concat();
        members.try_ctl(&members.url(1), &put).unwrap();
        let bound = Duration::from_secs(20);
        let both = &["192.0.2.2", "192.0.2.3"];
        running.wait_for_peers(both, bound, "a half-open path hangs the watch").await;
        let took = silent.elapsed();
        println!("half-open path replaced after {took:?}");
        assert!(took < bound, "it took {took:?}");
        assert!(running.manager.network_config().await.unwrap_err().store_answered());
        members.black_hole(&[]);
    });
}

#[test]
fn invalid_entries_are_logged_once_each() {
    let members = &Members::start(Setup { version: Version::V3_5, count: 1, secure: false });
    // As much as etcd takes: 1.5 MiB with key and framing.
    let mut largest = br#"{"PublicIP":"192.0.2.8","BackendData":""#.to_vec();
    largest.resize(1536 * 1024 - 1024, b'x');
    largest.extend_from_slice(b"\"}");
    let good = br#"{"PublicIP":"192.0.2.2"}"#.to_vec();
    let junk = [
        ("10.5.0.16-28", b"not json".to_vec(), RejectReason::BadValue),
        ("10.5.0.32-28", br#"{"PublicIPv6":"fd00::1"}"#.to_vec(), RejectReason::BadAddress),
        ("fd00:5::-64", good.clone(), RejectReason::BadKey),
        ("10.5.0.48", good.clone(), RejectReason::BadKey),
        ("10.5.0.64-28", largest.clone(), RejectReason::TooLarge),
        ("10.5.0.80-28", largest, RejectReason::TooLarge),
    ];
    members.enter(async |log| {
        let options = members.options(&[0]);
        let mut client =
            etcd_client::Client::connect(options.endpoints.clone(), None).await.unwrap();
        let path = crate::support::control::subnet_path;
        let own_manager = manager(options)
            .with_timing(Timing { relist_period: Duration::from_secs(1), ..Timing::default() });
        let own = own_manager.acquire(&network(), &node(1)).await.unwrap();
        let mut running = Running::start(own_manager, own);
        client.put(path("10.5.0.0-28"), good, None).await.unwrap();
        running.wait_for_peers(&["192.0.2.2"], AGAIN, "the watch does not work").await;
        let status = running.manager.status();
        for (number, (key, value, _)) in junk.iter().enumerate() {
            client.put(path(key), value.clone(), None).await.unwrap();
            // One by one: a listing that meets many at once tells of some only.
            until("it is counted", || {
                let counted: u64 = status.read().store.rejected.values().sum();
                counted > number as u64
            })
            .await;
        }
        let last = br#"{"PublicIP":"192.0.2.3"}"#.to_vec();
        client.put(path("10.5.0.240-28"), last, None).await.unwrap();
        let both = &["192.0.2.2", "192.0.2.3"];
        running.wait_for_peers(both, AGAIN, "junk hides a good node").await;
        let listed = status.read().relists;
        until("it lists twice more", || status.read().relists > listed + 1).await;
        assert_eq!(status.read().store.failures, 0, "junk looks like an outage: {}", log.text());
        for (key, _, reason) in &junk {
            let count = junk.iter().filter(|(_, _, other)| other == reason).count() as u64;
            let rejected = status.read().store.rejected;
            let counted = rejected.get(reason.name()).copied().unwrap_or(0);
            assert_eq!(counted, count, "{} is miscounted", reason.name());
            let told = log.text().matches(&format!("Ignoring \"{key}\"")).count();
            assert_eq!(told, 1, "{key} was told {told} times: {}", log.text());
        }
        assert_eq!(running.peers.borrow().len(), 2, "listing junk withdraws a peer");
        running.assert_running("junk ended the daemon");
    });
}

/// Notes when each peer is first seen.
async fn note_arrivals(mut peers: tokio::sync::watch::Receiver<Arc<Peers>>, seen: &Arrivals) {
    while peers.changed().await.is_ok() {
        let now = Instant::now();
        for subnet in peers.borrow_and_update().keys() {
            seen.lock().unwrap().entry(subnet.key()).or_insert(now);
        }
    }
}

type Arrivals = std::sync::Mutex<BTreeMap<String, Instant>>;

#[test]
fn ten_leader_changes_lose_no_event() {
    const BOUND: Duration = Duration::from_secs(2);
    let members = &secure(Version::V3_4);
    let (written_enough, stop) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let seen = &Arrivals::default();
    let watch = Stopwatch::start();
    std::thread::scope(|scope| {
        let node_thread = scope.spawn(|| {
            members.enter(async |log| {
                let own_manager = manager(members.options(&[0]));
                let own = own_manager.acquire(&network(), &node(1)).await.unwrap();
                let running = Running::start(own_manager, own);
                let stopped = async {
                    while !stop.load(Ordering::Relaxed) {
                        sleep(Duration::from_millis(20)).await;
                    }
                };
                tokio::select! {
                    () = note_arrivals(running.peers.clone(), seen) => {}
                    () = stopped => {}
                }
                running.assert_running("a leader change ended the daemon");
                log.text()
            })
        });
        let writer = scope.spawn(|| write_leases(members, written_enough));
        std::thread::sleep(Duration::from_secs(1));
        for change in 1..=10 {
            members.move_leader(change % 3);
            std::thread::sleep(Duration::from_secs(1));
        }
        // And once without warning: the others elect after a second. Not the node's own member,
        // whose silence is another test's.
        members.move_leader(1);
        members.freeze(1, true);
        std::thread::sleep(Duration::from_secs(3));
        members.freeze(1, false);
        std::thread::sleep(Duration::from_secs(1));
        written_enough.store(true, Ordering::Relaxed);
        let written = writer.join().unwrap();
        std::thread::sleep(BOUND);
        stop.store(true, Ordering::Relaxed);
        let log = node_thread.join().unwrap();
        let seen = seen.lock().unwrap();
        let lags: Vec<_> = written
            .iter()
            .map(|(key, at)| {
                let seen = seen.get(key);
                let seen = seen.unwrap_or_else(|| panic!("{key} was never seen:\n{log}"));
                seen.saturating_duration_since(*at)
            })
            .collect();
        let worst = watch.of(*lags.iter().max().unwrap());
        println!("{} leases written across 10 leader changes, slowest after {worst:?}", lags.len());
        assert!(worst < BOUND, "a leader change delays news by {worst:?}:\n{log}");
    });
}

/// Writes one lease after the other; gives when each had been written.
fn write_leases(members: &Members, stop: &AtomicBool) -> BTreeMap<String, Instant> {
    let mut written = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let number = written.len();
        let key = format!("10.5.{}.{}-28", 101 + number / 16, number % 16 * 16);
        let value =
            format!(r#"{{"PublicIP":"198.51.{}.{}"}}"#, 100 + number / 250, 1 + number % 250);
        let path = crate::support::control::subnet_path(&key);
        if members.try_ctl(&members.urls(), &["put", &path, &value]).is_ok() {
            written.insert(key, Instant::now());
        }
    }
    written
}
