//! A worker beside a peer that talks WireGuard, and what is sealed beside what is opened.

use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::engine::contain::tests::Scene;
use crate::engine::cycle::monotonic_ns;
use crate::engine::{Engine, Worker, WorkerConfig};
use crate::forward::tests::{FAR, POD, local, udp};
use crate::forward::{IcmpLimiter, Local, Senders};
use crate::offload::Full;
use crate::route::{Endpoint, Peer, Published, Table};
use crate::stats::DirectionStats;
use crate::wireguard::interface::tests::pair;

/// A worker that has a session with the peer of the scene, whose sessions come too.
fn sealed_scene(engine: Engine) -> (Scene, WorkerConfig, EventQueue, Sessions) {
    let (scene, mut config) = Scene::new(Some(engine));
    let peer = scene.peer.local_addr().unwrap();
    let [mut one, mut other] = pair([scene.tunnel, peer], monotonic_ns());
    let (events, queue) = events();
    let sessions = Place::new(one.take_changed().unwrap());
    config.cipher = Some(Cipher { sessions, events });
    config.local = Local { senders: Senders::Proven, ..config.local };
    let peer = Peer::new("10.5.2.0/24".parse().unwrap(), identity(0));
    config.routes = Published::new(Table::build(vec![Arc::new(peer)]));
    (scene, config, queue, other.take_changed().unwrap())
}

fn open(sessions: &Sessions, datagram: &mut [u8]) -> Vec<u8> {
    let Some(Message::Data(header)) = Message::parse(datagram) else { panic!("{datagram:?}") };
    let session = sessions.session(header.receiver_index).expect("a session of the peer's");
    session.open(header.counter, datagram).expect("what the worker sealed").to_vec()
}

fn datagram(sessions: &Sessions, packet: &[u8]) -> Vec<u8> {
    let session = sessions.peer(0).unwrap().current().unwrap();
    let mut room = vec![0; 4096];
    let span = Span::new(0, packet.len());
    let bytes = seal(session, packet, [Span::default(), span], 1472, &mut room).unwrap();
    room.truncate(bytes);
    room
}

#[test]
fn a_worker_seals_what_it_sends_and_opens_what_it_receives() {
    for engine in Engine::ALL.iter().copied() {
        let (scene, config, _queue, sessions) = sealed_scene(engine);
        let stats = Arc::clone(&scene.stats);
        let worker = Worker::spawn(config, |_end| ()).unwrap();
        for length in [0, 1, 16, 100, 1392, 1444] {
            let payload = vec![7; length];
            scene.give_host(&payload);
            let mut buffer = [0; 2048];
            let bytes = scene.peer.recv(&mut buffer).unwrap();
            let packet = udp(POD, FAR, &payload);
            assert!(!buffer[..bytes].windows(20).any(|it| it == &packet[..20]), "it is readable");
            let opened = open(&sessions, &mut buffer[..bytes]);
            assert_eq!(opened[..packet.len()], packet, "a tunnel of this kind is no hop");
            let padded_bytes = packet.len().next_multiple_of(16).min(1472);
            assert_eq!(opened.len(), padded_bytes, "of {} bytes", packet.len());

            let back = datagram(&sessions, &udp(FAR, POD, &payload));
            scene.peer.send_to(&back, scene.tunnel).unwrap();
            assert_eq!(scene.at_host(), payload);
        }
        drop(worker);
        assert_eq!((stats.egress.drops_total(), stats.ingress.drops_total()), (0, 0));
    }
}

/// Each of these costs itself and nothing else.
#[test]
fn what_a_peer_has_not_sealed_is_dropped_for_its_reason() {
    let (scene, config, queue, sessions) = sealed_scene(Engine::Mmsg);
    let stats = Arc::clone(&scene.stats);
    let worker = Worker::spawn(config, |_end| ()).unwrap();
    let send = |bytes: &[u8]| scene.peer.send_to(bytes, scene.tunnel).unwrap();
    let sealed = datagram(&sessions, &udp(FAR, POD, b"fine"));
    send(&udp(FAR, POD, b"not sealed"));
    send(&[0; 40]);
    send(&sealed);
    send(&sealed);
    let mut forged = datagram(&sessions, &udp(FAR, POD, b"forged"));
    *forged.last_mut().unwrap() ^= 1;
    send(&forged);
    let mut strange = datagram(&sessions, &udp(FAR, POD, b"strange"));
    strange[4] ^= 1;
    send(&strange);
    send(&sealed[..20]);
    // Of another pod's subnet than the peer's.
    send(&datagram(&sessions, &udp(Ipv4Addr::new(10, 5, 3, 9), POD, b"stolen")));
    send(&datagram(&sessions, &[]));
    let initiation = [[1, 0, 0, 0].as_slice(), &[9; 144]].concat();
    send(&initiation);
    send(&datagram(&sessions, &udp(FAR, POD, b"last")));
    assert_eq!((scene.at_host(), scene.at_host()), (b"fine".to_vec(), b"last".to_vec()));
    drop(worker);
    let of = |reason| stats.ingress.drops(reason);
    assert_eq!(of(DropReason::NotWireguard), 2);
    assert_eq!(of(DropReason::Replayed), 2, "the second and the cut one");
    assert_eq!(of(DropReason::NotAuthentic), 1);
    assert_eq!(of(DropReason::UnknownSession), 1);
    assert_eq!(of(DropReason::SourceNotLeased), 1);
    assert_eq!(stats.ingress.drops_total(), 7);
    assert_eq!(stats.ingress.packets_received.get(), 9);
    assert_eq!((stats.keepalives.get(), stats.handshakes.get()), (1, 1));
    let told = queue.next(Duration::ZERO).unwrap();
    let Some(Event::Message { bytes, length, source }) = told else { panic!("{told:?}") };
    assert_eq!(bytes[..length], initiation);
    assert_eq!(source, scene.peer.local_addr().unwrap());
    assert!(!matches!(queue.next(Duration::ZERO), Ok(Some(_))), "more than the handshake");
}

#[test]
fn a_packet_without_a_session_waits_and_is_not_counted_as_lost() {
    let (scene, mut config) = Scene::new(Some(Engine::Mmsg));
    let peer = scene.peer.local_addr().unwrap();
    let [mut one, _] = pair([scene.tunnel, peer], 1);
    let now = crate::wireguard::Now { ns: u64::MAX / 2, unix_ns: 1 };
    one.tick(now, &mut crate::wireguard::interface::tests::Counting(1), &mut Vec::new());
    let (events, queue) = events();
    let sessions = Place::new(one.take_changed().unwrap());
    config.cipher = Some(Cipher { sessions, events });
    let peer = Peer::new("10.5.2.0/24".parse().unwrap(), identity(0));
    config.routes = Published::new(Table::build(vec![Arc::new(peer)]));
    let stats = Arc::clone(&scene.stats);
    let worker = Worker::spawn(config, |_end| ()).unwrap();
    scene.give_host(b"early");
    let patience = Duration::from_secs(60);
    let Ok(Some(Event::Waiting { peer: 0, packet })) = queue.next(patience) else {
        panic!("nobody is told that a packet waits");
    };
    drop(worker);
    let early = packet.windows(5).rposition(|window| window == b"early").expect("it is in there");
    assert_eq!(packet[early + 5..], vec![0; packet.len() - early - 5], "padding");
    assert_eq!(packet.len() % 16, 0, "its exact length shows");
    assert_eq!((stats.egress.packets_forwarded.get(), stats.egress.drops_total()), (1, 0));
}

fn endpoint(table: &Table, peer: SocketAddr) -> Endpoint {
    Endpoint { host: table.host_key(peer.ip()), port: peer.port() }
}

proptest! {
    /// Whatever a plan consists of, the peer opens the same packets in the same order, and all
    /// datagrams of a message but the last have its size.
    #[test]
    fn a_sealed_plan_is_opened_to_the_same_packets(
        packets in prop::collection::vec((1usize..3, 20usize..1400, 0usize..60), 1..40),
    ) {
        let addresses = [([192, 0, 2, 1], 7).into(), ([192, 0, 2, 2], 7).into()];
        let [mut one, mut other] = pair(addresses, 1);
        let (events, _queue) = events();
        let cipher = Cipher { sessions: Place::new(one.take_changed().unwrap()), events };
        let sessions = other.take_changed().unwrap();
        let peer = Arc::new(Peer::new("10.5.2.0/24".parse().unwrap(), identity(0)));
        let table = Table::build(vec![peer]);
        let to = endpoint(&table, identity(0));

        let plain_bytes = 1 << 18;
        let mut arena = vec![0; 2 * plain_bytes + SEALED_MORE_BYTES];
        for (byte, value) in arena.iter_mut().take(plain_bytes).zip(0u32..) {
            *byte = (value.wrapping_mul(2_654_435_761) >> 24) as u8;
        }
        let mut plan = SendPlan::growing_by(64, GROWTH_BYTES);
        let (mut at, mut expected) = (0, Vec::new());
        'full: for (repeats, bytes, header_bytes) in packets {
            for _ in 0..4 * repeats {
                let header = Span::new(at + 4000, header_bytes);
                let payload = Span::new(at, bytes);
                if plan.push(to, [header, payload]) == Err(Full) {
                    break 'full;
                }
                let parts = [header, payload].map(|span| span.of(&arena).unwrap());
                expected.push(parts.concat());
                at = (at + 1500) % (plain_bytes - 8000);
            }
        }
        let (stats, icmp_limit, local) =
            (DirectionStats::default(), IcmpLimiter::default(), local());
        let context = Context {
            local: &local, table: &table, stats: &stats, icmp_limit: &icmp_limit, now_ns: 5,
        };
        let mut sealer = Sealer::new(&cipher, plain_bytes);
        sealer.seal(&mut plan, &mut arena, &context);
        let mut opened = Vec::new();
        for index in 0..plan.messages().len() {
            prop_assert!(matches!(sealer.outcome(index), Sealed::Ready(_)));
            prop_assert_eq!(sealer.destination(index), addresses[1]);
            let message = plan.messages()[index];
            prop_assert!(message.bytes <= 65_507, "one send takes no more");
            let mut sizes = Vec::new();
            for [span, none] in plan.datagrams(index) {
                prop_assert_eq!(none.bytes, 0, "a datagram in two parts");
                let mut datagram = span.of(&arena).unwrap().to_vec();
                sizes.push(datagram.len());
                opened.push(open(&sessions, &mut datagram));
            }
            prop_assert_eq!(sizes.len(), usize::from(message.segments));
            let last = sizes.pop().unwrap();
            prop_assert!(sizes.iter().all(|size| *size == usize::from(message.segment_bytes)));
            prop_assert!(last <= usize::from(message.segment_bytes));
        }
        prop_assert_eq!(opened.len(), expected.len());
        for (opened, expected) in opened.iter().zip(&expected) {
            prop_assert_eq!(&opened[..expected.len()], &expected[..]);
            prop_assert!(opened[expected.len()..].iter().all(|byte| *byte == 0));
        }
    }
}

/// A pod sends to many hosts that are down.
#[test]
fn packets_without_a_session_leave_room_for_handshakes() {
    let (events, queue) = events();
    let packet = || Event::Waiting { peer: 7, packet: Box::from([0; 64]) };
    let told = (0..2 * EVENTS_MAX).filter(|_| events.tell(packet())).count();
    assert_eq!(told, WAITING_MAX, "a pod's packets take up the queue");
    let source = ([192, 0, 2, 1], 7).into();
    let message = || Event::Message { bytes: [0; HANDSHAKE_BYTES_MAX], length: 148, source };
    assert!(events.tell(message()), "no host gets a session any more");
    assert!(!queue.is_busy(), "honest hosts are asked for proofs because of a pod");
    for _ in 0..WAITING_MAX {
        queue.next(Duration::ZERO).unwrap();
    }
    let told = (0..2 * EVENTS_MAX).filter(|_| events.tell(message())).count();
    assert!(told < EVENTS_MAX && queue.is_busy());
    assert!(matches!(queue.next(Duration::ZERO), Ok(Some(Event::Message { .. }))));
    assert!(events.tell(packet()), "what has been taken out makes room");
}
