//! This node's claim on its PublicIP in etcd: `<prefix>/weft/nodes/<PublicIP>`, beside `subnets/`,
//! because flannel's nodes read everything below that. It names the node, and a short etcd lease
//! takes it away when the node is gone.
//!
//! Every write of the own subnet carries the claim in its transaction: it happens only if the claim
//! is ours, or nobody's, and then it becomes ours in the same moment.

use std::net::Ipv4Addr;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};
use tracing::warn;

use super::StoreError;
use super::etcd::{EtcdLease, EtcdStore, Page};
use crate::control::claim::{CLAIM_TTL, Claim, ClaimEntry, Claimant, NodeIdentity};
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
    /// Nobody claims anything without.
    claimant: Option<Claimant>,
    current: Option<Claim>,
    lease: Option<EtcdLease>,
    /// How often it was kept alive.
    keeps: u64,
    /// Our user has no permission for the key.
    is_denied: bool,
}

/// A write of the own entry: `operation` if `condition` holds.
#[derive(Debug, Default)]
pub(super) struct Write {
    pub(super) condition: Option<Compare>,
    pub(super) operation: Option<TxnOp>,
}

impl Claims {
    pub(super) fn of(node: NodeIdentity) -> Self {
        Self { claimant: Some(Claimant::of(node)), ..Self::default() }
    }

    /// What to claim together with a write for `public_ip`, if anything.
    fn wanted(&self, public_ip: Ipv4Addr) -> Option<Claim> {
        let claims = self.claimant.is_some() && !self.is_denied;
        let current = self.current.as_ref().filter(|claim| claim.public_ip == public_ip);
        claims.then(|| current.cloned().unwrap_or_else(|| Claim::unseen(public_ip)))
    }

    /// What the claim is if its key shows this.
    fn judge(
        &mut self,
        public_ip: Ipv4Addr,
        found: Option<&KeyValue>,
    ) -> Result<Claim, StoreError> {
        let Some(claimant) = &mut self.claimant else { return Ok(Claim::unseen(public_ip)) };
        let shown = found.map(|found| ClaimEntry {
            value: found.value(),
            revision: found.mod_revision(),
            lease: found.lease(),
        });
        let claim = claimant.judge(public_ip, shown)?;
        if let Some(found) = found.filter(|_| claim.is_ours)
            && self.lease.is_none_or(|lease| lease.id != found.lease())
        {
            self.lease = Some(EtcdLease::unknown(found.lease()));
        }
        Ok(claim)
    }

    /// What is to be written of a claim.
    fn value(&mut self) -> Vec<u8> {
        self.claimant.as_mut().map(|claimant| claimant.value(draw)).unwrap_or_default()
    }

    fn written(&mut self, public_ip: Ipv4Addr) {
        if let Some(claimant) = &mut self.claimant {
            claimant.written(public_ip);
        }
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
        claims.current = claims.wanted(public_ip);
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
        let before = self.claims.lock().await.current.clone();
        let Some(public_ip) = before.as_ref().map(|claim| claim.public_ip) else {
            return Ok(None);
        };
        let both = [self.look(public_ip), TxnOp::get(from, Some(options.clone()))];
        let transaction = Txn::new().and_then(both);
        let read = |mut client: etcd_client::Client| {
            let transaction = transaction.clone();
            async move { client.txn(transaction).await }
        };
        match self.connection.read("listing leases", read).await {
            Ok(response) => {
                let mut answers = response.op_responses().into_iter();
                let found = answers.next().and_then(first_key);
                let mut claims = self.claims.lock().await;
                // What was written meanwhile is newer than what was read: it would show the claim
                // of our last run as one that was made after ours.
                if claims.current == before {
                    claims.current = Some(claims.judge(public_ip, found.as_ref())?);
                }
                Ok(answers.next().and_then(found_by).map(|found| Page {
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
        let Some(Claim { public_ip, .. }) = claims.current.take() else { return };
        if !std::mem::replace(&mut claims.is_denied, true) {
            warn!(
                "etcd refuses the key {}, so another node with the same PublicIP would not be \
                 noticed; going on without. Grant the role readwrite on the prefix {}/weft/ and \
                 restart weftd",
                self.claim_path(public_ip),
                self.prefix()
            );
        }
    }

    /// Carries out `write`, which is for the node at `public_ip`, if nobody else claims that
    /// address, and returns the store's revision after it.
    pub(super) async fn write_claiming(
        &self,
        name: &'static str,
        key: &str,
        public_ip: Ipv4Addr,
        write: Write,
    ) -> Result<i64, StoreError> {
        let mut claims = self.claims.lock().await;
        let Some(mut claim) = claims.wanted(public_ip) else {
            drop(claims);
            return self.write_alone(name, key, write).await;
        };
        let moves = claims.current.as_ref().is_some_and(|current| current.public_ip != public_ip);
        let left_behind = if moves { claims.lease.take() } else { None };
        let old = claims.lease.map(|lease| lease.id);
        for _ in 0..TRIES_MAX {
            let (transaction, value) = self.with_claim(&mut claims, &claim, &write).await?;
            let response = match self.transact(name, transaction).await {
                Err(error) if is_permission(&error) => {
                    claims.current.get_or_insert(claim);
                    drop(claims);
                    let written = self.write_alone(name, key, write).await;
                    if !written.as_ref().is_err_and(is_permission) {
                        self.deny_claim().await;
                    }
                    return written;
                }
                // The store lost its data, and the claim's lease with it.
                Err(error) if !claim.is_ours && is_unknown_lease(&error) && claims.forget(old) => {
                    continue;
                }
                response => response?,
            };
            let revision = response.header().map_or(0, |header| header.revision());
            if response.succeeded() {
                if let Some(value) = value {
                    claim = Claim { public_ip, revision, value, is_ours: true };
                    claims.written(public_ip);
                }
                claims.current = Some(claim);
                let is_reused =
                    left_behind.map(|lease| lease.id) == claims.lease.map(|lease| lease.id);
                drop(claims);
                // The last address is free for others.
                if let Some(EtcdLease { id, .. }) = left_behind.filter(|_| !is_reused) {
                    self.revoke(id).await;
                }
                return Ok(revision);
            }
            let found = response.op_responses().into_iter().next().and_then(first_key);
            let seen = claims.judge(public_ip, found.as_ref());
            if seen.is_err()
                && let Some(EtcdLease { id, fresh: true, .. }) = claims.lease.take()
            {
                self.revoke(id).await;
            }
            let seen = seen?;
            if seen == claim {
                break;
            }
            claim = seen;
        }
        if moves {
            claims.lease = left_behind;
        } else {
            claims.current = Some(claim);
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

    /// `write` as a transaction that holds the claim, takes it if it is free, and else shows it;
    /// and what it makes of the claim, if it writes it.
    async fn with_claim(
        &self,
        claims: &mut Claims,
        claim: &Claim,
        write: &Write,
    ) -> Result<(Txn, Option<Vec<u8>>), StoreError> {
        let path = self.claim_path(claim.public_ip);
        let same_revision = Compare::mod_revision(path.as_str(), CompareOp::Equal, claim.revision);
        let same_value = Compare::value(path.as_str(), CompareOp::Equal, claim.value.clone());
        // A key that is absent has no value to compare.
        let same_value = (claim.revision != 0).then_some(same_value);
        let unchanged = std::iter::once(same_revision).chain(same_value);
        let mut operations: Vec<_> = write.operation.iter().cloned().collect();
        let mut value = None;
        if !claim.is_ours {
            let lease = match claims.lasting_lease() {
                Some(lease) => lease,
                None => self.grant(CLAIM_TTL).await?,
            };
            claims.lease = Some(lease);
            let bound = PutOptions::new().with_lease(lease.id);
            let value = value.insert(claims.value());
            operations.push(TxnOp::put(path, value.clone(), Some(bound)));
        }
        let conditions: Vec<_> = write.condition.iter().cloned().chain(unchanged).collect();
        let look = self.look(claim.public_ip);
        Ok((Txn::new().when(conditions).and_then(operations).or_else([look]), value))
    }

    async fn transact(&self, name: &'static str, txn: Txn) -> Result<TxnResponse, StoreError> {
        self.connection.call(name, |mut client| async move { client.txn(txn).await }).await
    }

    /// Keeps the claim alive, or claims again what lapsed.
    pub(super) async fn keep_claim(&self) -> Result<(), StoreError> {
        let mut claims = self.claims.lock().await;
        let Some(claim) = claims.current.clone() else { return Ok(()) };
        if let Some(lease) = claims.lease.filter(|_| claim.is_ours) {
            match self.keep_alive(lease.id, Duration::ZERO).await? {
                Some(kept) => {
                    claims.lease = Some(kept);
                    claims.keeps += 1;
                    if !claims.keeps.is_multiple_of(KEEPS_PER_NUMBER) {
                        return Ok(());
                    }
                    claims.current = Some(claim.clone().with_another_number());
                }
                None => {
                    claims.lease = None;
                    claims.current = Some(claim.lapsed());
                }
            }
        }
        drop(claims);
        let (name, key) = ("claiming the PublicIP", self.claim_path(claim.public_ip));
        let result = self.write_claiming(name, &key, claim.public_ip, Write::default()).await;
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

fn first_key(answer: TxnOpResponse) -> Option<KeyValue> {
    found_by(answer)?.take_kvs().into_iter().next()
}

fn found_by(answer: TxnOpResponse) -> Option<GetResponse> {
    match answer {
        TxnOpResponse::Get(found) => Some(found),
        TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
    }
}
