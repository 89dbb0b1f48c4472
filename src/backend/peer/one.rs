//! How one peer is.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use super::evidence::{Ask, Evidence, Reached, Sample, TICK, Use};
use super::state::{Obstacle, PeerState, Way};
use crate::packet::echo::Reason;
use crate::route::{IpAddress, Prefix, Prefixes};

/// How long a peer counts as in use after the last packet to it: beyond the pauses between the
/// first tries of a TCP connection.
pub(super) const IN_USE: Duration = Duration::from_secs(10);

/// The same of a peer that does not answer: who is sent a packet now and then, such as a health
/// check, shall not look well in between. Also where the kernel tells of use at times only: it asks
/// for a neighbour again after 45 seconds at most.
pub(super) const IN_QUESTION: Duration = Duration::from_secs(60);

/// Between two echoes to a peer that answers; up to a tenth less, so that they spread.
const STEADY: Duration = Duration::from_secs(5);

/// And between two echoes to any of them: 700 a second, half a megabit. More than 3,500 peers in
/// use are each asked a little less often.
const SPACING: Duration = Duration::from_micros(1430);

/// How long an answer is waited for: beyond a path by satellite. A later one still counts.
const ANSWER: Duration = Duration::from_secs(1);

/// Between two echoes to a peer of which one is missing, and how many in a row make it certain:
/// with [`STEADY`], [`ANSWER`] and the ticks between them it takes 8.6 seconds from the fault. Of a
/// path that loses three in ten packets both ways, five are lost in a row one time in 28.
const QUICK: Duration = Duration::from_millis(400);
const MISSED_MAX: u32 = 5;

/// The same of a lossy path, so that it does not look dead in between.
const MISSED_MAX_LOSSY: u32 = 10;

/// Of several leases all but one may be stale, so as many as there are must have been asked. Of
/// more than these no more: with three echoes beyond [`MISSED_MAX`], a dead host is known in ten
/// seconds, however many it has.
const MISSED_MAX_LEASES: usize = 8;

/// So many answers in a row end the loss that was before: with an echo each tick, in four seconds.
/// Of a path that loses one in ten, so many pass one time in eight; of one that loses three, one
/// time in 1,250.
const WELL_AFTER: u32 = 20;

/// Fewer echoes tell nothing of loss, and fewer lost ones of them are no loss to speak of: from a
/// tenth on TCP gets hardly anywhere.
const LOSS_OF: u32 = 8;
const LOST_MIN: u32 = 2;
const LOSS_PERCENT_MIN: u32 = 10;

/// Between two echoes to a peer that does not answer: repaired, it is `ok` within five seconds.
const PATIENT: Duration = Duration::from_secs(4);

/// How long a peer that never answered is given after its lease came: to write that, to make its
/// device, and to hear of ours.
const GRACE: Duration = Duration::from_secs(15);

/// What was counted so soon after the first echo that is missed may have been on its way: a look
/// late, and an answer.
const LATE: Duration = Duration::from_secs(2);

/// How long evidence stands: what it takes to ask for it again, and half of it.
const EVIDENCE: Duration = Duration::from_secs(12);

/// How long packets of our own may be on their way to where the kernel notes them as use, and how
/// coarse its clock is.
const OWN_USE: Duration = Duration::from_millis(50);

/// How long after the kernel has answered a peer's echo the daemon knows that it was asked.
const OWN_ANSWER: Duration = Duration::from_millis(500);

/// Packets of our own may hide that others are sent, most of all while both sides ask several times
/// a second. So they count as use for so long after one that was certainly none of them; a peer
/// that is used at all shows one sooner.
const HIDDEN_MAX: Duration = Duration::from_secs(300);

/// Of so many echoes the times are kept, and of so many whether they were answered.
const TIMES: usize = 8;
const HISTORY: u16 = u64::BITS as u16;

/// Of so many echoes to a peer in question one has its host asked as well, outside of the tunnel.
const HOST_EVERY: u32 = 2;

/// What is known of one peer.
#[derive(Debug, Default)]
pub(super) struct Peer {
    pub(super) leases: Vec<Reached>,
    /// Since when it has been one.
    since: Option<Instant>,
    /// Which of them is asked.
    at: usize,
    sent: Option<u64>,
    received: Option<u64>,
    /// When the kernel sent to it last, and when it last sent what was certainly not our own.
    used_at: Option<Instant>,
    others_at: Option<Instant>,
    /// Whether it is not in use as far as is known, and the last look may have missed that it is.
    pub(super) is_in_doubt: bool,
    /// Packets of our own since the last look, and when the last one went.
    own_sent: u64,
    own_sent_at: Option<Instant>,
    /// Since when it has been in use, and when it last was.
    pub(super) used: Option<(Instant, Instant)>,
    pub(super) noted: Noted,
    refused: Option<(Instant, IpAddr, u8)>,
    unsendable: Option<(Instant, Obstacle)>,
    /// When this host last refused to send an echo, and which ones it refused: bit 0 is the last.
    unasked: Option<Instant>,
    forbidden: u64,
    /// Echoes since one was answered, and when the first of these was sent.
    pub(super) unanswered: u32,
    unanswered_since: Option<Instant>,
    /// Whether it answers again, and what is known of it began with that.
    is_back: bool,
    /// The number of the last echo; those before it, which of them were answered, and which by an
    /// echo: bit 0 is the last.
    sequence: u16,
    asked: u64,
    answers: u64,
    echoes: u64,
    times: [Option<Instant>; TIMES],
    pub(super) steady: Duration,
    pub(super) round_trip: Option<Duration>,
}

/// When each of these was last known.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Noted {
    pub(super) answered: Option<Instant>,
    echoed: Option<Instant>,
    host_answered: Option<Instant>,
    asked_us: Option<Instant>,
    pub(super) heard: Option<Instant>,
    acknowledged: Option<Instant>,
    passed: Option<Instant>,
    arrived: Option<Instant>,
    overheard: Option<Instant>,
    /// And whether that is in the lease of another.
    foreign: Option<(Instant, IpAddr, bool)>,
}

/// Who is asked first if not all can be: one answer more decides about the first ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    InQuestion(Reverse<u32>),
    Steady,
    Known,
}

/// An address behind a peer, to which an echo expires there: of a pod perhaps, whom it never
/// reaches.
pub(super) fn beyond(subnet: Prefixes) -> IpAddr {
    fn last_even<A: IpAddress>(subnet: Prefix<A>) -> IpAddr {
        A::of_bits(subnet.last().bits() & A::mask(A::BITS - 1)).into()
    }
    match subnet.v4() {
        Some(subnet) => last_even(subnet),
        None => subnet.v6().map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), last_even),
    }
}

impl Peer {
    pub(super) fn note(&mut self, sample: Sample, in_use: Duration, now: Instant) {
        self.since.get_or_insert(now);
        let own = std::mem::take(&mut self.own_sent);
        let used = match sample.used {
            Use::Sent(sent) => {
                // What was counted before this daemon looked is no news.
                let news = sent.saturating_sub(self.sent.replace(sent).unwrap_or(sent));
                (news > own).then_some(now)
            }
            Use::At(at) => {
                let known = std::mem::replace(&mut self.used_at, at);
                let is_news = |at: &Instant| known.is_none_or(|known| *at > known + OWN_USE);
                let news = at.filter(is_news);
                let others = news.filter(|at| !self.is_own_use(*at));
                self.is_in_doubt = news != others && !self.is_in_use(in_use, now);
                self.others_at = others.or(self.others_at);
                news.filter(|at| self.others_at.is_some_and(|others| *at < others + HIDDEN_MAX))
            }
        };
        if let Some(at) = used {
            self.use_at(at, in_use, now);
        }
        let received = self.received.replace(sample.received).unwrap_or(sample.received);
        if received != sample.received {
            self.noted.heard = Some(now);
        }
    }

    /// Whether what the kernel sent at this time may have been our own echo, or its answer to the
    /// peer's.
    fn is_own_use(&self, at: Instant) -> bool {
        let is_own = self.own_sent_at.is_some_and(|own| own <= at + OWN_USE && at <= own + OWN_USE);
        let answer = self.noted.asked_us;
        is_own || answer.is_some_and(|asked| asked <= at + OWN_ANSWER && at <= asked + OWN_USE)
    }

    fn use_at(&mut self, at: Instant, in_use: Duration, now: Instant) {
        if !self.is_in_use(in_use, now) {
            // Long ago it may have been anything.
            (self.used, self.unanswered, self.unanswered_since) = (None, 0, None);
            (self.asked, self.answers, self.echoes, self.times) = (0, 0, 0, [None; TIMES]);
            self.is_back = false;
        }
        self.used = Some((self.used.map_or(at, |(since, _)| since), at));
    }

    pub(super) fn is_in_use(&self, in_use: Duration, now: Instant) -> bool {
        let long = if self.unanswered > 0 { IN_QUESTION.max(in_use) } else { in_use };
        self.used.is_some_and(|(_, last)| now.duration_since(last) < long)
    }

    pub(super) fn last_asked(&self) -> Option<Instant> {
        self.times[usize::from(self.sequence) % TIMES]
    }

    /// The last echoes to which an answer may still come, as many bits.
    fn on_their_way(&self, now: Instant) -> u64 {
        let sent = |age: &u16| self.times[usize::from(self.sequence.wrapping_sub(*age)) % TIMES];
        let recent = (0..TIMES as u16)
            .take_while(|age| sent(age).is_some_and(|at| now.duration_since(at) < ANSWER));
        (1 << recent.count()) - 1
    }

    /// Whether it answers again, and has to show that it does not lose most.
    fn is_on_trial(&self) -> bool {
        self.is_back && self.asked.count_ones() < LOSS_OF
    }

    /// How many echoes in a row were not answered until now.
    pub(super) fn missed(&self, now: Instant) -> u32 {
        if self.unanswered == 0 {
            return 0;
        }
        let since_answer = (1_u64 << self.answers.trailing_zeros().min(63)) - 1;
        (self.asked & since_answer & !self.on_their_way(now)).count_ones()
    }

    /// How many echoes were lost of late, and of how many.
    pub(super) fn lost(&self, now: Instant) -> (u32, u32) {
        if self.asked == self.answers {
            return (0, self.asked.count_ones());
        }
        // What this host did not let out was not lost on the way.
        let sent = self.answers | !(self.on_their_way(now) | self.forbidden);
        let over = self.asked & sent;
        ((over & !self.answers).count_ones(), over.count_ones())
    }

    fn loss_percent(&self, now: Instant) -> Option<u8> {
        let (lost, of) = self.lost(now);
        let percent = (lost * 100).checked_div(of)?;
        let is_enough = of >= LOSS_OF || self.is_on_trial();
        let is_loss = is_enough && lost >= LOST_MIN && percent >= LOSS_PERCENT_MIN;
        is_loss.then_some(percent as u8)
    }

    /// Whether it has left enough echoes unanswered.
    fn is_gone(&self, now: Instant) -> bool {
        let before = self.answers.trailing_zeros();
        let lost = self.asked & !(self.answers | self.forbidden);
        let lost_before = lost.checked_shr(before).unwrap_or(0);
        let was_lossy = lost_before.count_ones() >= LOST_MIN;
        let missed_max = if was_lossy { MISSED_MAX_LOSSY } else { MISSED_MAX };
        self.missed(now) >= missed_max.max(self.leases.len().min(MISSED_MAX_LEASES) as u32)
    }

    /// Whether its host said of late that nobody is at the port.
    pub(super) fn has_no_daemon(&self, host: IpAddr, now: Instant) -> bool {
        self.refused.is_some_and(|(at, by, code)| {
            by == host
                && Reason::of(by, code) == Reason::NoPort
                && now.duration_since(at) < EVIDENCE
        })
    }

    /// Until when no echo is to be sent, whatever comes; `None` unless all were answered.
    pub(super) fn quiet_until(&self) -> Option<Instant> {
        let is_well = self.unanswered == 0 && self.asked == self.answers && !self.is_on_trial();
        self.last_asked().filter(|_| is_well).map(|at| at + self.steady)
    }

    /// Whether an echo is to be sent now.
    pub(super) fn urgency(&self, in_use: Duration, now: Instant) -> Option<Urgency> {
        let since_asked = self.last_asked().map(|at| now.duration_since(at));
        if !self.is_in_use(in_use, now) {
            return None;
        }
        let missed = self.missed(now);
        let (urgency, pause) = if self.is_gone(now) {
            (Urgency::Known, PATIENT)
        } else if missed > 0 {
            (Urgency::InQuestion(Reverse(missed)), QUICK)
        } else if self.lost(now).0 > 0 || self.is_on_trial() {
            (Urgency::Known, TICK)
        } else {
            (Urgency::Steady, self.steady)
        };
        since_asked.is_none_or(|since| since >= pause).then_some(urgency)
    }

    /// Sends an echo now, to one lease after the other until one answers. So many peers are in use.
    pub(super) fn ask(
        &mut self,
        host: IpAddr,
        in_use: u32,
        random: &mut fastrand::Rng,
        now: Instant,
    ) -> Option<Ask> {
        if self.unanswered > 0 {
            self.at += 1;
        }
        self.at %= self.leases.len().max(1);
        let Reached { subnet, target, .. } = *self.leases.get(self.at)?;
        self.sequence = self.sequence.wrapping_add(1);
        self.times[usize::from(self.sequence) % TIMES] = Some(now);
        (self.asked, self.answers) = (self.asked << 1 | 1, self.answers << 1);
        (self.echoes, self.forbidden) = (self.echoes << 1, self.forbidden << 1);
        self.steady = STEADY.max(SPACING * in_use) * random.u32(230..=256) / 256;
        let is_in_question = self.missed(now) > 0;
        let ask = Ask {
            host,
            target,
            beyond: (is_in_question || self.is_deaf()).then(|| beyond(subnet)),
            asks_host: is_in_question && self.unanswered % HOST_EVERY == 1,
            sequence: self.sequence,
        };
        // Packets of our own are no use of the peer.
        self.own_sent += 1 + u64::from(ask.beyond.is_some());
        self.own_sent_at = Some(now);
        self.unanswered += 1;
        self.unanswered_since.get_or_insert(now);
        Some(ask)
    }

    /// Whether its last answer was none to an echo, which an answer to one would have come with.
    fn is_deaf(&self) -> bool {
        let echoed = self.noted.echoed;
        self.noted.answered.is_some_and(|at| echoed.is_none_or(|echoed| at > echoed + ANSWER))
    }

    pub(super) fn take_in(&mut self, evidence: Evidence, now: Instant) {
        match evidence {
            Evidence::Echoed(sequence) => {
                if let Some(age) = self.answered(sequence, self.echoes, now) {
                    self.echoes |= 1 << age;
                    self.noted.echoed = Some(now);
                    let sent = self.times[usize::from(sequence) % TIMES];
                    let took = sent.filter(|_| age < TIMES as u16).map(|at| now.duration_since(at));
                    self.round_trip = took.or(self.round_trip);
                }
            }
            Evidence::Expired(sequence) => {
                // Kernels say so once a second at most: what they leave unsaid is no loss.
                let answers_none = self.noted.echoed.is_none_or(|at| now >= at + LATE);
                if let Some(age) = self.answered(sequence, self.answers, now)
                    && answers_none
                {
                    self.forget_before(age.into());
                }
            }
            Evidence::Returned(sequence) => {
                if let Some(age) = self.answered(sequence, self.echoes, now) {
                    self.echoes |= 1 << age;
                    self.noted.echoed = Some(now);
                    // As above, what a kernel leaves unsaid is no loss.
                    self.forget_before(age.into());
                    self.is_back = false;
                }
            }
            Evidence::Overheard => self.noted.overheard = Some(now),
            Evidence::HostAnswered => self.noted.host_answered = Some(now),
            Evidence::Asked => self.noted.asked_us = Some(now),
            Evidence::Heard => self.noted.heard = Some(now),
            Evidence::Acknowledged => self.noted.acknowledged = Some(now),
            Evidence::Passed => self.noted.passed = Some(now),
            Evidence::Arrived => self.noted.arrived = Some(now),
            Evidence::Foreign(source, is_anothers) => {
                self.noted.foreign = Some((now, source, is_anothers));
            }
            Evidence::Refused { by, code } => self.refused = Some((now, by, code)),
            Evidence::Unsendable(obstacle) => self.unsendable = Some((now, obstacle)),
            Evidence::Unasked => {
                (self.unasked, self.forbidden) = (Some(now), self.forbidden | 1);
                self.own_sent = self.own_sent.saturating_sub(1);
            }
        }
    }

    /// The loss of echoes before the one so many ago is over, or was none.
    fn forget_before(&mut self, age: u32) {
        self.asked &= u64::MAX >> (63 - age);
    }

    /// How many echoes ago it was that was answered; `None` if that is too long, or among those of
    /// which that is `known`.
    fn answered(&mut self, sequence: u16, known: u64, now: Instant) -> Option<u16> {
        let age = self.sequence.wrapping_sub(sequence);
        if age >= HISTORY || (self.asked & !known) >> age & 1 == 0 {
            return None;
        }
        // What other leases of it left unanswered was not lost.
        let is_new = self.is_gone(now) || (self.leases.len() > 1 && self.missed(now) > 0);
        self.answers |= 1 << age;
        // The loss before is over, or it was none.
        let first = self.answers.trailing_zeros();
        let run = (self.answers >> first).trailing_ones();
        self.is_back |= is_new;
        if is_new || run >= WELL_AFTER {
            self.forget_before(first + run - 1);
        }
        (self.noted.answered, self.noted.heard) = (Some(now), Some(now));
        self.unanswered = age.into();
        let next = self.times[usize::from(sequence.wrapping_add(1)) % TIMES];
        self.unanswered_since = if age == 0 { None } else { next.or(Some(now)) };
        Some(age)
    }

    pub(super) fn state(&self, in_use: Duration, now: Instant) -> PeerState {
        if !self.is_in_use(in_use, now) {
            PeerState::Idle
        } else if self.is_gone(now) {
            let wrong = self.what_is_wrong(now);
            let is_certain =
                matches!(wrong, PeerState::Unsendable(_) | PeerState::Deaf | PeerState::Unasked);
            if is_certain || !self.is_new(now) { wrong } else { PeerState::InGrace }
        } else if self.answers == 0 {
            // Not known yet.
            PeerState::Idle
        } else if let Some(percent) = self.loss_percent(now) {
            PeerState::Lossy(percent)
        } else if self.is_deaf() {
            PeerState::Deaf
        } else {
            PeerState::Ok
        }
    }

    /// Whether packets go to it for a while already since the last one came from it: what is asked
    /// for now and then is answered at once.
    fn is_unheard(&self, since: Instant) -> bool {
        let Noted { heard, arrived, passed, .. } = self.noted;
        let last = heard.max(arrived).max(passed).max(Some(since));
        self.used.zip(last).is_some_and(|((_, used), last)| used >= last + IN_USE)
    }

    fn is_new(&self, now: Instant) -> bool {
        let is_young = self.since.is_none_or(|since| now.duration_since(since) < GRACE);
        is_young && self.noted.answered.is_none()
    }

    /// What explains that it does not answer: the nearest to this host first.
    fn what_is_wrong(&self, now: Instant) -> PeerState {
        let since = self.unanswered_since.unwrap_or(now);
        let stands = |at: Instant| at >= since && now.duration_since(at) < EVIDENCE;
        let stands_late =
            |at: Option<Instant>| at.is_some_and(|at| stands(at) && at >= since + LATE);
        let noted = self.noted;
        let foreign = noted.foreign.filter(|(at, ..)| stands_late(Some(*at)));
        let foreign = foreign.map(|(_, source, is_anothers)| (source, is_anothers));
        if let Some((_, obstacle)) = self.unsendable.filter(|(at, _)| stands(*at)) {
            PeerState::Unsendable(obstacle)
        } else if let Some((_, by, code)) = self.refused.filter(|(at, ..)| stands(*at)) {
            PeerState::Refused { by, code }
        } else if stands_late(noted.acknowledged)
            || stands_late(noted.overheard) && stands_late(noted.passed)
        {
            PeerState::Deaf
        } else if self.unasked.is_some_and(stands) {
            if self.is_unheard(since) { PeerState::Unheard } else { PeerState::Unasked }
        } else if let Some((source, true)) = foreign {
            PeerState::OneWay(Way::Foreign(source))
        } else if stands_late(noted.heard) && !stands_late(noted.overheard) {
            PeerState::OneWay(Way::There)
        } else if stands_late(noted.arrived.max(noted.overheard)) {
            PeerState::OneWay(Way::Back)
        } else if let Some((source, _)) = foreign {
            PeerState::OneWay(Way::Foreign(source))
        } else {
            PeerState::Silent { host_answers: noted.host_answered.is_some_and(stands) }
        }
    }
}
