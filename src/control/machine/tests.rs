//! Single steps of the machine, without any store.

use std::net::Ipv4Addr;

use super::*;
use crate::control::error::StoreError;
use crate::control::lease::Lifetime;
use crate::control::rejected::RejectReason;
use crate::route::{Prefix, Prefixes};

mod addresses;
mod conflicts;
mod families;

const OWN: u8 = 100;
const DAY_SECONDS: u64 = 86_400;

fn lease(third: u8, host: u8, revision: i64) -> Lease {
    let subnets = Prefixes::from(Prefix::new(Ipv4Addr::new(10, 5, third, 0), 24).unwrap());
    Lease {
        subnets,
        key: subnets.key(),
        attributes: LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, host)),
        revision,
        created_revision: revision,
        lifetime: Lifetime::Leased { id: revision, expires_unix: None },
    }
}

fn at(seconds: u64) -> Now {
    Now { boot: Duration::from_secs(seconds), unix_seconds: 1_000 + seconds }
}

fn machine_with(timing: Timing) -> Machine {
    let networks = "10.5.0.0/16".parse().unwrap();
    let expires = Some(Duration::from_secs(DAY_SECONDS));
    let own = OwnLease { lease: lease(OWN, 1, 7), expires, networks };
    Machine::new(own, timing, fastrand::Rng::with_seed(1), at(0))
}

fn machine() -> Machine {
    machine_with(Timing::default())
}

fn listing(leases: &[Lease], revision: i64) -> Event {
    let leases = leases.iter().cloned().map(Arc::new).collect();
    Event::Listed(Ok(Snapshot { leases, revision, cluster: 1, ..Snapshot::default() }))
}

/// For what comes after `revision`, while the own entry is as in `machine_with`.
fn watch_from(revision: i64) -> Command {
    Command::Watch { revision, own: lease(OWN, 1, 7) }
}

/// A machine that watches and has published the nodes 11 to 14 on 10.5.1.0/24 to 10.5.4.0/24.
fn watching(timing: Timing) -> Machine {
    let mut machine = machine_with(timing);
    assert!(machine.handle(Event::Timer, at(0)).contains(&Command::List));
    let all: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let all = [all, vec![lease(OWN, 1, 7)]].concat();
    let commands = machine.handle(listing(&all, 10), at(0));
    assert_eq!(commands, [watch_from(10)]);
    machine.handle(Event::Opened(Ok(())), at(0));
    machine.handle(Event::Changed(Ok(vec![Change::Live { revision: 10 }])), at(0));
    let commands = machine.handle(Event::Timer, at(1));
    assert_eq!(counts(&commands), Some((4, 0)));
    machine
}

fn deleted(third: u8, revision: i64) -> Change {
    Change::Deleted { key: lease(third, 0, 0).key, revision }
}

fn counts(commands: &[Command]) -> Option<(usize, usize)> {
    commands.iter().find_map(|command| {
        let Command::Count { peers, held } = command else { return None };
        Some((*peers, *held))
    })
}

fn end(commands: &[Command]) -> Option<End> {
    commands.iter().find_map(|command| {
        let Command::End(end) = command else { return None };
        Some(*end)
    })
}

/// Whether a message names `word`, such as a subnet.
fn says(commands: &[Command], word: &str) -> bool {
    commands.iter().any(|command| {
        let Command::Log(_, text) = command else { return false };
        text.contains(word)
    })
}

#[test]
fn vanished_peers_are_held_own_lease_retaken() {
    let mut machine = watching(Timing::default());
    // `etcdctl del --prefix`: everything in one revision.
    let changes = [1, OWN, 2, 3, 4].map(|third| deleted(third, 11)).to_vec();
    let commands = machine.handle(Event::Changed(Ok(changes)), at(10));
    assert_eq!(end(&commands), None, "an emptied store ends the daemon");
    assert!(says(&commands, "ALARM"), "no alarm: {commands:?}");
    let commands = machine.handle(Event::Timer, at(11));
    assert_eq!(counts(&commands), Some((4, 4)), "traffic stopped");
    assert!(commands.contains(&Command::List), "the own lease is not looked for: {commands:?}");
    let commands = machine.handle(listing(&[], 11), at(11));
    let creates = commands.iter().any(|command| matches!(command, Command::Retake { .. }));
    assert!(creates, "the own lease is not registered again: {commands:?}");
    machine.handle(Event::Written(Ok(granted(lease(OWN, 1, 12), 11))), at(11));
    machine.handle(listing(&[lease(OWN, 1, 12)], 12), at(11));
    machine.handle(Event::Opened(Ok(())), at(11));

    // One node comes back, another takes a third's subnet and a half of the last one's.
    let new = vec![Change::Put(lease(1, 11, 13)), Change::Put(lease(2, 99, 14))];
    let commands = machine.handle(Event::Changed(Ok(new)), at(20));
    assert_eq!(counts(&commands), Some((4, 2)), "a held peer outlives its successor");
    assert!(says(&commands, "2 "), "{commands:?}");
    let moved = &machine.published.as_ref().unwrap()[&lease(2, 0, 0).subnets];
    assert_eq!(moved.attributes.public_ip, Some(Ipv4Addr::new(192, 0, 2, 99)));

    let commands = machine.handle(Event::Timer, at(10 + 15 * 60));
    assert_eq!(counts(&commands), Some((2, 0)), "peers are held for ever");
    assert!(says(&commands, "2 "), "{commands:?}");
}

#[test]
fn a_second_accident_in_one_batch_is_one_too() {
    let mut machine = watching(Timing::default());
    // What a watch that was away catches up with.
    let changes = [(1, 11), (2, 11), (3, 11), (4, 12), (OWN, 12)];
    let changes = changes.map(|(third, revision)| deleted(third, revision)).to_vec();
    let commands = machine.handle(Event::Changed(Ok(changes)), at(10));
    assert_eq!(end(&commands), None, "an emptied store ends the daemon");
    let commands = machine.handle(Event::Timer, at(11));
    assert_eq!(counts(&commands), Some((4, 4)), "traffic stopped");
}

fn granted(lease: Lease, seconds: u64) -> Granted {
    Granted { lease, expires: Some(Duration::from_secs(seconds + DAY_SECONDS)) }
}

#[test]
fn a_few_deletions_are_administration() {
    let mut machine = watching(Timing::default());
    let changes = vec![deleted(1, 11), deleted(2, 11)];
    machine.handle(Event::Changed(Ok(changes)), at(10));
    let commands = machine.handle(Event::Timer, at(11));
    assert_eq!(counts(&commands), Some((2, 0)), "half of the peers is not most of them");
    let changes = vec![deleted(3, 12), deleted(4, 13)];
    machine.handle(Event::Changed(Ok(changes)), at(12));
    let commands = machine.handle(Event::Timer, at(13));
    assert_eq!(counts(&commands), Some((0, 0)), "one after the other is not at once");
    let commands = machine.handle(Event::Changed(Ok(vec![deleted(OWN, 14)])), at(14));
    assert_eq!(end(&commands), Some(End { new_owner: None }));
}

#[test]
fn a_grace_period_outlasts_an_outage() {
    let timing = Timing { stale_hold: Duration::from_secs(90), ..Timing::default() };
    let mut machine = watching(timing);
    let changes = [1, 2, 3, 4].map(|third| deleted(third, 11)).to_vec();
    machine.handle(Event::Changed(Ok(changes)), at(10));
    assert_eq!(counts(&machine.handle(Event::Timer, at(11))), Some((4, 4)));
    let down = StoreError::unavailable("test", "");
    machine.handle(Event::Changed(Err(down)), at(12));
    let commands = machine.handle(Event::Timer, at(150));
    assert_eq!((machine.stale.len(), counts(&commands)), (4, None), "{commands:?}");
    assert_ne!(machine.next_wake(), Some(Duration::from_secs(10 + 90)), "for nothing");
    machine.handle(Event::Opened(Ok(())), at(150));
    machine.handle(Event::Changed(Ok(vec![Change::Live { revision: 11 }])), at(151));
    machine.handle(Event::Timer, at(210));
    assert_eq!(machine.stale.len(), 4, "nobody had time to register again");
    machine.handle(Event::Timer, at(211));
    assert_eq!(machine.stale.len(), 0, "held for ever");
}

#[test]
fn whoever_may_list_and_not_watch_sees_new_nodes() {
    let mut machine = machine();
    machine.handle(Event::Timer, at(0));
    let mut asked = machine.handle(listing(&[lease(OWN, 1, 7)], 10), at(0));
    let refused = || StoreError::Refused { operation: "test", detail: "not to watch".to_owned() };
    let (mut lists, mut seconds) = (0, 0);
    while lists < 2 {
        assert!(seconds < 3600, "nothing is listed any more");
        if asked.iter().any(|it| matches!(it, Command::Watch { .. })) {
            asked = machine.handle(Event::Opened(Err(refused())), at(seconds));
        } else if asked.contains(&Command::List) {
            lists += 1;
            let all = [lease(OWN, 1, 7), lease(1, 11, 11)];
            asked = machine.handle(listing(&all, 11), at(seconds));
        } else {
            let wake = machine.next_wake().expect("it goes on").as_secs();
            assert!(wake >= seconds, "it turns without a pause");
            seconds = wake.max(seconds + 1);
            asked = machine.handle(Event::Timer, at(seconds));
        }
    }
    let peers = machine.published.as_ref().unwrap();
    assert!(peers.contains_key(&lease(1, 0, 0).subnets), "{peers:?}");
}

#[test]
fn zero_hold_drops_peers_and_retakes_lease() {
    let timing = Timing { stale_hold: Duration::ZERO, ..Timing::default() };
    let mut machine = watching(timing);
    let changes = [1, 2, 3, 4, OWN].map(|third| deleted(third, 11)).to_vec();
    let commands = machine.handle(Event::Changed(Ok(changes)), at(10));
    assert_eq!(end(&commands), None);
    let commands = machine.handle(Event::Timer, at(11));
    assert_eq!(counts(&commands), Some((0, 0)), "--stale-hold=0 holds");
}

#[test]
fn other_cluster_with_higher_revisions_is_detected() {
    let mut machine = watching(Timing::default());
    let lost = StoreError::HistoryLost;
    let commands = machine.handle(Event::Changed(Err(lost)), at(10));
    assert!(commands.contains(&Command::List));
    let snapshot = Snapshot { revision: 500, cluster: 2, ..Snapshot::default() };
    let commands = machine.handle(Event::Listed(Ok(snapshot)), at(10));
    assert_eq!(end(&commands), None, "a replaced store ends the daemon");
    assert!(says(&commands, "ALARM"), "{commands:?}");
    let creates = commands.iter().any(|command| matches!(command, Command::Retake { .. }));
    assert!(creates, "the own lease is not registered at once: {commands:?}");
}

#[test]
fn expired_own_entry_is_read_before_writing() {
    for host in [1, 9] {
        let mut machine = watching(Timing::default());
        let commands = machine.handle(Event::Timer, at(2 * DAY_SECONDS));
        let writes = |commands: &[Command]| {
            commands
                .iter()
                .any(|command| matches!(command, Command::Write { what: Write::Renew, .. }))
        };
        assert!(!writes(&commands) && commands.contains(&Command::List), "{commands:?}");
        let found = [lease(OWN, host, if host == 1 { 7 } else { 20 })];
        let commands = machine.handle(listing(&found, 20), at(2 * DAY_SECONDS));
        match host {
            1 => assert!(writes(&commands), "what is still ours is not renewed: {commands:?}"),
            _ => {
                let new_owner = Some(Ipv4Addr::new(192, 0, 2, 9).into());
                assert_eq!(end(&commands), Some(End { new_owner }));
            }
        }
    }
}

#[test]
fn unrequested_answer_changes_nothing() {
    let mut machine = watching(Timing::default());
    for event in
        [listing(&[], 99), Event::Opened(Ok(())), Event::Written(Ok(granted(lease(OWN, 1, 99), 1)))]
    {
        assert_eq!(machine.handle(event, at(2)), [], "a late answer was taken for a new one");
    }
}

#[test]
fn overtaken_write_is_listed_again() {
    let mut machine = watching(Timing::default());
    let commands = machine.handle(Event::Timer, at(DAY_SECONDS - 3600));
    let listed = commands.contains(&Command::List);
    assert!(!listed && matches!(machine.asked, Asked::Write { .. }), "{commands:?}");
    // Junk, written after the renewal and told of before its answer.
    let junk = Rejected {
        key: lease(OWN, 0, 0).key,
        reason: RejectReason::BadValue,
        detail: String::new(),
        revision: 30,
    };
    let now = at(DAY_SECONDS - 3600);
    machine.handle(Event::Changed(Ok(vec![Change::Rejected(junk)])), now);
    let written = Event::Written(Ok(granted(lease(OWN, 1, 7), DAY_SECONDS)));
    let commands = machine.handle(written, now);
    let held = Lease { revision: 30, ..lease(OWN, 1, 7) };
    assert!(commands.contains(&Command::Write { what: Write::Repair, held }), "{commands:?}");
}

#[test]
fn what_is_not_used_is_told_until_it_is_gone() {
    let mut machine = watching(Timing::default());
    let mut now = 1;
    let mut unused_after = |machine: &mut Machine, event| {
        machine.handle(event, at(now));
        now += 1;
        let commands = machine.handle(Event::Timer, at(now));
        commands.into_iter().find_map(|command| {
            let Command::Unused(unused) = command else { return None };
            Some(unused.into_iter().map(|one| one.key).collect::<Vec<_>>())
        })
    };
    let junk = |key: &str, revision| {
        let (reason, detail) = (RejectReason::BadKey, String::new());
        Change::Rejected(Rejected { key: key.to_owned(), reason, detail, revision })
    };
    let changed = |change| Event::Changed(Ok(vec![change]));
    let keys = |keys: &[&str]| Some(keys.iter().map(|key| (*key).to_owned()).collect());
    // A lease that can't be read any more, a key that never was one, and one of another network.
    let was_lease = lease(1, 11, 1).key;
    assert_eq!(unused_after(&mut machine, changed(junk(&was_lease, 11))), keys(&[&was_lease]));
    assert_eq!(unused_after(&mut machine, changed(junk("x", 12))), keys(&[&was_lease, "x"]));
    let mut foreign = lease(9, 19, 13);
    foreign.attributes.public_ip = Some(Ipv4Addr::LOCALHOST);
    let all = keys(&[&was_lease, "x", &foreign.key]);
    assert_eq!(unused_after(&mut machine, changed(Change::Put(foreign.clone()))), all);
    // One is corrected, one is deleted, and the last is not there when all is listed.
    let put = changed(Change::Put(lease(1, 11, 15)));
    assert_eq!(unused_after(&mut machine, put), keys(&["x", &foreign.key]));
    let deleted = changed(Change::Deleted { key: foreign.key.clone(), revision: 16 });
    assert_eq!(unused_after(&mut machine, deleted), keys(&["x"]));
    let leases = vec![lease(OWN, 1, 7).into(), lease(1, 11, 15).into()];
    let all = Snapshot { leases, revision: 17, cluster: 1, ..Snapshot::default() };
    assert_eq!(unused_after(&mut machine, changed(Change::Everything(all))), keys(&[]));
}

#[test]
fn watched_lease_flood_costs_bounded_memory() {
    let mut machine = machine();
    let own = machine.own.lease.clone();
    machine.mirror.clear();
    for number in 0..ENTRIES_MAX + 10 {
        machine.insert(Lease { key: number.to_string(), ..own.clone() }.into());
    }
    assert_eq!(machine.mirror.len(), ENTRIES_MAX);
    let mut refused = machine.unreadable.values().map(|rejected| rejected.reason);
    assert_eq!(refused.next(), Some(RejectReason::TooMany), "what does not fit is not counted");
    let key = own.key.clone();
    machine.insert(own.into());
    assert!(machine.mirror.contains_key(&key), "a flood hides the own lease");
}

fn known() -> Known {
    let peers = (1..=4).map(|n| (lease(n, 10 + n, 0).subnets, lease(n, 10 + n, 0).into()));
    Known {
        as_of_unix: 900,
        revision: 10,
        cluster: 1,
        networks: "10.5.0.0/16".parse().unwrap(),
        own: Lease { lifetime: Lifetime::Leased { id: 0, expires_unix: None }, ..lease(OWN, 1, 0) },
        ends_unix: None,
        peers: Arc::new(peers.collect()),
    }
}

fn from_cache() -> (Machine, Vec<Command>) {
    let random = fastrand::Rng::with_seed(1);
    let mut machine = Machine::from_cache(known(), Timing::default(), random, at(5));
    let commands = machine.handle(Event::Timer, at(5));
    (machine, commands)
}

fn publishes(commands: &[Command]) -> Option<usize> {
    commands.iter().find_map(|command| {
        let Command::Publish(peers) = command else { return None };
        Some(peers.len())
    })
}

fn remembers(commands: &[Command]) -> Option<&Known> {
    commands.iter().find_map(|command| {
        let Command::Remember(known) = command else { return None };
        Some(known)
    })
}

#[test]
fn renewals_that_fail_are_reported_once_a_minute() {
    let (mut machine, _) = from_cache();
    let all: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let all = [all, vec![lease(OWN, 1, 7)]].concat();
    let mut commands = machine.handle(listing(&all, 12), at(6));
    let (mut writes, mut reports) = (0, 0);
    for second in 7..67 {
        commands.extend(machine.handle(Event::Timer, at(second)));
        while let Some(answer) = commands.iter().find_map(|command| {
            let refused = || Err(StoreError::unavailable("local store", "Read-only"));
            let written = matches!(command, Command::Write { .. });
            let listed = matches!(command, Command::List).then(|| listing(&all, 12));
            let opened = matches!(command, Command::Watch { .. });
            let answer = written.then(|| Event::Written(refused())).or(listed);
            answer.or_else(|| opened.then_some(Event::Opened(Ok(()))))
        }) {
            writes += usize::from(matches!(answer, Event::Written(_)));
            commands = machine.handle(answer, at(second));
            reports += usize::from(says(&commands, "Read-only"));
        }
    }
    assert!(writes > 10 && reports == 1, "{writes} tries, {reports} reports");
}

#[test]
fn offline_start_publishes_at_once_and_reads_first() {
    let (mut machine, commands) = from_cache();
    assert_eq!(publishes(&commands), Some(4), "no traffic without the store: {commands:?}");
    assert!(commands.contains(&Command::List), "{commands:?}");
    // An hour without the store: nothing is written, forgotten, or said about a renewal.
    let mut seconds = 5;
    let down = || StoreError::Unavailable { operation: "test", detail: String::new() };
    while seconds < 3600 {
        let commands = machine.handle(Event::Listed(Err(down())), at(seconds));
        assert!(remembers(&commands).is_none(), "what is stale is remembered as fresh");
        let wake = machine.next_wake().expect("the machine sleeps for ever");
        seconds = wake.as_secs() + 1;
        let commands = machine.handle(Event::Timer, at(seconds));
        let listens = |command| matches!(command, &Command::List | &Command::Log(..));
        assert!(commands.iter().all(listens), "at {seconds} s: {commands:?}");
    }
    // The store is back with the own entry, one peer less and one moved.
    let all = [lease(OWN, 1, 7), lease(1, 11, 1), lease(2, 12, 2), lease(3, 99, 9)];
    let commands = machine.handle(listing(&all, 12), at(seconds));
    let held = lease(OWN, 1, 7);
    assert!(
        commands.contains(&Command::Write { what: Write::Renew, held: held.clone() }),
        "{commands:?}"
    );
    assert!(!commands.contains(&Command::Confirmed), "confirmed by nothing: {commands:?}");
    let commands = machine.handle(Event::Written(Ok(granted(held, seconds))), at(seconds));
    assert!(!commands.contains(&Command::Confirmed), "the cache's peers count as the store's");
    assert!(says(&commands, "10.5.100.0/24"), "{commands:?}");
    let commands = machine.handle(Event::Timer, at(seconds + 1));
    assert_eq!(counts(&commands), Some((3, 0)));
    let order = |wanted: fn(&Command) -> bool| commands.iter().position(wanted);
    let published = order(|command| matches!(command, Command::Publish(_)));
    let confirmed = order(|command| *command == Command::Confirmed);
    assert!(confirmed.is_some() && published < confirmed, "{commands:?}");
    let known = remembers(&commands).expect("nothing is remembered");
    assert_eq!((known.as_of_unix, known.peers.len()), (1_000 + seconds, 3));
}

#[test]
fn offline_start_with_same_peers_publishes_once() {
    let (mut machine, _) = from_cache();
    let all: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let commands = machine.handle(listing(&[all, vec![lease(OWN, 1, 7)]].concat(), 12), at(6));
    assert_eq!(publishes(&commands), None);
    machine.handle(Event::Written(Ok(granted(lease(OWN, 1, 7), 6))), at(6));
    let commands = machine.handle(Event::Timer, at(7));
    assert_eq!((publishes(&commands), counts(&commands)), (None, Some((4, 0))), "routes flap");
}

#[test]
fn offline_start_with_a_reservation_is_confirmed_by_the_listing() {
    let (mut machine, _) = from_cache();
    let own = Lease { lifetime: Lifetime::Reservation, ..lease(OWN, 1, 7) };
    let all: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).chain([own]).collect();
    let mut commands = machine.handle(listing(&all, 12), at(6));
    commands.extend(machine.handle(Event::Timer, at(7)));
    assert!(commands.contains(&Command::Confirmed), "stale for ever: {commands:?}");
    assert!(!commands.iter().any(|it| matches!(it, Command::Write { .. })), "{commands:?}");
}

#[test]
fn offline_start_retakes_free_subnet_yields_taken_one() {
    let (mut machine, _) = from_cache();
    let commands = machine.handle(listing(&[lease(1, 11, 1)], 12), at(6));
    let creates = commands.iter().any(|command| {
        let Command::Retake { held, .. } = command else { return false };
        held.key == lease(OWN, 0, 0).key
    });
    assert!(creates && end(&commands).is_none(), "the lapsed subnet is not taken: {commands:?}");

    let (mut machine, _) = from_cache();
    let commands = machine.handle(listing(&[lease(OWN, 9, 11)], 12), at(6));
    let new_owner = Some(Ipv4Addr::new(192, 0, 2, 9).into());
    assert_eq!(end(&commands), Some(End { new_owner }), "two owners of one subnet");
}

#[test]
fn offline_start_detects_a_wiped_store() {
    let (mut machine, _) = from_cache();
    let commands = machine.handle(listing(&[], 3), at(6));
    assert!(says(&commands, "ALARM"), "{commands:?}");
    let commands = machine.handle(Event::Timer, at(7));
    assert_eq!(counts(&commands), Some((4, 4)), "traffic stopped");
}
