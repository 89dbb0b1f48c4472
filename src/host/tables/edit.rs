//! Makes the edits. What somebody else did meanwhile is no error: the next comparison looks again.

use std::net::Ipv6Addr;

use super::{Desired, Edit, Step, Ways};
use crate::host::listing::{FamilyListing, Listing};
use crate::host::netlink::{self, Result, neighbours, request_all, unless_gone, unless_there};
use crate::host::state::{Address, KernelFamily};
use crate::route::Prefix;

impl<A: KernelFamily> Edit<A> {
    /// Makes it.
    pub async fn apply(&self) -> Result {
        match self {
            Self::SetMac(device, mac) => netlink::set_mac(device, *mac).await,
            Self::SetMtu(device, bytes) => netlink::set_mtu(device, *bytes).await,
            Self::AddAddress(device, address) => {
                unless_there(netlink::add_address(device, *address, A::BITS).await)
            }
            Self::RemoveAddress(device, owned) => {
                let Address { address, prefix_length_bits, .. } = *owned;
                unless_gone(netlink::remove_address(device, address, prefix_length_bits).await)
            }
            Self::SetUp(device) => netlink::set_up(device).await,
            Self::Set(step) => set(step).await,
            Self::RemoveRoute(route) => unless_gone(netlink::remove_route(route).await),
            Self::RemoveEntry(link, entry) => {
                unless_gone(neighbours::remove_entry(link, *entry).await)
            }
        }
    }
}

/// Makes all `edits`, many at once; gives each with its outcome.
pub async fn apply_all<A: KernelFamily>(edits: &[Edit<A>]) -> Vec<(&Edit<A>, Result)> {
    request_all(edits, async |edit: &Edit<A>| (edit, edit.apply().await)).await
}

/// Removes the routes that weftd has set in `networks` and `networks_v6` with another backend.
pub async fn remove_own_routes(
    networks: Vec<Prefix>,
    networks_v6: Vec<Prefix<Ipv6Addr>>,
) -> Result {
    let listing = Listing::read(&networks, &networks_v6).await?;
    remove_own(networks, &listing.v4()).await?;
    remove_own(networks_v6, &listing.v6()).await
}

async fn remove_own<A: KernelFamily>(
    networks: Vec<Prefix<A>>,
    found: &FamilyListing<'_, A>,
) -> Result {
    let desired = Desired { device: None, networks, ways: Ways::new() };
    let diff = desired.diff(found, &[]).unwrap_or_default();
    apply_all(&diff.removals).await.into_iter().try_for_each(|(_, result)| result)
}

async fn set<A: KernelFamily>(step: &Step<A>) -> Result {
    let result = async {
        for entry in &step.entries {
            neighbours::set_entry(&step.link, *entry).await?;
        }
        if let Some(route) = &step.in_the_way {
            unless_gone(netlink::remove_route(route).await)?;
        }
        match &step.route {
            Some(route) if step.replaces => netlink::replace_route(route).await,
            Some(route) => unless_there(netlink::add_route(route).await),
            None => Ok(()),
        }
    };
    let result = result.await;
    if result.is_err() {
        // Best effort: the next comparison lists them.
        for entry in &step.entries {
            neighbours::remove_entry(&step.link, *entry).await.ok();
        }
    }
    result
}
