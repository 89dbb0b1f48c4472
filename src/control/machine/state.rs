//! Parts of the lease machine's state: the own entry, how the store is followed, the request in
//! flight. Pure types.

use std::time::Duration;

use crate::control::error::StoreError;

/// First and longest pause before the own entry is restored. It grows for the whole run: two
/// daemons that claim one address must not fight at the speed of the store.
pub(super) const REWRITE_PAUSE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(300));
/// Between the end of one outage and the report of the next: a store that comes and goes must
/// not fill the log.
pub(super) const REPORT_PAUSE: Duration = Duration::from_secs(5);
/// Between two reports of one failure that lasts, after the first.
pub(super) const REPORT_PERIOD: Duration = Duration::from_secs(60);
/// How long a store must refuse for that to be news within an outage: a Kubernetes API that starts
/// forbids everything until it has read its roles, a second or two.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// Stands for the revision of an entry that a snapshot does not have.
pub(super) const ABSENT: i64 = i64::MIN;

/// The state of the own entry, as far as we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OwnEntry {
    /// As we wrote it.
    AsWritten,
    /// Ours, but with other attributes than this node's: restored at `at`.
    Rewritten { at: Duration },
    /// Unparsable: overwritten if its revision is still `repair`.
    Unreadable { repair: Option<i64> },
    /// Gone while we were not watching: taken again once a listing shows that it is `free`.
    Lapsed { free: bool },
    /// Not ours any more; the run ends.
    Lost,
}

impl OwnEntry {
    /// Whether it is there and shows that it is this node's.
    pub(super) fn is_ours(self) -> bool {
        matches!(self, Self::AsWritten | Self::Rewritten { .. })
    }

    /// When the entry has to be written, apart from renewals.
    pub(super) fn due(self) -> Option<Duration> {
        if let Self::Rewritten { at } = self { Some(at) } else { None }
    }
}

/// How the store is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    /// Until `at`; then it is listed, if the mirror may have missed something, and watched.
    Waiting { at: Duration },
    /// Listed, to be watched from there on.
    Listing,
    /// A watch is being opened.
    Opening,
    /// Changes are brought.
    Watching { live_since: Option<Duration> },
}

/// The store does not answer.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) since: Duration,
    pub(super) reported: bool,
    /// Since when the store answers, and refuses.
    refused_since: Option<Duration>,
    /// Whether that was logged.
    pub(super) refusal_logged: bool,
}

impl Outage {
    pub(super) fn new(now: Duration) -> Self {
        Self { since: now, reported: false, refused_since: None, refusal_logged: false }
    }

    /// Whether the store answers for a while now, and refuses. That is worth a line of its own:
    /// unlike a store that is away, it does not heal by itself.
    pub(super) fn refuses(&mut self, error: &StoreError, now: Duration) -> bool {
        let is_refused = matches!(error, StoreError::Refused { .. });
        self.refused_since = is_refused.then(|| self.refused_since.unwrap_or(now));
        self.refused_since.is_some_and(|since| now - since >= REFUSED_FOR)
    }
}

/// The request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Nothing,
    List { at: Duration },
    Watch,
    Write { what: Write, over: i64, own_seen: Option<i64> },
}

/// Why the own entry is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::control) enum Write {
    /// To extend the lease; the entry need not change for that.
    Renew,
    /// Somebody rewrote it, or the node has another address.
    Restore,
    /// It cannot be read.
    Repair,
    /// It is gone, as by the last listing, in which nobody has the subnets.
    Retake,
}

/// What is known of other writers of the own entry.
#[derive(Debug, Default)]
pub(super) struct Twin {
    /// The next change may be ours all the same: a write got no answer, or the store came back
    /// with another history.
    pub(super) unsure: bool,
    /// A change came while a write of ours is under way, and may be that write.
    pub(super) suspect: bool,
    pub(super) quiet_until: Duration,
    pub(super) renewal_from: Duration,
}
