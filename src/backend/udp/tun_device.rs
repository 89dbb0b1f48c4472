//! The TUN device. With `--keep-tunnel` it outlives weftd, so that routes and the kernel's programs
//! go on without it; the next weftd of the same port knows it by its alias, and goes on with it.

use std::fmt;
use std::io;
use std::num::NonZeroU16;

use rustix::io::Errno;
use tracing::{info, warn};

use crate::config::options::OffloadChoice;
use crate::device::{Tun, TunError, TunOffload};
use crate::host::netlink::{Netlink, NetlinkError};
use crate::host::state::LinkId;
use crate::route::Prefix;

use super::error::UdpError;

/// flannel's name for the device; the kernel puts the first free number in.
const DEVICE_TEMPLATE: &str = "flannel%d";

/// Whose device it is: the tunnel's port, which only one weftd can have, and the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) port: u16,
    pub(super) network: Prefix,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ALIAS_PREFIX} {} {}", self.port, self.network)
    }
}

/// What the alias of each kept device begins with.
const ALIAS_PREFIX: &str = "weft udp";

/// Opens the device that an earlier weftd has kept, or a new one: one queue for each worker.
pub(super) async fn open(
    netlink: &Netlink,
    owner: Owner,
    offload: OffloadChoice,
    worker_count: NonZeroU16,
    is_kept: bool,
) -> Result<Vec<Tun>, UdpError> {
    let queues = match adopt(netlink, owner, offload, worker_count).await? {
        Some(queues) => queues,
        None => open_queues(DEVICE_TEMPLATE, offload, worker_count)?,
    };
    settle(netlink, &queues[0], owner, is_kept).await?;
    Ok(queues)
}

/// Has the device outlive weftd, or not.
pub(super) async fn settle(
    netlink: &Netlink,
    tun: &Tun,
    owner: Owner,
    is_kept: bool,
) -> Result<(), UdpError> {
    let link = netlink.link_just_made(&tun.name).await?;
    let alias = if is_kept { owner.to_string() } else { String::new() };
    if link.alias.unwrap_or_default() != alias {
        netlink.set_alias(&link.id, &alias).await?;
    }
    let keep = |source| TunError::Keep { name: tun.name.clone(), source };
    Ok(tun.set_kept(is_kept).map_err(keep)?)
}

/// Opens one queue of the device for each worker; never none.
pub(super) fn open_queues(
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
            "flows cannot be pinned to workers, packets may be reordered: {error}; grant CAP_BPF, \
             or use --workers=1"
        );
    }
    Ok(queues)
}

/// Removes the kept devices of `network`, or all, that no process has.
pub(crate) async fn remove_kept(
    netlink: &Netlink,
    network: Option<Prefix>,
) -> Result<Vec<LinkId>, NetlinkError> {
    let end = network.map(|network| format!(" {network}")).unwrap_or_default();
    let mut removed = Vec::new();
    for link in netlink.links().await? {
        let alias = link.alias.unwrap_or_default();
        if alias.starts_with(ALIAS_PREFIX) && alias.ends_with(&end) && !link.has_carrier {
            netlink.remove_link(&link.id).await?;
            removed.push(link.id);
        }
    }
    Ok(removed)
}

/// Opens a kept device; one that is of no use any more is removed.
async fn adopt(
    netlink: &Netlink,
    owner: Owner,
    offload: OffloadChoice,
    worker_count: NonZeroU16,
) -> Result<Option<Vec<Tun>>, UdpError> {
    let of_port = format!("{ALIAS_PREFIX} {} ", owner.port);
    let links = netlink.links().await?;
    let mut kept = links.into_iter().filter_map(|link| Some((link.id, link.alias?)));
    let Some((device, alias)) = kept.find(|(_, alias)| alias.starts_with(&of_port)) else {
        return Ok(None);
    };
    if alias == owner.to_string() {
        match open_queues(&device.name, offload, worker_count) {
            Ok(queues) => {
                info!("going on with {device}, which the last weftd has kept");
                return Ok(Some(queues));
            }
            // Made for one worker, and now there are several, or the other way round.
            Err(TunError::Open { source, .. }) if is_other_kind(&source) => {}
            Err(error) => return Err(error.into()),
        }
    }
    info!("removing {device}, which the last weftd has kept, and which does not fit any more");
    netlink.remove_link(&device).await?;
    Ok(None)
}

fn is_other_kind(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::INVAL)
}
