//! Detects another writer of the own entry with this node's PublicIP. A flannel node with the same
//! address writes at its start and at each renewal; it claims no address, so nothing else shows
//! that it is there. Pure.

use std::time::Duration;

use tracing::Level;

use super::state::Asked;
use super::{Command, Machine};
use crate::control::error::{StoreResult, field_of, flag_of};
use crate::control::lease::{Lease, Lifetime};
use crate::control::snapshot::Granted;

/// Between two alarms. flannel renews a lease every 23 hours, so each of its renewals is one.
const ALARM_PERIOD: Duration = Duration::from_secs(60 * 60);
/// Between two renewals that answer such a write: a writer in a loop must not set our pace.
const RENEWAL_PAUSE: Duration = Duration::from_secs(2);

impl Machine {
    /// The own entry is `found`, and its version not the one that we know.
    pub(super) fn suspect_twin(&mut self, found: &Lease) {
        let in_our_name = found.attributes.is_of_node_of(&self.own.lease.attributes);
        // A reservation is an operator's, and what is from the cache may be older than our own
        // last write.
        let is_reservation = found.lifetime == Lifetime::Reservation;
        if !in_our_name || is_reservation || self.from_cache {
            return;
        }
        match self.asked {
            _ if std::mem::take(&mut self.twin.unsure) => {}
            Asked::Write { .. } => self.twin.suspect = true,
            Asked::Nothing | Asked::List { .. } | Asked::Watch => self.report_twin(),
        }
    }

    /// The `answer` to a write shows whether the changes seen meanwhile, the last at revision
    /// `own_seen`, were that write.
    pub(super) fn resolve_suspect(&mut self, answer: &StoreResult<Granted>, own_seen: Option<i64>) {
        let suspect = std::mem::take(&mut self.twin.suspect);
        let was_ours = match answer {
            Ok(granted) => own_seen.is_none_or(|seen| seen == granted.lease.revision),
            Err(error) => !error.nothing_was_written(),
        };
        // What was seen of a write without an answer is known by now.
        self.twin.unsure = !suspect && answer.is_err() && (was_ours || self.twin.unsure);
        if suspect && !was_ours {
            self.report_twin();
        }
    }

    /// When the lease that somebody else wrote is to be renewed: now, the first time.
    pub(super) fn renewal_of_foreign(&mut self) -> Duration {
        let now = self.now.boot;
        if self.twin.renewal_from > now {
            return self.twin.renewal_from;
        }
        self.twin.renewal_from = now + RENEWAL_PAUSE;
        now
    }

    fn report_twin(&mut self) {
        let Lease { subnets: subnet, attributes, .. } = &self.own.lease;
        let address = attributes.node_address();
        let alarm = self.twin.quiet_until <= self.now.boot;
        if alarm {
            self.twin.quiet_until = self.now.boot + ALARM_PERIOD;
        }
        self.commands.push(Command::CountForeignWrite);
        let text = format!(
            "ALARM: somebody else wrote the lease of {subnet} with our {} {address}. If that was \
             no operator, another node, such as one that runs flanneld, has the same address, and \
             both give their pods addresses of one subnet: give one of them another address with \
             {} or --iface, and restart it. Keeping the lease, and putting our own value back",
            field_of(address),
            flag_of(address)
        );
        // Counted always, and shown once in a while.
        let level = if alarm { Level::WARN } else { Level::DEBUG };
        self.commands.push(Command::Log(level, text));
    }
}
