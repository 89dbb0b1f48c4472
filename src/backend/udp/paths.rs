//! Path-MTU discovery for each peer in use (blackhole detection, RFC 8899): a state machine over
//! echoes and the caller's clock, without I/O.
//!
//! A router whose next link is narrower drops what is too long. The ICMP message in which it says
//! so may be filtered, and anybody may forge one, so it counts for nothing. A peer that is being
//! sent long datagrams is asked for an echo as long as its path takes, a few times a second; any
//! kernel answers. One that is missing begins a search: echoes of usual lengths, the longest
//! first. Where short ones come back and long ones don't, loss may have taken the long ones, so
//! the length that passed before is asked for more often than the others. If none comes back, that
//! path is narrow. While it is in use it is searched again, soon and then now and then, until the
//! longest passes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::stats::LONG_BYTES;

/// No path is taken to be narrower: 576 bytes, which each IPv4 host has to take (RFC 791), less
/// IPv4 and UDP headers. Paths of IPv6 take 1,280.
const NARROWEST_BYTES: u16 = USUAL_BYTES[0] - 28;

// Otherwise a path that takes no more would never count as in use, nor be searched again.
const _: () = assert!(LONG_BYTES < NARROWEST_BYTES);

/// Peers that are watched at a time. When more are in use, they take turns.
pub(super) const WATCHED_MAX: usize = 64;

/// How long a peer stays watched after it was last sent a long datagram: beyond the pauses that
/// TCP makes in the promised 3 seconds. Also the shortest turn.
const IN_USE: Duration = Duration::from_secs(5);

/// Pause between two echoes to one peer. With a loss seen after [`ANSWER`] and a search after that,
/// a narrow path is known within 1.4 seconds. TCP, whose retransmissions come some 0.2, 0.6, 1.4
/// and 3 seconds after the first loss, then hears of it at the third and goes on with the fourth.
const WATCH: Duration = Duration::from_millis(400);

/// The fewest milliseconds between two echoes to different peers: 40 a second, half a megabit.
const WATCH_SPACING: Duration = Duration::from_millis(25);

/// How long an answer is waited for: twice what the last one took, within these. A later one still
/// counts for what it shows. The first covers a path across a continent; the second one by
/// satellite with full queues, and bounds how late a peer that fell silent is noticed.
const ANSWER: Duration = Duration::from_millis(250);
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// How often a search sends each length, and how far apart: a burst of loss shall not take all.
const SEARCH_TIMES: u8 = 3;
const SEARCH_SPACING: Duration = Duration::from_millis(60);

/// After these a search sends the length that passed before alone, as far apart. With the echo
/// that was missed, ten of that length in 0.7 seconds: if three in ten long packets are lost, all
/// ten are one time in 170,000.
const SEARCH_MORE_TIMES: u8 = 6;

/// Searches at a time: each sends some dozens of packets.
const SEARCHES_MAX: usize = 4;

/// A narrow path is searched again after this time, to see whether it is wide again; the first time
/// sooner, should a burst of loss have been taken for it.
const HEAL: Duration = Duration::from_secs(30);
const HEAL_FIRST: Duration = Duration::from_secs(5);

/// Links of a network get another MTU one after the other; until they all have it, measurements are
/// useless.
const SETTLE: Duration = Duration::from_secs(1);

/// How long a measured path counts as known while the peer answers nothing: as long as a node may
/// be without weftd while it is exchanged.
const AWAY: Duration = Duration::from_secs(600);

/// Pauses after a search that showed nothing, because the peer answers no echo at all or many are
/// lost.
const SILENT_FIRST: Duration = Duration::from_millis(500);
const SILENT_MAX: Duration = Duration::from_secs(60);

/// What a search tries besides the overlay's own MTU, less what our tunnel takes of it: what links
/// and the usual tunnels carry.
const USUAL_BYTES: [u16; 15] =
    [576, 1006, 1280, 1300, 1350, 1400, 1420, 1450, 1460, 1480, 1492, 1500, 2002, 4352, 8166];

/// Lengths of one search: the usual ones and the longest.
const LENGTHS_MAX: usize = USUAL_BYTES.len() + 1;

/// An echo to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Probe {
    /// The peer's tunnel endpoint.
    pub(super) endpoint: SocketAddr,
    /// Its TUN address, which answers.
    pub(super) target: IpAddr,
    /// Length of the inner packet.
    pub(super) bytes: u16,
}

/// The paths to the peers that are in use, and what is known of the narrow ones.
#[derive(Debug)]
pub(super) struct Paths {
    ceiling_bytes: u16,
    overhead_bytes: u16,
    watched: Vec<Path>,
    /// Kept while the peer is known, in use or not.
    limits: BTreeMap<SocketAddr, Limit>,
    random: fastrand::Rng,
}

/// What a narrow path takes.
#[derive(Debug)]
struct Limit {
    target: IpAddr,
    bytes: u16,
    search_again: Instant,
}

#[derive(Debug)]
struct Path {
    endpoint: SocketAddr,
    target: IpAddr,
    watched_since: Instant,
    used: Instant,
    /// How long an answer is waited for.
    answer: Duration,
    silent: Duration,
    /// Whether no echo of the last search came back.
    is_mute: bool,
    /// Whether another lease of the peer may be asked instead: this one answered nothing, and may
    /// be what an earlier node of this address has left.
    may_retarget: bool,
    /// When the last echo came back.
    answered: Option<Instant>,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// The next echo is due.
    Due(Instant),
    /// One of this length is on its way since then.
    Asked(Instant, u16),
    Search(Search),
}

#[derive(Debug)]
struct Search {
    /// When the echo that was missed was sent, or this began.
    since: Instant,
    next: Instant,
    sent: u8,
    answers: [u8; LENGTHS_MAX],
}

/// What a search has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SearchResult {
    Wide,
    Narrow(u16),
    Lossy,
    Mute,
}

impl Paths {
    /// No path yet; nothing longer than `ceiling_bytes` is ever sent, to which the tunnel adds
    /// `overhead_bytes`. `seed` spreads the echoes of
    /// many hosts.
    pub(super) fn new(ceiling_bytes: u16, overhead_bytes: u16, seed: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        let (watched, limits) = (Vec::new(), BTreeMap::new());
        Self { ceiling_bytes, overhead_bytes, watched, limits, random }
    }

    /// The longest packet that the interface allows has changed: paths are measured again.
    pub(super) fn set_ceiling(&mut self, ceiling_bytes: u16, now: Instant) {
        if self.ceiling_bytes == ceiling_bytes {
            return;
        }
        self.ceiling_bytes = ceiling_bytes;
        self.limits.retain(|_, limit| limit.bytes < ceiling_bytes);
        for limit in self.limits.values_mut() {
            limit.search_again = now + SETTLE;
        }
        for path in &mut self.watched {
            path.phase = Phase::Due(now + SETTLE);
        }
    }

    /// The peers whose paths take less than the interface, and the longest packet of each.
    pub(super) fn limits(&self) -> impl Iterator<Item = (SocketAddr, u16)> {
        self.limits.iter().map(|(endpoint, limit)| (*endpoint, limit.bytes))
    }

    /// The longest packet that goes to `endpoint`, as far as it is known.
    pub(super) fn longest(&self, endpoint: SocketAddr) -> u16 {
        self.limits.get(&endpoint).map_or(self.ceiling_bytes, |limit| limit.bytes)
    }

    /// The peers in use that answer no echo, so that their paths can't be measured.
    pub(super) fn mute(&self) -> impl Iterator<Item = SocketAddr> {
        self.watched.iter().filter(|path| path.is_mute).map(|path| path.endpoint)
    }

    /// Those of them of whose paths nothing is known. One that answered not long ago, or that
    /// `is_away`, is being restarted rather than behind a narrower path.
    pub(super) fn unknown(
        &self,
        is_away: impl Fn(SocketAddr) -> bool,
        now: Instant,
    ) -> impl Iterator<Item = SocketAddr> {
        let unknown = move |path: &&Path| {
            path.is_mute
                && path.answered.is_none_or(|at| now.duration_since(at) > AWAY)
                && !is_away(path.endpoint)
        };
        self.watched.iter().filter(unknown).map(|path| path.endpoint)
    }

    /// Forgets peers unless `is_peer`.
    pub(super) fn retain(&mut self, is_peer: impl Fn(SocketAddr, IpAddr) -> bool) {
        self.watched.retain(|path| is_peer(path.endpoint, path.target));
        self.limits.retain(|endpoint, limit| is_peer(*endpoint, limit.target));
    }

    /// Long datagrams went to this peer.
    pub(super) fn used(&mut self, endpoint: SocketAddr, target: IpAddr, now: Instant) {
        if let Some(path) = self.watched.iter_mut().find(|path| path.endpoint == endpoint) {
            path.used = now;
            if path.may_retarget && path.target != target && matches!(path.phase, Phase::Due(_)) {
                (path.target, path.may_retarget) = (target, false);
            }
            return;
        }
        if self.watched.len() == WATCHED_MAX {
            let turn_over = |path: &Path| {
                matches!(path.phase, Phase::Due(_))
                    && now.duration_since(path.watched_since) >= IN_USE
            };
            let eldest = self.watched.iter().enumerate().filter(|(_, path)| turn_over(path));
            let eldest = eldest.min_by_key(|(_, path)| path.watched_since).map(|(at, _)| at);
            let Some(at) = eldest else { return };
            self.watched.swap_remove(at);
        }
        self.watched.push(Path {
            endpoint,
            target,
            watched_since: now,
            used: now,
            answer: ANSWER,
            silent: SILENT_FIRST,
            is_mute: false,
            may_retarget: false,
            answered: None,
            phase: Phase::Due(now),
        });
    }

    /// An echo of this length came back.
    pub(super) fn answered(&mut self, target: IpAddr, bytes: u16, now: Instant) {
        let watch = self.watch_pause();
        let (ceiling_bytes, lengths) = (self.ceiling_bytes, self.lengths());
        let Some(path) = self.watched.iter_mut().find(|path| path.target == target) else { return };
        (path.is_mute, path.answered) = (false, Some(now));
        match &mut path.phase {
            // It answered too late to be waited for.
            Phase::Due(_) => {}
            Phase::Asked(since, asked_bytes) if bytes >= *asked_bytes => {
                path.silent = SILENT_FIRST;
                path.answer = answer_after(path.answer, now.duration_since(*since));
                path.phase = Phase::Due(*since + watch);
            }
            Phase::Asked(..) => {}
            Phase::Search(search) if bytes == ceiling_bytes => {
                path.answer = answer_after(path.answer, now.duration_since(search.since));
                path.conclude(SearchResult::Wide, now, watch, &mut self.limits);
            }
            Phase::Search(search) => {
                if let Some(at) = lengths.iter().position(|length| *length == bytes) {
                    search.answers[at] = search.answers[at].saturating_add(1);
                }
            }
        }
    }

    /// Gives the echoes that are due.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<Probe> {
        let mut probes = Vec::new();
        self.watched.retain(|path| now.duration_since(path.used) < IN_USE);
        let watch = self.watch_pause();
        let lengths = self.lengths();
        let is_search = |path: &&Path| matches!(path.phase, Phase::Search(_));
        let mut searches = self.watched.iter().filter(is_search).count();
        for path in &mut self.watched {
            let limit = self.limits.get(&path.endpoint);
            if searches < SEARCHES_MAX
                && let Some(since) = path.search_since(limit, now)
            {
                searches += 1;
                let answers = [0; LENGTHS_MAX];
                path.phase = Phase::Search(Search { since, next: now, sent: 0, answers });
            }
            let effective_bytes = limit.map_or(self.ceiling_bytes, |limit| limit.bytes);
            if let Some(found) = path.tick(now, &lengths, effective_bytes, &mut probes) {
                path.conclude(found, now, watch, &mut self.limits);
            }
        }
        probes
    }

    /// The lengths that a search tries, ascending; the longest is the ceiling.
    fn lengths(&self) -> Vec<u16> {
        let usual = USUAL_BYTES.into_iter().map(|bytes| bytes - self.overhead_bytes);
        let usual = usual.filter(|bytes| *bytes < self.ceiling_bytes);
        usual.chain([self.ceiling_bytes]).collect()
    }

    /// When there may be something to do; `None` while nobody is watched.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let due = |path: &Path| {
            let phase = match &path.phase {
                Phase::Due(due) => *due,
                Phase::Asked(since, _) => *since + path.answer,
                Phase::Search(search) => search.next,
            };
            let search_again = self.limits.get(&path.endpoint).map(|limit| limit.search_again);
            std::iter::once(phase).chain(search_again).min()
        };
        self.watched.iter().filter_map(due).min()
    }

    /// The pause between two echoes to one peer: with jitter, longer when there are many.
    fn watch_pause(&mut self) -> Duration {
        let pause = WATCH.max(WATCH_SPACING * self.watched.len() as u32);
        pause * self.random.u32(224..288) / 256
    }
}

impl Path {
    /// If a search is due: when the echo that was missed was sent, else `now`.
    fn search_since(&self, limit: Option<&Limit>, now: Instant) -> Option<Instant> {
        match self.phase {
            Phase::Due(_) => limit.filter(|limit| limit.search_again <= now).map(|_| now),
            Phase::Asked(since, _) => Some(since).filter(|_| now - since >= self.answer),
            Phase::Search(_) => None,
        }
    }

    /// Gives the echoes that are due to this peer, or what a search has found.
    fn tick(
        &mut self,
        now: Instant,
        lengths: &[u16],
        effective_bytes: u16,
        probes: &mut Vec<Probe>,
    ) -> Option<SearchResult> {
        let (endpoint, target, answer) = (self.endpoint, self.target, self.answer);
        let probe = |bytes: &u16| Probe { endpoint, target, bytes: *bytes };
        match &mut self.phase {
            Phase::Due(due) if *due <= now => {
                probes.push(probe(&effective_bytes));
                self.phase = Phase::Asked(now, effective_bytes);
            }
            Phase::Due(_) | Phase::Asked(..) => {}
            Phase::Search(search) if search.next > now => {}
            Phase::Search(search) if search.sent < SEARCH_TIMES + SEARCH_MORE_TIMES => {
                if search.sent < SEARCH_TIMES {
                    probes.extend(lengths.iter().rev().map(probe));
                } else {
                    probes.push(probe(&effective_bytes));
                }
                search.sent += 1;
                let is_last = search.sent == SEARCH_TIMES + SEARCH_MORE_TIMES;
                search.next = now + if is_last { answer } else { SEARCH_SPACING };
            }
            Phase::Search(search) => return Some(classify(lengths, &search.answers)),
        }
        None
    }

    fn conclude(
        &mut self,
        found: SearchResult,
        now: Instant,
        watch: Duration,
        limits: &mut BTreeMap<SocketAddr, Limit>,
    ) {
        let mut pause = watch;
        self.is_mute = found == SearchResult::Mute;
        self.may_retarget = self.is_mute;
        match found {
            SearchResult::Wide => {
                self.silent = SILENT_FIRST;
                limits.remove(&self.endpoint);
            }
            SearchResult::Narrow(bytes) => {
                self.silent = SILENT_FIRST;
                let known = limits.get(&self.endpoint).is_some_and(|known| known.bytes == bytes);
                let search_again = now + if known { HEAL } else { HEAL_FIRST };
                limits.insert(self.endpoint, Limit { target: self.target, bytes, search_again });
            }
            SearchResult::Lossy | SearchResult::Mute => {
                pause = self.silent;
                // Or its answers take longer than was waited.
                self.answer = (self.answer * 2).min(ANSWER_MAX);
                self.silent = (self.silent * 2).min(SILENT_MAX);
                if let Some(limit) = limits.get_mut(&self.endpoint) {
                    limit.search_again = now + HEAL;
                }
            }
        }
        self.phase = Phase::Due(now + pause);
    }
}

/// How long the next answer is waited for: `before`, and after it one that took `took`. It shrinks
/// slowly, for the answer to an earlier echo looks too quick.
fn answer_after(before: Duration, took: Duration) -> Duration {
    (took * 2).max(before * 15 / 16).clamp(ANSWER, ANSWER_MAX)
}

/// Classifies a search. Loss hits short packets, too, so a path is narrow only if at least two
/// thirds of the lengths that pass were answered, and longer ones never.
fn classify(lengths: &[u16], answers: &[u8; LENGTHS_MAX]) -> SearchResult {
    let passed = lengths.iter().zip(answers).rposition(|(_, answers)| *answers > 0);
    let Some(at) = passed else { return SearchResult::Mute };
    if at + 1 == lengths.len() {
        return SearchResult::Wide;
    }
    let answers = answers[..=at].iter().map(|answers| usize::from(*answers.min(&SEARCH_TIMES)));
    let asked = (at + 1) * usize::from(SEARCH_TIMES);
    if 3 * answers.sum::<usize>() >= 2 * asked {
        SearchResult::Narrow(lengths[at])
    } else {
        SearchResult::Lossy
    }
}

#[cfg(test)]
mod tests;
