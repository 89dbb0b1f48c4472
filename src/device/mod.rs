//! Owned devices: the TUN device and the UDP socket, with what each was probed to support; what is
//! known of kernels and of other devices.
//!
//! A capability is found once, when the device is opened, and lowered for good when the kernel
//! refuses it at run time; the engines ask, they don't guess.

pub mod features;
mod inherited;
pub mod kernel;
mod socket;
mod tun;

pub use crate::sys::echo::{only_types, receive as receive_message, tell_arrival};
pub use crate::sys::link::ignore_outgoing;
pub use crate::sys::steering::{LANES, Steering};
pub use crate::sys::udp::{Datagrams, SendBatch};
pub use inherited::{inherit, tun_names};
pub use socket::{SEGMENTS_MIN, SocketError, TunnelSocket};
pub use tun::{Tun, TunError, TunOffload};
