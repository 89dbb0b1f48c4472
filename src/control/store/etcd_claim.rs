//! This node's claim on its PublicIP in etcd: `<prefix>/weft/nodes/<PublicIP>`, beside `subnets/`,
//! because flannel's nodes read everything below that. It names the node, and a short etcd lease
//! takes it away when the node is gone, or has another address.
//!
//! It is written once, and after that only its etcd lease is kept alive, which is no write to
//! etcd. What takes a subnet for a node that starts compares it, so that of two nodes with one
//! address one gets the subnet; what a running node writes does not.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, TxnOp};
use tokio::sync::{Mutex, Notify};

use super::etcd_connection::Connection;
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::{NodeIdentity, holder_of};

/// Looks at a claim that others write in the same moment, before the caller has to retry.
const LOOKS_MAX: u32 = 3;

const READING: &str = "reading the claim on the PublicIP";

/// The claims of this run.
pub(in crate::control) struct Claims {
    /// Nobody claims anything without.
    pub(super) node: Option<NodeIdentity>,
    connection: Arc<Connection>,
    state: Mutex<State>,
    /// The etcd lease ended while it was to be kept: by a pause, or with the store's data.
    pub(super) lost: Notify,
}

#[derive(Default)]
struct State {
    /// The etcd lease that ends the claim.
    lease: Option<i64>,
    /// What is claimed, and the revision of that.
    held: Option<(IpAddr, i64)>,
}

impl Claims {
    pub(super) fn new(connection: &Arc<Connection>) -> Self {
        let connection = Arc::clone(connection);
        Self { node: None, connection, state: Mutex::default(), lost: Notify::new() }
    }

    /// Claims `address`, or keeps that claim alive, unless another node has it.
    pub(super) async fn claim(&self, address: IpAddr, ttl: Duration) -> StoreResult<()> {
        let mut claimed = self.claim_at(&self.claim_path(address), address, ttl).await;
        if let Err(StoreError::Refused { detail, .. }) = &mut claimed {
            detail.push_str(&format!(" (the key is {})", self.claim_path(address)));
        }
        claimed
    }

    async fn claim_at(&self, path: &str, address: IpAddr, ttl: Duration) -> StoreResult<()> {
        let Some(node) = &self.node else { return Ok(()) };
        let mut state = self.state.lock().await;
        if state.held.is_some_and(|(held, _)| held != address) {
            // The claim of before lapses, once the own entry has had time to tell the new address.
            *state = State::default();
        }
        if let Some(id) = state.lease
            && self.connection.keep_alive(id, Duration::ZERO).await?.is_none()
        {
            *state = State::default();
            self.lost.notify_one();
        }
        // A run that starts takes the claim for absent, as most are, and is shown it if it is not.
        let mut shown = match state.lease {
            Some(_) => self.connection.get(READING, path).await?,
            None => None,
        };
        for _ in 0..LOOKS_MAX {
            let revision = shown.as_ref().map_or(0, KeyValue::mod_revision);
            let found = shown.as_ref().map(|found| (found.value(), found.lease()));
            if node.validate(address, found, state.lease, state.held.is_some())? {
                state.held = Some((address, revision));
                return Ok(());
            }
            let id = match state.lease {
                Some(id) => id,
                None => self.connection.grant(ttl).await?.id,
            };
            state.lease = Some(id);
            let bound = PutOptions::new().with_lease(id);
            let put = TxnOp::put(path, node.to_json(), Some(bound));
            let operation = "claiming the PublicIP";
            let write = self.connection.compare_and_swap(operation, path, revision, [], [put]);
            match write.await? {
                Ok(revision) => {
                    state.held = Some((address, revision));
                    return Ok(());
                }
                Err(found) => shown = found,
            }
        }
        Err(StoreError::Conflict(path.to_owned()))
    }

    /// The condition that the claim of `address` is as this run wrote it, if it did.
    pub(super) async fn still_claimed(&self, address: IpAddr) -> Option<Compare> {
        let held = self.state.lock().await.held;
        let (_, revision) = held.filter(|(held, _)| *held == address)?;
        Some(Compare::mod_revision(self.claim_path(address), CompareOp::Equal, revision))
    }

    /// Who claims `address` now, in words.
    pub(super) async fn holder(&self, address: IpAddr) -> StoreResult<Option<String>> {
        Ok(self.claimant(address).await?.map(|holder| holder.describe(false)))
    }

    /// Whether `address` is claimed by an earlier run of this node, since it was booted.
    pub(super) async fn is_ours(&self, address: IpAddr) -> StoreResult<bool> {
        Ok(self.node.is_some() && self.claimant(address).await? == self.node)
    }

    async fn claimant(&self, address: IpAddr) -> StoreResult<Option<NodeIdentity>> {
        let found = self.connection.get(READING, &self.claim_path(address)).await?;
        Ok(found.and_then(|found| holder_of(found.value(), found.lease())))
    }

    /// Gives up the claim of this run, and has the store take it back if that `is_up`. The next run
    /// of this process finds what its successor may have left there, as any start.
    pub(in crate::control) async fn release(&self, is_up: bool) {
        let State { lease, .. } = std::mem::take(&mut *self.state.lock().await);
        if let Some(id) = lease.filter(|_| is_up) {
            self.connection.revoke(id).await;
        }
    }

    fn claim_path(&self, address: IpAddr) -> String {
        self.connection.path(format_args!("weft/nodes/{address}"))
    }
}
