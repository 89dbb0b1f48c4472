//! A small HTTP/1 server for probes and the status tool, bounded in everything a client controls.
//! One request a connection, no bodies read. Knows no paths.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, warn};

/// Connections at once. A probe lasts milliseconds, so even one per second and checker needs few.
/// When one more comes, the oldest gives way: clients that hold connections cannot keep a probe
/// out.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// How long a client may take over its request line and headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last; the reply to the status tool has at most some megabytes.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Request line and headers. A kubelet's probe has about 150 bytes.
const HEADER_BYTES_MAX: usize = 8 * 1024;

/// Pause after a failed accept: without it, a lack of file descriptors would spin.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Type of the plain answers.
pub(super) const PLAIN_TEXT: &str = "text/plain; charset=utf-8";

/// An answer.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    /// Status code.
    pub(super) status: StatusCode,
    /// `Content-Type`.
    pub(super) content_type: &'static str,
    /// The body, complete.
    pub(super) body: Bytes,
}

impl Reply {
    /// A line of text.
    pub(super) fn text(status: StatusCode, body: &'static str) -> Self {
        Self { status, content_type: PLAIN_TEXT, body: Bytes::from_static(body.as_bytes()) }
    }

    /// The answer on paths that do not exist.
    pub(super) fn not_found() -> Self {
        Self::text(StatusCode::NOT_FOUND, "404 page not found\n")
    }
}

/// Answers a method and a path. It runs on the control plane's thread, so it must not block.
pub(super) type Handler = Arc<dyn Fn(&Method, &str) -> Reply + Send + Sync>;

/// Where connections come from.
pub(super) trait Listener {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

impl Listener for UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

/// Serves for ever. Dropping the future ends all connections.
pub(super) async fn serve<L: Listener>(listener: L, handler: Handler) -> Infallible {
    let mut connections = JoinSet::new();
    let mut oldest_first: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                let error: &(dyn std::error::Error + 'static) = &error;
                warn!(error, "cannot accept a connection for health or status");
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
        let connection = serve_connection(stream, Arc::clone(&handler), HEADER_TIMEOUT);
        oldest_first.push_back(connections.spawn(connection));
    }
}

pub(super) async fn serve_connection<S>(stream: S, handler: Handler, header_timeout: Duration)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let reply = handler(request.method(), request.uri().path());
        async move { Ok::<_, Infallible>(response(reply)) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(HEADER_BYTES_MAX)
        .keep_alive(false)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "a health or status connection failed"),
        Err(_elapsed) => debug!("a health or status connection took too long"),
    }
}

fn response(reply: Reply) -> Response<Full<Bytes>> {
    let Reply { status, content_type, body } = reply;
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
