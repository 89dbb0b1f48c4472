//! Network namespaces for tests, and the two-host lab that `scripts/lab.sh` draws.
//!
//! Owns what it makes: every namespace and process is gone when its value is dropped, also when
//! the test panics. It never touches the network of the machine itself. Needs root.

use std::fs::{DirEntry, File};
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::NamedTempFile;

use super::machine::Machine;
use super::pace::Stopwatch;

/// The daemon under test.
pub(crate) const WEFTD: &str = env!("CARGO_BIN_EXE_weftd");

/// The underlay addresses of the two hosts.
pub(crate) const UNDERLAY: [Ipv4Addr; 2] =
    [Ipv4Addr::new(172, 20, 0, 1), Ipv4Addr::new(172, 20, 0, 2)];

/// What an ordinary card without segmentation of tunnels has: nothing.
pub(crate) const PLAIN_CARD: [&str; 10] = [
    "tso",
    "off",
    "gso",
    "off",
    "tx-udp_tnl-segmentation",
    "off",
    "tx-udp-segmentation",
    "off",
    "gro",
    "on",
];

/// Between two looks at a condition, at first: short beside the tens of milliseconds that a daemon
/// takes.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// And after a while. A look costs some milliseconds in a test's build of weftd, and most of the
/// suite's tests look at once.
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(60);
/// The pause is this part of the time waited so far.
const POLL_PART: u32 = 16;

/// How long pings are tried.
const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// From start to lease: well below a second on an idle machine, and tests run on busy ones.
pub(crate) const LEASE_TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the names of this process's namespaces differ.
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// Programs that look at nothing in `/sys`.
const WITHOUT_SYS: [&str; 9] =
    ["ethtool", "iptables", "iptables-save", "nft", "ping", "ss", "sysctl", "tc", "traceroute"];

/// Looks at `condition` until it holds.
///
/// # Panics
/// When `timeout` passes first, by a [`Stopwatch`]; the message says that `what` did not happen.
#[track_caller]
pub(crate) fn wait_until(timeout: Duration, what: &str, condition: impl FnMut() -> bool) {
    let happened = comes_true(timeout, condition);
    assert!(happened, "within {timeout:?} this did not happen: {what}");
}

/// The same for what may fail to happen, of which it says whether it did.
pub(crate) fn comes_true(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let (watch, started) = (Stopwatch::start(), Instant::now());
    while !condition() {
        if watch.is_over(timeout) {
            return false;
        }
        let pause = started.elapsed() / POLL_PART;
        thread::sleep(pause.clamp(POLL_INTERVAL_MIN, POLL_INTERVAL_MAX));
    }
    true
}

/// Path of a program of `benches/`, such as `plain-peer`; built if it is missing, for
/// `cargo test --test NAME` builds no examples.
pub(crate) fn example(name: &str) -> PathBuf {
    let test_program = std::env::current_exe().expect("the running test has a path");
    let path = test_program.ancestors().nth(2).map(|dir| dir.join("examples").join(name));
    let path = path.expect("test programs are in target/PROFILE/deps");
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !path.exists() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        run(build.args(["build", "--locked", "--quiet", "--example", name]));
    }
    path
}

/// A network namespace with its loopback up, removed on drop with every process in it.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes a namespace whose name ends in `role` and is used by nobody else.
    pub(crate) fn new(role: &str) -> Self {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-t{}-{serial}-{role}", std::process::id());
        run(Command::new("ip").args(["netns", "add", &name]));
        let namespace = Self { name };
        namespace.exec(&["ip", "link", "set", "lo", "up"]);
        namespace
    }

    /// The name that `ip netns` knows it by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A command that will run in this namespace, with its own view of `/sys` unless it needs none:
    /// that takes twice to three times as long, and a test makes hundreds of such calls.
    pub(crate) fn command(&self, argv: &[&str]) -> Command {
        let mut command;
        match *argv {
            ["ip", ref rest @ ..] => {
                command = Command::new("ip");
                command.args(["-n", &self.name]).args(rest);
            }
            [program, ..] if WITHOUT_SYS.contains(&program) => {
                command = Command::new("nsenter");
                command.arg(format!("--net={}", self.path().display())).args(argv);
            }
            _ => {
                command = Command::new("ip");
                command.args(["netns", "exec", &self.name]).args(argv);
            }
        }
        command
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs a command to its end and gives its standard output.
    ///
    /// # Panics
    /// When the command fails; the message holds what it wrote.
    #[track_caller]
    pub(crate) fn exec(&self, argv: &[&str]) -> String {
        run(&mut self.command(argv))
    }

    /// Whether a command, run to its end, succeeded.
    pub(crate) fn succeeds(&self, argv: &[&str]) -> bool {
        self.command(argv).output().is_ok_and(|output| output.status.success())
    }

    /// Starts a command that runs until it ends, is stopped or the guard is dropped.
    #[track_caller]
    pub(crate) fn spawn(&self, argv: &[&str]) -> Process {
        Process::start(&mut self.command(argv), argv[0])
    }

    /// Runs `work` on a thread of its own inside the namespace. Sockets and `/proc/sys/net` are
    /// the namespace's; `/sys` stays the machine's.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        enter_at(&self.path(), work)
    }

    /// Packets of one flow queue for one processor on every device that is here now (RPS): the
    /// kernel hands a veth's to the processor on which they were sent, so a sender whose packets
    /// leave on two of them reorders its own flow, whatever lies in between.
    pub(crate) fn steer_by_flow(&self) {
        let processors = thread::available_parallelism().expect("the kernel counts").get().min(32);
        let mask = format!("{:x}", (1_u64 << processors) - 1);
        let all = "for it in /sys/class/net/*/queues/rx-*/rps_cpus; do echo $0 > $it; done";
        self.exec(&["sh", "-c", all, &mask]);
    }

    /// Joins two namespaces by a veth pair, both ends up, with this MTU.
    pub(crate) fn link(&self, device: &str, other: &Self, other_device: &str, mtu_bytes: u32) {
        let mtu = mtu_bytes.to_string();
        run(Command::new("ip")
            .args(["link", "add", device, "netns", &self.name, "mtu", &mtu, "type", "veth"])
            .args(["peer", "name", other_device, "mtu", &mtu, "netns", &other.name]));
        self.exec(&["ip", "link", "set", device, "up"]);
        other.exec(&["ip", "link", "set", other_device, "up"]);
    }

    /// Gives `device` an address, spelled `10.5.1.1/24`.
    pub(crate) fn address(&self, device: &str, address: &str) {
        self.exec(&["ip", "address", "replace", address, "dev", device]);
    }

    /// The processes in it, whoever started them.
    fn process_ids(&self) -> Vec<Pid> {
        let inode = |path: &Path| std::fs::metadata(path).ok().map(|it| it.ino());
        let Some(own) = inode(&self.path()) else { return Vec::new() };
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let is_inside = |process: &DirEntry| inode(&process.path().join("ns/net")) == Some(own);
        let inside = processes.filter(is_inside);
        let id = |process: DirEntry| Pid::from_raw(process.file_name().to_str()?.parse().ok()?);
        inside.filter_map(id).collect()
    }
}

/// Runs `work` on a thread of its own inside the network namespace whose handle is at `path`.
pub(crate) fn enter_at<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> T {
    let handle = File::open(path).expect("an existing namespace has a handle");
    let inside = || {
        move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&handle),
            Some(LinkNameSpaceType::Network),
        )
        .expect("root may enter a network namespace");
        work()
    };
    thread::scope(|scope| match scope.spawn(inside).join() {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A process keeps its namespace alive after the name is gone, whoever started it.
        for pid in self.process_ids() {
            kill_process(pid, Signal::KILL).ok();
        }
        Command::new("ip").args(["netns", "delete", &self.name]).output().ok();
    }
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let Output { status, stdout, stderr } = output;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    assert!(
        status.success(),
        "{command:?}: {status}\n{stdout}{}",
        String::from_utf8_lossy(&stderr)
    );
    stdout
}

/// A running program: killed on drop, its output kept in a file. If the test is failing by then,
/// the output goes to standard error.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    what: String,
    log: NamedTempFile,
}

impl Process {
    /// Starts `command`; `what` names it in messages.
    #[track_caller]
    pub(crate) fn start(command: &mut Command, what: &str) -> Self {
        let log = NamedTempFile::new().expect("a place for the program's output");
        let output = || Stdio::from(log.as_file().try_clone().expect("one more descriptor"));
        let child = command
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child, what: what.to_owned(), log }
    }

    /// The process's id; `ip netns exec` becomes the program, so it is the program's own.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// What it has written so far, standard output and standard error together.
    pub(crate) fn output(&self) -> String {
        let bytes = std::fs::read(self.log.path()).expect("the output is kept until the drop");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// How many of its warnings and errors so far name `value`: a path, a flag, an address, a key.
    /// Which words they have is nobody's business but the reader's.
    pub(crate) fn complaints(&self, value: &str) -> usize {
        let log = self.output();
        let complaints = log.lines().filter(|line| line.starts_with(['W', 'E', 'F']));
        complaints.filter(|line| line.contains(value)).count()
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Sends `signal`; a process that has ended does not mind.
    pub(crate) fn signal(&mut self, signal: Signal) {
        // After the wait the id may belong to somebody else.
        if self.ended().is_none() {
            kill_process(self.pid(), signal).expect("our own child can be signalled");
        }
    }

    /// Sends `signal` and waits for the end.
    ///
    /// # Panics
    /// When it still runs after `timeout`.
    #[track_caller]
    pub(crate) fn stop(&mut self, signal: Signal, timeout: Duration) -> ExitStatus {
        self.signal(signal);
        self.wait(timeout)
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// When it still runs after `timeout`.
    #[track_caller]
    pub(crate) fn wait(&mut self, timeout: Duration) -> ExitStatus {
        let what = format!("{} ends", self.what);
        let mut status = None;
        wait_until(timeout, &what, || {
            status = self.ended();
            status.is_some()
        });
        status.expect("the wait is over because there is a status")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        if thread::panicking() && !self.output().is_empty() {
            let text = format!("--- output of {}:\n{}---\n", self.what, self.output());
            std::io::stderr().write_all(text.as_bytes()).ok();
        }
    }
}

/// What a daemon wrote to its subnet.env.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SubnetEnv {
    /// `FLANNEL_SUBNET`: gateway and length, such as `10.5.72.1/24`.
    pub(crate) subnet: String,
    /// `FLANNEL_MTU`.
    pub(crate) mtu_bytes: u32,
}

impl SubnetEnv {
    /// Reads the file; `None` until it is there and complete.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let value = |key: &str| {
            text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).map(str::trim)
        };
        Some(Self {
            subnet: value("FLANNEL_SUBNET")?.to_owned(),
            mtu_bytes: value("FLANNEL_MTU")?.parse().ok()?,
        })
    }

    /// Waits until `daemon` has written the file.
    ///
    /// # Panics
    /// When the daemon ends first, or takes longer than [`LEASE_TIMEOUT`].
    #[track_caller]
    pub(crate) fn wait(path: &Path, daemon: &mut Process) -> Self {
        let mut lease = None;
        wait_until(LEASE_TIMEOUT, "the daemon writes its subnet.env", || {
            // In this order: a daemon that wrote the file and ended has written it.
            let ended = daemon.ended().is_some();
            lease = Self::read(path);
            lease.is_some() || ended
        });
        lease.unwrap_or_else(|| panic!("the daemon ended without a lease:\n{}", daemon.output()))
    }

    /// The address after the gateway: the one that [`Lab::connect_pods`] gives to the pod.
    pub(crate) fn pod_address(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.gateway().to_bits() + 1)
    }

    /// The subnet's own address: daemons write the one after it as the gateway.
    pub(crate) fn network(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.gateway().to_bits() - 1)
    }

    /// The address of the pod's gateway, the host's end of the pod's link.
    pub(crate) fn gateway(&self) -> Ipv4Addr {
        self.parts().0.parse().expect("FLANNEL_SUBNET begins with an address")
    }

    fn length(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.subnet.split_once('/').expect("FLANNEL_SUBNET is ADDRESS/LENGTH")
    }
}

/// pod 0 - host 0 - underlay (MTU 1500) - host 1 - pod 1, each a namespace.
///
/// Devices: `eth0` in a pod, `pod0` and `wire0` in a host. Hosts forward; every other sysctl
/// keeps its default. Pods have no address until [`Lab::connect_pods`].
#[derive(Debug)]
pub(crate) struct Lab {
    /// The hosts, with the addresses of [`UNDERLAY`].
    pub(crate) hosts: [Namespace; 2],
    /// The pods.
    pub(crate) pods: [Namespace; 2],
}

impl Lab {
    /// Builds hosts, pods and the underlay.
    pub(crate) fn two_hosts() -> Self {
        let hosts = [Namespace::new("h1"), Namespace::new("h2")];
        let pods = [Namespace::new("p1"), Namespace::new("p2")];
        hosts[0].link("wire0", &hosts[1], "wire0", 1500);
        for index in 0..2 {
            hosts[index].exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
            hosts[index].address("wire0", &format!("{}/24", UNDERLAY[index]));
            hosts[index].link("pod0", &pods[index], "eth0", 1500);
        }
        Self { hosts, pods }
    }

    /// See [`Namespace::steer_by_flow`].
    pub(crate) fn steer_by_flow(&self) {
        self.hosts.iter().chain(&self.pods).for_each(Namespace::steer_by_flow);
    }

    /// Gives both pods the addresses, the MTU and the default route that their hosts' leases ask
    /// for.
    pub(crate) fn connect_pods(&self, leases: [&SubnetEnv; 2]) {
        for (index, lease) in leases.into_iter().enumerate() {
            let mtu = lease.mtu_bytes.to_string();
            let (host, pod) = (&self.hosts[index], &self.pods[index]);
            host.address("pod0", &lease.subnet);
            host.exec(&["ip", "link", "set", "pod0", "mtu", &mtu]);
            pod.address("eth0", &format!("{}/{}", lease.pod_address(), lease.length()));
            pod.exec(&["ip", "link", "set", "eth0", "mtu", &mtu]);
            pod.exec(&["ip", "route", "replace", "default", "via", &lease.gateway().to_string()]);
        }
    }

    /// Whether pod `from` gets an answer to each of three pings of `payload_bytes` to `address`, at
    /// one of several tries: a machine that is busy enough answers late.
    pub(crate) fn ping(&self, from: usize, address: Ipv4Addr, payload_bytes: u16) -> bool {
        let (size, address) = (payload_bytes.to_string(), address.to_string());
        let argv = ["ping", "-q", "-c3", "-i0.02", "-W1", "-Mdo", "-s", &size, &address];
        let watch = Stopwatch::start();
        loop {
            let report = self.pods[from].command(&argv).output();
            let succeeded = report.is_ok_and(|output| {
                let text = String::from_utf8_lossy(&output.stdout);
                text.contains("3 packets transmitted, 3 received")
            });
            if succeeded || watch.is_over(PING_TIMEOUT) {
                return succeeded;
            }
        }
    }

    /// Starts weftd on a host. Its files are in `dir`: `subnet.env` and `weft.sock`. `arguments`
    /// choose the store, and go last so that they can override.
    #[track_caller]
    pub(crate) fn weftd(&self, host: usize, dir: &Path, arguments: &[&str]) -> Process {
        self.weftd_on(None, host, dir, arguments)
    }

    /// The same with the identity of another machine.
    #[track_caller]
    pub(crate) fn weftd_on(
        &self,
        machine: Option<Machine<'_>>,
        host: usize,
        dir: &Path,
        arguments: &[&str],
    ) -> Process {
        let subnet_file = format!("--subnet-file={}", dir.join("subnet.env").display());
        let socket = format!("--status-socket={}", dir.join("weft.sock").display());
        let iface = format!("--iface={}", UNDERLAY[host]);
        let mut argv = vec![WEFTD, &iface, &subnet_file, &socket, "--iptables-forward-rules=false"];
        argv.extend(arguments);
        match machine {
            None => {
                let mut command = self.hosts[host].command(&argv);
                command.env("WIREGUARD_KEY_FILE", dir.join("wgkey"));
                Process::start(&mut command, WEFTD)
            }
            Some(machine) => machine.spawn(&self.hosts[host], dir, &argv),
        }
    }

    /// Starts a program of `benches/` on a host for the lease `own`, with a device `flannel0`
    /// and a route to `peer`'s subnet by way of the other host.
    #[track_caller]
    pub(crate) fn proxy(
        &self,
        host: usize,
        program: &str,
        own: &SubnetEnv,
        peer: &SubnetEnv,
        arguments: &[&str],
    ) -> Process {
        let program = example(program);
        let program = program.to_str().expect("the target directory has a readable name");
        let bind = format!("{}:8285", UNDERLAY[host]);
        let route = format!("{}={}:8285", peer.subnet, UNDERLAY[1 - host]);
        let mut argv = vec![program, "--tun", "flannel0", "--bind", &bind, "--route", &route];
        argv.extend(arguments);
        let process = self.hosts[host].spawn(&argv);
        let namespace = &self.hosts[host];
        wait_until(Duration::from_secs(5), "the proxy makes its device flannel0", || {
            namespace.succeeds(&["ip", "link", "show", "flannel0"])
        });
        // As the daemon does it: the first address of the subnet, alone.
        namespace.address("flannel0", &format!("{}/32", own.network()));
        let mtu = own.mtu_bytes.to_string();
        namespace.exec(&["ip", "link", "set", "flannel0", "mtu", &mtu, "up"]);
        let network = format!("{}/{}", peer.network(), peer.length());
        namespace.exec(&["ip", "route", "replace", &network, "dev", "flannel0"]);
        process
    }
}
