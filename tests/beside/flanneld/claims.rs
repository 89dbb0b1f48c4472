//! What docs/differences.md says about a running flanneld.

use std::time::Duration;

use rustix::process::Signal;

use crate::site::{CONFIG, Daemon, STOP, SUBNETS, Site, pings, wait_for_pings};
use crate::support::lab::wait_until;
use crate::support::status::Status;

use Daemon::{Flanneld, Weftd};

/// Until either has heard of a change, and done what it does.
const HEARD: Duration = Duration::from_secs(10);

/// Long enough for a daemon that ends to have ended.
const LOOK: Duration = Duration::from_secs(2);

#[test]
fn a_revoked_lease_ends_flanneld_with_0_and_weftd_with_1() {
    for (daemon, code) in [(Flanneld, 0), (Weftd, 1)] {
        let site = Site::with_backend("udp");
        let (mut process, _) = site.start(0, daemon, &[]);
        std::thread::sleep(Duration::from_millis(500));
        site.ctl(&["del", "--prefix", SUBNETS]);
        assert_eq!(process.wait(HEARD).code(), Some(code), "{daemon:?}");
        assert!(process.output().contains("Lease has been revoked. Shutting down daemon."));
    }
}

#[test]
fn a_lease_that_another_node_took_is_not_noticed_by_flanneld_and_ends_weftd() {
    for daemon in [Flanneld, Weftd] {
        let site = Site::with_backend("udp");
        let (mut process, _) = site.start(0, daemon, &[]);
        std::thread::sleep(Duration::from_millis(500));
        let key = site.ctl(&["get", "--prefix", SUBNETS, "--keys-only"]);
        let lease = site.ctl(&["lease", "grant", "86400"]);
        let lease = format!("--lease={}", lease.split(' ').nth(1).unwrap());
        let other = r#"{"PublicIP":"192.0.2.9","PublicIPv6":null}"#;
        site.ctl(&["put", &lease, key.trim(), other]);
        if daemon == Weftd {
            assert_eq!(process.wait(HEARD).code(), Some(1), "weftd shares a subnet");
        } else {
            std::thread::sleep(LOOK);
            assert!(process.ended().is_none(), "flanneld ended:\n{}", process.output());
        }
        assert!(site.leases().contains(other), "{daemon:?} has taken the subnet back");
    }
}

#[test]
fn one_value_that_cannot_be_read_costs_flanneld_all_routes_and_weftd_none() {
    let site = Site::with_backend("udp");
    let (flanneld, near) = site.start(0, Flanneld, &[]);
    let (_weftd, far) = site.start(1, Weftd, &[]);
    let (pod, _other) = (site.cluster.pod(0, &near), site.cluster.pod(1, &far));
    wait_for_pings(&pod, far.pod_address(), "both have started");
    site.put(&format!("{SUBNETS}/10.5.202.0-24"), "rubbish");
    let lost = format!("Subnet removed: {}/24", far.network());
    wait_until(HEARD, "flanneld gives up its peer", || flanneld.output().contains(&lost));
    assert!(!pings(&pod, far.pod_address()), "flanneld has no route and still sends");
    assert_eq!(Status::of(&site.dir(1)).routes(), 1, "weftd gave up flanneld's subnet");
}

#[test]
fn a_second_flanneld_on_one_subnet_file_is_only_stopped_by_the_port() {
    for (kind, code) in [("udp", Some(1)), ("vxlan", None)] {
        let site = Site::with_backend(kind);
        let (_first, _) = site.start(0, Flanneld, &[]);
        let before = site.lease_of(site.ctl(&["get", "--prefix", SUBNETS, "--keys-only"]).trim());
        let mut second = site.spawn(0, Flanneld, &[]);
        wait_until(HEARD, "the second ends or runs", || {
            second.ended().is_some() || second.output().contains("Running backend")
        });
        let ended = second.ended().and_then(|status| status.code());
        assert_eq!(ended, code, "{kind}:\n{}", second.output());
        let after = site.lease_of(site.ctl(&["get", "--prefix", SUBNETS, "--keys-only"]).trim());
        assert_ne!(before, after, "{kind}: the second left the lease alone");
    }
}

#[test]
fn a_second_flanneld_with_one_public_ip_has_the_same_subnet() {
    let site = Site::with_backend("udp");
    let (_first, own) = site.start(0, Flanneld, &[]);
    let (_second, copy) = site.start(1, Flanneld, &["--public-ip=172.20.0.1"]);
    assert_eq!(own.subnet, copy.subnet);
}

#[test]
fn out_of_subnets_ends_flanneld_with_1_and_weftd_waits() {
    let config = r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0","SubnetMax":"10.5.1.0"}"#;
    let site = Site::new(config);
    site.put(&format!("{SUBNETS}/10.5.1.0-24"), r#"{"PublicIP":"192.0.2.9"}"#);
    let mut flanneld = site.spawn(0, Flanneld, &[]);
    assert_eq!(flanneld.wait(HEARD).code(), Some(1));
    assert!(flanneld.output().contains("out of subnets"), "{}", flanneld.output());
    let mut weftd = site.spawn(1, Weftd, &[]);
    wait_until(HEARD, "weftd says why it waits", || weftd.complaints("10.5.1.0/24") > 0);
    assert!(weftd.ended().is_none());
}

#[test]
fn health_is_told_alike_and_a_taken_address_ends_both_with_2() {
    const HEALTH: [&str; 2] = ["--healthz-ip=127.0.0.1", "--healthz-port=8471"];
    let site = Site::with_backend("vxlan");
    for daemon in [Flanneld, Weftd] {
        let (process, _) = site.start(0, daemon, &HEALTH);
        let curl = ["curl", "-s", "-w", "%{http_code}", "http://127.0.0.1:8471/healthz"];
        assert_eq!(site.host(0).exec(&curl), "flanneld is running200", "{daemon:?}");
        let file = site.dir(1).join("subnet.env").display().to_string();
        let second = ["--subnet-file", &file, HEALTH[0], HEALTH[1]];
        let mut second = site.spawn(0, daemon, &second);
        assert_eq!(second.wait(HEARD).code(), Some(2), "{daemon:?}:\n{}", second.output());
        assert_eq!(daemon == Flanneld, second.output().contains("panic"), "{daemon:?}");
        site.stop(process);
    }
}

#[test]
fn masquerading_without_iptables_ends_both_with_1_and_forward_rules_alone_do_not() {
    let path = tempfile::tempdir().unwrap();
    let path = format!("PATH={}", path.path().display());
    let site = Site::with_backend("udp");
    for daemon in [Flanneld, Weftd] {
        let mut argv = vec!["/usr/bin/env".to_owned(), path.clone(), daemon.program()];
        argv.extend(site.arguments(0));
        let argv: Vec<_> = argv.iter().map(String::as_str).collect();
        std::fs::create_dir_all(site.dir(0)).unwrap();
        let mut process = site.host(0).spawn(&[argv.as_slice(), &["--ip-masq"]].concat());
        assert_eq!(process.wait(HEARD).code(), Some(1), "{daemon:?}:\n{}", process.output());
        assert!(process.output().contains("Failed to setup masq rules"), "{daemon:?}");
        let mut process = site.host(0).spawn(&argv);
        wait_until(HEARD, "it runs without rules", || site.subnet_env(0).is_some());
        assert!(process.ended().is_none(), "{daemon:?}:\n{}", process.output());
        process.stop(Signal::KILL, STOP);
        site.forget();
    }
}

#[test]
fn a_peer_that_left_while_flanneld_was_away_keeps_its_vxlan_route_until_weftd_comes() {
    let site = Site::with_backend("vxlan");
    let (process, _) = site.start(0, Flanneld, &[]);
    let (other, far) = site.start(1, Weftd, &[]);
    let to = format!("{}/24", far.network());
    let route = || !site.host(0).exec(&["ip", "route", "show", &to]).is_empty();
    wait_until(HEARD, "flanneld has a route to its peer", route);
    site.stop(process);
    site.stop(other);
    let key = format!("{SUBNETS}/{}-24", far.network());
    site.ctl(&["del", &key]);
    let (process, _) = site.start(0, Flanneld, &[]);
    std::thread::sleep(LOOK);
    assert!(route(), "flanneld removes stale routes by now");
    site.stop(process);
    let (_process, _) = site.start(0, Weftd, &[]);
    wait_until(HEARD, "weftd removes the stale route", || !route());
}

#[test]
fn a_network_that_is_replaced_is_not_noticed_by_either() {
    for daemon in [Flanneld, Weftd] {
        let site = Site::with_backend("udp");
        let (mut process, _) = site.start(0, daemon, &[]);
        let env = site.subnet_env(0);
        site.put(CONFIG, r#"{"Network":"10.6.0.0/16"}"#);
        std::thread::sleep(LOOK);
        assert!(process.ended().is_none(), "{daemon:?} ended:\n{}", process.output());
        assert_eq!(site.subnet_env(0), env, "{daemon:?}");
    }
}
