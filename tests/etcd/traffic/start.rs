//! Starting: before there is a store, and twice on one host.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::cluster::SWITCH_ADDRESS;
use crate::support::lab::{Namespace, wait_until};
use crate::support::log_since::LogSince;
use crate::support::members::Version;
use crate::traffic::site::{Plan, Site};

/// What the health server answers, by its first line.
fn health(host: &Namespace, path: &str) -> String {
    host.enter(|| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, 8099)).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.lines().next().unwrap_or_default().to_owned()
    })
}

/// F1: no store at the first start of a node.
#[test]
fn cold_start_is_ready_within_second_of_etcd() {
    const READY: Duration = Duration::from_secs(1);
    let mut site = Site::build(Plan::of(Version::V3_5));
    let cluster = Arc::clone(&site.cluster);
    site.etcd.process.stop(Signal::KILL, Duration::from_secs(2));
    let mut daemon = site.weftd(0, &["--healthz-port=8099"]);
    let told = LogSince::since(&daemon);
    let endpoint = format!("http://{SWITCH_ADDRESS}:");
    wait_until(Duration::from_secs(3), "the reason is told", || {
        told.warned(&daemon, &endpoint) > 0
    });
    // Until the pauses between two tries are at their longest.
    thread::sleep(Duration::from_secs(2));
    let host = &site.cluster.hosts[0];
    assert!(health(host, "/healthz").contains(" 200 "), "a node that waits looks dead");
    assert!(health(host, "/readyz").contains(" 503 "), "a node without a subnet looks ready");
    told.assert_warned(&daemon, &endpoint);
    site.etcd.spawn(&cluster.switch);
    let back = Instant::now();
    wait_until(READY, "the node is ready within a second", || {
        health(host, "/readyz").contains(" 200 ")
    });
    println!("ready {:?} after etcd answers", back.elapsed());
    assert_eq!(daemon.stop(Signal::TERM, Duration::from_secs(1)).code(), Some(0));
}

/// F18: two daemons for one host and prefix, together and one after the other.
#[test]
fn second_daemon_is_refused_naming_first() {
    let mut site = Site::build(Plan::of(Version::V3_4));
    let mut pair = [site.weftd(0, &[]), site.weftd(0, &[])];
    let mut loser = None;
    wait_until(Duration::from_secs(5), "one of two daemons gives way", || {
        loser = pair.iter_mut().position(|daemon| daemon.ended().is_some());
        loser.is_some()
    });
    let loser = loser.unwrap();
    let [first, second] = pair;
    let (mut loser, mut winner) = if loser == 0 { (first, second) } else { (second, first) };
    assert_refused(&mut loser, winner.pid().as_raw_nonzero().get());
    winner.stop(Signal::TERM, Duration::from_secs(2));

    site.start_daemons(2);
    let before = site.entries();
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let mut again = site.weftd(0, &[]);
        let status = again.wait(Duration::from_secs(2));
        assert_eq!(status.code(), Some(1));
        assert_refused(&mut again, site.daemons[0].pid().as_raw_nonzero().get());
        told[0].assert_no_warning(&site.daemons[0]);
    });
    report.assert_nothing_lost("a second daemon");
    assert_eq!(site.entries(), before, "a daemon that was refused wrote to the store");
    let keys = site.ctl(&["get", "--prefix", "--keys-only", "/coreos.com/network/subnets/"]);
    assert_eq!(keys.split_whitespace().count(), 2, "two daemons took two subnets: {keys}");
    site.assert_settled();
}

#[track_caller]
fn assert_refused(daemon: &mut crate::support::lab::Process, other: i32) {
    let text = daemon.output();
    assert_eq!(daemon.ended().and_then(|status| status.code()), Some(1), "{text}");
    assert!(text.contains(&format!("pid {other}")), "it does not name {other}: {text}");
}

/// The name of each node, as `weft peers` shows it for scripts and for people.
fn nodes(site: &Site, host: usize) -> [Vec<String>; 2] {
    let socket = site.dir(host).join("weft.sock");
    let answer = |words: &[&str]| {
        let mut tool = Command::new(env!("CARGO_BIN_EXE_weft"));
        let output = tool.args(words).arg("--socket").arg(&socket).output();
        String::from_utf8(output.expect("weft runs").stdout).unwrap()
    };
    let json: serde_json::Value = serde_json::from_str(&answer(&["peers", "-o", "json"])).unwrap();
    let rows = json["peers"].as_array().cloned().unwrap_or_default();
    let named = rows.iter().map(|row| row["node"].as_str().unwrap_or("-").to_owned());
    let table = answer(&["peers"]);
    let mut lines = table.lines();
    let headings = lines.next().unwrap_or_default();
    let column = headings.split_whitespace().position(|it| it == "NODE").expect("a column");
    let shown = lines.filter_map(|line| line.split_whitespace().nth(column).map(str::to_owned));
    [named.collect(), shown.collect()]
}

/// In etcd a lease names no node; the claim of its address does.
#[test]
fn peers_are_shown_with_the_names_of_their_hosts() {
    // The names are read a minute apart at most, and the first time may be before the other claims.
    const NAMED: Duration = Duration::from_secs(120);
    let site = Site::start(Plan::of(Version::V3_5));
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned();
    for host in 0..2 {
        let expected = [vec![name.clone()], vec![name.clone()]];
        wait_until(NAMED, "weft peers names the other host", || nodes(&site, host) == expected);
    }
}
