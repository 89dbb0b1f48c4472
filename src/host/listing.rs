//! The host's tables as the kernel lists them: what backends compare with what they want, what the
//! external interface is chosen from, and what `weft check` looks at.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::host::netlink::{self, Result, routes};
use crate::host::state::{Address, KernelFamily, Link, Route};
use crate::route::{Families, IpAddress, Prefix};

/// The tables, each in the kernel's order.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// All links.
    pub links: Vec<Link>,
    /// All IPv4 addresses.
    pub addresses: Vec<Address>,
    /// IPv4 routes of the main table: those that were asked for.
    pub routes: Vec<Route>,
    /// All IPv6 addresses, if IPv6 was asked for.
    pub addresses_v6: Vec<Address<Ipv6Addr>>,
    /// IPv6 routes of the main table: those that were asked for.
    pub routes_v6: Vec<Route<Ipv6Addr>>,
}

/// What was found of one family.
#[derive(Debug, Clone, Copy)]
pub struct FamilyListing<'a, A: IpAddress = Ipv4Addr> {
    /// All links.
    pub links: &'a [Link],
    /// All addresses.
    pub addresses: &'a [Address<A>],
    /// The routes that were asked for.
    pub routes: &'a [Route<A>],
}

impl Listing {
    /// Lists now, with the routes into `networks` and into those of IPv6, `v6`. Without any a
    /// table, which may be long, is not read.
    pub async fn read(networks: &[Prefix], v6: &[Prefix<Ipv6Addr>]) -> Result<Self> {
        let mut host = Self::without_routes().await?;
        if !networks.is_empty() {
            host.routes = into(networks).await?;
        }
        if !v6.is_empty() {
            host.addresses_v6 = netlink::addresses().await?;
            host.routes_v6 = into(v6).await?;
        }
        Ok(host)
    }

    /// IPv4.
    pub fn v4(&self) -> FamilyListing<'_> {
        FamilyListing { links: &self.links, addresses: &self.addresses, routes: &self.routes }
    }

    /// IPv6.
    pub fn v6(&self) -> FamilyListing<'_, Ipv6Addr> {
        FamilyListing { links: &self.links, addresses: &self.addresses_v6, routes: &self.routes_v6 }
    }

    /// Lists now, with the IPv4 routes that are `wanted`.
    pub async fn with_routes(wanted: impl Fn(Prefix) -> bool) -> Result<Self> {
        let host = Self::without_routes().await?;
        Ok(Self { routes: routes::routes_to(wanted).await?, ..host })
    }

    /// Lists now, with the addresses of `families`, and the default routes of the first.
    pub async fn with_default_routes(families: Families<(), ()>) -> Result<Self> {
        let mut host = Self::without_routes().await?;
        if families.v6().is_some() {
            host.addresses_v6 = netlink::addresses().await?;
        }
        match families.v4() {
            Some(()) => host.routes = routes::routes_to(|to| to.length_bits() == 0).await?,
            None => host.routes_v6 = routes::routes_to(|to| to.length_bits() == 0).await?,
        }
        Ok(host)
    }

    /// Whether `link` has this address.
    pub fn has(&self, link: &Link, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.v4().has(link, address),
            IpAddr::V6(address) => self.v6().has(link, address),
        }
    }

    async fn without_routes() -> Result<Self> {
        let (links, addresses) = (netlink::links().await?, netlink::addresses().await?);
        Ok(Self { links, addresses, ..Self::default() })
    }
}

impl<A: IpAddress> FamilyListing<'_, A> {
    /// Whether `link` has this address, and no other host may have it.
    pub fn has(&self, link: &Link, address: A) -> bool {
        let mut owned = self.addresses.iter().filter(|it| it.interface_index == link.id.index);
        owned.any(|it| it.address == address && !it.is_in_doubt)
    }
}

async fn into<A: KernelFamily>(networks: &[Prefix<A>]) -> Result<Vec<Route<A>>> {
    routes::routes_to(|to| networks.iter().any(|network| network.covers(to))).await
}
