//! Two hosts in simulated time, and one beside another WireGuard.

use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519;

use super::*;
use crate::wireguard::difference::difference;
use crate::wireguard::keys::PresharedKey;
use crate::wireguard::message::{DATA_HEADER_BYTES, DataHeader};
use crate::wireguard::peer::PeerConfig;
use crate::wireguard::session::OVERHEAD_BYTES;
use crate::wireguard::strangers::STRANGERS_MAX;

const SECOND_NS: u64 = 1_000_000_000;

/// The number of the first peer at `endpoint`.
fn number_at(sessions: &Sessions, endpoint: SocketAddr) -> Option<u32> {
    let numbers = (0..sessions.peers.len() as u32).filter_map(|it| Some((it, sessions.peer(it)?)));
    numbers.filter(|(_, peer)| peer.endpoint == Some(endpoint)).map(|(number, _)| number).next()
}

/// Numbers that are no secret.
pub(crate) struct Counting(pub(crate) u64);

impl Randomness for Counting {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (self.0 >> 56) as u8;
        }
    }
}

pub(crate) fn key(number: u8) -> PrivateKey {
    PrivateKey::from_random([number; 32])
}

fn address(number: u8) -> SocketAddr {
    ([192, 0, 2, number], 51_820).into()
}

/// Two hosts at these addresses, with a session between them that the first has begun.
pub(crate) fn pair(addresses: [SocketAddr; 2], now_ns: u64) -> [Interface; 2] {
    let now = Now { ns: now_ns, unix_ns: now_ns };
    let mut random = Counting(1);
    let mut hosts = [1, 2].map(|number| {
        let mut interface = Interface::new(key(number), &mut random);
        let endpoint = Some(addresses[2 - usize::from(number)]);
        configure(&mut interface, &[PeerConfig { endpoint, ..peer(3 - number, None) }]);
        interface
    });
    let (mut out, mut index) = (Vec::new(), 0);
    hosts[0].begin(0, now, &mut random, &mut out);
    while let Some(Send { bytes, .. }) = out.pop() {
        if bytes[0] == 4 {
            let sessions = hosts[1 - index].sessions();
            let at = index_at(&bytes, 4);
            sessions.session(at).unwrap().open(0, &mut bytes.clone()).unwrap();
            break;
        }
        hosts[1 - index].receive(&bytes, addresses[index], false, now, &mut random, &mut out);
        index = 1 - index;
    }
    hosts
}

fn peer(number: u8, psk: Option<[u8; 32]>) -> PeerConfig {
    PeerConfig {
        public_key: key(number).public(),
        preshared_key: psk.map(PresharedKey::from),
        endpoint: Some(address(number)),
        allowed: format!("10.5.{number}.0/24").parse::<crate::route::Prefix>().unwrap().into(),
        keepalive_seconds: 0,
    }
}

fn at(seconds: u64) -> Now {
    at_ms(seconds * 1_000)
}

fn at_ms(milliseconds: u64) -> Now {
    let ns = milliseconds * 1_000_000 + 1;
    Now { ns, unix_ns: 1_700_000_000 * SECOND_NS + ns }
}

/// Has the host have exactly these peers.
fn configure(interface: &mut Interface, peers: &[PeerConfig]) {
    for edit in difference(peers, &interface.found(), &BTreeMap::new(), 0) {
        interface.edit(&edit);
    }
}

/// A host of a simulated network, with its number as its key and address.
struct Host {
    number: u8,
    interface: Interface,
    sessions: Sessions,
    random: Counting,
    packets: Vec<Vec<u8>>,
    is_busy: bool,
    refused: Vec<&'static str>,
}

impl Host {
    fn new(number: u8, peers: Vec<PeerConfig>) -> Self {
        let mut random = Counting(number.into());
        let mut interface = Interface::new(key(number), &mut random);
        configure(&mut interface, &peers);
        let sessions = interface.take_changed().unwrap();
        let (packets, refused) = (Vec::new(), Vec::new());
        Self { number, interface, sessions, random, packets, is_busy: false, refused }
    }

    fn publish(&mut self) {
        if let Some(sessions) = self.interface.take_changed() {
            self.sessions = sessions;
        }
    }

    /// Sends a packet as a worker does.
    fn send(&mut self, packet: &[u8], to: SocketAddr, now: Now, out: &mut Vec<Send>) {
        let number = number_at(&self.sessions, to).expect("no peer there");
        let peer = self.sessions.peer(number).unwrap();
        match peer.current() {
            Some(session) => {
                let bytes = session.datagram(packet).unwrap();
                peer.activity.sends(bytes.len() as u64, now.ns);
                out.push(Send { to, bytes });
            }
            None => {
                peer.activity.note_lack();
                if peer.activity.begin_wait() {
                    self.interface.keep(number, packet.into(), now, &mut self.random, out);
                }
            }
        }
        self.interface.tick(now, &mut self.random, out);
        self.publish();
    }

    fn receive(&mut self, datagram: &[u8], source: SocketAddr, now: Now, out: &mut Vec<Send>) {
        if let Some(Message::Data(DataHeader { receiver_index, counter })) =
            Message::parse(datagram)
        {
            let Some(session) = self.sessions.session(receiver_index) else {
                return self.refused.push("no session");
            };
            let mut bytes = datagram.to_vec();
            match session.open(counter, &mut bytes) {
                Ok([]) => {}
                Ok(packet) => self.packets.push(packet.to_vec()),
                Err(_) => return self.refused.push("not opened"),
            }
            let has_packets = bytes.len() > OVERHEAD_BYTES;
            let activity = &self.sessions.peer(session.peer).unwrap().activity;
            activity.received(bytes.len() as u64, has_packets, now.ns);
        } else {
            self.interface.receive(datagram, source, self.is_busy, now, &mut self.random, out);
        }
        self.interface.tick(now, &mut self.random, out);
        self.publish();
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Send>) {
        self.interface.tick(now, &mut self.random, out);
        self.publish();
    }

    fn received(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.packets)
    }
}

/// Has the datagrams of `first` and all that follows from them arrive; returns how many there were.
fn deliver(one: &mut Host, other: &mut Host, mut from_one: Vec<Send>, now: Now) -> usize {
    let (mut count, mut from_other) = (0, Vec::new());
    while !from_one.is_empty() || !from_other.is_empty() {
        for Send { to, bytes } in std::mem::take(&mut from_one) {
            count += 1;
            if to == address(other.number) {
                other.receive(&bytes, address(one.number), now, &mut from_other);
            }
        }
        for Send { to, bytes } in std::mem::take(&mut from_other) {
            count += 1;
            if to == address(one.number) {
                one.receive(&bytes, address(other.number), now, &mut from_one);
            }
        }
    }
    count
}

fn two(psk: Option<[u8; 32]>) -> (Host, Host) {
    (Host::new(1, vec![peer(2, psk)]), Host::new(2, vec![peer(1, psk)]))
}

/// A packet whose padding is known: a multiple of 16 bytes.
const PACKET: &[u8] = b"sixteen bytes!!!";
const OTHER: &[u8] = b"and sixteen more";

fn send(from: &mut Host, to: &mut Host, packet: &[u8], now: Now) -> usize {
    let mut out = Vec::new();
    from.send(packet, address(to.number), now, &mut out);
    deliver(from, to, out, now)
}

#[test]
fn the_first_packet_arrives_after_the_handshake_that_it_causes() {
    for psk in [None, Some([7; 32])] {
        let (mut one, mut two) = two(psk);
        assert_eq!(send(&mut one, &mut two, PACKET, at(1)), 3, "two messages, and the packet");
        assert_eq!(two.received(), [PACKET]);
        assert_eq!(send(&mut two, &mut one, OTHER, at(1)), 1, "the session goes both ways");
        assert_eq!(one.received(), [OTHER]);
        assert_eq!(one.interface.counts().completed, 1);
    }
}

#[test]
fn hosts_with_different_preshared_keys_have_no_session() {
    let mut one = Host::new(1, vec![peer(2, Some([1; 32]))]);
    let mut two = Host::new(2, vec![peer(1, Some([2; 32]))]);
    send(&mut one, &mut two, PACKET, at(1));
    assert!(two.received().is_empty(), "a packet arrived by the wrong key");
    assert_eq!(one.interface.counts().refused, 1);
    assert!(one.sessions.peer(0).unwrap().current().is_none());
    two.tick(at(2), &mut Vec::new());
    for host in [&one, &two] {
        let shown = host.interface.found()[0].state.last_handshake_unix;
        assert_eq!((shown, host.interface.counts().completed), (None, 0), "keys that nobody has");
    }
}

#[test]
fn a_clock_that_was_set_back_is_no_reason_to_be_refused() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    two.received();
    // The session is over, and an hour as well, but the wrong way.
    let back = Now { unix_ns: at(1).unix_ns - 3_600 * SECOND_NS, ..at(200) };
    let mut out = Vec::new();
    one.tick(back, &mut out);
    deliver(&mut one, &mut two, out, back);
    send(&mut one, &mut two, OTHER, back);
    assert_eq!(two.received(), [OTHER], "its handshake is refused for an hour");
}

#[test]
fn a_host_that_has_slept_agrees_on_new_keys() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    one.interface.forget_sessions();
    one.publish();
    assert!(one.sessions.peer(0).unwrap().current().is_none(), "its peer has forgotten this one");
    send(&mut one, &mut two, OTHER, at(7));
    assert_eq!(two.received(), [PACKET, OTHER]);
}

#[test]
fn a_stranger_is_not_answered() {
    let (mut one, mut two) = (Host::new(3, vec![peer(2, None)]), Host::new(2, vec![peer(1, None)]));
    assert_eq!(send(&mut one, &mut two, PACKET, at(1)), 1, "a stranger got an answer");
    assert_eq!(two.interface.counts().refused, 1);
}

/// What was recorded is sent again.
#[test]
fn a_peer_whose_lease_comes_after_its_first_message_waits_no_longer_than_for_that() {
    let (mut one, mut two) = (Host::new(1, vec![peer(2, None)]), Host::new(2, vec![]));
    assert_eq!(send(&mut one, &mut two, PACKET, at(1)), 1, "a stranger got an answer");
    // Others come, too, but not more than may.
    for number in 3..3 + STRANGERS_MAX as u8 - 1 {
        let mut other = Host::new(number, vec![peer(2, None)]);
        send(&mut other, &mut two, PACKET, at(1));
    }
    configure(&mut two.interface, &[peer(1, None)]);
    let mut out = Vec::new();
    two.tick(at_ms(1_100), &mut out);
    deliver(&mut two, &mut one, out, at_ms(1_100));
    assert_eq!(two.received(), [PACKET], "its packet waits until it tries again");
    configure(&mut two.interface, &[]);
    configure(&mut two.interface, &[peer(1, None)]);
    let mut out = Vec::new();
    two.tick(at_ms(1_200), &mut out);
    assert!(out.is_empty(), "once is enough");
}

#[test]
fn nothing_counts_twice() {
    let (mut one, mut two) = two(None);
    let mut first = Vec::new();
    one.send(PACKET, address(2), at(1), &mut first);
    let initiation = first[0].bytes.clone();
    deliver(&mut one, &mut two, first, at(1));
    let mut out = Vec::new();
    two.receive(&initiation, address(1), at(3), &mut out);
    assert_eq!((out.len(), two.interface.counts().replayed), (0, 1), "an old handshake again");

    one.send(OTHER, address(2), at(3), &mut out);
    let datagram = out.remove(0).bytes;
    two.received();
    two.receive(&datagram, address(1), at(3), &mut out);
    two.receive(&datagram, address(1), at(3), &mut out);
    assert_eq!((two.received().len(), &*two.refused), (1, &["not opened"][..]));
    let mut changed = datagram;
    changed[DATA_HEADER_BYTES] ^= 1;
    changed[8] += 1;
    two.receive(&changed, address(1), at(3), &mut out);
    assert!(two.received().is_empty(), "a changed packet was let in");
}

#[test]
fn a_session_is_renewed_before_it_ends_and_no_packet_is_lost() {
    let (mut one, mut two) = two(None);
    let mut sent = 0;
    for second in 1..1_000 {
        send(&mut one, &mut two, PACKET, at(second));
        send(&mut two, &mut one, OTHER, at(second));
        sent += 1;
        assert_eq!((one.received().len(), two.received().len()), (1, 1), "second {second}");
    }
    let completed = one.interface.counts().completed + two.interface.counts().completed;
    let expected = 2 * sent / 121..=2 * sent / 119 + 2;
    assert!(expected.contains(&completed), "{completed} handshakes in {sent} seconds");
}

/// Only one side sends: whoever began the handshake renews it although it only receives.
#[test]
fn a_session_is_renewed_by_who_only_receives() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    let mut lost = 0;
    for second in 2..600 {
        send(&mut two, &mut one, OTHER, at(second));
        lost += u64::from(one.received().is_empty());
        let mut out = Vec::new();
        one.tick(at(second), &mut out);
        deliver(&mut one, &mut two, out, at(second));
    }
    assert_eq!(lost, 0, "packets were lost while keys were renewed");
}

#[test]
fn on_an_idle_network_nothing_is_sent() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    let mut datagrams = 0;
    for second in 2..600 {
        for (from, to) in [(1, 2), (2, 1)] {
            let (from, to) = if from < to { (&mut one, &mut two) } else { (&mut two, &mut one) };
            let mut out = Vec::new();
            from.tick(at(second), &mut out);
            datagrams += deliver(from, to, out, at(second));
        }
    }
    assert_eq!(datagrams, 1, "one empty packet says that the packet has arrived");
    assert!(one.sessions.places.iter().all(Option::is_none), "old keys are kept");
}

#[test]
fn a_keepalive_is_sent_as_often_as_it_says() {
    let config = PeerConfig { keepalive_seconds: 25, ..peer(2, None) };
    let (mut one, mut two) = (Host::new(1, vec![config]), Host::new(2, vec![peer(1, None)]));
    let mut datagrams = 0;
    for second in 1..=1_000 {
        let mut out = Vec::new();
        one.tick(at(second), &mut out);
        datagrams += deliver(&mut one, &mut two, out, at(second));
    }
    let handshakes = one.interface.counts().completed;
    assert!((35..=60).contains(&(datagrams - 2 * handshakes as usize)), "{datagrams}");
}

#[test]
fn a_silent_peer_is_asked_for_ninety_seconds_and_its_packets_are_counted() {
    let (mut one, _) = two(None);
    let mut out = Vec::new();
    for _ in 0..100 {
        one.send(PACKET, address(2), at(1), &mut out);
    }
    for half in 2..400 {
        one.tick(at_ms(half * 500), &mut out);
    }
    assert!((15..=19).contains(&out.len()), "{} handshakes were tried", out.len());
    assert_eq!(one.interface.counts().expired_packets, 32, "as many as may wait");
}

/// A pod that never stops asking for one that never answers.
#[test]
fn a_silent_peer_uses_up_no_numbers() {
    let (mut one, _) = two(None);
    let mut out = Vec::new();
    for second in 1..2_000 {
        one.send(PACKET, address(2), at(second), &mut out);
    }
    assert!(out.len() > 300, "it is not asked for: {} handshakes", out.len());
    assert!(one.interface.numbers.places() <= 2, "each attempt takes memory for good");
}

/// The peer has been restarted, and knows no session.
#[test]
fn a_peer_without_our_session_is_handshaken_with_anew() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    two = Host::new(2, vec![peer(1, None)]);
    let mut again = None;
    for second in 2..40 {
        send(&mut one, &mut two, OTHER, at(second));
        if again.is_none() && !two.received().is_empty() {
            again = Some(second);
        }
    }
    assert!(again.is_some_and(|second| second <= 18), "heard again at second {again:?}");
}

/// It has nothing to send, and the peer sends by the session of before.
#[test]
fn a_host_that_was_restarted_hears_at_once_by_its_greeting() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    two = Host::new(2, vec![peer(1, None)]);
    two.interface.greet(at(2));
    let mut out = Vec::new();
    two.tick(at(2), &mut out);
    deliver(&mut two, &mut one, out, at(2));
    send(&mut one, &mut two, OTHER, at(2));
    assert_eq!(two.received(), [OTHER]);
}

#[test]
fn a_peer_that_was_restarted_is_heard_at_once() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    one = Host::new(1, vec![peer(2, None)]);
    send(&mut one, &mut two, OTHER, at(2));
    assert_eq!(two.received(), [PACKET, OTHER]);
    send(&mut two, &mut one, PACKET, at(2));
    assert_eq!(one.received(), [PACKET]);
}

#[test]
fn both_may_begin_at_once() {
    let (mut one, mut two) = two(None);
    let (mut from_one, mut from_two) = (Vec::new(), Vec::new());
    one.send(PACKET, address(2), at(1), &mut from_one);
    two.send(OTHER, address(1), at(1), &mut from_two);
    for Send { bytes, .. } in from_two {
        one.receive(&bytes, address(2), at(1), &mut from_one);
    }
    deliver(&mut one, &mut two, from_one, at(1));
    assert_eq!((one.received(), two.received()), (vec![OTHER.to_vec()], vec![PACKET.to_vec()]));
    for second in 2..300 {
        send(&mut one, &mut two, PACKET, at(second));
        send(&mut two, &mut one, OTHER, at(second));
        assert_eq!((one.received().len(), two.received().len()), (1, 1), "second {second}");
    }
}

/// Who is short of time asks for a proof of the address, and then answers.
#[test]
fn a_busy_host_answers_who_can_receive() {
    let (mut one, mut two) = two(None);
    two.is_busy = true;
    send(&mut one, &mut two, PACKET, at(1));
    assert_eq!((two.interface.counts().cookies, two.received().len()), (1, 0));
    let mut out = Vec::new();
    one.tick(at(7), &mut out);
    deliver(&mut one, &mut two, out, at(7));
    // The second message needs no proof: only `two` is busy.
    assert_eq!(two.received(), [PACKET], "the packet waits for ever");
}

/// A host that is flooded answers the answer to its own handshake with a cookie, too.
#[test]
fn a_flooded_host_gets_the_session_that_it_has_begun() {
    let (mut one, mut two) = two(None);
    one.is_busy = true;
    send(&mut one, &mut two, PACKET, at(1));
    assert_eq!((one.interface.counts().cookies, two.received().len()), (1, 0));
    let mut out = Vec::new();
    one.tick(at(7), &mut out);
    deliver(&mut one, &mut two, out, at(7));
    assert_eq!(two.received(), [PACKET], "it never gets the answer");
}

#[test]
fn a_flood_of_handshakes_has_no_answer_without_proof_and_few_with_it() {
    let (_, mut two) = two(None);
    two.is_busy = true;
    let strangers: Vec<_> = (0..200).map(|_| Host::new(1, vec![peer(2, None)])).collect();
    let (mut out, mut flood) = (Vec::new(), Vec::new());
    for mut stranger in strangers {
        stranger.send(PACKET, address(2), at(1), &mut flood);
    }
    for Send { bytes, .. } in &flood {
        two.receive(bytes, address(9), at(1), &mut out);
    }
    assert!(out.iter().all(|it| it.bytes.len() == COOKIE_REPLY_BYTES));
    // One of them can receive, and so knows the cookie of its address.
    let mut shower = Host::new(1, vec![peer(2, None)]);
    let mut first = Vec::new();
    shower.send(PACKET, address(2), at(1), &mut first);
    out.clear();
    two.receive(&first[0].bytes, address(1), at(1), &mut out);
    let cookie = out[0].bytes.clone();
    shower.receive(&cookie, address(2), at(1), &mut first);
    out.clear();
    for round in 0..200 {
        let mut again = Vec::new();
        shower.interface.begin(0, at_ms(2_000 + round), &mut shower.random, &mut again);
        two.receive(&again[0].bytes, address(1), at_ms(2_000 + round), &mut out);
    }
    let counts = two.interface.counts();
    assert!(counts.limited > 180, "{counts:?}");
}

#[test]
fn a_peer_is_answered_where_it_is_now() {
    let mut one = Host::new(1, vec![peer(2, None), peer(3, None)]);
    let mut two = Host::new(2, vec![peer(1, None)]);
    send(&mut one, &mut two, PACKET, at(1));
    let number = number_at(&one.sessions, address(2)).unwrap();
    one.interface.moved(number, address(9));
    one.publish();
    assert_eq!(number_at(&one.sessions, address(9)), Some(number));
}

/// Whatever leases say of addresses: what is for a peer is sealed for its key, and what comes by
/// its session is its own.
#[test]
fn peers_at_one_address_are_told_apart_by_their_keys() {
    let mut one = Host::new(
        1,
        vec![peer(3, None), PeerConfig { endpoint: Some(address(3)), ..peer(2, None) }],
    );
    let routes: Vec<_> = one.interface.routes().collect();
    assert_eq!(routes.len(), 2);
    assert_ne!(routes[0].1, routes[1].1, "both stand for one peer");
    for (subnets, identity) in routes {
        let number = crate::wireguard::sessions::number_of(identity).unwrap();
        let found = one.interface.peers[number as usize].as_ref().unwrap().public_key;
        let of = if found == key(2).public() { 2 } else { 3 };
        assert_eq!(subnets, peer(of, None).allowed, "packets of one are sealed for another");
    }
    // It moves to where another is: neither gets the other's packets.
    one.interface.moved(1, address(3));
    one.publish();
    assert_eq!(one.interface.routes().count(), 2);
}

#[test]
fn peers_that_stay_keep_their_sessions() {
    let (mut one, mut two) = two(None);
    send(&mut one, &mut two, PACKET, at(1));
    configure(&mut one.interface, &[peer(3, None), peer(2, None)]);
    one.publish();
    assert_eq!(send(&mut one, &mut two, OTHER, at(2)), 1, "a new peer costs the old one its keys");
    configure(&mut one.interface, &[peer(3, None)]);
    one.publish();
    assert!(number_at(&one.sessions, address(2)).is_none());
    let mut out = Vec::new();
    send(&mut two, &mut one, OTHER, at(2));
    one.receive(&[4; 64], address(2), at(2), &mut out);
    assert!(one.received().is_empty(), "a removed peer is still heard");
    configure(&mut one.interface, &[peer(2, None)]);
    one.publish();
    assert!(one.sessions.peer(0).unwrap().current().is_none(), "it has its old session again");
    // Whatever comes and goes, a number stands for one key, and a key has one.
    let numbers = [2, 3].map(|number| one.interface.by_key[&key(number).public()]);
    assert_eq!((numbers, one.interface.peers.len()), ([0, 1], 2));
}

/// Beside boringtun, which has nothing of this: either may begin, and each reads the other.
#[test]
fn another_wireguard_understands_all_of_it() {
    for (begins_here, psk) in
        [(true, None), (false, None), (true, Some([3; 32])), (false, Some([3; 32]))]
    {
        let mut here = Host::new(1, vec![peer(2, psk)]);
        let there_key = x25519::StaticSecret::from(*key(2).bytes());
        let our_key = x25519::PublicKey::from(key(1).public().0);
        let mut there = Tunn::new(there_key, our_key, psk, None, 7, None);
        let mut room = [0; 2048];
        // An IPv4 packet, of which boringtun looks at the header.
        let mut packet = [0; 32];
        packet[0] = 0x45;
        packet[3] = 32;
        let mut out = Vec::new();
        if begins_here {
            here.send(&packet, address(2), at(1), &mut out);
        } else {
            let TunnResult::WriteToNetwork(bytes) = there.encapsulate(&packet, &mut room) else {
                panic!("it does not begin");
            };
            here.receive(bytes, address(2), at(1), &mut out);
        }
        let mut arrived = 0;
        while let Some(Send { bytes, .. }) = (!out.is_empty()).then(|| out.remove(0)) {
            match there.decapsulate(None, &bytes, &mut room) {
                TunnResult::WriteToNetwork(answer) => {
                    here.receive(answer, address(2), at(1), &mut out);
                    while let TunnResult::WriteToNetwork(more) =
                        there.decapsulate(None, &[], &mut room)
                    {
                        here.receive(more, address(2), at(1), &mut out);
                    }
                }
                TunnResult::WriteToTunnelV4(bytes, _) => {
                    assert_eq!(bytes, packet);
                    arrived += 1;
                }
                TunnResult::Done => {}
                other @ (TunnResult::Err(_) | TunnResult::WriteToTunnelV6(..)) => {
                    panic!("it answers {other:?}")
                }
            }
        }
        let here_arrived = here.received();
        assert_eq!((arrived, here_arrived.len()), if begins_here { (1, 0) } else { (0, 1) });
        for round in 0..3 {
            here.send(&packet, address(2), at(2 + round), &mut out);
            let bytes = out.remove(0).bytes;
            let opened = there.decapsulate(None, &bytes, &mut room);
            assert!(matches!(opened, TunnResult::WriteToTunnelV4(..)), "{opened:?}");
            let TunnResult::WriteToNetwork(bytes) = there.encapsulate(&packet, &mut room) else {
                panic!("it has no session");
            };
            here.receive(bytes, address(2), at(2 + round), &mut out);
            assert_eq!(here.received(), [packet]);
        }
    }
}
