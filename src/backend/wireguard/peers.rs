//! Which peers a device has by the leases of their nodes. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::backend::family::CarriedFamily;
use crate::backend::status::Unusable;
use crate::config::network::WireguardBackendConfig;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::host::interface::ExternalInterface;
use crate::route::Prefixes;
use crate::wireguard::keys::PublicKey;
use crate::wireguard::peer::PeerConfig;

use super::data::{self, PeerData};
use super::plan::{Plan, Underlay};

/// A peer of a device.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    /// The subnets of its lease.
    pub(super) subnets: Prefixes,
    pub(super) host: IpAddr,
    pub(super) config: PeerConfig,
}

/// The peers of a device, and why other leases are no use to it. A device has one peer of a key, so
/// of several leases with one that has it which was written last: the others may be left of a node
/// that has moved.
pub(super) fn resolve<'a>(
    leases: impl Iterator<Item = &'a Lease>,
    plan: &Plan,
    settings: &WireguardBackendConfig,
    own_key: PublicKey,
    external: &ExternalInterface,
) -> (Vec<Peer>, Unusable) {
    let (mut usable, mut unusable) =
        (BTreeMap::<PublicKey, (&Lease, Peer)>::new(), Unusable::new());
    for lease in leases {
        let Some(allowed) = carried(lease.subnets, plan) else { continue };
        let named = |why: &str| format!("{} {why}", lease.subnets);
        let peer = endpoint(lease, plan, external).and_then(|host| {
            let PeerData { public_key, port } = data_of(lease, plan).map_err(named)?;
            if public_key == own_key {
                return Err(named(
                    "has this node's own PublicKey: one is a copy of the other; delete the key \
                     file (/run/flannel/wgkey, or WIREGUARD_KEY_FILE) of one of them, and restart \
                     weftd there",
                ));
            }
            let config = PeerConfig {
                public_key,
                preshared_key: settings.preshared_key.clone(),
                endpoint: Some(SocketAddr::new(host, port.unwrap_or(plan.port))),
                allowed,
                keepalive_seconds: settings.keepalive_seconds,
            };
            Ok(Peer { subnets: lease.subnets, host, config })
        });
        let peer = match peer {
            Ok(peer) => peer,
            Err(why) => {
                unusable.insert(lease.subnets, why);
                continue;
            }
        };
        let key = peer.config.public_key;
        let known = usable.get(&key).map(|(known, _)| *known);
        let (newer, older) = match known {
            Some(known) if known.written() >= lease.written() => (known, Some(lease)),
            known => {
                usable.insert(key, (lease, peer));
                (lease, known)
            }
        };
        if let Some(older) = older {
            let why = format!(
                "{} has the PublicKey {key} of the newer lease {}; if both nodes run, one is a \
                 copy of the other: delete the key file there and restart weftd",
                older.subnets, newer.subnets
            );
            unusable.insert(older.subnets, why);
        }
    }
    (usable.into_values().map(|(_, peer)| peer).collect(), unusable)
}

/// What of `subnets` goes by the device.
pub(super) fn carried(subnets: Prefixes, plan: &Plan) -> Option<Prefixes> {
    let Plan { families, .. } = plan;
    Prefixes::new(
        subnets.v4().filter(|_| families.v4().is_some()),
        subnets.v6().filter(|_| families.v6().is_some()),
    )
}

/// What it says of its key and port. Where one device carries both families a node has one port:
/// that of `BackendData`, for flannel's nodes name another for IPv6, on which nobody listens.
fn data_of(lease: &Lease, plan: &Plan) -> Result<PeerData, &'static str> {
    let attributes = &lease.attributes;
    let v4 = plan.families.v4().and_then(|()| Ipv4Addr::data(attributes));
    data::read(v4.or_else(|| plan.families.v6().and_then(|()| Ipv6Addr::data(attributes))))
}

/// Where to send to it.
fn endpoint(lease: &Lease, plan: &Plan, external: &ExternalInterface) -> Result<IpAddr, String> {
    let attributes = &lease.attributes;
    let lacks = |field: &str| format!("{} names no {field} of a host", lease.subnets);
    let host = match plan.underlay {
        Underlay::V4 => Ipv4Addr::host(attributes).map(Into::into).ok_or(Ipv4Addr::HOST_FIELD),
        Underlay::V6 => Ipv6Addr::host(attributes).map(Into::into).ok_or(Ipv6Addr::HOST_FIELD),
        Underlay::Either => likelier(attributes, external).ok_or("PublicIP or PublicIPv6"),
    };
    host.map_err(lacks)
}

/// flannel's choice: public addresses before those of a site, and IPv4 first.
fn likelier(attributes: &LeaseAttributes, external: &ExternalInterface) -> Option<IpAddr> {
    let (v4, v6) = (Ipv4Addr::host(attributes), Ipv6Addr::host(attributes));
    let (Some(v4), Some(v6)) = (v4, v6) else {
        return v4.map(Into::into).or_else(|| v6.map(Into::into));
    };
    let is_v4_public = !v4.is_private() && external.v4().is_some();
    let own_v6 = external.v6().map(|own| own.public_address);
    let is_v6_public =
        !v6.is_unique_local() && own_v6.is_some_and(|address| !address.is_unique_local());
    Some(if is_v6_public && !is_v4_public { v6.into() } else { v4.into() })
}

#[cfg(test)]
mod tests;
