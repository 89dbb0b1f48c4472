//! From everything in the store to the peers that traffic may go to. Pure: the same entries
//! always give the same peers, whatever the order in which they came.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::sync::Arc;

use crate::config::options::is_host_address;
use crate::control::lease::{Lease, Peers};
use crate::control::rejected::{RejectReason, Rejected};
use crate::route::{IpAddress, Prefix, Prefixes};

/// The usable leases in `networks` of other nodes than the one of `own`, and what is wrong with the
/// rest. What of a lease lies outside of them is left out.
///
/// Of leases that overlap, the one made first stays: a later one cannot take traffic away.
pub fn select<'a>(
    leases: impl Iterator<Item = &'a Arc<Lease>>,
    own: &Lease,
    networks: Prefixes,
) -> (Peers, Vec<Rejected>) {
    let mut rejected = Vec::new();
    let mut usable = Vec::new();
    for lease in leases.filter(|lease| lease.key != own.key) {
        match inside(lease, own, networks) {
            Ok((subnets, unused)) => {
                usable.push((subnets, lease));
                rejected.extend(unused.map(|(reason, it)| rejection(lease, reason, it)));
            }
            Err((reason, detail)) => rejected.push(rejection(lease, reason, detail)),
        }
    }
    // Where the store does not tell which is older, an entry of another size than all others have
    // takes nobody's place.
    let order = |(subnets, lease): &(Prefixes, &Arc<Lease>)| {
        (lease.created_revision, !subnets.has_lengths_of(own.subnets))
    };
    usable.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.1.key.cmp(&b.1.key)));
    let (mut peers, mut taken) = (Peers::new(), Taken::default());
    for (subnets, lease) in usable {
        // Of one whose IPv6 subnet another has, IPv4 may be used all the same.
        let all_or_v4 = [Some(subnets), subnets.v4().map(Prefixes::from)];
        let used = all_or_v4.into_iter().flatten().find(|subnets| taken.add(*subnets));
        if used != Some(subnets) {
            let detail = format!("{subnets} overlaps an older lease");
            let detail = if used.is_some() { of_ipv6_alone(&detail) } else { detail };
            rejected.push(rejection(lease, RejectReason::OverlapsOther, detail));
        }
        peers.extend(used.map(|subnets| {
            let is_whole = subnets == lease.subnets;
            let part = || Arc::new(Lease { subnets, ..Lease::clone(lease) });
            (subnets, if is_whole { Arc::clone(lease) } else { part() })
        }));
    }
    (peers, rejected)
}

/// Whether traffic goes the same ways with both sets.
pub fn same_ways(a: &Peers, b: &Peers) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|((subnet, lease), (other_subnet, other))| {
            subnet == other_subnet && lease.attributes == other.attributes
        })
}

/// Why something of a lease is not used.
type Objection = (RejectReason, String);

/// What of `lease` may be used, and why IPv6 is not if it could be.
fn inside(
    lease: &Lease,
    own: &Lease,
    networks: Prefixes,
) -> Result<(Prefixes, Option<Objection>), Objection> {
    let (of, theirs, ours) = (lease.subnets, &lease.attributes, &own.attributes);
    let Some(subnets) = of.within(networks) else {
        let detail = format!("{of} lies outside the network {networks}");
        return Err((RejectReason::OutsideNetwork, detail));
    };
    let holds = |address| networks.v4().is_some_and(|network| network.contains(address));
    let v4 = subnets.v4().map(Prefixes::from);
    if v4.unwrap_or(subnets).overlaps(own.subnets) {
        return Err((
            RejectReason::OverlapsOwn,
            format!("{of} overlaps this node's {}", own.subnets),
        ));
    }
    if let (Some(address), Some(own_address)) = (theirs.public_ip, ours.public_ip) {
        return if address == own_address {
            Err((RejectReason::OwnAddress, format!("its PublicIP {address} is this node's")))
        } else if !is_host_address(address.into()) {
            Err((RejectReason::BadAddress, format!("its PublicIP {address} is no host's")))
        } else if holds(address) && !holds(own_address) {
            // The route to the pods' network leads there, into the tunnel again.
            let detail = format!("its PublicIP {address} lies in the pods' network {networks}");
            Err((RejectReason::BadAddress, detail))
        } else {
            let has_both = of.v6().is_some() && networks.v6().is_some();
            let unused = has_both.then(|| wrong_ipv6(lease, own, networks)).flatten();
            let unused = unused.map(|(reason, detail)| (reason, of_ipv6_alone(&detail)));
            Ok((v4.filter(|_| unused.is_some()).unwrap_or(subnets), unused))
        };
    }
    // One of the two has no IPv4 address: they know each other by the other one.
    if v4.is_some() {
        return Err((RejectReason::BadAddress, "it has no PublicIP".to_owned()));
    }
    match wrong_ipv6(lease, own, networks) {
        None if theirs.public_ipv6.is_none() => {
            Err((RejectReason::BadAddress, "it has no PublicIPv6".to_owned()))
        }
        None => Ok((subnets, None)),
        Some(objection) => Err(objection),
    }
}

/// What costs a peer IPv6 alone.
fn of_ipv6_alone(detail: &str) -> String {
    format!("IPv6 is not used, IPv4 is: {detail}")
}

/// Why the IPv6 of `lease` is not used. A node without a data plane may lack a PublicIPv6.
fn wrong_ipv6(lease: &Lease, own: &Lease, networks: Prefixes) -> Option<Objection> {
    if lease.subnets.within(networks).is_none_or(|subnets| subnets.v6().is_none()) {
        let detail = format!("of {} the IPv6 lies outside the network {networks}", lease.subnets);
        return Some((RejectReason::OutsideNetwork, detail));
    }
    if lease.subnets.overlaps(own.subnets) {
        let detail = format!("{} overlaps this node's {}", lease.subnets, own.subnets);
        return Some((RejectReason::OverlapsOwn, detail));
    }
    if let Some(text) = &lease.attributes.unreadable_ipv6 {
        let detail = format!("its PublicIPv6 {text} is no IPv6 address");
        return Some((RejectReason::BadAddress, detail));
    }
    let address = lease.attributes.public_ipv6?;
    let is_host = is_host_address(address.into());
    if lease.attributes.public_ipv6 == own.attributes.public_ipv6 {
        Some((RejectReason::OwnAddress, format!("its PublicIPv6 {address} is this node's")))
    } else if !is_host || networks.v6().is_some_and(|network| network.contains(address)) {
        Some((RejectReason::BadAddress, format!("its PublicIPv6 {address} is no host's")))
    } else {
        None
    }
}

/// Subnets of which no two overlap.
#[derive(Debug, Default)]
pub(super) struct Taken {
    v4: BTreeSet<Prefix>,
    v6: BTreeSet<Prefix<Ipv6Addr>>,
}

impl Taken {
    /// Those of `peers`.
    pub(super) fn by(peers: &Peers) -> Self {
        let v4 = peers.keys().filter_map(|subnets| subnets.v4()).collect();
        Self { v4, v6: peers.keys().filter_map(|subnets| subnets.v6()).collect() }
    }

    /// Whether one of them overlaps `subnets`.
    pub(super) fn overlaps(&self, subnets: Prefixes) -> bool {
        subnets.v4().is_some_and(|subnet| overlapped(&self.v4, subnet))
            || subnets.v6().is_some_and(|subnet| overlapped(&self.v6, subnet))
    }

    /// Adds `subnets` unless one of them overlaps; returns whether they were added.
    fn add(&mut self, subnets: Prefixes) -> bool {
        let is_free = !self.overlaps(subnets);
        if is_free {
            self.v4.extend(subnets.v4());
            self.v6.extend(subnets.v6());
        }
        is_free
    }
}

/// Whether one of `taken`, which do not overlap each other, overlaps `subnet`. Prefixes sort by
/// network, so only the neighbours can.
fn overlapped<A: IpAddress>(taken: &BTreeSet<Prefix<A>>, subnet: Prefix<A>) -> bool {
    let neighbours = [taken.range(..=subnet).next_back(), taken.range(subnet..).next()];
    neighbours.into_iter().flatten().any(|other| other.overlaps(subnet))
}

fn rejection(lease: &Lease, reason: RejectReason, detail: String) -> Rejected {
    Rejected { key: lease.key.clone(), reason, detail, revision: lease.revision }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::lease::{LeaseAttributes, Lifetime};

    fn lease(subnet: &str, public_ip: &str, created_revision: i64) -> Lease {
        let subnets: Prefixes = subnet.parse().unwrap();
        Lease {
            subnets,
            key: subnets.key(),
            attributes: LeaseAttributes::udp(public_ip.parse().unwrap()),
            revision: created_revision,
            created_revision,
            lifetime: Lifetime::Reservation,
        }
    }

    fn selected(leases: &[Lease]) -> (Vec<String>, Vec<(String, RejectReason)>) {
        let own = lease("10.5.9.0/24", "192.0.2.9", 2);
        let leases: Vec<_> = leases.iter().cloned().map(Arc::new).collect();
        let (peers, rejected) = select(leases.iter(), &own, "10.5.0.0/16".parse().unwrap());
        let peers = peers.keys().map(Prefixes::to_string).collect();
        (peers, rejected.into_iter().map(|r| (r.key, r.reason)).collect())
    }

    #[test]
    fn unusable_lease_is_rejected_alone_with_reason() {
        let (peers, rejected) = selected(&[
            lease("10.5.1.0/24", "192.0.2.1", 1),
            lease("10.5.9.0/24", "192.0.2.9", 2),
            lease("10.6.1.0/24", "192.0.2.2", 3),
            lease("10.0.0.0/8", "192.0.2.3", 4),
            lease("10.5.8.0/22", "192.0.2.4", 5),
            lease("10.5.9.128/25", "192.0.2.4", 5),
            lease("10.5.2.0/24", "0.0.0.0", 6),
            lease("10.5.3.0/24", "127.0.0.1", 7),
            lease("10.5.4.0/24", "224.0.0.1", 8),
            lease("10.5.5.0/24", "255.255.255.255", 9),
            lease("10.5.6.0/24", "192.0.2.9", 10),
            lease("10.5.7.0/24", "192.0.2.7", 11),
            lease("10.5.10.0/24", "10.5.44.1", 12),
        ]);
        assert_eq!(peers, ["10.5.1.0/24", "10.5.7.0/24"]);
        let reasons: Vec<_> =
            rejected.iter().map(|(key, reason)| (key.as_str(), *reason)).collect();
        assert_eq!(
            reasons,
            [
                ("10.6.1.0-24", RejectReason::OutsideNetwork),
                ("10.0.0.0-8", RejectReason::OutsideNetwork),
                ("10.5.8.0-22", RejectReason::OverlapsOwn),
                ("10.5.9.128-25", RejectReason::OverlapsOwn),
                ("10.5.2.0-24", RejectReason::BadAddress),
                ("10.5.3.0-24", RejectReason::BadAddress),
                ("10.5.4.0-24", RejectReason::BadAddress),
                ("10.5.5.0-24", RejectReason::BadAddress),
                ("10.5.6.0-24", RejectReason::OwnAddress),
                ("10.5.10.0-24", RejectReason::BadAddress),
            ]
        );
    }

    #[test]
    fn older_overlapping_lease_keeps_traffic() {
        let old = lease("10.5.16.0/24", "192.0.2.1", 5);
        let covering = lease("10.5.16.0/20", "192.0.2.2", 9);
        let inside = lease("10.5.16.128/25", "192.0.2.3", 7);
        let apart = lease("10.5.17.0/24", "192.0.2.4", 8);
        let mut leases = [old, covering, inside, apart];
        for _ in 0..leases.len() {
            leases.rotate_left(1);
            let (peers, rejected) = selected(&leases);
            assert_eq!(peers, ["10.5.16.0/24", "10.5.17.0/24"]);
            assert_eq!(rejected.len(), 2);
            assert!(rejected.iter().all(|(_, reason)| *reason == RejectReason::OverlapsOther));
        }
    }

    #[test]
    fn where_no_age_is_known_a_wide_entry_takes_nobodys_place() {
        let wide = lease("10.5.16.0/20", "192.0.2.2", 0);
        let leases =
            [wide, lease("10.5.17.0/24", "192.0.2.1", 0), lease("10.5.18.0/24", "192.0.2.3", 0)];
        let (peers, rejected) = selected(&leases);
        assert_eq!(peers, ["10.5.17.0/24", "10.5.18.0/24"]);
        assert_eq!(rejected, [("10.5.16.0-20".to_owned(), RejectReason::OverlapsOther)]);
    }

    #[test]
    fn new_address_changes_routes_rewritten_value_does_not() {
        let set = |lease: Lease| Peers::from([(lease.subnets, lease.into())]);
        let before = set(lease("10.5.1.0/24", "192.0.2.1", 1));
        assert!(same_ways(&before, &set(lease("10.5.1.0/24", "192.0.2.1", 2))));
        assert!(!same_ways(&before, &set(lease("10.5.1.0/24", "192.0.2.2", 1))));
        assert!(!same_ways(&before, &set(lease("10.5.2.0/24", "192.0.2.1", 1))));
        assert!(!same_ways(&before, &Peers::new()));
    }

    #[test]
    fn a_family_that_cannot_be_used_costs_only_itself() {
        let networks = "10.5.0.0/16,fd00:5::/48".parse().unwrap();
        let own = Lease {
            attributes: LeaseAttributes {
                public_ipv6: "fd99::9".parse().ok(),
                ..LeaseAttributes::udp("192.0.2.9".parse().unwrap())
            },
            ..lease("10.5.9.0/24,fd00:5:0:9::/64", "192.0.2.9", 2)
        };
        let with = |number: u8, v6: &str, address: &str| {
            let subnets = format!("10.5.{number}.0/24,{v6}");
            let mut lease = lease(&subnets, &format!("192.0.2.{number}"), i64::from(number));
            lease.attributes.public_ipv6 = address.parse().ok();
            lease
        };
        let mut unreadable = with(10, "fd00:5:0:10::/64", "");
        unreadable.attributes.unreadable_ipv6 = Some("\"fd99::zz\"".to_owned());
        let leases = [
            with(1, "fd00:5:0:1::/64", "fd99::1"),
            with(2, "fd00:6:0:2::/64", "fd99::2"),
            with(3, "fd00:5:0:3::/64", "fd99::9"),
            with(4, "fd00:5:0:4::/64", "ff02::1"),
            with(5, "fd00:5:0:5::/64", "fd00:5:0:77::1"),
            with(6, "fd00:5:0:1::/64", "fd99::6"),
            with(7, "fd00:5:0:7::/64", ""),
            with(8, "fd00:5:0:9::/64", "fd99::8"),
            unreadable,
        ];
        let leases = leases.map(Arc::new);
        let (peers, rejected) = select(leases.iter(), &own, networks);
        let peers: Vec<_> = peers.keys().map(Prefixes::to_string).collect();
        let both = |number: u8| format!("10.5.{number}.0/24,fd00:5:0:{number}::/64");
        assert_eq!(peers[..3], [both(1), "10.5.2.0/24".to_owned(), "10.5.3.0/24".to_owned()]);
        let alone = |number: u8| format!("10.5.{number}.0/24");
        assert_eq!(peers[3..], [alone(4), alone(5), alone(6), both(7), alone(8), alone(10)]);
        for Rejected { key, detail, .. } in &rejected {
            assert!(detail.starts_with("IPv6 "), "{key} is said to cost IPv4: {detail}");
        }
        assert!(rejected.iter().any(|it| it.detail.contains("\"fd99::zz\"")), "{rejected:?}");
        let reasons: Vec<_> = rejected.iter().map(|it| it.reason).collect();
        let bad = RejectReason::BadAddress;
        let [own, other] = [RejectReason::OverlapsOwn, RejectReason::OverlapsOther];
        let [outside, address] = [RejectReason::OutsideNetwork, RejectReason::OwnAddress];
        assert_eq!(reasons, [outside, address, bad, bad, own, bad, other]);
    }
}
