//! Peers that are used, heard, silent, and back, second by second.

use super::*;

const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 8285);
const TARGET: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);

/// One peer and a clock of seconds.
struct Lab {
    reach: Reach,
    start: Instant,
    second: u64,
    sent: u64,
    received: u64,
}

impl Lab {
    fn new() -> Self {
        let mut lab = Self {
            reach: Reach::default(),
            start: Instant::now(),
            second: 0,
            sent: 7,
            received: 7,
        };
        assert_eq!(lab.look(), 0, "nobody sends to it");
        lab
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.second)
    }

    /// Looks; returns how many echoes are asked for.
    fn look(&mut self) -> usize {
        let (sent, received) = (self.sent, self.received);
        let sample = Sample { targets: vec![TARGET], sent, received };
        self.reach.look([(PEER, sample)], self.now()).len()
    }

    /// A second passes in which so much is sent and received.
    fn pass(&mut self, sent: u64, received: u64) -> usize {
        self.second += 1;
        self.sent += sent;
        self.received += received;
        self.look()
    }

    fn state(&self) -> ContactState {
        self.reach.contacts(self.now())[&PEER].state
    }
}

#[test]
fn an_unused_peer_is_left_alone() {
    let mut lab = Lab::new();
    let echoes: usize = (0..60).map(|_| lab.pass(0, 0)).sum();
    assert_eq!((echoes, lab.state()), (0, ContactState::Idle));
}

#[test]
fn one_that_answers_is_asked_for_its_round_trip_only() {
    let mut lab = Lab::new();
    let echoes: usize = (0..60)
        .map(|_| {
            let echoes = lab.pass(1, 1);
            if echoes > 0 {
                let now = lab.now() + Duration::from_millis(3);
                lab.reach.answered(TARGET, now);
            }
            echoes
        })
        .sum();
    assert_eq!((echoes, lab.state()), (2, ContactState::Heard));
    let contact = lab.reach.contacts(lab.now())[&PEER];
    assert_eq!(contact.round_trip, Some(Duration::from_millis(3)));
}

#[test]
fn one_that_was_heard_and_is_not_any_more_is_silent() {
    let mut lab = Lab::new();
    lab.pass(1, 1);
    let quiet_from = lab.second;
    while lab.state() != ContactState::Silent {
        lab.pass(1, 0);
        assert!(lab.second < 20, "a dead peer is not noticed");
    }
    assert_eq!(lab.second - quiet_from, 8);
    let contact = lab.reach.contacts(lab.now())[&PEER];
    assert_eq!(contact.heard, Some(lab.start + Duration::from_secs(quiet_from)));
    // It stays so, for fewer echoes, until one comes back.
    let echoes: usize = (0..50).map(|_| lab.pass(1, 0)).sum();
    assert_eq!((echoes, lab.state()), (10, ContactState::Silent));
    lab.reach.answered(TARGET, lab.now());
    assert_eq!(lab.state(), ContactState::Heard);
}

#[test]
fn one_way_traffic_to_a_live_peer_is_no_alarm() {
    let mut lab = Lab::new();
    for _ in 0..120 {
        if lab.pass(100, 0) > 0 {
            lab.reach.answered(TARGET, lab.now());
        }
        assert_ne!(lab.state(), ContactState::Silent);
    }
    assert_eq!(lab.state(), ContactState::Heard);
}

#[test]
fn one_that_was_never_heard_is_silent_once_used() {
    let mut lab = Lab::new();
    let states: Vec<_> = (0..12)
        .map(|_| {
            lab.pass(1, 0);
            lab.state()
        })
        .collect();
    assert_eq!(states[0], ContactState::Asked);
    assert_eq!(states[11], ContactState::Silent);
    assert_eq!(lab.reach.contacts(lab.now())[&PEER].heard, None);
    // It stays so for a minute, whatever the pauses in its use.
    (0..59).for_each(|_| _ = lab.pass(0, 0));
    assert_eq!(lab.state(), ContactState::Silent);
    lab.pass(0, 0);
    assert_eq!(lab.state(), ContactState::Idle, "unused, it troubles nobody");
    // Used again, it gets its chance.
    lab.pass(1, 0);
    assert_eq!(lab.state(), ContactState::Asked);
    lab.pass(0, 0);
    assert_eq!(lab.state(), ContactState::Silent);
}

#[test]
fn a_dead_peer_that_is_used_now_and_then_does_not_look_well() {
    let mut lab = Lab::new();
    lab.pass(1, 1);
    let mut states = Vec::new();
    for second in 0..120 {
        lab.pass(u64::from(second % 12 == 0), 0);
        states.push(lab.state());
    }
    let first = states.iter().position(|state| *state == ContactState::Silent).unwrap();
    assert!(first < 30, "{states:?}");
    assert!(states[first..].iter().all(|state| *state == ContactState::Silent), "{states:?}");
}

#[test]
fn one_live_lease_of_several_is_enough() {
    let (live, stale) = (TARGET, Ipv4Addr::new(10, 5, 0, 0));
    let (mut reach, start) = (Reach::default(), Instant::now());
    let mut asked = std::collections::BTreeSet::new();
    for second in 0..60 {
        let now = start + Duration::from_secs(second);
        let sample = Sample { targets: vec![stale, live], sent: second, received: 0 };
        for (_, target) in reach.look([(PEER, sample)], now) {
            asked.insert(target);
            if target == live {
                reach.answered(target, now);
            }
        }
        assert_ne!(reach.contacts(now)[&PEER].state, ContactState::Silent, "at {second} s");
    }
    assert_eq!(asked.len(), 2);
}

#[test]
fn some_of_many_dead_peers_are_known_at_once() {
    let (mut reach, start) = (Reach::default(), Instant::now());
    for second in 0..12 {
        let peers = (0..5000u32).map(|number| {
            let endpoint = SocketAddrV4::new(Ipv4Addr::from_bits(0xC000_0000 + number), 8285);
            let targets = vec![Ipv4Addr::from_bits(0x0A00_0000 + number * 256)];
            (endpoint, Sample { targets, sent: second, received: 0 })
        });
        reach.look(peers, start + Duration::from_secs(second));
    }
    let contacts = reach.contacts(start + Duration::from_secs(12));
    let silent = contacts.values().filter(|it| it.state == ContactState::Silent).count();
    assert!(silent >= 256, "{silent} of 5000 dead peers are known after 12 s");
}

#[test]
fn many_silent_peers_take_turns() {
    let mut reach = Reach::default();
    let start = Instant::now();
    let samples = |sent| {
        (0..1000).map(move |number| {
            let endpoint = SocketAddrV4::new(Ipv4Addr::from_bits(0xC000_0200 + number), 8285);
            let target = Ipv4Addr::from_bits(0x0A05_0000 + number * 256);
            (endpoint, Sample { targets: vec![target], sent, received: 0 })
        })
    };
    let mut asked = std::collections::BTreeSet::new();
    for second in 0..30 {
        let echoes = reach.look(samples(second), start + Duration::from_secs(second));
        assert!(echoes.len() <= ECHOES_MAX);
        asked.extend(echoes);
    }
    assert_eq!(asked.len(), 1000, "some were never asked");
}

#[test]
fn peers_that_left_are_forgotten() {
    let mut lab = Lab::new();
    lab.pass(1, 1);
    lab.reach.look([], lab.now());
    assert!(lab.reach.contacts(lab.now()).is_empty());
}
