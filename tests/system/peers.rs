//! What `weft peers` and the first line of `weft status` say of the others.

use std::process::{Command, Output};
use std::time::Duration;

use weft::status::Cause;

use super::support::lab::wait_until;
use super::support::overlay::{CONFIG, Overlay};
use super::support::status::Status;

/// A silent peer is known after nine seconds.
const KNOWN: Duration = Duration::from_secs(30);

/// On host 1, in the way of workers and programs alike: no firewall is.
const WALL: [&str; 3] = ["route", "blackhole", "172.20.0.1"];

fn weft(overlay: &Overlay, host: usize, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    command.args(words).arg("--socket").arg(overlay.dir(host).join("weft.sock"));
    command.output().expect("weft runs")
}

fn screen(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one row of a host's peers.
fn row(overlay: &Overlay, host: usize) -> serde_json::Value {
    let Status(status) = overlay.status(host);
    status["routes"][0].clone()
}

#[test]
fn a_peer_behind_a_wall_is_silent_and_degrades_the_node() {
    for fast_path in ["off", "auto"] {
        let flag = format!("--fast-path={fast_path}");
        let overlay = Overlay::start_with(CONFIG, [&[flag.as_str()], &[flag.as_str()]]);
        assert_eq!(row(&overlay, 0)["state"], "idle", "nobody sends to it");
        let (pod, address) = (&overlay.lab.pods[0], overlay.pod(1).to_string());
        let _pings = pod.spawn(&["ping", "-q", "-i0.2", &address]);
        wait_until(KNOWN, "a peer that answers is ok, and its round trip known", || {
            let row = row(&overlay, 0);
            row["state"] == "ok" && row["round_trip_microseconds"].as_u64().is_some()
        });
        assert!(weft(&overlay, 0, &["status"]).status.success());
        assert!(weft(&overlay, 0, &["peers"]).status.success());

        let [object, kind, host] = WALL;
        overlay.lab.hosts[1].exec(&["ip", object, "add", kind, host]);
        let what = "the loss is seen where it matters";
        wait_until(KNOWN, what, || row(&overlay, 0)["state"] == "silent");
        let status = weft(&overlay, 0, &["status"]);
        let first = screen(&status).lines().next().unwrap_or_default().to_owned();
        let subnet = overlay.leases[1].network().to_string();
        assert!(first.contains(&subnet) && first.contains("172.20.0.2:8285"), "{first}");
        assert_eq!(overlay.status(0).causes(), [Cause::PeerSilent]);
        assert_eq!(status.status.code(), Some(1), "scripts see it as well");
        let peers = weft(&overlay, 0, &["peers"]);
        assert_eq!(peers.status.code(), Some(1));
        overlay.lab.hosts[1].exec(&["ip", object, "del", kind, host]);
        let what = "it is heard again once the wall is gone";
        wait_until(KNOWN, what, || row(&overlay, 0)["state"] == "ok");
        assert!(weft(&overlay, 0, &["status"]).status.success());
    }
}

#[test]
fn packets_of_a_peer_are_counted_exactly_and_pings_between_daemons_die_down() {
    const PINGS: u64 = 50;
    let overlay = Overlay::start();
    let (before, pod) = ([row(&overlay, 0), row(&overlay, 1)], &overlay.lab.pods[0]);
    let (count, address) = (PINGS.to_string(), overlay.pod(1).to_string());
    pod.exec(&["ping", "-q", "-c", &count, "-i0.01", "-s100", "-W2", &address]);
    for (host, before) in before.iter().enumerate() {
        // At once: between two looks an echo may go. A worker counts what it has sent afterwards.
        let mut now = row(&overlay, host);
        let count = |row: &serde_json::Value, name: &str| row[name].as_u64().expect("a count");
        wait_until(Duration::from_secs(10), "all pings are counted", || {
            now = row(&overlay, host);
            let more = |name: &str| count(&now, name) - count(before, name);
            let own = more("packets_sent").saturating_sub(PINGS);
            more("packets_sent") >= PINGS
                && more("packets_received") >= PINGS
                && more("bytes_sent") == PINGS * 128 + own * 84
        });
        let counted = |name: &str| count(&now, name) - count(before, name);
        // And echoes of the daemon of 84 bytes, a few should the pings have taken seconds.
        let own = counted("packets_sent") - PINGS;
        assert!(own <= 5, "{own} echoes sent");
        assert_eq!(counted("bytes_sent"), PINGS * 128 + own * 84);
        // And echoes of the daemons, should the pings have taken seconds.
        let echoes = counted("packets_received") - PINGS;
        assert!(echoes <= 5, "{echoes} echoes");
    }
    wait_until(Duration::from_secs(30), "the daemons leave each other in peace", || {
        (0..2).all(|host| row(&overlay, host)["state"] == "idle")
    });
}

#[test]
fn ping_names_the_broken_leg() {
    const CLOSED: &str = "table inet wall { chain in { type filter hook input priority 0; \
                          udp dport 8285 drop; }; }";
    let overlay = Overlay::start();
    let socket = overlay.dir(0).join("weft.sock").display().to_string();
    let (pod, subnet) = (overlay.pod(1).to_string(), format!("{}/24", overlay.leases[1].network()));
    let ping = |words: &[&str]| {
        let words = [&[env!("CARGO_BIN_EXE_weft"), "ping", "--socket", &socket], words].concat();
        let output = overlay.lab.hosts[0].command(&words).output().expect("weft runs");
        (screen(&output), output.status.code())
    };
    let (text, code) = ping(&[&subnet, "--pod", &pod]);
    assert!(
        text.contains(&format!("pod          {pod}")) && text.contains(" 1472 bytes"),
        "{text}"
    );
    assert_eq!(code, Some(0));
    let (text, code) = ping(&["--all", "-o", "json"]);
    let answer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (&answer["schema"], &answer["peers"][0]["well"]),
        (&weft::status::SCHEMA.into(), &true.into())
    );
    assert_eq!(code, Some(0));

    let near = overlay.pod(0).to_string();
    let explain = |words: &[&str]| {
        let output = weft(&overlay, 0, &[&["explain"], words].concat());
        (screen(&output), output.status.code())
    };
    let (text, code) = explain(&[&near, &pod, "--length=1472", "--df"]);
    assert!(text.contains("172.20.0.1:8285") && text.contains("172.20.0.2:8285"), "{text}");
    assert_eq!(code, Some(0), "{text}");
    let (text, code) = explain(&[&near, &pod, "--length=1473", "--df"]);
    assert!(text.contains(" 1472"), "the limit is not named: {text}");
    assert_eq!(code, Some(1));
    let (text, code) = explain(&[&near, "10.5.250.250"]);
    assert!(text.contains("no-route"), "{text}");
    assert_eq!(code, Some(1));
    let (text, _) = explain(&["10.5.250.250", &near]);
    assert!(text.contains("--peer-check=loose"), "weftd says what its own is: {text}");

    // The host reaches the pod, and its own pods don't.
    let host = &overlay.lab.hosts[0];
    let route = host.exec(&["ip", "-o", "route", "get", &near]);
    let by = route.split_whitespace().skip_while(|word| *word != "dev").nth(1).expect("a device");
    let (text, code) = ping(&[&pod]);
    assert!(code == Some(0) && text.contains(&format!("pod          {pod}")), "{text}");
    host.exec(&["ip", "route", "add", "default", "via", "172.20.0.77", "table", "99"]);
    host.exec(&["ip", "rule", "add", "iif", by, "lookup", "99"]);
    let (text, code) = ping(&[&pod]);
    assert!(code == Some(1) && text.contains(&format!("iif {by}")), "{text}");
    host.exec(&["ip", "rule", "delete", "iif", by, "lookup", "99"]);

    overlay.lab.hosts[1].exec(&["nft", CLOSED]);
    let (text, code) = ping(&[&pod, "-o", "json"]);
    let answer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(answer["peers"][0]["finding"], "host-only", "{text}");
    assert_eq!(code, Some(1));
    let (text, code) = ping(&["no-such-node"]);
    assert_eq!((text.as_str(), code), ("", Some(2)));
}
