//! Tells the service manager that weftd is ready and alive, and gives it descriptors to keep:
//! datagrams to `$NOTIFY_SOCKET` (sd_notify(3)). A service manager that does not listen never stops
//! the daemon.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::future::pending;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::time::{Instant, sleep};
use tracing::{debug, error, warn};

/// Most descriptors in one message (`SCM_MAX_FD` in include/net/scm.h).
pub(super) const AT_ONCE_MAX: usize = 253;

/// Between two looks at what is to be told.
const STATUS_PERIOD: Duration = Duration::from_secs(5);

/// Whoever waits a shorter time for a word from weftd has it ended on any busy machine.
const WATCHDOG_PERIOD_MIN: Duration = Duration::from_millis(100);
/// How late the control plane may be before it is taken for paused, with all of weftd.
const LATE_MAX: Duration = Duration::from_secs(5);

/// Sends `READY=1`, after subnet.env was written and the backend runs.
pub(super) fn ready() {
    if let Err(error) = send("READY=1", &[]) {
        warn!("cannot tell the service manager READY=1: {error}");
    }
}

/// Keeps the line that `systemctl status` shows as `text` gives it, for ever. Without a service
/// manager it asks for none.
pub(super) async fn keep_status(text: impl Fn() -> String) -> Infallible {
    if socket().is_none() {
        return pending().await;
    }
    let mut last = String::new();
    loop {
        sleep(STATUS_PERIOD).await;
        let now = text();
        // One that is not taken is tried again with the next.
        let line = now.replace('\n', " ");
        if now != last && send(&format!("STATUS={line}"), &[]).is_ok() {
            last = now;
        }
    }
}

/// Tells the service manager that weftd is alive, for ever, if it wants to know (`WatchdogSec=`):
/// the control plane by the telling itself, the workers as long as `stalled` has nothing to say.
pub(super) async fn keep_watchdog(stalled: impl Fn() -> Option<String>) -> Infallible {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(period) = watchdog_period(variable, std::process::id()) else {
        return pending().await;
    };
    let (mut was_alive, mut looked) = (true, Instant::now());
    loop {
        // After a pause of the whole process a worker has had no turn either, yet.
        let was_paused = looked.elapsed() > period + LATE_MAX;
        looked = Instant::now();
        let why = stalled().filter(|_| !was_paused);
        match &why {
            // The next one comes in time.
            None => send("WATCHDOG=1", &[]).unwrap_or_default(),
            Some(why) if was_alive => error!("{why}. The service manager will start weftd again"),
            Some(_) => {}
        }
        was_alive = why.is_none();
        sleep(period).await;
    }
}

/// How often the service manager has to be told, by what it put into the environment
/// (sd_watchdog_enabled(3)): three times in the time that it waits.
fn watchdog_period(variable: impl Fn(&str) -> Option<String>, pid: u32) -> Option<Duration> {
    let is_ours = variable("WATCHDOG_PID").is_none_or(|other| other.parse() == Ok(pid));
    let waits_us: u64 = variable("WATCHDOG_USEC")?.parse().ok()?;
    let period = (Duration::from_micros(waits_us) / 3).max(WATCHDOG_PERIOD_MIN);
    (is_ours && waits_us > 0).then_some(period)
}

/// Sends `message` with copies of `descriptors`. Without a service manager nothing happens. The
/// variable stays set, as for flanneld's children.
pub(super) fn send(message: &str, descriptors: &[OwnedFd]) -> io::Result<()> {
    let Some(socket) = socket() else {
        debug!("NOTIFY_SOCKET is not set: nobody is told {message:?}");
        return Ok(());
    };
    send_to(&socket, message.as_bytes(), descriptors)
}

fn socket() -> Option<OsString> {
    std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())
}

/// A leading `@` stands for an abstract socket. Never waits: a service manager whose queue is
/// full is not waited for.
fn send_to(socket: &OsStr, message: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.connect_addr(&address)?;
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    send_with(&sender, message, &borrowed)
}

/// Sends `message` to the other end of `socket`, with copies of `descriptors`.
pub(super) fn send_with(
    socket: impl AsFd,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many --workers for one message"));
    }
    sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: &[u8] = b"READY=1";

    fn received(receiver: &UnixDatagram) -> Vec<u8> {
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut bytes = [0; 64];
        let length = receiver.recv(&mut bytes).unwrap();
        bytes[..length].to_vec()
    }

    #[test]
    fn a_socket_in_the_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        send_to(path.as_os_str(), READY, &[]).unwrap();
        assert_eq!(received(&receiver), b"READY=1");
    }

    #[test]
    fn the_watchdog_is_for_the_process_that_was_asked() {
        let period = |usec: &str, pid: Option<&str>| {
            let variable = |name: &str| match name {
                "WATCHDOG_USEC" => Some(usec.to_owned()),
                _ => pid.map(str::to_owned),
            };
            watchdog_period(variable, 7)
        };
        let second = Some(Duration::from_secs(1));
        assert_eq!(period("3000000", None), second);
        assert_eq!(period("3000000", Some("7")), second);
        assert_eq!(period("3000000", Some("8")), None, "a child answers for its parent");
        assert_eq!(period("1", None), Some(WATCHDOG_PERIOD_MIN));
        assert_eq!(period("0", None), None);
        assert_eq!(period("soon", None), None);
        assert_eq!(watchdog_period(|_| None, 7), None);
    }

    #[test]
    fn an_abstract_socket() {
        let name = format!("weft-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        send_to(&OsString::from(format!("@{name}")), READY, &[]).unwrap();
        assert_eq!(received(&receiver), b"READY=1");
    }

    #[test]
    fn failures_are_returned_and_nothing_waits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        assert!(send_to(path.as_os_str(), READY, &[]).is_err());
        assert!(send_to(OsStr::from_bytes(&[b'a'; 200]), READY, &[]).is_err());
        let _receiver = UnixDatagram::bind(&path).unwrap();
        let full = (0..100_000).find_map(|_| send_to(path.as_os_str(), READY, &[]).err());
        assert_eq!(full.unwrap().kind(), io::ErrorKind::WouldBlock);
    }
}
