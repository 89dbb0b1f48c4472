//! One peer in a world whose faults are switched on and off, and a clock that the tests turn.

mod many;

use std::net::Ipv4Addr;

use super::*;
use crate::backend::peer::evidence::{LOOK, Use};
use crate::backend::peer::state::{Obstacle, PeerState, Way};
use crate::route::Prefix;

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 5, 1, 0));
const BEYOND: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 5, 1, 254));
const EXTERNAL: u32 = 2;
const TUNNEL: u32 = 7;
const BY: IpAddr = HOST;

/// A fault is known, and its end.
const KNOWN: u64 = 10_000;
const WELL: u64 = 5_000;

/// What carries the packets, and so what shows that a peer is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plane {
    /// Workers count what they send and receive, the daemon's echoes as well.
    Counts,
    /// The kernel says when it sent last, and to nobody what it received.
    Times,
}

/// Echoes may keep themselves in use for so long: where the kernel tells when it sent last, they
/// may have hidden packets of others.
fn quiet_after(plane: Plane) -> u64 {
    if plane == Plane::Counts { 61_000 } else { 361_000 }
}

const PLANES: [Plane; 2] = [Plane::Counts, Plane::Times];

struct World {
    plane: Plane,
    machine: Machine,
    start: Instant,
    at_ms: u64,
    random: fastrand::Rng,
    sent: u64,
    received: u64,
    used_ms: Option<u64>,
    /// Packets of pods each way in a tick.
    sends: u64,
    hears: u64,
    /// Percent that are lost on the way there, and on the way back.
    lost_there: u32,
    lost_back: u32,
    /// How what this host drops looked when it reached its interface.
    dropped_here: Option<Evidence>,
    answers_echoes: bool,
    says_expired: bool,
    host_answers: bool,
    acknowledges: bool,
    refuses: Option<u8>,
    obstacle: Option<Obstacle>,
    /// Whether rules of this host let no echo out, or no answer in.
    forbids: bool,
    takes_answers_away: bool,
    /// Whether echoes that a backend sends by a socket of its own are answered all the same.
    answers_directly: bool,
    /// Whether what its pods send is seen to go on to pods here.
    passes_on: bool,
    delay_ms: u64,
    /// When it last said that an echo to it had expired there, if it does.
    returned_ms: Option<u64>,
    /// Answers under way.
    coming: Vec<(u64, Evidence)>,
    asks: u64,
}

impl World {
    fn new(plane: Plane) -> Self {
        let mut machine = Machine::new(plane == Plane::Times, 7);
        let subnet = "10.5.1.0/24".parse().unwrap();
        let lease = Reached { subnet, target: TARGET, interface: TUNNEL };
        machine.set_hosts(BTreeMap::from([(HOST, vec![lease])]), EXTERNAL);
        let mut world = Self {
            plane,
            machine,
            start: Instant::now(),
            at_ms: 0,
            random: fastrand::Rng::with_seed(3),
            sent: 7,
            received: 7,
            used_ms: None,
            sends: 0,
            hears: 0,
            lost_there: 0,
            lost_back: 0,
            dropped_here: None,
            answers_echoes: true,
            says_expired: true,
            host_answers: true,
            acknowledges: false,
            refuses: None,
            obstacle: None,
            forbids: false,
            takes_answers_away: false,
            answers_directly: false,
            passes_on: false,
            delay_ms: 3,
            returned_ms: None,
            coming: Vec::new(),
            asks: 0,
        };
        world.pass(1000);
        world
    }

    /// One that is used, both ways.
    fn used(plane: Plane) -> Self {
        let mut world = Self::new(plane);
        (world.sends, world.hears) = (3, 3);
        world
    }

    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_secs(3600) + Duration::from_millis(ms)
    }

    fn now(&self) -> Instant {
        self.at(self.at_ms)
    }

    fn state(&self) -> PeerState {
        self.machine.contacts(self.now())[&HOST].state
    }

    fn passes(&mut self, lost: u32) -> bool {
        self.obstacle.is_none() && self.random.u32(0..100) >= lost
    }

    fn tell(&mut self, evidence: Evidence) {
        self.machine.note(HOST, evidence, self.now());
    }

    fn pass(&mut self, ms: u64) {
        let end = self.at_ms + ms;
        while self.at_ms < end {
            self.tick();
        }
    }

    fn tick(&mut self) {
        self.at_ms += TICK.as_millis() as u64;
        self.traffic();
        let (now_ms, coming) = (self.at_ms, std::mem::take(&mut self.coming));
        let (here, coming): (Vec<_>, _) = coming.into_iter().partition(|(at, _)| *at <= now_ms);
        self.coming = coming;
        for (at, evidence) in here {
            self.received += 1;
            self.machine.note(HOST, evidence, self.at(at));
        }
        let now = self.now();
        if self.at_ms.is_multiple_of(LOOK.as_millis() as u64) {
            let used = match self.plane {
                Plane::Counts => Use::Sent(self.sent),
                Plane::Times => Use::At(self.used_ms.map(|ms| self.at(ms))),
            };
            let received = if self.plane == Plane::Counts { self.received } else { 0 };
            let nobody = Sample { used: Use::Sent(0), received: 0 };
            let of_host = Sample { used, received };
            let count = |host, _: &[Reached]| if host == HOST { of_host } else { nobody };
            self.machine.look(count, now);
        }
        for ask in self.machine.tick(now) {
            self.carry(ask);
        }
    }

    fn traffic(&mut self) {
        if self.sends > 0 {
            self.sent += self.sends;
            self.used_ms = Some(self.at_ms - 100);
        }
        let heard = (0..self.hears).filter(|_| self.passes(self.lost_back)).count();
        self.received += heard as u64;
        let is_in_question = self.machine.in_question(self.now()).next().is_some();
        // As a capture sees it, which runs while something is in question.
        if is_in_question && self.hears > 0 {
            if let Some(evidence) = self.dropped_here {
                self.tell(evidence);
            }
            if heard > 0 {
                self.tell(Evidence::Arrived);
                self.tell(Evidence::Heard);
            }
            if heard > 0 && self.passes_on {
                self.tell(Evidence::Passed);
            }
            if heard > 0 && self.acknowledges {
                self.tell(Evidence::Acknowledged);
            }
        }
    }

    fn carry(&mut self, ask: Ask) {
        assert_eq!((ask.host, ask.target), (HOST, TARGET));
        self.asks += 1;
        if self.forbids {
            (0..=u8::from(ask.beyond.is_some())).for_each(|_| self.tell(Evidence::Unasked));
            // The udp backend sends some by its own socket.
            if ask.asks_host && self.answers_directly {
                self.coming.push((self.at_ms + self.delay_ms, Evidence::Echoed(ask.sequence)));
            }
            return;
        }
        self.sent += 1 + u64::from(ask.beyond.is_some());
        self.used_ms = Some(self.at_ms);
        let comes = self.at_ms + self.delay_ms;
        let both =
            |world: &mut Self| world.passes(world.lost_there) && world.passes(world.lost_back);
        if both(self) && self.answers_echoes {
            let is_in_question = self.machine.in_question(self.now()).next().is_some();
            let evidence = match self.takes_answers_away {
                false => Some(Evidence::Echoed(ask.sequence)),
                // Seen by the capture alone.
                true => is_in_question.then_some(Evidence::Overheard),
            };
            self.coming.extend(evidence.map(|evidence| (comes, evidence)));
        }
        // Kernels say so once a second.
        if self.returned_ms.is_some_and(|last| comes >= last + 1000) && both(self) {
            self.returned_ms = Some(comes);
            self.coming.push((comes, Evidence::Returned(ask.sequence)));
        }
        if ask.beyond.is_some() {
            assert_eq!(ask.beyond, Some(BEYOND));
            if both(self) && self.says_expired {
                self.coming.push((comes, Evidence::Expired(ask.sequence)));
            }
        }
        if let Some(code) = self.refuses {
            self.tell(Evidence::Refused { by: BY, code });
        }
        if ask.asks_host {
            if let Some(obstacle) = self.obstacle {
                self.tell(Evidence::Unsendable(obstacle));
            } else if self.host_answers {
                self.tell(Evidence::HostAnswered);
            }
        }
    }

    /// Turns the clock until the state is this; within so many milliseconds.
    fn becomes(&mut self, id: &str, within_ms: u64) -> PeerState {
        let end = self.at_ms + within_ms;
        while self.state().word().name() != id {
            assert!(self.at_ms < end, "{:?}: {:?}, not {id}", self.plane, self.state());
            self.tick();
        }
        self.state()
    }

    /// For so long, it must not be anything else.
    fn stays(&mut self, ids: &[&str], ms: u64) {
        let end = self.at_ms + ms;
        while self.at_ms < end {
            self.tick();
            let state = self.state();
            assert!(
                ids.contains(&state.word().name()),
                "{:?}: {state:?} after {} ms",
                self.plane,
                self.at_ms
            );
        }
    }
}

/// Tries a fault at many moments: of one that answered before, and of one that never did.
fn at_any_moment(
    plane: Plane,
    fault: impl Fn(&mut World),
    repair: impl Fn(&mut World),
    id: &str,
) -> PeerState {
    let mut state = PeerState::Idle;
    for moment in 0..40 {
        let mut world = World::used(plane);
        world.becomes("ok", WELL);
        world.pass(moment * 200);
        fault(&mut world);
        state = world.becomes(id, KNOWN);
        world.stays(&[id], 30_000);
        world.pass(moment * 200);
        repair(&mut world);
        world.becomes("ok", WELL);
        world.stays(&["ok"], 60_000);
    }
    let mut world = World::new(plane);
    fault(&mut world);
    world.pass(5000);
    assert_eq!(world.state(), PeerState::Idle, "nobody uses it");
    world.sends = 3;
    world.hears = 3;
    world.becomes(id, KNOWN);
    repair(&mut world);
    world.becomes("ok", WELL);
    state
}

#[test]
fn an_unused_peer_is_left_alone() {
    for plane in PLANES {
        let mut world = World::new(plane);
        world.stays(&["idle"], 60_000);
        // What it sends is no use of it.
        world.hears = 3;
        world.stays(&["idle"], 60_000);
        assert_eq!(world.asks, 0);
    }
}

#[test]
fn echoes_end_with_the_use_and_keep_nothing_in_use() {
    for plane in PLANES {
        for lost in [0, 100] {
            let mut world = World::used(plane);
            world.lost_there = lost;
            world.pass(20_000);
            world.sends = 0;
            world.pass(quiet_after(plane));
            let asks = world.asks;
            world.stays(&["idle"], 120_000);
            assert_eq!(world.asks, asks, "{plane:?}: nobody uses it, and it is asked");
            world.sends = 1;
            world.becomes(if lost == 0 { "ok" } else { "one-way" }, KNOWN);
        }
    }
}

#[test]
fn echoes_of_the_peer_are_no_use_of_it() {
    let mut world = World::new(Plane::Times);
    for second in 0..120 {
        world.pass(1000);
        if second % 5 == 0 {
            // The kernel has answered.
            world.used_ms = Some(world.at_ms);
            world.tell(Evidence::Asked);
        }
        assert_eq!((world.state(), world.asks), (PeerState::Idle, 0));
    }
}

/// Two nodes that see each other's echoes, as workers count them or as the kernel dates its answers
/// to them: once pods stop, nothing of the daemons' goes either way, however long one looks.
#[test]
fn two_that_talked_leave_each_other_in_peace() {
    for plane in PLANES {
        let mut nodes = [World::new(plane), World::new(plane)];
        let mut last_ask_ms = 0;
        for tick in 0..5 * 60 * 20 {
            let pods = if tick < 5 * 20 { 3 } else { 0 };
            for own in 0..2 {
                (nodes[own].sends, nodes[own].hears) = (pods, pods);
                let before = nodes[own].asks;
                nodes[own].tick();
                for _ in before..nodes[own].asks {
                    last_ask_ms = nodes[own].at_ms;
                    // The other one hears of it, and its kernel answers; of such an answer workers
                    // make no count.
                    let other = &mut nodes[1 - own];
                    other.received += 1;
                    other.used_ms = Some(other.at_ms);
                    other.tell(Evidence::Asked);
                }
            }
        }
        assert!(nodes.iter().all(|node| node.asks > 0), "{plane:?}: nobody was asked at all");
        let quiet_ms = nodes[0].at_ms - last_ask_ms;
        let quiet_min_ms = 19 * 60_000 - quiet_after(plane);
        assert!(quiet_ms > quiet_min_ms, "{plane:?}: an echo {quiet_ms} ms before the end");
        assert!(nodes.iter().all(|node| node.state() == PeerState::Idle));
    }
}

#[test]
fn one_that_asks_us_is_seen_to_be_used() {
    let mut world = World::used(Plane::Times);
    for _ in 0..24 {
        world.tell(Evidence::Asked);
        world.pass(5000);
        assert_eq!(world.state(), PeerState::Ok);
    }
}

/// Of a neighbour the use is dated for some seconds only: a look that falls beside an echo of the
/// peer must not be the only one of these.
#[test]
fn a_look_beside_an_echo_is_repeated_soon() {
    let mut world = World::new(Plane::Times);
    let look = |world: &mut World, used_before_ms: u64| {
        let used = Use::At(Some(world.at(world.at_ms - used_before_ms)));
        let now = world.now();
        world.machine.look(|_, _| Sample { used, received: 0 }, now);
        (world.machine.is_use_in_doubt(), world.state() == PeerState::Idle)
    };
    assert!(!world.machine.is_use_in_doubt());
    world.tell(Evidence::Asked);
    assert_eq!(look(&mut world, 100), (true, true), "its echo, or a pod's packet");
    (world.sends, world.hears) = (3, 3);
    world.becomes("ok", WELL);
    assert!(!world.machine.is_use_in_doubt());
}

/// Where it asks us several times a second, the kernel's answers hide that pods send to it: over a
/// path that loses many echoes, both sides ask that often for as long as it is used.
#[test]
fn a_use_that_echoes_hide_is_known_and_ends() {
    for dates_for_ms in [u64::MAX, 5_000] {
        let mut world = World::used(Plane::Times);
        (world.lost_there, world.lost_back) = (15, 15);
        world.becomes("lossy", 30_000);
        for at in 0..20 * 60 * 5 {
            world.sends = 0;
            // A packet soon behind the last echoes. Of a neighbour use is dated for five seconds of
            // fifty.
            if world.at_ms % 50_000 < dates_for_ms {
                world.used_ms = Some(world.at_ms + world.random.u64(0..70));
            }
            world.tick();
            if world.passes(30) {
                world.tell(Evidence::Asked);
            }
            assert_ne!(world.state(), PeerState::Idle, "after {at} ticks, {dates_for_ms}");
        }
        (world.sends, world.hears) = (0, 0);
        let ask_and_answer = |world: &mut World| {
            world.tick();
            if world.machine.is_waiting(world.now()) {
                world.used_ms = Some(world.at_ms);
                world.tell(Evidence::Asked);
            }
        };
        (0..7 * 60 * 5).for_each(|_| ask_and_answer(&mut world));
        assert_eq!(world.state(), PeerState::Idle, "nobody but the daemons keeps it in use");
        let before = world.asks;
        (0..5 * 60 * 5).for_each(|_| ask_and_answer(&mut world));
        assert_eq!(world.asks, before);
    }
}

#[test]
fn one_that_answers_is_asked_every_five_seconds() {
    for plane in PLANES {
        let mut world = World::used(plane);
        world.becomes("ok", WELL);
        let before = world.asks;
        world.stays(&["ok"], 300_000);
        let asks = world.asks - before;
        assert!((59..=68).contains(&asks), "{asks} in 300 s");
        let contact = world.machine.contacts(world.now())[&HOST];
        assert_eq!(contact.round_trip, Some(Duration::from_millis(3)));
    }
}

#[test]
fn our_packets_dropped_there_are_one_way() {
    for plane in PLANES {
        let state = at_any_moment(plane, |w| w.lost_there = 100, |w| w.lost_there = 0, "one-way");
        assert_eq!(state, PeerState::OneWay(Way::There));
    }
}

#[test]
fn what_this_host_drops_is_one_way_back() {
    for plane in PLANES {
        let fault = |w: &mut World| (w.lost_back, w.dropped_here) = (100, Some(Evidence::Arrived));
        let repair = |w: &mut World| (w.lost_back, w.dropped_here) = (0, None);
        let state = at_any_moment(plane, fault, repair, "one-way");
        assert_eq!(state, PeerState::OneWay(Way::Back));
    }
    // Its pods' addresses are not those of its lease here; if some are, others are refused.
    let [source, another] = [[10, 5, 9, 2], [192, 0, 2, 9]].map(IpAddr::from);
    let lease = |subnet: &str| {
        vec![Reached { subnet: subnet.parse().unwrap(), target: TARGET, interface: TUNNEL }]
    };
    for (lost_back, is_anothers) in [(100, false), (100, true), (0, true)] {
        let mut world = World::new(Plane::Counts);
        if is_anothers {
            let leases = [(HOST, lease("10.5.1.0/24")), (another, lease("10.5.9.0/24"))];
            world.machine.set_hosts(leases.into(), EXTERNAL);
        }
        (world.sends, world.hears, world.lost_back) = (1, 1, lost_back);
        (world.lost_there, world.dropped_here) = (100, Some(Evidence::Foreign(source, false)));
        assert_eq!(world.becomes("one-way", 20_000), PeerState::OneWay(Way::Foreign(source)));
    }
}

#[test]
fn a_dead_path_is_silent_and_the_host_is_asked_too() {
    for plane in PLANES {
        for host_answers in [true, false] {
            let fault = |world: &mut World| {
                (world.lost_there, world.lost_back, world.host_answers) = (100, 100, host_answers);
            };
            let repair = |world: &mut World| (world.lost_there, world.lost_back) = (0, 0);
            let state = at_any_moment(plane, fault, repair, "silent");
            assert_eq!(state, PeerState::Silent { host_answers });
        }
    }
}

#[test]
fn a_new_peer_is_given_time_to_start() {
    for plane in PLANES {
        let mut world = World::used(plane);
        (world.lost_there, world.refuses) = (100, Some(3));
        world.becomes("in-grace", KNOWN);
        assert!(!world.state().word().is_alarming());
        let mut slow = World::used(plane);
        (slow.lost_there, slow.lost_back) = (100, 100);
        slow.pass(8000);
        (slow.lost_there, slow.lost_back) = (0, 0);
        slow.becomes("ok", WELL);
        // What is certain is said at once, and the rest when the time is over.
        world.becomes("refused", 2 * KNOWN);
        let mut own = World::used(plane);
        own.obstacle = Some(Obstacle::Errno(22));
        own.becomes("unsendable", KNOWN);
    }
}

#[test]
fn refused_datagrams_are_named() {
    for plane in PLANES {
        let fault = |world: &mut World| {
            (world.lost_there, world.lost_back, world.refuses) = (100, 100, Some(3));
        };
        let repair = |world: &mut World| {
            (world.lost_there, world.lost_back, world.refuses) = (0, 0, None);
        };
        let state = at_any_moment(plane, fault, repair, "refused");
        assert_eq!(state, PeerState::Refused { by: BY, code: 3 });
    }
}

#[test]
fn a_forged_error_changes_nothing() {
    for plane in PLANES {
        let mut world = World::used(plane);
        world.becomes("ok", WELL);
        world.refuses = Some(3);
        world.stays(&["ok"], 60_000);
    }
}

#[test]
fn what_the_kernel_refuses_is_unsendable() {
    for plane in PLANES {
        for obstacle in [Obstacle::Errno(22), Obstacle::Neighbour] {
            let fault = |world: &mut World| world.obstacle = Some(obstacle);
            let repair = |world: &mut World| world.obstacle = None;
            let state = at_any_moment(plane, fault, repair, "unsendable");
            assert_eq!(state, PeerState::Unsendable(obstacle));
        }
    }
}

#[test]
fn a_peer_that_answers_no_echoes_is_deaf_and_no_alarm() {
    for plane in PLANES {
        for hears in [0, 3] {
            let mut world = World::used(plane);
            (world.answers_echoes, world.hears) = (false, hears);
            let state = world.becomes("deaf", KNOWN);
            assert!(!state.word().is_alarming());
            world.stays(&["deaf"], 120_000);
            world.answers_echoes = true;
            world.becomes("ok", WELL + 1000);
            // It stopped to answer them, as `icmp_echo_ignore_all` has it.
            world.answers_echoes = false;
            world.stays(&["ok", "deaf"], 120_000);
            assert_eq!(world.state(), PeerState::Deaf);
            // A deaf one may die as well.
            (world.lost_there, world.lost_back) = (100, 100);
            world.becomes("silent", KNOWN);
        }
    }
}

#[test]
fn one_that_answers_nothing_while_its_connections_go_on_is_deaf() {
    for plane in PLANES {
        let mut world = World::used(plane);
        (world.answers_echoes, world.says_expired, world.acknowledges) = (false, false, true);
        world.becomes("deaf", KNOWN);
        world.stays(&["deaf"], 60_000);
        // They stall.
        (world.lost_there, world.acknowledges) = (100, false);
        world.becomes("one-way", 15_000);
    }
}

/// Of one that is heard nothing else is known, and packets may well arrive there.
#[test]
fn own_rules_against_pings_are_no_fault_of_the_peer() {
    for plane in PLANES {
        for answers_directly in [false, true] {
            let mut world = World::used(plane);
            (world.forbids, world.hears, world.answers_directly) = (true, 3, answers_directly);
            let well = if answers_directly { "ok" } else { "deaf" };
            world.becomes(well, KNOWN);
            world.stays(&[well], 60_000);
            world.forbids = false;
            world.becomes("ok", WELL + 1000);

            // One against their answers; pods get theirs.
            (world.takes_answers_away, world.says_expired, world.hears) = (true, false, 3);
            world.acknowledges = true;
            world.becomes("deaf", KNOWN);
            world.stays(&["deaf"], 60_000);
            // By UDP, which tells nothing but that it goes on to them.
            (world.acknowledges, world.passes_on) = (false, true);
            world.stays(&["deaf"], 60_000);
            // Or nothing gets any further.
            world.passes_on = false;
            world.becomes("one-way", 15_000);
            assert_eq!(world.state(), PeerState::OneWay(Way::Back));
        }
    }
}

/// Who may not ask knows it by the packets of pods: of one that sends and hears nothing for long.
#[test]
fn a_dead_path_is_silent_though_this_host_may_not_ask() {
    for plane in PLANES {
        let mut world = World::used(plane);
        world.forbids = true;
        world.becomes("deaf", KNOWN);
        (world.lost_there, world.lost_back) = (100, 100);
        world.becomes("silent", 30_000);
        assert_eq!(world.state(), PeerState::Unheard);
        world.stays(&["silent"], 60_000);
        (world.lost_there, world.lost_back) = (0, 0);
        world.becomes("deaf", WELL);
        // Of what is asked now and then and answered at once, nothing is missed.
        (world.sends, world.hears) = (0, 0);
        for _ in 0..10 {
            (world.sends, world.hears) = (1, 1);
            world.stays(&["deaf", "idle"], 400);
            (world.sends, world.hears) = (0, 0);
            world.stays(&["deaf", "idle"], 40_000);
        }
    }
}

#[test]
fn lost_echoes_are_counted() {
    for plane in PLANES {
        for lost in [30, 60] {
            let mut world = World::used(plane);
            world.becomes("ok", WELL);
            world.lost_there = lost;
            world.becomes("lossy", 3 * KNOWN);
            let (mut lossy, mut sum) = (0, 0);
            for _ in 0..600 {
                world.tick();
                if let PeerState::Lossy(percent) = world.state() {
                    (lossy, sum) = (lossy + 1, sum + u32::from(percent));
                }
            }
            assert!(lossy > 540, "{plane:?} {lost} %: lossy {lossy} times of 600");
            let mean = sum / lossy;
            assert!(mean.abs_diff(lost) < 15, "{plane:?}: {mean} for {lost} %");
            world.lost_there = 0;
            world.becomes("ok", WELL);
        }
    }
}

/// So much is lost that it looks dead now and then, and for a moment well.
#[test]
fn one_that_answers_now_and_then_rarely_looks_well() {
    for plane in PLANES {
        let mut world = World::used(plane);
        world.becomes("ok", WELL);
        world.lost_there = 67;
        world.pass(30_000);
        let mut well = 0;
        for _ in 0..3000 {
            world.tick();
            well += u32::from(matches!(world.state(), PeerState::Ok | PeerState::Deaf));
        }
        assert!(well < 750, "{plane:?}: well {well} times of 3000");
    }
}

#[test]
fn a_short_outage_is_no_loss_for_long() {
    for plane in PLANES {
        let mut world = World::used(plane);
        world.becomes("ok", WELL);
        for _ in 0..10 {
            world.lost_there = 100;
            world.pass(1000);
            world.lost_there = 0;
            world.pass(6000);
            world.stays(&["ok"], 20_000);
        }
    }
}

#[test]
fn a_long_way_is_no_fault() {
    for plane in PLANES {
        for delay_ms in [600, 900, 1400] {
            let mut world = World::used(plane);
            world.delay_ms = delay_ms;
            world.becomes("ok", WELL);
            world.stays(&["ok"], 120_000);
        }
    }
}

#[test]
fn one_that_is_used_now_and_then_does_not_look_well() {
    for plane in PLANES {
        let mut world = World::new(plane);
        (world.lost_there, world.lost_back) = (100, 100);
        for second in 0..200 {
            world.sends = u64::from(second % 12 == 0);
            world.pass(1000);
            if second > 15 {
                assert_eq!(world.state().word().name(), "silent", "{plane:?} after {second} s");
            }
        }
    }
}

#[test]
fn peers_that_left_are_forgotten() {
    let mut world = World::used(Plane::Counts);
    world.becomes("ok", WELL);
    world.machine.set_hosts(Hosts::new(), EXTERNAL);
    assert!(world.machine.contacts(world.now()).is_empty());
    assert_eq!(world.machine.place_of(TARGET), None);
}

/// In a cloud, of a host that has no bridge for pods yet.
#[test]
fn echoes_that_expire_there_are_answered_and_what_is_unsaid_is_no_loss() {
    for plane in [Plane::Counts, Plane::Times] {
        let mut world = World::new(plane);
        (world.answers_echoes, world.says_expired, world.returned_ms) = (false, false, Some(0));
        world.sends = 3;
        world.becomes("ok", WELL);
        world.stays(&["ok"], 60_000);
        world.lost_there = 100;
        assert_eq!(world.becomes("silent", KNOWN), PeerState::Silent { host_answers: true });
        world.lost_there = 0;
        world.becomes("ok", WELL);
        world.stays(&["ok"], 60_000);
    }
}

#[test]
fn answers_count_once_and_to_what_was_asked() {
    let mut world = World::used(Plane::Counts);
    world.becomes("ok", WELL);
    // Until all are answered.
    world.pass(1000);
    let answered = world.asks as u16;
    (world.lost_there, world.lost_back, world.host_answers) = (100, 100, false);
    // Whoever has seen the answers before the fault says them again and again, or guesses.
    for _ in 0..100 {
        world.pass(200);
        for sequence in (0..=answered).chain(answered + 1000..answered + 1010) {
            world.tell(Evidence::Echoed(sequence));
            world.tell(Evidence::Expired(sequence));
        }
    }
    assert_eq!(world.state().word().name(), "silent");
}
