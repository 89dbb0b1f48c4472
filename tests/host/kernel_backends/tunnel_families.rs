//! vxlan with both families: a second device for IPv6, whose tables are flannel's, whose peers are
//! repaired and which goes with the family; what fails of it costs no IPv4.

use std::net::Ipv6Addr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::families::{
    Node, config, connect, lab, network, start, wait_for_pings,
};
use crate::kernel_backends::{SOON, put};
use crate::support::lab::{Lab, Namespace, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

const LINK: &[&str] = &["ip", "-d", "link", "show", "flannel-v6.1"];
const FDB: &[&str] = &["bridge", "fdb", "show", "dev", "flannel-v6.1"];
const NEIGHBOURS: &[&str] = &["ip", "-6", "neighbour", "show", "dev", "flannel-v6.1"];
const ROUTES: &[&str] = &["ip", "-6", "route", "show"];
const ALONE: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// 1,500 bytes of the wire, less 70 of headers; of a ping 48 more.
const MTU_BYTES: u32 = 1430;
const PAYLOAD_BYTES: u16 = 1382;

/// The kernel tells nobody when an entry goes: the next comparison finds it.
const COMPARED: Duration = Duration::from_secs(40);

/// A start on a busy machine, over a local store.
const START: Duration = Duration::from_secs(20);

/// Two hosts, their daemons and the IPv6 addresses of their pods.
struct Pair {
    nodes: [Node; 2],
    pods: [String; 2],
    lab: Lab,
    store: String,
    dir: tempfile::TempDir,
}

impl Pair {
    fn start(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = local_store(dir.path(), config);
        let lab = lab();
        let nodes = [0, 1].map(|host| start(&lab, dir.path(), host, &store));
        let pods = [0, 1].map(|host| connect(&lab, host, &nodes[host]));
        lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
        let pair = Self { nodes, pods, lab, store, dir };
        pair.wait_for_traffic();
        pair
    }

    #[track_caller]
    fn wait_for_traffic(&self) {
        for (own, other) in [(0, 1), (1, 0)] {
            wait_for_pings(&self.lab, own, &self.pods[other], PAYLOAD_BYTES);
            let v4 = self.nodes[other].lease.pod_address();
            assert!(self.lab.ping(own, v4, PAYLOAD_BYTES + 20), "IPv4 is not carried");
        }
    }

    fn host(&self, host: usize) -> &Namespace {
        &self.lab.hosts[host]
    }

    fn home(&self, host: usize) -> std::path::PathBuf {
        self.dir.path().join(format!("h{host}"))
    }

    fn network(&self, host: usize) -> String {
        network(&self.nodes[host].v6)
    }

    /// What a host has published, but for when it ends.
    fn value(&self, host: usize) -> String {
        let (v4, v6) = (self.nodes[host].lease.network(), self.network(host).replace('/', "-"));
        let path = self.dir.path().join(format!("store/subnets/{v4}-24&{v6}"));
        let value = std::fs::read_to_string(path).unwrap();
        value.split(r#","Expires""#).next().unwrap().to_owned() + "}"
    }

    fn mac_v6(&self, host: usize) -> String {
        let value: serde_json::Value = serde_json::from_str(&self.value(host)).unwrap();
        value["BackendV6Data"]["VtepMAC"].as_str().unwrap_or_else(|| panic!("{value}")).to_owned()
    }

    fn restart(&mut self, host: usize) {
        self.nodes[host].daemon.stop(Signal::TERM, Duration::from_secs(5));
        self.nodes[host] = start(&self.lab, self.dir.path(), host, &self.store);
        let home = self.home(host);
        wait_until(START, "the daemon is back with its peer", || {
            Status::try_of(&home)
                .is_some_and(|status| status.0["ready"] == true && status.routes() >= 1)
        });
        // The file of the run before was there all along.
        self.nodes[host].lease = SubnetEnv::read(&home.join("subnet.env")).unwrap();
    }

    /// Waits until what `argv` prints on a host has `words`, or has not.
    #[track_caller]
    fn wait_for_text(&self, host: usize, argv: &[&str], words: &str, there: bool) {
        let what = format!("{argv:?} on host {host} has {words:?}: {there}");
        wait_until(COMPARED, &what, || {
            let output = self.host(host).command(argv).output().unwrap();
            String::from_utf8_lossy(&output.stdout).contains(words) == there
        });
    }
}

fn told(home: &Path, name: &str) -> u64 {
    Status::of(home).0["backend"][name].as_u64().unwrap()
}

#[test]
fn vxlan_carries_both_families_by_flannels_tables() {
    let pair = Pair::start(&config("vxlan"));
    for (own, other) in [(0, 1), (1, 0)] {
        let (host, mac) = (pair.host(own), pair.mac_v6(other));
        let link = host.exec(LINK);
        let vxlan = format!("vxlan id 1 local fd99::{} dev wire0", own + 1);
        let ether = format!("link/ether {}", pair.mac_v6(own));
        for words in [&vxlan, &ether, "dstport 8472 nolearning", "mtu 1430", ",UP,"] {
            assert!(link.contains(words), "`ip -d link` lacks {words:?}: {link}");
        }
        assert!(host.exec(&["ip", "link", "show", "flannel.1"]).contains("mtu 1450"));
        assert_eq!(host.exec(FDB).trim(), format!("{mac} dst fd99::{} self permanent", other + 1));
        let to = pair.network(other);
        let network = to.strip_suffix("/64").unwrap();
        assert_eq!(host.exec(NEIGHBOURS).trim(), format!("{network} lladdr {mac} PERMANENT"));
        let route = format!("{to} via {network} dev flannel-v6.1");
        let routes = host.exec(ROUTES);
        let is_it = |line: &str| line.starts_with(&route) && line.contains("onlink");
        assert!(routes.lines().any(is_it), "no {route:?} in {routes}");
        let addresses = host.exec(&["ip", "-o", "-6", "address", "show", "flannel-v6.1"]);
        let address = format!("inet6 {}/128 ", pair.network(own).strip_suffix("/64").unwrap());
        let is_alone = addresses.lines().count() == 1 && addresses.contains(&address);
        assert!(is_alone && !addresses.contains("tentative"), "{addresses}");
        assert_eq!(pair.nodes[own].lease.mtu_bytes, MTU_BYTES, "FLANNEL_MTU");
        let status = Status::of(&pair.home(own)).0;
        assert_eq!(status["lease"]["mtu_bytes"], MTU_BYTES);
        let line = status["dataplane"].as_str().unwrap();
        assert!(line.contains("flannel.1 mtu 1450") && line.contains("flannel-v6.1 mtu 1430"));
    }
    let value = pair.value(0);
    let data = format!(r#""BackendV6Data":{{"VNI":1,"VtepMAC":"{}"}}}}"#, pair.mac_v6(0));
    assert!(value.starts_with(r#"{"PublicIP":"172.20.0.1","PublicIPv6":"fd99::1","#), "{value}");
    assert!(value.ends_with(&data), "{value}");
    let [near, far] = &pair.lab.pods;
    let [there, back] = pair.pods.each_ref().map(|pod| pod.parse::<Ipv6Addr>().unwrap());
    tcp_transfer(near, far, back, 16 << 20, true);
    tcp_transfer(far, near, there, 16 << 20, true);
    tcp_transfer(near, far, pair.nodes[1].lease.pod_address(), 16 << 20, true);
}

#[test]
fn vxlan_restarts_of_both_families_lose_nothing() {
    let mut pair = Pair::start(&config("vxlan"));
    let device = |pair: &Pair| pair.host(0).exec(&["ip", "-o", "link", "show", "flannel-v6.1"]);
    let (before, value) = (device(&pair), pair.value(0));
    let stop = pair.dir.path().join("stop");
    let pings = format!(
        "while [ ! -e {} ]; do ping -6 -q -c50 -i0.01 -W5 {}; done",
        stop.display(),
        pair.pods[1]
    );
    let mut pinging = pair.lab.pods[0].spawn(&["sh", "-c", &pings]);
    for host in [0, 1, 0] {
        pair.restart(host);
        thread::sleep(Duration::from_millis(300));
    }
    std::fs::write(&stop, "").unwrap();
    pinging.wait(START);
    let said = pinging.output();
    let rounds = said.matches("packets transmitted").count();
    assert!(rounds > 0 && said.matches(" 0% packet loss").count() == rounds, "{said}");
    assert_eq!(device(&pair), before, "the device was made again by a restart");
    assert_eq!(pair.value(0), value, "peers would have to learn another address");
    // After a reboot there is no device; the hardware address is that of the lease.
    let mac = pair.mac_v6(0);
    pair.nodes[0].daemon.stop(Signal::TERM, Duration::from_secs(5));
    pair.host(0).exec(&["ip", "link", "delete", "flannel-v6.1"]);
    pair.nodes[0] = start(&pair.lab, pair.dir.path(), 0, &pair.store);
    pair.wait_for_traffic();
    assert_eq!(pair.mac_v6(0), mac);
}

#[test]
fn vxlan_repairs_what_others_remove_of_ipv6() {
    let pair = Pair::start(&config("vxlan"));
    let (host, to) = (pair.host(0), pair.network(1));
    let tables = || {
        let all = [FDB, NEIGHBOURS, &["ip", "-6", "route", "show", "dev", "flannel-v6.1"]];
        all.map(|argv| host.exec(argv))
    };
    let before = tables();
    let v4 = host.exec(&["ip", "-o", "link", "show", "flannel.1"]);
    host.exec(&["ip", "link", "delete", "flannel-v6.1"]);
    wait_for_pings(&pair.lab, 0, &pair.pods[1], PAYLOAD_BYTES);
    wait_until(SOON, "all peers are set up again", || tables() == before);
    assert_eq!(host.exec(&["ip", "-o", "link", "show", "flannel.1"]), v4, "the other one as well");
    host.exec(&["ip", "link", "set", "flannel-v6.1", "down"]);
    wait_for_pings(&pair.lab, 0, &pair.pods[1], PAYLOAD_BYTES);
    host.exec(&["ip", "-6", "route", "delete", &to]);
    wait_for_pings(&pair.lab, 0, &pair.pods[1], PAYLOAD_BYTES);
    // An MTU that the device had from its interface follows that.
    host.exec(&["ip", "link", "set", "wire0", "mtu", "1480"]);
    pair.wait_for_text(0, LINK, "mtu 1410", true);
    let mtu = || Status::of(&pair.home(0)).0["lease"]["mtu_bytes"].as_u64();
    wait_until(SOON, "the smaller MTU is told", || mtu() == Some(1410));
    host.exec(&["ip", "link", "set", "wire0", "mtu", "1500"]);
    pair.wait_for_text(0, LINK, "mtu 1430", true);
    let repairs = told(&pair.home(0), "repairs");
    let network = to.strip_suffix("/64").unwrap();
    host.exec(&[&["ip", "-6", "neighbour", "delete", network], &FDB[3..]].concat());
    host.exec(&[&["bridge", "fdb", "delete", &pair.mac_v6(1)], &FDB[3..]].concat());
    wait_until(COMPARED, "the entries are there again", || tables() == before);
    wait_until(SOON, "the repair is counted", || told(&pair.home(0), "repairs") > repairs);
    wait_for_pings(&pair.lab, 0, &pair.pods[1], PAYLOAD_BYTES);
}

#[test]
fn vxlan_follows_a_changed_address_of_ipv6() {
    let pair = Pair::start(&config("vxlan"));
    let (host, mac) = (pair.host(1), pair.mac_v6(1));
    let v4 = host.exec(&["ip", "-o", "link", "show", "flannel.1"]);
    host.exec(&["ip", "address", "add", "fd99::12/64", "dev", "wire0", "nodad"]);
    host.exec(&["ip", "address", "del", "fd99::2/64", "dev", "wire0"]);
    pair.wait_for_text(1, LINK, "local fd99::12 dev wire0", true);
    pair.wait_for_text(0, FDB, &format!("{mac} dst fd99::12 self permanent"), true);
    pair.wait_for_traffic();
    assert_eq!(pair.mac_v6(1), mac, "peers have to learn another address");
    assert_eq!(host.exec(&["ip", "-o", "link", "show", "flannel.1"]), v4, "IPv4's as well");
}

#[test]
fn beside_ipv4_an_address_of_the_link_alone_is_told_to_nobody() {
    let (dir, lab) = (tempfile::tempdir().unwrap(), lab());
    let store = local_store(dir.path(), &config("vxlan"));
    let wire = |words: &[&str]| {
        lab.hosts[1].exec(&[&["ip", "-6", "address"], words, &["dev", "wire0"]].concat());
    };
    wire(&["flush"]);
    wire(&["add", "fe80::2/64", "nodad"]);
    let nodes = [0, 1].map(|host| start(&lab, dir.path(), host, &store));
    let pods = [0, 1].map(|host| connect(&lab, host, &nodes[host]));
    lab.connect_pods([&nodes[0].lease, &nodes[1].lease]);
    let of_second = format!("{}-24&", nodes[1].lease.network());
    let value = || {
        let leases = std::fs::read_dir(dir.path().join("store/subnets")).unwrap();
        let mut leases = leases.map(|it| it.unwrap().path());
        let second = leases.find(|it| it.to_str().is_some_and(|path| path.contains(&of_second)));
        std::fs::read_to_string(second.unwrap()).unwrap()
    };
    let status = || Status::of(&dir.path().join("h1")).0;
    let wrong = || status()["dataplane_wrong"].as_str().unwrap_or_default().to_owned();
    wait_until(SOON, "the status names the address", || wrong().contains("fe80::2"));
    assert!(value().contains(r#""PublicIPv6":null"#), "{}", value());
    assert!(status()["lease"]["ipv6"]["public_ip"].is_null(), "{}", status());
    wait_until(SOON, "IPv4 is carried", || lab.ping(0, nodes[1].lease.pod_address(), 1400));
    wire(&["add", "fd99::2/64", "nodad"]);
    for (own, other) in [(0, 1), (1, 0)] {
        wait_for_pings(&lab, own, &pods[other], PAYLOAD_BYTES);
    }
    assert!(value().contains(r#""PublicIPv6":"fd99::2""#), "{}", value());
    wait_until(SOON, "the status is well again", || wrong().is_empty());
}

#[test]
fn vxlan_peers_of_one_family_get_that_alone() {
    let pair = Pair::start(&config("vxlan"));
    let data = |last: &str| format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:00:{last}"}}"#);
    let value = |host: &str, v6: &str, rest: &str| {
        format!(r#"{{"PublicIP":"{host}","PublicIPv6":{v6},"BackendType":"vxlan",{rest}}}"#)
    };
    let files = pair.dir.path();
    let v4 = format!(r#""BackendData":{}"#, data("01"));
    put(files, "10.5.240.0-24", &value("172.20.1.1", "null", &v4));
    let routes = &["ip", "route", "show"];
    pair.wait_for_text(0, routes, "10.5.240.0/24 via 10.5.240.0 dev flannel.1 onlink", true);
    // Both families, and one without what IPv6 needs.
    let v4 = format!(r#""BackendData":{}"#, data("02"));
    let both = format!(r#"{v4},"BackendV6Data":{}"#, data("03"));
    let key = |number: u8| format!("10.5.{number}.0-24&fd00:5:0:{number}::-64");
    put(files, &key(241), &value("172.20.1.2", r#""fd99::241""#, &both));
    let v4 = format!(r#""BackendData":{}"#, data("04"));
    put(files, &key(242), &value("172.20.1.3", r#""fd99::242""#, &v4));
    pair.wait_for_text(0, FDB, "0a:00:00:00:00:03 dst fd99::241 self permanent", true);
    pair.wait_for_text(0, routes, "10.5.242.0/24 via 10.5.242.0 dev flannel.1 onlink", true);
    let counts = || {
        ["peers_programmed", "peers_failed", "leases_unusable"].map(|it| told(&pair.home(0), it))
    };
    wait_until(SOON, "one lease lacks the data of IPv6", || counts() == [4, 0, 1]);
    let v6 = pair.host(0).exec(ROUTES);
    assert!(v6.contains("fd00:5:0:241::/64 via") && !v6.contains("fd00:5:0:242::/64"), "{v6}");
    std::fs::remove_file(files.join("store/subnets").join(key(241))).unwrap();
    for argv in [FDB, NEIGHBOURS, ROUTES] {
        let words = if argv == FDB { "fd99::241" } else { "fd00:5:0:241::" };
        pair.wait_for_text(0, argv, words, false);
    }
    pair.wait_for_traffic();
}

#[test]
fn what_becomes_of_a_peers_ipv6_is_told() {
    let pair = Pair::start(&config("vxlan"));
    let data = |last: &str| format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:00:{last}"}}"#);
    let value = |host: &str, v6: &str, rest: &str| {
        format!(r#"{{"PublicIP":"{host}","PublicIPv6":{v6},"BackendType":"vxlan",{rest}}}"#)
    };
    let files = pair.dir.path();
    let both = format!(r#""BackendData":{},"BackendV6Data":{}"#, data("02"), data("03"));
    let key = |number: u8| format!("10.5.{number}.0-24&fd00:5:0:{number}::-64");
    put(files, &key(241), &value("172.20.1.2", r#""fd99::241""#, &both));
    let v4 = format!(r#""BackendData":{}"#, data("04"));
    put(files, &key(242), &value("172.20.1.3", r#""fd99::242""#, &v4));
    let routes = &["ip", "route", "show"];
    pair.wait_for_text(0, FDB, "0a:00:00:00:00:03 dst fd99::241 self permanent", true);
    pair.wait_for_text(0, routes, "10.5.242.0/24 via 10.5.242.0 dev flannel.1 onlink", true);
    let weft = |words: &[&str]| {
        let output =
            pair.host(0).command(&[&[env!("CARGO_BIN_EXE_weft")], words].concat()).output();
        let output = output.unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let lacks_vtep = |text: &str| text.contains("fd99::242") && text.contains("VtepMAC");
    let socket = pair.home(0).join("weft.sock");
    let peers = weft(&["peers", "--socket", socket.to_str().unwrap()]);
    let told = peers.lines().find(|line| line.starts_with("10.5.242.0/24: "));
    assert!(told.is_some_and(lacks_vtep), "{peers}");
    let row = peers.lines().find(|line| line.starts_with("10.5.241.0/24,")).unwrap_or(&peers);
    assert!(row.contains(",fd00:5:0:241::/64 ") && row.contains(" 172.20.1.2,fd99::241 "), "{row}");
    let store = format!("--local-store={}", files.join("store").display());
    let leases = weft(&["lease", "list", "--", &store]);
    let flaw = leases.lines().find(|line| line.starts_with("unusable: ")).unwrap_or(&leases);
    assert!(flaw.contains("10.5.242.0-24&") && lacks_vtep(flaw), "{leases}");

    let moved = value("172.20.1.2", r#""fd99::243""#, &both);
    put(files, &key(241), &moved);
    pair.wait_for_text(0, FDB, "0a:00:00:00:00:03 dst fd99::243 self permanent", true);
    // No host's address: IPv4 stays.
    put(files, &key(242), &value("172.20.1.3", r#""fd99::zz""#, &v4));
    wait_until(SOON, "weft peers tells what is wrong with the address", || {
        let peers = weft(&["peers", "--socket", socket.to_str().unwrap()]);
        let told = peers.lines().find(|line| line.starts_with("10.5.242.0/24: "));
        told.is_some_and(|told| told.contains("\"fd99::zz\""))
    });
    pair.wait_for_text(0, routes, "10.5.242.0/24 via 10.5.242.0 dev flannel.1 onlink", true);
    std::fs::remove_file(files.join("store/subnets").join(key(241))).unwrap();
    pair.wait_for_text(0, FDB, "fd99::243", false);
    let log = || pair.nodes[0].daemon.output();
    let subnet = "fd00:5:0:241::/64";
    for line in [
        format!("Subnet added: {subnet} via fd99::241"),
        format!("Subnet moved: {subnet} from fd99::241 to fd99::243"),
        format!("Subnet removed: {subnet}"),
        format!("Ignoring {:?}", key(242)),
    ] {
        wait_until(SOON, &format!("{line:?} is told"), || log().contains(&line));
        assert_eq!(log().matches(&line).count(), 1, "{line:?} is to be told once");
    }
}

#[test]
fn vxlan_direct_routing_is_of_both_families_and_can_be_left() {
    let direct = config("vxlan").replace(r#""vxlan""#, r#""vxlan","DirectRouting":true"#);
    let mut pair = Pair::start(&direct);
    let to = pair.network(1);
    pair.wait_for_text(0, ROUTES, &format!("{to} via fd99::2 dev wire0 proto 119"), true);
    assert_eq!(pair.host(0).exec(FDB).trim(), "", "a direct host is in the tunnel's table");
    // Behind a router.
    pair.host(0).exec(&["ip", "-6", "route", "add", "fd77::/64", "via", "fd99::2"]);
    let data = r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#;
    let addresses = r#""PublicIP":"172.20.0.9","PublicIPv6":"fd77::9","BackendType":"vxlan""#;
    let value = format!(r#"{{{addresses},"BackendData":{data},"BackendV6Data":{data}}}"#);
    put(pair.dir.path(), "10.5.240.0-24&fd00:5:0:240::-64", &value);
    let through = "fd00:5:0:240::/64 via fd00:5:0:240:: dev flannel-v6.1";
    pair.wait_for_text(0, ROUTES, through, true);
    pair.wait_for_text(0, FDB, "0a:00:00:00:00:01 dst fd77::9 self permanent", true);
    // Into the tunnel: the kernel refuses its gateway while the other route is there.
    std::fs::write(pair.dir.path().join("store/config"), config("vxlan")).unwrap();
    pair.restart(0);
    let network = to.strip_suffix("/64").unwrap();
    pair.wait_for_text(0, ROUTES, &format!("{to} via {network} dev flannel-v6.1"), true);
    wait_until(SOON, "no peer is left out", || told(&pair.home(0), "peers_failed") == 0);
    pair.restart(1);
    pair.wait_for_traffic();
}

#[test]
fn vxlan_without_ipv6_any_more_leaves_nothing_of_it() {
    let mut pair = Pair::start(&config("vxlan"));
    std::fs::write(pair.dir.path().join("store/config"), ALONE).unwrap();
    for host in [1, 0] {
        let subnet = pair.nodes[host].lease.subnet.clone();
        pair.restart(host);
        assert_eq!(pair.nodes[host].lease.subnet, subnet, "pods lost their addresses");
        assert!(!pair.host(host).succeeds(&["ip", "link", "show", "flannel-v6.1"]), "a device");
        pair.wait_for_text(host, ROUTES, "dev flannel", false);
        assert_eq!(pair.nodes[host].lease.mtu_bytes, 1450, "IPv4 pays for IPv6");
        // The other one, which may still have both, loses the way to it.
        let gone = pair.pods[host].strip_suffix('2').unwrap().to_owned();
        pair.wait_for_text(1 - host, ROUTES, &format!("{gone}/64 via"), false);
    }
    let [first, second] = pair.nodes.each_ref().map(|node| node.lease.pod_address());
    assert!(pair.lab.ping(0, second, 1402) && pair.lab.ping(1, first, 1402), "IPv4 went with it");
    // And both again; cleanup then removes both devices.
    std::fs::write(pair.dir.path().join("store/config"), config("vxlan")).unwrap();
    for host in 0..2 {
        pair.restart(host);
    }
    pair.nodes[0].daemon.stop(Signal::TERM, Duration::from_secs(5));
    let subnet_file = format!("--subnet-file={}", pair.home(0).join("subnet.env").display());
    pair.host(0).exec(&[env!("CARGO_BIN_EXE_weft"), "cleanup", &subnet_file]);
    let links = pair.host(0).exec(&["ip", "-o", "link"]);
    assert!(!links.contains("flannel"), "weft cleanup left a device: {links}");
}

#[test]
fn what_keeps_the_ipv6_device_from_being_made_costs_no_ipv4() {
    let pair = Pair::start(&config("vxlan"));
    let batch = pair.dir.path().join("batch");
    let other = "link add other type vxlan id 1 dstport 8472 dev wire0 local fd99::1 nolearning";
    std::fs::write(&batch, format!("link delete flannel-v6.1\n{other}\n")).unwrap();
    let swap = ["ip", "-batch", batch.to_str().unwrap()];
    wait_until(SOON, "another device takes the place", || pair.host(0).succeeds(&swap));
    let wrong = || {
        let status = Status::of(&pair.home(0)).0;
        status["dataplane_wrong"].as_str().is_some_and(|text| text.contains("flannel-v6.1"))
            && status["ready"] == true
            && status["backend"]["peers_failed"] == 1
    };
    wait_until(SOON, "status names the device, and IPv4 goes on", wrong);
    let is_told = || pair.nodes[0].daemon.complaints("VNI 1 ") > 0;
    wait_until(SOON, "the operator is told what is in the way", is_told);
    assert!(pair.lab.ping(0, pair.nodes[1].lease.pod_address(), 1402), "IPv4 does not go on");
    pair.host(0).exec(&["ip", "link", "delete", "other"]);
    pair.wait_for_traffic();
    wait_until(SOON, "the status is well again", || {
        Status::of(&pair.home(0)).0["dataplane_wrong"].is_null()
    });
}

#[test]
fn the_guard_keeps_strangers_from_the_tunnel_of_ipv6_as_well() {
    let mut pair = Pair::start(&config("vxlan"));
    let home = pair.home(0);
    let guarded = |pair: &mut Pair| {
        pair.nodes[0].daemon.stop(Signal::TERM, Duration::from_secs(5));
        let flags = [pair.store.as_str(), "--guard", "--iptables-resync=1"];
        pair.nodes[0].daemon = pair.lab.weftd(0, &home, &flags);
        wait_until(START, "the guard is in place", || {
            Status::try_of(&home).is_some_and(|status| status.0["guard"]["in_place"] == true)
        });
    };
    guarded(&mut pair);
    pair.wait_for_traffic();
    pair.host(1).exec(&["ip", "address", "add", "fd99::66/64", "dev", "wire0", "nodad"]);
    let dropped = || Status::of(&home).0["guard"]["dropped_from_strangers"].as_u64().unwrap();
    let before = dropped();
    let stranger = pair.host(1).enter(|| std::net::UdpSocket::bind("[fd99::66]:0")).unwrap();
    // VXLAN's header, with VNI 1, and an Ethernet frame of nobody.
    let mut datagram = [0; 64];
    (datagram[0], datagram[6]) = (8, 1);
    stranger.send_to(&datagram, "[fd99::1]:8472").unwrap();
    wait_until(SOON, "what a stranger sends is dropped", || dropped() == before + 1);
    pair.wait_for_traffic();
    let tables = |pair: &Pair| pair.host(0).exec(&["nft", "list", "tables"]);
    assert!(tables(&pair).contains("table ip6 weft-guard-10.5.0.0-16"), "{}", tables(&pair));
    // Without IPv6 there is no tunnel to guard.
    std::fs::write(pair.dir.path().join("store/config"), ALONE).unwrap();
    guarded(&mut pair);
    wait_until(SOON, "the guard of IPv6 is gone", || !tables(&pair).contains("table ip6 weft"));
    assert!(tables(&pair).contains("table ip weft-guard-10.5.0.0-16"), "{}", tables(&pair));
}

#[test]
fn advertisements_inside_the_overlay_are_not_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let store = local_store(dir.path(), &config("vxlan"));
    let lab = lab();
    // What a host whose own address is by advertisements has for all interfaces.
    lab.hosts[0].exec(&["sysctl", "-qw", "net.ipv6.conf.default.accept_ra=2"]);
    let mut node = start(&lab, dir.path(), 0, &store);
    let setting = "/proc/sys/net/ipv6/conf/flannel-v6.1/accept_ra";
    let accepts = || lab.hosts[0].exec(&["cat", setting]).trim().to_owned();
    assert_eq!(accepts(), "0");
    // One that somebody else made, or changed.
    node.daemon.stop(Signal::TERM, Duration::from_secs(5));
    lab.hosts[0].exec(&["sh", "-c", &format!("echo 2 > {setting}")]);
    let _again = start(&lab, dir.path(), 0, &store);
    wait_until(START, "the next start switches it off", || accepts() == "0");
}

#[test]
fn an_interface_too_narrow_for_ipv6_in_the_tunnel_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let narrow = config("vxlan").replace(r#""vxlan""#, r#""vxlan","MTU":1349"#);
    let store = local_store(dir.path(), &narrow);
    let lab = lab();
    let mut daemon = lab.weftd(0, &dir.path().join("h0"), &[&store]);
    wait_until(SOON, "the start ends", || daemon.ended().is_some());
    assert!(daemon.output().contains("Backend.MTU is 1349"), "{}", daemon.output());
}
