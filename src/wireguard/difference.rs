//! What must be told a WireGuard device so that its peers are those that are wanted. Running
//! sessions go on: of a peer that is there, only what differs is told.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use crate::route::Prefixes;
use crate::wireguard::keys::{PresharedKey, PublicKey};
use crate::wireguard::peer::{PeerConfig, PeerState};

/// An address and how many of its bits count, as devices list what they allow.
pub type AllowedAddress = (IpAddr, u8);

/// A peer as a device has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundPeer {
    /// How it is.
    pub state: PeerState,
    /// What it was given, if it was given any.
    pub preshared_key: Option<PresharedKey>,
    /// What may come from it.
    pub allowed: BTreeSet<AllowedAddress>,
    /// 0 for never.
    pub keepalive_seconds: u16,
}

/// What a device is told of one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerEdit {
    /// Whom.
    pub public_key: PublicKey,
    /// What to do with it.
    pub change: PeerChange,
}

/// A change of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerChange {
    /// It goes.
    Remove,
    /// It is made if it is not there, and this changes; nothing leaves that as it is.
    Set {
        /// The shared key; inside, nothing takes it away.
        preshared_key: Option<Option<PresharedKey>>,
        /// Where it is.
        endpoint: Option<SocketAddr>,
        /// All that may come from it.
        allowed: Option<Prefixes>,
        /// 0 for never.
        keepalive_seconds: Option<u16>,
    },
}

/// What `wanted` asks for, as devices list it.
pub fn allowed_addresses(subnets: Prefixes) -> BTreeSet<AllowedAddress> {
    let v4 = subnets.v4().map(|it| (it.network().into(), it.length_bits()));
    let v6 = subnets.v6().map(|it| (it.network().into(), it.length_bits()));
    v4.into_iter().chain(v6).collect()
}

/// The edits of a device that has `found`: removals before all else, for an address may go from one
/// peer to another. `told` are the endpoints that it was told last, and `now_unix` the time.
///
/// A peer that has moved is left where it is while it is heard from there. Only a changed lease, or
/// silence, has the device send to the lease's address again.
pub fn difference(
    wanted: &[PeerConfig],
    found: &[FoundPeer],
    told: &BTreeMap<PublicKey, SocketAddr>,
    now_unix: u64,
) -> Vec<PeerEdit> {
    let known: BTreeMap<_, _> = found.iter().map(|peer| (peer.state.public_key, peer)).collect();
    let keys: BTreeSet<_> = wanted.iter().map(|peer| peer.public_key).collect();
    let gone = known.keys().filter(|key| !keys.contains(key));
    let removals = gone.map(|key| PeerEdit { public_key: *key, change: PeerChange::Remove });
    let sets = wanted.iter().filter_map(|peer| {
        let (public_key, found) = (peer.public_key, known.get(&peer.public_key));
        let told = told.get(&public_key).copied();
        let change = change(peer, found.copied(), told, now_unix)?;
        Some(PeerEdit { public_key, change })
    });
    removals.chain(sets).collect()
}

fn change(
    wanted: &PeerConfig,
    found: Option<&FoundPeer>,
    told: Option<SocketAddr>,
    now_unix: u64,
) -> Option<PeerChange> {
    let is_other_key = found.is_none_or(|it| it.preshared_key != wanted.preshared_key);
    let is_elsewhere = found.is_none_or(|FoundPeer { state, .. }| {
        // One without keys has answered nothing for minutes, or was sent nothing.
        let is_silent = !state.has_keys(now_unix) || state.endpoint.is_none();
        let is_lease_new = told.is_some_and(|told| Some(told) != wanted.endpoint);
        state.endpoint != wanted.endpoint && (is_silent || is_lease_new)
    });
    let allowed = allowed_addresses(wanted.allowed);
    let is_allowed_other = found.is_none_or(|found| found.allowed != allowed);
    let keepalive_seconds = wanted.keepalive_seconds;
    let is_other_pace = found.map_or(0, |it| it.keepalive_seconds) != keepalive_seconds;
    let change = PeerChange::Set {
        preshared_key: is_other_key.then(|| wanted.preshared_key.clone()),
        endpoint: wanted.endpoint.filter(|_| is_elsewhere),
        allowed: is_allowed_other.then_some(wanted.allowed),
        keepalive_seconds: is_other_pace.then_some(keepalive_seconds),
    };
    let is_nothing = PeerChange::Set {
        preshared_key: None,
        endpoint: None,
        allowed: None,
        keepalive_seconds: None,
    };
    (found.is_none() || change != is_nothing).then_some(change)
}

#[cfg(test)]
mod tests;
