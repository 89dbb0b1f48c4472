//! Faults that befall a daemon that runs.

use super::super::support::lab::wait_until;
use super::super::support::overlay::{CONFIG, Overlay};
use super::{Fault, KNOWN, Screen, assert_named, shell};

/// A fault of two running hosts: lines of shell that cause it and end it.
struct Broken {
    fault: Fault,
    /// On which host.
    host: usize,
    breaks: &'static str,
    mends: &'static str,
}

const fn here(
    name: &'static str,
    screen: Screen,
    says: &'static str,
    breaks: &'static str,
    mends: &'static str,
) -> Broken {
    Broken { fault: Fault { name, screen, says }, host: 0, breaks, mends }
}

const fn there(
    name: &'static str,
    says: &'static str,
    breaks: &'static str,
    mends: &'static str,
) -> Broken {
    let fault = Fault { name, screen: Screen::Status, says };
    Broken { fault, host: 1, breaks, mends }
}

/// A firewall that drops the tunnel's datagrams.
const DROP_TUNNEL: &str = "nft 'table inet w { chain c { \
    type filter hook input priority 0; udp dport 8285 drop; }; }'";
/// The end of every firewall of these faults but one.
const NO_FIREWALL: &str = "nft delete table inet w";

/// Of this host's settings, devices, routes and files.
const OF_THE_HOST: &[Broken] = &[
    here(
        "forwarding is off",
        Screen::Check,
        "net.ipv4.ip_forward is 0",
        "sysctl -qw net.ipv4.ip_forward=0",
        "sysctl -qw net.ipv4.ip_forward=1",
    ),
    here(
        "the overlay's device does not forward",
        Screen::Check,
        "device-forwarding",
        "sysctl -qw net.ipv4.conf.flannel0.forwarding=0",
        "sysctl -qw net.ipv4.conf.flannel0.forwarding=1",
    ),
    here(
        "this host's firewall drops the tunnel's port",
        Screen::Check,
        "firewall-input",
        DROP_TUNNEL,
        NO_FIREWALL,
    ),
    here(
        "a default-deny policy drops what pods get",
        Screen::Check,
        "firewall-forward",
        "nft 'table inet w { chain c { \
         type filter hook forward priority 0; policy drop; iifname docker0 accept; }; }'",
        NO_FIREWALL,
    ),
    here(
        "a rule drops the TCP of pods alone",
        Screen::Check,
        "firewall-forward",
        "nft 'table inet w { chain c { \
         type filter hook forward priority 0; meta l4proto tcp drop; }; }'",
        NO_FIREWALL,
    ),
    here(
        "a rule drops the tunnel's long datagrams alone",
        Screen::Check,
        "firewall-input",
        "nft 'table inet w { chain c { \
         type filter hook input priority 0; udp dport 8285 meta length > 1300 drop; }; }'",
        NO_FIREWALL,
    ),
    here(
        "the pods' bridge has a larger MTU",
        Screen::Check,
        "cni0 has MTU 9000, the overlay 1472",
        "ip link add cni0 mtu 9000 type bridge",
        "ip link del cni0",
    ),
    here(
        "another program's route takes a peer's pods",
        Screen::Check,
        "foreign-routes",
        "ip route add $PEER_SUBNET/25 dev wire0",
        "ip route del $PEER_SUBNET/25 dev wire0",
    ),
    here(
        "strict rp_filter, and a route that is not the way back",
        Screen::Check,
        "rp-filter",
        "sysctl -qw net.ipv4.conf.flannel0.rp_filter=1; ip route add $PEER_SUBNET/25 dev wire0",
        "sysctl -qw net.ipv4.conf.flannel0.rp_filter=0; ip route del $PEER_SUBNET/25 dev wire0",
    ),
    here(
        "a device of another backend is left",
        Screen::Check,
        "flannel.1 beside backend udp",
        "ip link add flannel.1 type vxlan id 1 dev wire0 dstport 8472",
        "ip link del flannel.1",
    ),
    here(
        "another pod network is left",
        Screen::Check,
        "Calico",
        "ip link add cali12345 type bridge",
        "ip link del cali12345",
    ),
    here(
        "another interface has a pod's address",
        Screen::Check,
        "old0 has",
        "ip link add old0 type bridge; ip address add $PEER_POD/32 dev old0",
        "ip link del old0",
    ),
    here(
        "a pod's address is on a device of its host",
        Screen::Check,
        "lo has",
        "ip address add $OWN_POD/32 dev lo",
        "ip address del $OWN_POD/32 dev lo",
    ),
    here(
        "a route takes a part of this host's own subnet",
        Screen::Check,
        "to nowhere (a blackhole or the like) (table 254)",
        "ip route add blackhole $OWN_SUBNET/25",
        "ip route del blackhole $OWN_SUBNET/25",
    ),
    here(
        "this host's own pods are led elsewhere",
        Screen::Check,
        "to nowhere (a blackhole or the like) (table 254), of",
        "ip route replace blackhole $OWN_SUBNET/24",
        "ip route replace $OWN_SUBNET/24 dev pod0",
    ),
    here(
        "a rule refuses what this host's own pods send",
        Screen::Check,
        "a route or rule of type prohibit",
        "ip rule add from $OWN_SUBNET/24 prohibit",
        "ip rule del from $OWN_SUBNET/24 prohibit",
    ),
    here(
        "a route of another table takes this host's own subnet",
        Screen::Check,
        "dev wire0 (table 100)",
        "ip route add table 100 $OWN_SUBNET/24 dev wire0; ip rule add iif flannel0 lookup 100",
        "ip rule del iif flannel0 lookup 100; ip route flush table 100",
    ),
    here(
        "somebody edited subnet.env",
        Screen::Check,
        "subnet-file",
        "cp $DIR/subnet.env $DIR/kept; sed -i s/10.5.0.0/10.6.0.0/ $DIR/subnet.env",
        "mv $DIR/kept $DIR/subnet.env",
    ),
    here(
        "the status socket of a weftd that runs is gone",
        Screen::Check,
        "runs, and nobody answers",
        "mv $DIR/weft.sock $DIR/weft.sock.away",
        "mv $DIR/weft.sock.away $DIR/weft.sock",
    ),
];

/// Of the way to a peer, the store's entries, and the dataplane.
const OF_THE_PEER: &[Broken] = &[
    there("the peer's firewall drops the tunnel's port", "is SILENT", DROP_TUNNEL, NO_FIREWALL),
    there("the peer's daemon hangs", "is SILENT", "kill -STOP $PEER_PID", "kill -CONT $PEER_PID"),
    there(
        "the peer lost its route back",
        "is SILENT",
        "ip route add blackhole $OWN_ADDRESS",
        "ip route del blackhole $OWN_ADDRESS",
    ),
    there(
        "a peer sends from another address than its lease's, and the guard is on",
        "the guard dropped",
        "nft 'table ip w { chain c { \
         type filter hook postrouting priority 0; udp sport 8285 ip saddr set 172.20.0.99; }; }'",
        "nft delete table ip w",
    ),
    here(
        "the cable is out",
        Screen::Check,
        "external-link",
        "ip link set wire0 down",
        "ip link set wire0 up",
    ),
    here(
        "somebody set a wrong neighbour entry of the peer",
        Screen::Check,
        "the permanent entry of 172.20.0.2",
        "ip neighbour replace $PEER_ADDRESS lladdr 02:00:00:00:00:99 dev wire0 nud permanent",
        "ip neighbour delete $PEER_ADDRESS dev wire0",
    ),
    here(
        "the peer's address is on this host as well",
        Screen::Check,
        "lo of this host has that address",
        "ip address add $PEER_ADDRESS/32 dev lo",
        "ip address del $PEER_ADDRESS/32 dev lo",
    ),
    here(
        "an IPsec policy blocks what is sent to the peer",
        Screen::Check,
        "an IPsec policy blocks",
        "ip xfrm policy add dir out dst $PEER_ADDRESS/32 action block",
        "ip xfrm policy delete dir out dst $PEER_ADDRESS/32",
    ),
    here(
        "a tc filter takes what is sent to peers",
        Screen::Check,
        "egress-filters",
        "tc qdisc add dev wire0 clsact; tc filter add dev wire0 egress protocol ip \
         u32 match ip protocol 17 0xff action mirred egress redirect dev lo",
        "tc qdisc delete dev wire0 clsact",
    ),
];

/// Of what a host does with packets and with the store's entries; some leave counts behind, so the
/// screen is not as before.
const OF_PACKETS: &[Broken] = &[
    here(
        "pods send to a subnet that no node has",
        Screen::Status,
        "look at    no-route",
        "ping -q -c3 -i0.2 -W1 -I $OWN_SUBNET 10.5.251.9 || true",
        "true",
    ),
    here(
        "this host has no route to the peer",
        Screen::Status,
        "look at    tx-unreach",
        "ip route add unreachable $PEER_ADDRESS",
        "ip route del unreachable $PEER_ADDRESS",
    ),
    here(
        "this host's firewall forbids to send",
        Screen::Status,
        "look at    tx-eperm",
        "nft 'table inet w { chain c { \
         type filter hook output priority 0; udp dport 8285 drop; }; }'",
        NO_FIREWALL,
    ),
    here(
        "an entry of the store is no usable lease",
        Screen::Status,
        "no usable lease",
        "echo '{\"PublicIP\":\"192.0.2.7\"}' > $STORE/subnets/10.9.1.0-24",
        "rm $STORE/subnets/10.9.1.0-24",
    ),
    Broken {
        fault: Fault {
            name: "a path takes less than the MTU, and nobody says so",
            screen: Screen::Status,
            says: "the paths to 1 take less than the MTU of 1472",
        },
        host: 1,
        breaks: "nft 'table inet n { chain c { type filter hook prerouting priority -500; \
                 iifname wire0 meta length > 1300 drop; }; }'",
        mends: "nft delete table inet n",
    },
];

/// Of hosts whose kernel carries the packets without a tunnel: their own echoes are between the
/// hosts, and show nothing of it.
const OF_HOST_GW: &[Broken] = &[
    here(
        "a netdev chain drops what pods send, with host-gw",
        Screen::Check,
        "firewall-forward",
        "nft 'table netdev w { chain c { type filter hook egress device wire0 priority 0; \
         ip daddr 10.5.0.0/16 drop; }; }'",
        "nft delete table netdev w",
    ),
    here(
        "a tc filter drops what pods send, with host-gw",
        Screen::Check,
        "egress-filters",
        "tc qdisc add dev wire0 clsact; tc filter add dev wire0 egress protocol ip \
         u32 match ip dst 10.5.0.0/16 action mirred egress redirect dev lo",
        "tc qdisc delete dev wire0 clsact",
    ),
];

pub(super) fn faults() -> impl Iterator<Item = Fault> {
    [OF_THE_HOST, OF_THE_PEER, OF_PACKETS, OF_HOST_GW]
        .into_iter()
        .flatten()
        .map(|broken| broken.fault)
}

/// A fault may trip a second check, and one may depend on the machine that runs the tests.
const COMPLAINTS_MAX: usize = 3;

/// What a peer is called for a while after it was silent: what it sends arrives again, and no
/// answer has come back yet. It would hide the next fault of the peer.
const HALF_MENDED: &str = "ONE-WAY";

/// Causes each fault, and asserts that its cause is named then, and not before.
fn try_all(config: &str, all: &[Broken], flags: &[&str]) {
    let overlay = Overlay::start_with(
        config,
        [&[&["--fast-path=off"], flags].concat(), &["--fast-path=off"]],
    );
    let (host, dir) = (&overlay.lab.hosts[0], overlay.dir(0));
    let [own, peer] = overlay.leases.each_ref().map(|lease| lease.network().to_string());
    let variables = [
        ("DIR", dir.display().to_string()),
        ("STORE", overlay.files().join("store").display().to_string()),
        ("OWN_ADDRESS", "172.20.0.1".to_owned()),
        ("OWN_SUBNET", own),
        ("OWN_POD", overlay.pod(0).to_string()),
        ("PEER_ADDRESS", "172.20.0.2".to_owned()),
        ("PEER_SUBNET", peer),
        ("PEER_POD", overlay.pod(1).to_string()),
        ("PEER_PID", overlay.daemons[1].pid().as_raw_nonzero().to_string()),
    ];
    // Pods that talk, with full packets.
    let far = overlay.pod(1).to_string();
    let _pings = overlay.lab.pods[0].spawn(&["ping", "-q", "-i0.2", "-s1400", &far]);
    overlay.traffic_resumes(KNOWN, "the start");
    for Broken { fault, host: broken_host, breaks, mends } in all {
        let more: &[&str] = if fault.screen == Screen::Ping { &[&far] } else { &[] };
        let before = fault.screen.show(host, &dir, more);
        assert!(!before.contains(fault.says), "{} before it was caused: {before}", fault.name);
        shell(&overlay.lab.hosts[*broken_host], &variables, breaks);
        let screen = assert_named(*fault, host, &dir, more);
        // What the fault does to a peer shows in the state, if there was the time for it.
        let is_complaint = |line: &&str| {
            let is_bad = line.starts_with("failed") || line.starts_with("warning");
            is_bad && !line.contains("daemon-state:")
        };
        let complaints = screen.lines().filter(is_complaint).count();
        assert!(complaints <= COMPLAINTS_MAX, "{}: too much else: {screen}", fault.name);
        shell(&overlay.lab.hosts[*broken_host], &variables, mends);
        // Counts stay, and a path is measured again after minutes.
        let leaves_traces = fault.says.starts_with("look at") || fault.says.contains("paths");
        wait_until(KNOWN, &format!("all is well after: {}", fault.name), || {
            let screen = fault.screen.show(host, &dir, more);
            leaves_traces || !(screen.contains(fault.says) || screen.contains(HALF_MENDED))
        });
    }
}

#[test]
fn faults_of_the_host_are_named() {
    try_all(CONFIG, OF_THE_HOST, &[]);
}

#[test]
fn faults_of_the_way_to_a_peer_are_named() {
    try_all(CONFIG, OF_THE_PEER, &["--guard"]);
}

#[test]
fn faults_of_packets_and_entries_are_named() {
    try_all(CONFIG, OF_PACKETS, &[]);
}

#[test]
fn faults_of_host_gw_are_named() {
    let config = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
    try_all(config, OF_HOST_GW, &[]);
}
