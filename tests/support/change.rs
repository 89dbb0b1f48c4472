//! Two hosts whose network changes from one backend to another, and a look at all of a host that a
//! backend may leave something in.
#![allow(clippy::print_stdout, reason = "measured times belong into the report of the run")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::lab::{Lab, Namespace, Process, SubnetEnv, UNDERLAY, comes_true, wait_until};
use super::overlay::{local_store, reserve};
use super::status::Status;
use super::traffic::tcp_transfer;

/// A daemon starts and ends, and what it repairs is repaired, within this time on a busy or an
/// emulated machine.
const SOON: Duration = Duration::from_secs(60);

/// What both hosts have in all tests, so that what their tables hold can be compared.
const SUBNETS: [&str; 2] = ["10.5.201.0", "10.5.202.0"];

/// Rules and the guard are kept as well: they must follow the backend.
const FLAGS: [&str; 2] = ["--ip-masq=true", "--guard=true"];

/// A way for the network's packets, and how it shows that it carries them.
#[derive(Debug)]
pub(crate) struct Kind {
    /// What the tables of the documents call it.
    pub(crate) name: &'static str,
    /// `Backend` of the network configuration.
    pub(crate) config: &'static str,
    /// Flags that it takes.
    pub(crate) flags: &'static [&'static str],
    /// What its leases name.
    pub(crate) leased_as: &'static str,
    /// What carries packets.
    pub(crate) by: By,
}

/// What carries packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// This device.
    Device(&'static str),
    /// The kernel's programs, which count for themselves.
    Programs,
    /// Routes over the interface.
    Routes,
    /// The commands of an operator, who undoes what they did.
    Commands,
    /// Nothing.
    Nobody,
}

/// What passes between hosts of two kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
pub(crate) enum Beside {
    /// As between hosts of one.
    #[display("all")]
    All,
    /// Their leases look the same, and one of them carries nothing.
    #[display("nothing")]
    Nothing,
    /// Each says that the other has another backend.
    #[display("nothing, told")]
    OtherBackend,
}

impl Kind {
    /// What passes between a host of this kind and an `other` one.
    pub(crate) fn beside(&self, other: &Self) -> Beside {
        if self.leased_as != other.leased_as {
            Beside::OtherBackend
        } else if [self.by, other.by].contains(&By::Nobody) {
            Beside::Nothing
        } else {
            Beside::All
        }
    }

    fn network(&self) -> String {
        format!(r#"{{"Network":"10.5.0.0/16","Backend":{}}}"#, self.config)
    }
}

/// Begins and ends with the first of `count`, and goes from each to each other once.
pub(crate) fn round_trip(count: usize) -> Vec<usize> {
    let pairs = |low: usize| (low + 1..count).flat_map(move |high| [low, high]);
    (0..count).flat_map(pairs).chain([0]).collect()
}

/// All that a host has of a backend, a line each; what differs from run to run is left out.
type Found = BTreeSet<String>;

/// Two hosts with a pod each.
pub(crate) struct Site {
    daemons: Vec<Process>,
    pub(crate) lab: Lab,
    leases: Vec<SubnetEnv>,
    files: TempDir,
}

impl Site {
    /// Whose packets `kind` carries.
    #[track_caller]
    pub(crate) fn start(kind: &Kind) -> Self {
        let files = tempfile::tempdir().unwrap();
        local_store(files.path(), &kind.network());
        for (subnet, address) in SUBNETS.into_iter().zip(UNDERLAY) {
            reserve(files.path(), &format!("{subnet}-24"), address);
        }
        let lab = Lab::two_hosts();
        let mut site = Self { daemons: Vec::new(), lab, leases: Vec::new(), files };
        site.daemons = [0, 1].map(|host| site.weftd(host, kind)).into();
        (0..2).for_each(|host| site.wait_until_ready(host, kind));
        site.connect_pods();
        site
    }

    fn weftd(&self, host: usize, kind: &Kind) -> Process {
        let store = format!("--local-store={}", self.files.path().join("store").display());
        let all = [&[store.as_str()], &FLAGS[..], kind.flags].concat();
        self.lab.weftd(host, &self.dir(host), &all)
    }

    /// A host's directory.
    pub(crate) fn dir(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("h{host}"))
    }

    /// The daemon of a host.
    pub(crate) fn daemon(&self, host: usize) -> &Process {
        &self.daemons[host]
    }

    #[track_caller]
    fn wait_until_ready(&mut self, host: usize, kind: &Kind) {
        let config: Value = serde_json::from_str(kind.config).unwrap();
        let (dir, daemon) = (self.dir(host), &mut self.daemons[host]);
        wait_until(SOON, &format!("host {host} is ready with {}", kind.name), || {
            assert!(daemon.ended().is_none(), "weftd has ended:\n{}", daemon.output());
            Status::try_of(&dir).is_some_and(|status| {
                status.0["ready"] == true && status.0["backend"]["kind"] == config["Type"]
            })
        });
    }

    fn connect_pods(&mut self) {
        let lease = |host: usize| SubnetEnv::read(&self.dir(host).join("subnet.env")).unwrap();
        self.leases = vec![lease(0), lease(1)];
        self.lab.connect_pods([&self.leases[0], &self.leases[1]]);
    }

    /// Writes another backend into the network's configuration, as the administrator does.
    pub(crate) fn configure(&self, kind: &Kind) {
        let hidden = self.files.path().join("next");
        std::fs::write(&hidden, kind.network()).unwrap();
        std::fs::rename(hidden, self.files.path().join("store/config")).unwrap();
    }

    /// Restarts a host's daemon, as its service manager does.
    #[track_caller]
    pub(crate) fn restart(&mut self, host: usize, from: &Kind, to: &Kind) {
        self.daemons[host].stop(Signal::TERM, SOON);
        if from.by == By::Commands {
            // Nobody else knows what the operator's commands did.
            let other = format!("{}/24", SUBNETS[1 - host]);
            self.lab.hosts[host].succeeds(&["ip", "route", "delete", &other]);
        }
        self.daemons[host] = self.weftd(host, to);
        self.wait_until_ready(host, to);
    }

    fn pod(&self, host: usize) -> std::net::Ipv4Addr {
        self.leases[host].pod_address()
    }

    fn pings(&self) -> bool {
        let argv = ["ping", "-q", "-c1", "-W0.3", &self.pod(1).to_string()];
        self.lab.pods[0].succeeds(&argv)
    }

    /// What a host says of the other one: its state and the text to it.
    fn peer(&self, host: usize) -> (String, String) {
        let status = Status::of(&self.dir(host)).0;
        let word = |name: &str| status["routes"][0][name].as_str().unwrap_or_default().to_owned();
        (word("state"), word("why"))
    }

    /// Changes the first host, then the second one, while pods ping, and checks what each says
    /// meanwhile and what is there afterwards.
    #[track_caller]
    pub(crate) fn change(&mut self, from: &Kind, to: &Kind) {
        let pair = format!("{} -> {}", from.name, to.name);
        let pinged = self.pod(1).to_string();
        let mut running = self.lab.pods[0].spawn(&["ping", "-i0.2", &pinged]);
        self.configure(to);
        self.restart(1, from, to);
        self.look_at_both(&pair, [from, to]);
        let started = Instant::now();
        self.restart(0, from, to);
        self.look_at_pods(&pair);
        self.connect_pods();
        self.assert_carried(&pair, to);
        let took = started.elapsed();
        if to.by != By::Nobody {
            let answers = |running: &Process| running.output().matches("bytes from").count();
            let before = answers(&running);
            wait_until(SOON, &format!("{pair}: the ping that runs is answered again"), || {
                answers(&running) > before
            });
        }
        running.stop(Signal::INT, SOON);
        self.assert_nothing_left(&pair, to);
        println!("{pair}: carried {took:.1?} after the stop of the second daemon");
    }

    /// Host 0 has the first backend and host 1 the second.
    #[track_caller]
    fn look_at_both(&self, pair: &str, kinds: [&Kind; 2]) {
        match kinds[0].beside(kinds[1]) {
            Beside::All => {
                wait_until(SOON, &format!("{pair}: both go on with each other"), || self.pings());
                return;
            }
            Beside::Nothing => {
                assert!(!self.pings(), "{pair}: packets pass, and nobody is to carry them");
                return;
            }
            Beside::OtherBackend => {}
        }
        for host in 0..2 {
            let other = kinds[1 - host].leased_as;
            let what = format!("{pair}: host {host} says that the other one has {other}");
            wait_until(SOON, &what, || {
                let (state, why) = self.peer(host);
                state == "other-backend" && why.contains(other)
            });
            let log = || self.daemons[host].output();
            let words = format!("backend than {}", kinds[host].leased_as);
            let what = format!("{pair}: the log of host {host} says that a lease is not used");
            wait_until(SOON, &what, || log().contains(&words));
        }
        assert!(!self.pings(), "{pair}: packets pass between two backends, by what?");
    }

    /// Pods that were started with a larger MTU are named, in the log and by `weft check`.
    #[track_caller]
    fn look_at_pods(&self, pair: &str) {
        let now = SubnetEnv::read(&self.dir(0).join("subnet.env")).unwrap().mtu_bytes;
        let before = self.leases[0].mtu_bytes;
        if now >= before {
            return;
        }
        let words = format!("pod0 has MTU {before}, the overlay {now}");
        let what = format!("{pair}: the log says that {words}");
        wait_until(SOON, &what, || self.daemons[0].complaints(&words) == 1);
        let [socket, file] = ["weft.sock", "subnet.env"].map(|name| self.dir(0).join(name));
        let [socket, file] = [socket.to_str().unwrap(), file.to_str().unwrap()];
        let weft = env!("CARGO_BIN_EXE_weft");
        let argv = [weft, "check", "--socket", socket, "--subnet-file", file];
        let said = self.lab.hosts[0].command(&argv).output().unwrap().stdout;
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains(&words), "{pair}: weft check does not say that {words}: {said}");
    }

    /// Packets of all sizes pass both ways, and `kind` is what carries them.
    #[track_caller]
    pub(crate) fn assert_carried(&self, pair: &str, kind: &Kind) {
        if kind.by == By::Nobody {
            assert!(!self.pings(), "{pair}: packets pass, and nobody is to carry them");
            return;
        }
        wait_until(SOON, &format!("{pair}: pods reach each other"), || self.pings());
        let before = self.carried(kind);
        for (from, to) in [(0, 1), (1, 0)] {
            let most = u16::try_from(self.leases[from].mtu_bytes - 28).unwrap();
            for size in [56, most] {
                let there = self.lab.ping(from, self.pod(to), size);
                assert!(there, "{pair}: no answer to {size} bytes from pod {from}");
            }
            let [near, far] = [from, to].map(|host| &self.lab.pods[host]);
            tcp_transfer(near, far, self.pod(to), 1 << 20, false);
        }
        let what = format!("{pair}: it is {} that carries", kind.name);
        // The kernel takes them once it knows its neighbour.
        wait_until(SOON, &what, || self.pings() && self.carried(kind) > before);
    }

    /// Packets that went by the means of `kind` on the first host.
    fn carried(&self, kind: &Kind) -> u64 {
        let of_device = |name: &str| {
            let argv = ["ip", "-s", "-j", "link", "show", "dev", name];
            let text = self.lab.hosts[0].exec(&argv);
            let links: Value = serde_json::from_str(&text).unwrap();
            links[0]["stats64"]["tx"]["packets"].as_u64().unwrap()
        };
        match kind.by {
            By::Device(name) => of_device(name),
            By::Programs => {
                let routes = &Status::of(&self.dir(0)).0["routes"];
                routes[0]["fast_path"]["packets_sent"].as_u64().unwrap_or(0)
            }
            By::Routes | By::Commands => of_device("wire0"),
            By::Nobody => 0,
        }
    }

    /// Both hosts have what hosts have that began with `kind`, and no more.
    #[track_caller]
    pub(crate) fn assert_nothing_left(&self, pair: &str, kind: &Kind) {
        let wanted = fresh(kind);
        for (host, wanted) in wanted.iter().enumerate() {
            let now = || found(&self.lab.hosts[host], &self.dir(host));
            if comes_true(SOON, || now() == *wanted) {
                continue;
            }
            let now = now();
            let left = now.difference(wanted).collect::<Vec<_>>();
            let lacks = wanted.difference(&now).collect::<Vec<_>>();
            panic!("{pair}: host {host} has {left:#?} too much and lacks {lacks:#?}");
        }
    }
}

/// What hosts have that never had another backend.
fn fresh(kind: &Kind) -> [Found; 2] {
    static SEEN: Mutex<BTreeMap<&str, [Found; 2]>> = Mutex::new(BTreeMap::new());
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let look = || {
        let site = Site::start(kind);
        site.assert_carried(kind.name, kind);
        let look = || [0, 1].map(|host| found(&site.lab.hosts[host], &site.dir(host)));
        // Rules and neighbours may still come.
        let mut last = look();
        wait_until(SOON, "a host settles", || {
            std::thread::sleep(Duration::from_secs(1));
            let now = look();
            now == std::mem::replace(&mut last, now.clone())
        });
        last
    };
    seen.entry(kind.name).or_insert_with(look).clone()
}

fn found(host: &Namespace, dir: &std::path::Path) -> Found {
    let text = |argv: &[&str]| host.exec(argv);
    let json = |argv: &[&str]| serde_json::from_str::<Vec<Value>>(&text(argv)).unwrap();
    let mut all = Found::new();
    let mut devices = Vec::new();
    for link in json(&["ip", "-j", "-d", "link"]) {
        let (name, kind) = (&link["ifname"], &link["linkinfo"]["info_kind"]);
        all.insert(format!("link {name} {kind} mtu {} {}", link["mtu"], link["ifalias"]));
        devices.push(name.as_str().unwrap().to_owned());
    }
    for owner in json(&["ip", "-j", "-4", "address"]) {
        for it in owner["addr_info"].as_array().into_iter().flatten() {
            let (local, length, device) = (&it["local"], &it["prefixlen"], &owner["ifname"]);
            all.insert(format!("address {local}/{length} {device}"));
        }
    }
    let mut add = |what: &str, text: &str| {
        let lines = text.lines().map(without_numbers).filter(|line| !line.is_empty());
        all.extend(lines.map(|line| format!("{what} {line}")));
    };
    add("route", &text(&["ip", "-4", "route", "show", "table", "all"]));
    add("rule", &text(&["ip", "rule"]));
    add("neighbour", &text(&["ip", "neighbour", "show", "nud", "permanent"]));
    add("forwarding", &text(&["bridge", "fdb", "show"]));
    add("socket", &text(&["ss", "-Huln"]));
    add("nft", &text(&["nft", "-s", "list", "ruleset"]));
    for device in devices {
        for direction in ["ingress", "egress"] {
            let filters = host.command(&["tc", "filter", "show", "dev", &device, direction]);
            let filters = { filters }.output().unwrap().stdout;
            add(&format!("filter {device}"), &String::from_utf8_lossy(&filters));
        }
    }
    let names = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    // A host keeps its key: peers know it by that.
    add("file", &names.filter(|name| name != "wgkey").collect::<Vec<_>>().join("\n"));
    all
}

/// Hardware addresses and numbers of programs differ from run to run.
fn without_numbers(line: &str) -> String {
    let is_mac = |word: &&str| word.len() == 17 && word.matches(':').count() == 5;
    let mut words = Vec::new();
    let mut is_number = false;
    for word in line.split_whitespace() {
        let shown = if is_mac(&word) {
            "MAC"
        } else if is_number {
            "N"
        } else {
            word
        };
        is_number = ["id", "tag"].contains(&word);
        words.push(shown);
    }
    words.join(" ")
}
