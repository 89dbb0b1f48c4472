//! Getting a subnet: the one this node has, the one it had, or a free one. Lost races are
//! normal and retried; nothing here ends the daemon.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::sleep;
use tracing::info;

use crate::config::network::NetworkConfig;
use crate::control::backoff::Backoff;
use crate::control::choose::{free_subnets, held_by};
use crate::control::error::{AcquireError, StoreError, StoreResult};
use crate::control::identity::Phase;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::manager::SubnetManager;
use crate::control::snapshot::{ENTRIES_MAX, Granted, OwnLease, Snapshot};
use crate::control::store::{Leased, Store};
use crate::route::Prefix;

/// Free subnets to pick from, as in flannel.
const CANDIDATES: usize = 100;
/// How much further each lost race looks, so that a thousand nodes spread out instead of fighting
/// for the same hundred: most of them lose the first race, and a third of these the second.
const CANDIDATES_GROWTH: usize = 16;
/// Most candidates after lost races: as many as a store may hold leases.
const CANDIDATES_MAX: usize = ENTRIES_MAX;
/// Subnets tried on one listing: each costs one request, a new listing and a new lease four.
const TRIES_PER_LISTING: usize = 5;
/// First and longest pause before another listing: about one and about fifty quorum writes.
const RACE_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// Listings whose subnets were all lost before the caller gets an error. A node of a thousand that
/// start at once needs one; in a network with room for just as many, ten. Sixty-four mean that the
/// store's answers contradict each other.
const LISTINGS_MAX: u32 = 64;

impl SubnetManager {
    /// Acquires a subnet for the node of `attributes`. Lost races are retried; other errors
    /// are returned and worth another call.
    pub async fn acquire(
        &self,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
    ) -> Result<OwnLease, AcquireError> {
        let granted = match &self.store {
            Store::Leased(store) => self.lease(store, config, attributes).await?,
            Store::Assigned(store) => match store.take_assigned(config.network, attributes).await {
                Err(AcquireError::Store(error)) => self.noted(Err(error))?,
                answered => {
                    self.status.edit().store.up = true;
                    answered?
                }
            },
        };
        let Granted { lease, expires } = granted;
        Ok(OwnLease { lease, expires, network: config.network })
    }

    /// What the node of `public_ip` published in an earlier run, if anything.
    pub async fn former(
        &self,
        config: &NetworkConfig,
        public_ip: Ipv4Addr,
    ) -> StoreResult<Option<LeaseAttributes>> {
        let former = match &self.store {
            Store::Leased(_) => self.store.list().await.map(|snapshot| {
                let held = held_by(&snapshot.leases, public_ip, config, self.previous);
                held.map(|lease| lease.attributes.clone())
            }),
            Store::Assigned(store) => store.former().await,
        };
        self.noted(former)
    }

    async fn lease(
        &self,
        store: &Leased,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
    ) -> Result<Granted, AcquireError> {
        let mut pause = Backoff::between(RACE_PAUSE.0, RACE_PAUSE.1);
        let (mut previous, mut candidates) = (self.previous, CANDIDATES);
        for _ in 0..LISTINGS_MAX {
            let claimed = self.claim(store, attributes.public_ip).await;
            self.noted_write(claimed)?;
            let snapshot = self.noted(self.store.list().await)?;
            self.status.reject(&snapshot.rejected);
            match self.attempt(store, config, attributes, &snapshot, previous, candidates).await {
                Ok(Some(granted)) => return Ok(granted),
                Ok(None) => {}
                Err(AcquireError::Store(StoreError::Conflict(_))) => {
                    candidates = wider(candidates);
                    // Whatever took it, a listing that does not show it would name it again.
                    previous = None;
                    sleep(pause.next_wait()).await;
                }
                Err(error) => return Err(error),
            }
        }
        Err(AcquireError::Contended(LISTINGS_MAX))
    }

    /// Takes a subnet by what one listing shows; `None` if something changed: list again.
    async fn attempt(
        &self,
        store: &Leased,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
        snapshot: &Snapshot,
        previous: Option<Prefix>,
        candidates: usize,
    ) -> Result<Option<Granted>, AcquireError> {
        if let Some(held) = held_by(&snapshot.leases, attributes.public_ip, config, previous) {
            return self.reuse(store, config, attributes, held).await;
        }
        let taken: Vec<Prefix> = snapshot.taken(config.network).collect();
        let is_free = |subnet: &Prefix| !taken.iter().any(|other| other.overlaps(*subnet));
        if let Some(previous) = previous.filter(is_free) {
            if config.leasable(previous) {
                info!("Found previously leased subnet ({previous}), reusing");
                return self.create_any(store, std::iter::once(previous), attributes).await;
            }
            info!(
                "Found previously leased subnet ({previous}) not compatible with the Etcd \
                 network config, ignoring"
            );
        }
        let free = free_subnets(config, taken.clone(), candidates);
        let (Some(first), Some(last)) = (free.first(), free.last()) else {
            self.status.edit().store.subnets_exhausted += 1;
            let NetworkConfig { subnet_min, subnet_max, subnet_length_bits, .. } = *config;
            return Err(AcquireError::Exhausted(subnet_min, subnet_max, subnet_length_bits));
        };
        info!("Picking subnet in range {} ... {}", first.network(), last.network());
        self.create_any(store, picks(config, taken, free), attributes).await
    }

    /// Takes the subnet that the node has by the store, or deletes an entry that it can't use.
    async fn reuse(
        &self,
        store: &Leased,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
        held: &Lease,
    ) -> Result<Option<Granted>, AcquireError> {
        let (subnet, public_ip) = (held.subnet, attributes.public_ip);
        if config.leasable(subnet) {
            info!("Found lease ({subnet}) for current IP ({public_ip}), reusing");
            let lease = Lease { attributes: attributes.clone(), ..held.clone() };
            let updated = store.write(&lease, self.timing.lease_ttl, Phase::Starts).await;
            return Ok(Some(self.noted_write(updated)?));
        }
        info!(
            "Found lease ({subnet}) for current IP ({public_ip}) but not compatible with current \
             config, deleting"
        );
        self.noted_write(store.delete(held).await)?;
        Ok(None)
    }

    /// Takes the first of `subnets` that nobody else took meanwhile.
    async fn create_any(
        &self,
        store: &Leased,
        subnets: impl Iterator<Item = Prefix>,
        attributes: &LeaseAttributes,
    ) -> Result<Option<Granted>, AcquireError> {
        let mut lost = String::new();
        for subnet in subnets {
            let wanted = Lease::wanted(subnet, attributes.clone());
            let created = store.write(&wanted, self.timing.lease_ttl, Phase::Starts).await;
            match self.noted_write(created) {
                Err(StoreError::Conflict(key)) => lost = key,
                created => {
                    let (created, public_ip) = (created?, attributes.public_ip);
                    info!("Allocated lease ({subnet}) to current node ({public_ip})");
                    return Ok(Some(created));
                }
            }
        }
        Err(StoreError::Conflict(lost).into())
    }
}

/// Subnets to try in turn, at random: the first of `free`, each further one from a wider range.
fn picks(
    config: &NetworkConfig,
    taken: Vec<Prefix>,
    free: Vec<Prefix>,
) -> impl Iterator<Item = Prefix> {
    let mut range = free;
    let mut tried = Vec::new();
    std::iter::from_fn(move || {
        if !tried.is_empty() {
            // Only now: most nodes never lose a race.
            range = free_subnets(config, taken.clone(), wider(range.len()));
            range.retain(|subnet| !tried.contains(subnet));
        }
        let picked = *fastrand::choice(&range)?;
        tried.push(picked);
        Some(picked)
    })
    .take(TRIES_PER_LISTING)
}

fn wider(candidates: usize) -> usize {
    candidates.saturating_mul(CANDIDATES_GROWTH).min(CANDIDATES_MAX)
}

#[cfg(test)]
mod tests;
