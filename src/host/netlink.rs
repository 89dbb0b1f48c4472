//! The host's links, IPv4 addresses and IPv4 routes, read and edited over rtnetlink.
//! The only owner of the netlink crates: one request per method, no policy, no retry of an edit.

mod decode;
pub mod devices;
pub mod events;
pub mod filters;
mod neighbours;
pub mod policies;
mod routes;

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::RouteNetlinkMessage::{
    self, DelAddress, DelLink, DelRoute, GetAddress, GetLink, GetRoute, GetRule, NewAddress,
    NewRoute, SetLink,
};
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use rtnetlink::packet_route::route::RouteScope;
use rtnetlink::packet_route::rule::RuleMessage;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{Socket, SocketAddr};
use rtnetlink::{AddressMessageBuilder, LinkMessageBuilder, LinkUnspec, RouteMessageBuilder};
use rustix::io::Errno;
use tokio::time::timeout;

use crate::host::state::{Address, Link, LinkId, MacAddress, PathToHost, RouteSpec};
use crate::route::Prefix;

/// The kernel answers a request inside the send call unless another process holds the routing
/// lock; the longest holders seen in practice (mass deletion of links) stay below a few seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A listing that the kernel marks as interrupted by a change is asked for again. Each attempt
/// takes well below a millisecond, so five in a row interrupted means constant change.
const LISTING_ATTEMPTS_MAX: u32 = 5;

/// Requests that are under way at once: enough that a thousand peers cost little more than the
/// kernel's own work, and few enough that their answers fit a socket's buffer of 212,992 bytes many
/// times over.
const REQUESTS_MAX: usize = 64;

/// The metric of a blackhole route: the last of all. With flannel's 0 it takes the traffic of the
/// pods' bridge, if it is there before the bridge has its address.
pub const BLACKHOLE_METRIC: u32 = u32::MAX;

/// Length of a prefix that is one host.
const HOST_LENGTH_BITS: u8 = 32;

/// The protocol's number.
const UDP: u8 = 17;

/// What comes of a request to the kernel.
pub type Result<T = ()> = std::result::Result<T, NetlinkError>;

/// A connection to the routing part of the kernel, for the network namespace in which the thread
/// was when it opened the connection. Clones share it; it ends when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Netlink {
    handle: rtnetlink::Handle,
}

/// Why the kernel's network state could not be read or edited.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// No socket could be opened.
    #[error("cannot open a netlink socket for {purpose}")]
    Open {
        /// What the socket was for.
        purpose: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The kernel said no.
    #[error("the kernel refused to {operation}")]
    Refused {
        /// What was asked for, object included.
        operation: String,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The connection ended before the answer.
    #[error("the netlink connection ended before an answer to: {0}")]
    Disconnected(String),
    /// No answer in time.
    #[error(
        "no answer from the kernel within {seconds} s to: {0}",
        seconds = REQUEST_TIMEOUT.as_secs()
    )]
    TimedOut(String),
    /// Every listing was interrupted by a change.
    #[error("the kernel's tables changed during each of {LISTING_ATTEMPTS_MAX} attempts to {0}")]
    Unsettled(String),
    /// The answer lacks what it must have.
    #[error("the kernel's answer to a request to {operation} lacks {missing}")]
    Incomplete {
        /// What was asked for.
        operation: String,
        /// What the answer lacks.
        missing: &'static str,
    },
}

/// Makes a request for each of `items`, many at once, and gives the answers as they come.
pub async fn request_all<T, A>(
    items: impl IntoIterator<Item = T>,
    request: impl AsyncFn(T) -> A,
) -> Vec<A> {
    let requests = stream::iter(items).map(|item| request(item));
    requests.buffer_unordered(REQUESTS_MAX).collect().await
}

/// Makes a request without hearing the answer: for what is dropped, perhaps after the runtime that
/// drives connections. The kernel has done it when this returns.
fn request_now(request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.send_to(&serialized(request, flags), &SocketAddr::new(0, 0), 0).map(drop)
}

impl NetlinkError {
    /// Whether the thing to add exists already.
    pub fn is_already_there(&self) -> bool {
        self.errno() == Some(Errno::EXIST)
    }

    /// Whether the interface, address or route to edit is gone.
    pub fn is_already_gone(&self) -> bool {
        let gone = [Errno::NODEV, Errno::NXIO, Errno::SRCH, Errno::ADDRNOTAVAIL, Errno::NOENT];
        self.errno().is_some_and(|errno| gone.contains(&errno))
    }

    /// Whether the request may succeed over another connection.
    pub fn is_connection_lost(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Disconnected(_) | Self::TimedOut(_) => true,
            Self::Refused { .. } | Self::Unsettled(_) | Self::Incomplete { .. } => false,
        }
    }

    /// The kernel said no to `operation`, for the reason that follows.
    fn refused(operation: &str) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.to_owned();
        |source| Self::Refused { operation, source }
    }

    fn errno(&self) -> Option<Errno> {
        let (Self::Refused { source, .. } | Self::Open { source, .. }) = self else { return None };
        Errno::from_io_error(source)
    }
}

impl Netlink {
    /// Opens a connection for the network namespace of the calling thread.
    /// Must be called inside a tokio runtime, which drives the connection from then on.
    pub fn open() -> Result<Self> {
        let (mut connection, handle, _unsolicited) = rtnetlink::new_connection()
            .map_err(|source| NetlinkError::Open { purpose: "requests", source })?;
        // Both endings are wanted: without them a connection that dies in the middle of a listing
        // looks like the end of the listing.
        connection.set_forward_ack(true);
        connection.set_forward_done(true);
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// All links, in the kernel's order.
    pub async fn links(&self) -> Result<Vec<Link>> {
        let answer = self.list("list links", GetLink(link_query())).await?;
        Ok(answer.iter().filter_map(decode::link).collect())
    }

    /// The link with this name, `None` if there is no such link.
    pub async fn link_named(&self, name: &str) -> Result<Option<Link>> {
        let mut query = link_query();
        query.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let operation = format!("read link {name}");
        match self.ask_for(operation, "the link", GetLink(query), decode::link).await {
            Err(error) if error.is_already_gone() => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// How often the link with this name has lost its carrier since it was made (Linux 4.16).
    pub async fn carrier_losses(&self, name: &str) -> Result<u32> {
        let mut query = link_query();
        query.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let operation = format!("read link {name}");
        self.ask_for(operation, "its losses", GetLink(query), decode::carrier_losses).await
    }

    /// The link with this name, which was there a moment ago.
    pub async fn link_just_made(&self, name: &str) -> Result<Link> {
        let missing = "the link, which was just made";
        let operation = format!("read link {name}");
        self.link_named(name).await?.ok_or(NetlinkError::Incomplete { operation, missing })
    }

    /// All IPv4 addresses, in the kernel's order.
    pub async fn addresses(&self) -> Result<Vec<Address>> {
        let mut query = AddressMessage::default();
        query.header.family = AddressFamily::Inet;
        let answer = self.list("list IPv4 addresses", GetAddress(query)).await?;
        Ok(answer.iter().filter_map(decode::address).collect())
    }

    /// How the kernel would reach `destination` now (`ip route get`).
    pub async fn path_to(&self, destination: Ipv4Addr) -> Result<PathToHost> {
        self.path(format!("find the route to {destination}"), to_host(destination)).await
    }

    /// How the kernel would send a UDP datagram now that goes `from` an address of this host:
    /// routing rules may go by all of it. Kernels before 4.17 ignore protocol and ports.
    pub async fn path_of_datagram(
        &self,
        from: SocketAddrV4,
        to: SocketAddrV4,
    ) -> Result<PathToHost> {
        let query = to_host(*to.ip()).source_prefix(*from.ip(), HOST_LENGTH_BITS);
        let query = query.ip_protocol(UDP).sport(from.port()).dport(to.port());
        self.path(format!("find the route from {from} to {to}"), query).await
    }

    /// Where it would send a packet of others that comes by this interface, if a firewall gives it
    /// this mark; 0 is none.
    pub async fn path_of_forwarded(
        &self,
        from: Ipv4Addr,
        to: Ipv4Addr,
        interface_index: u32,
        mark: u32,
    ) -> Result<PathToHost> {
        let query = to_host(to).source_prefix(from, HOST_LENGTH_BITS);
        let operation = format!("find the route of a packet from {from} to {to}");
        self.path(operation, query.input_interface(interface_index).mark(mark)).await
    }

    /// The marks of packets by which routing rules go.
    pub async fn marks(&self) -> Result<Vec<u32>> {
        let mut query = RuleMessage::default();
        query.header.family = AddressFamily::Inet;
        let answer = self.list("list routing rules", GetRule(query)).await?;
        Ok(answer.iter().filter_map(decode::mark).collect())
    }

    async fn path(&self, operation: String, query: RouteQuery) -> Result<PathToHost> {
        let missing = "an outgoing interface";
        self.ask_for(operation, missing, GetRoute(query.build()), decode::path).await
    }

    /// Gives a link an alias (`ip link show` has it), in place of another.
    pub async fn set_alias(&self, link: &LinkId, alias: &str) -> Result {
        self.set_link(link, format!("set the alias {alias:?} of"), |it| it.alias(alias)).await
    }

    /// Switches a link on.
    pub async fn set_up(&self, link: &LinkId) -> Result {
        self.set_link(link, "set up".to_owned(), LinkEdit::up).await
    }

    /// Sets the largest IP packet of a link, in bytes.
    pub async fn set_mtu(&self, link: &LinkId, mtu_bytes: u32) -> Result {
        self.set_link(link, format!("set MTU {mtu_bytes} on"), |it| it.mtu(mtu_bytes)).await
    }

    /// Sets the length of a link's transmit queue, in packets.
    pub async fn set_transmit_queue_length(&self, link: &LinkId, length: u32) -> Result {
        let operation = format!("set transmit queue length {length} on");
        self.set_link(link, operation, |it| it.txqueuelen(length)).await
    }

    /// Gives a link another hardware address.
    pub async fn set_mac(&self, link: &LinkId, mac: MacAddress) -> Result {
        let operation = format!("set the hardware address {mac} on");
        self.set_link(link, operation, |it| it.address(mac.0.to_vec())).await
    }

    /// Removes a link.
    pub async fn remove_link(&self, link: &LinkId) -> Result {
        let message = LinkUnspec::new_with_index(link.index).build();
        self.edit(format!("remove link {link}"), DelLink(message), 0).await
    }

    /// Gives a link one more IPv4 address.
    pub async fn add_address(&self, link: &LinkId, address: Ipv4Addr, length_bits: u8) -> Result {
        let operation = format!("add address {address}/{length_bits} to {link}");
        self.add(operation, NewAddress(address_message(link, address, length_bits))).await
    }

    /// Gives a link an address of one host, which it may have already, for good.
    pub async fn settle_address(&self, link: &LinkId, address: Ipv4Addr) -> Result {
        let operation = format!("settle address {address} on {link}");
        let request = NewAddress(address_message(link, address, HOST_LENGTH_BITS));
        self.edit(operation, request, NLM_F_CREATE | NLM_F_REPLACE).await
    }

    /// Takes an IPv4 address from a link.
    pub async fn remove_address(
        &self,
        link: &LinkId,
        address: Ipv4Addr,
        length_bits: u8,
    ) -> Result {
        let operation = format!("remove address {address}/{length_bits} from {link}");
        self.edit(operation, DelAddress(address_message(link, address, length_bits)), 0).await
    }

    /// Adds a route; refused if the main table has one of the same destination and metric.
    pub async fn add_route(&self, route: &RouteSpec) -> Result {
        self.add(format!("add route {route}"), NewRoute(decode::route_message(route))).await
    }

    /// Adds a route in place of the one of the same destination and metric, if there is one.
    pub async fn replace_route(&self, route: &RouteSpec) -> Result {
        let request = NewRoute(decode::route_message(route));
        self.edit(format!("replace route {route}"), request, NLM_F_CREATE | NLM_F_REPLACE).await
    }

    /// Removes a route.
    pub async fn remove_route(&self, route: &RouteSpec) -> Result {
        let mut message = decode::route_message(route);
        // Stands for any: the kernel would not find a route that somebody set with another one.
        message.header.scope = RouteScope::NoWhere;
        self.edit(format!("remove route {route}"), DelRoute(message), 0).await
    }

    /// Adds a route that drops what is for `destination`, behind any other route to it.
    pub async fn add_blackhole(&self, destination: Prefix) -> Result {
        let message = decode::blackhole_message(destination, BLACKHOLE_METRIC);
        self.add(format!("add blackhole route {destination}"), NewRoute(message)).await
    }

    /// Removes a route that drops what is for `destination`.
    pub async fn remove_blackhole(&self, destination: Prefix, metric: u32) -> Result {
        let message = decode::blackhole_message(destination, metric);
        self.edit(format!("remove blackhole route {destination}"), DelRoute(message), 0).await
    }

    /// `operation` says what is done to the link, which follows.
    async fn set_link(
        &self,
        link: &LinkId,
        operation: String,
        change: impl FnOnce(LinkEdit) -> LinkEdit,
    ) -> Result {
        let message = change(LinkUnspec::new_with_index(link.index)).build();
        self.edit(format!("{operation} {link}"), SetLink(message), 0).await
    }

    async fn add(&self, operation: String, request: RouteNetlinkMessage) -> Result {
        self.edit(operation, request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    async fn edit(&self, operation: String, request: RouteNetlinkMessage, flags: u16) -> Result {
        self.request(&operation, request, NLM_F_ACK | flags).await.map(drop)
    }

    /// The first thing that `decode` finds in the answer, which is `missing` otherwise.
    async fn ask_for<T>(
        &self,
        operation: String,
        missing: &'static str,
        request: RouteNetlinkMessage,
        decode: impl FnMut(&RouteNetlinkMessage) -> Option<T>,
    ) -> Result<T> {
        let (messages, _) = self.request(&operation, request, NLM_F_ACK).await?;
        let found = messages.iter().find_map(decode);
        found.ok_or(NetlinkError::Incomplete { operation, missing })
    }

    async fn list(
        &self,
        operation: &str,
        request: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..LISTING_ATTEMPTS_MAX {
            let (messages, is_interrupted) =
                self.request(operation, request.clone(), NLM_F_DUMP).await?;
            if !is_interrupted {
                return Ok(messages);
            }
        }
        Err(NetlinkError::Unsettled(operation.to_owned()))
    }

    /// Everything that the kernel sends back for a request, and whether that was interrupted.
    async fn request(
        &self,
        operation: &str,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool)> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | flags;
        let disconnected = || NetlinkError::Disconnected(operation.to_owned());
        let mut replies = self.handle.clone().request(message).map_err(|_ended| disconnected())?;
        let (mut messages, mut is_interrupted) = (Vec::new(), false);
        let exchange = async {
            while let Some(reply) = replies.next().await {
                is_interrupted |= reply.header.flags & NLM_F_DUMP_INTR != 0;
                if let NetlinkPayload::InnerMessage(message) = reply.payload {
                    messages.push(message);
                } else if let NetlinkPayload::Done(done) = reply.payload {
                    return Ok(ended(done.code));
                } else if let NetlinkPayload::Error(error) = reply.payload {
                    return Ok(ended(error.raw_code()));
                }
            }
            Err(disconnected())
        };
        in_time(operation, exchange).await?.map_err(NetlinkError::refused(operation))?;
        Ok((messages, is_interrupted))
    }
}

type LinkEdit = LinkMessageBuilder<LinkUnspec>;
type RouteQuery = RouteMessageBuilder<Ipv4Addr>;

/// What comes of `work`, if it does within the time for a request.
async fn in_time<T>(operation: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_elapsed| NetlinkError::TimedOut(operation.to_owned());
    timeout(REQUEST_TIMEOUT, work).await.map_err(late)?
}

/// How the answer to a request ended, by the code in its last message.
fn ended(code: i32) -> io::Result<()> {
    if code < 0 { Err(io::Error::from_raw_os_error(code.saturating_neg())) } else { Ok(()) }
}

/// `request` as the kernel reads it.
fn serialized(request: RouteNetlinkMessage, flags: u16) -> Vec<u8> {
    let mut message = NetlinkMessage::from(request);
    message.header.flags = NLM_F_REQUEST | flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn link_query() -> LinkMessage {
    let mut query = LinkMessage::default();
    // Counters are most of a link's listing, and are not used.
    query.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    query
}

fn address_message(link: &LinkId, address: Ipv4Addr, length_bits: u8) -> AddressMessage {
    let message = AddressMessageBuilder::<Ipv4Addr>::new().index(link.index);
    message.address(address, length_bits).build()
}

/// The question behind `ip route get`.
fn to_host(destination: Ipv4Addr) -> RouteQuery {
    RouteQuery::new().destination_prefix(destination, HOST_LENGTH_BITS)
}
