//! VXLAN devices over rtnetlink: read one, make one, remove one, and their hardware address.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use rtnetlink::LinkVxlan;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage,
};

use super::{Netlink, NetlinkError, decode};
use crate::host::state::{LinkId, MacAddress, Vxlan, VxlanLink};

impl Netlink {
    /// The link with this name, whatever it is; `None` if there is no such link.
    pub async fn vxlan_link(&self, name: &str) -> Result<Option<VxlanLink>, NetlinkError> {
        self.read_link(name, vxlan_link).await
    }

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

    /// Removes a link.
    pub async fn remove_link(&self, link: &LinkId) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        self.edit(format!("remove link {link}"), RouteNetlinkMessage::DelLink(message), 0).await
    }

    /// Gives a link another hardware address.
    pub async fn set_mac(&self, link: &LinkId, mac: MacAddress) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        message.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
        self.set_link(format!("set the hardware address {mac} on {link}"), message).await
    }
}

fn vxlan_link(message: &RouteNetlinkMessage) -> Option<VxlanLink> {
    let link = decode::link(message)?;
    let RouteNetlinkMessage::NewLink(message) = message else { return None };
    let (mut mac, mut is_vxlan, mut data) = (None, false, &[][..]);
    for attribute in &message.attributes {
        if let LinkAttribute::Address(bytes) = attribute {
            mac = MacAddress::from_bytes(bytes);
        } else if let LinkAttribute::LinkInfo(infos) = attribute {
            is_vxlan = infos.contains(&LinkInfo::Kind(InfoKind::Vxlan));
            data = infos.iter().find_map(info_data).unwrap_or_default();
        }
    }
    Some(VxlanLink { link, mac, vxlan: is_vxlan.then(|| vxlan(data)) })
}

fn info_data(info: &LinkInfo) -> Option<&[InfoVxlan]> {
    if let LinkInfo::Data(InfoData::Vxlan(data)) = info { Some(data) } else { None }
}

fn vxlan(data: &[InfoVxlan]) -> Vxlan {
    let mut vxlan = Vxlan::default();
    for info in data {
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
    vxlan
}
