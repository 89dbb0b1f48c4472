//! The first plane of a daemon, in two steps: `reserve` takes what another daemon may have, before
//! anything is written to the store; `take_over` makes the rest. Both may find what a killed
//! predecessor left behind.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::backend::network::Claim;
use crate::config::network::UdpBackendConfig;
use crate::config::options::OffloadChoice;
use crate::device::{SocketError, Tun, TunnelSocket, kernel};
use crate::host::mtu::overlay_mtu_bytes;
use crate::host::netlink::Netlink;
use crate::host::overlay::{Overlay, OverlayError};

use super::{DEVICE_TEMPLATE, UdpError, UdpSetup, desired, leave_trains_out, open_queues, team};

/// How long what is in the way at start may be a killed predecessor's.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(1);

/// Pause between two tries meanwhile.
const LEFTOVER_RETRY: Duration = Duration::from_millis(20);

/// The port and a device, held.
#[derive(Debug)]
pub struct UdpReserved {
    pub(super) sockets: Vec<TunnelSocket>,
    pub(super) queues: Vec<Tun>,
    pub(super) mtu_bytes: u16,
    pub(super) worker_count: NonZeroU16,
    /// What is left of the offloads that were asked for.
    pub(super) offload: OffloadChoice,
}

/// Takes the port and a device, and makes sure that the route is to be had. The port comes first:
/// whoever has it also owns the route, which is not to be removed then.
pub(crate) async fn reserve(
    settings: &UdpBackendConfig,
    claim: Claim<'_>,
) -> Result<UdpReserved, UdpError> {
    let Claim { external, network, previous_subnet, mut offload, workers } = claim;
    let mtu_bytes = overlay_mtu_bytes(external.mtu_bytes, settings.mtu_bytes)?;
    offload.gso &= !leave_trains_out(offload, &kernel::release());
    let worker_count = team::count(workers);
    let netlink = Netlink::open()?;
    let address = SocketAddrV4::new(external.address, settings.port);
    let once = async || {
        let sockets = bind_sockets(address, offload, worker_count)?;
        let queues = open_queues(DEVICE_TEMPLATE, offload, worker_count)?;
        let desired = desired(&netlink, &queues[0], network, previous_subnet, mtu_bytes).await?;
        Overlay::check(&netlink, &desired).await?;
        Ok(UdpReserved { sockets, queues, mtu_bytes, worker_count, offload })
    };
    patiently(once).await
}

/// Gives the device its address and the route.
pub(super) async fn take_over(
    netlink: &Netlink,
    setup: &UdpSetup,
    mtu_bytes: u16,
    tun: &Tun,
) -> Result<Overlay, UdpError> {
    let desired = desired(netlink, tun, setup.network, Some(setup.subnet), mtu_bytes).await?;
    patiently(async || Ok(Overlay::establish(netlink.clone(), desired.clone()).await?)).await
}

/// Tries for as long as a killed predecessor may be in the way: its io_uring holds its device and
/// its socket until the kernel has torn the ring down, some time after the process is gone.
async fn patiently<T>(once: impl AsyncFn() -> Result<T, UdpError>) -> Result<T, UdpError> {
    let give_up = Instant::now() + LEFTOVER_PATIENCE;
    loop {
        match once().await {
            Err(error) if is_perhaps_leftover(&error) && Instant::now() < give_up => {
                sleep(LEFTOVER_RETRY).await;
            }
            made => return made,
        }
    }
}

/// Binds one socket for each worker to `address`, which is the external interface's.
pub(super) fn bind_sockets(
    address: SocketAddrV4,
    offload: OffloadChoice,
    count: NonZeroU16,
) -> Result<Vec<TunnelSocket>, SocketError> {
    TunnelSocket::bind_group(address, offload.gso, offload.gro, count)
}

/// Whether a predecessor's device or socket may be in the way.
fn is_perhaps_leftover(error: &UdpError) -> bool {
    match error {
        UdpError::Overlay(OverlayError::ForeignRoute { .. }) => true,
        UdpError::Socket(error) => error.is_address_in_use(),
        UdpError::Overlay(OverlayError::DeviceGone(_) | OverlayError::Netlink(_))
        | UdpError::Mtu(_)
        | UdpError::Tun(_)
        | UdpError::Netlink(_)
        | UdpError::Worker(_)
        | UdpError::Ring { .. } => false,
    }
}
