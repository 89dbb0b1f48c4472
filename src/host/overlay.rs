//! The overlay device's part of the kernel's tables: link up, one /32 address, one route, and the
//! routes of narrow paths. Logs what it repairs. `diff` decides what is missing, without I/O.

mod diff;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::host::follower::Listing;
use crate::host::netlink::{Netlink, NetlinkError};
use crate::host::state::{Link, LinkId, Route};
use crate::route::Prefix;

pub use diff::{Action, OverlayDesired};
use diff::{OverlayDiff, diff};

/// Packets that wait in the device while the worker is off its processor: 30 ms at 200,000
/// packets a second. On a busy host of two processors the scheduler keeps a worker off for up to
/// 25 ms; 2,000 places lost 67 packets in a million there in ten minutes at 167,000 a second, and
/// the kernel's 500 lose some at any rate. A super-packet counts as one.
const TRANSMIT_QUEUE_LENGTH: u32 = 6000;

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
         (weft cleanup, or ip route del {route}), give it a metric above 0, or choose another \
         Network"
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
    /// Refuses a host whose main table has a route to the network through another device that
    /// wins. Changes nothing.
    pub async fn check(netlink: &Netlink, desired: &OverlayDesired) -> Result<(), OverlayError> {
        let listing = Listing::read(netlink, &[desired.network]).await?;
        match compare(desired, &listing)?.foreign_routes.first() {
            Some(route) => Err(OverlayError::ForeignRoute { route: spell(route, &listing.links) }),
            None => Ok(()),
        }
    }

    /// Configures a new overlay device completely, MTU and queue length included. A foreign route
    /// does not leave the host without an overlay: `reconcile` warns of it.
    pub async fn establish(
        netlink: &Netlink,
        desired: OverlayDesired,
    ) -> Result<Self, OverlayError> {
        netlink.set_mtu(&desired.device, desired.mtu_bytes.into()).await?;
        netlink.set_transmit_queue_length(&desired.device, TRANSMIT_QUEUE_LENGTH).await?;
        let listing = Listing::read(netlink, &[desired.network]).await?;
        for action in compare(&desired, &listing)?.actions {
            apply(netlink, &desired, &action).await?;
        }
        Ok(Self { desired, foreign_mtu_bytes: None, foreign_route: None, logged: Vec::new() })
    }

    /// The state that the device must have.
    pub fn desired(&self) -> &OverlayDesired {
        &self.desired
    }

    /// Gives the device another MTU, in bytes, and whether it has it: an MTU that somebody else
    /// had set at the last listing is left alone.
    pub async fn follow_mtu(
        &mut self,
        netlink: &Netlink,
        mtu_bytes: u16,
    ) -> Result<bool, NetlinkError> {
        if self.foreign_mtu_bytes.is_none() {
            netlink.set_mtu(&self.desired.device, mtu_bytes.into()).await?;
        }
        self.desired.mtu_bytes = mtu_bytes;
        Ok(self.foreign_mtu_bytes.is_none_or(|foreign| foreign == u32::from(mtu_bytes)))
    }

    /// Gives the subnets behind narrow paths, and no others, routes with an MTU of their own.
    pub async fn limit_paths(
        &mut self,
        netlink: &Netlink,
        path_mtus: BTreeMap<Prefix, u16>,
    ) -> Result<(), NetlinkError> {
        let before = std::mem::replace(&mut self.desired.path_mtus, path_mtus);
        let after = &self.desired.path_mtus;
        let ended = before.iter().filter(|(subnet, bytes)| after.get(*subnet) != Some(*bytes));
        let begun = after.iter().filter(|(subnet, bytes)| before.get(*subnet) != Some(*bytes));
        // A route with another MTU is removed, too, and added again: meanwhile the network's route
        // leads on.
        let remove = ended.map(|(subnet, _)| Action::RemovePathRoute { subnet: *subnet });
        let own_bytes = u32::from(self.desired.mtu_bytes);
        let device_bytes = self.foreign_mtu_bytes.unwrap_or(own_bytes);
        let add = begun.map(|(subnet, bytes)| diff::add_path_route(*subnet, *bytes, device_bytes));
        for action in remove.chain(add) {
            apply(netlink, &self.desired, &action).await?;
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
        let diff = compare(&self.desired, listing)?;
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

fn compare(desired: &OverlayDesired, listing: &Listing) -> Result<OverlayDiff, OverlayError> {
    diff(desired, listing).ok_or_else(|| OverlayError::DeviceGone(desired.device.clone()))
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
