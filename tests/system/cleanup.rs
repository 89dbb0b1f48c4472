//! `weft cleanup` on a host that leaves the network.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::lab::{Namespace, UNDERLAY};
use crate::support::overlay::Overlay;

const PATIENCE: Duration = Duration::from_secs(10);
const CONFIG: &str = r#"{"Network":"10.5.0.0/16","EnableNFTables":true,"Backend":{"Type":"udp"}}"#;
const KEPT: [&str; 5] =
    ["--fast-path=on", "--keep-tunnel", "--ip-masq", "--iptables-forward-rules", "--guard"];

/// All that a user sees of the host's network, whoever made it. The order of rules of iptables and
/// their counters don't matter, since this daemon uses nftables.
fn state(host: &Namespace) -> [String; 5] {
    [
        host.exec(&["ip", "-o", "link"]),
        host.exec(&["ip", "route", "show", "table", "all", "proto", "boot"]),
        host.exec(&["ip", "route", "show", "table", "all", "proto", "119"]),
        host.exec(&["nft", "list", "ruleset"]),
        host.exec(&["tc", "qdisc", "show", "dev", "wire0"])
            + &host.exec(&["tc", "filter", "show", "dev", "wire0", "egress"]),
    ]
}

#[test]
fn cleanup_leaves_what_is_not_flannels() {
    let mut overlay = Overlay::start_with(CONFIG, [&[], &[]]);
    let [host, _] = &overlay.lab.hosts;
    let gateway = UNDERLAY[1].to_string();
    // Of somebody else, and close to ours.
    for words in [
        "ip link add flannel.9 type bridge",
        "ip link add mine-gro0 type veth peer name mine-gro1x",
        "ip route add 192.168.7.0/24 via GATEWAY",
        "nft add table ip mine",
        "tc qdisc add dev wire0 clsact",
    ] {
        host.exec(&words.replace("GATEWAY", &gateway).split(' ').collect::<Vec<_>>());
    }
    let filter = ["tc", "filter", "add", "dev", "wire0", "egress", "prio", "8285", "handle", "7"];
    host.exec(&[&filter[..], &["bpf", "bytecode", "1,6 0 0 0"]].concat());
    // Whether it removed what it found, and what it said.
    let weft = |host: &Namespace, dir: &std::path::Path| {
        let file = dir.join("subnet.env").display().to_string();
        let argv = [env!("CARGO_BIN_EXE_weft"), "cleanup", "--subnet-file", &file];
        let output = host.command(&argv).output().expect("weft is there");
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    };
    let (is_done, text) = weft(host, &overlay.dir(0));
    let pid = |host: usize| overlay.daemons[host].pid().as_raw_nonzero().to_string();
    assert!(!is_done && text.contains(&pid(0)), "the weftd that runs is not named: {text}");
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let (is_done, text) = weft(host, &overlay.dir(0));
    assert!(is_done && text.contains("subnet.env"), "{text}");
    let before = state(host);

    overlay.restart(0, &KEPT);
    overlay.wait_for_routes();
    let subnet = overlay.status(0).0["lease"]["subnet"].as_str().expect("a lease").to_owned();
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let [host, _] = &overlay.lab.hosts;
    assert_ne!(state(host), before, "nothing was kept");
    // What flanneld's other backends leave.
    for words in [
        "ip link add flannel.1 type vxlan id 1 dev wire0 dstport 8472",
        "ip link add flannel0-gro0 type veth peer name flannel0-gro1",
        "ip route add 10.5.200.0/24 via GATEWAY",
        "ip route add blackhole SUBNET metric 4294967295",
    ] {
        let words = words.replace("GATEWAY", &gateway).replace("SUBNET", &subnet);
        host.exec(&words.split(' ').collect::<Vec<_>>());
    }
    // The pair goes with its device or after it.
    for _ in 0..2 {
        let (is_done, text) = weft(host, &overlay.dir(0));
        assert!(is_done, "{text}");
    }
    assert_eq!(state(host), before);
    let (is_done, text) = weft(host, &overlay.dir(0));
    assert!(is_done && text.lines().count() == 1, "there is nothing to remove: {text}");
    let left: Vec<_> = std::fs::read_dir(overlay.dir(0)).expect("the directory is there").collect();
    assert!(left.is_empty(), "files are left: {left:?}");
    let never = overlay.dir(0).join("never");
    assert!(weft(host, &never).0 && !never.exists(), "a clean host got a directory");
    let (is_done, text) = weft(&overlay.lab.hosts[1], &never);
    let pid = overlay.daemons[1].pid().as_raw_nonzero().to_string();
    assert!(!is_done && text.contains(&pid), "the weftd of another subnet file: {text}");
    let (is_done, text) = weft(&overlay.lab.hosts[1], &overlay.dir(1));
    assert!(!is_done && text.contains(&pid), "{text}");
}
