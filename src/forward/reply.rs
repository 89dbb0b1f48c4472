//! ICMP errors that are due, made once the silence rules and the rate limit allow.

use crate::packet::icmp::{self, ERROR_BYTES_MAX, ErrorKind};
use crate::packet::limiter::GLOBAL_BURST;
use crate::packet::{Family, Header};
use crate::route::Endpoint;

use super::Context;

/// Errors held until the turn ends: one for each packet that it may read. Of those that are limited
/// it makes fewer, [`GLOBAL_BURST`].
pub(crate) const REPLIES_MAX: usize = 256;

const _: () = assert!(GLOBAL_BURST as usize <= REPLIES_MAX);

/// A bounded queue of ICMP errors.
pub struct Replies {
    buffer: Box<[[u8; ERROR_BYTES_MAX]]>,
    /// The tunnel endpoint that each goes to, into the TUN device if `None`; and its length.
    entries: Vec<(Option<Endpoint>, usize)>,
}

impl Default for Replies {
    /// An empty queue; allocates all that it will ever need.
    fn default() -> Self {
        Self {
            buffer: vec![[0; ERROR_BYTES_MAX]; REPLIES_MAX].into_boxed_slice(),
            entries: Vec::with_capacity(REPLIES_MAX),
        }
    }
}

impl Replies {
    /// Queues an error about `packet`, which is exactly what `header` describes, unless the
    /// rules ask for silence or the rate is used up.
    pub fn answer<A: Family>(
        &mut self,
        context: &Context<'_>,
        kind: ErrorKind,
        source: A,
        endpoint: Option<Endpoint>,
        header: &Header<A>,
        packet: &[u8],
    ) {
        if !icmp::may_answer(header, packet) {
            return;
        }
        // As in Linux (icmpv4_mask_allow, net/ipv4/icmp.c; icmpv6_mask_allow, net/ipv6/icmp.c):
        // without this error a path's MTU is not found, and the sender's packets are lost until it
        // is.
        let is_exempt = matches!(kind, ErrorKind::PacketTooBig { .. });
        let at = self.entries.len();
        let now_ns = context.now_ns;
        if at == REPLIES_MAX || !is_exempt && !context.icmp_limit.allow(now_ns, header.source) {
            context.stats.icmp_limited.add(1);
            return;
        }
        let Some(buffer) = self.buffer.get_mut(at) else { return };
        let bytes = icmp::write_error(buffer, kind, source, packet, header);
        self.entries.push((endpoint, bytes));
        context.stats.icmp_sent.add(1);
    }

    /// The queued errors, oldest first: the tunnel endpoint that each goes to, into the TUN device
    /// if `None`, and its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Option<Endpoint>, &[u8])> {
        let replies = self.entries.iter().zip(&self.buffer);
        replies
            .map(|((endpoint, bytes), buffer)| (*endpoint, buffer.get(..*bytes).unwrap_or(buffer)))
    }

    /// Forgets the queued errors; the rate limit remembers them.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}
