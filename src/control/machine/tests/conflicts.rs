//! Single guards against lost updates that random schedules hardly ever reach: each test fails
//! without its guard.

use super::*;

/// Nothing is listed but for a reason.
fn quiet() -> Timing {
    Timing { relist_period: Duration::from_secs(100 * DAY_SECONDS), ..Timing::default() }
}

fn down() -> StoreError {
    StoreError::Unavailable { operation: "test", detail: String::new() }
}

fn peers() -> Vec<Lease> {
    (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect()
}

fn creates(commands: &[Command]) -> bool {
    commands.iter().any(|command| matches!(command, Command::Retake { .. }))
}

fn moved(host: u8) -> Event {
    Event::Moved(LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, host)))
}

#[test]
fn after_a_conflict_the_store_is_listed() {
    let mut machine = watching(quiet());
    let now = DAY_SECONDS - 3600;
    let commands = machine.handle(Event::Timer, at(now));
    assert!(matches!(machine.asked, Asked::Write { .. }), "{commands:?}");
    let conflict = StoreError::Conflict(lease(OWN, 0, 0).key);
    let mut commands = machine.handle(Event::Written(Err(conflict)), at(now));
    commands.extend(machine.handle(Event::Timer, at(now + 1)));
    assert!(commands.contains(&Command::List), "who wrote, it never learns: {commands:?}");
}

#[test]
fn deletion_before_live_watch_keeps_running() {
    let mut machine = watching(quiet());
    machine.handle(Event::Changed(Err(down())), at(10));
    let commands = machine.handle(Event::Timer, at(15));
    assert!(commands.contains(&watch_from(10)), "{commands:?}");
    machine.handle(Event::Opened(Ok(())), at(15));
    let commands = machine.handle(Event::Changed(Ok(vec![deleted(OWN, 11)])), at(15));
    assert_eq!(end(&commands), None, "a lease that lapsed in an outage ends the daemon");
}

#[test]
fn listing_without_own_lease_after_outage_keeps_running() {
    let mut machine = watching(quiet());
    machine.handle(Event::Changed(Err(down())), at(10));
    machine.handle(Event::Timer, at(15));
    let lost = StoreError::HistoryLost;
    let commands = machine.handle(Event::Opened(Err(lost)), at(15));
    assert!(commands.contains(&Command::List), "{commands:?}");
    let commands = machine.handle(listing(&peers(), 12), at(15));
    assert_eq!(end(&commands), None, "a lease that lapsed in an outage ends the daemon");
    assert!(creates(&commands), "the own lease is not taken again: {commands:?}");
}

#[test]
fn own_lease_missing_from_listing_alone_is_taken_again() {
    let mut machine = watching(Timing::default());
    // The store has the same id as before, and revisions beyond those seen.
    assert!(machine.handle(Event::Timer, at(3600)).contains(&Command::List));
    let commands = machine.handle(listing(&peers(), 500), at(3600));
    assert_eq!(end(&commands), None, "a restored store ends the daemon");
    assert!(creates(&commands), "the own lease is not taken again: {commands:?}");
    let written = Event::Written(Ok(granted(lease(OWN, 1, 501), 3600)));
    assert_eq!(end(&machine.handle(written, at(3600))), None);
    let all = [peers(), vec![lease(OWN, 1, 501)]].concat();
    machine.handle(listing(&all, 501), at(3600));
    // By hand, under the watch, it goes for good.
    let commands = machine.handle(Event::Changed(Ok(vec![deleted(OWN, 502)])), at(3601));
    assert_eq!(end(&commands), Some(End { new_owner: None }));
}

#[test]
fn doubt_about_the_store_lists_it() {
    let mut machine = watching(Timing::default());
    let commands = machine.handle(Event::Doubted, at(10));
    assert_eq!(commands, [Command::List], "a watch that works is dropped, or nothing is asked");
    let all = [peers(), vec![lease(OWN, 1, 7)]].concat();
    machine.handle(listing(&all, 10), at(10));
    // While the watch is being opened again, the listing follows that.
    machine.handle(Event::Changed(Err(down())), at(11));
    assert!(machine.handle(Event::Timer, at(20)).contains(&watch_from(10)));
    assert_eq!(machine.handle(Event::Doubted, at(20)), []);
    assert_eq!(machine.handle(Event::Opened(Ok(())), at(20)), [Command::List]);
    // In an outage it is the first thing asked for when that is over.
    let commands = machine.handle(Event::Listed(Err(down())), at(21));
    assert!(!commands.contains(&Command::List), "{commands:?}");
    assert_eq!(machine.handle(Event::Doubted, at(21)), [], "not sooner than is good for it");
    assert!(machine.handle(Event::Timer, at(40)).contains(&Command::List));
}

#[test]
fn foreign_keys_around_the_network_leave_the_own_subnet() {
    let mut machine = watching(quiet());
    machine.handle(Event::Changed(Err(StoreError::HistoryLost)), at(10));
    // Another network's lease, which happens to cover this network.
    let mut foreign = lease(0, 99, 20);
    (foreign.subnets, foreign.key) = ("10.0.0.0/8".parse().unwrap(), "10.0.0.0-8".to_owned());
    let commands = machine.handle(listing(&[peers(), vec![foreign]].concat(), 20), at(10));
    assert_eq!(end(&commands), None, "a foreign key takes the own subnet");
    assert!(creates(&commands), "the own lease is not taken again: {commands:?}");
}

/// What a watching machine does on a listing as of before what it has seen.
fn restored(leases: Vec<Lease>, is_cut: bool) -> (Machine, Vec<Command>) {
    let mut machine = watching(quiet());
    let lost = StoreError::HistoryLost;
    machine.handle(Event::Changed(Err(lost)), at(10));
    let leases = leases.into_iter().map(Arc::new).collect();
    let snapshot = Snapshot { leases, revision: 5, cluster: 1, is_cut, ..Snapshot::default() };
    let commands = machine.handle(Event::Listed(Ok(snapshot)), at(10));
    (machine, commands)
}

#[test]
fn backup_without_own_lease_keeps_running() {
    let (_, commands) = restored(peers(), false);
    assert_eq!(end(&commands), None, "a backup from before its lease ends the daemon");
    assert!(creates(&commands), "the own lease is not taken again: {commands:?}");
}

#[test]
fn lower_revisions_after_wipe_are_news() {
    // Nothing is told of the own entry, which was last written at revision 7.
    let (mut machine, commands) = restored(peers(), true);
    assert!(commands.contains(&watch_from(5)), "{commands:?}");
    machine.handle(Event::Opened(Ok(())), at(10));
    let taken = Event::Changed(Ok(vec![Change::Put(lease(OWN, 9, 6))]));
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 9).into());
    let commands = machine.handle(taken, at(11));
    assert_eq!(end(&commands), Some(End { new_owner }), "two nodes own one subnet");
}

#[test]
fn change_during_listing_restarts_the_watch() {
    let mut machine = watching(Timing::default());
    assert!(machine.handle(Event::Timer, at(3600)).contains(&Command::List));
    let change = Event::Changed(Ok(vec![Change::Put(lease(5, 15, 11))]));
    let commands = machine.handle(change, at(3600));
    assert_eq!(commands, [Command::DropWatch]);
    // The listing is of before the change.
    let commands =
        machine.handle(listing(&[peers(), vec![lease(OWN, 1, 7)]].concat(), 10), at(3600));
    let again = watch_from(10);
    assert!(commands.contains(&again), "the change is lost: {commands:?}");
}

#[test]
fn held_peers_do_not_vanish_again() {
    let mut machine = watching(quiet());
    let gone = |revision| {
        let changes = [1, 2, 3, 4].map(|third| deleted(third, revision)).to_vec();
        Event::Changed(Ok(changes))
    };
    machine.handle(gone(11), at(10));
    assert_eq!(counts(&machine.handle(Event::Timer, at(11))), Some((4, 4)));
    let commands = machine.handle(gone(12), at(600));
    assert!(!says(&commands, "ALARM"), "a second alarm: {commands:?}");
    let commands = machine.handle(Event::Timer, at(10 + 15 * 60));
    assert_eq!(counts(&commands), Some((0, 0)), "peers are held for ever");
}

#[test]
fn listing_due_during_renewal_follows_it() {
    let mut machine = watching(Timing::default());
    let now = DAY_SECONDS - 3600;
    let commands = machine.handle(Event::Timer, at(now));
    let is_write = matches!(machine.asked, Asked::Write { .. });
    assert!(is_write && machine.relist_at <= at(now).boot, "{commands:?}");
    let commands = machine.handle(Event::Written(Ok(granted(lease(OWN, 1, 7), now))), at(now));
    assert!(commands.contains(&Command::List), "the listing is left out: {commands:?}");
}

#[test]
fn only_confirmed_state_is_cached() {
    let (mut machine, _) = from_cache();
    machine.handle(listing(&[peers(), vec![lease(OWN, 1, 7)]].concat(), 12), at(6));
    let commands = machine.handle(Event::Timer, at(7));
    assert!(counts(&commands).is_some() && remembers(&commands).is_none(), "{commands:?}");

    let mut machine = watching(quiet());
    machine.handle(moved(2), at(2));
    let commands = machine.handle(Event::Timer, at(3));
    let early = "a restart would take its own entry for another's";
    assert!(counts(&commands).is_some() && remembers(&commands).is_none(), "{early}: {commands:?}");
    machine.handle(Event::Written(Ok(granted(lease(OWN, 2, 11), 3))), at(3));
    let commands = machine.handle(Event::Timer, at(4));
    let known = remembers(&commands).expect("where it moved is never remembered");
    assert_eq!(known.own.attributes.public_ip, Some(Ipv4Addr::new(192, 0, 2, 2)));
}

#[test]
fn entry_created_while_moving_is_own() {
    let mut machine = watching(quiet());
    let commands = machine.handle(Event::Timer, at(2 * DAY_SECONDS));
    assert!(commands.contains(&Command::List), "{commands:?}");
    let commands = machine.handle(listing(&peers(), 12), at(2 * DAY_SECONDS));
    assert!(creates(&commands), "{commands:?}");
    machine.handle(moved(2), at(2 * DAY_SECONDS));
    let created = Event::Changed(Ok(vec![Change::Put(lease(OWN, 1, 13))]));
    let commands = machine.handle(created, at(2 * DAY_SECONDS));
    assert_eq!(end(&commands), None, "it gives its subnet up to itself");
}

/// The address that a renewal would write.
fn renewed_as(commands: &[Command]) -> Option<Ipv4Addr> {
    commands.iter().find_map(|command| {
        let Command::Write { what: Write::Renew, held } = command else { return None };
        held.attributes.public_ip
    })
}

#[test]
fn renewal_before_move_is_written_keeps_address() {
    let old = Some(Ipv4Addr::new(192, 0, 2, 1));
    for mut machine in [watching(quiet()), machine_with(quiet())] {
        let now = DAY_SECONDS - 3600;
        let commands = machine.handle(moved(9), at(now - 100));
        let update = |command: &Command| {
            matches!(command, Command::Write { what: Write::Restore | Write::Repair, .. })
        };
        assert!(commands.iter().any(update), "the new address is not told: {commands:?}");
        machine.renew_at = Some(Duration::from_secs(now));
        let commands = machine.handle(Event::Written(Err(down())), at(now));
        assert_eq!(renewed_as(&commands), old, "whoever takes the old address takes the subnet");
    }
}

#[test]
fn change_after_incomplete_listing_is_news() {
    let mut machine = watching(quiet());
    machine.relist_at = Duration::from_secs(10);
    assert!(machine.handle(Event::Timer, at(10)).contains(&Command::List));
    // Written before the listing was made, and told of after it.
    let leases = vec![lease(1, 11, 1).into()];
    let cut = Snapshot { leases, revision: 12, cluster: 1, is_cut: true, ..Snapshot::default() };
    machine.handle(Event::Listed(Ok(cut)), at(10));
    let changes = vec![deleted(2, 11), Change::Put(lease(5, 15, 12))];
    machine.handle(Event::Changed(Ok(changes)), at(10));
    let found: Vec<_> = machine.mirror.values().map(|lease| lease.subnets.key()).collect();
    let expected = [1, OWN, 3, 4, 5].map(|third| lease(third, 0, 0).key);
    assert_eq!(found, expected, "a change is lost for good");
}

/// What is said while a store fails with `error` from `from` to `to`, each time that it is asked.
fn said_while(machine: &mut Machine, error: fn() -> StoreError, from: u64, to: u64) -> Vec<String> {
    let mut said = Vec::new();
    for seconds in from..to {
        let asked = machine.handle(Event::Timer, at(seconds));
        let answer = if asked.contains(&Command::List) {
            Event::Listed(Err(error()))
        } else if asked.iter().any(|command| matches!(command, Command::Watch { .. })) {
            Event::Opened(Err(error()))
        } else {
            continue;
        };
        let commands = machine.handle(answer, at(seconds));
        said.extend(commands.iter().filter_map(|command| {
            let Command::Log(_, text) = command else { return None };
            Some(text.clone())
        }));
    }
    said
}

#[test]
fn outage_turning_into_refusals_is_logged_once() {
    let down = || StoreError::Unavailable { operation: "test", detail: "is away".to_owned() };
    let refuses = || StoreError::Refused { operation: "test", detail: "403".to_owned() };
    let mut machine = watching(Timing::default());
    let commands = machine.handle(Event::Changed(Err(down())), at(100));
    assert!(says(&commands, "is away"), "{commands:?}");
    assert!(said_while(&mut machine, down, 101, 105).is_empty(), "said twice");
    // As an API that starts does: too short for anybody to look for a reason.
    assert!(said_while(&mut machine, refuses, 105, 108).is_empty(), "alarmed by every start");
    assert!(said_while(&mut machine, down, 108, 112).is_empty());
    let said = said_while(&mut machine, refuses, 112, 160);
    assert!(said.len() == 1 && said[0].contains("403"), "{said:?}");
    // One that refuses from the begin is told in the usual way.
    let mut machine = watching(Timing::default());
    let commands = machine.handle(Event::Changed(Err(refuses())), at(100));
    assert!(says(&commands, "403"), "{commands:?}");
    assert!(said_while(&mut machine, refuses, 101, 155).is_empty(), "said twice");
}
