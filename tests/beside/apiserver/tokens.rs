//! Tokens that expire while weftd runs: the file is read again, as a kubelet replaces it.

use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::faults::FOLLOWS;
use crate::plane::Plane;
use crate::site::{NAMESPACE, Site, name};
use crate::support::lab::wait_until;

/// The API issues tokens of ten minutes at the least; this is shorter.
const BRIEF_SECONDS: u64 = 20;

fn base64url(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let at = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..=chunk.len() {
            let index = (bits >> (18 - 6 * digit)) & 63;
            text.push(char::from(DIGITS[index as usize]));
        }
    }
    text
}

/// How much longer the API takes a token than it says.
const LEEWAY_SECONDS: u64 = 60;

/// A token as the API issues it, with its key, for a shorter life.
fn brief(site: &Site, seconds: u64) -> String {
    let account = site.plane.get(&["serviceaccount", "flannel", "-n", NAMESPACE]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let issuer = "https://kubernetes.default.svc";
    let claims: Value = json!({
        "iss": issuer, "aud": [issuer], "iat": now - 3600, "nbf": now - 3600,
        "exp": now + seconds - LEEWAY_SECONDS,
        "sub": format!("system:serviceaccount:{NAMESPACE}:flannel"),
        "kubernetes.io": {
            "namespace": NAMESPACE,
            "serviceaccount": {"name": "flannel", "uid": account["metadata"]["uid"]},
        },
    });
    let parts =
        [json!({"alg": "RS256"}), claims].map(|part| base64url(part.to_string().as_bytes()));
    let signed = parts.join(".");
    let key = site.plane.path("account.key");
    let path = site.plane.path("claims");
    std::fs::write(&path, &signed).unwrap();
    let mut openssl = Command::new("openssl");
    openssl.args(["dgst", "-sha256", "-sign"]).arg(key).arg(path).stderr(Stdio::inherit());
    format!("{signed}.{}", base64url(&openssl.output().expect("openssl is installed").stdout))
}

#[test]
fn a_token_that_is_replaced_on_disk_is_read_again() {
    let mut site = Site::new(Plane::without_controller(2, &[]), "udp");
    for host in 0..2 {
        site.plane.register(&name(host));
        site.plane.subnet_of(&name(host));
        site.write_token(host, &brief(&site, BRIEF_SECONDS));
        site.daemons.push(site.container(host, &[("NODE_NAME", &name(host))]));
    }
    site.connect();
    std::thread::sleep(std::time::Duration::from_secs(BRIEF_SECONDS));
    // A watch outlives its token; what is asked next does not.
    site.plane.kill_apiserver();
    site.plane.revive_apiserver();
    for host in 0..2 {
        site.wait_for(host, "401 Unauthorized");
        assert_eq!(site.peers(host), Some(1), "a token that expired withdrew peers");
    }
    for host in 0..2 {
        site.write_token(host, &site.issued());
    }
    let replaced = Instant::now();
    let annotation = "flannel.alpha.coreos.com/public-ip-overwrite=192.0.2.77";
    site.plane.kubectl(&["annotate", "node", &name(1), annotation]);
    wait_until(FOLLOWS, "the nodes follow the API with the new token", || {
        let published = site.plane.node(&name(1))["metadata"]["annotations"].to_string();
        published.contains(r#""flannel.alpha.coreos.com/public-ip":"192.0.2.77""#)
    });
    println!("the new token was used within {:.1?}", replaced.elapsed());
}
