//! The grace period (`--stale-hold`) of peers whose leases vanished: most of them at once, or with
//! the data of the whole store. Traffic must not stop because somebody emptied a store. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::control::lease::{Lease, Peers};
use crate::control::peers::Taken;
use crate::route::Prefixes;

/// Fewest nodes whose disappearance is one of many: a single node is taken off every day.
const VANISHED_MIN: usize = 2;
/// Shortest time between two lines about peers that are no longer held: a thousand nodes that
/// register again are a few lines.
const LOG_PAUSE: Duration = Duration::from_secs(5);

/// Peers in their grace period, each until a moment of the boot clock.
#[derive(Debug, Default)]
pub(super) struct Stale {
    held: BTreeMap<Prefixes, (Arc<Lease>, Duration)>,
    unlogged: Released,
    logged_at: Option<Duration>,
}

/// Peers whose grace period ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Released {
    /// Somebody leased the subnet, or one that overlaps it.
    pub(super) leased: usize,
    /// The time was over.
    pub(super) over: usize,
}

/// Whether so many of `peers` that vanish at once are an accident and no administration: more
/// than half of the nodes, of which this one is one if its own lease vanished with them.
pub(super) fn is_accident(vanished: usize, peers: usize, own_lost: bool) -> bool {
    let own = usize::from(own_lost);
    vanished > 0 && vanished + own >= VANISHED_MIN && vanished + own > (peers + own) / 2
}

impl Stale {
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    pub(super) fn holds(&self, subnets: Prefixes) -> bool {
        self.held.contains_key(&subnets)
    }

    #[cfg(test)]
    pub(super) fn until(&self, subnets: Prefixes) -> Option<Duration> {
        self.held.get(&subnets).map(|(_, until)| *until)
    }

    pub(super) fn next_end(&self) -> Option<Duration> {
        self.held.values().map(|(_, until)| *until).min()
    }

    pub(super) fn hold(&mut self, lease: Arc<Lease>, until: Duration) {
        self.held.entry(lease.subnets).or_insert((lease, until));
    }

    /// Holds the peers whose time is over until `end`. Others have theirs: a store that comes and
    /// goes shall hold nobody for ever.
    pub(super) fn prolong(&mut self, now: Duration, end: Duration) {
        let over = self.held.values_mut().filter(|(_, until)| *until <= now);
        over.for_each(|(_, until)| *until = end);
    }

    /// Adds the held peers to `peers`, after releasing those that `peers` replace and, unless the
    /// store `is_away`, those whose time is over. Returns what there is to log about it.
    pub(super) fn join(
        &mut self,
        peers: &mut Peers,
        now: Duration,
        is_away: bool,
    ) -> Option<Released> {
        if self.held.is_empty() {
            return None;
        }
        let (unlogged, taken) = (&mut self.unlogged, Taken::by(peers));
        self.held.retain(|subnets, (_, until)| {
            let leased = taken.overlaps(*subnets);
            let over = *until <= now && !is_away;
            unlogged.leased += usize::from(leased);
            unlogged.over += usize::from(over && !leased);
            !leased && !over
        });
        // What was held did not overlap each other when it was published.
        peers.extend(self.held.iter().map(|(subnets, (lease, _))| (*subnets, Arc::clone(lease))));
        let news = self.unlogged.leased + self.unlogged.over > 0;
        let quiet = self.logged_at.is_some_and(|at| now < at + LOG_PAUSE);
        if !news || (quiet && !self.held.is_empty()) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}
