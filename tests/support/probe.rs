//! Pod traffic while something breaks: numbered datagrams each way between two pods, 1,000 a second
//! or, with `scripts/test --all`, 10,000, and twenty TCP flows that never stop talking. What got
//! lost is counted to the packet, and the kernel's counters tell whether weft lost it or a machine
//! too busy to run the test.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::flows::{FlowReport, Flows};
use super::lab::{Namespace, comes_true, wait_until};
use super::pace::by_effort;
use super::status::Status;
use super::traffic::{Numbered, kernel_counter, port, udp_socket};

/// Each way.
pub(crate) fn packets_per_second() -> u64 {
    by_effort(1_000, 10_000)
}

const FLOWS: usize = 20;

/// Datagrams still under way when the senders stop.
const DRAIN: Duration = Duration::from_secs(2);

/// One side of the traffic.
#[derive(Debug)]
pub(crate) struct End<'a> {
    pub(crate) host: &'a Namespace,
    pub(crate) pod: &'a Namespace,
    pub(crate) address: Ipv4Addr,
    /// Where the host's daemon has its status socket.
    pub(crate) dir: PathBuf,
}

/// Traffic that flows.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// From the first end to the second, and back.
    ways: [Numbered; 2],
    stop: AtomicBool,
}

/// What became of the traffic.
#[derive(Debug)]
pub(crate) struct Report {
    sent: [u64; 2],
    refused: [u64; 2],
    lost: [u64; 2],
    reordered: u64,
    longest_gap: Duration,
    flows: FlowReport,
    resets: u64,
    /// Where packets were dropped, by the kernel and by weft.
    drops: String,
}

impl Probe {
    /// Sends while `during` runs, and for a moment before and after.
    ///
    /// # Panics
    /// When the traffic does not flow in the first place.
    #[track_caller]
    pub(crate) fn run<T>(ends: &[End<'_>; 2], during: impl FnOnce(&Self) -> T) -> (T, Report) {
        let [near, far] = ends;
        // Each hop asks for its neighbour before the first packet, which takes its time.
        wait_until(Duration::from_secs(10), "the pods reach each other", || {
            near.pod.succeeds(&["ping", "-q", "-c1", "-W0.3", &far.address.to_string()])
        });
        let sockets = ends.each_ref().map(|end| udp_socket(end.pod, end.address));
        let targets =
            [1, 0].map(|to: usize| SocketAddr::from((ends[to].address, port(&sockets[to]))));
        let flows = Flows::open(near.pod, far.pod, far.address, FLOWS);
        let before = Drops::of(ends);
        let resets_before = resets(ends);
        let probe = Self::default();
        let (outcome, flows) = thread::scope(|scope| {
            // Also when `during` panics: a scope waits for its threads.
            let stop = StopOnDrop(&probe);
            let senders = [0, 1].map(|way: usize| {
                let (numbered, sockets) = (&probe.ways[way], &sockets);
                scope.spawn(move || numbered.receive(&sockets[1 - way]));
                scope.spawn(move || {
                    numbered.send(&sockets[way], targets[way], packets_per_second());
                })
            });
            let flows = scope.spawn(|| flows.talk(&probe.stop));
            probe.wait_for_more();
            let outcome = during(&probe);
            probe.wait_for_more();
            probe.stop_sending();
            // What is sent after nothing was missing for a moment would count as lost.
            for sender in senders {
                sender.join().expect("a sender sends to the end");
            }
            comes_true(DRAIN, || probe.lost() == 0);
            drop(stop);
            (outcome, flows.join().expect("the flows are counted to the end"))
        });
        let count = |of: fn(&Numbered) -> u64| probe.ways.each_ref().map(of);
        let report = Report {
            sent: count(|way| way.sent.load(Ordering::Relaxed)),
            refused: count(|way| way.refused.load(Ordering::Relaxed)),
            lost: count(Numbered::missing),
            reordered: count(|way| way.reordered.load(Ordering::Relaxed)).iter().sum(),
            longest_gap: Duration::from_nanos(
                count(|way| way.longest_gap_ns.load(Ordering::Relaxed))
                    .into_iter()
                    .max()
                    .unwrap_or(0),
            ),
            flows,
            resets: resets(ends) - resets_before,
            drops: Drops::of(ends).since(&before),
        };
        (outcome, report)
    }

    /// Datagrams that are lost or under way.
    pub(crate) fn lost(&self) -> u64 {
        self.ways.iter().map(Numbered::missing).sum()
    }

    /// Waits for half a second of traffic.
    #[track_caller]
    fn wait_for_more(&self) {
        let arrived = || self.ways.each_ref().map(|way| way.received.load(Ordering::Relaxed));
        let before = arrived();
        wait_until(Duration::from_secs(5), "traffic flows both ways", || {
            arrived()
                .iter()
                .zip(before)
                .all(|(now, before)| *now > before + packets_per_second() / 2)
        });
    }

    fn stop_sending(&self) {
        for way in &self.ways {
            way.stop.store(true, Ordering::Relaxed);
        }
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct StopOnDrop<'a>(&'a Probe);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop_sending();
        for way in &self.0.ways {
            way.drained.store(true, Ordering::Relaxed);
        }
    }
}

impl Report {
    /// Checks that the pods noticed nothing.
    ///
    /// # Panics
    /// When a datagram is missing or a flow was reset; the message says what dropped how many.
    #[track_caller]
    pub(crate) fn assert_nothing_lost(&self, fault: &str) {
        assert!(!self.lost_datagrams(), "{fault} loses packets of pods: {self}");
        assert!(!self.broke_flows(), "{fault} breaks TCP flows of pods: {self}");
    }

    pub(crate) fn lost_datagrams(&self) -> bool {
        self.lost != [0, 0]
    }

    pub(crate) fn broke_flows(&self) -> bool {
        self.resets > 0 || !self.flows.broken.is_empty() || self.flows.open != FLOWS
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { sent, refused, lost, reordered, longest_gap, flows, resets, drops } = self;
        write!(
            f,
            "lost {lost:?} of {sent:?} datagrams ({refused:?} refused at once), {reordered} \
             reordered, longest gap {longest_gap:.1?}; {resets} resets, {flows}; drops: {drops}"
        )
    }
}

fn resets(ends: &[End<'_>; 2]) -> u64 {
    let of = |end: &End<'_>| {
        ["EstabResets", "OutRsts"]
            .map(|name| kernel_counter(end.pod, "Tcp", name))
            .iter()
            .sum::<u64>()
    };
    ends.iter().map(of).sum()
}

/// What else the kernel's IP and UDP drop, by group and name in procfs.
const QUIET_DROPS: [(&str, &str); 11] = [
    ("Ip", "InHdrErrors"),
    ("Ip", "InAddrErrors"),
    ("Ip", "InDiscards"),
    ("Ip", "OutDiscards"),
    ("Ip", "OutNoRoutes"),
    ("Udp", "InErrors"),
    ("Udp", "NoPorts"),
    ("Udp", "SndbufErrors"),
    ("Udp", "InCsumErrors"),
    ("Udp", "MemErrors"),
    ("IpExt", "InNoRoutes"),
];

/// Everything that counts dropped packets on the way, by name, and how many came through weft.
struct Drops(Vec<(String, u64)>);

impl Drops {
    fn of(ends: &[End<'_>; 2]) -> Self {
        let mut all = vec![
            ("the kernel's backlog, a busy machine".to_owned(), backlog_drops()),
            ("waiting for a neighbour's address".to_owned(), neighbour_drops()),
        ];
        for (number, end) in ends.iter().enumerate() {
            for (place, namespace) in [("pod", end.pod), ("host", end.host)] {
                let full = kernel_counter(namespace, "Udp", "RcvbufErrors");
                all.push((format!("full socket in {place} {number}, a busy machine"), full));
                for (group, name) in QUIET_DROPS {
                    let count = kernel_counter(namespace, group, name);
                    all.push((format!("{group}{name} of {place} {number}"), count));
                }
                for (device, dropped) in device_drops(namespace) {
                    all.push((format!("{device} of {place} {number}, its queue"), dropped));
                }
            }
            // A daemon that is gone has no counters, and the packets are missed all the same.
            let Some(status) = Status::try_of(&end.dir) else { continue };
            // Nor has one whose packets the kernel carries.
            if !status.0["egress"].is_object() {
                continue;
            }
            for direction in ["egress", "ingress"] {
                // No loss, but where the sums part the packets went.
                for counter in ["packets_received", "packets_forwarded"] {
                    let count = status.count(direction, counter);
                    all.push((format!("weft {number}, {direction} {counter}"), count));
                }
                let reasons = status.0[direction]["drops"].as_object().cloned();
                for (reason, count) in reasons.unwrap_or_default() {
                    let name = format!("weft {number}, {direction}: {reason}");
                    all.push((name, count.as_u64().unwrap_or(0)));
                }
            }
        }
        Self(all)
    }

    /// What was dropped after `before`.
    fn since(&self, before: &Self) -> String {
        let mut text = String::new();
        for (name, count) in &self.0 {
            let old = before.0.iter().find(|(other, _)| other == name).map_or(0, |(_, old)| *old);
            if *count > old {
                write!(text, "{} ({name}) ", count - old).ok();
            }
        }
        if text.is_empty() { "none".to_owned() } else { text }
    }
}

/// Packets that never got to a protocol, for lack of room in a processor's queue.
fn backlog_drops() -> u64 {
    let text = std::fs::read_to_string("/proc/net/softnet_stat").expect("procfs is mounted");
    let dropped = text.lines().filter_map(|line| line.split_whitespace().nth(1));
    dropped.filter_map(|count| u64::from_str_radix(count, 16).ok()).sum()
}

/// Packets that waited for the link-layer address of a neighbour until there was no room.
fn neighbour_drops() -> u64 {
    let text = std::fs::read_to_string("/proc/net/stat/arp_cache").expect("procfs is mounted");
    let mut lines = text.lines().map(str::split_whitespace);
    let place = lines.next().and_then(|mut names| names.position(|n| n == "unresolved_discards"));
    let Some(place) = place else { return 0 };
    lines.filter_map(|mut counts| u64::from_str_radix(counts.nth(place)?, 16).ok()).sum()
}

/// Packets that a device dropped, either way.
fn device_drops(namespace: &Namespace) -> Vec<(String, u64)> {
    let text = namespace.enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"));
    let text = text.expect("procfs is mounted");
    let device = |line: &str| {
        let (name, counts) = line.split_once(':')?;
        let counts: Vec<u64> = counts.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        Some((name.trim().to_owned(), counts.get(3)? + counts.get(11)?))
    };
    text.lines().filter_map(device).collect()
}
