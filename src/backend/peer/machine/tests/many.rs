//! A host with many leases, and many hosts.

use super::*;

fn lease(subnet: Prefix) -> Reached {
    Reached { subnet: subnet.into(), target: subnet.network().into(), interface: TUNNEL }
}

fn numbered_lease(number: u8) -> Reached {
    lease(Prefix::new(Ipv4Addr::new(10, 5, number, 0), 24).unwrap())
}

/// A host with so many leases.
fn with_leases(count: u8) -> Machine {
    let mut machine = Machine::new(false, 1);
    let leases = (0..count).map(numbered_lease).collect();
    machine.set_hosts(BTreeMap::from([(HOST, leases)]), EXTERNAL);
    machine
}

/// However many leases it has, and at whatever moment of its echoes.
#[test]
fn a_dead_host_with_many_leases_is_known_in_time() {
    for (count, moment) in
        [8, 9, 64, 200].into_iter().flat_map(|of| (0..30).map(move |at| (of, at)))
    {
        let mut machine = with_leases(count);
        let start = Instant::now();
        let dead = 200 + moment;
        for tick in 0..dead + KNOWN / TICK.as_millis() as u64 {
            let now = start + TICK * tick as u32;
            if tick.is_multiple_of(5) {
                let used = Use::Sent(100 * tick);
                machine.look(|_, _| Sample { used, received: 0 }, now);
            }
            for ask in machine.tick(now) {
                if tick < dead {
                    machine.note(HOST, Evidence::Echoed(ask.sequence), now);
                }
            }
        }
        let end = start + TICK * dead as u32 + Duration::from_millis(KNOWN);
        let state = machine.contacts(end)[&HOST].state.word().name();
        assert_eq!(state, "silent", "{count} leases, dead at tick {dead}");
    }
}

#[test]
fn one_live_lease_of_several_is_enough() {
    for live in 0..7 {
        let mut machine = with_leases(7);
        let start = Instant::now();
        for tick in 0..300_u64 {
            let now = start + TICK * tick as u32;
            if tick.is_multiple_of(5) {
                let used = Use::Sent(100 * tick);
                machine.look(|_, _| Sample { used, received: 0 }, now);
            }
            for ask in machine.tick(now) {
                if ask.target == numbered_lease(live).target {
                    machine.note(HOST, Evidence::Echoed(ask.sequence), now);
                }
            }
            let state = machine.contacts(now)[&HOST].state;
            assert!([PeerState::Idle, PeerState::Ok].contains(&state), "{live}: {state:?}");
        }
        assert_eq!(machine.contacts(start + TICK * 300)[&HOST].state, PeerState::Ok);
        assert_eq!(machine.place_of(numbered_lease(live).target), Some((HOST, TUNNEL)));
    }
}

/// A machine that knows so many peers.
fn many(count: u32) -> Machine {
    let mut machine = Machine::new(false, 1);
    let host = |number: u32| Ipv4Addr::from_bits(0xC000_0000 + number);
    let subnet = |number: u32| Prefix::new(Ipv4Addr::from_bits(0x0A00_0000 + number * 256), 24);
    let lease = |number| lease(subnet(number).unwrap());
    let hosts = (0..count).map(|number| (host(number).into(), vec![lease(number)]));
    machine.set_hosts(hosts.collect(), EXTERNAL);
    machine
}

/// So many peers in use, of which none answers; the states after a time.
fn many_dead(count: u32, ms: u64) -> (usize, usize) {
    let (mut machine, mut most) = (many(count), 0);
    let known = Instant::now();
    machine.look(|_, _| Sample { used: Use::Sent(0), received: 0 }, known);
    // Past the time that new ones are given.
    let start = known + Duration::from_secs(60);
    for tick in 0..ms / 200 {
        let now = start + TICK * tick as u32;
        if tick.is_multiple_of(5) {
            machine.look(|_, _| Sample { used: Use::Sent(1000 * tick), received: 0 }, now);
        }
        most = most.max(machine.tick(now).len());
    }
    let now = start + Duration::from_millis(ms);
    let contacts = machine.contacts(now);
    (contacts.values().filter(|contact| contact.state.word().is_alarming()).count(), most)
}

#[test]
fn of_many_dead_peers_some_are_known_in_time_and_all_in_the_end() {
    let (known, most) = many_dead(5000, 10_000);
    assert!(known >= 100 && most <= TICK_MAX, "{known} known, {most} echoes at once");
    let (known, _) = many_dead(1000, 20_000);
    assert_eq!(known, 1000);
    let (known, _) = many_dead(5000, 120_000);
    assert_eq!(known, 5000);
}

/// Echoes to each of so many live peers in 50 seconds.
fn many_live(count: u32) -> f64 {
    let (mut machine, mut asks) = (many(count), 0);
    let start = Instant::now();
    for tick in 0..300_u64 {
        let now = start + TICK * tick as u32;
        if tick.is_multiple_of(5) {
            machine.look(|_, _| Sample { used: Use::Sent(1000 * tick), received: 0 }, now);
        }
        let due = machine.tick(now);
        assert!(due.len() <= TICK_MAX);
        for ask in due {
            asks += u32::from(tick >= 50);
            machine.note(ask.host, Evidence::Echoed(ask.sequence), now);
        }
        if tick > 50 {
            assert!(machine.contacts(now).values().all(|it| it.state == PeerState::Ok), "{tick}");
        }
    }
    f64::from(asks) / f64::from(count)
}

#[test]
fn thousands_of_live_peers_are_asked_at_a_bounded_rate() {
    let each = many_live(1000);
    assert!((9.0..12.0).contains(&each), "{each} echoes to each of 1,000 in 50 s");
    let each = many_live(5000);
    assert!((6.0..8.0).contains(&each), "{each} echoes to each of 5,000 in 50 s");
}
