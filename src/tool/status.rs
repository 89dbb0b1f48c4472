//! `weft status`: what is wrong, if anything is, and then what is running and what it counted.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::Duration;

use crate::control::clock::format_go_duration;
use crate::stats::DropReason;
use crate::status::{
    Backend, BackendCounts, Direction, FastPath, Guard, Kept, Lately, Lease, LeaseIpv4, LeaseIpv6,
    PeerState, Rules, SCHEMA, State, Status, Store, Verdict, Worker,
};
use crate::tool::peers;
use crate::tool::style::Style;

/// Reasons of drops that come with advice: the screen is for more than these.
const ADVICE_MAX: usize = 3;

/// A device that is made drops the kernel's own IPv6 announcements, some five: fewer than twice
/// that tell nothing.
const DEVICE_DROPS_MIN: u64 = 10;

/// Reasons of which a few are normal on a healthy host.
const NORMAL: [DropReason; 5] = [
    DropReason::Ipv6,
    DropReason::LinkLocal,
    DropReason::DestinationMulticast,
    DropReason::TtlExpired,
    DropReason::DontFragmentMtu,
];

/// The status for people: one screen, what is wrong first, counters last.
pub(super) fn render(status: &Status, now_unix: u64, style: Style) -> String {
    let mut out = render_verdict(&status.verdict, now_unix, style);
    let mut line = |name: &str, value: String| writeln!(out, "{name:<10} {value}").ok();
    let lines = [
        ("weftd", Some(render_version(status))),
        ("store", Some(render_store(&status.store))),
        ("lease", status.lease.as_ref().map(render_lease)),
        ("dataplane", status.dataplane.clone()),
        ("rules", status.rules.as_ref().map(render_rules)),
        ("guard", status.guard.as_ref().map(render_guard)),
        ("backend", status.backend.as_ref().and_then(render_backend)),
        ("devices", render_device_drops(status)),
        ("peers", Some(render_peers(status))),
        ("fast path", status.fast_path.as_ref().map(render_fast_path)),
        ("egress", status.egress.as_ref().map(render_direction)),
        ("ingress", status.ingress.as_ref().map(render_direction)),
        ("next", next(status).map(str::to_owned)),
    ];
    for (name, value) in lines {
        value.and_then(|value| line(name, value));
    }
    for (reason, Lately { packets, seconds_ago }) in notable_drops(status) {
        let (id, ago, advice) = (reason.id(), peers::ago(seconds_ago), reason.advice());
        line("look at", format!("{id}: {packets} in 10 minutes, the last {ago} ago: {advice}"));
    }
    // A single worker's counters are the totals above.
    for worker in status.workers.iter().filter(|_| status.workers.len() > 1) {
        line(&format!("worker {}", worker.index), render_worker(worker));
    }
    out
}

/// The first line: ready or not, for how long, and the worst of what is wrong; the rest below it.
fn render_verdict(verdict: &Verdict, now_unix: u64, style: Style) -> String {
    let (shown, ready_for) = match verdict.state {
        State::Ready => (style.good("ready"), ""),
        State::Degraded => (style.doubtful("DEGRADED"), "ready for "),
        State::NotReady => (style.bad("NOT READY"), ""),
    };
    let age = Duration::from_secs(now_unix.saturating_sub(verdict.since_unix));
    let mut lines = format!("{shown} {ready_for}{}", format_go_duration(age));
    let texts = verdict.texts();
    if !texts.is_empty() {
        write!(lines, ": {}", texts.join("\n           ")).ok();
    }
    lines + "\n"
}

/// What shows more than this.
fn next(status: &Status) -> Option<&'static str> {
    let is = |is_meant: fn(PeerState) -> bool| {
        status.peer_states.iter().any(|(state, count)| is_meant(*state) && *count > 0)
    };
    if is(PeerState::is_alarming) {
        Some("`weft check` here; if that finds no cause on this host, on the peer's host")
    } else if is(|state| state == PeerState::InGrace) {
        Some("a new peer has not answered yet: ask again in 15 s")
    } else {
        let has_echoes = status.lease.as_ref().is_none_or(|lease| lease.subnet.is_some());
        (status.verdict.state == State::Ready).then_some(match has_echoes {
            true => "if pods can't reach one of another host all the same: `weft ping` its address",
            false => "if pods can't reach one of another host all the same: `weft explain` both",
        })
    }
}

fn render_version(status: &Status) -> String {
    let Status { version, schema, .. } = status;
    match *schema {
        SCHEMA => version.clone(),
        _ => format!(
            "{version}, of another release than this tool (schema {schema}, not {SCHEMA}): what \
             only one of them knows is not shown"
        ),
    }
}

fn render_store(store: &Store) -> String {
    let mut text = format!("{}, {} failures", if store.up { "up" } else { "down" }, store.failures);
    if store.written_by_others > 0 {
        write!(text, ", our lease written by others {} times", store.written_by_others).ok();
    }
    if !store.rejected.is_empty() {
        let each = joined(store.rejected.iter().map(|(why, count)| format!("{why} {count}")));
        write!(text, ", entries ignored so far: {each}").ok();
    }
    text
}

fn render_lease(lease: &Lease) -> String {
    let ipv4 = lease.ipv4().map(|LeaseIpv4 { network, subnet, public_ip }| {
        format!("{subnet} of {network}, public address {public_ip}")
    });
    let ipv6 = lease.ipv6.map(|LeaseIpv6 { network, subnet, public_ip }| {
        let address = public_ip.map(|address| format!(", public address {address}"));
        format!("{subnet} of {network}{}", address.unwrap_or_default())
    });
    ipv4.into_iter().chain(ipv6).collect::<Vec<_>>().join("; ")
}

fn render_rules(rules: &Rules) -> String {
    let Rules { kept_by, kept: Kept { in_place, repairs, failures, .. } } = rules;
    let place = if *in_place { "in place" } else { "NOT in place: see the log" };
    format!("{kept_by}, {place}; {repairs} repairs, {failures} failures")
}

/// How many there are, and how they are.
fn render_peers(status: &Status) -> String {
    let mut text = status.peers.to_string();
    if !status.peer_states.is_empty() {
        let each = status.peer_states.iter();
        let each = each.map(|(state, count)| format!("{count} {}", peers::shown(*state)));
        write!(text, ": {} (`weft peers`)", joined(each)).ok();
    }
    if status.peers_held > 0 {
        let held = status.peers_held;
        write!(text, "; {held} in their grace period: their leases vanished from the store").ok();
    }
    if status.narrow_paths > 0 {
        let mtu_bytes = status.lease.as_ref().map_or(0, |lease| lease.mtu_bytes);
        let narrow = status.narrow_paths;
        write!(text, "; the paths to {narrow} take less than the MTU of {mtu_bytes}").ok();
    }
    text
}

/// What the guard of the tunnel's port lets in, and what it kept out.
fn render_guard(guard: &Guard) -> String {
    let place = if guard.kept.in_place { "in place" } else { "NOT kept: see the log" };
    let Guard { port, peers, dropped_from_strangers, dropped_from_pods, .. } = guard;
    let Some(port) = port else {
        let dropped = dropped_from_strangers + dropped_from_pods;
        return format!("against packets in the clear, {place}; dropped {dropped}");
    };
    format!(
        "UDP port {port} for {peers} peers, {place}; dropped {dropped_from_strangers} packets of \
         strangers, {dropped_from_pods} of pods"
    )
}

fn render_fast_path(fast_path: &FastPath) -> String {
    let FastPath { on, peers, reason, taken, .. } = fast_path;
    match on {
        true => format!(
            "on, for {} peers: {} packets out, {} in",
            peers.unwrap_or(0),
            taken.packets_sent,
            taken.packets_received,
        ),
        false => format!("off: {}", reason.as_deref().unwrap_or("-")),
    }
}

/// What the kernel dropped at the overlay's own devices; the external interface has other traffic.
fn render_device_drops(status: &Status) -> Option<String> {
    let own =
        status.device_drops.iter().filter(|(name, _)| Some(*name) != status.interface.as_ref());
    let each = own.flat_map(|(name, it)| [(name, it.egress, "out"), (name, it.ingress, "in")]);
    let many = each.filter(|(_, count, _)| *count >= DEVICE_DROPS_MIN);
    let texts = joined(many.map(|(name, count, way)| format!("{name} {count} on the way {way}")));
    (!texts.is_empty()).then(|| format!("dropped by the kernel: {texts}"))
}

/// A backend whose packets weftd never sees.
fn render_backend(backend: &Backend) -> Option<String> {
    let kind = backend.kind.map_or("-", |kind| kind.name());
    let counts = backend.done.as_ref()?;
    let BackendCounts { peers_programmed: done, peers_failed, failures, repairs, .. } = counts;
    let BackendCounts { leases_ignored: ignored, leases_unusable: unusable, .. } = counts;
    Some(format!(
        "{kind}: {done} peers set up, {peers_failed} not; {ignored} leases of other backends, \
         {unusable} unusable; {failures} failures, {repairs} repairs"
    ))
}

/// Reasons for which packets were dropped lately that a person may have to look at, the most
/// frequent first; an older weftd does not say when that was.
fn notable_drops(status: &Status) -> Vec<(DropReason, Lately)> {
    let of =
        |reason: &DropReason| Some((*reason, *status.drops_lately.as_ref()?.get(reason.id())?));
    let all = DropReason::ALL.iter().filter(|reason| !NORMAL.contains(reason));
    let mut all: Vec<_> = all.filter_map(of).collect();
    all.sort_by_key(|(reason, lately)| (Reverse(lately.packets), *reason));
    all.truncate(ADVICE_MAX);
    all
}

fn render_worker(worker: &Worker) -> String {
    let Worker { engine, processor, egress, ingress, .. } = worker;
    let place = processor.map(|processor| format!(" on processor {processor}"));
    format!(
        "{engine}{}: {} packets out, {} in, {} dropped",
        place.unwrap_or_default(),
        egress.packets_forwarded,
        ingress.packets_forwarded,
        egress.dropped_total() + ingress.dropped_total(),
    )
}

fn render_direction(counts: &Direction) -> String {
    let Direction { packets_forwarded, bytes_forwarded, writes, drops, .. } = counts;
    let dropped: String =
        drops.iter().map(|(reason, count)| format!(" {reason} {count}")).collect();
    let dropped = if drops.is_empty() { "nothing dropped" } else { &format!("dropped:{dropped}") };
    format!(
        "{packets_forwarded} packets, {bytes_forwarded} bytes forwarded in {writes} writes; \
         {dropped}"
    )
}

fn joined(each: impl Iterator<Item = String>) -> String {
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Cause;
    use crate::status::{DeviceDrops, Fault};

    const NOW: u64 = 1_795_225_924;

    fn rendered(status: &Status) -> String {
        render(status, NOW, Style::PLAIN)
    }

    /// The line of the screen that begins with `name`.
    fn line(status: &Status, name: &str) -> Option<String> {
        let screen = rendered(status);
        let mut lines = screen.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().map(|line| line.trim_start().to_owned())
    }

    #[test]
    fn the_first_line_is_a_verdict() {
        let first = |state, texts: &[&str]| {
            let fault = |text: &&str| Fault { cause: Cause::StoreAway, text: (*text).to_owned() };
            let faults = texts.iter().map(fault).collect();
            let since_unix = NOW - 252;
            let verdict = Verdict { state, since_unix, faults, causes: Vec::new() };
            rendered(&Status {
                schema: SCHEMA,
                version: "1".to_owned(),
                verdict,
                ..Status::default()
            })
        };
        assert!(first(State::Ready, &[]).starts_with("ready 4m12s\nweftd      1\n"));
        assert!(first(State::NotReady, &["why"]).starts_with("NOT READY 4m12s: why\nweftd"));
        let text = first(State::Degraded, &["one", "two"]);
        assert!(text.starts_with("DEGRADED "), "{text}");
        assert!(text.contains(" 4m12s: one\n           two\nweftd"), "{text}");
    }

    #[test]
    fn the_next_command_follows_the_state() {
        let next = |state, peer| {
            let verdict = Verdict { state, ..Verdict::default() };
            let peer_states = [(peer, 1)].into();
            line(&Status { verdict, peer_states, ..Status::default() }, "next").unwrap_or_default()
        };
        assert!(next(State::Ready, PeerState::Idle).contains("weft ping"));
        assert!(next(State::Degraded, PeerState::OneWay).contains("weft check"));
        assert!(next(State::Ready, PeerState::InGrace).contains("15 s"));
        assert_eq!(next(State::Degraded, PeerState::Ok), "", "what is wrong says where to look");
    }

    #[test]
    fn an_older_weftd_is_shown_as_far_as_it_goes() {
        let causes = vec!["why".to_owned()];
        let verdict = Verdict { causes, since_unix: NOW, ..Verdict::default() };
        let status = Status { schema: SCHEMA - 1, verdict, ..Status::default() };
        assert!(rendered(&status).starts_with("NOT READY 0s: why\n"));
        assert!(line(&status, "weftd").unwrap().contains("schema 1, not 2"));
    }

    #[test]
    fn drops_that_need_a_person_come_with_advice() {
        let drops = |each: &[(&str, u64)]| {
            let drops = each.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect();
            Some(Direction { drops, ..Direction::default() })
        };
        let status = Status {
            egress: drops(&[("ipv6", 90), ("no-route", 3), ("tx-eperm", 2)]),
            ingress: drops(&[("bad-checksum", 9), ("runt", 1)]),
            ..Status::default()
        };
        let lately = |packets| Lately { packets, seconds_ago: 130 };
        let each = [("no-route", 1), ("ipv6", 90), ("link-local", 7), ("bad-checksum", 9)];
        let each = each.map(|(reason, packets)| (reason.to_owned(), lately(packets)));
        let status = Status { drops_lately: Some(each.into()), ..status };
        let reasons: Vec<_> = notable_drops(&status).iter().map(|(reason, _)| *reason).collect();
        let no_route = DropReason::NoRoute;
        assert_eq!(reasons, [DropReason::BadChecksum, no_route]);
        let status =
            Status { drops_lately: Some([(no_route.id().to_owned(), lately(1))].into()), ..status };
        let advice = no_route.advice();
        let expected = format!("no-route: 1 in 10 minutes, the last 2m ago: {advice}");
        assert_eq!(line(&status, "look at"), Some(expected));
        assert!(
            line(&status, "egress").unwrap().ends_with("dropped: ipv6 90 no-route 3 tx-eperm 2")
        );
    }

    #[test]
    fn drops_of_own_devices_are_shown() {
        let status = |egress: u64| Status {
            interface: Some("eth0".to_owned()),
            device_drops: [
                ("eth0".to_owned(), DeviceDrops { egress: 0, ingress: 7 }),
                ("flannel0".to_owned(), DeviceDrops { egress, ingress: 0 }),
            ]
            .into(),
            ..Status::default()
        };
        let text = line(&status(30), "devices").unwrap();
        assert!(text.contains("flannel0 30 ") && !text.contains("eth0"), "{text}");
        assert_eq!(line(&status(5), "devices"), None, "announcements of a new device");
    }

    #[test]
    fn rules_and_guard_say_whether_they_are_in_place() {
        let kept = Kept { in_place: false, repairs: 2, failures: 3, ..Kept::default() };
        let rules = Rules { kept_by: "nftables".to_owned(), kept };
        let guard = Guard { port: Some(8285), peers: 2, kept, ..Guard::default() };
        let status = Status { rules: Some(rules), guard: Some(guard), ..Status::default() };
        let rules = line(&status, "rules").unwrap();
        assert!(rules.starts_with("nftables, NOT "), "{rules}");
        assert!(rules.ends_with("; 2 repairs, 3 failures"), "{rules}");
        assert!(line(&status, "guard").unwrap().starts_with("UDP port 8285 for 2 peers, NOT kept"));
        let none = Status::default();
        assert_eq!((line(&none, "rules"), line(&none, "guard")), (None, None));
    }

    #[test]
    fn foreign_writes_of_the_lease_are_shown() {
        let mut status = Status::default();
        assert!(!line(&status, "store").unwrap().contains("others"));
        status.store.written_by_others = 2;
        assert!(line(&status, "store").unwrap().contains("others 2 times"));
    }

    #[test]
    fn peers_are_summed_up() {
        let mut status = Status { peers: 141, ..Status::default() };
        status.peer_states =
            [(PeerState::Idle, 128), (PeerState::Ok, 12), (PeerState::Silent, 1)].into();
        let text = line(&status, "peers").unwrap();
        assert_eq!(text, "141: 12 ok, 128 idle, 1 SILENT (`weft peers`)");
        assert!(rendered(&status).lines().count() < 10, "the counters are off the screen");
        (status.peers_held, status.narrow_paths) = (7, 1);
        let text = line(&status, "peers").unwrap();
        assert!(text.contains("; 7 ") && text.contains(" 1 ") && text.contains("MTU"), "{text}");
    }

    #[test]
    fn the_fast_path_says_why_it_is_off() {
        let reason = Some("no CAP_BPF".to_owned());
        let fast_path = Some(FastPath { reason, ..FastPath::default() });
        let status = Status { fast_path, ..Status::default() };
        assert_eq!(line(&status, "fast path").as_deref(), Some("off: no CAP_BPF"));
        assert_eq!(line(&Status::default(), "fast path"), None);
    }

    #[test]
    fn several_workers_are_listed() {
        let worker = |index: usize| Worker {
            index,
            engine: "mmsg".to_owned(),
            processor: Some(index + 4),
            egress: Direction { packets_forwarded: 5, ..Direction::default() },
            ingress: Direction {
                packets_forwarded: 7,
                drops: [("runt".to_owned(), 2)].into(),
                ..Direction::default()
            },
            ..Worker::default()
        };
        let status = |workers| Status { workers, ..Status::default() };
        let both = status(vec![worker(0), worker(1)]);
        let text = line(&both, "worker 1").unwrap();
        for part in ["mmsg", "processor 5", "5 packets out", "7 in", "2 dropped"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert_eq!(line(&status(vec![worker(0)]), "worker"), None);
    }
}
