//! Candidates against a slow overlap check, and which of several own leases counts.

use std::net::Ipv4Addr;

use super::*;
use crate::backend_kind::BackendKind;
use crate::config::network::BackendConfig;
use crate::route::Families;

pub(crate) fn config(network: &str, bits: u8, min: &str, max: &str) -> NetworkConfig {
    let v4 = SubnetRange {
        network: network.parse().unwrap(),
        subnet_length_bits: bits,
        subnet_min: min.parse().unwrap(),
        subnet_max: max.parse().unwrap(),
    };
    NetworkConfig {
        ranges: Families::of_v4(v4, None),
        enable_nftables: false,
        backend: BackendConfig { kind: BackendKind::Udp.into(), settings: serde_json::Value::Null },
    }
}

pub(crate) fn lease(subnet: &str, host: u8) -> Lease {
    let subnets: Prefixes = subnet.parse().unwrap();
    Lease {
        subnets,
        key: subnets.key(),
        attributes: LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, host)),
        revision: 1,
        created_revision: 1,
        lifetime: Lifetime::Leased { id: 1, expires_unix: None },
    }
}

fn free(config: &NetworkConfig, leases: &[Lease], count_max: usize) -> Vec<String> {
    free_subnets(&v4(config), subnets(leases), count_max).iter().map(Prefix::to_string).collect()
}

fn v4(config: &NetworkConfig) -> SubnetRange {
    config.v4().expect("it has IPv4")
}

fn subnets(leases: &[Lease]) -> Vec<Prefix> {
    leases.iter().filter_map(Lease::v4).collect()
}

#[test]
fn free_subnets_avoid_leases_of_every_length() {
    let config = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.8.0");
    assert_eq!(free(&config, &[], 3), ["10.5.1.0/24", "10.5.2.0/24", "10.5.3.0/24"]);
    let leases = [
        lease("10.5.8.0/30", 4),
        lease("10.5.4.0/22", 1),
        lease("10.5.2.128/25", 2),
        lease("10.5.4.0/24", 3),
        lease("192.168.0.0/16", 5),
    ];
    assert_eq!(free(&config, &leases, 100), ["10.5.1.0/24", "10.5.3.0/24"]);
    assert!(free(&config, &[lease("10.0.0.0/8", 1)], 100).is_empty());
}

#[test]
fn free_subnets_equal_slow_overlap_check() {
    let config = config("10.5.0.0/16", 26, "10.5.0.64", "10.5.255.192");
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let leases: Vec<_> = (0..random.usize(..40))
            .map(|_| {
                let address = Ipv4Addr::from_bits(0x0A05_0000 | random.u32(..0x1_0000));
                let subnet = Prefix::new(address, random.u8(20..=32)).unwrap();
                lease(&subnet.to_string(), 1)
            })
            .collect();
        let mut slow = Vec::new();
        let mut subnet = Prefix::new(v4(&config).subnet_min, 26).unwrap();
        while subnet.network() <= v4(&config).subnet_max {
            if !leases.iter().any(|lease| lease.subnets.overlaps(subnet.into())) {
                slow.push(subnet);
            }
            subnet = subnet.next().unwrap();
        }
        assert_eq!(
            free_subnets(&v4(&config), subnets(&leases), usize::MAX),
            slow,
            "with {leases:?}"
        );
    }
}

#[test]
fn free_subnets_stop_at_end_of_addresses() {
    let config = config("255.255.255.0/24", 26, "255.255.255.64", "255.255.255.192");
    assert_eq!(free(&config, &[], 100).len(), 3);
}

#[test]
fn usable_own_lease_is_preferred() {
    let config = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0");
    let own = LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 7));
    let leases = [lease("10.6.1.0/24", 7), lease("10.5.3.0/24", 7), lease("10.5.4.0/24", 7)];
    let held = |leases: &[Lease], previous: Option<&str>| {
        let previous = previous.map(|text| text.parse().unwrap());
        let leases: Vec<_> = leases.iter().cloned().map(Arc::new).collect();
        held_by(&leases, &own, &config, previous).map(|lease| lease.subnets.to_string())
    };
    assert_eq!(held(&leases, Some("10.5.3.0/24")).as_deref(), Some("10.5.3.0/24"));
    assert_eq!(held(&leases[..1], None).as_deref(), Some("10.6.1.0/24"));
    assert_eq!(held(&[lease("10.5.3.0/24", 8)], Some("10.5.3.0/24")), None);
    let mut reserved = leases.clone();
    reserved[2].lifetime = Lifetime::Reservation;
    assert_eq!(held(&reserved, Some("10.5.3.0/24")).as_deref(), Some("10.5.4.0/24"));
}
