//! Routes on hosts that may have a whole internet routing table: a listing keeps only what was
//! asked for while it arrives, and events of other routes are recognised by a few bytes.

use std::io;
use std::net::Ipv4Addr;

use rtnetlink::packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_DONE, NLMSG_ERROR, NetlinkMessage, NetlinkPayload,
    NlasIterator,
};
use rtnetlink::packet_route::route::{RouteHeader, RouteMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};

use super::{
    LISTING_ATTEMPTS_MAX, Netlink, NetlinkError, Result, decode, ended, in_time, serialized,
};
use crate::host::state::Route;
use crate::route::Prefix;

/// In the words of an error.
const OPERATION: &str = "list IPv4 routes";

/// The kernel fills at most so much in one go (`netlink_dump`, net/netlink/af_netlink.c).
const PART_BYTES: usize = 32 * 1024;

/// Of linux/netlink.h and linux/rtnetlink.h: message types, an attribute, and where things are.
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTA_DST: u16 = 1;
const TYPE_AT: usize = 4;
const FLAGS_AT: usize = 6;
const HEADER_BYTES: usize = 16;
const ATTRIBUTES_AT: usize = HEADER_BYTES + 12;

impl Netlink {
    /// The IPv4 routes of the main table to the destinations that are `wanted`, in the kernel's
    /// order: within one destination the one that wins comes first. Takes no memory for others.
    pub async fn routes_to(wanted: impl Fn(Prefix) -> bool) -> Result<Vec<Route>> {
        for _ in 0..LISTING_ATTEMPTS_MAX {
            if let Some(routes) = in_time(OPERATION, list(&wanted)).await? {
                return Ok(routes);
            }
        }
        Err(NetlinkError::Unsettled(OPERATION.to_owned()))
    }
}

/// One listing; `None` if the table changed meanwhile in a way that may have hidden something.
async fn list(wanted: &impl Fn(Prefix) -> bool) -> Result<Option<Vec<Route>>> {
    let socket =
        ask().await.map_err(|source| NetlinkError::Open { purpose: "a listing", source })?;
    let (mut routes, mut is_interrupted) = (Vec::new(), false);
    let take = |message: &[u8]| {
        is_interrupted |= number(message, FLAGS_AT).is_some_and(|it| it & NLM_F_DUMP_INTR != 0);
        if matches!(about(message), About::Route(destination) if wanted(destination))
            && let Ok(NetlinkMessage { payload, .. }) = NetlinkMessage::deserialize(message)
            && let NetlinkPayload::InnerMessage(message) = payload
        {
            routes.extend(decode::route(&message));
        }
    };
    match receive(&socket, take).await {
        Ok(()) => Ok((!is_interrupted).then_some(routes)),
        // Before its first route the table is not there.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(Vec::new())),
        Err(error) => Err(NetlinkError::refused(OPERATION)(error)),
    }
}

/// Takes what the kernel answers to a request, message by message, until it says how that ended.
pub(super) async fn receive(socket: &TokioSocket, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut part = Vec::with_capacity(PART_BYTES);
    loop {
        part.clear();
        socket.recv(&mut part).await?;
        let mut rest = part.as_slice();
        while let Some((message, next)) = split(rest) {
            rest = next;
            take(message);
            if matches!(number(message, TYPE_AT), Some(NLMSG_DONE | NLMSG_ERROR)) {
                let code = message.get(HEADER_BYTES..).and_then(|code| code.first_chunk());
                return ended(code.copied().map_or(0, i32::from_ne_bytes));
            }
        }
    }
}

/// Asks for the main table, over a connection of its own: the answers of a shared one pile up.
async fn ask() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket.socket_mut().bind_auto()?;
    socket.socket_mut().connect(&SocketAddr::new(0, 0))?;
    // Without it, on kernels before 4.20, all tables are listed: slower, with the same outcome.
    socket.socket_mut().set_netlink_get_strict_chk(true).ok();
    let mut query = RouteMessage::default();
    query.header.address_family = AddressFamily::Inet;
    query.header.table = RouteHeader::RT_TABLE_MAIN;
    socket.send(&serialized(RouteNetlinkMessage::GetRoute(query), NLM_F_DUMP)).await?;
    Ok(socket)
}

/// What a message is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum About {
    /// A route of the main table to this destination.
    Route(Prefix),
    /// A route of another table.
    OtherRoute,
    /// Something else, or nothing that can be read.
    Else,
}

/// Parses as little of a message as possible; it may be truncated behind the destination.
pub(super) fn about(message: &[u8]) -> About {
    if !matches!(number(message, TYPE_AT), Some(RTM_NEWROUTE | RTM_DELROUTE)) {
        return About::Else;
    }
    let header = message.get(HEADER_BYTES..).and_then(|header| header.first_chunk());
    let Some([_family, length_bits, _source_length, _service, table]) = header.copied() else {
        return About::Else;
    };
    if table != RouteHeader::RT_TABLE_MAIN {
        return About::OtherRoute;
    }
    let network = if length_bits == 0 { Some(Ipv4Addr::UNSPECIFIED) } else { destination(message) };
    let destination = network.and_then(|network| Prefix::new(network, length_bits));
    destination.map_or(About::Else, About::Route)
}

fn destination(message: &[u8]) -> Option<Ipv4Addr> {
    let mut attributes =
        NlasIterator::new(message.get(ATTRIBUTES_AT..)?).map_while(|attribute| attribute.ok());
    let destination = attributes.find(|attribute| attribute.kind() == RTA_DST)?;
    Some(Ipv4Addr::from(*destination.value().first_chunk::<4>()?))
}

/// The first message of `bytes`, and what follows.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
    let message = bytes.get(..length).filter(|message| message.len() >= HEADER_BYTES)?;
    Some((message, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::state::{LinkId, RouteSpec};

    fn bytes(destination: &str, table: u8, is_new: bool) -> Vec<u8> {
        let interface = LinkId { index: 2, name: "eth0".to_owned() };
        let route = RouteSpec {
            gateway: "192.0.2.1".parse().ok(),
            metric: 7,
            ..RouteSpec::into_device(destination.parse().unwrap(), interface)
        };
        let mut route = decode::route_message(&route);
        route.header.table = table;
        let make =
            if is_new { RouteNetlinkMessage::NewRoute } else { RouteNetlinkMessage::DelRoute };
        serialized(make(route), 0)
    }

    #[test]
    fn destination_is_parsed_from_bytes() {
        for text in ["10.5.0.0/16", "10.5.7.0/24", "192.0.2.1/32", "0.0.0.0/0"] {
            for is_new in [true, false] {
                let whole = bytes(text, RouteHeader::RT_TABLE_MAIN, is_new);
                assert_eq!(about(&whole), About::Route(text.parse().unwrap()), "{text}");
                assert_eq!(about(&bytes(text, 100, is_new)), About::OtherRoute, "{text}");
            }
        }
    }

    #[test]
    fn truncated_message_is_no_other_route() {
        let whole = bytes("10.5.7.0/24", RouteHeader::RT_TABLE_MAIN, true);
        let right = about(&whole);
        for length in 0..whole.len() {
            let found = about(&whole[..length]);
            assert!(found == right || found == About::Else, "{length} bytes: {found:?}");
            assert!(split(&whole[..length]).is_none(), "{length} bytes are a message");
        }
        let two = [whole.clone(), whole.clone()].concat();
        assert_eq!(split(&two), Some((&whole[..], &whole[..])));
    }
}
