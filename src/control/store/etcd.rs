//! The etcd v3 store, with flannel's keys and values. Every write is a transaction that compares
//! the version last seen; no request asks for the time to live of another node's lease.

use std::iter::once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::etcd_claim::Claims;
use super::etcd_connection::{Connection, SPACE_ADVICE};
use super::etcd_lease::EtcdLease;
use super::etcd_watch::{EtcdWatch, decode};
use crate::config::options::EtcdOptions;
use crate::control::clock;
use crate::control::error::{ConnectError, StoreError, StoreResult};
use crate::control::identity::{Phase, holder_of};
use crate::control::lease::{Lease, Lifetime};
use crate::control::snapshot::{ENTRIES_MAX, Granted, LastWritten, Snapshot, Vacancy};
use crate::control::status::Names;
use crate::failure::lock;
use etcd_client::{
    Client, Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, TxnOp,
};

/// Keys asked for at once. A thousand leases of 200 bytes are far below the client's limit of
/// 4 MiB a message; a page with huge values is asked for again in smaller ones.
const PAGE_KEYS_MAX: i64 = 1000;
/// Keys looked at in one listing, of any kind: a flood of junk ends it.
const SCANNED_KEYS_MAX: usize = 16 * ENTRIES_MAX;
/// Least share of its time that a spare etcd lease must have left.
const SPARE_TTL_MIN: f64 = 0.9;

/// Leases below a prefix of an etcd cluster.
pub struct EtcdStore {
    pub(in crate::control) claims: Claims,
    pub(super) connection: Arc<Connection>,
    /// The cluster that the last listing came from; 0 before the first.
    cluster: AtomicU64,
    /// Granted for a write that lost a race; the next one takes it.
    spare: Mutex<Option<EtcdLease>>,
}

impl EtcdStore {
    /// A store that connects when it is first used.
    pub fn new(options: &EtcdOptions) -> Result<Self, ConnectError> {
        let connection = Arc::new(Connection::new(options.clone())?);
        let claims = Claims::new(&connection);
        let (cluster, spare) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { claims, connection, cluster, spare })
    }

    /// The cluster that was last connected to, by its id; 0 before the first.
    pub(in crate::control) fn cluster(&self) -> u64 {
        self.connection.cluster.load(Ordering::Relaxed)
    }

    /// Why etcd takes no writes, if an alarm says so. Asks one member, which writes nothing.
    pub(in crate::control) async fn alarm(&self) -> StoreResult<Option<String>> {
        let ask = |mut client: Client| async move { client.status().await };
        let status = self.connection.call("asking for alarms", ask).await?;
        let is_full = status.errors().iter().any(|error| error.contains("NOSPACE"));
        Ok(is_full.then(|| format!("etcd refuses writes (alarm NOSPACE); {SPACE_ADVICE}")))
    }

    fn path(&self, key: &str) -> String {
        self.connection.path(format_args!("subnets/{key}"))
    }

    pub(super) async fn config(&self) -> StoreResult<Vec<u8>> {
        let key = self.connection.path("config");
        match self.connection.get("reading the network configuration", &key).await? {
            None => Err(StoreError::NoConfig(key)),
            Some(found) => Ok(found.value().to_vec()),
        }
    }

    pub(super) async fn list(&self) -> StoreResult<Snapshot> {
        let (subnets, mut snapshot) = (self.path(""), Snapshot::default());
        let add = |found: &KeyValue| snapshot.add(decode(&subnets, found));
        let (of, is_all) = self.scan(&subnets, SCANNED_KEYS_MAX, add).await?;
        snapshot.is_cut |= !is_all;
        (snapshot.revision, snapshot.cluster) = of;
        self.cluster.store(snapshot.cluster, Ordering::Relaxed);
        Ok(snapshot)
    }

    /// The names in all claims.
    pub(in crate::control) async fn names(&self) -> StoreResult<Names> {
        let (nodes, mut names) = (self.connection.path("weft/nodes/"), Names::new());
        let name = |found: &KeyValue| {
            let address = found.key_str().ok()?.strip_prefix(&nodes)?.parse().ok()?;
            Some((address, holder_of(found.value(), found.lease())?.shown_name()))
        };
        self.scan(&nodes, ENTRIES_MAX, |found| names.extend(name(found))).await?;
        Ok(names)
    }

    /// Gives every key below `folder` as of one moment, in pages, at most about `keys_max`. Returns
    /// the revision and the cluster that they are of, and whether that were all.
    async fn scan(
        &self,
        folder: &str,
        keys_max: usize,
        mut give: impl FnMut(&KeyValue),
    ) -> StoreResult<((i64, u64), bool)> {
        // The digit zero follows the slash.
        let end = format!("{}0", folder.trim_end_matches('/'));
        let (mut from, mut page_keys) = (folder.as_bytes().to_vec(), PAGE_KEYS_MAX);
        let (mut of, mut scanned) = ((0, 0), 0);
        while scanned < keys_max {
            let options = GetOptions::new()
                .with_range(end.as_str())
                .with_limit(page_keys)
                .with_revision(of.0)
                .with_sort(SortTarget::Key, SortOrder::Ascend);
            let read = |mut client: Client| {
                let (from, options) = (from.clone(), options.clone());
                async move { client.get(from, Some(options)).await }
            };
            let page = match self.connection.read("listing leases", read).await {
                // The page does not fit into a message: its values are huge.
                Err(StoreError::Unavailable { detail, .. })
                    if page_keys > 1 && detail.contains("message length too large") =>
                {
                    page_keys = (page_keys / 8).max(1);
                    continue;
                }
                page => page?,
            };
            if let Some(header) = page.header().filter(|_| scanned == 0) {
                of = (header.revision(), header.cluster_id());
            }
            page.kvs().iter().for_each(&mut give);
            scanned += page.kvs().len();
            match page.kvs().last() {
                // The smallest key after the last one.
                Some(last) if page.more() => from = [last.key(), &[0]].concat(),
                Some(_) | None => return Ok((of, true)),
            }
        }
        Ok((of, false))
    }

    pub(super) async fn write(
        &self,
        lease: &Lease,
        ttl: Duration,
        phase: Phase,
    ) -> StoreResult<Granted> {
        let etcd_lease = self.extend(lease.lifetime, ttl).await?;
        self.put("writing the lease", lease, etcd_lease, phase, Extras::default()).await
    }

    pub(super) async fn create(
        &self,
        lease: &Lease,
        vacancy: &Vacancy,
        ttl: Duration,
        phase: Phase,
    ) -> StoreResult<Granted> {
        let (lease, replaces) = (vacancy.entry(lease), vacancy.replaces.as_ref());
        let etcd_lease = self.extend(lease.lifetime, ttl).await?;
        // A flannel node takes a route away when an entry with the same IPv4 subnet goes, unless it
        // was one without IPv6, which it does not find then: the old entry goes first, or after.
        let goes_first = replaces.is_some_and(|before| before.subnets.v6().is_some());
        let mut extras = Extras { goes_first, ..Extras::default() };
        if let Some(before) = replaces {
            let (path, revision) = (self.path(&before.key), before.revision);
            extras.conditions.push(Compare::mod_revision(&*path, CompareOp::Equal, revision));
            extras.writes.push(TxnOp::delete(path, None));
        }
        if vacancy.compares_all(&lease) {
            extras.conditions.extend(self.is_last(vacancy.last_written.as_ref()));
        } else {
            extras.conditions.push(no_dual_stack_lease_at(&self.path(&lease.key)));
        }
        self.put("taking the subnet", &lease, etcd_lease, phase, extras).await
    }

    /// That every lease is as old as this one or older, and this one as it was listed.
    fn is_last(&self, last: Option<&LastWritten>) -> impl Iterator<Item = Compare> {
        let (from, end) = (self.path(""), self.connection.path("subnets0"));
        let revision = last.map_or(0, |last| last.revision);
        let none_later = Compare::mod_revision(from, CompareOp::Less, revision + 1);
        let as_it_was = last.and_then(|last| last.lease.as_ref()).map(|(key, etcd_lease)| {
            let path = self.path(key);
            [
                Compare::mod_revision(&*path, CompareOp::Equal, revision),
                Compare::lease(path, CompareOp::Equal, *etcd_lease),
            ]
        });
        once(none_later.with_range(end)).chain(as_it_was.into_iter().flatten())
    }

    /// Extends the etcd lease and checks that the key is still ours. The key is rewritten only
    /// when it needs another etcd lease: a renewal is no news to the other nodes.
    pub(super) async fn renew(&self, held: &Lease, ttl: Duration) -> StoreResult<Granted> {
        let operation = "renewing the lease";
        let etcd_lease = self.extend(held.lifetime, ttl).await?;
        if etcd_lease.is_some_and(|lease| lease.fresh) {
            return self.put(operation, held, etcd_lease, Phase::Runs, Extras::default()).await;
        }
        let look = TxnOp::get(self.path(&held.key), Some(GetOptions::new().with_count_only()));
        self.compare_and_swap(operation, held, [], [look]).await?;
        Ok(granted(held.clone(), etcd_lease))
    }

    pub(super) async fn delete(&self, held: &Lease) -> StoreResult<()> {
        let delete = TxnOp::delete(self.path(&held.key), None);
        self.compare_and_swap("deleting the lease", held, [], [delete]).await.map(drop)
    }

    /// Writes `lease` over the entry of its revision, bound to `etcd_lease`. After a write of
    /// unknown outcome the latter stays, because to revoke it would delete the key that it may hold
    /// by now: the next listing shows what happened.
    async fn put(
        &self,
        operation: &'static str,
        lease: &Lease,
        etcd_lease: Option<EtcdLease>,
        phase: Phase,
        extras: Extras,
    ) -> StoreResult<Granted> {
        let claimed = match phase {
            Phase::Starts => self.claims.still_claimed(lease.attributes.node_address()).await,
            Phase::Runs => None,
        };
        let bound = etcd_lease.map(|lease| PutOptions::new().with_lease(lease.id));
        let put = TxnOp::put(self.path(&lease.key), lease.attributes.to_json()?, bound);
        let Extras { conditions, mut writes, goes_first } = extras;
        let conditions = claimed.into_iter().chain(conditions);
        writes.insert(if goes_first { writes.len() } else { 0 }, put);
        let written = self.compare_and_swap(operation, lease, conditions, writes).await;
        if let Some(unused) = etcd_lease.filter(|lease| lease.fresh)
            && written.as_ref().is_err_and(StoreError::nothing_was_written)
        {
            *lock(&self.spare) = Some(unused);
        }
        let revision = written?;
        let is_new = lease.revision == 0;
        let created_revision = if is_new { revision } else { lease.created_revision };
        Ok(granted(Lease { revision, created_revision, ..lease.clone() }, etcd_lease))
    }

    /// Does the `writes` if the entry of `held` is as of its revision, and the `conditions` hold.
    async fn compare_and_swap(
        &self,
        operation: &'static str,
        held: &Lease,
        conditions: impl IntoIterator<Item = Compare>,
        writes: impl IntoIterator<Item = TxnOp>,
    ) -> StoreResult<i64> {
        let path = self.path(&held.key);
        let write =
            self.connection.compare_and_swap(operation, &path, held.revision, conditions, writes);
        write.await?.map_err(|_found| StoreError::Conflict(held.key.clone()))
    }

    pub(super) async fn watch(&self, revision: i64, own: &Lease) -> StoreResult<EtcdWatch> {
        // Before the stream is opened: the client renews an old token when a plain request is
        // refused, not when a stream is.
        self.expect_own(own, revision).await?;
        let cluster = self.cluster.load(Ordering::Relaxed);
        let connection = Arc::clone(&self.connection);
        let watch = EtcdWatch::open(connection, self.path(""), revision, cluster).await?;
        // It may have been wiped in between.
        self.expect_own(own, revision).await?;
        Ok(watch)
    }

    /// Fails with lost history if the own key is not as it was at `revision`, nor written since. A
    /// cluster that was wiped and made again may have its old id, and revisions beyond ours.
    async fn expect_own(&self, own: &Lease, revision: i64) -> StoreResult<()> {
        let found = self.connection.get("reading the own lease", &self.path(&own.key)).await?;
        let is_known = found.is_some_and(|found| {
            let written = found.mod_revision();
            found.create_revision() == own.created_revision
                && (written == own.revision || written > revision)
        });
        if is_known { Ok(()) } else { Err(StoreError::HistoryLost) }
    }

    /// The lease for a key of this lifetime, alive for at least `ttl`; `None` for a reservation.
    async fn extend(&self, lifetime: Lifetime, ttl: Duration) -> StoreResult<Option<EtcdLease>> {
        let Lifetime::Leased { id, .. } = lifetime else { return Ok(None) };
        if id != 0
            && let Some(kept) = self.connection.keep_alive(id, ttl).await?
        {
            return Ok(Some(kept));
        }
        // One that no key has serves all tries, so that a lost race costs one request.
        let spare = lock(&self.spare).take();
        let fresh_until = clock::boot_time() + ttl.mul_f64(SPARE_TTL_MIN);
        match spare.filter(|spare| spare.expires >= fresh_until) {
            Some(spare) => Ok(Some(spare)),
            None => self.connection.grant(ttl).await.map(Some),
        }
    }
}

/// What the transaction of a write has besides.
#[derive(Default)]
struct Extras {
    conditions: Vec<Compare>,
    writes: Vec<TxnOp>,
    /// Whether they go before the write.
    goes_first: bool,
}

/// That no node has the subnet of the key at `path` together with an IPv6 one. flannel's key is
/// then another, `10.5.34.0-24&fd00::-64`: with the plain one compared alone, two would get the
/// subnet.
fn no_dual_stack_lease_at(path: &str) -> Compare {
    // The apostrophe follows the ampersand.
    Compare::create_revision(format!("{path}&"), CompareOp::Equal, 0).with_range(format!("{path}'"))
}

fn granted(lease: Lease, etcd_lease: Option<EtcdLease>) -> Granted {
    let lifetime = Lifetime::etcd(etcd_lease.map_or(0, |lease| lease.id));
    Granted { lease: Lease { lifetime, ..lease }, expires: etcd_lease.map(|lease| lease.expires) }
}
