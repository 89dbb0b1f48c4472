//! Which node owns a hardware address that several leases name. Pure.

use std::collections::BTreeMap;

use crate::backend::family::CarriedFamily;
use crate::backend::status::Unusable;
use crate::control::lease::Lease;
use crate::host::state::MacAddress;
use crate::route::Prefix;

use super::data::vtep_mac;

/// A peer that can be set up.
#[derive(Debug)]
pub(in crate::backend) struct Vtep<A: CarriedFamily> {
    /// The pods' addresses.
    pub(in crate::backend) subnet: Prefix<A>,
    /// Where the tunnel ends.
    pub(in crate::backend) host: A,
    /// Who takes the packets there.
    pub(in crate::backend) mac: MacAddress,
}

/// The kernel sends what is for one hardware address to one host, which may have two subnets: an
/// old lease lingers beside the new one. Of several hosts the one whose lease was written last
/// has it: the others may be gone, and their leases linger for up to a day. Gives the peers of the
/// family that can be set up, and why others cannot.
pub(in crate::backend) fn resolve<'a, A: CarriedFamily>(
    leases: impl Iterator<Item = &'a Lease>,
) -> (Vec<Vtep<A>>, Unusable) {
    let (mut usable, mut unusable, mut named) = (Vec::new(), Unusable::new(), Vec::new());
    for lease in leases {
        let Some((subnet, host)) = A::peer(lease) else { continue };
        let name = format!("{} of {host}", lease.subnets);
        match vtep_mac::<A>(&lease.attributes) {
            Some(mac) => named.push((lease, name, Vtep { subnet, host, mac })),
            None => unusable.extend(without_vtep::<A>(lease).map(|why| (lease.subnets, why))),
        }
    }
    let mut owners: BTreeMap<MacAddress, (i64, String, A)> = BTreeMap::new();
    for (lease, name, Vtep { host, mac, .. }) in &named {
        let this = || (lease.written(), name.clone(), *host);
        let owner = owners.entry(*mac).or_insert_with(this);
        if lease.written() > owner.0 {
            *owner = this();
        }
    }
    for (lease, name, vtep) in named {
        let (_, newer, host) = &owners[&vtep.mac];
        if *host == vtep.host {
            usable.push(vtep);
            continue;
        }
        let why = format!(
            "{name} has the VtepMAC {} of the newer lease {newer}; if both nodes run, one is a \
             copy of the other: stop weftd there, delete its vxlan device and its lease, and start \
             it again",
            vtep.mac
        );
        unusable.insert(lease.subnets, why);
    }
    (usable, unusable)
}

/// Why a peer that has an address has no end of the tunnel.
pub(in crate::backend) fn without_vtep<A: CarriedFamily>(lease: &Lease) -> Option<String> {
    let (_, host) = A::peer(lease)?;
    let is_lost = vtep_mac::<A>(&lease.attributes).is_none();
    is_lost.then(|| format!("{} of {host} names no VtepMAC", lease.subnets))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::super::data::data;
    use super::*;
    use crate::backend_kind::BackendKind;
    use crate::control::lease::{LeaseAttributes, Lifetime};
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
        let (usable, _) = resolve::<Ipv4Addr>(leases.iter());
        usable.iter().map(|vtep| vtep.subnet.to_string()).collect()
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
            let (_, unusable) = resolve::<Ipv4Addr>([&old, &new].into_iter());
            let unusable = unusable.into_values().collect::<String>();
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

    #[test]
    fn a_family_that_a_node_lacks_is_no_fault_of_its_lease() {
        let dual = |number: u8, data_v6: bool| {
            let mut lease = lease(number, number, ETCD, 1, 1);
            lease.subnets = format!("10.5.{number}.0/24,fd00:5:0:{number}::/64").parse().unwrap();
            lease.attributes.public_ipv6 = Some(format!("fd99::{number}").parse().unwrap());
            let mac = MacAddress([2, 0, 0, 0, 1, 1]);
            lease.attributes.backend_v6_data = data_v6.then(|| data(1, mac));
            lease
        };
        // Of IPv4 alone, of both, and of both without what IPv6 needs.
        let leases = [lease(1, 1, ETCD, 1, 1), dual(2, true), dual(3, false)];
        let (usable, unusable) = resolve::<Ipv6Addr>(leases.iter());
        let subnets: Vec<_> = usable.iter().map(|vtep| vtep.subnet.to_string()).collect();
        assert_eq!(subnets, ["fd00:5:0:2::/64"]);
        let unusable: Vec<_> = unusable.into_values().collect();
        assert!(
            unusable.len() == 1 && unusable[0].contains(" of fd99::3 names no"),
            "{unusable:?}"
        );
        let (usable, unusable) = resolve::<Ipv4Addr>(leases.iter());
        assert!(usable.len() == 3 && unusable.is_empty(), "one family costs the other");
    }
}
