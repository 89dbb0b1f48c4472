//! `--take-over`: a starting weftd asks the running one for the tunnel's descriptors, at a socket
//! beside its status socket. The running one ends its control plane first, so that every port and
//! name is free, hands its lock over as well, and lets its workers go on until the new ones carry
//! packets, however long that takes: the new one may have to wait for the store. If it ends before,
//! the old one starts again.
//!
//! Where the kernel carries the packets, the control plane is all that there is to take over.
//!
//! On the socket: a byte from the new weftd, for who says nothing asks for nothing; the descriptors
//! with one byte; a byte from the new one, once it carries packets, or can't without what the old
//! one has; a byte from the old one, which has closed everything; a byte from the new one, which
//! has understood that; a last byte from the new one, once it carries packets. If the connection
//! ends between these two, the new one has ended, and the old one starts again. Earlier versions
//! end the connection in place of both: the old one when it has closed everything, and ends then;
//! the new one because it carries packets.
//!
//! There is one take-over at a time: the new one hands nothing over before the old one has let go.
//! A third weftd asks again and again. The lock of the subnet file goes from hand to hand without a
//! moment in which nobody has it, so whoever can lock it knows that there is nobody to ask.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::pending;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::backend::handover::{Handover, Offered, Owner};
use crate::config::options::{NEXT_SOCKET_SUFFIX, Options};
use crate::config::whole_file;
use crate::daemon::http::ACCEPT_RETRY_PAUSE;
use crate::daemon::notify::{self, AT_ONCE_MAX, send_with};
use crate::daemon::status::PrivateSocket;
use crate::failure::LogOnce;
use crate::host::lock::{DaemonLock, LockError};

/// How long the new weftd waits for the descriptors: the running one may have to tell a slow store
/// that it leaves.
const HAND_OVER_MAX: Duration = Duration::from_secs(30);
/// How long the new weftd asks again while another one takes over, which has to start, or the
/// running one starts itself. After a longer wait, for the store perhaps, somebody should know.
const TURN_MAX: Duration = Duration::from_secs(30);
/// Between two questions.
const TURN_PAUSE: Duration = Duration::from_millis(100);
/// How long whoever connects may take to ask; meanwhile others wait.
const ASK_MAX: Duration = Duration::from_secs(1);
/// How long a new weftd may take from when the old one has let go until it carries packets: nobody
/// does meanwhile. It has nothing to wait for then but a store that answers.
const ROOM_MAX: Duration = Duration::from_secs(30);
/// How long the one that has handed over may take to close everything.
const LET_GO_MAX: Duration = Duration::from_secs(5);
/// Between two looks at a process that ends.
const END_LOOK: Duration = Duration::from_millis(10);
/// Between two looks at the lock of the other weftd.
const STAND_BY_LOOK: Duration = Duration::from_secs(1);
/// After which the running one says that it still waits for the new one to carry packets.
const START_USUAL: Duration = Duration::from_secs(60);

const ENDED: &str = "it has ended before it carried packets";

const GO: u8 = b'g';
const NEEDS_ROOM: u8 = b'r';
const CARRIES: u8 = b'c';
/// With the descriptors: the first of them is the lock of the subnet file, or there is none.
const LOCKED: u8 = b'l';
const UNLOCKED: u8 = b'u';
/// Instead of them.
const NOTHING: u8 = b'n';
/// From the old one, which has let go, and the answer.
const CLOSED: u8 = b'q';
const UNDERSTOOD: u8 = b'k';

/// What a weftd starts with.
pub(super) struct Beginning {
    pub(super) predecessor: Option<Predecessor>,
    pub(super) handover: Handover,
    /// Of the subnet file, if it is known that this one has it.
    pub(super) lock: Option<DaemonLock>,
}

/// The weftd that has handed over, and waits to hear that this one runs: it starts again if it sees
/// this dropped.
pub(super) struct Predecessor(UnixStream);

/// Where the weftd with this status socket is asked.
pub(super) fn socket_beside(status_socket: &Path) -> PathBuf {
    whole_file::with_suffix(status_socket, NEXT_SOCKET_SUFFIX)
}

/// Goes on with the tunnel that the service manager has `passed`, or that the running weftd hands
/// over if `--take-over` is given: asks until it is this one's turn, or nobody has the lock.
pub(super) async fn begin(options: &Options, passed: Vec<OwnedFd>) -> anyhow::Result<Beginning> {
    let ordinary = |lock| Beginning {
        predecessor: None,
        handover: Handover::new(passed, Owner::Keeper),
        lock,
    };
    if !options.take_over {
        return Ok(ordinary(None));
    }
    let path = &socket_beside(&options.status_socket);
    let there = path.display();
    let (give_up, mut told) = (Instant::now() + TURN_MAX, LogOnce::default());
    loop {
        let hindrance = match UnixStream::connect(path).await {
            Ok(stream) => {
                let taken = ask(stream, &options.subnet_file).await.with_context(|| {
                    format!("--take-over: the weftd behind {there} does not hand over")
                })?;
                if let Some(taken) = taken {
                    info!("--take-over: going on for the weftd behind {there}");
                    return Ok(taken);
                }
                format!("the weftd behind {there} is taking over, or starting itself or its tunnel")
            }
            Err(error) => match DaemonLock::acquire(&options.subnet_file) {
                // Between two weftds nobody answers.
                Err(taken @ LockError::Taken { .. }) => format!("nobody answers there: {taken}"),
                lock => {
                    info!(
                        "--take-over: nobody answers at {there} ({error}), so this is an ordinary \
                         start"
                    );
                    return Ok(ordinary(lock.ok()));
                }
            },
        };
        if Instant::now() >= give_up {
            bail!("--take-over: not this one's turn within {TURN_MAX:?}: {hindrance}");
        }
        told.once(&hindrance, |text| info!("--take-over: waiting up to {TURN_MAX:?}: {text}"));
        sleep(TURN_PAUSE).await;
    }
}

/// Nothing if it is not this one's turn, or the other one has ended.
async fn ask(mut stream: UnixStream, subnet_file: &Path) -> anyhow::Result<Option<Beginning>> {
    let received = async {
        if stream.write_u8(GO).await.is_err() {
            return Ok(None);
        }
        receive(&stream).await
    };
    let received = timeout(HAND_OVER_MAX, received).await??;
    let owner = if is_in_container() { Owner::Replaced } else { Owner::Running };
    Ok(received.map(|(lock, tunnel)| Beginning {
        predecessor: Some(Predecessor(stream)),
        handover: Handover::new(tunnel, owner),
        lock: lock.and_then(|file| DaemonLock::inherit(file, subnet_file)),
    }))
}

async fn receive(stream: &UnixStream) -> anyhow::Result<Option<(Option<OwnedFd>, Vec<OwnedFd>)>> {
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
    // An error is the end of the connection, as its end is.
    let Ok((received, byte, mut descriptors)) = stream.async_io(Interest::READABLE, receive).await
    else {
        return Ok(None);
    };
    if received.bytes == 0 || byte == NOTHING {
        return Ok(None);
    }
    let is_whole = !received.flags.contains(ReturnFlags::CTRUNC);
    ensure!(is_whole, "this process may not open so many files");
    let lock = (byte == LOCKED && !descriptors.is_empty()).then(|| descriptors.remove(0));
    Ok(Some((lock, descriptors)))
}

/// Has the weftd that has handed over let go, once this one carries packets or needs what that one
/// has, and end, once this one carries packets; an error if it does not within `start_max`, or
/// can't.
pub(super) async fn release(
    predecessor: &mut Option<Predecessor>,
    handover: &Handover,
    start_max: Duration,
) -> anyhow::Result<Infallible> {
    if predecessor.is_some() {
        let carried = timeout(start_max, replace(predecessor, handover)).await.with_context(|| {
            format!(
                "--take-over: this weftd carries no packets after {start_max:?}, and nobody renews \
                 the lease meanwhile; the one before goes on"
            )
        })?;
        carried.map_err(|why| anyhow!("--take-over: {why}; the weftd before goes on"))?;
    }
    handover.is_alone();
    pending().await
}

async fn replace(predecessor: &mut Option<Predecessor>, handover: &Handover) -> Result<(), String> {
    handover.past_preparing().await;
    let Some(Predecessor(stream)) = predecessor else { return Ok(()) };
    let waits = makes_room(stream).await;
    handover.has_room();
    if !waits {
        // One of an earlier version has ended, and one that takes so long is not waited for.
        drop(predecessor.take());
        return Ok(());
    }
    let carried = timeout(ROOM_MAX, handover.outcome()).await;
    carried.map_err(|_elapsed| format!("no packets are carried after {ROOM_MAX:?}"))??;
    stream.write_u8(CARRIES).await.ok();
    // From here on the other one does not start again, whatever becomes of this one.
    if let Some(Predecessor(mut stream)) = predecessor.take() {
        drop(timeout(LET_GO_MAX, stream.read_u8()).await);
    }
    Ok(())
}

/// Has the old weftd let go; whether it waits then to hear that this one carries packets.
async fn makes_room(stream: &mut UnixStream) -> bool {
    if let Err(error) = stream.write_u8(NEEDS_ROOM).await {
        info!("the weftd that has handed over has ended before it was told to: {error}");
        return false;
    }
    let has_closed = matches!(timeout(LET_GO_MAX, stream.read_u8()).await, Ok(Ok(CLOSED)));
    if has_closed {
        stream.write_u8(UNDERSTOOD).await.ok();
    }
    has_closed
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
        if timeout(STAND_BY_LOOK, stop.as_mut()).await.is_ok() {
            return None;
        }
        if let Ok(lock) = DaemonLock::acquire(subnet_file) {
            warn!("the weftd that had taken over has ended, so this one goes on");
            return Some(lock);
        }
    }
}

/// A starting weftd that has asked for the tunnel.
pub(super) struct Successor {
    stream: UnixStream,
    /// `None` if it is of another pid namespace.
    process: Option<OwnedFd>,
}

/// Answers at `socket`, for ever: whoever asks for the tunnel goes to `successors`, if it can be
/// handed over.
pub(super) async fn answer(
    socket: PrivateSocket,
    handover: &Handover,
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
        if handover.can_hand_over() {
            let process = process_behind(&stream);
            // A second one comes too late, sees its connection end, and asks again.
            successors.try_send(Successor { stream, process }).ok();
        } else {
            stream.write_u8(NOTHING).await.ok();
        }
    }
}

/// Sends the tunnel's descriptors and the lock to `successor`. The workers go on until those of the
/// successor carry packets, or need what these have; it is waited for in any case. False if this
/// process is stopped meanwhile.
pub(super) async fn hand_over(
    successor: &mut Successor,
    handover: &Handover,
    lock: &RefCell<Option<DaemonLock>>,
    stop: Pin<&mut impl Future<Output = ()>>,
) -> anyhow::Result<bool> {
    let descriptors = match handover.offered().borrow().clone() {
        Offered::Tunnel(descriptors) => descriptors,
        Offered::Place => Arc::default(),
        Offered::Inherited | Offered::Nothing => {
            bail!("the tunnel was being made again; try again")
        }
    };
    let lock_file = lock.borrow().as_ref().map(DaemonLock::duplicate).transpose()?;
    info!("handing the tunnel over to a weftd that starts with --take-over");
    let taken = async {
        successor.takes(lock_file, &descriptors).await?;
        drop(descriptors);
        handover.let_go();
        successor.carries().await
    };
    let is_taken = tokio::select! {
        taken = taken => {
            taken?;
            true
        }
        never = notify::keep_watchdog(|| None) => match never {},
        () = stop => false,
    };
    handover.let_go();
    if let Some(lock) = lock.take() {
        lock.leave();
    }
    info!("Exiting cleanly... (the other weftd goes on)");
    Ok(is_taken)
}

/// The process at the other end.
fn process_behind(stream: &UnixStream) -> Option<OwnedFd> {
    let pid = Pid::from_raw(stream.peer_cred().ok()?.pid()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl Successor {
    /// Hands over, and waits until the new weftd carries packets, or needs room.
    async fn takes(&mut self, lock: Option<OwnedFd>, tunnel: &[OwnedFd]) -> anyhow::Result<()> {
        let borrowed: Vec<_> = lock.iter().chain(tunnel).map(AsFd::as_fd).collect();
        let byte = if lock.is_some() { LOCKED } else { UNLOCKED };
        let send = || send_with(&self.stream, &[byte], &borrowed);
        let sent = self.stream.async_io(Interest::WRITABLE, send).await;
        sent.context("the descriptors can't be sent")?;
        let goes_on = "so this one goes on, by the peers of then";
        if self.word(goes_on).await != Some(NEEDS_ROOM) {
            self.has_ended().await;
            bail!(ENDED);
        }
        Ok(())
    }

    /// Says that everything is closed here, and waits until the new weftd carries packets. Drop it
    /// once the lock is left to it.
    async fn carries(&mut self) -> anyhow::Result<()> {
        self.stream.write_u8(CLOSED).await.ok();
        let nobody_does = "and so does nobody";
        if self.word(nobody_does).await != Some(UNDERSTOOD) {
            // One of an earlier version, which carries packets.
            return Ok(());
        }
        if self.word(nobody_does).await != Some(CARRIES) {
            self.has_ended().await;
            bail!(ENDED);
        }
        Ok(())
    }

    /// The next word of the new weftd; `None` if the connection ends.
    async fn word(&mut self, meanwhile: &str) -> Option<u8> {
        let mut word = pin!(self.stream.read_u8());
        if let Ok(word) = timeout(START_USUAL, &mut word).await {
            return word.ok();
        }
        warn!(
            "the weftd that is to take over carries no packets after {START_USUAL:?}, {meanwhile}, \
             and nobody renews the lease; see its log. If it is stopped, this one starts again"
        );
        word.await.ok()
    }

    /// Waits for the end of its process, and with it of all its files: the connection need not be
    /// the last. One of another pid namespace has closed the others before.
    async fn has_ended(&self) {
        let Some(process) = &self.process else { return };
        while poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&Timespec::default())) == Ok(0)
        {
            sleep(END_LOOK).await;
        }
    }
}
