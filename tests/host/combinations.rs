//! Each backend over each store in each family that this machine can run: two hosts, and what
//! passes between their pods.

#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use crate::ipsec::{WITH_OWN_RUN, strongswan};
use crate::kernel_backends::families;
use crate::support::kube_api::{KubeApi, node};
use crate::support::lab::{Lab, Process, UNDERLAY, WEFTD, wait_until};
use crate::support::overlay::local_store;
use crate::support::pace::by_effort;
use crate::support::status::Status;
use crate::support::traffic::tcp_transfer;

/// Of a start, with charon's exchange of keys.
const SOON: Duration = Duration::from_secs(60);
const ETCD_PORT: u16 = 2379;
const API_PORT: u16 = 6443;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Store {
    Local,
    Etcd,
    Kubernetes,
}

const STORES: [Store; 3] = [Store::Local, Store::Etcd, Store::Kubernetes];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carried {
    V4,
    Both,
    V6,
}

const FAMILIES: [Carried; 3] = [Carried::V4, Carried::Both, Carried::V6];

impl Carried {
    fn has_v4(self) -> bool {
        self != Self::V6
    }

    fn has_v6(self) -> bool {
        self != Self::V4
    }
}

/// What becomes of a combination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
enum Outcome {
    #[display("carried")]
    Carried,
    /// Nobody carries packets, or commands of the operator do.
    #[display("leased")]
    Leased,
    #[display("refused")]
    Refused,
}

struct Kind {
    name: &'static str,
    backend: &'static str,
    flags: &'static [&'static str],
    /// By family.
    outcomes: [Outcome; 3],
}

const KINDS: [Kind; 8] = {
    use Outcome::{Carried, Leased, Refused};
    [
        Kind { name: "`udp`", backend: r#"{"Type":"udp"}"#, flags: &[], outcomes: [Carried; 3] },
        Kind {
            name: "`udp`, fast path",
            backend: r#"{"Type":"udp"}"#,
            flags: &["--fast-path=on"],
            outcomes: [Carried, Carried, Refused],
        },
        Kind {
            name: "`vxlan`",
            backend: r#"{"Type":"vxlan"}"#,
            flags: &[],
            outcomes: [Carried; 3],
        },
        Kind {
            name: "`host-gw`",
            backend: r#"{"Type":"host-gw"}"#,
            flags: &[],
            outcomes: [Carried; 3],
        },
        Kind {
            name: "`wireguard`",
            backend: r#"{"Type":"wireguard"}"#,
            flags: &["--wireguard=userspace"],
            outcomes: [Carried; 3],
        },
        Kind {
            name: "`ipsec`",
            backend: r#"{"Type":"ipsec","UDPEncap":true,"PSK":"PSK"}"#,
            flags: &[],
            outcomes: [Carried, Refused, Refused],
        },
        Kind { name: "`alloc`", backend: r#"{"Type":"alloc"}"#, flags: &[], outcomes: [Leased; 3] },
        Kind {
            name: "`extension`",
            backend: r#"{"Type":"extension","SubnetAddCommand":"true"}"#,
            flags: &[],
            outcomes: [Leased; 3],
        },
    ]
};

/// What a combination runs on.
struct Site {
    daemons: Vec<Process>,
    _api: Option<KubeApi>,
    _etcd: Option<Process>,
    store: Vec<String>,
    lab: Lab,
    dir: TempDir,
}

fn config(carried: Carried, backend: &str) -> String {
    let v4 = match carried.has_v4() {
        true => r#""Network":"10.5.0.0/16""#,
        false => r#""EnableIPv4":false"#,
    };
    let v6 = match carried.has_v6() {
        true => r#","EnableIPv6":true,"IPv6Network":"fd00:5::/48""#,
        false => "",
    };
    let backend = backend.replace(":\"PSK\"", &format!(":\"{}\"", "psk-of-the-test-".repeat(6)));
    format!("{{{v4}{v6},\"Backend\":{backend}}}")
}

impl Site {
    fn new(store: Store, carried: Carried, config: &str) -> Self {
        let (lab, dir) = (families::lab(), tempfile::tempdir().unwrap());
        for host in 0..2 {
            fs::create_dir_all(dir.path().join(format!("run{host}"))).unwrap();
        }
        // kernel-libipsec, as this kernel may have no ESP.
        let strongswan = strongswan("kernel-libipsec kernel-netlink");
        fs::write(dir.path().join("strongswan.conf"), strongswan).unwrap();
        let (mut api, mut etcd) = (None, None);
        let store = match store {
            Store::Local => vec![local_store(dir.path(), config)],
            Store::Etcd => {
                etcd = Some(start_etcd(&lab, dir.path(), config));
                vec![format!("--etcd-endpoints=http://{}:{ETCD_PORT}", UNDERLAY[0])]
            }
            Store::Kubernetes => {
                api = Some(start_api(&lab, carried));
                let file = dir.path().join("net-conf.json");
                fs::write(&file, config).unwrap();
                vec![
                    "--kube-subnet-mgr".to_owned(),
                    format!("--kube-api-url=http://{}:{API_PORT}", UNDERLAY[0]),
                    format!("--net-config-path={}", file.display()),
                ]
            }
        };
        Self { daemons: Vec::new(), _api: api, _etcd: etcd, store, lab, dir }
    }

    /// Starts both daemons.
    fn start(&mut self, flags: &[&str]) {
        for host in 0..2 {
            let at = |name: &str| self.dir.path().join(name).display().to_string();
            let home = format!("h{host}");
            let node = format!("NODE_NAME=n{host}");
            let key = format!("WIREGUARD_KEY_FILE={}", at(&format!("{home}/wgkey")));
            let strongswan = format!("STRONGSWAN_CONF={}", at("strongswan.conf"));
            let run = at(&format!("run{host}"));
            let subnet_file = format!("--subnet-file={}", at(&format!("{home}/subnet.env")));
            let socket = format!("--status-socket={}", at(&format!("{home}/weft.sock")));
            let mut argv =
                vec!["env", &node, &key, &strongswan, "sh", "-c", WITH_OWN_RUN, "sh", &run];
            argv.extend([WEFTD, "--iface=wire0", &subnet_file, &socket]);
            argv.push("--iptables-forward-rules=false");
            argv.extend(self.store.iter().map(String::as_str).chain(flags.iter().copied()));
            self.daemons.push(self.lab.hosts[host].spawn(&argv));
        }
    }

    fn home(&self, host: usize) -> std::path::PathBuf {
        self.dir.path().join(format!("h{host}"))
    }

    /// subnet.env of a host, once it is there.
    fn leased(&mut self, host: usize, what: &str) -> BTreeMap<String, String> {
        let file = self.home(host).join("subnet.env");
        let daemon = &mut self.daemons[host];
        wait_until(SOON, &format!("{what}: host {host} has its subnets"), || {
            assert!(daemon.ended().is_none(), "{what}: weftd ended: {}", daemon.output());
            file.exists()
        });
        let text = fs::read_to_string(&file).unwrap();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    /// Gives a host's pod addresses of its subnets, and returns them.
    fn connect(&self, host: usize, leased: &BTreeMap<String, String>) -> Vec<IpAddr> {
        let keys = ["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"];
        let gateways = keys.iter().filter_map(|key| leased.get(*key));
        let mtu = &leased["FLANNEL_MTU"];
        let (here, pod) = (&self.lab.hosts[host], &self.lab.pods[host]);
        here.exec(&["ip", "link", "set", "pod0", "mtu", mtu]);
        pod.exec(&["ip", "link", "set", "eth0", "mtu", mtu]);
        let connect = |gateway: &String| {
            let (address, length) = gateway.split_once('/').unwrap();
            let of_pod = format!("{}2", address.strip_suffix('1').unwrap());
            let nodad: &[_] = if address.contains(':') { &["nodad"] } else { &[] };
            let own = format!("{of_pod}/{length}");
            here.exec(&[&["ip", "address", "add", gateway, "dev", "pod0"], nodad].concat());
            pod.exec(&[&["ip", "address", "add", &own, "dev", "eth0"], nodad].concat());
            pod.exec(&["ip", "route", "replace", "default", "via", address]);
            of_pod.parse().unwrap()
        };
        gateways.map(connect).collect()
    }
}

fn start_etcd(lab: &Lab, dir: &Path, config: &str) -> Process {
    let (url, data) = (format!("http://{}:{ETCD_PORT}", UNDERLAY[0]), dir.join("etcd"));
    let data = data.display().to_string();
    let peer = "http://127.0.0.1:2380";
    let mut argv = vec!["etcd", "--data-dir", &data, "--listen-client-urls", &url];
    argv.extend(["--advertise-client-urls", &url, "--listen-peer-urls", peer]);
    argv.extend(["--initial-advertise-peer-urls", peer]);
    let cluster = format!("default={peer}");
    argv.extend(["--initial-cluster", &cluster]);
    let etcd = lab.hosts[0].spawn(&argv);
    let ctl = ["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", &url];
    let put = ["put", "/coreos.com/network/config", config];
    wait_until(SOON, "etcd takes the configuration", || {
        lab.hosts[0].succeeds(&[ctl.as_slice(), &put].concat())
    });
    etcd
}

fn start_api(lab: &Lab, carried: Carried) -> KubeApi {
    let listen = || TcpListener::bind((UNDERLAY[0], API_PORT)).expect("nobody else listens");
    let api = KubeApi::serve(lab.hosts[0].enter(listen));
    for host in 0..2 {
        let (v4, v6) = (format!("10.5.{}.0/24", host + 1), format!("fd00:5:0:{}::/64", host + 1));
        let of_v4 = carried.has_v4().then_some(v4);
        let cidrs: Vec<_> = of_v4.into_iter().chain(carried.has_v6().then_some(v6)).collect();
        let mut node = node(&format!("n{host}"), Some(&cidrs[0]));
        node["spec"]["podCIDRs"] = cidrs.into();
        api.put_node(&node);
    }
    api
}

fn run(kind: &Kind, store: Store, family: usize) {
    let (carried, outcome) = (FAMILIES[family], kind.outcomes[family]);
    let what = format!("{} over {store:?}, {carried:?}", kind.name);
    let mut site = Site::new(store, carried, &config(carried, kind.backend));
    site.start(kind.flags);
    if outcome == Outcome::Refused {
        for daemon in &mut site.daemons {
            let status = daemon.wait(SOON);
            assert_eq!(status.code(), Some(1), "{what} is refused: {}", daemon.output());
        }
        return;
    }
    let leased = [0, 1].map(|host| site.leased(host, &what));
    for host in 0..2 {
        wait_until(SOON, &format!("{what}: host {host} knows the other"), || {
            Status::try_of(&site.home(host)).is_some_and(|status| status.0["peers"] == 1)
        });
    }
    if outcome == Outcome::Leased {
        return;
    }
    let pods = [0, 1].map(|host| site.connect(host, &leased[host]));
    let wanted = usize::from(carried.has_v4()) + usize::from(carried.has_v6());
    assert_eq!(pods[0].len(), wanted, "{what}: {leased:?}");
    for (from, to) in [(0, 1), (1, 0)] {
        for address in &pods[to] {
            let text = address.to_string();
            wait_until(SOON, &format!("{what}: pod {from} reaches {text}"), || {
                site.lab.pods[from].succeeds(&["ping", "-q", "-c1", "-W1", &text])
            });
            tcp_transfer(&site.lab.pods[from], &site.lab.pods[to], *address, 1 << 20, true);
        }
    }
}

/// Each backend in each family over one store, which are all three in turn; with everything asked
/// for, over each.
fn walk(part: usize) {
    for (number, kind) in KINDS.iter().enumerate().filter(|(number, _)| number % 2 == part) {
        for family in 0..FAMILIES.len() {
            for (at, store) in STORES.into_iter().enumerate() {
                if by_effort((number / 2 + family) % STORES.len() == at, true) {
                    run(kind, store, family);
                }
            }
        }
    }
}

#[test]
fn each_backend_runs_over_each_store_in_each_family_first_part() {
    walk(0);
}

#[test]
fn each_backend_runs_over_each_store_in_each_family_second_part() {
    walk(1);
}

/// The table: the outcome does not depend on the store, which the walk has shown.
fn rows() -> String {
    let mut rows =
        "| Backend | IPv4 | both families | IPv6 alone |\n|---|---|---|---|\n".to_owned();
    for Kind { name, outcomes: [v4, both, v6], .. } in &KINDS {
        rows += &format!("| {name} | {v4} | {both} | {v6} |\n");
    }
    rows
}

#[test]
fn the_table_of_combinations_is_in_the_documents() {
    let rows = rows();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/backends.md");
    let page = fs::read_to_string(page).expect("the document is there");
    assert!(page.contains(&rows), "docs/backends.md needs these rows:\n{rows}");
}
