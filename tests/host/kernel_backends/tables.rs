//! What stands in the kernel's tables, in the words of iproute2: flannel's, to the letter, and of
//! the rest nothing.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use weft::control::clock::{format_rfc3339, unix_seconds};

use crate::kernel_backends::{HOST_GW, SOON, VXLAN, put, told, value, vtep, wait_for_text};
use crate::support::lab::wait_until;
use crate::support::overlay::Overlay;

const FDB: &[&str] = &["bridge", "fdb", "show", "dev", "flannel.1"];
const NEIGHBOURS: &[&str] = &["ip", "neighbour", "show", "dev", "flannel.1"];
const ROUTES: &[&str] = &["ip", "route", "show"];

/// The hardware address that a host published with its lease.
fn published_mac(overlay: &Overlay, host: usize) -> String {
    let key = format!("store/subnets/{}-24", overlay.leases[host].network());
    let lease = std::fs::read_to_string(overlay.files().join(key)).unwrap();
    let data = r#"{"VNI":1,"VtepMAC":""#;
    let start = value(&format!("172.20.0.{}", host + 1), "vxlan", data);
    // What follows the data is behind the hardware address.
    let start = start.trim_end_matches('}');
    let rest = lease.strip_prefix(start).unwrap_or_else(|| panic!("the lease is {lease}"));
    let (mac, end) = rest.split_once('"').unwrap();
    assert!(end.starts_with("}"), "the lease is {lease}");
    mac.to_owned()
}

#[test]
fn vxlan_tables_look_like_flannels() {
    let mut overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    let macs = [0, 1].map(|host| published_mac(&overlay, host));
    for (own, other) in [(0, 1), (1, 0)] {
        let host = &overlay.lab.hosts[own];
        let link = host.exec(&["ip", "-d", "link", "show", "flannel.1"]);
        let vxlan = format!("vxlan id 1 local 172.20.0.{} dev wire0", own + 1);
        let ether = format!("link/ether {}", macs[own]);
        for words in [&vxlan, &ether, "dstport 8472 nolearning", "mtu 1450", ",UP,"] {
            assert!(link.contains(words), "`ip -d link` lacks {words:?}: {link}");
        }
        let (network, mac) = (overlay.leases[other].network(), &macs[other]);
        let fdb = host.exec(FDB);
        assert_eq!(fdb.trim(), format!("{mac} dst 172.20.0.{} self permanent", other + 1));
        let neighbours = host.exec(NEIGHBOURS);
        assert_eq!(neighbours.trim(), format!("{network} lladdr {mac} PERMANENT"));
        let routes = host.exec(ROUTES);
        let route = format!("{network}/24 via {network} dev flannel.1 onlink");
        assert!(routes.lines().any(|line| line.trim() == route), "no {route:?} in {routes}");
        let address = host.exec(&["ip", "-o", "-4", "address", "show", "flannel.1"]);
        assert!(address.contains(&format!("inet {}/32 ", overlay.leases[own].network())));
        let accepts = host.exec(&["cat", "/proc/sys/net/ipv6/conf/flannel.1/accept_ra"]);
        assert_eq!(accepts.trim(), "0", "router advertisements are accepted");
        let status = overlay.status(own).0;
        assert_eq!(status["backend"]["kind"], "vxlan", "{status}");
    }
    // After a reboot there is no device; the hardware address is that of the lease.
    overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
    assert!(overlay.lab.hosts[0].succeeds(&["ip", "link", "show", "flannel.1"]), "a stop removes");
    overlay.lab.hosts[0].exec(&["ip", "link", "delete", "flannel.1"]);
    overlay.restart(0, &[]);
    wait_for_text(&overlay, 0, FDB, &macs[1], true);
    assert_eq!(published_mac(&overlay, 0), macs[0], "peers would have to learn another address");
    overlay.traffic_resumes(Duration::from_secs(5), "a reboot");
}

#[test]
fn vxlan_follows_leases_and_ignores_other_backends() {
    let overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    // One of ours for each of another backend.
    for number in 0..20_u16 {
        let address = format!("172.20.1.{number}");
        let (ours, others) = (200 + number, 100 + number);
        put(
            overlay.files(),
            &format!("10.5.{ours}.0-24"),
            &value(&address, "vxlan", &vtep(number)),
        );
        let other = ["host-gw", "", "wireguard", "ipip"][usize::from(number) % 4];
        let address = format!("172.20.2.{number}");
        put(overlay.files(), &format!("10.5.{others}.0-24"), &value(&address, other, "null"));
    }
    put(overlay.files(), "10.5.150.0-24", &value("172.20.3.1", "vxlan", r#"{"VtepMAC":7}"#));
    put(overlay.files(), "10.5.151.0-24", &value("172.20.3.2", "vxlan", &vtep(0)));
    let counts = || {
        ["peers_programmed", "leases_ignored", "leases_unusable"].map(|it| told(&overlay, 0, it))
    };
    // The last two leases have no address, and one that is taken.
    wait_until(SOON, "the leases of this backend are set up", || counts() == [21, 20, 2]);
    let host = &overlay.lab.hosts[0];
    let count = |argv: &[&str], words: &str| {
        host.exec(argv).lines().filter(|line| line.contains(words)).count()
    };
    assert_eq!(count(FDB, "permanent"), 21);
    assert_eq!(count(NEIGHBOURS, "PERMANENT"), 21);
    assert_eq!(count(ROUTES, "via 10.5."), 21, "a node of another backend has a route");
    // Two subnets of one host, as while an old lease lingers.
    put(overlay.files(), "10.5.152.0-24", &value("172.20.1.1", "vxlan", &vtep(1)));
    wait_for_text(&overlay, 0, ROUTES, "10.5.152.0/24 via 10.5.152.0 dev flannel.1", true);
    wait_for_text(&overlay, 0, NEIGHBOURS, "10.5.152.0 lladdr 0a:00:00:00:00:01 PERM", true);
    assert_eq!(count(FDB, "dst 172.20.1.1 "), 1, "one place for both");
    assert_eq!(told(&overlay, 0, "leases_unusable"), 2);
    // Under the same subnet: another hardware address, then another host.
    put(overlay.files(), "10.5.200.0-24", &value("172.20.1.0", "vxlan", &vtep(777)));
    wait_for_text(&overlay, 0, NEIGHBOURS, "10.5.200.0 lladdr 0a:00:00:00:03:09 PERM", true);
    wait_for_text(&overlay, 0, FDB, "0a:00:00:00:03:09 dst 172.20.1.0 self", true);
    wait_for_text(&overlay, 0, FDB, "172.20.3.2", true);
    put(overlay.files(), "10.5.200.0-24", &value("172.20.9.9", "vxlan", &vtep(777)));
    wait_for_text(&overlay, 0, FDB, "0a:00:00:00:03:09 dst 172.20.9.9 self permanent", true);
    wait_for_text(&overlay, 0, FDB, "172.20.1.0 ", false);
    // Gone: nothing of it is left.
    std::fs::remove_file(overlay.files().join("store/subnets/10.5.200.0-24")).unwrap();
    wait_for_text(&overlay, 0, FDB, "0a:00:00:00:03:09", false);
    wait_for_text(&overlay, 0, NEIGHBOURS, "10.5.200.0 ", false);
    wait_for_text(&overlay, 0, ROUTES, "10.5.200.0/24", false);
    overlay.traffic_resumes(SOON, "all that");
}

/// A lease of the local store that ends in so many hours.
fn ending(public_ip: &str, data: &str, hours: u64) -> String {
    let ends = format_rfc3339(unix_seconds() + hours * 3600);
    value(public_ip, "vxlan", data).replacen(",", &format!(r#","Expires":"{ends}","#), 1)
}

#[test]
fn replaced_node_inherits_hardware_address_and_traffic() {
    let overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    let new = &overlay.leases[1];
    let mac = published_mac(&overlay, 1);
    let data = format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
    // The node before it, in the lowest of all subnets; its lease has an hour to go.
    put(overlay.files(), "10.5.0.0-24", &ending("172.20.0.77", &data, 1));
    wait_until(SOON, "the old lease is seen", || told(&overlay, 0, "leases_unusable") == 1);
    wait_for_text(&overlay, 0, FDB, &format!("{mac} dst 172.20.0.2 self permanent"), true);
    overlay.traffic_resumes(SOON, "an old lease has the same hardware address");
    let routes = overlay.lab.hosts[0].exec(ROUTES);
    assert!(!routes.contains("10.5.0.0/24"), "what is for the old node goes to the new: {routes}");
    let told_of = format!("10.5.0.0/24 of 172.20.0.77 has the VtepMAC {mac} of the newer lease");
    let both = format!("{told_of} {}/24", new.network());
    wait_until(SOON, "both leases are named", || overlay.daemons[0].output().contains(&both));
    // And the other way round: whoever came last has it, until that lease is gone.
    put(overlay.files(), "10.5.0.0-24", &ending("172.20.0.78", &data, 48));
    wait_for_text(&overlay, 0, FDB, &format!("{mac} dst 172.20.0.78 self permanent"), true);
    std::fs::remove_file(overlay.files().join("store/subnets/10.5.0.0-24")).unwrap();
    wait_until(SOON, "nothing is in doubt", || told(&overlay, 0, "leases_unusable") == 0);
    overlay.traffic_resumes(SOON, "the newer lease is gone");
}

#[test]
fn mismatched_device_and_stale_peers_are_replaced() {
    let mut overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    let mac = published_mac(&overlay, 0);
    overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
    let host = &overlay.lab.hosts[0];
    let stale = ["dev", "flannel.1"];
    host.exec(
        &[&["ip", "neighbour", "add", "10.5.210.0", "lladdr", "0a:00:00:00:00:01"], &stale[..]]
            .concat(),
    );
    host.exec(
        &[&["bridge", "fdb", "add", "0a:00:00:00:00:01", "dst", "172.20.1.1"], &stale[..]].concat(),
    );
    host.exec(&[
        "ip",
        "route",
        "add",
        "10.5.210.0/24",
        "via",
        "10.5.210.0",
        "dev",
        "flannel.1",
        "onlink",
    ]);
    host.exec(&["ip", "route", "add", "10.5.211.0/24", "via", "172.20.0.2", "proto", "static"]);
    let foreign = "10.77.0.0/16 via 10.5.210.0 dev flannel.1 onlink";
    host.exec(&[&["ip", "route", "add"], &foreign.split(' ').collect::<Vec<_>>()[..]].concat());
    overlay.restart(0, &[]);
    for argv in [FDB, NEIGHBOURS, ROUTES] {
        let words = match argv {
            FDB => "172.20.1.1",
            NEIGHBOURS => "10.5.210.0 ",
            _ => "10.5.210.0/24",
        };
        wait_for_text(&overlay, 0, argv, words, false);
    }
    let routes = overlay.lab.hosts[0].exec(ROUTES);
    assert!(routes.contains("10.5.211.0/24 via 172.20.0.2"), "a foreign route is gone: {routes}");
    assert!(routes.contains(foreign), "a foreign route into the device is gone: {routes}");
    // Another port, as an operator changes it.
    overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
    let config = VXLAN.replace(r#""vxlan""#, r#""vxlan","Port":4789,"GBP":true"#);
    std::fs::write(overlay.files().join("store/config"), config).unwrap();
    overlay.restart(0, &[]);
    let link = &["ip", "-d", "link", "show", "flannel.1"];
    wait_for_text(&overlay, 0, link, "dstport 4789", true);
    wait_for_text(&overlay, 0, link, "gbp", true);
    wait_for_text(&overlay, 0, link, &mac, true);
    overlay.daemons[1].stop(Signal::TERM, Duration::from_secs(5));
    overlay.restart(1, &[]);
    overlay.traffic_resumes(Duration::from_secs(10), "another port on both hosts");
    // And back to none: the kernel's.
    std::fs::write(overlay.files().join("store/config"), VXLAN).unwrap();
    for host in 0..2 {
        overlay.daemons[host].stop(Signal::TERM, Duration::from_secs(5));
        overlay.restart(host, &[]);
        wait_for_text(&overlay, host, link, "dstport 8472", true);
        wait_until(SOON, "the port is told", || {
            overlay.daemons[host].output().contains("vxlan id 1 port 8472,")
        });
    }
    overlay.traffic_resumes(Duration::from_secs(10), "the kernel's port again");
}

#[test]
fn host_gw_keeps_to_its_own_routes() {
    let mut overlay = Overlay::start_with(HOST_GW, [&["--workers=2"], &[]]);
    let told_of_flag = || overlay.daemons[0].complaints("--workers");
    wait_until(SOON, "a flag without effect is told", || told_of_flag() > 0);
    assert_eq!(told_of_flag(), 1, "it is told once");
    let network = overlay.leases[1].network();
    let route = format!("{network}/24 via 172.20.0.2 dev wire0 proto 119");
    wait_for_text(&overlay, 0, ROUTES, &route, true);
    overlay.daemons[0].stop(Signal::KILL, Duration::from_secs(5));
    let host = &overlay.lab.hosts[0];
    assert!(host.exec(ROUTES).contains(&route), "a stop removes routes");
    let add = ["ip", "route", "add"];
    let via = ["via", "172.20.0.2", "proto"];
    host.exec(&[&add[..], &["10.5.210.0/24"], &via, &["119"]].concat());
    host.exec(&[&add[..], &["10.5.211.0/24"], &via, &["static"]].concat());
    host.exec(&[&add[..], &["10.6.1.0/24"], &via, &["119"]].concat());
    overlay.restart(0, &[]);
    wait_for_text(&overlay, 0, ROUTES, "10.5.210.0/24", false);
    let routes = overlay.lab.hosts[0].exec(ROUTES);
    assert!(routes.contains("10.5.211.0/24"), "a foreign route is gone: {routes}");
    assert!(routes.contains("10.6.1.0/24"), "a route of another weftd's network is gone: {routes}");
    // Deleted by somebody: back at once, and told.
    overlay.lab.hosts[0].exec(&["ip", "route", "delete", &format!("{network}/24")]);
    overlay.traffic_resumes(SOON, "the route was deleted");
    wait_until(SOON, "the repair is counted", || told(&overlay, 0, "repairs") >= 1);
    // Lines of the log are written a little later than what they tell of is counted.
    wait_until(SOON, "the repair is told", || {
        overlay.daemons[0].output().contains("Route recovered")
    });
    // Other backends, a host that is on another link, and one that moves.
    put(overlay.files(), "10.5.100.0-24", &value("172.20.0.77", "vxlan", &vtep(1)));
    put(overlay.files(), "10.5.101.0-24", &value("192.0.2.7", "host-gw", "null"));
    put(overlay.files(), "10.5.102.0-24", &value("172.20.0.78", "host-gw", "null"));
    wait_for_text(&overlay, 0, ROUTES, "10.5.102.0/24 via 172.20.0.78 dev wire0", true);
    put(overlay.files(), "10.5.102.0-24", &value("172.20.0.79", "host-gw", "null"));
    wait_for_text(&overlay, 0, ROUTES, "10.5.102.0/24 via 172.20.0.79 dev wire0", true);
    wait_until(SOON, "the host without a way is counted", || {
        told(&overlay, 0, "peers_failed") == 1
    });
    assert_eq!(
        (told(&overlay, 0, "leases_ignored"), told(&overlay, 0, "peers_programmed")),
        (1, 2)
    );
    let routes = overlay.lab.hosts[0].exec(ROUTES);
    assert!(!routes.contains("10.5.100.0/24") && !routes.contains("10.5.101.0/24"), "{routes}");
    wait_until(SOON, "the host without a way is named", || {
        overlay.daemons[0].complaints("192.0.2.7") > 0
    });
    std::fs::remove_file(overlay.files().join("store/subnets/10.5.102.0-24")).unwrap();
    wait_for_text(&overlay, 0, ROUTES, "10.5.102.0/24", false);
    // A host that never gets its route delays no repair of another.
    overlay.lab.hosts[0].exec(&["ip", "route", "delete", &format!("{network}/24")]);
    let took = overlay.traffic_resumes(Duration::from_secs(2), "the route was deleted again");
    println!("traffic again {took:?} after the route was deleted");
    let text = Command::new(env!("CARGO_BIN_EXE_weft"))
        .args(["status", "--socket"])
        .arg(overlay.dir(0).join("weft.sock"))
        .output()
        .unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("host-gw"), "the screen does not name the backend: {text}");
}

#[test]
fn a_changed_backend_takes_the_routes_of_the_old_one_away() {
    let mut overlay = Overlay::start_with(HOST_GW, [&[], &[]]);
    let route = format!("{}/24 via 172.20.0.2", overlay.leases[1].network());
    wait_for_text(&overlay, 0, ROUTES, &route, true);
    let left = ["10.5.210.0/24", "via", "172.20.0.2", "proto"];
    let own = [&["ip", "route", "replace"], &left[..], &["119"]].concat();
    for kind in ["udp", "alloc", "extension"] {
        for host in 0..2 {
            overlay.daemons[host].stop(Signal::TERM, Duration::from_secs(5));
        }
        overlay.lab.hosts[0].exec(&own);
        overlay.lab.hosts[0].exec(&["ip", "route", "replace", "10.6.1.0/24", "via", "172.20.0.2"]);
        std::fs::write(overlay.files().join("store/config"), HOST_GW.replace("host-gw", kind))
            .unwrap();
        for host in 0..2 {
            overlay.restart(host, &[]);
        }
        wait_for_text(&overlay, 0, ROUTES, "10.5.210.0/24", false);
        wait_for_text(&overlay, 0, ROUTES, &route, false);
        assert!(overlay.lab.hosts[0].exec(ROUTES).contains("10.6.1.0/24"), "{kind}: a foreign one");
        if kind == "udp" {
            overlay.traffic_resumes(SOON * 2, "the backend is another one");
        }
    }
}
