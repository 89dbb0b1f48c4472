//! What weftd says of a peer.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use derive_more::{AddAssign, Display};
use serde::{Deserialize, Serialize};

use super::verdict::Cause;
use super::workers::Traffic;
use crate::route::{Prefix, Prefixes};
use crate::words::words;

words! {
    /// What is known of the way to a peer and back.
    PeerState {
        /// It answers.
        Ok = "ok",
        /// The same, but the path takes no packets as long as the overlay's MTU allows.
        Narrow = "narrow",
        /// It answers no echoes, but packets pass: no fault.
        Deaf = "deaf",
        /// Some of the echoes are lost.
        Lossy = "lossy",
        /// One way works, and the other doesn't.
        OneWay = "one-way",
        /// Nobody sends to it, so nobody asks.
        Idle = "idle",
        /// It is new, is sent packets, and has had no time to answer. Since schema 2.
        InGrace = "in-grace",
        /// It is sent packets, and nothing comes back, not even an echo.
        Silent = "silent",
        /// Somebody answers that our packets are not wanted.
        Refused = "refused",
        /// This host can't send to it.
        Unsendable = "unsendable",
        /// Routes and neighbours are in place, and nobody asks it.
        SetUp = "set-up",
        /// They are not.
        NotSetUp = "not-set-up",
        /// Its lease is of another backend, so no packets go there.
        OtherBackend = "other-backend",
        /// Whatever carries the packets, weftd has no part in it.
        Unmanaged = "unmanaged",
        /// One that a later release knows.
        #[serde(other)]
        Unknown = "unknown",
    }
}

impl PeerState {
    /// What is wrong with such a peer, if a person has to look at it.
    pub fn fault(self) -> Option<Cause> {
        match self {
            Self::Silent => Some(Cause::PeerSilent),
            Self::OneWay => Some(Cause::PeerOneWay),
            Self::Refused => Some(Cause::PeerRefused),
            Self::Unsendable => Some(Cause::PeerUnsendable),
            Self::Lossy => Some(Cause::PeerLossy),
            Self::NotSetUp => Some(Cause::PeerNotSetUp),
            Self::OtherBackend => Some(Cause::PeerOtherBackend),
            Self::Ok
            | Self::Narrow
            | Self::Deaf
            | Self::Idle
            | Self::InGrace
            | Self::SetUp
            | Self::Unmanaged
            | Self::Unknown => None,
        }
    }

    /// Whether a person has to look at such a peer.
    pub fn is_alarming(self) -> bool {
        self.fault().is_some()
    }

    /// Whether this host sends packets to such a peer.
    pub fn is_sent_to(self) -> bool {
        !matches!(self, Self::NotSetUp | Self::OtherBackend)
    }
}

/// Where a peer's packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Via {
    /// Its end of the tunnel.
    Tunnel(SocketAddr),
    /// The host, if weftd makes no datagrams for it. One without IPv4 by its IPv6 address.
    Host(IpAddr),
}

impl Via {
    /// The host's address.
    pub fn host(self) -> IpAddr {
        match self {
            Self::Tunnel(address) => address.ip(),
            Self::Host(address) => address,
        }
    }

    /// Its end of the tunnel, with `port` if none is known.
    pub fn tunnel(self, port: u16) -> SocketAddr {
        match self {
            Self::Tunnel(address) => address,
            Self::Host(address) => SocketAddr::new(address, port),
        }
    }
}

/// One lease of another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its subnet; nothing where nodes have no IPv4.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub subnet: Option<Prefix>,
    /// Its subnet of IPv6, if it has one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipv6_subnet: Option<Prefix<Ipv6Addr>>,
    /// The node's name, where the store knows one.
    pub node: Option<String>,
    /// Where its packets go: an address, for udp with the port.
    pub via: Via,
    /// Where its IPv6 packets go, the same way; nothing if none go there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipv6_via: Option<Via>,
    /// The backend of its lease. Since schema 2.
    pub backend: Option<String>,
    /// When its lease ends, in seconds since 1970; nothing for ever, or where the store does not
    /// show it. Since schema 2.
    pub lease_expires_unix: Option<u64>,
    /// What is known of the way there and back.
    pub state: PeerState,
    /// What is wrong with it, or remarkable, and what to do. Since schema 2.
    pub why: Option<String>,
    /// How long ago anything came from it; nothing if nothing ever did, or nobody listens.
    pub heard_seconds_ago: Option<u64>,
    /// For how long it has been sent packets. Since schema 2.
    pub in_use_seconds: Option<u64>,
    /// How long its last echo took.
    pub round_trip_microseconds: Option<u64>,
    /// The longest packet that the path takes.
    pub path_mtu_bytes: Option<u32>,
    /// Whether workers send to it from ports of their own; nothing where there are no workers.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from_source_ports: Option<bool>,
    /// The pods' packets, by workers and by the kernel's programs, of all leases of one address;
    /// `packets_sent` and so on stand in the peer itself.
    #[serde(flatten)]
    pub traffic: Option<Traffic>,
    /// Packets that could not be sent, for a reason that is the peer's own.
    pub failed_sends: Option<u64>,
    /// The part of its packets that the kernel's programs carried.
    pub fast_path: Option<Traffic>,
    /// What WireGuard knows of it, where that carries the packets.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub wireguard: Option<WireguardPeer>,
    /// What charon has agreed on with it, where IPsec carries the packets.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipsec: Option<IpsecPeer>,
}

/// What became of WireGuard's handshakes that peers or others have begun or answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, AddAssign)]
pub struct Handshakes {
    /// Messages that led to a session.
    pub completed: u64,
    /// Messages that are for another key, of nobody known, or forged.
    pub refused: u64,
    /// Messages that begin a handshake and are older than one before, or come too soon after it.
    pub replayed: u64,
    /// Messages that were answered with a cookie, while there was no time for all.
    pub cookies: u64,
    /// Messages that were not looked at then, because their address had its share.
    pub limited: u64,
    /// Messages that were not looked at, because too many others waited.
    pub shed: u64,
    /// Packets that have waited for a session in vain.
    pub expired_packets: u64,
}

/// A peer as WireGuard knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireguardPeer {
    /// What it is known by.
    pub public_key: String,
    /// Where its datagrams last came from, or where its lease says that it is.
    pub endpoint: Option<SocketAddr>,
    /// When both last agreed on keys, in seconds since 1970; nothing if they never did.
    pub last_handshake_unix: Option<u64>,
    /// Bytes of datagrams from it, handshakes included, since the device was made.
    pub received_bytes: u64,
    /// Bytes of datagrams to it, likewise.
    pub sent_bytes: u64,
}

/// What charon has agreed on with a peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpsecPeer {
    /// Since when each has proved itself to the other (IKE SA), in seconds since 1970; nothing if
    /// they have not.
    pub established_unix: Option<u64>,
    /// Since when there are the keys in use for packets (CHILD SA), likewise.
    pub installed_unix: Option<u64>,
    /// Bytes of packets from it with these keys.
    pub received_bytes: u64,
    /// Bytes of packets to it, likewise.
    pub sent_bytes: u64,
}

impl Peer {
    /// Its subnets.
    pub fn subnets(&self) -> Option<Prefixes> {
        Prefixes::new(self.subnet, self.ipv6_subnet)
    }

    /// Its subnet of IPv4, or else of IPv6, as a text.
    pub fn shown_subnet(&self) -> String {
        self.subnets().map(|subnets| subnets.first().to_string()).unwrap_or_default()
    }

    /// A peer of which nothing else is known.
    pub fn new(subnets: Prefixes, node: Option<String>, via: Via, state: PeerState) -> Self {
        Self {
            subnet: subnets.v4(),
            ipv6_subnet: subnets.v6(),
            node,
            via,
            ipv6_via: None,
            backend: None,
            lease_expires_unix: None,
            state,
            why: None,
            heard_seconds_ago: None,
            in_use_seconds: None,
            round_trip_microseconds: None,
            path_mtu_bytes: None,
            from_source_ports: None,
            traffic: None,
            failed_sends: None,
            fast_path: None,
            wireguard: None,
            ipsec: None,
        }
    }
}

#[cfg(test)]
impl WireguardPeer {
    /// One that has moved, with some traffic.
    pub(crate) fn sample(last_handshake_unix: Option<u64>) -> Self {
        Self {
            public_key: "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=".to_owned(),
            endpoint: "198.51.100.7:4242".parse().ok(),
            last_handshake_unix,
            received_bytes: 2000,
            sent_bytes: 3000,
        }
    }
}
