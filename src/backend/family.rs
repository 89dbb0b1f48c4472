//! What differs by family between a lease, the external interface and the host's tables.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::control::lease::{Lease, LeaseAttributes, RawJson};
use crate::host::interface::ExternalInterface;
use crate::host::listing::{FamilyListing, Listing};
use crate::host::state::KernelFamily;
use crate::route::{Prefix, Routed};

/// How flannel's names of VXLAN devices begin, those of IPv4 and of IPv6; the VNI follows.
pub const VXLAN_NAMES: [&str; 2] = ["flannel.", "flannel-v6."];

/// flannel's names of WireGuard devices: the one of IPv4 or of both families, and that of IPv6.
pub const WIREGUARD_NAMES: [&str; 2] = ["flannel-wg", "flannel-wg-v6"];

/// A family whose packets hosts carry for their pods.
pub(super) trait CarriedFamily: KernelFamily + Routed {
    /// What a lease's value calls [`Self::host`].
    const HOST_FIELD: &'static str;
    /// Which of [`VXLAN_NAMES`].
    const VXLAN_NAME: &'static str;

    /// The external interface's own address.
    fn own(external: &ExternalInterface) -> Option<Self>;

    /// A node's subnet.
    fn subnet(lease: &Lease) -> Option<Prefix<Self>> {
        Self::of_both(lease.subnets)
    }

    /// Where others reach it.
    fn host(attributes: &LeaseAttributes) -> Option<Self>;

    /// What its backend publishes for that.
    fn data(attributes: &LeaseAttributes) -> Option<&RawJson>;

    /// What was listed.
    fn found(listing: &Listing) -> FamilyListing<'_, Self>;

    /// Why nobody reaches the subnet that a node has, if that is for want of an address.
    fn without_host(lease: &Lease) -> Option<String> {
        let is_lost = Self::subnet(lease).is_some() && Self::host(&lease.attributes).is_none();
        is_lost.then(|| format!("{} names no {} of a host", lease.subnets, Self::HOST_FIELD))
    }

    /// A peer's subnet and its host, if it has both.
    fn peer(lease: &Lease) -> Option<(Prefix<Self>, Self)> {
        Self::subnet(lease).zip(Self::host(&lease.attributes))
    }
}

impl CarriedFamily for Ipv4Addr {
    const HOST_FIELD: &'static str = "PublicIP";
    const VXLAN_NAME: &'static str = VXLAN_NAMES[0];

    fn own(external: &ExternalInterface) -> Option<Self> {
        external.v4().map(|v4| v4.address)
    }

    fn host(attributes: &LeaseAttributes) -> Option<Self> {
        attributes.public_ip.filter(|address| address.is_of_host())
    }

    fn data(attributes: &LeaseAttributes) -> Option<&RawJson> {
        attributes.backend_data.as_ref()
    }

    fn found(listing: &Listing) -> FamilyListing<'_> {
        listing.v4()
    }
}

impl CarriedFamily for Ipv6Addr {
    const HOST_FIELD: &'static str = "PublicIPv6";
    const VXLAN_NAME: &'static str = VXLAN_NAMES[1];

    fn own(external: &ExternalInterface) -> Option<Self> {
        external.v6().map(|v6| v6.address)
    }

    fn host(attributes: &LeaseAttributes) -> Option<Self> {
        attributes.public_ipv6.filter(|address| address.is_of_host())
    }

    fn data(attributes: &LeaseAttributes) -> Option<&RawJson> {
        attributes.backend_v6_data.as_ref()
    }

    fn found(listing: &Listing) -> FamilyListing<'_, Self> {
        listing.v6()
    }
}
