//! The status socket: `/status` and `/metrics` of a running weftd for the user that runs it, and
//! the client of the `weft` tool. The caller provides the content.

use std::convert::Infallible;
use std::fs::{self, DirBuilder};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::{Method, StatusCode};
use rustix::fs::Mode;
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

use crate::daemon::http::{self, Handler, Reply};

/// Only the user that runs weftd may connect.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o600);
/// Mode of directories that are missing; the umask applies.
const DIRECTORY_MODE: u32 = 0o755;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// How long the tool waits for the whole reply.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest reply the tool takes: 5000 peers at a kilobyte each, three times over.
const REPLY_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Why there is no status socket.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// A system call failed.
    #[error(
        "cannot {operation} the status socket {path}: see --status-socket",
        path = path.display()
    )]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The socket.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Somebody answers there.
    #[error(
        "another process serves the status socket {path}: stop it or choose another \
         --status-socket",
        path = path.display()
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something else stands there.
    #[error(
        "{path} is not a socket: remove it or choose another --status-socket",
        path = path.display()
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
}

/// The status socket, listening. Its file goes away with it.
#[derive(Debug)]
pub struct StatusServer {
    listener: UnixListener,
    file: SocketFile,
}

impl StatusServer {
    /// Listens on `path`, in place of a socket that nobody serves any more. Must be called
    /// inside a tokio runtime.
    pub fn bind(path: &Path) -> Result<Self, StatusError> {
        let failed = |operation| move |source| io_error(operation, path, source);
        if let Some(directory) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(DIRECTORY_MODE);
            builder.create(directory).map_err(failed("make the directory of"))?;
        }
        remove_stale(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed("make"))?;
        socket.set_nonblocking(true).map_err(failed("make"))?;
        // The file inherits the mode of the socket (unix_bind_bsd in net/unix/af_unix.c), so at
        // no time may others connect.
        rustix::fs::fchmod(&socket, SOCKET_MODE)
            .map_err(|errno| failed("protect")(errno.into()))?;
        let address = SockAddr::unix(path).map_err(failed("name"))?;
        socket.bind(&address).map_err(failed("bind"))?;
        let file = SocketFile::new(path).map_err(failed("examine"))?;
        socket.listen(BACKLOG).map_err(failed("listen on"))?;
        let listener = std::os::unix::net::UnixListener::from(OwnedFd::from(socket));
        let listener = UnixListener::from_std(listener).map_err(failed("register"))?;
        Ok(Self { listener, file })
    }

    /// Answers `GET /status` with the JSON of `status` and `GET /metrics` with the text of
    /// `metrics` (Prometheus text format) for ever; drop the future to stop. Both run on the
    /// control plane's thread and must not block.
    pub async fn serve(
        self,
        status: impl Fn() -> Value + Send + Sync + 'static,
        metrics: impl Fn() -> String + Send + Sync + 'static,
    ) -> Infallible {
        let Self { listener, file: _file } = self;
        let handler: Handler =
            Arc::new(move |method, path| answer(method, path, &status, &metrics));
        http::serve(listener, handler).await
    }
}

fn answer(
    method: &Method,
    path: &str,
    status: &dyn Fn() -> Value,
    metrics: &dyn Fn() -> String,
) -> Reply {
    let (content_type, body): (_, &dyn Fn() -> String) = match path {
        "/status" => ("application/json", &|| format!("{}\n", status())),
        "/metrics" => ("text/plain; version=0.0.4; charset=utf-8", metrics),
        _ => return Reply::not_found(),
    };
    if method != Method::GET {
        return Reply::text(StatusCode::METHOD_NOT_ALLOWED, "405 method not allowed\n");
    }
    Reply { status: StatusCode::OK, content_type, body: Bytes::from(body()) }
}

/// Removes a socket that nobody serves.
fn remove_stale(path: &Path) -> Result<(), StatusError> {
    match fs::symlink_metadata(path) {
        Ok(status) if status.file_type().is_socket() => {}
        Ok(_) => return Err(StatusError::NotASocket { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("examine", path, error)),
    }
    let failed = |source| io_error("try", path, source);
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
    probe.set_nonblocking(true).map_err(failed)?;
    match probe.connect(&SockAddr::unix(path).map_err(failed)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)
            .map_err(|source| io_error("remove the stale file of", path, source)),
        // Its queue is full, so somebody listens.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(StatusError::InUse { path: path.to_owned() })
        }
        Err(error) => Err(failed(error)),
        Ok(()) => Err(StatusError::InUse { path: path.to_owned() }),
    }
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> StatusError {
    StatusError::Io { operation, path: path.to_owned(), source }
}

/// The socket's file, removed at the end unless somebody has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device_and_inode: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        let status = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device_and_inode: (status.dev(), status.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|status| (status.dev(), status.ino()) == self.device_and_inode);
        if ours {
            // A file that stays is replaced at the next start.
            fs::remove_file(&self.path).ok();
        }
    }
}

/// Why a running weftd could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Nobody answers, or not to this user.
    #[error(
        "cannot connect to {path}: weftd is not running, uses another --status-socket, or runs as \
         another user",
        path = path.display()
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The connection broke, or took longer than five seconds.
    #[error("weftd did not answer completely")]
    Exchange(#[source] io::Error),
    /// Not what weftd would say.
    #[error("the answer is not weftd's: {0}")]
    Malformed(&'static str),
    /// weftd answered with an error.
    #[error("weftd answered {status} to {target}")]
    Status {
        /// HTTP status code.
        status: u16,
        /// What was asked for.
        target: String,
    },
}

/// Asks the weftd behind the status socket `path` for `target` (`/status` or `/metrics`) and
/// returns the body. Blocks, five seconds at most.
pub fn fetch_unix(path: &Path, target: &str) -> Result<Vec<u8>, FetchError> {
    let deadline = Instant::now() + FETCH_TIMEOUT;
    let connected = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // On a unix socket this bounds connect() too, while the other side's queue is full.
        socket.set_write_timeout(Some(FETCH_TIMEOUT))?;
        socket.connect(&SockAddr::unix(path)?)?;
        Ok(socket)
    };
    let mut socket =
        connected().map_err(|source| FetchError::Connect { path: path.to_owned(), source })?;
    let request = format!("GET {target} HTTP/1.1\r\nHost: weft\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).map_err(FetchError::Exchange)?;
    let reply = read_reply(&mut socket, deadline)?;
    body_of(&reply, target)
}

fn read_reply(socket: &mut Socket, deadline: Instant) -> Result<Vec<u8>, FetchError> {
    let mut reply = Vec::new();
    let mut chunk = [0; 16 * 1024];
    loop {
        let patience = deadline.saturating_duration_since(Instant::now());
        if patience.is_zero() {
            return Err(FetchError::Exchange(io::ErrorKind::TimedOut.into()));
        }
        socket.set_read_timeout(Some(patience)).map_err(FetchError::Exchange)?;
        match socket.read(&mut chunk) {
            Ok(0) => return Ok(reply),
            Ok(length) => reply.extend_from_slice(&chunk[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FetchError::Exchange(error)),
        }
        if reply.len() > REPLY_BYTES_MAX {
            return Err(FetchError::Malformed("it is longer than 16 MiB"));
        }
    }
}

/// Splits head and body; the length must be as announced, so that half a reply is an error.
fn body_of(reply: &[u8], target: &str) -> Result<Vec<u8>, FetchError> {
    let end = reply.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.ok_or(FetchError::Malformed("it has no end of headers"))?;
    let head = str::from_utf8(&reply[..end])
        .map_err(|_not_text| FetchError::Malformed("its headers are not text"))?;
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok())
        .ok_or(FetchError::Malformed("it has no status"))?;
    if status != 200 {
        return Err(FetchError::Status { status, target: target.to_owned() });
    }
    let announced = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse::<usize>().ok());
    let body = &reply[end + 4..];
    if announced == Some(body.len()) {
        Ok(body.to_vec())
    } else {
        Err(FetchError::Malformed("its length is not as announced"))
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
