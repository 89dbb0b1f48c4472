//! What the two leave on a host and in the store for one configuration, byte for byte.

use std::time::Duration;

use crate::site::{Daemon, SUBNETS, Site};
use crate::support::lab::{Namespace, wait_until};

use Daemon::{Flanneld, Weftd};

/// What a daemon made, by what it is.
type Trace = Vec<(&'static str, String)>;

#[test]
fn files_keys_rules_links_and_routes_are_the_same() {
    for (kind, flags) in [
        ("udp", vec!["--ip-masq"]),
        ("udp", vec!["--iptables-forward-rules=false"]),
        ("udp", vec![]),
        ("vxlan", vec!["--ip-masq"]),
        ("host-gw", vec!["--ip-masq"]),
    ] {
        let site = Site::with_backend(kind);
        let (peer, _) = site.start(1, Weftd, &[]);
        // The lease stays in the store, so that both have the same subnet; what else the first
        // left is removed, so that the second makes all of it by itself.
        let [flanneld, weftd] = [Flanneld, Weftd].map(|daemon| {
            let (process, _) = site.start(0, daemon, &flags);
            let trace = trace(&site, kind);
            site.stop(process);
            clean(&site);
            trace
        });
        for ((what, of_flanneld), (_, of_weftd)) in flanneld.iter().zip(&weftd) {
            assert_eq!(of_flanneld, of_weftd, "{kind} {flags:?}: {what} (left: flanneld's)");
            let may_lack = kind == "host-gw" || *what == "rules";
            assert!(!of_flanneld.is_empty() || may_lack, "{kind}: no {what}");
        }
        site.stop(peer);
    }
}

fn clean(site: &Site) {
    let host = site.host(0);
    host.command(&["ip", "link", "delete", "flannel.1"]).output().unwrap();
    host.command(&["ip", "route", "flush", "root", "10.5.0.0/16"]).output().unwrap();
    for table in ["nat", "filter"] {
        host.exec(&["iptables", "-t", table, "-F"]);
        host.exec(&["iptables", "-t", table, "-X"]);
    }
    std::fs::remove_dir_all(site.dir(0)).unwrap();
}

fn trace(site: &Site, kind: &str) -> Trace {
    let host = site.host(0);
    let routes = || host.exec(&["ip", "-4", "route", "show", "root", "10.5.0.0/16"]);
    wait_until(Duration::from_secs(5), "the peer has its route", || !routes().is_empty());
    let key = site.ctl(&["get", "--prefix", SUBNETS, "--keys-only"]);
    let env = site.subnet_env(0).unwrap();
    let own = env.split("FLANNEL_SUBNET=").nth(1).unwrap().split(".1/").next().unwrap();
    let key = key.lines().find(|key| key.contains(&format!("/{own}."))).unwrap().to_owned();
    let value = site.ctl(&["get", &key]);
    let lease = format!("{:x}", site.lease_of(&key));
    let life = site.ctl(&["lease", "timetolive", &lease]);
    let granted = life.split("granted with ").nth(1).unwrap().split(',').next().unwrap();
    let device = if kind == "vxlan" { "flannel.1" } else { "flannel0" };
    let mac = hardware_address(host, device);
    let text = |text: String| text.replace(&mac, "MAC");
    vec![
        ("subnet.env", env),
        ("key and value", text(value)),
        ("life of the key", granted.to_owned()),
        ("rules", rules(host)),
        ("address", addresses(host, device)),
        ("link", text(link(host, device))),
        // The mark by which weftd knows its own is one of the differences on purpose.
        ("routes", routes().replace(" proto 119", "")),
        ("forwarding entries", entries(host, &["bridge", "fdb", "show", "dev", device], kind)),
        ("neighbours", entries(host, &["ip", "neigh", "show", "dev", device], kind)),
    ]
    .into_iter()
    .filter(|(what, _)| kind == "vxlan" || !matches!(*what, "forwarding entries" | "neighbours"))
    .collect()
}

/// The rules without counters and dates.
fn rules(host: &Namespace) -> String {
    let saved = host.exec(&["iptables-save"]);
    let lines = saved.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split(" [").next().unwrap_or(line).to_owned() + "\n").collect()
}

fn addresses(host: &Namespace, device: &str) -> String {
    let output = host.command(&["ip", "-o", "-4", "address", "show", "dev", device]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.split_once(": ").map(|(_, rest)| rest.to_owned()).unwrap_or_default()
}

pub(crate) fn hardware_address(host: &Namespace, device: &str) -> String {
    let text = link(host, device);
    let address = text.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next());
    address.unwrap_or("no address").to_owned()
}

/// The device, without its number, its queue's length, and what the kernel adds by itself.
pub(crate) fn link(host: &Namespace, device: &str) -> String {
    let output = host.command(&["ip", "-d", "-o", "link", "show", "dev", device]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let kept = text.split_once(": ").map(|(_, rest)| rest).unwrap_or_default();
    let kept = kept.split("addrgenmode").next().unwrap_or(kept);
    // One line for ip(8) is several, joined by backslashes.
    let kept = kept.replace('\\', " ");
    let words: Vec<_> = kept.split_whitespace().collect();
    // Queues and super-packets on the TUN device are weftd's; what it sends is as flannel's.
    let of_one = |index: usize| words[index] == "multi_queue";
    let of_two = |index: usize| {
        ["qdisc", "qlen", "vnet_hdr", "numqueues", "numdisabled"].contains(&words[index])
    };
    let is_left_out =
        |index: usize| of_one(index) || of_two(index) || index.checked_sub(1).is_some_and(of_two);
    let kept = (0..words.len()).filter(|&index| !is_left_out(index));
    kept.map(|index| words[index]).collect::<Vec<_>>().join(" ")
}

pub(crate) fn entries(host: &Namespace, argv: &[&str], kind: &str) -> String {
    if kind != "vxlan" {
        return String::new();
    }
    let mut lines: Vec<_> = host.exec(argv).lines().map(|line| line.trim().to_owned()).collect();
    lines.sort();
    lines.join("\n")
}
