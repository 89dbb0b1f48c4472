//! The vxlan backend: the kernel's VXLAN device, and for each other host a neighbour, a
//! forwarding entry and a route. The kernel carries the packets, and goes on without weftd.

mod checksum;
mod data;
mod device;
mod owner;
mod plan;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::backend::ground::{Ground, Grounded, Pass, REQUESTS_MAX, Seen, follow, of_type};
use crate::backend::network::{Setup, StartError};
use crate::backend::status::{Teller, Ways};
use crate::config::network::VxlanBackendConfig;
use crate::control::lease::{LeaseAttributes, Peers};
use crate::host::interface::ExternalInterface;
use crate::host::mtu::OVERLAY_MTU_BYTES_MIN;
use crate::host::netlink::{Netlink, NetlinkError};
use crate::host::state::{LinkEntry, LinkId, MacAddress, Route, RouteProtocol, RouteSpec, Scope};
use crate::route::Prefix;

use self::data::{TYPE, data, vtep_mac};
use self::device::{Found, Wish, judge, kernels_port};
use self::owner::{Judged, judge as judge_leases};
use self::plan::{Actual, Peer, Plan, Step, Wanted};

/// A running vxlan backend.
#[derive(Debug)]
pub struct VxlanNetwork {
    ground: Ground,
    settings: VxlanBackendConfig,
    network: Prefix,
    subnet: Prefix,
    mac: MacAddress,
    /// What the last pass left in place.
    set: Wanted,
    /// The MTU that the device was last given.
    imposed_mtu_bytes: u32,
    /// The UDP port that the device has.
    port: Option<u16>,
}

/// What a vxlan node says of itself: the hardware address of the device that can stay, else the
/// one of its lease, so that peers need not learn another one, else a new one.
pub(super) async fn introduce(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
    former: Option<&LeaseAttributes>,
) -> Result<LeaseAttributes, StartError> {
    let failed = |source| StartError::Netlink { kind: TYPE, source };
    let netlink = Netlink::open().map_err(failed)?;
    let found = netlink.vxlan_link(&device::name(settings)).await.map_err(failed)?;
    let wish = device::vxlan(settings, external);
    let kept = found
        .filter(|found| judge(&wish, found, kernels_port()).is_none())
        .and_then(|found| found.mac);
    let published = former.filter(|former| former.backend_type == TYPE).and_then(vtep_mac);
    let mac = kept.or(published).unwrap_or_else(|| {
        let mut bytes = [0; 6];
        fastrand::fill(&mut bytes);
        MacAddress::locally_administered(bytes)
    });
    Ok(LeaseAttributes::of(TYPE, external.public_address, Some(data(settings.vni, mac))))
}

/// Refuses an interface that leaves no sensible MTU.
pub(super) fn check_room(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
) -> Result<(), StartError> {
    if device::mtu_bytes(settings, external) < OVERLAY_MTU_BYTES_MIN {
        return Err(StartError::NoRoom { external_bytes: external.mtu_bytes });
    }
    Ok(())
}

impl VxlanNetwork {
    /// Makes the device, or takes over the one that an earlier run left.
    pub async fn start(setup: Setup, settings: VxlanBackendConfig) -> Result<Self, StartError> {
        let VxlanBackendConfig { vni, port, gbp, learning, direct_routing, .. } = settings;
        info!(
            "VXLAN config: VNI={vni} Port={} GBP={gbp} Learning={learning} \
             DirectRouting={direct_routing}",
            port.unwrap_or(0)
        );
        let external = &setup.external;
        let mtu_bytes = device::mtu_bytes(&settings, external);
        if settings.mtu_bytes.is_some_and(|bytes| bytes > external.mtu_bytes) {
            warn!(
                "Backend.MTU is above the {} of {}: full packets will be sent in fragments",
                external.mtu_bytes, external.name
            );
        }
        let failed = |source| StartError::Netlink { kind: TYPE, source };
        let mac = vtep_mac(&setup.attributes).expect("introduce made the attributes");
        let teller = Teller::new(String::new(), mtu_bytes, &setup);
        let mut network = Self {
            ground: Ground::new(&setup, TYPE, teller)?,
            settings,
            network: setup.network,
            subnet: setup.subnet,
            mac,
            set: Wanted::new(),
            imposed_mtu_bytes: 0,
            port: None,
        };
        let seen = network.ground.look().await.map_err(failed)?;
        network.establish(&seen).await.map_err(failed)?;
        info!("{}", network.describe());
        Ok(network)
    }

    pub(super) fn teller(&self) -> &Teller {
        &self.ground.teller
    }

    /// Follows the leases and repairs what breaks. Everything stays when this is dropped.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        follow(self, leases).await
    }

    fn whole(&self) -> Pass {
        self.ground.teller.state(|state| state.is_up = true);
        Pass::Whole
    }

    /// Has the device be there, with its address, and on.
    async fn establish(&mut self, seen: &Seen) -> Result<Found, NetlinkError> {
        let (settings, external) = (&self.settings, &self.ground.external);
        let wish = Wish {
            name: device::name(settings),
            vxlan: device::vxlan(settings, external),
            mac: self.mac,
            mtu_bytes: device::mtu_bytes(settings, external),
        };
        let mtu_bytes = wish.mtu_bytes;
        let impose_mtu = mtu_bytes != self.imposed_mtu_bytes;
        let found = match device::establish(&self.ground.netlink, &wish, impose_mtu).await {
            Ok(found) => found,
            Err(error) => {
                self.tell_of_no_device(&wish, &error).await;
                return Err(error);
            }
        };
        if impose_mtu && self.imposed_mtu_bytes != 0 {
            let from = self.imposed_mtu_bytes;
            info!("the MTU of {} follows that beneath it, from {from} to {mtu_bytes}", wish.name);
        }
        if found.is_new && self.imposed_mtu_bytes != 0 {
            warn!("{} was deleted by someone else; made again, with its peers", wish.name);
            self.ground.teller.counters.repairs.add(1);
            self.ground.teller.state(|state| state.is_up = false);
        }
        if found.is_new || self.imposed_mtu_bytes == 0 {
            checksum::settle(&found.link.name, found.is_new);
        }
        (self.imposed_mtu_bytes, self.port) = (mtu_bytes, found.port);
        let address = self.subnet.network();
        let (netlink, network) = (&self.ground.netlink, self.network);
        device::switch_on(netlink, &found.link, &seen.addresses, network, address).await?;
        let description = self.describe();
        let interface = &self.ground.external.name;
        self.ground.teller.state(|state| {
            state.interface.clone_from(interface);
            (state.description, state.mtu_bytes) = (description, mtu_bytes);
        });
        Ok(found)
    }

    /// Without the device no packet flows. That of another name may have its place: the kernel has
    /// one for each VNI and port.
    async fn tell_of_no_device(&mut self, wish: &Wish, error: &NetlinkError) {
        let name = &wish.name;
        if !matches!(self.ground.netlink.vxlan_link(name).await, Ok(None)) {
            return;
        }
        self.ground.teller.state(|state| state.is_up = false);
        if error.is_already_there() {
            let text = format!(
                "{name} cannot be made: another device has VNI {vni} and the same port, see \
                 `ip -d link show type vxlan`; remove it, or give one of them another VNI",
                vni = wish.vxlan.vni
            );
            self.ground.tell("device", text);
        }
    }

    fn describe(&self) -> String {
        let (settings, external) = (&self.settings, &self.ground.external);
        let port = self.port.map_or_else(|| "unknown".to_owned(), |port| port.to_string());
        format!(
            "{} mtu {} over {} at {}: vxlan id {} port {port}, hardware address {}{}",
            device::name(settings),
            device::mtu_bytes(settings, external),
            external.name,
            external.address,
            settings.vni,
            self.mac,
            if settings.direct_routing { ", direct routing" } else { "" },
        )
    }

    /// What the leases ask for.
    async fn wanted(&mut self, peers: &Peers, link: &LinkId) -> Wanted {
        let Judged { usable, unusable } = judge_leases(of_type(peers, TYPE, &self.ground.teller));
        let mut wanted = Wanted::new();
        for (lease, mac) in usable {
            let (subnet, public_ip) = (lease.subnet, lease.attributes.public_ip);
            let route = RouteSpec {
                destination: subnet,
                interface: link.clone(),
                gateway: Some(subnet.network()),
                metric: 0,
                scope: Scope::Global,
                // flannel's: the device says whose it is.
                protocol: RouteProtocol::BOOT,
                is_onlink: true,
            };
            wanted.insert(subnet, Peer { public_ip, route, mac: Some(mac) });
        }
        self.ground.teller.counters.unusable.set(unusable.len());
        if let Some(first) = unusable.first() {
            let more = unusable.len() - 1;
            self.ground.tell("unusable", format!("ignored (and {more} more): lease {first}"));
        }
        if self.settings.direct_routing {
            self.route_directly(&mut wanted, link).await;
        }
        wanted
    }

    /// Peers that the kernel reaches without a router need no tunnel.
    async fn route_directly(&self, wanted: &mut Wanted, link: &LinkId) {
        let netlink = &self.ground.netlink;
        let hosts: Vec<_> = wanted.iter().map(|(subnet, peer)| (*subnet, peer.public_ip)).collect();
        let paths = stream::iter(hosts)
            .map(async |(subnet, host)| (subnet, netlink.path_to(host).await))
            .buffer_unordered(REQUESTS_MAX);
        for (subnet, path) in paths.collect::<Vec<_>>().await {
            let Some(peer) = wanted.get_mut(&subnet) else { continue };
            // A host without a path may get one; until then the tunnel is as good as anything.
            let Ok(path) = path else { continue };
            if path.gateway.is_some() || path.interface_index == link.index {
                continue;
            }
            let index = path.interface_index;
            peer.mac = None;
            peer.route.interface = LinkId { index, name: format!("if{index}") };
            peer.route.gateway = Some(peer.public_ip);
            peer.route.protocol = RouteProtocol::WEFT;
            peer.route.is_onlink = false;
        }
    }

    async fn actual(&self, link: &LinkId, routes: Vec<Route>) -> Result<Actual, NetlinkError> {
        let netlink = &self.ground.netlink;
        let neighbours = netlink.neighbours(link).await?.into_iter().collect();
        let forwarding = netlink.forwarding(link).await?.into_iter().collect();
        Ok(Actual { neighbours, forwarding, routes })
    }

    /// Gives peers what they lack. Returns those that could not be set up in full.
    async fn program(
        &mut self,
        link: &LinkId,
        steps: &[Step],
        wanted: &Wanted,
        actual: &Actual,
    ) -> BTreeSet<Prefix> {
        let netlink = &self.ground.netlink;
        let results = stream::iter(steps)
            .map(async |step| (step.subnet, program_one(netlink, link, step, actual).await))
            .buffer_unordered(REQUESTS_MAX);
        let results: Vec<_> = results.collect().await;
        let repaired = results
            .iter()
            .filter(|(subnet, result)| result.is_ok() && self.set.get(subnet) == wanted.get(subnet))
            .count();
        self.ground.teller.counters.repairs.add(repaired);
        if repaired > 0 {
            let text =
                format!("entries of {repaired} peers were changed by someone else; restored");
            self.ground.tell("repaired", text);
        }
        let (mut failed, mut errors) = (BTreeSet::new(), Vec::new());
        for (subnet, result) in results {
            if let Err(error) = result {
                failed.insert(subnet);
                errors.push(error);
            }
        }
        self.ground.refused("peer", &errors);
        failed
    }

    /// Removes what belongs to nobody any more; each kind, whatever became of the others.
    async fn clear(&mut self, link: &LinkId, plan: &Plan) -> usize {
        let stuck = self.ground.remove_routes(&plan.stale_routes).await;
        let netlink = &self.ground.netlink;
        let forwarding = stream::iter(&plan.stale_forwarding)
            .map(async |entry| netlink.remove_forwarding(link, *entry).await)
            .buffer_unordered(REQUESTS_MAX);
        let mut results: Vec<_> = forwarding.collect().await;
        let neighbours = stream::iter(&plan.stale_neighbours)
            .map(async |entry| netlink.remove_neighbour(link, *entry).await)
            .buffer_unordered(REQUESTS_MAX);
        results.extend(neighbours.collect::<Vec<_>>().await);
        let errors = results.into_iter().filter_map(Result::err);
        let errors: Vec<_> = errors.filter(|error| !error.is_already_gone()).collect();
        stuck + self.ground.refused("removal", &errors)
    }

    fn tell(&mut self, wanted: Wanted, failed: &BTreeSet<Prefix>) {
        self.set = wanted;
        self.set.retain(|subnet, _| !failed.contains(subnet));
        let counters = &self.ground.teller.counters;
        counters.failed.set(failed.len());
        counters.programmed.set(self.set.len());
        let ways: Ways = self.set.iter().map(|(subnet, peer)| (*subnet, peer.public_ip)).collect();
        self.ground.teller.ways(ways);
    }
}

impl Grounded for VxlanNetwork {
    /// The kernel reports no change of neighbours and forwarding entries.
    const RECHECK: Duration = Duration::from_secs(30);

    fn ground(&mut self) -> &mut Ground {
        &mut self.ground
    }

    async fn compare(&mut self, seen: Seen, peers: Option<&Peers>) -> Result<Pass, NetlinkError> {
        let Found { link, is_new, .. } = self.establish(&seen).await?;
        let Some(peers) = peers else { return Ok(self.whole()) };
        // With an old device its routes went as well.
        let routes = if is_new { self.ground.routes().await? } else { seen.routes };
        let wanted = self.wanted(peers, &link).await;
        let actual = self.actual(&link, routes).await?;
        let networks = self.ground.networks().to_vec();
        let is_own = |route: &Route| {
            let is_into_device =
                route.next_hops.iter().any(|hop| hop.interface_index == link.index);
            (is_into_device && Ground::is_inside(&networks, route))
                || Ground::is_marked(&networks, route)
        };
        let plan = plan::diff(&wanted, &actual, is_own);
        let failed = self.program(&link, &plan.steps, &wanted, &actual).await;
        let stuck = match self.ground.may_remove() {
            true => self.clear(&link, &plan).await,
            false => 0,
        };
        self.tell(wanted, &failed);
        let whole = self.whole();
        Ok(if failed.is_empty() && stuck == 0 { whole } else { Pass::Partly })
    }
}

/// Sets a peer's neighbour, forwarding entry and route, in this order. What a refusal leaves half
/// done is taken back, as far as it was not there before.
async fn program_one(
    netlink: &Netlink,
    link: &LinkId,
    step: &Step,
    actual: &Actual,
) -> Result<(), NetlinkError> {
    let Step { neighbour, forwarding, route, .. } = step;
    let result = async {
        if let Some(entry) = neighbour {
            netlink.set_neighbour(link, *entry).await?;
        }
        if let Some(entry) = forwarding {
            netlink.set_forwarding(link, *entry).await?;
        }
        if let Some(route) = route {
            netlink.replace_route(route).await?;
        }
        Ok(())
    };
    let error = match result.await {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    let is_new = |entry: &&LinkEntry| {
        !actual.neighbours.iter().any(|old| old.address == entry.address)
            && !actual.forwarding.iter().any(|old| old.mac == entry.mac)
    };
    // Best effort: the next pass compares again.
    if let Some(entry) = forwarding.as_ref().filter(is_new) {
        netlink.remove_forwarding(link, *entry).await.ok();
    }
    if let Some(entry) = neighbour.as_ref().filter(is_new) {
        netlink.remove_neighbour(link, *entry).await.ok();
    }
    Err(error)
}
