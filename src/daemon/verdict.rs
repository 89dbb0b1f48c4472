//! What an operator has to know first: whether this node is ready, since when, and what is wrong.
//! Pure: facts in, sentences out.

use std::time::Duration;

use crate::backend::status::PlaneState;
use crate::control::clock::{format_go_duration, format_rfc3339};
use crate::control::snapshot::REJECTED_MAX;
use crate::control::status::{ControlState, Hindrance, Unused};
use crate::daemon::peer_rows::SilentPeer;
use crate::netfilter::guard_keeper::GuardState;
use crate::netfilter::reconciler::RuleState;

/// What is known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) is_ready: bool,
    /// Since when it has been that, in seconds since 1970.
    pub(super) since_unix: u64,
    pub(super) control: &'a ControlState,
    /// Nothing before the backend runs.
    pub(super) plane: Option<&'a PlaneState>,
    pub(super) is_subnet_file_written: bool,
    /// Nothing if none are kept.
    pub(super) rules: Option<RuleState>,
    /// The same for the guard of the tunnel's port.
    pub(super) guard: Option<GuardState>,
    /// Those heard longest ago first.
    pub(super) silent: &'a [SilentPeer],
    /// A worker that hangs.
    pub(super) stalled: Option<&'a str>,
    pub(super) now_unix: u64,
}

/// The sum of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) state: State,
    /// Since when the node has been ready, or not.
    pub(super) since_unix: u64,
    /// What is wrong, the worst first: causes of not being ready, or what degrades a ready node.
    pub(super) causes: Vec<String>,
}

/// Whether pods can use the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// They can.
    Ready,
    /// They can, but something needs a person.
    Degraded,
    /// They can't, or not all.
    NotReady,
}

impl State {
    /// As the status spells it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Degraded => "degraded",
            Self::NotReady => "not-ready",
        }
    }
}

impl Verdict {
    pub(super) fn of(facts: Facts<'_>) -> Self {
        let degrading = degrading(facts);
        let (state, causes) = if !facts.is_ready {
            (State::NotReady, [missing(facts), degrading].concat())
        } else if degrading.is_empty() {
            (State::Ready, degrading)
        } else {
            (State::Degraded, degrading)
        };
        Self { state, since_unix: facts.since_unix, causes }
    }
}

/// What keeps the node from being ready.
fn missing(facts: Facts<'_>) -> Vec<String> {
    let Facts { control, now_unix, .. } = facts;
    let Some(plane) = facts.plane else {
        let step = control.start_step.unwrap_or("starting");
        return vec![
            control
                .start_hindrance
                .as_ref()
                .map_or_else(|| step.to_owned(), |hindrance| described(hindrance, now_unix)),
        ];
    };
    let mut missing = Vec::new();
    if !plane.is_up {
        let why = plane.wrong.clone();
        missing.push(why.unwrap_or_else(|| "the backend is being set up".to_owned()));
    }
    if !facts.is_subnet_file_written {
        missing.push("the subnet file can't be written: the log says why".to_owned());
    }
    if facts.rules.is_some_and(|rules| !rules.is_settled) {
        missing.push("the firewall's rules are not set yet: the log says why".to_owned());
    }
    missing
}

/// What a person has to look at though packets flow.
fn degrading(facts: Facts<'_>) -> Vec<String> {
    let Facts { control, now_unix, .. } = facts;
    let mut causes = Vec::new();
    // Before that, it is what keeps the node from being ready.
    if facts.plane.is_none() {
        return causes;
    }
    causes.extend(facts.plane.filter(|plane| plane.is_up).and_then(|plane| plane.wrong.clone()));
    causes.extend(facts.stalled.map(str::to_owned));
    if let Some(holder) = &control.duplicate_public_ip {
        causes.push(format!("this node's PublicIP belongs to {holder}: find that host"));
    }
    if let Some(hindrance) = &control.store_hindrance {
        let ends = control.lease_expires_unix.map(|ends| {
            let left = Duration::from_secs(ends.saturating_sub(now_unix));
            format!(", and this node's lease ends in {}", format_go_duration(left))
        });
        causes.push(format!(
            "{}; packets flow to the peers known so far{}",
            described(hindrance, now_unix),
            ends.unwrap_or_default(),
        ));
    }
    let said = control.store_hindrance.as_ref().map(|hindrance| &hindrance.text);
    causes.extend(control.refused().filter(|why| said != Some(why)));
    if control.subnet_is_refused {
        let other = control.refused_subnet.map(|subnet| subnet.to_string());
        let other = other.unwrap_or_else(|| "a subnet that can't be used".to_owned());
        causes.push(format!("the cluster assigned {other} to this node: the log says what to do"));
    }
    if let Some(as_of) = control.cached_as_of_unix {
        let time = format_rfc3339(as_of);
        causes.push(format!("lease and peers are from the cache of {time}, not confirmed yet"));
    }
    if control.restart_needed {
        causes.push(
            "the store has another network configuration: restart weftd, then this host's pods"
                .to_owned(),
        );
    }
    if facts.rules.is_some_and(|rules| rules.is_settled && !rules.is_in_place) {
        causes.push("the firewall's rules are not in place: the log says why".to_owned());
    }
    let guard = facts.guard.map(|guard| guard.rules);
    if guard.is_some_and(|rules| rules.is_settled && !rules.is_in_place) {
        causes.push(
            "the guard of the tunnel's port can't be kept, and new peers may not be heard: the log \
             says why"
                .to_owned(),
        );
    }
    if control.held_peers > 0 {
        causes.push(format!(
            "the leases of {} peers vanished from the store together: restore its data",
            control.held_peers
        ));
    }
    causes.extend(unused(control.unused()));
    causes.extend(silence(facts.silent, facts.guard));
    causes
}

/// A worker that has begun no turn for so long.
pub(super) fn stalled(worker: usize, age: Duration) -> String {
    format!(
        "worker {worker} has moved no packet and not looked for one for {}: does this host give it \
         a processor? If so, restart weftd and report this",
        format_go_duration(whole_seconds(age))
    )
}

/// Which entries of the store are not used: one in full.
fn unused(unused: &Unused) -> Option<String> {
    let example = unused.example.as_ref()?;
    let others = match unused.total() - 1 {
        0 => String::new(),
        others if unused.total() >= REJECTED_MAX as u64 => {
            format!(", and at least {others} more (`weft log`)")
        }
        others => format!(", and {others} more (`weft log`)"),
    };
    Some(format!(
        "an entry of the store is no usable lease, and nothing is sent to its node: \
         {example}{others}; correct or delete it"
    ))
}

/// Which peers are silent: the first in full.
fn silence(silent: &[SilentPeer], guard: Option<GuardState>) -> Option<String> {
    let first = silent.first()?;
    let SilentPeer { subnet, via, heard, in_use } = first;
    let since = match heard {
        Some(ago) => format!("not heard for {}", format_go_duration(whole_seconds(*ago))),
        None => format!("never heard, sent to for {}", format_go_duration(whole_seconds(*in_use))),
    };
    let others = match silent.len() - 1 {
        0 => String::new(),
        others => format!(", and {others} more peers (`weft peers`)"),
    };
    let kept_out = match guard.map_or(0, |guard| guard.dropped.from_strangers) {
        0 => String::new(),
        packets => format!(
            " And the guard dropped {packets} packets of strangers: does that peer send from the \
             address of its lease?"
        ),
    };
    Some(format!(
        "peer {subnet} at {via} is SILENT: {since}{others}: is weftd or flanneld running there, \
         and does every firewall on the way let UDP through to this port?{kept_out}"
    ))
}

fn whole_seconds(duration: Duration) -> Duration {
    Duration::from_secs(duration.as_secs())
}

/// `etcd is unavailable: connection refused, 21 tries in 4m12s`.
fn described(hindrance: &Hindrance, now_unix: u64) -> String {
    let Hindrance { text, since_unix, tries } = hindrance;
    let age = Duration::from_secs(now_unix.saturating_sub(*since_unix));
    match tries {
        1 => text.clone(),
        tries => format!("{text}, {tries} tries in {}", format_go_duration(age)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::rejected::{RejectReason, Rejected};
    use crate::netfilter::guard::Dropped;
    use crate::route::Prefix;

    const NOW: u64 = 1_795_225_924;

    fn verdict(is_ready: bool, control: &ControlState, plane: Option<&PlaneState>) -> Verdict {
        Verdict::of(Facts {
            is_ready,
            since_unix: NOW - 252,
            control,
            plane,
            is_subnet_file_written: true,
            rules: None,
            guard: None,
            silent: &[],
            stalled: None,
            now_unix: NOW,
        })
    }

    #[test]
    fn silent_peers_degrade_a_node() {
        let peer = |last: u8, heard: Option<u64>| SilentPeer {
            subnet: Prefix::new([10, 5, last, 0].into(), 24).unwrap(),
            via: format!("192.0.2.{last}:8285"),
            heard: heard.map(Duration::from_secs),
            in_use: Duration::from_millis(90_400),
        };
        let one = silence(&[peer(1, None)], None).unwrap();
        assert!(
            one.starts_with(
                "peer 10.5.1.0/24 at 192.0.2.1:8285 is SILENT: never heard, sent to for 1m30s: is"
            ),
            "{one}"
        );
        let all = [peer(2, Some(7200)), peer(1, None), peer(3, Some(9))];
        let many = silence(&all, Some(GuardState::default())).unwrap();
        assert!(many.contains("not heard for 2h0m0s, and 2 more peers (`weft peers`):"), "{many}");
        assert!(many.ends_with("to this port?"), "{many}");
        let dropped = Dropped { from_strangers: 4, from_pods: 1 };
        let kept_out =
            silence(&all, Some(GuardState { dropped, ..GuardState::default() })).unwrap();
        assert!(kept_out.contains("the guard dropped 4 packets of strangers"), "{kept_out}");
        assert_eq!(silence(&[], None), None);
    }

    #[test]
    fn one_unused_entry_is_named() {
        let entry = |key: &str| Rejected {
            key: key.to_owned(),
            reason: RejectReason::OutsideNetwork,
            detail: "10.6.1.0/24 lies outside the network 10.5.0.0/16".to_owned(),
            revision: 1,
        };
        let text = unused(&Unused::of(&[entry("10.6.1.0-24")])).unwrap();
        let wrong = "\"10.6.1.0-24\": 10.6.1.0/24 lies outside the network 10.5.0.0/16";
        assert!(text.ends_with(&format!("its node: {wrong}; correct or delete it")), "{text}");
        let text = unused(&Unused::of(&[entry("a"), entry("b"), entry("c")])).unwrap();
        assert!(text.contains("and 2 more (`weft log`);"), "{text}");
        assert_eq!(unused(&Unused::of(&[])), None);
    }

    fn plane() -> PlaneState {
        PlaneState {
            is_up: true,
            wrong: None,
            description: String::new(),
            device: None,
            interface: "eth0".to_owned(),
            mtu_bytes: 1472,
            public_address: std::net::Ipv4Addr::LOCALHOST,
            tunnel: None,
            workers: Vec::new(),
        }
    }

    fn hindrance(text: &str, seconds: u64, tries: u64) -> Option<Hindrance> {
        Some(Hindrance { text: text.to_owned(), since_unix: NOW - seconds, tries })
    }

    #[test]
    fn a_start_says_what_it_waits_for() {
        let mut control = ControlState::default();
        assert_eq!(verdict(false, &control, None).causes, ["starting"]);
        control.start_step = Some("asking the store for a subnet");
        assert_eq!(verdict(false, &control, None).causes, ["asking the store for a subnet"]);
        control.start_hindrance = hindrance("no subnet: etcd: connection refused", 252, 21);
        // What the store says of itself is in there.
        control.store_hindrance = hindrance("etcd: connection refused", 252, 21);
        let expected = Verdict {
            state: State::NotReady,
            since_unix: NOW - 252,
            causes: vec!["no subnet: etcd: connection refused, 21 tries in 4m12s".to_owned()],
        };
        assert_eq!(verdict(false, &control, None), expected);
    }

    #[test]
    fn a_ready_node_is_degraded_by_what_needs_a_person() {
        let (mut control, plane) = (ControlState::default(), plane());
        let ready = verdict(true, &control, Some(&plane));
        assert_eq!((ready.state, ready.causes), (State::Ready, vec![]));
        control.held_peers = 3;
        control.store_hindrance = hindrance("etcd: connection refused", 60, 7);
        control.lease_expires_unix = Some(NOW + 7200);
        let degraded = verdict(true, &control, Some(&plane));
        assert_eq!(degraded.state, State::Degraded);
        assert_eq!(
            degraded.causes,
            [
                "etcd: connection refused, 7 tries in 1m0s; packets flow to the peers known so \
                 far, and this node's lease ends in 2h0m0s",
                "the leases of 3 peers vanished from the store together: restore its data",
            ]
        );
    }

    #[test]
    fn a_broken_plane_comes_before_what_degrades() {
        let (mut control, mut plane) = (ControlState::default(), plane());
        control.restart_needed = true;
        (plane.is_up, plane.wrong) = (false, Some("flannel0 is gone".to_owned()));
        let verdict = verdict(false, &control, Some(&plane));
        assert_eq!((verdict.state, verdict.causes.len()), (State::NotReady, 2));
        assert_eq!(verdict.causes[0], "flannel0 is gone");
        (plane.is_up, plane.wrong) = (true, Some("the tunnel stays at 192.0.2.1".to_owned()));
        let verdict = self::verdict(true, &ControlState::default(), Some(&plane));
        assert_eq!(verdict.state, State::Degraded);
        assert_eq!(verdict.causes, ["the tunnel stays at 192.0.2.1"]);
    }
}
