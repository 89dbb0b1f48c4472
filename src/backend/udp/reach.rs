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

/// A peer in use that has said nothing for so long is asked.
const QUIET: Duration = Duration::from_secs(5);

/// Between two echoes that are not answered, and how many make a peer silent: with [`QUIET`] it
/// takes eight seconds, and three losses in a row.
const ECHO_PAUSE: Duration = Duration::from_secs(1);
const UNANSWERED_MAX: u8 = 3;

/// Between two echoes to a silent peer.
const SILENT_PAUSE: Duration = Duration::from_secs(5);

/// How often the round trip to a peer in use is measured, and after how long for the first time:
/// who was in use for a moment need not be troubled.
const ROUND_TRIP_PAUSE: Duration = Duration::from_secs(30);
const ROUND_TRIP_FIRST: Duration = Duration::from_secs(5);

/// An answer that takes longer is no measure.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Echoes sent at a look: of 100 bytes, so half a megabit. If more are due, the others wait.
const ECHOES_MAX: usize = 64;

/// What was counted of the peer at one tunnel endpoint so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sample {
    /// Its TUN address, which answers; of one with several leases, the first one's.
    pub(super) target: Ipv4Addr,
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
    /// Who is asked first at the next look, so that of too many all get their turns.
    first_asked: Option<SocketAddrV4>,
}

#[derive(Debug)]
struct Seen {
    target: Ipv4Addr,
    sent: u64,
    received: u64,
    /// Since when it has been in use, and when it last was.
    used: Option<(Instant, Instant)>,
    heard: Option<Instant>,
    /// When the last echo was sent, until its answer.
    asked: Option<Instant>,
    unanswered: u8,
    next_echo: Instant,
    round_trip: Option<Duration>,
    next_round_trip: Instant,
}

impl Seen {
    /// One that had so many packets before.
    fn new(target: Ipv4Addr, sent: u64, received: u64, now: Instant) -> Self {
        Self {
            target,
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

    fn is_in_use(&self, now: Instant) -> bool {
        self.used.is_some_and(|(_, last)| now.duration_since(last) < IN_USE)
    }

    /// Whether it ought to have said something by now.
    fn is_quiet(&self, now: Instant) -> bool {
        let since = self.used.map(|(since, _)| since).max(self.heard);
        since.is_some_and(|since| now.duration_since(since) >= QUIET)
    }

    fn note(&mut self, sample: &Sample, now: Instant) {
        self.target = sample.target;
        if sample.sent != self.sent {
            let since = self.used.map(|(since, _)| since).filter(|_| self.is_in_use(now));
            if since.is_none() {
                self.unanswered = 0;
                self.next_round_trip = self.next_round_trip.max(now + ROUND_TRIP_FIRST);
            }
            self.used = Some((since.unwrap_or(now), now));
            self.sent = sample.sent;
        }
        if sample.received != self.received {
            self.received = sample.received;
            self.hear(now);
        }
    }

    fn hear(&mut self, now: Instant) {
        (self.heard, self.unanswered) = (Some(now), 0);
    }

    /// Whether an echo is to be sent now; then it counts as sent.
    fn is_due(&mut self, now: Instant) -> bool {
        if !self.is_in_use(now) || now < self.next_echo {
            return false;
        }
        if self.is_quiet(now) {
            self.unanswered = self.unanswered.saturating_add(1);
        } else if now < self.next_round_trip {
            return false;
        }
        let is_silent = self.unanswered > UNANSWERED_MAX;
        self.next_echo = now + if is_silent { SILENT_PAUSE } else { ECHO_PAUSE };
        self.next_round_trip = now + ROUND_TRIP_PAUSE;
        self.asked = Some(now);
        true
    }

    fn contact(&self, now: Instant) -> Contact {
        let state = if !self.is_in_use(now) {
            ContactState::Idle
        } else if self.unanswered >= UNANSWERED_MAX && now >= self.asked_until() {
            ContactState::Silent
        } else if self.heard.is_some() {
            ContactState::Heard
        } else {
            ContactState::Asked
        };
        let in_use_since = self.used.map(|(since, _)| since);
        Contact { state, heard: self.heard, in_use_since, round_trip: self.round_trip }
    }

    /// Until when an answer to the last echo may still come.
    fn asked_until(&self) -> Instant {
        // Of a silent one, earlier echoes have shown enough.
        match self.asked {
            Some(asked) if self.unanswered == UNANSWERED_MAX => asked + ECHO_PAUSE,
            Some(asked) => asked,
            None => self.next_echo,
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
                Seen::new(sample.target, sent, received, now)
            });
            seen.note(&sample, now);
            self.peers.insert(endpoint, seen);
        }
        self.has_looked = true;
        self.echoes(now)
    }

    fn echoes(&mut self, now: Instant) -> Vec<(SocketAddrV4, Ipv4Addr)> {
        let mut due = Vec::new();
        let first = self.first_asked.take();
        let (mut ahead, mut behind) = (Vec::new(), Vec::new());
        for (endpoint, seen) in &mut self.peers {
            let place = if Some(*endpoint) < first { &mut behind } else { &mut ahead };
            place.push((*endpoint, seen));
        }
        for (endpoint, seen) in ahead.into_iter().chain(behind) {
            if due.len() == ECHOES_MAX {
                self.first_asked = Some(endpoint);
                break;
            }
            if seen.is_due(now) {
                due.push((endpoint, seen.target));
            }
        }
        due
    }

    /// An echo came back from this TUN address.
    pub(super) fn answered(&mut self, target: Ipv4Addr, now: Instant) {
        let Some(seen) = self.peers.values_mut().find(|seen| seen.target == target) else { return };
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
mod tests {
    use super::*;

    const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 8285);
    const TARGET: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);

    /// One peer and a clock of seconds.
    struct Lab {
        reach: Reach,
        start: Instant,
        second: u64,
        sent: u64,
        received: u64,
    }

    impl Lab {
        fn new() -> Self {
            let mut lab = Self {
                reach: Reach::default(),
                start: Instant::now(),
                second: 0,
                sent: 7,
                received: 7,
            };
            assert_eq!(lab.look(), 0, "nobody sends to it");
            lab
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_secs(self.second)
        }

        /// Looks; returns how many echoes are asked for.
        fn look(&mut self) -> usize {
            let (sent, received) = (self.sent, self.received);
            let sample = Sample { target: TARGET, sent, received };
            self.reach.look([(PEER, sample)], self.now()).len()
        }

        /// A second passes in which so much is sent and received.
        fn pass(&mut self, sent: u64, received: u64) -> usize {
            self.second += 1;
            self.sent += sent;
            self.received += received;
            self.look()
        }

        fn state(&self) -> ContactState {
            self.reach.contacts(self.now())[&PEER].state
        }
    }

    #[test]
    fn an_unused_peer_is_left_alone() {
        let mut lab = Lab::new();
        let echoes: usize = (0..60).map(|_| lab.pass(0, 0)).sum();
        assert_eq!((echoes, lab.state()), (0, ContactState::Idle));
    }

    #[test]
    fn one_that_answers_is_asked_for_its_round_trip_only() {
        let mut lab = Lab::new();
        let echoes: usize = (0..60)
            .map(|_| {
                let echoes = lab.pass(1, 1);
                if echoes > 0 {
                    let now = lab.now() + Duration::from_millis(3);
                    lab.reach.answered(TARGET, now);
                }
                echoes
            })
            .sum();
        assert_eq!((echoes, lab.state()), (2, ContactState::Heard));
        let contact = lab.reach.contacts(lab.now())[&PEER];
        assert_eq!(contact.round_trip, Some(Duration::from_millis(3)));
    }

    #[test]
    fn one_that_was_heard_and_is_not_any_more_is_silent() {
        let mut lab = Lab::new();
        lab.pass(1, 1);
        let quiet_from = lab.second;
        while lab.state() != ContactState::Silent {
            lab.pass(1, 0);
            assert!(lab.second < 20, "a dead peer is not noticed");
        }
        assert_eq!(lab.second - quiet_from, 8);
        let contact = lab.reach.contacts(lab.now())[&PEER];
        assert_eq!(contact.heard, Some(lab.start + Duration::from_secs(quiet_from)));
        // It stays so, for fewer echoes, until one comes back.
        let echoes: usize = (0..50).map(|_| lab.pass(1, 0)).sum();
        assert_eq!((echoes, lab.state()), (10, ContactState::Silent));
        lab.reach.answered(TARGET, lab.now());
        assert_eq!(lab.state(), ContactState::Heard);
    }

    #[test]
    fn one_way_traffic_to_a_live_peer_is_no_alarm() {
        let mut lab = Lab::new();
        for _ in 0..120 {
            if lab.pass(100, 0) > 0 {
                lab.reach.answered(TARGET, lab.now());
            }
            assert_ne!(lab.state(), ContactState::Silent);
        }
        assert_eq!(lab.state(), ContactState::Heard);
    }

    #[test]
    fn one_that_was_never_heard_is_silent_once_used() {
        let mut lab = Lab::new();
        let states: Vec<_> = (0..12)
            .map(|_| {
                lab.pass(1, 0);
                lab.state()
            })
            .collect();
        assert_eq!(states[0], ContactState::Asked);
        assert_eq!(states[11], ContactState::Silent);
        assert_eq!(lab.reach.contacts(lab.now())[&PEER].heard, None);
        // Unused, it troubles nobody; used again, it gets its chance.
        (0..10).for_each(|_| _ = lab.pass(0, 0));
        assert_eq!(lab.state(), ContactState::Idle);
        lab.pass(1, 0);
        assert_eq!(lab.state(), ContactState::Asked);
    }

    #[test]
    fn many_silent_peers_take_turns() {
        let mut reach = Reach::default();
        let start = Instant::now();
        let samples = |sent| {
            (0..1000).map(move |number| {
                let endpoint = SocketAddrV4::new(Ipv4Addr::from_bits(0xC000_0200 + number), 8285);
                let target = Ipv4Addr::from_bits(0x0A05_0000 + number * 256);
                (endpoint, Sample { target, sent, received: 0 })
            })
        };
        let mut asked = std::collections::BTreeSet::new();
        for second in 0..30 {
            let echoes = reach.look(samples(second), start + Duration::from_secs(second));
            assert!(echoes.len() <= ECHOES_MAX);
            asked.extend(echoes);
        }
        assert_eq!(asked.len(), 1000, "some were never asked");
    }

    #[test]
    fn peers_that_left_are_forgotten() {
        let mut lab = Lab::new();
        lab.pass(1, 1);
        lab.reach.look([], lab.now());
        assert!(lab.reach.contacts(lab.now()).is_empty());
    }
}
