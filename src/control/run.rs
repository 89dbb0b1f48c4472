//! Keeping the subnet and following the others: one loop over the store's events and four
//! timers, which ends only when the subnet is lost.
//!
//! The state of the store is mirrored and published as a whole, so a lost or repeated event
//! cannot leave a stale route for longer than one listing. No error withdraws a peer.

mod keep;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::Sender;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::control::backoff::{Backoff, jittered};
use crate::control::causes::with_causes;
use crate::control::clock;
use crate::control::lease::{Lease, Peers};
use crate::control::manager::{OwnLease, SubnetManager};
use crate::control::peers::{self, Node};
use crate::control::store::{ENTRIES_MAX, Event, Rejected, Snapshot, StoreError, Watch};

/// Between two reports of one outage, after the first.
const REPORT_PERIOD: Duration = Duration::from_secs(60);
/// Between the end of one outage and the report of the next: a store that comes and goes must
/// not fill the log.
const REPORT_PAUSE: Duration = Duration::from_secs(5);
/// How long a watch must have lived for the next failure to be a new one, which is tried again
/// at once, and not the last one that goes on.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Share by which listings are spread.
const RELIST_JITTER: f64 = 0.2;
/// Longest sleep before the renewal timer looks at the boot clock again, which runs on while the
/// host is suspended and the timer does not.
const CLOCK_CHECK_MAX: Duration = Duration::from_secs(60);

/// Why `run` came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The subnet is no longer ours.
    Revoked {
        /// Who holds it now; `None` if the lease was deleted.
        new_owner: Option<Ipv4Addr>,
    },
}

impl SubnetManager {
    /// Renews `own` when less than `renew_margin` of it is left, follows the other nodes and
    /// publishes all of them in `peers` after each change. While the store is away the last known
    /// peers stay. Ends when the subnet is lost; may be dropped at any time.
    pub async fn run(
        &self,
        own: OwnLease,
        renew_margin: Duration,
        peers: &Sender<Arc<Peers>>,
    ) -> End {
        info!("Watching for new subnet leases");
        let mut run = Run::new(self, own, renew_margin, peers);
        loop {
            let wake = run.next_wake();
            let step = tokio::select! {
                events = next_events(&mut run.watch) => run.on_events(events).await,
                () = sleep_until(wake) => run.on_timers().await,
            };
            if let ControlFlow::Break(end) = step {
                warn!("Lease has been revoked. Shutting down daemon.");
                return end;
            }
        }
    }
}

async fn next_events(watch: &mut Option<Watch>) -> Result<Vec<Event>, StoreError> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

type Step = ControlFlow<End>;

struct Run<'a> {
    manager: &'a SubnetManager,
    own: OwnLease,
    renew_margin: Duration,
    renew_at: Option<Duration>,
    /// When to restore the own entry, which somebody rewrote.
    rewrite_at: Option<Instant>,
    rewrite_backoff: Backoff,
    peers: &'a Sender<Arc<Peers>>,

    /// Everything in the store that is a lease, by key.
    mirror: BTreeMap<String, Lease>,
    /// The last revision that the mirror contains; `None` until everything was listed, and again
    /// when the mirror may have missed something.
    revision: Option<i64>,
    watch: Option<Watch>,
    live_since: Option<Instant>,
    /// Whether the own lease was missed after a time without watch: it lapsed, and is taken again
    /// if a listing shows that it is free.
    own_lapsed: bool,
    /// Whether the last try to watch failed for lack of history.
    history_lost: bool,
    /// Changes up to this revision are in the last listing.
    listed_until: i64,
    /// Changes up to this revision happened while nobody watched.
    unwatched_until: i64,

    outage: Option<Outage>,
    backoff: Backoff,
    quiet_until: Instant,
    resync_at: Option<Instant>,
    relist_at: Instant,
    publish_at: Option<Instant>,
    published: bool,
}

struct Outage {
    since: Instant,
    reported: bool,
}

impl<'a> Run<'a> {
    fn new(
        manager: &'a SubnetManager,
        own: OwnLease,
        renew_margin: Duration,
        peers: &'a Sender<Arc<Peers>>,
    ) -> Self {
        let now = Instant::now();
        let mut run = Self {
            manager,
            own,
            renew_margin,
            renew_at: None,
            rewrite_at: None,
            rewrite_backoff: Backoff::between(keep::REWRITE_PAUSE.0, keep::REWRITE_PAUSE.1),
            peers,
            mirror: BTreeMap::new(),
            revision: None,
            watch: None,
            live_since: None,
            own_lapsed: false,
            history_lost: false,
            listed_until: 0,
            unwatched_until: 0,
            outage: None,
            backoff: Backoff::default(),
            quiet_until: now,
            resync_at: Some(now),
            relist_at: now + jittered(manager.timing.relist_period, RELIST_JITTER),
            publish_at: None,
            published: false,
        };
        run.plan_renewal();
        run
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        let renewal = self
            .renew_at
            .map(|at| now + at.saturating_sub(clock::boot_time()).min(CLOCK_CHECK_MAX));
        let timers = [self.resync_at, self.publish_at, self.rewrite_at, renewal];
        timers.into_iter().flatten().fold(self.relist_at, Instant::min)
    }

    async fn on_timers(&mut self) -> Step {
        let now = Instant::now();
        if self.renew_at.is_some_and(|at| at <= clock::boot_time()) {
            self.renew().await;
        }
        if self.rewrite_at.is_some_and(|at| at <= now) {
            self.rewrite().await;
        }
        if self.resync_at.is_some_and(|at| at <= now) {
            self.resync_at = None;
            self.resync().await?;
        } else if self.relist_at <= now && self.watch.is_some() {
            self.relist().await?;
        }
        if self.relist_at <= now {
            let period = jittered(self.manager.timing.relist_period, RELIST_JITTER);
            self.relist_at = Instant::now() + period;
        }
        if self.publish_at.is_some_and(|at| at <= now) {
            self.publish();
        }
        Step::Continue(())
    }

    /// Brings the mirror up to date and the watch to life.
    async fn resync(&mut self) -> Step {
        if self.revision.is_none() {
            self.relist().await?;
        }
        let Some(revision) = self.revision.filter(|_| self.resync_at.is_none()) else {
            return Step::Continue(());
        };
        let watch = self.manager.store.watch(revision).await;
        self.manager.note(&watch);
        match watch {
            Ok(watch) => self.watch = Some(watch),
            Err(error) => self.on_failure(&error),
        }
        Step::Continue(())
    }

    async fn relist(&mut self) -> Step {
        let snapshot = self.manager.store.list().await;
        self.manager.note(&snapshot);
        match snapshot {
            Ok(snapshot) => {
                self.manager.status.listed();
                self.on_snapshot(snapshot).await
            }
            Err(error) => {
                self.on_failure(&error);
                Step::Continue(())
            }
        }
    }

    async fn on_events(&mut self, events: Result<Vec<Event>, StoreError>) -> Step {
        self.manager.note(&events);
        let events = match events {
            Ok(events) => events,
            Err(error) => {
                self.on_failure(&error);
                return Step::Continue(());
            }
        };
        for event in events {
            self.on_event(event).await?;
            if self.watch.is_none() {
                // The event led to a failure or to doubts: all that follows is read again.
                break;
            }
        }
        Step::Continue(())
    }

    async fn on_event(&mut self, event: Event) -> Step {
        match event {
            Event::Live { revision } => {
                self.unwatched_until = revision;
                self.live_since = Some(Instant::now());
                self.history_lost = false;
                self.on_recovery();
            }
            Event::Everything(snapshot) => return self.on_snapshot(snapshot).await,
            Event::Put(lease) => {
                let (key, revision) = (lease.key.clone(), lease.revision);
                self.advance(revision);
                if self.is_news(&key, revision) {
                    self.insert(lease);
                    return self.on_changed(&key, revision);
                }
            }
            Event::Rejected(rejected) => {
                self.manager.status.reject(std::slice::from_ref(&rejected));
                self.advance(rejected.revision);
                if self.is_news(&rejected.key, rejected.revision) {
                    self.mirror.remove(&rejected.key);
                    self.plan_publication();
                    self.repair_own(&rejected).await;
                }
            }
            Event::Deleted { key, revision } => {
                self.advance(revision);
                if self.is_news(&key, revision) {
                    self.mirror.remove(&key);
                    return self.on_changed(&key, revision);
                }
            }
        }
        Step::Continue(())
    }

    /// Mirrors a lease, if there is room: as many as one listing may have, and always the own.
    fn insert(&mut self, lease: Lease) {
        let known = lease.key == self.own.lease.key || self.mirror.contains_key(&lease.key);
        if known || self.mirror.len() < ENTRIES_MAX {
            self.mirror.insert(lease.key.clone(), lease);
        } else {
            self.manager.status.reject(&[Rejected::too_many(lease.revision)]);
        }
    }

    /// Remembers that the mirror contains this revision.
    fn advance(&mut self, revision: i64) {
        self.revision = self.revision.map(|seen| seen.max(revision));
    }

    /// Whether the event is newer than the last listing and than our own last write.
    fn is_news(&self, key: &str, revision: i64) -> bool {
        let superseded = key == self.own.lease.key && revision < self.own.lease.revision;
        revision > self.listed_until && !superseded
    }

    fn on_changed(&mut self, key: &str, revision: i64) -> Step {
        self.plan_publication();
        if key == self.own.lease.key {
            let watched = self.outage.is_none() && revision > self.unwatched_until;
            self.check_own(watched)?;
            if self.own_lapsed {
                // Who came after the end of our lease may not be in the mirror yet.
                self.look_again();
            }
        }
        Step::Continue(())
    }

    async fn on_snapshot(&mut self, snapshot: Snapshot) -> Step {
        let Snapshot { leases, rejected, revision, complete } = snapshot;
        self.manager.status.reject(&rejected);
        // What an incomplete listing lacks may be in the store all the same, so nothing is
        // concluded from it.
        let shows_own = complete || leases.iter().any(|lease| lease.key == self.own.lease.key);
        if complete {
            self.mirror.clear();
        }
        for lease in leases {
            self.insert(lease);
        }
        self.revision = Some(revision);
        self.listed_until = revision;
        self.plan_publication();
        if let Some(own) = rejected.iter().find(|rejected| rejected.key == self.own.lease.key) {
            self.repair_own(own).await;
            return Step::Continue(());
        }
        if !shows_own {
            return Step::Continue(());
        }
        let watched = self.outage.is_none();
        self.check_own(watched)?;
        if self.own_lapsed && complete { self.retake().await } else { Step::Continue(()) }
    }

    /// The store or the watch failed: try again later, and keep everything meanwhile.
    fn on_failure(&mut self, error: &StoreError) {
        let now = Instant::now();
        self.watch = None;
        if self.live_since.take().is_some_and(|since| now - since > STABLE_AFTER) {
            self.backoff = Backoff::default();
        }
        if let StoreError::HistoryLost { .. } = error {
            // The store answers, so it is asked at once, unless this is what it answered last time.
            let again = std::mem::replace(&mut self.history_lost, true);
            let pause = if again { self.backoff.next_wait() } else { Duration::ZERO };
            self.resync_at = Some(now + pause);
            // Where the history begins says nothing about an outage: list and go on.
            self.revision = None;
            info!(
                "Watch of subnet leases failed because etcd index outside history window; \
                 listing all leases"
            );
            return;
        }
        self.resync_at = Some(now + self.backoff.next_wait());
        let outage = self.outage.get_or_insert(Outage { since: now, reported: false });
        if self.quiet_until <= now {
            self.quiet_until = now + REPORT_PERIOD;
            outage.reported = true;
            let seconds = (now - outage.since).as_secs();
            let error = with_causes(error);
            warn!(
                "Subnet watch failed: {error}; without the store for {seconds} s, \
                 keeping all {} peers and trying again",
                self.manager.status.peers()
            );
        }
    }

    fn on_recovery(&mut self) {
        if let Some(outage) = self.outage.take().filter(|outage| outage.reported) {
            self.quiet_until = Instant::now() + REPORT_PAUSE;
            info!("The lease store answers again after {} s", outage.since.elapsed().as_secs());
        }
    }

    fn plan_publication(&mut self) {
        let at = Instant::now() + self.manager.timing.publish_window;
        self.publish_at.get_or_insert(at);
    }

    fn publish(&mut self) {
        self.publish_at = None;
        let (peers, rejected) = self.select_peers();
        self.manager.status.reject(&rejected);
        self.manager.status.published(peers.len());
        let peers = Arc::new(peers);
        if !self.published || !peers::same_ways(&self.peers.borrow(), &peers) {
            self.published = true;
            self.peers.send_replace(peers);
        }
    }

    fn select_peers(&self) -> (Peers, Vec<Rejected>) {
        let node = Node {
            network: self.own.network,
            subnet: self.own.lease.subnet,
            public_ip: self.own.lease.attributes.public_ip,
        };
        peers::select(self.mirror.values(), &self.own.lease.key, node)
    }
}

#[cfg(test)]
mod tests;
