//! Which socket of a group that shares a port a datagram goes to (SO_REUSEPORT,
//! net/core/sock_reuseport.c).

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::{SockFilter, SockRef};

use super::check;

/// Where the network header begins for a filter (include/uapi/linux/filter.h).
const NETWORK_HEADER: u32 = libc::SKF_NET_OFF.cast_unsigned();

/// Where in a packet of IPv4, and of IPv6, the last four bytes of the sender's address lie, and its
/// port if no options or extension headers come before it.
const SENDER_AT: [(u32, u32); 2] = [(12, 20), (20, 40)];

/// Has the group of `socket` receive by the sum of the sender's address and port, modulo `sockets`:
/// neighbouring addresses and neighbouring ports go to different ones, which a hash does not
/// promise. The ports are looked for behind a header without options; with some, the datagrams of
/// one sender still share a socket, for as long as they carry the same.
pub fn share_by_sender(socket: BorrowedFd<'_>, is_ipv6: bool, sockets: u16) -> io::Result<()> {
    let (address_at, port_at) = SENDER_AT[usize::from(is_ipv6)];
    let filter = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut program = [
        filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, NETWORK_HEADER + address_at),
        filter(libc::BPF_MISC | libc::BPF_TAX, 0),
        filter(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, NETWORK_HEADER + port_at),
        filter(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X, 0),
        filter(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, sockets.max(1).into()),
        filter(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let bytes = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the option value is one `sock_fprog` of `bytes` bytes, which points to as many
    // instructions as it says; both outlive the call, which copies them and writes nothing.
    check(unsafe {
        let value = (&raw const program).cast::<c_void>();
        let option = libc::SO_ATTACH_REUSEPORT_CBPF;
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, bytes)
    })
    .map(drop)
}

/// Has `socket` receive nothing: one that only sends.
pub fn receive_nothing(socket: BorrowedFd<'_>) -> io::Result<()> {
    let nothing = SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0);
    SockRef::from(&socket).attach_filter(&[nothing])
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_socket_that_only_sends_receives_nothing() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        socket.send_to(b"before", address).unwrap();
        receive_nothing(socket.as_fd()).unwrap();
        socket.send_to(b"after", address).unwrap();
        let mut bytes = [0; 16];
        assert_eq!(socket.recv(&mut bytes).unwrap(), 6);
        assert!(socket.recv(&mut bytes).is_err());
    }
}
