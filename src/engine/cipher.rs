//! What stands between a worker's plan and its socket where hosts talk WireGuard: datagrams are
//! sealed before they are sent, and opened after they were received. Handshakes are another
//! thread's, which is told of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use crate::forward::Context;
use crate::offload::{MESSAGES_MAX, SEGMENTS_MAX, SendPlan};
use crate::packet::Span;
use crate::route::{Place, Reader};
use crate::stats::{DropReason, WorkerStats};
use crate::wireguard::Sessions;
use crate::wireguard::message::{DATA_HEADER_BYTES, HANDSHAKE_BYTES_MAX, Message};
use crate::wireguard::session::{OVERHEAD_BYTES, PADDED_TO_BYTES, Session, TAG_BYTES, Unopened};
use crate::wireguard::sessions::{identity, number_of};

/// What a packet becomes longer by at most.
pub(super) const GROWTH_BYTES: u16 = (OVERHEAD_BYTES + PADDED_TO_BYTES - 1) as u16;

/// Room that a plan's datagrams need beside what they are made of.
pub(super) const SEALED_MORE_BYTES: usize = MESSAGES_MAX * SEGMENTS_MAX * GROWTH_BYTES as usize;

/// Events that wait for the thread of the handshakes. More are shed: a flood of forged ones must
/// not take memory. 200 KiB.
const EVENTS_MAX: usize = 1024;

/// Messages of handshakes among them, from which on that thread has no time for all of them.
const BUSY_MESSAGES: usize = EVENTS_MAX / 8;

/// Packets among them, and as many moves: those for many hosts that are down must not take the
/// messages' places, nor a flood of messages theirs.
const WAITING_MAX: usize = EVENTS_MAX / 4;

// A bit for each message says what became of it.
const _: () = assert!(MESSAGES_MAX <= u64::BITS as usize);

/// What the thread of the handshakes is told.
#[derive(Debug)]
pub enum Event {
    /// A message of a handshake came.
    Message {
        /// The message, in front.
        bytes: [u8; HANDSHAKE_BYTES_MAX],
        /// Its length.
        length: usize,
        /// Where it came from.
        source: SocketAddr,
    },
    /// A packet has no session to go by.
    Waiting {
        /// The number of the peer.
        peer: u32,
        /// The packet.
        packet: Box<[u8]>,
    },
    /// Authentic datagrams of a peer came from elsewhere than it was.
    Moved {
        /// The number of the peer.
        peer: u32,
        /// Where it is.
        source: SocketAddr,
    },
    /// Something may be due before its time.
    Due,
}

/// Where workers leave events. Clones lead to the same.
#[derive(Debug, Clone)]
pub struct Events {
    sender: SyncSender<Event>,
    queued: Arc<Queued>,
}

/// Events in the queue.
#[derive(Debug, Default)]
struct Queued {
    messages: AtomicUsize,
    packets: AtomicUsize,
    moves: AtomicUsize,
    calls: AtomicUsize,
}

impl Queued {
    /// Those of the same kind, and how many may be there.
    fn of(&self, event: &Event) -> (&AtomicUsize, usize) {
        match event {
            Event::Message { .. } => (&self.messages, EVENTS_MAX - 2 * WAITING_MAX),
            Event::Waiting { .. } => (&self.packets, WAITING_MAX),
            Event::Moved { .. } => (&self.moves, WAITING_MAX),
            Event::Due => (&self.calls, 1),
        }
    }
}

/// Where they come out.
#[derive(Debug)]
pub struct EventQueue {
    /// What comes, in its order.
    receiver: Receiver<Event>,
    queued: Arc<Queued>,
}

/// An empty queue of events.
pub fn events() -> (Events, EventQueue) {
    let (sender, receiver) = sync_channel(EVENTS_MAX);
    let queued = Arc::<Queued>::default();
    (Events { sender, queued: Arc::clone(&queued) }, EventQueue { receiver, queued })
}

impl Events {
    /// Has whoever waits for events look what is due.
    pub fn call(&self) {
        self.tell(Event::Due);
    }

    /// Whether there was room for `event`.
    fn tell(&self, event: Event) -> bool {
        let (queued, most) = self.queued.of(&event);
        let is_told =
            queued.fetch_add(1, Ordering::Relaxed) < most && self.sender.try_send(event).is_ok();
        if !is_told {
            queued.fetch_sub(1, Ordering::Relaxed);
        }
        is_told
    }
}

impl EventQueue {
    /// The next one, if one comes within `patience`; an error if none will ever come.
    pub fn next(&self, patience: Duration) -> Result<Option<Event>, RecvTimeoutError> {
        let event = match self.receiver.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            event => event?,
        };
        self.queued.of(&event).0.fetch_sub(1, Ordering::Relaxed);
        Ok(Some(event))
    }

    /// Whether so many messages wait that there is no time for all.
    pub fn is_busy(&self) -> bool {
        self.queued.messages.load(Ordering::Relaxed) >= BUSY_MESSAGES
    }
}

/// What a worker seals and opens by.
#[derive(Debug, Clone)]
pub struct Cipher {
    /// The sessions in force.
    pub sessions: Place<Sessions>,
    /// Where it tells of handshakes.
    pub events: Events,
}

/// What became of a message of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sealed {
    /// So many from here on can be sent.
    Ready(usize),
    /// It waits for a session, elsewhere.
    Waits,
    /// There is no session to send it by.
    Lost,
}

/// The egress half.
pub(super) struct Sealer {
    sessions: Reader<Sessions>,
    events: Events,
    /// Where in the arena sealed datagrams lie.
    sealed_at: usize,
    /// Of the messages of the plan, a bit each.
    ready: u64,
    waiting: u64,
    /// Where those go that are ready.
    destinations: [SocketAddr; MESSAGES_MAX],
    /// Whether the plan is sealed.
    is_done: bool,
}

impl Sealer {
    /// One whose datagrams lie in the arena from `sealed_at` on.
    pub(super) fn new(cipher: &Cipher, sealed_at: usize) -> Self {
        let (sessions, events) = (cipher.sessions.reader(), cipher.events.clone());
        let destinations = [SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0); MESSAGES_MAX];
        Self { sessions, events, sealed_at, ready: 0, waiting: 0, destinations, is_done: false }
    }

    /// Lets go of sessions that are over, and of their keys, also if nothing is to be sealed.
    pub(super) fn refresh(&mut self) {
        self.sessions.load();
    }

    /// The plan has been carried out, or is forgotten.
    pub(super) fn sent(&mut self) {
        self.is_done = false;
    }

    /// What became of message `index`, and of how many after it the same.
    pub(super) fn outcome(&self, index: usize) -> Sealed {
        let bit = 1 << index;
        match (self.ready >> index).trailing_ones() {
            0 if self.waiting & bit != 0 => Sealed::Waits,
            0 => Sealed::Lost,
            count => Sealed::Ready(count as usize),
        }
    }

    /// Where message `index` goes, which is ready.
    pub(super) fn destination(&self, index: usize) -> SocketAddr {
        self.destinations[index]
    }

    /// Seals the datagrams of the plan, unless that is done.
    pub(super) fn seal(&mut self, plan: &mut SendPlan, arena: &mut [u8], context: &Context<'_>) {
        if std::mem::replace(&mut self.is_done, true) {
            return;
        }
        (self.ready, self.waiting) = (0, 0);
        let Some((packets, sealed)) = arena.split_at_mut_checked(self.sealed_at) else { return };
        let (sessions, mut used_bytes) = (self.sessions.load(), 0);
        let mtu_bytes = usize::from(context.local.mtu_bytes);
        for index in 0..plan.messages().len() {
            let destination = context.table.address(plan.messages()[index].destination);
            let Some(number) = number_of(destination) else { continue };
            let Some(peer) = sessions.peer(number) else { continue };
            peer.activity.is_given(plan.messages()[index].segments.into());
            let Some((session, endpoint)) = peer.current().zip(peer.endpoint) else {
                peer.activity.note_lack();
                let waits = |datagram| {
                    let may_wait = peer.activity.begin_wait();
                    let waits =
                        may_wait && wait(&self.events, number, packets, datagram, mtu_bytes);
                    if may_wait && !waits {
                        peer.activity.end_waits(1);
                    }
                    waits
                };
                self.waiting |= u64::from(plan.datagrams(index).all(waits)) << index;
                continue;
            };
            let (start, mut segment_bytes) = (used_bytes, 0);
            let is_sealed = plan.datagrams(index).all(|datagram| {
                let room = sealed.get_mut(used_bytes..).unwrap_or_default();
                let bytes = seal(session, packets, datagram, mtu_bytes, room);
                used_bytes += bytes.unwrap_or(0);
                segment_bytes = bytes.map_or(0, |bytes| bytes.max(segment_bytes));
                bytes.is_some()
            });
            if is_sealed {
                let span = Span::new(self.sealed_at + start, used_bytes - start);
                plan.replace(index, span, segment_bytes as u16);
                peer.activity.sends((used_bytes - start) as u64, context.now_ns);
                self.destinations[index] = endpoint;
                self.ready |= 1 << index;
            }
        }
    }
}

/// Writes the datagram with this packet into `room`; its length, if the room and the session last.
#[inline]
fn seal(
    session: &Session,
    packets: &[u8],
    spans: [Span; 2],
    mtu_bytes: usize,
    room: &mut [u8],
) -> Option<usize> {
    let [header, payload] = [spans[0].of(packets)?, spans[1].of(packets)?];
    let packet_bytes = header.len() + payload.len();
    let padded_bytes = padded_bytes(packet_bytes, mtu_bytes);
    let datagram = room.get_mut(..DATA_HEADER_BYTES + padded_bytes + TAG_BYTES)?;
    let inside = datagram.get_mut(DATA_HEADER_BYTES..DATA_HEADER_BYTES + padded_bytes)?;
    let (header_place, rest) = inside.split_at_mut_checked(header.len())?;
    let (payload_place, padding) = rest.split_at_mut_checked(payload.len())?;
    header_place.copy_from_slice(header);
    payload_place.copy_from_slice(payload);
    padding.fill(0);
    session.seal(datagram)?;
    Some(datagram.len())
}

/// How long a packet is with its padding. As the kernel pads: never beyond the MTU, for which the
/// path was measured.
#[inline]
fn padded_bytes(packet_bytes: usize, mtu_bytes: usize) -> usize {
    packet_bytes.next_multiple_of(PADDED_TO_BYTES).min(mtu_bytes).max(packet_bytes)
}

/// Has a packet wait for a session; whether there was room.
fn wait(events: &Events, peer: u32, packets: &[u8], spans: [Span; 2], mtu_bytes: usize) -> bool {
    let mut packet = spans.map(|span| span.of(packets).unwrap_or_default()).concat();
    packet.resize(padded_bytes(packet.len(), mtu_bytes), 0);
    events.tell(Event::Waiting { peer, packet: packet.into_boxed_slice() })
}

/// What came out of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    /// A packet of so many bytes, behind the header, of the peer for which this address stands.
    Packet(usize, SocketAddr),
    /// Nothing that is a packet.
    Nothing,
    /// It is refused.
    Refused(DropReason),
}

/// The ingress half.
pub(super) struct Opener {
    sessions: Reader<Sessions>,
    events: Events,
    /// Of the peer whose datagrams came last, what has not been noted yet.
    heard: Option<Heard>,
}

/// Authentic datagrams of one peer.
#[derive(Debug, Clone, Copy)]
struct Heard {
    peer: u32,
    bytes: u64,
    has_packets: bool,
}

impl Opener {
    pub(super) fn new(cipher: &Cipher) -> Self {
        Self { sessions: cipher.sessions.reader(), events: cipher.events.clone(), heard: None }
    }

    /// Opens a datagram from `source`, in place.
    pub(super) fn open(
        &mut self,
        datagram: &mut [u8],
        source: SocketAddr,
        stats: &WorkerStats,
        now_ns: u64,
    ) -> Opened {
        let data = match Message::parse(datagram) {
            Some(Message::Data(data)) => data,
            Some(_) => {
                self.tell_of_handshake(datagram, source, stats);
                return Opened::Nothing;
            }
            None => return Opened::Refused(DropReason::NotWireguard),
        };
        let bytes = datagram.len() as u64;
        let sessions = self.sessions.load();
        let Some(session) = sessions.session(data.receiver_index) else {
            return Opened::Refused(DropReason::UnknownSession);
        };
        let packet_bytes = match session.open(data.counter, datagram) {
            Ok(packet) => packet.len(),
            Err(Unopened::Short) => return Opened::Refused(DropReason::NotWireguard),
            Err(Unopened::Replayed) => return Opened::Refused(DropReason::Replayed),
            Err(Unopened::NotAuthentic) => return Opened::Refused(DropReason::NotAuthentic),
        };
        let number = session.peer;
        let Some(peer) = sessions.peer(number) else {
            return Opened::Refused(DropReason::UnknownSession);
        };
        let has_packets = packet_bytes > 0;
        if peer.endpoint != Some(source) && peer.activity.note_move() {
            self.events.tell(Event::Moved { peer: number, source });
        }
        match &mut self.heard {
            Some(heard) if heard.peer == number => {
                heard.bytes += bytes;
                heard.has_packets |= has_packets;
            }
            _ => {
                self.note(now_ns);
                self.heard = Some(Heard { peer: number, bytes, has_packets });
            }
        }
        if !has_packets {
            stats.keepalives.add(1);
            return Opened::Nothing;
        }
        Opened::Packet(packet_bytes, identity(number))
    }

    /// As the sealer's.
    pub(super) fn refresh(&mut self) {
        self.sessions.load();
    }

    /// Notes what was heard since the last call.
    pub(super) fn note(&mut self, now_ns: u64) {
        let Some(heard) = self.heard.take() else { return };
        if let Some(peer) = self.sessions.load().peer(heard.peer) {
            peer.activity.received(heard.bytes, heard.has_packets, now_ns);
        }
    }

    fn tell_of_handshake(&self, datagram: &[u8], source: SocketAddr, stats: &WorkerStats) {
        let mut bytes = [0; HANDSHAKE_BYTES_MAX];
        if let Some(place) = bytes.get_mut(..datagram.len()) {
            place.copy_from_slice(datagram);
        }
        stats.handshakes.add(1);
        if !self.events.tell(Event::Message { bytes, length: datagram.len(), source }) {
            stats.handshakes_shed.add(1);
        }
    }
}

#[cfg(test)]
mod tests;
