//! The host's links, IPv4 addresses and IPv4 routes, read and edited over rtnetlink.
//! The only owner of the netlink crates: one request per method, no policy, no retry of an edit.

mod decode;
pub mod events;
pub mod filters;
mod neighbours;
pub mod policies;
mod routes;
pub mod veth;
mod vxlan;

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use rtnetlink::packet_route::route::{RouteMessage, RouteScope};
use rtnetlink::packet_route::rule::RuleMessage;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{Socket, SocketAddr};
use rtnetlink::{AddressMessageBuilder, LinkUnspec};
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
fn request_now(request: RouteNetlinkMessage) -> io::Result<()> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    let mut message = NetlinkMessage::from(request);
    message.header.flags = NLM_F_REQUEST;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0).map(drop)
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

    fn errno(&self) -> Option<Errno> {
        let Self::Refused { source, .. } = self else { return None };
        Errno::from_io_error(source)
    }
}

impl Netlink {
    /// Opens a connection for the network namespace of the calling thread.
    /// Must be called inside a tokio runtime, which drives the connection from then on.
    pub fn open() -> Result<Self, NetlinkError> {
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
    pub async fn links(&self) -> Result<Vec<Link>, NetlinkError> {
        let request = RouteNetlinkMessage::GetLink(link_query());
        let answer = self.list("list links", request).await?;
        Ok(answer.iter().filter_map(decode::link).collect())
    }

    /// The link with this name, `None` if there is no such link.
    pub async fn link_named(&self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let operation = format!("read link {name}");
        let mut query = link_query();
        query.attributes.push(LinkAttribute::IfName(name.to_owned()));
        match self.request(&operation, RouteNetlinkMessage::GetLink(query), NLM_F_ACK).await {
            Ok(answer) => match answer.messages.iter().find_map(decode::link) {
                Some(link) => Ok(Some(link)),
                None => Err(NetlinkError::Incomplete { operation, missing: "the link" }),
            },
            Err(error) if error.is_already_gone() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The link with this name, which was there a moment ago.
    pub async fn link_just_made(&self, name: &str) -> Result<Link, NetlinkError> {
        let missing = "the link, which was just made";
        let operation = format!("read link {name}");
        let link = self.link_named(name).await?;
        link.ok_or(NetlinkError::Incomplete { operation, missing })
    }

    /// All IPv4 addresses, in the kernel's order.
    pub async fn addresses(&self) -> Result<Vec<Address>, NetlinkError> {
        let mut query = AddressMessage::default();
        query.header.family = decode::IPV4;
        let request = RouteNetlinkMessage::GetAddress(query);
        let answer = self.list("list IPv4 addresses", request).await?;
        Ok(answer.iter().filter_map(decode::address).collect())
    }

    /// How the kernel would reach `destination` now (`ip route get`).
    pub async fn path_to(&self, destination: Ipv4Addr) -> Result<PathToHost, NetlinkError> {
        let operation = format!("find the route to {destination}");
        self.path(operation, decode::path_query(destination)).await
    }

    /// How the kernel would send a UDP datagram now that goes `from` an address of this host.
    pub async fn path_of_datagram(
        &self,
        from: SocketAddrV4,
        to: SocketAddrV4,
    ) -> Result<PathToHost, NetlinkError> {
        let operation = format!("find the route from {from} to {to}");
        self.path(operation, decode::datagram_query(from, to)).await
    }

    /// Where it would send a packet of others that comes by this interface, if a firewall gives it
    /// this mark; 0 is none.
    pub async fn path_of_forwarded(
        &self,
        from: Ipv4Addr,
        to: Ipv4Addr,
        interface_index: u32,
        mark: u32,
    ) -> Result<PathToHost, NetlinkError> {
        let operation = format!("find the route of a packet from {from} to {to}");
        self.path(operation, decode::forwarded_query(from, to, interface_index, mark)).await
    }

    /// The marks of packets by which routing rules go.
    pub async fn marks(&self) -> Result<Vec<u32>, NetlinkError> {
        let mut query = RuleMessage::default();
        query.header.family = decode::IPV4;
        let answer = self.list("list routing rules", RouteNetlinkMessage::GetRule(query)).await?;
        Ok(answer.iter().filter_map(decode::mark).collect())
    }

    async fn path(
        &self,
        operation: String,
        query: RouteMessage,
    ) -> Result<PathToHost, NetlinkError> {
        let request = RouteNetlinkMessage::GetRoute(query);
        let answer = self.request(&operation, request, NLM_F_ACK).await?;
        answer
            .messages
            .iter()
            .find_map(decode::path)
            .ok_or(NetlinkError::Incomplete { operation, missing: "an outgoing interface" })
    }

    /// Gives a link an alias (`ip link show` has it), in place of another.
    pub async fn set_alias(&self, link: &LinkId, alias: &str) -> Result<(), NetlinkError> {
        let mut message = LinkUnspec::new_with_index(link.index).build();
        message.attributes.push(LinkAttribute::IfAlias(alias.to_owned()));
        self.set_link(format!("set the alias {alias:?} of {link}"), message).await
    }

    /// Switches a link on.
    pub async fn set_up(&self, link: &LinkId) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(link.index).up().build();
        self.set_link(format!("set up {link}"), message).await
    }

    /// Sets the largest IP packet of a link, in bytes.
    pub async fn set_mtu(&self, link: &LinkId, mtu_bytes: u32) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(link.index).mtu(mtu_bytes).build();
        self.set_link(format!("set MTU {mtu_bytes} on {link}"), message).await
    }

    /// Sets the length of a link's transmit queue, in packets.
    pub async fn set_transmit_queue_length(
        &self,
        link: &LinkId,
        length: u32,
    ) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(link.index).txqueuelen(length).build();
        self.set_link(format!("set transmit queue length {length} on {link}"), message).await
    }

    /// Gives a link another hardware address.
    pub async fn set_mac(&self, link: &LinkId, mac: MacAddress) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(link.index).address(mac.0.to_vec()).build();
        self.set_link(format!("set the hardware address {mac} on {link}"), message).await
    }

    /// Removes a link.
    pub async fn remove_link(&self, link: &LinkId) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(link.index).build();
        self.edit(format!("remove link {link}"), RouteNetlinkMessage::DelLink(message), 0).await
    }

    /// Gives a link one more IPv4 address.
    pub async fn add_address(
        &self,
        link: &LinkId,
        address: Ipv4Addr,
        prefix_length_bits: u8,
    ) -> Result<(), NetlinkError> {
        let operation = format!("add address {address}/{prefix_length_bits} to {link}");
        let message = address_message(link, address, prefix_length_bits);
        self.add(operation, RouteNetlinkMessage::NewAddress(message)).await
    }

    /// Takes an IPv4 address from a link.
    pub async fn remove_address(
        &self,
        link: &LinkId,
        address: Ipv4Addr,
        prefix_length_bits: u8,
    ) -> Result<(), NetlinkError> {
        let operation = format!("remove address {address}/{prefix_length_bits} from {link}");
        let message = address_message(link, address, prefix_length_bits);
        self.edit(operation, RouteNetlinkMessage::DelAddress(message), 0).await
    }

    /// Adds a route; refused if the main table has one of the same destination and metric.
    pub async fn add_route(&self, route: &RouteSpec) -> Result<(), NetlinkError> {
        let message = decode::route_message(route);
        self.add(format!("add route {route}"), RouteNetlinkMessage::NewRoute(message)).await
    }

    /// Adds a route in place of the one of the same destination and metric, if there is one.
    pub async fn replace_route(&self, route: &RouteSpec) -> Result<(), NetlinkError> {
        let request = RouteNetlinkMessage::NewRoute(decode::route_message(route));
        self.edit(format!("replace route {route}"), request, NLM_F_CREATE | NLM_F_REPLACE).await
    }

    /// Removes a route.
    pub async fn remove_route(&self, route: &RouteSpec) -> Result<(), NetlinkError> {
        let mut message = decode::route_message(route);
        // Stands for any: the kernel would not find a route that somebody set with another one.
        message.header.scope = RouteScope::NoWhere;
        let request = RouteNetlinkMessage::DelRoute(message);
        self.edit(format!("remove route {route}"), request, 0).await
    }

    /// Adds a route that drops what is for `destination`, behind any other route to it.
    pub async fn add_blackhole(&self, destination: Prefix) -> Result<(), NetlinkError> {
        let message = decode::blackhole_message(destination, BLACKHOLE_METRIC);
        let operation = format!("add blackhole route {destination}");
        self.add(operation, RouteNetlinkMessage::NewRoute(message)).await
    }

    /// Removes a route that drops what is for `destination`.
    pub async fn remove_blackhole(
        &self,
        destination: Prefix,
        metric: u32,
    ) -> Result<(), NetlinkError> {
        let message = decode::blackhole_message(destination, metric);
        let operation = format!("remove blackhole route {destination}");
        self.edit(operation, RouteNetlinkMessage::DelRoute(message), 0).await
    }

    async fn set_link(&self, operation: String, message: LinkMessage) -> Result<(), NetlinkError> {
        self.edit(operation, RouteNetlinkMessage::SetLink(message), 0).await
    }

    async fn add(
        &self,
        operation: String,
        request: RouteNetlinkMessage,
    ) -> Result<(), NetlinkError> {
        self.edit(operation, request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    async fn edit(
        &self,
        operation: String,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), NetlinkError> {
        self.request(&operation, request, NLM_F_ACK | flags).await.map(drop)
    }

    async fn list(
        &self,
        operation: &str,
        request: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
        for _ in 0..LISTING_ATTEMPTS_MAX {
            let answer = self.request(operation, request.clone(), NLM_F_DUMP).await?;
            if !answer.interrupted {
                return Ok(answer.messages);
            }
        }
        Err(NetlinkError::Unsettled(operation.to_owned()))
    }

    async fn request(
        &self,
        operation: &str,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<Answer, NetlinkError> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | flags;
        match timeout(REQUEST_TIMEOUT, self.exchange(operation, message)).await {
            Ok(result) => result,
            Err(_elapsed) => Err(NetlinkError::TimedOut(operation.to_owned())),
        }
    }

    async fn exchange(
        &self,
        operation: &str,
        message: NetlinkMessage<RouteNetlinkMessage>,
    ) -> Result<Answer, NetlinkError> {
        let disconnected = || NetlinkError::Disconnected(operation.to_owned());
        let refused = |source| NetlinkError::Refused { operation: operation.to_owned(), source };
        let Ok(mut replies) = self.handle.clone().request(message) else {
            return Err(disconnected());
        };
        let mut answer = Answer::default();
        while let Some(reply) = replies.next().await {
            answer.interrupted |= reply.header.flags & NLM_F_DUMP_INTR != 0;
            if let NetlinkPayload::InnerMessage(message) = reply.payload {
                answer.messages.push(message);
            } else if let NetlinkPayload::Error(error) = reply.payload {
                return if error.code.is_none() { Ok(answer) } else { Err(refused(error.to_io())) };
            } else if let NetlinkPayload::Done(done) = reply.payload {
                return if done.code >= 0 {
                    Ok(answer)
                } else {
                    Err(refused(io::Error::from_raw_os_error(done.code.saturating_neg())))
                };
            }
        }
        Err(disconnected())
    }
}

/// Everything the kernel sent back for one request.
#[derive(Debug, Default)]
struct Answer {
    messages: Vec<RouteNetlinkMessage>,
    interrupted: bool,
}

fn link_query() -> LinkMessage {
    let mut query = LinkMessage::default();
    // Counters are most of a link's listing, and are not used.
    query.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    query
}

fn address_message(link: &LinkId, address: Ipv4Addr, prefix_length_bits: u8) -> AddressMessage {
    AddressMessageBuilder::<Ipv4Addr>::new()
        .index(link.index)
        .address(address, prefix_length_bits)
        .build()
}
