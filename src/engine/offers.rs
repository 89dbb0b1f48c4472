//! Which messages of a plan are offered to the kernel together, and by which socket; and which are
//! not even tried: to peers whose hosts are down, to which the kernel refuses to send, or which may
//! be there for nobody while the send buffer is short.

use std::io;

use crate::forward::Context;
use crate::offload::Message;
use crate::route::{HostSet, Reader};
use crate::stats::{DropReason, PACKET_OVERHEAD, WorkerStats};

use super::errno::{SendError, classify_send_error};
use super::refused::{IN_A_ROW_MIN, PAUSE_NS, PAUSE_OF_PORT_NS, Refused};
use super::worker::WorkerConfig;

/// Of the messages that are held back, so much goes nevertheless, as it counts in the send buffer:
/// a peer that is sent to without ever answering is not shut off by others' congestion. In the four
/// seconds until a host that is down is known to be, that is an eighth of the send buffer.
const TRICKLE_BYTES_PER_SECOND: u64 = 256 << 10;

/// What may have gathered of it: a message of the largest size.
const TRICKLE_BYTES_MAX: u64 = 128 << 10;

pub(super) struct Offers {
    /// Hosts that are sent to from this worker's own port.
    spread: Reader<HostSet>,
    unresolved: Reader<HostSet>,
    /// Hosts whose packets the kernel received lately, which no worker counts.
    heard: Reader<HostSet>,
    refused: Refused,
    /// Where it refuses this worker's own port: what would leave there leaves from the tunnel's.
    refused_there: Refused,
    /// Whether the send buffer has room, of either socket, once somebody has asked this turn.
    is_roomy: [Option<bool>; 2],
    trickle: Trickle,
    /// What the first of the messages offered last takes of it, once it is sent.
    owed: u64,
}

impl Offers {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        Self {
            spread: config.routes.spread.reader(),
            unresolved: config.routes.unresolved.reader(),
            heard: config.routes.heard.reader(),
            refused: Refused::new(IN_A_ROW_MIN, PAUSE_NS),
            // To send from the tunnel's costs nothing.
            refused_there: Refused::new(1, PAUSE_OF_PORT_NS),
            is_roomy: [None; 2],
            trickle: Trickle::default(),
            owed: 0,
        }
    }

    /// What is known of the send buffer is no longer true.
    pub(super) fn begin_plan(&mut self) {
        self.is_roomy = [None; 2];
    }

    /// How many of `messages` go next, by one socket, and whether that is the one at this worker's
    /// own port; or why the first is not to be tried.
    pub(super) fn next(
        &mut self,
        config: &WorkerConfig,
        context: &Context<'_>,
        messages: &[Message],
    ) -> Result<(usize, bool), DropReason> {
        let now_ns = context.now_ns;
        self.owed = 0;
        let by_source = messages.first().is_some_and(|first| self.is_by_source(first, now_ns));
        for (count, message) in messages.iter().enumerate() {
            if self.is_by_source(message, now_ns) != by_source {
                return Ok((count, by_source));
            }
            match self.reason(config, context, message, by_source) {
                None => {}
                // Others that need the trickle are first of what goes next: what is offered behind
                // them may not be sent.
                Some(DropReason::SendUnanswered)
                    if count == 0 && self.trickle.has(in_buffer(message), now_ns) =>
                {
                    self.owed = in_buffer(message);
                }
                Some(reason) if count == 0 => return Err(reason),
                Some(_) => return Ok((count, by_source)),
            }
        }
        Ok((messages.len(), by_source))
    }

    /// Whether it is sent from this worker's own port.
    pub(super) fn is_by_source(&mut self, message: &Message, now_ns: u64) -> bool {
        let host = message.destination.host;
        self.spread.load().contains(&host) && self.refused_there.reason(host, now_ns).is_none()
    }

    /// What the kernel refuses of this worker's own port, or else of the tunnel's.
    pub(super) fn refused(&mut self, by_source: bool) -> &mut Refused {
        if by_source { &mut self.refused_there } else { &mut self.refused }
    }

    /// Why `message` is not to be tried now, by either socket, if it is not; the trickle aside.
    #[inline]
    fn reason(
        &mut self,
        config: &WorkerConfig,
        context: &Context<'_>,
        message: &Message,
        is_spread: bool,
    ) -> Option<DropReason> {
        let host = message.destination.host;
        if self.unresolved.load().contains(&host) {
            return Some(DropReason::SendUnresolved);
        }
        if let Some(reason) = self.refused.reason(host, context.now_ns) {
            return Some(reason);
        }
        // It may be for nobody: what waits for a neighbour that does not answer takes up the send
        // buffer for seconds, and enough of such hosts would leave the others none.
        let team = || config.team.iter().map(|worker| &**worker);
        let is_unanswered = config.stats.by_peer.is_unanswered(
            host,
            (message.segments.into(), message.bytes.into()),
            context.now_ns,
            || WorkerStats::traffic(team(), host).packets_received,
            || self.heard.load().contains(&host),
        );
        if !is_unanswered {
            return None;
        }
        let is_roomy = &mut self.is_roomy[usize::from(is_spread)];
        let is_roomy = *is_roomy.get_or_insert_with(|| config.socket.is_roomy(is_spread));
        (!is_roomy).then_some(DropReason::SendUnanswered)
    }

    /// What came of offering `messages` to the kernel: how many it took, or what it said to the
    /// first.
    pub(super) fn learn(
        &mut self,
        by_source: bool,
        messages: &[Message],
        sent: &io::Result<usize>,
        now_ns: u64,
    ) {
        let owed = std::mem::take(&mut self.owed);
        if matches!(sent, Ok(1..)) {
            self.trickle.spend(owed);
        }
        let refused = self.refused(by_source);
        match (sent, messages.first()) {
            (Ok(count), _) => {
                let went = messages.iter().take(*count);
                went.for_each(|message| refused.went(message.destination.host));
            }
            // A batch that is refused in its form is sent in another one first.
            (Err(error), Some(Message { destination, segments, .. })) => {
                if let SendError::Drop(reason) = classify_send_error(error, *segments > 1) {
                    refused.note(destination.host, reason, now_ns);
                }
            }
            (Err(_), None) => {}
        }
    }
}

/// A token bucket.
#[derive(Debug, Default)]
struct Trickle {
    bytes: u64,
    at_ns: u64,
}

impl Trickle {
    fn has(&mut self, bytes: u64, now_ns: u64) -> bool {
        // Of more than a second nothing is left over.
        let since_ns = now_ns.saturating_sub(self.at_ns).min(1_000_000_000);
        let more = TRICKLE_BYTES_PER_SECOND * since_ns / 1_000_000_000;
        if more > 0 {
            (self.bytes, self.at_ns) = ((self.bytes + more).min(TRICKLE_BYTES_MAX), now_ns);
        }
        self.bytes >= bytes
    }

    fn spend(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// What a message takes up in the send buffer.
fn in_buffer(message: &Message) -> u64 {
    u64::from(message.bytes) + PACKET_OVERHEAD * u64::from(message.segments)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::engine::Engine;
    use crate::engine::contain::tests::Scene;
    use crate::forward::tests::FAR;
    use crate::offload::SendPlan;
    use crate::packet::Span;
    use crate::route::Endpoint;

    #[test]
    fn what_is_held_back_trickles() {
        let mut trickle = Trickle::default();
        let start_ns = 7_000_000_000;
        let mut taken = 0;
        for step in 0..100_000 {
            // 10 seconds of 10,000 messages each.
            if trickle.has(2000, start_ns + step * 100_000) {
                trickle.spend(2000);
                taken += 2000;
            }
        }
        let most = TRICKLE_BYTES_MAX + 10 * TRICKLE_BYTES_PER_SECOND;
        assert!((most * 8 / 10..=most).contains(&taken), "{taken} bytes of {most}");
        assert!(trickle.has(100_000, u64::MAX), "a message of the largest size never goes");
    }

    #[test]
    fn the_trickle_is_spent_by_what_is_sent() {
        let (_scene, config) = Scene::new(Some(Engine::Mmsg));
        let (table, mut offers) = (config.routes.table.load(), Offers::new(&config));
        let silent = table.endpoint(FAR).unwrap();
        config.stats.by_peer.sent(silent.host, 1_000_000, 100_000_000, false);
        let other = Endpoint { host: Ipv4Addr::new(127, 0, 0, 9).into(), port: 8285 };
        // Of two of these the trickle has never gathered enough.
        let (mut plan, long) = (SendPlan::new(1), Span::new(0, 65_000));
        for destination in [silent, other, silent, other] {
            plan.push(destination, [Span::default(), long]).unwrap();
        }
        let messages = plan.messages();
        let (local, icmp_limit) = (&config.local, &config.icmp_limit);
        let (stats, now_ns) = (&config.stats.egress, 60_000_000_000);
        let context = Context { local, table: &table, stats, icmp_limit, now_ns };
        offers.is_roomy = [Some(false); 2];
        for _ in 0..10 {
            let next = offers.next(&config, &context, &messages[1..]);
            assert_eq!(next, Ok((1, false)), "looked at, and not offered");
            assert_eq!(offers.next(&config, &context, messages), Ok((2, false)));
        }
        let full = Err(io::Error::from(rustix::io::Errno::AGAIN));
        offers.learn(false, messages, &full, now_ns);
        assert_eq!(offers.next(&config, &context, messages), Ok((2, false)));
        offers.learn(false, messages, &Ok(2), now_ns);
        let withheld = Err(DropReason::SendUnanswered);
        assert_eq!(offers.next(&config, &context, &messages[2..]), withheld, "it has gone");
        assert_eq!(offers.next(&config, &context, &messages[3..]), Ok((1, false)));
    }
}
