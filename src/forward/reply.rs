//! ICMP errors that are due, made once the silence rules and the rate limit allow.

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::packet::icmp::{self, ERROR_BYTES_MAX, ErrorKind};
use crate::packet::ipv4::Ipv4Header;
use crate::packet::limiter::GLOBAL_BURST;

use super::Pass;

/// Errors held until the batch ends: one for each of its 64 reads. Of those that are limited a
/// batch makes fewer, [`GLOBAL_BURST`].
const REPLIES_MAX: usize = 64;

const _: () = assert!(GLOBAL_BURST as usize <= REPLIES_MAX);

/// One ICMP error to deliver.
#[derive(Debug, Clone, Copy)]
pub struct Reply {
    /// The tunnel endpoint it goes to; into the TUN device if `None`.
    pub endpoint: Option<SocketAddrV4>,
    bytes: u16,
}

/// A bounded queue of ICMP errors.
pub struct Replies {
    buffer: Box<[[u8; ERROR_BYTES_MAX]]>,
    entries: Vec<Reply>,
}

impl Default for Replies {
    fn default() -> Self {
        Self::new()
    }
}

impl Replies {
    /// An empty queue; allocates all that it will ever need.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buffer: vec![[0; ERROR_BYTES_MAX]; REPLIES_MAX].into_boxed_slice(),
            entries: Vec::with_capacity(REPLIES_MAX),
        }
    }

    /// Queues an error about `packet`, which is exactly what `header` describes, unless the
    /// rules ask for silence or the rate is used up.
    pub fn answer(
        &mut self,
        pass: &Pass<'_>,
        kind: ErrorKind,
        source: Ipv4Addr,
        endpoint: Option<SocketAddrV4>,
        header: &Ipv4Header,
        packet: &[u8],
    ) {
        if !icmp::may_answer(header, packet) {
            return;
        }
        // As in Linux (icmpv4_mask_allow, net/ipv4/icmp.c): without this error a path's MTU is not
        // found, and the sender's packets are lost until it is.
        let is_exempt = matches!(kind, ErrorKind::FragmentationNeeded { .. });
        let at = self.entries.len();
        let now_ns = pass.now_ns;
        if at == REPLIES_MAX || !is_exempt && !pass.icmp_limit.allow(now_ns, header.source) {
            pass.stats.icmp_limited.add(1);
            return;
        }
        let Some(buffer) = self.buffer.get_mut(at) else { return };
        let bytes = icmp::write_error(buffer, kind, source, packet, header);
        self.entries.push(Reply { endpoint, bytes: bytes as u16 });
        pass.stats.icmp_sent.add(1);
    }

    /// The queued errors with their bytes, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (&Reply, &[u8])> {
        self.entries
            .iter()
            .zip(&self.buffer)
            .map(|(reply, bytes)| (reply, bytes.get(..usize::from(reply.bytes)).unwrap_or(bytes)))
    }

    /// Whether nothing is queued.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Forgets the queued errors; the rate limit remembers them.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}
