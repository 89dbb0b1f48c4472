//! VXLAN devices over rtnetlink: makes one, and reads what one was made with.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use rtnetlink::LinkVxlan;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkInfo};

use super::{Netlink, NetlinkError};
use crate::host::state::{MacAddress, Vxlan};

impl Netlink {
    /// Makes a VXLAN device, switched off.
    pub async fn add_vxlan(
        &self,
        name: &str,
        vxlan: &Vxlan,
        mac: MacAddress,
        mtu_bytes: u32,
    ) -> Result<(), NetlinkError> {
        let mut builder = LinkVxlan::new(name, vxlan.vni)
            .dev(vxlan.parent_index)
            .append_info_data(InfoVxlan::Learning(vxlan.learning))
            .address(mac.0.to_vec())
            .mtu(mtu_bytes);
        if let Some(local) = vxlan.local {
            builder = builder.local(local);
        }
        if let Some(port) = vxlan.port {
            builder = builder.port(port);
        }
        if vxlan.gbp {
            builder = builder.append_info_data(InfoVxlan::Gbp);
        }
        let request = RouteNetlinkMessage::NewLink(builder.build());
        self.add(format!("make the vxlan device {name}"), request).await
    }
}

/// What a link was made with, if it is a VXLAN device.
pub(super) fn vxlan(infos: &[LinkInfo]) -> Option<Vxlan> {
    if !infos.contains(&LinkInfo::Kind(InfoKind::Vxlan)) {
        return None;
    }
    let data = infos.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data),
        _ => None,
    });
    let mut vxlan = Vxlan::default();
    for info in data.into_iter().flatten() {
        match info {
            InfoVxlan::Id(vni) => vxlan.vni = *vni,
            InfoVxlan::Link(index) => vxlan.parent_index = *index,
            InfoVxlan::Local(address) => vxlan.local = Some(*address),
            InfoVxlan::Port(port) => vxlan.port = Some(*port),
            InfoVxlan::Gbp => vxlan.gbp = true,
            InfoVxlan::Learning(on) => vxlan.learning = *on,
            InfoVxlan::Group(_) | InfoVxlan::Group6(_) => vxlan.has_default_remote = true,
            InfoVxlan::L2Miss(on) => vxlan.l2miss = *on,
            _ => {}
        }
    }
    Some(vxlan)
}
