//! Messages of rtnetlink to the plain values of `host::state`, and back.
//! A message that lacks what its value needs becomes `None`; nothing here may panic or do I/O.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use std::net::{IpAddr, Ipv4Addr};

use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressScope,
};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteNextHop, RouteScope,
    RouteType, RouteVia,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::host::state::{
    Address, Link, LinkId, NextHop, PathToHost, Route, RouteKind, RouteProtocol, RouteSpec, Scope,
};
use crate::route::Prefix;

/// The family of everything that is asked for.
pub(super) const IPV4: AddressFamily = AddressFamily::Inet;

/// Length of a prefix that is one host.
const HOST_LENGTH_BITS: u8 = 32;

pub(super) fn link(message: &RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = message else { return None };
    let (mut name, mut mtu_bytes, mut transmit_queue_length) = (None, 0, 0);
    for attribute in &message.attributes {
        if let LinkAttribute::IfName(text) = attribute {
            name = Some(text.clone());
        } else if let LinkAttribute::Mtu(bytes) = attribute {
            mtu_bytes = *bytes;
        } else if let LinkAttribute::TxQueueLen(length) = attribute {
            transmit_queue_length = *length;
        }
    }
    Some(Link {
        id: LinkId { index: message.header.index, name: name? },
        mtu_bytes,
        transmit_queue_length,
        is_up: message.header.flags.contains(LinkFlags::Up),
        is_running: message.header.flags.contains(LinkFlags::Running),
        is_loopback: message.header.flags.contains(LinkFlags::Loopback),
    })
}

pub(super) fn address(message: &RouteNetlinkMessage) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = message else { return None };
    let (mut local, mut remote_or_local, mut flags) = (None, None, None);
    for attribute in &message.attributes {
        if let AddressAttribute::Local(IpAddr::V4(address)) = attribute {
            local = Some(*address);
        } else if let AddressAttribute::Address(IpAddr::V4(address)) = attribute {
            remote_or_local = Some(*address);
        } else if let AddressAttribute::Flags(all) = attribute {
            flags = Some(*all);
        }
    }
    let header = &message.header;
    let flags = flags.unwrap_or_else(|| widened(header.flags));
    Some(Address {
        interface_index: header.index,
        address: local.or(remote_or_local)?,
        prefix_length_bits: header.prefix_len,
        scope: scope_from_number(address_scope_number(header.scope)),
        is_permanent: flags.contains(AddressFlags::Permanent),
        is_deprecated: flags.contains(AddressFlags::Deprecated),
        is_secondary: flags.contains(AddressFlags::Secondary),
    })
}

/// The header has the lowest byte of the flags, for kernels before 3.14 that send no attribute.
fn widened(flags: AddressHeaderFlags) -> AddressFlags {
    AddressFlags::from_bits_retain(u32::from(flags.bits()))
}

fn address_scope_number(scope: AddressScope) -> u8 {
    scope.into()
}

pub(super) fn route(message: &RouteNetlinkMessage) -> Option<Route> {
    let RouteNetlinkMessage::NewRoute(message) = message else { return None };
    let header = &message.header;
    if header.table != RouteHeader::RT_TABLE_MAIN {
        return None;
    }
    let (mut destination, mut metric, mut preferred_source) = (Ipv4Addr::UNSPECIFIED, 0, None);
    for attribute in &message.attributes {
        if let RouteAttribute::Destination(RouteAddress::Inet(address)) = attribute {
            destination = *address;
        } else if let RouteAttribute::Priority(priority) = attribute {
            metric = *priority;
        } else if let RouteAttribute::PrefSource(RouteAddress::Inet(address)) = attribute {
            preferred_source = Some(*address);
        }
    }
    Some(Route {
        destination: Prefix::new(destination, header.destination_prefix_length)?,
        metric,
        kind: match u8::from(header.kind) {
            number if number == u8::from(RouteType::Unicast) => RouteKind::Unicast,
            number => RouteKind::Other(number),
        },
        scope: scope_from_number(header.scope.into()),
        protocol: RouteProtocol(header.protocol.into()),
        type_of_service: header.tos,
        preferred_source,
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
    Some(PathToHost { interface_index: outgoing_interface(message)?, preferred_source, gateway })
}

/// The query behind `ip route get`.
pub(super) fn path_query(destination: Ipv4Addr) -> RouteMessage {
    let mut query = RouteMessage::default();
    query.header.address_family = IPV4;
    query.header.destination_prefix_length = HOST_LENGTH_BITS;
    query.attributes.push(RouteAttribute::Destination(RouteAddress::Inet(destination)));
    query
}

pub(super) fn route_message(route: &RouteSpec) -> RouteMessage {
    let RouteSpec { destination, interface, gateway, metric, scope, protocol, is_onlink } = route;
    let mut builder = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(destination.network(), destination.length_bits())
        .output_interface(interface.index)
        .scope(RouteScope::from(scope_number(*scope)))
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
    message
}

/// `RT_SCOPE_*` of linux/rtnetlink.h.
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

fn scope_from_number(number: u8) -> Scope {
    match number {
        0 => Scope::Global,
        200 => Scope::Site,
        253 => Scope::Link,
        254 => Scope::Host,
        other => Scope::Other(other),
    }
}

fn scope_number(scope: Scope) -> u8 {
    match scope {
        Scope::Global => 0,
        Scope::Site => 200,
        Scope::Link => 253,
        Scope::Host => 254,
        Scope::Other(number) => number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_and_their_numbers_round_trip() {
        for number in 0..=u8::MAX {
            assert_eq!(scope_number(scope_from_number(number)), number);
        }
    }

    #[test]
    fn a_route_with_an_impossible_length_is_skipped() {
        let mut message = RouteMessage::default();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.destination_prefix_length = 33;
        assert_eq!(route(&RouteNetlinkMessage::NewRoute(message)), None);
    }

    #[test]
    fn only_the_main_table_is_read() {
        let mut message = RouteMessage::default();
        message.header.table = 255;
        assert_eq!(route(&RouteNetlinkMessage::NewRoute(message.clone())), None);
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        assert!(route(&RouteNetlinkMessage::NewRoute(message)).is_some());
    }

    #[test]
    fn every_path_of_a_multipath_route_is_read() {
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
