//! Pours evil packets into a running weftd, from a stranger, from a peer and from a pod, with
//! honest flows beside them, and checks its counters. `scripts/evil` makes the lab.
//!
//! Owns the command line, the threads and the verdict; the result is JSON on stdout.

mod honest;
mod packets;
mod pour;
mod queues;
#[path = "../../fuzz/bodies/slow_twin.rs"]
mod slow_twin;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use weft::daemon::status::fetch_unix;

use crate::honest::{Flow, Pod};
use crate::pour::Shared;
use crate::queues::Queues;

const USAGE: &str = "\
usage: evil --lab NAME --status SOCKET --packets N [--seed S]
Sends to the weftd whose status is at SOCKET, in the lab NAME of scripts/evil, until it has
received N packets. Prints what was received and what became of it as JSON; fails when the counts
do not add up. An honest datagram counts when no queue of the kernel has lost a packet lately:
what is lost then, weftd has lost.
";

/// Between two looks at the counters.
const LOOK: Duration = Duration::from_millis(250);

/// Between two lines of progress.
const TELL: Duration = Duration::from_secs(10);

/// How long a queue that lost packets excuses lost datagrams: the next one shows the gap, and may
/// have waited as long itself.
const EXCUSED: Duration = Duration::from_secs(1);

/// A daemon that takes in nothing for so long has ended, whatever it says.
const STUCK: Duration = Duration::from_secs(60);

/// For queues to run empty, and looks at counters that stay the same before they count.
const REST: Duration = Duration::from_secs(30);
const SAME_LOOKS: u32 = 4;

struct Options {
    lab: String,
    status: PathBuf,
    packets: u64,
    seed: u64,
}

impl Options {
    fn from_args() -> Result<Option<Self>> {
        let (mut lab, mut status, mut packets) = (None, None, None);
        let mut seed = u64::from(std::process::id());
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--lab" => lab = Some(value()?),
                "--status" => status = Some(PathBuf::from(value()?)),
                "--packets" => packets = Some(value()?.parse().context("--packets is a number")?),
                "--seed" => seed = value()?.parse().context("--seed is a number")?,
                "--help" | "-h" => return Ok(None),
                _ => bail!("unknown argument {argument}; see --help"),
            }
        }
        let (Some(lab), Some(status), Some(packets)) = (lab, status, packets) else {
            bail!("--lab, --status and --packets are needed; see --help")
        };
        Ok(Some(Self { lab, status, packets, seed }))
    }

    fn namespace(&self, name: &str) -> PathBuf {
        Path::new("/run/netns").join(format!("{}-{name}", self.lab))
    }
}

/// A line for people.
pub(crate) fn say(text: &str) {
    writeln!(std::io::stderr(), "evil: {text}").ok();
}

fn main() -> Result<()> {
    let Some(options) = Options::from_args()? else {
        return Ok(std::io::stdout().write_all(USAGE.as_bytes())?);
    };
    say(&format!("seed {}", options.seed));
    let before = Counts::read(&options.status)?;
    let started = Instant::now();
    let shared = Shared::default();
    let flows = [Flow::default(), Flow::default()];
    let outcome = thread::scope(|scope| {
        let near = Pod { namespace: options.namespace("p1"), address: [10, 5, 1, 2].into() };
        let far = Pod { namespace: options.namespace("p2"), address: [10, 5, 2, 2].into() };
        honest::start(scope, &flows[0], near.clone(), far.clone());
        honest::start(scope, &flows[1], far, near);
        let (shared, options) = (&shared, &options);
        let network = scope.spawn(move || {
            let (host, far) = (options.namespace("h1"), options.namespace("h2"));
            pour::from_network(shared, &host, &far, options.seed)
        });
        let pod =
            scope.spawn(move || pour::from_pod(shared, &options.namespace("h1"), options.seed));
        let watched =
            watch(options, &before, &flows, || network.is_finished() || pod.is_finished());
        shared.stop.store(true, Ordering::Relaxed);
        flows.iter().for_each(Flow::end);
        let poured = [network.join(), pod.join()];
        let counted = watched?;
        for result in poured {
            let Ok(ended) = result else { bail!("a sender panicked") };
            ended?;
        }
        Ok::<_, anyhow::Error>(counted)
    });
    let counted = outcome?;
    let seconds = started.elapsed().as_secs_f64();
    let after = Counts::at_rest(&options.status)?;
    let result = json!({
        "seed": options.seed,
        "seconds": seconds,
        "sent": {
            "network": shared.sent_from_network.load(Ordering::Relaxed),
            "pod": shared.sent_from_pod.load(Ordering::Relaxed),
        },
        "ingress": after.since(&before, "ingress"),
        "egress": after.since(&before, "egress"),
        "queues_lost": counted.queues_lost,
        "counted": { "sent": counted.sent, "lost": counted.lost },
        "honest": flows.each_ref().map(|flow| json!({
            "sent": flow.sent.load(Ordering::Relaxed),
            "arrived": flow.arrived.load(Ordering::Relaxed),
        })),
    });
    writeln!(std::io::stdout(), "{result:#}")?;
    ensure!(after.is_conserved(), "received is not forwarded + dropped");
    Ok(())
}

/// Waits until the daemon has received what was asked for.
fn watch(
    options: &Options,
    before: &Counts,
    flows: &[Flow],
    ended: impl Fn() -> bool,
) -> Result<Counted> {
    let mut queues = Queues::open(&["h1", "h2", "p1", "p2"].map(|name| options.namespace(name)))?;
    let mut losses = LossCount::new(queues.lost()?);
    let started = Instant::now();
    let (mut told, mut moved, mut last) = (started, started, 0);
    loop {
        thread::sleep(LOOK);
        // First what was lost, then what may excuse it.
        let (sent, lost) = (sum(flows, |flow| &flow.sent), sum(flows, |flow| &flow.lost));
        losses.look(sent, lost, queues.lost()?);
        let now = Counts::read(&options.status)?;
        let received = now.received() - before.received();
        if received >= options.packets || ended() {
            return Ok(losses.counted);
        }
        if received > last {
            (moved, last) = (Instant::now(), received);
        }
        ensure!(moved.elapsed() < STUCK, "weftd has received nothing for {STUCK:?}");
        if told.elapsed() > TELL {
            told = Instant::now();
            let rate = received as f64 / started.elapsed().as_secs_f64() / 1e6;
            say(&format!("{received} packets received, {rate:.2} million a second"));
        }
    }
}

fn sum(flows: &[Flow], count: impl Fn(&Flow) -> &AtomicU64) -> u64 {
    flows.iter().map(|flow| count(flow).load(Ordering::Relaxed)).sum()
}

/// Honest datagrams of the times in which no queue of the kernel had lost packets.
#[derive(Debug, Default)]
struct Counted {
    sent: u64,
    lost: u64,
    /// By the kernel's queues, of any flow.
    queues_lost: u64,
}

/// Tells what weftd has lost from what the kernel's queues have.
struct LossCount {
    counted: Counted,
    sent: u64,
    lost: u64,
    queues_lost: u64,
    excused_until: Instant,
}

impl LossCount {
    fn new(queues_lost: u64) -> Self {
        let counted = Counted::default();
        Self { counted, sent: 0, lost: 0, queues_lost, excused_until: Instant::now() }
    }

    /// Takes in the counts so far.
    fn look(&mut self, sent: u64, lost: u64, queues_lost: u64) {
        let now = Instant::now();
        if queues_lost > self.queues_lost {
            self.counted.queues_lost += queues_lost - self.queues_lost;
            self.excused_until = now + EXCUSED;
        }
        if now >= self.excused_until {
            self.counted.sent += sent - self.sent;
            self.counted.lost += lost - self.lost;
        }
        (self.sent, self.lost, self.queues_lost) = (sent, lost, queues_lost);
    }
}

/// One reading of the daemon's counters.
struct Counts(Value);

impl Counts {
    fn read(socket: &Path) -> Result<Self> {
        let bytes =
            fetch_unix(socket, "/status").context("weftd does not answer with its status")?;
        Ok(Self(serde_json::from_slice(&bytes).context("the status is no JSON")?))
    }

    /// Once nothing moves any more.
    fn at_rest(socket: &Path) -> Result<Self> {
        let deadline = Instant::now() + REST;
        let (mut same, mut last) = (0, Self::read(socket)?);
        while same < SAME_LOOKS && Instant::now() < deadline {
            thread::sleep(LOOK);
            let now = Self::read(socket)?;
            same =
                if now.received() == last.received() && now.is_conserved() { same + 1 } else { 0 };
            last = now;
        }
        Ok(last)
    }

    fn count(&self, way: &str, name: &str) -> u64 {
        self.0[way][name].as_u64().unwrap_or(0)
    }

    fn received(&self) -> u64 {
        self.count("ingress", "packets_received") + self.count("egress", "packets_received")
    }

    fn dropped(&self, way: &str) -> u64 {
        let drops = self.0[way]["drops"].as_object();
        drops.map_or(0, |drops| drops.values().filter_map(Value::as_u64).sum())
    }

    fn is_conserved(&self) -> bool {
        ["ingress", "egress"].iter().all(|way| {
            self.count(way, "packets_received")
                == self.count(way, "packets_forwarded") + self.dropped(way)
        })
    }

    /// What a direction did since `before`.
    fn since(&self, before: &Self, way: &str) -> Value {
        let count = |name: &str| self.count(way, name) - before.count(way, name);
        let drops = self.0[way]["drops"].as_object().into_iter().flatten();
        let drops: serde_json::Map<String, Value> = drops
            .map(|(reason, count)| {
                let old = before.0[way]["drops"][reason].as_u64().unwrap_or(0);
                (reason.clone(), json!(count.as_u64().unwrap_or(0) - old))
            })
            .filter(|(_, count)| *count != json!(0))
            .collect();
        json!({
            "received": count("packets_received"),
            "forwarded": count("packets_forwarded"),
            "dropped": self.dropped(way) - before.dropped(way),
            "reads": count("reads"),
            "writes": count("writes"),
            "drops": drops,
        })
    }
}
