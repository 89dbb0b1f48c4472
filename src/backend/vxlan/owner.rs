//! Which node owns a hardware address that several leases name. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::control::lease::{Lease, Lifetime};
use crate::host::state::MacAddress;

use super::data::vtep_mac;

/// The kernel sends what is for one hardware address to one host, which may have two subnets: an
/// old lease lingers beside the new one. Of several hosts the one whose lease was written last
/// has it: the others may be gone, and their leases linger for up to a day. Gives the leases that
/// can be set up, each with its hardware address, and why the others cannot.
pub(super) fn resolve<'a>(
    leases: impl Iterator<Item = &'a Lease>,
) -> (Vec<(&'a Lease, MacAddress)>, Vec<String>) {
    let (mut usable, mut unusable, mut named) = (Vec::new(), Vec::new(), Vec::new());
    for lease in leases {
        match vtep_mac(&lease.attributes) {
            Some(mac) => named.push((lease, mac)),
            None => unusable.push(format!("{} names no VtepMAC", name(lease))),
        }
    }
    let mut owners: BTreeMap<MacAddress, &Lease> = BTreeMap::new();
    for (lease, mac) in &named {
        let owner = owners.entry(*mac).or_insert(lease);
        if written(lease) > written(owner) {
            *owner = lease;
        }
    }
    for (lease, mac) in named {
        let owner = owners[&mac];
        if host(owner) == host(lease) {
            usable.push((lease, mac));
        } else {
            unusable.push(format!(
                "{} has the VtepMAC {mac} of the newer lease {}; if both nodes run, one is a copy \
                 of the other: stop weftd there, delete its vxlan device and its lease, and start \
                 it again",
                name(lease),
                name(owner),
            ));
        }
    }
    (usable, unusable)
}

fn host(lease: &Lease) -> Ipv4Addr {
    lease.attributes.public_ip
}

fn name(lease: &Lease) -> String {
    format!("{} of {}", lease.subnets, host(lease))
}

/// When a lease was written, as far as its store shows; to be compared within one store only. A
/// node writes its lease again at each renewal, and etcd counts that; the local store shows when
/// the lease ends, which is as long after the writing for all nodes. What never ends, Kubernetes'
/// Nodes among it, is changed by others than its node: there only the creation counts.
fn written(lease: &Lease) -> i64 {
    match lease.lifetime {
        Lifetime::Leased { expires_unix: Some(end), .. } => i64::try_from(end).unwrap_or(i64::MAX),
        // The cache keeps no revisions, but when the entry was made.
        Lifetime::Leased { expires_unix: None, .. } => lease.revision.max(lease.created_revision),
        Lifetime::Reservation => lease.created_revision,
    }
}

#[cfg(test)]
mod tests {
    use super::super::data::data;
    use super::*;
    use crate::backend_kind::BackendKind;
    use crate::control::lease::LeaseAttributes;
    use crate::route::Prefixes;

    const ETCD: Lifetime = Lifetime::Leased { id: 7, expires_unix: None };

    fn lease(number: u8, mac: u8, lifetime: Lifetime, created: i64, revision: i64) -> Lease {
        let subnets: Prefixes = format!("10.5.{number}.0/24").parse().unwrap();
        let data = data(1, MacAddress([2, 0, 0, 0, 0, mac]));
        let public_ip = Ipv4Addr::new(192, 0, 2, number);
        let attributes = LeaseAttributes::of(BackendKind::Vxlan, public_ip, Some(data));
        let key = subnets.key();
        Lease { subnets, key, attributes, revision, created_revision: created, lifetime }
    }

    fn local(number: u8, ends: u64) -> Lease {
        let lifetime = Lifetime::Leased { id: 0, expires_unix: Some(ends) };
        // The local store's revision is a fingerprint of the value.
        lease(number, 1, lifetime, 0, i64::from(number) * -77)
    }

    fn usable(leases: &[Lease]) -> Vec<String> {
        resolve(leases.iter()).0.iter().map(|(lease, _)| lease.subnets.to_string()).collect()
    }

    #[test]
    fn newer_lease_owns_a_shared_hardware_address() {
        let node = Lifetime::Reservation;
        for (store, old, new) in [
            ("etcd", lease(1, 1, ETCD, 10, 10), lease(2, 1, ETCD, 90, 90)),
            // It came back to the address that it had before, and renewed that lease.
            ("etcd, renewed", lease(1, 1, ETCD, 50, 50), lease(2, 1, ETCD, 10, 90)),
            ("the cache", lease(1, 1, ETCD, 10, 0), lease(2, 1, ETCD, 90, 0)),
            // The kubelet, or an operator, writes to the old Node.
            ("Kubernetes", lease(1, 1, node, 10, 500), lease(2, 1, node, 90, 91)),
            ("local", local(1, 1000), local(2, 1001)),
        ] {
            assert_eq!(usable(&[old.clone(), new.clone()]), ["10.5.2.0/24"], "{store}");
            assert_eq!(usable(&[new.clone(), old.clone()]), ["10.5.2.0/24"], "{store}, reversed");
            let unusable = resolve([&old, &new].into_iter()).1.concat();
            for words in ["10.5.1.0/24 of 192.0.2.1", "newer lease 10.5.2.0/24 of 192.0.2.2"] {
                assert!(unusable.contains(words), "{store}: no {words:?} in {unusable:?}");
            }
        }
    }

    #[test]
    fn one_host_may_have_two_subnets() {
        let (first, mut second) = (lease(1, 1, ETCD, 10, 10), lease(2, 1, ETCD, 20, 20));
        second.attributes.public_ip = first.attributes.public_ip;
        let other = lease(3, 3, ETCD, 5, 5);
        let all = ["10.5.1.0/24", "10.5.2.0/24", "10.5.3.0/24"];
        assert_eq!(usable(&[first, second, other]), all);
    }

    #[test]
    fn first_of_equally_old_leases_wins() {
        let reservations = [1, 2].map(|number| lease(number, 1, Lifetime::Reservation, 0, 0));
        assert_eq!(usable(&reservations), ["10.5.1.0/24"], "an order that all nodes agree on");
    }
}
