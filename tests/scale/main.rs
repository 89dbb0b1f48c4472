//! How the control plane grows: many nodes on a real etcd of three members, all in one process and
//! without devices. `scripts/scale` runs it, and has real daemons beside it.
//!
//! *Live* nodes are the control plane that weftd runs, each with a connection, a lease, a claim and
//! a table of peers of its own. The others start as live ones do and stay as leases; a watch on
//! etcd stands for each, whose events nobody reads further.

#![expect(clippy::unwrap_used, reason = "what a measurement cannot go on without, it unwraps")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the figures, and the progress")]

mod nodes;
mod samples;
#[path = "../support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::nodes::{Live, Replayed, Subject};
use crate::samples::{Counters, Samples, kib, round};
use crate::support::control::PREFIX;
use crate::support::members::{Members, Setup, Version};

const USAGE: &str = "usage: scale NODES LIVE CHANGES";

/// Those that the nodes know, and one that stays when the others are out of reach.
const KNOWN: &[usize] = &[0, 1];
const OTHER: usize = 2;

/// By then the claims of nodes that only started have lapsed.
const CLAIMS_LAPSE: Duration = Duration::from_secs(45);
const IDLE: Duration = Duration::from_secs(60);
/// Until every watch knows that it is dead.
const CUT: Duration = Duration::from_secs(40);
/// Beyond how long a watch lives after which weftd counts its failures anew.
const WATCH_STEADY: Duration = Duration::from_secs(15);
/// Of the nodes that are restarted one by one.
const RESTARTS_MAX: usize = 20;

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|it| it.parse().ok()).collect();
    let &[nodes, live, changes] = numbers.as_slice() else { panic!("{USAGE}") };
    assert!((1..=nodes).contains(&live) && changes > 0, "{USAGE}");
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let members = &Members::start(Setup { version: Version::V3_5, count: 3, secure: false });
    members.ctl(&["put", &format!("{PREFIX}/config"), r#"{"Network":"10.0.0.0/8"}"#]);
    let report = members.enter(async |_| measure(members, nodes, live, changes).await);
    println!("{report}");
}

async fn measure(members: &Members, nodes: usize, live: usize, changes: usize) -> Value {
    let mut subject = Subject::put_first(members).await;
    eprintln!("all start");
    let (start, mut live_nodes) = start_of_all(members, nodes, live).await;
    let expected = nodes + 1;
    eprintln!("watches are opened");
    let replayed = Replayed::watch(members, nodes - live).await;
    eprintln!("a lease changes");
    let changed = changes_of(&mut subject, &mut live_nodes, &replayed, changes).await;
    eprintln!("one joins");
    let join = one_joins(members, nodes, expected).await;
    eprintln!("nothing happens");
    sleep(CLAIMS_LAPSE).await;
    let idle = idle(members, live).await;
    eprintln!("restarts");
    let restarts = restarts(members, &mut live_nodes, expected).await;
    eprintln!("history is lost");
    let compacted = history_lost(members, &mut subject, &mut live_nodes).await;
    eprintln!("the leader is lost");
    let leader_lost = leader_lost(members, &mut subject, &mut live_nodes).await;
    json!({
        "nodes": nodes, "live": live, "start": start, "change": changed, "join_ms": join,
        "idle": idle, "restart": restarts, "compacted": compacted, "leader_lost_ms": leader_lost,
    })
}

/// All of them at once, as after a power failure: a connection, the configuration and a subnet.
async fn start_of_all(members: &Members, nodes: usize, live: usize) -> (Value, Vec<Live>) {
    let before = Counters::read(members);
    let began = Instant::now();
    let started = join_all((0..nodes).map(|number| nodes::start(members, number, None))).await;
    let took = began.elapsed();
    let done = Counters::read(members).since(&before);
    let races: u64 = started.iter().map(|node| node.races()).sum();
    let mut live_nodes: Vec<_> = started.into_iter().take(live).map(nodes::Started::run).collect();
    for node in &mut live_nodes {
        node.knows(nodes).await;
    }
    let report = json!({
        "seconds": round(took.as_secs_f64()), "races_lost": races, "requests": done.requests,
        "sent_kib": kib(done.sent_bytes),
    });
    (report, live_nodes)
}

/// From the moment that a lease's write is sent.
async fn changes_of(
    subject: &mut Subject,
    live: &mut [Live],
    replayed: &Replayed,
    changes: usize,
) -> Value {
    let (mut tables, mut last_table, mut last_event) =
        (Samples::default(), Samples::default(), Samples::default());
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..changes {
        let seen = replayed.expect_one_more();
        let began = Instant::now();
        let change = subject.change().await;
        let each = join_all(live.iter_mut().map(|node| node.has(change, began))).await;
        last_table.add(each.iter().copied().max().unwrap());
        each.into_iter().for_each(|it| tables.add(it));
        last_event.add(seen.all(began).await);
        sleep(Duration::from_millis(random.u64(20..120))).await;
    }
    json!({
        "tables_ms": tables.report(), "last_table_ms": last_table.report(),
        "last_event_ms": last_event.report(),
    })
}

/// From nothing to a table of all peers. Its lease stays.
async fn one_joins(members: &Members, nodes: usize, expected: usize) -> f64 {
    let began = Instant::now();
    let mut node = nodes::start(members, nodes, None).await.run();
    node.knows(expected).await;
    samples::milliseconds(began.elapsed())
}

/// What the live nodes ask etcd for while nothing happens, each in a minute.
async fn idle(members: &Members, live: usize) -> Value {
    let before = Counters::read(members);
    sleep(IDLE).await;
    let done = Counters::read(members).since(&before);
    let each = |all: f64| round(all / live as f64 / (IDLE.as_secs_f64() / 60.0));
    json!({
        "writes": each(done.writes), "keep_alives": each(done.keep_alives),
        "requests": each(done.requests), "received_bytes": each(done.received_bytes),
        "sent_kib": each(kib(done.sent_bytes)),
    })
}

/// One after the other, as when nodes get a new weftd.
async fn restarts(members: &Members, live: &mut [Live], expected: usize) -> Value {
    let count = live.len().min(RESTARTS_MAX);
    let before = Counters::read(members);
    let mut took = Samples::default();
    for node in &mut live[..count] {
        let began = Instant::now();
        node.restart(members).await;
        node.knows(expected).await;
        took.add(began.elapsed());
    }
    let done = Counters::read(members).since(&before);
    let each = |all: f64| round(all / count as f64);
    json!({
        "ms": took.report(), "requests": each(done.requests), "writes": each(done.writes),
        "sent_kib": each(kib(done.sent_bytes)),
    })
}

/// etcd is out of reach until its history has moved on without the nodes.
async fn history_lost(members: &Members, subject: &mut Subject, live: &mut [Live]) -> Value {
    members.black_hole(KNOWN);
    sleep(CUT).await;
    let change = subject.change().await;
    let revision = change.revision.to_string();
    members.try_ctl(&members.url(OTHER), &["compact", &revision]).unwrap();
    let before = Counters::read(members);
    members.black_hole(&[]);
    let began = Instant::now();
    let each = join_all(live.iter_mut().map(|node| node.has(change, began))).await;
    let done = Counters::read(members).since(&before);
    let mut took = Samples::default();
    each.into_iter().for_each(|it| took.add(it));
    let sent = round(kib(done.sent_bytes) / live.len() as f64);
    json!({ "ms": took.report(), "sent_kib": sent })
}

/// From the end of the leader to the first write that is taken, and to that in all tables.
async fn leader_lost(members: &Members, subject: &mut Subject, live: &mut [Live]) -> Value {
    // A watch that has lived for less is opened again after the pauses of before.
    sleep(WATCH_STEADY).await;
    members.move_leader(KNOWN[0]);
    members.kill(KNOWN[0]);
    let began = Instant::now();
    let change = subject.change().await;
    let written = samples::milliseconds(began.elapsed());
    let each = join_all(live.iter_mut().map(|node| node.has(change, began))).await;
    let known = samples::milliseconds(each.into_iter().max().unwrap());
    json!({ "written": written, "last_table": known })
}
