//! What the datagrams of `traffic` carry. Pure: bytes in, values out.

/// Longest payload: an IPv4 packet of 1500 bytes without its headers.
pub(crate) const DATAGRAM_BYTES_MAX: usize = 1500 - IP_UDP_BYTES;
/// IPv4 header and UDP header of an inner packet.
pub(crate) const IP_UDP_BYTES: usize = 28;
/// Shortest payload.
pub(crate) const HEADER_BYTES: usize = 24;
/// Payload of the sink's answer.
pub(crate) const ANSWER_BYTES: usize = HEADER_BYTES + 16;
/// Flows that one trial may have.
pub(crate) const FLOWS_MAX: usize = 64;

/// What a datagram is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To be counted.
    Data,
    /// Asks for the counts of a trial; also marks the answer.
    Count,
    /// To be echoed.
    Ping,
}

/// The first bytes of every datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Which run of the sender it belongs to.
    pub(crate) trial: u32,
    /// Which of the trial's flows; each counts its sequence from 0.
    pub(crate) flow: u32,
    pub(crate) sequence: u64,
}

const MAGIC: u32 = u32::from_be_bytes(*b"wft\0");

impl Header {
    pub(crate) fn encode(self) -> [u8; HEADER_BYTES] {
        let kind = match self.kind {
            Kind::Data => 1,
            Kind::Count => 2,
            Kind::Ping => 3,
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&(MAGIC | kind).to_be_bytes());
        bytes[4..8].copy_from_slice(&self.trial.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.flow.to_be_bytes());
        bytes[16..].copy_from_slice(&self.sequence.to_be_bytes());
        bytes
    }

    /// `None` for what is not ours.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let word = |at: usize| bytes[at..].first_chunk().map(|word| u32::from_be_bytes(*word));
        let kind = match word(0)? ^ MAGIC {
            1 => Kind::Data,
            2 => Kind::Count,
            3 => Kind::Ping,
            _ => return None,
        };
        let sequence = u64::from_be_bytes(*bytes.last_chunk()?);
        Some(Self { kind, trial: word(4)?, flow: word(8)?, sequence })
    }
}

/// What the sink saw of one trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) trial: u32,
    pub(crate) received: u64,
    /// Came after a later one of their flow, or again.
    pub(crate) reordered: u64,
    next: [u64; FLOWS_MAX],
}

impl Tally {
    pub(crate) fn new(trial: u32) -> Self {
        Self { trial, received: 0, reordered: 0, next: [0; FLOWS_MAX] }
    }

    /// Counts a datagram; the first one of another trial begins anew.
    pub(crate) fn count(&mut self, header: &Header) {
        if header.trial != self.trial {
            *self = Self::new(header.trial);
        }
        let Some(next) = self.next.get_mut(header.flow as usize) else { return };
        self.received += 1;
        if header.sequence < *next {
            self.reordered += 1;
        } else {
            *next = header.sequence + 1;
        }
    }

    /// The answer to a question about `trial`: zeros if nothing of it has come.
    pub(crate) fn answer(&self, question: Header) -> [u8; ANSWER_BYTES] {
        let known = question.trial == self.trial;
        let (received, reordered) = if known { (self.received, self.reordered) } else { (0, 0) };
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&question.encode());
        bytes[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&received.to_be_bytes());
        bytes[HEADER_BYTES + 8..].copy_from_slice(&reordered.to_be_bytes());
        bytes
    }
}

/// Received and reordered, out of an answer to `question`; `None` if it is none.
pub(crate) fn counts(answer: &[u8], question: Header) -> Option<(u64, u64)> {
    let answer: &[u8; ANSWER_BYTES] = answer.try_into().ok()?;
    let number = |at: usize| answer[at..].first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
    (Header::decode(answer)? == question)
        .then_some((number(HEADER_BYTES)?, number(HEADER_BYTES + 8)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(trial: u32, flow: u32, sequence: u64) -> Header {
        Header { kind: Kind::Data, trial, flow, sequence }
    }

    #[test]
    fn header_round_trips_noise_is_refused() {
        for kind in [Kind::Data, Kind::Count, Kind::Ping] {
            let header = Header { kind, trial: 7, flow: 3, sequence: u64::MAX - 1 };
            assert_eq!(Header::decode(&header.encode()), Some(header));
            assert_eq!(Header::decode(&header.encode()[..HEADER_BYTES - 1]), None);
        }
        assert_eq!(Header::decode(&[0; 64]), None);
        assert_eq!(Header::decode(&[0x77; 64]), None);
    }

    #[test]
    fn loss_reordering_repetition_are_distinguished_per_flow() {
        let mut tally = Tally::new(0);
        for (flow, sequence) in [(0, 0), (0, 1), (1, 0), (0, 4), (0, 3), (1, 1), (0, 4)] {
            tally.count(&data(9, flow, sequence));
        }
        assert_eq!((tally.trial, tally.received, tally.reordered), (9, 7, 2));
        tally.count(&data(10, 0, 5));
        assert_eq!((tally.trial, tally.received, tally.reordered), (10, 1, 0));
        tally.count(&data(10, FLOWS_MAX as u32, 0));
        assert_eq!(tally.received, 1, "a flow beyond the limit is none of ours");
    }

    #[test]
    fn answer_reads_back_and_matches_its_question() {
        let mut tally = Tally::new(4);
        tally.count(&data(4, 0, 2));
        tally.count(&data(4, 0, 1));
        let question = |trial, sequence| Header { kind: Kind::Count, trial, flow: 0, sequence };
        let answer = tally.answer(question(4, 1));
        assert_eq!(counts(&answer, question(4, 1)), Some((2, 1)));
        assert_eq!(counts(&answer, question(4, 2)), None, "a late answer to an earlier question");
        assert_eq!(counts(&tally.answer(question(5, 1)), question(5, 1)), Some((0, 0)));
        assert_eq!(counts(&answer[1..], question(4, 1)), None);
    }
}
