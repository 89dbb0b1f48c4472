//! Two nodes with one PublicIP: one gets the subnet, the other is told whose it is.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use weft::config::options::{Credentials, EtcdOptions, Secret};
use weft::control::identity::NodeIdentity;
use weft::control::lease::LeaseAttributes;
use weft::control::manager::SubnetManager;
use weft::control::run::{End, Held};
use weft::control::snapshot::OwnLease;
use weft::control::timing::Timing;

use crate::store::{PREFIX, Running, manager, manager_at, network, node, options};
use crate::support::etcd::Etcd;
use crate::support::pace::{Stopwatch, within};
use crate::support::proxy::{Mode, Proxy};

/// As long as a lost claim may stay unnoticed, on a busy machine.
const NOTICED: Duration = Duration::from_secs(20);
/// After which a claim that nobody keeps has lapsed, on a busy machine.
const LAPSES: Duration = Duration::from_secs(30);

/// Peers know a new address within this time.
const CONVERGE: Duration = Duration::from_secs(2);

/// Short enough to be renewed within a test.
const LEASE: Duration = Duration::from_secs(4);

/// Claims short enough to lapse within a test, and long enough to be kept on a busy machine.
fn short_claims() -> Timing {
    Timing { claim_ttl: Duration::from_secs(6), ..Timing::default() }
}

fn identity(hostname: &str) -> NodeIdentity {
    NodeIdentity {
        hostname: hostname.to_owned(),
        machine_id: Some(format!("machine of {hostname}")),
        boot_id: format!("boot of {hostname}"),
    }
}

fn named(url: &str, hostname: &str) -> SubnetManager {
    manager_at(url).with_timing(short_claims()).with_identity(identity(hostname))
}

fn claim_path(public_ip: &str) -> String {
    format!("{PREFIX}/weft/nodes/{public_ip}")
}

#[tokio::test]
async fn simultaneous_starts_with_one_public_ip_one_wins() {
    const TRIES: u32 = 100;
    let etcd = Etcd::start();
    let (mut shared, mut won_by_a) = (0, 0);
    for number in 1..=TRIES {
        let attributes = LeaseAttributes::udp(Ipv4Addr::from_bits(0xC633_6400 + number));
        let (a, b) = (named(&etcd.url(), "node-a"), named(&etcd.url(), "node-b"));
        let network = network();
        // As the daemons do, which have read the configuration by then.
        let _connected = tokio::join!(a.network_config(), b.network_config());
        let (of_a, of_b) =
            tokio::join!(a.acquire(&network, &attributes), b.acquire(&network, &attributes));
        won_by_a += u32::from(of_a.is_ok());
        let (refusal, other) = match (of_a, of_b) {
            (Ok(_), Err(refusal)) => (refusal, "node-a"),
            (Err(refusal), Ok(_)) => (refusal, "node-b"),
            (Ok(_), Ok(_)) => {
                shared += 1;
                continue;
            }
            (Err(a), Err(b)) => panic!("nobody got a subnet: {a:?}; {b:?}"),
        };
        let refusal = format!("{:#}", std::error::Error::source(&refusal).unwrap_or(&refusal));
        assert!(refusal.contains(other), "the refusal does not name {other}: {refusal}");
        assert!(
            refusal.contains(&attributes.node_address().to_string()),
            "not its cause: {refusal}"
        );
    }
    println!("{TRIES} tries, {shared} shared; node-a won {won_by_a}");
    assert_eq!(shared, 0, "two nodes shared a subnet");
    let subnets = etcd.keys(&format!("{PREFIX}/subnets")).len();
    assert_eq!(subnets, TRIES as usize, "a refused node left a lease behind");
}

#[tokio::test]
async fn restart_is_immediate_other_node_waits_for_claim() {
    // Nobody keeps the claim, and a busy machine needs its time until the other node is refused.
    let timing = Timing { claim_ttl: Duration::from_secs(15), ..Timing::default() };
    let etcd = Etcd::start();
    let start = |who| manager_at(&etcd.url()).with_timing(timing).with_identity(who);
    let acquire = async |manager: SubnetManager| {
        manager.acquire(&network(), &node(1)).await.map(|own| own.lease.subnets)
    };
    let first = acquire(start(identity("node-a"))).await.expect("the first of all is refused");
    let claim = etcd.get(&claim_path("192.0.2.1")).expect("no claim");
    assert!(claim.contains(r#""Hostname":"node-a""#), "an operator cannot read {claim}");
    let below = etcd.keys(&format!("{PREFIX}/subnets"));
    assert_eq!(below.len(), 1, "flannel's nodes would stumble over {below:?}");
    let rebooted = NodeIdentity { boot_id: "next boot".to_owned(), ..identity("node-a") };
    let renamed = NodeIdentity { hostname: "new name".to_owned(), ..rebooted.clone() };
    for who in [identity("node-a"), rebooted, renamed] {
        let started = Stopwatch::start();
        let again = acquire(start(who.clone())).await.expect("a machine is refused by itself");
        assert_eq!(again, first);
        println!("{who:?} has its subnet after {:?}", started.elapsed());
    }
    let revision = etcd.revision();
    let refused = acquire(start(identity("node-b"))).await.expect_err("two nodes share a subnet");
    println!("refused: {refused:?}");
    assert_eq!(etcd.revision(), revision, "a refused node writes");
    let waiting = async {
        loop {
            match acquire(start(identity("node-b"))).await {
                Ok(subnet) => return subnet,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    };
    let taken = within(LAPSES, waiting).await;
    let taken = taken.expect("the address of a node that is gone is never free");
    assert_eq!(taken, first, "the address kept its subnet");
}

/// Waits until the manager's status shows this about another node with the address.
async fn wait_for_duplicate(manager: &SubnetManager, holder: Option<&str>) {
    let status = manager.status();
    let shown = async {
        while match (status.read().store.duplicate_public_ip, holder) {
            (Some(shown), Some(holder)) => !shown.contains(holder),
            (shown, holder) => shown.is_some() != holder.is_some(),
        } {
            sleep(Duration::from_millis(20)).await;
        }
    };
    within(NOTICED, shown).await.unwrap_or_else(|| {
        panic!("the status shows {:?}, not {holder:?}", status.read().store.duplicate_public_ip)
    });
}

/// Waits for the first listing of a run.
async fn wait_until_listed(manager: &SubnetManager) {
    let listed = async {
        while manager.status().read().relists == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    within(NOTICED, listed).await.expect("it never lists");
}

#[tokio::test]
async fn node_with_stolen_claim_alarms_and_runs_on() {
    let etcd = Etcd::start();
    let manager = named(&etcd.url(), "node-a");
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let running = Running::start(manager, own);
    let path = claim_path("192.0.2.1");
    let revoke = || {
        let id = format!("{:x}", etcd.lease_of(&path));
        etcd.ctl(&["lease", "revoke", &id]);
    };
    wait_until_listed(&running.manager).await;
    let listed = running.manager.status().read().relists;
    revoke();
    let started = Stopwatch::start();
    while etcd.get(&path).is_none() {
        assert!(started.elapsed() < NOTICED, "a lapsed claim does not come back");
        sleep(Duration::from_millis(100)).await;
    }
    println!("claimed again after {:?}", started.elapsed());
    let relists = || running.manager.status().read().relists;
    while relists() == listed {
        assert!(started.elapsed() < NOTICED, "etcd lost what it had, and is not listed");
        sleep(Duration::from_millis(100)).await;
    }
    wait_for_duplicate(&running.manager, None).await;
    for lapses_first in [true, false] {
        if lapses_first {
            revoke();
        }
        let other = serde_json::to_string(&identity("node-b")).unwrap();
        let granted = etcd.ctl(&["lease", "grant", "600"]);
        let id = granted.split(' ').nth(1).expect("the id of an etcd lease");
        etcd.ctl(&["put", "--lease", id, &path, &other]);
        wait_for_duplicate(&running.manager, Some("node-b")).await;
        running.assert_running("another node has its claim");
        assert!(etcd.get(&path).unwrap().contains("node-b"), "the claim was stolen back");
        etcd.ctl(&["del", &path]);
        wait_for_duplicate(&running.manager, None).await;
        assert!(etcd.get(&path).unwrap().contains("node-a"), "it does not claim again");
    }
    running.assert_running("its claim was taken twice");
}

#[tokio::test]
async fn peers_are_known_by_the_names_in_their_claims() {
    let etcd = Etcd::start();
    let (a, b) = (named(&etcd.url(), "node-a"), named(&etcd.url(), "node-b"));
    let own = a.acquire(&network(), &node(1)).await.unwrap();
    b.acquire(&network(), &node(2)).await.unwrap();
    let running = Running::start(a, own);
    let status = running.manager.status();
    let named = async {
        while status.read().names.get(&Ipv4Addr::new(192, 0, 2, 2).into()).map(String::as_str)
            != Some("node-b")
        {
            sleep(Duration::from_millis(20)).await;
        }
    };
    within(NOTICED, named).await.expect("nobody learns what the host of 192.0.2.2 is called");
}

/// As a copy of the keys into another etcd leaves it: nothing would ever end it.
#[tokio::test]
async fn claim_without_etcd_lease_is_nobodys() {
    let etcd = Etcd::start();
    let other = serde_json::to_string(&identity("node-b")).unwrap();
    etcd.ctl(&["put", &claim_path("192.0.2.1"), &other]);
    let manager = named(&etcd.url(), "node-a");
    let own = manager.acquire(&network(), &node(1)).await.expect("the address is blocked for ever");
    assert!(etcd.get(&claim_path("192.0.2.1")).unwrap().contains("node-a"));
    etcd.ctl(&["put", &claim_path("192.0.2.1"), &other]);
    let operator = manager_at(&etcd.url());
    etcd.ctl(&["put", &format!("{PREFIX}/config"), r#"{"Network":"10.5.0.0/16"}"#]);
    operator.release(own.lease.subnets, true).await.expect("a claim that never ends is no life");
}

#[tokio::test]
async fn copied_machine_takes_claim_original_alarms() {
    let etcd = Etcd::start();
    let start = async || {
        let manager = named(&etcd.url(), "node-a");
        let own = manager.acquire(&network(), &node(1)).await.expect("it looks like a restart");
        Running::start(manager, own)
    };
    let first = start().await;
    let copy = start().await;
    wait_for_duplicate(&first.manager, Some("copy")).await;
    // It stays so, however often both look.
    sleep(short_claims().claim_ttl).await;
    wait_for_duplicate(&first.manager, Some("copy")).await;
    wait_for_duplicate(&copy.manager, None).await;
    first.assert_running("a copy claims its address");
    copy.assert_running("it claimed last");
    copy.task.abort();
    copy.manager.release_claim().await;
    wait_for_duplicate(&first.manager, None).await;
    let subnets = etcd.keys(&format!("{PREFIX}/subnets"));
    assert_eq!(subnets.len(), 1, "a copy has another subnet: {subnets:?}");
}

#[tokio::test]
async fn idle_node_writes_nothing_stop_releases_claim() {
    let etcd = Etcd::start();
    let mut nodes = Vec::new();
    for number in 1..=5 {
        let manager = named(&etcd.url(), &format!("node-{number}"));
        let own = manager.acquire(&network(), &node(number)).await.unwrap();
        nodes.push(Running::start(manager, own));
    }
    let (revision, claims) = (etcd.revision(), etcd.keys(&format!("{PREFIX}/weft/nodes")).len());
    assert_eq!(claims, nodes.len());
    // Three lives of a claim without its keeper.
    sleep(3 * short_claims().claim_ttl).await;
    assert_eq!(etcd.revision(), revision, "an idle node writes");
    assert_eq!(etcd.keys(&format!("{PREFIX}/weft/nodes")).len(), claims, "a claim lapsed");
    for node in nodes {
        node.task.abort();
        node.manager.release_claim().await;
    }
    assert_eq!(etcd.keys(&format!("{PREFIX}/weft/nodes")), [""; 0], "a stop leaves a claim");
}

#[tokio::test]
async fn missing_claim_permission_does_not_prevent_lease() {
    let mut etcd = Etcd::start();
    etcd.ctl(&["user", "add", "root:secret"]);
    etcd.ctl(&["user", "grant-role", "root", "root"]);
    etcd.ctl(&["role", "add", "flannel"]);
    for (kind, path) in [("readwrite", "subnets/"), ("read", "config")] {
        let path = format!("{PREFIX}/{path}");
        etcd.ctl(&["role", "grant-permission", "flannel", "--prefix=true", kind, &path]);
    }
    etcd.ctl(&["user", "add", "flannel:hush"]);
    etcd.ctl(&["user", "grant-role", "flannel", "flannel"]);
    etcd.ctl(&["auth", "enable"]);
    etcd.user = Some("root:secret".to_owned());
    let credentials =
        Credentials { username: "flannel".to_owned(), password: Secret("hush".to_owned()) };
    let with = EtcdOptions { credentials: Some(credentials), ..options(&[&etcd.url()]) };
    let start = async || {
        let manager = manager(with.clone()).with_identity(identity("node-a"));
        let renew_margin = Duration::from_secs(2);
        let timing = Timing { lease_ttl: LEASE, renew_margin, ..short_claims() };
        let manager = manager.with_timing(timing);
        let own = manager.acquire(&network(), &node(1)).await;
        (manager, own.expect("flannel's permissions are not enough"))
    };
    let (_, first) = start().await;
    let (manager, own) = start().await;
    assert_eq!(first.lease.subnets, own.lease.subnets);
    assert_eq!(etcd.get(&claim_path("192.0.2.1")), None);
    let running = Running::start(manager, own);
    let status = running.manager.status();
    let started = Stopwatch::start();
    while status.read().store.renewals == 0 {
        assert!(started.elapsed() < NOTICED, "it does not renew its lease");
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("it may not claim");
    // The right comes, goes and comes again, and the claim with it.
    let claims = format!("{PREFIX}/weft/");
    let root = |arguments: &[&str]| etcd.ctl(&[&["role"], arguments].concat());
    for _ in 0..2 {
        root(&["grant-permission", "flannel", "--prefix=true", "readwrite", &claims]);
        let granted = Stopwatch::start();
        while etcd.get(&claim_path("192.0.2.1")).is_none() {
            assert!(!granted.is_over(NOTICED), "a right that came late claims nothing");
            sleep(Duration::from_millis(100)).await;
        }
        root(&["revoke-permission", "flannel", "--prefix=true", &claims]);
        sleep(short_claims().claim_ttl / 2).await;
        etcd.ctl(&["del", &claim_path("192.0.2.1")]);
        running.assert_running("it may not claim any more");
    }
}

/// A node that runs, and what it is told of its own address.
fn start_moving(
    manager: Arc<SubnetManager>,
    own: OwnLease,
) -> (watch::Sender<LeaseAttributes>, JoinHandle<End>) {
    let (sender, _peers) = watch::channel(Arc::default());
    let (attributes, said) = watch::channel(own.lease.attributes.clone());
    let run = async move { manager.run(Held::Leased(own), &sender, said).await };
    (attributes, tokio::spawn(run))
}

#[tokio::test]
async fn moved_node_keeps_subnet_frees_old_address() {
    let etcd = Etcd::start();
    let watcher = manager_at(&etcd.url());
    let own = watcher.acquire(&network(), &node(9)).await.unwrap();
    let mut watching = Running::start(watcher, own);
    let manager = named(&etcd.url(), "node-a");
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let subnet = own.lease.subnets;
    let manager = Arc::new(manager);
    let (attributes, task) = start_moving(Arc::clone(&manager), own);
    let mut old = 1;
    for new in 2..8_u8 {
        let both = [format!("192.0.2.{old}"), format!("192.0.2.{new}")];
        watching.wait_for_peers(&[&both[0]], CONVERGE, "the peer is not where it was").await;
        attributes.send_replace(node(new));
        let took = watching.wait_for_peers(&[&both[1]], CONVERGE, "the peer did not follow").await;
        println!("{} to {} after {took:?}", both[0], both[1]);
        assert_eq!(watching.peers.borrow().keys().next(), Some(&subnet), "another subnet");
        let started = Stopwatch::start();
        while etcd.get(&claim_path(&both[1])).is_none() {
            assert!(!started.is_over(NOTICED), "the new address is not claimed");
            sleep(Duration::from_millis(10)).await;
        }
        while etcd.get(&claim_path(&both[0])).is_some() {
            assert!(started.elapsed() < NOTICED, "nobody else may have the old address");
            sleep(Duration::from_millis(10)).await;
        }
        old = new;
    }
    let other = named(&etcd.url(), "node-b");
    let second = other.acquire(&network(), &node(1)).await.expect("a free address is refused");
    assert_ne!(second.lease.subnets, subnet, "two nodes share a subnet");
    attributes.send_replace(node(1));
    wait_for_duplicate(&manager, Some("node-b")).await;
    assert!(!task.is_finished(), "a running node ends because of a claim");
    let claim = etcd.get(&claim_path("192.0.2.1")).expect("nobody claims it");
    assert!(claim.contains("node-b"), "it took the claim of another: {claim}");
    task.abort();
    watching.assert_running("another node ended");
}

/// Connections that were made from an address which the host has lost stay open, and are silent.
#[tokio::test]
async fn connections_of_the_address_before_are_left_at_once() {
    let etcd = Etcd::start();
    let watcher = manager_at(&etcd.url());
    let own = watcher.acquire(&network(), &node(9)).await.unwrap();
    let mut watching = Running::start(watcher, own);
    let proxy = Proxy::to(etcd.address());
    let manager = Arc::new(named(&proxy.url(), "node-a"));
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let (attributes, task) = start_moving(Arc::clone(&manager), own);
    watching.wait_for_peers(&["192.0.2.1"], CONVERGE, "the peer is not where it was").await;
    wait_until_listed(&manager).await;
    for new in 2..5 {
        // What is open is silent from now on, and what is new works.
        proxy.set(Mode::Silent);
        sleep(Duration::from_millis(200)).await;
        proxy.set(Mode::Open);
        attributes.send_replace(node(new));
        let peer = format!("192.0.2.{new}");
        let took = watching.wait_for_peers(&[&peer], CONVERGE, "it waits for the dead").await;
        println!("peers know {peer} after {took:?}");
        let started = Stopwatch::start();
        while etcd.get(&claim_path(&peer)).is_none() {
            assert!(!started.is_over(CONVERGE), "the new address is not claimed");
            sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(!task.is_finished(), "a move ended it");
    task.abort();
}

#[tokio::test]
async fn a_lease_is_released_by_hand_once_its_node_is_gone() {
    let etcd = Etcd::start();
    etcd.ctl(&["put", &format!("{PREFIX}/config"), r#"{"Network":"10.5.0.0/16"}"#]);
    let (a, operator) = (named(&etcd.url(), "node-a"), manager_at(&etcd.url()));
    let own = a.acquire(&network(), &node(1)).await.expect("a subnet is free");
    let (subnet, public_ip) = (own.lease.subnets, own.lease.attributes.node_address());
    let refusal = operator.release(subnet, true).await.expect_err("a live node would end");
    assert!(refusal.to_string().contains("lives, node \"node-a\""), "{refusal}");
    a.release_claim().await;
    let refusal = operator.release(subnet, false).await.expect_err("nobody was asked");
    assert!(refusal.to_string().contains("--node-is-gone"), "{refusal}");
    let refusal = operator.reserve(subnet, Ipv4Addr::new(192, 0, 2, 99).into()).await;
    assert!(refusal.is_err_and(|error| error.to_string().contains("is taken")));
    operator.release(subnet, true).await.expect("the node is gone");
    let reserved = operator.reserve(subnet, public_ip).await.expect("the subnet is free");
    assert_eq!(reserved.subnets, subnet);
    let entries = operator.entries().await.expect("etcd answers").leases;
    assert_eq!(entries[0].lifetime, weft::control::lease::Lifetime::Reservation, "{entries:?}");
    let again = named(&etcd.url(), "node-a").acquire(&network(), &node(1)).await;
    assert_eq!(again.expect("it is reserved").lease.subnets, subnet);
}
