//! Each check on a host that is well, and on that host with one thing wrong.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::super::facts::{
    Daemon, DaemonState, Directory, Endpoint, Facts, Host, OtherDaemon, Process, Settings,
    SubnetText, UdpSocket,
};
use super::super::firewall::{Chain, parse_iptables};
use super::super::{Finding, Verdict};
use super::CHECKS;
use crate::host::state::{Address, Link, LinkId, NextHop, Route, RouteKind, RouteProtocol, Vxlan};
use crate::route::Prefix;

const DAEMON: u32 = 100;

/// They only show what there is.
const NEVER_WRONG: [&str; 3] = ["receive-overflows", "ipsec-policies", "clock"];

fn status(kind: &str) -> Value {
    let (device, dataplane, mtu) = match kind {
        "udp" => (json!("flannel0"), "flannel0 mtu 1472 over eth0 at 192.0.2.1:8285: engine", 1472),
        "vxlan" => (json!("flannel.1"), "vxlan", 1450),
        _ => (Value::Null, "host-gw", 1500),
    };
    json!({
        "schema": 1, "version": "1.0", "ready": true, "restart_needed": false,
        "verdict": { "state": "ready", "causes": [] },
        "store": { "up": true, "lease_expires_unix": 2000, "duplicate_public_ip": null,
                   "subnet_refused": false, "refused_subnet": null },
        "peers": 1, "peer_states": { "ok": 1 },
        "lease": { "network": "10.5.0.0/16", "subnet": "10.5.1.0/24",
                   "public_ip": "192.0.2.1", "mtu_bytes": mtu },
        "interface": "eth0", "device": device, "dataplane": dataplane,
        "rules": { "kept_by": "nftables", "in_place": true, "checks": 1, "failures": 0 },
        "guard": null,
        "backend": { "kind": kind },
        "device_drops": { "eth0": { "egress": 900_000, "ingress": 9 },
                          "flannel0": { "egress": 3, "ingress": 0 } },
        "egress": { "packets_received": 1000 }, "ingress": { "packets_received": 1000 },
        "workers": [{ "engine": "io_uring" }], "worker": { "receive_overflows": 0 },
        "fast_path": { "on": false, "reason": "no" },
    })
}

fn link(index: u32, name: &str, mtu_bytes: u32) -> Link {
    Link {
        id: LinkId { index, name: name.to_owned() },
        mtu_bytes,
        is_up: true,
        has_carrier: true,
        is_loopback: false,
        mac: None,
        vxlan: None,
        veth_peer: None,
        is_bridge: false,
        alias: None,
    }
}

fn vxlan(index: u32, mtu_bytes: u32) -> Link {
    let settings = Vxlan { vni: 1, port: Some(8472), ..Vxlan::default() };
    Link { vxlan: Some(settings), ..link(index, "flannel.1", mtu_bytes) }
}

fn address(interface_index: u32, text: &str) -> Address {
    Address {
        interface_index,
        address: text.parse().unwrap(),
        prefix_length_bits: 24,
        is_permanent: true,
        is_deprecated: false,
        is_secondary: false,
    }
}

fn route(destination: &str, interface_index: u32, gateway: Option<&str>) -> Route {
    Route {
        destination: destination.parse().unwrap(),
        metric: 0,
        kind: RouteKind::Unicast,
        protocol: RouteProtocol::BOOT,
        type_of_service: 0,
        next_hops: vec![NextHop {
            interface_index,
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        }],
    }
}

fn prefix(text: &str) -> Option<Prefix> {
    Some(text.parse().unwrap())
}

/// A host that is well, beside a daemon.
fn well(kind: &str) -> Facts {
    let mut links = vec![link(1, "lo", 65536), link(2, "eth0", 1500)];
    let mut routes =
        vec![route("0.0.0.0/0", 2, Some("192.0.2.254")), route("10.5.1.0/24", 4, None)];
    let mtu = match kind {
        "udp" => {
            links.push(link(3, "flannel0", 1472));
            routes.push(route("10.5.0.0/16", 3, None));
            routes.push(route("10.5.2.0/24", 3, None));
            1472
        }
        "vxlan" => {
            links.push(vxlan(3, 1450));
            routes.push(route("10.5.2.0/24", 3, Some("10.5.2.0")));
            1450
        }
        _ => {
            routes.push(route("10.5.2.0/24", 2, Some("192.0.2.2")));
            1500
        }
    };
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
        ("net/core/rmem_max", 212_992),
        ("net/core/wmem_max", 212_992),
    ];
    let mut facts = before_start();
    facts.daemon = Daemon {
        state: DaemonState::Answered(status(kind)),
        pid: Some(DAEMON),
        settings: Some(Settings {
            subnet_file: PathBuf::from("/run/flannel/subnet.env"),
            is_kubernetes: true,
        }),
    };
    facts.process.is_daemon = true;
    facts.host = Some(Host { links, addresses, routes });
    facts.sysctls = sysctls.map(|(name, value)| (name.to_owned(), value)).into();
    facts.udp_sockets = Some(vec![socket([192, 0, 2, 1], DAEMON)]);
    let (network, subnet) = (prefix("10.5.0.0/16"), prefix("10.5.1.0/24"));
    let mtu_bytes = Some(mtu);
    facts.subnet_file = SubnetText { is_there: true, error: None, network, subnet, mtu_bytes };
    facts
}

/// A host that is well, and weftd is yet to start.
fn before_start() -> Facts {
    let mut facts = Facts {
        process: Process {
            is_daemon: false,
            is_root: true,
            capabilities: Some(u64::MAX),
            open_files_max: Some(1024),
            locked_bytes_max: Some(u64::MAX),
            processors: Some(2),
            kernel: Some((5, 10)),
        },
        tun: Some(Ok(())),
        io_uring: Some(Ok(())),
        host: Some(Host {
            links: vec![link(1, "lo", 65536), link(2, "eth0", 1500)],
            addresses: vec![address(2, "192.0.2.1")],
            routes: vec![route("0.0.0.0/0", 2, Some("192.0.2.254"))],
        }),
        udp_sockets: Some(Vec::new()),
        firewall: Some(Vec::new()),
        directory: Some(Directory {
            path: PathBuf::from("/run/flannel"),
            is_writable: true,
            free_bytes: 1 << 30,
            free_files: 1000,
            counts_files: true,
        }),
        etcd: vec![Endpoint { url: "http://a:1".to_owned(), answer: Ok((1, "etcd 3".to_owned())) }],
        clock_is_synchronised: Some(true),
        receive_errors: Some(7),
        has_ipsec: Some(true),
        now_unix: 1000,
        ..Facts::default()
    };
    facts.sysctls.insert("net/ipv4/ip_forward".to_owned(), 1);
    facts.asked.subnet_file = PathBuf::from("/run/flannel/subnet.env");
    facts
}

fn socket(address: [u8; 4], pid: u32) -> UdpSocket {
    let (address, holders) = (Ipv4Addr::from(address), vec![(pid, "program".to_owned())]);
    UdpSocket { address, port: 8285, inode: 1, holders }
}

fn judge(id: &str, facts: &Facts) -> Finding {
    let check = CHECKS.iter().find(|check| check.id == id);
    (check.unwrap_or_else(|| panic!("no check {id}")).judge)(facts)
}

fn set(facts: &mut Facts, pointer: &str, value: Value) {
    let DaemonState::Answered(status) = &mut facts.daemon.state else { panic!("no status") };
    *status.pointer_mut(pointer).unwrap() = value;
}

fn host(facts: &mut Facts) -> &mut Host {
    facts.host.as_mut().unwrap()
}

#[test]
fn a_host_that_is_well_has_no_alarm() {
    let hosts = ["udp", "vxlan", "host-gw", "alloc"].map(|kind| (kind, well(kind)));
    for (kind, facts) in hosts.into_iter().chain([("before", before_start())]) {
        for check in CHECKS {
            let finding = (check.judge)(&facts);
            let is_calm = matches!(finding.verdict, Verdict::Ok | Verdict::Skipped);
            assert!(is_calm, "{kind} {}: {finding:?}", check.id);
            let is_ok = finding.verdict == Verdict::Ok;
            assert!(kind != "udp" || is_ok, "beside udp all can be looked at: {}", check.id);
        }
    }
}

type Fault = (&'static str, Verdict, &'static str, fn(&mut Facts));

/// Faults of the daemon, of its process and of its stores.
const OF_THE_DAEMON: &[Fault] = &[
    ("daemon-answers", Verdict::Warning, "nobody serves", |it| {
        it.daemon.state = DaemonState::Stale;
    }),
    ("daemon-answers", Verdict::Warning, "another network namespace", |it| {
        it.daemon.state = DaemonState::Elsewhere;
    }),
    ("daemon-answers", Verdict::Failed, "no answer", |it| {
        it.daemon.state = DaemonState::Mute("no answer".to_owned());
    }),
    ("daemon-state", Verdict::Failed, "degraded: a; b", |it| {
        set(it, "/verdict", json!({ "state": "degraded", "causes": ["a", "b"] }));
    }),
    ("peers", Verdict::Failed, "2 peers are silent, 1 not set up", |it| {
        set(it, "/peer_states", json!({ "silent": 2, "not-set-up": 1 }));
    }),
    ("other-daemon", Verdict::Failed, "flanneld (pid 7) also uses", |it| {
        let subnet_file = it.asked.subnet_file.clone();
        it.others = vec![OtherDaemon { pid: 7, name: "flanneld".to_owned(), subnet_file }];
    }),
    ("tunnel-port", Verdict::Failed, "8285 on 0.0.0.0 is taken by program (pid 7)", |it| {
        it.udp_sockets.as_mut().unwrap().push(socket([0, 0, 0, 0], 7));
    }),
    ("subnet-file", Verdict::Failed, "weftd 10.5.1.0/24 of 10.5.0.0/16", |it| {
        it.subnet_file.subnet = None;
    }),
    ("subnet-file", Verdict::Failed, "there is no", |it| it.subnet_file.is_there = false),
    ("subnet-file", Verdict::Warning, "has MTU 1400, weftd 1472", |it| {
        it.subnet_file.mtu_bytes = Some(1400);
    }),
    ("subnet-directory", Verdict::Failed, "can't be written", |it| {
        it.directory.as_mut().unwrap().is_writable = false;
    }),
    ("subnet-directory", Verdict::Failed, "0 bytes free", |it| {
        it.directory.as_mut().unwrap().free_bytes = 0;
    }),
    ("subnet-directory", Verdict::Failed, "0 files free", |it| {
        it.directory.as_mut().unwrap().free_files = 0;
    }),
    ("public-address", Verdict::Failed, "host b", |it| {
        set(it, "/store/duplicate_public_ip", json!("host b"));
    }),
    ("node-subnet", Verdict::Failed, "10.5.9.0/24", |it| {
        set(it, "/store/subnet_refused", json!(true));
        set(it, "/store/refused_subnet", json!("10.5.9.0/24"));
    }),
    ("restart-needed", Verdict::Warning, "another configuration", |it| {
        set(it, "/restart_needed", json!(true));
    }),
    ("firewall-rules", Verdict::Failed, "nftables: not in place", |it| {
        set(it, "/rules/in_place", json!(false));
    }),
    ("device-drops", Verdict::Warning, "flannel0 dropped 5000 packets", |it| {
        set(it, "/device_drops/flannel0/egress", json!(5000));
    }),
    ("etcd-endpoints", Verdict::Failed, "http://a:1: refused", |it| {
        it.etcd[0].answer = Err("refused".to_owned());
    }),
    ("etcd-endpoints", Verdict::Warning, "http://b:1: refused", |it| {
        it.etcd.push(Endpoint { url: "http://b:1".to_owned(), answer: Err("refused".to_owned()) });
    }),
    ("lease-time", Verdict::Failed, "ended 8m20s ago", |it| it.now_unix = 2500),
    ("tun-device", Verdict::Failed, "No such file", |it| {
        it.daemon.state = DaemonState::Absent;
        it.tun = Some(Err("No such file".to_owned()));
    }),
    ("cap-net-admin", Verdict::Failed, "no CAP_NET_ADMIN", |it| it.process.capabilities = Some(0)),
    ("cap-net-raw", Verdict::Warning, "no CAP_NET_RAW", |it| it.process.capabilities = Some(0)),
    ("cap-bpf", Verdict::Warning, "no CAP_BPF", |it| it.process.capabilities = Some(0)),
    ("io-uring", Verdict::Warning, "refused, kernel.io_uring_disabled is 2", |it| {
        it.io_uring = Some(Err("refused".to_owned()));
        it.sysctls.insert("kernel/io_uring_disabled".to_owned(), 2);
        set(it, "/workers/0/engine", json!("mmsg"));
    }),
    ("open-files", Verdict::Warning, "may open 64 files", |it| {
        it.process.open_files_max = Some(64);
    }),
    ("locked-memory", Verdict::Warning, "may lock 65536 bytes", |it| {
        it.process.locked_bytes_max = Some(65536);
    }),
    ("processors", Verdict::Warning, "workers: 1, allowed processors: 0", |it| {
        it.process.processors = Some(0);
    }),
];

/// Faults of the host.
const OF_THE_HOST: &[Fault] = &[
    ("external-interface", Verdict::Failed, "no longer has 192.0.2.1", |it| {
        host(it).addresses[0].address = Ipv4Addr::new(192, 0, 2, 7);
    }),
    ("external-interface", Verdict::Failed, "eth0 is gone", |it| _ = host(it).links.remove(1)),
    ("external-interface", Verdict::Failed, "eth9", |it| {
        it.daemon.state = DaemonState::Absent;
        it.asked.interface = Some("eth9".to_owned());
    }),
    ("external-interface", Verdict::Warning, "to find", |it| {
        it.daemon.state = DaemonState::Absent;
        host(it).routes.clear();
    }),
    ("external-link", Verdict::Failed, "eth0 is down", |it| host(it).links[1].is_up = false),
    ("external-link", Verdict::Failed, "no carrier", |it| host(it).links[1].has_carrier = false),
    ("overlay-device", Verdict::Failed, "flannel0 is not there", |it| {
        host(it).links.remove(2);
    }),
    ("overlay-device", Verdict::Failed, "flannel0 is down", |it| host(it).links[2].is_up = false),
    ("overlay-mtu", Verdict::Failed, "flannel0 has MTU 1473", |it| {
        host(it).links[2].mtu_bytes = 1473;
    }),
    ("bridge-mtu", Verdict::Warning, "cni0 has MTU 1500, the overlay 1472", |it| {
        host(it).links[3].mtu_bytes = 1500;
    }),
    ("overlay-route", Verdict::Failed, "no route 10.5.0.0/16 dev flannel0", |it| {
        host(it).routes.remove(2);
    }),
    ("foreign-routes", Verdict::Failed, "10.5.3.0/24 dev eth0", |it| {
        host(it).routes.push(route("10.5.3.0/24", 2, Some("192.0.2.9")));
    }),
    ("foreign-routes", Verdict::Failed, "10.5.0.0/16 dev eth0", |it| {
        let all = &mut host(it).routes;
        all.iter_mut().for_each(|route| route.metric = 10);
        all.push(route("10.5.0.0/16", 2, None));
    }),
    ("address-overlap", Verdict::Warning, "cni0 has 10.5.9.1", |it| {
        host(it).addresses.push(address(4, "10.5.9.1"));
    }),
    ("stale-devices", Verdict::Warning, "flannel.1 beside backend udp", |it| {
        host(it).links.push(vxlan(9, 1450));
    }),
    ("other-networks", Verdict::Warning, "cilium_host is a device of Cilium", |it| {
        host(it).links.push(link(9, "cilium_host", 1500));
    }),
    ("ip-forward", Verdict::Failed, "is 0", |it| {
        it.sysctls.insert("net/ipv4/ip_forward".to_owned(), 0);
    }),
    ("device-forwarding", Verdict::Failed, "flannel0.forwarding is 0", |it| {
        it.sysctls.insert("net/ipv4/conf/flannel0/forwarding".to_owned(), 0);
    }),
    ("rp-filter", Verdict::Warning, "strict", |it| {
        host(it).routes.push(route("10.5.3.0/24", 2, None));
    }),
    ("bridge-netfilter", Verdict::Warning, "is 0", |it| {
        it.sysctls.insert("net/bridge/bridge-nf-call-iptables".to_owned(), 0);
    }),
    ("bridge-netfilter", Verdict::Warning, "not loaded", |it| {
        it.sysctls.remove("net/bridge/bridge-nf-call-iptables");
    }),
    ("conntrack-table", Verdict::Warning, "800 of 1000", |it| {
        it.sysctls.insert("net/netfilter/nf_conntrack_count".to_owned(), 800);
    }),
    ("conntrack-table", Verdict::Failed, "910 of 1000", |it| {
        it.sysctls.insert("net/netfilter/nf_conntrack_count".to_owned(), 910);
    }),
    ("socket-buffers", Verdict::Warning, "rmem_max 212992", |it| it.process.capabilities = Some(0)),
    ("firewall-input", Verdict::Warning, "UDP port 8285 is closed", |it| {
        it.firewall = Some(parse_iptables("*filter\n:INPUT DROP [0:0]\n"));
    }),
    ("port-guard", Verdict::Failed, "can't be kept, 3 failures", |it| {
        set(it, "/guard", json!({ "port": 8285, "peers": 1, "in_place": false, "failures": 3 }));
    }),
    ("port-guard", Verdict::Warning, "weft-guard-10.5.0.0-16 of an earlier weftd", |it| {
        let table = "ip weft-guard-10.5.0.0-16".to_owned();
        it.firewall = Some(vec![Chain { table, ..Chain::default() }]);
    }),
    ("firewall-forward", Verdict::Warning, "policy of FORWARD", |it| {
        it.firewall = Some(parse_iptables("*filter\n:FORWARD DROP [0:0]\n"));
    }),
];

#[test]
fn each_fault_is_named() {
    let mut ids = BTreeSet::from(NEVER_WRONG);
    for (id, verdict, shows, break_it) in OF_THE_DAEMON.iter().chain(OF_THE_HOST) {
        let mut facts = well("udp");
        break_it(&mut facts);
        let finding = judge(id, &facts);
        assert_eq!(finding.verdict, *verdict, "{id}: {finding:?}");
        assert!(finding.evidence.contains(shows), "{id} does not show {shows:?}: {finding:?}");
        assert!(finding.cure.is_some_and(|cure| cure.len() > 5), "{id} has no cure");
        ids.insert(id);
    }
    let all: BTreeSet<_> = CHECKS.iter().map(|check| check.id).collect();
    assert_eq!(ids, all, "each check has a fault that it finds");
}

#[test]
fn what_this_user_may_not_look_at_is_skipped() {
    let mut facts = before_start();
    facts.process.is_root = false;
    facts.process.capabilities = Some(0);
    facts.tun = Some(Err("Permission denied".to_owned()));
    facts.directory.as_mut().unwrap().is_writable = false;
    facts.daemon.state = DaemonState::Forbidden("Permission denied".to_owned());
    for id in ["cap-net-admin", "cap-net-raw", "cap-bpf", "tun-device", "subnet-directory"] {
        assert_eq!(judge(id, &facts).verdict, Verdict::Skipped, "{id}");
    }
    assert_eq!(judge("daemon-answers", &facts).verdict, Verdict::Skipped);
}

#[test]
fn what_is_usual_is_no_fault() {
    let mut facts = well("vxlan");
    host(&mut facts).routes.push(route("10.5.7.0/24", 2, Some("192.0.2.7")));
    assert_eq!(judge("foreign-routes", &facts).verdict, Verdict::Ok, "direct routing");

    let mut facts = well("udp");
    host(&mut facts).routes.push(route("10.5.1.7/32", 4, None));
    assert_eq!(judge("foreign-routes", &facts).verdict, Verdict::Ok, "a route to an own pod");
    facts
        .udp_sockets
        .as_mut()
        .unwrap()
        .extend([socket([127, 0, 0, 1], 7), socket([9, 9, 9, 9], 7)]);
    assert_eq!(judge("tunnel-port", &facts).verdict, Verdict::Ok, "other addresses");

    host(&mut facts).addresses.push(address(2, "10.5.90.1"));
    host(&mut facts).routes.push(route("10.5.90.0/24", 2, None));
    assert_eq!(judge("foreign-routes", &facts).verdict, Verdict::Ok, "the hosts' own network");
    assert_eq!(judge("address-overlap", &facts).verdict, Verdict::Warning, "but not wise");

    let mut facts = before_start();
    let mut kept = socket([192, 0, 2, 1], 1);
    kept.holders[0].1 = "systemd".to_owned();
    facts.udp_sockets.as_mut().unwrap().push(kept);
    assert_eq!(judge("tunnel-port", &facts).verdict, Verdict::Ok, "systemd keeps it");
    let subnet_file = PathBuf::from("/run/other/subnet.env");
    facts.others = vec![OtherDaemon { pid: 7, name: "weftd".to_owned(), subnet_file }];
    assert_eq!(judge("other-daemon", &facts).verdict, Verdict::Ok, "another network");
}
