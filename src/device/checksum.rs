//! Whether a network device leaves transport checksums to be filled in later, and its switch.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys::ethtool::{Ask, ask};

/// The setting of a device could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} the transmit checksum offload of {device}")]
pub struct ChecksumError {
    /// What was tried.
    verb: &'static str,
    /// The device.
    device: String,
    /// The kernel's reason.
    source: io::Error,
}

/// Whether the device `name` leaves checksums to be filled in later.
pub fn is_left(name: &str) -> Result<bool, ChecksumError> {
    with_socket("read", name, |socket| ask(socket.as_fd(), name, Ask::TransmitChecksum, 0))
        .map(|left| left != 0)
}

/// Has every checksum be there before a packet reaches the device `name`.
pub fn leave_none(name: &str) -> Result<(), ChecksumError> {
    with_socket("switch off", name, |socket| {
        ask(socket.as_fd(), name, Ask::SetTransmitChecksum, 0).map(drop)
    })
}

fn with_socket<T>(
    verb: &'static str,
    name: &str,
    work: impl FnOnce(OwnedFd) -> io::Result<T>,
) -> Result<T, ChecksumError> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    socket.map_err(io::Error::from).and_then(work).map_err(|source| ChecksumError {
        verb,
        device: name.to_owned(),
        source,
    })
}
