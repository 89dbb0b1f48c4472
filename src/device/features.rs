//! Offloads of network devices other than TUN: who fills in transport checksums, who cuts and who
//! merges packets.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys::ethtool::{self, Ask};

/// The setting of a device could not be changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot switch {operation} of {device}")]
pub struct FeatureError {
    /// What was tried.
    operation: &'static str,
    /// The device.
    device: String,
    /// The kernel's reason.
    source: io::Error,
}

/// Has every transport checksum be there before a packet reaches the device `name`.
pub fn leave_no_checksums(name: &str) -> Result<(), FeatureError> {
    ask("off the transmit checksum offload", name, Ask::ClearTransmitChecksum)
}

/// Has no TCP super-packets go into the device `name`.
pub fn cut_tcp(name: &str) -> Result<(), FeatureError> {
    ask("off the TCP segmentation offload", name, Ask::ClearTcpSegmentation)
}

/// Has the packets that come out of the device `name` merged (GRO).
pub fn merge_received(name: &str) -> Result<(), FeatureError> {
    ask("on the receive offload", name, Ask::SetReceiveMerging)
}

fn ask(operation: &'static str, name: &str, ask: Ask) -> Result<(), FeatureError> {
    socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(io::Error::from)
        .and_then(|socket| ethtool::ask(socket.as_fd(), name, ask).map(drop))
        .map_err(|source| FeatureError { operation, device: name.to_owned(), source })
}
