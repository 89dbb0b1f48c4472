//! Faults of etcd and of what it has, met at a start and afterwards.

use std::path::Path;
use std::time::Duration;

use super::super::support::control::PREFIX;
use super::super::support::lab::{Process, SubnetEnv, WEFTD};
use super::super::support::members::{Members, Setup, Version};
use super::{Fault, Screen, assert_named};

const fn named(name: &'static str, says: &'static str) -> Fault {
    Fault { name, screen: Screen::Status, says }
}

/// Met with one of these options in place of the right one.
const WRONG_OPTIONS: &[(Fault, &str)] = &[
    (
        named(
            "nothing listens at the endpoint",
            "https://127.0.0.1:9: tcp connect error: transport error: Connection refused",
        ),
        "--etcd-endpoints=https://127.0.0.1:9",
    ),
    (
        named("the endpoint's name is not known", "failed to lookup address information"),
        "--etcd-endpoints=https://nowhere.invalid:2379",
    ),
    (
        named("--etcd-cafile is of another authority", "invalid peer certificate"),
        "--etcd-cafile=OTHER/ca.crt",
    ),
    (
        named("a wrong password", "check --etcd-username and --etcd-password"),
        "--etcd-password=wrong",
    ),
    (
        named(
            "the user has no right on the prefix",
            "give the user's role read and write permission on --etcd-prefix",
        ),
        "--etcd-prefix=/elsewhere",
    ),
];

const NO_CONFIGURATION: Fault =
    named("nobody has put a network configuration", "there is no network configuration at");
const NO_JSON: Fault =
    named("the network configuration is no JSON", "the network configuration is not a JSON object");
const NO_SUBNET: Fault = named("no subnet is free", "out of subnets");
const EXPIRED: Fault = named("the server's certificate has expired", "expired");
const STOPPED: Fault =
    named("etcd goes away under a running node", "weftd goes on with the peers known so far");

pub(super) fn faults() -> impl Iterator<Item = Fault> {
    let options = WRONG_OPTIONS.iter().map(|(fault, _)| *fault);
    options.chain([NO_CONFIGURATION, NO_JSON, NO_SUBNET, EXPIRED, STOPPED])
}

/// weftd in the namespace of the etcd, `wrong` in place of one of its options.
fn weftd(etcd: &Members, dir: &Path, wrong: Option<&str>) -> Process {
    let path = |name: &str| etcd.path(name).display().to_string();
    let right = [
        format!("--etcd-endpoints={}", etcd.urls()),
        format!("--etcd-cafile={}", path("ca.crt")),
        format!("--etcd-certfile={}", path("client.crt")),
        format!("--etcd-keyfile={}", path("client.key")),
        "--etcd-username=flannel".to_owned(),
        "--etcd-password=hush".to_owned(),
        format!("--etcd-prefix={PREFIX}"),
        format!("--subnet-file={}", dir.join("subnet.env").display()),
        "--iface=wire0".to_owned(),
        "--iptables-forward-rules=false".to_owned(),
    ];
    let mut argv = vec![WEFTD];
    argv.extend(right.iter().map(String::as_str));
    // The last word wins, but for lists.
    let name = wrong.and_then(|wrong| wrong.split('=').next()).unwrap_or("none");
    argv.retain(|word| !word.starts_with(name) || *word == WEFTD);
    argv.extend(wrong);
    etcd.namespace.spawn(&argv)
}

#[test]
fn faults_of_the_store_are_named() {
    let etcd = Members::start(Setup { version: Version::V3_4, count: 1, secure: true });
    let host = &etcd.namespace;
    host.exec(&["ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1"]);
    host.address("wire0", "172.20.0.1/24");
    host.exec(&["ip", "link", "set", "wire0", "up"]);
    host.exec(&["ip", "link", "set", "wire1", "up"]);
    let directory = tempfile::tempdir().expect("a directory for the test");
    let dir = directory.path();
    let other = tempfile::tempdir().expect("a directory for the test");
    super::super::support::etcd::make_authority(other.path());
    let try_with = |fault: Fault, wrong: Option<&str>| {
        let _daemon = weftd(&etcd, dir, wrong);
        assert_named(fault, host, dir, &[]);
    };
    try_with(NO_CONFIGURATION, None);
    let config = format!("{PREFIX}/config");
    etcd.ctl(&["put", &config, "{\"Network\":"]);
    try_with(NO_JSON, None);
    let whole = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;
    let narrow = r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.7.0","SubnetMax":"10.5.7.0"}"#;
    etcd.ctl(&["put", &config, narrow]);
    let taken = format!("{PREFIX}/subnets/10.5.7.0-24");
    etcd.ctl(&["put", &taken, r#"{"PublicIP":"192.0.2.9"}"#]);
    try_with(NO_SUBNET, None);
    etcd.ctl(&["put", &config, whole]);
    for (fault, wrong) in WRONG_OPTIONS {
        let wrong = wrong.replace("OTHER", &other.path().display().to_string());
        try_with(*fault, Some(&wrong));
    }
    let mut daemon = weftd(&etcd, dir, None);
    SubnetEnv::wait(&dir.join("subnet.env"), &mut daemon);
    etcd.kill_all();
    assert_named(STOPPED, host, dir, &[]);
    drop(daemon);
    etcd.spawn_all();
    etcd.new_server_certificate(0);
    // It ends within the second in which it was made.
    std::thread::sleep(Duration::from_secs(2));
    std::fs::remove_file(dir.join("subnet.env")).expect("it was written");
    try_with(EXPIRED, Some("--start-from-cache=false"));
}
