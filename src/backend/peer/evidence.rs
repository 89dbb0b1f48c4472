//! What the state machine of the peers is told, and what it asks for.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::state::Obstacle;
use crate::route::Prefixes;

/// Between two ticks while something is in question, and between two looks at counts, which cost
/// more.
pub(in crate::backend) const TICK: Duration = Duration::from_millis(200);
pub(in crate::backend) const LOOK: Duration = Duration::from_secs(1);

/// An echo to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) struct Ask {
    /// The peer's host.
    pub(in crate::backend) host: IpAddr,
    /// Whose echo is asked for.
    pub(in crate::backend) target: IpAddr,
    /// Behind the peer: an echo to it is to expire there. `None` while echoes are answered.
    pub(in crate::backend) beyond: Option<IpAddr>,
    /// Whether to ask the host as well, and the kernel for the way to it.
    pub(in crate::backend) asks_host: bool,
    /// What comes back in the answer.
    pub(in crate::backend) sequence: u16,
}

/// How the sending of packets to a peer shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Use {
    /// So many were sent so far, those that failed and our own included.
    Sent(u64),
    /// The last one was sent at this time, perhaps our own.
    At(Option<Instant>),
}

/// What was counted of one peer so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) struct Sample {
    pub(in crate::backend) used: Use,
    /// Packets received from it and accepted; 0 where nobody counts.
    pub(in crate::backend) received: u64,
}

/// What came to be known of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Evidence {
    /// It answered this echo.
    Echoed(u16),
    /// It said that this one expired there.
    Expired(u16),
    /// The same of one that was to show no more than that.
    Returned(u16),
    /// An answer of it has reached the interface, and rules of this host may drop it yet.
    Overheard,
    /// Its host answered, outside of the tunnel.
    HostAnswered,
    /// It asked us for an echo, and the kernel answered: no use of the peer.
    Asked,
    /// A packet came out of the tunnel.
    Heard,
    /// One of its connections goes on, or its pods answer ours, so our packets arrive there.
    Acknowledged,
    /// A packet of its pods leaves this host for one of its own, behind all rules.
    Passed,
    /// Something of it reached this host's interface.
    Arrived,
    /// The same, from a pod or a tunnel whose address is in no lease of it, and whether it is in
    /// one of another peer.
    Foreign(IpAddr, bool),
    /// Our datagrams are refused.
    Refused {
        /// By whom.
        by: IpAddr,
        /// The code: see `Reason`.
        code: u8,
    },
    /// They can't be sent.
    Unsendable(Obstacle),
    /// Our echoes to it are refused by this host, as by a rule (EPERM): nothing of the peer.
    Unasked,
}

/// One lease of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) struct Reached {
    /// The subnet of its pods, of the family over which it is asked.
    pub(in crate::backend) subnet: Prefixes,
    /// What answers echoes there.
    pub(in crate::backend) target: IpAddr,
    /// By which interface packets from there come: the tunnel's, or the external one.
    pub(in crate::backend) interface: u32,
}

/// The leases of each host.
pub(in crate::backend) type Hosts = BTreeMap<IpAddr, Vec<Reached>>;

/// Adds a lease of a host. Nearly all hosts have one: a vector makes room for four by itself.
pub(in crate::backend) fn add(hosts: &mut Hosts, host: IpAddr, lease: Reached) {
    hosts.entry(host).or_insert_with(|| Vec::with_capacity(1)).push(lease);
}
