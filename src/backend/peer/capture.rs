//! What arrives from peers that leave echoes unanswered, seen before any firewall or tc filter of
//! this host: whether their packets reach the interface, whether they come out of the tunnel, and
//! whether connections go on, which they only do if our packets arrive there. And what of it leaves
//! this host for its pods, behind all rules: whether what these have sent is answered.
//!
//! Runs while a peer is in question, sees the first bytes of packets from a few of them, and takes
//! none away. What comes by another interface than theirs is somebody else's: of a pod of this
//! host, of another node.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};
use tokio::net::UdpSocket;
use tracing::info;

use super::classic_bpf::{AND, BYTE, END, EQUAL, HALF, HALF_BEHIND, HEADER, WORD};
use super::echoes::discard;
use super::evidence::{Evidence, Reached};
use crate::device::ignore_outgoing;
use crate::packet::echo::{Kinds, Quoted};
use crate::packet::header::protocol;
use crate::packet::transport::{TCP_HEADER_BYTES_MIN, UDP_HEADER_BYTES, tcp_flags::ACK};
use crate::route::{IpAddress, Prefixes};

/// Peers that are watched at a time, and leases of each. Of more, others are each second: what was
/// seen stands for twelve.
const HOSTS_MAX: usize = 16;
const LEASES_MAX: usize = 4;

/// Of a packet: an ICMP error about an echo of ours with all that it quotes.
const PACKET_BYTES: usize = 128;

/// Packets that are taken between two ticks; more tell no more.
const PACKETS_MAX: usize = 256;
const BUFFER_BYTES: usize = 128 << 10;

/// Connections that are followed; when more go on, those seen last.
const FLOWS_MAX: usize = 256;

/// The families, as an Ethernet frame has them, and any protocol (include/uapi/linux/if_ether.h).
const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
const ETH_P_ALL: u16 = 0x0003;

/// How the option of times begins as all systems write it, first and behind two fillers.
const TIMESTAMPS: [u8; 4] = [1, 1, 8, 10];

/// Where a TCP packet has what it acknowledges, and behind [`TIMESTAMPS`] the time that it echoes.
const ACKNOWLEDGED: usize = 8;
const TIME_ECHOED: usize = TCP_HEADER_BYTES_MIN + 8;

/// A TCP flow of a peer's pod: addresses and ports.
type Flow = ([IpAddr; 2], [u8; 4]);

#[derive(Debug)]
pub(super) struct Capture {
    /// Of the tunnel, if there is one.
    port: Option<u16>,
    /// By which the tunnel's datagrams come.
    external: u32,
    watched: Vec<(IpAddr, Vec<Reached>)>,
    arriving: View,
    leaving: View,
    is_refused: bool,
    since: Instant,
}

/// What one socket shows.
#[derive(Debug, Default)]
struct View {
    socket: Option<UdpSocket>,
    /// What each flow has acknowledged.
    flows: HashMap<Flow, u32>,
}

impl Capture {
    pub(super) fn new(port: Option<u16>) -> Self {
        let (arriving, leaving) = Default::default();
        let (watched, since) = (Vec::new(), Instant::now());
        Self { port, external: 0, watched, arriving, leaving, is_refused: false, since }
    }

    /// Watches some of these peers, and no others, behind the `external` interface.
    pub(super) fn watch<'a>(
        &mut self,
        hosts: impl Iterator<Item = (IpAddr, &'a [Reached])>,
        external: u32,
        now: Instant,
    ) {
        let cut = |leases: &[Reached]| leases[..leases.len().min(LEASES_MAX)].to_vec();
        let mut watched: Vec<_> = hosts.map(|(host, leases)| (host, cut(leases))).collect();
        if watched.len() > HOSTS_MAX {
            let turn = usize::try_from(now.duration_since(self.since).as_secs()).unwrap_or(0);
            let first = turn.wrapping_mul(HOSTS_MAX) % watched.len();
            watched.rotate_left(first);
            watched.truncate(HOSTS_MAX);
        }
        if (&watched, external) == (&self.watched, self.external) {
            return;
        }
        (self.watched, self.external) = (watched, external);
        // Not the same ones: a second filter beside the first may be more memory than a socket may
        // have (net.core.optmem_max).
        (self.arriving.socket, self.leaving.socket) = (None, None);
        if self.watched.is_empty() {
            (self.arriving, self.leaving) = Default::default();
            return;
        }
        if self.is_refused {
            return;
        }
        let arriving = filter(&self.watched, self.port.map(|port| (port, external)));
        let leaving = filter_of_leaving(&self.watched);
        match open(arriving).and_then(|arriving| Ok((arriving, open(leaving)?))) {
            Ok((arriving, leaving)) => {
                // Linux 4.20; the filter does the same at some cost.
                ignore_outgoing(arriving.as_fd()).ok();
                (self.arriving.socket, self.leaving.socket) = (Some(arriving), Some(leaving));
            }
            Err(error) => self.note_refusal(&error),
        }
    }

    /// What lasts is told, and not tried again; what passes costs this time.
    fn note_refusal(&mut self, error: &io::Error) {
        let lasting = [Errno::PERM, Errno::ACCESS, Errno::AFNOSUPPORT];
        if Errno::from_io_error(error).is_some_and(|errno| lasting.contains(&errno)) {
            self.is_refused = true;
            info!(
                "cannot see what arrives from peers that do not answer ({error}): less will be \
                 known of them; allow sockets of the family AF_PACKET"
            );
        }
    }

    /// Takes what has arrived: each packet with its interface, and what it shows of which peer.
    pub(super) fn receive(&mut self, mut each: impl FnMut(&[u8], u32, IpAddr, &[Evidence])) {
        self.arriving.receive(|packet, flows| {
            if let Some(seen) = seen(packet, self.port, &self.watched, flows) {
                let interface = seen.interface.unwrap_or(self.external);
                each(packet, interface, seen.host, &seen.evidence);
            }
        });
        self.leaving.receive(|packet, flows| {
            if let Some((host, is_answer)) = passing(packet, &self.watched, flows) {
                let evidence = [Evidence::Passed, Evidence::Acknowledged];
                each(&[], self.external, host, &evidence[..1 + usize::from(is_answer)]);
            }
        });
    }
}

impl View {
    fn receive(&mut self, mut each: impl FnMut(&[u8], &mut HashMap<Flow, u32>)) {
        let Some(socket) = &self.socket else { return };
        let mut buffer = [0; PACKET_BYTES];
        for _ in 0..PACKETS_MAX {
            let Ok(received) = socket.try_recv(&mut buffer) else { return };
            each(&buffer[..received], &mut self.flows);
        }
    }
}

/// A socket that is given packets as they come from any device. One for IPv4 alone would see them
/// behind tc and netdev's hook (net/core/dev.c, `__netif_receive_skb_core`).
fn open(filter: Vec<Step>) -> io::Result<UdpSocket> {
    let any = Some(Protocol::from(i32::from(ETH_P_ALL.to_be())));
    let socket = Socket::new(Domain::PACKET, Type::DGRAM.nonblocking(), any)?;
    let step = |Step(code, yes, no, value)| SockFilter::new(code, yes, no, value);
    socket.attach_filter(&filter.into_iter().map(step).collect::<Vec<_>>())?;
    discard(&socket, PACKETS_MAX);
    SockRef::from(&socket.as_fd()).set_recv_buffer_size(BUFFER_BYTES)?;
    UdpSocket::from_std(OwnedFd::from(socket).into())
}

/// What a packet shows of whom.
struct Seen {
    host: IpAddr,
    /// By which the filter let it in; `None` for the external one.
    interface: Option<u32>,
    evidence: Vec<Evidence>,
}

/// Of a packet from a peer: whether it is the tunnel's or came out of it, and what that shows.
fn seen(
    packet: &[u8],
    port: Option<u16>,
    watched: &[(IpAddr, Vec<Reached>)],
    flows: &mut HashMap<Flow, u32>,
) -> Option<Seen> {
    let packet = Quoted::read(packet)?;
    if port.is_some()
        && packet.protocol == protocol::UDP
        && chunk(packet.payload, 2).map(u16::from_be_bytes) == port
        && let Some((_, leases)) = watched.iter().find(|(host, _)| *host == packet.source)
    {
        let evidence = vec![arrived(packet.payload, leases)];
        return Some(Seen { host: packet.source, interface: None, evidence });
    }
    let (host, lease) = owner(packet.source, watched)?;
    let mut evidence = vec![Evidence::Heard];
    if packet.protocol == protocol::TCP && has_advanced(&packet, ACKNOWLEDGED, flows) {
        evidence.push(Evidence::Acknowledged);
    }
    Some(Seen { host, interface: Some(lease.interface), evidence })
}

fn owner(pod: IpAddr, watched: &[(IpAddr, Vec<Reached>)]) -> Option<(IpAddr, &Reached)> {
    watched.iter().find_map(|(host, leases)| {
        let lease = leases.iter().find(|lease| lease.subnet.contains(pod))?;
        Some((*host, lease))
    })
}

/// Whose pod a packet is of that leaves for a pod of this host, and whether it answers what that
/// one has sent: a ping, or a TCP packet, by its time (RFC 7323) if it has one: who only receives
/// acknowledges what has no bytes.
fn passing(
    packet: &[u8],
    watched: &[(IpAddr, Vec<Reached>)],
    flows: &mut HashMap<Flow, u32>,
) -> Option<(IpAddr, bool)> {
    let packet = Quoted::read(packet)?;
    let (host, _) = owner(packet.source, watched)?;
    let options = packet.payload.get(TCP_HEADER_BYTES_MIN..).unwrap_or_default();
    let at = if options.starts_with(&TIMESTAMPS) { TIME_ECHOED } else { ACKNOWLEDGED };
    let is_answer = match packet.protocol {
        protocol::TCP => has_advanced(&packet, at, flows),
        protocol::ICMP | protocol::ICMPV6 => {
            packet.payload.first() == Some(&Kinds::of(packet.source).reply)
        }
        _ => false,
    };
    Some((host, is_answer))
}

/// Of a datagram of a peer with these leases. What VXLAN carries is not looked into: the kernel
/// lets in whatever it is.
fn arrived(datagram: &[u8], leases: &[Reached]) -> Evidence {
    let inner = Quoted::read(datagram.get(UDP_HEADER_BYTES..).unwrap_or_default());
    // Of the other family nothing is known here.
    let is_known =
        |source: &IpAddr| leases.iter().any(|it| it.target.is_ipv4() == source.is_ipv4());
    // Of more leases it may be one that is not known here.
    match inner.map(|inner| inner.source).filter(is_known) {
        Some(source)
            if leases.len() < LEASES_MAX
                && !leases.iter().any(|lease| lease.subnet.contains(source)) =>
        {
            Evidence::Foreign(source, false)
        }
        Some(_) | None => Evidence::Arrived,
    }
}

/// Whether a TCP packet has a later number at this place than an earlier one of its flow.
fn has_advanced(packet: &Quoted<'_>, at: usize, flows: &mut HashMap<Flow, u32>) -> bool {
    let transport = packet.payload;
    let (Some(ports), Some(number)) = (chunk(transport, 0), chunk(transport, at)) else {
        return false;
    };
    if transport.get(13).is_none_or(|flags| flags & ACK == 0) {
        return false;
    }
    if flows.len() >= FLOWS_MAX {
        flows.clear();
    }
    let number = u32::from_be_bytes(number);
    let before = flows.insert(([packet.source, packet.destination], ports), number);
    before.is_some_and(|before| (1..1 << 31).contains(&number.wrapping_sub(before)))
}

fn chunk<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<[u8; BYTES]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Its protocol, and what a packet is for this host: one in a frame for another host, which a
/// switch or a wrong neighbour entry brought here, has not arrived, and one that leaves is ours
/// (SKF_AD_PROTOCOL, SKF_AD_PKTTYPE, PACKET_OTHERHOST, PACKET_OUTGOING). By which interface it came
/// (SKF_AD_IFINDEX).
const PROTOCOL: u32 = 0xffff_f000;
const PACKET_TYPE: u32 = 0xffff_f004;
const INTERFACE: u32 = 0xffff_f008;
const OTHER_HOST: u32 = 3;
const OUTGOING: u32 = 4;

/// A code, how many steps to skip if a comparison holds and if it doesn't, and a value.
#[derive(Debug, Clone, Copy)]
struct Step(u16, u8, u8, u32);

const fn one(code: u16, value: u32) -> Step {
    Step(code, 0, 0, value)
}

const TAKEN: Step = one(END, PACKET_BYTES as u32);
const LEFT: Step = one(END, 0);

/// What is loaded, and what that must be.
type Condition = (Vec<Step>, u32);

/// Goes on with `then` if all of these hold, else behind it.
fn if_all(conditions: Vec<Condition>, then: Vec<Step>) -> Vec<Step> {
    conditions.into_iter().rev().fold(then, |behind, (loads, value)| {
        // With IPv6 some twenty steps at most.
        let unless = Step(EQUAL, 0, behind.len() as u8, value);
        loads.into_iter().chain([unless]).chain(behind).collect()
    })
}

/// That the source lies in a network of its family.
fn is_from<A: IpAddress>(network: A, length_bits: u8) -> Vec<Condition> {
    let (ethertype, at) = if A::BITS == 32 { (ETH_P_IP, 12) } else { (ETH_P_IPV6, 8) };
    let parts = words(network).into_iter().zip(words(A::of_bits(A::mask(length_bits))));
    let part = |(at, (word, mask))| (vec![one(WORD, at), one(AND, mask)], word);
    let parts = (at..).step_by(4).zip(parts).filter(|(_, (_, mask))| *mask != 0).map(part);
    std::iter::once((vec![one(WORD, PROTOCOL)], ethertype.into())).chain(parts).collect()
}

fn words(address: impl Into<IpAddr>) -> Vec<u32> {
    match address.into() {
        IpAddr::V4(address) => vec![address.to_bits()],
        IpAddr::V6(address) => {
            let octets = address.octets();
            octets.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word)).collect()
        }
    }
}

/// That it is from the subnet of a lease.
fn is_of(subnet: Prefixes) -> Vec<Condition> {
    match (subnet.v4(), subnet.v6()) {
        (Some(v4), _) => is_from(v4.network(), v4.length_bits()),
        (None, Some(v6)) => is_from(v6.network(), v6.length_bits()),
        // Never seen: there is one.
        (None, None) => Vec::new(),
    }
}

/// That it is a datagram of this host to this port. Extension headers of IPv6 are not looked
/// behind: tunnels send none.
fn is_datagram(host: IpAddr, port: u16) -> Vec<Condition> {
    let (from, protocol_at, port_at) = match host {
        IpAddr::V4(host) => (is_from(host, 32), 9, vec![one(HEADER, 0), one(HALF_BEHIND, 2)]),
        IpAddr::V6(host) => (is_from(host, 128), 6, vec![one(HALF, 42)]),
    };
    let of_port = [(vec![one(BYTE, protocol_at)], protocol::UDP.into()), (port_at, port.into())];
    from.into_iter().chain(of_port).collect()
}

/// Datagrams of these peers to the tunnel's port by its interface, and whatever is from their
/// subnets by theirs.
fn filter(watched: &[(IpAddr, Vec<Reached>)], tunnel: Option<(u16, u32)>) -> Vec<Step> {
    let unless = |value, skip| Step(EQUAL, 0, skip, value);
    let by = |interface| vec![one(WORD, INTERFACE), unless(interface, 1), TAKEN];
    let mut program = vec![one(WORD, PACKET_TYPE)];
    program.extend([unless(OTHER_HOST, 1), LEFT, unless(OUTGOING, 1), LEFT]);
    for (host, leases) in watched {
        if let Some((port, external)) = tunnel {
            program.extend(if_all(is_datagram(*host, port), by(external)));
        }
        for Reached { subnet, interface, .. } in leases {
            program.extend(if_all(is_of(*subnet), by(*interface)));
        }
    }
    program.push(LEFT);
    program
}

/// Whatever is from their subnets and leaves by another interface than theirs.
fn filter_of_leaving(watched: &[(IpAddr, Vec<Reached>)]) -> Vec<Step> {
    let mut program = vec![one(WORD, PACKET_TYPE), Step(EQUAL, 1, 0, OUTGOING), LEFT];
    for Reached { subnet, interface, .. } in watched.iter().flat_map(|(_, leases)| leases) {
        let by_another = vec![one(WORD, INTERFACE), Step(EQUAL, 1, 0, *interface), TAKEN];
        program.extend(if_all(is_of(*subnet), by_another));
    }
    program.push(LEFT);
    program
}

#[cfg(test)]
mod tests;
