//! By which interface what other hosts' pods send comes in.

use std::net::{IpAddr, Ipv4Addr};

use crate::host::netlink::{self, NetlinkError};
use crate::tool::refusal::or_refused;

/// The interface of what `pod` of `host` sends: the one by which packets go there, if that is
/// without a tunnel, as with host-gw and with DirectRouting; else the `device`.
pub(super) async fn way_in(
    pod: Ipv4Addr,
    host: Ipv4Addr,
    device: Option<u32>,
) -> Result<Option<u32>, NetlinkError> {
    let path = or_refused(netlink::path_to(pod).await)?.ok();
    let direct = path.filter(|path| path.gateway == Some(IpAddr::V4(host)));
    Ok(direct.map(|path| path.interface_index).or(device))
}
