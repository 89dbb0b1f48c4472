//! The extension backend with a program that records how it was called.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::kernel_backends::{SOON, families, put, value};
use crate::support::lab::{Lab, Process, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;

/// Writes its arguments, the variables that it is promised, and its input to a file of its own,
/// prints what flannel's commands print, fails while `fail` exists, and hangs, with a child, for
/// the subnet that `hang` names.
const RECORDER: &str = r#"#!/bin/sh
dir=$(dirname "$0")
input=$(cat)
{
  for word in "$@"; do printf '<%s>' "$word"; done
  printf ' NETWORK=%s SUBNET=%s PUBLIC_IP=%s' "$NETWORK" "$SUBNET" "$PUBLIC_IP"
  [ -z "$IPV6SUBNET" ] || printf ' IPV6SUBNET=%s PUBLIC_IPV6=%s' "$IPV6SUBNET" "$PUBLIC_IPV6"
  printf ' SECRET=%s INHERITED=%s INPUT=[%s]\n' "$NOTIFY_SOCKET" "$TEST_OF_WEFT" "$input"
} >> "$dir/calls"
if [ "$1" = add ] && [ -e "$dir/fail" ]; then echo cannot add; exit 3; fi
if [ "$1" = add ] && [ "$SUBNET" = "$(cat "$dir/hang" 2>/dev/null)" ]; then
  sleep 600 & echo $! > "$dir/child"; wait
fi
echo "  out <$1>; \$(touch $dir/shell)  "
echo err >&2
"#;

struct Site {
    dir: tempfile::TempDir,
    lab: Lab,
    daemon: Process,
}

impl Site {
    /// One weftd whose commands are the recorder with a word for each.
    fn start() -> Self {
        Self::start_in(Lab::two_hosts(), "")
    }

    /// The same in `lab`, with these keys in the network configuration.
    fn start_in(lab: Lab, keys: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let recorder = dir.path().join("recorder");
        std::fs::write(&recorder, RECORDER).unwrap();
        std::fs::set_permissions(&recorder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let name = recorder.display();
        // What a shell would take apart, expand or run.
        let config = format!(
            r#"{{"Network":"10.5.0.0/16","SubnetMax":"10.5.99.0",{keys}
            "Backend":{{"Type":"extension",
            "PreStartupCommand":"{name} pre ; touch {dir}/shell $(touch {dir}/shell)",
            "PostStartupCommand":"{name} post $NETWORK ${{SUBNET}}",
            "SubnetAddCommand":"{name} add $SUBNET $PUBLIC_IP && touch {dir}/shell",
            "SubnetRemoveCommand":"{name} remove $SUBNET | $NONE `id`"}}}}"#,
            dir = dir.path().display()
        );
        let store = local_store(dir.path(), &config);
        let mut command = lab.hosts[0].command(&["env", "TEST_OF_WEFT=yes"]);
        command.env("NOTIFY_SOCKET", "/nonexistent/of/weft");
        let home = dir.path().join("h0");
        command.args([
            crate::support::lab::WEFTD,
            "--iface=172.20.0.1",
            "--iface=wire0",
            "--iptables-forward-rules=false",
            &format!("--subnet-file={}", home.join("subnet.env").display()),
            &format!("--status-socket={}", home.join("weft.sock").display()),
            &store,
        ]);
        let mut daemon = Process::start(&mut command, "weftd");
        SubnetEnv::wait(&home.join("subnet.env"), &mut daemon);
        Self { dir, lab, daemon }
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("h0")
    }

    fn files(&self) -> &Path {
        self.dir.path()
    }

    fn calls(&self, of: &str) -> Vec<String> {
        let calls = std::fs::read_to_string(self.files().join("calls")).unwrap_or_default();
        calls.lines().filter(|line| line.starts_with(of)).map(str::to_owned).collect()
    }

    fn told(&self, name: &str) -> u64 {
        Status::of(&self.home()).0["backend"][name].as_u64().unwrap()
    }
}

#[test]
fn commands_run_as_documented_without_a_shell() {
    let site = Site::start();
    let lease = SubnetEnv::read(&site.home().join("subnet.env")).unwrap();
    let subnet = format!("{}/24", lease.network());
    assert_eq!(lease.mtu_bytes, 1500);
    let dir = site.files().display();
    let pre = format!(
        "<pre><;><touch><{dir}/shell><$(touch><{dir}/shell)> NETWORK= SUBNET= PUBLIC_IP= SECRET= \
         INHERITED=yes INPUT=[]"
    );
    assert_eq!(site.calls("<pre>"), [pre]);
    let post = format!(
        "<post><10.5.0.0/16><{subnet}> NETWORK=10.5.0.0/16 SUBNET={subnet} PUBLIC_IP=172.20.0.1 \
         SECRET= INHERITED=yes INPUT=[]"
    );
    assert_eq!(site.calls("<post>"), [post]);
    let key = format!("store/subnets/{}-24", lease.network());
    let own = std::fs::read_to_string(site.files().join(key)).unwrap();
    let output = format!(r#""out \u003cpre\u003e; $(touch {dir}/shell)  \nerr""#);
    let data = format!(r#""BackendType":"extension","BackendData":{output}"#);
    assert!(own.contains(&data), "not the trimmed output of both kinds: {own}");
    // A peer with hostile data, and one of another backend.
    let hostile = r#""$(touch shell); `touch shell` | \"'\n\u0000 -rf""#;
    put(site.files(), "10.5.100.0-24", &value("172.20.0.2", "extension", hostile));
    put(site.files(), "10.5.101.0-24", &value("172.20.0.3", "vxlan", "null"));
    put(site.files(), "10.5.102.0-24", &value("172.20.0.4", "extension", r#"{"no":"string"}"#));
    wait_until(SOON, "the peer is added", || site.told("peers_programmed") == 1);
    let added = format!(
        "<add><10.5.100.0/24><172.20.0.2><&&><touch><{dir}/shell> NETWORK= SUBNET=10.5.100.0/24 \
         PUBLIC_IP=172.20.0.2 SECRET= INHERITED=yes INPUT=[$(touch shell); `touch shell` | \"'"
    );
    assert_eq!(site.calls("<add>"), [added]);
    wait_until(SOON, "the others are not", || {
        (site.told("leases_ignored"), site.told("leases_unusable")) == (1, 1)
    });
    // Moved: taken away with the old values, added with the new ones.
    put(site.files(), "10.5.100.0-24", &value("172.20.0.22", "extension", r#""new""#));
    // The command writes its line in pieces.
    wait_until(SOON, "the peer is added anew, with its data", || {
        site.calls("<add>").get(1).is_some_and(|call| call.ends_with("INPUT=[new]"))
    });
    assert!(site.calls("<remove>")[0].contains("PUBLIC_IP=172.20.0.2 "));
    assert!(site.calls("<add>")[1].contains("PUBLIC_IP=172.20.0.22 "));
    std::fs::remove_file(site.files().join("store/subnets/10.5.100.0-24")).unwrap();
    wait_until(SOON, "the peer is removed", || site.told("peers_programmed") == 0);
    let removed = "<remove><10.5.100.0/24><|><><`id`> NETWORK= SUBNET=10.5.100.0/24 \
                   PUBLIC_IP=172.20.0.22 SECRET= INHERITED=yes INPUT=[new]";
    assert_eq!(site.calls("<remove>")[1], removed);
    for place in [site.files().join("shell"), PathBuf::from("shell")] {
        assert!(!place.exists(), "something went through a shell");
    }
}

#[test]
fn commands_get_the_subnets_and_addresses_of_both_families() {
    let keys = r#""EnableIPv6":true,"IPv6Network":"fd00:5::/48","#;
    let site = Site::start_in(families::lab(), keys);
    let env = std::fs::read_to_string(site.home().join("subnet.env")).unwrap();
    let own = env.lines().find_map(|line| line.strip_prefix("FLANNEL_IPV6_SUBNET=")).unwrap();
    let own = own.replace("::1/", "::/");
    let post = site.calls("<post>");
    assert!(post[0].contains(&format!(" IPV6SUBNET={own} PUBLIC_IPV6=fd99::1 ")), "{post:?}");
    let value = value("172.20.0.2", "extension", r#""x""#).replace("null", r#""fd99::2""#);
    let key = "10.5.100.0-24&fd00:5:0:100::-64";
    put(site.files(), key, &value);
    put(site.files(), "10.5.101.0-24", &self::value("172.20.0.3", "extension", r#""y""#));
    wait_until(SOON, "both are added", || site.told("peers_programmed") == 2);
    let of = |call: &str, address: &str| {
        let v6 = format!(" PUBLIC_IP=172.20.0.2 IPV6SUBNET=fd00:5:0:100::/64 {address} ");
        site.calls(call).iter().filter(|call| call.contains(&v6)).count()
    };
    assert_eq!(of("<add>", "PUBLIC_IPV6=fd99::2"), 1, "{:?}", site.calls("<add>"));
    assert!(site.calls("<add>").iter().any(|call| !call.contains("IPV6")), "IPv4 alone");
    // Moved in one family alone: what was set up for the old address goes.
    put(site.files(), key, &value.replace("fd99::2", "fd99::22"));
    wait_until(SOON, "it is added anew", || of("<add>", "PUBLIC_IPV6=fd99::22") == 1);
    assert_eq!(of("<remove>", "PUBLIC_IPV6=fd99::2"), 1, "{:?}", site.calls("<remove>"));
}

#[test]
fn failed_add_is_logged_and_retried() {
    let mut site = Site::start();
    std::fs::write(site.files().join("fail"), "").unwrap();
    put(site.files(), "10.5.100.0-24", &value("172.20.0.2", "extension", r#""x""#));
    wait_until(SOON, "the failure is counted", || site.told("peers_failed") == 1);
    wait_until(SOON, "the log tells what failed and why", || {
        let said = site.daemon.output();
        ["failed to run command", "cannot add", "exit status: 3"].iter().all(|w| said.contains(w))
    });
    // Others are not kept waiting.
    put(site.files(), "10.5.101.0-24", &value("172.20.0.3", "extension", r#""y""#));
    wait_until(SOON, "the second is tried", || site.told("peers_failed") == 2);
    std::fs::remove_file(site.files().join("fail")).unwrap();
    wait_until(SOON * 2, "both are added after all", || {
        (site.told("peers_programmed"), site.told("peers_failed")) == (2, 0)
    });
    assert!(site.told("failures") >= 2);
    assert!(site.daemon.ended().is_none());
    drop(site.lab);
}

#[test]
fn hanging_command_delays_no_other_host() {
    let mut site = Site::start();
    std::fs::write(site.files().join("hang"), "10.5.100.0/24").unwrap();
    put(site.files(), "10.5.100.0-24", &value("172.20.0.2", "extension", r#""x""#));
    let child = site.files().join("child");
    wait_until(SOON, "the command hangs", || child.exists());
    put(site.files(), "10.5.101.0-24", &value("172.20.0.3", "extension", r#""y""#));
    wait_until(SOON, "the other host is added", || site.told("peers_programmed") == 1);
    let begun = Instant::now();
    site.daemon.stop(Signal::TERM, Duration::from_secs(5));
    println!("stopped {:?} after SIGTERM, beside a command that hangs", begun.elapsed());
    let child = std::fs::read_to_string(child).unwrap();
    let process = Path::new("/proc").join(child.trim());
    wait_until(SOON, "the command's child is gone with it", || !is_running(&process));
}

/// Whether there is a process; one that only waits to be buried is none.
fn is_running(process: &Path) -> bool {
    let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

#[test]
fn changed_address_warns_about_start_commands() {
    let site = Site::start();
    let host = &site.lab.hosts[0];
    host.exec(&["ip", "address", "delete", "172.20.0.1/24", "dev", "wire0"]);
    host.exec(&["ip", "address", "add", "172.20.0.11/24", "dev", "wire0"]);
    let lease = SubnetEnv::read(&site.home().join("subnet.env")).unwrap();
    let own = site.files().join(format!("store/subnets/{}-24", lease.network()));
    wait_until(SOON, "the lease says the new address and keeps its data", || {
        let own = std::fs::read_to_string(&own).unwrap();
        own.contains(r#""PublicIP":"172.20.0.11""#) && own.contains("out \\u003cpre")
    });
    wait_until(SOON, "the operator is told", || site.daemon.complaints("172.20.0.11") > 0);
    assert_eq!((site.calls("<pre>").len(), site.calls("<post>").len()), (1, 1));
    // Peers are followed as before.
    put(site.files(), "10.5.100.0-24", &value("172.20.0.2", "extension", r#""x""#));
    wait_until(SOON, "a peer is added", || site.told("peers_programmed") == 1);
}
