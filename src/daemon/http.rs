//! A small HTTP/1 server for probes and the status tool, bounded in everything a client controls.
//! One request per connection, no bodies read. Paths are the callers'.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, warn};

use crate::failure::LogOnce;

/// Connections at once. A probe lasts milliseconds, so few are needed. When one more comes, the
/// oldest is closed: clients that hold connections cannot keep a probe out.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// How long a connection may last, with what the client takes over its headers; the reply to the
/// status tool has at most some megabytes.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Request line and headers. A kubelet's probe has about 150 bytes.
const HEADER_BYTES_MAX: usize = 8 * 1024;

/// Pause after a failed accept: without it, a lack of file descriptors would spin.
pub(super) const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Before an address that is taken is tried again.
const LISTEN_RETRY: Duration = Duration::from_secs(1);

/// What a connection is read from and written to.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// A complete answer.
pub(super) type Reply = Response<Full<Bytes>>;

/// An answer with this content type.
fn reply(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// An answer that is text.
pub(super) fn text(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    reply(status, "text/plain; charset=utf-8", body)
}

/// An answer that is one JSON value.
pub(super) fn json(value: &impl Serialize) -> Reply {
    // Only keys that are no text could be refused.
    let text = serde_json::to_string(value).unwrap_or_else(|error| error.to_string());
    reply(StatusCode::OK, "application/json", text + "\n")
}

/// An answer in Prometheus' text format.
pub(super) fn metrics(text: String) -> Reply {
    reply(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
}

/// Listens on `address` for `what`, which `flags` set.
pub(super) async fn listen(address: SocketAddr, what: &str, flags: &str) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| format!("cannot listen on {address} for {what}: see {flags}"))
}

/// What `listen` gives, as soon as it does: nobody's packets depend on it.
pub(super) async fn patiently<T>(listen: impl AsyncFn() -> Result<T>) -> T {
    let mut told = LogOnce::default();
    loop {
        match listen().await {
            Ok(listener) => return listener,
            Err(error) => told.once(&format!("{error:#}"), |text| warn!("{text}; retrying")),
        }
        tokio::time::sleep(LISTEN_RETRY).await;
    }
}

/// Serves what `accept` gives for ever, with what `page` gives for a method and a path. That runs
/// on the control plane's thread, so it must not block. Dropping the future ends all connections.
pub(super) async fn serve<S: Stream>(
    accept: impl AsyncFn() -> io::Result<S>,
    page: impl Fn(&Method, &str) -> Option<Reply> + Send + Sync + 'static,
) -> Infallible {
    let page = Arc::new(page);
    let mut connections = JoinSet::new();
    let mut oldest_first: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match accept().await {
            Ok(stream) => stream,
            Err(error) => {
                warn!("cannot accept a connection for health or status: {error}");
                tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        oldest_first.retain(|connection| !connection.is_finished());
        if oldest_first.len() >= CONNECTIONS_MAX
            && let Some(oldest) = oldest_first.pop_front()
        {
            oldest.abort();
        }
        let connection = serve_connection(stream, Arc::clone(&page), CONNECTION_TIMEOUT);
        oldest_first.push_back(connections.spawn(connection));
    }
}

pub(super) async fn serve_connection(
    stream: impl Stream,
    page: Arc<impl Fn(&Method, &str) -> Option<Reply>>,
    lasts: Duration,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let not_found = || text(StatusCode::NOT_FOUND, "404 page not found\n");
        let reply = page(request.method(), request.uri().path()).unwrap_or_else(not_found);
        async move { Ok::<_, Infallible>(reply) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .max_buf_size(HEADER_BYTES_MAX)
        .keep_alive(false)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(lasts, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!("a health or status connection failed: {error}"),
        Err(_elapsed) => debug!("a health or status connection took too long"),
    }
}
