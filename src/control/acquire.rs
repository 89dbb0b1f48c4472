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
        let mut pause = Backoff::between(RACE_PAUSE);
        let (mut previous, mut candidates) = (self.previous, CANDIDATES);
        for _ in 0..LISTINGS_MAX {
            let claimed = self.claim(store, attributes.public_ip).await;
            self.noted_write(claimed)?;
            let snapshot = self.noted(self.store.list().await)?;
            self.status.reject(&snapshot.rejected);
            let candidates = &mut candidates;
            match self.attempt(store, config, attributes, &snapshot, previous, candidates).await {
                Ok(Some(granted)) => return Ok(granted),
                Ok(None) => {}
                Err(AcquireError::Store(StoreError::Conflict(_))) => {
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
        candidates: &mut usize,
    ) -> Result<Option<Granted>, AcquireError> {
        if let Some(held) = held_by(&snapshot.leases, attributes.public_ip, config, previous) {
            return self.reuse(store, config, attributes, held).await;
        }
        let mut taken: Vec<Prefix> = snapshot.taken(config.network).collect();
        let is_free = |subnet: &Prefix| !taken.iter().any(|other| other.overlaps(*subnet));
        if let Some(previous) = previous.filter(is_free) {
            if config.leasable(previous) {
                info!("Found previously leased subnet ({previous}), reusing");
                return Ok(Some(self.create(store, previous, attributes).await?));
            }
            info!(
                "Found previously leased subnet ({previous}) not compatible with the Etcd \
                 network config, ignoring"
            );
        }
        let mut lost = None;
        for _ in 0..TRIES_PER_LISTING {
            let free = free_subnets(config, taken.clone(), *candidates);
            let Some(picked) = fastrand::choice(&free).copied() else { break };
            if lost.is_none() {
                let (first, last) = (free[0].network(), free[free.len() - 1].network());
                info!("Picking subnet in range {first} ... {last}");
            }
            match self.create(store, picked, attributes).await {
                Err(StoreError::Conflict(key)) => lost = Some(key),
                created => return Ok(Some(created?)),
            }
            taken.push(picked);
            *candidates = candidates.saturating_mul(CANDIDATES_GROWTH).min(CANDIDATES_MAX);
        }
        if let Some(key) = lost {
            return Err(StoreError::Conflict(key).into());
        }
        self.status.edit().store.subnets_exhausted += 1;
        let NetworkConfig { subnet_min, subnet_max, subnet_length_bits, .. } = *config;
        Err(AcquireError::Exhausted(subnet_min, subnet_max, subnet_length_bits))
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

    /// Takes a subnet, unless somebody else took it meanwhile.
    async fn create(
        &self,
        store: &Leased,
        subnet: Prefix,
        attributes: &LeaseAttributes,
    ) -> StoreResult<Granted> {
        let wanted = Lease::wanted(subnet, attributes.clone());
        let created = store.write(&wanted, self.timing.lease_ttl, Phase::Starts).await;
        self.noted_write(created).inspect(|_| {
            info!("Allocated lease ({subnet}) to current node ({})", attributes.public_ip);
        })
    }
}

#[cfg(test)]
mod tests;
