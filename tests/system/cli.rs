//! The weftd program from outside: flags in every spelling, environment, error messages and exit
//! codes, as operators and their scripts see them.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::support::lab::{LEASE_TIMEOUT, Namespace, WEFTD, wait_until};

/// Longest time that a stop may take.
const STOP: Duration = Duration::from_secs(1);

const PASSWORD: &str = "correct-horse-battery";

/// Runs weftd to its end, without any variable of the caller's environment.
fn weftd(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(WEFTD)
        .args(arguments)
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("weftd can be started")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Fails unless weftd refused with this exit code, a first line that contains `names`, an empty
/// standard output, and no panic.
#[track_caller]
fn assert_refused(output: &Output, code: i32, names: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "exit code; it said: {text}");
    let first = text.lines().next().unwrap_or_default();
    for name in names {
        assert!(first.contains(name), "the complaint does not name {name:?}: {text}");
    }
    assert!(output.stdout.is_empty(), "standard output is not for complaints");
    assert!(!text.contains("panicked"), "{text}");
}

/// Starts weftd far enough to see how it took its flags, and what it said until then. A process
/// that holds the subnet file's lock ends it right after, before it touches the host.
fn recorded(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let subnet_file = dir.path().join("subnet.env");
    let lock = std::fs::File::create(dir.path().join("subnet.env.lock"));
    let lock = lock.expect("the test's directory is writable");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("nobody else locks");
    let subnet_file = format!("-subnet-file={}", subnet_file.display());
    // Then the log has all options as weftd understood them.
    let mut all = vec![subnet_file.as_str(), "-v=1"];
    all.extend(arguments);
    let mut output = weftd(&all, variables);
    // Other tests try the same flags, some at the same time, and then want the same port.
    wait_until(LEASE_TIMEOUT, "the port for health checks is free", || {
        // EADDRINUSE.
        let is_taken = stderr(&output).contains("os error 98");
        if is_taken {
            output = weftd(&all, variables);
        }
        !is_taken
    });
    assert_eq!(output.status.code(), Some(1), "{all:?}: {}", stderr(&output));
    // JSON lines escape the quotes.
    stderr(&output).replace("\\\"", "\"")
}

#[test]
fn command_line_beats_environment_last_word_wins() {
    let env = [("FLANNELD_PUBLIC_IP", "192.0.2.1"), ("FLANNELD_IFACE", "a,b")];
    let text = recorded(&["-local-store=/dev/null/x"], &env);
    assert!(text.contains("public_ip: Some(192.0.2.1)"), "{text}");
    // One element, whatever it contains.
    assert!(text.contains(r#"interfaces: ["a,b"]"#), "{text}");
    let flags = ["-local-store=/dev/null/x", "--public-ip=192.0.2.2", "-public-ip", "192.0.2.3"];
    let text = recorded(&flags, &env);
    assert!(text.contains("public_ip: Some(192.0.2.3)"), "{text}");
    let flags = ["-local-store=/dev/null/x", "-iface=x", "--iface", "y", "-iface=x"];
    assert!(recorded(&flags, &env).contains(r#"interfaces: ["x", "y", "x"]"#));
    // A value that does not parse leaves the default, audibly.
    let env = [("FLANNELD_SUBNET_LEASE_RENEW_MARGIN", "soon"), ("FLANNELD_IPTABLES_RESYNC", "9")];
    let text = recorded(&["-local-store=/dev/null/x"], &env);
    assert!(text.contains("renew_margin: 3600s") && text.contains("resync: 9s"), "{text}");
    assert!(text.contains("FLANNELD_SUBNET_LEASE_RENEW_MARGIN"), "{text}");
}

#[test]
fn booleans_take_a_value_only_with_equals() {
    let local = "-local-store=/dev/null/x";
    for yes in ["1", "t", "T", "true", "TRUE", "True"] {
        let flag = format!("--ip-masq={yes}");
        assert!(recorded(&[local, &flag], &[]).contains("masquerade: true"), "{flag}");
    }
    for no in ["0", "f", "F", "false", "FALSE", "False"] {
        let flag = format!("-ip-masq={no}");
        assert!(recorded(&[local, &flag], &[]).contains("masquerade: false"), "{flag}");
    }
    // The word ends the flags: what comes after it is ignored, as in Go.
    let text = recorded(&[local, "-iptables-forward-rules=false", "false", "--ip-masq"], &[]);
    assert!(text.contains("masquerade: false"), "{text}");
    let text = recorded(&[local, "--", "--ip-masq"], &[]);
    assert!(text.contains("masquerade: false"), "{text}");
    assert_refused(&weftd(&["-ip-masq=perhaps"], &[]), 2, &["ip-masq", "perhaps"]);
}

#[test]
fn version_and_help_go_to_stderr() {
    for spelling in ["-version", "--version", "-version=true", "--version=1"] {
        let output = weftd(&[spelling, "-subnet-lease-renew-margin=0"], &[("FLANNELD_V", "x")]);
        assert_eq!(output.status.code(), Some(0), "{spelling}");
        assert_eq!(stderr(&output), format!("{}\n", env!("CARGO_PKG_VERSION")), "{spelling}");
        assert!(output.stdout.is_empty(), "{spelling} writes on standard output");
    }
    // The variable is looked up after the version was due.
    let text = recorded(&["-local-store=/dev/null/x"], &[("FLANNELD_VERSION", "true")]);
    assert!(text.contains("public_ip"), "it goes on to its other options: {text}");
    for spelling in ["-h", "--h", "-help", "--help"] {
        let output = weftd(&[spelling], &[]);
        assert_eq!(output.status.code(), Some(0), "{spelling}");
        let text = stderr(&output);
        assert_eq!(text.lines().next(), Some(&*format!("Usage: {WEFTD} [OPTION]...")));
        assert!(output.stdout.is_empty(), "{spelling} writes on standard output");
    }
}

#[test]
fn malformed_command_line_exits_2_with_hint() {
    let cases: [(&[&str], &str); 9] = [
        (&["--no-such-flag"], "-no-such-flag"),
        (&["-no-such-flag=3"], "-no-such-flag"),
        (&["---iface"], "---iface"),
        (&["--=x"], "--=x"),
        (&["-iface"], "-iface"),
        (&["-healthz-port=eighty"], "eighty"),
        (&["-healthz-port", "99999999999999999999"], "out of range"),
        (&["-v=1.5"], "1.5"),
        (&["-version=maybe"], "maybe"),
    ];
    for (arguments, names) in cases {
        let output = weftd(arguments, &[]);
        assert_refused(&output, 2, &[names]);
        let text = stderr(&output);
        assert_eq!(text.lines().count(), 2, "{arguments:?}: {text}");
        assert_eq!(text.lines().nth(1), Some("Try 'weftd --help'."), "{text}");
    }
}

#[test]
fn values_without_sense_exit_1_and_are_named() {
    let cases: [(&[&str], &[&str]); 29] = [
        (&["-subnet-lease-renew-margin=0"], &["Invalid subnet-lease-renew-margin option 0"]),
        (&["-subnet-lease-renew-margin=1440"], &["Invalid subnet-lease-renew-margin option 1440"]),
        (&["-subnet-lease-renew-margin=-5"], &["Invalid subnet-lease-renew-margin option -5"]),
        (&["-public-ip=hello"], &["--public-ip", "hello"]),
        (&["-public-ip=2001:db8::1"], &["--public-ip", "2001:db8::1"]),
        (&["-public-ip=0.0.0.0"], &["--public-ip", "0.0.0.0"]),
        (&["-public-ip=224.0.0.1"], &["--public-ip", "224.0.0.1"]),
        (&["-healthz-ip=nowhere", "-healthz-port=1"], &["--healthz-ip", "nowhere"]),
        (&["-healthz-port=65536"], &["--healthz-port", "65536"]),
        (&["-healthz-port=-1"], &["--healthz-port", "-1"]),
        (&["-engine=warp"], &["--engine", "warp"]),
        (&["-workers=0"], &["--workers", "\"0\"", "1 to 256"]),
        (&["-workers=257"], &["--workers", "257", "1 to 256"]),
        (&["-offload=lro"], &["--offload", "lro"]),
        (&["-offload="], &["--offload"]),
        (&["-offload=tso,"], &["--offload"]),
        (&["-peer-check=none"], &["--peer-check", "none"]),
        (&["-log-format=xml"], &["--log-format", "xml"]),
        (&["-iface-regex=("], &["--iface-regex", "("]),
        (&["-iface-can-reach=host"], &["--iface-can-reach", "host"]),
        (&["-subnet-file=/tmp/"], &["--subnet-file", "/tmp/"]),
        (&["-subnet-file="], &["--subnet-file"]),
        (&["-local-store="], &["--local-store"]),
        (&["-local-store=/x", "-etcd-prefix=/y"], &["--local-store", "--etcd-prefix"]),
        (&["-etcd-endpoints=ftp://x"], &["--etcd-endpoints", "ftp://x"]),
        (&["-etcd-endpoints="], &["--etcd-endpoints"]),
        (&["-etcd-certfile=/x"], &["--etcd-certfile", "--etcd-keyfile"]),
        (&["-etcd-username=x"], &["--etcd-username", "--etcd-password"]),
        (&["-etcd-cafile=/x"], &["--etcd-cafile", "http"]),
    ];
    for (arguments, names) in cases {
        let output = weftd(arguments, &[]);
        assert_refused(&output, 1, names);
        assert_eq!(stderr(&output).lines().count(), 1, "{arguments:?}: {}", stderr(&output));
    }
    let long = format!("-status-socket=/{}", "s".repeat(120));
    assert_refused(&weftd(&[&long], &[]), 1, &["--status-socket", "102"]);
}

#[test]
fn unbuilt_flags_are_refused_by_name() {
    let cases: [(&str, &str, &str); 2] =
        [("vmodule", "a=1", "log"), ("log_backtrace_at", "a.go:1", "log")];
    for (flag, value, missing) in cases {
        let word = format!("--{flag}={value}");
        assert_refused(&weftd(&[&word], &[]), 1, &[flag, missing, "not built"]);
        let name = format!("FLANNELD_{}", flag.to_uppercase().replace('-', "_"));
        assert_refused(&weftd(&[], &[(&name, value)]), 1, &[&name, missing, "not built"]);
    }
}

#[test]
fn secrets_are_never_shown() {
    let env = [("FLANNELD_ETCD_PASSWORD", PASSWORD), ("FLANNELD_ETCD_USERNAME", "u")];
    let flags = ["-etcd-username=u", "-etcd-password=correct-horse-battery"];
    let outputs = [
        recorded(&flags, &[]),
        recorded(&[], &env),
        stderr(&weftd(&[flags[1]], &[])),
        stderr(&weftd(&[flags[0], flags[1], "-local-store=/x"], &[])),
        stderr(&weftd(&["-etcd-endpoints=http://u:correct-horse-battery@h:1"], &[])),
        stderr(&weftd(&["-h"], &env)),
    ];
    for text in outputs {
        assert!(!text.contains(PASSWORD), "the password is shown: {text}");
    }
    // Nor while it is used, in the most talkative log there is.
    let namespace = Namespace::new("secret");
    let dir = tempfile::tempdir().unwrap();
    let subnet_file = format!("-subnet-file={}", dir.path().join("subnet.env").display());
    for form in ["text", "json"] {
        let form = format!("-log-format={form}");
        let mut daemon =
            namespace.spawn(&[WEFTD, &subnet_file, "-v=10", &form, flags[0], flags[1]]);
        wait_until(Duration::from_secs(10), "weftd tries etcd", || {
            daemon.output().contains("127.0.0.1:2379")
        });
        daemon.stop(Signal::TERM, STOP);
        assert!(!daemon.output().contains(PASSWORD), "the password is logged");
    }
}

#[test]
fn a_tool_whose_words_are_lost_has_failed() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has it");
    let mut tool = Command::new(env!("CARGO_BIN_EXE_weft"));
    let socket = ["--socket", "/nowhere/weft.sock", "--subnet-file", "/nowhere/subnet.env"];
    let output = tool.arg("bugreport").args(socket).stdout(full).output().expect("weft runs");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!output.stderr.is_empty(), "nobody is told");
}
