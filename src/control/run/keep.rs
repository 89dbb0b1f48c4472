//! The own lease while it runs: renewed by compare-and-set, checked against every look at the
//! store, taken again if it lapsed, given up if somebody else holds the subnet.

use std::time::Duration;

use tracing::{info, warn};

use super::{End, Run, Step};
use crate::control::backoff::jittered;
use crate::control::causes::with_causes;
use crate::control::clock;
use crate::control::lease::{Lease, Lifetime};
use crate::control::manager::OwnLease;
use crate::control::store::{Granted, Rejected, StoreError};

/// Renewals are brought forward by up to this at random: nodes that started together do not
/// renew together.
const RENEW_SPREAD_MAX: Duration = Duration::from_secs(60);
/// Shortest pause after a failed renewal, when the lease is about to end.
const RENEW_RETRY_MIN: Duration = Duration::from_secs(1);
/// Pause after another writer changed the own entry: time for the listing that tells what it is.
const RENEW_AFTER_CONFLICT: Duration = Duration::from_secs(2);
/// First and longest pause before the own entry is restored. It grows for the whole run: two
/// daemons that claim one address must not fight at the speed of the store.
pub(super) const REWRITE_PAUSE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(300));
/// Share by which the pause after a failed renewal is spread.
const RETRY_JITTER: f64 = 0.2;

impl Run<'_> {
    /// Sets the renewal timer by the lease's end.
    pub(super) fn plan_renewal(&mut self) {
        self.manager.status.lease_expires(self.own.expires_unix());
        let Some(expires) = self.own.expires else {
            self.renew_at = None;
            return;
        };
        let now = clock::boot_time();
        let left = expires.saturating_sub(self.renew_margin).saturating_sub(now);
        let spread = (left / 10).min(RENEW_SPREAD_MAX).mul_f64(fastrand::f64());
        // A margin beyond the lease's life must not become a loop without pauses.
        let pause = (self.manager.timing.lease_ttl / 8).min(self.manager.timing.renew_retry);
        let wait = left.saturating_sub(spread).max(pause);
        info!("Waiting for {} to renew lease", clock::format_go_duration(wait));
        self.renew_at = Some(now + wait);
    }

    pub(super) async fn renew(&mut self) {
        let ttl = self.manager.timing.lease_ttl;
        let renewed = self.manager.store.renew(&self.own.lease, ttl).await;
        self.manager.note(&renewed);
        match renewed {
            Ok(granted) => {
                self.manager.status.renewed();
                self.adopt(granted);
                let expires = self.own.expires_unix().unwrap_or_default();
                info!("Lease renewed, new expiration: {}", clock::format_go(expires));
                self.plan_renewal();
            }
            Err(error) => {
                if let StoreError::Conflict { .. } = error {
                    // Somebody wrote to our key: see what is there before anything else.
                    self.look_again();
                    self.renew_at = Some(clock::boot_time() + RENEW_AFTER_CONFLICT);
                } else {
                    self.retry_renewal_later();
                    let error = with_causes(&error);
                    warn!("Error renewing lease (trying again in 1 min): {error}");
                }
            }
        }
    }

    fn retry_renewal_later(&mut self) {
        let now = clock::boot_time();
        let left = self.own.expires.map_or(Duration::MAX, |expires| expires.saturating_sub(now));
        // Near the end, the lease gets more than one more chance.
        let pause = self.manager.timing.renew_retry.min(left / 3).max(RENEW_RETRY_MIN);
        self.renew_at = Some(now + jittered(pause, RETRY_JITTER));
    }

    /// Lists everything soon, without dropping the watch for longer than that.
    pub(super) fn look_again(&mut self) {
        self.watch = None;
        self.revision = None;
        // Never later than planned: renewals that keep failing must not put off the look that
        // tells why.
        let at = tokio::time::Instant::now() + self.backoff.next_wait();
        self.resync_at = Some(self.resync_at.map_or(at, |planned| planned.min(at)));
    }

    fn adopt(&mut self, granted: Granted) {
        let network = self.own.network;
        self.own = OwnLease::new(granted, network);
        self.own_lapsed = false;
        self.mirror.insert(self.own.lease.key.clone(), self.own.lease.clone());
    }

    /// Compares the own lease with the mirror. `watched` says that the store was reachable all
    /// the time, so that a missing lease was removed on purpose.
    pub(super) fn check_own(&mut self, watched: bool) -> Step {
        match self.mirror.get(&self.own.lease.key) {
            Some(found) if found.attributes.public_ip == self.own.lease.attributes.public_ip => {
                let found = found.clone();
                self.follow(found);
                Step::Continue(())
            }
            Some(found) => {
                let new_owner = found.attributes.public_ip;
                warn!("The lease of {} now belongs to {new_owner}", self.own.lease.subnet);
                Step::Break(End::Revoked { new_owner: Some(new_owner) })
            }
            None => self.on_own_missing(watched),
        }
    }

    /// The entry is ours, but its version, its lifetime or what it says of this node may have
    /// changed. The last is for this node alone to say.
    fn follow(&mut self, found: Lease) {
        self.own_lapsed = false;
        let attributes = self.own.lease.attributes.clone();
        if found.attributes == attributes {
            self.rewrite_at = None;
        } else if self.rewrite_at.is_none() {
            let wait = self.rewrite_backoff.next_wait();
            self.rewrite_at = Some(tokio::time::Instant::now() + wait);
        }
        if found.revision == self.own.lease.revision {
            return;
        }
        let id = |lifetime| match lifetime {
            Lifetime::Reservation => None,
            Lifetime::Leased { id, .. } => Some(id),
        };
        let (was, is) = (id(self.own.lease.lifetime), id(found.lifetime));
        let subnet = self.own.lease.subnet;
        self.own.lease = Lease { attributes, ..found };
        match is {
            _ if was == is && !self.ends_in_the_store() => {}
            None => {
                info!("The lease of {subnet} became a reservation");
                self.own.expires = None;
                self.plan_renewal();
            }
            // Restoring it will extend it, and not sooner than is good.
            Some(_) if self.rewrite_at.is_some() && self.ends_in_the_store() => {}
            // Written with another lease, of unknown age: renewing tells.
            Some(_) => self.renew_at = Some(clock::boot_time()),
        }
    }

    /// Writes what this node says of itself over what somebody else wrote for it.
    pub(super) async fn rewrite(&mut self) {
        self.rewrite_at = None;
        let held = self.own.lease.clone();
        if self.write_own(&held).await {
            warn!("Somebody rewrote the lease of {}; restored it", held.subnet);
        }
    }

    /// Writes our attributes over the entry as `held` knows it. Returns whether they were written;
    /// if not, what follows from the refusal is already under way.
    async fn write_own(&mut self, held: &Lease) -> bool {
        let ttl = self.manager.timing.lease_ttl;
        let updated = self.manager.store.update(held, &held.attributes, ttl).await;
        self.manager.note(&updated);
        match updated {
            Ok(granted) => {
                self.adopt(granted);
                self.plan_renewal();
                return true;
            }
            Err(StoreError::Conflict { .. }) => self.look_again(),
            Err(error) => {
                self.on_failure(&error);
                self.revision = None;
            }
        }
        false
    }

    /// Whether the store shows the end of a lease in the entry, so that it may have moved.
    fn ends_in_the_store(&self) -> bool {
        matches!(self.own.lease.lifetime, Lifetime::Leased { expires_unix: Some(_), .. })
    }

    /// If it is our entry that became unreadable, writes it again. Nobody can own a subnet with
    /// a value that no node understands.
    pub(super) async fn repair_own(&mut self, rejected: &Rejected) {
        if rejected.key != self.own.lease.key {
            return;
        }
        let held = Lease { revision: rejected.revision, ..self.own.lease.clone() };
        if self.write_own(&held).await {
            warn!("The lease of {} had become unreadable; wrote it again", held.subnet);
        }
    }

    /// By the boot clock, or by the wall clock where that decides: all readers of the local store
    /// see the entry end when the wall clock is set past its end.
    fn own_expired(&self) -> bool {
        let ends_unix = match self.own.lease.lifetime {
            Lifetime::Leased { id: 0, expires_unix } => expires_unix,
            Lifetime::Leased { .. } | Lifetime::Reservation => None,
        };
        self.own.expires.is_some_and(|expires| expires <= clock::boot_time())
            || ends_unix.is_some_and(|ends| ends <= clock::unix_seconds())
    }

    fn on_own_missing(&mut self, watched: bool) -> Step {
        let subnet = self.own.lease.subnet;
        if watched && !self.own_expired() && !self.own_lapsed {
            warn!("The lease of {subnet} was removed from the store");
            return Step::Break(End::Revoked { new_owner: None });
        }
        self.own_lapsed = true;
        Step::Continue(())
    }

    /// Takes the lapsed subnet again, if the listing just made shows nobody else on it.
    pub(super) async fn retake(&mut self) -> Step {
        let subnet = self.own.lease.subnet;
        let taken = self.mirror.values().find(|lease| lease.subnet.overlaps(subnet));
        if let Some(taken) = taken {
            let new_owner = taken.attributes.public_ip;
            warn!("The lease of {subnet} lapsed and {} belongs to {new_owner}", taken.subnet);
            return Step::Break(End::Revoked { new_owner: Some(new_owner) });
        }
        let (attributes, ttl) = (&self.own.lease.attributes, self.manager.timing.lease_ttl);
        let created = self.manager.store.create(subnet, attributes, ttl).await;
        self.manager.note(&created);
        match created {
            Ok(granted) => {
                warn!("The lease of {subnet} was gone from the store; took it again");
                self.adopt(granted);
                self.plan_renewal();
            }
            // Taken at this moment, or not reachable: the next look decides.
            Err(StoreError::Conflict { .. }) => self.look_again(),
            Err(error) => {
                self.on_failure(&error);
                self.revision = None;
            }
        }
        Step::Continue(())
    }
}
