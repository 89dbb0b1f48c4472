//! The walks: whole batches of bytes through parse, verdict, TTL and offload, both ways.

mod decide;
mod egress;
mod families;
mod ingress;
mod without_ipv4;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::forward::{Context, Host, Leased, Local, Senders};
use crate::packet::checksum;
use crate::packet::header::{self, protocol};
use crate::packet::limiter::IcmpLimiter;
use crate::route::{Families, Peer, Table};
use crate::stats::{DirectionStats, DropReason};

/// Outer addresses: ours, the peer of 10.5.2.0/24, the peer of 10.5.3.0/24, and nobody's.
const US: SocketAddr = SocketAddr::new(IpAddr::V4(OUR_ADDRESS), 8285);
const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)), 8285);
const OTHER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 3)), 8285);
const STRANGER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 99)), 8285);

/// A pod of ours, the TUN address, a pod of the peer, one of the other peer, and nobody's.
pub(crate) const POD: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 2);
const TUN: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
pub(crate) const FAR: Ipv4Addr = Ipv4Addr::new(10, 5, 2, 2);
const FARTHER: Ipv4Addr = Ipv4Addr::new(10, 5, 3, 2);
const UNLEASED: Ipv4Addr = Ipv4Addr::new(10, 5, 99, 2);

/// What a packet ends with that panics when it is decided on: the mistake nobody has found yet.
pub(crate) const TRIPPING: &[u8] = b"this panics";

/// Panics on such a packet.
pub(crate) fn trip(packet: &[u8]) {
    assert!(!packet.ends_with(TRIPPING), "tripped, as the test asked for");
}

const MTU_BYTES: u16 = 1472;

const SECOND_NS: u64 = 1_000_000_000;

/// The address of our end, as an inner packet may have it.
const OUR_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// This host, to packets of IPv4.
fn host<'a>(local: &'a Local, table: &'a Table) -> Host<'a, Ipv4Addr> {
    Host { local, leased: local.leased.as_ref().v4().unwrap(), table }
}

pub(crate) fn local() -> Local {
    let leased =
        Leased { network: "10.5.0.0/16".parse().unwrap(), subnet: "10.5.1.0/24".parse().unwrap() };
    Local {
        leased: Families::of_v4(leased, None),
        underlay: US,
        mtu_bytes: MTU_BYTES,
        whole_bytes: MTU_BYTES,
        senders: Senders::Loose,
    }
}

fn table() -> Table {
    let peer = |subnet: &str, address| {
        let source_proven = AtomicBool::new(false);
        Arc::new(Peer { source_proven, ..Peer::new(subnet.parse().unwrap(), address) })
    };
    Table::build(vec![peer("10.5.2.0/24", PEER), peer("10.5.3.0/24", OTHER)])
}

/// Everything that decisions depend on.
struct World {
    local: Local,
    table: Table,
    stats: DirectionStats,
    icmp_limit: IcmpLimiter,
    now_ns: u64,
}

impl World {
    fn new() -> Self {
        let stats = DirectionStats::default();
        let icmp_limit = IcmpLimiter::default();
        Self { local: local(), table: table(), stats, icmp_limit, now_ns: 1_000 * SECOND_NS }
    }

    fn context(&self) -> Context<'_> {
        let Self { local, table, stats, icmp_limit, now_ns } = self;
        Context { local, table, stats, icmp_limit, now_ns: *now_ns }
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        let counts = DropReason::ALL.iter().map(|&reason| (reason, self.stats.drops(reason)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// The packet with its header checksum made right.
fn seal(mut packet: Vec<u8>) -> Vec<u8> {
    let header_bytes = (usize::from(packet[0] & 15) * 4).min(packet.len());
    packet[10..12].fill(0);
    let field = checksum::finish(checksum::sum(&packet[..header_bytes]));
    packet[10..12].copy_from_slice(&field);
    packet
}

/// The packet with `bytes` at `at`, its header checksum made right.
fn with(mut packet: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    packet[at..at + bytes.len()].copy_from_slice(bytes);
    seal(packet)
}

/// The packet with these IPv4 options.
fn with_options(mut packet: Vec<u8>, options: &[u8]) -> Vec<u8> {
    packet.splice(20..20, options.iter().copied());
    packet[0] += (options.len() / 4) as u8;
    let total_bytes = packet.len() as u16;
    with(packet, 2, &total_bytes.to_be_bytes())
}

/// The packet after one hop.
fn hop(packet: &[u8]) -> Vec<u8> {
    with(packet.to_vec(), 8, &[packet[8] - 1])
}

fn ipv4(protocol: u8, source: Ipv4Addr, destination: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0];
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend(payload);
    let total_bytes = packet.len() as u16;
    with(packet, 2, &total_bytes.to_be_bytes())
}

/// The packet with its transport checksum, at `at`, made right.
fn transport_sealed(mut packet: Vec<u8>, at: usize) -> Vec<u8> {
    packet[at..at + 2].fill(0);
    let word =
        |at: usize| Ipv4Addr::new(packet[at], packet[at + 1], packet[at + 2], packet[at + 3]);
    let length_bytes = (packet.len() - 20) as u16;
    let pseudo = header::pseudo_header(word(12), word(16), packet[9], length_bytes);
    let field = checksum::finish(checksum::add(pseudo, checksum::sum(&packet[20..])));
    packet[at..at + 2].copy_from_slice(&field);
    packet
}

/// A UDP packet with these ports and its checksum right.
fn udp_with(ports: (u16, u16), addresses: (Ipv4Addr, Ipv4Addr), payload: &[u8]) -> Vec<u8> {
    let mut datagram = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    datagram.extend(((8 + payload.len()) as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    transport_sealed(ipv4(protocol::UDP, addresses.0, addresses.1, &datagram), 26)
}

pub(crate) fn udp(source: Ipv4Addr, destination: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    udp_with((4000, 5000), (source, destination), payload)
}

/// A TCP segment of plain data.
fn tcp(source: Ipv4Addr, destination: Ipv4Addr, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut segment = vec![0x0f, 0xa0, 0x13, 0x88];
    segment.extend(sequence.to_be_bytes());
    segment.extend([0, 0, 0, 9, 0x50, 0x10, 2, 0, 0, 0, 0, 0]);
    segment.extend(payload);
    transport_sealed(ipv4(protocol::TCP, source, destination, &segment), 36)
}
