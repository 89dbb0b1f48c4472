//! The lease machine: what a node does about its own subnet and about everybody else's. Pure: one
//! event and the time in, commands out. It never reads a clock, touches a store or logs; `run`
//! drives it against a real store, the model test against a simulated one.
//!
//! The store's state is mirrored and published as a whole, so a lost or repeated event cannot
//! leave a stale route for longer than one listing. Besides the watch, one request is under way
//! at a time. No error withdraws a peer.

mod follow;
mod own;
mod stale;
mod state;
mod twin;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tracing::Level;

use crate::control::backoff::{BACKOFF, Backoff, jittered};
use crate::control::cache::Known;
use crate::control::error::StoreResult;
use crate::control::lease::{Lease, LeaseAttributes, Peers};
use crate::control::machine::stale::{Released, Stale};
pub(super) use crate::control::machine::state::Write;
use crate::control::machine::state::{Asked, Follow, Outage, OwnEntry, REWRITE_PAUSE, Twin};
use crate::control::peers;
use crate::control::rejected::Rejected;
use crate::control::snapshot::{
    Change, ENTRIES_MAX, Granted, LastWritten, OwnLease, REJECTED_MAX, Snapshot,
};
use crate::control::timing::Timing;

/// Share by which listings are spread.
const RELIST_JITTER: f64 = 0.2;

/// Why the machine stopped: the subnet is no longer ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Who holds it now; `None` if the lease was deleted, or what holds it can't be read.
    pub new_owner: Option<IpAddr>,
}

/// The time of an event.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    /// By the boot clock, which all decisions use.
    pub(super) boot: Duration,
    /// Seconds since 1970, for people and for entries of the local store.
    pub(super) unix_seconds: u64,
}

/// What happened.
#[derive(Debug)]
pub(super) enum Event {
    /// Nothing but time.
    Timer,
    /// The answer to `Command::List`.
    Listed(StoreResult<Snapshot>),
    /// The answer to `Command::Watch`.
    Opened(StoreResult<()>),
    /// The watch brought changes, or ended.
    Changed(StoreResult<Vec<Change>>),
    /// The answer to `Command::Write`.
    Written(StoreResult<Granted>),
    /// This node's attributes changed: it has another address.
    Moved(LeaseAttributes),
    /// The store does not know what it should: it may have lost its data.
    Doubted,
}

/// What to do. Requests are answered by one event each; the machine asks for nothing else before.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// List all leases.
    List,
    /// Open a watch for what comes after `revision`, in the history that has `own` as it is here.
    Watch { revision: i64, own: Lease },
    /// Forget the watch, if there is one.
    DropWatch,
    /// Write `held` and extend the lease, if the entry is as of the revision in `held`.
    Write { what: Write, held: Lease },
    /// Write `held`, if there is no such entry, and nobody has written since the listing that shows
    /// this.
    Retake { held: Lease, last_written: Option<LastWritten> },
    /// These are the peers now.
    Publish(Arc<Peers>),
    /// How many there are, and how many of them are in their grace period.
    Count { peers: usize, held: usize },
    /// All the entries that are not used now, for the status and for counting.
    Unused(Vec<Rejected>),
    /// A snapshot for an offline start.
    Remember(Known),
    /// The own lease and the published peers are the store's, and none are from the cache.
    Confirmed,
    /// When the own lease ends, in seconds since 1970.
    Expires(Option<u64>),
    /// Somebody else wrote the own entry with this node's PublicIP.
    CountForeignWrite,
    /// For the log.
    Log(Level, String),
    /// The subnet is lost; nothing follows.
    End(End),
}

/// One node's lease and its view of the others.
#[derive(Debug)]
pub(super) struct Machine {
    timing: Timing,
    random: fastrand::Rng,
    /// Of the event in hand.
    now: Now,
    commands: Vec<Command>,
    asked: Asked,

    own: OwnLease,
    /// Whether the own lease is from the cache, and the store has not confirmed it yet.
    from_cache: bool,
    own_entry: OwnEntry,
    /// Earlier addresses of this node that the own entry may still show.
    moved_from: BTreeSet<IpAddr>,
    /// What a write that got no answer compared with: while the entry is as of then, that write
    /// may still go in.
    unanswered: Option<i64>,
    renew_at: Option<Duration>,
    rewrite_backoff: Backoff,
    /// When the last listing that shows the own entry was requested.
    own_read: Option<Duration>,
    /// The lease's end for which it was logged that the entry is read before it is written.
    own_end_logged: Option<Duration>,
    /// Changes of the own entry before this revision are older than our last write.
    own_since: i64,
    twin: Twin,

    /// Everything in the store that is a lease, by key.
    mirror: BTreeMap<String, Arc<Lease>>,
    /// What is there and can't be read, by key.
    unreadable: BTreeMap<String, Rejected>,
    /// The last revision that the mirror contains; `None` until everything was listed, and again
    /// when the mirror may have missed something.
    revision: Option<i64>,
    follow: Follow,
    /// Whether a watch was ever live: before that, changes of the own entry were not watched.
    followed: bool,
    /// Whether the last try to watch failed for lack of history.
    history_lost: bool,
    /// Changes up to this revision are in the last listing.
    listed_until: i64,
    /// What that listing shows as written last.
    last_written: Option<LastWritten>,
    /// Changes up to this revision happened without a watch.
    unwatched_until: i64,
    /// The newest revision seen, and where.
    newest: i64,
    cluster: u64,
    /// When the store last answered, by the wall clock.
    heard_unix: u64,
    outage: Option<Outage>,
    backoff: Backoff,
    quiet_until: Duration,
    /// No failed renewal is reported before this.
    renewal_quiet_until: Duration,
    relist_at: Duration,

    publish_at: Option<Duration>,
    published: Option<Arc<Peers>>,
    stale: Stale,
}

impl Machine {
    /// A machine that holds `own` and knows no other node. Its first commands come with the
    /// first event.
    pub(super) fn new(own: OwnLease, timing: Timing, mut random: fastrand::Rng, now: Now) -> Self {
        let relist_at = now.boot + jittered(timing.relist_period, RELIST_JITTER, &mut random);
        let own_since = own.lease.revision;
        let mut machine = Self {
            timing,
            random,
            now,
            commands: Vec::new(),
            asked: Asked::Nothing,
            own,
            from_cache: false,
            own_entry: OwnEntry::AsWritten,
            moved_from: BTreeSet::new(),
            unanswered: None,
            renew_at: None,
            rewrite_backoff: Backoff::between(REWRITE_PAUSE),
            own_read: None,
            own_end_logged: None,
            own_since,
            twin: Twin::default(),
            mirror: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            revision: None,
            follow: Follow::Waiting { at: now.boot },
            followed: false,
            history_lost: false,
            listed_until: 0,
            last_written: None,
            unwatched_until: 0,
            newest: 0,
            cluster: 0,
            heard_unix: now.unix_seconds,
            outage: None,
            backoff: Backoff::between(BACKOFF),
            quiet_until: now.boot,
            renewal_quiet_until: now.boot,
            relist_at,
            publish_at: None,
            published: None,
            stale: Stale::default(),
        };
        machine.insert(Arc::new(machine.own.lease.clone()));
        machine.plan_renewal();
        machine
    }

    /// A machine that uses the cache of the last run until the store answers. How much of the lease
    /// is left is unknown, so it counts as expired: it is read before it is written, and another
    /// node that has it by then keeps it.
    pub(super) fn from_cache(
        known: Known,
        timing: Timing,
        random: fastrand::Rng,
        now: Now,
    ) -> Self {
        let Known { as_of_unix, revision, cluster, networks, own, ends_unix: _, peers } = known;
        let own = OwnLease { lease: own, expires: Some(now.boot), networks };
        let mut machine = Self::new(own, timing, random, now);
        (machine.from_cache, machine.renew_at) = (true, None);
        (machine.newest, machine.cluster, machine.heard_unix) = (revision, cluster, as_of_unix);
        machine.mirror = peers.values().map(|peer| (peer.key.clone(), peer.clone())).collect();
        machine.commands = vec![
            Command::Count { peers: peers.len(), held: 0 },
            Command::Publish(Arc::clone(&peers)),
        ];
        machine.published = Some(peers);
        machine
    }

    /// Handles an event and returns what to do now. Unexpected answers are ignored.
    pub(super) fn handle(&mut self, event: Event, now: Now) -> Vec<Command> {
        self.now = now;
        if self.own_entry == OwnEntry::Lost {
            return Vec::new();
        }
        match (event, self.asked) {
            (Event::Timer, _) => {}
            (Event::Moved(attributes), _) => self.on_moved(attributes),
            (Event::Doubted, _) => self.doubt_mirror(),
            (Event::Listed(answer), Asked::List { at }) => {
                self.asked = Asked::Nothing;
                self.on_listed(answer, at);
            }
            (Event::Opened(answer), Asked::Watch) => {
                self.asked = Asked::Nothing;
                self.on_opened(answer);
            }
            (Event::Written(answer), Asked::Write { what, over, own_seen }) => {
                self.asked = Asked::Nothing;
                self.note_unanswered(&answer, over);
                self.on_written(answer, what, own_seen);
            }
            (Event::Changed(changes), _) => self.on_changes(changes),
            (Event::Listed(_) | Event::Opened(_) | Event::Written(_), _) => {}
        }
        self.proceed();
        std::mem::take(&mut self.commands)
    }

    /// When the next `Event::Timer` is due, by the boot clock; `None` while only an answer or a
    /// change can bring news.
    pub(super) fn next_wake(&self) -> Option<Duration> {
        let follow = if let Follow::Waiting { at } = self.follow { at } else { self.relist_at };
        let requests = [Some(follow), self.renew_at, self.own_entry.due()];
        let requests = requests.into_iter().filter(|_| self.asked == Asked::Nothing);
        requests.chain([self.publish_at, self.next_release()]).flatten().min()
    }

    /// When a grace period ends. None does in an outage: who is back cannot be known then.
    fn next_release(&self) -> Option<Duration> {
        self.stale.next_end().filter(|_| self.outage.is_none())
    }

    /// Whether changes may be brought now. Between the request for a listing and its answer they
    /// may not: which of the two is newer would be unknown.
    pub(super) fn wants_changes(&self) -> bool {
        !matches!(self.asked, Asked::List { .. })
    }

    /// Does what is due.
    fn proceed(&mut self) {
        if self.asked == Asked::Nothing {
            self.ask_next();
        }
        if self.relist_at <= self.now.boot && self.follow == Follow::Listing {
            self.plan_relist();
        }
        let ended = self.next_release().is_some_and(|at| at <= self.now.boot);
        let due = self.publish_at.is_some_and(|at| at <= self.now.boot);
        if (due || ended) && self.own_entry != OwnEntry::Lost {
            self.publish();
        }
    }

    /// Sends the most urgent request that is due, if any.
    fn ask_next(&mut self) {
        if self.ask_own() || self.own_entry == OwnEntry::Lost {
            return;
        }
        match (self.follow, self.revision) {
            (Follow::Waiting { at }, _) if at > self.now.boot => {}
            (Follow::Waiting { .. }, None) => self.ask_list(Follow::Listing),
            // Whoever may list and not watch sees new nodes at least this often.
            (Follow::Waiting { .. }, Some(_)) if self.relist_at <= self.now.boot => {
                self.ask_list(Follow::Listing);
            }
            (Follow::Waiting { .. }, Some(revision)) => {
                self.follow = Follow::Opening;
                self.asked = Asked::Watch;
                let own = self.own.lease.clone();
                self.commands.push(Command::Watch { revision, own });
            }
            (follow @ Follow::Watching { .. }, _) if self.relist_at <= self.now.boot => {
                self.plan_relist();
                self.ask_list(follow);
            }
            (Follow::Watching { .. } | Follow::Listing | Follow::Opening, _) => {}
        }
    }

    fn ask_list(&mut self, follow: Follow) {
        (self.follow, self.asked) = (follow, Asked::List { at: self.now.boot });
        self.commands.push(Command::List);
    }

    fn plan_relist(&mut self) {
        let period = jittered(self.timing.relist_period, RELIST_JITTER, &mut self.random);
        self.relist_at = self.now.boot + period;
    }

    fn info(&mut self, text: String) {
        self.commands.push(Command::Log(Level::INFO, text));
    }

    fn warn(&mut self, text: String) {
        self.commands.push(Command::Log(Level::WARN, text));
    }

    /// The own lease is lost, for the reason `why`.
    fn give_up(&mut self, why: String, new_owner: Option<IpAddr>) {
        self.warn(format!("The lease of {} {why}; giving it up", self.own.lease.subnets));
        self.own_entry = OwnEntry::Lost;
        self.commands.push(Command::End(End { new_owner }));
    }

    /// Mirrors a lease, if there is room: as many as one listing may have, and always the own.
    fn insert(&mut self, lease: Arc<Lease>) {
        let known = lease.key == self.own.lease.key || self.mirror.contains_key(&lease.key);
        if known || self.mirror.len() < ENTRIES_MAX {
            self.mirror.insert(lease.key.clone(), lease);
        } else {
            self.remember_unreadable(Rejected::too_many(lease.revision));
        }
    }

    /// As many as one listing may have; the next complete one shows the others.
    fn remember_unreadable(&mut self, rejected: Rejected) {
        if self.unreadable.len() < REJECTED_MAX || self.unreadable.contains_key(&rejected.key) {
            self.unreadable.insert(rejected.key.clone(), rejected);
        }
    }

    /// Not before everything was listed: nodes not known yet would lose their traffic.
    fn plan_publication(&mut self) {
        if self.published.is_none() && self.revision.is_none() {
            return;
        }
        let at = self.now.boot + self.timing.publish_window;
        self.publish_at.get_or_insert(at);
    }

    fn publish(&mut self) {
        self.publish_at = None;
        let OwnLease { lease: own, networks, .. } = &self.own;
        let (mut peers, rejected) = peers::select(self.mirror.values(), own, *networks);
        let unused = self.unreadable.values().cloned().chain(rejected).collect();
        self.commands.push(Command::Unused(unused));
        if let Some(released) = self.stale.join(&mut peers, self.now.boot, self.outage.is_some()) {
            let (Released { leased, over }, left) = (released, self.stale.len());
            let level = if over > 0 { Level::WARN } else { Level::INFO };
            let text = format!(
                "Of the vanished peers in their grace period, {leased} have a lease again or were \
                 replaced, {over} did not come back in time and were removed, {left} remain"
            );
            self.commands.push(Command::Log(level, text));
        }
        self.commands.push(Command::Count { peers: peers.len(), held: self.stale.len() });
        if !self.published.as_ref().is_some_and(|before| peers::same_ways(before, &peers)) {
            let peers = Arc::new(peers);
            self.published = Some(Arc::clone(&peers));
            self.commands.push(Command::Publish(peers));
        }
        // After the store's peers are published: until then, they are the cache's.
        if !self.from_cache {
            self.commands.push(Command::Confirmed);
        }
        self.remember();
    }

    /// Keeps a snapshot for an offline start, unless this run still uses one, or our new address is
    /// not in the store yet: started from that, we would take our own entry for another node's.
    pub(super) fn remember(&mut self) {
        let is_settled = !self.from_cache && self.moved_from.is_empty();
        let Some(peers) = self.published.as_ref().filter(|_| is_settled) else { return };
        let (own, networks) = (self.own.lease.clone(), self.own.networks);
        self.commands.push(Command::Remember(Known {
            as_of_unix: self.heard_unix,
            revision: self.newest,
            cluster: self.cluster,
            networks,
            own,
            ends_unix: self.ends_unix(),
            peers: Arc::clone(peers),
        }));
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
