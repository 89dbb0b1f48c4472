//! ioctls and vectored I/O of `/dev/net/tun` (drivers/net/tun.c, include/uapi/linux/if_tun.h).

use std::ffi::{c_int, c_uint, c_ulong};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::{check, request_for};

const TUNSETIFF: c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: c_ulong = 0x4004_54d8;
const TUNSETVNETLE: c_ulong = 0x4004_54dc;

/// A TUN device (layer 3).
pub const IFF_TUN: i16 = 0x0001;
/// No packet-information header.
pub const IFF_NO_PI: i16 = 0x1000;
/// Several queues. Every queue of a device is opened with it, or none.
pub const IFF_MULTI_QUEUE: i16 = 0x0100;
/// A virtio-net header before each packet.
pub const IFF_VNET_HDR: i16 = 0x4000;

/// Checksums may be left partial.
pub const TUN_F_CSUM: c_uint = 0x01;
/// TCP over IPv4 super-packets.
pub const TUN_F_TSO4: c_uint = 0x02;
/// TCP over IPv6 super-packets.
pub const TUN_F_TSO6: c_uint = 0x04;
/// TCP super-packets may carry CWR.
pub const TUN_F_TSO_ECN: c_uint = 0x08;
/// UDP over IPv4 super-packets; only together with `TUN_F_USO6`.
pub const TUN_F_USO4: c_uint = 0x20;
/// UDP over IPv6 super-packets.
pub const TUN_F_USO6: c_uint = 0x40;

/// Opens a TUN queue on the device `name`, which may hold `%d`, and returns it with the name that
/// the kernel chose. Non-blocking and closed on exec; the device lives as long as one of its
/// queues.
pub fn open(name: &str, flags: i16) -> io::Result<(OwnedFd, String)> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_flags = flags;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    let chosen: Vec<u8> =
        request.ifr_name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
    Ok((file.into(), String::from_utf8_lossy(&chosen).into_owned()))
}

/// Tells the device which super-packets its reader takes. EINVAL for a bit that it doesn't know.
pub fn set_offload(tun: BorrowedFd<'_>, features: c_uint) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value and touches no memory of ours.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETOFFLOAD, c_ulong::from(features)) }).map(drop)
}

/// Makes the virtio-net header `bytes` long and little-endian.
pub fn set_vnet_header(tun: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    let little_endian: c_int = 1;
    // SAFETY: TUNSETVNETHDRSZ reads one int, which outlives the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETVNETHDRSZ, &raw const bytes) })?;
    // SAFETY: TUNSETVNETLE reads one int, which outlives the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETVNETLE, &raw const little_endian) }).map(drop)
}
