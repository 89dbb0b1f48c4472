//! What weftd writes to a Node, by a server that speaks the API's HTTP.

#[path = "../../support/kube_api.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the store")]
#[allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
mod kube_api;

use std::ffi::OsString;
use std::net::Ipv4Addr;

use weft::config::flags::{self, Outcome};
use weft::config::network::NetworkConfig;
use weft::config::options::StoreOptions;
use weft::control::lease::{LeaseAttributes, RawJson};
use weft::control::manager::SubnetManager;

use crate::golden::table::Case;
use kube_api::{KubeApi, What, node};

const NET_CONF: &str = r#"{"Network":"10.244.0.0/16"}"#;

fn store(flags: &[String]) -> Option<StoreOptions> {
    let words = ["weftd", "-kube-subnet-mgr"].into_iter().chain(flags.iter().map(String::as_str));
    let outcome =
        flags::parse(words.map(OsString::from), &|name| (name == "NODE_NAME").then(|| "n1".into()));
    let Outcome::Run(options, _) = outcome else { return None };
    Some(options.store)
}

pub(crate) fn prefix(case: &Case) -> String {
    match store(&[format!("-kube-annotation-prefix={}", case.given)]) {
        Some(StoreOptions::Kube(options)) => options.annotations.name("public-ip"),
        Some(other) => panic!("not the store of Kubernetes: {other:?}"),
        None => "refused".to_owned(),
    }
}

/// Path and body of the patch with which a node of this backend type and data announces itself.
pub(crate) fn annotations(case: &Case) -> String {
    let (kind, data) = match case.given.split_once(' ') {
        Some((kind, data)) => (kind, Some(data.to_owned())),
        None => (case.given.as_str(), None),
    };
    let data = data.map(|text| RawJson::from_text(text).expect("the case's data is JSON"));
    let public_ip = Ipv4Addr::new(192, 0, 2, 1);
    let attributes = match kind {
        "udp" => LeaseAttributes::udp(public_ip),
        kind => LeaseAttributes::of(kind, public_ip, data),
    };
    let api = KubeApi::local();
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let dir = tempfile::tempdir().expect("a directory for the test");
    let net_conf = dir.path().join("net-conf.json");
    std::fs::write(&net_conf, NET_CONF).expect("it is writable");
    let config = NetworkConfig::parse(NET_CONF.as_bytes()).expect("it is fine");
    let url = format!("-kube-api-url={}", api.url());
    let store = store(&[url, format!("-net-config-path={}", net_conf.display())]);
    let store = store.expect("the flags are fine");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let manager = SubnetManager::connect(&store, None).await.expect("the API answers");
        manager.acquire(&config, &attributes).await.expect("the Node has its subnet");
    });
    let patches = api.seen(What::Patch);
    let shown: Vec<_> = patches.iter().map(|seen| format!("{} {}", seen.path, seen.body)).collect();
    shown.join("; ")
}
