//! The overlay device's part of the kernel's tables: link up, one /32 address, one route, and the
//! routes of narrow paths. Logs what it repairs. `diff` decides what is missing, without I/O.

mod diff;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::host::follower::Listing;
use crate::host::netlink::{Netlink, NetlinkError};
use crate::host::state::{Address, Link, LinkId, Route};
use crate::route::Prefix;

pub use diff::{Action, DeviceSettings, OverlayActual, OverlayDesired, OverlayDiff, diff};

/// Packets that wait in the device while the worker is off its processor: 30 ms at 200,000
/// packets a second. On a busy host of two processors the scheduler keeps a worker off for up to
/// 25 ms; 2,000 places lost 67 packets in a million there in ten minutes at 167,000 a second, and
/// the kernel's 500 lose some at any rate. A super-packet counts as one.
pub const TRANSMIT_QUEUE_LENGTH: u32 = 6000;

/// The same repair again within this time is not logged: one line says that somebody else insists
/// as well as a hundred.
const REPAIR_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Why the overlay device is not as it must be.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// The device does not exist (any more).
    #[error("the overlay device {0} does not exist")]
    DeviceGone(LinkId),
    /// Somebody else has a route to the overlay network.
    #[error(
        "the host already has a route to the overlay network, which takes its packets: {route}; if \
         another flanneld or weftd keeps it, stop that one; if nobody does, remove it \
         (ip route del {route}), give it a metric above 0, or choose another Network"
    )]
    ForeignRoute {
        /// The route as `ip route` would show it.
        route: String,
    },
    /// The kernel could not be asked or refused.
    #[error("cannot bring the overlay device into its state")]
    Netlink(#[from] NetlinkError),
}

/// The overlay device, with the state that it must have.
#[derive(Debug)]
pub struct Overlay {
    desired: OverlayDesired,
    foreign_mtu_bytes: Option<u32>,
    foreign_route: Option<String>,
    /// Repairs that were logged within the last [`REPAIR_LOG_INTERVAL`].
    logged: Vec<(Action, Instant)>,
}

impl Overlay {
    /// Configures a host's first overlay device completely, MTU and queue length included.
    /// Refuses if the main table has a route to the network through another device that wins.
    pub async fn establish(
        netlink: &Netlink,
        desired: OverlayDesired,
    ) -> Result<Self, OverlayError> {
        let diff = Self::check(netlink, &desired).await?;
        Self::impose(netlink, desired, &diff).await
    }

    /// Refuses as `establish` would, and changes nothing.
    pub async fn check(
        netlink: &Netlink,
        desired: &OverlayDesired,
    ) -> Result<OverlayDiff, OverlayError> {
        let listing = Listing::read(netlink, &[desired.network]).await?;
        let diff = diff(desired, &actual(desired, &listing)?, DeviceSettings::Impose);
        match diff.foreign_routes.first() {
            Some(route) => Err(OverlayError::ForeignRoute { route: spell(route, &listing.links) }),
            None => Ok(diff),
        }
    }

    /// Configures a device that replaces one that is gone. A foreign route that was set since does
    /// not leave the host without an overlay: `reconcile` warns of it.
    pub async fn establish_again(
        netlink: &Netlink,
        desired: OverlayDesired,
    ) -> Result<Self, OverlayError> {
        let listing = Listing::read(netlink, &[desired.network]).await?;
        let diff = diff(&desired, &actual(&desired, &listing)?, DeviceSettings::Impose);
        Self::impose(netlink, desired, &diff).await
    }

    async fn impose(
        netlink: &Netlink,
        desired: OverlayDesired,
        diff: &OverlayDiff,
    ) -> Result<Self, OverlayError> {
        for action in &diff.actions {
            apply(netlink, &desired, action).await?;
        }
        Ok(Self { desired, foreign_mtu_bytes: None, foreign_route: None, logged: Vec::new() })
    }

    /// The state that the device must have.
    #[must_use]
    pub fn desired(&self) -> &OverlayDesired {
        &self.desired
    }

    /// Gives the device another MTU, in bytes, and whether it has it: an MTU that somebody else
    /// set is left alone.
    pub async fn follow_mtu(
        &mut self,
        netlink: &Netlink,
        mtu_bytes: u16,
    ) -> Result<bool, OverlayError> {
        let device = &self.desired.device;
        let Some(link) = netlink.link(device.index).await? else {
            return Err(OverlayError::DeviceGone(device.clone()));
        };
        let is_own = link.mtu_bytes == u32::from(self.desired.mtu_bytes);
        if is_own {
            netlink.set_mtu(device, u32::from(mtu_bytes)).await?;
        }
        self.desired.mtu_bytes = mtu_bytes;
        Ok(is_own || link.mtu_bytes == u32::from(mtu_bytes))
    }

    /// Gives the subnets behind narrow paths, and no others, routes with an MTU of their own.
    pub async fn limit_paths(
        &mut self,
        netlink: &Netlink,
        path_mtus: BTreeMap<Prefix, u16>,
    ) -> Result<(), OverlayError> {
        let before = &self.desired.path_mtus;
        let is_changed = |(subnet, bytes): &(&Prefix, &u16)| path_mtus.get(*subnet) != Some(*bytes);
        // A route with another MTU is removed, too, and added anew: meanwhile the network's route
        // leads on.
        for (subnet, _) in before.iter().filter(is_changed) {
            let action = Action::RemovePathRoute { subnet: *subnet };
            apply(netlink, &self.desired, &action).await?;
        }
        self.desired.path_mtus = path_mtus;
        let listing = Listing::read(netlink, &[self.desired.network]).await?;
        let actual = actual(&self.desired, &listing)?;
        let diff = diff(&self.desired, &actual, DeviceSettings::Respect);
        let is_of_paths = |action: &&Action| matches!(action, Action::AddPathRoute { .. });
        for action in diff.actions.iter().filter(is_of_paths) {
            apply(netlink, &self.desired, action).await?;
        }
        Ok(())
    }

    /// Compares the device with `listing`, repairs it, and logs that. Gives the repairs. A refused
    /// one does not keep the others from being tried; the first refusal is the error.
    pub async fn reconcile(
        &mut self,
        netlink: &Netlink,
        listing: &Listing,
    ) -> Result<Vec<Action>, OverlayError> {
        let actual = actual(&self.desired, listing)?;
        let diff = diff(&self.desired, &actual, DeviceSettings::Respect);
        self.log_foreign(&diff, &listing.links);
        let mut refusal = None;
        for action in &diff.actions {
            match apply(netlink, &self.desired, action).await {
                Ok(()) => self.log_repair(action),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal {
            None => Ok(diff.actions),
            Some(error) => Err(error.into()),
        }
    }

    /// Logs an MTU and a route of somebody else when they appear and when they are gone.
    fn log_foreign(&mut self, diff: &OverlayDiff, links: &[Link]) {
        let OverlayDesired { device, mtu_bytes: own, network, .. } = &self.desired;
        let (name, foreign) = (&device.name, diff.foreign_mtu_bytes);
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

    fn log_repair(&mut self, action: &Action) {
        self.logged.retain(|(_, at)| at.elapsed() < REPAIR_LOG_INTERVAL);
        if self.logged.iter().all(|(logged, _)| logged != action) {
            tracing::warn!("{}", describe_repair(&self.desired, action));
            self.logged.push((action.clone(), Instant::now()));
        }
    }
}

fn describe_repair(desired: &OverlayDesired, action: &Action) -> String {
    let OverlayDesired { device, address, network, .. } = desired;
    let name = &device.name;
    match action {
        Action::SetMtu | Action::SetTransmitQueueLength => {
            format!("overlay device {name} got its settings")
        }
        Action::SetUp => {
            format!("overlay device {name} was switched off by someone else; switched on again")
        }
        Action::AddAddress => format!(
            "overlay address {address}/32 was removed from {name} by someone else; restored"
        ),
        Action::RemoveAddress { address, prefix_length_bits } => format!(
            "address {address}/{prefix_length_bits} of the overlay network was added to {name} \
             by someone else; removed"
        ),
        Action::AddRoute => {
            format!("overlay route {network} dev {name} was removed by someone else; restored")
        }
        Action::AddPathRoute { subnet, mtu_bytes } => format!(
            "overlay route {subnet} dev {name} mtu {mtu_bytes} of a narrow path was removed by \
             someone else; restored"
        ),
        Action::RemovePathRoute { subnet } => format!(
            "overlay route {subnet} dev {name} belongs to a path that is not narrow; removed"
        ),
    }
}

/// A route in the words of `ip route`, with the numbers of interfaces that have no name.
fn spell(route: &Route, links: &[Link]) -> String {
    diff::spell_route(route, |index| {
        let link = links.iter().find(|link| link.id.index == index);
        link.map_or_else(|| format!("if{index}"), |link| link.id.name.clone())
    })
}

fn actual(desired: &OverlayDesired, listing: &Listing) -> Result<OverlayActual, OverlayError> {
    let device = &desired.device;
    let Some(link) = listing.links.iter().find(|link| link.id.index == device.index) else {
        return Err(OverlayError::DeviceGone(device.clone()));
    };
    let is_on_device = |address: &&Address| address.interface_index == device.index;
    let routes = listing.routes.iter();
    let is_of_path = |route: &&Route| {
        desired.path_mtus.contains_key(&route.destination) || desired.is_path_route(route)
    };
    Ok(OverlayActual {
        link: link.clone(),
        addresses: listing.addresses.iter().filter(is_on_device).copied().collect(),
        path_routes: routes.clone().filter(is_of_path).cloned().collect(),
        routes: routes.filter(|route| route.destination == desired.network).cloned().collect(),
    })
}

/// Performs one action. Somebody who did the same meanwhile is no error: the next pass compares
/// again.
async fn apply(
    netlink: &Netlink,
    desired: &OverlayDesired,
    action: &Action,
) -> Result<(), NetlinkError> {
    let device = &desired.device;
    let result = match action {
        Action::SetMtu => netlink.set_mtu(device, u32::from(desired.mtu_bytes)).await,
        Action::SetTransmitQueueLength => {
            netlink.set_transmit_queue_length(device, desired.transmit_queue_length).await
        }
        Action::SetUp => netlink.set_up(device).await,
        Action::AddAddress => {
            netlink.add_address(device, desired.address, diff::HOST_LENGTH_BITS).await
        }
        Action::RemoveAddress { address, prefix_length_bits } => {
            netlink.remove_address(device, *address, *prefix_length_bits).await
        }
        Action::AddRoute => netlink.add_route(&desired.route()).await,
        Action::AddPathRoute { subnet, mtu_bytes } => {
            netlink.add_route_with_mtu(&desired.path_route(*subnet), *mtu_bytes).await
        }
        Action::RemovePathRoute { subnet } => {
            netlink.remove_route(&desired.path_route(*subnet)).await
        }
    };
    let removes = matches!(action, Action::RemoveAddress { .. } | Action::RemovePathRoute { .. });
    match result {
        Err(error) if removes && error.is_already_gone() => Ok(()),
        Err(error) if !removes && error.is_already_there() => Ok(()),
        other => other,
    }
}
