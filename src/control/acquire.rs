//! Getting a subnet: the one this node has, the one it had, or a free one. Lost races are
//! normal and retried; nothing here ends the daemon.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{info, warn};

use crate::config::network::NetworkConfig;
use crate::control::backoff::Backoff;
use crate::control::choose::{free_subnets, held_by};
use crate::control::error::{AcquireError, StoreError, StoreResult};
use crate::control::identity::Phase;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::manager::SubnetManager;
use crate::control::rejected::Rejected;
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
            Store::Leased(store) => {
                let (manager, previous, candidates) = (self, self.previous, CANDIDATES);
                Search { manager, store, config, attributes, previous, candidates }.lease().await?
            }
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
}

/// The search of one node for a subnet of its own.
struct Search<'a> {
    manager: &'a SubnetManager,
    store: &'a Leased,
    config: &'a NetworkConfig,
    attributes: &'a LeaseAttributes,
    /// The subnet of the last run, until somebody else was seen to have it.
    previous: Option<Prefix>,
    /// From how many free subnets one is picked.
    candidates: usize,
}

impl Search<'_> {
    async fn lease(mut self) -> Result<Granted, AcquireError> {
        let (manager, mut pause) = (self.manager, Backoff::between(RACE_PAUSE));
        for _ in 0..LISTINGS_MAX {
            let claimed = manager.claim(self.store, self.attributes.public_ip).await;
            manager.noted_write(claimed)?;
            let snapshot = manager.noted(manager.store.list().await)?;
            manager.status.reject(&snapshot.rejected);
            match self.attempt(&snapshot).await {
                Ok(Some(granted)) => return Ok(granted),
                Ok(None) => {}
                Err(AcquireError::Store(StoreError::Conflict(_))) => {
                    // Whatever took it, a listing that does not show it would name it again.
                    self.previous = None;
                    sleep(pause.next_wait()).await;
                }
                Err(error) => return Err(error),
            }
        }
        Err(AcquireError::Contended(LISTINGS_MAX))
    }

    /// Takes a subnet by what one listing shows; `None` if something changed: list again.
    async fn attempt(&mut self, snapshot: &Snapshot) -> Result<Option<Granted>, AcquireError> {
        let Self { config, attributes, previous, .. } = *self;
        if let Some(held) = held_by(&snapshot.leases, attributes.public_ip, config, previous) {
            return self.reuse(held).await;
        }
        if let Some(previous) = previous
            && let Some(lease) = snapshot.leases.iter().find(|lease| lease.subnet == previous)
            && let moved @ Some(_) = self.move_here(lease).await?
        {
            return Ok(moved);
        }
        let mut taken: Vec<Prefix> = snapshot.taken(config.network).collect();
        let is_free = |subnet: &Prefix| !taken.iter().any(|other| other.overlaps(*subnet));
        if let Some(previous) = previous.filter(is_free) {
            if config.leasable(previous) {
                info!("Found previously leased subnet ({previous}), reusing");
                return Ok(Some(self.create(previous).await?));
            }
            info!(
                "Found previously leased subnet ({previous}) not compatible with the Etcd \
                 network config, ignoring"
            );
        }
        let mut lost = None;
        for _ in 0..TRIES_PER_LISTING {
            let free = free_subnets(config, taken.clone(), self.candidates);
            let Some(picked) = fastrand::choice(&free).copied() else { break };
            if lost.is_none() {
                let (first, last) = (free[0].network(), free[free.len() - 1].network());
                info!("Picking subnet in range {first} ... {last}");
            }
            match self.create(picked).await {
                Err(StoreError::Conflict(key)) => lost = Some(key),
                created => {
                    let created = created?;
                    self.tell_of_abandoned(snapshot);
                    return Ok(Some(created));
                }
            }
            taken.push(picked);
            let more = self.candidates.saturating_mul(CANDIDATES_GROWTH);
            self.candidates = more.min(CANDIDATES_MAX);
        }
        if let Some(key) = lost {
            return Err(StoreError::Conflict(key).into());
        }
        self.manager.status.edit().store.subnets_exhausted += 1;
        let NetworkConfig { subnet_min, subnet_max, subnet_length_bits, .. } = *config;
        Err(AcquireError::Exhausted(subnet_min, subnet_max, subnet_length_bits))
    }

    /// An entry that can't be read may be anybody's, so it is left alone.
    fn tell_of_abandoned(&self, snapshot: &Snapshot) {
        let Some(previous) = self.previous else { return };
        let is_its = |entry: &&Rejected| entry.key == previous.key();
        if let Some(Rejected { key, detail, .. }) = snapshot.rejected.iter().find(is_its) {
            cut_off(previous, format_args!("its entry {key} can't be used ({detail})"));
        }
    }

    /// Takes the subnet that the node has by the store, or deletes an entry that it can't use.
    async fn reuse(&self, held: &Lease) -> Result<Option<Granted>, AcquireError> {
        let Self { manager, store, attributes, .. } = *self;
        let (subnet, public_ip) = (held.subnet, attributes.public_ip);
        if self.config.leasable(subnet) {
            info!("Found lease ({subnet}) for current IP ({public_ip}), reusing");
            if let Some(before) = self.previous.filter(|before| *before != subnet) {
                cut_off(before, format_args!("the store has {subnet} for this node"));
            }
            let lease = Lease { attributes: attributes.clone(), ..held.clone() };
            let updated = store.write(&lease, manager.timing.lease_ttl, Phase::Starts).await;
            return Ok(Some(manager.noted_write(updated)?));
        }
        info!(
            "Found lease ({subnet}) for current IP ({public_ip}) but not compatible with current \
             config, deleting"
        );
        manager.noted_write(store.delete(held).await)?;
        Ok(None)
    }

    /// Takes the subnet of the last run along from the address that this host had then: pods of
    /// that run have addresses of it. `None` if it is another node's by now.
    async fn move_here(&self, lease: &Lease) -> Result<Option<Granted>, AcquireError> {
        let Self { manager, store, config, attributes, .. } = *self;
        let (subnet, before) = (lease.subnet, lease.attributes.public_ip);
        if !config.leasable(subnet) || !manager.noted(store.is_claimed_by_us(before).await)? {
            cut_off(subnet, format_args!("that is leased to {before} now"));
            return Ok(None);
        }
        let public_ip = attributes.public_ip;
        info!(
            "Found previously leased subnet ({subnet}), whose PublicIP goes from {before} to \
             {public_ip}, reusing"
        );
        let lease = Lease { attributes: attributes.clone(), ..lease.clone() };
        let moved = store.write(&lease, manager.timing.lease_ttl, Phase::Starts).await;
        Ok(Some(manager.noted_write(moved)?))
    }

    /// Takes a subnet, unless somebody else took it meanwhile.
    async fn create(&self, subnet: Prefix) -> StoreResult<Granted> {
        let Self { manager, store, attributes, .. } = *self;
        let wanted = Lease::wanted(subnet, attributes.clone());
        let created = store.write(&wanted, manager.timing.lease_ttl, Phase::Starts).await;
        manager.noted_write(created).inspect(|_| {
            info!("Allocated lease ({subnet}) to current node ({})", attributes.public_ip);
        })
    }
}

/// Warns that pods lose their network, because the node gets another `subnet` than before.
fn cut_off(subnet: Prefix, why: std::fmt::Arguments<'_>) {
    warn!(
        "This node's last subnet was {subnet}, and {why}: pods that run here with addresses of it \
         are cut off, restart them"
    );
}

#[cfg(test)]
mod tests;
