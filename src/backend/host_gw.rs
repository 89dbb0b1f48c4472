//! The host-gw backend: for each other host a route to its subnet by way of its address. The
//! kernel carries the packets, and goes on doing so without weftd.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::sync::watch;
use tracing::info;

use crate::backend::ground::{Ground, Grounded, Pass, REQUESTS_MAX, Seen, follow, of_type};
use crate::backend::network::{Setup, StartError};
use crate::backend::routes::{self, Routes};
use crate::backend::status::{Teller, Ways};
use crate::control::lease::{LeaseAttributes, Peers};
use crate::failure::with_causes;
use crate::host::interface::ExternalInterface;
use crate::host::netlink::NetlinkError;
use crate::host::state::{LinkId, Route, RouteProtocol, RouteSpec, Scope};
use crate::route::Prefix;

/// The type in a lease.
pub const TYPE: &str = "host-gw";

/// A running host-gw backend.
#[derive(Debug)]
pub struct HostGwNetwork {
    ground: Ground,
    /// What the last pass left in place.
    set: Routes,
}

/// What a host-gw node says of itself.
pub(super) fn introduce(external: &ExternalInterface) -> Result<LeaseAttributes, StartError> {
    let ExternalInterface { address, public_address, .. } = *external;
    if address != public_address {
        return Err(StartError::NotTheInterfacesAddress { address, public_address });
    }
    Ok(LeaseAttributes::of(TYPE, public_address, None))
}

impl HostGwNetwork {
    /// There is nothing to set up before the first leases come.
    pub fn start(setup: Setup) -> Result<Self, StartError> {
        let ExternalInterface { name, mtu_bytes, .. } = &setup.external;
        let description = format!("host-gw: routes over {name}, mtu {mtu_bytes}");
        info!("{description}");
        let teller = Teller::new(description, *mtu_bytes, &setup);
        Ok(Self { ground: Ground::new(&setup, TYPE, teller)?, set: Routes::new() })
    }

    pub(super) fn teller(&self) -> &Teller {
        &self.ground.teller
    }

    /// Follows the leases and repairs routes. Routes stay when this is dropped.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        follow(self, leases).await
    }

    fn tell_of_external(&self, external: &LinkId, mtu_bytes: u32) {
        self.ground.teller.state(|state| {
            state.mtu_bytes = mtu_bytes;
            state.interface.clone_from(&external.name);
            state.description = format!("host-gw: routes over {}, mtu {mtu_bytes}", external.name);
        });
    }

    /// Sets routes. Gives the destinations whose host cannot be a router: on another link.
    async fn set(&mut self, routes: &[RouteSpec], seen: &Seen) -> BTreeSet<Prefix> {
        let netlink = &self.ground.netlink;
        let results = stream::iter(routes)
            .map(async |route| (route, netlink.replace_route(route).await))
            .buffer_unordered(REQUESTS_MAX);
        let results: Vec<_> = results.collect().await;
        let mut failed = BTreeSet::new();
        let (mut errors, mut recovered) = (Vec::new(), Vec::new());
        for (route, result) in results {
            match result {
                Ok(()) if self.set.get(&route.destination) == Some(route) => recovered.push(route),
                Ok(()) => {}
                Err(error) => {
                    failed.insert(route.destination);
                    errors.push((route, error));
                }
            }
        }
        self.ground.teller.counters.repairs.add(recovered.len());
        if let Some(first) = recovered.first() {
            let more = recovered.len() - 1;
            self.ground.tell("recovered", format!("Route recovered {first} (and {more} more)"));
        }
        self.give_up(&errors, seen).await;
        failed
    }

    /// A peer that moved to where no route leads must not get its packets at the old place.
    async fn give_up(&mut self, errors: &[(&RouteSpec, NetlinkError)], seen: &Seen) {
        let Some((route, error)) = errors.first() else { return };
        let networks = self.ground.networks().to_vec();
        let is_refused =
            |destination| errors.iter().any(|(route, _)| route.destination == destination);
        let old = seen.routes.iter().filter(|route| Ground::is_marked(&networks, route));
        let old: Vec<_> =
            old.filter(|route| is_refused(route.destination)).filter_map(routes::removal).collect();
        self.ground.remove_routes(&old).await;
        self.ground.teller.counters.failures.add(errors.len());
        let more = errors.len() - 1;
        let text = format!(
            "{}: no way to {more} more hosts either; host-gw needs every host on the same link as \
             {}, other hosts need a backend with a tunnel",
            with_causes(error),
            route.interface.name
        );
        self.ground.tell("unreachable", text);
    }

    fn tell(&mut self, wanted: Routes, failed: &BTreeSet<Prefix>) {
        let counters = &self.ground.teller.counters;
        counters.failed.set(failed.len());
        self.set = wanted;
        self.set.retain(|subnet, _| !failed.contains(subnet));
        counters.programmed.set(self.set.len());
        let ways: Ways =
            self.set.iter().filter_map(|(subnet, route)| Some((*subnet, route.gateway?))).collect();
        self.ground.teller.ways(ways);
    }
}

impl Grounded for HostGwNetwork {
    /// flannel's period; what the kernel reports is repaired at once.
    const RECHECK: Duration = Duration::from_secs(10);

    fn ground(&mut self) -> &mut Ground {
        &mut self.ground
    }

    async fn compare(&mut self, seen: Seen, peers: Option<&Peers>) -> Result<Pass, NetlinkError> {
        let Some(external) = &seen.external else { return Ok(Pass::Away) };
        self.tell_of_external(&external.id, external.mtu_bytes);
        let Some(peers) = peers else { return Ok(Pass::Whole) };
        let wanted = wanted(peers, &external.id, &self.ground.teller);
        let networks = self.ground.networks().to_vec();
        let is_own = |route: &Route| Ground::is_marked(&networks, route);
        let diff = routes::diff(&wanted, &seen.routes, is_own);
        let failed = self.set(&diff.set, &seen).await;
        let stuck = match self.ground.may_remove() {
            true => self.ground.remove_routes(&diff.remove).await,
            false => 0,
        };
        self.tell(wanted, &failed);
        Ok(Pass::is_whole_if(failed.is_empty() && stuck == 0))
    }
}

/// The routes of `peers` over `external`.
fn wanted(peers: &Peers, external: &LinkId, teller: &Teller) -> Routes {
    let routes = of_type(peers, TYPE, teller).map(|lease| {
        let route = RouteSpec {
            destination: lease.subnet,
            interface: external.clone(),
            gateway: Some(lease.attributes.public_ip),
            metric: 0,
            scope: Scope::Global,
            protocol: RouteProtocol::WEFT,
            is_onlink: false,
        };
        (lease.subnet, route)
    });
    routes.collect()
}
