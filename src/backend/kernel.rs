//! The backends without workers or commands: make the kernel's routes, neighbours and forwarding
//! entries what the leases ask for, if anything. The kernel goes on without weftd.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::pending;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tracing::info;

use crate::backend::family::CarriedFamily;
use crate::backend::kernel_health::{Answerer, KernelHealth};
use crate::backend::kernel_tables::{FamilyTables, Goal, Made};
use crate::backend::setup::{INTERFACE_PERIOD, Setup, of_link_alone};
use crate::backend::status::{PeerHosts, Reporter};
use crate::backend::tunnel_device::{OwnDevice, Tunnel, TunnelDevice};
use crate::backend::vxlan::VxlanReserved;
use crate::backend::{host_gw, ipip};
use crate::backend_kind::BackendKind;
use crate::control::changes::{next_change, next_value};
use crate::control::lease::{Lease, Peers};
use crate::control::status::ControlStatus;
use crate::failure::with_causes;
use crate::host::follower::{Following, HostFollower};
use crate::host::interface::ExternalInterface;
use crate::host::listing::Listing;
use crate::host::netlink::NetlinkError;
use crate::route::{Families, Prefix};

/// The longest time between two comparisons: flannel's for routes, whose changes the kernel
/// reports; the kernel reports no change of neighbours and forwarding entries.
const ROUTES_PERIOD: Duration = Duration::from_secs(10);
const VXLAN_PERIOD: Duration = Duration::from_secs(30);

/// What is particular to each of these backends.
#[derive(Debug)]
pub(super) enum Means {
    Vxlan(VxlanReserved),
    HostGw,
    Ipip {
        direct_routing: bool,
    },
    /// A cloud's network carries the packets.
    Cloud {
        kind: BackendKind,
        route: watch::Receiver<CloudRoute>,
    },
    /// Nothing of ours: something else carries the packets.
    Alloc,
}

/// This node's route in a cloud's network, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CloudRoute {
    /// Whether it leads here.
    pub(super) is_in_place: bool,
    /// What is wrong with it or with the cloud.
    pub(super) wrong: Option<String>,
    /// The backend in one line.
    pub(super) description: String,
}

impl Means {
    /// The backend that its nodes' leases name.
    fn leased_as(&self) -> BackendKind {
        let kind = match self {
            Self::Vxlan(_) => BackendKind::Vxlan,
            Self::HostGw => BackendKind::HostGw,
            Self::Ipip { .. } => BackendKind::Ipip,
            Self::Cloud { kind, .. } => *kind,
            Self::Alloc => BackendKind::Alloc,
        };
        kind.leased_as()
    }

    /// The tunnel devices that it has.
    pub(super) fn devices(&self) -> Vec<OwnDevice> {
        match self {
            Self::Vxlan(vxlan) => vxlan.own(),
            Self::Ipip { .. } => {
                vec![OwnDevice { name: ipip::NAME.into(), families: Families::default() }]
            }
            Self::HostGw | Self::Cloud { .. } | Self::Alloc => Vec::new(),
        }
    }

    /// What answers echoes at its peers.
    fn answerer(&self) -> Answerer {
        match self {
            Self::Vxlan(_) | Self::Ipip { .. } => Answerer::Device,
            Self::Cloud { .. } => Answerer::Subnet,
            Self::HostGw | Self::Alloc => Answerer::Host,
        }
    }

    /// The longest time between two comparisons, and whether routes to anywhere decide how a peer
    /// is reached.
    fn follows(&self) -> (Duration, bool) {
        match self {
            Self::Vxlan(vxlan) => (VXLAN_PERIOD, vxlan.is_direct()),
            Self::HostGw => (ROUTES_PERIOD, false),
            Self::Ipip { direct_routing } => (ROUTES_PERIOD, *direct_routing),
            Self::Cloud { .. } | Self::Alloc => (INTERFACE_PERIOD, false),
        }
    }

    /// How the cloud's route is, where there is one.
    fn cloud_route(&self) -> Option<CloudRoute> {
        match self {
            Self::Cloud { route, .. } => Some(route.borrow().clone()),
            Self::Vxlan(_) | Self::HostGw | Self::Ipip { .. } | Self::Alloc => None,
        }
    }

    /// Comes back when that is different.
    async fn cloud_route_changes(&mut self) {
        match self {
            Self::Cloud { route, .. } => next_change(route).await,
            Self::Vxlan(_) | Self::HostGw | Self::Ipip { .. } | Self::Alloc => pending().await,
        }
    }
}

/// A running backend of the kernel's.
pub struct KernelBackend {
    means: Means,
    host: HostFollower,
    v4: FamilyTables<Ipv4Addr>,
    v6: FamilyTables<Ipv6Addr>,
    control: Arc<ControlStatus>,
    pub(super) reporter: Reporter,
    /// Of those whose packets the kernel carries.
    health: Option<KernelHealth>,
}

impl KernelBackend {
    /// Makes the devices, or takes over those that an earlier run left.
    pub(super) async fn start(setup: &Setup, means: Means) -> Result<Self, NetlinkError> {
        let (period, all_route_events) = means.follows();
        let following = setup.following(setup.networks_v4(), period);
        let networks_v6 = setup.networks_v6();
        let (v4, v6) = match &means {
            Means::Vxlan(vxlan) => vxlan.devices(setup.subnets).await?,
            Means::Ipip { direct_routing } => {
                let tunnel = Tunnel::Ipip { direct_routing: *direct_routing };
                let device = |subnet| TunnelDevice::new(tunnel, subnet, true);
                (setup.subnets.v4().map(device), None)
            }
            Means::HostGw | Means::Cloud { .. } | Means::Alloc => (None, None),
        };
        let mut backend = Self {
            means,
            host: HostFollower::new(Following { all_route_events, networks_v6, ..following })?,
            v4: FamilyTables::new(setup.networks_v4(), v4),
            v6: FamilyTables::new(setup.networks_v6(), v6),
            control: Arc::clone(&setup.control),
            reporter: Reporter::new(setup),
            health: None,
        };
        let listing = backend.host.list().await?;
        backend.reconcile(listing, None).await?;
        if !matches!(backend.means, Means::Alloc) {
            let port_v4 = backend.v4.device.as_ref().and_then(TunnelDevice::port);
            let port = port_v4.or_else(|| backend.v6.device.as_ref().and_then(TunnelDevice::port));
            let (v4, v6) = (setup.networks.v4().map(drop), setup.networks.v6().map(drop));
            let families = Families::new(v4, v6).unwrap_or_default();
            let health = KernelHealth::open(families, port, backend.means.answerer());
            backend.reporter.reachability = health.health.view();
            backend.health = Some(health);
        }
        info!("{}", backend.report_external());
        Ok(backend)
    }

    /// Tells whether the peers are from the store.
    pub(super) fn control(&self) -> Arc<ControlStatus> {
        Arc::clone(&self.control)
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
                () = self.means.cloud_route_changes() => {
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
    /// listing of leases. What goes wrong with IPv6 alone costs IPv4 nothing.
    async fn reconcile(
        &mut self,
        mut listing: Listing,
        peers: Option<&Peers>,
    ) -> Result<bool, NetlinkError> {
        if self.host.is_briefly_away() {
            return Ok(false);
        }
        let leases: Option<Vec<_>> =
            peers.map(|peers| self.reporter.of_kind(peers, self.means.leased_as()).collect());
        let goal = Goal {
            leases: leases.as_deref(),
            has_routes: matches!(self.means, Means::HostGw),
            // Not while the peers are from the cache, which may be older than what the kernel has.
            removes: self.control.read().cached_as_of_unix.is_none(),
        };
        let Self { host, reporter, v4, v6, .. } = self;
        let made_v6 = v6.reconcile(goal, host, &mut listing, reporter).await;
        let made = v4.reconcile(goal, host, &mut listing, reporter).await?;
        if let (Means::Cloud { .. }, Some(leases)) = (&self.means, goal.leases) {
            // Nothing of it is in the kernel's tables; peers are asked at their hosts.
            let hosts = leases.iter().filter_map(|lease| Ipv4Addr::peer(lease));
            v4.set = host_gw::ways(hosts, host.external());
        }
        self.report_external();
        let all = || goal.leases.unwrap_or_default().iter().filter_map(|it| Ipv6Addr::subnet(it));
        let lacking_v6 = made_v6.as_ref().map_or_else(|_| all().collect(), Made::lacking);
        let mut unusable = made.unusable.clone();
        for (subnets, why) in made_v6.iter().flat_map(|made| made.unusable.clone()) {
            let both = |all: &mut String| *all += &format!("; {why}");
            unusable.entry(subnets).and_modify(both).or_insert(why);
        }
        self.reporter.state(|state| {
            state.done.leases_unusable = unusable.len() as u64;
            state.unusable = Arc::new(unusable);
        });
        if let Some(peers) = peers {
            self.follow_peers(peers, &made, &lacking_v6);
        }
        let lost_v6 = self.host.lost_v6_address().or_else(|| self.of_link_alone());
        match &lost_v6 {
            Some(lost) => self.v6.log("lost", lost),
            None => self.v6.forget("lost"),
        }
        let why = |error: &NetlinkError| format!("IPv6 is not carried: {}", with_causes(error));
        let wrong = self.host.lost_address().cloned().or(lost_v6);
        let wrong = wrong.or_else(|| made_v6.as_ref().err().map(why));
        let cloud = self.means.cloud_route();
        let is_up = cloud.as_ref().is_none_or(|route| route.is_in_place);
        let wrong = wrong.or_else(|| cloud.and_then(|route| route.wrong));
        self.reporter.state(|state| (state.is_up, state.wrong) = (is_up, wrong));
        Ok(made.is_complete() & made_v6?.is_complete())
    }

    /// That the interface has only an IPv6 address that peers are not told.
    fn of_link_alone(&self) -> Option<String> {
        let external = self.host.external();
        let address = of_link_alone(&self.means.leased_as().into(), external)?;
        Some(format!(
            "{} has no IPv6 address but {address}, which is of the link alone: peers are told \
             none, and send no IPv6 here. Give it another; with --follow-address=false restart \
             weftd then",
            external.name
        ))
    }

    /// Reports the peers as what was made leaves them; of IPv6, these lack theirs.
    fn follow_peers(
        &mut self,
        peers: &Peers,
        made: &Made<Ipv4Addr>,
        lacking_v6: &BTreeSet<Prefix<Ipv6Addr>>,
    ) {
        let mut hosts: BTreeMap<_, _> =
            peers.values().filter_map(|it| Ipv4Addr::peer(it)).collect();
        hosts.retain(|subnet, _| self.v4.set.contains_key(subnet));
        let mut hosts_v6: BTreeMap<_, _> =
            peers.values().filter_map(|it| Ipv6Addr::peer(it)).collect();
        hosts_v6.retain(|subnet, _| self.v6.set.contains_key(subnet));
        if let Some(health) = &mut self.health {
            let external = self.host.external();
            let own = self.v4.own(external).chain(self.v6.own(external));
            // Of peers with both families the way of IPv4 is asked for.
            let others = peers.values().filter(|lease| lease.subnets.v4().is_none());
            let others: BTreeSet<_> = others.filter_map(|it| Ipv6Addr::subnet(it)).collect();
            let others_v6 = hosts_v6.iter().filter(|(subnet, _)| others.contains(subnet));
            let others_v6 = others_v6.map(|(subnet, host)| (*subnet, *host)).collect();
            let (v4, v6) = ((&self.v4.set, hosts.clone()), (&self.v6.set, others_v6));
            health.follow(&v4, &v6, own.collect(), external.index);
        }
        hosts.retain(|subnet, _| !made.removed.contains(subnet));
        let lacking = made.lacking();
        let mut all: PeerHosts =
            hosts.into_iter().map(|(subnet, host)| (subnet.into(), host.into())).collect();
        hosts_v6.retain(|subnet, _| !lacking_v6.contains(subnet));
        all.extend(hosts_v6.into_iter().map(|(subnet, host)| (subnet.into(), IpAddr::V6(host))));
        let lacks = |lease: &&Arc<Lease>| {
            let (v4, v6) = (lease.subnets.v4(), lease.subnets.v6());
            v4.is_some_and(|it| lacking.contains(&it))
                || v6.is_some_and(|it| lacking_v6.contains(&it))
        };
        let is_set_up = |lease: &&Arc<Lease>| all.contains_key(&lease.subnets.first());
        let done = peers.values().filter(is_set_up).count();
        self.reporter.hosts(all, done, peers.values().filter(lacks).count());
    }

    /// The backend in one line, for the log and the status, and the overlay's MTU: what packets of
    /// either family may have.
    fn describe(&self, external: &ExternalInterface) -> (String, u32) {
        let (v4, v6) = (self.v4.device.as_ref(), self.v6.device.as_ref());
        let devices = [v4.map(|it| it.describe(external)), v6.map(|it| it.describe(external))];
        let mtus = [v4.map(|it| it.mtu_bytes(external)), v6.map(|it| it.mtu_bytes(external))];
        let mtu_bytes = mtus.into_iter().flatten().min().unwrap_or(external.mtu_bytes);
        let description = match &self.means {
            Means::Vxlan(_) | Means::Ipip { .. } => {
                devices.into_iter().flatten().collect::<Vec<_>>().join("; ")
            }
            Means::HostGw => host_gw::describe(external),
            Means::Cloud { route, .. } => {
                format!("{} over {}", route.borrow().description, external.name)
            }
            Means::Alloc => "alloc: a subnet only, no data plane".to_owned(),
        };
        (description, mtu_bytes)
    }

    /// Reports the interface, and gives the backend in one line.
    fn report_external(&self) -> String {
        let external = self.host.external();
        let (description, mtu_bytes) = self.describe(external);
        self.reporter.follow(external, mtu_bytes);
        self.reporter.state(|state| {
            state.description.clone_from(&description);
            let (v4, v6) = (self.v4.device.as_ref(), self.v6.device.as_ref());
            let tunnel_v6 = || v6.and_then(TunnelDevice::tunnel);
            state.tunnel = v4.and_then(TunnelDevice::tunnel).or_else(tunnel_v6);
            state.device = v4.map(TunnelDevice::name);
            state.device_v6 = v6.map(TunnelDevice::name);
        });
        description
    }
}
