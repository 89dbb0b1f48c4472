//! One input of the `vnet_split` target: an offload header and the packet behind it.
//!
//! The first byte says how much of the packet is made right, so that inputs get past the parse:
//! version and header length, total length, protocol and addresses, the header checksum. Ten
//! bytes of offload header and the packet follow. What the splitter takes must come out as the
//! slow twin cuts it.

use weft::offload::{HEADER_BYTES_MAX, SegmentationKind, Splitter, VnetHeader};
use weft::packet::Span;
use weft::packet::ipv4::Ipv4Header;

use crate::slow_twin;

/// Segments compared of one input: thousands of one byte each prove no more than hundreds.
const SEGMENTS_MAX: usize = 300;

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let [repairs, rest @ ..] = data else { return };
    let Some((vnet_header, packet)) = rest.split_first_chunk() else { return };
    let packet = repaired(packet.to_vec(), *repairs);
    let Some(segmentation) = VnetHeader::parse(vnet_header).and_then(|h| h.segmentation) else {
        return;
    };
    let Ok(header) = Ipv4Header::parse(&packet) else { return };
    let packet = &packet[..usize::from(header.total_bytes)];
    let whole = Span::new(0, packet.len());
    let Some(mut splitter) = Splitter::new(whole, packet, &header, segmentation) else { return };
    let (segments, bytes) = (splitter.segments_left(), splitter.bytes_left());
    let largest_bytes = splitter.segment_bytes_max();
    if segments > SEGMENTS_MAX {
        return;
    }
    let mut out = [0; HEADER_BYTES_MAX];
    let mut cut = Vec::new();
    while let Some(payload) = splitter.next(packet, &mut out) {
        cut.push([&out[..splitter.header_bytes], &packet[payload.range()]].concat());
    }
    assert_eq!(cut.len(), segments, "the count that statistics use is wrong");
    assert_eq!(cut.iter().map(Vec::len).sum::<usize>(), bytes);
    assert_eq!(cut.iter().map(Vec::len).max(), Some(largest_bytes));
    let payload_bytes = usize::from(segmentation.payload_bytes.get());
    assert_eq!(cut, slow_twin::slow_split(packet, segmentation.kind, payload_bytes));
    let header_bytes = splitter.header_bytes;
    let payloads: Vec<u8> =
        cut.iter().flat_map(|segment| segment[header_bytes..].iter().copied()).collect();
    assert_eq!(payloads, packet[header_bytes..], "payload was lost or made up");
    let is_tcp = segmentation.kind == SegmentationKind::Tcp;
    assert_eq!(is_tcp, header.protocol == 6, "cut as another protocol");
}

/// Makes parts of `packet` right, by the bits of `repairs`.
fn repaired(mut packet: Vec<u8>, repairs: u8) -> Vec<u8> {
    if packet.len() < 20 {
        return packet;
    }
    if repairs & 1 != 0 {
        packet[0] = 0x45 + if repairs & 0x10 != 0 { packet[0] % 4 } else { 0 };
    }
    if repairs & 2 != 0 {
        let total_bytes = packet.len().min(0xffff) as u16;
        packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        packet[6] &= 0x40;
        packet[7] = 0;
    }
    if repairs & 4 != 0 {
        packet[9] = if repairs & 0x20 != 0 { 17 } else { 6 };
    }
    slow_twin::mend(&mut packet, repairs & 8 != 0, false);
    packet
}
