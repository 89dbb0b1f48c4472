//! Permanent neighbours of a link and permanent entries of its forwarding database. What the
//! kernel learnt by itself is neither listed nor touched.

use std::net::Ipv4Addr;

use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::RouteType;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError, Operation};
use crate::host::state::{LinkEntry, LinkId, MacAddress};

impl Netlink {
    /// The permanent IPv4 neighbours of a link.
    pub async fn neighbours(&self, link: &LinkId) -> Result<Vec<LinkEntry>, NetlinkError> {
        self.entries(link, AddressFamily::Inet, "list neighbours of").await
    }

    /// The permanent entries of a VXLAN device's forwarding database.
    pub async fn forwarding(&self, link: &LinkId) -> Result<Vec<LinkEntry>, NetlinkError> {
        self.entries(link, AddressFamily::Bridge, "list the forwarding database of").await
    }

    /// Sets a permanent neighbour, in place of another of the address.
    pub async fn set_neighbour(&self, link: &LinkId, entry: LinkEntry) -> Result<(), NetlinkError> {
        let message = message(link, entry, AddressFamily::Inet);
        self.set_entry("set neighbour", link, entry, message).await
    }

    /// Sets where a VXLAN device sends what is for a hardware address, in place of another place.
    pub async fn set_forwarding(
        &self,
        link: &LinkId,
        entry: LinkEntry,
    ) -> Result<(), NetlinkError> {
        let message = message(link, entry, AddressFamily::Bridge);
        self.set_entry("set forwarding entry", link, entry, message).await
    }

    /// Removes a neighbour.
    pub async fn remove_neighbour(
        &self,
        link: &LinkId,
        entry: LinkEntry,
    ) -> Result<(), NetlinkError> {
        let request = RouteNetlinkMessage::DelNeighbour(message(link, entry, AddressFamily::Inet));
        self.edit(operation("remove neighbour", link, entry), request, 0).await
    }

    /// Removes an entry of a VXLAN device's forwarding database.
    pub async fn remove_forwarding(
        &self,
        link: &LinkId,
        entry: LinkEntry,
    ) -> Result<(), NetlinkError> {
        let message = message(link, entry, AddressFamily::Bridge);
        let request = RouteNetlinkMessage::DelNeighbour(message);
        self.edit(operation("remove forwarding entry", link, entry), request, 0).await
    }

    async fn set_entry(
        &self,
        verb: &'static str,
        link: &LinkId,
        entry: LinkEntry,
        message: NeighbourMessage,
    ) -> Result<(), NetlinkError> {
        let request = RouteNetlinkMessage::NewNeighbour(message);
        self.edit(operation(verb, link, entry), request, NLM_F_CREATE | NLM_F_REPLACE).await
    }

    async fn entries(
        &self,
        link: &LinkId,
        family: AddressFamily,
        verb: &'static str,
    ) -> Result<Vec<LinkEntry>, NetlinkError> {
        let mut query = NeighbourMessage::default();
        query.header.family = family;
        if family == AddressFamily::Bridge {
            query.header.ifindex = link.index;
        } else {
            query.attributes.push(NeighbourAttribute::IfIndex(link.index));
        }
        let request = RouteNetlinkMessage::GetNeighbour(query);
        let answer = self.list(Operation::new(verb, link), request).await?;
        Ok(answer.iter().filter_map(|message| entry(message, link.index)).collect())
    }
}

fn operation(verb: &'static str, link: &LinkId, entry: LinkEntry) -> Operation {
    let LinkEntry { address, mac } = entry;
    Operation::new(verb, format_args!("{address} {mac} of {}", link.name))
}

fn message(link: &LinkId, entry: LinkEntry, family: AddressFamily) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family;
    message.header.ifindex = link.index;
    message.header.state = NeighbourState::Permanent;
    if family == AddressFamily::Bridge {
        message.header.flags = NeighbourFlags::Own;
    } else {
        message.header.kind = RouteType::Unicast;
    }
    message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet(entry.address)));
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(entry.mac.0.to_vec()));
    message
}

fn entry(message: &RouteNetlinkMessage, index: u32) -> Option<LinkEntry> {
    let RouteNetlinkMessage::NewNeighbour(message) = message else { return None };
    // A set of bits: iproute2 also sets that no requests are sent.
    let permanent = u16::from(NeighbourState::Permanent);
    let is_permanent = u16::from(message.header.state) & permanent != 0;
    if message.header.ifindex != index || !is_permanent {
        return None;
    }
    let (mut address, mut mac) = (None, None);
    for attribute in &message.attributes {
        if let NeighbourAttribute::Destination(NeighbourAddress::Inet(found)) = attribute {
            address = Some(*found);
        } else if let NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) = attribute {
            address = <[u8; 4]>::try_from(bytes.as_slice()).ok().map(Ipv4Addr::from);
        } else if let NeighbourAttribute::LinkLayerAddress(bytes) = attribute {
            mac = MacAddress::from_bytes(bytes);
        }
    }
    Some(LinkEntry { address: address?, mac: mac? })
}
