//! `--take-over`: a starting weftd asks the running one for the tunnel's descriptors, at a socket
//! beside its status socket. The running one ends its control plane first, so that every port and
//! name is free, hands its lock over as well, and lets its workers go on until the new ones carry
//! packets, however long that takes: the new one may have to wait for the store. If it ends before,
//! the old one starts again.
//!
//! Where the kernel carries the packets, the control plane is all that there is to take over.
//!
//! On the socket: a byte from the new weftd, for who says nothing asks for nothing; the descriptors
//! with one byte; a last byte from the new one, once it carries packets. The old one closes the
//! connection when it has closed everything else.

use std::convert::Infallible;
use std::future::pending;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::backend::handover::{Handover, Offered};
use crate::config::options::NEXT_SOCKET_SUFFIX;
use crate::daemon::notify::{AT_ONCE_MAX, send_with};
use crate::daemon::status::PrivateSocket;
use crate::host::lock::DaemonLock;

/// How long the new weftd waits for the descriptors: the running one may have to tell a slow store
/// that it leaves.
const HAND_OVER_MAX: Duration = Duration::from_secs(30);
/// How long whoever connects may take to ask; meanwhile others wait.
const ASK_MAX: Duration = Duration::from_secs(1);
/// How long a running one that was killed may take to end.
const END_MAX_SECONDS: i64 = 3;
/// How long the one that has handed over may take to close everything.
const LET_GO_MAX: Duration = Duration::from_secs(5);
/// Between two looks at the lock of the other weftd.
const STAND_BY_LOOK: Duration = Duration::from_secs(1);
/// After which the running one says that it still waits for the new one to carry packets.
const START_USUAL: Duration = Duration::from_secs(60);

/// Pause after a failed accept: without it, a lack of file descriptors would spin.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

const GO: u8 = b'g';
const RUNNING: u8 = b'r';
/// With the descriptors: the first of them is the lock of the subnet file, or there is none.
const LOCKED: u8 = b'l';
const UNLOCKED: u8 = b'u';
/// Instead of them.
const NOTHING: u8 = b'n';

/// What a weftd hands over.
pub(super) struct Taken {
    /// The lock of its subnet file.
    pub(super) lock: Option<OwnedFd>,
    /// Queues and sockets.
    pub(super) tunnel: Vec<OwnedFd>,
    pub(super) predecessor: Predecessor,
}

/// The weftd that has handed over, and waits to hear that this one runs.
pub(super) struct Predecessor(UnixStream);

/// Where the weftd with this status socket is asked.
pub(super) fn socket_beside(status_socket: &Path) -> PathBuf {
    let mut path = status_socket.as_os_str().to_owned();
    path.push(NEXT_SOCKET_SUFFIX);
    path.into()
}

/// Asks the weftd with this status socket for the tunnel; `None` if there is none, or if it was
/// killed meanwhile.
pub(super) async fn ask(status_socket: &Path) -> anyhow::Result<Option<Taken>> {
    let path = &socket_beside(status_socket);
    let there = path.display();
    let mut stream = match UnixStream::connect(path).await {
        Ok(stream) => stream,
        Err(error) => {
            info!("--take-over: nobody answers at {there} ({error}), so this is an ordinary start");
            return Ok(None);
        }
    };
    let process = process_behind(&stream);
    let exchange = async {
        stream.write_u8(GO).await?;
        let (lock, tunnel) = receive(&stream).await?;
        anyhow::Ok(Taken { lock, tunnel, predecessor: Predecessor(stream) })
    };
    let taken = timeout(HAND_OVER_MAX, exchange).await.map_err(anyhow::Error::from).flatten();
    if let Err(error) = &taken
        && process.is_some_and(|process| ends(&process))
    {
        info!("--take-over: the other weftd has ended ({error:#}), so this is an ordinary start");
        return Ok(None);
    }
    let taken = taken
        .with_context(|| format!("--take-over: the weftd behind {there} does not hand over"))?;
    info!("--take-over: going on for the weftd behind {there}");
    Ok(Some(taken))
}

/// The process at the other end; `None` if it is of another pid namespace.
fn process_behind(stream: &UnixStream) -> Option<OwnedFd> {
    let pid = Pid::from_raw(stream.peer_cred().ok()?.pid()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Whether a process is gone within [`END_MAX_SECONDS`], and with it all its files: the connection
/// to it need not be the last. Nothing else runs here yet that would have to wait.
fn ends(process: &OwnedFd) -> bool {
    let limit = Timespec { tv_sec: END_MAX_SECONDS, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)) == Ok(1)
}

async fn receive(stream: &UnixStream) -> anyhow::Result<(Option<OwnedFd>, Vec<OwnedFd>)> {
    let receive = || {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut byte)];
        let received = recvmsg(stream, into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        Ok((received, byte[0], descriptors))
    };
    let (received, byte, mut descriptors) = stream.async_io(Interest::READABLE, receive).await?;
    ensure!(received.bytes == 1, "it has ended");
    let is_whole = !received.flags.contains(ReturnFlags::CTRUNC);
    ensure!(is_whole, "this process may not open so many files");
    ensure!(byte != NOTHING, "it is just starting itself, or makes its tunnel again; try again");
    let lock = (byte == LOCKED && !descriptors.is_empty()).then(|| descriptors.remove(0));
    Ok((lock, descriptors))
}

/// Lets the weftd that has handed over end, once this one carries packets.
pub(super) async fn release(predecessor: Option<Predecessor>, handover: &Handover) -> Infallible {
    handover.carrying().await;
    if let Some(Predecessor(mut stream)) = predecessor {
        match stream.write_u8(RUNNING).await {
            // It says nothing more.
            Ok(()) => drop(timeout(LET_GO_MAX, stream.read_u8()).await),
            Err(error) => {
                info!("the weftd that has handed over has ended before it was told to: {error}");
            }
        }
    }
    handover.is_alone();
    pending().await
}

/// Whether this process is the first of its container: the runtime would start it again if it
/// ended, and that one would take the tunnel back.
pub(super) fn is_in_container() -> bool {
    std::process::id() == 1
}

/// Waits until this process is stopped, or until the weftd that has taken over has ended: then this
/// one has its lock.
pub(super) async fn stand_by(
    subnet_file: &Path,
    mut stop: Pin<&mut impl Future<Output = ()>>,
) -> Option<DaemonLock> {
    info!("standing by until this container is stopped, or the other weftd ends");
    loop {
        tokio::select! {
            () = stop.as_mut() => return None,
            () = sleep(STAND_BY_LOOK) => {}
        }
        if let Ok(lock) = DaemonLock::acquire(subnet_file) {
            warn!("the weftd that had taken over has ended, so this one goes on");
            return Some(lock);
        }
    }
}

/// A starting weftd that has asked for the tunnel.
pub(super) struct Successor(UnixStream);

/// Answers at `socket`, for ever: whoever asks for the tunnel goes to `successors`, if one is
/// `offered`.
pub(super) async fn answer(
    socket: PrivateSocket,
    offered: watch::Receiver<Offered>,
    successors: mpsc::Sender<Successor>,
) -> Infallible {
    loop {
        let Ok(mut stream) = socket.accept().await else {
            sleep(ACCEPT_RETRY_PAUSE).await;
            continue;
        };
        if !matches!(timeout(ASK_MAX, stream.read_u8()).await, Ok(Ok(GO))) {
            continue;
        }
        if matches!(*offered.borrow(), Offered::Tunnel(_) | Offered::Place) {
            // A second one comes too late, and sees its connection end.
            successors.try_send(Successor(stream)).ok();
        } else {
            stream.write_u8(NOTHING).await.ok();
        }
    }
}

impl Successor {
    /// Hands over, and waits until the new weftd carries packets. Drop it once all that was handed
    /// over is closed here.
    pub(super) async fn takes(
        &mut self,
        lock: Option<OwnedFd>,
        tunnel: &[OwnedFd],
    ) -> anyhow::Result<()> {
        let borrowed: Vec<_> = lock.iter().chain(tunnel).map(AsFd::as_fd).collect();
        let byte = if lock.is_some() { LOCKED } else { UNLOCKED };
        let send = || send_with(&self.0, &[byte], &borrowed);
        self.0.async_io(Interest::WRITABLE, send).await.context("the descriptors can't be sent")?;
        let mut answer = pin!(self.0.read_u8());
        let word = match timeout(START_USUAL, &mut answer).await {
            Ok(word) => word,
            Err(_elapsed) => {
                warn!(
                    "the weftd that is to take over carries no packets after {START_USUAL:?}, so \
                     this one goes on, by the peers of then; see its log. If it is stopped, this \
                     one starts again"
                );
                answer.await
            }
        };
        let word = word.context("it has ended before it carried packets")?;
        ensure!(word == RUNNING, "it answered {word}");
        Ok(())
    }
}
