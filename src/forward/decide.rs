//! The rules: may this packet travel, and if not, why not and who is told.
//!
//! Sources: RFC 1812 section 5.2 and 5.3 (forwarding, TTL, martians), section 4.3.2.7 (when to
//! stay silent), and the threat model in SECURITY.md for what a tunnel end must refuse. The
//! checks here hold in every legitimate cluster, so none can be switched off, but for the strict
//! check of the sender, which excludes peers behind address translation.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;

use crate::packet::ecn::Ecn;
use crate::packet::header::{Header, protocol};
use crate::packet::icmp::ErrorKind;
use crate::route::{Endpoint, Families, Prefix, Routed, Table, is_tunnel_source};
use crate::stats::DropReason;

/// What a verdict needs to know of this host.
#[derive(Debug, Clone, Copy)]
pub struct Local {
    /// Its subnets, of the families that nodes have.
    pub leased: LeasedFamilies,
    /// The tunnel socket's address and port.
    pub underlay: SocketAddr,
    /// Largest packet that fits the tunnel.
    pub mtu_bytes: u16,
    /// Largest packet whose datagram goes whole, to each peer; what is longer goes in fragments.
    pub whole_bytes: u16,
    /// What is known of the sender of a datagram.
    pub senders: Senders,
}

/// What is known of the sender of a datagram by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Senders {
    /// Nothing for sure: anybody can forge it, and a translator may have put its own there.
    Loose,
    /// The same. Inner sources must be leased, and datagrams come from the public address of that
    /// lease and the tunnel's port, or a source port that goes with it.
    Strict,
    /// All: the peer has proved who it is, and the address given here is the one that stands for
    /// it. As in a kernel's tunnel, packets do not lose a hop.
    Proven,
}

impl Local {
    /// Whether the tunnel is a hop on a packet's way, as flannel's udp backend is.
    #[inline(always)]
    pub(super) fn is_hop(&self) -> bool {
        self.senders != Senders::Proven
    }

    /// To how many bytes TCP over this family is held, if longer packets would go in fragments and
    /// its sender can't be told so, as with IPv6, whose packets may always have 1,280.
    #[inline(always)]
    pub(super) fn held_to<A: Routed>(&self) -> Option<u16> {
        (A::VERSION == 6 && self.whole_bytes < self.mtu_bytes).then_some(self.whole_bytes)
    }

    /// Address of the TUN device that peers ask for echoes: that of IPv4, if it has one.
    pub fn tun_address(&self) -> IpAddr {
        self.leased.map(|v4| v4.tun_address(), |v6| v6.tun_address()).first()
    }
}

/// The overlay of each family that nodes have, and this host's subnets of it.
pub type LeasedFamilies = Families<Leased<Ipv4Addr>, Leased<Ipv6Addr>>;

/// The overlay of one family, and the subnet of it that this host has leased.
#[derive(Debug, Clone, Copy)]
pub struct Leased<A: Routed> {
    /// The whole overlay.
    pub network: Prefix<A>,
    /// This host's lease.
    pub subnet: Prefix<A>,
}

impl<A: Routed> Leased<A> {
    /// Address of the TUN device: the lease's network address.
    pub fn tun_address(&self) -> A {
        self.subnet.network()
    }

    /// The source of ICMP errors that go into the TUN device about `destination`.
    ///
    /// It must be an overlay address that is not ours: a default kernel drops a packet that
    /// comes from a device with a local source as martian (net/ipv4/fib_frontend.c,
    /// `__fib_validate_source`), and with strict reverse-path filtering one whose source isn't
    /// routed through that device. The network address of the lease that `destination` falls
    /// into is the tunnel end that would have been next.
    pub fn error_source(&self, destination: A) -> A {
        let next_hop = Prefix::new(destination, self.subnet.length_bits())
            .map(Prefix::network)
            .filter(|address| self.network.contains(*address) && !self.subnet.contains(*address));
        next_hop.unwrap_or_else(|| {
            let first = self.network.network();
            let after = self.subnet.next().map_or(first, Prefix::network);
            if self.subnet.contains(first) { after } else { first }
        })
    }
}

/// This host, to packets of one family.
#[derive(Debug, Clone, Copy)]
pub struct Host<'a, A: Routed> {
    /// All of it.
    pub local: &'a Local,
    /// Its part of that family.
    pub leased: &'a Leased<A>,
    /// Who else there is.
    pub table: &'a Table,
}

impl<A: Routed> Host<'_, A> {
    /// Whether `address` is one of the two that the tunnel itself owns on this host.
    fn is_own_address(&self, address: A) -> bool {
        address == self.leased.tun_address() || self.underlay() == Some(address)
    }

    /// The tunnel socket's address, if it is of this family.
    #[inline(always)]
    fn underlay(&self) -> Option<A> {
        A::of(self.local.underlay.ip())
    }
}

/// Why a packet goes no further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// What it counts as.
    pub reason: DropReason,
    /// The ICMP error that its source is owed; `None` drops it in silence.
    pub answer: Option<ErrorKind>,
}

impl From<DropReason> for Refusal {
    fn from(reason: DropReason) -> Self {
        Self { reason, answer: None }
    }
}

/// The addresses of a packet that [`ingress`] let in. What was found of one of a sender's packets
/// holds for all with the same, by the same table, and datagrams of a GRO batch mostly share them.
pub type Known<A> = Option<(A, A)>;

/// Decides on a packet from the TUN device: to which tunnel address it goes, TTL less one. `packet`
/// is exactly what `header` describes; `largest_bytes` is its length, or for a super-packet that of
/// its largest segment.
#[inline(always)]
pub fn egress<A: Routed>(
    host: Host<'_, A>,
    header: &Header<A>,
    packet: &[u8],
    largest_bytes: usize,
) -> Result<Endpoint, Refusal> {
    let Host { local, leased, table } = host;
    let answer = |kind, reason| Err(Refusal { reason, answer: Some(kind) });
    let ordinary = header.source.is_ordinary() && header.destination.is_ordinary();
    if !ordinary {
        if A::is_of_link(header.source, header.destination) {
            return Err(DropReason::LinkLocal.into());
        }
        classes(header.source, header.destination)?;
    }
    if host.underlay() == Some(header.source)
        && udp_ports(header, packet).is_some_and(|(source, destination)| {
            let port = local.underlay.port();
            source == port || destination == port && is_tunnel_source(port, source)
        })
    {
        return Err(DropReason::OwnLoop.into());
    }
    if header.ttl == 0 {
        return Err(DropReason::TtlZero.into());
    }
    let Some(peer) = table.endpoint(header.destination) else {
        let is_own = leased.subnet.contains(header.destination);
        let reason = if is_own { DropReason::OwnSubnet } else { DropReason::NoRoute };
        return answer(ErrorKind::NetUnreachable, reason);
    };
    if header.ttl == 1 && local.is_hop() {
        return answer(ErrorKind::TimeExceeded, DropReason::TtlExpired);
    }
    if largest_bytes > usize::from(local.mtu_bytes) {
        if header.dont_fragment {
            let kind = ErrorKind::PacketTooBig { next_hop_mtu_bytes: local.mtu_bytes };
            return answer(kind, DropReason::DontFragmentMtu);
        }
        return Err(DropReason::Oversize.into());
    }
    Ok(peer)
}

/// Whether the classes of its addresses let a packet travel.
fn classes<A: Routed>(source: A, destination: A) -> Result<(), DropReason> {
    if destination.is_multicast_or_broadcast() {
        return Err(DropReason::DestinationMulticast);
    }
    if destination.is_martian_destination() {
        return Err(DropReason::DestinationMartian);
    }
    if source.is_martian_source() {
        return Err(DropReason::SourceMartian);
    }
    Ok(())
}

/// Decides on a packet that `sender` sent through the tunnel, in a datagram with `outer_ecn`: into
/// the TUN device, TTL less one, with this ECN field. `packet` is exactly what `header` describes.
/// `known` is of the same sender and table, and spares looking at the same addresses again. What is
/// owed to the source goes through the tunnel to the peer that it is leased to.
// Nearly always a comparison: as a call it is some thirty instructions more.
#[inline(always)]
pub fn ingress<A: Routed>(
    host: Host<'_, A>,
    sender: &SocketAddr,
    outer_ecn: Ecn,
    header: &Header<A>,
    packet: &[u8],
    known: &mut Known<A>,
) -> Result<Ecn, Refusal> {
    let pair = Some((header.source, header.destination));
    if *known != pair || usize::from(header.header_bytes) > A::HEADER_BYTES_MIN {
        addresses(host, sender, header, packet)?;
        // Nobody would check its next address.
        if A::has_source_route(header, packet) {
            return Err(DropReason::SourceRoute.into());
        }
        // Toward our own addresses ports matter as well, so nothing is remembered of them.
        if !host.is_own_address(header.destination) {
            *known = pair;
        }
    }
    // A packet leaves the tunnel before it is forwarded.
    let Some(ecn) = header.ecn.after_tunnel(outer_ecn) else {
        return Err(DropReason::CongestionMark.into());
    };
    match header.ttl {
        0 => Err(DropReason::TtlZero.into()),
        1 if host.local.is_hop() => Err(time_exceeded(host.table, sender, header.source)),
        _ => Ok(ecn),
    }
}

/// Whether both are of one host, at whatever ports.
#[inline(always)]
fn is_of_host(one: &SocketAddr, other: &SocketAddr) -> bool {
    match (one, other) {
        (SocketAddr::V4(one), SocketAddr::V4(other)) => one.ip() == other.ip(),
        (SocketAddr::V6(one), SocketAddr::V6(other)) => one.ip() == other.ip(),
        _ => false,
    }
}

/// The part of the ingress verdict that is the same for every packet of one sender with equal
/// addresses, the ports of UDP to our own tunnel socket aside.
#[inline(never)]
fn addresses<A: Routed>(
    host: Host<'_, A>,
    sender: &SocketAddr,
    header: &Header<A>,
    packet: &[u8],
) -> Result<(), DropReason> {
    let (source, destination) = (header.source, header.destination);
    let Host { local, leased, .. } = host;
    if is_of_host(sender, &local.underlay) {
        return Err(DropReason::OwnLoop);
    }
    classes(source, destination)?;
    if host.is_own_address(source) {
        return Err(DropReason::SourceMartian);
    }
    if leased.subnet.contains(source) {
        return Err(DropReason::SourceIsLocalSubnet);
    }
    if host.is_own_address(destination)
        && udp_ports(header, packet).is_some_and(|(_, port)| port == local.underlay.port())
    {
        return Err(DropReason::NestedTunnel);
    }
    if !leased.subnet.contains(destination) {
        return Err(DropReason::DestinationNotLocal);
    }
    owns(host, sender, source)
}

/// A leased source must come from its lease's owner. A sender that is no known peer may be the
/// owner behind address translation, until the owner has been seen at its public address.
///
/// With the strict check a source must be leased, and its owner send from its public address and
/// the tunnel's port: a pod's datagram that the host masquerades comes from a peer's address, but
/// seldom from that port.
///
/// Of IPv6 a source must always be leased: all senders are weft's, and the kernel, which drops what
/// comes from outside with an IPv4 address of this host, lets IPv6's in (`__fib_validate_source`,
/// net/ipv4/fib_frontend.c, has no counterpart). Before any lease is known none is, and a restart
/// must lose no packet.
fn owns<A: Routed>(host: Host<'_, A>, sender: &SocketAddr, source: A) -> Result<(), DropReason> {
    let Host { local, table, .. } = host;
    let Some(owner) = table.lookup(source) else {
        let is_loose = local.senders == Senders::Loose;
        let is_refused = !is_loose || A::VERSION == 6 && !table.is_provisional;
        return if is_refused { Err(DropReason::SourceNotLeased) } else { Ok(()) };
    };
    if local.senders == Senders::Proven {
        // Two peers may be behind one address, and each may send from its own subnet only.
        let is_owner = owner.address == *sender;
        return if is_owner { Ok(()) } else { Err(DropReason::SourceNotPeerLease) };
    }
    let is_proven = owner.source_proven.load(Ordering::Relaxed);
    let is_strict = local.senders == Senders::Strict;
    if !is_of_host(sender, &owner.address) {
        let is_refused = is_strict || is_proven || table.has_peer_at(sender.ip());
        return if is_refused { Err(DropReason::SourceNotPeerLease) } else { Ok(()) };
    }
    if is_strict && !is_tunnel_source(local.underlay.port(), sender.port()) {
        return Err(DropReason::OuterPort);
    }
    // A load first: the flag is set once, and a store would bounce the cache line for ever.
    if !is_proven {
        owner.source_proven.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Errors about packets from the network go to a proven owner only, so that a forged packet
/// never makes us send anything.
fn time_exceeded<A: Routed>(table: &Table, sender: &SocketAddr, source: A) -> Refusal {
    let is_owner = table.lookup(source).is_some_and(|owner| is_of_host(sender, &owner.address));
    let answer = is_owner.then_some(ErrorKind::TimeExceeded);
    Refusal { reason: DropReason::TtlExpired, answer }
}

/// Source and destination port of an unfragmented or first-fragment UDP packet.
fn udp_ports<A: Routed>(header: &Header<A>, packet: &[u8]) -> Option<(u16, u16)> {
    if header.protocol != protocol::UDP || header.is_later_fragment() {
        return None;
    }
    let ports: &[u8; 4] = packet.get(usize::from(header.header_bytes)..)?.first_chunk()?;
    Some((u16::from_be_bytes([ports[0], ports[1]]), u16::from_be_bytes([ports[2], ports[3]])))
}
