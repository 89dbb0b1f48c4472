//! Chooses the interface that carries the tunnel, and the address for the peers (flannel's rules).
//! `select` decides over a snapshot without I/O; `discover` takes the snapshot and logs.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures_util::future::OptionFuture;
use regex::Regex;

use crate::config::options::InterfaceOptions;
use crate::failure::with_causes;
use crate::host::listing::{FamilyListing, Listing};
use crate::host::netlink::{self, NetlinkError};
use crate::host::state::{Address, KernelFamily, Link, NextHop, PathToHost, Route, RouteKind};
use crate::route::{Families, IpAddress};

/// The interface that the tunnel runs over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalInterface {
    /// Its name.
    pub name: String,
    /// The kernel's index of it.
    pub index: u32,
    /// Its addresses of each family by which hosts reach each other.
    pub addresses: Families<ExternalAddress, ExternalAddress<Ipv6Addr>>,
    /// Largest IP packet it carries, in bytes; never 0.
    pub mtu_bytes: u32,
}

/// The addresses of one family of the external interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExternalAddress<A: IpAddress = Ipv4Addr> {
    /// Its own, to which sockets are bound.
    pub address: A,
    /// The one that peers send to; differs from `address` behind a NAT.
    pub public_address: A,
}

impl<A: IpAddress> ExternalAddress<A> {
    /// An interface's `address`, unless peers are told another.
    pub fn of(address: A, public_address: Option<A>) -> Self {
        Self { address, public_address: public_address.unwrap_or(address) }
    }
}

impl ExternalInterface {
    /// Its IPv4 addresses, if nodes need any.
    pub fn v4(&self) -> Option<ExternalAddress> {
        self.addresses.v4()
    }

    /// Its IPv6 addresses, if nodes need any.
    pub fn v6(&self) -> Option<ExternalAddress<Ipv6Addr>> {
        self.addresses.v6()
    }

    /// Its own address, by which it is found again: of IPv4, if it has to have one.
    pub fn address(&self) -> IpAddr {
        self.addresses.map(|v4| v4.address, |v6| v6.address).first()
    }

    /// The address that peers send to, of the same family: the one by which others know the node.
    pub fn node_address(&self) -> IpAddr {
        self.addresses.map(|v4| v4.public_address, |v6| v6.public_address).first()
    }
}

/// Why no interface was chosen.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// There is none by default, or nothing that was asked for.
    #[error("Failed to find {0}")]
    None(String),
    /// The host could not be asked.
    #[error("cannot list the interfaces of this host")]
    Netlink(#[from] NetlinkError),
}

/// Asks the kernel, chooses, and logs each step.
pub async fn discover(options: &InterfaceOptions) -> Result<ExternalInterface, InterfaceError> {
    let mut notes = Vec::new();
    let found = look(options, &mut notes).await;
    for note in notes {
        tracing::info!("{note}");
    }
    found
}

/// As `discover`; the log's lines go to `notes`.
pub async fn look(
    options: &InterfaceOptions,
    notes: &mut Vec<String>,
) -> Result<ExternalInterface, InterfaceError> {
    let host = Listing::with_default_routes(options.families).await?;
    let path = options.can_reach.map(|destination| path_to(destination, options.families));
    let path = OptionFuture::from(path).await;
    select(options, &host, path, notes)
}

async fn path_to(destination: IpAddr, families: Families<(), ()>) -> Found<PathToHost> {
    let host = destination.to_canonical();
    if host.is_ipv4() && families.v4().is_none() {
        return Err(format!("{destination} is an IPv4 address, but the network has no IPv4"));
    }
    if host.is_ipv6() && families.v6().is_none() {
        return Err(format!("{destination} is an IPv6 address, but the tunnel runs over IPv4"));
    }
    netlink::path_to(host).await.map_err(|error| with_causes(&error))
}

/// Chooses by flannel's order: `--iface` in order, then `--iface-regex` in order, then
/// `--iface-can-reach`; with none of them the owner of `--public-ip`, or of `--public-ipv6` in a
/// network without IPv4, else the default route's interface. `notes` receives the lines that
/// operators expect in the log.
pub fn select(
    options: &InterfaceOptions,
    host: &Listing,
    path: Option<Found<PathToHost>>,
    notes: &mut Vec<String>,
) -> Result<ExternalInterface, InterfaceError> {
    let InterfaceOptions { interfaces, regexes, can_reach, .. } = options;
    let mut search = Search { host, options, notes };
    if interfaces.is_empty() && regexes.is_empty() && can_reach.is_none() {
        let public = match options.families.v4() {
            Some(()) => options.public_ip.map(IpAddr::V4),
            None => options.public_ipv6.map(IpAddr::V6),
        };
        let found = match public {
            Some(address) => search.by_address(address),
            None => search.by_default_route(),
        };
        let found = found.and_then(|found| search.complete(found));
        let none = |why| InterfaceError::None(format!("any valid interface to use: {why}"));
        return found.map_err(none);
    }
    for wanted in interfaces {
        let found = search.by_name_or_address(wanted);
        if let Some(interface) = search.take(wanted, found) {
            return Ok(interface);
        }
    }
    for pattern in regexes {
        let found = search.by_pattern(pattern);
        if let Some(interface) = search.take(pattern.as_str(), found) {
            return Ok(interface);
        }
    }
    if let Some((destination, path)) = can_reach.zip(path) {
        let found = search.by_path(destination, path);
        if let Some(interface) = search.take(&destination.to_string(), found) {
            return Ok(interface);
        }
    }
    Err(InterfaceError::None(format!(
        "interface to use that matches the interfaces and/or regexes provided (available: {})",
        candidates(host)
    )))
}

/// What one way of looking found, or why nothing, in flannel's words as far as it has some.
type Found<T> = Result<T, String>;

/// An interface, and its address if the search was for one.
struct Choice<'a> {
    link: &'a Link,
    address: Option<IpAddr>,
}

struct Search<'a> {
    host: &'a Listing,
    options: &'a InterfaceOptions,
    notes: &'a mut Vec<String>,
}

impl<'a> Search<'a> {
    fn by_name_or_address(&mut self, wanted: &str) -> Found<Choice<'a>> {
        // flannel's manifests pass `--iface=$(VARIABLE)`; an empty one means the default.
        if wanted.is_empty() {
            return self.by_default_route();
        }
        if let Ok(address) = wanted.parse::<IpAddr>() {
            return self.by_address(address);
        }
        let link = self.host.links.iter().find(|link| link.id.name == wanted);
        let missing = || format!("error looking up interface {wanted}: no such network interface");
        Ok(Choice { link: link.ok_or_else(missing)?, address: None })
    }

    fn by_address(&mut self, address: IpAddr) -> Found<Choice<'a>> {
        self.notes.push(format!("Searching for interface using {address}"));
        let flag = if address.is_ipv4() { "--public-ip" } else { "--public-ipv6" };
        let no_owner = format!(
            "error looking up interface {address}: no interface with given IP found that is not \
             deprecated; a {flag} that no interface owns (NAT) needs --iface as well"
        );
        let address = address.to_canonical();
        let link = self.useful_first().find(|link| match address {
            IpAddr::V4(address) => self.host.v4().has(link, address),
            IpAddr::V6(address) => {
                usable_addresses(&self.host.v6(), link.id.index).contains(&address)
            }
        });
        let link = link.ok_or(no_owner)?;
        Ok(Choice { link, address: Some(address) })
    }

    /// All links in the kernel's order, but for the loopback, the kernel's first: hosts that
    /// announce their address to routers have it there too, and no tunnel leaves by it.
    fn useful_first(&self) -> impl Iterator<Item = &'a Link> + use<'a> {
        let links = &self.host.links;
        let by_use = |is_loopback| links.iter().filter(move |link| link.is_loopback == is_loopback);
        by_use(false).chain(by_use(true))
    }

    /// Addresses of every interface are tried before the first name, so that a pattern such as
    /// `10\.` cannot be caught by an interface called `vlan10.5`.
    fn by_pattern(&mut self, pattern: &Regex) -> Found<Choice<'a>> {
        if pattern.as_str().is_empty() {
            return self.by_default_route();
        }
        for link in self.useful_first() {
            let v4 = usable_addresses(&self.host.v4(), link.id.index).into_iter().map(IpAddr::V4);
            let v4 = v4.filter(|_| self.options.families.v4().is_some());
            let v6 = usable_addresses(&self.host.v6(), link.id.index).into_iter().map(IpAddr::V6);
            let matched = v4.chain(v6).find(|address| pattern.is_match(&address.to_string()));
            if matched.is_some() {
                return Ok(Choice { link, address: matched });
            }
        }
        let link = self.host.links.iter().find(|link| pattern.is_match(&link.id.name));
        let missing = || {
            let all = candidates(self.host);
            format!(
                "could not match pattern {pattern} to any of the available network interfaces \
                 ({all})"
            )
        };
        Ok(Choice { link: link.ok_or_else(missing)?, address: None })
    }

    fn by_path(&mut self, destination: IpAddr, path: Found<PathToHost>) -> Found<Choice<'a>> {
        self.notes
            .push(format!("Determining interface to use based on given ifcanreach: {destination}"));
        let found = path.and_then(|path| {
            Ok(Choice { link: self.link(path.interface_index)?, address: path.preferred_source })
        });
        found.map_err(|reason| format!("failed to get ifcanreach based interface: {reason}"))
    }

    /// The first default route of the main table decides: within one destination the kernel lists
    /// the lowest metric first.
    fn by_default_route(&mut self) -> Found<Choice<'a>> {
        self.notes.push("Determining IP address of default interface".to_owned());
        let (is_v4, v4, v6) =
            (self.options.families.v4().is_some(), self.host.v4(), self.host.v6());
        let hops = if is_v4 { default_hops(v4.routes) } else { default_hops(v6.routes) };
        let found = match hops {
            Some([hop]) => self.link(hop.interface_index),
            Some(_) => Err("found default route but could not determine interface (it is \
                            multipath or a blackhole); name the interface with --iface"
                .to_owned()),
            None => Err("unable to find default route; name the interface with --iface".to_owned()),
        };
        let what = if is_v4 { "default" } else { "default v6" };
        let link = found.map_err(|why| format!("failed to get {what} interface: {why}"))?;
        Ok(Choice { link, address: None })
    }

    fn link(&self, index: u32) -> Found<&'a Link> {
        let link = self.host.links.iter().find(|link| link.id.index == index);
        link.ok_or_else(|| format!("no link has index {index}"))
    }

    fn complete(&mut self, found: Choice<'a>) -> Found<ExternalInterface> {
        let Choice { link, address } = found;
        let (name, families) = (link.id.name.clone(), self.options.families);
        let v6 = families.v6().map(|()| self.v6_of(link, address)).transpose()?;
        let v4 = families.v4().map(|()| self.v4_of(link, address)).transpose()?;
        let addresses = Families::new(v4, v6).ok_or("no family of addresses is looked for")?;
        let (index, mtu_bytes) = (link.id.index, link.mtu_bytes);
        let found = ExternalInterface { name, index, addresses, mtu_bytes };
        if link.mtu_bytes == 0 {
            let address = found.address();
            return Err(format!("failed to determine MTU for {address} interface"));
        }
        Ok(found)
    }

    /// The IPv4 addresses of `link`, which has `address`, if the search was for one.
    fn v4_of(&mut self, link: &Link, address: Option<IpAddr>) -> Found<ExternalAddress> {
        let name = &link.id.name;
        let preferred = || usable_addresses(&self.host.v4(), link.id.index).into_iter().next();
        let missing = || format!("failed to find IPv4 address for interface {name}");
        let address = address.and_then(Ipv4Addr::of).or_else(preferred).ok_or_else(missing)?;
        self.notes.push(format!("Using interface with name {name} and address {address}"));
        self.notes.push(match self.options.public_ip {
            Some(public) => format!("Using {public} as external address"),
            None => format!("Defaulting external address to interface address ({address})"),
        });
        Ok(ExternalAddress::of(address, self.options.public_ip))
    }

    /// The IPv6 addresses of `link`, which has `address`, if the search was for one.
    /// Without IPv4 a node is known by it, so that it may not be one of the link alone, which is
    /// there before all others when an interface comes up, unless somebody asked for that.
    fn v6_of(&mut self, link: &Link, address: Option<IpAddr>) -> Found<ExternalAddress<Ipv6Addr>> {
        let (name, is_alone) = (&link.id.name, self.options.families.v4().is_none());
        let usable = usable_addresses(&self.host.v6(), link.id.index);
        let preferred = usable.into_iter().find(|address| !is_alone || !address.is_of_link());
        let missing = || {
            let why = match is_alone {
                true => "one of the link alone is not enough",
                false => "both families go over one interface",
            };
            let all = self.host.addresses_v6.iter();
            let deprecated =
                all.filter(|it| it.interface_index == link.id.index && it.is_deprecated);
            let deprecated = deprecated.map(|it| format!("; {} is deprecated", it.address));
            let deprecated: String = deprecated.collect();
            format!(
                "failed to find IPv6 address for interface {name}: {why}, and a new address counts \
                 once no other host has it{deprecated}"
            )
        };
        let address = address.and_then(Ipv6Addr::of).or(preferred).ok_or_else(missing)?;
        self.notes.push(format!("Using interface with name {name} and v6 address {address}"));
        let v6 = ExternalAddress::of(address, self.options.public_ipv6);
        self.notes.push(match self.options.public_ipv6 {
            Some(public) => format!("Using {public} as external IPv6 address"),
            None => format!("Defaulting external v6 address to interface address ({address})"),
        });
        Ok(v6)
    }

    /// What was found, in full; a miss goes to the notes.
    fn take(&mut self, wanted: &str, found: Found<Choice<'a>>) -> Option<ExternalInterface> {
        let found = found.and_then(|found| self.complete(found));
        let note = |why| format!("Could not find valid interface matching {wanted}: {why}");
        found.map_err(|why| self.notes.push(note(why))).ok()
    }
}

/// Where the first default route leads, if there is one. The kernel lists those of IPv6 that lead
/// nowhere as if they led to the loopback.
fn default_hops<A: IpAddress>(routes: &[Route<A>]) -> Option<&[NextHop]> {
    let default = routes.iter().find(|route| route.destination.length_bits() == 0)?;
    let is_forwarding = default.kind == RouteKind::UNICAST;
    Some(if is_forwarding { default.next_hops.as_slice() } else { &[] })
}

/// The addresses of an interface that a tunnel can use, best first: global before link-local,
/// permanent before dynamic, primary before secondary, else in the kernel's order.
/// Deprecated, loopback, multicast, broadcast and unspecified addresses are left out; of IPv6 also
/// those that change from time to time, or that another host may have.
pub(super) fn usable_addresses<A: KernelFamily>(
    host: &FamilyListing<'_, A>,
    interface_index: u32,
) -> Vec<A> {
    let is_usable = |owned: &&Address<A>| {
        owned.interface_index == interface_index
            && !owned.is_deprecated
            && !owned.is_in_doubt
            && (!A::SECONDARY_CHANGES || !owned.is_secondary)
            && owned.address.is_of_host()
    };
    let mut usable: Vec<_> = host.addresses.iter().filter(is_usable).collect();
    usable.sort_by_key(|owned| {
        (owned.address.is_of_link(), Reverse(owned.is_permanent), owned.is_secondary)
    });
    usable.into_iter().map(|owned| owned.address).collect()
}

/// `name:ip` of every interface, for the message of a total miss.
fn candidates(host: &Listing) -> String {
    let mut list = Vec::new();
    for link in &host.links {
        let v4 = usable_addresses(&host.v4(), link.id.index).into_iter().map(IpAddr::V4);
        let v6 = usable_addresses(&host.v6(), link.id.index).into_iter().map(IpAddr::V6);
        let addresses: Vec<_> = v4.chain(v6).collect();
        if addresses.is_empty() {
            list.push(format!("{}:none", link.id.name));
        }
        list.extend(addresses.iter().map(|address| format!("{}:{address}", link.id.name)));
    }
    list.join(", ")
}

#[cfg(test)]
mod tests;
