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
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};
use tokio::net::UdpSocket;
use tracing::info;

use super::classic_bpf::{AND, BYTE, END, EQUAL, HALF_BEHIND, HEADER, WORD};
use super::echoes::discard;
use super::evidence::{Evidence, Reached};
use crate::device::ignore_outgoing;
use crate::packet::echo::REPLY;
use crate::packet::header::protocol;
use crate::packet::transport::{TCP_HEADER_BYTES_MIN, UDP_HEADER_BYTES, tcp_flags::ACK};

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

/// IPv4, as an Ethernet frame has it, and any protocol (include/uapi/linux/if_ether.h).
const ETH_P_IP: u16 = 0x0800;
const ETH_P_ALL: u16 = 0x0003;

/// How the option of times begins as all systems write it, first and behind two fillers.
const TIMESTAMPS: [u8; 4] = [1, 1, 8, 10];

/// Where a TCP packet has what it acknowledges, and behind [`TIMESTAMPS`] the time that it echoes.
const ACKNOWLEDGED: usize = 8;
const TIME_ECHOED: usize = TCP_HEADER_BYTES_MIN + 8;

/// A TCP flow of a peer's pod: addresses and ports.
type Flow = [u8; 12];

#[derive(Debug)]
pub(super) struct Capture {
    /// Of the tunnel, if there is one.
    port: Option<u16>,
    /// By which the tunnel's datagrams come.
    external: u32,
    watched: Vec<(Ipv4Addr, Vec<Reached>)>,
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
        hosts: impl Iterator<Item = (Ipv4Addr, &'a [Reached])>,
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
    pub(super) fn receive(&mut self, mut each: impl FnMut(&[u8], u32, Ipv4Addr, &[Evidence])) {
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
    host: Ipv4Addr,
    /// By which the filter let it in; `None` for the external one.
    interface: Option<u32>,
    evidence: Vec<Evidence>,
}

/// Of a packet from a peer: whether it is the tunnel's or came out of it, and what that shows.
fn seen(
    packet: &[u8],
    port: Option<u16>,
    watched: &[(Ipv4Addr, Vec<Reached>)],
    flows: &mut HashMap<Flow, u32>,
) -> Option<Seen> {
    let source = chunk::<4>(packet, 12).map(Ipv4Addr::from)?;
    let transport = packet.get(usize::from(packet[0] & 0x0f) * 4..).unwrap_or_default();
    if port.is_some()
        && packet[9] == protocol::UDP
        && chunk(transport, 2).map(u16::from_be_bytes) == port
        && let Some((_, leases)) = watched.iter().find(|(host, _)| *host == source)
    {
        let evidence = vec![arrived(transport, leases)];
        return Some(Seen { host: source, interface: None, evidence });
    }
    let (host, lease) = owner(source, watched)?;
    let mut evidence = vec![Evidence::Heard];
    if packet[9] == protocol::TCP && has_advanced(packet, transport, ACKNOWLEDGED, flows) {
        evidence.push(Evidence::Acknowledged);
    }
    Some(Seen { host, interface: Some(lease.interface), evidence })
}

fn owner(pod: Ipv4Addr, watched: &[(Ipv4Addr, Vec<Reached>)]) -> Option<(Ipv4Addr, &Reached)> {
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
    watched: &[(Ipv4Addr, Vec<Reached>)],
    flows: &mut HashMap<Flow, u32>,
) -> Option<(Ipv4Addr, bool)> {
    let (host, _) = owner(chunk::<4>(packet, 12).map(Ipv4Addr::from)?, watched)?;
    let transport = packet.get(usize::from(packet[0] & 0x0f) * 4..).unwrap_or_default();
    let options = transport.get(TCP_HEADER_BYTES_MIN..).unwrap_or_default();
    let at = if options.starts_with(&TIMESTAMPS) { TIME_ECHOED } else { ACKNOWLEDGED };
    let is_answer = match packet[9] {
        protocol::TCP => has_advanced(packet, transport, at, flows),
        protocol::ICMP => transport.first() == Some(&REPLY),
        _ => false,
    };
    Some((host, is_answer))
}

/// Of a datagram of a peer with these leases. What VXLAN carries is not looked into: the kernel
/// lets in whatever it is.
fn arrived(datagram: &[u8], leases: &[Reached]) -> Evidence {
    let inner = datagram.get(UDP_HEADER_BYTES..).unwrap_or_default();
    let is_ipv4 = inner.first().is_some_and(|byte| byte >> 4 == 4);
    // Of more leases it may be one that is not known here.
    match chunk::<4>(inner, 12).map(Ipv4Addr::from).filter(|_| is_ipv4) {
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
fn has_advanced(
    packet: &[u8],
    transport: &[u8],
    at: usize,
    flows: &mut HashMap<Flow, u32>,
) -> bool {
    let (Some(ports), Some(number)) = (transport.first_chunk::<4>(), chunk(transport, at)) else {
        return false;
    };
    if transport.get(13).is_none_or(|flags| flags & ACK == 0) {
        return false;
    }
    if flows.len() >= FLOWS_MAX {
        flows.clear();
    }
    let mut flow = [0; 12];
    flow[..8].copy_from_slice(&packet[12..20]);
    flow[8..].copy_from_slice(ports);
    let number = u32::from_be_bytes(number);
    let before = flows.insert(flow, number);
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

/// Datagrams of these peers to the tunnel's port by its interface, and whatever is from their
/// subnets by theirs.
fn filter(watched: &[(Ipv4Addr, Vec<Reached>)], tunnel: Option<(u16, u32)>) -> Vec<Step> {
    let one = |code, value| Step(code, 0, 0, value);
    // Goes on if it is equal, else skips so many.
    let unless = |value, skip| Step(EQUAL, 0, skip, value);
    let taken = || one(END, PACKET_BYTES as u32);
    let end = || one(END, 0);
    let mut program = vec![one(WORD, PROTOCOL), Step(EQUAL, 1, 0, ETH_P_IP.into())];
    program.extend([end(), one(WORD, PACKET_TYPE)]);
    program.extend([unless(OTHER_HOST, 1), end(), unless(OUTGOING, 1), end()]);
    for (host, leases) in watched {
        if let Some((port, external)) = tunnel {
            program.extend([one(WORD, 12), unless(host.to_bits(), 8)]);
            program.extend([one(WORD, INTERFACE), unless(external, 6)]);
            program.extend([one(BYTE, 9), unless(protocol::UDP.into(), 4)]);
            program.extend([one(HEADER, 0), one(HALF_BEHIND, 2), unless(port.into(), 1), taken()]);
        }
        for Reached { subnet, interface, .. } in leases {
            program.extend([one(WORD, 12), one(AND, subnet.mask())]);
            program.extend([unless(subnet.network().to_bits(), 3), one(WORD, INTERFACE)]);
            program.extend([unless(*interface, 1), taken()]);
        }
    }
    program.push(end());
    program
}

/// Whatever is from their subnets and leaves by another interface than theirs.
fn filter_of_leaving(watched: &[(Ipv4Addr, Vec<Reached>)]) -> Vec<Step> {
    let one = |code, value| Step(code, 0, 0, value);
    let unless = |value, skip| Step(EQUAL, 0, skip, value);
    let end = || one(END, 0);
    let mut program = vec![one(WORD, PROTOCOL), Step(EQUAL, 1, 0, ETH_P_IP.into()), end()];
    program.extend([one(WORD, PACKET_TYPE), Step(EQUAL, 1, 0, OUTGOING), end()]);
    for Reached { subnet, interface, .. } in watched.iter().flat_map(|(_, leases)| leases) {
        program.extend([one(WORD, 12), one(AND, subnet.mask())]);
        program.extend([unless(subnet.network().to_bits(), 3), one(WORD, INTERFACE)]);
        program.extend([Step(EQUAL, 1, 0, *interface), one(END, PACKET_BYTES as u32)]);
    }
    program.push(end());
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const PORT: Option<u16> = Some(8285);
    const EXTERNAL: u32 = 2;
    const TUNNEL: u32 = 7;

    fn watched() -> Vec<(Ipv4Addr, Vec<Reached>)> {
        let subnet = "10.5.1.0/24".parse().unwrap();
        let lease = Reached { subnet, target: Ipv4Addr::new(10, 5, 1, 0), interface: TUNNEL };
        vec![(HOST, vec![lease])]
    }

    fn packet(source: [u8; 4], kind: u8, transport: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 20];
        (packet[0], packet[9]) = (0x45, kind);
        packet[12..16].copy_from_slice(&source);
        packet.extend(transport);
        packet
    }

    fn tcp(acknowledged: u32, flags: u8) -> Vec<u8> {
        let mut segment = vec![0; 20];
        segment[8..12].copy_from_slice(&acknowledged.to_be_bytes());
        segment[13] = flags;
        packet([10, 5, 1, 7], protocol::TCP, &segment)
    }

    fn all(packets: &[Vec<u8>]) -> Vec<Evidence> {
        let (watched, mut flows) = (watched(), HashMap::new());
        let each = packets.iter().filter_map(|packet| seen(packet, PORT, &watched, &mut flows));
        each.flat_map(|seen| (assert_eq!(seen.host, HOST), seen.evidence).1).collect()
    }

    #[test]
    fn the_tunnel_and_what_comes_out_of_it_are_told_apart() {
        let datagram = [0, 0, 0x20, 0x5d, 0, 8, 0, 0];
        assert_eq!(all(&[packet(HOST.octets(), protocol::UDP, &datagram)]), [Evidence::Arrived]);
        let inner = packet([10, 5, 1, 9], protocol::UDP, &datagram);
        assert_eq!(all(&[inner]), [Evidence::Heard]);
        let carrying = |source| [&datagram[..], &packet(source, protocol::UDP, &[])].concat();
        let tunnelled = |source| packet(HOST.octets(), protocol::UDP, &carrying(source));
        let foreign = Evidence::Foreign([10, 5, 2, 9].into(), false);
        let both = [tunnelled([10, 5, 1, 9]), tunnelled([10, 5, 2, 9])];
        assert_eq!(all(&both), [Evidence::Arrived, foreign]);
        let vxlan = [&datagram[..], &[8; 40]].concat();
        assert_eq!(all(&[packet(HOST.octets(), protocol::UDP, &vxlan)]), [Evidence::Arrived]);
        let other_port = packet(HOST.octets(), protocol::UDP, &[0; 8]);
        let stranger = packet([192, 0, 2, 9], protocol::UDP, &datagram);
        assert_eq!(all(&[other_port, stranger, vec![0x45; 11], vec![]]), []);
    }

    #[test]
    fn only_an_advance_shows_that_our_packets_arrive() {
        let [heard, goes_on] = [Evidence::Heard, Evidence::Acknowledged];
        assert_eq!(all(&[tcp(7, ACK), tcp(7, ACK)]), [heard, heard], "sent again");
        assert_eq!(all(&[tcp(7, ACK), tcp(8, ACK)]), [heard, heard, goes_on]);
        assert_eq!(all(&[tcp(u32::MAX, ACK), tcp(3, ACK)]), [heard, heard, goes_on], "wrapped");
        assert_eq!(all(&[tcp(7, ACK), tcp(6, ACK)]), [heard, heard], "reordered");
        assert_eq!(all(&[tcp(0, 2), tcp(1, 2)]), [heard, heard], "nothing acknowledged");
    }

    /// Who only receives acknowledges no bytes, but is answered by its own times.
    #[test]
    fn what_leaves_for_a_pod_may_be_an_answer() {
        let answers = |packets: &[Vec<u8>]| {
            let (watched, mut flows) = (watched(), HashMap::new());
            let passing = |packet: &Vec<u8>| passing(packet, &watched, &mut flows);
            let passed: Vec<_> = packets.iter().filter_map(passing).collect();
            assert!(passed.iter().all(|(host, _)| *host == HOST));
            passed.iter().filter(|(_, is_answer)| *is_answer).count()
        };
        let timed = |echoed: u32| {
            let mut packet = tcp(7, ACK);
            packet.extend([&TIMESTAMPS[..], &[9; 4], &echoed.to_be_bytes()].concat());
            packet
        };
        assert_eq!(answers(&[timed(5), timed(5)]), 0, "sent again");
        assert_eq!(answers(&[timed(5), timed(6), timed(6)]), 1);
        assert_eq!(answers(&[tcp(7, ACK), tcp(8, ACK)]), 1, "without times");
        assert_eq!(answers(&[timed(5)[..46].to_vec()]), 0, "cut");
        let icmp = |kind| packet([10, 5, 1, 7], protocol::ICMP, &[kind, 0, 0, 0]);
        assert_eq!(answers(&[icmp(REPLY)]), 1);
        assert_eq!(answers(&[icmp(8)]), 0, "its pings are its own affair");
        assert_eq!(answers(&[packet([10, 5, 9, 7], protocol::ICMP, &[REPLY])]), 0, "no peer");
        assert_eq!(all(&[icmp(REPLY)]), [Evidence::Heard], "rules may drop it yet");
    }

    #[test]
    fn a_filter_fits_the_kernel() {
        let leases = vec![watched()[0].1[0]; LEASES_MAX];
        let most = vec![(HOST, leases); HOSTS_MAX];
        assert!(filter(&most, Some((8285, EXTERNAL))).len() < 4096, "BPF_MAXINSNS");
        assert!(filter_of_leaving(&most).len() < 4096, "BPF_MAXINSNS");
        assert_eq!(filter(&watched(), None).len(), 15);
    }

    /// As the kernel runs it: how much of a packet for this host, which came by this interface, is
    /// taken.
    fn taken(program: &[Step], packet: &[u8], interface: u32) -> u32 {
        let (mut at, mut accumulator, mut header) = (0, 0, 0);
        let load = |at: u32, bytes: u32| {
            let bytes = &packet[at as usize..(at + bytes) as usize];
            bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
        };
        loop {
            let Step(code, yes, no, value) = program[at];
            at += 1;
            match (code, value) {
                (WORD, PROTOCOL) => accumulator = u32::from(ETH_P_IP),
                (WORD, PACKET_TYPE) => accumulator = 0,
                (WORD, INTERFACE) => accumulator = interface,
                (WORD, _) => accumulator = load(value, 4),
                (BYTE, _) => accumulator = load(value, 1),
                (HEADER, _) => header = 4 * (load(value, 1) & 0x0f),
                (HALF_BEHIND, _) => accumulator = load(header + value, 2),
                (AND, _) => accumulator &= value,
                (EQUAL, _) => at += usize::from(if accumulator == value { yes } else { no }),
                (END, _) => return value,
                _ => panic!("{code:#x}"),
            }
        }
    }

    #[test]
    fn what_comes_another_way_is_not_taken() {
        let inner = packet([10, 5, 1, 9], protocol::TCP, &[0; 20]);
        let datagram = [0x20, 0x5d, 0x20, 0x5d, 0, 8, 0, 0];
        let outer = packet(HOST.octets(), protocol::UDP, &datagram);
        let stranger = packet([192, 0, 2, 9], protocol::UDP, &datagram);
        let whole = PACKET_BYTES as u32;
        let tunnelled = filter(&watched(), Some((8285, EXTERNAL)));
        // Of a pod's interface there is no more to say.
        for (interface, of_inner, of_outer) in
            [(TUNNEL, whole, 0), (EXTERNAL, 0, whole), (9, 0, 0), (0, 0, 0)]
        {
            assert_eq!(taken(&tunnelled, &inner, interface), of_inner, "{interface}");
            assert_eq!(taken(&tunnelled, &outer, interface), of_outer, "{interface}");
            assert_eq!(taken(&tunnelled, &stranger, interface), 0, "{interface}");
            assert_eq!(taken(&filter(&watched(), None), &outer, interface), 0, "{interface}");
        }
    }
}
