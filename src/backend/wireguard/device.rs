//! The WireGuard devices: which there are, and that each is there with its key and its port. A
//! device that can stay stays, with its sessions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tracing::info;

use crate::backend::family::{CarriedFamily, WIREGUARD_NAMES};
use crate::config::network::{WireguardBackendConfig, WireguardMode};
use crate::host::interface::ExternalInterface;
use crate::host::netlink::wireguard::{self, FoundDevice};
use crate::host::netlink::{self, NetlinkError, devices};
use crate::host::state::Link;
use crate::route::{Families, Prefixes};
use crate::wireguard::difference::PeerEdit;
use crate::wireguard::keys::PrivateKey;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum WireguardError {
    /// The kernel knows none.
    #[error(
        "this kernel has no WireGuard: its module wireguard (Linux 5.6 and later) is not there, or \
         is not loaded from here; run `modprobe wireguard` on the host, or choose another backend"
    )]
    NoModule(#[source] NetlinkError),
    /// Its name is taken.
    #[error("{0} is there and is no WireGuard device: remove or rename it (`ip link del {0}`)")]
    Foreign(&'static str),
    /// Its port is.
    #[error(
        "UDP port {port}, for {name}, is taken by another program (`ss -ulnp sport = :{port}`): \
         stop that, or choose another ListenPort"
    )]
    PortTaken {
        /// The port.
        port: u16,
        /// The device.
        name: &'static str,
        /// What the kernel said.
        source: NetlinkError,
    },
    /// The kernel said no.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// Over which addresses a device sends to peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Underlay {
    V4,
    V6,
    /// To each peer by those that are more likely to lead to it.
    Either,
}

/// A device that has to be there.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend) struct Plan {
    pub(super) name: &'static str,
    /// Where its datagrams arrive.
    pub(super) port: u16,
    /// Whose packets it carries.
    pub(super) families: Families<(), ()>,
    pub(super) underlay: Underlay,
}

/// Who runs the devices.
#[derive(Debug, Clone, Copy)]
pub(super) enum WireguardDevice {
    /// The kernel.
    Kernel,
}

impl WireguardDevice {
    /// What the device with this name has.
    pub(super) async fn read(self, name: &str) -> Result<FoundDevice, NetlinkError> {
        match self {
            Self::Kernel => wireguard::device(name).await,
        }
    }

    /// Makes the edits, and gives those that were refused with the reason.
    pub(super) async fn edit_peers<'a>(
        self,
        name: &str,
        edits: &'a [PeerEdit],
    ) -> Vec<(&'a PeerEdit, NetlinkError)> {
        match self {
            Self::Kernel => wireguard::edit_peers(name, edits).await,
        }
    }

    /// Makes sure that the device is there, has its key and its port, and is up. Gives what it has,
    /// and whether it is new.
    pub(super) async fn ensure(
        self,
        plan: &Plan,
        key: &PrivateKey,
        mtu_bytes: u32,
    ) -> Result<(Link, FoundDevice, bool), WireguardError> {
        let Plan { name, port, .. } = *plan;
        let Self::Kernel = self;
        let taken = |source: NetlinkError| match source.is_address_in_use() {
            true => WireguardError::PortTaken { port, name, source },
            false => source.into(),
        };
        let found = netlink::link_named(name).await?;
        let is_new = found.is_none();
        let link = match found {
            Some(link) if !link.is_wireguard => return Err(WireguardError::Foreign(name)),
            Some(link) => link,
            None => {
                let made = devices::add_wireguard(name, mtu_bytes).await;
                match made {
                    Err(error) if error.is_unsupported() => {
                        return Err(WireguardError::NoModule(error));
                    }
                    made => netlink::unless_there(made)?,
                }
                netlink::link_just_made(name).await?
            }
        };
        let mut device = wireguard::device(name).await?;
        if (device.public_key, device.listen_port) != (Some(key.public()), port) {
            wireguard::configure(name, key, port).await.map_err(taken)?;
            device = wireguard::device(name).await?;
        }
        if !link.is_up {
            // It opens its sockets now.
            netlink::set_up(&link.id).await.map_err(taken)?;
        }
        Ok((link, device, is_new))
    }
}

/// The devices of nodes that have these families.
pub(super) fn plans(settings: &WireguardBackendConfig, families: Families<(), ()>) -> Vec<Plan> {
    let [name, name_v6] = WIREGUARD_NAMES;
    let one = |underlay| vec![Plan { name, port: settings.port, families, underlay }];
    match settings.mode {
        WireguardMode::Separate => {
            let v4 = families.v4().map(|()| Plan {
                name,
                port: settings.port,
                families: Families::of_v4((), None),
                underlay: Underlay::V4,
            });
            let v6 = families.v6().map(|()| Plan {
                name: name_v6,
                port: settings.port_v6,
                families: Families::of_v6(None, ()),
                underlay: Underlay::V6,
            });
            v4.into_iter().chain(v6).collect()
        }
        WireguardMode::Auto => one(Underlay::Either),
        WireguardMode::V4 => one(Underlay::V4),
        WireguardMode::V6 => one(Underlay::V6),
    }
}

/// MTU of the devices, in bytes: what the tunnel's packets may have, less its headers over IPv6, as
/// flannel has it whatever the underlay.
pub(super) fn mtu_bytes(settings: &WireguardBackendConfig, external: &ExternalInterface) -> u32 {
    let below = settings.mtu_bytes.unwrap_or(u32::MAX).min(external.mtu_bytes);
    below.saturating_sub(WireguardBackendConfig::OVERHEAD_BYTES)
}

/// Whether packets of the family have no room in the devices.
pub(super) fn is_too_narrow<A: CarriedFamily>(mtu_bytes: u32) -> bool {
    mtu_bytes < A::MTU_BYTES_MIN
}

/// Removes flannel's WireGuard devices that are not of `plans`, or carry a family that is another
/// one's now, as far as they have an address for that in `networks`: another daemon may have one
/// for another network.
pub(in crate::backend) async fn remove_others(
    plans: &[Plan],
    networks: &[Prefixes],
) -> Result<(), NetlinkError> {
    for name in WIREGUARD_NAMES {
        let found = netlink::link_named(name).await?.filter(|link| link.is_wireguard);
        let Some(Link { id, .. }) = found else { continue };
        let v4 = netlink::addresses::<Ipv4Addr>().await?.into_iter();
        let v6 = netlink::addresses::<Ipv6Addr>().await?.into_iter();
        let v4 = v4.map(|owned| (owned.interface_index, IpAddr::from(owned.address)));
        let v6 = v6.map(|owned| (owned.interface_index, IpAddr::from(owned.address)));
        let families = plans.iter().find(|plan| plan.name == name).map(|plan| plan.families);
        let is_stale = |(index, address): (u32, IpAddr)| {
            let stays = families.is_some_and(|families| match address {
                IpAddr::V4(_) => families.v4().is_some(),
                IpAddr::V6(_) => families.v6().is_some(),
            });
            index == id.index && !stays && networks.iter().any(|it| it.contains(address))
        };
        if v4.chain(v6).any(is_stale) {
            netlink::unless_gone(netlink::remove_link(&id).await)?;
            info!("removed {id}: it is of another backend, mode or network than this node's now");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(json: serde_json::Value, families: Families<(), ()>) -> Vec<(&'static str, u16)> {
        let settings = WireguardBackendConfig::parse(&json).unwrap();
        plans(&settings, families).iter().map(|plan| (plan.name, plan.port)).collect()
    }

    #[test]
    fn each_mode_has_flannels_devices_and_ports() {
        let (v4, v6) = (Families::of_v4((), None), Families::of_v6(None, ()));
        let both = Families::of_v4((), Some(()));
        let separate = serde_json::json!({});
        assert_eq!(planned(separate.clone(), v4), [("flannel-wg", 51820)]);
        assert_eq!(planned(separate.clone(), v6), [("flannel-wg-v6", 51821)]);
        let two = [("flannel-wg", 51820), ("flannel-wg-v6", 51821)];
        assert_eq!(planned(separate, both), two);
        for mode in ["auto", "ipv4", "ipv6"] {
            let one = serde_json::json!({"Mode": mode, "ListenPort": 7});
            assert_eq!(planned(one, both), [("flannel-wg", 7)], "{mode}");
        }
    }

    #[test]
    fn mtu_is_80_below_the_wire_and_never_above_the_interface() {
        let of = |json: serde_json::Value| {
            let settings = WireguardBackendConfig::parse(&json).unwrap();
            let v4 = Ipv4Addr::new(192, 0, 2, 1);
            let v4 = crate::host::interface::ExternalAddress::of(v4, None);
            let (name, addresses) = ("eth0".to_owned(), Families::of_v4(v4, None));
            mtu_bytes(&settings, &ExternalInterface { name, index: 2, addresses, mtu_bytes: 1500 })
        };
        assert_eq!(of(serde_json::json!({})), 1420);
        assert_eq!(of(serde_json::json!({"MTU": 1400})), 1320);
        assert_eq!(of(serde_json::json!({"MTU": 9000})), 1420, "it would go in fragments");
    }
}
