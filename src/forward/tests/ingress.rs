//! From the network: what would be written to the TUN device, and where the rest is counted.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::forward::{GroBatch, Ingress};
use crate::offload::{CoalesceLimits, PartialChecksum, SegmentationKind, VnetHeader};
use crate::packet::Span;
use crate::packet::ecn::Ecn;

const ALL: CoalesceLimits = CoalesceLimits { tcp: true, udp_segments_max: 64 };
const NONE: CoalesceLimits = CoalesceLimits { tcp: false, udp_segments_max: 1 };

/// An ingress half with its arena, and the packets that it wrote.
pub(super) struct Walk {
    pub(super) world: World,
    pub(super) ingress: Ingress,
    /// Of the headers around what is received.
    pub(super) outer_ecn: Ecn,
    pub(super) written: Vec<Vec<u8>>,
    pub(super) writes: usize,
}

impl Walk {
    pub(super) fn new(limits: CoalesceLimits) -> Self {
        let ingress = Ingress::new(limits);
        let outer_ecn = Ecn::NotEct;
        Self { world: World::new(), ingress, outer_ecn, written: Vec::new(), writes: 0 }
    }

    /// Takes in `bytes` as datagrams of `segment_bytes`.
    pub(super) fn receive(&mut self, sender: SocketAddr, segment_bytes: usize, bytes: &[u8]) {
        let mut arena = bytes.to_vec();
        let batch = GroBatch {
            span: Span::new(0, bytes.len()),
            segment_bytes: segment_bytes as u16,
            sender,
            source: sender,
            ecn: self.outer_ecn,
        };
        let mut taken = self.ingress.process(&self.world.context(), &mut arena, batch);
        while taken.is_err() {
            self.write(&mut arena);
            taken = self.ingress.resume(&self.world.context(), &mut arena);
        }
        self.write(&mut arena);
    }

    /// A GRO batch of equal datagrams, the last possibly shorter.
    pub(super) fn receive_batch(&mut self, sender: SocketAddr, datagrams: &[Vec<u8>]) {
        let segment_bytes = datagrams[0].len();
        let last = datagrams.len() - 1;
        for (index, datagram) in datagrams.iter().enumerate() {
            let fits = datagram.len() == segment_bytes
                || index == last && (1..segment_bytes).contains(&datagram.len());
            assert!(fits, "datagram {index} makes it no GRO batch");
        }
        self.receive(sender, segment_bytes, &datagrams.concat());
    }

    pub(super) fn write(&mut self, arena: &mut [u8]) {
        let plan = &mut self.ingress.coalescer;
        plan.finish(arena);
        for index in 0..plan.items().len() {
            let spans = plan.unmerge(arena, index);
            self.written.extend(spans.map(|span| arena[span.range()].to_vec()));
        }
        self.writes += plan.items().len();
        plan.clear();
    }

    pub(super) fn errors(&mut self) -> Vec<(Option<SocketAddr>, Vec<u8>)> {
        let replies = &mut self.ingress.replies;
        let address = |endpoint| self.world.table.address(endpoint);
        let errors = replies.iter().map(|(to, bytes)| (to.map(address), bytes.to_vec()));
        let errors = errors.collect();
        replies.clear();
        errors
    }

    pub(super) fn conserved(&self) -> bool {
        let out = self.written.len() as u64 + self.world.stats.drops_total();
        self.world.stats.packets_received.get() == out
    }
}

/// A packet of one flow, `mark` in its payload, of 128 bytes in all.
fn marked(mark: u8) -> Vec<u8> {
    udp(FAR, POD, &[mark; 100])
}

fn hops(packets: &[Vec<u8>]) -> Vec<Vec<u8>> {
    packets.iter().map(|packet| hop(packet)).collect()
}

#[test]
fn a_gro_batch_is_written_as_one() {
    let mut walk = Walk::new(ALL);
    let packets: Vec<_> = (0..10).map(marked).collect();
    walk.receive_batch(PEER, &packets);
    assert_eq!(walk.written, hops(&packets));
    let stats = &walk.world.stats;
    assert_eq!((walk.writes, stats.reads.get(), stats.packets_received.get()), (1, 1, 10));
    assert_eq!(stats.bytes_received.get(), 1280);
}

#[test]
fn of_too_much_a_tcp_batch_loses_its_first_segment_and_another_all() {
    for is_tcp in [true, false] {
        let mut walk = Walk::new(ALL);
        walk.ingress.set_fill((6000, 8000));
        let packet = |number: u32| match is_tcp {
            true => tcp(FAR, POD, number * 100, &[7; 100]),
            false => marked(number as u8),
        };
        let packets: Vec<_> = (0..10).map(packet).collect();
        let mut kept_per_batch = BTreeSet::new();
        for _ in 0..100 {
            let kept = walk.written.len();
            walk.receive_batch(PEER, &packets);
            let kept = hops(&packets).split_off(10 + kept - walk.written.len());
            assert!(walk.written.ends_with(&kept), "other packets than the last ones");
            kept_per_batch.insert(kept.len());
        }
        let expected = if is_tcp { [9, 10] } else { [0, 10] };
        assert_eq!(kept_per_batch, BTreeSet::from(expected), "TCP: {is_tcp}");
        assert!(walk.conserved(), "packets vanish without a reason");
    }
}

/// Every malformed or forbidden kind of 128 bytes, with the reason for which it is dropped.
fn malformed() -> Vec<(Vec<u8>, DropReason)> {
    use DropReason as R;
    let mut broken = marked(0);
    broken[11] ^= 4;
    let nested = udp_with((9, 8285), (FAR, TUN), &[0; 100]);
    vec![
        (vec![0; 128], R::BadVersion),
        (with(marked(0), 0, &[0x65]), R::Ipv6),
        (with(marked(0), 0, &[0x40]), R::BadHeaderLength),
        (with(marked(0), 0, &[0x44]), R::BadHeaderLength),
        (with(marked(0), 2, &[0, 129]), R::BadTotalLength),
        (with(marked(0), 2, &[1, 0]), R::BadTotalLength),
        (with(marked(0), 2, &[0, 19]), R::BadTotalLength),
        (broken, R::BadChecksum),
        (with(marked(0), 8, &[0]), R::TtlZero),
        (with(marked(0), 8, &[1]), R::TtlExpired),
        (with(marked(0), 12, &[127, 0, 0, 1]), R::SourceMartian),
        (with(marked(0), 12, &TUN.octets()), R::SourceMartian),
        (with(marked(0), 12, &POD.octets()), R::SourceIsLocalSubnet),
        (with(marked(0), 12, &FARTHER.octets()), R::SourceNotPeerLease),
        (with(marked(0), 16, &[0, 0, 0, 1]), R::DestinationMartian),
        (with(marked(0), 16, &[224, 0, 0, 1]), R::DestinationMulticast),
        (with(marked(0), 16, &FARTHER.octets()), R::DestinationNotLocal),
        (nested, R::NestedTunnel),
    ]
}

/// A packet of 28 bytes with this type of service, time to live and checksum; no UDP checksum.
fn by_byte(type_of_service: u8, ttl: u8, checksum: [u8; 2]) -> Vec<u8> {
    let [high, low] = checksum;
    let ip = [0x45, type_of_service, 0, 28, 0, 0, 0x40, 0, ttl, 17, high, low];
    [&ip[..], &[10, 5, 2, 2, 10, 5, 1, 2], &[0x0f, 0xa0, 0x13, 0x88, 0, 8, 0, 0]].concat()
}

/// RFC 6040, section 4.2, byte by byte: the DSCP, 46 here, is the inner header's.
#[test]
fn marks_of_the_outer_header_reach_the_pod() {
    const NOT_ECT: (u8, [u8; 2]) = (0xb8, [0x23, 0x0c]);
    const ECT_1: (u8, [u8; 2]) = (0xb9, [0x23, 0x0b]);
    const ECT_0: (u8, [u8; 2]) = (0xba, [0x23, 0x0a]);
    const CE: (u8, [u8; 2]) = (0xbb, [0x23, 0x09]);
    // The inner header, and what becomes of it in one that is Not-ECT, ECT(1), ECT(0) and CE.
    let cases = [
        (NOT_ECT, [Some(NOT_ECT), Some(NOT_ECT), Some(NOT_ECT), None]),
        (ECT_1, [Some(ECT_1), Some(ECT_1), Some(ECT_1), Some(CE)]),
        (ECT_0, [Some(ECT_0), Some(ECT_1), Some(ECT_0), Some(CE)]),
        (CE, [Some(CE), Some(CE), Some(CE), Some(CE)]),
    ];
    for ((inner, checksum), row) in cases {
        for (outer, expected) in (0..).zip(row) {
            let mut walk = Walk::new(ALL);
            walk.outer_ecn = Ecn::of(outer);
            // Twice: of the second one the addresses are known.
            let packet = by_byte(inner, 64, checksum);
            walk.receive_batch(PEER, &[packet.clone(), packet]);
            // One hop on, which adds 0x100 to the checksum.
            let after = expected.map(|(byte, [high, low])| by_byte(byte, 63, [high + 1, low]));
            let about = format!("{inner:#04x} in {outer:02b}");
            assert_eq!(
                walk.written,
                after.iter().cycle().take(2).cloned().collect::<Vec<_>>(),
                "{about}"
            );
            let dropped =
                if expected.is_none() { vec![(DropReason::CongestionMark, 2)] } else { vec![] };
            assert_eq!(walk.world.drops(), dropped, "{about}");
            assert!(walk.conserved(), "{about}");
        }
    }
}

/// Packets are merged by the field that they leave with.
#[test]
fn marks_are_combined_before_packets_are_merged() {
    let capable = |mark: u8, byte: u8| with(marked(mark), 1, &[byte]);
    let mut walk = Walk::new(ALL);
    walk.outer_ecn = Ecn::Ce;
    walk.receive_batch(PEER, &[capable(0, 2), capable(1, 3), capable(2, 1)]);
    assert_eq!(walk.written, hops(&[capable(0, 3), capable(1, 3), capable(2, 3)]));
    assert_eq!(walk.writes, 1, "all three are marked now");

    // Three datagrams of one flow, equal inside, of which the second was marked.
    let mut walk = Walk::new(ALL);
    let mut arena: Vec<u8> = (0..3).flat_map(|mark| capable(mark, 2)).collect();
    for (index, ecn) in [Ecn::NotEct, Ecn::Ce, Ecn::Ect0].into_iter().enumerate() {
        let span = Span::new(index * 128, 128);
        let datagram = GroBatch { span, segment_bytes: 0, sender: PEER, source: PEER, ecn };
        let taken = walk.ingress.process(&walk.world.context(), &mut arena, datagram);
        assert_eq!(taken, Ok(()));
    }
    walk.write(&mut arena);
    assert_eq!(walk.written, hops(&[capable(0, 2), capable(1, 3), capable(2, 2)]));
    assert_eq!(walk.writes, 3, "a mark was given to others, or lost");
}

/// What was found of a GRO batch's first packet is not taken for granted of its next.
#[test]
fn bad_packets_between_good_ones_are_dropped() {
    for limits in [ALL, NONE] {
        let mut walk = Walk::new(limits);
        let (mut batch, mut good) = (Vec::new(), Vec::new());
        let mut expected = std::collections::BTreeMap::<DropReason, u64>::new();
        for (mark, (bytes, reason)) in malformed().into_iter().enumerate() {
            for half in 0..2 {
                let packet = marked((2 * mark + half) as u8);
                batch.push(packet.clone());
                good.push(packet);
                if half == 0 {
                    batch.push(bytes.clone());
                    *expected.entry(reason).or_default() += 1;
                }
            }
        }
        // The end of a GRO batch may be anything that is shorter.
        batch.push(vec![0x45; 7]);
        *expected.entry(DropReason::Runt).or_default() += 1;
        walk.receive_batch(PEER, &batch);
        assert_eq!(walk.written, hops(&good));
        assert_eq!(walk.world.drops(), expected.into_iter().collect::<Vec<_>>());
        assert!(walk.conserved());
        assert_eq!(walk.errors().len(), 1, "one expired, from an owner at its address");
    }
}

/// Options are looked at in each packet, whatever is known of its addresses.
#[test]
fn a_source_route_behind_another_packet_is_found() {
    let mut walk = Walk::new(ALL);
    let routed = with_options(udp(FAR, POD, &[1; 92]), &[131, 7, 4, 10, 5, 3, 9, 0]);
    let alert = with_options(udp(FAR, POD, &[2; 96]), &[148, 4, 0, 0]);
    walk.receive_batch(PEER, &[marked(0), routed, alert.clone(), marked(3)]);
    assert_eq!(walk.written, hops(&[marked(0), alert, marked(3)]));
    assert_eq!(walk.world.drops(), [(DropReason::SourceRoute, 1)]);
}

/// One flow, but the second segment has no options and ends before the first one's headers do.
#[test]
fn a_segment_shorter_than_headers_stays_alone() {
    for options in (4..=40).step_by(4) {
        let mut long = tcp(FAR, POD, 1, &vec![1; options + 1]);
        long[32] = (((20 + options) / 4) << 4) as u8;
        let segments = [long, tcp(FAR, POD, 2, b"y")];
        let mut walk = Walk::new(ALL);
        walk.receive_batch(PEER, &segments);
        assert_eq!(walk.written, hops(&segments), "{options} bytes of options");
        assert_eq!(walk.writes, 2);
    }
}

/// The two addresses that the tunnel owns depend on the port, so packet by packet.
#[test]
fn a_nested_packet_behind_another_is_found() {
    let mut walk = Walk::new(ALL);
    let innocent = udp_with((9, 53), (FAR, TUN), &[0; 100]);
    let nested = udp_with((9, 8285), (FAR, TUN), &[0; 100]);
    walk.receive_batch(PEER, &[innocent.clone(), nested, innocent.clone()]);
    assert_eq!(walk.written, hops(&[innocent.clone(), innocent]));
    assert_eq!(walk.world.drops(), [(DropReason::NestedTunnel, 1)]);
}

#[test]
fn damaged_transport_is_delivered_and_never_merged() {
    let damages: [(&str, usize, &[u8]); 5] = [
        ("UDP length too long", 24, &[0, 200]),
        ("UDP length too short", 24, &[0, 7]),
        ("UDP length of zero", 24, &[0, 0]),
        ("payload", 60, &[0xff]),
        ("UDP checksum absent", 26, &[0, 0]),
    ];
    for (name, at, bytes) in damages {
        for bad in 0..3 {
            let mut packets: Vec<_> = (0..3).map(marked).collect();
            packets[bad] = with(packets[bad].clone(), at, bytes);
            let mut walk = Walk::new(ALL);
            walk.receive_batch(PEER, &packets);
            assert_eq!(walk.written, hops(&packets), "{name} in packet {bad}");
            assert!(walk.writes >= 2, "{name} in packet {bad} was merged");
        }
    }
    let segments: Vec<_> = (0..3).map(|at| tcp(FAR, POD, 1 + at * 88, &[1; 88])).collect();
    for (name, byte) in [("data offset beyond the packet", 0xf0), ("data offset below 5", 0x40)] {
        for bad in 0..3 {
            let mut packets = segments.clone();
            // Cut to 20 bytes of payload, so that 60 bytes of header are too many.
            packets[bad] = with(packets[bad].clone(), 2, &[0, 60]);
            packets[bad][32] = byte;
            let expected: Vec<_> =
                packets.iter().map(|packet| hop(&packet[..usize::from(packet[3])])).collect();
            let mut walk = Walk::new(ALL);
            walk.receive_batch(PEER, &packets);
            assert_eq!(walk.written, expected, "{name} in packet {bad}");
            assert!(walk.writes >= 2, "{name} in packet {bad} was merged");
        }
    }
}

#[test]
fn padding_is_cut_off() {
    let mut walk = Walk::new(ALL);
    let packet = udp(FAR, POD, b"hello");
    walk.receive(PEER, 200, &[&packet[..], &[0xdd; 100]].concat());
    assert_eq!(walk.written, [hop(&packet)]);
}

/// By this the worker says of whom it heard, and which packet it was at when it panicked.
#[test]
fn what_was_delivered_is_told_once_and_a_panic_forgets_the_rest() {
    let mut walk = Walk::new(NONE);
    let packets = [marked(1), marked(2), marked(3)];
    let bytes = packets[0].len();
    walk.receive_batch(PEER, &packets);
    let delivered = walk.ingress.take_delivered();
    assert_eq!((delivered.packets, delivered.bytes), (3, 3 * bytes as u64));
    assert_eq!(walk.ingress.current, Span::new(2 * bytes, bytes));
    assert_eq!(walk.ingress.take_delivered().packets, 0);
    let mut arena = marked(4);
    let span = Span::new(0, bytes);
    let batch = GroBatch { span, segment_bytes: 0, sender: PEER, source: PEER, ecn: Ecn::NotEct };
    assert_eq!(walk.ingress.process(&walk.world.context(), &mut arena, batch), Ok(()));
    walk.ingress.abandon();
    assert_eq!(walk.ingress.take_delivered().packets, 0, "written twice, once by the next turn");
    walk.write(&mut arena);
    assert_eq!(walk.written.len(), 3, "a packet of the batch that panicked");
}

#[test]
fn an_empty_datagram_is_a_runt() {
    let mut walk = Walk::new(ALL);
    walk.receive(PEER, 0, &[]);
    assert_eq!(walk.world.drops(), [(DropReason::Runt, 1)]);
    walk.receive(PEER, 0, &marked(1));
    assert_eq!(walk.written, [hop(&marked(1))]);
    assert!(walk.conserved());
}

#[test]
fn an_unmerged_batch_is_written_in_rounds() {
    let mut walk = Walk::new(NONE);
    let packets: Vec<_> = (0..=255).map(marked).collect();
    walk.receive_batch(PEER, &packets);
    assert_eq!(walk.written, hops(&packets));
    assert_eq!(walk.writes, 256);
}

#[test]
fn errors_go_to_a_proven_owner_only() {
    let expired = with(marked(1), 8, &[1]);
    let unleased = with(expired.clone(), 12, &UNLEASED.octets());
    let mut walk = Walk::new(ALL);
    for (sender, packet) in [(STRANGER, &expired), (STRANGER, &unleased), (PEER, &unleased)] {
        walk.receive(sender, packet.len(), packet);
        assert!(walk.errors().is_empty(), "{sender} got an answer");
    }
    let other_port = SocketAddr::new(PEER.ip(), 40_000);
    walk.receive(other_port, expired.len(), &expired);
    let errors = walk.errors();
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0].0, Some(PEER), "to the lease's endpoint, not to the sender's port");
    assert_eq!(errors[0].1[12..20], [TUN.octets(), FAR.octets()].concat());
    for _ in 0..9 {
        walk.receive(PEER, expired.len(), &expired);
    }
    assert_eq!(walk.errors().len(), 5, "the burst to one source is six");
    let stats = &walk.world.stats;
    assert_eq!((stats.icmp_sent.get(), stats.icmp_limited.get()), (6, 4));
    assert_eq!(stats.drops(DropReason::TtlExpired), 13);
}

#[test]
fn no_error_about_icmp_errors_or_fragments() {
    let fragment = with(with(marked(1), 6, &[0, 5]), 8, &[1]);
    let error = with(ipv4(1, FAR, POD, &[11; 40]), 8, &[1]);
    let mut walk = Walk::new(ALL);
    for packet in [fragment, error] {
        walk.receive(PEER, packet.len(), &packet);
    }
    assert!(walk.errors().is_empty());
    assert_eq!(walk.world.stats.drops(DropReason::TtlExpired), 2);
}

fn any_datagram() -> impl Strategy<Value = Vec<u8>> {
    let addresses = [[10, 5, 2, 2], [10, 5, 1, 2], [10, 5, 3, 3], [10, 5, 1, 0], [127, 0, 0, 1]];
    let edit = (0usize..60, any::<u8>());
    (any::<u8>(), proptest::option::of(edit), any::<bool>(), 0usize..5, 0usize..5).prop_map(
        move |(mark, edit, repair, source, destination)| {
            let mut packet = marked(mark);
            // Mostly one flow, so that there is something to merge.
            if mark.is_multiple_of(4) {
                packet[12..16].copy_from_slice(&addresses[source]);
                packet[16..20].copy_from_slice(&addresses[destination]);
                packet = seal(packet);
            }
            if let Some((at, byte)) = edit {
                packet[at] = byte;
            }
            if repair { seal(packet) } else { packet }
        },
    )
}

/// The two fields combined by the words of RFC 6040, section 4.2, and the rest of the packet
/// written anew.
fn slow_exit(outer: u8, packet: &[u8]) -> Option<Vec<u8>> {
    let (not_ect, ect_1, ect_0, ce) = (0, 1, 2, 3);
    let inner = packet[1] & 3;
    let field = if outer == ce && inner == not_ect {
        return None;
    } else if outer == ce {
        ce
    } else if outer == ect_1 && inner == ect_0 {
        ect_1
    } else {
        inner
    };
    Some(hop(&with(packet.to_vec(), 1, &[packet[1] & !3 | field])))
}

proptest! {
    #[test]
    fn batches_leave_the_tunnel_as_their_slow_twin_says(
        batches in proptest::collection::vec(
            (proptest::collection::vec((any::<u8>(), any::<u8>()), 1..40), 0u8..4),
            1..6,
        ),
        merge in any::<bool>(),
    ) {
        let mut walk = Walk::new(if merge { ALL } else { NONE });
        let mut expected = Vec::new();
        for (packets, outer) in batches {
            let packets: Vec<_> =
                packets.into_iter().map(|(mark, byte)| with(marked(mark), 1, &[byte])).collect();
            walk.outer_ecn = Ecn::of(outer);
            walk.receive_batch(PEER, &packets);
            expected.extend(packets.iter().filter_map(|packet| slow_exit(outer, packet)));
            prop_assert!(walk.conserved());
        }
        prop_assert_eq!(walk.written, expected);
    }

    #[test]
    fn every_datagram_has_exactly_one_outcome(
        batches in proptest::collection::vec(
            (proptest::collection::vec(any_datagram(), 1..60), 0usize..4, 1usize..129, any::<u8>()),
            1..8,
        ),
        noise in proptest::collection::vec(any::<u8>(), 0..3000),
        noise_segment_bytes in any::<u16>(),
        merge in any::<bool>(),
    ) {
        let senders = [PEER, OTHER, STRANGER, US];
        let mut walk = Walk::new(if merge { ALL } else { NONE });
        let mut received = 0;
        for (mut batch, sender, last_bytes, outer) in batches {
            walk.outer_ecn = Ecn::of(outer);
            received += batch.len() as u64;
            batch.last_mut().unwrap().truncate(last_bytes);
            walk.receive(senders[sender], 128, &batch.concat());
            prop_assert!(walk.conserved());
            prop_assert_eq!(walk.world.stats.packets_received.get(), received);
        }
        walk.receive(PEER, usize::from(noise_segment_bytes), &noise);
        prop_assert!(walk.conserved());
        for packet in &walk.written {
            let header = crate::packet::ipv4::Ipv4Header::parse(packet);
            let whole = header.is_ok_and(|header| usize::from(header.total_bytes) == packet.len());
            prop_assert!(whole, "something malformed was written: {packet:?}");
        }
    }
}

/// As of a GRO batch of which the engine has the wrong range.
#[test]
fn a_span_beyond_the_arena_is_internal() {
    let mut walk = Walk::new(ALL);
    let mut arena = marked(0);
    let span = Span::new(0, 300);
    let batch = GroBatch { span, segment_bytes: 128, sender: PEER, source: PEER, ecn: Ecn::NotEct };
    let taken = walk.ingress.process(&walk.world.context(), &mut arena, batch);
    assert_eq!(taken, Ok(()));
    walk.write(&mut arena);
    assert_eq!(walk.written, [hop(&marked(0))]);
    assert_eq!(walk.world.drops(), [(DropReason::InternalError, 2)]);
}

/// What a host that shares the machine hands over: a whole super-packet, its checksum left to a
/// device that there is not.
#[test]
fn a_received_super_packet_is_written_as_one() {
    let data: Vec<u8> = (0..60_000_u32).map(|byte| byte as u8).collect();
    let whole = tcp(FAR, POD, 1, &data);
    let mut left = whole.clone();
    let sum = header::pseudo_header(FAR, POD, protocol::TCP, (left.len() - 20) as u16);
    left[36..38].copy_from_slice(&checksum::partial(sum));
    let mut walk = Walk::new(ALL);
    let mut arena = left.clone();
    let batch = |bytes: &[u8]| GroBatch {
        span: Span::new(0, bytes.len()),
        segment_bytes: 0,
        sender: PEER,
        source: PEER,
        ecn: Ecn::NotEct,
    };
    walk.ingress.process(&walk.world.context(), &mut arena, batch(&left)).unwrap();
    let plan = &mut walk.ingress.coalescer;
    plan.finish(&mut arena);
    assert_eq!((plan.items().len(), plan.items()[0].packets), (1, 1));
    let header = VnetHeader::parse(&plan.items()[0].vnet_header).unwrap();
    assert_eq!(header.checksum, Some(PartialChecksum { start: 20, offset: 16 }));
    let segmentation = header.segmentation.unwrap();
    assert_eq!(segmentation.kind, SegmentationKind::Tcp);
    assert_eq!(segmentation.payload_bytes.get(), MTU_BYTES - 40);
    assert_eq!(arena, hop(&left), "the device completes the checksums of what it cuts");
    // For a device that refuses it.
    let spans: Vec<_> = plan.unmerge(&mut arena, 0).collect();
    assert_eq!(spans, [Span::new(0, whole.len())]);
    assert_eq!(arena, hop(&whole));
    plan.clear();
    assert!(walk.world.drops().is_empty());

    // Nobody's damage is made to look right, and what fits is no super-packet.
    let mut damaged = whole;
    damaged[100] ^= 1;
    for packet in [damaged, tcp(FAR, POD, 1, &data[..1400])] {
        let mut arena = packet.clone();
        walk.ingress.process(&walk.world.context(), &mut arena, batch(&packet)).unwrap();
        let plan = &mut walk.ingress.coalescer;
        plan.finish(&mut arena);
        assert!(plan.items()[0].merged().is_none());
        assert_eq!(arena, hop(&packet));
        plan.clear();
    }
}
