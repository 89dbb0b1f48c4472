//! `weft drops` beside workers that drop packets.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use super::support::lab::wait_until;
use super::support::overlay::{CONFIG, Overlay};

/// Nobody has leased it.
const NOWHERE: &str = "10.5.250.9";

fn drops(socket: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    command.arg("drops").arg("--socket").arg(socket).args(words);
    command.output().expect("weft runs")
}

#[test]
fn dropped_packets_are_shown_with_reason_and_advice() {
    let arguments = ["--fast-path=off", "--workers=2"];
    let overlay = Overlay::start_with(CONFIG, [&arguments, &arguments]);
    let socket = overlay.dir(0).join("weft.sock");
    let pod = &overlay.lab.pods[0];
    let _pings = pod.spawn(&["ping", "-q", "-i0.05", "-s100", NOWHERE]);
    let no_route = || overlay.status(0).0["egress"]["drops"]["no-route"].as_u64().unwrap_or(0);
    wait_until(Duration::from_secs(10), "packets without a route are dropped", || no_route() > 0);

    let file = overlay.files().join("drops.pcapng").display().to_string();
    let output = drops(&socket, &["--seconds", "2", "-w", &file]);
    let screen = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let packet = format!("{} > {NOWHERE} ICMP, 128 bytes", overlay.leases[0].pod_address());
    assert!(screen.matches(&packet).count() > 5, "{screen}");
    // What to do about no-route.
    assert_eq!(screen.matches("`weft peers`").count(), 1, "{screen}");
    let sum = screen.lines().last().unwrap();
    assert!(sum.starts_with("weftd dropped ") && sum.contains(" packets in 2 s; shown: "), "{sum}");

    // Another program reads the file.
    let tcpdump = Command::new("tcpdump").args(["-n", "-r", &file]).output().unwrap();
    let text = String::from_utf8_lossy(&tcpdump.stdout);
    let read = format!("> {NOWHERE}: ICMP");
    assert_eq!(text.matches(&read).count(), screen.matches(&packet).count(), "{tcpdump:?}");
    let bytes = std::fs::read(&file).unwrap();
    let comment = b"no-route: No lease covers the destination.";
    assert!(bytes.windows(comment.len()).any(|window| window == comment), "no comment");

    let output = drops(&socket, &["--seconds", "1", "-o", "json"]);
    let lines = String::from_utf8_lossy(&output.stdout);
    let of_pings = lines.lines().filter(|line| {
        let sample: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        assert_eq!(sample["schema"], weft::status::SCHEMA);
        // The kernel says something in IPv6 now and then.
        sample["reason"] == "no-route"
    });
    assert!(of_pings.count() > 3, "{lines}");
}

#[test]
fn a_backend_of_the_kernel_says_who_drops() {
    let config = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
    let overlay = Overlay::start_with(config, [&[], &[]]);
    let output = drops(&overlay.dir(0).join("weft.sock"), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("host-gw"), "{text}");
}
