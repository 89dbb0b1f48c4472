//! The masquerade and forward rules as packets and operators meet them, in namespaces, for each
//! variant of the programs: iptables on nf_tables, iptables on its own tables, nft.

#![expect(clippy::print_stdout, reason = "measured times belong into the report of the run")]

mod families;
mod faults;
mod resync;
pub(crate) mod site;

use std::net::Ipv4Addr;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::lab::{Lab, SubnetEnv, UNDERLAY, wait_until};
use crate::support::overlay::local_store;
use site::{HOST_OUTSIDE, OUTSIDE, Site, Variant, rules_in_place, source_seen, weftd};

const MASQUERADE: &[&str] = &["--ip-masq", "--iptables-resync=1"];

#[test]
fn masquerading_depends_on_source_and_destination() {
    for variant in Variant::ALL {
        let site = Site::start(variant, MASQUERADE, |_, _| {});
        site.wait_for_rules(0);
        let env = std::fs::read_to_string(site.dir().join("h0/subnet.env"));
        assert!(env.expect("it is written").contains("FLANNEL_IPMASQ=true"), "{variant:?}");
        let (pods, hosts) = (&site.lab.pods, &site.lab.hosts);
        let own = [site.leases[0].pod_address(), site.leases[1].pod_address()];
        let seen = source_seen((&pods[0], own[0]), (&pods[1], own[1]));
        assert_eq!(seen, Some(own[0]), "{variant:?}: pods see each other's addresses");
        let seen = source_seen((&pods[0], own[0]), (&site.outside, OUTSIDE));
        assert_eq!(seen, Some(HOST_OUTSIDE), "{variant:?}: outside sees the host for the pod");
        // Node addresses of the overlay, which remote pods can answer.
        let device = site.leases[0].network();
        let seen = source_seen((&hosts[0], UNDERLAY[0]), (&pods[1], own[1]));
        assert_eq!(seen, Some(device), "{variant:?}: a host to a remote pod (upstream's U13)");
        site.outside.exec(&["ip", "route", "add", "10.5.0.0/16", "via", &HOST_OUTSIDE.to_string()]);
        let seen = source_seen((&site.outside, OUTSIDE), (&pods[0], own[0]));
        assert_eq!(seen, Some(OUTSIDE), "{variant:?}: a pod sees a client that is routed to it");
        // Sent by the host with an address of the overlay, on the link itself, because multicast
        // leaves by the device that has its source.
        let own = Ipv4Addr::from_bits(site.leases[0].network().to_bits() + 77);
        hosts[0].address("out0", &format!("{own}/32"));
        let group = Ipv4Addr::new(239, 1, 2, 3);
        let seen = source_seen((&hosts[0], own), (&site.outside, group));
        assert_eq!(seen, Some(own), "{variant:?}: multicast keeps its source");
        let seen = source_seen((&hosts[0], own), (&site.outside, OUTSIDE));
        assert_eq!(seen, Some(HOST_OUTSIDE), "{variant:?}: unicast beside it does not");
    }
}

#[test]
fn packets_marked_by_kube_proxy_are_skipped() {
    for variant in Variant::ALL {
        let site = Site::start(variant, MASQUERADE, |_, _| {});
        site.wait_for_rules(0);
        let (host, pod) = (&site.lab.hosts[0], site.leases[0].pod_address());
        let program = if variant == Variant::Nft { Variant::IptablesNft } else { variant };
        // With another bit beside it, as other programs set them.
        let mark = ["-t", "mangle", "-A", "FORWARD", "-j", "MARK", "--set-xmark", "0x4010/0xffff"];
        program.iptables(site.dir(), host, &mark);
        site.outside.exec(&["ip", "route", "add", "10.5.0.0/16", "via", &HOST_OUTSIDE.to_string()]);
        let seen = source_seen((&site.lab.pods[0], pod), (&site.outside, OUTSIDE));
        assert_eq!(seen, Some(pod), "{variant:?}: a marked packet is not ours to masquerade");
    }
}

/// FORWARD drops what nobody accepts, as Docker has it.
fn drop_forwarded(variant: Variant) -> impl Fn(&std::path::Path, &crate::support::lab::Namespace) {
    move |dir, host| match variant {
        // An accept of nft ends its own chain only: it is the table's own policy that drops.
        Variant::Nft => {
            let chain = "add table ip flannel-ipv4; add chain ip flannel-ipv4 forward \
                         { type filter hook forward priority 0; policy drop; }";
            host.exec(&["nft", chain]);
        }
        Variant::IptablesNft | Variant::IptablesLegacy => {
            variant.iptables(dir, host, &["-P", "FORWARD", "DROP"]);
        }
    }
}

#[test]
fn pods_talk_under_a_drop_policy() {
    for variant in Variant::ALL {
        let site = Site::start(variant, &[], drop_forwarded(variant));
        (0..2).for_each(|host| site.wait_for_rules(host));
        let pod = site.leases[1].pod_address();
        wait_until(Duration::from_secs(5), "pods reach each other", || site.lab.ping(0, pod, 56));
        let (host, forward) = (&site.lab.hosts[0], variant.rules(site.dir(), &site.lab.hosts[0]));
        assert!(!forward.is_empty(), "{variant:?}");
        // The policy is not touched: what is not the overlay's is still dropped.
        site.outside.exec(&[
            "ip",
            "route",
            "add",
            "172.20.0.0/24",
            "via",
            &HOST_OUTSIDE.to_string(),
        ]);
        site.lab.hosts[1].exec(&["ip", "route", "add", "198.51.100.0/24", "via", "172.20.0.1"]);
        let ping = ["ping", "-q", "-c1", "-W0.3", "172.20.0.2"];
        assert!(!site.outside.succeeds(&ping), "{variant:?}: the host forwards for strangers");
        drop_nothing(variant, site.dir(), host);
        wait_until(Duration::from_secs(5), "it was the policy that dropped", || {
            site.outside.succeeds(&ping)
        });
    }
}

fn drop_nothing(variant: Variant, dir: &std::path::Path, host: &crate::support::lab::Namespace) {
    match variant {
        Variant::Nft => {
            host.exec(&["nft", "chain ip flannel-ipv4 forward { policy accept; }"]);
        }
        Variant::IptablesNft | Variant::IptablesLegacy => {
            variant.iptables(dir, host, &["-P", "FORWARD", "ACCEPT"]);
        }
    }
}

#[test]
fn without_the_flag_the_firewall_is_left_alone() {
    for variant in Variant::ALL {
        let off = &["--iptables-forward-rules=false"];
        let site = Site::start(variant, off, |_, _| {});
        let pod = site.leases[1].pod_address();
        wait_until(Duration::from_secs(5), "pods reach each other", || site.lab.ping(0, pod, 56));
        for host in &site.lab.hosts {
            assert_eq!(variant.rules(site.dir(), host), Vec::<String>::new(), "{variant:?}");
        }
        assert_eq!(rules_in_place(&site.dir().join("h0")), None, "{variant:?}");
    }
}

/// One host: what stays at a stop, and what a start with another network or another firewall
/// makes of it.
#[test]
fn next_run_adopts_or_removes_earlier_rules() {
    let (files, lab) = (tempfile::tempdir().expect("a directory for the test"), Lab::two_hosts());
    let (dir, host) = (files.path(), &lab.hosts[0]);
    let run = |variant: Variant, network: &str, arguments: &[&str]| {
        local_store(dir, &variant.config(network));
        let mut daemon = weftd(variant, dir, host, 0, arguments);
        let env = dir.join("h0/subnet.env");
        wait_until(Duration::from_secs(20), "the rules are in place", || {
            rules_in_place(&dir.join("h0")) == Some(true)
        });
        let lease = SubnetEnv::wait(&env, &mut daemon);
        // The other firewall is cleared right after.
        wait_until(Duration::from_secs(10), "the other firewall has no rules of ours", || {
            let other = if variant == Variant::Nft { Variant::IptablesNft } else { Variant::Nft };
            other == Variant::Nft && !host.succeeds(&["nft", "list", "table", "ip", "flannel-ipv4"])
                || other != Variant::Nft && other.rules(dir, host).is_empty()
        });
        let status = daemon.stop(Signal::TERM, Duration::from_secs(2));
        assert_eq!(status.code(), Some(0), "{}", daemon.output());
        (lease, variant.rules(dir, host), daemon.output())
    };
    let variant = Variant::IptablesNft;
    let (_, first, _) = run(variant, "10.5.0.0/16", MASQUERADE);
    assert_eq!(first.len(), 10, "a stop leaves the rules: {first:?}");
    let (_, again, log) = run(variant, "10.5.0.0/16", MASQUERADE);
    assert_eq!(again, first, "a restart changes nothing");
    assert!(!log.contains("recycle"), "{log}");
    let (lease, moved, log) = run(variant, "10.9.0.0/16", MASQUERADE);
    assert!(log.contains("recycle"), "{log}");
    assert_eq!(moved.len(), 10, "{moved:?}");
    assert!(!moved.concat().contains("10.5."), "rules of the earlier network: {moved:?}");
    assert!(moved.concat().contains(&lease.network().to_string()), "{moved:?}");
    let (_, nft, _) = run(Variant::Nft, "10.9.0.0/16", MASQUERADE);
    assert_eq!(nft.len(), 8, "{nft:?}");
    let (_, back, _) = run(variant, "10.9.0.0/16", MASQUERADE);
    assert_eq!(back, moved, "back from nftables");
}

/// One host: two networks, a daemon for each, the same chains.
#[test]
fn two_daemons_share_the_chains() {
    for variant in Variant::ALL {
        let lab = Lab::two_hosts();
        let (host, daemons) = (&lab.hosts[0], ["10.5.0.0/16", "10.6.0.0/16"]);
        let files = daemons.map(|_| tempfile::tempdir().expect("a directory for the test"));
        let mut running = Vec::new();
        for (number, network) in (0..).zip(daemons) {
            let dir = files[number].path();
            let port = format!(r#""Backend":{{"Port":{},"#, 8285 + number);
            local_store(dir, &variant.config(network).replace(r#""Backend":{"#, &port));
            running.push(weftd(variant, dir, host, 0, MASQUERADE));
            wait_until(Duration::from_secs(20), "the rules are in place", || {
                rules_in_place(&dir.join("h0")) == Some(true)
            });
        }
        let rules = || variant.rules(files[0].path(), host);
        let whole = || {
            // Five masquerade rules with prefixes and two forward rules, for each network.
            let of = |network: &str| {
                rules().iter().filter(|rule| rule.contains(&format!(" {network}"))).count()
            };
            (of("10.5."), of("10.6.")) == (7, 7)
        };
        wait_until(Duration::from_secs(5), "both networks have their rules", whole);
        let repairs = || {
            let of = |dir: &tempfile::TempDir| {
                crate::support::status::Status::of(&dir.path().join("h0")).0["rules"]["repairs"]
                    .clone()
            };
            files.each_ref().map(of)
        };
        let (at_rest, before) = (rules(), repairs());
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!((rules(), repairs()), (at_rest, before), "{variant:?}: they repair each other");
    }
}

#[test]
fn blackhole_route_follows_the_subnet() {
    let (files, lab) = (tempfile::tempdir().expect("a directory for the test"), Lab::two_hosts());
    let (dir, host) = (files.path(), &lab.hosts[0]);
    let flags = ["--ip-blackhole-route", "--iptables-forward-rules=false", "--iptables-resync=1"];
    let blackholes = || host.exec(&["ip", "route", "show", "type", "blackhole"]);
    let start = |network: &str| {
        local_store(dir, &Variant::Nft.config(network));
        let mut daemon = weftd(Variant::Nft, dir, host, 0, &flags);
        let third = network.split('.').nth(1).expect("a network").to_owned();
        wait_until(Duration::from_secs(20), "the blackhole route is there", || {
            blackholes().contains(&format!("10.{third}."))
        });
        let lease = SubnetEnv::wait(&dir.join("h0/subnet.env"), &mut daemon);
        (daemon, lease)
    };
    let (mut daemon, lease) = start("10.5.0.0/16");
    // The runtime's bridge comes later, and its pods must not be lost in the hole.
    host.address("pod0", &lease.subnet);
    let pod = lease.pod_address().to_string();
    let path = host.exec(&["ip", "route", "get", &pod]);
    assert!(path.contains("dev pod0"), "the pods of the host are in the blackhole: {path}");
    host.exec(&["ip", "route", "flush", "type", "blackhole"]);
    wait_until(Duration::from_secs(3), "the route comes back", || !blackholes().is_empty());
    daemon.stop(Signal::TERM, Duration::from_secs(2));
    assert_eq!(blackholes().lines().count(), 1, "it stays, as flanneld leaves it");
    let (_daemon, lease) = start("10.9.0.0/16");
    // It is removed after the new one is there.
    wait_until(Duration::from_secs(3), "the earlier subnet's route is gone", || {
        blackholes().lines().count() == 1
    });
    let left = blackholes();
    assert!(left.contains(&lease.network().to_string()), "{left}");
}
