//! ethtool's ioctl about a network device's offloads (include/uapi/linux/ethtool.h,
//! net/ethtool/ioctl.c).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{check, request_for};

/// What is asked of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Ask {
    /// `ETHTOOL_STXCSUM`: don't leave transport checksums to the device. What builds on it, such as
    /// segmentation, goes with it.
    ClearTransmitChecksum = 0x17,
    /// `ETHTOOL_STSO`: have no TCP super-packets.
    ClearTcpSegmentation = 0x1f,
    /// `ETHTOOL_SGRO`: merge received packets.
    SetReceiveMerging = 0x2c,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Asks the device `name` of the network namespace of `socket`, which may be any socket; gives
/// the device's value.
pub fn ask(socket: BorrowedFd<'_>, name: &str, ask: Ask) -> io::Result<u32> {
    let mut request = request_for(name)?;
    let mut value = Value { command: ask as u32, data: u32::from(ask == Ask::SetReceiveMerging) };
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: SIOCETHTOOL reads one `ifreq`, and by its pointer reads and writes, for the commands
    // of `Ask`, one `ethtool_value`. `request` and `value` are these, and outlive the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) })?;
    Ok(value.data)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_missing_device_is_told_by_errno() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let ask = |name| ask(socket.as_fd(), name, Ask::SetReceiveMerging);
        assert_eq!(ask("no-such-weft").unwrap_err().raw_os_error(), Some(libc::ENODEV));
        let long = ask("a-name-of-more-than-15-bytes").unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidInput);
    }
}
