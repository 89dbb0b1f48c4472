//! A second daemon for a node that has one, in the same network namespace and store: it is refused
//! before it writes anything, and the first one notices nothing.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::cluster::NamespaceEtcd;
use crate::support::lab::{
    LEASE_TIMEOUT, Lab, Namespace, Process, SubnetEnv, UNDERLAY, wait_until,
};
use crate::support::overlay::{CONFIG, local_store};

/// A refusal waits a second for a predecessor that is stopping; the rest allows for a busy machine.
const REFUSAL: Duration = Duration::from_secs(30);
const STOP: Duration = Duration::from_secs(10);
const KEY: &str = "/coreos.com/network";

/// Where a site keeps its leases.
enum Stored {
    Etcd(NamespaceEtcd),
    Local,
}

/// Two hosts with a pod each.
struct Site {
    daemons: Vec<Process>,
    stored: Stored,
    lab: Lab,
    files: TempDir,
}

impl Site {
    fn on_etcd(config: &str) -> Self {
        let lab = Lab::two_hosts();
        let etcd = NamespaceEtcd::start(&lab.hosts[1], UNDERLAY[1]);
        etcd.ctl(&lab.hosts[1], &["put", &format!("{KEY}/config"), config]);
        let files = tempfile::tempdir().expect("a directory for the test");
        Self { daemons: Vec::new(), stored: Stored::Etcd(etcd), lab, files }
    }

    fn on_files(config: &str) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        local_store(files.path(), config);
        Self { daemons: Vec::new(), stored: Stored::Local, lab: Lab::two_hosts(), files }
    }

    fn store(&self) -> String {
        match &self.stored {
            Stored::Etcd(_) => format!("--etcd-endpoints=http://{}:2379", UNDERLAY[1]),
            Stored::Local => {
                format!("--local-store={}", self.files.path().join("store").display())
            }
        }
    }

    fn weftd(&self, host: usize, name: &str, arguments: &[&str]) -> Process {
        let store = self.store();
        let all = [&[store.as_str()], arguments].concat();
        self.lab.weftd(host, &self.files.path().join(name), &all)
    }

    #[track_caller]
    fn lease(&self, name: &str, daemon: &mut Process) -> SubnetEnv {
        SubnetEnv::wait(&self.files.path().join(name).join("subnet.env"), daemon)
    }

    /// Both daemons, and pods that reach each other; gives the second pod's address.
    #[track_caller]
    fn start(&mut self) -> Ipv4Addr {
        let mut leases = Vec::new();
        for (host, name) in ["h0", "h1"].into_iter().enumerate() {
            let mut daemon = self.weftd(host, name, &[]);
            leases.push(self.lease(name, &mut daemon));
            self.daemons.push(daemon);
        }
        self.lab.connect_pods([&leases[0], &leases[1]]);
        let target = leases[1].pod_address();
        wait_until(LEASE_TIMEOUT, "pods reach each other", || self.lab.ping(0, target, 56));
        target
    }

    /// All that the store has of nodes; of claims only the names, because they are refreshed.
    fn entries(&self) -> Vec<String> {
        match &self.stored {
            Stored::Etcd(etcd) => {
                let host = &self.lab.hosts[1];
                let json = etcd.ctl(host, &["get", KEY, "--prefix", "-w", "json"]);
                let json: serde_json::Value =
                    serde_json::from_str(&json).expect("etcdctl writes JSON");
                let entries = json["kvs"].as_array().expect("a configuration at least").iter();
                let text = |entry: &serde_json::Value| {
                    let claim = etcd.ctl(host, &["get", &format!("{KEY}/weft"), "--prefix"]);
                    let is_claim = claim.contains(entry["value"].as_str().unwrap_or("-"));
                    let version = if is_claim { "" } else { &entry["mod_revision"].to_string() };
                    format!("{} {} {} {version}", entry["key"], entry["value"], entry["lease"])
                };
                entries.map(text).collect()
            }
            Stored::Local => {
                let mut all = Vec::new();
                read_all(&self.files.path().join("store"), &mut all);
                all.sort();
                all
            }
        }
    }
}

fn read_all(directory: &Path, all: &mut Vec<String>) {
    for entry in std::fs::read_dir(directory).expect("the store is there") {
        let path = entry.expect("the store is there").path();
        if path.is_dir() {
            read_all(&path, all);
        } else {
            let text = std::fs::read_to_string(&path).expect("the store is readable");
            all.push(format!("{} {text}", path.display()));
        }
    }
}

/// Devices, addresses and routes of IPv4.
fn kernel_state(host: &Namespace) -> String {
    ["link", "address", "route"].map(|what| host.exec(&["ip", "-4", "-o", what, "show"])).concat()
}

fn the_second_is_refused(mut site: Site) {
    let target = site.start().to_string();
    let (entries, kernel) = (site.entries(), kernel_state(&site.lab.hosts[0]));
    let ping = ["ping", "-q", "-i0.05", "-c100", "-W30", &target];
    let mut pings = site.lab.pods[0].spawn(&ping);

    let mut second = site.weftd(0, "second", &[]);
    let status = second.wait(REFUSAL);

    let (log, pid) = (second.output(), site.daemons[0].pid().as_raw_nonzero());
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains(&format!("pid {pid}")), "the running daemon is not named: {log}");
    assert_eq!(second.complaints("10.5.0.0/16"), 0, "asks for the running daemon's route: {log}");
    pings.wait(Duration::from_secs(60));
    assert!(pings.output().contains(" 0% packet loss"), "{}", pings.output());
    assert_eq!(site.entries(), entries, "the second daemon wrote to the store: {log}");
    assert_eq!(kernel_state(&site.lab.hosts[0]), kernel, "{log}");
    assert!(site.daemons[0].ended().is_none(), "{}", site.daemons[0].output());
    assert!(!site.files.path().join("second/subnet.env").exists());
}

fn config(backend: &str) -> String {
    format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend}"}}}}"#)
}

#[test]
fn second_daemon_on_etcd_is_refused_udp() {
    the_second_is_refused(Site::on_etcd(CONFIG));
}

#[test]
fn second_daemon_on_etcd_is_refused_vxlan() {
    the_second_is_refused(Site::on_etcd(&config("vxlan")));
}

#[test]
fn second_daemon_on_etcd_is_refused_host_gw() {
    the_second_is_refused(Site::on_etcd(&config("host-gw")));
}

#[test]
fn second_daemon_on_files_is_refused_udp() {
    the_second_is_refused(Site::on_files(CONFIG));
}

#[test]
fn foreign_port_or_route_refuses_before_store_write() {
    let site = Site::on_etcd(CONFIG);
    let (host, before) = (&site.lab.hosts[0], site.entries());
    // As flanneld has it, which knows nothing of our lock.
    let port = host.enter(|| UdpSocket::bind((UNDERLAY[0], 8285))).expect("the port is free");
    let mut daemon = site.weftd(0, "h0", &[]);
    assert_eq!(daemon.wait(REFUSAL).code(), Some(1), "{}", daemon.output());
    assert!(daemon.output().contains("172.20.0.1:8285"), "{}", daemon.output());
    assert_eq!(site.entries(), before, "the store was written: {}", daemon.output());
    drop(port);

    host.exec(&["ip", "route", "add", "10.5.0.0/16", "dev", "wire0"]);
    let mut daemon = site.weftd(0, "h0", &[]);
    assert_eq!(daemon.wait(REFUSAL).code(), Some(1), "{}", daemon.output());
    assert!(daemon.output().contains("10.5.0.0/16 dev wire0"), "{}", daemon.output());
    assert_eq!(site.entries(), before, "the store was written: {}", daemon.output());

    host.exec(&["ip", "route", "del", "10.5.0.0/16"]);
    let mut daemon = site.weftd(0, "h0", &[]);
    site.lease("h0", &mut daemon);
}

#[test]
fn successor_starts_at_once_after_kill_or_stop() {
    for config in [CONFIG, &config("vxlan")] {
        let site = Site::on_etcd(config);
        let mut daemon = site.weftd(0, "h0", &[]);
        let lease = site.lease("h0", &mut daemon);
        daemon.stop(Signal::KILL, STOP);
        // With another subnet file, as one that is moved to a new place.
        let mut next = site.weftd(0, "h0-next", &[]);
        assert_eq!(site.lease("h0-next", &mut next).subnet, lease.subnet);
        // The stop and the start at once.
        next.signal(Signal::TERM);
        let mut last = site.weftd(0, "h0-last", &[]);
        // It waits a second for the other one's end, and a busy machine may take longer.
        let env = site.files.path().join("h0-last/subnet.env");
        wait_until(LEASE_TIMEOUT, "the last one runs", || {
            if last.ended().is_some() {
                last = site.weftd(0, "h0-last", &[]);
            }
            env.exists()
        });
        assert_eq!(site.lease("h0-last", &mut last).subnet, lease.subnet);
        assert_eq!(next.wait(STOP).code(), Some(0), "{}", next.output());
        assert!(last.ended().is_none(), "{}", last.output());
    }
}

#[test]
fn nodes_of_two_prefixes_run_side_by_side() {
    let site = Site::on_etcd(CONFIG);
    let Stored::Etcd(etcd) = &site.stored else { unreachable!("it was made so") };
    let other = r#"{"Network":"10.6.0.0/16","Backend":{"Type":"udp","Port":8286}}"#;
    etcd.ctl(&site.lab.hosts[1], &["put", "/other/config", other]);
    let mut first = site.weftd(0, "first", &[]);
    site.lease("first", &mut first);
    let mut second = site.weftd(0, "second", &["--etcd-prefix=/other"]);
    site.lease("second", &mut second);
    assert!(first.ended().is_none(), "{}", first.output());
}
