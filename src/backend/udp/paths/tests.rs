//! The machine against simulated paths: what it finds, how soon, and what it never does.

use proptest::prelude::*;

use super::*;

const CEILING: u16 = 1472;

/// One path as it is in truth.
#[derive(Debug, Clone, Copy)]
struct Truth {
    takes_bytes: u16,
    answers: bool,
    /// Of 256 echoes, so many are lost.
    lost: u8,
    /// And so many of those of more than 1000 bytes.
    lost_long: u8,
    delay_ms: u64,
}

const WIDE: Truth =
    Truth { takes_bytes: CEILING, answers: true, lost: 0, lost_long: 0, delay_ms: 1 };

/// Some paths, a clock, and the machine.
struct World {
    paths: Paths,
    truths: Vec<Truth>,
    start: Instant,
    now: Instant,
    flying: Vec<(Instant, IpAddr, u16)>,
    random: fastrand::Rng,
    probes: usize,
}

impl World {
    fn new(truths: Vec<Truth>, seed: u64) -> Self {
        let start = Instant::now();
        Self {
            paths: Paths::new(CEILING, 28, seed),
            truths,
            start,
            now: start,
            flying: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            probes: 0,
        }
    }

    fn target(index: usize) -> IpAddr {
        IpAddr::from([10, 5, index as u8, 0])
    }

    fn endpoint(index: usize) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, index as u8], 8285))
    }

    /// What the narrowest path takes.
    fn limit_bytes(&self) -> Option<u16> {
        self.paths.limits().map(|(_, bytes)| bytes).min()
    }

    fn use_all(&mut self) {
        let from = self.random.usize(..self.truths.len());
        for index in (from..self.truths.len()).chain(0..from) {
            self.paths.used(Self::endpoint(index), Self::target(index), self.now);
        }
    }

    /// Lets `milliseconds` pass; `used` tells whether pods send meanwhile.
    fn pass(&mut self, milliseconds: u64, used: bool) {
        let end = self.now + Duration::from_millis(milliseconds);
        while self.now < end {
            self.now += Duration::from_millis(10);
            let now = self.now;
            let (come, flying): (Vec<_>, _) =
                std::mem::take(&mut self.flying).into_iter().partition(|(at, ..)| *at <= now);
            self.flying = flying;
            for (_, target, bytes) in come {
                self.paths.answered(target, bytes, now);
            }
            if used {
                self.use_all();
            }
            let probes = self.paths.tick(now);
            self.probes += probes.len();
            for probe in probes {
                assert!(probe.bytes <= CEILING && probe.bytes >= NARROWEST_BYTES, "{probe:?}");
                let IpAddr::V4(target) = probe.target else { panic!("of IPv6") };
                let truth = self.truths[usize::from(target.octets()[2])];
                let is_lost = self.random.u8(..) < truth.lost
                    || (probe.bytes > 1000 && self.random.u8(..) < truth.lost_long);
                if truth.answers && !is_lost && probe.bytes <= truth.takes_bytes {
                    let at = now + Duration::from_millis(truth.delay_ms);
                    self.flying.push((at, probe.target, probe.bytes));
                }
            }
            if let Some(limit) = self.limit_bytes() {
                assert!((NARROWEST_BYTES..CEILING).contains(&limit), "a limit of {limit}");
            }
        }
    }

    /// The milliseconds until the limit is `wanted`.
    fn until(&mut self, wanted: Option<u16>, milliseconds_max: u64) -> u64 {
        let since = self.now;
        while self.limit_bytes() != wanted {
            let passed = (self.now - since).as_millis() as u64;
            let limit = self.limit_bytes();
            assert!(passed < milliseconds_max, "{limit:?} and not {wanted:?} after {passed} ms");
            self.pass(10, true);
        }
        (self.now - since).as_millis() as u64
    }
}

/// The slow twin: what a path takes, found by looking at the truth.
fn twin(truths: &[Truth]) -> Option<u16> {
    let of_one = |truth: &Truth| {
        let takes = |bytes: &u16| *bytes <= truth.takes_bytes;
        let known = truth.answers && truth.takes_bytes >= NARROWEST_BYTES;
        let narrow = known && truth.takes_bytes < CEILING;
        let usual = USUAL_BYTES.into_iter().map(|bytes| bytes - 28);
        narrow.then(|| usual.filter(takes).max()).flatten()
    };
    truths.iter().filter_map(of_one).min()
}

#[test]
fn slow_answers_cost_few_echoes() {
    for delay_ms in [300, 400, 600, 900] {
        let mut world = World::new(vec![Truth { delay_ms, ..WIDE }], 3);
        world.pass(10_000, true);
        assert!(world.paths.mute().next().is_none(), "{delay_ms} ms count as no answer");
        let before = world.probes;
        world.pass(60_000, true);
        let echoes = world.probes - before;
        assert!(echoes <= 60_000 / 340, "{echoes} echoes in a minute at {delay_ms} ms");
        assert_eq!(world.limit_bytes(), None);
        world.truths[0].takes_bytes = 1372;
        world.until(Some(1372), 6_000);
    }
}

#[test]
fn narrowed_and_widened_paths_are_found_in_time() {
    for (router_bytes, expected) in [(1400, 1372), (1300, 1272), (576, 548), (1399, 1322)] {
        let mut world = World::new(vec![WIDE, WIDE], 7);
        world.pass(3000, true);
        assert_eq!(world.limit_bytes(), None, "a wide path was taken for a narrow one");
        world.truths[1].takes_bytes = router_bytes - 28;
        let took = world.until(Some(expected), 1600);
        assert_eq!(world.paths.limits().collect::<Vec<_>>(), [(World::endpoint(1), expected)]);
        world.truths[1].takes_bytes = CEILING;
        let healed = world.until(None, 32_000);
        println!("{router_bytes}: found after {took} ms, healed after {healed} ms");
    }
}

#[test]
fn partial_changes_of_a_path_are_followed() {
    let mut world = World::new(vec![WIDE], 3);
    for (takes_bytes, expected, limit_ms) in
        [(1372, 1372, 1600), (1272, 1272, 1600), (1372, 1372, 32_000), (700, 548, 1600)]
    {
        world.truths[0].takes_bytes = takes_bytes;
        world.until(Some(expected), limit_ms);
    }
}

#[test]
fn silent_peer_is_asked_seldom() {
    let mut world = World::new(vec![Truth { answers: false, ..WIDE }], 5);
    world.pass(60_000, true);
    let first = world.probes;
    world.pass(300_000, true);
    assert_eq!(world.limit_bytes(), None);
    let later = world.probes - first;
    println!("{first} echoes in the first minute, {later} in the next five");
    assert!(later < 300, "{later} echoes in five minutes to a peer that answers none");
}

#[test]
fn idle_peers_are_not_asked() {
    let mut world = World::new(vec![WIDE; 9], 5);
    world.pass(10_000, false);
    assert_eq!(world.probes, 0);
    world.use_all();
    world.pass(IN_USE.as_millis() as u64 + 100, false);
    let probes = world.probes;
    world.pass(100_000, false);
    assert_eq!(world.probes, probes, "peers that are out of use are asked on");
    assert_eq!(world.paths.next_due(), None, "the daemon wakes up for nothing");
}

#[test]
fn many_peers_take_turns_within_the_rate() {
    let mut world = World::new(vec![WIDE; 200], 5);
    world.pass(1000, true);
    let before = world.probes;
    world.pass(20_000, true);
    let rate = (world.probes - before) / 20;
    assert!(rate <= 100, "{rate} echoes a second");
    assert!(world.paths.watched.len() <= WATCHED_MAX);
    // The last of them is narrow, and gets its turn.
    world.truths[199].takes_bytes = 1372;
    let took = world.until(Some(1372), 60_000);
    println!("{rate} echoes a second; the 200th of 200 peers found after {took} ms");
}

#[test]
fn removed_peer_frees_its_place() {
    let mut world = World::new(vec![WIDE, Truth { takes_bytes: 1272, ..WIDE }], 5);
    world.until(Some(1272), 1600);
    world.paths.retain(|endpoint, _| endpoint != World::endpoint(1));
    assert_eq!(world.limit_bytes(), None);
}

#[test]
fn another_interface_mtu_starts_over() {
    let mut world = World::new(vec![Truth { takes_bytes: 1372, ..WIDE }], 5);
    world.until(Some(1372), 1600);
    world.paths.set_ceiling(1272, world.now);
    assert_eq!(world.limit_bytes(), None, "a limit above what the interface takes");
    world.pass(2000, true);
    assert_eq!(world.limit_bytes(), None);
    world.paths.set_ceiling(CEILING, world.now);
    world.until(Some(1372), 2600);
}

#[test]
fn loss_and_delay_are_no_narrow_path() {
    // One in twenty lost; and answers that always come too late.
    for truth in [Truth { lost: 13, ..WIDE }, Truth { delay_ms: 400, ..WIDE }] {
        let mut world = World::new(vec![truth], 11);
        for _ in 0..120 {
            world.pass(1000, true);
            assert_eq!(world.limit_bytes(), None, "{truth:?}");
        }
    }
}

#[test]
fn loss_of_long_packets_is_no_narrow_path() {
    for seed in 0..20 {
        // Three in ten of the long ones are lost, at random.
        let mut world = World::new(vec![Truth { lost_long: 77, ..WIDE }], seed);
        // And now and then all of them for a while, as behind a policer.
        for second in 0..120 {
            world.truths[0].lost_long = if second % 10 == 9 { u8::MAX } else { 0 };
            world.pass(300, true);
            world.truths[0].lost_long = 77;
            world.pass(700, true);
            assert_eq!(world.limit_bytes(), None, "seed {seed}, second {second}");
        }
    }
}

#[test]
fn a_long_burst_of_loss_costs_some_seconds() {
    let mut world = World::new(vec![Truth { lost_long: u8::MAX, ..WIDE }], 5);
    world.until(Some(978), 1600);
    world.truths[0] = WIDE;
    world.until(None, 6000);
}

#[test]
fn each_narrow_path_has_its_own_limit() {
    let narrow = Truth { takes_bytes: 1372, ..WIDE };
    let mut world = World::new([vec![narrow; 80], vec![WIDE; 20]].concat(), 5);
    world.pass(60_000, true);
    assert_eq!(world.paths.limits().count(), 80);
    world.pass(30_000, true);
    assert_eq!(world.paths.limits().count(), 80, "a limit is forgotten, or a wide path has one");
    assert!(world.paths.limits().all(|(_, bytes)| bytes == 1372));
    let probes = world.probes;
    world.pass(20_000, false);
    let last = world.probes;
    assert!(last > probes, "those in use are measured for a while");
    world.pass(100_000, false);
    assert_eq!(world.probes, last, "narrow paths are searched that nobody uses");
    assert_eq!(world.paths.limits().count(), 80);
}

#[test]
fn only_a_silent_peer_in_use_is_mute() {
    let mut world = World::new(vec![WIDE, Truth { answers: false, ..WIDE }], 5);
    world.pass(3000, true);
    assert!(world.paths.mute().next().is_some());
    let unknown = |world: &World, is_away: bool, after: Duration| {
        world.paths.unknown(|_| is_away, world.now + after).next().is_some()
    };
    assert!(unknown(&world, false, Duration::ZERO), "it has never answered");
    assert!(!unknown(&world, true, Duration::ZERO), "its weftd is being restarted");
    world.truths[1].answers = true;
    world.pass(10_000, true);
    assert!(world.paths.mute().next().is_none());
    world.truths[1].answers = false;
    world.pass(10_000, true);
    assert!(world.paths.mute().next().is_some());
    assert!(!unknown(&world, false, Duration::ZERO), "a restart looks like this");
    assert!(unknown(&world, false, 2 * AWAY));
    world.pass(10_000, false);
    assert!(world.paths.mute().next().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever the paths did before, once they rest the machine agrees with its twin.
    #[test]
    fn it_ends_where_the_slow_twin_is(
        history in prop::collection::vec(
            (prop::collection::vec((300u16..=CEILING, any::<bool>(), 0u8..=255, 0u64..600), 3),
             0u64..5000, any::<bool>()),
            0..6,
        ),
        rest in prop::collection::vec((300u16..=CEILING, 0u64..200), 3),
        seed in any::<u64>(),
    ) {
        let mut world = World::new(vec![WIDE; 3], seed);
        for (truths, milliseconds, used) in history {
            for (truth, (takes_bytes, answers, lost, delay_ms)) in
                world.truths.iter_mut().zip(truths)
            {
                *truth = Truth { takes_bytes, answers, lost, delay_ms, ..WIDE };
            }
            world.pass(milliseconds, used);
        }
        for (truth, (takes_bytes, delay_ms)) in world.truths.iter_mut().zip(rest) {
            *truth = Truth { takes_bytes, delay_ms, ..WIDE };
        }
        // A path that nothing passes keeps what was found last, so it is left out.
        for truth in &mut world.truths {
            truth.takes_bytes = truth.takes_bytes.max(NARROWEST_BYTES);
        }
        world.pass(130_000, true);
        prop_assert_eq!(world.limit_bytes(), twin(&world.truths));
        prop_assert!(world.now > world.start);
    }
}

#[test]
fn of_two_leases_with_one_address_the_one_that_answers_is_measured() {
    let endpoint = World::endpoint(0);
    // The host of the first answers nothing: the node has another subnet by now.
    let stale = Truth { answers: false, ..WIDE };
    let mut world = World::new(vec![stale, Truth { takes_bytes: 1372, ..WIDE }], 7);
    let mut seconds = 0;
    while world.limit_bytes() != Some(1372) {
        assert!(seconds < 10, "the path stays unmeasured");
        for _ in 0..100 {
            for target in [0, 1].map(World::target) {
                world.paths.used(endpoint, target, world.now);
            }
            world.pass(10, false);
        }
        seconds += 1;
    }
    assert!(world.paths.mute().next().is_none());
}
