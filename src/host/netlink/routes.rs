//! Routes on hosts that may have a whole internet routing table: a listing keeps only what was
//! asked for while it arrives, and events of other routes are recognised by a few bytes.

use std::io;

use rtnetlink::packet_core::NlasIterator;
use rtnetlink::packet_route::route::{RouteHeader, RouteMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::{AsyncSocket, TokioSocket};
use rustix::io::Errno;

use super::exchange::{HEADER_BYTES, kind, list, socket};
use super::{Result, decode};
use crate::host::state::{KernelFamily, Route};
use crate::route::{IpAddress, Prefix};

/// Of linux/rtnetlink.h: message types, an attribute, and where the attributes are.
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTA_DST: u16 = 1;
const ATTRIBUTES_AT: usize = HEADER_BYTES + 12;

/// The routes of one family in the main table to the destinations that are `wanted`, in the
/// kernel's order: within one destination the one that wins comes first. Others take no memory.
pub async fn routes_to<A: KernelFamily>(
    wanted: impl Fn(Prefix<A>) -> bool,
) -> Result<Vec<Route<A>>> {
    let mut query = RouteMessage::default();
    query.header.address_family = decode::family::<A>();
    query.header.table = RouteHeader::RT_TABLE_MAIN;
    let request = RouteNetlinkMessage::GetRoute(query);
    let is_wanted = |message: &[u8]| {
        about(message).is_some_and(|(table, to)| table == RouteHeader::RT_TABLE_MAIN && wanted(to))
    };
    match list("list routes", of_one_table, request, is_wanted).await {
        Ok(messages) => Ok(messages.iter().filter_map(decode::route).collect()),
        // Before its first route the table is not there.
        Err(error) if error.errno() == Some(Errno::NOENT) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The routes of one family in all tables to the destinations that are `wanted`, each with its
/// table.
pub async fn of_all_tables<A: KernelFamily>(
    wanted: impl Fn(Prefix<A>) -> bool,
) -> Result<Vec<(u32, Route<A>)>> {
    let mut query = RouteMessage::default();
    query.header.address_family = decode::family::<A>();
    let request = RouteNetlinkMessage::GetRoute(query);
    let is_wanted = |message: &[u8]| about(message).is_some_and(|(_, to)| wanted(to));
    let messages = list("list routes of all tables", socket, request, is_wanted).await?;
    Ok(messages.iter().filter_map(decode::route_of_a_table).collect())
}

/// A socket by which only the table is listed that was asked for.
fn of_one_table() -> io::Result<TokioSocket> {
    let mut socket = socket()?;
    // Without it, on kernels before 4.20, all tables are listed: slower, with the same outcome.
    socket.socket_mut().set_netlink_get_strict_chk(true).ok();
    Ok(socket)
}

/// The table and the destination of the route that a message is about; `None` for anything else,
/// for another family, and for what can't be read. Parses as little as possible: behind that the
/// message may be truncated.
pub(super) fn about<A: IpAddress>(message: &[u8]) -> Option<(u8, Prefix<A>)> {
    let is_route = matches!(kind(message), Some(RTM_NEWROUTE | RTM_DELROUTE));
    let header = message.get(HEADER_BYTES..)?.first_chunk().filter(|_| is_route)?;
    let [family, length_bits, _source_length, _service, table] = *header;
    (AddressFamily::from(family) == decode::family::<A>()).then_some(())?;
    let network = if length_bits == 0 { A::of_bits(A::mask(0)) } else { destination(message)? };
    Some((table, Prefix::new(network, length_bits)?))
}

fn destination<A: IpAddress>(message: &[u8]) -> Option<A> {
    let mut attributes =
        NlasIterator::new(message.get(ATTRIBUTES_AT..)?).map_while(|attribute| attribute.ok());
    let destination = attributes.find(|attribute| attribute.kind() == RTA_DST)?;
    A::of(decode::address_of(destination.value())?)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::host::netlink::exchange::{serialized, split};
    use crate::host::state::{LinkId, RouteSpec};

    fn bytes<A: KernelFamily>(destination: Prefix<A>, table: u8, is_new: bool) -> Vec<u8> {
        let interface = LinkId { index: 2, name: "eth0".to_owned() };
        let route = RouteSpec {
            gateway: Some(destination.first_host()),
            metric: 7,
            ..RouteSpec::into_device(destination, interface)
        };
        let mut route = decode::route_message(&route);
        route.header.table = table;
        let make =
            if is_new { RouteNetlinkMessage::NewRoute } else { RouteNetlinkMessage::DelRoute };
        serialized(make(route), 0).to_vec()
    }

    fn check<A: KernelFamily, Other: KernelFamily>(destination: Prefix<A>) {
        for is_new in [true, false] {
            for table in [RouteHeader::RT_TABLE_MAIN, 100] {
                let bytes = bytes(destination, table, is_new);
                assert_eq!(about(&bytes), Some((table, destination)));
                assert_eq!(about::<Other>(&bytes), None, "{destination} is of another family");
            }
        }
    }

    #[test]
    fn destination_is_parsed_from_bytes() {
        for text in ["10.5.0.0/16", "10.5.7.0/24", "192.0.2.1/32", "0.0.0.0/0"] {
            check::<Ipv4Addr, Ipv6Addr>(text.parse().unwrap());
        }
        for text in ["fd00:5::/48", "fd00:5:0:7::/64", "2001:db8::1/128", "::/0"] {
            check::<Ipv6Addr, Ipv4Addr>(text.parse().unwrap());
        }
    }

    #[test]
    fn truncated_message_is_no_other_route() {
        let destination: Prefix = "10.5.7.0/24".parse().unwrap();
        let whole = bytes(destination, RouteHeader::RT_TABLE_MAIN, true);
        let right = about::<Ipv4Addr>(&whole);
        for length in 0..whole.len() {
            let found = about(&whole[..length]);
            assert!(found == right || found.is_none(), "{length} bytes: {found:?}");
            assert!(split(&whole[..length]).is_none(), "{length} bytes are a message");
        }
        let two = [whole.clone(), whole.clone()].concat();
        assert_eq!(split(&two), Some((&whole[..], &whole[..])));
    }
}
