//! weftd in the sandboxes of systemd and of a container runtime: the system calls, capabilities and
//! read-only file system of the unit and of the DaemonSet, with real packets.
//!
//! Neither of the two runs here. The tests apply these settings themselves, from the same files;
//! not covered is what only they do, such as the order.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::deploy::text;
use crate::deploy::unit::settings;
use crate::support::confine::{AllowList, read_only_except_tmp, with_capabilities};
use crate::support::lab::{Lab, Process, SubnetEnv, UNDERLAY, WEFTD, wait_until};
use crate::support::overlay::{CONFIG, local_store};
use crate::support::status::Status;

/// CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF, as the kernel shows a set.
pub(crate) const CAPABILITIES: &str = "0000008000003000";

const NAMESPACES: u32 = 0x7e02_0000;

/// The sandbox of a program.
pub(crate) struct Sandbox {
    calls: AllowList,
    capabilities: Vec<String>,
}

impl Sandbox {
    /// Runs `work` on a thread of `host` with the filter and the file system of the sandbox.
    pub(crate) fn inside<T: Send>(
        &self,
        host: &crate::support::lab::Namespace,
        work: impl FnOnce() -> T + Send,
    ) -> T {
        host.enter(|| {
            read_only_except_tmp();
            self.calls.install();
            work()
        })
    }

    /// The command with its capabilities.
    pub(crate) fn command(&self, argv: &[&str]) -> Command {
        let mut words = with_capabilities(&self.capabilities).into_iter();
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(argv);
        command
    }
}

/// Members of a set of systemd's, such as `@system-service`, sets inside it included.
fn expand(name: &str) -> Vec<String> {
    let output = Command::new("systemd-analyze").args(["syscall-filter", name]).output().unwrap();
    let listing = String::from_utf8(output.stdout).unwrap();
    let members = listing.lines().skip(1).map(str::trim);
    let members = members.filter(|line| !line.is_empty() && !line.starts_with('#'));
    members
        .flat_map(|line| if line.starts_with('@') { expand(line) } else { vec![line.to_owned()] })
        .collect()
}

/// The unit's settings, as systemd.exec(5) describes what they do.
fn of_the_unit() -> Sandbox {
    let unit = text("systemd/weftd.service");
    let mut calls = AllowList::default();
    for line in settings(&unit, "SystemCallFilter") {
        let refused = line.starts_with('~');
        for word in line.trim_start_matches('~').split_whitespace() {
            let names = if word.starts_with('@') { expand(word) } else { vec![word.to_owned()] };
            for name in names {
                if refused { calls.refuse(&name) } else { calls.allow(&name) }
            }
        }
    }
    let families: Vec<_> = settings(&unit, "RestrictAddressFamilies")[0]
        .split_whitespace()
        .map(|family| match family {
            "AF_UNIX" => libc::AF_UNIX,
            "AF_INET" => libc::AF_INET,
            "AF_INET6" => libc::AF_INET6,
            "AF_NETLINK" => libc::AF_NETLINK,
            "AF_PACKET" => libc::AF_PACKET,
            other => panic!("the test does not know the family {other}"),
        })
        .map(|family| (0, u32::MAX, family as u32))
        .collect();
    calls.allow_if("socket", &families);
    // MemoryDenyWriteExecute: nothing is writable and executable, and nothing becomes executable.
    let (write, execute) = (libc::PROT_WRITE as u32, libc::PROT_EXEC as u32);
    let both = write | execute;
    calls.allow_if("mmap", &[(2, both, 0), (2, both, write), (2, both, execute)]);
    calls.allow_if("mprotect", &[(2, execute, 0)]);
    // RestrictNamespaces
    calls.allow_if("clone", &[(0, NAMESPACES, 0)]);
    calls.refuse("clone3");
    let capabilities = settings(&unit, "CapabilityBoundingSet")[0].split_whitespace();
    let capabilities =
        capabilities.map(|name| name.trim_start_matches("CAP_").to_lowercase()).collect();
    Sandbox { calls, capabilities }
}

/// The profile of the chart, and what its DaemonSet adds.
pub(crate) fn of_the_pod() -> Sandbox {
    let profile: Value = serde_json::from_str(&text("chart/files/weftd-seccomp.json")).unwrap();
    let mut calls = AllowList::default();
    for rule in profile["syscalls"].as_array().unwrap() {
        for name in rule["names"].as_array().unwrap() {
            let name = name.as_str().unwrap();
            match (rule["action"].as_str().unwrap(), rule["args"].as_array()) {
                ("SCMP_ACT_ALLOW", None) => calls.allow(name),
                ("SCMP_ACT_ALLOW", Some(arguments)) => {
                    assert_eq!(arguments[0]["op"], "SCMP_CMP_MASKED_EQ");
                    let number = |key: &str| arguments[0][key].as_u64().unwrap() as u32;
                    let condition = (number("index"), number("value"), number("valueTwo"));
                    calls.allow_if(name, &[condition]);
                }
                ("SCMP_ACT_ERRNO", None) => {
                    assert_eq!((name, &rule["errnoRet"]), ("clone3", &38.into()))
                }
                other => panic!("the test does not know {other:?}"),
            }
        }
    }
    let capabilities = ["net_admin", "net_raw", "bpf"].map(str::to_owned).to_vec();
    Sandbox { calls, capabilities }
}

/// Two hosts whose weftd run in the sandbox, with connected pods.
struct Confined {
    daemons: Vec<Process>,
    lab: Lab,
    files: TempDir,
    leases: Vec<SubnetEnv>,
}

impl Confined {
    fn start(sandbox: &Sandbox, arguments: &[&str]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let store = local_store(files.path(), CONFIG);
        let lab = Lab::two_hosts();
        let mut daemons = Vec::new();
        for (host, address) in UNDERLAY.iter().enumerate() {
            let dir = files.path().join(format!("h{host}"));
            let subnet_file = format!("--subnet-file={}", dir.join("subnet.env").display());
            let socket = format!("--status-socket={}", dir.join("weft.sock").display());
            let iface = format!("--iface={address}");
            let mut argv = vec![
                WEFTD,
                &store,
                &iface,
                &subnet_file,
                &socket,
                "--iptables-forward-rules=false",
            ];
            argv.extend(arguments);
            let mut command = sandbox.command(&argv);
            daemons.push(
                sandbox
                    .inside(&lab.hosts[host], || Process::start(&mut command, "weftd, confined")),
            );
        }
        let env = |host: usize| files.path().join(format!("h{host}/subnet.env"));
        let leases: Vec<_> =
            (0..2).map(|host| SubnetEnv::wait(&env(host), &mut daemons[host])).collect();
        lab.connect_pods([&leases[0], &leases[1]]);
        for host in 0..2 {
            wait_until(Duration::from_secs(10), "each daemon learns the other's lease", || {
                Status::try_of(&files.path().join(format!("h{host}")))
                    .is_some_and(|status| status.routes() == 1)
            });
        }
        Self { daemons, lab, files, leases }
    }

    fn pod(&self, host: usize) -> Ipv4Addr {
        self.leases[host].pod_address()
    }
}

/// A line of `/proc/PID/status`.
pub(crate) fn process_status(pid: i32, name: &str) -> String {
    let text = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status"));
    let text = text.expect("the daemon runs");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(|value| value.trim().to_owned()).unwrap_or_default()
}

#[track_caller]
fn carries_traffic(sandbox: &Sandbox, place: &str) {
    for engine in ["io_uring", "mmsg"] {
        let engine_flag = format!("--engine={engine}");
        let overlay = Confined::start(sandbox, &[&engine_flag, "--workers=2"]);
        for (from, to) in [(0, 1), (1, 0)] {
            assert!(
                overlay.lab.ping(from, overlay.pod(to), 1444),
                "with {place}, {engine}: pod {from} gets no answer from pod {to}"
            );
        }
        for (host, daemon) in overlay.daemons.iter().enumerate() {
            let status = Status::of(&overlay.files.path().join(format!("h{host}"))).0;
            let workers = status["workers"].as_array().unwrap();
            assert_eq!(workers.len(), 2, "{status:#}");
            let runs = workers.iter().all(|worker| worker["engine"] == engine);
            assert!(runs, "with {place} another engine than {engine} runs: {status:#}");
            let pid = daemon.pid().as_raw_nonzero().get();
            let shown = |name| process_status(pid, name);
            assert_eq!(shown("CapEff"), CAPABILITIES, "capabilities with {place}");
            assert_eq!(shown("CapBnd"), CAPABILITIES, "capabilities with {place}");
            assert_eq!([shown("Seccomp"), shown("NoNewPrivs")], ["2", "1"], "with {place}");
            let log = daemon.output();
            assert!(!log.contains("not permitted"), "weftd misses something in {place}:\n{log}");
            assert!(!log.contains("Read-only"), "weftd misses something in {place}:\n{log}");
        }
    }
}

/// Whether a command in the sandbox succeeds.
fn succeeds(sandbox: &Sandbox, lab: &Lab, argv: &[&str]) -> Result<(), String> {
    let mut command = sandbox.command(argv);
    let output = sandbox.inside(&lab.hosts[0], || command.output().unwrap());
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(complaint) }
}

#[track_caller]
fn holds_and_lets_rules_be_set(sandbox: &Sandbox) {
    let lab = Lab::two_hosts();
    for refused in [
        &["unshare", "--net", "true"][..],
        &["touch", "/usr/weft-test"],
        &["chroot", "/", "true"],
        &["keyctl", "show"],
    ] {
        assert!(succeeds(sandbox, &lab, refused).is_err(), "{refused:?} went through");
    }
    for needed in [
        &["nft", "add", "table", "ip", "flannel-ipv4"][..],
        &["iptables", "-t", "nat", "-N", "FLANNEL-POSTRTG"],
        &["ip", "link", "add", "flannel.1", "type", "vxlan", "id", "1", "dstport", "8472"],
    ] {
        succeeds(sandbox, &lab, needed)
            .unwrap_or_else(|complaint| panic!("{needed:?} is refused: {complaint}"));
    }
}

#[test]
fn unit_sandbox_carries_traffic_on_both_engines() {
    let sandbox = of_the_unit();
    println!("{} system calls", sandbox.calls.len());
    carries_traffic(&sandbox, "weftd.service");
}

#[test]
fn unit_sandbox_holds_and_allows_rules() {
    holds_and_lets_rules_be_set(&of_the_unit());
}

#[test]
fn pod_profile_carries_traffic_on_both_engines() {
    let sandbox = of_the_pod();
    println!("{} system calls", sandbox.calls.len());
    carries_traffic(&sandbox, "the DaemonSet");
}

#[test]
fn pod_profile_holds_and_allows_rules() {
    let sandbox = of_the_pod();
    holds_and_lets_rules_be_set(&sandbox);
    for name in ["io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "seccomp"] {
        assert!(sandbox.calls.has(name), "the profile lacks {name}");
    }
    for name in ["setns", "unshare", "mount", "ptrace", "init_module", "kexec_load", "reboot"] {
        assert!(!sandbox.calls.has(name), "the profile allows {name}");
    }
}
