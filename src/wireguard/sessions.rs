//! The sessions in force, as workers see them: published whole, then immutable.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use super::activity::Activity;
use super::session::Session;

/// Low bits of a session's number here: its place in the table. The others are random, so that a
/// datagram of a session that was there before does not find the one that has its place now.
pub(super) const PLACE_BITS: u32 = 20;

/// The place of a session's number.
#[inline]
pub(super) fn place_of(number: u32) -> usize {
    (number & ((1 << PLACE_BITS) - 1)) as usize
}

/// All sessions of all peers.
#[derive(Debug, Default)]
pub struct Sessions {
    /// In the order of their numbers; none where a peer was removed.
    pub(super) peers: Box<[Option<PeerSessions>]>,
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

    /// The session that has this number here.
    #[inline]
    pub fn session(&self, local_index: u32) -> Option<&Session> {
        let session = self.places.get(place_of(local_index))?.as_deref()?;
        (session.local_index == local_index).then_some(session)
    }
}

/// The first of the addresses that stand for peers: class E, which no host has.
const IDENTITIES: u32 = 0xf000_0000;

/// What stands for a peer where others have their address, in the route table and as the sender of
/// a packet: peers are known by their keys, and several may be, or claim to be, at one address.
pub fn identity(number: u32) -> SocketAddr {
    (Ipv4Addr::from_bits(IDENTITIES | number), 1).into()
}

/// The number of the peer for which `identity` stands.
#[inline]
pub fn number_of(identity: SocketAddr) -> Option<u32> {
    match identity {
        SocketAddr::V4(it) => it.ip().to_bits().checked_sub(IDENTITIES),
        SocketAddr::V6(_) => None,
    }
}
