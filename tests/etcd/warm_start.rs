//! Hosts that start while etcd is away: by the cache that the last run left, or not, and what
//! becomes of it when etcd is back.

#![expect(clippy::print_stdout, reason = "measured times belong into the report of the run")]

use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::etcd::PATIENT;
use crate::support::lab::{Lab, Process, SubnetEnv, UNDERLAY, comes_true, wait_until};
use crate::support::machine::Machine;
use crate::support::overlay::CONFIG;
use crate::support::pace::Stopwatch;
use crate::support::status::{Status, metric};
use crate::support::traffic::{Numbered, port, udp_socket};

/// Traffic is promised within this time of a start.
const WARM: Duration = Duration::from_secs(1);
/// To be connected again: the pause between two tries is at most 5 s.
const AGAIN: Duration = Duration::from_secs(10);
const STOP: Duration = Duration::from_secs(2);
const KEY: &str = "/coreos.com/network";

/// Two hosts with a pod each; etcd is on the second.
struct Site {
    daemons: Vec<Process>,
    etcd: Option<Process>,
    lab: Lab,
    leases: Vec<SubnetEnv>,
    /// The first host's name and boot, of which there is one more after each power cut.
    named: (&'static str, u32),
    files: TempDir,
}

impl Site {
    /// Both daemons know each other, and the first has it on disk.
    #[track_caller]
    fn start() -> Self {
        Self::start_in(Lab::two_hosts(), CONFIG)
    }

    #[track_caller]
    fn start_in(lab: Lab, config: &str) -> Self {
        let files = tempfile::tempdir().expect("a directory");
        let (daemons, leases, named) = (Vec::new(), Vec::new(), ("node-a", 1));
        let mut site = Self { daemons, etcd: None, lab, leases, named, files };
        site.start_etcd();
        site.ctl(&["put", &format!("{KEY}/config"), config]);
        for host in 0..2 {
            let mut daemon = site.spawn(host, &[]);
            site.leases.push(SubnetEnv::wait(&site.dir(host).join("subnet.env"), &mut daemon));
            site.daemons.push(daemon);
        }
        site.lab.connect_pods([&site.leases[0], &site.leases[1]]);
        wait_until(AGAIN, "the first daemon remembers the second", || {
            let cache = std::fs::read_to_string(site.cache()).unwrap_or_default();
            cache.contains(&format!(r#"{{"PublicIP":"{}""#, UNDERLAY[1]))
        });
        site.traffic(AGAIN, "the start");
        site
    }

    fn start_etcd(&mut self) {
        let (url, peer) = (self.url(), format!("http://{}:2380", UNDERLAY[1]));
        let data = self.files.path().join("etcd").display().to_string();
        let initial = format!("default={peer}");
        self.etcd = Some(self.lab.hosts[1].spawn(&[
            "etcd",
            "--data-dir",
            &data,
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
            "--initial-cluster",
            &initial,
        ]));
        let host = &self.lab.hosts[1];
        // The port first: etcdctl takes seconds to notice that nobody listens.
        wait_until(AGAIN, "etcd listens", || {
            host.enter(|| TcpStream::connect((UNDERLAY[1], 2379))).is_ok()
        });
        let endpoints = format!("--endpoints={url}");
        let get = ["env", "ETCDCTL_API=3", "etcdctl", &endpoints, "get", "health"];
        wait_until(AGAIN, "etcd answers", || host.succeeds(&get));
    }

    fn url(&self) -> String {
        format!("http://{}:2379", UNDERLAY[1])
    }

    #[track_caller]
    fn ctl(&self, arguments: &[&str]) -> String {
        let url = format!("--endpoints={}", self.url());
        let etcdctl = ["env", "ETCDCTL_API=3", "etcdctl", &url];
        let argv = [&etcdctl, &PATIENT[..], arguments].concat();
        self.lab.hosts[1].exec(&argv)
    }

    fn own_key(&self) -> String {
        format!("{KEY}/subnets/{}-24", self.leases[0].network())
    }

    /// The first host's entry: value, revisions, etcd lease.
    fn own_entry(&self) -> Value {
        let json: Value = serde_json::from_str(&self.ctl(&["get", &self.own_key(), "-w", "json"]))
            .expect("etcdctl writes JSON");
        json["kvs"][0].clone()
    }

    fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    fn cache(&self) -> PathBuf {
        self.dir(0).join("subnet.env.cache")
    }

    fn spawn(&self, host: usize, arguments: &[&str]) -> Process {
        let endpoints = format!("--etcd-endpoints={}", self.url());
        let all = [&[endpoints.as_str()], arguments].concat();
        let (hostname, boot) = if host == 0 { self.named } else { ("node-b", 1) };
        let boot_id = format!("boot {boot} of host {host}");
        // Zeros are no machine's.
        let machine_id = &format!("{:032}", host + 1);
        let machine = Machine { hostname, machine_id, boot_id: &boot_id };
        self.lab.weftd_on(Some(machine), host, &self.dir(host), &all)
    }

    /// Starts the first host's daemon; how long its pods then are without the other's.
    #[track_caller]
    fn restart(&mut self, after: &str) {
        let started = Instant::now();
        self.daemons[0] = self.spawn(0, &[]);
        self.traffic(AGAIN, after);
        println!("{after}: traffic {:?} after weftd was started", started.elapsed());
    }

    /// The claim of the first host's address.
    fn claim(&self) -> String {
        self.ctl(&["get", &format!("{KEY}/weft/nodes/{}", UNDERLAY[0]), "--print-value-only"])
    }

    #[track_caller]
    fn wait_for_claim(&self, words: &str) {
        wait_until(AGAIN, &format!("the claim says {words:?}"), || self.claim().contains(words));
    }

    #[track_caller]
    fn assert_runs_alone(&mut self, after: &str) {
        assert!(self.daemons[0].ended().is_none(), "{after}: {}", self.daemons[0].output());
        let status = self.status();
        assert_eq!(status.0["store"]["duplicate_public_ip"], Value::Null, "{after}: {}", status.0);
    }

    /// Pings from pod 0 to pod 1 until one is answered; how long that took.
    #[track_caller]
    fn traffic(&self, limit: Duration, after: &str) -> Duration {
        let (started, address) = (Instant::now(), self.leases[1].pod_address().to_string());
        wait_until(limit, &format!("pods reach each other after {after}"), || {
            self.lab.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.1", &address])
        });
        started.elapsed()
    }

    /// How often the first host's daemon warned of its cache: that it starts by it, or why not.
    fn warnings_of_cache(&self) -> usize {
        self.daemons[0].complaints(&self.cache().display().to_string())
    }

    /// Waits until the first host's daemon waits for etcd, its cache refused.
    #[track_caller]
    fn wait_until_refused(&self) {
        wait_until(AGAIN, "the start waits for etcd", || {
            Status::try_of(&self.dir(0)).is_some_and(|status| status.start_tries() >= Some(1))
        });
    }

    fn status(&self) -> Status {
        Status::of(&self.dir(0))
    }

    /// Makes etcd not answer: by refusing, or by saying nothing.
    fn lose_etcd(&mut self, silent: bool) {
        let etcd = self.etcd.as_mut().expect("etcd runs");
        if silent {
            etcd.signal(Signal::STOP);
        } else {
            etcd.stop(Signal::KILL, STOP);
        }
    }

    fn bring_etcd_back(&mut self, silent: bool) {
        if silent {
            self.etcd.as_mut().expect("etcd runs").signal(Signal::CONT);
        } else {
            self.start_etcd();
        }
    }

    /// Starts the first host's daemon by its cache.
    #[track_caller]
    fn start_warm(&mut self) {
        self.daemons[0] = self.spawn(0, &[]);
        wait_until(WARM, "a daemon without etcd is ready", || {
            Status::try_of(&self.dir(0)).is_some_and(|status| status.0["ready"] == true)
        });
        let status = self.status();
        assert_eq!(status.0["stale"], true, "what is stale is not marked: {}", status.0);
        assert_eq!(status.0["store"]["up"], false, "{}", status.0);
        assert_eq!(status.routes(), 1, "the peer is not remembered: {}", status.0);
        // The log is written by a thread of its own.
        wait_until(AGAIN, "it is told", || self.warnings_of_cache() > 0);
        assert_eq!(self.warnings_of_cache(), 1, "it is told: {}", self.daemons[0].output());
        assert_eq!(metric(&self.dir(0), "flannel_stale"), Some(1.0));
    }

    #[track_caller]
    fn wait_until_confirmed(&self) -> Duration {
        let started = Instant::now();
        wait_until(AGAIN, "the store confirms what is stale", || self.status().0["stale"] == false);
        started.elapsed()
    }
}

/// What is lost, of datagrams both ways between the pods, while `work` is done.
fn lost_while(site: &mut Site, work: impl FnOnce(&mut Site)) -> [u64; 2] {
    let pods = [0, 1].map(|pod| site.leases[pod].pod_address());
    let sockets = [0, 1].map(|pod| udp_socket(&site.lab.pods[pod], pods[pod]));
    let targets = [1, 0].map(|pod| SocketAddr::from((pods[pod], port(&sockets[pod]))));
    // Less than the kernel queues for a processor that does not get to it.
    let flow = || Numbered { in_flight_max: Some(200), ..Numbered::default() };
    let flows = [flow(), flow()];
    thread::scope(|scope| {
        let mut senders = Vec::new();
        for (index, flow) in flows.iter().enumerate() {
            let (near, far) = (&sockets[index], &sockets[1 - index]);
            senders.push(scope.spawn(move || flow.send(near, targets[index], 2_000)));
            scope.spawn(move || flow.receive(far));
        }
        // A failure inside must end the flows, or nobody ever hears of it.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            wait_until(STOP, "the flows run", || {
                flows.iter().all(|flow| flow.received.load(Ordering::Relaxed) > 200)
            });
            work(site);
        }));
        flows.iter().for_each(|flow| flow.stop.store(true, Ordering::Relaxed));
        let ended = senders.into_iter().try_for_each(ScopedJoinHandle::join);
        // What is still on its way, on a machine that is busy. What is missing then is lost.
        comes_true(STOP, || flows.iter().all(|flow| flow.missing() == 0));
        flows.iter().for_each(|flow| flow.drained.store(true, Ordering::Relaxed));
        outcome.and(ended).unwrap_or_else(|panic| resume_unwind(panic));
    });
    let sent = flows.each_ref().map(|flow| flow.sent.load(Ordering::Relaxed));
    println!("sent {sent:?}");
    flows.each_ref().map(Numbered::missing)
}

#[test]
fn offline_start_carries_within_second_keeps_lease() {
    let mut site = Site::start();
    let before = site.own_entry();
    for silent in [false, true] {
        site.daemons[0].stop(Signal::KILL, STOP);
        site.lose_etcd(silent);
        let started = Stopwatch::start();
        site.start_warm();
        let ready = started.elapsed();
        site.traffic(WARM.saturating_sub(ready), "a start without etcd");
        let took = started.elapsed();
        // It stays as it is for as long as it takes.
        thread::sleep(Duration::from_secs(2));
        let cache = std::fs::read(site.cache()).expect("the cache stays");
        let mut confirmed = Duration::ZERO;
        let lost = lost_while(&mut site, |site| {
            site.bring_etcd_back(silent);
            confirmed = site.wait_until_confirmed();
            thread::sleep(Duration::from_secs(1));
        });
        println!(
            "silent {silent}: ready after {ready:?}, traffic after {took:?}, confirmed \
             {confirmed:?} after etcd was called back"
        );
        assert_eq!(lost, [0, 0], "packets were lost when etcd came back");
        let after = site.own_entry();
        for what in ["value", "create_revision", "mod_revision", "lease"] {
            assert_eq!(after[what], before[what], "{what} of the own entry: {after}");
        }
        let log = site.daemons[0].output();
        assert_eq!(log.matches("Subnet added").count(), 1, "routes flap:\n{log}");
        assert_eq!(log.matches("Subnet removed").count(), 0, "routes flap:\n{log}");
        assert_eq!(site.status().0["restart_needed"], false, "it is the same network:\n{log}");
        wait_until(AGAIN, "the cache is written again", || {
            std::fs::read(site.cache()).expect("the cache stays") != cache
        });
        assert_eq!(SubnetEnv::read(&site.dir(0).join("subnet.env")).as_ref(), site.leases.first());
    }
}

#[test]
fn twenty_offline_starts_each_carry_within_second() {
    let mut site = Site::start();
    for silent in [true, false] {
        site.daemons[0].stop(Signal::KILL, STOP);
        site.lose_etcd(silent);
        let mut slowest = Duration::ZERO;
        for _ in 0..10 {
            let started = Stopwatch::start();
            site.start_warm();
            site.traffic(WARM.saturating_sub(started.elapsed()), "a start without etcd");
            slowest = slowest.max(started.elapsed());
            site.daemons[0].stop(Signal::KILL, STOP);
        }
        println!("silent {silent}: the slowest of ten starts carries after {slowest:?}");
        site.bring_etcd_back(silent);
        site.daemons[0] = site.spawn(0, &[]);
        site.traffic(AGAIN, "a start with etcd");
    }
}

#[test]
fn offline_start_retakes_lapsed_lease_follows_changed_peers() {
    let mut site = Site::start();
    site.daemons[0].stop(Signal::TERM, STOP);
    let before = site.own_entry();
    site.ctl(&["del", &site.own_key()]);
    let new_peer = r#"{"PublicIP":"172.20.0.99"}"#;
    site.ctl(&["put", &format!("{KEY}/subnets/10.5.255.0-24"), new_peer]);
    site.lose_etcd(true);
    site.start_warm();
    site.bring_etcd_back(true);
    site.wait_until_confirmed();
    wait_until(AGAIN, "the new peer is followed", || site.status().routes() == 2);
    let after = site.own_entry();
    assert_eq!(after["value"], before["value"], "another entry than before: {after}");
    assert_ne!(after["create_revision"], before["create_revision"]);
    // The other host took its route away with the lease.
    site.traffic(WARM, "the lease was taken again");
}

#[test]
fn offline_start_gives_up_subnet_taken_meanwhile() {
    let mut site = Site::start();
    site.daemons[0].stop(Signal::TERM, STOP);
    let taken = r#"{"PublicIP":"172.20.0.99"}"#;
    site.ctl(&["put", &site.own_key(), taken]);
    site.lose_etcd(true);
    site.start_warm();
    let key = site.own_key();
    site.bring_etcd_back(true);
    let status = site.daemons[0].wait(AGAIN);
    let log = site.daemons[0].output();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(site.daemons[0].complaints("172.20.0.99") > 0, "the owner is not named:\n{log}");
    let value = site.ctl(&["get", &key, "--print-value-only"]);
    assert_eq!(value.trim(), taken, "it stole the subnet back");
    assert!(!site.cache().exists(), "the next start goes by a subnet that was lost");
    site.daemons[0] = site.spawn(0, &[]);
    let path = site.dir(0).join("subnet.env");
    wait_until(AGAIN, "another subnet is leased", || {
        SubnetEnv::read(&path).is_some_and(|lease| lease != site.leases[0])
    });
}

#[test]
fn returning_machine_never_waits_for_own_claim() {
    let mut site = Site::start();
    site.daemons[0].stop(Signal::KILL, STOP);
    site.named.1 += 1;
    site.restart("a power cut");
    site.wait_for_claim("boot 2 of");
    site.assert_runs_alone("a power cut");

    site.daemons[0].stop(Signal::TERM, STOP);
    // weftd does not wait for long until etcd has taken the claim back. A claim that was left lives
    // for at least 18 s more, and by the clock, however busy the machine is.
    let stopped = Instant::now();
    while !site.claim().is_empty() {
        assert!(stopped.elapsed() < Duration::from_secs(10), "a clean stop leaves the claim");
        thread::sleep(Duration::from_millis(100));
    }
    site.named.1 += 1;
    site.restart("a clean stop and a boot");
    site.daemons[0].stop(Signal::KILL, STOP);
    site.named.0 = "renamed";
    site.restart("another hostname");
    site.wait_for_claim("renamed");

    for silent in [false, true] {
        // etcd brings the claim of the boot before back, its whole life before it.
        site.daemons[0].stop(Signal::KILL, STOP);
        site.named.1 += 1;
        site.lose_etcd(silent);
        site.restart("a power cut, without etcd");
        let cached = std::fs::metadata(site.cache()).expect("there is a cache");
        site.bring_etcd_back(silent);
        site.wait_until_confirmed();
        site.wait_for_claim(&format!("boot {} of", site.named.1));
        site.assert_runs_alone("etcd is back");
        assert!(cached.is_file() && site.cache().exists(), "the cache went with a claim");
    }
}

#[test]
fn restored_backup_stops_no_daemon_loses_no_packet() {
    let mut site = Site::start();
    let backup = site.files.path().join("backup").display().to_string();
    // Of before the daemon that runs: its claim is in no backup.
    site.ctl(&["snapshot", "save", &backup]);
    site.daemons[0].stop(Signal::KILL, STOP);
    site.named.1 += 1;
    site.restart("a power cut");
    site.wait_for_claim("boot 2 of");
    let lost = lost_while(&mut site, |site| {
        site.lose_etcd(false);
        let data = site.files.path().join("etcd").display().to_string();
        std::fs::remove_dir_all(&data).expect("etcd has ended");
        let peer = format!("http://{}:2380", UNDERLAY[1]);
        let initial = format!("--initial-cluster=default={peer}");
        let (data, peer) =
            (format!("--data-dir={data}"), format!("--initial-advertise-peer-urls={peer}"));
        let restore = ["etcdctl", "snapshot", "restore", &backup, "--name=default"];
        let argv = [&["env", "ETCDCTL_API=3"], &restore[..], &[&data, &initial, &peer]].concat();
        site.lab.hosts[1].exec(&argv);
        site.start_etcd();
        let started = Instant::now();
        site.wait_for_claim("boot 2 of");
        println!("a restored backup: claimed again {:?} after etcd was back", started.elapsed());
    });
    assert_eq!(lost, [0, 0], "packets were lost when a backup was restored");
    site.assert_runs_alone("a restored backup");
    assert!(site.daemons[1].ended().is_none(), "{}", site.daemons[1].output());
    assert!(site.cache().exists(), "the cache went with a claim");
}

#[test]
fn a_cache_whose_lease_has_ended_is_refused() {
    let mut site = Site::start();
    site.daemons[0].stop(Signal::TERM, STOP);
    site.lose_etcd(false);
    let text = std::fs::read_to_string(site.cache()).expect("there is a cache");
    let json: Value = serde_json::from_str(text.split_once('\n').expect("two parts").1).unwrap();
    let ends = json["ends_unix"].as_u64().expect("the cache has the lease's end");
    let heard = json["as_of_unix"].as_u64().expect("the cache has a time");
    let ended =
        forged(&text, &format!("\"ends_unix\":{ends},"), &format!("\"ends_unix\":{heard},"));
    std::fs::write(site.cache(), ended).expect("the test's directory is writable");
    site.daemons[0] = site.spawn(0, &[]);
    let since = weft::control::clock::format_rfc3339(heard);
    wait_until(AGAIN, "the end of the lease is told", || site.daemons[0].complaints(&since) > 0);
    site.wait_until_refused();
    assert_eq!(site.status().0["stale"], false, "two nodes may have the subnet");
}

/// The cache's text with `from` replaced, under a seal that fits.
fn forged(text: &str, from: &str, to: &str) -> Vec<u8> {
    let (_, body) = text.split_once('\n').expect("the first line is the seal");
    assert!(body.contains(from), "{from:?} is not in {body}");
    weft::control::cache::seal(body.replace(from, to).as_bytes())
}

#[test]
fn invalid_cache_is_refused_once_and_start_waits() {
    let mut site = Site::start();
    site.daemons[0].stop(Signal::TERM, STOP);
    site.lose_etcd(false);
    let text = std::fs::read_to_string(site.cache()).expect("there is a cache");
    let json: Value = serde_json::from_str(text.split_once('\n').expect("two parts").1).unwrap();
    let now = json["as_of_unix"].as_u64().expect("the cache has a time");
    let time = |seconds: u64| format!("\"as_of_unix\":{seconds},");
    let day_ago = time(now - 24 * 3600 - 60);
    let whole = text.clone().into_bytes();
    let mut damaged = whole.clone();
    damaged[100] ^= 4;
    let half = whole[..whole.len() / 2].to_vec();
    let cases = [
        ("24h0m0s", Some(forged(&text, &time(now), &day_ago)), None),
        ("checksum", Some(damaged), None),
        ("checksum", Some(half), None),
        ("10.0.0.0/8", Some(forged(&text, "10.5.0.0/16", "10.0.0.0/8")), None),
        ("172.20.0.7", Some(forged(&text, "172.20.0.1\"", "172.20.0.7\"")), None),
        ("\"fly\"", Some(forged(&text, "\"Type\":\"udp\"", "\"Type\":\"fly\"")), None),
        ("/other", Some(whole.clone()), Some("--etcd-prefix=/other")),
        ("172.20.0.2:2399", Some(whole.clone()), Some("--etcd-endpoints=http://172.20.0.2:2399")),
        ("", None, None),
    ];
    // What the refusal has to name.
    for (value, bytes, argument) in cases {
        std::fs::remove_file(site.cache()).ok();
        if let Some(bytes) = bytes {
            std::fs::write(site.cache(), bytes).expect("the test's directory is writable");
        }
        site.daemons[0] = site.spawn(0, argument.as_slice());
        site.wait_until_refused();
        wait_until(AGAIN, "it is told", || site.warnings_of_cache() > 0);
        thread::sleep(Duration::from_millis(300));
        let log = site.daemons[0].output();
        assert_eq!(site.warnings_of_cache(), 1, "{value} is not told once:\n{log}");
        assert!(site.daemons[0].complaints(value) > 0, "{value:?} is not in:\n{log}");
        let status = site.status();
        assert_eq!((&status.0["ready"], &status.0["stale"]), (&false.into(), &false.into()));
        let device = ["ip", "link", "show", "flannel0"];
        assert!(!site.lab.hosts[0].succeeds(&device), "traffic by what cannot be trusted");
        site.daemons[0].stop(Signal::TERM, STOP);
    }

    // Switched off, nobody looks at it, and nobody writes it.
    std::fs::write(site.cache(), &whole).expect("the test's directory is writable");
    site.daemons[0] = site.spawn(0, &["--start-from-cache=false"]);
    site.wait_until_refused();
    thread::sleep(WARM);
    assert!(!site.daemons[0].output().contains("cache of"), "{}", site.daemons[0].output());
    assert_eq!(site.status().0["ready"], false);
    site.start_etcd();
    let ready = Instant::now();
    wait_until(AGAIN, "the daemon is ready once etcd is there", || {
        site.status().0["ready"] == true
    });
    println!("without the cache, ready {:?} after etcd", ready.elapsed());
    site.traffic(AGAIN, "etcd came");
    assert_eq!(std::fs::read(site.cache()).expect("it stays"), whole);
}

#[test]
fn a_node_of_both_families_keeps_ipv6_when_it_starts_by_its_cache() {
    let config = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48",
        "Backend":{"Type":"host-gw"}}"#;
    let lab = Lab::two_hosts();
    for (index, host) in lab.hosts.iter().enumerate() {
        let address = format!("fd99::{}/64", index + 1);
        host.exec(&["ip", "address", "add", &address, "dev", "wire0", "nodad"]);
    }
    let mut site = Site::start_in(lab, config);
    let published = |site: &Site| {
        let prefix = format!("{}&", site.own_key());
        let text = site.ctl(&["get", "--prefix", &prefix, "--print-value-only"]);
        serde_json::from_str::<Value>(&text).expect("a lease is JSON")["PublicIPv6"].clone()
    };
    assert_eq!(published(&site), "fd99::1");
    let routes =
        |site: &Site| site.lab.hosts[0].exec(&["ip", "-6", "route", "show", "proto", "119"]);
    let before = routes(&site);
    assert!(before.contains("via fd99::2"), "{before}");
    site.daemons[0].stop(Signal::KILL, STOP);
    site.lose_etcd(false);
    site.daemons[0] = site.spawn(0, &[]);
    wait_until(AGAIN, "it starts by its cache", || {
        let status = Status::try_of(&site.dir(0));
        status.is_some_and(|status| status.0["stale"] == true && status.routes() == 1)
    });
    assert_eq!(site.status().0["lease"]["ipv6"]["public_ip"], "fd99::1");
    site.bring_etcd_back(false);
    site.wait_until_confirmed();
    assert_eq!(published(&site), "fd99::1", "peers have no way to its IPv6 subnet any more");
    assert_eq!(routes(&site), before);
}
