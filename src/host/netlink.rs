//! The host's links, IPv4 addresses and IPv4 routes, read and edited over rtnetlink.
//! The only owner of the netlink crates: one request per method, no policy, no retry of an edit.

mod decode;
mod events;
mod neighbours;
mod routes;
mod vxlan;

use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::StreamExt;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use rtnetlink::packet_route::route::{RouteAttribute, RouteMetric};
use rtnetlink::{AddressMessageBuilder, LinkUnspec};
use tokio::time::timeout;

use crate::host::state::{Address, Link, LinkId, PathToHost, RouteSpec, Scope};
use crate::route::Prefix;

pub use events::Events;

/// The kernel answers a request inside the send call unless another process holds the routing
/// lock; the longest holders seen in practice (mass deletion of links) stay below a few seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A listing that the kernel marks as interrupted by a change is asked for again. Each attempt
/// takes well below a millisecond, so five in a row interrupted means constant change.
const LISTING_ATTEMPTS_MAX: u32 = 5;

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
    /// No socket could be had.
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
        operation: Operation,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The connection ended before the answer.
    #[error("the netlink connection ended before an answer to: {0}")]
    Disconnected(Operation),
    /// No answer in time.
    #[error(
        "no answer from the kernel within {seconds} s to: {0}",
        seconds = REQUEST_TIMEOUT.as_secs()
    )]
    TimedOut(Operation),
    /// Every listing was interrupted by a change.
    #[error("the kernel's tables changed during each of {LISTING_ATTEMPTS_MAX} attempts to {0}")]
    Unsettled(Operation),
    /// The answer lacks what it must have.
    #[error("the kernel's answer to a request to {operation} lacks {missing}")]
    Incomplete {
        /// What was asked for.
        operation: Operation,
        /// What the answer lacks.
        missing: &'static str,
    },
}

impl NetlinkError {
    /// Whether the thing to add exists already.
    #[must_use]
    pub fn is_already_there(&self) -> bool {
        self.errno() == Some(rustix::io::Errno::EXIST)
    }

    /// Whether the interface, address or route to edit is gone.
    #[must_use]
    pub fn is_already_gone(&self) -> bool {
        use rustix::io::Errno;
        let gone = [Errno::NODEV, Errno::NXIO, Errno::SRCH, Errno::ADDRNOTAVAIL, Errno::NOENT];
        self.errno().is_some_and(|errno| gone.contains(&errno))
    }

    /// Whether another connection may do what this one cannot.
    #[must_use]
    pub fn is_connection_lost(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Disconnected(_) | Self::TimedOut(_) => true,
            Self::Refused { .. } | Self::Unsettled(_) | Self::Incomplete { .. } => false,
        }
    }

    /// A link that was there a moment ago.
    pub(crate) fn vanished(name: &str) -> Self {
        let operation = Operation::new("read", format_args!("link {name}"));
        Self::Incomplete { operation, missing: "the link, which was just made" }
    }

    fn errno(&self) -> Option<rustix::io::Errno> {
        match self {
            Self::Refused { source, .. } => rustix::io::Errno::from_io_error(source),
            Self::Open { .. }
            | Self::Disconnected(_)
            | Self::TimedOut(_)
            | Self::Unsettled(_)
            | Self::Incomplete { .. } => None,
        }
    }
}

/// A request in words: what is done, to which object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    verb: &'static str,
    object: String,
}

impl Operation {
    fn new(verb: &'static str, object: impl fmt::Display) -> Self {
        Self { verb, object: object.to_string() }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.object)
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

    /// Subscribes to changes of links, IPv4 addresses and IPv4 routes in the network namespace of
    /// the calling thread. Subscribe before the first listing, or a change between them is lost.
    pub fn events() -> Result<Events, NetlinkError> {
        Events::subscribe()
    }

    /// All links, in the kernel's order.
    pub async fn links(&self) -> Result<Vec<Link>, NetlinkError> {
        let request = RouteNetlinkMessage::GetLink(link_query());
        let answer = self.list(Operation::new("list", "links"), request).await?;
        Ok(answer.iter().filter_map(decode::link).collect())
    }

    /// The link with this index, `None` if there is no such link.
    pub async fn link(&self, index: u32) -> Result<Option<Link>, NetlinkError> {
        let operation = Operation::new("read", format_args!("link with index {index}"));
        let mut query = link_query();
        query.header.index = index;
        self.one_link(operation, query).await
    }

    /// The link with this name, `None` if there is no such link.
    pub async fn link_named(&self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let operation = Operation::new("read", format_args!("link {name}"));
        let mut query = link_query();
        query.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.one_link(operation, query).await
    }

    /// All IPv4 addresses, in the kernel's order.
    pub async fn addresses(&self) -> Result<Vec<Address>, NetlinkError> {
        let mut query = AddressMessage::default();
        query.header.family = decode::IPV4;
        let request = RouteNetlinkMessage::GetAddress(query);
        let answer = self.list(Operation::new("list", "IPv4 addresses"), request).await?;
        Ok(answer.iter().filter_map(decode::address).collect())
    }

    /// How the kernel would reach `destination` now (`ip route get`).
    pub async fn path_to(&self, destination: Ipv4Addr) -> Result<PathToHost, NetlinkError> {
        let operation = Operation::new("find the route to", destination);
        let request = RouteNetlinkMessage::GetRoute(decode::path_query(destination));
        let answer = self.request(&operation, request, NLM_F_ACK).await?;
        answer
            .messages
            .iter()
            .find_map(decode::path)
            .ok_or(NetlinkError::Incomplete { operation, missing: "an outgoing interface" })
    }

    /// Switches a link on.
    pub async fn set_up(&self, link: &LinkId) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(link.index).up().build();
        self.edit(Operation::new("set up", link), RouteNetlinkMessage::SetLink(message), 0).await
    }

    /// Sets the largest IP packet of a link, in bytes.
    pub async fn set_mtu(&self, link: &LinkId, mtu_bytes: u32) -> Result<(), NetlinkError> {
        let operation = Operation::new("set MTU", format_args!("{mtu_bytes} on {link}"));
        let message = LinkUnspec::new_with_index(link.index).mtu(mtu_bytes).build();
        self.edit(operation, RouteNetlinkMessage::SetLink(message), 0).await
    }

    /// Sets the length of a link's transmit queue, in packets.
    pub async fn set_transmit_queue_length(
        &self,
        link: &LinkId,
        length: u32,
    ) -> Result<(), NetlinkError> {
        let operation =
            Operation::new("set transmit queue length", format_args!("{length} on {link}"));
        let message = LinkUnspec::new_with_index(link.index).txqueuelen(length).build();
        self.edit(operation, RouteNetlinkMessage::SetLink(message), 0).await
    }

    /// Gives a link one more IPv4 address.
    pub async fn add_address(
        &self,
        link: &LinkId,
        address: Ipv4Addr,
        prefix_length_bits: u8,
    ) -> Result<(), NetlinkError> {
        let text = format_args!("{address}/{prefix_length_bits} to {link}").to_string();
        let message = address_message(link, address, prefix_length_bits);
        let request = RouteNetlinkMessage::NewAddress(message);
        self.edit(Operation::new("add address", text), request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    /// Takes an IPv4 address from a link.
    pub async fn remove_address(
        &self,
        link: &LinkId,
        address: Ipv4Addr,
        prefix_length_bits: u8,
    ) -> Result<(), NetlinkError> {
        let text = format_args!("{address}/{prefix_length_bits} from {link}").to_string();
        let message = address_message(link, address, prefix_length_bits);
        let request = RouteNetlinkMessage::DelAddress(message);
        self.edit(Operation::new("remove address", text), request, 0).await
    }

    /// Adds a route; refused if the main table has one of the same destination and metric.
    pub async fn add_route(&self, route: &RouteSpec) -> Result<(), NetlinkError> {
        let request = RouteNetlinkMessage::NewRoute(decode::route_message(route));
        self.edit(Operation::new("add route", route), request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    /// As [`Self::add_route`], with an MTU in bytes, which counts in place of the interface's.
    pub async fn add_route_with_mtu(
        &self,
        route: &RouteSpec,
        mtu_bytes: u32,
    ) -> Result<(), NetlinkError> {
        let operation = Operation::new("add route", format_args!("{route} mtu {mtu_bytes}"));
        let mut message = decode::route_message(route);
        let metrics = vec![RouteMetric::Mtu(mtu_bytes)];
        message.attributes.push(RouteAttribute::Metrics(metrics));
        let request = RouteNetlinkMessage::NewRoute(message);
        self.edit(operation, request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    /// Adds a route in place of the one of the same destination and metric, if there is one.
    pub async fn replace_route(&self, route: &RouteSpec) -> Result<(), NetlinkError> {
        let request = RouteNetlinkMessage::NewRoute(decode::route_message(route));
        self.edit(Operation::new("replace route", route), request, NLM_F_CREATE | NLM_F_REPLACE)
            .await
    }

    /// Removes a route.
    pub async fn remove_route(&self, route: &RouteSpec) -> Result<(), NetlinkError> {
        // Of any scope: the kernel would not find a route that somebody set with another one.
        let any_scope = RouteSpec { scope: Scope::NOWHERE, ..route.clone() };
        let request = RouteNetlinkMessage::DelRoute(decode::route_message(&any_scope));
        self.edit(Operation::new("remove route", route), request, 0).await
    }

    /// Adds a route that drops what is for `destination`, behind any other route to it.
    pub async fn add_blackhole(&self, destination: Prefix) -> Result<(), NetlinkError> {
        let operation = Operation::new("add blackhole route", destination);
        let message = decode::blackhole_message(destination, BLACKHOLE_METRIC);
        let request = RouteNetlinkMessage::NewRoute(message);
        self.edit(operation, request, NLM_F_CREATE | NLM_F_EXCL).await
    }

    /// Removes the route that [`Self::add_blackhole`] adds.
    pub async fn remove_blackhole(&self, destination: Prefix) -> Result<(), NetlinkError> {
        let operation = Operation::new("remove blackhole route", destination);
        let message = decode::blackhole_message(destination, BLACKHOLE_METRIC);
        self.edit(operation, RouteNetlinkMessage::DelRoute(message), 0).await
    }

    async fn one_link(
        &self,
        operation: Operation,
        query: LinkMessage,
    ) -> Result<Option<Link>, NetlinkError> {
        let request = RouteNetlinkMessage::GetLink(query);
        match self.request(&operation, request, NLM_F_ACK).await {
            Ok(answer) => match answer.messages.iter().find_map(decode::link) {
                Some(link) => Ok(Some(link)),
                None => Err(NetlinkError::Incomplete { operation, missing: "the link" }),
            },
            Err(error) if error.is_already_gone() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn edit(
        &self,
        operation: Operation,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), NetlinkError> {
        self.request(&operation, request, NLM_F_ACK | flags).await.map(drop)
    }

    async fn list(
        &self,
        operation: Operation,
        request: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
        for _ in 0..LISTING_ATTEMPTS_MAX {
            let answer = self.request(&operation, request.clone(), NLM_F_DUMP).await?;
            if !answer.interrupted {
                return Ok(answer.messages);
            }
        }
        Err(NetlinkError::Unsettled(operation))
    }

    async fn request(
        &self,
        operation: &Operation,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<Answer, NetlinkError> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | flags;
        match timeout(REQUEST_TIMEOUT, self.exchange(operation, message)).await {
            Ok(result) => result,
            Err(_elapsed) => Err(NetlinkError::TimedOut(operation.clone())),
        }
    }

    async fn exchange(
        &self,
        operation: &Operation,
        message: NetlinkMessage<RouteNetlinkMessage>,
    ) -> Result<Answer, NetlinkError> {
        let disconnected = || NetlinkError::Disconnected(operation.clone());
        let refused = |source| NetlinkError::Refused { operation: operation.clone(), source };
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
    // Counters are most of a link's listing, and nobody here reads them.
    query.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    query
}

fn address_message(link: &LinkId, address: Ipv4Addr, prefix_length_bits: u8) -> AddressMessage {
    AddressMessageBuilder::<Ipv4Addr>::new()
        .index(link.index)
        .address(address, prefix_length_bits)
        .build()
}
