//! Hosts on which io_uring can't be used, each for a reason of its own: `--engine=auto` carries
//! packets with mmsg and tells why, once; `--engine=io_uring` ends and tells what to do.
//!
//! The sysctl is the whole machine's. Needs root, for it makes network namespaces.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, capabilities, remove_capability_from_bounding_set, set_capabilities,
};
use tempfile::TempDir;
use weft::engine::{Engine, RingError};

use crate::alone;
use crate::support::dataplane::*;
use crate::support::lab::{LEASE_TIMEOUT, Namespace, Process, SubnetEnv, WEFTD, wait_until};
use crate::support::overlay::{CONFIG, local_store};
use crate::support::pace::Stopwatch;
use crate::support::seccomp::{Refusal, make_calls_dear};
use crate::support::status::Status;

/// A worker that can't have io_uring moves packets within this time all the same.
const FALLBACK: Duration = Duration::from_millis(50);

const REPAIR: Duration = Duration::from_secs(1);

const SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";

/// The sysctl with another value. A shell puts it back when its input ends: with this guard, or
/// with the whole program, however that ends.
struct Disabled(Child);

impl Disabled {
    fn set(value: &str) -> Self {
        let before = fs::read_to_string(SYSCTL).expect("kernel 6.6 or later");
        let script = format!("trap '' INT TERM HUP; cat; echo {} > {SYSCTL}", before.trim());
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdin(Stdio::piped());
        let guard = Self(command.spawn().expect("there is a shell"));
        fs::write(SYSCTL, value).expect("root may set it");
        guard
    }
}

impl Drop for Disabled {
    fn drop(&mut self) {
        // Closes its input first.
        self.0.wait().expect("our own child can be waited for");
    }
}

/// Drops a privilege of the calling thread and of what it starts.
fn without(privilege: CapabilitySet) {
    let mut sets = capabilities(None).expect("a thread may ask");
    sets.effective.remove(privilege);
    sets.permitted.remove(privilege);
    sets.inheritable.remove(privilege);
    set_capabilities(None, sets).expect("anybody may have less");
    remove_capability_from_bounding_set(privilege).expect("root may");
}

/// Starts a worker where `forbid` was called: it is there within the time that is promised, says
/// why it has no ring, and moves packets.
fn check_worker(cause: &str, forbid: impl FnOnce() + Send, is_it: impl Fn(&RingError) -> bool) {
    let mut started = None;
    let options = Options { engine: None, ..Options::ALL };
    let host = Host::start_with(options, || {
        forbid();
        started = Some(Stopwatch::start());
    });
    let took = started.expect("it was started").elapsed();
    assert!(took < FALLBACK, "{cause}: a worker took {took:?} to fall back");
    let running = &host.worker.as_ref().expect("it runs").running;
    assert_eq!(running.engine, Engine::Mmsg, "{cause}");
    let why = running.fallback.as_ref().expect("the worker says why it has no ring");
    assert!(is_it(why), "{cause}: the operator is told of another cause, {why:?}");
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let packet = marked(POD, FAR, 1, 64);
    pod.write(&packet);
    assert_eq!(receive_all(&peer, 1), after_hops(&[packet], HOPS), "{cause}");
}

fn errno_of_setup(error: &RingError) -> Option<i32> {
    if let RingError::Setup(source) = error { source.raw_os_error() } else { None }
}

#[test]
fn worker_without_io_uring_says_why() {
    let _alone = alone();
    for errno in [libc::ENOSYS, libc::EPERM, libc::ENOMEM, libc::EMFILE] {
        let refusal = Refusal::always(libc::SYS_io_uring_setup, errno);
        let is_it = |error: &RingError| errno_of_setup(error) == Some(errno);
        check_worker(&format!("setup, errno {errno}"), || refusal.install(), is_it);
    }
    let refusal = Refusal::always(libc::SYS_io_uring_register, libc::EPERM);
    let is_it = |error: &RingError| matches!(error, RingError::Register(_));
    check_worker("register", || refusal.install(), is_it);
    let refusal = Refusal::always(libc::SYS_io_uring_enter, libc::EPERM);
    let is_it = |error: &RingError| matches!(error, RingError::Enter(_));
    check_worker("enter", || refusal.install(), is_it);
}

#[test]
fn worker_with_io_uring_disabled_says_why() {
    let _alone = alone();
    let is_it = |error: &RingError| errno_of_setup(error) == Some(libc::EPERM);
    {
        let _disabled = Disabled::set("2");
        check_worker("disabled, 2", || {}, is_it);
    }
    let _disabled = Disabled::set("1");
    check_worker("disabled, 1", || without(CapabilitySet::SYS_ADMIN), is_it);
}

/// Some kernels count the ring as locked memory, others don't: either way packets flow.
#[test]
fn worker_without_locked_memory_moves_packets() {
    let _alone = alone();
    let before = getrlimit(Resource::Memlock);
    let options = Options { engine: None, ..Options::ALL };
    let host = Host::start_with(options, || {
        without(CapabilitySet::IPC_LOCK);
        let none = Rlimit { current: Some(0), maximum: before.maximum };
        setrlimit(Resource::Memlock, none).expect("anybody may have less");
    });
    setrlimit(Resource::Memlock, before).expect("it was so before");
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let packet = marked(POD, FAR, 1, 64);
    pod.write(&packet);
    assert_eq!(receive_all(&peer, 1), after_hops(&[packet], HOPS));
    if let Some(why) = &host.worker.as_ref().expect("it runs").running.fallback {
        assert_eq!(errno_of_setup(why), Some(libc::ENOMEM), "{why:?}");
    }
}

/// A host for one daemon, which is started where a closure has set things up.
struct Scene {
    namespace: Namespace,
    _neighbour: Namespace,
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let (namespace, neighbour) = (Namespace::new("host"), Namespace::new("neighbour"));
        namespace.link("wire0", &neighbour, "wire0", 1500);
        namespace.address("wire0", &format!("{}/24", HOST.ip()));
        let dir = tempfile::tempdir().expect("a directory for the test");
        Self { namespace, _neighbour: neighbour, dir }
    }

    /// Starts weftd from a thread that `prepare` was called on: it inherits what that did.
    fn weftd(&self, engine: &str, prepare: impl FnOnce() + Send) -> Process {
        let dir = self.dir.path();
        let mut command = Command::new(WEFTD);
        command.args([local_store(dir, CONFIG), format!("--engine={engine}")]);
        command.arg(format!("--subnet-file={}", dir.join("subnet.env").display()));
        command.args(["--iface=wire0", "--iptables-forward-rules=false"]);
        self.namespace.enter(|| {
            prepare();
            Process::start(&mut command, "weftd")
        })
    }

    fn wait(&self, daemon: &mut Process) {
        SubnetEnv::wait(&self.dir.path().join("subnet.env"), daemon);
    }

    fn engine(&self) -> String {
        let status = Status::of(self.dir.path());
        status.0["workers"][0]["engine"].as_str().expect("a worker has an engine").to_owned()
    }
}

/// The warnings that mmsg runs in place of io_uring.
fn lines(daemon: &Process) -> Vec<String> {
    let output = daemon.output();
    let warnings = output.lines().filter(|line| line.starts_with('W'));
    warnings.filter(|line| line.contains(" mmsg ")).map(str::to_owned).collect()
}

/// What an operator meets: the cause's name, the sysctl's value, what is forbidden to the daemon,
/// and the words of the cure.
type Cause = (&'static str, &'static str, fn(), &'static str);
const CAUSES: &[Cause] = &[
    ("EPERM by seccomp", "0", || setup_fails_with(libc::EPERM), "io_uring_setup, io_uring_enter"),
    ("ENOSYS by seccomp", "0", || setup_fails_with(libc::ENOSYS), "CONFIG_IO_URING"),
    ("disabled, 2", "2", || {}, "kernel.io_uring_disabled"),
    ("disabled, 1", "1", || without(CapabilitySet::SYS_ADMIN), "kernel.io_uring_group"),
];

fn setup_fails_with(errno: i32) {
    Refusal::always(libc::SYS_io_uring_setup, errno).install();
}

#[test]
fn daemon_without_io_uring_logs_cause_and_cure() {
    let _alone = alone();
    for (cause, sysctl, forbid, cure) in CAUSES {
        let scene = Scene::new();
        let disabled = Disabled::set(sysctl);
        let mut daemon = scene.weftd("auto", || {
            // Or mmsg would be the better choice anyway.
            make_calls_dear();
            forbid();
        });
        scene.wait(&mut daemon);
        drop(disabled);
        assert_eq!(scene.engine(), "mmsg", "{cause}");
        if *sysctl == "0" {
            scene.namespace.exec(&["ip", "link", "delete", "flannel0"]);
            let again = || daemon.output().contains("made again: ");
            wait_until(REPAIR, "the device is made again", again);
            assert_eq!(scene.engine(), "mmsg", "{cause}");
        }
        let lines = lines(&daemon);
        println!("{cause}: {lines:?}");
        assert_eq!(lines.len(), 1, "{cause}: told once, and a rebuild is no news: {lines:?}");
        assert!(lines[0].contains("io_uring_setup failed"), "{cause}: {lines:?}");
        assert!(lines[0].contains(cure), "{cause}: no word of {cure:?} in {lines:?}");
        assert_eq!(daemon.stop(Signal::TERM, REPAIR).code(), Some(0), "{cause}");
    }
}

#[test]
fn daemon_limited_to_io_uring_ends_with_cure() {
    let _alone = alone();
    for (cause, sysctl, forbid, cure) in CAUSES {
        let scene = Scene::new();
        let _disabled = Disabled::set(sysctl);
        let mut daemon = scene.weftd("io_uring", forbid);
        let status = daemon.wait(LEASE_TIMEOUT);
        let log = daemon.output();
        assert_eq!(status.code(), Some(1), "{cause}: {log}");
        let line = log.lines().last().unwrap_or_default();
        println!("{cause}: {line}");
        for words in [*cure, "io_uring_setup failed", "--engine=auto"] {
            assert!(line.contains(words), "{cause}: no word of {words:?} in {line}");
        }
    }
}

/// The first enter has an extended argument, a time limit; what follows has none, and is refused.
fn ring_breaks_later() {
    let no_extended_argument = (3, 0..=7);
    let number = libc::SYS_io_uring_enter;
    Refusal { number, argument: no_extended_argument, errno: libc::EPERM }.install();
}

#[test]
fn broken_ring_is_replaced_by_mmsg() {
    let _alone = alone();
    let scene = Scene::new();
    let mut daemon = scene.weftd("auto", || {
        make_calls_dear();
        ring_breaks_later();
    });
    scene.wait(&mut daemon);
    wait_until(REPAIR, "mmsg takes over", || scene.engine() == "mmsg");
    assert_eq!(lines(&daemon).len(), 1, "{}", daemon.output());
    // Once, and not again at the next repair.
    let repairs = || daemon.output().matches("made again: ").count();
    let before = repairs();
    scene.namespace.exec(&["ip", "link", "delete", "flannel0"]);
    wait_until(2 * REPAIR, "the device is made again", || repairs() > before);
    assert_eq!(scene.engine(), "mmsg", "the next device has a broken ring again");
    assert_eq!(lines(&daemon).len(), 1, "{}", daemon.output());
    assert!(daemon.ended().is_none());
}

#[test]
fn daemon_limited_to_broken_ring_retries() {
    let _alone = alone();
    let scene = Scene::new();
    let mut daemon = scene.weftd("io_uring", ring_breaks_later);
    let repairs = || daemon.complaints("flannel0");
    wait_until(LEASE_TIMEOUT, "the broken ring is told", || repairs() >= 2);
    thread::sleep(Duration::from_millis(500));
    assert!(repairs() < 10, "a broken ring is rebuilt without a pause");
    assert_eq!(scene.engine(), "io_uring");
    assert_eq!(daemon.stop(Signal::TERM, REPAIR).code(), Some(0), "{}", daemon.output());
}
