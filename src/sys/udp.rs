//! Batched datagram I/O with segmentation control messages: sendmmsg, recvmmsg, UDP_SEGMENT,
//! UDP_GRO (net/ipv4/udp.c, include/uapi/linux/udp.h).

use std::ffi::{c_int, c_uint};
use std::io;
use std::mem::zeroed;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::packet::Span;

use super::{Slots, check, iovec};

/// include/uapi/asm-generic/socket.h, the same number on all architectures that Rust knows but two.
const SO_MEMINFO: c_int = 55;

/// Room for the control messages of one datagram, each a header and a value with its padding:
/// SO_RXQ_OVFL (u32), a segment size (int) and the type of service (u8) or traffic class (int).
pub(super) const CONTROL_BYTES: usize = 3 * (size_of::<libc::cmsghdr>() + size_of::<u64>());

#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Control(pub(super) [u8; CONTROL_BYTES]);

/// The control message of a GSO batch, with its padding.
#[repr(C)]
struct SegmentControl {
    header: libc::cmsghdr,
    segment_bytes: u16,
    padding: [u8; 6],
}

/// Whether the socket takes UDP_SEGMENT, asked without changing it.
pub fn supports_segment(socket: BorrowedFd<'_>) -> bool {
    get::<1>(socket, libc::SOL_UDP, libc::UDP_SEGMENT).is_ok()
}

/// Switches UDP_GRO on or off and reads it back; kernels before 5.12 can't answer and are refused.
pub fn set_gro(socket: BorrowedFd<'_>, is_on: bool) -> io::Result<()> {
    set_int(socket, libc::SOL_UDP, libc::UDP_GRO, is_on.into())?;
    match get(socket, libc::SOL_UDP, libc::UDP_GRO)? {
        [now] if now == i32::from(is_on) => Ok(()),
        [_] => Err(io::Error::from_raw_os_error(libc::ENOPROTOOPT)),
    }
}

/// Whether UDP_GRO is on; kernels before 5.12 can't answer.
pub fn has_gro(socket: BorrowedFd<'_>) -> io::Result<bool> {
    get::<1>(socket, libc::SOL_UDP, libc::UDP_GRO).map(|now| now != [0])
}

/// Has the kernel report with each datagram how many it dropped for lack of buffer so far.
pub fn enable_overflow_count(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)
}

/// Whether the kernel and the routers may fragment the datagrams of a socket that is bound to
/// `address` (IP_PMTUDISC_OMIT), or all go with Don't Fragment, and one that is longer than the
/// interface takes is refused with EMSGSIZE (IP_PMTUDISC_PROBE). Both go by the MTU of the
/// interface and never by the path MTU that the kernel learns from ICMP (`ip_sk_use_pmtu`,
/// include/net/ip.h), which anybody can forge who knows the addresses: the default,
/// IP_PMTUDISC_WANT, and IP_PMTUDISC_DO believe it for ten minutes. Over IPv6 no router
/// fragments, so there the kernel has to believe those that say what a path takes
/// (IPV6_PMTUDISC_WANT), down to 1,280 bytes, which all do.
///
/// What can't be fragmented goes without an IPv4 identification (RFC 6864, section 4), which
/// costs two cache lines for each destination (`__ip_select_ident`, net/ipv4/route.c).
pub fn set_fragmenting(
    socket: BorrowedFd<'_>,
    address: SocketAddr,
    fragmenting: bool,
) -> io::Result<()> {
    let (level, name, modes) = match address {
        SocketAddr::V4(_) => (
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            [libc::IP_PMTUDISC_PROBE, libc::IP_PMTUDISC_OMIT],
        ),
        SocketAddr::V6(_) => (
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            [libc::IPV6_PMTUDISC_PROBE, libc::IPV6_PMTUDISC_WANT],
        ),
    };
    set_int(socket, level, name, modes[usize::from(fragmenting)])
}

/// Has the kernel tell with each datagram the type of service or traffic class of what carried it.
pub fn enable_type_of_service(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => set_int(socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
        SocketAddr::V6(_) => set_int(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
    }
}

pub(super) fn set_int(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    set(socket, level, name, [value])
}

/// Sets an option that is an int, or several.
pub(super) fn set<const N: usize>(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: [c_int; N],
) -> io::Result<()> {
    let (start, bytes) = ((&raw const value).cast(), size_of_val(&value) as libc::socklen_t);
    // SAFETY: the option value outlives the call, and `bytes` is its size.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, start, bytes) }).map(drop)
}

/// What the buffers of a socket hold, and their sizes: `SK_MEMINFO_*` in
/// include/uapi/linux/sock_diag.h.
pub fn memory(socket: BorrowedFd<'_>) -> io::Result<[u32; 9]> {
    get(socket, libc::SOL_SOCKET, SO_MEMINFO).map(|words| words.map(c_int::cast_unsigned))
}

/// An option that is an int, or several.
fn get<const N: usize>(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
) -> io::Result<[c_int; N]> {
    let mut value = [0; N];
    let mut bytes = size_of_val(&value) as libc::socklen_t;
    let start = (&raw mut value).cast();
    // SAFETY: the kernel writes at most `bytes` bytes, the size of `value`, which outlives the
    // call.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, start, &raw mut bytes) })?;
    Ok(value)
}

/// A `sockaddr_in` or `sockaddr_in6`, as bytes: family, port, then the address of IPv4, or flow
/// label, address and scope of IPv6 (include/uapi/linux/in.h, in6.h).
#[repr(C, align(4))]
#[derive(Clone, Copy)]
struct Address([u8; ADDRESS_BYTES]);

const ADDRESS_BYTES: usize = size_of::<libc::sockaddr_in6>();

impl Address {
    const NONE: Self = Self([0; ADDRESS_BYTES]);

    /// With the number of its bytes that count.
    fn of(address: SocketAddr) -> (Self, libc::socklen_t) {
        let Self(mut bytes) = Self::NONE;
        let (family, length) = match address {
            SocketAddr::V4(v4) => {
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                (libc::AF_INET, size_of::<libc::sockaddr_in>())
            }
            SocketAddr::V6(v6) => {
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                (libc::AF_INET6, ADDRESS_BYTES)
            }
        };
        bytes[..2].copy_from_slice(&(family as libc::sa_family_t).to_ne_bytes());
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        (Self(bytes), length as libc::socklen_t)
    }

    fn get(&self) -> SocketAddr {
        let Self(bytes) = self;
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        let family = libc::sa_family_t::from_ne_bytes([bytes[0], bytes[1]]);
        if i32::from(family) == libc::AF_INET6 {
            let octets: [u8; 16] = bytes[8..24].try_into().unwrap_or_default();
            (Ipv6Addr::from(octets), port).into()
        } else {
            (Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]), port).into()
        }
    }
}

/// One message to send: a datagram, or a GSO batch.
pub struct Datagrams<S> {
    /// Where to.
    pub destination: SocketAddr,
    /// Bytes of each datagram but the last, if there are several (UDP_SEGMENT).
    pub segment_bytes: Option<u16>,
    /// Where the bytes lie, in order.
    pub spans: S,
}

/// Scratch for sendmmsg: what the kernel is shown of the messages. Holds no pointer between calls
/// that anybody follows.
pub struct SendBatch {
    headers: Vec<libc::mmsghdr>,
    addresses: Vec<Address>,
    controls: Vec<SegmentControl>,
    iovecs: Vec<libc::iovec>,
}

impl SendBatch {
    /// Scratch for at most `messages` messages of `spans` spans in all.
    pub fn new(messages: usize, spans: usize) -> Self {
        Self {
            headers: Vec::with_capacity(messages),
            addresses: Vec::with_capacity(messages),
            controls: Vec::with_capacity(messages),
            iovecs: Vec::with_capacity(spans),
        }
    }

    /// Sends `messages`, which lie in `arena`, without waiting; returns how many went. The error
    /// is that of the first one. Spans outside `arena` panic, as an index would.
    pub fn send<S: AsRef<[Span]>>(
        &mut self,
        socket: BorrowedFd<'_>,
        arena: &[u8],
        messages: impl Iterator<Item = Datagrams<S>>,
    ) -> io::Result<usize> {
        self.headers.clear();
        self.addresses.clear();
        self.controls.clear();
        self.iovecs.clear();
        for Datagrams { destination, segment_bytes, spans } in messages {
            // SAFETY: `mmsghdr` is plain old data for which all zeroes is a valid value.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            let (address, address_bytes) = Address::of(destination);
            header.msg_hdr.msg_namelen = address_bytes;
            header.msg_hdr.msg_iovlen = spans.as_ref().len();
            // Without a length, the kernel looks at no control message.
            let control_bytes = size_of::<SegmentControl>();
            header.msg_hdr.msg_controllen = segment_bytes.map_or(0, |_| control_bytes);
            self.headers.push(header);
            self.addresses.push(address);
            self.controls.push(segment_control(segment_bytes.unwrap_or(0)));
            self.iovecs.extend(spans.as_ref().iter().map(|span| iovec(&arena[span.range()])));
        }
        // All that the headers point to is complete: no growth moves it any more.
        let mut iovecs = self.iovecs.as_mut_ptr();
        let pointed_to = self.addresses.iter_mut().zip(&mut self.controls);
        for (header, (address, control)) in self.headers.iter_mut().zip(pointed_to) {
            header.msg_hdr.msg_name = (&raw mut *address).cast();
            header.msg_hdr.msg_control = (&raw mut *control).cast();
            header.msg_hdr.msg_iov = iovecs;
            // SAFETY: the headers count as many iovecs as there are.
            iovecs = unsafe { iovecs.add(header.msg_hdr.msg_iovlen) };
        }
        let (headers, count) = (self.headers.as_mut_ptr(), self.headers.len() as c_uint);
        // SAFETY: the headers point at addresses, control messages and iovecs in vectors of
        // `self`, and the iovecs at parts of `arena`; all are borrowed for the call, and sendmmsg
        // only reads through them.
        check(unsafe { libc::sendmmsg(socket.as_raw_fd(), headers, count, libc::MSG_DONTWAIT) })
    }
}

fn segment_control(segment_bytes: u16) -> SegmentControl {
    let header = libc::cmsghdr {
        cmsg_len: size_of::<libc::cmsghdr>() + size_of::<u16>(),
        cmsg_level: libc::SOL_UDP,
        cmsg_type: libc::UDP_SEGMENT,
    };
    SegmentControl { header, segment_bytes, padding: [0; 6] }
}

/// What one receive brought.
#[derive(Debug, Clone, Copy)]
pub struct Received {
    /// Bytes in the slot.
    pub bytes: usize,
    /// Size of each datagram in the slot but the last, when it holds more than one.
    pub segment_bytes: Option<u16>,
    /// The sender.
    pub source: SocketAddr,
    /// Datagrams that the socket has dropped since it was opened, if the kernel said.
    pub overflows: Option<u32>,
    /// The type of service or traffic class, DSCP and ECN, of what carried it; 0 unless the kernel
    /// said.
    pub type_of_service: u8,
}

/// Scratch for recvmmsg: one slot of a buffer per message.
pub struct ReceiveBatch {
    headers: Vec<libc::mmsghdr>,
    addresses: Vec<Address>,
    controls: Vec<Control>,
    iovecs: Vec<libc::iovec>,
}

impl ReceiveBatch {
    /// Scratch for at most `messages` messages a call.
    pub fn new(messages: usize) -> Self {
        // SAFETY: both are plain old data for which all zeroes is a valid value.
        let (header, iovec) = unsafe { (zeroed(), zeroed::<libc::iovec>()) };
        Self {
            headers: vec![header; messages],
            addresses: vec![Address::NONE; messages],
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
        slots: Range<usize>,
    ) -> io::Result<usize> {
        self.fill(arena, layout, slots.clone());
        let headers = &mut self.headers[slots];
        let (headers, count) = (headers.as_mut_ptr(), headers.len() as c_uint);
        let (flags, no_limit) = (libc::MSG_DONTWAIT, std::ptr::null_mut());
        // SAFETY: `fill` has just pointed these headers at vectors of `self` and at slots of
        // `arena` that don't overlap, all borrowed mutably for the call, each with its length.
        check(unsafe { libc::recvmmsg(socket.as_raw_fd(), headers, count, flags, no_limit) })
    }

    /// The header of `slot`, as the last [`Self::fill`] left it.
    pub(super) fn header(&mut self, slot: usize) -> &mut libc::mmsghdr {
        &mut self.headers[slot]
    }

    /// Fills the headers of `slots`.
    pub(super) fn fill(&mut self, arena: &mut [u8], layout: Slots, slots: Range<usize>) {
        assert!(slots.end <= self.headers.len() && layout.hold(arena, slots.end));
        let places = arena.chunks_mut(layout.stride).skip(slots.start);
        let scratch = self.iovecs[slots.clone()].iter_mut().zip(&mut self.addresses[slots.clone()]);
        let scratch = scratch.zip(&mut self.controls[slots.clone()]).zip(places);
        for (header, (((iovec, address), control), bytes)) in
            self.headers[slots].iter_mut().zip(scratch)
        {
            let iov_base = bytes.as_mut_ptr().cast();
            *iovec = libc::iovec { iov_base, iov_len: layout.slot_bytes };
            let header = &mut header.msg_hdr;
            header.msg_name = (&raw mut *address).cast();
            header.msg_namelen = ADDRESS_BYTES as libc::socklen_t;
            header.msg_iov = &raw mut *iovec;
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut *control).cast();
            header.msg_controllen = CONTROL_BYTES;
            header.msg_flags = 0;
        }
    }

    /// What the last receive brought into `slot`, which must be one that it filled.
    pub fn received(&self, slot: usize) -> Received {
        let header = &self.headers[slot];
        let mut received = Received {
            bytes: header.msg_len as usize,
            segment_bytes: None,
            source: self.addresses[slot].get(),
            overflows: None,
            type_of_service: 0,
        };
        let controls = &self.controls[slot].0[..header.msg_hdr.msg_controllen.min(CONTROL_BYTES)];
        for_each_control(controls, |level, kind, data| match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                received.segment_bytes = data
                    .first_chunk()
                    .map(|bytes| c_int::from_ne_bytes(*bytes))
                    .and_then(|bytes| u16::try_from(bytes).ok())
                    .filter(|&bytes| bytes > 0);
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                received.overflows = data.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                received.type_of_service = data.first().copied().unwrap_or(0);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                let class = data.first_chunk().map(|bytes| c_int::from_ne_bytes(*bytes));
                received.type_of_service = class.unwrap_or(0) as u8;
            }
            _ => {}
        });
        received
    }
}

/// Walks control messages: `cmsghdr`, data, padding to the next multiple of its alignment.
pub(super) fn for_each_control(mut bytes: &[u8], mut each: impl FnMut(c_int, c_int, &[u8])) {
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
