//! From the TUN device: what the plan holds, byte for byte, and where the rest is counted.

use proptest::prelude::*;

use super::*;
use crate::forward::Egress;
use crate::offload::{
    Full, PartialChecksum, SEGMENTS_MAX, Segmentation, SegmentationKind, SendPlan,
    VNET_HEADER_BYTES, VnetHeader,
};
use crate::packet::Span;

const ROOM_BYTES: usize = 1 << 16;
const WHOLE: [u8; VNET_HEADER_BYTES] = [0; VNET_HEADER_BYTES];
const GSO: u16 = SEGMENTS_MAX as u16;

/// An egress half with its arena, and the datagrams that it sent.
pub(super) struct Walk {
    pub(super) world: World,
    pub(super) egress: Egress,
    pub(super) arena: Vec<u8>,
    pub(super) sent: Vec<(SocketAddr, Vec<u8>)>,
    pub(super) rounds: usize,
}

impl Walk {
    pub(super) fn new(segments_max: u16, headers_bytes: usize) -> Self {
        let egress = Egress::filling(SendPlan::new(segments_max), ROOM_BYTES..usize::MAX);
        let arena = vec![0xa5; ROOM_BYTES + headers_bytes];
        Self { world: World::new(), egress, arena, sent: Vec::new(), rounds: 0 }
    }

    pub(super) fn plain() -> Self {
        Self::new(GSO, ROOM_BYTES)
    }

    pub(super) fn read(&mut self, vnet_header: [u8; VNET_HEADER_BYTES], packet: &[u8]) {
        self.arena[..packet.len()].copy_from_slice(packet);
        let span = Span::new(0, packet.len());
        let mut taken =
            self.egress.process(&self.world.context(), &mut self.arena, &vnet_header, span);
        while taken == Err(Full) {
            assert!(!self.egress.plan.messages().is_empty(), "full without anything to send");
            self.send();
            taken = self.egress.resume(&self.world.context(), &mut self.arena);
        }
        self.send();
    }

    pub(super) fn send(&mut self) {
        let plan = &self.egress.plan;
        for (index, message) in plan.messages().iter().enumerate() {
            let before = self.sent.len();
            for spans in plan.datagrams(index) {
                let parts = spans.iter().flat_map(|span| &self.arena[span.range()]);
                self.sent.push((
                    self.world.table.address(message.destination),
                    parts.copied().collect(),
                ));
            }
            let datagrams = &self.sent[before..];
            assert_eq!(datagrams.len(), usize::from(message.segments));
            let bytes: usize = datagrams.iter().map(|(_, datagram)| datagram.len()).sum();
            assert_eq!(bytes, message.bytes as usize);
        }
        self.rounds += usize::from(!plan.messages().is_empty());
        self.egress.sent();
    }

    pub(super) fn errors(&mut self) -> Vec<Vec<u8>> {
        let replies = &mut self.egress.replies;
        let errors = replies
            .iter()
            .map(|(endpoint, bytes)| {
                assert_eq!(endpoint, None, "errors about pods' packets go to the device");
                bytes.to_vec()
            })
            .collect();
        replies.clear();
        errors
    }

    /// Every packet taken in was planned or dropped.
    pub(super) fn conserved(&self) -> bool {
        let out = self.sent.len() as u64 + self.world.stats.drops_total();
        self.world.stats.packets_received.get() == out
    }
}

fn offload(kind: SegmentationKind, segment_bytes: u16) -> [u8; VNET_HEADER_BYTES] {
    let offset = if kind == SegmentationKind::Tcp { 16 } else { 6 };
    let checksum = Some(PartialChecksum { start: 20, offset });
    let payload_bytes = segment_bytes.try_into().unwrap();
    VnetHeader { checksum, segmentation: Some(Segmentation { kind, payload_bytes }) }
        .encode::<Ipv4Addr>(40)
}

fn payload(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 % 251) as u8).collect()
}

#[test]
fn a_packet_loses_one_hop_and_its_padding() {
    let mut walk = Walk::plain();
    let packet = udp(POD, FAR, b"hello");
    let padded = [&packet[..], &[0xdd; 18]].concat();
    walk.read(WHOLE, &padded);
    assert_eq!(walk.sent, [(PEER, hop(&packet))]);
    let stats = &walk.world.stats;
    assert_eq!((stats.packets_received.get(), stats.reads.get()), (1, 1));
    assert_eq!(stats.bytes_received.get(), packet.len() as u64, "padding is no traffic");
}

#[test]
fn a_partial_checksum_is_completed() {
    for (packet, offset) in
        [(udp(POD, FAR, &payload(33)), 6u16), (tcp(POD, FAR, 5, &payload(32)), 16)]
    {
        let mut partial = packet.clone();
        let at = 20 + usize::from(offset);
        let length_bytes = (packet.len() - 20) as u16;
        let pseudo = header::pseudo_header(POD, FAR, packet[9], length_bytes);
        partial[at..at + 2].copy_from_slice(&checksum::finish(pseudo).map(|byte| !byte));
        let checksum = Some(PartialChecksum { start: 20, offset });
        let mut walk = Walk::plain();
        walk.read(VnetHeader { checksum, segmentation: None }.encode::<Ipv4Addr>(0), &partial);
        assert_eq!(walk.sent, [(PEER, hop(&packet))]);
    }
}

#[test]
fn a_contradicting_offload_header_is_counted() {
    use SegmentationKind::{Tcp, Udp};
    let segment = tcp(POD, FAR, 5, &payload(3000));
    let datagram = udp(POD, FAR, &payload(3000));
    let partial = |start, offset| {
        let checksum = Some(PartialChecksum { start, offset });
        VnetHeader { checksum, segmentation: None }.encode::<Ipv4Addr>(0)
    };
    let fragment = with(datagram.clone(), 6, &[0x20, 0]);
    let long_header = with(segment.clone(), 2, &[0, 50]);
    let cases = [
        ("TCP cut as UDP", offload(Udp, 1000), segment.clone()),
        ("UDP cut as TCP", offload(Tcp, 1000), datagram.clone()),
        ("a fragment cut", offload(Udp, 1000), fragment),
        ("no payload to cut", offload(Tcp, 1000), tcp(POD, FAR, 5, &[])),
        ("data offset below 5", offload(Tcp, 1000), with(segment.clone(), 32, &[0x40])),
        ("data offset beyond the packet", offload(Tcp, 9), with(long_header, 32, &[0xf0])),
        ("segments of no size", [0, 1, 0, 0, 0, 0, 0, 0, 0, 0], segment.clone()),
        ("unknown type", [0, 3, 0, 0, 9, 0, 0, 0, 0, 0], segment),
        ("checksum start beyond the packet", partial(4000, 6), datagram.clone()),
        ("checksum field beyond the packet", partial(20, 3010), datagram.clone()),
        ("checksum start at the IPv4 header", partial(0, 16), datagram.clone()),
        ("checksum start in the IPv4 header", partial(19, 0), datagram),
    ];
    for (name, vnet_header, packet) in cases {
        let mut walk = Walk::plain();
        walk.world.local.mtu_bytes = u16::MAX;
        walk.read(vnet_header, &packet);
        assert_eq!(walk.world.drops(), [(DropReason::BadOffloadHeader, 1)], "{name}");
        assert_eq!(walk.sent, [], "{name}");
    }
}

#[test]
fn a_super_packet_counts_as_its_packets() {
    let bytes = payload(10_000);
    let cases = [
        (POD, FAR, 64, vec![]),
        (POD, UNLEASED, 64, vec![(DropReason::NoRoute, 10)]),
        (POD, FAR, 1, vec![(DropReason::TtlExpired, 10)]),
        (POD, FAR, 0, vec![(DropReason::TtlZero, 10)]),
        (Ipv4Addr::LOCALHOST, FAR, 64, vec![(DropReason::SourceMartian, 10)]),
    ];
    for (source, destination, ttl, drops) in cases {
        let mut walk = Walk::plain();
        let packet = with(tcp(source, destination, 1, &bytes), 8, &[ttl]);
        walk.read(offload(SegmentationKind::Tcp, 1000), &packet);
        let stats = &walk.world.stats;
        assert_eq!((stats.packets_received.get(), stats.reads.get()), (10, 1));
        assert_eq!(stats.bytes_received.get(), 10_000 + 10 * 40);
        assert_eq!(walk.world.drops(), drops);
        assert!(walk.conserved());
    }
}

#[test]
fn the_largest_segment_must_fit_the_tunnel() {
    for (segment_bytes, fits) in [(1432, true), (1433, false)] {
        let mut walk = Walk::plain();
        let packet = tcp(POD, FAR, 1, &payload(10_000));
        walk.read(offload(SegmentationKind::Tcp, segment_bytes), &packet);
        let stats = &walk.world.stats;
        assert_eq!(stats.drops(DropReason::DontFragmentMtu), if fits { 0 } else { 7 });
        assert_eq!(walk.sent.len(), if fits { 7 } else { 0 });
        let errors = walk.errors();
        assert_eq!(errors.len(), usize::from(!fits));
        if let [error] = &errors[..] {
            assert_eq!(error[24..28], [0, 0, 5, 0xc0], "the MTU told is 1472");
            assert_eq!(error.len(), 576, "as much is quoted as fits");
        }
    }
}

/// The same datagrams leave, in the same order, however little room there is.
#[test]
fn full_header_room_loses_no_segment() {
    for kind in [SegmentationKind::Tcp, SegmentationKind::Udp] {
        let bytes = payload(32_000);
        let packet = match kind {
            SegmentationKind::Tcp => tcp(POD, FAR, u32::MAX - 9, &bytes),
            SegmentationKind::Udp => udp(POD, FAR, &bytes),
        };
        let mut unlimited = Walk::new(GSO, 1 << 20);
        unlimited.read(offload(kind, 8), &packet);
        assert_eq!((unlimited.sent.len(), unlimited.rounds), (4000, 1));
        for headers_bytes in [40, 41, 79, 80, 1000, ROOM_BYTES] {
            for segments_max in [GSO, 1, 3] {
                let mut walk = Walk::new(segments_max, headers_bytes);
                walk.read(offload(kind, 8), &packet);
                assert!(walk.rounds > 1, "{headers_bytes} bytes: the room was never full");
                assert!(walk.sent == unlimited.sent, "{kind:?}, {headers_bytes} bytes: differs");
                assert!(walk.conserved());
            }
        }
    }
}

#[test]
fn plain_packets_that_fill_the_plan_lose_nothing() {
    let mut walk = Walk::new(1, ROOM_BYTES);
    let packets: Vec<_> = (0..150u8).map(|mark| udp(POD, FAR, &[mark; 40])).collect();
    let mut at = 0;
    for packet in &packets {
        // All of them lie in the arena before the first is sent.
        walk.arena[at..at + packet.len()].copy_from_slice(packet);
        let span = Span::new(at, packet.len());
        let context = walk.world.context();
        let mut taken = walk.egress.process(&context, &mut walk.arena, &WHOLE, span);
        while taken == Err(Full) {
            walk.send();
            taken = walk.egress.resume(&walk.world.context(), &mut walk.arena);
        }
        at += packet.len();
    }
    walk.send();
    let sent: Vec<_> = walk.sent.into_iter().map(|(_, datagram)| datagram).collect();
    assert_eq!(sent, packets.iter().map(|packet| hop(packet)).collect::<Vec<_>>());
    assert_eq!(walk.rounds, 3);
}

#[test]
fn errors_come_from_the_next_hop() {
    let mut walk = Walk::plain();
    walk.read(WHOLE, &udp(POD, UNLEASED, b"x"));
    walk.read(WHOLE, &with(udp(POD, FAR, b"x"), 8, &[1]));
    let errors = walk.errors();
    let told: Vec<_> = errors.iter().map(|error| (&error[12..20], error[20], error[21])).collect();
    let to_pod = |source: [u8; 4]| [source, POD.octets()].concat();
    assert_eq!(told[0], (&to_pod([10, 5, 99, 0])[..], 3, 0));
    assert_eq!(told[1], (&to_pod([10, 5, 2, 0])[..], 11, 0));
    assert_eq!(errors[0][28..], udp(POD, UNLEASED, b"x"), "quoted as it arrived");
    assert_eq!(walk.world.stats.icmp_sent.get(), 2);
}

#[test]
fn twelve_classes_are_dropped_without_an_answer() {
    let about = |packet: Vec<u8>| with(packet, 16, &UNLEASED.octets());
    let icmp = |kind: u8| ipv4(1, POD, UNLEASED, &[kind, 0, 0, 0, 0, 0, 0, 0]);
    let udp = || udp(POD, UNLEASED, &[0; 32]);
    let mut broken = udp();
    broken[10] ^= 0x40;
    let classes = [
        ("destination unreachable", icmp(3)),
        ("source quench", icmp(4)),
        ("redirect", icmp(5)),
        ("time exceeded", icmp(11)),
        ("parameter problem", icmp(12)),
        ("later fragment", about(with(udp(), 6, &[0, 9]))),
        ("multicast destination", with(udp(), 16, &[224, 1, 1, 1])),
        ("broadcast destination", with(udp(), 16, &[255; 4])),
        ("source in 0/8", with(udp(), 12, &[0; 4])),
        ("source in 127/8", with(udp(), 12, &[127, 0, 0, 1])),
        ("source in class D or E", with(udp(), 12, &[241, 1, 1, 1])),
        ("failed header", broken),
    ];
    let mut walk = Walk::plain();
    for (class, packet) in &classes {
        for ttl in [1, 64] {
            let fails = *class == "failed header";
            let packet = if fails { packet.clone() } else { with(packet.clone(), 8, &[ttl]) };
            walk.read(WHOLE, &packet);
            assert_eq!(walk.errors(), [[0u8; 0]; 0], "{class}");
        }
    }
    assert_eq!(walk.world.stats.drops_total(), 24);
    let stats = &walk.world.stats;
    assert_eq!((stats.icmp_sent.get(), stats.icmp_limited.get()), (0, 0));
    // The control: one packet of no such class is answered.
    walk.read(WHOLE, &udp());
    assert_eq!(walk.errors().len(), 1);
}

/// A sender of many flows learns the path's MTU for each of its destinations at once.
#[test]
fn fragmentation_needed_is_never_limited() {
    let mut walk = Walk::plain();
    for host in 0..150 {
        let large = udp(POD, Ipv4Addr::new(10, 5, 2, host), &payload(1445));
        walk.read(WHOLE, &with(large, 8, &[1 + host % 2 * 63]));
    }
    let errors = walk.errors();
    let of_kind = |kind: u8, code: u8| errors.iter().filter(|e| e[20..22] == [kind, code]).count();
    assert_eq!((of_kind(3, 4), of_kind(11, 0)), (75, 6));
    let stats = &walk.world.stats;
    assert_eq!((stats.icmp_sent.get(), stats.icmp_limited.get()), (81, 69));
}

#[test]
fn errors_are_limited_by_destination_and_over_all() {
    let mut walk = Walk::plain();
    for _ in 0..10 {
        walk.read(WHOLE, &udp(POD, UNLEASED, b"x"));
    }
    assert_eq!(walk.errors().len(), 6, "the burst to one source");
    assert_eq!(walk.world.stats.icmp_limited.get(), 4);
    let from = |host: u8| udp(Ipv4Addr::new(10, 5, 1, host), UNLEASED, b"x");
    for host in 10..60 {
        walk.read(WHOLE, &from(host));
    }
    assert_eq!(walk.errors().len(), 50 - 6, "the burst over all");
    for host in 60..100 {
        walk.read(WHOLE, &from(host));
    }
    assert_eq!(walk.errors().len(), 0, "the burst is used up");
    walk.world.now_ns += 10_000_000;
    for host in 100..140 {
        walk.read(WHOLE, &from(host));
    }
    assert_eq!(walk.errors().len(), 10, "one a millisecond");
    let stats = &walk.world.stats;
    assert_eq!(stats.icmp_sent.get(), 60);
    assert_eq!(stats.icmp_limited.get(), 140 - 60);
    assert_eq!(stats.drops(DropReason::NoRoute), 140);
}

/// Bytes that get past the first checks more often than noise would.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let packet = prop_oneof![
        (0usize..3000).prop_map(|bytes| udp(POD, FAR, &payload(bytes))),
        (0usize..3000).prop_map(|bytes| tcp(POD, FAR, 9, &payload(bytes))),
        (0usize..60).prop_map(|bytes| ipv4(1, POD, UNLEASED, &payload(bytes))),
    ];
    let edits = proptest::collection::vec((0usize..60, any::<u8>()), 0..4);
    let damaged = (packet, edits, any::<bool>()).prop_map(|(mut packet, edits, repair)| {
        for (at, byte) in edits {
            let at = at % packet.len();
            packet[at] = byte;
        }
        if repair { seal(packet) } else { packet }
    });
    prop_oneof![proptest::collection::vec(any::<u8>(), 0..200), damaged.clone(), damaged]
}

fn any_offload() -> impl Strategy<Value = [u8; VNET_HEADER_BYTES]> {
    let kind = prop_oneof![Just(0u8), Just(1), Just(4), Just(5), Just(0x81), any::<u8>()];
    let start = prop_oneof![Just(20u16), 0u16..64, any::<u16>()];
    (0u8..2, kind, any::<u16>(), 0u16..2000, start, 0u16..24).prop_map(
        |(flags, kind, header_bytes, segment_bytes, start, offset)| {
            let mut bytes = [0; VNET_HEADER_BYTES];
            [bytes[0], bytes[1]] = [flags, kind];
            bytes[2..4].copy_from_slice(&header_bytes.to_le_bytes());
            bytes[4..6].copy_from_slice(&segment_bytes.to_le_bytes());
            bytes[6..8].copy_from_slice(&start.to_le_bytes());
            bytes[8..10].copy_from_slice(&offset.to_le_bytes());
            bytes
        },
    )
}

proptest! {
    #[test]
    fn every_packet_has_exactly_one_outcome(
        reads in proptest::collection::vec((any_offload(), plausible()), 1..20),
    ) {
        let mut walk = Walk::new(GSO, 4096);
        for (vnet_header, packet) in &reads {
            walk.read(*vnet_header, packet);
            prop_assert!(walk.conserved());
        }
        prop_assert_eq!(walk.world.stats.reads.get(), reads.len() as u64);
        for (_, datagram) in &walk.sent {
            let header = crate::packet::ipv4::Ipv4Header::parse(datagram);
            let whole = header.is_ok_and(|h| usize::from(h.total_bytes) == datagram.len());
            prop_assert!(whole, "a malformed datagram left: {datagram:?}");
        }
    }
}

#[test]
fn a_panic_forgets_what_was_planned() {
    let mut walk = Walk::plain();
    let packet = udp(POD, FAR, b"hello");
    walk.arena[..packet.len()].copy_from_slice(&packet);
    let span = Span::new(0, packet.len());
    let taken = walk.egress.process(&walk.world.context(), &mut walk.arena, &WHOLE, span);
    assert_eq!((taken, walk.egress.current), (Ok(()), span));
    assert_eq!(walk.egress.plan.messages().len(), 1);
    walk.egress.abandon();
    assert!(walk.egress.plan.messages().is_empty(), "it is sent though it may be half done");
}

#[test]
fn what_the_device_could_not_hand_over_is_counted() {
    let walk = Walk::plain();
    walk.egress.unreadable(&walk.world.context());
    assert_eq!(walk.world.drops(), [(DropReason::BadOffloadHeader, 1)]);
    assert_eq!((walk.world.stats.reads.get(), walk.world.stats.unaccounted()), (1, 0));
}

/// No engine reads past its arena; if one did, the packet would be lost and no more.
#[test]
fn a_span_beyond_the_arena_is_internal() {
    let mut walk = Walk::plain();
    for span in [Span::new(walk.arena.len() - 10, 11), Span::new(walk.arena.len() + 1, 28)] {
        let taken = walk.egress.process(&walk.world.context(), &mut walk.arena, &WHOLE, span);
        assert_eq!(taken, Ok(()));
    }
    assert_eq!(walk.world.drops(), [(DropReason::InternalError, 2)]);
    assert_eq!(walk.world.stats.unaccounted(), 0);
}
