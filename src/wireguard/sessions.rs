//! The sessions in force, as workers see them: published whole, then immutable.

use std::net::SocketAddr;
use std::sync::Arc;

use super::activity::Activity;
use super::session::Session;

/// Low bits of a session's number here: its place in the table. The others are random, so that a
/// datagram of a session that was there before does not find the one that has its place now.
pub(super) const PLACE_BITS: u32 = 20;

/// All sessions of all peers.
#[derive(Debug, Default)]
pub struct Sessions {
    /// In the order of their numbers; none where a peer was removed.
    pub(super) peers: Box<[Option<PeerSessions>]>,
    /// Numbers of the peers that have endpoints, in ascending order of these. No two have one.
    pub(super) by_endpoint: Box<[(SocketAddr, u32)]>,
    /// By the low bits of their numbers.
    pub(super) places: Box<[Option<Arc<Session>>]>,
}

/// Those of one peer.
#[derive(Debug, Clone)]
pub struct PeerSessions {
    /// Where it is.
    pub endpoint: Option<SocketAddr>,
    /// What is noted of its packets.
    pub activity: Arc<Activity>,
    /// By which packets go to it.
    pub(super) current: Option<Arc<Session>>,
    /// One that it has begun, and not sent anything by yet.
    pub(super) next: Option<Arc<Session>>,
}

impl PeerSessions {
    /// The session by which packets go to it now.
    #[inline]
    pub fn current(&self) -> Option<&Session> {
        let confirmed = self.next.as_deref().filter(|next| next.is_confirmed());
        confirmed.or(self.current.as_deref())
    }
}

impl Sessions {
    /// The peer of this number.
    #[inline]
    pub fn peer(&self, number: u32) -> Option<&PeerSessions> {
        self.peers.get(number as usize)?.as_ref()
    }

    /// The number of the peer at `endpoint`.
    #[inline]
    pub fn number_at(&self, endpoint: SocketAddr) -> Option<u32> {
        let found = self.by_endpoint.binary_search_by_key(&endpoint, |(endpoint, _)| *endpoint);
        found.ok().and_then(|at| self.by_endpoint.get(at)).map(|(_, number)| *number)
    }

    /// The session that has this number here.
    #[inline]
    pub fn session(&self, local_index: u32) -> Option<&Session> {
        let place = (local_index & ((1 << PLACE_BITS) - 1)) as usize;
        let session = self.places.get(place)?.as_deref()?;
        (session.local_index == local_index).then_some(session)
    }
}
