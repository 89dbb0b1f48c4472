//! Offloads of network devices other than TUN: who fills in transport checksums, who cuts
//! and who merges packets.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys::ethtool::{self, Ask};

/// The setting of a device could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} of {device}")]
pub struct FeatureError {
    /// What was tried.
    operation: &'static str,
    /// The device.
    device: String,
    /// The kernel's reason.
    source: io::Error,
}

/// Whether the device `name` leaves checksums to be filled in later.
pub fn leaves_checksums(name: &str) -> Result<bool, FeatureError> {
    ask("read the transmit checksum offload", name, Ask::TransmitChecksum).map(|left| left != 0)
}

/// Has every checksum be there before a packet reaches the device `name`.
pub fn leave_no_checksums(name: &str) -> Result<(), FeatureError> {
    ask("switch off the transmit checksum offload", name, Ask::ClearTransmitChecksum).map(drop)
}

/// Has no TCP super-packets go into the device `name`.
pub fn cut_tcp(name: &str) -> Result<(), FeatureError> {
    ask("switch off the TCP segmentation offload", name, Ask::ClearTcpSegmentation).map(drop)
}

/// Has the packets that come out of the device `name` merged (GRO).
pub fn merge_received(name: &str) -> Result<(), FeatureError> {
    ask("switch on the receive offload", name, Ask::SetReceiveMerging).map(drop)
}

fn ask(operation: &'static str, name: &str, ask: Ask) -> Result<u32, FeatureError> {
    socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(io::Error::from)
        .and_then(|socket| ethtool::ask(socket.as_fd(), name, ask))
        .map_err(|source| FeatureError { operation, device: name.to_owned(), source })
}
