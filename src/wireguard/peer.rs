//! What a WireGuard device is told of each peer, and what it tells of it, whether the kernel's or
//! one in this process.

use std::net::SocketAddr;

use crate::route::Prefixes;
use crate::wireguard::keys::{PresharedKey, PublicKey};

/// A peer as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerConfig {
    /// Who it is.
    pub public_key: PublicKey,
    /// What this network's hosts share, if they share anything.
    pub preshared_key: Option<PresharedKey>,
    /// Where to send to it, until datagrams of it come from elsewhere; nowhere before it sends.
    pub endpoint: Option<SocketAddr>,
    /// What may come from it and goes to it: the subnets of its lease.
    pub allowed: Prefixes,
    /// How often something is sent, so that what is between the two keeps the way open; 0: never.
    pub keepalive_seconds: u16,
}

/// How a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerState {
    /// Who it is.
    pub public_key: PublicKey,
    /// Where it is: where its last datagram came from, if there was one.
    pub endpoint: Option<SocketAddr>,
    /// When both last agreed on keys, in seconds since 1970; `None` if they never did.
    pub last_handshake_unix: Option<u64>,
    /// Bytes received from it, in datagrams with their overhead.
    pub received_bytes: u64,
    /// Bytes sent to it, likewise.
    pub sent_bytes: u64,
    /// Packets for it, those that could not be sent included; `None` of the kernel's, which does
    /// not count them.
    pub packets: Option<u64>,
}

/// How long keys are used after a handshake (REJECT_AFTER_TIME, section 6.1 of WireGuard's paper).
const KEYS_LAST_SECONDS: u64 = 180;

impl PeerState {
    /// Whether there are keys that are not too old, so that packets can pass.
    pub fn has_keys(&self, now_unix: u64) -> bool {
        let age = self.last_handshake_unix.map(|at| now_unix.saturating_sub(at));
        age.is_some_and(|seconds| seconds < KEYS_LAST_SECONDS)
    }
}
