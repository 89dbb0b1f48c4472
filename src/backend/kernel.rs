//! The backends without workers or commands: make the kernel's routes, neighbours and forwarding
//! entries what the leases ask for, if anything. The kernel goes on without weftd.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::backend::host_gw;
use crate::backend::kernel_health::KernelHealth;
use crate::backend::kernel_tables::{FamilyTables, Made};
use crate::backend::setup::{INTERFACE_PERIOD, Setup};
use crate::backend::status::{PeerHosts, Reporter};
use crate::backend::vxlan::VxlanDevice;
use crate::backend_kind::BackendKind;
use crate::control::changes::next_value;
use crate::control::lease::{Lease, Peers};
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::{Following, HostFollower};
use crate::host::interface::ExternalInterface;
use crate::host::listing::Listing;
use crate::host::netlink::{NetlinkError, neighbours};
use crate::host::state::KernelFamily;
use crate::host::tables::{Desired, Device, Ways};
use crate::route::Prefix;

/// The longest time between two comparisons: flannel's for routes, whose changes the kernel
/// reports; the kernel reports no change of neighbours and forwarding entries.
const HOST_GW_PERIOD: Duration = Duration::from_secs(10);
const VXLAN_PERIOD: Duration = Duration::from_secs(30);

/// What is particular to each of these backends.
#[derive(Debug)]
pub(super) enum Means {
    Vxlan(Box<VxlanDevice>),
    HostGw,
    /// Nothing of ours: something else carries the packets.
    Alloc,
}

impl Means {
    /// The backend that its nodes' leases name.
    fn leased_as(&self) -> BackendKind {
        match self {
            Self::Vxlan(_) => BackendKind::Vxlan,
            Self::HostGw => BackendKind::HostGw,
            Self::Alloc => BackendKind::Udp,
        }
    }

    /// The longest time between two comparisons, and whether routes to anywhere decide how a peer
    /// is reached.
    fn follows(&self) -> (Duration, bool) {
        match self {
            Self::Vxlan(device) => (VXLAN_PERIOD, device.settings.direct_routing),
            Self::HostGw => (HOST_GW_PERIOD, false),
            Self::Alloc => (INTERFACE_PERIOD, false),
        }
    }

    fn mtu_bytes(&self, external: &ExternalInterface) -> u32 {
        match self {
            Self::Vxlan(device) => device.mtu_bytes(external),
            Self::HostGw | Self::Alloc => external.mtu_bytes,
        }
    }

    /// The backend in one line, for the log and the status.
    fn describe(&self, external: &ExternalInterface) -> String {
        match self {
            Self::Vxlan(device) => device.describe(external),
            Self::HostGw => host_gw::describe(external),
            Self::Alloc => "alloc: a subnet only, no data plane".to_owned(),
        }
    }
}

/// A running backend of the kernel's.
pub struct KernelBackend {
    means: Means,
    host: HostFollower,
    v4: FamilyTables<Ipv4Addr>,
    v6: FamilyTables<Ipv6Addr>,
    /// The address of the overlay's device.
    address: Ipv4Addr,
    control: Arc<ControlStatus>,
    pub(super) reporter: Reporter,
    /// The MTU that the device was last given.
    imposed_mtu_bytes: Option<u32>,
    /// Of those whose packets the kernel carries.
    health: Option<KernelHealth>,
    logged: BTreeMap<&'static str, LogOnce>,
}

impl KernelBackend {
    /// Makes the device, or takes over the one that an earlier run left.
    pub(super) async fn start(setup: &Setup, means: Means) -> Result<Self, NetlinkError> {
        let (period, all_route_events) = means.follows();
        let following = setup.following(setup.networks(), period);
        let networks_v6 = setup.networks_v6();
        let mut backend = Self {
            means,
            host: HostFollower::new(Following { all_route_events, networks_v6, ..following })?,
            v4: FamilyTables::new(setup.networks()),
            v6: FamilyTables::new(setup.networks_v6()),
            address: setup.subnet.network(),
            control: Arc::clone(&setup.control),
            reporter: Reporter::new(setup),
            imposed_mtu_bytes: None,
            health: None,
            logged: BTreeMap::new(),
        };
        let listing = backend.host.list().await?;
        backend.reconcile(listing, None).await?;
        let port = match &backend.means {
            Means::Vxlan(device) => device.port(),
            Means::HostGw | Means::Alloc => None,
        };
        if !matches!(backend.means, Means::Alloc) {
            let health = KernelHealth::open(port);
            backend.reporter.reachability = health.health.view();
            backend.health = Some(health);
        }
        info!("{}", backend.report_external());
        Ok(backend)
    }

    /// Follows the leases and repairs what breaks. Everything stays when this is dropped.
    pub async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let mut peers = None;
        loop {
            let listing = tokio::select! {
                listing = self.host.next() => listing,
                Some(()) = OptionFuture::from(self.health.as_mut().map(KernelHealth::run)) => {
                    self.host.look_now();
                    continue;
                }
                changed = next_value(&mut leases) => {
                    peers = Some(changed);
                    self.host.look_now();
                    continue;
                }
            };
            match self.reconcile(listing, peers.as_deref()).await {
                Ok(is_complete) => self.host.finish(is_complete),
                Err(error) => {
                    self.reporter.count(|done| done.failures += 1);
                    self.host.fail(&error);
                }
            }
        }
    }

    /// Compares and edits; whether everything is in place. `peers` are missing before the first
    /// listing of leases, when it is unknown which of the kernel's entries are stale.
    async fn reconcile(
        &mut self,
        mut listing: Listing,
        peers: Option<&Peers>,
    ) -> Result<bool, NetlinkError> {
        if self.host.is_briefly_away() {
            return Ok(false);
        }
        let external = self.host.external();
        let mtu_bytes = self.means.mtu_bytes(external);
        let leases = peers.map(|peers| self.reporter.of_kind(peers, self.means.leased_as()));
        let leases = leases.into_iter().flatten();
        let (device, ways, unusable) = match &mut self.means {
            Means::Vxlan(vxlan) => {
                let before = self.imposed_mtu_bytes;
                let is_first = before.is_none();
                let link = vxlan.ensure(&self.host, &mut listing, is_first, &self.reporter).await?;
                let (ways, unusable) = vxlan.ways(leases, &link).await;
                let device = Device {
                    link,
                    address: self.address,
                    mac: Some(vxlan.mac),
                    mtu_bytes: Some(mtu_bytes).filter(|_| before != Some(mtu_bytes)),
                    is_ours_alone: true,
                };
                (Some(device), ways, unusable)
            }
            Means::HostGw => {
                (None, host_gw::ways(leases.filter_map(host_of), external), Vec::new())
            }
            Means::Alloc => (None, Ways::new(), Vec::new()),
        };
        if let Some(first) = unusable.first() {
            let more = match unusable.len() - 1 {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            self.log("unusable", &format!("ignored lease {first}{more}"));
        }
        self.reporter.count(|done| done.leases_unusable = unusable.len() as u64);
        let desired = Desired { device, networks: self.v4.networks.clone(), ways };
        self.report_external();
        let (lacking_v6, is_complete_v6) = self.make_v6(&listing, peers).await;
        let is_complete = self.make(&desired, &listing, peers, &lacking_v6).await?;
        let lost_v6 = self.host.lost_v6_address();
        match &lost_v6 {
            Some(lost) => self.log("lost-ipv6", lost),
            None => drop(self.logged.remove("lost-ipv6")),
        }
        let wrong = self.host.lost_address().cloned().or(lost_v6);
        self.reporter.state(|state| (state.is_up, state.wrong) = (true, wrong));
        Ok(is_complete && is_complete_v6)
    }

    /// Makes the tables as they must be, as far as the `peers` are known; of IPv6, these lack
    /// theirs.
    async fn make(
        &mut self,
        desired: &Desired,
        listing: &Listing,
        peers: Option<&Peers>,
        lacking_v6: &BTreeSet<Prefix<Ipv6Addr>>,
    ) -> Result<bool, NetlinkError> {
        let entries = match &desired.device {
            Some(device) => neighbours::entries(&device.link).await?,
            None => Vec::new(),
        };
        let Some(diff) = desired.diff(&listing.v4(), &entries) else { return Ok(false) };
        if let Some(device) = &desired.device {
            for edit in &diff.device {
                edit.apply().await?;
            }
            if let Some(to) = device.mtu_bytes
                && let Some(from) = self.imposed_mtu_bytes.replace(to)
            {
                let (name, below) = (&device.link.name, &self.host.external().name);
                info!("the MTU of {name} went from {from} to {to}: it follows that of {below}");
            }
        }
        let Some(peers) = peers else { return Ok(true) };
        let removes = self.removes();
        let made = self.v4.make(diff, desired, &listing.v4(), removes).await;
        self.tell(&made, desired.device.is_some());
        let mut hosts: PeerHosts = peers.values().filter_map(host_of).collect();
        hosts.retain(|subnet, _| self.v4.set.contains_key(subnet));
        if let Some(health) = &mut self.health {
            let external = self.host.external();
            let own = vec![external.address, self.address];
            health.follow(&self.v4.set, &hosts, own, external.index);
        }
        hosts.retain(|subnet, _| !made.removed.contains(subnet));
        let lacking = made.lacking();
        let lacks = |lease: &&Lease| {
            let (v4, v6) = (lease.subnets.v4(), lease.subnets.v6());
            v4.is_some_and(|it| lacking.contains(&it))
                || v6.is_some_and(|it| lacking_v6.contains(&it))
        };
        self.reporter.hosts(hosts, peers.values().filter(lacks).count());
        Ok(made.is_complete())
    }

    /// The same of IPv6, which has routes alone; gives which peers lack theirs, and whether
    /// everything is in place.
    async fn make_v6(
        &mut self,
        listing: &Listing,
        peers: Option<&Peers>,
    ) -> (BTreeSet<Prefix<Ipv6Addr>>, bool) {
        let Some(peers) = peers.filter(|_| !self.v6.networks.is_empty()) else {
            return (BTreeSet::new(), true);
        };
        let ways = match &self.means {
            Means::HostGw => {
                let kind = self.means.leased_as();
                let ours = peers.values().filter(|lease| lease.attributes.backend_type.is(kind));
                host_gw::ways(ours.filter_map(v6_host_of), self.host.external())
            }
            Means::Vxlan(_) | Means::Alloc => Ways::new(),
        };
        let desired = Desired { device: None, networks: self.v6.networks.clone(), ways };
        let diff = desired.diff(&listing.v6(), &[]).unwrap_or_default();
        let removes = self.removes();
        let made = self.v6.make(diff, &desired, &listing.v6(), removes).await;
        self.tell(&made, false);
        (made.lacking(), made.is_complete())
    }

    /// Whether what no peer asks for goes. Not while the peers are from the cache, which may be
    /// older than what the kernel has.
    fn removes(&self) -> bool {
        self.control.read().cached_as_of_unix.is_none()
    }

    /// Reports the interface, and gives the backend in one line.
    fn report_external(&self) -> String {
        let external = self.host.external();
        let description = self.means.describe(external);
        self.reporter.follow(external, self.means.mtu_bytes(external));
        self.reporter.state(|state| {
            state.description.clone_from(&description);
            if let Means::Vxlan(device) = &self.means {
                (state.tunnel, state.device) = (device.tunnel(), Some(device.name()));
            }
        });
        description
    }

    /// Counts and logs what came of a comparison.
    fn tell<A: KernelFamily>(&mut self, made: &Made<A>, has_entries: bool) {
        let Made { removed, repaired, refused, kept, .. } = made;
        self.reporter.count(|done| done.repairs += repaired.len() as u64);
        if let Some(first) = repaired.first() {
            let more = repaired.len() - 1;
            let what = if has_entries { "Entries and route" } else { "Route" };
            let why = match removed.contains(first) {
                true => "; another program removes them again and again, find it (`ip monitor`)",
                false => "",
            };
            let subject = if A::BITS == 32 { "repaired" } else { "repaired IPv6" };
            self.log(subject, &format!("{what} recovered for {first} (and {more} more){why}"));
        }
        let advice = match self.means {
            Means::HostGw => host_gw::advice(self.host.external()),
            Means::Vxlan(_) | Means::Alloc => "retrying".to_owned(),
        };
        let [peer, removal] = match A::BITS {
            32 => ["peer", "removal"],
            _ => ["peer of IPv6", "removal of IPv6"],
        };
        self.refused(peer, refused, &advice);
        self.refused(removal, kept, "retrying");
    }

    /// Counts and logs what the kernel refused.
    fn refused(&mut self, subject: &'static str, errors: &[NetlinkError], advice: &str) {
        self.reporter.count(|done| done.failures += errors.len() as u64);
        if let Some(first) = errors.first() {
            let more = match errors.len() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            self.log(subject, &format!("{}{more}; {advice}", with_causes(first)));
        }
    }

    /// Logs something about `subject` when it is new, and once a minute while it lasts.
    fn log(&mut self, subject: &'static str, text: &str) {
        self.logged.entry(subject).or_default().once(text, |text| warn!("{text}"));
    }
}

/// A peer's IPv4 subnet and its host.
fn host_of(lease: &Lease) -> Option<(Prefix, Ipv4Addr)> {
    Some((lease.v4()?, lease.attributes.public_ip))
}

/// A peer's IPv6 subnet and its host, if others can reach one there.
fn v6_host_of(lease: &Lease) -> Option<(Prefix<Ipv6Addr>, Ipv6Addr)> {
    let host = lease.attributes.public_ipv6.filter(|address| address.is_of_host());
    lease.subnets.v6().zip(host)
}
