//! What `weft check` knows of a host, as plain values. Checks read it; only `read` fills it in.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use rustix::thread::CapabilitySet;

use crate::backend_kind::{BackendKind, UDP_PORT};
use crate::config::flags::Given;
use crate::config::subnet_file::Previous;
use crate::host::listing::{FamilyListing, Listing};
use crate::host::netlink::policies::Policy;
use crate::host::state::{Link, MacAddress, PathToHost, Route};
use crate::route::{IpAddress, Prefix, Prefixes};
use crate::status::{Lease, Status, TunnelEnd};
use crate::tool::arguments::CheckArguments;
use crate::tool::explain::ToldFamily;

use super::finding::Finding;
use super::firewall::Chain;

/// Everything that was read.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) asked: CheckArguments,
    pub(super) daemon: DaemonFacts,
    pub(super) process: ProcessFacts,
    /// Why `/dev/net/tun` can't be opened.
    pub(super) tun_error: Option<String>,
    /// Why no ring of io_uring can be made.
    pub(super) io_uring_error: Option<String>,
    /// Links, addresses, and the routes that matter; nothing if the kernel did not tell.
    pub(super) host: Option<Listing>,
    pub(super) v4: FamilyFacts,
    pub(super) v6: FamilyFacts<Ipv6Addr>,
    /// Who has the underlay's addresses on the external link; nothing if nobody could be asked.
    pub(super) resolved: Option<Vec<Resolved>>,
    /// IPsec policies for what is sent.
    pub(super) policies: Vec<Policy>,
    /// What others have put on the external link and the overlay's device that may drop packets.
    pub(super) filters: Vec<Filter>,
    /// Below `/proc/sys`, such as `net/ipv4/ip_forward`.
    pub(super) sysctls: BTreeMap<String, u64>,
    pub(super) forwards_ipv6: Option<bool>,
    pub(super) udp_sockets: Option<Vec<UdpSocket>>,
    /// Programs of this network namespace that are named weftd or flanneld, the daemon aside.
    pub(super) others: Vec<OtherDaemon>,
    pub(super) subnet_file: SubnetFacts,
    pub(super) directory: Option<Directory>,
    /// What each etcd endpoint that was asked for says, or what went wrong, behind its URL.
    pub(super) etcd: Vec<Result<String, String>>,
    pub(super) has_ipsec: Option<bool>,
    pub(super) now_unix: u64,
}

/// The weftd behind the status socket.
#[derive(Debug, Default, Clone)]
pub(super) struct DaemonFacts {
    pub(super) state: DaemonState,
    pub(super) pid: Option<u32>,
    /// How it was set up, as far as the process may be looked at.
    pub(super) given: Option<Given>,
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
    /// It answers, and this pid is in another network namespace: nothing here is about it.
    Elsewhere(u32),
    /// It does not answer as it should.
    Mute(String),
    /// What it answered to `/status`.
    Answered(Box<Status>),
}

/// Rights and limits: of the daemon if it runs, else of this process.
#[derive(Debug, Default, Clone)]
pub(super) struct ProcessFacts {
    /// Whether they are the daemon's.
    pub(super) is_daemon: bool,
    /// Whether this process is root's.
    pub(super) is_root: bool,
    pub(super) capabilities: Option<CapabilitySet>,
    pub(super) open_files_max: Option<u64>,
}

/// What is known of one family.
#[derive(Debug)]
pub(super) struct FamilyFacts<A: IpAddress = Ipv4Addr> {
    /// The ways to the peers whose hosts are reached by it, and back; none without peers, or if the
    /// kernel did not tell.
    pub(super) ways: Vec<PeerWay<A>>,
    /// Routes of all tables into parts of this host's subnet.
    pub(super) own_routes: Vec<OwnRoute<A>>,
    /// The firewall's rules, as its packets meet them; nothing if they could not be read.
    pub(super) firewall: Option<Vec<Chain<A>>>,
    /// What of the rules could not be read, and why.
    pub(super) unread: Option<String>,
}

impl<A: IpAddress> Default for FamilyFacts<A> {
    fn default() -> Self {
        Self { ways: Vec::new(), own_routes: Vec::new(), firewall: None, unread: None }
    }
}

impl<A: IpAddress> FamilyFacts<A> {
    /// The firewall's rules, or why they can't be looked at.
    pub(super) fn chains(&self) -> Result<&[Chain<A>], Finding> {
        let unread = || self.unread.as_deref().unwrap_or("nobody read its rules").into();
        self.firewall.as_deref().ok_or_else(unread)
    }

    /// That no rule drops this, as far as the rules could be read.
    pub(super) fn nothing_drops(&self, what: &str) -> String {
        match &self.unread {
            None => format!("nothing surely drops {what}"),
            Some(unread) => format!("of what could be read nothing surely drops {what}; {unread}"),
        }
    }
}

/// The way to a peer's host and back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PeerWay<A: IpAddress = Ipv4Addr> {
    pub(super) host: A,
    /// What it has leased.
    pub(super) subnet: Prefix<A>,
    /// Why the kernel refuses what the tunnel, or the peer's route, sends.
    pub(super) to_refused: Option<String>,
    /// The same for what comes from there, if that is by the external interface.
    pub(super) from_refused: Option<String>,
    /// And for what its pods send to this host's: what a rule or a route refuses to forward.
    pub(super) pods_refused: Option<String>,
    /// Why what this host's pods send there ends here.
    pub(super) own_pods_end: Option<String>,
    /// Whether weftd has an alarm about it.
    pub(super) is_alarming: bool,
}

/// A route into a part of this host's subnet, and where the kernel sends what a peer's pod sends
/// there: nothing if it refuses.
#[derive(Debug, Clone)]
pub(super) struct OwnRoute<A: IpAddress = Ipv4Addr> {
    pub(super) table: u32,
    pub(super) route: Route<A>,
    pub(super) path: Option<PathToHost>,
}

/// A tc filter, a queueing discipline or an XDP program.
#[derive(Debug, Clone)]
pub(super) struct Filter {
    /// Kind and place, such as `u32 filter (egress of eth0)`.
    pub(super) text: String,
    /// Whether it is a filter by fields of what leaves, with an action: nobody has such a one but
    /// to drop, redirect or limit packets.
    pub(super) has_action: bool,
}

/// An address of the underlay, and who has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resolved {
    pub(super) address: Ipv4Addr,
    /// Whether this host has it; else it is of a peer about which weftd has an alarm.
    pub(super) is_own: bool,
    /// Other machines that answer for it by ARP.
    pub(super) answers: BTreeSet<MacAddress>,
    /// Where the kernel sends to, if somebody has set that.
    pub(super) permanent: Option<MacAddress>,
}

/// A UDP socket of this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UdpSocket {
    /// IPv6's wildcard takes IPv4 as well, unless it was told not to.
    pub(super) address: IpAddr,
    pub(super) port: u16,
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

/// The subnet file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct SubnetFacts {
    pub(super) is_there: bool,
    /// Whether a weftd has run with it: flanneld locks none.
    pub(super) has_lock: bool,
    /// Why it can't be read.
    pub(super) error: Option<String>,
    pub(super) says: Previous,
}

/// Where the subnet file is, or the nearest directory above that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    pub(super) is_writable: bool,
    pub(super) free_bytes: u64,
    /// Nothing of file systems that do not count files.
    pub(super) free_files: Option<u64>,
}

/// A family, by what is known of it.
pub(super) trait CheckedFamily: ToldFamily {
    /// What is known of it.
    fn facts(facts: &Facts) -> &FamilyFacts<Self>;

    /// Its addresses and routes.
    fn listed(host: &Listing) -> FamilyListing<'_, Self>;

    /// The address from which this host sends to others, by weftd.
    fn said_address(facts: &Facts) -> Option<Self>;
}

impl CheckedFamily for Ipv4Addr {
    fn facts(facts: &Facts) -> &FamilyFacts {
        &facts.v4
    }

    fn listed(host: &Listing) -> FamilyListing<'_> {
        host.v4()
    }

    fn said_address(facts: &Facts) -> Option<Self> {
        let end = facts.tunnel_address().and_then(Self::of);
        end.or_else(|| facts.lease()?.public_ip)
    }
}

impl CheckedFamily for Ipv6Addr {
    fn facts(facts: &Facts) -> &FamilyFacts<Self> {
        &facts.v6
    }

    fn listed(host: &Listing) -> FamilyListing<'_, Self> {
        host.v6()
    }

    fn said_address(facts: &Facts) -> Option<Self> {
        let end = facts.tunnel_address().and_then(Self::of);
        end.or_else(|| facts.lease()?.ipv6?.public_ip)
    }
}

impl Facts {
    /// The daemon's status, if it answers.
    pub(super) fn status(&self) -> Option<&Status> {
        let DaemonState::Answered(status) = &self.daemon.state else { return None };
        Some(status)
    }

    /// Programs that use the subnet file of the daemon that is to be checked.
    pub(super) fn rivals(&self) -> impl Iterator<Item = &OtherDaemon> {
        self.others.iter().filter(|it| it.subnet_file == self.asked.subnet_file)
    }

    /// The very weftd that is to be checked, by its subnet file, if its status socket is gone.
    pub(super) fn unanswering(&self) -> Option<&OtherDaemon> {
        let mut rivals = self.rivals();
        let only = rivals.next().filter(|it| it.name == "weftd" && self.status().is_none());
        only.filter(|_| rivals.next().is_none())
    }

    /// The daemon's status, or that there is none to look at.
    pub(super) fn answered(&self) -> Result<&Status, Finding> {
        self.status().ok_or_else(|| "no weftd answers".into())
    }

    /// Links, addresses and routes, or that there are none to look at.
    pub(super) fn host(&self) -> Result<&Listing, Finding> {
        let missing = || "the kernel did not list links, addresses and routes".into();
        self.host.as_ref().ok_or_else(missing)
    }

    /// The address from which this host sends to others, as its firewall sees it: behind address
    /// translation no interface has the public one.
    pub(super) fn own_address<A: CheckedFamily>(&self) -> Option<A> {
        let addresses = A::listed(self.host.as_ref()?).addresses;
        let index = self.link(self.interface()?)?.id.index;
        let is_local = |address: &A| addresses.iter().any(|it| it.address == *address);
        let own = addresses.iter().filter(|it| it.interface_index == index);
        let said = A::said_address(self).filter(is_local);
        said.or_else(|| own.map(|it| it.address).min_by_key(|address| address.is_of_link()))
    }

    /// Whether packets between the hosts are of this family, as far as that is known: a tunnel's
    /// datagrams, or what is routed without one.
    pub(super) fn is_underlay<A: CheckedFamily>(&self) -> bool {
        let is_used = self.networks().map(|networks| A::of_both(networks).is_some());
        // Before the start the udp backend may be the one.
        let is_known =
            if self.lease().is_some() { A::said_address(self).is_some() } else { A::BITS == 32 };
        is_known && is_used.unwrap_or(true)
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

    /// The daemon's lease, or that there is none to look at.
    pub(super) fn leased(&self) -> Result<&Lease, Finding> {
        self.lease().ok_or_else(|| "no weftd says its lease".into())
    }

    /// The whole overlay, by the daemon or by the last one.
    pub(super) fn networks(&self) -> Result<Prefixes, Finding> {
        let of_daemon = self.lease().and_then(Lease::networks).or(self.subnet_file.says.networks);
        of_daemon.ok_or_else(|| "neither weftd nor subnet.env says the network".into())
    }

    /// This host's part of it.
    pub(super) fn subnets(&self) -> Option<Prefixes> {
        self.lease().and_then(Lease::subnets).or(self.subnet_file.says.subnets)
    }

    /// The overlay's device, if the backend has one.
    pub(super) fn device(&self) -> Option<&str> {
        self.status()?.device.as_deref()
    }

    /// The one of IPv6, if that has one of its own.
    pub(super) fn ipv6_device(&self) -> Option<&str> {
        self.status()?.ipv6_device.as_deref()
    }

    /// The external interface, by the daemon.
    pub(super) fn interface(&self) -> Option<&str> {
        self.status()?.interface.as_deref()
    }

    /// Where what pods get comes in.
    pub(super) fn comes_by<A: CheckedFamily>(&self) -> Option<&str> {
        match self.backend() {
            Some(BackendKind::HostGw) => self.interface(),
            Some(_) | None => A::device(self.status()?),
        }
    }

    /// The address of the local end of the udp backend's tunnel.
    pub(super) fn tunnel_address(&self) -> Option<IpAddr> {
        match self.status()?.tunnel? {
            TunnelEnd::Udp(address) => Some(address.ip()),
            TunnelEnd::Vxlan { .. } | TunnelEnd::Wireguard { .. } => None,
        }
    }

    /// The UDP port of the tunnel; nothing if the backend has none.
    pub(super) fn port(&self) -> Option<u16> {
        match self.status().and_then(|status| status.tunnel) {
            Some(end) => Some(end.port()),
            None => self.may_be_udp().then(|| self.asked.port.unwrap_or(UDP_PORT)),
        }
    }

    /// The hosts of the peers about which weftd has an alarm.
    pub(super) fn alarming(&self) -> impl Iterator<Item = Ipv4Addr> {
        let peers = self.status().into_iter().flat_map(|status| &status.routes);
        let alarming = peers.filter(|peer| peer.state.is_alarming());
        alarming.filter_map(|peer| Ipv4Addr::of(peer.via.host()))
    }

    /// A link by its name.
    pub(super) fn link(&self, name: &str) -> Option<&Link> {
        self.host.as_ref()?.links.iter().find(|link| link.id.name == name)
    }

    /// The name of a link.
    pub(super) fn link_name(&self, index: u32) -> &str {
        let mut links = self.host.iter().flat_map(|host| &host.links);
        links.find(|link| link.id.index == index).map_or("?", |link| &link.id.name)
    }

    /// A number below `/proc/sys`.
    pub(super) fn sysctl(&self, name: &str) -> Option<u64> {
        self.sysctls.get(name).copied()
    }
}
