//! Where the measuring happens: a TUN device and two UDP sockets in a network namespace that ends
//! with the process, a thread on the other core that fills their queues, and clocks.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddrV4, UdpSocket};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::sockopt;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use weft::device::{Tun, TunOffload};
use weft::packet::Span;
use weft::sys::udp::{self, Datagrams, SendBatch};

use super::raw::VNET_BYTES;

/// Bytes of user data in a small packet, and of a segment of a GSO batch.
pub(crate) const SMALL_BYTES: usize = 64;
/// A small packet with its headers, as it lies in a datagram of the tunnel.
pub(crate) const SMALL_PACKET_BYTES: usize = SMALL_BYTES + 28;
/// Datagrams of a full GSO batch through the tunnel.
pub(crate) const BATCH_SEGMENT_BYTES: u16 = 1472;
/// What a GSO batch holds: as many segments as fit in one datagram's length.
pub(crate) const BATCH_BYTES: usize = 44 * 1472;
/// User data of a super-packet of the TUN device, in segments of its MTU.
const SUPER_SEGMENT_BYTES: u16 = 1444;
const SUPER_BYTES: usize = 44 * 1444;

const WORKER_CORE: usize = 1;
const OTHER_CORE: usize = 0;
const BUFFER_BYTES: usize = 64 << 20;

/// What a queue is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fill {
    TunSmall,
    TunSuper,
    UdpSmall,
    UdpBatch,
}

/// The device and the sockets.
pub(crate) struct Lab {
    /// The device, whose network is 10.99.0.0/24.
    pub tun: Tun,
    /// Where GSO batches and singles arrive, over the loopback device, with UDP_GRO.
    pub socket: UdpSocket,
    /// Where packets that are written to the device arrive.
    pub inside: UdpSocket,
    /// Where the worker sends from.
    pub sender: UdpSocket,
}

/// Beyond the TUN device.
pub(crate) const BEYOND: SocketAddrV4 =
    SocketAddrV4::new(std::net::Ipv4Addr::new(10, 99, 0, 2), 5000);

impl Lab {
    pub(crate) fn open() -> Result<Self> {
        super::raw::leave_network().context("unshare the network namespace; run as root")?;
        std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").ok();
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").ok();
        let tun =
            Tun::open("choices%d", TunOffload { tso: true, uso: true }, NonZeroU16::MIN)?.remove(0);
        ensure!(tun.offload.uso, "the kernel has no UDP super-packets on TUN devices (6.2)");
        ip("link set lo up")?;
        ip(&format!("link set {} mtu 1472 txqueuelen 8192 up", tun.name))?;
        ip(&format!("addr add 10.99.0.1/24 dev {}", tun.name))?;
        let socket = bound("127.0.0.1:0")?;
        udp::set_gro(socket.as_fd(), true)?;
        let inside = bound("10.99.0.1:5001")?;
        let sender = bound("127.0.0.1:0")?;
        Ok(Self { tun, socket, inside, sender })
    }

    pub(crate) fn address(&self) -> Result<SocketAddrV4> {
        match self.socket.local_addr()? {
            std::net::SocketAddr::V4(address) => Ok(address),
            std::net::SocketAddr::V6(_) => anyhow::bail!("the socket is bound to IPv4"),
        }
    }

    /// The files as rings have them.
    pub(crate) fn files(&self) -> [RawFd; 3] {
        [self.tun.as_fd().as_raw_fd(), self.socket.as_raw_fd(), self.sender.as_raw_fd()]
    }

    /// Whether reads of the device that do not say otherwise wait. Armed operations need that: on
    /// a non-blocking file they are refused at once.
    pub(crate) fn set_waiting(&self, waiting: bool) -> Result<()> {
        for file in [self.tun.as_fd(), self.socket.as_fd()] {
            let mut flags = fcntl_getfl(file)?;
            flags.set(OFlags::NONBLOCK, !waiting);
            fcntl_setfl(file, flags)?;
        }
        Ok(())
    }

    /// A small packet to the `inside` socket, behind an empty offload header.
    pub(crate) fn packet_in(&self) -> [u8; 10 + SMALL_PACKET_BYTES] {
        let mut bytes = [0; 10 + SMALL_PACKET_BYTES];
        let ip = [0x45, 0, 0, SMALL_PACKET_BYTES as u8, 0, 0, 0, 0, 64, 17, 0, 0];
        bytes[10..22].copy_from_slice(&ip);
        bytes[22..30].copy_from_slice(&[10, 99, 0, 2, 10, 99, 0, 1]);
        let sum = weft::packet::checksum::finish(weft::packet::checksum::sum(&bytes[10..30]));
        bytes[20..22].copy_from_slice(&sum);
        bytes[30..34].copy_from_slice(&[5000_u16.to_be_bytes(), 5001_u16.to_be_bytes()].concat());
        bytes[34..36].copy_from_slice(&((SMALL_BYTES + 8) as u16).to_be_bytes());
        bytes
    }
}

fn ip(words: &str) -> Result<()> {
    let done = Command::new("ip").args(words.split(' ')).status().context("run ip")?;
    ensure!(done.success(), "ip {words}: {done}");
    Ok(())
}

fn bound(address: &str) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address).with_context(|| format!("bind {address}"))?;
    socket.set_nonblocking(true)?;
    sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES)?;
    sockopt::set_socket_send_buffer_size_force(&socket, BUFFER_BYTES)?;
    Ok(socket)
}

/// Pins the calling thread to the worker's core.
pub(crate) fn pin_worker() -> io::Result<()> {
    pin(WORKER_CORE)
}

/// Pins the calling thread to the other core.
pub(crate) fn pin_other() -> io::Result<()> {
    pin(OTHER_CORE)
}

fn pin(core: usize) -> io::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    Ok(sched_setaffinity(None, &cores)?)
}

/// Throws away what waits in a socket.
pub(crate) fn empty(socket: &UdpSocket) {
    let mut bytes = [0; 2048];
    while socket.recv(&mut bytes).is_ok() {}
}

/// Nanoseconds of a clock that all threads share.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Nanoseconds of CPU that the calling thread has used.
pub(crate) fn thread_time() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Fills queues from the other core, as a pod's sends would.
pub(crate) struct Feeder {
    orders: Sender<(Fill, usize)>,
    done: Arc<AtomicBool>,
}

impl Feeder {
    pub(crate) fn start(lab: &Lab) -> Result<Self> {
        let to_socket = lab.address()?;
        let socket = bound("0.0.0.0:0")?;
        let (orders, ordered) = channel();
        let done = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&done);
        std::thread::spawn(move || {
            pin_other().ok();
            let arena = vec![7_u8; BATCH_BYTES];
            let mut batch = SendBatch::new(1, 1);
            while let Ok((fill, count)) = ordered.recv() {
                let (to, bytes, segment_bytes) = match fill {
                    Fill::TunSmall => (BEYOND, SMALL_BYTES, None),
                    Fill::TunSuper => (BEYOND, SUPER_BYTES, Some(SUPER_SEGMENT_BYTES)),
                    Fill::UdpSmall => (to_socket, SMALL_PACKET_BYTES, None),
                    Fill::UdpBatch => (to_socket, BATCH_BYTES, Some(BATCH_SEGMENT_BYTES)),
                };
                for _ in 0..count {
                    let spans = [Span::new(0, bytes)];
                    let message = Datagrams { destination: to.into(), segment_bytes, spans };
                    let sent = batch.send(socket.as_fd(), &arena, std::iter::once(message));
                    sent.expect("the queue has room");
                }
                tell.store(true, Ordering::Release);
            }
        });
        Ok(Self { orders, done })
    }

    /// Returns when `count` are in the queue.
    pub(crate) fn fill(&self, fill: Fill, count: usize) {
        self.done.store(false, Ordering::Relaxed);
        self.orders.send((fill, count)).expect("the feeder lives");
        while !self.done.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
        // The feeder goes back to sleep on its core before anything is measured on this one.
        let settled = now() + Duration::from_micros(20).as_nanos() as u64;
        while now() < settled {
            std::hint::spin_loop();
        }
    }
}

/// Reads a packet of the device with readv, its offload header apart.
pub(crate) fn readv(tun: &Tun, header: &mut [u8], packet: &mut [u8]) -> io::Result<usize> {
    let mut parts = [IoSliceMut::new(header), IoSliceMut::new(packet)];
    Ok(rustix::io::readv(tun, &mut parts)?.saturating_sub(VNET_BYTES))
}
