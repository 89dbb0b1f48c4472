//! Splitting and coalescing against slow, obvious twins, and against each other: splitting what
//! was coalesced gives the received packets back. A failure here is a corrupted, reordered or
//! laundered packet in somebody's pod.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::net::Ipv4Addr;
use std::num::NonZeroU16;

use proptest::prelude::*;
use weft::offload::{
    CoalesceLimits, Coalescer, HEADER_BYTES_MAX, Segmentation, SegmentationKind, Splitter,
};
use weft::packet::Span;
use weft::packet::ipv4::Ipv4Header;

use crate::slow_twin::{as_the_kernel_cuts, by_flow, set_checksums, slow_split};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const CWR: u8 = 0x80;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// One packet as a sender means it.
#[derive(Debug, Clone)]
struct Spec {
    protocol: u8,
    flow: u8,
    tos: u8,
    ttl: u8,
    id: u16,
    dont_fragment: bool,
    ip_options: bool,
    tcp_options: usize,
    sequence: u32,
    acknowledgement: u32,
    flags: u8,
    window: u16,
    payload: Vec<u8>,
}

impl Spec {
    fn tcp(flow: u8, sequence: u32, id: u16, payload: Vec<u8>) -> Self {
        Self {
            protocol: TCP,
            flow,
            tos: 0,
            ttl: 62,
            id,
            dont_fragment: true,
            ip_options: false,
            tcp_options: 12,
            sequence,
            acknowledgement: 7,
            flags: ACK,
            window: 500,
            payload,
        }
    }

    fn build(&self) -> Vec<u8> {
        let ip_bytes = if self.ip_options { 24 } else { 20 };
        let mut packet = vec![0u8; ip_bytes];
        packet[0] = 0x40 | (ip_bytes / 4) as u8;
        packet[1] = self.tos;
        packet[4..6].copy_from_slice(&self.id.to_be_bytes());
        packet[6] = if self.dont_fragment { 0x40 } else { 0 };
        packet[8] = self.ttl;
        packet[9] = self.protocol;
        packet[12..16].copy_from_slice(&[10, 5, 1, 2]);
        packet[16..20].copy_from_slice(&[10, 5, 2, 2 + self.flow / 2]);
        let ports = [0x30, self.flow, 0x14, 0x51];
        packet.extend_from_slice(&ports);
        if self.protocol == TCP {
            packet.extend_from_slice(&self.sequence.to_be_bytes());
            packet.extend_from_slice(&self.acknowledgement.to_be_bytes());
            packet.extend_from_slice(&[(((20 + self.tcp_options) / 4) << 4) as u8, self.flags]);
            packet.extend_from_slice(&self.window.to_be_bytes());
            packet.extend_from_slice(&[0; 4]);
            packet.extend(std::iter::repeat_n(1, self.tcp_options));
        } else {
            packet.extend_from_slice(&((8 + self.payload.len()) as u16).to_be_bytes());
            packet.extend_from_slice(&[0; 2]);
        }
        packet.extend_from_slice(&self.payload);
        let total = packet.len() as u16;
        packet[2..4].copy_from_slice(&total.to_be_bytes());
        set_checksums(&mut packet);
        packet
    }
}

fn fast_split(packet: &[u8], kind: SegmentationKind, payload_bytes: u16) -> Vec<Vec<u8>> {
    let header = Ipv4Header::parse(packet).unwrap();
    let segmentation =
        Segmentation { kind, payload_bytes: NonZeroU16::new(payload_bytes).unwrap() };
    let span = Span::new(0, packet.len());
    let mut splitter = Splitter::new(span, packet, &header, segmentation).unwrap();
    let (expected, bytes) = (splitter.segments_left(), splitter.bytes_left());
    let mut segments = Vec::new();
    let mut out = [0; HEADER_BYTES_MAX];
    while let Some(payload) = splitter.next(packet, &mut out) {
        segments.push([&out[..splitter.header_bytes], &packet[payload.range()]].concat());
    }
    assert_eq!(segments.len(), expected, "the count that statistics use is wrong");
    assert_eq!(segments.iter().map(Vec::len).sum::<usize>(), bytes);
    segments
}

/// Everything that the TUN device would be given, cut again as the kernel would.
fn through_coalescer(packets: &[Vec<u8>], limits: CoalesceLimits) -> (Vec<Vec<u8>>, usize) {
    let mut arena: Vec<u8> = Vec::new();
    let spans: Vec<Span> = packets
        .iter()
        .map(|packet| {
            let span = Span::new(arena.len(), packet.len());
            arena.extend_from_slice(packet);
            span
        })
        .collect();
    let mut coalescer = Coalescer::new(limits);
    let mut out = Vec::new();
    let mut writes = 0;
    let mut flush = |coalescer: &mut Coalescer, arena: &mut Vec<u8>, out: &mut Vec<Vec<u8>>| {
        coalescer.finish(arena);
        for (index, item) in coalescer.items().iter().enumerate() {
            let written: Vec<u8> = coalescer
                .spans(index)
                .iter()
                .flat_map(|span| arena[span.range()].iter().copied())
                .collect();
            writes += 1;
            out.extend(as_the_kernel_cuts(&item.vnet_header, written, usize::from(item.packets)));
        }
        // A device that refuses super-packets gets the very packets that came.
        let mut again = arena.clone();
        for index in 0..coalescer.items().len() {
            let count = usize::from(coalescer.items()[index].packets);
            let mut seen = 0;
            for span in coalescer.unmerge(&mut again, index) {
                let packet = &again[span.range()];
                assert!(packets.iter().any(|p| p == packet), "unmerge made up a packet");
                seen += 1;
            }
            assert_eq!(seen, count);
        }
        coalescer.clear();
    };
    for span in &spans {
        let header = Ipv4Header::parse(&arena[span.range()]).unwrap();
        if coalescer.push(&arena, *span, &header).is_err() {
            flush(&mut coalescer, &mut arena, &mut out);
            coalescer.push(&arena, *span, &header).unwrap();
        }
    }
    flush(&mut coalescer, &mut arena, &mut out);
    (out, writes)
}

const ALL: CoalesceLimits = CoalesceLimits { tcp: true, udp_segments_max: 64 };
const NONE: CoalesceLimits = CoalesceLimits { tcp: false, udp_segments_max: 1 };

/// A stream in which most packets continue their flow and some don't.
fn stream() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let step = (0u8..4, 0u8..24, 0usize..4, any::<u16>());
    proptest::collection::vec(step, 1..300).prop_map(|steps| {
        let mut sequences = [1000u32, u32::MAX - 3000, 5, 9];
        let mut ids = [1u16, 65_530, 300, 400];
        let mut packets = Vec::new();
        for (flow, event, size, noise) in steps {
            let at = usize::from(flow);
            let payload_bytes = [1420, 1420, 700, 8][size];
            let payload = vec![noise as u8; payload_bytes];
            let mut spec = Spec::tcp(flow, sequences[at], ids[at], payload);
            if flow == 3 {
                spec.protocol = UDP;
            }
            let mut corrupt = None;
            match event {
                0 => spec.flags |= PSH,
                1 => spec.flags |= SYN,
                2 => spec.flags |= FIN,
                3 => spec.flags |= CWR,
                4 => spec.payload.clear(),
                5 => spec.window += 1,
                6 => spec.acknowledgement += 1,
                7 => spec.tos = 3,
                8 => spec.ttl -= 1,
                9 => spec.dont_fragment = false,
                10 => spec.sequence = spec.sequence.wrapping_add(1),
                11 => spec.ip_options = true,
                12 => spec.tcp_options = 20,
                13 => corrupt = Some(()),
                14 => spec.id = noise,
                _ => {}
            }
            sequences[at] = spec.sequence.wrapping_add(spec.payload.len() as u32);
            ids[at] = ids[at].wrapping_add(1);
            let mut packet = spec.build();
            if corrupt.is_some() {
                let last = packet.len() - 1;
                packet[last] ^= 0x5a;
            }
            packets.push(packet);
        }
        packets
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn cutting_equals_the_slow_twin(
        payload_bytes in 1usize..60_000,
        segment_bytes in 1u16..9000,
        flags in any::<u8>(),
        sequence in any::<u32>(),
        id in any::<u16>(),
        options in 0usize..11,
        ip_options in any::<bool>(),
        seed in any::<u8>(),
        udp in any::<bool>(),
    ) {
        // Thousands of one-byte segments prove no more than hundreds do.
        let payload_bytes = payload_bytes.min(usize::from(segment_bytes) * 200);
        let payload = (0..payload_bytes).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect();
        let mut spec = Spec::tcp(0, sequence, id, payload);
        spec.flags = flags;
        spec.tcp_options = options * 4;
        spec.ip_options = ip_options;
        let kind = if udp { SegmentationKind::Udp } else { SegmentationKind::Tcp };
        if udp {
            spec.protocol = UDP;
        }
        let packet = spec.build();
        let fast = fast_split(&packet, kind, segment_bytes);
        let slow = slow_split(&packet, kind, usize::from(segment_bytes));
        prop_assert_eq!(fast, slow);
    }

    #[test]
    fn cutting_undoes_merging_in_order(packets in stream()) {
        let (out, _) = through_coalescer(&packets, ALL);
        prop_assert_eq!(by_flow(&out), by_flow(&packets));
    }

    #[test]
    fn with_merging_off_packets_pass_untouched(packets in stream()) {
        let (out, writes) = through_coalescer(&packets, NONE);
        prop_assert_eq!(writes, packets.len());
        prop_assert_eq!(out, packets);
    }
}

fn plain_stream(count: u32) -> Vec<Spec> {
    (0..count).map(|i| Spec::tcp(0, 1 + i * 1420, i as u16, vec![i as u8; 1420])).collect()
}

fn built(specs: &[Spec]) -> Vec<Vec<u8>> {
    specs.iter().map(Spec::build).collect()
}

#[test]
fn a_bulk_stream_merges_45_packets() {
    let packets = built(&plain_stream(92));
    let (out, writes) = through_coalescer(&packets, ALL);
    assert_eq!(out.len(), 92);
    // 65,535 bytes less the header hold 46 segments.
    assert_eq!(writes, 2, "bulk TCP would cost more TUN writes than it must");
}

#[test]
fn acknowledgements_do_not_split_another_flow() {
    let mut specs = Vec::new();
    for data in plain_stream(20) {
        let mut acknowledgement = Spec::tcp(1, 9, data.id, Vec::new());
        acknowledgement.acknowledgement = data.sequence;
        specs.extend([data, acknowledgement]);
    }
    let (_, writes) = through_coalescer(&built(&specs), ALL);
    assert_eq!(writes, 21, "one super-packet and 20 acknowledgements were expected");
}

#[test]
fn udp_merges_up_to_the_limit() {
    let mut specs = plain_stream(130);
    for spec in &mut specs {
        spec.protocol = UDP;
        spec.payload.truncate(64);
    }
    let (out, writes) = through_coalescer(&built(&specs), ALL);
    assert_eq!((out.len(), writes), (130, 3), "64 + 64 + 2 datagrams were expected");
}

#[test]
fn a_wrong_checksum_is_never_laundered() {
    for bad in 0..3 {
        let mut packets = built(&plain_stream(3));
        packets[bad][60] ^= 1;
        let (out, _) = through_coalescer(&packets, ALL);
        assert_eq!(
            out[bad], packets[bad],
            "packet {bad} left with a checksum that hides its damage"
        );
    }
}

#[test]
fn each_gro_rule_keeps_packets_apart() {
    type Edit = fn(&mut Spec);
    let edits: [(&str, Edit); 11] = [
        ("type of service", |s| s.tos = 1),
        ("time to live", |s| s.ttl = 3),
        ("fragment bit", |s| s.dont_fragment = false),
        ("sequence gap", |s| s.sequence += 1),
        ("acknowledgement", |s| s.acknowledgement += 1),
        ("window", |s| s.window += 1),
        ("options", |s| s.tcp_options = 16),
        ("larger payload", |s| s.payload.push(0)),
        ("FIN", |s| s.flags |= FIN),
        ("CWR", |s| s.flags |= CWR),
        ("IP options", |s| s.ip_options = true),
    ];
    for (name, edit) in edits {
        let mut specs = plain_stream(2);
        edit(&mut specs[1]);
        let (_, writes) = through_coalescer(&built(&specs), ALL);
        assert_eq!(writes, 2, "packets that differ in {name} were merged");
    }
    let (_, writes) = through_coalescer(&built(&plain_stream(2)), ALL);
    assert_eq!(writes, 1, "the control merges");
}

/// The kernel's receive offload looks away here; a cut would give every packet the first's.
#[test]
fn an_urgent_pointer_keeps_packets_apart() {
    let mut packets = built(&plain_stream(3));
    packets[1][39] = 7;
    set_checksums(&mut packets[1]);
    let (out, writes) = through_coalescer(&packets, ALL);
    assert!(by_flow(&out) == by_flow(&packets), "a packet left with another's urgent pointer");
    assert_eq!(writes, 3);
}

#[test]
fn a_split_that_contradicts_its_packet_is_refused() {
    let packet = Spec::tcp(0, 1, 1, vec![0; 3000]).build();
    let header = Ipv4Header::parse(&packet).unwrap();
    let span = Span::new(0, packet.len());
    let payload_bytes = NonZeroU16::new(1000).unwrap();
    let udp = Segmentation { kind: SegmentationKind::Udp, payload_bytes };
    assert!(Splitter::new(span, &packet, &header, udp).is_none(), "TCP cut as UDP");
    let tcp = Segmentation { kind: SegmentationKind::Tcp, payload_bytes };
    let mut lying = packet.clone();
    lying[32] = 0xf0;
    assert!(Splitter::new(span, &lying, &header, tcp).is_some(), "60 bytes of TCP header fit");
    lying[32] = 0x40;
    assert!(Splitter::new(span, &lying, &header, tcp).is_none(), "16 bytes are no TCP header");
    let short = Ipv4Header { destination: Ipv4Addr::LOCALHOST, total_bytes: 30, ..header };
    assert!(Splitter::new(Span::new(0, 30), &packet[..30], &short, tcp).is_none());
}
