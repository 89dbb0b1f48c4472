//! A raw socket for ICMP: what it is let in, and by which interface and when that came.

use std::io;
use std::mem::zeroed;
use std::net::Ipv6Addr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use super::udp::{CONTROL_BYTES, Control, for_each_control, set, set_int};

/// The option that holds back types of ICMP (include/uapi/linux/icmp.h).
const ICMP_FILTER: libc::c_int = 1;

/// The same of ICMPv6 (include/uapi/linux/icmpv6.h).
const ICMPV6_FILTER: libc::c_int = 1;

// A header and `in6_pktinfo`; another one and a `timespec`.
const _: () = assert!(CONTROL_BYTES >= 2 * size_of::<libc::cmsghdr>() + 5 * size_of::<u64>());

/// A message that was received.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// Its length.
    pub bytes: usize,
    /// The index of the interface by which it came, or 0.
    pub interface: u32,
    /// Who sent it, by IPv6: without a header it would not be known.
    pub source: Option<Ipv6Addr>,
    /// When it came, if the kernel said so: since 1970, by a clock that may be set.
    pub at: Option<Duration>,
}

/// Has the kernel hand over these types of messages, of IPv4 below 32, and nothing else.
pub fn only_types(socket: BorrowedFd<'_>, types: &[u8], is_ipv6: bool) -> io::Result<()> {
    if is_ipv6 {
        let mut held_back: [libc::c_int; 8] = [!0; 8];
        types.iter().for_each(|kind| held_back[usize::from(kind / 32)] &= !(1 << (kind % 32)));
        return set(socket, libc::IPPROTO_ICMPV6, ICMPV6_FILTER, held_back);
    }
    let wanted: libc::c_int = types.iter().map(|kind| 1 << kind).sum();
    set_int(socket, libc::SOL_RAW, ICMP_FILTER, !wanted)
}

/// Has the kernel say by which interface a message came, and when.
pub fn tell_arrival(socket: BorrowedFd<'_>, is_ipv6: bool) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    match is_ipv6 {
        true => set_int(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1),
        false => set_int(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1),
    }
}

/// Has the kernel refuse what is longer than the interface takes, whatever it knows of the path:
/// `IPV6_PMTUDISC_PROBE`, as `set_fragmenting` for IPv4.
pub fn never_fragment_ipv6(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
    set_int(socket, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1)
}

/// Receives a message.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Message> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `msghdr` is plain old data for which all zeroes is a valid value, as is
    // `sockaddr_in6`.
    let (mut message, mut from): (libc::msghdr, libc::sockaddr_in6) = unsafe { zeroed() };
    // Of IPv4 it is shorter.
    let from_bytes = size_of_val(&from) as libc::socklen_t;
    (message.msg_name, message.msg_namelen) = ((&raw mut from).cast(), from_bytes);
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL_BYTES);
    // SAFETY: the header, the address, the one part and the control buffer outlive the call,
    // nothing else refers to them meanwhile, and their lengths are those of `from`, `buffer` and
    // `control`.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    let bytes = usize::try_from(received).map_err(|_negative| io::Error::last_os_error())?;
    let (mut interface, mut at) = (0, None);
    let told = control.0.get(..message.msg_controllen).unwrap_or_default();
    for_each_control(told, |level, kind, data| match (level, kind) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            interface = data.first_chunk().map_or(0, |index| u32::from_ne_bytes(*index));
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            // Behind the address that it was for.
            let index = data.get(16..).and_then(<[u8]>::first_chunk);
            interface = index.map_or(0, |index| u32::from_ne_bytes(*index));
        }
        (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => {
            let word = |at: usize| Some(u64::from_ne_bytes(*data.get(at..)?.first_chunk()?));
            at = word(0).zip(word(8)).map(|(seconds, ns)| Duration::new(seconds, ns as u32));
        }
        _ => {}
    });
    let is_ipv6 = libc::c_int::from(from.sin6_family) == libc::AF_INET6;
    let source = is_ipv6.then(|| Ipv6Addr::from(from.sin6_addr.s6_addr));
    Ok(Message { bytes, interface, source, at })
}
