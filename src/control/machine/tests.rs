//! Single steps of the machine that need no store.

use super::*;
use crate::control::lease::Lifetime;

fn machine() -> Machine {
    let subnet: Prefix = "10.5.100.0/24".parse().unwrap();
    let lease = Lease {
        subnet,
        key: subnet.key(),
        attributes: LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 1)),
        revision: 7,
        created_revision: 7,
        lifetime: Lifetime::Leased { id: 5, expires_unix: None },
    };
    let network = "10.5.0.0/16".parse().unwrap();
    let own = OwnLease { lease, expires: Some(Duration::from_secs(86_400)), network };
    let margin = Duration::from_secs(3600);
    let random = fastrand::Rng::with_seed(1);
    let now = Now { boot: Duration::ZERO, unix_seconds: 1_000 };
    Machine::new(own, margin, Timing::default(), random, now)
}

#[test]
fn a_watched_flood_of_leases_costs_bounded_memory() {
    let mut machine = machine();
    let own = machine.own.lease.clone();
    for number in 0..ENTRIES_MAX + 10 {
        machine.insert(Lease { key: number.to_string(), ..own.clone() });
    }
    assert_eq!(machine.mirror.len(), ENTRIES_MAX);
    let refused = machine.commands.iter().filter(|c| matches!(c, Command::Reject(_))).count();
    assert_eq!(refused, 10, "what does not fit is not counted");
    let key = own.key.clone();
    machine.insert(own);
    assert!(machine.mirror.contains_key(&key), "a flood hides the own lease");
}
