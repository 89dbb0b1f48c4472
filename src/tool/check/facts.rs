//! What `weft check` knows of a host, as plain values. Checks read it; only `read` fills it in.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;

use crate::backend_kind::{BackendKind, UDP_PORT};
use crate::host::state::{Address, Link, Route};
use crate::route::Prefix;
use crate::status::{Lease, Status, TunnelEnd};

use super::firewall::Chain;

/// Everything that was read.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) asked: Asked,
    pub(super) daemon: Daemon,
    pub(super) process: Process,
    pub(super) tun: Option<Result<(), String>>,
    /// What a ring of io_uring said when it was opened.
    pub(super) io_uring: Option<Result<(), String>>,
    /// Nothing if the kernel did not tell.
    pub(super) host: Option<Host>,
    /// The ways to the peers and back; nothing without peers, or if the kernel did not tell.
    pub(super) ways: Option<Vec<Way>>,
    /// Below `/proc/sys`, such as `net/ipv4/ip_forward`.
    pub(super) sysctls: BTreeMap<String, u64>,
    pub(super) udp_sockets: Option<Vec<UdpSocket>>,
    /// Programs of this network namespace that are named weftd or flanneld, the daemon aside.
    pub(super) others: Vec<OtherDaemon>,
    pub(super) firewall: Option<Vec<Chain>>,
    /// Why there is nothing in `firewall`.
    pub(super) firewall_error: Option<String>,
    pub(super) subnet_file: SubnetText,
    pub(super) directory: Option<Directory>,
    pub(super) etcd: Vec<Endpoint>,
    /// Datagrams that any socket of this namespace lost because its buffer was full.
    pub(super) receive_errors: Option<u64>,
    /// Whether systemd's client of a time server says that the clock is right.
    pub(super) clock_is_synchronised: Option<bool>,
    pub(super) has_ipsec: Option<bool>,
    pub(super) now_unix: u64,
}

/// What the command line said.
#[derive(Debug, Default, Clone)]
pub(super) struct Asked {
    pub(super) socket: PathBuf,
    pub(super) subnet_file: PathBuf,
    pub(super) port: Option<u16>,
    pub(super) interface: Option<String>,
}

/// The weftd behind the status socket.
#[derive(Debug, Default, Clone)]
pub(super) struct Daemon {
    pub(super) state: DaemonState,
    pub(super) pid: Option<u32>,
    /// How it was set up, as far as the process may be looked at.
    pub(super) settings: Option<Settings>,
}

/// Flags of a weftd or flanneld, from its arguments and its environment.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) subnet_file: PathBuf,
    pub(super) is_kubernetes: bool,
}

/// Whether it answers.
#[derive(Debug, Default, Clone)]
pub(super) enum DaemonState {
    /// There is no socket.
    #[default]
    Absent,
    /// Nobody serves the socket.
    Stale,
    /// Only another user may ask.
    Forbidden(String),
    /// It answers, and is in another network namespace: nothing here is about it.
    Elsewhere,
    /// It does not answer as it should.
    Mute(String),
    /// What it answered to `/status`.
    Answered(Box<Status>),
}

/// Rights and limits: of the daemon if it runs, else of this process.
#[derive(Debug, Default, Clone)]
pub(super) struct Process {
    /// Whether they are the daemon's.
    pub(super) is_daemon: bool,
    pub(super) is_root: bool,
    /// `CapEff`.
    pub(super) capabilities: Option<u64>,
    pub(super) open_files_max: Option<u64>,
    /// In bytes.
    pub(super) locked_bytes_max: Option<u64>,
    pub(super) processors: Option<usize>,
    /// Of the kernel, such as (6, 1).
    pub(super) kernel: Option<(u32, u32)>,
}

/// Links, addresses, and the routes that matter.
#[derive(Debug, Default, Clone)]
pub(super) struct Host {
    pub(super) links: Vec<Link>,
    pub(super) addresses: Vec<Address>,
    pub(super) routes: Vec<Route>,
}

/// The way to a peer's host and back: why the kernel refuses it, if it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) host: Ipv4Addr,
    /// What the tunnel, or the peer's route, sends.
    pub(super) to: Result<(), String>,
    /// What comes from there, if that is by the external interface.
    pub(super) from: Result<(), String>,
    /// Whether weftd has an alarm about it.
    pub(super) is_alarming: bool,
}

/// A UDP socket of this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UdpSocket {
    /// Nothing for IPv6's wildcard, which takes IPv4 as well.
    pub(super) address: Ipv4Addr,
    pub(super) port: u16,
    pub(super) inode: u64,
    /// The processes that have it, by pid and name; none if it is the kernel's, or nobody may know.
    pub(super) holders: Vec<(u32, String)>,
}

/// Another weftd, or a flanneld.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OtherDaemon {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) subnet_file: PathBuf,
}

/// What is in the subnet file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct SubnetText {
    pub(super) is_there: bool,
    /// Why it can't be read.
    pub(super) error: Option<String>,
    pub(super) network: Option<Prefix>,
    pub(super) subnet: Option<Prefix>,
    pub(super) mtu_bytes: Option<u32>,
}

/// Where the subnet file is, or the nearest directory above that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    pub(super) is_writable: bool,
    pub(super) free_bytes: u64,
    pub(super) free_files: u64,
    /// Some file systems do not count files.
    pub(super) counts_files: bool,
}

/// An etcd endpoint that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) url: String,
    /// What was learned: milliseconds and an answer, or what went wrong.
    pub(super) answer: Result<(u64, String), String>,
}

impl Facts {
    /// The daemon's status, if it answers.
    pub(super) fn status(&self) -> Option<&Status> {
        match &self.daemon.state {
            DaemonState::Answered(status) => Some(status),
            DaemonState::Absent
            | DaemonState::Stale
            | DaemonState::Forbidden(_)
            | DaemonState::Elsewhere
            | DaemonState::Mute(_) => None,
        }
    }

    /// The backend, once the daemon has one.
    pub(super) fn backend(&self) -> Option<BackendKind> {
        self.status()?.backend.as_ref()?.kind
    }

    /// Whether this host runs udp, or may be about to.
    pub(super) fn may_be_udp(&self) -> bool {
        self.backend().is_none_or(|kind| kind == BackendKind::Udp)
    }

    /// The daemon's lease.
    pub(super) fn lease(&self) -> Option<&Lease> {
        self.status()?.lease.as_ref()
    }

    /// The whole overlay: by the daemon, or by the last one.
    pub(super) fn network(&self) -> Option<Prefix> {
        self.lease().map(|lease| lease.network).or(self.subnet_file.network)
    }

    /// The overlay's device, if the backend has one.
    pub(super) fn device(&self) -> Option<&str> {
        self.status()?.device.as_deref()
    }

    /// The external interface, by the daemon.
    pub(super) fn interface(&self) -> Option<&str> {
        self.status()?.interface.as_deref()
    }

    /// Where what pods get comes in.
    pub(super) fn comes_by(&self) -> Option<&str> {
        match self.backend() {
            Some(BackendKind::HostGw) => self.interface(),
            Some(_) | None => self.device(),
        }
    }

    /// The local end of the udp backend's tunnel.
    pub(super) fn tunnel_address(&self) -> Option<SocketAddrV4> {
        match self.status()?.tunnel? {
            TunnelEnd::Udp(address) => Some(address),
            TunnelEnd::Vxlan { .. } => None,
        }
    }

    /// The UDP port of the tunnel; nothing if the backend has none.
    pub(super) fn port(&self) -> Option<u16> {
        match self.status().and_then(|status| status.tunnel) {
            Some(TunnelEnd::Udp(address)) => Some(address.port()),
            Some(TunnelEnd::Vxlan { port, .. }) => Some(port),
            None if self.may_be_udp() => self.asked.port.or(Some(UDP_PORT)),
            None => None,
        }
    }

    /// A link by its name.
    pub(super) fn link(&self, name: &str) -> Option<&Link> {
        self.host.as_ref()?.links.iter().find(|link| link.id.name == name)
    }

    /// The name of a link.
    pub(super) fn link_name(&self, index: u32) -> &str {
        let links = self.host.as_ref().map_or(&[][..], |host| host.links.as_slice());
        links.iter().find(|link| link.id.index == index).map_or("?", |link| &link.id.name)
    }

    /// A number below `/proc/sys`.
    pub(super) fn sysctl(&self, name: &str) -> Option<u64> {
        self.sysctls.get(name).copied()
    }

    /// Whether the process that is looked at has a capability, by its number.
    pub(super) fn may(&self, capability: u32) -> Option<bool> {
        self.process.capabilities.map(|all| all & (1 << capability) != 0)
    }
}
