//! Messages of rtnetlink to the plain values of `host::state`, and back.
//! A message that lacks what its value needs becomes `None`; nothing here may panic or do I/O.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_core::DefaultNla;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo,
};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop,
    RouteScope, RouteType, RouteVia,
};
use rtnetlink::packet_route::rule::RuleAttribute;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::host::state::{
    Address, Link, LinkId, MacAddress, NextHop, PathToHost, Route, RouteKind, RouteProtocol,
    RouteSpec, Vxlan,
};
use crate::route::Prefix;

/// The family of everything that is asked for.
pub(super) const IPV4: AddressFamily = AddressFamily::Inet;

/// Length of a prefix that is one host.
const HOST_LENGTH_BITS: u8 = 32;

/// Of linux/rtnetlink.h, and the protocol's number.
const RTA_IP_PROTO: u16 = 27;
const RTA_SPORT: u16 = 28;
const RTA_DPORT: u16 = 29;
const UDP: u8 = 17;

pub(super) fn link(message: &RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = message else { return None };
    let (mut name, mut mtu_bytes, mut mac, mut made) = (None, 0, None, None);
    let (mut alias, mut linked, mut is_veth, mut is_bridge) = (None, None, false, false);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name = Some(text.clone()),
            LinkAttribute::Mtu(bytes) => mtu_bytes = *bytes,
            LinkAttribute::Address(bytes) => mac = MacAddress::from_bytes(bytes),
            LinkAttribute::IfAlias(text) => alias = Some(text.clone()),
            LinkAttribute::Link(index) => linked = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                let is = |kind| infos.contains(&LinkInfo::Kind(kind));
                (made, is_veth, is_bridge) =
                    (vxlan(infos), is(InfoKind::Veth), is(InfoKind::Bridge));
            }
            _ => {}
        }
    }
    Some(Link {
        id: LinkId { index: message.header.index, name: name? },
        mtu_bytes,
        is_up: message.header.flags.contains(LinkFlags::Up),
        has_carrier: message.header.flags.contains(LinkFlags::LowerUp),
        is_loopback: message.header.flags.contains(LinkFlags::Loopback),
        is_bridge,
        mac,
        vxlan: made,
        veth_peer: linked.filter(|_| is_veth),
        alias,
    })
}

/// What a link was made with, if it is a VXLAN device.
fn vxlan(infos: &[LinkInfo]) -> Option<Vxlan> {
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

pub(super) fn address(message: &RouteNetlinkMessage) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = message else { return None };
    let (mut local, mut remote_or_local, mut flags) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(IpAddr::V4(address)) => local = Some(*address),
            AddressAttribute::Address(IpAddr::V4(address)) => remote_or_local = Some(*address),
            AddressAttribute::Flags(all) => flags = Some(*all),
            _ => {}
        }
    }
    let header = &message.header;
    // The header has the lowest byte of the flags; kernels before 3.14 send no attribute.
    let flags =
        flags.unwrap_or_else(|| AddressFlags::from_bits_retain(u32::from(header.flags.bits())));
    Some(Address {
        interface_index: header.index,
        address: local.or(remote_or_local)?,
        prefix_length_bits: header.prefix_len,
        is_permanent: flags.contains(AddressFlags::Permanent),
        is_deprecated: flags.contains(AddressFlags::Deprecated),
        is_secondary: flags.contains(AddressFlags::Secondary),
    })
}

pub(super) fn route(message: &RouteNetlinkMessage) -> Option<Route> {
    let RouteNetlinkMessage::NewRoute(message) = message else { return None };
    let header = &message.header;
    if header.table != RouteHeader::RT_TABLE_MAIN {
        return None;
    }
    let (mut destination, mut metric, mut mtu_bytes) = (Ipv4Addr::UNSPECIFIED, 0, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => destination = *address,
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Metrics(metrics) => {
                mtu_bytes = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(bytes) => Some(*bytes),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    Some(Route {
        destination: Prefix::new(destination, header.destination_prefix_length)?,
        metric,
        kind: match u8::from(header.kind) {
            number if number == u8::from(RouteType::Unicast) => RouteKind::Unicast,
            number => RouteKind::Other(number),
        },
        protocol: RouteProtocol(header.protocol.into()),
        type_of_service: header.tos,
        mtu_bytes,
        next_hops: next_hops(message),
    })
}

fn next_hops(message: &RouteMessage) -> Vec<NextHop> {
    let mut hops = Vec::new();
    if let Some(interface_index) = outgoing_interface(message) {
        hops.push(NextHop { interface_index, gateway: gateway(&message.attributes) });
    }
    for attribute in &message.attributes {
        if let RouteAttribute::MultiPath(paths) = attribute {
            hops.extend(paths.iter().map(|path: &RouteNextHop| NextHop {
                interface_index: path.interface_index,
                gateway: gateway(&path.attributes),
            }));
        }
    }
    hops
}

fn outgoing_interface(message: &RouteMessage) -> Option<u32> {
    message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    })
}

fn gateway(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address))
        | RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Gateway(RouteAddress::Inet6(address))
        | RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

pub(super) fn path(message: &RouteNetlinkMessage) -> Option<PathToHost> {
    let RouteNetlinkMessage::NewRoute(message) = message else { return None };
    let preferred_source = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(RouteAddress::Inet(address)) => Some(*address),
        _ => None,
    });
    let gateway = gateway(&message.attributes);
    let is_encapsulated = message.attributes.iter().any(|attribute| {
        matches!(attribute, RouteAttribute::EncapType(_) | RouteAttribute::Encap(_))
    });
    let is_plain = message.header.kind == RouteType::Unicast && !is_encapsulated;
    let interface_index = outgoing_interface(message)?;
    Some(PathToHost { interface_index, preferred_source, gateway, is_plain })
}

/// The query behind `ip route get`.
pub(super) fn path_query(destination: Ipv4Addr) -> RouteMessage {
    let mut query = RouteMessage::default();
    query.header.address_family = IPV4;
    query.header.destination_prefix_length = HOST_LENGTH_BITS;
    query.attributes.push(RouteAttribute::Destination(RouteAddress::Inet(destination)));
    query
}

/// As [`path_query`], for a UDP datagram: routing rules may go by all of it. Kernels before 4.17
/// ignore protocol and ports.
pub(super) fn datagram_query(from: SocketAddrV4, to: SocketAddrV4) -> RouteMessage {
    let mut query = path_query(*to.ip());
    query.header.source_prefix_length = HOST_LENGTH_BITS;
    query.attributes.push(RouteAttribute::Source(RouteAddress::Inet(*from.ip())));
    let ports = [(RTA_SPORT, from), (RTA_DPORT, to)];
    let ports = ports.map(|(kind, end)| DefaultNla::new(kind, end.port().to_be_bytes().to_vec()));
    let protocol = DefaultNla::new(RTA_IP_PROTO, vec![UDP]);
    query.attributes.extend([protocol].into_iter().chain(ports).map(RouteAttribute::Other));
    query
}

/// As [`path_query`], for a packet that came by an interface.
pub(super) fn forwarded_query(
    from: Ipv4Addr,
    to: Ipv4Addr,
    interface_index: u32,
    mark: u32,
) -> RouteMessage {
    let mut query = path_query(to);
    query.header.source_prefix_length = HOST_LENGTH_BITS;
    query.attributes.push(RouteAttribute::Source(RouteAddress::Inet(from)));
    query.attributes.extend([RouteAttribute::Iif(interface_index), RouteAttribute::Mark(mark)]);
    query
}

/// The mark of a routing rule.
pub(super) fn mark(message: &RouteNetlinkMessage) -> Option<u32> {
    let RouteNetlinkMessage::NewRule(message) = message else { return None };
    message.attributes.iter().find_map(|attribute| {
        if let RuleAttribute::FwMark(mark) = attribute { Some(*mark) } else { None }
    })
}

pub(super) fn route_message(route: &RouteSpec) -> RouteMessage {
    let RouteSpec { destination, interface, gateway, metric, protocol, is_onlink, mtu_bytes } =
        route;
    let mut builder = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(destination.network(), destination.length_bits())
        .output_interface(interface.index)
        .scope(RouteScope::Universe)
        .protocol(protocol.0.into())
        .kind(RouteType::Unicast);
    if let Some(gateway) = gateway {
        builder = builder.gateway(*gateway);
    }
    if *metric != 0 {
        builder = builder.priority(*metric);
    }
    let mut message = builder.build();
    message.header.flags.set(RouteFlags::Onlink, *is_onlink);
    if let Some(bytes) = mtu_bytes {
        message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(*bytes)]));
    }
    message
}

/// flannel's blackhole routes are `RTPROT_BOOT`, too.
pub(super) fn blackhole_message(destination: Prefix, metric: u32) -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(destination.network(), destination.length_bits())
        .scope(RouteScope::Universe)
        .protocol(RouteProtocol::BOOT.0.into())
        .kind(RouteType::BlackHole)
        .priority(metric)
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_with_impossible_length_is_skipped() {
        let mut message = RouteMessage::default();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.destination_prefix_length = 33;
        assert_eq!(route(&RouteNetlinkMessage::NewRoute(message)), None);
    }

    #[test]
    fn other_routing_tables_are_ignored() {
        let mut message = RouteMessage::default();
        message.header.table = 255;
        assert_eq!(route(&RouteNetlinkMessage::NewRoute(message.clone())), None);
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        assert!(route(&RouteNetlinkMessage::NewRoute(message)).is_some());
    }

    #[test]
    fn multipath_route_has_all_next_hops() {
        let mut first = RouteNextHop::default();
        first.interface_index = 3;
        let mut second = RouteNextHop::default();
        second.interface_index = 4;
        let router = Ipv4Addr::new(192, 0, 2, 1);
        second.attributes.push(RouteAttribute::Gateway(RouteAddress::Inet(router)));
        let mut message = RouteMessage::default();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.attributes.push(RouteAttribute::MultiPath(vec![first, second]));

        let route = route(&RouteNetlinkMessage::NewRoute(message)).unwrap();

        let hops = [
            NextHop { interface_index: 3, gateway: None },
            NextHop { interface_index: 4, gateway: Some(IpAddr::V4(router)) },
        ];
        assert_eq!(route.next_hops, hops);
    }
}
