//! The etcd v3 store, with flannel's keys and values. Every write is a transaction that compares
//! the version last seen; no request asks for the time to live of another node's lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::etcd_claim::Claims;
use super::etcd_connection::{Connection, SPACE_ADVICE, config_key};
use super::etcd_lease::EtcdLease;
use super::etcd_watch::{EtcdWatch, Origin, decode};
use crate::config::network::CONFIG_BYTES_MAX;
use crate::config::options::EtcdOptions;
use crate::control::error::StoreError;
use crate::control::identity::{NodeIdentity, holder_of};
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::control::request_times::RequestTimes;
use crate::control::snapshot::{ENTRIES_MAX, Granted, Snapshot};
use crate::control::status::Names;
use crate::route::Prefix;
use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, PutOptions, SortOrder, SortTarget, Txn,
    TxnOp,
};

pub use super::etcd_tls::EtcdOptionsError;

/// Keys asked for at once. A thousand leases of 200 bytes are far below the client's limit of
/// 4 MiB a message; a page with huge values is asked for again in smaller ones.
const PAGE_KEYS_MAX: i64 = 1000;
/// Keys looked at in one listing, of any kind: a flood of junk ends it.
const SCANNED_KEYS_MAX: usize = 16 * ENTRIES_MAX;

/// Leases below a prefix of an etcd cluster.
#[derive(Debug)]
pub struct EtcdStore {
    pub(super) claims: Claims,
    connection: Arc<Connection>,
    prefix: String,
    /// The cluster that the last listing came from; 0 before the first.
    cluster: AtomicU64,
}

impl EtcdStore {
    /// A store that connects when it is first used.
    pub fn new(options: &EtcdOptions) -> Result<Self, EtcdOptionsError> {
        let prefix = options.prefix.clone();
        let connection = Arc::new(Connection::new(options.clone())?);
        let claims = Claims::new(None, &connection, &prefix);
        Ok(Self { claims, connection, prefix, cluster: AtomicU64::new(0) })
    }

    pub(super) fn with_identity(self, node: NodeIdentity) -> Self {
        Self { claims: Claims::new(Some(node), &self.connection, &self.prefix), ..self }
    }

    /// The cluster that was last connected to, by its id; 0 before the first.
    pub(super) fn cluster(&self) -> u64 {
        self.connection.cluster()
    }

    /// This host has another address.
    pub(super) fn moved(&self) {
        self.connection.moves.add();
    }

    /// How long it takes to answer.
    pub(super) fn times(&self) -> Arc<RequestTimes> {
        Arc::clone(&self.connection.times)
    }

    /// Why etcd takes no writes, if an alarm says so. Asks one member, which writes nothing.
    pub(super) async fn alarm(&self) -> Result<Option<String>, StoreError> {
        let ask = |mut client: etcd_client::Client| async move { client.status().await };
        let status = self.connection.call("asking for alarms", ask).await?;
        let is_full = status.errors().iter().any(|error| error.contains("NOSPACE"));
        Ok(is_full.then(|| format!("etcd refuses writes (alarm NOSPACE); {SPACE_ADVICE}")))
    }

    fn subnets(&self) -> String {
        format!("{}/subnets/", self.prefix)
    }

    fn path(&self, key: &str) -> String {
        format!("{}/subnets/{key}", self.prefix)
    }

    pub(super) async fn config(&self) -> Result<Vec<u8>, StoreError> {
        let key = config_key(&self.prefix);
        let path = key.as_str();
        let read = |mut client: etcd_client::Client| async move { client.get(path, None).await };
        let response = self.connection.read("reading the network configuration", read).await?;
        match response.kvs().first() {
            None => Err(StoreError::NoConfig(key)),
            Some(found) if found.value().len() > CONFIG_BYTES_MAX => {
                Err(StoreError::ConfigTooLarge(key))
            }
            Some(found) => Ok(found.value().to_vec()),
        }
    }

    pub(super) async fn list(&self) -> Result<Snapshot, StoreError> {
        let subnets = self.subnets();
        // The digit zero follows the slash.
        let end = format!("{}/subnets0", self.prefix);
        let mut snapshot = Snapshot::default();
        let mut from = subnets.clone().into_bytes();
        let mut page_keys = PAGE_KEYS_MAX;
        let mut scanned = 0;
        while scanned < SCANNED_KEYS_MAX {
            let page = match self.page(&from, &end, page_keys, snapshot.revision).await {
                Ok(page) => page,
                // The page does not fit into a message: its values are huge.
                Err(StoreError::Unavailable { detail, .. })
                    if page_keys > 1 && detail.contains("message length too large") =>
                {
                    page_keys = (page_keys / 8).max(1);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if snapshot.revision == 0 {
                snapshot.revision = page.header().map_or(0, |header| header.revision());
                snapshot.cluster = page.header().map_or(0, |header| header.cluster_id());
                self.cluster.store(snapshot.cluster, Ordering::Relaxed);
            }
            for found in page.kvs() {
                snapshot.add(decode(&subnets, found));
            }
            scanned += page.kvs().len();
            match page.kvs().last() {
                Some(last) if page.more() => from = next_key(last.key()),
                Some(_) | None => return Ok(snapshot),
            }
        }
        snapshot.complete = false;
        Ok(snapshot)
    }

    async fn page(
        &self,
        from: &[u8],
        end: &str,
        keys: i64,
        revision: i64,
    ) -> Result<GetResponse, StoreError> {
        let options = GetOptions::new()
            .with_range(end)
            .with_limit(keys)
            .with_revision(revision)
            .with_sort(SortTarget::Key, SortOrder::Ascend);
        let read = |mut client: etcd_client::Client| {
            let options = options.clone();
            async move { client.get(from, Some(options)).await }
        };
        self.connection.read("listing leases", read).await
    }

    /// The names in all claims.
    pub(super) async fn names(&self) -> Result<Names, StoreError> {
        let nodes = format!("{}/weft/nodes/", self.prefix);
        // The digit zero follows the slash.
        let end = format!("{}/weft/nodes0", self.prefix);
        let name = |found: &KeyValue| {
            let address = found.key_str().ok()?.strip_prefix(&nodes)?.parse().ok()?;
            Some((address, holder_of(found.value(), found.lease())?.shown_name()))
        };
        let (mut names, mut from) = (Names::new(), nodes.clone().into_bytes());
        loop {
            let page = self.page(&from, &end, PAGE_KEYS_MAX, 0).await?;
            names.extend(page.kvs().iter().filter_map(name));
            match page.kvs().last() {
                Some(last) if page.more() && names.len() < ENTRIES_MAX => {
                    from = next_key(last.key());
                }
                Some(_) | None => return Ok(names),
            }
        }
    }

    pub(super) async fn create(
        &self,
        subnet: Prefix,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> Result<Granted, StoreError> {
        self.create_any(std::iter::once(subnet), value, ttl, None).await.0
    }

    pub(super) async fn reserve(
        &self,
        subnet: Prefix,
        value: &LeaseAttributes,
    ) -> Result<Lease, StoreError> {
        self.create_with(subnet, value, None, None).await.map(|granted| granted.lease)
    }

    /// For a node that starts: its claim has to be its own still.
    pub(super) async fn create_first(
        &self,
        subnets: impl Iterator<Item = Prefix>,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> (Result<Granted, StoreError>, u64) {
        let claimed = self.claims.still_claimed(value.public_ip).await;
        self.create_any(subnets, value, ttl, claimed).await
    }

    /// One etcd lease serves all tries, so that a lost race costs one request.
    async fn create_any(
        &self,
        subnets: impl Iterator<Item = Prefix>,
        value: &LeaseAttributes,
        ttl: Duration,
        claimed: Option<Compare>,
    ) -> (Result<Granted, StoreError>, u64) {
        let etcd_lease = match self.connection.grant(ttl).await {
            Ok(etcd_lease) => etcd_lease,
            Err(error) => return (Err(error), 0),
        };
        let mut lost = 0;
        let mut result = Err(StoreError::Conflict(self.subnets()));
        for subnet in subnets {
            result = self.create_with(subnet, value, Some(etcd_lease), claimed.clone()).await;
            match result {
                Err(StoreError::Conflict(_)) => lost += 1,
                Ok(_) | Err(_) => break,
            }
        }
        if result.as_ref().is_err_and(StoreError::nothing_was_written) {
            self.connection.revoke(etcd_lease.id).await;
        }
        (result, lost)
    }

    async fn create_with(
        &self,
        subnet: Prefix,
        value: &LeaseAttributes,
        etcd_lease: Option<EtcdLease>,
        claimed: Option<Compare>,
    ) -> Result<Granted, StoreError> {
        let (key, bytes) = (subnet.key(), value.to_json()?);
        let path = self.path(&key);
        let absent = Compare::version(path.as_str(), CompareOp::Equal, 0);
        let bound = etcd_lease.map(|lease| PutOptions::new().with_lease(lease.id));
        let put = TxnOp::put(path, bytes, bound);
        // Whoever made the etcd lease revokes it, if no other try needs it.
        let conditions = std::iter::once(absent).chain(claimed).collect();
        let revision =
            self.compare_and_swap("creating the lease", &key, conditions, put, None).await?;
        let (attributes, lifetime) = (value.clone(), Lifetime::Reservation);
        let lease =
            Lease { subnet, key, attributes, revision, created_revision: revision, lifetime };
        Ok(granted(lease, etcd_lease))
    }

    pub(super) async fn update(&self, lease: &Lease, ttl: Duration) -> Result<Granted, StoreError> {
        let etcd_lease = self.extend(lease.lifetime, ttl).await?;
        self.write("updating the lease", lease, etcd_lease, None).await
    }

    /// The same for a node that starts: its claim has to be its own still.
    pub(super) async fn take_over(
        &self,
        lease: &Lease,
        ttl: Duration,
    ) -> Result<Granted, StoreError> {
        let claimed = self.claims.still_claimed(lease.attributes.public_ip).await;
        let etcd_lease = self.extend(lease.lifetime, ttl).await?;
        self.write("taking over the lease", lease, etcd_lease, claimed).await
    }

    /// Extends the etcd lease and checks that the key is still ours. The key is rewritten only
    /// when it needs another etcd lease: a renewal is no news to the other nodes.
    pub(super) async fn renew(&self, held: &Lease, ttl: Duration) -> Result<Granted, StoreError> {
        let operation = "renewing the lease";
        let etcd_lease = self.extend(held.lifetime, ttl).await?;
        if etcd_lease.is_some_and(|lease| lease.fresh) {
            return self.write(operation, held, etcd_lease, None).await;
        }
        let look = TxnOp::get(self.path(&held.key), Some(GetOptions::new().with_count_only()));
        self.compare_and_swap(operation, &held.key, vec![self.unchanged(held)], look, None).await?;
        Ok(granted(held.clone(), etcd_lease))
    }

    /// Writes `lease` over the entry of its revision, bound to `etcd_lease`.
    async fn write(
        &self,
        operation: &'static str,
        lease: &Lease,
        etcd_lease: Option<EtcdLease>,
        claimed: Option<Compare>,
    ) -> Result<Granted, StoreError> {
        let options = etcd_lease.map(|lease| PutOptions::new().with_lease(lease.id));
        let put = TxnOp::put(self.path(&lease.key), lease.attributes.to_json()?, options);
        let conditions = std::iter::once(self.unchanged(lease)).chain(claimed).collect();
        let revision =
            self.compare_and_swap(operation, &lease.key, conditions, put, etcd_lease).await?;
        Ok(granted(Lease { revision, ..lease.clone() }, etcd_lease))
    }

    pub(super) async fn delete(&self, held: &Lease) -> Result<(), StoreError> {
        let delete = TxnOp::delete(self.path(&held.key), None);
        let unchanged = vec![self.unchanged(held)];
        self.compare_and_swap("deleting the lease", &held.key, unchanged, delete, None).await?;
        Ok(())
    }

    pub(super) async fn watch(&self, revision: i64, own: &Lease) -> Result<EtcdWatch, StoreError> {
        let watch = match self.open_watch(revision).await {
            // The client renews an old token when a plain request is refused, not when a stream
            // is. The request distinguishes an expired token from a missing permission.
            Err(StoreError::Refused { .. }) if self.connection.has_credentials() => {
                match self.config().await {
                    Err(error @ StoreError::Refused { .. }) => Err(error),
                    Ok(_) | Err(_) => self.open_watch(revision).await,
                }
            }
            result => result,
        }?;
        self.expect_own(own, revision).await?;
        Ok(watch)
    }

    /// Fails with lost history if the own key is not as it was at `revision`, nor written since. A
    /// cluster that was wiped and made again may have its old id, and revisions beyond ours.
    async fn expect_own(&self, own: &Lease, revision: i64) -> Result<(), StoreError> {
        let path = self.path(&own.key);
        let path = path.as_str();
        let read = |mut client: etcd_client::Client| async move { client.get(path, None).await };
        let found = self.connection.read("reading the own lease", read).await?;
        let is_known = found.kvs().first().is_some_and(|found| {
            let written = found.mod_revision();
            found.create_revision() == own.created_revision
                && (written == own.revision || written > revision)
        });
        if is_known { Ok(()) } else { Err(StoreError::HistoryLost) }
    }

    async fn open_watch(&self, revision: i64) -> Result<EtcdWatch, StoreError> {
        let from = Origin { revision, cluster: self.cluster.load(Ordering::Relaxed) };
        EtcdWatch::open(Arc::clone(&self.connection), self.subnets(), from).await
    }

    fn unchanged(&self, held: &Lease) -> Compare {
        Compare::mod_revision(self.path(&held.key), CompareOp::Equal, held.revision)
    }

    /// Runs `operation` if all `conditions` hold, and returns the store's revision after it. A
    /// fresh `etcd_lease` is revoked if nothing was written. After a write of
    /// unknown outcome it stays, because to revoke it would delete the key that it may hold by now:
    /// the next listing shows what happened.
    async fn compare_and_swap(
        &self,
        name: &'static str,
        key: &str,
        conditions: Vec<Compare>,
        operation: TxnOp,
        etcd_lease: Option<EtcdLease>,
    ) -> Result<i64, StoreError> {
        let transaction = Txn::new().when(conditions).and_then([operation]);
        let write = |mut client: etcd_client::Client| async move { client.txn(transaction).await };
        let result = match self.connection.call(name, write).await {
            Ok(done) if done.succeeded() => Ok(done.header().map_or(0, |header| header.revision())),
            Ok(_) => Err(StoreError::Conflict(key.to_owned())),
            Err(error) => Err(error),
        };
        if result.as_ref().is_err_and(StoreError::nothing_was_written)
            && let Some(EtcdLease { id, fresh: true, .. }) = etcd_lease
        {
            self.connection.revoke(id).await;
        }
        result
    }

    /// The lease for a key of this lifetime, alive for at least `ttl`; `None` for a reservation.
    async fn extend(
        &self,
        lifetime: Lifetime,
        ttl: Duration,
    ) -> Result<Option<EtcdLease>, StoreError> {
        let Lifetime::Leased { id, .. } = lifetime else { return Ok(None) };
        match self.connection.keep_alive(id, ttl).await? {
            Some(lease) => Ok(Some(lease)),
            None => self.connection.grant(ttl).await.map(Some),
        }
    }
}

fn granted(lease: Lease, etcd_lease: Option<EtcdLease>) -> Granted {
    let lifetime =
        etcd_lease.map_or(Lifetime::Reservation, |EtcdLease { id, expires_unix, .. }| {
            Lifetime::Leased { id, expires_unix: Some(expires_unix) }
        });
    Granted { lease: Lease { lifetime, ..lease }, expires: etcd_lease.map(|lease| lease.expires) }
}

/// The smallest key after `key`.
fn next_key(key: &[u8]) -> Vec<u8> {
    let mut next = key.to_vec();
    next.push(0);
    next
}
