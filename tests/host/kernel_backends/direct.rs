//! Hosts on one link that need no tunnel, and hosts whose address changes.

use std::time::Duration;

use crate::kernel_backends::{HOST_GW, SOON, VXLAN, put, value, vtep, wait_for_text};
use crate::support::overlay::Overlay;

#[test]
fn direct_routing_tunnels_only_across_routers() {
    let config = VXLAN.replace(r#""vxlan""#, r#""vxlan","DirectRouting":true"#);
    let overlay = Overlay::start_with(&config, [&[], &[]]);
    let network = overlay.leases[1].network();
    let routes = &["ip", "route", "show"];
    let route = format!("{network}/24 via 172.20.0.2 dev wire0");
    wait_for_text(&overlay, 0, routes, &route, true);
    let fdb = &["bridge", "fdb", "show", "dev", "flannel.1"];
    assert_eq!(overlay.lab.hosts[0].exec(fdb).trim(), "", "a direct host is in the tunnel's table");
    overlay.traffic_resumes(SOON, "a start with direct routing");
    // Behind a router.
    overlay.lab.hosts[0].exec(&["ip", "route", "add", "192.0.2.0/24", "via", "172.20.0.2"]);
    put(overlay.files(), "10.5.100.0-24", &value("192.0.2.9", "vxlan", &vtep(9)));
    wait_for_text(&overlay, 0, routes, "10.5.100.0/24 via 10.5.100.0 dev flannel.1 onlink", true);
    wait_for_text(&overlay, 0, fdb, "dst 192.0.2.9 self permanent", true);
}

#[test]
fn both_ends_follow_a_changed_address() {
    for config in [HOST_GW, VXLAN] {
        let by_name: &[&str] = &["--iface=wire0"];
        let overlay = Overlay::start_with(config, [by_name, by_name]);
        overlay.traffic_resumes(SOON, "the start");
        let host = &overlay.lab.hosts[0];
        host.exec(&["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"]);
        host.exec(&["ip", "address", "add", "172.20.0.11/24", "dev", "wire0"]);
        let (argv, words): (&[&str], _) = if config == HOST_GW {
            (&["ip", "route", "show"], "via 172.20.0.11 dev wire0")
        } else {
            (&["bridge", "fdb", "show", "dev", "flannel.1"], "dst 172.20.0.11 self")
        };
        wait_for_text(&overlay, 1, argv, words, true);
        let took = overlay.traffic_resumes(Duration::from_secs(10), "the address changed");
        println!("traffic again {took:?} after the peers' tables show the new address");
    }
}

/// What the kernel flushed with the old address comes back by the new one, which is on the same
/// link, whether or not the lease follows.
#[test]
fn routes_return_when_address_is_not_followed() {
    let fixed: &[&str] = &["--iface=wire0", "--follow-address=false"];
    let overlay = Overlay::start_with(HOST_GW, [fixed, fixed]);
    overlay.traffic_resumes(SOON, "the start");
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"]);
    host.exec(&["ip", "address", "add", "172.20.0.50/24", "dev", "wire0"]);
    let route = format!("{}/24 via 172.20.0.2 dev wire0", overlay.leases[1].network());
    wait_for_text(&overlay, 0, &["ip", "route", "show"], &route, true);
}

#[test]
fn vxlan_mtu_above_the_interface_gives_way() {
    let config = VXLAN.replace(r#""vxlan""#, r#""vxlan","MTU":9000"#);
    let overlay = Overlay::start_with(&config, [&[], &[]]);
    assert_eq!(overlay.leases[0].mtu_bytes, 1450, "the MTU in subnet.env");
    assert_eq!(overlay.daemons[0].complaints("9000"), 1, "{}", overlay.daemons[0].output());
    overlay.traffic_resumes(SOON, "a start with an MTU that is too large");
}
