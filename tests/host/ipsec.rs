//! IPsec between two hosts, each with a charon of its own that encrypts by itself
//! (kernel-libipsec), as this suite's kernel may have no ESP.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::flows::Flows;
use crate::support::lab::{Lab, Process, SubnetEnv, UNDERLAY, WEFTD, comes_true, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

/// The exchange of keys takes a tenth of a second of an idle processor on each side.
const SOON: Duration = Duration::from_secs(60);

/// Runs what follows the first argument with that directory as its `/run`: charon's socket has one
/// name everywhere.
pub(crate) const WITH_OWN_RUN: &str = "mount --bind \"$1\" /run && shift && exec \"$@\"";

/// charon's settings, with these plugins for ESP.
pub(crate) fn strongswan(esp: &str) -> String {
    let always = "nonce aes sha1 sha2 hmac kdf gmp openssl gcm socket-default vici";
    format!("charon {{\n  load = {esp} {always}\n}}\n")
}

fn psk(letter: char) -> String {
    letter.to_string().repeat(8) + &"s3cret-of-the-test".repeat(5)
}

fn config(letter: char) -> String {
    let psk = psk(letter);
    format!(
        r#"{{"Network":"10.5.0.0/16",
            "Backend":{{"Type":"ipsec","UDPEncap":true,"PSK":"{psk}"}}}}"#
    )
}

/// Two hosts, each with a `/run` of its own: charon's socket has one name everywhere.
struct Site {
    daemons: Vec<Process>,
    leases: Vec<SubnetEnv>,
    lab: Lab,
    dir: TempDir,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory for the test");
        local_store(dir.path(), &config('a'));
        let strongswan = strongswan("kernel-libipsec kernel-netlink");
        fs::write(dir.path().join("strongswan.conf"), strongswan).expect("a file of the test");
        for host in 0..2 {
            fs::create_dir_all(dir.path().join(format!("run{host}"))).expect("a directory");
        }
        Self { daemons: Vec::new(), leases: Vec::new(), lab: Lab::two_hosts(), dir }
    }

    /// Starts the daemons of hosts without pods.
    fn begin(&mut self) {
        self.daemons = vec![self.weftd(0), self.weftd(1)];
        for host in 0..2 {
            let file = self.home(host).join("subnet.env");
            self.leases.push(SubnetEnv::wait(&file, &mut self.daemons[host]));
        }
    }

    fn restart(&mut self, host: usize) {
        self.daemons[host].stop(Signal::TERM, SOON);
        self.daemons[host] = self.weftd(host);
    }

    fn start() -> Self {
        let mut site = Self::new();
        site.begin();
        site.lab.connect_pods([&site.leases[0], &site.leases[1]]);
        site.wait_for_pings("at the start");
        site
    }

    fn home(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("h{host}"))
    }

    /// `argv` as it is run on a host.
    fn on_host(&self, host: usize, argv: &[&str]) -> Vec<String> {
        let run = self.dir.path().join(format!("run{host}")).display().to_string();
        let strongswan = self.dir.path().join("strongswan.conf");
        let strongswan = format!("STRONGSWAN_CONF={}", strongswan.display());
        let before = ["env", &strongswan, "sh", "-c", WITH_OWN_RUN, "sh", &run];
        before.into_iter().chain(argv.iter().copied()).map(str::to_owned).collect()
    }

    fn spawn(&self, host: usize, argv: &[&str]) -> Process {
        let argv = self.on_host(host, argv);
        self.lab.hosts[host].spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn weftd(&self, host: usize) -> Process {
        let home = self.home(host);
        let store = format!("--local-store={}", self.dir.path().join("store").display());
        let subnet_file = format!("--subnet-file={}", home.join("subnet.env").display());
        let socket = format!("--status-socket={}", home.join("weft.sock").display());
        let iface = format!("--iface={}", UNDERLAY[host]);
        let rules = "--iptables-forward-rules=false";
        self.spawn(host, &[WEFTD, &iface, &subnet_file, &socket, rules, &store])
    }

    /// The process with this name in its command line on a host.
    fn process(&self, host: usize, name: &str) -> Option<Pid> {
        let ids = self.lab.hosts[host].exec(&["ip", "netns", "pids", self.lab.hosts[host].name()]);
        ids.lines().find_map(|id| {
            let line = fs::read(format!("/proc/{id}/cmdline")).ok()?;
            let first = line.split(|byte| *byte == 0).next()?;
            first.ends_with(name.as_bytes()).then(|| Pid::from_raw(id.parse().ok()?)).flatten()
        })
    }

    fn charon(&self, host: usize) -> Option<Pid> {
        self.process(host, "/charon")
    }

    /// What a charon lists.
    fn charon_says(&self, host: usize, command: &str) -> String {
        let argv = self.on_host(host, &["swanctl", command]);
        self.lab.hosts[host].exec(&argv.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn pod(&self, host: usize) -> Ipv4Addr {
        self.leases[host].pod_address()
    }

    #[track_caller]
    fn wait_for_pings(&self, after: &str) {
        wait_until(SOON, &format!("pods reach each other {after}"), || {
            self.lab.ping(0, self.pod(1), 56) && self.lab.ping(1, self.pod(0), 56)
        });
    }

    fn peer(&self, host: usize) -> serde_json::Value {
        Status::of(&self.home(host)).0["routes"][0].clone()
    }

    /// All that the daemons have written, and what others can see of them.
    fn told(&self) -> String {
        let mut told = String::new();
        for host in 0..2 {
            told += &self.daemons[host].output();
            told += &Status::of(&self.home(host)).0.to_string();
            told += &fs::read_to_string(self.home(host).join("subnet.env")).unwrap_or_default();
            let host = &self.lab.hosts[host];
            for id in host.exec(&["ip", "netns", "pids", host.name()]).lines() {
                for file in ["cmdline", "environ"] {
                    let text = fs::read(format!("/proc/{id}/{file}")).unwrap_or_default();
                    told += &String::from_utf8_lossy(&text);
                }
            }
        }
        told
    }
}

/// Bytes of all packets on the wire while `work` runs.
fn wire_during(lab: &Lab, dir: &Path, work: impl FnOnce()) -> Vec<u8> {
    let file = dir.join("wire.pcap");
    let name = file.display().to_string();
    let argv =
        ["tcpdump", "--immediate-mode", "-Z", "root", "-U", "-n", "-i", "wire0", "-w", &name];
    let mut dump = lab.hosts[0].spawn(&argv);
    wait_until(SOON, "tcpdump listens", || file.metadata().is_ok_and(|it| it.len() >= 24));
    work();
    dump.stop(Signal::INT, SOON);
    fs::read(file).expect("tcpdump has written it")
}

#[test]
fn pods_talk_and_the_wire_shows_udp_4500_and_nothing_of_it() {
    let site = Site::start();
    let (lab, to) = (&site.lab, site.pod(1));
    // charon's device takes no more than this, and 1,415 by the link.
    let longest = site.leases[0].mtu_bytes - 28;
    assert_eq!(longest, 1372, "of the payload of a ping");
    let (size, target) = (longest.to_string(), to.to_string());
    lab.pods[0].exec(&["ping", "-q", "-c1", "-W5", "-Mdo", "-s", &size, &target]);
    let wire = wire_during(lab, site.dir.path(), || {
        let to = to.to_string();
        let argv = ["ping", "-q", "-c5", "-i0.02", "-W2", "-p", "4d41524b4552", "-s1000", &to];
        lab.pods[0].exec(&argv);
    });
    let has = |what: &[u8]| wire.windows(what.len()).any(|window| window == what);
    assert!(wire.len() > 5 * 2 * 1000, "nothing was captured");
    assert!(!has(b"MARKER"), "the wire shows what pods send");
    let ports = [4500_u16.to_be_bytes(), 4500_u16.to_be_bytes()].concat();
    assert!(has(&ports), "no UDP between the ports 4500");
    tcp_transfer(&lab.pods[0], &lab.pods[1], to, 4 << 20, true);
    tcp_transfer(&lab.pods[1], &lab.pods[0], site.pod(0), 4 << 20, true);
    for host in 0..2 {
        wait_until(SOON, "the status tells of keys and bytes", || {
            let peer = site.peer(host);
            let ipsec = &peer["ipsec"];
            peer["state"] == "set-up"
                && ipsec["established_unix"].is_u64()
                && ipsec["installed_unix"].is_u64()
                && ipsec["sent_bytes"].as_u64() > Some(1 << 20)
                && ipsec["received_bytes"].as_u64() > Some(1 << 20)
        });
    }
    assert!(!site.told().contains("s3cret"), "somebody tells the PSK");
}

#[test]
fn connections_outlive_a_restart_of_weftd() {
    let mut site = Site::start();
    let charon = site.charon(1).expect("charon runs");
    let flows = Flows::open(&site.lab.pods[0], &site.lab.pods[1], site.pod(1), 10);
    let stop = AtomicBool::new(false);
    let to = site.pod(1).to_string();
    let report = thread::scope(|scope| {
        let talk = scope.spawn(|| flows.talk(&stop));
        // A hundred pings a second, none of which may be lost.
        let mut pings = site.lab.pods[0].spawn(&["ping", "-q", "-i0.01", "-W5", &to]);
        site.daemons[1].stop(Signal::TERM, SOON);
        thread::sleep(Duration::from_millis(500));
        site.daemons[1] = site.weftd(1);
        wait_until(SOON, "weftd knows its peer again", || {
            site.peer(1)["ipsec"]["installed_unix"].is_u64()
        });
        thread::sleep(Duration::from_millis(500));
        pings.stop(Signal::INT, SOON);
        let text = pings.output();
        assert!(text.contains(" 0% packet loss"), "a restart loses packets: {text}");
        stop.store(true, Ordering::Relaxed);
        talk.join().unwrap()
    });
    assert_eq!(report.open, 10, "{report}");
    assert_eq!(site.charon(1), Some(charon), "charon was restarted with weftd");
}

#[test]
fn a_killed_charon_is_started_again_with_all_connections() {
    let site = Site::start();
    let before = site.charon(1).expect("charon runs");
    kill_process(before, Signal::KILL).unwrap();
    wait_until(SOON, "charon is started again", || site.charon(1).is_some_and(|now| now != before));
    site.wait_for_pings("after charon was killed");
    // Nothing goes out in plain meanwhile: the route to everywhere else is not taken.
    let routes = site.lab.hosts[1].exec(&["ip", "route", "show", "type", "blackhole"]);
    assert!(routes.contains("10.5.0.0/16"), "{routes}");
}

#[test]
fn a_charon_that_hangs_is_told_and_goes_on() {
    let site = Site::start();
    let wrong = || {
        let status = Status::try_of(&site.home(1)).expect("weftd answers while charon hangs");
        status.0["dataplane_wrong"].as_str().unwrap_or_default().to_owned()
    };
    let charon = site.charon(1).expect("charon runs");
    kill_process(charon, Signal::STOP).unwrap();
    wait_until(SOON, "the status says that charon gives no answer", || wrong().contains("charon"));
    // What nobody can tell is not told.
    wait_until(SOON, "weftd knows nothing of its peers' keys, and says so", || {
        let peer = Status::try_of(&site.home(1)).map(|it| it.0["routes"][0].clone());
        peer.is_some_and(|peer| {
            peer["state"] == "set-up" && peer["why"].to_string().contains("not known")
        })
    });
    kill_process(charon, Signal::CONT).unwrap();
    wait_until(SOON, "the status has nothing wrong any more", || wrong().is_empty());
    site.wait_for_pings("after charon goes on");
    assert_eq!(site.charon(1), Some(charon), "it was started again");
}

#[test]
fn what_keeps_packets_from_charon_is_told_by_its_cause() {
    let mut site = Site::new();
    site.begin();
    let is_set_up = |site: &Site, wanted: bool| {
        let peer = Status::try_of(&site.home(0)).map(|it| it.0["routes"][0].clone());
        peer.is_some_and(|it| {
            let state = it["state"].as_str().unwrap_or_default();
            (state == "set-up") == wanted && it["why"].is_string() != wanted
        })
    };
    wait_until(SOON, "both charons know each other, and hosts without pods lack something", || {
        site.charon_says(0, "--list-sas").contains("ESTABLISHED") && is_set_up(&site, false)
    });
    site.lab.connect_pods([&site.leases[0], &site.leases[1]]);
    site.wait_for_pings("once there are pods");
    // As a second charon on the host leaves it behind.
    site.lab.hosts[0].exec(&["ip", "rule", "del", "pref", "220"]);
    wait_until(SOON, "weftd says that packets do not reach charon", || is_set_up(&site, false));
    let status = Status::try_of(&site.home(0)).expect("weftd runs").0;
    let counts = [&status["backend"]["peers_failed"], &status["backend"]["leases_unusable"]];
    assert_eq!(counts.map(|it| it.as_u64()), [Some(1), Some(0)], "of one peer: {status}");
    kill_process(site.charon(0).expect("charon runs"), Signal::KILL).unwrap();
    site.wait_for_pings("after charon was started anew, as weftd advises");
    wait_until(SOON, "nothing is wrong any more", || is_set_up(&site, true));
}

#[test]
fn a_restart_of_weftd_mends_what_became_of_its_charon() {
    let mut site = Site::start();
    let keeper = site.process(1, "weft-charon").expect("weftd has made it");
    kill_process(keeper, Signal::KILL).unwrap();
    kill_process(site.charon(1).expect("charon runs"), Signal::KILL).unwrap();
    // The number of the killed one is another process's by now.
    let number = std::process::id().to_string();
    fs::write(site.dir.path().join("run1/charon.pid"), number).unwrap();
    wait_until(SOON, "the status says what is to be done", || {
        let status = Status::try_of(&site.home(1));
        status.is_some_and(|it| it.0["dataplane_wrong"].is_string())
    });
    site.restart(1);
    site.wait_for_pings("after a restart of weftd whose charon was gone");
    let charon = site.charon(1).expect("charon runs");
    site.daemons[1].stop(Signal::TERM, SOON);
    fs::remove_file(site.dir.path().join("run1/charon.vici")).expect("charon has its socket");
    site.daemons[1] = site.weftd(1);
    wait_until(SOON, "weftd starts another charon than the one that nobody can talk to", || {
        site.charon(1).is_some_and(|now| now != charon)
    });
    site.wait_for_pings("after charon had lost its socket");
}

#[test]
fn another_psk_is_told_and_the_same_one_heals_it() {
    let mut site = Site::start();
    // As after a change of the configuration that only one node has seen.
    site.daemons[1].stop(Signal::TERM, SOON);
    site.clean(1);
    site.configure(&config('b'));
    site.daemons[1] = site.weftd(1);
    wait_until(SOON, "weftd says that it has no keys with its peer", || {
        let peer = Status::try_of(&site.home(1)).map(|it| it.0["routes"][0].clone());
        peer.is_some_and(|peer| {
            peer["state"] == "not-set-up" && peer["why"].to_string().contains("PSK")
        })
    });
    assert!(!site.lab.pods[0].succeeds(&["ping", "-c1", "-W1", &site.pod(1).to_string()]));
    site.daemons[0].stop(Signal::TERM, SOON);
    site.daemons[0] = site.weftd(0);
    site.wait_for_pings("after both have the same PSK");
    assert!(!site.told().contains("s3cret"), "somebody tells the PSK");
}

impl Site {
    /// Another configuration of the network, for daemons to come.
    fn configure(&self, config: &str) {
        local_store(self.dir.path(), config);
    }

    /// Runs `weft cleanup` on a host.
    fn clean(&self, host: usize) {
        let weft = Path::new(WEFTD).with_file_name("weft").display().to_string();
        let subnet_file = format!("--subnet-file={}", self.home(host).join("subnet.env").display());
        let argv = self.on_host(host, &[&weft, "cleanup", &subnet_file]);
        let argv: Vec<_> = argv.iter().map(String::as_str).collect();
        let done = self.lab.hosts[host].exec(&argv);
        assert!(self.charon(host).is_none(), "charon goes on: {done}");
        assert!(comes_true(SOON, || self.process(host, "weft-charon").is_none()), "{done}");
    }
}

#[test]
fn a_peer_comes_and_goes_under_traffic_of_others() {
    let site = Site::start();
    let stop = AtomicBool::new(false);
    let flows = Flows::open(&site.lab.pods[0], &site.lab.pods[1], site.pod(1), 5);
    let subnets = site.dir.path().join("store/subnets");
    let lease = subnets.join("10.5.200.0-24");
    let connections = |host| site.charon_says(host, "--list-conns");
    let report = thread::scope(|scope| {
        let talk = scope.spawn(|| flows.talk(&stop));
        let value = r#"{"PublicIP":"172.20.0.9","PublicIPv6":null,"BackendType":"ipsec"}"#;
        fs::write(&lease, value).unwrap();
        wait_until(SOON, "charon has a connection for the new peer", || {
            connections(0).contains("10.5.200.0/24")
        });
        fs::remove_file(&lease).unwrap();
        wait_until(SOON, "charon has none for the peer that is gone", || {
            !connections(0).contains("10.5.200.0/24")
        });
        assert!(connections(0).contains(&site.leases[1].network().to_string()));
        stop.store(true, Ordering::Relaxed);
        talk.join().unwrap()
    });
    assert_eq!(report.open, 5, "{report}");
}

/// The kernel's policies without its ESP, which this suite's kernel may lack: what keeps packets
/// from leaving unencrypted is there before any keys are.
#[test]
fn policies_are_as_the_leases_want_and_go_with_another_backend() {
    let mut site = Site::new();
    fs::write(site.dir.path().join("strongswan.conf"), strongswan("kernel-netlink")).unwrap();
    let lease = site.dir.path().join("store/subnets/10.5.200.0-24");
    let value = r#"{"PublicIP":"172.20.0.2","PublicIPv6":null,"BackendType":"ipsec"}"#;
    fs::write(&lease, value).unwrap();
    let foreign = "src 10.9.0.0/24 dst 10.5.200.0/24";
    let policy = |words: &str| {
        let words: Vec<_> = ["ip", "xfrm", "policy"].into_iter().chain(words.split(' ')).collect();
        site.lab.hosts[0].exec(&words)
    };
    let template = "tmpl src 172.20.0.1 dst 172.20.0.2 proto esp reqid 42 mode tunnel";
    policy(&format!("add {foreign} dir out {template}"));
    let ours = || policies(&site, foreign);
    let mut daemon = site.weftd(0);
    wait_until(SOON, "there are three policies for the peer", || ours() == 3);
    assert!(site.process(0, "weft-charon").is_some(), "{}", daemon.output());
    let own = SubnetEnv::wait(&site.home(0).join("subnet.env"), &mut daemon);
    assert_eq!(own.mtu_bytes, 1500 - 85);
    let network = own.network();
    let all = policy("list");
    assert!(all.contains(&format!("src {network}/24 dst 10.5.200.0/24")), "{all}");
    policy(&format!("delete src {network}/24 dst 10.5.200.0/24 dir out"));
    wait_until(SOON, "a policy that somebody has removed is set again", || ours() == 3);
    wait_until(SOON, "the status says that there are no keys", || {
        let peer = Status::try_of(&site.home(0)).map(|it| it.0["routes"][0].clone());
        peer.is_some_and(|peer| peer["state"] == "not-set-up" && peer["why"].is_string())
    });
    fs::remove_file(&lease).unwrap();
    wait_until(SOON, "there are none for a peer that is gone", || ours() == 0);
    fs::write(&lease, value).unwrap();
    wait_until(SOON, "there are three again", || ours() == 3);
    daemon.stop(Signal::TERM, SOON);
    assert_eq!(ours(), 3, "they go with weftd");
    site.configure(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#);
    site.daemons = vec![site.weftd(0)];
    wait_until(SOON, "what ipsec has left goes with another backend", || {
        policies(&site, foreign) == 0 && site.charon(0).is_none()
    });
}

/// How many of flannel's kind there are on the first host, beside a foreign one.
fn policies(site: &Site, foreign: &str) -> usize {
    let all = site.lab.hosts[0].exec(&["ip", "xfrm", "policy", "list"]);
    assert!(all.contains(foreign), "another's policy was removed: {all}");
    all.matches("reqid 11 mode tunnel").count()
}

#[test]
fn a_host_without_charon_and_connections_that_it_refuses_are_told() {
    let site = Site::new();
    // One that shadows all places where it could be.
    let argv =
        [WEFTD, "--iface=172.20.0.1", "--subnet-file=/run/s/env", "--status-socket=/run/s/s"];
    let store = format!("--local-store={}", site.dir.path().join("store").display());
    let hide = "mount -t tmpfs none /usr/lib/ipsec && exec \"$@\"";
    let all: Vec<_> = ["sh", "-c", hide, "sh"].into_iter().chain(argv).chain([&*store]).collect();
    let mut daemon = site.spawn(0, &all);
    assert_eq!(daemon.wait(SOON).code(), Some(1), "{}", daemon.output());
    assert_eq!(daemon.complaints("strongswan-charon"), 1, "{}", daemon.output());
    let subnets = fs::read_dir(site.dir.path().join("store/subnets")).unwrap().count();
    assert_eq!(subnets, 0, "a node that can't carry anything has leased a subnet");

    let config = config('a').replace("\"UDPEncap\"", "\"ESPProposal\":\"rot13\",\"UDPEncap\"");
    site.configure(&config);
    let lease = site.dir.path().join("store/subnets/10.5.200.0-24");
    let value = r#"{"PublicIP":"172.20.0.2","PublicIPv6":null,"BackendType":"ipsec"}"#;
    fs::write(&lease, value).unwrap();
    let daemon = site.weftd(0);
    wait_until(SOON, "the status has charon's words for what it refuses", || {
        let peer = Status::try_of(&site.home(0)).map(|it| it.0["routes"][0].clone());
        peer.is_some_and(|peer| {
            peer["state"] == "not-set-up" && peer["why"].to_string().contains("esp_proposals")
        })
    });
    assert!(daemon.complaints("esp_proposals") > 0, "{}", daemon.output());
}
