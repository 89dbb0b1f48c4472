//! One input of the `coalesce_roundtrip` target: a stream of packets, merged and cut again.
//!
//! Records of six bytes: flow, size, what breaks the flow, where to change a byte (two), and to
//! what. Cutting what was merged must give back every flow's packets in order, and unmerging the
//! very bytes.

use weft::offload::{CoalesceLimits, Coalescer, Piece};
use weft::packet::ipv4::Ipv4Header;

use crate::slow_twin;

const RECORD_BYTES: usize = 6;

/// Packets of one input; more than a plan holds writes.
const PACKETS_MAX: usize = 300;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// What one flow sends next.
#[derive(Clone, Copy)]
struct Flow {
    sequence: u32,
    id: u16,
}

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let [limits, records @ ..] = data else { return };
    let limits =
        CoalesceLimits { tcp: limits & 1 != 0, udp_segments_max: u16::from(limits >> 1).max(1) };
    let mut flows = [Flow { sequence: u32::MAX - 2000, id: u16::MAX - 3 }; 4];
    let (records, _) = records.as_chunks::<RECORD_BYTES>();
    let packets = records.iter().take(PACKETS_MAX).map(|record| packet(&mut flows, record));
    let packets: Vec<Vec<u8>> = packets.filter_map(trimmed).collect();
    let out = merged_and_cut(&packets, limits);
    assert_eq!(out.len(), packets.len());
    let flows = |packets: &[Vec<u8>]| {
        let packets: Vec<_> = packets.iter().map(|packet| one_zero(packet)).collect();
        slow_twin::by_flow(&packets)
    };
    assert_eq!(flows(&out), flows(&packets));
}

/// The record's packet; mostly the next one of its flow.
fn packet(flows: &mut [Flow; 4], record: &[u8; RECORD_BYTES]) -> Vec<u8> {
    let [flow_number, size, event, at_high, at_low, value] = *record;
    let flow = &mut flows[usize::from(flow_number % 4)];
    let is_udp = flow_number % 4 == 3;
    let payload_bytes = [1420, 700, 64, 9, 1][usize::from(size % 5)];
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 62, if is_udp { UDP } else { TCP }, 0, 0];
    packet[4..6].copy_from_slice(&flow.id.to_be_bytes());
    packet[6] = if flow_number & 0x10 != 0 { 0 } else { 0x40 };
    packet.extend([10, 5, 2, 2, 10, 5, 1, 2 + flow_number % 2]);
    packet.extend([0x30, flow_number % 4, 0x14, 0x51]);
    if is_udp {
        packet.extend((8 + payload_bytes as u16).to_be_bytes());
        packet.extend([0, 0]);
    } else {
        packet.extend(flow.sequence.to_be_bytes());
        let flags = if event & 7 == 7 { 0x18 } else { 0x10 };
        packet.extend([0, 0, 0, 9, 0x60, flags, 2, 0, 0, 0, 0, 0, 1, 1, 1, 0]);
    }
    packet.extend((0..payload_bytes).map(|byte| (byte as u8).wrapping_add(value)));
    let total_bytes = packet.len() as u16;
    packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    flow.id = flow.id.wrapping_add(1);
    flow.sequence = flow.sequence.wrapping_add(payload_bytes as u32);
    slow_twin::set_checksums(&mut packet);
    if event & 0x80 != 0 {
        let at = usize::from(u16::from_be_bytes([at_high, at_low]) % total_bytes.min(96));
        packet[at] = value;
        let still_itself = packet[0] == 0x45 && packet[9] == if is_udp { UDP } else { TCP };
        if event & 0x40 != 0 && still_itself {
            slow_twin::set_checksums(&mut packet);
        }
    }
    packet
}

/// The packet without padding; `None` if it is none that would get this far.
fn trimmed(mut packet: Vec<u8>) -> Option<Vec<u8>> {
    let header = Ipv4Header::parse(&packet).ok()?;
    packet.truncate(usize::from(header.total_bytes));
    Some(packet)
}

/// Both zeroes of one's complement arithmetic are right in a header's and in TCP's checksum.
fn one_zero(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let tcp_at = usize::from(packet[0] & 15) * 4 + 16;
    for at in [Some(10), (packet[9] == TCP).then_some(tcp_at)].into_iter().flatten() {
        if packet.get(at..at + 2) == Some(&[0xff, 0xff]) {
            packet[at..at + 2].fill(0);
        }
    }
    packet
}

fn merged_and_cut(packets: &[Vec<u8>], limits: CoalesceLimits) -> Vec<Vec<u8>> {
    let mut arena: Vec<u8> = Vec::new();
    let mut coalescer = Coalescer::new(limits);
    let mut out = Vec::new();
    let mut pending = Vec::new();
    for packet in packets {
        let piece = Piece::new(arena.len(), packet.len());
        arena.extend_from_slice(packet);
        let header = Ipv4Header::parse(packet).expect("it was parsed before");
        if coalescer.push(&arena, piece, &header).is_err() {
            flush(&mut coalescer, &mut arena, &mut pending, &mut out);
            coalescer.push(&arena, piece, &header).expect("the plan is empty");
        }
        pending.push(packet.clone());
    }
    flush(&mut coalescer, &mut arena, &mut pending, &mut out);
    out
}

/// Writes the plan, as the kernel would take it, and checks that it can be taken back.
fn flush(
    coalescer: &mut Coalescer,
    arena: &mut [u8],
    pending: &mut Vec<Vec<u8>>,
    out: &mut Vec<Vec<u8>>,
) {
    coalescer.finish(arena);
    let mut unmerged = Vec::new();
    let mut again = arena.to_vec();
    for (index, item) in coalescer.items().iter().enumerate() {
        let parts = coalescer.pieces(index).iter().flat_map(|piece| &arena[piece.range()]);
        let written = parts.copied().collect();
        let packets = usize::from(item.packets);
        out.extend(slow_twin::as_the_kernel_cuts(&item.vnet_header, written, packets));
        coalescer.unmerge(&mut again, index, |packet| unmerged.push(one_zero(packet)));
    }
    let mut expected: Vec<_> = pending.drain(..).map(|packet| one_zero(&packet)).collect();
    expected.sort();
    unmerged.sort();
    assert_eq!(unmerged, expected, "unmerging made up a packet or lost one");
    coalescer.clear();
}
