//! What goes wrong with the firewall's programs: rules flushed under traffic, a lock that is held,
//! a program that is not there.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use crate::rules::drop_forwarded;
use crate::rules::site::{
    HOST_OUTSIDE, OUTSIDE, Site, Variant, rules_in_place, source_seen, weftd_with,
};
use crate::support::cost::wait_for_fewer_rights;
use crate::support::lab::{LEASE_TIMEOUT, Lab, Namespace, Process, comes_true, wait_until};
use crate::support::overlay::local_store;
use crate::support::pace::Stopwatch;

/// `--iptables-resync` in these tests.
const RESYNC: Duration = Duration::from_secs(1);
/// For a repair itself, and the machine.
const SLACK: Duration = Duration::from_millis(500);

#[test]
fn flushed_rules_return_within_the_resync() {
    for variant in Variant::ALL {
        let flags = ["--ip-masq", "--iptables-resync=1"];
        let site = Site::start(variant, &flags, |dir, host| match variant {
            Variant::Nft => {}
            Variant::IptablesNft | Variant::IptablesLegacy => {
                variant.iptables(dir, host, &["-P", "FORWARD", "DROP"]);
            }
        });
        (0..2).for_each(|host| site.wait_for_rules(host));
        let (host, pods) = (&site.lab.hosts[0], &site.lab.pods);
        let own = [site.leases[0].pod_address(), site.leases[1].pod_address()];
        let whole = variant.rules(site.dir(), host);
        let masqueraded = || source_seen((&pods[0], own[0]), (&site.outside, OUTSIDE));
        let (mut outages, watch) = (Vec::new(), Stopwatch::start());
        let (_, arrivals) = while_sending((&pods[0], &pods[1]), own[1], || {
            for _ in 0..3 {
                variant.flush(site.dir(), host);
                let flushed = Instant::now();
                wait_until(RESYNC + SLACK, "new flows are masqueraded again", || {
                    masqueraded() == Some(HOST_OUTSIDE)
                });
                outages.push(flushed.elapsed());
            }
        });
        let gaps = arrivals.windows(2).map(|pair| pair[1] - pair[0]);
        let gap = watch.of(gaps.max().expect("pods talk"));
        println!(
            "{variant:?}: masqueraded again after {outages:?}, pods silent for {gap:?} at most"
        );
        assert!(gap <= RESYNC + SLACK, "{variant:?}: pods did not reach each other for {gap:?}");
        // Tables are filled one after the other, and then it is counted.
        wait_until(RESYNC + SLACK, "all is back, and three repairs are counted", || {
            let status = crate::support::status::Status::of(&site.dir().join("h0"));
            let repairs = status.0["rules"]["repairs"].as_u64();
            variant.rules(site.dir(), host) == whole && repairs >= Some(3)
        });
        let log = site.daemons[0].output();
        assert!(!log.contains("recreating rules"), "one transaction repairs them: {log}");
    }
}

/// The chain is emptied and filled again while packets pass by it.
#[test]
fn a_repair_loses_no_packet() {
    for variant in Variant::ALL {
        let site = Site::start(variant, &["--iptables-resync=1"], drop_forwarded(variant));
        (0..2).for_each(|host| site.wait_for_rules(host));
        let (host, pods) = (&site.lab.hosts[0], &site.lab.pods);
        let whole = variant.rules(site.dir(), host);
        let (sent, arrivals) =
            while_sending((&pods[0], &pods[1]), site.leases[1].pod_address(), || {
                for _ in 0..3 {
                    // The first rule lets these packets pass, the second one those to here.
                    remove_second_forward_rule(variant, site.dir(), host);
                    wait_until(RESYNC + SLACK, "the second rule comes back", || {
                        variant.rules(site.dir(), host) == whole
                    });
                }
            });
        assert_eq!(arrivals.len(), sent, "{variant:?}: packets sent against packets arrived");
    }
}

fn remove_second_forward_rule(variant: Variant, dir: &Path, host: &Namespace) {
    match variant {
        Variant::Nft => {
            let list = host.exec(&["nft", "-a", "list", "chain", "ip", "flannel-ipv4", "forward"]);
            let rule = list.lines().find(|line| line.contains("daddr")).expect("it is there");
            let handle = rule.split("handle ").nth(1).expect("a rule has a handle");
            host.exec(&["nft", "delete rule ip flannel-ipv4 forward handle", handle]);
        }
        Variant::IptablesNft | Variant::IptablesLegacy => {
            variant.iptables(dir, host, &["-D", "FLANNEL-FWD", "2"]);
        }
    }
}

/// Sends from one pod to the other every 5 ms while `work` runs; how many the kernel took, and when
/// they arrived.
fn while_sending(
    (from, to): (&Namespace, &Namespace),
    address: Ipv4Addr,
    work: impl FnOnce(),
) -> (usize, Vec<Instant>) {
    let receiver = to.enter(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a free port"));
    receiver.set_read_timeout(Some(Duration::from_millis(20))).expect("a time is a time");
    let target = SocketAddrV4::new(address, receiver.local_addr().expect("it is bound").port());
    let sender = from.enter(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a free port"));
    let (is_over, is_drained) = (AtomicBool::new(false), AtomicBool::new(false));
    let arrived = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let sent = scope.spawn(|| {
            let mut sent = 0;
            while !is_over.load(Ordering::Relaxed) {
                sent += usize::from(sender.send_to(b"still there?", target).is_ok());
                std::thread::sleep(Duration::from_millis(5));
            }
            sent
        });
        let arrivals = scope.spawn(|| {
            let mut arrivals = Vec::new();
            while !is_drained.load(Ordering::Relaxed) {
                if receiver.recv(&mut [0; 64]).is_ok() {
                    arrivals.push(Instant::now());
                    arrived.store(arrivals.len(), Ordering::Relaxed);
                }
            }
            arrivals
        });
        work();
        is_over.store(true, Ordering::Relaxed);
        let sent = sent.join().expect("the sender does not fail");
        // The last ones are on their way when the sender ends.
        comes_true(Duration::from_secs(2), || arrived.load(Ordering::Relaxed) >= sent);
        is_drained.store(true, Ordering::Relaxed);
        (sent, arrivals.join().expect("the receiver does not fail"))
    })
}

/// One host, and a configuration for its weftd.
pub(super) struct Host {
    pub(super) lab: Lab,
    pub(super) files: tempfile::TempDir,
}

impl Host {
    fn new(variant: Variant) -> Self {
        Self::with(&variant.config("10.5.0.0/16"))
    }

    pub(super) fn with(config: &str) -> Self {
        let (lab, files) = (Lab::two_hosts(), tempfile::tempdir().expect("a directory"));
        local_store(files.path(), config);
        // Of a network that has IPv6 a node needs one, whose doubles nobody is asked for.
        lab.hosts[0].exec(&["ip", "address", "add", "fd99::1/64", "dev", "wire0", "nodad"]);
        Self { lab, files }
    }

    pub(super) fn dir(&self) -> std::path::PathBuf {
        self.files.path().join("h0")
    }

    pub(super) fn weftd(&self, variables: &[&str], arguments: &[&str]) -> Process {
        weftd_with(variables, self.files.path(), &self.lab.hosts[0], 0, arguments)
    }

    pub(super) fn is_ready(&self) -> bool {
        let status = crate::support::status::Status::try_of(&self.dir());
        status.is_some_and(|status| status.0["ready"] == true)
    }
}

#[test]
fn held_lock_is_logged_and_awaited() {
    let variant = Variant::IptablesLegacy;
    let host = Host::new(variant);
    let path = host.files.path().join("held.lock");
    let lock = std::fs::File::create(&path).expect("the test's directory is writable");
    flock(&lock, FlockOperation::LockExclusive).expect("nobody else locks");
    let variables = [
        format!("PATH={}:/usr/sbin:/usr/bin", variant.programs(host.files.path()).display()),
        format!("XTABLES_LOCKFILE={}", path.display()),
    ];
    let variables = variables.each_ref().map(String::as_str);
    let mut daemon = host.weftd(&variables, &["--ip-masq"]);
    wait_until(Duration::from_secs(12), "the holder of the lock is told of", || {
        daemon.complaints("/run/xtables.lock") > 0
    });
    assert!(daemon.ended().is_none(), "{}", daemon.output());
    assert!(host.dir().join("subnet.env").exists(), "packets need not wait for a lock");
    assert!(!host.is_ready(), "ready without the rules that were asked for");
    assert_eq!(rules_in_place(&host.dir()), Some(false));
    let released = Instant::now();
    drop(lock);
    wait_until(Duration::from_secs(5), "the rules are set once the lock is free", || {
        rules_in_place(&host.dir()) == Some(true) && host.is_ready()
    });
    println!("in place {:?} after the lock became free", released.elapsed());
    assert_eq!(variant.rules(host.files.path(), &host.lab.hosts[0]).len(), 10);
}

/// A container that starts again finds its rules, and a `/run` without the lock: the first repair
/// comes when weftd may not make files there any more.
#[test]
fn a_repair_locks_after_a_start_that_changed_nothing() {
    let variant = Variant::IptablesLegacy;
    let host = Host::new(variant);
    let (run, dir) = (host.files.path().join("run"), host.files.path());
    std::fs::create_dir(&run).expect("the test's directory is writable");
    let lock = run.join("xtables.lock");
    let variables = [
        format!("PATH={}:/usr/sbin:/usr/bin", variant.programs(dir).display()),
        format!("XTABLES_LOCKFILE={}", lock.display()),
    ];
    let variables = variables.each_ref().map(String::as_str);
    let rules = || variant.rules(dir, &host.lab.hosts[0]);
    let start = || {
        let daemon = host.weftd(&variables, &["--ip-masq", "--iptables-resync=1"]);
        wait_until(LEASE_TIMEOUT, "the rules are in place", || {
            host.is_ready() && rules_in_place(&host.dir()) == Some(true)
        });
        daemon
    };
    let mut first = start();
    first.stop(Signal::TERM, Duration::from_secs(2));
    std::fs::remove_file(&lock).expect("iptables has made its lock");
    let whole = rules();
    assert_eq!(whole.len(), 10, "a stop leaves the rules");
    let daemon = start();
    wait_for_fewer_rights(&daemon);
    variant.flush(dir, &host.lab.hosts[0]);
    wait_until(Duration::from_secs(5), "the rules are repaired", || rules() == whole);
    assert!(!daemon.output().contains("denied"), "{}", daemon.output());
}

/// A directory with no program at all in it.
fn no_programs(host: &Host) -> String {
    let empty = host.files.path().join("empty");
    std::fs::create_dir_all(&empty).expect("the test's directory is writable");
    format!("PATH={}", empty.display())
}

#[test]
fn masquerading_without_iptables_names_the_package() {
    let host = Host::new(Variant::IptablesNft);
    let path = no_programs(&host);
    let mut daemon = host.weftd(&[&path], &["--ip-masq"]);
    let status = daemon.wait(LEASE_TIMEOUT);
    assert_eq!(status.code(), Some(1), "{}", daemon.output());
    let log = daemon.output();
    assert!(!log.contains("retrying"), "it ends instead: {log}");
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("PATH") && last.contains("iptables"), "{log}");
}

#[test]
fn nftables_without_nft_names_the_package() {
    let host = Host::new(Variant::Nft);
    let path = no_programs(&host);
    let mut daemon = host.weftd(&[&path], &[]);
    let status = daemon.wait(LEASE_TIMEOUT);
    assert_eq!(status.code(), Some(1), "{}", daemon.output());
    let log = daemon.output();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("PATH") && last.contains("nftables"), "{log}");
}

#[test]
fn missing_iptables_costs_only_forward_rules() {
    let host = Host::new(Variant::IptablesNft);
    let mut daemon = host.weftd(&[&no_programs(&host)], &["--iptables-resync=1"]);
    wait_until(LEASE_TIMEOUT, "weftd is ready without forward rules", || host.is_ready());
    wait_until(LEASE_TIMEOUT, "it is told", || daemon.complaints("iptables") > 0);
    assert_eq!(daemon.complaints("iptables"), 1, "{}", daemon.output());
    let failures = || {
        let status = crate::support::status::Status::of(&host.dir());
        status.0["rules"]["failures"].as_u64().unwrap_or(0)
    };
    wait_until(Duration::from_secs(10), "it is tried again", || failures() >= 3);
    assert_eq!(daemon.complaints("iptables"), 1, "{}", daemon.output());
    // Somebody installs it.
    for name in ["iptables", "iptables-save", "iptables-restore"] {
        let from = Variant::IptablesNft.programs(host.files.path()).join(name);
        std::fs::rename(from, host.files.path().join("empty").join(name)).expect("one disk");
    }
    wait_until(Duration::from_secs(5), "the rules are set after all", || {
        rules_in_place(&host.dir()) == Some(true)
    });
    assert!(daemon.ended().is_none());
}

/// A rule that iptables has no words for, in a chain of its table `filter`.
fn add_rule_of_nft(namespace: &Namespace, chain: &str, hook: &str) {
    namespace.exec(&["nft", "add table ip filter"]);
    let hook = format!("{{ type filter hook {hook} priority 0; }}");
    namespace.exec(&["nft", &format!("add chain ip filter {chain} {hook}")]);
    namespace.exec(&["nft", &format!("add rule ip filter {chain} numgen random mod 2 0 continue")]);
}

#[test]
fn rules_of_nft_beside_ours_are_no_hindrance() {
    let host = Host::new(Variant::IptablesNft);
    let namespace = &host.lab.hosts[0];
    add_rule_of_nft(namespace, "INPUT", "input");
    let daemon = host.weftd(&["PATH=/usr/sbin:/usr/bin"], &["--iptables-resync=1"]);
    wait_until(LEASE_TIMEOUT, "the rules are in place", || {
        rules_in_place(&host.dir()) == Some(true)
    });
    let checks = || {
        let status = crate::support::status::Status::of(&host.dir());
        status.0["rules"]["checks"].as_u64().unwrap_or(0)
    };
    wait_until(Duration::from_secs(10), "the rules are looked at", || checks() >= 3);
    let jumps = namespace.exec(&["iptables", "-S", "FORWARD"]).matches("FLANNEL-FWD").count();
    assert_eq!(jumps, 1, "{}", daemon.output());
}

#[test]
fn unreadable_chain_gets_no_repeated_jumps() {
    let host = Host::new(Variant::IptablesNft);
    let namespace = &host.lab.hosts[0];
    add_rule_of_nft(namespace, "FORWARD", "forward");
    let daemon = host.weftd(&["PATH=/usr/sbin:/usr/bin"], &["--iptables-resync=1"]);
    wait_until(Duration::from_secs(20), "the rules of nft are told of", || {
        daemon.complaints("EnableNFTables") > 0
    });
    assert!(!namespace.exec(&["nft", "list", "ruleset"]).contains("FLANNEL"));
}
