//! Messages of rtnetlink to the plain values of `host::state`, and back.
//! A message that lacks what its value needs becomes `None`; nothing here may panic or do I/O.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use std::net::{IpAddr, Ipv4Addr};

use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::{
    InfoData, InfoIpTunnel, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
    LinkXdp, XdpAttached,
};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop,
    RouteType, RouteVia,
};
use rtnetlink::packet_route::rule::RuleAttribute;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::host::state::{
    Address, Ipip, KernelFamily, Link, LinkId, MacAddress, NextHop, PathToHost, Route, RouteKind,
    RouteProtocol, RouteSpec, Vxlan,
};
use crate::route::{IpAddress, Prefix};

/// What the first attribute of this kind is worth.
macro_rules! find {
    ($attributes:expr, $kind:pat => $value:expr) => {
        $attributes.iter().find_map(|attribute| match attribute {
            $kind => Some($value),
            _ => None,
        })
    };
}

pub(super) use find;

pub(super) fn link(message: &RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(LinkMessage { header, attributes, .. }) = message else {
        return None;
    };
    let infos = find!(attributes, LinkAttribute::LinkInfo(infos) => infos.as_slice());
    let infos = infos.unwrap_or_default();
    let is = |kind| infos.contains(&LinkInfo::Kind(kind));
    let xdp = find!(attributes, LinkAttribute::Xdp(about) => about.as_slice()).unwrap_or_default();
    let linked = find!(attributes, LinkAttribute::Link(index) => *index);
    let name = find!(attributes, LinkAttribute::IfName(name) => name.clone())?;
    let mac = find!(attributes, LinkAttribute::Address(bytes) => MacAddress::from_bytes(bytes));
    Some(Link {
        id: LinkId { index: header.index, name },
        mtu_bytes: find!(attributes, LinkAttribute::Mtu(bytes) => *bytes).unwrap_or(0),
        is_up: header.flags.contains(LinkFlags::Up),
        has_carrier: header.flags.contains(LinkFlags::LowerUp),
        carrier_losses: find!(attributes, LinkAttribute::CarrierDownCount(count) => *count),
        is_loopback: header.flags.contains(LinkFlags::Loopback),
        is_bridge: is(InfoKind::Bridge),
        has_xdp: find!(xdp, LinkXdp::Attached(how) => *how != XdpAttached::None).unwrap_or(false),
        mac: mac.flatten(),
        vxlan: is(InfoKind::Vxlan).then(|| vxlan(infos)),
        ipip: is(InfoKind::IpIp).then(|| ipip(infos)),
        is_wireguard: is(InfoKind::Wireguard),
        veth_peer: linked.filter(|_| is(InfoKind::Veth)),
        controller: find!(attributes, LinkAttribute::Controller(index) => *index),
        alias: find!(attributes, LinkAttribute::IfAlias(alias) => alias.clone()),
    })
}

/// What a VXLAN device was made with.
fn vxlan(infos: &[LinkInfo]) -> Vxlan {
    let mut vxlan = Vxlan::default();
    for info in find!(infos, LinkInfo::Data(InfoData::Vxlan(data)) => data).into_iter().flatten() {
        match info {
            InfoVxlan::Id(vni) => vxlan.vni = *vni,
            InfoVxlan::Link(index) => vxlan.parent_index = *index,
            InfoVxlan::Local(address) => vxlan.local = Some((*address).into()),
            InfoVxlan::Local6(address) => vxlan.local = Some((*address).into()),
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

/// What an ipip device has at its ends.
fn ipip(infos: &[LinkInfo]) -> Ipip {
    let mut ipip = Ipip { local: Ipv4Addr::UNSPECIFIED, remote: Ipv4Addr::UNSPECIFIED };
    let data = find!(infos, LinkInfo::Data(InfoData::IpTunnel(data)) => data);
    for info in data.into_iter().flatten() {
        match info {
            InfoIpTunnel::Local(IpAddr::V4(address)) => ipip.local = *address,
            InfoIpTunnel::Remote(IpAddr::V4(address)) => ipip.remote = *address,
            _ => {}
        }
    }
    ipip
}

/// An address of either family, by its length.
pub(super) fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    Some(match bytes.len() {
        4 => IpAddr::from(*bytes.first_chunk::<4>()?),
        _ => IpAddr::from(*bytes.first_chunk::<16>()?),
    })
}

/// The kernel's name of a family.
pub(super) fn family<A: IpAddress>() -> AddressFamily {
    if A::BITS == Ipv4Addr::BITS as u8 { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

pub(super) fn address<A: IpAddress>(message: &RouteNetlinkMessage) -> Option<Address<A>> {
    let RouteNetlinkMessage::NewAddress(message) = message else { return None };
    let (header, all) = (&message.header, &message.attributes);
    let local = find!(all, AddressAttribute::Local(address) => *address);
    let remote = || find!(all, AddressAttribute::Address(address) => *address);
    // The header has the lowest byte of the flags; kernels before 3.14 send no attribute.
    let lowest = || AddressFlags::from_bits_retain(u32::from(header.flags.bits()));
    let flags = find!(all, AddressAttribute::Flags(flags) => *flags).unwrap_or_else(lowest);
    Some(Address {
        interface_index: header.index,
        address: A::of(local.or_else(remote)?)?,
        prefix_length_bits: header.prefix_len,
        is_permanent: flags.contains(AddressFlags::Permanent),
        is_deprecated: flags.contains(AddressFlags::Deprecated),
        is_secondary: flags.contains(AddressFlags::Secondary),
        is_in_doubt: flags.intersects(AddressFlags::Tentative | AddressFlags::Dadfailed),
    })
}

pub(super) fn route<A: IpAddress>(message: &RouteNetlinkMessage) -> Option<Route<A>> {
    let (table, route) = route_of_a_table(message)?;
    (table == u32::from(RouteHeader::RT_TABLE_MAIN)).then_some(route)
}

/// A route of any table, and that.
pub(super) fn route_of_a_table<A: IpAddress>(
    message: &RouteNetlinkMessage,
) -> Option<(u32, Route<A>)> {
    let RouteNetlinkMessage::NewRoute(message) = message else { return None };
    let (header, all) = (&message.header, &message.attributes);
    let table = find!(all, RouteAttribute::Table(table) => *table);
    let to = find!(all, RouteAttribute::Destination(address) => ip(address)?);
    let to = to.map_or_else(|| Some(A::of_bits(A::mask(0))), A::of)?;
    let metrics = find!(all, RouteAttribute::Metrics(metrics) => metrics.as_slice());
    let route = Route {
        destination: Prefix::new(to, header.destination_prefix_length)?,
        metric: find!(all, RouteAttribute::Priority(priority) => *priority).unwrap_or(0),
        kind: RouteKind(header.kind.into()),
        protocol: RouteProtocol(header.protocol.into()),
        type_of_service: header.tos,
        mtu_bytes: find!(metrics.unwrap_or_default(), RouteMetric::Mtu(bytes) => *bytes),
        next_hops: next_hops(all),
    };
    Some((table.unwrap_or_else(|| header.table.into()), route))
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

fn next_hops(all: &[RouteAttribute]) -> Vec<NextHop> {
    let hop = |interface_index, attributes: &[RouteAttribute]| NextHop {
        interface_index,
        gateway: gateway(attributes),
    };
    let several = find!(all, RouteAttribute::MultiPath(hops) => hops.as_slice());
    let several = several.unwrap_or_default().iter();
    let several = several.map(|next: &RouteNextHop| hop(next.interface_index, &next.attributes));
    outgoing_interface(all).map(|index| hop(index, all)).into_iter().chain(several).collect()
}

fn outgoing_interface(all: &[RouteAttribute]) -> Option<u32> {
    find!(all, RouteAttribute::Oif(index) => *index)
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
    let all = &message.attributes;
    let is_encapsulated =
        find!(all, RouteAttribute::EncapType(_) | RouteAttribute::Encap(_) => ()).is_some();
    let source = all.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::PrefSource(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    });
    Some(PathToHost {
        interface_index: outgoing_interface(all)?,
        preferred_source: source,
        gateway: gateway(all),
        is_plain: message.header.kind == RouteType::Unicast && !is_encapsulated,
    })
}

/// The mark of a routing rule.
pub(super) fn mark(message: &RouteNetlinkMessage) -> Option<u32> {
    let RouteNetlinkMessage::NewRule(message) = message else { return None };
    find!(message.attributes, RuleAttribute::FwMark(mark) => *mark)
}

pub(super) fn route_message<A: KernelFamily>(route: &RouteSpec<A>) -> RouteMessage {
    let RouteSpec { destination, interface, gateway, metric, protocol, is_onlink, mtu_bytes } =
        route;
    let mut message = to_prefix(*destination, *protocol);
    message.attributes.push(RouteAttribute::Oif(interface.index));
    message.header.flags.set(RouteFlags::Onlink, *is_onlink);
    let gateway = gateway.map(|it| RouteAttribute::Gateway(it.into().into()));
    let metric = (*metric != A::USUAL_METRIC).then_some(RouteAttribute::Priority(*metric));
    let mtu = mtu_bytes.map(|bytes| RouteAttribute::Metrics(vec![RouteMetric::Mtu(bytes)]));
    message.attributes.extend([gateway, metric, mtu].into_iter().flatten());
    message
}

/// flannel's blackhole routes are `RTPROT_BOOT`, too.
pub(super) fn blackhole_message<A: KernelFamily>(
    destination: Prefix<A>,
    metric: u32,
) -> RouteMessage {
    let mut message = to_prefix(destination, RouteProtocol::BOOT);
    message.header.kind = RouteType::BlackHole;
    message.attributes.push(RouteAttribute::Priority(metric));
    message
}

fn to_prefix<A: IpAddress>(prefix: Prefix<A>, protocol: RouteProtocol) -> RouteMessage {
    route_to(prefix.network(), prefix.length_bits(), protocol)
}

/// The question behind `ip route get`.
pub(super) fn to_host(destination: IpAddr) -> RouteMessage {
    match destination {
        IpAddr::V4(host) => route_to(host, 32, RouteProtocol::BOOT),
        IpAddr::V6(host) => route_to(host, 128, RouteProtocol::BOOT),
    }
}

/// Of the main table, for any scope.
fn route_to<A: IpAddress>(network: A, length_bits: u8, protocol: RouteProtocol) -> RouteMessage {
    let mut message = RouteMessageBuilder::<IpAddr>::new().protocol(protocol.0.into()).build();
    message.header.address_family = family::<A>();
    message.header.destination_prefix_length = length_bits;
    let network: IpAddr = network.into();
    message.attributes.push(RouteAttribute::Destination(network.into()));
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_with_impossible_length_is_skipped() {
        let mut message = RouteMessage::default();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.destination_prefix_length = 33;
        assert_eq!(route::<Ipv4Addr>(&RouteNetlinkMessage::NewRoute(message)), None);
    }

    #[test]
    fn other_routing_tables_are_ignored() {
        let mut message = RouteMessage::default();
        message.header.table = 255;
        assert_eq!(route::<Ipv4Addr>(&RouteNetlinkMessage::NewRoute(message.clone())), None);
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        assert!(route::<Ipv4Addr>(&RouteNetlinkMessage::NewRoute(message)).is_some());
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

        let route = route::<Ipv4Addr>(&RouteNetlinkMessage::NewRoute(message)).unwrap();

        let hops = [
            NextHop { interface_index: 3, gateway: None },
            NextHop { interface_index: 4, gateway: Some(IpAddr::V4(router)) },
        ];
        assert_eq!(route.next_hops, hops);
    }
}
