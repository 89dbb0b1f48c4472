//! TLS, tokens and kubeconfigs: who is believed, who is let in, and what the messages keep quiet.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use weft::control::manager::SubnetManager;

use crate::support::etcd::{issue, make_authority};
use crate::support::kube_api::{KubeApi, node};
use crate::{address, options};

const TOKEN: &str = "correct-horse-battery-staple";

/// An authority and a server's certificate.
pub(crate) struct Certificates(PathBuf);

impl Certificates {
    /// Made in `directory`, for a server with this alternative name.
    pub(crate) fn new(directory: &Path, name: &str) -> Self {
        make_authority(directory);
        issue(directory, "server", &format!("subjectAltName={name}"), 2);
        Self(directory.to_owned())
    }

    pub(crate) fn authority(&self) -> PathBuf {
        self.0.join("ca.crt")
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let certificate = CertificateDer::from_pem_file(self.0.join("server.crt")).unwrap();
        let key = PrivateKeyDer::from_pem_file(self.0.join("server.key")).unwrap();
        let config = ServerConfig::builder().with_no_client_auth();
        TlsAcceptor::from(Arc::new(config.with_single_cert(vec![certificate], key).unwrap()))
    }
}

fn kubeconfig(directory: &Path, port: u16, authority: &Path, user: &str) -> String {
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: \
         {{cluster: k, user: u}}\nclusters:\n- name: k\n  cluster:\n    server: \
         https://127.0.0.1:{port}\n    certificate-authority: {}\nusers:\n- name: u\n  user: \
         {user}\n",
        authority.display()
    );
    let path = directory.join("kubeconfig");
    std::fs::write(&path, text).unwrap();
    format!("--kubeconfig-file={}", path.display())
}

#[tokio::test]
async fn kubeconfig_gives_server_authority_and_own_credentials() {
    let files = tempfile::tempdir().unwrap();
    let directory = files.path();
    let certificates = Certificates::new(directory, "IP:127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let api = KubeApi::secure(listener, certificates.acceptor(), TOKEN);
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    let (port, authority) = (api.port(), certificates.authority());
    let network = weft::config::network::NetworkConfig::parse(crate::NET_CONF.as_bytes()).unwrap();
    let open = async |flag: &str| {
        let options = options(directory, &[flag], &[("NODE_NAME", "n1")]);
        SubnetManager::connect(&options.store, None).await
    };
    let acquire = async |flag: &str| open(flag).await.unwrap().acquire(&network, &address(1)).await;
    let token_file = directory.join("token");
    std::fs::write(&token_file, TOKEN).unwrap();
    for user in [format!("{{token: {TOKEN}}}"), format!("{{tokenFile: {}}}", token_file.display())]
    {
        let flag = kubeconfig(directory, port, &authority, &user);
        acquire(&flag).await.unwrap_or_else(|error| panic!("{user}: {error}"));
    }
    // Somebody else's token, and a server that nobody vouches for.
    let flag = kubeconfig(directory, port, &authority, "{token: wrong-horse}");
    let error = format!("{:?}", acquire(&flag).await.unwrap_err());
    assert!(error.contains("401") && !error.contains("wrong-horse"), "{error}");
    let other = tempfile::tempdir().unwrap();
    make_authority(other.path());
    let user = format!("{{token: {TOKEN}}}");
    let flag = kubeconfig(directory, port, &other.path().join("ca.crt"), &user);
    let error = format!("{:?}", acquire(&flag).await.unwrap_err());
    assert!(error.to_lowercase().contains("certificate"), "unhelpful: {error}");
    // Files that are no use say which and why, and nothing of what is in them.
    let flag = kubeconfig(directory, port, &authority, &format!("{{token: [{TOKEN}"));
    let error = open(&flag).await.err().unwrap().to_string();
    assert!(error.contains("kubeconfig") && !error.contains(TOKEN), "{error}");
    let exec = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/false}}";
    let flag = kubeconfig(directory, port, &authority, exec);
    let error = open(&flag).await.err().unwrap().to_string();
    assert!(error.contains("kubeconfig"), "a login by a program is taken: {error}");
    let error = open("--kubeconfig-file=/nonexistent/k").await.err().unwrap().to_string();
    assert!(error.contains("/nonexistent/k"), "{error}");
    assert!(!format!("{:?}", options(directory, &[&flag], &[("NODE_NAME", "n1")])).contains(TOKEN));
}

#[tokio::test]
async fn rotated_token_and_authority_are_used_next_request() {
    let (files, old) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let directory = files.path();
    let certificates = Certificates::new(directory, "IP:127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let api = KubeApi::secure(listener, certificates.acceptor(), TOKEN);
    api.put_node(&node("n1", Some("10.244.1.0/24")));
    make_authority(old.path());
    let (authority, token) = (old.path().join("ca.crt"), directory.join("token"));
    std::fs::write(&token, "expired-horse").unwrap();
    let user = format!("{{tokenFile: {}}}", token.display());
    let flag = kubeconfig(directory, api.port(), &authority, &user);
    let options = options(directory, &[&flag], &[("NODE_NAME", "n1")]);
    let manager = SubnetManager::connect(&options.store, None).await.unwrap();
    let network = weft::config::network::NetworkConfig::parse(crate::NET_CONF.as_bytes()).unwrap();
    let acquire = async || {
        let outcome = manager.acquire(&network, &address(1)).await;
        outcome.map_err(|error| format!("{error:?}"))
    };
    std::fs::copy(certificates.authority(), &authority).unwrap();
    let error = acquire().await.unwrap_err();
    assert!(error.to_lowercase().contains("certificate"), "the old authority vouches: {error}");
    let error = acquire().await.unwrap_err();
    assert!(error.contains("401"), "the new authority is not looked at: {error}");
    std::fs::write(&token, TOKEN).unwrap();
    let error = acquire().await.unwrap_err();
    assert!(error.contains("401"), "a token was read although none was refused: {error}");
    acquire().await.expect("the new token is not looked at");
    // A file that is gone is told, beside what went wrong with the one before.
    std::fs::remove_file(&token).unwrap();
    drop(api);
    let error = acquire().await.unwrap_err();
    assert!(error.contains(&token.display().to_string()), "{error}");
}
