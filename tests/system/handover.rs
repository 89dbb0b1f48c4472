//! A tunnel that one weftd hands to the next, by itself or by way of the service manager: what the
//! workers carry is not lost either.

use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::restarts::{device_index, restarts, under_traffic};
use crate::support::lab::{Process, SubnetEnv, WEFTD, example, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::status::Status;

const WEFT: &str = env!("CARGO_BIN_EXE_weft");
const PATIENCE: Duration = Duration::from_secs(10);
/// For one that is refused because its turn does not come.
const TURN_PATIENCE: Duration = Duration::from_secs(40);

/// Starts a weftd on host 0 that takes over from the one there, and waits for that one's end.
fn take_over(overlay: &mut Overlay, arguments: &[&str]) {
    let next = overlay.weftd(0, &[&["--take-over"], arguments].concat());
    let mut last = std::mem::replace(&mut overlay.daemons[0], next);
    let end = last.wait(PATIENCE);
    assert!(end.success(), "{}\n{}", last.output(), overlay.daemons[0].output());
}

fn take_overs_lose_nothing(arguments: &[&str]) -> String {
    let [count, rate] = restarts();
    let mut overlay = Overlay::start_with(CONFIG, [arguments, &["--fast-path=off"]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    under_traffic(&mut overlay, rate, |overlay| {
        for _ in 0..count {
            take_over(overlay, arguments);
            thread::sleep(Duration::from_millis(100));
            assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made, "another device");
        }
    })
}

#[test]
fn a_take_over_loses_nothing() {
    println!("{}", take_overs_lose_nothing(&["--fast-path=off", "--engine=mmsg"]));
}

#[test]
fn a_take_over_of_several_rings_loses_nothing() {
    let arguments = ["--fast-path=off", "--engine=io_uring", "--workers=2"];
    println!("{}", take_overs_lose_nothing(&arguments));
}

/// What waits in the socket may be batches, and the next weftd may want none.
#[test]
fn a_take_over_with_other_offloads_loses_nothing() {
    let [count, rate] = restarts();
    let workers = ["--fast-path=off"];
    let mut overlay = Overlay::start_with(CONFIG, [&workers, &workers]);
    let report = under_traffic(&mut overlay, rate, |overlay| {
        for offload in ["none", "auto"].iter().cycle().take(count as usize) {
            let offload = format!("--offload={offload}");
            take_over(overlay, &[workers[0], &offload]);
            thread::sleep(Duration::from_millis(100));
        }
    });
    println!("{report}");
}

#[test]
fn a_failed_take_over_leaves_the_tunnel_as_it_is() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off", "--workers=1"], &[]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let attempts = [
        // An address that this host doesn't have.
        (["--healthz-ip=203.0.113.1", "--healthz-port=8471"], "203.0.113.1:8471"),
        // Its workers can't share the queue of the one that runs.
        (["--workers=2", "--fast-path=off"], "--take-over"),
    ];
    under_traffic(&mut overlay, 1000, |overlay| {
        for (flags, complaint) in attempts {
            let mut next = overlay.weftd(0, &[&["--take-over"], &flags[..]].concat());
            assert!(!next.wait(PATIENCE).success(), "{}", next.output());
            assert!(next.output().contains(complaint), "{}", next.output());
            wait_until(PATIENCE, "the first weftd is back", || is_ready(overlay));
        }
    });
    assert!(overlay.daemons[0].ended().is_none());
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made);
    // It is whole: it hands over again, and ends as any other.
    take_over(&mut overlay, &["--workers=1"]);
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), None, "it outlives weftd");
}

/// Breaks something so that a start can't succeed, has a take-over fail by that, and looks at what
/// the first weftd does until `mend` and afterwards.
fn failed_take_over(overlay: &mut Overlay, complaint: &str, mend: impl FnOnce(&Overlay)) {
    let mut next = overlay.weftd(0, &["--take-over"]);
    assert!(!next.wait(PATIENCE).success(), "{}", next.output());
    wait_until(PATIENCE, "the first weftd has taken up its tunnel again", || {
        let first = &mut overlay.daemons[0];
        assert!(first.ended().is_none(), "{}", first.output());
        is_ready(overlay)
    });
    wait_until(PATIENCE, "its log says what is wrong", || {
        overlay.daemons[0].complaints(complaint) > 0
    });
    mend(overlay);
}

#[test]
fn a_failed_take_over_ends_nothing_whatever_a_start_lacks() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &[]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let file = overlay.dir(0).join("subnet.env");
    let before = SubnetEnv::read(&file).expect("it is there");
    let store = overlay.files().join("store");
    under_traffic(&mut overlay, 1000, |overlay| {
        // A backend that there is not.
        let config = store.join("config");
        fs::write(&config, CONFIG.replace("udp", "aws-tgw")).expect("a file of the test");
        failed_take_over(overlay, "aws-tgw", |_| {
            fs::write(&config, CONFIG).expect("a file of the test");
        });
        let away = store.with_extension("away");
        fs::rename(&store, &away).expect("a file of the test");
        fs::write(&store, "no directory").expect("a file of the test");
        failed_take_over(overlay, "/store", |_| {
            fs::remove_file(&store).expect("a file of the test");
            fs::rename(&away, &store).expect("a file of the test");
        });
    });
    // It is whole, and has its subnet by the store.
    wait_until(PATIENCE, "the store confirms the subnet", || {
        Status::try_of(&overlay.dir(0)).is_some_and(|status| status.0["stale"] == false)
    });
    take_over(&mut overlay, &[]);
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made);
    assert_eq!(SubnetEnv::read(&file).expect("it is there").subnet, before.subnet);
}

#[test]
fn an_address_that_changes_during_a_take_over_keeps_its_subnet() {
    // By its name, as the address changes.
    let flags = ["--fast-path=off", "--iface=wire0"];
    let mut overlay = Overlay::start_with(CONFIG, [&flags, &[]]);
    let file = overlay.dir(0).join("subnet.env");
    let before = SubnetEnv::read(&file).expect("it is there");
    overlay.lab.hosts[0].exec(&["ip", "address", "del", "172.20.0.1/24", "dev", "wire0"]);
    let mut next = overlay.weftd(0, &[&["--take-over"], &flags[..]].concat());
    assert!(!next.wait(PATIENCE).success(), "{}", next.output());
    wait_until(PATIENCE, "the first weftd goes on", || {
        overlay.daemons[0].complaints("no longer has the address") > 0
    });
    assert!(overlay.daemons[0].ended().is_none(), "{}", overlay.daemons[0].output());
    overlay.lab.hosts[0].exec(&["ip", "address", "add", "172.20.0.11/24", "dev", "wire0"]);
    overlay.traffic_resumes(Duration::from_secs(30), "the address has changed");
    assert_eq!(SubnetEnv::read(&file).expect("it is there").subnet, before.subnet);
    wait_until(PATIENCE, "the store shows the new address", || {
        let key = before.subnet.replace(".1/", ".0-");
        let entry = fs::read_to_string(overlay.files().join("store/subnets").join(key));
        entry.is_ok_and(|entry| entry.contains("172.20.0.11"))
    });
    take_over(&mut overlay, &flags);
    assert_eq!(SubnetEnv::read(&file).expect("it is there").subnet, before.subnet);
}

#[test]
fn a_take_over_that_waits_for_the_store_disturbs_nothing() {
    let kept = ["--fast-path=off", "--keep-tunnel"];
    let mut overlay = Overlay::start_with(CONFIG, [&kept, &[]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let [config, away] = config_places(&overlay);
    under_traffic(&mut overlay, 1000, |overlay| {
        fs::rename(&config, &away).expect("a file of the test");
        let waits = ["--take-over", "--start-from-cache=false", "--keep-tunnel"];
        let mut next = overlay.weftd(0, &waits);
        wait_until(PATIENCE, "the next weftd has the tunnel and waits", || {
            next.complaints("config") > 0
        });
        let shown = overlay.lab.hosts[0].exec(&["ip", "-4", "address", "show", "flannel0"]);
        assert!(shown.contains("valid_lft forever"), "its routes end with its address: {shown}");
        // A third one, from a service manager perhaps, is neither's end, after it has waited too.
        for (flag, patience) in [("--take-over", TURN_PATIENCE), ("--take-over=false", PATIENCE)] {
            let mut third = overlay.weftd(0, &[flag]);
            assert!(!third.wait(patience).success());
            let pid = next.pid().as_raw_nonzero().to_string();
            // The next one's lock is in the way, or it has nothing to give yet.
            let told = third.complaints(&format!("pid {pid} ")) + third.complaints("sock.next");
            assert!(told > 0, "{}", third.output());
        }
        // It goes, and the first one is back; then it waits until the end.
        next.stop(Signal::KILL, PATIENCE);
        let mut next = overlay.weftd(0, &["--take-over=false"]);
        assert!(!next.wait(PATIENCE).success(), "beside the first one, which is back");
        fs::rename(&away, &config).expect("a file of the test");
        wait_until(PATIENCE, "the first weftd is ready again", || is_ready(overlay));
        take_over(overlay, &kept);
    });
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made);
}

/// Nobody renews the lease while the next weftd waits for a store.
#[test]
fn a_take_over_that_waits_too_long_ends_and_the_first_goes_on() {
    let kept = ["--fast-path=off"];
    let mut overlay = Overlay::start_with(CONFIG, [&kept, &[]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let [config, away] = config_places(&overlay);
    under_traffic(&mut overlay, 1000, |overlay| {
        fs::rename(&config, &away).expect("a file of the test");
        let program = example("brief-leases").display().to_string();
        let flags = places(overlay);
        let mut argv = vec!["env", "BRIEF_TAKE_OVER_MS=1000", &program];
        argv.extend(flags.iter().map(String::as_str));
        argv.extend(["--take-over", "--start-from-cache=false", "--iface=wire0"]);
        let mut next = overlay.lab.hosts[0].spawn(&argv);
        assert!(!next.wait(PATIENCE).success(), "{}", next.output());
        assert!(next.complaints("--take-over") > 0, "{}", next.output());
        wait_until(PATIENCE, "the first weftd is ready again", || is_ready(overlay));
        fs::rename(&away, &config).expect("a file of the test");
    });
    assert!(overlay.daemons[0].ended().is_none());
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made);
}

/// As where its disk is full: it is read, and takes no writes.
#[test]
fn a_store_that_takes_no_writes_is_no_hindrance_to_a_take_over() {
    let kept = ["--fast-path=off"];
    let mut overlay = Overlay::start_with(CONFIG, [&kept, &[]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let cache = overlay.dir(0).join("subnet.env.cache");
    wait_until(PATIENCE, "the cache is written", || cache.exists());
    let lock = overlay.files().join("store/.lock");
    fs::remove_file(&lock).expect("a file of the test");
    fs::create_dir(&lock).expect("nothing else is there");
    under_traffic(&mut overlay, 1000, |overlay| take_over(overlay, &kept));
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made);
    fs::remove_dir(&lock).expect("it is empty");
    wait_until(PATIENCE, "the store confirms the subnet", || {
        Status::try_of(&overlay.dir(0)).is_some_and(|status| status.0["stale"] == false)
    });
}

#[test]
fn a_predecessor_that_is_killed_leaves_its_successor() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &[]]);
    for milliseconds in [5, 10, 15, 20, 25, 30, 40, 60] {
        let next = overlay.weftd(0, &["--take-over", "--fast-path=off"]);
        let mut last = std::mem::replace(&mut overlay.daemons[0], next);
        wait_until(PATIENCE, "it begins", || !overlay.daemons[0].output().is_empty());
        thread::sleep(Duration::from_millis(milliseconds));
        last.stop(Signal::KILL, PATIENCE);
        wait_until(PATIENCE, "somebody carries packets", || is_ready(&overlay));
        assert!(overlay.daemons[0].ended().is_none(), "{}", overlay.daemons[0].output());
    }
}

/// Starts `count` weftds on host 0 that take over, `gap` apart.
fn hurry(overlay: &Overlay, count: usize, gap: Duration) -> Vec<Process> {
    let ask = |_| {
        let next = overlay.weftd(0, &["--take-over", "--fast-path=off"]);
        thread::sleep(gap);
        next
    };
    (0..count).map(ask).collect()
}

/// Whether a weftd on host 0 has the lock of its node.
fn is_node(overlay: &Overlay) -> bool {
    overlay.lab.hosts[0].exec(&["cat", "/proc/net/unix"]).contains("@weftd/")
}

/// Waits until one weftd is left on host 0, carries packets and has the lock of its node; whether
/// those that have ended are content.
fn one_is_left(overlay: &mut Overlay, others: Vec<Process>) -> bool {
    let mut all = others;
    all.push(overlay.daemons.remove(0));
    wait_until(PATIENCE, "one weftd is left", || {
        all.iter_mut().filter_map(Process::ended).count() == all.len() - 1
    });
    let left = all.iter_mut().position(|process| process.ended().is_none()).expect("one is left");
    overlay.daemons.insert(0, all.remove(left));
    wait_until(PATIENCE, "it carries packets", || is_ready(overlay));
    assert!(is_node(overlay), "{}", overlay.daemons[0].output());
    assert!(overlay.daemons[0].ended().is_none(), "{}", overlay.daemons[0].output());
    all.iter_mut().all(|process| process.ended().is_some_and(|end| end.success()))
}

#[test]
fn take_overs_shortly_after_each_other_leave_one_weftd() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    under_traffic(&mut overlay, 500, |overlay| {
        for count in [2, 3] {
            for milliseconds in [0, 10, 20, 30, 40, 60, 100] {
                let others = hurry(overlay, count, Duration::from_millis(milliseconds));
                assert!(one_is_left(overlay, others), "{count}, {milliseconds} ms apart");
            }
        }
    });
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), made, "another device");
}

#[test]
fn take_overs_shortly_after_each_other_where_the_kernel_carries() {
    let mut overlay = Overlay::start_with(&CONFIG.replace("udp", "vxlan"), [&[], &[]]);
    for milliseconds in [0, 20, 40] {
        let others = hurry(&overlay, 3, Duration::from_millis(milliseconds));
        assert!(one_is_left(&mut overlay, others), "{milliseconds} ms apart");
    }
}

/// Whichever of the three has the tunnel by then.
#[test]
fn one_weftd_is_left_when_one_before_the_last_is_killed() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &[]]);
    for milliseconds in [0, 10, 20, 30, 40, 60, 100] {
        for is_first_asker in [true, false] {
            let mut others = hurry(&overlay, 2, Duration::from_millis(10));
            thread::sleep(Duration::from_millis(milliseconds));
            let victim = if is_first_asker { &mut others[0] } else { &mut overlay.daemons[0] };
            victim.signal(Signal::KILL);
            one_is_left(&mut overlay, others);
            overlay.traffic_resumes(PATIENCE, "the death of one that took over");
        }
    }
}

#[test]
fn a_take_over_from_nobody_or_where_the_kernel_carries() {
    let config = CONFIG.replace("udp", "vxlan");
    let mut overlay = Overlay::start_with(&config, [&["--take-over"], &[]]);
    let text = overlay.daemons[0].output();
    assert!(text.contains("ordinary start"), "{text}");
    let made = device_index(&overlay.lab.hosts[0], "flannel.1");
    under_traffic(&mut overlay, 1000, |overlay| {
        take_over(overlay, &[]);
        wait_until(PATIENCE, "the next one is ready", || is_ready(overlay));
    });
    assert!(made.is_some() && device_index(&overlay.lab.hosts[0], "flannel.1") == made);
}

/// One that fails is not the end of the control plane where the kernel carries the packets.
#[test]
fn a_failed_take_over_where_the_kernel_carries() {
    let config = CONFIG.replace("udp", "host-gw");
    let mut overlay = Overlay::start_with(&config, [&[], &[]]);
    let flags = ["--take-over", "--healthz-ip=203.0.113.1", "--healthz-port=8471"];
    let mut next = overlay.weftd(0, &flags);
    assert!(!next.wait(PATIENCE).success(), "{}", next.output());
    wait_until(PATIENCE, "the first weftd is back", || is_ready(&overlay));
    assert!(overlay.daemons[0].ended().is_none());
    // What comes last in a start: rules, for which there is no program.
    let places = places(&overlay);
    let mut argv = vec!["env", "PATH=/nowhere", WEFTD, "--iface=wire0", "--take-over", "--ip-masq"];
    argv.extend(places.iter().map(String::as_str));
    let mut next = overlay.lab.hosts[0].spawn(&argv);
    assert!(!next.wait(PATIENCE).success(), "{}", next.output());
    wait_until(PATIENCE, "the first weftd is back again", || is_ready(&overlay));
    assert!(overlay.daemons[0].ended().is_none());
    // Or rules that the firewall refuses, which is final at the third attempt only.
    let programs = overlay.files().join("refusing");
    fs::create_dir(&programs).expect("a directory of the test");
    for program in ["iptables", "iptables-save", "iptables-restore"] {
        let path = programs.join(program);
        fs::write(&path, "#!/bin/sh\n/bin/sleep 0.1\nexit 2\n").expect("a file of the test");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("a file of the test");
    }
    let path = format!("PATH={}", programs.display());
    argv[1] = &path;
    let mut next = overlay.lab.hosts[0].spawn(&argv);
    assert!(!next.wait(PATIENCE).success(), "{}", next.output());
    assert!(!next.output().contains("Running backend"), "{}", next.output());
    wait_until(PATIENCE, "the first weftd is back for good", || is_ready(&overlay));
    assert!(overlay.daemons[0].ended().is_none());
    take_over(&mut overlay, &[]);
}

/// Where the network configuration is, and where while the store has none.
fn config_places(overlay: &Overlay) -> [PathBuf; 2] {
    let config = overlay.files().join("store/config");
    let away = config.with_extension("away");
    [config, away]
}

/// The flags with which another weftd has the place of host 0's.
fn places(overlay: &Overlay) -> [String; 3] {
    let place = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let directory = overlay.dir(0);
    [
        place("local-store", overlay.files().join("store")),
        place("subnet-file", directory.join("subnet.env")),
        place("status-socket", directory.join("weft.sock")),
    ]
}

/// A weftd that is the first process of its container, and beside it others of other containers.
pub(crate) struct Contained(pub(crate) Process);

impl Contained {
    pub(crate) fn start(overlay: &Overlay, arguments: &[&str]) -> Self {
        let flags = places(overlay);
        let key = format!("WIREGUARD_KEY_FILE={}", overlay.dir(0).join("wgkey").display());
        let mut argv =
            vec!["env", &key, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", WEFTD];
        argv.extend(flags.iter().map(String::as_str));
        argv.extend(["--iface=wire0", "--iptables-forward-rules=false", "--take-over"]);
        argv.extend(arguments);
        Self(overlay.lab.hosts[0].spawn(&argv))
    }

    /// Its number out here.
    fn pid(&self) -> Option<Pid> {
        let unshare = self.0.pid().as_raw_nonzero();
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        children.ok()?.trim().parse().ok().and_then(Pid::from_raw)
    }

    /// What the readiness probe of its container would hear.
    pub(crate) fn is_ready(&self, overlay: &Overlay) -> bool {
        let Some(pid) = self.pid() else { return false };
        let socket = format!("--socket={}", overlay.dir(0).join("weft.sock").display());
        let target = format!("--target={}", pid.as_raw_nonzero());
        overlay.lab.hosts[0]
            .succeeds(&["nsenter", &target, "--pid", "--mount", WEFT, "ready", &socket])
    }

    /// What it has said so far.
    pub(crate) fn output(&self) -> String {
        self.0.output()
    }

    pub(crate) fn stop(mut self, signal: Signal) -> (bool, String) {
        kill_process(self.pid().expect("it runs"), signal).expect("it runs");
        (self.0.wait(PATIENCE).success(), self.0.output())
    }
}

/// Kubernetes deletes an old pod that is not ready, whose workers are all that the node has.
#[test]
fn a_container_is_ready_while_its_workers_carry() {
    let arguments = ["--fast-path=off"];
    let mut overlay = Overlay::start_with(CONFIG, [&arguments, &arguments]);
    let first = Contained::start(&overlay, &arguments);
    overlay.daemons[0].wait(PATIENCE);
    wait_until(PATIENCE, "the first container is ready", || first.is_ready(&overlay));
    let [config, away] = config_places(&overlay);
    fs::rename(&config, &away).expect("a file of the test");
    let next = Contained::start(&overlay, &arguments);
    let name = config.display().to_string();
    wait_until(PATIENCE, "the next one waits", || next.0.complaints(&name) > 0);
    wait_until(PATIENCE, "its workers carry, and that is said", || first.is_ready(&overlay));
    overlay.traffic_resumes(PATIENCE, "the next one's start");
    fs::rename(&away, &config).expect("a file of the test");
    wait_until(PATIENCE, "the next one is ready", || next.is_ready(&overlay));
    wait_until(PATIENCE, "the first one has handed over", || !first.is_ready(&overlay));
    assert!(next.stop(Signal::TERM).0 && first.stop(Signal::TERM).0);
}

/// The kernel keeps from a container's first process what it has no handler for.
#[test]
fn a_container_that_waits_for_its_turn_can_be_stopped() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &[]]);
    let config = overlay.files().join("store/config");
    fs::remove_file(&config).expect("a file of the test");
    let mut next = overlay.weftd(0, &["--take-over", "--start-from-cache=false"]);
    wait_until(PATIENCE, "the next weftd waits", || next.complaints("config") > 0);
    let third = Contained::start(&overlay, &[]);
    wait_until(PATIENCE, "the third one waits", || third.0.output().contains("sock.next"));
    let (is_well, output) = third.stop(Signal::TERM);
    assert!(is_well, "{output}");
    next.stop(Signal::TERM, PATIENCE);
    wait_until(PATIENCE, "the first weftd goes on", || is_ready(&overlay));
    assert!(overlay.daemons[0].ended().is_none());
}

/// Containers of one node that follow each other, as an update of a DaemonSet with surge has them.
fn containers_follow_each_other(config: &str, arguments: &[&str], rate: u64) {
    let mut overlay = Overlay::start_with(config, [&["--fast-path=off"], &["--fast-path=off"]]);
    let mut first = Contained::start(&overlay, arguments);
    overlay.daemons[0].wait(PATIENCE);
    wait_until(PATIENCE, "the first container is ready", || first.is_ready(&overlay));
    under_traffic(&mut overlay, rate, |overlay| {
        for _ in 0..2 {
            let next = Contained::start(overlay, arguments);
            wait_until(PATIENCE, "the next container is ready", || next.is_ready(overlay));
            wait_until(PATIENCE, "it has handed over", || !first.is_ready(overlay));
            wait_until(PATIENCE, "it stands by", || first.0.output().contains("standing by"));
            assert!(first.0.ended().is_none(), "the runtime would start it again");
            let (is_well, output) = std::mem::replace(&mut first, next).stop(Signal::TERM);
            assert!(is_well && output.contains("standing by"), "{output}");
        }
    });
    // Where the newer one ends first, the older one goes on.
    let next = Contained::start(&overlay, arguments);
    wait_until(PATIENCE, "the next container is ready", || next.is_ready(&overlay));
    next.stop(Signal::KILL);
    wait_until(PATIENCE, "the older one goes on", || first.is_ready(&overlay));
    wait_until(PATIENCE, "it knows its peer", || is_ready(&overlay));
    overlay.traffic_resumes(PATIENCE, "the newer one's end");
    assert!(first.stop(Signal::TERM).0);
}

#[test]
fn of_containers_that_start_together_one_is_the_node() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let mut containers: Vec<_> = (0..3)
        .map(|_| {
            let container = Contained::start(&overlay, &["--fast-path=off"]);
            thread::sleep(Duration::from_millis(20));
            container
        })
        .collect();
    overlay.daemons[0].wait(PATIENCE);
    while let Some(others) = containers.len().checked_sub(1) {
        let mut node = None;
        wait_until(PATIENCE, "one is the node, the others stand by", || {
            node = containers.iter().position(|container| container.is_ready(&overlay));
            let stand_by = |it: &&Contained| it.0.output().contains("standing by");
            node.is_some() && containers.iter().filter(stand_by).count() >= others
        });
        overlay.traffic_resumes(PATIENCE, "another weftd became the node");
        assert!(is_node(&overlay));
        containers.remove(node.expect("it was found")).stop(Signal::KILL);
    }
}

#[test]
fn containers_of_workers_follow_each_other() {
    containers_follow_each_other(CONFIG, &["--fast-path=off"], 1000);
}

#[test]
fn containers_follow_each_other_where_the_kernel_carries() {
    containers_follow_each_other(&CONFIG.replace("udp", "vxlan"), &[], 1000);
}

/// What a container's weftd does after a take-over: it goes on with what it had if that failed, and
/// starts anew if another one was the node meanwhile.
#[test]
fn a_container_goes_on_after_a_take_over_that_failed_or_ended() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let first = Contained::start(&overlay, &["--fast-path=off"]);
    overlay.daemons[0].wait(PATIENCE);
    wait_until(PATIENCE, "the first container is ready", || first.is_ready(&overlay));
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let config = overlay.files().join("store/config");
    let set = |text: &str| fs::write(&config, text).expect("a file of the test");
    under_traffic(&mut overlay, 1000, |overlay| {
        set(&CONFIG.replace("udp", "aws-tgw"));
        let mut next = Contained::start(overlay, &["--fast-path=off"]);
        assert!(!next.0.wait(PATIENCE).success(), "{}", next.0.output());
        wait_until(PATIENCE, "the first one goes on", || first.is_ready(overlay));
        set(CONFIG);
    });
    assert!(made.is_some() && device_index(&overlay.lab.hosts[0], "flannel0") == made);
    set(&CONFIG.replace("udp", "host-gw"));
    let next = Contained::start(&overlay, &[]);
    wait_until(PATIENCE, "the next container is ready", || next.is_ready(&overlay));
    next.stop(Signal::KILL);
    wait_until(PATIENCE, "the first one is the node again", || first.is_ready(&overlay));
    let status = Status::try_of(&overlay.dir(0)).expect("it is ready");
    assert_eq!(status.0["backend"]["kind"], "host-gw", "{}", status.0);
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), None, "{}", first.0.output());
    assert!(first.stop(Signal::TERM).0);
}

/// flanneld's pod has the health address until the update has replaced it.
#[test]
fn a_container_waits_for_the_health_address() {
    let mut overlay = Overlay::start();
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let address = (Ipv4Addr::LOCALHOST, 8471);
    let other = overlay.lab.hosts[0].enter(|| TcpListener::bind(address)).expect("it is free");
    let flags = ["--healthz-ip=127.0.0.1", "--healthz-port=8471"];
    let weftd = Contained::start(&overlay, &flags);
    wait_until(PATIENCE, "the container is ready", || weftd.is_ready(&overlay));
    assert!(weftd.0.complaints("127.0.0.1:8471") > 0, "{}", weftd.0.output());
    drop(other);
    wait_until(PATIENCE, "it listens there", || {
        overlay.lab.hosts[0].enter(|| TcpStream::connect(address)).is_ok()
    });
    assert!(weftd.stop(Signal::TERM).0);
}

/// What a weftd on a host would refuse of the running one, a container makes anew.
#[test]
fn a_container_replaces_a_tunnel_that_does_not_suit_it() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let mut first = Contained::start(&overlay, &["--fast-path=off", "--workers=1"]);
    overlay.daemons[0].wait(PATIENCE);
    wait_until(PATIENCE, "the first container is ready", || first.is_ready(&overlay));
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let next = Contained::start(&overlay, &["--fast-path=off", "--workers=2"]);
    wait_until(PATIENCE, "the next container is ready", || next.is_ready(&overlay));
    let now = device_index(&overlay.lab.hosts[0], "flannel0");
    assert!(now.is_some() && now != made, "{}", next.0.output());
    let (is_well, output) = std::mem::replace(&mut first, next).stop(Signal::TERM);
    assert!(is_well, "{output}");
    overlay.traffic_resumes(PATIENCE, "another number of workers");
    // Another backend needs no tunnel at all.
    fs::write(overlay.files().join("store/config"), CONFIG.replace("udp", "host-gw"))
        .expect("a file of the test");
    let next = Contained::start(&overlay, &[]);
    wait_until(PATIENCE, "the next container is ready", || next.is_ready(&overlay));
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), None, "{}", next.0.output());
    assert!(first.stop(Signal::TERM).0 && next.stop(Signal::TERM).0);
}

/// Starts its arguments again whenever they end, with the descriptors that they have stored.
const SERVICE_MANAGER: &str = r#"
import ctypes, os, platform, signal, socket, sys, time
directory, argv = sys.argv[1], sys.argv[2:]
libc, mine = ctypes.CDLL(None), os.getpid()
kcmp = {"x86_64": 312, "aarch64": 272}[platform.machine()]
manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
manager.bind(directory + "/notify")
manager.settimeout(0.005)
kept = []
while True:
    child = os.fork()
    if child == 0:
        for at, fd in enumerate(kept):
            os.dup2(fd, 600 + at, inheritable=False)
        for at in range(len(kept)):
            os.dup2(600 + at, 3 + at, inheritable=True)
        os.environ.update(
            NOTIFY_SOCKET=directory + "/notify", LISTEN_PID=str(os.getpid()),
            LISTEN_FDS=str(len(kept)), LISTEN_FDNAMES=":".join(["weft-tunnel"] * len(kept)))
        os.closerange(3 + len(kept), 1024)
        os.execv(argv[0], argv)
    with open(directory + "/child.new", "w") as file:
        file.write(str(child))
    os.rename(directory + "/child.new", directory + "/child")
    ended = False
    while not ended:
        ended = os.waitpid(child, os.WNOHANG) != (0, 0)
        # To the last message, also of one that has ended.
        while True:
            try:
                text, fds, _, _ = socket.recv_fds(manager, 4096, 253)
            except TimeoutError:
                break
            if b"FDSTOREREMOVE=1" in text:
                for fd in kept: os.close(fd)
                kept = []
            for fd in fds:
                if any(libc.syscall(kcmp, mine, mine, 0, fd, other) == 0 for other in kept):
                    os.close(fd)
                else:
                    kept.append(fd)
    time.sleep(0.05)
"#;

/// The process that the service manager has started last.
fn child(overlay: &Overlay) -> Option<Pid> {
    let text = fs::read_to_string(overlay.dir(0).join("child")).ok()?;
    Pid::from_raw(text.parse().ok()?)
}

/// Two hosts, and the weftd of host 0 in the care of a service manager.
fn managed(arguments: &[&str]) -> (Overlay, Process) {
    let mut overlay = Overlay::start();
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let (flags, directory) = (places(&overlay), overlay.dir(0));
    let directory = directory.to_str().expect("a path of the test");
    let mut argv = vec!["/usr/bin/python3", "-c", SERVICE_MANAGER, directory, WEFTD];
    argv.extend(flags.iter().map(String::as_str));
    argv.extend(["--iface=wire0", "--iptables-forward-rules=false"]);
    argv.extend(arguments);
    let manager = overlay.lab.hosts[0].spawn(&argv);
    wait_until(PATIENCE, "weftd is ready", || is_ready(&overlay) && child(&overlay).is_some());
    (overlay, manager)
}

/// Whether host 0's weftd carries packets to the other one.
fn is_ready(overlay: &Overlay) -> bool {
    let status = Status::try_of(&overlay.dir(0));
    status.is_some_and(|status| status.0["ready"] == true && status.routes() == 1)
}

/// Has host 0's weftd started again by the service manager.
fn restart(overlay: &Overlay) {
    let last = child(overlay).expect("weftd runs");
    kill_process(last, Signal::TERM).expect("weftd runs");
    wait_until(PATIENCE, "weftd is started again", || {
        child(overlay).is_some_and(|child| child != last) && is_ready(overlay)
    });
}

/// Ends weftd and its service manager, and with them the device.
fn end(overlay: &Overlay, mut manager: Process) {
    manager.stop(Signal::KILL, PATIENCE);
    let last = child(overlay).expect("weftd runs");
    kill_process(last, Signal::TERM).expect("weftd runs");
    wait_until(PATIENCE, "the device ends with weftd and its service manager", || {
        device_index(&overlay.lab.hosts[0], "flannel0").is_none()
    });
}

#[test]
fn a_restart_by_the_service_manager_loses_nothing() {
    for arguments in [["--workers=1", "--engine=mmsg"], ["--workers=2", "--engine=io_uring"]] {
        let (mut overlay, manager) = managed(&arguments);
        let made = device_index(&overlay.lab.hosts[0], "flannel0");
        // So few that they have room in the queues, on a slow machine too.
        under_traffic(&mut overlay, 100, |overlay| {
            for _ in 0..3 {
                restart(overlay);
                let now = device_index(&overlay.lab.hosts[0], "flannel0");
                assert_eq!(now, made, "{}", manager.output());
            }
        });
        end(&overlay, manager);
    }
}

#[test]
fn what_does_not_suit_the_next_weftd_is_made_again() {
    let (overlay, manager) = managed(&[]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    let other_port = CONFIG.replace(r#""udp""#, r#""udp","Port":8286"#);
    fs::write(overlay.files().join("store/config"), other_port).expect("a file of the test");
    restart(&overlay);
    let now = device_index(&overlay.lab.hosts[0], "flannel0");
    let text = manager.output();
    assert!(now.is_some() && now != made, "no new device of the old name: {text}");
    // And of that a copy is kept again.
    restart(&overlay);
    assert_eq!(device_index(&overlay.lab.hosts[0], "flannel0"), now, "{}", manager.output());
    end(&overlay, manager);
}

#[test]
fn a_device_made_again_has_none_of_the_queues_before() {
    let (overlay, manager) = managed(&[]);
    let made = device_index(&overlay.lab.hosts[0], "flannel0");
    // It still has the queues when the next ones are opened.
    let pid = manager.pid();
    kill_process(pid, Signal::STOP).expect("it runs");
    for change in [["del", "172.20.0.1/24"], ["add", "172.20.0.11/24"]] {
        overlay.lab.hosts[0].exec(&[&["ip", "address"], &change[..], &["dev", "wire0"]].concat());
    }
    overlay.traffic_resumes(PATIENCE, "half of the flows go into queues that nobody reads");
    let now = device_index(&overlay.lab.hosts[0], "flannel0");
    assert!(now.is_some() && now != made, "{}", manager.output());
    kill_process(pid, Signal::CONT).expect("it runs");
    end(&overlay, manager);
}

#[test]
fn cleanup_removes_a_tunnel_that_the_service_manager_holds() {
    let (overlay, mut manager) = managed(&[]);
    // What it goes on with the manager has.
    restart(&overlay);
    kill_process(manager.pid(), Signal::STOP).expect("it runs");
    kill_process(child(&overlay).expect("weftd runs"), Signal::KILL).expect("weftd runs");
    let file = overlay.dir(0).join("subnet.env");
    let file = file.to_str().expect("a path of the test");
    wait_until(PATIENCE, "weft cleanup sees that no weftd runs", || {
        overlay.lab.hosts[0].succeeds(&[WEFT, "cleanup", "--subnet-file", file])
    });
    let left = device_index(&overlay.lab.hosts[0], "flannel0");
    assert_eq!(left, None, "pods' packets go into a queue that nobody reads");
    manager.stop(Signal::KILL, PATIENCE);
}

#[test]
fn a_socket_whose_directory_could_not_be_written_is_there_later() {
    let mut overlay = Overlay::start();
    let place = overlay.dir(0).join("sockets");
    fs::write(&place, "no directory").expect("a file of the test");
    let socket = format!("--status-socket={}", place.join("weft.sock").display());
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    overlay.daemons[0] = overlay.weftd(0, &[&socket]);
    wait_until(PATIENCE, "its log says what lacks", || {
        overlay.daemons[0].complaints("sockets/weft.sock:") > 0
    });
    fs::remove_file(&place).expect("a file of the test");
    let beside = ["weft.sock", "weft.sock.next"].map(|name| place.join(name));
    wait_until(PATIENCE, "both sockets are there", || beside.iter().all(|path| path.exists()));
    assert_eq!(
        overlay.daemons[0].complaints("sockets/weft.sock:"),
        1,
        "it is said again and again"
    );
}
