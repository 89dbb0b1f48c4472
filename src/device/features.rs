//! Offloads of network devices other than TUN: who fills in transport checksums, who cuts and who
//! merges packets.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys::ethtool;

pub use crate::sys::ethtool::Switch;

/// The setting of a device could not be changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot switch {switch} of {device}")]
pub struct FeatureError {
    /// What was tried.
    switch: Switch,
    /// The device.
    device: String,
    /// The kernel's reason.
    source: io::Error,
}

/// Switches an offload of the device `name`.
pub fn switch(name: &str, switch: Switch) -> Result<(), FeatureError> {
    socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(io::Error::from)
        .and_then(|socket| ethtool::switch(socket.as_fd(), name, switch))
        .map_err(|source| FeatureError { switch, device: name.to_owned(), source })
}
