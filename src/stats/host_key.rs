//! Hosts outside the overlay, in few bytes.

use std::net::Ipv4Addr;

/// A host outside the overlay, by the four bytes that workers compare and count by: its IPv4
/// address, or the number that the route table has given its IPv6 address. Numbers are what is no
/// IPv4 address of a host: 0.0.0.0/8 (RFC 791, section 3.2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostKey(u32);

/// Numbers are below this one.
const NUMBERS_END: u32 = 1 << 24;

impl HostKey {
    /// No host.
    pub const NOBODY: Self = Self(0);

    /// The key of number `index`, which begin with 0; nobody's, if it is none.
    pub const fn of_index(index: usize) -> Self {
        if index < NUMBERS_END as usize - 1 { Self(index as u32 + 1) } else { Self::NOBODY }
    }

    /// Its number, if that is what it is.
    #[inline]
    pub fn index(self) -> Option<usize> {
        (self.0 < NUMBERS_END).then(|| (self.0 as usize).wrapping_sub(1))
    }

    /// The key as an integer.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The key of an integer.
    #[inline]
    pub(super) fn of_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The IPv4 address, if it is one.
    #[inline]
    pub fn v4(self) -> Option<Ipv4Addr> {
        (self.0 >= NUMBERS_END).then(|| Ipv4Addr::from_bits(self.0))
    }
}

impl From<Ipv4Addr> for HostKey {
    #[inline]
    fn from(address: Ipv4Addr) -> Self {
        let bits = address.to_bits();
        if bits < NUMBERS_END { Self::NOBODY } else { Self(bits) }
    }
}
