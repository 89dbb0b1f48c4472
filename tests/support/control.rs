//! A node's control plane over a store, without devices, and the options that it is given.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use weft::backend_kind::BackendKind;
use weft::config::network::{BackendConfig, NetworkConfig, SubnetRange};
use weft::config::options::{EtcdOptions, StoreOptions};
use weft::control::error::ConnectError;
use weft::control::lease::{LeaseAttributes, Peers};
use weft::control::manager::SubnetManager;
use weft::control::run::{End, Held};
use weft::control::snapshot::OwnLease;
use weft::control::timing::Timing;
use weft::route::{Families, Prefixes};

use super::pace::{Stopwatch, within};

/// flannel's default.
pub const PREFIX: &str = "/coreos.com/network";

pub fn options(endpoints: &[&str]) -> EtcdOptions {
    EtcdOptions {
        endpoints: endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect(),
        prefix: PREFIX.to_owned(),
        ca_file: None,
        client_certificate: None,
        credentials: None,
    }
}

pub fn manager(options: EtcdOptions) -> SubnetManager {
    connect(&StoreOptions::Etcd(options), None).unwrap()
}

/// Asks for the configuration until it is there, as a daemon does.
pub async fn wait_for_config(manager: &SubnetManager) {
    while manager.network_config().await.is_err() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Acquires a subnet, however often that fails at first.
pub async fn acquire_at_last(
    manager: &SubnetManager,
    network: &NetworkConfig,
    attributes: &LeaseAttributes,
) -> OwnLease {
    loop {
        match manager.acquire(network, attributes).await {
            Ok(own) => return own,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Checks the options of a store that need not be asked for anything.
pub fn connect(
    options: &StoreOptions,
    previous: Option<Prefixes>,
) -> Result<SubnetManager, ConnectError> {
    let connected = SubnetManager::connect(options, previous).now_or_never();
    connected.expect("nobody has to be asked")
}

pub fn manager_at(url: &str) -> SubnetManager {
    manager(options(&[url]))
}

pub fn network() -> NetworkConfig {
    let v4 = SubnetRange {
        network: "10.5.0.0/16".parse().unwrap(),
        subnet_length_bits: 24,
        subnet_min: Ipv4Addr::new(10, 5, 1, 0),
        subnet_max: Ipv4Addr::new(10, 5, 255, 0),
    };
    NetworkConfig {
        ranges: Families::of_v4(v4, None),
        enable_nftables: false,
        backend: BackendConfig { kind: BackendKind::Udp.into(), settings: serde_json::Value::Null },
    }
}

/// One with room for tens of thousands of nodes.
pub fn wide_network() -> NetworkConfig {
    let v4 = SubnetRange {
        network: "10.0.0.0/8".parse().unwrap(),
        subnet_length_bits: 24,
        subnet_min: Ipv4Addr::new(10, 0, 1, 0),
        subnet_max: Ipv4Addr::new(10, 255, 255, 0),
    };
    NetworkConfig { ranges: Families::of_v4(v4, None), ..network() }
}

pub fn node(number: u8) -> LeaseAttributes {
    LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, number))
}

pub fn path(subnets: Prefixes) -> String {
    format!("{PREFIX}/subnets/{}", subnets.key())
}

pub fn subnet_path(key: &str) -> String {
    format!("{PREFIX}/subnets/{key}")
}

/// Leases short enough to lapse within a test.
pub fn short_leases() -> Timing {
    let (lease_ttl, renew_margin) = (Duration::from_secs(4), Duration::from_secs(2));
    Timing { lease_ttl, renew_margin, ..Timing::default() }
}

/// A daemon's control plane that runs on.
pub struct Running {
    pub peers: watch::Receiver<Arc<Peers>>,
    pub task: JoinHandle<End>,
    pub manager: Arc<SubnetManager>,
}

impl Running {
    pub fn start(manager: SubnetManager, own: OwnLease) -> Self {
        let manager = Arc::new(manager);
        let (sender, peers) = watch::channel(Arc::default());
        let (_fixed, attributes) = watch::channel(own.lease.attributes.clone());
        let runner = Arc::clone(&manager);
        let held = Held::Leased(own);
        let task = tokio::spawn(async move { runner.run(held, &sender, attributes).await });
        Self { peers, task, manager }
    }

    /// Waits until the peers' public addresses are exactly these, and says how long it took.
    pub async fn wait_for_peers(
        &mut self,
        expected: &[&str],
        limit: Duration,
        broken: &str,
    ) -> Duration {
        let expected: BTreeSet<String> = expected.iter().map(|&ip| ip.to_owned()).collect();
        let started = Stopwatch::start();
        let found = within(limit, self.peers.wait_for(|peers| addresses(peers) == expected));
        if found.await.is_none() {
            let now = addresses(&self.peers.borrow());
            panic!("{broken}: peers are {now:?} instead of {expected:?} after {limit:?}");
        }
        started.elapsed()
    }

    pub async fn end(self, limit: Duration, broken: &str) -> End {
        match within(limit, self.task).await {
            Some(end) => end.unwrap(),
            None => panic!("{broken}: still running after {limit:?}"),
        }
    }

    pub fn assert_running(&self, broken: &str) {
        assert!(!self.task.is_finished(), "{broken}: the control plane ended");
    }
}

pub fn addresses(peers: &Peers) -> BTreeSet<String> {
    peers.values().map(|lease| lease.attributes.node_address().to_string()).collect()
}

/// What an undisturbed store needs at most, and a busy machine.
pub const SOON: Duration = Duration::from_secs(3);
