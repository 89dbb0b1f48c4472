//! Who owns a subnet when its owner sleeps past the end of its lease and others wait for it.

use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::lab::{Process, SubnetEnv, wait_until};
use crate::support::log_since::LogSince;
use crate::support::members::Version;
use crate::support::pace::Stopwatch;
use crate::support::status::{Status, metric};
use crate::traffic::site::{Entry, Plan, Site};

/// Room for three nodes.
const CONFIG: &str = concat!(
    r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0","SubnetMax":"10.5.3.0","#,
    r#""Backend":{"Type":"udp"}}"#
);

/// Long enough for a slow machine to renew it all the time.
const LEASE: Duration = Duration::from_secs(8);

/// The host whose daemon sleeps, and the one that waits for a subnet.
const SLEEPER: usize = 2;
const LATE: usize = 3;

/// F13 and F16: a node sleeps, another takes its subnet, and the sleeper wakes up.
#[test]
fn suspended_node_with_expired_lease_yields_subnet() {
    let mut site = Site::build(Plan {
        hosts: 4,
        config: Some(CONFIG),
        lease: Some(LEASE),
        ..Plan::of(Version::V3_4)
    });
    site.start_daemons(3);
    let (late, report) = site.with_traffic(|site, _| {
        let others = site.listen();
        let mut late = site.weftd(LATE, &[]);
        wait_until(Duration::from_secs(5), "a full network is counted at each try", || {
            metric(&site.dir(LATE), "flannel_subnets_exhausted_total") >= Some(2.0)
        });
        assert_eq!(late.complaints("10.5."), 1, "not told, or not once: {}", late.output());
        nap(site);
        let taken = sleep_until_taken(site, &mut late);
        wake_up(site);
        let entry = site.entry(&site.key(SLEEPER));
        assert_eq!(entry, Some(taken), "the sleeper wrote over the new owner's lease");
        for (host, told) in others.iter().enumerate() {
            told.assert_no_warning(&site.daemons[host]);
        }
        assert!(late.ended().is_none(), "the new owner ended: {}", late.output());
        late
    });
    report.assert_nothing_lost("a subnet that changes hands");
    // The new owner's pod is the one that is reached now.
    site.daemons[SLEEPER] = late;
    let _pod = site.cluster.pod(LATE, &site.leases[SLEEPER]);
    let address = site.leases[SLEEPER].pod_address().to_string();
    wait_until(Duration::from_secs(3), "the new owner's pod is reached", || {
        site.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.3", &address])
    });
}

/// A second within the lease is nobody's business.
#[track_caller]
fn nap(site: &mut Site) {
    let key = site.key(SLEEPER);
    let before = site.entry(&key);
    let told = LogSince::since(&site.daemons[SLEEPER]);
    site.daemons[SLEEPER].signal(Signal::STOP);
    thread::sleep(Duration::from_secs(1));
    site.daemons[SLEEPER].signal(Signal::CONT);
    thread::sleep(LEASE / 2);
    told.assert_no_warning(&site.daemons[SLEEPER]);
    assert_eq!(site.entry(&key), before, "a nap of a second changes the lease");
}

/// Stops the sleeper until the daemon that was late has its subnet; gives the entry of then.
#[track_caller]
fn sleep_until_taken(site: &mut Site, late: &mut Process) -> Entry {
    const TAKEN: Duration = Duration::from_secs(5);
    let key = site.key(SLEEPER);
    let before = site.entry(&key);
    site.daemons[SLEEPER].signal(Signal::STOP);
    wait_until(LEASE * 3, "the sleeper's lease ends", || site.entry(&key) != before);
    let ended = Stopwatch::start();
    let lease = SubnetEnv::wait(&site.dir(LATE).join("subnet.env"), late);
    println!("the subnet that became free is taken after {:?}", ended.elapsed());
    assert!(ended.elapsed() <= TAKEN, "taken only after {:?}", ended.elapsed());
    assert_eq!(lease, site.leases[SLEEPER], "there was no other free subnet");
    for host in 0..2 {
        wait_until(Duration::from_secs(2), "peers send to the new owner", || {
            let status = Status::of(&site.dir(host)).0;
            let ways = status["routes"].as_array().into_iter().flatten();
            let mut ways = ways.filter_map(|route| route["via"].as_str());
            ways.any(|via| via.starts_with("172.20.0.4:"))
        });
    }
    site.entry(&key).expect("the new owner's lease is in the store")
}

/// Lets the sleeper run, which has to find out, say so and leave.
#[track_caller]
fn wake_up(site: &mut Site) {
    const GIVEN_UP: Duration = Duration::from_secs(3);
    let told = LogSince::since(&site.daemons[SLEEPER]);
    let woken = Stopwatch::start();
    site.daemons[SLEEPER].signal(Signal::CONT);
    let status = site.daemons[SLEEPER].wait(GIVEN_UP);
    println!("the sleeper gave up after {:?}", woken.elapsed());
    let daemon = &site.daemons[SLEEPER];
    assert_eq!(status.code(), Some(1), "a lost subnet looks like a clean end");
    told.assert_pace(daemon);
    // Not always in the first line: a renewal may have been under way, and went unanswered.
    let subnet = site.leases[SLEEPER].network().to_string();
    assert!(told.warned(daemon, &subnet) > 0, "the end of the lease is not logged");
    assert!(told.warned(daemon, "172.20.0.4") > 0, "not to whom: {}", daemon.output());
    let host = &site.cluster.hosts[SLEEPER];
    assert!(!host.succeeds(&["ip", "link", "show", "flannel0"]), "it still attracts packets");
}
