//! Which peers in use can be heard: a state machine over counts, echoes and the caller's clock,
//! without I/O.
//!
//! A peer from which packets come is heard. One that is sent packets and says nothing is asked for
//! an echo, which any kernel answers: flanneld's host as well. If no echo comes back either, it is
//! silent, and somebody has to look. Peers that nobody sends to are left alone.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use crate::backend::status::{Contact, ContactState};

/// Between two looks at the counts.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// How long a peer counts as in use after the last packet to it: beyond the pauses between the
/// first tries of a TCP connection.
const IN_USE: Duration = Duration::from_secs(10);

/// The same of a peer that has not answered: who is sent a packet now and then, such as a health
/// check, shall not look well in between.
const IN_QUESTION: Duration = Duration::from_secs(60);

/// A peer in use that has said nothing for so long is asked.
const QUIET: Duration = Duration::from_secs(5);

/// Between two echoes that are not answered, and how many make a peer silent, or as many as it has
/// leases: with [`QUIET`] it takes eight seconds, and three losses in a row.
const ECHO_PAUSE: Duration = Duration::from_secs(1);
const UNANSWERED_MAX: usize = 3;

/// What was heard for so long counts as of now: until a quiet peer has had its chance to answer.
const LATELY: Duration = Duration::from_secs(9);

/// Between two echoes to a silent peer.
const SILENT_PAUSE: Duration = Duration::from_secs(5);

/// How often the round trip to a peer in use is measured, and after how long for the first time:
/// who was in use for a moment need not be troubled.
const ROUND_TRIP_PAUSE: Duration = Duration::from_secs(30);
const ROUND_TRIP_FIRST: Duration = Duration::from_secs(5);

/// An answer that takes longer is no measure.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Echoes sent at a look: of 84 bytes, so a fifth of a megabit. If more are due, the others wait.
const ECHOES_MAX: usize = 256;

/// What was counted of the peer at one tunnel endpoint so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sample {
    /// Its TUN addresses, one of each lease, of which those answer that are not stale.
    pub(super) targets: Vec<Ipv4Addr>,
    /// Packets sent to it.
    pub(super) sent: u64,
    /// Packets received from it.
    pub(super) received: u64,
}

/// All peers.
#[derive(Debug, Default)]
pub(super) struct Reach {
    peers: BTreeMap<SocketAddrV4, Seen>,
    has_looked: bool,
}

/// Who is asked first if not all can be: one answer more decides about the first ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    InQuestion,
    Quiet,
    Silent,
    RoundTrip,
}

#[derive(Debug)]
struct Seen {
    targets: Vec<Ipv4Addr>,
    sent: u64,
    received: u64,
    /// Since when it has been in use, and when it last was.
    used: Option<(Instant, Instant)>,
    heard: Option<Instant>,
    /// When the last echo was sent, until its answer.
    asked: Option<Instant>,
    /// Echoes since it was heard.
    unanswered: usize,
    next_echo: Instant,
    round_trip: Option<Duration>,
    next_round_trip: Instant,
}

impl Seen {
    /// One that had so many packets before.
    fn new(sent: u64, received: u64, now: Instant) -> Self {
        Self {
            targets: Vec::new(),
            sent,
            received,
            used: None,
            heard: None,
            asked: None,
            unanswered: 0,
            next_echo: now,
            round_trip: None,
            next_round_trip: now,
        }
    }

    fn unanswered_max(&self) -> usize {
        UNANSWERED_MAX.max(self.targets.len())
    }

    fn is_in_use(&self, now: Instant) -> bool {
        let long = if self.unanswered > 0 { IN_QUESTION } else { IN_USE };
        self.used.is_some_and(|(_, last)| now.duration_since(last) < long)
    }

    /// Whether it ought to have said something by now.
    fn is_quiet(&self, now: Instant) -> bool {
        let since = self.used.map(|(since, _)| since).max(self.heard);
        self.unanswered > 0 || since.is_some_and(|since| now.duration_since(since) >= QUIET)
    }

    fn note(&mut self, sample: Sample, now: Instant) {
        self.targets = sample.targets;
        if sample.sent != self.sent {
            self.sent = sample.sent;
            let since = self.used.map(|(since, _)| since).filter(|_| self.is_in_use(now));
            if since.is_none() {
                // One that was silent long ago gets one more chance.
                self.unanswered = self.unanswered.min(self.unanswered_max() - 1);
                self.next_echo = now;
                self.next_round_trip = self.next_round_trip.max(now + ROUND_TRIP_FIRST);
            }
            self.used = Some((since.unwrap_or(now), now));
        }
        if sample.received != self.received {
            self.received = sample.received;
            self.hear(now);
        }
    }

    fn hear(&mut self, now: Instant) {
        (self.heard, self.unanswered) = (Some(now), 0);
    }

    /// Whether an echo is to be sent now.
    fn urgency(&self, now: Instant) -> Option<Urgency> {
        if !self.is_in_use(now) || now < self.next_echo {
            return None;
        }
        match self.unanswered {
            0 if self.is_quiet(now) => Some(Urgency::Quiet),
            0 => (now >= self.next_round_trip).then_some(Urgency::RoundTrip),
            unanswered if unanswered <= self.unanswered_max() => Some(Urgency::InQuestion),
            _ => Some(Urgency::Silent),
        }
    }

    /// Sends an echo now; gives the address to ask, of several leases one after the other.
    fn ask(&mut self, now: Instant) -> Option<Ipv4Addr> {
        let target = self.targets.get(self.unanswered % self.targets.len().max(1)).copied();
        if self.is_quiet(now) {
            self.unanswered += 1;
        }
        let is_silent = self.unanswered > self.unanswered_max();
        self.next_echo = now + if is_silent { SILENT_PAUSE } else { ECHO_PAUSE };
        self.next_round_trip = now + ROUND_TRIP_PAUSE;
        self.asked = Some(now);
        target
    }

    fn contact(&self, now: Instant) -> Contact {
        let state = if !self.is_in_use(now) {
            ContactState::Idle
        } else if self.is_silent(now) {
            ContactState::Silent
        } else if self.heard.is_some_and(|heard| now.duration_since(heard) < LATELY) {
            ContactState::Heard
        } else {
            ContactState::Asked
        };
        let in_use_since = self.used.map(|(since, _)| since);
        Contact { state, heard: self.heard, in_use_since, round_trip: self.round_trip }
    }

    /// Whether it has left enough echoes unanswered; to the last of them an answer may still come.
    fn is_silent(&self, now: Instant) -> bool {
        let may_answer = self.asked.is_some_and(|asked| now.duration_since(asked) < ECHO_PAUSE);
        match self.unanswered.cmp(&self.unanswered_max()) {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Equal => !may_answer,
            std::cmp::Ordering::Greater => true,
        }
    }
}

impl Reach {
    /// Takes in what was counted of every peer that ever had a packet, forgets all others, and
    /// gives the TUN addresses to ask for an echo.
    pub(super) fn look(
        &mut self,
        samples: impl IntoIterator<Item = (SocketAddrV4, Sample)>,
        now: Instant,
    ) -> Vec<(SocketAddrV4, Ipv4Addr)> {
        let mut before = std::mem::take(&mut self.peers);
        for (endpoint, sample) in samples {
            let mut seen = before.remove(&endpoint).unwrap_or_else(|| {
                // What an earlier weftd counted is no news.
                let (sent, received) =
                    if self.has_looked { (0, 0) } else { (sample.sent, sample.received) };
                Seen::new(sent, received, now)
            });
            seen.note(sample, now);
            self.peers.insert(endpoint, seen);
        }
        self.has_looked = true;
        self.echoes(now)
    }

    fn echoes(&mut self, now: Instant) -> Vec<(SocketAddrV4, Ipv4Addr)> {
        let mut due: Vec<_> = self
            .peers
            .iter_mut()
            .filter_map(|(endpoint, seen)| Some((seen.urgency(now)?, *endpoint, seen)))
            .collect();
        // Of equally urgent ones, who has waited longest.
        due.sort_by_key(|(urgency, _, seen)| (*urgency, seen.next_echo));
        let asked = due.into_iter().take(ECHOES_MAX);
        asked.filter_map(|(_, endpoint, seen)| Some((endpoint, seen.ask(now)?))).collect()
    }

    /// An echo came back from this TUN address.
    pub(super) fn answered(&mut self, target: Ipv4Addr, now: Instant) {
        let is_its = |seen: &&mut Seen| seen.targets.contains(&target);
        let Some(seen) = self.peers.values_mut().find(is_its) else { return };
        seen.hear(now);
        if let Some(asked) = seen.asked.take() {
            let took = now.duration_since(asked);
            seen.round_trip = Some(took).filter(|took| *took <= ANSWER_MAX).or(seen.round_trip);
        }
    }

    /// Whether an answer may come any moment, from which the round trip is measured.
    pub(super) fn is_waiting(&self, now: Instant) -> bool {
        let waits = |seen: &Seen| seen.asked.is_some_and(|at| now.duration_since(at) < ANSWER_MAX);
        self.peers.values().any(waits)
    }

    /// What is known of each peer.
    pub(super) fn contacts(&self, now: Instant) -> BTreeMap<SocketAddrV4, Contact> {
        self.peers.iter().map(|(endpoint, seen)| (*endpoint, seen.contact(now))).collect()
    }
}

#[cfg(test)]
mod tests;
