//! The TUN device's part of the host's tables: link up, one /32 address, one route, and the routes
//! of narrow paths. Says what it repairs, and what it leaves to others.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::failure::{LogOnce, with_causes};
use crate::host::listing::Listing;
use crate::host::netlink::{self, NetlinkError, filters};
use crate::host::state::{Link, LinkId, Route, RouteKind, RouteProtocol, RouteSpec};
use crate::host::tables::edit::apply_all;
use crate::host::tables::{Desired, Device, Diff, Way, Ways};
use crate::route::Prefix;

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
    /// The network address of the own subnet.
    pub address: Ipv4Addr,
    /// MTU of the device, in bytes.
    pub mtu_bytes: u16,
    /// The whole overlay network, routed into the device.
    pub network: Prefix,
    /// The one of an earlier run, if it was another.
    pub former_network: Option<Prefix>,
    /// This host's part of it, as far as that is known.
    pub subnet: Option<Prefix>,
    /// The subnets whose path takes less than the device, and what it takes, in bytes. Each has a
    /// route of its own with that MTU: the kernel then tells pods by ICMP, fragments what may be
    /// fragmented, and treats all other subnets as before.
    pub path_mtus: BTreeMap<Prefix, u16>,
}

impl OverlayDesired {
    fn networks(&self) -> Vec<Prefix> {
        [self.network].into_iter().chain(self.former_network).collect()
    }

    /// The tables that make it so, with an MTU to impose on the device or without.
    fn tables(&self, imposed_mtu_bytes: Option<u16>) -> Desired {
        let into_device = |destination| RouteSpec::into_device(destination, self.device.clone());
        let way = |route| Way { route, entries: Vec::new(), yields: true };
        let narrow = |(subnet, bytes): (&Prefix, &u16)| {
            let (protocol, mtu_bytes) = (RouteProtocol::WEFT, Some((*bytes).into()));
            (*subnet, way(RouteSpec { protocol, mtu_bytes, ..into_device(*subnet) }))
        };
        let mut ways: Ways = self.path_mtus.iter().map(narrow).collect();
        // A host whose subnet is all of it has nothing to send into the device, and the pods'
        // bridge has the route.
        if self.subnet != Some(self.network) {
            ways.insert(self.network, way(into_device(self.network)));
        }
        let device = Device {
            link: self.device.clone(),
            address: self.address,
            mac: None,
            mtu_bytes: imposed_mtu_bytes.map(u32::from),
            is_ours_alone: false,
        };
        Desired { device: Some(device), networks: self.networks(), ways }
    }

    /// Lists, and compares.
    async fn look(&self, imposed_mtu_bytes: Option<u16>) -> Result<(Listing, Diff), OverlayError> {
        let listing = Listing::read(&self.networks(), &[]).await?;
        let diff = self.compare(&listing, imposed_mtu_bytes)?;
        Ok((listing, diff))
    }

    fn compare(&self, listing: &Listing, imposed: Option<u16>) -> Result<Diff, OverlayError> {
        let diff = self.tables(imposed).diff(&listing.v4(), &[]);
        diff.ok_or_else(|| OverlayError::DeviceGone(self.device.clone()))
    }

    /// Makes all edits, and gives those that were made. A refused one does not keep the others from
    /// being tried; the first refusal is the error.
    async fn apply(diff: &Diff) -> (Vec<String>, netlink::Result) {
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
}

/// The TUN device, with the state that it must have.
#[derive(Debug)]
pub struct Overlay {
    /// The state that the device must have.
    pub desired: OverlayDesired,
    foreign_mtu_bytes: Option<u32>,
    foreign_route: Option<String>,
    logged: LogOnce,
}

impl Overlay {
    /// Refuses a host whose main table has a route to the network through another device that
    /// wins. Changes nothing.
    pub async fn check(desired: &OverlayDesired) -> Result<(), OverlayError> {
        let (listing, diff) = desired.look(None).await?;
        match diff.foreign_routes.first() {
            Some(route) => Err(OverlayError::ForeignRoute(spell(route, &listing.links))),
            None => Ok(()),
        }
    }

    /// Configures a new overlay device completely, MTU and queue length included. A foreign route
    /// does not leave the host without an overlay: `reconcile` warns of it.
    pub async fn establish(desired: OverlayDesired) -> Result<Self, OverlayError> {
        netlink::set_transmit_queue_length(&desired.device, TRANSMIT_QUEUE_LENGTH).await?;
        if let Err(error) = filters::set_no_discipline(&desired.device).await {
            // It costs memory.
            tracing::warn!("{}", with_causes(&error));
        }
        // A device that was kept has its address for a while only.
        netlink::settle_address(&desired.device, desired.address).await?;
        let (_, diff) = desired.look(Some(desired.mtu_bytes)).await?;
        OverlayDesired::apply(&diff).await.1?;
        for edit in &diff.removals {
            tracing::info!("{edit}: an earlier start had left it");
        }
        let logged = LogOnce::default();
        Ok(Self { desired, foreign_mtu_bytes: None, foreign_route: None, logged })
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
    ) -> Result<(), OverlayError> {
        let desired = OverlayDesired { path_mtus, ..self.desired.clone() };
        let (_, diff) = desired.look(None).await?;
        OverlayDesired::apply(&diff).await.1?;
        self.desired = desired;
        Ok(())
    }

    /// Compares the device with `listing`, repairs it, logs that and gives it.
    pub async fn reconcile(&mut self, listing: &Listing) -> Result<Vec<String>, OverlayError> {
        let diff = self.desired.compare(listing, None)?;
        self.log_foreign(&diff, &listing.links);
        let (repairs, result) = OverlayDesired::apply(&diff).await;
        if !repairs.is_empty() {
            let (name, repairs) = (&self.desired.device.name, repairs.join(", "));
            self.logged.once(&repairs, |repairs| {
                tracing::warn!("{name} or its routes were changed by someone else: {repairs}");
            });
        }
        result?;
        Ok(repairs)
    }

    /// Logs an MTU and a route of somebody else when they appear and when they are gone.
    fn log_foreign(&mut self, diff: &Diff, links: &[Link]) {
        let OverlayDesired { device, mtu_bytes: own, network, .. } = &self.desired;
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
        let route = diff.foreign_routes.first().map(|route| spell(route, links));
        if self.foreign_route == route {
            return;
        }
        match &route {
            Some(route) => tracing::warn!(
                "someone else set a route to the overlay network: {route}; traffic may leave the \
                 overlay until it is removed"
            ),
            None => tracing::info!(
                "the foreign route to {network} is gone; the overlay has its traffic again"
            ),
        }
        self.foreign_route = route;
    }
}

/// A route in words that `ip route del` takes.
fn spell(route: &Route, links: &[Link]) -> String {
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
