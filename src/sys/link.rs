//! Packets of a link, below IP (packet(7)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::udp::set_int;

/// Keeps from a socket of the family AF_PACKET what leaves this host (Linux 4.20).
pub fn ignore_outgoing(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)
}

/// Sends a packet of the EtherType `kind` to all on the Ethernet link numbered `index`, by a socket
/// of the family AF_PACKET that leaves headers to the kernel.
pub fn broadcast(socket: BorrowedFd<'_>, index: u32, kind: u16, packet: &[u8]) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: kind.to_be(),
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        // Of an Ethernet address.
        sll_halen: 6,
        sll_addr: [0xff; 8],
    };
    let (to, to_bytes) = ((&raw const address).cast(), size_of_val(&address) as libc::socklen_t);
    let start = packet.as_ptr().cast();
    // SAFETY: both pointers are to values that outlive the call, and go with their lengths.
    let sent = unsafe { libc::sendto(socket.as_raw_fd(), start, packet.len(), 0, to, to_bytes) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
