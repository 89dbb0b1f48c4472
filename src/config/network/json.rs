//! Go's JSON habits that serde_json does not have: keys match in any case, the last of several
//! wins, `null` changes nothing unless the value is an address. Knows the keys, not their meaning,
//! and what is said of values that can't be used.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// How `Network` is written.
pub(super) const NETWORK_FORM: &str = "an IPv4 network such as \"10.5.0.0/16\"";
/// How `SubnetMin` and `SubnetMax` are written.
pub(super) const ADDRESS_FORM: &str = "an IPv4 address such as \"10.5.16.0\"";

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NetworkConfigError {
    /// The configuration names a backend without its type.
    #[error("unknown backend type \"\": give Backend a Type such as \"udp\", or leave Backend out")]
    NoBackendType,
    /// No JSON, or not an object.
    #[error("the network configuration is not a JSON object")]
    Syntax(#[source] serde_json::Error),
    /// Which key, what is wrong with its value, what would be right; in flannel's words where
    /// flannel has some.
    #[error("{0}")]
    Invalid(String),
}

/// The configuration's values; `null` where absent.
#[derive(Debug, Default)]
pub(super) struct RawConfig {
    pub(super) network: Value,
    pub(super) subnet_length: Value,
    pub(super) subnet_min: Value,
    pub(super) subnet_max: Value,
    pub(super) enable_ipv4: Value,
    pub(super) enable_ipv6: Value,
    pub(super) enable_nftables: Value,
    /// Unlike elsewhere, absent and `null` differ here.
    pub(super) backend: Option<Value>,
}

impl RawConfig {
    /// Splits the configuration into its keys.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, NetworkConfigError> {
        let Members(members) = serde_json::from_slice(bytes).map_err(NetworkConfigError::Syntax)?;
        let mut raw = Self::default();
        for (key, text) in members {
            let slot = match key.to_ascii_lowercase().as_str() {
                "network" => &mut raw.network,
                "subnetlen" => &mut raw.subnet_length,
                "subnetmin" => &mut raw.subnet_min,
                "subnetmax" => &mut raw.subnet_max,
                "enableipv4" => &mut raw.enable_ipv4,
                "enableipv6" => &mut raw.enable_ipv6,
                "enablenftables" => &mut raw.enable_nftables,
                "backend" => {
                    raw.backend = Some(read_merged(&text)?);
                    continue;
                }
                _ => continue,
            };
            let value: Value = read(&text)?;
            if !value.is_null() {
                *slot = value;
            } else if let Some((key, expected)) = address_key(&key) {
                return Err(wrong(key, expected, &value));
            }
        }
        Ok(raw)
    }
}

/// The keys that flannel reads with parsers of its own, which refuse `null`.
fn address_key(key: &str) -> Option<(&'static str, &'static str)> {
    const KEYS: [(&str, &str); 3] =
        [("Network", NETWORK_FORM), ("SubnetMin", ADDRESS_FORM), ("SubnetMax", ADDRESS_FORM)];
    KEYS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(key))
}

/// The member of `object` called `name` in any case.
pub(super) fn member<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    let members = object.as_object()?;
    members.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

/// Reads a value; in an object, of keys that differ only in case the last stays.
fn read_merged(text: &RawValue) -> Result<Value, NetworkConfigError> {
    if !text.get().starts_with('{') {
        return read(text);
    }
    let Members(members) = read(text)?;
    let mut merged = Map::new();
    for (key, text) in members {
        merged.retain(|other, _| !other.eq_ignore_ascii_case(&key));
        merged.insert(key, read(&text)?);
    }
    Ok(Value::Object(merged))
}

fn read<'de, T: Deserialize<'de>>(text: &'de RawValue) -> Result<T, NetworkConfigError> {
    serde_json::from_str(text.get()).map_err(NetworkConfigError::Syntax)
}

/// The members of an object in the order written; `null` has none, as in Go.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E>(self) -> Result<Members, E> {
        Ok(Members(Vec::new()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Members(members))
    }
}

pub(super) fn boolean(key: &str, value: &Value, default: bool) -> Result<bool, NetworkConfigError> {
    if value.is_null() {
        return Ok(default);
    }
    value.as_bool().ok_or_else(|| wrong(key, "true or false", value))
}

pub(super) fn wrong(key: &str, expected: &str, value: &Value) -> NetworkConfigError {
    /// Enough to recognise the value in a log line.
    const SHOWN_CHARACTERS_MAX: usize = 60;
    let mut found: String = value.to_string().chars().take(SHOWN_CHARACTERS_MAX + 1).collect();
    if found.chars().count() > SHOWN_CHARACTERS_MAX {
        found.pop();
        found.push('…');
    }
    NetworkConfigError::Invalid(format!(
        "{key} in the network configuration must be {expected}, it is {found}"
    ))
}
