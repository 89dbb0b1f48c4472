//! What `weft check` and `weft explain` say of hosts without IPv4, and that the packets agree:
//! rules of each kind that drop, forwarding that is off, and addresses that nobody forwards.

use serde_json::Value;

use super::families::wait_for_pings;
use super::without_ipv4::Site;
use crate::kernel_backends::SOON;
use crate::support::lab::{Namespace, wait_until};

/// What is found, by the id of its check: verdict and evidence.
fn found(site: &Site, id: &str) -> (String, String) {
    let text = site.weft(0, &["check", "-o", "json"]);
    let answer: Value = serde_json::from_str(&text).unwrap();
    let checks = answer["checks"].as_array().unwrap();
    let check = checks.iter().find(|it| it["id"] == id).unwrap();
    let text = |name: &str| check[name].as_str().unwrap().to_owned();
    (text("verdict"), text("evidence"))
}

fn run(host: &Namespace, commands: &str) {
    for command in commands.lines().map(str::trim).filter(|it| !it.is_empty()) {
        host.exec(&["sh", "-ec", command]);
    }
}

fn reaches(site: &Site, pod: &str) -> bool {
    site.lab.pods[0].succeeds(&["ping", "-6", "-q", "-c2", "-i0.2", "-W1", pod])
}

#[test]
fn a_host_without_ipv4_that_is_well_has_no_alarm() {
    for backend in ["vxlan", "host-gw"] {
        let site = Site::start(backend);
        let pods = site.connect();
        wait_for_pings(&site.lab, 0, &pods[1], 1300);
        site.lab.hosts[0].exec(&["ip", "link", "set", "pod0", "mtu", "1430"]);
        let is_vxlan = backend == "vxlan";
        for (id, is_read, shows) in [
            ("external-interface", true, "fd99::1"),
            ("overlay-mtu", is_vxlan, "flannel-v6.1 has MTU 1430"),
            ("bridge-mtu", true, "pod0"),
            ("pod-bridge", true, "pod0"),
            ("foreign-routes", true, "fd00:5::/48"),
            ("address-overlap", true, "fd00:5::/48"),
            ("ip-forward", true, "net.ipv6.conf.all.forwarding"),
            ("way-to-peers", true, "by IPv6"),
            ("way-from-peers", true, "by IPv6"),
            ("firewall-input", true, "neighbour discovery"),
            ("firewall-output", true, "neighbour discovery"),
            ("firewall-forward", true, "fd00:5::/48"),
        ] {
            let (verdict, evidence) = found(&site, id);
            let expected = if is_read { "ok" } else { "skipped" };
            assert_eq!(verdict, expected, "{backend} {id}: {evidence}");
            assert!(!is_read || evidence.contains(shows), "{backend} {id}: {evidence}");
        }
        let screen = site.weft(0, &["check"]);
        assert!(!screen.contains("failed "), "{backend}: an alarm on a healthy host: {screen}");
    }
}

/// Commands that break something on the first host, and those that mend it; the check that names
/// it, and by what.
type Broken = (&'static str, &'static str, &'static str, &'static str);

const BROKEN: [Broken; 10] = [
    // A part of the peer's subnet, by another program.
    (
        "for to in $(ip -6 route show dev flannel-v6.1 | cut -d' ' -f1); \
         do ip -6 route add ${to%/64}/80 dev wire0; done",
        "for to in $(ip -6 route show dev flannel-v6.1 | cut -d' ' -f1); \
         do ip -6 route del ${to%/64}/80 dev wire0; done",
        "foreign-routes",
        " dev wire0",
    ),
    // A part of this host's.
    (
        "for own in $(ip -6 -o address show dev pod0 scope global | awk '{print $4}'); \
         do ip -6 route add blackhole ${own%1/64}/80; done",
        "for own in $(ip -6 -o address show dev pod0 scope global | awk '{print $4}'); \
         do ip -6 route del blackhole ${own%1/64}/80; done",
        "foreign-routes",
        "to nowhere",
    ),
    (
        "ip -6 route del dev pod0 \
         $(ip -6 route show dev pod0 proto kernel | grep ^fd00 | cut -d' ' -f1)",
        "ip -6 route add dev pod0 \
         $(ip -6 -o address show dev pod0 scope global | awk '{print $4}')",
        "pod-bridge",
        "to pod0",
    ),
    (
        "ip6tables -A INPUT -p udp --dport 8472 -j DROP",
        "ip6tables -F INPUT",
        "firewall-input",
        "UDP port 8472",
    ),
    (
        "nft add table ip6 t
         nft add chain ip6 t c '{ type filter hook output priority 0; }'
         nft add rule ip6 t c ip6 daddr fd99::/64 udp dport 8472 drop",
        "nft delete table ip6 t",
        "firewall-output",
        "ip6 t:",
    ),
    (
        "nft add table inet t
         nft add chain inet t c '{ type filter hook forward priority 0; }'
         nft add rule inet t c ip6 daddr fd00:5::/48 drop",
        "nft delete table inet t",
        "firewall-forward",
        "inet t:",
    ),
    (
        "ip6tables -P FORWARD DROP",
        "ip6tables -P FORWARD ACCEPT",
        "firewall-forward",
        "policy of FORWARD",
    ),
    // As where somebody opens the tunnel's port and forgets the rest.
    (
        "ip6tables -A INPUT -p udp --dport 8472 -j ACCEPT
         ip6tables -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
         ip6tables -P INPUT DROP
         ip -6 neighbour flush dev wire0",
        "ip6tables -P INPUT ACCEPT
         ip6tables -F INPUT",
        "firewall-input",
        "neighbour discovery",
    ),
    (
        "sysctl -qw net.ipv6.conf.all.forwarding=0",
        "sysctl -qw net.ipv6.conf.all.forwarding=1",
        "ip-forward",
        "net.ipv6.conf.all.forwarding",
    ),
    (
        "ip -6 route add blackhole fd99::2",
        "ip -6 route del blackhole fd99::2",
        "way-to-peers",
        "fd99::2",
    ),
];

#[test]
fn what_drops_ipv6_is_named_and_the_packets_agree() {
    let site = Site::start("vxlan");
    let (pods, host) = (site.connect(), &site.lab.hosts[0]);
    // The lab's default route leads to the other host as well: pings alone don't say that it is
    // the tunnel that carries them.
    wait_until(SOON, "the peer's subnet is routed into the device", || {
        host.exec(&["ip", "-6", "route", "show", "dev", "flannel-v6.1"]).contains(" via ")
    });
    for (breaks, mends, id, shows) in BROKEN {
        wait_for_pings(&site.lab, 0, &pods[1], 1300);
        run(host, breaks);
        assert!(!reaches(&site, &pods[1]), "packets pass, so there is nothing to name: {breaks}");
        let (verdict, evidence) = found(&site, id);
        assert!(matches!(&*verdict, "warning" | "failed"), "{breaks}: {verdict} {evidence}");
        assert!(evidence.contains(shows), "{breaks}: {evidence}");
        run(host, mends);
        wait_for_pings(&site.lab, 0, &pods[1], 1300);
        let (verdict, evidence) = found(&site, id);
        assert_eq!(verdict, "ok", "after {mends}: {evidence}");
    }
}

/// Rules of IPv4, and what a device says of itself.
#[test]
fn what_stops_no_ipv6_is_no_alarm() {
    let site = Site::start("vxlan");
    let (pods, host) = (site.connect(), &site.lab.hosts[0]);
    wait_for_pings(&site.lab, 0, &pods[1], 1300);
    run(
        host,
        "iptables -P INPUT DROP
         iptables -P FORWARD DROP
         nft add table ip t
         nft add chain ip t c '{ type filter hook output priority 0; policy drop; }'
         nft add table inet u
         nft add chain inet u c '{ type filter hook input priority 0; }'
         nft add rule inet u c meta nfproto ipv4 drop
         sysctl -qw net.ipv4.ip_forward=0
         sysctl -qw net.ipv6.conf.flannel-v6/1.forwarding=0
         sysctl -qw net.ipv6.conf.pod0.forwarding=0",
    );
    assert!(reaches(&site, &pods[1]), "a setting of one device stops packets of IPv6");
    for id in ["firewall-input", "firewall-output", "firewall-forward", "ip-forward"] {
        let (verdict, evidence) = found(&site, id);
        assert_eq!(verdict, "ok", "{id}: {evidence}");
    }
    let (verdict, evidence) = found(&site, "device-forwarding");
    assert_eq!(verdict, "skipped", "{evidence}");
}

#[test]
fn what_nobody_forwards_does_not_go() {
    let site = Site::start("vxlan");
    let (pods, host) = (site.connect(), &site.lab.hosts[0]);
    wait_for_pings(&site.lab, 0, &pods[1], 1300);
    for (source, destination) in [
        (&*pods[0], "fe80::1"),
        (&pods[0], "ff02::1"),
        (&pods[0], "ff0e::1"),
        (&pods[0], "::1"),
        ("fe80::2", &pods[0]),
    ] {
        let told = site.weft(0, &["explain", source, destination]);
        assert!(told.contains(": ends here\n"), "no host forwards it, and weft says: {told}");
    }
    let outside = ["explain", &pods[0], "2001:db8::1"];
    assert!(site.weft(0, &outside).contains(": goes\n"), "{}", site.weft(0, &outside));
    run(host, "sysctl -qw net.ipv6.conf.all.forwarding=0");
    for destination in [&*pods[1], "2001:db8::1"] {
        let told = site.weft(0, &["explain", &pods[0], destination]);
        assert!(told.contains("net.ipv6.conf.all.forwarding is 0"), "{told}");
        assert!(told.contains(": ends here\n"), "the kernel forwards nothing: {told}");
    }
    assert!(!reaches(&site, &pods[1]));
    // From Linux 6.17 on, a device may be made to forward.
    let force = "net.ipv6.conf.pod0.force_forwarding";
    if host.succeeds(&["sysctl", "-qw", &format!("{force}=1")]) {
        let told = site.weft(0, &["explain", &pods[0], &pods[1]]);
        assert!(told.contains(": goes\n"), "{told}");
        run(host, "sysctl -qw net.ipv6.conf.flannel-v6/1.force_forwarding=1");
        wait_for_pings(&site.lab, 0, &pods[1], 1300);
    }
}
