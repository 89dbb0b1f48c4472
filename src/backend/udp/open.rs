//! Opens sockets and devices. The first ones of a daemon in two steps: `reserve` takes what another
//! daemon may have, before anything is written to the store; `configure` configures it. Both may
//! find leftovers of a killed predecessor.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;

use tracing::{info, warn};

use crate::backend::error::{StartError, StartResult};
use crate::backend::queues::patiently;
use crate::backend::setup::{Claim, Setup, addresses};
use crate::backend::team;
use crate::backend_kind::BackendKind;
use crate::config::network::UdpBackendConfig;
use crate::config::options::{DataplaneOptions, FastPathChoice, OffloadChoice};
use crate::control::lease::LeaseAttributes;
use crate::device::{Tun, TunnelSocket, kernel};
use crate::failure::with_causes;
use crate::fast_path::FastPath;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::{overlay_mtu_bytes, tunnel_overhead_bytes, with_room_for_ipv6};
use crate::host::netlink;
use crate::host::overlay::{Overlay, OverlayDesired, OverlayPart, clear_v6};
use crate::route::{Prefixes, SOURCE_PORTS, first_source_port};
use crate::status::{self, SWITCHED_OFF};

use super::families::underlay;
use super::kernel_plane::attachment::{AttachError, Attacher};
use super::kernel_plane::obstacle::off;
use super::owner::Owner;
use super::peers::{announcement, announcement_v6};
use super::tun_device;

/// What the host granted.
#[derive(Debug)]
pub struct UdpReserved {
    pub(super) settings: UdpBackendConfig,
    pub(super) tunnel: TunnelReserved,
    /// The kernel's programs, or why there are none.
    pub(super) fast_path: Result<FastPath, status::FastPath>,
}

/// The port and a device, taken.
#[derive(Debug)]
pub(super) struct TunnelReserved {
    pub(super) owner: Owner,
    has_ipv6: bool,
    pub(super) sockets: Vec<TunnelSocket>,
    pub(super) queues: Vec<Tun>,
    pub(super) mtu_bytes: u16,
    pub(super) worker_count: NonZeroU16,
    /// The requested offloads that can be used.
    pub(super) offload: OffloadChoice,
    /// Whether workers may send from ports of their own.
    pub(super) has_sources: bool,
}

/// Opens the sockets at the workers' own ports. Who gets none sends from the tunnel's.
pub(super) fn open_sources(sockets: &mut [TunnelSocket]) {
    let Some(port) = sockets.first().map(|socket| socket.address.port()) else { return };
    let first = first_source_port(port);
    for error in TunnelSocket::open_sources(sockets, first..first + SOURCE_PORTS) {
        warn!("{}", with_causes(&error));
    }
}

impl UdpReserved {
    /// What the node publishes, its programs included, which run once it has a lease.
    pub(crate) fn attributes(&self, external: &ExternalInterface) -> LeaseAttributes {
        let backend_data = announcement(self.fast_path.is_ok(), self.tunnel.has_sources);
        let backend_v6_data = announcement_v6(self.tunnel.has_ipv6);
        let own = addresses(BackendKind::Udp, external);
        LeaseAttributes { backend_data, backend_v6_data, ..own }
    }
}

/// Takes the port and a device, and makes sure that the route is free. The port comes first:
/// whoever has it also owns the route, which must not be removed then.
pub(crate) async fn reserve(
    settings: &UdpBackendConfig,
    claim: Claim<'_>,
) -> StartResult<UdpReserved> {
    let Claim { external, networks, previous_subnet, dataplane, handover, .. } = claim;
    let is_over_ipv6 = networks.v4().is_none();
    let outer = underlay(external, is_over_ipv6);
    let outer = outer.ok_or(StartError::NoUnderlay)?;
    let DataplaneOptions { mut offload, workers, fast_path, .. } = dataplane;
    let is_kept = dataplane.keep_tunnel;
    let overhead_bytes = tunnel_overhead_bytes(outer);
    let mtu_bytes = overlay_mtu_bytes(external.mtu_bytes, overhead_bytes, settings.mtu_bytes)?;
    let has_ipv6 = networks.v6().is_some();
    let mtu_bytes = with_room_for_ipv6(has_ipv6, mtu_bytes, external.mtu_bytes, overhead_bytes)?;
    offload.gso &= !avoids_gso(offload, &kernel::release());
    let worker_count = team::count(workers);
    let has_sources = !dataplane.has_one_source_port && worker_count.get() > 1;
    let address = SocketAddr::new(outer, settings.port);
    let owner = Owner { port: settings.port, network: networks.first() };
    let inherited = tun_device::inherit(handover, owner, address, offload, worker_count).await?;
    let checked = async |(sockets, queues): (Vec<TunnelSocket>, Vec<Tun>)| {
        let v4 = networks.v4().map(|network| OverlayPart::of(network, previous_subnet));
        let v6 = networks.v6().map(|network| OverlayPart::of(network, None));
        Overlay::check(&desired(&queues[0], mtu_bytes, v4, v6).await?).await?;
        Ok(TunnelReserved {
            owner,
            has_ipv6,
            sockets,
            queues,
            mtu_bytes,
            worker_count,
            offload,
            has_sources,
        })
    };
    let once = async || {
        let sockets = TunnelSocket::bind_group(address, offload.gso, offload.gro, worker_count)?;
        let queues = tun_device::open(owner, offload, worker_count).await?;
        checked((sockets, queues)).await
    };
    let mut tunnel = match inherited {
        Some(tunnel) => checked(tunnel).await?,
        None => patiently(once, StartError::is_perhaps_leftover).await?,
    };
    if has_sources {
        open_sources(&mut tunnel.sockets);
    }
    let device = netlink::link_just_made(&tunnel.queues[0].name).await?.id.index;
    let load = async || {
        let fast_path = FastPath::load()?;
        let attacher = Attacher { fast_path: &fast_path, owner, is_kept };
        attacher.probe(device).await?;
        Ok::<_, AttachError>(fast_path)
    };
    // They take nothing yet.
    let fast_path = match fast_path {
        FastPathChoice::Off => Err(off(SWITCHED_OFF, "--fast-path=off".to_owned())),
        FastPathChoice::On if is_over_ipv6 => return Err(StartError::NoFastPath),
        FastPathChoice::Auto if is_over_ipv6 => {
            Err(off("ipv6-underlay", StartError::NoFastPath.to_string()))
        }
        FastPathChoice::On => Ok(load().await?),
        FastPathChoice::Auto => load().await.map_err(|error| {
            let reason = with_causes(&*error);
            info!("workers carry all packets, without the kernel's fast path: {reason}");
            off("not-loaded", reason)
        }),
    };
    Ok(UdpReserved { settings: *settings, tunnel, fast_path })
}

/// Gives the device its addresses and the routes.
pub(super) async fn configure(setup: &Setup, mtu_bytes: u16, tun: &Tun) -> StartResult<Overlay> {
    let (v4, v6) = parts(setup);
    let desired = desired(tun, mtu_bytes, v4, v6).await?;
    let former_v6 = setup.former_networks.and_then(Prefixes::v6);
    if let (None, Some(former)) = (&desired.v6, former_v6) {
        clear_v6(&desired.device, former).await?;
    }
    let check = async || Ok(Overlay::check(&desired).await?);
    patiently(check, StartError::is_perhaps_leftover).await?;
    Ok(Overlay::establish(desired).await?)
}

/// What the device has of each family.
fn parts(setup: &Setup) -> (Option<OverlayPart<Ipv4Addr>>, Option<OverlayPart<Ipv6Addr>>) {
    let Setup { networks, subnets, former_networks, .. } = setup;
    let v4 = networks.v4().map(|network| OverlayPart::of(network, subnets.v4()));
    let former_network = former_networks.and_then(Prefixes::v4);
    let v4 = v4.map(|v4| OverlayPart { former_network, ..v4 });
    let v6 = networks.v6().map(|network| OverlayPart::of(network, subnets.v6()));
    let former_network = former_networks.and_then(Prefixes::v6);
    (v4, v6.map(|v6| OverlayPart { former_network, ..v6 }))
}

/// Whether GSO stays off: the kernel mangles its datagrams, and the operator did not ask for it.
fn avoids_gso(offload: OffloadChoice, release: &str) -> bool {
    let avoids = offload.automatic && offload.gso && kernel::mangles_gso(release);
    if avoids {
        warn!(
            "UDP segmentation is off: kernel {release} mangles segmented datagrams (7.0 to 7.1.4); \
             a newer kernel sends several times as fast, --offload=tso,uso,gso,gro insists"
        );
    }
    avoids
}

/// The state that a new device must have.
pub(super) async fn desired(
    tun: &Tun,
    mtu_bytes: u16,
    v4: Option<OverlayPart<Ipv4Addr>>,
    v6: Option<OverlayPart<Ipv6Addr>>,
) -> StartResult<OverlayDesired> {
    let device = netlink::link_just_made(&tun.name).await?.id;
    Ok(OverlayDesired { device, mtu_bytes, v4, v6 })
}
