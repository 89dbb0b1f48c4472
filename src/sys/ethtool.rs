//! ethtool's ioctl about a network device's offloads (include/uapi/linux/ethtool.h,
//! net/ethtool/ioctl.c).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{check, request_for};

/// What is switched, and in words how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
#[repr(u32)]
pub enum Switch {
    /// `ETHTOOL_STXCSUM`: don't leave transport checksums to the device. What builds on it, such as
    /// segmentation, goes with it.
    #[display("off the transmit checksum offload")]
    TransmitChecksum = 0x17,
    /// `ETHTOOL_STSO`: have no TCP super-packets.
    #[display("off the TCP segmentation offload")]
    TcpSegmentation = 0x1f,
    /// `ETHTOOL_SGRO`: merge received packets.
    #[display("on the receive offload")]
    ReceiveMerging = 0x2c,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Switches an offload of the device `name` in the network namespace of `socket`, which may be any
/// socket.
pub fn switch(socket: BorrowedFd<'_>, name: &str, switch: Switch) -> io::Result<()> {
    let mut request = request_for(name)?;
    let data = u32::from(switch == Switch::ReceiveMerging);
    let mut value = Value { command: switch as u32, data };
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: SIOCETHTOOL reads one `ifreq`, and by its pointer reads and writes, for the commands
    // of `Switch`, one `ethtool_value`. `request` and `value` are these, and outlive the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) }).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_missing_device_is_told_by_errno() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let set = |name| switch(socket.as_fd(), name, Switch::ReceiveMerging);
        assert_eq!(set("no-such-weft").unwrap_err().raw_os_error(), Some(libc::ENODEV));
        let long = set("a-name-of-more-than-15-bytes").unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidInput);
    }
}
