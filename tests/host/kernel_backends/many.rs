//! A large cluster: how long it takes until every peer is in the kernel's tables.

use std::time::{Duration, Instant};

use crate::kernel_backends::{value, vtep};
use crate::support::lab::{Lab, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

const PEERS: u16 = 5000;

/// Far above what it takes, which is printed, on a machine that is busy with other things.
const LIMIT: Duration = Duration::from_secs(60);

fn programs(kind: &str) {
    let dir = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"Network":"10.0.0.0/8","SubnetMin":"10.200.0.0","Backend":{{"Type":"{kind}"}}}}"#
    );
    let store = local_store(dir.path(), &config);
    for number in 1..=PEERS {
        let [high, low] = number.to_be_bytes();
        let data = if kind == "vxlan" { vtep(number) } else { "null".to_owned() };
        let value = value(&format!("172.20.{}.{low}", 100 + high), kind, &data);
        let key = format!("store/subnets/10.{high}.{low}.0-24");
        std::fs::write(dir.path().join(key), value).unwrap();
    }
    let lab = Lab::two_hosts();
    // All hosts on one link, for host-gw.
    lab.hosts[0].exec(&["ip", "address", "replace", "172.20.0.1/16", "dev", "wire0"]);
    lab.hosts[0].exec(&["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"]);
    let home = dir.path().join("h0");
    let start = |what: &str| {
        let mut daemon = lab.weftd(0, &home, &[&store]);
        SubnetEnv::wait(&home.join("subnet.env"), &mut daemon);
        let begun = Instant::now();
        wait_until(LIMIT, "every peer is set up", || {
            Status::try_of(&home).is_some_and(|status| {
                status.0["backend"]["peers_programmed"].as_u64() == Some(u64::from(PEERS))
            })
        });
        println!("{kind}, {what}: {PEERS} peers {:?} after subnet.env", begun.elapsed());
        daemon
    };
    let daemon = start("an empty kernel");
    let routes = lab.hosts[0].exec(&["ip", "route", "show"]);
    let count = routes.lines().filter(|line| line.contains("/24 via ")).count();
    assert_eq!(count, usize::from(PEERS), "routes of {kind}");
    if kind == "vxlan" {
        let fdb = lab.hosts[0].exec(&["bridge", "fdb", "show", "dev", "flannel.1"]);
        assert_eq!(fdb.lines().count(), usize::from(PEERS), "forwarding entries");
        let neighbours = lab.hosts[0].exec(&["ip", "neighbour", "show", "dev", "flannel.1"]);
        assert_eq!(neighbours.lines().count(), usize::from(PEERS), "neighbours");
    }
    drop(daemon);
    let _again = start("all there already");
}

#[test]
fn five_thousand_vxlan_peers_are_set_up() {
    programs("vxlan");
}

#[test]
fn five_thousand_host_gw_peers_are_set_up() {
    programs("host-gw");
}
