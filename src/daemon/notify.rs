//! Tells the service manager that weftd is ready: one datagram to `$NOTIFY_SOCKET`
//! (sd_notify(3)). A service manager that does not listen never stops the daemon.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use tracing::{debug, warn};

const READY: &[u8] = b"READY=1";

/// Sends `READY=1`, after subnet.env was written and the backend runs. Without a service manager
/// nothing happens. The variable stays set, as for flanneld's children.
pub(super) fn ready() {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else {
        debug!("NOTIFY_SOCKET is not set, so READY=1 is not sent");
        return;
    };
    if let Err(error) = send(&socket, READY) {
        let error: &(dyn std::error::Error + 'static) = &error;
        warn!(socket = %socket.display(), error, "cannot tell the service manager READY=1");
    }
}

/// A leading `@` stands for an abstract socket. Never waits: a service manager whose queue is
/// full is not waited for.
fn send(socket: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to_addr(message, &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::time::Duration;

    use super::*;

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
        send(path.as_os_str(), READY).unwrap();
        assert_eq!(received(&receiver), b"READY=1");
    }

    #[test]
    fn an_abstract_socket() {
        let name = format!("weft-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        send(&OsString::from(format!("@{name}")), READY).unwrap();
        assert_eq!(received(&receiver), b"READY=1");
    }

    #[test]
    fn failures_are_returned_and_nothing_waits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        assert!(send(path.as_os_str(), READY).is_err());
        assert!(send(OsStr::from_bytes(&[b'a'; 200]), READY).is_err());
        let _receiver = UnixDatagram::bind(&path).unwrap();
        let full = (0..100_000).find_map(|_| send(path.as_os_str(), READY).err());
        assert_eq!(full.unwrap().kind(), io::ErrorKind::WouldBlock);
    }
}
