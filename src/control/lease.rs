//! The lease of a node: its key and its JSON value, byte-compatible with
//! flannel's etcd schema. Pure: bytes in, types out.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use serde::de::Error;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::backend_kind::{BackendKind, BackendName};
use crate::control::clock;
use crate::control::rejected::{RejectReason, Rejected};
use crate::failure::with_causes;
use crate::route::{Prefix, Prefixes};
use crate::words::visible;

/// Longest value accepted or written. flannel's longest, WireGuard over both families, has about
/// 400 bytes.
pub const VALUE_BYTES_MAX: usize = 4096;
/// Longest key accepted: a dual-stack key has at most 62 characters.
const KEY_CHARS_MAX: usize = 64;
/// Most of a text in place of an address that is shown: no address has more than 45 characters.
const SHOWN_CHARS_MAX: usize = 64;

/// All other nodes by those of their subnets that lie in the network. The leases are shared with
/// what shows the store: of thousands, one copy is enough.
pub type Peers = BTreeMap<Prefixes, Arc<Lease>>;

/// The subnets of one node, and what it publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The subnets of the node's pods.
    pub subnets: Prefixes,
    /// The key below `subnets/`, as it is spelled there.
    pub key: String,
    /// What the node publishes.
    pub attributes: LeaseAttributes,
    /// The store's version of this entry: equal only if nobody wrote in between; 0 if no store has
    /// it yet.
    pub revision: i64,
    /// When the entry was made, in revisions; 0 in a store that does not know.
    pub created_revision: i64,
    /// How long the node may keep the subnet.
    pub lifetime: Lifetime,
}

/// How long a node may keep its subnet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// For ever: an operator assigned the subnet.
    Reservation,
    /// Until the lease runs out.
    Leased {
        /// The etcd lease; 0 in the local store, and before there is one.
        id: i64,
        /// Seconds since 1970, where the store shows it: etcd does not for other nodes.
        expires_unix: Option<u64>,
    },
}

/// The value under a lease's key. Fields are written in flannel's order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeaseAttributes {
    /// Where the node receives packets, if it has an IPv4 address for that. As in flannel's,
    /// 0.0.0.0 stands for none.
    #[serde(rename = "PublicIP", serialize_with = "none_as_unspecified")]
    pub public_ip: Option<Ipv4Addr>,
    /// The same for IPv6.
    #[serde(rename = "PublicIPv6")]
    pub public_ipv6: Option<Ipv6Addr>,
    /// What stands there in place of an address, as it may be shown: it costs IPv6 alone.
    #[serde(skip)]
    pub unreadable_ipv6: Option<String>,
    /// The backend.
    #[serde(rename = "BackendType", skip_serializing_if = "BackendName::is_udp")]
    pub backend_type: BackendName,
    /// What the backend needs to reach the node.
    #[serde(rename = "BackendData", skip_serializing_if = "Option::is_none")]
    pub backend_data: Option<RawJson>,
    /// The same for IPv6.
    #[serde(rename = "BackendV6Data", skip_serializing_if = "Option::is_none")]
    pub backend_v6_data: Option<RawJson>,
}

/// A JSON text, kept as it was written.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct RawJson(pub Box<RawValue>);

impl PartialEq for RawJson {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

impl Eq for RawJson {}

impl RawJson {
    /// The JSON text of `value`.
    pub fn of(value: &impl Serialize) -> serde_json::Result<Self> {
        serde_json::value::to_raw_value(value).map(Self)
    }

    /// `text`, which is JSON already.
    pub fn from_text(text: String) -> serde_json::Result<Self> {
        RawValue::from_string(text).map(Self)
    }
}

/// Why bytes are no lease value.
#[derive(Debug, thiserror::Error)]
pub enum ValueError {
    /// More bytes than any lease has.
    #[error("the value has {0} bytes; a lease has at most {VALUE_BYTES_MAX}")]
    TooLarge(usize),
    /// Not the JSON of a lease.
    #[error("the value is not a lease such as {{\"PublicIP\":\"192.0.2.1\"}}")]
    Malformed(#[from] serde_json::Error),
}

impl ValueError {
    /// The class, for counters.
    pub(crate) fn reason(&self) -> RejectReason {
        match self {
            Self::TooLarge(_) => RejectReason::TooLarge,
            Self::Malformed(_) => RejectReason::BadValue,
        }
    }
}

impl LeaseAttributes {
    /// The attributes of a udp node.
    pub fn udp(public_ip: Ipv4Addr) -> Self {
        Self::of(BackendKind::Udp, public_ip, None)
    }

    /// The attributes of a node of any backend.
    pub fn of(
        backend_type: impl Into<BackendName>,
        public_ip: Ipv4Addr,
        backend_data: Option<RawJson>,
    ) -> Self {
        Self { backend_data, ..Self::at(backend_type, Some(public_ip), None) }
    }

    /// The attributes of a node that others reach at these addresses, and no more.
    pub fn at(
        backend_type: impl Into<BackendName>,
        public_ip: Option<Ipv4Addr>,
        public_ipv6: Option<Ipv6Addr>,
    ) -> Self {
        Self {
            public_ip: public_ip.filter(|address| !address.is_unspecified()),
            public_ipv6,
            unreadable_ipv6: None,
            backend_type: backend_type.into(),
            backend_data: None,
            backend_v6_data: None,
        }
    }

    /// The address by which others know the node: its PublicIP, and the PublicIPv6 of one that has
    /// no other. 0.0.0.0 is nobody's.
    pub fn node_address(&self) -> IpAddr {
        let v6 = || self.public_ipv6.map(IpAddr::V6);
        let known_by = self.public_ip.map(IpAddr::V4).or_else(v6);
        known_by.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }

    /// Whether both are of one node: of two that have an IPv4 address, that says it. Else that of
    /// IPv6 does, so that a node keeps its subnet when its network loses IPv4, or gets it.
    pub fn is_of_node_of(&self, other: &Self) -> bool {
        match (self.public_ip, other.public_ip) {
            (Some(own), Some(other)) => own == other,
            (None, _) | (_, None) => {
                self.public_ipv6.is_some() && self.public_ipv6 == other.public_ipv6
            }
        }
    }

    /// The value's bytes; an error if it would be larger than readers accept.
    pub fn to_json(&self) -> Result<Vec<u8>, ValueError> {
        let value = serde_json::to_vec(self)?;
        if value.len() > VALUE_BYTES_MAX {
            return Err(ValueError::TooLarge(value.len()));
        }
        Ok(value)
    }

    /// Reads a value as flannel does: keys in any case, unknown ones ignored, the last of equals
    /// wins, a missing `PublicIP` is 0.0.0.0.
    pub fn from_json(value: &[u8]) -> Result<Self, ValueError> {
        Ok(Self::with_end_from_json(value)?.0)
    }

    /// The value's bytes, followed by `Expires` if the lease ends at a time that the local store
    /// writes into it.
    pub(crate) fn to_json_until(&self, expires_unix: Option<u64>) -> Result<Vec<u8>, ValueError> {
        let mut value = self.to_json()?;
        if let Some(expires) = expires_unix {
            // An object with PublicIP in it: the closing brace is last, and a comma may follow.
            value.pop();
            let expires = clock::format_rfc3339(expires);
            value.extend_from_slice(format!(",\"Expires\":\"{expires}\"}}").as_bytes());
        }
        Ok(value)
    }

    /// As [`Self::from_json`], with the time that `Expires` says, in seconds since 1970.
    pub(crate) fn with_end_from_json(value: &[u8]) -> Result<(Self, Option<u64>), ValueError> {
        if value.len() > VALUE_BYTES_MAX {
            return Err(ValueError::TooLarge(value.len()));
        }
        // Of equal names the last one stays.
        let fields: BTreeMap<Name, &RawValue> = serde_json::from_slice(value)?;
        let mut attributes = Self::udp(Ipv4Addr::UNSPECIFIED);
        let mut expires_unix = None;
        for (Name(name), raw) in fields {
            let text = raw.get();
            match name.as_str() {
                "publicip" => {
                    let address: Ipv4Addr = serde_json::from_str(text)?;
                    attributes.public_ip = Some(address).filter(|it| !it.is_unspecified());
                }
                "publicipv6" => match serde_json::from_str(text) {
                    Ok(address) => attributes.public_ipv6 = address,
                    Err(_) => attributes.unreadable_ipv6 = Some(shown(text)),
                },
                "backendtype" => {
                    let kind: Option<String> = serde_json::from_str(text)?;
                    attributes.backend_type = kind.as_deref().unwrap_or_default().into();
                }
                // Go marshals an absent raw message as `null` and reads it back as none.
                "backenddata" if text != "null" => {
                    attributes.backend_data = Some(RawJson(raw.to_owned()));
                }
                "backendv6data" if text != "null" => {
                    attributes.backend_v6_data = Some(RawJson(raw.to_owned()));
                }
                "expires" => expires_unix = parse_expiry(&serde_json::from_str(text)?)?,
                _ => {}
            }
        }
        Ok((attributes, expires_unix))
    }
}

/// The beginning of a text of others.
pub(crate) fn shown(text: &str) -> String {
    visible(&text.chars().take(SHOWN_CHARS_MAX).collect::<String>())
}

#[expect(clippy::ref_option, clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn none_as_unspecified<S: Serializer>(
    address: &Option<Ipv4Addr>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    address.unwrap_or(Ipv4Addr::UNSPECIFIED).serialize(serializer)
}

/// A time as RFC 3339 or as seconds since 1970; `null` and 0 are none.
fn parse_expiry(value: &Value) -> serde_json::Result<Option<u64>> {
    let seconds = match (value.as_str(), value.as_u64()) {
        (Some(text), _) => clock::parse_rfc3339(text),
        (None, Some(0)) => return Ok(None),
        (None, seconds) => seconds,
    };
    if seconds.is_some() || value.is_null() {
        return Ok(seconds);
    }
    let bad = format!("Expires is {value}, not a time such as \"2026-11-21T08:30:00Z\"");
    Err(serde_json::Error::custom(bad))
}

/// A name as Go compares it.
#[derive(PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(from = "String")]
struct Name(String);

impl From<String> for Name {
    fn from(name: String) -> Self {
        Self(name.to_ascii_lowercase())
    }
}

impl Lifetime {
    /// Of a key in etcd, which that etcd lease ends, at a time that only its owner knows; 0 for
    /// none.
    pub(crate) fn etcd(id: i64) -> Self {
        if id == 0 { Self::Reservation } else { Self::Leased { id, expires_unix: None } }
    }

    /// The etcd lease; `None` of a reservation.
    pub(crate) fn id(self) -> Option<i64> {
        if let Self::Leased { id, .. } = self { Some(id) } else { None }
    }

    /// Of an entry of the local store, which says when it ends.
    pub(crate) fn until(expires_unix: Option<u64>) -> Self {
        match expires_unix {
            None => Self::Reservation,
            Some(_) => Self::Leased { id: 0, expires_unix },
        }
    }
}

impl Lease {
    /// To be taken for a while; no store has it yet.
    pub fn wanted(subnets: Prefixes, attributes: LeaseAttributes) -> Self {
        let lifetime = Lifetime::Leased { id: 0, expires_unix: None };
        Self { lifetime, ..Self::reservation(subnets, attributes) }
    }

    /// To be kept for ever; no store has it yet.
    pub fn reservation(subnets: Prefixes, attributes: LeaseAttributes) -> Self {
        let (key, lifetime) = (subnets.key(), Lifetime::Reservation);
        Self { subnets, key, attributes, revision: 0, created_revision: 0, lifetime }
    }

    /// When it was written, as far as its store shows; to be compared within one store only. A node
    /// writes its lease again at each renewal, and etcd counts that; the local store shows when the
    /// lease ends, which is as long after the writing for all nodes. What never ends, Kubernetes'
    /// Nodes among it, is changed by others than its node: there only the creation counts.
    pub fn written(&self) -> i64 {
        match self.lifetime {
            Lifetime::Leased { expires_unix: Some(end), .. } => {
                i64::try_from(end).unwrap_or(i64::MAX)
            }
            // The cache keeps no revisions, but when the entry was made.
            Lifetime::Leased { expires_unix: None, .. } => self.revision.max(self.created_revision),
            Lifetime::Reservation => self.created_revision,
        }
    }

    /// Becomes the copy that is `known` already, if that says the same: of thousands of leases one
    /// each is kept.
    pub(crate) fn share(self: &mut Arc<Self>, known: Option<&Arc<Self>>) {
        if let Some(known) = known.filter(|known| *known == self) {
            *self = Arc::clone(known);
        }
    }

    /// The IPv4 subnet.
    pub fn v4(&self) -> Option<Prefix> {
        self.subnets.v4()
    }

    /// Reads one entry of a store as the local one has it: its value tells the lease's end, nothing
    /// when it was made. What is not a lease is returned as such, for counting.
    pub fn decode(key: &[u8], value: &[u8], revision: i64) -> Result<Self, Rejected> {
        let rejected = |key, reason, detail| Rejected { key, reason, detail, revision };
        let text = std::str::from_utf8(key).ok().filter(|text| text.len() <= KEY_CHARS_MAX);
        let parsed = text.and_then(|text| Some((text.to_owned(), Prefixes::from_key(text)?)));
        let Some((key, subnets)) = parsed else {
            let shown = String::from_utf8_lossy(key).chars().take(KEY_CHARS_MAX).collect();
            let detail = "the key names no subnet such as 10.5.34.0-24".to_owned();
            return Err(rejected(shown, RejectReason::BadKey, detail));
        };
        match LeaseAttributes::with_end_from_json(value) {
            Ok((attributes, expires_unix)) => {
                let lifetime = Lifetime::until(expires_unix);
                Ok(Self { key, revision, lifetime, ..Self::reservation(subnets, attributes) })
            }
            Err(error) => Err(rejected(key, error.reason(), with_causes(&error))),
        }
    }
}

#[cfg(test)]
mod tests;
