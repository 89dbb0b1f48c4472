//! The udp backend: a TUN device, tunnel sockets, workers between them, and a route table made of
//! the other nodes' leases. Keeps all four alive: what breaks is made again.

mod fallback;
mod pacing;
mod paths;
mod peers;
mod prober;
mod take_over;
mod team;
mod underlay;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::time::Instant;

use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::backend::address::NextAddress;
use crate::backend::status::{Carrier, PlaneState, View};
use crate::config::network::UdpBackendConfig;
use crate::config::options::{EngineChoice, InterfaceOptions, OffloadChoice};
use crate::control::lease::{LeaseAttributes, Peers};
use crate::device::{SocketError, Tun, TunError, TunOffload, kernel};
use crate::engine::{Engine, RingError, SpawnError, WorkerEnd};
use crate::failure::with_causes;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::MtuError;
use crate::host::netlink::{Events, Netlink, NetlinkError};
use crate::host::overlay::{Overlay, OverlayDesired, OverlayError, TRANSMIT_QUEUE_LENGTH};
use crate::host::state::LinkId;
use crate::host::underlay::{Change, Underlay, UnderlayWatch};
use crate::route::{Prefix, Published, Table};

use self::pacing::Pacing;
use self::peers::PeerSet;
use self::prober::Prober;
use self::take_over::take_over;
use self::team::{Orders, Seat, Team};

pub use self::take_over::UdpReserved;
pub(super) use self::take_over::reserve;
pub use self::team::WorkerState;

/// flannel's name for the device; the kernel puts the first free number in.
const DEVICE_TEMPLATE: &str = "flannel%d";

/// The backend could not start.
#[derive(Debug, thiserror::Error)]
pub enum UdpError {
    /// The interface leaves no sensible overlay MTU.
    #[error("no usable overlay MTU")]
    Mtu(#[from] MtuError),
    /// No TUN device.
    #[error("no TUN device")]
    Tun(#[from] TunError),
    /// No socket.
    #[error("no tunnel socket")]
    Socket(#[from] SocketError),
    /// Address or route refused.
    #[error("cannot configure the TUN device")]
    Overlay(#[from] OverlayError),
    /// The host's network state can't be read.
    #[error("cannot talk to the kernel about its network")]
    Netlink(#[from] NetlinkError),
    /// No thread.
    #[error("cannot start the packet worker")]
    Worker(#[source] SpawnError),
    /// io_uring was asked for and can't be had.
    #[error("cannot use io_uring, as --engine=io_uring asks; {cure}, or choose --engine=auto")]
    Ring {
        /// What to do about it.
        cure: String,
        /// What the kernel lacks or refused.
        source: RingError,
    },
}

impl UdpError {
    /// Whether another connection to the kernel may help.
    fn is_connection_lost(&self) -> bool {
        match self {
            Self::Netlink(error) | Self::Overlay(OverlayError::Netlink(error)) => {
                error.is_connection_lost()
            }
            Self::Overlay(OverlayError::DeviceGone(_) | OverlayError::ForeignRoute { .. })
            | Self::Mtu(_)
            | Self::Tun(_)
            | Self::Socket(_)
            | Self::Worker(_)
            | Self::Ring { .. } => false,
        }
    }
}

/// What the backend is made for.
#[derive(Debug, Clone)]
pub struct UdpSetup {
    /// The interface that carries the tunnel.
    pub external: ExternalInterface,
    /// How it was found, to find its next address.
    pub interface: InterfaceOptions,
    /// Whether the tunnel follows that.
    pub follow_address: bool,
    /// The backend's own settings.
    pub settings: UdpBackendConfig,
    /// The whole overlay.
    pub network: Prefix,
    /// This host's lease.
    pub subnet: Prefix,
    /// Offloads that may be used.
    pub offload: OffloadChoice,
    /// The engine that moves the packets.
    pub engine: EngineChoice,
}

/// A running udp backend.
pub struct UdpNetwork {
    keeper: Keeper,
    follower: Follower,
}

/// The routes, which follow the leases.
struct Follower {
    port: u16,
    routes: Published,
    peers: PeerSet,
}

/// Everything that packets go through, made again when it breaks.
struct Keeper {
    setup: UdpSetup,
    mtu_bytes: u16,
    /// The same for the workers.
    workers_mtu_bytes: Arc<AtomicU16>,
    netlink: Netlink,
    events: Events,
    underlay: UnderlayWatch,
    prober: Prober,
    /// The underlay that the MTU was made for; `setup.external` is ahead of it after a move.
    known: Underlay,
    worker_count: NonZeroU16,
    /// One for each worker.
    seats: Vec<Seat>,
    routes: Published,
    plane: Plane,
    ends_sender: mpsc::UnboundedSender<WorkerEnd>,
    ends: mpsc::UnboundedReceiver<WorkerEnd>,
    pacing: Pacing,
    state: watch::Sender<PlaneState>,
    /// What this node says of itself.
    attributes: watch::Sender<LeaseAttributes>,
    next_address: NextAddress,
    /// Why io_uring is not used, as the log has it.
    fallback_told: Option<String>,
}

/// What goes and comes with the TUN device.
struct Plane {
    overlay: Overlay,
    team: Team,
    offload: TunOffload,
}

impl UdpNetwork {
    /// Makes address, route and workers for what is reserved.
    pub async fn start(mut setup: UdpSetup, reserved: UdpReserved) -> Result<Self, UdpError> {
        let UdpReserved { sockets, queues, mtu_bytes, worker_count, offload } = reserved;
        setup.offload = offload;
        setup.engine = team::settle_engine(setup.engine);
        let netlink = Netlink::open()?;
        let events = Netlink::events()?.only_about(&[setup.network]);
        let underlay = UnderlayWatch::new(netlink.clone(), setup.external.address)?;
        let known = setup.external.underlay();
        let next_address = NextAddress::new(&setup.interface, setup.follow_address);
        let overlay = take_over(&netlink, &setup, mtu_bytes, &queues[0]).await?;
        let seat = |socket| Seat { socket: Arc::new(socket), stats: Arc::default() };
        let seats: Vec<Seat> = sockets.into_iter().map(seat).collect();
        let routes = Published::new(Table::provisional());
        let (ends_sender, ends) = mpsc::unbounded_channel();
        let tun_offload = queues[0].offload();
        let workers_mtu_bytes = Arc::new(AtomicU16::new(mtu_bytes));
        let orders = orders(&setup, &workers_mtu_bytes, &routes, &ends_sender);
        let team = Team::start(queues, &seats, &orders).map_err(fallback::refusal)?;
        let plane = Plane { overlay, team, offload: tun_offload };
        let prober = Prober::open(setup.subnet.network(), mtu_bytes);
        let follower = Follower {
            port: setup.settings.port,
            routes: routes.clone(),
            peers: PeerSet::default(),
        };
        let public_address = setup.external.public_address;
        let mut keeper = Keeper {
            setup,
            mtu_bytes,
            workers_mtu_bytes,
            netlink,
            events,
            underlay,
            prober,
            known,
            worker_count,
            seats,
            routes,
            plane,
            ends_sender,
            ends,
            pacing: Pacing::new(Instant::now()),
            state: watch::Sender::new(PlaneState {
                is_up: false,
                description: String::new(),
                interface: String::new(),
                mtu_bytes: mtu_bytes.into(),
                public_address,
                workers: Vec::new(),
            }),
            attributes: watch::Sender::new(LeaseAttributes::udp(public_address)),
            next_address,
            fallback_told: None,
        };
        keeper.tell_of_fallback();
        info!("{}", keeper.tell_is_up());
        Ok(Self { keeper, follower })
    }

    pub(super) fn view(&self) -> View {
        let Self { keeper, follower } = self;
        // The counters outlive a rebuilt device.
        let stats = keeper.seats.iter().map(|seat| Arc::clone(&seat.stats)).collect();
        View {
            state: keeper.state.subscribe(),
            attributes: keeper.attributes.subscribe(),
            carrier: Carrier::Workers { stats, routes: follower.routes.clone() },
        }
    }

    /// Follows the leases, and makes again what breaks; neither waits for the other. Runs until it
    /// is dropped, which stops the workers and removes the device.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let Self { keeper, follower } = self;
        tokio::select! {
            never = follower.follow(leases) => never,
            never = keeper.keep() => never,
        }
    }
}

impl Follower {
    async fn follow(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        while leases.changed().await.is_ok() {
            let peers = Arc::clone(&leases.borrow_and_update());
            self.peers.update(&peers, self.port);
            self.routes.publish(self.peers.table());
        }
        // The control plane has ended; routes stay as they were.
        std::future::pending().await
    }
}

impl Keeper {
    async fn keep(&mut self) -> Infallible {
        loop {
            tokio::select! {
                end = self.ends.recv() => {
                    self.give_up_broken_ring(end.as_ref());
                    self.rebuild(&team::end_reason(end)).await;
                }
                error = self.plane.overlay.hold(&mut self.events) => match error {
                    OverlayError::DeviceGone(device) => {
                        self.rebuild(&format!("device {device} was deleted")).await;
                    }
                    OverlayError::ForeignRoute { .. } | OverlayError::Netlink(_) => {
                        self.listen_again(&error).await;
                    }
                },
                changed = self.underlay.changed(&self.known) => match changed {
                    Ok(Change::Link(underlay)) => self.follow(underlay).await,
                    Ok(Change::Away) => self.look_for_address().await,
                    Err(error) => self.listen_again(&error.into()).await,
                },
                () = self.prober.changed(&self.seats, &self.routes) => self.follow_paths().await,
            }
        }
    }

    /// Logs why io_uring is not used, once for each reason.
    fn tell_of_fallback(&mut self) {
        let text = self.plane.team.fallback().map(fallback::report);
        if let Some(text) = text.as_ref().filter(|_| text != self.fallback_told) {
            warn!("{text}");
        }
        self.fallback_told = text;
    }

    /// A ring that failed once would fail again; mmsg takes its place, where that is allowed.
    fn give_up_broken_ring(&mut self, end: Option<&WorkerEnd>) {
        let Some(WorkerEnd::WaitFailed(error)) = end else { return };
        let had_ring =
            self.plane.team.state().iter().any(|worker| worker.engine == Engine::IoUring);
        if had_ring && self.setup.engine == EngineChoice::Auto {
            warn!("{}", fallback::report_broken(error));
            self.setup.engine = EngineChoice::Mmsg;
        }
    }

    /// Tells that packets can flow, and how, in the words for the log.
    fn tell_is_up(&self) -> String {
        let workers = self.plane.team.state();
        let description = self.describe(&workers);
        let told = description.clone();
        let mtu_bytes = u32::from(self.mtu_bytes);
        let public_address = self.setup.external.public_address;
        let is_up = true;
        let interface = self.setup.external.name.clone();
        let state =
            PlaneState { is_up, description, interface, mtu_bytes, public_address, workers };
        self.state.send_replace(state);
        told
    }

    fn describe(&self, workers: &[WorkerState]) -> String {
        let on = |on| if on { "on" } else { "off" };
        let socket = &self.seats[0].socket;
        // A host that is short of something may give it to some workers only.
        let mut engines: Vec<_> = workers.iter().map(|worker| worker.engine.to_string()).collect();
        engines.dedup();
        format!(
            "{} mtu {} over {} at {}: engine {}, tso {}, uso {}, gso {}, gro {}, workers {}",
            self.device_name(),
            self.mtu_bytes,
            self.setup.external.name,
            socket.address(),
            engines.join(" and "),
            on(self.plane.offload.tso),
            on(self.plane.offload.uso),
            match socket.segments_max() {
                0 | 1 => "off".to_owned(),
                segments => format!("up to {segments}"),
            },
            on(socket.gro()),
            workers.len(),
        )
    }

    fn device_name(&self) -> &str {
        &self.plane.overlay.desired().device.name
    }

    /// Makes a new TUN device of the old name and new workers, for as long as it takes.
    async fn rebuild(&mut self, reason: &str) {
        let name = self.device_name().to_owned();
        warn!("{name} has to be made again: {reason}");
        self.state.send_modify(|state| state.is_up = false);
        let mut told = String::new();
        loop {
            sleep(self.pacing.pause(Instant::now())).await;
            let Err(error) = self.try_rebuild(&name).await else { break };
            let text = with_causes(&error);
            if text != told {
                error!("cannot make {name} again: {text}; trying on");
                told = text;
            }
            if error.is_connection_lost() {
                self.reopen_netlink();
            }
        }
        self.pacing.whole(Instant::now());
        self.tell_of_fallback();
        info!("made again: {}", self.tell_is_up());
    }

    async fn try_rebuild(&mut self, name: &str) -> Result<(), UdpError> {
        // A device stays while any worker has a queue of it, and two workers on one socket would
        // reorder flows.
        self.plane.team.end();
        while let Ok(end) = self.ends.try_recv() {
            self.give_up_broken_ring(Some(&end));
        }
        let queues = open_queues(name, self.setup.offload, self.worker_count)?;
        let (network, subnet) = (self.setup.network, Some(self.setup.subnet));
        let mut desired =
            desired(&self.netlink, &queues[0], network, subnet, self.mtu_bytes).await?;
        desired.path_mtus.clone_from(self.prober.limits());
        let overlay = Overlay::establish_again(self.netlink.clone(), desired).await?;
        let offload = queues[0].offload();
        let orders = orders(&self.setup, &self.workers_mtu_bytes, &self.routes, &self.ends_sender);
        let team = Team::start(queues, &self.seats, &orders).map_err(fallback::refusal)?;
        self.plane = Plane { overlay, team, offload };
        Ok(())
    }

    async fn listen_again(&mut self, error: &OverlayError) {
        warn!(
            "lost touch with the kernel's network state, opening it again: {}",
            with_causes(error)
        );
        sleep(self.pacing.pause(Instant::now())).await;
        if self.reopen_netlink() {
            self.pacing.whole(Instant::now());
        }
    }
}

/// Whether trains are left out because nobody asked for them on a kernel that mangles them.
fn leave_trains_out(offload: OffloadChoice, release: &str) -> bool {
    let leave_out = offload.automatic && offload.gso && kernel::mangles_gso(release);
    if leave_out {
        warn!(
            "UDP segmentation is off: kernel {release} mangles segmented datagrams (7.0 to 7.1.4); \
             a newer kernel sends several times as fast, --offload=tso,uso,gso,gro insists"
        );
    }
    leave_out
}

/// Opens one queue for each worker; never none.
fn open_queues(
    name: &str,
    offload: OffloadChoice,
    count: NonZeroU16,
) -> Result<Vec<Tun>, TunError> {
    let wanted = TunOffload { tso: offload.tso, uso: offload.uso };
    let queues = Tun::open(name, wanted, count)?;
    if count.get() > 1
        && let Err(error) = queues[0].steer_by_flow()
    {
        warn!(
            "cannot fix flows to workers, a few packets may overtake each other now and then: \
             {error}; grant CAP_BPF, or run with --workers=1"
        );
    }
    Ok(queues)
}

fn orders<'a>(
    setup: &UdpSetup,
    mtu_bytes: &'a Arc<AtomicU16>,
    routes: &'a Published,
    ends: &'a mpsc::UnboundedSender<WorkerEnd>,
) -> Orders<'a> {
    let (network, subnet, engine) = (setup.network, setup.subnet, setup.engine);
    Orders { network, subnet, mtu_bytes, engine, routes, ends }
}

/// What the kernel shall make of a new device.
async fn desired(
    netlink: &Netlink,
    tun: &Tun,
    network: Prefix,
    subnet: Option<Prefix>,
    mtu_bytes: u16,
) -> Result<OverlayDesired, UdpError> {
    let Some(link) = netlink.link_named(tun.name()).await? else {
        let device = LinkId { index: 0, name: tun.name().to_owned() };
        return Err(OverlayError::DeviceGone(device).into());
    };
    Ok(OverlayDesired {
        device: link.id,
        address: subnet.unwrap_or(network).network(),
        mtu_bytes,
        network,
        subnet,
        transmit_queue_length: TRANSMIT_QUEUE_LENGTH,
        path_mtus: BTreeMap::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_died_is_one_to_replace() {
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // The connection's task dies with the runtime that it was opened on.
        let first = runtime();
        let netlink = first.block_on(async { Netlink::open().unwrap() });
        drop(first);
        let error = runtime().block_on(netlink.link_named("lo")).unwrap_err();
        assert!(UdpError::from(error).is_connection_lost());
        let error = runtime().block_on(netlink.links()).unwrap_err();
        assert!(UdpError::from(OverlayError::from(error)).is_connection_lost());
        let gone = LinkId { index: 7, name: "flannel0".to_owned() };
        assert!(!UdpError::from(OverlayError::DeviceGone(gone)).is_connection_lost());
    }
}
