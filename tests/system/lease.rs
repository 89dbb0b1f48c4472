//! `weft lease` on a store, beside daemons that live and after they are gone.

use std::path::Path;
use std::process::{Command, Output};

use super::support::lab::LEASE_TIMEOUT;
use super::support::lab::wait_until;
use super::support::overlay::{CONFIG, Overlay};

fn lease(store: &Path, words: &[&str]) -> (String, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    let store = format!("--local-store={}", store.display());
    let Output { stdout, stderr, status } =
        command.arg("lease").args(words).args(["--", &store]).output().expect("weft runs");
    (String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned(), status.code())
}

/// Not even the backend that a lease means where it names none, for that needs IPv4.
#[test]
fn a_reservation_without_ipv4_names_no_backend() {
    let directory = tempfile::tempdir().expect("a directory");
    let config = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:5::/48"}"#;
    std::fs::write(directory.path().join("config"), config).expect("it is written");
    let (answer, code) = lease(directory.path(), &["reserve", "fd00:5:0:7::/64", "fe80::1"]);
    assert_eq!(code, Some(0), "{answer}");
    let (list, _) = lease(directory.path(), &["list"]);
    let row = list.lines().nth(1).unwrap_or_default();
    let words: Vec<_> = row.split_whitespace().collect();
    assert_eq!(words, ["fd00:5:0:7::/64", "fe80::1", "-", "reservation", "-"], "{list}");
}

#[test]
fn leases_are_listed_reserved_and_released_but_no_live_node_ends() {
    let mut overlay = Overlay::start_with(CONFIG, [&[], &[]]);
    let store = overlay.files().join("store");
    let lease = |words: &[&str]| lease(&store, words);
    let own = &overlay.leases[0].network();
    let subnet = format!("{own}/24");
    let (list, code) = lease(&["list"]);
    assert_eq!(code, Some(0), "{list}");
    let row = list.lines().find(|line| line.starts_with(&subnet)).expect("a row for each lease");
    let words: Vec<_> = row.split_whitespace().collect();
    assert_eq!(words[..4], [subnet.as_str(), "172.20.0.1", "udp", "lease"], "{list}");
    let (shown, _) = lease(&["show", "172.20.0.1"]);
    assert!(shown.contains("\"PublicIP\": \"172.20.0.1\""), "{shown}");

    // A node that lives is not ended, whatever the operator is sure of.
    for words in [&["release", &subnet][..], &["release", "--node-is-gone", &subnet]] {
        let (refusal, code) = lease(words);
        assert_eq!(code, Some(2), "{refusal}");
        assert!(refusal.contains("the node 172.20.0.1 lives, node "), "{refusal}");
    }
    for (words, says) in [
        (["reserve", &subnet, "192.0.2.9"], "172.20.0.1"),
        (["reserve", "10.5.201.0/24", "172.20.0.1"], subnet.as_str()),
        (["reserve", "10.6.1.0/24", "192.0.2.9"], "10.5.1.0"),
    ] {
        let (refusal, code) = lease(&words);
        assert!(code == Some(2) && refusal.contains(says), "{words:?}: {refusal}");
    }

    let nowhere = tempfile::tempdir().expect("a directory");
    let (answer, code) = self::lease(nowhere.path(), &["list"]);
    assert!(code == Some(2) && answer.contains("config"), "{answer}");
    let left: Vec<_> = nowhere.path().read_dir().expect("it is there").collect();
    assert!(left.is_empty(), "a place that was asked by mistake stays as it was: {left:?}");

    // A reservation, and the node that it is for.
    overlay.daemons.clear();
    let (answer, code) = lease(&["release", &subnet]);
    assert!(code == Some(2) && answer.contains("--node-is-gone"), "{answer}");
    let (answer, code) = lease(&["release", "--node-is-gone", &subnet]);
    assert!(code == Some(0) && answer.contains("of 172.20.0.1 is free"), "{answer}");
    let (answer, code) = lease(&["reserve", "10.5.201.0/24", "172.20.0.1"]);
    assert_eq!(code, Some(0), "{answer}");
    assert!(lease(&["list"]).0.contains("reservation"));
    std::fs::remove_file(overlay.dir(0).join("subnet.env")).expect("it was written");
    let daemon = overlay.weftd(0, &["--start-from-cache=false"]);
    wait_until(LEASE_TIMEOUT, "the node takes the subnet that is reserved for it", || {
        overlay.dir(0).join("subnet.env").exists()
    });
    // The log is written a little later than the file.
    wait_until(LEASE_TIMEOUT, "the log names the subnet", || {
        daemon.output().contains("10.5.201.0/24")
    });
}
