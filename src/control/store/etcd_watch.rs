//! A watch on etcd that detects when it is dead. etcd's stream alone stays silent for ever behind a
//! cut connection, a wiped cluster or a member without a leader; this one ends with an error.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, Error as EtcdError, EventType, KeyValue, WatchOptions, WatchResponse, WatchStream,
};
use tokio::time::{Instant, sleep_until, timeout};

use super::etcd_connection::{Connection, REQUEST_TIMEOUT, classify, timed_out, wants_connection};
use crate::control::error::StoreError;
use crate::control::lease::{Lease, Lifetime, Version};
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
pub struct EtcdWatch {
    stream: WatchStream,
    connection: Arc<Connection>,
    subnets: String,
    /// Where the stream began, or the last event seen.
    revision: i64,
    /// Announced first.
    live: Option<i64>,
    ask_at: Instant,
    unanswered: u32,
}

/// What a watch continues.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin {
    /// The last revision seen.
    pub(super) revision: i64,
    /// The cluster it was seen in; 0 if unknown.
    pub(super) cluster: u64,
}

impl EtcdWatch {
    /// Opens the stream for changes after `from` and waits until the server confirms it. The
    /// outer error is of the transport, the inner one the server's.
    pub(super) async fn open(
        client: Client,
        connection: Arc<Connection>,
        subnets: String,
        from: Origin,
    ) -> Result<Result<Self, StoreError>, EtcdError> {
        let revision = from.revision;
        let options = WatchOptions::new()
            .with_prefix()
            .with_start_revision(revision + 1)
            // One event of 1.5 MiB must not take its neighbours beyond the message limit.
            .with_fragment();
        let mut stream = client.watch_client().watch(subnets.as_str(), Some(options)).await?;
        let Ok(first) = timeout(REQUEST_TIMEOUT, stream.message()).await else {
            return Ok(Err(timed_out(OPERATION)));
        };
        let Some(first) = first? else {
            return Ok(Err(ended("the server closed the stream")));
        };
        if let Some(error) = end_of(&first) {
            return Ok(Err(error));
        }
        let now = first.header().map_or(revision, |header| header.revision());
        let cluster = first.header().map_or(0, |header| header.cluster_id());
        if now < revision || (from.cluster != 0 && cluster != from.cluster) {
            // Not the cluster, or not the history, that we saw: wiped, restored or replaced. It
            // would stay silent until its revisions have caught up.
            return Ok(Err(StoreError::HistoryLost));
        }
        let ask_at = Instant::now() + PROGRESS_PERIOD;
        Ok(Ok(Self {
            stream,
            connection,
            subnets,
            revision,
            live: Some(now),
            ask_at,
            unanswered: 0,
        }))
    }

    pub(super) async fn next(&mut self) -> Result<Vec<Change>, StoreError> {
        if let Some(revision) = self.live.take() {
            return Ok(vec![Change::Live { revision }]);
        }
        let result = self.receive().await;
        if result.as_ref().is_err_and(wants_connection) {
            // The next request is to look for an endpoint that works, not to wait for this one.
            self.connection.reset().await;
        }
        result
    }

    async fn receive(&mut self) -> Result<Vec<Change>, StoreError> {
        loop {
            tokio::select! {
                message = self.stream.message() => {
                    let message = message.map_err(|error| classify(OPERATION, &error))?;
                    let Some(message) = message else {
                        return Err(ended("the server closed the stream"));
                    };
                    let events = self.take(&message)?;
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
                () = sleep_until(self.ask_at) => self.ask().await?,
            }
        }
    }

    async fn ask(&mut self) -> Result<(), StoreError> {
        if self.unanswered >= UNANSWERED_MAX {
            return Err(ended("the watch gave no sign of life"));
        }
        self.unanswered += 1;
        self.ask_at = Instant::now() + PROGRESS_PERIOD;
        self.stream.request_progress().await.map_err(|error| classify(OPERATION, &error))
    }

    fn take(&mut self, message: &WatchResponse) -> Result<Vec<Change>, StoreError> {
        self.unanswered = 0;
        if let Some(error) = end_of(message) {
            return Err(error);
        }
        let mut events = Vec::with_capacity(message.events().len());
        for event in message.events() {
            let Some(found) = event.kv() else { continue };
            self.revision = found.mod_revision();
            events.push(match event.event_type() {
                EventType::Put => match decode(&self.subnets, found) {
                    Ok(lease) => Change::Put(lease),
                    Err(rejected) => Change::Rejected(rejected),
                },
                EventType::Delete => {
                    let key = found.key().strip_prefix(self.subnets.as_bytes());
                    let key = String::from_utf8_lossy(key.unwrap_or_default()).into_owned();
                    Change::Deleted { key, revision: found.mod_revision() }
                }
            });
        }
        Ok(events)
    }
}

/// The error with which the message ends the watch, if it does.
fn end_of(message: &WatchResponse) -> Option<StoreError> {
    if message.compact_revision() != 0 {
        return Some(StoreError::HistoryLost);
    }
    if !message.canceled() {
        return None;
    }
    let reason = message.cancel_reason();
    // An old token is a missing permission for some versions.
    if reason.contains("permission denied") || reason.contains("invalid auth token") {
        let (operation, detail) = (OPERATION, reason.to_owned());
        return Some(StoreError::Refused { operation, detail });
    }
    Some(ended(&format!("the server cancelled it: {reason:?}")))
}

fn ended(detail: &str) -> StoreError {
    StoreError::unavailable(OPERATION, detail)
}

/// One entry below `subnets/`.
pub(super) fn decode(subnets: &str, found: &KeyValue) -> Result<Lease, Rejected> {
    let key = found.key().strip_prefix(subnets.as_bytes()).unwrap_or_else(|| found.key());
    let version = Version { revision: found.mod_revision(), created: found.create_revision() };
    let lifetime = match found.lease() {
        0 => Lifetime::Reservation,
        id => Lifetime::Leased { id, expires_unix: None },
    };
    Lease::decode(key, found.value(), version, lifetime)
}
