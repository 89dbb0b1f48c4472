//! What is known of a peer: one state of few, whatever carries its packets.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::route::Prefixes;
use crate::status;

/// How a peer is, as far as its answers show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerState {
    /// Nobody sends to it, so nobody asks.
    Idle,
    /// Packets arrive there, and answers here.
    Ok,
    /// It answers other probes than echoes, or its connections go on.
    Deaf,
    /// This host may send no echo to it (EPERM), so nothing is known.
    Unasked,
    /// The same, and nothing comes back of what is sent to it.
    Unheard,
    /// So many of a hundred echoes are lost.
    Lossy(u8),
    /// One way works, and this one doesn't.
    OneWay(Way),
    /// It is new here, and has not answered yet: it may still be starting.
    InGrace,
    /// Nothing comes back.
    Silent {
        /// Whether the host itself answers pings, outside of the tunnel.
        host_answers: bool,
    },
    /// An ICMP error of this code came back, and no answer.
    Refused {
        /// Who sent it.
        by: IpAddr,
        /// The code: see `Reason`.
        code: u8,
    },
    /// This host can't send to it.
    Unsendable(Obstacle),
}

/// A direction that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// It is heard, and does not answer.
    There,
    /// What it sends, or answers, reaches this host, and goes no further.
    Back,
    /// What it sends reaches this host, from such addresses, which are in no lease of it.
    Foreign(IpAddr),
}

/// Why this host can't send to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// What the kernel answers.
    Errno(i32),
    /// Nobody answers for its address, or its router's, on the link.
    Neighbour,
}

impl PeerState {
    /// The same in a word, for status, metrics and alerts.
    pub fn word(self) -> status::PeerState {
        match self {
            Self::Idle => status::PeerState::Idle,
            Self::Ok => status::PeerState::Ok,
            Self::Deaf | Self::Unasked => status::PeerState::Deaf,
            Self::Lossy(_) => status::PeerState::Lossy,
            Self::OneWay(_) => status::PeerState::OneWay,
            Self::InGrace => status::PeerState::InGrace,
            Self::Unheard | Self::Silent { .. } => status::PeerState::Silent,
            Self::Refused { .. } => status::PeerState::Refused,
            Self::Unsendable(_) => status::PeerState::Unsendable,
        }
    }
}

/// What is known of the way to a peer and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contact {
    /// The sum of it.
    pub state: PeerState,
    /// When packets last came from it that were accepted, or answers.
    pub heard: Option<Instant>,
    /// Since when it has been in use, or when it last began to be.
    pub in_use_since: Option<Instant>,
    /// How long its last echo took, up to a moment when this daemon's control plane ran.
    pub round_trip: Option<Duration>,
}

/// What is known of the ways to all peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reachability {
    /// Of each peer, by its host.
    pub contacts: BTreeMap<IpAddr, Contact>,
    /// The subnets behind narrow paths, and the longest packet in bytes that each takes.
    pub path_mtus: BTreeMap<Prefixes, u16>,
}
