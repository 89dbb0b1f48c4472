//! The cluster's network configuration: the JSON under `<prefix>/config`, with flannel's
//! defaults, checks and messages. Pure: bytes in, a checked configuration or an error out.

mod backends;
mod json;

use std::net::Ipv4Addr;

use serde_json::{Map, Value};

use crate::backend_kind::{BackendKind, BackendName};
use crate::route::Prefix;

pub use backends::{
    CommandLine, ExtensionBackendConfig, UdpBackendConfig, VxlanBackendConfig, shown,
};
pub use json::NetworkConfigError;
use json::{boolean, wrong};

/// Largest configuration that is read. Real ones have a few hundred bytes; the store's value is
/// input from outside, and etcd itself allows 1.5 MiB.
pub const CONFIG_BYTES_MAX: usize = 64 * 1024;

/// Hosts get a /24 from networks up to this length: at least four of them fit.
const NETWORK_LENGTH_FOR_DEFAULT_SUBNETS: u8 = 22;
/// Length of a host's subnet in such a network.
const SUBNET_LENGTH_DEFAULT: u8 = 24;
/// Smaller networks are split into four, and so is the least that an explicit length must leave.
const SUBNET_LENGTH_BEYOND_NETWORK: u8 = 2;
/// A subnet needs four addresses.
const SUBNET_LENGTH_MAX: u8 = 30;
/// Four subnets of four addresses each.
const NETWORK_LENGTH_MAX: u8 = 28;

/// What hosts forward no packets of, by the first octet (RFC 6890), and what it is. 240.0.0.0/4 is
/// none of them: Linux forwards it, and some networks have nothing else left.
const NO_PODS: [(u8, u8, &str); 3] = [
    (0, 0, "0.0.0.0/8, which stands for no host"),
    (127, 127, "127.0.0.0/8, which is each host's own"),
    (224, 239, "224.0.0.0/4, which is for multicast"),
];

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
        let member = |key| json::member(&config, key);
        let flag = |key, default| boolean(key, member(key), default);
        let backend = backend(member("Backend"))?;
        check_families(flag("EnableIPv4", true)?, flag("EnableIPv6", false)?)?;
        let network = network(member("Network"))?;
        let subnet_length_bits = subnet_length(member("SubnetLen"), network)?;
        let bound = |key| bound(key, member(key), network, subnet_length_bits);
        // The first subnet is left out by default: its network address is the whole network's.
        let (first, last) = default_bounds(network, subnet_length_bits);
        let subnet_min = bound("SubnetMin")?.unwrap_or(first);
        let subnet_max = bound("SubnetMax")?.unwrap_or(last);
        if subnet_min > subnet_max {
            return Err(NetworkConfigError::Invalid(format!(
                "SubnetMin {subnet_min} is above SubnetMax {subnet_max}, so no subnet can be leased"
            )));
        }
        let enable_nftables = flag("EnableNFTables", false)?;
        Ok(Self { network, subnet_length_bits, subnet_min, subnet_max, enable_nftables, backend })
    }

    /// The configuration with every default spelled out: [`NetworkConfig::parse`] reads the same
    /// back.
    pub fn to_json(&self) -> Value {
        let Self { network, subnet_length_bits, subnet_min, subnet_max, enable_nftables, backend } =
            self;
        let mut value = serde_json::json!({
            "Network": network.to_string(),
            "SubnetLen": subnet_length_bits,
            "SubnetMin": subnet_min.to_string(),
            "SubnetMax": subnet_max.to_string(),
            "EnableNFTables": enable_nftables,
        });
        // Only a configuration that names no backend has empty settings.
        if backend.settings.as_object().is_some_and(|settings| !settings.is_empty()) {
            value["Backend"] = backend.settings.clone();
        }
        value
    }

    /// Whether `subnet` may be leased: of the right length and between the bounds.
    pub fn leasable(&self, subnet: Prefix) -> bool {
        subnet.length_bits() == self.subnet_length_bits
            && (self.subnet_min..=self.subnet_max).contains(&subnet.network())
    }
}

fn backend(given: Option<&Value>) -> Result<BackendConfig, NetworkConfigError> {
    let Some(settings) = given else {
        let settings = serde_json::json!({});
        return Ok(BackendConfig { kind: BackendKind::Udp.into(), settings });
    };
    if !settings.is_object() && !settings.is_null() {
        return Err(wrong("Backend", "an object with a Type", settings));
    }
    json::check_keys(settings)?;
    match json::member(settings, "Type") {
        None | Some(Value::Null) => Err(NetworkConfigError::NoBackendType),
        Some(Value::String(kind)) if kind.is_empty() => Err(NetworkConfigError::NoBackendType),
        Some(Value::String(kind)) => {
            let kind = kind.to_lowercase().as_str().into();
            Ok(BackendConfig { kind, settings: settings.clone() })
        }
        Some(other) => Err(wrong("Backend.Type", "a string", other)),
    }
}

fn check_families(has_ipv4: bool, has_ipv6: bool) -> Result<(), NetworkConfigError> {
    let unbuilt = if has_ipv6 {
        "IPv6 (EnableIPv6) is not built into this weftd: set EnableIPv6 to false or run flanneld"
    } else if !has_ipv4 {
        "a network without IPv4 (EnableIPv4 is false) is not built into this weftd: leave \
         EnableIPv4 out or set it to true"
    } else {
        return Ok(());
    };
    Err(NetworkConfigError::Invalid(unbuilt.to_owned()))
}

fn network(given: Option<&Value>) -> Result<Prefix, NetworkConfigError> {
    let network: Option<Prefix> = given.and_then(Value::as_str).and_then(|it| it.parse().ok());
    match (network, given) {
        // flannel takes 0.0.0.0/0 for "not given".
        (Some(network), _) if network.length_bits() > 0 => check_forwarded(network),
        (None, Some(other)) => {
            Err(wrong("Network", "an IPv4 network such as \"10.5.0.0/16\"", other))
        }
        (Some(_), _) | (None, None) => Err(NetworkConfigError::Invalid(
            "please define a correct Network parameter in the flannel config, such as 10.5.0.0/16"
                .to_owned(),
        )),
    }
}

fn check_forwarded(network: Prefix) -> Result<Prefix, NetworkConfigError> {
    let [first, last] = [network.network(), network.last()].map(|address| address.octets()[0]);
    match NO_PODS.iter().find(|(from, to, _)| first <= *to && last >= *from) {
        None => Ok(network),
        Some((.., what)) => Err(NetworkConfigError::Invalid(format!(
            "Network {network} has addresses of {what}: no host forwards their packets; choose a \
             private network, such as 10.5.0.0/16"
        ))),
    }
}

fn subnet_length(given: Option<&Value>, network: Prefix) -> Result<u8, NetworkConfigError> {
    let wanted = match given {
        None | Some(Value::Null) => 0,
        Some(value) => {
            value.as_u64().ok_or_else(|| wrong("SubnetLen", "a number from 1 to 30", value))?
        }
    };
    let network_length = network.length_bits();
    let shortest = network_length + SUBNET_LENGTH_BEYOND_NETWORK;
    let problem = match u8::try_from(wanted) {
        Ok(0) if network_length <= NETWORK_LENGTH_FOR_DEFAULT_SUBNETS => {
            return Ok(SUBNET_LENGTH_DEFAULT);
        }
        Ok(0) if network_length <= NETWORK_LENGTH_MAX => return Ok(shortest),
        Ok(0) => {
            format!("network is too small. Minimum useful network prefix is /28, it is {network}")
        }
        Ok(length) if length <= SUBNET_LENGTH_MAX && length >= shortest => return Ok(length),
        Ok(..=SUBNET_LENGTH_MAX) => format!(
            "network must be able to accommodate at least four subnets: {network} in /{wanted}"
        ),
        Ok(_) | Err(_) => format!("SubnetLen must be less than /31, it is {wanted}"),
    };
    Err(NetworkConfigError::Invalid(problem))
}

/// The second and the last subnet.
fn default_bounds(network: Prefix, subnet_length_bits: u8) -> (Ipv4Addr, Ipv4Addr) {
    let subnet_addresses = 1_u32 << (32 - u32::from(subnet_length_bits));
    let first = network.network().to_bits() + subnet_addresses;
    let last = network.last().to_bits() - (subnet_addresses - 1);
    (Ipv4Addr::from_bits(first), Ipv4Addr::from_bits(last))
}

/// Reads `SubnetMin` or `SubnetMax`. As in flannel, 0.0.0.0 stands for "not given".
fn bound(
    key: &str,
    given: Option<&Value>,
    network: Prefix,
    length: u8,
) -> Result<Option<Ipv4Addr>, NetworkConfigError> {
    let Some(value) = given else { return Ok(None) };
    let address: Option<Ipv4Addr> = value.as_str().and_then(|text| text.parse().ok());
    let address =
        address.ok_or_else(|| wrong(key, "an IPv4 address such as \"10.5.16.0\"", value))?;
    if address.is_unspecified() {
        return Ok(None);
    }
    if !network.contains(address) {
        return Err(NetworkConfigError::Invalid(format!(
            "{key} is not in the range of the Network: {address} is outside {network}"
        )));
    }
    if Prefix::new(address, length).is_none_or(|subnet| subnet.network() != address) {
        return Err(NetworkConfigError::Invalid(format!(
            "{key} is not on a SubnetLen boundary: {address} with /{length}"
        )));
    }
    Ok(Some(address))
}

#[cfg(test)]
mod tests;
