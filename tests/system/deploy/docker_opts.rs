//! `mk-docker-opts.sh` writes what flannel's script writes, byte for byte, and runs nothing of what
//! it reads.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

use super::deploy;
use crate::support::lab::Namespace;

const BIP: &str = "DOCKER_OPT_BIP=\"--bip=10.1.74.1/24\"\n";
const IPMASQ: &str = "DOCKER_OPT_IPMASQ=\"--ip-masq=true\"\n";
const MTU: &str = "DOCKER_OPT_MTU=\"--mtu=1472\"\n";
const ALL: &str = "=\" --bip=10.1.74.1/24 --ip-masq=true --mtu=1472\"\n";
const SUBNET_ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.74.1/24\n\
                          FLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n";

struct Script {
    files: TempDir,
    /// The test must not see the routes of the machine.
    host: Namespace,
}

impl Script {
    fn with(subnet_env: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("subnet.env"), subnet_env).unwrap();
        Self { files, host: Namespace::new("docker") }
    }

    fn written(&self) -> PathBuf {
        self.files.path().join("docker_opts.env")
    }

    fn run(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        let script = deploy("mk-docker-opts.sh");
        let mut command: Command = self.host.command(&[script.to_str().unwrap()]);
        command.arg("-f").arg(self.files.path().join("subnet.env"));
        command.arg("-d").arg(self.written()).args(arguments);
        command.envs(environment.iter().copied()).output().unwrap()
    }

    #[track_caller]
    fn writes(&self, arguments: &[&str], environment: &[(&str, &str)], expected: &str) {
        let output = self.run(arguments, environment);
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "mk-docker-opts.sh {arguments:?}: {complaint}");
        let written = fs::read_to_string(self.written()).unwrap();
        assert_eq!(written, expected, "mk-docker-opts.sh {arguments:?} wrote something else");
    }

    #[track_caller]
    fn refuses(&self, arguments: &[&str], word: &str) {
        fs::write(self.written(), "old\n").unwrap();
        let output = self.run(arguments, &[]);
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?} did not refuse: {complaint}");
        assert!(complaint.contains(word), "the complaint does not name {word}: {complaint}");
        let left = fs::read_to_string(self.written()).unwrap();
        assert_eq!(left, "old\n", "Docker's options were changed by a run that failed");
    }
}

#[test]
fn flannels_five_cases_are_written_byte_for_byte() {
    let script = Script::with(SUBNET_ENV);
    let combined = |key: &str| format!("{key}{ALL}");
    let both = format!("{BIP}{IPMASQ}{MTU}");
    script.writes(&[], &[], &format!("{both}{}", combined("DOCKER_OPTS")));
    script.writes(&["-i"], &[], &both);
    script.writes(&["-c"], &[], &combined("DOCKER_OPTS"));
    script.writes(&["-k", "CUSTOM_KEY"], &[], &format!("{both}{}", combined("CUSTOM_KEY")));
    let bare = "DOCKER_OPTS=\" --bip=10.1.74.1/24 --mtu=1472\"\n";
    script.writes(&["-m"], &[], &format!("{BIP}{MTU}{bare}"));
}

#[test]
fn exported_options_are_sorted_by_name() {
    let script = Script::with(SUBNET_ENV);
    let exported = [("DOCKER_OPT_ICC", "--icc=false"), ("DOCKER_OPTS", "--debug")];
    let expected = "DOCKER_OPTS=\"--debug  --bip=10.1.74.1/24 --icc=false --ip-masq=true \
                    --mtu=1472\"\n";
    script.writes(&["-c"], &exported, expected);
    let icc = "DOCKER_OPT_ICC=\"--icc=false\"\n";
    script.writes(&["-i"], &exported, &format!("{BIP}{icc}{IPMASQ}{MTU}"));
}

#[test]
fn a_missing_file_leaves_what_is_exported() {
    let script = Script::with("");
    fs::remove_file(script.files.path().join("subnet.env")).unwrap();
    script.writes(&[], &[], "DOCKER_OPTS=\"\"\n");
    script.writes(&["-i"], &[], "");
    script.writes(&["-c"], &[("FLANNEL_MTU", "1400")], "DOCKER_OPTS=\" --mtu=1400\"\n");
}

#[test]
fn docker_masquerades_when_weftd_does_not() {
    let script = Script::with(&SUBNET_ENV.replace("IPMASQ=false", "IPMASQ=true"));
    script.writes(&["-i"], &[], &format!("{BIP}{}{MTU}", IPMASQ.replace("true", "false")));
    let script = Script::with(&SUBNET_ENV.replace("IPMASQ=false", "IPMASQ=yes"));
    script.refuses(&[], "FLANNEL_IPMASQ is yes");
    // As with flannel: what is not asked for is not checked.
    script.writes(&["-m", "-i"], &[], &format!("{BIP}{MTU}"));
}

#[test]
fn a_subnet_that_is_routed_elsewhere_is_refused() {
    let script = Script::with(SUBNET_ENV);
    script.host.exec(&["ip", "link", "add", "wire0", "type", "veth"]);
    script.host.exec(&["ip", "link", "set", "wire0", "up"]);
    script.host.address("wire0", "172.20.0.1/24");
    // The bridge's own route, and those of other subnets, are as they should be.
    script.host.exec(&["ip", "route", "add", "10.1.75.0/24", "via", "172.20.0.9"]);
    script.host.exec(&["ip", "route", "add", "10.1.74.0/24", "dev", "wire0"]);
    script.writes(&["-i"], &[], &format!("{BIP}{IPMASQ}{MTU}"));
    script.host.exec(&["ip", "route", "replace", "10.1.74.0/24", "via", "172.20.0.9"]);
    script.refuses(&[], "10.1.74.0/24 via 172.20.0.9");
}

#[test]
fn ipv6_is_an_option_of_its_own() {
    let v6 = "FLANNEL_IPV6_NETWORK=fd00:5::/48\nFLANNEL_IPV6_SUBNET=fd00:5:0:22::1/64\n";
    let cidr = "DOCKER_OPT_FIXED_CIDR_V6=\"--fixed-cidr-v6=fd00:5:0:22::1/64\"\n";
    let on = "DOCKER_OPT_IPV6=\"--ipv6\"\n";
    let script = Script::with(&format!("{SUBNET_ENV}{v6}"));
    script.writes(&["-i"], &[], &format!("{BIP}{cidr}{IPMASQ}{on}{MTU}"));
    let all = "DOCKER_OPTS=\" --bip=10.1.74.1/24 --fixed-cidr-v6=fd00:5:0:22::1/64 \
               --ip-masq=true --ipv6 --mtu=1472\"\n";
    script.writes(&["-c"], &[], all);
    for wrong in ["10.1.74.1/24", "fd00:5:0:22::1", "fd00:5:0:22::1/129", "fd00::/64 --debug"] {
        let wrong_v6 = v6.replace("fd00:5:0:22::1/64", wrong);
        Script::with(&wrong_v6).refuses(&[], &format!("FLANNEL_IPV6_SUBNET is {wrong}"));
    }
    // Without IPv4.
    let alone = Script::with(&format!("{v6}FLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n"));
    alone.writes(&["-i"], &[], &format!("{cidr}{IPMASQ}{on}{MTU}"));
    alone.host.exec(&["ip", "link", "add", "wire0", "type", "veth"]);
    alone.host.exec(&["ip", "link", "set", "wire0", "up"]);
    alone.host.exec(&["ip", "-6", "route", "add", "fd00:5:0:22::/64", "dev", "wire0"]);
    alone.writes(&["-i"], &[], &format!("{cidr}{IPMASQ}{on}{MTU}"));
    let replaced = ["ip", "-6", "route", "replace", "fd00:5:0:22::/64", "via", "fe80::9"];
    alone.host.exec(&[&replaced[..], &["dev", "wire0"]].concat());
    alone.refuses(&[], "fd00:5:0:22::/64 via fe80::9");
}

#[test]
fn file_is_not_executed_odd_values_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let attack = format!("touch {}", trace.display());
    for hostile in [
        format!("{attack}\n{SUBNET_ENV}"),
        format!("{SUBNET_ENV}; {attack}\n"),
        SUBNET_ENV.replace("1472", &format!("$({attack})")),
        SUBNET_ENV.replace("10.1.74.1/24", &format!("`{attack}`")),
        SUBNET_ENV.replace("10.1.74.1/24", "10.1.74.1/24 --insecure-registry=0.0.0.0/0"),
        SUBNET_ENV.replace("IPMASQ=false", &format!("IPMASQ=x[$({attack})]")),
        SUBNET_ENV.replace("10.1.74.1/24", &format!("a[$({attack})].1.2.3/24")),
    ] {
        let script = Script::with(&hostile);
        script.run(&[], &[]);
        assert!(!trace.exists(), "a line of subnet.env was run: {hostile}");
        let written = fs::read_to_string(script.written()).unwrap_or_default();
        assert!(!written.contains("insecure"), "an option came in by the subnet: {written}");
        assert!(!written.contains('$') && !written.contains('`'), "{written}");
    }
    let script = Script::with(&SUBNET_ENV.replace("10.1.74.1/24", "10.1.74.1"));
    script.refuses(&[], "FLANNEL_SUBNET is 10.1.74.1");
    let script = Script::with(SUBNET_ENV);
    script.refuses(&["-k", "A=$(id)"], "A=$(id)");
    script.refuses(&["-x"], "usage");
}
