//! Daemons that are stopped, killed and started again under traffic, with `--keep-tunnel`.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::flows::Flows;
use crate::support::lab::{Lab, Namespace, PLAIN_CARD, SubnetEnv, WEFTD, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay, local_store};
use crate::support::status::Status;
use crate::support::traffic::{Numbered, port, tcp_transfer, udp_sizes, udp_socket};

const PATIENCE: Duration = Duration::from_secs(10);
const KEPT: [&str; 2] = ["--fast-path=on", "--keep-tunnel"];

/// Restarts, and datagrams a second each way: few enough for a busy machine. `WEFT_RESTARTS="100
/// 10000"` measures.
const RESTARTS: [u64; 2] = [4, 1000];
const FLOWS: usize = 20;

/// How many, and how many datagrams a second.
pub(crate) fn restarts() -> [u64; 2] {
    let Ok(text) = std::env::var("WEFT_RESTARTS") else { return RESTARTS };
    let numbers: Vec<_> = text.split(' ').map(|number| number.parse().expect("numbers")).collect();
    numbers.try_into().expect("restarts and rate")
}

pub(crate) fn device_index(host: &Namespace, name: &str) -> Option<String> {
    let path = format!("/sys/class/net/{name}/ifindex");
    let shown = host.command(&["cat", &path]).output().expect("cat runs");
    shown.status.success().then(|| String::from_utf8_lossy(&shown.stdout).into_owned())
}

/// The filters on the devices that packets go through.
fn filters(host: &Namespace) -> String {
    let shown = |device: &str, side| {
        let is_there = host.succeeds(&["ip", "link", "show", device]);
        if is_there {
            host.exec(&["tc", "filter", "show", "dev", device, side])
        } else {
            String::new()
        }
    };
    shown("flannel0", "egress") + &shown("wire0", "ingress")
}

/// Waits for both of host 0, which come some time after its routes.
#[track_caller]
fn wait_for_programs(overlay: &Overlay) {
    wait_until(PATIENCE, "the programs are attached", || {
        filters(&overlay.lab.hosts[0]).matches("weft_").count() == 2
    });
}

/// Ends all threads, also after a panic.
struct Ended<'a> {
    stop: &'a AtomicBool,
    streams: &'a [Numbered; 2],
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for stream in self.streams {
            stream.stop.store(true, Ordering::Relaxed);
            stream.drained.store(true, Ordering::Relaxed);
        }
    }
}

/// Has the pods send datagrams and talk over TCP both ways while `disturb` runs, and loses none;
/// what was seen.
pub(crate) fn under_traffic(
    overlay: &mut Overlay,
    rate: u64,
    disturb: impl FnOnce(&mut Overlay),
) -> String {
    let pods = [0, 1].map(|host| overlay.pod(host));
    let sockets = [0, 1].map(|host| udp_socket(&overlay.lab.pods[host], pods[host]));
    let flows = {
        let [near, far] = &overlay.lab.pods;
        Flows::open(near, far, pods[1], FLOWS)
    };
    let streams: [Numbered; 2] = Default::default();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _guard = Ended { stop: &stop, streams: &streams };
        let talk = scope.spawn(|| flows.talk(&stop));
        for from in 0..2 {
            let to = 1 - from;
            let target = SocketAddr::from((pods[to], port(&sockets[to])));
            let (stream, sockets) = (&streams[from], &sockets);
            scope.spawn(move || stream.send(&sockets[from], target, rate));
            scope.spawn(move || stream.receive(&sockets[to]));
        }
        disturb(overlay);
        stop.store(true, Ordering::Relaxed);
        let report = talk.join().expect("the flows talk");
        assert_eq!(report.open, FLOWS, "{report}");
        for stream in &streams {
            stream.stop.store(true, Ordering::Relaxed);
        }
        let is_complete = || streams.iter().all(|stream| stream.missing() == 0);
        let have_arrived = comes_true(PATIENCE, is_complete);
        let lost = streams.each_ref().map(Numbered::missing);
        assert!(have_arrived, "of host 0's and of host 1's packets {lost:?} are lost");
        let seen = streams.each_ref().map(|stream| {
            stream.drained.store(true, Ordering::Relaxed);
            assert_eq!(stream.refused.load(Ordering::Relaxed), 0, "the pod could not send");
            format!(
                "{} sent, {} reordered, longest pause {} ms; ",
                stream.sent.load(Ordering::Relaxed),
                stream.reordered.load(Ordering::Relaxed),
                stream.longest_gap_ns.load(Ordering::Relaxed) / 1_000_000,
            )
        });
        seen.concat() + &report.to_string()
    })
}

#[test]
fn a_kept_tunnel_loses_nothing_while_weftd_is_away() {
    let [count, rate] = restarts();
    let mut overlay = Overlay::start_with(CONFIG, [&KEPT, &KEPT]);
    for host in &overlay.lab.hosts {
        host.exec(&[&["ethtool", "-K", "wire0"], &PLAIN_CARD[..]].concat());
    }
    overlay.wait_until_carried();
    wait_until(PATIENCE, "the kernel merges what arrives", || {
        let [near, far] = &overlay.lab.pods;
        tcp_transfer(far, near, overlay.pod(0), 4 << 20, false);
        device_index(&overlay.lab.hosts[0], "flannel0-gro0").is_some()
    });
    let devices = |overlay: &Overlay| {
        ["flannel0", "flannel0-gro0"].map(|name| device_index(&overlay.lab.hosts[0], name))
    };
    let made = devices(&overlay);
    let report = under_traffic(&mut overlay, rate, |overlay| {
        for number in 0..count {
            let signal = if number % 2 == 0 { Signal::TERM } else { Signal::KILL };
            overlay.daemons[0].stop(signal, PATIENCE);
            // Long enough to be seen if packets were lost meanwhile.
            thread::sleep(Duration::from_millis(500));
            overlay.restart(0, &KEPT);
            wait_until(PATIENCE, "the kernel carries the packets by the new weftd", || {
                let status = Status::try_of(&overlay.dir(0));
                status.is_some_and(|status| status.0["fast_path"]["peers"] == 1)
            });
            assert_eq!(devices(overlay), made, "other devices");
        }
    });
    println!("{report}");
}

/// Beyond what finding out a path takes.
const AWAY: Duration = Duration::from_secs(3);

#[test]
fn a_kept_tunnel_may_be_used_first_while_weftd_is_away() {
    let mut overlay = Overlay::start_with(CONFIG, [&KEPT, &KEPT]);
    overlay.wait_until_carried();
    overlay.daemons[0].stop(Signal::KILL, PATIENCE);
    let [near, far] = &overlay.lab.pods;
    let until = Instant::now() + AWAY;
    while Instant::now() < until {
        // Long enough for its path to be measured, by echoes that weftd would take.
        udp_sizes(far, near, overlay.pod(0), [1000]);
        thread::sleep(Duration::from_millis(50));
    }
    overlay.restart(0, &KEPT);
    overlay.wait_until_carried();
}

#[test]
fn a_tunnel_that_is_not_kept_any_more_leaves_nothing() {
    let mut overlay = Overlay::start_with(CONFIG, [&KEPT, &[]]);
    wait_for_programs(&overlay);
    let host = |overlay: &Overlay| {
        (device_index(&overlay.lab.hosts[0], "flannel0"), filters(&overlay.lab.hosts[0]))
    };
    let (device, shown) = host(&overlay);
    assert_eq!(shown.matches("weft_").count(), 2, "{shown}");
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    assert_eq!(host(&overlay), (device.clone(), shown), "something did not outlive weftd");

    // Without the fast path nothing may take packets by what the last weftd knew.
    overlay.restart(0, &["--fast-path=off"]);
    overlay.wait_for_routes();
    wait_until(PATIENCE, "the programs of the last weftd are gone", || {
        filters(&overlay.lab.hosts[0]).is_empty()
    });
    assert_eq!(host(&overlay), (device, String::new()));
    assert!(overlay.lab.ping(0, overlay.pod(1), 56));
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    assert_eq!(host(&overlay), (None, String::new()), "something outlives weftd");
}

/// The device's address, and for how many seconds it is there.
fn address_and_life(host: &Namespace) -> (String, u64) {
    let shown = host.exec(&["ip", "-json", "-4", "address", "show", "dev", "flannel0"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("ip prints JSON");
    let address = &shown[0]["addr_info"][0];
    let local = address["local"].as_str().expect("the device has an address").to_owned();
    (local, address["valid_life_time"].as_u64().expect("the address has a life"))
}

#[test]
fn a_kept_tunnel_that_nobody_takes_up_gets_out_of_the_way() {
    const FOR_EVER: u64 = u32::MAX as u64;
    let mut overlay = Overlay::start_with(CONFIG, [&KEPT, &[]]);
    let (address, life) = address_and_life(&overlay.lab.hosts[0]);
    assert_eq!(life, FOR_EVER);
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let (kept, life) = address_and_life(&overlay.lab.hosts[0]);
    assert!(kept == address && (60..=120).contains(&life), "{kept} for {life} s");
    overlay.restart(0, &KEPT);
    overlay.wait_for_routes();
    assert_eq!(address_and_life(&overlay.lab.hosts[0]), (address.clone(), FOR_EVER));

    // As if the time was over. A flanneld refuses to start beside another route to the network.
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let host = &overlay.lab.hosts[0];
    let change = ["ip", "address", "change", &address, "dev", "flannel0"];
    host.exec(&[&change[..], &["valid_lft", "1", "preferred_lft", "1"]].concat());
    wait_until(PATIENCE, "no route goes into the device", || {
        host.exec(&["ip", "route", "show", "dev", "flannel0"]).is_empty()
    });
    overlay.restart(0, &KEPT);
    overlay.wait_for_routes();
    assert!(overlay.lab.ping(0, overlay.pod(1), 56));
}

#[test]
fn a_start_that_fails_leaves_no_device() {
    let lab = Lab::two_hosts();
    let files = tempfile::tempdir().expect("a directory for the test");
    let store = local_store(files.path(), CONFIG);
    lab.hosts[0].exec(&["ip", "route", "add", "10.5.0.0/16", "via", "172.20.0.2"]);
    let mut daemon = lab.weftd(0, files.path(), &[&[store.as_str()], &KEPT[..]].concat());
    assert!(!daemon.wait(PATIENCE).success(), "it starts beside a route to its network");
    let text = daemon.output();
    assert!(daemon.complaints("10.5.0.0/16 via 172.20.0.2") > 0, "{text}");
    assert_eq!(device_index(&lab.hosts[0], "flannel0"), None, "{text}");
}

#[test]
fn another_weftd_leaves_a_kept_tunnel_alone() {
    let overlay = Overlay::start_with(CONFIG, [&KEPT, &[]]);
    let host = &overlay.lab.hosts[0];
    wait_for_programs(&overlay);
    let before = (device_index(host, "flannel0"), filters(host));
    // For another network, at another address.
    host.exec(&["ip", "address", "add", "172.20.0.11/24", "dev", "wire0"]);
    let directory = overlay.files().join("other");
    let store = local_store(&directory, &CONFIG.replace("10.5.", "10.6."));
    let place = |flag: &str, name: &str| format!("--{flag}={}", directory.join(name).display());
    let files = [place("subnet-file", "subnet.env"), place("status-socket", "weft.sock")];
    let own = ["--iface=172.20.0.11", "--iptables-forward-rules=false", "--fast-path=off"];
    for extra in [&[][..], &["--keep-tunnel"]] {
        let argv = [&[WEFTD, &store, &files[0], &files[1]], &own[..], extra].concat();
        let mut daemon = host.spawn(&argv);
        SubnetEnv::wait(&directory.join("subnet.env"), &mut daemon);
        wait_until(PATIENCE, "the other one carries packets", || {
            Status::try_of(&directory).is_some_and(|status| status.0["ready"] == true)
        });
        daemon.stop(Signal::TERM, PATIENCE);
        assert_eq!((device_index(host, "flannel0"), filters(host)), before);
    }
    assert!(overlay.lab.ping(0, overlay.pod(1), 56));
}

#[test]
fn another_backend_removes_a_kept_tunnel() {
    let mut overlay = Overlay::start_with(CONFIG, [&KEPT, &[]]);
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    let config = CONFIG.replace("udp", "vxlan");
    std::fs::write(overlay.files().join("store/config"), config).expect("a file of the test");
    overlay.restart(0, &[]);
    wait_until(PATIENCE, "the other backend runs", || {
        Status::try_of(&overlay.dir(0)).is_some_and(|status| status.0["ready"] == true)
    });
    let host = &overlay.lab.hosts[0];
    assert_eq!((device_index(host, "flannel0"), filters(host)), (None, String::new()));
}

#[test]
fn a_kept_tunnel_follows_its_host_to_another_address_and_interface() {
    let mut overlay = Overlay::start_with(CONFIG, [&KEPT, &KEPT]);
    overlay.wait_until_carried();
    let counted = |overlay: &Overlay| {
        let host = &overlay.lab.hosts[0];
        let places = [("flannel0", "egress"), ("wire0", "ingress"), ("br0", "ingress")];
        places.map(|(device, side)| {
            let shown = host.command(&["tc", "filter", "show", "dev", device, side]).output();
            let shown = shown.expect("tc runs").stdout;
            String::from_utf8_lossy(&shown).matches("weft_").count()
        })
    };
    assert_eq!(counted(&overlay), [1, 1, 0]);
    let moves: [&[&[&str]]; 2] = [
        &[
            &["ip", "address", "flush", "dev", "wire0"],
            &["ip", "address", "add", "172.20.0.3/24", "dev", "wire0"],
        ],
        &[
            &["ip", "address", "flush", "dev", "wire0"],
            &["ip", "link", "add", "br0", "up", "type", "bridge"],
            &["ip", "link", "set", "wire0", "master", "br0"],
            &["ip", "address", "add", "172.20.0.3/24", "dev", "br0"],
        ],
    ];
    for (commands, expected) in moves.into_iter().zip([[1, 1, 0], [1, 0, 1]]) {
        overlay.daemons[0].stop(Signal::TERM, PATIENCE);
        for command in commands {
            overlay.lab.hosts[0].exec(command);
        }
        overlay.restart(0, &[&KEPT[..], &["--iface=172.20.0.3"]].concat());
        wait_until(PATIENCE, "the programs are where the tunnel is, and nowhere else", || {
            Status::try_of(&overlay.dir(0)).is_some_and(|status| status.0["ready"] == true)
                && counted(&overlay) == expected
        });
        // Another address leases another subnet.
        let lease = SubnetEnv::read(&overlay.dir(0).join("subnet.env"));
        overlay.leases[0] = lease.expect("a weftd that is ready has written the file");
        overlay.lab.connect_pods(overlay.leases.each_ref());
        assert!(overlay.lab.ping(1, overlay.pod(0), 56), "nobody reaches the moved host");
    }
    wait_until(PATIENCE, "on a bridge the workers are faster", || {
        overlay.status(0).0["fast_path"]["why"] == "bridge"
    });
}

#[test]
fn a_host_that_gets_another_address_while_weftd_is_away_keeps_its_subnet() {
    let flags = ["--fast-path=on", "--keep-tunnel", "--iface=wire0"];
    for signal in [Signal::TERM, Signal::KILL] {
        let mut overlay = Overlay::start_with(CONFIG, [&flags, &flags]);
        overlay.wait_until_carried();
        let file = overlay.dir(0).join("subnet.env");
        let before = SubnetEnv::read(&file).expect("it is there");
        overlay.daemons[0].stop(signal, PATIENCE);
        for change in
            [["add", "172.20.0.11/24"], ["del", "172.20.0.1/24"], ["add", "172.20.0.11/24"]]
        {
            // A secondary address goes with the first one.
            let change = [&["ip", "address"], &change[..], &["dev", "wire0"]].concat();
            overlay.lab.hosts[0].command(&change).output().expect("ip runs");
        }
        overlay.restart(0, &flags);
        overlay.traffic_resumes(PATIENCE, "its pods are cut off");
        let now = SubnetEnv::read(&file).expect("it is there");
        assert_eq!(now.subnet, before.subnet, "{}", overlay.daemons[0].output());
    }
}
