//! A raw socket for ICMP: what it is let in.

use std::io;
use std::os::fd::BorrowedFd;

use super::udp::set_int;

/// The option that holds back types of ICMP (include/uapi/linux/icmp.h).
const ICMP_FILTER: libc::c_int = 1;

/// Has the kernel hand over echo replies, type 0, and nothing else.
pub fn only_echo_replies(socket: BorrowedFd<'_>) -> io::Result<()> {
    const ECHO_REPLY: libc::c_int = 1 << 0;
    set_int(socket, libc::SOL_RAW, ICMP_FILTER, !ECHO_REPLY)
}
