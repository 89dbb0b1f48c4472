//! The Kubernetes store against a server that speaks the API's HTTP with the API's objects: what is
//! written to Nodes, what is read from them, and what an API in trouble does to a network.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

#[path = "../support/mod.rs"]
mod support;

mod daemon;
mod faults;
mod own_node;
mod scale;
mod secure;
mod stock;

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;
use weft::config::flags::{self, Outcome};
use weft::config::options::Options;
use weft::control::lease::LeaseAttributes;
use weft::control::manager::SubnetManager;
use weft::control::timing::Timing;

use support::control;
use support::kube_api::KubeApi;
use support::pace::Stopwatch;

/// flannel's ConfigMap, with the udp backend.
const NET_CONF: &str =
    r#"{"Network":"10.244.0.0/16","EnableNFTables":false,"Backend":{"Type":"udp"}}"#;

/// What an undisturbed API needs at most, and a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// The options of `weftd --kube-subnet-mgr` on `node`, as a manifest gives them.
fn options(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Options {
    let net_conf = directory.join("net-conf.json");
    if !net_conf.exists() {
        std::fs::write(&net_conf, NET_CONF).unwrap();
    }
    let net_conf = format!("--net-config-path={}", net_conf.display());
    let all =
        ["weftd", "--kube-subnet-mgr", &net_conf].into_iter().chain(arguments.iter().copied());
    let outcome = flags::parse(all.map(OsString::from), &|name| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| OsString::from(value))
    });
    let Outcome::Run(options, _) = outcome else { panic!("the flags are refused: {outcome:?}") };
    *options
}

/// A node's manager.
struct Host {
    manager: SubnetManager,
    files: TempDir,
}

impl Host {
    async fn new(api: &KubeApi, node: &str) -> Self {
        Self::with_timing(api, node, Timing::default()).await
    }

    async fn with_timing(api: &KubeApi, node: &str, timing: Timing) -> Self {
        Self::at(&api.url(), node, timing).await
    }

    async fn at(url: &str, node: &str, timing: Timing) -> Self {
        let files = tempfile::tempdir().unwrap();
        let url = format!("--kube-api-url={url}");
        let options = options(files.path(), &[&url], &[("NODE_NAME", node)]);
        let manager = SubnetManager::connect(&options.store, None).await.unwrap();
        Self { manager: manager.with_timing(timing), files }
    }

    /// Acquires, and follows the others from then on.
    async fn start(self, public_ip: u8) -> control::Running {
        let own = self.acquire(public_ip).await.unwrap();
        control::Running::start(self.manager, own)
    }

    async fn acquire(
        &self,
        public_ip: u8,
    ) -> Result<weft::control::snapshot::OwnLease, weft::control::error::AcquireError> {
        let config = self.manager.network_config().await.unwrap();
        let config = weft::config::network::NetworkConfig::parse(&config).unwrap();
        self.manager.acquire(&config, &address(public_ip)).await
    }
}

fn address(number: u8) -> LeaseAttributes {
    control::node(number)
}

/// Looks at `condition` until it holds.
async fn eventually(what: &str, mut condition: impl FnMut() -> bool) -> Duration {
    let started = Stopwatch::start();
    while !condition() {
        assert!(!started.is_over(SOON), "within {SOON:?} this did not happen: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    started.elapsed()
}
