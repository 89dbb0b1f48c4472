//! Sets of hosts that are published beside the table.

use std::net::Ipv4Addr;

/// An immutable set of hosts, by their public addresses.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HostSet(Box<[Ipv4Addr]>);

impl HostSet {
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

impl FromIterator<Ipv4Addr> for HostSet {
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
        let set: HostSet = [9, 3, 200, 3].map(host).into_iter().collect();
        assert_eq!(set.hosts(), [3, 9, 200].map(host));
        for number in 0..=255 {
            assert_eq!(set.contains(host(number)), [3, 9, 200].contains(&number));
        }
        assert!(!HostSet::default().contains(host(3)));
    }
}
