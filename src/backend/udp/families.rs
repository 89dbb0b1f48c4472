//! What differs by family in the tunnel of a host: its end, its subnets, and the routes to peers.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::host::interface::ExternalInterface;
use crate::host::mtu::{
    IPV6_MTU_BYTES_MIN, MtuError, followed_mtu_bytes, least_whole_bytes, tunnel_overhead_bytes,
    with_room_for_ipv6,
};
use crate::route::{Prefix, Prefixes, Table};

/// The tunnel's end on this interface, over IPv6 or IPv4.
pub(super) fn underlay(external: &ExternalInterface, is_ipv6: bool) -> Option<IpAddr> {
    if is_ipv6 {
        external.v6().map(|v6| v6.address.into())
    } else {
        external.v4().map(|v4| v4.address.into())
    }
}

/// The MTU that the overlay has over the interface as it is now.
pub(super) fn fitting(
    external: &ExternalInterface,
    tunnel: SocketAddr,
    has_ipv6: bool,
    configured_bytes: Option<u32>,
) -> Result<u16, MtuError> {
    let overhead_bytes = tunnel_overhead_bytes(tunnel.ip());
    let mtu_bytes = followed_mtu_bytes(external.mtu_bytes, overhead_bytes, configured_bytes)?;
    with_room_for_ipv6(has_ipv6, mtu_bytes, external.mtu_bytes, overhead_bytes)
}

/// The largest packet that the interface takes whole, in the tunnel that ends at `tunnel`.
pub(super) fn whole_bytes(external: &ExternalInterface, tunnel: SocketAddr) -> u16 {
    let most = external.mtu_bytes.saturating_sub(tunnel_overhead_bytes(tunnel.ip()));
    most.try_into().unwrap_or(u16::MAX)
}

/// To which packets TCP of IPv6 is held: to the `whole_bytes` that the interface takes, or where
/// some path over IPv6 takes less than it should, to what all do.
pub(super) fn held_to(
    tunnel: SocketAddr,
    whole_bytes: u16,
    limits: &BTreeMap<Prefixes, u16>,
) -> u16 {
    let is_below = tunnel.is_ipv6() && limits.values().any(|bytes| *bytes < IPV6_MTU_BYTES_MIN);
    let most = if is_below { least_whole_bytes() } else { u16::MAX };
    whole_bytes.min(most)
}

/// What paths take less than the device, by the subnets at their ends. A route of IPv6 has no MTU
/// below its least: what is longer than its path goes without Don't Fragment, and routers on the
/// way may fragment it.
pub(super) fn limits_of(
    limits: &BTreeMap<Prefixes, u16>,
    table: &Table,
) -> (BTreeMap<Prefix, u16>, BTreeMap<Prefix<Ipv6Addr>, u16>) {
    let peers = table.peers().iter().map(|peer| peer.subnets);
    let narrow = peers.filter_map(|it| Some((it, *limits.get(&it.first())?)));
    let v4 = narrow.clone().filter_map(|(it, bytes)| Some((it.v4()?, bytes)));
    let v6 = narrow.filter_map(|(it, bytes)| Some((it.v6()?, bytes.max(IPV6_MTU_BYTES_MIN))));
    (v4.collect(), v6.collect())
}
