//! The udp backend between hosts that have no IPv4: its datagrams go over IPv6.

use std::net::{Ipv6Addr, UdpSocket};
use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::SOON;
use crate::kernel_backends::families::{self, network, v6_subnet, wait_for_pings};
use crate::kernel_backends::without_ipv4::{Site, config};
use crate::support::lab::{PLAIN_CARD, wait_until};
use crate::support::overlay::local_store;
use crate::support::traffic::tcp_transfer;

/// The longest packet of ping's that fits: 1500 less the tunnel's 48 bytes, and the echo's own.
const PAYLOAD_BYTES: u16 = 1404;
const SEARCH_MAX: Duration = Duration::from_secs(60);

/// Two hosts whose pods have reached each other.
fn site(arguments: &[&str]) -> (Site, [Ipv6Addr; 2]) {
    let site = Site::start_with("udp", arguments);
    let pods = site.connect();
    for (own, other) in [(0, 1), (1, 0)] {
        wait_for_pings(&site.lab, own, &pods[other], PAYLOAD_BYTES);
    }
    (site, [0, 1].map(|pod: usize| pods[pod].parse().expect("an address")))
}

fn transfer_both_ways(site: &Site, pods: [Ipv6Addr; 2], bytes: u64) {
    for from in 0..2 {
        let [near, far] = [&site.lab.pods[from], &site.lab.pods[1 - from]];
        tcp_transfer(near, far, pods[1 - from], bytes, true);
    }
}

#[test]
fn tcp_goes_both_ways_with_each_engine_and_offload() {
    for arguments in [
        &["--engine=mmsg"][..],
        &["--engine=io_uring"],
        &["--offload=none"],
        &["--peer-check=strict", "--workers=2"],
    ] {
        let (site, pods) = site(arguments);
        transfer_both_ways(&site, pods, 16 << 20);
        let status = site.status(0);
        let drops = status.pointer("/ingress/drops").and_then(serde_json::Value::as_object);
        assert_eq!(drops.map(serde_json::Map::len), Some(0), "{arguments:?}: {status}");
    }
}

#[test]
fn several_workers_send_from_ports_of_their_own() {
    let (site, pods) = site(&["--workers=2"]);
    let _ping = site.lab.pods[0].spawn(&["ping", "-6", "-q", "-i0.1", &pods[1].to_string()]);
    wait_until(SEARCH_MAX, "workers send from ports of their own", || {
        site.peer(0)["from_source_ports"] == true
    });
    transfer_both_ways(&site, pods, 16 << 20);
    assert_eq!(site.peer(0)["state"], "ok");
}

/// Something on the way drops what is longer, and says nothing.
fn narrow(site: &Site, bytes: u16) {
    for host in &site.lab.hosts {
        // What is merged before it meets the filter is no longer than what came.
        host.exec(&["ethtool", "-K", "wire0", "gro", "off"]);
        host.exec(&[&["ethtool", "-K", "wire0"], &PLAIN_CARD[..PLAIN_CARD.len() - 2]].concat());
        let rule = format!("meta length > {bytes} drop");
        host.exec(&[
            "nft",
            &format!(
                "table netdev narrow {{ chain in {{ type filter hook ingress device wire0 \
                 priority 0; {rule}; }}; }}"
            ),
        ]);
    }
}

#[test]
fn a_narrow_path_is_found_and_pods_are_told() {
    let (site, pods) = site(&[]);
    narrow(&site, 1400);
    let route = || {
        let subnet = network(&site.subnets[1]);
        site.lab.hosts[0].exec(&["ip", "-6", "route", "show", &subnet, "dev", "flannel0"])
    };
    let to = pods[1].to_string();
    wait_until(SEARCH_MAX, "the route to the peer has the path's MTU", || {
        site.lab.pods[0].succeeds(&["ping", "-6", "-q", "-c1", "-W0.2", "-Mdo", "-s1404", &to]);
        route().contains("mtu 1352")
    });
    wait_until(SOON, "the peer's row has it", || site.peer(0)["path_mtu_bytes"] == 1352);
    wait_for_pings(&site.lab, 0, &to, 1304);
    transfer_both_ways(&site, pods, 4 << 20);
    site.lab.hosts.iter().for_each(|host| _ = host.exec(&["nft", "delete table netdev narrow"]));
    wait_until(SEARCH_MAX, "the path is wide again", || route().is_empty());
}

/// Of IPv6 pods can't be told so, and nothing but hosts cuts its packets.
#[test]
fn tcp_goes_over_a_path_below_ipv6s_least() {
    let (site, pods) = site(&[]);
    narrow(&site, 1300);
    let to = pods[1].to_string();
    wait_until(SEARCH_MAX, "the peer's row says what becomes of longer packets", || {
        site.lab.pods[0].succeeds(&["ping", "-6", "-q", "-c1", "-W0.2", "-Mdo", "-s1404", &to]);
        let peer = site.peer(0);
        let why = peer["why"].as_str().unwrap_or_default().to_owned();
        peer["path_mtu_bytes"] == 1252 && why.contains("TCP") && why.contains("lost")
    });
    transfer_both_ways(&site, pods, 4 << 20);
    let from = pods[0].to_string();
    for (length, words) in [("1252", "goes"), ("1260", "lost"), ("1300", "1280")] {
        let told = site.weft(0, &["explain", &from, &to, "--length", length]);
        assert!(told.contains(words), "{length}: {told}");
    }
}

/// Hosts cut what is longer than their interface takes, which IPv6 always may.
#[test]
fn a_narrow_underlay_carries_the_least_packets() {
    let site = Site::start_with("udp", &[]);
    for (host, subnet) in site.lab.hosts.iter().zip(&site.subnets) {
        host.exec(&["ip", "link", "set", "wire0", "mtu", "1280"]);
        let link = || host.exec(&["ip", "link", "show", "flannel0"]);
        wait_until(SOON, &format!("the overlay of {subnet} has IPv6's least MTU"), || {
            link().contains("mtu 1280 ")
        });
    }
    let pods = site.connect();
    for (own, other) in [(0, 1), (1, 0)] {
        wait_for_pings(&site.lab, own, &pods[other], 1232);
    }
    transfer_both_ways(&site, [0, 1].map(|pod: usize| pods[pod].parse().unwrap()), 4 << 20);
    wait_until(4 * SOON, "the status says what goes whole", || {
        wait_for_pings(&site.lab, 0, &pods[1], 1232);
        let why = site.peer(0)["why"].as_str().unwrap_or_default().to_owned();
        site.peer(0)["path_mtu_bytes"] == 1232 && why.contains("fragments")
    });
}

#[test]
fn the_guard_lets_peers_in_and_nobody_else() {
    let (site, pods) = site(&["--guard", "--iptables-resync=1"]);
    let guard = || site.status(0)["guard"].clone();
    wait_until(SOON, "the guard is in place", || {
        guard()["in_place"] == true && guard()["peers"] == 1
    });
    let [first, second] = [&site.lab.hosts[0], &site.lab.hosts[1]];
    let tables = first.exec(&["nft", "list", "ruleset"]);
    assert!(tables.contains("ip6 daddr fd99::1 udp dport 8285"), "{tables}");
    wait_for_pings(&site.lab, 1, &pods[0].to_string(), PAYLOAD_BYTES);
    second.exec(&["ip", "address", "add", "fd99::77/64", "dev", "wire0", "nodad"]);
    let stranger = second.enter(|| UdpSocket::bind("[fd99::77]:8286")).unwrap();
    for _ in 0..3 {
        stranger.send_to(b"forged", "[fd99::1]:8285").unwrap();
    }
    wait_until(2 * SOON, "what strangers send is dropped and counted", || {
        guard()["dropped_from_strangers"].as_u64() >= Some(3)
    });
    wait_for_pings(&site.lab, 1, &pods[0].to_string(), PAYLOAD_BYTES);
}

/// The next weftd goes on with the sockets of the last one.
#[test]
fn a_take_over_loses_nothing() {
    let (mut site, pods) = site(&[]);
    let device = |site: &Site| site.lab.hosts[0].exec(&["cat", "/sys/class/net/flannel0/ifindex"]);
    let made = device(&site);
    let argv = ["ping", "-6", "-q", "-i0.005", "-w4", &pods[1].to_string()];
    let mut ping = site.lab.pods[0].spawn(&argv);
    for _ in 0..3 {
        let (next, _) = site.daemon(0, &["--take-over"]);
        let mut last = std::mem::replace(&mut site.daemons[0], next);
        assert!(last.wait(Duration::from_secs(10)).success(), "{}", last.output());
    }
    assert_eq!(device(&site), made, "another device");
    ping.wait(Duration::from_secs(20));
    let said = ping.output();
    assert!(said.contains(" 0% packet loss"), "{said}");
}

/// Its device outlives weftd, with routes that would be in the way.
#[test]
fn a_network_that_loses_ipv4_and_gets_it_back_takes_a_kept_tunnel_along() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &families::config("udp"));
    let lab = families::lab();
    let host = &lab.hosts[0];
    let arguments = [store.as_str(), "--keep-tunnel"];
    let mut node = families::start_with(&lab, dir.path(), 0, &arguments);
    node.daemon.stop(Signal::TERM, Duration::from_secs(5));
    assert!(host.succeeds(&["ip", "link", "show", "flannel0"]), "it is not kept");
    std::fs::write(dir.path().join("store/config"), config("udp")).unwrap();
    let home = dir.path().join("h0");
    std::fs::remove_file(home.join("subnet.env")).unwrap();
    let mut alone = lab.weftd(0, &home, &[&store, "--iface=wire0", "--keep-tunnel"]);
    wait_until(SOON, "a node without IPv4 starts where one with it was", || {
        assert!(alone.ended().is_none(), "{}", alone.output());
        home.join("subnet.env").exists()
    });
    assert!(!v6_subnet(&home.join("subnet.env")).is_empty());
    let devices = || host.exec(&["ip", "-o", "link"]).matches(": flannel").count();
    let v4 = || host.exec(&["ip", "-4", "route", "show", "root", "10.5.0.0/16"]);
    assert_eq!((devices(), v4().as_str()), (1, ""), "something of IPv4 is left");
    alone.stop(Signal::TERM, Duration::from_secs(5));
    std::fs::write(dir.path().join("store/config"), families::config("udp")).unwrap();
    std::fs::remove_file(home.join("subnet.env")).unwrap();
    let again = families::start_with(&lab, dir.path(), 0, &arguments);
    assert_eq!((again.lease.subnet, devices()), (node.lease.subnet, 1), "another lease of IPv4");
    assert!(!v4().is_empty(), "IPv4 has no way");
}

#[test]
fn the_fast_path_refuses_by_name() {
    let (mut site, _) = site(&[]);
    assert_eq!(site.status(0)["fast_path"]["on"], false, "the programs know IPv4 outside only");
    site.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
    let home = tempfile::tempdir().unwrap();
    let arguments = [&*site.store(), "--iface=", "--fast-path=on"];
    let mut daemon = site.lab.weftd(0, home.path(), &arguments);
    wait_until(SOON, "the start ends", || daemon.ended().is_some());
    assert!(daemon.complaints("fast path") > 0, "{}", daemon.output());
}

#[test]
fn check_names_what_drops_the_tunnels_datagrams() {
    let (site, _) = site(&[]);
    let check = || site.weft(0, &["check"]);
    let names = |text: &str| text.contains("firewall-input") && text.contains("8285");
    let well = check();
    assert!(!names(&well) && !well.contains("FAIL"), "a host that is well: {well}");
    site.lab.hosts[0].exec(&[
        "nft",
        "table ip6 wall { chain in { type filter hook input priority 0; udp dport 8285 drop; }; }",
    ]);
    let walled = check();
    assert!(names(&walled), "{walled}");
    site.lab.hosts[0].exec(&[
        "nft",
        "delete table ip6 wall; table ip6 wall { chain in { type filter hook input priority 0; \
         icmpv6 type nd-neighbor-solicit drop; }; }",
    ]);
    let walled = check();
    assert!(walled.contains("firewall-input") && walled.contains("neighbour"), "{walled}");
    site.lab.hosts[0].exec(&["ip", "address", "del", "fd99::1/64", "dev", "wire0"]);
    let gone = check();
    let line = gone.lines().find(|line| line.contains("external-interface"));
    let line = line.unwrap_or_else(|| panic!("a lost address is no alarm: {gone}"));
    assert!(!line.starts_with("ok") && line.contains("fd99::1"), "{line}");
}
