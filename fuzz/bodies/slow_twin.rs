//! The slow twin of segmentation and merging: plain copies, sums one word at a time. Shared by
//! the oracle tests and the fuzz targets, and never by the code that it judges.
#![allow(dead_code, reason = "each program uses its own part")]

use std::collections::HashMap;

use weft::offload::{SegmentationKind, VNET_HEADER_BYTES, VnetHeader};
use weft::packet::ipv4::Ipv4Header;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// RFC 1071, one word at a time.
pub(crate) fn word_sum(bytes: &[u8]) -> u32 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

/// The same of long payloads: a loop that the compiler turns into vector instructions, which a fuzz
/// target pays for once in 32 bytes and not with each word.
fn long_sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks_exact(2);
    let odd = words.remainder().first().map_or(0, |byte| u64::from(*byte) << 8);
    let sum = words.map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u64>();
    let sum = sum + odd;
    u32::from(fold((sum & 0xffff_ffff) as u32)) + u32::from(fold((sum >> 32) as u32))
}

pub(crate) fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Makes the header and transport checksums right.
pub(crate) fn set_checksums(packet: &mut [u8]) {
    mend(packet, true, true);
}

/// Makes the checksum of the IPv4 `header` right, and that of TCP or UDP behind it, of packets that
/// chance has shaped: where there is room for them.
pub(crate) fn mend(packet: &mut [u8], header: bool, transport: bool) {
    let header_bytes = packet.first().map_or(0, |first| usize::from(first & 15) * 4);
    if packet.len() < 20 || !(20..=packet.len()).contains(&header_bytes) {
        return;
    }
    let field = match packet[9] {
        TCP => header_bytes + 16,
        UDP => header_bytes + 6,
        _ => usize::MAX - 2,
    };
    if transport && field + 2 <= packet.len() {
        packet[field..field + 2].fill(0);
        let length_bytes = (packet.len() - header_bytes).min(0xffff) as u32;
        let pseudo = word_sum(&packet[12..20]) + u32::from(packet[9]) + length_bytes;
        let sum = !fold(pseudo + long_sum(&packet[header_bytes..]));
        let sum = if packet[9] == UDP && sum == 0 { 0xffff } else { sum };
        packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    }
    if header {
        packet[10..12].fill(0);
        let sum = !fold(word_sum(&packet[..header_bytes]));
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    }
}

/// What the kernel's segmentation would make of a super-packet, by plain copying.
pub(crate) fn slow_split(
    packet: &[u8],
    kind: SegmentationKind,
    payload_bytes: usize,
) -> Vec<Vec<u8>> {
    let ip = usize::from(packet[0] & 15) * 4;
    let header = ip
        + match kind {
            SegmentationKind::Tcp => usize::from(packet[ip + 12] >> 4) * 4,
            SegmentationKind::Udp => 8,
        };
    let chunks: Vec<&[u8]> = packet[header..].chunks(payload_bytes).collect();
    let mut segments = Vec::new();
    for (index, chunk) in chunks.iter().enumerate() {
        let mut segment = [&packet[..header], chunk].concat();
        let total = segment.len() as u16;
        segment[2..4].copy_from_slice(&total.to_be_bytes());
        let id = u16::from_be_bytes([packet[4], packet[5]]).wrapping_add(index as u16);
        segment[4..6].copy_from_slice(&id.to_be_bytes());
        match kind {
            SegmentationKind::Tcp => {
                let first: [u8; 4] = packet[ip + 4..ip + 8].try_into().expect("four bytes");
                let sequence =
                    u32::from_be_bytes(first).wrapping_add((index * payload_bytes) as u32);
                segment[ip + 4..ip + 8].copy_from_slice(&sequence.to_be_bytes());
                if index + 1 < chunks.len() {
                    segment[ip + 13] &= !(FIN | PSH);
                }
                if index > 0 {
                    segment[ip + 13] &= !CWR;
                }
            }
            SegmentationKind::Udp => {
                let length = (segment.len() - ip) as u16;
                segment[ip + 4..ip + 6].copy_from_slice(&length.to_be_bytes());
            }
        }
        set_checksums(&mut segment);
        segments.push(segment);
    }
    segments
}

/// The packets that the kernel makes of one write to the TUN device.
pub(crate) fn as_the_kernel_cuts(
    vnet: &[u8; VNET_HEADER_BYTES],
    written: Vec<u8>,
    packets: usize,
) -> Vec<Vec<u8>> {
    let header = VnetHeader::parse(vnet).expect("the kernel would refuse this offload header");
    let Some(segmentation) = header.segmentation else {
        assert_eq!(packets, 1);
        return vec![written];
    };
    let checksum = header.checksum.expect("a super-packet needs its checksum completed");
    let (start, offset) = (usize::from(checksum.start), usize::from(checksum.offset));
    let mut pseudo = word_sum(&written[12..20]) + u32::from(written[9]);
    pseudo += (written.len() - start) as u32;
    let stored = [written[start + offset], written[start + offset + 1]];
    assert_eq!(u16::from_be_bytes(stored), fold(pseudo), "wrong pseudo-header sum");
    assert!(Ipv4Header::parse(&written).is_ok(), "the kernel would drop the super-packet");
    let payload_bytes = usize::from(segmentation.payload_bytes.get());
    let segments = slow_split(&written, segmentation.kind, payload_bytes);
    assert_eq!(segments.len(), packets);
    segments
}

/// The identification of a packet that must not be fragmented means nothing (RFC 6864).
pub(crate) fn normalised(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if packet[6] & 0x40 != 0 {
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    packet
}

/// Packets by addresses, ports and protocol.
type Flows = HashMap<(Vec<u8>, Vec<u8>, u8), Vec<Vec<u8>>>;

/// Packets by flow, in order.
pub(crate) fn by_flow(packets: &[Vec<u8>]) -> Flows {
    let mut flows = Flows::new();
    for packet in packets {
        let ip = usize::from(packet[0] & 15) * 4;
        let key = (
            packet[12..20].to_vec(),
            packet.get(ip..ip + 4).unwrap_or_default().to_vec(),
            packet[9],
        );
        flows.entry(key).or_default().push(normalised(packet));
    }
    flows
}
