//! Gathers datagrams into trains: equal-sized datagrams to one peer that leave in one send
//! (UDP_SEGMENT), the last one possibly shorter.
//!
//! Order is kept per peer, hence per flow: each peer has at most one open train, a datagram that
//! doesn't fit it seals it, and trains are sent in the order in which they were opened. A train
//! stays open across super-packets, so a 45-segment super-packet and its successor leave as
//! 44 + 44 + …, not as 44 + 1 + 44 + 1.

use std::net::SocketAddrV4;

use super::{Full, Piece};

/// Datagrams in one train: the kernel's UDP_MAX_SEGMENTS since 6.9 (include/linux/udp.h).
/// Older kernels take 64; [`SendLimits`] carries what was probed.
pub const SEGMENTS_MAX: usize = 128;

/// Payload bytes in one send: the largest UDP datagram over IPv4, which also bounds a train.
const TRAIN_BYTES_MAX: usize = 65_507;

/// Ranges of one train: a header and a payload for each segment. Below UIO_MAXIOV (1024).
pub const PIECES_PER_MESSAGE: usize = 2 * SEGMENTS_MAX;

/// Trains in one plan. One batch reads at most 64 packets, and each opens at most one train more
/// than it fills, so a batch of plain packets fits; a batch that cuts tiny segments is sent in
/// several rounds.
pub const MESSAGES_MAX: usize = 64;

/// Peers whose trains are open at once. The oldest is sealed when one more comes.
const OPEN_TRAINS_MAX: usize = 16;

/// Peers remembered as refusing trains. When one more does, trains end for all.
const SINGLE_DESTINATIONS_MAX: usize = 64;

/// What one send may hold, as probed from the kernel and lowered when it refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendLimits {
    /// Datagrams in one train, 1 when trains are off.
    pub segments_max: u16,
}

impl SendLimits {
    /// One datagram a send.
    pub const SINGLE: Self = Self { segments_max: 1 };
}

/// One send: a datagram, or a train of datagrams of `segment_bytes`, the last possibly shorter.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// The peer's tunnel endpoint.
    pub destination: SocketAddrV4,
    /// Bytes of each datagram but the last.
    pub segment_bytes: u16,
    /// Datagrams.
    pub segments: u16,
    /// Bytes of all datagrams.
    pub bytes: u32,
    segments_max: u16,
    pieces: u16,
    sealed: bool,
}

/// A bounded set of trains under construction.
#[derive(Debug)]
pub struct SendPlan {
    limits: SendLimits,
    messages: Vec<Message>,
    /// INVARIANT: message `i` owns the first `message.pieces` of `pieces[i]`.
    pieces: Box<[[Piece; PIECES_PER_MESSAGE]]>,
    /// INVARIANT: at most one per destination, each that destination's latest message.
    open: Vec<OpenTrain>,
    /// Which of them was used last: mostly the next packet goes there too.
    open_latest: usize,
    /// Which of them is the oldest, once there are [`OPEN_TRAINS_MAX`].
    open_oldest: usize,
    single_destinations: Vec<SocketAddrV4>,
    /// More destinations refused than are remembered, so none gets trains.
    all_single: bool,
}

#[derive(Debug, Clone, Copy)]
struct OpenTrain {
    destination: SocketAddrV4,
    message: u16,
}

impl SendPlan {
    /// An empty plan; allocates all that it will ever need.
    #[must_use]
    pub fn new(limits: SendLimits) -> Self {
        Self {
            limits,
            messages: Vec::with_capacity(MESSAGES_MAX),
            pieces: vec![[Piece::default(); PIECES_PER_MESSAGE]; MESSAGES_MAX].into_boxed_slice(),
            open: Vec::with_capacity(OPEN_TRAINS_MAX),
            open_latest: 0,
            open_oldest: 0,
            single_destinations: Vec::with_capacity(SINGLE_DESTINATIONS_MAX),
            all_single: false,
        }
    }

    /// The kernel refused a train to `destination`: from the next one on it gets single
    /// datagrams, until [`Self::allow_trains`].
    pub fn refuse_trains(&mut self, destination: SocketAddrV4) {
        if self.single_destinations.contains(&destination) {
            return;
        }
        if self.single_destinations.len() == SINGLE_DESTINATIONS_MAX {
            self.all_single = true;
            return;
        }
        self.single_destinations.push(destination);
    }

    /// Forgets which destinations refused trains, so that they are tried again.
    pub fn allow_trains(&mut self) {
        self.single_destinations.clear();
        self.all_single = false;
    }

    /// Whether a datagram in a new train would still fit.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.messages.len() < MESSAGES_MAX
    }

    /// Adds the datagram made of `header`, which may be empty, and `payload`.
    pub fn push(
        &mut self,
        destination: SocketAddrV4,
        header: Piece,
        payload: Piece,
    ) -> Result<(), Full> {
        if self.limits.segments_max == 1 {
            return self.begin(destination, header, payload).map(|_| ());
        }
        let open = self.open_at(destination);
        if let Some((at, train)) = open {
            self.open_latest = at;
            if self.joins(train, header, payload) {
                return Ok(());
            }
        }
        let message = self.begin(destination, header, payload)?;
        self.open_train(open.map(|(at, _)| at), OpenTrain { destination, message });
        Ok(())
    }

    /// Begins a message with one datagram.
    fn begin(
        &mut self,
        destination: SocketAddrV4,
        header: Piece,
        payload: Piece,
    ) -> Result<u16, Full> {
        let index = self.messages.len();
        let pieces = self.pieces.get_mut(index).ok_or(Full)?;
        let mut message = Message {
            destination,
            segment_bytes: (header.bytes + payload.bytes) as u16,
            segments: 0,
            bytes: 0,
            segments_max: self.limits.segments_max,
            pieces: 0,
            sealed: false,
        };
        if self.all_single || self.single_destinations.contains(&destination) {
            message.segments_max = 1;
        }
        message.append(pieces, header, payload);
        self.messages.push(message);
        Ok(index as u16)
    }

    /// Makes `train` the open one of its destination, in place of the one at `open_at`.
    fn open_train(&mut self, open_at: Option<usize>, train: OpenTrain) {
        self.open_latest = match open_at {
            Some(at) => at,
            None if self.open.len() < OPEN_TRAINS_MAX => {
                self.open.push(train);
                return self.open_latest = self.open.len() - 1;
            }
            None => {
                let oldest = self.open_oldest;
                self.open_oldest = (oldest + 1) % OPEN_TRAINS_MAX;
                oldest
            }
        };
        if let Some(place) = self.open.get_mut(self.open_latest) {
            *place = train;
        }
    }

    fn open_at(&self, destination: SocketAddrV4) -> Option<(usize, OpenTrain)> {
        let is_it = |train: &OpenTrain| train.destination == destination;
        if let Some(latest) = self.open.get(self.open_latest).filter(|train| is_it(train)) {
            return Some((self.open_latest, *latest));
        }
        let at = self.open.iter().position(is_it)?;
        Some((at, *self.open.get(at)?))
    }

    /// Appends the datagram to an open train, if it fits.
    fn joins(&mut self, train: OpenTrain, header: Piece, payload: Piece) -> bool {
        let index = usize::from(train.message);
        let message = self.messages.get_mut(index);
        let Some((message, pieces)) = message.zip(self.pieces.get_mut(index)) else { return false };
        let fits = message.fits(header.bytes + payload.bytes);
        if fits {
            message.append(pieces, header, payload);
        }
        fits
    }

    /// The trains, in the order in which they must be sent.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The ranges of train `index`, in order.
    #[must_use]
    pub fn pieces(&self, index: usize) -> &[Piece] {
        let message = self.messages.get(index).zip(self.pieces.get(index));
        let pieces = message.and_then(|(message, pieces)| pieces.get(..message.pieces.into()));
        pieces.unwrap_or_default()
    }

    /// Calls `each` with the ranges of every datagram of train `index`, one call a datagram: for
    /// a kernel that refuses the train and gets the same datagrams one by one.
    pub fn for_each_datagram(&self, index: usize, mut each: impl FnMut(&[Piece])) {
        let Some(message) = self.messages.get(index) else { return };
        let segment_bytes = u32::from(message.segment_bytes);
        let mut datagram = [Piece::default(); PIECES_PER_MESSAGE];
        let (mut used, mut gathered_bytes) = (0, 0);
        for &piece in self.pieces(index) {
            let mut rest = piece;
            while rest.bytes > 0 {
                let take_bytes = rest.bytes.min(segment_bytes - gathered_bytes);
                if let Some(place) = datagram.get_mut(used) {
                    *place = Piece { offset: rest.offset, bytes: take_bytes };
                }
                used += 1;
                gathered_bytes += take_bytes;
                rest = Piece { offset: rest.offset + take_bytes, bytes: rest.bytes - take_bytes };
                if gathered_bytes == segment_bytes {
                    each(datagram.get(..used).unwrap_or_default());
                    (used, gathered_bytes) = (0, 0);
                }
            }
        }
        if used > 0 {
            each(datagram.get(..used).unwrap_or_default());
        }
    }

    /// Forgets everything; the arena's ranges may be reused.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.open.clear();
        (self.open_latest, self.open_oldest) = (0, 0);
    }
}

impl Message {
    /// Whether a datagram of `bytes` may be the train's next.
    fn fits(&self, bytes: u32) -> bool {
        !self.sealed
            && bytes <= u32::from(self.segment_bytes)
            && self.segments < self.segments_max
            && usize::from(self.pieces) + 2 <= PIECES_PER_MESSAGE
            && (self.bytes + bytes) as usize <= TRAIN_BYTES_MAX
    }

    fn append(&mut self, pieces: &mut [Piece; PIECES_PER_MESSAGE], header: Piece, payload: Piece) {
        let mut used = usize::from(self.pieces);
        for piece in [header, payload] {
            if piece.bytes == 0 {
                continue;
            }
            // Packets read back to back lie back to back: one range, one iovec.
            match pieces.get_mut(used.wrapping_sub(1)) {
                Some(last) if last.end() == piece.offset => last.bytes += piece.bytes,
                Some(_) | None => {
                    if let Some(place) = pieces.get_mut(used) {
                        *place = piece;
                        used += 1;
                    }
                }
            }
        }
        self.pieces = used as u16;
        let bytes = header.bytes + payload.bytes;
        self.bytes += bytes;
        self.segments += 1;
        self.sealed = bytes < u32::from(self.segment_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const A: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 8285);
    const B: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 2), 8285);

    fn plan(segments_max: u16) -> SendPlan {
        SendPlan::new(SendLimits { segments_max })
    }

    fn shape(plan: &SendPlan) -> Vec<(SocketAddrV4, u16, u16)> {
        plan.messages().iter().map(|m| (m.destination, m.segment_bytes, m.segments)).collect()
    }

    fn push(plan: &mut SendPlan, to: SocketAddrV4, offset: usize, bytes: usize) {
        plan.push(to, Piece::default(), Piece::new(offset, bytes)).unwrap();
    }

    #[test]
    fn two_45_segment_super_packets_leave_as_44_44_2_and_not_44_1_44_1() {
        let mut plan = plan(64);
        for segment in 0..90 {
            plan.push(A, Piece::new(segment * 52, 52), Piece::new(10_000 + segment * 1500, 1420))
                .unwrap();
        }
        assert_eq!(shape(&plan), [(A, 1472, 44), (A, 1472, 44), (A, 1472, 2)]);
    }

    #[test]
    fn a_shorter_datagram_ends_a_train_and_a_longer_one_starts_another() {
        let mut plan = plan(64);
        for (offset, bytes) in [(0, 100), (1000, 100), (2000, 60), (3000, 100), (4000, 200)] {
            push(&mut plan, A, offset, bytes);
        }
        assert_eq!(shape(&plan), [(A, 100, 3), (A, 100, 1), (A, 200, 1)]);
        assert_eq!(
            plan.pieces(0),
            [Piece::new(0, 100), Piece::new(1000, 100), Piece::new(2000, 60)]
        );
    }

    #[test]
    fn interleaved_peers_keep_a_train_each() {
        let mut plan = plan(64);
        for round in 0..3 {
            push(&mut plan, A, round * 1000, 80);
            push(&mut plan, B, round * 1000 + 500, 90);
        }
        assert_eq!(shape(&plan), [(A, 80, 3), (B, 90, 3)]);
    }

    #[test]
    fn packets_read_back_to_back_become_one_range() {
        let mut plan = plan(64);
        for index in 0..64 {
            push(&mut plan, A, index * 92, 92);
        }
        assert_eq!(shape(&plan), [(A, 92, 64)]);
        assert_eq!(plan.pieces(0), [Piece::new(0, 64 * 92)]);
        let mut datagrams = Vec::new();
        plan.for_each_datagram(0, |pieces| datagrams.push(pieces.to_vec()));
        let expected: Vec<_> = (0..64).map(|i| vec![Piece::new(i * 92, 92)]).collect();
        assert_eq!(datagrams, expected);
    }

    #[test]
    fn a_refused_train_falls_apart_into_its_datagrams() {
        let mut plan = plan(64);
        plan.push(A, Piece::new(0, 20), Piece::new(100, 80)).unwrap();
        plan.push(A, Piece::new(20, 20), Piece::new(180, 80)).unwrap();
        plan.push(A, Piece::new(40, 20), Piece::new(260, 5)).unwrap();
        let mut datagrams = Vec::new();
        plan.for_each_datagram(0, |pieces| datagrams.push(pieces.to_vec()));
        assert_eq!(
            datagrams,
            [
                vec![Piece::new(0, 20), Piece::new(100, 80)],
                vec![Piece::new(20, 20), Piece::new(180, 80)],
                vec![Piece::new(40, 20), Piece::new(260, 5)],
            ]
        );
    }

    #[test]
    fn a_destination_that_refused_a_train_gets_single_datagrams_and_others_keep_theirs() {
        let mut plan = plan(64);
        plan.refuse_trains(A);
        for round in 0..2 {
            push(&mut plan, A, round * 1000, 80);
            push(&mut plan, B, round * 1000 + 500, 80);
        }
        assert_eq!(shape(&plan), [(A, 80, 1), (B, 80, 2), (A, 80, 1)]);
        plan.clear();
        plan.allow_trains();
        push(&mut plan, A, 0, 80);
        push(&mut plan, A, 1000, 80);
        assert_eq!(shape(&plan), [(A, 80, 2)]);
    }

    #[test]
    fn when_too_many_destinations_refuse_all_get_single_datagrams_until_the_next_try() {
        let mut plan = plan(64);
        for host in 0..=SINGLE_DESTINATIONS_MAX as u32 {
            plan.refuse_trains(SocketAddrV4::new(Ipv4Addr::from_bits(host), 8285));
        }
        push(&mut plan, B, 0, 80);
        push(&mut plan, B, 1000, 80);
        assert_eq!(shape(&plan), [(B, 80, 1), (B, 80, 1)]);
        plan.clear();
        plan.allow_trains();
        push(&mut plan, B, 0, 80);
        push(&mut plan, B, 1000, 80);
        assert_eq!(shape(&plan), [(B, 80, 2)], "trains never came back");
    }

    #[test]
    fn without_trains_every_datagram_is_a_send_and_a_full_plan_says_so() {
        let mut plan = plan(1);
        for index in 0..MESSAGES_MAX {
            push(&mut plan, A, index * 100, 100);
        }
        assert_eq!(plan.push(A, Piece::default(), Piece::new(0, 100)), Err(Full));
        assert_eq!(plan.messages().len(), MESSAGES_MAX);
        plan.clear();
        push(&mut plan, A, 0, 100);
        assert_eq!(shape(&plan), [(A, 100, 1)]);
    }
}
