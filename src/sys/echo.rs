//! A raw socket for ICMP: what it is let in, and by which interface that came.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::udp::{CONTROL_BYTES, Control, for_each_control, set_int};

/// The option that holds back types of ICMP (include/uapi/linux/icmp.h).
const ICMP_FILTER: libc::c_int = 1;

// A header and `in_pktinfo`.
const _: () = assert!(CONTROL_BYTES >= size_of::<libc::cmsghdr>() + 2 * size_of::<u64>());

/// Has the kernel hand over these types of messages, below 32, and nothing else.
pub fn only_types(socket: BorrowedFd<'_>, types: &[u8]) -> io::Result<()> {
    let wanted: libc::c_int = types.iter().map(|kind| 1 << kind).sum();
    set_int(socket, libc::SOL_RAW, ICMP_FILTER, !wanted)
}

/// Has the kernel say by which interface a message came.
pub fn tell_interface(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)
}

/// Receives a message: its length, and the index of the interface by which it came, or 0.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, u32)> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `msghdr` is plain old data for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL_BYTES);
    // SAFETY: the header, its one part and the control buffer outlive the call, nothing else refers
    // to them meanwhile, and their lengths are those of `buffer` and `control`.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    let received = usize::try_from(received).map_err(|_negative| io::Error::last_os_error())?;
    let mut interface = 0;
    let told = control.0.get(..message.msg_controllen).unwrap_or_default();
    for_each_control(told, |level, kind, data| {
        if (level, kind) == (libc::IPPROTO_IP, libc::IP_PKTINFO)
            && let Some(index) = data.first_chunk()
        {
            interface = u32::from_ne_bytes(*index);
        }
    });
    Ok((received, interface))
}
