//! The senders: GSO batches from the network, super-packets from a pod. Both go as fast as the
//! daemon takes them in, and no faster: what its queues lose was never received.

use std::fs::File;
use std::io::{IoSlice, Read, Seek};
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use weft::device::{Tun, TunOffload};
use weft::offload::{PartialChecksum, Segmentation, SegmentationKind, VnetHeader};
use weft::packet::Span;
use weft::sys::udp::{Datagrams, SendBatch};

use crate::packets::{Ends, Pool};
use crate::slow_twin::mend;

/// The addresses of the lab: the daemon under fire, a peer of it, and one that no lease names.
pub(crate) const TARGET: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 1), 8285);
pub(crate) const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 3), 8285);
pub(crate) const STRANGER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 9), 8285);

/// The upper halves of the leases of target and peer; the honest pods live in the lower ones.
const TARGET_PODS: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 128);
const PEER_PODS: Ipv4Addr = Ipv4Addr::new(10, 5, 3, 128);
/// Leased by nobody.
const STRANGE_PODS: Ipv4Addr = Ipv4Addr::new(10, 5, 77, 128);

/// Look at the receive queue after this many GSO batches or bytes.
const LOOK_BATCHES: usize = 12;
const LOOK_BYTES: usize = 256 << 10;

/// A queue longer than this is left to shrink: a quarter of the daemon's receive buffer.
const QUEUE_BYTES_MAX: u64 = 1 << 20;

/// Messages of one sendmmsg: a GSO batch cut into single datagrams.
const MESSAGES_MAX: usize = 64;

/// Packets in a row if the kernel cuts every super-packet; the queue of the daemon's device should
/// hold some times as many. Then it is left to shrink.
const PACKETS_IN_A_ROW: usize = 1000;
/// Packets that a daemon which has caught up still reads in a [`PAUSE`].
const REST_PACKETS: u64 = 16;
const PAUSE: Duration = Duration::from_millis(1);
const LONG_PAUSE: Duration = Duration::from_millis(20);

/// The longest super-packet, and the most packets that one may stand for.
const SUPER_BYTES_MAX: usize = 65_000;
const SUPER_SEGMENTS_MAX: usize = 200;

/// What all threads share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// No more packets.
    pub(crate) stop: AtomicBool,
    /// Packets handed to the kernel of the network's side.
    pub(crate) sent_from_network: AtomicU64,
    /// The same of the pod's, each packet of a super-packet counted.
    pub(crate) sent_from_pod: AtomicU64,
}

impl Shared {
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Moves this thread into a network namespace, for good.
pub(crate) fn enter(namespace: &Path) -> Result<()> {
    let handle = File::open(namespace).with_context(|| format!("no {}", namespace.display()))?;
    move_into_link_name_space(handle.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("cannot enter {}", namespace.display()))
}

/// GSO batches and single datagrams from a peer and a stranger, until it is stopped.
pub(crate) fn from_network(shared: &Shared, host: &Path, far: &Path, seed: u64) -> Result<()> {
    enter(host)?;
    let mut queue = ReceiveQueue::open()?;
    enter(far)?;
    let mut senders = Vec::new();
    for (at, from) in [(PEER, PEER_PODS), (STRANGER, STRANGE_PODS)] {
        let socket = UdpSocket::bind(at).with_context(|| format!("cannot bind {at}"))?;
        senders.push((
            socket,
            Pool::new(Ends { from, to: TARGET_PODS }, seed ^ u64::from(at.ip().octets()[3])),
        ));
    }
    let mut sending = SendBatch::new(MESSAGES_MAX, MESSAGES_MAX);
    let (mut batches, mut bytes) = (0, 0);
    while !shared.stopped() {
        let (socket, pool) = &mut senders[batches % 2];
        let (batch, random) = pool.next();
        let (batch_bytes, segment_bytes) = (batch.bytes.len(), batch.segment_bytes);
        // All packets in one message, or each in a datagram of its own.
        let message_bytes = if random.u8(..8) == 0 { segment_bytes } else { batch_bytes };
        let messages = batch_bytes.div_ceil(message_bytes).min(MESSAGES_MAX);
        let sent = sending.send(
            socket.as_fd(),
            &batch.bytes,
            (0..batch_bytes).step_by(message_bytes).take(messages).map(|at| Datagrams {
                destination: TARGET.into(),
                segment_bytes: (message_bytes > segment_bytes).then_some(segment_bytes as u16),
                spans: [Span::new(at, message_bytes.min(batch_bytes - at))],
            }),
        );
        if let Ok(sent) = sent {
            let packets = if messages == 1 { batch_bytes.div_ceil(segment_bytes) } else { sent };
            shared.sent_from_network.fetch_add(packets as u64, Ordering::Relaxed);
        }
        batches += 1;
        // What a datagram of its own costs beside its bytes.
        bytes += batch_bytes + messages * 1024;
        if batches % LOOK_BATCHES == 0 || bytes > LOOK_BYTES {
            bytes = 0;
            while queue.bytes()? > QUEUE_BYTES_MAX && !shared.stopped() {
                thread::sleep(PAUSE / 4);
            }
        }
    }
    Ok(())
}

/// How much lies in the receive queue of the daemon's socket, as the kernel accounts it.
struct ReceiveQueue {
    table: File,
    text: String,
}

impl ReceiveQueue {
    /// For the namespace that the thread is in now.
    fn open() -> Result<Self> {
        let table = File::open("/proc/thread-self/net/udp").context("no table of UDP sockets")?;
        Ok(Self { table, text: String::new() })
    }

    fn bytes(&mut self) -> Result<u64> {
        self.text.clear();
        self.table.rewind()?;
        self.table.read_to_string(&mut self.text)?;
        let port = format!(":{:04X}", TARGET.port());
        let queues = self.text.lines().filter_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next()?;
            let queues = fields.nth(2).filter(|_| local.ends_with(&port))?;
            u64::from_str_radix(queues.split_once(':')?.1, 16).ok()
        });
        Ok(queues.sum())
    }
}

/// Packets and super-packets out of a device that stands for a pod, until it is stopped.
pub(crate) fn from_pod(shared: &Shared, host: &Path, seed: u64) -> Result<()> {
    enter(host)?;
    let device =
        Tun::open("evil0", TunOffload { tso: true, uso: true }, NonZeroU16::MIN)?.remove(0);
    ip(&["link", "set", "evil0", "up"])?;
    ip(&["route", "add", "10.5.1.128/25", "dev", "evil0"])?;
    let leases = [PEER_PODS, Ipv4Addr::new(10, 5, 2, 128), STRANGE_PODS, PEER_PODS];
    let mut pools: Vec<Pool> = (0_u64..)
        .zip(leases)
        .map(|(number, to)| Pool::new(Ends { from: TARGET_PODS, to }, seed ^ 0x100 << number))
        .collect();
    let (mut writes, mut in_a_row) = (0, 0);
    let mut read = packets_read()?;
    let mut packet = Vec::new();
    while !shared.stopped() {
        let pool = &mut pools[writes % leases.len()];
        let (header, packets) = next_write(pool, &mut packet);
        // The kernel refuses some, as it would refuse a pod's.
        if device.write(&[IoSlice::new(&header), IoSlice::new(&packet)]).is_ok() {
            shared.sent_from_pod.fetch_add(packets as u64, Ordering::Relaxed);
        }
        writes += 1;
        in_a_row += packets;
        if in_a_row >= PACKETS_IN_A_ROW {
            in_a_row = 0;
            wait_for_rest(&mut read)?;
        }
    }
    Ok(())
}

/// A packet of the pool with its offload header; mostly one that is to be cut.
fn next_write(pool: &mut Pool, packet: &mut Vec<u8>) -> ([u8; 10], usize) {
    let (batch, random) = pool.next();
    packet.clear();
    packet.extend_from_slice(&batch.bytes[..batch.segment_bytes.min(batch.bytes.len())]);
    let plain = (VnetHeader::default().encode::<Ipv4Addr>(0), 1);
    let single = random.u8(..4) == 0;
    if packet.len() < 28 || packet[0] >> 4 != 4 || single {
        return plain;
    }
    let ip_bytes = usize::from(packet[0] & 15) * 4;
    let (kind, offset) = match packet[9] {
        6 => (SegmentationKind::Tcp, 16),
        17 => (SegmentationKind::Udp, 6),
        _ => return plain,
    };
    if !(20..=packet.len()).contains(&ip_bytes) || packet.len() < ip_bytes + 20 {
        return plain;
    }
    let segment_bytes = match random.u8(..4) {
        0 => random.usize(1..64),
        1 => random.usize(64..512),
        _ => random.usize(512..=1420),
    };
    let payload = random.usize(1..=SUPER_BYTES_MAX).min(segment_bytes * SUPER_SEGMENTS_MAX);
    let total = packet.len() + payload;
    packet.resize(total.min(SUPER_BYTES_MAX), 7);
    let length = (packet.len() as u16).to_be_bytes();
    packet[2..4].copy_from_slice(&length);
    if kind == SegmentationKind::Udp {
        let udp_bytes = (packet.len() - ip_bytes) as u16;
        packet[ip_bytes + 4..ip_bytes + 6].copy_from_slice(&udp_bytes.to_be_bytes());
    }
    mend(packet, true, false);
    let header = VnetHeader {
        checksum: Some(PartialChecksum { start: ip_bytes as u16, offset }),
        segmentation: NonZeroU16::new(segment_bytes as u16)
            .map(|payload_bytes| Segmentation { kind, payload_bytes }),
    };
    (header.encode::<Ipv4Addr>((ip_bytes + 20) as u16), packet.len().div_ceil(segment_bytes))
}

/// Waits until the daemon reads from its device, and then until it has caught up.
fn wait_for_rest(last: &mut u64) -> Result<()> {
    let (mut waited, mut moved) = (Duration::ZERO, false);
    while waited < LONG_PAUSE {
        thread::sleep(PAUSE);
        waited += PAUSE;
        let now = packets_read()?;
        let read = now.saturating_sub(*last);
        *last = now;
        if moved && read < REST_PACKETS {
            break;
        }
        moved |= read > 0;
    }
    Ok(())
}

/// Packets that the daemon has read from its device so far.
fn packets_read() -> Result<u64> {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let devices = table.lines().filter_map(|line| line.trim_start().split_once(':'));
    let overlay = devices.filter(|(name, _)| name.starts_with("flannel"));
    let read = overlay.filter_map(|(_, counts)| counts.split_whitespace().nth(9));
    Ok(read.filter_map(|count| count.parse::<u64>().ok()).sum())
}

/// Runs `ip` in the namespace of this thread.
fn ip(arguments: &[&str]) -> Result<()> {
    let status = std::process::Command::new("ip").args(arguments).status()?;
    anyhow::ensure!(status.success(), "ip {} failed", arguments.join(" "));
    Ok(())
}
