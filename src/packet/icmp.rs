//! ICMP errors about packets that can't be forwarded: whether one may be sent at all, and its
//! bytes. How often is the limiter's business; where it goes is the caller's.

use crate::packet::checksum;
pub use crate::packet::header::ErrorKind;
use crate::packet::header::{Family, Header, pseudo_header};

/// Room for the longest error of either family.
pub const ERROR_BYTES_MAX: usize = 1280;

/// Bytes of the ICMP header: type, code, checksum, and four bytes that depend on the type.
pub const ICMP_HEADER_BYTES: usize = 8;

/// Whether RFC 1812, section 4.3.2.7 and RFC 4443, section 2.4(e) permit an error about this parsed
/// packet.
///
/// Never about an ICMP error (or a message of unknown type, as `icmp_send` in Linux does), a
/// fragment other than the first, a multicast or broadcast destination, or a source that names
/// no single host. Echo and the other queries may be answered.
pub fn may_answer<A: Family>(header: &Header<A>, packet: &[u8]) -> bool {
    if header.is_later_fragment()
        || header.destination.is_multicast_or_broadcast()
        || header.destination.is_martian_destination()
        || header.source.is_martian_source()
    {
        return false;
    }
    if header.protocol != A::ICMP {
        return true;
    }
    let range = usize::from(header.header_bytes)..usize::from(header.total_bytes);
    packet.get(range).and_then(<[u8]>::first).is_some_and(|kind| A::is_icmp_query(*kind))
}

/// Writes an error about `offending` into `out` and returns its length.
///
/// `header` is that of `offending`, and its source becomes the destination of the error; `source`
/// is our own address. No more is quoted than the family's longest error has room for, and never a
/// byte beyond the offending packet or its slice. Pass the packet as it arrived, before any edit.
pub fn write_error<A: Family>(
    out: &mut [u8; ERROR_BYTES_MAX],
    kind: ErrorKind,
    source: A,
    offending: &[u8],
    header: &Header<A>,
) -> usize {
    let quote_at = A::HEADER_BYTES_MIN + ICMP_HEADER_BYTES;
    let quotable = offending.get(..usize::from(header.total_bytes)).unwrap_or(offending);
    let quote = quotable.get(..A::ERROR_BYTES_MAX - quote_at).unwrap_or(quotable);
    let total_bytes = (quote_at + quote.len()) as u16;
    let (icmp_type, code) = A::icmp_error(kind);
    let mtu_bytes = match kind {
        ErrorKind::TimeExceeded | ErrorKind::NetUnreachable => 0,
        ErrorKind::PacketTooBig { next_hop_mtu_bytes } => next_hop_mtu_bytes,
    };
    let mut icmp = [0; ICMP_HEADER_BYTES];
    (icmp[0], icmp[1]) = (icmp_type, code);
    icmp[6..8].copy_from_slice(&mtu_bytes.to_be_bytes());
    // ICMPv6 sums a pseudo header as well (RFC 4443, section 2.3).
    let pseudo = match A::VERSION {
        4 => 0,
        _ => {
            let icmp_bytes = (ICMP_HEADER_BYTES + quote.len()) as u16;
            pseudo_header(source, header.source, A::ICMP, icmp_bytes)
        }
    };
    let sum = checksum::add(checksum::sum(&icmp), checksum::sum(quote));
    icmp[2..4].copy_from_slice(&checksum::finish(checksum::add(pseudo, sum)));

    A::write_icmp_header(out, source, header.source, total_bytes);
    let behind = out.iter_mut().skip(A::HEADER_BYTES_MIN);
    behind.zip(icmp.iter().chain(quote)).for_each(|(place, byte)| *place = *byte);
    total_bytes.into()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::packet::ipv4::Ipv4Header;
    use crate::stats::DropReason;

    /// A packet between two pods, its payload 0, 1, 2, …
    fn packet(protocol: u8, payload_bytes: usize) -> Vec<u8> {
        let mut packet = vec![0x45, 0];
        packet.extend(((20 + payload_bytes) as u16).to_be_bytes());
        packet.extend([0x12, 0x34, 0, 0, 1, protocol, 0, 0, 10, 5, 1, 2, 10, 5, 2, 3]);
        packet.extend((0..payload_bytes).map(|byte| byte as u8));
        seal(packet)
    }

    fn seal(mut packet: Vec<u8>) -> Vec<u8> {
        packet[10..12].fill(0);
        let field = checksum::finish(checksum::sum(&packet[..20]));
        packet[10..12].copy_from_slice(&field);
        packet
    }

    fn with(mut packet: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
        packet[at..at + bytes.len()].copy_from_slice(bytes);
        seal(packet)
    }

    fn answerable(packet: &[u8]) -> Result<bool, DropReason> {
        Ipv4Header::parse(packet).map(|header| may_answer(&header, packet))
    }

    #[test]
    fn twelve_classes_are_never_answered() {
        let udp = || packet(17, 64);
        let icmp = |kind: u8| with(packet(1, 64), 20, &[kind]);
        let classes = [
            ("destination unreachable", icmp(3)),
            ("source quench", icmp(4)),
            ("redirect", icmp(5)),
            ("time exceeded", icmp(11)),
            ("parameter problem", icmp(12)),
            ("later fragment", with(udp(), 6, &[0x20, 0x01])),
            ("multicast destination", with(udp(), 16, &[224, 0, 0, 251])),
            ("broadcast destination", with(udp(), 16, &[255; 4])),
            ("source in 0/8", with(udp(), 12, &[0; 4])),
            ("source in 127/8", with(udp(), 12, &[127, 0, 0, 1])),
            ("source in class D", with(udp(), 12, &[224, 0, 0, 1])),
            ("source in class E", with(udp(), 12, &[240, 0, 0, 1])),
        ];
        for (class, packet) in classes {
            assert_eq!(answerable(&packet), Ok(false), "{class}");
        }
        let mut broken = udp();
        broken[8] += 1;
        assert_eq!(answerable(&broken), Err(DropReason::BadChecksum), "there's no header to ask");
    }

    #[test]
    fn more_that_is_never_answered() {
        let udp = || packet(17, 64);
        let cases = [
            ("broadcast source", with(udp(), 12, &[255; 4])),
            ("link-local source", with(udp(), 12, &[169, 254, 1, 1])),
            ("destination in 0/8", with(udp(), 16, &[0, 0, 0, 1])),
            ("destination in 127/8", with(udp(), 16, &[127, 0, 0, 1])),
            ("destination in class E", with(udp(), 16, &[250, 0, 0, 1])),
            ("last fragment", with(udp(), 6, &[0x00, 0x01])),
            ("unknown ICMP type", with(packet(1, 64), 20, &[200])),
            ("ICMP without a type", packet(1, 0)),
        ];
        for (case, packet) in cases {
            assert_eq!(answerable(&packet), Ok(false), "{case}");
        }
    }

    #[test]
    fn ordinary_packets_and_icmp_queries_are_answered() {
        for protocol in [6, 17, 47, 50, 132] {
            assert_eq!(answerable(&packet(protocol, 0)), Ok(true), "protocol {protocol}");
        }
        for kind in [0, 8, 9, 10, 13, 14, 15, 16, 17, 18, 42, 43] {
            assert_eq!(answerable(&with(packet(1, 8), 20, &[kind])), Ok(true), "type {kind}");
        }
        let first_fragment = with(packet(17, 64), 6, &[0x20, 0x00]);
        assert_eq!(answerable(&first_fragment), Ok(true));
    }

    fn error_about(offending: &[u8], kind: ErrorKind) -> Vec<u8> {
        let header = Ipv4Header::parse(offending).unwrap();
        let mut out = [0xee; ERROR_BYTES_MAX];
        let length = write_error(&mut out, kind, Ipv4Addr::new(10, 5, 1, 0), offending, &header);
        assert!(out[length..].iter().all(|byte| *byte == 0xee), "written beyond the length");
        out[..length].to_vec()
    }

    #[test]
    fn the_bytes_of_an_error() {
        let offending = packet(17, 8);
        let kind = ErrorKind::PacketTooBig { next_hop_mtu_bytes: 1472 };
        let error = error_about(&offending, kind);
        let expected_ip = [
            0x45, 0xc0, 0, 56, 0, 0, 0x40, 0, 64, 1, error[10], error[11], 10, 5, 1, 0, 10, 5, 1, 2,
        ];
        assert_eq!(error[..20], expected_ip);
        let header = Ipv4Header::parse(&error).unwrap();
        assert_eq!(usize::from(header.total_bytes), error.len());
        assert_eq!(error[20..22], [3, 4]);
        assert_eq!(error[24..28], [0, 0, 0x05, 0xc0]);
        assert_eq!(error[28..], offending);
        assert_eq!(checksum::sum(&error[20..]), 0xffff, "ICMP checksum");
    }

    #[test]
    fn the_kinds_differ_in_type_and_code() {
        let offending = packet(17, 8);
        let start = |kind| error_about(&offending, kind)[20..28].to_vec();
        let time_exceeded = start(ErrorKind::TimeExceeded);
        let unreachable = start(ErrorKind::NetUnreachable);
        assert_eq!((time_exceeded[0], time_exceeded[1]), (11, 0));
        assert_eq!((unreachable[0], unreachable[1]), (3, 0));
        assert_eq!(time_exceeded[4..], [0; 4]);
        assert_eq!(unreachable[4..], [0; 4]);
    }

    #[test]
    fn a_quote_never_exceeds_packet_or_limit() {
        for payload_bytes in 0..1500 {
            let offending = packet(17, payload_bytes);
            let error = error_about(&offending, ErrorKind::TimeExceeded);
            let quoted = (20 + payload_bytes).min(548);
            assert_eq!(error[28..], offending[..quoted], "{payload_bytes} bytes of payload");
            assert_eq!(checksum::sum(&error[20..]), 0xffff, "{payload_bytes} bytes of payload");
        }
        let mut padded = packet(17, 10);
        padded.extend([0xdd; 100]);
        assert_eq!(error_about(&padded, ErrorKind::TimeExceeded).len(), 28 + 30, "padding quoted");
        let cut = packet(17, 100);
        let header = Ipv4Header::parse(&cut).unwrap();
        let mut out = [0; ERROR_BYTES_MAX];
        let source = Ipv4Addr::new(10, 5, 1, 0);
        let length = write_error(&mut out, ErrorKind::TimeExceeded, source, &cut[..40], &header);
        assert_eq!(length, 28 + 40, "quoted past the slice");
    }
}
