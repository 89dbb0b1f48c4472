//! The wireguard backend: its lease, its devices with their routes, and the peers in them. The
//! devices go on without weftd.

pub(super) mod data;
pub(super) mod device;
mod handshakes;
mod health;
pub(super) mod key_file;
mod peers;
mod plan;
mod tunnel;
mod uapi;
mod userspace;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{info, warn};

use crate::backend::error::StartResult;
use crate::backend::family::{CarriedFamily, WIREGUARD_NAMES};
use crate::backend::handover::Handover;
use crate::backend::queues::patiently;
use crate::backend::setup::{Claim, Setup, addresses, check_room, warn_of_wide_mtu};
use crate::backend::status::{PeerHosts, Reporter, View};
use crate::backend::tunnel_device::OwnDevice;
use crate::backend_kind::BackendKind;
use crate::config::network::WireguardBackendConfig;
use crate::control::changes::next_value;
use crate::control::lease::{Lease, LeaseAttributes, Peers};
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::{Following, HostFollower};
use crate::host::interface::ExternalInterface;
use crate::host::listing::Listing;
use crate::host::netlink::{self, NetlinkError};
use crate::host::state::Link;
use crate::route::{Families, Prefixes};
use crate::status::TunnelEnd;
use crate::wireguard::keys::PrivateKey;

use self::data::data;
use self::device::{WireguardDevice, WireguardError};
use self::health::{Followed, WireguardHealth};
use self::plan::{Plan, Underlay, plans};
use self::tunnel::{Goal, Made, Tunnel};
use self::userspace::{Uapis, Userspace, UserspaceError};
use crate::config::options::WireguardChoice;

const KIND: BackendKind = BackendKind::Wireguard;

/// The longest time between two comparisons: the kernel reports no change of peers.
const PERIOD: Duration = Duration::from_secs(10);

/// How long what the weftd before has let go of may fail to come up here, tries included: longer
/// than the kernel takes to free a name and a port.
const TAKE_MAX: Duration = Duration::from_secs(5);

/// What a start has got.
#[derive(Debug)]
pub(super) struct WireguardReserved {
    settings: WireguardBackendConfig,
    key: PrivateKey,
    device: WireguardDevice,
    plans: Vec<Plan>,
    waits: bool,
}

/// Reads or makes the key, and the devices: what the kernel lacks, or another program has, is known
/// before anything is leased. Devices that a weftd carries packets by are left to it until this one
/// knows the peers.
pub(super) async fn prepare(
    settings: &WireguardBackendConfig,
    claim: Claim<'_>,
) -> StartResult<(LeaseAttributes, WireguardReserved)> {
    let Claim { external, dataplane, handover, wireguard_key_file: key_file, .. } = claim;
    let mtu_bytes = plan::mtu_bytes(settings, external);
    has_room::<Ipv4Addr>(settings, external)?;
    has_room::<Ipv6Addr>(settings, external)?;
    let key = key_file::read_or_make(key_file)?;
    let families = Families::new(external.v4().map(drop), external.v6().map(drop));
    let plans = plans(settings, families.unwrap_or_default());
    let userspace = || WireguardDevice::Userspace(Arc::new(Userspace::new(dataplane)));
    let mut device = match dataplane.wireguard {
        WireguardChoice::Auto | WireguardChoice::Kernel => WireguardDevice::Kernel,
        WireguardChoice::Userspace => userspace(),
    };
    plans.iter().try_for_each(|plan| has_underlay(plan, external))?;
    let is_held = is_held(handover).await?;
    let waits = is_held && dataplane.wireguard != WireguardChoice::Kernel;
    if waits {
        if plans.iter().any(|plan| plan.underlay == Underlay::Either) {
            return Err(WireguardError::from(UserspaceError::EitherFamily).into());
        }
        device = userspace();
    } else if is_held {
        handover.clear().await;
    }
    for plan in plans.iter().filter(|_| !waits) {
        // A killed predecessor that ran WireGuard itself may have a device of the name a moment.
        let ensure = || device.ensure(plan, &key, mtu_bytes);
        match patiently(ensure, |error| matches!(error, WireguardError::Foreign(_))).await {
            Err(error @ WireguardError::NoModule(_))
                if dataplane.wireguard == WireguardChoice::Auto =>
            {
                info!("weftd runs WireGuard itself, because the kernel has none: {}", why(&error));
                device = userspace();
                device.ensure(plan, &key, mtu_bytes).await?;
            }
            ensured => drop(ensured?),
        }
    }
    warn_of_wide_mtu(settings.mtu_bytes, external);
    // Where one device carries both families, peers reach it by one port.
    let port_of = |of_family: fn(&Plan) -> bool| {
        plans.iter().find(|plan| of_family(plan)).map(|plan| data(key.public(), plan.port))
    };
    let attributes = LeaseAttributes {
        backend_data: port_of(|plan| plan.families.v4().is_some()),
        backend_v6_data: port_of(|plan| plan.families.v6().is_some()),
        ..addresses(KIND, external)
    };
    Ok((attributes, WireguardReserved { settings: settings.clone(), key, device, plans, waits }))
}

/// Whether the weftd before, or an earlier start of this process, runs WireGuard itself and still
/// carries packets.
pub(super) async fn is_held(handover: &Handover) -> Result<bool, NetlinkError> {
    let is_in_userspace =
        |link: &Link| WIREGUARD_NAMES.contains(&link.id.name.as_str()) && !link.is_wireguard;
    let is_before = handover.has_predecessor();
    Ok(handover.has_wireguard() || is_before && netlink::links().await?.iter().any(is_in_userspace))
}

/// What the kernel has said to that there is none of.
fn why(error: &WireguardError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), with_causes)
}

/// Whether peers can reach this host where the device would have them.
fn has_underlay(plan: &Plan, external: &ExternalInterface) -> StartResult {
    let family = match plan.underlay {
        Underlay::V4 if external.v4().is_none() => "IPv4",
        Underlay::V6 if external.v6().is_none() => "IPv6",
        Underlay::V4 | Underlay::V6 | Underlay::Either => return Ok(()),
    };
    let interface = external.name.clone();
    Err(WireguardError::NoUnderlay { family, interface }.into())
}

fn has_room<A: CarriedFamily>(
    settings: &WireguardBackendConfig,
    external: &ExternalInterface,
) -> StartResult {
    if A::own(external).is_some() {
        let overhead_bytes = WireguardBackendConfig::OVERHEAD_BYTES;
        check_room::<A>(settings.mtu_bytes, external, overhead_bytes)?;
    }
    Ok(())
}

impl WireguardReserved {
    /// The devices that it has.
    pub(super) fn devices(&self) -> Vec<OwnDevice> {
        let own = |plan: &Plan| OwnDevice { name: plan.name.into(), families: plan.families };
        self.plans.iter().map(own).collect()
    }
}

/// A running backend.
pub struct WireguardBackend {
    settings: WireguardBackendConfig,
    host: HostFollower,
    device: WireguardDevice,
    tunnels: Vec<Tunnel>,
    control: Arc<ControlStatus>,
    pub(super) reporter: Reporter,
    health: WireguardHealth,
    /// By which `wg show` reads devices that run in this process.
    uapis: Arc<Uapis>,
    logged: BTreeMap<&'static str, LogOnce>,
    handover: Handover,
    /// Whether the devices are still another weftd's.
    waits: bool,
}

impl Drop for WireguardBackend {
    fn drop(&mut self) {
        // One that waits runs nothing yet, and another may.
        if !self.waits
            && let WireguardDevice::Userspace(userspace) = &self.device
        {
            self.handover.wireguard_ends(userspace.clone());
        }
    }
}

impl WireguardBackend {
    /// Goes on with the devices.
    pub(super) async fn start(setup: &Setup, reserved: WireguardReserved) -> StartResult<Self> {
        let WireguardReserved { settings, key, device, plans, waits } = reserved;
        device.begin(setup.networks, setup.subnets);
        let networks_v6 = setup.networks_v6();
        let following = setup.following(setup.networks_v4(), PERIOD);
        let host = HostFollower::new(Following { networks_v6, ..following })?;
        let families = setup.subnets.families();
        let names: Vec<_> = plans.iter().map(|plan| plan.name).collect();
        let uapis = Arc::new(device.open_uapis(&names));
        let port = plans.first().map_or(settings.port, |plan| plan.port);
        let health = WireguardHealth::open(device.clone(), families, port, names);
        let tunnels = plans.into_iter();
        let tunnels = tunnels.map(|plan| Tunnel::new(setup, plan, device.clone(), key.clone()));
        let mut reporter = Reporter::new(setup);
        reporter.reachability = health.health.view();
        let (control, logged) = (Arc::clone(&setup.control), BTreeMap::new());
        let tunnels = tunnels.collect();
        let handover = setup.handover.clone();
        let mut backend = Self {
            settings,
            host,
            tunnels,
            control,
            reporter,
            health,
            uapis,
            device,
            logged,
            handover,
            waits,
        };
        let listing = backend.host.list().await?;
        if waits {
            let why = "the weftd before has the devices until this one knows the peers";
            let wrong = Some(why.to_owned());
            backend.reporter.state(|state| (state.is_up, state.wrong) = (false, wrong));
        } else {
            let (_, failed) = backend.reconcile(listing, None).await;
            failed.map_or(Ok(()), Err)?;
        }
        info!("{}", backend.report_external());
        Ok(backend)
    }

    pub(super) fn view(&self) -> View {
        self.reporter.view(self.device.stats(), None)
    }

    /// Whether it has yet to take the devices from the weftd before.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Follows the leases and repairs what breaks. The kernel's devices stay when this is dropped.
    pub async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let (mut peers, wireguard) = (None, self.reporter.wireguard.clone());
        let mut took_at: Option<Instant> = None;
        let uapis = Arc::clone(&self.uapis);
        let mut answers = std::pin::pin!(uapis.serve());
        let tell = move |states| drop(wireguard.send_replace(states));
        loop {
            let listing = tokio::select! {
                listing = self.host.next(), if !self.waits => listing,
                never = self.health.run(&tell) => match never {},
                never = &mut answers => match never {},
                changed = next_value(&mut leases) => {
                    peers = Some(changed);
                    self.host.look_now();
                    if std::mem::take(&mut self.waits) {
                        info!("taking the devices from the weftd before, whose sessions end");
                        self.handover.clear().await;
                        took_at = Some(Instant::now());
                    }
                    continue;
                }
            };
            let (is_complete, failed) = self.reconcile(listing, peers.as_deref()).await;
            if let Some(error) = failed {
                self.reporter.count(|done| done.failures += 1);
                self.log("device", &format!("{}; retrying", with_causes(&error)));
                if took_at.is_some_and(|at| at.elapsed() >= TAKE_MAX) {
                    self.handover.fails(with_causes(&error));
                }
            } else if !self.host.is_briefly_away() && took_at.take().is_some() {
                self.handover.is_carrying();
            }
            self.host.finish(is_complete);
        }
    }

    /// Has no device outlive weftd: its subnet is lost, and peers may have another node there.
    pub(super) fn let_go(&mut self) {
        for tunnel in &self.tunnels {
            tunnel.remove_now();
        }
    }

    /// Compares and edits; whether everything is in place, and why a device is not. `peers` are
    /// missing before the first listing of leases. What goes wrong with one device costs the other
    /// nothing.
    async fn reconcile(
        &mut self,
        mut listing: Listing,
        peers: Option<&Peers>,
    ) -> (bool, Option<WireguardError>) {
        if self.host.is_briefly_away() {
            return (false, None);
        }
        let leases: Option<Vec<_>> =
            peers.map(|peers| self.reporter.of_kind(peers, KIND).collect());
        let goal = Goal {
            leases: leases.as_deref(),
            settings: &self.settings,
            // Not while the peers are from the cache, which may be older than what the kernel has.
            removes: self.control.read().cached_as_of_unix.is_none(),
        };
        let (mut all, mut failed, mut is_main_up) = (Made::default(), None, true);
        for (number, tunnel) in self.tunnels.iter_mut().enumerate() {
            match tunnel.reconcile(goal, &self.host, &mut listing).await {
                Ok(made) => all.join(made),
                Err(error) => {
                    all.not_set_up.extend(tunnel.carried(leases.iter().flatten().copied()));
                    is_main_up &= number > 0;
                    failed.get_or_insert(error);
                }
            }
        }
        self.report_external();
        self.tell(&all);
        let lost = self.host.lost_address().cloned().or_else(|| self.host.lost_v6_address());
        let wrong = lost.or_else(|| failed.as_ref().map(|error| with_causes(error)));
        self.reporter.state(|state| (state.is_up, state.wrong) = (is_main_up, wrong));
        if let Some(leases) = leases {
            self.follow_peers(&leases, &all);
        }
        (failed.is_none() && all.refused.is_empty(), failed)
    }

    /// Reports the peers as they are now.
    fn follow_peers(&mut self, leases: &[&Lease], made: &Made) {
        let (mut hosts, mut followed) = (PeerHosts::new(), BTreeMap::<Prefixes, Followed>::new());
        for (peer, interface) in &made.peers {
            let (host, allowed) = (peer.host, peer.config.allowed);
            hosts.extend(allowed.v4().map(|subnet| (subnet.into(), host)));
            hosts.extend(allowed.v6().map(|subnet| (subnet.into(), host)));
            let subnet = allowed.first();
            let public_key = peer.config.public_key;
            let it = Followed { host, public_key, subnet, interface: *interface };
            // Of a peer of two devices the way of IPv4 is asked for, which comes first.
            followed.entry(peer.subnets).or_insert(it);
        }
        let external = self.host.external();
        let (v4, v6) = (Ipv4Addr::own(external), Ipv6Addr::own(external));
        let own = v4.map(IpAddr::from).into_iter().chain(v6.map(IpAddr::from));
        let own = own.chain(self.tunnels.iter().flat_map(Tunnel::addresses)).collect();
        self.health.follow(followed.into_values().collect(), own, external.index);
        let is_set_up = |lease: &&&Lease| hosts.contains_key(&lease.subnets.first());
        let done = leases.iter().filter(is_set_up).count();
        self.reporter.hosts(hosts, done, made.not_set_up.len());
    }

    /// Counts and logs what came of a comparison.
    fn tell(&mut self, made: &Made) {
        let Made { repaired, refused, unusable, .. } = made;
        self.reporter.count(|done| {
            done.repairs += repaired.len() as u64;
            done.failures += refused.len() as u64;
        });
        self.reporter.state(|state| {
            state.done.leases_unusable = unusable.len() as u64;
            state.unusable = Arc::new(unusable.clone());
        });
        if let Some(first) = unusable.values().next() {
            let all = unusable.len();
            self.log("unusable", &format!("ignored lease {first} ({all} in all)"));
        }
        if let Some(first) = repaired.first() {
            self.log("repaired", &format!("{first} ({} in all)", repaired.len()));
        }
        if let Some(first) = refused.first() {
            let text = format!("{} ({} in all); retrying", with_causes(first), refused.len());
            self.log("refused", &text);
        }
    }

    /// Logs something about `subject` when it is new, and once a minute while it lasts.
    fn log(&mut self, subject: &'static str, text: &str) {
        self.logged.entry(subject).or_default().once(text, |text| warn!("{text}"));
    }

    /// Reports the interface, and gives the backend in one line.
    fn report_external(&self) -> String {
        let external = self.host.external();
        let mtu_bytes = plan::mtu_bytes(&self.settings, external);
        let tunnels = self.tunnels.iter().map(|tunnel| tunnel.describe(mtu_bytes));
        let shared = if self.settings.preshared_key.is_some() { ", with a PSK" } else { "" };
        let tunnels = tunnels.collect::<Vec<_>>().join("; ");
        let (below, by) = (&external.name, self.device.carrier());
        let description = format!("{tunnels} over {below}{shared}, carried by {by}");
        self.reporter.follow(external, mtu_bytes);
        let [first, last] = [self.tunnels.first(), self.tunnels.last()];
        let [first, last] = [first, last].map(|tunnel| tunnel.map(|tunnel| tunnel.plan));
        self.reporter.state(|state| {
            state.description.clone_from(&description);
            state.workers = self.device.workers();
            state.handshakes = self.device.handshakes();
            let end = |(v4, v6): (Plan, Plan)| (v4.port, v6.port);
            state.tunnel = first
                .zip(last)
                .map(end)
                .map(|(port, ipv6_port)| TunnelEnd::Wireguard { port, ipv6_port });
            // One that carries IPv4 as well is not IPv6's own.
            let v4 = first.filter(|plan| plan.families.v4().is_some());
            let v6 = last.filter(|plan| plan.families.v4().is_none());
            state.device = v4.map(|plan| plan.name.to_owned());
            state.device_v6 = v6.map(|plan| plan.name.to_owned());
        });
        description
    }
}
