//! Header views, verification and completion on literal bytes, against a slow word loop.

use super::*;
use crate::packet::ipv4::Ipv4Header;

/// A packet from 10.5.1.2 to 10.5.2.3 around `payload`; `fragment` is the flags-and-offset
/// word. Checksums by the slow word loop.
fn packet(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let total_bytes = (20 + payload.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend(total_bytes.to_be_bytes());
    packet.extend([0x12, 0x34]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0, 10, 5, 1, 2, 10, 5, 2, 3]);
    let field = (!word_loop(&packet)).to_be_bytes();
    packet[10..12].copy_from_slice(&field);
    packet.extend(payload);
    packet
}

fn word_loop(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match pair {
        [high, low] => u32::from(*high) << 8 | u32::from(*low),
        _ => u32::from(pair[0]) << 8,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn pseudo_bytes(protocol: u8, length_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![10, 5, 1, 2, 10, 5, 2, 3, 0, protocol];
    bytes.extend((length_bytes as u16).to_be_bytes());
    bytes
}

fn with_checksum(protocol: u8, mut payload: Vec<u8>, offset: usize) -> Vec<u8> {
    payload[offset..offset + 2].fill(0);
    let covered = [pseudo_bytes(protocol, payload.len()), payload.clone()].concat();
    payload[offset..offset + 2].copy_from_slice(&(!word_loop(&covered)).to_be_bytes());
    payload
}

fn tcp(data: &[u8]) -> Vec<u8> {
    let mut segment = vec![0x12, 0x34, 0x00, 0x50, 1, 2, 3, 4, 5, 6, 7, 8, 0x69, 0x92];
    segment.extend([0xab, 0xcd, 0, 0, 0x11, 0x22, 2, 4, 5, 0xb4]);
    segment.extend(data);
    with_checksum(protocol::TCP, segment, TCP_CHECKSUM_OFFSET)
}

fn udp(data: &[u8]) -> Vec<u8> {
    let mut datagram = vec![0x12, 0x34, 0x00, 0x35];
    datagram.extend(((8 + data.len()) as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(data);
    with_checksum(protocol::UDP, datagram, UDP_CHECKSUM_OFFSET)
}

fn verified(packet: &[u8]) -> bool {
    is_verified(&Ipv4Header::parse(packet).unwrap(), packet)
}

#[test]
fn a_tcp_header_is_read() {
    let segment = tcp(b"data");
    let header = TcpHeader::parse(&segment).unwrap();
    let expected = TcpHeader { header_bytes: 24, sequence: 0x0102_0304, reserved: 9, flags: 0x92 };
    assert_eq!(header, expected);
    assert!(TcpHeader::parse(&segment[..24]).is_some());
    assert!(TcpHeader::parse(&segment[..23]).is_none(), "options beyond the segment");
    assert!(TcpHeader::parse(&segment[..19]).is_none());
    let mut short_offset = segment.clone();
    short_offset[12] = 0x40;
    assert!(TcpHeader::parse(&short_offset).is_none(), "data offset below 5 words");
}

#[test]
fn a_udp_length_must_be_the_datagrams() {
    let datagram = [0x12, 0x34, 0, 53, 0, 9, 0xab, 0xcd, 0xff];
    assert!(udp_header(&datagram).is_some());
    assert!(udp_header(&datagram[..8]).is_none());
    assert!(udp_header(&[&datagram[..], &[0]].concat()).is_none());
    assert!(udp_header(&[0, 0, 0, 0, 0, 7, 0]).is_none(), "a header cut short");
}

#[test]
fn one_flipped_bit_spoils_a_checksum() {
    for (protocol, payload) in [(6, tcp(b"odd")), (17, udp(b"even"))] {
        let good = packet(protocol, 0x4000, &payload);
        assert!(verified(&good));
        for bit in 0..payload.len() * 8 {
            let mut flipped = good.clone();
            flipped[20 + bit / 8] ^= 1 << (bit % 8);
            assert!(!verified(&flipped), "protocol {protocol}, bit {bit}");
        }
    }
}

#[test]
fn addresses_are_covered_by_the_checksum() {
    for at in 12..20 {
        let mut moved = packet(6, 0, &tcp(b""));
        moved[at] ^= 4;
        moved[10..12].fill(0);
        let field = (!word_loop(&moved[..20])).to_be_bytes();
        moved[10..12].copy_from_slice(&field);
        assert!(!verified(&moved), "address byte {at}");
    }
}

#[test]
fn what_has_no_checksum_is_not_verified() {
    let mut none = udp(b"data");
    none[6..8].fill(0);
    assert!(!verified(&packet(17, 0, &none)));
    assert!(!verified(&packet(1, 0, &[8, 0, 1, 2])));
    assert!(!verified(&packet(132, 0, &[])));
    assert!(!verified(&packet(17, 0x2000, &none)), "first fragment");
    assert!(!verified(&packet(6, 0x0001, &[1])), "later fragment");
}

#[test]
fn contradicting_lengths_are_invalid() {
    let resum = |mut datagram: Vec<u8>, length: u16| {
        datagram[4..6].copy_from_slice(&length.to_be_bytes());
        with_checksum(protocol::UDP, datagram, UDP_CHECKSUM_OFFSET)
    };
    assert!(verified(&packet(17, 0, &resum(udp(b"data"), 12))));
    assert!(!verified(&packet(17, 0, &resum(udp(b"data"), 11))));
    assert!(!verified(&packet(17, 0, &resum(udp(b"data"), 13))));
    let mut absent = resum(udp(b"data"), 11);
    absent[6..8].fill(0);
    assert!(!verified(&packet(17, 0, &absent)), "neither length nor checksum");
    assert!(!verified(&packet(17, 0, &[0; 7])));
    let mut segment = tcp(b"");
    segment[12] = 0x70;
    let segment = with_checksum(protocol::TCP, segment, TCP_CHECKSUM_OFFSET);
    assert!(!verified(&packet(6, 0, &segment)), "data offset beyond the segment");
    assert!(!verified(&packet(6, 0, &[0; 19])));
    let good = packet(6, 0, &tcp(b"data"));
    let header = Ipv4Header::parse(&good).unwrap();
    assert!(!is_verified(&header, &good[..good.len() - 1]), "cut off after parsing");
    let padded = [&good[..], &[1, 2, 3]].concat();
    assert!(is_verified(&header, &padded), "padding is not covered");
}

/// As the kernel leaves it: the pseudo sum, folded but not complemented, in the field.
fn unfinished(protocol: u8, mut payload: Vec<u8>, offset: usize) -> Vec<u8> {
    let pseudo = word_loop(&pseudo_bytes(protocol, payload.len()));
    payload[offset..offset + 2].copy_from_slice(&pseudo.to_be_bytes());
    packet(protocol, 0x4000, &payload)
}

#[test]
fn unfinished_checksums_are_completed() {
    for length in 0..200u8 {
        let data: Vec<u8> = (0..length).map(|byte| byte.wrapping_mul(37)).collect();
        let mut segment = unfinished(6, tcp(&data), TCP_CHECKSUM_OFFSET);
        assert_eq!(complete(&mut segment, 20, TCP_CHECKSUM_OFFSET), Some(()));
        assert_eq!(segment, packet(6, 0x4000, &tcp(&data)), "TCP, {length} bytes");
        let mut datagram = unfinished(17, udp(&data), UDP_CHECKSUM_OFFSET);
        assert_eq!(complete(&mut datagram, 20, UDP_CHECKSUM_OFFSET), Some(()));
        assert_eq!(datagram, packet(17, 0x4000, &udp(&data)), "UDP, {length} bytes");
    }
}

#[test]
fn only_a_checksum_that_was_left_is_completed() {
    for (protocol, offset, payload) in [
        (protocol::TCP, TCP_CHECKSUM_OFFSET, tcp(b"abc")),
        (protocol::UDP, UDP_CHECKSUM_OFFSET, udp(b"abcd")),
    ] {
        let right = packet(protocol, 0x4000, &payload);
        let complete = |mut packet: Vec<u8>| {
            let header = Ipv4Header::parse(&packet).unwrap();
            if let Some(offset) = left_checksum(&header, &packet) {
                complete(&mut packet, 20, offset).unwrap();
            }
            packet
        };
        let left = unfinished(protocol, payload, offset);
        assert_eq!(complete(left.clone()), right);
        assert_eq!(complete(right.clone()), right);
        let mut damaged = right;
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(complete(damaged.clone()), damaged, "a damaged packet is made to look right");
        let fragment = packet(protocol, 0x2000, &left[20..]);
        assert_eq!(complete(fragment.clone()), fragment, "a fragment has not all that is summed");
    }
}

#[test]
fn a_zero_udp_checksum_becomes_ones() {
    // The data cancels everything else out: its word is the complement of their sum.
    let rest = [pseudo_bytes(17, 10), udp(&[0, 0])[..6].to_vec()].concat();
    let data = (!word_loop(&rest)).to_be_bytes();
    assert_eq!(udp(&data)[6..8], [0, 0], "the plain checksum is zero");
    let mut datagram = unfinished(17, udp(&data), UDP_CHECKSUM_OFFSET);
    complete(&mut datagram, 20, UDP_CHECKSUM_OFFSET).unwrap();
    assert_eq!(datagram[26..28], [0xff, 0xff]);
    assert!(verified(&datagram));
}

/// The header that the kernel left to be completed is the inner one; the protocol is the tunnel's.
#[test]
fn a_tunneled_zero_udp_checksum_becomes_ones() {
    for (protocol, inner) in [(4, 20), (47, 24)] {
        let mut payload = vec![0; inner + 10];
        // All that is covered sums to 0xffff, whose complement is zero.
        payload[inner..inner + 2].fill(0xff);
        let mut edited = packet(protocol, 0, &payload);
        complete(&mut edited, 20 + inner, UDP_CHECKSUM_OFFSET).unwrap();
        let field = 20 + inner + UDP_CHECKSUM_OFFSET;
        assert_eq!(edited[field..field + 2], [0xff, 0xff], "protocol {protocol}");
    }
}

#[test]
fn only_a_udp_checksum_of_zero_is_replaced() {
    // (protocol, offset of the field): zero is as good as any value here, and stays.
    for (protocol, offset) in [(6, TCP_CHECKSUM_OFFSET), (17, TCP_CHECKSUM_OFFSET)] {
        // All that is covered sums to 0xffff, whose complement is zero.
        let mut payload = vec![0; 20];
        payload[..2].fill(0xff);
        let mut edited = packet(protocol, 0, &payload);
        edited[20 + offset..22 + offset].fill(0);
        complete(&mut edited, 20, offset).unwrap();
        assert_eq!(edited, packet(protocol, 0, &payload), "protocol {protocol}, offset {offset}");
    }
}

#[test]
fn a_field_outside_the_packet_stays_unwritten() {
    let whole = packet(17, 0, &udp(b"data"));
    let length = whole.len();
    for (start, offset) in
        [(length - 1, 0), (length, 0), (length + 1, 0), (20, length - 21), (usize::MAX, 6)]
    {
        let mut edited = whole.clone();
        assert_eq!(complete(&mut edited, start, offset), None);
        assert_eq!(edited, whole);
    }
    assert!(complete(&mut whole.clone(), 20, usize::MAX).is_none());
    assert!(complete(&mut whole.clone(), length - 2, 0).is_some(), "the last two bytes");
    assert!(complete(&mut [], 0, 0).is_none());
}

/// A segment with these flags and options.
fn opening(flags: u8, options: &[u8]) -> Vec<u8> {
    let mut segment = tcp(b"");
    segment.truncate(TCP_HEADER_BYTES_MIN);
    segment[13] = flags;
    segment.extend(options);
    segment.resize(segment.len().next_multiple_of(4), 0);
    segment[12] = (segment.len() as u8 / 4) << 4;
    segment.extend(b"early data");
    packet(6, 0, &with_checksum(6, segment, TCP_CHECKSUM_OFFSET))
}

fn limited(packet: &[u8], packet_bytes: u16) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let header = Ipv4Header::parse(&packet).unwrap();
    limit_segment_size(&header, &mut packet, packet_bytes, false);
    packet
}

#[test]
fn a_segment_size_is_lowered_wherever_it_lies() {
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..10_000 {
        // Nothing, timestamps, a window's scale, one that nobody knows.
        let others: [&[u8]; 4] = [&[1], &[8, 10, 1, 2, 3, 4, 5, 6, 7, 8], &[3, 3, 7], &[99, 2]];
        let mut options = Vec::new();
        (0..rng.usize(..4)).for_each(|_| options.extend(others[rng.usize(..4)]));
        let (at, offered) = (options.len(), rng.u16(500..2000));
        options.extend([2, 4]);
        options.extend(offered.to_be_bytes());
        if rng.bool() {
            options.extend(others[rng.usize(..4)]);
        }
        if options.len() > 40 {
            continue;
        }
        let before = opening(tcp_flags::SYN | rng.u8(..) & tcp_flags::ACK, &options);
        let after = limited(&before, 1232);
        assert!(verified(&before) && verified(&after), "its receiver drops it: {after:02x?}");
        let size_at = 20 + 20 + at + 2;
        assert_eq!(after[size_at..size_at + 2], offered.min(1232 - 40).to_be_bytes());
        let others = |packet: &[u8]| {
            let mut packet = packet.to_vec();
            packet[size_at..size_at + 2].fill(0);
            packet[20 + TCP_CHECKSUM_OFFSET..][..2].fill(0);
            packet
        };
        assert_eq!(others(&before), others(&after), "something else was changed");
    }
}

#[test]
fn what_offers_no_segment_size_or_opens_nothing_is_left_alone() {
    let size = [2, 4, 5, 0xb4];
    for (name, packet) in [
        ("no SYN", opening(tcp_flags::ACK, &size)),
        ("no options", opening(tcp_flags::SYN, &[])),
        ("behind the end of options", opening(tcp_flags::SYN, &[0, 0, 0, 0, 2, 4, 5, 0xb4])),
        ("of another length", opening(tcp_flags::SYN, &[2, 5, 5, 0xb4, 1])),
        ("beyond the options", opening(tcp_flags::SYN, &[1, 1, 2, 4])),
        ("a length of nothing", opening(tcp_flags::SYN, &[7, 0, 7, 1])),
        ("a length beyond the options", opening(tcp_flags::SYN, &[7, 200, 2, 4, 5, 0xb4])),
        ("small enough", opening(tcp_flags::SYN, &[2, 4, 4, 0xa8])),
        ("of UDP", packet(17, 0, &udp(&[2; 40]))),
    ] {
        assert_eq!(limited(&packet, 1232), packet, "{name}");
    }
    let mut fragment = packet(6, 0x2000, &opening(tcp_flags::SYN, &size)[20..]);
    let before = fragment.clone();
    let header = Ipv4Header::parse(&fragment).unwrap();
    limit_segment_size(&header, &mut fragment, 1232, false);
    assert_eq!(fragment, before, "a fragment");
    // The sum that the kernel left counts no bytes of the segment.
    let mut left = opening(tcp_flags::SYN, &size);
    let field = left[20 + TCP_CHECKSUM_OFFSET..][..2].to_vec();
    limit_segment_size(&Ipv4Header::parse(&left).unwrap(), &mut left, 1232, true);
    assert_eq!(
        (&left[42..44], &left[20 + TCP_CHECKSUM_OFFSET..][..2]),
        (&[4, 0xa8][..], &field[..])
    );
}
