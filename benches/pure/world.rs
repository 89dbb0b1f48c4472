//! What the batches of the benchmarks are made of: a host, its routes, and packets as a pod or a
//! peer would send them. Made without the code under test wherever its result would shape them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};
use std::sync::Arc;

use ipnet::Ipv4Net;
use weft::forward::{Context, IcmpLimiter, Leased, Local, Senders};
use weft::route::{Families, Peer, Prefix, Prefixes, Table};
use weft::stats::DirectionStats;

use crate::slow_twin::{fold, set_checksums, word_sum};

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// What fits the tunnel over an underlay of 1500.
const MTU_BYTES: u16 = 1472;

/// A pod here; the pods of peer `n` are in the n-th /24 of 10.0.0.0/8.
pub(crate) const POD: Ipv4Addr = Ipv4Addr::new(10, 200, 1, 2);

/// The shape of a set of routes.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
    /// /24 subnets side by side, as flannel leases them.
    Dense,
    /// The same, but every 64th one is cut in half.
    Mixed,
}

/// A pod of peer `index`.
pub(crate) fn pod_of(index: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a00_0002 | (index as u32) << 8)
}

/// The address of the same pod in IPv6, where each /24 is a /64.
fn in_ipv6(pod: Ipv4Addr) -> Ipv6Addr {
    let (subnet, host) = (u128::from(pod.to_bits() >> 8), u128::from(pod.to_bits() & 0xff));
    Ipv6Addr::from_bits(0xfd00 << 112 | subnet << 64 | host)
}

pub(crate) fn subnets(routes: usize, shape: Shape) -> Vec<Prefix> {
    let subnet = |index: usize| {
        let length_bits = match shape {
            Shape::Mixed if index.is_multiple_of(64) => 25,
            Shape::Mixed | Shape::Dense => 24,
        };
        Prefix::new(pod_of(index), length_bits).expect("the length is at most 32")
    };
    (0..routes).map(subnet).collect()
}

pub(crate) fn peers(subnets: &[Prefix]) -> Vec<Arc<Peer>> {
    let peer = |(index, subnet): (u32, &Prefix)| {
        let address = SocketAddrV4::new(Ipv4Addr::from_bits(0xc000_0000 + index), 8285);
        let subnet_v6 = Prefix::new(in_ipv6(subnet.network()), 64);
        Arc::new(Peer::new(Prefixes::of_v4(*subnet, subnet_v6), address))
    };
    (0..).zip(subnets).map(peer).collect()
}

/// The peer's IPv4 subnet, as another crate has it.
pub(crate) fn net_of(peer: &Peer) -> Ipv4Net {
    let subnet = peer.subnets.v4().expect("each has one");
    Ipv4Net::new(subnet.network(), subnet.length_bits()).expect("the length is at most 32")
}

/// Everything that verdicts on a batch depend on.
pub(crate) struct World {
    local: Local,
    pub(crate) table: Table,
    stats: DirectionStats,
    icmp_limit: IcmpLimiter,
}

impl World {
    pub(crate) fn new(peer_count: usize) -> Self {
        let leased = Leased {
            network: "10.0.0.0/8".parse().expect("a prefix"),
            subnet: "10.200.1.0/24".parse().expect("a prefix"),
        };
        let leased_v6 = Leased {
            network: "fd00::/32".parse().expect("a prefix"),
            subnet: Prefix::new(in_ipv6(POD), 64).expect("64 are not too many"),
        };
        Self {
            local: Local {
                leased: Families::of_v6(Some(leased), leased_v6),
                underlay: "192.168.0.1:8285".parse().expect("an endpoint"),
                mtu_bytes: MTU_BYTES,
                whole_bytes: MTU_BYTES,
                senders: Senders::Loose,
            },
            table: Table::build(peers(&subnets(peer_count, Shape::Dense))),
            stats: DirectionStats::default(),
            icmp_limit: IcmpLimiter::default(),
        }
    }

    pub(crate) fn context(&self) -> Context<'_> {
        let Self { local, table, stats, icmp_limit } = self;
        Context { local, table, stats, icmp_limit, now_ns: 0 }
    }

    /// Fails the benchmark if anything was dropped: it would measure something else.
    pub(crate) fn assert_no_drops(&self) {
        assert_eq!(self.stats.drops_total(), 0, "the batch is broken: packets were dropped");
        assert!(self.stats.packets_received.get() > 0, "the batch is empty");
    }
}

/// One packet of a flow: number `index`, with so many bytes of payload, its checksums right.
pub(crate) fn packet(
    protocol: u8,
    (source, destination): (Ipv4Addr, Ipv4Addr),
    index: usize,
    payload_bytes: usize,
) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0];
    packet.extend((index as u16).to_be_bytes());
    packet.extend([0x40, 0, 64, protocol, 0, 0]);
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend([0x30, 0x39, 0x14, 0x51]);
    if protocol == TCP {
        packet.extend(((index * payload_bytes) as u32).to_be_bytes());
        packet.extend([0, 0, 0, 9, 0x80, 0x10, 2, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1]);
        packet.extend([0, 0, 0, 2]);
    } else {
        packet.extend(((8 + payload_bytes) as u16).to_be_bytes());
        packet.extend([0, 0]);
    }
    packet.extend((0..payload_bytes).map(|at| (at * 7 + index) as u8));
    let total_bytes = packet.len() as u16;
    packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    set_checksums(&mut packet);
    packet
}

/// The same packet between the same pods in IPv6, its checksum right, or left to the device.
pub(crate) fn as_ipv6(packet: &[u8], is_partial: bool) -> Vec<u8> {
    let address = |at: usize| {
        let octets: [u8; 4] = packet[at..at + 4].try_into().expect("four bytes");
        in_ipv6(octets.into()).octets()
    };
    let payload = &packet[20..];
    let mut long = vec![0x60, 0, 0, 0];
    long.extend((payload.len() as u16).to_be_bytes());
    long.extend([packet[9], 64]);
    long.extend(address(12));
    long.extend(address(16));
    long.extend(payload);
    let at = if packet[9] == TCP { 56 } else { 46 };
    long[at..at + 2].fill(0);
    let pseudo = word_sum(&long[8..40]) + u32::from(packet[9]) + payload.len() as u32;
    let field = if is_partial { fold(pseudo) } else { !fold(pseudo + word_sum(&long[40..])) };
    long[at..at + 2].copy_from_slice(&field.to_be_bytes());
    long
}

/// The packet with its transport checksum left to the device, as the kernel leaves it.
pub(crate) fn with_partial_checksum(mut packet: Vec<u8>) -> Vec<u8> {
    let at = if packet[9] == TCP { 36 } else { 26 };
    let length_bytes = packet.len() as u32 - 20;
    let pseudo = fold(word_sum(&packet[12..20]) + u32::from(packet[9]) + length_bytes);
    packet[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
    packet
}
