//! How long a packet the paths to the peers take, where no router tells: a decision machine over
//! echoes and the caller's clock, without I/O.
//!
//! A router whose next link is narrower drops what is too long and says so in an ICMP message. If
//! that is filtered, long packets vanish and short ones pass, for ever. So a peer that is being
//! sent long datagrams is asked for an echo as long as the overlay allows, a few times a second;
//! any kernel answers. One that is missing begins a search: echoes of usual lengths, all at once.
//! Where the short ones come back and the long ones don't, that path is narrow. It is searched
//! again now and then, until the longest passes.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use crate::stats::LONG_BYTES;

/// Peers that are watched at a time. When more are in use, they take turns.
pub(super) const WATCHED_MAX: usize = 64;

/// How long a peer stays watched after it was last sent a long datagram: beyond the pauses that
/// TCP makes in the promised 3 seconds. Also the shortest turn.
const IN_USE: Duration = Duration::from_secs(5);

/// Pause between two echoes to one peer. With a loss seen after [`ANSWER`] and a search after that,
/// a narrow path is known within 1.2 seconds.
const WATCH: Duration = Duration::from_millis(400);

/// The fewest milliseconds between two echoes to different peers: 40 a second, half a megabit.
const WATCH_SPACING: Duration = Duration::from_millis(25);

/// How long an answer is waited for. A later one still counts for what it shows.
const ANSWER: Duration = Duration::from_millis(250);

/// How often a search sends each length, and how far apart: a burst of loss shall not take all.
const SEARCH_TIMES: u8 = 3;
const SEARCH_SPACING: Duration = Duration::from_millis(60);

/// Searches at a time: each sends some dozens of packets.
const SEARCHES_MAX: usize = 4;

/// A narrow path is searched again after this time, to see whether it is wide again.
const HEAL: Duration = Duration::from_secs(30);

/// Links of a network get another MTU one after the other; until they all have it, paths are what
/// nobody wants.
const SETTLE: Duration = Duration::from_secs(1);

/// Pauses after a search that showed nothing, because the peer answers no echo at all or many are
/// lost.
const SILENT_FIRST: Duration = Duration::from_millis(500);
const SILENT_MAX: Duration = Duration::from_secs(60);

/// What a search tries besides the overlay's own MTU: what links and the usual tunnels carry, less
/// the 28 bytes of ours.
const USUAL_BYTES: [u16; 15] =
    [LONG_BYTES, 978, 1252, 1272, 1322, 1372, 1392, 1422, 1432, 1452, 1464, 1472, 1974, 4324, 8138];

/// Lengths of one search: the usual ones and the longest.
const LENGTHS_MAX: usize = USUAL_BYTES.len() + 1;

/// An echo to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Probe {
    /// The peer's tunnel endpoint.
    pub(super) endpoint: SocketAddrV4,
    /// Its TUN address, which answers.
    pub(super) target: Ipv4Addr,
    /// Length of the inner packet.
    pub(super) bytes: u16,
}

/// The paths to the peers that are in use or narrow.
#[derive(Debug)]
pub(super) struct Paths {
    ceiling_bytes: u16,
    watched: Vec<Path>,
    random: u64,
}

#[derive(Debug)]
struct Path {
    endpoint: SocketAddrV4,
    target: Ipv4Addr,
    watched_since: Instant,
    used: Instant,
    limit_bytes: Option<u16>,
    silent: Duration,
    search_again: Option<Instant>,
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
    next: Instant,
    sent: u8,
    answers: [u8; LENGTHS_MAX],
}

/// What a search has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Wide,
    Narrow(u16),
    Nothing,
}

impl Paths {
    /// No path yet; nothing longer than `ceiling_bytes` is ever sent. `seed` spreads the echoes of
    /// many hosts.
    pub(super) fn new(ceiling_bytes: u16, seed: u64) -> Self {
        Self { ceiling_bytes, watched: Vec::new(), random: seed | 1 }
    }

    /// The longest packet that the interface allows is another now. What was found is found again.
    pub(super) fn set_ceiling(&mut self, ceiling_bytes: u16, now: Instant) {
        if self.ceiling_bytes == ceiling_bytes {
            return;
        }
        self.ceiling_bytes = ceiling_bytes;
        for path in &mut self.watched {
            path.limit_bytes = path.limit_bytes.filter(|limit| *limit < ceiling_bytes);
            path.search_again = path.limit_bytes.map(|_| now + SETTLE);
            path.phase = Phase::Due(now + SETTLE);
        }
    }

    /// The longest packet that all paths take, if some path takes less than the interface.
    pub(super) fn limit_bytes(&self) -> Option<u16> {
        self.watched.iter().filter_map(|path| path.limit_bytes).min()
    }

    /// Narrow paths, narrowest first.
    pub(super) fn narrowest(&self) -> Option<(SocketAddrV4, u16)> {
        let narrow = self.watched.iter().filter_map(|path| Some((path.limit_bytes?, path)));
        narrow.min_by_key(|(limit, _)| *limit).map(|(limit, path)| (path.endpoint, limit))
    }

    /// Forgets the peers that `is_peer` knows no more.
    pub(super) fn retain(&mut self, is_peer: impl Fn(SocketAddrV4, Ipv4Addr) -> bool) {
        self.watched.retain(|path| is_peer(path.endpoint, path.target));
    }

    /// Long datagrams went to this peer.
    pub(super) fn used(&mut self, endpoint: SocketAddrV4, target: Ipv4Addr, now: Instant) {
        if let Some(path) = self.watched.iter_mut().find(|path| path.endpoint == endpoint) {
            path.used = now;
            return;
        }
        if self.watched.len() == WATCHED_MAX {
            let turn_over = |path: &Path| {
                path.limit_bytes.is_none()
                    && matches!(path.phase, Phase::Due(_))
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
            limit_bytes: None,
            silent: SILENT_FIRST,
            search_again: None,
            phase: Phase::Due(now),
        });
    }

    /// An echo of this length came back.
    pub(super) fn answered(&mut self, target: Ipv4Addr, bytes: u16, now: Instant) {
        let watch = self.watch_pause();
        let (ceiling_bytes, lengths) = (self.ceiling_bytes, lengths(self.ceiling_bytes));
        let Some(path) = self.watched.iter_mut().find(|path| path.target == target) else { return };
        match &mut path.phase {
            // It answered too late to be waited for.
            Phase::Due(_) => {}
            Phase::Asked(since, asked_bytes) if bytes >= *asked_bytes => {
                path.silent = SILENT_FIRST;
                path.phase = Phase::Due(*since + watch);
            }
            Phase::Asked(..) => {}
            Phase::Search(search) => {
                let at = lengths.iter().position(|length| *length == bytes);
                if let Some(at) = at {
                    search.answers[at] = search.answers[at].saturating_add(1);
                }
                if bytes == ceiling_bytes {
                    path.conclude(Found::Wide, now, watch);
                }
            }
        }
    }

    /// Gives the echoes that are due.
    pub(super) fn tick(&mut self, now: Instant, probes: &mut Vec<Probe>) {
        self.watched
            .retain(|path| path.limit_bytes.is_some() || now.duration_since(path.used) < IN_USE);
        let effective_bytes = self.limit_bytes().unwrap_or(self.ceiling_bytes);
        let watch = self.watch_pause();
        let lengths = lengths(self.ceiling_bytes);
        let mut searches =
            self.watched.iter().filter(|p| matches!(p.phase, Phase::Search(_))).count();
        for path in &mut self.watched {
            if path.begins_search(now) && searches < SEARCHES_MAX {
                searches += 1;
                path.search_again = None;
                path.phase =
                    Phase::Search(Search { next: now, sent: 0, answers: [0; LENGTHS_MAX] });
            }
            let (endpoint, target) = (path.endpoint, path.target);
            let probe = |bytes| Probe { endpoint, target, bytes };
            match &mut path.phase {
                Phase::Due(due) if *due <= now && now.duration_since(path.used) < IN_USE => {
                    probes.push(probe(effective_bytes));
                    path.phase = Phase::Asked(now, effective_bytes);
                }
                Phase::Due(_) | Phase::Asked(..) => {}
                Phase::Search(search) if search.next > now => {}
                Phase::Search(search) if search.sent < SEARCH_TIMES => {
                    probes.extend(lengths.iter().map(|bytes| probe(*bytes)));
                    search.sent += 1;
                    let is_last = search.sent == SEARCH_TIMES;
                    search.next = now + if is_last { ANSWER } else { SEARCH_SPACING };
                }
                Phase::Search(search) => {
                    let found = judge(&lengths, &search.answers);
                    path.conclude(found, now, watch);
                }
            }
        }
    }

    /// When there may be something to do; `None` while nobody is watched.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let due = |path: &Path| {
            let phase = match &path.phase {
                Phase::Due(due) => Some(*due).filter(|due| *due < path.used + IN_USE),
                Phase::Asked(since, _) => Some(*since + ANSWER),
                Phase::Search(search) => Some(search.next),
            };
            phase.into_iter().chain(path.search_again).min()
        };
        self.watched.iter().filter_map(due).min()
    }

    /// The pause between two echoes to one peer: with jitter, longer when there are many.
    fn watch_pause(&mut self) -> Duration {
        let pause = WATCH.max(WATCH_SPACING * self.watched.len() as u32);
        // xorshift64, Marsaglia 2003.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        pause * (224 + (self.random % 64) as u32) / 256
    }
}

impl Path {
    fn begins_search(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Due(_) => self.search_again.is_some_and(|again| again <= now),
            Phase::Asked(since, _) => now.duration_since(since) >= ANSWER,
            Phase::Search(_) => false,
        }
    }

    fn conclude(&mut self, found: Found, now: Instant, watch: Duration) {
        let mut pause = watch;
        match found {
            Found::Wide => (self.limit_bytes, self.silent) = (None, SILENT_FIRST),
            Found::Narrow(limit) => {
                (self.limit_bytes, self.silent) = (Some(limit), SILENT_FIRST);
            }
            Found::Nothing => {
                pause = self.silent;
                self.silent = (self.silent * 2).min(SILENT_MAX);
            }
        }
        self.search_again = self.limit_bytes.map(|_| now + HEAL);
        self.phase = Phase::Due(now + pause);
    }
}

/// The lengths that a search tries, ascending; the longest is the ceiling.
fn lengths(ceiling_bytes: u16) -> Vec<u16> {
    let usual = USUAL_BYTES.into_iter().filter(|bytes| *bytes < ceiling_bytes);
    usual.chain([ceiling_bytes]).collect()
}

/// Reads a search. Loss takes long and short alike, so a path is narrow only if what passes passes
/// well, two thirds at least, and what is longer never.
fn judge(lengths: &[u16], answers: &[u8; LENGTHS_MAX]) -> Found {
    let passed = lengths.iter().zip(answers).rposition(|(_, answers)| *answers > 0);
    let Some(at) = passed else { return Found::Nothing };
    if at + 1 == lengths.len() {
        return Found::Wide;
    }
    let answered: usize = answers[..=at].iter().map(|answers| usize::from(*answers)).sum();
    let asked = (at + 1) * usize::from(SEARCH_TIMES);
    if 3 * answered >= 2 * asked { Found::Narrow(lengths[at]) } else { Found::Nothing }
}

#[cfg(test)]
mod tests;
