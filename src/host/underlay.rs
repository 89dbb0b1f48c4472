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
/// the index, since a link may be renamed, or deleted and made again.
#[must_use]
pub fn carrier(address: Ipv4Addr, links: &[Link], addresses: &[Address]) -> Option<Underlay> {
    let owner = addresses.iter().find(|owned| owned.address == address)?.interface_index;
    let link = links.iter().find(|link| link.id.index == owner && link.mtu_bytes > 0)?;
    Some(Underlay { name: link.id.name.clone(), mtu_bytes: link.mtu_bytes })
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
        Ok(Self { netlink, events: Netlink::events()?, address, away_since: None })
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
            let found = carrier(self.address, &links, &addresses);
            let wait = match found {
                Some(underlay) => {
                    self.away_since = None;
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
