//! The first plane of a daemon, which may find what a killed predecessor left behind.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::device::{SocketError, Tun, TunnelSocket};
use crate::host::netlink::Netlink;
use crate::host::overlay::{Overlay, OverlayError};

use super::{DEVICE_TEMPLATE, UdpError, UdpSetup, desired, open_queues};

/// How long what is in the way at start may be a killed predecessor's.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(1);

/// Pause between two tries meanwhile.
const LEFTOVER_RETRY: Duration = Duration::from_millis(20);

/// Makes device, address, route and sockets. A killed predecessor's io_uring holds its device and
/// its socket until the kernel has torn the ring down, some time after the process is gone.
pub(super) async fn take_over(
    netlink: &Netlink,
    setup: &UdpSetup,
    mtu_bytes: u16,
    count: NonZeroU16,
) -> Result<(Vec<Tun>, Overlay, Vec<TunnelSocket>), UdpError> {
    let once = async || {
        let queues = open_queues(DEVICE_TEMPLATE, setup, count)?;
        let desired = desired(netlink, &queues[0], setup, mtu_bytes).await?;
        let overlay = Overlay::establish(netlink.clone(), desired).await?;
        let sockets = bind_sockets(setup, setup.external.address, count)?;
        Ok((queues, overlay, sockets))
    };
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
    setup: &UdpSetup,
    address: Ipv4Addr,
    count: NonZeroU16,
) -> Result<Vec<TunnelSocket>, SocketError> {
    let (address, offload) = (SocketAddrV4::new(address, setup.settings.port), setup.offload);
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
