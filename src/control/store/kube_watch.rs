//! A watch on all Nodes: lines of JSON over one answer that does not end. The server ends it every
//! few minutes, and it goes on from the last version seen without anybody noticing.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use hyper::{HeaderMap, StatusCode};
use kube::client::Body;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep_until};

use super::kube_connection::{Ask, Connection, ITEM_BYTES_MAX, Status, next_bytes};
use super::kube_node::{Node, NodeError, Page};
use super::kube_own::OwnNode;
use crate::control::backoff::jittered;
use crate::control::error::StoreError;
use crate::control::snapshot::Change;

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
pub struct KubeWatch {
    connection: Arc<Connection>,
    /// Of flannel's annotations.
    prefix: Arc<str>,
    own: Arc<OwnNode>,
    /// The last version seen.
    revision: i64,
    /// The answer that is read; `None` where the next is due.
    body: Option<Body>,
    /// How often this host had moved when it was asked for.
    moves: u64,
    /// Whether the next answer may come from a server with another past.
    is_doubtful: bool,
    /// Until when the first watch is silent, if it is to be announced still.
    unannounced: Option<Instant>,
    began: Instant,
    ends: Instant,
    /// Begin of a line whose end has not come.
    line: Vec<u8>,
}

#[derive(Deserialize)]
struct RawEvent<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    object: &'a RawValue,
}

fn ask(revision: i64, served_for: Duration) -> Ask {
    let seconds = served_for.as_secs();
    let path = format!(
        "/api/v1/nodes?watch=true&resourceVersion={revision}&allowWatchBookmarks=true\
         &timeoutSeconds={seconds}"
    );
    Ask::get(OPERATION, path)
}

/// Fails with lost history if the server is behind `revision`, because its etcd was restored from
/// a backup. It does not say so itself: a watch from its future is accepted, and silent until the
/// old count is reached again.
async fn expect_history(
    connection: &Connection,
    node: &str,
    revision: i64,
) -> Result<(), StoreError> {
    let path = format!("/api/v1/nodes?limit=1&fieldSelector=metadata.name%3D{node}");
    let ask = Ask::get(OPERATION, path);
    let list = connection.ask_whole(&ask, LINE_BYTES_MAX).await?;
    let newest = Page::parse(&list).map_err(|detail| ask.unavailable(detail))?.revision;
    if newest < revision { Err(StoreError::HistoryLost) } else { Ok(()) }
}

impl KubeWatch {
    /// Opens the watch for changes after `revision`, and waits until the server accepts it.
    pub(super) async fn open(
        connection: Arc<Connection>,
        prefix: Arc<str>,
        own: Arc<OwnNode>,
        revision: i64,
    ) -> Result<Self, StoreError> {
        let now = Instant::now();
        let mut watch = Self {
            connection,
            prefix,
            own,
            revision,
            body: None,
            moves: 0,
            is_doubtful: true,
            unannounced: None,
            began: now,
            ends: now,
            line: Vec::new(),
        };
        watch.begin().await?;
        watch.unannounced = Some(watch.began + BELIEVED_AFTER);
        Ok(watch)
    }

    async fn begin(&mut self) -> Result<(), StoreError> {
        self.moves = self.connection.moves.count();
        if self.is_doubtful {
            expect_history(&self.connection, self.own.name(), self.revision).await?;
        }
        let served_for = jittered(SERVED_FOR, SERVED_JITTER, &mut fastrand::Rng::new());
        let answer = self.connection.ask(&ask(self.revision, served_for)).await?;
        self.body = Some(answer.into_body());
        self.began = Instant::now();
        self.ends = self.began + served_for + GRACE;
        Ok(())
    }

    pub(super) async fn next(&mut self) -> Result<Vec<Change>, StoreError> {
        loop {
            let Some(body) = &mut self.body else {
                self.begin().await?;
                continue;
            };
            let believed = OptionFuture::from(self.unannounced.map(sleep_until));
            let bytes = tokio::select! {
                biased;
                bytes = next_bytes(body) => bytes,
                Some(()) = believed => {
                    self.unannounced = None;
                    return Ok(vec![Change::Live { revision: self.revision }]);
                }
                () = sleep_until(self.ends) => Err("the server went silent".to_owned()),
                () = self.connection.moves.beyond(self.moves) => {
                    self.line.clear();
                    self.body = None;
                    continue;
                }
            };
            match bytes {
                Err(detail) => return Err(StoreError::unavailable(OPERATION, detail)),
                Ok(None) => self.end()?,
                Ok(Some(bytes)) => {
                    let events = self.take(&bytes)?;
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
            }
        }
    }

    /// The server ended the watch, as it was asked to, or because it stops.
    fn end(&mut self) -> Result<(), StoreError> {
        let now = Instant::now();
        if now - self.began < SERVED_MIN {
            return Err(StoreError::unavailable(OPERATION, "the server ended the watch at once"));
        }
        self.line.clear();
        // A server that stops may come back with another past.
        self.is_doubtful = now + GRACE + GRACE < self.ends;
        self.body = None;
        Ok(())
    }

    /// The events of all lines that `bytes` complete.
    fn take(&mut self, bytes: &[u8]) -> Result<Vec<Change>, StoreError> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let event = if self.line.is_empty() {
                self.read(&rest[..end])?
            } else {
                self.line.extend_from_slice(&rest[..end]);
                let line = std::mem::take(&mut self.line);
                self.read(&line)?
            };
            rest = &rest[end + 1..];
            push(&mut events, event);
        }
        if self.line.len() + rest.len() > LINE_BYTES_MAX {
            let detail = format!("an event has more than {LINE_BYTES_MAX} bytes");
            return Err(StoreError::unavailable(OPERATION, detail));
        }
        self.line.extend_from_slice(rest);
        if !events.is_empty() && self.unannounced.take().is_some() {
            events.insert(0, Change::Live { revision: self.revision });
        }
        Ok(events)
    }

    fn read(&mut self, line: &[u8]) -> Result<Option<Change>, StoreError> {
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        // Its content is lost: a listing shows it.
        let Ok(RawEvent { kind, object }) = serde_json::from_slice(line) else {
            return Err(StoreError::HistoryLost);
        };
        let object = object.get().as_bytes();
        let event = match kind.as_str() {
            "ERROR" => return Err(self.refusal(object)),
            "BOOKMARK" => {
                let page = Page::parse(object).map_err(|_no_page| StoreError::HistoryLost)?;
                Change::Progress { revision: page.revision }
            }
            "ADDED" | "MODIFIED" | "DELETED" => match Node::parse(object, &self.prefix) {
                Ok(node) => self.of_node(node, kind == "DELETED"),
                Err(NodeError::Malformed(rejected)) => Change::Rejected(rejected),
                Err(NodeError::Unknown(_)) => return Err(StoreError::HistoryLost),
            },
            _ => return Ok(None),
        };
        self.revision = self.revision.max(revision_of(&event));
        Ok(Some(event))
    }

    fn of_node(&self, node: Node, deleted: bool) -> Change {
        let revision = node.revision;
        if self.own.is(&node.name) {
            self.own.note(node, deleted);
            return Change::Progress { revision };
        }
        if deleted {
            return Change::Deleted { key: node.name, revision };
        }
        match node.lease() {
            Some(Ok(lease)) => Change::Put(lease),
            Some(Err(rejected)) => Change::Rejected(rejected),
            None => Change::Deleted { key: node.name, revision },
        }
    }

    fn refusal(&self, object: &[u8]) -> StoreError {
        let status: Status = serde_json::from_slice(object).unwrap_or_default();
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let ask = ask(self.revision, SERVED_FOR);
        self.connection.refusal(&ask, code, &HeaderMap::new(), &status)
    }
}

fn revision_of(event: &Change) -> i64 {
    match event {
        Change::Live { revision }
        | Change::Progress { revision }
        | Change::Deleted { revision, .. } => *revision,
        Change::Put(lease) => lease.revision,
        Change::Rejected(rejected) => rejected.revision,
        Change::Everything(snapshot) => snapshot.revision,
    }
}

/// Of several steps of progress only the last counts.
fn push(events: &mut Vec<Change>, event: Option<Change>) {
    match (events.last_mut(), event) {
        (_, None) => {}
        (Some(last @ Change::Progress { .. }), Some(event @ Change::Progress { .. })) => {
            *last = event;
        }
        (_, Some(event)) => events.push(event),
    }
}
