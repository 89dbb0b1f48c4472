//! A host that runs out of threads for a while, and an error in weftd's own code: what
//! weftd lacks it does later, and packets flow meanwhile.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::rules::site::weftd_with;
use crate::support::lab::{LEASE_TIMEOUT, Lab, Process, SubnetEnv, example, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store, reserve};
use crate::support::status::{Status, is_ready, metric};

const SOON: Duration = Duration::from_secs(30);

/// A user whom nobody else is, so that what the kernel counts by user is this test's.
fn user(number: u32) -> Vec<String> {
    let user = 1_870_000_000 + std::process::id() % 100_000 * 10 + number;
    let rights = "-all,+net_admin,+net_raw,+dac_override,+fowner";
    let words = ["/usr/bin/setpriv", "--clear-groups"].map(str::to_owned);
    let more = [
        format!("--reuid={user}"),
        format!("--regid={user}"),
        format!("--inh-caps={rights}"),
        format!("--ambient-caps={rights}"),
    ];
    words.into_iter().chain(more).collect()
}

/// A daemon of that user on host 0.
fn weftd_of(user: &[String], files: &Path, lab: &Lab) -> Process {
    let daemon = spawn_weftd_of(user, files, lab, &[]);
    wait_until(LEASE_TIMEOUT, "weftd is ready", || is_ready(&files.join("h0")));
    daemon
}

/// The same, which need not become ready.
fn spawn_weftd_of(user: &[String], files: &Path, lab: &Lab, flags: &[&str]) -> Process {
    local_store(files, CONFIG);
    // A directory that others own, weftd doesn't write to.
    let own = files.join("h0");
    fs::create_dir(&own).expect("the test's directory is writable");
    let id = user[2].rsplit('=').next().and_then(|id| id.parse().ok());
    let id: u32 = id.expect("it ends in a number");
    std::os::unix::fs::chown(&own, Some(id), None).expect("root gives files away");
    let words: Vec<_> = user.iter().map(String::as_str).collect();
    let usual = ["--iptables-forward-rules=false", "--workers=1", "--engine=mmsg"];
    weftd_with(&words, files, &lab.hosts[0], 0, &[&usual[..], flags].concat())
}

/// Limits what the kernel grants the daemon's user, in whose name it is done: it takes no rights.
fn limit_threads(user: &[String], daemon: &Process, most: u32) {
    let pid = format!("--pid={}", daemon.pid().as_raw_nonzero());
    let mut command = Command::new(&user[0]);
    command.args(&user[1..]).args(["prlimit", &pid, &format!("--nproc={most}:")]);
    assert!(command.status().expect("setpriv runs").success());
}

#[test]
fn a_moment_without_threads_ends_nothing() {
    let (files, lab) = (tempfile::tempdir().unwrap(), Lab::two_hosts());
    let user = user(1);
    let mut daemon = weftd_of(&user, files.path(), &lab);
    let own = files.path().join("h0");
    limit_threads(&user, &daemon, 1);
    reserve(files.path(), "10.5.200.0-24", Ipv4Addr::new(172, 20, 0, 2));
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1400"]);
    let counted = |part: &str| Status::of(&own).0[part]["failures"].as_u64();
    for part in ["store", "subnet_file"] {
        wait_until(SOON, &format!("{part} lacks a thread"), || {
            assert!(daemon.ended().is_none(), "{}", daemon.output());
            counted(part) >= Some(1)
        });
    }
    // EAGAIN, of both.
    wait_until(SOON, "the log says what they lack", || daemon.complaints("os error 11") >= 2);
    assert!(daemon.ended().is_none(), "{}", daemon.output());
    limit_threads(&user, &daemon, 1000);
    wait_until(SOON, "the peer is known", || Status::of(&own).routes() == 1);
    wait_until(SOON, "subnet.env has the new MTU", || {
        SubnetEnv::read(&own.join("subnet.env")).is_some_and(|lease| lease.mtu_bytes == 1372)
    });
    wait_until(SOON, "the cache is written", || {
        Status::of(&own).0["cache"]["writes"].as_u64().is_some_and(|writes| writes > 0)
    });
    assert_eq!(metric(&own, "flannel_internal_errors_total"), Some(0.0), "{}", daemon.output());
}

/// Stands before the first start of iptables, until it may go.
const GATE: &str = r#"#!/bin/sh
cd "${0%/*}"
: > asked
until [ -e go ]; do sleep 0.05; done
exec "$(PATH=${PATH#*:} command -v iptables)" "$@"
"#;

#[test]
fn rules_that_cannot_be_set_for_a_moment_end_no_start() {
    let (files, lab) = (tempfile::tempdir().unwrap(), Lab::two_hosts());
    let (user, gate) = (user(2), files.path().join("gate"));
    fs::create_dir(&gate).unwrap();
    fs::write(gate.join("iptables"), GATE).unwrap();
    for (path, mode) in [(gate.clone(), 0o777), (gate.join("iptables"), 0o755)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let path = format!("PATH={}:{}", gate.display(), std::env::var("PATH").unwrap());
    let words = [&user[..], &["/usr/bin/env".to_owned(), path]].concat();
    let mut daemon = spawn_weftd_of(&words, files.path(), &lab, &["--ip-masq"]);
    wait_until(SOON, "iptables is started", || gate.join("asked").exists());
    limit_threads(&user, &daemon, 1);
    fs::write(gate.join("go"), "").unwrap();
    let own = files.path().join("h0");
    let rules = |what: &str| Status::try_of(&own).map(|status| status.0["rules"][what].clone());
    // More often than a start puts up with a refusal.
    wait_until(SOON, "the rules were tried again and again", || {
        assert!(daemon.ended().is_none(), "{}", daemon.output());
        rules("failures").is_some_and(|count| count.as_u64() > Some(4))
    });
    assert!(daemon.complaints("os error 11") > 0, "{}", daemon.output());
    limit_threads(&user, &daemon, 1000);
    wait_until(SOON, "the rules are set", || rules("in_place") == Some(true.into()));
    wait_until(SOON, "weftd is ready", || is_ready(&own));
}

#[test]
fn a_panic_of_the_control_plane_loses_no_packet() {
    let mut overlay = Overlay::start();
    overlay.daemons[0].stop(rustix::process::Signal::TERM, SOON);
    let peers: Vec<_> = (1..=4).map(|last| format!("10.5.20{last}.0-24")).collect();
    for (last, subnet) in (1..).zip(&peers) {
        reserve(overlay.files(), subnet, Ipv4Addr::new(192, 0, 2, last));
    }
    let own = overlay.dir(0);
    let program = example("brief-leases").display().to_string();
    let file = |name: &str| own.join(name).display().to_string();
    let mut daemon = overlay.lab.hosts[0].spawn(&[
        "env",
        "PANIC_WITH_PEERS=1",
        &program,
        &format!("--local-store={}", overlay.files().join("store").display()),
        "--iface=172.20.0.1",
        "--iptables-forward-rules=false",
        &format!("--subnet-file={}", file("subnet.env")),
        &format!("--status-socket={}", file("weft.sock")),
    ]);
    let knows = |count| Status::try_of(&own).is_some_and(|status| status.routes() == count);
    wait_until(SOON, "all peers are known", || knows(5));
    overlay.traffic_resumes(SOON, "the start");
    let target = overlay.pod(1).to_string();
    let ping = ["ping", "-q", "-i0.05", "-c200", "-W30", &target];
    let mut pings = overlay.lab.pods[0].spawn(&ping);
    for subnet in &peers {
        fs::remove_file(overlay.files().join("store/subnets").join(subnet)).unwrap();
    }
    wait_until(SOON, "the panic is counted", || {
        metric(&own, "flannel_internal_errors_total") >= Some(1.0)
    });
    wait_until(SOON, "the control plane works again", || knows(1));
    // The second run goes by the peers that the first one knew; the third one asks the store.
    assert_eq!(daemon.complaints("panicked"), 2, "{}", daemon.output());
    pings.wait(Duration::from_secs(120));
    assert!(pings.output().contains(" 0% packet loss"), "{}{}", pings.output(), daemon.output());
    assert!(daemon.ended().is_none(), "{}", daemon.output());
    assert_eq!(daemon.stop(rustix::process::Signal::TERM, SOON).code(), Some(0));
}
