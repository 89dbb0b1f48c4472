//! The whole loop over a store in memory: following, renewing, losing, outages.

use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::Instant;

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::*;
use crate::control::choose::tests::config;
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::control::rejected::RejectReason;
use crate::control::store::Leased;
use crate::control::store::local::LocalStore;
use crate::control::store::memory::MemoryStore;
use crate::control::timing::Timing;

const LEASED: Lifetime = Lifetime::Leased { id: 5, expires_unix: None };
const OWN_IP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const OWN: &str = "10.5.100.0-24";
const OWN_VALUE: &str = r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#;
const SOON: Duration = Duration::from_secs(2);
const NEVER: Duration = Duration::from_millis(400);

/// Runs a node whose attributes never change.
async fn run(manager: &SubnetManager, own: OwnLease, peers: &Sender<Arc<Peers>>) -> End {
    let (_fixed, attributes) = tokio::sync::watch::channel(own.lease.attributes.clone());
    manager.run(Held::Leased(own), peers, attributes).await
}

struct Daemon {
    store: MemoryStore,
    manager: Arc<SubnetManager>,
    peers: Receiver<Arc<Peers>>,
    task: JoinHandle<End>,
}

impl Daemon {
    async fn start(timing: Timing) -> Self {
        let store = MemoryStore::new();
        let previous = "10.5.100.0/24".parse().ok();
        let manager = SubnetManager::over(Store::Leased(Leased::Memory(store.clone())), previous);
        let manager = Arc::new(manager.with_timing(timing));
        let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0");
        let own = manager.acquire(&network, &LeaseAttributes::udp(OWN_IP)).await.unwrap();
        assert_eq!(own.lease.key, OWN);
        let (sender, peers) = tokio::sync::watch::channel(Arc::default());
        let runner = Arc::clone(&manager);
        let task = tokio::spawn(async move { run(&runner, own, &sender).await });
        Self { store, manager, peers, task }
    }

    async fn usual() -> Self {
        Self::start(Timing::default()).await
    }

    fn put(&self, key: &str, public_ip: &str) {
        let value = format!("{{\"PublicIP\":\"{public_ip}\"}}");
        self.store.put(key, value.as_bytes(), LEASED);
    }

    async fn wait_for(&mut self, expected: &[&str]) {
        let as_expected = self.peers.wait_for(|peers| addresses(peers) == expected);
        let found = timeout(SOON, as_expected).await.is_ok();
        assert!(found, "{:?}, not {expected:?}", addresses(&self.peers.borrow()));
    }

    async fn end(self) -> End {
        timeout(SOON, self.task).await.expect("still running").unwrap()
    }
}

/// Waits for what comes late on a machine that is busy.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let happens = async {
        while !condition() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(10 * SOON, happens).await.unwrap_or_else(|_| panic!("in vain: {what}"));
}

fn addresses(peers: &Peers) -> Vec<String> {
    peers.values().map(|lease| lease.attributes.node_address().to_string()).collect()
}

fn lives(lease_ttl_millis: u64, renew_margin_millis: u64) -> Timing {
    Timing {
        lease_ttl: Duration::from_millis(lease_ttl_millis),
        renew_margin: Duration::from_millis(renew_margin_millis),
        renew_retry: Duration::from_millis(50),
        ..Timing::default()
    }
}

#[tokio::test]
async fn the_set_of_peers_follows_the_store() {
    let mut daemon = Daemon::usual().await;
    daemon.put("10.5.1.0-24", "192.0.2.2");
    daemon.wait_for(&["192.0.2.2"]).await;
    daemon.put("10.5.1.0-24", "192.0.2.3");
    daemon.wait_for(&["192.0.2.3"]).await;
    daemon.put("10.5.2.0-24", "192.0.2.4");
    daemon.store.remove("10.5.1.0-24");
    daemon.wait_for(&["192.0.2.4"]).await;
    daemon.put("10.5.3.0-24", "192.0.2.1");
    daemon.put("10.5.100.64-26", "192.0.2.5");
    daemon.put("10.5.4.0-24", "192.0.2.6");
    daemon.wait_for(&["192.0.2.4", "192.0.2.6"]).await;
    let status = daemon.manager.status();
    assert_eq!(status.read().store.rejected[RejectReason::OwnAddress.name()], 1);
    assert_eq!(status.read().store.rejected[RejectReason::OverlapsOwn.name()], 1);
    assert_eq!(status.read().peers, 2);
}

#[tokio::test]
async fn outage_changes_nothing_and_events_are_resumed() {
    let mut daemon = Daemon::usual().await;
    daemon.put("10.5.1.0-24", "192.0.2.2");
    daemon.wait_for(&["192.0.2.2"]).await;
    let listed = daemon.manager.status().read().relists;
    daemon.store.set_down(true);
    daemon.store.remove("10.5.1.0-24");
    daemon.put("10.5.2.0-24", "192.0.2.3");
    sleep(NEVER).await;
    assert_eq!(addresses(&daemon.peers.borrow()), ["192.0.2.2"]);
    assert!(!daemon.manager.status().read().store.up);
    daemon.store.set_down(false);
    daemon.wait_for(&["192.0.2.3"]).await;
    assert_eq!(daemon.manager.status().read().relists, listed, "the history was there to resume");
    assert!(daemon.manager.status().read().store.up);
}

#[tokio::test]
async fn lost_history_is_replaced_by_one_listing() {
    let mut daemon = Daemon::usual().await;
    daemon.put("10.5.1.0-24", "192.0.2.2");
    daemon.wait_for(&["192.0.2.2"]).await;
    let listed = daemon.manager.status().read().relists;
    daemon.store.set_down(true);
    daemon.store.remove("10.5.1.0-24");
    daemon.put("10.5.2.0-24", "192.0.2.3");
    daemon.store.compact();
    daemon.store.set_down(false);
    daemon.wait_for(&["192.0.2.3"]).await;
    assert_eq!(daemon.manager.status().read().relists, listed + 1);
}

#[tokio::test]
async fn everything_is_listed_again_now_and_then() {
    let timing = Timing { relist_period: Duration::from_millis(100), ..Timing::default() };
    let started = Instant::now();
    let daemon = Daemon::start(timing).await;
    sleep(Duration::from_millis(700)).await;
    let listed = || daemon.manager.status().read().relists;
    until("a fourth listing", || listed() >= 4).await;
    let (listed, took) = (listed(), started.elapsed());
    // The first, and one for each period, of which chance leaves 80 ms at least.
    let most = 1 + took.as_millis() / 80;
    assert!(u128::from(listed) <= most, "{listed} listings in {took:?}");
}

#[tokio::test]
async fn removed_lease_ends_run_and_stays_removed() {
    let daemon = Daemon::usual().await;
    sleep(Duration::from_millis(100)).await;
    let store = daemon.store.clone();
    store.remove(OWN);
    assert_eq!(daemon.end().await, End { new_owner: None });
    assert!(store.keys().is_empty());
}

#[tokio::test]
async fn new_owner_ends_run_and_is_named() {
    let daemon = Daemon::usual().await;
    sleep(Duration::from_millis(100)).await;
    let store = daemon.store.clone();
    daemon.put(OWN, "192.0.2.9");
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 9).into());
    assert_eq!(daemon.end().await, End { new_owner });
    assert_eq!(store.get(OWN).unwrap().0, r#"{"PublicIP":"192.0.2.9"}"#);
}

#[tokio::test]
async fn lease_lost_during_outage_is_retaken() {
    let daemon = Daemon::usual().await;
    sleep(Duration::from_millis(100)).await;
    daemon.store.set_down(true);
    sleep(Duration::from_millis(100)).await;
    daemon.store.remove(OWN);
    daemon.store.set_down(false);
    let taken = async {
        while daemon.store.get(OWN).is_none() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, taken).await.expect("the subnet stays free, and others may take it");
    assert_eq!(daemon.store.get(OWN).map(|(value, _)| value).as_deref(), Some(OWN_VALUE));
    assert!(!daemon.task.is_finished());
}

#[tokio::test]
async fn lease_covered_during_outage_is_given_up() {
    let daemon = Daemon::usual().await;
    sleep(Duration::from_millis(100)).await;
    daemon.store.set_down(true);
    sleep(Duration::from_millis(100)).await;
    daemon.store.remove(OWN);
    daemon.put("10.5.96.0-20", "192.0.2.9");
    daemon.store.set_down(false);
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 9).into());
    assert_eq!(daemon.end().await, End { new_owner });
}

#[tokio::test]
async fn renewal_is_on_time_and_conditional() {
    let started = Instant::now();
    let daemon = Daemon::start(lives(600, 400)).await;
    sleep(Duration::from_millis(900)).await;
    let renewals = || daemon.manager.status().read().store.renewals;
    until("a second renewal", || renewals() >= 2).await;
    let (renewals, took) = (renewals(), started.elapsed());
    // Not many more than that.
    let most = took.as_millis() / 110;
    assert!(u128::from(renewals) <= most, "{renewals} renewals in {took:?} at one each 200 ms");
    assert_eq!(daemon.manager.status().read().conflicts, 0);
    assert!(daemon.manager.status().read().store.lease_expires_unix.is_some());
}

#[tokio::test]
async fn own_entry_ended_by_wall_clock_is_retaken() {
    let store = MemoryStore::new();
    let manager = SubnetManager::over(
        Store::Leased(Leased::Memory(store.clone())),
        "10.5.100.0/24".parse().ok(),
    );
    let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0");
    let mut own = manager.acquire(&network, &LeaseAttributes::udp(OWN_IP)).await.unwrap();
    // A local entry for which the wall clock was set past its end.
    own.lease.lifetime = Lifetime::Leased { id: 0, expires_unix: Some(1) };
    store.remove(OWN);
    let (sender, _peers) = tokio::sync::watch::channel(Arc::default());
    let run = run(&manager, own, &sender);
    let end = timeout(NEVER, run).await;
    assert!(end.is_err(), "a step of the clock ended the daemon: {end:?}");
    assert_eq!(store.get(OWN).unwrap().0, OWN_VALUE);
}

#[tokio::test]
async fn failing_renewal_retries_without_storm() {
    let daemon = Daemon::start(lives(600, 400)).await;
    sleep(Duration::from_millis(100)).await;
    let before = daemon.store.calls();
    daemon.store.set_down(true);
    sleep(Duration::from_millis(1500)).await;
    let calls = daemon.store.calls() - before;
    assert!(calls <= 15, "{calls} requests in 1.5 s of outage");
    assert!(!daemon.task.is_finished());
    daemon.store.set_down(false);
    sleep(Duration::from_millis(2500)).await;
    until("the store is up again", || daemon.manager.status().read().store.up).await;
    assert!(daemon.store.get(OWN).is_some());
    assert!(!daemon.task.is_finished());
}

#[tokio::test]
async fn a_renewal_without_answer_is_followed() {
    let daemon = Daemon::start(lives(600, 400)).await;
    daemon.store.lose_answers(1);
    sleep(Duration::from_millis(2500)).await;
    assert!(!daemon.task.is_finished(), "a lost answer ended the daemon");
    let renewals = || daemon.manager.status().read().store.renewals;
    until("renewing works again", || renewals() >= 1).await;
    assert_eq!(daemon.store.keys(), [OWN]);
}

#[tokio::test]
async fn a_rewritten_own_entry_is_followed_not_fought() {
    let daemon = Daemon::start(lives(3000, 100)).await;
    sleep(Duration::from_millis(100)).await;
    let has_end = || daemon.manager.status().read().store.lease_expires_unix.is_some();
    until("it runs with a lease", has_end).await;
    // The operator makes a reservation of it.
    daemon.store.put(OWN, OWN_VALUE.as_bytes(), Lifetime::Reservation);
    until("it is a reservation", || !has_end()).await;
    // And a lease again, with another etcd lease.
    daemon.store.put(OWN, OWN_VALUE.as_bytes(), LEASED);
    sleep(Duration::from_millis(300)).await;
    let renewals = || daemon.manager.status().read().store.renewals;
    until("the end of the new lease is known", || renewals() >= 1 && has_end()).await;
    assert!(!daemon.task.is_finished());
}

#[tokio::test]
async fn an_own_entry_of_junk_is_repaired() {
    let daemon = Daemon::usual().await;
    sleep(Duration::from_millis(100)).await;
    daemon.store.put(OWN, b"junk", LEASED);
    sleep(Duration::from_millis(200)).await;
    until("it is repaired", || daemon.store.get(OWN).unwrap().0 == OWN_VALUE).await;
    assert!(!daemon.task.is_finished());
}

#[tokio::test]
async fn rewritten_own_entry_is_restored_without_fight() {
    let daemon = Daemon::usual().await;
    sleep(Duration::from_millis(100)).await;
    let before = daemon.store.calls();
    let foreign = br#"{"PublicIP":"192.0.2.1","BackendType":"vxlan","BackendData":{"VNI":1}}"#;
    for rewritten in 1..=40 {
        daemon.store.put(OWN, foreign, LEASED);
        sleep(Duration::from_millis(50)).await;
        assert!(!daemon.task.is_finished(), "rewriting {rewritten} ended the daemon");
    }
    let writes = daemon.store.calls() - before;
    assert!((1..=8).contains(&writes), "{writes} requests to restore the entry in 2 s");
    sleep(Duration::from_secs(4)).await;
    // Until then, others are told of another node.
    until("it is restored", || daemon.store.get(OWN).unwrap().0 == OWN_VALUE).await;
}

#[tokio::test]
async fn an_incomplete_listing_removes_nothing() {
    let timing = Timing { relist_period: Duration::from_millis(100), ..Timing::default() };
    let mut daemon = Daemon::start(timing).await;
    daemon.put("10.5.1.0-24", "192.0.2.2");
    daemon.wait_for(&["192.0.2.2"]).await;
    // The own lease is the last entry.
    daemon.store.cut_listings_short();
    sleep(Duration::from_millis(500)).await;
    assert!(!daemon.task.is_finished(), "a lease beyond the end of a listing counts as revoked");
    daemon.put("10.5.200.0-24", "192.0.2.3");
    daemon.wait_for(&["192.0.2.2", "192.0.2.3"]).await;
    sleep(Duration::from_millis(500)).await;
    assert_eq!(addresses(&daemon.peers.borrow()), ["192.0.2.2", "192.0.2.3"]);
    daemon.store.remove("10.5.1.0-24");
    daemon.wait_for(&["192.0.2.3"]).await;
}

#[tokio::test]
async fn offline_start_ends_with_same_lease() {
    let before = Daemon::usual().await;
    before.put("10.5.1.0-24", "192.0.2.2");
    let mut remembered = before.manager.known();
    let with_peer = remembered.wait_for(|known| known.as_ref().is_some_and(|k| k.peers.len() == 1));
    let known = timeout(SOON, with_peer).await.expect("nothing is remembered").unwrap().clone();
    let known = Known::clone(&known.unwrap());
    let revision = known.own.revision;
    before.task.abort();
    let store = before.store.clone();
    store.set_down(true);
    store.remove("10.5.1.0-24");

    let own = Lease { revision: 0, ..known.own.clone() };
    let known = Known { as_of_unix: 77, own, ..known };
    let manager = Arc::new(SubnetManager::over(Store::Leased(Leased::Memory(store.clone())), None));
    let (sender, peers) = tokio::sync::watch::channel(Arc::default());
    let runner = Arc::clone(&manager);
    let task = tokio::spawn(async move {
        let (_fixed, attributes) = tokio::sync::watch::channel(known.own.attributes.clone());
        runner.run(Held::Cached(known), &sender, attributes).await
    });
    let mut daemon = Daemon { store, manager, peers, task };
    daemon.wait_for(&["192.0.2.2"]).await;
    sleep(NEVER).await;
    assert_eq!(daemon.manager.status().read().cached_as_of_unix, Some(77));
    assert_eq!(daemon.manager.status().read().peers, 1);
    daemon.store.set_down(false);
    daemon.wait_for(&[]).await;
    let is_stale = || daemon.manager.status().read().cached_as_of_unix.is_some();
    until("the store confirms what is stale", || !is_stale()).await;
    let fresh = daemon.manager.known().borrow().clone().expect("nothing is remembered");
    assert!(fresh.as_of_unix > 77 && fresh.peers.is_empty());
    assert_eq!(fresh.own.created_revision, revision, "another entry than before");
    assert_eq!(daemon.store.get(OWN).unwrap().0, OWN_VALUE);
}

/// A daemon on a directory, with one peer.
struct LocalDaemon {
    directory: tempfile::TempDir,
    own_file: std::path::PathBuf,
    peers: Receiver<Arc<Peers>>,
    task: JoinHandle<End>,
}

impl LocalDaemon {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("store");
        let store = Leased::Local(LocalStore::open(root.clone()).await.unwrap());
        let manager = SubnetManager::over(Store::Leased(store), "10.5.100.0/24".parse().ok());
        let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0");
        let own = manager.acquire(&network, &LeaseAttributes::udp(OWN_IP)).await.unwrap();
        let peer = root.join("subnets/10.5.1.0-24");
        std::fs::write(peer, r#"{"PublicIP":"192.0.2.2"}"#).unwrap();
        let (sender, peers) = tokio::sync::watch::channel(Arc::default());
        let task = tokio::spawn(async move { run(&manager, own, &sender).await });
        sleep(NEVER).await;
        until("the peer is followed", || addresses(&peers.borrow()) == ["192.0.2.2"]).await;
        Self { directory, own_file: root.join("subnets").join(OWN), peers, task }
    }
}

#[tokio::test]
async fn moved_directory_is_an_outage() {
    let daemon = LocalDaemon::start().await;
    let elsewhere = daemon.directory.path().join("elsewhere");
    for moved in ["store", "store/subnets"] {
        let moved = daemon.directory.path().join(moved);
        std::fs::rename(&moved, &elsewhere).unwrap();
        if elsewhere.join("subnets").is_dir() {
            // Nobody is told of a move above the watched directory; any look must notice.
            std::fs::write(elsewhere.join("subnets/10.5.2.0-24"), "{}").unwrap();
        }
        sleep(Duration::from_millis(800)).await;
        assert!(!daemon.task.is_finished(), "{moved:?} was moved: the lease counts as revoked");
        assert_eq!(addresses(&daemon.peers.borrow()), ["192.0.2.2"], "a peer was withdrawn");
        assert!(!moved.exists(), "an empty directory hides that {moved:?} is missing");
        std::fs::rename(&elsewhere, &moved).unwrap();
        sleep(Duration::from_millis(1200)).await;
        assert!(!daemon.task.is_finished(), "{moved:?} came back: the lease counts as revoked");
        assert_eq!(addresses(&daemon.peers.borrow()), ["192.0.2.2"], "a peer was withdrawn");
    }
    assert!(daemon.own_file.exists());
}

#[tokio::test]
async fn replaced_directory_gets_own_lease_again() {
    for (replaced, watched) in [("store", "old/subnets"), ("store/subnets", "old")] {
        let daemon = LocalDaemon::start().await;
        let root = daemon.directory.path();
        std::fs::rename(root.join(replaced), root.join("old")).unwrap();
        std::fs::create_dir_all(root.join("store/subnets")).unwrap();
        std::fs::write(root.join(watched).join("10.5.2.0-24"), "{}").unwrap();
        let registered = async {
            while !daemon.own_file.exists() {
                assert!(
                    !daemon.task.is_finished(),
                    "{replaced} was replaced: it counts as revoked"
                );
                sleep(Duration::from_millis(20)).await;
            }
        };
        let registered = timeout(10 * SOON, registered).await;
        registered.unwrap_or_else(|_| panic!("a replaced {replaced} never gets the own lease"));
    }
}

#[tokio::test]
async fn a_missing_configuration_is_told_until_it_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("store");
    let store = Leased::Local(LocalStore::open(root.clone()).await.unwrap());
    let timing = Timing { relist_period: Duration::from_millis(100), ..Timing::default() };
    let manager = SubnetManager::over(Store::Leased(store), None).with_timing(timing);
    let network = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0");
    let text = r#"{"Network":"10.5.0.0/16"}"#;
    let write = || std::fs::write(root.join("config"), text).unwrap();
    write();
    manager.used_config.set(network.clone()).unwrap();
    let own = manager.acquire(&network, &LeaseAttributes::udp(OWN_IP)).await.unwrap();
    let (sender, _peers) = tokio::sync::watch::channel(Arc::default());
    let told = async |is_missing: bool| {
        let refused = || manager.status().read().refused();
        while refused().is_some_and(|why| why.contains("no network configuration")) != is_missing {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let story = async {
        sleep(NEVER).await;
        assert_eq!(manager.status().read().refused(), None);
        std::fs::remove_file(root.join("config")).unwrap();
        timeout(10 * SOON, told(true)).await.expect("a missing configuration goes untold");
        write();
        timeout(10 * SOON, told(false)).await.expect("it is back, and still said to be missing");
        // One that is there and can't be read is no outage of the store.
        std::fs::remove_file(root.join("config")).unwrap();
        std::fs::create_dir(root.join("config")).unwrap();
        let unreadable = async {
            while !manager.status().read().refused().is_some_and(|why| why.contains("config")) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(10 * SOON, unreadable).await.expect("an unreadable configuration goes untold");
        assert!(manager.status().read().store.up, "the store is there");
    };
    tokio::select! {
        end = run(&manager, own, &sender) => panic!("{end:?}"),
        () = story => {}
    }
}

#[tokio::test]
async fn a_configuration_that_was_set_back_is_no_longer_told_as_another() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("store");
    let store = Leased::Local(LocalStore::open(root.clone()).await.unwrap());
    let manager = SubnetManager::over(Store::Leased(store), None);
    manager.used_config.set(config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0")).unwrap();
    let write = |text: &str| std::fs::write(root.join("config"), text).unwrap();
    write(r#"{"Network":"10.6.0.0/16"}"#);
    // As after a listing, and nothing says again that it may be another one.
    let may_be_changed = Notify::new();
    may_be_changed.notify_one();
    let told = async |is_other: bool| {
        while manager.status().read().restart_needed != is_other {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let story = async {
        timeout(10 * SOON, told(true)).await.expect("another configuration goes untold");
        write(r#"{"Network":"10.5.0.0/16"}"#);
        timeout(10 * SOON, told(false)).await.expect("it was set back, and is told as another");
    };
    tokio::select! {
        never = manager.check_config(true, &may_be_changed) => match never {},
        () = story => {}
    }
}

/// Collects what is logged on this thread while it lives.
struct Log {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: tracing::subscriber::DefaultGuard,
    /// While there is one subscriber only, tracing lets the thread that first reaches a call decide
    /// whether anybody wants it, and threads of other tests have none.
    _second: tracing::Dispatch,
}

impl Log {
    fn start() -> Self {
        let text = Arc::new(Mutex::new(Vec::new()));
        let writer = Arc::clone(&text);
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(Level::INFO)
            .with_writer(move || Shared(Arc::clone(&writer)))
            .finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        Self { text, _guard, _second: tracing::Dispatch::new(tracing_subscriber::registry()) }
    }

    fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.text.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

struct Shared(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Shared {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(text)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn outage_messages_are_rare_and_flannel_worded() {
    let log = Log::start();
    let daemon = Daemon::start(lives(4000, 3800)).await;
    sleep(Duration::from_millis(700)).await;
    let started = log.lines().join("\n");
    for phrase in [
        "Found previously leased subnet (10.5.100.0/24), reusing",
        "Allocated lease (10.5.100.0/24) to current node (192.0.2.1)",
        "Watching for new subnet leases",
        "Waiting for ",
        "Lease renewed, new expiration: 20",
    ] {
        assert!(started.contains(phrase), "{phrase:?} is not in the log:\n{started}");
    }
    let before = log.lines().len();
    for _ in 0..15 {
        daemon.store.set_down(true);
        sleep(Duration::from_millis(100)).await;
        daemon.store.set_down(false);
        sleep(Duration::from_millis(100)).await;
    }
    let lines = log.lines().split_off(before);
    assert!(lines.len() <= 30, "{} lines in 3 s:\n{}", lines.len(), lines.join("\n"));
    let failure = lines.iter().find(|line| line.contains("Subnet watch failed"));
    let failure = failure.expect("the log does not tell of the outage");
    assert!(failure.contains("keeping all"), "what weft does about it is not said: {failure}");

    daemon.store.set_down(false);
    daemon.put(OWN, "192.0.2.9");
    timeout(Duration::from_secs(8), daemon.task).await.expect("still running").unwrap();
    let end = log.lines().join("\n");
    assert!(end.contains("Lease has been revoked. Shutting down daemon."), "{end}");
    assert!(end.contains("192.0.2.9"), "the new owner is not named:\n{end}");
}
