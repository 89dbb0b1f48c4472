//! How peers without IPv4 are: asked over IPv6, each fault is known by the state that IPv4's has,
//! and `weft ping` finds the broken leg.

use std::time::Duration;

use rustix::process::Signal;

use super::families;
use super::without_ipv4::{self, Site};
use crate::support::lab::{Process, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

/// Ten seconds are promised for a state and five for the repair, on a machine that has time.
const KNOWN: Duration = Duration::from_secs(30);

/// Nobody is at that address any more.
const NO_NEIGHBOUR: &str = "nft 'table inet wall { chain a { type filter hook input priority 0; \
                            icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } drop; }; }'";
const OVER: &str = "nft delete table inet wall";

/// Two hosts whose pods ping each other all the time, both ways.
struct Used {
    site: Site,
    pods: Vec<String>,
    pings: Vec<Process>,
}

impl Used {
    fn start(backend: &str) -> Self {
        let site = Site::start(backend);
        let pods = site.connect();
        wait_until(KNOWN, "nobody sends to the peer", || site.peer(0)["state"] == "idle");
        let ping = |(from, to): (usize, usize)| {
            site.lab.pods[from].spawn(&["ping", "-6", "-q", "-i0.2", &pods[to]])
        };
        let pings = [(0, 1), (1, 0)].map(ping).into();
        let used = Self { site, pods, pings };
        (0..2).for_each(|host| used.becomes(host, "ok"));
        used
    }

    #[track_caller]
    fn becomes(&self, host: usize, state: &str) {
        let peer = self.site.peer(host);
        let what = format!("host {host} says {state} of its peer; it says {peer}");
        wait_until(KNOWN, &what, || self.site.peer(host)["state"] == state);
    }

    /// Host 0 says this of its peer while the fault of a host lasts, with this word in the reason,
    /// and `ok` once it is gone.
    #[track_caller]
    fn fault(&self, host: usize, fault: &str, repair: &str, state: &str, reason: &str) {
        self.site.lab.hosts[host].exec(&["sh", "-ec", fault]);
        if fault == NO_NEIGHBOUR {
            // What the kernel knows it would use for a minute.
            self.site.lab.hosts[0].exec(&["ip", "-6", "neighbour", "flush", "dev", "wire0"]);
        }
        self.becomes(0, state);
        let peer = self.site.peer(0);
        let why = peer["why"].as_str().unwrap_or_default();
        assert!(why.contains(reason), "{fault}: the operator is told nothing of {reason}: {peer}");
        self.site.lab.hosts[host].exec(&["sh", "-ec", repair]);
        (0..2).for_each(|host| self.becomes(host, "ok"));
    }

    /// What `weft ping` finds of the other node, and how many answers each leg got of how many.
    fn pinged(&self, arguments: &[&str]) -> (String, bool, Vec<(String, bool)>) {
        let text = self.site.weft(0, &[&["ping", "-o", "json"], arguments].concat());
        let found: serde_json::Value = serde_json::from_str(&text).unwrap();
        let peer = &found["peers"][0];
        let leg = |leg: &serde_json::Value| {
            (leg["leg"].as_str().unwrap().to_owned(), leg["answered"] == leg["sent"])
        };
        let legs = peer["legs"].as_array().unwrap().iter().map(leg).collect();
        (peer["finding"].as_str().unwrap().to_owned(), peer["well"] == true, legs)
    }

    /// That `weft ping` gets its answers, from a pod as well.
    fn assert_pings(&self) {
        for arguments in [&["--all"][..], &["fd99::2"], &[&self.pods[1]]] {
            let (finding, well, legs) = self.pinged(arguments);
            assert_eq!((finding.as_str(), well), ("answers", true), "{arguments:?}: {legs:?}");
            let count = if arguments[0] == self.pods[1] { 4 } else { 3 };
            assert!(legs.len() == count && legs.iter().all(|leg| leg.1), "unanswered: {legs:?}");
        }
        let cluster = self.site.weft(0, &["cluster"]);
        let row = cluster.lines().find(|line| line.contains("fd99::2")).unwrap_or_default();
        assert!(row.matches("ms").count() >= 3, "no round trips to host, overlay, full: {row}");
    }
}

fn wall(chain: &str) -> String {
    format!("nft 'table inet wall {{ chain a {{ {chain} }}; }}'")
}

#[test]
fn vxlan_peers_without_ipv4_are_what_they_are() {
    let mut used = Used::start("vxlan");
    used.assert_pings();
    let inward = "type filter hook input priority 0; udp dport 8472";
    used.fault(1, &wall(&format!("{inward} drop;")), OVER, "one-way", "no echo to it is answered");
    used.fault(1, &wall(&format!("{inward} reject;")), OVER, "refused", "port is unreachable");
    let forbidden = wall(&format!("{inward} reject with icmpv6 type admin-prohibited;"));
    used.fault(1, &forbidden, OVER, "refused", "ICMPv6 type 1, code 1");
    let ignore = "sysctl -qw net.ipv6.icmp.echo_ignore_all=";
    used.fault(1, &format!("{ignore}1"), &format!("{ignore}0"), "deaf", "no fault");
    let blackhole = "ip -6 route add blackhole fd99::2/128";
    used.fault(0, blackhole, "ip -6 route del blackhole fd99::2/128", "unsendable", "ip -6 rule");
    used.fault(1, NO_NEIGHBOUR, OVER, "unsendable", "nobody on the link answers for fd99::2");
    // Behind the tunnel: pods get nothing, though each answer reaches its device.
    let behind = "type filter hook prerouting priority -300; iifname \"flannel-v6.1\" drop;";
    used.fault(0, &wall(behind), OVER, "one-way", "ip6tables-save");

    // Made anew behind the bridge, whose subnet's anycast address is that of the device.
    used.site.lab.hosts[1].exec(&["ip", "link", "del", "flannel-v6.1"]);
    wait_until(KNOWN, "the peer's end of the overlay answers again", || {
        used.pinged(&["fd99::2"]).0 == "answers"
    });
    (0..2).for_each(|host| used.becomes(host, "ok"));

    // Tunnels in both directions are cut; the host answers.
    let both = wall("type filter hook prerouting priority -300; udp dport 8472 drop;");
    used.site.lab.hosts[1].exec(&["sh", "-ec", &both]);
    let (finding, well, legs) = used.pinged(&["fd99::2"]);
    assert_eq!((finding.as_str(), well), ("host-only", false), "{legs:?}");
    used.site.lab.hosts[1].exec(&["sh", "-ec", OVER]);
    (0..2).for_each(|host| used.becomes(host, "ok"));

    // A daemon that ends takes nothing along, and one that is alone knows how its peer is.
    used.site.daemons[1].stop(Signal::KILL, Duration::from_secs(5));
    used.pings.clear();
    let ping = used.site.lab.pods[0].spawn(&["ping", "-6", "-q", "-i0.2", &used.pods[1]]);
    used.becomes(0, "ok");
    let gone = wall("type filter hook prerouting priority -300; ip6 saddr fd99::/64 drop;");
    used.site.lab.hosts[1].exec(&["sh", "-ec", &gone]);
    used.becomes(0, "silent");
    let (finding, well, legs) = used.pinged(&["fd99::2"]);
    assert_eq!((finding.as_str(), well), ("nothing", false), "{legs:?}");
    drop(ping);
}

#[test]
fn udp_peers_without_ipv4_are_what_they_are() {
    let mut used = Used::start("udp");
    used.assert_pings();
    let inward = "type filter hook input priority 0; udp dport 8285";
    used.fault(1, &wall(&format!("{inward} drop;")), OVER, "one-way", "no echo to it is answered");
    used.fault(1, &wall(&format!("{inward} reject;")), OVER, "refused", "port is unreachable");
    let ignore = "sysctl -qw net.ipv6.icmp.echo_ignore_all=";
    used.fault(1, &format!("{ignore}1"), &format!("{ignore}0"), "deaf", "no fault");
    let blackhole = "ip -6 route add blackhole fd99::2/128";
    used.fault(0, blackhole, "ip -6 route del blackhole fd99::2/128", "unsendable", "ip -6 rule");

    // Whoever is down has the others' packets wait for nothing, and the kernel asks for it.
    used.pings.truncate(1);
    used.site.lab.hosts[1].exec(&["sh", "-ec", NO_NEIGHBOUR]);
    used.site.lab.hosts[0].exec(&["ip", "-6", "neighbour", "flush", "dev", "wire0"]);
    wait_until(KNOWN, "what is sent to a host that is down is dropped at once", || {
        let status = used.site.status(0);
        let count = status.pointer("/egress/drops/tx-unresolved");
        count.and_then(serde_json::Value::as_u64) > Some(0)
    });
    used.site.lab.hosts[1].exec(&["sh", "-ec", OVER]);
    used.becomes(0, "ok");
    used.site.daemons[1].stop(Signal::KILL, Duration::from_secs(5));
    used.becomes(0, "refused");
}

#[test]
fn host_gw_peers_without_ipv4_are_what_they_are() {
    let used = Used::start("host-gw");
    used.assert_pings();
    let ignore = "sysctl -qw net.ipv6.icmp.echo_ignore_all=";
    used.fault(1, &format!("{ignore}1"), &format!("{ignore}0"), "deaf", "no fault");
    used.fault(1, NO_NEIGHBOUR, OVER, "unsendable", "nobody on the link answers for fd99::2");
    let dropped = wall("type filter hook prerouting priority -300; ip6 saddr fd00:5::/48 drop;");
    used.site.lab.hosts[1].exec(&["sh", "-ec", &dropped]);
    let (finding, well, legs) = used.pinged(&["fd99::2"]);
    assert_eq!((finding.as_str(), well), ("host-only", false), "{legs:?}");
}

#[test]
fn nobody_without_ipv4_is_asked_on_an_idle_network() {
    const COUNTER: &str = "table ip6 quiet { chain out { type filter hook output priority 0; \
                           icmpv6 type echo-request counter; }; }";
    let assert_quiet = |backend: &str| {
        let site = Site::start(backend);
        wait_until(KNOWN, "the daemons leave each other in peace", || {
            (0..2).all(|host| site.peer(host)["state"] == "idle")
        });
        site.lab.hosts.iter().for_each(|host| _ = host.exec(&["nft", COUNTER]));
        // Two echoes' worth.
        std::thread::sleep(Duration::from_secs(11));
        for host in &site.lab.hosts {
            let chain = host.exec(&["nft", "list", "chain", "ip6", "quiet", "out"]);
            assert!(chain.contains("packets 0 "), "{backend}: somebody is asked: {chain}");
        }
    };
    std::thread::scope(|scope| {
        for backend in ["udp", "vxlan", "host-gw"] {
            scope.spawn(move || assert_quiet(backend));
        }
    });
}

/// While a network gets IPv4, or loses it, some nodes have both families and others have not.
#[test]
fn a_peer_without_ipv4_is_asked_by_one_that_has_it_and_asks_that_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &without_ipv4::config("vxlan"));
    let lab = families::lab();
    let home = dir.path().join("h1");
    let _alone = lab.weftd(1, &home, &[&store, "--iface=wire0"]);
    wait_until(KNOWN, "it gets a subnet", || home.join("subnet.env").exists());
    std::fs::write(dir.path().join("store/config"), families::config("vxlan")).unwrap();
    let both = families::start(&lab, dir.path(), 0, &store);
    let pod = families::connect(&lab, 0, &both);
    wait_until(KNOWN, "they reach each other", || {
        lab.hosts[1].succeeds(&["ping", "-6", "-q", "-c1", "-W1", &pod])
    });
    let _ping = lab.hosts[1].spawn(&["ping", "-6", "-q", "-i0.2", &pod]);
    for (host, via) in [(0, "fd99::2"), (1, "fd99::1")] {
        let said = || Status::try_of(&dir.path().join(format!("h{host}"))).map(|it| it.0);
        let peer = || said().and_then(|it| it.pointer("/routes/0").cloned()).unwrap_or_default();
        let what = format!("host {host} has a peer at {via} that is ok, not {}", peer());
        wait_until(KNOWN, &what, || peer()["via"] == via && peer()["state"] == "ok");
    }
}
