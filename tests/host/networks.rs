//! Two networks of the same two hosts, a daemon for each on each host: what they share, and what
//! they refuse to share.
#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::lab::{Lab, Process, SubnetEnv, wait_until};
use crate::support::overlay::local_store;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

const SOON: Duration = Duration::from_secs(20);

/// A network, by its name, which its files have.
struct Network {
    name: &'static str,
    config: &'static str,
    flags: &'static [&'static str],
    /// Through which its packets go.
    device: &'static str,
}

struct Hosts {
    /// By network, then by host.
    daemons: Vec<[Process; 2]>,
    lab: Lab,
    leases: Vec<[SubnetEnv; 2]>,
    files: TempDir,
}

impl Hosts {
    /// With a daemon of each network on both, one network after the other.
    #[track_caller]
    fn start(networks: &[&Network]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let (daemons, leases) = (Vec::new(), Vec::new());
        let mut hosts = Self { daemons, lab: Lab::two_hosts(), leases, files };
        for network in networks {
            local_store(&hosts.files.path().join(network.name), network.config);
            let mut daemons = [0, 1].map(|host| hosts.weftd(host, network));
            let leases = [0, 1].map(|host: usize| {
                SubnetEnv::wait(&hosts.dir(host, network).join("subnet.env"), &mut daemons[host])
            });
            for (host, lease) in leases.iter().enumerate() {
                let bridge = format!("br-{}", network.name);
                let host = &hosts.lab.hosts[host];
                host.exec(&["ip", "link", "add", &bridge, "up", "type", "bridge"]);
                host.address(&bridge, &lease.subnet);
            }
            hosts.daemons.push(daemons);
            hosts.leases.push(leases);
            for host in 0..2 {
                hosts.wait_until_ready(host, network);
            }
        }
        hosts
    }

    fn dir(&self, host: usize, network: &Network) -> PathBuf {
        self.files.path().join(format!("{}-h{host}", network.name))
    }

    fn weftd(&self, host: usize, network: &Network) -> Process {
        let store = self.files.path().join(network.name).join("store");
        let store = format!("--local-store={}", store.display());
        let all = [&[store.as_str()], network.flags].concat();
        self.lab.weftd(host, &self.dir(host, network), &all)
    }

    #[track_caller]
    fn wait_until_ready(&self, host: usize, network: &Network) {
        let dir = self.dir(host, network);
        wait_until(SOON, "a daemon is ready, with its peer", || {
            Status::try_of(&dir)
                .is_some_and(|status| status.0["ready"] == true && status.routes() == 1)
        });
    }

    fn pings(&self, device: &str, network: usize) -> bool {
        let far = self.leases[network][1].gateway().to_string();
        let argv = ["ping", "-q", "-c1", "-W1", "-I", device, &far];
        self.lab.hosts[0].succeeds(&argv)
    }

    /// Each network's packets go by its own device, and by no other.
    #[track_caller]
    fn assert_apart(&self, networks: &[&Network]) {
        for (number, network) in networks.iter().enumerate() {
            let what = format!("{} carries packets", network.name);
            wait_until(SOON, &what, || self.pings(network.device, number));
            let [near, far] = &self.lab.hosts;
            tcp_transfer(near, far, self.leases[number][1].gateway(), 1 << 20, true);
            let others = networks.iter().filter(|other| other.name != network.name);
            // The other host answers for all its addresses on the link itself.
            for device in others.map(|other| other.device).filter(|it| *it != "wire0") {
                assert!(!self.pings(device, number), "{device} carries to {}", network.name);
            }
        }
    }

    /// How a daemon ends that can't start on the first host, and what it says.
    #[track_caller]
    fn refused(&self, network: &Network) -> String {
        local_store(&self.files.path().join(network.name), network.config);
        let mut daemon = self.weftd(0, network);
        assert_eq!(daemon.wait(SOON).code(), Some(1), "{}", daemon.output());
        daemon.output()
    }
}

const BLUE: Network = Network {
    name: "blue",
    config: r#"{"Network":"10.50.0.0/16","Backend":{"Type":"udp"}}"#,
    flags: &["--fast-path=on", "--keep-tunnel=true", "--ip-masq=true", "--iptables-resync=3600"],
    device: "flannel0",
};

const GREEN: Network = Network {
    name: "green",
    config: r#"{"Network":"10.60.0.0/16","Backend":{"Type":"udp","Port":8385}}"#,
    flags: &["--fast-path=on", "--keep-tunnel=true", "--ip-masq=true", "--iptables-resync=3600"],
    device: "flannel1",
};

const RED: Network = Network {
    name: "red",
    config: r#"{"Network":"10.70.0.0/16","Backend":{"Type":"vxlan"}}"#,
    flags: &[],
    device: "flannel.1",
};

#[test]
fn two_networks_of_udp_have_ports_devices_programs_and_rules_of_their_own() {
    let networks = [&BLUE, &GREEN];
    let mut hosts = Hosts::start(&networks);
    hosts.assert_apart(&networks);
    let carried = |hosts: &Hosts, network: &Network| {
        Status::of(&hosts.dir(0, network)).0["routes"][0]["fast_path"]["packets_sent"].as_u64()
    };
    for (number, network) in networks.into_iter().enumerate() {
        let what = format!("the kernel carries the packets of {}", network.name);
        // It does once it knows its neighbour.
        wait_until(SOON, &what, || {
            hosts.pings(network.device, number) && carried(&hosts, network) > Some(0)
        });
        // No check of the rules is due: a start leaves those of the other network alone.
        let status = Status::of(&hosts.dir(0, network)).0;
        assert_eq!(status["rules"]["repairs"], 0, "{}: {}", network.name, status["rules"]);
    }
    let rules = hosts.lab.hosts[0].exec(&["iptables", "-t", "nat", "-S", "FLANNEL-POSTRTG"]);
    for network in ["10.50.0.0/16", "10.60.0.0/16"] {
        let is_there = rules.lines().any(|it| it.contains(network) && it.contains("MASQUERADE"));
        assert!(is_there, "pods of {network} reach nobody outside: {rules}");
    }
    // The end of one takes nothing from the other, nor does its return.
    let before = carried(&hosts, &BLUE);
    hosts.daemons[1][0].stop(Signal::TERM, SOON);
    wait_until(SOON, "the other network goes on, by the kernel's programs", || {
        hosts.pings(BLUE.device, 0) && carried(&hosts, &BLUE) > before
    });
    hosts.daemons[1][0] = hosts.weftd(0, &GREEN);
    hosts.wait_until_ready(0, &GREEN);
    hosts.assert_apart(&networks);
}

#[test]
fn a_network_that_changes_its_backend_leaves_the_other_networks_device() {
    let networks = [&RED, &GREEN];
    let green = Network { device: "flannel0", ..GREEN };
    let mut hosts = Hosts::start(&networks);
    hosts.assert_apart(&[&RED, &green]);
    let routed = GREEN.config.replace("udp", "host-gw");
    let store = hosts.files.path().join(GREEN.name).join("store/config");
    std::fs::write(store, routed).unwrap();
    for host in 0..2 {
        hosts.daemons[1][host].stop(Signal::TERM, SOON);
        let changed = Network { flags: &[], ..GREEN };
        hosts.daemons[1][host] = hosts.weftd(host, &changed);
    }
    for host in 0..2 {
        hosts.wait_until_ready(host, &GREEN);
    }
    hosts.assert_apart(&[&RED, &Network { device: "wire0", ..GREEN }]);
}

const WHITE: Network = Network {
    name: "white",
    config: r#"{"Network":"10.90.0.0/16","Backend":{"Type":"wireguard"}}"#,
    flags: &["--wireguard=userspace"],
    device: "flannel-wg",
};

#[test]
fn what_two_networks_cannot_share_is_refused_by_name() {
    let hosts = Hosts::start(&[&BLUE, &RED, &WHITE]);
    let other = |name, config| Network { name, config, flags: &[], device: "" };
    let port = r#"{"Network":"10.80.0.0/16","Backend":{"Type":"udp"}}"#;
    let vni = r#"{"Network":"10.80.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let key = r#"{"Network":"10.80.0.0/16","Backend":{"Type":"wireguard","ListenPort":51900}}"#;
    for (name, config, named) in [
        ("port", port, ["8285", "Port"]),
        ("vni", vni, ["flannel.1", "VNI"]),
        ("key", key, ["flannel-wg", "another network"]),
    ] {
        let said = hosts.refused(&other(name, config));
        for word in named {
            assert!(said.contains(word), "{name}: {word} is not named: {said}");
        }
        let leases = hosts.files.path().join(name).join("store/subnets");
        assert_eq!(std::fs::read_dir(leases).unwrap().count(), 0, "{name} has leased a subnet");
    }
    // What is the other's stays as it was.
    let text = hosts.lab.hosts[0].exec(&["ip", "-j", "-4", "address", "show", "dev", "flannel.1"]);
    let address: Value = serde_json::from_str(&text).unwrap();
    let own = hosts.leases[1][0].network().to_string();
    assert_eq!(address[0]["addr_info"][0]["local"], own.as_str(), "{text}");
    hosts.assert_apart(&[&BLUE, &RED, &WHITE]);
}

#[test]
fn weft_names_the_sockets_of_other_networks() {
    let files = tempfile::tempdir().unwrap();
    for name in ["blue.weft.sock", "green.weft.sock"] {
        std::os::unix::net::UnixListener::bind(files.path().join(name)).unwrap();
    }
    let socket = files.path().join("weft.sock");
    let mut weft = std::process::Command::new(env!("CARGO_BIN_EXE_weft"));
    let output = weft.arg("status").arg("--socket").arg(&socket).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("/blue.weft.sock, ") && said.contains("/green.weft.sock"), "{said}");
}
