//! The difference between what the leases ask for and the kernel's routes, neighbours and
//! forwarding entries. Pure: the caller lists and edits.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use crate::host::state::{
    EntryTable, LinkEntry, LinkId, MacAddress, Route, RouteKind, RouteProtocol, RouteSpec,
};
use crate::route::Prefix;

/// One peer as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    /// Its host.
    pub(super) public_ip: Ipv4Addr,
    /// The route to its subnet; of metric 0.
    pub(super) route: RouteSpec,
    /// Its hardware address in the tunnel; `None` if it is reached without one.
    pub(super) mac: Option<MacAddress>,
}

impl Peer {
    /// One that is reached over `interface` without a router or a tunnel.
    pub(super) fn direct(subnet: Prefix, public_ip: Ipv4Addr, interface: LinkId) -> Self {
        let route = RouteSpec {
            destination: subnet,
            interface,
            gateway: Some(public_ip),
            metric: 0,
            protocol: RouteProtocol::WEFT,
            is_onlink: false,
        };
        Self { public_ip, route, mac: None }
    }

    /// One behind the VXLAN device `interface`. The device marks the route as ours, so its
    /// protocol is flannel's.
    pub(super) fn tunnelled(
        subnet: Prefix,
        public_ip: Ipv4Addr,
        interface: LinkId,
        mac: MacAddress,
    ) -> Self {
        let route = RouteSpec {
            gateway: Some(subnet.network()),
            protocol: RouteProtocol::BOOT,
            is_onlink: true,
            ..Self::direct(subnet, public_ip, interface).route
        };
        Self { public_ip, route, mac: Some(mac) }
    }

    /// The hardware address of the route's gateway, and the host behind that hardware address.
    fn entries(&self) -> impl Iterator<Item = LinkEntry> {
        let entry = |mac, table, address| LinkEntry { table, address, mac };
        let (gateway, host) = (self.route.destination.network(), self.public_ip);
        self.mac.into_iter().flat_map(move |mac| {
            [entry(mac, EntryTable::Neighbours, gateway), entry(mac, EntryTable::Forwarding, host)]
        })
    }
}

/// All peers by their subnets.
pub(super) type Wanted = BTreeMap<Prefix, Peer>;

/// What the kernel has.
#[derive(Debug, Clone, Default)]
pub(super) struct Actual {
    /// The permanent entries of the VXLAN device.
    pub(super) entries: BTreeSet<LinkEntry>,
    pub(super) routes: Vec<Route>,
}

/// What a peer lacks. Set in this order: a route without its
/// gateway would blackhole packets that another route might take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) subnet: Prefix,
    pub(super) entries: Vec<LinkEntry>,
    pub(super) route: Option<RouteSpec>,
}

/// All edits; removals come after what is set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TableDiff {
    pub(super) steps: Vec<Step>,
    pub(super) stale_routes: Vec<RouteSpec>,
    pub(super) stale_entries: Vec<LinkEntry>,
}

/// The difference between `actual` and `wanted`. The entries are all ours; of the routes, those
/// that `is_own` claims. Other routes are left alone, unless they have the place of a wanted one:
/// the main table has one place for each destination, type of service and metric.
pub(super) fn diff(wanted: &Wanted, actual: &Actual, is_own: impl Fn(&Route) -> bool) -> TableDiff {
    let mut in_place: BTreeMap<Prefix, &Route> = BTreeMap::new();
    for route in actual.routes.iter().filter(|route| route.is_in_our_place()) {
        // The first of a destination is the one that the kernel replaces.
        in_place.entry(route.destination).or_insert(route);
    }
    let mut diff = TableDiff::default();
    for (subnet, peer) in wanted {
        let entries = peer.entries().filter(|entry| !actual.entries.contains(entry)).collect();
        let is_in_place = in_place.get(subnet).is_some_and(|found| is_same(&peer.route, found));
        let route = (!is_in_place).then(|| peer.route.clone());
        let step = Step { subnet: *subnet, entries, route };
        if !step.entries.is_empty() || step.route.is_some() {
            diff.steps.push(step);
        }
    }
    let is_replaced = |route: &Route| {
        wanted.contains_key(&route.destination) && in_place.get(&route.destination) == Some(&route)
    };
    let stale = actual.routes.iter().filter(|route| is_own(route) && !is_replaced(route));
    diff.stale_routes = stale.filter_map(removal).collect();
    // Setting an entry replaces the one of its key; removing the old one by that key would take the
    // new one away.
    let keys: BTreeSet<_> = wanted.values().flat_map(Peer::entries).map(key).collect();
    diff.stale_entries =
        actual.entries.iter().copied().filter(|entry| !keys.contains(&key(*entry))).collect();
    diff
}

/// What an entry is known by in its table.
pub(super) fn key(entry: LinkEntry) -> (Option<Ipv4Addr>, Option<MacAddress>) {
    match entry.table {
        EntryTable::Neighbours => (Some(entry.address), None),
        EntryTable::Forwarding => (None, Some(entry.mac)),
    }
}

fn is_same(wanted: &RouteSpec, found: &Route) -> bool {
    let [hop] = found.next_hops.as_slice() else { return false };
    found.kind == RouteKind::Unicast
        && found.protocol == wanted.protocol
        && hop.interface_index == wanted.interface.index
        && hop.gateway == wanted.gateway.map(IpAddr::V4)
}

/// What names `route` for its removal. A route of several ways or of none is not ours.
pub(super) fn removal(route: &Route) -> Option<RouteSpec> {
    let [hop] = route.next_hops.as_slice() else { return None };
    let gateway = match hop.gateway {
        None => None,
        Some(IpAddr::V4(gateway)) => Some(gateway),
        Some(IpAddr::V6(_)) => return None,
    };
    let index = hop.interface_index;
    Some(RouteSpec {
        destination: route.destination,
        interface: LinkId { index, name: format!("if{index}") },
        gateway,
        metric: route.metric,
        protocol: route.protocol,
        is_onlink: false,
    })
}

#[cfg(test)]
mod tests;
