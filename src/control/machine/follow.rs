//! Following the other nodes: listing, watching, what a change means, what an outage means. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::state::{ABSENT, Asked, Follow, Outage, OwnEntry, REPORT_PAUSE, REPORT_PERIOD};
use super::{Command, Machine, stale};
use crate::control::backoff::{BACKOFF, Backoff};
use crate::control::clock::format_go_duration;
use crate::control::error::{StoreError, StoreResult};
use crate::control::lease::Lease;
use crate::control::rejected::Rejected;
use crate::control::snapshot::{Change, Snapshot};
use crate::failure::with_causes;
use crate::route::{Prefix, Prefixes};

/// How long a watch must have lived for the next failure to count as new and be retried at
/// once, instead of continuing the last one.
const STABLE_AFTER: Duration = Duration::from_secs(10);

impl Machine {
    pub(super) fn on_listed(&mut self, answer: StoreResult<Snapshot>, asked_at: Duration) {
        match answer {
            Ok(snapshot) => {
                if self.follow == Follow::Listing {
                    self.follow = Follow::Waiting { at: self.now.boot };
                }
                self.on_snapshot(snapshot, Some(asked_at));
            }
            Err(error) => self.on_failure(&error),
        }
    }

    pub(super) fn on_opened(&mut self, answer: StoreResult<()>) {
        match answer {
            Ok(()) => self.follow = Follow::Watching { live_since: None },
            Err(error) => self.on_failure(&error),
        }
    }

    pub(super) fn on_changes(&mut self, changes: StoreResult<Vec<Change>>) {
        // Else they are of a watch that was dropped.
        let Follow::Watching { .. } = self.follow else { return };
        if let Asked::List { .. } = self.asked {
            // The listing may or may not contain them: watch again from there on.
            self.drop_watch();
            self.follow = Follow::Listing;
            return;
        }
        let changes = match changes {
            Ok(changes) => changes,
            Err(error) => return self.on_failure(&error),
        };
        self.heard_unix = self.now.unix_seconds;
        let mut changes = changes.into_iter().peekable();
        while let Some(revision) = changes.peek().map(Change::revision) {
            let of_revision = || changes.next_if(|next| next.revision() == revision);
            let step: Vec<_> = std::iter::from_fn(of_revision).collect();
            let is_accident = self.hold_vanishing(&step);
            for change in step {
                self.on_change(change, is_accident);
                if self.own_entry == OwnEntry::Lost {
                    return;
                }
            }
        }
    }

    /// `is_accident`: most peers vanish in the revision of the change.
    fn on_change(&mut self, change: Change, is_accident: bool) {
        match change {
            Change::Live { revision } => self.on_live(revision),
            Change::Progress { revision } => self.see(revision),
            Change::Everything(snapshot) => self.on_snapshot(snapshot, None),
            Change::Put(lease) => {
                let (key, revision) = (lease.key.clone(), lease.revision);
                if self.is_news(&key, revision) {
                    let was_unreadable = self.unreadable.remove(&key).is_some();
                    let before = self.mirror.get(&key);
                    let is_new = was_unreadable
                        || before.is_none_or(|before| !leads_the_same_way(before, &lease));
                    self.insert(Arc::new(lease));
                    if is_new || key == self.own.lease.key {
                        self.on_changed(&key, revision, is_accident);
                    }
                }
            }
            Change::Rejected(rejected) => {
                if self.is_news(&rejected.key, rejected.revision) {
                    self.mirror.remove(&rejected.key);
                    self.on_own_unreadable(&rejected);
                    self.remember_unreadable(rejected);
                    self.plan_publication();
                }
            }
            Change::Deleted { key, revision } => {
                if self.is_news(&key, revision) {
                    let was_unreadable = self.unreadable.remove(&key).is_some();
                    let was_there = self.mirror.remove(&key).is_some() || was_unreadable;
                    if was_there || key == self.own.lease.key {
                        self.on_changed(&key, revision, is_accident);
                    }
                }
            }
        }
    }

    fn on_live(&mut self, revision: i64) {
        // Not if what came before it led to doubts, and the watch was dropped.
        if let Follow::Watching { .. } = self.follow {
            self.unwatched_until = revision;
            self.follow = Follow::Watching { live_since: Some(self.now.boot) };
            (self.history_lost, self.followed) = (false, true);
            self.on_recovery();
        }
    }

    /// Whether the change is newer than the last listing and than our own last write. The mirror
    /// contains its revision from now on.
    fn is_news(&mut self, key: &str, revision: i64) -> bool {
        self.see(revision);
        self.would_be_news(key, revision)
    }

    fn see(&mut self, revision: i64) {
        self.revision = self.revision.map(|seen| seen.max(revision));
        self.newest = self.newest.max(revision);
    }

    fn would_be_news(&self, key: &str, revision: i64) -> bool {
        let superseded = key == self.own.lease.key && revision < self.own_since;
        revision > self.listed_until && !superseded
    }

    fn on_changed(&mut self, key: &str, revision: i64, is_accident: bool) {
        self.plan_publication();
        if key != self.own.lease.key {
            return;
        }
        // What a write under way compares with is older than that write.
        if revision != self.own.lease.revision {
            self.own_seen(revision);
        }
        let watched = self.outage.is_none() && revision > self.unwatched_until;
        self.check_own(watched && !is_accident);
        if matches!(self.own_entry, OwnEntry::Lapsed { .. }) {
            // Who came after the end of our lease may not be in the mirror yet.
            self.look_again();
        }
    }

    /// Remembers what became of the own entry while a write of it is under way.
    fn own_seen(&mut self, revision: i64) {
        // What it is written over may have been read before the write.
        if let Asked::Write { own_seen, over, .. } = &mut self.asked
            && *over != revision
        {
            *own_seen = Some(revision);
        }
    }

    fn on_own_unreadable(&mut self, rejected: &Rejected) {
        if rejected.key == self.own.lease.key {
            self.own_seen(rejected.revision);
            self.own_entry = OwnEntry::Unreadable { repair: Some(rejected.revision) };
        }
    }

    /// Everything at one moment; asked for at `asked_at`, if it was.
    fn on_snapshot(&mut self, snapshot: Snapshot, asked_at: Option<Duration>) {
        self.heard_unix = self.now.unix_seconds;
        let wiped = self.went_backwards(&snapshot);
        let Snapshot { leases, rejected, revision, is_cut, last_written, .. } = snapshot;
        // What a cut listing lacks may be in the store all the same, so nothing is
        // concluded from it.
        let shows_own = !is_cut || leases.iter().any(|lease| lease.key == self.own.lease.key);
        let mut known = BTreeMap::new();
        if !is_cut {
            known = std::mem::take(&mut self.mirror);
            self.unreadable.clear();
            self.last_written = last_written;
        }
        let own = rejected.iter().find(|rejected| rejected.key == self.own.lease.key).cloned();
        rejected.into_iter().for_each(|entry| self.remember_unreadable(entry));
        for mut lease in leases {
            lease.share(known.get(&lease.key));
            self.insert(lease);
        }
        self.revision = Some(revision);
        // A change may be of what a cut listing lacks.
        self.listed_until = if is_cut { self.listed_until.min(revision) } else { revision };
        self.plan_publication();
        let accident = !is_cut && self.hold_missing(wiped);
        if shows_own || own.is_some() {
            self.own_read = asked_at.or(self.own_read);
        }
        if let Some(own) = own {
            return self.on_own_unreadable(&own);
        }
        if !shows_own {
            return;
        }
        let found = self.mirror.get(&self.own.lease.key).map(|lease| lease.revision);
        self.own_seen(found.unwrap_or(ABSENT));
        // Only a watch tells that somebody deleted it: a store that was restored lacks it, too.
        let watched = asked_at.is_none() && self.outage.is_none() && self.followed;
        self.check_own(watched && !accident);
        if let OwnEntry::Lapsed { .. } = self.own_entry
            && !is_cut
        {
            self.plan_retaking();
        } else if self.own_entry.is_ours() && wiped && self.own.expires.is_some() {
            // The entry is from a backup, and its lease of unknown age: renewing shows it.
            self.renew_at = Some(self.now.boot);
        }
    }

    /// Whether this is not the store, or not the history, that was seen before: wiped, restored
    /// from a backup, or replaced. What was known of its revisions is forgotten then.
    fn went_backwards(&mut self, snapshot: &Snapshot) -> bool {
        let known = self.cluster != 0 && snapshot.cluster != 0;
        let replaced = known && self.cluster != snapshot.cluster;
        let wiped = replaced || snapshot.revision < self.newest;
        if wiped {
            self.own_since = 0;
            self.unwatched_until = 0;
            self.twin.unsure = true;
        }
        self.newest = snapshot.revision;
        self.cluster = snapshot.cluster;
        wiped
    }

    /// Holds the peers that vanish in `changes`, all those of one revision, if they are most of
    /// them. Returns whether they are. Whose key changes with its families does not vanish.
    fn hold_vanishing(&mut self, changes: &[Change]) -> bool {
        let (mut gone, mut put) = (BTreeSet::new(), Vec::new());
        for change in changes {
            let (key, revision) = match change {
                Change::Deleted { key, revision } => (key, *revision),
                Change::Rejected(rejected) => (&rejected.key, rejected.revision),
                Change::Put(lease) => {
                    put.push(&lease.key);
                    continue;
                }
                Change::Live { .. } | Change::Progress { .. } | Change::Everything(_) => continue,
            };
            if self.would_be_news(key, revision) {
                gone.insert(key);
            }
        }
        let is_left = |peer: &Lease| {
            let of_peer = keys_of(peer);
            put.iter().any(|key| of_peer.contains(*key))
                || self.mirror.range(of_peer).any(|(key, _)| !gone.contains(key))
        };
        let lost = gone.iter().filter_map(|key| self.published_of(key));
        let lost = lost.filter(|peer| !is_left(peer) && !self.stale.holds(peer.subnets));
        let lost: BTreeMap<_, _> = lost.map(|peer| (peer.subnets, peer.clone())).collect();
        let (of, own_lost) = (self.live_peers(), gone.contains(&self.own.lease.key));
        let is_accident = stale::is_accident(lost.len(), of, own_lost);
        if is_accident {
            self.hold_peers(lost.into_values().collect(), of, false);
        }
        is_accident
    }

    /// The published peer that has the subnets in `key`: those that are used here, or IPv4 alone.
    fn published_of(&self, key: &str) -> Option<&Arc<Lease>> {
        let subnets = Prefixes::from_key(key)?.within(self.own.networks)?;
        let from = subnets.v4().map_or(subnets, Prefixes::from);
        let (of, peer) = self.published.as_ref()?.range(from..).next()?;
        (of.v4() == subnets.v4() && (of.v4().is_some() || *of == subnets)).then_some(peer)
    }

    /// Holds the published peers that the mirror, which is complete, lacks, if they are most of
    /// them, if the store was `wiped`, or if this node's own lease is gone, too: an outage that
    /// outlasted it says nothing about who else is alive. Returns whether it was an accident.
    fn hold_missing(&mut self, wiped: bool) -> bool {
        let published = self.published.as_deref().into_iter().flat_map(BTreeMap::values);
        let is_missing = |lease: &&Arc<Lease>| {
            let is_left = self.mirror.contains_key(&lease.key)
                || self.mirror.range(keys_of(lease)).next().is_some();
            !is_left && !self.stale.holds(lease.subnets)
        };
        let missing: Vec<_> = published.filter(is_missing).cloned().collect();
        let of = self.live_peers();
        let own_lapsed = !self.mirror.contains_key(&self.own.lease.key);
        let accident = wiped
            || own_lapsed && !missing.is_empty()
            || stale::is_accident(missing.len(), of, false);
        if accident {
            self.hold_peers(missing, of, wiped);
        }
        accident
    }

    fn live_peers(&self) -> usize {
        self.published.as_ref().map_or(0, |peers| peers.len()).saturating_sub(self.stale.len())
    }

    fn hold_peers(&mut self, lost: Vec<Arc<Lease>>, of: usize, wiped: bool) {
        let hold = self.timing.stale_hold;
        if hold.is_zero() || lost.is_empty() {
            return;
        }
        let what = if wiped { "the store lost its data: " } else { "" };
        let (vanished, period) = (lost.len(), format_go_duration(hold));
        self.warn(format!(
            "ALARM: {what}{vanished} of {of} peers vanished at once; sending to them for another \
             {period} (--stale-hold). If that was not meant, restore the store's data, the network \
             configuration included; nodes that run register again by themselves. If it was, \
             restart weftd"
        ));
        for lease in lost {
            self.stale.hold(lease, self.now.boot + hold);
        }
        self.plan_publication();
    }

    /// Lists everything once nothing else is under way. A watch stays, and shows what comes after
    /// the listing.
    pub(super) fn doubt_mirror(&mut self) {
        (self.revision, self.relist_at) = (None, self.now.boot);
    }

    /// Lists everything soon, without dropping the watch for longer than that.
    pub(super) fn look_again(&mut self) {
        self.drop_watch();
        self.revision = None;
        let mut soon = self.now.boot + self.backoff.next_wait_by(&mut self.random);
        // Never later than planned: renewals that keep failing must not put off the look that
        // tells why.
        if let Follow::Waiting { at } = self.follow {
            soon = at.min(soon);
        }
        self.follow = Follow::Waiting { at: soon };
    }

    fn drop_watch(&mut self) {
        if let Follow::Watching { .. } = self.follow {
            self.commands.push(Command::DropWatch);
        }
    }

    /// The store or the watch failed: retry later, and keep everything meanwhile.
    pub(super) fn on_failure(&mut self, error: &StoreError) {
        let now = self.now.boot;
        self.drop_watch();
        if let Follow::Watching { live_since: Some(since) } = self.follow
            && now - since > STABLE_AFTER
        {
            self.backoff = Backoff::between(BACKOFF);
        }
        if let StoreError::HistoryLost = error {
            // The store answers, so retry at once, unless it answered the same last time.
            let again = std::mem::replace(&mut self.history_lost, true);
            let pause = again.then(|| self.backoff.next_wait_by(&mut self.random));
            self.follow = Follow::Waiting { at: now + pause.unwrap_or_default() };
            // Where the history begins says nothing about an outage: list and go on.
            self.revision = None;
            self.info(
                "Watch of subnet leases failed because etcd index outside history window; \
                 listing all leases"
                    .to_owned(),
            );
            return;
        }
        self.follow = Follow::Waiting { at: now + self.backoff.next_wait_by(&mut self.random) };
        let outage = self.outage.get_or_insert_with(|| Outage::new(now));
        let refused = outage.refuses(error, now);
        if self.quiet_until <= now || (refused && outage.reported && !outage.refusal_logged) {
            self.quiet_until = now + REPORT_PERIOD;
            outage.reported = true;
            outage.refusal_logged |= matches!(error, StoreError::Refused { .. });
            let seconds = (now - outage.since).as_secs();
            let peers = self.published.as_ref().map_or(0, |peers| peers.len());
            self.warn(format!(
                "Subnet watch failed: {}; without the store for {seconds} s, keeping all {peers} \
                 peers and retrying",
                with_causes(error)
            ));
        }
    }

    fn on_recovery(&mut self) {
        let Some(outage) = self.outage.take() else { return };
        // The others have to register again, too, and try that as often as this node.
        let rest = self.timing.renew_retry.min(self.timing.stale_hold);
        self.stale.prolong(self.now.boot, self.now.boot + rest);
        if outage.reported {
            self.quiet_until = self.now.boot + REPORT_PAUSE;
            let seconds = (self.now.boot - outage.since).as_secs();
            self.info(format!("The lease store answers again after {seconds} s"));
        }
    }
}

/// The keys that a peer's entry may have: its IPv4 subnet, alone or beside any of IPv6.
fn keys_of(peer: &Lease) -> Range<String> {
    let from = peer.v4().map_or_else(|| peer.key.clone(), Prefix::key);
    // The apostrophe follows the ampersand.
    let end = format!("{from}'");
    from..end
}

/// Whether both versions of an entry give the same route: a renewal, or a change that does not
/// matter here.
fn leads_the_same_way(before: &Lease, after: &Lease) -> bool {
    before.subnets == after.subnets
        && before.attributes == after.attributes
        && before.created_revision == after.created_revision
}
