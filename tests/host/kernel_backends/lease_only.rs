//! The alloc backend, and the types that are refused.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::kernel_backends::SOON;
use crate::support::lab::{Lab, Process, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

#[test]
fn alloc_leases_a_subnet_and_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), r#"{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}"#);
    let lab = Lab::two_hosts();
    let tables = || {
        let host = &lab.hosts[0];
        host.exec(&["ip", "-o", "link"]) + &host.exec(&["ip", "route"])
    };
    let before = tables();
    let mut daemon = lab.weftd(0, &dir.path().join("h0"), &[&store]);
    let lease = SubnetEnv::wait(&dir.path().join("h0/subnet.env"), &mut daemon);
    assert_eq!(lease.mtu_bytes, 1500, "nothing is added to packets");
    assert_eq!(tables(), before, "alloc changed the host");
    let key = format!("store/subnets/{}-24", lease.network());
    let value = std::fs::read_to_string(dir.path().join(key)).unwrap();
    let start = r#"{"PublicIP":"172.20.0.1","PublicIPv6":null,"Expires""#;
    assert!(value.starts_with(start), "alloc names a backend: {value}");
}

/// A running alloc backend, its files, and its lease in the store.
fn alloc(lab: &Lab, arguments: &[&str]) -> (tempfile::TempDir, Process, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), r#"{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}"#);
    let arguments = [&["--iface=wire0", store.as_str()], arguments].concat();
    let mut daemon = lab.weftd(0, &dir.path().join("h0"), &arguments);
    let lease = SubnetEnv::wait(&dir.path().join("h0/subnet.env"), &mut daemon);
    let own = dir.path().join(format!("store/subnets/{}-24", lease.network()));
    (dir, daemon, own)
}

fn replace_address(lab: &Lab) {
    let host = &lab.hosts[0];
    host.exec(&["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"]);
    host.exec(&["ip", "address", "add", "172.20.0.11/24", "dev", "wire0"]);
}

#[test]
fn alloc_follows_the_interface() {
    let lab = Lab::two_hosts();
    let (dir, daemon, own) = alloc(&lab, &[]);
    let home = dir.path().join("h0");
    replace_address(&lab);
    let begun = Instant::now();
    wait_until(SOON, "the lease says the new address", || {
        std::fs::read_to_string(&own).unwrap().contains(r#""PublicIP":"172.20.0.11""#)
    });
    println!("the lease said the new address {:?} later", begun.elapsed());
    wait_until(SOON, "so does the status", || {
        Status::of(&home).0["lease"]["public_ip"] == "172.20.0.11"
    });
    wait_until(SOON, "the log says it", || {
        daemon.output().contains("wire0 went from 172.20.0.1 to 172.20.0.11; following")
    });
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1400"]);
    wait_until(SOON, "subnet.env says the new MTU", || {
        SubnetEnv::read(&home.join("subnet.env")).is_some_and(|lease| lease.mtu_bytes == 1400)
    });
}

#[test]
fn alloc_without_following_asks_for_a_restart() {
    let lab = Lab::two_hosts();
    let (_dir, mut daemon, own) = alloc(&lab, &["--follow-address=false"]);
    replace_address(&lab);
    wait_until(SOON, "the operator is told", || daemon.complaints("--follow-address") > 0);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(daemon.complaints("--follow-address"), 1, "said again and again");
    let own = std::fs::read_to_string(&own).unwrap();
    assert!(own.contains(r#""PublicIP":"172.20.0.1""#), "the lease followed: {own}");
    assert!(daemon.ended().is_none());
}

/// Starts weftd with this `Backend` and waits for its end.
fn refusal(lab: &Lab, backend: &str, arguments: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{backend}}}"#);
    let store = local_store(dir.path(), &config);
    let arguments = [&[store.as_str()], arguments].concat();
    let mut daemon = lab.weftd(0, &dir.path().join("h0"), &arguments);
    let status = daemon.wait(Duration::from_secs(10));
    assert_eq!(status.code(), Some(1), "{}", daemon.output());
    daemon.output()
}

#[test]
fn unbuilt_backend_refuses_in_one_line() {
    let lab = Lab::two_hosts();
    for kind in ["aws-tgw", "tailscale"] {
        let said = refusal(&lab, &format!(r#"{{"Type":"{kind}"}}"#), &[]);
        let lines: Vec<_> = said.lines().filter(|line| line.starts_with('E')).collect();
        assert!(lines.len() == 1 && lines[0].contains(kind), "{said}");
    }
    let said = refusal(&lab, r#"{"Type":"host-gw"}"#, &["--public-ip=192.0.2.1", "--iface=wire0"]);
    assert!(said.contains("172.20.0.1 and 192.0.2.1"), "{said}");
}
