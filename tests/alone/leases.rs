//! Five thousand leases on a real etcd: what listing and following them takes of this process.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::net::Ipv4Addr;
use std::time::Duration;

use etcd_client::{Client, Txn, TxnOp};
use weft::control::lease::LeaseAttributes;
use weft::control::store::etcd::EtcdStore;
use weft::control::store::{Leased, Store};

use crate::alone;
use crate::support::control::{PREFIX, Running, manager, wide_network};
use crate::support::members::{Members, Setup, Version};
use crate::support::pace::{Stopwatch, within};

const LEASES: u32 = 5000;

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn five_thousand_leases_cost_little_time_and_memory() {
    let _alone = alone();
    let members = &Members::start(Setup { version: Version::V3_5, count: 1, secure: false });
    members.enter(async |_| {
        let mut client = Client::connect([members.url(0)], None).await.unwrap();
        let leases: Vec<u32> = (0..LEASES).collect();
        for some in leases.chunks(100) {
            let puts = some.iter().map(|number| {
                let subnet = Ipv4Addr::from_bits(0x0A40_0000 + (number << 8));
                let key = format!("{PREFIX}/subnets/{subnet}-24");
                let address = Ipv4Addr::from_bits(0xC633_0000 + 1 + number);
                TxnOp::put(key, format!(r#"{{"PublicIP":"{address}","PublicIPv6":null}}"#), None)
            });
            client.txn(Txn::new().and_then(puts.collect::<Vec<_>>())).await.unwrap();
        }
        let store = Box::new(EtcdStore::new(&members.options(&[0])).unwrap());
        let store = Store::Leased(Leased::Etcd(store));
        let before = resident_bytes();
        let requests = members.counted("grpc_server_started_total");
        let started = Stopwatch::start();
        for _ in 0..10 {
            let snapshot = store.list().await.unwrap();
            assert_eq!((snapshot.leases.len(), snapshot.is_cut), (LEASES as usize, false));
        }
        let each = started.elapsed() / 10;
        let requests = members.counted("grpc_server_started_total") - requests;
        let node_manager = manager(members.options(&[0]));
        let own = node_manager
            .acquire(&wide_network(), &LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 1)))
            .await
            .unwrap();
        let mut running = Running::start(node_manager, own);
        let all = running.peers.wait_for(|peers| peers.len() == LEASES as usize);
        within(Duration::from_secs(5), all).await.expect("not all peers are known").unwrap();
        let grown = resident_bytes().saturating_sub(before);
        println!("{LEASES} leases: {each:?} a listing, {requests} requests for 10, {grown} bytes");
        assert!(each < Duration::from_secs(1), "a listing takes {each:?}");
        assert!(requests <= 10 * 6 + 1, "{requests} requests for 10 listings");
        assert!(grown < 24 << 20, "5,000 peers take {grown} bytes");
    });
}
