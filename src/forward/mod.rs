//! The forwarding decision: packet and routes in, verdict with its reason out.
//!
//! `decide` holds the rules, each direction as one pure function. `egress` and `ingress` walk
//! batches through parse, verdict, TTL and offload into a plan of sends or writes; `reply` makes
//! the ICMP errors that are due. No I/O, no clock, no allocation after construction: the engines
//! fill the arenas, call in here, and carry out the plans.

// What arrives decides what is read here, so nothing may be read that might not be there.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::string_slice, clippy::panic))]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::unwrap_used, clippy::unreachable))]

pub mod decide;
mod egress;
mod ingress;
pub(crate) mod reply;
mod shed;

pub use decide::{Host, Leased, LeasedFamilies, Local, Senders};
pub use egress::Egress;
pub use ingress::{GroBatch, Ingress};
pub use reply::Replies;

pub use crate::packet::limiter::IcmpLimiter;

use std::net::SocketAddr;

use crate::route::{Routed, Table};
use crate::stats::{DirectionStats, DropReason, DroppedPacket};

/// What the decisions on all packets of one batch depend on.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// This host.
    pub local: &'a Local,
    /// The route table that was published when the batch began.
    pub table: &'a Table,
    /// Where packets of this direction are counted.
    pub stats: &'a DirectionStats,
    /// The limit of ICMP errors, which all workers share.
    pub icmp_limit: &'a IcmpLimiter,
    /// Monotonic time of the batch.
    pub now_ns: u64,
}

impl<'a> Context<'a> {
    /// This host, to packets of the family of `leased`.
    #[inline(always)]
    pub(crate) fn host<A: Routed>(&self, leased: &'a Leased<A>) -> Host<'a, A> {
        Host { local: self.local, leased, table: self.table }
    }

    /// Counts `packets` dropped for `reason`: those that `bytes`, from or to `peer`, stand for.
    #[inline]
    pub(crate) fn drop(
        &self,
        reason: DropReason,
        packets: usize,
        peer: Option<SocketAddr>,
        bytes: &[u8],
    ) {
        let dropped = DroppedPacket { now_ns: self.now_ns, peer, packet: bytes };
        self.stats.drop_packet(reason, packets as u64, dropped);
    }
}

#[cfg(test)]
pub(crate) mod tests;
