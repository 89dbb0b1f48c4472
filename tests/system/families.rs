//! A network that gets IPv6 beside IPv4 and loses it again, node by node under IPv4 traffic.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;

use crate::restarts::under_traffic;
use crate::support::lab::{SubnetEnv, wait_until};
use crate::support::overlay::Overlay;
use crate::support::status::Status;

const PATIENCE: Duration = Duration::from_secs(10);
/// Datagrams a second each way.
const RATE: u64 = 1000;

fn config(backend: &str, has_ipv6: bool) -> String {
    let v6 = r#""EnableIPv6":true,"IPv6Network":"fd00:5::/48","#;
    let v6 = if has_ipv6 { v6 } else { "" };
    format!(r#"{{"Network":"10.5.0.0/16",{v6}"Backend":{{"Type":"{backend}"}}}}"#)
}

/// One daemon after the other reads the configuration as it now is, and all of them carry IPv4
/// meanwhile.
fn roll(overlay: &mut Overlay, backend: &str, has_ipv6: bool) {
    let path = overlay.files().join("store/config");
    fs::write(path, config(backend, has_ipv6)).expect("a file of the test");
    for host in 0..2 {
        next(overlay, host, backend == "udp");
        let dir = overlay.dir(host);
        wait_until(PATIENCE, "the next weftd has its subnets and its peer", || {
            let status = Status::try_of(&dir).filter(|status| status.routes() == 1);
            status.is_some_and(|status| status.0["lease"]["ipv6"].is_object() == has_ipv6)
        });
        let env = SubnetEnv::read(&dir.join("subnet.env")).expect("it is there");
        assert_eq!(env.subnet, overlay.leases[host].subnet, "host {host} has another IPv4 subnet");
    }
}

/// Another weftd on this host: with the workers of the one there, or if the kernel carries the
/// packets, after its end.
fn next(overlay: &mut Overlay, host: usize, has_workers: bool) {
    if has_workers {
        let next = overlay.weftd(host, &["--take-over"]);
        let mut last = std::mem::replace(&mut overlay.daemons[host], next);
        let end = last.wait(PATIENCE);
        assert!(end.success(), "{}\n{}", last.output(), overlay.daemons[host].output());
    } else {
        overlay.daemons[host].stop(Signal::TERM, PATIENCE);
        overlay.restart(host, &[]);
    }
}

/// Gives both pods an address of their hosts' IPv6 subnets, and returns them.
fn connect(overlay: &Overlay) -> [String; 2] {
    [0, 1].map(|host| {
        let env = fs::read_to_string(overlay.dir(host).join("subnet.env")).expect("it is there");
        let subnet = env.lines().find_map(|line| line.strip_prefix("FLANNEL_IPV6_SUBNET="));
        let (gateway, length) = subnet.and_then(|it| it.split_once('/')).expect("a gateway");
        let pod = gateway.replace("::1", "::2");
        let (own, gateways) = (format!("{pod}/{length}"), format!("{gateway}/{length}"));
        let add = |address| ["ip", "address", "add", address, "nodad", "dev"];
        overlay.lab.hosts[host].exec(&[&add(&gateways)[..], &["pod0"]].concat());
        overlay.lab.pods[host].exec(&[&add(&own)[..], &["eth0"]].concat());
        overlay.lab.pods[host].exec(&["ip", "-6", "route", "add", "default", "via", gateway]);
        pod
    })
}

/// From IPv4 to both families, until the pods have both, and back.
fn nothing_of_ipv4_is_lost(backend: &str) {
    let mut overlay = Overlay::start_with(&config(backend, false), [&[], &[]]);
    for (index, host) in overlay.lab.hosts.iter().enumerate() {
        host.exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"]);
        let address = format!("fd99::{}/64", index + 1);
        host.exec(&["ip", "address", "add", &address, "dev", "wire0", "nodad"]);
    }
    under_traffic(&mut overlay, RATE, |overlay| {
        roll(overlay, backend, true);
        let pods = connect(overlay);
        let answers = |overlay: &Overlay, from: usize, to: usize| {
            let argv = ["ping", "-6", "-q", "-c1", "-W1", "-s1300", &pods[to]];
            overlay.lab.pods[from].succeeds(&argv)
        };
        for (from, to) in [(0, 1), (1, 0)] {
            wait_until(PATIENCE, "pods reach each other by IPv6", || answers(overlay, from, to));
        }
        roll(overlay, backend, false);
        assert!(!answers(overlay, 0, 1), "IPv6 is carried for nodes that have no subnet of it");
        let keys = fs::read_dir(overlay.files().join("store/subnets")).expect("the store");
        let keys = keys.flatten().map(|key| key.file_name().to_string_lossy().into_owned());
        let keys: Vec<_> = keys.filter(|key| !key.starts_with('.')).collect();
        assert!(keys.len() == 2 && keys.iter().all(|key| !key.contains('&')), "{keys:?}");
    });
}

#[test]
fn udp_gets_ipv6_and_loses_it_without_loss_of_ipv4() {
    nothing_of_ipv4_is_lost("udp");
}

#[test]
fn vxlan_gets_ipv6_and_loses_it_without_loss_of_ipv4() {
    nothing_of_ipv4_is_lost("vxlan");
}

#[test]
fn host_gw_gets_ipv6_and_loses_it_without_loss_of_ipv4() {
    nothing_of_ipv4_is_lost("host-gw");
}
