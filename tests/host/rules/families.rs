//! The rules of a network that has IPv6 beside IPv4, and what a network without it leaves alone.

use std::net::Ipv6Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use weft::config::subnet_file::Previous;
use weft::netfilter::diff::Trigger;
use weft::netfilter::reconciler::{Flavour, RuleReconciler};
use weft::netfilter::rules::Wanted;
use weft::route::{Prefix, Prefixes};

use crate::rules::MASQUERADE;
use crate::rules::faults::Host;
use crate::rules::site::{Variant, rules_in_place, source_seen, weftd};
use crate::support::lab::{LEASE_TIMEOUT, Namespace, Process, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

/// For a check, a repair, and the machine.
const SOON: Duration = Duration::from_secs(10);

/// A machine outside the overlay, and the host's address on the link to it.
const OUTSIDE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
const HOST_OUTSIDE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// Set for the process that checks the rules of one firewall: its name.
const CHECKED: &str = "WEFT_TEST_CHECKED_FIREWALL";

/// The configuration of a network with both families.
fn dual(variant: Variant) -> String {
    let families = r#""EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"alloc"}"#;
    variant.config("10.5.0.0/16").replace(r#""Backend":{"Type":"udp"}"#, families)
}

impl Host {
    /// A weftd whose rules are in place.
    #[track_caller]
    fn start(&self, variant: Variant) -> Process {
        let daemon = weftd(variant, self.files.path(), &self.lab.hosts[0], 0, MASQUERADE);
        wait_until(LEASE_TIMEOUT, "the rules are in place", || {
            self.is_ready() && rules_in_place(&self.dir()) == Some(true)
        });
        daemon
    }

    /// Our rules in this variant, of IPv4 and of IPv6.
    fn rules(&self, variant: Variant) -> [Vec<String>; 2] {
        let of = |word| variant.rules_of(word, self.files.path(), &self.lab.hosts[0]);
        ["ip", "ip6"].map(of)
    }

    /// How many rules of ours each family has.
    fn counts(&self, variant: Variant) -> [usize; 2] {
        self.rules(variant).map(|rules| rules.len())
    }
}

/// Rules and jumps of one family.
fn count_of(variant: Variant) -> usize {
    if variant == Variant::Nft { 8 } else { 10 }
}

fn address(namespace: &Namespace, device: &str, address: Ipv6Addr) {
    let address = format!("{address}/64");
    namespace.exec(&["ip", "address", "add", &address, "dev", device, "nodad"]);
}

#[test]
fn pods_talk_to_the_world_by_ipv6_as_their_host() {
    for variant in Variant::ALL {
        let (site, outside) = (Host::with(&dual(variant)), Namespace::new("out"));
        let (host, pod) = (&site.lab.hosts[0], &site.lab.pods[0]);
        host.exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"]);
        if variant != Variant::Nft {
            // As Docker has it: what nobody accepts does not pass.
            variant.program(site.files.path(), host, "ip6tables", &["-P", "FORWARD", "DROP"]);
        }
        let _daemon = site.start(variant);
        let previous = Previous::read(&site.dir().join("subnet.env")).expect("it can be read");
        let subnet = previous.subnets.and_then(Prefixes::v6).expect("a subnet of IPv6");
        let gateway = subnet.first_host();
        let own = Ipv6Addr::from_bits(gateway.to_bits() + 1);
        host.link("out0", &outside, "out0", 1500);
        address(host, "out0", HOST_OUTSIDE);
        address(&outside, "out0", OUTSIDE);
        address(host, "pod0", gateway);
        address(pod, "eth0", own);
        pod.exec(&["ip", "route", "add", "default", "via", &gateway.to_string()]);
        // It has no way back to the overlay: who is not masqueraded gets no answers.
        let seen = source_seen((pod, own), (&outside, OUTSIDE));
        assert_eq!(seen, Some(HOST_OUTSIDE), "{variant:?}: outside sees the host for the pod");
        let network = "fd00:5::/48";
        outside.exec(&["ip", "route", "add", network, "via", &HOST_OUTSIDE.to_string()]);
        let seen = source_seen((&outside, OUTSIDE), (pod, own));
        assert_eq!(seen, Some(OUTSIDE), "{variant:?}: a pod sees a client that is routed to it");
        let network: Prefix<Ipv6Addr> = network.parse().expect("a prefix");
        let remote = network.last();
        address(&outside, "out0", remote);
        host.exec(&["ip", "route", "add", &format!("{remote}/128"), "dev", "out0"]);
        let seen = source_seen((pod, own), (&outside, remote));
        assert_eq!(seen, Some(own), "{variant:?}: pods see each other's addresses");
    }
}

#[test]
fn lost_rules_of_ipv6_return_and_cleanup_takes_them() {
    for variant in Variant::ALL {
        let site = Host::with(&dual(variant));
        let (dir, host) = (site.files.path(), &site.lab.hosts[0]);
        let mut daemon = site.start(variant);
        let whole = site.rules(variant);
        assert_eq!(whole.each_ref().map(Vec::len), [count_of(variant); 2], "{variant:?}");
        assert!(whole[1].concat().contains("ff00::/8"), "multicast is masqueraded: {whole:?}");
        let damages: [&[&str]; 2] = match variant {
            Variant::Nft => [
                &["nft", "flush", "chain", "ip6", "flannel-ipv6", "postrtg"],
                &["nft", "delete", "table", "ip6", "flannel-ipv6"],
            ],
            Variant::IptablesNft | Variant::IptablesLegacy => {
                [&["ip6tables", "-t", "nat", "-F"], &["ip6tables", "-D", "FLANNEL-FWD", "2"]]
            }
        };
        for damage in damages {
            match variant {
                Variant::Nft => _ = host.exec(damage),
                Variant::IptablesNft | Variant::IptablesLegacy => {
                    variant.program(dir, host, damage[0], &damage[1..]);
                }
            }
            wait_until(SOON, "the rules are repaired", || site.rules(variant) == whole);
        }
        let repairs = || Status::of(&site.dir()).0["rules"]["repairs"].as_u64();
        wait_until(SOON, "both repairs are counted", || repairs() == Some(2));
        assert_eq!(daemon.stop(Signal::TERM, SOON).code(), Some(0));
        assert_eq!(site.rules(variant), whole, "{variant:?}: a stop leaves the rules");
        let path = format!("PATH={}:/usr/sbin:/usr/bin", variant.programs(dir).display());
        let file = site.dir().join("subnet.env").display().to_string();
        let weft = env!("CARGO_BIN_EXE_weft");
        let said = host.exec(&["/usr/bin/env", &path, weft, "cleanup", "--subnet-file", &file]);
        assert_eq!(site.counts(variant), [0, 0], "{variant:?}: rules are left: {said}");
    }
}

/// One host whose network gets and loses IPv6, in one firewall and the other.
#[test]
fn a_start_removes_rules_of_ipv6_that_nobody_wants() {
    let site = Host::with("{}");
    for (variant, has_ipv6) in [
        (Variant::IptablesNft, true),
        (Variant::IptablesNft, false),
        (Variant::IptablesNft, true),
        (Variant::Nft, true),
        (Variant::Nft, false),
        (Variant::Nft, true),
        (Variant::IptablesNft, false),
    ] {
        let plain = variant.config("10.5.0.0/16");
        let config = if has_ipv6 { dual(variant) } else { plain };
        local_store(site.files.path(), &config);
        let mut daemon = site.start(variant);
        let other_has_rules = || match variant {
            Variant::Nft => site.counts(Variant::IptablesNft) != [0, 0],
            Variant::IptablesNft | Variant::IptablesLegacy => {
                site.lab.hosts[0].exec(&["nft", "list", "tables"]).contains("flannel-")
            }
        };
        let wanted = [count_of(variant), if has_ipv6 { count_of(variant) } else { 0 }];
        // It happens right after the rules are in place.
        wait_until(SOON, "only what is wanted is left", || {
            site.counts(variant) == wanted && !other_has_rules()
        });
        assert_eq!(daemon.stop(Signal::TERM, SOON).code(), Some(0));
    }
}

#[test]
fn missing_ip6tables_counts_as_missing_iptables() {
    let variant = Variant::IptablesNft;
    let site = Host::with(&dual(variant));
    let programs = variant.programs(site.files.path());
    let ip6tables = ["ip6tables", "ip6tables-save", "ip6tables-restore"];
    for name in ip6tables {
        std::fs::remove_file(programs.join(name)).expect("it is there");
    }
    let path = format!("PATH={}", programs.display());
    let mut daemon = site.weftd(&[&path], &["--ip-masq"]);
    assert_eq!(daemon.wait(LEASE_TIMEOUT).code(), Some(1), "{}", daemon.output());
    let log = daemon.output();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("PATH") && last.contains("ip6tables"), "{log}");
    // Without masquerading it goes on, with the rules that it can set.
    let daemon = site.weftd(&[&path], &["--iptables-resync=1"]);
    wait_until(LEASE_TIMEOUT, "weftd is ready without forward rules", || site.is_ready());
    wait_until(SOON, "it is told", || daemon.complaints("ip6tables") == 1);
    assert_eq!(rules_in_place(&site.dir()), Some(false), "half of the rules are not the rules");
    // Another daemon on this host has no part in it.
    let iptables = programs.join("iptables").display().to_string();
    let theirs = ["-A", "FLANNEL-FWD", "-s", "10.6.0.0/16", "-j", "ACCEPT"];
    let host = &site.lab.hosts[0];
    host.exec(&[&[iptables.as_str()], &theirs[..]].concat());
    let failures = || Status::of(&site.dir()).0["rules"]["failures"].as_u64().unwrap_or(0);
    let before = failures();
    wait_until(SOON, "it is tried again", || failures() >= before + 2);
    let found = host.exec(&[&iptables, "-S", "FLANNEL-FWD"]);
    assert!(found.contains("10.6.0.0/16"), "its rules are removed: {found}");
    let forward = |rules: Vec<String>| rules.concat().matches("FLANNEL-FWD -").count();
    // `rules` makes the missing programs again: somebody installs them.
    wait_until(SOON, "both families have their rules", || {
        site.rules(variant).map(forward) == [2 + 1, 2] && rules_in_place(&site.dir()) == Some(true)
    });
}

/// What a network without IPv6 runs at a start, before and after its rules are set, and at a check.
fn commands(variant: Variant) -> (&'static str, &'static str) {
    match variant {
        Variant::IptablesNft => (
            "iptables --version\nCHECKiptables-restore --noflush --wait=5\n\
             ip6tables-save\nnft -j list tables\n",
            "iptables -t nat -S POSTROUTING\niptables -t nat -S FLANNEL-POSTRTG\n\
             iptables -t filter -S FORWARD\niptables -t filter -S FLANNEL-FWD\n",
        ),
        Variant::IptablesLegacy => (
            "iptables --version\nCHECKiptables-restore --noflush --wait=5\n\
             ip6tables-save\nnft -j list tables\n",
            "iptables-save -t nat\niptables-save -t filter\n",
        ),
        Variant::Nft => (
            "CHECKnft -f -\niptables-save\nip6tables-save\nnft -j list tables\n",
            "nft -j list table ip flannel-ipv4\n",
        ),
    }
}

/// Programs that write down how they are called, in front of the variant's.
fn wrappers(variant: Variant, dir: &Path) -> PathBuf {
    let (real, wrappers) = (variant.programs(dir), dir.join("wrappers"));
    std::fs::create_dir(&wrappers).expect("the test's directory is writable");
    let iptables = ["iptables", "iptables-save", "iptables-restore"].map(str::to_owned);
    let ip6tables = iptables.each_ref().map(|name| name.replace("ip", "ip6"));
    let all = iptables.iter().chain(&ip6tables).map(|name| (name.as_str(), real.join(name)));
    for (name, program) in all.chain([("nft", PathBuf::from("/usr/sbin/nft"))]) {
        let (log, program) = (dir.join("log"), program.display());
        let log = format!("echo ${{0##*/}} $* >> {}", log.display());
        let (script, path) = (format!("{log}\nexec {program} \"$@\"\n"), wrappers.join(name));
        std::fs::write(&path, format!("#!/bin/sh\n{script}")).expect("the directory is writable");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("it is ours");
    }
    wrappers
}

/// IPv6 costs such a network a listing at the start, which makes no table and loads no module.
#[test]
fn network_without_ipv6_runs_its_old_commands() {
    for variant in Variant::ALL {
        let (namespace, files) = (Namespace::new("plain"), tempfile::tempdir().expect("a place"));
        let (dir, program) = (files.path(), std::env::current_exe().expect("a test has a program"));
        let mut command = namespace.command(&[program.to_str().expect("a readable path")]);
        command.args(["--exact", "rules::families::three_checks", "--nocapture"]);
        let path = format!("{}:/usr/sbin:/usr/bin", wrappers(variant, dir).display());
        command.env("PATH", path).env("XTABLES_LOCKFILE", dir.join("xtables.lock"));
        command.env(CHECKED, if variant == Variant::Nft { "nftables" } else { "iptables" });
        let output = command.output().expect("the test's program runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let (start, check) = commands(variant);
        let found = std::fs::read_to_string(dir.join("log")).expect("they were written down");
        let expected = start.replace("CHECK", check) + check + check;
        assert_eq!(found, expected, "{variant:?}");
        let made = namespace.exec(&["nft", "list", "tables", "ip6"]);
        assert_eq!(made, "", "{variant:?}: a table of IPv6 was made");
        let names = "cat /proc/net/ip6_tables_names 2> /dev/null || true";
        let made = namespace.exec(&["sh", "-c", names]);
        assert_eq!(made, "", "{variant:?}: ip6tables has got tables");
    }
}

/// A start and two checks; nothing where it was not asked for.
#[test]
fn three_checks() {
    let Ok(name) = std::env::var(CHECKED) else { return };
    let flavour = Flavour::ALL.iter().find(|flavour| flavour.name() == name);
    let flavour = *flavour.expect("the name of a firewall");
    let wanted = Wanted {
        networks: "10.5.0.0/16".parse().expect("a prefix"),
        subnets: "10.5.3.0/24".parse().expect("a prefix"),
        masquerade: true,
        forward: true,
        random_ports: true,
    };
    let mut reconciler = RuleReconciler::new(flavour, wanted, Duration::from_secs(5));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        for trigger in [Trigger::Start, Trigger::Resync, Trigger::Resync] {
            reconciler.reconcile(trigger).await.expect("the rules can be set and read");
        }
    });
}
