//! Who this node is, for the claim on its PublicIP that keeps two nodes from sharing a subnet, and
//! the loop that keeps the claim. What a claim is in a store is the store's business.

pub(crate) mod ledger;

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tracing::{error, warn};

use crate::control::backoff::jittered;
use crate::control::manager::SubnetManager;
use crate::control::run::End;
use crate::control::store::StoreError;
use crate::failure::with_causes;

/// Life of a claim after its node is gone. As long as kubelet's leases are trusted, within a
/// factor: a node that takes over an address waits no longer than that.
pub const CLAIM_TTL: Duration = Duration::from_secs(30);
/// How often a claim is kept alive: kubelet's pace, and a third of its life.
const KEEP_PERIOD: Duration = Duration::from_secs(10);
/// Share by which that is spread.
const KEEP_JITTER: f64 = 0.2;
/// Pause after the store did not keep the claim.
const KEEP_RETRY: Duration = Duration::from_secs(3);
/// Longest text of a foreign claim that is shown.
const SHOWN_CHARS_MAX: usize = 64;
/// Most numbers remembered of claims that this run wrote: some minutes', and no request is under
/// way for longer.
const NUMBERS_MAX: usize = 16;
/// Longest claim read. Ours have about 150 bytes.
const CLAIM_BYTES_MAX: usize = 4096;

/// What tells this node from every other, and a restart of it from neither.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The name of the host, by which operators know it.
    #[serde(rename = "Hostname", default)]
    pub hostname: String,
    /// `/etc/machine-id`, which containers may lack and clones may share.
    #[serde(rename = "MachineID", default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// The kernel's random number of this boot: never shared, and the same in every container.
    #[serde(rename = "BootID", default)]
    pub boot_id: String,
}

impl NodeIdentity {
    /// Whether `other` is this node, before or after a restart of its daemon or container. After
    /// a reboot it is not: a clone that runs looks just the same, so the claim has to lapse.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let machine_differs = match (&self.machine_id, &other.machine_id) {
            (Some(own), Some(other)) => own != other,
            (None, _) | (_, None) => false,
        };
        self.boot_id == other.boot_id && self.hostname == other.hostname && !machine_differs
    }

    /// A claim's value in a local store.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads a claim's value; `None` is junk, which claims nothing.
    pub(crate) fn from_json(value: &[u8]) -> Option<Self> {
        ClaimValue::from_json(value).map(|claim| claim.node)
    }

    /// This holder of a claim in words, for the node `own`, which would like to have it.
    pub(crate) fn describe_to(&self, own: &Self) -> String {
        let is_twin = self.hostname == own.hostname && self.machine_id == own.machine_id;
        self.describe(if is_twin {
            ": the last boot of this machine, or a clone of it"
        } else {
            ""
        })
    }

    /// The same, of one that has our name and boot, and took our claim.
    fn describe_successor(&self) -> String {
        self.describe(
            ": a weftd that claimed it after this one, on this machine or on a copy of it that \
             was made while it ran",
        )
    }

    fn describe(&self, what: &str) -> String {
        let shown = |text: &str| text.chars().take(SHOWN_CHARS_MAX).collect::<String>();
        let machine = self.machine_id.as_deref().map_or_else(|| "unknown".to_owned(), shown);
        let (host, boot) = (shown(&self.hostname), shown(&self.boot_id));
        format!("node {host:?} (machine-id {machine:?}, boot {boot:?}{what})")
    }
}

/// What a store shows at the key of a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClaimEntry<'a> {
    /// Who claims, as JSON.
    pub(crate) value: &'a [u8],
    /// When it was last written.
    pub(crate) revision: i64,
    /// The lease that ends it; 0 for none.
    pub(crate) lease: i64,
}

/// A claim's key as last seen, not held by another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) public_ip: Ipv4Addr,
    /// 0 is absent.
    pub(crate) revision: i64,
    /// What is written there. Compared besides the revision, which another node's claim may have
    /// by chance in a store that lost its data.
    pub(crate) value: Vec<u8>,
    pub(crate) is_ours: bool,
}

impl Claim {
    /// The claim of `public_ip` before anything was seen of it.
    pub(crate) fn unseen(public_ip: Ipv4Addr) -> Self {
        Self { public_ip, revision: 0, value: Vec::new(), is_ours: false }
    }
}

/// A node that claims addresses, and the numbers by which it knows the claims that it wrote itself:
/// each is written with a random one. A copy of this machine may have everything else of it.
#[derive(Debug, Clone)]
pub(crate) struct Claimant {
    node: NodeIdentity,
    /// What this run wrote, the last one last: one that was given up may still go in.
    numbers: VecDeque<u64>,
    /// Whether the last of them was not written yet, for all that is known.
    is_pending: bool,
    /// Whose claim this run held last.
    held: Option<Ipv4Addr>,
}

/// A claim's value.
#[derive(Debug, Serialize, Deserialize)]
struct ClaimValue {
    #[serde(flatten)]
    node: NodeIdentity,
    #[serde(rename = "Number", default)]
    number: u64,
}

impl Claimant {
    pub(crate) fn of(node: NodeIdentity) -> Self {
        Self { node, numbers: VecDeque::new(), is_pending: false, held: None }
    }

    /// What to write; `draw` gives a number that nobody else draws.
    pub(crate) fn value(&mut self, draw: impl FnOnce() -> u64) -> Vec<u8> {
        let value = ClaimValue { node: self.node.clone(), number: self.number(draw) };
        serde_json::to_vec(&value).unwrap_or_default()
    }

    /// The number to write. Until it is `written`, it stays the same.
    pub(crate) fn number(&mut self, draw: impl FnOnce() -> u64) -> u64 {
        if let Some(pending) = self.numbers.back().filter(|_| self.is_pending) {
            return *pending;
        }
        if self.numbers.len() == NUMBERS_MAX {
            self.numbers.pop_front();
        }
        let number = draw();
        self.numbers.push_back(number);
        self.is_pending = true;
        number
    }

    /// The last value is in the store.
    pub(crate) fn written(&mut self, public_ip: Ipv4Addr) {
        self.is_pending = false;
        self.held = Some(public_ip);
    }

    /// What the claim of `public_ip` is to this node if its key shows this.
    ///
    /// A claim of this node with a number of somebody else's is of its last run, which is over,
    /// unless this run held the claim before: then somebody took it since, with our name.
    pub(crate) fn judge(
        &mut self,
        public_ip: Ipv4Addr,
        found: Option<ClaimEntry<'_>>,
    ) -> Result<Claim, StoreError> {
        let Some(ClaimEntry { value, revision, lease }) = found else {
            return Ok(Claim::unseen(public_ip));
        };
        let unheld = Claim { public_ip, revision, value: value.to_owned(), is_ours: false };
        let Some(ClaimValue { node: holder, number }) = ClaimValue::from_json(value) else {
            return Ok(unheld);
        };
        if !holder.is_same_as(&self.node) {
            let holder = holder.describe_to(&self.node);
            return Err(StoreError::Duplicate { public_ip, holder });
        }
        if self.numbers.contains(&number) {
            self.is_pending &= self.numbers.back() != Some(&number);
            self.held = Some(public_ip);
            // One that does not end would outlive us.
            return Ok(Claim { is_ours: lease != 0, ..unheld });
        }
        if self.held == Some(public_ip) {
            return Err(StoreError::Duplicate { public_ip, holder: holder.describe_successor() });
        }
        Ok(unheld)
    }

    /// The same of a claim that this run may have had: it wrote it and got no answer.
    pub(crate) fn judge_tried(
        &mut self,
        public_ip: Ipv4Addr,
        found: Option<ClaimEntry<'_>>,
    ) -> Result<Claim, StoreError> {
        let held = self.held.replace(public_ip);
        let claim = self.judge(public_ip, found);
        if !claim.as_ref().is_ok_and(|claim| claim.is_ours) {
            self.held = held;
        }
        claim
    }
}

impl ClaimValue {
    /// Reads a claim's value; `None` is junk, which claims nothing.
    fn from_json(value: &[u8]) -> Option<Self> {
        let value = value.get(..value.len().min(CLAIM_BYTES_MAX))?;
        serde_json::from_slice(value).ok().filter(|claim: &Self| !claim.node.boot_id.is_empty())
    }
}

impl SubnetManager {
    /// The same manager for a node with a name: it claims its PublicIP, and refuses to share it.
    #[must_use]
    pub fn with_identity(self, identity: NodeIdentity) -> Self {
        Self { store: self.store.with_identity(identity), ..self }
    }

    /// Keeps the claim on the PublicIP, for as long as it is ours.
    pub(super) async fn keep_claim(&self) -> End {
        let mut random = fastrand::Rng::new();
        let mut has_failed = false;
        loop {
            let kept = self.store.keep_claim().await;
            let pause = match kept {
                Ok(()) => KEEP_PERIOD,
                Err(error @ StoreError::Duplicate { .. }) => {
                    error!("{error}");
                    return End::Duplicate;
                }
                Err(error) => {
                    // An outage is the machine's to report.
                    let answered = error.store_answered();
                    if answered && !has_failed {
                        warn!("Cannot keep the claim on the PublicIP: {}", with_causes(&error));
                    }
                    has_failed = answered;
                    KEEP_RETRY
                }
            };
            sleep(jittered(pause, KEEP_JITTER, &mut random)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(hostname: &str, machine_id: Option<&str>, boot_id: &str) -> NodeIdentity {
        let machine_id = machine_id.map(str::to_owned);
        NodeIdentity { hostname: hostname.to_owned(), machine_id, boot_id: boot_id.to_owned() }
    }

    #[test]
    fn a_restart_is_the_same_node_and_a_clone_is_not() {
        let own = node("a", Some("1"), "boot-1");
        assert!(own.is_same_as(&own.clone()));
        assert!(own.is_same_as(&node("a", None, "boot-1")), "a container without machine-id");
        assert!(!own.is_same_as(&node("a", Some("2"), "boot-1")), "another machine of this kernel");
        assert!(!own.is_same_as(&node("b", Some("1"), "boot-1")), "another host of this kernel");
        assert!(!own.is_same_as(&node("a", Some("1"), "boot-2")), "a clone that runs");
        let text = node("a", Some("1"), "boot-2").describe_to(&own);
        assert!(text.contains("clone"), "an operator looks for two hosts: {text}");
        assert!(!node("b", None, "boot-2").describe_to(&own).contains("clone"));
    }

    #[test]
    fn a_claim_survives_its_value_and_junk_claims_nothing() {
        for own in [node("a", Some("1"), "boot-1"), node("a", None, "boot-1")] {
            assert_eq!(NodeIdentity::from_json(&own.to_json()), Some(own));
        }
        let newer = br#"{"Hostname":"a","BootID":"boot-1","Port":8285}"#;
        assert_eq!(NodeIdentity::from_json(newer), Some(node("a", None, "boot-1")));
        let long = format!("{{\"BootID\":\"{}\"}}", "x".repeat(CLAIM_BYTES_MAX));
        for junk in [b"".as_slice(), b"{}", b"null", br#"{"BootID":7}"#, long.as_bytes()] {
            assert_eq!(NodeIdentity::from_json(junk), None, "{junk:?}");
        }
    }

    #[test]
    fn who_took_our_claim_with_our_name_is_named_and_the_claim_of_a_last_run_is_taken() {
        let address = Ipv4Addr::new(192, 0, 2, 1);
        let entry = |value, revision| Some(ClaimEntry { value, revision, lease: 7 });
        let claimant = || Claimant::of(node("a", None, "boot-1"));
        let mut first = claimant();
        let value = first.value(|| 1);
        assert_eq!(first.value(|| 2), value, "a write without an answer is tried again as it was");
        first.written(address);
        assert!(first.judge(address, entry(&value, 1)).unwrap().is_ours);
        let endless = Some(ClaimEntry { value: &value, revision: 2, lease: 0 });
        assert!(!first.judge(address, endless).unwrap().is_ours, "it would outlive its node");

        let mut restarted = claimant();
        let seen = restarted.judge(address, entry(&value, 1)).expect("a restart refuses itself");
        assert!(!seen.is_ours && seen.value == value, "it has to be claimed anew");
        let taken = restarted.value(|| 3);
        // The answer to that write was lost.
        assert!(restarted.judge(address, entry(&taken, 2)).unwrap().is_ours);
        let refusal = first.judge(address, entry(&taken, 2)).unwrap_err().to_string();
        assert!(refusal.contains("after this one"), "the cause is not named: {refusal}");
        let elsewhere = Ipv4Addr::new(192, 0, 2, 2);
        let seen = first.judge(elsewhere, entry(&taken, 2)).expect("what it never held");
        assert!(!seen.is_ours);
    }

    #[test]
    fn of_two_copies_of_a_running_machine_each_finds_the_number_of_the_other() {
        let address = Ipv4Addr::new(192, 0, 2, 1);
        let entry = |value, revision| Some(ClaimEntry { value, revision, lease: 7 });
        let mut one = Claimant::of(node("a", None, "boot-1"));
        let before = one.value(|| 1);
        one.written(address);
        let mut other = one.clone();
        let next = one.value(|| 2);
        one.written(address);
        assert!(one.judge(address, entry(&next, 2)).unwrap().is_ours);
        assert!(one.judge(address, entry(&before, 3)).unwrap().is_ours, "its own late write");
        other.judge(address, entry(&next, 2)).expect_err("two nodes own one subnet");
    }

    #[test]
    fn what_a_foreign_claim_says_cannot_forge_a_line_of_the_log() {
        let hostile = node(&format!("a\nE1121 {}", "x".repeat(5000)), Some("\u{1b}[2J"), "b");
        let text = hostile.describe_to(&node("a", None, "c"));
        assert!(!text.contains(['\n', '\u{1b}']) && text.len() < 400, "{text}");
    }
}
