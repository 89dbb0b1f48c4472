//! Addresses of either family.

use std::fmt;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::{BitAnd, BitOr, Not};
use std::str::FromStr;

/// An address of one of the two families, which stands for its family where code is generic.
pub trait IpAddress:
    sealed::Sealed + Copy + Ord + Hash + fmt::Debug + fmt::Display + FromStr + Into<IpAddr>
{
    /// The address as an integer in host order.
    type Bits: Copy
        + Ord
        + Hash
        + fmt::Debug
        + BitAnd<Output = Self::Bits>
        + BitOr<Output = Self::Bits>
        + Not<Output = Self::Bits>;

    /// Bits of an address.
    const BITS: u8;
    /// The family's name.
    const NAME: &'static str;
    /// What a prefix of the family is called and looks like.
    const PREFIX: &'static str;

    /// The address, if it is of this family.
    fn of(address: IpAddr) -> Option<Self>;

    /// The address as an integer.
    fn bits(self) -> Self::Bits;

    /// The address of an integer.
    fn of_bits(bits: Self::Bits) -> Self;

    /// The first `length_bits` bits set and all others clear.
    fn mask(length_bits: u8) -> Self::Bits;

    /// The address after this one; `None` after the last.
    fn following(self) -> Option<Self>;

    /// How many blocks of `2^host_bits` addresses, fewer than there are, lie between `base` and
    /// this address, as many as can be counted. One before `base` is farther than all behind it.
    fn blocks_from(self, base: Self, host_bits: u8) -> usize;
}

mod sealed {
    pub trait Sealed: 'static {}
    impl Sealed for std::net::Ipv4Addr {}
    impl Sealed for std::net::Ipv6Addr {}
}

/// A family by its address, the integer of the same size, its name, and what a prefix of it is.
macro_rules! family {
    ($address:ty, $family:ident, $bits:ty, $name:literal, $prefix:literal) => {
        impl IpAddress for $address {
            type Bits = $bits;

            const BITS: u8 = <$bits>::BITS as u8;
            const NAME: &'static str = $name;
            const PREFIX: &'static str = $prefix;

            fn of(address: IpAddr) -> Option<Self> {
                if let IpAddr::$family(address) = address { Some(address) } else { None }
            }

            #[inline]
            fn bits(self) -> $bits {
                self.to_bits()
            }

            #[inline]
            fn of_bits(bits: $bits) -> Self {
                Self::from_bits(bits)
            }

            #[inline]
            fn mask(length_bits: u8) -> $bits {
                let host_bits = <$bits>::BITS - u32::from(length_bits);
                <$bits>::MAX.checked_shl(host_bits).unwrap_or(0)
            }

            fn following(self) -> Option<Self> {
                self.to_bits().checked_add(1).map(Self::from_bits)
            }

            #[inline]
            fn blocks_from(self, base: Self, host_bits: u8) -> usize {
                let apart = self.to_bits().wrapping_sub(base.to_bits());
                usize::try_from(apart >> host_bits).unwrap_or(usize::MAX)
            }
        }
    };
}

family!(Ipv4Addr, V4, u32, "IPv4", "an IPv4 prefix such as 10.5.0.0/16");
family!(Ipv6Addr, V6, u128, "IPv6", "an IPv6 prefix such as fd00:5::/48");
