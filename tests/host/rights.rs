//! What weftd's threads may do once it runs, and which user it may run as.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::rules::site::weftd_with;
use crate::support::cost::{ThreadStatus, threads, wait_for_fewer_rights};
use crate::support::lab::{LEASE_TIMEOUT, Lab, SubnetEnv, WEFTD, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store};
use crate::support::status::{Status, is_ready};

/// The capabilities that a thread may use or get.
fn capabilities(thread: &ThreadStatus) -> u64 {
    u64::from_str_radix(thread.field("CapPrm"), 16).expect("hexadecimal digits")
}

/// NET_ADMIN, NET_RAW, NET_BIND_SERVICE, BPF, SYS_RESOURCE, IPC_LOCK, SYS_NICE and DAC_OVERRIDE,
/// by linux/capability.h.
const OF_CONTROL: u64 =
    1 << 12 | 1 << 13 | 1 << 10 | 1 << 39 | 1 << 24 | 1 << 14 | SYS_NICE | 1 << 1;

/// What workers come back to real time by, where root may not raise a limit.
const SYS_NICE: u64 = 1 << 23;

#[test]
fn threads_keep_what_they_need_with_mmsg() {
    threads_keep_what_they_need("--engine=mmsg");
}

#[test]
fn threads_keep_what_they_need_with_io_uring() {
    threads_keep_what_they_need("--engine=io_uring");
}

fn threads_keep_what_they_need(engine: &str) {
    let arguments = [engine, "--workers=2", "--ip-masq"];
    let overlay = Overlay::start_with(CONFIG, [&arguments, &arguments]);
    assert!(overlay.lab.ping(0, overlay.pod(1), 1400), "no packet passes: {engine}");
    // Threads that waited for files of the start are gone a moment later.
    wait_until(Duration::from_secs(5), "all threads of weftd have given up rights", || {
        threads(&overlay.daemons[0]).iter().all(|thread| {
            thread.field("NoNewPrivs") == "1"
                && capabilities(thread) & !OF_CONTROL == 0
                && thread.field("Seccomp") == "2"
        })
    });
    let threads = threads(&overlay.daemons[0]);
    for thread in &threads {
        let has_none = thread.is_worker() || thread.field("Name") == "log";
        let more = capabilities(thread) & !SYS_NICE;
        assert_eq!(more == 0, has_none, "{engine}: {thread:?}");
        assert_eq!(thread.field("Seccomp"), "2", "{engine}: {thread:?}");
    }
    let workers = threads.iter().filter(|thread| thread.is_worker());
    assert_eq!(workers.count(), 2, "{threads:?}");
    // What the control plane does now, it does with fewer rights.
    overlay.lab.hosts[0].exec(&["ip", "link", "delete", "flannel0"]);
    overlay.traffic_resumes(Duration::from_secs(30), "the device was made again");
}

/// Whatever carries the packets, and whatever a backend starts for them; but for `extension`, whose
/// commands may need any right.
#[test]
fn threads_of_every_backend_keep_what_they_need() {
    // How many of them have no rights at all: workers, and who answers strangers.
    for (backend, strangers) in [("vxlan", 0), ("host-gw", 0), ("alloc", 0), ("wireguard", 3)] {
        let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend}"}}}}"#);
        let arguments = ["--wireguard=userspace", "--workers=2", "--ip-masq"];
        let overlay = Overlay::start_with(&config, [&arguments, &arguments]);
        let limited = || {
            threads(&overlay.daemons[0]).into_iter().filter(|thread| {
                thread.field("NoNewPrivs") == "1"
                    && capabilities(thread) & !OF_CONTROL == 0
                    && thread.field("Seccomp") == "2"
            })
        };
        wait_until(Duration::from_secs(5), &format!("{backend}: rights are given up"), || {
            limited().count() == threads(&overlay.daemons[0]).len()
        });
        let is_strangers = |thread: &ThreadStatus| {
            thread.is_worker() || ["log", "handshakes"].contains(&thread.field("Name"))
        };
        let (bare, others): (Vec<_>, Vec<_>) = limited().partition(is_strangers);
        assert_eq!(bare.len(), strangers + 1, "{backend}: {bare:?}");
        for thread in bare {
            assert_eq!(capabilities(&thread) & !SYS_NICE, 0, "{backend}: {thread:?}");
        }
        assert!(others.iter().all(|thread| capabilities(thread) != 0), "{backend}: {others:?}");
    }
}

/// The kernel gives a signal to any thread when the first one has another to handle.
#[test]
fn a_signal_on_a_limited_thread_stops_weftd() {
    for name in ["weft-worker-0", "log"] {
        let mut overlay = Overlay::start_with(CONFIG, [&[], &[]]);
        let daemon = &mut overlay.daemons[0];
        let thread = threads(daemon).into_iter().find(|thread| thread.field("Name") == name);
        let id = thread.and_then(|thread| thread.field("Pid").parse().ok());
        let id = id.and_then(Pid::from_raw).expect("the thread runs");
        kill_process(id, Signal::TERM).expect("the thread is there");
        let end = format!("a signal on the thread {name} stops weftd");
        wait_until(Duration::from_secs(5), &end, || daemon.ended().is_some());
        let code = daemon.ended().and_then(|status| status.code());
        assert_eq!(code, Some(0), "{name}: {}", daemon.output());
    }
}

/// Where weftd's own programs get to, should somebody speak through them.
#[test]
fn programs_that_weftd_runs_write_in_its_own_places_only() {
    let (files, lab) = (tempfile::tempdir().expect("a directory"), Lab::two_hosts());
    let elsewhere = tempfile::tempdir().expect("another directory");
    local_store(files.path(), CONFIG);
    let programs = files.path().join("programs");
    fs::create_dir(&programs).unwrap();
    let (nft, outside) = (programs.join("nft"), elsewhere.path().join("outside"));
    let inside = files.path().join("h0/inside");
    let script = format!(
        "#!/bin/sh\ntouch {} {} 2>/dev/null\nexec /usr/sbin/nft \"$@\"\n",
        inside.display(),
        outside.display()
    );
    fs::write(&nft, script).unwrap();
    fs::set_permissions(&nft, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("PATH={}:/usr/sbin:/usr/bin", programs.display());
    let flags = ["--guard", "--iptables-forward-rules=false", "--iptables-resync=1"];
    let daemon = weftd_with(&[&path], files.path(), &lab.hosts[0], 0, &flags);
    let status = || Status::try_of(&files.path().join("h0"));
    let is_kept = || status().is_some_and(|status| status.0["guard"]["in_place"] == true);
    wait_until(Duration::from_secs(10), "the guard is in place", is_kept);
    wait_for_fewer_rights(&daemon);
    // What was run before weftd served, it wrote as it liked.
    for path in [&inside, &outside] {
        fs::remove_file(path).expect("a program was run at the start");
    }
    wait_until(Duration::from_secs(10), "a program was run again", || inside.exists());
    let checks = || status().and_then(|status| status.0["guard"]["checks"].as_u64());
    let before = checks();
    wait_until(Duration::from_secs(10), "and once more", || checks() > before);
    assert!(!outside.exists(), "a program of weftd's wrote in {}", outside.display());
    let own = files.path().join("h0");
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1400"]);
    wait_until(Duration::from_secs(10), "subnet.env has the new MTU", || {
        has_mtu(&own.join("subnet.env"), 1372)
    });
    assert_eq!(daemon.complaints(""), 0, "it keeps rights, perhaps: {}", daemon.output());
    // A directory that is made again is another one, which an operator has to be told.
    fs::rename(&own, files.path().join("away")).unwrap();
    fs::create_dir(&own).unwrap();
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1300"]);
    wait_until(Duration::from_secs(10), "weftd says what to do about its directory", || {
        daemon.complaints(&own.display().to_string()) > 0 && daemon.complaints("restart") > 0
    });
}

const NO_RULES: &str = "--iptables-forward-rules=false";

fn has_mtu(file: &Path, mtu_bytes: u32) -> bool {
    let line = format!("FLANNEL_MTU={mtu_bytes}\n");
    fs::read_to_string(file).is_ok_and(|text| text.contains(&line))
}

#[test]
fn files_with_bare_names_are_written_later_as_well() {
    let (lab, files) = (Lab::two_hosts(), tempfile::tempdir().unwrap());
    local_store(files.path(), CONFIG);
    let directory = format!("--chdir={}", files.path().display());
    let names = ["--subnet-file=subnet.env", "--status-socket=weft.sock", NO_RULES];
    let mut daemon = weftd_with(&[&directory], files.path(), &lab.hosts[0], 0, &names);
    let file = files.path().join("subnet.env");
    wait_until(LEASE_TIMEOUT, "the subnet file is written", || has_mtu(&file, 1472));
    wait_for_fewer_rights(&daemon);
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1400"]);
    wait_until(Duration::from_secs(10), "subnet.env has the new MTU", || has_mtu(&file, 1372));
    daemon.stop(Signal::TERM, Duration::from_secs(2));
    assert!(!daemon.output().contains("denied"), "{}", daemon.output());
    assert!(!files.path().join("weft.sock").exists(), "the socket is left behind");
}

/// What root needs no right for at the start, it must not need one for later.
#[test]
fn many_rings_are_made_again_with_little_locked_memory() {
    let (lab, files) = (Lab::two_hosts(), tempfile::tempdir().unwrap());
    local_store(files.path(), CONFIG);
    let little = ["/usr/bin/prlimit", "--memlock=65536"];
    let more = ["--engine=io_uring", "--workers=16", NO_RULES];
    let daemon = weftd_with(&little, files.path(), &lab.hosts[0], 0, &more);
    wait_until(LEASE_TIMEOUT, "weftd serves", || is_ready(&files.path().join("h0")));
    wait_for_fewer_rights(&daemon);
    lab.hosts[0].exec(&["ip", "link", "delete", "flannel0"]);
    wait_until(Duration::from_secs(10), "the device is made again", || {
        daemon.output().contains("made again: flannel0")
    });
    assert!(!daemon.output().contains("cannot make"), "{}", daemon.output());
}

/// Rights are kept until there is something to write to.
#[test]
fn a_subnet_file_that_can_be_written_late_is_written() {
    let (lab, files) = (Lab::two_hosts(), tempfile::tempdir().unwrap());
    let in_the_way = files.path().join("run");
    fs::write(&in_the_way, "a file, where the directory should be").unwrap();
    let file = in_the_way.join("flannel/subnet.env");
    local_store(files.path(), CONFIG);
    let option = format!("--subnet-file={}", file.display());
    let daemon = weftd_with(&[], files.path(), &lab.hosts[0], 0, &[&option, NO_RULES]);
    wait_until(LEASE_TIMEOUT, "weftd says that it can't write its file", || {
        daemon.complaints(&in_the_way.display().to_string()) > 0
    });
    fs::remove_file(&in_the_way).unwrap();
    wait_until(Duration::from_secs(15), "it is written after all", || has_mtu(&file, 1472));
    wait_for_fewer_rights(&daemon);
    lab.hosts[0].exec(&["ip", "link", "set", "wire0", "mtu", "1400"]);
    wait_until(Duration::from_secs(15), "and again", || has_mtu(&file, 1372));
}

/// A root directory that every user may search, with this machine's programs, the directory of the
/// test, and weftd.
const OPEN_ROOT: &str = r#"
    set -e
    root=$1/root; mkdir -p $root; mount -t tmpfs -o mode=755 root $root
    for place in bin lib lib64 sbin usr etc proc sys "$1/work"; do
        place=${place#/}
        if [ -L /$place ]; then cp -a /$place $root/; continue; fi
        if [ ! -d /$place ]; then continue; fi
        mkdir -p $root/$place; mount --rbind /$place $root/$place
    done
    # As udev makes it: everybody may open it, and what it does takes rights.
    mkdir -p $root/dev/net
    mknod -m 666 $root/dev/net/tun c 10 200
    mknod -m 666 $root/dev/null c 1 3
    cp $2 $root/weftd
    work=$1/work; shift 2
    rights=-all,+net_admin,+net_raw,+bpf
    exec chroot $root setpriv --reuid=65534 --regid=65534 --clear-groups \
        --inh-caps=$rights --ambient-caps=$rights /weftd "$@"
"#;

#[test]
fn another_user_than_root_runs_weftd() {
    let files = tempfile::tempdir().expect("a directory for the test");
    let work = files.path().join("work");
    let store = local_store(&work, CONFIG);
    for path in ["", "store", "store/subnets", "store/config"] {
        chown(work.join(path), Some(65_534), Some(65_534)).expect("root gives files away");
    }
    let lab = Lab::two_hosts();
    let path = |path: &Path| path.display().to_string();
    let (subnet_env, socket) = (work.join("subnet.env"), work.join("weft.sock"));
    let mut daemon = lab.hosts[0].spawn(&[
        "unshare",
        "--mount",
        "sh",
        "-c",
        OPEN_ROOT,
        "sh",
        &path(files.path()),
        WEFTD,
        &store,
        &format!("--subnet-file={}", path(&subnet_env)),
        &format!("--status-socket={}", path(&socket)),
        "--iface=172.20.0.1",
        "--iptables-forward-rules=false",
        "--fast-path=on",
    ]);
    let lease = SubnetEnv::wait(&subnet_env, &mut daemon);
    let here = work.join("h1");
    fs::create_dir(&here).expect("the test's directory is writable");
    let mut other = lab.weftd(1, &here, &[&store]);
    let leases = [lease, SubnetEnv::wait(&here.join("subnet.env"), &mut other)];
    lab.connect_pods(leases.each_ref());
    assert!(lab.ping(0, leases[1].pod_address(), 1400), "no packet passes: {}", daemon.output());
    let status = format!("/proc/{}/status", daemon.pid().as_raw_nonzero());
    let status = fs::read_to_string(status).expect("the daemon runs");
    assert!(status.contains("Uid:\t65534\t65534"), "{status}");
    assert_eq!(daemon.complaints(""), 0, "{}", daemon.output());
    let mode = fs::metadata(&subnet_env).expect("it is written").permissions().mode();
    assert_eq!(mode & 0o777, 0o644, "others can't read subnet.env");
}
