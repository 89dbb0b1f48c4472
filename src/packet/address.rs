//! Classes of IPv4 addresses that no overlay packet may carry, or that forbid an ICMP answer.

use std::net::Ipv4Addr;

/// Whether one look at `address` tells that it is in none of the classes below, as nearly all are.
#[inline]
pub fn is_ordinary(address: Ipv4Addr) -> bool {
    matches!(address.octets()[0], 1..=126 | 128..=168 | 170..=223)
}

/// Whether `address` can't be the source of a forwarded packet (RFC 1812, section 5.3.7):
/// 0/8, 127/8, 169.254/16, 224/4 and 240/4, the limited broadcast among them.
#[inline]
pub fn is_martian_source(address: Ipv4Addr) -> bool {
    matches!(address.octets(), [0 | 127 | 224..=255, ..] | [169, 254, ..])
}

/// Whether `address` can't be the destination of a forwarded packet: 0/8, 127/8, and 240/4 but
/// for the limited broadcast, which [`is_multicast_or_broadcast`] names.
#[inline]
pub fn is_martian_destination(address: Ipv4Addr) -> bool {
    match address.octets() {
        [0 | 127, ..] => true,
        [240..=255, ..] => address != Ipv4Addr::BROADCAST,
        _ => false,
    }
}

/// Whether `address` is a group (224/4) or the limited broadcast.
#[inline]
pub fn is_multicast_or_broadcast(address: Ipv4Addr) -> bool {
    address.octets()[0] >> 4 == 0xe || address == Ipv4Addr::BROADCAST
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    #[test]
    fn class_boundaries() {
        // (address, martian source, martian destination, multicast or broadcast)
        let cases = [
            ("0.0.0.0", true, true, false),
            ("0.255.255.255", true, true, false),
            ("1.0.0.0", false, false, false),
            ("10.5.0.1", false, false, false),
            ("126.255.255.255", false, false, false),
            ("127.0.0.1", true, true, false),
            ("127.255.255.255", true, true, false),
            ("128.0.0.0", false, false, false),
            ("169.253.255.255", false, false, false),
            ("169.254.0.0", true, false, false),
            ("169.254.169.254", true, false, false),
            ("169.255.0.0", false, false, false),
            ("223.255.255.255", false, false, false),
            ("224.0.0.0", true, false, true),
            ("239.255.255.255", true, false, true),
            ("240.0.0.0", true, true, false),
            ("255.255.255.254", true, true, false),
            ("255.255.255.255", true, false, true),
        ];
        for (text, source, destination, group) in cases {
            let at = address(text);
            assert_eq!(is_martian_source(at), source, "source {text}");
            assert_eq!(is_martian_destination(at), destination, "destination {text}");
            assert_eq!(is_multicast_or_broadcast(at), group, "group {text}");
        }
    }

    #[test]
    fn ordinary_addresses_are_in_no_class() {
        for first in 0..=255 {
            for rest in [[0, 0, 0], [169, 254, 1], [254, 1, 1], [255, 255, 255]] {
                let at = Ipv4Addr::new(first, rest[0], rest[1], rest[2]);
                let classed = is_martian_source(at)
                    || is_martian_destination(at)
                    || is_multicast_or_broadcast(at);
                assert!(!(is_ordinary(at) && classed), "{at}");
                assert!(is_ordinary(at) || classed || first == 169, "{at} takes the long way");
            }
        }
    }
}
