//! Both daemons in one cluster: traffic, and what each hears of the store's changes.

use std::time::Duration;

use crate::site::{Daemon, SUBNETS, Site, complaints, pings, wait_for_pings};
use crate::support::lab::wait_until;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

use Daemon::{Flanneld, Weftd};

/// A change of the store is seen by both within this time.
const SEEN: Duration = Duration::from_secs(5);

#[test]
fn pods_of_both_daemons_reach_each_other_whoever_starts_first() {
    for kind in ["udp", "vxlan", "host-gw"] {
        for pair in [[Flanneld, Weftd], [Weftd, Flanneld], [Flanneld, Flanneld], [Weftd, Weftd]] {
            let site = Site::with_backend(kind);
            let (first, near) = site.start(0, pair[0], &["--ip-masq"]);
            let (second, far) = site.start(1, pair[1], &["--ip-masq"]);
            let pods = [site.cluster.pod(0, &near), site.cluster.pod(1, &far)];
            wait_for_pings(&pods[0], far.pod_address(), "both have started");
            assert!(pings(&pods[1], near.pod_address()), "{kind}, {pair:?}: no way back");
            let full = (near.mtu_bytes - 28).to_string();
            let (size, to) = (["-s", &full], near.pod_address().to_string());
            let whole = ["ping", "-q", "-c1", "-W1", "-Mdo", size[0], size[1], &to];
            assert!(pods[1].succeeds(&whole), "{kind}, {pair:?}: no packet of the whole MTU");
            let bytes = if kind == "udp" { 48 << 20 } else { 256 << 20 };
            let there = tcp_transfer(&pods[0], &pods[1], far.pod_address(), bytes, false);
            let back = tcp_transfer(&pods[1], &pods[0], near.pod_address(), bytes, false);
            let rate = |took: Duration| bytes as f64 * 8.0 / 1e6 / took.as_secs_f64();
            println!("{kind}, {pair:?}: {:.0} Mbit/s there, {:.0} back", rate(there), rate(back));
            for (daemon, process) in pair.into_iter().zip([first, second]) {
                let log = process.output();
                assert!(daemon == Weftd || complaints(&log).is_empty(), "{:?}", complaints(&log));
                site.stop(process);
            }
        }
    }
}

#[test]
fn both_follow_what_happens_in_the_store() {
    let site = Site::with_backend("udp");
    let (flanneld, near) = site.start(0, Flanneld, &[]);
    let (weftd, _far) = site.start(1, Weftd, &[]);
    let count = |what: &str| flanneld.output().matches(what).count();
    let via = |at: &str| {
        let status = Status::of(&site.dir(1)).0["routes"].to_string();
        status.contains("10.5.200.0/24") && status.contains(at)
    };
    wait_until(SEEN, "weftd has a route to flanneld's subnet", || {
        Status::of(&site.dir(1)).routes() == 1
    });
    let key = format!("{SUBNETS}/10.5.200.0-24");
    for (turn, at) in ["192.0.2.50", "192.0.2.51"].into_iter().enumerate() {
        site.put(&key, &format!(r#"{{"PublicIP":"{at}","PublicIPv6":null}}"#));
        wait_until(SEEN, "both know the third node", || {
            count("Subnet added: 10.5.200.0/24") == turn + 1 && via(at)
        });
    }
    site.ctl(&["del", &key]);
    wait_until(SEEN, "both have forgotten the third node", || {
        count("Subnet removed: 10.5.200.0/24") == 1 && Status::of(&site.dir(1)).routes() == 1
    });
    // weftd's own keys are below another prefix than the one that flanneld watches.
    let events = count("got valid subnet event");
    site.put("/coreos.com/network/weft/nodes/192.0.2.60", "{}");
    let (pod, _other) = (site.cluster.pod(0, &near), ());
    wait_for_pings(site.host(1), near.pod_address(), "a key of weftd's own appeared");
    assert_eq!(count("got valid subnet event"), events, "flanneld hears of weftd's own keys");
    assert_eq!(complaints(&flanneld.output()), Vec::<&str>::new());
    drop((pod, weftd));
}

#[test]
fn flanneld_that_writes_weftds_lease_is_noticed() {
    let site = Site::with_backend("udp");
    let (weftd, own) = site.start(0, Weftd, &[]);
    let address = crate::support::cluster::host_address(0).to_string();
    let (_flanneld, taken) = site.start(1, Flanneld, &["--public-ip", &address]);
    assert_eq!(own.subnet, taken.subnet, "flanneld goes by the PublicIP alone");
    wait_until(SEEN, "weftd says that somebody else writes its lease", || {
        weftd.output().contains("ALARM")
            && Status::of(&site.dir(0)).0["store"]["written_by_others"] == 1
    });
}
