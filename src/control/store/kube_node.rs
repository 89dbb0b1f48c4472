//! The part of a Kubernetes Node that matters: pod subnet and flannel's annotations, parsed into a
//! lease and written as a patch. Pure: bytes in, types and bytes out.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::config::kube::AnnotationPrefix;
use crate::control::clock;
use crate::control::lease::{Lease, LeaseAttributes, Lifetime, RawJson, VALUE_BYTES_MAX};
use crate::control::rejected::{RejectReason, Rejected};
use crate::failure::with_causes;
use crate::route::Prefix;

/// Most subnets of one Node that flannel accepts: one of each family.
const POD_CIDRS_MAX: usize = 2;

/// The part of a Node that is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    /// Another one after the Node was deleted and made again.
    pub(super) uid: String,
    pub(super) revision: i64,
    created_unix: i64,
    pod_cidrs: Vec<String>,
    said: Said,
}

/// flannel's annotations as found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Said {
    marker: Option<String>,
    backend_type: Option<String>,
    backend_data: Option<String>,
    backend_v6_data: Option<String>,
    public_ip: Option<String>,
    public_ipv6: Option<String>,
    public_ip_overwrite: Option<String>,
    node_public_ip: Option<String>,
}

/// The names of the annotations.
#[derive(Debug, Clone)]
pub(super) struct Names {
    marker: String,
    backend_type: String,
    backend_data: String,
    backend_v6_data: String,
    public_ip: String,
    public_ipv6: String,
    pub(super) public_ip_overwrite: String,
    pub(super) node_public_ip: String,
}

impl Names {
    pub(super) fn new(prefix: &AnnotationPrefix) -> Self {
        Self {
            marker: prefix.name("kube-subnet-manager"),
            backend_type: prefix.name("backend-type"),
            backend_data: prefix.name("backend-data"),
            backend_v6_data: prefix.name("backend-v6-data"),
            public_ip: prefix.name("public-ip"),
            public_ipv6: prefix.name("public-ipv6"),
            public_ip_overwrite: prefix.name("public-ip-overwrite"),
            node_public_ip: prefix.name("node-public-ip"),
        }
    }
}

#[derive(Deserialize)]
struct RawNode {
    metadata: RawMetadata,
    #[serde(default)]
    spec: Option<RawSpec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawMetadata {
    name: String,
    #[serde(default)]
    uid: String,
    resource_version: String,
    #[serde(default)]
    creation_timestamp: Option<String>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct RawSpec {
    #[serde(rename = "podCIDR", default)]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs", default)]
    pod_cidrs: Option<Vec<String>>,
}

/// One page of a list of Nodes, or a bookmark, which is a page without Nodes.
pub(super) struct Page<'a> {
    pub(super) revision: i64,
    /// Asks for the next page; empty after the last.
    pub(super) next: String,
    pub(super) items: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawPage<'a> {
    metadata: RawPageMetadata,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawPageMetadata {
    resource_version: String,
    #[serde(rename = "continue", default)]
    next: String,
}

impl<'a> Page<'a> {
    /// Splits the page without reading its Nodes: one that is broken is no reason to lose the
    /// others.
    pub(super) fn parse(json: &'a [u8]) -> Result<Self, String> {
        let page = serde_json::from_slice::<RawPage<'_>>(json);
        let RawPage { metadata, items } =
            page.map_err(|error| format!("this is not the JSON of a list: {error}"))?;
        let RawPageMetadata { resource_version, next } = metadata;
        let revision = parse_revision(&resource_version)
            .ok_or_else(|| format!("the resourceVersion {resource_version:?} is not a number"))?;
        Ok(Self { revision, next, items: items.unwrap_or_default() })
    }
}

/// The least that identifies a broken Node.
#[derive(Deserialize)]
struct RawIdentity {
    metadata: RawIdentityMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawIdentityMetadata {
    name: String,
    resource_version: String,
}

/// Why bytes are no Node.
#[derive(Debug, thiserror::Error)]
pub(super) enum NodeError {
    /// Of this Node something is not as the API promises; the others can be used.
    #[error("the Node {name:?} cannot be read: {detail}")]
    Malformed { name: String, revision: i64, detail: String },
    /// Not even a name.
    #[error("the API sent something that is no Node: {0}")]
    Unknown(#[source] serde_json::Error),
}

impl Node {
    pub(super) fn parse(json: &[u8], names: &Names) -> Result<Self, NodeError> {
        let node: RawNode = serde_json::from_slice(json).map_err(|error| broken(json, error))?;
        let RawMetadata { name, uid, resource_version, creation_timestamp, annotations } =
            node.metadata;
        let Some(revision) = parse_revision(&resource_version) else {
            let detail = format!("its resourceVersion {resource_version:?} is no number");
            return Err(NodeError::Malformed { name, revision: 0, detail });
        };
        let created = creation_timestamp.as_deref().and_then(clock::parse_rfc3339);
        let mut annotations = annotations.unwrap_or_default();
        let RawSpec { pod_cidr, pod_cidrs } =
            node.spec.unwrap_or(RawSpec { pod_cidr: None, pod_cidrs: None });
        let mut cidrs = pod_cidrs.unwrap_or_default();
        if cidrs.is_empty() {
            cidrs.extend(pod_cidr);
        }
        cidrs.retain(|cidr| !cidr.is_empty());
        Ok(Self {
            name,
            uid,
            revision,
            created_unix: created.and_then(|seconds| seconds.try_into().ok()).unwrap_or(i64::MAX),
            pod_cidrs: cidrs,
            said: Said {
                marker: annotations.remove(&names.marker),
                backend_type: annotations.remove(&names.backend_type),
                backend_data: annotations.remove(&names.backend_data),
                backend_v6_data: annotations.remove(&names.backend_v6_data),
                public_ip: annotations.remove(&names.public_ip),
                public_ipv6: annotations.remove(&names.public_ipv6),
                public_ip_overwrite: annotations.remove(&names.public_ip_overwrite),
                node_public_ip: annotations.remove(&names.node_public_ip),
            },
        })
    }

    /// Its IPv4 subnet; `None` until the cluster assigns one.
    pub(super) fn subnet(&self) -> Result<Option<Prefix>, String> {
        let cidrs = &self.pod_cidrs;
        if cidrs.len() > POD_CIDRS_MAX {
            return Err(format!("pod cidrs should be IPv4/IPv6 only or dualstack, not {cidrs:?}"));
        }
        for cidr in cidrs {
            if let Ok(subnet) = cidr.parse() {
                return Ok(Some(subnet));
            }
            let address = cidr.split('/').next().unwrap_or_default();
            if address.parse::<Ipv6Addr>().is_err() {
                return Err(format!("its pod cidr {cidr:?} is no prefix such as 10.244.1.0/24"));
            }
        }
        if cidrs.is_empty() {
            return Ok(None);
        }
        Err(format!("its pod cidrs {cidrs:?} are IPv6 only, which is not built into this weftd"))
    }

    /// The lease that its annotations announce; `None` of a Node without flannel.
    pub(super) fn lease(&self) -> Option<Result<Lease, Rejected>> {
        if self.said.marker.as_deref() != Some("true") {
            return None;
        }
        let rejected = |reason, detail| Rejected {
            key: self.name.clone(),
            reason,
            detail,
            revision: self.revision,
        };
        let assigned = self
            .subnet()
            .and_then(|subnet| subnet.ok_or_else(|| "its pod cidr is not assigned".to_owned()));
        let subnet = match assigned {
            Ok(subnet) => subnet,
            Err(detail) => return Some(Err(rejected(RejectReason::BadKey, detail))),
        };
        let attributes = self.attributes().map_err(|(reason, detail)| rejected(reason, detail));
        Some(attributes.map(|attributes| Lease {
            subnet,
            key: self.name.clone(),
            attributes,
            revision: self.revision,
            // Of two Nodes with one subnet, the one that was made first has it.
            created_revision: self.created_unix,
            lifetime: Lifetime::Reservation,
        }))
    }

    /// What its annotations say.
    pub(super) fn attributes(&self) -> Result<LeaseAttributes, (RejectReason, String)> {
        let bad = |detail| (RejectReason::BadValue, detail);
        let public_ip = self.said.public_ip.as_deref().unwrap_or_default();
        let Ok(public_ip) = public_ip.parse::<Ipv4Addr>() else {
            return Err(bad(format!("its public-ip {public_ip:?} is no IPv4 address")));
        };
        let public_ipv6 = self.said.public_ipv6.as_deref().and_then(|text| text.parse().ok());
        let attributes = LeaseAttributes {
            public_ip,
            public_ipv6,
            backend_type: self.said.backend_type.clone().unwrap_or_default(),
            backend_data: json("backend-data", self.said.backend_data.as_deref())?,
            backend_v6_data: json("backend-v6-data", self.said.backend_v6_data.as_deref())?,
        };
        // The same bounds as for a value of etcd.
        let checked = attributes.to_json().and_then(|value| LeaseAttributes::from_json(&value));
        checked.map_err(|error| (error.reason(), with_causes(&error)))
    }

    /// The operator's address for the others to see in place of the node's own.
    pub(super) fn overwrite(&self) -> Option<&str> {
        self.said.public_ip_overwrite.as_deref().filter(|text| !text.is_empty())
    }

    /// The operator's `--public-ip`.
    pub(super) fn node_public_ip(&self) -> Option<&str> {
        self.said.node_public_ip.as_deref().filter(|text| !text.is_empty())
    }

    /// The patch that makes the annotations say `attributes`; `None` if they do.
    pub(super) fn annotation_patch(
        &self,
        attributes: &LeaseAttributes,
        names: &Names,
    ) -> Option<String> {
        let data = |raw: &Option<RawJson>| {
            raw.as_ref().map_or_else(|| "null".to_owned(), |raw| raw.0.get().to_owned())
        };
        let public_ip = match self.overwrite() {
            Some(overwrite) => overwrite.to_owned(),
            None => attributes.public_ip.to_string(),
        };
        let mut wanted = vec![
            (&names.marker, &self.said.marker, "true".to_owned()),
            (&names.backend_type, &self.said.backend_type, attributes.backend_type.clone()),
            (&names.backend_data, &self.said.backend_data, data(&attributes.backend_data)),
            (&names.public_ip, &self.said.public_ip, public_ip),
        ];
        if let Some(public_ipv6) = attributes.public_ipv6 {
            let v6_data = data(&attributes.backend_v6_data);
            wanted.push((&names.public_ipv6, &self.said.public_ipv6, public_ipv6.to_string()));
            wanted.push((&names.backend_v6_data, &self.said.backend_v6_data, v6_data));
        }
        let differs: BTreeMap<&str, String> = wanted
            .into_iter()
            .filter(|(_, found, wanted)| found.as_ref() != Some(wanted))
            .map(|(name, _, wanted)| (name.as_str(), wanted))
            .collect();
        let patch = serde_json::json!({ "metadata": { "annotations": differs } });
        (!differs.is_empty()).then(|| patch.to_string())
    }
}

/// The patch that says that the network works, byte for byte as flannel's.
pub(super) fn condition_patch(now_unix: u64) -> String {
    let now = clock::format_rfc3339(now_unix);
    let times = format!(r#""lastHeartbeatTime":"{now}","lastTransitionTime":"{now}""#);
    let reason = r#""reason":"FlannelIsUp","message":"Flannel is running on this node""#;
    let condition = format!(r#""type":"NetworkUnavailable","status":"False",{times},{reason}"#);
    format!(r#"{{"status":{{"conditions":[{{{condition}}}]}}}}"#)
}

/// A version of the API's objects as a number, which it is in every cluster with etcd, and which
/// Kubernetes promises from 1.35 on.
fn parse_revision(text: &str) -> Option<i64> {
    text.parse().ok().filter(|revision| *revision >= 0)
}

fn json(name: &str, text: Option<&str>) -> Result<Option<RawJson>, (RejectReason, String)> {
    match text {
        None | Some("" | "null") => Ok(None),
        Some(text) if text.len() > VALUE_BYTES_MAX => {
            Err((RejectReason::TooLarge, format!("its {name} has {} bytes", text.len())))
        }
        Some(text) => match RawValue::from_string(text.to_owned()) {
            Ok(raw) => Ok(Some(RawJson(raw))),
            Err(error) => Err((RejectReason::BadValue, format!("its {name} is no JSON: {error}"))),
        },
    }
}

fn broken(json: &[u8], error: serde_json::Error) -> NodeError {
    let Ok(RawIdentity { metadata }) = serde_json::from_slice(json) else {
        return NodeError::Unknown(error);
    };
    match parse_revision(&metadata.resource_version) {
        Some(revision) => {
            let detail = error.to_string();
            NodeError::Malformed { name: metadata.name, revision, detail }
        }
        None => NodeError::Unknown(error),
    }
}

impl NodeError {
    /// For counting.
    pub(super) fn rejected(self) -> Rejected {
        let reason = RejectReason::BadValue;
        match self {
            Self::Malformed { name, revision, detail } => {
                Rejected { key: name, reason, detail, revision }
            }
            unknown @ Self::Unknown(_) => Rejected {
                key: "a Node".to_owned(),
                reason,
                detail: with_causes(&unknown),
                revision: 0,
            },
        }
    }
}

#[cfg(test)]
#[path = "kube_node_tests.rs"]
mod tests;
