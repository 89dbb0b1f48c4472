//! A simulated node that runs flanneld, beside the others: it compares its own key alone, with
//! absence, when it takes a subnet, and nothing when it renews. It skips what it cannot read.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use super::node::attributes;
use super::{MARGIN, TTL, World, network};
use crate::control::choose::{free_subnets, held_by};
use crate::control::lease::Lease;
use crate::route::Prefixes;

/// Before it starts again, or asks again.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Flannel {
    address: IpAddr,
    /// How many IPv6 subnets its configuration has; none without IPv6.
    pub(super) v6_subnets: u16,
    own: Option<Prefixes>,
    /// What it listed, and has not written by yet.
    listed: Option<Vec<Arc<Lease>>>,
    /// When it does something next, by the world's time.
    pub(super) at: Duration,
}

impl Flannel {
    pub(super) fn new(number: u8, v6_subnets: u16) -> Self {
        let address = Ipv4Addr::new(203, 0, 113, number).into();
        Self { address, v6_subnets, own: None, listed: None, at: Duration::ZERO }
    }

    /// Starts anew, perhaps with the other configuration.
    pub(super) fn restart(&mut self, v6_subnets: u16, at: Duration) {
        *self = Self { v6_subnets, own: None, listed: None, at, ..*self };
    }
}

impl World {
    /// One step of a flannel node; returns whether there was one to make. `faulty`: it may not have
    /// been told of what became of its entry.
    pub(super) fn act_as_flannel(&mut self, number: usize, faulty: bool) -> bool {
        let World { flannels, store, random, time, .. } = self;
        let flannel = &mut flannels[number];
        if flannel.at > *time || store.is_down {
            return false;
        }
        flannel.at = *time;
        let value = attributes(flannel.address, flannel.v6_subnets > 0);
        let state = store.state_at(store.point());
        if let Some(own) = flannel.own {
            let is_own = |lease: &Lease| lease.subnets == own && lease.attributes == value;
            if state.iter().any(is_own) || faulty && random.u8(..4) == 0 {
                store.flannel_puts(own, value, *time, false);
                flannel.at += TTL - MARGIN;
            } else {
                (flannel.own, flannel.listed) = (None, None);
                flannel.at += PAUSE;
            }
            return true;
        }
        let Some(leases) = flannel.listed.take() else {
            flannel.listed = Some(state.iter().cloned().map(Arc::new).collect());
            return true;
        };
        let config = network(true, flannel.v6_subnets);
        if let Some(held) = held_by(&leases, &value, &config, None) {
            if config.is_leasable(held.subnets) {
                store.flannel_puts(held.subnets, value, *time, false);
                (flannel.own, flannel.at) = (Some(held.subnets), *time + TTL - MARGIN);
            } else {
                store.flannel_deletes(held.subnets, flannel.address);
            }
            return true;
        }
        let taken = leases.iter().filter_map(|lease| lease.v4()).collect();
        let v4 = config.v4().and_then(|range| random.choice(free_subnets(&range, taken, 100)));
        let taken = leases.iter().filter_map(|lease| lease.subnets.v6()).collect();
        let v6 = config.v6().map(|range| random.choice(free_subnets(&range, taken, 100)));
        let picked = v4.zip(Some(v6)).filter(|(_, v6)| *v6 != Some(None));
        let picked = picked.map(|(v4, v6)| Prefixes::of_v4(v4, v6.flatten()));
        flannel.own = picked.filter(|picked| store.flannel_puts(*picked, value, *time, true));
        flannel.at += if flannel.own.is_some() { TTL - MARGIN } else { PAUSE };
        true
    }
}
