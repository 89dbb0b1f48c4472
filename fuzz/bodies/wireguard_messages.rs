//! One input of the `wireguard_messages` target: what an enemy on the wire does to two hosts that
//! speak WireGuard.
//!
//! The input is a row of steps, each a byte and what it takes: a packet is sent, a message is
//! delivered, lost, doubled, changed, or comes from elsewhere, somebody sends bytes of his own,
//! time passes, a host is busy, or forgets its peer. Nothing arrives that the other host has not
//! sent, and nothing twice; nobody is answered with more bytes than he sent. When the enemy has
//! gone, a packet arrives.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use weft::route::Prefix;
use weft::wireguard::difference::{PeerChange, PeerEdit};
use weft::wireguard::interface::Send;
use weft::wireguard::keys::PrivateKey;
use weft::wireguard::message::{DATA_HEADER_BYTES, DataHeader, Message};
use weft::wireguard::session::{OVERHEAD_BYTES, TAG_BYTES};
use weft::wireguard::{Interface, Now, Randomness, Sessions};

const SECOND_NS: u64 = 1_000_000_000;

/// Packets have their number in them, and no padding.
const PACKET_BYTES: usize = 16;

/// Messages on their way, beyond which the network loses some.
const IN_FLIGHT_MAX: usize = 64;

/// Steps of an input.
const STEPS_MAX: usize = 64;

/// How long hosts may take to find each other when nobody disturbs them: a session that one of them
/// has lost is noticed 15 s after a packet, a handshake is tried again after 5.4 s, and each may
/// happen twice.
const RECOVERY_SECONDS: u64 = 60;

/// Numbers that are no secret.
struct Counting(u64);

impl Randomness for Counting {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (self.0 >> 56) as u8;
        }
    }
}

/// A message on its way.
#[derive(Clone)]
struct Flying {
    /// Which host gets it.
    to: usize,
    source: SocketAddr,
    bytes: Vec<u8>,
}

struct Host {
    interface: Interface,
    sessions: Sessions,
    is_busy: bool,
    /// Numbers of the packets that it has sent, and of those that it has let in.
    sent: u64,
    received: BTreeSet<u64>,
}

struct Wire {
    hosts: [Host; 2],
    now_ns: u64,
    random: Counting,
    flying: Vec<Flying>,
}

fn key(host: usize) -> PrivateKey {
    PrivateKey::from_random([host as u8 + 1; 32])
}

fn address(host: usize) -> SocketAddr {
    ([192, 0, 2, host as u8 + 1], 51_820).into()
}

fn elsewhere() -> SocketAddr {
    ([198, 51, 100, 7], 4242).into()
}

/// Has a host have the other one as its peer.
fn with_peer(host: usize) -> PeerEdit {
    let subnet: Prefix = format!("10.5.{}.0/24", 2 - host).parse().expect("a prefix");
    PeerEdit {
        public_key: key(1 - host).public(),
        change: PeerChange::Set {
            preshared_key: None,
            endpoint: Some(address(1 - host)),
            allowed: Some(subnet.into()),
            keepalive_seconds: None,
        },
    }
}

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let mut random = Counting(1);
    let hosts = [0, 1].map(|host| {
        let mut interface = Interface::new(key(host), &mut random);
        interface.edit(&with_peer(host));
        let sessions = interface.take_changed().expect("there is a peer");
        Host { interface, sessions, is_busy: false, sent: 0, received: BTreeSet::new() }
    });
    let mut wire = Wire { hosts, now_ns: SECOND_NS, random, flying: Vec::new() };
    let mut steps = data.iter().copied();
    for _ in 0..STEPS_MAX {
        let Some(step) = steps.next() else { break };
        wire.step(step, &mut steps);
    }
    wire.recovers();
}

impl Wire {
    fn now(&self) -> Now {
        Now { ns: self.now_ns, unix_ns: 1_700_000_000 * SECOND_NS + self.now_ns }
    }

    /// The low nibble chooses what happens, the high one to whom, or to which message.
    fn step(&mut self, step: u8, more: &mut impl Iterator<Item = u8>) {
        let (host, which) = (usize::from(step >> 4 & 1), usize::from(step >> 4));
        let at = which % self.flying.len().max(1);
        let has_any = !self.flying.is_empty();
        match step & 0xf {
            0..=2 => self.send(host),
            3..=5 if has_any => {
                let first = self.flying.remove(at);
                self.arrive(first);
            }
            6 if has_any => drop(self.flying.remove(at)),
            7 if has_any => self.arrive(self.flying[at].clone()),
            8 if has_any => {
                let (place, change) = (more.next().unwrap_or(0), more.next().unwrap_or(0));
                let bytes = &mut self.flying[at].bytes;
                let place = usize::from(place) % bytes.len();
                bytes[place] ^= change;
            }
            9 if has_any => self.flying[at].source = elsewhere(),
            10 => {
                let length = usize::from(more.next().unwrap_or(0));
                let bytes = more.by_ref().take(length).collect();
                self.arrive(Flying { to: host, source: elsewhere(), bytes });
            }
            11 if has_any => self.flying[at].to = 1 - self.flying[at].to,
            12 => self.pass(u64::from(more.next().unwrap_or(0)) * SECOND_NS / 4),
            13 => self.pass(u64::from(more.next().unwrap_or(0)) * SECOND_NS * 4),
            14 => self.hosts[host].is_busy ^= true,
            15 => {
                let public_key = key(1 - host).public();
                let forget = PeerEdit { public_key, change: PeerChange::Remove };
                let interface = &mut self.hosts[host].interface;
                [forget, with_peer(host)].iter().for_each(|edit| interface.edit(edit));
                self.publish(host);
            }
            _ => {}
        }
    }

    /// A packet of a host's pods, sent as a worker sends it.
    fn send(&mut self, host: usize) {
        let mut out = Vec::new();
        let now = self.now();
        let Host { interface, sessions, sent, .. } = &mut self.hosts[host];
        let Some((number, peer)) = (0..=255).find_map(|it| Some((it, sessions.peer(it)?))) else {
            return;
        };
        *sent += 1;
        let mut packet = [0; PACKET_BYTES];
        packet[..8].copy_from_slice(&sent.to_le_bytes());
        match peer.current().zip(peer.endpoint) {
            Some((session, _)) => {
                let mut bytes = vec![0; PACKET_BYTES + OVERHEAD_BYTES];
                bytes[DATA_HEADER_BYTES..][..PACKET_BYTES].copy_from_slice(&packet);
                session.seal(&mut bytes).expect("the room is as long as it must be");
                peer.activity.sends(bytes.len() as u64, now.ns);
                out.push(Send { to: address(1 - host), bytes });
            }
            None => {
                peer.activity.note_lack();
                if peer.activity.begin_wait() {
                    interface.keep(number, packet.into(), now, &mut self.random, &mut out);
                }
            }
        }
        self.go(host, out);
    }

    fn arrive(&mut self, Flying { to, source, mut bytes }: Flying) {
        let (now, mut out) = (self.now(), Vec::new());
        let Host { interface, sessions, is_busy, received, .. } = &mut self.hosts[to];
        match Message::parse(&bytes) {
            Some(Message::Data(DataHeader { receiver_index, counter })) => {
                let Some(session) = sessions.session(receiver_index) else { return };
                let Ok(packet) = session.open(counter, &mut bytes) else { return };
                let number = packet.first_chunk().map(|number| u64::from_le_bytes(*number));
                if let Some(number) = number {
                    assert_eq!(packet.len(), PACKET_BYTES, "a packet of another length");
                    assert!(received.insert(number), "packet {number} came twice");
                }
                let peer = session.peer;
                let activity = sessions.peer(peer).map(|peer| &peer.activity);
                let long = bytes.len() as u64;
                let is_packet = bytes.len() > DATA_HEADER_BYTES + TAG_BYTES;
                activity.into_iter().for_each(|it| it.received(long, is_packet, now.ns));
                interface.moved(peer, source);
            }
            message => {
                let is_answer = matches!(message, Some(Message::Response(_)));
                interface.receive(&bytes, source, *is_busy, now, &mut self.random, &mut out);
                let answered: usize = out.iter().map(|send| send.bytes.len()).sum();
                assert!(
                    is_answer || answered <= bytes.len(),
                    "an answer longer than what it is to"
                );
                assert!(out.len() <= 33, "{} messages for one", out.len());
            }
        }
        if let Some(first) = self.hosts[to].received.last() {
            assert!(*first <= self.hosts[1 - to].sent, "packet {first} was never sent");
        }
        self.go(to, out);
    }

    fn pass(&mut self, by_ns: u64) {
        self.now_ns += by_ns;
        (0..2).for_each(|host| self.go(host, Vec::new()));
    }

    /// Does what is due to a host, and has what it sends fly.
    fn go(&mut self, host: usize, mut out: Vec<Send>) {
        let now = self.now();
        self.hosts[host].interface.tick(now, &mut self.random, &mut out);
        self.publish(host);
        let sends = out.into_iter().map(|Send { bytes, .. }| bytes);
        let flying = sends.map(|bytes| Flying { to: 1 - host, source: address(host), bytes });
        self.flying.extend(flying);
        self.flying.truncate(IN_FLIGHT_MAX);
    }

    fn publish(&mut self, host: usize) {
        let Host { interface, sessions, .. } = &mut self.hosts[host];
        if let Some(changed) = interface.take_changed() {
            *sessions = changed;
        }
    }

    /// The enemy has gone: whatever he did, the hosts find each other.
    fn recovers(&mut self) {
        self.flying.clear();
        for host in [0, 1] {
            self.hosts[host].is_busy = false;
            let before = self.hosts[1 - host].received.len();
            let until_ns = self.now_ns + RECOVERY_SECONDS * SECOND_NS;
            while self.hosts[1 - host].received.len() == before {
                assert!(self.now_ns < until_ns, "host {host} reaches the other one no more");
                self.send(host);
                while !self.flying.is_empty() {
                    let first = self.flying.remove(0);
                    self.arrive(first);
                }
                self.pass(SECOND_NS);
            }
        }
    }
}
