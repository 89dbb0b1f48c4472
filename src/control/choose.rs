//! Which subnet to take. Pure: leases and configuration in, candidates out; the caller
//! picks at random.

use std::net::Ipv4Addr;

use crate::config::network::NetworkConfig;
use crate::control::lease::{Lease, Lifetime};
use crate::route::Prefix;

/// The lease that `public_ip` holds already. Of several, a compatible one comes first, then a
/// reservation, then the one of the last run.
pub fn held_by<'a>(
    leases: &'a [Lease],
    public_ip: Ipv4Addr,
    config: &NetworkConfig,
    previous: Option<Prefix>,
) -> Option<&'a Lease> {
    leases.iter().filter(|lease| lease.attributes.public_ip == public_ip).max_by_key(|lease| {
        (
            config.leasable(lease.subnet),
            lease.lifetime == Lifetime::Reservation,
            Some(lease.subnet) == previous,
        )
    })
}

/// Up to `count_max` subnets of the configuration, from the lowest, that overlap none of `taken`.
pub fn free_subnets(
    config: &NetworkConfig,
    mut taken: Vec<Prefix>,
    count_max: usize,
) -> Vec<Prefix> {
    taken.sort_unstable();
    let mut taken = taken.into_iter().peekable();
    let mut free = Vec::new();
    // The highest address of all taken subnets that begin at or before the candidate.
    let mut taken_until: Option<Ipv4Addr> = None;
    let mut candidate = Prefix::new(config.subnet_min, config.subnet_length_bits);
    while let Some(subnet) = candidate.filter(|subnet| subnet.network() <= config.subnet_max) {
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

#[cfg(test)]
pub(crate) mod tests;
