//! What there may be of IPv4, of IPv6 or of both, but of one of them at least.

use std::net::{IpAddr, Ipv4Addr};

/// One of each family, or of one.
///
/// INVARIANT: there is at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Families<V4, V6> {
    pub(super) v4: Option<V4>,
    pub(super) v6: Option<V6>,
}

/// A family of which nothing else is to be said; IPv4 alone, if nobody says anything.
impl Default for Families<(), ()> {
    fn default() -> Self {
        Self::of_v4((), None)
    }
}

impl<V4: Copy, V6: Copy> Families<V4, V6> {
    /// What there is of both; `None` if there is neither.
    pub fn new(v4: Option<V4>, v6: Option<V6>) -> Option<Self> {
        (v4.is_some() || v6.is_some()).then_some(Self { v4, v6 })
    }

    /// The one of IPv4, and `v6` if there is one.
    pub fn of_v4(v4: V4, v6: Option<V6>) -> Self {
        Self { v4: Some(v4), v6 }
    }

    /// The one of IPv6, and `v4` if there is one.
    pub fn of_v6(v4: Option<V4>, v6: V6) -> Self {
        Self { v4, v6: Some(v6) }
    }

    /// The one of IPv4.
    pub fn v4(self) -> Option<V4> {
        self.v4
    }

    /// The one of IPv6.
    pub fn v6(self) -> Option<V6> {
        self.v6
    }

    /// Both, where they lie.
    #[inline(always)]
    pub fn as_ref(&self) -> Families<&V4, &V6> {
        Families { v4: self.v4.as_ref(), v6: self.v6.as_ref() }
    }

    /// What `of_v4` and `of_v6` make of each.
    pub fn map<A, B>(
        self,
        of_v4: impl FnOnce(V4) -> A,
        of_v6: impl FnOnce(V6) -> B,
    ) -> Families<A, B> {
        Families { v4: self.v4.map(of_v4), v6: self.v6.map(of_v6) }
    }
}

impl<V4: Into<IpAddr>, V6: Into<IpAddr>> Families<V4, V6> {
    /// The address of IPv4, or that of IPv6 where there is no other.
    pub fn first(self) -> IpAddr {
        let first = self.v4.map(Into::into).or_else(|| self.v6.map(Into::into));
        // Never seen: one is there.
        first.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }
}

impl<A, B, E> Families<Result<A, E>, Result<B, E>> {
    /// Both, or the first error.
    pub fn transpose(self) -> Result<Families<A, B>, E> {
        Ok(Families { v4: self.v4.transpose()?, v6: self.v6.transpose()? })
    }
}
