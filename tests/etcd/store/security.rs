//! Users, passwords and certificates.

use std::time::Duration;

use tokio::time::sleep;
use weft::config::options::{ClientCertificate, Credentials, EtcdOptions, Secret, StoreOptions};
use weft::control::error::{AcquireError, StoreError};

use crate::store::{
    PREFIX, Running, SOON, manager, network, node, options, short_leases, subnet_path,
};
use crate::support::control::connect;
use crate::support::etcd::{Etcd, Security};
use crate::support::pace::Stopwatch;

/// A busy machine may take longer to refuse a password than a request may.
const PATIENCE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn role_on_prefix_is_enough() {
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
    let mut running = Running::start(manager, own);
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
    assert!(running.manager.status().read().store.renewals >= 1);

    for wrong in [with("flannel", "guess"), options(&[&etcd.url()])] {
        let (manager, watch) = (manager_of(wrong), Stopwatch::start());
        let error = loop {
            let error = manager.acquire(&network(), &node(4)).await.unwrap_err();
            if let AcquireError::Store(error @ StoreError::Refused { .. }) = error {
                break error;
            }
            assert!(!watch.is_over(PATIENCE), "a wrong password looks like an outage: {error}");
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
    // The system's authorities know nothing of a test's.
    let error = manager(options(&[&etcd.url()])).network_config().await.unwrap_err().to_string();
    assert!(error.contains("--etcd-cafile"), "unhelpful message: {error}");
    let missing = StoreOptions::Etcd(with_ca("missing.crt"));
    let error = connect(&missing, None).err().unwrap().to_string();
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
    let mut running = Running::start(manager, own);
    etcd.ctl(&["put", &subnet_path("10.5.0.0-28"), r#"{"PublicIP":"192.0.2.2"}"#]);
    running.wait_for_peers(&["192.0.2.2"], SOON, "the watch does not work over TLS").await;
    let refused = crate::store::manager(without).network_config().await;
    assert!(refused.is_err(), "a node without certificate was let in");
}
