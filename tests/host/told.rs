//! What the tool says of other nodes and of the way to them, where a guess would be wrong.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use weft::status::Cause;

use crate::support::cluster::Cluster;
use crate::support::lab::{LEASE_TIMEOUT, Namespace, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store};
use crate::support::status::Status;

const VXLAN: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
const DIRECT: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","DirectRouting":true}}"#;
const HOST_GW: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;

/// A fault is known, on a machine that has no time.
const KNOWN: Duration = Duration::from_secs(90);

/// The tool's JSON, and its exit code.
fn weft(host: &Namespace, dir: &std::path::Path, words: &[&str]) -> (Value, Option<i32>) {
    let socket = dir.join("weft.sock").display().to_string();
    let tool = [env!("CARGO_BIN_EXE_weft")];
    let mut command: Command =
        host.command(&[&tool, words, &["-o", "json", "--socket", &socket]].concat());
    let output = command.output().expect("weft runs");
    let answer = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (answer, output.status.code())
}

#[test]
fn who_starts_it_in_a_pods_network_is_told() {
    let files = tempfile::tempdir().expect("a directory for the test");
    let network = "172.20.0.0/16";
    let config = format!(r#"{{"Network":"{network}","Backend":{{"Type":"alloc"}}}}"#);
    let store = local_store(files.path(), &config);
    let cluster = Cluster::new(1);
    let daemon = cluster.weftd(0, files.path(), &[&store]);
    let env = files.path().join("subnet.env");
    wait_until(LEASE_TIMEOUT, "it has a subnet", || env.exists());
    // The log is written a little later than the file.
    wait_until(KNOWN, "it is told", || daemon.complaints(network) > 0);
    assert_eq!(daemon.complaints(network), 1, "{}", daemon.output());
}

#[test]
fn a_table_of_all_nodes_has_leases_and_echoes_and_what_is_wrong() {
    let files = tempfile::tempdir().expect("a directory for the test");
    let store = local_store(files.path(), CONFIG);
    let cluster = Cluster::new(3);
    let dir = |host: usize| files.path().join(format!("h{host}"));
    let mut daemons: Vec<_> =
        (0..3).map(|host| cluster.weftd(host, &dir(host), &[&store])).collect();
    for host in 0..3 {
        wait_until(LEASE_TIMEOUT, "each knows the others", || {
            Status::try_of(&dir(host)).is_some_and(|status| status.routes() == 2)
        });
    }
    let table = || weft(&cluster.hosts[0], &dir(0), &["cluster"]);
    let (answer, code) = table();
    let nodes = answer["nodes"].as_array().expect("nodes");
    assert_eq!((nodes.len(), code, &answer["well"]), (3, Some(0), &true.into()), "{answer}");
    assert_eq!(nodes[0]["own_state"], "ready");
    for node in &nodes[1..] {
        assert_eq!(node["lease"]["backend"], "udp");
        assert!(node["lease"]["lease_expires_unix"].is_u64(), "{node}");
        assert_eq!(node["ping"]["finding"], "answers");
        for leg in node["ping"]["legs"].as_array().expect("legs") {
            assert!(leg["round_trip_microseconds"].is_u64(), "{node}");
        }
    }
    let lost = daemons.pop().expect("the third");
    let known = Status::of(&dir(2)).0["lease"]["subnet"].clone();
    drop(lost);
    let (answer, code) = table();
    assert_eq!(code, Some(1), "{answer}");
    for node in answer["nodes"].as_array().expect("nodes").iter().skip(1) {
        let is_lost = node["lease"]["subnet"] == known;
        let finding = if is_lost { "host-only" } else { "answers" };
        assert_eq!(node["ping"]["finding"], finding, "{node}");
    }
}

#[test]
fn an_interface_that_comes_and_goes_is_named() {
    let overlay = Overlay::start();
    let host = &overlay.lab.hosts[1];
    wait_until(KNOWN, "three losses in ten minutes are told", || {
        // The other end of the wire.
        host.exec(&["sh", "-ec", "ip link set wire0 down; sleep 0.2; ip link set wire0 up"]);
        std::thread::sleep(Duration::from_secs(1));
        let status = Status::try_of(&overlay.dir(0));
        status.is_some_and(|status| status.causes().contains(&Cause::LinkFlaps))
    });
    assert!(overlay.status(0).0["carrier_lost_lately"].as_u64() >= Some(3));
}

#[test]
fn a_peer_of_another_backend_degrades_the_node() {
    let mut overlay = Overlay::start();
    std::fs::write(overlay.files().join("store/config"), VXLAN).expect("it can be written");
    overlay.daemons.remove(1);
    overlay.daemons.insert(1, overlay.weftd(1, &[]));
    wait_until(KNOWN, "each says that the other has another backend", || {
        (0..2).all(|host| {
            let status = Status::try_of(&overlay.dir(host));
            status.is_some_and(|status| status.causes().contains(&Cause::PeerOtherBackend))
        })
    });
    let subnet = format!("{}/24", overlay.leases[1].network());
    let (answer, code) = weft(&overlay.lab.hosts[0], &overlay.dir(0), &["ping", &subnet]);
    assert_eq!((&answer["peers"][0]["finding"], code), (&"not-sent-to".into(), Some(1)));
}

#[test]
fn only_what_loses_all_long_packets_is_narrow() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let (host, subnet) = (&overlay.lab.hosts[0], format!("{}/24", overlay.leases[1].network()));
    let finding = || {
        let (answer, _) = weft(host, &overlay.dir(0), &["ping", &subnet]);
        answer["peers"][0]["finding"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(finding(), "answers");
    let drop = |rules: &str| {
        let chain = format!("chain c {{ type filter hook prerouting priority -500; {rules} }}");
        overlay.lab.hosts[1].exec(&["nft", &format!("table inet n {{ {chain}; }}")]);
    };
    let long = "iifname wire0 meta length > 1300 drop;";
    drop(&format!("{long} iifname wire0 udp dport 8285 numgen inc mod 2 == 0 drop;"));
    // Every other datagram is lost, and weftd's own count as well: of the small ones of one
    // `weft ping`, all may be lost, or none.
    let is_some_lost = || {
        let (answer, _) = weft(host, &overlay.dir(0), &["ping", &subnet]);
        let report = &answer["peers"][0];
        let legs = report["legs"].as_array().expect("legs");
        let small = legs.iter().find(|leg| leg["leg"] == "tunnel").expect("small ones");
        let count = |name: &str| small[name].as_u64().expect("a count");
        let is_some_lost = (1..count("sent")).contains(&count("answered"));
        assert!(!is_some_lost || report["finding"] == "lossy", "some are lost: {answer}");
        is_some_lost
    };
    assert!((0..5).any(|_| is_some_lost()), "five pings lost all small ones or none");
    overlay.lab.hosts[1].exec(&["nft", "delete", "table", "inet", "n"]);
    drop(long);
    let found = finding();
    // Unless the path has been measured meanwhile, and the full packets are those that it takes.
    let path_mtu_bytes = overlay.status(0).0["routes"][0]["path_mtu_bytes"].as_u64();
    let is_known = path_mtu_bytes.is_some_and(|bytes| bytes <= 1300);
    assert!(found == "full-are-lost" || is_known && found == "answers", "{found}");
}

/// The host's own echoes are answered all the while, and what its pods send arrives.
#[test]
fn pods_to_which_nothing_comes_back_are_told() {
    std::thread::scope(|scope| {
        for (config, device) in
            [(CONFIG, "flannel0"), (VXLAN, "flannel.1"), (DIRECT, "wire0"), (HOST_GW, "wire0")]
        {
            scope.spawn(move || assert_ways_back_are_told(config, device));
        }
    });
}

fn assert_ways_back_are_told(config: &str, device: &str) {
    let overlay = Overlay::start_with(config, [&[], &[]]);
    let (host, dir, pod) = (&overlay.lab.hosts[0], overlay.dir(0), overlay.pod(1).to_string());
    let told = || {
        let (answer, code) = weft(host, &dir, &["ping", &pod]);
        let report = &answer["peers"][0];
        assert_eq!(report["finding"], "answers", "{config}: {answer}");
        (report["conclusion"].as_str().unwrap_or_default().to_owned(), code)
    };
    assert!(overlay.lab.ping(0, overlay.pod(1), 56), "{config}");
    let (text, code) = told();
    assert_eq!(code, Some(0), "{config}: {text}");
    let subnet = format!("{}/24", overlay.leases[0].network());
    let forwarding = format!("/proc/sys/net/ipv4/conf/{device}/forwarding");
    let rule = |change: &str, rest: &str| format!("ip rule {change} {rest}");
    let by_interface = format!("iif {device} prohibit");
    let by_subnet = format!("to {subnet} iif {device} blackhole");
    for (inject, repair, is_checked) in [
        (rule("add", &by_interface), rule("delete", &by_interface), true),
        (rule("add", &by_subnet), rule("delete", &by_subnet), true),
        (format!("echo 0 >{forwarding}"), format!("echo 1 >{forwarding}"), false),
    ] {
        host.exec(&["sh", "-ec", &inject]);
        let (text, code) = told();
        assert_eq!(code, Some(1), "{config}: {inject}: {text}");
        assert!(text.contains(&format!("from {pod} iif {device}")), "{inject}: {text}");
        if is_checked {
            let subnet_file = dir.join("subnet.env").display().to_string();
            let (answer, _) = weft(host, &dir, &["check", "--subnet-file", &subnet_file]);
            let checks = answer["checks"].as_array().expect("checks");
            let of_peers = checks.iter().find(|it| it["id"] == "way-from-peers").expect("it");
            assert_eq!(of_peers["verdict"], "failed", "{config}: {inject}: {of_peers}");
        }
        host.exec(&["sh", "-ec", &repair]);
    }
    // The host answers nothing itself.
    overlay.lab.hosts[1].exec(&[
        "nft",
        "table inet wall { chain in { type filter hook input priority 0; icmp type echo-request \
         drop; }; }",
    ]);
    let (answer, code) = weft(host, &dir, &["ping", &pod]);
    assert_eq!(
        (&answer["peers"][0]["finding"], code),
        (&"pod-answers".into(), Some(0)),
        "{answer}"
    );
    host.exec(&["ip", "route", "add", "blackhole", &pod]);
    let (answer, code) = weft(host, &dir, &["ping", &pod]);
    assert_eq!((&answer["peers"][0]["finding"], code), (&"unsendable".into(), Some(1)), "{answer}");
    overlay.lab.hosts[1].exec(&["nft", "delete table inet wall"]);
    let (answer, code) = weft(host, &dir, &["ping", &pod]);
    assert_eq!((&answer["peers"][0]["finding"], code), (&"unsendable".into(), Some(1)), "{answer}");
}
