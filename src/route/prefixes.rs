//! A prefix of either family, or one of each: the subnets of a node, and the cluster's networks.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use crate::route::{Families, Prefix, PrefixError};

/// What stands in a key for the IPv4 subnet of a node that has none.
const NO_IPV4_KEY: &str = "0.0.0.0-0";
/// Longest prefix of IPv4 and of IPv6 that flannel's key parser takes (five and seven bits).
const KEY_LENGTH_BITS_MAX: (u8, u8) = (31, 127);

/// A prefix of IPv4, of IPv6, or one of each.
pub type Prefixes = Families<Prefix, Prefix<Ipv6Addr>>;

impl From<Prefix> for Prefixes {
    fn from(prefix: Prefix) -> Self {
        Self::of_v4(prefix, None)
    }
}

impl From<Prefix<Ipv6Addr>> for Prefixes {
    fn from(prefix: Prefix<Ipv6Addr>) -> Self {
        Self::of_v6(None, prefix)
    }
}

impl Prefixes {
    /// The one of IPv4 alone, or that of IPv6 where there is no other.
    pub fn first(self) -> Self {
        self.v4.map_or(self, Self::from)
    }

    /// Of which families there are some.
    pub fn families(self) -> Families<(), ()> {
        self.map(|_| (), |_| ())
    }

    /// The network address of the first.
    pub fn first_address(self) -> IpAddr {
        match (self.v4, self.v6) {
            (Some(v4), _) => v4.network().into(),
            (None, Some(v6)) => v6.network().into(),
            // Never seen: one is there.
            (None, None) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    /// What of it is of the families that `other` has.
    pub fn of_families(self, other: Self) -> Option<Self> {
        Self::new(self.v4.filter(|_| other.v4.is_some()), self.v6.filter(|_| other.v6.is_some()))
    }

    /// It, and of a family that it lacks the one of `other`.
    pub fn or(self, other: Self) -> Self {
        Self { v4: self.v4.or(other.v4), v6: self.v6.or(other.v6) }
    }

    /// What of it lies inside `networks`, each family in its own.
    pub fn within(self, networks: Self) -> Option<Self> {
        let v4 = self.v4.filter(|it| networks.v4.is_some_and(|network| network.covers(*it)));
        let v6 = self.v6.filter(|it| networks.v6.is_some_and(|network| network.covers(*it)));
        Self::new(v4, v6)
    }

    /// As [`Self::within`], without what is all of its network.
    pub fn part_of(self, networks: Self) -> Option<Self> {
        let Self { v4, v6 } = self.within(networks)?;
        Self::new(v4.filter(|_| v4 != networks.v4), v6.filter(|_| v6 != networks.v6))
    }

    /// Whether `address` lies in the one of its family.
    pub fn contains(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.v4.is_some_and(|it| it.contains(address)),
            IpAddr::V6(address) => self.v6.is_some_and(|it| it.contains(address)),
        }
    }

    /// Whether any address lies in both.
    pub fn overlaps(self, other: Self) -> bool {
        let v4 = self.v4.zip(other.v4).is_some_and(|(a, b)| a.overlaps(b));
        v4 || self.v6.zip(other.v6).is_some_and(|(a, b)| a.overlaps(b))
    }

    /// Whether one family's is the same in both.
    pub fn shares_with(self, other: Self) -> bool {
        let v4 = self.v4.is_some() && self.v4 == other.v4;
        v4 || self.v6.is_some() && self.v6 == other.v6
    }

    /// Whether `other` has each of these.
    pub fn is_part_of(self, other: Self) -> bool {
        self.v4.is_none_or(|_| self.v4 == other.v4) && self.v6.is_none_or(|_| self.v6 == other.v6)
    }

    /// Whether each is as long as the one of its family in `other`.
    pub fn has_lengths_of(self, other: Self) -> bool {
        self.v4.zip(other.v4).is_none_or(|(a, b)| a.length_bits() == b.length_bits())
            && self.v6.zip(other.v6).is_none_or(|(a, b)| a.length_bits() == b.length_bits())
    }

    /// Each as a text.
    pub fn texts(self) -> impl Iterator<Item = String> {
        let v6 = self.v6.map(|v6| v6.to_string());
        self.v4.map(|v4| v4.to_string()).into_iter().chain(v6)
    }

    /// flannel's spelling in stores: `10.5.34.0-24`, `10.5.34.0-24&fd00:5:34::-64`, or
    /// `0.0.0.0-0&fd00:5:34::-64`.
    pub fn key(self) -> String {
        let v4 = self.v4.map_or_else(|| NO_IPV4_KEY.to_owned(), Prefix::key);
        self.v6.map_or_else(|| v4.clone(), |v6| format!("{v4}&{}", v6.key()))
    }

    /// Reads the spelling of stores: IPv6 in any of its spellings, IPv4 in one.
    pub fn from_key(key: &str) -> Option<Self> {
        let (v4, v6) = key.split_once('&').map_or((key, None), |(v4, v6)| (v4, Some(v6)));
        let (v4_max, v6_max) = KEY_LENGTH_BITS_MAX;
        let v6 = match v6 {
            None => None,
            Some(v6) => {
                let (address, length) = v6.split_once('-')?;
                let v6 = format!("{address}/{length}").parse::<Prefix<Ipv6Addr>>().ok()?;
                Some((1..=v6_max).contains(&v6.length_bits()).then_some(v6)?)
            }
        };
        if v4 == NO_IPV4_KEY {
            return Self::new(None, v6);
        }
        let v4 = Prefix::from_key(v4).ok()?;
        (1..=v4_max).contains(&v4.length_bits()).then(|| Self::of_v4(v4, v6))
    }
}

impl fmt::Display for Prefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.texts().collect::<Vec<_>>().join(","))
    }
}

impl FromStr for Prefixes {
    type Err = PrefixError;

    /// Reads what is displayed; host bits are masked off.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.split_once(',') {
            Some((v4, v6)) => Self::of_v4(v4.parse()?, Some(v6.parse()?)),
            None if text.contains(':') => Self::of_v6(None, text.parse()?),
            None => Self::of_v4(text.parse()?, None),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: &str) -> Prefixes {
        Prefixes::from_key(key).unwrap_or_else(|| panic!("{key:?} is a key of flannel's"))
    }

    #[test]
    fn keys_of_all_kinds_are_read_and_written_as_flannel_does() {
        for (key, shown) in [
            ("10.5.34.0-24", "10.5.34.0/24"),
            ("10.5.34.0-24&fd00:5:34::-64", "10.5.34.0/24,fd00:5:34::/64"),
            ("0.0.0.0-0&fd00:5:34::-64", "fd00:5:34::/64"),
        ] {
            assert_eq!((of(key).key(), of(key).to_string()), (key.to_owned(), shown.to_owned()));
            assert_eq!(shown.parse::<Prefixes>().unwrap(), of(key));
        }
        assert_eq!(of("10.5.34.0-24&FD00:5:34:0::7-64"), of("10.5.34.0-24&fd00:5:34::-64"));
        for key in [
            "10.12.13-24",
            "10.12.13.300-24",
            "10.12.13.0-24hi",
            "10.12.13.1-24",
            "&2001::-56",
            "10.12.13.0-24&2001::",
            "10.12.13.0-24&2001::-128",
            "10.12.13.0-24&2001::/56",
            "10.12.13.0-24&2001::-0",
            "10.12.13.0-24&",
            "10.12.13.0-24&2001::-+5",
            "10.12.13.0-24&2001::-",
            "10.12.13.0-32&2001::-64",
            "10.12.13.0-32",
            "10.12.13.0-33",
            "10.12.13.0/24",
            "10.12.13.0-024",
            " 10.12.13.0-24",
            "config",
            "10.12.13.0-24/x",
            "0.0.0.0-0",
            "0.0.0.0-1&",
            "",
        ] {
            assert_eq!(Prefixes::from_key(key), None, "{key:?} was taken for subnets");
        }
    }

    #[test]
    fn families_are_compared_each_with_its_own() {
        let dual = of("10.5.34.0-24&fd00:5:34::-64");
        let networks = of("10.5.0.0-16&fd00:5::-32");
        assert_eq!(dual.within(networks), Some(dual));
        assert_eq!(dual.within(of("10.5.0.0-16")), Some(of("10.5.34.0-24")));
        assert_eq!(
            dual.within(of("10.6.0.0-16&fd00:5::-32")),
            Some(of("0.0.0.0-0&fd00:5:34::-64"))
        );
        assert_eq!(dual.within(of("10.6.0.0-16")), None);
        assert_eq!(
            of("10.5.0.0-16&fd00:5:34::-64").part_of(networks),
            Prefixes::new(None, dual.v6)
        );
        assert!(dual.overlaps(of("10.5.34.128-25")) && dual.overlaps(of("0.0.0.0-0&fd00::-16")));
        assert!(!dual.overlaps(of("10.5.35.0-24&fd00:5:35::-64")));
        assert!(!of("10.5.34.0-24").overlaps(of("0.0.0.0-0&fd00:5:34::-64")));
    }
}
