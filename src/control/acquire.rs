//! Getting a subnet: the one this node has, the one it had, or a free one. Losing a race is
//! normal and tried again; nothing here ends the daemon.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{info, warn};

use crate::config::network::NetworkConfig;
use crate::control::backoff::Backoff;
use crate::control::choose::{free_subnets, held_by};
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::manager::{OwnLease, SubnetManager};
use crate::control::store::{AssignError, Granted, Snapshot, StoreError};
use crate::failure::with_causes;
use crate::route::Prefix;

/// Free subnets to pick from, as in flannel.
const CANDIDATES: usize = 100;
/// How much further each lost race looks, so that a thousand nodes spread out instead of fighting
/// for the same hundred: most of them lose the first race, and a third of these the second.
const CANDIDATES_GROWTH: usize = 16;
/// Most candidates after lost races: as many as a store may hold leases.
const CANDIDATES_MAX: usize = crate::control::store::ENTRIES_MAX;
/// Subnets tried on one listing: each costs one request, a new listing and a new lease four.
const TRIES_PER_LISTING: usize = 5;
/// Listings whose subnets were all lost before the caller is told. A node of a thousand that start
/// at once needs one; in a network with room for just as many, ten. Sixty-four mean that the
/// store's answers contradict each other.
const LISTINGS_MAX: u32 = 64;
/// First and longest pause before another listing: about one and about fifty quorum writes.
const RACE_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// First and longest pause after any other failure. A subnet that becomes free is taken within 5 s,
/// of which one second is for the requests.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(4));
/// Between two reports that acquiring still fails.
const REPORT_PERIOD: Duration = Duration::from_secs(60);

/// Why there is no subnet now. Every kind may go away by itself.
#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    /// Every subnet is taken.
    #[error(
        "out of subnets: all from {min} to {max} are taken; remove leases of nodes that are \
         gone, or enlarge the network"
    )]
    Exhausted {
        /// First subnet that may be leased.
        min: Prefix,
        /// Last subnet that may be leased.
        max: Prefix,
    },
    /// Others were faster, again and again.
    #[error("lost the races for all subnets of {LISTINGS_MAX} listings against other nodes")]
    Contended,
    /// The store assigns subnets, and not to this node.
    #[error(transparent)]
    Assigned(AssignError),
    /// The store failed.
    #[error("cannot acquire a lease")]
    Store(#[from] StoreError),
}

impl From<AssignError> for AcquireError {
    fn from(error: AssignError) -> Self {
        match error {
            AssignError::Store(error) => Self::Store(error),
            other @ (AssignError::NoNode { .. }
            | AssignError::Unassigned { .. }
            | AssignError::Outside { .. }
            | AssignError::Unusable { .. }
            | AssignError::NotSynced { .. }) => Self::Assigned(other),
        }
    }
}

impl AcquireError {
    /// Whether only an operator can help, and then only with another start.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Assigned(error) => error.is_final(),
            Self::Exhausted { .. } | Self::Contended | Self::Store(_) => false,
        }
    }
}

/// Which subnet an attempt would like.
#[derive(Clone, Copy)]
struct Wish {
    previous: Option<Prefix>,
    candidates: usize,
}

/// What one attempt came to.
enum Attempt {
    Acquired(Granted),
    /// Something changed under us: look again.
    LookAgain,
}

impl SubnetManager {
    /// Acquires a subnet for the node of `attributes`. Lost races are tried again; other errors
    /// are returned and worth another call.
    pub async fn acquire(
        &self,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
    ) -> Result<OwnLease, AcquireError> {
        if let Some(assigned) = self.store.take_assigned(config.network, attributes).await {
            return self.assigned(assigned, config);
        }
        let mut pause = Backoff::between(RACE_PAUSE.0, RACE_PAUSE.1);
        let mut wish = Wish { previous: self.previous, candidates: CANDIDATES };
        for _ in 0..LISTINGS_MAX {
            let claimed = self.store.claim(attributes.public_ip, self.timing.claim_ttl).await;
            self.note_write(&claimed);
            claimed?;
            let snapshot = self.store.list().await;
            self.note(&snapshot);
            let snapshot = snapshot?;
            self.status.reject(&snapshot.rejected);
            let attempt = self.attempt(config, attributes, &snapshot, wish).await;
            match attempt {
                Ok(Attempt::Acquired(granted)) => {
                    let own = OwnLease::new(granted, config.network);
                    self.status.lease_expires(own.expires_unix());
                    return Ok(own);
                }
                Ok(Attempt::LookAgain) => {}
                Err(AcquireError::Store(StoreError::Conflict { .. })) => {
                    wish.candidates = wider(wish.candidates);
                    // Whatever took it, a listing that does not show it would name it again.
                    wish.previous = None;
                    sleep(pause.next_wait()).await;
                }
                Err(error) => return Err(error),
            }
        }
        Err(AcquireError::Contended)
    }

    /// What the store says of the node of `public_ip` from an earlier run, if anything.
    pub async fn former(
        &self,
        config: &NetworkConfig,
        public_ip: Ipv4Addr,
    ) -> Result<Option<LeaseAttributes>, StoreError> {
        if let Some(former) = self.store.former().await {
            self.note(&former);
            return former;
        }
        let snapshot = self.store.list().await;
        self.note(&snapshot);
        let snapshot = snapshot?;
        let held = held_by(&snapshot.leases, public_ip, config, self.previous);
        Ok(held.map(|lease| lease.attributes.clone()))
    }

    fn assigned(
        &self,
        assigned: Result<Granted, AssignError>,
        config: &NetworkConfig,
    ) -> Result<OwnLease, AcquireError> {
        let granted = assigned.map_err(AcquireError::from);
        match &granted {
            Err(AcquireError::Store(error)) if !error.store_answered() => {
                self.status.store_failed()
            }
            Ok(_) | Err(_) => self.status.store_answered(),
        }
        Ok(OwnLease::new(granted?, config.network))
    }

    /// As `acquire`, for as long as it takes: a full network, a store that is down and a store
    /// that refuses are reported once a minute and tried again within 5 s.
    pub async fn acquire_until_leased(
        &self,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
    ) -> OwnLease {
        let mut backoff = Backoff::between(RETRY_PAUSE.0, RETRY_PAUSE.1);
        let mut report_at = None;
        loop {
            let error = match self.acquire(config, attributes).await {
                Ok(own) => return own,
                Err(error) => error,
            };
            let now = tokio::time::Instant::now();
            if report_at.is_none_or(|at| at <= now) {
                report_at = Some(now + REPORT_PERIOD);
                warn!("No subnet yet, still trying: {}", with_causes(&error));
            }
            sleep(backoff.next_wait()).await;
        }
    }

    async fn attempt(
        &self,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
        snapshot: &Snapshot,
        Wish { previous, candidates }: Wish,
    ) -> Result<Attempt, AcquireError> {
        let public_ip = attributes.public_ip;
        if let Some(held) = held_by(&snapshot.leases, public_ip, config, previous) {
            return self.take_over(config, attributes, held).await;
        }
        let taken: Vec<Prefix> = snapshot.taken().collect();
        let is_free = |subnet: &Prefix| !taken.iter().any(|other| other.overlaps(*subnet));
        if let Some(previous) = previous.filter(is_free) {
            if config.leasable(previous) {
                info!("Found previously leased subnet ({previous}), reusing");
                return self.create_any(std::iter::once(previous), attributes).await;
            }
            info!(
                "Found previously leased subnet ({previous}) not compatible with the Etcd \
                 network config, ignoring"
            );
        }
        let free = free_subnets(config, taken.clone(), candidates);
        let (Some(first), Some(last)) = (free.first(), free.last()) else {
            self.status.exhausted();
            return Err(exhausted(config));
        };
        info!("Picking subnet in range {} ... {}", first.network(), last.network());
        self.create_any(picks(config, taken, free), attributes).await
    }

    async fn take_over(
        &self,
        config: &NetworkConfig,
        attributes: &LeaseAttributes,
        held: &Lease,
    ) -> Result<Attempt, AcquireError> {
        let (subnet, public_ip) = (held.subnet, attributes.public_ip);
        if config.leasable(subnet) {
            info!("Found lease ({subnet}) for current IP ({public_ip}), reusing");
            let updated = self.store.take_over(held, attributes, self.timing.lease_ttl).await;
            self.note_write(&updated);
            return Ok(Attempt::Acquired(updated?));
        }
        info!(
            "Found lease ({subnet}) for current IP ({public_ip}) but not compatible with current \
             config, deleting"
        );
        let deleted = self.store.delete(held).await;
        self.note_write(&deleted);
        deleted?;
        Ok(Attempt::LookAgain)
    }

    async fn create_any(
        &self,
        subnets: impl Iterator<Item = Prefix>,
        attributes: &LeaseAttributes,
    ) -> Result<Attempt, AcquireError> {
        let ttl = self.timing.lease_ttl;
        let (created, lost) = self.store.create_first(subnets, attributes, ttl).await;
        // A conflict that ends the tries is counted when it is noted.
        let noted = u64::from(matches!(created, Err(StoreError::Conflict { .. })));
        for _ in noted..lost {
            self.status.conflicted();
        }
        self.note_write(&created);
        let created = created?;
        let (subnet, public_ip) = (created.lease.subnet, attributes.public_ip);
        info!("Allocated lease ({subnet}) to current node ({public_ip})");
        Ok(Attempt::Acquired(created))
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
        let picked = *range.get(fastrand::usize(..range.len().max(1)))?;
        tried.push(picked);
        Some(picked)
    })
    .take(TRIES_PER_LISTING)
}

fn wider(candidates: usize) -> usize {
    candidates.saturating_mul(CANDIDATES_GROWTH).min(CANDIDATES_MAX)
}

fn exhausted(config: &NetworkConfig) -> AcquireError {
    let subnet = |address| Prefix::new(address, config.subnet_length_bits);
    AcquireError::Exhausted {
        min: subnet(config.subnet_min).unwrap_or(config.network),
        max: subnet(config.subnet_max).unwrap_or(config.network),
    }
}

#[cfg(test)]
mod tests;
