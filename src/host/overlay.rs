//! The overlay device's part of the kernel's tables: link up, one /32 address, one route.
//! Owns when they are repaired and who is told. What is missing is decided in `plan`, without I/O;
//! creating the device, and traffic, are somebody else's.

mod plan;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::failure::with_causes;
use crate::host::netlink::{Events, Netlink, NetlinkError};
use crate::host::state::{LinkId, Route};
use crate::route::Prefix;

pub use plan::{Action, DeviceSettings, OverlayActual, OverlayDesired, Plan, diff};

/// Packets that wait in the device while the worker is off its processor: 30 ms at 200,000
/// packets a second. On a busy host of two processors the scheduler keeps a worker off for up to
/// 25 ms; 2,000 places lost 67 packets in a million there in ten minutes at 167,000 a second, and
/// the kernel's 500 lose some at any rate. A super-packet counts as one.
pub const TRANSMIT_QUEUE_LENGTH: u32 = 6000;

/// A repair that the kernel refused is tried again without waiting for a change. Half of the
/// second in which a repair is promised.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The tables are compared this often even if the kernel reports no change. Costs three listings,
/// far below a millisecond, and heals whatever a lost event hid.
const RESYNC_INTERVAL: Duration = Duration::from_secs(60);

/// On a host with a whole internet routing table a pass takes long, and routes change all the time.
/// After each pass the watch rests this many times as long as the pass took, so that it never uses
/// more than a fifth of a processor, but no longer than half of the second of the promise.
const REST_FACTOR: u32 = 4;
const REST_MAX: Duration = Duration::from_millis(500);

/// The same repair again within this time is counted, not logged: somebody else insists, and one
/// line says so as well as a hundred.
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
        route: ForeignRoute,
    },
    /// The kernel could not be asked or refused.
    #[error("cannot bring the overlay device into its state")]
    Netlink(#[from] NetlinkError),
}

/// A route to the overlay network that is not ours, in the words of `ip route`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignRoute(String);

impl fmt::Display for ForeignRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The overlay device's address and route, held against everybody else.
#[derive(Debug)]
pub struct Overlay {
    netlink: Netlink,
    desired: OverlayDesired,
    told: Told,
}

/// What the operator knows already.
#[derive(Debug, Default)]
struct Told {
    foreign_mtu_bytes: Option<u32>,
    foreign_route: Option<ForeignRoute>,
    failure: Option<String>,
    repairs: Vec<ToldRepair>,
}

#[derive(Debug)]
struct ToldRepair {
    action: Action,
    at: Instant,
    untold: u32,
}

impl Overlay {
    /// Configures a host's first overlay device completely, MTU and queue length included.
    /// Refuses if the main table has a route to the network through another device that wins.
    pub async fn establish(
        netlink: Netlink,
        desired: OverlayDesired,
    ) -> Result<Self, OverlayError> {
        let plan = Self::check(&netlink, &desired).await?;
        Self::impose(netlink, desired, &plan).await
    }

    /// Refuses as `establish` would, and changes nothing. Gives what there is to do.
    pub async fn check(netlink: &Netlink, desired: &OverlayDesired) -> Result<Plan, OverlayError> {
        let actual = read(netlink, desired).await?;
        let plan = diff(desired, &actual, DeviceSettings::Impose);
        match plan.foreign_routes.first() {
            Some(route) => {
                Err(OverlayError::ForeignRoute { route: name_route(netlink, route).await })
            }
            None => Ok(plan),
        }
    }

    /// Configures a device that takes the place of one that was established and is gone. A foreign
    /// route that has come since is no reason to leave the host without an overlay: `hold` warns.
    pub async fn establish_again(
        netlink: Netlink,
        desired: OverlayDesired,
    ) -> Result<Self, OverlayError> {
        let actual = read(&netlink, &desired).await?;
        let plan = diff(&desired, &actual, DeviceSettings::Impose);
        Self::impose(netlink, desired, &plan).await
    }

    async fn impose(
        netlink: Netlink,
        desired: OverlayDesired,
        plan: &Plan,
    ) -> Result<Self, OverlayError> {
        for action in &plan.actions {
            apply(&netlink, &desired, action).await?;
        }
        Ok(Self { netlink, desired, told: Told::default() })
    }

    /// Goes on over another connection to the kernel, for when the old one broke.
    pub fn use_netlink(&mut self, netlink: Netlink) {
        self.netlink = netlink;
    }

    /// What the device is held to.
    #[must_use]
    pub fn desired(&self) -> &OverlayDesired {
        &self.desired
    }

    /// Takes another MTU, in bytes, as the device's own from now on. A device that somebody else
    /// gave an MTU keeps it; gives whether it has the new one.
    pub async fn follow_mtu(&mut self, mtu_bytes: u16) -> Result<bool, OverlayError> {
        let actual = read(&self.netlink, &self.desired).await?.link.mtu_bytes;
        let is_own = actual == u32::from(self.desired.mtu_bytes);
        if is_own {
            self.netlink.set_mtu(&self.desired.device, u32::from(mtu_bytes)).await?;
        }
        self.desired.mtu_bytes = mtu_bytes;
        Ok(is_own || actual == u32::from(mtu_bytes))
    }

    /// Gives the subnets whose paths take less than the device routes of their own, with what they
    /// take, in bytes, and no others.
    pub async fn limit_paths(
        &mut self,
        path_mtus: BTreeMap<Prefix, u16>,
    ) -> Result<(), OverlayError> {
        let before = &self.desired.path_mtus;
        let differs = |subnet: &Prefix, bytes| path_mtus.get(subnet) != Some(bytes);
        let ending = before.iter().filter(|(subnet, bytes)| differs(subnet, bytes));
        // One with another MTU, too: it is added anew, and meanwhile the network's route leads on.
        for (subnet, _) in ending {
            let action = Action::RemovePathRoute { subnet: *subnet };
            apply(&self.netlink, &self.desired, &action).await?;
        }
        self.desired.path_mtus = path_mtus;
        let actual = read(&self.netlink, &self.desired).await?;
        let plan = diff(&self.desired, &actual, DeviceSettings::Respect);
        let is_of_paths = |action: &&Action| matches!(action, Action::AddPathRoute { .. });
        for action in plan.actions.iter().filter(is_of_paths) {
            apply(&self.netlink, &self.desired, action).await?;
        }
        Ok(())
    }

    /// Holds the device to its state until it is gone: repairs at each change that `events`
    /// reports, and reports each repair. `events` must have been subscribed before `establish`.
    /// Returns only with the error that ends it: the device is gone (make a new one), or the
    /// kernel cannot be heard any more (open a new `Netlink` and new `Events`).
    /// Cancel-safe.
    pub async fn hold(&mut self, events: &mut Events) -> OverlayError {
        loop {
            let start = Instant::now();
            let pause = match self.reconcile().await {
                Ok(_) => {
                    self.told.failure = None;
                    RESYNC_INTERVAL
                }
                Err(
                    end @ (OverlayError::DeviceGone(_)
                    | OverlayError::Netlink(NetlinkError::Disconnected(_))),
                ) => return end,
                Err(error) => {
                    self.tell_failure(&error);
                    RETRY_INTERVAL
                }
            };
            sleep((start.elapsed() * REST_FACTOR).min(REST_MAX)).await;
            if let Ok(Err(error)) = timeout(pause, events.changed()).await {
                return error.into();
            }
        }
    }

    /// One pass: compares, repairs, reports. Returns what was repaired. An edit that the kernel
    /// refuses does not keep the others from being tried; the first refusal is the error.
    pub async fn reconcile(&mut self) -> Result<Vec<Action>, OverlayError> {
        let actual = read(&self.netlink, &self.desired).await?;
        let plan = diff(&self.desired, &actual, DeviceSettings::Respect);
        self.tell_mtu(plan.foreign_mtu_bytes);
        self.tell_foreign_route(plan.foreign_routes.first()).await;
        let mut refusal = None;
        for action in &plan.actions {
            match apply(&self.netlink, &self.desired, action).await {
                Ok(()) => self.tell_repair(action),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal {
            None => Ok(plan.actions),
            Some(error) => Err(error.into()),
        }
    }

    fn tell_mtu(&mut self, foreign_mtu_bytes: Option<u32>) {
        if self.told.foreign_mtu_bytes == foreign_mtu_bytes {
            return;
        }
        let (name, own) = (&self.desired.device.name, self.desired.mtu_bytes);
        match foreign_mtu_bytes {
            Some(bytes) => tracing::warn!(
                "the MTU of {name} was changed from {own} to {bytes} by someone else; left as it is"
            ),
            None => tracing::info!("the MTU of {name} is {own} again"),
        }
        self.told.foreign_mtu_bytes = foreign_mtu_bytes;
    }

    async fn tell_foreign_route(&mut self, route: Option<&Route>) {
        let route = match route {
            Some(route) => Some(name_route(&self.netlink, route).await),
            None => None,
        };
        if self.told.foreign_route == route {
            return;
        }
        match &route {
            Some(route) => tracing::warn!(
                "someone else set a route to the overlay network: {route}; \
                 traffic may leave the overlay until it is removed"
            ),
            None => tracing::info!(
                "the foreign route to {} is gone; the overlay has its traffic again",
                self.desired.network
            ),
        }
        self.told.foreign_route = route;
    }

    fn tell_failure(&mut self, error: &OverlayError) {
        let text = with_causes(error);
        if self.told.failure.as_ref() != Some(&text) {
            tracing::warn!("{text}; trying again every {} ms", RETRY_INTERVAL.as_millis());
            self.told.failure = Some(text);
        }
    }

    fn tell_repair(&mut self, action: &Action) {
        let now = Instant::now();
        let mut untold = 0;
        if let Some(told) = self.told.repairs.iter_mut().find(|told| told.action == *action) {
            if now.duration_since(told.at) < REPAIR_LOG_INTERVAL {
                told.untold += 1;
                return;
            }
            untold = std::mem::take(&mut told.untold);
            told.at = now;
        } else {
            // Foreign addresses have no end; what is older than the interval needs no memory.
            self.told.repairs.retain(|told| now.duration_since(told.at) < REPAIR_LOG_INTERVAL);
            self.told.repairs.push(ToldRepair { action: action.clone(), at: now, untold: 0 });
        }
        let again = if untold == 0 {
            String::new()
        } else {
            format!(" ({untold} more times since the last message)")
        };
        tracing::warn!("{}{again}", describe_repair(&self.desired, action));
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

async fn read(netlink: &Netlink, desired: &OverlayDesired) -> Result<OverlayActual, OverlayError> {
    let device = &desired.device;
    let Some(link) = netlink.link(device.index).await? else {
        return Err(OverlayError::DeviceGone(device.clone()));
    };
    let mut addresses = netlink.addresses().await?;
    addresses.retain(|address| address.interface_index == device.index);
    // Path routes lead to leases, which lie inside the network.
    let mut routes = Netlink::routes_to(|destination| desired.network.covers(destination)).await?;
    let is_of_path = |route: &Route| {
        desired.path_mtus.contains_key(&route.destination) || desired.is_path_route(route)
    };
    let path_routes = routes.iter().filter(|route| is_of_path(route)).cloned().collect();
    routes.retain(|route| route.destination == desired.network);
    Ok(OverlayActual { link, addresses, routes, path_routes })
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
            netlink.add_address(device, desired.address, plan::HOST_LENGTH_BITS).await
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

/// The route with the names of its interfaces, or their numbers if they cannot be had.
async fn name_route(netlink: &Netlink, route: &Route) -> ForeignRoute {
    let links = netlink.links().await.unwrap_or_default();
    let name = |index| {
        let link = links.iter().find(|link| link.id.index == index);
        link.map_or_else(|| format!("if{index}"), |link| link.id.name.clone())
    };
    ForeignRoute(plan::spell_route(route, name))
}
