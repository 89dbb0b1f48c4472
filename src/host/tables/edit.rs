//! Makes the edits. What somebody else did meanwhile is no error: the next comparison looks again.

use super::{Desired, Edit, HOST_LENGTH_BITS, Step};
use crate::host::listing::Listing;
use crate::host::netlink::{self, Result, neighbours, request_all, unless_gone, unless_there};
use crate::host::state::Address;
use crate::route::Prefix;

impl Edit {
    /// Makes it.
    pub async fn apply(&self) -> Result {
        match self {
            Self::SetMac(device, mac) => netlink::set_mac(device, *mac).await,
            Self::SetMtu(device, bytes) => netlink::set_mtu(device, *bytes).await,
            Self::AddAddress(device, address) => {
                unless_there(netlink::add_address(device, *address, HOST_LENGTH_BITS).await)
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
pub async fn apply_all<'a>(edits: &'a [Edit]) -> Vec<(&'a Edit, Result)> {
    request_all(edits, async |edit: &'a Edit| (edit, edit.apply().await)).await
}

/// Removes the routes that weftd has set in `networks` with another backend.
pub async fn remove_own_routes(networks: Vec<Prefix>) -> Result {
    let listing = Listing::read(&networks).await?;
    let diff = Desired { networks, ..Desired::default() }.diff(&listing, &[]).unwrap_or_default();
    apply_all(&diff.removals).await.into_iter().try_for_each(|(_, result)| result)
}

async fn set(step: &Step) -> Result {
    let result = async {
        for entry in &step.entries {
            neighbours::set_entry(&step.link, *entry).await?;
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
