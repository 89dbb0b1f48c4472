//! Events of changed links, addresses and routes, many changes coalesced into one.
//! Reports that something changed, never what: a reader lists again, so nothing can be missed.

use std::net::Ipv6Addr;
use std::time::Duration;

use futures_util::FutureExt;
use rtnetlink::MulticastGroup;
use rtnetlink::packet_route::route::RouteHeader;
use rtnetlink::sys::protocols::{NETLINK_ROUTE, NETLINK_XFRM};
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;

use super::routes::about;
use super::{NetlinkError, Result};
use crate::route::{IpAddress, Prefix};

/// One change of an interface brings a handful of messages, and a pod's start some dozens, all
/// within a few milliseconds. Waiting this long makes them one pass of repair, and leaves most of
/// the second that a repair may take.
const COALESCE: Duration = Duration::from_millis(50);

/// A bound on one drain, so that a storm cannot block a reader: the default receive buffer
/// (212,992 bytes) holds fewer messages than this.
const DRAIN_MESSAGES_MAX: usize = 4096;

/// Enough of a message to recognise its route; the kernel truncates the rest.
const MESSAGE_BYTES: usize = 64;

/// Room for events while a reader is busy: the routes of an internet routing table change some
/// thousand times a second when a router starts, and each takes the kernel about 800 bytes. What
/// is not used takes no memory.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;

const GROUPS: [MulticastGroup; 3] =
    [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv4Route];
const GROUPS_V6: [MulticastGroup; 2] = [MulticastGroup::Ipv6Ifaddr, MulticastGroup::Ipv6Route];

/// `XFRMNLGRP_POLICY`.
const POLICY_GROUP: u32 = 4;

/// A subscription to changes.
pub struct Events {
    socket: TokioSocket,
    pending: bool,
    /// Routes that matter; all if there are none.
    networks: Option<(Vec<Prefix>, Vec<Prefix<Ipv6Addr>>)>,
}

impl Events {
    /// Subscribes in the network namespace of the calling thread, `with_v6` to changes of IPv6 as
    /// well. Subscribe before the first listing, or a change between them is lost.
    pub fn subscribe(with_v6: bool) -> Result<Self> {
        let more = GROUPS_V6.into_iter().filter(|_| with_v6);
        Self::of(NETLINK_ROUTE, GROUPS.into_iter().chain(more).map(number))
    }

    /// Subscribes to everything that the way to a host depends on: routing rules as well, and
    /// nexthop objects, whose changes are no routes' where `nexthop_compat_mode` is 0.
    pub fn of_ways() -> Result<Self> {
        let more = [MulticastGroup::Ipv4Rule, MulticastGroup::Nexthop];
        Self::of(NETLINK_ROUTE, GROUPS.into_iter().chain(more).map(number))
    }

    /// Subscribes to changes of neighbours alone, whose hardware addresses come and go.
    pub fn of_neighbours() -> Result<Self> {
        Self::of(NETLINK_ROUTE, [number(MulticastGroup::Neigh)])
    }

    /// Subscribes to changes of IPsec policies, of which a kernel that knows none reports none.
    pub fn of_policies() -> Result<Self> {
        match Self::of(NETLINK_XFRM, [POLICY_GROUP]) {
            Err(error) if error.errno() == Some(Errno::PROTONOSUPPORT) => {
                Self::of(NETLINK_ROUTE, [])
            }
            events => events,
        }
    }

    fn of(protocol: isize, groups: impl IntoIterator<Item = u32>) -> Result<Self> {
        let open = || {
            let mut socket = TokioSocket::new(protocol)?;
            let groups = groups.into_iter().fold(0, |mask, group| mask | 1 << (group - 1));
            // Without the right to it the default remains, and overruns are more frequent.
            set_socket_recv_buffer_size_force(socket.socket_ref(), RECEIVE_BUFFER_BYTES).ok();
            socket.socket_mut().bind(&SocketAddr::new(0, groups))?;
            Ok(socket)
        };
        let socket = open().map_err(NetlinkError::Open)?;
        Ok(Self { socket, pending: false, networks: None })
    }

    /// Ignores events of routes to outside of `networks` and of those of IPv6, `v6`.
    pub fn only_about(self, networks: &[Prefix], v6: &[Prefix<Ipv6Addr>]) -> Self {
        Self { networks: Some((networks.to_vec(), v6.to_vec())), ..self }
    }

    /// Waits until something changed. Changes that come close together are reported as one.
    /// Cancel-safe: an event that was taken before a cancellation is reported by the next call.
    pub async fn changed(&mut self) -> Result {
        if !self.pending {
            while !self.receive().await? {}
            self.pending = true;
        }
        tokio::time::sleep(COALESCE).await;
        for _ in 0..DRAIN_MESSAGES_MAX {
            // Outside tokio's budget, which ends a drain after 128 messages.
            match tokio::task::unconstrained(self.receive()).now_or_never() {
                Some(result) => _ = result?,
                None => break,
            }
        }
        self.pending = false;
        Ok(())
    }

    /// Waits until something changed, and not for what comes close behind it. Cancel-safe.
    pub async fn changed_at_once(&mut self) -> Result {
        self.receive().await.map(drop)
    }

    /// Takes one message, and gives whether it matters. A full receive buffer lost some, which is
    /// a change as well.
    async fn receive(&self) -> Result<bool> {
        let mut message = Vec::with_capacity(MESSAGE_BYTES);
        match self.socket.recv(&mut message).await {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => Ok(true),
            Err(error) => Err(NetlinkError::refused("report change events")(error)),
            Ok(()) => Ok(self.matters(&message)),
        }
    }

    fn matters(&self, message: &[u8]) -> bool {
        let Some((v4, v6)) = &self.networks else { return true };
        concerns(message, v4).or_else(|| concerns(message, v6)).unwrap_or(true)
    }
}

/// Whether a message about a route is about one into `networks`; `None` if it is about none of
/// their family.
fn concerns<A: IpAddress>(message: &[u8], networks: &[Prefix<A>]) -> Option<bool> {
    let (table, to) = about(message)?;
    let is_ours = networks.iter().any(|network| network.covers(to));
    Some(table == RouteHeader::RT_TABLE_MAIN && is_ours)
}

fn number(group: MulticastGroup) -> u32 {
    group as u32
}
