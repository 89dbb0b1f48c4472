//! Headers on literal bytes: parsing with and without extension headers, each edit, the classes.

use super::*;
use crate::packet::ecn::Ecn;

const POD: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 1, 0, 0, 0, 2);
const FAR: Ipv6Addr = Ipv6Addr::new(0xfd00, 5, 0, 2, 0, 0, 0, 3);

/// A packet between two pods, with this behind its header.
fn packet(next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x6b, 0x91, 0x23, 0x45, 0, payload.len() as u8, next_header, 64];
    packet.extend(POD.octets());
    packet.extend(FAR.octets());
    packet.extend(payload);
    packet
}

/// An extension header of `bytes`, its length where IANA's are.
fn extension(next: u8, bytes: usize) -> Vec<u8> {
    let mut header = vec![0; bytes];
    (header[0], header[1]) = (next, (bytes / 8 - 1) as u8);
    header
}

#[test]
fn every_field_is_read() {
    let expected = Ipv6Header {
        header_bytes: 40,
        ecn: Ecn::Ect1,
        total_bytes: 48,
        id: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset_bytes: 0,
        ttl: 64,
        protocol: protocol::UDP,
        source: POD,
        destination: FAR,
    };
    let mut bytes = packet(17, &[0; 8]);
    assert_eq!(Ipv6Header::parse(&bytes), Ok(expected));
    bytes.extend([0xee; 9]);
    assert_eq!(Ipv6Header::parse(&bytes), Ok(expected), "what follows is padding");
}

#[test]
fn what_is_cut_or_lies_is_refused() {
    let whole = packet(17, &[0; 8]);
    for length in 0..40 {
        assert_eq!(Ipv6Header::parse(&whole[..length]), Err(DropReason::Runt), "{length}");
    }
    for length in 40..48 {
        let cut = &whole[..length];
        assert_eq!(Ipv6Header::parse(cut), Err(DropReason::BadTotalLength), "{length}");
    }
    let mut other = whole.clone();
    for (first, reason) in [(0x45, DropReason::Ipv4), (0x50, DropReason::BadVersion)] {
        other[0] = first;
        assert_eq!(Ipv6Header::parse(&other), Err(reason));
    }
    assert_eq!(Ipv6Header::parse(&[0x45; 28]), Err(DropReason::Ipv4), "of any length");
    // 40 bytes more than its length says are more than 65,535 in all.
    let mut long = packet(17, &[0; 8]);
    long[4..6].copy_from_slice(&65_496_u16.to_be_bytes());
    long.resize(70_000, 0);
    assert_eq!(Ipv6Header::parse(&long), Err(DropReason::BadTotalLength));
    long[4..6].copy_from_slice(&65_495_u16.to_be_bytes());
    assert_eq!(Ipv6Header::parse(&long).map(|header| header.total_bytes), Ok(65_535));
}

#[test]
fn the_transport_is_found_behind_extension_headers() {
    let tcp = [1; 20];
    let fragment = |word: u16| {
        let mut header = extension(6, 8);
        header[1] = 0;
        header[2..4].copy_from_slice(&word.to_be_bytes());
        header
    };
    let inside = |mut outer: Vec<u8>, inner: Vec<u8>| {
        outer[0] = 44;
        [outer, inner].concat()
    };
    let mut authentication = vec![0; 24];
    (authentication[0], authentication[1]) = (6, 4);
    // What comes, its first header's number, and where the transport is; then offset and more.
    let cases = [
        ("hop-by-hop", 0, extension(6, 8), 48, (0, false)),
        ("destination options", 60, extension(6, 24), 64, (0, false)),
        ("two of them", 0, [extension(60, 16), extension(6, 8)].concat(), 64, (0, false)),
        ("authentication", 51, authentication, 64, (0, false)),
        ("first fragment", 44, fragment(1), 48, (0, true)),
        ("last fragment", 44, fragment(1448), 48, (1448, false)),
        ("atomic fragment", 44, fragment(0), 48, (0, false)),
        ("an atomic one in a first", 44, inside(fragment(1), fragment(0)), 56, (0, true)),
        ("a first one in an atomic", 44, inside(fragment(0), fragment(1)), 56, (0, true)),
    ];
    for (name, first, headers, at, fragment) in cases {
        let header = Ipv6Header::parse(&packet(first, &[&headers[..], &tcp].concat())).unwrap();
        assert_eq!((header.header_bytes, header.protocol), (at, protocol::TCP), "{name}");
        let found = (header.fragment_offset_bytes, header.more_fragments);
        assert_eq!(found, fragment, "{name}");
        assert_eq!(header.is_fragment(), fragment != (0, false), "{name}");
    }
    // Behind an encrypted payload nobody looks (ESP).
    let header = Ipv6Header::parse(&packet(50, &tcp)).unwrap();
    assert_eq!((header.header_bytes, header.protocol), (40, 50));
}

#[test]
fn chains_that_go_on_beyond_the_packet_or_for_too_long_are_refused() {
    let bad = Err(DropReason::BadHeaderLength);
    assert_eq!(Ipv6Header::parse(&packet(0, &[])), bad, "nothing behind it");
    assert_eq!(Ipv6Header::parse(&packet(0, &[6, 0, 0])), bad, "half a word");
    assert_eq!(Ipv6Header::parse(&packet(60, &extension(6, 32)[..24])), bad, "cut short");
    let chain = |count| packet(60, &[[60, 0, 0, 0, 0, 0, 0, 0]; 20][..count].concat());
    let mut eight = chain(8);
    eight[40 + 7 * 8] = 6;
    assert_eq!(Ipv6Header::parse(&eight).map(|header| header.header_bytes), Ok(104));
    let mut nine = chain(9);
    nine[40 + 8 * 8] = 6;
    assert_eq!(Ipv6Header::parse(&nine), bad, "nine");
}

#[test]
fn a_routing_header_with_hosts_left_is_a_source_route() {
    let routing = |segments_left: u8| {
        let mut header = extension(6, 24);
        header[3] = segments_left;
        packet(43, &[&header[..], &[0; 20]].concat())
    };
    let is_routed = |bytes: &[u8]| {
        let header = Ipv6Header::parse(bytes).unwrap();
        Ipv6Addr::has_source_route(&header, bytes)
    };
    assert!(is_routed(&routing(1)));
    assert!(!is_routed(&routing(0)), "it has been everywhere");
    assert!(!is_routed(&packet(17, &[0; 8])));
    let mut behind = extension(43, 8);
    behind.extend(&routing(2)[40..]);
    assert!(is_routed(&packet(60, &behind)), "behind another header");
}

#[test]
fn edits_change_their_field_and_nothing_else() {
    let before = packet(17, &[7; 30]);
    let parsed = Ipv6Header::parse(&before).unwrap();
    let mut bytes = before.clone();
    Ipv6Addr::decrement_ttl(&mut bytes);
    assert_eq!(Ipv6Header::parse(&bytes), Ok(Ipv6Header { ttl: 63, ..parsed }));
    for ecn in [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce] {
        let mut bytes = before.clone();
        Ipv6Addr::set_ecn(&mut bytes, ecn);
        assert_eq!(Ipv6Header::parse(&bytes), Ok(Ipv6Header { ecn, ..parsed }));
        assert_eq!((bytes[0], bytes[1] & 0xcf), (0x6b, 0x81), "traffic class and flow label");
        assert_eq!(bytes[2..], before[2..]);
    }
    let mut bytes = before.clone();
    Ipv6Addr::set_total_length(&mut bytes, 50);
    assert_eq!(Ipv6Header::parse(&bytes), Ok(Ipv6Header { total_bytes: 50, ..parsed }));
}

#[test]
fn classes_of_addresses() {
    let address = |text: &str| text.parse::<Ipv6Addr>().unwrap();
    for ordinary in ["fd00:5::1", "fc00::1", "2001:db8::1", "3fff::"] {
        let address = address(ordinary);
        assert!(address.is_ordinary(), "{ordinary}");
        assert!(!address.is_martian_source() && !address.is_martian_destination(), "{ordinary}");
        assert!(!address.is_multicast_or_broadcast(), "{ordinary}");
    }
    for martian in ["::", "::1", "fe80::1", "febf::1", "::ffff:10.5.1.2"] {
        let address = address(martian);
        assert!(!address.is_ordinary(), "{martian}");
        assert!(address.is_martian_source() && address.is_martian_destination(), "{martian}");
    }
    for group in ["ff02::1", "ff05::2", "ff0e::1"] {
        let address = address(group);
        assert!(address.is_multicast_or_broadcast() && address.is_martian_source(), "{group}");
        assert!(!address.is_martian_destination() && !address.is_ordinary(), "{group}");
    }
    // Others are rare, and allowed: translation's, and what was local to a site.
    for rare in ["64:ff9b::a05:102", "fec0::1"] {
        let address = address(rare);
        assert!(!address.is_ordinary() && !address.is_martian_source(), "{rare}");
    }
    let of_link = |source: &str, destination: &str| {
        Ipv6Addr::is_of_link(address(source), address(destination))
    };
    assert!(of_link("fe80::1", "ff02::2"), "router solicitation");
    assert!(of_link("::", "ff02::1:ff00:1"), "duplicate address detection");
    assert!(of_link("fd00:5::1", "ff01::1"));
    assert!(of_link("fd00:5::1", "fe80::2"));
    assert!(!of_link("fd00:5::1", "ff05::1"), "a group of the site is somebody's traffic");
    assert!(!of_link("fd00:5::1", "fd00:6::1"));
}

#[test]
fn the_bytes_of_an_error() {
    use crate::packet::checksum;
    use crate::packet::icmp::{ERROR_BYTES_MAX, may_answer, write_error};
    let offending = packet(17, &[9; 12]);
    let header = Ipv6Header::parse(&offending).unwrap();
    let own = Ipv6Addr::new(0xfd00, 5, 0, 2, 0, 0, 0, 0);
    let mut out = [0xee; ERROR_BYTES_MAX];
    let kind = ErrorKind::PacketTooBig { next_hop_mtu_bytes: 1472 };
    let length = write_error(&mut out, kind, own, &offending, &header);
    let error = &out[..length];
    assert_eq!(error[..8], [0x60, 0, 0, 0, 0, 60, 58, 64]);
    let written = Ipv6Header::parse(error).unwrap();
    assert_eq!((written.source, written.destination), (own, POD));
    assert_eq!(usize::from(written.total_bytes), error.len());
    assert_eq!((error[40], error[41]), (2, 0));
    assert_eq!(error[44..48], [0, 0, 0x05, 0xc0]);
    assert_eq!(error[48..], offending);
    let sum = checksum::add(written.pseudo_header_sum(), checksum::sum(&error[40..]));
    assert_eq!(sum, 0xffff, "the ICMPv6 checksum");
    assert!(!may_answer(&written, error), "an error about an error");
    let mut long = packet(17, &[]);
    long[4..6].copy_from_slice(&3000_u16.to_be_bytes());
    long.resize(3040, 5);
    let header = Ipv6Header::parse(&long).unwrap();
    let length = write_error(&mut out, ErrorKind::TimeExceeded, own, &long, &header);
    assert_eq!((length, out[40]), (1280, 3));
    assert_eq!(out[48..length], long[..1232]);
    let length = write_error(&mut out, ErrorKind::NetUnreachable, own, &long, &header);
    assert_eq!((length, out[40], out[41]), (1280, 1, 0));
}

#[test]
fn who_is_never_answered() {
    use crate::packet::icmp::may_answer;
    let answerable = |packet: &[u8]| may_answer(&Ipv6Header::parse(packet).unwrap(), packet);
    let with = |at: usize, bytes: &[u8]| {
        let mut packet = packet(17, &[0; 16]);
        packet[at..at + bytes.len()].copy_from_slice(bytes);
        packet
    };
    assert!(answerable(&packet(17, &[0; 8])));
    for kind in [1, 2, 3, 4, 100, 127, 137] {
        assert!(!answerable(&packet(58, &[kind, 0, 0, 0])), "type {kind}");
    }
    for kind in [128, 129, 160] {
        assert!(answerable(&packet(58, &[kind, 0, 0, 0])), "type {kind}");
    }
    assert!(!answerable(&packet(58, &[])), "a message without a type");
    assert!(!answerable(&packet(60, &[&extension(58, 8)[..], &[1, 0]].concat())), "behind another");
    assert!(!answerable(&with(8, &[0; 16])), "from nobody");
    assert!(!answerable(&with(8, &[0xff, 2])), "from a group");
    assert!(!answerable(&with(8, &[0xfe, 0x80])), "from a link");
    assert!(!answerable(&with(24, &[0xff, 0x0e])), "to a group");
    let mut later = extension(17, 8);
    later[2..4].copy_from_slice(&1448_u16.to_be_bytes());
    assert!(!answerable(&packet(44, &later)), "a later fragment");
}
