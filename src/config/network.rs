//! The cluster's network configuration: the JSON under `<prefix>/config`, with flannel's
//! defaults, checks and messages.

use std::net::Ipv4Addr;

use crate::route::Prefix;

/// The cluster's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkConfig {
    /// The flat network of all pods.
    pub network: Prefix,
    /// Length of each host's subnet.
    pub subnet_length_bits: u8,
    /// First subnet that may be leased.
    pub subnet_min: Ipv4Addr,
    /// Last subnet that may be leased.
    pub subnet_max: Ipv4Addr,
    /// Whether rules go through nftables instead of iptables.
    pub enable_nftables: bool,
    /// How packets travel between hosts.
    pub backend: BackendConfig,
}

/// How packets travel between hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendConfig {
    /// The type in lower case; `udp` when the configuration names no backend.
    pub kind: String,
    /// The whole `Backend` object, for the backend to read its own keys.
    pub settings: serde_json::Value,
}
