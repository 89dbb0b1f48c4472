//! Getting a subnet: the one this node has, the one it had, or a free one. Lost races are
//! normal and retried; nothing here ends the daemon.

use std::time::Duration;

use tokio::time::sleep;
use tracing::{info, warn};

use crate::config::network::{ConfigFamily, NetworkConfig, SubnetRange};
use crate::control::backoff::Backoff;
use crate::control::choose::{free_of, free_subnets, held_by};
use crate::control::error::{AcquireError, StoreError, StoreResult, field_of};
use crate::control::identity::Phase;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::manager::SubnetManager;
use crate::control::rejected::Rejected;
use crate::control::snapshot::{ENTRIES_MAX, Granted, OwnLease, Snapshot, Vacancy};
use crate::control::store::{Leased, Store};
use crate::route::{Prefix, Prefixes};

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
/// The same with IPv6, where every write of a lease makes all listings before it worthless: some
/// thirty nodes a second get subnets, and others that try meanwhile are only load.
const RACE_PAUSE_DUAL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(5));
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
                let compares_all = config.v6().is_some();
                Search { manager, store, config, attributes, previous, candidates, compares_all }
                    .lease()
                    .await?
            }
            Store::Assigned(store) => {
                match store.take_assigned(config.networks(), attributes).await {
                    Err(AcquireError::Store(error)) => self.noted(Err(error))?,
                    answered => {
                        self.status.edit().store.up = true;
                        answered?
                    }
                }
            }
        };
        let Granted { lease, expires } = granted;
        Ok(OwnLease { lease, expires, networks: config.networks() })
    }

    /// What the node of these addresses published in an earlier run, if anything.
    pub async fn former(
        &self,
        config: &NetworkConfig,
        node: &LeaseAttributes,
    ) -> StoreResult<Option<LeaseAttributes>> {
        let former = match &self.store {
            Store::Leased(_) => self.store.list().await.map(|snapshot| {
                let held = held_by(&snapshot.leases, node, config, self.previous);
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
    previous: Option<Prefixes>,
    /// From how many free subnets one is picked.
    candidates: usize,
    /// Whether it writes what compares the whole listing: then anybody's write is a conflict, and
    /// says nothing of the subnets.
    compares_all: bool,
}

impl Search<'_> {
    async fn lease(mut self) -> Result<Granted, AcquireError> {
        let dual = self.config.v6().map(|_| RACE_PAUSE_DUAL);
        let (manager, mut pause) = (self.manager, Backoff::between(dual.unwrap_or(RACE_PAUSE)));
        for _ in 0..LISTINGS_MAX {
            let claimed = manager.claim(self.store, self.attributes.node_address()).await;
            manager.noted_write(claimed)?;
            let snapshot = manager.noted(manager.store.list().await)?;
            manager.status.reject(&snapshot.rejected);
            match self.attempt(&snapshot).await {
                Ok(Some(granted)) => return Ok(granted),
                Ok(None) => {}
                Err(AcquireError::Store(StoreError::Conflict(_))) => {
                    // Whatever took it, a listing that does not show it would name it again.
                    self.previous = self.previous.filter(|_| self.compares_all);
                    sleep(pause.next_wait()).await;
                }
                Err(error) => return Err(error),
            }
        }
        Err(AcquireError::Contended(LISTINGS_MAX))
    }

    /// Takes subnets by what one listing shows; `None` if something changed: list again.
    async fn attempt(&mut self, snapshot: &Snapshot) -> Result<Option<Granted>, AcquireError> {
        let Self { config, attributes, previous, .. } = *self;
        if let Some(held) = held_by(&snapshot.leases, attributes, config, previous) {
            return self.reuse(held, snapshot).await;
        }
        if let Some(previous) = previous
            && let Some(lease) = snapshot.leases.iter().find(|it| it.subnets.shares_with(previous))
            && let moved @ Some(_) = self.move_here(lease, snapshot).await?
        {
            return Ok(moved);
        }
        let mut taken: Vec<Prefixes> = snapshot.taken_beside(None, config.networks()).collect();
        let mut kept = None;
        if let Some(previous) = previous.and_then(|previous| free_of(previous, &taken)) {
            kept = config.leasable(previous);
            if kept.is_some() {
                info!("Found previously leased subnet ({previous}), reusing");
            } else {
                info!(
                    "Found previously leased subnet ({previous}) not compatible with the Etcd \
                     network config, ignoring"
                );
            }
        }
        let mut lost = None;
        for _ in 0..TRIES_PER_LISTING {
            let picked = match self.pick(kept, &taken) {
                Err(_) if lost.is_some() => break,
                picked => picked?,
            };
            match self.create(picked, &snapshot.vacancy(None)).await {
                Err(StoreError::Conflict(key)) => lost = Some(key),
                created => {
                    let created = created?;
                    if kept.is_none() {
                        self.tell_of_abandoned(snapshot);
                    }
                    return Ok(Some(created));
                }
            }
            if kept.is_some() || picked.v6().is_some() {
                // It was taken just now, or the whole listing is out of date.
                break;
            }
            taken.push(picked);
            let more = self.candidates.saturating_mul(CANDIDATES_GROWTH);
            self.candidates = more.min(CANDIDATES_MAX);
        }
        Err(StoreError::Conflict(lost.unwrap_or_default()).into())
    }

    /// What is `kept`, and of the families that this lacks one of the free subnets each.
    fn pick(&self, kept: Option<Prefixes>, taken: &[Prefixes]) -> Result<Prefixes, AcquireError> {
        let kept = (kept.and_then(Prefixes::v4), kept.and_then(Prefixes::v6));
        let taken_v4 = taken.iter().filter_map(|it| it.v4());
        let taken_v6 = taken.iter().filter_map(|it| it.v6());
        let picked = self.config.ranges.map(
            |range| kept.0.map_or_else(|| self.one_of(&range, taken_v4), Ok),
            |range| kept.1.map_or_else(|| self.one_of(&range, taken_v6), Ok),
        );
        picked.transpose()
    }

    /// A free subnet of `range`.
    fn one_of<A: ConfigFamily>(
        &self,
        range: &SubnetRange<A>,
        taken: impl Iterator<Item = Prefix<A>>,
    ) -> Result<Prefix<A>, AcquireError> {
        let free = free_subnets(range, taken.collect(), self.candidates);
        let Some(picked) = fastrand::choice(&free) else {
            self.manager.status.edit().store.subnets_exhausted += 1;
            return Err(AcquireError::Exhausted(range.bounds().map(|it| it.to_string())));
        };
        let (first, last) = (free[0].network(), free[free.len() - 1].network());
        info!("Picking subnet in range {first} ... {last}");
        Ok(*picked)
    }

    /// An entry that can't be read may be anybody's, so it is left alone.
    fn tell_of_abandoned(&self, snapshot: &Snapshot) {
        let Some(previous) = self.previous else { return };
        let is_its = |entry: &&Rejected| {
            Prefixes::from_key(&entry.key).is_some_and(|subnets| subnets.overlaps(previous))
        };
        if let Some(Rejected { key, detail, .. }) = snapshot.rejected.iter().find(is_its) {
            cut_off(previous, format_args!("its entry {key} can't be used ({detail})"));
        }
    }

    /// Takes the subnets that the node has by the store, or deletes an entry that it can't use.
    async fn reuse(
        &mut self,
        held: &Lease,
        snapshot: &Snapshot,
    ) -> Result<Option<Granted>, AcquireError> {
        let Self { manager, store, attributes, .. } = *self;
        let (subnets, address) = (held.subnets, attributes.node_address());
        if self.config.leasable(subnets).is_some() {
            info!("Found lease ({subnets}) for current IP ({address}), reusing");
            let before = self.previous.filter(|before| !subnets.shares_with(*before));
            if let Some(before) = before {
                cut_off(before, format_args!("the store has {subnets} for this node"));
            }
            return self.keep(held, snapshot).await;
        }
        info!(
            "Found lease ({subnets}) for current IP ({address}) but not compatible with current \
             config, deleting"
        );
        manager.noted_write(store.delete(held).await)?;
        Ok(None)
    }

    /// Takes the subnets of the last run along from the address that this host had then: pods of
    /// that run have addresses of them. `None` if they are another node's by now.
    async fn move_here(
        &mut self,
        lease: &Lease,
        snapshot: &Snapshot,
    ) -> Result<Option<Granted>, AcquireError> {
        let Self { manager, store, config, attributes, .. } = *self;
        let (subnets, before) = (lease.subnets, lease.attributes.node_address());
        let is_usable = config.leasable(subnets).is_some();
        if !is_usable || !manager.noted(store.is_claimed_by_us(before).await)? {
            let previous = self.previous.unwrap_or(subnets);
            cut_off(previous, format_args!("{subnets} is leased to {before} now"));
            return Ok(None);
        }
        let now = attributes.node_address();
        info!(
            "Found previously leased subnet ({subnets}), whose {} goes from {before} to {now}, \
             reusing",
            field_of(now)
        );
        self.keep(lease, snapshot).await
    }

    /// Writes this node's entry anew, with the attributes of now. One of other families than nodes
    /// have by the configuration makes room for one that has the same subnet of those that stay.
    async fn keep(
        &mut self,
        held: &Lease,
        snapshot: &Snapshot,
    ) -> Result<Option<Granted>, AcquireError> {
        let Self { manager, store, config, attributes, .. } = *self;
        if config.is_leasable(held.subnets) {
            let lease = Lease { attributes: attributes.clone(), ..held.clone() };
            let updated = store.write(&lease, manager.timing.lease_ttl, Phase::Starts).await;
            return Ok(Some(manager.noted_write(updated)?));
        }
        // What another entry has by now, such as one of flannel, which compares its own key alone,
        // would be refused for ever.
        let others: Vec<_> = snapshot.taken_beside(Some(held), config.networks()).collect();
        // Pods of the last run may have addresses of a family that the entry has lost.
        let wanted = self.previous.map_or(held.subnets, |previous| held.subnets.or(previous));
        let kept = free_of(wanted, &others).and_then(|free| config.leasable(free));
        let subnets = self.pick(kept, &others)?;
        self.compares_all = true;
        let before = held.subnets;
        info!(
            "The lease of {before} has no place in the configuration of now: it becomes {subnets}"
        );
        if !subnets.shares_with(before) {
            cut_off(before, format_args!("other entries have it, too"));
        }
        Ok(Some(self.create(subnets, &snapshot.vacancy(Some(held.clone()))).await?))
    }

    /// Takes subnets, unless somebody else took them meanwhile.
    async fn create(&self, subnets: Prefixes, vacancy: &Vacancy) -> StoreResult<Granted> {
        let Self { manager, store, attributes, .. } = *self;
        let wanted = Lease::wanted(subnets, attributes.clone());
        let created = store.create(&wanted, vacancy, manager.timing.lease_ttl, Phase::Starts).await;
        manager.noted_write(created).inspect(|_| {
            info!("Allocated lease ({subnets}) to current node ({})", attributes.node_address());
        })
    }
}

/// Warns that pods lose their network, because the node gets another `subnet` than before.
fn cut_off(subnet: Prefixes, why: std::fmt::Arguments<'_>) {
    warn!(
        "This node's last subnet was {subnet}, and {why}: pods that run here with addresses of it \
         are cut off, restart them"
    );
}

#[cfg(test)]
mod tests;
