//! Gathers datagrams into GSO batches: equal-sized datagrams to one peer that leave in one send
//! (UDP_SEGMENT), the last one possibly shorter.
//!
//! Order is kept per peer, hence per flow: a datagram joins its peer's latest message or begins a
//! new one, and messages are sent in the order in which they were begun. A message stays open
//! across super-packets, so a 45-segment super-packet and its successor leave as 44 + 44 + …, not
//! as 44 + 1 + 44 + 1.

use crate::packet::Span;
use crate::route::Endpoint;

use super::Full;

/// Datagrams in one message: the kernel's UDP_MAX_SEGMENTS since 6.9 (include/linux/udp.h). Older
/// kernels take 64; the plan is told what was probed.
pub const SEGMENTS_MAX: usize = 128;

/// Payload bytes in one send: the largest UDP datagram over IPv4, which also bounds a GSO batch.
const MESSAGE_BYTES_MAX: usize = 65_507;

/// Spans of one message: a header and a payload for each segment. Below UIO_MAXIOV (1024).
pub const SPANS_PER_MESSAGE: usize = 2 * SEGMENTS_MAX;

/// Messages in one plan. One batch reads at most 64 packets, and each begins at most one message
/// more than it fills, so a batch of plain packets fits; a batch that cuts tiny segments is sent
/// in several rounds.
pub const MESSAGES_MAX: usize = 64;

/// The latest messages, which a datagram may still join: as many peers get GSO batches while their
/// packets alternate.
const OPEN_MESSAGES_MAX: usize = 16;

/// Destinations remembered as refusing GSO. When one more does, GSO ends for all.
const SINGLE_DESTINATIONS_MAX: usize = 64;

/// One send: a datagram, or a GSO batch of datagrams of `segment_bytes`, the last possibly shorter.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// The peer's tunnel endpoint.
    pub destination: Endpoint,
    /// Bytes of each datagram but the last.
    pub segment_bytes: u16,
    /// Datagrams.
    pub segments: u16,
    /// Bytes of all datagrams.
    pub bytes: u32,
    segments_max: u16,
    spans: u16,
    /// Nothing may be added.
    is_closed: bool,
}

/// A bounded set of messages under construction.
#[derive(Debug)]
pub struct SendPlan {
    segments_max: u16,
    /// What each datagram becomes longer by, at most, before it is sent.
    growth_bytes: u16,
    messages: Vec<Message>,
    /// INVARIANT: message `i` owns the first `message.spans` of `spans[i]`.
    spans: Box<[[Span; SPANS_PER_MESSAGE]]>,
    single_destinations: Vec<Endpoint>,
    /// More destinations refused than are remembered, so none gets GSO.
    all_single: bool,
}

impl SendPlan {
    /// An empty plan of messages of at most `segments_max` datagrams, 1 without GSO; allocates all
    /// that it will ever need.
    pub fn new(segments_max: u16) -> Self {
        Self {
            segments_max,
            growth_bytes: 0,
            messages: Vec::with_capacity(MESSAGES_MAX),
            spans: vec![[Span::default(); SPANS_PER_MESSAGE]; MESSAGES_MAX].into_boxed_slice(),
            single_destinations: Vec::with_capacity(SINGLE_DESTINATIONS_MAX),
            all_single: false,
        }
    }

    /// The same for datagrams that [`Self::replace`] makes longer by up to `growth_bytes` each.
    pub fn growing_by(segments_max: u16, growth_bytes: u16) -> Self {
        Self { growth_bytes, ..Self::new(segments_max) }
    }

    /// The kernel refused GSO to `destination`: from the next message on it gets single datagrams,
    /// until [`Self::allow_gso`].
    pub fn refuse_gso(&mut self, destination: Endpoint) {
        if self.single_destinations.contains(&destination) {
            return;
        }
        if self.single_destinations.len() == SINGLE_DESTINATIONS_MAX {
            self.all_single = true;
            return;
        }
        self.single_destinations.push(destination);
    }

    /// Forgets which destinations refused GSO, so that it is tried again.
    pub fn allow_gso(&mut self) {
        self.single_destinations.clear();
        self.all_single = false;
    }

    /// Whether a datagram in a new message would still fit.
    pub fn has_room(&self) -> bool {
        self.messages.len() < MESSAGES_MAX
    }

    /// Adds the datagram made of two spans, of which the first may be empty.
    pub fn push(&mut self, destination: Endpoint, datagram: [Span; 2]) -> Result<(), Full> {
        // Mostly it goes where the one before went.
        if self.segments_max > 1
            && let Some(index) = self.latest(destination)
            && let Some(message) = self.messages.get_mut(index)
            && message.fits(bytes_of(datagram))
            && let Some(spans) = self.spans.get_mut(index)
        {
            message.append(spans, datagram);
            return Ok(());
        }
        self.begin(destination, datagram)
    }

    /// The latest message to `destination` that is still open.
    #[inline]
    fn latest(&self, destination: Endpoint) -> Option<usize> {
        let last = self.messages.len().checked_sub(1)?;
        if self.messages.get(last)?.destination == destination {
            return Some(last);
        }
        let first = last.saturating_sub(OPEN_MESSAGES_MAX - 1);
        let others = self.messages.get(first..last)?;
        let at = others.iter().rposition(|message| message.destination == destination)?;
        Some(first + at)
    }

    #[inline(never)]
    fn begin(&mut self, destination: Endpoint, datagram: [Span; 2]) -> Result<(), Full> {
        let segment_bytes = bytes_of(datagram) as u16;
        let segments_max = self.segments_that_fit(segment_bytes);
        let spans = self.spans.get_mut(self.messages.len()).ok_or(Full)?;
        let is_single = self.all_single || self.single_destinations.contains(&destination);
        let mut message = Message {
            destination,
            segment_bytes,
            segments: 0,
            bytes: 0,
            segments_max: if is_single { 1 } else { segments_max },
            spans: 0,
            is_closed: false,
        };
        message.append(spans, datagram);
        self.messages.push(message);
        Ok(())
    }

    /// Datagrams of so many bytes that one message takes, once they have grown.
    fn segments_that_fit(&self, segment_bytes: u16) -> u16 {
        if self.growth_bytes == 0 {
            // Which message is full is seen when one is added.
            return self.segments_max;
        }
        let grown_bytes = usize::from(segment_bytes) + usize::from(self.growth_bytes);
        self.segments_max.min((MESSAGE_BYTES_MAX / grown_bytes) as u16).max(1)
    }

    /// Has the datagrams of message `index` lie in `span` from now on, one behind the other, each
    /// but the last of `segment_bytes`.
    pub fn replace(&mut self, index: usize, span: Span, segment_bytes: u16) {
        let message = self.messages.get_mut(index).zip(self.spans.get_mut(index));
        if let Some((message, [first, ..])) = message {
            *first = span;
            (message.spans, message.is_closed) = (1, true);
            (message.segment_bytes, message.bytes) = (segment_bytes, span.bytes);
        }
    }

    /// The messages, in the order in which they must be sent.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The spans of message `index`, in order.
    pub fn spans(&self, index: usize) -> &[Span] {
        let message = self.messages.get(index).zip(self.spans.get(index));
        let spans = message.and_then(|(message, spans)| spans.get(..message.spans.into()));
        spans.unwrap_or_default()
    }

    /// The datagrams of message `index`, each in one span or two, as it was pushed: for a kernel
    /// that refuses them as one message.
    pub fn datagrams(&self, index: usize) -> impl Iterator<Item = [Span; 2]> {
        let message = self.messages.get(index);
        let segment_bytes = message.map_or(0, |message| u32::from(message.segment_bytes));
        let mut spans = self.spans(index).iter().copied();
        let mut rest = Span::default();
        std::iter::from_fn(move || {
            let mut wanted_bytes = segment_bytes;
            let datagram = [(), ()].map(|()| {
                if rest.bytes == 0 {
                    rest = spans.next().unwrap_or_default();
                }
                let part = Span { bytes: rest.bytes.min(wanted_bytes), ..rest };
                wanted_bytes -= part.bytes;
                rest = Span { offset: part.end(), bytes: rest.bytes - part.bytes };
                part
            });
            let [first, _] = datagram;
            (first.bytes > 0).then_some(datagram)
        })
    }

    /// Forgets everything; the arena's bytes may be reused.
    pub fn clear(&mut self) {
        self.messages.clear();
    }
}

impl Message {
    /// Whether a datagram of `bytes` may be the message's next.
    fn fits(&self, bytes: u32) -> bool {
        !self.is_closed
            && bytes <= u32::from(self.segment_bytes)
            && self.segments < self.segments_max
            && usize::from(self.spans) + 2 <= SPANS_PER_MESSAGE
            && (self.bytes + bytes) as usize <= MESSAGE_BYTES_MAX
    }

    fn append(&mut self, spans: &mut [Span; SPANS_PER_MESSAGE], datagram: [Span; 2]) {
        let mut used = usize::from(self.spans);
        for span in datagram {
            if span.bytes == 0 {
                continue;
            }
            // Packets read back to back lie back to back: one span, one iovec.
            match spans.get_mut(used.wrapping_sub(1)) {
                Some(last) if last.end() == span.offset => last.bytes += span.bytes,
                Some(_) | None => {
                    if let Some(place) = spans.get_mut(used) {
                        *place = span;
                        used += 1;
                    }
                }
            }
        }
        self.spans = used as u16;
        let bytes = bytes_of(datagram);
        self.bytes += bytes;
        self.segments += 1;
        self.is_closed = bytes < u32::from(self.segment_bytes);
    }
}

fn bytes_of([header, payload]: [Span; 2]) -> u32 {
    header.bytes + payload.bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::HostKey;

    const A: Endpoint = endpoint(1);
    const B: Endpoint = endpoint(2);

    const fn endpoint(index: usize) -> Endpoint {
        Endpoint { host: HostKey::of_index(index), port: 8285 }
    }

    fn plan(segments_max: u16) -> SendPlan {
        SendPlan::new(segments_max)
    }

    fn shape(plan: &SendPlan) -> Vec<(Endpoint, u16, u16)> {
        plan.messages().iter().map(|m| (m.destination, m.segment_bytes, m.segments)).collect()
    }

    fn push(plan: &mut SendPlan, to: Endpoint, offset: usize, bytes: usize) {
        plan.push(to, [Span::default(), Span::new(offset, bytes)]).unwrap();
    }

    #[test]
    fn a_batch_stays_open_across_super_packets() {
        let mut plan = plan(64);
        for segment in 0..90 {
            plan.push(A, [Span::new(segment * 52, 52), Span::new(10_000 + segment * 1500, 1420)])
                .unwrap();
        }
        assert_eq!(shape(&plan), [(A, 1472, 44), (A, 1472, 44), (A, 1472, 2)]);
    }

    #[test]
    fn a_shorter_datagram_ends_a_batch() {
        let mut plan = plan(64);
        for (offset, bytes) in [(0, 100), (1000, 100), (2000, 60), (3000, 100), (4000, 200)] {
            push(&mut plan, A, offset, bytes);
        }
        assert_eq!(shape(&plan), [(A, 100, 3), (A, 100, 1), (A, 200, 1)]);
        assert_eq!(plan.spans(0), [Span::new(0, 100), Span::new(1000, 100), Span::new(2000, 60)]);
    }

    #[test]
    fn interleaved_peers_keep_a_batch_each() {
        let mut plan = plan(64);
        for round in 0..3 {
            push(&mut plan, A, round * 1000, 80);
            push(&mut plan, B, round * 1000 + 500, 90);
        }
        assert_eq!(shape(&plan), [(A, 80, 3), (B, 90, 3)]);
    }

    #[test]
    fn packets_read_back_to_back_become_one_span() {
        let mut plan = plan(64);
        for index in 0..64 {
            push(&mut plan, A, index * 92, 92);
        }
        assert_eq!(shape(&plan), [(A, 92, 64)]);
        assert_eq!(plan.spans(0), [Span::new(0, 64 * 92)]);
        let datagrams: Vec<_> =
            plan.datagrams(0).map(|[first, second]| (first, second.bytes)).collect();
        let expected: Vec<_> = (0..64).map(|i| (Span::new(i * 92, 92), 0)).collect();
        assert_eq!(datagrams, expected);
    }

    #[test]
    fn a_refused_batch_falls_apart_into_its_datagrams() {
        let mut plan = plan(64);
        plan.push(A, [Span::new(0, 20), Span::new(100, 80)]).unwrap();
        plan.push(A, [Span::new(20, 20), Span::new(180, 80)]).unwrap();
        plan.push(A, [Span::new(40, 20), Span::new(260, 5)]).unwrap();
        let expected = [(0, 100, 80), (20, 180, 80), (40, 260, 5)]
            .map(|(header, payload, bytes)| [Span::new(header, 20), Span::new(payload, bytes)]);
        assert_eq!(plan.datagrams(0).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn only_a_refusing_destination_gets_single_datagrams() {
        let mut plan = plan(64);
        plan.refuse_gso(A);
        for round in 0..2 {
            push(&mut plan, A, round * 1000, 80);
            push(&mut plan, B, round * 1000 + 500, 80);
        }
        assert_eq!(shape(&plan), [(A, 80, 1), (B, 80, 2), (A, 80, 1)]);
        plan.clear();
        plan.allow_gso();
        push(&mut plan, A, 0, 80);
        push(&mut plan, A, 1000, 80);
        assert_eq!(shape(&plan), [(A, 80, 2)]);
    }

    #[test]
    fn too_many_refusing_destinations_end_gso_for_all() {
        let mut plan = plan(64);
        for host in 0..=SINGLE_DESTINATIONS_MAX {
            plan.refuse_gso(endpoint(10 + host));
        }
        push(&mut plan, B, 0, 80);
        push(&mut plan, B, 1000, 80);
        assert_eq!(shape(&plan), [(B, 80, 1), (B, 80, 1)]);
        plan.clear();
        plan.allow_gso();
        push(&mut plan, B, 0, 80);
        push(&mut plan, B, 1000, 80);
        assert_eq!(shape(&plan), [(B, 80, 2)], "GSO never came back");
    }

    #[test]
    fn without_gso_every_datagram_is_a_message() {
        let mut plan = plan(1);
        for index in 0..MESSAGES_MAX {
            push(&mut plan, A, index * 100, 100);
        }
        assert_eq!(plan.push(A, [Span::default(), Span::new(0, 100)]), Err(Full));
        assert_eq!(plan.messages().len(), MESSAGES_MAX);
        plan.clear();
        push(&mut plan, A, 0, 100);
        assert_eq!(shape(&plan), [(A, 100, 1)]);
    }
}
