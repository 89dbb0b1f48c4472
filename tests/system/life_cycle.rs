//! weftd from start to stop on one host: log phrases and their order, health, readiness, signals,
//! and bad input in the store.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::process::Signal;
use tempfile::TempDir;
use weft::status::Cause;

use crate::support::cluster::weftd_in;
use crate::support::lab::{
    LEASE_TIMEOUT, Namespace, Process, SubnetEnv, WEFTD, comes_true, wait_until,
};
use crate::support::overlay::{CONFIG, local_store, reserve};
use crate::support::status::{Status, is_ready};

/// Longest time that a stop may take.
const STOP: Duration = Duration::from_secs(1);

/// A host with one interface, on which weftd can run.
struct Host {
    namespace: Namespace,
    _neighbour: Namespace,
    dir: TempDir,
}

impl Host {
    fn new() -> Self {
        let (namespace, neighbour) = (Namespace::new("host"), Namespace::new("neighbour"));
        namespace.link("wire0", &neighbour, "wire0", 1500);
        namespace.address("wire0", "172.20.0.1/24");
        namespace.exec(&["ip", "route", "add", "default", "via", "172.20.0.2"]);
        Self {
            namespace,
            _neighbour: neighbour,
            dir: tempfile::tempdir().expect("a directory for the test"),
        }
    }

    fn weftd(&self, config: &str, arguments: &[&str]) -> Process {
        let store = local_store(self.dir.path(), config);
        self.weftd_on(&store, arguments)
    }

    fn weftd_on(&self, store: &str, arguments: &[&str]) -> Process {
        let mut all = vec![store];
        all.extend(arguments);
        let own = std::net::Ipv4Addr::new(172, 20, 0, 1);
        weftd_in(&self.namespace, own, self.dir.path(), &all)
    }

    fn subnet_env(&self) -> std::path::PathBuf {
        self.dir.path().join("subnet.env")
    }

    /// `METHOD PATH` on the health port: status line and body, once somebody listens.
    fn http(&self, request: &str) -> (u16, String) {
        let mut answer = String::new();
        wait_until(LEASE_TIMEOUT, "the health port answers", || {
            let stream = self.namespace.enter(|| TcpStream::connect("127.0.0.1:8471"));
            let Ok(mut stream) = stream else { return false };
            let text = format!("{request} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
            answer.clear();
            stream.write_all(text.as_bytes()).is_ok() && stream.read_to_string(&mut answer).is_ok()
        });
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        (code.unwrap_or_else(|| panic!("{answer}")), body.to_owned())
    }
}

#[test]
fn unbuilt_backend_is_refused_by_name() {
    let host = Host::new();
    for backend in ["aws-tgw", "magic"] {
        let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend}"}}}}"#);
        let mut daemon = host.weftd(&config, &[]);
        let status = daemon.wait(Duration::from_secs(5));
        assert_eq!(status.code(), Some(1), "{}", daemon.output());
        assert_eq!(daemon.complaints(backend), 1, "{}", daemon.output());
    }
}

#[test]
fn a_backend_without_a_type_refuses() {
    let host = Host::new();
    let config = r#"{"Network":"10.5.0.0/16","Backend":{"Port":8285}}"#;
    let mut daemon = host.weftd(config, &[]);
    let status = daemon.wait(Duration::from_secs(5));
    assert_eq!(status.code(), Some(1), "{}", daemon.output());
    assert_eq!(daemon.complaints("Type"), 1, "{}", daemon.output());
}

#[test]
fn missing_interface_ends_with_failure() {
    let host = Host::new();
    let store = local_store(host.dir.path(), CONFIG);
    let subnet_file = format!("--subnet-file={}", host.subnet_env().display());
    let mut daemon = host.namespace.spawn(&[WEFTD, "--iface=absent0", &subnet_file, &store]);
    let status = daemon.wait(Duration::from_secs(5));
    let log = daemon.output();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("absent0"), "the missing interface is not named: {log}");
    assert!(!host.subnet_env().exists(), "a subnet file without an interface");
}

#[test]
fn a_full_network_that_is_enlarged_has_room() {
    let host = Host::new();
    let full = r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.7.0","SubnetMax":"10.5.7.0"}"#;
    let store = local_store(host.dir.path(), full);
    reserve(host.dir.path(), "10.5.7.0-24", std::net::Ipv4Addr::new(172, 20, 0, 2));
    let mut daemon = host.weftd_on(&store, &[]);
    let exhausted = || {
        let status = Status::try_of(host.dir.path());
        status.and_then(|status| status.0["store"]["subnets_exhausted"].as_u64())
    };
    wait_until(LEASE_TIMEOUT, "the network is found full", || exhausted() >= Some(1));
    let before = daemon.complaints("");
    let config = host.dir.path().join("store/config");
    replace(&config, "not JSON");
    wait_until(Duration::from_secs(10), "the log names the bad configuration", || {
        daemon.complaints("") > before
    });
    replace(&config, &full.replace("5.7.0\"}", "5.8.0\"}"));
    let lease = SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    assert_eq!(lease.network(), std::net::Ipv4Addr::new(10, 5, 8, 0));
    // Every try found it full, but only the first one is told.
    assert_eq!(daemon.complaints("10.5.7.0/24"), 1, "{}", daemon.output());
}

#[test]
fn missing_lock_directory_does_not_stop_traffic() {
    let host = Host::new();
    let store = local_store(host.dir.path(), CONFIG);
    let socket = format!("-status-socket={}", host.dir.path().join("weft.sock").display());
    let iface = "-iface=wire0";
    // Nobody can make a directory there, not even root.
    let subnet_file = "-subnet-file=/proc/weft/subnet.env";
    let mut daemon = host.namespace.spawn(&[WEFTD, &store, subnet_file, &socket, iface]);
    wait_until(LEASE_TIMEOUT, "weftd runs without its files, and is not ready", || {
        assert!(daemon.ended().is_none(), "{}", daemon.output());
        let status = Status::try_of(host.dir.path());
        status.is_some_and(|status| status.causes() == [Cause::SubnetFile])
    });
    assert!(!is_ready(host.dir.path()), "not ready without its subnet file");
    // The lock beside the file, the file itself and the cache; the log is another thread's.
    wait_until(LEASE_TIMEOUT, "each is told of once", || daemon.complaints("/proc/weft") == 3);
    let log = daemon.output();
    assert!(host.namespace.succeeds(&["ip", "link", "show", "flannel0"]), "{log}");
    assert_eq!(daemon.stop(Signal::TERM, STOP).code(), Some(0));
}

#[test]
fn rebuilding_device_is_not_ready_follows_leases() {
    let host = Host::new();
    let mut daemon = host.weftd(CONFIG, &["-healthz-port=8471"]);
    SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    wait_until(Duration::from_secs(2), "weftd becomes ready", || host.http("GET /readyz").0 == 200);
    // Another device takes the name as soon as it is free; weftd may be faster a few times.
    host.namespace.exec(&["ip", "link", "add", "usurper", "type", "bridge"]);
    wait_until(Duration::from_secs(10), "another device has the name", || {
        host.namespace.succeeds(&["ip", "link", "delete", "flannel0"]);
        host.namespace.succeeds(&["ip", "link", "set", "usurper", "name", "flannel0"])
    });
    wait_until(Duration::from_secs(2), "weftd is not ready", || host.http("GET /readyz").0 == 503);
    wait_until(Duration::from_secs(6), "weftd says why", || {
        let status = Status::try_of(host.dir.path());
        daemon.complaints("flannel0") > 1
            && status.is_some_and(|status| status.causes() == [Cause::DataplaneDown])
    });
    // Beyond the hundred subnets among which weftd picked its own.
    reserve(host.dir.path(), "10.5.202.0-24", std::net::Ipv4Addr::new(172, 20, 0, 2));
    let routes = || Status::try_of(host.dir.path()).map(|status| status.routes());
    wait_until(Duration::from_secs(5), "the new lease is a route", || routes() == Some(1));
    assert_eq!(host.http("GET /readyz").0, 503, "it was the rebuilt device that followed");
    host.namespace.exec(&["ip", "link", "delete", "flannel0"]);
    // The longest pause of the rebuild, and the time for it.
    wait_until(Duration::from_secs(7), "weftd is ready again", || {
        host.http("GET /readyz").0 == 200
    });
}

#[test]
fn stop_while_waiting_for_configuration_is_quick() {
    let host = Host::new();
    let stores = [
        format!("-local-store={}", host.dir.path().join("empty").display()),
        // A server that drops every packet, and one that nobody runs.
        "-etcd-endpoints=http://172.20.0.2:2379".to_owned(),
        "-etcd-endpoints=http://127.0.0.1:2379".to_owned(),
    ];
    host.namespace.exec(&["ip", "route", "add", "blackhole", "192.0.2.0/24"]);
    for store in &stores {
        for signal in [Signal::TERM, Signal::INT] {
            let mut daemon = host.weftd_on(store, &[]);
            wait_until(LEASE_TIMEOUT, "weftd starts", || {
                let status = Status::try_of(host.dir.path());
                status.is_some_and(|status| !status.0["start"].is_null())
            });
            let started = Instant::now();
            let status = daemon.stop(signal, STOP);
            println!("{store} {signal:?}: stopped in {:?}", started.elapsed());
            assert_eq!(status.code(), Some(0), "{}", daemon.output());
        }
    }
    assert!(!host.subnet_env().exists(), "a subnet file without a lease");
}

#[test]
fn stop_does_not_wait_for_locked_store() {
    let host = Host::new();
    let store = local_store(host.dir.path(), CONFIG);
    let path = host.dir.path().join("store/.lock");
    let lock = std::fs::File::create(&path).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    // weftd has the file open for moments only, so the kernel has to remember that it did.
    let opened = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&opened, &path, WatchFlags::OPEN).unwrap();
    let mut daemon = host.weftd_on(&store, &[]);
    let mut event = [0; 64];
    wait_until(LEASE_TIMEOUT, "weftd waits for the lock", || {
        rustix::io::read(&opened, &mut event).is_ok_and(|bytes| bytes > 0)
    });
    let status = daemon.stop(Signal::TERM, STOP);
    assert_eq!(status.code(), Some(0), "{}", daemon.output());
    assert!(!host.subnet_env().exists(), "weftd did not wait for the lock");
}

#[test]
fn health_and_readiness_follow_the_start() {
    let host = Host::new();
    let store = format!("-local-store={}", host.dir.path().join("store").display());
    let mut daemon = host.weftd_on(&store, &["-healthz-port=8471"]);
    assert_eq!(host.http("GET /healthz").0, 200);
    assert_eq!(host.http("POST /healthz").0, 200);
    assert_eq!(host.http("GET /readyz").0, 503);
    assert_eq!(host.http("GET /other").0, 404);
    // flanneld waits for its configuration for ever; so it may come late.
    local_store(host.dir.path(), CONFIG);
    SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    wait_until(Duration::from_secs(2), "weftd becomes ready", || host.http("GET /readyz").0 == 200);
    assert_eq!(daemon.stop(Signal::TERM, STOP).code(), Some(0));
    // Somebody else's port: flanneld dies of a panic, code 2, and so scripts expect it.
    let taken = host.namespace.enter(|| std::net::TcpListener::bind("0.0.0.0:8471")).unwrap();
    let mut daemon = host.weftd_on(&store, &["-healthz-port=8471"]);
    assert_eq!(daemon.wait(Duration::from_secs(5)).code(), Some(2), "{}", daemon.output());
    assert!(daemon.output().contains("0.0.0.0:8471"), "{}", daemon.output());
    drop(taken);
}

#[test]
fn status_begins_with_what_a_start_waits_for() {
    let host = Host::new();
    let store = local_store(host.dir.path(), CONFIG);
    let config = host.dir.path().join("store/config");
    std::fs::remove_file(&config).unwrap();
    let daemon = host.weftd_on(&store, &[]);
    let socket = host.subnet_env().with_file_name("weft.sock").display().to_string();
    let status = || Status::try_of(host.subnet_env().parent().expect("a directory"));
    let ready = |wait: &str| {
        let mut weft = std::process::Command::new(env!("CARGO_BIN_EXE_weft"));
        weft.args(["ready", wait, "--socket", &socket]).spawn().unwrap()
    };
    assert!(!ready("--wait=1").wait().unwrap().success(), "an update would go on without packets");
    let mut waiting = ready("--wait=60");
    wait_until(LEASE_TIMEOUT, "the status has the cause and how often it was met", || {
        status().is_some_and(|status| {
            let tries = status.0["start"]["hindrance"]["tries"].as_u64();
            status.causes() == [Cause::StartHindered] && tries > Some(1)
        })
    });
    std::fs::write(&config, CONFIG).unwrap();
    wait_until(LEASE_TIMEOUT, "nothing is wrong any more", || {
        status().is_some_and(|status| status.0["verdict"]["state"] == "ready")
    });
    assert!(waiting.wait().unwrap().success(), "an update would wait for the next probe");
    let mut weft = std::process::Command::new(env!("CARGO_BIN_EXE_weft"));
    let output = weft.args(["log", "--socket", &socket]).output().unwrap();
    let log = String::from_utf8(output.stdout).unwrap();
    assert!(texts(&log).len() > 5, "{log}");
    // The tool is told before it is written.
    let mut written = daemon.output();
    comes_true(LEASE_TIMEOUT, || {
        written = daemon.output();
        log.lines().all(|line| written.contains(line))
    });
    let lost = log.lines().find(|line| !written.contains(line));
    assert_eq!(lost, None, "the tool shows what the daemon never wrote: {written}");
    assert!(log.lines().any(|line| line.starts_with('E')), "what hindered the start: {log}");
}

#[test]
fn a_bug_report_has_everything_but_secrets() {
    const SECRET: &str = "s3cret-everywhere";
    let host = Host::new();
    let socket = host.subnet_env().with_file_name("weft.sock").display().to_string();
    let argv = [
        "env",
        &format!("FLANNELD_ETCD_PASSWORD={SECRET}"),
        WEFTD,
        "--etcd-endpoints=http://127.0.0.1:1",
        "--etcd-username=root",
        &format!("--subnet-file={}", host.subnet_env().display()),
        "--iface=wire0",
    ];
    let daemon = host.namespace.spawn(&argv);
    let report = || {
        let words = [env!("CARGO_BIN_EXE_weft"), "bugreport", "--socket", &socket];
        String::from_utf8(host.namespace.command(&words).output().unwrap().stdout).unwrap()
    };
    wait_until(LEASE_TIMEOUT, "the report has what weftd waits for", || {
        report().contains("\"state\":\"not-ready\"") && report().contains("tries in")
    });
    let report = report();
    for part in
        ["== weft check --verbose", "\"schema\":2", "flannel_ready 0", "] weftd ", "\"***\""]
    {
        assert!(report.contains(part), "no {part}: {report}");
    }
    assert!(!report.contains(SECRET), "{report}");
    assert!(!daemon.output().contains(SECRET), "{}", daemon.output());
}

#[test]
fn systemd_is_notified_after_subnet_file() {
    let host = Host::new();
    let socket_path = host.dir.path().join("notify");
    let notify = std::os::unix::net::UnixDatagram::bind(&socket_path).unwrap();
    notify.set_read_timeout(Some(LEASE_TIMEOUT)).unwrap();
    let store = local_store(host.dir.path(), CONFIG);
    let variable = format!("NOTIFY_SOCKET={}", socket_path.display());
    let subnet_file = format!("-subnet-file={}", host.subnet_env().display());
    let argv = ["env", &variable, WEFTD, &store, &subnet_file, "-iface=wire0"];
    let daemon = host.namespace.spawn(&argv);
    let wait_for = |expected: &str| {
        let mut message = String::new();
        while message != expected {
            let mut buffer = [0; 256];
            let length = notify.recv(&mut buffer).unwrap_or_else(|_| panic!("{}", daemon.output()));
            message = String::from_utf8_lossy(&buffer[..length]).into_owned();
        }
    };
    wait_for("READY=1");
    assert!(host.subnet_env().exists(), "READY=1 came before the subnet file");
    wait_for("STATUS=ready");
    rustix::process::kill_process(daemon.pid(), Signal::TERM).unwrap();
    wait_for("STOPPING=1");
}

#[test]
fn one_daemon_per_subnet_file() {
    let host = Host::new();
    let mut first = host.weftd(CONFIG, &[]);
    SubnetEnv::wait(&host.subnet_env(), &mut first);
    let mut second = host.weftd(CONFIG, &[]);
    assert_eq!(second.wait(Duration::from_secs(5)).code(), Some(1));
    let pid = first.pid().as_raw_nonzero().to_string();
    let log = second.output();
    assert!(log.contains(&format!("pid {pid}")), "the running daemon is not named: {log}");
    assert!(first.ended().is_none(), "the second daemon ended the first");
    assert_eq!(first.stop(Signal::TERM, STOP).code(), Some(0));
    let mut third = host.weftd(CONFIG, &[]);
    wait_until(LEASE_TIMEOUT, "a daemon takes over the subnet file of one that ended", || {
        is_ready(host.dir.path()) || third.ended().is_some()
    });
    assert!(third.ended().is_none(), "{}", third.output());
}

/// The texts of a log, its headers checked.
fn texts(log: &str) -> Vec<String> {
    let line = regex::Regex::new(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ [^ ]+:\d+\] (.*)$");
    let line = line.expect("the pattern is a constant");
    let text = |each: &str| {
        let found = line.captures(each).unwrap_or_else(|| panic!("no klog header: {each:?}"));
        found[1].to_owned()
    };
    log.lines().map(text).collect()
}

/// Fails unless each phrase begins a line of the log, in this order.
#[track_caller]
fn assert_in_order(log: &str, phrases: &[&str]) {
    let texts = texts(log);
    let mut rest = texts.iter();
    for phrase in phrases {
        assert!(
            rest.any(|text| text.starts_with(phrase)),
            "{phrase:?} is missing or out of order in:\n{log}"
        );
    }
}

#[test]
fn log_has_flannels_phrases_in_order() {
    let host = Host::new();
    let store = local_store(host.dir.path(), CONFIG);
    let socket = format!("-subnet-file={}", host.subnet_env().display());
    // No --iface: the default route decides.
    let mut daemon = host.namespace.spawn(&[WEFTD, &store, &socket]);
    let lease = SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    wait_until(LEASE_TIMEOUT, "the start ends", || {
        daemon.output().contains("Waiting for ") && daemon.output().contains("flannel is ready")
    });
    assert_eq!(daemon.stop(Signal::TERM, STOP).code(), Some(0));
    let allocated =
        format!("Allocated lease ({}/24) to current node (172.20.0.1)", lease.network());
    let wrote = format!("Wrote subnet file to {}", host.subnet_env().display());
    let log = daemon.output();
    assert_in_order(
        &log,
        &[
            "CLI flags config: ",
            "Installing signal handlers",
            "Created subnet manager: ",
            "Found network config - Backend type: udp",
            "Determining IP address of default interface",
            "Using interface with name wire0 and address 172.20.0.1",
            "Defaulting external address to interface address (172.20.0.1)",
            "Picking subnet in range 10.5.1.0 ... 10.5.100.0",
            &allocated,
            "Setting up forward rules: what is from or to 10.5.0.0/16 is accepted",
            &wrote,
            "Running backend.",
            "Watching for new subnet leases",
            "Waiting for 22h5",
            "shutdownHandler sent cancel signal...",
            "Stopped monitoring lease",
            "Waiting for all goroutines to exit",
            "Exiting cleanly...",
        ],
    );
    // Where rules take a busy machine long, the watch begins before.
    assert_in_order(&log, &["Running backend.", "flannel is ready", "shutdownHandler sent"]);
    // The second start finds its lease again.
    let mut daemon = host.weftd_on(&store, &["-public-ip=172.20.0.1"]);
    wait_until(LEASE_TIMEOUT, "the second start ends", || {
        daemon.output().contains("flannel is ready")
    });
    let created = format!("Previous Subnet: {}/24", lease.network());
    let found =
        format!("Found lease ({}/24) for current IP (172.20.0.1), reusing", lease.network());
    assert!(daemon.output().contains(&created), "{}", daemon.output());
    assert_in_order(&daemon.output(), &["Using 172.20.0.1 as external address", &found]);
    assert!(!daemon.output().contains("FORWARD chain"), "=false sets no rules");
    assert_eq!(daemon.stop(Signal::TERM, STOP).code(), Some(0));
}

#[test]
fn lost_lease_ends_daemon_with_failure() {
    let host = Host::new();
    let mut daemon = host.weftd(CONFIG, &[]);
    let lease = SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    let key = |lease: &SubnetEnv| {
        host.dir.path().join("store/subnets").join(format!("{}-24", lease.network()))
    };
    // Until it watches, weftd takes a lease that is gone for one that lapsed, and takes it again.
    let status = (0..LEASE_TIMEOUT.as_secs()).find_map(|_| {
        std::fs::remove_file(key(&lease)).ok();
        (0..20).find_map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            daemon.ended()
        })
    });
    let status = status.expect("weftd goes on without its lease");
    assert_eq!(status.code(), Some(1), "systemd restarts only what failed: {}", daemon.output());
    let subnet = lease.network().to_string();
    assert!(daemon.complaints(&subnet) > 0, "what was lost: {}", daemon.output());
    // A clone of this node that took the lease is another reason, and is named.
    let mut daemon = host.weftd(CONFIG, &[]);
    wait_until(LEASE_TIMEOUT, "weftd has the subnet again", || key(&lease).exists());
    wait_until(LEASE_TIMEOUT, "weftd is ready", || is_ready(host.dir.path()));
    replace(&key(&lease), r#"{"PublicIP":"172.20.0.66","PublicIPv6":null}"#);
    assert_eq!(daemon.wait(Duration::from_secs(5)).code(), Some(1), "{}", daemon.output());
    assert!(daemon.output().contains("172.20.0.66"), "{}", daemon.output());
}

#[test]
fn json_logs_are_one_object_a_line() {
    let host = Host::new();
    let mut daemon = host.weftd(CONFIG, &["-log-format=json"]);
    SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    daemon.stop(Signal::TERM, STOP);
    for line in daemon.output().lines() {
        let object: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(object.is_object(), "{line}");
    }
}

#[test]
fn bad_configuration_is_explained_and_retried() {
    let host = Host::new();
    let bad = [
        "",
        "not JSON",
        "[]",
        r#"{"Backend":{"Type":"udp"}}"#,
        r#"{"Network":"10.5.0.0"}"#,
        r#"{"Network":"10.5.0.0/99"}"#,
        r#"{"Network":"10.5.0.0/16","SubnetLen":12}"#,
        r#"{"Network":"10.5.0.0/16","SubnetMin":"10.6.0.0"}"#,
        r#"{"Network":"10.5.0.0/16","Backend":"udp"}"#,
    ];
    let mut daemon = host.weftd(bad[0], &[]);
    let config = host.dir.path().join("store/config");
    for text in bad {
        let before = daemon.complaints("");
        replace(&config, text);
        // The first is told already, or will be.
        wait_until(Duration::from_secs(5), &format!("weftd complains about {text:?}"), || {
            let told = daemon.complaints("");
            told > before || text.is_empty() && told > 0
        });
        assert!(daemon.ended().is_none(), "{text:?} ended weftd: {}", daemon.output());
    }
    let mut random = fastrand::Rng::with_seed(7);
    let before = daemon.complaints("");
    let noise: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(4096).collect();
    replace_bytes(&config, &noise);
    wait_until(Duration::from_secs(5), "weftd complains about noise", || {
        daemon.complaints("") > before
    });
    replace(&config, CONFIG);
    SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    // What is wrong with the backend's own settings ends the start: they are final.
    daemon.stop(Signal::TERM, STOP);
    for (backend, names) in
        [(r#""Port":0"#, "Port"), (r#""Port":70000"#, "Port"), (r#""MTU":-1"#, "MTU")]
    {
        let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"udp",{backend}}}}}"#);
        let mut daemon = host.weftd(&config, &[]);
        let status = daemon.wait(Duration::from_secs(5));
        assert_eq!(status.code(), Some(1), "{backend}: {}", daemon.output());
        assert!(daemon.output().contains(names), "{backend}: {}", daemon.output());
    }
}

fn replace(path: &Path, text: &str) {
    replace_bytes(path, text.as_bytes());
}

fn replace_bytes(path: &Path, bytes: &[u8]) {
    let next = path.with_extension("next");
    std::fs::write(&next, bytes).expect("the test's directory is writable");
    std::fs::rename(&next, path).expect("the test's directory is writable");
}

#[test]
fn bad_store_entries_are_named_and_ignored() {
    let host = Host::new();
    let store = local_store(host.dir.path(), CONFIG);
    let subnets = host.dir.path().join("store/subnets");
    let put = |name: &str, value: &str| std::fs::write(subnets.join(name), value).unwrap();
    // All beyond the hundred subnets among which weftd picks its own.
    put("10.5.202.0-24", r#"{"PublicIP":"172.20.0.2","PublicIPv6":null}"#);
    let mut daemon = host.weftd_on(&store, &[]);
    SubnetEnv::wait(&host.subnet_env(), &mut daemon);
    let routes = || Status::try_of(host.dir.path()).map(|status| status.routes());
    wait_until(Duration::from_secs(5), "the honest lease is a route", || routes() == Some(1));
    let bad = [
        ("garbage", "x"),
        ("10.5.203.300-24", r#"{"PublicIP":"172.20.0.3"}"#),
        ("10.5.204.0-24", "not JSON"),
        ("10.5.205.0-24", r#"{"PublicIP":"not an address"}"#),
        ("10.5.206.0-24", r#"{"PublicIP":"127.0.0.1"}"#),
        ("10.5.207.0-24", r#"{"PublicIP":"224.0.0.1"}"#),
        ("10.6.8.0-24", r#"{"PublicIP":"172.20.0.4"}"#),
        ("10.5.209.0-33", r#"{"PublicIP":"172.20.0.4"}"#),
    ];
    let huge = format!(r#"{{"PublicIP":"172.20.0.5","x":"{}"}}"#, "y".repeat(1 << 20));
    for (name, value) in bad.into_iter().chain([("10.5.210.0-24", huge.as_str())]) {
        put(name, value);
        wait_until(Duration::from_secs(5), &format!("the log names the bad entry {name}"), || {
            daemon.output().contains(&format!("Ignoring {name:?}"))
        });
    }
    assert!(daemon.ended().is_none(), "{}", daemon.output());
    assert_eq!(routes(), Some(1), "a bad entry changed the routes");
    // And the next good one is taken.
    put("10.5.211.0-24", r#"{"PublicIP":"172.20.0.6","PublicIPv6":null}"#);
    wait_until(Duration::from_secs(5), "the next honest lease is a route", || routes() == Some(2));
    assert!(!daemon.output().contains("panicked"), "{}", daemon.output());
}
