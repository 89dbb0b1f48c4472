//! A watch on etcd that detects when it is dead. etcd's stream alone stays silent for ever behind a
//! cut connection, a wiped cluster or a member without a leader; this one ends with an error.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, Event, EventType, KeyValue, ResponseHeader, WatchOptions, WatchResponse, WatchStream,
};
use tokio::time::{Instant, sleep_until};

use super::calls::moved;
use super::etcd_connection::{Connection, classify, told, wants_connection};
use crate::control::error::{StoreError, StoreResult};
use crate::control::lease::{Lease, Lifetime};
use crate::control::rejected::Rejected;
use crate::control::snapshot::Change;

/// How often the server is asked for progress, to see that the watch still works.
const PROGRESS_PERIOD: Duration = Duration::from_secs(10);
/// Questions left unanswered before the watch counts as dead: two, so that one lost in a leader
/// change does not cost a new stream. Silence is noticed within 30 s, a dead connection by the
/// transport's pings within 13 s.
const UNANSWERED_MAX: u32 = 2;

const OPERATION: &str = "watching leases";

/// A live watch on all keys below `subnets/`.
pub(super) struct EtcdWatch {
    stream: WatchStream,
    connection: Arc<Connection>,
    /// How often this host had moved before.
    moves: u64,
    subnets: String,
    /// Announced first.
    live: Option<i64>,
    ask_at: Instant,
    unanswered: u32,
}

impl EtcdWatch {
    /// Opens the stream for changes after `revision`, the last seen, of `cluster`, 0 if unknown.
    /// Waits until the server confirms it.
    pub(super) async fn open(
        connection: Arc<Connection>,
        subnets: String,
        revision: i64,
        cluster: u64,
    ) -> StoreResult<Self> {
        let moves = connection.calls.moves();
        let options = WatchOptions::new()
            .with_prefix()
            .with_start_revision(revision + 1)
            // One event of 1.5 MiB must not take its neighbours beyond the message limit.
            .with_fragment();
        let path = subnets.as_str();
        let open = |client: Client| async move {
            let mut stream = client.watch_client().watch(path, Some(options)).await?;
            let first = stream.message().await?;
            Ok((stream, first))
        };
        let (stream, first) = connection.call(OPERATION, open).await?;
        let first = check(first);
        if first.as_ref().is_err_and(wants_connection) {
            // A stream that was opened and refused: the endpoint may be the reason.
            connection.reset().await;
        }
        let first = first?;
        let now = first.header().map_or(revision, ResponseHeader::revision);
        let found = first.header().map_or(0, ResponseHeader::cluster_id);
        if now < revision || (cluster != 0 && cluster != found) {
            // Not the cluster, or not the history, that we saw: wiped, restored or replaced. It
            // would stay silent until its revisions have caught up.
            return Err(StoreError::HistoryLost);
        }
        let (live, ask_at) = (Some(now), Instant::now() + PROGRESS_PERIOD);
        Ok(Self { stream, connection, moves, subnets, live, ask_at, unanswered: 0 })
    }

    pub(super) async fn next(&mut self) -> StoreResult<Vec<Change>> {
        if let Some(revision) = self.live.take() {
            return Ok(vec![Change::Live { revision }]);
        }
        let result = self.receive().await;
        let is_of_now = self.moves == self.connection.calls.moves();
        if result.as_ref().is_err_and(wants_connection) && is_of_now {
            // The next request is to look for an endpoint that works, not to wait for this one.
            self.connection.reset().await;
        }
        result
    }

    async fn receive(&mut self) -> StoreResult<Vec<Change>> {
        loop {
            tokio::select! {
                message = self.stream.message() => {
                    let message = message.map_err(|error| classify(OPERATION, &error))?;
                    let events = self.take(&check(message)?);
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
                () = sleep_until(self.ask_at) => self.ask().await?,
                () = self.connection.calls.moved_beyond(self.moves) => return Err(moved(OPERATION)),
            }
        }
    }

    async fn ask(&mut self) -> StoreResult<()> {
        if self.unanswered >= UNANSWERED_MAX {
            return Err(ended("the watch gave no sign of life"));
        }
        self.unanswered += 1;
        self.ask_at = Instant::now() + PROGRESS_PERIOD;
        self.stream.request_progress().await.map_err(|error| classify(OPERATION, &error))
    }

    fn take(&mut self, message: &WatchResponse) -> Vec<Change> {
        self.unanswered = 0;
        let change = |event: &Event| {
            let found = event.kv()?;
            Some(match (event.event_type(), decode(&self.subnets, found)) {
                (EventType::Put, Ok(lease)) => Change::Put(lease),
                (EventType::Put, Err(rejected)) => Change::Rejected(rejected),
                (EventType::Delete, _) => {
                    let key = found.key().strip_prefix(self.subnets.as_bytes());
                    let key = String::from_utf8_lossy(key.unwrap_or_default()).into_owned();
                    Change::Deleted { key, revision: found.mod_revision() }
                }
            })
        };
        message.events().iter().filter_map(change).collect()
    }
}

/// The message, unless the stream ends with it.
fn check(message: Option<WatchResponse>) -> StoreResult<WatchResponse> {
    let Some(message) = message else { return Err(ended("the server closed the stream")) };
    if message.compact_revision() != 0 {
        return Err(StoreError::HistoryLost);
    }
    if !message.canceled() {
        return Ok(message);
    }
    // An old token is a missing permission for some versions.
    Err(told(OPERATION, format!("the server cancelled it: {}", message.cancel_reason())))
}

fn ended(detail: &str) -> StoreError {
    StoreError::unavailable(OPERATION, detail)
}

/// One entry below `subnets/`.
pub(super) fn decode(subnets: &str, found: &KeyValue) -> Result<Lease, Rejected> {
    let key = found.key().strip_prefix(subnets.as_bytes()).unwrap_or_else(|| found.key());
    let created_revision = found.create_revision();
    let lifetime = Lifetime::etcd(found.lease());
    let lease = Lease::decode(key, found.value(), found.mod_revision())?;
    Ok(Lease { created_revision, lifetime, ..lease })
}
