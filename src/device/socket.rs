//! The tunnel's UDP socket: bound to the interface address and port, with its segmentation
//! features probed and its buffers sized.

use std::io;
use std::iter::once;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::packet::Span;
use crate::sys::reuseport::{self, receive_nothing};
use crate::sys::udp::{self as sys, Datagrams};

/// Receive buffer: some 20 full GRO batches by the kernel's accounting, a few milliseconds at
/// 10 Gb/s; larger buffers only move the queue out of the cache.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// Send buffer: what one batch holds, several times over.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// Datagrams that any kernel with UDP_SEGMENT takes in one batch (UDP_MAX_SEGMENTS before 6.9), and
/// those that one since 6.9 takes.
pub const SEGMENTS_MIN: u16 = 64;
const SEGMENTS_MAX: u16 = 128;

/// The socket could not be opened: the address or port is not to be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot bind the tunnel socket to {address}: {hint}")]
pub struct SocketError {
    /// Interface address and port.
    address: SocketAddr,
    hint: &'static str,
    source: io::Error,
}

impl SocketError {
    /// Whether somebody else has the address.
    pub fn is_address_in_use(&self) -> bool {
        self.source.kind() == io::ErrorKind::AddrInUse
    }
}

/// The tunnel's socket, non-blocking.
#[derive(Debug)]
pub struct TunnelSocket {
    socket: UdpSocket,
    /// At a port of its own, and only for sending.
    source: Option<UdpSocket>,
    /// Interface address and port.
    pub address: SocketAddr,
    /// Datagrams that one send may hold, 1 without GSO.
    pub segments_max: u16,
    /// Whether receives bring GRO batches, those aside that [`Self::note_drained`] tells of.
    pub gro: bool,
    /// Whether an earlier weftd has left GRO on, and it is to end.
    ends_gro: AtomicBool,
    /// Whether datagrams may be fragmented now.
    fragmenting: AtomicBool,
    /// Whether they may be, whatever [`Self::set_fragmenting`] says.
    always_fragmenting: AtomicBool,
    /// What the kernel said last of the datagrams that it dropped, or [`NOT_SEEN`].
    overflows_seen: AtomicU64,
}

/// Of a socket that an earlier weftd has opened: what that one has counted is not known, and the
/// kernel's number is of the socket's whole life. The first datagram tells what it was before.
const NOT_SEEN: u64 = u64::MAX;

impl TunnelSocket {
    /// Binds to `address` and switches on what the kernel has of `gso` (batches out) and `gro`
    /// (batches in).
    pub fn bind(address: SocketAddr, gso: bool, gro: bool) -> Result<Self, SocketError> {
        let hint = "is another flanneld or weftd running there (another network of this host \
                    needs another Backend.Port), or has the address moved?";
        let socket =
            open(address, false).map_err(|source| SocketError { address, hint, source })?;
        Ok(Self::prepare(socket, address, gso, gro))
    }

    /// As [`Self::bind`], `count` sockets on one address, among which the kernel shares out what
    /// arrives by the outer addresses and ports (SO_REUSEPORT).
    ///
    /// The first is bound before it agrees to share, so that an address which another daemon has
    /// is refused as it is to a single socket, even if that daemon shares too.
    pub fn bind_group(
        address: SocketAddr,
        gso: bool,
        gro: bool,
        count: NonZeroU16,
    ) -> Result<Vec<Self>, SocketError> {
        let mut group = vec![Self::bind(address, gso, gro)?];
        if count.get() == 1 {
            return Ok(group);
        }
        let hint = "the sockets of further workers can't share it; --workers=1 needs one only";
        let failed = |source| SocketError { address, hint, source };
        SockRef::from(&group[0].socket).set_reuse_port(true).map_err(failed)?;
        for _ in 1..count.get() {
            let socket = open(address, true).map_err(failed)?;
            group.push(Self::prepare(socket, address, gso, gro));
        }
        share_by_sender(&group);
        Ok(group)
    }

    /// Gives each socket of a group another one to send from, at one of these ports, as far as they
    /// go. The errors are those of sockets that get none.
    pub fn open_sources(group: &mut [Self], ports: impl Iterator<Item = u16>) -> Vec<SocketError> {
        let mut errors = Vec::new();
        for (port, member) in ports.zip(group) {
            let address = SocketAddr::new(member.address.ip(), port);
            // A weftd that is about to end may still have it.
            match open(address, true) {
                Ok(socket) => {
                    size_send_buffer(&socket);
                    // Nobody reads it.
                    receive_nothing(socket.as_fd()).ok();
                    sys::set_fragmenting(socket.as_fd(), address, member.is_fragmenting()).ok();
                    member.source = Some(socket);
                }
                Err(source) => {
                    let hint = "what this worker sends has the tunnel's port";
                    errors.push(SocketError { address, hint, source });
                }
            }
        }
        errors
    }

    /// Goes on with sockets that [`Self::bind_group`] has bound in another process.
    pub(super) fn inherit_group(
        sockets: Vec<OwnedFd>,
        address: SocketAddr,
        gso: bool,
        gro: bool,
    ) -> io::Result<Vec<Self>> {
        let inherit = |socket: OwnedFd| {
            let socket = UdpSocket::from(socket);
            let bound = socket.local_addr()?;
            if bound != address {
                let text = format!("a socket is bound to {bound}, the tunnel needs {address}");
                return Err(io::Error::other(text));
            }
            socket.set_nonblocking(true)?;
            let mut inherited = Self::prepare(socket, address, gso, gro);
            let has_gro = sys::has_gro(inherited.as_fd()).unwrap_or(true);
            inherited.ends_gro = (has_gro && !gro).into();
            inherited.overflows_seen = NOT_SEEN.into();
            Ok(inherited)
        };
        let group = sockets.into_iter().map(inherit).collect::<io::Result<Vec<_>>>()?;
        share_by_sender(&group);
        Ok(group)
    }

    /// The same socket, for another process.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.socket.try_clone()?.into())
    }

    fn prepare(socket: UdpSocket, address: SocketAddr, gso: bool, gro: bool) -> Self {
        // Without CAP_NET_ADMIN the sysctl limits apply, which costs bursts, not correctness.
        if sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER_BYTES).is_err() {
            SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER_BYTES).ok();
        }
        size_send_buffer(&socket);
        // Only a counter is lost on a kernel without it.
        sys::enable_overflow_count(socket.as_fd()).ok();
        // Only congestion marks are lost without it.
        sys::enable_type_of_service(socket.as_fd(), address).ok();
        let gso = gso && sys::supports_segment(socket.as_fd());
        let segments_max = if gso { probe_segments_max(address.ip()) } else { 1 };
        let gro = gro && sys::set_gro(socket.as_fd(), true).is_ok();
        sys::set_fragmenting(socket.as_fd(), address, false).ok();
        Self {
            socket,
            source: None,
            address,
            segments_max,
            gro,
            ends_gro: AtomicBool::new(false),
            fragmenting: AtomicBool::new(false),
            always_fragmenting: AtomicBool::new(false),
            overflows_seen: AtomicU64::new(0),
        }
    }

    /// Whether datagrams may be fragmented, or go with Don't Fragment and are refused with EMSGSIZE
    /// where they are longer than the interface takes, which spares each of them the choice of an
    /// identification. Either way no ICMP message changes what is sent.
    pub fn set_fragmenting(&self, fragmenting: bool) {
        let fragmenting = fragmenting || self.always_fragmenting.load(Ordering::Relaxed);
        self.fragmenting.store(fragmenting, Ordering::Relaxed);
        for socket in [Some(&self.socket), self.source.as_ref()].into_iter().flatten() {
            sys::set_fragmenting(socket.as_fd(), self.address, fragmenting).ok();
        }
    }

    fn is_fragmenting(&self) -> bool {
        self.fragmenting.load(Ordering::Relaxed)
    }

    /// Whether datagrams may be fragmented in any case, for paths that can't be measured: with
    /// Don't Fragment, nothing would tell of one that is narrow.
    pub fn set_always_fragmenting(&self, always: bool) {
        if self.always_fragmenting.swap(always, Ordering::Relaxed) != always {
            self.set_fragmenting(always);
        }
    }

    /// A receive left nothing in it. What an earlier weftd has left in it may be GRO batches, whose
    /// sizes are told only while GRO is on: so that ends here, and not before.
    #[inline]
    pub fn note_drained(&self) {
        if self.ends_gro.load(Ordering::Relaxed) {
            self.end_gro();
        }
    }

    #[cold]
    fn end_gro(&self) {
        sys::set_gro(self.as_fd(), false).ok();
        let mut queue = [PollFd::new(self, PollFlags::IN)];
        let is_empty = poll(&mut queue, Some(&Timespec::default())).is_ok_and(|ready| ready == 0);
        if is_empty {
            self.ends_gro.store(false, Ordering::Relaxed);
        } else {
            // What has come meanwhile may be a batch: once more after the next receive.
            sys::set_gro(self.as_fd(), true).ok();
        }
    }

    /// Bytes in use of the receive buffer, and its size; none from a kernel before 4.12.
    pub fn fill(&self) -> Option<(u64, u64)> {
        let [used, size, ..] = sys::memory(self.as_fd()).ok()?;
        Some((used.into(), size.into()))
    }

    /// What to send by: the socket itself, or the one at its own port, if it has one and that
    /// `is_spread`.
    pub fn sender(&self, is_spread: bool) -> BorrowedFd<'_> {
        self.source.as_ref().filter(|_| is_spread).unwrap_or(&self.socket).as_fd()
    }

    /// Whether it has a port of its own to send from.
    pub fn has_source(&self) -> bool {
        self.source.is_some()
    }

    /// The port of its own from which it sends, if it has one.
    pub fn source_port(&self) -> Option<u16> {
        self.source.as_ref()?.local_addr().ok().map(|address| address.port())
    }

    /// Whether half of the send buffer of [`Self::sender`] is free, which is when the kernel says
    /// that there is room (`sock_writeable`, include/net/sock.h).
    pub fn is_roomy(&self, is_spread: bool) -> bool {
        let sender = self.sender(is_spread);
        let mut room = [PollFd::new(&sender, PollFlags::OUT)];
        // It fails for no socket that is open.
        poll(&mut room, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// The datagrams that the kernel has dropped since the last call, from `total`, its count for
    /// the life of this socket, which wraps; it says none with those that came before the first.
    /// For whoever receives.
    #[inline]
    pub fn new_overflows(&self, total: Option<u32>) -> u32 {
        let seen = self.overflows_seen.load(Ordering::Relaxed);
        if total.is_none() && seen != NOT_SEEN {
            return 0;
        }
        let total = total.unwrap_or(0);
        self.overflows_seen.store(total.into(), Ordering::Relaxed);
        if seen == NOT_SEEN { 0 } else { total.wrapping_sub(seen as u32) }
    }

    /// Sends one datagram with Don't Fragment, besides those of the worker that owns the socket.
    /// While it may fragment its own, some of them go with Don't Fragment, too.
    pub fn send_whole(&self, bytes: &[u8], peer: SocketAddr) -> io::Result<usize> {
        if !self.is_fragmenting() {
            return self.socket.send_to(bytes, peer);
        }
        sys::set_fragmenting(self.as_fd(), self.address, false).ok();
        let sent = self.socket.send_to(bytes, peer);
        sys::set_fragmenting(self.as_fd(), self.address, self.is_fragmenting()).ok();
        sent
    }

    /// Sends one datagram from its own port, if it has one.
    pub fn send_from_source(&self, bytes: &[u8], peer: SocketAddr) -> Option<io::Result<usize>> {
        self.source.as_ref().map(|source| source.send_to(bytes, peer))
    }
}

impl AsFd for TunnelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Has neighbouring senders received by different sockets of the group. Without that, as in kernels
/// before 4.5, the kernel's hash decides.
fn share_by_sender(group: &[TunnelSocket]) {
    if let [first, _, ..] = group {
        let is_ipv6 = first.address.is_ipv6();
        reuseport::share_by_sender(first.as_fd(), is_ipv6, group.len() as u16).ok();
    }
}

fn size_send_buffer(socket: &UdpSocket) {
    if sockopt::set_socket_send_buffer_size_force(socket, SEND_BUFFER_BYTES).is_err() {
        SockRef::from(socket).set_send_buffer_size(SEND_BUFFER_BYTES).ok();
    }
}

fn open(address: SocketAddr, shares: bool) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.set_reuse_port(shares)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Sends a GSO batch to ourselves to see whether the kernel takes the longest from sockets of this
/// family. Where loopback is down the older limit holds everywhere.
fn probe_segments_max(of_family: IpAddr) -> u16 {
    let loopback = match of_family {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    let send = || {
        let target = UdpSocket::bind((loopback, 0)).ok()?;
        let destination = target.local_addr().ok()?;
        let spans = [Span::new(0, SEGMENTS_MAX.into())];
        let message = Datagrams { destination, segment_bytes: Some(1), spans };
        let arena = [0; SEGMENTS_MAX as usize];
        sys::SendBatch::new(1, 1).send(target.as_fd(), &arena, once(message)).ok()
    };
    if send() == Some(1) { SEGMENTS_MAX } else { SEGMENTS_MIN }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Slots;

    const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn offloads_switched_off_stay_off() {
        let off = TunnelSocket::bind(ANY_PORT, false, false).unwrap();
        assert_eq!((off.segments_max, off.gro), (1, false));
        let on = TunnelSocket::bind(ANY_PORT, true, true).unwrap();
        assert!([SEGMENTS_MIN, SEGMENTS_MAX].contains(&on.segments_max), "{}", on.segments_max);
        assert!(on.gro);
    }

    #[test]
    fn each_socket_counts_its_own_overflows() {
        let first = TunnelSocket::bind(ANY_PORT, false, false).unwrap();
        assert_eq!([None, Some(7), Some(9)].map(|total| first.new_overflows(total)), [0, 7, 2]);
        first.new_overflows(Some(u32::MAX));
        assert_eq!(first.new_overflows(Some(1)), 2, "the kernel's count wrapped");
        let next = TunnelSocket::bind(ANY_PORT, false, false).unwrap();
        assert_eq!(next.new_overflows(Some(3)), 3);
    }

    fn bound(gro: bool) -> (TunnelSocket, SocketAddr) {
        let socket = TunnelSocket::bind(ANY_PORT, true, gro).unwrap();
        let address = socket.socket.local_addr().unwrap();
        (socket, address)
    }

    /// The socket in the hands of the next weftd.
    fn inherited(socket: TunnelSocket, address: SocketAddr, gro: bool) -> TunnelSocket {
        let duplicate = vec![socket.duplicate().unwrap()];
        drop(socket);
        TunnelSocket::inherit_group(duplicate, address, true, gro).unwrap().remove(0)
    }

    /// What one receive into `slots` brings, once there is something.
    fn receive(socket: &TunnelSocket, slots: usize) -> Vec<sys::Received> {
        const SLOT_BYTES: usize = 64 << 10;
        let mut readable = [PollFd::new(socket, PollFlags::IN)];
        assert_eq!(poll(&mut readable, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })), Ok(1));
        let mut batch = sys::ReceiveBatch::new(slots);
        let layout = Slots { slot_bytes: SLOT_BYTES, stride: SLOT_BYTES };
        let mut arena = vec![0; slots * SLOT_BYTES];
        let count = batch.receive(socket.as_fd(), &mut arena, layout, 0..slots).unwrap();
        (0..count).map(|slot| batch.received(slot)).collect()
    }

    #[test]
    fn batches_that_an_earlier_weftd_has_left_are_received_as_such() {
        const DATAGRAMS: usize = 10;
        let (first, address) = bound(true);
        let sender = UdpSocket::bind(ANY_PORT).unwrap();
        let send = || {
            let spans = [Span::new(0, DATAGRAMS * 100)];
            let message = Datagrams { destination: address, segment_bytes: Some(100), spans };
            let arena = [7; DATAGRAMS * 100];
            let sent = sys::SendBatch::new(1, 1).send(sender.as_fd(), &arena, once(message));
            assert_eq!(sent.unwrap(), 1);
        };
        // Slots, and datagrams in them.
        let receive = |socket: &TunnelSocket| {
            let received = receive(socket, 2 * DATAGRAMS);
            let datagrams = received.iter().map(|it| {
                let segment_bytes = it.segment_bytes.map_or(it.bytes, usize::from);
                it.bytes / segment_bytes
            });
            (received.len(), datagrams.sum())
        };
        send();
        let next = inherited(first, address, false);
        assert_eq!(receive(&next), (1, DATAGRAMS), "a batch passes for one datagram");
        // Behind the receive that left nothing comes another one.
        send();
        next.note_drained();
        assert_eq!(receive(&next), (1, DATAGRAMS), "a batch passes for one datagram");
        next.note_drained();
        send();
        assert_eq!(receive(&next), (DATAGRAMS, DATAGRAMS), "GRO is still on");
        assert!(!next.gro);
        let (first, address) = bound(false);
        let next = inherited(first, address, false);
        assert!(!next.ends_gro.into_inner(), "GRO would be switched on for a moment");
    }

    #[test]
    fn overflows_of_an_earlier_weftd_are_not_counted_again() {
        let (first, address) = bound(false);
        let sender = UdpSocket::bind(ANY_PORT).unwrap();
        let send = |count| {
            for _ in 0..count {
                sender.send_to(&[7; 1000], address).unwrap();
            }
        };
        let counted = |socket: &TunnelSocket| {
            let received = receive(socket, 64);
            received.iter().map(|it| u64::from(socket.new_overflows(it.overflows))).sum::<u64>()
        };
        // Leaves one datagram in the socket, with which it is told what was dropped before.
        let overflow = |socket: &TunnelSocket| {
            SockRef::from(socket).set_recv_buffer_size(1).unwrap();
            send(64);
            assert_eq!(counted(socket), 0);
            send(1);
        };
        overflow(&first);
        assert!(counted(&first) > 0, "64 datagrams fitted");
        overflow(&first);
        let next = inherited(first, address, false);
        assert_eq!(counted(&next), 0, "those of the earlier weftd are counted");
        overflow(&next);
        assert!(counted(&next) > 0, "its own are not counted");
    }

    #[test]
    fn a_taken_port_is_named() {
        let first = UdpSocket::bind(ANY_PORT).unwrap();
        let taken = first.local_addr().unwrap();
        let error = TunnelSocket::bind(taken, true, true).unwrap_err();
        assert!(error.to_string().contains(&taken.to_string()), "{error}");
    }

    #[test]
    fn a_second_daemon_is_refused_the_port() {
        let two = NonZeroU16::new(2).unwrap();
        let port = UdpSocket::bind(ANY_PORT).unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let group = TunnelSocket::bind_group(address, true, true, two).unwrap();
        assert_eq!(group.len(), 2);
        let second = TunnelSocket::bind_group(address, true, true, two).unwrap_err();
        assert!(second.is_address_in_use(), "{second}");
        let single = TunnelSocket::bind(address, true, true).unwrap_err();
        assert!(single.is_address_in_use(), "{single}");
        drop(group);
        let _single = TunnelSocket::bind(address, true, true).unwrap();
        let group = TunnelSocket::bind_group(address, true, true, two).unwrap_err();
        assert!(group.is_address_in_use(), "{group}");
    }

    #[test]
    fn a_sender_stays_with_one_socket() {
        const SENDERS: usize = 32;
        let four = NonZeroU16::new(4).unwrap();
        let port = UdpSocket::bind(ANY_PORT).unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let group = TunnelSocket::bind_group(address, false, false, four).unwrap();
        let senders: Vec<_> = (0..SENDERS).map(|_| UdpSocket::bind(ANY_PORT).unwrap()).collect();
        for number in 0..3_u8 {
            for sender in &senders {
                sender.send_to(&[number], address).unwrap();
            }
        }
        let mut buffer = [0; 16];
        let mut homes = std::collections::HashMap::new();
        let mut datagrams = 0;
        for (index, member) in group.iter().enumerate() {
            while let Ok((_, from)) = member.socket.recv_from(&mut buffer) {
                datagrams += 1;
                let home = *homes.entry(from).or_insert(index);
                assert_eq!(home, index, "{from} is received by two workers, out of order");
            }
        }
        assert_eq!(datagrams, 3 * SENDERS, "the first socket takes no part in the sharing");
        let used: std::collections::BTreeSet<_> = homes.into_values().collect();
        assert!(used.len() > 1, "one socket received all of {SENDERS} senders");
    }
}
