//! `weftd.service` under a systemd that is the first process of a container of its own: this
//! machine's files under a temporary overlay, a network of its own, and the unit unchanged.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::deploy::{deploy, text};
use crate::support::overlay::CONFIG;

/// Boot, one start of weftd, one restart and a stop take a few seconds; on a busy machine, minutes.
const BOOT_LIMIT_S: &str = "900";

/// The commands that run inside; each output follows a line `== NAME`.
const PROBE: &str = r#"#!/bin/bash
exec >/out/answers 2>&1
ask() { echo == $1; shift; $@; }
ip link add eth9 type veth peer name eth8
ip link set eth9 up; ip link set eth8 up; ip address add 172.20.0.1/24 dev eth9
ask start systemctl start weftd
ask state systemctl show weftd -p ActiveState -p Type
ask status weft status
pid=$(systemctl show weftd -p MainPID --value)
ask rights grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/$pid/status
ask env cat /run/flannel/subnet.env
for try in {1..1000}; do
    iptables -t nat -S FLANNEL-POSTRTG && iptables -S FLANNEL-FWD && break
    sleep 0.1
done >/dev/null 2>&1
ask nat iptables -t nat -S FLANNEL-POSTRTG
ask forward iptables -S FLANNEL-FWD
ask usr nsenter --target $pid --mount touch /usr/weft-was-here
ask lock nsenter --target $pid --mount touch /run/xtables.lock
kill -KILL $pid
for try in {1..1000}; do
    sleep 0.1
    [[ $(systemctl show weftd -p NRestarts --value) != 0 ]] && weft status && break
done >/dev/null 2>&1
ask again systemctl show weftd -p ActiveState -p NRestarts
ask same cat /run/flannel/subnet.env
ask stop systemctl stop weftd
ask ended systemctl show weftd -p ActiveState -p Result
ask kept cat /run/flannel/subnet.env
ask docker systemctl start weft-docker-opts
ask options cat /run/docker_opts.env
systemctl stop weftd
for name in blue green; do
    mkdir /var/lib/weft/$name
    printf '%s\n' FLANNELD_IFACE=eth9 FLANNELD_LOCAL_STORE=/var/lib/weft/$name \
        >/etc/default/weftd-$name
done
echo '{"Network":"10.50.0.0/16","Backend":{"Type":"udp"}}' >/var/lib/weft/blue/config
echo '{"Network":"10.60.0.0/16","Backend":{"Type":"udp","Port":8385}}' >/var/lib/weft/green/config
ask networks systemctl start weftd@blue weftd@green
ask blue cat /run/flannel/blue.env
ask green cat /run/flannel/green.env
ask sockets weft status
kill -KILL $(systemctl show weftd@green -p MainPID --value)
for try in {1..1000}; do
    sleep 0.1
    [[ $(systemctl show weftd@green -p NRestarts --value) != 0 ]] &&
        systemctl is-active weftd@green && break
done >/dev/null 2>&1
ask both systemctl is-active weftd@blue weftd@green
ask once systemctl show weftd@blue -p NRestarts
ask devices ip -o link show type tun
ask unnamed systemctl start weftd@red
systemctl stop 'weftd@*'
ask log journalctl --unit weftd --no-pager
ask end true
"#;

const PROBE_UNIT: &str = "[Service]\nType=oneshot\nExecStart=/weft/probe\n\
                          ExecStopPost=/bin/systemctl --no-block poweroff\n";

/// What the container needs: `probe` is the script that it runs.
pub(crate) fn prepare(files: &Path, probe: &str) {
    for name in ["root", "out", "lib"] {
        fs::create_dir(files.join(name)).unwrap();
    }
    fs::write(files.join("probe"), probe).unwrap();
    fs::set_permissions(files.join("probe"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(files.join("weft-probe.service"), PROBE_UNIT).unwrap();
}

fn bind(from: &Path, to: &str) -> String {
    format!("--bind-ro={}:{to}", from.display())
}

/// What the recipes install, with the options of this test.
fn recipe(files: &Path) -> Vec<String> {
    fs::write(files.join("lib/config"), CONFIG).unwrap();
    let options = "WEFTD_OPTIONS=--engine=io_uring --workers=2\nFLANNELD_IFACE=eth9\n\
                   FLANNELD_LOCAL_STORE=/var/lib/weft\nFLANNELD_IP_MASQ=true\n";
    fs::write(files.join("weftd"), text("systemd/weftd.default") + options).unwrap();
    let units = ["weftd.service", "weftd@.service", "weft-docker-opts.service"];
    let units = units
        .map(|unit| bind(&deploy("systemd").join(unit), &format!("/etc/systemd/system/{unit}")));
    let files = [
        format!("--bind={}/lib:/var/lib/weft", files.display()),
        bind(Path::new(env!("CARGO_BIN_EXE_weftd")), "/usr/bin/weftd"),
        bind(Path::new(env!("CARGO_BIN_EXE_weft")), "/usr/bin/weft"),
        bind(&deploy("mk-docker-opts.sh"), "/usr/libexec/weft/mk-docker-opts.sh"),
        bind(&files.join("weftd"), "/etc/default/weftd"),
    ];
    files.into_iter().chain(units).collect()
}

/// Boots the container with the files that `prepare` has made, waits for its end, and returns the
/// output of the probe.
pub(crate) fn boot(files: &TempDir, binds: Vec<String>) -> String {
    let files = files.path();
    let shown = files.display();
    let probe_unit = "/etc/systemd/system/weft-probe.service";
    let mut nspawn = vec![
        format!("--directory={shown}/root"),
        format!("--machine=weft-{}-{}", std::process::id(), binds.len()),
        format!("--bind-ro={shown}:/weft"),
        format!("--bind={shown}/out:/out"),
        bind(&files.join("weft-probe.service"), probe_unit),
    ];
    nspawn.extend(binds);
    nspawn.extend(
        ["--quiet", "--volatile=overlay", "--register=no", "--keep-unit", "--private-network"]
            .map(str::to_owned),
    );
    // Containers have neither by default; on a machine a unit may have both.
    nspawn
        .extend(["--capability=CAP_BPF,CAP_NET_ADMIN", "--system-call-filter=bpf"].map(Into::into));
    nspawn.extend(["--bind=/dev/net/tun"].map(Into::into));
    nspawn.extend(["--boot", "--", "--unit=weft-probe.service"].map(Into::into));
    // nspawn takes no / as it is; the mount ends with the process.
    let script = format!(
        "mount --make-rprivate / && mount --bind / {shown}/root &&
         exec timeout --kill-after=5 {BOOT_LIMIT_S} systemd-nspawn \"$@\""
    );
    let output = Command::new("unshare")
        .args(["--mount", "bash", "-c", &script, "bash"])
        .args(nspawn)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let answers = fs::read_to_string(files.join("out/answers")).unwrap_or_default();
    let console = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(answers.contains("== end"), "the probe did not end:\n{answers}{console}{complaint}");
    answers
}

#[test]
fn systemd_runs_the_unit_as_it_is() {
    let files = tempfile::tempdir().unwrap();
    prepare(files.path(), PROBE);
    let binds = recipe(files.path());
    let answers = boot(&files, binds);
    let answer = |name: &str| {
        let after = answers.split(&format!("== {name}\n")).nth(1);
        let after = after.unwrap_or_else(|| panic!("no answer to {name}: {answers}"));
        after.split("== ").next().unwrap().to_owned()
    };
    assert_eq!(answer("start"), "", "systemctl start weftd:\n{answers}");
    assert_eq!(answer("state"), "Type=notify\nActiveState=active\n", "{answers}");
    let status = answer("status");
    assert!(status.contains("engine io_uring") && status.contains("workers 2"), "{status}");
    let rights = "CapEff:\t0000008000003000\nCapBnd:\t0000008000003000\nNoNewPrivs:\t1\n\
                  Seccomp:\t2\n";
    assert_eq!(answer("rights"), rights, "{answers}");
    assert!(answer("usr").contains("Read-only file system"), "weftd may write /usr: {answers}");
    assert_eq!(answer("lock"), "", "iptables could not lock: {answers}");
    let env = answer("env");
    assert!(env.starts_with("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5."), "{env}");
    assert!(env.ends_with("FLANNEL_IPMASQ=true\n"), "{env}");
    let rules = answer("nat");
    assert!(rules.contains("-s 10.5.0.0/16") && rules.contains("MASQUERADE"), "{answers}");
    assert!(answer("forward").contains("-s 10.5.0.0/16"), "{answers}");
    let again = answer("again");
    let count = |line: &str| line.strip_prefix("NRestarts=")?.parse::<u32>().ok();
    // More than once, where a start takes longer than systemd waits for it.
    assert!(again.lines().find_map(count) >= Some(1), "{answers}");
    assert!(again.contains("ActiveState=active\n"), "{answers}");
    assert_eq!(answer("same"), env, "kill -9 and Restart= changed the subnet");
    assert_eq!(answer("ended"), "Result=success\nActiveState=inactive\n", "{answers}");
    assert_eq!(answer("kept"), env, "a stop removed subnet.env");
    assert_eq!(answer("docker"), "", "{answers}");
    let subnet = env.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).unwrap();
    let options = format!("DOCKER_OPTS=\" --bip={subnet} --ip-masq=false --mtu=1472\"\n");
    assert_eq!(answer("options"), options);
    assert_eq!(answer("networks"), "", "two instances of the template: {answers}");
    assert!(answer("blue").starts_with("FLANNEL_NETWORK=10.50.0.0/16\n"), "{answers}");
    assert!(answer("green").starts_with("FLANNEL_NETWORK=10.60.0.0/16\n"), "{answers}");
    assert!(answer("sockets").contains("/run/flannel/blue.weft.sock"), "{answers}");
    assert_eq!(answer("both"), "active\nactive\n", "kill -9 of one: {answers}");
    assert_eq!(answer("once"), "NRestarts=0\n", "the other was started again: {answers}");
    let devices = answer("devices");
    assert!(devices.contains("flannel0:") && devices.contains("flannel1:"), "{answers}");
    assert!(answer("unnamed").contains("weftd@red"), "without its file: {answers}");
    assert!(!answer("log").contains("not permitted"), "{}", answer("log"));
}
