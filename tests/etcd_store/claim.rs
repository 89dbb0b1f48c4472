//! Two nodes with one PublicIP: one gets the subnet, the other is told whose it is.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use weft::config::options::{Credentials, EtcdOptions, Secret};
use weft::control::claim::CLAIM_TTL;
use weft::control::{End, LeaseAttributes, NodeIdentity, OwnLease, SubnetManager};

use crate::support::etcd::Etcd;
use crate::{
    MARGIN, PREFIX, Running, SOON, manager, manager_at, network, node, options, short_leases,
};

/// A node that claims again at once may take so much longer to start.
const RESTART: Duration = Duration::from_secs(1);
/// As long as a lost claim may stay unnoticed: three times the longest pace at which it is kept.
const NOTICED: Duration = Duration::from_secs(36);

/// Peers know a new address within this time.
const CONVERGE: Duration = Duration::from_secs(2);

fn identity(hostname: &str) -> NodeIdentity {
    NodeIdentity {
        hostname: hostname.to_owned(),
        machine_id: Some(format!("machine of {hostname}")),
        boot_id: format!("boot of {hostname}"),
    }
}

fn named(url: &str, hostname: &str) -> SubnetManager {
    manager_at(url).with_identity(identity(hostname))
}

fn claim_path(public_ip: &str) -> String {
    format!("{PREFIX}/weft/nodes/{public_ip}")
}

#[tokio::test]
async fn of_two_nodes_with_one_public_ip_that_start_at_once_one_gets_the_subnet() {
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
        assert!(refusal.contains(&attributes.public_ip.to_string()), "not its cause: {refusal}");
    }
    println!("{TRIES} tries, {shared} shared; node-a won {won_by_a}");
    assert_eq!(shared, 0, "two nodes shared a subnet");
    let subnets = etcd.keys(&format!("{PREFIX}/subnets")).len();
    assert_eq!(subnets, TRIES as usize, "a refused node left a lease behind");
}

#[tokio::test]
async fn a_restarted_node_goes_on_at_once_and_another_waits_until_its_claim_has_lapsed() {
    let etcd = Etcd::start();
    let acquire = async |hostname: &str| {
        let manager = named(&etcd.url(), hostname);
        manager.acquire(&network(), &node(1)).await.map(|own| own.lease.subnet)
    };
    let first = acquire("node-a").await.expect("the first of all is refused");
    let claim = etcd.get(&claim_path("192.0.2.1")).expect("no claim");
    assert!(claim.contains(r#""Hostname":"node-a""#), "an operator cannot read {claim}");
    let below = etcd.keys(&format!("{PREFIX}/subnets"));
    assert_eq!(below.len(), 1, "flannel's nodes would stumble over {below:?}");
    for _ in 0..3 {
        let started = Instant::now();
        let again = acquire("node-a").await.expect("a restarted node is refused by itself");
        assert_eq!(again, first);
        assert!(started.elapsed() < RESTART, "a restart takes {:?}", started.elapsed());
    }
    let renamed = acquire("node-b").await.expect_err("another node shares the subnet");
    println!("refused: {renamed:?}");
    let started = Instant::now();
    let waiting = async {
        loop {
            match acquire("node-b").await {
                Ok(subnet) => return subnet,
                Err(_) => sleep(Duration::from_millis(500)).await,
            }
        }
    };
    let taken = timeout(CLAIM_TTL + Duration::from_secs(5), waiting).await;
    let taken = taken.expect("the address of a node that is gone is never free");
    println!("taken over after {:?}", started.elapsed());
    assert!(started.elapsed() > CLAIM_TTL / 2, "it was not waited for");
    assert_eq!(taken, first, "the address kept its subnet");
}

#[tokio::test]
async fn a_lapsed_claim_comes_back_and_one_that_another_node_took_ends_the_run() {
    let etcd = Etcd::start();
    let manager = named(&etcd.url(), "node-a");
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let running = Running::start(manager, own, MARGIN);
    let path = claim_path("192.0.2.1");
    let revoke = || {
        let id = format!("{:x}", etcd.lease_of(&path));
        etcd.ctl(&["lease", "revoke", &id]);
    };
    revoke();
    let started = Instant::now();
    while etcd.get(&path).is_none() {
        assert!(started.elapsed() < NOTICED, "a lapsed claim does not come back");
        sleep(Duration::from_millis(100)).await;
    }
    println!("claimed again after {:?}", started.elapsed());
    running.assert_running("its claim had lapsed");
    revoke();
    let other = serde_json::to_string(&identity("node-b")).unwrap();
    etcd.ctl(&["put", &path, &other]);
    assert_eq!(running.end(NOTICED, "two nodes share a subnet").await, End::Duplicate);
    assert!(etcd.get(&path).unwrap().contains("node-b"), "the claim was stolen back");
}

#[tokio::test]
async fn of_two_copies_of_one_node_the_one_that_claimed_last_goes_on_and_the_other_ends() {
    let etcd = Etcd::start();
    // Hostname, machine-id and boot are the same: a snapshot of a machine, resumed twice.
    let start = async || {
        let manager = named(&etcd.url(), "node-a");
        let started = Instant::now();
        let own = manager.acquire(&network(), &node(1)).await.expect("a restart is refused");
        assert!(started.elapsed() < RESTART, "a restart takes {:?}", started.elapsed());
        (manager, own)
    };
    let (manager, own) = start().await;
    let subnet = own.lease.subnet;
    let first = Running::start(manager, own, MARGIN);
    // That one is stopped until the next has its place.
    let (stopped, stopped_own) = start().await;
    let (manager, own) = start().await;
    assert_eq!(own.lease.subnet, subnet, "a restart changes the subnet");
    let last = Running::start(manager, own, MARGIN);
    let began = Instant::now();
    assert_eq!(first.end(NOTICED + SOON, "two copies own one subnet").await, End::Duplicate);
    println!("a running copy ended after {:?}", began.elapsed());
    let woken = Running::start(stopped, stopped_own, MARGIN);
    let began = Instant::now();
    assert_eq!(woken.end(SOON, "it does not yield when it wakes").await, End::Duplicate);
    println!("a copy that was stopped ended {:?} after it woke", began.elapsed());
    last.assert_running("it claimed last");
    // Several writes of the claim with other numbers do not make it another's.
    sleep(NOTICED).await;
    last.assert_running("it is alone");
    let subnets = etcd.keys(&format!("{PREFIX}/subnets"));
    assert_eq!(subnets.len(), 1, "a copy has another subnet: {subnets:?}");
}

#[tokio::test]
async fn a_user_without_permission_for_the_claim_gets_a_subnet_all_the_same() {
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
        let manager = manager.with_timing(short_leases());
        let own = manager.acquire(&network(), &node(1)).await;
        (manager, own.expect("flannel's permissions are not enough"))
    };
    let (_, first) = start().await;
    let (manager, own) = start().await;
    assert_eq!(first.lease.subnet, own.lease.subnet);
    assert_eq!(etcd.get(&claim_path("192.0.2.1")), None);
    let running = Running::start(manager, own, Duration::from_secs(2));
    let status = running.manager.status();
    let started = Instant::now();
    while status.renewals() == 0 {
        assert!(started.elapsed() < NOTICED, "it does not renew its lease");
        sleep(Duration::from_millis(100)).await;
    }
    running.assert_running("it may not claim");
}

/// A node that runs, and what it is told of its own address.
fn start_moving(
    manager: SubnetManager,
    own: OwnLease,
) -> (watch::Sender<LeaseAttributes>, JoinHandle<End>) {
    let (sender, _peers) = watch::channel(Arc::default());
    let (attributes, said) = watch::channel(own.lease.attributes.clone());
    let run = async move { manager.run_moving(own, MARGIN, &sender, said).await };
    (attributes, tokio::spawn(run))
}

/// Where the loser or the winner of two copies goes before the loser knows that it lost.
#[tokio::test]
async fn of_two_copies_the_one_that_lost_its_claim_never_takes_the_subnet_along() {
    let etcd = Etcd::start();
    for (round, winner_moves) in [(0_u8, false), (1, true)] {
        let (here, there) = (10 * round + 1, 10 * round + 2);
        let start = async || {
            let manager = named(&etcd.url(), "node-a");
            let own = manager.acquire(&network(), &node(here)).await.expect("it is a restart");
            let subnet = own.lease.subnet;
            let key = format!("{PREFIX}/subnets/{}-24", subnet.network());
            let status = manager.status();
            (start_moving(manager, own), key, status)
        };
        let ((of_loser, loser), key, status) = start().await;
        let ((of_winner, winner), same_key, _) = start().await;
        assert_eq!(key, same_key, "a restart changes the subnet");
        // From here on the entry looks to the loser as if it had written it itself.
        let started = Instant::now();
        while status.written_by_others_total() == 0 {
            assert!(started.elapsed() < SOON, "it does not see who writes its lease");
            sleep(Duration::from_millis(5)).await;
        }
        let moves = if winner_moves { &of_winner } else { &of_loser };
        moves.send_replace(node(there));
        let end = timeout(SOON, loser).await.expect("two copies own one subnet").unwrap();
        println!("ended {:?} after {:?}: {end:?}", moves.borrow().public_ip, started.elapsed());
        let [here, there] = [here, there].map(|host| format!("192.0.2.{host}"));
        let (owns, left) = if winner_moves { (&there, &here) } else { (&here, &there) };
        let entry = etcd.get(&key).expect("the lease is gone");
        assert!(entry.contains(&format!("\"{owns}\"")), "it was taken along: {entry}");
        assert!(etcd.get(&claim_path(owns)).is_some(), "nobody claims {owns}");
        assert_eq!(etcd.get(&claim_path(left)), None, "nobody else may have {left}");
        assert!(!winner.is_finished(), "the one that claimed last ends, too");
        winner.abort();
    }
}

#[tokio::test]
async fn a_node_that_moves_keeps_its_subnet_and_leaves_its_address_to_others() {
    let etcd = Etcd::start();
    let watcher = manager_at(&etcd.url());
    let own = watcher.acquire(&network(), &node(9)).await.unwrap();
    let mut watching = Running::start(watcher, own, MARGIN);
    let manager = named(&etcd.url(), "node-a");
    let own = manager.acquire(&network(), &node(1)).await.unwrap();
    let subnet = own.lease.subnet;
    let (attributes, task) = start_moving(manager, own);
    let mut old = 1;
    for new in 2..8_u8 {
        let both = [format!("192.0.2.{old}"), format!("192.0.2.{new}")];
        watching.wait_for_peers(&[&both[0]], CONVERGE, "the peer is not where it was").await;
        attributes.send_replace(node(new));
        let took = watching.wait_for_peers(&[&both[1]], CONVERGE, "the peer did not follow").await;
        println!("{} to {} after {took:?}", both[0], both[1]);
        assert_eq!(watching.peers.borrow().keys().next(), Some(&subnet), "another subnet");
        assert!(etcd.get(&claim_path(&both[1])).is_some(), "the new address is not claimed");
        let started = Instant::now();
        while etcd.get(&claim_path(&both[0])).is_some() {
            assert!(started.elapsed() < CONVERGE, "nobody else may have the old address");
            sleep(Duration::from_millis(10)).await;
        }
        old = new;
    }
    let other = named(&etcd.url(), "node-b");
    let second = other.acquire(&network(), &node(1)).await.expect("a free address is refused");
    assert_ne!(second.lease.subnet, subnet, "two nodes share a subnet");
    attributes.send_replace(node(1));
    let end = timeout(CONVERGE, task).await.expect("two nodes have one address").unwrap();
    assert_eq!(end, End::Duplicate);
    watching.assert_running("another node ended");
}
