//! Peers whose hosts are down, and peers that the kernel refuses to send to, while a pod sends to
//! them all the time: the others keep their packets.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::lab::{Namespace, comes_true, wait_until};
use crate::support::overlay::{CONFIG, Overlay, reserve};

/// The last byte of the addresses of hosts that are down. Without more ado they fill a send buffer,
/// and the living lose one in fifteen packets and more.
const DEAD: Range<u8> = 40..240;

/// Long enough for the kernel to give a host up more than once.
const PINGS: &str = "240";

const SOON: Duration = Duration::from_secs(30);

/// Ends the flood, also when the test fails.
struct Flood<'a>(&'a AtomicBool);

impl Drop for Flood<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends to all of `receivers` until `is_over`, from the calling thread's namespace.
fn flood(receivers: &[SocketAddrV4], is_over: &AtomicBool, sent: &AtomicU64) {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a pod has sockets");
    while !is_over.load(Ordering::Relaxed) {
        // A full queue is the kernel's to drop.
        let went = receivers.iter().filter(|to| socket.send_to(&[7; 1200], to).is_ok()).count();
        sent.fetch_add(went as u64, Ordering::Relaxed);
    }
}

#[test]
fn a_flood_to_dead_hosts_costs_the_living_no_packet() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let own = overlay.leases.each_ref().map(|lease| lease.network().octets()[2]);
    let dead: Vec<u8> = DEAD.filter(|number| !own.contains(number)).collect();
    for number in &dead {
        let host = Ipv4Addr::new(172, 20, 0, *number);
        reserve(overlay.files(), &format!("10.5.{number}.0-24"), host);
    }
    wait_until(SOON, "the dead are peers", || overlay.status(0).routes() == 1 + dead.len());
    let (is_over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let receiver = |number: &u8| SocketAddrV4::new(Ipv4Addr::new(10, 5, *number, 9), 9);
    let receivers: Vec<_> = dead.iter().map(receiver).collect();
    let unresolved = || overlay.status(0).drops("egress", "tx-unresolved");
    thread::scope(|scope| {
        let over = Flood(&is_over);
        scope.spawn(|| overlay.lab.pods[0].enter(|| flood(&receivers, &is_over, &sent)));
        let living = overlay.pod(1).to_string();
        let argv = ["ping", "-q", "-i0.05", "-W10", "-c", PINGS, &living];
        // By the host itself: what the flood fills on the pod's own way to it is the pod's.
        let report = overlay.lab.hosts[0].exec(&argv);
        let drops = |host| overlay.status(host).0["egress"]["drops"].to_string();
        assert!(
            report.contains(" 0% packet loss"),
            "pings to a living peer are lost: {report}; {}, {}",
            drops(0),
            drops(1)
        );
        wait_until(SOON, "nothing is sent to the dead", || unresolved() > 0);
        let back_after = comes_back(&overlay, dead[dead.len() / 2]);
        drop(over);
        let sent = sent.load(Ordering::Relaxed);
        println!("{sent} datagrams to the dead, {} not sent; back {back_after:?}", unresolved());
    });
}

/// One of the hosts is there again; how long until it gets a packet.
fn comes_back(overlay: &Overlay, number: u8) -> Duration {
    let address = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, number), 8285);
    let started = Instant::now();
    let host = &overlay.lab.hosts[1];
    host.exec(&["ip", "address", "add", &format!("{}/32", address.ip()), "dev", "wire0"]);
    gets_a_packet(host, address);
    started.elapsed()
}

/// Waits until the tunnel's port of an address that `host` has just got receives a packet of the
/// flood, and not only weftd's own echoes.
#[track_caller]
fn gets_a_packet(host: &Namespace, address: SocketAddrV4) {
    const UDP: u8 = 17;
    let gets_one = host.enter(|| {
        let socket = UdpSocket::bind(address).expect("it has just got the address");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("it is no zero");
        let mut packet = [0; 2048];
        comes_true(SOON, || socket.recv(&mut packet).is_ok() && packet[9] == UDP)
    });
    assert!(gets_one, "a host that came back gets no packet");
}

/// The kernel goes on asking for it on the link, since weftd has it asked, and no pod there answers
/// an echo.
#[test]
fn a_dead_host_that_comes_back_behind_a_router_gets_packets() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let address = SocketAddrV4::new(Ipv4Addr::new(172, 20, 0, 210), 8285);
    reserve(overlay.files(), "10.5.210.0-24", *address.ip());
    wait_until(SOON, "the dead host is a peer", || overlay.status(0).routes() == 2);
    let receivers = [SocketAddrV4::new(Ipv4Addr::new(10, 5, 210, 9), 9)];
    let (is_over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let unresolved = || overlay.status(0).drops("egress", "tx-unresolved");
    let [host, router] = &overlay.lab.hosts;
    thread::scope(|scope| {
        let _over = Flood(&is_over);
        scope.spawn(|| overlay.lab.pods[0].enter(|| flood(&receivers, &is_over, &sent)));
        wait_until(SOON, "nothing is sent to the dead host", || unresolved() > 0);
        // Of its other interfaces' addresses the router says nothing.
        router.exec(&["sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1"]);
        router.exec(&["ip", "address", "add", &format!("{}/32", address.ip()), "dev", "lo"]);
        let route = format!("ip route add {}/32 via 172.20.0.2", address.ip());
        host.exec(&route.split(' ').collect::<Vec<_>>());
        gets_a_packet(router, address);
    });
}

/// A firewall of this host counts what it refuses: each of these is a system call.
#[test]
fn a_refused_peer_is_tried_now_and_then() {
    let overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &["--fast-path=off"]]);
    let host = &overlay.lab.hosts[0];
    overlay.traffic_resumes(SOON, "the start");
    let table = "table inet w { counter tries { }; chain c { type filter hook output priority 0; \
                 udp dport 8285 counter name tries drop; }; }";
    host.exec(&["nft", table]);
    let receivers = [SocketAddrV4::new(overlay.pod(1), 9)];
    let (is_over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let refused = || overlay.status(0).drops("egress", "tx-eperm");
    thread::scope(|scope| {
        let _over = Flood(&is_over);
        scope.spawn(|| overlay.lab.pods[0].enter(|| flood(&receivers, &is_over, &sent)));
        wait_until(SOON, "many datagrams are refused", || refused() > 20_000);
    });
    let tries = host.exec(&["nft", "list", "counter", "inet", "w", "tries"]);
    let tries = tries.split_whitespace().skip_while(|word| *word != "packets").nth(1);
    let tries: u64 = tries.and_then(|word| word.parse().ok()).expect("a counter has packets");
    let refused = refused();
    assert!(tries * 3 < refused, "{tries} system calls for {refused} packets to a refused peer");
    host.exec(&["nft", "delete", "table", "inet", "w"]);
    overlay.traffic_resumes(SOON, "the firewall lets datagrams through");
}
