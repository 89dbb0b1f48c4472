//! The one edit that the plain protocol makes to a packet, for each program of it.

const IPV4_HEADER_BYTES: usize = 20;

/// Takes one off the TTL, patches the header checksum (RFC 1141) and gives the destination;
/// `None` for what is no IPv4 header or would leave with TTL 0.
pub(crate) fn decrement_ttl(packet: &mut [u8]) -> Option<u32> {
    let header: &mut [u8; IPV4_HEADER_BYTES] = packet.first_chunk_mut()?;
    if header[0] >> 4 != 4 || header[8] <= 1 {
        return None;
    }
    header[8] -= 1;
    let checksum = u16::from_be_bytes([header[10], header[11]]);
    let (sum, carry) = checksum.overflowing_add(0x0100);
    let patched = sum.wrapping_add(u16::from(carry));
    header[10..12].copy_from_slice(&patched.to_be_bytes());
    Some(u32::from_be_bytes([header[16], header[17], header[18], header[19]]))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// 10.5.1.2 to 10.5.2.2, ICMP, TTL as given, checksum by definition (RFC 1071).
    pub(crate) fn header(ttl: u8) -> [u8; IPV4_HEADER_BYTES] {
        let mut header = [0; IPV4_HEADER_BYTES];
        header[..10].copy_from_slice(&[0x45, 0, 0, 20, 0x12, 0x34, 0x40, 0, ttl, 1]);
        header[12..].copy_from_slice(&[10, 5, 1, 2, 10, 5, 2, 2]);
        let checksum = !folded_sum(&header);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        header
    }

    fn folded_sum(header: &[u8]) -> u16 {
        let mut sum: u32 =
            header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        while sum >> 16 != 0 {
            sum = (sum & 0xFFFF) + (sum >> 16);
        }
        u16::try_from(sum).unwrap()
    }

    #[test]
    fn every_ttl_keeps_the_checksum_valid_or_is_refused() {
        for ttl in 0..=255 {
            let mut packet = header(ttl);
            let destination = decrement_ttl(&mut packet);
            if ttl <= 1 {
                assert_eq!((destination, packet), (None, header(ttl)), "TTL {ttl}");
            } else {
                assert_eq!(destination, Some(0x0A05_0202), "TTL {ttl}");
                assert_eq!((packet[8], folded_sum(&packet)), (ttl - 1, 0xFFFF), "TTL {ttl}");
            }
        }
    }

    #[test]
    fn what_is_no_ipv4_header_is_refused() {
        assert_eq!(decrement_ttl(&mut header(64)[..19]), None);
        let mut ipv6 = header(64);
        ipv6[0] = 0x60;
        assert_eq!(decrement_ttl(&mut ipv6), None);
    }
}
