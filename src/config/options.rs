//! The validated options of one weftd: ready types only, nothing left to check downstream.
//! Built by `flags` from the command line and the environment; holds no logic of its own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

pub use crate::config::checked::{Secret, is_host_address, without_secrets};
use crate::config::kube::KubeOptions;
use crate::route::Families;
use crate::status::Setting;
use crate::words::words;

/// What the status socket's path is followed by where a starting weftd asks the running one for its
/// tunnel.
pub const NEXT_SOCKET_SUFFIX: &str = ".next";

/// Most packet workers: each has a queue of the TUN device, of which the kernel takes 256
/// (MAX_TAP_QUEUES in drivers/net/tun.c).
pub const WORKERS_MAX: u16 = 256;

/// Everything an operator chose.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where leases live.
    pub store: StoreOptions,
    /// How to find the external interface and the public address.
    pub interface: InterfaceOptions,
    /// Whether the tunnel follows when the external interface's address is replaced.
    pub follow_address: bool,
    /// The environment file that containers' network set-up reads.
    pub subnet_file: PathBuf,
    /// How long before its expiry a lease is renewed.
    pub renew_margin: Duration,
    /// Grace period of peers whose leases vanished with most others at once; zero for none.
    pub stale_hold: Duration,
    /// Whether a start without the store may use the cache of the last run.
    pub start_from_cache: bool,
    /// Where `/healthz` and `/readyz` listen; `None` when off.
    pub health: Option<SocketAddr>,
    /// Which firewall rules and routes to set.
    pub rules: RuleOptions,
    /// How the udp backend carries packets.
    pub dataplane: DataplaneOptions,
    /// `WIREGUARD_KEY_FILE`: where the wireguard backend has this host's key.
    pub wireguard_key_file: PathBuf,
    /// `--log-format=json`: each line of the log is a JSON object, and not as klog writes it.
    pub log_is_json: bool,
    /// klog's `-v`: 0 is the normal log, 1 and above add detail.
    pub verbosity: u8,
    /// Where the running daemon answers `/status` and `/metrics`.
    pub status_socket: PathBuf,
    /// Where `/metrics` listens as well; `None` when off.
    pub metrics_address: Option<SocketAddr>,
    /// Whether to go on with the tunnel of the weftd that answers there.
    pub take_over: bool,
    /// All flags, to be shown.
    pub settings: Vec<Setting>,
}

impl Options {
    /// The line that records at start what was chosen: each flag that was given, and by which
    /// variable if it was by one. Secrets show as `***`.
    pub fn log_line(&self) -> String {
        let given = self.settings.iter().filter_map(|setting| {
            let Setting { name, value, given_by } = setting;
            let by = given_by.as_ref()?;
            let from = if by.starts_with('-') { String::new() } else { format!(" (from {by})") };
            let is_plain = !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic());
            let value = if is_plain { value.clone() } else { format!("{value:?}") };
            Some(format!("--{name}={value}{from}"))
        });
        let given: Vec<_> = given.collect();
        let given = if given.is_empty() { "nothing".to_owned() } else { given.join(" ") };
        format!("CLI flags config: {given}; `weft config` shows the defaults of the others")
    }
}

/// Where leases live.
#[derive(Debug, Clone)]
pub enum StoreOptions {
    /// An etcd v3 cluster.
    Etcd(EtcdOptions),
    /// A directory of files, for labs, single machines and file-managed clusters.
    Local(PathBuf),
    /// The Kubernetes API.
    Kube(KubeOptions),
}

impl StoreOptions {
    /// Names the store: the same text for the same place, however it is reached.
    pub fn identity(&self) -> String {
        match self {
            Self::Etcd(EtcdOptions { endpoints, prefix, .. }) => {
                let mut endpoints = endpoints.clone();
                endpoints.sort_unstable();
                format!("etcd {prefix} at {}", endpoints.join(","))
            }
            Self::Local(directory) => format!("local {}", directory.display()),
            Self::Kube(options) => {
                let url = options.api_url.as_deref().unwrap_or("the cluster");
                format!("kubernetes at {url}")
            }
        }
    }
}

/// How to reach etcd.
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    /// URLs, tried in any order.
    pub endpoints: Vec<String>,
    /// Key prefix without a trailing slash, `/coreos.com/network` by default.
    pub prefix: String,
    /// Certificate authority that the servers are checked against.
    pub ca_file: Option<PathBuf>,
    /// Client certificate and its key; both or none.
    pub client_certificate: Option<ClientCertificate>,
    /// User name and password; both or none.
    pub credentials: Option<Credentials>,
}

/// A client certificate on disk.
#[derive(Debug, Clone)]
pub struct ClientCertificate {
    /// PEM file with the certificate chain.
    pub certificate_file: PathBuf,
    /// PEM file with its private key.
    pub key_file: PathBuf,
}

/// A user of the store.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// The user name.
    pub username: String,
    /// The password.
    pub password: Secret,
}

/// How to find the external interface and the public address.
#[derive(Debug, Clone, Default)]
pub struct InterfaceOptions {
    /// `--iface`, in order: each an interface name or an address.
    pub interfaces: Vec<String>,
    /// `--iface-regex`, in order.
    pub regexes: Vec<regex::Regex>,
    /// `--iface-can-reach`.
    pub can_reach: Option<IpAddr>,
    /// `--public-ip`.
    pub public_ip: Option<Ipv4Addr>,
    /// `--public-ipv6`.
    pub public_ipv6: Option<Ipv6Addr>,
    /// Of which families it has to have an address: the network's configuration says that, and no
    /// flag.
    pub families: Families<(), ()>,
}

/// Which rules to set on the host, and how often to check them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleOptions {
    /// `--ip-masq`.
    pub masquerade: bool,
    /// Not `--ip-masq-fully-random-disable`.
    pub random_ports: bool,
    /// `--iptables-forward-rules`.
    pub forward: bool,
    /// `--ip-blackhole-route`.
    pub blackhole_route: bool,
    /// `--guard`.
    pub guard: bool,
    /// `--iptables-resync`.
    pub resync: Duration,
}

/// How the udp backend carries packets.
#[derive(Debug, Clone, Copy)]
pub struct DataplaneOptions {
    /// Which packet engine to run.
    pub engine: EngineChoice,
    /// How many packet workers to run, whatever the processors; `None` for as many as suit them.
    pub workers: Option<NonZeroU16>,
    /// Whether the kernel carries what it can.
    pub fast_path: FastPathChoice,
    /// `--worker-priority=ordinary`: workers get a processor like any other program, and not as
    /// soon as they may.
    pub workers_are_ordinary: bool,
    /// `--source-ports=one`: all send from the tunnel's port, as flanneld does, and not each from
    /// its own to peers that say that they take it, once echoes come back that way.
    pub has_one_source_port: bool,
    /// Which offloads the workers may use.
    pub offload: OffloadChoice,
    /// `--keep-tunnel`: device, routes and the kernel's programs outlive weftd.
    pub keep_tunnel: bool,
    /// `--peer-check=strict`: inner sources must be leased, and datagrams come from the public
    /// address of that lease and the tunnel's port.
    pub is_peer_check_strict: bool,
    /// Who runs WireGuard.
    pub wireguard: WireguardChoice,
}

words! {
    /// Who runs the devices of the wireguard backend.
    WireguardChoice {
        /// The kernel, where it can.
        Auto = "auto",
        /// The kernel, or no start.
        Kernel = "kernel",
        /// weftd's own workers.
        Userspace = "userspace",
    }
}

words! {
    /// Which packet engine runs.
    EngineChoice {
        /// The best engine that the kernel allows.
        Auto = "auto",
        /// io_uring, or no start.
        IoUring = "io_uring",
        /// poll, read/writev, recvmmsg/sendmmsg.
        Mmsg = "mmsg",
    }
}

words! {
    /// Whether the kernel's own programs carry what they can of the udp backend's packets.
    FastPathChoice {
        /// Where the kernel allows them.
        Auto = "auto",
        /// They do, or no start.
        On = "on",
        /// They don't.
        Off = "off",
    }
}

/// Which offloads the dataplane may use. What is allowed is still probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffloadChoice {
    /// TCP super-packets on the TUN device.
    pub tso: bool,
    /// UDP super-packets on the TUN device.
    pub uso: bool,
    /// GSO batches: many datagrams in one send (UDP_SEGMENT).
    pub gso: bool,
    /// Many datagrams in one receive (UDP_GRO).
    pub gro: bool,
    /// `auto`: leave out what is known to be broken on the running kernel.
    pub automatic: bool,
}
