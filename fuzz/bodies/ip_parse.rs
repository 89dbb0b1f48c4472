//! One input of the `ip_parse` target: a packet of any bytes, parsed twice, then edited.
//!
//! The second opinion is etherparse for the fields and a word loop for the checksums. Shared by
//! the fuzz target, the replay of its corpus and the property tests.

use std::net::{Ipv4Addr, Ipv6Addr};

use etherparse::{
    Ipv4HeaderSlice, Ipv6ExtensionsSlice, Ipv6HeaderSlice, TcpHeaderSlice, UdpHeaderSlice,
};
use weft::packet::ecn::Ecn;
use weft::packet::header::{Family as _, protocol};
use weft::packet::icmp::{self, ERROR_BYTES_MAX, ErrorKind};
use weft::packet::ipv4::Ipv4Header;
use weft::packet::ipv6_header::Ipv6Header;
use weft::packet::transport::{self, TcpHeader};
use weft::stats::DropReason;

/// Our own address in the errors written.
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);

/// Runs one input; panics on the first difference.
pub(crate) fn run(packet: &[u8]) {
    complete_anywhere(packet);
    parse_v6(packet);
    let parsed = Ipv4Header::parse(packet);
    assert_eq!(parsed, second_opinion(packet), "the parsers disagree about {packet:02x?}");
    let Ok(header) = parsed else { return };
    let packet = &packet[..usize::from(header.total_bytes)];
    check_transport(&header, packet);
    edit(&header, packet);
    answer(&header, packet);
}

/// The verdict of RFC 1812, section 5.2.2, from etherparse's reading of the header.
pub(crate) fn second_opinion(packet: &[u8]) -> Result<Ipv4Header, DropReason> {
    let version = packet.first().map(|byte| byte >> 4);
    if version == Some(6) {
        return Err(DropReason::Ipv6);
    }
    if packet.len() < 20 {
        return Err(DropReason::Runt);
    }
    if version != Some(4) {
        return Err(DropReason::BadVersion);
    }
    let Ok(slice) = Ipv4HeaderSlice::from_slice(packet) else {
        return Err(DropReason::BadHeaderLength);
    };
    let total_bytes = slice.total_len();
    if usize::from(total_bytes) > packet.len() || slice.payload_len().is_err() {
        return Err(DropReason::BadTotalLength);
    }
    if word_loop(slice.slice()) != 0xffff {
        return Err(DropReason::BadChecksum);
    }
    Ok(Ipv4Header {
        header_bytes: slice.slice().len() as u16,
        ecn: Ecn::of(slice.ecn().value()),
        total_bytes,
        id: slice.identification(),
        dont_fragment: slice.dont_fragment(),
        more_fragments: slice.more_fragments(),
        fragment_offset_bytes: slice.fragments_offset().value() * 8,
        ttl: slice.ttl(),
        protocol: slice.protocol().0,
        source: slice.source_addr(),
        destination: slice.destination_addr(),
    })
}

/// The one's complement sum, word by word in network order, as RFC 1071 spells it.
pub(crate) fn word_loop(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn check_transport(header: &Ipv4Header, packet: &[u8]) {
    let payload = &packet[usize::from(header.header_bytes)..];
    let tcp = TcpHeaderSlice::from_slice(payload).ok();
    let udp = UdpHeaderSlice::from_slice(payload).ok();
    let our_tcp = TcpHeader::parse(payload);
    assert_eq!(our_tcp.is_some(), tcp.is_some(), "TCP header of {payload:02x?}");
    if let (Some(ours), Some(theirs)) = (our_tcp, &tcp) {
        assert_eq!(ours.sequence, theirs.sequence_number());
        assert_eq!(ours.header_bytes, usize::from(theirs.data_offset()) * 4);
        assert_eq!(ours.flags, payload[13]);
        assert_eq!(ours.reserved, payload[12] & 15);
    }
    let fits = udp.as_ref().is_some_and(|udp| usize::from(udp.length()) == payload.len());
    assert_eq!(transport::udp_header(payload).is_some(), fits, "UDP header of {payload:02x?}");

    let mut covered = packet[12..20].to_vec();
    covered.extend([0, header.protocol]);
    covered.extend((payload.len() as u16).to_be_bytes());
    covered.extend(payload);
    let is_right = word_loop(&covered) == 0xffff;
    let expected = match header.protocol {
        _ if header.is_fragment() => false,
        protocol::TCP => tcp.is_some() && is_right,
        protocol::UDP => fits && payload[6..8] != [0, 0] && is_right,
        _ => false,
    };
    assert_eq!(transport::is_verified(header, packet), expected, "{packet:02x?}");
}

/// Edits leave a packet valid, and change what they say and nothing else.
fn edit(header: &Ipv4Header, packet: &[u8]) {
    let mut edited = packet.to_vec();
    let mut expected = *header;
    if header.ttl > 0 {
        Ipv4Addr::decrement_ttl(&mut edited);
        expected.ttl -= 1;
    }
    assert_eq!(Ipv4Header::parse(&edited), Ok(expected));
    expected.total_bytes = header.header_bytes;
    Ipv4Addr::set_total_length(&mut edited, expected.total_bytes);
    assert_eq!(Ipv4Header::parse(&edited), Ok(expected));
    assert_eq!(edited[12..], packet[12..], "an edit reached beyond its fields");
}

/// Every error that may be written is a valid packet, and about a packet that deserves one.
fn answer(header: &Ipv4Header, packet: &[u8]) {
    if !icmp::may_answer(header, packet) {
        return;
    }
    assert_eq!(header.fragment_offset_bytes, 0, "an answer to a later fragment");
    assert!(!header.destination.is_multicast() && !header.destination.is_broadcast());
    assert!(!header.source.is_multicast() && !header.source.is_loopback());
    assert!(header.source.octets()[0] != 0 && header.source.octets()[0] < 240);
    let mut out = [0; ERROR_BYTES_MAX];
    for kind in [
        ErrorKind::TimeExceeded,
        ErrorKind::NetUnreachable,
        ErrorKind::PacketTooBig { next_hop_mtu_bytes: header.id },
    ] {
        let length = icmp::write_error(&mut out, kind, OWN_ADDRESS, packet, header);
        let error = &out[..length];
        let written = second_opinion(error).expect("an error is a valid packet");
        assert_eq!(usize::from(written.total_bytes), length);
        assert_eq!((written.source, written.destination), (OWN_ADDRESS, header.source));
        assert_eq!(word_loop(&error[20..]), 0xffff, "ICMP checksum");
        assert_eq!(error[28..], packet[..packet.len().min(548)], "quote");
        assert!(!icmp::may_answer(&written, error), "an error about an error");
    }
}

/// IPv6's parser beside etherparse's.
fn parse_v6(packet: &[u8]) {
    let parsed = Ipv6Header::parse(packet);
    let Ok(slice) = Ipv6HeaderSlice::from_slice(packet) else {
        assert!(parsed.is_err(), "no IPv6 header: {packet:02x?}");
        return;
    };
    let total_bytes = 40 + usize::from(slice.payload_length());
    let Some(whole) = packet.get(..total_bytes).filter(|whole| whole.len() <= 0xffff) else {
        assert_eq!(parsed, Err(DropReason::BadTotalLength), "{packet:02x?}");
        return;
    };
    let rest = &whole[40..];
    let Ok(header) = parsed else {
        assert_eq!(parsed, Err(DropReason::BadHeaderLength), "{packet:02x?}");
        return;
    };
    assert_eq!(
        (header.source, header.destination),
        (slice.source_addr(), slice.destination_addr())
    );
    assert_eq!((header.ttl, usize::from(header.total_bytes)), (slice.hop_limit(), total_bytes));
    assert_eq!(header.ecn, Ecn::of(slice.traffic_class()));
    let first = slice.next_header();
    // Of a later fragment it goes on into the payload; mobility, HIP and shim headers are a
    // transport to us.
    let is_known = !header.is_later_fragment() && !matches!(header.protocol, 135 | 139 | 140);
    if let Ok((extensions, protocol, behind)) = Ipv6ExtensionsSlice::from_slice(first, rest)
        && is_known
    {
        let at = total_bytes - behind.len();
        let ours = (usize::from(header.header_bytes), header.protocol);
        assert_eq!(ours, (at, protocol.0), "{packet:02x?}");
        assert_eq!(header.is_fragment(), extensions.is_fragmenting_payload(), "{packet:02x?}");
    }
    let mut edited = whole.to_vec();
    Ipv6Addr::set_ecn(&mut edited, Ecn::Ce);
    let expected = Ipv6Header { ecn: Ecn::Ce, ..header };
    assert_eq!(Ipv6Header::parse(&edited), Ok(expected));
    if icmp::may_answer(&header, whole) {
        let mut out = [0; ERROR_BYTES_MAX];
        let own = Ipv6Addr::new(0xfd00, 5, 0, 1, 0, 0, 0, 0);
        let length = icmp::write_error(&mut out, ErrorKind::TimeExceeded, own, whole, &header);
        let written = Ipv6Header::parse(&out[..length]).expect("an error is a valid packet");
        assert_eq!(usize::from(written.total_bytes), length);
        assert_eq!(out[48..length], whole[..whole.len().min(1232)], "quote");
        assert!(!icmp::may_answer(&written, &out[..length]), "an error about an error");
    }
}

/// Completion writes two bytes inside the packet, or none.
fn complete_anywhere(packet: &[u8]) {
    let [start, offset, ..] = *packet else { return };
    let (start, offset) = (usize::from(start), usize::from(offset));
    let mut completed = packet.to_vec();
    let outcome = transport::complete(&mut completed, start, offset);
    assert_eq!(outcome.is_some(), start + offset + 2 <= packet.len());
    if outcome.is_none() {
        assert_eq!(completed, packet);
        return;
    }
    let field = start + offset..start + offset + 2;
    let plain = !word_loop(&packet[start..]);
    // The place of UDP's, where zero says that there is none.
    let expected = if offset == 6 && plain == 0 { 0xffff } else { plain };
    assert_eq!(completed[field.clone()], expected.to_be_bytes());
    assert_eq!(completed[..field.start], packet[..field.start]);
    assert_eq!(completed[field.end..], packet[field.end..]);
}
