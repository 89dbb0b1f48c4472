//! The interface beneath the tunnel, watched: which link has the tunnel's address, and its MTU.
//! `carrier` decides over listings, without I/O. Changes nothing on the host.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::netlink::{Events, Netlink, NetlinkError};
use super::state::{Address, Link};

/// The listings are read this often even if the kernel reports no change, which heals whatever a
/// lost event hid.
const RESYNC_INTERVAL: Duration = Duration::from_secs(60);

/// For how long an address is missed before it is taken for gone: whoever replaces it removes the
/// old one first. Also how often it is looked for then.
const AWAY_AFTER: Duration = Duration::from_millis(300);

/// What became of the link beneath the tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The address has another link, or its link is another.
    Link(Underlay),
    /// No link has had the address for a while.
    Away,
}

/// The link beneath the tunnel, as far as the tunnel depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Underlay {
    /// Its name.
    pub name: String,
    /// Largest IP packet it carries, in bytes.
    pub mtu_bytes: u32,
}

/// The link that has `address`; `None` while no link has it. By the address and not by the name or
/// the index, since a link may be renamed, or deleted and made again. Of several, the one that is
/// known, by its name; else one that leads to other hosts: hosts that announce their address to
/// routers have it on `lo` too, and that one leads to nobody.
#[must_use]
pub fn carrier<'a>(
    address: Ipv4Addr,
    known: &str,
    links: &'a [Link],
    addresses: &[Address],
) -> Option<&'a Link> {
    let owns = |link: &&Link| {
        let index = link.id.index;
        addresses.iter().any(|owned| owned.address == address && owned.interface_index == index)
    };
    let owners = || links.iter().filter(owns).filter(|link| link.mtu_bytes > 0);
    owners().find(|link| link.id.name == known).or_else(|| owners().find(|link| !link.is_loopback))
}

/// Waits for changes of the link beneath the tunnel.
#[derive(Debug)]
pub struct UnderlayWatch {
    netlink: Netlink,
    events: Events,
    address: Ipv4Addr,
    away_since: Option<Instant>,
}

impl UnderlayWatch {
    /// Watches the link that has `address`.
    pub fn new(netlink: Netlink, address: Ipv4Addr) -> Result<Self, NetlinkError> {
        Ok(Self { netlink, events: Netlink::events()?.only_about(&[]), address, away_since: None })
    }

    /// Watches the link that has `address` from now on.
    pub fn turn_to(&mut self, address: Ipv4Addr) {
        (self.address, self.away_since) = (address, None);
    }

    /// Waits until the link differs from `known`, and gives what it is now; or says that the
    /// address is away, again and again while it is. Cancel-safe: each call begins with a
    /// comparison.
    pub async fn changed(&mut self, known: &Underlay) -> Result<Change, NetlinkError> {
        loop {
            let (links, addresses) = (self.netlink.links().await?, self.netlink.addresses().await?);
            let wait = match carrier(self.address, &known.name, &links, &addresses) {
                Some(link) => {
                    self.away_since = None;
                    let (name, mtu_bytes) = (link.id.name.clone(), link.mtu_bytes);
                    let underlay = Underlay { name, mtu_bytes };
                    if underlay != *known {
                        return Ok(Change::Link(underlay));
                    }
                    RESYNC_INTERVAL
                }
                None => {
                    let since = *self.away_since.get_or_insert_with(Instant::now);
                    let left = AWAY_AFTER.saturating_sub(since.elapsed());
                    if left.is_zero() {
                        self.away_since = Some(Instant::now());
                        return Ok(Change::Away);
                    }
                    left
                }
            };
            if let Ok(Err(error)) = timeout(wait, self.events.changed()).await {
                return Err(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::state::{LinkId, Scope};

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn link(index: u32, name: &str) -> Link {
        Link {
            id: LinkId { index, name: name.to_owned() },
            mtu_bytes: 1500,
            transmit_queue_length: 1000,
            is_up: true,
            is_running: true,
            is_loopback: name == "lo",
        }
    }

    fn on(interface_index: u32) -> Address {
        Address {
            interface_index,
            address: ADDRESS,
            prefix_length_bits: 32,
            scope: Scope::Global,
            is_permanent: true,
            is_deprecated: false,
            is_secondary: false,
        }
    }

    #[test]
    fn the_known_interface_stays_while_it_has_the_address() {
        let links = [link(1, "lo"), link(2, "eth0"), link(3, "eth1")];
        let found = |known, owners: &[u32]| {
            let addresses: Vec<_> = owners.iter().copied().map(on).collect();
            carrier(ADDRESS, known, &links, &addresses).map(|link| link.id.name.clone())
        };
        assert_eq!(found("eth1", &[1, 2, 3]).as_deref(), Some("eth1"));
        assert_eq!(found("eth1", &[1, 2]).as_deref(), Some("eth0"), "renamed, or moved");
        assert_eq!(found("eth1", &[1]), None, "the loopback leads to nobody");
        assert_eq!(found("lo", &[1, 2]).as_deref(), Some("lo"), "it was asked for");
        assert_eq!(found("eth1", &[]), None);
    }
}
