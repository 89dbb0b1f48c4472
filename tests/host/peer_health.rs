//! How peers are: each fault, in each backend, is known by its state soon after the first packet is
//! lost, and the peer is `ok` soon after the repair.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::Signal;
use weft::packet::checksum;

use crate::support::cluster::{Nodes, host_address};
use crate::support::lab::{Lab, Namespace, Process, UNDERLAY, wait_until};
use crate::support::overlay::{Overlay, local_store, reserve};
use crate::support::packet::{
    echo_reply, echo_requests, ipv4, raw_socket, send_raw, udp as udp_packet,
};
use crate::support::status::Status;

/// Ten seconds are promised for a state and five for the repair, on a machine that has time.
const KNOWN: Duration = Duration::from_secs(30);

const UDP: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;
const VXLAN: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
const HOST_GW: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;

/// Classic BPF on an Ethernet frame: a datagram is dropped, all else goes on.
const LOSE: &str = "tc qdisc add dev wire0 clsact 2>/dev/null || true; \
                    tc filter add dev wire0 egress prio 7 bpf da bytecode \
                    '4,48 0 0 23,21 0 1 17,6 0 0 2,6 0 0 4294967295'";
const LOSE_NO_MORE: &str = "tc filter del dev wire0 egress prio 7";

/// Two hosts whose pods ping each other all the time, both ways.
struct Used {
    pings: Vec<Process>,
    overlay: Overlay,
}

impl Used {
    fn start(config: &str, arguments: &[&str]) -> Self {
        let overlay = Overlay::start_with(config, [arguments, arguments]);
        let mut used = Self { overlay, pings: Vec::new() };
        for host in 0..2 {
            assert_eq!(used.state(host), "idle", "nobody sends to it");
        }
        for (from, to) in [(0, 1), (1, 0)] {
            let address = used.overlay.pod(to).to_string();
            let ping = used.overlay.lab.pods[from].spawn(&["ping", "-q", "-i0.2", &address]);
            used.pings.push(ping);
        }
        used.becomes(0, "ok");
        used.becomes(1, "ok");
        used
    }

    fn host(&self, host: usize) -> &Namespace {
        &self.overlay.lab.hosts[host]
    }

    /// A busy machine may not answer now and then.
    fn told(&self, host: usize, pointer: &str) -> String {
        let status = Status::try_of(&self.overlay.dir(host));
        let word = status.and_then(|status| Some(status.0.pointer(pointer)?.as_str()?.to_owned()));
        word.unwrap_or_default()
    }

    fn state(&self, host: usize) -> String {
        self.told(host, "/routes/0/state")
    }

    fn verdict(&self, host: usize) -> String {
        self.told(host, "/verdict/state")
    }

    #[track_caller]
    fn becomes(&self, host: usize, state: &str) {
        let what = format!("host {host} says {state} of its peer; it says {}", self.state(host));
        wait_until(KNOWN, &what, || self.state(host) == state);
    }

    /// Host 0 says `first` of its peer while the fault lasts, host 1 one of `second`, and both `ok`
    /// once it is gone. The hosts' verdicts follow.
    #[track_caller]
    fn fault(&self, fault: [(usize, &str); 2], first: &str, second: &[&str]) {
        let [(host, inject), (_, repair)] = fault;
        self.host(host).exec(&["sh", "-ec", inject]);
        self.becomes(0, first);
        let is_alarm = first != "deaf";
        let what = format!("{inject}: the verdict of host 0 follows {first}");
        let verdict = if is_alarm { "degraded" } else { "ready" };
        wait_until(KNOWN, &what, || self.verdict(0) == verdict);
        let what = format!("{inject}: host 1 says one of {second:?}, not {}", self.state(1));
        wait_until(KNOWN, &what, || second.contains(&self.state(1).as_str()));
        self.host(host).exec(&["sh", "-ec", repair]);
        self.becomes(0, "ok");
        self.becomes(1, "ok");
    }

    /// What healthy hosts do as well alarms nobody.
    #[track_caller]
    fn no_fault(&self, host: usize, inject: &str, repair: &str) {
        self.host(host).exec(&["sh", "-ec", inject]);
        // Once is no alarm: where a process gets no processor, its answers come late.
        let mut was_alarmed = [false; 2];
        for _ in 0..30 {
            std::thread::sleep(Duration::from_millis(500));
            for (host, was_alarmed) in was_alarmed.iter_mut().enumerate() {
                let (state, verdict) = (self.state(host), self.verdict(host));
                let is_well = ["", "ok", "deaf"].contains(&state.as_str());
                let is_alarmed = !is_well || verdict == "degraded";
                assert!(!(*was_alarmed && is_alarmed), "{inject}: {state:?}, {verdict:?}");
                *was_alarmed = is_alarmed;
            }
        }
        self.host(host).exec(&["sh", "-ec", repair]);
    }

    fn route_fault(&self) {
        let blackhole = "ip route add blackhole 172.20.0.2/32";
        let repair = "ip route del blackhole 172.20.0.2/32";
        self.fault([(0, blackhole), (0, repair)], "unsendable", &["silent", "one-way"]);
    }

    /// What happens to all datagrams of one way, whoever sends them: those of the kernel's programs
    /// pass no firewall.
    fn network_faults(&self) {
        self.fault([(0, LOSE), (0, LOSE_NO_MORE)], "one-way", &["silent"]);
        self.fault([(1, LOSE), (1, LOSE_NO_MORE)], "silent", &["one-way"]);
    }

    /// What a firewall does to datagrams of the tunnel, whose port this is.
    fn tunnel_faults(&self, port: u16) {
        let table = |chains: &str| format!("nft 'table inet wall {{ {chains} }}'");
        let repair = "nft delete table inet wall";
        let inward =
            format!("chain a {{ type filter hook input priority 0; udp dport {port} drop; }};");
        let outward =
            format!("chain b {{ type filter hook output priority 0; udp dport {port} drop; }};");
        // What is lost there comes from here; to host 1 nothing comes, and it must not say that
        // host 0 sends nothing.
        let there = table(&inward);
        self.fault([(1, &there), (1, repair)], "one-way", &["one-way"]);
        self.fault([(0, &there), (0, repair)], "one-way", &["one-way"]);
        // In front of tc and of every hook but the card's own.
        let first = "nft 'table netdev wall { chain a { type filter hook ingress device wire0 \
                     priority 0; ip saddr 172.20.0.2 drop; }; }'";
        self.fault([(0, first), (0, "nft delete table netdev wall")], "one-way", &["one-way"]);
        // Behind the tunnel: pods get nothing, though each answer reaches its device.
        let behind = table(
            "chain a { type filter hook prerouting priority -300; iifname \"flannel*\" drop; };",
        );
        self.fault([(0, &behind), (0, repair)], "one-way", &["one-way"]);
        // A wall that lets pings through.
        let wall = table(&format!("{inward} {outward}"));
        self.fault([(1, &wall), (1, repair)], "silent", &["one-way", "unsendable", "silent"]);
        let refusing = table(&format!(
            "chain a {{ type filter hook input priority 0; udp dport {port} reject; }};"
        ));
        self.fault([(1, &refusing), (1, repair)], "refused", &["one-way"]);
    }

    /// What any host may do.
    fn common_faults(&self) {
        let ignore = "sysctl -qw net.ipv4.icmp_echo_ignore_all=1";
        let repair = "sysctl -qw net.ipv4.icmp_echo_ignore_all=0";
        self.fault([(1, ignore), (1, repair)], "deaf", &["ok"]);
        let closed = "nft 'table inet wall { chain a { type filter hook input priority 0; policy \
                      drop; udp dport { 8285, 8472 } accept; ct state established,related accept; \
                      }; }'";
        self.no_fault(1, closed, "nft delete table inet wall");
    }
}

#[test]
fn udp_peers_are_what_they_are() {
    let used = Used::start(UDP, &["--fast-path=off"]);
    used.common_faults();
    used.route_fault();
    used.tunnel_faults(8285);
}

#[test]
fn udp_peers_of_the_fast_path_are_what_they_are() {
    let used = Used::start(UDP, &["--fast-path=auto"]);
    used.common_faults();
    used.route_fault();
    used.network_faults();
}

#[test]
fn vxlan_peers_are_what_they_are() {
    let used = Used::start(VXLAN, &[]);
    used.common_faults();
    used.route_fault();
    used.tunnel_faults(8472);
}

#[test]
fn host_gw_peers_are_what_they_are() {
    let used = Used::start(HOST_GW, &[]);
    used.common_faults();
    // Nobody is at that address any more.
    let gone = "ip link set wire0 arp off";
    let repair = "ip link set wire0 arp on";
    used.host(0).exec(&["ip", "neighbour", "flush", "dev", "wire0"]);
    used.fault([(1, gone), (1, repair)], "unsendable", &["ok", "silent", "unsendable"]);
}

/// Of one host that sends none of its own, and one that takes no answers: pods' pass.
#[test]
fn own_rules_against_pings_alarm_nobody() {
    let rule = |hook: &str| {
        format!(
            "nft 'table inet wall {{ chain a {{ type filter hook {hook} priority 0; ip protocol \
             icmp drop; }}; }}'"
        )
    };
    std::thread::scope(|scope| {
        for (config, flags) in [(UDP, &["--fast-path=off"][..]), (VXLAN, &[]), (HOST_GW, &[])] {
            scope.spawn(move || {
                let used = Used::start(config, flags);
                used.host(1).exec(&["sh", "-ec", &rule("input")]);
                used.no_fault(0, &rule("output"), "nft delete table inet wall");
            });
        }
    });
}

/// A pod asks another by UDP and is answered, five times a second, until this is dropped.
struct Talk {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Talk {
    fn start(overlay: &Overlay) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let socket = |pod: usize| {
            let socket = overlay.lab.pods[pod]
                .enter(|| UdpSocket::bind("0.0.0.0:9000").expect("the port is free"));
            socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a socket takes it");
            socket
        };
        let (client, server) = (socket(0), socket(1));
        let server_address = (overlay.pod(1), 9000);
        let (asks, answers) = (Arc::clone(&is_over), Arc::clone(&is_over));
        let ask = move || {
            while !asks.load(Ordering::Relaxed) {
                client.send_to(b"ask", server_address).ok();
                client.recv_from(&mut [0; 16]).ok();
                std::thread::sleep(Duration::from_millis(200));
            }
        };
        let answer = move || {
            while !answers.load(Ordering::Relaxed) {
                if let Ok((_, from)) = server.recv_from(&mut [0; 16]) {
                    server.send_to(b"answer", from).ok();
                }
            }
        };
        Self { is_over, threads: vec![std::thread::spawn(ask), std::thread::spawn(answer)] }
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[test]
fn rules_against_pings_alarm_nobody_whose_pods_speak_udp() {
    let rule = |hook: &str, what: &str| {
        format!(
            "nft 'table inet wall {{ chain a {{ type filter hook {hook} priority 0; {what} drop; \
             }}; }}'"
        )
    };
    let over = "nft delete table inet wall";
    std::thread::scope(|scope| {
        for (config, flags) in [(UDP, &["--fast-path=off"][..]), (VXLAN, &[]), (HOST_GW, &[])] {
            scope.spawn(move || {
                let mut used = Used::start(config, flags);
                used.pings.clear();
                let talk = Talk::start(&used.overlay);
                if config != HOST_GW {
                    // Their answers are seen to come, and packets of pods to go on.
                    let deaf = rule("input", "ip protocol icmp");
                    used.host(1).exec(&["sh", "-ec", &deaf]);
                    used.no_fault(0, &deaf, over);
                    used.host(1).exec(&["sh", "-ec", over]);
                }
                // Of the tunnel's device alone, where some echoes go another way.
                let some = rule("output", "oifname \"flannel*\" icmp type echo-request");
                used.no_fault(0, &some, over);
                // Who may not ask notices all the same that nothing comes. udp asks by its socket.
                let mute = rule("output", "icmp type echo-request");
                (0..2).for_each(|host| drop(used.host(host).exec(&["sh", "-ec", &mute])));
                if config != UDP {
                    used.becomes(0, "deaf");
                }
                used.host(1).exec(&["sh", "-ec", LOSE]);
                used.becomes(0, "silent");
                used.host(1).exec(&["sh", "-ec", LOSE_NO_MORE]);
                wait_until(KNOWN, "the alarm ends with the fault", || {
                    ["ok", "deaf"].contains(&used.state(0).as_str())
                });
                drop(talk);
            });
        }
    });
}

#[test]
fn a_closed_port_is_refused() {
    let mut used = Used::start(UDP, &["--fast-path=off"]);
    used.overlay.daemons[1].stop(Signal::KILL, Duration::from_secs(5));
    used.becomes(0, "refused");
    used.overlay.restart(1, &["--fast-path=off"]);
    used.becomes(0, "ok");
}

/// The store of host 0 has another subnet for its peer than the peer uses.
#[test]
fn packets_from_outside_a_peers_lease_are_named() {
    const OURS: &str = "10.5.10.0-24";
    const USED: &str = "10.5.20.0-24";
    let files = tempfile::tempdir().expect("a directory for the test");
    let lab = Lab::two_hosts();
    let [own, peer] = UNDERLAY;
    let mut daemons = Vec::new();
    for (host, leases) in [
        vec![(OURS, own), ("10.5.30.0-24", peer), (USED, Ipv4Addr::new(172, 20, 0, 99))],
        vec![(OURS, own), (USED, peer)],
    ]
    .into_iter()
    .enumerate()
    {
        let dir = files.path().join(format!("h{host}"));
        let store = local_store(&dir, UDP);
        leases.into_iter().for_each(|(subnet, at)| reserve(&dir, subnet, at));
        daemons.push(lab.weftd(host, &dir, &[&store, "--fast-path=off"]));
    }
    wait_until(KNOWN, "both know the other", || {
        (0..2).all(|host| {
            let status = Status::try_of(&files.path().join(format!("h{host}")));
            status.is_some_and(|status| status.routes() == 2 - host)
        })
    });
    let pings = ["10.5.30.0", "10.5.10.0"].into_iter().zip(&lab.hosts);
    let _pings: Vec<_> = pings.map(|(to, from)| from.spawn(&["ping", "-q", "-i0.2", to])).collect();
    let mut row = serde_json::Value::Null;
    wait_until(KNOWN, "what arrives from the peer is told", || {
        let status = Status::try_of(&files.path().join("h0"));
        let rows = status.map(|status| status.0["routes"].clone()).unwrap_or_default();
        let of_peer = |row: &&serde_json::Value| row["subnet"] == "10.5.30.0/24";
        row = rows.as_array().into_iter().flatten().find(of_peer).cloned().unwrap_or_default();
        row["state"] == "one-way"
    });
    let why = row["why"].as_str().unwrap_or_default();
    assert!(why.contains("10.5.20.0") && why.contains("src-not-peer-lease"), "{why}");
}

/// For minutes of it: `two_that_talked_leave_each_other_in_peace` in `src/backend/peer/machine/`.
#[test]
fn nobody_is_asked_on_an_idle_network() {
    // Of what the kernel carries it says late that nobody sends any more: nobody begins to.
    std::thread::scope(|scope| {
        for config in [VXLAN, HOST_GW] {
            scope.spawn(move || assert_quiet(&Overlay::start_with(config, [&[], &[]]), config));
        }
        scope.spawn(|| {
            // The programs pass no hook that counts.
            let Used { pings, overlay } = Used::start(UDP, &["--fast-path=off"]);
            drop(pings);
            assert_quiet(&overlay, UDP);
        });
    });
}

/// Once the hosts say that they leave each other in peace, they do.
#[track_caller]
fn assert_quiet(overlay: &Overlay, config: &str) {
    const COUNTER: &str = "table ip quiet { chain out { type filter hook output priority 0; \
                           oifname \"wire0\" counter; }; }";
    let state = |host: usize| overlay.status(host).0["routes"][0]["state"].clone();
    wait_until(KNOWN, "the daemons leave each other in peace", || {
        (0..2).all(|host| state(host) == "idle")
    });
    let hosts = &overlay.lab.hosts;
    hosts.iter().for_each(|host| _ = host.exec(&["nft", COUNTER]));
    // Two echoes' worth.
    std::thread::sleep(Duration::from_secs(11));
    for host in hosts {
        let chain = host.exec(&["nft", "list", "chain", "ip", "quiet", "out"]);
        assert!(chain.contains("packets 0 "), "{config}: somebody is asked: {chain}");
    }
}

/// A node of the cluster, and a pod of the host that asks, speak for a peer whose weftd hangs: with
/// the token that the node was sent, as its pods, as its host, and as a router that refuses.
#[test]
fn nobody_speaks_for_a_silent_peer() {
    std::thread::scope(|scope| {
        for (config, port) in [(UDP, 8285), (VXLAN, 8472)] {
            scope.spawn(move || assert_stays_silent(config, port));
        }
    });
}

fn assert_stays_silent(config: &str, port: u16) {
    let mut nodes = Nodes::start(3, config);
    let [own, dead, other] = [0, 1, 2].map(|host: usize| nodes.leases[host].network());
    let pod = nodes.cluster.pod(0, &nodes.leases[0]);
    let told = |nodes: &Nodes, subnet: Ipv4Addr| {
        let status = Status::try_of(&nodes.dir(0));
        let rows = status.map(|status| status.0["routes"].clone()).unwrap_or_default();
        let is_its = |row: &&serde_json::Value| row["subnet"] == format!("{subnet}/24");
        let row = rows.as_array().into_iter().flatten().find(is_its).cloned();
        row.and_then(|row| Some(row["state"].as_str()?.to_owned())).unwrap_or_default()
    };
    let becomes = |nodes: &Nodes, state: &str| {
        for subnet in [dead, other] {
            let what = format!("{config}: {subnet} is {state}");
            wait_until(KNOWN, &what, || told(nodes, subnet) == state);
        }
    };
    becomes(&nodes, "idle");
    let _pings = [dead, other].map(|to| {
        let asker = &nodes.cluster.hosts[0];
        asker.spawn(&["ping", "-q", "-i0.2", "-s100", &to.to_string()])
    });
    becomes(&nodes, "ok");
    let requests = echo_requests(&nodes.cluster.hosts[2], own, other, 84);
    wait_until(KNOWN, "the other node is asked", || requests.count() > 0);
    let request = requests.finish().swap_remove(0);
    nodes.daemons[1].signal(Signal::STOP);
    if config == VXLAN {
        // The kernel goes on without weftd, and says that it does not.
        let mute = "table inet wall { chain a { type filter hook output priority 0; \
                    icmp type destination-unreachable drop; }; }";
        nodes.cluster.hosts[1].exec(&["nft", mute]);
        nodes.cluster.hosts[1].exec(&["ip", "link", "del", "flannel.1"]);
    }
    wait_until(KNOWN, "the dead peer is silent", || told(&nodes, dead) == "silent");
    nodes.bypass(2, own, 0);
    let (by_anybody, by_pod) = forged(&request, dead, port);
    let node = &nodes.cluster.hosts[2];
    for (who, namespace, more) in [("a node", node, &[][..]), ("a pod", &pod, &by_pod[..])] {
        let socket = raw_socket(namespace);
        // Beyond several rounds of echoes, and until what came before is stale.
        for _ in 0..80 {
            by_anybody.iter().chain(more).for_each(|packet| send_raw(&socket, packet));
            std::thread::sleep(Duration::from_millis(200));
            let state = told(&nodes, dead);
            assert!(["", "silent"].contains(&state.as_str()), "{config}: {who}: {state}");
        }
    }
    nodes.daemons[1].signal(Signal::CONT);
    if config == UDP {
        wait_until(KNOWN, "it is well again", || told(&nodes, dead) == "ok");
    }
}

/// What may be sent in the name of host 1, whose subnet is `dead`, to the one that sent this
/// request; the last ones need its host's own address.
fn forged(request: &[u8], dead: Ipv4Addr, port: u16) -> (Vec<Vec<u8>>, [Vec<u8>; 2]) {
    let own = Ipv4Addr::from_bits(u32::from_be_bytes([12, 13, 14, 15].map(|at| request[at])));
    let [asking, dying, third] = [0, 1, 2].map(host_address);
    let datagram = udp_packet((asking, port), (dying, port), &[0; 8]);
    let refusal = |by| {
        let mut message = [&[3, 3, 0, 0, 0, 0, 0, 0], &datagram[..28]].concat();
        let sum = checksum::finish(checksum::sum(&message));
        message[2..4].copy_from_slice(&sum);
        ipv4(by, asking, 1, &message)
    };
    let mut by_anybody: Vec<_> =
        (0..200).map(|number| echo_reply(request, dead, number, 84)).collect();
    let its_pod = Ipv4Addr::from_bits(dead.to_bits() + 7);
    by_anybody.push(udp_packet((its_pod, 9), (own, 9), &[0; 8]));
    by_anybody.push(refusal(third));
    (by_anybody, [refusal(dying), udp_packet((dying, port), (asking, port), &[8; 60])])
}
