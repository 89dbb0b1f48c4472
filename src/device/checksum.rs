//! Whether a network device leaves transport checksums to be filled in later, and its switch.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys::ethtool::{self, Ask};

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
    ask("read", name, Ask::TransmitChecksum).map(|left| left != 0)
}

/// Has every checksum be there before a packet reaches the device `name`.
pub fn leave_none(name: &str) -> Result<(), ChecksumError> {
    ask("switch off", name, Ask::ClearTransmitChecksum).map(drop)
}

fn ask(verb: &'static str, name: &str, ask: Ask) -> Result<u32, ChecksumError> {
    socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(io::Error::from)
        .and_then(|socket| ethtool::ask(socket.as_fd(), name, ask))
        .map_err(|source| ChecksumError { verb, device: name.to_owned(), source })
}
