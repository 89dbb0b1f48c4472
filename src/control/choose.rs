//! Which subnet to take. Pure: leases and configuration in, candidates out; the caller
//! picks at random.

use std::sync::Arc;

use crate::config::network::{ConfigFamily, NetworkConfig, SubnetRange};
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::route::{Prefix, Prefixes};

/// The lease that `node` holds already. Of several, a compatible one comes first, then a
/// reservation, then the one of the last run.
pub fn held_by<'a>(
    leases: &'a [Arc<Lease>],
    node: &LeaseAttributes,
    config: &NetworkConfig,
    previous: Option<Prefixes>,
) -> Option<&'a Lease> {
    let of_node = leases.iter().filter(|lease| lease.attributes.is_of_node_of(node));
    let best = of_node.max_by_key(|lease| {
        (
            config.is_leasable(lease.subnets),
            config.leasable(lease.subnets).is_some(),
            lease.lifetime == Lifetime::Reservation,
            Some(lease.subnets) == previous,
        )
    });
    best.map(Arc::as_ref)
}

/// Up to `count_max` subnets of `range`, from the lowest, that overlap none of `taken`.
pub fn free_subnets<A: ConfigFamily>(
    range: &SubnetRange<A>,
    mut taken: Vec<Prefix<A>>,
    count_max: usize,
) -> Vec<Prefix<A>> {
    taken.sort_unstable();
    let mut taken = taken.into_iter().peekable();
    let mut free = Vec::new();
    // The highest address of all taken subnets that begin at or before the candidate.
    let mut taken_until: Option<A> = None;
    let mut candidate = Prefix::new(range.subnet_min, range.subnet_length_bits);
    while let Some(subnet) = candidate.filter(|subnet| subnet.network() <= range.subnet_max) {
        while let Some(other) = taken.next_if(|other| other.network() <= subnet.last()) {
            taken_until = taken_until.max(Some(other.last()));
        }
        if taken_until.is_none_or(|until| until < subnet.network()) {
            free.push(subnet);
            if free.len() == count_max {
                break;
            }
        }
        candidate = subnet.next();
    }
    free
}

/// What of `subnets` overlaps none of `taken`.
pub fn free_of(subnets: Prefixes, taken: &[Prefixes]) -> Option<Prefixes> {
    let is_free = |one: Option<Prefixes>| {
        one.is_some_and(|one| !taken.iter().any(|other| other.overlaps(one)))
    };
    let v4 = subnets.v4().filter(|v4| is_free(Some((*v4).into())));
    let v6 = subnets.v6().filter(|v6| is_free(Prefixes::new(None, Some(*v6))));
    Prefixes::new(v4, v6)
}

#[cfg(test)]
pub(crate) mod tests;
