//! The host's tables as the kernel lists them: what backends compare with what they want, what the
//! external interface is chosen from, and what `weft check` looks at.

use std::net::Ipv4Addr;

use crate::host::netlink::{self, Result, routes};
use crate::host::state::{Address, Link, Route};
use crate::route::Prefix;

/// The tables, each in the kernel's order.
#[derive(Debug, Clone)]
pub struct Listing {
    /// All links.
    pub links: Vec<Link>,
    /// All IPv4 addresses.
    pub addresses: Vec<Address>,
    /// IPv4 routes of the main table: those that were asked for.
    pub routes: Vec<Route>,
}

impl Listing {
    /// Lists now, with the routes into `networks`. Without any the table, which may be long, is not
    /// read.
    pub async fn read(networks: &[Prefix]) -> Result<Self> {
        if networks.is_empty() {
            return Self::without_routes().await;
        }
        Self::with_routes(|to| networks.iter().any(|network| network.covers(to))).await
    }

    /// Lists now, with the routes that are `wanted`.
    pub async fn with_routes(wanted: impl Fn(Prefix) -> bool) -> Result<Self> {
        let host = Self::without_routes().await?;
        Ok(Self { routes: routes::routes_to(wanted).await?, ..host })
    }

    /// Whether `link` has this address.
    pub fn has(&self, link: &Link, address: Ipv4Addr) -> bool {
        let mut owned = self.addresses.iter().filter(|it| it.interface_index == link.id.index);
        owned.any(|it| it.address == address)
    }

    async fn without_routes() -> Result<Self> {
        let (links, addresses) = (netlink::links().await?, netlink::addresses().await?);
        Ok(Self { links, addresses, routes: Vec::new() })
    }
}
