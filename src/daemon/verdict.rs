//! What an operator has to know first: whether this node is ready, since when, and what is wrong.
//! Pure: a status in, sentences out.

use std::time::Duration;

use crate::control::clock::{format_go_duration, format_rfc3339};
use crate::control::snapshot::REJECTED_MAX;
use crate::stats::DropReason;
use crate::status::{
    BackendCounts, Cause, Fault, Hindrance, Kept, Peer, PeerState, Start, State, Status,
};

/// A link that was lost more rarely may have been taken down on purpose.
const LINK_FLAPS_MIN: u64 = 3;

/// The sum of what is wrong.
pub(super) fn state(status: &Status, faults: &[Fault]) -> State {
    match (status.ready, faults) {
        (false, _) => State::NotReady,
        (true, []) => State::Ready,
        (true, _) => State::Degraded,
    }
}

/// What is wrong, the worst first: causes of not being ready, then what a person has to look at
/// though packets flow.
pub(super) fn faults(status: &Status, now_unix: u64) -> Vec<Fault> {
    let mut faults = Faults(Vec::new());
    match &status.start {
        // During a start everything else that is missing is a consequence of that.
        Some(Start { step, hindrance: None }) => faults.add(Cause::Starting, Some(step.as_str())),
        Some(Start { hindrance: Some(why), .. }) => {
            faults.add(Cause::StartHindered, Some(described(why, now_unix)));
        }
        None => {
            if !status.ready {
                faults.missing(status);
            }
            faults.of_plane(status);
            faults.of_store(status, now_unix);
            faults.of_rules(status);
            faults.of_peers(status);
        }
    }
    faults.0
}

struct Faults(Vec<Fault>);

impl Faults {
    /// If there is something to say of it.
    fn add(&mut self, cause: Cause, text: Option<impl Into<String>>) {
        self.0.extend(text.map(|text| Fault { cause, text: text.into() }));
    }

    /// What keeps the node from being ready.
    fn missing(&mut self, status: &Status) {
        let is_down = status.dataplane_is_up != Some(true);
        let why = status.dataplane_wrong.as_deref().unwrap_or("the backend is being set up");
        self.add(Cause::DataplaneDown, is_down.then_some(why));
        let is_written = status.subnet_file.as_ref().is_some_and(|file| file.written);
        let text = "the subnet file can't be written: the log says why";
        self.add(Cause::SubnetFile, (!is_written).then_some(text));
        let rules = status.rules.as_ref().filter(|rules| !rules.kept.settled);
        let text = rules.map(|_| "the firewall's rules are not set yet: the log says why");
        self.add(Cause::RulesNotSet, text);
    }

    fn of_plane(&mut self, status: &Status) {
        let is_up = status.dataplane_is_up == Some(true);
        let wrong = status.dataplane_wrong.as_deref().filter(|_| is_up);
        self.add(Cause::DataplaneHindered, wrong);
        let (interface, lost) = (status.interface.as_deref(), status.carrier_lost_lately);
        let flaps = interface.filter(|_| lost >= LINK_FLAPS_MIN).map(|interface| {
            format!(
                "{interface} lost its carrier {lost} times in the last 10 minutes, and packets \
                 with it: look at the cable, the switch or the virtual machine's network"
            )
        });
        self.add(Cause::LinkFlaps, flaps);
        let mut workers = status.workers.iter();
        let text = workers.find_map(|it| Some(stalled(it.index, it.stalled_seconds?)));
        self.add(Cause::WorkerStalled, text);
    }

    fn of_store(&mut self, status: &Status, now_unix: u64) {
        let store = &status.store;
        let text = |holder| format!("this node's PublicIP belongs to {holder}: find that host");
        self.add(Cause::DuplicatePublicIp, store.duplicate_public_ip.as_ref().map(text));
        let ends = store.lease_expires_unix.map(|ends| {
            let left = go_seconds(ends.saturating_sub(now_unix));
            format!(", and this node's lease ends in {left}")
        });
        let ends = ends.unwrap_or_default();
        let away = store.hindrance.as_ref().map(|hindrance| {
            let why = described(hindrance, now_unix);
            format!("{why}; weftd goes on with the peers known so far{ends}")
        });
        self.add(Cause::StoreAway, away);
        let said = store.hindrance.as_ref().map(|hindrance| &hindrance.text);
        self.add(Cause::StoreRefuses, store.refused.as_ref().filter(|why| said != Some(why)));
        let other = store.refused_subnet.map(|subnet| subnet.to_string());
        let other = other.unwrap_or_else(|| "a subnet that can't be used".to_owned());
        let text = format!("the cluster assigned {other} to this node: the log says what to do");
        self.add(Cause::SubnetRefused, store.subnet_refused.then_some(text));
        let time = status.stale_as_of_unix.map(format_rfc3339);
        let text = |time| format!("lease and peers are those of {time}, not confirmed yet");
        self.add(Cause::Cached, time.map(text));
        let text = "the store has another network configuration: restart weftd, then this \
                    host's pods (a backend that this weftd can't run would end it)";
        self.add(Cause::RestartNeeded, status.restart_needed.then_some(text));
    }

    fn of_rules(&mut self, status: &Status) {
        let is_missing = |kept: Kept| kept.settled && !kept.in_place;
        let rules = status.rules.as_ref().filter(|rules| is_missing(rules.kept));
        let text = rules.map(|_| "the firewall's rules are not in place: the log says why");
        self.add(Cause::RulesNotInPlace, text);
        let guard = status.guard.as_ref().filter(|guard| is_missing(guard.kept));
        let text = "the guard of the tunnel's port can't be kept, and new peers may not be heard: \
                    the log says why";
        self.add(Cause::GuardNotKept, guard.map(|_| text));
    }

    fn of_peers(&mut self, status: &Status) {
        let held = status.peers_held;
        let text = format!(
            "the leases of {held} peers vanished from the store together, and packets still go \
             there: if that was not meant, restore its data (with --local-store, is this host's \
             clock right?), else restart weftd or wait"
        );
        self.add(Cause::LeasesVanished, (held > 0).then_some(text));
        self.add(Cause::EntryUnused, unused(status));
        let done = status.backend.as_ref().and_then(|backend| backend.done.as_ref());
        let is_dual = status.lease.as_ref().is_some_and(|lease| lease.ipv6.is_some());
        let text = done.and_then(|done| not_set_up(done, status.peers, is_dual));
        self.add(Cause::PeerNotSetUp, text);
        self.add(Cause::PeerOtherBackend, other_backend(&status.routes));
        if let Some((cause, text)) = unreached(&status.routes, &strangers(status)) {
            self.add(cause, Some(text));
        }
    }
}

/// Says that a worker has begun no turn for so many seconds.
pub(super) fn stalled(worker: usize, seconds: u64) -> String {
    format!(
        "worker {worker} has moved no packet and not looked for one for {}: does this host give it \
         a processor? If so, restart weftd and report this",
        go_seconds(seconds)
    )
}

/// Which entries of the store are not used: one in full.
fn unused(status: &Status) -> Option<String> {
    let example = status.store.unused_example.as_ref()?;
    let total: u64 = status.store.unused.values().sum();
    let others = match total.saturating_sub(1) {
        0 => String::new(),
        others if total >= REJECTED_MAX as u64 => {
            format!(", and at least {others} more (`weft log`)")
        }
        others => format!(", and {others} more (`weft log`)"),
    };
    Some(format!(
        "an entry of the store is no usable lease, or its part of one family is not, and nothing \
         is sent by it: {example}{others}; correct it, or delete it if no node has it, for one \
         that does ends. Of another network, it may be that of a node with a newer or an older \
         network configuration than this one: restart weftd where it is the older"
    ))
}

/// How many peers the kernel or a command did not take, and how many can't be used.
fn not_set_up(done: &BackendCounts, peers: usize, is_dual: bool) -> Option<String> {
    let missing = done.peers_failed + done.leases_unusable;
    let (families, who) = match is_dual {
        false => ("", "`weft peers` names them, and the log says why"),
        true => (", for IPv4, IPv6 or both", "`weft peers` names those of IPv4, and the log all"),
    };
    (missing > 0).then(|| {
        format!(
            "{missing} of {peers} peers are not set up{families}, and no packets go there, or what \
             weftd sets is removed again and again: {who}"
        )
    })
}

/// Which peers have another backend.
fn other_backend(peers: &[Peer]) -> Option<String> {
    let mut peers = peers.iter().filter(|peer| peer.state == PeerState::OtherBackend);
    let peer @ Peer { via, why, .. } = peers.next()?;
    let (subnet, others) = (peer.shown_subnet(), others(peers.count()));
    Some(format!("peer {subnet} at {via}{others}: {}", why.as_deref().unwrap_or_default()))
}

/// How many more peers the same is said of.
fn others(count: usize) -> String {
    match count {
        0 => String::new(),
        count => format!(", and {count} more peers (`weft peers`)"),
    }
}

/// Which peers can't be reached: the one that was heard longest ago in full. Those that no packets
/// go to are told of apart.
fn unreached(peers: &[Peer], strangers: &str) -> Option<(Cause, String)> {
    let in_use = |peer: &Peer| peer.in_use_seconds.unwrap_or(0);
    let unreached = peers.iter().filter_map(|peer| Some((peer.state.fault()?, peer)));
    let unreached = unreached.filter(|(_, peer)| peer.state.is_sent_to());
    // Of several the first in the order of the subnets.
    let (cause, first) = unreached
        .clone()
        .rev()
        .max_by_key(|(_, it)| it.heard_seconds_ago.unwrap_or_else(|| in_use(it)))?;
    let since = match first.heard_seconds_ago {
        Some(ago) => format!("last heard {} ago", go_seconds(ago)),
        None => format!("never heard, sent to for {}", go_seconds(in_use(first))),
    };
    let others = others(unreached.count() - 1);
    let Peer { via, state, why, .. } = first;
    let subnet = first.shown_subnet();
    let (state, why) = (state.name().to_uppercase(), why.as_deref().unwrap_or_default());
    let text = format!("peer {subnet} at {via} is {state}: {since}{others}: {why}{strangers}");
    Some((cause, text))
}

/// Packets that came from another address than a peer's, and were dropped: they may be those of a
/// peer that is missed.
fn strangers(status: &Status) -> String {
    let reason = DropReason::SourceNotPeerLease.id();
    let lately = status.drops_lately.as_ref().and_then(|drops| drops.get(reason));
    let guarded = status.guard.as_ref().map_or(0, |guard| guard.dropped_from_strangers);
    let dropped = match (guarded, lately) {
        (0, None) => return String::new(),
        (0, Some(lately)) => {
            let ago = go_seconds(lately.seconds_ago);
            format!("weftd dropped {} packets as {reason}, the last {ago} ago", lately.packets)
        }
        (packets, _) => format!("the guard dropped {packets} packets of strangers so far"),
    };
    format!(
        ". And {dropped}: does that peer send from the address of its lease, and is it translated \
         on the way?"
    )
}

fn go_seconds(seconds: u64) -> String {
    format_go_duration(Duration::from_secs(seconds))
}

/// `etcd is unavailable: connection refused, 21 tries in 4m12s`.
fn described(hindrance: &Hindrance, now_unix: u64) -> String {
    let Hindrance { text, since_unix, tries } = hindrance;
    match tries {
        1 => text.clone(),
        tries => {
            let age = go_seconds(now_unix.saturating_sub(*since_unix));
            format!("{text}, {tries} tries in {age}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use crate::status::{Guard, Lately, Rules, SubnetFile, Via, Worker};

    const NOW: u64 = 1_795_225_924;

    /// A node whose backend runs, and where all is well.
    fn running() -> Status {
        Status {
            ready: true,
            dataplane_is_up: Some(true),
            subnet_file: Some(SubnetFile { written: true, failures: 0 }),
            ..Status::default()
        }
    }

    /// What is wrong, and the sum of it.
    fn judged(status: &Status) -> (State, Vec<Cause>) {
        let faults = faults(status, NOW);
        (state(status, &faults), faults.iter().map(|fault| fault.cause).collect())
    }

    fn peer(last: u8, heard_seconds_ago: Option<u64>) -> Peer {
        let subnet = format!("10.5.{last}.0/24").parse().unwrap();
        let via = Via::Tunnel(format!("192.0.2.{last}:8285").parse().unwrap());
        let peer = Peer::new(subnet, None, via, PeerState::Silent);
        Peer { heard_seconds_ago, in_use_seconds: Some(90), ..peer }
    }

    #[test]
    fn the_peer_that_was_heard_longest_ago_is_named() {
        for (peers, named, others) in [
            (vec![peer(1, None)], "10.5.1.0/24 at 192.0.2.1:8285", None),
            (vec![peer(1, None), peer(2, Some(7200)), peer(3, Some(9))], "10.5.2.0/24", Some("2")),
            (vec![peer(1, Some(9)), peer(2, None), peer(3, None)], "10.5.2.0/24", Some("2")),
        ] {
            let (_, text) = unreached(&peers, "").unwrap();
            assert!(text.contains(named), "{text}");
            assert!(
                others.is_none_or(|count| text.contains(&format!("and {count} more"))),
                "{text}"
            );
        }
        assert_eq!(unreached(&[], ""), None);
        let status = Status { routes: vec![peer(1, None)], ..running() };
        assert_eq!(judged(&status), (State::Degraded, vec![Cause::PeerSilent]));
        for state in [PeerState::NotSetUp, PeerState::OtherBackend] {
            let peer = Peer { state, ..peer(1, None) };
            assert_eq!(unreached(&[peer], ""), None, "{state}: it is counted already");
        }
    }

    #[test]
    fn packets_of_strangers_are_told_with_a_peer_that_is_missed() {
        let of_strangers = Lately { packets: 7, seconds_ago: 0 };
        let reason = DropReason::SourceNotPeerLease.id().to_owned();
        let drops_lately = Some(BTreeMap::from([(reason.clone(), of_strangers)]));
        let status = Status { drops_lately, ..running() };
        let text = strangers(&status);
        assert!(text.contains("weftd dropped 7 ") && text.contains(&reason), "{text}");
        let guard = Some(Guard { dropped_from_strangers: 4, ..Guard::default() });
        let text = strangers(&Status { guard, ..status });
        assert!(text.contains("guard dropped 4 "), "{text}");
        assert_eq!(strangers(&running()), "");
    }

    #[test]
    fn one_unused_entry_is_named() {
        let mut status = running();
        status.store.unused_example = Some("\"10.6.1.0-24\": outside".to_owned());
        for (count, expected) in [(1, None), (3, Some("and 2 more")), (999_999, Some("at least"))] {
            status.store.unused = [("outside_network".to_owned(), count)].into();
            let text = unused(&status).unwrap();
            assert!(text.contains("\"10.6.1.0-24\": outside"), "{text}");
            assert_eq!(text.contains(expected.unwrap_or(" more")), expected.is_some(), "{text}");
        }
        assert_eq!(judged(&status), (State::Degraded, vec![Cause::EntryUnused]));
    }

    #[test]
    fn a_start_says_what_it_waits_for() {
        let start = Some(Start { step: "asking".to_owned(), hindrance: None });
        let mut status = Status { start, ..Status::default() };
        let [fault] = <[Fault; 1]>::try_from(faults(&status, NOW)).unwrap();
        assert_eq!((fault.cause, fault.text.as_str()), (Cause::Starting, "asking"));
        let text = "no subnet: refused".to_owned();
        let hindrance = Hindrance { text, since_unix: NOW - 252, tries: 21 };
        status.start.as_mut().unwrap().hindrance = Some(hindrance.clone());
        // What the store says of itself is in there.
        status.store.hindrance = Some(hindrance);
        assert_eq!(judged(&status), (State::NotReady, vec![Cause::StartHindered]));
        assert_eq!(faults(&status, NOW)[0].text, "no subnet: refused, 21 tries in 4m12s");
    }

    #[test]
    fn a_ready_node_is_degraded_by_what_needs_a_person() {
        type Wrong = (Cause, fn(&mut Status));
        let each: [Wrong; 15] = [
            (Cause::DataplaneHindered, |it| it.dataplane_wrong = Some("old address".to_owned())),
            (Cause::LinkFlaps, |it| {
                (it.interface, it.carrier_lost_lately) = (Some("eth0".to_owned()), 6);
            }),
            (Cause::WorkerStalled, |it| {
                it.workers = vec![Worker { stalled_seconds: Some(20), ..Worker::default() }];
            }),
            (Cause::DuplicatePublicIp, |it| {
                it.store.duplicate_public_ip = Some("host b".to_owned())
            }),
            (Cause::StoreAway, |it| it.store.hindrance = Some(Hindrance::default())),
            (Cause::StoreRefuses, |it| it.store.refused = Some("full".to_owned())),
            (Cause::SubnetRefused, |it| it.store.subnet_refused = true),
            (Cause::Cached, |it| it.stale_as_of_unix = Some(NOW)),
            (Cause::RestartNeeded, |it| it.restart_needed = true),
            (Cause::RulesNotInPlace, |it| {
                it.rules = Some(Rules {
                    kept: Kept { settled: true, ..Kept::default() },
                    ..Rules::default()
                });
            }),
            (Cause::GuardNotKept, |it| {
                let kept = Kept { settled: true, ..Kept::default() };
                it.guard = Some(Guard { kept, ..Guard::default() });
            }),
            (Cause::LeasesVanished, |it| it.peers_held = 3),
            (Cause::PeerNotSetUp, |it| backend(it).peers_failed = 2),
            (Cause::PeerOtherBackend, |it| {
                it.routes = vec![Peer { state: PeerState::OtherBackend, ..peer(1, None) }];
            }),
            (Cause::PeerNotSetUp, |it| backend(it).leases_unusable = 1),
        ];
        assert_eq!(judged(&running()), (State::Ready, vec![]));
        for (cause, wrong) in each {
            let mut status = running();
            wrong(&mut status);
            assert_eq!(judged(&status), (State::Degraded, vec![cause]));
        }
        let mut all = running();
        each.iter().for_each(|(_, wrong)| wrong(&mut all));
        let order: Vec<_> = each[..14].iter().map(|(cause, _)| *cause).collect();
        assert_eq!(judged(&all), (State::Degraded, order), "the worst comes first");
    }

    fn backend(status: &mut Status) -> &mut BackendCounts {
        status.backend.get_or_insert_default().done.get_or_insert_default()
    }

    #[test]
    fn what_keeps_a_node_from_being_ready_comes_first() {
        let mut status = Status { restart_needed: true, ready: false, ..running() };
        (status.dataplane_is_up, status.dataplane_wrong) = (Some(false), Some("gone".to_owned()));
        status.subnet_file = None;
        status.rules = Some(Rules::default());
        let causes =
            vec![Cause::DataplaneDown, Cause::SubnetFile, Cause::RulesNotSet, Cause::RestartNeeded];
        assert_eq!(judged(&status), (State::NotReady, causes));
        assert_eq!(faults(&status, NOW)[0].text, "gone");
    }

    #[test]
    fn an_outage_of_the_store_is_told_with_what_is_left() {
        let mut status = running();
        let text = "etcd: connection refused".to_owned();
        status.store.refused = Some(text.clone());
        status.store.hindrance = Some(Hindrance { text, since_unix: NOW - 60, tries: 7 });
        status.store.lease_expires_unix = Some(NOW + 7200);
        let [fault] = <[Fault; 1]>::try_from(faults(&status, NOW)).unwrap();
        assert_eq!(fault.cause, Cause::StoreAway, "it is said once");
        assert!(fault.text.contains("7 tries in 1m0s") && fault.text.ends_with("ends in 2h0m0s"));
    }
}
