//! Workers that send from ports of their own, so that a peer's workers share what comes from one
//! host, and what firewalls and peers that know one port only make of that.

use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::support::lab::{Namespace, Process, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::status::Status;

const SOON: Duration = Duration::from_secs(30);

/// Long enough for echoes from workers' ports to stay unanswered more often than the tries that
/// they are given.
const A_WHILE: Duration = Duration::from_secs(8);

/// Datagrams to the tunnel that come from another port, counted, and perhaps dropped.
struct OtherPorts<'a>(&'a Namespace);

impl<'a> OtherPorts<'a> {
    fn counted(host: &'a Namespace, then: &str) -> Self {
        Self::of(host, "!= 8285", then)
    }

    fn of(host: &'a Namespace, which: &str, then: &str) -> Self {
        let rule = format!("udp dport 8285 udp sport {which} counter name others {then}");
        let chain = format!("chain c {{ type filter hook prerouting priority -300; {rule}; }}");
        host.exec(&["nft", &format!("table inet w {{ counter others {{ }}; {chain}; }}")]);
        Self(host)
    }

    fn count(&self) -> u64 {
        let text = self.0.exec(&["nft", "list", "counter", "inet", "w", "others"]);
        let count = text.split_whitespace().skip_while(|word| *word != "packets").nth(1);
        count.and_then(|word| word.parse().ok()).expect("a counter has packets")
    }
}

/// Two hosts of so many workers each, the fast path off.
fn overlay(workers: [u8; 2], flags: &[&str]) -> Overlay {
    let counts = workers.map(|count| format!("--workers={count}"));
    let all = counts.each_ref().map(|count| [&["--fast-path=off", count], flags].concat());
    let overlay = Overlay::start_with(CONFIG, all.each_ref().map(Vec::as_slice));
    overlay.traffic_resumes(SOON, "the start");
    overlay
}

/// Keeps the peer in use.
fn pings(overlay: &Overlay) -> Process {
    let far = overlay.pod(1).to_string();
    overlay.lab.pods[0].spawn(&["ping", "-q", "-i0.05", &far])
}

fn received(status: &Status) -> Vec<u64> {
    let workers = status.0["workers"].as_array().expect("the status lists the workers");
    let count = |worker: &Value| worker["ingress"]["packets_forwarded"].as_u64();
    workers.iter().map(|worker| count(worker).expect("a worker counts")).collect()
}

/// So many connections that hardly any hash gives one of two workers more than two thirds of them.
const CONNECTIONS: usize = 128;

/// Each sends some packets, from a port of its own.
fn connections(overlay: &Overlay) {
    const BYTES: usize = 100_000;
    let address = SocketAddrV4::new(overlay.pod(1), 5201);
    let listener = overlay.lab.pods[1].enter(|| TcpListener::bind(address)).expect("a free port");
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..CONNECTIONS {
                let (mut connection, _) = listener.accept().expect("somebody connects");
                let mut bytes = Vec::new();
                connection.read_to_end(&mut bytes).expect("it is sent to the end");
                assert_eq!(bytes.len(), BYTES);
            }
        });
        overlay.lab.pods[0].enter(|| {
            for _ in 0..CONNECTIONS {
                let mut connection = TcpStream::connect(address).expect("it listens");
                connection.write_all(&[7; BYTES]).expect("it reads");
            }
        });
    });
}

#[test]
fn the_workers_share_what_one_host_sends() {
    let overlay = overlay([2, 2], &["--peer-check=strict"]);
    let others = OtherPorts::counted(&overlay.lab.hosts[1], "");
    let pings = pings(&overlay);
    let is_spread = || overlay.status(0).0["routes"][0]["from_source_ports"] == true;
    wait_until(SOON, "workers send from ports of their own", || others.count() > 50 && is_spread());
    drop(pings);
    let before = received(&overlay.status(1));
    connections(&overlay);
    let after = received(&overlay.status(1));
    let news: Vec<_> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
    assert!(
        news[0] <= news[1] * 2 && news[1] <= news[0] * 2,
        "one worker carries what comes from a host: {news:?}"
    );
    assert_eq!(overlay.status(1).drops("ingress", "outer-port"), 0, "the strict check knows none");
}

#[test]
fn a_firewall_that_knows_one_port_costs_no_packet() {
    // Or one dead path of several, where routers choose by the ports, or narrow ones.
    for shut in ["!= 8285", "28445", "28446", "28445-28446 udp length > 1300"] {
        // Closed before there is traffic, by which the ports are tried.
        let flags: &[&str] = &["--fast-path=off", "--workers=2"];
        let overlay = Overlay::start_with(CONFIG, [flags, flags]);
        let others = OtherPorts::of(&overlay.lab.hosts[1], shut, "drop");
        overlay.traffic_resumes(SOON, "the start");
        let far = overlay.pod(1).to_string();
        let count = (A_WHILE.as_millis() / 50).to_string();
        let argv = ["ping", "-q", "-i0.05", "-W10", "-c", &count, &far];
        let report = overlay.lab.pods[0].exec(&argv);
        assert!(report.contains(" 0% packet loss"), "packets leave from port {shut}: {report}");
        let is_spread = &overlay.status(0).0["routes"][0]["from_source_ports"];
        assert_eq!(*is_spread, false, "with port {shut} shut, half of the flows reach nobody");
        assert!(others.count() > 0, "nothing was tried");
    }
}

#[test]
fn what_this_host_forbids_from_own_ports_leaves_from_the_tunnels() {
    const FORBIDDEN: &str = "table inet o { chain c { type filter hook output priority 0; \
                             udp sport != 8285 udp dport 8285 drop; }; }";
    let overlay = overlay([2, 2], &[]);
    let spread = pings(&overlay);
    wait_until(SOON, "workers send from ports of their own", || {
        overlay.status(0).0["routes"][0]["from_source_ports"] == true
    });
    drop(spread);
    overlay.lab.hosts[0].exec(&["nft", FORBIDDEN]);
    let far = overlay.pod(1).to_string();
    let argv = ["ping", "-q", "-i0.05", "-W10", "-c100", &far];
    let report = overlay.lab.pods[0].exec(&argv);
    let received: u32 = report
        .split(", ")
        .find_map(|part| part.strip_suffix(" received")?.parse().ok())
        .expect("ping counts what it received");
    // The one that shows it.
    assert!(received >= 99, "each is refused, though the tunnel's port is free: {report}");
    assert_eq!(overlay.status(0).causes(), [], "the peer is well");
}

#[test]
fn who_takes_one_port_gets_one() {
    for (workers, flags) in [([2, 1], &[][..]), ([2, 2], &["--source-ports=one"])] {
        let overlay = overlay(workers, flags);
        let others = OtherPorts::counted(&overlay.lab.hosts[1], "");
        let _pings = pings(&overlay);
        thread::sleep(A_WHILE / 4);
        assert_eq!(others.count(), 0, "{workers:?} workers, {flags:?}");
    }
}
