//! Where peers are reached, in few bytes: endpoints as workers know them, and the IPv6 addresses
//! that have numbers there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::stats::HostKey;

/// A tunnel endpoint, by what workers compare and count hosts by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Its host.
    pub host: HostKey,
    /// Its UDP port.
    pub port: u16,
}

/// The hosts with IPv6 addresses that are peers or have been, each with its number. A number is
/// never given to another one, for it may still be counted by, or on its way in a worker: 36 bytes
/// for each host that was ever a peer of this weftd.
#[derive(Debug, Clone, Default)]
pub(super) struct Hosts {
    /// In the order of their numbers.
    numbered: Vec<Ipv6Addr>,
    /// In ascending order.
    keys: Vec<(Ipv6Addr, HostKey)>,
}

impl Hosts {
    /// Gives numbers to those of `addresses` that have none.
    pub(super) fn add(&mut self, addresses: impl Iterator<Item = IpAddr>) {
        for address in addresses {
            let IpAddr::V6(address) = address else { continue };
            if let Err(at) = self.find(address) {
                self.keys.insert(at, (address, HostKey::of_index(self.numbered.len())));
                self.numbered.push(address);
            }
        }
    }

    /// What workers know `address` by; nobody, if it is of IPv6 and has no number.
    #[inline]
    pub(super) fn key(&self, address: IpAddr) -> HostKey {
        match address {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => {
                let known = self.find(address).ok().and_then(|at| self.keys.get(at));
                known.map_or(HostKey::NOBODY, |(_, key)| *key)
            }
        }
    }

    /// The endpoint that workers know as `endpoint`; one that nothing can be sent to, if they know
    /// none by that.
    #[inline]
    pub(super) fn address(&self, Endpoint { host, port }: Endpoint) -> SocketAddr {
        let numbered = || host.index().and_then(|index| self.numbered.get(index));
        let address = match host.v4() {
            Some(address) => IpAddr::V4(address),
            None => numbered().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |it| IpAddr::V6(*it)),
        };
        SocketAddr::new(address, port)
    }

    fn find(&self, address: Ipv6Addr) -> Result<usize, usize> {
        self.keys.binary_search_by_key(&address, |(address, _)| *address)
    }
}
