//! The address of the interface beneath the overlay is replaced while everything runs.

use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use weft::status::Cause;

use crate::support::lab::{LEASE_TIMEOUT, Lab, SubnetEnv, UNDERLAY, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store};
use crate::support::pace::Stopwatch;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

/// Both nodes are promised to agree within this time.
const CONVERGE: Duration = Duration::from_secs(2);

/// What a look itself may take, however late it begins.
const LOOK: Duration = Duration::from_millis(500);

/// Goes before the lab's own way to choose it, by an address, once that is gone.
const BY_NAME: &str = "--iface=wire0";

/// The n-th next address of host 0.
fn next(number: u8) -> Ipv4Addr {
    let [a, b, c, _] = UNDERLAY[0].octets();
    Ipv4Addr::new(a, b, c, 100 + number)
}

/// As DHCP or an operator does it: the old one goes, the new one comes.
fn replace(overlay: &Overlay, old: Ipv4Addr, new: Ipv4Addr) {
    let host = &overlay.lab.hosts[0];
    host.exec(&["ip", "address", "del", &format!("{old}/24"), "dev", "wire0"]);
    host.address("wire0", &format!("{new}/24"));
}

/// What host 1's daemon sends host 0's subnet to.
fn way_to_host_0(overlay: &Overlay) -> String {
    let status = overlay.status(1).0;
    let via = status["routes"][0]["via"].as_str().unwrap_or_default();
    via.trim_end_matches(":8285").to_owned()
}

#[test]
fn tunnel_and_lease_follow_a_replaced_address() {
    let overlay = Overlay::start_with(CONFIG, [&[BY_NAME], &[]]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let subnet = overlay.leases[0].network();
    let [near, far] = &overlay.lab.pods;
    thread::scope(|scope| {
        let transfer = scope.spawn(|| tcp_transfer(near, far, overlay.pod(1), 48 << 20, true));
        let mut old = UNDERLAY[0];
        for new in (0..3).map(next) {
            thread::sleep(Duration::from_millis(300));
            let lines = overlay.daemons[0].output().lines().count();
            replace(&overlay, old, new);
            let started = Stopwatch::start();
            overlay.traffic_resumes(CONVERGE, "the address was replaced");
            let target = overlay.pod(0).to_string();
            let left = CONVERGE.saturating_sub(started.elapsed()).max(LOOK);
            wait_until(left, "the other way too", || {
                overlay.lab.pods[1].succeeds(&["ping", "-q", "-c1", "-W0.1", &target])
            });
            println!("{old} to {new}: both ways after {:?}", started.elapsed());
            // The kernel's programs go on between the old addresses until each side knows better.
            let left = CONVERGE.saturating_sub(started.elapsed()).max(LOOK);
            wait_until(left, "the peer sends to the new address", || {
                way_to_host_0(&overlay) == new.to_string()
            });
            let status = overlay.status(0).0;
            assert_eq!(status["lease"]["public_ip"], new.to_string(), "a wrong status");
            assert_eq!(status["lease"]["subnet"], format!("{subnet}/24"), "another subnet");
            for words in [format!("{old} to {new}"), format!("PublicIP {new}")] {
                wait_until(CONVERGE, &format!("the log says {words:?}"), || {
                    overlay.daemons[0]
                        .output()
                        .lines()
                        .skip(lines)
                        .any(|line| line.contains(&words))
                });
            }
            let log = overlay.daemons[0].output();
            let told: Vec<_> = log.lines().skip(lines).collect();
            assert!(told.len() <= 10, "{} lines for one change: {told:?}", told.len());
            old = new;
        }
        println!("TCP through three changes: {:?}", transfer.join().unwrap());
    });
    for host in 0..2 {
        Status::settled(&overlay.dir(host));
    }
}

#[test]
fn a_low_port_follows_and_what_is_in_the_way_is_named() {
    let config = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":443}}"#;
    let overlay = Overlay::start_with(config, [&[BY_NAME], &[]]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    let host = &overlay.lab.hosts[0];
    let taken = host.enter(|| {
        host.address("lo", &format!("{}/32", next(0)));
        std::net::UdpSocket::bind((next(0), 443)).expect("nobody has the port there")
    });
    host.exec(&["ip", "address", "del", &format!("{}/32", next(0)), "dev", "lo"]);
    replace(&overlay, UNDERLAY[0], next(0));
    wait_until(Duration::from_secs(20), "the status says that the tunnel stays", || {
        let status = overlay.status(0);
        status.causes() == [Cause::DataplaneHindered]
            && status.0["tunnel"]["udp"] == format!("{}:443", UNDERLAY[0])
    });
    drop(taken);
    // By a control plane that has given up most of root's rights.
    overlay.traffic_resumes(Duration::from_secs(60), "the port became free");
    wait_until(Duration::from_secs(20), "nothing is wrong any more", || {
        overlay.status(0).0["verdict"]["state"] == "ready"
    });
}

#[test]
fn explicit_public_ip_moves_only_the_socket() {
    let public = UNDERLAY[0].to_string();
    let arguments = [BY_NAME, "--public-ip", &public];
    let overlay = Overlay::start_with(CONFIG, [&arguments, &[]]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    replace(&overlay, UNDERLAY[0], next(0));
    let moved = format!("went from {public} to {}", next(0));
    wait_until(CONVERGE, "the socket moves", || {
        let log = overlay.daemons[0].output();
        let (_, after) = log.split_once(&moved).unwrap_or_default();
        after.contains("made again")
    });
    thread::sleep(Duration::from_millis(200));
    assert_eq!(way_to_host_0(&overlay), public, "the peers were told the inner address");
    assert_eq!(overlay.status(0).0["lease"]["public_ip"], public);
    let near = &overlay.lab.hosts[0];
    let sockets = near.exec(&["ss", "-uln"]);
    assert!(sockets.contains(&format!("{}:8285", next(0))), "bound elsewhere: {sockets}");
}

#[test]
fn unfollowed_address_change_asks_for_a_restart() {
    let mut overlay = Overlay::start_with(CONFIG, [&[BY_NAME, "--follow-address=false"], &[]]);
    overlay.traffic_resumes(Duration::from_secs(5), "the start");
    replace(&overlay, UNDERLAY[0], next(0));
    wait_until(CONVERGE, "the operator is told", || {
        overlay.daemons[0].complaints("--follow-address") > 0
    });
    thread::sleep(CONVERGE);
    let said = overlay.daemons[0].complaints("--follow-address");
    assert_eq!(said, 1, "said again and again: {}", overlay.daemons[0].output());
    assert!(overlay.daemons[0].ended().is_none(), "it ended");
    assert_eq!(way_to_host_0(&overlay), UNDERLAY[0].to_string(), "the lease followed");
    let is_told = || overlay.status(0).causes().contains(&Cause::DataplaneHindered);
    assert!(is_told(), "nothing can leave the host, and its status is green");
    // The address comes back, and traffic with it.
    replace(&overlay, next(0), UNDERLAY[0]);
    overlay.traffic_resumes(CONVERGE, "the old address came back");
    wait_until(CONVERGE, "the status is green again", || !is_told());
}

/// As keepalived gives it to whoever serves it now.
#[test]
fn a_virtual_address_is_not_taken_for_the_next_one() {
    let overlay = Overlay::start_with(CONFIG, [&[BY_NAME], &[]]);
    let host = &overlay.lab.hosts[0];
    let own = format!("{}/24", UNDERLAY[0]);
    let with_own = |what: &str| host.exec(&["ip", "address", what, &own, "dev", "wire0"]);
    host.address("wire0", "172.21.0.9/32");
    thread::sleep(Duration::from_secs(12));
    with_own("del");
    let moved = format!("went from {}", UNDERLAY[0]);
    wait_until(Duration::from_secs(8), "the operator hears of the loss", || {
        let log = overlay.daemons[0].output();
        assert!(!log.contains(&moved), "{log}");
        overlay.daemons[0].complaints(&UNDERLAY[0].to_string()) > 0
    });
    with_own("add");
    overlay.traffic_resumes(Duration::from_secs(20), "the address came back");
    let log = overlay.daemons[0].output();
    assert!(!log.contains(&moved), "{log}");
    with_own("del");
    let public_ip = || overlay.status(0).0["lease"]["public_ip"].clone();
    wait_until(Duration::from_secs(40), "what stays away is replaced", || {
        public_ip() == "172.21.0.9"
    });
    with_own("add");
    wait_until(Duration::from_secs(20), "its return is", || public_ip() == UNDERLAY[0].to_string());
    overlay.traffic_resumes(Duration::from_secs(20), "the address came back");
}

#[test]
fn duplicate_public_ip_waits_for_its_holder() {
    let files = tempfile::tempdir().expect("a directory for the test");
    let store = local_store(files.path(), CONFIG);
    let lab = Lab::two_hosts();
    let dir = |host: usize| files.path().join(format!("h{host}"));
    let mut first = lab.weftd(0, &dir(0), &[&store]);
    let held = SubnetEnv::wait(&dir(0).join("subnet.env"), &mut first);
    let public = UNDERLAY[0].to_string();
    let mut second = lab.weftd(1, &dir(1), &[&store, "--public-ip", &public]);
    // With the whole start of a weftd.
    wait_until(LEASE_TIMEOUT, "the second is told whose the address is", || {
        second.complaints(&public) > 0
    });
    thread::sleep(CONVERGE);
    assert!(SubnetEnv::read(&dir(1).join("subnet.env")).is_none(), "two nodes share a subnet");
    assert!(second.ended().is_none(), "a supervisor would start it again and again");
    assert_eq!(second.complaints(&public), 1, "said again and again: {}", second.output());
    first.signal(Signal::KILL);
    let started = Instant::now();
    let taken = SubnetEnv::wait(&dir(1).join("subnet.env"), &mut second);
    println!("taken over after {:?}", started.elapsed());
    assert_eq!(taken.subnet, held.subnet, "the address kept its subnet");
}

#[test]
fn a_start_that_waits_goes_by_the_next_address() {
    let files = tempfile::tempdir().expect("a directory for the test");
    let store = local_store(files.path(), CONFIG);
    let lab = Lab::two_hosts();
    let dir = |host: usize| files.path().join(format!("h{host}"));
    let mut first = lab.weftd(0, &dir(0), &[&store]);
    SubnetEnv::wait(&dir(0).join("subnet.env"), &mut first);
    let host = &lab.hosts[1];
    let replace = |old: Ipv4Addr, new: Ipv4Addr| {
        host.exec(&["ip", "address", "del", &format!("{old}/24"), "dev", "wire0"]);
        host.address("wire0", &format!("{new}/24"));
    };
    replace(UNDERLAY[1], UNDERLAY[0]);
    let mut second = lab.weftd(1, &dir(1), &[&store, BY_NAME]);
    let public = UNDERLAY[0].to_string();
    wait_until(LEASE_TIMEOUT, "the second is told whose the address is", || {
        second.complaints(&public) > 0
    });
    replace(UNDERLAY[0], next(1));
    SubnetEnv::wait(&dir(1).join("subnet.env"), &mut second);
    let status = Status::of(&dir(1)).0;
    assert_eq!(status["lease"]["public_ip"], next(1).to_string());
}

/// As anycast and unnumbered routing protocols have it.
#[test]
fn address_on_the_loopback_keeps_the_interface() {
    for (backend, kind) in [("udp", "flannel0"), ("vxlan", "flannel.1"), ("host-gw", "wire0")] {
        let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend}"}}}}"#);
        let mut overlay = Overlay::start_with(&config, [&[], &[]]);
        overlay.traffic_resumes(CONVERGE, "the start");
        let near = &overlay.lab.hosts[0];
        let device = || near.exec(&["ip", "-o", "link", "show", kind]);
        let before = device();
        let lines = overlay.daemons[0].output().lines().count();
        near.exec(&["ip", "address", "add", &format!("{}/32", UNDERLAY[0]), "dev", "lo"]);
        // The kernel's news are in the daemon's hands, and whatever it does of them is done.
        thread::sleep(CONVERGE);
        assert_eq!(device(), before, "{backend}: made again, or with another MTU");
        assert!(overlay.lab.ping(0, overlay.pod(1), 56), "{backend}: no traffic");
        let log = overlay.daemons[0].output();
        let told: Vec<_> = log.lines().skip(lines).filter(|line| !line.starts_with('I')).collect();
        assert!(told.is_empty(), "{backend}: nothing has happened: {told:?}");
        overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
        overlay.restart(0, &["--public-ip", &UNDERLAY[0].to_string()]);
        overlay.traffic_resumes(Duration::from_secs(10), "a restart");
        wait_until(Duration::from_secs(10), "the daemon is ready again", || {
            Status::try_of(&overlay.dir(0)).is_some_and(|status| status.0["ready"] == true)
        });
        assert_eq!(overlay.status(0).0["interface"], "wire0", "{backend}: found elsewhere");
    }
}

#[test]
fn nobody_is_blamed_for_programs_that_went_with_their_interface() {
    let flags: &[&str] = &[BY_NAME, "--fast-path=on"];
    let overlay = Overlay::start_with(CONFIG, [flags, flags]);
    overlay.wait_until_carried();
    overlay.lab.hosts[0].exec(&["ip", "link", "del", "wire0"]);
    let why = || overlay.status(0).0["fast_path"]["why"].clone();
    wait_until(Duration::from_secs(30), "the fast path is off", || !why().is_null());
    assert_ne!(why(), "evicted");
}
