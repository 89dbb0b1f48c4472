//! Headers on literal bytes: parsing, and each edit beside the same header sealed anew.

use super::*;

/// A UDP packet of 28 bytes from 10.5.1.2 to 10.5.2.3.
fn packet() -> [u8; 28] {
    let mut packet = [0; 28];
    packet[..20].copy_from_slice(&[
        0x45, 0xb9, 0, 28, 0x12, 0x34, 0x40, 0, 64, 17, 0, 0, 10, 5, 1, 2, 10, 5, 2, 3,
    ]);
    seal(&mut packet);
    packet
}

/// Recomputes the header checksum.
fn seal(packet: &mut [u8]) {
    let header_bytes = usize::from(packet[0] & 0x0f) * 4;
    packet[10..12].fill(0);
    let field = checksum::finish(checksum::sum(&packet[..header_bytes]));
    packet[10..12].copy_from_slice(&field);
}

#[test]
fn every_field_is_read() {
    let header = Ipv4Header::parse(&packet()).unwrap();
    let expected = Ipv4Header {
        header_bytes: 20,
        ecn: Ecn::Ect1,
        total_bytes: 28,
        id: 0x1234,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset_bytes: 0,
        ttl: 64,
        protocol: protocol::UDP,
        source: Ipv4Addr::new(10, 5, 1, 2),
        destination: Ipv4Addr::new(10, 5, 2, 3),
    };
    assert_eq!(header, expected);
    assert!(!header.is_fragment());
}

#[test]
fn source_routes_are_found_where_linux_finds_them() {
    let route = [131, 7, 4, 10, 5, 3, 9];
    let cases: [(&[u8], bool); 12] = [
        (&[], false),
        (&route, true),
        (&[137, 7, 4, 10, 5, 3, 9], true),
        (&[1, 1, 1, 131, 3, 4], true),
        (&[148, 4, 0, 0, 131, 3, 4], true),
        (&[7, 3, 4, 137], true),
        (&[131], true),
        (&[148, 4, 131, 3], false),
        (&[0, 131, 3, 4], false),
        (&[148, 1, 131, 3, 4], false),
        (&[148, 0, 131, 3, 4], false),
        (&[148, 40, 131, 3, 4], false),
    ];
    for (options, expected) in cases {
        let mut bytes = packet()[..20].to_vec();
        bytes.extend(options);
        bytes.resize(20 + options.len().next_multiple_of(4), 0);
        // Behind the header is payload, whatever it looks like.
        let header_bytes = bytes.len() as u16;
        bytes.extend(route);
        let header = Ipv4Header { header_bytes, ..Ipv4Header::parse(&packet()).expect("a header") };
        assert_eq!(Ipv4Addr::has_source_route(&header, &bytes), expected, "{options:?}");
    }
}

#[test]
fn fragments() {
    // (flags and offset, More Fragments, offset in bytes, any fragment, later fragment)
    let cases = [
        ([0x20, 0x00], true, 0, true, false),
        ([0x20, 0x01], true, 8, true, true),
        ([0x00, 0xb9], false, 1480, true, true),
        ([0x1f, 0xff], false, 65_528, true, true),
        ([0x80, 0x00], false, 0, false, false),
    ];
    for (bytes, more, offset, any, later) in cases {
        let mut packet = packet();
        packet[6..8].copy_from_slice(&bytes);
        seal(&mut packet);
        let header = Ipv4Header::parse(&packet).unwrap();
        assert_eq!(header.more_fragments, more, "{bytes:?}");
        assert_eq!(header.fragment_offset_bytes, offset, "{bytes:?}");
        assert_eq!(header.is_fragment(), any, "{bytes:?}");
        assert_eq!(header.is_later_fragment(), later, "{bytes:?}");
    }
}

#[test]
fn faults_come_in_their_order() {
    let good = packet();
    for length in 0..20 {
        assert_eq!(Ipv4Header::parse(&good[..length]), Err(DropReason::Runt), "{length}");
    }
    assert_eq!(Ipv4Header::parse(&[0x60]), Err(DropReason::Ipv6));
    let with = |index: usize, value: u8| {
        let mut packet = packet();
        packet[index] = value;
        Ipv4Header::parse(&packet)
    };
    assert_eq!(with(0, 0x65), Err(DropReason::Ipv6));
    assert_eq!(with(0, 0x55), Err(DropReason::BadVersion));
    assert_eq!(with(0, 0x44), Err(DropReason::BadHeaderLength));
    assert_eq!(with(0, 0x48), Err(DropReason::BadHeaderLength), "32 bytes of header in 28");
    assert_eq!(with(0, 0x47), Err(DropReason::BadChecksum), "28 bytes of header in 28");
    assert_eq!(with(3, 19), Err(DropReason::BadTotalLength));
    assert_eq!(with(3, 29), Err(DropReason::BadTotalLength));
    assert_eq!(with(3, 27), Err(DropReason::BadChecksum));
    assert_eq!(with(8, 63), Err(DropReason::BadChecksum));
}

#[test]
fn trailing_bytes_are_allowed() {
    let mut padded = packet().to_vec();
    padded.extend([0xaa; 18]);
    assert_eq!(Ipv4Header::parse(&padded).unwrap().total_bytes, 28);
}

#[test]
fn a_new_total_length_keeps_the_checksum_right() {
    for total_bytes in 20..=u16::MAX {
        let mut edited = [0; 20];
        edited.copy_from_slice(&packet()[..20]);
        Ipv4Addr::set_total_length(&mut edited, total_bytes);
        let mut recomputed = edited;
        seal(&mut recomputed);
        assert_eq!(edited, recomputed, "total length {total_bytes}");
        assert_eq!(edited[2..4], total_bytes.to_be_bytes());
    }
}

/// All 65,536 identifications, and so all checksums, times the four fields; the rest of the byte
/// and the field before vary with them.
#[test]
fn a_new_ecn_field_keeps_the_checksum_right() {
    for id in 0..=u16::MAX {
        for ecn in [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce] {
            let mut edited = [0; 20];
            edited.copy_from_slice(&packet()[..20]);
            let before = id.wrapping_mul(167).to_be_bytes()[0];
            edited[1] = before;
            edited[4..6].copy_from_slice(&id.to_be_bytes());
            seal(&mut edited);
            Ipv4Addr::set_ecn(&mut edited, ecn);
            let mut recomputed = edited;
            seal(&mut recomputed);
            assert_eq!(edited, recomputed, "identification {id}, {before:#04x} to {ecn:?}");
            assert_eq!(edited[1], before & 0xfc | ecn as u8, "the other bits are kept");
        }
    }
}

/// All 65,536 checksums times 255 times to live, 16.7 million cases, each against a full
/// recomputation. The identification steers the checksum; only three words of the header
/// vary, so the recomputation adds them to the sum of the others.
#[test]
fn decrement_ttl_equals_recomputation() {
    let halves = [0..0x8000u32, 0x8000..0x1_0000];
    let cases = std::thread::scope(|scope| {
        let workers = halves.map(|range| scope.spawn(move || decrement_cases(range)));
        workers.map(|worker| worker.join().unwrap()).into_iter().sum::<u32>()
    });
    assert_eq!(cases, 65_536 * 255);
}

fn decrement_cases(checksums: std::ops::Range<u32>) -> u32 {
    let template = packet();
    let word = |at: usize| u32::from(template[at]) << 8 | u32::from(template[at + 1]);
    let constant = word(0) + word(2) + word(6) + word(12) + word(14) + word(16) + word(18);
    let mut cases = 0;
    for stored in checksums {
        for ttl in 1..=255u32 {
            let others = constant + (ttl << 8 | 17) + stored;
            let others = (others & 0xffff) + (others >> 16);
            let id = 0xffff - ((others & 0xffff) + (others >> 16));
            let mut header = [0; 20];
            header.copy_from_slice(&template[..20]);
            [header[4], header[5]] = [(id >> 8) as u8, id as u8];
            header[8] = ttl as u8;
            [header[10], header[11]] = [(stored >> 8) as u8, stored as u8];

            Ipv4Addr::decrement_ttl(&mut header);

            let sum = constant + id + ((ttl - 1) << 8 | 17);
            let sum = (sum & 0xffff) + (sum >> 16);
            let sum = (sum & 0xffff) + (sum >> 16);
            let expected = 0xffff - sum;
            let actual = u32::from(header[10]) << 8 | u32::from(header[11]);
            if actual != expected || u32::from(header[8]) != ttl - 1 {
                panic!("checksum {stored:#06x}, TTL {ttl}: {actual:#06x}, not {expected:#06x}");
            }
            cases += 1;
        }
    }
    cases
}
