//! One host's WireGuard: its peers, and what to do with the messages of handshakes. No I/O and no
//! clock: messages and times come in, what is to be sent goes out, and the sessions are there to be
//! published.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::route::Prefixes;

use super::association::{Association, Due, Pending};
use super::cookie::{CookieJar, Randomness, read_reply};
use super::difference::{FoundPeer, PeerChange, PeerEdit, allowed_addresses};
use super::keys::{PrivateKey, PublicKey};
use super::message::{
    COOKIE_REPLY_BYTES, INITIATION_BYTES, Message, RESPONSE_BYTES, index_at, sign,
};
use super::noise::{
    INITIATION_NOISE_BYTES, Initiator, NoHandshake, RESPONSE_NOISE_BYTES, Responder, SessionKeys,
};
use super::numbers::Numbers;
use super::peer::PeerState;
use super::session::Session;
use super::sessions::{Sessions, identity, place_of};
use super::strangers::Strangers;

/// The moment, on both clocks.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// The workers' clock.
    pub ns: u64,
    /// Since 1970.
    pub unix_ns: u64,
}

/// A datagram to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// Where to.
    pub to: SocketAddr,
    /// What.
    pub bytes: Vec<u8>,
}

/// What became of messages of handshakes, for whoever asks why there is no session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages that are no part of a handshake with this host or are for none that it knows of:
    /// another key, a stranger, a forger.
    pub refused: u64,
    /// Of which the first was older than one that came before, or came too soon after it.
    pub replayed: u64,
    /// Answered with a cookie, for lack of time.
    pub cookies: u64,
    /// Not looked at, because their address had its share.
    pub limited: u64,
    /// Handshakes that led to a session which both ends have.
    pub completed: u64,
    /// Packets that have waited for a session in vain.
    pub expired_packets: u64,
}

/// A host's WireGuard.
pub struct Interface {
    own: PrivateKey,
    public: PublicKey,
    jar: CookieJar,
    /// By their numbers, of which each is of one key for good: workers may still name a peer that
    /// is gone, and one that comes back counts on where it was.
    peers: Vec<Option<Box<Association>>>,
    by_key: BTreeMap<PublicKey, u32>,
    numbers: Numbers,
    strangers: Strangers,
    has_changed: bool,
    is_rerouted: bool,
    counts: Counts,
}

/// What a host does not do with a message.
enum Refusal {
    NoHandshake,
    Replayed,
}

impl From<NoHandshake> for Refusal {
    fn from(_: NoHandshake) -> Self {
        Self::NoHandshake
    }
}

impl Interface {
    /// That of a host with this key, without peers.
    pub fn new(own: PrivateKey, random: &mut impl Randomness) -> Self {
        let public = own.public();
        Self {
            own,
            public,
            jar: CookieJar::new(public, random),
            peers: Vec::new(),
            by_key: BTreeMap::new(),
            numbers: Numbers::default(),
            strangers: Strangers::default(),
            has_changed: true,
            is_rerouted: true,
            counts: Counts::default(),
        }
    }

    /// Its public key.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    /// Whether it never had a peer.
    pub fn is_new(&self) -> bool {
        self.peers.is_empty()
    }

    /// Makes a change to a peer. One that stays keeps its sessions, and its place where it was last
    /// heard from, unless the change says where it is.
    pub fn edit(&mut self, edit: &PeerEdit) {
        let Self { by_key, peers, .. } = self;
        let known = by_key.get(&edit.public_key).copied();
        match &edit.change {
            PeerChange::Remove => {
                if let Some(place) = known.and_then(|number| peers.get_mut(number as usize)) {
                    *place = None;
                }
            }
            // As the kernel, which has no peer with its own key.
            PeerChange::Set { .. } if edit.public_key == self.public => return,
            PeerChange::Set { preshared_key, endpoint, allowed, keepalive_seconds } => {
                let number = known.unwrap_or(peers.len() as u32);
                if known.is_none() {
                    by_key.insert(edit.public_key, number);
                    peers.push(None);
                }
                let Some(place) = peers.get_mut(number as usize) else { return };
                let peer = place.get_or_insert_with(|| Box::new(Association::new(edit.public_key)));
                if let Some(came_ns) = self.strangers.take(&edit.public_key) {
                    // Its packets wait, and it would try again only after seconds.
                    peer.want_handshake(came_ns);
                }
                if let Some(preshared_key) = preshared_key {
                    peer.preshared_key.clone_from(preshared_key);
                }
                peer.endpoint = endpoint.or(peer.endpoint);
                peer.allowed = allowed.or(peer.allowed);
                peer.keepalive_seconds = keepalive_seconds.unwrap_or(peer.keepalive_seconds);
            }
        }
        (self.has_changed, self.is_rerouted) = (true, true);
    }

    /// Takes in a message of a handshake from `source`. With `is_busy` there is no time for all of
    /// them.
    pub fn receive(
        &mut self,
        message: &[u8],
        source: SocketAddr,
        is_busy: bool,
        now: Now,
        random: &mut impl Randomness,
        out: &mut Vec<Send>,
    ) {
        if let Some(Message::CookieReply(reply)) = Message::parse(message) {
            return self.receive_cookie(reply, now);
        }
        if !self.jar.has_mac1(message) {
            self.counts.refused += 1;
            return;
        }
        if is_busy {
            if !self.jar.has_mac2(message, source, now.ns) {
                self.counts.cookies += 1;
                if let Some(reply) = self.jar.reply(message, source, now.ns, random) {
                    out.push(Send { to: source, bytes: reply.to_vec() });
                }
                return;
            }
            if !self.jar.has_share(source, now.ns) {
                self.counts.limited += 1;
                return;
            }
        }
        let done = match Message::parse(message) {
            Some(Message::Initiation(message)) => {
                self.receive_initiation(message, source, now, random, out)
            }
            Some(Message::Response(message)) => self.receive_response(message, source, now, out),
            Some(Message::CookieReply(_) | Message::Data(_)) | None => Err(Refusal::NoHandshake),
        };
        match done {
            Ok(()) => {}
            Err(Refusal::NoHandshake) => self.counts.refused += 1,
            Err(Refusal::Replayed) => self.counts.replayed += 1,
        }
    }

    fn receive_initiation(
        &mut self,
        message: &[u8; INITIATION_BYTES],
        source: SocketAddr,
        now: Now,
        random: &mut impl Randomness,
        out: &mut Vec<Send>,
    ) -> Result<(), Refusal> {
        let noise: &[u8; INITIATION_NOISE_BYTES] =
            message[8..].first_chunk().ok_or(Refusal::NoHandshake)?;
        let responder = Responder::read(&self.own, noise)?;
        let known = self.by_key.get(&responder.peer).copied();
        let Some(number) = known.filter(|number| self.peer_mut(*number).is_ok()) else {
            self.strangers.remember(responder.peer, now.ns);
            return Err(Refusal::NoHandshake);
        };
        let peer = self.peer_mut(number)?;
        if !peer.is_new(responder.timestamp, now.ns) {
            return Err(Refusal::Replayed);
        }
        let (answer, keys) = responder.respond(peer.preshared_key.as_ref())?;
        let local_index = self.numbers.give(number, random);
        let mut bytes = vec![0; RESPONSE_BYTES];
        bytes[0] = 2;
        bytes[4..8].copy_from_slice(&local_index.to_le_bytes());
        bytes[8..12].copy_from_slice(&message[4..8]);
        bytes[12..12 + RESPONSE_NOISE_BYTES].copy_from_slice(&answer);
        let numbers = (number, local_index, index_at(message, 4));
        let session = session(numbers, &keys, now, false)?;
        let peer = self.peer_mut(number)?;
        let mac1 = sign(&mut bytes, &peer.public_key, peer.cookie(now.ns));
        peer.sent_mac1 = Some(mac1);
        peer.has_answered(session, now.unix_ns / 1_000_000_000);
        peer.activity.received(message.len() as u64, false, now.ns);
        peer.activity.sends_keepalive(bytes.len() as u64, now.ns);
        out.push(Send { to: source, bytes });
        self.has_changed = true;
        self.moved(number, source);
        Ok(())
    }

    fn receive_response(
        &mut self,
        message: &[u8; RESPONSE_BYTES],
        source: SocketAddr,
        now: Now,
        out: &mut Vec<Send>,
    ) -> Result<(), Refusal> {
        let noise: &[u8; RESPONSE_NOISE_BYTES] =
            message[12..].first_chunk().ok_or(Refusal::NoHandshake)?;
        let number = self.numbers.owner(index_at(message, 8)).ok_or(Refusal::NoHandshake)?;
        let peer = self.peer_mut(number)?;
        let pending = peer.pending.as_mut().ok_or(Refusal::NoHandshake)?;
        if pending.local_index != index_at(message, 8) {
            return Err(Refusal::NoHandshake);
        }
        let keys = pending.initiator.finish(noise)?;
        let numbers = (number, pending.local_index, index_at(message, 4));
        peer.answered(session(numbers, &keys, now, true)?, now.unix_ns / 1_000_000_000);
        peer.activity.received(message.len() as u64, false, now.ns);
        self.has_changed = true;
        self.moved(number, source);
        if !self.send_waiting(number, now, out) {
            // It learns by this that we have the session.
            self.send_keepalive(number, now, out);
        }
        Ok(())
    }

    fn receive_cookie(&mut self, reply: &[u8; COOKIE_REPLY_BYTES], now: Now) {
        let number = self.numbers.owner(index_at(reply, 4));
        let peer = number.and_then(|number| self.peer_mut(number).ok());
        let cookie = peer.and_then(|peer| {
            // Of a first message or of an answer, whichever was sent last.
            let cookie = read_reply(reply, &peer.public_key, peer.sent_mac1.as_ref()?)?;
            // Once: the same reply again, later, would bring an old cookie back.
            peer.sent_mac1 = None;
            peer.set_cookie(cookie, now.ns);
            Some(())
        });
        if cookie.is_none() {
            self.counts.refused += 1;
        }
    }

    /// A packet that had no session to go by waits until there is one. It has its padding.
    pub fn keep(
        &mut self,
        number: u32,
        packet: Box<[u8]>,
        now: Now,
        random: &mut impl Randomness,
        out: &mut Vec<Send>,
    ) {
        let Ok(peer) = self.peer_mut(number) else {
            // The peer has gone meanwhile.
            self.counts.expired_packets += 1;
            return;
        };
        peer.keep(packet);
        if peer.sending().is_none() {
            peer.want_handshake(now.ns);
        }
        self.tick_peer(number, now, random, out);
    }

    /// Authentic datagrams of the peer came from `source`: it is there.
    pub fn moved(&mut self, number: u32, source: SocketAddr) {
        if let Ok(peer) = self.peer_mut(number)
            && peer.endpoint != Some(source)
        {
            peer.endpoint = Some(source);
            self.has_changed = true;
        }
    }

    /// Has handshakes with all peers begin, whatever there is to send: they may have sessions with
    /// this host from before, whose packets it cannot open.
    pub fn greet(&mut self, now: Now) {
        self.peers.iter_mut().flatten().for_each(|peer| peer.want_handshake(now.ns));
    }

    /// The host has slept: the sessions are no more. Peers stay.
    pub fn forget_sessions(&mut self) {
        self.peers.iter_mut().flatten().for_each(|peer| peer.forget_sessions());
        self.has_changed = true;
    }

    /// Does what is due now.
    pub fn tick(&mut self, now: Now, random: &mut impl Randomness, out: &mut Vec<Send>) {
        for number in 0..self.peers.len() as u32 {
            self.tick_peer(number, now, random, out);
        }
    }

    fn tick_peer(
        &mut self,
        number: u32,
        now: Now,
        random: &mut impl Randomness,
        out: &mut Vec<Send>,
    ) {
        let Ok(peer) = self.peer_mut(number) else { return };
        let has_changed = peer.turn_over(now.ns);
        let begun = peer.pending.as_ref().map(|pending| pending.local_index);
        let due = peer.due(now.ns);
        let given_up = begun.filter(|_| peer.pending.is_none());
        let [expired, completed] =
            [&mut peer.expired_packets, &mut peer.completed].map(std::mem::take);
        self.counts.expired_packets += expired;
        self.counts.completed += completed;
        self.has_changed |= has_changed;
        given_up.into_iter().for_each(|number| self.numbers.free(number));
        match due {
            Some(Due::Handshake) => self.begin(number, now, random, out),
            Some(Due::Keepalive) => self.send_keepalive(number, now, out),
            None => {}
        }
        self.send_waiting(number, now, out);
    }

    fn begin(&mut self, number: u32, now: Now, random: &mut impl Randomness, out: &mut Vec<Send>) {
        let local_index = self.numbers.give(number, random);
        let mut jitter = [0; 4];
        random.fill(&mut jitter);
        let Some(peer) = self.peers.get_mut(number as usize).and_then(Option::as_mut) else {
            return self.numbers.free(local_index);
        };
        let timestamp = peer.begins_at(now.unix_ns);
        let psk = peer.preshared_key.as_ref();
        let begun = Initiator::begin(&self.own, &peer.public_key, psk, &timestamp);
        let (Ok((initiator, noise)), Some(to)) = (begun, peer.endpoint) else {
            return self.numbers.free(local_index);
        };
        let mut bytes = vec![0; INITIATION_BYTES];
        bytes[0] = 1;
        bytes[4..8].copy_from_slice(&local_index.to_le_bytes());
        bytes[8..8 + INITIATION_NOISE_BYTES].copy_from_slice(&noise);
        let mac1 = sign(&mut bytes, &peer.public_key, peer.cookie(now.ns));
        // Up to a third of a second (section 6.1 of the paper).
        let jitter_ns = (u64::from(u32::from_le_bytes(jitter)) * 333_000_000) >> 32;
        peer.sent_mac1 = Some(mac1);
        let before = peer.began(Pending { initiator, local_index }, now.ns, jitter_ns);
        before.into_iter().for_each(|number| self.numbers.free(number));
        out.push(Send { to, bytes });
    }

    /// Sends an empty packet by the session, or has a handshake begin that leads to one.
    fn send_keepalive(&mut self, number: u32, now: Now, out: &mut Vec<Send>) {
        let Ok(peer) = self.peer_mut(number) else { return };
        let (Some(session), Some(to)) = (peer.sending(), peer.endpoint) else {
            return peer.want_handshake(now.ns);
        };
        if let Some(bytes) = session.datagram(&[]) {
            peer.activity.sends_keepalive(bytes.len() as u64, now.ns);
            out.push(Send { to, bytes });
        }
    }

    /// Sends what has waited for a session, if there is one; whether that was anything.
    fn send_waiting(&mut self, number: u32, now: Now, out: &mut Vec<Send>) -> bool {
        let Ok(peer) = self.peer_mut(number) else { return false };
        let packets = peer.take_waiting();
        let (Some(session), Some(to)) = (peer.sending(), peer.endpoint) else { return false };
        for packet in &packets {
            if let Some(bytes) = session.datagram(packet) {
                peer.activity.sends(bytes.len() as u64, now.ns);
                out.push(Send { to, bytes });
            }
        }
        !packets.is_empty()
    }

    /// The sessions now, if they have changed since the last call.
    pub fn take_changed(&mut self) -> Option<Sessions> {
        std::mem::take(&mut self.has_changed).then(|| {
            self.free_numbers();
            self.sessions()
        })
    }

    /// Whether a peer has come, gone or got other subnets since the last call.
    pub fn take_rerouted(&mut self) -> bool {
        std::mem::take(&mut self.is_rerouted)
    }

    /// What is whose: subnets, and what stands for the peer that has them.
    pub fn routes(&self) -> impl Iterator<Item = (Prefixes, SocketAddr)> {
        let numbered = self.peers.iter().zip(0..);
        numbered.filter_map(|(peer, number)| Some((peer.as_ref()?.allowed?, identity(number))))
    }

    /// The peers as they are.
    pub fn found(&self) -> Vec<FoundPeer> {
        let found = |peer: &Association| {
            let (received_bytes, sent_bytes) = peer.activity.bytes();
            FoundPeer {
                state: PeerState {
                    public_key: peer.public_key,
                    endpoint: peer.endpoint,
                    last_handshake_unix: peer.last_handshake_unix,
                    received_bytes,
                    sent_bytes,
                    packets: Some(peer.activity.packets()),
                },
                preshared_key: peer.preshared_key.clone(),
                allowed: peer.allowed.map(allowed_addresses).unwrap_or_default(),
                keepalive_seconds: peer.keepalive_seconds,
            }
        };
        self.peers.iter().flatten().map(|peer| found(peer)).collect()
    }

    /// What became of handshakes so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn sessions(&self) -> Sessions {
        let mut places = vec![None; self.numbers.places()];
        for session in self.peers.iter().flatten().flat_map(|peer| peer.sessions()) {
            if let Some(place) = places.get_mut(place_of(session.local_index)) {
                *place = Some(Arc::clone(session));
            }
        }
        let peers: Box<[_]> =
            self.peers.iter().map(|peer| peer.as_ref().map(|peer| peer.published())).collect();
        Sessions { peers, places: places.into_boxed_slice() }
    }

    /// Has the numbers of what is no more be given again.
    fn free_numbers(&mut self) {
        let peers = self.peers.iter().flatten();
        let used = peers.flat_map(|peer| {
            let sessions = peer.sessions().map(|session| session.local_index);
            sessions.chain(peer.pending.as_ref().map(|pending| pending.local_index))
        });
        self.numbers.keep(&used.collect());
    }

    fn peer_mut(&mut self, number: u32) -> Result<&mut Association, Refusal> {
        let peer = self.peers.get_mut(number as usize).and_then(Option::as_mut);
        peer.map(|peer| &mut **peer).ok_or(Refusal::NoHandshake)
    }
}

fn session(
    numbers: (u32, u32, u32),
    keys: &SessionKeys,
    now: Now,
    is_initiator: bool,
) -> Result<Arc<Session>, Refusal> {
    let session = Session::new(numbers, keys, now.ns, is_initiator);
    session.map(Arc::new).ok_or(Refusal::NoHandshake)
}

#[cfg(test)]
pub(crate) mod tests;
