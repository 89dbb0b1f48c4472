//! What this host and one peer have between them: the handshake under way, the sessions, and the
//! timers of both (section 6 of WireGuard's paper). Decides by `now` alone and sends nothing: what
//! is due comes back.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::route::Prefixes;

use super::activity::Activity;
use super::keys::{PresharedKey, PublicKey};
use super::message::{Code, INITIATION_BYTES};
use super::noise::{Initiator, Timestamp};
use super::session::Session;
use super::sessions::PeerSessions;

pub(super) const SECOND_NS: u64 = 1_000_000_000;

/// From this age on whoever began a session begins the next one when it sends.
const REKEY_AFTER_NS: u64 = 120 * SECOND_NS;
/// From this age on a session is no more.
pub(super) const REJECT_AFTER_NS: u64 = 180 * SECOND_NS;
/// How long the answer to a handshake is waited for.
const REKEY_TIMEOUT_NS: u64 = 5 * SECOND_NS;
/// How long a handshake is tried again and again.
const REKEY_ATTEMPTS_NS: u64 = 90 * SECOND_NS;
/// How long nothing is sent back for packets.
const KEEPALIVE_NS: u64 = 10 * SECOND_NS;
/// Handshakes that one peer may begin: one in so much time.
const INITIATION_PERIOD_NS: u64 = SECOND_NS / 50;
/// By so much times in handshakes differ at least.
const TIMESTAMP_STEP_NS: u64 = 1 << 24;
/// How long a cookie is of use.
const COOKIE_LIFE_NS: u64 = 120 * SECOND_NS - REKEY_TIMEOUT_NS;

/// What is due to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// To begin a handshake, or the same again.
    Handshake,
    /// An empty packet.
    Keepalive,
}

/// A handshake that this host has begun.
pub(super) struct Pending {
    pub(super) initiator: Initiator,
    pub(super) local_index: u32,
}

/// All of it.
pub(super) struct Association {
    pub(super) public_key: PublicKey,
    pub(super) preshared_key: Option<PresharedKey>,
    pub(super) allowed: Option<Prefixes>,
    pub(super) keepalive_seconds: u16,
    pub(super) endpoint: Option<SocketAddr>,
    pub(super) activity: Arc<Activity>,
    pub(super) pending: Option<Pending>,
    /// When this host last began a handshake, by its own clock and by what it told the peer.
    begun_ns: Option<u64>,
    begun_unix_ns: u64,
    /// Since when handshakes are tried, if one is wanted, and until when the next attempt waits.
    attempts: Option<(u64, u64)>,
    /// The time in the last handshake that the peer has begun, and when that came.
    last_initiation: Option<(Timestamp, u64)>,
    /// The first code of the message of a handshake that was sent last, to which a cookie belongs.
    pub(super) sent_mac1: Option<Code>,
    cookie: Option<(Code, u64)>,
    current: Option<Arc<Session>>,
    next: Option<Arc<Session>>,
    previous: Option<Arc<Session>>,
    waiting: Vec<Box<[u8]>>,
    /// Packets that waited in vain.
    pub(super) expired_packets: u64,
    /// Handshakes that led to a session which both ends have.
    pub(super) completed: u64,
    /// When the peer was last answered, which is when both have agreed, should it use the session.
    answered_unix: u64,
    pub(super) last_handshake_unix: Option<u64>,
}

impl Association {
    pub(super) fn new(public_key: PublicKey) -> Self {
        Self {
            public_key,
            preshared_key: None,
            allowed: None,
            keepalive_seconds: 0,
            endpoint: None,
            activity: Arc::default(),
            pending: None,
            begun_ns: None,
            begun_unix_ns: 0,
            attempts: None,
            last_initiation: None,
            sent_mac1: None,
            cookie: None,
            current: None,
            next: None,
            previous: None,
            waiting: Vec::new(),
            expired_packets: 0,
            completed: 0,
            answered_unix: 0,
            last_handshake_unix: None,
        }
    }

    /// For the workers.
    pub(super) fn published(&self) -> PeerSessions {
        PeerSessions {
            endpoint: self.endpoint,
            activity: Arc::clone(&self.activity),
            current: self.current.clone(),
            next: self.next.clone(),
        }
    }

    /// Those by which its packets may come.
    pub(super) fn sessions(&self) -> impl Iterator<Item = &Arc<Session>> {
        [&self.current, &self.next, &self.previous].into_iter().flatten()
    }

    /// The session by which packets go to it.
    pub(super) fn sending(&self) -> Option<&Arc<Session>> {
        self.next.as_ref().filter(|next| next.is_confirmed()).or(self.current.as_ref())
    }

    /// What is due now.
    pub(super) fn due(&mut self, now_ns: u64) -> Option<Due> {
        self.activity.forget_move();
        if self.activity.take_lack() && self.sending().is_none() {
            self.want_handshake(now_ns);
        }
        if let Some(session) = self.sending().filter(|session| session.is_initiator) {
            let age_ns = now_ns.saturating_sub(session.born_ns);
            let is_sending = self.activity.sent_ns() > session.born_ns + REKEY_AFTER_NS;
            let is_late = age_ns > REJECT_AFTER_NS - KEEPALIVE_NS - REKEY_TIMEOUT_NS;
            let is_receiving =
                self.activity.received_ns() > now_ns.saturating_sub(KEEPALIVE_NS) && is_late;
            if age_ns > REKEY_AFTER_NS && is_sending || is_receiving {
                self.want_handshake(now_ns);
            }
        }
        let silence_ns = KEEPALIVE_NS + REKEY_TIMEOUT_NS;
        if self.activity.unanswered_since_ns().is_some_and(|at| now_ns >= at + silence_ns) {
            self.activity.forgive();
            self.want_handshake(now_ns);
        }
        if let Some((since_ns, next_ns)) = self.attempts {
            if now_ns >= since_ns + REKEY_ATTEMPTS_NS {
                self.give_up();
            } else if now_ns >= next_ns && self.endpoint.is_some() {
                return Some(Due::Handshake);
            }
        }
        self.is_keepalive_due(now_ns).then_some(Due::Keepalive)
    }

    fn is_keepalive_due(&self, now_ns: u64) -> bool {
        if self.endpoint.is_none() {
            return false;
        }
        if self.sending().is_some()
            && self.activity.owes_since_ns().is_some_and(|at| now_ns >= at + KEEPALIVE_NS)
        {
            return true;
        }
        let period_ns = u64::from(self.keepalive_seconds) * SECOND_NS;
        let last_ns = self.activity.sent_ns().max(self.activity.received_ns());
        period_ns > 0 && now_ns >= last_ns + period_ns
    }

    /// Has a handshake begin, unless one is being tried.
    pub(super) fn want_handshake(&mut self, now_ns: u64) {
        // No sooner than what was begun last could have been answered.
        let last_ns = self.begun_ns.map_or(0, |begun_ns| begun_ns + REKEY_TIMEOUT_NS);
        self.attempts.get_or_insert((now_ns, last_ns));
    }

    /// The time to tell the peer of a handshake that begins now. It takes none that is not later
    /// than all before, so a clock that was set back must not show.
    pub(super) fn begins_at(&mut self, unix_ns: u64) -> Timestamp {
        self.begun_unix_ns = unix_ns.max(self.begun_unix_ns + TIMESTAMP_STEP_NS);
        timestamp(self.begun_unix_ns)
    }

    /// As if there had never been a session.
    pub(super) fn forget_sessions(&mut self) {
        (self.current, self.next, self.previous) = (None, None, None);
        self.activity.forgive();
    }

    /// Nobody answers: the packets that wait are lost, and nothing is tried until the next one.
    fn give_up(&mut self) {
        (self.attempts, self.pending) = (None, None);
        self.expired_packets += self.drain().len() as u64;
    }

    /// A handshake was begun, and is sent now. The attempt after it waits a little longer than that
    /// of others. Returns the number of the handshake that it replaces.
    pub(super) fn began(&mut self, pending: Pending, now_ns: u64, jitter_ns: u64) -> Option<u32> {
        let before = self.pending.replace(pending);
        self.begun_ns = Some(now_ns);
        let since_ns = self.attempts.map_or(now_ns, |(since_ns, _)| since_ns);
        self.attempts = Some((since_ns, now_ns + REKEY_TIMEOUT_NS + jitter_ns));
        self.activity.sends_keepalive(INITIATION_BYTES as u64, now_ns);
        before.map(|pending| pending.local_index)
    }

    /// Whether a handshake that the peer has begun is newer than all before it, and not one too
    /// many; it counts from here on.
    pub(super) fn is_new(&mut self, timestamp: Timestamp, now_ns: u64) -> bool {
        let is_new = self
            .last_initiation
            .is_none_or(|(last, at_ns)| timestamp > last && now_ns >= at_ns + INITIATION_PERIOD_NS);
        if is_new {
            self.last_initiation = Some((timestamp, now_ns));
        }
        is_new
    }

    /// The peer has answered: this is the session from now on.
    pub(super) fn answered(&mut self, session: Arc<Session>, unix: u64) {
        (self.pending, self.attempts) = (None, None);
        if let Some(next) = self.next.take() {
            // Its peer may have it already; what it sends by that one is still let in.
            self.previous = Some(next);
            self.current = Some(session);
        } else {
            self.previous = self.current.replace(session);
        }
        self.note_completed(unix);
    }

    /// The peer was answered: this is the next session, once it sends something by it.
    pub(super) fn has_answered(&mut self, session: Arc<Session>, unix: u64) {
        if let Some(next) = self.next.replace(session)
            && next.is_confirmed()
        {
            self.previous = self.current.replace(next);
            self.note_completed(self.answered_unix);
        }
        self.answered_unix = unix;
    }

    /// Both have the session. A peer with another PSK gets an answer that it can't read, which is
    /// no handshake to show.
    fn note_completed(&mut self, unix: u64) {
        self.completed += 1;
        self.last_handshake_unix = Some(unix);
    }

    /// Moves what workers have confirmed to its place, and forgets what is too old; whether
    /// anything changed.
    pub(super) fn turn_over(&mut self, now_ns: u64) -> bool {
        let mut has_changed = false;
        if self.next.as_ref().is_some_and(|next| next.is_confirmed()) {
            self.previous = self.current.take();
            self.current = self.next.take();
            // The handshake that this host has begun meanwhile is of no use any more.
            (self.pending, self.attempts) = (None, None);
            self.note_completed(self.answered_unix);
            has_changed = true;
        }
        for place in [&mut self.current, &mut self.next, &mut self.previous] {
            let born_ns = place.as_ref().map(|session| session.born_ns);
            if born_ns.is_some_and(|born_ns| now_ns >= born_ns + REJECT_AFTER_NS) {
                *place = None;
                has_changed = true;
            }
        }
        has_changed
    }

    /// Keeps a packet until there is a session. As many come as [`Activity::begin_wait`] lets.
    pub(super) fn keep(&mut self, packet: Box<[u8]>) {
        self.waiting.push(packet);
    }

    /// The packets that have waited, once there is a session.
    pub(super) fn take_waiting(&mut self) -> Vec<Box<[u8]>> {
        if self.sending().is_some() { self.drain() } else { Vec::new() }
    }

    fn drain(&mut self) -> Vec<Box<[u8]>> {
        self.activity.end_waits(self.waiting.len() as u32);
        std::mem::take(&mut self.waiting)
    }

    pub(super) fn set_cookie(&mut self, cookie: Code, now_ns: u64) {
        self.cookie = Some((cookie, now_ns));
    }

    pub(super) fn cookie(&self, now_ns: u64) -> Option<&Code> {
        let fresh = |(_, at_ns): &&(Code, u64)| now_ns < at_ns + COOKIE_LIFE_NS;
        self.cookie.as_ref().filter(fresh).map(|(cookie, _)| cookie)
    }
}

/// TAI64N, as the kernel writes it: no finer than handshakes may follow each other, so that it
/// says little of this host's clock.
fn timestamp(unix_ns: u64) -> Timestamp {
    let seconds = (unix_ns / SECOND_NS).wrapping_add(0x4000_0000_0000_000a);
    let nanoseconds = (unix_ns % SECOND_NS) as u32 & !(TIMESTAMP_STEP_NS as u32 - 1);
    let mut bytes = Timestamp::default();
    bytes[..8].copy_from_slice(&seconds.to_be_bytes());
    bytes[8..].copy_from_slice(&nanoseconds.to_be_bytes());
    bytes
}
