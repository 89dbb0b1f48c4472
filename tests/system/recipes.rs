//! The recipes in `deploy/README.md`, run as they are written: hosts are network namespaces with
//! their own `/etc`, `/usr`, `/run` and `/var/lib`. Two programs are fakes: `cargo` builds
//! nothing, and `systemctl` records its arguments; the test then starts what the unit says.

#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(clippy::print_stdout, reason = "measured figures belong into the report of the run")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::support::lab::{Namespace, Process, SubnetEnv, enter_at, wait_until};

const README: &str = include_str!("../../deploy/README.md");
const UNDERLAY: [&str; 2] = ["172.20.0.1", "172.20.0.2"];
const MTU: u32 = 1472;

/// The files in `/etc` that programs need; the recipes see nothing else of the machine's.
const NEEDED_OF_ETC: &str =
    "alternatives group hosts iproute2 ld.so.cache nsswitch.conf passwd protocols services";

/// Far longer than a transfer ever waits.
const STALL: Duration = Duration::from_secs(60);

/// The blocks that are run, by the heading that they stand under.
fn blocks(heading: &str) -> Vec<&'static str> {
    let section = README.split("\n## ").find(|section| section.lines().next() == Some(heading));
    let section = section.unwrap_or_else(|| panic!("deploy/README.md has no section {heading}"));
    let after = section.split("```sh\n").skip(1);
    after.map(|rest| rest.split("\n```").next().unwrap_or(rest)).collect()
}

/// A host: its network, and a process that keeps its view of the file system.
struct Host {
    anchor: Process,
    programs: Vec<Process>,
    network: Namespace,
    files: TempDir,
}

impl Host {
    /// The directory `shared` is `/var/lib/weft` of each host.
    fn new(network: Namespace, shared: &Path) -> Self {
        let files = tempfile::tempdir().unwrap();
        let root = files.path();
        for name in ["bin", "etc", "usr", "run", "lib/weft", "repository/target/release"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        let repository = root.join("repository");
        symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy"), repository.join("deploy"))
            .unwrap();
        let release = repository.join("target/release");
        symlink(env!("CARGO_BIN_EXE_weftd"), release.join("weftd")).unwrap();
        symlink(env!("CARGO_BIN_EXE_weft"), release.join("weft")).unwrap();
        symlink(env!("CARGO_BIN_EXE_weft-cni"), release.join("weft-cni")).unwrap();
        stand_in(&root.join("bin/cargo"), "exit 0");
        let asked = format!("echo \"$*\" >>{}", root.join("asked").display());
        stand_in(&root.join("bin/systemctl"), &asked);
        let own = format!(
            "set -e; mount --make-rprivate /; for name in {NEEDED_OF_ETC}; do
                 [ ! -e /etc/$name ] || cp -a /etc/$name {0}/etc/
             done; mount --bind {0}/etc /etc
             mount -t tmpfs tmpfs {0}/usr; mkdir {0}/usr/upper {0}/usr/work
             mount -t overlay -o lowerdir=/usr,upperdir={0}/usr/upper,workdir={0}/usr/work o /usr
             mount --bind {0}/run /run; mount --bind {0}/lib /var/lib
             mount --bind {1} /var/lib/weft; touch {0}/ready; exec sleep infinity",
            root.display(),
            shared.display()
        );
        let anchor = network.spawn(&["unshare", "--mount", "bash", "-c", &own]);
        let ready = root.join("ready");
        wait_until(Duration::from_secs(10), "a host has directories of its own", || ready.exists());
        Self { anchor, programs: Vec::new(), network, files }
    }

    /// A command on this host, in the repository.
    fn command(&self, argv: &[&str]) -> Command {
        let pid = self.anchor.pid().as_raw_nonzero().to_string();
        let mut command = Command::new("nsenter");
        let repository = self.files.path().join("repository");
        command.args(["--target", &pid, "--mount", "--net"]);
        command.arg(format!("--wd={}", repository.display())).args(argv);
        let path = std::env::var("PATH").unwrap();
        let bin = self.files.path().join("bin");
        command.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin.display()));
        command
    }

    /// Runs a block as a user would type it; a line that fails ends it.
    #[track_caller]
    fn run(&self, block: &str) -> String {
        let output = self.command(&["bash", "-euc", block]).stdin(Stdio::null()).output().unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "this recipe fails:\n{block}\n{stdout}{stderr}");
        stdout.into_owned()
    }

    /// What systemctl was asked so far.
    fn asked(&self) -> String {
        fs::read_to_string(self.files.path().join("asked")).unwrap_or_default()
    }

    /// Starts what an installed unit says, with the environment that it names.
    fn start_unit(&mut self, name: &str) {
        let unit = fs::read_to_string(self.files.path().join("etc/systemd/system").join(name));
        let unit = unit.unwrap_or_else(|error| panic!("{name} is not installed: {error}"));
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key));
        // A shell reads quotes and variables as systemd does, which writes $$ for a dollar.
        let start = format!("exec {}", value("ExecStart=").unwrap().replace("$$", "$"));
        let mut environment = BTreeMap::new();
        if let Some(place) = value("EnvironmentFile=-/etc/") {
            let file = fs::read_to_string(self.files.path().join("etc").join(place)).unwrap();
            let lines = file.lines().filter(|line| !line.starts_with('#'));
            let pairs = lines.filter_map(|line| line.split_once('='));
            environment.extend(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
        }
        let mut command = self.command(&["sh", "-c", &start]);
        command.envs(environment);
        self.programs.push(Process::start(&mut command, name));
    }

    fn subnet_env(&self) -> PathBuf {
        self.files.path().join("run/flannel/subnet.env")
    }

    /// The namespace `pod` of the recipe.
    fn pod(&self) -> PathBuf {
        let pid = self.anchor.pid().as_raw_nonzero().to_string();
        Path::new("/proc").join(pid).join("root/run/netns/pod")
    }

    /// The address that the recipe gave to `pod`.
    fn pod_address(&self) -> String {
        let shown = self.run("ip netns exec pod ip -o -4 address show eth0");
        let words: Vec<_> = shown.split_whitespace().collect();
        let address = words.iter().skip_while(|word| **word != "inet").nth(1);
        address.unwrap().split('/').next().unwrap().to_owned()
    }
}

fn stand_in(path: &Path, line: &str) {
    fs::write(path, format!("#!/bin/bash\n{line}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Two hosts on one wire, `eth0`, with a default route as hosts have.
fn two_hosts(shared: &Path) -> [Host; 2] {
    let networks = [Namespace::new("r1"), Namespace::new("r2")];
    networks[0].link("eth0", &networks[1], "eth0", 1500);
    let mut hosts = networks.into_iter().enumerate().map(|(index, network)| {
        network.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
        network.address("eth0", &format!("{}/24", UNDERLAY[index]));
        network.exec(&["ip", "route", "add", "default", "via", "172.20.0.254"]);
        Host::new(network, shared)
    });
    [hosts.next().unwrap(), hosts.next().unwrap()]
}

/// Installs, configures by the block `choice` of the section on systemd, and starts.
fn start(host: &mut Host, choice: usize) {
    for block in blocks("Install") {
        host.run(block);
    }
    let systemd = blocks("systemd");
    host.run(systemd[0]);
    host.run(systemd[choice]);
    let (ask, look) = systemd[3].split_once("weft status").unwrap();
    host.run(ask);
    assert_eq!(host.asked(), "daemon-reload\nenable --now weftd\n");
    host.start_unit("weftd.service");
    let path = host.subnet_env();
    let lease = SubnetEnv::wait(&path, host.programs.last_mut().unwrap());
    assert_eq!(lease.mtu_bytes, MTU);
    let status = format!("until weft status >/dev/null; do sleep 0.1; done\nweft status{look}");
    let shown = host.run(&status);
    assert!(shown.contains(&format!("FLANNEL_SUBNET={}", lease.subnet)), "{shown}");
}

/// 16 MiB from pod to pod, and back, byte for byte.
#[track_caller]
fn tcp_both_ways(client: &Host, server: &Host, address: &str) {
    let listener = enter_at(&server.pod(), || TcpListener::bind((address, 0))).unwrap();
    let target = listener.local_addr().unwrap();
    let there = enter_at(&client.pod(), || TcpStream::connect_timeout(&target, STALL)).unwrap();
    let (back, seen) = listener.accept().unwrap();
    assert_eq!(seen.ip().to_string(), client.pod_address(), "a pod is seen with another address");
    let bytes: Vec<u8> = (0..16_u32 << 20).map(|index| (index ^ (index >> 11)) as u8).collect();
    for (mut from, mut to) in [(&there, &back), (&back, &there)] {
        to.set_read_timeout(Some(STALL)).unwrap();
        let mut received = vec![0; bytes.len()];
        thread::scope(|scope| {
            scope.spawn(|| from.write_all(&bytes).unwrap());
            to.read_exact(&mut received).expect("TCP between pods stalls");
        });
        assert!(received == bytes, "other bytes came through TCP than were sent");
    }
}

#[test]
fn every_recipe_block_has_a_test() {
    let run = ["Install", "systemd", "Docker", "CNI"].map(|heading| blocks(heading).len());
    assert_eq!(run, [1, 4, 2, 3], "a test knows the blocks by their place");
    let all = README.matches("```sh\n").count();
    assert_eq!(run.iter().sum::<usize>(), all, "a block stands where no test looks for it");
}

#[test]
fn debian_cni_pods_talk_across_hosts() {
    let shared = tempfile::tempdir().unwrap();
    let mut hosts = two_hosts(shared.path());
    for host in &mut hosts {
        start(host, 2);
    }
    let cni = blocks("CNI");
    for host in &hosts {
        host.run(cni[0]);
        let shown = host.run(cni[1]);
        assert!(shown.contains(&format!("mtu {MTU}")), "the pod's MTU is another: {shown}");
    }
    let addresses = [0, 1].map(|host: usize| hosts[host].pod_address());
    println!("pods have {addresses:?}");
    for (from, to) in [(0, 1), (1, 0)] {
        let target = &addresses[to];
        let first = format!("until ip netns exec pod ping -q -c1 -W1 {target}; do sleep 0.1; done");
        hosts[from].run(&first);
        // A full packet may not be cut, and one byte more does not fit.
        hosts[from].run(&format!("ip netns exec pod ping -q -c3 -i0.05 -W1 -Mdo -s1444 {target}"));
        let more = format!("! ip netns exec pod ping -q -c1 -W1 -Mdo -s1445 {target}");
        hosts[from].run(&more);
    }
    tcp_both_ways(&hosts[0], &hosts[1], &addresses[1]);
    for host in &hosts {
        host.run(cni[2]);
        let left = host.run("ip -o link show master cni0; ls /var/lib/cni/networks/cbr0");
        assert!(!left.contains("veth") && !left.contains("10.5."), "something is left: {left}");
        host.run(cni[1]);
        host.run(cni[2]);
    }
}

#[test]
fn docker_s_options_follow_a_lease_in_etcd() {
    let shared = tempfile::tempdir().unwrap();
    let [mut host, _other] = two_hosts(shared.path());
    host.network.exec(&["ip", "address", "add", "10.0.0.5/32", "dev", "lo"]);
    let data = host.files.path().join("etcd");
    let etcd = [
        "etcd",
        &format!("--data-dir={}", data.display()),
        "--listen-client-urls=http://10.0.0.5:2379",
        "--advertise-client-urls=http://10.0.0.5:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--log-level=error",
    ];
    host.programs.push(host.network.spawn(&etcd));
    host.run("until etcdctl --endpoints=http://10.0.0.5:2379 endpoint health; do sleep 0.2; done");
    start(&mut host, 1);
    let docker = blocks("Docker");
    let lease = SubnetEnv::read(&host.subnet_env()).unwrap();
    let expected = format!("DOCKER_OPTS=\" --bip={} --ip-masq=false --mtu={MTU}\"\n", lease.subnet);
    assert_eq!(host.run(docker[0]), expected);
    host.run(docker[1]);
    let asked = host.asked();
    let last: Vec<_> = asked.lines().skip(2).collect();
    assert_eq!(last, ["daemon-reload", "enable --now weft-docker-opts", "restart docker"]);
    // The file is where the options of weftd say, which for a test alone is another one.
    let elsewhere = "sed s/^FLANNEL_MTU=.*/FLANNEL_MTU=1400/ /run/flannel/subnet.env \
                     >/var/lib/weft/subnet.env\n\
                     echo FLANNELD_SUBNET_FILE=/var/lib/weft/subnet.env >>/etc/default/weftd";
    for (mtu, before) in [(MTU, "true"), (1400, elsewhere)] {
        host.run(before);
        host.run("rm /run/docker_opts.env");
        host.start_unit("weft-docker-opts.service");
        let end = host.programs.last_mut().unwrap().wait(Duration::from_secs(10));
        assert!(end.success(), "weft-docker-opts.service fails");
        let written = host.run("cat /run/docker_opts.env");
        assert_eq!(written, expected.replace(&MTU.to_string(), &mtu.to_string()));
    }
    let unit = host.run("cat /etc/systemd/system/docker.service.d/weft.conf");
    assert!(unit.contains("EnvironmentFile=-/run/docker_opts.env"), "{unit}");
    assert!(unit.contains("$DOCKER_OPTS"), "{unit}");
}
