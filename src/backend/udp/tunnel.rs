//! Everything that packets go through: the TUN device, the sockets, the workers. Rebuilt when it
//! breaks or when the interface beneath it has another address; its MTU follows the interface, and
//! the routes to narrow paths follow the prober.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::backend::error::{StartError, StartResult};
use crate::backend::handover::{Handover, Offered};
use crate::backend::setup::{INTERFACE_PERIOD, Setup};
use crate::backend::status::{Reporter, Taken, UdpPlane, View, send_if_new, summed_up};
use crate::config::network::UdpBackendConfig;
use crate::config::options::OffloadChoice;
use crate::device::{TunnelSocket, kernel};
use crate::engine::{Engine, WorkerEnd, end_all};
use crate::failure::{LogOnce, with_causes};
use crate::forward::Senders;
use crate::host::follower::{Following, HostFollower};
use crate::host::listing::Listing;
use crate::host::mtu::{IPV6_MTU_BYTES_MIN, beyond_path};
use crate::host::netlink::devices::{limit_address_now, remove_link_now};
use crate::host::overlay::{Overlay, OverlayDesired, OverlayError};
use crate::route::{Peer, Prefixes, Published};
use crate::status::{FastPath, TunnelEnd, Worker};

use super::fallback;
use super::families::{fitting, held_to, limits_of, underlay, whole_bytes};
use super::kernel_plane::{Ground, Inputs, LIFE_BETWEEN};
use super::open::{TunnelReserved, configure, desired, open_sources};
use super::owner::Owner;
use super::pacing::Pacing;
use super::peers::announcement_v6;
use super::prober::Prober;
use super::tun_device;
use crate::backend::queues::open_queues;
use crate::backend::team::{self, Orders, Seat, Team};

pub(super) struct Tunnel {
    settings: UdpBackendConfig,
    offload: OffloadChoice,
    owner: Owner,
    orders: Orders,
    host: HostFollower,
    reporter: Reporter,
    mtu_bytes: u16,
    prober: Prober,
    worker_count: NonZeroU16,
    has_sources: bool,
    is_kept: bool,
    handover: Handover,
    /// One for each worker.
    seats: Vec<Seat>,
    /// These two are made again together.
    overlay: Overlay,
    team: Team,
    ends: mpsc::UnboundedReceiver<WorkerEnd>,
    ground: watch::Sender<Option<Ground>>,
    pacing: Pacing,
    logged_fallback: LogOnce,
    logged: LogOnce,
    /// Why it is not where the interface is.
    stays: Option<String>,
    /// Why it has another MTU than the interface asks for.
    mtu_stays: Option<String>,
    /// The narrow paths that the routes know.
    limited: BTreeMap<Prefixes, u16>,
}

impl Tunnel {
    /// Makes address, route and workers for what is reserved.
    pub(super) async fn start(
        setup: &Setup,
        settings: UdpBackendConfig,
        reserved: TunnelReserved,
        routes: Published,
        taken: Arc<Taken>,
    ) -> StartResult<Self> {
        let TunnelReserved { owner, queues, mtu_bytes, worker_count, offload, .. } = reserved;
        let leased = team::leased(setup.networks, setup.subnets).ok_or(StartError::NoSubnet)?;
        let networks = leased.v4().map(|leased| leased.network).into_iter().collect();
        let networks_v6 = leased.v6().map(|leased| leased.network).into_iter().collect();
        let following = setup.following(networks, INTERFACE_PERIOD);
        let host = HostFollower::new(Following { networks_v6, ..following })?;
        let overlay = configure(setup, mtu_bytes, &queues[0]).await?;
        let is_kept = setup.dataplane.keep_tunnel;
        tun_device::settle(&queues[0], owner, is_kept).await?;
        let seat = |socket| Seat { socket: Arc::new(socket), stats: Arc::default() };
        let seats: Vec<Seat> = reserved.sockets.into_iter().map(seat).collect();
        let handover = setup.handover.clone();
        handover.offer(team::duplicates(&queues, &seats));
        let (ends_sender, ends) = mpsc::unbounded_channel();
        let orders = Orders {
            leased,
            mtu_bytes: Arc::new(AtomicU16::new(mtu_bytes)),
            whole_bytes: Arc::new(AtomicU16::new(whole_bytes(
                host.external(),
                seats[0].socket.address,
            ))),
            engine: team::settle_engine(setup.dataplane.engine),
            comes_first: !setup.dataplane.workers_are_ordinary,
            routes,
            cipher: None,
            senders: senders(setup.dataplane.is_peer_check_strict),
            ends: ends_sender,
        };
        let team = Team::start(queues, &seats, &orders).map_err(fallback::refusal)?;
        let prober = Prober::open(setup.subnets, seats[0].socket.address, mtu_bytes, taken);
        let mut reporter = Reporter::new(setup);
        reporter.reachability = prober.health.view();
        let mut tunnel = Self {
            settings,
            owner,
            offload,
            orders,
            host,
            reporter,
            mtu_bytes,
            prober,
            worker_count,
            has_sources: reserved.has_sources,
            is_kept,
            handover,
            seats,
            overlay,
            team,
            ends,
            ground: watch::Sender::default(),
            pacing: Pacing::new(Instant::now()),
            logged_fallback: LogOnce::default(),
            stays: None,
            mtu_stays: None,
            limited: BTreeMap::new(),
            logged: LogOnce::default(),
        };
        tunnel.log_fallback();
        info!("{}", tunnel.report_up());
        Ok(tunnel)
    }

    /// Where the tunnel's datagrams arrive.
    pub(super) fn address(&self) -> SocketAddr {
        self.seats[0].socket.address
    }

    /// What is seen from outside, beside the kernel's programs.
    pub(super) fn view(&self, fast_path: watch::Receiver<FastPath>) -> View {
        let stats = self.seats.iter().map(|seat| Arc::clone(&seat.stats)).collect();
        let (routes, taken) = (self.orders.routes.clone(), Arc::clone(&self.prober.taken));
        self.reporter.view(stats, Some(UdpPlane { routes, fast_path, taken }))
    }

    /// What the kernel's programs go by.
    pub(super) fn kernel_inputs(&self, tables: watch::Receiver<()>) -> Inputs {
        let leased = self.orders.leased;
        let leased_v6 = leased.v6().filter(|_| kernel::uncovers_ipv6(&kernel::release()));
        Inputs {
            owner: self.owner,
            subnet: leased.v4().map(|leased| leased.subnet),
            subnet_v6: leased_v6.map(|leased| leased.subnet),
            routes: self.orders.routes.clone(),
            tables,
            ground: self.ground.subscribe(),
            unmeasured: self.prober.unmeasured.subscribe(),
            attributes: self.reporter.attributes.clone(),
            taken: Arc::clone(&self.prober.taken),
            has_sources: self.has_sources,
            is_kept: self.is_kept,
        }
    }

    /// Has the device end with weftd.
    pub(super) fn let_go(&mut self) {
        self.is_kept = false;
        let device = &self.overlay.desired.device;
        if let Err(error) = remove_link_now(device.index) {
            warn!("cannot remove {device}: {error}; run `ip link del {}`", device.name);
        }
    }

    pub(super) async fn run(&mut self) -> Infallible {
        loop {
            let interfaces = [self.overlay.desired.device.index, self.host.external().index];
            tokio::select! {
                end = self.ends.recv() => {
                    self.give_up_broken_ring(end.as_ref());
                    self.rebuild(&team::end_reason(end)).await;
                }
                listing = self.host.next() => self.reconcile(&listing).await,
                () = self.prober.changed(&self.seats, &self.orders.routes, interfaces) => {
                    self.host.look_now();
                }
            }
        }
    }

    async fn reconcile(&mut self, listing: &Listing) {
        match self.try_reconcile(listing).await {
            Ok(is_complete) => self.host.finish(is_complete),
            Err(OverlayError::DeviceGone(device)) => {
                self.rebuild(&format!("device {device} was deleted")).await;
                self.host.finish(true);
                self.host.look_now();
            }
            Err(OverlayError::Netlink(error)) => self.host.fail(&error),
            Err(OverlayError::ForeignRoute(_)) => self.host.finish(false),
        }
        self.report_up();
    }

    async fn try_reconcile(&mut self, listing: &Listing) -> Result<bool, OverlayError> {
        self.overlay.reconcile(listing).await?;
        self.follow_paths().await?;
        if !self.follow_address().await {
            return Ok(false);
        }
        self.follow_mtu().await.map(|()| true)
    }

    /// Moves to the address that the interface has now; false if that is to be retried.
    async fn follow_address(&mut self) -> bool {
        let external = self.host.external();
        let from = self.seats[0].socket.address;
        let to = underlay(external, from.is_ipv6()).unwrap_or_else(|| from.ip());
        if from.ip() == to {
            self.stays = None;
            return true;
        }
        let address = SocketAddr::new(to, self.settings.port);
        let OffloadChoice { gso, gro, .. } = self.offload;
        let mut sockets = match TunnelSocket::bind_group(address, gso, gro, self.worker_count) {
            Ok(sockets) => sockets,
            Err(error) => {
                let text = format!("the tunnel stays at {from}: {}", with_causes(&error));
                self.logged.once(&text, |text| warn!("{text}; retrying"));
                self.stays = Some(text);
                return false;
            }
        };
        self.stays = None;
        if self.has_sources {
            open_sources(&mut sockets);
        }
        for (seat, socket) in self.seats.iter_mut().zip(sockets) {
            seat.socket = Arc::new(socket);
        }
        // At once, so that the peers learn it meanwhile.
        self.reporter.follow(external, self.mtu_bytes.into());
        let name = external.name.clone();
        self.rebuild(&format!("the address of {name} went from {} to {to}", from.ip())).await;
        true
    }

    /// Fits the overlay's MTU to that of the interface beneath it.
    async fn follow_mtu(&mut self) -> Result<(), OverlayError> {
        let external = self.host.external();
        let (name, external_bytes) = (&external.name, external.mtu_bytes);
        let (device, from) = (&self.overlay.desired.device.name.clone(), self.mtu_bytes);
        let (has_ipv6, settings) = (self.overlay.desired.v6.is_some(), self.settings);
        let mtu_bytes = match fitting(external, self.address(), has_ipv6, settings.mtu_bytes) {
            Ok(mtu_bytes) => mtu_bytes,
            Err(error) => {
                let text = format!("the MTU of {device} stays {from}: {error}");
                self.logged.once(&text, |text| warn!("{text}"));
                self.mtu_stays = Some(text);
                return Ok(());
            }
        };
        self.mtu_stays = None;
        if mtu_bytes == from {
            return Ok(());
        }
        self.prober.paths.set_ceiling(mtu_bytes, Instant::now());
        // Before the device: otherwise a worker would refuse packets that the device accepts, and
        // report the old MTU to pods.
        self.orders.mtu_bytes.store(mtu_bytes, Ordering::Relaxed);
        if self.overlay.follow_mtu(mtu_bytes).await? {
            info!(
                "the MTU of {device} goes from {from} to {mtu_bytes}: that of {name} went to \
                 {external_bytes}; running pods keep theirs"
            );
        } else {
            warn!(
                "the MTU of {device} stays as someone else set it: {mtu_bytes} would suit {name}, \
                 whose MTU went to {external_bytes}"
            );
        }
        self.mtu_bytes = mtu_bytes;
        Ok(())
    }

    /// Gives the subnets behind narrow paths, and no others, routes with an MTU of their own.
    async fn follow_paths(&mut self) -> Result<(), OverlayError> {
        let limits = &self.prober.limits;
        let (limits_v4, limits_v6) = limits_of(limits, &self.orders.routes.table.load());
        let OverlayDesired { v4, v6, .. } = &self.overlay.desired;
        let are_set = v4.as_ref().is_none_or(|v4| v4.path_mtus == limits_v4)
            && v6.as_ref().is_none_or(|v6| v6.path_mtus == limits_v6);
        if *limits == self.limited && are_set {
            return Ok(());
        }
        let lines = self.path_changes(limits);
        self.overlay.limit_paths(limits_v4, limits_v6).await?;
        self.limited.clone_from(limits);
        lines.iter().for_each(|line| warn!("{line}"));
        Ok(())
    }

    /// Log lines for the paths whose limit differs from `limits`: an uplink that became narrow is
    /// one event.
    fn path_changes(&self, limits: &BTreeMap<Prefixes, u16>) -> Vec<String> {
        let before = &self.limited;
        let (table, mtu_bytes) = (self.orders.routes.table.load(), self.mtu_bytes);
        let external = self.host.external();
        let (interface, takes_bytes) = (&external.name, whole_bytes(external, self.address()));
        let all: BTreeSet<_> = before.keys().chain(limits.keys()).collect();
        let changed = all.into_iter().filter(|subnet| before.get(subnet) != limits.get(subnet));
        let line = |subnet: &Prefixes| {
            let Peer { address: peer, subnets, .. } = table.owner(subnet.first_address())?;
            Some(match limits.get(subnet) {
                Some(bytes) => format!(
                    "the path to {peer} carries {bytes} bytes, {} {interface}: the route to \
                     {subnet} has the MTU {} now, all others keep {mtu_bytes}; if most paths \
                     are so narrow, set MTU in the Backend of the network configuration{}",
                    if *bytes < takes_bytes { "less than" } else { "as much as" },
                    if subnets.v4().is_none() { IPV6_MTU_BYTES_MIN.max(*bytes) } else { *bytes },
                    subnets.v6().map_or("", |_| beyond_path(peer.ip(), *bytes, takes_bytes)),
                ),
                None => format!(
                    "the path to {peer} carries {mtu_bytes} bytes again: {subnet} needs no MTU of \
                     its own"
                ),
            })
        };
        summed_up(changed.filter_map(line), |more| {
            format!("{more} more paths changed; `ip route show dev {}` has all", self.device_name())
        })
    }

    /// Logs why io_uring is not used.
    fn log_fallback(&mut self) {
        let mut fallbacks = self.team.workers.iter().filter_map(|it| it.running.fallback.as_ref());
        if let Some(error) = fallbacks.next() {
            self.logged_fallback.once(&fallback::report(error), |text| warn!("{text}"));
        }
    }

    /// A ring that failed once would fail again; mmsg takes its place, where that is allowed.
    fn give_up_broken_ring(&mut self, end: Option<&WorkerEnd>) {
        let Some(WorkerEnd::WaitFailed(error)) = end else { return };
        let had_ring = self.team.workers.iter().any(|it| it.running.engine == Engine::IoUring);
        if had_ring && self.orders.engine.is_none() {
            warn!("{}", fallback::report_broken(error));
            self.orders.engine = Some(Engine::Mmsg);
        }
    }

    /// Reports that packets can flow, and gives the tunnel in one line.
    fn report_up(&self) -> String {
        let workers = self.team.state();
        let description = self.describe(&workers);
        let (external, address) = (self.host.external(), self.address());
        let whole_bytes = whole_bytes(external, address);
        let held_to = held_to(address, whole_bytes, &self.limited);
        self.orders.whole_bytes.store(held_to, Ordering::Relaxed);
        let ground = Some(Ground {
            tun_name: self.device_name().to_owned(),
            tun_device: self.overlay.desired.device.index,
            interface: external.name.clone(),
            underlay_device: external.index,
            underlay: address,
            mtu_bytes: self.mtu_bytes.min(whole_bytes),
        });
        send_if_new(&self.ground, ground);
        self.reporter.follow(external, self.mtu_bytes.into());
        let wrong = self.stays.as_ref().or_else(|| self.host.lost_address());
        let wrong_v6 = self.overlay.wrong_v6.as_ref();
        let wrong = wrong.or(wrong_v6).or(self.mtu_stays.as_ref()).cloned();
        // Peers tell their pods so at once.
        let takes_ipv6 = self.overlay.desired.v6.is_some() && wrong_v6.is_none();
        let is_up = self.overlay.desired.v4.is_some() || takes_ipv6;
        self.reporter.attributes.send_if_modified(|attributes| {
            let data = announcement_v6(takes_ipv6);
            std::mem::replace(&mut attributes.backend_v6_data, data) != attributes.backend_v6_data
        });
        self.reporter.state(|state| {
            (state.is_up, state.wrong, state.workers) = (is_up, wrong, workers);
            (state.tunnel, state.whole_bytes) = (Some(TunnelEnd::Udp(address)), whole_bytes);
            state.description.clone_from(&description);
            state.device = Some(self.device_name().to_owned());
        });
        description
    }

    fn describe(&self, workers: &[Worker]) -> String {
        let on = |on| if on { "on" } else { "off" };
        let (socket, offload) = (&self.seats[0].socket, &self.team.offload);
        // A host that is short of something may give it to some workers only.
        let mut engines: Vec<_> = workers.iter().map(|worker| worker.engine.as_str()).collect();
        engines.dedup();
        let engines = engines.join(" and ");
        let gso = match socket.segments_max {
            0 | 1 => "off".to_owned(),
            segments => format!("up to {segments}"),
        };
        let (tso, uso, gro) = (on(offload.tso), on(offload.uso), on(socket.gro));
        let (name, external) = (self.device_name(), &self.host.external().name);
        let (mtu_bytes, address, lanes) = (self.mtu_bytes, socket.address, self.team.lanes);
        let (count, priority) = (workers.len(), workers.first().map_or_else(String::new, priority));
        let sources = if self.has_sources { ", source ports" } else { "" };
        format!(
            "{name} mtu {mtu_bytes} over {external} at {address}: engine {engines}, tso {tso}, \
             uso {uso}, gso {gso}, gro {gro}, workers {count} ({priority}), lanes {lanes}{sources}"
        )
    }

    fn device_name(&self) -> &str {
        &self.overlay.desired.device.name
    }

    /// Makes a new TUN device of the old name and new workers; retries until it succeeds.
    async fn rebuild(&mut self, reason: &str) {
        let name = self.device_name().to_owned();
        let why = format!("{name} has to be made again: {reason}");
        warn!("{why}");
        self.reporter.state(|state| (state.is_up, state.wrong) = (false, Some(why)));
        self.ground.send_replace(None);
        let mut logged = LogOnce::default();
        loop {
            sleep(self.pacing.pause(Instant::now())).await;
            let Err(error) = self.try_rebuild(&name).await else { break };
            let text = with_causes(&error);
            let why = format!("{name} cannot be made again: {text}");
            self.reporter.state(|state| state.wrong = Some(why));
            logged.once(&text, |text| error!("cannot make {name} again: {text}; retrying"));
        }
        self.pacing.whole(Instant::now());
        self.log_fallback();
        info!("made again: {}", self.report_up());
    }

    async fn try_rebuild(&mut self, name: &str) -> StartResult {
        // The device exists as long as a worker has a queue of it, and two workers on one socket
        // would reorder flows.
        end_all(&mut self.team.workers);
        self.handover.offer(Offered::Nothing);
        while let Ok(end) = self.ends.try_recv() {
            self.give_up_broken_ring(Some(&end));
        }
        tun_device::remove_held(name).await?;
        let queues = open_queues(name, self.offload, self.worker_count)?;
        tun_device::settle(&queues[0], self.owner, self.is_kept).await?;
        let OverlayDesired { v4, v6, .. } = self.overlay.desired.clone();
        let desired = desired(&queues[0], self.mtu_bytes, v4, v6).await?;
        self.overlay = Overlay::establish(desired).await?;
        self.handover.offer(team::duplicates(&queues, &self.seats));
        self.team = Team::start(queues, &self.seats, &self.orders).map_err(fallback::refusal)?;
        Ok(())
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        // After that nothing carries what the routes bring, and they would be in flanneld's way.
        let OverlayDesired { device, v4, v6, .. } = &self.overlay.desired;
        if self.is_kept && !self.handover.keeps_workers() {
            let v4 = v4.as_ref().map(|v4| limit_address_now(device, v4.address(), LIFE_BETWEEN));
            let v6 = v6.as_ref().map(|v6| limit_address_now(device, v6.address(), LIFE_BETWEEN));
            let limited = [v4, v6].into_iter().flatten().collect::<Result<(), _>>();
            if let Err(error) = limited {
                warn!("{device} stays as it is, with its routes: {error}");
            }
        }
        self.handover.tunnel_ends(std::mem::take(&mut self.team.workers));
    }
}

/// What the senders' addresses have to be.
fn senders(is_strict: bool) -> Senders {
    if is_strict { Senders::Strict } else { Senders::Loose }
}

/// How a worker gets a processor, and why no sooner.
fn priority(worker: &Worker) -> String {
    let why = worker.no_real_time.as_ref().map(|why| format!(", no real time: {why}"));
    worker.priority.clone().unwrap_or_default() + &why.unwrap_or_default()
}
