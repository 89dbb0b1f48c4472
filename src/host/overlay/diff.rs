//! The difference between the desired and the actual state of the overlay device. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::host::follower::Listing;
use crate::host::state::{Address, LinkId, Route, RouteKind, RouteProtocol, RouteSpec};
use crate::route::Prefix;

/// The overlay address is a single host: no broadcast address, no on-link route.
pub(super) const HOST_LENGTH_BITS: u8 = 32;

/// flannel sets its route without a metric, which is the strongest.
const ROUTE_METRIC: u32 = 0;

/// What the overlay device must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayDesired {
    /// The device, by index; the name is for people.
    pub device: LinkId,
    /// The network address of the own subnet, set as a /32: the source of traffic from the host
    /// itself.
    pub address: Ipv4Addr,
    /// MTU of the device, in bytes.
    pub mtu_bytes: u16,
    /// The whole overlay network, routed into the device.
    pub network: Prefix,
    /// This host's part of it, as far as that is known.
    pub subnet: Option<Prefix>,
    /// The subnets whose path takes less than the device, and what it takes, in bytes. Each has a
    /// route of its own with that MTU: the kernel then tells pods by ICMP, fragments what may be
    /// fragmented, and treats all other subnets as before.
    pub path_mtus: BTreeMap<Prefix, u16>,
}

impl OverlayDesired {
    /// Whether any of the network is elsewhere. A host whose subnet is all of it has nothing to
    /// send into the device, and the pods' bridge has the route.
    fn has_remote_subnets(&self) -> bool {
        self.subnet != Some(self.network)
    }

    /// The route that leads the network into the device, with flannel's attributes.
    pub fn route(&self) -> RouteSpec {
        RouteSpec {
            destination: self.network,
            interface: self.device.clone(),
            gateway: None,
            metric: ROUTE_METRIC,
            protocol: RouteProtocol::BOOT,
            is_onlink: false,
        }
    }

    /// The route to a subnet whose path takes less than the device.
    pub fn path_route(&self, subnet: Prefix) -> RouteSpec {
        RouteSpec { destination: subnet, protocol: RouteProtocol::WEFT, ..self.route() }
    }

    /// Whether `route` is one that [`Self::path_route`] gives, for any subnet.
    fn is_path_route(&self, route: &Route) -> bool {
        route.protocol == RouteProtocol::WEFT
            && leads_into_device(self, route)
            && route.is_in_our_place()
    }
}

/// One edit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Adds the overlay address as a /32.
    AddAddress,
    /// Removes another address of the overlay network.
    RemoveAddress {
        /// The address.
        address: Ipv4Addr,
        /// The length of its prefix.
        prefix_length_bits: u8,
    },
    /// Switches the device on.
    SetUp,
    /// Adds the route to the overlay network.
    AddRoute,
    /// Adds the route to a subnet whose path takes less than the device.
    AddPathRoute {
        /// The subnet.
        subnet: Prefix,
        /// MTU of the route, in bytes.
        mtu_bytes: u32,
    },
    /// Removes such a route.
    RemovePathRoute {
        /// The subnet.
        subnet: Prefix,
    },
}

/// What to edit, and what to log.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OverlayDiff {
    /// The edits, in the order that the kernel accepts.
    pub actions: Vec<Action>,
    /// Routes to the overlay network that do not lead into the device, and win over ours.
    pub foreign_routes: Vec<Route>,
    /// An MTU that somebody else gave the device.
    pub foreign_mtu_bytes: Option<u32>,
}

/// The difference between the kernel's `listing` and `desired`; `None` if the device is gone.
///
/// The address comes before the removal of others, since the kernel drops a device's routes with
/// its last address, and the link goes up before the route, which a link that is down refuses.
/// Addresses outside the network are left alone: they cannot become the source of overlay traffic,
/// while one inside would be a source that peers have no lease for.
pub(super) fn diff(desired: &OverlayDesired, listing: &Listing) -> Option<OverlayDiff> {
    let device = desired.device.index;
    let link = listing.links.iter().find(|link| link.id.index == device)?;
    let mut diff = OverlayDiff::default();
    let is_foreign_mtu = link.mtu_bytes != u32::from(desired.mtu_bytes);
    diff.foreign_mtu_bytes = is_foreign_mtu.then_some(link.mtu_bytes);
    let addresses = || listing.addresses.iter().filter(|owned| owned.interface_index == device);
    if !addresses().any(|owned| is_own_address(desired, owned)) {
        diff.actions.push(Action::AddAddress);
    }
    for owned in addresses() {
        if desired.network.contains(owned.address) && !is_own_address(desired, owned) {
            diff.actions.push(Action::RemoveAddress {
                address: owned.address,
                prefix_length_bits: owned.prefix_length_bits,
            });
        }
    }
    if !link.is_up {
        diff.actions.push(Action::SetUp);
    }
    if desired.has_remote_subnets() {
        let routes = || listing.routes.iter().filter(|it| it.destination == desired.network);
        let is_foreign = |route: &&Route| !leads_into_device(desired, route) && wins(route);
        diff.foreign_routes = routes().filter(is_foreign).cloned().collect();
        // If a foreign route has the place, the kernel would refuse ours.
        if !routes().any(Route::is_in_our_place) {
            diff.actions.push(Action::AddRoute);
        }
    }
    diff.actions.extend(diff_paths(desired, &listing.routes, link.mtu_bytes));
    Some(diff)
}

/// A subnet to which somebody else has a route in our place is left to them.
fn diff_paths(desired: &OverlayDesired, routes: &[Route], device_mtu_bytes: u32) -> Vec<Action> {
    let is_missing = |subnet: &Prefix| {
        !routes.iter().any(|route| route.destination == *subnet && route.is_in_our_place())
    };
    let missing = desired.path_mtus.iter().filter(|(subnet, _)| is_missing(subnet));
    let add = missing.map(|(subnet, bytes)| add_path_route(*subnet, *bytes, device_mtu_bytes));
    let is_stale = |route: &&Route| {
        desired.is_path_route(route) && !desired.path_mtus.contains_key(&route.destination)
    };
    let remove = routes.iter().filter(is_stale);
    add.chain(remove.map(|route| Action::RemovePathRoute { subnet: route.destination })).collect()
}

/// The MTU of a route counts more than that of its device, which may be set by hand.
pub(super) fn add_path_route(subnet: Prefix, mtu_bytes: u16, device_mtu_bytes: u32) -> Action {
    Action::AddPathRoute { subnet, mtu_bytes: device_mtu_bytes.min(mtu_bytes.into()) }
}

fn is_own_address(desired: &OverlayDesired, owned: &Address) -> bool {
    owned.address == desired.address && owned.prefix_length_bits == HOST_LENGTH_BITS
}

fn leads_into_device(desired: &OverlayDesired, route: &Route) -> bool {
    match route.next_hops.as_slice() {
        [hop] => route.kind == RouteKind::Unicast && hop.interface_index == desired.device.index,
        _ => false,
    }
}

/// Whether a route takes packets that ours would have. Of one destination the kernel takes the
/// routes of the packet's type of service first, then those of any; among them the lowest metric
/// (`fib_table_lookup`, net/ipv4/fib_trie.c), than which ours is not higher.
fn wins(route: &Route) -> bool {
    route.type_of_service != 0 || route.metric == ROUTE_METRIC
}

/// A route in the words of `ip route`, which takes them back.
pub(super) fn spell_route(route: &Route, interface_name: impl Fn(u32) -> String) -> String {
    let mut text = match route.kind {
        RouteKind::Unicast => route.destination.to_string(),
        RouteKind::Other(number) => format!("{} {}", spell_kind(number), route.destination),
    };
    let is_multipath = route.next_hops.len() > 1;
    for hop in &route.next_hops {
        if is_multipath {
            text.push_str(" nexthop");
        }
        if let Some(gateway) = hop.gateway {
            text += &format!(" via {gateway}");
        }
        text += &format!(" dev {}", interface_name(hop.interface_index));
    }
    if route.metric != 0 {
        text += &format!(" metric {}", route.metric);
    }
    text
}

/// `RTN_*` of linux/rtnetlink.h; the numbers without a word never occur in the main table.
fn spell_kind(number: u8) -> String {
    let word = match number {
        6 => "blackhole",
        7 => "unreachable",
        8 => "prohibit",
        9 => "throw",
        other => return format!("type {other}"),
    };
    word.to_owned()
}

#[cfg(test)]
mod tests;
