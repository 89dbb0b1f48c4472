//! VXLAN devices over rtnetlink: read one, make one, remove one, and their hardware address.

use rtnetlink::LinkVxlan;
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage,
};

use super::{Netlink, NetlinkError, Operation, decode, link_query};
use crate::host::state::{LinkId, MacAddress, Vxlan, VxlanLink};

impl Netlink {
    /// The link with this name, whatever it is; `None` if there is no such link.
    pub async fn vxlan_link(&self, name: &str) -> Result<Option<VxlanLink>, NetlinkError> {
        let operation = Operation::new("read", format_args!("link {name}"));
        let mut query = link_query();
        query.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let request = RouteNetlinkMessage::GetLink(query);
        match self.request(&operation, request, NLM_F_ACK).await {
            Ok(answer) => match answer.messages.iter().find_map(vxlan_link) {
                Some(link) => Ok(Some(link)),
                None => Err(NetlinkError::Incomplete { operation, missing: "the link" }),
            },
            Err(error) if error.is_already_gone() => Ok(None),
            Err(error) => Err(error),
        }
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
        let operation = Operation::new("make the vxlan device", name);
        let request = RouteNetlinkMessage::NewLink(builder.build());
        self.edit(operation, request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    /// Removes a link.
    pub async fn remove_link(&self, link: &LinkId) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        self.edit(Operation::new("remove link", link), RouteNetlinkMessage::DelLink(message), 0)
            .await
    }

    /// Gives a link another hardware address.
    pub async fn set_mac(&self, link: &LinkId, mac: MacAddress) -> Result<(), NetlinkError> {
        let operation = Operation::new("set the hardware address", format!("{mac} on {link}"));
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        message.attributes.push(LinkAttribute::Address(mac.0.to_vec()));
        self.edit(operation, RouteNetlinkMessage::SetLink(message), 0).await
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
    let mut vxlan = Vxlan {
        vni: 0,
        parent_index: 0,
        local: None,
        port: None,
        gbp: false,
        learning: false,
        has_default_remote: false,
        l2miss: false,
    };
    for info in data {
        if let InfoVxlan::Id(vni) = info {
            vxlan.vni = *vni;
        } else if let InfoVxlan::Link(index) = info {
            vxlan.parent_index = *index;
        } else if let InfoVxlan::Local(address) = info {
            vxlan.local = Some(*address);
        } else if let InfoVxlan::Port(port) = info {
            vxlan.port = Some(*port);
        } else if let InfoVxlan::Gbp = info {
            vxlan.gbp = true;
        } else if let InfoVxlan::Learning(on) = info {
            vxlan.learning = *on;
        } else if let InfoVxlan::Group(_) | InfoVxlan::Group6(_) = info {
            vxlan.has_default_remote = true;
        } else if let InfoVxlan::L2Miss(on) = info {
            vxlan.l2miss = *on;
        }
    }
    vxlan
}
