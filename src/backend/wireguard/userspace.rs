//! WireGuard in this process, for hosts whose kernel has none: a TUN device of the same name,
//! workers that seal and open, and a thread for the handshakes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::backend::queues::{open_queues, patiently};
use crate::backend::team::{self, Orders, Seat, Team};
use crate::config::options::DataplaneOptions;
use crate::device::{SocketError, Tun, TunError, TunnelSocket};
use crate::engine::{Cipher, SpawnError, WorkerEnd, end_all};
use crate::failure::lock;
use crate::forward::{LeasedFamilies, Senders};
use crate::host::netlink::wireguard::FoundDevice;
use crate::host::netlink::{self, NetlinkError};
use crate::host::state::Link;
use crate::route::{Families, Prefixes};
use crate::stats::WorkerStats;
use crate::status::{Handshakes, Worker};
use crate::wireguard::difference::PeerEdit;
use crate::wireguard::interface::Counts;
use crate::wireguard::keys::PrivateKey;

use super::handshakes::{self, Shared};
use super::plan::{Plan, Underlay};
use super::uapi::Uapi;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum UserspaceError {
    /// No TUN device.
    #[error("no TUN device for WireGuard in userspace")]
    Tun(#[from] TunError),
    /// No socket.
    #[error("no socket for WireGuard in userspace")]
    Socket(#[from] SocketError),
    /// No worker.
    #[error("cannot start the packet workers of WireGuard in userspace")]
    Worker(#[from] SpawnError),
    /// No thread.
    #[error("cannot start the thread for WireGuard's handshakes")]
    Thread(#[source] std::io::Error),
    /// It sends over one family of addresses.
    #[error(
        "WireGuard in userspace has one family of addresses outside: set Backend.Mode to separate, \
         ipv4 or ipv6, or have the kernel run it (`modprobe wireguard`)"
    )]
    EitherFamily,
    /// Its name is taken.
    #[error("{0} is there and is no WireGuard device: remove or rename it (`ip link del {0}`)")]
    Foreign(&'static str),
    /// The kernel said no.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

impl UserspaceError {
    /// Whether a device of the name, or its port, may be a predecessor's that has just ended.
    fn is_perhaps_leftover(&self) -> bool {
        let has_port = matches!(self, Self::Socket(error) if error.is_address_in_use());
        has_port || matches!(self, Self::Foreign(_) | Self::Tun(TunError::Taken(_)))
    }
}

/// All devices that run in this process.
pub(super) struct Userspace {
    options: DataplaneOptions,
    /// The networks and the own subnets, once there is a lease.
    leased: OnceLock<(Prefixes, Prefixes)>,
    devices: Mutex<BTreeMap<&'static str, Device>>,
    /// What workers count, which outlives a device that is made again.
    stats: Mutex<BTreeMap<&'static str, Vec<Arc<WorkerStats>>>>,
}

/// One of them.
struct Device {
    /// Its index: another one of its name has another.
    index: u32,
    shared: Arc<Shared>,
    mtu_bytes: Arc<AtomicU16>,
    seats: Vec<Seat>,
    /// Before there are workers.
    queues: Vec<Tun>,
    running: Option<Running>,
}

/// What carries its packets.
struct Running {
    team: Team,
    ends: mpsc::UnboundedReceiver<WorkerEnd>,
    handshakes: handshakes::Handshakes,
}

impl std::fmt::Debug for Userspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Userspace").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Userspace {
    /// None yet.
    pub(super) fn new(options: DataplaneOptions) -> Self {
        let (devices, stats) = (Mutex::default(), Mutex::default());
        Self { options, leased: OnceLock::new(), devices, stats }
    }

    /// From here on devices carry packets: the overlay is `networks`, and this host has `subnets`.
    pub(super) fn begin(&self, networks: Prefixes, subnets: Prefixes) {
        // It stays the same for as long as this runs.
        self.leased.set((networks, subnets)).ok();
    }

    /// What the device of this name has; nothing if it is not there.
    pub(super) fn read(&self, name: &str) -> FoundDevice {
        lock(&self.devices).get(name).map(Device::found).unwrap_or_default()
    }

    /// What the workers of all devices count.
    pub(super) fn stats(&self) -> Vec<Arc<WorkerStats>> {
        lock(&self.stats).values().flatten().cloned().collect()
    }

    /// What became of all handshakes since the devices were made.
    pub(super) fn handshakes(&self) -> Handshakes {
        let mut all = Handshakes::default();
        for device in lock(&self.devices).values() {
            let Counts { completed, refused, replayed, cookies, limited, expired_packets } =
                device.shared.counts();
            let shed = device.seats.iter().map(|seat| seat.stats.handshakes_shed.get()).sum();
            all += Handshakes {
                completed,
                refused,
                replayed,
                cookies,
                limited,
                shed,
                expired_packets,
            };
        }
        all
    }

    /// What those workers are, in the same order.
    pub(super) fn workers(&self) -> Vec<Worker> {
        let devices = lock(&self.devices);
        let running = devices.values().filter_map(|device| device.running.as_ref());
        let workers = running.flat_map(|running| running.team.state());
        (0..).zip(workers).map(|(index, worker)| Worker { index, ..worker }).collect()
    }

    /// Makes the edits.
    pub(super) fn edit_peers(&self, name: &str, edits: &[PeerEdit]) {
        if let Some(device) = lock(&self.devices).get(name) {
            device.shared.edit(edits);
            device.running.iter().for_each(|running| running.handshakes.call());
        }
    }

    /// Makes sure that the device is there and carries packets, once there is a lease. Gives what
    /// it has, and whether it is new.
    pub(super) async fn ensure(
        &self,
        plan: &Plan,
        key: &PrivateKey,
        mtu_bytes: u32,
    ) -> Result<(Link, FoundDevice, bool), UserspaceError> {
        let found = netlink::link_named(plan.name).await?;
        let index = found.as_ref().map(|link| link.id.index);
        let is_alive = |device: &mut Device| Some(device.index) == index && !device.has_ended();
        let known = lock(&self.devices).remove(plan.name);
        let known = known.and_then(|mut device| is_alive(&mut device).then_some(device));
        let is_new = known.is_none();
        let mut device = match known {
            Some(device) => device,
            None => patiently(|| self.open(plan, key), UserspaceError::is_perhaps_leftover).await?,
        };
        // It fits 16 bits, as every packet's length does.
        let mtu_bytes = u16::try_from(mtu_bytes).unwrap_or(u16::MAX);
        device.mtu_bytes.store(mtu_bytes, Ordering::Relaxed);
        if device.running.is_none()
            && let Some(leased) = self.leased.get().and_then(|all| leased(*all, plan))
        {
            device.start(&self.options, leased)?;
        }
        let found = device.found();
        // It stays, whatever the kernel says now.
        lock(&self.devices).insert(plan.name, device);
        let link = netlink::link_just_made(plan.name).await?;
        if !link.is_up {
            netlink::set_up(&link.id).await?;
        }
        Ok((link, found, is_new))
    }

    async fn open(&self, plan: &Plan, key: &PrivateKey) -> Result<Device, UserspaceError> {
        let Plan { name, port, underlay, .. } = *plan;
        match netlink::link_named(name).await? {
            // The kernel's, of an earlier run.
            Some(link) if link.is_wireguard => {
                netlink::unless_gone(netlink::remove_link(&link.id).await)?;
                info!("removed {}, which the kernel had: WireGuard runs in weftd now", link.id);
            }
            Some(_) => return Err(UserspaceError::Foreign(name)),
            None => {}
        }
        let any = match underlay {
            Underlay::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Underlay::V6 => Ipv6Addr::UNSPECIFIED.into(),
            Underlay::Either => return Err(UserspaceError::EitherFamily),
        };
        let (offload, count) = (self.options.offload, team::count(self.options.workers));
        let address = SocketAddr::new(any, port);
        let sockets = TunnelSocket::bind_group(address, offload.gso, offload.gro, count)?;
        let queues = open_queues(name, offload, count)?;
        let index = netlink::link_just_made(name).await?.id.index;
        let mut stats = lock(&self.stats);
        let stats = stats.entry(name).or_default();
        stats.resize_with(sockets.len(), Arc::default);
        let seat = |(socket, stats): (_, &Arc<_>)| Seat {
            socket: Arc::new(socket),
            stats: Arc::clone(stats),
        };
        let (shared, mtu_bytes) = (Arc::new(Shared::new(key.clone())), Arc::default());
        let seats = sockets.into_iter().zip(&*stats).map(seat).collect();
        Ok(Device { index, shared, mtu_bytes, seats, queues, running: None })
    }
}

impl Device {
    fn found(&self) -> FoundDevice {
        let port = self.seats.first().map(|seat| seat.socket.address.port());
        let (public_key, peers) = self.shared.found();
        FoundDevice { public_key: Some(public_key), listen_port: port.unwrap_or_default(), peers }
    }

    /// Whether it lost a worker, or never had what it needs.
    fn has_ended(&mut self) -> bool {
        let end = self.running.as_mut().and_then(|running| running.ends.try_recv().ok());
        let has_ended = end.is_some();
        if has_ended {
            warn!("WireGuard has to be set up again: {}", team::end_reason(end));
        }
        has_ended
    }

    fn start(
        &mut self,
        options: &DataplaneOptions,
        leased: LeasedFamilies,
    ) -> Result<(), UserspaceError> {
        let Some(first) = self.seats.first() else { return Ok(()) };
        let (handshakes, events) =
            handshakes::Handshakes::spawn(Arc::clone(&self.shared), Arc::clone(&first.socket))
                .map_err(UserspaceError::Thread)?;
        let (ends_sender, ends) = mpsc::unbounded_channel();
        let orders = Orders {
            leased,
            mtu_bytes: Arc::clone(&self.mtu_bytes),
            whole_bytes: Arc::clone(&self.mtu_bytes),
            engine: team::settle_engine(options.engine),
            comes_first: !options.workers_are_ordinary,
            senders: Senders::Proven,
            routes: self.shared.routes.clone(),
            cipher: Some(Cipher { sessions: self.shared.sessions.clone(), events }),
            ends: ends_sender,
        };
        let team = Team::start(std::mem::take(&mut self.queues), &self.seats, &orders)?;
        self.running = Some(Running { team, ends, handshakes });
        Ok(())
    }
}

/// The sockets by which `wg show` reads them.
#[derive(Debug, Default)]
pub(super) struct Uapis(Vec<(&'static str, Uapi, Arc<Userspace>)>);

impl Uapis {
    /// Of the devices of these names.
    pub(super) fn open(userspace: &Arc<Userspace>, names: &[&'static str]) -> Self {
        let open = |name: &&'static str| Some((*name, Uapi::open(name)?, Arc::clone(userspace)));
        Self(names.iter().filter_map(open).collect())
    }

    /// Answers who asks. Cancel-safe.
    pub(super) async fn serve(&self) -> Infallible {
        let Self(all) = self;
        let each = all.iter().map(|(name, uapi, userspace)| uapi.serve(|| userspace.read(name)));
        join_all(each).await;
        pending().await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        end_all(&mut self.team.workers);
    }
}

/// What this host has of the families that the device carries.
fn leased((networks, subnets): (Prefixes, Prefixes), plan: &Plan) -> Option<LeasedFamilies> {
    let all = team::leased(networks, subnets)?;
    let (v4, v6) = (plan.families.v4(), plan.families.v6());
    Families::new(all.v4().filter(|_| v4.is_some()), all.v6().filter(|_| v6.is_some()))
}
