//! What the host's tables must be for the overlay, whichever backend carries it, and which edits
//! that takes: of its device, of neighbours and forwarding entries, of routes. Pure: the caller
//! lists, and `edit` makes the edits.

pub mod edit;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::Ipv4Addr;

use crate::host::listing::FamilyListing;
use crate::host::state::{
    Address, EntryTable, KernelFamily, Link, LinkEntry, LinkId, MacAddress, Route, RouteKind,
    RouteProtocol, RouteSpec,
};
use crate::route::{IpAddress, Prefix};

/// What leads to each part of the overlay.
pub type Ways<A = Ipv4Addr> = BTreeMap<Prefix<A>, Way<A>>;

/// What the tables must be.
#[derive(Debug, Clone)]
pub struct Desired<A: IpAddress = Ipv4Addr> {
    /// The overlay's own device, if it has one.
    pub device: Option<Device<A>>,
    /// Where addresses and routes of ours may be: the overlay, and the one of an earlier run.
    pub networks: Vec<Prefix<A>>,
    /// What leads to each part of it.
    pub ways: Ways<A>,
}

/// The overlay's own device as it must be.
#[derive(Debug, Clone)]
pub struct Device<A: IpAddress = Ipv4Addr> {
    /// By index; the name is for people.
    pub link: LinkId,
    /// The network address of the own subnet, set as that of one host: the source of traffic from
    /// the host itself.
    pub address: A,
    /// Its hardware address, if it matters.
    pub mac: Option<MacAddress>,
    /// The MTU to give it, in bytes; nothing where an operator's own is respected.
    pub mtu_bytes: Option<u32>,
    /// Whether its entries and the routes into it are all ours, as those of a VXLAN device.
    pub is_ours_alone: bool,
}

/// The way to one part of the overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way<A: IpAddress = Ipv4Addr> {
    /// Of the usual metric.
    pub route: RouteSpec<A>,
    /// What the device of the route must know for it.
    pub entries: Vec<LinkEntry<A>>,
    /// Whether somebody else's route in the place of this one is left there.
    pub yields: bool,
}

impl<A: KernelFamily> Way<A> {
    /// The way to `subnet` by its `host`, over an interface without a router or a tunnel.
    pub fn direct(subnet: Prefix<A>, host: A, interface: LinkId) -> Self {
        let route = RouteSpec {
            gateway: Some(host),
            protocol: RouteProtocol::WEFT,
            ..RouteSpec::into_device(subnet, interface)
        };
        Self { route, entries: Vec::new(), yields: false }
    }

    /// The way to `subnet` through the VXLAN device `interface`, whose other end at `host` has the
    /// hardware address `mac`. The device marks the route as ours, so its protocol is flannel's.
    pub fn tunnelled(subnet: Prefix<A>, host: A, interface: LinkId, mac: MacAddress) -> Self {
        let gateway = subnet.network();
        let entry = |table, address| LinkEntry { table, address, mac };
        let entries =
            vec![entry(EntryTable::Neighbours, gateway), entry(EntryTable::Forwarding, host)];
        let route = RouteSpec {
            gateway: Some(gateway),
            is_onlink: true,
            ..RouteSpec::into_device(subnet, interface)
        };
        Self { route, entries, yields: false }
    }
}

/// One edit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit<A: IpAddress = Ipv4Addr> {
    /// Sets the hardware address of a device.
    SetMac(LinkId, MacAddress),
    /// Sets its MTU, in bytes.
    SetMtu(LinkId, u32),
    /// Gives it the overlay address as that of one host.
    AddAddress(LinkId, A),
    /// Removes another address of the overlay network.
    RemoveAddress(LinkId, Address<A>),
    /// Switches it on.
    SetUp(LinkId),
    /// Sets what a way lacks.
    Set(Step<A>),
    /// Removes a route.
    RemoveRoute(RouteSpec<A>),
    /// Removes an entry of a link.
    RemoveEntry(LinkId, LinkEntry<A>),
}

impl<A: KernelFamily> fmt::Display for Edit<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetMac(_, mac) => write!(f, "hardware address {mac} set"),
            Self::SetMtu(_, bytes) => write!(f, "MTU {bytes} set"),
            Self::AddAddress(_, address) => write!(f, "address {address}/{} added", A::BITS),
            Self::RemoveAddress(_, Address { address, prefix_length_bits, .. }) => {
                write!(f, "address {address}/{prefix_length_bits} removed")
            }
            Self::SetUp(_) => f.write_str("switched on"),
            Self::Set(Step { route: Some(route), .. }) => write!(f, "route {route} set"),
            Self::Set(step) => write!(f, "entries for {} set", step.destination),
            Self::RemoveRoute(route) => write!(f, "route {route} removed"),
            Self::RemoveEntry(_, entry) => write!(f, "entry {} removed", entry.address),
        }
    }
}

/// What a way lacks. The entries are set first: a route without its gateway would blackhole packets
/// that another route might take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step<A: IpAddress = Ipv4Addr> {
    /// Where the way leads.
    pub destination: Prefix<A>,
    /// The link of the entries.
    pub link: LinkId,
    /// The entries that are missing.
    pub entries: Vec<LinkEntry<A>>,
    /// A route in its place that has to go before it.
    pub in_the_way: Option<RouteSpec<A>>,
    /// The route, if it is missing or different.
    pub route: Option<RouteSpec<A>>,
    /// Whether the route takes the place of whatever is there.
    pub replaces: bool,
}

/// All edits, and what is to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diff<A: IpAddress = Ipv4Addr> {
    /// Those of the device, in the order that the kernel accepts.
    pub device: Vec<Edit<A>>,
    /// What is set, in any order, after those.
    pub sets: Vec<Edit<A>>,
    /// What is removed, in any order, at the end.
    pub removals: Vec<Edit<A>>,
    /// Routes of somebody else's that win over ours.
    pub foreign_routes: Vec<Route<A>>,
}

impl<A: IpAddress> Default for Diff<A> {
    fn default() -> Self {
        let (device, sets, removals, foreign_routes) = Default::default();
        Self { device, sets, removals, foreign_routes }
    }
}

impl<A: KernelFamily> Desired<A> {
    /// Whether `route` is ours to remove: by weftd's mark, whichever backend set it, or into a
    /// device that is ours alone.
    pub fn owns(&self, route: &Route<A>) -> bool {
        let into_own = |device: &Device<A>| {
            device.is_ours_alone
                && route.next_hops.iter().any(|hop| hop.interface_index == device.link.index)
        };
        (route.protocol == RouteProtocol::WEFT || self.device.as_ref().is_some_and(into_own))
            && self.networks.iter().any(|network| network.covers(route.destination))
    }

    /// The difference to what was `found` in the kernel and to the `entries` of the device; `None`
    /// if the device is gone. Other routes than ours are left alone, unless they have the place of
    /// one that does not yield: the main table has one place for each destination, type of service
    /// and metric.
    pub fn diff(&self, found: &FamilyListing<'_, A>, entries: &[LinkEntry<A>]) -> Option<Diff<A>> {
        let mut diff = Diff::default();
        let mut device_mtu_bytes = u32::MAX;
        if let Some(device) = &self.device {
            let link = found.links.iter().find(|link| link.id.index == device.link.index)?;
            diff.device = self.diff_device(device, link, found.addresses);
            device_mtu_bytes = device.mtu_bytes.unwrap_or(link.mtu_bytes);
        }
        let mut in_place: BTreeMap<Prefix<A>, &Route<A>> = BTreeMap::new();
        for route in found.routes.iter().filter(|route| route.is_in_our_place()) {
            // The first of a destination is the one that the kernel replaces.
            in_place.entry(route.destination).or_insert(route);
        }
        let known = BTreeSet::from_iter(entries);
        for (destination, way) in &self.ways {
            let route = way.route_below(device_mtu_bytes);
            let there = in_place.get(destination);
            let stays =
                |found: &Route<A>| is_same(&route, found) || way.yields && !self.owns(found);
            let is_missing = |entry: &&LinkEntry<A>| !known.contains(*entry);
            let leads_elsewhere = |found: &&&Route<A>| {
                A::ONLINK_GOES_BY_ROUTES && route.is_onlink && !way.has_interface_of(found)
            };
            let step = Step {
                destination: *destination,
                link: route.interface.clone(),
                entries: way.entries.iter().filter(is_missing).copied().collect(),
                in_the_way: there.filter(leads_elsewhere).and_then(|found| found.removal()),
                replaces: !way.yields || there.is_some(),
                route: (!there.is_some_and(|found| stays(found))).then_some(route),
            };
            if step.route.is_some() || !step.entries.is_empty() {
                diff.sets.push(Edit::Set(step));
            }
        }
        let is_replaced = |route: &Route<A>| {
            self.ways.contains_key(&route.destination)
                && in_place.get(&route.destination) == Some(&route)
        };
        let stale = found.routes.iter().filter(|route| self.owns(route) && !is_replaced(route));
        diff.removals.extend(stale.filter_map(Route::removal).map(Edit::RemoveRoute));
        if let Some(Device { link, .. }) = &self.device {
            // Setting an entry replaces the one of its key; removing the old one by that key would
            // take the new one away.
            let wanted = self.ways.values().flat_map(|way| &way.entries).map(key);
            let wanted = BTreeSet::from_iter(wanted);
            let stale = entries.iter().filter(|entry| !wanted.contains(&key(entry)));
            diff.removals.extend(stale.map(|entry| Edit::RemoveEntry(link.clone(), *entry)));
        }
        let is_foreign = |route: &&Route<A>| {
            let way = self.ways.get(&route.destination).filter(|way| way.yields);
            way.is_some_and(|way| !way.has_interface_of(route) && wins(route) && !self.owns(route))
        };
        diff.foreign_routes = found.routes.iter().filter(is_foreign).cloned().collect();
        Some(diff)
    }

    /// The address comes before the removal of others, since the kernel drops a device's routes
    /// with its last address, and the link goes up before the routes, which a link that is down
    /// refuses. Addresses outside the networks are left alone: they cannot become the source of
    /// overlay traffic, while one inside would be a source that peers have no lease for.
    fn diff_device(
        &self,
        device: &Device<A>,
        link: &Link,
        addresses: &[Address<A>],
    ) -> Vec<Edit<A>> {
        let (mut edits, id) = (Vec::new(), || device.link.clone());
        let mac = device.mac.filter(|mac| link.mac != Some(*mac));
        edits.extend(mac.map(|mac| Edit::SetMac(id(), mac)));
        let mtu_bytes = device.mtu_bytes.filter(|bytes| link.mtu_bytes != *bytes);
        edits.extend(mtu_bytes.map(|bytes| Edit::SetMtu(id(), bytes)));
        let owned = addresses.iter().filter(|owned| owned.interface_index == link.id.index);
        let (wanted, others): (Vec<_>, Vec<_>) = owned.partition(|owned| {
            owned.address == device.address && owned.prefix_length_bits == A::BITS
        });
        if wanted.is_empty() {
            edits.push(Edit::AddAddress(id(), device.address));
        }
        let is_inside =
            |owned: &&Address<A>| self.networks.iter().any(|it| it.contains(owned.address));
        let inside = others.into_iter().filter(is_inside);
        edits.extend(inside.map(|owned| Edit::RemoveAddress(id(), *owned)));
        if !link.is_up {
            edits.push(Edit::SetUp(id()));
        }
        edits
    }
}

impl<A: KernelFamily> Way<A> {
    /// The MTU of a route counts more than that of its device, which may be set by hand.
    fn route_below(&self, device_mtu_bytes: u32) -> RouteSpec<A> {
        let mtu_bytes = self.route.mtu_bytes.map(|bytes| bytes.min(device_mtu_bytes));
        RouteSpec { mtu_bytes, ..self.route.clone() }
    }

    fn has_interface_of(&self, found: &Route<A>) -> bool {
        let [hop] = found.next_hops.as_slice() else { return false };
        found.kind == RouteKind::UNICAST && hop.interface_index == self.route.interface.index
    }
}

/// What an entry is known by in its table.
fn key<A: IpAddress>(entry: &LinkEntry<A>) -> (Option<A>, Option<MacAddress>) {
    match entry.table {
        EntryTable::Neighbours => (Some(entry.address), None),
        EntryTable::Forwarding => (None, Some(entry.mac)),
    }
}

/// Whether a route takes packets that ours would have. Of one destination the kernel takes the
/// routes of the packet's type of service first, then those of any; among them the lowest metric
/// (`fib_table_lookup`, net/ipv4/fib_trie.c), than which ours is not higher.
fn wins<A: KernelFamily>(route: &Route<A>) -> bool {
    route.type_of_service != 0 || route.metric <= A::USUAL_METRIC
}

fn is_same<A: KernelFamily>(wanted: &RouteSpec<A>, found: &Route<A>) -> bool {
    let [hop] = found.next_hops.as_slice() else { return false };
    found.kind == RouteKind::UNICAST
        && found.protocol == wanted.protocol
        && hop.interface_index == wanted.interface.index
        && hop.gateway == wanted.gateway.map(Into::into)
        && (wanted.mtu_bytes.is_none() || found.mtu_bytes == wanted.mtu_bytes)
}

#[cfg(test)]
mod tests;
