//! Packets of a link, below IP (packet(7)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::udp::set_int;

/// Of an Ethernet address.
const MAC_BYTES: usize = 6;

/// Keeps from a socket of the family AF_PACKET what leaves this host (Linux 4.20).
pub fn ignore_outgoing(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)
}

/// Sends a packet of this EtherType to the hardware address `to` on the link numbered `index`, by
/// a socket of the family AF_PACKET that leaves headers to the kernel.
pub fn send_to_link(
    socket: BorrowedFd<'_>,
    index: u32,
    ethertype: u16,
    to: [u8; MAC_BYTES],
    packet: &[u8],
) -> io::Result<()> {
    let mut sll_addr = [0; 8];
    sll_addr[..MAC_BYTES].copy_from_slice(&to);
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: MAC_BYTES as u8,
        sll_addr,
    };
    let address_bytes = size_of_val(&address) as libc::socklen_t;
    // SAFETY: both pointers are to values that outlive the call, and go with their lengths.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            0,
            (&raw const address).cast(),
            address_bytes,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
