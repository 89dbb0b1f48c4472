//! The TUN device's part of the host's tables: link up, one address and one route of each
//! family, and the routes of narrow paths. Says what it repairs, and what it leaves to others.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::failure::{LogOnce, with_causes};
use crate::host::listing::Listing;
use crate::host::netlink::{self, NetlinkError, filters};
use crate::host::state::{KernelFamily, Link, LinkId, Route, RouteKind, RouteProtocol, RouteSpec};
use crate::host::tables::edit::apply_all;
use crate::host::tables::{Desired, Device, Diff, Way, Ways};
use crate::route::{IpAddress, Prefix};

/// Packets that wait in each lane of the device while the worker is off its processor: 15 ms at
/// 200,000 packets a second. On a busy host of two processors the scheduler keeps a worker off for
/// up to 25 ms; 2,000 places lost 67 packets in a million there in ten minutes at 167,000 a second,
/// and the kernel's 500 lose some at any rate. A super-packet counts as one, so that a lane holds
/// at most 3,000 of 64 KiB, 188 MiB, and a pod that sends under its own address fills one.
const TRANSMIT_QUEUE_LENGTH: u32 = 3000;

/// Why the overlay device is not as it must be.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// The device does not exist (any more).
    #[error("the overlay device {0} does not exist")]
    DeviceGone(LinkId),
    /// Somebody else has a route to the overlay network, as `ip route` would show it.
    #[error(
        "the host already has a route to the overlay network, which takes its packets: {0}; if \
         another flanneld or weftd keeps it, stop that one; if nobody does, remove it \
         (weft cleanup, or ip route del {0}), give it a metric above 0, or choose another \
         Network"
    )]
    ForeignRoute(String),
    /// The kernel could not be asked or refused.
    #[error("cannot bring the overlay device into its state")]
    Netlink(#[from] NetlinkError),
}

/// What the TUN device must be.
#[derive(Debug, Clone)]
pub struct OverlayDesired {
    /// The device, by index; the name is for people.
    pub device: LinkId,
    /// MTU of the device, in bytes.
    pub mtu_bytes: u16,
    /// What it has of IPv4, if nodes have any.
    pub v4: Option<OverlayPart<Ipv4Addr>>,
    /// What it has of IPv6, if nodes have any.
    pub v6: Option<OverlayPart<Ipv6Addr>>,
}

/// What the TUN device has of one family.
#[derive(Debug, Clone)]
pub struct OverlayPart<A: IpAddress> {
    /// The whole overlay network, routed into the device.
    pub network: Prefix<A>,
    /// The one of an earlier run, if it was another.
    pub former_network: Option<Prefix<A>>,
    /// This host's part of it, as far as that is known.
    pub subnet: Option<Prefix<A>>,
    /// The subnets whose path takes less than the device, and what it takes, in bytes. Each has a
    /// route of its own with that MTU: the kernel then tells pods by ICMP, fragments what may be
    /// fragmented, and treats all other subnets as before.
    pub path_mtus: BTreeMap<Prefix<A>, u16>,
}

impl<A: KernelFamily> OverlayPart<A> {
    /// Of a network with nothing else to know of it.
    pub fn of(network: Prefix<A>, subnet: Option<Prefix<A>>) -> Self {
        Self { network, former_network: None, subnet, path_mtus: BTreeMap::new() }
    }

    /// The network address of the own subnet.
    pub fn address(&self) -> A {
        self.subnet.unwrap_or(self.network).network()
    }

    fn networks(&self) -> Vec<Prefix<A>> {
        [self.network].into_iter().chain(self.former_network).collect()
    }

    /// The tables that make it so, with an MTU to impose on the device or without.
    fn tables(&self, device: &LinkId, imposed_mtu_bytes: Option<u16>) -> Desired<A> {
        let into_device = |destination| RouteSpec::into_device(destination, device.clone());
        let way = |route| Way { route, entries: Vec::new(), yields: true };
        let narrow = |(subnet, bytes): (&Prefix<A>, &u16)| {
            let (protocol, mtu_bytes) = (RouteProtocol::WEFT, Some((*bytes).into()));
            (*subnet, way(RouteSpec { protocol, mtu_bytes, ..into_device(*subnet) }))
        };
        let mut ways: Ways<A> = self.path_mtus.iter().map(narrow).collect();
        // A host whose subnet is all of it has nothing to send into the device, and the pods'
        // bridge has the route.
        if self.subnet != Some(self.network) {
            ways.insert(self.network, way(into_device(self.network)));
        }
        let device = Device {
            link: device.clone(),
            address: self.address(),
            mac: None,
            mtu_bytes: imposed_mtu_bytes.map(u32::from),
            is_ours_alone: false,
        };
        Desired { device: Some(device), networks: self.networks(), ways }
    }
}

/// What the device lacks.
#[derive(Debug)]
struct Lacks {
    v4: Diff,
    v6: Diff<Ipv6Addr>,
}

impl OverlayDesired {
    /// Lists, and compares.
    async fn look(&self, imposed_mtu_bytes: Option<u16>) -> Result<(Listing, Lacks), OverlayError> {
        let networks_v4 = self.v4.as_ref().map(OverlayPart::networks).unwrap_or_default();
        let networks_v6 = self.v6.as_ref().map(OverlayPart::networks).unwrap_or_default();
        let listing = Listing::read(&networks_v4, &networks_v6).await?;
        let lacks = self.compare(&listing, imposed_mtu_bytes)?;
        Ok((listing, lacks))
    }

    fn compare(&self, listing: &Listing, imposed: Option<u16>) -> Result<Lacks, OverlayError> {
        let gone = || OverlayError::DeviceGone(self.device.clone());
        // The device is one, and the first family sees to it.
        let imposed_v6 = imposed.filter(|_| self.v4.is_none());
        let v4 = self.v4.as_ref().map(|v4| v4.tables(&self.device, imposed));
        let v6 = self.v6.as_ref().map(|v6| v6.tables(&self.device, imposed_v6));
        let v4 = v4.map(|v4| v4.diff(&listing.v4(), &[]).ok_or_else(gone));
        let v6 = v6.map(|v6| v6.diff(&listing.v6(), &[]).ok_or_else(gone));
        Ok(Lacks {
            v4: v4.transpose()?.unwrap_or_default(),
            v6: v6.transpose()?.unwrap_or_default(),
        })
    }
}

/// Makes all edits, and gives those that were made. A refused one does not keep the others from
/// being tried; the first refusal is the error.
async fn apply<A: KernelFamily>(diff: &Diff<A>) -> (Vec<String>, netlink::Result) {
    let mut results = Vec::new();
    for edit in &diff.device {
        results.push((edit, edit.apply().await));
    }
    results.extend(apply_all(&diff.sets).await);
    results.extend(apply_all(&diff.removals).await);
    let (mut made, mut refusal) = (Vec::new(), Ok(()));
    for (edit, result) in results {
        match result {
            Ok(()) => made.push(edit.to_string()),
            Err(error) => refusal = refusal.and(Err(error)),
        }
    }
    (made, refusal)
}

/// The TUN device, with the state that it must have.
#[derive(Debug)]
pub struct Overlay {
    /// The state that the device must have.
    pub desired: OverlayDesired,
    /// Why packets of IPv6 find no way into it, if they don't; those of IPv4, if there are any, go
    /// on.
    pub wrong_v6: Option<String>,
    foreign_mtu_bytes: Option<u32>,
    /// One of each family, by its network.
    foreign_routes: BTreeMap<String, String>,
    logged: LogOnce,
    logged_v6: LogOnce,
}

impl Overlay {
    /// Refuses a host whose main table has a route to the network through another device that
    /// wins. Changes nothing.
    pub async fn check(desired: &OverlayDesired) -> Result<(), OverlayError> {
        let (listing, lacks) = desired.look(None).await?;
        let v4 = lacks.v4.foreign_routes.first().map(|route| spell(route, &listing.links));
        let v6 = || lacks.v6.foreign_routes.first().map(|route| spell(route, &listing.links));
        v4.or_else(v6).map_or(Ok(()), |route| Err(OverlayError::ForeignRoute(route)))
    }

    /// Configures a new overlay device completely, MTU and queue length included. A foreign route
    /// does not leave the host without an overlay: `reconcile` warns of it.
    pub async fn establish(desired: OverlayDesired) -> Result<Self, OverlayError> {
        netlink::set_transmit_queue_length(&desired.device, TRANSMIT_QUEUE_LENGTH).await?;
        if let Err(error) = filters::set_no_discipline(&desired.device).await {
            // It costs memory.
            tracing::warn!("{}", with_causes(&error));
        }
        // A device that was kept has its addresses for a while only.
        if let Some(v4) = &desired.v4 {
            netlink::settle_address(&desired.device, v4.address()).await?;
        }
        let (_, lacks) = desired.look(Some(desired.mtu_bytes)).await?;
        apply(&lacks.v4).await.1?;
        let removals = lacks.v4.removals.iter().map(ToString::to_string);
        for edit in removals.chain(lacks.v6.removals.iter().map(ToString::to_string)) {
            tracing::info!("{edit}: an earlier start had left it");
        }
        let mut overlay = Self::of(desired);
        let settled = match &overlay.desired.v6 {
            Some(v6) => netlink::settle_address(&overlay.desired.device, v6.address()).await,
            None => Ok(()),
        };
        let applied = settled.and(apply(&lacks.v6).await.1);
        if overlay.desired.v4.is_none() {
            // Without it there is nothing to go on with.
            return applied.map(|()| overlay).map_err(OverlayError::from);
        }
        overlay.note_v6(applied);
        Ok(overlay)
    }

    fn of(desired: OverlayDesired) -> Self {
        Self {
            desired,
            wrong_v6: None,
            foreign_mtu_bytes: None,
            foreign_routes: BTreeMap::new(),
            logged: LogOnce::default(),
            logged_v6: LogOnce::default(),
        }
    }

    /// What became of IPv6's part.
    fn note_v6(&mut self, result: netlink::Result) {
        self.wrong_v6 = result.err().map(|error| {
            let text = format!(
                "IPv6 is not carried; it may be switched off (sysctl \
                 net.ipv6.conf.{}.disable_ipv6) or the device's MTU below 1280: {}",
                self.desired.device.name,
                with_causes(&error)
            );
            self.logged_v6.once(&text, |text| tracing::warn!("{text}; retrying"));
            text
        });
    }

    /// Gives the device another MTU, in bytes, and whether it has it: an MTU that somebody else
    /// had set at the last listing is left alone.
    pub async fn follow_mtu(&mut self, mtu_bytes: u16) -> netlink::Result<bool> {
        if self.foreign_mtu_bytes.is_none() {
            netlink::set_mtu(&self.desired.device, mtu_bytes.into()).await?;
        }
        self.desired.mtu_bytes = mtu_bytes;
        Ok(self.foreign_mtu_bytes.is_none_or(|foreign| foreign == u32::from(mtu_bytes)))
    }

    /// Gives the subnets behind narrow paths, and no others, routes with an MTU of their own. Those
    /// that it had stay desired if that fails: what was never made, nobody else has changed.
    pub async fn limit_paths(
        &mut self,
        path_mtus: BTreeMap<Prefix, u16>,
        path_mtus_v6: BTreeMap<Prefix<Ipv6Addr>, u16>,
    ) -> Result<(), OverlayError> {
        let mut desired = self.desired.clone();
        if let Some(v4) = &mut desired.v4 {
            v4.path_mtus = path_mtus;
        }
        if let Some(v6) = &mut desired.v6 {
            v6.path_mtus = path_mtus_v6;
        }
        let (_, lacks) = desired.look(None).await?;
        apply(&lacks.v4).await.1?;
        let applied = apply(&lacks.v6).await.1;
        self.note_v6(applied);
        self.desired = desired;
        Ok(())
    }

    /// Compares the device with `listing`, repairs it, logs that and gives it.
    pub async fn reconcile(&mut self, listing: &Listing) -> Result<Vec<String>, OverlayError> {
        let lacks = self.desired.compare(listing, None)?;
        self.log_foreign_mtu(&listing.links);
        if let Some(network) = self.desired.v4.as_ref().map(|v4| v4.network) {
            self.log_foreign_route(network, &lacks.v4, &listing.links);
        }
        if let Some(network) = self.desired.v6.as_ref().map(|v6| v6.network) {
            self.log_foreign_route(network, &lacks.v6, &listing.links);
        }
        let (mut repairs, result) = apply(&lacks.v4).await;
        let (repairs_v6, result_v6) = apply(&lacks.v6).await;
        repairs.extend(repairs_v6);
        if !repairs.is_empty() {
            let (name, repairs) = (&self.desired.device.name, repairs.join(", "));
            self.logged.once(&repairs, |repairs| {
                tracing::warn!("{name} or its routes were changed by someone else: {repairs}");
            });
        }
        self.note_v6(result_v6);
        result?;
        Ok(repairs)
    }

    /// Logs an MTU of somebody else when it appears and when it is gone.
    fn log_foreign_mtu(&mut self, links: &[Link]) {
        let OverlayDesired { device, mtu_bytes: own, .. } = &self.desired;
        let name = &device.name;
        let foreign = links.iter().find(|link| link.id.index == device.index);
        let foreign = foreign.map(|link| link.mtu_bytes).filter(|bytes| *bytes != u32::from(*own));
        if std::mem::replace(&mut self.foreign_mtu_bytes, foreign) != foreign {
            match foreign {
                Some(bytes) => tracing::warn!(
                    "the MTU of {name} was changed from {own} to {bytes} by someone else; left as \
                     it is"
                ),
                None => tracing::info!("the MTU of {name} is {own} again"),
            }
        }
    }

    /// Logs a route of somebody else to the network when it appears and when it is gone.
    fn log_foreign_route<A: KernelFamily>(
        &mut self,
        network: Prefix<A>,
        diff: &Diff<A>,
        links: &[Link],
    ) {
        let route = diff.foreign_routes.first().map(|route| spell(route, links));
        let network = network.to_string();
        if self.foreign_routes.get(&network) == route.as_ref() {
            return;
        }
        match route {
            Some(route) => {
                tracing::warn!(
                    "someone else set a route to the overlay network: {route}; traffic may leave \
                     the overlay until it is removed"
                );
                self.foreign_routes.insert(network, route);
            }
            None => {
                tracing::info!(
                    "the foreign route to {network} is gone; the overlay has its traffic again"
                );
                self.foreign_routes.remove(&network);
            }
        }
    }
}

/// Takes what an earlier run had of `network` off the device, which goes on without IPv6.
pub async fn clear_v6(device: &LinkId, network: Prefix<Ipv6Addr>) -> netlink::Result {
    let listing = Listing::read(&[], &[network]).await?;
    let into_it = |route: &&Route<Ipv6Addr>| {
        route.next_hops.iter().any(|hop| hop.interface_index == device.index)
    };
    for route in listing.routes_v6.iter().filter(into_it).filter_map(Route::removal) {
        netlink::remove_route(&route).await?;
    }
    for owned in listing.addresses_v6.iter().filter(|it| it.interface_index == device.index) {
        if network.contains(owned.address) {
            netlink::remove_address(device, owned.address, owned.prefix_length_bits).await?;
        }
    }
    Ok(())
}

/// A route in words that `ip route del` takes.
fn spell<A: KernelFamily>(route: &Route<A>, links: &[Link]) -> String {
    let kind = match route.kind {
        RouteKind::UNICAST => "",
        RouteKind::BLACKHOLE => "blackhole ",
        RouteKind::UNREACHABLE => "unreachable ",
        RouteKind::PROHIBIT => "prohibit ",
        _ => "throw ",
    };
    let Some(mut spec) = route.removal() else {
        let metric = Some(route.metric).filter(|metric| *metric != 0);
        let metric = metric.map(|metric| format!(" metric {metric}")).unwrap_or_default();
        return format!("{kind}{}{metric}", route.destination);
    };
    let link = links.iter().find(|link| link.id.index == spec.interface.index);
    spec.interface = link.map_or(spec.interface, |link| link.id.clone());
    format!("{kind}{spec}")
}

#[cfg(test)]
mod tests;
