//! `weftd.service`: what systemd says about it, and its files beside.

use std::process::Command;

use crate::deploy::{deploy, text};

/// `systemd-analyze security`: how much a service could do, from 0 to 10. AF_PACKET is 0.2 of it:
/// what arrives from a peer that does not answer is seen before any firewall. Real time is 0.1:
/// packets pass though others keep all processors busy.
const EXPOSURE_MAX: f64 = 2.6;

/// All values of a setting, in the order of the file.
pub(crate) fn settings<'t>(unit: &'t str, name: &str) -> Vec<&'t str> {
    let lines = unit.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(key, _)| *key == name).map(|(_, value)| value).collect()
}

#[test]
fn systemd_understands_every_line() {
    // The unit names the program where packages put it; here it must be a program that exists.
    for (unit, verified) in
        [("weftd.service", "weftd.service"), ("weftd@.service", "weftd@blue.service")]
    {
        let files = tempfile::tempdir().unwrap();
        let there = text(&format!("systemd/{unit}")).replace("/usr/bin/weftd", "/bin/true");
        std::fs::write(files.path().join(unit), there).unwrap();
        let path = files.path().join(verified);
        let output = Command::new("systemd-analyze").arg("verify").arg(&path).output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        // Units of the machine are none of the test's.
        let ours: Vec<_> = complaint.lines().filter(|line| line.contains("weftd")).collect();
        assert!(output.status.success() && ours.is_empty(), "{complaint}");
    }
}

/// So it has the same rights and restarts, which the other tests look at in that one.
#[test]
fn the_unit_of_several_networks_differs_in_its_files_alone() {
    let (one, several) = (text("systemd/weftd.service"), text("systemd/weftd@.service"));
    let lines = |unit: &str| -> Vec<String> {
        let is_setting = |line: &&str| !line.starts_with('#') && !line.is_empty();
        unit.lines().filter(is_setting).map(str::to_owned).collect()
    };
    let (one, several) = (lines(&one), lines(&several));
    let differs = |all: &[String], other: &[String]| -> Vec<String> {
        let keys = all.iter().filter(|line| !other.contains(line));
        keys.map(|line| line.split_once('=').unwrap().0.to_owned()).collect()
    };
    assert_eq!(differs(&one, &several), ["Description", "EnvironmentFile"]);
    assert_eq!(differs(&several, &one), ["Description", "Environment", "EnvironmentFile"]);
}

#[test]
fn the_sandbox_is_as_tight_as_it_was() {
    let unit = deploy("systemd/weftd.service");
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager"])
        .arg(unit)
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    let figure = report.split("exposure level for weftd.service:").nth(1).unwrap_or_else(|| {
        panic!("no figure in: {report}{}", String::from_utf8_lossy(&output.stderr))
    });
    let exposure: f64 = figure.split_whitespace().next().unwrap().parse().unwrap();
    println!("exposure of weftd.service: {exposure}");
    assert!(exposure <= EXPOSURE_MAX, "weftd.service is exposed at {exposure}: {report}");
}

#[test]
fn unit_has_promised_restarts_and_order() {
    let unit = text("systemd/weftd.service");
    for (name, value) in [
        ("Type", "notify"),
        ("Restart", "on-failure"),
        ("TimeoutStartSec", "90"),
        ("RuntimeDirectory", "flannel"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("OOMScoreAdjust", "-900"),
        ("DeviceAllow", "/dev/net/tun rw"),
        ("RequiresMountsFor", "/var/lib/weft"),
    ] {
        assert_eq!(settings(&unit, name), [value], "{name} of weftd.service");
    }
    assert!(settings(&unit, "ReadWritePaths").contains(&"-/var/lib/weft"));
    assert!(settings(&unit, "StateDirectory").is_empty(), "systemd fails with it on NFS");
    assert!(settings(&unit, "Before")[0].contains("docker.service"));
}

#[test]
fn environment_file_names_only_existing_flags() {
    let usage = Command::new(env!("CARGO_BIN_EXE_weftd")).arg("--help").output().unwrap();
    let usage = String::from_utf8(usage.stderr).unwrap();
    let file = text("systemd/weftd.default");
    let names: Vec<_> = file
        .lines()
        .filter_map(|line| line.trim_start_matches('#').split_once('='))
        .filter_map(|(name, _)| name.strip_prefix("FLANNELD_"))
        .collect();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        let flag = format!("-{}", name.to_lowercase().replace('_', "-"));
        let there = usage.lines().any(|line| line.split_whitespace().next() == Some(&flag));
        assert!(there, "deploy/systemd/weftd.default sets {name}, and weftd has no {flag}");
    }
}
