//! This node's claim on its PublicIP in etcd: `<prefix>/weft/nodes/<PublicIP>`, beside `subnets/`,
//! because flannel's nodes read everything below that. It names the node, and a short etcd lease
//! takes it away when the node is gone.
//!
//! It is written once, and after that only its etcd lease is kept alive, which is no write to
//! etcd. What takes a subnet for a node that starts compares it, so that of two nodes with one
//! address one gets the subnet; what a running node writes does not.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse};
use tokio::sync::{Mutex, Notify};
use tracing::{info, warn};

use super::etcd_connection::{Connection, NO_PERMISSION};
use crate::control::error::StoreError;
use crate::control::identity::{ClaimEntry, NodeIdentity, holder_of};

/// Looks at a claim that others write in the same moment, before the caller has to retry.
const LOOKS_MAX: u32 = 3;

/// The claims of this run.
#[derive(Debug)]
pub(super) struct Claims {
    connection: Arc<Connection>,
    prefix: String,
    state: Mutex<State>,
    /// The etcd lease ended while it was to be kept: by a pause, or with the store's data.
    pub(super) lost: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Nobody claims anything without.
    node: Option<NodeIdentity>,
    /// Whether the user may not claim, which was logged.
    is_refused: bool,
    /// The etcd lease that ends them.
    lease: Option<i64>,
    /// The revision of each; more than one while a move is under way.
    held: BTreeMap<Ipv4Addr, i64>,
    /// The one that was read last.
    current: Option<Ipv4Addr>,
}

impl Claims {
    pub(super) fn new(
        node: Option<NodeIdentity>,
        connection: &Arc<Connection>,
        prefix: &str,
    ) -> Self {
        let state = Mutex::new(State { node, ..State::default() });
        let (connection, prefix) = (Arc::clone(connection), prefix.to_owned());
        Self { connection, prefix, state, lost: Notify::new() }
    }

    /// Claims `public_ip`, or keeps that claim alive, unless another node has it. What was claimed
    /// before goes with the second call, when the own entry has had time to tell the new address.
    /// Returns whether etcd shows whose it is: a user who may not see that goes on without.
    pub(super) async fn claim(
        &self,
        public_ip: Ipv4Addr,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        let mut claims = self.state.lock().await;
        let Some(node) = claims.node.clone() else { return Ok(false) };
        let result = self.claim_as(&node, &mut claims, public_ip, ttl).await;
        let path = self.claim_path(public_ip);
        match result {
            Err(StoreError::Refused { detail, .. }) if detail.contains(NO_PERMISSION) => {
                if !std::mem::replace(&mut claims.is_refused, true) {
                    warn!(
                        "etcd refuses the key {path}, so another node with the same PublicIP would \
                         not be noticed; going on without, and trying again. Grant the role \
                         readwrite on the prefix {}/weft/",
                        self.prefix
                    );
                }
                Ok(false)
            }
            result => {
                if result.is_ok() && std::mem::take(&mut claims.is_refused) {
                    info!("etcd takes the key {path} now: PublicIP {public_ip} is claimed");
                }
                result.map(|()| true)
            }
        }
    }

    async fn claim_as(
        &self,
        node: &NodeIdentity,
        claims: &mut State,
        public_ip: Ipv4Addr,
        ttl: Duration,
    ) -> Result<(), StoreError> {
        if let Some(id) = claims.lease
            && self.connection.keep_alive(id, Duration::ZERO).await?.is_none()
        {
            let is_refused = claims.is_refused;
            *claims = State { node: Some(node.clone()), is_refused, ..State::default() };
            self.lost.notify_one();
        }
        if claims.current == Some(public_ip) {
            self.leave_all_but(claims, public_ip).await?;
        }
        let path = self.claim_path(public_ip);
        // A run that starts takes the claim for absent, as most are, and is shown it if it is not.
        let mut shown = match claims.lease {
            Some(_) => self.look(&path).await?,
            None => None,
        };
        claims.current = Some(public_ip);
        for _ in 0..LOOKS_MAX {
            let found = shown.as_ref().map(|found| ClaimEntry {
                value: found.value(),
                revision: found.mod_revision(),
                lease: found.lease(),
            });
            let held = claims.held.contains_key(&public_ip);
            let claim = node.validate(public_ip, found, claims.lease, held)?;
            if claim.is_ours {
                claims.held.insert(public_ip, claim.revision);
                return Ok(());
            }
            let id = match claims.lease {
                Some(id) => id,
                None => self.connection.grant(ttl).await?.id,
            };
            claims.lease = Some(id);
            let bound = PutOptions::new().with_lease(id);
            let put = TxnOp::put(path.as_str(), node.to_json(), Some(bound));
            match self.write_claim(&path, claim.revision, put).await? {
                Ok(revision) => {
                    claims.held.insert(public_ip, revision);
                    return Ok(());
                }
                Err(found) => shown = found,
            }
        }
        Err(StoreError::Conflict(path))
    }

    async fn leave_all_but(
        &self,
        claims: &mut State,
        public_ip: Ipv4Addr,
    ) -> Result<(), StoreError> {
        let left: Vec<_> = claims.held.iter().map(|(left, revision)| (*left, *revision)).collect();
        for (left, revision) in left.into_iter().filter(|(left, _)| *left != public_ip) {
            let path = self.claim_path(left);
            // What is there instead, if anything, is another run's.
            let _others =
                self.write_claim(&path, revision, TxnOp::delete(path.as_str(), None)).await?;
            claims.held.remove(&left);
        }
        Ok(())
    }

    async fn look(&self, path: &str) -> Result<Option<KeyValue>, StoreError> {
        let look = |mut client: etcd_client::Client| async move { client.get(path, None).await };
        let shown = self.connection.read("reading the claim on the PublicIP", look).await?;
        Ok(shown.kvs().first().cloned())
    }

    /// Writes the claim at `path` if it is as of `revision`, and gives the revision after that;
    /// else what is there.
    async fn write_claim(
        &self,
        path: &str,
        revision: i64,
        write: TxnOp,
    ) -> Result<Result<i64, Option<KeyValue>>, StoreError> {
        let unchanged = Compare::mod_revision(path, CompareOp::Equal, revision);
        let look = TxnOp::get(path, None);
        let transaction = Txn::new().when([unchanged]).and_then([write]).or_else([look]);
        let written = self
            .connection
            .call(
                "claiming the PublicIP",
                |mut client| async move { client.txn(transaction).await },
            )
            .await?;
        if written.succeeded() {
            return Ok(Ok(written.header().map_or(0, |header| header.revision())));
        }
        match written.op_responses().first() {
            Some(TxnOpResponse::Get(found)) => Ok(Err(found.kvs().first().cloned())),
            _ => Ok(Err(None)),
        }
    }

    /// The condition that the claim of `public_ip` is as this run wrote it, if it did.
    pub(super) async fn still_claimed(&self, public_ip: Ipv4Addr) -> Option<Compare> {
        let revision = self.state.lock().await.held.get(&public_ip).copied()?;
        Some(Compare::mod_revision(self.claim_path(public_ip), CompareOp::Equal, revision))
    }

    /// Who claims `public_ip` now, in words.
    pub(super) async fn holder(&self, public_ip: Ipv4Addr) -> Result<Option<String>, StoreError> {
        let found = self.look(&self.claim_path(public_ip)).await?;
        let holder = found.and_then(|found| holder_of(found.value(), found.lease()));
        Ok(holder.map(|holder| holder.describe(false)))
    }

    /// Gives up all claims of this run.
    pub(super) async fn release(&self) {
        let lease = self.state.lock().await.lease.take();
        if let Some(id) = lease {
            self.connection.revoke(id).await;
        }
    }

    fn claim_path(&self, public_ip: Ipv4Addr) -> String {
        format!("{}/weft/nodes/{public_ip}", self.prefix)
    }
}
