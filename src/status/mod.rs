//! What weftd says of itself: the answers of its status socket. weftd fills these types in once,
//! and JSON, metrics and what `weft` shows are made of them; the comments on their fields are the
//! schema.
//!
//! Fields are only ever added, and those that are replaced stay for one release. So a reader
//! ignores what it does not know, and what an older weftd does not say is absent or has its
//! default.

mod pages;
mod peer;
mod verdict;
mod workers;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::backend_kind::BackendKind;
use crate::route::{IpAddress, Prefix, Prefixes};

pub use self::pages::{Config, Drops, Peers, Sample, Setting, Way};
pub use self::peer::{Handshakes, IpsecPeer, Peer, PeerState, Via, WireguardPeer};
pub use self::verdict::{Cause, Fault, State, Verdict};
pub use self::workers::{
    Direction, FastPath, Lately, SWITCHED_OFF, Traffic, Worker, WorkerCounts, counted,
};

/// Of all JSON, weftd's and the tool's. 2 added, among others, `verdict.faults`, `tunnel` and
/// `process`.
pub const SCHEMA: u32 = 2;

/// The answer to `/status`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The [`SCHEMA`] of who answers.
    pub schema: u32,
    /// The release of weftd.
    pub version: String,
    /// What `/readyz` says.
    pub ready: bool,
    /// The sum of it all.
    pub verdict: Verdict,
    /// Whether lease and peers are from the cache, and not confirmed yet.
    pub stale: bool,
    /// Of which time they are then, in seconds since 1970.
    pub stale_as_of_unix: Option<u64>,
    /// The start, until it is over. Since schema 2.
    pub start: Option<Start>,
    /// Leases, and the store that they are in.
    pub store: Store,
    /// Whether the store has another network configuration than the one in use.
    pub restart_needed: bool,
    /// The file for a start without the store.
    pub cache: Cache,
    /// Nodes with a lease, this one aside.
    pub peers: usize,
    /// Those of them in their grace period: their leases vanished, with most others at once.
    pub peers_held: usize,
    /// This host's lease; nothing, as in all that follows, before the backend runs.
    pub lease: Option<Lease>,
    /// The interface that carries the tunnel, by the name that it has now.
    pub interface: Option<String>,
    /// How often it lost its carrier in the last ten minutes. Since schema 2.
    pub carrier_lost_lately: u64,
    /// The overlay's own device, if it has one.
    pub device: Option<String>,
    /// The one of IPv6, if that has one of its own. Since schema 2.
    pub ipv6_device: Option<String>,
    /// The dataplane in one line, for people.
    pub dataplane: Option<String>,
    /// Whether packets can flow; false while the dataplane is made again. Since schema 2.
    pub dataplane_is_up: Option<bool>,
    /// Why they can't, or what else is wrong with it. Since schema 2.
    pub dataplane_wrong: Option<String>,
    /// What `--peer-check` is, where workers go by it. Since schema 2.
    pub peer_check: Option<String>,
    /// Where the tunnel's datagrams arrive, if there is a tunnel. Since schema 2.
    #[serde(deserialize_with = "if_known")]
    pub tunnel: Option<TunnelEnd>,
    /// `subnet.env`.
    pub subnet_file: Option<SubnetFile>,
    /// The masquerade and forward rules, if any are kept.
    pub rules: Option<Rules>,
    /// The guard of the tunnel's port, if one is kept.
    pub guard: Option<Guard>,
    /// Packets that the kernel dropped, by the device.
    pub device_drops: BTreeMap<String, DeviceDrops>,
    /// The backend.
    pub backend: Option<Backend>,
    /// How many peers are in which state.
    pub peer_states: BTreeMap<PeerState, usize>,
    /// Subnets behind paths that are narrower than the overlay's MTU.
    pub narrow_paths: usize,
    /// The first thousand peers; `/peers` has all.
    pub routes: Vec<Peer>,
    /// What the kernel's programs carry of the udp backend's packets.
    pub fast_path: Option<FastPath>,
    /// The sum of the workers' packets from pods to the network.
    pub egress: Option<Direction>,
    /// The sum of those from the network to pods.
    pub ingress: Option<Direction>,
    /// Those dropped in the last ten minutes, by reason; nothing if nobody looks. Since schema 2.
    pub drops_lately: Option<BTreeMap<String, Lately>>,
    /// What became of WireGuard's handshakes, where weftd's workers carry its packets.
    pub handshakes: Option<Handshakes>,
    /// The sum of what else workers count.
    pub worker: Option<WorkerCounts>,
    /// The workers, of which these are the sums.
    pub workers: Vec<Worker>,
    /// weftd's process. Since schema 2.
    pub process: Option<Process>,
    /// Errors in weftd's own code, outside the workers, which the log shows. Since schema 2.
    pub internal_errors: u64,
    /// Log messages by level, those that were held back as well. Since schema 2.
    pub log_messages: BTreeMap<String, u64>,
}

/// A start that is not over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    /// What it is at.
    pub step: String,
    /// Why it does not get on with that.
    pub hindrance: Option<Hindrance>,
}

/// What keeps something from going on, for as long as it does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hindrance {
    /// What it is, and what to do about it.
    pub text: String,
    /// Since when there has been one, in seconds since 1970.
    pub since_unix: u64,
    /// How often it was met.
    pub tries: u64,
}

/// The store, and what this node has in it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Store {
    /// Whether the last exchange succeeded.
    pub up: bool,
    /// When the store last answered, in seconds since 1970. Since schema 2.
    pub answered_unix: Option<u64>,
    /// Why the last exchanges did not succeed. Since schema 2.
    pub hindrance: Option<Hindrance>,
    /// When the own lease ends, in seconds since 1970; nothing for a reservation or without one.
    pub lease_expires_unix: Option<u64>,
    /// Renewals of the own lease.
    pub renewals: u64,
    /// Exchanges that failed.
    pub failures: u64,
    /// What the store refuses, and what to do about it, until it does it again.
    pub refused: Option<String>,
    /// Times that somebody else wrote the own lease with this node's PublicIP.
    pub written_by_others: u64,
    /// The other node that has the PublicIP, while there is one.
    pub duplicate_public_ip: Option<String>,
    /// Tries to get a subnet that found none free.
    pub subnets_exhausted: u64,
    /// Entries that were ignored so far, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Entries that are not used now, by reason. Since schema 2.
    pub unused: BTreeMap<String, u64>,
    /// One of them, and what is wrong with it. Since schema 2.
    pub unused_example: Option<String>,
    /// Whether the cluster assigned another subnet to this node than the one it goes on with.
    pub subnet_refused: bool,
    /// That other subnet, if it can be used.
    pub refused_subnet: Option<Prefix>,
}

/// Writing of the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cache {
    /// Times that it was written.
    pub writes: u64,
    /// Times that this failed.
    pub failures: u64,
}

/// This host's lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The whole overlay; nothing where nodes have no IPv4, as the next two.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub network: Option<Prefix>,
    /// This host's part of it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub subnet: Option<Prefix>,
    /// The address that peers send to.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub public_ip: Option<Ipv4Addr>,
    /// The overlay's MTU.
    pub mtu_bytes: u32,
    /// The same of IPv6, if nodes have it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipv6: Option<LeaseIpv6>,
}

/// This host's lease of IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseIpv4 {
    /// The whole overlay.
    pub network: Prefix,
    /// This host's part of it.
    pub subnet: Prefix,
    /// The address that peers send to.
    pub public_ip: Ipv4Addr,
}

impl Lease {
    /// What it has of IPv4.
    pub fn ipv4(&self) -> Option<LeaseIpv4> {
        let Self { network, subnet, public_ip, .. } = *self;
        Some(LeaseIpv4 { network: network?, subnet: subnet?, public_ip: public_ip? })
    }

    /// The whole overlay.
    pub fn networks(&self) -> Option<Prefixes> {
        Prefixes::new(self.network, self.ipv6.map(|ipv6| ipv6.network))
    }

    /// This host's part of it.
    pub fn subnets(&self) -> Option<Prefixes> {
        Prefixes::new(self.subnet, self.ipv6.map(|ipv6| ipv6.subnet))
    }

    /// The address by which others know this host.
    pub fn node_address(&self) -> Option<IpAddr> {
        let v6 = || self.ipv6.and_then(|ipv6| ipv6.public_ip).map(IpAddr::V6);
        self.public_ip.map(IpAddr::V4).or_else(v6)
    }
}

/// This host's lease of IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseIpv6 {
    /// The whole overlay.
    pub network: Prefix<Ipv6Addr>,
    /// This host's part of it.
    pub subnet: Prefix<Ipv6Addr>,
    /// The address that peers send to, if that is of IPv6: the udp backend's is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<Ipv6Addr>,
}

/// What tells a datagram of the tunnel from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TunnelEnd {
    /// Its destination.
    Udp(SocketAddr),
    /// Its destination's port and its VXLAN network identifier.
    Vxlan {
        /// The UDP port.
        port: u16,
        /// The identifier.
        vni: u32,
    },
    /// Its destination's port, on any address; the key tells the rest.
    Wireguard {
        /// The UDP port over IPv4, or over both.
        port: u16,
        /// The UDP port over IPv6.
        ipv6_port: u16,
    },
}

impl TunnelEnd {
    /// The UDP port.
    pub fn port(self) -> u16 {
        match self {
            Self::Udp(address) => address.port(),
            Self::Vxlan { port, .. } | Self::Wireguard { port, .. } => port,
        }
    }

    /// The UDP port over IPv6.
    pub fn ipv6_port(self) -> u16 {
        if let Self::Wireguard { ipv6_port, .. } = self { ipv6_port } else { self.port() }
    }
}

/// Writing of `subnet.env`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SubnetFile {
    /// Whether it is written as it should be. Since schema 2.
    pub written: bool,
    /// Tries that failed.
    pub failures: u64,
}

/// The firewall's rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rules {
    /// `iptables` or `nftables`.
    pub kept_by: String,
    /// How they are.
    #[serde(flatten)]
    pub kept: Kept,
}

/// Something that is looked at from time to time, and restored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kept {
    /// Whether the last look found it.
    pub in_place: bool,
    /// Whether nothing has to wait for it any more. Since schema 2.
    pub settled: bool,
    /// Looks that succeeded.
    pub checks: u64,
    /// Looks that found it changed.
    pub repairs: u64,
    /// Looks or repairs that failed.
    pub failures: u64,
}

/// The guard of the tunnel's port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Guard {
    /// The UDP port; nothing with WireGuard, where it keeps out packets in the clear.
    pub port: Option<u16>,
    /// Addresses that it lets in to that.
    pub peers: usize,
    /// Packets of strangers that it dropped, as of the last look.
    pub dropped_from_strangers: u64,
    /// The same for pods that posed as this host.
    pub dropped_from_pods: u64,
    /// How its rules are.
    #[serde(flatten)]
    pub kept: Kept,
}

/// What the kernel dropped at a device, since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceDrops {
    /// Packets that it was to send.
    pub egress: u64,
    /// Packets that it had received.
    pub ingress: u64,
}

/// The backend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Backend {
    /// Its kind.
    #[serde(deserialize_with = "if_known")]
    pub kind: Option<BackendKind>,
    /// What was done for it, if weftd's workers don't carry the packets.
    #[serde(flatten)]
    pub done: Option<BackendCounts>,
}

/// Counts of a backend whose packets weftd never sees.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendCounts {
    /// Peers that are set up in full.
    pub peers_programmed: u64,
    /// Peers that should be and are not: refused by the kernel, or by a command.
    pub peers_failed: u64,
    /// Leases of nodes with another backend.
    pub leases_ignored: u64,
    /// Leases of this backend whose data is invalid.
    pub leases_unusable: u64,
    /// Edits and commands that failed, ever.
    pub failures: u64,
    /// Routes, entries and devices that somebody removed and that were restored, ever.
    pub repairs: u64,
}

/// weftd's process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Processor time of all threads.
    pub processor_seconds: f64,
    /// Resident memory.
    pub resident_bytes: u64,
    /// Open file descriptors.
    pub open_files: u64,
    /// When it started, in seconds since 1970.
    pub start_unix: u64,
}

/// What only a later release has a word for counts as absent.
fn if_known<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    input: D,
) -> Result<Option<T>, D::Error> {
    Ok(serde_json::from_value(serde_json::Value::deserialize(input)?).ok())
}

impl<A: IpAddress> Serialize for Prefix<A> {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        output.collect_str(self)
    }
}

impl<'de, A: IpAddress> Deserialize<'de> for Prefix<A> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        String::deserialize(input)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests;
