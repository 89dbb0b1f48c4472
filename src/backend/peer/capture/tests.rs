//! What packets show, and which the kernel hands over.

use std::net::Ipv4Addr;

use super::*;

const HOST: IpAddr = IpAddr::V4(HOST_V4);
const HOST_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PORT: Option<u16> = Some(8285);
const EXTERNAL: u32 = 2;
const TUNNEL: u32 = 7;

/// Beside the host of IPv4 one without it, with the same interfaces.
fn watched_of_ipv6() -> Vec<(IpAddr, Vec<Reached>)> {
    let (subnet, target) = ("fd00:5:1::/64".parse().unwrap(), "fd00:5:1::".parse().unwrap());
    let lease = Reached { subnet, target, interface: TUNNEL };
    let host = "fd99::1".parse().unwrap();
    watched().into_iter().chain([(host, vec![lease])]).collect()
}

/// A packet of IPv6.
fn packet_of_ipv6(source: &str, kind: u8, transport: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    (packet[0], packet[6]) = (0x60, kind);
    packet[8..24].copy_from_slice(&source.parse::<std::net::Ipv6Addr>().unwrap().octets());
    packet.extend(transport);
    packet
}

fn watched() -> Vec<(IpAddr, Vec<Reached>)> {
    let subnet = "10.5.1.0/24".parse::<Prefixes>().unwrap();
    let target = Ipv4Addr::new(10, 5, 1, 0).into();
    let lease = Reached { subnet, target, interface: TUNNEL };
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
    assert_eq!(all(&[packet(HOST_V4.octets(), protocol::UDP, &datagram)]), [Evidence::Arrived]);
    let inner = packet([10, 5, 1, 9], protocol::UDP, &datagram);
    assert_eq!(all(&[inner]), [Evidence::Heard]);
    let carrying = |source| [&datagram[..], &packet(source, protocol::UDP, &[])].concat();
    let tunnelled = |source| packet(HOST_V4.octets(), protocol::UDP, &carrying(source));
    let foreign = Evidence::Foreign(Ipv4Addr::new(10, 5, 2, 9).into(), false);
    let both = [tunnelled([10, 5, 1, 9]), tunnelled([10, 5, 2, 9])];
    assert_eq!(all(&both), [Evidence::Arrived, foreign]);
    let vxlan = [&datagram[..], &[8; 40]].concat();
    assert_eq!(all(&[packet(HOST_V4.octets(), protocol::UDP, &vxlan)]), [Evidence::Arrived]);
    let other_port = packet(HOST_V4.octets(), protocol::UDP, &[0; 8]);
    let stranger = packet([192, 0, 2, 9], protocol::UDP, &datagram);
    assert_eq!(all(&[other_port, stranger, vec![0x45; 11], vec![]]), []);
}

#[test]
fn of_a_host_without_ipv4_the_same_is_seen() {
    let (watched, mut flows) = (watched_of_ipv6(), HashMap::new());
    let mut all = |packet: &[u8]| {
        let seen = seen(packet, PORT, &watched, &mut flows)?;
        Some((seen.host.to_string(), seen.interface, seen.evidence))
    };
    let datagram = [[0, 0, 0x20, 0x5d, 0, 8, 0, 0].as_slice(), &[8; 40]].concat();
    let host = "fd99::1".to_owned();
    let arrived = Some((host.clone(), None, vec![Evidence::Arrived]));
    assert_eq!(all(&packet_of_ipv6("fd99::1", protocol::UDP, &datagram)), arrived);
    let mut segment = tcp(7, ACK)[20..].to_vec();
    let heard = |evidence| Some((host.clone(), Some(TUNNEL), evidence));
    let of_pod = |segment: &[u8]| packet_of_ipv6("fd00:5:1::7", protocol::TCP, segment);
    assert_eq!(all(&of_pod(&segment)), heard(vec![Evidence::Heard]));
    segment[11] += 1;
    assert_eq!(all(&of_pod(&segment)), heard(vec![Evidence::Heard, Evidence::Acknowledged]));
    assert_eq!(all(&packet_of_ipv6("fd00:5:2::7", protocol::TCP, &segment)), None, "no peer");
    let mut passes = |kind| {
        let reply = packet_of_ipv6("fd00:5:1::7", protocol::ICMPV6, &[kind, 0, 0, 0]);
        passing(&reply, &watched, &mut HashMap::new()).map(|(_, is_answer)| is_answer)
    };
    assert_eq!([129, 128].map(&mut passes), [Some(true), Some(false)]);
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
    let reply = Kinds::V4.reply;
    assert_eq!(answers(&[icmp(reply)]), 1);
    assert_eq!(answers(&[icmp(8)]), 0, "its pings are its own affair");
    assert_eq!(answers(&[packet([10, 5, 9, 7], protocol::ICMP, &[reply])]), 0, "no peer");
    assert_eq!(all(&[icmp(reply)]), [Evidence::Heard], "rules may drop it yet");
}

#[test]
fn a_filter_fits_the_kernel() {
    let leases = vec![watched()[0].1[0]; LEASES_MAX];
    let of_ipv6 = watched_of_ipv6()[1].clone();
    let long = Reached { subnet: "fd00:5:1::/127".parse().unwrap(), ..of_ipv6.1[0] };
    for most in [(HOST, leases), (of_ipv6.0, vec![long; LEASES_MAX])] {
        let most = vec![most; HOSTS_MAX];
        assert!(filter(&most, Some((8285, EXTERNAL))).len() < 4096, "BPF_MAXINSNS");
        assert!(filter_of_leaving(&most).len() < 4096, "BPF_MAXINSNS");
    }
    assert_eq!(filter(&watched(), None).len(), 14);
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
            (WORD, PROTOCOL) if packet[0] >> 4 == 4 => accumulator = u32::from(ETH_P_IP),
            (WORD, PROTOCOL) => accumulator = u32::from(ETH_P_IPV6),
            (WORD, PACKET_TYPE) => accumulator = 0,
            (WORD, INTERFACE) => accumulator = interface,
            (WORD, _) => accumulator = load(value, 4),
            (HALF, _) => accumulator = load(value, 2),
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
    let outer = packet(HOST_V4.octets(), protocol::UDP, &datagram);
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
    let inner = packet_of_ipv6("fd00:5:1::9", protocol::TCP, &[0; 20]);
    let outer = packet_of_ipv6("fd99::1", protocol::UDP, &datagram);
    let stranger = packet_of_ipv6("fd99::2", protocol::UDP, &datagram);
    let neighbour = packet_of_ipv6("fd00:5:1:1::9", protocol::TCP, &[0; 20]);
    let both = filter(&watched_of_ipv6(), Some((8285, EXTERNAL)));
    for (interface, of_inner, of_outer) in
        [(TUNNEL, whole, 0), (EXTERNAL, 0, whole), (9, 0, 0), (0, 0, 0)]
    {
        assert_eq!(taken(&both, &inner, interface), of_inner, "{interface}");
        assert_eq!(taken(&both, &outer, interface), of_outer, "{interface}");
        assert_eq!(taken(&both, &stranger, interface), 0, "{interface}");
        assert_eq!(taken(&both, &neighbour, interface), 0, "{interface}");
        assert_eq!(taken(&tunnelled, &inner, interface), 0, "{interface}");
    }
    // What leaves by the tunnel's own interface goes back there.
    let leaving = filter_of_leaving(&watched_of_ipv6());
    assert!(leaving.iter().any(|step| step.3 == u32::from(ETH_P_IPV6)));
}
