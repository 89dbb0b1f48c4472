//! Keeps packets of an overlay that encrypts from leaving in the clear while nothing carries them:
//! a route to nowhere behind all others, which stays when weftd ends.

use crate::host::netlink::{self, BLACKHOLE_METRIC, NetlinkError, unless_gone, unless_there};
use crate::host::state::KernelFamily;
use crate::route::{Prefix, Prefixes};

/// Has what is for these networks go nowhere if no other route has it.
pub(super) async fn close(networks: Prefixes) -> Result<(), NetlinkError> {
    async fn close<A: KernelFamily>(network: Option<Prefix<A>>) -> Result<(), NetlinkError> {
        let Some(network) = network else { return Ok(()) };
        unless_there(netlink::add_blackhole(network).await)
    }
    close(networks.v4()).await?;
    close(networks.v6()).await
}

/// Undoes that, for another backend or another network.
pub(super) async fn open(networks: Prefixes) -> Result<(), NetlinkError> {
    async fn open<A: KernelFamily>(network: Option<Prefix<A>>) -> Result<(), NetlinkError> {
        let Some(network) = network else { return Ok(()) };
        unless_gone(netlink::remove_blackhole(network, BLACKHOLE_METRIC).await)
    }
    open(networks.v4()).await?;
    open(networks.v6()).await
}
