//! Who a node is, and who may claim its PublicIP: two nodes with one address would share a subnet.
//! Pure; how a claim is written is the store's business.
//!
//! A claim stops a node from starting only. A node that runs goes on carrying packets whatever
//! becomes of its claim.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::control::error::{StoreError, StoreResult};

/// Longest text of a foreign claim that is shown.
const SHOWN_CHARS_MAX: usize = 64;
/// Longest claim read. Ours have about 150 bytes.
const CLAIM_BYTES_MAX: usize = 4096;

/// Node identity, stable across daemon restarts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The name of the host, by which operators know it.
    #[serde(rename = "Hostname", default)]
    pub hostname: String,
    /// `/etc/machine-id`, which containers may lack.
    #[serde(rename = "MachineID", default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// The kernel's random number of this boot, the same in every container.
    #[serde(rename = "BootID", default)]
    pub boot_id: String,
}

/// Whether a node that writes starts, or runs. What one writes that starts is void if another node
/// has its claim by then.
#[derive(Debug, Clone, Copy)]
pub enum Phase {
    /// It has no subnet yet.
    Starts,
    /// Its pods use its subnet.
    Runs,
}

impl NodeIdentity {
    /// Whether `other` is this machine: by its machine-id, which outlives a reboot and another
    /// hostname, or by its boot, where there is no machine-id to compare.
    pub fn is_same_as(&self, other: &Self) -> bool {
        match (&self.machine_id, &other.machine_id) {
            (Some(own), Some(other)) => own == other,
            (None, _) | (_, None) => self.boot_id == other.boot_id,
        }
    }

    /// A claim's value.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Parses a claim's value; `None` is unparsable and claims nothing.
    pub(crate) fn from_json(value: &[u8]) -> Option<Self> {
        let value = value.get(..value.len().min(CLAIM_BYTES_MAX))?;
        serde_json::from_slice(value).ok().filter(|node: &Self| !node.boot_id.is_empty())
    }

    /// Validates the claim of `address` for this node, whose key shows `found`: a value, and the
    /// etcd lease that ends it, 0 for none. `lease` is this run's etcd lease, if that lives, and
    /// `held` is whether the claim was bound to it before. Returns whether the claim is this run's
    /// already; an error if another node has it.
    pub(crate) fn validate(
        &self,
        address: IpAddr,
        found: Option<(&[u8], i64)>,
        lease: Option<i64>,
        held: bool,
    ) -> StoreResult<bool> {
        let Some((value, found_lease)) = found else { return Ok(false) };
        let is_ours = lease == Some(found_lease);
        let Some(holder) = holder_of(value, found_lease).filter(|_| !is_ours) else {
            return Ok(is_ours);
        };
        let is_same = holder.is_same_as(self);
        // A claim of an earlier run would have been replaced by ours. This one replaced ours.
        let is_copy = is_same && held;
        if is_same && !is_copy {
            return Ok(false);
        }
        Err(StoreError::Duplicate { address, holder: holder.describe(is_copy) })
    }

    /// Its host's name, without what a terminal would obey.
    pub(crate) fn shown_name(&self) -> String {
        let printable = self.hostname.chars().filter(|letter| !letter.is_control());
        printable.take(SHOWN_CHARS_MAX).collect()
    }

    /// This holder of a claim in words.
    pub(crate) fn describe(&self, is_copy: bool) -> String {
        let shown = |text: &str| text.chars().take(SHOWN_CHARS_MAX).collect::<String>();
        let machine = self.machine_id.as_deref().map_or_else(|| "unknown".to_owned(), shown);
        let (host, boot) = (shown(&self.hostname), shown(&self.boot_id));
        let what = if is_copy {
            ": another weftd on this machine, or on a copy of it with the same machine-id"
        } else {
            ""
        };
        format!("node {host:?} (machine-id {machine:?}, boot {boot:?}{what})")
    }
}

/// Who claims by `value`. What no etcd lease ends is no claim: no weftd writes one, a copy of the
/// keys into another etcd does, and it would outlive its node.
pub(crate) fn holder_of(value: &[u8], lease: i64) -> Option<NodeIdentity> {
    NodeIdentity::from_json(value).filter(|_| lease != 0)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const LEASE: Option<i64> = Some(7);

    fn node(hostname: &str, machine_id: Option<&str>, boot_id: &str) -> NodeIdentity {
        let machine_id = machine_id.map(str::to_owned);
        NodeIdentity { hostname: hostname.to_owned(), machine_id, boot_id: boot_id.to_owned() }
    }

    #[test]
    fn machine_is_identified_by_id_or_boot() {
        let own = node("a", Some("1"), "boot-1");
        assert!(own.is_same_as(&node("a", Some("1"), "boot-2")), "a reboot");
        assert!(own.is_same_as(&node("b", Some("1"), "boot-1")), "another hostname");
        assert!(own.is_same_as(&node("a", None, "boot-1")), "a container without machine-id");
        assert!(!own.is_same_as(&node("a", Some("2"), "boot-1")), "another machine");
        let nameless = node("a", None, "boot-1");
        assert!(nameless.is_same_as(&node("b", None, "boot-1")), "another container");
        assert!(!nameless.is_same_as(&node("a", None, "boot-2")), "another boot");
    }

    #[test]
    fn claim_round_trips_and_junk_claims_nothing() {
        for own in [node("a", Some("1"), "boot-1"), node("a", None, "boot-1")] {
            assert_eq!(NodeIdentity::from_json(&own.to_json()), Some(own));
        }
        let older = br#"{"Hostname":"a","BootID":"boot-1","Number":8285}"#;
        assert_eq!(NodeIdentity::from_json(older), Some(node("a", None, "boot-1")));
        let long = format!("{{\"BootID\":\"{}\"}}", "x".repeat(CLAIM_BYTES_MAX));
        for junk in [b"".as_slice(), b"{}", b"null", br#"{"BootID":7}"#, long.as_bytes()] {
            assert_eq!(NodeIdentity::from_json(junk), None, "{junk:?}");
        }
    }

    #[test]
    fn only_another_machine_or_a_copy_is_refused() {
        let own = node("a", Some("1"), "boot-1");
        let validate = |holder: &NodeIdentity, lease: i64, own_lease: Option<i64>, held: bool| {
            own.validate(ADDRESS, Some((&holder.to_json(), lease)), own_lease, held)
        };
        assert!(!own.validate(ADDRESS, None, None, false).unwrap());
        assert!(validate(&own, 7, LEASE, true).unwrap());
        assert!(validate(&own, 7, LEASE, false).unwrap(), "the answer to the write was lost");
        let before = node("old name", Some("1"), "boot-0");
        assert!(!validate(&before, 6, None, false).unwrap(), "the last run waits for itself");
        assert!(!validate(&before, 6, LEASE, false).unwrap());
        assert!(!validate(&own, 0, LEASE, true).unwrap(), "it would outlive its node");
        let copy = validate(&own, 8, LEASE, true).unwrap_err().to_string();
        assert!(copy.contains("copy"), "an operator looks for two names: {copy}");
        let other = node("b", Some("2"), "boot-1");
        for (lease, held) in [(None, false), (LEASE, true)] {
            let refusal = validate(&other, 6, lease, held).unwrap_err().to_string();
            assert!(refusal.contains("\"b\"") && !refusal.contains("copy"), "{refusal}");
        }
        assert!(!validate(&other, 0, None, false).unwrap(), "it never ends");
        assert!(!own.validate(ADDRESS, Some((b"junk", 6)), LEASE, true).unwrap());
    }

    #[test]
    fn foreign_claim_cannot_forge_log_lines() {
        let hostile = node(&format!("a\nE1121 {}", "x".repeat(5000)), Some("\u{1b}[2J"), "b");
        let text = hostile.describe(false);
        assert!(!text.contains(['\n', '\u{1b}']) && text.len() < 400, "{text}");
        let name = hostile.shown_name();
        assert!(name.starts_with("aE1121 x") && name.len() == 64, "{name}");
    }
}
