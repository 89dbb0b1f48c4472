//! Batched datagram I/O with segmentation control messages: sendmmsg, recvmmsg, UDP_SEGMENT,
//! UDP_GRO (net/ipv4/udp.c, include/uapi/linux/udp.h).

use std::ffi::{c_int, c_uint};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Range, Slots};

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

/// Whether the kernel and the routers may fragment datagrams (IP_PMTUDISC_OMIT), or all go with
/// Don't Fragment, and one that is longer than the interface takes is refused with EMSGSIZE
/// (IP_PMTUDISC_PROBE). Both go by the MTU of the interface and never by the path MTU that the
/// kernel learns from ICMP (`ip_sk_use_pmtu`, include/net/ip.h), which anybody can forge who knows
/// the addresses: the default, IP_PMTUDISC_WANT, and IP_PMTUDISC_DO believe it for ten minutes.
/// What can't be fragmented goes without an IPv4 identification (RFC 6864, section 4), which
/// costs two cache lines for each destination (`__ip_select_ident`, net/ipv4/route.c).
pub fn set_fragmenting(socket: BorrowedFd<'_>, fragmenting: bool) -> io::Result<()> {
    let mode = if fragmenting { libc::IP_PMTUDISC_OMIT } else { libc::IP_PMTUDISC_PROBE };
    set_int(socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, mode)
}

/// Sets buffer sizes beyond the sysctl limits (needs CAP_NET_ADMIN).
pub fn force_buffers(socket: BorrowedFd<'_>, receive: c_int, send: c_int) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, receive)?;
    set_int(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, send)
}

pub(super) fn set_int(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
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

/// Scratch for sendmmsg: the messages of one batch as ranges of an arena, and room for what the
/// kernel is shown of them. Holds no pointer between calls that anybody follows.
pub struct SendBatch {
    messages: Vec<Message>,
    ranges: Vec<Range>,
    headers: Vec<libc::mmsghdr>,
    controls: Vec<Control>,
    iovecs: Vec<libc::iovec>,
}

struct Message {
    address: libc::sockaddr_in,
    segment_bytes: Option<u16>,
    first_range: usize,
}

impl SendBatch {
    /// Scratch for at most `messages` messages of `ranges` ranges in all.
    #[must_use]
    pub fn new(messages: usize, ranges: usize) -> Self {
        Self {
            messages: Vec::with_capacity(messages),
            ranges: Vec::with_capacity(ranges),
            headers: Vec::with_capacity(messages),
            controls: Vec::with_capacity(messages),
            iovecs: Vec::with_capacity(ranges),
        }
    }

    /// Forgets the batch.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.ranges.clear();
    }

    /// Adds a message: the `ranges` of the arena that [`Self::send`] will get, cut into datagrams
    /// of `segment_bytes` if given.
    pub fn push(
        &mut self,
        destination: SocketAddrV4,
        segment_bytes: Option<u16>,
        ranges: impl Iterator<Item = Range>,
    ) {
        let address = socket_address(destination);
        let first_range = self.ranges.len();
        self.messages.push(Message { address, segment_bytes, first_range });
        self.ranges.extend(ranges);
    }

    /// Bytes of message `index`; 0 if there is none.
    #[must_use]
    pub fn bytes(&self, index: usize) -> u64 {
        let Some(message) = self.messages.get(index) else { return 0 };
        let next = self.messages.get(index + 1);
        let end = next.map_or(self.ranges.len(), |next| next.first_range);
        self.ranges[message.first_range..end].iter().map(|range| range.bytes as u64).sum()
    }

    /// Messages in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether the batch holds no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Sends the messages from `first` on, without waiting; returns how many went. The error is
    /// that of the first one. Ranges outside `arena` panic, as an index would.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        arena: &[u8],
        first: usize,
    ) -> io::Result<usize> {
        self.show(arena, first);
        // SAFETY: `show` has just pointed the headers at addresses, control messages and iovecs
        // in vectors of `self`, and the iovecs at parts of `arena`; all are borrowed for the call,
        // and sendmmsg only reads through them.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len() as c_uint,
                libc::MSG_DONTWAIT,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
    }

    /// Fills `headers` for the messages from `first` on. Iovecs and control messages are complete
    /// before the first pointer to them is taken, so that no growth moves them.
    fn show(&mut self, arena: &[u8], first: usize) {
        let messages = self.messages.get(first..).unwrap_or_default();
        let ranges_from = messages.first().map_or(self.ranges.len(), |m| m.first_range);
        self.iovecs.clear();
        self.iovecs.extend(self.ranges[ranges_from..].iter().map(|range| {
            let bytes = &arena[range.offset..range.offset + range.bytes];
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
        }));
        self.controls.clear();
        self.controls.extend(messages.iter().map(|message| segment_control(message.segment_bytes)));
        self.headers.clear();
        // One pointer each, taken once: every further borrow of the vectors would end its validity.
        let (iovecs, controls) = (self.iovecs.as_mut_ptr(), self.controls.as_mut_ptr());
        let iovecs_len = self.iovecs.len();
        for (index, message) in messages.iter().enumerate() {
            let start = message.first_range - ranges_from;
            let next = messages.get(index + 1);
            let end = next.map_or(iovecs_len, |m| m.first_range - ranges_from);
            // SAFETY: `mmsghdr` is plain old data for which all zeroes is a valid value.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_name = (&raw const message.address).cast_mut().cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            // SAFETY: `start` is at most the number of iovecs, as ranges only grow.
            header.msg_hdr.msg_iov = unsafe { iovecs.add(start) };
            header.msg_hdr.msg_iovlen = end - start;
            if message.segment_bytes.is_some() {
                // SAFETY: there are as many control messages as messages.
                header.msg_hdr.msg_control = unsafe { controls.add(index) }.cast();
                header.msg_hdr.msg_controllen = control_space::<u16>();
            }
            self.headers.push(header);
        }
    }
}

fn control_space<T>() -> usize {
    // SAFETY: CMSG_SPACE only computes.
    unsafe { libc::CMSG_SPACE(size_of::<T>() as c_uint) as usize }
}

/// A UDP_SEGMENT message, or nothing.
fn segment_control(segment_bytes: Option<u16>) -> Control {
    const { assert!(CONTROL_BYTES >= size_of::<libc::cmsghdr>() + 8) };
    let mut control = Control([0; CONTROL_BYTES]);
    let Some(segment_bytes) = segment_bytes else { return control };
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
    control
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

    /// Receives, without waiting, up to one message per slot of `slots`: that of slot `i` into
    /// `arena[i * stride..][..slot_bytes]`. Returns how many came, into the first of them.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        arena: &mut [u8],
        layout: Slots,
        slots: std::ops::Range<usize>,
    ) -> io::Result<usize> {
        self.show(arena, layout, slots.clone());
        let headers = &mut self.headers[slots];
        // SAFETY: `show` has just pointed these headers at vectors of `self` and at slots of
        // `arena` that don't overlap, all borrowed mutably for the call, each with its length.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                headers.len() as c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        if received < 0 { Err(io::Error::last_os_error()) } else { Ok(received as usize) }
    }

    /// The header of `slot`, as the last [`Self::show`] filled it.
    pub(super) fn header(&mut self, slot: usize) -> &mut libc::mmsghdr {
        &mut self.headers[slot]
    }

    /// Fills the headers of `slots`.
    pub(super) fn show(&mut self, arena: &mut [u8], layout: Slots, slots: std::ops::Range<usize>) {
        assert!(slots.end <= self.headers.len() && layout.hold(arena, slots.end));
        // One pointer each, taken once: every further borrow of the vectors would end its validity.
        let start = arena.as_mut_ptr();
        let (iovecs, addresses) = (self.iovecs.as_mut_ptr(), self.addresses.as_mut_ptr());
        let controls = self.controls.as_mut_ptr();
        for slot in slots {
            // SAFETY: the slot lies within the arena, and its number below the length of the
            // headers, which all the vectors share.
            let (bytes, iovec, address, control) = unsafe {
                let bytes = start.add(slot * layout.stride);
                (bytes, iovecs.add(slot), addresses.add(slot), controls.add(slot))
            };
            // SAFETY: a valid element of our own vector, as above.
            unsafe {
                *iovec = libc::iovec { iov_base: bytes.cast(), iov_len: layout.slot_bytes };
            }
            let header = &mut self.headers[slot].msg_hdr;
            header.msg_name = address.cast();
            header.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_iov = iovec;
            header.msg_iovlen = 1;
            header.msg_control = control.cast();
            header.msg_controllen = CONTROL_BYTES;
            header.msg_flags = 0;
        }
    }

    /// What the last receive brought into `slot`, which must be one that it filled.
    #[must_use]
    pub fn received(&self, slot: usize) -> Received {
        let header = &self.headers[slot];
        let address = &self.addresses[slot];
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
        let controls = &self.controls[slot].0[..header.msg_hdr.msg_controllen.min(CONTROL_BYTES)];
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
