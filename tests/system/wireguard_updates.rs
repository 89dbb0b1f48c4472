//! WireGuard in userspace while one weftd follows another, as an update of a DaemonSet has it: keys
//! are agreed on anew at once, whoever sends, and connections go on.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::handover::Contained;
use crate::support::flows::Flows;
use crate::support::lab::{comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::traffic::{port, udp_socket};

const PATIENCE: Duration = Duration::from_secs(20);
/// A third of what a peer takes to notice by itself that nothing is answered.
const UNNOTICED: Duration = Duration::from_secs(5);
const HERE: [&str; 1] = ["--wireguard=userspace"];
const FLOWS: usize = 20;

fn overlay() -> Overlay {
    let overlay = Overlay::start_with(&CONFIG.replace("udp", "wireguard"), [&HERE, &HERE]);
    overlay.traffic_resumes(PATIENCE, "the start");
    overlay
}

/// The next container of host 0, which is ready, and the one before, which stands by.
#[track_caller]
fn follow(overlay: &Overlay, first: &Contained) -> Contained {
    let next = Contained::start(overlay, &HERE);
    wait_until(PATIENCE, "the next container is ready", || next.is_ready(overlay));
    wait_until(PATIENCE, "the one before stands by", || first.output().contains("standing by"));
    next
}

#[test]
fn connections_outlive_an_update_and_its_end() {
    let mut overlay = overlay();
    let mut first = Contained::start(&overlay, &HERE);
    overlay.daemons[0].wait(PATIENCE);
    wait_until(PATIENCE, "the first container is ready", || first.is_ready(&overlay));
    overlay.traffic_resumes(PATIENCE, "the first update");
    let flows = Flows::open(&overlay.lab.pods[0], &overlay.lab.pods[1], overlay.pod(1), FLOWS);
    let stop = AtomicBool::new(false);
    let report = thread::scope(|scope| {
        let talk = scope.spawn(|| flows.talk(&stop));
        for _ in 0..2 {
            let next = follow(&overlay, &first);
            let (is_well, output) = std::mem::replace(&mut first, next).stop(Signal::TERM);
            assert!(is_well, "{output}");
        }
        // The newer one ends first, and the older one goes on.
        follow(&overlay, &first).stop(Signal::KILL);
        wait_until(PATIENCE, "the older one goes on", || first.is_ready(&overlay));
        overlay.traffic_resumes(PATIENCE, "the newer one's end");
        stop.store(true, Ordering::Relaxed);
        talk.join().expect("the flows talk")
    });
    println!("{report}");
    assert_eq!(report.open, FLOWS, "{report}");
    assert!(first.stop(Signal::TERM).0);
}

/// Whom pods only listen to hears from the new weftd before it has found out that its keys are old.
#[test]
fn who_only_sends_is_heard_at_once_after_an_update() {
    let mut overlay = overlay();
    let [to, from] = [0, 1].map(|host| udp_socket(&overlay.lab.pods[host], overlay.pod(host)));
    let target = SocketAddr::from((overlay.pod(0), port(&to)));
    let (stop, heard) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // An ICMP error of before comes back as an error of the next call.
                from.send_to(b"listen", target).ok();
                thread::sleep(Duration::from_millis(5));
            }
        });
        scope.spawn(|| {
            let (mut buffer, mut last, mut longest) = ([0; 64], Instant::now(), Duration::ZERO);
            while !stop.load(Ordering::Relaxed) {
                if to.recv(&mut buffer).is_ok() {
                    heard.fetch_add(1, Ordering::Relaxed);
                    longest = longest.max(last.elapsed());
                    last = Instant::now();
                }
            }
            println!("longest pause {longest:?}");
        });
        let first = Contained::start(&overlay, &HERE);
        overlay.daemons[0].wait(PATIENCE);
        wait_until(PATIENCE, "the container is ready", || first.is_ready(&overlay));
        let before = heard.load(Ordering::Relaxed);
        let is_heard = comes_true(UNNOTICED, || heard.load(Ordering::Relaxed) > before + 3);
        stop.store(true, Ordering::Relaxed);
        assert!(is_heard, "what the other pod sends is lost:\n{}", first.output());
        assert!(first.stop(Signal::TERM).0);
    });
}

/// What the first has let go of comes up nowhere: it has it again.
#[test]
fn the_first_goes_on_if_the_next_cannot_have_what_it_needs() {
    let mut overlay = overlay();
    let (config, store) =
        (CONFIG.replace("udp", "wireguard"), overlay.files().join("store/config"));
    let taken = udp_socket(&overlay.lab.hosts[0], Ipv4Addr::UNSPECIFIED);
    let backend = |text: &str| config.replace(r#""Type":"wireguard""#, text);
    let configs = [
        backend(&format!(r#""Type":"udp","Port":{}"#, port(&taken))),
        backend(&format!(r#""Type":"wireguard","ListenPort":{}"#, port(&taken))),
        backend(r#""Type":"wireguard","Mode":"auto""#),
    ];
    for other in configs {
        assert_ne!(other, config);
        fs::write(&store, &other).expect("a file of the test");
        let mut next = overlay.weftd(0, &["--take-over", HERE[0]]);
        assert!(!next.wait(PATIENCE).success(), "{}", next.output());
        // It goes on by the configuration that it has.
        overlay.traffic_resumes(PATIENCE, &format!("a take-over that failed with {other}"));
        assert!(overlay.daemons[0].ended().is_none(), "{}", overlay.daemons[0].output());
        fs::write(&store, &config).expect("a file of the test");
    }
    // It is whole, and hands over again.
    let next = overlay.weftd(0, &["--take-over", HERE[0]]);
    overlay.daemons[0].wait(PATIENCE);
    overlay.daemons[0] = next;
    overlay.traffic_resumes(PATIENCE, "a take-over");
}

#[test]
fn a_container_goes_on_if_the_next_cannot_have_its_port() {
    let mut overlay = overlay();
    let first = Contained::start(&overlay, &HERE);
    overlay.daemons[0].wait(PATIENCE);
    wait_until(PATIENCE, "the first container is ready", || first.is_ready(&overlay));
    let taken = udp_socket(&overlay.lab.hosts[0], Ipv4Addr::UNSPECIFIED);
    let backend = format!(r#""wireguard","ListenPort":{}"#, port(&taken));
    let other = CONFIG.replace(r#""udp""#, &backend);
    fs::write(overlay.files().join("store/config"), other).expect("a file of the test");
    let mut next = Contained::start(&overlay, &HERE);
    assert!(!next.0.wait(PATIENCE).success(), "{}", next.output());
    wait_until(PATIENCE, "the first one goes on", || first.is_ready(&overlay));
    overlay.traffic_resumes(PATIENCE, "an update that failed");
    assert!(first.stop(Signal::TERM).0);
}
