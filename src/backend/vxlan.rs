//! What is particular to the vxlan backend: its lease, and the kernel's VXLAN devices, one of each
//! family.

mod data;
pub(super) mod device;
pub(super) mod owner;

use std::net::{Ipv4Addr, Ipv6Addr};

use tracing::info;

use crate::backend::error::StartResult;
use crate::backend::family::CarriedFamily;
use crate::backend::setup::{addresses, check_room, warn_of_wide_mtu};
use crate::backend::tunnel_device::{OwnDevice, Tunnel, TunnelDevice};
use crate::backend_kind::BackendKind;
use crate::config::network::VxlanBackendConfig;
use crate::control::lease::LeaseAttributes;
use crate::host::interface::ExternalInterface;
use crate::host::netlink::{self, NetlinkError};
use crate::host::state::MacAddress;
use crate::route::{Families, Prefix, Prefixes};

use self::data::{data, vtep_mac};
use self::device::{kernels_port, mismatch, overhead_bytes};

const KIND: BackendKind = BackendKind::Vxlan;

/// What the devices are made with, of the families that nodes have.
#[derive(Debug, Clone, Copy)]
pub(super) struct VxlanReserved {
    settings: VxlanBackendConfig,
    mac_v4: Option<MacAddress>,
    mac_v6: Option<MacAddress>,
}

/// Refuses an interface that leaves no sensible MTU.
pub(super) async fn prepare(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
    former: Option<&LeaseAttributes>,
) -> StartResult<(LeaseAttributes, VxlanReserved)> {
    let settings = *settings;
    let mac_v4 = match external.v4() {
        Some(_) => Some(choose_mac::<Ipv4Addr>(&settings, external, former).await?),
        None => None,
    };
    let mac_v6 = match external.v6() {
        Some(_) => Some(choose_mac::<Ipv6Addr>(&settings, external, former).await?),
        None => None,
    };
    let attributes = LeaseAttributes {
        backend_data: mac_v4.map(|mac| data(settings.vni, mac)),
        backend_v6_data: mac_v6.map(|mac| data(settings.vni, mac)),
        ..addresses(KIND, external)
    };
    let VxlanBackendConfig { vni, port, gbp, learning, direct_routing, .. } = settings;
    info!(
        "VXLAN config: VNI={vni} Port={} GBP={gbp} Learning={learning} \
         DirectRouting={direct_routing}",
        port.unwrap_or(0)
    );
    warn_of_wide_mtu(settings.mtu_bytes, external);
    Ok((attributes, VxlanReserved { settings, mac_v4, mac_v6 }))
}

/// The hardware address of the device that can stay, else the one of the node's lease, so that
/// peers need not learn another one, else a new one.
async fn choose_mac<A: CarriedFamily>(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
    former: Option<&LeaseAttributes>,
) -> StartResult<MacAddress> {
    check_room::<A>(settings.mtu_bytes, external, overhead_bytes::<A>())?;
    let found = netlink::link_named(&device::name::<A>(settings)).await?;
    let wanted = device::vxlan::<A>(settings, external);
    let kept = found
        .filter(|found| mismatch(&wanted, found, kernels_port()).is_none())
        .and_then(|found| found.mac);
    let published = former.filter(|former| former.backend_type.is(KIND)).and_then(vtep_mac::<A>);
    Ok(kept.or(published).unwrap_or_else(|| {
        let mut bytes = [0; 6];
        fastrand::fill(&mut bytes);
        MacAddress::locally_administered(bytes)
    }))
}

impl VxlanReserved {
    /// Whether hosts of one link send to each other without the tunnel.
    pub(super) fn is_direct(&self) -> bool {
        self.settings.direct_routing
    }

    /// The devices of the families that nodes have, for the own `subnets`. Those of others, which
    /// an earlier run left, go, whatever their addresses: nobody may remember that network.
    pub(super) async fn devices(
        &self,
        subnets: Prefixes,
    ) -> Result<(Option<TunnelDevice>, Option<TunnelDevice<Ipv6Addr>>), NetlinkError> {
        let v4 = self.device(self.mac_v4.zip(subnets.v4()), true).await?;
        let v6 = self.device(self.mac_v6.zip(subnets.v6()), v4.is_none()).await?;
        Ok((v4, v6))
    }

    async fn device<A: CarriedFamily>(
        &self,
        of: Option<(MacAddress, Prefix<A>)>,
        is_main: bool,
    ) -> Result<Option<TunnelDevice<A>>, NetlinkError> {
        if let Some((mac, subnet)) = of {
            let tunnel = Tunnel::Vxlan(self.settings, mac);
            return Ok(Some(TunnelDevice::new(tunnel, subnet, is_main)));
        }
        let left = netlink::link_named(&device::name::<A>(&self.settings)).await?;
        if let Some(link) = left.filter(|link| link.vxlan.is_some()) {
            netlink::remove_link(&link.id).await?;
            info!("removed {}: the network has no {} any more", link.id, A::NAME);
        }
        Ok(None)
    }

    /// What they are called.
    pub(super) fn own(&self) -> Vec<OwnDevice> {
        let v4 = self.mac_v4.map(|_| OwnDevice {
            name: device::name::<Ipv4Addr>(&self.settings),
            families: Families::of_v4((), None),
        });
        let v6 = self.mac_v6.map(|_| OwnDevice {
            name: device::name::<Ipv6Addr>(&self.settings),
            families: Families::of_v6(None, ()),
        });
        v4.into_iter().chain(v6).collect()
    }
}
