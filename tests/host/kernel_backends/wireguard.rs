//! The wireguard backend as far as a kernel without WireGuard can show it: what stops a start, in
//! which words, and that no secret is in them. `scripts/kernels` tries the rest.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use crate::kernel_backends::{SOON, value};
use crate::support::lab::{Lab, Process, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

const PSK: &str = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";

/// A weftd of this backend, with its key in `dir`.
fn start(lab: &Lab, dir: &Path, keys: &str) -> Process {
    let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"wireguard"{keys}}}}}"#);
    let store = local_store(dir, &config);
    let key_file = format!("WIREGUARD_KEY_FILE={}", dir.join("wgkey").display());
    let (files, socket) = (dir.join("h0/subnet.env"), dir.join("h0/weft.sock"));
    let (files, socket) = (
        format!("--subnet-file={}", files.display()),
        format!("--status-socket={}", socket.display()),
    );
    let weftd = env!("CARGO_BIN_EXE_weftd");
    let argv =
        ["env", &key_file, weftd, "--iface=wire0", "--wireguard=kernel", &files, &socket, &store];
    lab.hosts[0].spawn(&argv)
}

/// What a weftd says that ends at once.
fn refusal(lab: &Lab, dir: &Path, keys: &str) -> String {
    let mut daemon = start(lab, dir, keys);
    let status = daemon.wait(Duration::from_secs(10));
    assert_eq!(status.code(), Some(1), "{}", daemon.output());
    daemon.output()
}

#[test]
fn a_bad_key_or_a_taken_name_is_named_and_no_secret_shown() {
    let (lab, dir) = (Lab::two_hosts(), tempfile::tempdir().unwrap());
    let said = refusal(&lab, dir.path(), &format!(r#","PSK":"{}""#, &PSK[1..]));
    assert!(said.contains("Backend.PSK") && !said.contains("wdtC"), "{said}");
    let said = refusal(&lab, dir.path(), r#","Mode":"both""#);
    assert!(said.contains("Backend.Mode"), "{said}");
    let key = dir.path().join("wgkey");
    assert!(!key.exists(), "a configuration that can't be used leaves a key");
    fs::write(&key, &PSK[1..]).unwrap();
    let said = refusal(&lab, dir.path(), "");
    assert!(said.contains("/wgkey") && !said.contains("wdtC"), "{said}");
    fs::remove_file(&key).unwrap();
    lab.hosts[0].exec(&["ip", "link", "add", "flannel-wg", "type", "veth"]);
    let said = refusal(&lab, dir.path(), &format!(r#","PSK":"{PSK}""#));
    assert!(said.contains("flannel-wg") && !said.contains("dwdtC"), "{said}");
    assert!(lab.hosts[0].succeeds(&["ip", "link", "show", "flannel-wg"]), "somebody's device");
    let mode = fs::metadata(&key).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o400, "others may read the key");
}

#[test]
fn a_kernel_without_wireguard_is_told_before_anything_is_leased() {
    let (lab, dir) = (Lab::two_hosts(), tempfile::tempdir().unwrap());
    let host = &lab.hosts[0];
    let has_it = host.succeeds(&["ip", "link", "add", "probe0", "type", "wireguard"]);
    let mut daemon = start(&lab, dir.path(), "");
    if has_it {
        wait_until(SOON, "the device is there", || {
            host.succeeds(&["ip", "link", "show", "flannel-wg"])
        });
        return;
    }
    assert_eq!(daemon.wait(Duration::from_secs(10)).code(), Some(1), "{}", daemon.output());
    let said = daemon.output();
    assert!(said.contains("modprobe"), "{said}");
    let leases = fs::read_dir(dir.path().join("store/subnets")).map(Iterator::count);
    assert_eq!(leases.unwrap_or(0), 0, "a subnet that nobody can reach is leased");
}

#[test]
fn other_backends_ignore_its_leases() {
    let (lab, dir) = (Lab::two_hosts(), tempfile::tempdir().unwrap());
    let config = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
    let store = local_store(dir.path(), config);
    let data = r#"{"PublicKey":"hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=","Port":51820}"#;
    let subnets = dir.path().join("store/subnets");
    fs::create_dir_all(&subnets).unwrap();
    fs::write(subnets.join("10.5.77.0-24"), value("172.20.0.2", "wireguard", data)).unwrap();
    let mut daemon = lab.weftd(0, &dir.path().join("h0"), &["--iface=wire0", &store]);
    let ignored = || {
        let status = Status::try_of(&dir.path().join("h0"));
        status.is_some_and(|status| status.0["backend"]["leases_ignored"] == 1)
    };
    wait_until(SOON, "the lease is ignored", ignored);
    assert!(daemon.ended().is_none());
    let routes = lab.hosts[0].exec(&["ip", "route"]);
    assert!(!routes.contains("10.5.77.0/24"), "{routes}");
}
