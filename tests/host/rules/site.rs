//! Two hosts with a pod each, a machine outside, and one variant of the firewall's programs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use tempfile::TempDir;

use crate::support::lab::{Lab, Namespace, Process, SubnetEnv, UNDERLAY, WEFTD, wait_until};
use crate::support::overlay::local_store;
use crate::support::pace::Stopwatch;
use crate::support::status::Status;

/// The machine that knows nothing of the overlay, and host 0's address on the link to it.
pub(crate) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
pub(crate) const HOST_OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);

/// A variant of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// iptables on the kernel's nf_tables, Debian's default.
    IptablesNft,
    /// iptables on its own tables, with the lock.
    IptablesLegacy,
    /// nft.
    Nft,
}

impl Variant {
    pub(crate) const ALL: [Self; 3] = [Self::IptablesNft, Self::IptablesLegacy, Self::Nft];

    pub(crate) fn config(self, network: &str) -> String {
        let nft = self == Self::Nft;
        format!(r#"{{"Network":"{network}","EnableNFTables":{nft},"Backend":{{"Type":"udp"}}}}"#)
    }

    /// A directory in front of `PATH`, below `dir`, in which `iptables` is this variant.
    pub(crate) fn programs(self, dir: &Path) -> PathBuf {
        let programs = dir.join(format!("{self:?}"));
        std::fs::create_dir_all(&programs).expect("the test's directory is writable");
        let multi = match self {
            Self::IptablesNft | Self::Nft => "/usr/sbin/xtables-nft-multi",
            Self::IptablesLegacy => "/usr/sbin/xtables-legacy-multi",
        };
        for name in ["iptables", "iptables-save", "iptables-restore"] {
            std::os::unix::fs::symlink(multi, programs.join(name)).ok();
            let name = name.replace("ip", "ip6");
            std::os::unix::fs::symlink(multi, programs.join(name)).ok();
        }
        programs
    }

    /// Takes every rule out, ours and those of others.
    pub(crate) fn flush(self, dir: &Path, namespace: &Namespace) {
        match self {
            Self::Nft => _ = namespace.exec(&["nft", "flush", "ruleset"]),
            Self::IptablesNft | Self::IptablesLegacy => {
                for table in ["nat", "filter"] {
                    self.iptables(dir, namespace, &["-t", table, "-F"]);
                }
            }
        }
    }

    pub(crate) fn iptables(self, dir: &Path, namespace: &Namespace, arguments: &[&str]) -> String {
        self.program(dir, namespace, "iptables", arguments)
    }

    /// Our rules of IPv4 as the firewall lists them, without counters and handles.
    pub(crate) fn rules(self, dir: &Path, namespace: &Namespace) -> Vec<String> {
        self.rules_of("ip", dir, namespace)
    }

    /// The same for a family by its word, `ip` or `ip6`.
    pub(crate) fn rules_of(self, word: &str, dir: &Path, namespace: &Namespace) -> Vec<String> {
        let list = match self {
            Self::Nft => namespace.exec(&["nft", "list", "ruleset", word]),
            Self::IptablesNft | Self::IptablesLegacy => {
                self.program(dir, namespace, &format!("{word}tables-save"), &[])
            }
        };
        let ours = |line: &&str| match self {
            Self::Nft => {
                let is_of = |end: &str| line.contains(&format!("{word} {end}"));
                is_of("saddr") || is_of("daddr") || line.contains("mark")
            }
            Self::IptablesNft | Self::IptablesLegacy => {
                line.starts_with("-A") && (line.contains("flanneld") || line.contains("FLANNEL"))
            }
        };
        list.lines().filter(ours).map(|line| line.trim().to_owned()).collect()
    }

    /// Has one of the variant's programs run.
    pub(crate) fn program(
        self,
        dir: &Path,
        namespace: &Namespace,
        name: &str,
        words: &[&str],
    ) -> String {
        let program = self.programs(dir).join(name);
        let lock = lock_file(dir);
        let mut argv = vec!["/usr/bin/env", &lock, program.to_str().expect("a readable path")];
        argv.extend(words);
        namespace.exec(&argv)
    }
}

/// The lab with its daemons. Fields are dropped in order: daemons before their files.
pub(crate) struct Site {
    pub(crate) daemons: Vec<Process>,
    pub(crate) lab: Lab,
    pub(crate) outside: Namespace,
    pub(crate) leases: [SubnetEnv; 2],
    pub(crate) files: TempDir,
}

impl Site {
    /// Both daemons with the same arguments, their pods connected; `before` prepares each host.
    #[track_caller]
    pub(crate) fn start(
        variant: Variant,
        arguments: &[&str],
        before: impl Fn(&Path, &Namespace),
    ) -> Self {
        let files = tempfile::tempdir().expect("a directory for the test");
        let (lab, outside) = (Lab::two_hosts(), Namespace::new("out"));
        lab.hosts[0].link("out0", &outside, "out0", 1500);
        lab.hosts[0].address("out0", &format!("{HOST_OUTSIDE}/24"));
        outside.address("out0", &format!("{OUTSIDE}/24"));
        local_store(files.path(), &variant.config("10.5.0.0/16"));
        let mut daemons = Vec::new();
        for host in 0..2 {
            before(files.path(), &lab.hosts[host]);
            daemons.push(weftd(variant, files.path(), &lab.hosts[host], host, arguments));
        }
        let mut lease = |host: usize| {
            let path = files.path().join(format!("h{host}/subnet.env"));
            SubnetEnv::wait(&path, &mut daemons[host])
        };
        let leases = [lease(0), lease(1)];
        lab.connect_pods(leases.each_ref());
        for host in 0..2 {
            let dir = files.path().join(format!("h{host}"));
            wait_until(Duration::from_secs(10), "each daemon learns the other's lease", || {
                Status::try_of(&dir).is_some_and(|status| status.routes() == 1)
            });
        }
        Self { daemons, lab, outside, leases, files }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.files.path()
    }

    /// Waits until the daemon on `host` says that its rules are there.
    #[track_caller]
    pub(crate) fn wait_for_rules(&self, host: usize) {
        let dir = self.dir().join(format!("h{host}"));
        wait_until(Duration::from_secs(10), "the rules are in place", || {
            rules_in_place(&dir) == Some(true)
        });
    }
}

/// What a daemon's status says of its rules.
pub(crate) fn rules_in_place(dir: &Path) -> Option<bool> {
    Status::try_of(dir)?.0["rules"]["in_place"].as_bool()
}

/// A daemon that finds the variant's programs first; its files are in `dir/hHOST`.
#[track_caller]
pub(crate) fn weftd(
    variant: Variant,
    dir: &Path,
    namespace: &Namespace,
    host: usize,
    arguments: &[&str],
) -> Process {
    let path = format!("PATH={}:/usr/sbin:/usr/bin", variant.programs(dir).display());
    weftd_with(&[&path, &lock_file(dir)], dir, namespace, host, arguments)
}

/// The lock of iptables, not that of the machine.
fn lock_file(dir: &Path) -> String {
    format!("XTABLES_LOCKFILE={}", dir.join("xtables.lock").display())
}

/// A daemon with these variables; env(1) takes options and another program's words as well.
#[track_caller]
pub(crate) fn weftd_with(
    variables: &[&str],
    dir: &Path,
    namespace: &Namespace,
    host: usize,
    arguments: &[&str],
) -> Process {
    let own = dir.join(format!("h{host}"));
    let all = [
        format!("--local-store={}", dir.join("store").display()),
        format!("--iface={}", UNDERLAY[host]),
        format!("--subnet-file={}", own.join("subnet.env").display()),
        format!("--status-socket={}", own.join("weft.sock").display()),
    ];
    let mut argv = vec!["/usr/bin/env"];
    argv.extend(variables);
    argv.push(WEFTD);
    argv.extend(all.iter().map(String::as_str));
    argv.extend(arguments);
    namespace.spawn(&argv)
}

/// The source address under which a datagram from `from`, sent by `source`, arrives at `at`.
#[track_caller]
pub(crate) fn source_seen<A: Into<IpAddr> + FromStr>(
    (from, source): (&Namespace, A),
    (at, address): (&Namespace, A),
) -> Option<A> {
    let (source, address): (IpAddr, IpAddr) = (source.into(), address.into());
    let receiver = at.enter(|| {
        let anywhere = match address {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((anywhere, 0)).expect("a free port");
        if let IpAddr::V4(group) = address
            && group.is_multicast()
        {
            socket.join_multicast_v4(&group, &OUTSIDE).expect("the group can be joined");
        }
        socket
    });
    receiver.set_read_timeout(Some(Duration::from_millis(300))).expect("a time is a time");
    let port = receiver.local_addr().expect("it is bound").port();
    let sender = from.enter(|| UdpSocket::bind((source, 0)).expect("the address is there"));
    let watch = Stopwatch::start();
    // The first may be lost to an address that is being resolved.
    while !watch.is_over(Duration::from_millis(1500)) {
        sender.send_to(b"who am I?", (address, port)).ok();
        if let Ok((_, source)) = receiver.recv_from(&mut [0; 64]) {
            return source.ip().to_string().parse().ok();
        }
    }
    None
}
