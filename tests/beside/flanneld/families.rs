//! Nodes of both families: what either daemon leaves on a host and in the store for them, and
//! traffic between the two.

use std::net::Ipv6Addr;
use std::time::Duration;

use crate::same::{entries, hardware_address, link};
use crate::site::{Daemon, SUBNETS, Site, pings, wait_for_pings};
use crate::support::lab::{Namespace, wait_until};
use crate::support::traffic::tcp_transfer;

use Daemon::{Flanneld, Weftd};

const DEVICE: &str = "flannel-v6.1";
const NETWORK: &str = "fd00:5::/48";

/// Both have what the other has published within this time.
const SEEN: Duration = Duration::from_secs(10);

fn site(kind: &str) -> Site {
    let site = Site::new(&format!(
        r#"{{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"{NETWORK}",
        "Backend":{{"Type":"{kind}"}}}}"#
    ));
    for host in 0..2 {
        let address = format!("fd99::{}/64", host + 1);
        site.host(host).exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"]);
        site.host(host).exec(&["ip", "address", "add", &address, "dev", "wire0", "nodad"]);
    }
    site
}

fn v6_subnet(site: &Site, host: usize) -> String {
    let env = site.subnet_env(host).unwrap();
    let subnet = env.lines().find_map(|line| line.strip_prefix("FLANNEL_IPV6_SUBNET="));
    subnet.unwrap_or_else(|| panic!("no IPv6 in {env}")).to_owned()
}

/// Gives a pod an address of its host's IPv6 subnet, and returns it.
fn connect(site: &Site, host: usize, pod: &Namespace) -> Ipv6Addr {
    let subnet = v6_subnet(site, host);
    let (gateway, length) = subnet.split_once('/').unwrap();
    let address = gateway.strip_suffix("::1").map(|network| format!("{network}::2")).unwrap();
    site.host(host).exec(&["ip", "address", "add", &subnet, "dev", "pod0", "nodad"]);
    let with_length = format!("{address}/{length}");
    pod.exec(&["ip", "address", "add", &with_length, "dev", "eth0", "nodad"]);
    pod.exec(&["ip", "-6", "route", "add", "default", "via", gateway]);
    address.parse().unwrap()
}

#[track_caller]
fn wait_for_v6_pings(from: &Namespace, to: Ipv6Addr, payload_bytes: u32, what: &str) {
    let (size, to) = (payload_bytes.to_string(), to.to_string());
    let argv = ["ping", "-6", "-q", "-c3", "-i0.05", "-W1", "-Mdo", "-s", &size, &to];
    wait_until(SEEN, &format!("pods reach each other by IPv6: {what}"), || from.succeeds(&argv));
}

#[test]
fn pods_of_both_daemons_reach_each_other_by_both_families() {
    for (kind, mtu_bytes) in [("vxlan", 1430), ("host-gw", 1500)] {
        for pair in [[Flanneld, Weftd], [Weftd, Flanneld], [Weftd, Weftd]] {
            let site = site(kind);
            let (first, near) = site.start(0, pair[0], &["--ip-masq"]);
            let (second, far) = site.start(1, pair[1], &["--ip-masq"]);
            let pods = [site.cluster.pod(0, &near), site.cluster.pod(1, &far)];
            let v6 = [0, 1].map(|host| connect(&site, host, &pods[host]));
            // flanneld promises its pods 20 bytes more than IPv6 has in the tunnel.
            for pod in &pods {
                pod.exec(&["ip", "link", "set", "eth0", "mtu", &mtu_bytes.to_string()]);
            }
            let what = format!("{kind}, {pair:?}");
            wait_for_pings(&pods[0], far.pod_address(), &what);
            assert!(pings(&pods[1], near.pod_address()), "{what}: no way back");
            wait_for_v6_pings(&pods[0], v6[1], mtu_bytes - 48, &what);
            wait_for_v6_pings(&pods[1], v6[0], mtu_bytes - 48, &what);
            tcp_transfer(&pods[0], &pods[1], v6[1], 32 << 20, true);
            tcp_transfer(&pods[1], &pods[0], v6[0], 32 << 20, true);
            tcp_transfer(&pods[0], &pods[1], far.pod_address(), 32 << 20, true);
            println!("{what}: both families, both ways");
            site.stop(first);
            site.stop(second);
        }
    }
}

/// What a daemon made, by what it is.
fn trace(site: &Site, kind: &str, daemon: Daemon) -> Vec<(&'static str, String)> {
    let host = site.host(0);
    let routes = || host.exec(&["ip", "-6", "route", "show", "root", NETWORK]);
    let is_peers = |line: &&str| line.contains(" via ");
    wait_until(SEEN, "the peer has its route", || routes().lines().any(|line| is_peers(&line)));
    let env = site.subnet_env(0).unwrap();
    // flanneld takes IPv6's headers in the tunnel for IPv4's.
    let promised = if kind == "vxlan" && daemon == Flanneld { "MTU=1450" } else { "MTU=1430" };
    assert!(kind == "host-gw" || env.contains(promised), "{daemon:?}: {env}");
    let own = v6_subnet(site, 0).replace("::1/", "::-");
    let keys = site.ctl(&["get", "--prefix", SUBNETS, "--keys-only"]);
    let key = keys.lines().find(|key| key.ends_with(&own)).unwrap().to_owned();
    let [mac, mac_v6] = ["flannel.1", DEVICE].map(|device| hardware_address(host, device));
    let text = |text: String| text.replace(&mac, "MAC").replace(&mac_v6, "MAC6");
    // What the kernel adds by itself, and the mark by which weftd knows its own.
    let shown = |line: &str| line.replace(" proto 119", "").trim().to_owned();
    let routes: Vec<_> = routes().lines().filter(is_peers).map(shown).collect();
    let addresses = ["ip", "-o", "-6", "address", "show", "dev", DEVICE, "scope", "global"];
    let addresses = host.command(&addresses).output().unwrap().stdout;
    let addresses = String::from_utf8(addresses).unwrap();
    let words = addresses.split_whitespace().skip(1).take(3).collect::<Vec<_>>().join(" ");
    let mut trace = vec![
        ("subnet.env", env.replace(promised, "MTU=1430")),
        ("key and value", text(site.ctl(&["get", &key]))),
        ("routes", routes.join("\n")),
    ];
    if kind == "vxlan" {
        trace.extend([
            ("address", words),
            ("link", text(link(host, DEVICE))),
            ("forwarding entries", entries(host, &["bridge", "fdb", "show", "dev", DEVICE], kind)),
            ("neighbours", entries(host, &["ip", "-6", "neigh", "show", "dev", DEVICE], kind)),
        ]);
    }
    trace
}

#[test]
fn keys_values_devices_and_routes_of_both_families_are_the_same() {
    for kind in ["vxlan", "host-gw"] {
        let site = site(kind);
        let (peer, _) = site.start(1, Weftd, &[]);
        let [flanneld, weftd] = [Flanneld, Weftd].map(|daemon| {
            let (process, _) = site.start(0, daemon, &["--ip-masq"]);
            let trace = trace(&site, kind, daemon);
            site.stop(process);
            for device in ["flannel.1", DEVICE] {
                site.host(0).command(&["ip", "link", "delete", device]).output().unwrap();
            }
            site.host(0).exec(&["ip", "-6", "route", "flush", "root", NETWORK]);
            trace
        });
        for ((what, of_flanneld), (_, of_weftd)) in flanneld.iter().zip(&weftd) {
            assert_eq!(of_flanneld, of_weftd, "{kind}: {what} (left: flanneld's)");
            assert!(!of_flanneld.is_empty(), "{kind}: no {what}");
        }
        site.stop(peer);
    }
}
