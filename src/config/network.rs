//! The cluster's network configuration: the JSON under `<prefix>/config`, with flannel's
//! defaults, checks and messages. Pure: bytes in, a checked configuration or an error out.

mod backends;
mod cloud;
mod json;
mod range;

use std::net::Ipv6Addr;

use serde_json::{Map, Value};

use crate::backend_kind::{BackendKind, BackendName};
use crate::route::{Families, Prefixes};

pub use backends::{
    CommandLine, ExtensionBackendConfig, IpsecBackendConfig, UdpBackendConfig, VxlanBackendConfig,
    WireguardBackendConfig, WireguardMode, flag, shown,
};
pub use cloud::{AccessKey, CloudBackendConfig};
pub use json::NetworkConfigError;
pub(crate) use json::member;
use json::{boolean, wrong_type};
pub use range::{ConfigFamily, SubnetRange};

/// Largest configuration that is read. Real ones have a few hundred bytes; the store's value is
/// input from outside, and etcd itself allows 1.5 MiB.
pub const CONFIG_BYTES_MAX: usize = 64 * 1024;

/// The cluster's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Where the subnets of each family come from.
    pub ranges: Families<SubnetRange, SubnetRange<Ipv6Addr>>,
    /// Whether rules go through nftables instead of iptables.
    pub enable_nftables: bool,
    /// How packets travel between hosts.
    pub backend: BackendConfig,
}

/// How packets travel between hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendConfig {
    /// The type, in lower case; udp when the configuration names no backend.
    pub kind: BackendName,
    /// The whole `Backend` object, for the backend to read its own keys. An empty object when
    /// the configuration names no backend. No two keys differ only in case.
    pub settings: Value,
}

impl NetworkConfig {
    /// Reads the JSON under `<prefix>/config` as flannel does: keys in any case, and unknown keys
    /// are ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, NetworkConfigError> {
        if bytes.len() > CONFIG_BYTES_MAX {
            return Err(NetworkConfigError::Invalid(format!(
                "the network configuration has {} bytes, more than the {CONFIG_BYTES_MAX} allowed",
                bytes.len()
            )));
        }
        let members: Option<Map<String, Value>> =
            serde_json::from_slice(bytes).map_err(NetworkConfigError::Syntax)?;
        let config = Value::Object(members.unwrap_or_default());
        json::check_keys(&config)?;
        let member = |key| member(&config, key);
        let flag = |key, default| boolean(key, member(key), default);
        let backend = backend(member("Backend"))?;
        // The keys of a family that nodes do not have are not looked at.
        let v4 = flag("EnableIPv4", true)?.then(|| SubnetRange::parse(&config)).transpose()?;
        let v6 = flag("EnableIPv6", false)?.then(|| SubnetRange::parse(&config)).transpose()?;
        let ranges = Families::new(v4, v6).ok_or(NetworkConfigError::NoFamily)?;
        let enable_nftables = flag("EnableNFTables", false)?;
        Ok(Self { ranges, enable_nftables, backend })
    }

    /// The configuration with every default spelled out: [`NetworkConfig::parse`] reads the same
    /// back.
    pub fn to_json(&self) -> Value {
        let Self { enable_nftables, backend, .. } = self;
        let (v4, v6) = (self.v4(), self.v6());
        let mut value = serde_json::json!({
            "EnableIPv6": v6.is_some(),
            "EnableNFTables": enable_nftables,
        });
        match v4 {
            Some(v4) => v4.write(&mut value),
            None => value["EnableIPv4"] = false.into(),
        }
        if let Some(v6) = v6 {
            v6.write(&mut value);
        }
        // Only a configuration that names no backend has empty settings.
        if backend.settings.as_object().is_some_and(|settings| !settings.is_empty()) {
            value["Backend"] = backend.settings.clone();
        }
        value
    }

    /// Where IPv4 subnets come from, if nodes have any.
    pub fn v4(&self) -> Option<SubnetRange> {
        self.ranges.v4()
    }

    /// Where IPv6 subnets come from, if nodes have any.
    pub fn v6(&self) -> Option<SubnetRange<Ipv6Addr>> {
        self.ranges.v6()
    }

    /// The networks of each family.
    pub fn networks(&self) -> Prefixes {
        self.ranges.map(|range| range.network, |range| range.network)
    }

    /// The first and the last subnets that may be leased.
    pub fn bounds(&self) -> [Prefixes; 2] {
        let bounds = self.ranges.map(|range| range.bounds(), |range| range.bounds());
        [0, 1].map(|end| bounds.map(|v4| v4[end], |v6| v6[end]))
    }

    /// What of `subnets` may be leased here.
    pub fn leasable(&self, subnets: Prefixes) -> Option<Prefixes> {
        let (range_v4, range_v6) = (self.v4(), self.v6());
        let v4 = subnets.v4().filter(|it| range_v4.is_some_and(|range| range.leasable(*it)));
        let v6 = subnets.v6().filter(|it| range_v6.is_some_and(|range| range.leasable(*it)));
        Prefixes::new(v4, v6)
    }

    /// Whether `subnets` are what a node leases here: one of each family, and no other.
    pub fn is_leasable(&self, subnets: Prefixes) -> bool {
        let has_all = (subnets.v4().is_some(), subnets.v6().is_some())
            == (self.v4().is_some(), self.v6().is_some());
        has_all && self.leasable(subnets) == Some(subnets)
    }
}

fn backend(given: Option<&Value>) -> Result<BackendConfig, NetworkConfigError> {
    let Some(settings) = given else {
        let settings = serde_json::json!({});
        return Ok(BackendConfig { kind: BackendKind::Udp.into(), settings });
    };
    if !settings.is_object() && !settings.is_null() {
        return Err(wrong_type("Backend", "an object with a Type", settings));
    }
    json::check_keys(settings)?;
    match member(settings, "Type") {
        None | Some(Value::Null) => Err(NetworkConfigError::NoBackendType),
        Some(Value::String(kind)) if kind.is_empty() => Err(NetworkConfigError::NoBackendType),
        Some(Value::String(kind)) => {
            let kind = kind.to_lowercase().as_str().into();
            Ok(BackendConfig { kind, settings: settings.clone() })
        }
        Some(other) => Err(wrong_type("Backend.Type", "a string", other)),
    }
}

#[cfg(test)]
mod tests;
