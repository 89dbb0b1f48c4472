//! A watch on all Nodes: lines of JSON over one answer that does not end. The server ends it every
//! few minutes, and it goes on from the last version seen without anybody noticing.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use http_body_util::BodyExt;
use hyper::{HeaderMap, StatusCode};
use kube::core::Status;
use kube::core::params::WatchParams;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep_until};
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::io::StreamReader;

use super::kube::KubeStore;
use super::kube_connection::{ITEM_BYTES_MAX, nodes};
use super::kube_node::{Node, Page};
use crate::control::backoff::jittered;
use crate::control::error::{StoreError, StoreResult};
use crate::control::snapshot::Change;
use crate::failure::with_causes;

/// How long the server is asked to serve one watch. client-go's are 5 to 10 minutes; ours are as
/// long as a silent server may go unnoticed.
const SERVED_FOR: Duration = Duration::from_secs(270);
/// Share by which that is spread, so that nodes which began together do not end together.
const SERVED_JITTER: f64 = 0.1;
/// How much longer the answer may be silent: then it is not the server who speaks.
const GRACE: Duration = Duration::from_secs(15);
/// A watch that ends sooner counts as refused, and is not retried at once.
const SERVED_MIN: Duration = Duration::from_secs(1);
/// How long a new watch must be silent to be believed: one that continues from a version that the
/// server has forgotten fails at once.
const BELIEVED_AFTER: Duration = Duration::from_millis(300);
/// Longest line: one object and a few words.
const LINE_BYTES_MAX: usize = ITEM_BYTES_MAX + 4096;

const OPERATION: &str = "watching Nodes";

/// A live watch on all Nodes.
pub(super) struct KubeWatch {
    store: Arc<KubeStore>,
    /// The last version seen.
    revision: i64,
    /// The answer that is read; `None` where the next is due.
    lines: Option<BoxStream<'static, Result<String, LinesCodecError>>>,
    /// How often this host had moved when it was asked for.
    moves: u64,
    /// Whether the next answer may come from a server with another past.
    is_doubtful: bool,
    /// Until when the first watch is silent, if it is to be announced still.
    unannounced: Option<Instant>,
    began: Instant,
    ends: Instant,
}

#[derive(Deserialize)]
struct RawEvent<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    object: &'a RawValue,
}

impl KubeWatch {
    /// Opens the watch for changes after `revision`, and waits until the server accepts it.
    pub(super) async fn open(store: Arc<KubeStore>, revision: i64) -> StoreResult<Self> {
        let (lines, moves, is_doubtful, unannounced) = (None, 0, true, None);
        let (began, ends) = (Instant::now(), Instant::now());
        let mut watch =
            Self { store, revision, lines, moves, is_doubtful, unannounced, began, ends };
        watch.begin().await?;
        watch.unannounced = Some(watch.began + BELIEVED_AFTER);
        Ok(watch)
    }

    async fn begin(&mut self) -> StoreResult<()> {
        self.moves = self.store.connection.calls.moves();
        if self.is_doubtful {
            self.expect_history().await?;
        }
        let served_for = jittered(SERVED_FOR, SERVED_JITTER, &mut fastrand::Rng::new());
        let seconds = u32::try_from(served_for.as_secs()).unwrap_or(u32::MAX);
        let asked = WatchParams::default().timeout(seconds);
        let request = nodes().watch(&asked, &self.revision.to_string());
        let body = self.store.connection.ask(OPERATION, request).await?.into_body();
        let bytes = StreamReader::new(body.into_data_stream().map_err(io::Error::other));
        let codec = LinesCodec::new_with_max_length(LINE_BYTES_MAX);
        self.lines = Some(FramedRead::new(bytes, codec).boxed());
        self.began = Instant::now();
        self.ends = self.began + served_for + GRACE;
        Ok(())
    }

    /// Fails with lost history if the server is behind what was seen, because its etcd was restored
    /// from a backup. It does not say so itself: a watch from its future is accepted, and silent
    /// until the old count is reached again.
    async fn expect_history(&mut self) -> StoreResult<()> {
        let own = nodes().list(&self.store.own.alone());
        let list = self.store.connection.ask_whole(OPERATION, own, LINE_BYTES_MAX).await?;
        let page = Page::parse(&list).map_err(|why| StoreError::unavailable(OPERATION, why))?;
        if page.revision < self.revision { Err(StoreError::HistoryLost) } else { Ok(()) }
    }

    pub(super) async fn next(&mut self) -> StoreResult<Vec<Change>> {
        loop {
            let Some(lines) = &mut self.lines else {
                self.begin().await?;
                continue;
            };
            let believed = OptionFuture::from(self.unannounced.map(sleep_until));
            let unavailable = |detail: &str| StoreError::unavailable(OPERATION, detail);
            let line = tokio::select! {
                biased;
                line = lines.next() => line,
                Some(()) = believed => {
                    self.unannounced = None;
                    return Ok(vec![Change::Live { revision: self.revision }]);
                }
                () = sleep_until(self.ends) => return Err(unavailable("the server went silent")),
                () = self.store.connection.calls.moved_beyond(self.moves) => {
                    self.lines = None;
                    continue;
                }
            };
            let change = match line {
                None => {
                    self.end()?;
                    continue;
                }
                Some(Err(error)) => return Err(unavailable(&with_causes(&error))),
                Some(Ok(line)) => self.read(&line)?,
            };
            if let Some(change) = change {
                let live = Change::Live { revision: self.revision };
                let live = self.unannounced.take().map(|_until| live);
                return Ok(live.into_iter().chain([change]).collect());
            }
        }
    }

    /// The server ended the watch, as it was asked to, or because it stops.
    fn end(&mut self) -> StoreResult<()> {
        let now = Instant::now();
        if now - self.began < SERVED_MIN {
            return Err(StoreError::unavailable(OPERATION, "the server ended the watch at once"));
        }
        // A server that stops may come back with another past.
        self.is_doubtful = now + GRACE + GRACE < self.ends;
        self.lines = None;
        Ok(())
    }

    fn read(&mut self, line: &str) -> StoreResult<Option<Change>> {
        if line.trim().is_empty() {
            return Ok(None);
        }
        // What cannot be read is lost: a listing shows it.
        let lost = |_unreadable| StoreError::HistoryLost;
        let event = serde_json::from_str(line).map_err(|_no_json| StoreError::HistoryLost)?;
        let RawEvent { kind, object } = event;
        let object = object.get().as_bytes();
        let (revision, change) = match kind.as_str() {
            "ERROR" => return Err(self.refusal(object)),
            "BOOKMARK" => {
                let revision = Page::parse(object).map_err(lost)?.revision;
                (revision, Change::Progress { revision })
            }
            "ADDED" | "MODIFIED" | "DELETED" => {
                let node = Node::parse(object, &self.store.prefix).map_err(lost)?;
                (node.revision, self.of_node(node, kind == "DELETED"))
            }
            _ => return Ok(None),
        };
        self.revision = self.revision.max(revision);
        Ok(Some(change))
    }

    fn of_node(&self, node: Node, deleted: bool) -> Change {
        let revision = node.revision;
        if node.name == self.store.own.name {
            self.store.own.note(node, deleted);
            return Change::Progress { revision };
        }
        match node.lease().filter(|_| !deleted) {
            Some(Ok(lease)) => Change::Put(lease),
            Some(Err(rejected)) => Change::Rejected(rejected),
            None => Change::Deleted { key: node.name, revision },
        }
    }

    fn refusal(&self, object: &[u8]) -> StoreError {
        let status: Status = serde_json::from_slice(object).unwrap_or_default();
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        self.store.connection.refusal(OPERATION, code, &HeaderMap::new(), &status)
    }
}
