//! This node's claim on its PublicIP in etcd: `<prefix>/weft/nodes/<PublicIP>`, beside `subnets/`,
//! because flannel's nodes read everything below that. It names the node, and a short etcd lease
//! takes it away when the node is gone.
//!
//! Every write of the own subnet carries the claim in its transaction: it happens only if the claim
//! is ours, or nobody's, and then it becomes ours in the same moment. What a write compares and
//! writes of claims is the ledger's to say, `control::claim::ledger`.

use std::net::Ipv4Addr;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};
use tracing::warn;

use super::StoreError;
use super::etcd::{EtcdLease, EtcdStore, Page};
use crate::control::claim::ledger::{Ledger, Terms};
use crate::control::claim::{CLAIM_TTL, Claim, ClaimEntry, NodeIdentity};
use crate::control::clock;
use crate::failure::with_causes;

/// Tries of one write while its claim turns out to be another than was known: absent, lapsed, of
/// the last run.
const TRIES_MAX: u32 = 3;
/// An etcd lease with less than this left is not bound to a new claim.
const LEASE_LEFT_MIN: Duration = Duration::from_secs(10);

/// How often a claim is kept alive before it is written with another number. That its lease lives
/// says nothing of the key: who was replaced finds it so within half a minute, also by a copy of
/// its machine that knows the same numbers.
const KEEPS_PER_NUMBER: u64 = 3;

/// What is known of the own claim.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Nobody claims anything without: a node without a name, or a user without permission.
    ledger: Option<Ledger>,
    /// What ends all claims of this run.
    lease: Option<EtcdLease>,
    /// How often it was kept alive.
    keeps: u64,
}

/// A write of the own entry: `operation` if `condition` holds.
#[derive(Debug, Default)]
pub(super) struct Write {
    pub(super) condition: Option<Compare>,
    pub(super) operation: Option<TxnOp>,
}

impl Claims {
    pub(super) fn of(node: NodeIdentity) -> Self {
        Self { ledger: Some(Ledger::of(node)), ..Self::default() }
    }

    fn known(&self) -> Vec<Claim> {
        self.ledger.as_ref().map(Ledger::known).unwrap_or_default()
    }

    /// What to write with, now that the claims' keys show this.
    fn see(
        &mut self,
        to: Option<Ipv4Addr>,
        shown: &[(Ipv4Addr, Option<KeyValue>)],
    ) -> Result<Option<Claim>, StoreError> {
        let Some(ledger) = &mut self.ledger else { return Ok(None) };
        let shown: Vec<_> =
            shown.iter().map(|(ip, found)| (*ip, found.as_ref().map(entry))).collect();
        let target = ledger.see(to, &shown)?;
        let ours = ledger.current().filter(|claim| claim.is_ours);
        let bound = ours.and_then(|claim| {
            shown.iter().find(|(ip, _)| *ip == claim.public_ip).and_then(|(_, found)| *found)
        });
        if let Some(ClaimEntry { lease, .. }) = bound
            && self.lease.is_none_or(|known| known.id != lease)
        {
            self.lease = Some(EtcdLease::unknown(lease));
        }
        Ok(target)
    }

    /// The claim to write with for the address `to`, or where the entry is; `None` is without.
    fn target(&mut self, to: Option<Ipv4Addr>) -> Option<Claim> {
        let ledger = self.ledger.as_mut()?;
        if let Some(first) = to.filter(|_| ledger.current().is_none()) {
            ledger.claim(first);
        }
        ledger.target(to)
    }

    fn terms(&mut self, target: Option<Claim>) -> Option<(Claim, Terms)> {
        let (ledger, target) = (self.ledger.as_mut()?, target?);
        let terms = ledger.terms(&target, draw);
        Some((target, terms))
    }

    fn unchanged(&self, target: Option<&Claim>) -> Vec<Claim> {
        let both = self.ledger.as_ref().zip(target);
        both.map(|(ledger, target)| ledger.unchanged(target)).unwrap_or_default()
    }

    fn written(&mut self, target: Claim, terms: Terms, revision: i64) {
        if let Some(ledger) = &mut self.ledger {
            ledger.written(target, terms, revision);
        }
    }

    /// The write with the claim `target` failed; whether it goes in all the same, nobody knows.
    fn failed(&mut self, target: Claim, error: &StoreError) {
        if let Some(ledger) = self.ledger.as_mut().filter(|_| !error.nothing_was_written()) {
            ledger.unanswered(target);
        }
    }

    /// The etcd lease, if it is another than `old` and bound to nothing.
    fn granted_since(&mut self, old: Option<i64>) -> Option<EtcdLease> {
        self.lease.take_if(|lease| lease.fresh && Some(lease.id) != old)
    }

    /// Forgets the etcd lease if it is `old`; whether it was.
    fn forget(&mut self, old: Option<i64>) -> bool {
        self.lease.take_if(|lease| Some(lease.id) == old).is_some()
    }

    /// The etcd lease, if it lives for some while yet.
    fn lasting_lease(&self) -> Option<EtcdLease> {
        let enough = clock::boot_time() + LEASE_LEFT_MIN;
        self.lease.filter(|lease| lease.expires > enough)
    }
}

impl EtcdStore {
    /// From now on this is the address to claim. Nothing is asked of the store.
    pub(super) async fn claim(&self, public_ip: Ipv4Addr) {
        let mut claims = self.claims.lock().await;
        if claims.ledger.as_mut().is_some_and(|ledger| ledger.claim(public_ip)) {
            // A claim of before ends with it.
            claims.lease = None;
        }
    }

    fn claim_path(&self, public_ip: Ipv4Addr) -> String {
        format!("{}/weft/nodes/{public_ip}", self.prefix())
    }

    fn look(&self, public_ip: Ipv4Addr) -> TxnOp {
        TxnOp::get(self.claim_path(public_ip), None)
    }

    /// A page of a listing that also reads the claim, at no more requests.
    pub(super) async fn page_with_claim(
        &self,
        from: &[u8],
        options: &GetOptions,
    ) -> Result<Option<Page>, StoreError> {
        let before = self.claims.lock().await.known();
        if before.is_empty() {
            return Ok(None);
        }
        let looks = before.iter().map(|claim| self.look(claim.public_ip));
        let all: Vec<_> = looks.chain([TxnOp::get(from, Some(options.clone()))]).collect();
        let transaction = Txn::new().and_then(all);
        let read = |mut client: etcd_client::Client| {
            let transaction = transaction.clone();
            async move { client.txn(transaction).await }
        };
        match self.connection.read("listing leases", read).await {
            Ok(response) => {
                let mut answers = response.op_responses();
                let page = answers.pop().and_then(found_by);
                let shown = shown(before.iter().map(|claim| claim.public_ip), answers);
                let mut claims = self.claims.lock().await;
                // What was written meanwhile is newer than what was read: it would show the claim
                // of our last run as one that was made after ours.
                if claims.known() == before {
                    claims.see(None, &shown)?;
                }
                Ok(page.map(|found| Page {
                    revision: response.header().map_or(0, |header| header.revision()),
                    cluster: response.header().map_or(0, |header| header.cluster_id()),
                    found,
                }))
            }
            // Whether for the claim's sake, the caller finds out without it.
            Err(error) if is_permission(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// After a request that was refused with the claim, and is not without.
    pub(super) async fn deny_claim(&self) {
        let mut claims = self.claims.lock().await;
        let current = claims.ledger.as_ref().and_then(Ledger::current);
        let Some(public_ip) = current.map(|claim| claim.public_ip) else { return };
        claims.ledger = None;
        warn!(
            "etcd refuses the key {}, so another node with the same PublicIP would not be \
             noticed; going on without. Grant the role readwrite on the prefix {}/weft/ and \
             restart weftd",
            self.claim_path(public_ip),
            self.prefix()
        );
    }

    /// Carries out `write` with the claim of the address `to`, or with the one that the entry has,
    /// if nobody else has it, and returns the store's revision after it.
    pub(super) async fn write_claiming(
        &self,
        name: &'static str,
        key: &str,
        to: Option<Ipv4Addr>,
        write: Write,
    ) -> Result<i64, StoreError> {
        let mut claims = self.claims.lock().await;
        let old = claims.lease.map(|lease| lease.id);
        let mut target = claims.target(to);
        for _ in 0..TRIES_MAX {
            let Some((claim, terms)) = claims.terms(target.take()) else {
                drop(claims);
                return self.write_alone(name, key, write).await;
            };
            let transaction = self.with_claim(&mut claims, &claim, &terms, &write).await?;
            match self.transact(name, transaction).await {
                Ok(response) if response.succeeded() => {
                    let revision = response.header().map_or(0, |header| header.revision());
                    claims.written(claim, terms, revision);
                    return Ok(revision);
                }
                Ok(response) => {
                    let shown = shown(terms.look.iter().copied(), response.op_responses());
                    let seen = claims.see(to, &shown);
                    if seen.is_err()
                        && let Some(lease) = claims.granted_since(old)
                    {
                        self.revoke(lease.id).await;
                    }
                    target = seen?;
                    if claims.unchanged(target.as_ref()) == terms.unchanged {
                        break;
                    }
                }
                Err(error) if is_permission(&error) => {
                    drop(claims);
                    let written = self.write_alone(name, key, write).await;
                    if !written.as_ref().is_err_and(is_permission) {
                        self.deny_claim().await;
                    }
                    return written;
                }
                // The store lost its data, and the claim's lease with it.
                Err(error)
                    if terms.put.is_some() && is_unknown_lease(&error) && claims.forget(old) =>
                {
                    target = Some(claim);
                }
                Err(error) => {
                    claims.failed(claim, &error);
                    return Err(error);
                }
            }
        }
        Err(StoreError::Conflict { key: key.to_owned() })
    }

    async fn write_alone(
        &self,
        name: &'static str,
        key: &str,
        write: Write,
    ) -> Result<i64, StoreError> {
        let condition: Vec<_> = write.condition.into_iter().collect();
        let operation: Vec<_> = write.operation.into_iter().collect();
        let response = self.transact(name, Txn::new().when(condition).and_then(operation)).await?;
        if !response.succeeded() {
            return Err(StoreError::Conflict { key: key.to_owned() });
        }
        Ok(response.header().map_or(0, |header| header.revision()))
    }

    /// `write` as a transaction on these terms for the claim `target`; else it shows the claims.
    async fn with_claim(
        &self,
        claims: &mut Claims,
        target: &Claim,
        terms: &Terms,
        write: &Write,
    ) -> Result<Txn, StoreError> {
        let mut conditions: Vec<_> = write.condition.iter().cloned().collect();
        for Claim { public_ip, revision, value, .. } in &terms.unchanged {
            let path = self.claim_path(*public_ip);
            conditions.push(Compare::mod_revision(path.as_str(), CompareOp::Equal, *revision));
            // A key that is absent has no value to compare.
            if *revision != 0 {
                conditions.push(Compare::value(path, CompareOp::Equal, value.clone()));
            }
        }
        let mut operations: Vec<_> = write.operation.iter().cloned().collect();
        if let Some(value) = &terms.put {
            let lease = match claims.lasting_lease() {
                Some(lease) => lease,
                None => self.grant(CLAIM_TTL).await?,
            };
            claims.lease = Some(lease);
            let bound = PutOptions::new().with_lease(lease.id);
            let path = self.claim_path(target.public_ip);
            operations.push(TxnOp::put(path, value.clone(), Some(bound)));
        }
        // The address of before is free for others.
        let delete = terms.delete.iter().map(|left| TxnOp::delete(self.claim_path(*left), None));
        operations.extend(delete);
        let looks: Vec<_> = terms.look.iter().map(|public_ip| self.look(*public_ip)).collect();
        Ok(Txn::new().when(conditions).and_then(operations).or_else(looks))
    }

    async fn transact(&self, name: &'static str, txn: Txn) -> Result<TxnResponse, StoreError> {
        self.connection.call(name, |mut client| async move { client.txn(txn).await }).await
    }

    /// Keeps the claim alive, or claims again what lapsed.
    pub(super) async fn keep_claim(&self) -> Result<(), StoreError> {
        let mut claims = self.claims.lock().await;
        let Claims { ledger: Some(ledger), lease, keeps } = &mut *claims else { return Ok(()) };
        let Some(claim) = ledger.current() else { return Ok(()) };
        let public_ip = claim.public_ip;
        if let Some(held) = lease.filter(|_| claim.is_ours) {
            *lease = self.keep_alive(held.id, Duration::ZERO).await?;
            if lease.is_some() {
                *keeps += 1;
                if !keeps.is_multiple_of(KEEPS_PER_NUMBER) {
                    return Ok(());
                }
                ledger.renumber();
            } else {
                ledger.lapsed();
            }
        }
        drop(claims);
        let (name, key) = ("claiming the PublicIP", self.claim_path(public_ip));
        let result = self.write_claiming(name, &key, None, Write::default()).await;
        if let Err(error @ StoreError::Unavailable { .. }) = &result {
            tracing::debug!("The claim on the PublicIP lapsed: {}", with_causes(error));
        }
        result.map(|_| ())
    }
}

/// A number that nobody else draws, not even a copy of this process in a copy of its machine: from
/// the kernel, which knows when its machine was copied.
fn draw() -> u64 {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    let last = uuid.trim().rsplit('-').next().unwrap_or_default();
    u64::from_str_radix(last, 16).unwrap_or_else(|_| fastrand::u64(1..))
}

/// Whether the store said that our user may not touch a key.
fn is_permission(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused { detail, .. } if detail.contains("permission denied"))
}

/// Whether the store said that there is no such etcd lease as a key was to be bound to.
fn is_unknown_lease(error: &StoreError) -> bool {
    matches!(error, StoreError::Unavailable { detail, .. } if detail.contains("lease not found"))
}

/// What the claims of these addresses are by the answers to as many looks.
fn shown(
    addresses: impl Iterator<Item = Ipv4Addr>,
    answers: Vec<TxnOpResponse>,
) -> Vec<(Ipv4Addr, Option<KeyValue>)> {
    let found = |answer| found_by(answer).and_then(|found| found.kvs().first().cloned());
    addresses.zip(answers.into_iter().map(found)).collect()
}

fn entry(found: &KeyValue) -> ClaimEntry<'_> {
    ClaimEntry { value: found.value(), revision: found.mod_revision(), lease: found.lease() }
}

fn found_by(answer: TxnOpResponse) -> Option<GetResponse> {
    match answer {
        TxnOpResponse::Get(found) => Some(found),
        TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
    }
}
