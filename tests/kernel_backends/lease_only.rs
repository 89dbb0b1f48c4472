//! The alloc backend, and the types that are refused.

use std::time::Duration;

use crate::support::lab::{Lab, SubnetEnv};
use crate::support::overlay::local_store;

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
fn what_is_not_built_refuses_with_one_line_that_says_so() {
    let lab = Lab::two_hosts();
    for kind in ["ipip", "wireguard", "ipsec", "aws-vpc", "gce", "ali-vpc", "tencent-vpc"] {
        let said = refusal(&lab, &format!(r#"{{"Type":"{kind}"}}"#), &[]);
        let lines: Vec<_> = said.lines().filter(|line| line.contains("not built")).collect();
        assert_eq!(lines.len(), 1, "{said}");
        assert!(lines[0].contains("Error fetching backend") && lines[0].contains(kind), "{said}");
    }
    let said = refusal(&lab, r#"{"Type":"host-gw"}"#, &["--public-ip=192.0.2.1", "--iface=wire0"]);
    assert!(said.contains("172.20.0.1 and 192.0.2.1"), "{said}");
}
