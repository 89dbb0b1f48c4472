//! The interface beneath the tunnel, watched: which link has the tunnel's address, and its MTU.
//! `carrier` decides over listings, without I/O. Changes nothing on the host.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::timeout;

use super::netlink::{Events, Netlink, NetlinkError};
use super::state::{Address, Link};

/// The listings are read this often even if the kernel reports no change, which heals whatever a
/// lost event hid.
const RESYNC_INTERVAL: Duration = Duration::from_secs(60);

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
}

impl UnderlayWatch {
    /// Watches the link that has `address`.
    pub fn new(netlink: Netlink, address: Ipv4Addr) -> Result<Self, NetlinkError> {
        Ok(Self { netlink, events: Netlink::events()?, address })
    }

    /// Waits until the link differs from `known`, and gives what it is now. An address that is away
    /// for a while is no change: nothing can be adapted to a link that is not there.
    /// Cancel-safe: each call begins with a comparison.
    pub async fn changed(&mut self, known: &Underlay) -> Result<Underlay, NetlinkError> {
        loop {
            let (links, addresses) = (self.netlink.links().await?, self.netlink.addresses().await?);
            let found = carrier(self.address, &links, &addresses);
            if let Some(underlay) = found.filter(|found| found != known) {
                return Ok(underlay);
            }
            if let Ok(Err(error)) = timeout(RESYNC_INTERVAL, self.events.changed()).await {
                return Err(error);
            }
        }
    }
}
