//! What workers note of a peer while they carry its packets, for the timers of its handshakes:
//! plain stores, once a message at most.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Of one peer. Times are of the workers' clock; 0 is never. Several workers write, and the last
/// one wins, which is as good: they all write the time of their turn.
#[derive(Debug, Default)]
pub struct Activity {
    /// When anything was last sent to it.
    sent_ns: AtomicU64,
    /// When an authentic datagram of it last came.
    received_ns: AtomicU64,
    /// Since when packets have been sent to it without anything coming back.
    unanswered_since_ns: AtomicU64,
    /// Since when packets have come from it without anything being sent back.
    owes_since_ns: AtomicU64,
    sent_bytes: AtomicU64,
    /// Packets for it, those that found no session included.
    packets: AtomicU64,
    received_bytes: AtomicU64,
    /// Whether there was no session to send a packet by.
    lacks_session: AtomicBool,
    /// Whether datagrams of it came from elsewhere than it was.
    has_moved: AtomicBool,
    /// Packets that wait for a session, or are on their way there.
    waiting: AtomicU32,
}

/// Packets that wait for a session, of one peer: what a few connections begin with.
pub(super) const WAITING_MAX: u32 = 32;

impl Activity {
    /// So many packets are for it, whether they can be sent or not.
    #[inline]
    pub fn is_given(&self, packets: u64) {
        self.packets.fetch_add(packets, Ordering::Relaxed);
    }

    /// Packets are sent to it, in datagrams of so many bytes.
    #[inline]
    pub fn sends(&self, bytes: u64, now_ns: u64) {
        self.sends_keepalive(bytes, now_ns);
        if self.unanswered_since_ns.load(Ordering::Relaxed) == 0 {
            self.unanswered_since_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// Something is sent to it that asks for no answer.
    #[inline]
    pub(super) fn sends_keepalive(&self, bytes: u64, now_ns: u64) {
        store(&self.sent_ns, now_ns);
        store(&self.owes_since_ns, 0);
        self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Authentic datagrams of so many bytes came from it, and whether packets were in them.
    #[inline]
    pub fn received(&self, bytes: u64, has_packets: bool, now_ns: u64) {
        store(&self.received_ns, now_ns);
        store(&self.unanswered_since_ns, 0);
        if has_packets && self.owes_since_ns.load(Ordering::Relaxed) == 0 {
            self.owes_since_ns.store(now_ns, Ordering::Relaxed);
        }
        self.received_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A packet for it has no session to go by.
    #[inline]
    pub fn note_lack(&self) {
        self.lacks_session.store(true, Ordering::Relaxed);
    }

    /// Whether one more packet may wait for a session; then it counts.
    pub fn begin_wait(&self) -> bool {
        let more = |waiting| (waiting < WAITING_MAX).then_some(waiting + 1);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// So many wait no more.
    pub fn end_waits(&self, count: u32) {
        let less = |waiting: u32| Some(waiting.saturating_sub(count));
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok();
    }

    /// Datagrams of it come from elsewhere than it was; whether that is news.
    #[inline]
    pub fn note_move(&self) -> bool {
        !self.has_moved.swap(true, Ordering::Relaxed)
    }

    /// From here on that is news again.
    pub(super) fn forget_move(&self) {
        if self.has_moved.load(Ordering::Relaxed) {
            self.has_moved.store(false, Ordering::Relaxed);
        }
    }

    /// Whether that was noted since the last call.
    pub(super) fn take_lack(&self) -> bool {
        self.lacks_session.swap(false, Ordering::Relaxed)
    }

    pub(super) fn sent_ns(&self) -> u64 {
        self.sent_ns.load(Ordering::Relaxed)
    }

    pub(super) fn received_ns(&self) -> u64 {
        self.received_ns.load(Ordering::Relaxed)
    }

    /// Since when it has been silent although packets are sent to it.
    pub(super) fn unanswered_since_ns(&self) -> Option<u64> {
        Some(self.unanswered_since_ns.load(Ordering::Relaxed)).filter(|at| *at != 0)
    }

    /// Since when nothing has been sent back for its packets.
    pub(super) fn owes_since_ns(&self) -> Option<u64> {
        Some(self.owes_since_ns.load(Ordering::Relaxed)).filter(|at| *at != 0)
    }

    /// It is to be handshaken with anew: what came before no longer counts.
    pub(super) fn forgive(&self) {
        self.unanswered_since_ns.store(0, Ordering::Relaxed);
    }

    /// How many packets there were for it.
    pub(super) fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Bytes received and sent.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let [received, sent] = [&self.received_bytes, &self.sent_bytes];
        (received.load(Ordering::Relaxed), sent.load(Ordering::Relaxed))
    }
}

/// A load first: most often it is there already, and a store takes the line from the others.
#[inline]
fn store(place: &AtomicU64, value: u64) {
    if place.load(Ordering::Relaxed) != value {
        place.store(value, Ordering::Relaxed);
    }
}
