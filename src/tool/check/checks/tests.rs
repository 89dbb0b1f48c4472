//! Each check on a host that is well, and on that host with one thing wrong.

mod families;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use rustix::thread::CapabilitySet;

use super::super::facts::{
    DaemonFacts, DaemonState, Directory, Facts, FamilyFacts, Filter, OtherDaemon, OwnRoute,
    PeerWay, ProcessFacts, Resolved, SubnetFacts, UdpSocket,
};
use super::super::finding::{Finding, Judgement as Judged};
use super::super::firewall::iptables::parse as parse_iptables;
use super::CHECKS;
use crate::backend_kind::BackendKind::{self, AliVpc, AwsVpc, Gce, TencentVpc};
use crate::config::flags::Given;
use crate::config::subnet_file::Previous;
use crate::host::listing::Listing;
use crate::host::netlink::policies::{Decision, Policy};
use crate::host::state::{
    Address, Ipip, Link, LinkId, MacAddress, NextHop, PathToHost, Route, RouteKind, RouteProtocol,
    Vxlan,
};
use crate::status::{
    Backend, Cause, Direction, FastPath, Fault, Kept, Lately, Lease, LeaseIpv6, Peer, PeerState,
    Rules, State, Status, Store, TunnelEnd, Verdict, Via, Worker, WorkerCounts,
};

const DAEMON: u32 = 100;

fn other_weftd(facts: &Facts, pid: u32) -> OtherDaemon {
    OtherDaemon { pid, name: "weftd".to_owned(), subnet_file: facts.asked.subnet_file.clone() }
}

fn status(kind: BackendKind) -> Status {
    let (device, tunnel, mtu_bytes) = match kind {
        BackendKind::Udp => {
            let end = TunnelEnd::Udp("192.0.2.1:8285".parse().unwrap());
            (Some("flannel0"), Some(end), 1472)
        }
        BackendKind::Vxlan => {
            (Some("flannel.1"), Some(TunnelEnd::Vxlan { port: 8472, vni: 1 }), 1450)
        }
        BackendKind::Ipip => (Some("flannel.ipip"), None, 1480),
        BackendKind::Wireguard => {
            (Some("flannel-wg"), Some(TunnelEnd::Wireguard { port: 51820, ipv6_port: 51821 }), 1420)
        }
        BackendKind::Ipsec => (None, None, 1423),
        BackendKind::HostGw | BackendKind::Alloc | BackendKind::Extension => (None, None, 1500),
        AwsVpc | Gce | AliVpc | TencentVpc => (None, None, 1500),
    };
    let counts = Direction { packets_received: 1000, ..Direction::default() };
    Status {
        version: "1.0".to_owned(),
        ready: true,
        verdict: Verdict { state: State::Ready, ..Verdict::default() },
        store: Store { up: true, lease_expires_unix: Some(2000), ..Store::default() },
        peers: 1,
        peer_states: [(PeerState::Ok, 1)].into(),
        lease: Some(Lease {
            network: "10.5.0.0/16".parse().ok(),
            subnet: "10.5.1.0/24".parse().ok(),
            public_ip: Some([192, 0, 2, 1].into()),
            mtu_bytes,
            ipv6: None,
        }),
        interface: Some("eth0".to_owned()),
        device: device.map(str::to_owned),
        tunnel,
        rules: Some(Rules {
            kept_by: "nftables".to_owned(),
            kept: Kept { in_place: true, checks: 1, ..Kept::default() },
        }),
        backend: Some(Backend { kind: Some(kind), done: None }),
        egress: Some(counts.clone()),
        ingress: Some(counts),
        worker: Some(WorkerCounts::default()),
        workers: vec![Worker { engine: "io_uring".to_owned(), ..Worker::default() }],
        fast_path: Some(FastPath::default()),
        ..Status::default()
    }
}

fn link(index: u32, name: &str, mtu_bytes: u32) -> Link {
    Link {
        id: LinkId { index, name: name.to_owned() },
        mtu_bytes,
        is_up: true,
        has_carrier: true,
        carrier_losses: None,
        is_loopback: false,
        mac: None,
        vxlan: None,
        ipip: None,
        is_wireguard: false,
        veth_peer: None,
        controller: None,
        is_bridge: false,
        has_xdp: false,
        alias: None,
    }
}

fn vxlan(index: u32, mtu_bytes: u32) -> Link {
    let settings = Vxlan { vni: 1, port: Some(8472), ..Vxlan::default() };
    Link { vxlan: Some(settings), ..link(index, "flannel.1", mtu_bytes) }
}

fn ipip(index: u32, mtu_bytes: u32) -> Link {
    let ends = Ipip { local: [192, 0, 2, 1].into(), remote: Ipv4Addr::UNSPECIFIED };
    Link { ipip: Some(ends), ..link(index, "flannel.ipip", mtu_bytes) }
}

fn address(interface_index: u32, text: &str) -> Address {
    Address {
        interface_index,
        address: text.parse().unwrap(),
        prefix_length_bits: 24,
        is_permanent: true,
        is_deprecated: false,
        is_secondary: false,
        is_in_doubt: false,
    }
}

fn route(destination: &str, interface_index: u32, gateway: Option<&str>) -> Route {
    Route {
        destination: destination.parse().unwrap(),
        metric: 0,
        kind: RouteKind::UNICAST,
        protocol: RouteProtocol::BOOT,
        type_of_service: 0,
        mtu_bytes: None,
        next_hops: vec![NextHop {
            interface_index,
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        }],
    }
}

fn filter(has_action: bool) -> Filter {
    Filter { text: "bpf filter (egress of eth0)".to_owned(), has_action }
}

/// A route into the own subnet, and that the kernel sends by this interface.
fn own_route(table: u32, route: Route, interface_index: u32) -> OwnRoute {
    let gateway = route.next_hops.first().and_then(|hop| hop.gateway);
    let path = PathToHost { interface_index, preferred_source: None, gateway, is_plain: true };
    OwnRoute { table, route, path: Some(path) }
}

fn well(kind: BackendKind) -> Facts {
    let mut links = vec![link(1, "lo", 65536), link(2, "eth0", 1500)];
    let mut routes =
        vec![route("0.0.0.0/0", 2, Some("192.0.2.254")), route("10.5.1.0/24", 4, None)];
    let (device, to, via, mtu) = match kind {
        BackendKind::Udp => (Some(link(3, "flannel0", 1472)), "10.5.2.0/24", None, 1472),
        BackendKind::Vxlan => (Some(vxlan(3, 1450)), "10.5.2.0/24", Some("10.5.2.0"), 1450),
        BackendKind::Ipip => (Some(ipip(3, 1480)), "10.5.2.0/24", Some("192.0.2.2"), 1480),
        BackendKind::Wireguard => {
            let device = Link { is_wireguard: true, ..link(3, "flannel-wg", 1420) };
            (Some(device), "10.5.0.0/16", None, 1420)
        }
        BackendKind::Ipsec => (None, "192.0.2.0/24", None, 1423),
        BackendKind::HostGw | BackendKind::Alloc | BackendKind::Extension => {
            (None, "10.5.2.0/24", Some("192.0.2.2"), 1500)
        }
        AwsVpc | Gce | AliVpc | TencentVpc => (None, "192.0.2.0/24", None, 1500),
    };
    if kind == BackendKind::Udp {
        routes.push(route("10.5.0.0/16", 3, None));
    }
    routes.push(route(to, if device.is_some() { 3 } else { 2 }, via));
    links.extend(device);
    links.push(link(4, "cni0", mtu));
    let addresses = vec![address(2, "192.0.2.1"), address(4, "10.5.1.1")];
    let sysctls = [
        ("net/ipv4/ip_forward", 1),
        ("net/ipv4/conf/all/rp_filter", 0),
        ("net/ipv4/conf/flannel0/rp_filter", 1),
        ("net/ipv4/conf/flannel.1/rp_filter", 1),
        ("net/ipv4/conf/flannel0/forwarding", 1),
        ("net/ipv4/conf/flannel.1/forwarding", 1),
        ("net/ipv4/conf/eth0/forwarding", 1),
        ("net/bridge/bridge-nf-call-iptables", 1),
        ("net/netfilter/nf_conntrack_count", 10),
        ("net/netfilter/nf_conntrack_max", 1000),
    ];
    let mut facts = before_start();
    facts.daemon = DaemonFacts {
        state: DaemonState::Answered(Box::new(status(kind))),
        pid: Some(DAEMON),
        given: Some(Given {
            subnet_file: PathBuf::from("/run/flannel/subnet.env"),
            is_kubernetes: true,
        }),
    };
    facts.process.is_daemon = true;
    facts.host = Some(Listing { links, addresses, routes, ..Listing::default() });
    let host = Ipv4Addr::new(192, 0, 2, 2);
    facts.v4.ways = vec![PeerWay {
        host,
        subnet: "10.5.2.0/24".parse().unwrap(),
        to_refused: None,
        from_refused: None,
        pods_refused: None,
        own_pods_end: None,
        is_alarming: false,
    }];
    facts.sysctls = sysctls.map(|(name, value)| (name.to_owned(), value)).into();
    facts.udp_sockets = Some(vec![socket([192, 0, 2, 1], DAEMON)]);
    let [networks, subnets] = ["10.5.0.0/16", "10.5.1.0/24"].map(|it| it.parse().ok());
    let says = Previous { networks, subnets, mtu_bytes: Some(mtu), ..Previous::default() };
    facts.subnet_file = SubnetFacts { is_there: true, has_lock: true, error: None, says };
    facts
}

/// A host that is well, and weftd is yet to start.
fn before_start() -> Facts {
    let mut facts = Facts {
        process: ProcessFacts {
            is_daemon: false,
            is_root: true,
            capabilities: Some(CapabilitySet::all()),
            open_files_max: Some(1024),
        },
        host: Some(Listing {
            links: vec![link(1, "lo", 65536), link(2, "eth0", 1500)],
            addresses: vec![address(2, "192.0.2.1")],
            routes: vec![route("0.0.0.0/0", 2, Some("192.0.2.254"))],
            ..Listing::default()
        }),
        udp_sockets: Some(Vec::new()),
        v4: FamilyFacts { firewall: Some(Vec::new()), ..FamilyFacts::default() },
        directory: Some(Directory {
            path: PathBuf::from("/run/flannel"),
            is_writable: true,
            free_bytes: 1 << 30,
            free_files: Some(1000),
        }),
        etcd: vec![Ok("http://a:1: etcd 3".to_owned())],
        resolved: Some(vec![resolved(1, &[], None), resolved(2, &[7], Some(7))]),
        has_ipsec: Some(true),
        now_unix: 1000,
        ..Facts::default()
    };
    facts.sysctls.insert("net/ipv4/ip_forward".to_owned(), 1);
    facts.asked.subnet_file = PathBuf::from("/run/flannel/subnet.env");
    facts
}

fn with_ipv6(facts: &mut Facts) {
    let lease = said(facts).lease.as_mut().unwrap_or_else(|| panic!("no lease"));
    lease.ipv6 = Some(LeaseIpv6 {
        network: "fd00:5::/48".parse().unwrap_or_else(|_| panic!("no prefix")),
        subnet: "fd00:5:0:1::/64".parse().unwrap_or_else(|_| panic!("no prefix")),
        public_ip: None,
    });
}

fn socket(address: [u8; 4], pid: u32) -> UdpSocket {
    let (address, holders) = (IpAddr::from(address), vec![(pid, "program".to_owned())]);
    UdpSocket { address, port: 8285, holders }
}

fn judge(id: &str, facts: &Facts) -> Finding {
    let check = CHECKS.iter().find(|(known, ..)| *known == id);
    let (_, judge, _) = check.unwrap_or_else(|| panic!("no check {id}"));
    judge(facts).into()
}

/// What the daemon says.
fn said(facts: &mut Facts) -> &mut Status {
    let DaemonState::Answered(status) = &mut facts.daemon.state else { panic!("no status") };
    status
}

fn host(facts: &mut Facts) -> &mut Listing {
    facts.host.as_mut().unwrap()
}

#[test]
fn a_host_that_is_well_has_no_alarm() {
    let hosts = BackendKind::ALL.iter().map(|kind| (Some(*kind), well(*kind)));
    for (kind, facts) in hosts.chain([(None, before_start())]) {
        for (id, judge, _) in CHECKS {
            let finding: Finding = judge(&facts).into();
            let is_calm = matches!(finding.verdict, Judged::Ok | Judged::Skipped);
            assert!(is_calm, "{kind:?} {id}: {finding:?}");
            let is_ok = finding.verdict == Judged::Ok;
            assert!(
                kind != Some(BackendKind::Udp) || is_ok,
                "beside udp all can be looked at: {id}"
            );
        }
    }
}

fn alarm(facts: &mut Facts) {
    let (subnet, host) = ("10.5.2.0/24".parse().unwrap(), Ipv4Addr::new(192, 0, 2, 2));
    said(facts).routes = vec![Peer::new(subnet, None, Via::Host(host.into()), PeerState::Silent)];
}

fn policy(blocks: bool) -> Policy {
    let decision = if blocks { Decision::Blocks } else { Decision::WantsIpsec };
    let [source, destination] = ["0.0.0.0/0", "192.0.2.0/24"].map(|it| it.parse().unwrap());
    Policy { source, destination, port: Some(8285), priority: 9, decision }
}

/// Who answers for 192.0.2.N, of which 1 is this host.
fn resolved(number: u8, answers: &[u8], permanent: Option<u8>) -> Resolved {
    let mac = |last: u8| MacAddress([2, 0, 0, 0, 0, last]);
    Resolved {
        address: Ipv4Addr::new(192, 0, 2, number),
        is_own: number == 1,
        answers: answers.iter().copied().map(mac).collect(),
        permanent: permanent.map(mac),
    }
}

type Wrong = (&'static str, Judged, &'static str, fn(&mut Facts));

/// Faults of the daemon, of its process and of its stores.
const OF_THE_DAEMON: &[Wrong] = &[
    ("daemon-answers", Judged::Failed, "nobody serves", |it| {
        it.daemon.state = DaemonState::Stale;
    }),
    ("daemon-answers", Judged::Failed, "not running", |it| {
        it.daemon.state = DaemonState::Absent;
    }),
    ("daemon-answers", Judged::Warning, "another network namespace", |it| {
        it.daemon.state = DaemonState::Elsewhere(7);
    }),
    ("daemon-answers", Judged::Failed, "no answer", |it| {
        it.daemon.state = DaemonState::Mute("no answer".to_owned());
    }),
    ("daemon-state", Judged::Failed, "degraded: a; b", |it| {
        let fault = |text: &str| Fault { cause: Cause::StoreAway, text: text.to_owned() };
        let faults = ["a", "b"].map(fault).to_vec();
        said(it).verdict = Verdict { state: State::Degraded, faults, ..Verdict::default() };
    }),
    ("other-daemon", Judged::Failed, "flanneld (pid 7) also uses", |it| {
        let subnet_file = it.asked.subnet_file.clone();
        it.others = vec![OtherDaemon { pid: 7, name: "flanneld".to_owned(), subnet_file }];
    }),
    ("tunnel-port", Judged::Failed, "8285 on 0.0.0.0 is taken by program (pid 7)", |it| {
        it.udp_sockets.as_mut().unwrap().push(socket([0, 0, 0, 0], 7));
    }),
    // One that hangs while it takes over, and the one that carries packets until then.
    ("tunnel-port", Judged::Warning, "8285 on 0.0.0.0 is taken by weftd (pid 7)", |it| {
        it.daemon.state = DaemonState::Absent;
        let mut carrying = socket([0, 0, 0, 0], 7);
        carrying.holders = vec![(7, "weftd".to_owned())];
        it.udp_sockets.as_mut().unwrap().push(carrying);
        it.others = [7, 9].map(|pid| other_weftd(it, pid)).to_vec();
    }),
    ("other-daemon", Judged::Warning, "weftd (pid 7), weftd (pid 9) uses", |it| {
        it.daemon.state = DaemonState::Absent;
        it.others = [7, 9].map(|pid| other_weftd(it, pid)).to_vec();
    }),
    ("subnet-file", Judged::Failed, "weftd 10.5.1.0/24 of 10.5.0.0/16", |it| {
        it.subnet_file.says.subnets = None;
    }),
    ("subnet-file", Judged::Failed, "there is no", |it| it.subnet_file.is_there = false),
    ("subnet-file", Judged::Warning, "has MTU 1400, weftd 1472", |it| {
        it.subnet_file.says.mtu_bytes = Some(1400);
    }),
    ("subnet-directory", Judged::Failed, "can't be written", |it| {
        it.directory.as_mut().unwrap().is_writable = false;
    }),
    ("subnet-file", Judged::Failed, "is no regular file", |it| {
        it.subnet_file.error = Some("is no regular file".to_owned());
    }),
    ("subnet-directory", Judged::Warning, "0 bytes free", |it| {
        it.directory.as_mut().unwrap().free_bytes = 0;
    }),
    ("subnet-directory", Judged::Failed, "0 bytes free", |it| {
        it.directory.as_mut().unwrap().free_bytes = 0;
        it.subnet_file.is_there = false;
    }),
    ("subnet-directory", Judged::Failed, "0 files free", |it| {
        it.directory.as_mut().unwrap().free_files = Some(0);
    }),
    ("etcd-endpoints", Judged::Failed, "http://a:1: refused", |it| {
        it.etcd[0] = Err("http://a:1: refused".to_owned());
    }),
    ("etcd-endpoints", Judged::Warning, "http://b:1: refused", |it| {
        it.etcd.push(Err("http://b:1: refused".to_owned()));
    }),
    ("lease-time", Judged::Failed, "ended 8m20s ago", |it| it.now_unix = 2500),
    ("tun-device", Judged::Failed, "No such file", |it| {
        it.daemon.state = DaemonState::Absent;
        it.tun_error = Some("No such file".to_owned());
    }),
    ("cap-net-admin", Judged::Failed, "no CAP_NET_ADMIN", |it| {
        it.process.capabilities = Some(CapabilitySet::empty())
    }),
    ("cap-net-raw", Judged::Warning, "no CAP_NET_RAW", |it| {
        it.process.capabilities = Some(CapabilitySet::empty())
    }),
    ("cap-bpf", Judged::Warning, "no CAP_BPF", |it| {
        it.process.capabilities = Some(CapabilitySet::empty())
    }),
    ("io-uring", Judged::Warning, "refused, kernel.io_uring_disabled is 2", |it| {
        it.io_uring_error = Some("refused".to_owned());
        it.sysctls.insert("kernel/io_uring_disabled".to_owned(), 2);
        said(it).workers[0].engine = "mmsg".to_owned();
    }),
    ("open-files", Judged::Warning, "may open 64 files", |it| {
        it.process.open_files_max = Some(64);
    }),
];

/// Faults of the host.
const OF_THE_HOST: &[Wrong] = &[
    ("external-interface", Judged::Failed, "no longer has 192.0.2.1", |it| {
        host(it).addresses[0].address = Ipv4Addr::new(192, 0, 2, 7);
    }),
    ("external-interface", Judged::Failed, "eth0 is gone", |it| _ = host(it).links.remove(1)),
    ("external-interface", Judged::Failed, "eth9", |it| {
        it.daemon.state = DaemonState::Absent;
        it.asked.iface = Some("eth9".to_owned());
    }),
    ("external-interface", Judged::Warning, "to find", |it| {
        it.daemon.state = DaemonState::Absent;
        host(it).routes.clear();
    }),
    ("external-link", Judged::Failed, "eth0 is down", |it| host(it).links[1].is_up = false),
    ("external-link", Judged::Failed, "no carrier", |it| host(it).links[1].has_carrier = false),
    ("overlay-mtu", Judged::Failed, "flannel0 has MTU 1473", |it| {
        host(it).links[2].mtu_bytes = 1473;
    }),
    ("overlay-mtu", Judged::Failed, "IPv6 needs 1280 in flannel0", |it| {
        host(it).links[1].mtu_bytes = 1279;
        with_ipv6(it);
    }),
    ("overlay-mtu", Judged::Warning, "longer packets go in fragments", |it| {
        (host(it).links[1].mtu_bytes, host(it).links[2].mtu_bytes) = (1307, 1280);
        with_ipv6(it);
    }),
    ("overlay-mtu", Judged::Warning, "pods were told 1472", |it| {
        host(it).links[2].mtu_bytes = 1300;
    }),
    ("bridge-mtu", Judged::Warning, "cni0 has MTU 1500, the overlay 1472", |it| {
        host(it).links[3].mtu_bytes = 1500;
    }),
    ("bridge-mtu", Judged::Warning, "veth9 has MTU 1500, the overlay 1472", |it| {
        host(it).links.push(Link { controller: Some(4), ..link(9, "veth9", 1500) });
    }),
    ("pod-bridge", Judged::Failed, "cni0 is down", |it| host(it).links[3].is_up = false),
    ("pod-bridge", Judged::Failed, "cni0 has no address", |it| _ = host(it).addresses.remove(1)),
    ("pod-bridge", Judged::Failed, "no route leads into 10.5.1.0/24", |it| {
        host(it).routes.retain(|route| route.next_hops[0].interface_index != 4);
    }),
    ("pod-bridge", Judged::Failed, "no route leads into 10.5.1.0/24", |it| {
        let route = host(it).routes.iter_mut().find(|it| it.next_hops[0].interface_index == 4);
        route.unwrap().next_hops[0].interface_index = 2;
    }),
    ("pod-bridge", Judged::Failed, "cni0.forwarding is 0", |it| {
        it.sysctls.insert("net/ipv4/conf/cni0/forwarding".to_owned(), 0);
    }),
    ("pod-bridge", Judged::Failed, "packets for its pods are dropped", |it| {
        host(it).links.remove(3);
        let lately = [("own-subnet".to_owned(), Lately::default())];
        said(it).drops_lately = Some(lately.into());
    }),
    ("ipsec-policies", Judged::Failed, "blocks what is sent to 192.0.2.2", |it| {
        alarm(it);
        it.policies = vec![policy(true)];
    }),
    ("ipsec-policies", Judged::Warning, "wants IPsec for what is sent to 192.0.2.2", |it| {
        alarm(it);
        it.policies = vec![policy(false)];
    }),
    ("address-conflicts", Judged::Warning, "02:00:00:00:00:07, 02:00:00:00:00:09", |it| {
        it.resolved = Some(vec![resolved(2, &[7, 9], None)]);
    }),
    ("address-conflicts", Judged::Warning, "this host's address 192.0.2.1", |it| {
        it.resolved = Some(vec![resolved(1, &[7], None)]);
    }),
    ("neighbours", Judged::Failed, "has 02:00:00:00:00:09, and 02:00:00:00:00:07 answers", |it| {
        it.resolved = Some(vec![resolved(2, &[7], Some(9))]);
    }),
    ("egress-filters", Judged::Warning, "bpf filter (egress of eth0)", |it| {
        alarm(it);
        it.filters = vec![filter(false)];
    }),
    ("egress-filters", Judged::Warning, "bpf filter (egress of eth0)", |it| {
        said(it).backend = Some(Backend { kind: Some(BackendKind::HostGw), done: None });
        it.filters = vec![filter(true)];
    }),
    ("firewall-output", Judged::Warning, "nothing is sent to UDP port 8285", |it| {
        let rules = "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p udp --dport 8285 -j REDIRECT\n";
        it.v4.firewall = Some(parse_iptables(rules));
    }),
    ("foreign-routes", Judged::Failed, "10.5.3.0/24 dev eth0", |it| {
        host(it).routes.push(route("10.5.3.0/24", 2, Some("192.0.2.9")));
    }),
    ("foreign-routes", Judged::Failed, "10.5.0.0/16 dev eth0", |it| {
        let all = &mut host(it).routes;
        all.iter_mut().for_each(|route| route.metric = 10);
        all.push(route("10.5.0.0/16", 2, None));
    }),
    ("address-overlap", Judged::Warning, "cni0 has 10.5.9.1", |it| {
        host(it).addresses.push(address(4, "10.5.9.1"));
    }),
    ("stale-devices", Judged::Warning, "flannel.1 beside backend udp", |it| {
        host(it).links.push(vxlan(9, 1450));
    }),
    ("stale-devices", Judged::Warning, "flannel-v6.1 beside backend udp", |it| {
        host(it).links.push(Link { id: link(9, "flannel-v6.1", 0).id, ..vxlan(9, 1430) });
    }),
    ("other-networks", Judged::Warning, "cilium_host is a device of Cilium", |it| {
        host(it).links.push(link(9, "cilium_host", 1500));
    }),
    ("ip-forward", Judged::Failed, "is 0", |it| {
        it.sysctls.insert("net/ipv4/ip_forward".to_owned(), 0);
    }),
    ("ip-forward", Judged::Failed, "net.ipv6.conf.all.forwarding is 0", |it| {
        it.forwards_ipv6 = Some(false);
        let lease = said(it).lease.as_mut().unwrap_or_else(|| panic!("no lease"));
        lease.ipv6 = Some(LeaseIpv6 {
            network: "fd00:5::/48".parse().unwrap_or_else(|_| panic!("no prefix")),
            subnet: "fd00:5:0:1::/64".parse().unwrap_or_else(|_| panic!("no prefix")),
            public_ip: None,
        });
    }),
    ("device-forwarding", Judged::Failed, "flannel0.forwarding is 0", |it| {
        it.sysctls.insert("net/ipv4/conf/flannel0/forwarding".to_owned(), 0);
    }),
    ("foreign-routes", Judged::Failed, "10.5.1.128/25 dev eth0 (table 100)", |it| {
        it.v4.own_routes = vec![own_route(100, route("10.5.1.128/25", 2, None), 2)];
    }),
    ("foreign-routes", Judged::Failed, "10.5.1.0/25 dev if9", |it| {
        host(it).links.push(link(9, "if9", 1500));
        it.v4.own_routes = vec![own_route(254, route("10.5.1.0/25", 9, None), 9)];
    }),
    ("foreign-routes", Judged::Failed, "10.5.1.9/32 to nowhere", |it| {
        let route = Route { kind: RouteKind::BLACKHOLE, ..route("10.5.1.9/32", 0, None) };
        it.v4.own_routes = vec![OwnRoute { table: 254, route, path: None }];
    }),
    ("foreign-routes", Judged::Failed, "10.5.1.0/24 dev eth0 (table 254)", |it| {
        it.v4.own_routes = vec![own_route(254, route("10.5.1.0/24", 2, Some("192.0.2.9")), 2)];
    }),
    ("foreign-routes", Judged::Failed, "10.5.1.0/24 to nowhere", |it| {
        let route = Route { kind: RouteKind::BLACKHOLE, ..route("10.5.1.0/24", 0, None) };
        it.v4.own_routes = vec![OwnRoute { table: 254, route, path: None }];
    }),
    ("address-overlap", Judged::Warning, "lo has 10.5.1.7", |it| {
        host(it).addresses.push(Address { prefix_length_bits: 32, ..address(1, "10.5.1.7") });
    }),
    ("address-overlap", Judged::Warning, "cni0 has 10.5.1.7", |it| {
        host(it).addresses.push(Address { is_secondary: true, ..address(4, "10.5.1.7") });
    }),
    ("rp-filter", Judged::Warning, "strict", |it| {
        host(it).routes.push(route("10.5.3.0/24", 2, None));
    }),
    ("bridge-netfilter", Judged::Warning, "is 0", |it| {
        it.sysctls.insert("net/bridge/bridge-nf-call-iptables".to_owned(), 0);
    }),
    ("bridge-netfilter", Judged::Warning, "not loaded", |it| {
        it.sysctls.remove("net/bridge/bridge-nf-call-iptables");
    }),
    ("conntrack-table", Judged::Warning, "800 of 1000", |it| {
        it.sysctls.insert("net/netfilter/nf_conntrack_count".to_owned(), 800);
    }),
    ("conntrack-table", Judged::Failed, "910 of 1000", |it| {
        it.sysctls.insert("net/netfilter/nf_conntrack_count".to_owned(), 910);
    }),
    ("way-to-peers", Judged::Failed, "such as 192.0.2.2: a blackhole", |it| {
        it.v4.ways[0].to_refused = Some("a blackhole route".to_owned());
    }),
    ("way-to-peers", Judged::Failed, "such as 192.0.2.2: a rule", |it| {
        it.v4.ways[0].own_pods_end = Some("a rule".to_owned());
    }),
    ("way-from-peers", Judged::Failed, "192.0.2.2: the source check", |it| {
        let from_refused = Some("the source check".to_owned());
        it.v4.ways[0] = PeerWay { from_refused, is_alarming: true, ..it.v4.ways[0].clone() };
    }),
    ("way-from-peers", Judged::Failed, "192.0.2.2: a rule", |it| {
        it.v4.ways[0].pods_refused = Some("a rule".to_owned());
    }),
    ("firewall-output", Judged::Warning, "nothing is sent to UDP port 8285", |it| {
        it.v4.firewall = Some(parse_iptables("*filter\n:OUTPUT DROP [0:0]\n"));
    }),
    ("firewall-input", Judged::Warning, "is closed to 192.0.2.2", |it| {
        let rules = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -s 192.0.2.0/24 -j DROP\n";
        it.v4.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-input", Judged::Warning, "UDP port 8285 is closed", |it| {
        it.v4.firewall = Some(parse_iptables("*filter\n:INPUT DROP [0:0]\n"));
    }),
    ("firewall-forward", Judged::Warning, "send to other hosts", |it| {
        let rules = "*mangle\n:POSTROUTING DROP [0:0]\n-A POSTROUTING ! -o flannel0 -j ACCEPT\n";
        it.v4.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-forward", Judged::Warning, "-o cni0 -j DROP", |it| {
        let rules = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -o cni0 -j DROP\n";
        it.v4.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-forward", Judged::Warning, "may drop some", |it| {
        let rules = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i cni0 -p tcp -j REJECT\n";
        it.v4.firewall = Some(parse_iptables(rules));
    }),
    ("firewall-forward", Judged::Warning, "policy of FORWARD", |it| {
        it.v4.firewall = Some(parse_iptables("*filter\n:FORWARD DROP [0:0]\n"));
    }),
];

#[test]
fn each_fault_is_named() {
    let mut ids = BTreeSet::new();
    for (id, verdict, shows, break_it) in OF_THE_DAEMON.iter().chain(OF_THE_HOST) {
        let mut facts = well(BackendKind::Udp);
        break_it(&mut facts);
        let finding = judge(id, &facts);
        assert_eq!(finding.verdict, *verdict, "{id}: {finding:?}");
        assert!(finding.evidence.contains(shows), "{id} does not show {shows:?}: {finding:?}");
        assert!(finding.cure.is_some_and(|cure| cure.len() > 5), "{id} has no cure");
        ids.insert(*id);
    }
    let all: BTreeSet<_> = CHECKS.iter().map(|(id, ..)| *id).collect();
    assert_eq!(ids, all, "each check has a fault that it finds");
}

/// Whether the lease was lost only the store knows then.
#[test]
fn a_weftd_that_ended_may_have_lost_its_subnet() {
    for state in [DaemonState::Absent, DaemonState::Stale] {
        let mut facts = well(BackendKind::Udp);
        facts.daemon.state = state;
        let cure = judge("daemon-answers", &facts).cure.unwrap();
        assert!(cure.contains("`weft lease show 10.5.1.0/24`"), "{cure}");
    }
}

#[test]
fn what_this_user_may_not_look_at_is_skipped() {
    let mut facts = before_start();
    facts.process.is_root = false;
    facts.process.capabilities = Some(CapabilitySet::empty());
    facts.tun_error = Some("Permission denied".to_owned());
    facts.directory.as_mut().unwrap().is_writable = false;
    facts.daemon.state = DaemonState::Forbidden("Permission denied".to_owned());
    for id in ["cap-net-admin", "cap-net-raw", "cap-bpf", "tun-device", "subnet-directory"] {
        assert_eq!(judge(id, &facts).verdict, Judged::Skipped, "{id}");
    }
    assert_eq!(judge("daemon-answers", &facts).verdict, Judged::Skipped);
}

#[test]
fn a_part_of_a_lease_by_another_host_is_foreign() {
    let mut facts = well(BackendKind::Vxlan);
    host(&mut facts).routes.push(route("10.5.7.9/32", 2, Some("192.0.2.7")));
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Failed);
    let own = Route { protocol: RouteProtocol::WEFT, ..route("10.5.7.8/30", 2, Some("192.0.2.7")) };
    *host(&mut facts).routes.last_mut().unwrap() = own;
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Ok, "a small lease");
}

#[test]
fn the_device_of_ipv6_has_headers_of_its_own() {
    let mut facts = well(BackendKind::Vxlan);
    said(&mut facts).ipv6_device = Some("flannel-v6.1".to_owned());
    let device = |mtu| Link { id: link(9, "flannel-v6.1", 0).id, ..vxlan(9, mtu) };
    host(&mut facts).links.push(device(1450));
    let found = judge("overlay-mtu", &facts);
    assert_eq!(found.verdict, Judged::Failed, "packets of IPv6 are too long for the wire");
    assert!(found.evidence.contains("flannel-v6.1 has MTU 1450"), "{}", found.evidence);
    *host(&mut facts).links.last_mut().unwrap() = device(1430);
    assert_eq!(judge("overlay-mtu", &facts).verdict, Judged::Ok);
    assert_eq!(judge("stale-devices", &facts).verdict, Judged::Ok, "weftd's own");

    // Nor does an interface too narrow for IPv6 say anything of the device that has IPv4 alone.
    let prefix = |text: &str| text.parse().unwrap();
    let (network, subnet) = (prefix("fd00:5::/48"), prefix("fd00:5:0:1::/64"));
    let ipv6 = Some(LeaseIpv6 { network, subnet, public_ip: None });
    said(&mut facts).lease.as_mut().unwrap().ipv6 = ipv6;
    said(&mut facts).ipv6_device = None;
    host(&mut facts).links[1].mtu_bytes = 1320;
    let found = judge("overlay-mtu", &facts);
    assert!(!found.evidence.contains("IPv6 needs"), "{}", found.evidence);
}

/// As when its directory was removed: everything of it is in place.
#[test]
fn a_weftd_whose_socket_is_gone_is_in_nobodys_way() {
    let mut facts = well(BackendKind::Udp);
    let subnet_file = facts.asked.subnet_file.clone();
    facts.others = vec![OtherDaemon { pid: DAEMON, name: "weftd".to_owned(), subnet_file }];
    facts.daemon = DaemonFacts::default();
    host(&mut facts).routes.clear();
    let found = judge("daemon-answers", &facts);
    assert_eq!(found.verdict, Judged::Failed);
    for id in ["other-daemon", "tunnel-port", "external-interface"] {
        let found = judge(id, &facts);
        let is_blamed = matches!(found.verdict, Judged::Failed | Judged::Warning);
        assert!(!is_blamed, "{id}: {}", found.evidence);
    }
}

/// Each pod may have a route, the bridge another address than the first, and rules may have the
/// kernel follow no route of a table.
#[test]
fn what_leads_to_pods_takes_none_away() {
    let mut facts = well(BackendKind::HostGw);
    let local = |to| Route { kind: RouteKind::LOCAL, ..route(to, 1, None) };
    let broadcast = Route { kind: RouteKind(3), ..route("10.5.1.255/32", 4, None) };
    host(&mut facts).links.push(link(9, "veth9", 1500));
    facts.v4.own_routes = vec![
        own_route(254, route("10.5.1.7/32", 9, None), 9),
        own_route(254, route("10.5.1.128/25", 4, None), 4),
        own_route(100, route("10.5.1.0/24", 2, None), 4),
        own_route(100, Route { kind: RouteKind::BLACKHOLE, ..route("10.5.1.0/25", 0, None) }, 4),
        own_route(255, local("10.5.1.1/32"), 1),
        own_route(255, broadcast, 4),
    ];
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Ok);
    let by_own = route("10.5.1.0/24", 9, Some("10.5.1.185"));
    let blackhole = Route { kind: RouteKind::BLACKHOLE, ..route("10.5.1.0/24", 0, None) };
    let behind = OwnRoute { table: 254, route: blackhole, path: None };
    host(&mut facts).addresses.push(address(9, "10.5.1.185"));
    facts.v4.own_routes = vec![own_route(254, by_own, 9), behind];
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Ok, "by an address of this host");
    host(&mut facts).addresses.pop();
    let mut podless = well(BackendKind::Udp);
    host(&mut podless).links.remove(3);
    let blackhole = Route { kind: RouteKind::BLACKHOLE, ..route("10.5.1.0/24", 0, None) };
    podless.v4.own_routes = vec![OwnRoute { table: 254, route: blackhole, path: None }];
    assert_eq!(judge("foreign-routes", &podless).verdict, Judged::Ok, "weftd's own, before pods");
    facts.v4.own_routes = vec![own_route(255, local("10.5.1.7/32"), 1)];
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Failed, "nobody has the address");
    host(&mut facts).addresses[1].address = [10, 5, 1, 254].into();
    for id in ["address-overlap", "bridge-mtu", "pod-bridge"] {
        assert_eq!(judge(id, &facts).verdict, Judged::Ok, "{id}: the bridge's other address");
    }
}

#[test]
fn what_is_usual_is_no_fault() {
    let mut facts = well(BackendKind::Vxlan);
    host(&mut facts).routes.push(route("10.5.7.0/24", 2, Some("192.0.2.7")));
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Ok, "direct routing");

    let mut facts = well(BackendKind::Udp);
    host(&mut facts).routes.push(route("10.5.1.7/32", 4, None));
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Ok, "a route to an own pod");
    facts
        .udp_sockets
        .as_mut()
        .unwrap()
        .extend([socket([127, 0, 0, 1], 7), socket([9, 9, 9, 9], 7)]);
    assert_eq!(judge("tunnel-port", &facts).verdict, Judged::Ok, "other addresses");

    let mut bridgeless = well(BackendKind::Udp);
    host(&mut bridgeless).links[3].id.name = "veth7".to_owned();
    host(&mut bridgeless).addresses.remove(1);
    host(&mut bridgeless).routes.push(route("10.5.1.7/32", 4, None));
    let lately = [("own-subnet".to_owned(), Lately::default())];
    said(&mut bridgeless).drops_lately = Some(lately.into());
    assert_eq!(judge("pod-bridge", &bridgeless).verdict, Judged::Ok, "pods have no bridge");

    let mut behind = well(BackendKind::Udp);
    alarm(&mut behind);
    let anothers = "192.168.9.0/24".parse().unwrap();
    behind.policies = vec![
        policy(true),
        Policy { decision: Decision::Passes, priority: 1, ..policy(true) },
        Policy { source: anothers, priority: 0, ..policy(true) },
    ];
    assert_eq!(judge("ipsec-policies", &behind).verdict, Judged::Ok, "one in front lets it pass");

    let mut translated = well(BackendKind::Udp);
    said(&mut translated).lease.as_mut().unwrap().public_ip = Some([203, 0, 113, 1].into());
    let own: Option<Ipv4Addr> = translated.own_address();
    assert_eq!(own, Some([192, 0, 2, 1].into()), "no interface has that");

    facts.policies = vec![policy(true)];
    facts.filters = vec![filter(true)];
    for id in ["ipsec-policies", "egress-filters"] {
        assert_eq!(judge(id, &facts).verdict, Judged::Ok, "{id}: the peers answer");
    }

    host(&mut facts).addresses.push(address(2, "10.5.90.1"));
    host(&mut facts).routes.push(route("10.5.90.0/24", 2, None));
    assert_eq!(judge("foreign-routes", &facts).verdict, Judged::Ok, "the hosts' own network");
    assert_eq!(judge("address-overlap", &facts).verdict, Judged::Warning, "but not wise");

    let mut facts = before_start();
    let mut kept = socket([192, 0, 2, 1], 1);
    kept.holders[0].1 = "systemd".to_owned();
    facts.udp_sockets.as_mut().unwrap().push(kept);
    assert_eq!(judge("tunnel-port", &facts).verdict, Judged::Ok, "systemd keeps it");
    let subnet_file = PathBuf::from("/run/other/subnet.env");
    facts.others = vec![OtherDaemon { pid: 7, name: "weftd".to_owned(), subnet_file }];
    assert_eq!(judge("other-daemon", &facts).verdict, Judged::Ok, "another network");
}
