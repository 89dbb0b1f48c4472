//! The tunnel's UDP socket: bound to the interface address and port, with its segmentation
//! features probed and its buffers sized.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use socket2::{Domain, Protocol, Socket, Type};

use crate::offload::SendLimits;
use crate::sys::{Range, udp as sys};

/// Receive buffer: some 20 full trains by the kernel's accounting, a few milliseconds at 10 Gb/s;
/// larger buffers only move the queue out of the cache.
const RECEIVE_BUFFER_BYTES: i32 = 4 << 20;

/// Send buffer: what one batch holds, several times over.
const SEND_BUFFER_BYTES: i32 = 4 << 20;

/// Train lengths to try, longest first: UDP_MAX_SEGMENTS is 128 since kernel 6.9, 64 before.
const SEGMENT_CANDIDATES: [u16; 2] = [128, 64];

/// The socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The address or port is not to be had.
    #[error(
        "cannot bind the tunnel socket to {address}: is another flanneld or weftd running there, \
         or has the address moved?"
    )]
    Bind {
        /// Interface address and port.
        address: SocketAddrV4,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The tunnel's socket, non-blocking.
#[derive(Debug)]
pub struct TunnelSocket {
    socket: UdpSocket,
    address: SocketAddrV4,
    limits: SendLimits,
    gro: bool,
}

impl TunnelSocket {
    /// Binds to `address` and switches on what the kernel has of `gso` (trains out) and `gro`
    /// (trains in).
    pub fn bind(address: SocketAddrV4, gso: bool, gro: bool) -> Result<Self, SocketError> {
        let socket = open(address).map_err(|source| SocketError::Bind { address, source })?;
        // Without CAP_NET_ADMIN the sysctl limits apply, which costs bursts, not correctness.
        if sys::force_buffers(socket.as_fd(), RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES).is_err() {
            let plain = socket2::SockRef::from(&socket);
            plain.set_recv_buffer_size(RECEIVE_BUFFER_BYTES as usize).ok();
            plain.set_send_buffer_size(SEND_BUFFER_BYTES as usize).ok();
        }
        // Only a counter is lost on a kernel without it.
        sys::enable_overflow_count(socket.as_fd()).ok();
        let limits = match gso && sys::supports_segment(socket.as_fd()) {
            true => SendLimits { segments_max: probe_segments_max() },
            false => SendLimits::SINGLE,
        };
        let gro = gro && sys::enable_gro(socket.as_fd()).is_ok();
        Ok(Self { socket, address, limits, gro })
    }

    /// Interface address and port.
    #[must_use]
    pub fn address(&self) -> SocketAddrV4 {
        self.address
    }

    /// What one send may hold.
    #[must_use]
    pub fn limits(&self) -> SendLimits {
        self.limits
    }

    /// Whether receives bring trains.
    #[must_use]
    pub fn gro(&self) -> bool {
        self.gro
    }
}

impl AsFd for TunnelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn open(address: SocketAddrV4) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Sends ever shorter trains to ourselves until the kernel takes one. Where loopback is down the
/// older limit holds everywhere.
fn probe_segments_max() -> u16 {
    let fallback = SEGMENT_CANDIDATES[SEGMENT_CANDIDATES.len() - 1];
    let Ok(target) = open(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)) else { return fallback };
    let Ok(std::net::SocketAddr::V4(address)) = target.local_addr() else { return fallback };
    let arena = [0u8; SEGMENT_CANDIDATES[0] as usize];
    let mut batch = sys::SendBatch::new(1, 1);
    for candidate in SEGMENT_CANDIDATES {
        batch.clear();
        let range = Range { offset: 0, bytes: usize::from(candidate) };
        batch.push(address, Some(1), std::iter::once(range));
        if batch.send(target.as_fd(), &arena, 0).is_ok_and(|sent| sent == 1) {
            return candidate;
        }
    }
    fallback
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY_PORT: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);

    #[test]
    fn what_is_switched_off_stays_off_and_what_is_probed_is_plausible() {
        let off = TunnelSocket::bind(ANY_PORT, false, false).unwrap();
        assert_eq!((off.limits(), off.gro()), (SendLimits::SINGLE, false));
        let on = TunnelSocket::bind(ANY_PORT, true, true).unwrap();
        assert!(SEGMENT_CANDIDATES.contains(&on.limits().segments_max), "{:?}", on.limits());
        assert!(on.gro());
    }

    #[test]
    fn a_taken_port_is_an_error_that_names_it() {
        let first = UdpSocket::bind(ANY_PORT).unwrap();
        let std::net::SocketAddr::V4(taken) = first.local_addr().unwrap() else { unreachable!() };
        let error = TunnelSocket::bind(taken, true, true).unwrap_err();
        assert!(error.to_string().contains(&taken.to_string()), "{error}");
    }
}
