//! The backends beside udp, with real traffic between two hosts: what they set up, what becomes of
//! it when weftd or the device is gone, and what they leave alone.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![expect(clippy::print_stdout, reason = "measured times belong into the report of the run")]

mod checks_without_ipv4;
mod checksum;
mod direct;
mod extension;
pub(crate) mod families;
mod health_without_ipv4;
mod lease_only;
mod many;
mod on_etcd;
mod restart;
mod tables;
mod tunnel_families;
mod wireguard;
pub(crate) mod without_ipv4;

use std::path::Path;
use std::time::Duration;

use crate::support::lab::wait_until;
use crate::support::overlay::Overlay;
use crate::support::status::Status;

/// Pods get subnets below 10.5.100.0; what lies above is for leases that a test writes.
const VXLAN: &str =
    r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.99.0","Backend":{"Type":"vxlan"}}"#;
const HOST_GW: &str =
    r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.99.0","Backend":{"Type":"host-gw"}}"#;

/// A change in the store is in the kernel, and a repair is done, within this time.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// The lease of a node of any backend; `data` is JSON.
fn value(public_ip: &str, backend: &str, data: &str) -> String {
    let address = format!(r#""PublicIP":"{public_ip}","PublicIPv6":null"#);
    format!(r#"{{{address},"BackendType":"{backend}","BackendData":{data}}}"#)
}

/// What a vxlan node whose hardware address ends in `last` publishes.
fn vtep(last: u16) -> String {
    let [high, low] = last.to_be_bytes();
    format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:{high:02x}:{low:02x}"}}"#)
}

/// Writes a lease into the store of `overlay` under a key such as `10.5.100.0-24`.
fn put(files: &Path, key: &str, value: &str) {
    let hidden = files.join("next");
    std::fs::write(&hidden, value).unwrap();
    std::fs::rename(hidden, files.join("store/subnets").join(key)).unwrap();
}

/// A number that the backend of a host tells of itself.
fn told(overlay: &Overlay, host: usize, name: &str) -> u64 {
    let status = Status::of(&overlay.dir(host));
    status.0["backend"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", status.0))
}

/// Waits until a host's tables, as `argv` prints them, hold `words`, or do not.
#[track_caller]
fn wait_for_text(overlay: &Overlay, host: usize, argv: &[&str], words: &str, there: bool) {
    let namespace = &overlay.lab.hosts[host];
    let what = format!("{argv:?} on host {host} has {words:?}: {there}");
    wait_until(SOON, &what, || {
        let output = namespace.command(argv).output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains(words) == there
    });
}
