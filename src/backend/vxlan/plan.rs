//! What separates the kernel's tables from what the leases ask for. Pure: the caller lists and
//! edits.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use crate::backend::routes::{self, Routes};
use crate::host::state::{LinkEntry, MacAddress, Route, RouteSpec};
use crate::route::Prefix;

/// One peer as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    /// Its host.
    pub(super) public_ip: Ipv4Addr,
    /// The route to its subnet.
    pub(super) route: RouteSpec,
    /// Its hardware address in the tunnel; `None` if it is reached without one.
    pub(super) mac: Option<MacAddress>,
}

impl Peer {
    /// Who has the router's address, the subnet's first.
    pub(super) fn neighbour(&self) -> Option<LinkEntry> {
        Some(LinkEntry { address: self.route.destination.network(), mac: self.mac? })
    }

    /// Which host has the hardware address.
    pub(super) fn forwarding(&self) -> Option<LinkEntry> {
        Some(LinkEntry { address: self.public_ip, mac: self.mac? })
    }
}

/// All peers by their subnets.
pub(super) type Wanted = BTreeMap<Prefix, Peer>;

/// What the kernel has.
#[derive(Debug, Clone, Default)]
pub(super) struct Actual {
    pub(super) neighbours: BTreeSet<LinkEntry>,
    pub(super) forwarding: BTreeSet<LinkEntry>,
    pub(super) routes: Vec<Route>,
}

/// What a peer lacks. Set in this order: a route that leads to nobody would swallow packets that
/// another way might take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) subnet: Prefix,
    pub(super) neighbour: Option<LinkEntry>,
    pub(super) forwarding: Option<LinkEntry>,
    pub(super) route: Option<RouteSpec>,
}

/// Everything that is to be done; what is to be removed, after what is to be set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) stale_routes: Vec<RouteSpec>,
    pub(super) stale_forwarding: Vec<LinkEntry>,
    pub(super) stale_neighbours: Vec<LinkEntry>,
}

/// What separates `actual` from `wanted`. Permanent entries of the device are all ours; of the
/// routes, those that `is_own` claims.
pub(super) fn diff(wanted: &Wanted, actual: &Actual, is_own: impl Fn(&Route) -> bool) -> Plan {
    let routes: Routes =
        wanted.iter().map(|(subnet, peer)| (*subnet, peer.route.clone())).collect();
    let routes = routes::diff(&routes, &actual.routes, is_own);
    let mut to_set: BTreeMap<Prefix, RouteSpec> =
        routes.set.into_iter().map(|route| (route.destination, route)).collect();
    let mut plan = Plan { stale_routes: routes.remove, ..Plan::default() };
    for (subnet, peer) in wanted {
        let missing = |entry: Option<LinkEntry>, among: &BTreeSet<LinkEntry>| {
            entry.filter(|entry| !among.contains(entry))
        };
        let step = Step {
            subnet: *subnet,
            neighbour: missing(peer.neighbour(), &actual.neighbours),
            forwarding: missing(peer.forwarding(), &actual.forwarding),
            route: to_set.remove(subnet),
        };
        if step.neighbour.is_some() || step.forwarding.is_some() || step.route.is_some() {
            plan.steps.push(step);
        }
    }
    let stale = |actual: &BTreeSet<LinkEntry>, wanted: BTreeSet<LinkEntry>, same: Same| {
        let replaced: BTreeSet<_> = wanted.iter().map(same).collect();
        // Setting an entry replaces the one of its key; removing the old one by that key would
        // take the new one away.
        let stale = actual.iter().filter(|entry| !wanted.contains(entry));
        stale.filter(|entry| !replaced.contains(&same(entry))).copied().collect()
    };
    let neighbours = wanted.values().filter_map(Peer::neighbour).collect();
    let forwarding = wanted.values().filter_map(Peer::forwarding).collect();
    plan.stale_neighbours =
        stale(&actual.neighbours, neighbours, |entry| Key::Address(entry.address));
    plan.stale_forwarding = stale(&actual.forwarding, forwarding, |entry| Key::Mac(entry.mac));
    plan
}

type Same = fn(&LinkEntry) -> Key;

/// What an entry is known by in its table.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Address(Ipv4Addr),
    Mac(MacAddress),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::routes::tests::{route, wish};
    use crate::host::state::RouteProtocol;

    const DEVICE: u32 = 9;

    fn mac(last: u8) -> MacAddress {
        MacAddress([2, 0, 0, 0, 0, last])
    }

    fn peer(number: u8) -> (Prefix, Peer) {
        let subnet: Prefix = format!("10.5.{number}.0/24").parse().unwrap();
        let route = RouteSpec {
            protocol: RouteProtocol::BOOT,
            is_onlink: true,
            ..wish(&subnet.to_string(), &subnet.network().to_string(), DEVICE)
        };
        let public_ip = Ipv4Addr::new(192, 0, 2, number);
        (subnet, Peer { public_ip, route, mac: Some(mac(number)) })
    }

    fn actual(wanted: &Wanted) -> Actual {
        Actual {
            neighbours: wanted.values().filter_map(Peer::neighbour).collect(),
            forwarding: wanted.values().filter_map(Peer::forwarding).collect(),
            routes: wanted.values().map(|peer| route(&peer.route)).collect(),
        }
    }

    fn is_own(route: &Route) -> bool {
        route.next_hops[0].interface_index == DEVICE || route.protocol == RouteProtocol::WEFT
    }

    #[test]
    fn a_new_peer_lacks_all_three_and_a_whole_one_nothing() {
        let wanted = Wanted::from([peer(1), peer(2)]);
        let plan = diff(&wanted, &Actual::default(), is_own);
        assert_eq!(plan.steps.len(), 2);
        let step = &plan.steps[0];
        let entry = |address: [u8; 4]| LinkEntry { address: address.into(), mac: mac(1) };
        assert_eq!(step.neighbour, Some(entry([10, 5, 1, 0])), "the subnet's first address");
        assert_eq!(step.forwarding, Some(entry([192, 0, 2, 1])), "the host");
        assert_eq!(step.route.as_ref(), Some(&wanted[&step.subnet].route));
        assert_eq!(diff(&wanted, &actual(&wanted), is_own), Plan::default());
    }

    #[test]
    fn a_peer_that_is_gone_leaves_nothing_behind() {
        let both = Wanted::from([peer(1), peer(2)]);
        let plan = diff(&Wanted::from([peer(1)]), &actual(&both), is_own);
        assert_eq!(plan.steps, []);
        let counts =
            [plan.stale_routes.len(), plan.stale_forwarding.len(), plan.stale_neighbours.len()];
        assert_eq!(counts, [1, 1, 1]);
        assert_eq!(plan.stale_forwarding[0].mac, mac(2));
    }

    #[test]
    fn another_hardware_address_under_the_same_subnet_is_followed() {
        let before = Wanted::from([peer(1)]);
        let (subnet, mut moved) = peer(1);
        moved.mac = Some(mac(77));
        let plan = diff(&Wanted::from([(subnet, moved)]), &actual(&before), is_own);
        assert_eq!(plan.steps.len(), 1);
        let Step { neighbour, forwarding, route, .. } = &plan.steps[0];
        assert!(neighbour.is_some() && forwarding.is_some() && route.is_none(), "{plan:?}");
        assert_eq!(plan.stale_neighbours, [], "the neighbour is replaced in place");
        let old = plan.stale_forwarding.iter().map(|entry| entry.mac).collect::<Vec<_>>();
        assert_eq!(old, [mac(1)], "the old hardware address leads nowhere any more");
    }

    #[test]
    fn another_host_under_the_same_subnet_is_followed_in_place() {
        let before = Wanted::from([peer(1)]);
        let (subnet, mut moved) = peer(1);
        moved.public_ip = Ipv4Addr::new(192, 0, 2, 77);
        let plan = diff(&Wanted::from([(subnet, moved.clone())]), &actual(&before), is_own);
        assert_eq!(plan.steps.len(), 1);
        assert_eq!(plan.steps[0].forwarding, moved.forwarding());
        assert_eq!(plan.steps[0].neighbour, None);
        assert_eq!(plan.stale_forwarding, [], "removing the old would remove the new");
    }

    #[test]
    fn a_peer_reached_directly_has_a_route_and_nothing_in_the_tunnel() {
        let before = Wanted::from([peer(1)]);
        let (subnet, tunnelled) = peer(1);
        let direct = Peer {
            public_ip: tunnelled.public_ip,
            route: wish("10.5.1.0/24", "192.0.2.1", 2),
            mac: None,
        };
        let wanted = Wanted::from([(subnet, direct)]);
        let plan = diff(&wanted, &actual(&before), is_own);
        assert_eq!(plan.steps.len(), 1);
        assert!(plan.steps[0].neighbour.is_none() && plan.steps[0].route.is_some());
        assert_eq!((plan.stale_neighbours.len(), plan.stale_forwarding.len()), (1, 1));
        assert_eq!(plan.stale_routes, [], "the route moves in one step");
        assert_eq!(diff(&wanted, &actual(&wanted), is_own), Plan::default());
    }

    #[test]
    fn foreign_routes_stay() {
        let foreign =
            RouteSpec { protocol: RouteProtocol::BOOT, ..wish("10.5.200.0/24", "192.0.2.254", 2) };
        let actual = Actual { routes: vec![route(&foreign)], ..Actual::default() };
        assert_eq!(diff(&Wanted::new(), &actual, is_own), Plan::default());
    }
}
