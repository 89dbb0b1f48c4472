//! The own lease: renewed by compare-and-swap, checked against every listing and change, taken
//! again if it lapsed, given up if somebody else holds the subnet. Pure.

use std::sync::Arc;
use std::time::Duration;

use super::state::{ABSENT, Asked, Follow, OwnEntry, REPORT_PAUSE, REPORT_PERIOD, Write};
use super::{Command, Machine};
use crate::control::backoff::jittered;
use crate::control::clock::{format_go, format_go_duration};
use crate::control::error::{StoreError, StoreResult};
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::control::snapshot::Granted;
use crate::failure::with_causes;
use crate::route::Prefixes;

/// Renewals are brought forward by up to this at random: nodes that started together do not
/// renew together.
const RENEW_SPREAD_MAX: Duration = Duration::from_secs(60);
/// Shortest pause after a failed renewal, when the lease is about to end.
const RENEW_RETRY_MIN: Duration = Duration::from_secs(1);
/// Pause after another writer changed the own entry: time to list what is there now.
const RENEW_AFTER_CONFLICT: Duration = Duration::from_secs(2);
/// Share by which the pause after a failed renewal is spread.
const RETRY_JITTER: f64 = 0.2;
/// How long a listing of the own entry stays valid once the lease has expired: some requests' time,
/// and much less than any lease.
const READ_COUNTS_FOR: Duration = Duration::from_secs(15);

impl Machine {
    /// Sets the renewal timer by the lease's end.
    pub(super) fn plan_renewal(&mut self) {
        self.commands.push(Command::Expires(self.ends_unix()));
        let Some(expires) = self.own.expires else {
            self.renew_at = None;
            return;
        };
        let now = self.now.boot;
        let left = expires.saturating_sub(self.timing.renew_margin).saturating_sub(now);
        let spread = (left / 10).min(RENEW_SPREAD_MAX).mul_f64(self.random.f64());
        // A margin beyond the lease's life must not become a loop without pauses.
        let pause = (self.timing.lease_ttl / 8).min(self.timing.renew_retry);
        let wait = left.saturating_sub(spread).max(pause);
        self.info(format!("Waiting for {} to renew lease", format_go_duration(wait)));
        self.renew_at = Some(now + wait);
    }

    /// Writes the own entry if that is due. Returns whether something was asked of the store.
    pub(super) fn ask_own(&mut self) -> bool {
        let now = self.now.boot;
        let renewal_due = self.renew_at.is_some_and(|at| at <= now);
        let known = self.own.lease.revision;
        let (what, over) = match self.own_entry {
            OwnEntry::AsWritten | OwnEntry::Rewritten { .. } if renewal_due => {
                (Write::Renew, known)
            }
            OwnEntry::Rewritten { at } if at <= now => (Write::Restore, known),
            OwnEntry::Unreadable { repair: Some(junk) } => (Write::Repair, junk),
            OwnEntry::Lapsed { free: true } => (Write::Retake, ABSENT),
            OwnEntry::Unreadable { repair: None } | OwnEntry::Lapsed { free: false }
                if renewal_due =>
            {
                // There is nothing to renew: see what there is.
                self.renew_at = Some(now + RENEW_AFTER_CONFLICT);
                self.look_again();
                return false;
            }
            OwnEntry::AsWritten
            | OwnEntry::Rewritten { .. }
            | OwnEntry::Unreadable { repair: None }
            | OwnEntry::Lapsed { free: false }
            | OwnEntry::Lost => return false,
        };
        if self.may_write() {
            self.ask_write(what, over);
            return true;
        }
        self.read_first();
        self.asked != Asked::Nothing
    }

    /// Writes the own entry over its revision `over`.
    fn ask_write(&mut self, what: Write, over: i64) {
        let mut held = self.own.lease.clone();
        match what {
            // With the address that it shows: only a restoring write publishes a new one.
            Write::Renew => {
                let found = self.mirror.get(&held.key).map(|found| &found.attributes);
                let elsewhere = found.filter(|found| !found.is_of_node_of(&held.attributes));
                held.attributes = elsewhere.unwrap_or(&held.attributes).clone();
            }
            Write::Restore => self.own_entry = OwnEntry::AsWritten,
            Write::Repair => {
                self.own_entry = OwnEntry::Unreadable { repair: None };
                held.revision = over;
            }
            Write::Retake => self.own_entry = OwnEntry::Lapsed { free: false },
        }
        self.asked = Asked::Write { what, over, own_seen: None };
        self.commands.push(if what == Write::Retake {
            Command::Retake { held, last_written: self.last_written.clone() }
        } else {
            Command::Write { what, held }
        });
    }

    /// Once the lease has expired, another node may have the subnet: the entry has to be read after
    /// the expiry, and recently, before it is written.
    fn may_write(&self) -> bool {
        if !self.own_expired() {
            return true;
        }
        let after_end = |read: Duration| {
            self.own.expires.is_none_or(|end| end <= read) || self.own_ended_by_wall_clock()
        };
        self.own_read.is_some_and(|read| after_end(read) && self.now.boot < read + READ_COUNTS_FOR)
    }

    /// Lists first, and postpones what was to be written.
    fn read_first(&mut self) {
        let later = self.now.boot + RENEW_AFTER_CONFLICT;
        self.renew_at = self.renew_at.map(|at| at.max(later));
        self.own_entry = match self.own_entry {
            OwnEntry::Rewritten { at } => OwnEntry::Rewritten { at: at.max(later) },
            OwnEntry::Unreadable { .. } => OwnEntry::Unreadable { repair: None },
            OwnEntry::Lapsed { .. } => OwnEntry::Lapsed { free: false },
            known @ (OwnEntry::AsWritten | OwnEntry::Lost) => known,
        };
        if self.own_end_logged != self.own.expires {
            self.own_end_logged = self.own.expires;
            self.warn(format!(
                "The lease of {} expired during a pause or an outage; reading it before renewing",
                self.own.lease.subnets
            ));
        }
        if let Follow::Watching { .. } = self.follow {
            self.ask_list(self.follow);
        } else {
            // Not sooner than is good for a store in trouble.
            self.revision = None;
        }
    }

    /// A write over `over` may have gone in, or may still. That an entry is there which was to be
    /// created may be for the same request, sent twice.
    pub(super) fn note_unanswered(&mut self, answer: &StoreResult<Granted>, over: i64) {
        let is_open = |error: &StoreError| over == ABSENT || !error.nothing_was_written();
        if answer.as_ref().is_err_and(is_open) {
            self.unanswered = Some(over);
        }
    }

    /// What became of a write.
    pub(super) fn on_written(
        &mut self,
        answer: StoreResult<Granted>,
        what: Write,
        own_seen: Option<i64>,
    ) {
        self.resolve_suspect(&answer, own_seen);
        match answer {
            Ok(granted) if own_seen.is_some_and(|seen| seen != granted.lease.revision) => {
                // It was written, and somebody wrote again before the answer came.
                self.renew_at = granted.expires.map(|_| self.now.boot + RENEW_AFTER_CONFLICT);
                self.look_again();
            }
            Ok(granted) => {
                self.adopt(granted);
                self.on_granted(what);
                self.plan_renewal();
                // An offline start needs the new expiry; a publication stores it too.
                if self.publish_at.is_none() {
                    self.remember();
                }
            }
            Err(StoreError::Conflict(_)) => {
                // Somebody wrote to our key: see what is there before anything else.
                self.look_again();
                if what == Write::Renew {
                    self.renew_at = Some(self.now.boot + RENEW_AFTER_CONFLICT);
                }
            }
            Err(error) if what == Write::Renew => {
                self.retry_renewal_later();
                self.report_renewal(&error);
            }
            Err(error) => {
                self.on_failure(&error);
                self.revision = None;
            }
        }
    }

    /// The entry shows the old address until it is written, and is still ours.
    pub(super) fn on_moved(&mut self, attributes: LeaseAttributes) {
        if attributes == self.own.lease.attributes {
            return;
        }
        let before = std::mem::replace(&mut self.own.lease.attributes, attributes);
        self.moved_from.insert(before.node_address());
        // The store's connections end with the address: that alone is no outage to report.
        self.quiet_until = self.quiet_until.max(self.now.boot + REPORT_PAUSE);
        // Any other has the new attributes once it is written.
        if self.own_entry.is_ours() {
            self.own_entry = OwnEntry::Rewritten { at: self.now.boot };
        }
        self.plan_publication();
    }

    fn adopt(&mut self, granted: Granted) {
        let Granted { lease: found, expires } = granted;
        let Lease { revision, created_revision, .. } = found;
        // With the attributes of now, and not of when it was asked for.
        let attributes = self.own.lease.attributes.clone();
        self.own.lease = Lease { attributes, ..found.clone() };
        self.own.expires = expires;
        self.own_since = revision;
        self.unanswered = self.unanswered.filter(|over| *over == revision);
        if created_revision != 0 {
            self.newest = self.newest.max(revision);
        }
        self.mirror.insert(found.key.clone(), Arc::new(found));
        self.confirm();
    }

    /// The store has our entry as we do.
    fn confirm(&mut self) {
        if std::mem::take(&mut self.from_cache) {
            self.info(format!(
                "The store confirmed the lease of {}; nothing of before is needed now",
                self.own.lease.subnets
            ));
            self.plan_publication();
        }
    }

    fn on_granted(&mut self, what: Write) {
        let subnet = self.own.lease.subnets;
        if what == Write::Renew {
            let expiration = format_go(self.ends_unix().unwrap_or_default());
            return self.info(format!("Lease renewed, new expiration: {expiration}"));
        }
        let found = self.mirror.get(&self.own.lease.key);
        if found.is_none_or(|found| found.attributes != self.own.lease.attributes) {
            // Moved while it was being written.
            self.own_entry = OwnEntry::Rewritten { at: self.now.boot };
            return;
        }
        self.own_entry = OwnEntry::AsWritten;
        if what == Write::Restore && !self.moved_from.is_empty() {
            let LeaseAttributes { public_ip, public_ipv6, .. } = &self.own.lease.attributes;
            let v4 = public_ip.map(|it| format!("PublicIP {it}"));
            let v6 = public_ipv6.map(|it| format!("PublicIPv6 {it}"));
            let now = v4.into_iter().chain(v6).collect::<Vec<_>>().join(" and ");
            self.info(format!("The lease of {subnet} stays, now with {now}"));
        } else if what == Write::Restore {
            self.warn(format!("Somebody rewrote the lease of {subnet}; restored it"));
        } else if what == Write::Repair {
            self.warn(format!("The lease of {subnet} was unparsable; rewrote it"));
        } else {
            self.warn(format!("The lease of {subnet} was gone from the store; took it again"));
            // A store may lose its data between the listing and the write, and peers with it, and
            // a watch finds the own entry as it was written, as if nothing had been lost.
            self.doubt_mirror();
        }
        self.arrived();
    }

    /// The store shows our attributes, and no earlier write can change that.
    fn arrived(&mut self) {
        if !std::mem::take(&mut self.moved_from).is_empty() {
            // What may be remembered now.
            self.plan_publication();
        }
    }

    /// Near the lease's end it is tried every second.
    fn report_renewal(&mut self, error: &StoreError) {
        if self.renewal_quiet_until > self.now.boot {
            return;
        }
        self.renewal_quiet_until = self.now.boot + REPORT_PERIOD;
        let pause = self.renew_at.map_or(Duration::ZERO, |at| at.saturating_sub(self.now.boot));
        let (pause, error) = (format_go_duration(pause), with_causes(error));
        self.warn(format!(
            "Error renewing lease (trying again in {pause}, and saying so once a minute): {error}"
        ));
    }

    fn retry_renewal_later(&mut self) {
        let now = self.now.boot;
        let left = self.own.expires.map_or(Duration::MAX, |expires| expires.saturating_sub(now));
        // Near the end, the lease gets more than one more chance.
        let pause = self.timing.renew_retry.min(left / 3).max(RENEW_RETRY_MIN);
        self.renew_at = Some(now + jittered(pause, RETRY_JITTER, &mut self.random));
    }

    /// Compares the own lease with the mirror. `watched` says that the store was reachable all
    /// the time, so that a missing lease was removed on purpose.
    pub(super) fn check_own(&mut self, watched: bool) {
        match self.mirror.get(&self.own.lease.key) {
            Some(found) if self.is_own(found) => {
                let found = Lease::clone(found);
                self.follow_own(found);
            }
            Some(found) => {
                let new_owner = found.attributes.node_address();
                self.give_up(format!("now belongs to {new_owner}"), Some(new_owner));
            }
            None => {
                let lapsed = matches!(self.own_entry, OwnEntry::Lapsed { .. });
                if watched && !self.own_expired() && !lapsed {
                    self.give_up("was removed from the store".to_owned(), None);
                } else {
                    self.own_entry = OwnEntry::Lapsed { free: false };
                }
            }
        }
    }

    /// Whether it shows an address of this node. An earlier one counts in the entry that was ours
    /// all along, which nobody else may write, or in one that a write of ours may have made: a new
    /// entry belongs to the node that has that address now.
    fn is_own(&self, found: &Lease) -> bool {
        let shown = &found.attributes;
        let is_ours_still = found.created_revision == self.own.lease.created_revision
            || self.unanswered == Some(ABSENT)
            || matches!(self.asked, Asked::Write { over: ABSENT, .. });
        shown.is_of_node_of(&self.own.lease.attributes)
            || self.moved_from.contains(&shown.node_address()) && is_ours_still
    }

    /// The entry is ours, but its version, its lifetime or its attributes may have changed. Only
    /// this node decides about the last.
    fn follow_own(&mut self, found: Lease) {
        let attributes = self.own.lease.attributes.clone();
        if self.unanswered.is_some_and(|over| over != found.revision) {
            self.unanswered = None;
        }
        // A write of an earlier address may still go in: ours has to be over it, or seen.
        let may_change = self.unanswered.is_some() && !self.moved_from.is_empty();
        if found.attributes == attributes && !may_change {
            self.own_entry = OwnEntry::AsWritten;
        } else if self.own_entry.due().is_none() {
            let wait = self.rewrite_backoff.next_wait_by(&mut self.random);
            self.own_entry = OwnEntry::Rewritten { at: self.now.boot + wait };
        }
        // What a write comes to, its answer tells: the watch may be faster.
        let is_writing = matches!(self.asked, Asked::Write { .. });
        if self.own_entry == OwnEntry::AsWritten && !is_writing {
            self.arrived();
        }
        if self.own_expired() {
            // It was not extended in time, and is there all the same.
            self.renew_at = Some(self.now.boot);
        }
        if found.revision == self.own.lease.revision {
            // Of an entry that was made anew under ours, which a write of ours does not tell.
            self.own.lease.created_revision = found.created_revision;
            return;
        }
        self.suspect_twin(&found);
        let (was, is) = (self.own.lease.lifetime.id(), found.lifetime.id());
        let subnet = self.own.lease.subnets;
        self.own_since = found.revision;
        self.own.lease = Lease { attributes, ..found };
        match is {
            _ if was == is && !self.ends_in_the_store() => {}
            None => {
                self.info(format!("The lease of {subnet} is a reservation now"));
                self.own.expires = None;
                self.plan_renewal();
                if self.own_entry == OwnEntry::AsWritten {
                    self.confirm();
                }
            }
            // Restoring it will extend it, and not sooner than is good.
            Some(_) if self.own_entry != OwnEntry::AsWritten && self.ends_in_the_store() => {}
            // Written with another lease, of unknown age: renewing shows it.
            Some(_) => self.renew_at = Some(self.renewal_of_foreign()),
        }
    }

    /// Whether the store shows the end of a lease in the entry, so that it may have moved.
    fn ends_in_the_store(&self) -> bool {
        matches!(self.own.lease.lifetime, Lifetime::Leased { expires_unix: Some(_), .. })
    }

    /// By the boot clock, or by the wall clock where that decides.
    pub(super) fn own_expired(&self) -> bool {
        self.own.expires.is_some_and(|expires| expires <= self.now.boot)
            || self.own_ended_by_wall_clock()
    }

    /// When the lease ends, in seconds since 1970; `None` for a reservation.
    pub(super) fn ends_unix(&self) -> Option<u64> {
        let left = self.own.expires?.saturating_sub(self.now.boot);
        Some(self.now.unix_seconds.saturating_add(left.as_secs()))
    }

    /// All readers of the local store see the entry end when the wall clock is set past its end.
    fn own_ended_by_wall_clock(&self) -> bool {
        let Lifetime::Leased { id: 0, expires_unix } = self.own.lease.lifetime else {
            return false;
        };
        expires_unix.is_some_and(|ends| ends <= self.now.unix_seconds)
    }

    /// Plans to take the lapsed subnet again, if the listing just made shows nobody else on it.
    /// What can't be read may be anybody's, as for a node that starts: its key takes the subnets
    /// that it names, each of its family. The store would refuse that or, with IPv6, give it away.
    pub(super) fn plan_retaking(&mut self) {
        let (own, networks) = (self.own.lease.subnets, self.own.networks);
        let takes = |subnets: Prefixes| {
            subnets.part_of(networks).is_some_and(|subnets| subnets.overlaps(own))
        };
        if let Some(taken) = self.mirror.values().find(|lease| takes(lease.subnets)) {
            let (by, new_owner) = (taken.subnets, taken.attributes.node_address());
            self.give_up(format!("lapsed and {by} belongs to {new_owner}"), Some(new_owner));
            return;
        }
        let unreadable = |key: &&String| Prefixes::from_key(key).is_some_and(takes);
        match self.unreadable.keys().find(unreadable) {
            Some(by) => self.give_up(format!("lapsed and the entry {by} can't be read"), None),
            None => self.own_entry = OwnEntry::Lapsed { free: true },
        }
    }
}
