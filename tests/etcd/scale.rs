//! Hundreds of nodes that start at once on a real etcd: the control plane's own code, all in one
//! process, without devices.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use weft::config::network::NetworkConfig;
use weft::control::identity::NodeIdentity;
use weft::control::lease::LeaseAttributes;
use weft::control::manager::SubnetManager;
use weft::route::Prefixes;

use crate::support::control::{PREFIX, acquire_at_last, manager, wait_for_config, wide_network};
use crate::support::members::{Members, Setup, Version};
use crate::support::pace::{Stopwatch, by_effort, within};

/// At once; all of them work on one thread here.
fn nodes() -> usize {
    by_effort(250, 1000)
}

fn numbered(number: usize) -> LeaseAttributes {
    let number = u32::try_from(number).unwrap();
    LeaseAttributes::udp(Ipv4Addr::from_bits(0xC633_0000 + 1 + number))
}

fn identity(number: usize) -> NodeIdentity {
    let boot_id = format!("boot of node {number}");
    NodeIdentity { hostname: format!("node-{number}"), machine_id: None, boot_id }
}

/// As the daemon starts: the configuration until it is there, then a subnet.
async fn start(manager: &SubnetManager, network: &NetworkConfig, number: usize) -> Prefixes {
    wait_for_config(manager).await;
    acquire_at_last(manager, network, &numbered(number)).await.lease.subnets
}

#[test]
fn simultaneous_starts_get_subnets_with_few_requests() {
    let nodes = nodes();
    const BOUND: Duration = Duration::from_secs(30);
    // A connection each.
    let limit = getrlimit(Resource::Nofile);
    let enough = limit.maximum.map_or(4096, |maximum| maximum.min(4096));
    setrlimit(Resource::Nofile, Rlimit { current: Some(enough), ..limit }).unwrap();
    let members = &Members::start(Setup { version: Version::V3_4, count: 1, secure: false });
    members.ctl(&["put", &format!("{PREFIX}/config"), r#"{"Network":"10.0.0.0/8"}"#]);
    let requests = || members.counted("grpc_server_started_total");
    let before = requests();
    members.enter(async |_| {
        let network = &wide_network();
        let named = |number| manager(members.options(&[0])).with_identity(identity(number));
        let managers: Vec<_> = (0..nodes).map(named).collect();
        let started = Stopwatch::start();
        let starts = managers.iter().enumerate();
        let acquired = join_all(starts.map(|(number, manager)| start(manager, network, number)));
        let acquired = within(BOUND, acquired).await;
        let acquired = acquired.unwrap_or_else(|| panic!("some have no subnet after {BOUND:?}"));
        let took = started.elapsed();
        let used = requests() - before;
        let subnets: BTreeSet<_> = acquired.into_iter().collect();
        assert_eq!(subnets.len(), nodes, "two nodes share a subnet");

        let statuses: Vec<_> = managers.iter().map(SubnetManager::status).collect();
        let failures: u64 = statuses.iter().map(|status| status.read().store.failures).sum();
        let mut retries: Vec<u64> = statuses.iter().map(|status| status.read().conflicts).collect();
        retries.sort_unstable();
        let (p99, all): (u64, u64) = (retries[nodes * 99 / 100], retries.iter().sum());
        println!(
            "{nodes} nodes at once: {took:?}, {used} requests, {all} races lost (p99 {p99}, most \
             {}), {failures} failures",
            retries[nodes - 1]
        );
        // On a slow machine more of them have listed before anybody writes.
        assert!(p99 <= by_effort(16, 4), "a node loses {p99} races");
        // One to find the endpoint, configuration, listing, two etcd leases, claim, subnet. On a
        // machine that is busy one of them may take too long: then, at most, the start begins anew.
        let bound = 7 * (nodes as u64 + failures) + all;
        assert!(used <= bound, "{used} requests are more than seven a try and one a lost race");
        let stored =
            members.ctl(&["get", "--prefix", "--keys-only", &format!("{PREFIX}/subnets/")]);
        let stored = stored.lines().filter(|line| !line.is_empty()).count();
        assert_eq!(stored, nodes, "leases were left behind");
        let etcd_leases = members.ctl(&["lease", "list"]);
        let first = etcd_leases.lines().next().unwrap_or_default();
        // One of the subnet, one of the claim. A grant without an answer leaves one to lapse.
        let clean = first.contains(&format!("found {} leases", 2 * nodes));
        assert!(clean || failures > 0, "lost races left etcd leases behind: {first}");
    });
}
