//! Entries of nodes with IPv6, and of nodes whose families change: what is one peer, and whose
//! subnets are taken.

use super::*;

/// As `lease`, with an IPv6 subnet of the same number.
fn dual(third: u8, host: u8, revision: i64) -> Lease {
    let v6 = format!("10.5.{third}.0/24,fd00:5:0:{third}::/64");
    let subnets: Prefixes = v6.parse().unwrap();
    Lease { subnets, key: subnets.key(), ..lease(third, host, revision) }
}

fn gone(lease: &Lease, revision: i64) -> Change {
    Change::Deleted { key: lease.key.clone(), revision }
}

/// A machine that watches, and has published these peers; it has IPv6 as its own lease has.
fn watching_peers(own: &Lease, peers: &[Lease]) -> Machine {
    let networks = "10.5.0.0/16,fd00:5::/48".parse::<Prefixes>().unwrap();
    let networks = networks.of_families(own.subnets).unwrap();
    let expires = Some(Duration::from_secs(DAY_SECONDS));
    let own = OwnLease { lease: own.clone(), expires, networks };
    let all = [peers, std::slice::from_ref(&own.lease)].concat();
    let random = fastrand::Rng::with_seed(1);
    let mut machine = Machine::new(own, Timing::default(), random, at(0));
    machine.handle(Event::Timer, at(0));
    machine.handle(listing(&all, 10), at(0));
    machine.handle(Event::Opened(Ok(())), at(0));
    machine.handle(Event::Changed(Ok(vec![Change::Live { revision: 10 }])), at(0));
    let commands = machine.handle(Event::Timer, at(1));
    assert_eq!(counts(&commands), Some((peers.len(), 0)), "{commands:?}");
    machine
}

#[test]
fn a_peer_whose_families_change_did_not_vanish() {
    let before: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let after: Vec<_> = (1..=4).map(|n| dual(n, 10 + n, 11)).collect();
    for (before, after) in [(&before, &after), (&after, &before)] {
        for own in [lease(OWN, 1, 7), dual(OWN, 1, 7)] {
            let put = |lease: &Lease| Change::Put(Lease { revision: 11, ..lease.clone() });
            let changes = before.iter().map(|lease| gone(lease, 11)).chain(after.iter().map(put));
            let mut machine = watching_peers(&own, before);
            let commands = machine.handle(Event::Changed(Ok(changes.collect())), at(10));
            assert!(!says(&commands, "ALARM"), "seen by the watch: {commands:?}");
            let commands = machine.handle(Event::Timer, at(11));
            assert_eq!(counts(&commands), Some((4, 0)), "a peer is lost, or held");

            let mut machine = watching_peers(&own, before);
            machine.handle(Event::Changed(Err(StoreError::HistoryLost)), at(10));
            let all = [after.clone(), vec![own]].concat();
            let commands = machine.handle(listing(&all, 12), at(10));
            assert!(!says(&commands, "ALARM"), "seen by a listing: {commands:?}");
            let commands = machine.handle(Event::Timer, at(11));
            assert_eq!(counts(&commands), Some((4, 0)), "a peer is lost, or held");
        }
    }
}

#[test]
fn a_peer_that_has_another_entry_did_not_vanish() {
    let peers: Vec<_> = (1..=4).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let mut machine = watching_peers(&lease(OWN, 1, 7), &peers);
    // As flanneld would leave it, which makes the new entry before the old one ends.
    let others = (1..=4).map(|n| Change::Put(dual(n, 10 + n, 10 + i64::from(n))));
    machine.handle(Event::Changed(Ok(others.collect())), at(10));
    let changes = peers.iter().map(|lease| gone(lease, 15)).collect();
    let commands = machine.handle(Event::Changed(Ok(changes)), at(20));
    assert!(!says(&commands, "ALARM"), "nobody vanished: {commands:?}");
    assert_eq!(counts(&commands), Some((4, 0)), "a peer is lost, or held");
}

#[test]
fn peers_of_which_only_ipv4_is_used_are_held_when_they_vanish() {
    let peers: Vec<_> = (1..=4).map(|n| dual(n, 10 + n, i64::from(n))).collect();
    let mut machine = watching_peers(&lease(OWN, 1, 7), &peers);
    let changes = peers.iter().map(|lease| gone(lease, 11)).collect();
    let commands = machine.handle(Event::Changed(Ok(changes)), at(10));
    assert!(says(&commands, "ALARM"), "no alarm: {commands:?}");
    assert_eq!(counts(&machine.handle(Event::Timer, at(11))), Some((4, 4)), "traffic stopped");
}

#[test]
fn a_key_changed_before_and_deleted_after_vanished() {
    let peers: Vec<_> = (1..=2).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let mut machine = watching_peers(&lease(OWN, 1, 7), &peers);
    // All in one batch, as after a pause: both get another key, and both of these are deleted.
    let after = [dual(1, 11, 11), dual(2, 12, 12)];
    let mut changes = Vec::new();
    for (before, after) in peers.iter().zip(&after) {
        changes.extend([gone(before, after.revision), Change::Put(after.clone())]);
    }
    changes.extend(after.iter().map(|lease| gone(lease, 13)));
    let commands = machine.handle(Event::Changed(Ok(changes)), at(10));
    assert!(says(&commands, "2 of 2"), "no alarm: {commands:?}");
    assert_eq!(counts(&machine.handle(Event::Timer, at(11))), Some((2, 2)), "traffic stopped");
}

#[test]
fn a_lapsed_subnet_is_not_taken_from_an_entry_that_cannot_be_read() {
    let own = dual(OWN, 1, 7);
    for (key, is_taken) in [
        ("10.5.100.0-24", true),
        ("10.5.100.0-24&fd00:5:0:7::-64", true),
        ("10.5.7.0-24&fd00:5:0:64::-64", false),
        ("10.5.7.0-24&fd00:5:0:100::-64", true),
        ("0.0.0.0-0&fd00:5:0:100::-64", true),
        ("10.5.0.0-16", false),
        ("junk", false),
    ] {
        let mut machine = watching_peers(&own, &[]);
        machine.handle(Event::Changed(Err(StoreError::HistoryLost)), at(10));
        let (reason, detail) = (RejectReason::BadValue, String::new());
        let unreadable = Rejected { key: key.to_owned(), reason, detail, revision: 12 };
        let rejected = vec![unreadable];
        let snapshot = Snapshot { rejected, revision: 12, cluster: 1, ..Snapshot::default() };
        let commands = machine.handle(Event::Listed(Ok(snapshot)), at(10));
        let is_retaken = commands.iter().any(|it| matches!(it, Command::Retake { .. }));
        assert_eq!((end(&commands).is_some(), is_retaken), (is_taken, !is_taken), "beside {key}");
        assert_eq!(end(&commands).and_then(|end| end.new_owner), None);
    }
}

#[test]
fn after_a_subnet_was_taken_again_the_peers_are_looked_at_again() {
    let peers: Vec<_> = (1..=3).map(|n| lease(n, 10 + n, i64::from(n))).collect();
    let mut machine = watching_peers(&lease(OWN, 1, 7), &peers);
    machine.handle(Event::Changed(Err(StoreError::HistoryLost)), at(10));
    machine.handle(listing(&peers, 12), at(10));
    // The store lost its data, and has the id of before.
    let commands = machine.handle(Event::Written(Ok(granted(lease(OWN, 1, 13), 10))), at(10));
    assert!(commands.contains(&Command::List), "it watches from where it was: {commands:?}");
    let commands = machine.handle(listing(&[lease(OWN, 1, 13)], 13), at(11));
    assert!(says(&commands, "3 of 3"), "nothing is held: {commands:?}");
}
