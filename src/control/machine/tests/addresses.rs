//! A node whose address changes, and other nodes with its address.

use super::*;

#[test]
fn moving_node_updates_lease_and_keeps_subnet() {
    let mut machine = watching(Timing::default());
    let moved = |host: u8| Event::Moved(LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, host)));
    let written = |commands: &[Command]| {
        commands.iter().find_map(|command| {
            let Command::Write { what: Write::Restore, held } = command else { return None };
            Some((held.subnets, held.revision, held.attributes.public_ip?.octets()[3]))
        })
    };
    let subnet = lease(OWN, 0, 0).subnets;
    assert_eq!(written(&machine.handle(moved(1), at(2))), None, "that is where it is");
    assert_eq!(written(&machine.handle(moved(2), at(2))), Some((subnet, 7, 2)));
    // It moves again before the answer, which is of before.
    assert_eq!(written(&machine.handle(moved(3), at(2))), None, "two requests at once");
    let commands = machine.handle(Event::Written(Ok(granted(lease(OWN, 2, 11), 2))), at(2));
    assert_eq!(written(&commands), Some((subnet, 11, 3)), "the last word is not written");
    // The watch is behind: it shows the first of the two.
    let late = Event::Changed(Ok(vec![Change::Put(lease(OWN, 2, 11))]));
    assert_eq!(end(&machine.handle(late, at(2))), None, "its own address of before is another's");
    let commands = machine.handle(Event::Written(Ok(granted(lease(OWN, 3, 12), 2))), at(2));
    assert!(says(&commands, "192.0.2.3"), "{commands:?}");
    // From now on, only the last address is its own.
    let stolen = Event::Changed(Ok(vec![Change::Put(lease(OWN, 1, 13))]));
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 1).into());
    assert_eq!(end(&machine.handle(stolen, at(3))), Some(End { new_owner }));
}

/// A watch is often faster than the answer to the write that it tells of.
#[test]
fn moving_node_that_is_watched_takes_its_own_write_for_nobodys() {
    let mut machine = watching(Timing::default());
    machine.handle(Event::Moved(LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 2))), at(2));
    let seen = Event::Changed(Ok(vec![Change::Put(lease(OWN, 2, 11))]));
    machine.handle(seen, at(2));
    let commands = machine.handle(Event::Written(Ok(granted(lease(OWN, 2, 11), 2))), at(2));
    assert!(says(&commands, "192.0.2.2"), "{commands:?}");
    let warns = commands.iter().any(|command| matches!(command, Command::Log(Level::WARN, _)));
    assert!(!warns, "a false alarm: {commands:?}");
}

#[test]
fn late_write_after_moving_back_keeps_running() {
    let mut machine = watching(Timing::default());
    let moved = |host: u8| Event::Moved(LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, host)));
    let lost = || {
        let detail = "no answer".to_owned();
        Event::Written(Err(StoreError::Unavailable { operation: "moving the lease", detail }))
    };
    machine.handle(moved(2), at(2));
    machine.handle(moved(1), at(2));
    machine.handle(lost(), at(2));
    machine.handle(lost(), at(2));
    assert!(machine.handle(Event::Timer, at(5)).contains(&Command::List));
    // Its entry is as it was, and the first of the two may still go in.
    machine.handle(listing(&[lease(OWN, 1, 7)], 10), at(5));
    machine.handle(Event::Opened(Ok(())), at(5));
    let attributes = lease(OWN, 2, 0).attributes;
    let late = Lease { attributes, revision: 11, ..lease(OWN, 1, 7) };
    let mut commands = machine.handle(Event::Changed(Ok(vec![Change::Put(late)])), at(5));
    assert_eq!(end(&commands), None, "it gives its subnet up to itself");
    for seconds in 6..600 {
        commands.extend(machine.handle(Event::Timer, at(seconds)));
    }
    let restores = |command: &Command| {
        let Command::Write { what: Write::Restore, held } = command else { return false };
        (held.revision, held.attributes.public_ip.unwrap().octets()[3]) == (11, 1)
    };
    assert!(commands.iter().any(restores), "its entry keeps an address of before: {commands:?}");
}

#[test]
fn new_owner_of_old_address_keeps_lapsed_subnet() {
    let mut machine = watching(Timing::default());
    let moved = Event::Moved(LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 2)));
    let commands = machine.handle(moved, at(DAY_SECONDS + 10));
    assert!(commands.contains(&Command::List), "it writes without looking: {commands:?}");
    let commands = machine.handle(listing(&[lease(OWN, 1, 12)], 12), at(DAY_SECONDS + 10));
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 1).into());
    assert_eq!(end(&commands), Some(End { new_owner }), "two nodes own one subnet");
}

/// The watch shows the own entry as of `revision`.
fn own_written(revision: i64) -> Event {
    Event::Changed(Ok(vec![Change::Put(lease(OWN, 1, revision))]))
}

/// Whether the operator is alarmed, if the write was counted at all.
fn alarm(commands: &[Command]) -> Option<bool> {
    let is_alarm = |command: &Command| {
        let Command::Log(Level::WARN, text) = command else { return false };
        text.starts_with("ALARM: somebody")
    };
    let is_counted = commands.contains(&Command::CountForeignWrite);
    is_counted.then(|| commands.iter().any(is_alarm))
}

#[test]
fn flannel_node_with_our_address_raises_alarm() {
    let mut machine = watching(Timing::default());
    let renews = |commands: &[Command]| {
        let rewrites = |command: &Command| {
            let Command::Write { what, .. } = command else { return false };
            *what != Write::Renew
        };
        assert!(!commands.iter().any(rewrites), "it writes over the other's: {commands:?}");
        commands.iter().any(|command| matches!(command, Command::Write { what: Write::Renew, .. }))
    };
    let commands = machine.handle(own_written(11), at(10));
    assert_eq!((alarm(&commands), end(&commands)), (Some(true), None), "{commands:?}");
    assert!(says(&commands, "PublicIP 192.0.2.1"), "whose? {commands:?}");
    assert!(renews(&commands), "how long the other's lease lives, nobody looks");
    machine.handle(Event::Written(Ok(granted(lease(OWN, 1, 11), 10))), at(10));
    // In a loop it is counted each time, and not told, and not answered each time.
    let (mut told, mut renewals) = (0, 0);
    for revision in 12..112 {
        let seconds = 10 + (revision as u64 - 11) / 10;
        let commands = machine.handle(own_written(revision), at(seconds));
        told += usize::from(alarm(&commands) == Some(false));
        let renewed = renews(&commands) || renews(&machine.handle(Event::Timer, at(seconds)));
        if renewed {
            renewals += 1;
            machine
                .handle(Event::Written(Ok(granted(lease(OWN, 1, revision), seconds))), at(seconds));
        }
    }
    assert_eq!(told, 100, "writes of others are not counted");
    assert!((1..=5).contains(&renewals), "{renewals} renewals in 10 s");
    let commands = machine.handle(own_written(200), at(2 * 3600));
    assert_eq!(alarm(&commands), Some(true), "the alarm is never repeated");
}

#[test]
fn own_and_operator_writes_raise_no_alarm() {
    // The watch shows our write before its answer comes, or without one.
    let renewing = || {
        let mut machine = watching(Timing::default());
        let mut seconds = 23 * 3600;
        while !matches!(machine.asked, Asked::Write { .. }) {
            seconds += 1;
            if let Asked::List { .. } = machine.asked {
                let all: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect();
                machine.handle(listing(&[all, vec![lease(OWN, 1, 7)]].concat(), 10), at(seconds));
            }
            machine.handle(Event::Timer, at(seconds));
        }
        (machine, seconds)
    };
    let answered = |revision| Event::Written(Ok(granted(lease(OWN, 1, revision), 82_800)));
    let (mut machine, seconds) = renewing();
    assert_eq!(alarm(&machine.handle(own_written(11), at(seconds))), None);
    assert_eq!(alarm(&machine.handle(answered(11), at(seconds))), None, "its own write");

    let unanswered = || {
        let detail = "no answer".to_owned();
        Event::Written(Err(StoreError::Unavailable { operation: "renewing the lease", detail }))
    };
    let (mut machine, seconds) = renewing();
    machine.handle(unanswered(), at(seconds));
    let commands = machine.handle(own_written(11), at(seconds + 1));
    assert_eq!(alarm(&commands), None, "its own write, of which it never heard");

    // Somebody else was faster, and then not ours was written.
    let (mut machine, seconds) = renewing();
    assert_eq!(alarm(&machine.handle(own_written(11), at(seconds))), None);
    let conflict = Event::Written(Err(StoreError::Conflict(lease(OWN, 0, 0).key)));
    assert_eq!(alarm(&machine.handle(conflict, at(seconds))), Some(true), "a write is missed");
    // Or just after ours.
    let (mut machine, seconds) = renewing();
    machine.handle(own_written(11), at(seconds));
    machine.handle(own_written(12), at(seconds));
    assert_eq!(alarm(&machine.handle(answered(11), at(seconds))), Some(true), "a write is missed");

    let mut machine = watching(Timing::default());
    let reservation = Lease { lifetime: Lifetime::Reservation, ..lease(OWN, 1, 11) };
    let commands = machine.handle(Event::Changed(Ok(vec![Change::Put(reservation)])), at(10));
    assert!(says(&commands, "reservation") && alarm(&commands).is_none());
    // A store that is restored from a backup.
    let mut machine = watching(Timing::default());
    machine.handle(Event::Changed(Err(StoreError::HistoryLost)), at(10));
    let commands = machine.handle(listing(&[lease(OWN, 1, 5)], 9), at(10));
    assert_eq!(alarm(&commands), None, "{commands:?}");
}

/// The control plane of a node that had moved starts again, before the store shows the new address.
#[test]
fn node_that_moved_before_it_starts_again_keeps_its_subnet() {
    let networks = "10.5.0.0/16".parse().unwrap();
    let known = Known {
        as_of_unix: 1_000,
        revision: 10,
        cluster: 1,
        networks,
        own: lease(OWN, 1, 7),
        ends_unix: None,
        peers: Arc::default(),
    };
    let random = fastrand::Rng::with_seed(1);
    let mut machine = Machine::from_cache(known, Timing::default(), random, at(2));
    let moved = Event::Moved(LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 2)));
    assert!(machine.handle(moved, at(2)).contains(&Command::List), "it is written unread");
    let commands = machine.handle(listing(&[lease(OWN, 1, 7)], 10), at(2));
    assert_eq!(end(&commands), None, "its own entry is another's");
    let shows = |commands: &[Command]| {
        commands.iter().find_map(|command| {
            let Command::Write { held, .. } = command else { return None };
            Some(held.attributes.public_ip?.octets()[3])
        })
    };
    let renewed = shows(&commands);
    let granted = Event::Written(Ok(granted(lease(OWN, renewed.unwrap(), 11), 2)));
    machine.handle(granted, at(2));
    machine.handle(Event::Opened(Ok(())), at(3));
    let commands = machine.handle(Event::Timer, at(4));
    assert_eq!(shows(&commands), Some(2), "{commands:?} after {renewed:?}");
}
