//! A prefix of either family with its host bits cleared, and its two spellings: `10.5.34.0/24` for
//! people, `10.5.34.0-24` for store keys and file names.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use crate::packet::IpAddress;

/// A network of one family.
///
/// INVARIANT: `length_bits <= A::BITS`, and every bit of `network` beyond `length_bits` is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix<A: IpAddress = Ipv4Addr> {
    network: A::Bits,
    length_bits: u8,
}

/// Why a text is no prefix.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct PrefixError {
    /// The text as given.
    pub text: String,
    /// What it should have been.
    expected: &'static str,
}

impl<A: IpAddress> Prefix<A> {
    /// The prefix of `length_bits` that holds `address`; `None` if no address has so many.
    pub fn new(address: A, length_bits: u8) -> Option<Self> {
        let network = |mask| Self { network: address.bits() & mask, length_bits };
        (length_bits <= A::BITS).then(|| network(A::mask(length_bits)))
    }

    /// The first address, all host bits zero.
    pub fn network(self) -> A {
        A::of_bits(self.network)
    }

    /// The prefix length, 0…32 or 0…128.
    pub fn length_bits(self) -> u8 {
        self.length_bits
    }

    /// The network mask as an integer in host order.
    #[inline]
    pub fn mask(self) -> A::Bits {
        A::mask(self.length_bits)
    }

    /// The last address, all host bits one.
    pub fn last(self) -> A {
        A::of_bits(self.network | !self.mask())
    }

    /// The address after the network address: what flannel writes to `FLANNEL_SUBNET`.
    pub fn first_host(self) -> A {
        self.network().following().unwrap_or_else(|| self.network())
    }

    /// Whether `address` lies inside.
    #[inline]
    pub fn contains(self, address: A) -> bool {
        address.bits() & self.mask() == self.network
    }

    /// Whether the whole of `other` lies inside.
    pub fn covers(self, other: Self) -> bool {
        self.length_bits <= other.length_bits && self.contains(other.network())
    }

    /// Whether it lies inside `network`, and is not all of it.
    pub fn is_part_of(self, network: Self) -> bool {
        network.covers(self) && self != network
    }

    /// Whether any address lies in both.
    pub fn overlaps(self, other: Self) -> bool {
        self.covers(other) || other.covers(self)
    }

    /// The next prefix of the same length; `None` at the end of the address space.
    pub fn next(self) -> Option<Self> {
        Some(Self { network: self.last().following()?.bits(), ..self })
    }

    /// The store spelling, `10.5.34.0-24`.
    pub fn key(self) -> String {
        format!("{}-{}", self.network(), self.length_bits)
    }

    /// Reads the store spelling. Strict: host bits must be clear and nothing may follow.
    pub fn from_key(key: &str) -> Result<Self, PrefixError> {
        let prefix = Self::parse(key, '-')?;
        if prefix.key() == key { Ok(prefix) } else { Err(Self::refused(key)) }
    }

    fn parse(text: &str, separator: char) -> Result<Self, PrefixError> {
        let parse = || {
            let (address, length) = text.split_once(separator)?;
            if length.is_empty() || !length.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            Self::new(address.parse().ok()?, length.parse().ok()?)
        };
        parse().ok_or_else(|| Self::refused(text))
    }

    fn refused(text: &str) -> PrefixError {
        PrefixError { text: text.to_owned(), expected: A::PREFIX }
    }
}

impl<A: IpAddress> fmt::Display for Prefix<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network(), self.length_bits)
    }
}

impl<A: IpAddress> FromStr for Prefix<A> {
    type Err = PrefixError;

    /// Reads `10.5.34.7/24`; host bits are masked off, as flannel does.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, '/')
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    fn prefix(text: &str) -> Prefix {
        text.parse().unwrap()
    }

    #[test]
    fn both_spellings_round_trip_and_mask_host_bits() {
        assert_eq!(prefix("10.5.34.7/24").to_string(), "10.5.34.0/24");
        assert_eq!(prefix("10.5.34.0/24").key(), "10.5.34.0-24");
        assert_eq!(Prefix::from_key("10.5.34.0-24").unwrap(), prefix("10.5.34.0/24"));
        assert_eq!(prefix("1.2.3.4/0").to_string(), "0.0.0.0/0");
        assert_eq!(prefix("1.2.3.4/32").last().to_string(), "1.2.3.4");
    }

    #[test]
    fn malformed_texts_are_refused() {
        for text in ["", "10.5.0.0", "10.5.0.0/33", "10.5.0/24", "10.5.0.300/24", "10.5.0.0/+8"] {
            assert!(text.parse::<Prefix>().is_err(), "{text:?} was taken for a prefix");
        }
        for key in ["10.12.13-24", "10.12.13.300-24", "10.12.13.0-24hi", "10.12.13.1-24", "-24"] {
            assert!(
                Prefix::<Ipv4Addr>::from_key(key).is_err(),
                "{key:?} was taken for a subnet key"
            );
        }
    }

    #[test]
    fn both_families_have_the_same_rules() {
        let prefix = |text: &str| text.parse::<Prefix<Ipv6Addr>>().unwrap();
        let subnet = prefix("fd00:5:34::7/64");
        assert_eq!(
            (subnet.to_string(), subnet.key()),
            ("fd00:5:34::/64".into(), "fd00:5:34::-64".into())
        );
        assert_eq!(subnet.last().to_string(), "fd00:5:34:0:ffff:ffff:ffff:ffff");
        assert_eq!(subnet.first_host().to_string(), "fd00:5:34::1");
        assert_eq!(subnet.next(), Some(prefix("fd00:5:34:1::/64")));
        assert!(prefix("fd00:5::/48").covers(prefix("fd00:5:0:7::/64")));
        assert!(!prefix("fd00:5::/48").overlaps(subnet));
        assert_eq!(prefix("::/0").last().to_string(), "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
        assert_eq!(prefix("::/0").next(), None);
        for key in
            ["fd00:5:34::1-64", "FD00:5:34::-64", "fd00:5:34:0::-64", "fd00::-129", "10.5.0.0-16"]
        {
            assert!(
                Prefix::<Ipv6Addr>::from_key(key).is_err(),
                "{key:?} was taken for a subnet key"
            );
        }
    }

    #[test]
    fn relations_between_prefixes() {
        assert!(prefix("10.0.0.0/8").covers(prefix("10.5.0.0/16")));
        assert!(!prefix("10.5.0.0/16").covers(prefix("10.0.0.0/8")));
        assert!(prefix("10.5.0.0/16").overlaps(prefix("10.0.0.0/8")));
        assert!(!prefix("10.5.0.0/24").overlaps(prefix("10.5.1.0/24")));
        assert_eq!(prefix("10.5.0.0/24").next(), Some(prefix("10.5.1.0/24")));
        assert_eq!(prefix("255.255.255.0/24").next(), None);
    }
}
