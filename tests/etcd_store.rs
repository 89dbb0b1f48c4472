//! The etcd store against a real etcd: flannel's schema to the byte, storms of daemons, and every
//! way in which etcd can misbehave that fits into a test. What needs hours is compressed by short
//! leases.

mod support;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use weft::config::network::{BackendConfig, NetworkConfig};
use weft::config::options::{ClientCertificate, Credentials, EtcdOptions, Secret, StoreOptions};
use weft::control::store::StoreError;
use weft::control::{
    AcquireError, End, LeaseAttributes, Lifetime, OwnLease, Peers, RejectReason, SubnetManager,
    Timing,
};
use weft::route::Prefix;

use support::etcd::{Etcd, Security, closed_port};
use support::proxy::{Mode, Proxy};

const PREFIX: &str = "/coreos.com/network";
const MARGIN: Duration = Duration::from_secs(3600);

fn options(endpoints: &[&str]) -> EtcdOptions {
    EtcdOptions {
        endpoints: endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect(),
        prefix: PREFIX.to_owned(),
        ca_file: None,
        client_certificate: None,
        credentials: None,
    }
}

fn manager(options: EtcdOptions) -> SubnetManager {
    SubnetManager::connect(&StoreOptions::Etcd(options), None).unwrap()
}

fn manager_at(url: &str) -> SubnetManager {
    manager(options(&[url]))
}

fn network() -> NetworkConfig {
    NetworkConfig {
        network: "10.5.0.0/16".parse().unwrap(),
        subnet_length_bits: 24,
        subnet_min: Ipv4Addr::new(10, 5, 1, 0),
        subnet_max: Ipv4Addr::new(10, 5, 255, 0),
        enable_nftables: false,
        backend: BackendConfig { kind: "udp".to_owned(), settings: serde_json::Value::Null },
    }
}

fn node(number: u8) -> LeaseAttributes {
    LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, number))
}

fn path(subnet: Prefix) -> String {
    format!("{PREFIX}/subnets/{}", subnet.key())
}

fn subnet_path(key: &str) -> String {
    format!("{PREFIX}/subnets/{key}")
}

/// Leases short enough to lapse within a test.
fn short_leases() -> Timing {
    Timing { lease_ttl: Duration::from_secs(4), ..Timing::default() }
}

/// A daemon's control plane that runs on.
struct Running {
    peers: watch::Receiver<Arc<Peers>>,
    task: JoinHandle<End>,
    manager: Arc<SubnetManager>,
}

impl Running {
    fn start(manager: SubnetManager, own: OwnLease, margin: Duration) -> Self {
        let manager = Arc::new(manager);
        let (sender, peers) = watch::channel(Arc::default());
        let runner = Arc::clone(&manager);
        let task = tokio::spawn(async move { runner.run(own, margin, &sender).await });
        Self { peers, task, manager }
    }

    /// Waits until the peers' public addresses are exactly these, and says how long it took.
    async fn wait_for_peers(
        &mut self,
        expected: &[&str],
        within: Duration,
        broken: &str,
    ) -> Duration {
        let expected: BTreeSet<String> = expected.iter().map(|&ip| ip.to_owned()).collect();
        let started = Instant::now();
        let found = timeout(within, self.peers.wait_for(|peers| addresses(peers) == expected));
        if found.await.is_err() {
            let now = addresses(&self.peers.borrow());
            panic!("{broken}: peers are {now:?} instead of {expected:?} after {within:?}");
        }
        started.elapsed()
    }

    async fn end(self, within: Duration, broken: &str) -> End {
        match timeout(within, self.task).await {
            Ok(end) => end.unwrap(),
            Err(_) => panic!("{broken}: still running after {within:?}"),
        }
    }

    fn assert_running(&self, broken: &str) {
        assert!(!self.task.is_finished(), "{broken}: the control plane ended");
    }
}

fn addresses(peers: &Peers) -> BTreeSet<String> {
    peers.values().map(|lease| lease.attributes.public_ip.to_string()).collect()
}

const SOON: Duration = Duration::from_secs(3);

#[tokio::test]
async fn keys_and_values_are_flannels_to_the_byte() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let missing = manager.network_config().await.unwrap_err().to_string();
    assert!(missing.contains("/coreos.com/network/config"), "unhelpful message: {missing}");
    etcd.ctl(&["put", &format!("{PREFIX}/config"), r#"{"Network":"10.5.0.0/16"}"#]);
    assert_eq!(manager.network_config().await.unwrap(), br#"{"Network":"10.5.0.0/16"}"#);

    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let keys = etcd.keys(&format!("{PREFIX}/subnets"));
    assert_eq!(keys, [path(own.lease.subnet)], "flannel nodes cannot find the lease");
    assert_eq!(
        etcd.get(&keys[0]).unwrap(),
        r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#,
        "flannel nodes would read another value"
    );
    let id = format!("{:x}", etcd.lease_of(&keys[0]));
    let ttl = etcd.ctl(&["lease", "timetolive", &id]);
    assert!(ttl.contains("granted with TTL(86400s)"), "the lease is not flannel's 24 h: {ttl}");
    let left = own.expires_unix().unwrap() - weft::control::clock::unix_seconds();
    assert!((86_390..=86_400).contains(&left), "we believe in {left} s");
}

async fn storm(nodes: u8) -> Duration {
    let etcd = Etcd::start();
    let url = etcd.url();
    let managers: Vec<_> = (0..nodes).map(|_| manager_at(&url)).collect();
    let network = network();
    let started = Instant::now();
    let acquired = join_all(managers.iter().enumerate().map(|(number, manager)| {
        let attributes = node(u8::try_from(number).unwrap());
        let network = &network;
        async move { manager.acquire(network, &attributes).await }
    }))
    .await;
    let took = started.elapsed();
    let subnets: BTreeSet<_> = acquired
        .into_iter()
        .map(|own| own.expect("a daemon would have exited or waited").lease.subnet)
        .collect();
    assert_eq!(subnets.len(), usize::from(nodes), "two nodes share a subnet");
    let stored = etcd.keys(&format!("{PREFIX}/subnets")).len();
    assert_eq!(stored, usize::from(nodes), "leases were left behind");
    let etcd_leases = etcd.ctl(&["lease", "list"]);
    let conflicts: u64 = managers.iter().map(|manager| manager.status().conflicts()).sum();
    println!("{nodes} daemons at once: {took:?}, {conflicts} races lost and run again");
    assert!(
        etcd_leases.contains(&format!("found {nodes} leases")),
        "lost races left etcd leases behind: {}",
        etcd_leases.lines().next().unwrap_or_default()
    );
    took
}

#[tokio::test]
async fn twelve_daemons_at_once_get_twelve_subnets() {
    storm(12).await;
}

#[tokio::test]
async fn a_hundred_daemons_at_once_get_a_hundred_subnets() {
    let took = storm(100).await;
    assert!(took < Duration::from_secs(30), "a cluster that starts together waits {took:?}");
}

#[tokio::test]
async fn a_restart_keeps_the_subnet() {
    let etcd = Etcd::start();
    let first = manager_at(&etcd.url()).acquire(&network(), &node(1)).await.unwrap();
    for _ in 0..3 {
        let again = manager_at(&etcd.url()).acquire(&network(), &node(1)).await.unwrap();
        assert_eq!(again.lease.subnet, first.lease.subnet, "pods would lose their addresses");
    }
    assert_eq!(etcd.keys(&format!("{PREFIX}/subnets")).len(), 1);

    // The store forgot us, the subnet file did not.
    etcd.ctl(&["del", &path(first.lease.subnet)]);
    let with_previous = |previous: &str| {
        let store = StoreOptions::Etcd(options(&[&etcd.url()]));
        SubnetManager::connect(&store, previous.parse().ok()).unwrap()
    };
    let again = with_previous("10.5.200.0/24").acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(again.lease.subnet.to_string(), "10.5.200.0/24", "subnet.env was not heeded");
    // Another node's lease is never taken, whatever our file says.
    let other = with_previous("10.5.200.0/24").acquire(&network(), &node(2)).await.unwrap();
    assert_ne!(other.lease.subnet.to_string(), "10.5.200.0/24", "a subnet was stolen");
    // A subnet of an older configuration gives way.
    etcd.ctl(&["put", &subnet_path("10.9.1.0-24"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let moved = manager_at(&etcd.url()).acquire(&network(), &node(3)).await.unwrap();
    assert!(network().network.covers(moved.lease.subnet));
    assert_eq!(etcd.get(&subnet_path("10.9.1.0-24")), None, "the old lease still attracts traffic");
}

#[tokio::test]
async fn a_reservation_never_gets_an_end() {
    let etcd = Etcd::start();
    let key = subnet_path("10.5.77.0-24");
    etcd.ctl(&["put", &key, r#"{"PublicIP":"192.0.2.1"}"#]);
    let manager = manager_at(&etcd.url()).with_timing(short_leases());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    assert_eq!(own.lease.subnet.key(), "10.5.77.0-24", "the reserved subnet was not used");
    assert_eq!((own.lease.lifetime, own.expires), (Lifetime::Reservation, None));
    assert_eq!(etcd.lease_of(&key), 0, "the reservation would end in 24 h");

    let running = Running::start(manager, own, Duration::from_secs(2));
    sleep(Duration::from_secs(6)).await;
    running.assert_running("a reservation was taken for lapsed");
    assert_eq!(etcd.lease_of(&key), 0, "renewal put an end to the reservation");
    assert_eq!(running.manager.status().renewals(), 0, "a reservation was renewed");
}

#[tokio::test]
async fn a_lease_is_renewed_without_news_for_the_others() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url()).with_timing(short_leases());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnet);
    let (id, revision) = (etcd.lease_of(&key), etcd.revision());
    let running = Running::start(manager, own, Duration::from_secs(2));
    sleep(Duration::from_secs(9)).await;
    running.assert_running("the lease was not kept");
    assert!(running.manager.status().renewals() >= 2, "no renewal in two lives of the lease");
    assert_eq!(etcd.lease_of(&key), id, "the renewal took another etcd lease");
    assert_eq!(etcd.revision(), revision, "each renewal wakes every node of the cluster");
}

#[tokio::test]
async fn another_writer_wins_and_is_named() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url()).with_timing(short_leases());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnet);
    let running = Running::start(manager, own.clone(), Duration::from_secs(2));
    sleep(Duration::from_millis(500)).await;
    let theirs = r#"{"PublicIP":"192.0.2.99","PublicIPv6":null}"#;
    etcd.ctl(&["put", &key, theirs]);
    let end = running.end(SOON, "two nodes keep one subnet").await;
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 99));
    assert_eq!(end, End::Revoked { new_owner });

    // A daemon that slept through it finds out before it writes.
    let sleeper = manager_at(&etcd.url()).with_timing(short_leases());
    let running = Running::start(sleeper, own, Duration::from_secs(3600));
    assert_eq!(running.end(SOON, "a lost subnet is kept").await, End::Revoked { new_owner });
    assert_eq!(etcd.get(&key).unwrap(), theirs, "the new owner's lease was overwritten");
}

#[tokio::test]
async fn an_operator_can_revoke() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnet);
    let mut running = Running::start(manager, own, MARGIN);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    etcd.ctl(&["del", &key]);
    let end = running.end(SOON, "a revoked node keeps its subnet").await;
    assert_eq!(end, End::Revoked { new_owner: None });
    assert_eq!(etcd.get(&key), None, "the revoked lease came back");
}

#[tokio::test]
async fn peers_come_move_and_go() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own, MARGIN);
    let put = |key: &str, value: &str| etcd.ctl(&["put", &subnet_path(key), value]);
    put("10.5.0.0-28", r#"{"PublicIP":"192.0.2.2"}"#);
    running.wait_for_peers(&["192.0.2.2"], SOON, "a new node is unreachable").await;
    put("10.5.0.0-28", r#"{"PublicIP":"192.0.2.3"}"#);
    running.wait_for_peers(&["192.0.2.3"], SOON, "traffic goes to where a node was").await;
    put("10.5.0.16-28&fd00:5::-64", r#"{"PublicIP":"192.0.2.4","PublicIPv6":"fd00::4"}"#);
    let both = &["192.0.2.3", "192.0.2.4"];
    running.wait_for_peers(both, SOON, "a dual-stack flannel node is unreachable").await;
    etcd.ctl(&["del", &subnet_path("10.5.0.0-28")]);
    running.wait_for_peers(&["192.0.2.4"], SOON, "a route to a gone node stays").await;
}

#[tokio::test]
async fn a_compacted_history_is_listed_again() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let manager = manager_at(&proxy.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own, MARGIN);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    let listed = running.manager.status().relists();

    proxy.set(Mode::Cut);
    etcd.ctl(&["del", &subnet_path("10.5.0.0-28")]);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    etcd.ctl(&["put", "other", "x"]);
    etcd.ctl(&["compact", &etcd.revision().to_string()]);
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "peers were withdrawn in an outage");
    proxy.set(Mode::Open);
    let took = running.wait_for_peers(&["192.0.2.3"], Duration::from_secs(6), "history lost").await;
    println!("listed again after compaction within {took:?}");
    assert_eq!(running.manager.status().relists(), listed + 1, "compaction causes a loop");
}

#[tokio::test]
async fn a_short_cut_resumes_without_listing() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let manager = manager_at(&proxy.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own, MARGIN);
    sleep(Duration::from_millis(500)).await;
    let listed = running.manager.status().relists();
    proxy.set(Mode::Cut);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    proxy.set(Mode::Open);
    running.wait_for_peers(&["192.0.2.2"], Duration::from_secs(6), "an event was lost").await;
    assert_eq!(running.manager.status().relists(), listed, "each hiccup lists the whole cluster");
    assert!(running.manager.status().store_is_up());
}

#[tokio::test]
async fn a_killed_etcd_takes_nothing_with_it() {
    let mut etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnet);
    let mut running = Running::start(manager, own, MARGIN);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    etcd.kill();
    sleep(Duration::from_secs(3)).await;
    running.assert_running("an outage of etcd ended the daemon");
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "an outage withdrew a peer");
    assert!(!running.manager.status().store_is_up(), "the outage is not reported");
    let failures = running.manager.status().store_failures();
    assert!(failures < 40, "{failures} requests in 3 s without etcd");
    etcd.spawn();
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    running.wait_for_peers(both, Duration::from_secs(6), "not connected again").await;
    assert!(etcd.get(&key).is_some(), "the own lease is gone");

    // And now it forgets everything.
    etcd.wipe();
    etcd.spawn();
    let deadline = Instant::now() + Duration::from_secs(8);
    while etcd.get(&key).is_none() {
        assert!(Instant::now() < deadline, "a wiped etcd never learns of running nodes again");
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("a wiped etcd ended the daemon");
}

#[tokio::test]
async fn a_frozen_etcd_is_noticed_and_survived() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own, MARGIN);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    etcd.freeze(true);
    let frozen = Instant::now();
    while running.manager.status().store_is_up() {
        assert!(frozen.elapsed() < Duration::from_secs(20), "a dead etcd is never noticed");
        sleep(Duration::from_millis(100)).await;
    }
    println!("frozen etcd noticed after {:?}", frozen.elapsed());
    assert_eq!(addresses(&running.peers.borrow()).len(), 1, "an outage withdrew a peer");
    etcd.freeze(false);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    running.wait_for_peers(both, Duration::from_secs(11), "not connected again").await;
}

#[tokio::test]
async fn a_half_open_path_fails_over_to_another_endpoint() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address());
    let spare = Proxy::to(etcd.address());
    spare.set(Mode::Cut);
    let manager = manager(options(&[&proxy.url(), &spare.url()]));
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let mut running = Running::start(manager, own, MARGIN);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work").await;
    spare.set(Mode::Open);
    proxy.set(Mode::Silent);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    let bound = Duration::from_secs(20);
    let took = running.wait_for_peers(both, bound, "a silent path hangs the watch").await;
    println!("half-open path replaced after {took:?}");
}

#[tokio::test]
async fn the_dead_default_endpoint_costs_nothing() {
    let etcd = Etcd::start();
    etcd.ctl(&["put", &format!("{PREFIX}/config"), "{}"]);
    let dead = format!("http://127.0.0.1:{}", closed_port());
    // Accepts connections into its backlog and never says a word.
    let black_hole = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", black_hole.local_addr().unwrap());
    for endpoints in [vec![dead.as_str()], vec![dead.as_str(), silent.as_str()]] {
        let mut endpoints = endpoints;
        let url = etcd.url();
        endpoints.push(&url);
        let manager = manager(options(&endpoints));
        let started = Instant::now();
        manager.network_config().await.expect("the dead endpoint breaks the first call");
        let first = started.elapsed();
        assert!(first < Duration::from_secs(1), "the first call waits {first:?}");
        let started = Instant::now();
        for _ in 0..300 {
            manager.network_config().await.expect("the dead endpoint breaks a later call");
        }
        let each = started.elapsed() / 300;
        println!(
            "beside {} dead endpoints: first call {first:?}, then {each:?}",
            endpoints.len() - 1
        );
        assert_eq!(manager.status().store_failures(), 0);
    }
    let nobody = manager(options(&[&dead]));
    let error = nobody.network_config().await.unwrap_err().to_string();
    assert!(error.contains(&dead), "the message does not name the endpoint: {error}");
}

#[tokio::test]
async fn junk_beside_good_leases_harms_nobody() {
    let etcd = Etcd::start();
    let put = |key: &str, value: &str| etcd.ctl(&["put", &subnet_path(key), value]);
    let good = r#"{"PublicIP":"192.0.2.2"}"#;
    put("10.5.0.0-28", good);
    put("hello", good);
    put("10.12.13.0-24hi", good);
    put("10.5.0.300-24", good);
    put("10.5.0.16-28", "not json");
    put("10.5.0.32-28", r#"{"PublicIP":"nowhere"}"#);
    put("10.5.0.48-28", "{}");
    put("10.6.0.0-24", good);
    let mut huge = br#"{"PublicIP":"192.0.2.3","BackendData":""#.to_vec();
    huge.resize(1024 * 1024, b'x');
    huge.extend_from_slice(b"\"}");
    for number in 0..6 {
        etcd.put_from_stdin(&subnet_path(&format!("10.5.0.{}-28", 64 + 16 * number)), &huge);
    }
    put("10.5.0.240-28", r#"{"PublicIP":"192.0.2.4"}"#);

    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.expect("junk keeps nodes from starting");
    let mut running = Running::start(manager, own, MARGIN);
    let good_peers = &["192.0.2.2", "192.0.2.4"];
    running.wait_for_peers(good_peers, SOON, "junk in the store hides good nodes").await;
    let status = running.manager.status();
    for (reason, count) in [
        (RejectReason::BadKey, 3),
        (RejectReason::BadValue, 2),
        (RejectReason::TooLarge, 6),
        (RejectReason::BadAddress, 1),
        (RejectReason::OutsideNetwork, 1),
    ] {
        assert_eq!(status.rejected(reason), count, "{} is not counted", reason.name());
    }

    // The same as events.
    put("10.5.0.0-28", "junk now");
    put("world", good);
    etcd.put_from_stdin(&subnet_path("10.5.0.176-28"), &huge);
    put("10.5.0.192-28", r#"{"PublicIP":"192.0.2.5"}"#);
    let good_peers = &["192.0.2.4", "192.0.2.5"];
    running.wait_for_peers(good_peers, SOON, "junk in the watch hides good nodes").await;
    running.assert_running("junk ended the daemon");
    assert_eq!(status.rejected(RejectReason::TooLarge), 7);
}

#[tokio::test]
async fn an_own_entry_turned_to_junk_is_written_again() {
    let etcd = Etcd::start();
    let manager = manager_at(&etcd.url());
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let key = path(own.lease.subnet);
    let running = Running::start(manager, own, MARGIN);
    sleep(Duration::from_millis(300)).await;
    etcd.ctl(&["put", &key, "oops"]);
    let deadline = Instant::now() + SOON;
    while etcd.get(&key).as_deref() != Some(r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#) {
        assert!(Instant::now() < deadline, "a slip of the operator's pen cuts the node off");
        sleep(Duration::from_millis(50)).await;
    }
    assert_ne!(etcd.lease_of(&key), 0, "the repaired lease would never end");
    running.assert_running("a slip of the operator's pen ended the daemon");
}

#[tokio::test]
async fn a_lease_that_lapsed_in_an_outage_is_taken_again_or_given_up() {
    let etcd = Etcd::start();
    let lapse = async |number: u8, meanwhile: &dyn Fn(&str)| {
        let proxy = Proxy::to(etcd.address());
        let manager = manager_at(&proxy.url()).with_timing(short_leases());
        let own = manager.acquire(&network(), &node(number)).await.unwrap();
        let key = path(own.lease.subnet);
        let running = Running::start(manager, own, Duration::from_secs(2));
        proxy.set(Mode::Cut);
        let deadline = Instant::now() + Duration::from_secs(12);
        while etcd.get(&key).is_some() {
            assert!(Instant::now() < deadline, "etcd does not end the lease");
            sleep(Duration::from_millis(100)).await;
        }
        running.assert_running("the end of the lease in an outage ended the daemon");
        meanwhile(&key);
        proxy.set(Mode::Open);
        (running, key, proxy)
    };
    let bound = Duration::from_secs(8);

    let (running, key, _proxy) = lapse(1, &|_| ()).await;
    let deadline = Instant::now() + bound;
    while etcd.get(&key).is_none() {
        assert!(Instant::now() < deadline, "the node never gets its free subnet back");
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("the free subnet was not taken again");
    assert!(etcd.lease_of(&key) != 0);

    let theirs = r#"{"PublicIP":"192.0.2.99"}"#;
    let (running, key, _proxy) = lapse(2, &|key| drop(etcd.ctl(&["put", key, theirs]))).await;
    let end = running.end(bound, "two nodes keep one subnet").await;
    assert_eq!(end, End::Revoked { new_owner: Some(Ipv4Addr::new(192, 0, 2, 99)) });
    assert_eq!(etcd.get(&key).unwrap(), theirs, "the new owner's lease was overwritten");
}

#[tokio::test]
async fn a_full_network_waits_for_a_free_subnet() {
    let etcd = Etcd::start();
    let mut network = network();
    network.subnet_max = Ipv4Addr::new(10, 5, 2, 0);
    etcd.ctl(&["put", &subnet_path("10.5.1.0-24"), r#"{"PublicIP":"192.0.2.8"}"#]);
    etcd.ctl(&["put", &subnet_path("10.5.2.0-25"), r#"{"PublicIP":"192.0.2.9"}"#]);
    let manager = manager_at(&etcd.url());
    let error = manager.acquire(&network, &node(1)).await.unwrap_err();
    assert!(matches!(error, AcquireError::Exhausted { .. }), "{error}");
    let acquiring =
        tokio::spawn(async move { manager.acquire_until_leased(&network, &node(1)).await });
    sleep(Duration::from_millis(500)).await;
    assert!(!acquiring.is_finished());
    etcd.ctl(&["del", &subnet_path("10.5.2.0-25")]);
    let own = timeout(Duration::from_secs(6), acquiring).await;
    let own = own.expect("a freed subnet is not taken").unwrap();
    assert_eq!(own.lease.subnet.to_string(), "10.5.2.0/24");
}

#[tokio::test]
async fn user_and_password_with_a_role_on_the_prefix_are_enough() {
    let mut etcd = Etcd::start();
    etcd.ctl(&["user", "add", "root:secret"]);
    etcd.ctl(&["user", "grant-role", "root", "root"]);
    etcd.ctl(&["role", "add", "flannel"]);
    etcd.ctl(&["role", "grant-permission", "flannel", "--prefix=true", "readwrite", PREFIX]);
    etcd.ctl(&["user", "add", "flannel:hush"]);
    etcd.ctl(&["user", "grant-role", "flannel", "flannel"]);
    etcd.ctl(&["auth", "enable"]);
    etcd.user = Some("root:secret".to_owned());

    let with = |user: &str, password: &str| {
        let password = Secret(password.to_owned());
        let credentials = Some(Credentials { username: user.to_owned(), password });
        EtcdOptions { credentials, ..options(&[&etcd.url()]) }
    };
    let manager_of = |options| manager(options).with_timing(short_leases());
    let manager = manager_of(with("flannel", "hush"));
    let own = manager.acquire(&network(), &node(1)).await.expect("the right password is refused");
    let mut running = Running::start(manager, own, Duration::from_secs(2));
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work with a user").await;
    // Enabling authentication again invalidates every token, as its expiry does.
    etcd.ctl(&["auth", "disable"]);
    etcd.ctl(&["auth", "enable"]);
    etcd.ctl(&["put", &subnet_path("10.5.0.16-28"), r#"{"PublicIP":"192.0.2.3"}"#]);
    let both = &["192.0.2.2", "192.0.2.3"];
    running.wait_for_peers(both, Duration::from_secs(6), "an old token ends the watch").await;
    sleep(Duration::from_secs(5)).await;
    running.assert_running("renewal fails with an old token");
    assert!(running.manager.status().renewals() >= 1);

    for wrong in [with("flannel", "guess"), options(&[&etcd.url()])] {
        let error = manager_of(wrong).acquire(&network(), &node(4)).await.unwrap_err();
        let AcquireError::Store(error @ StoreError::Refused { .. }) = error else {
            panic!("a wrong password looks like an outage: {error}");
        };
        assert!(!error.to_string().contains("guess"), "the password is in the message: {error}");
    }
}

#[tokio::test]
async fn tls_works_with_the_authority_alone() {
    let etcd = Etcd::start_with(Security::ServerCertificate);
    let with_ca =
        |ca: &str| EtcdOptions { ca_file: Some(etcd.path(ca)), ..options(&[&etcd.url()]) };
    let own = manager(with_ca("ca.crt")).acquire(&network(), &node(1)).await;
    own.expect("--etcd-cafile alone does not give TLS");
    // A certificate that another authority signed is refused, and the message says so.
    let error = manager(with_ca("client.crt")).network_config().await.unwrap_err().to_string();
    assert!(error.to_lowercase().contains("certificate"), "unhelpful message: {error}");
    let none = StoreOptions::Etcd(options(&[&etcd.url()]));
    let error = SubnetManager::connect(&none, None).unwrap_err().to_string();
    assert!(error.contains("--etcd-cafile"), "unhelpful message: {error}");
    let missing = StoreOptions::Etcd(with_ca("missing.crt"));
    let error = SubnetManager::connect(&missing, None).unwrap_err().to_string();
    assert!(error.contains("missing.crt"), "unhelpful message: {error}");
}

#[tokio::test]
async fn tls_works_with_client_certificates() {
    let etcd = Etcd::start_with(Security::ClientCertificates);
    let certificate = ClientCertificate {
        certificate_file: etcd.path("client.crt"),
        key_file: etcd.path("client.key"),
    };
    let with = EtcdOptions {
        ca_file: Some(etcd.path("ca.crt")),
        client_certificate: Some(certificate),
        ..options(&[&etcd.url()])
    };
    let without = EtcdOptions { client_certificate: None, ..with.clone() };
    let manager = manager(with);
    let own = manager.acquire(&network(), &node(1)).await.expect("the certificate is refused");
    let mut running = Running::start(manager, own, MARGIN);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work over TLS").await;
    let refused = self::manager(without).network_config().await;
    assert!(refused.is_err(), "a node without certificate was let in");
}
