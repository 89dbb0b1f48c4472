//! A raw socket for ICMP: what it is let in.

use std::io;
use std::os::fd::BorrowedFd;

use super::udp::set_int;

/// The option that holds back types of ICMP (include/uapi/linux/icmp.h).
const ICMP_FILTER: libc::c_int = 1;

/// Has the kernel hand over these types of messages, below 32, and nothing else.
pub fn only_types(socket: BorrowedFd<'_>, types: &[u8]) -> io::Result<()> {
    let wanted: libc::c_int = types.iter().map(|kind| 1 << kind).sum();
    set_int(socket, libc::SOL_RAW, ICMP_FILTER, !wanted)
}
