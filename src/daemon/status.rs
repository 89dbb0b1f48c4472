//! The status socket: pages about a running weftd for the user that runs it, and the client of the
//! `weft` tool. The caller provides the pages.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustix::fs::Mode;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::config::whole_file;
use crate::daemon::http::{self, Reply, Stream};

/// Only the user that runs weftd may connect.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o600);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// How long the tool waits for the whole reply.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest reply the tool takes: 5000 peers at a kilobyte each, three times over.
const REPLY_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A socket for the user that runs weftd, listening. Dropping it removes its file.
#[derive(Debug)]
pub struct PrivateSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Of its file, which somebody may replace.
    device_and_inode: (u64, u64),
}

impl PrivateSocket {
    /// Listens on `path`, and replaces a socket that nobody serves any more. Must be called
    /// inside a tokio runtime.
    pub fn bind(path: &Path) -> anyhow::Result<Self> {
        remove_stale(path)?;
        let directory = whole_file::directory_of(path);
        whole_file::make_directory(directory).with_context(|| unusable(path))?;
        Self::listen(path).with_context(|| unusable(path))
    }

    fn listen(path: &Path) -> io::Result<Self> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        // The file inherits the mode of the socket (unix_bind_bsd in net/unix/af_unix.c), so at
        // no time may others connect.
        rustix::fs::fchmod(&socket, SOCKET_MODE)?;
        socket.bind(&SockAddr::unix(path)?)?;
        let device_and_inode = device_and_inode(path)?;
        socket.listen(BACKLOG)?;
        let listener = UnixListener::from_std(OwnedFd::from(socket).into())?;
        Ok(Self { listener, path: path.to_owned(), device_and_inode })
    }

    /// The next connection.
    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }

    /// Answers `GET` of a path with its page, as `page` gives it, for ever; drop the future to
    /// stop. It runs on the control plane's thread and must not block.
    pub async fn serve(
        self,
        page: impl Fn(&str) -> Option<Reply> + Send + Sync + 'static,
    ) -> Infallible {
        let only_get = move |method: &Method, path: &str| match page(path)? {
            reply if method == Method::GET => Some(reply),
            _ => Some(http::text(StatusCode::METHOD_NOT_ALLOWED, "405 method not allowed\n")),
        };
        http::serve(async || self.accept().await, only_get).await
    }
}

/// Removes a socket that nobody serves.
fn remove_stale(path: &Path) -> anyhow::Result<()> {
    // What else may be wrong with the path shows when it is bound.
    let Ok(status) = fs::symlink_metadata(path) else { return Ok(()) };
    let shown = path.display();
    if !status.file_type().is_socket() {
        bail!("{shown} is not a socket: remove it or choose another --status-socket");
    }
    let probe = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    match probe().map_err(|error| (error.kind(), error)) {
        Err((io::ErrorKind::ConnectionRefused, _)) => {
            fs::remove_file(path).with_context(|| unusable(path))
        }
        // If it would block, the queue is full, so somebody listens.
        Ok(()) | Err((io::ErrorKind::WouldBlock, _)) => bail!(
            "another process serves the socket {shown}: stop it or choose another \
             --status-socket"
        ),
        Err((_, error)) => Err(error).with_context(|| unusable(path)),
    }
}

fn unusable(path: &Path) -> String {
    format!("cannot listen on the socket {}: see --status-socket", path.display())
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        if device_and_inode(&self.path).is_ok_and(|there| there == self.device_and_inode) {
            // A file that stays is replaced at the next start.
            fs::remove_file(&self.path).ok();
        }
    }
}

fn device_and_inode(path: &Path) -> io::Result<(u64, u64)> {
    let status = fs::symlink_metadata(path)?;
    Ok((status.dev(), status.ino()))
}

/// Asks the weftd behind the status socket `path` for `target` (such as `/status`) and
/// returns the body. Blocks, five seconds at most; not for use inside a runtime.
pub fn fetch_unix(path: &Path, target: &str) -> anyhow::Result<Vec<u8>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime
        .block_on(async { timeout(FETCH_TIMEOUT, fetch(path, target)).await })
        .context("weftd did not answer completely")?
}

/// The sockets in the same directory, of daemons for other networks perhaps, in words.
fn others_beside(path: &Path) -> String {
    let files = path.parent().and_then(|directory| fs::read_dir(directory).ok());
    let others = files.into_iter().flatten().flatten().map(|file| file.path());
    let is_socket = |other: &PathBuf| {
        other != path && other.to_str().is_some_and(|it| it.ends_with("weft.sock"))
    };
    let mut others: Vec<_> = others.filter(is_socket).map(|it| it.display().to_string()).collect();
    others.sort_unstable();
    if others.is_empty() {
        return String::new();
    }
    format!(" (there is {}: give it as --socket)", others.join(", "))
}

async fn fetch(path: &Path, target: &str) -> anyhow::Result<Vec<u8>> {
    let stream = UnixStream::connect(path).await.with_context(|| {
        format!(
            "cannot connect to {}: weftd is not running, uses another --status-socket{}, runs as \
             another user, or is being taken over by one that hangs: `weft check` tells",
            path.display(),
            others_beside(path)
        )
    })?;
    let reply =
        exchange(stream, "weft", target).await.context("weftd did not answer completely")?;
    let (status, body) = (reply.status(), reply.into_body());
    if status != StatusCode::OK {
        bail!("weftd answered {} to {target}", status.as_u16());
    }
    Ok(body)
}

/// One request to `host` and its whole reply.
pub(crate) async fn exchange(
    stream: impl Stream,
    host: &str,
    target: &str,
) -> anyhow::Result<Response<Vec<u8>>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the runtime.
    tokio::spawn(connection);
    let request = Request::get(target).header(HOST, host).body(Empty::<Bytes>::new())?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, REPLY_BYTES_MAX).collect().await;
    let body = body.map_err(anyhow::Error::from_boxed)?.to_bytes().into();
    Ok(Response::from_parts(head, body))
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
