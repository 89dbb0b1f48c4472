//! What a weftd with the udp backend has kept, in the way of another backend.

use tracing::info;

use crate::host::netlink::{Netlink, NetlinkError};
use crate::route::Prefix;

use super::kernel_plane::attachment::clear_inward;
use super::kernel_plane::clear_pair;
use super::tun_device::remove_kept;

/// Removes the devices that were kept for `network`, with their pairs and filters.
pub(crate) async fn remove_leftovers(network: Prefix) -> Result<(), NetlinkError> {
    let netlink = Netlink::open()?;
    for (device, owner) in remove_kept(&netlink, Some(network)).await? {
        clear_pair(&netlink, &device.name).await?;
        clear_inward(&netlink, owner, &[]).await?;
        info!("removed {device}, which a weftd with the udp backend had kept");
    }
    Ok(())
}
