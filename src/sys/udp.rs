//! Batched datagram I/O with segmentation control messages: sendmmsg, recvmmsg, UDP_SEGMENT,
//! UDP_GRO (net/ipv4/udp.c, include/uapi/linux/udp.h).

use std::ffi::{c_int, c_uint};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::Range;

const UDP_SEGMENT: c_int = 103;
const UDP_GRO: c_int = 104;

/// Room for the control messages of one datagram: a segment size (int) and SO_RXQ_OVFL (u32).
const CONTROL_BYTES: usize = 64;

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_BYTES]);

/// Whether the socket takes UDP_SEGMENT, asked without changing it.
pub fn supports_segment(socket: BorrowedFd<'_>) -> bool {
    get_int(socket, libc::SOL_UDP, UDP_SEGMENT).is_ok()
}

/// Switches UDP_GRO on and reads it back; kernels before 5.12 can't answer and are refused.
pub fn enable_gro(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::SOL_UDP, UDP_GRO, 1)?;
    match get_int(socket, libc::SOL_UDP, UDP_GRO)? {
        1 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::ENOPROTOOPT)),
    }
}

/// Has the kernel report with each datagram how many it dropped for lack of buffer so far.
pub fn enable_overflow_count(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)
}

/// Sets buffer sizes beyond the sysctl limits (needs CAP_NET_ADMIN).
pub fn force_buffers(socket: BorrowedFd<'_>, receive: c_int, send: c_int) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, receive)?;
    set_int(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, send)
}

fn set_int(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let bytes = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the option value is one int that outlives the call, and `bytes` is its size.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), bytes)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn get_int(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut bytes = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, the size of `value`, which outlives the
    // call.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut bytes)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

fn socket_address(address: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
        sin_zero: [0; 8],
    }
}

/// Scratch for sendmmsg: headers, addresses, control messages and iovecs of one batch.
pub struct SendBatch {
    headers: Vec<libc::mmsghdr>,
    addresses: Vec<libc::sockaddr_in>,
    controls: Vec<Control>,
    iovecs: Vec<libc::iovec>,
    /// Where each message's iovecs start in `iovecs`.
    starts: Vec<usize>,
}

// SAFETY: the raw pointers inside are rewritten before each call from slices that the call itself
// borrows; between calls nobody follows them.
unsafe impl Send for SendBatch {}

impl SendBatch {
    /// Scratch for at most `messages` messages of `iovecs` ranges in all.
    #[must_use]
    pub fn new(messages: usize, iovecs: usize) -> Self {
        Self {
            headers: Vec::with_capacity(messages),
            addresses: Vec::with_capacity(messages),
            controls: Vec::with_capacity(messages),
            iovecs: Vec::with_capacity(iovecs),
            starts: Vec::with_capacity(messages + 1),
        }
    }

    /// Forgets the batch.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.addresses.clear();
        self.controls.clear();
        self.iovecs.clear();
        self.starts.clear();
    }

    /// Adds a message: the ranges of `arena`, cut into datagrams of `segment_bytes` if given.
    /// Out-of-bounds ranges panic, as an index would.
    pub fn push(
        &mut self,
        arena: &[u8],
        destination: SocketAddrV4,
        segment_bytes: Option<u16>,
        ranges: impl Iterator<Item = Range>,
    ) {
        self.starts.push(self.iovecs.len());
        for range in ranges {
            let bytes = &arena[range.offset..range.offset + range.bytes];
            self.iovecs.push(libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            });
        }
        self.addresses.push(socket_address(destination));
        let mut control = Control([0; CONTROL_BYTES]);
        if let Some(segment_bytes) = segment_bytes {
            write_segment_control(&mut control, segment_bytes);
        }
        self.controls.push(control);
        // SAFETY: `mmsghdr` is plain old data for which all zeroes is a valid value.
        let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
        header.msg_hdr.msg_controllen = match segment_bytes {
            Some(_) => control_space::<u16>(),
            None => 0,
        };
        self.headers.push(header);
    }

    /// Messages in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.headers.len()
    }

    /// Whether the batch holds no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// Sends the messages from `first` on, without waiting; returns how many went. The error is
    /// that of the first one. `arena` is the one that the batch was built from.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        arena: &[u8],
        first: usize,
    ) -> io::Result<usize> {
        debug_assert!(self.iovecs.iter().all(|iovec| {
            let start = iovec.iov_base as usize;
            let arena = arena.as_ptr_range();
            start >= arena.start as usize && start + iovec.iov_len <= arena.end as usize
        }));
        for index in first..self.headers.len() {
            let start = self.starts[index];
            let end = self.starts.get(index + 1).copied().unwrap_or(self.iovecs.len());
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = (&raw mut self.addresses[index]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_iov = self.iovecs[start..end].as_mut_ptr();
            header.msg_iovlen = end - start;
            header.msg_control = match header.msg_controllen {
                0 => std::ptr::null_mut(),
                _ => (&raw mut self.controls[index]).cast(),
            };
        }
        let headers = &mut self.headers[first..];
        // SAFETY: the headers point into vectors of `self`, borrowed for the call, and their
        // iovecs at parts of `arena`, borrowed for the call too: `push` took them from its slice.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                headers.len() as c_uint,
                libc::MSG_DONTWAIT,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
    }
}

fn control_space<T>() -> usize {
    // SAFETY: CMSG_SPACE only computes.
    unsafe { libc::CMSG_SPACE(size_of::<T>() as c_uint) as usize }
}

fn write_segment_control(control: &mut Control, segment_bytes: u16) {
    const { assert!(CONTROL_BYTES >= size_of::<libc::cmsghdr>() + 8) };
    let header = libc::cmsghdr {
        // SAFETY: CMSG_LEN only computes.
        cmsg_len: unsafe { libc::CMSG_LEN(size_of::<u16>() as c_uint) as usize },
        cmsg_level: libc::SOL_UDP,
        cmsg_type: UDP_SEGMENT,
    };
    // SAFETY: `control` is aligned to 8 as cmsghdr needs and longer than it, as asserted.
    unsafe { control.0.as_mut_ptr().cast::<libc::cmsghdr>().write(header) };
    let data_at = size_of::<libc::cmsghdr>();
    control.0[data_at..data_at + 2].copy_from_slice(&segment_bytes.to_ne_bytes());
}

/// What one receive brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes in the slot.
    pub bytes: usize,
    /// Size of each datagram in the slot but the last, when it holds more than one.
    pub segment_bytes: Option<u16>,
    /// The sender.
    pub source: SocketAddrV4,
    /// Datagrams that the socket has dropped since it was opened, if the kernel said.
    pub overflows: Option<u32>,
    /// Whether the datagram was longer than its slot.
    pub truncated: bool,
}

/// Scratch for recvmmsg: one slot of a buffer per message.
pub struct ReceiveBatch {
    headers: Vec<libc::mmsghdr>,
    addresses: Vec<libc::sockaddr_in>,
    controls: Vec<Control>,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: as for `SendBatch`: pointers are rewritten before each call and followed by none between.
unsafe impl Send for ReceiveBatch {}

impl ReceiveBatch {
    /// Scratch for at most `messages` messages a call.
    #[must_use]
    pub fn new(messages: usize) -> Self {
        // SAFETY: all three are plain old data for which all zeroes is a valid value.
        let (header, address, iovec) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed::<libc::iovec>()) };
        Self {
            headers: vec![header; messages],
            addresses: vec![address; messages],
            controls: vec![Control([0; CONTROL_BYTES]); messages],
            iovecs: vec![iovec; messages],
        }
    }

    /// Receives, without waiting, up to one message per slot: message `i` into
    /// `arena[i * stride..][..slot_bytes]`. Returns how many came.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        arena: &mut [u8],
        slot_bytes: usize,
        stride: usize,
        messages_max: usize,
    ) -> io::Result<usize> {
        let count = messages_max.min(self.headers.len());
        for index in 0..count {
            let slot = &mut arena[index * stride..][..slot_bytes];
            self.iovecs[index] =
                libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = (&raw mut self.addresses[index]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_iov = &raw mut self.iovecs[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut self.controls[index]).cast();
            header.msg_controllen = CONTROL_BYTES;
            header.msg_flags = 0;
        }
        // SAFETY: the first `count` headers point into vectors of `self` and at disjoint-or-not
        // slots of `arena`, all borrowed mutably for the call, each with its true length.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count as c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        if received < 0 { Err(io::Error::last_os_error()) } else { Ok(received as usize) }
    }

    /// What the last call brought into slot `index`, which must be below what it returned.
    #[must_use]
    pub fn received(&self, index: usize) -> Received {
        let header = &self.headers[index];
        let address = &self.addresses[index];
        let mut received = Received {
            bytes: header.msg_len as usize,
            segment_bytes: None,
            source: SocketAddrV4::new(
                Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes()),
                u16::from_be(address.sin_port),
            ),
            overflows: None,
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        };
        let controls = &self.controls[index].0[..header.msg_hdr.msg_controllen.min(CONTROL_BYTES)];
        for_each_control(controls, |level, kind, data| match (level, kind) {
            (libc::SOL_UDP, UDP_GRO) => {
                received.segment_bytes = data
                    .first_chunk()
                    .map(|bytes| c_int::from_ne_bytes(*bytes))
                    .and_then(|bytes| u16::try_from(bytes).ok())
                    .filter(|&bytes| bytes > 0);
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                received.overflows = data.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
            }
            _ => {}
        });
        received
    }
}

/// Walks control messages: `cmsghdr`, data, padding to the next multiple of its alignment.
fn for_each_control(mut bytes: &[u8], mut each: impl FnMut(c_int, c_int, &[u8])) {
    const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
    const ALIGNMENT: usize = size_of::<usize>();
    while let Some((length, rest)) = bytes.split_first_chunk::<{ size_of::<usize>() }>() {
        let length = usize::from_ne_bytes(*length);
        if length < HEADER_BYTES || length > bytes.len() {
            return;
        }
        let word =
            |at: usize| c_int::from_ne_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
        each(word(0), word(4), &bytes[HEADER_BYTES..length]);
        let next = length.next_multiple_of(ALIGNMENT);
        bytes = bytes.get(next..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests;
