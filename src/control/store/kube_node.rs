//! The part of a Kubernetes Node that matters: pod subnet and flannel's annotations, parsed into a
//! lease and written as a patch. Pure: bytes in, types and bytes out.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use k8s_openapi::api::core::v1::NodeSpec;
use kube::core::ListMeta;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::config::options::is_host_address;
use crate::control::clock;
use crate::control::lease::{Lease, LeaseAttributes, RawJson, shown};
use crate::control::rejected::{RejectReason, Rejected};
use crate::failure::with_causes;
use crate::route::{Prefix, Prefixes};

/// Most subnets of one Node that flannel accepts: one of each family.
const POD_CIDRS_MAX: usize = 2;
/// Longest text of an annotation that is shown.
const SHOWN_CHARS_MAX: usize = 64;
/// The annotation with the address that an operator has other nodes see.
pub(super) const PUBLIC_IP_OVERWRITE: &str = "public-ip-overwrite";
/// The annotations with the addresses that an operator has the node use.
pub(super) const NODE_PUBLIC_IP: &str = "node-public-ip";
/// See [`NODE_PUBLIC_IP`].
pub(super) const NODE_PUBLIC_IPV6: &str = "node-public-ipv6";

/// The part of a Node that is kept.
#[derive(Debug, Clone)]
pub struct Node {
    pub(super) name: String,
    /// Another one after the Node was deleted and made again.
    pub(super) uid: String,
    pub(super) revision: i64,
    created_unix: i64,
    pod_cidrs: Vec<String>,
    /// flannel's annotations, by what follows the prefix in their names.
    said: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawNode {
    metadata: RawMetadata,
    spec: Option<NodeSpec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawMetadata {
    name: String,
    #[serde(default)]
    uid: String,
    resource_version: String,
    creation_timestamp: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
}

/// One page of a list of Nodes, or a bookmark, which is a page without Nodes.
#[derive(Debug)]
pub struct Page<'a> {
    pub(super) revision: i64,
    /// Asks for the next page; empty after the last.
    pub(super) next: String,
    /// The Nodes, as they came.
    pub items: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawPage<'a> {
    metadata: ListMeta,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

impl<'a> Page<'a> {
    /// Splits the page without reading its Nodes: one that is broken is no reason to lose the
    /// others.
    pub fn parse(json: &'a [u8]) -> Result<Self, String> {
        let page = serde_json::from_slice::<RawPage<'_>>(json);
        let RawPage { metadata, items } =
            page.map_err(|error| format!("this is not the JSON of a list: {error}"))?;
        let revision = parse_revision(&metadata.resource_version.unwrap_or_default())?;
        let next = metadata.continue_.unwrap_or_default();
        Ok(Self { revision, next, items: items.unwrap_or_default() })
    }
}

impl Node {
    /// Reads a Node, whose annotations begin with `prefix`; else says why it is none.
    pub fn parse(json: &[u8], prefix: &str) -> Result<Self, String> {
        let wrong = |detail: String| format!("the API sent something that is no Node: {detail}");
        let node: RawNode =
            serde_json::from_slice(json).map_err(|error| wrong(error.to_string()))?;
        let RawMetadata { name, uid, resource_version, creation_timestamp, annotations } =
            node.metadata;
        let revision = parse_revision(&resource_version).map_err(wrong)?;
        let said = annotations.into_iter().flatten();
        let said = said
            .filter_map(|(name, text)| Some((name.strip_prefix(prefix)?.to_owned(), text)))
            .collect();
        let NodeSpec { pod_cidr, pod_cidrs, .. } = node.spec.unwrap_or_default();
        let mut pod_cidrs = pod_cidrs.unwrap_or_default();
        if pod_cidrs.is_empty() {
            pod_cidrs.extend(pod_cidr);
        }
        pod_cidrs.retain(|cidr| !cidr.is_empty());
        let created = creation_timestamp.as_deref().and_then(clock::parse_rfc3339);
        let created_unix = created.and_then(|seconds| seconds.try_into().ok()).unwrap_or(i64::MAX);
        Ok(Self { name, uid, revision, created_unix, pod_cidrs, said })
    }

    /// The annotation `name`; empty if it is missing.
    pub(super) fn said(&self, name: &str) -> &str {
        self.said.get(name).map_or("", String::as_str)
    }

    /// Its subnets, one of each family at most, in whichever order; `None` until the cluster
    /// assigns any.
    pub fn subnets(&self) -> Result<Option<Prefixes>, String> {
        let cidrs = &self.pod_cidrs;
        if cidrs.len() > POD_CIDRS_MAX {
            return Err(format!("pod cidrs should be IPv4/IPv6 only or dualstack, not {cidrs:?}"));
        }
        let v4 = cidrs.iter().find_map(|cidr| cidr.parse::<Prefix>().ok());
        let v6 = cidrs.iter().find_map(|cidr| cidr.parse().ok());
        if v4.is_some() || v6.is_some() || cidrs.is_empty() {
            return Ok(Prefixes::new(v4, v6));
        }
        Err(format!("its pod cidr {:?} is no prefix such as 10.244.1.0/24", cidrs.concat()))
    }

    /// The lease that its annotations announce; `None` of a Node without flannel.
    pub fn lease(&self) -> Option<Result<Lease, Rejected>> {
        if self.said("kube-subnet-manager") != "true" {
            return None;
        }
        let read = || {
            let bad = |detail| (RejectReason::BadKey, detail);
            let subnets = self.subnets().map_err(bad)?;
            let subnets = subnets.ok_or_else(|| bad("its pod cidr is not assigned".to_owned()))?;
            // Of two Nodes with one subnet, the one that was made first has it.
            let created_revision = self.created_unix;
            let (key, revision) = (self.name.clone(), self.revision);
            let lease = Lease::reservation(subnets, self.attributes()?);
            Ok(Lease { key, revision, created_revision, ..lease })
        };
        let (key, revision) = (self.name.clone(), self.revision);
        Some(read().map_err(|(reason, detail)| Rejected { key, reason, detail, revision }))
    }

    /// What its annotations say.
    pub fn attributes(&self) -> Result<LeaseAttributes, (RejectReason, String)> {
        let bad = |detail| (RejectReason::BadValue, detail);
        let said_v6 = self.said("public-ipv6");
        let public_ipv6 = said_v6.parse().ok();
        let is_unreadable = public_ipv6.is_none() && !said_v6.is_empty();
        // A node of a network without IPv4 may say 0.0.0.0, or nothing.
        let public_ip = match self.said("public-ip") {
            "" if public_ipv6.is_some() => Ipv4Addr::UNSPECIFIED,
            public_ip => public_ip
                .parse()
                .ok()
                .ok_or_else(|| bad(format!("its public-ip {public_ip:?} is no IPv4 address")))?,
        };
        let backend_data = match self.said("backend-data") {
            "" | "null" => None,
            text => Some(
                RawJson::from_text(text.to_owned())
                    .map_err(|error| bad(format!("its backend-data is no JSON: {error}")))?,
            ),
        };
        // Wrong ones of IPv6 are no reason to lose the Node: it is reached by IPv4.
        let backend_v6_data = match self.said("backend-v6-data") {
            "" | "null" => None,
            text => RawJson::from_text(text.to_owned()).ok(),
        };
        let attributes = LeaseAttributes {
            public_ipv6,
            backend_v6_data,
            ..LeaseAttributes::of(self.said("backend-type"), public_ip, backend_data)
        };
        // The same bounds as for a value of etcd.
        let checked = attributes.to_json().and_then(|value| LeaseAttributes::from_json(&value));
        let checked = checked.map_err(|error| (error.reason(), with_causes(&error)))?;
        let unreadable_ipv6 = is_unreadable.then(|| shown(&format!("{said_v6:?}")));
        Ok(LeaseAttributes { unreadable_ipv6, ..checked })
    }

    /// The operator's address for the others to see in place of the node's own; an error if none of
    /// them would use it.
    pub fn overwrite(&self) -> Result<Option<Ipv4Addr>, String> {
        let text = self.said(PUBLIC_IP_OVERWRITE);
        let address = text.parse().ok().filter(|it: &Ipv4Addr| is_host_address((*it).into()));
        if address.is_none() && !text.is_empty() {
            let shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
            return Err(format!("{shown:?}, which is no host's IPv4 address"));
        }
        Ok(address)
    }

    /// The patch that makes the annotations say `attributes`; `None` if they do.
    pub fn annotation_patch(&self, attributes: &LeaseAttributes, prefix: &str) -> Option<String> {
        let text =
            |data: &Option<RawJson>| data.as_ref().map_or("null", |data| data.0.get()).to_owned();
        let overwrite = self.overwrite().ok().flatten();
        // Those of a family go when the node has none any more.
        let public_ip = attributes.public_ip.map(|own| overwrite.unwrap_or(own).to_string());
        let public_ipv6 = attributes.public_ipv6.map(|public_ipv6| {
            let overwrite = self.said("public-ipv6-overwrite").parse().ok();
            let public_ipv6: Ipv6Addr = overwrite.unwrap_or(public_ipv6);
            public_ipv6.to_string()
        });
        let data = &attributes.backend_data;
        let has_v4 = public_ip.is_some() || data.is_some();
        let backend_data = has_v4.then(|| text(data));
        let data = &attributes.backend_v6_data;
        let has_v6 = public_ipv6.is_some() || data.is_some();
        let backend_v6_data = has_v6.then(|| text(data));
        let mut wanted = vec![
            ("kube-subnet-manager", Some("true".to_owned())),
            ("backend-type", Some(attributes.backend_type.in_lease().to_owned())),
            ("backend-data", backend_data),
            ("public-ip", public_ip),
            ("public-ipv6", public_ipv6),
            ("backend-v6-data", backend_v6_data),
        ];
        wanted.retain(|(name, text)| self.said.get(*name) != text.as_ref());
        let differs: BTreeMap<_, _> =
            wanted.into_iter().map(|(name, text)| (format!("{prefix}{name}"), text)).collect();
        let patch = serde_json::json!({ "metadata": { "annotations": differs } });
        (!differs.is_empty()).then(|| patch.to_string())
    }
}

/// What is no Node, by the name that it has all the same.
pub(super) fn unreadable(json: &[u8], detail: String) -> Rejected {
    let node: Value = serde_json::from_slice(json).unwrap_or_default();
    let key = node["metadata"]["name"].as_str().unwrap_or("a Node").to_owned();
    Rejected { key, reason: RejectReason::BadValue, detail, revision: 0 }
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
fn parse_revision(text: &str) -> Result<i64, String> {
    let revision = text.parse().ok().filter(|revision| *revision >= 0);
    revision.ok_or_else(|| format!("the resourceVersion {text:?} is not a number"))
}

#[cfg(test)]
#[path = "kube_node_tests.rs"]
mod tests;
