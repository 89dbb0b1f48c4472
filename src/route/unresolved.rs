//! Peers whose hosts answer no request for their hardware address (RFC 826), as the kernel says:
//! what is sent to them waits in the send buffer for seconds, and goes nowhere.

use std::net::Ipv4Addr;

/// An immutable set of hosts. Small: peers that pods send to, and that are down.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unresolved(Box<[Ipv4Addr]>);

impl Unresolved {
    /// Whether this host is one of them.
    #[inline]
    pub fn contains(&self, host: Ipv4Addr) -> bool {
        !self.0.is_empty() && self.0.binary_search(&host).is_ok()
    }

    /// Them all, in ascending order.
    pub fn hosts(&self) -> &[Ipv4Addr] {
        &self.0
    }
}

impl FromIterator<Ipv4Addr> for Unresolved {
    fn from_iter<T: IntoIterator<Item = Ipv4Addr>>(hosts: T) -> Self {
        let mut hosts: Vec<_> = hosts.into_iter().collect();
        hosts.sort_unstable();
        hosts.dedup();
        Self(hosts.into_boxed_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_what_it_was_made_of() {
        let host = |number: u8| Ipv4Addr::new(192, 0, 2, number);
        let set: Unresolved = [9, 3, 200, 3].map(host).into_iter().collect();
        assert_eq!(set.hosts(), [3, 9, 200].map(host));
        for number in 0..=255 {
            assert_eq!(set.contains(host(number)), [3, 9, 200].contains(&number));
        }
        assert!(!Unresolved::default().contains(host(3)));
    }
}
