//! The programs against the rules of the workers: generated packets, right and wrong, run through
//! both. A program may take what the workers would send or deliver with the same bytes, and nothing
//! else; and it must take the ordinary packets.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(unsafe_code, reason = "only these tests run programs by bpf(2)")]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use weft::fast_path::{IN, Maps, PeerEntry, Settings};
use weft::forward::decide;
use weft::forward::{Host, Leased, Local, Senders};
use weft::packet::Family as _;
use weft::packet::ecn::Ecn;
use weft::packet::ipv4::Ipv4Header;
use weft::route::{Families, Peer, Prefix, Prefixes, SOURCE_PORTS, Table, first_source_port};
use weft::stats::HostKey;

use crate::support::bpf::compile;
use crate::support::pace::{Stopwatch, by_effort};
use crate::support::packet::{ipv4, seal};

pub(super) const PORT: u16 = 8285;
const MTU_BYTES: u16 = 1472;
const SUBNET: &str = "10.5.1.0/24";
const TUN: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);
pub(super) const UNDERLAY: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const LINK_BYTES: usize = 14;
pub(super) const OUTER_BYTES: usize = 28;

const IPV4: [u8; 2] = [8, 0];
pub(super) const IPV6: [u8; 2] = [0x86, 0xdd];

/// Hardware addresses.
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// `TC_ACT_REDIRECT`, and `TC_ACT_UNSPEC` as a program returns it.
const TAKEN: u32 = 7;
const LEFT_ALONE: u32 = u32::MAX;

/// How a peer is published: its lease, its address, whether the programs may send to it and receive
/// from it.
pub(super) const PEERS: [(&str, [u8; 4], bool, bool); 6] = [
    ("10.5.2.0/24", [192, 0, 2, 2], true, true),
    ("10.5.16.0/20", [192, 0, 2, 3], true, true),
    // Inside the lease before: the longest prefix counts.
    ("10.5.17.0/24", [192, 0, 2, 4], true, true),
    // Those that only workers carry, or one way only.
    ("10.5.18.0/24", [192, 0, 2, 5], false, false),
    ("10.5.5.0/24", [192, 0, 2, 6], false, true),
    ("10.5.6.0/24", [192, 0, 2, 7], true, false),
];

/// This host's IPv6 subnet.
pub(super) const SUBNET_V6: &str = "fd00:5:0:1::/64";

/// The peers' in the order of [`PEERS`]; the last two take no IPv6.
pub(super) const PEERS_V6: [&str; 4] =
    ["fd00:5:0:2::/64", "fd00:5:0:10::/60", "fd00:5:0:11::/64", "fd00:5:0:12::/64"];

/// For programs that stop at `until_ns`.
fn settings(until_ns: u64) -> Settings {
    Settings {
        until_ns,
        streams_until_ns: 0,
        subnet: SUBNET.parse().unwrap(),
        underlay_address: UNDERLAY,
        port: PORT,
        mtu_bytes: MTU_BYTES,
        masks: vec![0xffff_ff00, 0xffff_f000],
        // Redirections are recorded in a test run and not carried out.
        underlay_device: 1,
        hardware_address: OWN,
        tun_device: 1,
        gro_device: 0,
        subnet_v6: SUBNET_V6.parse().ok(),
        masks_v6: vec![u128::MAX << 64, u128::MAX << 68],
    }
}

pub(super) struct Bench {
    pub(super) local: Local,
    pub(super) table: Table,
    pub(super) out: OwnedFd,
    pub(super) inward: OwnedFd,
    pub(super) maps: Maps,
    pub(super) rng: Rng,
}

impl Bench {
    pub(super) fn new(seed: u64) -> Self {
        let prefix = |text: &str| text.parse::<Prefix>().unwrap();
        let leased = Leased { network: prefix("10.5.0.0/16"), subnet: prefix(SUBNET) };
        let leased_v6 =
            Leased { network: "fd00:5::/48".parse().unwrap(), subnet: SUBNET_V6.parse().unwrap() };
        let local = Local {
            leased: Families::of_v6(Some(leased), leased_v6),
            underlay: (UNDERLAY, PORT).into(),
            mtu_bytes: MTU_BYTES,
            whole_bytes: MTU_BYTES,
            // What the programs take must pass the stricter check, too.
            senders: Senders::Strict,
        };
        let maps = Maps::create().expect("root may make maps");
        let mut peers = Vec::new();
        for (number, (subnet, address, is_sent_to, is_received_from)) in (0..).zip(PEERS) {
            let (subnet, address) = (prefix(subnet), Ipv4Addr::from(address));
            let next_hop = is_sent_to.then_some(NEIGHBOUR);
            let entry = PeerEntry { address, number, next_hop, is_received_from };
            maps.set_peer(subnet, entry).unwrap();
            let subnet_v6 = PEERS_V6.get(number as usize).map(|text| text.parse().unwrap());
            if let Some(subnet_v6) = subnet_v6 {
                maps.set_peer_v6(subnet_v6, entry).unwrap();
            }
            let address = SocketAddrV4::new(address, PORT);
            peers.push(Arc::new(Peer::new(Prefixes::of_v4(subnet, subnet_v6), address)));
        }
        maps.publish(&settings(u64::MAX)).unwrap();
        let out = maps.load("weft_out", &compile(LINK_BYTES).out).unwrap();
        let inward = maps.load("weft_in", IN).unwrap();
        let table = Table::build(peers);
        Self { local, table, out, inward, maps, rng: Rng::with_seed(seed) }
    }

    /// This host, to packets of IPv4.
    fn host(&self) -> Host<'_, Ipv4Addr> {
        let Self { local, table, .. } = self;
        Host { local, leased: local.leased.as_ref().v4().unwrap(), table }
    }

    /// The frame behind its link header as a program left it, if it took it.
    fn run(&self, program: &OwnedFd, packet: &[u8]) -> Option<Vec<u8>> {
        self.run_as(IPV4, program, packet)
    }

    /// The same of a frame with this EtherType.
    pub(super) fn run_as(
        &self,
        kind: [u8; 2],
        program: &OwnedFd,
        packet: &[u8],
    ) -> Option<Vec<u8>> {
        let mut frame = vec![0; LINK_BYTES];
        frame[12..].copy_from_slice(&kind);
        frame.extend(packet);
        let room = frame.len() + OUTER_BYTES;
        let (result, mut output) = test_run(program.as_fd(), &frame, room);
        match result {
            TAKEN => {
                let kind = if output[LINK_BYTES] >> 4 == 6 { IPV6 } else { IPV4 };
                assert_eq!(output[12..14], kind, "the next device takes it for something else");
                Some(output.split_off(LINK_BYTES))
            }
            LEFT_ALONE => {
                assert_eq!(output, frame, "a packet that is left alone was changed");
                None
            }
            other => panic!("the program dropped {packet:02x?}: {other}"),
        }
    }

    fn kernels(&self, address: Ipv4Addr) -> Option<(Ipv4Addr, bool, bool)> {
        let subnet = self.table.lookup(address)?.subnets.v4()?;
        let find = |(text, ..): &&(&str, _, _, _)| text.parse::<Prefix>().unwrap() == subnet;
        PEERS
            .iter()
            .find(find)
            .map(|(_, address, send, receive)| (Ipv4Addr::from(*address), *send, *receive))
    }

    fn address(&mut self) -> Ipv4Addr {
        let host = self.rng.u8(..);
        match self.rng.u8(..24) {
            0..=4 => Ipv4Addr::new(10, 5, 1, host),
            5..=9 => Ipv4Addr::new(10, 5, 2, host),
            10..=13 => Ipv4Addr::new(10, 5, self.rng.u8(16..20), host),
            14 => Ipv4Addr::new(10, 5, 5, host),
            15 => Ipv4Addr::new(10, 5, 6, host),
            16 => Ipv4Addr::new(10, 5, 99, host),
            17 => UNDERLAY,
            18 => TUN,
            19 => Ipv4Addr::new(172, 16, 0, host),
            20 => Ipv4Addr::new(169, *self.rng.choice(&[253, 254]).unwrap(), 0, host),
            21 => Ipv4Addr::new(self.rng.u8(..), 0, 0, host),
            _ => Ipv4Addr::from_bits(self.rng.u32(..)),
        }
    }

    /// A whole packet, mostly between pods.
    fn packet(&mut self, from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        let source = if self.rng.u8(..4) == 0 { self.address() } else { from };
        let destination = if self.rng.u8(..4) == 0 { self.address() } else { to };
        let protocol = *self.rng.choice(&[1, 6, 17, 17, 47]).unwrap();
        let length = match self.rng.u8(..8) {
            0 => self.rng.usize(..8),
            1 => self.rng.usize(1440..1500),
            _ => self.rng.usize(8..200),
        };
        let mut rest = vec![0; length];
        self.rng.fill(&mut rest);
        if protocol == 17 && length >= 4 && self.rng.bool() {
            rest[2 * self.rng.usize(..2)..][..2].copy_from_slice(&PORT.to_be_bytes());
        }
        let mut packet = ipv4(source, destination, protocol, &rest);
        packet[1] = self.rng.u8(..);
        packet[8] = *self.rng.choice(&[0, 1, 2, 63, 64, 64, 64, 255]).unwrap();
        packet[6] = *self.rng.choice(&[0x40, 0x40, 0x40, 0, 0x20, 0x80, 0x01]).unwrap();
        if self.rng.u8(..8) == 0 {
            self.add_options(&mut packet);
        }
        seal(&mut packet);
        packet
    }

    fn add_options(&mut self, packet: &mut Vec<u8>) {
        let options = *self.rng.choice(&[[1, 1, 1, 0], [131, 4, 4, 0], [7, 4, 4, 0]]).unwrap();
        packet.splice(20..20, options);
        packet[0] = 0x46;
        let total = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&total);
    }

    /// Damages a packet now and then, in one place or its length, mostly with a checksum that fits.
    fn damage(&mut self, packet: &mut Vec<u8>, headers: usize) {
        match self.rng.u8(..8) {
            0 => {
                let at = self.rng.usize(..headers.min(packet.len()));
                packet[at] ^= 1 << self.rng.u8(..8);
                if self.rng.u8(..4) > 0 && usize::from(packet[0] & 15) * 4 <= packet.len() {
                    seal(packet);
                }
            }
            // A test run takes no frame without a whole IPv4 header.
            1 if self.rng.bool() => packet.truncate(self.rng.usize(20..=packet.len().max(20))),
            1 => packet.extend(vec![0; self.rng.usize(..40)]),
            _ => {}
        }
    }
}

/// Whether programs know this form of header at all.
fn is_common(header: &Ipv4Header, packet: &[u8]) -> bool {
    header.header_bytes == 20
        && !header.is_fragment()
        && packet[6] & 0x80 == 0
        && usize::from(header.total_bytes) == packet.len()
        && header.source.is_ordinary()
        && header.destination.is_ordinary()
}

fn after_hop(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    Ipv4Addr::decrement_ttl(&mut packet);
    packet
}

#[test]
fn sent_packets_are_those_that_workers_send() {
    let seed = fastrand::u64(..);
    let mut bench = Bench::new(seed);
    let (mut taken_count, count) = (0, by_effort(100_000, 1_000_000));
    for _ in 0..count {
        let (pod, far) = (Ipv4Addr::new(10, 5, 1, 9), Ipv4Addr::new(10, 5, 2, 9));
        let mut packet = bench.packet(pod, far);
        bench.damage(&mut packet, 20);
        let parsed = Ipv4Header::parse(&packet);
        let verdict = parsed.map(|header| {
            let whole = &packet[..usize::from(header.total_bytes)];
            decide::egress(bench.host(), &header, whole, whole.len())
        });
        let taken = bench.run(&bench.out, &packet);
        let told = format!("seed {seed}: {verdict:?} {packet:02x?}");
        let (Ok(header), Ok(Ok(peer))) = (parsed, verdict) else {
            assert_eq!(taken, None, "workers would not send it: {told}");
            continue;
        };
        let (address, is_sent_to, _) = bench.kernels(header.destination).unwrap();
        let is_perhaps_ours = header.source == UNDERLAY && header.protocol == 17;
        // The peer's programs leave these alone, and then the sender's must, too.
        let is_for_worker = header.ttl == 2
            || bench.table.owner(header.destination.into()).unwrap().subnets.first_address()
                == header.destination;
        if is_common(&header, &packet) && is_sent_to && !is_perhaps_ours && !is_for_worker {
            assert!(taken.is_some(), "an ordinary packet goes the slow way: {told}");
        }
        let Some(sent) = taken else { continue };
        taken_count += 1;
        assert!(is_sent_to && is_common(&header, &packet) && !is_for_worker, "{told}");
        let (outer, inner) = sent.split_at(OUTER_BYTES);
        assert_eq!(inner, after_hop(&packet), "workers would send other bytes: {told}");
        let outer_header = Ipv4Header::parse(&sent).unwrap();
        assert_eq!((outer_header.source, outer_header.destination), (UNDERLAY, address), "{told}");
        assert_eq!(HostKey::from(address), peer.host);
        assert_eq!(usize::from(outer_header.total_bytes), sent.len());
        assert_eq!((outer_header.ttl, outer_header.protocol, outer[1]), (64, 17, 0));
        let udp_bytes = (sent.len() as u16 - 20).to_be_bytes();
        let port = PORT.to_be_bytes();
        assert_eq!(outer[20..], [port, port, udp_bytes, [0, 0]].concat(), "{told}");
    }
    assert!(taken_count > count / 20, "{taken_count} of {count}: the generator makes too few");
    let counts = bench.maps.counts().unwrap();
    let counted: u64 = (0..PEERS.len()).map(|number| counts.of(number as u32).packets_sent).sum();
    assert_eq!(counted, taken_count);
}

#[test]
fn delivered_packets_are_those_that_workers_deliver() {
    let seed = fastrand::u64(..);
    let mut bench = Bench::new(seed);
    let (mut taken_count, count) = (0, by_effort(100_000, 1_000_000));
    for _ in 0..count {
        let (_, sender, ..) = *bench.rng.choice(&PEERS).unwrap();
        let (far, pod) = (Ipv4Addr::new(10, 5, 2, 9), Ipv4Addr::new(10, 5, 1, 9));
        let sender = match bench.rng.u8(..8) {
            0 => bench.address(),
            1 => Ipv4Addr::from(sender),
            _ => Ipv4Addr::new(192, 0, 2, 2),
        };
        let mut packet = bench.packet(far, pod);
        bench.damage(&mut packet, 20);
        let source_port = match bench.rng.u8(..16) {
            0 => bench.rng.u16(..),
            1 => first_source_port(PORT) + bench.rng.u16(..SOURCE_PORTS),
            _ => PORT,
        };
        let mut payload = [source_port.to_be_bytes(), PORT.to_be_bytes()].concat();
        payload.extend((packet.len() as u16 + 8).to_be_bytes());
        let sum = if bench.rng.u8(..8) == 0 { bench.rng.u16(..) } else { 0 };
        payload.extend(sum.to_be_bytes());
        payload.extend(&packet);
        let mut datagram = ipv4(sender, UNDERLAY, 17, &payload);
        if bench.rng.u8(..8) == 0 {
            datagram[1] = bench.rng.u8(..);
        }
        if bench.rng.u8(..8) == 0 {
            datagram[8] = bench.rng.u8(..3);
        }
        seal(&mut datagram);
        bench.damage(&mut datagram, 28);
        let taken = bench.run(&bench.inward, &datagram);
        let accepted = stack_accepts(&datagram);
        let verdict = accepted.and_then(|(sender, inner)| {
            let header = Ipv4Header::parse(inner).ok()?;
            let whole = &inner[..usize::from(header.total_bytes)];
            let ecn = Ecn::of(datagram[1]);
            let host = bench.host();
            let verdict = decide::ingress(host, &sender.into(), ecn, &header, whole, &mut None);
            Some((sender, inner, header, verdict))
        });
        let told = format!("seed {seed}: {verdict:?} {datagram:02x?}");
        let Some((sender, inner, header, Ok(_))) = verdict else {
            assert_eq!(taken, None, "workers would not deliver it: {told}");
            continue;
        };
        let owner = bench.kernels(header.source);
        let is_received =
            owner.is_some_and(|(address, _, receive)| receive && address == *sender.ip());
        let is_unchecked = datagram[26..28] == [0, 0] && datagram[1] & 3 == 0;
        let is_whole = datagram.len() == inner.len() + OUTER_BYTES && datagram[6] & 0xbf == 0;
        let is_ours = [TUN, UNDERLAY].contains(&header.destination);
        // A node with programs announces no source ports: what comes from one is the workers'.
        let is_of_port = sender.port() == PORT;
        let ordinary =
            is_common(&header, inner) && is_received && is_unchecked && is_whole && is_of_port;
        assert_eq!(taken.is_some(), ordinary && !is_ours, "ordinary, and no others: {told}");
        if let Some(delivered) = taken {
            taken_count += 1;
            assert_eq!(delivered, after_hop(inner), "workers would deliver other bytes: {told}");
        }
    }
    assert!(taken_count > count / 20, "{taken_count} of {count}: the generator makes too few");
    let counts = bench.maps.counts().unwrap();
    let each = (0..PEERS.len()).map(|number| counts.of(number as u32).packets_received);
    assert_eq!(each.sum::<u64>(), taken_count);
}

/// The sender and the payload of a datagram that the IP stack would give the tunnel's socket,
/// checksums of UDP aside, which are 0 or wrong here.
fn stack_accepts(datagram: &[u8]) -> Option<(SocketAddrV4, &[u8])> {
    let header = Ipv4Header::parse(datagram).ok()?;
    let whole = &datagram[..usize::from(header.total_bytes)];
    let udp = whole.get(usize::from(header.header_bytes)..)?;
    let bytes = usize::from(u16::from_be_bytes([*udp.get(4)?, *udp.get(5)?]));
    let is_ours = header.destination == UNDERLAY
        && header.protocol == 17
        && udp.get(2..4)? == PORT.to_be_bytes();
    if header.is_fragment() || !is_ours || header.ttl == 0 {
        return None;
    }
    let source_port = u16::from_be_bytes([udp[0], udp[1]]);
    Some((SocketAddrV4::new(header.source, source_port), udp.get(8..bytes)?))
}

#[test]
fn nothing_is_taken_after_the_lease() {
    let bench = Bench::new(1);
    let packet = ipv4(Ipv4Addr::new(10, 5, 1, 9), Ipv4Addr::new(10, 5, 2, 9), 17, &[0; 16]);
    assert!(bench.run(&bench.out, &packet).is_some());
    bench.maps.publish(&settings(1)).unwrap();
    assert_eq!(bench.run(&bench.out, &packet), None, "a dead daemon's programs go on sending");
}

#[test]
fn fast_streams_of_small_datagrams_are_left_alone() {
    const SCTP: u8 = 132;
    let bench = Bench::new(1);
    let streams_until = |streams_until_ns| {
        let settings = Settings { streams_until_ns, ..settings(u64::MAX) };
        bench.maps.publish(&settings).unwrap();
    };
    let (pod, far) = (Ipv4Addr::new(10, 5, 1, 9), Ipv4Addr::new(10, 5, 2, 9));
    let packet = |protocol, bytes| ipv4(pod, far, protocol, &vec![0; bytes]);
    let small = packet(17, 16);
    let is_taken = |packet: &[u8]| bench.run(&bench.out, packet).is_some();
    // When its last packet was sent.
    let make_stream = || {
        let watch = Stopwatch::start();
        loop {
            let sent = Instant::now();
            if !is_taken(&small) {
                return sent;
            }
            let is_over = watch.is_over(Duration::from_secs(20));
            assert!(!is_over, "the kernel sends a stream one by one");
        }
    };
    streams_until(u64::MAX);
    make_stream();
    // Two flows of others, should one have the stream's place.
    let others = [7, 8].map(|host| ipv4(Ipv4Addr::new(10, 5, 1, host), far, 17, &[0; 16]));
    assert!(others.iter().any(|other| is_taken(other)), "a packet of another flow is left alone");
    let overtakes = without_a_pause(|| (make_stream(), is_taken(&packet(17, 600))));
    assert!(!overtakes, "a long datagram overtakes the stream that it is of");
    assert!(is_taken(&packet(6, 32)), "TCP would change its way");
    let pause = || thread::sleep(Duration::from_millis(150));
    pause();
    assert!(is_taken(&small), "after a pause nothing can be overtaken");
    pause();
    for _ in 0..1000 {
        assert!(is_taken(&packet(17, 600)), "long datagrams gain nothing from workers");
        assert!(is_taken(&packet(SCTP, 16)), "only datagrams are known to gain from workers");
    }
    for protocol in [17, SCTP] {
        let small = packet(protocol, 16);
        let mut fragment = packet(protocol, 600);
        fragment[6] = 0x20;
        seal(&mut fragment);
        for alone in [fragment, packet(protocol, 1500)] {
            let overtakes = without_a_pause(|| {
                pause();
                assert!(is_taken(&small));
                let sent = Instant::now();
                assert!(!is_taken(&alone), "workers cut it, or answer that it is too long");
                (sent, is_taken(&small))
            });
            assert!(!overtakes, "a packet overtakes one that a worker has");
        }
    }
    pause();
    make_stream();
    streams_until(1);
    assert!(is_taken(&small), "without a weftd nobody carries streams");
}

/// Whether a packet overtakes the one before it: `steps` send both, and give when the first was
/// sent as well. They are done again where a busy machine kept the test from running in between:
/// after such a pause a packet may overtake.
fn without_a_pause(steps: impl Fn() -> (Instant, bool)) -> bool {
    // Half of what is a pause to the programs.
    const PAUSE_MAX: Duration = Duration::from_millis(50);
    let watch = Stopwatch::start();
    loop {
        let (sent, overtakes) = steps();
        if sent.elapsed() < PAUSE_MAX {
            return overtakes;
        }
        let is_over = watch.is_over(Duration::from_secs(60));
        assert!(!is_over, "the machine has no time for two packets in a row");
    }
}

/// For BPF_PROG_TEST_RUN (include/uapi/linux/bpf.h): the leading members of `union bpf_attr`.
#[repr(C)]
struct TestRun {
    program: u32,
    result: u32,
    packet_bytes: u32,
    output_bytes: u32,
    packet: u64,
    output: u64,
    repeat: u32,
    duration_ns: u32,
}

/// Runs a classifier on an Ethernet frame: what it returns, and what it makes of the frame.
fn test_run(program: BorrowedFd<'_>, frame: &[u8], room: usize) -> (u32, Vec<u8>) {
    const PROGRAM_TEST_RUN: libc::c_int = 10;
    let mut output = vec![0; room];
    let mut attributes = TestRun {
        program: program.as_raw_fd() as u32,
        result: 0,
        packet_bytes: frame.len() as u32,
        output_bytes: room as u32,
        packet: frame.as_ptr() as u64,
        output: output.as_mut_ptr() as u64,
        repeat: 1,
        duration_ns: 0,
    };
    // SAFETY: the kernel reads `packet_bytes` of the frame, writes at most `output_bytes` to the
    // output, and reads and writes the attributes, of the size given; all outlive the call.
    let result = unsafe {
        let attributes = &raw mut attributes;
        libc::syscall(libc::SYS_bpf, PROGRAM_TEST_RUN, attributes, size_of::<TestRun>())
    };
    assert_eq!(result, 0, "BPF_PROG_TEST_RUN: {}", std::io::Error::last_os_error());
    output.truncate(attributes.output_bytes as usize);
    (attributes.result, output)
}
