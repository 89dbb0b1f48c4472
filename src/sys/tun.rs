//! ioctls and vectored I/O of `/dev/net/tun` (drivers/net/tun.c, include/uapi/linux/if_tun.h).

use std::ffi::{c_int, c_uint, c_ulong};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::{check, request_for};

// IFF_MULTI_QUEUE is for every queue of a device or none; TUN_F_USO4 goes with TUN_F_USO6 only.
pub use libc::{IFF_MULTI_QUEUE, IFF_NO_PI, IFF_TUN, IFF_VNET_HDR};
pub use libc::{TUN_F_CSUM, TUN_F_TSO_ECN, TUN_F_TSO4, TUN_F_TSO6, TUN_F_USO4, TUN_F_USO6};

/// include/uapi/asm-generic/fcntl.h
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;

/// Opens a TUN queue on the device `name`, which may hold `%d`, and returns it with the name that
/// the kernel chose. Non-blocking and closed on exec; the device lives as long as one of its
/// queues, unless it is persistent.
pub fn open(name: &str, flags: c_int) -> io::Result<(OwnedFd, String)> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok((file.into(), name_of(&request)))
}

/// The name of the device that `queue` belongs to, and the flags that it was opened with, among
/// others. EBADFD or ENOTTY if it is no queue.
pub fn identify(queue: BorrowedFd<'_>) -> io::Result<(String, c_int)> {
    let mut request = request_for("")?;
    // SAFETY: TUNGETIFF writes one `ifreq`, which `request` is and outlives the call.
    check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    // SAFETY: TUNGETIFF has set the flags, and any bits are a valid `c_short`.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok((name_of(&request), c_int::from(flags.cast_unsigned())))
}

fn name_of(request: &libc::ifreq) -> String {
    let bytes = request.ifr_name.iter().map(|&byte| byte as u8);
    String::from_utf8_lossy(&bytes.take_while(|&byte| byte != 0).collect::<Vec<_>>()).into_owned()
}

/// Marks a queue, for as long as it is open anywhere: by the signal that it would send if it were
/// asked to send any (fcntl(2)), the only number that an open file carries for its users.
pub fn set_mark(queue: BorrowedFd<'_>, number: u16) -> io::Result<()> {
    // SAFETY: F_SETSIG takes its argument by value.
    check(unsafe { libc::fcntl(queue.as_raw_fd(), F_SETSIG, c_int::from(number)) }).map(drop)
}

/// The mark of a queue; 0 if it has none.
pub fn mark(queue: BorrowedFd<'_>) -> c_int {
    // SAFETY: F_GETSIG takes no argument.
    unsafe { libc::fcntl(queue.as_raw_fd(), F_GETSIG) }
}

/// Tells the device which super-packets its reader takes. EINVAL for a bit that it doesn't know.
pub fn set_offload(tun: BorrowedFd<'_>, features: c_uint) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value and touches no memory of ours.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETOFFLOAD, c_ulong::from(features)) })
        .map(drop)
}

/// Has the device outlive its queues, or not.
pub fn set_persistent(tun: BorrowedFd<'_>, is_persistent: bool) -> io::Result<()> {
    // SAFETY: TUNSETPERSIST takes its argument by value and touches no memory of ours.
    check(unsafe {
        libc::ioctl(tun.as_raw_fd(), libc::TUNSETPERSIST, c_ulong::from(is_persistent))
    })
    .map(drop)
}

/// Makes the virtio-net header `bytes` long and little-endian.
pub fn set_vnet_header(tun: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    let little_endian: c_int = 1;
    // SAFETY: TUNSETVNETHDRSZ reads one int, which outlives the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) })?;
    // SAFETY: TUNSETVNETLE reads one int, which outlives the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETLE, &raw const little_endian) })
        .map(drop)
}
