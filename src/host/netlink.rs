//! The host's links, addresses and routes, read and edited over rtnetlink, in
//! the network namespace of the calling thread. The only owner of the netlink crates: one request
//! per function, no policy, no retry of an edit.

mod decode;
pub mod devices;
pub mod events;
mod exchange;
pub mod filters;
pub mod neighbours;
pub mod policies;
pub mod routes;
pub mod tunnel_policies;
pub mod wireguard;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use futures_util::{StreamExt, stream};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use rtnetlink::packet_route::RouteNetlinkMessage::{
    self, DelAddress, DelLink, DelRoute, GetAddress, GetLink, GetRoute, GetRule, NewAddress,
    NewRoute, SetLink,
};
use rtnetlink::packet_route::address::{AddressHeaderFlags, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use rtnetlink::packet_route::route::{RouteAttribute, RouteMessage, RouteScope};
use rtnetlink::packet_route::rule::RuleMessage;
use rtnetlink::{AddressMessageBuilder, LinkMessageBuilder, LinkUnspec};

use crate::host::state::{Address, KernelFamily, Link, LinkId, MacAddress, PathToHost, RouteSpec};
use crate::route::Prefix;

use self::exchange::{answer, socket};

pub use self::exchange::{NetlinkError, Result, unless_gone, unless_there};

/// Requests that are under way at once: enough that a thousand peers cost little more than the
/// kernel's own work, and few enough that their sockets are a small part of the 1,024 descriptors
/// that a process may have by default.
const REQUESTS_MAX: usize = 64;

/// The metric of a blackhole route: the last of all. With flannel's 0 it takes the traffic of the
/// pods' bridge, if it is there before the bridge has its address.
pub const BLACKHOLE_METRIC: u32 = u32::MAX;

/// The protocol's number.
const UDP: u8 = 17;

/// Makes a request for each of `items`, many at once, and gives the answers as they come.
pub async fn request_all<T, A>(
    items: impl IntoIterator<Item = T>,
    request: impl AsyncFn(T) -> A,
) -> Vec<A> {
    let requests = stream::iter(items).map(|item| request(item));
    requests.buffer_unordered(REQUESTS_MAX).collect().await
}

/// All links, in the kernel's order.
pub async fn links() -> Result<Vec<Link>> {
    let answer = list("list links", GetLink(link_query())).await?;
    Ok(answer.iter().filter_map(decode::link).collect())
}

/// The link with this name, `None` if there is no such link.
pub async fn link_named(name: &str) -> Result<Option<Link>> {
    let mut query = link_query();
    query.attributes.push(LinkAttribute::IfName(name.to_owned()));
    match ask_for(format!("read link {name}"), "the link", GetLink(query), decode::link).await {
        Err(error) if error.is_already_gone() => Ok(None),
        answer => answer.map(Some),
    }
}

/// The link with this name, which was there a moment ago.
pub async fn link_just_made(name: &str) -> Result<Link> {
    let missing = "the link, which was just made";
    let operation = format!("read link {name}");
    link_named(name).await?.ok_or(NetlinkError::Incomplete(operation, missing))
}

/// All addresses of one family, in the kernel's order.
pub async fn addresses<A: KernelFamily>() -> Result<Vec<Address<A>>> {
    let mut query = AddressMessage::default();
    query.header.family = decode::family::<A>();
    let answer = list("list addresses", GetAddress(query)).await?;
    Ok(answer.iter().filter_map(decode::address).collect())
}

/// How the kernel would reach `destination` now (`ip route get`).
pub async fn path_to(destination: impl Into<IpAddr>) -> Result<PathToHost> {
    let destination = destination.into();
    path(format!("find the route to {destination}"), decode::to_host(destination)).await
}

/// How the kernel would send a UDP datagram now that goes `from` an address of this host:
/// routing rules may go by all of it. Kernels before 4.17 ignore protocol and ports.
pub async fn path_of_datagram(
    from: impl Into<SocketAddr>,
    to: impl Into<SocketAddr>,
) -> Result<PathToHost> {
    let (from, to) = (from.into(), to.into());
    let mut query = decode::to_host(to.ip());
    query.header.source_prefix_length = query.header.destination_prefix_length;
    query.attributes.extend([
        RouteAttribute::Source(from.ip().into()),
        RouteAttribute::IpProto(UDP),
        RouteAttribute::Sport(from.port()),
        RouteAttribute::Dport(to.port()),
    ]);
    path(format!("find the route from {from} to {to}"), query).await
}

/// Where it would send a packet of others that comes by this interface, if a firewall gives it
/// this mark; 0 is none.
pub async fn path_of_forwarded<A: KernelFamily>(
    from: A,
    to: A,
    interface_index: u32,
    mark: u32,
) -> Result<PathToHost> {
    let mut query = decode::to_host(to.into());
    query.header.source_prefix_length = A::BITS;
    let source: IpAddr = from.into();
    let attributes = [
        RouteAttribute::Source(source.into()),
        RouteAttribute::Iif(interface_index),
        RouteAttribute::Mark(mark),
    ];
    query.attributes.extend(attributes);
    path(format!("find the route of a packet from {from} to {to}"), query).await
}

/// The marks of packets by which routing rules of a family go.
pub async fn marks<A: KernelFamily>() -> Result<Vec<u32>> {
    let mut query = RuleMessage::default();
    query.header.family = decode::family::<A>();
    let answer = list("list routing rules", GetRule(query)).await?;
    Ok(answer.iter().filter_map(decode::mark).collect())
}

async fn path(operation: String, query: RouteMessage) -> Result<PathToHost> {
    let missing = "an outgoing interface";
    ask_for(operation, missing, GetRoute(query), decode::path).await
}

/// Gives a link an alias (`ip link show` has it), in place of another.
pub async fn set_alias(link: &LinkId, alias: &str) -> Result {
    set_link(link, format!("set the alias {alias:?} of"), |it| it.alias(alias)).await
}

/// Switches a link on.
pub async fn set_up(link: &LinkId) -> Result {
    set_link(link, "set up".to_owned(), LinkEdit::up).await
}

/// Sets the largest IP packet of a link, in bytes.
pub async fn set_mtu(link: &LinkId, mtu_bytes: u32) -> Result {
    set_link(link, format!("set MTU {mtu_bytes} on"), |it| it.mtu(mtu_bytes)).await
}

/// Sets the length of a link's transmit queue, in packets.
pub async fn set_transmit_queue_length(link: &LinkId, length: u32) -> Result {
    let operation = format!("set transmit queue length {length} on");
    set_link(link, operation, |it| it.txqueuelen(length)).await
}

/// Gives a link another hardware address.
pub async fn set_mac(link: &LinkId, mac: MacAddress) -> Result {
    let operation = format!("set the hardware address {mac} on");
    set_link(link, operation, |it| it.address(mac.0.to_vec())).await
}

/// Removes a link.
pub async fn remove_link(link: &LinkId) -> Result {
    let message = LinkUnspec::new_with_index(link.index).build();
    edit(format!("remove link {link}"), DelLink(message), 0).await
}

/// Gives a link one more address, of which nobody is asked whether another host has it.
pub async fn add_address<A: KernelFamily>(link: &LinkId, address: A, length_bits: u8) -> Result {
    let operation = format!("add address {address}/{length_bits} to {link}");
    add(operation, NewAddress(address_message(link, address, length_bits))).await
}

/// Gives a link an address of one host, which it may have already, for good.
pub async fn settle_address<A: KernelFamily>(link: &LinkId, address: A) -> Result {
    let operation = format!("settle address {address} on {link}");
    let request = NewAddress(address_message(link, address, A::BITS));
    edit(operation, request, NLM_F_CREATE | NLM_F_REPLACE).await
}

/// Takes an address from a link.
pub async fn remove_address<A: KernelFamily>(link: &LinkId, address: A, length_bits: u8) -> Result {
    let operation = format!("remove address {address}/{length_bits} from {link}");
    edit(operation, DelAddress(address_message(link, address, length_bits)), 0).await
}

/// Adds a route; refused if the main table has one of the same destination and metric.
pub async fn add_route<A: KernelFamily>(route: &RouteSpec<A>) -> Result {
    add(format!("add route {route}"), NewRoute(decode::route_message(route))).await
}

/// Adds a route in place of the one of the same destination and metric, if there is one.
pub async fn replace_route<A: KernelFamily>(route: &RouteSpec<A>) -> Result {
    let request = NewRoute(decode::route_message(route));
    edit(format!("replace route {route}"), request, NLM_F_CREATE | NLM_F_REPLACE).await
}

/// Removes a route.
pub async fn remove_route<A: KernelFamily>(route: &RouteSpec<A>) -> Result {
    let mut message = decode::route_message(route);
    // Stands for any: the kernel would not find a route that somebody set with another one.
    message.header.scope = RouteScope::NoWhere;
    edit(format!("remove route {route}"), DelRoute(message), 0).await
}

/// Adds a route that drops what is for `destination`, behind any other route to it.
pub async fn add_blackhole<A: KernelFamily>(destination: Prefix<A>) -> Result {
    let message = decode::blackhole_message(destination, BLACKHOLE_METRIC);
    add(format!("add blackhole route {destination}"), NewRoute(message)).await
}

/// Removes a route that drops what is for `destination`.
pub async fn remove_blackhole<A: KernelFamily>(destination: Prefix<A>, metric: u32) -> Result {
    let message = decode::blackhole_message(destination, metric);
    edit(format!("remove blackhole route {destination}"), DelRoute(message), 0).await
}

/// `operation` says what is done to the link, which follows.
async fn set_link(
    link: &LinkId,
    operation: String,
    change: impl FnOnce(LinkEdit) -> LinkEdit,
) -> Result {
    let message = change(LinkUnspec::new_with_index(link.index)).build();
    edit(format!("{operation} {link}"), SetLink(message), 0).await
}

async fn add(operation: String, request: RouteNetlinkMessage) -> Result {
    edit(operation, request, NLM_F_CREATE | NLM_F_EXCL).await
}

async fn edit(operation: String, request: RouteNetlinkMessage, flags: u16) -> Result {
    answer(&operation, socket(), request, NLM_F_ACK | flags, |_| false).await.map(drop)
}

/// The first thing that `decode` finds in the answer, which is `missing` otherwise.
async fn ask_for<T>(
    operation: String,
    missing: &'static str,
    request: RouteNetlinkMessage,
    decode: impl FnMut(&RouteNetlinkMessage) -> Option<T>,
) -> Result<T> {
    let (messages, _) = answer(&operation, socket(), request, NLM_F_ACK, |_| true).await?;
    let found = messages.iter().find_map(decode);
    found.ok_or(NetlinkError::Incomplete(operation, missing))
}

async fn list(operation: &str, request: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>> {
    exchange::list(operation, socket, request, |_| true).await
}

type LinkEdit = LinkMessageBuilder<LinkUnspec>;

fn link_query() -> LinkMessage {
    let mut query = LinkMessage::default();
    // Counters are most of a link's listing, and are not used.
    query.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    query
}

fn address_message<A: KernelFamily>(link: &LinkId, address: A, length_bits: u8) -> AddressMessage {
    match address.into() {
        IpAddr::V4(address) => {
            let message = AddressMessageBuilder::<Ipv4Addr>::new().index(link.index);
            message.address(address, length_bits).build()
        }
        IpAddr::V6(address) => {
            let message = AddressMessageBuilder::<Ipv6Addr>::new().index(link.index);
            let mut message = message.address(address, length_bits).build();
            message.header.flags = AddressHeaderFlags::Nodad;
            message
        }
    }
}
